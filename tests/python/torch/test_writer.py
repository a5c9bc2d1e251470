"""R1: StorageWriter, StorageMeta, FileSystemWriter."""

import inspect
import os
import pathlib
import unittest
import uuid

import torch
import torch.distributed.checkpoint as torch_dcp
from torch.futures import Future

import libdcp.torch as dcp
import pool
from libdcp.torch import filesystem
from libdcp.torch.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    _split_by_size_and_type,
)
from libdcp.torch.metadata import Metadata, MetadataIndex, StorageMeta
from libdcp.torch.planner import SavePlan, WriteItem, WriteItemType
from libdcp.torch.storage import StorageWriter, WriteResult
from support import TestCase, files_of, numbered, raises_together


def future_of(value):
    future = Future()
    future.set_result(value)
    return future


class Minimal(StorageWriter):
    """Implements what must be implemented, and notes the calls."""

    def __init__(self):
        self.calls = []

    def reset(self, checkpoint_id=None):
        self.calls.append(("reset", checkpoint_id))

    def set_up_storage_writer(self, is_coordinator):
        self.calls.append(("set_up", is_coordinator))

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans

    def write_data(self, plan, planner):
        return future_of([WriteResult(item.index, 0, None) for item in plan.items])

    def finish(self, metadata, results):
        self.calls.append(("finish", len(results)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


class CapturingPlanner(dcp.DefaultSavePlanner):
    meta = None

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.meta = storage_meta
        self.is_coordinator_told = is_coordinator
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def report_ids(ranks, path):
    writer = dcp.FileSystemWriter(path)
    planner = CapturingPlanner()
    metadata = dcp.save({"a": torch.ones(4) * 2}, storage_writer=writer, planner=planner, process_group=ranks.group)
    meta = writer.storage_meta()
    assert planner.meta == meta
    return str(meta.checkpoint_id), meta.save_id, metadata.version, sorted(metadata.state_dict_metadata)


def report_native_ids(ranks, path):
    writer = dcp.FileSystemWriter(path)
    metadata = dcp.save({"a": torch.ones(4) * 2, "o": (1,)}, storage_writer=writer, process_group=ranks.group)
    loaded = dcp.FileSystemReader(path).read_metadata()
    ranks.barrier()
    return (
        metadata.version,
        metadata.storage_meta.save_id,
        loaded.storage_meta.save_id,
        sorted(index.fqn for index in metadata.storage_data),
        writer.storage_meta().save_id,
    )


def save_twice(ranks, path):
    writer = dcp.FileSystemWriter(path)
    ids = [writer.storage_meta().save_id]
    for _ in range(2):
        dcp.save({"a": torch.ones(3)}, storage_writer=writer, process_group=ranks.group)
        writer.reset(path)
        ids.append(writer.storage_meta().save_id)
    return len(set(ids)), files_of(path)


class Interface(TestCase):
    def test_R1_1_storage_meta_is_optional(self):
        writer = Minimal()
        self.assertIsNone(writer.storage_meta())
        planner = CapturingPlanner()
        dcp.save({"a": 1}, storage_writer=writer, planner=planner, no_dist=True)
        self.assertIsNone(planner.meta)

    def test_R1_2_seven_methods(self):
        names = ("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish",
                 "validate_checkpoint_id")  # fmt: skip
        body = {name: vars(Minimal)[name] for name in names}
        type("Whole", (StorageWriter,), dict(body))()
        for missing in names:
            cls = type("Lacking", (StorageWriter,), {name: value for name, value in body.items() if name != missing})
            with self.assertRaises(TypeError, msg=missing):
                cls()

    def test_R1_3_storage_meta_fields(self):
        first, second = StorageMeta(), StorageMeta()
        self.assertEqual((first.checkpoint_id, first.save_id, first.load_id, first.modules), (None, None, None, []))
        self.assertEqual(first, second)
        first.modules.append("m")
        self.assertEqual(second.modules, [])

    def test_R1_9_storage_meta_reaches_the_planner(self):
        writer, planner = dcp.FileSystemWriter(self.path), CapturingPlanner()
        before = writer.storage_meta()
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, planner=planner, no_dist=True)
        self.assertEqual(planner.meta, before)
        self.assertTrue(planner.is_coordinator_told)

    def test_R1_10_planners_without_storage_meta(self):
        told = []

        class Old(dcp.DefaultSavePlanner):
            def set_up_planner(self, state_dict, is_coordinator):
                told.append(is_coordinator)
                super().set_up_planner(state_dict, None, is_coordinator)

        with self.assertWarnsRegex(UserWarning, "storage_meta"):
            dcp.save({"a": torch.ones(2)}, checkpoint_id=self.path, planner=Old(), no_dist=True)
        self.assertEqual(told, [True])

    def test_R1_21_extra_arguments_only_where_they_are_taken(self):
        old = Minimal()
        dcp.save({"a": 1}, storage_writer=old, no_dist=True)
        self.assertIn(("set_up", True), old.calls)

        class New(Minimal):
            def set_up_storage_writer(self, is_coordinator, *args, **kwargs):
                self.calls.append(("set_up", is_coordinator, args, kwargs))

        new = New()
        dcp.save({"a": 1}, storage_writer=new, no_dist=True)
        self.assertIn(("set_up", True, (), {"rank": 0, "use_collectives": True}), new.calls)

    def test_R1_22_writing_returns_a_future(self):
        futures = []

        class Watched(dcp.FileSystemWriter):
            def write_data(self, plan, planner):
                futures.append(super().write_data(plan, planner))
                return futures[0]

        dcp.save({"a": torch.ones(4), "b": "text"}, storage_writer=Watched(self.path), no_dist=True)
        [future] = futures
        self.assertIsInstance(future, Future)
        self.assertEqual({result.index.fqn for result in future.value()}, {"a", "b"})
        for result in future.value():
            self.assertEqual(result.size_in_bytes, result.storage_data.length)
        with self.assertRaises(AttributeError):
            future.value()[0].index = None


class Ids(TestCase):
    def check_meta(self, writer, path):
        meta = writer.storage_meta()
        self.assertEqual(str(meta.checkpoint_id), str(path))
        uuid.UUID(meta.save_id)
        self.assertEqual(meta.modules, [])
        self.assertIsNone(meta.load_id)

    def test_R1_4_directory_and_fresh_id(self):
        self.check_meta(dcp.FileSystemWriter(self.path), self.path)
        self.check_meta(dcp.FileSystemWriter(str(self.path)), self.path)

    def test_R1_5_reset(self):
        writer = dcp.FileSystemWriter(self.path)
        first = writer.storage_meta().save_id
        self.assertEqual(writer.storage_meta().save_id, first)
        other = self.root / "other"
        writer.reset(other)
        second = writer.storage_meta()
        self.assertNotEqual(second.save_id, first)
        self.assertEqual(str(second.checkpoint_id), str(other))
        writer.reset()
        third = writer.storage_meta()
        self.assertNotEqual(third.save_id, second.save_id)
        self.assertEqual(third.checkpoint_id, second.checkpoint_id)

    def test_R1_6_valid_after_a_save(self):
        for number, state in enumerate(({"a": torch.rand(4, 4)}, {})):
            path = self.root / str(number)
            writer = dcp.FileSystemWriter(path)
            dcp.save(state, storage_writer=writer, no_dist=True)
            self.check_meta(writer, path)
            self.assertTrue((path / ".metadata").exists())

    def test_R1_7_save_reset_save(self):
        writer = dcp.FileSystemWriter(self.path)
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        first = writer.storage_meta().save_id
        writer.reset(self.path)
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        self.assertNotEqual(writer.storage_meta().save_id, first)

    def test_R1_7_on_two_ranks(self):
        for n_ids, files in pool.run(save_twice, str(self.path), world=2):
            self.assertEqual(n_ids, 3)

    def test_R1_8_reset_only_with_an_id(self):
        class Counting(dcp.FileSystemWriter):
            resets = 0

            def reset(self, checkpoint_id=None):
                self.resets += 1
                super().reset(checkpoint_id)

        writer, planner = Counting(self.path), CapturingPlanner()
        before = writer.storage_meta().save_id
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, planner=planner, no_dist=True)
        self.assertEqual((writer.resets, planner.meta.save_id), (0, before))
        writer.resets = 0
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, planner=planner, checkpoint_id=self.root / "x", no_dist=True)
        self.assertEqual(writer.resets, 1)
        self.assertEqual(str(planner.meta.checkpoint_id), str(self.root / "x"))

    def test_R1_11_every_rank_has_the_directory_and_an_id(self):
        found = pool.run(report_ids, str(self.path), world=2)
        for checkpoint_id, save_id, version, names in found:
            self.assertEqual(checkpoint_id, str(self.path))
            uuid.UUID(save_id)
            self.assertEqual((version, names), ("1.0.0", ["a"]))
        self.assertNotEqual(found[0][1], found[1][1])

    def test_R1_12_metadata_on_every_rank(self):
        found = pool.run(report_native_ids, str(self.path), world=2)
        for version, save_id, read_id, names, _ in found:
            self.assertEqual(version, "1.0.0")
            self.assertEqual(save_id, found[0][4])  # the coordinator's
            self.assertEqual(read_id, save_id)
            self.assertEqual(names, ["a", "o"])

    def test_R1_12_metadata_is_whole(self):
        writer = dcp.FileSystemWriter(self.path)
        metadata = dcp.save({"a": numbered(3, 4), "b": {"c": [1]}}, storage_writer=writer, no_dist=True)
        self.assertIsInstance(metadata, Metadata)
        self.assertEqual(metadata.storage_meta.save_id, writer.save_id)
        self.assertEqual(str(metadata.storage_meta.checkpoint_id), str(self.path))
        self.assertEqual(metadata.planner_data, {"a": ("a",), "b.c": ("b", "c")})
        self.assertEqual(metadata.state_dict_metadata["a"].size, torch.Size((3, 4)))
        self.assertEqual(set(metadata.storage_data), {MetadataIndex("a", (0, 0)), MetadataIndex("b.c")})
        again = torch_dcp.FileSystemReader(self.path).read_metadata()
        self.assertEqual(again.state_dict_metadata["a"].chunks, metadata.state_dict_metadata["a"].chunks)
        self.assertEqual(again.state_dict_metadata["b.c"], metadata.state_dict_metadata["b.c"])
        self.assertEqual(again.storage_data, metadata.storage_data)

    def test_R1_12_lazy_metadata_is_a_metadata(self):
        import copy
        import pickle

        def fresh():
            return dcp.save({"a": torch.ones(2)}, checkpoint_id=self.root / str(uuid.uuid4()), no_dist=True)

        self.assertIs(type(pickle.loads(pickle.dumps(fresh()))), Metadata)
        self.assertIs(type(copy.copy(fresh())), Metadata)
        self.assertIn("state_dict_metadata", repr(fresh()))
        metadata = fresh()
        self.assertEqual(metadata, copy.deepcopy(metadata))
        self.assertIs(type(metadata), Metadata)

    def test_R1_12_lazy_metadata_after_a_change_of_directory(self):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.root)
        metadata = dcp.save({"a": torch.ones(2)}, checkpoint_id="here", no_dist=True)
        os.chdir("/")
        self.assertEqual(list(metadata.state_dict_metadata), ["a"])

    def test_R1_12_metadata_of_a_replaced_checkpoint(self):
        metadata = dcp.save({"a": torch.ones(2)}, checkpoint_id=self.path, no_dist=True)
        dcp.save({"b": torch.ones(2)}, checkpoint_id=self.path, no_dist=True)
        with self.assertRaisesRegex(RuntimeError, "has been replaced"):
            metadata.version

    def test_R1_23_checkpoint_id(self):
        writer = dcp.FileSystemWriter(self.path)
        self.assertEqual(writer.checkpoint_id, writer.path)
        writer.reset(str(self.root / "next"))
        self.assertEqual(str(writer.checkpoint_id), str(self.root / "next"))

    def test_R1_24_validation_of_ids(self):
        for validate in (dcp.FileSystemWriter.validate_checkpoint_id, FileSystem.validate_checkpoint_id):
            self.assertTrue(validate(pathlib.Path("anything")))
            self.assertTrue(validate(str(self.root / "new" / "er")))
            self.assertFalse(validate("s3://bucket/key"))

    def test_R1_25_storage_is_inferred(self):
        for function in (dcp.save, dcp.load):
            with self.assertRaisesRegex(RuntimeError, "`checkpoint_id` must be specified"):
                function({"a": 1}, no_dist=True)
            with self.assertRaisesRegex(RuntimeError, "Cannot detect which StorageReader or StorageWriter to use"):
                function({"a": 1}, checkpoint_id="nothing-known://x/y", no_dist=True)

    @unittest.skipIf(os.geteuid() == 0, "root may write everywhere")
    def test_R1_25_reading_needs_no_permission_to_write(self):
        self.check_read_only()

    def check_read_only(self):
        dcp.save({"a": numbered(4)}, checkpoint_id=self.path, no_dist=True)
        state = {"a": torch.zeros(4)}
        for directory in (self.path, self.root):
            directory.chmod(0o555)
            self.addCleanup(directory.chmod, 0o755)
        dcp.load(state, checkpoint_id=str(self.path), no_dist=True)
        self.assertEqual(state["a"].tolist(), [0, 1, 2, 3])


