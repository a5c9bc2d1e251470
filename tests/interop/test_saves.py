"""dcptool reads what this PyTorch saves, through each of its writers."""

import collections
import json
import pathlib
import subprocess
import tempfile
import unittest
import warnings

import torch

from common import RELEASE, has_zstd, load, main, run, save, tool_copy, tool_hash, torch_load, TOOL
from content import digests
from test_library import flat, state

Pair = collections.namedtuple("Pair", "left right")

# PyTorch refuses to save these names and kinds in one way or another; test_library has them.
LEFT_OUT = {"sharded"}


def content():
    """The state of test_library without what PyTorch flattens to other names."""
    return {name: value for name, value in flat().items() if name.split(".")[0] not in LEFT_OUT}


class Saves(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = pathlib.Path(directory.name) / "saved"

    def check(self, **options):
        save(content(), self.path, **options)
        expected = digests(content())
        self.assertEqual(tool_hash(self.path), expected)
        run(TOOL, "verify", "--quiet", self.path)
        copied = self.path.parent / "copied"
        tool_copy(self.path, copied)
        self.assertEqual(digests(torch_load(copied)), expected)

    def test_plain(self):
        self.check()

    def test_threads(self):
        self.check(thread_count=3)

    def test_file_per_item(self):
        self.check(single_file_per_rank=False)

    @unittest.skipUnless(has_zstd(), "PyTorch's zstd extension does not work here")
    def test_zstd(self):
        from torch.distributed.checkpoint._extension import ZStandard

        self.check(_extensions=[ZStandard()])

    def test_over_an_old_one(self):
        old = {"only.old": torch.ones(3), "shapes.tied": torch.zeros(1)}
        save(old, self.path, single_file_per_rank=False)
        self.check()

    def test_torch_save(self):
        whole = self.path.parent / "whole.pt"
        torch.save(state(), whole)
        self.assertEqual(tool_hash(whole), digests(flat()))
        torch.save(state(), whole, _use_new_zipfile_serialization=False)
        self.assertEqual(tool_hash(whole), digests(flat()))

    def test_storages_outside_of_tensors(self):
        """Quantised tensors and bare storages inside objects: the records are passed on as they are."""
        quantised = torch.quantize_per_tensor(torch.tensor([-1.0, 0.5, 2.0]), 0.25, 3, torch.quint8)
        saved = {"pair": (quantised, torch.arange(3)), "storage": (torch.arange(4.0).untyped_storage(), "text"), "plain": 1}
        save(saved, self.path)
        for options in [(), ("--file-per-item",), ("--align",), *([("--transform", "zstd")] if has_zstd() else [])]:
            with self.subTest(options=options):
                copied = self.path.parent / f"copied{options[-1:]}"
                tool_copy(self.path, copied, *options)
                run(TOOL, "verify", "--quiet", copied)
                loaded = {name: None for name in saved}
                load(loaded, copied)
                self.assertTrue(torch.equal(loaded["pair"][0].int_repr(), quantised.int_repr()))
                self.assertEqual(loaded["pair"][0].q_scale(), 0.25)
                self.assertTrue(torch.equal(loaded["pair"][1], torch.arange(3)))
                self.assertEqual(loaded["storage"][0].tolist(), saved["storage"][0].tolist())
                self.assertEqual(loaded["plain"], 1)
                self.assertEqual(tool_hash(copied), tool_hash(self.path))

    def test_dtypes_that_are_not_read(self):
        quantised = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save({"quantised": quantised, "plain": torch.arange(4.0)}, self.path)
        listed = json.loads(run(TOOL, "ls", "--json", self.path))
        self.assertEqual({i["fqn"]: i["dtype"] for i in listed["items"]}, {"quantised": "?", "plain": "float32"})
        run(TOOL, "cat", self.path, "plain")
        copied = self.path.parent / "copied"
        tool_convert = [TOOL, "convert", "--to", "hf", "--exclude", "quantised", self.path, copied]
        run(*tool_convert)
        for refused in (["cat", self.path, "quantised"], ["cat", "--format", "json", self.path, "quantised", "0:1"],
                        ["hash", self.path], ["copy", self.path, f"{copied}2"], ["diff", self.path, self.path],
                        ["convert", "--to", "torch", self.path, f"{copied}3"]):
            done = subprocess.run([TOOL, *refused], capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, refused)
            self.assertIn('"quantised": its dtype, torch.quint8, is not one that is read here', done.stderr, refused)
        self.assertEqual(subprocess.run([TOOL, "verify", self.path], capture_output=True).returncode, 1)

    def test_names_that_collide(self):
        """Of a torch.save file, whose keys nobody can choose any more. The copy has them all, and PyTorch can do with it what it does."""
        whole = self.path.parent / "whole.pt"
        saved = {"a.b": torch.arange(3), "a": {"b": torch.ones(2), "c": 1}, "a.b#2": 7}
        torch.save(saved, whole)
        names = {"a.b": saved["a.b"], "a.b#3": saved["a"]["b"], "a.c": 1, "a.b#2": 7}
        self.assertEqual(tool_hash(whole), digests(names))
        copied = self.path.parent / "copied"
        tool_copy(whole, copied)
        self.assertEqual(digests(torch_load(copied)), digests(names))
        if RELEASE >= (2, 3):
            from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

            back = self.path.parent / "back.pt"
            dcp_to_torch_save(str(copied), str(back))
            self.assertEqual(tool_hash(back), digests(names))

    def test_tensors_inside_instances_of_unknown_classes(self):
        saved = {"pair": Pair(torch.arange(3.0), {"deep": Pair(1, torch.ones(2, 2))}), "layer": (torch.nn.Linear(2, 1),)}
        save(saved, self.path)
        copied = self.path.parent / "copied"
        tool_copy(self.path, copied)
        loaded = {"pair": None, "layer": None}
        load(loaded, copied)
        self.assertTrue(torch.equal(loaded["pair"].left, saved["pair"].left))
        self.assertTrue(torch.equal(loaded["pair"].right["deep"].right, torch.ones(2, 2)))
        self.assertTrue(torch.equal(loaded["layer"][0].weight, saved["layer"][0].weight))


if __name__ == "__main__":
    main()
