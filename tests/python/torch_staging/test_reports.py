"""Reports of users about saves in the background that other tests of this folder do not cover."""

import ctypes
import itertools
import os
import pathlib
import subprocess
import sys
import time
import unittest
import warnings

import torch
import torch.distributed as dist

import libdcp.torch as dcp
import pool
from common import TIMEOUT_S, loaded, new_stager, upload_of
from libdcp.torch import staging
from libdcp.torch.staging import BlockingAsyncStager
from libdcp.torch.state_dict_saver import AsyncCheckpointerType
from support import TestCase

MIB = 1 << 20
HAS_DEFAULT_STAGER = hasattr(staging, "DefaultStager")  # since PyTorch 2.9

# Most memory that saving and loading need beside the state: strided tensors are the ones that need any.
PEAK = """
import sys, warnings
import torch
import libdcp.torch as dcp
warnings.simplefilter("ignore")

def figure(name):
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))

def growth(work):
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")  # forget the peak so far
    before = figure("VmRSS:")
    work()
    return figure("VmHWM:") - before

class Writer(dcp.FileSystemWriter):
    def write_data(self, plan, planner):
        return super().write_data(plan, planner)

state = {str(i): torch.rand(512, 4096).t() for i in range(32)}
dcp.save({"w": torch.ones(1 << 20).view(512, -1).t()}, checkpoint_id=f"{sys.argv[1]}/warm", no_dist=True)
for name, writer in (("C", dcp.FileSystemWriter), ("hooks", Writer)):
    print(growth(lambda: dcp.save(state, storage_writer=writer(f"{sys.argv[1]}/{name}"), no_dist=True)))
target = {name: torch.ones(512, 4096).t() for name in state}
print(growth(lambda: dcp.load(target, checkpoint_id=f"{sys.argv[1]}/C", no_dist=True)))
print(all(torch.equal(target[name], tensor) for name, tensor in state.items()))
"""


def train(ranks, path):
    """Two steps with a save after each, and one more; the files that there are."""
    weight = torch.ones(MIB)
    for step in range(2):
        weight += ranks.rank + 1
        futures = dcp.async_save({f"of {ranks.rank}": weight}, checkpoint_id=f"{path}/{step}", process_group=ranks.group)
        futures.result(TIMEOUT_S)
    total = weight[:1].clone()
    dist.all_reduce(total, group=ranks.group)
    return total.item(), sorted(name for name in os.listdir(f"{path}/1") if not name.startswith("."))


class Reports(TestCase):
    def test_U23_U40_peak_memory(self):
        done = subprocess.run([sys.executable, "-c", PEAK, self.root], capture_output=True, text=True, timeout=200)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        *peaks, is_equal = done.stdout.split()
        self.assertEqual((len(peaks), is_equal), (3, "True"))
        for peak in map(int, peaks):
            self.assertLess(peak, 64 * MIB)  # of 256 MiB; an item has 8

    def test_U26_written_while_another_thread_holds_the_interpreter(self):
        upload = dcp.async_save({"w": torch.ones(32 * MIB)}, checkpoint_id=self.path, no_dist=True, max_bytes_per_second=32 * MIB)
        while upload.progress().written_bytes == 0:
            time.sleep(0.001)
        before = upload.progress().written_bytes
        ctypes.PyDLL(None).usleep(500_000)  # without giving the lock away
        self.assertGreater(upload.progress().written_bytes - before, 4 * MIB)
        self.assertTrue(upload.cancel())
        self.assertIsNotNone(upload.exception(TIMEOUT_S))

    def test_U29_a_run_in_every_mode(self):
        stagers = [lambda: BlockingAsyncStager(True), lambda: None]
        if HAS_DEFAULT_STAGER:
            options = itertools.product((False, True), (False, True), (False, True), (False,))
            stagers += [lambda o=o: new_stager(o) for o in options]
        for number, (make, kind) in enumerate(itertools.product(stagers, AsyncCheckpointerType)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that nothing can be pinned here
                stager = make()
            model = torch.nn.Linear(600, 600)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            expected, uploads = {}, []
            for step in range(1, 21):
                optimizer.zero_grad()
                model(torch.ones(2, 600)).sum().backward()
                optimizer.step()
                if step % 10 == 0:
                    state = {"model": model.state_dict(), "step": torch.tensor(step)}
                    expected[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                    place = self.root / str(number) / str(step)
                    saved = dcp.async_save(state, checkpoint_id=place, no_dist=True, async_stager=stager, async_checkpointer_type=kind)
                    if saved is not upload_of(saved):
                        saved.staging_completion.result(TIMEOUT_S)  # the next step changes the weights
                    uploads.append(upload_of(saved))
            for upload in uploads:
                upload.result(TIMEOUT_S)
            for step, weights in expected.items():
                target = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
                found = loaded(self.root / str(number) / str(step), model=target, step=torch.tensor(0))
                self.assertStateEqual(found["model"], weights)
                self.assertEqual(found["step"].item(), step)
            if stager is not None:
                stager.close()

    def test_U120_every_process_writes_its_part_and_the_training_goes_on(self):
        for total, names in pool.run(train, str(self.path), world=2):
            self.assertEqual((total, names), (3.0 + 5.0, ["__0_0.distcp", "__1_0.distcp"]))


class DeviceCheck(TestCase):
    def test_the_rows_for_devices_as_far_as_the_host_goes(self):
        script = pathlib.Path(__file__).parents[1] / "device_check.py"
        done = subprocess.run([sys.executable, script, "cpu", "1"], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        results = [line.split(" | ")[1] for line in done.stdout.splitlines()]
        self.assertEqual(results.count("only with a device"), 5)
        self.assertEqual(results.count("well") + results.count("only since PyTorch 2.9"), 5)
        for kind in ("cuda", "npu"):
            if not torch.cuda.is_available():
                absent = subprocess.run([sys.executable, script, kind], capture_output=True, text=True, timeout=100)
                self.assertEqual((absent.returncode, absent.stdout), (77, ""))


if __name__ == "__main__":
    unittest.main()
