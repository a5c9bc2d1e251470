"""What saves in the background have beside PyTorch's arguments: a cap and memory reserved ahead, a rate, priority, progress, cancel."""

import os
import pathlib
import resource
import threading
import time
import unittest
from unittest import mock

import torch

import libdcp.torch as dcp
import pool
from common import (
    IN_BACKGROUND,
    PLAIN,
    TIMEOUT_S,
    FileSystemWriter,
    Gate,
    GatedPlanner,
    GatedWriter,
    loaded,
    new_stager,
    upload_of,
)
from libdcp import CanceledError
from libdcp.torch import CheckpointException, _uploads
from libdcp.torch.staging import BlockingAsyncStager
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
from support import TestCase

MIB = 1 << 20
SHARED = (False, True, False, False)
KINDS = (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS)


class OwnWriter(FileSystemWriter):
    """With a hook, so that the phases go through Python."""

    def write_data(self, plan, planner):
        return super().write_data(plan, planner)


def alone(state, path, **options):
    return dcp.async_save(state, checkpoint_id=path, no_dist=True, **options)


def state_of(n, mib=1, value=1.0):
    return {f"t{i}": torch.full((mib * MIB // 4,), value + i) for i in range(n)}


class Cap(TestCase):
    def check(self, path, state):
        self.assertStateEqual(loaded(path, **state), state)

    def test_a_state_larger_than_the_cap(self):
        for options in (PLAIN, SHARED, IN_BACKGROUND):
            stager = new_stager(options, cap_bytes=3 * MIB)
            for step in range(2):
                path, state = self.root / f"{options}" / str(step), state_of(8, value=float(step))
                kept = {name: tensor.clone() for name, tensor in state.items()}
                result = alone(state, path, async_stager=stager)
                if options is IN_BACKGROUND:
                    result.staging_completion.result(TIMEOUT_S)
                for tensor in state.values():
                    tensor.fill_(-1)
                upload_of(result).result()
                self.check(path, kept)
                mapped = sum(storage.nbytes() for storage in stager._state_dict_stager._cached_storage_mapping.values())
                self.assertLessEqual(mapped, 3 * MIB)
                self.assertEqual((stager.is_partial, stager.staged_bytes), (True, 3 * MIB))
            stager.close()

    def test_the_caller_waits_for_what_has_no_room_alone(self):
        give_back = _uploads.Background.give_back
        for options in (PLAIN, IN_BACKGROUND):
            gate = Gate()

            def held(background, gate=gate):
                """In a thread of the save's, which does not come to its end before the gate is opened."""
                give_back(background)
                gate.pass_through()

            stager = new_stager(options, cap_bytes=6 * MIB)
            path, state = self.root / f"{options}", state_of(8, value=5.0)
            kept = {name: tensor.clone() for name, tensor in state.items()}
            with mock.patch.object(_uploads.Background, "give_back", held):
                result = alone(state, path, async_stager=stager)
                upload = upload_of(result)
                if options is IN_BACKGROUND:
                    result.staging_completion.result(TIMEOUT_S)
                for tensor in state.values():
                    tensor.fill_(-1)
                self.assertFalse(upload.done())
                gate.open()
                upload.result(TIMEOUT_S)
            self.check(path, kept)
            stager.close()

    def test_the_caller_is_let_go_when_the_save_fails(self):
        blocked = self.root / "file"
        blocked.write_text("no directory")
        stager = new_stager(PLAIN, cap_bytes=MIB)
        with self.assertRaises(CheckpointException):
            alone(state_of(4), blocked / "below", async_stager=stager).result(TIMEOUT_S)
        stager.close()

    def test_the_caller_waits_only_if_it_must(self):
        gate = Gate()
        stager = new_stager(PLAIN, cap_bytes=8 * MIB)
        upload = alone(state_of(8), self.path, async_stager=stager, planner=GatedPlanner(gate))
        self.assertFalse(upload.done())
        self.assertEqual((stager.is_partial, stager.staged_bytes), (False, 8 * MIB))
        gate.open()
        upload.result()

    def test_staging_is_complete_when_the_upload_is(self):
        gate = Gate()
        stager = new_stager(IN_BACKGROUND, cap_bytes=MIB)
        result = alone(state_of(2), self.path, async_stager=stager, planner=GatedPlanner(gate))
        self.assertTrue(gate.reached.wait(TIMEOUT_S))
        self.assertFalse(result.staging_completion.done())
        gate.open()
        self.assertIsNone(result.staging_completion.result(TIMEOUT_S))
        stager.close()

    def test_views_of_what_has_no_room(self):
        buffer = torch.arange(float(MIB))
        state = {"a": buffer[: MIB // 2], "b": buffer[MIB // 4 :].view(3, -1).t(), "small": torch.ones(3), "scalar": torch.tensor(2)}
        stager = new_stager(PLAIN, cap_bytes=MIB)
        alone(state, self.path, async_stager=stager).result()
        self.check(self.path, state)
        self.assertEqual(stager.staged_bytes, 12 + 8)

    def test_names_of_a_stager_of_the_program_are_its_own(self):
        class Own(BlockingAsyncStager):
            left = 3
            is_partial = True

        gate, state = Gate(), state_of(1)
        upload = alone(state, self.root / "1", async_stager=Own(), planner=GatedPlanner(gate))
        self.assertFalse(upload.done())
        gate.open()
        upload.result()
        alone(state, self.root / "2", async_stager=Own()).result()
        self.check(self.root / "2", state)

    def test_room_that_a_state_leaves_is_used_by_the_next(self):
        stager = new_stager(PLAIN, cap_bytes=4 * MIB)
        for step in range(3):
            state = state_of(4, value=float(step))  # other storages each time
            alone(state, self.root / str(step), async_stager=stager).result()
            self.check(self.root / str(step), state)
            self.assertFalse(stager.is_partial)
            del state

    def test_bad_values(self):
        with self.assertRaises(ValueError):
            new_stager(PLAIN, cap_bytes=-1)


class Reserve(TestCase):
    def test_the_first_save_finds_its_memory(self):
        for options in (PLAIN, SHARED, IN_BACKGROUND):
            state = state_of(8, mib=4)
            stager = new_stager(options)
            stager.reserve(state)
            for tensor in state.values():
                tensor.add_(1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            staged = stager.stage(state)
            staged = staged.result() if options is IN_BACKGROUND else staged
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
            self.assertLess(faults, 8 * 4 * MIB // resource.getpagesize() // 10)
            self.assertStateEqual(staged, state)
            stager.close()


def failures(error):
    return {rank: type(cause) for rank, (cause, _) in error.failures.items()}


class Control(TestCase):
    def test_rate_and_progress(self):
        for writer in (None, OwnWriter(self.root / "2")):
            for kind in KINDS:
                state = state_of(4, mib=2)
                start = time.monotonic()
                upload = alone(state, self.root / "1", storage_writer=writer, async_checkpointer_type=kind, max_bytes_per_second=16 * MIB)
                seen = []
                while not upload.done():
                    seen.append(upload.progress())
                    time.sleep(0.01)
                upload.result()
                self.assertGreaterEqual(time.monotonic() - start, 0.4)  # 8 MiB at 16 MiB/s
                middle = [p for p in seen if 0 < p.written_bytes < p.total_bytes]
                self.assertGreater(len(middle), 5)
                self.assertEqual({p.total_bytes for p in middle}, {8 * MIB})
                self.assertEqual([p.written_bytes for p in seen], sorted(p.written_bytes for p in seen))
                self.assertEqual({p.staged_bytes for p in middle}, {8 * MIB})
                late = middle[-1]
                self.assertAlmostEqual(late.bytes_per_second, late.written_bytes / late.seconds)
                self.assertAlmostEqual(late.seconds_left * late.bytes_per_second, 8 * MIB - late.written_bytes, delta=1)
                self.assertLess(late.bytes_per_second, 32 * MIB)
                last = upload.progress()
                self.assertEqual((last.written_bytes, last.total_bytes, last.seconds_left), (8 * MIB, 8 * MIB, 0.0))
                self.assertEqual(last, upload.progress())

    def test_progress_before_there_is_any(self):
        gate = Gate()
        upload = alone(state_of(1), self.path, planner=GatedPlanner(gate))
        progress = upload.progress()
        self.assertEqual((progress.staged_bytes, progress.written_bytes, progress.total_bytes), (MIB, 0, 0))
        self.assertEqual((progress.seconds, progress.bytes_per_second, progress.seconds_left), (0.0, 0.0, None))
        gate.open()
        upload.result()

    def test_staged_bytes_of_other_stagers(self):
        for stager, expected in ((BlockingAsyncStager(), 2 * MIB), (BlockingAsyncStager(True), 2 * MIB)):
            upload = alone(dict(state_of(2), n=3), self.path, async_stager=stager)
            upload.result()
            self.assertEqual(upload.progress().staged_bytes, expected)

    def test_bad_rates(self):
        for rate in (-1, float("nan"), float("inf")):
            with self.assertRaises(ValueError):
                alone(state_of(1), self.path, max_bytes_per_second=rate)
        with self.assertRaises(TypeError):
            alone(state_of(1), self.path, max_bytes_per_second="fast")

    def test_canceled_while_it_writes(self):
        old = state_of(4, value=50.0)
        alone(old, self.path).result()
        for writer in (None, OwnWriter(self.path)):
            for kind in KINDS:
                state = state_of(4, mib=4)
                upload = alone(state, self.path, storage_writer=writer, async_checkpointer_type=kind, max_bytes_per_second=MIB)
                while upload.progress().written_bytes == 0:
                    time.sleep(0.005)
                start = time.monotonic()
                self.assertTrue(upload.cancel())
                with self.assertRaises(CheckpointException) as caught:
                    upload.result(TIMEOUT_S)
                self.assertLess(time.monotonic() - start, 10)  # instead of 15 s and more
                self.assertEqual(failures(caught.exception), {0: CanceledError})
                self.assertFalse(upload.cancel())
                self.assertStateEqual(loaded(self.path, **old), old)
                self.assertEqual(len(list(self.path.glob("*.distcp"))), 1)

    def test_canceled_before_it_writes(self):
        first, second = Gate(), Gate()
        blocking = alone(state_of(1), self.root / "1", storage_writer=GatedWriter(self.root / "1", first))
        self.assertTrue(first.reached.wait(TIMEOUT_S))
        waiting = alone(state_of(1), self.root / "2", storage_writer=GatedWriter(self.root / "2", second))
        self.assertTrue(blocking.cancel() and waiting.cancel())
        first.open(), second.open()
        for upload in (blocking, waiting):
            with self.assertRaises((CheckpointException, CanceledError)):
                upload.result(TIMEOUT_S)
        self.assertEqual(list(self.root.glob("*/.metadata")), [])
        alone(state_of(1), self.root / "3").result()

    def test_priority(self):
        threads = {}

        class Writer(FileSystemWriter):
            def write_data(self, plan, planner):
                thread = threading.get_native_id()
                threads[self.path.name] = (os.getpriority(os.PRIO_PROCESS, thread), os.sched_getscheduler(thread))
                return super().write_data(plan, planner)

        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        alone(state_of(1), None, storage_writer=Writer(pathlib.Path(self.root / "usual"))).result()
        alone(state_of(1), None, storage_writer=Writer(pathlib.Path(self.root / "low")), low_priority=True).result()
        self.assertEqual(threads, {"usual": (min(own + 10, 19), os.SCHED_OTHER), "low": (19, os.SCHED_BATCH)})
        self.assertEqual(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), own)
        self.assertStateEqual(loaded(self.root / "low", **state_of(1)), state_of(1))


def cancel_on_one(ranks, path):
    """Rank 1 has had enough: what each rank sees, and whether something was published."""
    state = {f"of {ranks.rank}": torch.full((MIB,), 1.0)}
    upload = dcp.async_save(state, checkpoint_id=path, process_group=ranks.group, max_bytes_per_second=MIB)
    if ranks.rank == 1:
        while upload.progress().written_bytes == 0:
            time.sleep(0.005)
        upload.cancel()
    return failures(upload.exception(TIMEOUT_S)), os.path.exists(f"{path}/.metadata")


class SeveralRanks(TestCase):
    def test_canceled_by_one(self):
        for found in pool.run(cancel_on_one, str(self.path), world=2):
            self.assertEqual(found, ({1: CanceledError}, False))


if __name__ == "__main__":
    unittest.main()
