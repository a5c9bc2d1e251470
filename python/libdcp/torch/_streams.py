"""Checkpoints through Python's streams: file systems of a program or of fsspec, and stream transforms that only Python has.

The rules are those of the C library: what is there stays until the new checkpoint is complete, an error in any thread fails the save,
and nothing in a file is executed. Ranges are read in ascending order, neighbours together.
"""

import concurrent.futures
import contextlib
import io
import os
import pathlib
import pickle
import tempfile
import warnings

import torch
import torch.distributed.checkpoint.filesystem as _original
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .. import _core
from . import _describe, _metadata, _pieces, _safetensors

# What is fetched at once, unless a single record has more; and the gap between two records over which one read goes on.
BATCH_BYTES = 64 << 20
GAP_BYTES = 64 << 10
ZIP = b"PK"
METADATA = ".metadata"


def metadata_path(storage, rank=None):
    """Of a checkpoint's metadata, or of what a rank has saved by itself."""
    return storage.fs.concat_path(storage.path, METADATA if rank is None else f"__{rank}{METADATA}")


# ---- writing ----


class Sync:
    """Makes streams durable where they have a file; elsewhere a successful close has to do, which is said once."""

    def __init__(self):
        self._has_warned = False

    def __call__(self, stream):
        stream.flush()
        try:
            file = stream.fileno()
        except (AttributeError, OSError):
            if not self._has_warned:
                self._has_warned = True
                warnings.warn("fsync not supported for this stream: it is flushed and closed instead", stacklevel=2)
            return
        os.fsync(file)


def write_data(writer, plan, planner):
    """A future of the results for a plan's items, which go to files of the plan's prefix."""
    if writer.single_file_per_rank:
        groups = _original._split_by_size_and_type(max(writer.thread_count, 1), plan.items)
    else:
        groups = [[item] for item in plan.items]
    names = [f"{plan.storage_data.prefix}{number}{_original.DEFAULT_SUFFIX}" for number in range(len(groups))]
    writer._written = names
    try:
        with concurrent.futures.ThreadPoolExecutor(max(writer.thread_count, 1)) as threads:
            work = [threads.submit(_write_file, writer, planner, *file) for file in zip(names, groups)]
            results = [result for one in work for result in one.result()]
    except BaseException:
        writer._written = []
        remove(writer, names)
        raise
    future = Future()
    future.set_result(results)
    return future


def remove(storage, names):
    for name in names:
        with contextlib.suppress(OSError):  # it may not be there
            storage.fs.rm_file(storage.fs.concat_path(storage.path, name))


def _write_file(writer, planner, name, items):
    is_safetensors = writer.serialization_name() != "torch_save"
    objects = [item for item in items if item.type == WriteItemType.BYTE_IO]
    tensors = [item for item in items if item.type != WriteItemType.BYTE_IO]
    with writer.fs.create_stream(writer.fs.concat_path(writer.path, name), "wb") as stream:
        results = [_write_record(writer, stream, planner.resolve_data(item), item, name) for item in objects]
        if is_safetensors:
            results += _write_safetensors(stream, planner, tensors, name)
        else:
            results += [_write_record(writer, stream, _compact(_resolved(planner, item)), item, name) for item in tensors]
        if writer.sync_files:
            writer._sync(stream)
    return results


def _resolved(planner, item):
    tensor = planner.resolve_data(item)
    if isinstance(tensor, torch.Tensor) and _describe.is_storable(tensor):
        _describe.check_memory(item.index.fqn, tensor)
    return tensor


def _compact(tensor):
    """A tensor on the host whose storage holds nothing but its own elements."""
    tensor = _describe.on_host(tensor.detach())
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def _write_record(writer, stream, data, item, name):
    offset = stream.tell()
    with contextlib.ExitStack() as closing:
        output, descriptors = _transformed(writer.transforms, item, stream, closing)
        if isinstance(data, io.BytesIO):
            _safetensors.write_all(output, data.getbuffer())
        else:
            torch.save(data, output)
    info = _original._StorageInfo(name, offset, stream.tell() - offset)
    if descriptors:
        info.transform_descriptors = descriptors
    return WriteResult(item.index, info.length, info)


def _transformed(transforms, item, stream, closing):
    """The stream that an item is written to, and what has to be undone, in that order, when it is read.

    The item passes through the first extension first. PyTorch builds its chain the other way round, but lists it as this one,
    so that what it writes with two different extensions cannot be read.
    """
    if type(transforms) is not _original._StorageWriterTransforms:
        output, descriptors = transforms.transform_save_stream(item, stream)
        closing.callback(output.close)
        return output, descriptors
    output = _KeepOpen(stream)
    for extension in reversed(transforms.extensions):
        output = extension.transform_to(output)
        closing.callback(output.close)
    return output, [extension.get_descriptor() for extension in reversed(transforms.extensions)]


