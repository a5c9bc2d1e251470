"""R7.16 to R7.18: saves whose bytes a helper process writes."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import unittest
import warnings
from unittest import mock

import torch

import libdcp.torch as dcp
import pool
from common import TIMEOUT_S, FailingWriter, FileSystemWriter, helpers, loaded, new_stager, state_of, upload_of
from libdcp import _core
from libdcp.torch import CheckpointException, _helper
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
from support import TestCase, numbered

PROCESS = AsyncCheckpointerType.PROCESS
LARGE = 1 << 20  # elements: large enough for the helper


class OwnWriter(FileSystemWriter):
    """A hook of the program's around the writing; tells in which process it is called."""

    def write_data(self, plan, planner):
        self.written_by = os.getpid()
        return super().write_data(plan, planner)


class PythonWriter(FileSystemWriter):
    """Writes by means of its own, into a file system of the program's."""

    def __init__(self, path):
        super().__init__(path)
        self.fs.is_own = True


def save(state, path, **options):
    return upload_of(dcp.async_save(state, checkpoint_id=path, no_dist=True, async_checkpointer_type=PROCESS, **options))


def wait_until(happens):
    deadline = time.monotonic() + TIMEOUT_S
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)


SYSTEM = ("libc.so", "ld-linux", "libasan", "libubsan", "libtsan", "libm.so", "libgcc_s", "libstdc++", "libpthread", "libdl", "librt")


def libraries_of(pid):
    """Names of the libraries that a process has loaded."""
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sorted({os.path.basename(line.split()[-1]) for line in maps if ".so" in line})


def written_bytes_of(pid):
    """What a process has written so far."""
    text = pathlib.Path(f"/proc/{pid}/io").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("wchar:")))


