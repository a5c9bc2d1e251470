"""PyTorch loads what the library saves. The state is the one of save_state.c, made here in Python."""

import collections
import pathlib
import pickle
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp

from common import RELEASE, SAVE_STATE, TOOL, has_zstd, main, run, tool_copy, tool_hash, torch_load
from content import digests

# dtypes in the order of the library's enumeration, whose numbers seed the content.
DTYPES = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz complex32 uint16 uint32 uint64 float8_e8m0fnu float4_e2m1fn_x2 bcomplex32"
).split()


def fill(dtype, n, seed):
    """A flat tensor of n elements; the content is a matter of bytes."""
    width = torch.empty((), dtype=dtype).element_size()
    i = torch.arange(n * width, dtype=torch.int64)
    content = (i * 31 + seed * 7 + (i >> 8)) & (1 if dtype is torch.bool else 0xFF)
    return content.to(torch.uint8).view(dtype)


def dtypes():
    # What exists is not always what can be loaded: the library knows, and leaves the others out.
    since = {"float8_e4m3fn": (2, 2), "float8_e5m2": (2, 2), "float8_e4m3fnuz": (2, 3), "float8_e5m2fnuz": (2, 3),
             "complex32": (2, 3), "uint16": (2, 6), "uint32": (2, 6), "uint64": (2, 6), "float8_e8m0fnu": (2, 7),
             "float4_e2m1fn_x2": (2, 10), "bcomplex32": (2, 14)}
    known = [name for name in DTYPES if RELEASE >= since.get(name, (2, 1))]
    return {name: fill(getattr(torch, name), 15, DTYPES.index(name) + 1).reshape(3, 5) for name in known}


def shapes():
    m = fill(torch.float32, 24, 100)
    return {
        "scalar": m[3].reshape(()),
        "empty": torch.empty(0, dtype=torch.int64),
        "empty3": torch.empty(3, 0, 2, dtype=torch.float16),
        "ones": m[5].reshape(1, 1, 1, 1),
        "transposed": m.as_strided((6, 4), (1, 6)),
        "every_second": m.as_strided((4, 3), (6, 2)),
        "expanded": m.as_strided((5, 6), (0, 1)),
        "channels_last": m.as_strided((2, 3, 2, 2), (12, 1, 6, 3)),
        "tied": m.reshape(4, 6),
        "tied_too": m.reshape(4, 6),
        "part": m[6:18].reshape(2, 6),
        "large": fill(torch.bfloat16, 1031 * 1543, 101).reshape(1031, 1543),
        "large_transposed": fill(torch.int16, 1031 * 1543, 102).reshape(1031, 1543).t(),
    }


def objects():
    m = fill(torch.float32, 6, 104).reshape(2, 3)
    return {
        "int": -7,
        "int64": -(2**63),
        "big": 2**96,
        "float": 0.1,
        "inf": float("inf"),
        "minus_zero": -0.0,
        "true": True,
        "false": False,
        "none": None,
        "complex": complex(1.5, -2),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "list": [1, 2.5, "three", False, None, 2**96],
        "tuple": (1, ("in", {"k": [1, "x", None]}), {3: "three"}, collections.OrderedDict(b=1, a=2)),
        "size": torch.Size([2, 3]),
        "set": {5},
        "frozenset": frozenset({"f"}),
        "empty_list": [],
        "empty_tuple": (),
        "with_tensors": (m, m.as_strided((3, 2), (1, 3)), "and text"),
        "text": "grüß dich 👋\n'\"",
        "empty_text": "",
        "bytes": b"\x00\xff'x",
        "bytearray": bytearray(b"ab"),
    }


NAMES = ["dot.ted", "größe", "sp ace", "tab\t", "", "a/b", "..", "漢字"]


def state():
    return {
        "dtypes": dtypes(),
        "shapes": shapes(),
        "sharded": fill(torch.int32, 63, 103).reshape(7, 9),
        "objects": objects(),
        "list": [fill(torch.uint8, 4, 105), 9],
        "names": {name: fill(torch.uint8, 2, 110 + i) for i, name in enumerate(NAMES)},
        "top.level": 1,
        "": 2,
    }


def flat():
    """The state by name, as PyTorch flattens it."""
    whole = state()
    found = {}
    for key, value in whole.items():
        if isinstance(value, dict):
            found.update({f"{key}.{inner}": v for inner, v in value.items()})
        elif key == "list":
            found.update({f"list.{i}": v for i, v in enumerate(value)})
        else:
            found[key] = value
    return found


