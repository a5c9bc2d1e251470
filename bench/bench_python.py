#!/usr/bin/env python3
"""Overhead of the Python package: seconds for each small tensor, and for importing it.

    PYTHONPATH=build/python bench/bench_python.py [--tensors 10000] [--dir /dev/shm] [--repeat 5]

Prints the best of the repetitions. "torch" is torch.distributed.checkpoint of the installed PyTorch, with fewer tensors since it is
slow; without PyTorch its rows, and those of torch tensors, are left out.
"""
import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import libdcp
from libdcp import _core

try:
    import torch
except ImportError:
    torch = None


def best(function, repeat):
    times = []
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def row(what, seconds, n):
    print(f"{what:<44}{seconds * 1e3:10.2f} ms{seconds / n * 1e6:10.2f} us each")


def numpy_overhead(place, n, repeat):
    tree = {f"layer.{i}.weight": np.full(256, i, np.float32) for i in range(n)}
    row("libdcp.save, NumPy", best(lambda: libdcp.save(place, tree, overwrite=True, sync=False), repeat), n)
    row("libdcp.load, NumPy", best(lambda: libdcp.load(place, tree), repeat), n)


def describe(obj):
    return None


def torch_overhead(place, n, repeat):
    tree = {f"layer.{i}.weight": torch.full((256,), float(i)) for i in range(n)}
    types = (torch.Tensor, torch.nn.Parameter)
    row("extension, torch tensors: save", best(
        lambda: _core.save(place, tree, describe=describe, tensor_types=types, overwrite=True, sync=False), repeat), n)
    row("extension, torch tensors: load", best(lambda: _core.load(place, tree, describe=describe, tensor_types=types), repeat), n)


def torch_itself(place, n):
    import torch.distributed.checkpoint as dcp
    tree = {f"layer.{i}.weight": torch.full((256,), float(i)) for i in range(n)}
    writer = lambda: dcp.FileSystemWriter(place, sync_files=False)
    row(f"torch {torch.__version__}: dcp.save", best(lambda: dcp.save(tree, storage_writer=writer(), no_dist=True), 2), n)
    row(f"torch {torch.__version__}: dcp.load", best(lambda: dcp.load(tree, checkpoint_id=place, no_dist=True), 2), n)


def import_time(repeat):
    def run(code):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    pairs = [(run("pass"), run("import libdcp")) for _ in range(4 * repeat)]
    extra = statistics.median(b - a for a, b in pairs)
    print(f"{'import libdcp, over Python itself':<44}{extra * 1e3:10.2f} ms (median of {len(pairs)})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10000)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        numpy_overhead(os.path.join(place, "numpy"), args.tensors, args.repeat)
        if torch:
            torch_overhead(os.path.join(place, "torch"), args.tensors, args.repeat)
            torch_itself(os.path.join(place, "dcp"), max(args.tensors // 20, 1))
    import_time(args.repeat)


if __name__ == "__main__":
    main()