class Options(TestCase):
    def test_R1_13_options_and_defaults(self):
        parameters = list(inspect.signature(dcp.FileSystemWriter).parameters.values())
        form = getattr(filesystem, "SerializationFormat", None)  # since 2.8
        self.assertEqual(
            [(p.name, p.default) for p in parameters],
            [
                ("path", inspect.Parameter.empty),
                ("single_file_per_rank", True),
                ("sync_files", True),
                ("thread_count", 1),
                ("per_thread_copy_ahead", 10_000_000),
                ("cache_staged_state_dict", False),
                ("overwrite", True),
                ("_extensions", None),
                *((("serialization_format", form.TORCH_SAVE),) if form else ()),
            ],
        )
        writer = dcp.FileSystemWriter(self.path, False, False, 3, 5, True, False)
        self.assertEqual(
            (writer.single_file_per_rank, writer.sync_files, writer.thread_count, writer.per_thread_copy_ahead,
             writer.cache_staged_state_dict, writer.overwrite),
            (False, False, 3, 5, True, False),
        )  # fmt: skip

    def save(self, state, **options):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self.path, **options), no_dist=True)
        return files_of(self.path)

    def test_R1_14_names_of_files(self):
        self.assertEqual(DEFAULT_SUFFIX, ".distcp")
        self.assertEqual(self.save({"a": torch.ones(2)}), [".metadata", "__0_0.distcp"])
        names = self.save({"a": torch.ones(2)})  # over the first one: other names
        self.assertEqual(len(names), 2)
        self.assertRegex(names[1], r"^__0_[0-9a-f]+_0\.distcp$")

    def test_R1_14_names_through_the_hooks(self):
        class Hooked(dcp.FileSystemWriter):
            def prepare_local_plan(self, plan):
                return super().prepare_local_plan(plan)

        for _ in range(2):
            dcp.save({"a": torch.ones(2)}, storage_writer=Hooked(self.path), no_dist=True)
        names = files_of(self.path)
        self.assertEqual(len(names), 2)
        self.assertRegex(names[1], r"^__0_[0-9a-f]+_0\.distcp$")

    def test_R1_15_number_of_files(self):
        state = {f"t{i}": torch.ones(i + 1) for i in range(5)}
        self.assertEqual(self.save(state, single_file_per_rank=False)[1:], [f"__0_{i}.distcp" for i in range(5)])
        self.path = self.root / "threads"
        self.assertEqual(self.save(state, thread_count=3)[1:], [f"__0_{i}.distcp" for i in range(3)])
        self.path = self.root / "empty"
        self.assertEqual(self.save({"a": torch.ones(1)}, thread_count=3)[1:], [f"__0_{i}.distcp" for i in range(3)])
        self.assertEqual(sorted(os.path.getsize(self.path / name) == 0 for name in files_of(self.path)[1:]), [False, True, True])

    def test_R1_16_what_goes_into_which_file(self):
        state = {f"t{i}": torch.ones(100 * (i + 1)) for i in range(4)}
        state["object"] = "text"
        self.save(state, thread_count=3)
        metadata = torch_dcp.FileSystemReader(self.path).read_metadata()
        files = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
        self.assertEqual(files["t3"], "__0_0.distcp")
        self.assertEqual(files["object"], "__0_0.distcp")
        self.assertEqual(len(set(files.values())), 3)

    def test_R1_16_split_by_size_and_type(self):
        items = [WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO)]
        self.assertEqual(_split_by_size_and_type(1, items), [items])
        self.assertEqual(_split_by_size_and_type(2, items), [items, []])

    def test_R1_17_directories_are_made(self):
        self.path = self.root / "a" / "b" / "c"
        self.assertIn(".metadata", self.save({"a": 1}))
        deeper = self.root / "d" / "e"
        dcp.FileSystemWriter(deeper).prepare_local_plan(SavePlan([]))
        self.assertTrue(deeper.is_dir())

    def test_R1_18_existing_checkpoints(self):
        self.save({"a": torch.ones(2)})
        with self.assertWarnsRegex(UserWarning, "Detected an existing checkpoint in"):
            self.save({"a": torch.ones(2) * 2})
        with raises_together(self, "plan") as caught:
            self.save({"a": torch.ones(2) * 3}, overwrite=False)
        self.assertIsInstance(caught.failures[0][0], RuntimeError)
        self.assertIn("Checkpoint already exists", str(caught.failures[0][0]))
        state = {"a": torch.zeros(2)}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(state["a"].tolist(), [2.0, 2.0])

    def test_R1_18_existing_checkpoints_through_the_hooks(self):
        class Planner(dcp.DefaultSavePlanner):
            def finish_plan(self, plan):
                return super().finish_plan(plan)

        def save(value, **options):
            writer = dcp.FileSystemWriter(self.path, **options)
            dcp.save({"a": torch.ones(2) * value}, storage_writer=writer, planner=Planner(), no_dist=True)

        save(1)
        with self.assertWarnsRegex(UserWarning, "Detected an existing checkpoint in"):
            save(2)
        with raises_together(self, "plan") as caught:
            save(3, overwrite=False)
        self.assertIn("Checkpoint already exists", str(caught.failures[0][0]))
        self.assertEqual(len(files_of(self.path)), 2)

    def test_R1_18_without_collectives_nothing_is_replaced(self):
        for planner in (None, CapturingPlanner()):
            path = self.root / type(planner).__name__
            dcp.save({"a": torch.ones(2)}, checkpoint_id=path, no_dist=True, use_collectives=False, planner=planner)
            with self.assertRaises(RuntimeError):
                dcp.save({"a": torch.ones(2)}, checkpoint_id=path, no_dist=True, use_collectives=False, planner=planner)
            self.assertEqual(files_of(path), ["__0.metadata", "__0_0.distcp"])

    def test_R1_20_only_the_elements_of_views(self):
        big = torch.arange(1 << 20, dtype=torch.float32)
        views = {
            "slice": big[1000:1004],
            "transpose": big[:4].reshape(2, 2).t(),
            "step": big[0:8:2],
            "expanded": big[:1].expand(4),
        }
        for planner in (None, CapturingPlanner()):
            self.path = self.root / str(planner is None)
            dcp.save(dict(views), checkpoint_id=self.path, planner=planner, no_dist=True)
            self.assertLess(sum(os.path.getsize(self.path / name) for name in files_of(self.path)), 4 * 4096)
            state = {name: torch.zeros(tensor.shape) for name, tensor in views.items()}
            torch_dcp.load(state, checkpoint_id=self.path, no_dist=True)
            for name, tensor in views.items():
                self.assertTrue(torch.equal(state[name], tensor), name)


