"""R10: file systems of programs and of fsspec, a server, and stream transforms."""

import asyncio
import contextlib
import importlib.util
import inspect
import io
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import time
import unittest
import uuid
import warnings
import zlib
from unittest import mock

import fsspec
import torch
import torch.distributed.checkpoint as torch_dcp
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension, ZStandard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as Split
from torch.distributed.tensor import distribute_tensor

import libdcp.torch as dcp
import pool
from libdcp.torch import _remote, _streams, filesystem
from libdcp.torch._fsspec_filesystem import FsspecReader, FsspecWriter
from libdcp.torch.filesystem import FileSystemBase
from support import TestCase, failures_of, files_of, needs, numbered, raises_together, zeros_like


def some_state():
    return {
        "model": {"w": numbered(40, 30), "b": numbered(7, dtype=torch.bfloat16), "scalar": torch.tensor(3.5)},
        "t": numbered(4, 6).t(),
        "step": 17,
        "names": ["a", "b"],
        "none": torch.zeros(0, 3),
    }


def sharded_state(ranks, zeros=False):
    mesh = DeviceMesh("cpu", torch.arange(ranks.size))
    whole = numbered(10, 3)
    return {"rows": distribute_tensor(torch.zeros_like(whole) if zeros else whole, mesh, [Split(0)]), "step": 0 if zeros else 5}


