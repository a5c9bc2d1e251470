"""R3: a failure anywhere is raised on every rank, with its cause, and nothing is published."""

import threading
import time
import unittest

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import _create_default_local_metadata
from torch.distributed.tensor import Shard, distribute_tensor

import libdcp.torch as dcp
import pool
from faults import FaultyReader, FaultyWriter
from libdcp.torch.state_dict_loader import _load_state_dict
from libdcp.torch.state_dict_saver import _save_state_dict
from support import TestCase, failures_of, files_of, raises_together


def state_of(ranks):
    """A sharded tensor, a replicated one, and an object."""
    if ranks.size == 1:
        return {"sharded": torch.rand(20, 20), "replicated": torch.rand(10, 10), "bytes": [1, 2, 3, 4]}
    mesh = ranks.line()
    sharded = distribute_tensor(torch.arange(400.0).reshape(20, 20), mesh, [Shard(0)])
    return {"sharded": sharded, "replicated": torch.rand(10, 10), "bytes": [1, 2, 3, 4]}


def save(ranks, faults, coordinator=0):
    alone = ranks.size == 1
    writer = FaultyWriter(ranks.rank, faults)
    return failures_of(lambda: _save_state_dict(state_of(ranks), writer, ranks.group, coordinator, alone))


def load(ranks, faults, coordinator=0):
    state = state_of(ranks)
    reader = FaultyReader(_create_default_local_metadata(state), ranks.rank, faults)
    return failures_of(lambda: _load_state_dict(state, reader, ranks.group, coordinator, ranks.size == 1))


class FaultyStorage(TestCase):
    def check(self, function, step, fault, failing, coordinator=0, world=4):
        """All ranks raise the same: `step`, and ValueError of the ranks that fail."""
        expected = (step, {rank: ("ValueError", f"{fault} fails") for rank in sorted(failing)})
        found = pool.run(function, {fault: failing}, coordinator, world=world)
        for rank, result in enumerate(found):
            self.assertEqual(result, expected, f"rank {rank}, {fault} fails on {failing}")

    def test_R3_1_all_ranks_raise_what_some_failed_at(self):
        self.check(save, "plan", "prepare_local_plan", [1, 3])
        self.check(load, "read", "read_data", [0, 2, 3])

    def test_R3_4_save_all_may_fail_while_planning(self):
        self.check(save, "plan", "set_up_storage_writer", [0])
        self.check(save, "plan", "prepare_local_plan", [0])

    def test_R3_5_save_the_coordinator_may_fail(self):
        self.check(save, "plan", "prepare_global_plan", [0])
        self.check(save, "write", "finish", [0])

    def test_R3_6_save_all_may_fail_while_writing(self):
        self.check(save, "write", "write_data", [2])
        self.check(save, "write", "write_future", [3])

    def test_R3_7_save_with_another_coordinator(self):
        self.check(save, "plan", "set_up_storage_writer", [1], coordinator=1)
        self.check(save, "write", "finish", [1], coordinator=1)

    def test_R3_8_save_alone(self):
        for fault in ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan"):
            self.check(save, "plan", fault, [0], world=1)
        for fault in ("write_data", "write_future", "finish"):
            self.check(save, "write", fault, [0], world=1)

    def test_R3_9_load_all_may_fail_while_planning(self):
        self.check(load, "plan", "set_up_storage_reader", [0])
        self.check(load, "plan", "read_metadata", [0])
        self.check(load, "plan", "prepare_local_plan", [1])

    def test_R3_10_load_the_coordinator_may_fail(self):
        self.check(load, "plan", "prepare_global_plan", [0])
        self.check(load, "plan", "prepare_global_plan", [1], coordinator=1)

    def test_R3_11_load_all_may_fail_while_reading(self):
        self.check(load, "read", "read_data", [3])
        self.check(load, "read", "read_future", [1])

    def test_R3_12_load_with_another_coordinator(self):
        self.check(load, "plan", "set_up_storage_reader", [0], coordinator=3)
        self.check(load, "plan", "read_metadata", [3], coordinator=1)
        self.check(load, "read", "read_data", [0], coordinator=2)
        self.check(load, "read", "read_future", [2], coordinator=3)

    def test_R3_13_load_alone(self):
        for fault in ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan"):
            self.check(load, "plan", fault, [0], world=1)
        for fault in ("read_data", "read_future"):
            self.check(load, "read", fault, [0], world=1)

    def test_R3_15_without_faults_all_goes_well(self):
        for world in (1, 4):
            self.assertEqual(pool.run(save, {}, world=world), [None] * world)
            self.assertEqual(pool.run(load, {}, world=world), [None] * world)


