"""Directories of the local file system: `torch.distributed.checkpoint.filesystem`, with the writing and reading done in C.

The writer and the reader are subclasses of PyTorch's. Used with nothing overridden, whole saves and loads run in C. Under a planner of
the program, under PyTorch's own `save` and `load`, or in subclasses, each method does its part of the work with the C library:
records, commit and metadata. What the C library does not know (Python file systems and stream transforms) goes through Python's
streams, by the same rules.
"""

import dataclasses
import functools
import inspect
import io
import os
import warnings

import torch
import torch.distributed.checkpoint.filesystem as _original
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _core
from . import _describe, _devices, _metadata, _streams
from ._mirror import attributes
from ._streams import metadata_path
from .staging import BlockingAsyncStager

__all__ = list(_original.__all__)

ZSTD = "stream.zstd/1"


def done(value):
    """A future that has its value."""
    future = Future()
    future.set_result(value)
    return future


def is_local(storage):
    """Whether a reader or writer uses PyTorch's own local file system, so that C may take its place."""
    return type(storage.fs) is _original.FileSystem and not vars(storage.fs)


def has_known_transforms(reader):
    """Whether a reader can undo no other stream transforms than the C library."""
    transforms = reader.transforms
    if type(transforms) is not _original._StorageReaderTransforms:
        return False
    return transforms.extension_registry.extensions == {ZStandard.registry_name(): ZStandard}


class FileSystemWriter(_original.FileSystemWriter, BlockingAsyncStager):
    """Writes checkpoints into a directory. Options and defaults are PyTorch's.

    A checkpoint that is there is replaced as a whole or not at all: its files stay until the new one is published.
    """

    _sync = functools.cached_property(lambda self: _streams.Sync())  # of Python's streams
    _written = ()  # names of files of the current save, as long as nobody else looks after them
    _claim = None  # of the coordinator: the place is ours until it is published or given up
    _background = None  # of the current save, if it is one in the background
    rank = None
    use_collectives = True

    def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)

    def reset(self, checkpoint_id=None):
        self._begin()
        self._abandon()
        super().reset(checkpoint_id)

    def prepare_local_plan(self, plan):
        if not self.use_collectives:
            self._refuse_existing()
        elif self.fs.exists(metadata_path(self)):
            self._replace_existing()
        self.fs.mkdir(self.path)
        if self.rank is not None and not self.use_collectives:
            plan = _with_prefix(plan, f"__{self.rank}_")
        return plan

    def prepare_global_plan(self, plans):
        """Claims the place. When a checkpoint is there, the names of the new files get a generation of their own."""
        generation = ""
        if self.use_collectives and self._writes_in_c():
            self._abandon()
            self._claim = self._claim_place(len(plans))
            generation = self._claim.generation
        elif self.use_collectives:
            generation = _streams.generation_of(self)
        names = ("__{}_{}_" if generation else "__{}_").format
        return [_with_prefix(plan, names(i, generation)) if plan.storage_data is None else plan for i, plan in enumerate(plans)]

    def write_data(self, plan, planner):
        if not self._writes_in_c():
            return _streams.write_data(self, plan, planner)
        return done(self._write_records(plan, planner))

    def finish(self, metadata, results):
        if not (self.use_collectives and self._writes_in_c()):
            _streams.finish(self, metadata, results)
            return
        metadata.version = _metadata.FORMAT_VERSION
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        metadata.storage_meta = self.storage_meta()
        claim = self._claim or self._claim_place(len(results))
        self._claim = None
        try:
            claim.publish(_metadata.rows_from_metadata(metadata))
        finally:
            claim.abort()

    def _claim_place(self, world):
        return _core.claim(
            self.path,
            overwrite=self.overwrite,
            world=world,
            sync=self.sync_files,
            save_id=self.save_id,
            checkpoint_id=os.fspath(self.path),
        )

    def serialization_name(self):
        """The C library's name of the form of records; there was one only before 2.8."""
        chosen = getattr(self, "serialization_format", None)
        return "torch_save" if chosen is None else chosen.value

    def copy_ahead_bytes(self):
        """How much of a device's tensors each writing thread copies to the host before it is wanted."""
        return max(self.per_thread_copy_ahead, 0)

    def transform_name(self):
        """The C library's name of the stream transform; None if there is none. Raises LookupError for those that only Python has."""
        extensions = list(self.transforms.extensions)
        if not extensions:
            return None
        if len(extensions) == 1 and type(extensions[0]) is ZStandard and extensions[0].get_descriptor() == ZSTD:
            return ZSTD
        raise LookupError("stream transforms of the program are applied in Python")

    def _writes_in_c(self):
        if not is_local(self) or type(self.transforms) is not _original._StorageWriterTransforms:
            return False
        try:
            self.transform_name()
        except LookupError:
            return False
        return True

    def _begin(self, background=None):
        self._written = []
        self._background = background

    def _abandon(self):
        """After a save that did not come to its end: gives up the place, and removes what this process has written in Python."""
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.abort()
        written, self._written = self._written, []
        _streams.remove(self, written)

    def _refuse_existing(self):
        for rank in (None, self.rank):
            if self.fs.exists(metadata_path(self, rank)):
                raise RuntimeError(
                    f"Checkpoint already exists: {metadata_path(self, rank)}; without collectives none is ever replaced."
                )

    def _replace_existing(self):
        if not self.overwrite:
            raise RuntimeError(f"Checkpoint already exists in {self.path} and {self.overwrite=}.")
        warn_of_existing(self.path)

    def _write_records(self, plan, planner):
        data = [planner.resolve_data(item) for item in plan.items]
        sources = _describe.Sources()
        records = [_record(item, value, sources) for item, value in zip(plan.items, data)]
        places = _core.write_items(
            self.path,
            plan.storage_data.prefix,
            records,
            files=self.thread_count,
            threads=self.thread_count,
            file_per_item=not self.single_file_per_rank,
            sync=self.sync_files,
            transform=self.transform_name(),
            serialization=self.serialization_name(),
            stream=sources.devices.stream(),
            copy_ahead_bytes=self.copy_ahead_bytes(),
            progress=self._background and self._background.control,
            helper=self._background and self._background.helper,
        )
        return [WriteResult(item.index, place[2], self._storage_info(place)) for item, place in zip(plan.items, places)]

    def _storage_info(self, place):
        info = _original._StorageInfo(*place)
        if self.transforms.extensions:
            info.transform_descriptors = [ZSTD]
        return info


