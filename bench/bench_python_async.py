#!/usr/bin/env python3
"""What a program notices of saves in the background, with libdcp.torch and with PyTorch: rows of docs/benchmarks.md.

    PYTHONPATH=build/python bench_python_async.py DIRECTORY [stall|memory|busy]... [--mib 1536]

stall   how long async_save keeps the caller, beside a copy of the same memory by two threads in the same run
memory  resident memory and descriptors over 50 saves of 64 MiB with one stager
busy    how long a step of a thread that works in Python takes while a save is under way
"""

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings

import torch
import torch.distributed.checkpoint as theirs

import libdcp.torch as ours
from libdcp.torch.staging import DefaultStager, StagingOptions

warnings.filterwarnings("ignore")
PLAIN = (False, False, False, False)


def state_of(mib):
    """24 large and 200 small tensors, their memory touched."""
    state = {f"layers.{i}.attention.weight": torch.rand((mib << 20) // 25 // 4) for i in range(24)}
    state.update({f"layers.{i}.norm.weight": torch.rand((mib << 20) // 25 // 200 // 4) for i in range(200)})
    return state


def copy_by_two_threads(state, into):
    """The least that a snapshot costs: each thread copies one half of the bytes."""
    pairs = [(into[name].data_ptr(), tensor.data_ptr(), tensor.nbytes) for name, tensor in state.items()]

    def copy(half):
        for target, source, size in pairs:
            middle = size // 2
            start, length = (0, middle) if half == 0 else (middle, size - middle)
            ctypes.memmove(target + start, source + start, length)

    start = time.perf_counter()
    other = threading.Thread(target=copy, args=(1,))
    other.start()
    copy(0)
    other.join()
    return time.perf_counter() - start


def stalled(async_save, state, directory, **options):
    """Seconds that one async_save takes in the caller; waits for its end afterwards."""
    path = tempfile.mkdtemp(dir=directory)
    start = time.perf_counter()
    future = async_save(state, checkpoint_id=path, **options)
    seconds = time.perf_counter() - start
    future.result()
    shutil.rmtree(path)
    return seconds


def bench_stall(directory, mib):
    state = state_of(mib)
    warm = {name: torch.zeros_like(tensor).fill_(1) for name, tensor in state.items()}
    stager, their_stager = DefaultStager(StagingOptions(*PLAIN)), theirs.staging.DefaultStager(StagingOptions(*PLAIN))
    stalled(ours.async_save, state, directory, async_stager=stager)
    stalled(theirs.async_save, state, directory, async_stager=their_stager)
    figures = {"copy": [], "warm": [], "warm, PyTorch": [], "first": [], "first, PyTorch": []}
    for _ in range(5):
        figures["copy"].append(copy_by_two_threads(state, warm))
        figures["warm"].append(stalled(ours.async_save, state, directory, async_stager=stager))
        figures["warm, PyTorch"].append(stalled(theirs.async_save, state, directory, async_stager=their_stager))
        figures["first"].append(stalled(ours.async_save, state, directory))
        figures["first, PyTorch"].append(stalled(theirs.async_save, state, directory))
    for what, seconds in figures.items():
        print(f"| stall, {mib} MiB, {what} | {statistics.median(seconds):.3f} s | {min(seconds):.3f} to {max(seconds):.3f} |")
    for one, other in (("warm", "copy"), ("first", "first, PyTorch")):
        ratios = [a / b for a, b in zip(figures[one], figures[other])]
        print(f"| {one} / {other} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")


def resident_mib():
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def bench_memory(directory, _):
    state = state_of(64)
    for what, stager in (("one stager", DefaultStager(StagingOptions(*PLAIN))), ("a stager for each", None)):
        resident, descriptors = [], []
        for _ in range(50):
            stalled(ours.async_save, state, directory, async_stager=stager)
            gc.collect()
            resident.append(resident_mib())
            descriptors.append(len(os.listdir("/proc/self/fd")))
        print(f"| 50 saves of 64 MiB, {what}: resident memory, first, second, last | {resident[0]:.1f}, {resident[1]:.1f},"
              f" {resident[-1]:.1f} MiB | largest from the second on {max(resident[1:]):.1f}, least {min(resident[1:]):.1f} |")  # fmt: skip
        print(f"| the same: descriptors | {descriptors[1]} to {descriptors[-1]} | |")


def step():
    """Some 2 ms of work that never gives the interpreter lock away by itself."""
    total = 0
    for i in range(30000):
        total += i * i
    return total


def steps_during(future):
    """Seconds of each step while the future is not done, or of 300 without one."""
    seconds = []
    while not future.done() if future is not None else len(seconds) < 300:
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def bench_busy(directory, mib):
    state = state_of(mib)
    for what, async_save in (("libdcp", ours.async_save), ("PyTorch", theirs.async_save)):
        ratios = []
        for _ in range(5):
            alone = statistics.mean(steps_during(None))
            path = tempfile.mkdtemp(dir=directory)
            during = steps_during(async_save(state, checkpoint_id=path))
            shutil.rmtree(path)
            ratios.append(statistics.mean(during) / statistics.mean([alone, statistics.mean(steps_during(None))]))
        print(f"| step of a busy thread during a save of {mib} MiB, {what} | {statistics.median(ratios):.2f} x | {min(ratios):.2f} to"
              f" {max(ratios):.2f} |")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("what", nargs="*", default=["stall", "memory", "busy"])
    parser.add_argument("--mib", type=int, default=1536)
    arguments = parser.parse_args()
    for what in arguments.what:
        {"stall": bench_stall, "memory": bench_memory, "busy": bench_busy}[what](arguments.directory, arguments.mib)


if __name__ == "__main__":
    main()
