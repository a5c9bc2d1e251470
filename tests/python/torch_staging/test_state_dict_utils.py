"""R8.1 to R8.15: states on the host and copies of states."""

import io
import unittest

import torch
import torch.distributed as dist
import torch.multiprocessing

import pool
from libdcp.torch._state_dict_utils import (
    CompanionMismatch,
    _check_state_dict_similarity,
    _copy_state_dict,
    _create_cpu_state_dict,
    _gather_state_dict,
    _offload_state_dict_to_cpu,
)
from support import TestCase, numbered


class Unknown:
    pass


def sharded_state(ranks):
    """A DTensor and ShardedTensors of 10 rows in uneven parts, and one that lives on rank 1 alone."""
    from torch.distributed._shard.sharded_tensor import ShardMetadata, empty
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    full = numbered(10, 4)
    mesh = init_device_mesh("cpu", (ranks.size,))
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{rank}/cpu" for rank in range(ranks.size)])
    sharded = empty(spec, 10, 4, process_group=ranks.group)
    for shard in sharded.local_shards():
        start, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(full[start : start + rows])
    on_one = empty(EnumerableShardingSpec([ShardMetadata([0, 0], [4, 4], "rank:1/cpu")]), 4, 4, process_group=ranks.group)
    for shard in on_one.local_shards():
        shard.tensor.fill_(1)
    return {
        "dtensor": distribute_tensor(full, mesh, [Shard(0)]),
        "scalar": distribute_tensor(torch.tensor(5.0), mesh, [Replicate()]),
        "sharded": sharded,
        "on one": on_one,
    }


def parts(tensor):
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor]


def create_and_copy(ranks, share):
    """R8.1, R8.6, R8.8: what does not hold."""
    state = sharded_state(ranks)
    host = _create_cpu_state_dict(state, share_memory=share)
    copied = _copy_state_dict(state, host)
    wrong = []
    for name, tensor in state.items():
        if type(host[name]) is not type(tensor) or copied[name] is not host[name]:
            wrong.append(f"{name}: type or identity")
        for part, place in zip(parts(tensor), parts(host[name]), strict=True):
            if not torch.equal(part, place) or part.data_ptr() == place.data_ptr():
                wrong.append(f"{name}: values")
            if place.dim() and place.is_shared() != share:
                wrong.append(f"{name}: sharing")
    if ranks.rank != 1 and host["on one"] is not state["on one"]:
        wrong.append("without shards it is returned as it is")
    # The copy is one: what is written to it is not seen in the source.
    parts(host["dtensor"])[0].fill_(-1)
    if torch.any(state["dtensor"].to_local() == -1):
        wrong.append("the source has changed")
    return wrong


def cut_in_blocks(ranks, full):
    """A ShardedTensor of uneven blocks: the group's first rank has two, of four ranks the second has none."""
    from torch.distributed._shard.sharded_tensor import ShardMetadata, empty
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

    boxes = [([0, 0], [3, 2], -2), ([3, 0], [4, 5], 0), ([0, 2], [3, 3], 0), ([7, 0], [3, 5], -1)]
    world_ranks = dist.get_process_group_ranks(ranks.group or dist.group.WORLD)  # which is how shards name them
    shards = [ShardMetadata(start, size, f"rank:{world_ranks[rank]}/cpu") for start, size, rank in boxes]
    cut = empty(EnumerableShardingSpec(shards), *full.shape, dtype=full.dtype, process_group=ranks.group)
    for shard in cut.local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(full[row : row + rows, column : column + columns])
    return cut


def gather_in_part_of_the_world(ranks):
    return _gather_state_dict({"blocks": cut_in_blocks(ranks, numbered(10, 5))}, pg=ranks.group)["blocks"].tolist()


def gather(ranks):
    state = sharded_state(ranks)
    state["blocks"] = cut_in_blocks(ranks, numbered(10, 5))
    state["nested"] = {"flags": [cut_in_blocks(ranks, numbered(10, 5) % 3 == 0)]}
    gathered = _gather_state_dict(state, pg=ranks.group)
    only = _gather_state_dict(state, pg=ranks.group, ranks_only=(0,))
    gathered["flags"] = gathered.pop("nested")["flags"][0]
    return {name: tensor.tolist() for name, tensor in gathered.items()}, sorted(only)


def offload(ranks, ranks_only):
    state = {"w": torch.ones(3), "nested": {"list": [torch.ones(2), 1]}}
    return _offload_state_dict_to_cpu(state, ranks_only=ranks_only)


