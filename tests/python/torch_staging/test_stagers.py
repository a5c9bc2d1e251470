"""R7: stagers by themselves."""

import gc
import importlib
import io
import subprocess
import sys
import threading
import unittest
from collections import OrderedDict
from concurrent.futures import Future
from unittest import mock

import torch
from torch.distributed._state_dict_utils import CompanionMismatch

from common import IN_BACKGROUND, PLAIN, DefaultStager, FileSystemWriter, StagingOptions, StateDictStager, loaded, new_stager
from libdcp.torch import staging
from libdcp.torch.staging import AsyncStager, BlockingAsyncStager
from support import TestCase, needs, numbered


class Holder:
    """An object of the program that has a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.name = "holder"


class Weight(torch.nn.Parameter):
    pass


class Protocol(TestCase):
    def test_R7_5_checked_by_shape(self):
        class Minimal:
            _synchronize_after_execute = True
            should_synchronize_after_execute = True

            def stage(self, state_dict):
                return state_dict

            def synchronize_staging(self):
                pass

            def close(self):
                pass

        class Incomplete:
            stage = synchronize_staging = Minimal.stage

        self.assertIsInstance(Minimal(), AsyncStager)
        self.assertNotIsInstance(Incomplete(), AsyncStager)
        for stager in (new_stager(), BlockingAsyncStager(), FileSystemWriter(self.path)):
            self.assertIsInstance(stager, AsyncStager)

    @needs(AsyncStager, "close")
    def test_R7_6_defaults(self):
        class Empty(AsyncStager):
            pass

        stager = Empty()
        self.assertIs(stager.should_synchronize_after_execute, True)
        with self.assertRaisesRegex(NotImplementedError, "Empty must implement stage method"):
            stager.stage({})
        self.assertIsNone(stager.synchronize_staging())
        self.assertIsNone(stager.close())
        with self.assertRaisesRegex(NotImplementedError, "Holder must implement stage method"):
            AsyncStager.stage(Holder(None), {})
        self.assertIsNone(AsyncStager.synchronize_staging(Holder(None)))

    def test_R7_12_R7_28_of_the_blocking_one(self):
        stager = BlockingAsyncStager()
        self.assertIs(stager.should_synchronize_after_execute, False)
        self.assertIsNone(stager.synchronize_staging())
        self.assertIsNone(stager.close())

    @unittest.skipUnless(hasattr(AsyncStager, "close"), "since PyTorch 2.9")
    def test_R7_28_deprecated(self):
        class Empty(AsyncStager):
            pass

        with self.assertWarnsRegex(FutureWarning, "`synchronize_staging` is deprecated"):
            Empty().synchronize_staging()

    def test_R7_20_options(self):
        options = StagingOptions()
        values = [options.use_pinned_memory, options.use_shared_memory, options.use_async_staging, options.use_non_blocking_copy]
        self.assertEqual(values, [True] * 4)

    def test_R7_22_without_an_accelerator(self):
        with self.assertRaisesRegex(AssertionError, "Non-blocking copy requires"):
            DefaultStager(StagingOptions(False, False, False, True))
        with self.assertWarnsRegex(UserWarning, "Ignoring pin_memory flag"):
            stager = DefaultStager(StagingOptions(True, False, False, False))
        self.assertEqual(stager.stage({"w": torch.ones(8)})["w"].tolist(), [1.0] * 8)
        with self.assertWarnsRegex(UserWarning, "Ignoring pin_memory flag"):
            self.assertIs(StateDictStager(pin_memory=True, share_memory=True, pin_memory_min_bytes=5).pin_memory, False)


class Streams(TestCase):
    """With a stand-in for an accelerator's streams: there is no accelerator here, but the order of the calls shows."""

    def test_R7_23_R7_24_copies_wait_for_the_callers_stream(self):
        calls = []

        class Stream:
            def __init__(self, name="own"):
                self.name = name

            def record_event(self):
                calls.append((self.name, "record", threading.current_thread()))
                return "event"

            def wait_event(self, event):
                calls.append((self.name, "wait", event))

            def synchronize(self):
                calls.append((self.name, "synchronize", None))

            def __enter__(self):
                calls.append((self.name, "enter", None))

            def __exit__(self, *exception):
                calls.append((self.name, "exit", None))

        accelerator = mock.Mock(is_available=lambda: True, current_stream=lambda: Stream("caller's"))
        with mock.patch.object(torch, "accelerator", accelerator), mock.patch.object(torch, "Stream", Stream):
            stager = new_stager((False, False, True, True))
            self.assertEqual(stager.stage({"w": torch.ones(2)}).result()["w"].tolist(), [1.0, 1.0])
            stager.close()
            with self.subTest("beyond the cap"):
                seen, calls[:] = list(calls), []
                new_stager((False, False, False, False), cap_bytes=1).stage({"w": torch.ones(2)})
                self.assertEqual(calls, [("caller's", "synchronize", None)])
                calls[:] = seen
        here = threading.current_thread()
        self.assertEqual(calls, [("caller's", "record", here), ("own", "wait", "event"), ("own", "enter", None),
                                 ("own", "exit", None), ("own", "synchronize", None)])  # fmt: skip


