"""Whole tensors out of shards in safetensors files: `torch.distributed.checkpoint._consolidate_hf_safetensors`."""

import contextlib
import glob
import json
import os
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint._consolidate_hf_safetensors as _original
from torch.distributed.checkpoint._hf_utils import SUFFIX, _gen_file_name, _get_dcp_custom_metadata
from torch.distributed.checkpoint._hf_utils import _get_safetensors_file_metadata as read_header
from torch.distributed.checkpoint._hf_utils import _metadata_fn as INDEX

from .. import _core
from . import _group, _native
from ._mirror import attributes

# Characters that have a meaning in patterns of names.
SPECIAL = str.maketrans({letter: f"\\{letter}" for letter in "\\*?[]"})


def consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads=1):
    """Puts the shards in `input_dir` together into files in `output_dir`: each tensor goes to the file of its index.

    In bounded memory; every dtype is kept bit by bit. What is written is read back before it gets its name. Files of an earlier
    consolidation are replaced. Tensors without an index are left out.
    """
    _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, None)


def consolidate_safetensors_files_on_every_rank(
    input_dir, output_dir, fqn_to_index_mapping, num_threads=1, process_group=None
):
    """The same by the ranks of a group together, each its share of the files. All return when all is done, and raise if one fails."""
    if not (dist.is_available() and dist.is_initialized()):
        _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, None)
        return
    channel = _group.of(process_group)
    with channel.lock:
        _consolidate(input_dir, output_dir, fqn_to_index_mapping, num_threads, _native._core_group(channel))


def _consolidate(input_dir, output_dir, mapping, num_threads, group):
    shards = _names_of_shards(input_dir)
    absent = sorted(mapping.keys() - shards)
    if absent:
        raise ValueError(f"fqn_to_index_mapping names {absent[0]!r}, which no file in {input_dir} has")
    unmapped = sorted(shards - mapping.keys())
    with _index_file(mapping) as index:
        _core.convert(
            input_dir,
            output_dir,
            form="hf",
            exclude=[name.translate(SPECIAL) for name in unmapped],
            mapping=index,
            overwrite=True,
            allow_shard_gaps=True,
            group=group,
            threads=num_threads,
        )


def _names_of_shards(input_dir):
    """Names of the tensors in a directory of shards. Raises ValueError for files that do not say where their parts belong."""
    names = set()
    for file in glob.glob(os.path.join(glob.escape(os.fspath(input_dir)), f"*{SUFFIX}")):
        with open(file, "rb") as stream:
            header, _ = read_header(stream)
        places = _get_dcp_custom_metadata(header)
        if not places:
            raise ValueError(
                f"No DCP custom metadata found in safetensors file {file}. The file must be saved with DCP to be consolidated."
            )
        names.update(places)
    return names


@contextlib.contextmanager
def _index_file(mapping):
    """A file that tells the C library which tensor goes where."""
    highest = max(mapping.values())
    with tempfile.TemporaryDirectory(prefix="libdcp-") as folder:
        path = os.path.join(folder, INDEX)
        with open(path, "w") as stream:
            json.dump({"weight_map": {name: _gen_file_name(index, highest) for name, index in mapping.items()}}, stream)
        yield path


__getattr__, __dir__ = attributes(__name__)
