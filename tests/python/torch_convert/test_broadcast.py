"""R2.11 to R2.22: BroadcastingTorchSaveReader and DynamicMetaLoadPlanner."""

import inspect
import os
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.checkpoint.format_utils as torch_format_utils
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split

import libdcp.torch as dcp
import pool
from libdcp.torch import _broadcast, _pieces
from libdcp.torch.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from libdcp.torch.metadata import Metadata, MetadataIndex
from libdcp.torch.planner import LoadItemType, LoadPlan, ReadItem
from support import TestCase, failures_of, frozen, numbered, raises_together, tensor_bytes


def load(ranks, state, path, planner=None, **options):
    dcp.load(
        state,
        planner=planner or DynamicMetaLoadPlanner(),
        storage_reader=BroadcastingTorchSaveReader(**options),
        checkpoint_id=path,
        process_group=ranks.group,
        no_dist=ranks.size == 1,
    )
    return state


class Alone(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.root / "model.pt"

    def test_R2_11_arguments(self):
        self.assertEqual(list(inspect.signature(BroadcastingTorchSaveReader).parameters), ["checkpoint_id", "coordinator_rank"])
        reader = BroadcastingTorchSaveReader()
        self.assertIsNone(reader.checkpoint_id)
        self.assertEqual(reader.coordinator_rank, 0)
        self.assertIsInstance(reader, torch_format_utils.BroadcastingTorchSaveReader)
        self.assertEqual(BroadcastingTorchSaveReader("x", 3).coordinator_rank, 3)

    def test_R2_12_metadata_is_empty(self):
        self.assertEqual(BroadcastingTorchSaveReader(self.root / "absent").read_metadata().state_dict_metadata, {})

    def test_R2_13_reset_keeps_what_it_is_given(self):
        reader = BroadcastingTorchSaveReader("first")
        reader.reset(self.file)
        self.assertEqual(reader.checkpoint_id, self.file)
        reader.reset(None)
        self.assertIsNone(reader.checkpoint_id)

    def test_R2_14_valid_ids_are_files(self):
        torch.save({}, self.file)
        valid = BroadcastingTorchSaveReader.validate_checkpoint_id
        self.assertEqual([valid(self.file), valid(self.root / "absent"), valid(self.root)], [True, False, False])

    def test_R2_15_set_up(self):
        reader = BroadcastingTorchSaveReader(self.file)
        reader.set_up_storage_reader(Metadata({}), True)
        self.assertIs(reader.is_coordinator, True)
        reader.set_up_storage_reader(object(), False)
        self.assertIs(reader.is_coordinator, False)
        with mock.patch("torch.distributed.get_rank", return_value=1):
            reader.set_up_storage_reader(None, False)
            with self.assertRaises(AssertionError):
                reader.set_up_storage_reader(None, True)
            self.assertIs(reader.is_coordinator, True)  # stored before it fails
            BroadcastingTorchSaveReader(self.file, coordinator_rank=1).set_up_storage_reader(None, True)
        reader.reset(None)
        with self.assertRaises(AssertionError):
            reader.set_up_storage_reader(None, True)

    def test_R2_16_objects_are_refused_by_name(self):
        torch.save({"steps": 3}, self.file)
        index = MetadataIndex("model.steps")
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size([0]), index, torch.Size([0]), torch.Size([0]))
        planner = mock.Mock(spec=["flatten_state_dict", "state_dict"], flatten_state_dict=False, state_dict={})
        reader = BroadcastingTorchSaveReader(self.file)
        reader.is_coordinator = True
        with self.assertRaises(RuntimeError) as caught:
            reader.read_data(LoadPlan([item]), planner)
        for text in ("model.steps", "BroadcastingTorchSaveReader", "only supports loading Tensors"):
            self.assertIn(text, str(caught.exception))

    def test_R2_20_missing_key_and_bad_files_alone(self):
        torch.save({"a": numbered(2)}, self.file)
        with raises_together(self, "read") as caught:
            load(pool.Ranks(None, (0,), 0), {"a": torch.zeros(2), "b": torch.zeros(2)}, self.file)
        self.assertIsInstance(caught.failures[0][0], RuntimeError)
        self.assertIn("b", str(caught.failures[0][0]))
        with raises_together(self, "read") as caught:
            load(pool.Ranks(None, (0,), 0), {"a": torch.zeros(3)}, self.file)
        self.assertIsInstance(caught.failures[0][0], AssertionError)
        self.assertIn("mismatch sizes", str(caught.failures[0][0]))
        with raises_together(self, "read") as caught:
            load(pool.Ranks(None, (0,), 0), {"a": torch.zeros(2)}, self.root / "absent.pt")
        self.assertIsInstance(caught.failures[0][0], FileNotFoundError)

    def test_R2_21_single_process(self):
        expected = {"model": {"weight": numbered(3, 4), "scalar": torch.tensor(7.5), "none": torch.zeros(0, 3)}}
        torch.save(expected, self.file)
        state = {"model": {"weight": torch.zeros(3, 4), "scalar": torch.zeros(()), "none": torch.ones(0, 3)}}
        self.assertStateEqual(load(pool.Ranks(None, (0,), 0), state, self.file), expected)

    def test_R2_22_metadata_comes_from_the_target(self):
        planner = DynamicMetaLoadPlanner()
        planner.set_up_planner({"m": {"a": torch.zeros(2, 3, dtype=torch.int16)}}, Metadata({"other": None}), True)
        entry = planner.metadata.state_dict_metadata["m.a"]
        self.assertEqual(list(planner.metadata.state_dict_metadata), ["m.a"])
        self.assertEqual((entry.properties.dtype, entry.size), (torch.int16, torch.Size([2, 3])))
        self.assertEqual([(chunk.offsets, chunk.sizes) for chunk in entry.chunks], [(torch.Size([0, 0]), torch.Size([2, 3]))])
        with self.assertRaises(RuntimeError) as caught:
            DynamicMetaLoadPlanner().set_up_planner({"a": torch.zeros(2), "epoch": 5})
        for text in ("epoch", "DynamicMetaLoadPlanner", "only supports loading Tensors"):
            self.assertIn(text, str(caught.exception))

    def test_deprecated_load_says_what_to_use(self):
        torch.save({"a": numbered(2)}, self.file)
        with self.assertRaises(ValueError) as caught:
            dcp.load_state_dict(
                {"a": torch.zeros(2)}, BroadcastingTorchSaveReader(self.file), no_dist=True, planner=DynamicMetaLoadPlanner()
            )
        self.assertIn("load() with checkpoint_id", str(caught.exception))

    def test_partial_load_leaves_what_the_file_lacks(self):
        torch.save({"a": numbered(2)}, self.file)
        state = {"a": torch.zeros(2), "b": torch.ones(2)}
        load(pool.Ranks(None, (0,), 0), state, self.file, DynamicMetaLoadPlanner(allow_partial_load=True))
        self.assertStateEqual(state, {"a": numbered(2), "b": torch.ones(2)})

    def test_nothing_in_a_file_is_executed(self):
        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(marker),)

        marker = self.root / "executed"
        torch.save({"a": numbered(2), "x": Hostile()}, self.file)
        state = {"a": torch.zeros(2)}
        load(pool.Ranks(None, (0,), 0), state, self.file)
        self.assertStateEqual(state, {"a": numbered(2)})
        self.assertFalse(marker.exists())

    def test_boxes_cover_a_shape_once_and_in_order(self):
        for shape, most in (((3, 4, 5), 7), ((3, 4, 5), 25), ((1, 64), 10), ((7,), 3), ((), 1), ((2, 3), 6), ((4, 1, 9), 2)):
            flat = torch.zeros(shape)
            reached = -1
            for offsets, sizes in _pieces.boxes(shape, most):
                self.assertLessEqual(torch.Size(sizes).numel(), most)
                part = _pieces.narrowed(flat, (0,) * len(shape), offsets, sizes)
                self.assertTrue(part.is_contiguous())
                self.assertGreater(part.storage_offset(), reached)
                reached = part.storage_offset()
                part += 1
            self.assertTrue(bool((flat == 1).all()), (shape, most))