class Blocking(TestCase):
    def test_R7_8_a_copy_on_the_cpu(self):
        state = {"a": numbered(3, 4), "nested": {"list": [numbered(4), 7, "text"]}}
        staged = BlockingAsyncStager(cache_staged_state_dict=False, type_check=False).stage(state)
        self.assertEqual(staged["a"].device.type, "cpu")
        expected = {"a": numbered(3, 4), "nested": {"list": [numbered(4), 7, "text"]}}
        state["a"].add_(100)
        state["nested"]["list"][0].add_(100)
        state["nested"]["list"].append(8)
        self.assertStateEqual(staged, expected)

    def test_R7_9_R7_11_the_same_memory_again(self):
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        state = {"w": torch.ones(8)}
        first = stager.stage(state)["w"]
        self.assertFalse(first.is_pinned())
        state["w"].fill_(3.0)
        second = stager.stage(state)["w"]
        self.assertEqual(first.data_ptr(), second.data_ptr())
        self.assertEqual(second.tolist(), [3.0] * 8)

    def test_R7_10_another_structure_is_refused(self):
        stager = BlockingAsyncStager(cache_staged_state_dict=True)
        kept = stager.stage({"w": torch.ones(8), "l": [torch.ones(2), 1]})
        for other, error in (
            ({"w": torch.full((1,), 5.0), "l": [torch.ones(2), 1]}, ValueError),
            ({"w": torch.full((8,), 5.0, dtype=torch.float64), "l": [torch.ones(2), 1]}, ValueError),
            ({"w": torch.full((8,), 5.0)}, CompanionMismatch),
            ({"w": torch.full((8,), 5.0), "l": [torch.ones(2)]}, CompanionMismatch),
            ({"v": torch.full((8,), 5.0), "l": [torch.ones(2), 1]}, CompanionMismatch),
            # What does not fit comes last, after tensors that would.
            ({"w": torch.full((8,), 5.0), "l": [torch.ones(3), 1]}, ValueError),
        ):
            with self.assertRaises(error):
                stager.stage(other)
            self.assertEqual(kept["w"].tolist(), [1.0] * 8)

    def test_R7_13_the_writer_is_one(self):
        writer = FileSystemWriter(self.path, per_thread_copy_ahead=1024)
        state = {"w": numbered(8)}
        staged = writer.stage(state)
        self.assertEqual(writer.per_thread_copy_ahead, 0)
        state["w"].add_(1)
        self.assertEqual(staged["w"].tolist(), numbered(8).tolist())

    def test_type_check_as_asked_for(self):
        state = {"w": torch.ones(1), "object": Holder(1)}
        for cache in (False, True):
            with self.assertRaisesRegex(ValueError, "Unexpected value type"):
                BlockingAsyncStager(cache, type_check=True).stage(state)
            self.assertIsNot(BlockingAsyncStager(cache, type_check=False).stage(state)["object"], state["object"])


