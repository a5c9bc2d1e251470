"""libdcp.torch beside PyTorch's own torch.distributed.checkpoint, both in the same run, taking turns.

    bench_python_torch.py [MEMORY_DIRECTORY] [DISK_DIRECTORY] [MIB] [RUNS]

Prints rows of a Markdown table: what | libdcp.torch | PyTorch | ratio | raw limit beside it. The state is MIB of float32 in 24 large
and 2,000 small tensors. Wants a build (PYTHONPATH=build/python) and a quiet machine.
"""

import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp

LARGE, SMALL, SMALL_BYTES = 24, 2000, 16 << 10
WORLD = 4


def state_of(mib):
    small = SMALL_BYTES // 4
    large = ((mib << 20) - SMALL * SMALL_BYTES) // LARGE // 4
    state = {f"large.{i}": torch.rand(large) for i in range(LARGE)}
    return state | {f"small.{i}": torch.rand(small) for i in range(SMALL)}


def tensors_of(count, elements):
    return {f"t.{i}": torch.rand(elements) for i in range(count)}


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(runs, *functions):
    """The seconds of each function: they take turns, so that what disturbs the machine disturbs all alike."""
    seconds = [[] for _ in functions]
    for _ in range(runs):
        for found, function in zip(seconds, functions):
            found.append(timed(function))
    return [statistics.median(found) for found in seconds]


def row(what, ours, theirs, unit, extra=""):
    print(f"| {what} | {unit(ours)} | {unit(theirs)} | {theirs / ours:.2f} x | {extra} |", flush=True)


def rate(n_bytes):
    return lambda seconds: f"{n_bytes / seconds / (1 << 30):.2f} GiB/s"


def per_item(count):
    return lambda seconds: f"{seconds / count * 1e6:.1f} us each"


def save_with(module, state, path, sync):
    shutil.rmtree(path, ignore_errors=True)
    writer = module.FileSystemWriter(path, sync_files=sync)
    return lambda: module.save(state, storage_writer=writer, no_dist=True)


def measure_saves(state, n_bytes, root, runs, sync, what):
    seconds = {module: [] for module in (dcp, torch_dcp)}
    raw = []
    for _ in range(runs):
        for module, found in seconds.items():
            save = save_with(module, state, root / module.__name__, sync)
            found.append(timed(save))
            shutil.rmtree(root / module.__name__)
        raw.append(timed(lambda: write_plainly(state, root / "plain", sync)))
        os.unlink(root / "plain")
    ours, theirs, plain = (statistics.median(found) for found in (*seconds.values(), raw))
    row(what, ours, theirs, rate(n_bytes), f"plain writes: {rate(n_bytes)(plain)}, {plain / ours:.2f} of it")


def write_plainly(state, path, sync):
    with open(path, "wb", buffering=0) as file:
        for tensor in state.values():
            view = memoryview(tensor.numpy()).cast("B")
            while view:
                view = view[file.write(view) :]
        if sync:
            os.fsync(file.fileno())


def measure_loads(state, n_bytes, root, runs):
    save_with(dcp, state, root / "saved", False)()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    functions = [lambda m=module: m.load(target, checkpoint_id=root / "saved", no_dist=True) for module in (dcp, torch_dcp)]
    extra = ""
    try:
        from safetensors.torch import load_file, save_file

        save_file(state, root / "safetensors")

        def load_safetensors():
            for name, tensor in load_file(root / "safetensors").items():
                target[name].copy_(tensor)

        functions.append(load_safetensors)
    except ImportError:
        extra = "no safetensors here"
    ours, theirs, *others = in_turns(runs, *functions)
    for name, tensor in state.items():
        assert torch.equal(target[name], tensor), name
    if others:
        extra = f"safetensors load_file and copy: {rate(n_bytes)(others[0])}, {others[0] / ours:.2f} x"
    row("load, warm, memory file system", ours, theirs, rate(n_bytes), extra)


