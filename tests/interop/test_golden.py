"""PyTorch loads what `dcptool copy` makes of every golden checkpoint, with the values that their writers expected."""

import json
import tempfile
import unittest

from common import GOLDEN, has_zstd, knows_all, main, tool_copy, torch_load
from content import digests


def source_of(case):
    directory = case / "ckpt"
    return directory if directory.is_dir() else next(case.glob("*.pt"))


def cases():
    for expect in sorted(GOLDEN.glob("*/*/expect.json")):
        expected = json.loads(expect.read_text())
        if not expected.get("rank_local"):  # whose values get other names
            yield expect.parent, expected


class Golden(unittest.TestCase):
    def check(self, *options):
        n = 0
        for case, expected in cases():
            with self.subTest(case=case.relative_to(GOLDEN), options=options), tempfile.TemporaryDirectory() as target:
                tool_copy(source_of(case), target, *options)
                if knows_all(item["dtype"] for item in expected["tensors"].values()):
                    found = digests(torch_load(target))
                    self.assertEqual(found["tensors"], expected["tensors"])
                    self.assertEqual(found["objects"], expected["objects"])
                    n += 1
        self.assertGreaterEqual(n, 30)

    def test_copy(self):
        self.check()

    def test_files(self):
        self.check("--files", "3")

    def test_file_per_item(self):
        self.check("--file-per-item")

    def test_align(self):
        self.check("--align")

    @unittest.skipUnless(has_zstd(), "PyTorch's zstd extension does not work here: no zstandard module, or too old a release")
    def test_zstd(self):
        self.check("--transform", "zstd")

    def test_rank_local(self):
        for case in sorted(GOLDEN.glob("*/rank_local")):
            expected = json.loads((case / "expect.json").read_text())["per_rank"]
            with self.subTest(case=case.relative_to(GOLDEN)), tempfile.TemporaryDirectory() as target:
                tool_copy(case / "ckpt", target)
                found = digests(torch_load(target))["tensors"]
                for rank, values in expected.items():
                    self.assertEqual(found[f"rank.{rank}.mine"], values["mine"])


if __name__ == "__main__":
    main()
