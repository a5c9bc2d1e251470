"""Memory of tensors that is not what the tensors say, and tensors that a load leaves alone."""

import unittest

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.device_mesh import DeviceMesh

import libdcp.torch as dcp
import pool
from hooked import HookedLoad, HookedSave
from support import TestCase, failures_of, numbered, raises_together


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def shrunk(tensor, nbytes):
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def too_large():
    """Tensors that reach beyond their storage: bytes from the first element on, needed and there."""
    return {
        "plain": (shrunk(numbered(100), 200), 400, 200),
        "parameter": (shrunk(torch.nn.Parameter(numbered(100)), 8), 400, 8),
        "one byte": (shrunk(numbered(100), 399), 400, 399),
        "view": (shrunk(numbered(100)[90:], 396), 40, 36),
        "strided": (shrunk(numbered(10, 10).t()[1:, :5], 100), 4 * (8 + 40 + 1), 96),
        "conjugate": (shrunk(torch.zeros(4, dtype=torch.complex64).conj(), 24), 32, 24),
        "subclass": (shrunk(numbered(100).as_subclass(Plain), 200), 400, 200),
        "nothing left": (shrunk(numbered(100), 0), 400, 0),
        "nothing there": (shrunk(numbered(100)[90:], 300), 40, 0),
        "freed subclass": (shrunk(numbered(100).as_subclass(Plain), 0), 400, 0),
    }


def shrunk_shards(ranks, path):
    """DTensors whose local part has lost its memory on rank 1."""
    mesh = DeviceMesh("cpu", list(range(ranks.size)))
    tensor = DTensor.from_local(numbered(4), mesh, [Shard(0)])
    outcomes = []
    for action in (lambda: dcp.save({"d": tensor}, checkpoint_id=path), lambda: dcp.load({"d": tensor}, checkpoint_id=path)):
        if ranks.rank == 1:
            tensor._local_tensor.untyped_storage().resize_(12)
        outcomes.append(failures_of(action))
        tensor._local_tensor.untyped_storage().resize_(16)
        dcp.save({"d": tensor}, checkpoint_id=path)
    return outcomes


class Shrunk(TestCase):
    def check(self, caught, fqn, needed, there):
        [(cause, _)] = caught.failures.values()
        self.assertIsInstance(cause, ValueError)
        for part in (fqn, str(needed), str(there)):
            self.assertIn(part, str(cause))

    def test_nothing_is_read_behind_a_storage(self):
        for planner in (None, HookedSave()):
            for name, (tensor, needed, there) in too_large().items():
                with self.subTest(name, planner=planner), raises_together(self) as caught:
                    dcp.save({name: tensor}, checkpoint_id=self.path, planner=planner, no_dist=True)
                self.check(caught, name, needed, there)

    def test_nothing_is_written_behind_a_storage(self):
        wrong = too_large()
        saved = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, (tensor, *_) in wrong.items()}
        dcp.save(saved, checkpoint_id=self.path, no_dist=True)
        for planner in (None, HookedLoad()):
            for name, (tensor, needed, there) in wrong.items():
                with self.subTest(name, planner=planner), raises_together(self) as caught:
                    dcp.load({name: tensor}, checkpoint_id=self.path, planner=planner, no_dist=True)
                self.check(caught, name, needed, there)

    def test_nor_by_way_of_another_dtype(self):
        dcp.save({"w": torch.zeros(100, dtype=torch.float64)}, checkpoint_id=self.path, no_dist=True)
        for planner in (None, HookedLoad()):
            with self.subTest(planner), raises_together(self) as caught:
                dcp.load({"w": shrunk(numbered(100), 200)}, checkpoint_id=self.path, planner=planner, no_dist=True)
            self.check(caught, "w", 400, 200)

    def test_views_that_end_where_their_storage_ends(self):
        whole = numbered(100)
        state = {"end": whole[95:], "start": whole[:3], "columns": whole.view(10, 10)[:, 7:], "none": shrunk(numbered(4)[4:], 0)}
        dcp.save(state, checkpoint_id=self.path, no_dist=True)
        target = torch.zeros(100)
        found = {"end": target[95:], "start": target[:3], "columns": torch.zeros(10, 10)[:, 7:], "none": torch.zeros(0)}
        dcp.load(found, checkpoint_id=self.path, no_dist=True)
        self.assertStateEqual(found, state)

    def test_parts_of_sharded_tensors(self):
        for outcomes in pool.run(shrunk_shards, str(self.path)):
            for step, causes in outcomes:
                self.assertEqual((step, sorted(causes)), ("plan", [1]))
                self.assertEqual(causes[1][0], "ValueError")
                self.assertRegex(causes[1][1], r"\bd\b.* 16 .*12")