class Default(TestCase):
    def test_R7_21_a_future_exactly_if_asked_for(self):
        for is_async in (False, True):
            stager = DefaultStager(StagingOptions(False, False, is_async, False))
            staged = stager.stage({"w": numbered(8)})
            self.assertIs(isinstance(staged, Future), is_async)
            stager.synchronize_staging()
            staged = staged.result(0) if is_async else staged
            self.assertEqual(staged["w"].tolist(), numbered(8).tolist())
            stager.close()

    def test_R7_25_sharing_strides_and_offsets(self):
        buffer = numbered(20)
        state = {"a": buffer[2:12], "b": buffer[10:], "t": buffer[:6].view(2, 3).t(), "h": Holder(buffer[:3])}
        staged = new_stager().stage(state)
        self.assertStateEqual({name: staged[name] for name in "abt"}, {name: state[name].clone() for name in "abt"})
        self.assertEqual(staged["t"].stride(), state["t"].stride())
        self.assertEqual(staged["b"].storage_offset(), 10)
        # One storage: what is written through one view is seen through the others, and not in the source.
        buffer_of = {t.untyped_storage().data_ptr() for t in (staged["a"], staged["b"], staged["t"], staged["h"].tensor)}
        self.assertEqual(len(buffer_of), 1)
        staged["a"][8] = -1.0
        self.assertEqual((staged["b"][0].item(), buffer[10].item()), (-1.0, 10.0))
        self.assertEqual((type(staged["h"]), staged["h"].name), (Holder, "holder"))

    def test_R7_25_attributes_and_containers(self):
        weight = Weight(numbered(3))
        weight.note = ["kept", numbered(2)]
        state = OrderedDict(w=weight, set={1, 2}, buffer=io.BytesIO(b"bytes"), tuple=(numbered(2), None))
        staged = new_stager().stage(state)
        self.assertIs(type(staged), OrderedDict)
        weight.note[1].add_(1)
        state["buffer"].write(b"other")
        self.assertEqual((staged["w"].note[0], staged["w"].note[1].tolist()), ("kept", [0.0, 1.0]))
        self.assertEqual((staged["set"], staged["buffer"].getvalue()), ({1, 2}, b"bytes"))
        self.assertEqual(staged["tuple"][0].tolist(), [0.0, 1.0])

    def test_what_tensors_say_beside_their_storage(self):
        z = torch.tensor([1 + 2j, 3 - 4j])
        sparse = torch.eye(3).to_sparse()
        state = {"conj": z.conj(), "neg": z.conj().imag, "sparse": sparse, "scalar": torch.tensor(7), "empty": torch.empty(0, 3)}
        for options in (PLAIN, (False, True, False, False)):
            staged = new_stager(options).stage(state)
            self.assertStateEqual(staged["conj"], torch.tensor([1 - 2j, 3 + 4j]))
            self.assertEqual(staged["neg"].tolist(), [-2.0, 4.0])
            self.assertEqual(staged["sparse"].to_dense().tolist(), torch.eye(3).tolist())
            self.assertEqual((staged["scalar"].item(), staged["empty"].shape), (7, (0, 3)))
            self.assertIsNot(staged["scalar"], state["scalar"])

    def test_R7_26_memory_is_kept_by_source_and_goes_with_it(self):
        stager = StateDictStager(pin_memory=False, share_memory=False, pin_memory_min_bytes=5)
        state = {"a": torch.ones(1000), "b": torch.ones(1000)}
        first = stager.stage(state)
        places = {name: value.data_ptr() for name, value in first.items()}
        for value in range(20):
            state["a"].fill_(value)
            staged = stager.stage(state)
            self.assertEqual({name: value.data_ptr() for name, value in staged.items()}, places)
            self.assertEqual(staged["a"][0].item(), value)
        self.assertEqual(len(stager._cached_storage_mapping), 2)
        del state["b"], first, staged
        gc.collect()
        self.assertEqual(len(stager._cached_storage_mapping), 1)

    def test_a_storage_that_has_grown(self):
        state = {"w": torch.ones(4)}
        stager = StateDictStager()
        stager.stage(state)
        state["w"].resize_(8).fill_(2)
        self.assertEqual(stager.stage(state)["w"].tolist(), [2.0] * 8)

    def test_R7_27_close(self):
        for options in (PLAIN, IN_BACKGROUND, (False, True, True, False)):
            stager = new_stager(options)
            stager.stage({"w": torch.ones(3)})
            stager.close()
            stager.close()
            for error in (RuntimeError, AssertionError):
                with self.assertRaisesRegex(error, "closed"):
                    stager.stage({"w": torch.ones(3)})
        stager = StateDictStager()
        stager.close()
        with self.assertRaisesRegex(RuntimeError, "closed"):
            stager.stage({"w": torch.ones(3)})

    def test_usable_after_a_failure(self):
        class Stubborn:
            def __deepcopy__(self, memo):
                raise ValueError("not me")

        for options in (PLAIN, IN_BACKGROUND):
            stager = new_stager(options)
            with self.assertRaisesRegex(ValueError, "not me"):
                staged = stager.stage({"w": torch.ones(2), "x": Stubborn()})
                staged.result()
            staged = stager.stage({"w": torch.ones(2)})
            self.assertEqual((staged.result() if options is IN_BACKGROUND else staged)["w"].tolist(), [1.0, 1.0])
            stager.close()


