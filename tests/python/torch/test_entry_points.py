"""R6: item sizes, prefixes, record writing, save and load themselves."""

import dataclasses
import inspect
import io
import os
import pathlib
import unittest

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp
import pool
from libdcp.torch import filesystem
from libdcp.torch.filesystem import _StorageInfo, _StoragePrefix, _StorageWriterTransforms, _write_item
from libdcp.torch.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from libdcp.torch.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from libdcp.torch.state_dict_saver import _save_state_dict
from libdcp.torch.stateful import Stateful
from libdcp.torch.storage import WriteResult
from support import TestCase, files_of, needs, numbered, raises_together


def item_of(size, dtype, kind=WriteItemType.TENSOR):
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
    return WriteItem(MetadataIndex("a"), kind, tensor_data=data)


class Sizes(TestCase):
    def test_R6_1_storage_sizes(self):
        for dtype, expected in ((torch.float32, 24), (torch.float16, 12), (torch.int8, 6)):
            for kind in (WriteItemType.TENSOR, WriteItemType.SHARD):
                self.assertEqual(item_of((2, 3), dtype, kind).tensor_storage_size(), expected)
        self.assertIsNone(WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO).tensor_storage_size())

    def test_R6_2_scalars_and_nothing(self):
        self.assertEqual(item_of((), torch.float64).tensor_storage_size(), 8)
        self.assertEqual(item_of((3, 0), torch.float64).tensor_storage_size(), 0)


class Prefixes(TestCase):
    def test_R6_3_prefix(self):
        for value in ("__0_", "", None, "ünï", "x" * 10000, "a/b\n"):
            self.assertEqual(_StoragePrefix(value).prefix, value)
            self.assertEqual(dataclasses.asdict(_StoragePrefix(value)), {"prefix": value})
        with self.assertRaises(TypeError):
            _StoragePrefix()
        prefix = _StoragePrefix("a")
        prefix.prefix = "b"
        self.assertEqual(prefix, _StoragePrefix("b"))
        self.assertNotEqual(prefix, "b")
        self.assertIn("_StoragePrefix", repr(prefix))
        self.assertEqual([field.name for field in dataclasses.fields(_StoragePrefix)], ["prefix"])

    def test_R6_4_global_plans_get_prefixes(self):
        plans = dcp.FileSystemWriter(self.path).prepare_global_plan([SavePlan([]), SavePlan([])])
        self.assertEqual([plan.storage_data for plan in plans], [_StoragePrefix("__0_"), _StoragePrefix("__1_")])
        kept = _StoragePrefix("mine")
        [plan] = dcp.FileSystemWriter(self.root / "x").prepare_global_plan([SavePlan([], storage_data=kept)])
        self.assertIs(plan.storage_data, kept)


@dataclasses.dataclass
class ItemDouble:
    type: WriteItemType
    index: MetadataIndex


