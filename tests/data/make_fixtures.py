#!/usr/bin/env python3
"""Makes the torch.save fixtures in this folder. Written with PyTorch 2.13.0; the files are kept so that tests need no Python.

    objects/<name>.pt, <name>.repr   one value each, and its repr: tensors as <tensor float32 [2, 3]>, what is kept opaque as
                                     <module.Class, * bytes>
    records/<name>.pt                one tensor each, in a form that DCP itself rarely or never writes
    legacy/<name>.pt                 files of the form before the zip
"""
import collections
import datetime
import enum
import io
import os
import pickle
import struct
import sys
import types
import zipfile

import numpy
import torch

HERE = os.path.dirname(os.path.abspath(__file__))


class Thing:
    """Pickled under a module that no reader knows."""

    def __init__(self, **kw):
        self.__dict__.update(kw)


class Color(enum.Enum):
    RED = 1


class Loud(torch.Tensor):
    pass


user = types.ModuleType("user_code")
for cls in (Thing, Color, Loud):
    cls.__module__ = "user_code"
    setattr(user, cls.__name__, cls)
sys.modules["user_code"] = user


def text(v):
    """repr as the C library prints it."""
    t = type(v)
    if t in (torch.Tensor, torch.nn.Parameter) and v.layout is torch.strided and not v.is_quantized:
        return f"<tensor {str(v.dtype)[6:]} {list(v.shape)}>"
    if t is torch.Tensor:
        fn = "_rebuild_qtensor" if v.is_quantized else "_rebuild_sparse_tensor"
        return f"<torch._utils.{fn}, * bytes>"
    if t is list:
        return "[" + ", ".join(map(text, v)) + "]"
    if t is tuple:
        return "(" + ", ".join(map(text, v)) + (",)" if len(v) == 1 else ")")
    if t is dict:
        return "{" + ", ".join(f"{text(k)}: {text(x)}" for k, x in v.items()) + "}"
    if t is collections.OrderedDict:
        inner = ", ".join(f"({text(k)}, {text(x)})" for k, x in v.items())
        return f"OrderedDict([{inner}])" if v else "OrderedDict()"
    if t is collections.defaultdict:
        return "<collections.defaultdict, * bytes>"
    if t in (Thing,):
        return "<user_code.Thing, * bytes>"
    if t is Color:
        return "<user_code.Color, * bytes>"
    if t is Loud:
        return "<torch._tensor._rebuild_from_type_v2, * bytes>"
    if t in (datetime.datetime, datetime.timedelta):
        return f"<datetime.{t.__name__}, * bytes>"
    if t is numpy.float32:
        return f"<{numpy.core.multiarray.scalar.__module__}.scalar, * bytes>"
    if t is numpy.ndarray:
        return f"<{numpy.core.multiarray._reconstruct.__module__}._reconstruct, * bytes>"
    if t is type or t is types.BuiltinFunctionType:
        return f"<{v.__module__}.{v.__name__}, * bytes>".replace("builtins", "__builtin__")  # as protocol 2 has it
    return repr(v)


def write(path, data):
    with open(os.path.join(HERE, path), "wb") as f:
        f.write(data)


def saved(value, **kw):
    out = io.BytesIO()
    torch.save(value, out, **kw)
    return out.getvalue()


def save_object(name, value, **kw):
    write(f"objects/{name}.pt", saved(value, **kw))
    write(f"objects/{name}.repr", text(value).encode("utf-8", "surrogatepass"))


def rezip(data, change=lambda name, content: content, method=zipfile.ZIP_STORED, order=lambda names: names, prefix="archive"):
    """The same members through another zip writer: sizes in local headers, no zip64 end, no padding."""
    src = zipfile.ZipFile(io.BytesIO(data))
    names = order([i.filename.split("/", 1)[1] for i in src.infolist()])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as dst:
        for name in names:
            info = zipfile.ZipInfo(f"{prefix}/{name}", (1980, 1, 1, 0, 0, 0))
            info.compress_type = method
            dst.writestr(info, change(name, src.read(f"archive/{name}")))
    return out.getvalue()


def objects():
    shared = [1, 2]
    deep = []
    for _ in range(60):
        deep = [deep]
    base = torch.arange(12, dtype=torch.float32)
    save_object("scalars", [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, 2**31, -(2**31), 2**63 - 1, 2**63, -(2**63), 2**200,
                            -(2**200), 0.0, -0.0, 0.1, 1e308, float("inf"), float("-inf"), float("nan"), True, False, None])
    save_object("texts", ["", "a", "λ", "模型", "\U0001f600", "it's", 'say "x"', "'\"", "\n\t\\\x00\x7f\x85", "x" * 300])
    save_object("bytes", [b"", b"\x00\xff", b"it's", bytes(range(256)), bytearray(), bytearray(b"a\x80")])
    save_object("complex", [1j, complex(1.5, -2), complex(0.0, -0.0), complex(float("inf"), float("nan"))])
    save_object("containers", [[], [1], (), (1,), (1, 2, 3, 4), {}, {"a": 1}, {1: "x", "1": "y", -5: None}, [[[]]], ((),)])
    save_object("sets", [set(), {1}, frozenset(), frozenset({"a"})])
    save_object("ordered", collections.OrderedDict([("z", 1), ("a", collections.OrderedDict())]))
    save_object("torch_types", [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]),
                                torch.Size([])])
    save_object("shared", [shared, shared, {"again": shared}])
    save_object("deep", deep)
    save_object("tensors", {"w": base, "view": base[2:8:2], "t": base.reshape(3, 4).t(), "i": torch.tensor(7),
                            "e": torch.empty(0, 3), "p": torch.nn.Parameter(torch.ones(2)), "u": torch.zeros(3, dtype=torch.uint16)})
    save_object("module_state", torch.nn.Linear(2, 3).state_dict())
    save_object("optimizer", torch.optim.Adam(torch.nn.Linear(2, 3).parameters(), lr=0.1).state_dict())
    save_object("opaque", [Thing(a=1, t=torch.ones(2)), Color.RED, collections.defaultdict(list, {"a": [1]}), numpy.float32(1.5),
                           numpy.arange(3), datetime.datetime(2024, 1, 2), datetime.timedelta(1), Thing, len])
    save_object("tensor_kinds", [torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8),
                                 torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (4,)), torch.ones(2).as_subclass(Loud)])
    save_object("odd_keys", [{(1, 2): 3, "a": 1}, {None: 1, True: 2, 1.5: 3}, {2**70: 0}])
    save_object("protocol_4", {"a": [1, 2.5, "x", (None, {3})], "b": b"\x80", "s": "y" * 300}, pickle_protocol=4)
    save_object("protocol_5", {"a": [1, 2.5, "x", (None, frozenset([3]))], "b": bytearray(b"\x80")}, pickle_protocol=5)


