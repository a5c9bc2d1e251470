"""R2.1 to R2.10: StorageReader and FileSystemReader."""

import inspect
import io
import os
import unittest
import uuid
import zipfile

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.futures import Future

import libdcp.torch as dcp
import pool
from libdcp.torch import filesystem
from libdcp.torch.metadata import Metadata, StorageMeta
from libdcp.torch.planner import LoadItemType, LoadPlan
from libdcp.torch.storage import StorageReader
from support import GOLDEN, TestCase, needs, numbered, raises_together

NAMES = ("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data",
         "validate_checkpoint_id")  # fmt: skip


class RecordingReader(dcp.FileSystemReader):
    def __init__(self, path, calls):
        super().__init__(path)
        self.calls = calls


class RecordingPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls


def recorded(cls, name):
    original = getattr(cls.__bases__[0], name)

    def method(self, *args, **kwargs):
        self.calls.append(f"{cls.__name__}.{name}")
        return original(self, *args, **kwargs)

    setattr(cls, name, method)


for name in NAMES[1:-1]:
    recorded(RecordingReader, name)
for name in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"):
    recorded(RecordingPlanner, name)

ORDER_OF_ALL = [
    "RecordingReader.read_metadata",
    "RecordingPlanner.set_up_planner",
    "RecordingReader.set_up_storage_reader",
    "RecordingPlanner.create_local_plan",
    "RecordingReader.prepare_local_plan",
]
ORDER_OF_COORDINATOR = ["RecordingPlanner.create_global_plan", "RecordingReader.prepare_global_plan"]
ORDER_AT_THE_END = ["RecordingPlanner.finish_plan", "RecordingReader.read_data"]


def record_load(ranks, path):
    calls = []
    state = {"a": torch.zeros(3, 4)}
    reader, planner = RecordingReader(path, calls), RecordingPlanner(calls)
    dcp.load(state, storage_reader=reader, planner=planner, process_group=ranks.group, no_dist=ranks.size == 1)
    assert torch.equal(state["a"], numbered(3, 4))
    return calls


