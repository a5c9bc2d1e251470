"""The functions of libdcp, with NumPy."""
import array as arrays
import ast
import collections
import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import unittest

import numpy as np

import libdcp

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


class Pairs(collections.abc.Mapping):
    def __init__(self, *pairs):
        self.pairs = pairs

    def __getitem__(self, key):
        return dict(self.pairs)[key]

    def __iter__(self):
        return (key for key, _ in self.pairs)

    def __len__(self):
        return len(self.pairs)


class Case(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.place = place.name
        self.dir = os.path.join(place.name, "ck")


class Arrays(Case):
    def test_arrays_of_every_kind_and_stride(self):
        base = np.arange(60).reshape(3, 4, 5)
        trees = {name: base.astype(name) for name in "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8 ? c8 c16".split()}
        trees |= {"transposed": base.T, "step": base[::2, :, 1:4], "backwards": base[::-1, :, ::-2], "big": base.astype(">i4"),
                  "wide": np.broadcast_to(np.float32(3), (4, 5)), "empty": np.zeros((0, 3)), "zero": np.array(7.5), "fortran":
                  np.asfortranarray(base), "scalar": np.float64(2.5), "readonly": base.view()}
        trees["readonly"].flags.writeable = False
        libdcp.save(self.dir, trees, sync=False)
        tree = libdcp.load(self.dir)
        for name, want in trees.items():
            np.testing.assert_array_equal(tree[name], want, name)
            self.assertEqual(tree[name].dtype, np.asarray(want).dtype.newbyteorder("="), name)
        into = {name: np.zeros_like(want, subok=False) for name, want in trees.items() if name != "scalar"}
        into["backwards"] = np.zeros((3, 4, 3), base.dtype)[::-1, ::-1, ::-1]
        into["step"] = np.zeros((6, 8, 6), base.dtype)[::3, ::2, ::2]
        libdcp.load(self.dir, into=into, exact=False)
        for name in into:
            np.testing.assert_array_equal(into[name], trees[name], name)

    def test_other_packages_through_buffers_and_dlpack(self):
        class Producer:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, **options):
                return self.array.__dlpack__(**options)

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        class Old(Producer):
            def __dlpack__(self):
                return self.array.__dlpack__()

        class OnDevice(Producer):
            def __dlpack_device__(self):
                return (2, 0)

        data = np.arange(6, dtype=np.int32).reshape(2, 3)
        libdcp.save(self.dir, {"new": Producer(data.T), "old": Old(data), "array": arrays.array("d", [1, 2]),
                               "memory": memoryview(data)}, sync=False)
        into = {"new": Producer(np.zeros((3, 2), np.int32)), "old": Old(np.zeros((2, 3), np.int32)),
                "array": arrays.array("d", [0, 0]), "memory": memoryview(np.zeros((2, 3), np.int32))}
        libdcp.load(self.dir, into=into)
        np.testing.assert_array_equal(into["new"].array, data.T)
        np.testing.assert_array_equal(into["old"].array, data)
        self.assertEqual(list(into["array"]), [1, 2])
        np.testing.assert_array_equal(np.asarray(into["memory"]), data)
        with self.assertRaisesRegex(ValueError, "on a device"):
            libdcp.save(self.dir, {"d": OnDevice(data)}, overwrite=True)

    def test_dtypes_that_numpy_lacks(self):
        bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
        libdcp.save(self.dir, {"b": libdcp.View(bits.T, "bfloat16"), "c": libdcp.View(bits.astype("u4"), "complex32")}, sync=False)
        with libdcp.open(self.dir) as ckpt:
            self.assertEqual((ckpt["b"].dtype_name, ckpt["c"].dtype_name), ("bfloat16", "complex32"))
            self.assertEqual(ckpt["c"].dtype, np.uint32)
            self.assertEqual(ckpt["b"].dtype, np.dtype(ml_dtypes.bfloat16) if ml_dtypes else np.uint16)
            np.testing.assert_array_equal(ckpt["b"].numpy().view(np.uint16), bits.T)
        target = np.zeros((4, 3), np.uint16)
        libdcp.load(self.dir, into={"b": libdcp.View(target, "bfloat16")})
        np.testing.assert_array_equal(target, bits.T)
        with self.assertRaises(libdcp.MismatchError):
            libdcp.load(self.dir, into={"b": target})
        for wrong in (("bfloat17", bits), ("float32", bits)):
            with self.assertRaises(ValueError):
                libdcp.View(wrong[1], wrong[0])

    @unittest.skipUnless(ml_dtypes, "ml_dtypes is not installed")
    def test_ml_dtypes(self):
        names = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()
        tree = {name: np.array([0.5, 1, 2, 4]).astype(getattr(ml_dtypes, name)) for name in names}
        libdcp.save(self.dir, tree, sync=False)
        with libdcp.open(self.dir) as ckpt:
            self.assertEqual([ckpt[name].dtype_name for name in names], names)
        into = {name: np.zeros_like(a) for name, a in tree.items()}
        libdcp.load(self.dir, into=into)
        for name in names:
            self.assertEqual(into[name].tolist(), tree[name].tolist())
            self.assertEqual(into[name].dtype, tree[name].dtype)

    def test_bfloat16_without_ml_dtypes(self):
        libdcp.save(self.dir, {"b": libdcp.View(np.array([0x3F80, 0x4000], np.uint16), "bfloat16")}, sync=False)
        code = ("import sys; sys.modules['ml_dtypes'] = None\n"
                "import libdcp\n"
                f"a = libdcp.load({self.dir!r})['b']\n"
                "assert a.dtype == 'u2' and a.tolist() == [0x3F80, 0x4000], a\n")
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_what_cannot_be_stored_or_filled(self):
        for value in (np.array(["a"]), np.array([None]), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4")]), np.longdouble(1)):
            with self.subTest(value), self.assertRaises((TypeError, ValueError)):
                libdcp.save(self.dir, {"v": value})
        self.assertFalse(os.path.exists(self.dir))
        libdcp.save(self.dir, {"v": np.zeros(3, np.float32), "s": np.float32(1)}, sync=False)
        fixed = np.zeros(3, np.float32)
        fixed.flags.writeable = False
        for target in (fixed, np.zeros(4, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)):
            with self.subTest(target), self.assertRaises(ValueError):
                libdcp.load(self.dir, into={"v": target})
        with self.assertRaises(ValueError):
            libdcp.load(self.dir, into={"s": np.float32(0)})

    def test_buffers_without_strides(self):
        kinds = (ctypes.c_double * 3, ctypes.c_int32 * 3 * 2, ctypes.c_uint8 * 0, ctypes.c_float)
        for kind in kinds:
            with self.subTest(kind):
                source = kind()
                if memoryview(source).nbytes:
                    ctypes.memset(ctypes.byref(source), 0x41, ctypes.sizeof(source))
                libdcp.save(self.dir, {"c": source}, overwrite=True, sync=False)
                np.testing.assert_array_equal(libdcp.load(self.dir)["c"], np.asarray(memoryview(source)))
                target = kind()
                libdcp.load(self.dir, into={"c": target})
                self.assertEqual(bytes(target), bytes(source))

    def test_masks_are_not_lost(self):
        with self.assertRaisesRegex(TypeError, "mask"):
            libdcp.save(self.dir, {"m": np.ma.masked_array([1.0, 2.0], mask=[True, False])})

    def test_elements_that_are_still_to_be_negated(self):
        class Negated:
            """As a torch.Tensor that is the imaginary part of a conjugate: DLPack gives its memory, not its values."""

            def __init__(self, array):
                self.array = array
                self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

            def is_neg(self):
                return True

        libdcp.save(self.dir, {"n": np.zeros(2)}, sync=False)
        for function in (lambda n: libdcp.save(self.dir, {"n": n}, overwrite=True), lambda n: libdcp.load(self.dir, {"n": n})):
            with self.assertRaisesRegex(BufferError, "negation"):
                function(Negated(np.ones(2)))

    def test_targets_whose_elements_share_a_place(self):
        want = np.arange(12, dtype=np.float32).reshape(3, 4)
        libdcp.save(self.dir, {"v": want, "e": np.zeros((0, 4), np.float32)}, sync=False)

        def repeated(dtype):
            return np.lib.stride_tricks.as_strided(np.zeros(3, dtype), (3, 4), (4, 0))

        for target in (repeated("<f4"), repeated(">f4"), libdcp.View(repeated("<u4"), "float32")):
            with self.subTest(target), self.assertRaisesRegex(RuntimeError, "one place"):
                libdcp.load(self.dir, into={"v": target})
        libdcp.load(self.dir, into={"e": np.lib.stride_tricks.as_strided(np.zeros(0, "f4"), (0, 4), (4, 0))})

    def test_targets_that_are_left_alone_may_be_as_they_like(self):
        libdcp.save(self.dir, {"v": np.arange(4.), "w": np.arange(4.)}, sync=False)
        read_only, swapped = np.zeros(4), np.full(4, 7, ">f8")
        read_only.flags.writeable = False
        for odd in (np.broadcast_to(np.zeros(1), 4), np.broadcast_to(np.zeros(1, ">f8"), 4), read_only, swapped):
            into = {"v": np.zeros(4), "w": odd}
            for options in ({"exclude": ["w"]}, {"include": ["v"]}, {"rename": {"v": "v"}.get}):
                libdcp.load(self.dir, into=into, **options)
                np.testing.assert_array_equal(into["v"], np.arange(4.))
            if odd is not swapped:
                with self.assertRaises((RuntimeError, ValueError)):
                    libdcp.load(self.dir, into=into)
        np.testing.assert_array_equal(swapped, np.full(4, 7.))


class Trees(Case):
    def test_nested_states(self):
        state = {"m": {"w": np.arange(3.), "meta": collections.OrderedDict(a=1)}, "l": [np.ones(2), {"x": "y"}], "t": (1, np.ones(1)),
                 "p": Pairs(("k", 5)), "e": {}, 7: "seven"}
        libdcp.save(self.dir, state, sync=False)
        tree = libdcp.load(self.dir)
        self.assertEqual(list(tree), ["m", "l", "t", "p", "e", 7])
        self.assertIsInstance(tree["m"]["meta"], collections.OrderedDict)
        self.assertEqual((tree["l"][1], tree["t"][0], tree["p"], tree["e"], tree[7]), ({"x": "y"}, 1, {"k": 5}, {}, "seven"))
        np.testing.assert_array_equal(tree["t"][1], np.ones(1))
        into = {"m": None, "l": [np.zeros(2), {"x": None}], 7: None}
        self.assertIs(libdcp.load(self.dir, into=into), into)
        np.testing.assert_array_equal(into["m"]["w"], np.arange(3.))
        self.assertEqual((into["l"][1], into[7]), ({"x": "y"}, "seven"))

    def test_memory_that_was_read_outlives_the_checkpoint(self):
        libdcp.save(self.dir, {"w": np.arange(1000.), "o": (np.arange(5),)}, sync=False)
        tree = libdcp.load(self.dir)
        into = libdcp.load(self.dir, into={"o": None, "w": None})
        tree["w"] += 1  # its own memory, and writable
        self.assertEqual((tree["w"][999], into["w"][999], into["o"][0].tolist()), (1000, 999, [0, 1, 2, 3, 4]))

    def test_selection_prefix_and_rename(self):
        libdcp.save(self.dir, {"old": {"a": np.ones(2), "b": np.ones(2)}, "n": 1}, sync=False)
        into = {"a": np.zeros(2), "b": np.zeros(2), "c": np.zeros(2)}
        with self.assertRaises(libdcp.MissingKeyError):
            libdcp.load(self.dir, into=into, prefix="old.")
        libdcp.load(self.dir, into=into, prefix="old.", exclude=["b"], partial=True)
        self.assertEqual([into[k].tolist() for k in "abc"], [[1, 1], [0, 0], [0, 0]])
        libdcp.load(self.dir, into=into, include=["c"], rename=lambda name: {"c": "old.b"}.get(name))
        self.assertEqual(into["c"].tolist(), [1, 1])
        seen = []
        with self.assertRaises(libdcp.MismatchError):
            libdcp.load(self.dir, into={"n": np.zeros(1), "x": 1}, exact=True, difference=lambda *d: seen.append(d[:2]))
        self.assertEqual(sorted(seen), [("kind", "n"), ("missing", "x"), ("unexpected", "old.a"), ("unexpected", "old.b")])

    def test_overwriting_has_to_be_asked_for(self):
        libdcp.save(self.dir, {"n": 1}, sync=False)
        with self.assertRaises(RuntimeError):
            libdcp.save(self.dir, {"n": 2}, sync=False)
        self.assertEqual(libdcp.load(self.dir), {"n": 1})
        libdcp.save(self.dir, {"n": 2}, overwrite=True, sync=False)
        self.assertEqual(libdcp.load(self.dir), {"n": 2})

    def test_progress(self):
        tree = {str(i): np.zeros(1 << 20) for i in range(4)}
        told = []
        libdcp.save(self.dir, tree, sync=False, progress=lambda *p: told.append((threading.get_ident(), *p)))
        self.assertEqual(told[-1], (threading.get_ident(), 4 << 23, 4 << 23))
        self.assertEqual([t[1] for t in told], sorted(t[1] for t in told))
        for call in (lambda: libdcp.save(self.dir + "2", tree, sync=False, progress=lambda *p: False),
                     lambda: libdcp.load(self.dir, into=tree, progress=lambda *p: False),
                     lambda: libdcp.verify(self.dir, progress=lambda *p: False)):
            with self.assertRaises(libdcp.CanceledError):
                call()
        self.assertFalse(os.path.exists(os.path.join(self.dir + "2", ".metadata")))


class Checks(Case):
    def test_verify_finds_what_is_broken(self):
        libdcp.save(self.dir, {"w": np.arange(1000.)}, sync=False)
        self.assertEqual(libdcp.verify(self.dir)["n_defects"], 0)
        with libdcp.open(self.dir) as ckpt:
            _, _, file, offset, length, _ = ckpt._core.rows()[0][5][0]
        with open(os.path.join(self.dir, file), "r+b") as f:
            f.seek(offset + length // 2)
            byte = f.read(1)
            f.seek(-1, 1)
            f.write(bytes([byte[0] ^ 1]))
        seen = []
        report = libdcp.verify(self.dir, defect=seen.append)
        self.assertEqual((report["n_defects"], seen), (len(report["defects"]), report["defects"]))
        self.assertEqual((seen[0]["code"], seen[0]["fqn"], seen[0]["file"]), ("CHECKSUM", "w", file))
        self.assertEqual(libdcp.verify(self.dir, quick=True)["n_defects"], 0)
        with self.assertRaises(libdcp.ChecksumError) as caught, libdcp.open(self.dir, check_crc=True) as ckpt:
            ckpt["w"].numpy()
        self.assertIsInstance(caught.exception, ValueError)
        self.assertIn('"w"', str(caught.exception))

    def test_latest(self):
        with self.assertRaises(FileNotFoundError):
            libdcp.latest(self.place)
        for step in (9, 10):
            libdcp.save(os.path.join(self.place, f"step-{step}"), {"n": step}, sync=False)
        self.assertEqual(libdcp.latest(self.place), os.path.join(self.place, "step-10"))
        os.remove(os.path.join(self.place, "step-10", "__0_0.distcp"))
        self.assertEqual(libdcp.latest(self.place), os.path.join(self.place, "step-9"))

    def test_info_and_repr(self):
        libdcp.save(self.dir, {"w": np.zeros((2, 3), "f4"), "n": 1}, sync=False, save_id="0" * 8)
        with libdcp.open(self.dir) as ckpt:
            info = ckpt.info()
            self.assertEqual((info["layout"], info["n_tensors"], info["n_objects"], info["save_id"], info["writer"]),
                             ("dcp", 1, 1, "00000000", f"libdcp {libdcp.__version__}"))
            self.assertEqual(repr(ckpt["w"]), "<libdcp.LazyArray 'w' float32 [2, 3]>")
            self.assertEqual((list(ckpt.items())[1], len(ckpt), "x" in ckpt, 3 in ckpt), (("n", 1), 2, False, False))


class Threads(Case):
    def test_one_checkpoint_from_many_threads(self):
        tree = {str(i): np.full(10000, i) for i in range(20)}
        libdcp.save(self.dir, tree, sync=False)
        wrong = []

        def read(ckpt, i):
            for k in range(30):
                name = str((i * 7 + k) % 20)
                if (ckpt[name][k:] != int(name)).any():
                    wrong.append(name)

        with libdcp.open(self.dir) as ckpt:
            threads = [threading.Thread(target=read, args=(ckpt, i)) for i in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        self.assertEqual(wrong, [])

    def test_other_threads_run_during_a_save(self):
        counted = []
        done = threading.Event()

        def count():
            while not done.is_set():
                counted.append(1)

        tree = {str(i): np.ones(1 << 21) for i in range(8)}
        other = threading.Thread(target=count)
        other.start()
        before = len(counted)
        libdcp.save(self.dir, tree, sync=False)
        during = len(counted) - before
        done.set()
        other.join()
        self.assertGreater(during, 1000)

    def test_no_thread_is_left(self):
        tree = {str(i): np.ones(1 << 18) for i in range(8)}
        before = len(os.listdir("/proc/self/task"))
        libdcp.save(self.dir, tree, sync=False, threads=4)
        libdcp.load(self.dir, into=tree, threads=4)
        self.assertEqual(len(os.listdir("/proc/self/task")), before)


class Import(unittest.TestCase):
    def test_numpy_and_torch_are_not_imported(self):
        code = ("import sys, libdcp\n"
                "assert not {'numpy', 'torch', 'ml_dtypes'} & set(sys.modules), 'imported early'\n"
                "missing = [n for n in libdcp.__all__ if not hasattr(libdcp, n)]\n"
                "assert not missing, missing\n")
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_the_stub_of_the_extension_has_what_is_there(self):
        core = libdcp._core
        with open(os.path.join(os.path.dirname(libdcp.__file__), "_core.pyi")) as f:
            stub = ast.parse(f.read())
        defined = {node.name: node for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        public = {name for name in vars(core) if not name.startswith("_")}
        self.assertEqual(public, set(defined))
        for name, node in defined.items():
            if isinstance(node, ast.ClassDef) and not issubclass(getattr(core, name), Exception):
                members = {m.name for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")}
                self.assertEqual({m for m in vars(getattr(core, name)) if not m.startswith("_")}, members, name)

    def test_the_stub_names_the_arguments_that_are_there(self):
        with open(os.path.join(os.path.dirname(libdcp.__file__), "_core.pyi")) as f:
            stub = ast.parse(f.read())
        nowhere = os.path.join(__file__, "below a file")
        for node in stub.body:
            if isinstance(node, ast.FunctionDef) and node.args.kwonlyargs:
                for name in [*(argument.arg for argument in node.args.kwonlyargs), "no_such_argument"]:
                    with self.subTest(node.name, argument=name), self.assertRaises(Exception) as caught:
                        getattr(libdcp._core, node.name)(*[nowhere] * len(node.args.args), **{name: object()})
                    is_unknown = "invalid keyword" in str(caught.exception)
                    self.assertEqual(is_unknown, name == "no_such_argument", (node.name, name))

    def test_everything_public_has_a_docstring(self):
        for name in libdcp.__all__:
            item = getattr(libdcp, name)
            self.assertTrue(item.__doc__, name)
            for member, value in vars(item).items() if isinstance(item, type) and item.__module__.startswith("libdcp._c") else ():
                if callable(value) and not member.startswith("_"):
                    self.assertTrue(value.__doc__, f"{name}.{member}")


if __name__ == "__main__":
    unittest.main()