class _KeepOpen(io.RawIOBase):
    """A file that the next item goes to as well: closing it flushes it."""

    def __init__(self, stream):
        self._stream = stream

    def writable(self):
        return True

    def write(self, data):
        view = memoryview(data).cast("B")
        _safetensors.write_all(self._stream, view)
        return len(view)

    def flush(self):
        self._stream.flush()

    def close(self):
        self.flush()


def _write_safetensors(stream, planner, items, name):
    """All tensors of a file as one safetensors part at its end. The place of each is the part's."""
    if len({item.index.fqn for item in items}) < len(items):
        raise ValueError(f"{name}: two shards of one tensor cannot be stored together as safetensors")
    offset = stream.tell()
    places = _safetensors.write(items, lambda item: _resolved(planner, item), output=stream)
    return [
        WriteResult(item.index, length, _original._StorageInfo(name, offset, length)) for item, (_, length) in zip(items, places)
    ]


def generation_of(writer):
    """What makes the names of new files differ from those of the checkpoint that is there; "" if there is none."""
    return writer.save_id.replace("-", "")[:8] if writer.fs.exists(metadata_path(writer)) else ""


def finish(writer, metadata, results):
    """Publishes the metadata, then removes what only the old checkpoint used."""
    metadata.version = _metadata.FORMAT_VERSION
    metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
    metadata.storage_meta = writer.storage_meta()
    rank = None if writer.use_collectives else writer.rank
    path = metadata_path(writer, rank)
    old = _files_of_old(writer, path)
    _publish(writer, path, _metadata_bytes(writer, metadata, rank))
    remove(writer, old - {info.relative_path for info in metadata.storage_data.values()})


def _files_of_old(writer, path):
    if not writer.fs.exists(path):
        return set()
    try:
        rows = _rows_of(writer, path)
    except (_core.Error, OSError, ValueError):
        return set()  # nothing is known of it, so nothing is removed
    return {part[2] for row in rows for part in row[5]}


def _publish(writer, path, data):
    if not replaces_by_renaming(writer.fs):
        _write_whole(writer, path, data)  # there is no half an object: it appears when the stream is closed
        return
    temporary = f"{path}.tmp"
    _write_whole(writer, temporary, data)
    writer.fs.rename(temporary, path)


def _write_whole(writer, path, data):
    with writer.fs.create_stream(path, "wb") as stream:
        _safetensors.write_all(stream, memoryview(data))
        if writer.sync_files:
            writer._sync(stream)


def replaces_by_renaming(fs):
    """Whether renaming is one step, as in a file system, and no copy of an object that is then removed."""
    return getattr(fs, "renames_at_once", True)


def _metadata_bytes(writer, metadata, rank):
    """The metadata in the form that every release reads; of a single rank in PyTorch's."""
    if rank is not None:
        return pickle.dumps(metadata)
    rows = _metadata.rows_from_metadata(metadata)
    with tempfile.TemporaryDirectory(prefix="libdcp-") as folder:
        claim = _core.claim(folder, save_id=writer.save_id, checkpoint_id=os.fspath(writer.path))
        claim.publish(rows)
        return pathlib.Path(folder, METADATA).read_bytes()


# ---- reading ----


def read_metadata(reader, rank=None):
    path = metadata_path(reader, rank)
    with _opened_metadata(reader, path) as checkpoint:
        metadata = _metadata.metadata_of(checkpoint)
    metadata.storage_meta.load_id = reader.load_id
    return metadata


def _rows_of(storage, path):
    with _opened_metadata(storage, path) as checkpoint:
        return checkpoint.rows()


@contextlib.contextmanager
def _opened_metadata(storage, path):
    """A checkpoint whose metadata alone is here, so that the C library can look into it: nothing in it is executed."""
    with storage.fs.create_stream(path, "rb") as stream:
        data = _read_to_end(stream)
    with tempfile.TemporaryDirectory(prefix="libdcp-") as folder:
        pathlib.Path(folder, METADATA).write_bytes(data)
        with _core.open(folder, allow_outside=True) as checkpoint:
            yield checkpoint


def _read_to_end(stream):
    parts = []
    while part := stream.read(1 << 20):  # raw streams may return less than there is
        parts.append(part)
    return b"".join(parts)


