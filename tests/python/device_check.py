"""Rows of scripts/device-check.sh that concern libdcp.torch: run on a real device, and on the host by the tests, where the rows that
need a device say so.

    device_check.py npu|cuda|cpu [MIB]

Exits with 0 if all rows are well, 1 if not, 77 if there is no such device.
"""

import filecmp
import pathlib
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed.checkpoint as theirs

import libdcp.torch as dcp
from libdcp.torch import _memory, _pin, staging
from libdcp.torch._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

warnings.simplefilter("ignore")


class NotHere(Exception):
    """The row says nothing here; why."""


def anonymous_bytes():
    """Of this process's memory in RAM."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


class Check:
    def __init__(self, kind, mib, root):
        self.kind, self.root = kind, pathlib.Path(root)
        self.module = getattr(torch, kind, None)
        self.device = torch.device(kind) if kind == "cpu" else torch.device(kind, 0)
        self.n = mib << 18  # elements of 4 bytes
        self.wrong = 0

    def run(self):
        for name in [name for name in dir(self) if name.startswith("row_")]:
            method = getattr(self, name)
            try:
                detail, result = method() or "", "well"
            except NotHere as reason:
                detail, result = "", f"only {reason}"
            except Exception as error:  # whatever a driver that nobody has seen before raises
                traceback.print_exc()
                detail, result = f"{type(error).__name__}: {error}", "WRONG"
                self.wrong += 1
            print(f"| libdcp.torch: {method.__doc__} | {result} | {detail} |", flush=True)

    # ---- what rows need ----

    def state(self):
        w = torch.arange(self.n, dtype=torch.float32)
        state = {"w": w, "t": w[:1200].view(30, 40).t(), "scalar": torch.tensor(3), "empty": torch.empty(0, 8), "flag": w[:7] > 2}
        return {name: tensor.to(self.device) for name, tensor in state.items()}, state

    def need_device(self):
        if self.kind == "cpu":
            raise NotHere("with a device")

    @staticmethod
    def new_stager(*options, **more):
        if not hasattr(staging, "DefaultStager"):
            raise NotHere("since PyTorch 2.9")
        return staging.DefaultStager(staging.StagingOptions(*options), **more)

    def synchronise(self):
        if self.kind != "cpu":
            self.module.synchronize()

    @staticmethod
    def same(found, expected):
        for name, tensor in expected.items():
            if not torch.equal(found[name].cpu(), tensor.cpu()):
                raise AssertionError(f"{name} differs")

    def loaded(self, path, device="cpu"):
        _, expected = self.state()
        target = {name: torch.zeros_like(tensor).to(device) for name, tensor in expected.items()}
        dcp.load(target, checkpoint_id=path, no_dist=True)
        self.same(target, expected)

    # ---- rows ----

    def row_R1_26(self):
        """R1.26, R11.6: the files are those of a save from the host, for any copy-ahead"""
        on_device, on_host = self.state()
        for name, state, ahead in (("host", on_host, 0), ("none", on_device, 0), ("some", on_device, 10_000_000)):
            writer = dcp.FileSystemWriter(self.root / name, per_thread_copy_ahead=ahead)
            dcp.save(state, storage_writer=writer, no_dist=True)
        for name in ("none", "some"):
            if not filecmp.cmp(self.root / "host" / "__0_0.distcp", self.root / name / "__0_0.distcp", shallow=False):
                raise AssertionError(f"{name} differs")

    def row_R1_26_memory(self):
        """R1.26: the host has little of a state on the device while it is saved"""
        self.need_device()
        state = {f"w{i}": torch.ones(self.n // 8, device=self.device) for i in range(8)}
        dcp.save(state, checkpoint_id=self.root / "warm", no_dist=True)
        before, peak = anonymous_bytes(), [0]

        def note(written, total):
            peak[0] = max(peak[0], anonymous_bytes() - before)

        dcp.save(state, checkpoint_id=self.root / "measured", no_dist=True, progress=note)
        if peak[0] > self.n * 4 // 2:
            raise AssertionError(f"{peak[0]} bytes of {self.n * 4}")
        return f"{peak[0] >> 20} of {self.n >> 18} MiB"

    def row_R11_7(self):
        """R11.7: saved from the device, loaded to it and to the host, by libdcp and by PyTorch"""
        state, expected = self.state()
        dcp.save(state, checkpoint_id=self.root / "ours", no_dist=True)
        self.loaded(self.root / "ours")
        self.loaded(self.root / "ours", self.device)
        target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        theirs.load(target, checkpoint_id=self.root / "ours", no_dist=True)
        self.same(target, expected)

    def row_R7_24(self):
        """R7.23, R7.24: stagers of every kind wait for the work that the stream has been given"""
        for number in range(16):
            options = [bool(number >> bit & 1) for bit in range(4)]
            if options[3] and self.kind == "cpu":
                continue  # what does not block needs a device
            stager = self.new_stager(*options)
            for step in range(2):
                state, _ = self.state()
                work = torch.rand(2048, 2048, device=self.device)
                state["w"].zero_()
                for _ in range(20 if self.kind == "cpu" else 400):
                    work = (work @ work).clamp_(0, 1)
                state["w"].copy_(torch.arange(self.n, dtype=torch.float32, device=self.device) + 0 * work[0, 0])
                result = dcp.async_save(state, checkpoint_id=self.root / f"{number}-{step}", no_dist=True, async_stager=stager)
                if hasattr(result, "staging_completion"):
                    result.staging_completion.result()
                state["w"].fill_(-1)
                getattr(result, "upload_completion", result).result()
                self.loaded(self.root / f"{number}-{step}")
            stager.close()

    def row_cap(self):
        """a state larger than the stager's cap"""
        state, _ = self.state()
        stager = self.new_stager(False, False, False, False, cap_bytes=self.n)
        dcp.async_save(state, checkpoint_id=self.root / "cap", no_dist=True, async_stager=stager).result()
        if not stager.is_partial:
            raise AssertionError("all of it was staged")
        self.loaded(self.root / "cap")

    def row_R8_5(self):
        """R8.4, R8.5: host states that are pinned, shared, and both"""
        self.need_device()
        for pin, share in ((True, False), (False, True), (True, True)):
            state, expected = self.state()
            host = _create_cpu_state_dict(state, pin_memory=pin, share_memory=share)
            self.same(_copy_state_dict(state, host), expected)
            if host["w"].is_shared() != share or (pin and not share and not host["w"].is_pinned()):
                raise AssertionError(f"pin={pin}, share={share}: {host['w'].is_pinned()}, {host['w'].is_shared()}")

    def row_R8_11(self):
        """R8.11: copies that do not block are complete after the stream, others at once"""
        state, expected = self.state()
        for is_non_blocking in (False, True):
            host = _create_cpu_state_dict(state, pin_memory=self.kind != "cpu", share_memory=False)
            _copy_state_dict(state, host, non_blocking=is_non_blocking)
            if is_non_blocking:
                self.synchronise()
            self.same(host, expected)

    def row_R8_40(self):
        """R8.40: memory that is registered already is used and left to its owner"""
        self.need_device()
        storage = _memory.shared(3 * 65536)
        first = _pin.register(storage)
        second = _pin.register(storage)
        if (first, second) != (True, False):
            raise AssertionError(f"ours: {first}, {second}")

    def row_R8_43(self):
        """R8.43: a refused registration is not held against the next kernel"""
        self.need_device()
        storage = _memory.shared(3 * 65536)
        _pin.register(storage)
        if int(_pin.runtime().cudaHostRegister(storage.data_ptr() + 65536, 4 * 65536, 1)) == 0:
            raise AssertionError("an overlap was not refused")
        _pin._forget_cuda_error()
        if float(torch.ones(8, device=self.device).sum()) != 8:
            raise AssertionError("a wrong sum")

    def row_R8_44(self):
        """R8.44: a copy into registered memory returns before it is done, one into ordinary memory may not"""
        self.need_device()
        source = torch.ones(self.n, device=self.device)
        seconds = {}
        for name, storage in (("ordinary", _memory.ordinary(4 * self.n)), ("registered", _memory.shared(4 * self.n))):
            if name == "registered":
                _pin.register(storage)
            target = torch.empty(0).set_(storage, 0, (self.n,))
            for _ in range(2):  # the first one also touches the memory
                self.synchronise()
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                returned = time.perf_counter() - start
                self.synchronise()
                seconds[name] = returned, time.perf_counter() - start
            if not torch.equal(target, torch.ones(self.n)):
                raise AssertionError(f"{name}: wrong values")
        return ", ".join(f"{name} {returned:.4f} s of {whole:.4f} s" for name, (returned, whole) in seconds.items())


def main(kind, mib="64"):
    if kind == "npu":
        try:
            import torch_npu  # noqa: F401  which makes torch.npu
        except ImportError:
            print("skipped: this Python has no torch_npu", file=sys.stderr)
            return 77
        from libdcp.torch import npu

        npu.patch_cudart()
    if kind != "cpu" and not getattr(torch, kind).is_available():
        print(f"skipped: PyTorch {torch.__version__} finds no {kind} device", file=sys.stderr)
        return 77
    with tempfile.TemporaryDirectory(prefix="dcp-device-") as root:
        check = Check(kind, int(mib), root)
        check.run()
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
