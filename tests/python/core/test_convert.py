"""libdcp.convert: its options reach the library, and what it makes reads back the same."""
import json
import os
import struct
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

    def assert_refused(self, error, words, source=None, **options):
        with self.assertRaises(error) as caught:
            libdcp.convert(source or self.source, self.target, **options)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertFalse(os.path.exists(self.target))

    def test_bad_input_is_named(self):
        libdcp.save(self.source, {"a": np.array([1, 70000, -1e9], np.float32), "b": self.weights}, overwrite=True)
        for form in ("dcp", "torch", "safetensors", "hf"):
            self.assert_refused(libdcp.MismatchError, ['"a"', '"b"', '"same"'], to=form, edits=["s/.*/same/"])
            self.assert_refused(libdcp.MismatchError, ['"a"', "2 of the 3 numbers", "float16"], to=form, cast={"a": "float16"})
        mapping = self.source + ".json"
        for mapped, word in (({"a": 1, "b": 1, "gone": 1}, "'gone'"), ({"a": 1}, "'b'")):
            with open(mapping, "w", encoding="utf-8") as file:
                json.dump(mapped, file)
            self.assert_refused(libdcp.MismatchError, [word], to="hf", mapping=mapping)

    def write_shard(self, directory, number, start, stop):
        """Elements start to stop of w, as PyTorch writes them."""
        info = json.dumps({"w": {"saved_offsets": [start]}})
        header = json.dumps({"w": {"dtype": "F32", "shape": [stop - start], "data_offsets": [0, 4 * (stop - start)]},
                             "__metadata__": {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}}).encode()
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, f"shard-0000{number}-model-00001-of-00001.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header + bytes(4 * (stop - start)))

    def test_shards_that_do_not_cover_the_tensor(self):
        shards = self.source + ".shards"
        self.write_shard(shards, 1, 0, 3)
        self.write_shard(shards, 2, 5, 8)
        for form in ("dcp", "torch", "safetensors", "hf"):
            self.assert_refused(libdcp.FormatError, ['"w"'], source=shards, to=form)

    def test_progress_can_cancel(self):
        told = []
        libdcp.convert(self.source, self.target, to="torch", progress=lambda done, total: told.append((done, total)) or True)
        self.assertTrue(told)
        with self.assertRaises(libdcp.CanceledError):
            libdcp.convert(self.source, self.target + "2", to="torch", progress=lambda done, total: False)
        self.assertFalse(os.path.exists(self.target + "2"))


if __name__ == "__main__":
    unittest.main()