def warn_of_existing(path):
    warnings.warn(
        f"Detected an existing checkpoint in {path}, overwriting: it holds until the new one is complete. Pass overwrite=False"
        " to have it refused.",
        stacklevel=4,
    )


def _with_prefix(plan, prefix):
    return dataclasses.replace(plan, storage_data=_original._StoragePrefix(prefix))


def _record(item, value, sources):
    """What the C library is given for one write item."""
    if item.type == WriteItemType.BYTE_IO:
        if not hasattr(value, "getbuffer"):
            raise AssertionError("Data must be io.BytesIO for BYTE_IO write items")
        return (value.getbuffer(),)
    if not isinstance(value, torch.Tensor):
        raise AssertionError("Data must be torch.Tensor for non-BYTE_IO write items")
    value = value.detach()
    if not _describe.is_storable(value):
        raise NotImplementedError(
            f"{item.index.fqn}: a tensor of class {type(value).__name__} and layout {value.layout} has no elements to write"
        )
    _describe.check_memory(item.index.fqn, value)
    return _describe.whole(value, sources.readable(value))


class FileSystemReader(_original.FileSystemReader):
    """Reads checkpoints from a directory. Of a record only what is asked for is read, and nothing in a file is executed."""

    _checkpoint = None  # what read_metadata has opened
    _known_storage = None  # the storage data that came from it
    rank = None
    use_collectives = True

    def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self.storage_data = metadata.storage_data
        if self.storage_data is None:
            raise AssertionError("storage_data must not be None in metadata")

    def reset(self, checkpoint_id=None):
        self._checkpoint = self._known_storage = None
        super().reset(checkpoint_id)

    def read_metadata(self, *args, **kwargs):
        rank = kwargs.get("rank")
        if not is_local(self):
            return _streams.read_metadata(self, rank)
        checkpoint = _core.open(self.path, rank=-1 if rank is None else rank)
        if rank is None and checkpoint.info()["layout"].startswith("rank-local"):
            raise FileNotFoundError(f"{metadata_path(self)}: ranks were saved here each by itself")
        metadata = _metadata.metadata_of(checkpoint)
        metadata.storage_meta.load_id = self.load_id
        self._checkpoint, self._known_storage = checkpoint, metadata.storage_data
        return metadata

    def read_data(self, plan, planner):
        if not self._reads_in_c():
            return _streams.read_data(self, plan, planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._read_object(item, planner)
        self._read_tensors([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner)
        return done(None)

    def _reads_in_c(self):
        """Not on a file system of the program's own, from places that it has changed, or with stream transforms that it brings."""
        if self._checkpoint is None or self.storage_data is not self._known_storage:
            return False
        return has_known_transforms(self)

    def _read_object(self, item, planner):
        planner.load_bytes(item, io.BytesIO(self._checkpoint.object_bytes(item.storage_index.fqn)))

    def _read_tensors(self, items, planner):
        """One item after the other: a planner may use the same memory for all that it resolves."""
        for item in items:
            target = planner.resolve_tensor(item).detach()
            self._read_box(item, target)
            planner.commit_tensor(item, target)

    def _read_box(self, item, target):
        index = item.storage_index
        if tuple(target.shape) != tuple(item.lengths):
            raise AssertionError(f"req {index} mismatch sizes {target.shape} vs {item.lengths}")
        _describe.check_memory(index.fqn, target)
        starts = index.offset if index.offset is not None else (0,) * len(item.lengths)
        offsets = tuple(start + inner for start, inner in zip(starts, item.storage_offsets))
        _, dtype, *_ = self._checkpoint.item(index.fqn)
        devices = _devices.Devices()
        memory = _describe.readable_into(target, _describe.dtype_of(dtype), devices)
        request = (index.fqn, offsets, tuple(item.lengths), _describe.whole(memory, memory))
        self._checkpoint.read_many([request], stream=devices.stream())
        if memory is not target:
            target.copy_(memory)
        elif not target.is_inference():
            torch.autograd.graph.increment_version([target])  # written to behind autograd's back


def _write_item(*arguments, **named):
    """One record, appended to a stream. Takes the arguments of every release: transforms came first in 2.7, the form last in 2.8."""
    names = list(inspect.signature(_original._write_item).parameters)
    is_old = bool(arguments) and not isinstance(arguments[0], _original._StorageWriterTransforms)
    named.update(zip(names[1:] if is_old else names, arguments))
    named.setdefault("transforms", _original._StorageWriterTransforms())
    if hasattr(_original, "SerializationFormat"):
        named.setdefault("serialization_format", _original.SerializationFormat.TORCH_SAVE)
    else:
        named.setdefault("safe_tensors", False)
    return _original._write_item(**named)


__getattr__, __dir__ = attributes(__name__)