FEW_DESCRIPTORS = """
import os, resource, sys, warnings
import torch
import libdcp.torch as dcp
from libdcp.torch.staging import DefaultStager, StagingOptions
from libdcp.torch._state_dict_utils import _create_cpu_state_dict
warnings.simplefilter("ignore")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
state = {str(i): torch.full((5,), float(i)) for i in range(3000)}
state["scalar"], state["empty"] = torch.tensor(3), torch.empty(0, 4)
stager = DefaultStager(StagingOptions(False, True, False, False))
for step in range(2):
    dcp.async_save(state, checkpoint_id=f"{sys.argv[1]}/{step}", async_stager=stager).result()
staged = stager.stage(state)
print(all(staged[str(i)].is_shared() and staged[str(i)][4] == i for i in range(3000)), len(os.listdir("/proc/self/fd")) < 40)
made = _create_cpu_state_dict(state, share_memory=True)
print(all(made[str(i)].is_shared() for i in range(3000)), len(os.listdir("/proc/self/fd")) < 40)
"""


class SharedMemory(TestCase):
    @needs(staging, "DefaultStager")
    def test_3000_tensors_and_64_descriptors(self):
        done = subprocess.run([sys.executable, "-c", FEW_DESCRIPTORS, self.root], capture_output=True, text=True, timeout=200)
        self.assertEqual((done.stdout.split(), done.stderr, done.returncode), (["True"] * 4, "", 0))
        state = loaded(self.root / "1", **{"2999": torch.zeros(5), "scalar": torch.tensor(0)})
        self.assertEqual((state["2999"].tolist(), state["scalar"].item()), ([2999.0] * 5, 3))


class Names(TestCase):
    @needs(staging, "DefaultStager")
    def test_R11_15_the_names_that_the_vendor_verifies(self):
        for module, names in {
            "": "save save_state_dict load_state_dict FileSystemReader FileSystemWriter AsyncStager BlockingAsyncStager"
            " DefaultSavePlanner DefaultLoadPlanner StorageReader StorageWriter LoadPlanner SavePlanner LoadPlan SavePlan ReadItem"
            " WriteItem async_save",
            ".stateful": "Stateful",
            ".state_dict": "StateDictOptions get_model_state_dict get_optimizer_state_dict get_state_dict set_model_state_dict"
            " set_optimizer_state_dict set_state_dict",
            ".format_utils": "BroadcastingTorchSaveReader DynamicMetaLoadPlanner",
            ".staging": "DefaultStager StagingOptions AsyncStager BlockingAsyncStager _ReplicationStager",
            "._state_dict_stager": "StateDictStager",
            ".state_dict_saver": "async_save AsyncCheckpointerType AsyncSaveResponse",
            "._async_executor": "_AsyncCheckpointExecutor",
            "._async_thread_executor": "_ThreadBasedAsyncCheckpointExecutor",
            "._async_process_executor": "_ProcessBasedAsyncCheckpointExecutor",
            "._state_dict_utils": "_create_cpu_state_dict _offload_state_dict_to_cpu _gather_state_dict CompanionMismatch"
            " _check_state_dict_similarity _copy_state_dict _broadcast_state_dict _flatten_state_dict _unflatten_state_dict"
            " _distribute_state_dict",
        }.items():
            found = importlib.import_module("libdcp.torch" + module)
            for name in names.split():
                self.assertTrue(hasattr(found, name), f"libdcp.torch{module}.{name}")
        self.assertTrue(hasattr(importlib.import_module("libdcp.torch.planner").WriteItem, "tensor_storage_size"))


if __name__ == "__main__":
    unittest.main()
