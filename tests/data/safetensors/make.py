#!/usr/bin/env python3
"""Makes the files of this folder with the reference library (pip install safetensors; 0.8.0 was used).

    make.py              writes all_dtypes.safetensors
    make.py check FILE   opens a file of our writer with the reference library, prints names, dtypes, shapes
"""
import ctypes
import os
import sys

import safetensors

HERE = os.path.dirname(os.path.abspath(__file__))
# name in the library's interface -> bits of one element
DTYPES = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8,
    "bool": 8, "uint16": 16, "uint32": 32, "uint64": 64, "complex64": 64, "float8_e4m3fn": 8, "float8_e5m2": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8, "float4_e2m1fn_x2": 4,
}


def all_dtypes():
    tensors = {}
    for name, bits in DTYPES.items():
        # float4_e2m1fn_x2 counts bytes here, as PyTorch does: the file says [2, 6]
        tensors["t." + name] = (name, [2, 3], bytes(k & 1 for k in range(6 * max(bits, 8) // 8)))
    tensors["scalar"] = ("float32", [], b"\0\0\x80\x3f")
    tensors["empty"] = ("int64", [3, 0, 2], b"")
    tensors["Größe \"q\" \\ \t"] = ("uint8", [1], b"\x07")
    tensors[""] = ("uint8", [1], b"\x09")
    specs, keep = {}, []
    for name, (dtype, shape, data) in tensors.items():
        keep.append(ctypes.create_string_buffer(data, max(len(data), 1)))
        specs[name] = safetensors.TensorSpec(dtype=dtype, shape=shape, data_ptr=ctypes.addressof(keep[-1]), data_len=len(data))
    return safetensors.serialize(specs, {"format": "pt", "note": "line 1\nline 2"})


def check(path):
    with open(path, "rb") as f:
        for name, t in sorted(safetensors.deserialize(f.read())):
            print(repr(name), t["dtype"], t["shape"], len(t["data"]))


if len(sys.argv) == 3 and sys.argv[1] == "check":
    check(sys.argv[2])
else:
    with open(os.path.join(HERE, "all_dtypes.safetensors"), "wb") as f:
        f.write(all_dtypes())