class Alone(TestCase):
    def setUp(self):
        super().setUp()
        self.state = {"w": numbered(LARGE), "view": numbered(20)[5:9], "scalar": torch.tensor(7), "empty": torch.empty(0, 2),
                      "object": {"step": 3}}  # fmt: skip

    def check(self, path):
        found = loaded(path, **dict(self.state, object={"step": None}))
        self.assertStateEqual(found, self.state)

    def test_R7_16_values(self):
        self.assertEqual((AsyncCheckpointerType.THREAD.value, PROCESS.value), ("thread", "process"))

    def test_R7_16_one_helper_started_at_first_use_and_never_forked(self):
        save(self.state, self.root / "1").result()
        [first] = helpers()
        executable = os.path.realpath(f"/proc/{first}/exe")
        self.assertEqual(os.path.basename(executable), "dcp-writer")
        self.assertEqual([name for name in libraries_of(first) if not name.startswith(SYSTEM)], [], "U34: no device is touched there")
        before = written_bytes_of(first)
        save(self.state, self.root / "2").result()
        self.assertEqual(helpers(), [first])
        self.assertGreaterEqual(written_bytes_of(first) - before, self.state["w"].nbytes)
        for name in ("1", "2"):
            self.check(self.root / name)

    def test_R7_16_whatever_the_stager(self):
        for options in ((False, True, False, False), (False, True, True, False)):
            stager = new_stager(options)
            for step in range(2):
                self.state["w"].add_(1)
                save(self.state, self.root / str(step), async_stager=stager).result()
                self.check(self.root / str(step))
            stager.close()
            shutil.rmtree(self.root)

    def test_R7_16_hooks_are_called_here_and_their_bytes_written_there(self):
        save(self.state, self.root / "1").result()
        [helper] = helpers()
        before = written_bytes_of(helper)
        writer = OwnWriter(self.root / "2")
        save(self.state, self.root / "2", storage_writer=writer).result()
        self.assertEqual(writer.written_by, os.getpid())
        self.assertGreaterEqual(written_bytes_of(helper) - before, self.state["w"].nbytes)
        self.check(self.root / "2")

    def test_R7_16_what_it_cannot_write_is_written_here_with_a_warning(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            save(self.state, self.path, storage_writer=PythonWriter(self.path)).result()
        self.assertEqual([1 for one in caught if "PythonWriter writes in a thread of this process" in str(one.message)], [1])
        self.check(self.path)

    def test_R7_17_survives_a_failed_save(self):
        save(self.state, self.root / "1").result()
        first = helpers()
        blocked = self.root / "file"
        blocked.write_text("no directory")
        with self.assertRaises((CheckpointException, OSError)):
            save(self.state, blocked / "2").result()
        with self.assertRaises(CheckpointException) as caught:
            save(self.state, self.root / "3", storage_writer=FailingWriter(self.root / "3")).result()
        self.assertRegex(str(caught.exception.failures[0][0]), "write_data fails")
        save(self.state, self.root / "4").result()
        self.assertEqual(helpers(), first)
        self.check(self.root / "4")

    def test_R7_17_killed_while_it_writes(self):
        save(self.state, self.path).result()
        shared, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
        for writer in (None, OwnWriter(self.path)):
            stager = new_stager((False, True, False, False))
            [first] = helpers()
            os.kill(first, signal.SIGSTOP)  # the save comes to where it waits for it
            stuck = save({"w": torch.zeros(3 * LARGE)}, self.path, storage_writer=writer, async_stager=stager)
            wait_until(lambda: len(list(self.path.glob("*.distcp"))) > 1)
            self.assertFalse(stuck.done())
            self.assertEqual(stuck.progress().written_bytes, 0)  # U36: shows that it hangs
            os.kill(first, signal.SIGKILL)
            with self.assertRaises(CheckpointException) as caught:
                stuck.result(TIMEOUT_S)
            self.assertRegex(str(caught.exception.failures[0][0]), "the writing process was ended by signal 9")
            self.check(self.path)
            self.state["w"].add_(1)
            save(self.state, self.path).result()
            self.assertEqual(len(helpers()), 1)
            self.assertNotEqual(helpers(), [first])
            self.check(self.path)
            stager.close()
        del stuck
        ours = {name for name in set(os.listdir("/dev/shm")) - shared if str(os.getpid()) in name.split("_")}
        self.assertEqual((ours, len(os.listdir("/proc/self/fd"))), (set(), descriptors))

    def test_R7_17_hung_and_canceled(self):
        save(self.state, self.path).result()
        shared, descriptors = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
        for writer in (None, OwnWriter(self.path)):
            [first] = helpers()
            os.kill(first, signal.SIGSTOP)
            stuck = save({"w": torch.zeros(3 * LARGE)}, self.path, storage_writer=writer)
            wait_until(lambda: len(list(self.path.glob("*.distcp"))) > 1)
            with self.assertRaises(TimeoutError):
                stuck.result(0.3)
            self.assertTrue(stuck.cancel())
            with self.assertRaises(CheckpointException) as caught:
                stuck.result(TIMEOUT_S)
            self.assertIsInstance(caught.exception.failures[0][0], _core.CanceledError)
            self.assertIsNone(state_of(first))
            self.check(self.path)
            self.state["w"].add_(1)
            save(self.state, self.path).result()
            self.assertNotEqual(helpers(), [first])
            self.check(self.path)
        del stuck
        ours = {name for name in set(os.listdir("/dev/shm")) - shared if str(os.getpid()) in name.split("_")}
        self.assertEqual((ours, len(os.listdir("/proc/self/fd"))), (set(), descriptors))

    def test_R7_16_ends_with_its_parent(self):
        script = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import libdcp.torch as dcp
from common import helpers
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
dcp.async_save({"w": torch.ones(1 << 20)}, checkpoint_id=sys.argv[1], async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
print(*helpers(), flush=True)
if sys.argv[2] == "killed": os.kill(os.getpid(), 9)
"""
        for how, code in (("normally", 0), ("killed", -9)):
            done = subprocess.run([sys.executable, "-c", script, self.root / how, how], capture_output=True, text=True, timeout=120)
            self.assertEqual((done.returncode, done.stderr), (code, ""))
            pid = int(done.stdout)
            wait_until(lambda pid=pid: state_of(pid) is None)

    def test_R7_17_a_forked_child_has_its_own(self):
        save(self.state, self.root / "1").result()
        first = helpers()
        child = os.fork()
        if child == 0:
            try:
                save({"w": torch.ones(LARGE)}, self.root / "2").result(TIMEOUT_S)
                os._exit(0 if len(helpers()) == 1 else 1)
            finally:
                os._exit(2)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(helpers(), first)
        save(self.state, self.root / "3").result()
        self.check(self.root / "3")
        self.assertEqual(loaded(self.root / "2", w=torch.zeros(LARGE))["w"].sum().item(), LARGE)

    def test_R7_18_classes_of_a_script_without_a_guard(self):
        """No module of the program is imported anew."""
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

writer = Writer(sys.argv[1])
kind = AsyncCheckpointerType.PROCESS
dcp.async_save({"w": torch.ones(1 << 20)}, storage_writer=writer, async_checkpointer_type=kind).result()
"""
        )
        done = subprocess.run([sys.executable, script, self.path], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.stdout.split(), done.stderr), (["writing", "__main__"], ""))
        self.assertEqual(loaded(self.path, w=torch.zeros(1 << 20))["w"].sum().item(), 1 << 20)


