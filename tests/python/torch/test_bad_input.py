"""Wrong arguments, odd states, interruptions: a clean exception, no hang, no thread left, nothing published."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import unittest

import torch
import torch.distributed as dist

import libdcp.torch as dcp
import pool
from hooked import HookedSave
from support import TestCase, failures_of, files_of, raises_together


class Wrong(TestCase):
    def setUp(self):
        super().setUp()
        self.threads = threading.active_count()
        self.addCleanup(self.check_nothing_left)

    def check_nothing_left(self):
        self.assertFalse((self.path / ".metadata").exists())
        self.assertEqual([name for name in files_of(self.path) if name.startswith(".libdcp")], [])
        self.assertEqual(threading.active_count(), self.threads)

    def fails(self, function, *kinds):
        """Raises one of the kinds, by itself or as the cause of a CheckpointException."""
        try:
            function()
        except dcp.CheckpointException as error:
            [(cause, _)] = error.failures.values()
            self.assertIsInstance(cause, kinds)
        except kinds:
            return
        else:
            self.fail("nothing was raised")

    def save(self, state, **options):
        options.setdefault("checkpoint_id", self.path)
        return dcp.save(state, no_dist=True, **options)

    def test_states_that_are_no_dicts(self):
        for state in (None, 3, "text", [1, 2], torch.ones(2)):
            self.fails(lambda s=state: self.save(s), TypeError, ValueError, AttributeError)
            self.fails(lambda s=state: dcp.load(s, checkpoint_id=self.path, no_dist=True), TypeError, ValueError, AttributeError)

    def test_cycles(self):
        loop = {"a": torch.ones(2)}
        loop["self"] = loop
        ring = [torch.ones(2)]
        ring.append(ring)
        for state in (loop, {"l": ring}):
            self.fails(lambda s=state: self.save(s), ValueError, RecursionError)
            self.fails(lambda s=state: self.save(s, planner=HookedSave()), ValueError, RecursionError)

    def test_depth(self):
        state = inner = {}
        for _ in range(100_000):
            inner["x"] = {}
            inner = inner["x"]
        self.fails(lambda: self.save(state), ValueError, RecursionError)
        while state:  # freed step by step
            state = state.pop("x")

    def test_wrong_arguments(self):
        for arguments in (
            {"storage_writer": 3},
            {"storage_writer": dcp.FileSystemReader(self.path)},
            {"planner": 3},
            {"planner": dcp.DefaultLoadPlanner()},
            {"checkpoint_id": 3},
            {"per_rank": 3},
            {"progress": 3},
        ):
            self.fails(lambda a=arguments: self.save({"a": torch.ones(2)}, **a), TypeError, ValueError, AttributeError)

    def test_planners_that_raise(self):
        for name in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data"):

            def method(*args, **kwargs):
                raise KeyError(name)

            for exception in (KeyError,):
                planner = type("Raising", (dcp.DefaultSavePlanner,), {name: method})()
                self.fails(lambda p=planner: self.save({"a": torch.ones(2)}, planner=p), exception)

    def test_planners_that_return_nonsense(self):
        for name in ("create_local_plan", "create_global_plan", "finish_plan", "resolve_data"):
            for value in (None, 3, (1, 2)):
                planner = type("Odd", (dcp.DefaultSavePlanner,), {name: lambda *args, **kwargs: value})()
                self.fails(lambda p=planner: self.save({"a": torch.ones(2)}, planner=p), Exception)

    def test_places_that_cannot_be_written(self):
        file = self.root / "file"
        file.write_text("")
        for place in (file, file / "below"):
            self.fails(lambda p=place: self.save({"a": torch.ones(2)}, checkpoint_id=p), OSError, RuntimeError)
            with raises_together(self) as caught:
                self.save({"a": torch.ones(2)}, checkpoint_id=place)
            self.assertIn(str(place), str(caught.failures[0][0]))
        self.assertEqual(file.read_text(), "")

    def test_system_exit_in_a_hook(self):
        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                raise SystemExit(3)

        with raises_together(self, "write") as caught:
            self.save({"a": torch.ones(2)}, planner=Planner())
        self.assertIsInstance(caught.failures[0][0], SystemExit)

    def test_progress_that_raises_or_cancels(self):
        def raises(done, total):
            raise KeyError("progress")

        state = {"a": torch.ones(1 << 20)}
        self.fails(lambda: self.save(state, progress=raises), KeyError)
        with raises_together(self, "write"):
            self.save(state, progress=lambda done, total: False)

    def test_renames_that_raise(self):
        place = self.root / "good"
        dcp.save({"a": torch.ones(2)}, checkpoint_id=place, no_dist=True)

        def raises(name):
            raise KeyError(name)

        self.fails(lambda: dcp.load({"a": torch.zeros(2)}, checkpoint_id=place, no_dist=True, rename=raises), KeyError)


INTERRUPTED = """
import os, sys, threading, time, warnings
warnings.simplefilter("ignore")
import torch
import libdcp.torch as dcp

state = {str(i): torch.zeros(1 << 24) for i in range(24)}  # 1.5 GiB
path, hooked = sys.argv[1], sys.argv[2] == "hooked"

