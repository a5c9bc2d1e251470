"""R5: plans, items and planners."""

import dataclasses
import inspect
import io
import random
import threading
import time
import unittest

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import libdcp.torch as dcp
import pool
from libdcp.torch import planner as planner_module
from libdcp.torch._dedup_save_plans import dedup_save_plans
from libdcp.torch._nested_dict import flatten_state_dict, unflatten_state_dict
from libdcp.torch.default_planner import (
    _create_default_local_metadata,
    _EmptyStateDictLoadPlanner,
    create_default_global_save_plan,
)
from libdcp.torch.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from libdcp.torch.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from libdcp.torch.planner_helpers import create_read_items_for_chunk_list
from libdcp.torch.state_dict_loader import _load_state_dict_from_keys
from libdcp.torch.utils import _assert_same_keys, find_state_dict_object, find_tensor_shard
from support import GOLDEN, RELEASE, TestCase, failures_of, needs, numbered, raises_together, torch_bytes

SAYS_WHY = RELEASE >= (2, 13)  # what is wrong with a plan; earlier releases log it


def chunk(offsets, sizes):
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def tensor_item(fqn, size, offsets=None, sizes=None, kind=WriteItemType.SHARD):
    part = chunk(offsets or (0,) * len(size), sizes or size)
    data = TensorWriteData(part, TensorProperties(), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, part.offsets), kind, tensor_data=data)


class Items(TestCase):
    """The dataclasses are PyTorch's; these rows hold because the names are the same objects."""

    def test_R5_1_plans(self):
        self.assertEqual([f.name for f in dataclasses.fields(SavePlan)], ["items", "storage_data", "planner_data", "usable"])
        self.assertEqual([f.name for f in dataclasses.fields(LoadPlan)], ["items", "storage_data", "planner_data"])
        self.assertEqual(SavePlan([]), SavePlan([]))
        with self.assertRaises(dataclasses.FrozenInstanceError):
            SavePlan([]).items = []
        LoadPlan([]).items = [1]

    def test_R5_2_write_items(self):
        self.assertEqual([WriteItemType.TENSOR.value, WriteItemType.SHARD.value, WriteItemType.BYTE_IO.value], [1, 2, 3])
        names = [f.name for f in dataclasses.fields(WriteItem) if f.name != "bytes_io_data"]  # which came with 2.8
        self.assertEqual(names, ["index", "type", "tensor_data"])

    @needs(planner_module, "BytesIOWriteData")
    def test_R5_2_sizes_of_objects(self):
        self.assertEqual(planner_module.BytesIOWriteData(3).nbytes, 3)

    def test_R5_3_read_items(self):
        names = ["type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths"]
        self.assertEqual([f.name for f in dataclasses.fields(ReadItem)], names)
        self.assertEqual([LoadItemType.TENSOR.value, LoadItemType.BYTE_IO.value], [1, 2])

    def test_R5_4_indices(self):
        first, second = MetadataIndex("a", (1, 2), 3), MetadataIndex("a", (1, 2), 4)
        self.assertEqual(first, second)
        self.assertEqual(hash(first), hash(second))
        self.assertIsInstance(first.offset, torch.Size)
        self.assertEqual(MetadataIndex(7).fqn, 7)


class NotingSavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, calls, **options):
        super().__init__(**options)
        self.calls = calls

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.calls.append(("set_up_planner", is_coordinator))
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        self.calls.append("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans):
        self.calls.append("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        self.calls.append("finish_plan")
        return super().finish_plan(new_plan)


class Saving(TestCase):
    def test_R5_5_default_save_planner(self):
        parameters = inspect.signature(dcp.DefaultSavePlanner).parameters
        self.assertEqual(
            {name: p.default for name, p in parameters.items()},
            {
                "flatten_state_dict": True,
                "flatten_sharded_tensors": True,
                "dedup_replicated_tensors": None,
                "dedup_save_to_lowest_rank": False,
                "enable_plan_caching": False,
            },
        )
        self.assertTrue(issubclass(dcp.DefaultSavePlanner, torch_dcp.DefaultSavePlanner))

    def test_R5_6_order_of_calls(self):
        calls = []
        dcp.save({"a": torch.ones(2)}, checkpoint_id=self.path, planner=NotingSavePlanner(calls), no_dist=True)
        self.assertEqual(calls, [("set_up_planner", True), "create_local_plan", "create_global_plan", "finish_plan"])

    def test_R5_7_one_copy_of_what_is_replicated(self):
        for planner in ("ours", "hooked"):
            path = self.root / planner
            pool.run(save_replicated, str(path), planner == "hooked", world=2)
            metadata = torch_dcp.FileSystemReader(path).read_metadata()
            self.assertEqual(len(metadata.storage_data), 3)
            self.assertEqual(len(metadata.state_dict_metadata["t"].chunks), 1)

    def test_R5_8_deduplication(self):
        properties = TensorProperties()

        def item(fqn, elements):
            data = TensorWriteData(chunk((0,), (elements,)), properties, torch.Size((elements,)))
            return WriteItem(MetadataIndex(fqn, (0,)), WriteItemType.TENSOR, tensor_data=data)

        items = [item("a", 25), item("b", 2), item("c", 2), WriteItem(MetadataIndex("n"), WriteItemType.BYTE_IO)]
        plans = dedup_save_plans([SavePlan(items)] * 3)
        kept = [sorted(entry.index.fqn for entry in plan.items) for plan in plans]
        self.assertEqual(kept, [["a"], ["b", "n"], ["c"]])
        lowest = dedup_save_plans([SavePlan(items)] * 3, True)
        self.assertEqual([len(plan.items) for plan in lowest], [4, 0, 0])

    def test_R5_9_global_plan_lists_chunks_in_order(self):
        plans = [SavePlan([tensor_item("a", (4,), (0,), (2,))]), SavePlan([tensor_item("a", (4,), (2,), (2,))])]
        plans, metadata = create_default_global_save_plan(plans)
        self.assertEqual([plan.items[0].index.index for plan in plans], [0, 1])
        self.assertEqual([c.offsets for c in metadata.state_dict_metadata["a"].chunks], [torch.Size((0,)), torch.Size((2,))])

    def test_R5_10_two_items_of_one_name(self):
        plan = SavePlan([tensor_item("a", (4,), kind=WriteItemType.TENSOR)] * 2)
        with self.assertRaises(AssertionError):
            create_default_global_save_plan([plan])

    def test_R5_11_faulty_plans(self):
        faults = {
            "has out of bounds chunk": ((2,), (3,)),
            "has overlapping chunks": ((1,), (3,)),
            "invalid fill tensor-volume": ((3,), (1,)),
        }
        for words, (offsets, sizes) in faults.items():
            plans = [SavePlan([tensor_item("a", (4,), (0,), (2,))]), SavePlan([tensor_item("a", (4,), offsets, sizes)])]
            planner = dcp.DefaultSavePlanner()
            planner.flatten_state_dict = False
            said = "Failed to validate global plan" + (".*" + words if SAYS_WHY else "")
            with self.assertRaisesRegex(ValueError, said):
                planner.create_global_plan(plans)

    def test_R5_11_faulty_plans_in_c(self):
        for kind, words in (
            ("outside", "has out of bounds chunk"),
            ("overlap", "has overlapping chunks"),
            ("gap", "invalid fill tensor-volume"),
        ):
            for found in pool.run(save_faulty, str(self.root / kind), kind, world=2):
                step, failures = found
                self.assertEqual(step, "plan")
                text = " ".join(text for _, text in failures.values())
                self.assertIn("Failed to validate global plan", text)
                self.assertIn(words, text)
                self.assertIn("odd", text)

    @unittest.skipUnless(SAYS_WHY, "PyTorch compares all pairs of chunks before 2.13")
    def test_R5_11_many_chunks_take_no_time(self):
        n = 16384
        metadata = {"a": TensorStorageMetadata(TensorProperties(), torch.Size((n,)), [chunk((i,), (1,)) for i in range(n)])}
        from libdcp.torch.default_planner import _validate_global_plan

        start = time.perf_counter()
        self.assertEqual(_validate_global_plan([SavePlan([])] * 2, Metadata(metadata)), [])
        self.assertLess(time.perf_counter() - start, 1)

    def test_R5_12_paths_of_all_ranks(self):
        pool.run(save_different_keys, str(self.path), world=2)
        metadata = dcp.FileSystemReader(self.path).read_metadata()
        self.assertEqual(
            metadata.planner_data,
            {"all.x": ("all", "x"), "only.0": ("only", "0"), "only.1": ("only", "1")},
        )

    def test_R5_13_flattening(self):
        tensor = torch.ones(1)
        state = {"b": [1, {}], "t": (tensor, 1), "l": [tensor, 2]}
        flat, mapping = flatten_state_dict(state)
        self.assertEqual(list(flat), ["b.0", "t", "l.0", "l.1"])
        self.assertEqual(mapping["l.1"], ("l", 1))
        self.assertEqual(unflatten_state_dict(flat, mapping)["l"], [tensor, 2])
        for number, save in enumerate((torch_dcp.save, dcp.save)):
            path = self.root / str(number)
            save(state, checkpoint_id=path, no_dist=True)
            metadata = torch_dcp.FileSystemReader(path).read_metadata()
            self.assertEqual(set(metadata.state_dict_metadata), set(flat))
            self.assertEqual({key: tuple(value) for key, value in metadata.planner_data.items()}, mapping)

    def test_R5_14_names_that_collide(self):
        state = {"a": {"b": 1}, "a.b": 2}
        for planner in (None, NotingSavePlanner([])):
            with raises_together(self, "plan") as caught:
                dcp.save(state, checkpoint_id=self.path, planner=planner, no_dist=True)
            self.assertIsInstance(caught.failures[0][0], ValueError)
            self.assertIn("duplicated flatten key a.b", str(caught.failures[0][0]))
        self.assertFalse((self.path / ".metadata").exists())

    def test_R5_15_flattening_of_old_releases(self):
        old = GOLDEN / "2.1.2" / "objects" / "ckpt"
        names = set(dcp.FileSystemReader(old).read_metadata().state_dict_metadata)
        nested = [name for name in names if "." not in name]
        self.assertTrue(nested)
        for planner in (None, NotingLoadPlanner([])):
            from torch.distributed.checkpoint import _version

            state = {}
            state.update(_load_state_dict_from_keys(None, checkpoint_id=old))
            target = emptied(state)
            dcp.load(target, checkpoint_id=old, planner=planner, no_dist=True)
            self.assertStateEqual(target, state)
            self.assertIsNone(_version._derived_version)

    def test_R5_16_data_is_fetched_once(self):
        class Counting(dcp.DefaultSavePlanner):
            def __init__(self):
                super().__init__()
                self.fetched, self.lock = [], threading.Lock()

            def resolve_data(self, write_item):
                with self.lock:
                    self.fetched.append(write_item.index.fqn)
                return super().resolve_data(write_item)

        planner = Counting()
        state = {f"t{i}": torch.rand(10) for i in range(7)} | {"o": {"x": 1}}
        writer = dcp.FileSystemWriter(self.path, thread_count=4)
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        self.assertEqual(sorted(planner.fetched), ["o.x"] + [f"t{i}" for i in range(7)])

    def test_R5_16_hooks_for_objects(self):
        class Transforming(dcp.DefaultSavePlanner):
            def transform_object(self, write_item, obj):
                if write_item.type == WriteItemType.BYTE_IO:
                    return io.BytesIO(torch_bytes("instead"))
                return super().transform_object(write_item, obj * 2)

        dcp.save({"t": torch.ones(3), "o": "text"}, checkpoint_id=self.path, planner=Transforming(), no_dist=True)
        state = {"t": torch.zeros(3), "o": None}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual((state["t"].tolist(), state["o"]), ([2, 2, 2], "instead"))

    def test_R5_17_plans_are_cached(self):
        for wrong, shapes in pool.run(save_thrice_with_cache, str(self.path), world=2):
            self.assertEqual(wrong, [])
            self.assertEqual(shapes, [(4,), (4,), (6,)])


def save_replicated(ranks, path, hooked):
    state = {"t": torch.ones(4), "l": [1, 2], "n": {"x": "text"}}
    planner = NotingSavePlanner([]) if hooked else None
    dcp.save(state, checkpoint_id=path, process_group=ranks.group, planner=planner)


class Placed(torch.Tensor):
    """A part of a tensor of 4 elements that says by itself where it lies."""

    at = 0

    def size(self):
        return torch.Size((4,))

    def __create_chunk_list__(self):
        return [chunk((self.at,), (self.numel(),))]

    def __get_tensor_shard__(self, index):
        return self.as_subclass(torch.Tensor)


def save_faulty(ranks, path, kind):
    at, n = {"outside": ((0, 2), (2, 3)), "overlap": ((0, 3), (2, 2)), "gap": ((0, 1), (2, 2))}[kind][ranks.rank]
    part = torch.ones(n).as_subclass(Placed)
    part.at = at
    return failures_of(lambda: dcp.save({"odd": part}, checkpoint_id=path, process_group=ranks.group))


def save_different_keys(ranks, path):
    dcp.save({"all": {"x": 1}, "only": {str(ranks.rank): ranks.rank}}, checkpoint_id=path, process_group=ranks.group)


def save_thrice_with_cache(ranks, path):
    wrong, shapes = [], []
    for number, rows in enumerate((4, 4, 6)):
        state = {"t": torch.full((rows,), float(number)), "mine": {str(ranks.rank): torch.ones(2) * number}}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=f"{path}-{number}", process_group=ranks.group, planner=planner)
        found = {"t": torch.zeros(rows), "mine": {str(ranks.rank): torch.zeros(2)}}
        dcp.load(found, checkpoint_id=f"{path}-{number}", process_group=ranks.group)
        shapes.append(tuple(found["t"].shape))
        if found["t"].tolist() != [float(number)] * rows or found["mine"][str(ranks.rank)].tolist() != [number] * 2:
            wrong.append(number)
    return wrong, shapes


class NotingLoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, calls, **options):
        super().__init__(**options)
        self.calls = calls

    def finish_plan(self, new_plan):
        self.calls.append("finish_plan")
        return super().finish_plan(new_plan)


