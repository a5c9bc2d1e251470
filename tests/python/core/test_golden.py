"""Checkpoints that real PyTorch releases wrote read as their writers expected, and come back after being saved again."""
import hashlib
import json
import os
import pathlib
import tempfile
import unittest

import numpy as np

import libdcp

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def cases():
    """(path, what is expected) of every golden checkpoint."""
    for expect in sorted(GOLDEN.glob("*/*/expect.json")):
        place = expect.parent / "ckpt"
        yield (place if place.exists() else expect.parent / "file.pt"), json.loads(expect.read_text())


def facts(array, dtype_name):
    data = np.ascontiguousarray(array).tobytes()
    return {"dtype": dtype_name, "shape": list(array.shape), "sha256": hashlib.sha256(data).hexdigest()}


def of_objects(checkpoint, expected):
    return {fqn: repr(checkpoint[fqn]) for fqn in expected}


class Golden(unittest.TestCase):
    def each(self, check):
        n = 0
        for path, expected in cases():
            n += 1
            with self.subTest(str(path.relative_to(GOLDEN))):
                check(path, expected)
        self.assertGreater(n, 50)

    def test_tensors_hashes_and_objects(self):
        self.each(self.check_reading)

    def check_reading(self, path, expected):
        with libdcp.open(path, check_crc=True) as ckpt:
            for fqn, want in expected["tensors"].items():
                lazy = ckpt[fqn]
                self.assertIn(fqn, ckpt)
                self.assertEqual((lazy.dtype_name, list(lazy.shape)), (want["dtype"], want["shape"]), fqn)
                self.assertEqual(facts(lazy.numpy(), lazy.dtype_name), want, fqn)
                self.assertEqual(ckpt.hash(fqn), want["sha256"], fqn)
                self.assertEqual(lazy.nbytes, lazy.numpy().nbytes)
            self.assertEqual(of_objects(ckpt, expected["objects"]), expected["objects"])
            for rank, own in expected.get("per_rank", {}).items():
                for fqn, want in own.items():
                    lazy = ckpt[f"rank.{rank}.{fqn}"]
                    self.assertEqual(facts(lazy.numpy(), lazy.dtype_name), want)
            if not expected.get("rank_local"):
                self.assertEqual(set(ckpt), set(expected["tensors"]) | set(expected["objects"]))
            self.assertEqual(ckpt.verify()["n_defects"], 0)

    def test_everything_saved_again_and_loaded_in_place(self):
        self.each(self.check_saving_again)

    def check_saving_again(self, path, expected):
        if expected.get("rank_local"):
            return
        with libdcp.open(path) as ckpt:
            dtypes = {fqn: ckpt[fqn].dtype_name for fqn in expected["tensors"]}
            flat = {fqn: libdcp.View(ckpt[fqn].numpy(), dtypes[fqn]) for fqn in dtypes}
            objects = {fqn: ckpt[fqn] for fqn in expected["objects"]}
            flat |= {fqn: value for fqn, value in objects.items() if value != {}}  # which flattening loses
        with tempfile.TemporaryDirectory() as place:
            again = os.path.join(place, "again")
            libdcp.save(again, flat, sync=False)
            into = {fqn: libdcp.View(np.empty_like(v.array), v.dtype) if isinstance(v, libdcp.View) else None
                    for fqn, v in flat.items()}
            libdcp.load(again, into=into)
            for fqn, want in expected["tensors"].items():
                self.assertEqual(facts(into[fqn].array, dtypes[fqn]), want, fqn)
            for fqn in flat.keys() - dtypes.keys():
                self.assertEqual(repr(into[fqn]), repr(objects[fqn]), fqn)
            with libdcp.open(again) as ckpt:
                for fqn, want in expected["tensors"].items():
                    self.assertEqual(ckpt.hash(fqn), want["sha256"])
                    self.assertEqual(ckpt[fqn].dtype_name, want["dtype"])

    def test_trees_nest_as_they_were_saved(self):
        self.each(self.check_tree)

    def check_tree(self, path, expected):
        tree = libdcp.load(path)
        with libdcp.open(path) as ckpt:
            for fqn, kind, _, _, keys, _ in ckpt._core.rows():
                own = fqn.split(".")[:2] if expected.get("per_rank") and fqn.startswith("rank.") else []
                at = tree
                for key in [*own, *keys]:
                    at = at[key if isinstance(at, list) or key in at else int(key)]
                if kind == "tensor":
                    np.testing.assert_array_equal(at, ckpt[fqn].numpy(), fqn)
                else:
                    self.assertEqual(repr(at), repr(ckpt[fqn]), fqn)


if __name__ == "__main__":
    unittest.main()