class Records(TestCase):
    def write(self, stream, value, kind=None):
        kind = kind or (WriteItemType.BYTE_IO if isinstance(value, bytes) else WriteItemType.TENSOR)
        data = io.BytesIO(value) if isinstance(value, bytes) else value
        return _write_item(stream, data, ItemDouble(kind, MetadataIndex("x")), "file")

    def test_R6_5_one_record(self):
        stream = io.BytesIO(b"before")
        stream.seek(0, io.SEEK_END)
        result = self.write(stream, b"hello")
        self.assertIsInstance(result, WriteResult)
        self.assertEqual(result.storage_data, _StorageInfo("file", 6, 5))

    def test_R6_6_bytes_are_written_as_they_are(self):
        for value in (b"hello world", b"", os.urandom(10000)):
            stream = io.BytesIO()
            result = self.write(stream, value)
            self.assertEqual(stream.getvalue(), value)
            self.assertEqual((result.size_in_bytes, result.storage_data.length), (len(value),) * 2)
        stream = io.BytesIO()
        places = [self.write(stream, value).storage_data for value in (b"first", b"second")]
        self.assertEqual([(place.offset, place.length) for place in places], [(0, 5), (5, 6)])

    def test_R6_7_tensors_are_records_of_their_own(self):
        for tensor in (torch.rand(3), numbered(3, dtype=torch.int64), torch.tensor([True, False]), torch.rand(2, 2), torch.tensor(3.5)):
            stream = io.BytesIO()
            result = self.write(stream, tensor)
            self.assertEqual(result.size_in_bytes, len(stream.getvalue()))
            stream.seek(0)
            self.assertTrue(torch.equal(torch.load(stream), tensor))

    def test_R6_7_tensors_written_in_c(self):
        tensors = {"f": torch.rand(3), "i": numbered(3, dtype=torch.int64), "b": torch.tensor([True, False]), "m": torch.rand(2, 2),
                   "s": torch.tensor(3.5)}  # fmt: skip

        class Hooked(dcp.FileSystemWriter):
            def finish(self, metadata, results):
                super().finish(metadata, results)

        for writer in (dcp.FileSystemWriter(self.root / "c"), Hooked(self.root / "hooked")):
            dcp.save(tensors, storage_writer=writer, no_dist=True)
            for index, info in torch_dcp.FileSystemReader(writer.path).read_metadata().storage_data.items():
                with open(pathlib.Path(writer.path) / info.relative_path, "rb") as file:
                    file.seek(info.offset)
                    record = io.BytesIO(file.read(info.length))
                self.assertTrue(torch.equal(torch.load(record, weights_only=True), tensors[index.fqn]))

    def test_R6_8_sequences(self):
        stream = io.BytesIO()
        first, second = self.write(stream, torch.rand(3)), self.write(stream, b"12345")
        self.assertEqual(second.storage_data.offset, first.storage_data.length)

    def test_R6_9_index_and_name(self):
        item = ItemDouble(WriteItemType.BYTE_IO, MetadataIndex("x", (1,), 2))
        result = _write_item(io.BytesIO(), io.BytesIO(), item, "name")
        self.assertIs(result.index, item.index)
        self.assertEqual(result.storage_data.relative_path, "name")

    def test_R6_10_data_of_the_wrong_kind(self):
        with self.assertRaises(AssertionError):
            self.write(io.BytesIO(), torch.rand(2), WriteItemType.BYTE_IO)
        with self.assertRaises(AssertionError):
            self.write(io.BytesIO(), torch.rand(2, device="meta"))

    def test_R6_10_data_of_the_wrong_kind_in_c(self):
        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                return "neither"

        for state in ({"a": torch.rand(2)}, {"a": 1}):
            with raises_together(self, "write") as caught:
                dcp.save(state, checkpoint_id=self.path, planner=Planner(), no_dist=True)
            self.assertIsInstance(caught.failures[0][0], AssertionError)
        self.assertEqual(files_of(self.path), [])

    def test_R6_11_arguments_of_all_releases(self):
        item = ItemDouble(WriteItemType.BYTE_IO, MetadataIndex("x"))
        for extra in ({}, {"transforms": _StorageWriterTransforms()}):
            stream = io.BytesIO()
            _write_item(stream=stream, data=io.BytesIO(b"12"), write_item=item, storage_key="k", **extra)
            self.assertEqual(stream.getvalue(), b"12")
        stream = io.BytesIO()
        _write_item(_StorageWriterTransforms(), stream, io.BytesIO(b"12"), item, "k")
        self.assertEqual(stream.getvalue(), b"12")

    @needs(filesystem, "SerializationFormat")
    def test_R6_11_the_form_of_records(self):
        item = ItemDouble(WriteItemType.BYTE_IO, MetadataIndex("x"))
        form = filesystem.SerializationFormat.TORCH_SAVE
        by_position, by_name = io.BytesIO(), io.BytesIO()
        _write_item(_StorageWriterTransforms(), by_position, io.BytesIO(b"12"), item, "k", form)
        _write_item(stream=by_name, data=io.BytesIO(b"12"), write_item=item, storage_key="k", serialization_format=form)
        self.assertEqual((by_position.getvalue(), by_name.getvalue()), (b"12", b"12"))

    def test_R6_12_no_field_for_transforms_that_are_not(self):
        self.assertEqual(set(_StorageInfo("f", 0, 1).__getstate__()), {"relative_path", "offset", "length"})


def save_rank_local(ranks, path):
    state = {"mine": torch.full((2,), float(ranks.rank)), "o": ranks.rank}
    dcp.save(dict(state), checkpoint_id=path, process_group=ranks.group, use_collectives=False)
    ranks.barrier()
    names = files_of(path)
    found = {"mine": torch.zeros(2), "o": None}
    dcp.load(found, checkpoint_id=path, process_group=ranks.group)
    hooked = {"mine": torch.zeros(2), "o": None}

    class Planner(dcp.DefaultLoadPlanner):
        def finish_plan(self, plan):
            return super().finish_plan(plan)

    dcp.load(hooked, checkpoint_id=path, process_group=ranks.group, planner=Planner())
    return names, [(s["mine"].tolist(), s["o"]) for s in (found, hooked)]


def save_deprecated(ranks, path):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metadata = dcp.save_state_dict({"a": torch.ones(2)}, dcp.FileSystemWriter(path), ranks.group)
    return sorted(metadata.state_dict_metadata), [str(warning.message) for warning in caught]


