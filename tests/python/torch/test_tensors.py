"""What kinds of tensors go through, whole and sharded, and what comes back bit by bit."""

import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import libdcp.torch as dcp
import pool
from hooked import HookedLoad, HookedSave
from support import RELEASE, TestCase, failures_of, frozen, numbered, raises_together, tensor_bytes


class Plain(TestCase):
    def round_trip(self, state, found):
        for planners in ((None, None), (HookedSave(), HookedLoad())):
            path = self.root / str(planners[0] is None)
            dcp.save(state, checkpoint_id=path, planner=planners[0], no_dist=True)
            dcp.load(found, checkpoint_id=path, planner=planners[1], no_dist=True)
            self.assertStateEqual(found, state)
        return path

    def test_R11_8_all_dtypes_bit_by_bit(self):
        names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex32",
                 "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                 "float8_e5m2fnuz", "float8_e8m0fnu")  # fmt: skip
        state = {}
        for name in names:
            if hasattr(torch, name):
                dtype = getattr(torch, name)
                bits = torch.randint(0, 2 if name == "bool" else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
                state[name] = bits.view(dtype)
        self.round_trip(state, {name: torch.empty_like(tensor) for name, tensor in state.items()})

    def test_shapes(self):
        state = {
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(3, 0, 2),
            "nothing": torch.zeros(0),
            "deep": numbered(1, 2, 1, 3, 1, 2),
        }
        self.round_trip(state, {name: torch.zeros_like(tensor) for name, tensor in state.items()})

    def test_U85_views(self):
        big = numbered(1000)
        state = {
            "slice": big[10:20],
            "step": big[::7],
            "transposed": numbered(4, 5).t(),
            "permuted": numbered(2, 3, 4).permute(2, 0, 1),
            "channels_last": numbered(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "expanded": numbered(3, 1).expand(3, 4),
            "conjugate": torch.complex(numbered(4), numbered(4)).conj(),
            "negative": torch.complex(numbered(4), numbered(4)).conj().imag,
        }
        found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
        self.round_trip(state, found)

    def test_targets_that_are_views(self):
        state = {"a": numbered(4, 5), "b": numbered(6)}
        whole = torch.zeros(8, 10)
        ring = torch.zeros(12)
        self.round_trip(state, {"a": whole[2:6, ::2], "b": ring[1::2]})
        self.assertEqual(whole.sum(), state["a"].sum())
        self.assertEqual(ring[0::2].tolist(), [0.0] * 6)

    def test_targets_whose_elements_share_a_place(self):
        """PyTorch refuses them, and so do we: the last element that is written would be all of them."""
        saved = {"x": numbered(3, 4), "e": torch.zeros(0, 4), "c": torch.complex(numbered(3, 4), numbered(3, 4))}
        dcp.save(saved, checkpoint_id=self.path, no_dist=True)
        targets = (
            {"x": torch.zeros(3, 1).expand(3, 4)},
            {"x": torch.nn.Parameter(torch.zeros(1, 4).expand(3, 4))},
            {"x": torch.zeros(1, dtype=torch.float64).expand(3, 4)},
            {"c": torch.zeros(3, 1, dtype=torch.complex64).expand(3, 4).conj()},
        )
        for target in targets:
            for load in (dcp.load, torch_dcp.load):
                for planner in (None, HookedLoad()):
                    with self.subTest(target), raises_together(self) as caught:
                        load(target, checkpoint_id=self.path, planner=planner, no_dist=True)
                    self.assertIsInstance(caught.failures[0][0], RuntimeError)
        dcp.load({"e": torch.zeros(0, 1).expand(0, 4)}, checkpoint_id=self.path, no_dist=True)

    def test_parameters_and_gradients(self):
        parameter = torch.nn.Parameter(numbered(3))
        dcp.save({"p": parameter, "g": torch.rand(2, requires_grad=True)}, checkpoint_id=self.path, no_dist=True)
        target = torch.nn.Parameter(torch.zeros(3))
        loss = (target * target).sum()
        state = {"p": target, "g": torch.zeros(2, requires_grad=True)}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertIs(state["p"], target)
        self.assertTrue(target.requires_grad and target.is_leaf)
        self.assertEqual(target.tolist(), [0, 1, 2])
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()  # autograd learns that its saved values are no more

    def test_subclasses(self):
        class Marked(torch.Tensor):
            pass

        state = {"m": numbered(3).as_subclass(Marked)}
        target = torch.zeros(3).as_subclass(Marked)
        dcp.save(state, checkpoint_id=self.path, no_dist=True)
        dcp.load({"m": target}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(target.tolist(), [0, 1, 2])
        plain = {"m": torch.zeros(3)}
        torch_dcp.load(plain, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(plain["m"].tolist(), [0, 1, 2])

    def test_tensors_without_elements_of_their_own_are_objects(self):
        sparse = torch.eye(3).to_sparse()
        dcp.save({"s": sparse, "t": numbered(2)}, checkpoint_id=self.path, no_dist=True)
        for load in (dcp.load, torch_dcp.load):
            state = {"s": torch.zeros(3, 3).to_sparse(), "t": torch.zeros(2)}
            load(state, checkpoint_id=self.path, no_dist=True)
            self.assertTrue(torch.equal(state["s"].to_dense(), torch.eye(3)))
            self.assertEqual(state["t"].tolist(), [0, 1])

    def test_meta_tensors_have_no_data(self):
        with raises_together(self):
            dcp.save({"a": torch.zeros(3, device="meta")}, checkpoint_id=self.path, no_dist=True)
        self.assertFalse((self.path / ".metadata").exists())

    def test_ties(self):
        weight = numbered(1000)
        dcp.save({"a": weight, "b": weight, "c": weight.clone()}, checkpoint_id=self.path, no_dist=True)
        state = {name: torch.zeros(1000) for name in "abc"}
        torch_dcp.load(state, checkpoint_id=self.path, no_dist=True)
        for tensor in state.values():
            self.assertTrue(torch.equal(tensor, weight))
        shared = torch.zeros(1000)
        dcp.load({"a": shared, "b": shared}, checkpoint_id=self.path, no_dist=True)
        self.assertTrue(torch.equal(shared, weight))

    def test_containers(self):
        import collections

        state = {
            "ordered": collections.OrderedDict(x=numbered(2), y={"z": 1}),
            "default": collections.defaultdict(list, {"a": [1, 2]}),
            "list": [numbered(1), {"deep": [numbered(1, start=4)]}],
            "subclass": type("L", (list,), {})([numbered(1, start=9)]),
            "int keys": {0: numbered(1, start=2), 1: "one"},
        }
        for save in (dcp.save, torch_dcp.save):
            path = self.root / save.__module__
            save(state, checkpoint_id=path, no_dist=True)
            names = set(torch_dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
            self.assertEqual(
                names,
                {"ordered.x", "ordered.y.z", "default.a", "list.0", "list.1.deep.0", "subclass.0", "int keys.0", "int keys.1"},
            )
        found = {
            "ordered": collections.OrderedDict(x=torch.zeros(2), y={"z": None}),
            "default": collections.defaultdict(list, {"a": None}),
            "list": [torch.zeros(1), {"deep": [torch.zeros(1)]}],
            "subclass": type("L", (list,), {})([torch.zeros(1)]),
            "int keys": {0: torch.zeros(1), 1: None},
        }
        dcp.load(found, checkpoint_id=path, no_dist=True)
        self.assertEqual(frozen(dict(found["ordered"])), frozen(dict(state["ordered"])))
        self.assertEqual(found["default"]["a"], [1, 2])
        self.assertEqual(frozen(found["list"]), frozen(state["list"]))
        self.assertEqual(found["int keys"][1], "one")
        self.assertEqual(set(found["int keys"]), {0, 1})


PLACEMENTS = (
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Replicate()],
)


def strided():
    """As FSDP over tensor parallelism places its parameters."""
    try:
        from torch.distributed.tensor.placement_types import _StridedShard
    except ImportError:
        return ()
    return ([_StridedShard(0, split_factor=2), Shard(0)],)


def dtensors(ranks, path, ours_saves, hooked):
    """Saves tensors of all placements and loads them again in each other placement. Returns what differs."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks.members).reshape(2, 2))
    whole = numbered(9, 7)
    state = {str(i): distribute_tensor(whole, mesh, specs) for i, specs in enumerate(PLACEMENTS)}
    state |= {f"s{i}": strided_dtensor(whole[:8], mesh, specs) for i, specs in enumerate(strided())}
    save = dcp.save if ours_saves else torch_dcp.save
    save(state, checkpoint_id=path, planner=HookedSave() if hooked else None)
    wrong = []
    for shift in range(len(PLACEMENTS)):
        target = {
            str(i): distribute_tensor(torch.zeros(9, 7), mesh, PLACEMENTS[(i + shift) % len(PLACEMENTS)])
            for i in range(len(PLACEMENTS))
        }
        target |= {f"s{i}": strided_dtensor(torch.zeros(8, 7), mesh, specs) for i, specs in enumerate(strided())}
        dcp.load(target, checkpoint_id=path, planner=HookedLoad() if hooked else None)
        for name, tensor in target.items():
            expected = state[name].to_local() if name.startswith("s") else distribute_tensor(whole, mesh, tensor.placements).to_local()
            if not torch.equal(tensor.to_local(), expected):
                wrong.append((shift, name))
    return wrong


def strided_dtensor(whole, mesh, specs):
    """The rows of a rank in the order of the right mesh dimension first: 2 x 2 parts of two rows each."""
    coordinate = mesh.get_coordinate()
    rows = whole.reshape(2, 2, 2, -1)[coordinate[1], coordinate[0]]
    return DTensor.from_local(rows.clone(), mesh, specs, shape=whole.shape, stride=whole.stride())


def submesh(ranks, path):
    """A DTensor that lives on ranks 1 and 3 only, saved and loaded by all."""
    mesh = DeviceMesh("cpu", [1, 3])
    whole = numbered(5, 2)
    state = {"part": DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
             if ranks.rank in (0, 2) else distribute_tensor(whole, mesh, [Shard(0)]), "all": numbered(3)}  # fmt: skip
    dcp.save(state, checkpoint_id=path)
    found = {"part": state["part"], "all": torch.zeros(3)}
    if ranks.rank in (1, 3):
        found["part"] = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    dcp.load(found, checkpoint_id=path)
    if ranks.rank in (1, 3):
        return torch.equal(found["part"].to_local(), distribute_tensor(whole, mesh, [Shard(0)]).to_local())
    return True


def partial(ranks, path):
    mesh = DeviceMesh("cpu", list(range(4)))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    outcomes = []
    for save in (dcp.save, torch_dcp.save):
        found = failures_of(lambda: save({"p": tensor}, checkpoint_id=path))
        outcomes.append(found and (found[0], sorted(found[1]), {name for name, _ in found[1].values()}))
    return outcomes


def uneven_sharded_tensor(ranks, path, shards_of, hooked):
    """A ShardedTensor of 4x4 whose rows lie as `shards_of` says: rank -> [(first row, rows)]."""
    whole = numbered(4, 4, dtype=torch.float64)
    mine = shards_of.get(ranks.rank, [])

    def make(source):
        shards = [LocalShard.from_tensor_and_offsets(source[at : at + n].clone(), [at, 0], ranks.rank) for at, n in mine]
        return init_from_local_shards(shards, [4, 4])

    state = {"st": make(whole), "x": 1}
    dcp.save(state, checkpoint_id=path, planner=HookedSave() if hooked else None)
    found = {"st": make(torch.zeros(4, 4, dtype=torch.float64)), "x": 0}
    torch_found = {"st": make(torch.zeros(4, 4, dtype=torch.float64)), "x": 0}
    dcp.load(found, checkpoint_id=path, planner=HookedLoad() if hooked else None)
    torch_dcp.load(torch_found, checkpoint_id=path)
    return [
        all(torch.equal(shard.tensor, whole[at : at + n]) for shard, (at, n) in zip(f["st"].local_shards(), mine))
        for f in (found, torch_found)
    ]


def nested_sharded_tensor(ranks, path):
    """Rows over pairs of ranks, columns within them: ShardedTensor in ShardedTensor."""
    whole = numbered(4, 6)
    row, column = divmod(ranks.rank, 2)

    def make(source):
        inner_local = source[2 * row : 2 * row + 2, 3 * column : 3 * column + 3].clone()
        inner = init_from_local_shards(
            [LocalShard.from_tensor_and_offsets(inner_local, [0, 3 * column], ranks.rank)], [2, 6], process_group=pairs[row]
        )
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor import ShardedTensor
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

        shards = [ShardMetadata([2 * r, 0], [2, 6], f"rank:{2 * r + column}/cpu") for r in range(2)]
        outer = ShardedTensor._init_from_local_shards_and_global_metadata(
            [LocalShard(inner, ShardMetadata([2 * row, 0], [2, 6], f"rank:{ranks.rank}/cpu"))],
            ShardedTensorMetadata(shards, torch.Size([4, 6]), TensorProperties()),
            process_group=columns[column],
        )
        return outer

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dcp.save({"w": make(whole)}, checkpoint_id=path)
    target = make(torch.zeros(4, 6))
    dcp.load({"w": target}, checkpoint_id=path)
    inner = target.local_shards()[0].tensor.local_shards()[0].tensor
    return torch.equal(inner, whole[2 * row : 2 * row + 2, 3 * column : 3 * column + 3])


def unfillable(ranks, path):
    """What one rank's target cannot take is found before anything is read, and all ranks learn of it."""
    pairs = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    dcp.save({"pairs": pairs, "rows": numbered(2, 3), "other": numbered(3)}, checkpoint_id=path)
    outcomes = []
    for odd in ({"pairs": torch.zeros(4)}, {"rows": torch.zeros(2, 1).expand(2, 3)}):
        for planner in (None, HookedLoad()):
            state = {"pairs": torch.zeros(4, dtype=torch.uint8).view(pairs.dtype), "rows": torch.zeros(2, 3), "other": torch.zeros(3)}
            if ranks.rank == 2:
                state |= odd
            step, failures = failures_of(lambda: dcp.load(state, checkpoint_id=path, planner=planner))
            outcomes.append((sorted(failures), planner is not None or state["other"].any().item() is False))
    return outcomes


class Sharded(TestCase):
    @unittest.skipUnless(hasattr(torch, "float4_e2m1fn_x2"), "PyTorch before 2.8")
    def test_targets_that_cannot_be_filled_fail_on_all_ranks(self):
        for outcomes in pool.run(unfillable, str(self.path)):
            self.assertEqual(outcomes, [([2], True)] * 4)

    def test_R4_6_dtensors_in_all_placements(self):
        for number, (ours, hooked) in enumerate(((True, False), (False, False), (True, True))):
            for wrong in pool.run(dtensors, str(self.root / str(number)), ours, hooked):
                self.assertEqual(wrong, [])
        metadata = torch_dcp.FileSystemReader(self.root / "0").read_metadata()
        for name in map(str, range(len(PLACEMENTS))):
            self.assertEqual(sum(c.sizes.numel() for c in metadata.state_dict_metadata[name].chunks), 63)

    def test_R4_6_ranks_outside_the_mesh(self):
        self.assertEqual(pool.run(submesh, str(self.path)), [True] * 4)

    def test_partial_tensors_as_pytorch_treats_them(self):
        for ours, theirs in pool.run(partial, str(self.path)):
            self.assertEqual(ours, theirs)
            if RELEASE >= (2, 13):  # earlier ones save them
                self.assertEqual(ours[1], [0, 1, 2, 3])

    def test_R4_4_sharded_tensors_on_some_ranks(self):
        for number, shards_of in enumerate(({1: [(0, 4)]}, {0: [(0, 1)], 2: [(1, 3)]}, {3: [(0, 1), (1, 3)]})):
            for hooked in (False, True):
                for found in pool.run(uneven_sharded_tensor, str(self.root / f"{number}{hooked}"), shards_of, hooked):
                    self.assertEqual(found, [True, True])

    def test_R4_5_nested_sharded_tensors(self):
        self.assertEqual(pool.run(nested_sharded_tensor, str(self.path)), [True] * 4)
        chunks = torch_dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata["w"].chunks
        self.assertEqual({tuple(c.offsets) for c in chunks}, {(0, 0), (0, 3), (2, 0), (2, 3)})


class Pieces(torch.Tensor):
    """A local buffer with two shards of a tensor of 10 elements, by the protocol that DTensor uses as well."""

    offsets = ((0,), (6,))

    def size(self):
        return torch.Size((10,))

    def __create_chunk_list__(self):
        from libdcp.torch.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(at), torch.Size((n,))) for at, n in zip(self.offsets, (6, 4))]

    def __get_tensor_shard__(self, index):
        plain = self.as_subclass(torch.Tensor)
        return plain[:6] if tuple(index.offset) == (0,) else plain[6:]


class Protocols(TestCase):
    def test_several_parts_in_one_buffer(self):
        dcp.save({"p": numbered(10).as_subclass(Pieces)}, checkpoint_id=self.path, no_dist=True)
        metadata = torch_dcp.FileSystemReader(self.path).read_metadata()
        self.assertEqual([tuple(c.offsets) for c in metadata.state_dict_metadata["p"].chunks], [(0,), (6,)])
        target = torch.zeros(10).as_subclass(Pieces)
        dcp.load({"p": target}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(tensor_bytes(target.as_subclass(torch.Tensor)), tensor_bytes(numbered(10)))

    @unittest.skipUnless(hasattr(torch_dcp, "CheckpointableTensor"), "CheckpointableTensor came with PyTorch 2.14")
    def test_R5_42_checkpointable_tensors(self):
        def tensor(source):
            local = source.clone()
            local.global_shape, local.global_offsets = (10,), ((0,), (6,))
            local.local_offsets, local.local_sizes = ((0,), (6,)), ((6,), (4,))
            return local

        dcp.save({"p": tensor(numbered(10))}, checkpoint_id=self.path, no_dist=True)
        target = tensor(torch.zeros(10))
        dcp.load({"p": target}, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(target.tolist(), list(range(10)))
        odd = tensor(torch.zeros(10))
        odd.local_sizes = ((6,),)
        with raises_together(self):
            dcp.save({"p": odd}, checkpoint_id=self.path, no_dist=True)


if __name__ == "__main__":
    unittest.main()