def read_shared(tensor, queue):
    queue.put(tensor.tolist())


class Create(TestCase):
    def test_R8_1_R8_7_structure_and_values(self):
        state = {"w": numbered(2, 3), "nested": {"list": [numbered(2), 1.5, (numbered(1), None)]}, "bytes": b"b", "text": "t",
                 "io": io.BytesIO(b"io"), "bool": True, "half": torch.ones(3, dtype=torch.bfloat16), "object": Unknown()}  # fmt: skip
        host = _create_cpu_state_dict(state)
        self.assertEqual(list(host), list(state))
        self.assertEqual((host["w"].shape, host["w"].dtype, host["half"].dtype), ((2, 3), torch.float32, torch.bfloat16))
        self.assertIs(type(host["nested"]["list"][2]), tuple)
        self.assertEqual((host["bytes"], host["text"], host["bool"], host["nested"]["list"][1]), (b"b", "t", True, 1.5))
        self.assertIs(host["io"], state["io"])
        self.assertIsInstance(host["object"], Unknown)
        self.assertIsNot(host["object"], state["object"])
        self.assertNotEqual(host["w"].data_ptr(), state["w"].data_ptr())

    def test_R8_2_scalars(self):
        for flags in ({}, {"share_memory": True}):
            host = _create_cpu_state_dict({"s": torch.tensor(5, dtype=torch.int32)}, **flags)["s"]
            self.assertEqual((host.item(), host.dtype, host.is_shared()), (0, torch.int32, False))

    def test_R8_3_without_elements(self):
        for share in (False, True):
            host = _create_cpu_state_dict({"e": torch.ones(0, 8)}, share_memory=share)["e"]
            self.assertEqual((host.shape, host.is_shared()), ((0, 8), share))

    def test_R8_4_another_process_sees_it(self):
        host = _create_cpu_state_dict({"w": torch.zeros(4)}, share_memory=True)["w"]
        self.assertTrue(host.is_shared())
        self.assertFalse(_create_cpu_state_dict({"w": torch.zeros(4)})["w"].is_shared())
        host.copy_(numbered(4))
        context = torch.multiprocessing.get_context("spawn")
        queue = context.SimpleQueue()
        process = context.Process(target=read_shared, args=(host, queue))
        process.start()
        self.assertEqual(queue.get(), numbered(4).tolist())
        process.join()

    def test_R8_5_both_without_a_device(self):
        with self.assertRaisesRegex(RuntimeError, "neither CUDA nor an NPU"):
            _create_cpu_state_dict({"w": torch.zeros(4)}, pin_memory=True, share_memory=True)

    def test_strides_of_the_source_are_not_kept(self):
        host = _create_cpu_state_dict({"t": numbered(2, 3).t()})
        self.assertTrue(host["t"].is_contiguous())
        self.assertEqual(_copy_state_dict({"t": numbered(2, 3).t()}, host)["t"].tolist(), numbered(2, 3).t().tolist())