class Exception_(TestCase):
    def test_R3_2_step_and_text(self):
        with raises_together(self, "plan") as caught:
            _save_state_dict({"a": 1}, FaultyWriter(0, {"prepare_local_plan": [0]}), no_dist=True)
        self.assertIsInstance(caught.error, BaseException)
        self.assertNotIsInstance(caught.error, Exception)
        text = str(caught.error)
        self.assertTrue(text.startswith("CheckpointException ranks:"), text)
        self.assertIn("(RANK 0)", text)
        self.assertIn("prepare_local_plan fails", text)

    def test_R3_3_the_cause_is_the_very_object(self):
        class Own(Exception):
            pass

        raised = Own("mine")

        class Writer(FaultyWriter):
            def finish(self, metadata, results):
                raise raised

        with raises_together(self, "write") as caught:
            _save_state_dict({"a": 1}, Writer(0, {}), no_dist=True)
        self.assertIs(caught.failures[0][0], raised)
        self.assertIn("finish", "".join(caught.failures[0][1].format()))


def save_with_odd_exceptions(ranks):
    """Exceptions that cannot be pickled, and such that cannot be unpickled."""
    import _thread

    class Local(Exception):  # of a class that nobody can import
        pass

    class Writer(FaultyWriter):
        def prepare_local_plan(self, plan):
            error = Local("local class")
            if self.rank == 2:
                error = ValueError("with a lock")
                error.lock = _thread.allocate_lock()
            if self.rank in (1, 2):
                raise error
            return plan

    own = None
    try:
        _save_state_dict({"a": 1}, Writer(ranks.rank, {}), ranks.group)
    except dcp.CheckpointException as error:
        own = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()}
    return own


def save_what_cannot_be_sent(ranks):
    """A plan that no pickle holds."""

    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            import dataclasses

            plan = super().create_local_plan()
            return dataclasses.replace(plan, planner_data=lambda: 1) if ranks.rank == 1 else plan

    return failures_of(lambda: _save_state_dict({"a": 1}, FaultyWriter(ranks.rank, {}), ranks.group, planner=Planner()))


class Unsendable(TestCase):
    def test_R3_3_exceptions_that_no_pickle_holds_come_as_text(self):
        found = pool.run(save_with_odd_exceptions)
        self.assertEqual(found[0], {1: "RuntimeError: Local: local class", 2: "RuntimeError: ValueError: with a lock"})
        self.assertEqual(found[1][1], "Local: local class")
        self.assertEqual(found[2][2], "ValueError: with a lock")
        self.assertEqual(found[3], found[0])

    def test_R3_17_plans_that_no_pickle_holds_fail_on_all(self):
        for step, failures in pool.run(save_what_cannot_be_sent):
            self.assertEqual(step, "plan")
            self.assertEqual(list(failures), [1])


def save_in_subgroup(ranks, faults):
    return failures_of(lambda: _save_state_dict({"a": 1}, FaultyWriter(ranks.rank, faults), ranks.group, 0))


def come_late(ranks, path):
    """The last rank does not take part; the others have a deadline."""
    from datetime import timedelta

    group = dist.new_group(list(range(4)), timeout=timedelta(seconds=2))
    if ranks.rank == 3:
        dist.barrier()
        return None
    start = time.monotonic()
    found = failures_of(lambda: dcp.save({"a": torch.ones(3)}, checkpoint_id=path, process_group=group))
    took = time.monotonic() - start
    dist.barrier()
    return found, took


def one_fails_alone(ranks, path):
    """Without collectives: what rank 1 fails at is nobody else's business."""

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            if ranks.rank == 1:
                raise ValueError("only here")
            return super().write_data(plan, planner)

    try:
        dcp.save(
            {"a": torch.ones(3) * ranks.rank}, storage_writer=Writer(path), process_group=ranks.group, use_collectives=False
        )
    except ValueError as error:
        return str(error)
    return "saved"


