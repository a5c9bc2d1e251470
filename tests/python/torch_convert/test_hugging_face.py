"""R9.5 to R9.20: Hugging Face writer, readers and consolidation."""

import contextlib
import importlib.util
import inspect
import json
import os
import pathlib
import struct
import subprocess
import sys
import threading
import unittest
import uuid
from unittest import mock

import fsspec
import torch
import torch.distributed.checkpoint as torch_dcp
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

import libdcp
import libdcp.torch as dcp
import pool

if importlib.util.find_spec("torch.distributed.checkpoint.hf_storage") is None:
    raise unittest.SkipTest(f"PyTorch {torch.__version__} has no torch.distributed.checkpoint.hf_storage")

from libdcp.torch import hf_storage
from libdcp.torch._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from libdcp.torch.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from support import TestCase, files_of, frozen, needs, numbered, raises_together, tensor_bytes

INDEX = "model.safetensors.index.json"
NAMES = ("float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 float8_e4m3fn float8_e5m2"
         " float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2").split()  # fmt: skip


def header(path):
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def save(state, path, ranks=None, **options):
    writer = dcp.HuggingFaceStorageWriter(path, **options)
    group = ranks and ranks.group
    return dcp.save(state, storage_writer=writer, process_group=group, no_dist=ranks is None or ranks.size == 1)


def load(state, path, ranks=None, reader=dcp.HuggingFaceStorageReader, **options):
    group = ranks and ranks.group
    reader = reader(path, **options)
    dcp.load(state, storage_reader=reader, process_group=group, no_dist=ranks is None or ranks.size == 1)
    return state


