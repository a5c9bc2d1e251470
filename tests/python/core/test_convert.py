"""libdcp.convert: its options reach the library, and what it makes reads back the same."""
import os
import tempfile
import unittest

import numpy as np

import libdcp


class Convert(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.source, self.target = os.path.join(place.name, "source"), os.path.join(place.name, "target")
        self.weights = np.arange(24, dtype=np.float32).reshape(4, 6)
        self.tree = {"model": {"w": self.weights, "b": np.arange(3, dtype=np.int64)}, "optim": {"m": np.ones(5)}, "step": 7}
        libdcp.save(self.source, self.tree)

    def names(self, path):
        with libdcp.open(path) as checkpoint:
            return sorted(checkpoint)

    def test_every_form_and_back(self):
        back = self.target + ".back"
        for form, objects in (("dcp", "error"), ("torch", "error"), ("safetensors", "drop"), ("hf", "drop")):
            target = f"{self.target}.{form}"
            report = libdcp.convert(self.source, target, to=form, objects=objects)
            self.assertEqual((report["n_tensors"], report["n_objects"]), (3, 0 if objects == "drop" else 1))
            libdcp.convert(target, back, to="dcp", overwrite=True)
            for name in ("model.w", "model.b", "optim.m"):
                self.assertEqual(libdcp.hash(back, name), libdcp.hash(self.source, name), form)

    def test_selection_names_and_dtypes(self):
        libdcp.convert(self.source, self.target, to="hf", include=["model.*"], exclude=["*.b"],
                       edits=["strip:model.", "s/^w$/weight/"], cast={"*": "float16"})
        with libdcp.open(self.target) as checkpoint:
            self.assertEqual(list(checkpoint), ["weight"])
            found = np.asarray(checkpoint["weight"][...])
            self.assertEqual(found.dtype, np.float16)
            np.testing.assert_array_equal(found, self.weights.astype(np.float16))

    def test_split_and_ranks(self):
        libdcp.convert(self.source, self.target, to="dcp", split={"model": "model.*", "rest": "*"}, ranks=2)
        self.assertEqual(self.names(os.path.join(self.target, "model")), ["model.b", "model.w"])
        self.assertEqual(self.names(os.path.join(self.target, "rest")), ["optim.m", "step"])
        self.assertIn("__1_0.distcp", os.listdir(os.path.join(self.target, "model")))

    def test_sizes_of_files(self):
        report = libdcp.convert(self.source, self.target, to="hf", objects="drop", max_file_bytes=100)
        self.assertEqual(report["n_files"], len([name for name in os.listdir(self.target) if name.endswith(".safetensors")]))
        self.assertGreater(report["n_files"], 1)

    def test_errors(self):
        for error, options in (
            (libdcp.UnsupportedError, {"to": "hf"}),
            (libdcp.NotFoundError, {"to": "dcp", "include": ["absent"]}),
            (libdcp.MismatchError, {"to": "dcp", "cast": {"model.w": "uint8", "*": "bool"}, "edits": ["s/.*/same/"]}),
            (ValueError, {"to": "nothing"}),
            (ValueError, {"to": "dcp", "cast": {"*": "float7"}}),
            (ValueError, {"to": "dcp", "dequantize": "float7"}),
        ):
            with self.assertRaises(error, msg=str(options)):
                libdcp.convert(self.source, self.target, **options)
            self.assertFalse(os.path.exists(self.target), options)
        libdcp.convert(self.source, self.target, to="torch")
        with self.assertRaises(libdcp.ExistsError):
            libdcp.convert(self.source, self.target, to="torch")
        with self.assertRaises(FileNotFoundError):
            libdcp.convert(self.source + "x", self.target, to="torch", overwrite=True)

    def test_progress_can_cancel(self):
        told = []
        libdcp.convert(self.source, self.target, to="torch", progress=lambda done, total: told.append((done, total)) or True)
        self.assertTrue(told)
        with self.assertRaises(libdcp.CanceledError):
            libdcp.convert(self.source, self.target + "2", to="torch", progress=lambda done, total: False)
        self.assertFalse(os.path.exists(self.target + "2"))


if __name__ == "__main__":
    unittest.main()
