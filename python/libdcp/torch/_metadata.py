"""The two forms of a checkpoint's metadata: PyTorch's Metadata and the library's rows.

A row is (fqn, kind, dtype, shape, path, parts), a part (offsets, sizes, file, offset, length, transforms): see Checkpoint.rows.
"""

import contextlib

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .. import _core
from .._arrays import UNKNOWN
from ._describe import dtype_name, dtype_of


FORMAT_VERSION = "1.0.0"


def metadata_of(checkpoint):
    """PyTorch's Metadata of an open checkpoint."""
    info = checkpoint.info()
    meta = StorageMeta(checkpoint_id=info.get("checkpoint_id"), save_id=info.get("save_id"))
    return metadata_from_rows(checkpoint.rows(), meta, info.get("version") or None)


def metadata_of_save(path, save_id, rank):
    """The Metadata of a save that has been published, by any rank of it."""
    with contextlib.closing(_core.open(path, rank=-1 if rank is None else rank)) as checkpoint:
        if checkpoint.info().get("save_id") != save_id:
            raise RuntimeError(f"the checkpoint in {path} has been replaced since; its metadata can be had from a FileSystemReader")
        metadata = metadata_of(checkpoint)
    metadata.version = FORMAT_VERSION
    return metadata


def metadata_from_rows(rows, storage_meta, version):
    entries, storage, paths = {}, {}, {}
    for fqn, kind, dtype, shape, path, parts in rows:
        if kind == "tensor":
            entries[fqn] = _tensor_entry(fqn, dtype, shape, parts, storage)
        else:
            entries[fqn] = BytesStorageMetadata()
            for part in parts:
                storage[MetadataIndex(fqn)] = _storage_info(part)
        paths[fqn] = tuple(path)
    return Metadata(entries, planner_data=paths, storage_data=storage, **_newer_fields(storage_meta, version))


def _tensor_entry(fqn, dtype, shape, parts, storage):
    chunks = []
    for position, part in enumerate(parts):
        chunk = ChunkStorageMetadata(torch.Size(part[0]), torch.Size(part[1]))
        chunks.append(chunk)
        storage[MetadataIndex(fqn, chunk.offsets, position)] = _storage_info(part)
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(dtype) if dtype != UNKNOWN else None), torch.Size(shape), chunks)


def _storage_info(part):
    _, _, file, offset, length, transforms = part
    info = _StorageInfo(file, offset, length)
    if transforms:
        info.transform_descriptors = transforms.split(",")
    return info


def _newer_fields(storage_meta, version):
    """Those of 2.4 and 2.9, where the installed PyTorch has them."""
    fields = Metadata.__dataclass_fields__
    wanted = {"storage_meta": storage_meta, "version": version}
    return {name: value for name, value in wanted.items() if name in fields}


def rows_from_metadata(metadata):
    """Raises ValueError for what no checkpoint of libdcp can hold: a planner or writer of the program made it."""
    places = {(index.fqn, None if index.offset is None else tuple(index.offset)): info for index, info in metadata.storage_data.items()}
    rows = []
    for fqn, entry in metadata.state_dict_metadata.items():
        path = _path(metadata.planner_data, fqn)
        if isinstance(entry, BytesStorageMetadata):
            rows.append((fqn, "object", None, None, path, [((), (), *_place(places, fqn, None))]))
            continue
        parts = []
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if _is_nothing(sizes, entry.size):
                continue  # neither PyTorch nor we read anything from it
            parts.append((offsets, sizes, *_place(places, fqn, offsets)))
        rows.append((fqn, "tensor", dtype_name(entry.properties.dtype), tuple(entry.size), path, parts))
    return rows


def _is_nothing(sizes, shape):
    return 0 in sizes and 0 not in shape


def _path(planner_data, fqn):
    if planner_data is None:
        return (fqn,)
    if not isinstance(planner_data, dict):
        raise ValueError(f"planner_data is a {type(planner_data).__name__}, not a dict of paths")
    return tuple(planner_data.get(fqn, (fqn,)))


def _place(places, fqn, offsets):
    info = places.get((fqn, offsets))
    if not isinstance(info, _StorageInfo):
        raise ValueError(f"no place in a file is noted for {fqn!r}" + ("" if offsets is None else f" at {offsets}"))
    return info.relative_path, info.offset, info.length, ",".join(getattr(info, "transform_descriptors", None) or ())


class LazyMetadata(Metadata):
    """The metadata of a save, made when it is first looked into: with many tensors that takes longer than the save itself.
    From then on it is an ordinary Metadata, by its class, too."""

    def __init__(self, build):
        object.__setattr__(self, "_build", build)

    def __getattribute__(self, name):
        if object.__getattribute__(self, "__class__") is LazyMetadata:
            state = object.__getattribute__(self, "__dict__")
            state.update(vars(state["_build"]()))
            object.__setattr__(self, "__class__", Metadata)
            state.pop("_build", None)
        return object.__getattribute__(self, name)
