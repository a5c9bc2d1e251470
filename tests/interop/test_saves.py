"""dcptool reads what this PyTorch saves, through each of its writers."""

import collections
import pathlib
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp

from common import digests, has_zstd, main, run, tool_copy, tool_hash, torch_load, TOOL
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
        dcp.save(content(), storage_writer=dcp.FileSystemWriter(str(self.path), **options), no_dist=True)
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
        dcp.save(old, storage_writer=dcp.FileSystemWriter(str(self.path), single_file_per_rank=False), no_dist=True)
        self.check()

    def test_torch_save(self):
        whole = self.path.parent / "whole.pt"
        torch.save(state(), whole)
        self.assertEqual(tool_hash(whole), digests(flat()))
        torch.save(state(), whole, _use_new_zipfile_serialization=False)
        self.assertEqual(tool_hash(whole), digests(flat()))

    def test_tensors_inside_instances_of_unknown_classes(self):
        saved = {"pair": Pair(torch.arange(3.0), {"deep": Pair(1, torch.ones(2, 2))}), "layer": (torch.nn.Linear(2, 1),)}
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(str(self.path)), no_dist=True)
        copied = self.path.parent / "copied"
        tool_copy(self.path, copied)
        loaded = {"pair": None, "layer": None}
        dcp.load(loaded, checkpoint_id=str(copied), no_dist=True)
        self.assertTrue(torch.equal(loaded["pair"].left, saved["pair"].left))
        self.assertTrue(torch.equal(loaded["pair"].right["deep"].right, torch.ones(2, 2)))
        self.assertTrue(torch.equal(loaded["layer"][0].weight, saved["layer"][0].weight))


if __name__ == "__main__":
    main()
