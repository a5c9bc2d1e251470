"""R9.1 to R9.4: torch.save files and checkpoint directories, and what users report of conversions."""

import collections
import os
import subprocess
import sys
import unittest

import torch
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.checkpoint.format_utils as torch_format_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

import libdcp
import libdcp.torch as dcp
import pool
from libdcp.torch.format_utils import dcp_to_torch_save, torch_save_to_dcp
from support import TestCase, files_of, numbered, zeros_like

MIB = 1 << 20


def some_state():
    tied = numbered(5, 4)
    return {
        "model": {"embed": tied, "head": tied, "t": numbered(4, 6).t(), "scalar": torch.tensor(2.0, dtype=torch.bfloat16)},
        "optim": {"state": {0: {"step": torch.tensor(3.0), "m": numbered(7)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
        "names": ["a", "b"],
        "ordered": collections.OrderedDict(x=1),
        "step": 17,
    }


def save_sharded(ranks, path):
    mesh = DeviceMesh("cpu", torch.arange(ranks.size))
    dcp.save({"model": {"w": distribute_tensor(numbered(10, 3), mesh, [Split(0)])}, "step": 5}, checkpoint_id=path)


class Conversions(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.root / "model.pt"

    def test_R9_1_of_one_process(self):
        state = some_state()
        for package, expected in ((torch_dcp, torch_state), (dcp, lambda path: state)):  # PyTorch loses that keys are numbers
            path = self.root / package.__name__
            package.save(state, checkpoint_id=path, no_dist=True)
            dcp_to_torch_save(path, self.file)
            self.assertStateEqual(torch.load(self.file), expected(path))

    def test_R9_1_of_four_ranks(self):
        pool.run(save_sharded, self.path)
        dcp_to_torch_save(str(self.path), str(self.file))
        self.assertStateEqual(torch.load(self.file), {"model": {"w": numbered(10, 3)}, "step": 5})

    def test_R9_2_to_a_directory(self):
        state = some_state()
        torch.save(state, self.file)
        torch_save_to_dcp(self.file, self.path)
        for package in (dcp, torch_dcp):
            target = zeros_like(state)
            package.load(target, checkpoint_id=self.path, no_dist=True)
            self.assertStateEqual(target["model"], {**state["model"], "t": state["model"]["t"]})
            self.assertEqual((target["step"], target["names"]), (17, ["a", "b"]))
            self.assertEqual(target["optim"]["param_groups"][0]["lr"], 0.1)
        # Tied tensors are stored once, under both names.
        self.assertEqual(libdcp.hash(self.path, "model.embed"), libdcp.hash(self.path, "model.head"))

    def test_R9_2_there_and_back(self):
        state = some_state()
        torch.save(state, self.file)
        torch_save_to_dcp(self.file, self.path)
        back = self.root / "back.pt"
        dcp_to_torch_save(self.path, back)
        self.assertStateEqual(torch.load(back), state)

    def test_what_is_there_is_replaced(self):
        self.file.write_bytes(b"old")
        dcp.save({"a": numbered(2)}, checkpoint_id=self.path, no_dist=True)
        dcp_to_torch_save(self.path, self.file)
        torch.save({"b": numbered(3)}, self.file)
        torch_save_to_dcp(self.file, self.path)
        self.assertEqual(libdcp.open(self.path).keys() - {"b"}, set())
        self.assertEqual(files_of(self.root), ["checkpoint", "model.pt"])

    def command(self, *arguments):
        return subprocess.run(
            [sys.executable, "-m", "libdcp.torch.format_utils", *map(str, arguments)], capture_output=True, text=True
        )

    def test_R9_3_command_line(self):
        dcp.save({"a": numbered(2)}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(self.command("dcp_to_torch", self.path, self.file).returncode, 0)
        self.assertStateEqual(torch.load(self.file), {"a": numbered(2)})
        other = self.root / "other"
        self.assertEqual(self.command("torch_to_dcp", self.file, other).returncode, 0)
        self.assertEqual(list(libdcp.open(other)), ["a"])

    def test_R9_3_093_what_is_not_converted_does_not_look_so(self):
        found = self.command("dcp_to_torch", self.root / "absent", self.file)
        self.assertNotEqual(found.returncode, 0)
        self.assertIn("No checkpoint found at", found.stdout + found.stderr)
        self.file.write_bytes(b"no archive at all")
        found = self.command("torch_to_dcp", self.file, self.path)
        self.assertNotEqual(found.returncode, 0)
        self.assertFalse(self.path.exists())
        torch.save({"a": numbered(2)}, self.file)
        found = self.command("torch_to_dcp", self.file, self.file / "below")
        self.assertNotEqual(found.returncode, 0)

    def test_nothing_is_executed(self):
        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(marker),)

        marker = self.root / "executed"
        torch.save({"a": numbered(2), "x": Hostile()}, self.file)
        torch_save_to_dcp(self.file, self.path)
        dcp_to_torch_save(self.path, self.root / "back.pt")
        self.assertFalse(marker.exists())

    def test_094_a_level_is_added(self):
        torch.save({"w": numbered(3), "m": numbered(4)}, self.file)
        libdcp.convert(self.file, self.path, to="dcp", edits=["add:model."])
        state = {"model": {"w": torch.zeros(3), "m": torch.zeros(4)}}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertStateEqual(state, {"model": {"w": numbered(3), "m": numbered(4)}})

    def test_R9_4_101_memory_is_bounded(self):
        size = 384 * MIB
        dcp.save({"w": torch.zeros(size // 4096, 1024), "m": numbered(3)}, checkpoint_id=self.path, no_dist=True)
        program = (
            "import resource, sys; from libdcp.torch.format_utils import dcp_to_torch_save, torch_save_to_dcp\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "dcp_to_torch_save(sys.argv[1], sys.argv[2]); torch_save_to_dcp(sys.argv[2], sys.argv[3])\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
        )
        grown = subprocess.run(
            [sys.executable, "-c", program, self.path, self.file, self.root / "back"], capture_output=True, text=True, check=True
        )
        self.assertLess(int(grown.stdout) / 1024, 256)


def torch_state(path):
    """What PyTorch makes of a checkpoint in its own conversion."""
    file = path.parent / "by-torch.pt"
    torch_format_utils.dcp_to_torch_save(path, file)
    return torch.load(file)


if __name__ == "__main__":
    unittest.main()