def fail_over_an_old_checkpoint(ranks, path):
    state = {"a": torch.full((4,), 1.0), "mine": {str(ranks.rank): torch.full((3,), float(ranks.rank))}}
    dcp.save(state, checkpoint_id=path, process_group=ranks.group)

    class Planner(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            if ranks.rank == 2:
                raise ValueError("no data")
            return super().resolve_data(write_item)

    state["a"] = torch.full((4,), 2.0)
    found = failures_of(lambda: dcp.save(state, checkpoint_id=path, process_group=ranks.group, planner=Planner()))
    state["a"] = torch.zeros(4)
    dcp.load(state, checkpoint_id=path, process_group=ranks.group)
    return found, state["a"].tolist()


class Groups(TestCase):
    def test_R3_16_ranks_are_those_of_the_group(self):
        for result in pool.run(save_in_subgroup, {"finish": [0]}, members=(1, 3)):
            self.assertEqual(result, ("write", {0: ("ValueError", "finish fails")}))
        for result in pool.run(save_in_subgroup, {"write_data": [1]}, members=(1, 3)):
            self.assertEqual(result, ("write", {1: ("ValueError", "write_data fails")}))

    def test_R3_17_no_rank_waits_for_ever(self):
        for found, took in pool.run(come_late, str(self.path))[:3]:
            self.assertLess(took, 20)
            [(name, text)] = found[1].values()
            self.assertIn(name, ("TimeoutError", "DeadlineError"))
            self.assertIn("3", text)
        self.assertNotIn(".metadata", files_of(self.path))

    def test_R3_17_without_collectives_nobody_waits(self):
        self.assertEqual(pool.run(one_fails_alone, str(self.path)), ["saved", "only here", "saved", "saved"])

    def test_R3_21_an_old_checkpoint_survives_a_failed_save(self):
        for found, values in pool.run(fail_over_an_old_checkpoint, str(self.path)):
            self.assertEqual(found, ("write", {2: ("ValueError", "no data")}))
            self.assertEqual(values, [1.0] * 4)
        self.assertEqual([name for name in files_of(self.path) if name.startswith(".")], [".metadata"])
        self.assertEqual(len(files_of(self.path)), 5)  # with one data file for each rank


def local_metadata(ranks):
    """Metadata of an object, a tensor, and ShardedTensors over all ranks and on rank 1 alone."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata

    rows = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(ranks.size)])
    alone = EnumerableShardingSpec([ShardMetadata([0, 0], [4, 4], "rank:1/cpu")])
    state = {
        "object": [1, 2],
        "plain": torch.ones(4),
        "alone": sharded_tensor.zeros(alone, 4, 4, dtype=torch.float64, process_group=ranks.group),
    }
    for n in (10, 20, 3):
        state[f"rows{n}"] = sharded_tensor.zeros(rows, n, n, process_group=ranks.group)
    entries = _create_default_local_metadata(state).state_dict_metadata
    chunks = {
        name: [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks] for name, entry in entries.items() if name != "object"
    }
    return type(entries["object"]).__name__, entries["alone"].properties.dtype, chunks


class LocalMetadata(TestCase):
    def test_R3_22_what_the_whole_sharding_looks_like(self):
        for world in (2, 4):
            found = pool.run(local_metadata, world=world)
            for kind, _, chunks in found:
                self.assertEqual(kind, "BytesStorageMetadata")
                self.assertEqual(chunks["plain"], [((0,), (4,))])
                self.assertEqual(chunks, found[0][2])
            self.assertEqual(len(found[0][2]["rows10"]), world)

    def test_R3_23_shards_of_other_ranks_are_listed(self):
        for _, dtype, chunks in pool.run(local_metadata, world=2):
            self.assertEqual((dtype, chunks["alone"]), (torch.float64, [((0, 0), (4, 4))]))

    def test_R3_24_rows_are_dealt_out_evenly(self):
        for world in (2, 4):
            for _, _, chunks in pool.run(local_metadata, world=world):
                for n in (10, 20, 3):
                    each = -(-n // world)
                    bounds = [(min(r * each, n), min((r + 1) * each, n)) for r in range(world)]
                    expected = [((a, 0), (b - a, n)) for a, b in bounds if b > a]
                    self.assertEqual([c for c in chunks[f"rows{n}"] if 0 not in c[1]], expected)


class Alone(TestCase):
    def test_R3_14_metadata_that_cannot_be_read(self):
        class Reader(FaultyReader):
            def read_metadata(self, **kwargs):
                raise ValueError("rank's own" if kwargs else "global")

        with raises_together(self, "plan") as caught:
            dcp.load({"a": torch.zeros(2)}, storage_reader=Reader(None, 0, {}), no_dist=True)
        cause = caught.failures[0][0]
        self.assertIs(type(cause), ValueError)
        self.assertEqual(str(cause), "global")
        self.assertIn("neither .metadata nor __0.metadata", str(caught.error))

    def test_R3_14_no_checkpoint(self):
        with raises_together(self, "plan") as caught:
            dcp.load({"a": torch.zeros(2)}, checkpoint_id=self.root, no_dist=True)
        self.assertIsInstance(caught.failures[0][0], FileNotFoundError)
        self.assertIn(".metadata", str(caught.failures[0][0]))

    def test_R3_19_without_collectives_the_cause_comes_as_it_is(self):
        class Planner(dcp.DefaultSavePlanner):
            def create_local_plan(self):
                raise KeyError("mine")

        with self.assertRaises(KeyError):
            dcp.save({"a": 1}, checkpoint_id=self.path, planner=Planner(), no_dist=True, use_collectives=False)

    def test_R3_20_errors_in_threads_count(self):
        threads = set()

        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                threads.add(threading.get_ident())
                if write_item.index.fqn == "t1":
                    raise ValueError("in a thread")
                return super().resolve_data(write_item)

        state = {f"t{i}": torch.rand(100) for i in range(4)}
        before = threading.active_count()
        with raises_together(self, "write") as caught:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(self.path, thread_count=2), planner=Planner(), no_dist=True)
        self.assertEqual(str(caught.failures[0][0]), "in a thread")
        self.assertEqual(files_of(self.path), [])
        self.assertEqual(threading.active_count(), before)


if __name__ == "__main__":
    unittest.main()
