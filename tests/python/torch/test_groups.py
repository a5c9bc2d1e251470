"""R11.1, R11.4, R11.5: any torch.distributed group, by the private channel that is made for it; R3.17 its deadlines."""

import threading
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

import libdcp.torch as dcp
import pool
from libdcp.torch import _group
from support import TestCase, failures_of, numbered


def exchange_all(ranks, rounds):
    """Bytes of all lengths, none included, from everyone to everyone."""
    channel = _group.of(ranks.group)
    assert (channel.rank, channel.size) == (ranks.rank, ranks.size)

    def message(source, target, turn):
        return bytes([source, target, turn]) * ((source * 7 + target * 3 + turn) % 5) * 1000

    for turn in range(rounds):
        sends = [memoryview(message(ranks.rank, peer, turn)) for peer in range(ranks.size)]
        wanted = [message(peer, ranks.rank, turn) for peer in range(ranks.size)]
        buffers = [bytearray(len(data)) for data in wanted]
        channel.alltoall(sends, [memoryview(buffer) for buffer in buffers])
        assert buffers == wanted
    return _group.of(ranks.group) is channel


def save_and_load(ranks, path, coordinator):
    from libdcp.torch.state_dict_loader import _load_state_dict
    from libdcp.torch.state_dict_saver import _save_state_dict

    state = {"all": numbered(3), "own": {str(ranks.rank): numbered(2, start=ranks.rank)}}
    _save_state_dict(state, dcp.FileSystemWriter(path), ranks.group, coordinator)
    found = {"all": torch.zeros(3), "own": {str(ranks.rank): torch.zeros(2)}}
    _load_state_dict(found, dcp.FileSystemReader(path), ranks.group, coordinator)
    return found["all"].tolist(), found["own"][str(ranks.rank)].tolist()


def ranks_told(ranks, path):
    told = {}

    class Writer(dcp.FileSystemWriter):
        def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
            told.update(kwargs, coordinator=is_coordinator)
            super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    dcp.save({"a": torch.ones(1)}, storage_writer=Writer(path), process_group=ranks.group)
    return told


def outsiders(ranks, path):
    """A group of ranks 1 and 3; the others do nothing of it. Of the groups that torch.distributed counts there are no more."""
    group = dist.new_group([1, 3])
    known = len(dist.distributed_c10d._world.pg_names)
    if ranks.rank in (1, 3):
        dcp.save({"a": numbered(4)}, checkpoint_id=path, process_group=group)
    assert len(dist.distributed_c10d._world.pg_names) == known
    dist.barrier()
    if ranks.rank in (0, 2):
        try:
            dcp.save({"a": 1}, checkpoint_id=path, process_group=group)
        except ValueError as error:
            return str(error)
    return "member"


def device_only(ranks, path):
    """A group that knows no CPU: nothing of ours goes over it."""

    class Watched:
        """Stands for the group, refuses all that moves data."""

        def __init__(self, group):
            self._group = group

        def __getattr__(self, name):
            if name in ("send", "recv", "allreduce", "broadcast", "alltoall", "allgather", "barrier", "gather", "scatter"):
                raise AssertionError(f"{name} on the caller's group")
            return getattr(self._group, name)

    group = dist.new_group([0, 1, 2, 3])
    store = dist.distributed_c10d._get_process_group_store(group)
    watched = Watched(group)
    original = dist.distributed_c10d._get_process_group_store
    dist.distributed_c10d._get_process_group_store = lambda pg: store if pg is watched else original(pg)
    try:
        dcp.save({"a": numbered(4)}, checkpoint_id=path, process_group=watched)
    finally:
        dist.distributed_c10d._get_process_group_store = original
    return True


def late_then_again(ranks, path):
    """After a deadline was missed, the next save connects anew."""
    group = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=2))
    dcp.save({"a": numbered(4)}, checkpoint_id=f"{path}-0", process_group=group)
    if ranks.rank == 3:
        time.sleep(3.5)
        found = failures_of(lambda: dcp.save({"a": numbered(4)}, checkpoint_id=f"{path}-1", process_group=group))
    else:
        found = failures_of(lambda: dcp.save({"a": numbered(4)}, checkpoint_id=f"{path}-1", process_group=group))
    dist.barrier()
    again = failures_of(lambda: dcp.save({"a": numbered(4)}, checkpoint_id=f"{path}-2", process_group=group))
    return found is not None, again


def in_threads(ranks, path):
    """One save in a thread, another in the main one, at the same time and in any order."""
    problems = []

    def save(name):
        try:
            dcp.save({"a": numbered(1 << 16)}, checkpoint_id=f"{path}-{name}")
        except BaseException as error:
            problems.append(f"{name}: {error}")

    thread = threading.Thread(target=save, args=("background",))
    if ranks.rank % 2:
        save("main")
        thread.start()
    else:
        thread.start()
        save("main")
    thread.join()
    return problems


class Groups(TestCase):
    def test_R11_1_messages_of_all_sizes(self):
        for world in (2, 3, 4):
            self.assertEqual(pool.run(exchange_all, 20, world=world), [True] * world)

    def test_R11_1_saves_and_loads_over_groups(self):
        for number, members in enumerate(((0, 1, 2, 3), (0, 1), (1, 3))):
            for coordinator in (0, len(members) - 1):
                found = pool.run(save_and_load, str(self.root / f"{number}-{coordinator}"), coordinator, members=members)
                for rank, (everything, own) in enumerate(found):
                    self.assertEqual((everything, own), ([0, 1, 2], [rank, rank + 1]))

    def test_R11_1_the_callers_group_moves_nothing(self):
        self.assertEqual(pool.run(device_only, str(self.path)), [True] * 4)

    def test_R11_4_ranks_are_those_of_the_group(self):
        found = pool.run(ranks_told, str(self.path), members=(1, 3))
        self.assertEqual([told["rank"] for told in found], [0, 1])

    def test_R11_5_rank_0_of_the_group_coordinates(self):
        found = pool.run(ranks_told, str(self.path), members=(1, 3))
        self.assertEqual([told["coordinator"] for told in found], [True, False])

    def test_R4_15_only_the_members_take_part(self):
        found = pool.run(outsiders, str(self.path))
        self.assertEqual([text == "member" for text in found], [False, True, False, True])
        self.assertIn("no member", found[0])

    def test_R3_17_after_a_missed_deadline(self):
        for failed, again in pool.run(late_then_again, str(self.path)):
            self.assertTrue(failed)
            self.assertIsNone(again)

    def test_threads(self):
        self.assertEqual(pool.run(in_threads, str(self.path)), [[], [], [], []])


if __name__ == "__main__":
    unittest.main()