class Library(unittest.TestCase):
    maxDiff = None

    def save(self, form):
        target = tempfile.TemporaryDirectory()
        self.addCleanup(target.cleanup)
        run(SAVE_STATE, target.name, RELEASE[0] * 100 + RELEASE[1], form)
        return target.name

    def check(self, form):
        path = self.save(form)
        expected, found = digests(flat()), digests(torch_load(path))
        self.assertEqual(found["tensors"], expected["tensors"])
        self.assertEqual(found["objects"], expected["objects"])
        self.assertEqual(tool_hash(path)["tensors"], expected["tensors"])
        run(TOOL, "verify", "--quiet", path)

    def test_plain(self):
        self.check("plain")

    def test_files(self):
        self.check("files")

    def test_file_per_item(self):
        self.check("items")

    def test_align(self):
        self.check("align")

    @unittest.skipUnless(has_zstd(), "PyTorch's zstd extension does not work here")
    def test_zstd(self):
        self.check("zstd")

    def test_tensors_in_objects(self):
        found, expected = torch_load(self.save("plain"))["objects.with_tensors"], objects()["with_tensors"]
        self.assertTrue(torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)))
        self.assertEqual(digests(dict(enumerate(found))), digests(dict(enumerate(expected))))

    def test_tied_tensors_are_stored_once(self):
        metadata = dcp.FileSystemReader(self.save("plain")).read_metadata()
        places = {index.fqn: (info.relative_path, info.offset) for index, info in metadata.storage_data.items()}
        self.assertEqual(places["shapes.tied"], places["shapes.tied_too"])
        self.assertNotEqual(places["shapes.tied"], places["shapes.part"])

    def test_unknown_fields_are_kept_by_a_copy(self):
        """Of plain data, in the top object and in libdcp's own field: a later release may have put them there."""
        path = pathlib.Path(self.save("plain"))
        extra = {
            "none": None, "flags": [True, False], "floats": [0.1, -0.0, float("inf")], "frozen": frozenset({3}),
            "ints": (0, 255, 65535, 65536, -1, 2**31, -(2**63), 2**63, 2**200, -(2**200), 2**3000),
            "text": ["", "größe" * 100], "bytes": [b"", b"\0\xff" * 200],
            "nested": {"a": [{}, [], (), (1,)], 1: {2}, (3, None): {"b": {"c": {}}}},
        }
        metadata = pickle.loads((path / ".metadata").read_bytes())
        shared = [extra["nested"]] * 2
        metadata.libdcp.update(future=extra, shared=shared, opaque=torch.float32)
        metadata.brand_new, metadata.shared, metadata.opaque = extra, shared, torch.float32
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        for copy in range(2):  # the second has a trailer as well
            target = path / f"copy{copy}"
            tool_copy(path if copy == 0 else path / "copy0", target)
            found = dcp.FileSystemReader(str(target)).read_metadata()
            self.assertEqual(found.libdcp["future"], extra)
            self.assertEqual(repr(found.libdcp["future"]["floats"]), repr(extra["floats"]))
            self.assertEqual(found.brand_new, extra)
            self.assertEqual(found.shared, shared)
            self.assertEqual(found.libdcp["shared"], shared)
            self.assertNotIn("opaque", found.libdcp)
            self.assertFalse(hasattr(found, "opaque"))
            self.assertEqual(found.libdcp["writer"], metadata.libdcp["writer"])
            self.assertEqual(digests(torch_load(target)), digests(flat()))

    @unittest.skipIf(RELEASE < (2, 3), "no conversion in this release")
    def test_conversion_to_torch_save_keeps_the_tree(self):
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        path = self.save("plain")
        whole = pathlib.Path(path) / "whole.pt"
        dcp_to_torch_save(path, str(whole))
        found, expected = torch.load(whole, weights_only=False), state()
        self.assertEqual(list(found), list(expected))
        for part in ("dtypes", "shapes", "names", "objects"):
            self.assertEqual(list(found[part]), list(expected[part]))
            self.assertEqual(digests(found[part]), digests(expected[part]))
        self.assertEqual(digests({"": found["list"][0]}), digests({"": expected["list"][0]}))
        self.assertEqual(found["list"][1], 9)
        self.assertEqual(tool_hash(whole)["tensors"], digests(flat())["tensors"])


if __name__ == "__main__":
    main()
