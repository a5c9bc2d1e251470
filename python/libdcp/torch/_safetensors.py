"""Writing safetensors files, with what libdcp and PyTorch add to their headers. See docs/formats/safetensors.md."""

import json
import math
from typing import NamedTuple

import torch

from .. import _core
from . import _describe, _pieces

# What readers accept of a header at most.
HEADER_LIMIT_BYTES = 100_000_000
PIECE_BYTES = 32 << 20
RESERVED = "__metadata__"

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}


class Entry(NamedTuple):
    """One tensor of a file, which may be part of a larger one."""

    name: str
    dtype: torch.dtype
    shape: tuple  # of the part
    offsets: tuple  # where the part lies in the whole tensor
    global_shape: tuple

    @property
    def length(self):
        return math.prod(self.shape) * self.dtype.itemsize


def entry_of(item):
    """The entry for a planned write of a tensor."""
    data = item.tensor_data
    return Entry(item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes), tuple(data.chunk.offsets), tuple(data.size))


def check(name, dtype):
    """Raises what keeps a tensor of this name and dtype from being stored."""
    if _describe.dtype_name(dtype) not in DTYPES:
        raise _core.UnsupportedError(f"{name}: safetensors files have no name for {dtype}")
    if name == RESERVED:
        raise ValueError(f"{name!r} has a meaning of its own in safetensors files and cannot be the name of a tensor")
    if "\0" in name:  # which C readers take for its end
        raise ValueError(f"{name!r} is no text that safetensors files can hold: NULs not allowed")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name!r} is no text that safetensors files can hold: {error.reason}") from None


def in_order(entries):
    """As the files hold them: wide elements first, so that all are aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header(entries):
    """The bytes before the data of these tensors."""
    tensors = {RESERVED: _facts(entries)}
    position = 0
    for entry in entries:
        tensors[entry.name] = {
            "dtype": DTYPES[_describe.dtype_name(entry.dtype)],
            "shape": _logical(entry.dtype, entry.shape),
            "data_offsets": [position, position + entry.length],
        }
        position += entry.length
    text = json.dumps(tensors, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT_BYTES:
        raise _core.LimitError(
            f"the header for {len(entries)} tensors has {len(text)} bytes, and readers accept {HEADER_LIMIT_BYTES}: divide them"
            " among more files"
        )
    return len(text).to_bytes(8, "little") + text


def _facts(entries):
    """`__metadata__`: PyTorch's, and the global shapes, without which the end of a tensor could be lost unnoticed."""
    places = {entry.name: {"saved_offsets": list(entry.offsets)} for entry in entries}
    shapes = {entry.name: {"shape": list(entry.global_shape)} for entry in entries}
    own = {"schema": 1, "writer": f"libdcp {_core.__version__}", "tensors": shapes}
    compact = (",", ":")
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": json.dumps(places, separators=compact),
        "libdcp": json.dumps(own, separators=compact),
    }


def _logical(dtype, shape):
    """float4_e2m1fn_x2 has two values in a byte, and safetensors counts values."""
    if _describe.dtype_name(dtype) == "float4_e2m1fn_x2":
        return [*shape[:-1], shape[-1] * 2]
    return list(shape)


def write(stream, entries, resolve):
    """Writes a file: the header, then each tensor that resolve(entry) returns, with one piece of it in extra memory at a time."""
    stream.write(header(entries))
    for entry in entries:
        for piece in _rows(resolve(entry).detach(), entry):
            write_all(stream, as_bytes(piece))


def _rows(tensor, entry):
    """The tensor in pieces that are contiguous on the host."""
    if tuple(tensor.shape) != tuple(entry.shape) or tensor.dtype is not entry.dtype:
        raise ValueError(f"{entry.name}: planned as {entry.dtype} {tuple(entry.shape)}, is {tensor.dtype} {tuple(tensor.shape)}")
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        if tensor.numel():
            yield tensor
        return
    for offsets, sizes in _pieces.boxes(entry.shape, max(PIECE_BYTES // entry.dtype.itemsize, 1)):
        part = _pieces.narrowed(tensor, (0,) * len(offsets), offsets, sizes)
        yield _describe.on_host(part).contiguous()


def as_bytes(tensor):
    """The memory of a contiguous tensor on the host."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write_all(stream, data):
    """Raw streams may take less than they are given."""
    while len(data):
        taken = stream.write(data)
        data = data[len(data) if taken is None else taken :]


def entry_in(header, index):
    """The entry of a header (without its length) for a stored part of a tensor."""
    tensors = json.loads(bytes(header))
    places = json.loads(tensors.get(RESERVED, {}).get("DCP_SHARDING_INFO", "{}"))
    if index.fqn not in tensors:
        raise ValueError(f"{index.fqn} is not among the tensors of the file")
    offsets = places.get(index.fqn, {}).get("saved_offsets")
    if offsets is not None and index.offset is not None and tuple(offsets) != tuple(index.offset):
        raise ValueError(f"{index.fqn}: the part in the file is that at {offsets}, not at {list(index.offset)}")
    return tensors[index.fqn]


def tensor_of(entry, data):
    """The tensor whose elements are in `data`."""
    names = {text: name for name, text in DTYPES.items()}
    if entry["dtype"] not in names:
        raise _core.UnsupportedError(f"dtype {entry['dtype']}")
    dtype, shape = _describe.dtype_of(names[entry["dtype"]]), list(entry["shape"])
    if entry["dtype"] == "F4":
        shape[-1] //= 2
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for {shape} elements of {dtype}")
    memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return memory.view(dtype).view(shape)
