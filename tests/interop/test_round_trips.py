"""Random states through dcptool convert: from each form to each other one and back. PyTorch and the safetensors package make the first form
and read the others; none of this library's readers decides whether a result is right.

    ROUND_TRIPS=200 ROUND_TRIP_SEED=7 ...      more of them, or those of a run that failed
"""

import json
import os
import pathlib
import random
import shutil
import tempfile
import unittest

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from common import TOOL, main, run, torch_load
from content import digests, tensor_bytes

SEED = int(os.environ.get("ROUND_TRIP_SEED") or random.SystemRandom().randrange(1 << 31))
COUNT = int(os.environ.get("ROUND_TRIPS") or 10)
FORMS = ("dcp", "torch", "safetensors", "hf")

ALL = (
    "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool uint16 uint32 uint64 complex64 complex128 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 complex32"
).split()
SMALL = ("safetensors", "hf")
NOT_IN_SAFETENSORS = ("complex128", "complex32")
NOT_WRITTEN_BY_SAFETENSORS = (*NOT_IN_SAFETENSORS, "float4_e2m1fn_x2")  # the package fails on some shapes of it

NAMES = (
    "weight bias 0 00 -1 a a.b a.b.c .a a. .. . / a/b ../up /abs a\\b café 重み \U0001f600 e\u0301 \u202e ~ * ? [x] {x} ' \" , : ; = %s %00 "
    "rank.0.x rank.1 shard-00001 __metadata__x .metadata model.safetensors.index.json x#2 CON null None True optim param_groups state "
    "a\tb a\nb \x7f"
).split(" ") + ["", " ", "with space", " lead", "trail ", "n" * 300, "\x01", "d\u00e9j\u00e0.vu", "a..b"]


class Maker:
    """States from a seed."""

    def __init__(self, seed, dtypes):
        self.random = random.Random(seed)
        self.dtypes = dtypes
        self.made = []  # tensors, to be tied to or viewed

    def bits(self, dtype, elements):
        width = dtype.itemsize
        raw = self.random.randbytes(elements * width)
        raw = bytes(b & 1 for b in raw) if dtype is torch.bool else raw
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if elements else torch.empty(0, dtype=dtype)

    def shape(self):
        return [self.random.choice((0, 1, 2, 3, 5, 17)) if self.random.random() < 0.9 else 70 for _ in range(self.random.randrange(4))]

    def tensor(self):
        kind = self.random.random()
        old = self.random.choice(self.made) if self.made and kind < 0.35 else None
        if old is not None and kind < 0.15:
            return old
        if old is not None and old.dim() and old.element_size() < 16 and not str(old.dtype).endswith("_x2"):
            return self.view(old)
        dtype = getattr(torch, self.random.choice(self.dtypes))
        shape = self.shape()
        if str(dtype).endswith("_x2") and not shape:
            shape = [3]  # two numbers are no scalar in safetensors
        made = self.bits(dtype, torch.Size(shape).numel()).view(shape)
        self.made.append(made)
        return made

    def view(self, old):
        how = self.random.randrange(5)
        if how == 0:
            return old.transpose(0, -1)
        if how == 1 and old.shape[0] > 1:
            return old[1:]
        if how == 2 and old.shape[0] > 1:
            return old[::2]
        if how == 3 and old.shape[0] > 0:
            return old[:1].expand(3, *old.shape[1:])
        return old.detach()

    def leaf(self):
        return self.random.choice((0, -1, 1 << 70, 2.5, float("inf"), True, None, "text", "重み", b"\0bytes", (1, "two"), [1, [2.0]], {"k": 1}, {}, []))

    def value(self, depth):
        kind = self.random.random()
        if depth < 3 and kind < 0.3:
            return self.dict(depth + 1, self.random.randrange(4))
        if depth < 3 and kind < 0.4:
            return [self.value(depth + 1) for _ in range(self.random.randrange(1, 4))]
        return self.tensor() if kind < 0.85 else self.leaf()

    def dict(self, depth, n):
        """Not with both 0 and "0": in a directory they are one name."""
        keys = {str(key): key for key in (self.key() for _ in range(n))}
        return {key: self.value(depth) for key in keys.values()}

    def key(self):
        return self.random.choice((0, 7, -3)) if self.random.random() < 0.1 else self.random.choice(NAMES)

    def nested(self):
        """One that PyTorch can flatten: it refuses names that collide."""
        while True:
            self.made.clear()
            state = self.dict(0, self.random.randrange(1, 7))
            try:
                flat, _ = flatten_state_dict(state)
            except ValueError:
                continue
            if any(isinstance(value, torch.Tensor) for value in flat.values()):
                return state

    def flat(self):
        self.made.clear()
        names = self.random.sample(NAMES, self.random.randrange(1, 9))
        state = {name: self.tensor().contiguous().clone() for name in names}
        return state