def records():
    z = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    c = torch.complex(z, -z)
    write("records/plain.pt", saved(z))
    write("records/conj.pt", saved(c.conj()))
    write("records/neg.pt", saved(torch._neg_view(z)))
    write("records/imag_of_conj.pt", saved(c.conj().imag))
    write("records/parameter.pt", saved(torch.nn.Parameter(z)))
    write("records/requires_grad.pt", saved(z.clone().requires_grad_()))
    write("records/transposed.pt", saved(z.t()))
    write("records/offset_view.pt", saved(z[1:, 1:]))
    write("records/uint16.pt", saved(z.to(torch.uint16)))
    write("records/float8.pt", saved(z.to(torch.float8_e4m3fn)))
    write("records/quantised.pt", saved(torch.quantize_per_tensor(z, 0.5, 1, torch.qint8)))
    write("records/sparse.pt", saved(z.to_sparse()))
    write("records/meta.pt", saved(z.to("meta")))
    write("records/subclass.pt", saved(z.as_subclass(Loud)))
    write("records/no_crc.pt", no_crc(z))

    def big(name, content):
        if name == "byteorder":
            return b"big"
        if name == "data/0":
            return b"".join(content[i : i + 4][::-1] for i in range(0, len(content), 4))
        return content

    write("records/big_endian.pt", rezip(saved(z), big))
    write("records/big_endian_uint16.pt", rezip(saved(z.to(torch.uint16)), lambda n, c: b"big" if n == "byteorder" else c))
    write("records/other_writer.pt", rezip(saved(z)))
    write("records/deflated.pt", rezip(saved(z), method=zipfile.ZIP_DEFLATED))
    write("records/other_prefix.pt", rezip(saved(z), prefix="my model"))
    write("records/reversed.pt", rezip(saved(z), order=lambda names: names[::-1]))
    keep = ("data.pkl", "data/0", "version")
    write("records/fewest_members.pt", rezip(saved(z), order=lambda names: [n for n in names if n in keep]))
    write("records/protocol_4.pt", saved(z, pickle_protocol=4))


def no_crc(value):
    from torch.utils.serialization import config

    before = config.save.calculate_crc32 if hasattr(config.save, "calculate_crc32") else None
    torch.serialization.set_crc32_options(False)
    try:
        return saved(value)
    finally:
        torch.serialization.set_crc32_options(True if before is None else before)


def legacy():
    base = torch.arange(12, dtype=torch.float32)
    old = dict(_use_new_zipfile_serialization=False)
    write("legacy/tensor.pt", saved(base.reshape(3, 4), **old))
    write("legacy/object.pt", saved({"step": 7, "name": "x", "none": None}, **old))
    write("legacy/shared.pt", saved({"w": base, "row": base.reshape(3, 4)[1], "col": base.reshape(3, 4)[:, 2],
                                     "i": torch.arange(3), "e": torch.empty(0)}, **old))
    write("legacy/uint16.pt", saved(torch.arange(5).to(torch.uint16), **old))
    write("legacy/views.pt", with_views(True))
    write("legacy/big_endian.pt", with_views(False))


def with_views(is_little):
    """Storages that are views of a storage, as releases before 0.4 wrote them; int16 0..7 and its elements 2..5."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return obj.id if isinstance(obj, Stored) else None

    class Stored:
        def __init__(self, *id):
            self.id = id

    class Rebuilt:
        def __init__(self, *args):
            self.args = args

        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, self.args

    def tensor(n, view):
        storage = Stored("storage", torch.ShortStorage, "7001", "cpu", 8, view)
        return Rebuilt(storage, 0, (n,), (1,), False, collections.OrderedDict())

    out = io.BytesIO()
    for value in (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": is_little,
                                                 "type_sizes": {"short": 2, "int": 4, "long": 4}},
                  {"all": tensor(8, None), "part": tensor(4, ("7002", 2, 4))}, ["7001"]):
        Pickler(out, 2).dump(value)
    out.write(struct.pack("<q", 8) + struct.pack(("<" if is_little else ">") + "8h", *range(8)))
    return out.getvalue()


if __name__ == "__main__":
    for folder in ("objects", "records", "legacy"):
        os.makedirs(os.path.join(HERE, folder), exist_ok=True)
    torch.manual_seed(0)
    objects()
    records()
    legacy()
