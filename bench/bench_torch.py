#!/usr/bin/env python3
"""The same saves and loads by PyTorch, for comparison: rows of the table that scripts/bench.sh puts together.

    bench_torch.py DIRECTORY [MIB [RUNS [SMALL_TENSORS]]]

Small tensors of 1 KiB take so long that fewer than 100,000 are measured (2,000 unless given) and the time is scaled.
"""

import shutil
import statistics
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.filterwarnings("ignore")


def mixed(total):
    """24 large and 2,000 small tensors, as bench.c makes them."""
    small = total // 32 // 2000 // 64 * 64
    large = (total - small * 2000) // 24 // 64 * 64
    state = {f"model.layers.{i}.norm.weight": torch.rand(small // 4) for i in range(2000)}
    state.update({f"model.layers.{i}.attention.weight": torch.rand(large // 4) for i in range(24)})
    return state, small * 2000 + large * 24


def small(n):
    return {f"model.layers.{i}.bias.weight": torch.rand(256) for i in range(n)}


def measure(state, directory, runs):
    saves, loads = [], []
    for _ in range(runs):
        path = tempfile.mkdtemp(dir=directory, prefix="dcp-bench-")
        start = time.perf_counter()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False), no_dist=True)
        saved = time.perf_counter()
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        loads.append(time.perf_counter() - saved)
        saves.append(saved - start)
        shutil.rmtree(path)
    return saves, loads


def row_rate(what, seconds, size):
    gib = size / 2**30
    print(f"| {what} | {gib / statistics.median(seconds):.2f} GiB/s | {gib / max(seconds):.2f} to {gib / min(seconds):.2f} |")


def row_seconds(what, seconds, scale):
    seconds = [s * scale for s in seconds]
    print(f"| {what} | {statistics.median(seconds):.1f} s | {min(seconds):.1f} to {max(seconds):.1f} |")


def main():
    directory = sys.argv[1]
    mib, runs, n = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((2, 1536), (3, 3), (4, 2000)))
    name = f"PyTorch {torch.__version__.split('+')[0]}"
    state, size = mixed(mib << 20)
    saves, loads = measure(state, directory, runs)
    row_rate(f"{name}, save: {directory}", saves, size)
    row_rate(f"{name}, load, warm, memory touched: {directory}", loads, size)
    del state
    saves, loads = measure(small(n), directory, 1)
    row_seconds(f"{name}, save 100000 tensors of 1024 bytes: {directory} (measured: {n})", saves, 100000 / n)
    row_seconds(f"{name}, load 100000 tensors of 1024 bytes: {directory} (measured: {n})", loads, 100000 / n)


if __name__ == "__main__":
    main()
