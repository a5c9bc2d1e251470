#!/usr/bin/env python3
"""bench_convert.py DIRECTORY [MIB]: dcptool convert beside PyTorch's own conversions, and a plain write, in the same run.

Makes MIB (1536) of tensors and 4/3 of that in column shards below DIRECTORY, converts them back and forth, and prints seconds, the
ratio to PyTorch, the ratio to a plain write of as many bytes, and the peak memory of each process. Nothing is synced, since PyTorch
syncs nothing; DCPTOOL names the tool. Removes what it made.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

MIB = 1 << 20
TOOL = os.environ.get("DCPTOOL", "dcptool")
ROUNDS = int(os.environ.get("ROUNDS", "3"))


def timed(*command, code=None):
    """Best seconds of a process, and its peak memory in MiB. code: Python to be run, which prints the seconds that count."""
    arguments = [sys.executable, "-c", code] if code else [str(a) for a in command]
    read_end, write_end = os.pipe()
    start = time.perf_counter()
    pid = os.posix_spawnp(arguments[0], arguments, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write_end, 1)])
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    seconds = float(text) if code else time.perf_counter() - start
    assert status == 0, arguments
    return seconds, usage.ru_maxrss / 1024


def best(target, *command, code=None):
    """Of some rounds, each into an empty place."""
    results = []
    for _ in range(ROUNDS):
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True) if target.is_file() else None
        results.append(timed(*command, code=code))
    return min(r[0] for r in results), max(r[1] for r in results)


def raw_write(path, n):
    block = bytearray(os.urandom(MIB)) * 8
    times = []
    for _ in range(ROUNDS):
        path.unlink(missing_ok=True)
        start = time.perf_counter()
        with open(path, "wb", buffering=0) as f:
            for _ in range(0, n, len(block)):
                f.write(block)
        times.append(time.perf_counter() - start)
    path.unlink()
    return min(times)


PYTHON = "import time, torch\nimport torch.distributed.checkpoint.format_utils as f\nstart = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"


def apart(function, *arguments):
    """In a process of its own: what this one has touched counts as memory of those that it starts."""
    pid = os.fork()
    if pid == 0:
        function(*arguments)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, function


def make_state(directory, mib):
    import torch
    import torch.distributed.checkpoint as dcp

    content = {"model": {f"layers.{i}.w": torch.rand(mib * MIB // 4 // 24 // 4096, 4096) for i in range(24)}}
    dcp.save(content, storage_writer=dcp.FileSystemWriter(str(directory / "dcp")), no_dist=True)
    torch.save(content, directory / "file.pt")


def make_shards(directory, mib):
    """Four column shards of each tensor, as HuggingFaceStorageWriter leaves them."""
    import safetensors.torch
    import torch

    directory.mkdir()
    rows = mib * MIB // 4 // 8 // 8192
    for rank in range(4):
        parts = {f"t{i}": torch.rand(rows, 2048) for i in range(8)}
        offsets = json.dumps({name: {"saved_offsets": [0, rank * 2048]} for name in parts})
        safetensors.torch.save_file(
            parts, directory / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
            metadata={"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": offsets})


def row(name, ours, theirs, raw):
    print(f"{name:28} {ours[0]:7.2f} s {ours[1]:6.0f} MiB   PyTorch {theirs[0]:7.2f} s {theirs[1]:6.0f} MiB   "
          f"{theirs[0] / ours[0]:5.1f} x   plain write {raw:6.2f} s, {raw / ours[0]:4.2f} of it", flush=True)


def main():
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 1536
    work = pathlib.Path(tempfile.mkdtemp(dir=sys.argv[1], prefix="dcp-bench-"))
    options = ["convert", "--quiet", "--no-sync", "--no-check"]
    try:
        apart(make_state, work, mib)
        raw = raw_write(work / "raw", mib * MIB)
        out = work / "out.pt"
        code = PYTHON.format(f"f.dcp_to_torch_save({str(work / 'dcp')!r}, {str(out)!r})")
        row("DCP -> torch.save", best(out, TOOL, *options, "--to", "torch", work / "dcp", out), best(out, code=code), raw)
        checked = [o for o in options if o != "--no-check"]
        seconds, memory = best(out, TOOL, *checked, "--to", "torch", work / "dcp", out)
        print(f"{'  read back as well':28} {seconds:7.2f} s {memory:6.0f} MiB")
        out.unlink(missing_ok=True)
        out = work / "out"
        code = PYTHON.format(f"f.torch_save_to_dcp({str(work / 'file.pt')!r}, {str(out)!r})")
        row("torch.save -> DCP", best(out, TOOL, *options, "--to", "dcp", work / "file.pt", out), best(out, code=code), raw)
        shutil.rmtree(out)
        shutil.rmtree(work / "dcp")
        (work / "file.pt").unlink()
        mib = mib * 4 // 3
        apart(make_shards, work / "shards", mib)
        raw = raw_write(work / "raw", mib * MIB)
        code = PYTHON.format(
            "from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files as c\n"
            f"c({str(work / 'shards')!r}, {str(out)!r}, {{f't{{i}}': 1 for i in range(8)}}, num_threads=2)")
        code = f"import os; os.makedirs({str(out)!r})\n" + code
        row("HF shards -> one HF file", best(out, TOOL, *options, "--to", "hf", work / "shards", out), best(out, code=code), raw)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