class Saves(TestCase):
    def test_R6_13_deprecated_save_resets(self):
        writer = dcp.FileSystemWriter(self.path)
        before = writer.save_id
        metadata = dcp.save_state_dict({"a": torch.ones(2)}, writer, no_dist=True)
        self.assertIsInstance(metadata, Metadata)
        self.assertNotEqual(writer.save_id, before)
        self.assertEqual(metadata.storage_meta.save_id, writer.save_id)
        for names, messages in pool.run(save_deprecated, str(self.root / "4")):
            self.assertEqual(names, ["a"])
            self.assertTrue(any("`save_state_dict` is deprecated" in message for message in messages))

    def test_R6_14_internal_save_does_not_reset(self):
        parameters = inspect.signature(_save_state_dict).parameters
        self.assertEqual(
            {name: p.default for name, p in parameters.items() if p.default is not p.empty},
            {"process_group": None, "coordinator_rank": 0, "no_dist": False, "planner": None, "use_collectives": True},
        )
        writer = dcp.FileSystemWriter(self.path)
        before = writer.save_id
        state = {"a": torch.rand(3, 4), "b": torch.rand(6), "c": torch.rand(5)}
        metadata = _save_state_dict(state, writer, no_dist=True)
        self.assertEqual(writer.save_id, before)
        self.assertEqual(set(metadata.state_dict_metadata), set(state))

    def test_R6_15_names_and_files(self):
        metadata = dcp.save({"layer": {"weight": torch.rand(2, 2), "bias": torch.rand(2)}}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(set(metadata.state_dict_metadata), {"layer.weight", "layer.bias"})
        self.assertTrue(any(name.endswith(".metadata") for name in files_of(self.path)))
        self.assertTrue(any(name.endswith(".distcp") for name in files_of(self.path)))

    def test_R6_16_without_collectives(self):
        dcp.save({"a": torch.ones(2)}, checkpoint_id=self.path, no_dist=True, use_collectives=False)
        self.assertEqual(files_of(self.path), ["__0.metadata", "__0_0.distcp"])

    def test_R6_16_without_collectives_on_two_ranks(self):
        for names, found in pool.run(save_rank_local, str(self.path), world=2):
            self.assertEqual(names, ["__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"])

    def test_R6_17_each_rank_loads_its_own(self):
        for rank, (_, found) in enumerate(pool.run(save_rank_local, str(self.path), world=2)):
            self.assertEqual(found, [([rank, rank], rank)] * 2)

    @unittest.skipUnless(
        "kwargs" in inspect.signature(torch_dcp.FileSystemReader.read_metadata).parameters, "PyTorch reads no rank-local saves before 2.9"
    )
    def test_R6_17_pytorch_reads_what_a_rank_saved(self):
        dcp.save({"a": numbered(3), "n": {"o": 7}}, checkpoint_id=self.path, no_dist=True, use_collectives=False)
        state = {"a": torch.zeros(3), "n": {"o": 0}}
        torch_dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual((state["a"].tolist(), state["n"]), ([0, 1, 2], {"o": 7}))

    def test_R6_18_public_save(self):
        parameters = inspect.signature(dcp.save).parameters
        for name, default in {"checkpoint_id": None, "storage_writer": None, "planner": None, "process_group": None,
                              "no_dist": False, "use_collectives": True}.items():  # fmt: skip
            self.assertEqual(parameters[name].default, default)
            self.assertEqual(parameters[name].kind, inspect.Parameter.KEYWORD_ONLY)

    def test_R6_19_public_load(self):
        parameters = inspect.signature(dcp.load).parameters
        for name, default in {"checkpoint_id": None, "storage_reader": None, "planner": None, "process_group": None,
                              "no_dist": False}.items():  # fmt: skip
            self.assertEqual(parameters[name].default, default)
            self.assertEqual(parameters[name].kind, inspect.Parameter.KEYWORD_ONLY)
        dcp.save({"a": numbered(3)}, checkpoint_id=self.path, no_dist=True)
        tensor = torch.zeros(3)
        self.assertIsNone(dcp.load({"a": tensor}, checkpoint_id=self.path, no_dist=True))
        self.assertEqual(tensor.tolist(), [0, 1, 2])

    def test_R6_20_storage_by_position(self):
        with self.assertWarnsRegex(UserWarning, "The argument order of save has been changed"):
            dcp.save({"a": numbered(3)}, dcp.FileSystemWriter(self.path), no_dist=True)
        state = {"a": torch.zeros(3)}
        with self.assertWarnsRegex(UserWarning, "The argument order of load has been changed"):
            dcp.load(state, dcp.FileSystemReader(self.path), no_dist=True)
        self.assertEqual(state["a"].tolist(), [0, 1, 2])
        with self.assertRaises(TypeError):
            dcp.save({}, 1, 2)

    def test_R6_21_alone_it_says_so(self):
        with self.assertWarnsRegex(UserWarning, "assuming the intent is to save in a single process."):
            dcp.save({"a": 1}, checkpoint_id=self.path)
        with self.assertWarnsRegex(UserWarning, "assuming the intent is to load in a single process."):
            dcp.load({"a": 1}, checkpoint_id=self.path, no_dist=True)

    def test_R6_22_stateful_objects(self):
        class Thing:
            def __init__(self, n):
                self.n, self.calls = n, []

            def state_dict(self):
                self.calls.append("state_dict")
                return {"n": self.n}

            def load_state_dict(self, state):
                self.calls.append("load_state_dict")
                self.n = state["n"]

        thing = Thing(3)
        self.assertIsInstance(thing, Stateful)
        dcp.save({"thing": thing}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(thing.calls, ["state_dict"])
        other, state = Thing(0), {"plain": None}
        dcp.save({"thing": thing, "plain": 5}, checkpoint_id=self.path, no_dist=True)
        state["thing"] = other
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual((other.n, other.calls, state["plain"]), (3, ["state_dict", "load_state_dict"], 5))
        self.assertIs(state["thing"], other)


class Extensions(TestCase):
    """What libdcp adds to load and save."""

    def setUp(self):
        super().setUp()
        self.saved = {"model": {"w": numbered(3), "b": numbered(2, start=5)}, "optim": {"lr": 0.5, "m": numbered(3, start=9)}}
        dcp.save(self.saved, checkpoint_id=self.path, no_dist=True)

    def test_U62_selection(self):
        state = {"model": {"w": torch.zeros(3), "b": torch.zeros(2)}, "optim": {"lr": None, "m": torch.zeros(3)}}
        dcp.load(state, checkpoint_id=self.path, no_dist=True, include=["model.*"], exclude=["*.b"])
        self.assertEqual(state["model"]["w"].tolist(), [0, 1, 2])
        self.assertEqual(state["model"]["b"].tolist(), [0, 0])
        self.assertEqual((state["optim"]["lr"], state["optim"]["m"].tolist()), (None, [0, 0, 0]))

    def test_U62_prefix(self):
        state = {"w": torch.zeros(3), "b": torch.zeros(2)}
        dcp.load(state, checkpoint_id=self.path, no_dist=True, prefix="model.")
        self.assertEqual(state["b"].tolist(), [5, 6])

    def test_U61_rename(self):
        state = {"w": torch.zeros(3), "rate": None}
        names = {"w": "model.w", "rate": "optim.lr"}
        dcp.load(state, checkpoint_id=self.path, no_dist=True, rename=names.get)
        self.assertEqual((state["w"].tolist(), state["rate"]), ([0, 1, 2], 0.5))

    def test_U55_differences_both_ways(self):
        state = {"model": {"w": torch.zeros(3), "lazy": torch.full((2,), 4.0)}}
        told = []
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=self.path, no_dist=True, planner=planner, on_difference=lambda *d: told.append(d[:2]))
        self.assertEqual(state["model"]["w"].tolist(), [0, 1, 2])
        self.assertEqual(state["model"]["lazy"].tolist(), [4, 4])
        self.assertIn(("missing", "model.lazy"), told)
        self.assertEqual({name for kind, name in told if kind == "unexpected"}, {"model.b", "optim.lr", "optim.m"})
        with raises_together(self, "plan"):
            dcp.load({"model": {"w": torch.zeros(3)}}, checkpoint_id=self.path, no_dist=True, exact=True)

    def test_progress(self):
        told = []
        state = {"a": torch.ones(1 << 20)}
        dcp.save(state, checkpoint_id=self.root / "p", no_dist=True, progress=lambda done, total: told.append((done, total)))
        self.assertTrue(told)
        self.assertEqual(told[-1][1], 4 << 20)

    def test_only_where_nothing_is_overridden(self):
        class Planner(dcp.DefaultLoadPlanner):
            def finish_plan(self, plan):
                return super().finish_plan(plan)

        with self.assertRaisesRegex(ValueError, "prefix"):
            dcp.load({"w": torch.zeros(3)}, checkpoint_id=self.path, no_dist=True, prefix="model.", planner=Planner())

    def test_unknown_keywords(self):
        """R12.9."""
        with self.assertRaises(TypeError):
            dcp.save({}, checkpoint_id=self.path, no_dist=True, unknown=1)


if __name__ == "__main__":
    unittest.main()