def every_dtype(*shape):
    """A tensor of each dtype with random bits; bools are 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name in NAMES:
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8, generator=generator)
        state[name] = bits.view(dtype).view(shape)
    return state


def empty_like(state):
    return {name: torch.zeros(t.shape, dtype=torch.uint8).view(t.dtype) if t.element_size() == 1 else torch.zeros_like(t)
            for name, t in state.items()}  # fmt: skip


def mesh_of(ranks):
    return DeviceMesh("cpu", torch.arange(ranks.size)) if ranks.size == pool.WORLD else DeviceMesh.from_group(ranks.group, "cpu")


def dense_state():
    return {
        "rows": numbered(10, 3),
        "columns": numbered(4, 7, dtype=torch.int64),
        "flags": numbered(9) > 4,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "plain": numbered(5, dtype=torch.int16),
    }


SPLITS = {"rows": Split(0), "columns": Split(1), "flags": Split(0)}


def sharded_state(ranks, state):
    mesh = mesh_of(ranks)
    return {name: distribute_tensor(t, mesh, [SPLITS[name]]) if name in SPLITS else t for name, t in state.items()}


def save_sharded(ranks, path, options):
    save(sharded_state(ranks, dense_state()), path, ranks, save_distributed=True, **options)


def save_few_rows(ranks, path):
    """Three rows on four ranks: the last one has an empty part."""
    options = {"save_distributed": True, "enable_consolidation": True}
    save(sharded_state(ranks, {"rows": numbered(3, 2)}), path, ranks, **options)


def load_sharded(ranks, path):
    zeros = {name: torch.zeros_like(t) for name, t in dense_state().items()}
    loaded = load(sharded_state(ranks, zeros), path, ranks)
    expected = sharded_state(ranks, dense_state())
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t  # noqa: E731
    return [name for name in expected if frozen(local(expected[name])) != frozen(local(loaded[name]))]


def save_whole(ranks, path, mapping):
    try:
        save({name: numbered(2) for name in "abcd"}, path, ranks, fqn_to_index_mapping=mapping)
    except dcp.CheckpointException as error:
        return sorted(error.failures), str(error.failures[0][0])
    return None


def fail_while_writing(ranks, path):
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise OSError("disk on fire")

    writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
    planner = Failing() if ranks.rank == 1 else None
    try:
        dcp.save(sharded_state(ranks, dense_state()), storage_writer=writer, planner=planner, process_group=ranks.group)
    except dcp.CheckpointException as error:
        return sorted(error.failures)


def consolidate_together(ranks, source, target, mapping):
    consolidate_safetensors_files_on_every_rank(source, target, mapping, process_group=ranks.group)
    return files_of(target)  # all of them are there when any rank returns


def save_nothing_on_rank_1(ranks, path):
    part = {0: {"a": numbered(3)}, 1: {}, 2: {"b": numbered(4)}}[ranks.rank]
    save(part, path, ranks, save_distributed=True)


def save_alone(ranks, path, options):
    """Without collectives."""
    writer = dcp.HuggingFaceStorageWriter(path, **options)
    try:
        dcp.save(sharded_state(ranks, {"rows": numbered(10, 3)}), storage_writer=writer, process_group=ranks.group,
                 use_collectives=False)  # fmt: skip
    except ValueError as error:
        return str(error)


def save_stage(ranks, path):
    """Pipeline parallelism: each rank has names of its own."""
    save({f"stage{ranks.rank}.w": numbered(4, start=ranks.rank)}, path, ranks, save_distributed=True, enable_consolidation=True)


def read_bytes():
    """By this process so far."""
    facts = pathlib.Path("/proc/self/io").read_text()
    return int(facts.split("rchar: ")[1].split()[0])


class TwoShards(torch.Tensor):
    """A tensor of 5 x 2 of which this process holds two parts."""

    @staticmethod
    def __new__(cls, whole):
        return torch.Tensor._make_subclass(cls, whole)

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([a, 0]), torch.Size([n, 2])) for a, n in ((0, 2), (2, 3))]

    def __create_write_items__(self, fqn, obj):
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                      tensor_data=TensorWriteData(chunk, properties, self.size()))
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index):
        start, count = (0, 2) if index.offset[0] == 0 else (2, 3)
        return self.detach().as_subclass(torch.Tensor)[start : start + count]


class Hub(MemoryFileSystem):
    """A store that lets in who has the token."""

    protocol = "dcphub"
    store, pseudo_dirs = {}, [""]

    def __init__(self, token=None, **options):
        super().__init__(**options)
        if token != "right":
            raise PermissionError(f"token {token!r}")


class Streams(torch_dcp.filesystem.FileSystem):
    """The local file system of a program, whose streams take 1000 bytes at once and then do as `after` says."""

    def __init__(self, after=len):
        self.after = after

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as file:
            if "b" not in mode or "w" not in mode:
                yield file
                return
            stream = mock.Mock(wraps=file)
            stream.write = lambda data: self.after(data[: file.write(data[:1000])])
            yield stream


class Writer(TestCase):
    def test_streams_get_the_bytes_of_the_local_file(self):
        state = every_dtype(30, 40) | {"t": numbered(50, 60).t()}
        save(state, self.path)
        other = self.root / "streams"
        writer = dcp.HuggingFaceStorageWriter(other)
        writer.fs = Streams()
        dcp.save(state, storage_writer=writer, no_dist=True)
        self.assertEqual(files_of(self.path), files_of(other))
        for name in files_of(self.path):
            self.assertEqual((self.path / name).read_bytes(), (other / name).read_bytes())

    def test_streams_that_fail_leave_nothing(self):
        def full(data):
            raise OSError(28, "no space")

        for after, message in ((full, "no space"), (lambda data: -1, "took -1 of")):
            writer = dcp.HuggingFaceStorageWriter(self.path)
            writer.fs = Streams(after)
            with raises_together(self, "write") as caught:
                dcp.save({"a": numbered(3)}, storage_writer=writer, no_dist=True)
            self.assertIn(message, str(caught.failures[0][0]))
            self.assertEqual(files_of(self.path), [])

    def test_R9_5_arguments(self):
        parameters = inspect.signature(dcp.HuggingFaceStorageWriter).parameters
        self.assertEqual(
            {name: p.default for name, p in parameters.items() if name != "path" and p.kind is not p.KEYWORD_ONLY},
            {
                "fqn_to_index_mapping": None,
                "thread_count": 1,
                "save_distributed": False,
                "enable_consolidation": False,
                "thread_count_consolidation": 1,
            },
        )
        self.assertTrue(issubclass(dcp.HuggingFaceStorageWriter, torch_dcp.HuggingFaceStorageWriter))

    def test_R9_5_keywords_of_2_8(self):
        """As they were there: save_sharded is save_distributed, and a token goes to the protocol of a remote path."""
        save({"a": numbered(2)}, self.path, save_sharded=True, token="local paths need none")
        self.assertEqual(files_of(self.path), ["shard-00001-model-00001-of-00001.safetensors"])
        load({"a": torch.zeros(2)}, self.path, token="none")
        fsspec.register_implementation("dcphub", Hub, clobber=True)
        place = f"dcphub://{uuid.uuid4().hex}"
        state = every_dtype(6, 4) | {"empty": torch.zeros(0, 3)}
        with self.assertRaises(PermissionError):
            save(state, place, token="wrong")
        save(state, place, token="right", fqn_to_index_mapping={name: 1 + len(name) % 2 for name in state})
        local = self.root / "local"
        save(state, local, fqn_to_index_mapping={name: 1 + len(name) % 2 for name in state})
        hub = Hub(token="right")
        self.assertEqual(sorted(os.path.basename(name) for name in hub.ls(place, detail=False)), files_of(local))
        for name in files_of(local):
            self.assertEqual(hub.cat_file(f"{place}/{name}"), (local / name).read_bytes())
        with self.assertRaises(PermissionError):
            dcp.HuggingFaceStorageReader(place)
        for name, tensor in load(empty_like(state), place, token="right").items():
            self.assertEqual(tensor_bytes(tensor), tensor_bytes(state[name]), name)
        with self.assertRaisesRegex(ValueError, "local directory"):
            dcp.HuggingFaceStorageWriter(place, save_distributed=True, enable_consolidation=True, token="right")

    def test_remote_shards_are_read_in_part(self):
        place = f"memory://{uuid.uuid4().hex}"
        pool.run(save_sharded, self.path, {}, world=4)
        for name in files_of(self.path):
            fsspec.filesystem("memory").pipe_file(f"{place}/{name}", (self.path / name).read_bytes())
        expected = dense_state()
        self.assertStateEqual(load({n: torch.zeros_like(t) for n, t in expected.items()}, place), expected)
        fsspec.filesystem("memory").pipe_file(f"{place}/cut.safetensors", b"\x10\0\0\0\0\0\0\0{")
        with raises_together(self) as caught:
            load({"rows": torch.zeros(10, 3)}, place)
        self.assertIn("cut.safetensors", str(caught.failures[0][0]))
        fsspec.filesystem("memory").pipe_file(f"{place}/cut.safetensors", b"\2\0\0\0\0\0\0\0x}")
        with raises_together(self) as caught:
            load({"rows": torch.zeros(10, 3)}, place)
        self.assertIn("cut.safetensors", str(caught.failures[0][0]))

    def test_remote_files_of_two_saves_are_not_mixed(self):
        for folder in (self.path, f"memory://{uuid.uuid4().hex}"):
            save({"a": numbered(4), "b": numbered(2)}, folder)
            save({"a": numbered(4, start=1)}, folder, save_distributed=True)
            with raises_together(self, "read") as caught:
                load({"a": torch.zeros(4)}, folder)
            self.assertIsInstance(caught.failures[0][0], libdcp.FormatError)
            self.assertStateEqual(load({"b": torch.zeros(2)}, folder), {"b": numbered(2)})

    def test_R9_6_file_names(self):
        save({"a": numbered(2)}, self.path)
        self.assertEqual(files_of(self.path), ["model-00001-of-00001.safetensors", INDEX])
        mapped = self.root / "mapped"
        save({"a": numbered(2), "b": numbered(3)}, mapped, fqn_to_index_mapping={"a": 1, "b": 3})
        self.assertEqual(files_of(mapped), ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors", INDEX])
        shards = self.root / "shards"
        pool.run(save_sharded, shards, {}, world=2)
        self.assertEqual(files_of(shards), [f"shard-0000{r}-model-00001-of-00001.safetensors" for r in (1, 2)])

    def test_R9_7_header(self):
        save({"a": numbered(2, 3), "s": torch.tensor(1.0)}, self.path)
        facts = header(self.path / "model-00001-of-00001.safetensors")["__metadata__"]
        self.assertEqual((facts["DCP_VERSION"], facts["format"]), ("1.0", "pt"))
        self.assertEqual(json.loads(facts["DCP_SHARDING_INFO"]), {"a": {"saved_offsets": [0, 0]}, "s": {"saved_offsets": []}})
        self.assertEqual(json.loads(facts["libdcp"])["tensors"], {"a": {"shape": [2, 3]}, "s": {"shape": []}})

    def test_R9_8_index(self):
        save({"a": numbered(2, 3), "b": numbered(4, dtype=torch.int8)}, self.path, fqn_to_index_mapping={"a": 1, "b": 2})
        index = json.loads((self.path / INDEX).read_text())
        files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        self.assertEqual(index, {"metadata": {"total_size": 28}, "weight_map": {"a": files[0], "b": files[1]}})
        self.assertEqual(dcp.HuggingFaceStorageWriter(self.path).metadata_path, INDEX)

    def test_R9_8_whole_tensors_of_two_ranks(self):
        self.assertEqual(pool.run(save_whole, self.path, None, world=2), [None, None])
        self.assertStateEqual(
            load({name: torch.zeros(2) for name in "abcd"}, self.path), {name: numbered(2) for name in "abcd"}
        )
        weight_map = json.loads((self.path / INDEX).read_text())["weight_map"]
        self.assertEqual(sorted(weight_map), list("abcd"))
        for name, file in weight_map.items():
            self.assertIn(name, header(self.path / file))
        for failed, text in pool.run(save_whole, self.root / "mapped", dict.fromkeys("abcd", 1), world=2):
            self.assertEqual(failed, [0])
            self.assertIn("save_distributed=True", text)
        self.assertEqual(files_of(self.root / "mapped"), [])

    def test_R9_9_consolidation_on_saving(self):
        pool.run(save_sharded, self.path, {"enable_consolidation": True}, world=2)
        self.assertEqual(files_of(self.path), ["model-00001-of-00001.safetensors", INDEX, "sharded"])
        self.assertEqual(len(files_of(self.path / "sharded")), 2)
        expected = dense_state()
        self.assertStateEqual(load({n: torch.zeros_like(t) for n, t in expected.items()}, self.path), expected)
        writer = dcp.HuggingFaceStorageWriter(self.path, save_distributed=True, enable_consolidation=True)
        self.assertEqual((writer.consolidated_output_path, str(writer.path)), (str(self.path), str(self.path / "sharded")))
        writer.reset(self.root / "other")
        self.assertEqual(
            (writer.consolidated_output_path, str(writer.path)), (str(self.root / "other"), str(self.root / "other/sharded"))
        )

    def test_R9_9_consolidation_where_a_rank_has_an_empty_part_alone(self):
        pool.run(save_few_rows, self.path)
        shards = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2, 3)]
        self.assertEqual(files_of(self.path / "sharded"), shards)
        for place in (self.path, self.path / "sharded"):
            self.assertStateEqual(load({"rows": torch.zeros(3, 2)}, place), {"rows": numbered(3, 2)})

    def test_R9_10_names_without_a_file(self):
        with raises_together(self, "plan") as caught:
            save({"a": numbered(2), "b": numbered(2)}, self.path, fqn_to_index_mapping={"a": 1})
        self.assertIn("b", str(caught.failures[0][0]))
        self.assertEqual(files_of(self.path), [])

    def test_R9_10_a_rank_without_items_writes_no_file(self):
        pool.run(save_nothing_on_rank_1, self.path, members=(0, 1, 2))
        self.assertEqual(files_of(self.path), [f"shard-0000{r}-model-00001-of-00001.safetensors" for r in (1, 3)])
        self.assertStateEqual(load({"a": torch.zeros(3), "b": torch.zeros(4)}, self.path), {"a": numbered(3), "b": numbered(4)})

    def test_R9_11_objects_are_refused_before_writing(self):
        with raises_together(self, "plan") as caught:
            save({"x": numbered(2), "n": 5}, self.path)
        self.assertIsInstance(caught.failures[0][0], RuntimeError)
        self.assertTrue(str(caught.failures[0][0]).startswith("n "))
        self.assertFalse(self.path.exists())
        bad_names = ({name: numbered(2)} for name in ("__metadata__", "\ud800", "a\0b", "\0"))
        for state in ({"c": torch.zeros(2, dtype=torch.complex128)}, *bad_names):
            with raises_together(self, "plan"):
                save(state, self.path)

    def test_R9_12_several_shards_on_a_rank(self):
        state = {"two": TwoShards(numbered(5, 2)), "one": numbered(3)}
        save(state, self.path, save_distributed=True)
        self.assertEqual(files_of(self.path), [f"shard-00001-model-0000{i}-of-00002.safetensors" for i in (1, 2)])
        self.assertStateEqual(
            load({"two": torch.zeros(5, 2), "one": torch.zeros(3)}, self.path), {"two": numbered(5, 2), "one": numbered(3)}
        )

    def test_every_dtype_and_layout(self):
        state = every_dtype(3, 4) | {"t": numbered(4, 6).t(), "step": numbered(10)[::3], "none": torch.zeros(0, 3)}
        save(state, self.path)
        with safe_open(self.path / "model-00001-of-00001.safetensors", framework="pt") as file:
            self.assertEqual(set(file.keys()), set(state))
            for name, tensor in state.items():
                if name != "float4_e2m1fn_x2":
                    self.assertEqual(tensor_bytes(file.get_tensor(name)), tensor_bytes(tensor), name)
        for name, tensor in load(empty_like(state), self.path).items():
            self.assertEqual(tensor_bytes(tensor), tensor_bytes(state[name]), name)

    def test_strided_tensors_are_written_piece_by_piece(self):
        state = {"t": numbered(2048, 1300).t(), "wide": numbered(2 << 20), "half": numbered(3000, 1000, dtype=torch.int16)[:, ::2]}
        whole = {name: tensor.contiguous() for name, tensor in state.items()}
        save(state, self.path)
        self.assertStateEqual(load({name: torch.zeros_like(t) for name, t in whole.items()}, self.path), whole)

    def test_what_a_killed_save_left_goes_with_the_next(self):
        program = (
            "import os, sys, torch, libdcp.torch as dcp\n"
            "class Dies(dcp.HuggingFaceStorageWriter):\n"
            "    def finish(self, metadata, results): os._exit(9)\n"
            "writer = Dies(sys.argv[1], {'a': 1, 'b': 2}, save_distributed=sys.argv[2] == 'True')\n"
            "dcp.save({'a': torch.ones(3), 'b': torch.ones(4)}, storage_writer=writer, no_dist=True)\n"
        )
        for is_sharded in (False, True):
            path = self.root / str(is_sharded)
            killed = subprocess.run([sys.executable, "-c", program, str(path), str(is_sharded)], timeout=60)
            self.assertEqual(killed.returncode, 9)
            self.assertEqual(len(files_of(path)), 2)
            others = ["model-00001-of-00002.safetensors.tmp", "notes.0123456789abcdef0123456789abcdef.tmp"]
            for name in others:
                (path / name).touch()
            save({"a": numbered(3)}, path, save_distributed=is_sharded)
            kept = ["shard-00001-model-00001-of-00001.safetensors"] if is_sharded else ["model-00001-of-00001.safetensors", INDEX]
            self.assertEqual(files_of(path), sorted(kept + others))
            self.assertStateEqual(load({"a": torch.zeros(3)}, path), {"a": numbered(3)})

    def test_a_new_save_replaces_the_old_one_as_a_whole(self):
        pool.run(save_sharded, self.path, {}, world=4)
        (self.path / "adapter.safetensors.txt").write_text("somebody else's")
        pool.run(save_sharded, self.path, {}, world=2)
        self.assertEqual(
            files_of(self.path),
            ["adapter.safetensors.txt"] + [f"shard-0000{r}-model-00001-of-00001.safetensors" for r in (1, 2)],
        )
        before = {name: (self.path / name).read_bytes() for name in files_of(self.path)}
        self.assertEqual(pool.run(fail_while_writing, self.path, world=2), [[1], [1]])
        self.assertEqual({name: (self.path / name).read_bytes() for name in files_of(self.path)}, before)

    def test_a_new_save_replaces_files_of_another_generation(self):
        mapping = {"a": 1, "b": 2}
        for _ in range(2):  # the second model is another one beside the first until it is whole
            save({"a": numbered(4), "b": numbered(2)}, self.path, fqn_to_index_mapping=mapping, save_distributed=True,
                 enable_consolidation=True)  # fmt: skip
        self.assertIn("model.1-00001-of-00002.safetensors", files_of(self.path))
        save({"a": numbered(4, start=1)}, self.path)
        self.assertEqual(files_of(self.path), ["model-00001-of-00001.safetensors", INDEX, "sharded"])
        self.assertStateEqual(load({"a": torch.zeros(4)}, self.path), {"a": numbered(4, start=1)})

    def test_files_in_the_way_of_a_save_are_warned_of(self):
        save({"a": numbered(4), "b": numbered(2)}, self.path, save_distributed=True)
        [shard] = files_of(self.path)
        with self.assertLogs("libdcp.torch.hf_storage", "WARNING") as logs:
            save({"a": numbered(4), "b": numbered(2)}, self.path)
        self.assertIn(f"{self.path}/{shard} holds a too, and 1 more", logs.output[0])
        with raises_together(self, "read") as caught:
            load({"a": torch.zeros(4)}, self.path)
        self.assertIn("overlap", str(caught.failures[0][0]))
        (self.path / shard).unlink()
        (self.path / "other.safetensors").write_bytes((self.path / "model-00001-of-00001.safetensors").read_bytes()[:20])
        with self.assertNoLogs("libdcp.torch.hf_storage"):  # one that nobody can read is not in the way of names
            save({"a": numbered(4)}, self.path)

    def test_headers_beyond_the_readers_limit_are_refused(self):
        with raises_together(self, "write") as caught:  # the name stands there three times
            save({"n" * 34_000_000: numbered(1)}, self.path)
        self.assertIn("over the limit of 100000000", str(caught.failures[0][0]))
        self.assertEqual(files_of(self.path), [])

    def test_R6_16_without_collectives(self):
        for _ in range(2):
            self.assertEqual(pool.run(save_alone, self.path, {"save_distributed": True}, world=2), [None, None])
        self.assertEqual(files_of(self.path), [f"shard-0000{r}-model-00001-of-00001.safetensors" for r in (1, 2)])
        self.assertStateEqual(load({"rows": torch.zeros(10, 3)}, self.path), {"rows": numbered(10, 3)})
        for found in pool.run(save_alone, self.path, {"save_distributed": True, "enable_consolidation": True}, world=2):
            self.assertIn("needs collectives", found)

    def test_098_ranks_with_names_of_their_own(self):
        pool.run(save_stage, self.path)
        expected = {f"stage{rank}.w": numbered(4, start=rank) for rank in range(4)}
        self.assertEqual(json.loads((self.path / INDEX).read_text())["weight_map"].keys(), expected.keys())
        self.assertStateEqual(load({name: torch.zeros(4) for name in expected}, self.path), expected)

    def test_107_listing_reads_headers_alone(self):
        save({"a": torch.zeros(4 << 20)}, self.path)
        before = read_bytes()
        dcp.HuggingFaceStorageReader(self.path).read_metadata()
        self.assertLess(read_bytes() - before, 1 << 20)

    def test_R12_12_under_pytorchs_save(self):
        writer = dcp.HuggingFaceStorageWriter(self.path)
        torch_dcp.save({"a": numbered(3)}, storage_writer=writer, no_dist=True)
        state = {"a": torch.zeros(3)}
        torch_dcp.load(state, storage_reader=torch_dcp.HuggingFaceStorageReader(str(self.path)), no_dist=True)
        self.assertStateEqual(state, {"a": numbered(3)})


class Reader(TestCase):
    def test_R9_13_by_any_number_of_ranks(self):
        for world in (2, 4):
            path = self.root / str(world)
            pool.run(save_sharded, path, {}, world=world)
            expected = dense_state()
            self.assertStateEqual(load({n: torch.zeros_like(t) for n, t in expected.items()}, path), expected)
            for readers in (2, 4):
                self.assertEqual(pool.run(load_sharded, path, world=readers), [[]] * readers)

    def test_R9_13_files_of_pytorch_and_others(self):
        writer = torch_dcp.HuggingFaceStorageWriter(str(self.path), save_distributed=True)
        torch_dcp.save({"a": numbered(3, 2)}, storage_writer=writer, no_dist=True)
        self.assertStateEqual(load({"a": torch.zeros(3, 2)}, self.path), {"a": numbered(3, 2)})
        other = self.root / "other"
        other.mkdir()
        save_file({"b": numbered(2)}, other / "adapter.safetensors")
        save_file({"c": numbered(4)}, other / "model.safetensors")
        self.assertStateEqual(load({"b": torch.zeros(2), "c": torch.zeros(4)}, other), {"b": numbered(2), "c": numbered(4)})

    def test_R9_13_the_global_shape_is_stored(self):
        pool.run(save_sharded, self.path, {}, world=4)
        os.remove(self.path / "shard-00004-model-00001-of-00001.safetensors")
        metadata = dcp.HuggingFaceStorageReader(self.path).read_metadata()
        self.assertEqual(metadata.state_dict_metadata["rows"].size, torch.Size([10, 3]))
        with raises_together(self):
            load({"rows": torch.zeros(10, 3)}, self.path)

    def test_R9_13_metadata(self):
        save({"a": numbered(2, 3, dtype=torch.int16)}, self.path)
        reader = dcp.HuggingFaceStorageReader(self.path, thread_count=4)
        metadata = reader.read_metadata()
        self.assertEqual(reader.thread_count, 4)
        self.assertEqual(metadata.state_dict_metadata["a"].properties.dtype, torch.int16)
        [(index, info)] = metadata.storage_data.items()
        self.assertEqual((index.fqn, tuple(index.offset)), ("a", (0, 0)))
        self.assertIsInstance(info, hf_storage._HFStorageInfo)
        self.assertEqual(info.relative_path, str(self.path / "model-00001-of-00001.safetensors"))
        self.assertEqual(metadata.storage_meta.load_id, reader.load_id)

    def test_R9_14_only_the_box_is_read(self):
        large = torch.arange(1 << 20, dtype=torch.int32).view(1024, 1024)
        save({"a": large}, self.path)

        class Counting(dcp.HuggingFaceStorageReader):
            bytes_read = 0

            def _read_box(self, item, target):
                before = read_bytes()
                super()._read_box(item, target)
                Counting.bytes_read += read_bytes() - before

        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        class Slice(torch.Tensor):
            def __create_chunk_list__(self):
                return [ChunkStorageMetadata(torch.Size([512, 0]), torch.Size([8, 1024]))]

            def __get_tensor_shard__(self, index):
                return part

        part = torch.zeros(8, 1024, dtype=torch.int32)
        target = torch.empty(1024, 1024, dtype=torch.int32).as_subclass(Slice)
        load({"a": target}, self.path, reader=Counting)
        self.assertEqual(tensor_bytes(part), tensor_bytes(large[512:520]))
        self.assertGreaterEqual(Counting.bytes_read, part.nbytes)
        self.assertLess(Counting.bytes_read, 4 * part.nbytes)

    def test_R9_14_each_thread_takes_whole_files(self):
        state = {name: numbered(1000, start=i) for i, name in enumerate("abcdef")}
        save(state, self.path, fqn_to_index_mapping={name: i // 2 + 1 for i, name in enumerate("abcdef")})
        together = threading.Barrier(3, timeout=30)  # as many files are read at the same time
        threads = {}

        class Watching(dcp.HuggingFaceStorageReader):
            def _read_box(self, item, target):
                thread = threading.get_ident()
                if thread not in threads:
                    together.wait()
                threads.setdefault(thread, []).append(item.storage_index.fqn)
                super()._read_box(item, target)

        target = {name: torch.zeros(1000) for name in state}
        self.assertStateEqual(load(target, self.path, reader=Watching, thread_count=3), state)
        self.assertEqual(sorted(map(sorted, threads.values())), [["a", "b"], ["c", "d"], ["e", "f"]])

    def test_R9_14_an_error_in_any_thread_fails_the_read(self):
        state = {name: numbered(1000) for name in "abc"}
        save(state, self.path, fqn_to_index_mapping={"a": 1, "b": 2, "c": 3})
        for number in (1, 2, 3):
            file = self.path / f"model-0000{number}-of-00003.safetensors"
            whole = file.read_bytes()
            reader = dcp.HuggingFaceStorageReader(self.path, thread_count=2)
            read_metadata = reader.read_metadata

            def cut_afterwards():
                metadata = read_metadata()
                file.write_bytes(whole[:-8])
                return metadata

            reader.read_metadata = cut_afterwards
            with raises_together(self, "read"):
                dcp.load({name: torch.zeros(1000) for name in state}, storage_reader=reader, no_dist=True)
            file.write_bytes(whole)

    def test_R9_14_errors_fail_the_read(self):
        save({"a": numbered(1000)}, self.path)
        file = self.path / "model-00001-of-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        with raises_together(self):
            load({"a": torch.zeros(1000)}, self.path, thread_count=4)


def quantized_directory(path, files):
    """files: {name of a file: {name: tensor}}; with an index."""
    path.mkdir()
    weight_map = {}
    for file, tensors in files.items():
        save_file(tensors, path / file)
        weight_map |= dict.fromkeys(tensors, file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class Quantized(TestCase):
    def setUp(self):
        super().setUp()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
        self.scale = torch.rand(3, 2, generator=generator) + 0.5
        rows, columns = torch.arange(300) // 128, torch.arange(200) // 128
        self.expected = torch.empty(300, 200)
        for i in range(300):  # one element after the other, by the rule
            for j in range(200):
                self.expected[i, j] = self.weight[i, j].float() * self.scale[rows[i], columns[j]]

    def test_R9_15_arguments(self):
        parameters = inspect.signature(QuantizedHuggingFaceStorageReader).parameters
        self.assertEqual(
            {name: parameter.default for name, parameter in parameters.items() if name != "path"},
            {"thread_count": 1, "target_dtype": torch.float32, "block_size": 128},
        )

    def test_R9_16_block_scales(self):
        plain = numbered(3)
        quantized_directory(
            self.path,
            {"a.safetensors": {"x.weight": self.weight, "y": plain}, "b.safetensors": {"x.weight_scale_inv": self.scale}},
        )
        for elems in (4 << 20, 1000, 7):
            with mock.patch("libdcp.torch.quantized_hf_storage.PIECE_ELEMS", elems):
                state = load(
                    {"x.weight": torch.zeros(300, 200), "y": torch.zeros(3)}, self.path, reader=QuantizedHuggingFaceStorageReader
                )
            self.assertStateEqual(state, {"x.weight": self.expected, "y": plain})
        self.assertStateEqual(pool.run(load_quantized_slice, self.path, world=2)[0], self.expected[100:250, 50:200].clone())

    def test_R9_16_target_dtype(self):
        quantized_directory(self.path, {"a.safetensors": {"x.weight": self.weight, "x.weight_scale_inv": self.scale}})
        state = load(
            {"x.weight": torch.zeros(300, 200, dtype=torch.bfloat16)},
            self.path,
            reader=QuantizedHuggingFaceStorageReader,
            target_dtype=torch.bfloat16,
        )
        self.assertStateEqual(state, {"x.weight": self.expected.bfloat16()})

    def test_R9_16_what_is_missing(self):
        self.path.mkdir()
        save_file({"x.weight": self.weight}, self.path / "a.safetensors")
        with raises_together(self, "plan") as caught:
            load({"x.weight": torch.zeros(300, 200)}, self.path, reader=QuantizedHuggingFaceStorageReader)
        self.assertIsInstance(caught.failures[0][0], FileNotFoundError)
        other = self.root / "other"
        quantized_directory(other, {"a.safetensors": {"x.weight": self.weight, "x.weight_scale_inv": self.scale}})
        (other / "a.safetensors").unlink()
        save_file({"x.weight": self.weight, "z": numbered(2)}, other / "a.safetensors")
        with raises_together(self) as caught:
            load({"x.weight": torch.zeros(300, 200)}, other, reader=QuantizedHuggingFaceStorageReader)
        self.assertIsInstance(caught.failures[0][0], (ValueError, RuntimeError))
        self.assertIn("x.weight_scale_inv", str(caught.failures[0][0]))

    @needs(QuantizedHuggingFaceStorageReader, "_dequantize_tensor_mxfp4")
    def test_R9_17_four_bit_floats(self):
        generator = torch.Generator().manual_seed(4)
        blocks = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 134, (2, 3, 5), dtype=torch.uint8, generator=generator)
        quantized_directory(self.path, {"a.safetensors": {"w_blocks": blocks, "w_scales": scales}})
        positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        values = positive + [-value for value in positive]
        values[8] = -0.0
        expected = torch.empty(2, 3, 40)
        for a, b, group, byte in torch.cartesian_prod(*map(torch.arange, blocks.shape)).tolist():
            code, power = int(blocks[a, b, group, byte]), 2.0 ** (int(scales[a, b, group]) - 127)
            expected[a, b, group * 8 + byte * 2] = values[code & 15] * power
            expected[a, b, group * 8 + byte * 2 + 1] = values[code >> 4] * power
        reader = QuantizedHuggingFaceStorageReader(self.path)
        self.assertEqual(reader.read_metadata().state_dict_metadata["w_blocks"].size, torch.Size([2, 3, 40]))
        for elems in (4 << 20, 9):
            with mock.patch("libdcp.torch.quantized_hf_storage.PIECE_ELEMS", elems):
                state = load({"w_blocks": torch.zeros(2, 3, 40)}, self.path, reader=QuantizedHuggingFaceStorageReader)
            self.assertStateEqual(state, {"w_blocks": expected})
        self.assertStateEqual(pool.run(load_packed_slice, self.path, world=2)[0], expected[:, :, 11:30].clone())


def load_box(path, name, shape, starts, sizes):
    """A box of a tensor by the quantized reader."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    part = torch.zeros(sizes)

    class Slice(torch.Tensor):
        def __create_chunk_list__(self):
            return [ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))]

        def __get_tensor_shard__(self, index):
            return part

    target = torch.empty(shape).as_subclass(Slice)
    dcp.load({name: target}, storage_reader=QuantizedHuggingFaceStorageReader(path), no_dist=True)
    return part