class Copy(TestCase):
    def test_R8_8_in_place(self):
        source = {"w": numbered(3), "n": 7, "nested": {"l": [numbered(2), "text"]}, "object": Unknown()}
        target = _create_cpu_state_dict(source)
        target["n"], target["nested"]["l"][1] = 8, "other"
        copied = _copy_state_dict(source, target, type_check=False)
        self.assertIs(copied["w"], target["w"])
        self.assertIs(copied["nested"]["l"][0], target["nested"]["l"][0])
        self.assertEqual((copied["n"], copied["nested"]["l"][1], target["n"]), (7, "text", 8))
        self.assertEqual(target["w"].tolist(), numbered(3).tolist())
        self.assertIsNot(copied["object"], source["object"])

    def test_R8_9_dtypes_are_converted(self):
        target = {"w": torch.zeros(3, dtype=torch.float64)}
        _copy_state_dict({"w": torch.tensor([1.5, 2.5, 3.5])}, target)
        self.assertEqual(target["w"].tolist(), [1.5, 2.5, 3.5])
        _copy_state_dict({"w": torch.tensor([1.0 + 2j]).conj()}, target := {"w": torch.zeros(1, dtype=torch.complex64)})
        self.assertEqual(target["w"].tolist(), [1.0 - 2j])

    def test_R8_11_blocking_unless_asked_otherwise(self):
        """With a stand-in for tensors on a device: what PyTorch is asked for."""
        asked = []

        class OnDevice(torch.Tensor):
            is_cpu = False

            def copy_(self, source, non_blocking=False):
                asked.append(non_blocking)
                return super().copy_(source)

        for options in ({}, {"non_blocking": True}):
            target = {"w": torch.zeros(3).as_subclass(OnDevice)}
            _copy_state_dict({"w": numbered(3)}, target, **options)
            self.assertEqual(target["w"].tolist(), numbered(3).tolist())
        self.assertEqual(asked, [False, True])

    def test_R8_9_nothing_is_copied_before_all_fits(self):
        for source, error in (
            ({"w": torch.ones(8), "v": torch.ones(1)}, ValueError),
            ({"w": torch.ones(8), "v": torch.ones(2), "x": 1}, CompanionMismatch),
            ({"w": torch.ones(8)}, CompanionMismatch),
            ({"w": torch.ones(8), "v": [torch.ones(8)]}, CompanionMismatch),
            ({"w": torch.ones(8), "v": 3}, CompanionMismatch),
            ({"w": torch.ones(1), "v": torch.ones(8)}, ValueError),
        ):
            target = {"w": torch.zeros(8), "v": torch.zeros(8)}
            with self.assertRaises(error):
                _copy_state_dict(source, target)
            self.assertEqual(target["w"].tolist(), [0.0] * 8)
        with self.assertRaises(CompanionMismatch):
            _copy_state_dict({"l": [1, 2]}, {"l": [1]})

    def test_R8_10_other_values_are_refused_by_type(self):
        target = {"w": torch.zeros(2), "x": None}
        with self.assertRaisesRegex(ValueError, "Unexpected value type <class 'object'>"):
            _copy_state_dict({"w": torch.ones(2), "x": object()}, target)
        self.assertEqual(target["w"].tolist(), [0.0, 0.0])

    def test_R8_14_similarity(self):
        state = {"w": torch.zeros(10), "l": [1, torch.zeros(2)]}
        self.assertTrue(_check_state_dict_similarity(state, {"w": torch.ones(10), "l": [2, torch.ones(2)]}))
        for other in (
            {"w": torch.ones(11), "l": [1, torch.ones(2)]},
            {"w": torch.ones(10).int(), "l": [1, torch.ones(2)]},
            {"w": torch.ones(10), "l": [1, 2]},
            {"w": torch.ones(10), "l": [torch.ones(2)]},
            {"w": torch.ones(10)},
            {"w": 1, "l": [1, torch.ones(2)]},
        ):
            self.assertFalse(_check_state_dict_similarity(state, other), other)
        # Looking changes nothing.
        other = {"w": torch.ones(10), "l": [1, torch.ones(2)]}
        _check_state_dict_similarity(state, other)
        self.assertEqual((other["w"].sum().item(), state["w"].sum().item()), (10.0, 0.0))


class SeveralRanks(TestCase):
    def test_R8_6_sharded_values(self):
        for share in (False, True):
            for rank, wrong in enumerate(pool.run(create_and_copy, share, world=4)):
                self.assertEqual(wrong, [], f"rank {rank}")

    def test_R8_12_offloading_to_some_ranks(self):
        everything = {"w": torch.ones(3), "nested": {"list": [torch.ones(2), 1]}}
        for found in pool.run(offload, (), world=2):
            self.assertStateEqual(found, everything)
        first, second = pool.run(offload, (0,), world=2)
        self.assertStateEqual(first, everything)
        self.assertEqual(second, {})

    def test_R8_15_gathering_uneven_shards(self):
        full = numbered(10, 4).tolist()
        for rank, (found, only) in enumerate(pool.run(gather, world=4)):
            blocks = numbered(10, 5)
            expected = {"dtensor": full, "sharded": full, "scalar": 5.0, "on one": [[1.0] * 4] * 4,
                        "blocks": blocks.tolist(), "flags": (blocks % 3 == 0).tolist()}  # fmt: skip
            self.assertEqual(found, expected)
            self.assertEqual(only, ["blocks", "dtensor", "nested", "on one", "scalar", "sharded"] if rank == 0 else [])

    def test_R8_15_gathering_in_a_part_of_the_world(self):
        for found in pool.run(gather_in_part_of_the_world, members=(1, 3)):
            self.assertEqual(found, numbered(10, 5).tolist())


if __name__ == "__main__":
    unittest.main()