class Flipped(StreamTransformExtension):
    """Inverts all bits; says what it was asked to do."""

    @staticmethod
    def registry_name():
        return "test.flipped@here"

    @staticmethod
    def from_descriptor(version):
        if version != "3":
            raise ValueError(f"Unknown extension version={version!r}")
        return Flipped()

    def get_descriptor(self):
        return "test.flipped@here/3"

    def transform_to(self, output):
        class Writer(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                output.write(bytes(255 - byte for byte in bytes(data)))
                return len(data)

        return Writer()

    def transform_from(self, input):
        class Reader(io.RawIOBase):
            def readable(self):
                return True

            def readinto(self, memory):
                data = input.read(min(len(memory), 1000))  # a short read
                memory[: len(data)] = bytes(255 - byte for byte in data)
                return len(data)

        return Reader()


class Deflated(StreamTransformExtension):
    """zlib; keeps data back until it is closed."""

    @staticmethod
    def registry_name():
        return "test.deflated"

    @staticmethod
    def from_descriptor(version):
        return Deflated()

    def get_descriptor(self):
        return "test.deflated/1"

    def transform_to(self, output):
        packer = zlib.compressobj()

        class Writer(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                output.write(packer.compress(bytes(data)))
                return len(data)

            def close(self):
                if not self.closed:
                    output.write(packer.flush())
                super().close()

        return Writer()

    def transform_from(self, input):
        return io.BytesIO(zlib.decompress(input.read()))


def registry():
    found = ExtensionRegistry()
    found.register(Flipped)
    found.register(Deflated)
    return found


class Store(FileSystemBase):
    """An object store in memory, without anything that is not in the interface. It returns short reads, takes short writes, and its
    objects appear when their streams are closed."""

    renames_at_once = False

    def __init__(self):
        self.objects = {}
        self.events = []

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        path = str(path)
        if "r" in mode:
            if path not in self.objects:
                raise FileNotFoundError(path)
            yield _ShortReads(self.objects[path])
            return
        stream = _ShortWrites()
        yield stream
        self.objects[path] = stream.getvalue()
        self.events.append(("put", path.rsplit("/")[-1]))

    def concat_path(self, path, suffix):
        return f"{path}/{suffix}"

    def init_path(self, path):
        return str(path)

    def rename(self, path, new_path):
        raise AssertionError("there is no renaming")

    def mkdir(self, path):
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

    def exists(self, path):
        return str(path) in self.objects

    def rm_file(self, path):
        del self.objects[str(path)]
        self.events.append(("remove", str(path).rsplit("/")[-1]))


class _ShortReads(io.BytesIO):
    def read(self, size=-1):
        return super().read(min(size, 100) if size > 0 else 100)


class _ShortWrites(io.BytesIO):
    def write(self, data):
        return super().write(memoryview(data)[:1000])

    def fileno(self):
        raise io.UnsupportedOperation


class Slow(AsyncFileSystem):
    """Local files over a slow line. Counts how many reads are under way at the same time."""

    protocol = "slow"
    under_way = most = 0

    async def _info(self, path, **options):
        return {"name": path, "size": os.stat(path).st_size, "type": "file"}

    async def _cat_file(self, path, start=None, end=None, **options):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02)
        self.under_way -= 1
        return pathlib.Path(path).read_bytes()[start:end]

    def _open(self, path, mode="rb", **options):
        return open(path, mode)


def writer_on(store, path="bucket/run", **options):
    writer = dcp.FileSystemWriter(path, **options)
    writer.fs = store
    writer.path = store.init_path(path)
    return writer


def reader_on(store, path="bucket/run"):
    reader = dcp.FileSystemReader(path)
    reader.fs = store
    reader.path = store.init_path(path)
    return reader


def memory_path():
    return f"memory://{uuid.uuid4().hex}"


def save_and_load_on_ranks(ranks, url, options):
    """A sharded state to a place that all ranks see, twice."""
    for _ in range(2):
        dcp.save(sharded_state(ranks), storage_writer=FsspecWriter(url, **options), process_group=ranks.group)
    state = sharded_state(ranks, zeros=True)
    dcp.load(state, storage_reader=FsspecReader(url, **options), process_group=ranks.group)
    expected = sharded_state(ranks)
    return torch.equal(state["rows"].to_local(), expected["rows"].to_local()), state["step"]


def fail_on_rank_1(ranks, url):
    class Failing(dcp.DefaultSavePlanner):
        def resolve_data(self, write_item):
            raise OSError("no more")

    planner = Failing() if ranks.rank == 1 else None
    return failures_of(
        lambda: dcp.save(sharded_state(ranks), storage_writer=FsspecWriter(url), planner=planner, process_group=ranks.group)
    )


class FileSystems(TestCase):
    def check(self, url, **options):
        state = some_state()
        dcp.save(state, storage_writer=FsspecWriter(url, **options), no_dist=True)
        target = zeros_like(state)
        dcp.load(target, storage_reader=FsspecReader(url), no_dist=True)
        self.assertStateEqual(target, state)

    def test_R10_1_interface(self):
        for files_of_rank in (True, False):
            store = Store()
            state = some_state()
            dcp.save(
                state,
                storage_writer=writer_on(store, thread_count=3, single_file_per_rank=files_of_rank),
                no_dist=True,
            )
            target = zeros_like(state)
            dcp.load(target, storage_reader=reader_on(store), no_dist=True)
            self.assertStateEqual(target, state)

    def test_R10_2_options(self):
        parameters = inspect.signature(FsspecWriter).parameters
        self.assertEqual(list(parameters), list(inspect.signature(_remote._original.FsspecWriter).parameters))
        defaults = {"single_file_per_rank": True, "sync_files": True, "thread_count": 1, "per_thread_copy_ahead": 10_000_000, "overwrite": True}
        self.assertEqual({name: parameters[name].default for name in defaults}, defaults)
        self.assertEqual(list(inspect.signature(FsspecReader).parameters), ["path", "kwargs"])
        self.check(memory_path())
        self.check(memory_path(), thread_count=2, single_file_per_rank=False)
        self.check(f"file://{self.path}")
        place = _remote._original if hasattr(_remote._original, "url_to_fs") else fsspec.core  # 2.15 imports it where it is called
        with mock.patch.object(_remote, "url_to_fs", wraps=_remote.url_to_fs):
            with mock.patch.object(place, "url_to_fs", wraps=_remote.url_to_fs) as opened:
                writer = FsspecWriter(memory_path(), skip_instance_cache=True)
                writer.reset(memory_path())
        self.assertEqual([call.kwargs for call in opened.call_args_list], [{"skip_instance_cache": True}] * 3)

    def test_R10_2_pytorch_reads_it_and_is_read(self):
        url = f"file://{self.path}"
        state = some_state()
        dcp.save(state, storage_writer=FsspecWriter(url), no_dist=True)
        target = zeros_like(state)
        torch_dcp.load(target, storage_reader=torch_dcp._fsspec_filesystem.FsspecReader(url), no_dist=True)
        self.assertStateEqual(target, state)
        other = f"file://{self.root / 'other'}"
        torch_dcp.save(state, storage_writer=torch_dcp._fsspec_filesystem.FsspecWriter(other), no_dist=True)
        target = zeros_like(state)
        dcp.load(target, storage_reader=FsspecReader(other), no_dist=True)
        self.assertStateEqual(target, state)
        target = zeros_like(state)
        dcp.load(target, checkpoint_id=self.path, no_dist=True)  # and the C library what came through the streams
        self.assertStateEqual(target, state)

    def test_R10_2_several_ranks(self):
        url = f"file://{self.path}"
        self.assertEqual(pool.run(save_and_load_on_ranks, url, {}), [(True, 5)] * 4)
        self.assertEqual(len(files_of(self.path)), 5)  # of the second save alone, and the metadata
        for found in pool.run(fail_on_rank_1, url):
            self.assertEqual(found, ("write", {1: ("OSError", "no more")}))
        self.assertEqual(len(files_of(self.path)), 5)

    def test_R1_25_by_id(self):
        url = memory_path()
        state = some_state()
        dcp.save(state, checkpoint_id=url, no_dist=True)
        target = zeros_like(state)
        dcp.load(target, checkpoint_id=url, no_dist=True)
        self.assertStateEqual(target, state)

    def test_R10_3_ids(self):
        for kind in (FsspecWriter, FsspecReader):
            valid = kind.validate_checkpoint_id
            self.assertTrue(valid("memory://x"))
            self.assertTrue(valid("file:///tmp/x"))
            self.assertFalse(valid(pathlib.Path("/tmp/x")))
            self.assertFalse(valid("nothing-known://x"))
            with mock.patch.object(_remote, "url_to_fs", side_effect=ImportError("Install gcsfs")):
                self.assertFalse(valid("gs://x"))

    def test_R10_4_partial_files_are_removed(self):
        fs = _remote.FileSystem()
        for url in (memory_path(), f"file://{self.path}"):
            path = fs.init_path(url)
            fs.mkdir(path)
            for mode in ("wb", "ab"):
                with self.assertRaisesRegex(KeyError, "inside"):
                    with fs.create_stream(fs.concat_path(path, mode), mode) as stream:
                        stream.write(b"half")
                        raise KeyError("inside")
                self.assertFalse(fs.exists(fs.concat_path(path, mode)), (url, mode))
            with fs.create_stream(fs.concat_path(path, "kept"), "wb") as stream:
                stream.write(b"whole")
            with self.assertRaises(KeyError):
                with fs.create_stream(fs.concat_path(path, "kept"), "rb"):
                    raise KeyError
            self.assertTrue(fs.exists(fs.concat_path(path, "kept")))

    def test_R10_5_paths(self):
        url = memory_path()
        self.assertIs(type(FsspecWriter(url).path), str)
        self.assertEqual(FsspecWriter(url).path, url)
        self.assertIsInstance(dcp.FileSystemWriter(str(self.path)).path, pathlib.Path)

    def test_R10_6_sync_without_a_file(self):
        with warnings.catch_warnings(record=True) as caught, mock.patch("os.sync") as sync_all:
            warnings.simplefilter("always")
            self.check(memory_path(), thread_count=2, single_file_per_rank=False)
        told = [str(warning.message) for warning in caught if "fsync not supported for this stream" in str(warning.message)]
        self.assertEqual(len(told), 1)
        sync_all.assert_not_called()
        with warnings.catch_warnings(record=True) as caught, mock.patch("os.fsync", wraps=os.fsync) as sync:
            warnings.simplefilter("always")
            self.check(f"file://{self.path}")
        self.assertEqual(sync.call_count, 2)  # data and metadata
        self.assertFalse([warning for warning in caught if "fsync" in str(warning.message)])
        with mock.patch("os.fsync") as sync:
            self.check(memory_path(), sync_files=False)
        sync.assert_not_called()

    def test_R10_7_metadata_comes_last_under_its_name(self):
        store = Store()
        dcp.save(some_state(), storage_writer=writer_on(store), no_dist=True)
        self.assertEqual(store.events, [("put", "__0_0.distcp"), ("put", ".metadata")])
        store.events.clear()
        second = some_state() | {"step": 18}
        dcp.save(second, storage_writer=writer_on(store), no_dist=True)
        [(_, new)] = [event for event in store.events if event[0] == "put" and event[1].endswith(".distcp")]
        self.assertNotEqual(new, "__0_0.distcp")
        self.assertEqual(store.events, [("put", new), ("put", ".metadata"), ("remove", "__0_0.distcp")])
        target = zeros_like(second)
        dcp.load(target, storage_reader=reader_on(store), no_dist=True)
        self.assertStateEqual(target, second)

    def test_R10_7_a_failing_save_leaves_the_old_one(self):
        store = Store()
        dcp.save(some_state(), storage_writer=writer_on(store), no_dist=True)
        before = dict(store.objects)
        for where in ("_write_record", "_metadata_bytes", "_write_whole"):
            with mock.patch.object(_streams, where, side_effect=OSError("gone")):
                with raises_together(self, "write"):
                    dcp.save(some_state(), storage_writer=writer_on(store), no_dist=True)
            self.assertEqual(store.objects, before, where)

    def test_stores_with_renaming_of_their_own(self):
        local, memory = _remote.FileSystem(), _remote.FileSystem()
        local.init_path(f"file://{self.path}")
        memory.init_path(memory_path())
        self.assertTrue(local.renames_at_once)
        self.assertFalse(memory.renames_at_once)

    def test_existing_checkpoints(self):
        url = memory_path()
        dcp.save({"a": numbered(2)}, storage_writer=FsspecWriter(url), no_dist=True)
        with raises_together(self, "plan") as caught:
            dcp.save({"a": numbered(2)}, storage_writer=FsspecWriter(url, overwrite=False), no_dist=True)
        self.assertIn("Checkpoint already exists", str(caught.failures[0][0]))

    def test_nothing_in_metadata_is_executed(self):
        class Hostile:
            def __reduce__(self):
                return os.mkdir, (str(marker),)

        marker = self.root / "executed"
        store = Store()
        dcp.save({"a": numbered(2)}, storage_writer=writer_on(store), no_dist=True)
        store.objects["bucket/run/.metadata"] = pickle.dumps(Hostile())
        with raises_together(self, "plan"):
            dcp.load({"a": torch.zeros(2)}, storage_reader=reader_on(store), no_dist=True)
        self.assertFalse(marker.exists())

    def test_damaged_files_are_named(self):
        store = Store()
        dcp.save({"a": numbered(100)}, storage_writer=writer_on(store), no_dist=True)
        name = "bucket/run/__0_0.distcp"
        store.objects[name] = store.objects[name][:-10]
        with raises_together(self, "read") as caught:
            dcp.load({"a": torch.zeros(100)}, storage_reader=reader_on(store), no_dist=True)
        self.assertIsInstance(caught.failures[0][0], EOFError)
        self.assertIn("__0_0.distcp", str(caught.failures[0][0]))
        del store.objects[name]
        with raises_together(self, "read") as caught:
            dcp.load({"a": torch.zeros(100)}, storage_reader=reader_on(store), no_dist=True)
        self.assertIsInstance(caught.failures[0][0], FileNotFoundError)

    def test_streams_that_are_closed_too_early(self):
        class Closing(Store):
            @contextlib.contextmanager
            def create_stream(self, path, mode):
                with super().create_stream(path, mode) as stream:
                    if "r" in mode and path.endswith(".distcp"):
                        stream.close()
                    yield stream

        store = Closing()
        dcp.save({"a": numbered(2)}, storage_writer=writer_on(store), no_dist=True)
        with raises_together(self, "read") as caught:
            dcp.load({"a": torch.zeros(2)}, storage_reader=reader_on(store), no_dist=True)
        self.assertIn("closed", str(caught.failures[0][0]))

    def test_108_ranges_ascend_and_neighbours_are_read_together(self):
        state = {f"t{i:02}": numbered(300, start=i) for i in range(40)}
        url = memory_path()
        dcp.save(state, storage_writer=FsspecWriter(url), no_dist=True)
        calls = []
        original = MemoryFileSystem.cat_ranges

        def counted(fs, paths, starts, ends, **options):
            calls.append(list(zip(paths, starts, ends)))
            return original(fs, paths, starts, ends, **options)

        target = {name: torch.zeros(300) for name in reversed(state)}
        with mock.patch.object(MemoryFileSystem, "cat_ranges", counted):
            dcp.load(target, storage_reader=FsspecReader(url), no_dist=True)
        self.assertStateEqual(dict(sorted(target.items())), state)
        self.assertEqual([len(ranges) for ranges in calls], [1])
        with mock.patch.object(_streams, "BATCH_BYTES", 8000), mock.patch.object(MemoryFileSystem, "cat_ranges", counted):
            calls.clear()
            dcp.load(target, storage_reader=FsspecReader(url), no_dist=True)
        self.assertGreater(len(calls), 5)
        self.assertEqual(sorted(calls), calls)

    @needs(filesystem, "SerializationFormat")
    def test_R9_21_safetensors_records(self):
        store = Store()
        state = some_state() | {"flags": numbered(5) > 2}
        for extensions in ((), [ZStandard()]):
            writer = writer_on(store, serialization_format=filesystem.SerializationFormat.SAFETENSORS, _extensions=extensions)
            dcp.save(state, storage_writer=writer, no_dist=True)
            target = zeros_like(state)
            dcp.load(target, storage_reader=reader_on(store), no_dist=True)
            self.assertStateEqual(target, state)
        url = f"file://{self.path}"
        dcp.save(state, storage_writer=FsspecWriter(url, serialization_format=filesystem.SerializationFormat.SAFETENSORS), no_dist=True)
        target = zeros_like(state)
        dcp.load(target, checkpoint_id=self.path, no_dist=True)  # in C
        self.assertStateEqual(target, state)

    def test_109_ranges_of_asynchronous_stores_are_fetched_at_once(self):
        state = {f"t{i:02}": numbered(50, start=i) for i in range(40)}
        options = {"skip_instance_cache": True}
        dcp.save(state, storage_writer=FsspecWriter(f"file://{self.path}", single_file_per_rank=False), no_dist=True)
        fsspec.register_implementation("slow", Slow, clobber=True)
        reader = FsspecReader(f"slow://{self.path}", **options)
        target = {name: torch.zeros(50) for name in state}
        dcp.load(target, storage_reader=reader, no_dist=True)
        self.assertStateEqual(target, state)
        self.assertGreater(reader.fs.fs.most, 10)

    def test_R6_16_rank_local(self):
        url = memory_path()
        dcp.save({"a": numbered(2)}, storage_writer=FsspecWriter(url), no_dist=True, use_collectives=False)
        names = sorted(name.rsplit("/")[-1] for name in fsspec.filesystem("memory").ls(url, detail=False))
        self.assertEqual(names, ["__0.metadata", "__0_0.distcp"])
        state = {"a": torch.zeros(2)}
        dcp.load(state, storage_reader=FsspecReader(url), no_dist=True)
        self.assertStateEqual(state, {"a": numbered(2)})


class Transforms(TestCase):
    def check(self, *extensions, expected):
        state = some_state()
        writer = dcp.FileSystemWriter(self.path, _extensions=list(extensions))
        dcp.save(state, storage_writer=writer, no_dist=True)
        reader = dcp.FileSystemReader(self.path, _extension_registry=registry())
        for info in reader.read_metadata().storage_data.values():
            self.assertEqual(list(getattr(info, "transform_descriptors", None) or []), expected)
        target = zeros_like(state)
        dcp.load(target, storage_reader=dcp.FileSystemReader(self.path, _extension_registry=registry()), no_dist=True)
        self.assertStateEqual(target, state)
        return state

    def test_R10_8_R10_9_two_transforms(self):
        state = self.check(Deflated(), Flipped(), expected=["test.flipped@here/3", "test.deflated/1"])
        # Undone by hand: what was applied last is undone first. Offset and length are those of the stored bytes.
        metadata = dcp.FileSystemReader(self.path).read_metadata()
        for index, info in metadata.storage_data.items():
            data = (self.path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
            record = zlib.decompress(bytes(255 - byte for byte in data))
            if index.fqn == "model.w":
                self.assertTrue(torch.equal(torch.load(io.BytesIO(record)), state["model"]["w"]))
            elif index.fqn == "step":
                self.assertEqual(torch.load(io.BytesIO(record)), 17)

    def test_R10_9_no_field_without_transforms(self):
        store = Store()
        dcp.save({"a": numbered(2)}, storage_writer=writer_on(store), no_dist=True)
        for info in pickle.loads(store.objects["bucket/run/.metadata"]).storage_data.values():
            self.assertNotIn("transform_descriptors", vars(info))

    def test_R10_8_pytorch_undoes_ours(self):
        state = self.check(Deflated(), Flipped(), expected=["test.flipped@here/3", "test.deflated/1"])
        target = zeros_like(state)
        reader = torch_dcp.FileSystemReader(self.path, _extension_registry=registry())
        torch_dcp.load(target, storage_reader=reader, no_dist=True)
        self.assertStateEqual(target, state)

    def test_R10_11_unknown_names_and_versions(self):
        for descriptor, text in (("nope/1", "Unknown extension name="), ("stream.zstd/2", "Unknown extension version="),
                                 ("stream.zstd", "Unknown extension version=")):  # fmt: skip
            with self.assertRaisesRegex(ValueError, text):
                ExtensionRegistry().from_descriptor_list([descriptor])
        self.check(Flipped(), expected=["test.flipped@here/3"])
        with raises_together(self, "read") as caught:
            dcp.load(zeros_like(some_state()), storage_reader=dcp.FileSystemReader(self.path), no_dist=True)
        self.assertIn("test.flipped@here/3", str(caught.failures[0][0]))

    def test_R10_10_R10_12_zstd(self):
        self.assertEqual((ZStandard().get_descriptor(), ZStandard.registry_name()), ("stream.zstd/1", "stream.zstd"))
        self.assertTrue(ZStandard.is_available())
        state = some_state()
        for write, read in (
            (dcp.FileSystemWriter, torch_dcp.FileSystemReader),
            (torch_dcp.FileSystemWriter, dcp.FileSystemReader),
        ):
            path = self.root / write.__module__
            dcp.save(state, storage_writer=write(path, _extensions=[ZStandard()]), no_dist=True)
            target = zeros_like(state)
            dcp.load(target, storage_reader=read(path), no_dist=True)
            self.assertStateEqual(target, state)

    def test_R10_12_read_without_a_python_module(self):
        state = some_state()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(self.path, _extensions=[ZStandard()]), no_dist=True)
        with mock.patch.multiple("torch.distributed.checkpoint._extension", zstandard=None, pyzstd=None):
            self.assertFalse(ZStandard.is_available())
            target = zeros_like(state)
            dcp.load(target, storage_reader=dcp.FileSystemReader(self.path), no_dist=True)
            with self.assertRaises(ValueError):
                ZStandard()
        self.assertStateEqual(target, state)

    def test_R10_12_zstd_through_streams(self):
        url = f"file://{self.path}"
        state = some_state()
        dcp.save(state, storage_writer=FsspecWriter(url, _extensions=[ZStandard()]), no_dist=True)
        for reader in (FsspecReader(url), dcp.FileSystemReader(self.path), torch_dcp.FileSystemReader(self.path)):
            target = zeros_like(state)
            dcp.load(target, storage_reader=reader, no_dist=True)
            self.assertStateEqual(target, state)

    def test_R10_13_own_transforms_can_be_registered(self):
        self.check(Flipped(), expected=["test.flipped@here/3"])

    def test_R10_14_closing_flushes_and_leaves_the_file_open(self):
        stream = io.BytesIO()
        output = _streams._KeepOpen(stream)
        output.write(b"abc")
        output.close()
        self.assertFalse(stream.closed)
        output = _streams._KeepOpen(stream)
        output.write(b"def")
        output.close()
        self.assertEqual(stream.getvalue(), b"abcdef")

    def test_overwriting_with_transforms_keeps_the_old_checkpoint_until_then(self):
        self.check(Flipped(), expected=["test.flipped@here/3"])
        before = files_of(self.path)
        self.check(Flipped(), expected=["test.flipped@here/3"])
        after = files_of(self.path)
        self.assertEqual(len(after), len(before))
        self.assertNotEqual(after, before)


class Server(TestCase):
    """A server of its own on the loopback interface, spoken to by s3fs."""

    @classmethod
    def setUpClass(cls):
        for module in ("s3fs", "moto"):
            if importlib.util.find_spec(module) is None:
                raise unittest.SkipTest(f"there is no {module}; scripts/interop-env.sh installs it")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cls.addClassCleanup(server.wait)
        cls.addClassCleanup(server.kill)
        cls.wait_for(port)
        cls.options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
        fsspec.filesystem("s3", **cls.options).mkdir("bucket")

    @staticmethod
    def wait_for(port, seconds=60):
        end = time.monotonic() + seconds
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def test_save_and_load(self):
        url = f"s3://bucket/{uuid.uuid4().hex}"
        state = some_state()
        for step in (17, 18):
            state["step"] = step
            dcp.save(state, storage_writer=FsspecWriter(url, thread_count=2, **self.options), no_dist=True)
        target = zeros_like(state)
        dcp.load(target, storage_reader=FsspecReader(url, **self.options), no_dist=True)
        self.assertStateEqual(target, state)
        fs = fsspec.filesystem("s3", **self.options)
        fs.invalidate_cache()
        self.assertEqual(len(fs.ls(url, detail=False)), 3)  # two files of data and the metadata

    def test_several_ranks(self):
        url = f"s3://bucket/{uuid.uuid4().hex}"
        self.assertEqual(pool.run(save_and_load_on_ranks, url, self.options), [(True, 5)] * 4)


if __name__ == "__main__":
    unittest.main()
