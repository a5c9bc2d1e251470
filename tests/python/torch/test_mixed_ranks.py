"""Ranks that bring different planners, writers or readers: all take the same way, and none waits."""

import os
import shutil
import unittest

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp
import pool
from libdcp.torch._group import Channel
from support import TestCase, failures_of, numbered


class HookedSave(dcp.DefaultSavePlanner):
    def finish_plan(self, new_plan):
        self.finished = True
        return super().finish_plan(new_plan)


class HookedLoad(dcp.DefaultLoadPlanner):
    def finish_plan(self, new_plan):
        self.finished = True
        return super().finish_plan(new_plan)


class HookedWriter(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        return super().write_data(plan, planner)


class HookedReader(dcp.FileSystemReader):
    def read_data(self, plan, planner):
        return super().read_data(plan, planner)


def own_on(ranks, odd, common, own):
    return own() if ranks.rank == odd else common()


def state_of(ranks, value):
    return {"mine": {str(ranks.rank): torch.full((3,), value + ranks.rank)}, "all": numbered(4, 5) * value, "o": "text" if value else ""}


def mixed(ranks, path, odd):
    """Saves and loads with the program's own class on one rank: whether all was found, and whether its hook was called."""
    outcomes = []
    for number, (planner, writer, load_planner, reader) in enumerate((
        (HookedSave, dcp.FileSystemWriter, HookedLoad, dcp.FileSystemReader),
        (dcp.DefaultSavePlanner, HookedWriter, dcp.DefaultLoadPlanner, HookedReader),
        (torch_dcp.DefaultSavePlanner, torch_dcp.FileSystemWriter, torch_dcp.DefaultLoadPlanner, torch_dcp.FileSystemReader),
    )):  # fmt: skip
        place = f"{path}{number}"
        used = own_on(ranks, odd, dcp.DefaultSavePlanner, planner)
        dcp.save(
            state_of(ranks, 1.0),
            storage_writer=own_on(ranks, odd, lambda: dcp.FileSystemWriter(place), lambda: writer(place)),
            planner=used,
            process_group=ranks.group,
        )
        found = state_of(ranks, 0.0)
        used_to_load = own_on(ranks, odd, dcp.DefaultLoadPlanner, load_planner)
        dcp.load(
            found,
            storage_reader=own_on(ranks, odd, lambda: dcp.FileSystemReader(place), lambda: reader(place)),
            planner=used_to_load,
            process_group=ranks.group,
        )
        expected = state_of(ranks, 1.0)
        is_called = getattr(used, "finished", False) and getattr(used_to_load, "finished", False)
        outcomes.append((
            found["o"] == expected["o"]
            and torch.equal(found["all"], expected["all"])
            and all(torch.equal(found["mine"][k], v) for k, v in expected["mine"].items()),
            is_called,
        ))  # fmt: skip
    return outcomes


def options_here_hooks_there(ranks, path):
    """What each rank is told where options that only C knows meet a planner of the program on another rank."""
    planner = HookedSave() if ranks.rank == 1 else None
    options = {"per_rank": ["x"]} if ranks.rank == 0 else {}
    texts = []
    dcp.save({"x": torch.ones(2)}, checkpoint_id=f"{path}/whole", process_group=ranks.group)
    load_planner = HookedLoad() if ranks.rank == 1 else None
    load_options = {"include": ["x"]} if ranks.rank == 0 else {}
    for call in (
        lambda: dcp.save({"x": torch.ones(2)}, checkpoint_id=f"{path}/a", planner=planner, process_group=ranks.group, **options),
        lambda: dcp.load({"x": torch.ones(2)}, checkpoint_id=f"{path}/whole", planner=load_planner, process_group=ranks.group, **load_options),
    ):
        try:
            call()
            texts.append(None)
        except ValueError as error:
            texts.append(str(error))
    dcp.save({"x": torch.ones(2)}, checkpoint_id=f"{path}/again", process_group=ranks.group)  # the connection is as good as before
    return texts


def metadata_on_one_rank(ranks, path, which):
    """Each rank looks into a directory of its own, as on nodes without a common file system."""
    place = f"{path}/{ranks.rank}"
    dcp.save({"x": torch.full((2,), float(ranks.rank))}, checkpoint_id=place, process_group=ranks.group, use_collectives=False)
    if which == "whole" and ranks.rank == 0:
        dcp.save({"x": torch.ones(2)}, checkpoint_id=f"{path}/one", no_dist=True)
        for name in os.listdir(f"{path}/one"):
            shutil.copy(f"{path}/one/{name}", place)
    if which == "none" and ranks.rank == 0:
        shutil.rmtree(place)
    ranks.barrier()
    return failures_of(lambda: dcp.load({"x": torch.zeros(2)}, checkpoint_id=place, process_group=ranks.group))


def messages_of_a_load(ranks, path):
    """How many exchanges it takes to agree on a way: counted, since time says little here."""
    dcp.save({"x": torch.ones(2)}, checkpoint_id=path, process_group=ranks.group)
    calls = []
    alltoall = Channel.alltoall
    Channel.alltoall = lambda self, sends, recvs, timeout_s=None: (calls.append(sum(len(s) for s in sends if s)), alltoall(self, sends, recvs, timeout_s))[1]
    try:
        dcp.load({"x": torch.zeros(2)}, checkpoint_id=path, process_group=ranks.group)
    finally:
        Channel.alltoall = alltoall
    return calls[:2]


class Mixed(TestCase):
    def test_one_rank_has_a_class_of_its_own(self):
        for odd in (0, 2):
            for rank, outcomes in enumerate(pool.run(mixed, str(self.root / str(odd)), odd, world=3)):
                self.assertEqual(outcomes, [(True, rank == odd), (True, False), (True, False)])

    def test_options_of_one_rank(self):
        for texts in pool.run(options_here_hooks_there, str(self.root), world=2):
            for text in texts:
                self.assertIn("only with libdcp's own planner", text)

    def test_metadata_that_only_some_ranks_see(self):
        for which in ("whole", "none"):
            outcomes = pool.run(metadata_on_one_rank, str(self.root / which), which, world=2)
            self.assertEqual(outcomes[0][0], outcomes[1][0])
            self.assertEqual(*(sorted(causes) for _, causes in outcomes))

    def test_what_it_costs(self):
        """One byte to the coordinator, and one back."""
        for rank, sent in enumerate(pool.run(messages_of_a_load, str(self.path), world=3)):
            self.assertEqual(sent, [1, 3] if rank == 0 else [1, 0])


if __name__ == "__main__":
    unittest.main()
