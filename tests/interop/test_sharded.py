"""Four ranks save sharded tensors with PyTorch; dcptool sees the whole ones, and two ranks load its copy in other shardings."""

import json
import pathlib
import socket
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards

from common import RELEASE, main, tool_copy, tool_hash
from content import digests, zeros
from test_library import fill

if RELEASE >= (2, 5):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

WORLD = 4


def full():
    return {
        "rows": fill(torch.float32, 70, 200).reshape(10, 7),
        "cols": fill(torch.bfloat16, 45, 201).reshape(5, 9),
        "grid": fill(torch.int64, 77, 202).reshape(7, 11),
        "hsdp": fill(torch.uint8, 36, 203).reshape(9, 4),
        "twice": fill(torch.float64, 26, 204).reshape(13, 2),
        "few": fill(torch.int32, 6, 205).reshape(3, 2),
        "replicated": fill(torch.float16, 8, 206).reshape(8),
        "plain": fill(torch.int16, 12, 207).reshape(3, 4),
        "old": fill(torch.float32, 44, 208).reshape(11, 4),
    }


def place(tensors, line, grid):
    """The tensors as DTensors; placements by name, for a mesh of one dimension and one of two."""
    placed = {
        "rows": distribute_tensor(tensors["rows"], line, [Shard(0)]),
        "cols": distribute_tensor(tensors["cols"], line, [Shard(1)]),
        "grid": distribute_tensor(tensors["grid"], grid, [Shard(0), Shard(1)]),
        "hsdp": distribute_tensor(tensors["hsdp"], grid, [Replicate(), Shard(0)]),
        "twice": distribute_tensor(tensors["twice"], grid, [Shard(0), Shard(0)]),
        "few": distribute_tensor(tensors["few"], line, [Shard(0)]),
        "replicated": distribute_tensor(tensors["replicated"], line, [Replicate()]),
        "plain": tensors["plain"],
    }
    return placed


def uneven(tensor, rank):
    """A ShardedTensor whose ranks have 1, 2, 3 and 5 rows."""
    bounds = [0, 1, 3, 6, 11]
    local = tensor[bounds[rank] : bounds[rank + 1]].contiguous()
    shard = LocalShard.from_tensor_and_offsets(local, [bounds[rank], 0], rank)
    return init_from_local_shards([shard], list(tensor.shape))


def load_on_two(path, rank):
    """Rows where columns were, columns where rows were; asserts on each rank what it got."""
    from torch.distributed.device_mesh import DeviceMesh

    line = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        return
    expected = full()
    places = {"rows": Shard(1), "cols": Shard(0), "grid": Shard(1), "hsdp": Shard(1), "twice": Shard(0), "few": Shard(1),
              "replicated": Shard(0), "old": Shard(0)}
    state = {name: distribute_tensor(zeros(expected[name].shape, expected[name].dtype), line, [place])
             for name, place in places.items()}
    state["plain"] = zeros(expected["plain"].shape, expected["plain"].dtype)
    state["opt"] = {"step": 0}
    dcp.load(state, checkpoint_id=str(path), process_group=line.get_group())
    assert state["opt"]["step"] == 7, state["opt"]
    assert digests({"": state["plain"]}) == digests({"": expected["plain"]})
    for name, place in places.items():
        mine = distribute_tensor(expected[name], line, [place])
        assert digests({"": state[name].to_local()}) == digests({"": mine.to_local()}), name


def rank_main(rank, path, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    path = pathlib.Path(path)
    tensors = full()
    state = place(tensors, init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2)))
    state["old"] = uneven(tensors["old"], rank)
    state["opt"] = {"step": 7}
    dcp.save(state, checkpoint_id=str(path / "saved"))
    if rank == 0:
        tool_copy(path / "saved", path / "copied")
        (path / "hashes.json").write_text(json.dumps([tool_hash(path / "saved"), tool_hash(path / "copied")]))
    dist.barrier()
    load_on_two(path / "copied", rank)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@unittest.skipIf(RELEASE < (2, 5), "other names for DTensor in this release")
class Sharded(unittest.TestCase):
    maxDiff = None

    def test_four_ranks_save_two_ranks_load_the_copy(self):
        with tempfile.TemporaryDirectory() as path:
            mp.spawn(rank_main, (path, free_port()), nprocs=WORLD)
            saved, copied = json.loads((pathlib.Path(path) / "hashes.json").read_text())
        expected = digests({**full(), "opt.step": 7})
        self.assertEqual(saved, expected)
        self.assertEqual(copied, expected)


if __name__ == "__main__":
    main()