def load_quantized_slice(ranks, path):
    return load_box(path, "x.weight", (300, 200), (100, 50), (150, 150))


def load_packed_slice(ranks, path):
    return load_box(path, "w_blocks", (2, 3, 40), (0, 0, 11), (2, 3, 19))


class Consolidation(TestCase):
    def test_R9_18_all_shardings(self):
        expected = dense_state()
        for world in (2, 4):
            shards, whole = self.root / f"shards{world}", self.root / f"whole{world}"
            pool.run(save_sharded, shards, {}, world=world)
            mapping = {name: 1 + i % 2 for i, name in enumerate(expected)}
            consolidate_safetensors_files(shards, whole, mapping, num_threads=2)
            self.assertEqual(files_of(whole), [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)] + [INDEX])
            found = {}
            for number in (1, 2):
                file = whole / f"model-0000{number}-of-00002.safetensors"
                self.assertEqual(header(file)["__metadata__"]["format"], "pt")
                with safe_open(file, framework="pt") as opened:
                    found |= {name: opened.get_tensor(name) for name in opened.keys()}
            self.assertStateEqual(dict(sorted(found.items())), dict(sorted(expected.items())))
            index = json.loads((whole / INDEX).read_text())
            self.assertEqual(index["metadata"]["total_size"], sum(t.nbytes for t in expected.values()))
            self.assertEqual(
                index["weight_map"], {name: f"model-0000{number}-of-00002.safetensors" for name, number in mapping.items()}
            )

    def test_R9_18_every_dtype(self):
        state = every_dtype(3, 4) | {f"scalar_{name}": t for name, t in every_dtype().items() if name != "float4_e2m1fn_x2"}
        save(state, self.path, save_distributed=True)
        whole = self.root / "whole"
        consolidate_safetensors_files(self.path, whole, dict.fromkeys(state, 1))
        self.assertEqual(files_of(whole), ["model-00001-of-00001.safetensors", INDEX])
        for name, tensor in load(empty_like(state), whole).items():
            self.assertEqual(tensor_bytes(tensor), tensor_bytes(state[name]), name)

    def test_R9_18_shards_of_pytorch(self):
        writer = torch_dcp.HuggingFaceStorageWriter(str(self.path), save_distributed=True)
        torch_dcp.save({"a": numbered(3, 2), "b": numbered(4)}, storage_writer=writer, no_dist=True)
        whole = self.root / "whole"
        consolidate_safetensors_files(str(self.path), str(whole), {"a": 1})
        self.assertEqual(list(json.loads((whole / INDEX).read_text())["weight_map"]), ["a"])
        self.assertStateEqual(load({"a": torch.zeros(3, 2)}, whole), {"a": numbered(3, 2)})

    def test_R9_19_on_every_rank(self):
        expected = dense_state()
        for world in (2, 4):
            shards, whole = self.root / f"shards{world}", self.root / f"whole{world}"
            pool.run(save_sharded, shards, {}, world=world)
            mapping = {name: 1 + i % 3 for i, name in enumerate(expected)}
            files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX]
            found = pool.run(consolidate_together, shards, whole, mapping, world=world)
            self.assertEqual(found, [files] * world)
            self.assertStateEqual(load({n: torch.zeros_like(t) for n, t in expected.items()}, whole), expected)

    def test_R9_20_files_without_sharding_info(self):
        self.path.mkdir()
        save_file({"a": numbered(2)}, self.path / "model.safetensors")
        with self.assertRaises(ValueError) as caught:
            consolidate_safetensors_files(self.path, self.root / "whole", {"a": 1})
        self.assertIn("No DCP custom metadata found in safetensors file", str(caught.exception))

    def test_a_lost_shard_is_noticed(self):
        pool.run(save_sharded, self.path, {}, world=4)
        os.remove(self.path / "shard-00004-model-00001-of-00001.safetensors")
        names = json.loads(header(self.path / "shard-00001-model-00001-of-00001.safetensors")["__metadata__"]["libdcp"])["tensors"]
        with self.assertRaises((RuntimeError, ValueError)):
            consolidate_safetensors_files(self.path, self.root / "whole", dict.fromkeys(names, 1))
        self.assertEqual(files_of(self.root / "whole"), [])


if __name__ == "__main__":
    unittest.main()