class CountingPlanner(dcp.DefaultLoadPlanner):
    """Counts what is asked for each item; tensors go through a temporary."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def resolve_tensor(self, read_item):
        self.calls.append(("resolve", read_item.dest_index.fqn))
        self.temporary = torch.zeros(tuple(read_item.lengths))
        return self.temporary

    def commit_tensor(self, read_item, tensor):
        self.calls.append(("commit", read_item.dest_index.fqn))
        assert tensor.data_ptr() == self.temporary.data_ptr()
        super().resolve_tensor(read_item).copy_(tensor)

    def load_bytes(self, read_item, value):
        assert isinstance(value, io.BytesIO) and value.tell() == 0
        self.calls.append(("bytes", read_item.dest_index.fqn))
        super().load_bytes(read_item, value)


class Reader(TestCase):
    def save(self, state, **options):
        torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(self.path, **options), no_dist=True)

    def test_R2_1_seven_methods(self):
        def method(self, *args):
            return None

        body = {name: method for name in NAMES} | {"validate_checkpoint_id": classmethod(method)}
        type("Whole", (StorageReader,), dict(body))()
        for missing in NAMES:
            cls = type("Lacking", (StorageReader,), {name: value for name, value in body.items() if name != missing})
            with self.assertRaises(TypeError, msg=missing):
                cls()

    def test_R2_2_start_and_reset(self):
        self.assertEqual(list(inspect.signature(dcp.FileSystemReader).parameters), ["path", "_extension_registry"])
        reader = dcp.FileSystemReader(self.path)
        self.assertEqual(reader.storage_data, {})
        uuid.UUID(reader.load_id)
        self.assertEqual((str(reader.path), str(reader.checkpoint_id)), (str(self.path),) * 2)
        first = reader.load_id
        reader.storage_data = {"x": 1}
        reader.reset()
        self.assertEqual((reader.storage_data, str(reader.path)), ({}, str(self.path)))
        self.assertNotEqual(reader.load_id, first)
        reader.reset(self.root / "other")
        self.assertEqual(str(reader.path), str(self.root / "other"))

    def test_R2_3_metadata_has_storage_meta(self):
        self.save({"a": numbered(3)})
        reader = dcp.FileSystemReader(self.path)
        metadata = reader.read_metadata()
        self.assertIsInstance(metadata.storage_meta, StorageMeta)
        self.assertEqual(metadata.storage_meta.load_id, reader.load_id)
        self.assertEqual(metadata.storage_meta.save_id, torch_dcp.FileSystemReader(self.path).read_metadata().storage_meta.save_id)
        old = dcp.FileSystemReader(GOLDEN / "2.1.2" / "shapes" / "ckpt")
        self.assertEqual(old.read_metadata().storage_meta.load_id, old.load_id)

    def test_R2_3_metadata_of_a_rank(self):
        for rank in range(4):
            reader = dcp.FileSystemReader(GOLDEN / "2.13.0" / "rank_local" / "ckpt")
            self.assertIn("mine", reader.read_metadata(rank=rank).state_dict_metadata)
        with self.assertRaises(FileNotFoundError):
            reader.read_metadata(rank=4)

    @needs(filesystem, "CURRENT_DCP_VERSION")
    def test_R2_4_format_version(self):
        self.assertEqual(filesystem.CURRENT_DCP_VERSION, "1.0.0")
        self.save({"a": numbered(3)})
        self.assertEqual(dcp.FileSystemReader(self.path).read_metadata().version, filesystem.CURRENT_DCP_VERSION)
        old = dcp.FileSystemReader(GOLDEN / "2.1.2" / "shapes" / "ckpt")
        self.assertIsNone(old.read_metadata().version)

    def test_R2_5_set_up_keeps_the_storage_data(self):
        reader = dcp.FileSystemReader(self.path)
        storage = {"x": 1}
        reader.set_up_storage_reader(Metadata({}, storage_data=storage), True)
        self.assertIs(reader.storage_data, storage)
        with self.assertRaisesRegex(AssertionError, "storage_data must not be None"):
            reader.set_up_storage_reader(Metadata({}), True)

    def test_R2_6_plans_pass_unchanged(self):
        reader = dcp.FileSystemReader(self.path)
        plan = LoadPlan([], storage_data={"s": 1}, planner_data={"p": 2})
        self.assertIs(reader.prepare_local_plan(plan), plan)
        plans = [plan, LoadPlan([])]
        self.assertIs(reader.prepare_global_plan(plans), plans)
        self.assertIs(plans[0], plan)

    def test_R2_7_resolve_copy_commit_once_for_each_item(self):
        state = {"a": numbered(4, 5), "b": numbered(3, start=7), "o": ["step", 3]}
        for number, save in enumerate((torch_dcp.save, dcp.save)):
            path = self.root / str(number)
            save(state, checkpoint_id=path, no_dist=True)
            for reader in (dcp.FileSystemReader(path), torch_dcp.FileSystemReader(path)):
                planner = CountingPlanner()
                found = {"a": torch.zeros(4, 5), "b": torch.zeros(3), "o": None}
                dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
                self.assertStateEqual(found, state)
                self.assertEqual(
                    sorted(planner.calls),
                    [("bytes", "o"), ("commit", "a"), ("commit", "b"), ("resolve", "a"), ("resolve", "b")],
                )

    def test_R2_7_boxes_of_records(self):
        """Of each record just the wanted box, in the middle of a tensor that is stored in parts."""

        class Window(dcp.DefaultLoadPlanner):
            def create_local_plan(self):
                import dataclasses

                plan = super().create_local_plan()
                [item] = plan.items
                return LoadPlan([dataclasses.replace(item, storage_offsets=torch.Size((1, 2)), lengths=torch.Size((2, 3)))])

        dcp.save({"a": numbered(4, 6)}, checkpoint_id=self.path, no_dist=True)
        state = {"a": torch.zeros(4, 6)}
        dcp.load(state, checkpoint_id=self.path, planner=Window(), no_dist=True)
        expected = torch.zeros(4, 6)
        expected[0:2, 0:3] = numbered(4, 6)[1:3, 2:5]
        self.assertTrue(torch.equal(state["a"], expected))

    def test_R2_8_targets_of_another_shape(self):
        class Wrong(dcp.DefaultLoadPlanner):
            def resolve_tensor(self, read_item):
                self.target = torch.full((2, 2), 7.0)
                return self.target

        self.save({"a": numbered(3, 4)})
        planner = Wrong()
        with raises_together(self, "read") as caught:
            dcp.load({"a": torch.zeros(3, 4)}, checkpoint_id=self.path, planner=planner, no_dist=True)
        self.assertIs(type(caught.failures[0][0]), AssertionError)
        self.assertIn("mismatch sizes", str(caught.failures[0][0]))
        self.assertEqual(planner.target.tolist(), [[7.0, 7.0]] * 2)

    def test_R2_9_records_execute_nothing(self):
        mark = self.root / "executed"

        class Hostile:
            def __reduce__(self):
                return (os.mkdir, (str(mark),))

        self.save({"a": numbered(3, 4)})
        [name] = [entry for entry in os.listdir(self.path) if entry.endswith(".distcp")]
        record = (self.path / name).read_bytes()
        hostile = io.BytesIO()
        torch.save(Hostile(), hostile)
        with zipfile.ZipFile(hostile) as archive:
            pickled = archive.read("archive/data.pkl")
        self.assertIn(b"mkdir", pickled)
        swapped = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(swapped, "w", zipfile.ZIP_STORED) as new:
            for entry in old.infolist():
                new.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else old.read(entry))
        (self.path / name).write_bytes(swapped.getvalue())
        metadata = torch_dcp.FileSystemReader(self.path).read_metadata()
        for info in metadata.storage_data.values():
            info.length = len(swapped.getvalue())
        import pickle

        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))
        for planner in (None, CountingPlanner()):
            with raises_together(self):
                dcp.load({"a": torch.zeros(3, 4)}, checkpoint_id=self.path, planner=planner, no_dist=True)
        self.assertFalse(mark.exists())

    def test_R2_10_order_of_calls(self):
        dcp.save({"a": numbered(3, 4)}, checkpoint_id=self.path, no_dist=True)
        [calls] = pool.run(record_load, str(self.path), world=1)
        self.assertEqual(calls, ORDER_OF_ALL + ORDER_OF_COORDINATOR + ORDER_AT_THE_END)
        first, second = pool.run(record_load, str(self.path), world=2)
        self.assertEqual(first, calls)
        self.assertEqual(second, ORDER_OF_ALL + ORDER_AT_THE_END)


class Nonsense(TestCase):
    """Readers that return what no reader should."""

    def load(self, **methods):
        reader = type("Odd", (dcp.FileSystemReader,), methods)(self.path)
        dcp.load({"a": torch.zeros(3)}, storage_reader=reader, no_dist=True)

    def test_H_nonsense_is_an_error(self):
        dcp.save({"a": numbered(3)}, checkpoint_id=self.path, no_dist=True)
        for methods in (
            {"read_metadata": lambda self, *args, **kwargs: None},
            {"read_metadata": lambda self, *args, **kwargs: "text"},
            {"prepare_global_plan": lambda self, plans: []},
            {"prepare_global_plan": lambda self, plans: None},
            {"prepare_local_plan": lambda self, plan: 3},
            {"read_data": lambda self, plan, planner: None},
        ):
            with raises_together(self):
                self.load(**methods)

    def test_H_a_future_that_never_comes_is_the_readers_own_affair(self):
        class Slow(dcp.FileSystemReader):
            def read_data(self, plan, planner):
                super().read_data(plan, planner)
                future = Future()
                import threading

                threading.Timer(0.2, future.set_result, (None,)).start()
                return future

        dcp.save({"a": numbered(3)}, checkpoint_id=self.path, no_dist=True)
        state = {"a": torch.zeros(3)}
        dcp.load(state, storage_reader=Slow(self.path), no_dist=True)
        self.assertEqual(state["a"].tolist(), [0, 1, 2])

    def test_R2_7_places_that_a_program_has_changed(self):
        """Storage data of its own making: PyTorch's code reads by it."""
        dcp.save({"a": numbered(3), "b": numbered(3, start=5)}, checkpoint_id=self.path, no_dist=True)

        class Swapped(dcp.FileSystemReader):
            def read_metadata(self, *args, **kwargs):
                metadata = super().read_metadata(*args, **kwargs)
                a, b = metadata.storage_data
                metadata.storage_data = {a: metadata.storage_data[b], b: metadata.storage_data[a]}
                return metadata

        state = {"a": torch.zeros(3), "b": torch.zeros(3)}
        dcp.load(state, storage_reader=Swapped(self.path), no_dist=True)
        self.assertEqual((state["a"].tolist(), state["b"].tolist()), ([5, 6, 7], [0, 1, 2]))

    def test_R2_7_item_types(self):
        self.assertEqual({LoadItemType.TENSOR.value, LoadItemType.BYTE_IO.value}, {1, 2})


if __name__ == "__main__":
    unittest.main()