class LeftAlone(TestCase):
    """What a load does not fill may be as it likes, and nobody is told that it has changed."""

    def setUp(self):
        super().setUp()
        self.saved = {"a": numbered(3), "b": numbered(3), "c": numbered(3)}
        dcp.save(self.saved, checkpoint_id=self.path, no_dist=True)

    def ways(self):
        """Keywords of loads that fill "a" alone of a state with "a" and "x"."""
        yield {"include": ["a"]}
        yield {"exclude": ["x"]}
        yield {"rename": {"a": "a"}.get}
        yield {"planner": dcp.DefaultLoadPlanner(allow_partial_load=True)}

    def test_targets_that_could_not_be_filled(self):
        odd = (
            torch.zeros(1).expand(3),
            torch.nn.Parameter(torch.zeros(1).expand(3)),
            torch.zeros(1, dtype=torch.complex64).expand(3).conj(),
            shrunk(torch.zeros(0), 0),
        )
        for way in self.ways():
            for x in odd:
                with self.subTest(way, x=x):
                    state = {"a": torch.zeros(3), "x": x}
                    dcp.load(state, checkpoint_id=self.path, no_dist=True, **way)
                    self.assertEqual(state["a"].tolist(), [0, 1, 2])

    def test_versions_count_what_was_filled(self):
        """Also by way of other memory: for a conjugate, or another dtype."""
        for way in self.ways():
            for make in (torch.zeros, lambda n: torch.zeros(n).double(), lambda n: torch.nn.Parameter(torch.zeros(n)),
                         lambda n: torch.zeros(n).as_subclass(Plain)):  # fmt: skip
                with self.subTest(way, make=make):
                    state = {"a": make(3), "x": make(3)}
                    before = {name: tensor._version for name, tensor in state.items()}
                    dcp.load(state, checkpoint_id=self.path, no_dist=True, **way)
                    self.assertGreater(state["a"]._version, before["a"])
                    self.assertEqual(state["x"]._version, before["x"])

    def test_what_is_not_filled_keeps_its_elements(self):
        conjugate = torch.complex(numbered(3), numbered(3)).conj()
        for way in self.ways():
            state = {"a": torch.zeros(3), "x": conjugate}
            dcp.load(state, checkpoint_id=self.path, no_dist=True, **way)
            self.assertEqual(state["x"].tolist(), [0, 1 - 1j, 2 - 2j])

    def test_backward_after_a_partial_load(self):
        frozen, trained = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))
        loss = (trained * trained).sum()
        dcp.load({"a": frozen, "x": trained}, checkpoint_id=self.path, no_dist=True, include=["a"])
        loss.backward()
        self.assertEqual(trained.grad.tolist(), [2, 2, 2])


def replaced_underway(ranks, path):
    """Local memory of a DTensor that is replaced while the rest of the state is looked at."""
    mesh = DeviceMesh("cpu", list(range(ranks.size)))
    tensor = DTensor.from_local(torch.ones(1 << 18), mesh, [Shard(0)])

    class Replacing(dict):
        def items(self):
            tensor._local_tensor.data = torch.zeros(1)
            return super().items()

    dcp.save({"d": tensor, "then": Replacing(x=1)}, checkpoint_id=path)
    found = DTensor.from_local(torch.zeros(1 << 18), mesh, [Shard(0)])
    dcp.load({"d": found}, checkpoint_id=path)
    return bool(found.to_local().eq(1).all())


class Replaced(TestCase):
    """Memory that another thread replaces by `p.data = ...` is held until the save has ended: what is saved is what the tensor had, and
    it is not read when freed."""

    def test_of_parameters(self):
        self.check(torch.nn.Parameter(torch.ones(1 << 20)))

    def test_of_subclasses(self):
        self.check(torch.ones(1 << 20).as_subclass(Plain))

    def check(self, tensor):
        class Replacing(dict):
            def items(self):
                tensor.data = torch.zeros(1)
                return super().items()

        dcp.save({"p": tensor, "then": Replacing(x=1)}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(tensor.numel(), 1)
        found = {"p": torch.zeros(1 << 20)}
        torch_dcp.load(found, checkpoint_id=self.path, no_dist=True)
        self.assertTrue(found["p"].eq(1).all())

    def test_of_local_parts(self):
        self.assertEqual(pool.run(replaced_underway, str(self.path)), [True] * 4)


if __name__ == "__main__":
    unittest.main()
