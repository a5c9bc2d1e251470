"""R7.16 to R7.18: saves that a helper process writes."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest

import torch

import libdcp.torch as dcp
import pool
from common import TIMEOUT_S, FailingWriter, FileSystemWriter, StagingOptions, loaded, new_stager, start_helpers, upload_of
from libdcp.torch import CheckpointException
from libdcp.torch._helper import helper
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
from support import TestCase, numbered

PROCESS = AsyncCheckpointerType.PROCESS


class StuckWriter(FileSystemWriter):
    """Waits in the helper until that is killed; tells by a file that it has got there."""

    def write_data(self, plan, planner):
        (pathlib.Path(self.path) / "here").touch()
        time.sleep(TIMEOUT_S)
        return super().write_data(plan, planner)


def save(state, path, **options):
    return upload_of(dcp.async_save(state, checkpoint_id=path, no_dist=True, async_checkpointer_type=PROCESS, **options))


def wait_for(path):
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.01)


class Alone(TestCase):
    def setUp(self):
        super().setUp()
        self.state = {"w": numbered(1000), "view": numbered(20)[5:9], "scalar": torch.tensor(7), "empty": torch.empty(0, 2),
                      "object": {"step": 3}}  # fmt: skip

    def check(self, path):
        found = loaded(path, **dict(self.state, object={"step": None}))
        self.assertStateEqual(found, self.state)

    def test_R7_16_values(self):
        self.assertEqual((AsyncCheckpointerType.THREAD.value, PROCESS.value), ("thread", "process"))

    def test_R7_16_one_helper_started_at_first_use_and_never_forked(self):
        save(self.state, self.root / "1").result()
        first = helper.pid
        save(self.state, self.root / "2").result()
        self.assertEqual(helper.pid, first)
        with open(f"/proc/{first}/cmdline", encoding="utf-8") as cmdline:
            self.assertIn("libdcp.torch._helper", cmdline.read())
        for name in ("1", "2"):
            self.check(self.root / name)

    def test_R7_16_shared_memory_goes_to_it_as_it_is(self):
        for options in (StagingOptions(False, True, False, False), StagingOptions(False, True, True, False)):
            stager = new_stager(options)
            for step in range(2):
                self.state["w"].add_(1)
                save(self.state, self.root / str(step), async_stager=stager).result()
                self.check(self.root / str(step))
            stager.close()
            shutil.rmtree(self.root)

    def test_R7_17_survives_a_failed_save(self):
        save(self.state, self.root / "1").result()
        first = helper.pid
        blocked = self.root / "file"
        blocked.write_text("no directory")
        with self.assertRaises((CheckpointException, OSError)):
            save(self.state, blocked / "2").result()
        with self.assertRaises(CheckpointException) as caught:
            save(self.state, self.root / "3", storage_writer=FailingWriter(self.root / "3")).result()
        self.assertRegex(str(caught.exception.failures[0][0]), "write_data fails")
        save(self.state, self.root / "4").result()
        self.assertEqual(helper.pid, first)
        self.check(self.root / "4")

    def test_R7_17_killed_while_it_writes(self):
        save(self.state, self.path).result()
        stager = new_stager(StagingOptions(False, True, False, False))
        stuck = save({"w": torch.zeros(3)}, self.path, storage_writer=StuckWriter(self.path), async_stager=stager)
        wait_for(self.path / "here")
        first = helper.pid
        os.kill(first, signal.SIGKILL)
        with self.assertRaises(CheckpointException) as caught:
            stuck.result()
        self.assertRegex(str(caught.exception.failures[0][0]), "helper process that writes checkpoints has died. Exit code: -9")
        self.check(self.path)
        self.state["w"].add_(1)
        save(self.state, self.path).result()
        self.assertNotEqual(helper.pid, first)
        self.check(self.path)
        stager.close()
        owners = {str(os.getpid()), str(first), str(helper.pid)}  # PyTorch's names have the process in them
        self.assertEqual([name for name in os.listdir("/dev/shm") if owners & set(name.split("_"))], [])

    def test_R7_16_ends_with_its_parent(self):
        script = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import libdcp.torch as dcp
from libdcp.torch._helper import helper
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
dcp.async_save({"w": torch.ones(3)}, checkpoint_id=sys.argv[1], async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
print(helper.pid, flush=True)
if sys.argv[2] == "killed": os.kill(os.getpid(), 9)
"""
        for how, code in (("normally", 0), ("killed", -9)):
            done = subprocess.run([sys.executable, "-c", script, self.root / how, how], capture_output=True, text=True, timeout=120)
            self.assertEqual((done.returncode, done.stderr), (code, ""))
            deadline = time.monotonic() + TIMEOUT_S
            while is_running(int(done.stdout)):
                self.assertLess(time.monotonic(), deadline, "the helper is still there")
                time.sleep(0.05)

    def test_R7_18_classes_of_a_script_without_a_guard(self):
        script = self.root / "train.py"
        script.write_text(
            """
import sys, torch, warnings
warnings.simplefilter("ignore")
import libdcp.torch as dcp
from libdcp.torch.state_dict_saver import AsyncCheckpointerType

class Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        print("writing", __name__, flush=True)
        return super().write_data(plan, planner)

if __name__ == "__main__":
    writer = Writer(sys.argv[1])
    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, async_checkpointer_type=kind).result()
"""
        )
        done = subprocess.run([sys.executable, script, self.path], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.stdout.split(), done.stderr), (["writing", "__mp_main__"], ""))
        self.assertEqual(loaded(self.path, w=torch.zeros(3))["w"].tolist(), [1.0] * 3)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def save_in_group(ranks, path):
    """The sharded state of a group; the process of this rank's helper, and whether the checkpoint is right."""
    state = {"all": torch.full((5,), 4.0), f"of {ranks.rank}": torch.full((3,), float(ranks.rank))}
    future = dcp.async_save(state, checkpoint_id=path, process_group=ranks.group, async_checkpointer_type=PROCESS)
    future.result(TIMEOUT_S)
    target = {"all": torch.zeros(5), **{f"of {rank}": torch.zeros(3) for rank in range(ranks.size)}}
    dcp.load(target, checkpoint_id=path, process_group=ranks.group)
    return helper.pid, [tensor[0].item() for tensor in target.values()]


class Groups(TestCase):
    def test_R7_18_another_group_in_a_later_save(self):
        start_helpers(self.root / "first", world=4)
        pids = {}
        for members in ((1, 3), (0, 1, 2, 3), (0, 1)):
            found = pool.run(save_in_group, str(self.root / str(len(members))), members=members)
            for rank, (pid, values) in zip(members, found):
                self.assertEqual(values, [4.0, *map(float, range(len(members)))])
                self.assertEqual(pids.setdefault(rank, pid), pid, "another helper")


if __name__ == "__main__":
    unittest.main()
