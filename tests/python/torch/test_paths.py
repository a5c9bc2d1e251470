"""Places whose names are not UTF-8: Python shows them as text with lone surrogates."""

import os
import pathlib
import unittest

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp
import libdcp.torch as dcp
from libdcp.torch import filesystem, format_utils
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
from hooked import HookedLoad, HookedSave
from support import TestCase, needs, numbered, raises_together


class NotUtf8(TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(os.fsdecode(os.fsencode(self.root) + b"/step-\xff\xfe"))
        self.state = {"w": numbered(3), "o": {"step": 7}}

    def check(self, path, load=dcp.load, **options):
        found = {"w": torch.zeros(3), "o": {"step": 0}}
        load(found, checkpoint_id=path, no_dist=True, **options)
        self.assertStateEqual(found, self.state)

    def test_saves_and_loads(self):
        for number, (kind, save, planner) in enumerate((
            (str, dcp.save, None),
            (pathlib.Path, dcp.save, HookedSave()),
            (str, torch_dcp.save, None),
            (str, lambda *a, **k: dcp.async_save(*a, **k).result(), None),
            (str, lambda *a, **k: dcp.async_save(*a, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **k).result(), None),
        )):  # fmt: skip
            path = kind(f"{self.path}{number}")
            for _ in range(2):  # the second replaces the first
                save(dict(self.state), checkpoint_id=path, planner=planner, no_dist=True)
            self.check(path)
            self.check(path, planner=HookedLoad())
            self.check(path, load=torch_dcp.load)
            self.assertTrue(os.path.exists(os.fsencode(path) + b"/.metadata"))

    @needs(filesystem, "CURRENT_DCP_VERSION")
    def test_ids_in_metadata(self):
        metadata = dcp.save(dict(self.state), checkpoint_id=self.path, no_dist=True)
        self.assertEqual(os.fsencode(metadata.storage_meta.checkpoint_id), os.fsencode(self.path))

    def test_conversions(self):
        dcp.save(dict(self.state), checkpoint_id=self.path, no_dist=True)
        file, again = f"{self.path}.pt", f"{self.path}.again"
        format_utils.dcp_to_torch_save(self.path, file)
        self.assertEqual(torch.load(file)["w"].tolist(), [0, 1, 2])
        format_utils.torch_save_to_dcp(file, again)
        self.check(again)
        self.assertIn(libdcp.latest(self.root), (os.fspath(self.path), again))
        self.assertEqual(libdcp.verify(self.path)["n_defects"], 0)

    def test_errors_name_them(self):
        with raises_together(self) as caught:
            dcp.load({"w": torch.zeros(3)}, checkpoint_id=self.path, no_dist=True)
        [(cause, _)] = caught.failures.values()
        self.assertIsInstance(cause, FileNotFoundError)
        self.assertIn("step-", str(cause))


if __name__ == "__main__":
    unittest.main()
