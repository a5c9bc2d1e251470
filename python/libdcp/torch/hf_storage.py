"""Directories of safetensors files, as Hugging Face has them: `torch.distributed.checkpoint.hf_storage`."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import inspect
import json
import logging
import math
import operator
import os
import pathlib
import re
import tempfile
import uuid

import torch.distributed.checkpoint.hf_storage as _original
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SHARDED_DIR_NAME, SUFFIX, _gen_file_name, _HFStorageInfo
from torch.distributed.checkpoint._hf_utils import _metadata_fn as INDEX
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .. import _core
from . import _metadata, _safetensors, _streams
from ._consolidate_hf_safetensors import consolidate_safetensors_files
from ._mirror import attributes
from .filesystem import FileSystemReader, done, is_local

logger = logging.getLogger(__name__)

__all__ = list(_original.__all__)

# Names of files that PyTorch and we give; those of another generation (model.1-..) are given where the usual ones are taken.
WHOLE = re.compile(r"model(\.\d+)?-\d{5}-of-\d{5}\.safetensors")
SHARD = re.compile(r"shard-\d{5}-model(\.\d+)?-\d{5}-of-\d{5}\.safetensors")
TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp$")  # behind either, until all files are complete


def _use_file_system_of(storage, path, token):
    """Remote places are reached by fsspec, as in PyTorch 2.8; the token is for their protocol."""
    if "://" in os.fspath(path):
        from ._remote import FileSystem  # noqa: PLC0415  needs fsspec

        storage.fs = FileSystem(**({} if token is None else {"token": token}))


class HuggingFaceStorageWriter(_original.HuggingFaceStorageWriter):
    """Writes safetensors files: whole tensors with an index, or each rank's shards, consolidated afterwards if so wanted.

    Files get their names when all of them are complete. Files of an earlier save of the same kind are removed then, as are those
    that a save that was killed left behind; dying between the renames leaves old and new files side by side (`dcptool convert` does
    not). Files of the other kind stay, since they may be somebody's; those that hold names of the save are warned of, since readers
    would mix them with it, or refuse the directory as ours does. Shards say how large the whole tensors are, so that a lost file does
    not pass for a smaller tensor.

    `token` and `save_sharded` are PyTorch 2.8's: what the store wants that the path leads to, and save_distributed's older name.
    """

    _written = ()  # temporary names of this process's files

    def __init__(
        self,
        path,
        fqn_to_index_mapping=None,
        thread_count=1,
        save_distributed=False,
        enable_consolidation=False,
        thread_count_consolidation=1,
        *,
        token=None,
        save_sharded=False,
    ):
        options = {
            "fqn_to_index_mapping": fqn_to_index_mapping,
            "thread_count": thread_count,
            "save_distributed": save_distributed or save_sharded,
            "enable_consolidation": enable_consolidation,
            "thread_count_consolidation": thread_count_consolidation,
        }
        known = inspect.signature(_original.HuggingFaceStorageWriter.__init__).parameters  # fewer in 2.8
        super().__init__(path, **{name: value for name, value in options.items() if name in known})
        vars(self).update(options)
        self._token = token
        self._sync = _streams.Sync()
        self._place(path)

    def reset(self, checkpoint_id=None):
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._place(checkpoint_id)

    def _place(self, path):
        """Whole tensors go to `path`; shards that are to be consolidated to a directory below."""
        _use_file_system_of(self, path, self._token)
        self.path = self.fs.init_path(path)
        self.consolidated_output_path = None
        if self.enable_consolidation and self.save_distributed:
            self.consolidated_output_path = str(self.path)
            if "://" in self.consolidated_output_path:
                raise ValueError(f"enable_consolidation needs a local directory, and {path} is none")
            self.path = self.fs.concat_path(self.path, SHARDED_DIR_NAME)

    def prepare_local_plan(self, plan):
        if not self.use_collectives:
            self._check_alone()
        for item in plan.items:
            self._check(item)
        self.fs.mkdir(self.path)
        return plan

    def _check_alone(self):
        """Without collectives ranks know nothing of each other's files."""
        if self.consolidated_output_path is not None:
            raise ValueError("enable_consolidation needs collectives: shards are put together when all ranks have written theirs")
        if self.rank and not self.save_distributed:
            raise ValueError(f"rank {self.rank} saves whole tensors without collectives: ranks would replace each other's files")

    def _check(self, item):
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            raise _core.UnsupportedError(f"{name} is no tensor, and safetensors files hold nothing else")
        data = item.tensor_data
        _safetensors.check(name, data.properties.dtype)
        if self.fqn_to_index_mapping is not None and name not in self.fqn_to_index_mapping:
            raise ValueError(f"{name} is missing from fqn_to_index_mapping: no file is chosen for it")
        if not self.save_distributed and tuple(data.chunk.sizes) != tuple(data.size):
            raise ValueError(
                f"{name}: this process has {tuple(data.chunk.sizes)} of {tuple(data.size)}; shards need save_distributed=True"
            )

    def prepare_global_plan(self, plans):
        """Decides the names of all files: a list of names for each rank, and for each of its items a place in that list."""
        first = 0 if self.use_collectives else self.rank or 0
        layout = _Layout(self.fqn_to_index_mapping, self.save_distributed, plans, first)
        suffix = f".{uuid.uuid4().hex}.tmp"
        return [
            dataclasses.replace(plan, storage_data={"files": layout.files_of(rank), "suffix": suffix})
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan, planner):
        by_file = collections.defaultdict(list)
        for item, name in zip(plan.items, plan.storage_data["files"], strict=True):
            if _is_stored(item.tensor_data):
                by_file[name].append(item)
        suffix = plan.storage_data["suffix"]
        self._written = [name + suffix for name in by_file]
        try:
            with concurrent.futures.ThreadPoolExecutor(max(self.thread_count, 1)) as threads:
                work = [threads.submit(self._write_file, name, suffix, items, planner) for name, items in by_file.items()]
                return done([result for one in work for result in one.result()])
        except BaseException:
            self._abandon()
            raise

    def _write_file(self, name, suffix, items, planner):
        temporary = name + suffix
        if is_local(self):
            places = _safetensors.write(items, planner.resolve_data, path=self.path, name=temporary, sync=self.sync_files)
        else:
            with self.fs.create_stream(self.fs.concat_path(self.path, temporary), "wb") as stream:
                places = _safetensors.write(items, planner.resolve_data, output=stream)
                if self.sync_files:
                    self._sync(stream)
        return [
            WriteResult(item.index, length, _StorageInfo(temporary, offset, length))
            for item, (offset, length) in zip(items, places)
        ]

    def _begin(self, background=None):
        self._written = []

    def _abandon(self):
        """After a save that did not come to its end. Nobody else gives files such names."""
        written, self._written = self._written, []
        _streams.remove(self, written)

    def finish(self, metadata, results):
        places = [result for of_rank in results for result in of_rank]
        names = self._names() if self.use_collectives else set()  # without collectives other ranks may still be writing
        old = self._old_files(names) | self._unfinished(names)
        files = {}
        for result in places:
            temporary = result.storage_data.relative_path
            files[temporary] = result.storage_data.relative_path = TEMPORARY.sub("", temporary)
        try:
            for temporary, name in files.items():
                self._rename(temporary, name)
        except BaseException:
            _streams.remove(self, files)
            raise
        _streams.remove(self, old - set(files) - set(files.values()))
        self._warn_of_others(names - old - set(files.values()), {result.index.fqn for result in places})
        if not self.save_distributed:
            self._write_index(places)
        elif self.consolidated_output_path is not None:
            self._consolidate(metadata)

    def _rename(self, temporary, name):
        self.fs.rename(self.fs.concat_path(self.path, temporary), self.fs.concat_path(self.path, name))

    def _names(self):
        return {os.path.basename(str(path)) for path in self.fs.ls(self.path)}

    def _unfinished(self, names):
        """Temporary files of this save and of those that did not live to remove theirs. Another save to this place that is still
        running fails for it, as it would mix its files with those of this one."""
        finals = {name: TEMPORARY.sub("", name) for name in names}
        return {name for name, final in finals.items() if final != name and (WHOLE.fullmatch(final) or SHARD.fullmatch(final))}

    def _old_files(self, names):
        """Files of an earlier save of the same kind. Whole files are those of its index; shards tell by their header."""
        if not self.save_distributed:
            return {name for name in self._indexed() if WHOLE.fullmatch(name) and name in names}
        return {name for name in names if SHARD.fullmatch(name) and self._has_sharding_info(name)}

    def _indexed(self):
        try:
            with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "r") as stream:
                return set(json.load(stream)["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return set()

    def _has_sharding_info(self, name):
        return CUSTOM_METADATA_KEY.encode() in self._header(name)

    def _header(self, name):
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            return stream.read(min(int.from_bytes(stream.read(8), "little"), _safetensors.HEADER_LIMIT_BYTES))

    def _warn_of_others(self, names, saved):
        """Files that were there before and stay: what they hold may be somebody's, but it is in the way of what was saved."""
        for name in sorted(name for name in names if name.endswith(".safetensors")):
            try:
                common = saved & json.loads(self._header(name)).keys()
            except (OSError, ValueError, AttributeError):
                continue
            if common:
                logger.warning(
                    "%s/%s holds %s too, and %d more names of this save: remove the file, or what was saved cannot be read from there",
                    self.path, name, min(common), len(common) - 1,
                )  # fmt: skip

    def _write_index(self, results):
        index = {
            "metadata": {"total_size": sum(result.storage_data.length for result in results)},
            "weight_map": {result.index.fqn: result.storage_data.relative_path for result in results},
        }
        temporary = f"{INDEX}.tmp"
        with self.fs.create_stream(self.fs.concat_path(self.path, temporary), "w") as stream:
            json.dump(index, stream, indent=2)
            if self.sync_files:
                self._sync(stream)
        self._rename(temporary, INDEX)

    def _consolidate(self, metadata):
        mapping = self.fqn_to_index_mapping or dict.fromkeys(metadata.state_dict_metadata, 1)
        consolidate_safetensors_files(
            input_dir=str(self.path),
            output_dir=self.consolidated_output_path,
            fqn_to_index_mapping={name: mapping[name] for name in metadata.state_dict_metadata},
            num_threads=self.thread_count_consolidation,
        )


def _is_stored(data):
    """False for empty parts of a tensor that has elements, as ranks beyond its rows have. A file of nothing else would not say that
    it is one of shards, and consolidation takes none that does not."""
    return 0 not in data.chunk.sizes or 0 in data.size


class _Layout:
    """Which file each item of each rank goes to.

    A file cannot hold two shards of one name, so a rank that has several of a tensor puts them into several files. And files of
    whole tensors have one writer each.
    """

    def __init__(self, mapping, is_sharded, plans, first_rank):
        self._first_rank = first_rank
        self._mapping = mapping
        self._is_sharded = is_sharded
        self._highest = max(mapping.values(), default=1) if mapping else 1
        self._numbers = [self._numbers_of(plan) for plan in plans]
        self._copies = max((copy for numbers in self._numbers for _, copy in numbers), default=0) + 1
        if not is_sharded:
            self._separate(plans)

    def files_of(self, rank):
        total = self._highest * self._copies
        return [
            _gen_file_name(index + copy * self._highest, total, self._first_rank + rank + 1 if self._is_sharded else None)
            for index, copy in self._numbers[rank]
        ]

    def _numbers_of(self, plan):
        """(index of the file, how many shards of the name came before) of each item."""
        seen = collections.Counter()
        numbers = []
        for item in plan.items:
            name = item.index.fqn
            numbers.append((self._mapping[name] if self._mapping else 1, seen[name]))
            seen[name] += 1
        return numbers

    def _separate(self, plans):
        """Several ranks with whole tensors: without a mapping each gets a file of its own."""
        writers = [rank for rank, plan in enumerate(plans) if plan.items]
        if self._mapping:
            self._refuse_shared_files(writers)
            return
        self._highest = max(len(writers), 1)
        for position, rank in enumerate(writers, 1):
            self._numbers[rank] = [(position, copy) for _, copy in self._numbers[rank]]

    def _refuse_shared_files(self, writers):
        owner = {}
        for rank in writers:
            for index, _ in self._numbers[rank]:
                if owner.setdefault(index, rank) != rank:
                    raise ValueError(
                        f"ranks {owner[index]} and {rank} both have tensors for file {index}: save from one rank (no_dist=True), or"
                        " with save_distributed=True"
                    )


class HuggingFaceStorageReader(FileSystemReader, _original.HuggingFaceStorageReader):
    """Reads every safetensors file directly in a directory, of this library, PyTorch or others, whole or as shards.

    Only what is asked for is read. With a thread_count each thread takes whole files, and asks the planner for their targets.
    From other file systems than the local one whole shards of tensors are read. `token` is as in the writer.
    """

    _token = None
    _ranges = None  # index of a shard -> (file, offset, length, ()), where files are streams

    def __init__(self, path, thread_count=1, *, token=None):
        _original.HuggingFaceStorageReader.__init__(self, path)
        self.thread_count = thread_count
        self._token = token
        self._place(path)

    def reset(self, checkpoint_id=None):
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._place(checkpoint_id)

    def _place(self, path):
        _use_file_system_of(self, path, self._token)
        self.path = self.fs.init_path(path)

    def read_data(self, plan, planner):
        if self._ranges is not None:
            return self._read_streams(plan, planner)
        files = collections.defaultdict(list)
        for item in plan.items:
            files[self.storage_data[item.storage_index].relative_path].append(item)
        if not self._reads_in_c() or self.thread_count <= 1 or len(files) <= 1:
            return super().read_data(plan, planner)
        with concurrent.futures.ThreadPoolExecutor(self.thread_count) as threads:
            work = [threads.submit(self._read_tensors, items, planner) for items in files.values()]
            try:
                for one in concurrent.futures.as_completed(work):
                    one.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return done(None)

    def read_metadata(self):
        self._ranges = None
        if is_local(self):
            self._checkpoint = self._opened(self.path)
            metadata = _metadata.metadata_of(self._checkpoint)
        else:
            with self._headers() as folder, self._opened(folder) as checkpoint:
                metadata = _metadata.metadata_of(checkpoint)
            self._ranges = {
                index: (info.relative_path, info.offset, info.length, ()) for index, info in metadata.storage_data.items()
            }
        metadata.storage_data = self._places(metadata)
        metadata.planner_data = None
        metadata.storage_meta.load_id = self.load_id
        self._known_storage = metadata.storage_data
        return metadata

    def _opened(self, folder):
        checkpoint = _core.open(folder, allow_shard_gaps=True)
        layout = checkpoint.info()["layout"]
        if layout != "hugging face":
            raise _core.NotFoundError(f"{self.path} is no directory of {SUFFIX} files, but {layout}")
        return checkpoint

    @contextlib.contextmanager
    def _headers(self):
        """A local directory with the headers of all files, each as long as its file is to be, for the C library to look into."""
        with tempfile.TemporaryDirectory(prefix="libdcp-") as folder:
            for path in self.fs.ls(self.path):
                name = os.path.basename(str(path))
                if name == INDEX or name.endswith(SUFFIX):
                    with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                        start, length = (stream.read(), 0) if name == INDEX else _safetensors.read_header(stream, name)
                    with open(pathlib.Path(folder, name), "wb") as file:
                        file.write(start)
                        file.truncate(len(start) + length)
            yield folder

    def _read_streams(self, plan, planner):
        self._refuse_overlaps(plan.items)
        wanted = collections.defaultdict(list)
        for item in plan.items:
            wanted[self._ranges[item.storage_index]].append(item)
        for batch in _streams.batches(sorted(wanted)):
            for place, data in zip(batch, _streams.fetch(self, batch)):
                data = bytearray(data)
                for item in wanted[place]:
                    info = self.storage_data[item.storage_index]
                    _streams.deliver_tensor(planner, item, _safetensors.tensor_in(data, info.dtype, info.shape))
        return done(None)

    def _refuse_overlaps(self, items):
        """As the C library does. Two saves whose files lie side by side give more elements than there is room for."""
        by_target = collections.defaultdict(list)
        for item in items:
            by_target[item.dest_index].append((item.dest_offsets, item.lengths))
        for index, boxes in by_target.items():
            starts, ends = (list(zip(*corners)) for corners in zip(*((o, map(operator.add, o, n)) for o, n in boxes)))
            room = math.prod(max(end) - min(start) for start, end in zip(starts, ends))
            if sum(math.prod(lengths) for _, lengths in boxes) > room:
                raise _core.FormatError(f"{self.path}: item {index.fqn!r}: its chunks overlap")

    def _places(self, metadata):
        """The storage data in PyTorch's form for these files."""
        places = {}
        for name, entry in metadata.state_dict_metadata.items():
            for chunk in entry.chunks:
                index = MetadataIndex(name, chunk.offsets)
                file = os.path.join(self.path, metadata.storage_data[index].relative_path)
                places[index] = _HFStorageInfo(file, chunk.sizes, entry.properties.dtype)
        return places


__getattr__, __dir__ = attributes(__name__)