class Planner(dcp.DefaultSavePlanner):
    def finish_plan(self, plan):
        return super().finish_plan(plan)

print("saving", flush=True)
try:
    dcp.save(state, checkpoint_id=path, no_dist=True, planner=Planner() if hooked else None)
except KeyboardInterrupt:
    print("interrupted")
except dcp.CheckpointException as error:
    [(cause, _)] = error.failures.values()
    print("interrupted" if isinstance(cause, KeyboardInterrupt) else repr(cause))
else:
    print("saved")
print(threading.active_count(), len(os.listdir("/proc/self/task")) <= int(sys.argv[3]))
"""


class Interrupted(TestCase):
    def interrupt(self, how):
        """A keyboard interrupt while data is written."""
        program = self.root / "program.py"
        program.write_text(INTERRUPTED)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, str(program), str(self.path), how, "8"], env=environment, stdout=subprocess.PIPE, text=True
        )
        self.assertEqual(process.stdout.readline(), "saving\n")
        deadline = time.monotonic() + 60
        while not any(name.endswith(".distcp") for name in files_of(self.path)) and time.monotonic() < deadline:
            time.sleep(0.005)
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        took = time.monotonic() - interrupted
        return output, took

    def test_a_long_save_is_interrupted(self):
        output, took = self.interrupt("plain")
        self.assertEqual(output.split(), ["interrupted", "1", "True"])
        self.assertLess(took, 10)
        self.assertEqual(files_of(self.path), [])

    def test_a_long_save_through_the_hooks_is_interrupted(self):
        output, took = self.interrupt("hooked")
        self.assertEqual(output.split(), ["interrupted", "1", "True"])
        self.assertEqual(files_of(self.path), [])


def destroy_underway(ranks, path):
    """Rank 1 destroys its groups and leaves while the others save."""
    from datetime import timedelta

    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=3))
    dcp.save({"a": torch.ones(2)}, checkpoint_id=f"{path}-first", process_group=group)
    if ranks.rank == 1:

        class Leaving(dcp.DefaultSavePlanner):
            def create_local_plan(self):
                dist.destroy_process_group()
                os._exit(0)

        dcp.save({"a": torch.ones(2)}, checkpoint_id=path, process_group=group, planner=Leaving())
    start = time.monotonic()
    found = failures_of(lambda: dcp.save({"a": torch.ones(2)}, checkpoint_id=path, process_group=group, planner=HookedSave()))
    took = time.monotonic() - start
    pathlib.Path(f"{path}-{ranks.rank}").write_text(f"{took} {found is not None} {threading.active_count()}")
    return found


def use_destroyed_group(ranks, path):
    group = dist.new_group(list(range(4)))
    dist.destroy_process_group(group)
    try:
        dcp.save({"a": torch.ones(2)}, checkpoint_id=path, process_group=group)
    except Exception as error:
        return type(error).__name__
    return "saved"


def interrupt_one(ranks, path):
    """A rank that is interrupted tells the others."""

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            if ranks.rank == 2:
                raise KeyboardInterrupt
            return super().resolve_data(write_item)

    state = {"a": torch.ones(2), "own": {str(ranks.rank): torch.ones(2)}}
    return failures_of(lambda: dcp.save(state, checkpoint_id=path, process_group=ranks.group, planner=Planner()))


def pickle_fails_on_one(ranks, path):
    """In C, what one rank's object raises while it is pickled comes to all, with its class."""

    class Raises:
        def __reduce__(self):
            raise KeyError("mine")

    state = {"a": torch.ones(2), "own": {str(ranks.rank): Raises() if ranks.rank == 1 else 1}}
    return failures_of(lambda: dcp.save(state, checkpoint_id=path, process_group=ranks.group))


class Ranks(TestCase):
    def test_a_process_group_destroyed_underway(self):
        with self.assertRaisesRegex(AssertionError, "the process has died"):
            pool.run(destroy_underway, str(self.path))
        for rank in (0, 2, 3):
            found = pathlib.Path(f"{self.path}-{rank}").read_text().split()
            self.assertLess(float(found[0]), 30)
            self.assertEqual(found[1:], ["True", "1"])
        self.assertFalse((self.path / ".metadata").exists())

    def test_a_process_group_that_is_destroyed(self):
        for found in pool.run(use_destroyed_group, str(self.path)):
            self.assertIn(found, ("ValueError", "RuntimeError"))
        self.assertEqual(files_of(self.path), [])

    def test_an_interrupted_rank_tells_the_others(self):
        for step, failures in pool.run(interrupt_one, str(self.path)):
            self.assertEqual(step, "write")
            self.assertEqual({rank: name for rank, (name, _) in failures.items()}, {2: "KeyboardInterrupt"})
        self.assertEqual(files_of(self.path), [])

    def test_R3_3_exceptions_of_one_rank_in_c(self):
        for step, failures in pool.run(pickle_fails_on_one, str(self.path)):
            self.assertEqual(failures, {1: ("KeyError", "'mine'")})
        self.assertEqual(files_of(self.path), [])


if __name__ == "__main__":
    unittest.main()