# Functions of ranks.


def load_dense(ranks, path):
    assert ranks.rank == 0 or not os.access(path, os.R_OK) or os.getuid() == 0
    state = {"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.float64)}
    if ranks.rank != 0:
        with mock.patch("libdcp.torch.format_utils._TorchFile", side_effect=AssertionError("opened by another rank")):
            load(ranks, state, path)
    else:
        load(ranks, state, path)
    return {name: tensor_bytes(tensor) for name, tensor in state.items()}


def load_nested(ranks, path):
    state = load(ranks, {"model": {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}}, path)
    flat = {"top": torch.zeros(2)}
    load(ranks, flat, path, DynamicMetaLoadPlanner(flatten_state_dict=False))
    return [tensor_bytes(tensor) for tensor in (state["model"]["weight"], state["model"]["bias"], flat["top"])]


def load_sharded(ranks, path, message_bytes):
    mesh = DeviceMesh("cpu", torch.arange(ranks.size)) if ranks.size == pool.WORLD else DeviceMesh.from_group(ranks.group, "cpu")
    rows = distribute_tensor(torch.zeros(10, 3), mesh, [Split(0)])
    columns = distribute_tensor(torch.zeros(4, 7), mesh, [Split(1)])
    whole = distribute_tensor(torch.zeros(5), mesh, [Replicate()])
    first = 3 * ranks.rank
    shards = [Shard.from_tensor_and_offsets(torch.zeros(3, 2), [first, 0], dist.get_rank())]
    old = init_from_local_shards(shards, 3 * ranks.size, 2, process_group=ranks.group)
    with mock.patch.object(_broadcast, "MESSAGE_BYTES", message_bytes):
        load(ranks, {"rows": rows, "columns": columns, "whole": whole, "old": old}, path)
    expected = torch.load(path)
    for name, tensor in (("rows", rows), ("columns", columns), ("whole", whole)):
        wanted = distribute_tensor(expected[name], mesh, tensor.placements)
        assert frozen(wanted.to_local()) == frozen(tensor.to_local()), name
    assert torch.equal(shards[0].tensor, expected["old"][first : first + 3])
    return tuple(rows.to_local().shape)


def fail_to_load(ranks, path, names):
    return failures_of(lambda: load(ranks, {name: torch.zeros(2) for name in names}, path))


def fail_on_a_rank(ranks, path, failing):
    class Failing(DynamicMetaLoadPlanner):
        def resolve_tensor(self, read_item):
            raise KeyError("no memory for it")

    planner = Failing() if ranks.rank == failing else None
    return failures_of(lambda: load(ranks, {"a": torch.zeros(2)}, path, planner))


def break_while_sending(ranks, path):
    with mock.patch.object(_broadcast, "_fill", side_effect=OSError("cable pulled")):
        return failures_of(lambda: load(ranks, {"a": torch.zeros(2)}, path))


def load_in_a_subgroup(ranks, path):
    reader = BroadcastingTorchSaveReader(path, coordinator_rank=0)
    state = {"a": torch.zeros(2)}
    dcp.load(state, planner=DynamicMetaLoadPlanner(), storage_reader=reader, process_group=ranks.group)
    other = {"a": torch.zeros(2)}
    reader = BroadcastingTorchSaveReader(path, coordinator_rank=1)
    dcp.state_dict_loader._load_state_dict(other, reader, ranks.group, coordinator_rank=1, planner=DynamicMetaLoadPlanner())
    return tensor_bytes(state["a"]), tensor_bytes(other["a"])


def load_by_torch(ranks, path):
    """Our reader and planner under PyTorch's load, after one of ours in which every rank was alone."""
    reader = BroadcastingTorchSaveReader(path)
    dcp.load({"a": torch.zeros(2)}, planner=DynamicMetaLoadPlanner(), storage_reader=reader, no_dist=True)
    state = {"a": torch.zeros(2)}
    torch_dcp.load(state, planner=DynamicMetaLoadPlanner(), storage_reader=reader, process_group=ranks.group)
    return tensor_bytes(state["a"])


class Together(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.root / "model.pt"

    def test_R2_17_only_the_coordinator_opens_the_file(self):
        torch.save({"a": numbered(3, 4), "b": numbered(2)}, self.file)  # b has another dtype than its target
        expected = {"a": tensor_bytes(numbered(3, 4)), "b": tensor_bytes(numbered(2, dtype=torch.float64))}
        for world in (2, 4):
            self.assertEqual(pool.run(load_dense, self.file, world=world), [expected] * world)

    def test_R2_18_nested_targets(self):
        torch.save({"model": {"weight": numbered(4, 4), "bias": numbered(4)}, "top": numbered(2, start=5)}, self.file)
        expected = [tensor_bytes(t) for t in (numbered(4, 4), numbered(4), numbered(2, start=5))]
        self.assertEqual(pool.run(load_nested, self.file, world=2), [expected] * 2)

    def test_R2_19_shards(self):
        state = {"rows": numbered(10, 3), "columns": numbered(4, 7), "whole": numbered(5)}
        for world, rows in ((2, [(5, 3)] * 2), (4, [(3, 3)] * 3 + [(1, 3)])):
            torch.save(state | {"old": numbered(3 * world, 2)}, self.file)
            for message_bytes in (16, 100, 1 << 20):
                self.assertEqual(pool.run(load_sharded, self.file, message_bytes, world=world), rows)

    def test_R2_20_every_rank_learns_of_failures(self):
        torch.save({"a": numbered(2)}, self.file)
        for found in pool.run(fail_to_load, self.file, ["a", "extra"], world=2):
            self.assertEqual((found[0], list(found[1])), ("read", [0]))
            self.assertIn("extra", found[1][0][1])
        self.file.write_bytes(b"no archive")
        for found in pool.run(fail_to_load, self.file, ["a"], world=2):
            self.assertEqual((found[0], list(found[1])), ("read", [0]))

    def test_R2_20_failing_ranks_are_named(self):
        torch.save({"a": numbered(2)}, self.file)
        for failing in (0, 1, 3):
            for found in pool.run(fail_on_a_rank, self.file, failing):
                self.assertEqual(found[0], "read")
                self.assertEqual({rank: kind for rank, (kind, _) in found[1].items()}, {failing: "KeyError"})
        for found in pool.run(break_while_sending, self.file):
            self.assertEqual(found, ("read", {0: ("OSError", "cable pulled")}))

    def test_R2_15_coordinator_is_a_rank_of_the_group(self):
        torch.save({"a": numbered(2)}, self.file)
        expected = tensor_bytes(numbered(2))
        self.assertEqual(pool.run(load_in_a_subgroup, self.file, members=(1, 3)), [(expected, expected)] * 2)

    def test_R12_12_under_pytorchs_load(self):
        torch.save({"a": numbered(2)}, self.file)
        self.assertEqual(pool.run(load_by_torch, self.file), [tensor_bytes(numbered(2))] * 4)


if __name__ == "__main__":
    unittest.main()
