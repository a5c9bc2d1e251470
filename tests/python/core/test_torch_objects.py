"""libdcp._core with torch: the fast way into tensors, and records that torch.save makes."""
import collections
import io
import os
import tempfile
import unittest

import torch

from libdcp import _core


TYPES = (torch.Tensor, torch.nn.Parameter)
DTYPES = ("float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128 float8_e4m3fn float8_e5m2 "
          "float8_e4m3fnuz float8_e5m2fnuz complex32 uint16 uint32 uint64 float8_e8m0fnu float4_e2m1fn_x2 bcomplex32").split()


class Thing:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x


torch.serialization.add_safe_globals([Thing])


def describe(obj):
    if isinstance(obj, torch.Tensor):
        raise AssertionError(f"not taken: {obj.dtype} {obj.layout} {obj.device}")
    return ("m", obj) if isinstance(obj, collections.abc.Mapping) else None


def record(obj):
    out = io.BytesIO()
    torch.save(obj, out)
    return out.getbuffer()


def load_object(fqn, data):
    return torch.load(io.BytesIO(data), weights_only=True)


def save(path, tree, **opts):
    return _core.save(path, tree, describe=opts.pop("describe", describe), pickle=record, tensor_types=TYPES, sync=False, **opts)


def zeros_like(tensor):
    """With the strides of the tensor, also for dtypes that PyTorch cannot fill."""
    raw = torch.uint8 if tensor.itemsize == 1 else tensor.dtype
    return torch.zeros_like(tensor.detach().view(raw), memory_format=torch.preserve_format).view(tensor.dtype)


def load(path, tree, **opts):
    return _core.load(path, tree, describe=opts.pop("describe", describe), load_object=load_object, tensor_types=TYPES, **opts)


class Torch(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.dir = os.path.join(place.name, "ck")

    def test_tensors_of_every_dtype_and_layout(self):
        torch.manual_seed(7)
        tree = {}
        for name in DTYPES:
            dtype = getattr(torch, name, None)  # some are newer than the installed torch
            if dtype is not None:
                raw = torch.randint(0, 2, (6, 4 * torch.empty(0, dtype=dtype).element_size()), dtype=torch.uint8)
                tree[name] = raw.view(dtype)
        self.assertGreater(len(tree), 18)
        tree |= {"t": torch.arange(12.).reshape(3, 4).t(), "step": torch.arange(10)[::3], "zero": torch.tensor(3.5),
                 "empty": torch.empty(0, 3), "wide": torch.ones(1).expand(4, 5), "grad": torch.nn.Parameter(torch.ones(3)),
                 "nhwc": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
        save(self.dir, tree)
        into = {name: zeros_like(t) if name != "wide" else torch.zeros(4, 5) for name, t in tree.items()}
        load(self.dir, into)
        for name, t in tree.items():
            want, got = t.detach().contiguous(), into[name].contiguous()
            self.assertEqual((want.dtype, want.shape), (got.dtype, got.shape), name)
            if want.numel():
                self.assertTrue(torch.equal(want.reshape(-1).view(torch.uint8), got.reshape(-1).view(torch.uint8)), name)

    def test_unresolved_conjugation_and_negation_are_not_taken_as_they_lie(self):
        seen = []

        def note(obj):
            seen.append(obj)
            resolved = obj.resolve_conj().resolve_neg()
            return ("t", str(obj.dtype)[6:], tuple(obj.shape), None, resolved.data_ptr(), resolved)

        z = torch.tensor([1 + 2j, 3 - 4j])
        save(self.dir, {"c": z.conj(), "n": z.conj().imag, "r": z.real}, describe=note)
        self.assertEqual(len(seen), 2)
        into = {"c": torch.zeros(2, dtype=torch.complex64), "n": torch.zeros(2), "r": torch.zeros(2)}
        load(self.dir, into)
        self.assertEqual(into["c"].tolist(), [1 - 2j, 3 + 4j])
        self.assertEqual((into["n"].tolist(), into["r"].tolist()), ([-2, 4], [1, 3]))

    def test_meta_sparse_and_subclasses_go_to_describe(self):
        for t in (torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.ones(2).as_subclass(type("T", (torch.Tensor,), {}))):
            with self.assertRaisesRegex(AssertionError, "not taken"):
                save(self.dir, {"t": t})

    def test_objects_that_python_alone_does_not_hold(self):
        values = {"thing": Thing(3), "list": [1, Thing(4)], "tensor_in_tuple": (torch.ones(2), "x"), "dtype": torch.bfloat16,
                  "size": torch.Size([2, 3]), "mixed": [Thing(5), {"t": torch.ones(1)}]}
        save(self.dir, values)
        report, objects, _ = load(self.dir, {**dict.fromkeys(values, 0), "mixed": [0, {"t": torch.zeros(1)}]})
        got = {fqn: value for _, fqn, value in objects}
        self.assertEqual(got["thing"], values["thing"])
        self.assertEqual(got["list"], values["list"])
        self.assertEqual(got["tensor_in_tuple"][0].tolist(), [1, 1])
        self.assertIs(got["dtype"], torch.bfloat16)
        self.assertEqual((got["size"], type(got["size"])), (torch.Size([2, 3]), torch.Size))
        self.assertEqual(got["mixed.0"], Thing(5))

    def test_torch_reads_what_is_written(self):
        import torch.distributed.checkpoint as dcp
        save(self.dir, {"w": torch.arange(6.).reshape(2, 3), "thing": Thing(8), "n": {"step": 4}})
        into = {"w": torch.zeros(2, 3), "thing": None, "n": {"step": 0}}
        dcp.load(into, checkpoint_id=self.dir, no_dist=True)
        self.assertEqual((into["w"].sum().item(), into["thing"], into["n"]["step"]), (15, Thing(8), 4))

    def test_other_dtypes_are_converted_by_the_caller(self):
        save(self.dir, {"w": torch.arange(4.), "x": torch.arange(3)})
        into = {"w": torch.zeros(4, dtype=torch.bfloat16), "x": torch.zeros(3, dtype=torch.int32)}
        temporary = {}

        def convert(fqn, obj, saved):
            self.assertIs(obj, into[fqn])
            t = temporary[fqn] = torch.empty(obj.shape, dtype=getattr(torch, saved))
            return ("t", saved, tuple(t.shape), None, t.data_ptr(), t)

        load(self.dir, into, convert=convert)
        self.assertEqual((temporary["w"].tolist(), temporary["x"].tolist()), ([0, 1, 2, 3], [0, 1, 2]))
        with self.assertRaises(ValueError):
            load(self.dir, into)
        with self.assertRaises(ValueError):
            load(self.dir, into, convert=lambda *args: None)


if __name__ == "__main__":
    unittest.main(verbosity=1)
