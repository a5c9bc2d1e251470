#!/usr/bin/env python3
"""Writes a large `.metadata` in the form that PyTorch gives it, without PyTorch.

    gen_metadata.py --tensors 1000 --chunks 256 --release 2.15 OUTPUT

The classes below only look like PyTorch's: they stand under the same module names, so that pickle writes the same opcodes. As in
a save of one process, the offsets of a chunk and of its MetadataIndex are one object; --gathered gives each its own.
"""

import argparse
import enum
import pickle
import sys
import types
import uuid

CHECKPOINT = "torch.distributed.checkpoint.metadata"
SHARD = "torch.distributed._shard.sharded_tensor.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"


def module(name):
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
    return sys.modules[name]


def look_alike(module_name, name, base=object, **body):
    made = type(name, (base,), {"__module__": module_name, "__qualname__": name, **body})
    setattr(module(module_name), name, made)
    return made


class _Global:
    """A dtype: pickled as the global that it is."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


def _get_layout(name):
    return name


for part in ("torch", "torch.serialization", "torch.distributed", "torch.distributed._shard"):
    module(part)
_get_layout.__module__ = "torch.serialization"
module("torch.serialization")._get_layout = _get_layout
Size = look_alike("torch", "Size", tuple, __reduce__=lambda self: (Size, (tuple(self),)))
float32 = _Global("float32")
module("torch").float32 = float32
float32.__module__ = "torch"

Metadata = look_alike(CHECKPOINT, "Metadata")
TensorStorageMetadata = look_alike(CHECKPOINT, "TensorStorageMetadata")
ChunkStorageMetadata = look_alike(CHECKPOINT, "ChunkStorageMetadata")
MetadataIndex = look_alike(CHECKPOINT, "MetadataIndex")
StorageMeta = look_alike(CHECKPOINT, "StorageMeta")
StorageInfo = look_alike(FILESYSTEM, "_StorageInfo")


class Layout:
    def __reduce__(self):
        return _get_layout, ("torch.strided",)


STRIDED = Layout()


def properties_class(release):
    where, name = (SHARD, "MEM_FORMAT_ENCODING") if release < 203 else (CHECKPOINT, "_MEM_FORMAT_ENCODING")
    encoding = enum.Enum(name, {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}, module=where)
    encoding.__reduce_ex__ = lambda self, protocol: (type(self), (self.value,))
    setattr(module(where), name, encoding)

    def getstate(self):
        state = (float32, STRIDED, False, encoding(0), False)
        return state + (self.strides,) if release >= 215 else state

    return look_alike(where, "TensorProperties", __getstate__=getstate)


def make(cls, **fields):
    made = cls()
    made.__dict__.update(fields)
    return made


def build(tensors, chunks, release, gathered):
    Properties = properties_class(release)
    rows, columns = 4, 4096
    states, planner, storage = {}, {}, {}
    paths = [f"__{rank}_0.distcp" for rank in range(chunks)]
    ends = [0] * chunks
    for t in range(tensors):
        fqn = f"model.layers.{t}.mlp.weight"
        planner[fqn] = ("model", "layers", t, "mlp", "weight") if t % 2 else (fqn,)
        offsets = [Size((c * rows, 0)) for c in range(chunks)]
        states[fqn] = make(
            TensorStorageMetadata,
            properties=make(Properties, strides=(columns, 1)),
            size=Size((rows * chunks, columns)),
            chunks=[make(ChunkStorageMetadata, offsets=o, sizes=Size((rows, columns))) for o in offsets],
        )
        for c, o in enumerate(offsets):
            length = rows * columns * 4 + 1577
            name = fqn[:1] + fqn[1:] if gathered else fqn
            key = make(MetadataIndex, fqn=name, index=c, offset=Size(o) if gathered else o)
            storage[key] = make(StorageInfo, relative_path=paths[c], offset=ends[c], length=length)
            ends[c] += length
    fields = {"state_dict_metadata": states, "planner_data": planner, "storage_data": storage}
    if release >= 204:
        meta = {"checkpoint_id": "/checkpoints/step-1000", "save_id": str(uuid.UUID(int=7)), "load_id": None}
        fields["storage_meta"] = make(StorageMeta, **meta, **({"modules": []} if release >= 207 else {}))
    if release >= 209:
        fields["version"] = "1.0.0"
    return make(Metadata, **fields)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--chunks", type=int, default=256, help="of each tensor")
    parser.add_argument("--release", default="2.15", help="whose form to write")
    parser.add_argument("--gathered", action="store_true", help="strings and offsets that came from other ranks are not shared")
    parser.add_argument("--protocol", type=int, default=4)
    parser.add_argument("output")
    args = parser.parse_args()
    major, minor = map(int, args.release.split("."))
    with open(args.output, "wb") as out:
        pickle.dump(build(args.tensors, args.chunks, major * 100 + minor, args.gathered), out, protocol=args.protocol)


if __name__ == "__main__":
    main()