def save_in_group(ranks, path):
    """The sharded state of a group; the process of this rank's helper, and whether the checkpoint is right."""
    state = {"all": torch.full((5,), 4.0), f"of {ranks.rank}": torch.full((LARGE,), float(ranks.rank))}
    future = dcp.async_save(state, checkpoint_id=path, process_group=ranks.group, async_checkpointer_type=PROCESS)
    future.result(TIMEOUT_S)
    target = {"all": torch.zeros(5), **{f"of {rank}": torch.zeros(LARGE) for rank in range(ranks.size)}}
    dcp.load(target, checkpoint_id=path, process_group=ranks.group)
    return helpers(), [tensor[-1].item() for tensor in target.values()]


def save_without_a_helper_on_one(ranks, path):
    """There is no dcp-writer where rank 1 runs. What each rank sees, and whether the next save is right."""
    state = {f"of {ranks.rank}": torch.ones(LARGE)}
    seen = None
    try:
        with contextlib.ExitStack() as stack:
            if ranks.rank == 1:
                stack.enter_context(mock.patch.object(_helper, "_helper", None))
                stack.enter_context(mock.patch.dict(os.environ, DCP_WRITER="/nowhere/dcp-writer"))
            options = {"process_group": ranks.group, "async_checkpointer_type": PROCESS}
            failure = dcp.async_save(state, checkpoint_id=f"{path}/1", **options).exception(TIMEOUT_S)
            seen = {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in failure.failures.items()}
    except _core.Error as error:
        seen = type(error).__name__, str(error)
    dcp.async_save(state, checkpoint_id=f"{path}/2", **options).result(TIMEOUT_S)
    return seen


class Groups(TestCase):
    def test_R7_18_a_rank_without_a_helper_tells_the_others(self):
        start = time.monotonic()
        told, raised = pool.run(save_without_a_helper_on_one, str(self.path), world=2)
        self.assertLess(time.monotonic() - start, pool.TIMEOUT_S)
        self.assertEqual(raised, ("UnsupportedError", "/nowhere/dcp-writer cannot be executed: No such file or directory"))
        self.assertEqual(told, {1: raised})

    def test_R7_18_another_group_in_a_later_save(self):
        processes = {}
        for members in ((1, 3), (0, 1, 2, 3), (0, 1)):
            found = pool.run(save_in_group, str(self.root / "-".join(map(str, members))), members=members)
            for rank, (running, values) in zip(members, found):
                self.assertEqual(values, [4.0, *map(float, range(len(members)))])
                self.assertEqual(len(running), 1)
                self.assertEqual(processes.setdefault(rank, running), running, "another helper")


if __name__ == "__main__":
    unittest.main()
