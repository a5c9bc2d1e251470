"""Safetensors files: written in C, to the local file system or to a stream, and read out of streams. See docs/formats/safetensors.md."""

import json
import math
import operator

import torch

from .. import _core
from . import _describe

# What readers accept of a header at most.
HEADER_LIMIT_BYTES = 100_000_000
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


class _Part:
    """A tensor, or a part of one, by its descriptor."""

    __slots__ = ("descriptor",)

    def __init__(self, item, value, sources):
        data = item.tensor_data
        name, dtype, shape = item.index.fqn, data.properties.dtype, tuple(data.chunk.sizes)
        value = value.detach()
        if tuple(value.shape) != shape or value.dtype is not dtype:
            raise ValueError(f"{name}: planned as {dtype} {shape}, is {value.dtype} {tuple(value.shape)}")
        _describe.check_memory(name, value)
        parts = [(tuple(data.chunk.offsets), value)]
        self.descriptor = _describe.sharded(data.size, parts, [sources.readable(value)], value)


def write(items, resolve, **target):
    """Writes the tensors that resolve(item) returns for write items: to the file `name` in the directory `path`, or to the stream
    `output`. Returns the place (offset, length) of each item; an empty part of a tensor is left out and has none, (0, 0)."""
    sources = _describe.Sources()
    parts = {item.index.fqn: _Part(item, resolve(item), sources) for item in items}
    describe = operator.attrgetter("descriptor")
    places = _core.write_safetensors(parts, describe, stream=sources.devices.stream, **target)
    return [places.get(item.index.fqn, (0, 0)) for item in items]


def write_all(stream, data):
    """Raw streams may take less than they are given."""
    while len(data):
        taken = stream.write(data)
        data = data[len(data) if taken is None else taken :]


def read_header(stream, name):
    """The length and the header of a file at its beginning, as they stand there, and how many bytes of elements follow."""
    start = _exactly(stream, 8, name)
    length = int.from_bytes(start, "little")
    if length > HEADER_LIMIT_BYTES:
        raise ValueError(f"{name}: no safetensors file: its header would have {length} bytes")
    header = _exactly(stream, length, name)
    try:
        ends = [entry["data_offsets"][1] for key, entry in json.loads(header).items() if key != RESERVED]
        return start + header, max(map(operator.index, ends), default=0)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{name}: no safetensors file: its header cannot be read: {error!r}") from None


def _exactly(stream, length, name):
    data = b""
    while len(data) < length:  # raw streams may return less than there is
        part = stream.read(length - len(data))
        if not part:
            raise EOFError(f"{name}: ends within its header")
        data += part
    return data


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
    return tensor_in(data, dtype, shape)


def tensor_in(data, dtype, shape):
    memory = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return memory.view(dtype).view(shape)