def emptied(state):
    """The same structure with other leaves."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(value, (torch.Tensor, dict)) for value in state):
        return [emptied(value) for value in state]
    return None


def metadata_of(state):
    return _create_default_local_metadata(state)


class Loading(TestCase):
    def local_plan(self, state, metadata, **options):
        planner = dcp.DefaultLoadPlanner(**options)
        planner.set_up_planner(state, metadata, True)
        return planner.create_local_plan()

    def test_R5_18_default_load_planner(self):
        parameters = inspect.signature(dcp.DefaultLoadPlanner).parameters
        self.assertEqual(
            {name: p.default for name, p in parameters.items()},
            {"flatten_state_dict": True, "flatten_sharded_tensors": True, "allow_partial_load": False},
        )
        self.assertTrue(issubclass(dcp.DefaultLoadPlanner, torch_dcp.DefaultLoadPlanner))

    def test_R5_19_full_tensors(self):
        [item] = self.local_plan({"a": torch.zeros(3, 4)}, metadata_of({"a": torch.zeros(3, 4)})).items
        self.assertEqual(item.type, LoadItemType.TENSOR)
        self.assertEqual((item.dest_offsets, item.storage_offsets, item.lengths), ((0, 0), (0, 0), (3, 4)))

    def test_R5_20_objects(self):
        [item] = self.local_plan({"bytes": 1}, metadata_of({"bytes": 1})).items
        self.assertEqual(item.type, LoadItemType.BYTE_IO)
        self.assertEqual(item.dest_index, MetadataIndex("bytes"))
        self.assertEqual((item.dest_offsets, item.lengths), ((0,), (0,)))

    def test_R5_21_one_target_over_two_chunks(self):
        saved = TensorStorageMetadata(TensorProperties(), torch.Size((8,)), [chunk((0,), (4,)), chunk((4,), (4,))])
        items = self.local_plan({"a": torch.zeros(8)}, Metadata({"a": saved})).items
        items.sort(key=lambda item: item.dest_offsets)
        self.assertEqual([item.dest_index.offset for item in items], [(0,), (0,)])
        self.assertEqual([item.storage_index.offset for item in items], [(0,), (4,)])
        self.assertEqual([item.dest_offsets for item in items], [(0,), (4,)])
        self.assertEqual([item.storage_offsets for item in items], [(0,), (0,)])
        self.assertEqual([item.lengths for item in items], [(4,), (4,)])

    def test_R5_22_overlaps_agree_with_a_dense_count(self):
        rng = random.Random(22)
        for _ in range(100):
            ndim = rng.randrange(0, 4)
            shape = [rng.randrange(1, 7) for _ in range(ndim)]
            saved, wanted = ([chunk(*box) for box in cut(rng, shape)] for _ in range(2))
            items = create_read_items_for_chunk_list(
                "a", TensorStorageMetadata(TensorProperties(), torch.Size(shape), saved), wanted
            )
            counted = torch.zeros(shape, dtype=torch.int64)
            for item in items:
                start = [a + b for a, b in zip(item.storage_index.offset, item.storage_offsets)]
                other = [a + b for a, b in zip(item.dest_index.offset, item.dest_offsets)]
                self.assertEqual(start, other)
                counted[tuple(slice(at, at + n) for at, n in zip(start, item.lengths))] += 1
            self.assertTrue(bool((counted == 1).all()))

    def test_R5_23_plans_pass_unchanged(self):
        planner = dcp.DefaultLoadPlanner()
        plan = LoadPlan([])
        self.assertEqual(planner.create_global_plan([plan]), [plan])
        self.assertIs(planner.finish_plan(plan), plan)

    def check_hooked(self):
        return (lambda **options: dcp.DefaultLoadPlanner(**options), lambda **options: NotingLoadPlanner([], **options))

    def test_R5_24_missing_keys(self):
        dcp.save({"present": torch.ones(2), "extra": 1}, checkpoint_id=self.path, no_dist=True)
        for planner in self.check_hooked():
            state = {"present": torch.zeros(2), "absent": torch.full((2,), 7.0)}
            with raises_together(self, "plan") as caught:
                dcp.load(state, checkpoint_id=self.path, planner=planner(), no_dist=True)
            self.assertIsInstance(caught.failures[0][0], RuntimeError)
            self.assertIn("Missing key in checkpoint state_dict: absent", str(caught.failures[0][0]))
            self.assertEqual(state["present"].tolist(), [0, 0])
            dcp.load(state, checkpoint_id=self.path, planner=planner(allow_partial_load=True), no_dist=True)
            self.assertEqual(state["present"].tolist(), [1, 1])
            self.assertEqual(state["absent"].tolist(), [7, 7])

    def test_R5_24_plan_of_a_partial_load(self):
        metadata = metadata_of({"a": torch.ones(2)})
        plan = self.local_plan({"a": torch.ones(2), "b": torch.ones(2)}, metadata, allow_partial_load=True)
        self.assertEqual([item.dest_index.fqn for item in plan.items], ["a"])

    def test_R5_25_sizes_differ(self):
        dcp.save({"a": {"w": torch.ones(2, 2)}}, checkpoint_id=self.path, no_dist=True)
        for planner in self.check_hooked():
            state = {"a": {"w": torch.zeros(3, 2)}}
            with raises_together(self, "plan") as caught:
                dcp.load(state, checkpoint_id=self.path, planner=planner(), no_dist=True)
            cause = caught.failures[0][0]
            self.assertIsInstance(cause, ValueError)
            self.assertRegex(str(cause), r"Size mismatch between saved torch.Size\(.*\) and current: torch.Size\(.*\) for")
            self.assertIn("[2, 2]", str(cause))
            self.assertIn("[3, 2]", str(cause))
            self.assertIn("a.w", str(cause))

    def test_R5_26_kinds_differ(self):
        dcp.save({"t": torch.ones(2), "o": [1, 2]}, checkpoint_id=self.path, no_dist=True)
        for planner in self.check_hooked():
            with raises_together(self, "plan") as caught:
                dcp.load({"t": "object"}, checkpoint_id=self.path, planner=planner(), no_dist=True)
            self.assertIsInstance(caught.failures[0][0], ValueError)
            self.assertIn("Invalid checkpoint metadata for t, expected BytesStorageMetadata", str(caught.failures[0][0]))
            state = {"o": torch.zeros(2)}
            dcp.load(state, checkpoint_id=self.path, planner=planner(), no_dist=True)
            self.assertEqual(state["o"], [1, 2])

    def test_R5_27_resolve_gives_a_view(self):
        for target in (torch.zeros(4, 5), torch.zeros(5, 4).t()):
            planner = dcp.DefaultLoadPlanner()
            planner.set_up_planner({"a": target}, metadata_of({"a": target}), True)
            index = MetadataIndex("a", (0, 0))
            item = ReadItem(LoadItemType.TENSOR, index, torch.Size((1, 2)), index, torch.Size((0, 0)), torch.Size((2, 2)))
            planner.resolve_tensor(item).fill_(7)
            expected = torch.zeros(4, 5)
            expected[1:3, 2:4] = 7
            self.assertTrue(torch.equal(target, expected))

    def test_R5_28_targets_that_are_not_contiguous(self):
        dcp.save({"a": numbered(4, 5), "c": numbered(2, 3, 4, 5)}, checkpoint_id=self.path, no_dist=True)
        for planner in self.check_hooked():
            transposed = torch.zeros(5, 4).t()
            last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
            storage = transposed.data_ptr()
            state = {"a": transposed, "c": last}
            dcp.load(state, checkpoint_id=self.path, planner=planner(), no_dist=True)
            self.assertTrue(torch.equal(state["a"], numbered(4, 5)))
            self.assertTrue(torch.equal(state["c"], numbered(2, 3, 4, 5)))
            self.assertEqual(state["a"].data_ptr(), storage)
            self.assertTrue(state["c"].is_contiguous(memory_format=torch.channels_last))

    def test_R5_29_commit_gets_the_temporary(self):
        class Temporary(dcp.DefaultLoadPlanner):
            calls = ()

            def resolve_tensor(self, read_item):
                self.calls += ("resolve",)
                return super().resolve_tensor(read_item).clone()

            def commit_tensor(self, read_item, tensor):
                self.calls += ("commit",)
                super().resolve_tensor(read_item).copy_(tensor)

        dcp.save({"a": numbered(4, 5)}, checkpoint_id=self.path, no_dist=True)
        planner, state = Temporary(), {"a": torch.zeros(4, 5)}
        dcp.load(state, checkpoint_id=self.path, planner=planner, no_dist=True)
        self.assertEqual(planner.calls, ("resolve", "commit"))
        self.assertTrue(torch.equal(state["a"], numbered(4, 5)))

    def test_R5_30_objects_go_to_their_place(self):
        value = io.BytesIO(torch_bytes({"x": (1, 2)}))
        item = self.local_plan({"nested": {"bytes": 1}}, metadata_of({"nested.bytes": 1})).items[0]
        state = {"nested": {"bytes": 1}}
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(state, metadata_of({"nested.bytes": 1}), True)
        planner.load_bytes(item, value)
        self.assertEqual(state, {"nested": {"bytes": {"x": (1, 2)}}})
        value.seek(0)
        state = {"nested.bytes": 1}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, metadata_of(state), True)
        planner.load_bytes(item, value)
        self.assertEqual(state, {"nested.bytes": {"x": (1, 2)}})

    def test_R5_30_without_flattening(self):
        state = {"n": {"a": 1, "b": [2]}, "t": numbered(3)}
        options = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
        dcp.save(state, checkpoint_id=self.path, planner=dcp.DefaultSavePlanner(**options), no_dist=True)
        self.assertEqual(set(dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata), {"n", "t"})
        found = {"n": None, "t": torch.zeros(3)}
        dcp.load(found, checkpoint_id=self.path, planner=dcp.DefaultLoadPlanner(**options), no_dist=True)
        self.assertStateEqual(found, state)

    def test_R5_31_planner_data_travels(self):
        for seen in pool.run(pass_planner_data, str(self.path), world=2):
            self.assertEqual(seen[0], {"local_plan": True})
            self.assertIn(seen[1], ({"storage_plan": 0}, {"storage_plan": 1}))

    def test_R5_32_objects_and_tensors_together(self):
        class Counter:
            def __init__(self, n):
                self.n = n

            def state_dict(self):
                return {"n": self.n, "t": torch.full((2,), float(self.n))}

            def load_state_dict(self, state):
                self.n, self.t = state["n"], state["t"]

        payload = ["step", 3, "ok"]
        dcp.save({"t": numbered(3), "o": payload, "c": Counter(5)}, checkpoint_id=self.path, no_dist=True)
        counter = Counter(0)
        state = {"t": torch.zeros(3), "o": None, "c": counter}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(state["o"], payload)
        self.assertIs(state["c"], counter)
        self.assertEqual((counter.n, counter.t.tolist()), (5, [5.0, 5.0]))

    def test_R5_33_other_dtypes_convert(self):
        saved = {"a": torch.rand(3, 4), "b": numbered(5, dtype=torch.int64), "c": torch.rand(2)}
        dcp.save(saved, checkpoint_id=self.path, no_dist=True)
        for planner in self.check_hooked():
            state = {
                "a": torch.zeros(3, 4, dtype=torch.bfloat16),
                "b": torch.zeros(5, dtype=torch.float64),
                "c": torch.zeros(2),
            }
            dcp.load(state, checkpoint_id=self.path, planner=planner(), no_dist=True)
            for name, tensor in state.items():
                self.assertTrue(torch.equal(tensor, torch.zeros_like(tensor).copy_(saved[name])), name)

    def test_R5_39_meta_targets_are_materialised(self):
        dcp.save({"a": numbered(3, 4), "n": {"b": numbered(2)}}, checkpoint_id=self.path, no_dist=True)
        for planner in self.check_hooked():
            state = {"a": torch.zeros(3, 4, device="meta"), "n": {"b": torch.zeros(2, device="meta")}}
            dcp.load(state, checkpoint_id=self.path, planner=planner(), no_dist=True)
            self.assertStateEqual(state, {"a": numbered(3, 4), "n": {"b": numbered(2)}})

    def test_R5_39_meta_dtensors(self):
        self.assertEqual(pool.run(load_meta, str(self.path), world=2), [True, True])

    def test_R5_40_keys_may_differ(self):
        for found in pool.run(load_different_keys, str(self.path), world=2):
            self.assertEqual(found[0], found[1])
            self.assertIn("Key(s) present in other ranks but not this one", found[2])

    def test_R5_41_wrong_places_are_named(self):
        state = {"a": torch.zeros(3)}
        with self.assertRaisesRegex(ValueError, "Could not find FQN"):
            find_state_dict_object(state, MetadataIndex("b"))
        with self.assertRaises(ValueError):
            find_tensor_shard(state["a"], MetadataIndex("a", (1,)))


def cut(rng, shape, at=None):
    """Boxes that tile a shape: cut at random places until rng says that it is enough."""
    at = at or [0] * len(shape)
    axes = [d for d, n in enumerate(shape) if n > 1]
    if not axes or rng.random() < 0.3:
        return [(tuple(at), tuple(shape))]
    axis = rng.choice(axes)
    n = rng.randrange(1, shape[axis])
    first, second, second_at = list(shape), list(shape), list(at)
    first[axis], second[axis], second_at[axis] = n, shape[axis] - n, at[axis] + n
    return cut(rng, first, at) + cut(rng, second, second_at)


def pass_planner_data(ranks, path):
    seen = []

    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            return dataclasses.replace(super().create_local_plan(), planner_data={"local_plan": True})

        def create_global_plan(self, plans):
            assert all(plan.planner_data == {"local_plan": True} for plan in plans)
            return [dataclasses.replace(plan, storage_data={"storage_plan": i}) for i, plan in enumerate(plans)]

        def finish_plan(self, plan):
            seen.extend((plan.planner_data, plan.storage_data))
            return super().finish_plan(plan)

    dcp.save({"a": torch.ones(2)}, checkpoint_id=path, process_group=ranks.group)
    dcp.load({"a": torch.zeros(2)}, checkpoint_id=path, process_group=ranks.group, planner=Planner())
    return seen


def load_meta(ranks, path):
    mesh = ranks.line()
    whole = numbered(5, 3)
    dcp.save({"a": distribute_tensor(whole, mesh, [Shard(0)])}, checkpoint_id=path, process_group=ranks.group)
    with torch.device("meta"):
        local = torch.empty(3 if ranks.rank == 0 else 2, 3)
    state = {"a": DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())}
    dcp.load(state, checkpoint_id=path, process_group=ranks.group)
    start = 0 if ranks.rank == 0 else 3
    return torch.equal(state["a"].to_local(), whole[start : start + local.shape[0]])


def load_different_keys(ranks, path):
    mine = {f"stage{ranks.rank}": torch.full((3,), float(ranks.rank))}
    dcp.save(dict(mine), checkpoint_id=path, process_group=ranks.group)
    state = {name: torch.zeros(3) for name in mine}
    dcp.load(state, checkpoint_id=path, process_group=ranks.group)
    try:
        _assert_same_keys(state, ranks.group)
        text = ""
    except AssertionError as error:
        text = str(error)
    return {k: v.tolist() for k, v in state.items()}, {k: v.tolist() for k, v in mine.items()}, text


class EmptyState(TestCase):
    def metadata(self):
        dcp.save({"a": torch.ones(2, 3), "m": {"b": torch.ones(4, dtype=torch.float64)}}, checkpoint_id=self.path, no_dist=True)
        return dcp.FileSystemReader(self.path).read_metadata()

    def test_R5_34_only_empty_targets(self):
        self.assertIsNone(_EmptyStateDictLoadPlanner().keys)
        self.assertEqual(_EmptyStateDictLoadPlanner(keys={"a"}).keys, {"a"})
        with self.assertRaises(AssertionError):
            _EmptyStateDictLoadPlanner().set_up_planner({"a": 1}, Metadata({}))
        with self.assertRaises(AssertionError):
            _EmptyStateDictLoadPlanner().set_up_planner({}, None)

    def test_R5_35_targets_are_filled_in(self):
        metadata, state = self.metadata(), {}
        planner = _EmptyStateDictLoadPlanner()
        planner.set_up_planner(state, metadata, True)
        self.assertEqual((state["a"].shape, state["a"].dtype), (torch.Size((2, 3)), torch.float32))
        self.assertEqual((state["m"]["b"].shape, state["m"]["b"].dtype), (torch.Size((4,)), torch.float64))
        self.assertIs(planner.metadata, metadata)
        self.assertTrue(planner.is_coordinator)

    def test_R5_36_selection(self):
        metadata = self.metadata()
        for keys, expected in (({"a", "z"}, {"a"}), ({"nonexistent"}, set()), ({"m"}, {"m"}), ({"m.b"}, {"m"})):
            state = {}
            planner = _EmptyStateDictLoadPlanner(keys=keys)
            planner.set_up_planner(state, metadata, True)
            self.assertEqual(set(state), expected)
            self.assertEqual(len(planner.create_local_plan().items), len(expected))
        odd = Metadata(
            {"0": TensorStorageMetadata(TensorProperties(), torch.Size((1,)), [chunk((0,), (1,))])},
            planner_data={"0": ("model", "layer", "weight")},
        )
        state = {}
        _EmptyStateDictLoadPlanner(keys={"model.layer.weight"}).set_up_planner(state, odd)
        self.assertEqual(list(state), ["model"])
        odd.planner_data, state = None, {}
        _EmptyStateDictLoadPlanner(keys={"0"}).set_up_planner(state, odd)
        self.assertEqual(list(state), ["0"])
        state = {}
        _EmptyStateDictLoadPlanner(keys={"x"}).set_up_planner(state, odd)
        self.assertEqual(state, {})

    def test_R5_37_plans_like_the_default_planner(self):
        planner = _EmptyStateDictLoadPlanner()
        planner.set_up_planner({}, self.metadata(), True)
        plan = planner.create_local_plan()
        self.assertEqual(len(plan.items), 2)
        self.assertEqual(len(planner.create_global_plan([plan, plan])), 2)
        self.assertIs(planner.finish_plan(plan), plan)

    def test_R5_38_loading_without_a_target(self):
        self.metadata()
        whole = _load_state_dict_from_keys(checkpoint_id=self.path)
        self.assertStateEqual(whole, {"a": torch.ones(2, 3), "m": {"b": torch.ones(4, dtype=torch.float64)}})
        self.assertEqual(list(_load_state_dict_from_keys("m", checkpoint_id=self.path)), ["m"])
        self.assertEqual(list(_load_state_dict_from_keys({"a"}, storage_reader=dcp.FileSystemReader(self.path))), ["a"])


class ExtensionPoints(TestCase):
    """R5.43: any overridden method is called exactly where DCP calls it."""

    METHODS = {
        dcp.DefaultSavePlanner: ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data",
                                 "lookup_object", "transform_object"),
        dcp.DefaultLoadPlanner: ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes",
                                 "resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor"),
    }  # fmt: skip

    def noting(self, cls, name, calls):
        original = getattr(cls, name)

        def method(planner, *args, **kwargs):
            calls.append(name)
            return original(planner, *args, **kwargs)

        return method

    def run_with(self, planner):
        state = {"t": numbered(4), "o": "text"}
        if isinstance(planner, SavePlanner):
            dcp.save(state, checkpoint_id=self.path, planner=planner, no_dist=True)
            planner = None
        else:
            dcp.save(state, checkpoint_id=self.path, no_dist=True)
        found = {"t": torch.zeros(4), "o": None}
        dcp.load(found, checkpoint_id=self.path, planner=planner, no_dist=True)
        self.assertStateEqual(found, state)

    def test_R5_43_each_method(self):
        twice = ("resolve_data", "lookup_object", "transform_object")  # one tensor and one object
        for cls, names in self.METHODS.items():
            for name in names:
                with self.subTest(method=f"{cls.__name__}.{name}"):
                    calls = []
                    self.run_with(type("Derived", (cls,), {name: self.noting(cls, name, calls)})())
                    self.assertEqual(calls, [name] * (2 if name in twice else 1))
                    calls.clear()
                    planner = cls()  # on the instance as well
                    setattr(planner, name, lambda *args, **kwargs: self.noting(cls, name, calls)(planner, *args, **kwargs))
                    if name != "set_up_planner":  # DCP looks at its signature
                        self.run_with(planner)
                        self.assertEqual(calls, [name] * (2 if name in twice else 1))

    def test_R5_43_abstract_methods(self):
        self.assertEqual(len(SavePlanner.__abstractmethods__), 5)
        self.assertTrue(issubclass(dcp.DefaultLoadPlanner, LoadPlanner))
        with self.assertRaises(NotImplementedError):
            dcp.DefaultLoadPlanner().resolve_bytes(None)


if __name__ == "__main__":
    unittest.main()
