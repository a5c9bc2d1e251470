"""Tensors on devices: saves and loads hand their addresses to the C library, which copies them in parts. Run on look-alikes of CUDA
and AscendCL (on_device.py)."""

import contextlib
import filecmp
import unittest
from unittest import mock

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import libdcp.torch as dcp
from libdcp import _core
from libdcp.torch import _devices
from libdcp.torch.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from on_device import LIBRARIES, OnDevice
from support import TestCase, raises_together

MIB = 1 << 20
SAVE_ID = "00000000-0000-4000-8000-000000000000"
CUDA = LIBRARIES["cuda"]
ILLEGAL_ADDRESS = 700


def figure(name):
    """A number of /proc/self/status, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name + ":"))


def host_state():
    """Whole storages, views, ties, what has no elements or no dense ones."""
    w = torch.arange(3 << 18, dtype=torch.float32)
    return {
        "w": w,
        "tied": w.view(-1),
        "rows": w.view(1024, 768)[100:200],
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 8),
        "half": torch.arange(70_000).to(torch.bfloat16),
        "list": [torch.arange(5), 7, "text"],
    }


def mapped(function, tree):
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (dict, list)):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found = {key: mapped(function, value) for key, value in pairs}
        return found if isinstance(tree, dict) else list(found.values())
    return tree


class Placed(OnDevice):
    """A local part that says where it lies in a larger tensor."""

    def __create_chunk_list__(self):
        return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]

    def __get_tensor_shard__(self, index):
        return self


class Devices(TestCase):
    def setUp(self):
        super().setUp()
        OnDevice.copied_bytes = OnDevice.filled_bytes = 0
        for library in LIBRARIES.values():
            library.calls.fake_reset()

    def on_device(self, library, state):
        """The same state on the device; tensors that share storage go on sharing it."""
        storages = {}

        def put(tensor):
            key = tensor.untyped_storage().data_ptr() or id(tensor)
            if key not in storages:
                storages[key] = library.put(tensor)
                self.addCleanup(library.calls.fake_free, storages[key].untyped_storage().data_ptr())
            return library.view(storages[key].untyped_storage(), tensor)

        return mapped(put, state)

    def using(self, library, handles=None):
        patch, waited = library.streams(handles)
        patch.start()
        self.addCleanup(patch.stop)
        return waited

    def save(self, state, name, **options):
        planner = options.pop("planner", None)
        writer = dcp.FileSystemWriter(self.root / name, **options)
        writer.save_id = SAVE_ID
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
        return self.root / name

    def assert_same_files(self, one, other):
        match, mismatch, errors = filecmp.cmpfiles(one, other, [path.name for path in one.glob("*.distcp")], shallow=False)
        self.assertTrue(match)
        self.assertEqual((mismatch, errors), ([], []))

    # ---- saves ----

    def test_R1_26_the_files_are_those_of_a_save_from_the_host(self):
        forms = [{}, {"per_thread_copy_ahead": 0}, {"single_file_per_rank": False}, {"thread_count": 3}]
        for library in LIBRARIES.values():
            self.using(library)
            for number, form in enumerate(forms):
                with self.subTest(library.kind, **form):
                    state = host_state()
                    host = self.save(state, f"{library.kind}-{number}-host", **form)
                    device = self.save(self.on_device(library, state), f"{library.kind}-{number}-device", **form)
                    self.assert_same_files(host, device)
                    self.assertEqual(OnDevice.copied_bytes, 0)
                    self.assertGreater(library.count(library.to_host), 0)

    def test_R1_26_no_more_is_copied_ahead_than_asked_for(self):
        state = self.on_device(CUDA, {"w": torch.ones(32 * MIB, dtype=torch.uint8)})
        self.using(CUDA)
        for ahead in (0, 4):
            CUDA.calls.fake_reset()
            CUDA.calls.fake_delay_us(25_000)  # each part; progress is told every 20 ms
            found = []

            def note(written, total):
                found.append(CUDA.count(CUDA.to_host) * MIB - written)

            writer = dcp.FileSystemWriter(self.root / str(ahead), per_thread_copy_ahead=ahead * MIB)
            dcp.save(state, storage_writer=writer, no_dist=True, progress=note)
            self.assertGreater(len(found), 10)
            self.assertLessEqual(max(found), (ahead + 2) * MIB)
            self.assertGreaterEqual(max(found), ahead * MIB)
            self.assertEqual(CUDA.count(CUDA.to_host), 32)

    def test_R1_26_host_memory_stays_far_below_the_state(self):
        state = self.on_device(CUDA, {f"w{i}": torch.ones(16 * MIB, dtype=torch.uint8) for i in range(8)})
        self.using(CUDA)

        def growth(name):
            before, peak = figure("RssAnon"), [0]

            def note(written, total):
                peak[0] = max(peak[0], figure("RssAnon") - before)

            dcp.save(state, checkpoint_id=self.root / name, no_dist=True, progress=note)
            return peak[0]

        self.assertLess(growth("by the library"), 32 * MIB)
        with self.out_of_reach():
            self.assertGreater(growth("by PyTorch"), 100 * MIB)

    def test_R1_26_a_copy_that_fails_names_tensor_and_code(self):
        state = self.on_device(CUDA, {"first": torch.ones(MIB), "second": torch.ones(8 * MIB)})
        self.using(CUDA)
        CUDA.fail(CUDA.to_host, 9, ILLEGAL_ADDRESS)
        with raises_together(self, "write") as caught:
            dcp.save(state, checkpoint_id=self.path, no_dist=True)
        cause = caught.failures[0][0]
        self.assertIsInstance(cause, _core.DeviceError)
        self.assertEqual(cause.native_code, ILLEGAL_ADDRESS)
        self.assertIn("second", str(cause))
        self.assertFalse((self.path / ".metadata").exists())

    def test_waits_for_the_callers_stream(self):
        state = self.on_device(CUDA, {"w": torch.zeros(MIB, dtype=torch.uint8)})
        stream = CUDA.new_stream()
        self.using(CUDA, {0: stream})
        CUDA.calls.fake_kernel(stream, state["w"].data_ptr(), MIB, 7, 300)
        dcp.save(state, checkpoint_id=self.path, no_dist=True)
        target = {"w": torch.zeros(MIB, dtype=torch.uint8)}
        dcp.load(target, checkpoint_id=self.path, no_dist=True)
        self.assertTrue((target["w"] == 7).all())
        CUDA.calls.fake_kernel(stream, state["w"].data_ptr(), MIB, 8, 300)
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        CUDA.calls.fake_await(stream)
        self.assertTrue((state["w"].seen() == 7).all())  # not the late 8

    def test_of_several_devices_the_streams_are_waited_for(self):
        waited = self.using(CUDA, {0: CUDA.new_stream(0), 1: CUDA.new_stream(1)})
        state = {name: CUDA.put(torch.full((1000,), index), index) for index, name in enumerate("ab")}
        dcp.save(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(sorted(waited), [0, 1])
        target = {name: torch.zeros(1000, dtype=torch.int64) for name in "ab"}
        dcp.load(target, checkpoint_id=self.path, no_dist=True)
        self.assertStateEqual(target, {"a": torch.full((1000,), 0), "b": torch.full((1000,), 1)})

    def test_views_that_are_not_linear_are_copied_one_by_one(self):
        w = torch.arange(12_000.0).view(100, 120)
        state = {"w": w, "t": w.t(), "column": w[:, 3]}
        self.using(CUDA)
        device = self.save(self.on_device(CUDA, state), "device")
        self.assertEqual(OnDevice.copied_bytes, 4 * (12_000 + 100))
        target = mapped(lambda tensor: torch.zeros(tensor.shape), state)
        dcp.load(target, checkpoint_id=device, no_dist=True)
        self.assertStateEqual(target, state)

    def test_shards_are_handed_over(self):
        shard = self.on_device(CUDA, {"w": torch.arange(6000.0).view(60, 100)})["w"]
        self.using(CUDA)
        placed = shard.as_subclass(Placed)
        placed.__dict__.update(shard.__dict__)
        dcp.save({"w": placed}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(OnDevice.copied_bytes, 0)
        target = {"w": torch.zeros(60, 100)}
        dcp.load(target, checkpoint_id=self.path, no_dist=True)
        self.assertTrue(torch.equal(target["w"], shard.seen()))

    def test_hooks_get_the_tensors_themselves(self):
        seen = []

        class Planner(DefaultSavePlanner):
            def resolve_data(self, write_item):
                found = super().resolve_data(write_item)
                seen.append(found)
                return found

        state = host_state()
        self.using(CUDA)
        host = self.save(state, "host", planner=Planner())
        seen.clear()
        device = self.save(self.on_device(CUDA, state), "device", planner=Planner())
        self.assertGreater(sum(isinstance(one, OnDevice) for one in seen), 5)
        self.assertEqual(OnDevice.copied_bytes, 0)
        self.assert_same_files(host, device)

    def test_in_the_background_beyond_the_cap(self):
        if not hasattr(dcp.staging, "DefaultStager"):
            self.skipTest("no DefaultStager before PyTorch 2.9")
        state = self.on_device(CUDA, {"w": torch.arange(float(MIB))})
        self.using(CUDA)
        stager = dcp.staging.DefaultStager(dcp.staging.StagingOptions(False, False, False, False), cap_bytes=MIB)
        upload = dcp.async_save(state, checkpoint_id=self.path, no_dist=True, async_stager=stager)
        state["w"].seen().fill_(-1)  # its last byte has been read
        upload.result()
        self.assertTrue(stager.is_partial)
        self.assertEqual(OnDevice.copied_bytes, 0)
        target = {"w": torch.zeros(MIB)}
        dcp.load(target, checkpoint_id=self.path, no_dist=True)
        self.assertTrue(torch.equal(target["w"], torch.arange(float(MIB))))

    # ---- loads ----

    def test_loads_go_straight_to_the_device(self):
        class Planner(DefaultLoadPlanner):
            def resolve_tensor(self, read_item):
                return super().resolve_tensor(read_item)

        state = host_state()
        path = self.save(state, "saved")
        for library in LIBRARIES.values():
            self.using(library)
            for planner in (None, Planner()):
                with self.subTest(library.kind, planner=planner):
                    target = self.on_device(library, mapped(torch.zeros_like, state))
                    before = target["w"]._version
                    dcp.load(target, checkpoint_id=path, planner=planner, no_dist=True)
                    self.assertEqual(OnDevice.filled_bytes, 0)
                    self.assertStateEqual(mapped(OnDevice.seen, target), state)
                    self.assertGreater(target["w"]._version, before)

    def test_targets_that_are_not_linear_are_filled_by_pytorch(self):
        w = torch.arange(12_000.0).view(100, 120)
        path = self.save({"w": w}, "saved")
        self.using(CUDA)
        target = self.on_device(CUDA, {"w": torch.zeros(120, 100).t()})
        dcp.load(target, checkpoint_id=path, no_dist=True)
        self.assertTrue(torch.equal(target["w"].seen(), w))

    def test_a_load_that_fails_names_tensor_and_code(self):
        path = self.save({"w": torch.ones(8 * MIB)}, "saved")
        target = self.on_device(CUDA, {"w": torch.zeros(8 * MIB)})
        self.using(CUDA)
        CUDA.fail(CUDA.to_device, 2, ILLEGAL_ADDRESS)
        with raises_together(self, "read") as caught:
            dcp.load(target, checkpoint_id=path, no_dist=True)
        cause = caught.failures[0][0]
        self.assertEqual((type(cause), cause.native_code), (_core.DeviceError, ILLEGAL_ADDRESS))
        self.assertIn("w", str(cause))

    # ---- without the vendor's library ----

    @contextlib.contextmanager
    def out_of_reach(self):
        _devices._is_within_reach.cache_clear()
        self.addCleanup(_devices._is_within_reach.cache_clear)
        with (
            mock.patch.object(_core, "open_device", side_effect=_core.UnsupportedError("no library")),
            self.assertLogs(_devices.logger, "WARNING") as logs,
        ):
            yield
        self.assertEqual(len(logs.output), 1)  # for all saves and loads
        _devices._is_within_reach.cache_clear()

    def test_without_the_library_pytorch_copies(self):
        state = host_state()
        on_device = self.on_device(CUDA, state)
        self.using(CUDA)
        with self.out_of_reach():
            path = self.save(on_device, "device")
            target = self.on_device(CUDA, mapped(torch.zeros_like, state))
            dcp.load(target, checkpoint_id=path, no_dist=True)
        self.assertEqual(CUDA.count(CUDA.to_host) + CUDA.count(CUDA.to_device), 0)
        self.assertGreater(OnDevice.copied_bytes, 4 * len(state["w"]))
        self.assertStateEqual(mapped(OnDevice.seen, target), state)


if __name__ == "__main__":
    unittest.main()