def plain(value):
    """A tree with tensors as their content, for comparing."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), tensor_bytes(value))
    if isinstance(value, dict):
        return [(key, plain(v)) for key, v in value.items()]
    return (type(value).__name__, [plain(v) for v in value]) if isinstance(value, (list, tuple)) else value


def ties(nested):
    """Pairs of names of tensors that are one."""
    first, found = {}, set()
    for name, tensor in tensors_of(flatten_state_dict(nested)[0]).items():
        if tensor.numel():
            other = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
            found |= {(other, name)} if other != name else set()
    return found


def tensors_of(flat):
    return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}


def flatten_anyhow(value):
    return [value] if isinstance(value, torch.Tensor) else [tensor for v in value.values() for tensor in flatten_anyhow(v)]


def read_safetensors(path):
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = {}
    for file in files:
        for name, tensor in safetensors.torch.load_file(file).items():
            assert name not in found, name
            found[name] = tensor
    index = path / "model.safetensors.index.json"
    if path.is_dir() and (len(files) > 1 or index.exists()):
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map.keys() == found.keys(), (weight_map, list(found))
    return found


class RoundTrips(unittest.TestCase):
    maxDiff = 800

    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.dir)
        self.numbers = iter(range(1 << 30))

    def place(self, form):
        return self.dir / f"{next(self.numbers)}{ {'torch': '.pt', 'safetensors': '.safetensors'}.get(form, '')}"

    # ---- the first form, made by others ----

    def make(self, form, state, rnd):
        path = self.place(form)
        if form == "dcp":
            dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(str(path), thread_count=rnd.choice((1, 2))), no_dist=True)
        elif form == "torch":
            torch.save(state, path, _use_new_zipfile_serialization=rnd.random() < 0.8)
        elif form == "safetensors":
            safetensors.torch.save_file(state, path, {"format": "pt"} if rnd.random() < 0.5 else None)
        else:
            self.make_hf(path, state, rnd)
        return path

    def make_hf(self, path, state, rnd):
        path.mkdir()
        names = list(state)
        count = rnd.randrange(1, min(3, len(names)) + 1)
        files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        weight_map = {}
        for i, file in enumerate(files):
            part = {name: state[name] for name in names[i::count]}
            weight_map |= dict.fromkeys(part, file)
            safetensors.torch.save_file(part, path / file, {"format": "pt"})
        if count > 1:
            (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    # ---- conversion ----

    def convert(self, source, form, rnd):
        target = self.place(form)
        options = []
        if form == "dcp":
            options += rnd.choice(([], ["--ranks", "3"], ["--files", "2"], ["--transform", "zstd"]))
        if form == "hf":
            options += rnd.choice(([], ["--max-file-size", "64"]))
        if form in SMALL:
            options += ["--objects", "drop"]
        run(TOOL, "convert", "--quiet", "--no-sync", "--to", form, *options, source, target)
        return target

    # ---- looking at the result ----

    def check(self, path, form, flat, nested, first, what):
        """flat: what is expected by name; nested: the whole state, None if its tree and order are lost."""
        if form == "dcp":
            self.assertEqual(digests(torch_load(path)), digests(flat), what)
        elif form == "torch":
            loaded = torch.load(path, weights_only=True)
            if nested is None:  # safetensors files have an order of their own
                self.assertEqual(digests(loaded), digests(flat), what)
            else:
                self.assertEqual(plain(loaded), plain(nested), what)
                if first == "torch":  # PyTorch stores tied tensors in a directory twice
                    self.assertLessEqual(ties(nested), ties(loaded), what)
        else:
            self.assertEqual(digests(read_safetensors(path)), digests(tensors_of(flat)), what)

    def go(self, seed, first):
        rnd = random.Random(seed)
        for middle in FORMS:
            left_out = NOT_WRITTEN_BY_SAFETENSORS if first in SMALL else NOT_IN_SAFETENSORS if middle in SMALL else ()
            maker = Maker(rnd.randrange(1 << 31), [name for name in ALL if hasattr(torch, name) and name not in left_out])
            nested = maker.flat() if first in SMALL else maker.nested()
            flat, paths = flatten_state_dict(nested)
            source = self.make(first, nested, rnd)
            if first == "dcp":
                nested = unflatten_state_dict(flat, paths)  # PyTorch does not store empty containers
            what = f"seed {seed}, {first} to {middle}"
            try:
                there = self.convert(source, middle, rnd)
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
            has_tree = first in ("dcp", "torch")
            keeps_tree = has_tree and middle in ("dcp", "torch")
            self.check(there, middle, flat, nested if has_tree else None, first, what)
            back = self.convert(there, first, rnd)
            if (first, middle) == ("dcp", "torch"):  # a list that had an empty container has None there
                flat = flatten_state_dict(nested)[0]
            flat = flat if keeps_tree else tensors_of(flat)
            self.check(back, first, flat, nested if keeps_tree else None, first, what + " and back")

    def test_names_that_collide(self):
        """PyTorch cannot flatten such states; as files they are converted, and nothing is lost."""
        ones = {"a.b": torch.ones(2), "a": {"b": torch.zeros(3), "b#2": torch.full((4,), 2.0)}, "a.b#2": torch.arange(5)}
        torch.save(ones, self.dir / "from.pt")
        for form in FORMS:
            made = self.convert(self.dir / "from.pt", form, random.Random(1))
            if form == "torch":
                found = flatten_anyhow(torch.load(made, weights_only=True))
            else:
                found = (torch_load(made) if form == "dcp" else read_safetensors(made)).values()
            expected = [torch.ones(2), torch.zeros(3), torch.full((4,), 2.0), torch.arange(5)]
            self.assertEqual(sorted(map(tensor_bytes, found)), sorted(map(tensor_bytes, expected)), form)

    def test_names_that_a_form_cannot_hold(self):
        torch.save({"a": torch.ones(2), "__metadata__": torch.zeros(3)}, self.dir / "from.pt")
        for form in ("safetensors", "hf"):
            with self.assertRaisesRegex(AssertionError, "__metadata__"):
                self.convert(self.dir / "from.pt", form, random.Random(1))

    def sweep(self, first):
        print(f"ROUND_TRIP_SEED={SEED}")
        for i in range(COUNT):
            with self.subTest(seed=SEED + i):
                self.go(SEED + i, first)

    def test_from_dcp(self):
        self.sweep("dcp")

    def test_from_torch(self):
        self.sweep("torch")

    def test_from_safetensors(self):
        self.sweep("safetensors")

    def test_from_hf(self):
        self.sweep("hf")


if __name__ == "__main__":
    main()