def measure_items(root, runs, count=10_000, elements=256):
    state = tensors_of(count, elements)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    saves = {module: [] for module in (dcp, torch_dcp)}
    for turn in range(runs):
        for module, found in saves.items():
            if module is torch_dcp and turn:
                continue  # seconds each
            found.append(timed(save_with(module, state, root / module.__name__, False)))
    ours, theirs = (statistics.median(found) for found in saves.values())
    row(f"save of {count:,} tensors of {elements * 4} bytes", ours, theirs, per_item(count))
    ours = statistics.median(timed(lambda: dcp.load(target, checkpoint_id=root / dcp.__name__, no_dist=True)) for _ in range(runs))
    theirs = timed(lambda: torch_dcp.load(target, checkpoint_id=root / dcp.__name__, no_dist=True))
    row(f"load of {count:,} tensors of {elements * 4} bytes", ours, theirs, per_item(count))


# ---- several ranks ----


def sharded(state, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}


def rank_main(rank, root, mib, runs, port):
    from torch.distributed.device_mesh import DeviceMesh

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    root = pathlib.Path(root)
    mesh, three = DeviceMesh("cpu", list(range(WORLD))), DeviceMesh("cpu", [0, 1, 2])
    whole = state_of(mib)
    state = sharded(whole, mesh)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    on_three = sharded({name: torch.zeros_like(tensor) for name, tensor in whole.items()}, three) if rank < 3 else None
    del whole
    for what, function in (
        ("save", lambda module, turn: module.save(state, storage_writer=module.FileSystemWriter(root / f"{module.__name__}-{turn}", sync_files=False))),
        ("load", lambda module, turn: module.load(target, checkpoint_id=root / dcp.__name__)),
        ("load on 3", lambda module, turn: module.load(on_three, checkpoint_id=root / dcp.__name__, process_group=three.get_group()) if rank < 3 else None),
    ):
        seconds = {module: [] for module in (dcp, torch_dcp)}
        for turn in range(runs):
            for module, found in seconds.items():
                dist.barrier()
                start = time.perf_counter()
                function(module, turn)
                dist.barrier()
                found.append(time.perf_counter() - start)
                if what == "save" and rank == 0:
                    saved = root / f"{module.__name__}-{turn}"
                    kept = root / dcp.__name__
                    if module is dcp and not kept.exists():
                        saved.rename(kept)
                    else:
                        shutil.rmtree(saved)
        if rank == 0:
            ours, theirs = (statistics.median(found) for found in seconds.values())
            row(f"{WORLD} Gloo ranks: {what}", ours, theirs, rate(mib << 20))
    dist.destroy_process_group()


def measure_ranks(root, mib, runs):
    import socket

    import torch.multiprocessing as multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(rank_main, (str(root), mib, runs, port), nprocs=WORLD)


def measure_import():
    def start(code):
        return timed(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    pairs = [(start("import libdcp"), start("pass")) for _ in range(15)]
    ours, bare = (statistics.median(column) for column in zip(*pairs))
    print(f"| import libdcp | {(ours - bare) * 1e3:.0f} ms over Python's own start | | | |", flush=True)


def main(memory="/dev/shm", disk="build", mib="1536", runs="5"):
    warnings.simplefilter("ignore")
    mib, runs = int(mib), int(runs)
    print(f"libdcp.torch and PyTorch {torch.__version__}, {mib} MiB, medians of {runs}\n")
    print(f"| what | libdcp.torch | PyTorch {torch.__version__.split('+')[0]} | ratio | beside it |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=memory) as fast, tempfile.TemporaryDirectory(dir=disk) as slow:
        fast, slow = pathlib.Path(fast), pathlib.Path(slow)
        state = state_of(mib)
        n_bytes = sum(tensor.nbytes for tensor in state.values())
        measure_saves(state, n_bytes, fast, runs, False, "save, memory file system")
        measure_saves(state, n_bytes, slow, runs, True, "save, durable on disk")
        measure_loads(state, n_bytes, fast, runs)
        del state
        for path in fast.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        measure_items(fast, runs)
        for path in fast.iterdir():
            shutil.rmtree(path)
        measure_ranks(fast, mib, runs)
    measure_import()


if __name__ == "__main__":
    main(*sys.argv[1:])