class UnderPyTorch(TestCase):
    """R12.12: our writer under PyTorch's save."""

    def test_R1_19_metadata_appears_last(self):
        order = []

        class Writer(dcp.FileSystemWriter):
            def finish(self, metadata, results):
                order.append(files_of(self.path))
                super().finish(metadata, results)
                order.append(files_of(self.path))

        torch_dcp.save({"a": torch.ones(3)}, storage_writer=Writer(self.path), no_dist=True)
        before, after = ([name for name in names if not name.startswith(".libdcp")] for names in order)
        self.assertEqual(before, ["__0_0.distcp"])
        self.assertEqual(after, [".metadata", "__0_0.distcp"])

    def test_R12_12_our_writer_under_their_save(self):
        state = {"a": numbered(3, 4), "n": {"o": (1, "x"), "t": numbered(2, dtype=torch.bfloat16)}}
        for _ in range(2):
            torch_dcp.save(state, storage_writer=dcp.FileSystemWriter(self.path), no_dist=True)
        self.assertEqual(len(files_of(self.path)), 2)
        for load in (dcp.load, torch_dcp.load):
            found = {"a": torch.zeros(3, 4), "n": {"o": None, "t": torch.zeros(2, dtype=torch.bfloat16)}}
            load(found, checkpoint_id=self.path, no_dist=True)
            self.assertStateEqual(found, state)

    def test_R1_14_a_failed_save_leaves_nothing(self):
        class Planner(torch_dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                raise ValueError("no data")

        writer = dcp.FileSystemWriter(self.path)
        with raises_together(self, "write"):
            torch_dcp.save({"a": torch.ones(3)}, storage_writer=writer, planner=Planner(), no_dist=True)
        writer.reset()
        self.assertEqual(files_of(self.path), [])
        torch_dcp.save({"a": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(self.path), no_dist=True)
        self.assertEqual(files_of(self.path), [".metadata", "__0_0.distcp"])


if __name__ == "__main__":
    unittest.main()
