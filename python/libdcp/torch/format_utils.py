"""One file of torch.save instead of a checkpoint directory: `torch.distributed.checkpoint.format_utils`.

    python -m libdcp.torch.format_utils {torch_to_dcp,dcp_to_torch} SOURCE TARGET
"""

import argparse
import os
import sys

import torch.distributed as dist
import torch.distributed.checkpoint.format_utils as _original
from torch.distributed.checkpoint.planner import LoadItemType

from .. import _core
from . import _broadcast
from ._mirror import attributes
from .default_planner import DefaultLoadPlanner
from .filesystem import done

__all__ = list(_original.__all__)


class BroadcastingTorchSaveReader(_original.BroadcastingTorchSaveReader):
    """Reads a torch.save file on one rank, which sends each tensor to the others; for use with DynamicMetaLoadPlanner.

    The file is read in pieces of bounded size, by the coordinator alone, and nothing in it is executed. coordinator_rank counts
    within the group that loads. Ranks take their parts of sharded tensors; dtypes may differ from those in the file. Without a
    process group, or with no_dist, the one process reads by itself.
    """

    _process_group = None
    _is_alone = False  # even where there is a process group

    def _join(self, process_group, no_dist):
        """Called by libdcp's load: who loads together."""
        self._process_group, self._is_alone = process_group, no_dist

    def set_up_storage_reader(self, metadata, is_coordinator):
        self.is_coordinator = is_coordinator
        if is_coordinator and self._rank() != self.coordinator_rank:
            raise AssertionError(f"Coordinator rank mismatch: expected {self.coordinator_rank}, got {self._rank()}")
        if self.checkpoint_id is None:
            raise AssertionError("checkpoint_id must be set before setting up storage reader")

    def read_data(self, plan, planner):
        is_alone = self._is_alone or not (dist.is_available() and dist.is_initialized())
        ranks = _broadcast.Ranks(self._process_group, self.coordinator_rank, is_alone)
        self._join(None, False)  # the next load may be PyTorch's, which says nothing
        _broadcast.load(
            plan.items,
            planner,
            self._refuse_objects,
            lambda: _TorchFile(self.checkpoint_id, getattr(planner, "flatten_state_dict", True)),
            ranks,
            getattr(planner, "allow_partial_load", False) is True,
        )
        return done(None)

    def _refuse_objects(self, items):
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                raise RuntimeError(
                    f"Non-tensor value identified at {item.storage_index.fqn}. At this time {type(self).__name__} only supports"
                    " loading Tensors."
                )

    def _rank(self):
        if self._is_alone:
            return 0
        try:
            return dist.get_rank(self._process_group)
        except (RuntimeError, ValueError):  # there is no process group
            return 0


class DynamicMetaLoadPlanner(DefaultLoadPlanner, _original.DynamicMetaLoadPlanner):
    """Plans by the state that is loaded into, for files that have no metadata. Every entry must be a tensor."""


class _TorchFile:
    """An open file with the names that a target uses: of nested entries where those are flattened, else of top-level ones."""

    def __init__(self, path, is_flat):
        self._checkpoint = _core.open(path)
        self._is_flat = is_flat
        self.item = self._checkpoint.item
        self.read_many = self._checkpoint.read_many

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._checkpoint.close()

    def names(self):
        names = self._checkpoint.names()
        return names if self._is_flat else [name for name in names if len(self.item(name)[5]) == 1]


def dcp_to_torch_save(dcp_checkpoint_dir, torch_save_path):
    """Makes one torch.save file, nested as the state was, of a checkpoint directory. In bounded memory, and read back before the
    file gets its name; one that is there is replaced."""
    _core.convert(dcp_checkpoint_dir, torch_save_path, form="torch", overwrite=True)


def torch_save_to_dcp(torch_save_path, dcp_checkpoint_dir):
    """Makes a checkpoint directory of a torch.save file. In bounded memory, and read back before it is published; a checkpoint
    that is there is replaced."""
    _core.convert(torch_save_path, dcp_checkpoint_dir, form="dcp", overwrite=True)


MODES = {
    "torch_to_dcp": (os.path.isfile, torch_save_to_dcp),
    "dcp_to_torch": (os.path.isdir, dcp_to_torch_save),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m libdcp.torch.format_utils")
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("src", help="file or directory to read")
    parser.add_argument("dst", help="directory or file to write")
    options = parser.parse_args(arguments)
    is_there, convert = MODES[options.mode]
    if not is_there(options.src):
        print(f"No checkpoint found at {options.src}. Skipping conversion.", file=sys.stderr)
        return 1
    print(f"Converting checkpoint from {options.src} to {options.dst} using method: '{options.mode}'")
    try:
        convert(options.src, options.dst)
    except (_core.Error, OSError, RuntimeError, ValueError) as error:
        print(f"{options.src}: {error}", file=sys.stderr)
        return 1
    return 0


__getattr__, __dir__ = attributes(__name__)

if __name__ == "__main__":
    sys.exit(main())