def read_data(reader, plan, planner):
    """Fetches what the items of a plan want, each record once, and gives it to the planner."""
    records = {}
    for item in plan.items:
        info = reader.storage_data[item.storage_index]
        descriptors = tuple(getattr(info, "transform_descriptors", None) or ())
        records.setdefault((info.relative_path, info.offset, info.length, descriptors), []).append(item)
    for batch in batches(sorted(records)):
        for place, data in zip(batch, fetch(reader, batch)):
            _deliver(reader, planner, place, data, records[place])
    future = Future()
    future.set_result(None)
    return future


def batches(places):
    batch, size = [], 0
    for place in places:
        if batch and size + place[2] > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(place)
        size += place[2]
    if batch:
        yield batch


def fetch(reader, places):
    """The bytes of each place; places are sorted."""
    ranges, inside = [], []  # [name, start, end]; (number of the range, place)
    for place in places:
        name, start, end = place[0], place[1], place[1] + place[2]
        if ranges and ranges[-1][0] == name and start - ranges[-1][2] <= GAP_BYTES:
            ranges[-1][2] = max(ranges[-1][2], end)
        else:
            ranges.append([name, start, end])
        inside.append((len(ranges) - 1, place))
    read = getattr(reader.fs, "read_ranges", None) or (lambda wanted: _read_ranges(reader.fs, wanted))
    blocks = read([(reader.fs.concat_path(reader.path, name), start, end) for name, start, end in ranges])
    for (name, start, end), block in zip(ranges, blocks, strict=True):
        if len(block) != end - start:
            raise EOFError(f"{name}: {len(block)} bytes where there should be {end - start}, from offset {start}")
    return [memoryview(blocks[number])[place[1] - ranges[number][1] :][: place[2]] for number, place in inside]


def _read_ranges(fs, ranges):
    """Ranges (path, start, end), one stream for each file."""
    blocks = []
    with contextlib.ExitStack() as files:
        opened, stream = None, None
        for path, start, end in ranges:
            if path != opened:
                files.close()
                opened, stream = path, files.enter_context(fs.create_stream(path, "rb"))
            stream.seek(start)
            blocks.append(_read_exactly(stream, end - start))
    return blocks


def _read_exactly(stream, length):
    """Up to `length` bytes; fewer only at the end of the file."""
    parts = []
    while length and (part := stream.read(length)):
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _deliver(reader, planner, place, data, items):
    name, offset, _, descriptors = place
    try:
        data = _untransformed(reader, items[0], descriptors, data)
        is_record = bytes(data[:2]) == ZIP
        tensor = None
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            if not is_record:  # all tensors of a file in this form have the same place
                tensor = _tensor_among(reader, name, offset, item.storage_index)
            elif tensor is None:
                tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            deliver_tensor(planner, item, tensor)
    except Exception as error:
        error.add_note(f"in {name} at offset {offset}")
        raise


def _tensor_among(reader, file, offset, index):
    """A tensor in the safetensors part of a file, which starts at `offset`."""
    length = int.from_bytes(_read_range(reader, file, offset, 8), "little")
    if length > _safetensors.HEADER_LIMIT_BYTES:
        raise ValueError(f"{file}: neither a torch.save record nor safetensors at offset {offset}")
    entry = _safetensors.entry_in(_read_range(reader, file, offset + 8, length), index)
    begin, end = entry["data_offsets"]
    data = bytearray(_read_range(reader, file, offset + 8 + length + begin, end - begin))
    return _safetensors.tensor_of(entry, data)


def _read_range(reader, file, offset, length):
    [data] = fetch(reader, [(file, offset, length, ())])
    return data


def _untransformed(reader, item, descriptors, data):
    if not descriptors:
        return data
    transforms = reader.transforms
    if type(transforms) is not _original._StorageReaderTransforms:
        return transforms.transform_load_stream(item, descriptors, io.BytesIO(data)).read(-1)
    stream = io.BytesIO(data)
    for extension in transforms.extension_registry.from_descriptor_list(descriptors):
        if isinstance(extension, StreamTransformExtension):
            stream = extension.transform_from(stream)
    return _read_to_end(stream)


def deliver_tensor(planner, item, tensor):
    part = _pieces.narrowed(tensor, (0,) * tensor.dim(), item.storage_offsets, item.lengths)
    target = planner.resolve_tensor(item).detach()
    if target.size() != part.size():
        raise AssertionError(f"req {item.storage_index} mismatch sizes {target.size()} vs {part.size()}")
    _describe.check_memory(item.dest_index.fqn, target)
    _pieces.copy(target, part)
    planner.commit_tensor(item, target)
