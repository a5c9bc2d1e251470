"""R4: model and optimizer states of FSDP, tensor parallelism and the state-dict family."""

import itertools
import pathlib
import unittest
import unittest.mock

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as Split

import libdcp.torch as dcp
import pool
from libdcp.torch import optimizer as dcp_optimizer
from libdcp.torch import state_dict as family
from support import RELEASE, TestCase, frozen, numbered, raises_together, tensor_bytes

HOST = torch.device("cpu")


def fsdp(model, group=None):
    return FSDP(model, process_group=group, device_id=HOST, use_orig_params=True)


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(8, 8)


def train(model, optimizer, seed=5):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 8, generator=generator)).sum().backward()
        optimizer.step()


def shards_of(state):
    """{name: [(offsets, bytes), ...]} of what this rank has, in a form that can be compared."""
    return {
        name: [(tuple(shard.metadata.shard_offsets), tensor_bytes(shard.tensor)) for shard in value.local_shards()]
        if isinstance(value, ShardedTensor)
        else frozen(value)
        for name, value in state.items()
    }


def whole_weights(model):
    with FSDP.summon_full_params(model):
        return {name: tensor_bytes(value.detach().clone()) for name, value in model.named_parameters()}


def save_and_load_fsdp(ranks, path, regroup):
    """Returns (weights before, weights of the other model before, after), and the shards of the saved state."""
    first, second = fsdp(linear(0)), None
    group = None
    if regroup:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[ranks.rank % 2]
    second = fsdp(linear(1), group)
    with FSDP.state_dict_type(first, StateDictType.SHARDED_STATE_DICT):
        state = {"model": first.state_dict()}
        dcp.save_state_dict(
            state_dict=state, storage_writer=dcp.FileSystemWriter(path), planner=dcp.DefaultSavePlanner()
        )
    before = whole_weights(first), whole_weights(second)
    with FSDP.state_dict_type(second, StateDictType.SHARDED_STATE_DICT):
        target = {"model": second.state_dict()}
        dcp.load_state_dict(
            state_dict=target, storage_reader=dcp.FileSystemReader(path), planner=dcp.DefaultLoadPlanner()
        )
        second.load_state_dict(target["model"])
    return *before, whole_weights(second), shards_of(state["model"])


def save_and_load_optimizer(ranks, path):
    """Adam's state through load_sharded_optimizer_state_dict into an optimizer that has none."""
    first, second = fsdp(linear(0)), fsdp(linear(1))
    old = torch.optim.Adam(first.parameters(), lr=0.1)
    new = torch.optim.Adam(second.parameters(), lr=0.1)
    train(first, old)
    with FSDP.state_dict_type(first, StateDictType.SHARDED_STATE_DICT):
        saved = {"model": first.state_dict(), "optim": FSDP.optim_state_dict(first, old)}
        dcp.save(saved, checkpoint_id=path)
    with FSDP.state_dict_type(second, StateDictType.SHARDED_STATE_DICT):
        model = {"model": second.state_dict()}
        dcp.load(model, checkpoint_id=path)
        second.load_state_dict(model["model"])
        loaded = dcp.load_sharded_optimizer_state_dict(model["model"], "optim", dcp.FileSystemReader(path))
        assert list(loaded) == ["optim"]
        kinds = {name: type(value).__name__ for name, value in loaded["optim"]["state"]["weight"].items()}
        new.load_state_dict(FSDP.optim_state_dict_to_load(second, new, loaded["optim"]))
        assert dcp.load_sharded_optimizer_state_dict(model["model"], "absent", dcp.FileSystemReader(path)) == {}
        assert loaded["optim"]["param_groups"][0]["lr"] == 0.1
        assert shards_of(FSDP.optim_state_dict(second, new)["state"]["weight"]) == shards_of(saved["optim"]["state"]["weight"])
        assert shards_of(FSDP.optim_state_dict(second, new)["state"]["bias"]) == shards_of(saved["optim"]["state"]["bias"])
    train(first, old, 6)
    train(second, new, 6)
    assert whole_weights(first) == whole_weights(second)
    return kinds


def load_rows(ranks, path):
    """Row shards of a checkpoint of one process: R4.10."""
    loaded = dcp.load_sharded_optimizer_state_dict({}, "optim", dcp.FileSystemReader(path))["optim"]["state"]["w"]
    shards = {}
    for name in ("exp_avg", "uneven", "short"):
        assert isinstance(loaded[name], ShardedTensor), name
        shards[name] = [
            (tuple(shard.metadata.shard_offsets), tensor_bytes(shard.tensor)) for shard in loaded[name].local_shards()
        ]
        placements = [str(shard.placement) for shard in loaded[name].metadata().shards_metadata]
        assert placements == [f"rank:{rank}/cpu" for rank in range(len(placements))], placements
    assert torch.equal(loaded["step"], torch.tensor(3.0)) and torch.equal(loaded["one"], torch.tensor([[2.5]]))
    assert loaded["name"] == "adam" and tuple(loaded["none"].shape) == (0, 4)
    return shards


def nested(whole, ranks, outer_groups, inner_groups):
    """2x2: columns cut over the outer groups, rows of each part over the inner ones."""
    column, row = ranks.rank % 2, ranks.rank // 2
    inner_group, outer_group = inner_groups[column], outer_groups[row]
    rows, columns = whole.shape
    part = whole[:, column * columns // 2 : (column + 1) * columns // 2]
    half = rows // 2
    inner_meta = [ShardMetadata([i * half, 0], [half, columns // 2], f"rank:{2 * i + column}/cpu") for i in range(2)]
    local = part[row * half : (row + 1) * half].clone()
    inner = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(local, inner_meta[row])],
        ShardedTensorMetadata(inner_meta, part.shape, TensorProperties(dtype=whole.dtype)),
        process_group=inner_group,
    )
    outer_meta = [ShardMetadata([0, i * columns // 2], [rows, columns // 2], f"rank:{2 * row + i}/cpu") for i in range(2)]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(inner, outer_meta[column])],
        ShardedTensorMetadata(outer_meta, whole.shape, TensorProperties(dtype=whole.dtype)),
        process_group=outer_group,
    )


def save_and_load_nested(ranks, path):
    outer_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inner_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    weight, average = numbered(4, 6), numbered(4, 6, start=100)
    model = {"w": nested(weight, ranks, outer_groups, inner_groups)}
    state = {"model": model, "optim": {"state": {"w": {"exp_avg": nested(average, ranks, outer_groups, inner_groups)}}}}
    dcp.save(state, checkpoint_id=path)
    target = {"model": {"w": nested(torch.zeros(4, 6), ranks, outer_groups, inner_groups)}}
    dcp.load(target, checkpoint_id=path)
    loaded_model = target["model"]["w"].local_shards()[0].tensor.local_shards()[0].tensor
    loaded = dcp.load_sharded_optimizer_state_dict(model, "optim", dcp.FileSystemReader(path))
    [shard] = loaded["optim"]["state"]["w"]["exp_avg"].local_shards()
    column, row = ranks.rank % 2, ranks.rank // 2
    box = (slice(2 * row, 2 * row + 2), slice(3 * column, 3 * column + 3))
    assert torch.equal(loaded_model, weight[box])
    assert torch.equal(shard.tensor, average[box]), shard.tensor
    return True


def save_dtensors(ranks, path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part_mesh = DeviceMesh("cpu", torch.arange(3))  # rank 3 has nothing of what lies there
    state = {
        "both": distribute_tensor(numbered(7, 5), mesh, [Split(0), Split(1)]),
        "three": distribute_tensor(numbered(4, 2), part_mesh, [Split(0)]) if ranks.rank < 3 else None,
    }
    if state["three"] is None:
        state["three"] = DTensor.from_local(
            torch.empty(0, 2), part_mesh, [Split(0)], shape=torch.Size([4, 2]), stride=(2, 1), run_check=False
        )
    dcp.save(state, checkpoint_id=path)
    return True


def save_bias_of_three(ranks, path):
    mesh = DeviceMesh("cpu", torch.arange(ranks.size))
    dcp.save({"bias": distribute_tensor(numbered(3), mesh, [Split(0)])}, checkpoint_id=path)
    target = distribute_tensor(torch.zeros(3), mesh, [Split(0)])
    dcp.load({"bias": target}, checkpoint_id=path)
    return tensor_bytes(target.to_local())


def save_own_group(ranks, path):
    dcp.save({"a": numbered(4, start=ranks.rank * 0)}, checkpoint_id=path, process_group=ranks.group)
    return True


def state_dict_family(ranks, path, options):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        fully_shard(model, mesh=DeviceMesh("cpu", torch.arange(ranks.size)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    options = family.StateDictOptions(**options)
    model, optimizer = build(0)
    train(model, optimizer)
    model_state, optimizer_state = family.get_state_dict(model, optimizer, options=options)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    other, other_optimizer = build(1)
    target_model, target_optimizer = family.get_state_dict(other, other_optimizer, options=options)
    target = {"model": target_model, "optim": target_optimizer}
    dcp.load(target, checkpoint_id=path)
    family.set_state_dict(
        other, other_optimizer, model_state_dict=target["model"], optim_state_dict=target["optim"], options=options
    )
    train(model, optimizer, 9)
    train(other, other_optimizer, 9)
    return [
        tensor_bytes(a.to_local()) == tensor_bytes(b.to_local())
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    ]


OWN_ROWS = 256  # of 4096 float32 each


def bytes_read_for_own_rows(ranks, path):
    mesh = DeviceMesh("cpu", torch.arange(ranks.size))
    shape = (OWN_ROWS * ranks.size, 4096)
    dcp.save({"w": distribute_tensor(torch.ones(shape), mesh, [Split(0)])}, checkpoint_id=path)
    target = distribute_tensor(torch.zeros(shape), mesh, [Split(0)])
    before = bytes_read()
    dcp.load({"w": target}, checkpoint_id=path)
    return bytes_read() - before


def bytes_read():
    """By this process so far, from files and sockets."""
    facts = pathlib.Path("/proc/self/io").read_text()
    return int(facts.split("rchar: ")[1].split()[0])


class States(TestCase):
    def test_R4_1_same_sharding(self):
        results = pool.run(save_and_load_fsdp, self.path, False)
        for first, second, after, _ in results:
            self.assertNotEqual(first, second)
            self.assertEqual(first, after)

    def test_R4_2_other_groups(self):
        for first, second, after, _ in pool.run(save_and_load_fsdp, self.path, True):
            self.assertNotEqual(first, second)
            self.assertEqual(first, after)

    def test_R4_3_each_rank_writes_its_shards(self):
        results = pool.run(save_and_load_fsdp, self.path, False)
        metadata = dcp.FileSystemReader(self.path).read_metadata()
        self.assertEqual(sorted(metadata.state_dict_metadata), ["model.bias", "model.weight"])
        chunks = metadata.state_dict_metadata["model.weight"].chunks
        self.assertEqual([(tuple(c.offsets), tuple(c.sizes)) for c in chunks], [((2 * r, 0), (2, 8)) for r in range(4)])
        for rank, (*_, shards) in enumerate(results):
            self.assertEqual([offsets for offsets, _ in shards["weight"]], [(2 * rank, 0)])
        for index, info in metadata.storage_data.items():
            self.assertEqual(info.relative_path, f"__{index.offset[0] // 2}_0.distcp")

    def test_R4_4_ranks_without_rows(self):
        loaded = pool.run(save_bias_of_three, self.path)
        self.assertEqual(loaded, [tensor_bytes(numbered(1, start=i)) for i in range(3)] + [b""])
        chunks = dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata["bias"].chunks
        self.assertEqual([(tuple(c.offsets), tuple(c.sizes)) for c in chunks], [((i,), (1,)) for i in range(3)])

    def test_R4_5_R4_11_shards_in_shards(self):
        self.assertEqual(pool.run(save_and_load_nested, self.path), [True] * 4)
        chunks = dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata["model.w"].chunks
        self.assertEqual(
            sorted((tuple(c.offsets), tuple(c.sizes)) for c in chunks),
            [((2 * i, 3 * j), (2, 3)) for i, j in itertools.product(range(2), repeat=2)],
        )

    def test_R4_6_meshes(self):
        pool.run(save_dtensors, self.path)
        state = {"both": torch.zeros(7, 5), "three": torch.zeros(4, 2)}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertStateEqual(state, {"both": numbered(7, 5), "three": numbered(4, 2)})

    def test_R4_7_R4_8_R4_9_optimizer_state(self):
        kinds = pool.run(save_and_load_optimizer, self.path)[0]
        self.assertEqual(kinds, {"step": "Tensor", "exp_avg": "ShardedTensor", "exp_avg_sq": "ShardedTensor"})
        names = dcp.FileSystemReader(self.path).read_metadata().state_dict_metadata
        self.assertIn("optim.state.weight.exp_avg", names)
        self.assertIn("optim.param_groups.0.lr", names)

    def test_R4_10_rows_of_a_dense_checkpoint(self):
        dense = {"exp_avg": numbered(8, 3), "uneven": numbered(10, 2), "short": numbered(3)}
        entries = dense | {"step": torch.tensor(3.0), "one": torch.tensor([[2.5]]), "name": "adam", "none": torch.zeros(0, 4)}
        dcp.save({"optim": {"state": {"w": entries}}, "model": {"w": numbered(2)}}, checkpoint_id=self.path, no_dist=True)
        for rank, shards in enumerate(pool.run(load_rows, self.path)):
            for name, tensor in dense.items():
                step = -(-tensor.shape[0] // pool.WORLD)
                rows = tensor[rank * step : (rank + 1) * step]
                expected = [((rank * step, *[0] * (tensor.dim() - 1)), tensor_bytes(rows))] if len(rows) else []
                self.assertEqual(shards[name], expected)

    def test_R4_12_devices(self):
        self.assertEqual(dcp_optimizer._gen_rank_device(3, "cpu"), "cpu")
        with unittest.mock.patch("torch.cuda.is_available", return_value=True):
            with unittest.mock.patch("torch.cuda.device_count", return_value=4):
                self.assertEqual(dcp_optimizer._gen_rank_device(6, "cuda"), "cuda:2")

    @unittest.skipIf(RELEASE < (2, 13), "earlier releases cannot put a DTensor into a ShardedTensor")
    def test_R4_13_nestings_that_are_refused(self):
        results = pool.run(refused_nestings, members=(0, 1))
        self.assertIn("Cannot handle DTensor nested inside ShardedTensor", results[0])

    def test_R4_14_state_dict_family(self):
        for number, options in enumerate(({}, {"flatten_optimizer_state_dict": True}, {"cpu_offload": True})):
            results = pool.run(state_dict_family, self.path / str(number), options)
            self.assertEqual(results, [[True] * 4] * 4, options)

    def test_R4_16_only_the_own_shards_are_read(self):
        rows = pool.run(bytes_read_for_own_rows, self.path)
        for read in rows:
            self.assertLess(read, OWN_ROWS * 4096 * 4 * 1.1 + 64 * 1024)  # and the metadata

    def test_112_optimizers_without_state(self):
        for flat in (False, True):
            model = linear(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            train(model, optimizer)
            options = family.StateDictOptions(flatten_optimizer_state_dict=flat)
            state = family.get_optimizer_state_dict(model, optimizer, options=options)
            path = self.path / str(flat)
            dcp.save({"optim": state}, checkpoint_id=path, no_dist=True)
            target = {"optim": family.get_optimizer_state_dict(model, optimizer, options=options)}
            dcp.load(target, checkpoint_id=path, no_dist=True)
            self.assertEqual(frozen(target["optim"]), frozen(state))

    def test_114_a_hyper_parameter_that_the_file_lacks(self):
        dcp.save({"optim": {"param_groups": [{"lr": 0.1}]}}, checkpoint_id=self.path, no_dist=True)
        state = {"optim": {"param_groups": [{"lr": 0.5, "fused": None, "beta": 0.9}]}}
        with raises_together(self) as caught:
            dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertIn("optim.param_groups.0.fused", str(caught.failures[0][0]))
        told = []
        dcp.load(
            state,
            checkpoint_id=self.path,
            planner=dcp.DefaultLoadPlanner(allow_partial_load=True),
            on_difference=lambda kind, name, text: told.append((kind, name)),
            no_dist=True,
        )
        self.assertEqual(state, {"optim": {"param_groups": [{"lr": 0.1, "fused": None, "beta": 0.9}]}})
        self.assertEqual(sorted(told), [("missing", f"optim.param_groups.0.{name}") for name in ("beta", "fused")])

    def test_R4_15_a_group_of_its_own(self):
        pool.run(save_own_group, self.path, members=(1, 3))
        state = {"a": torch.zeros(4)}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertStateEqual(state, {"a": numbered(4)})


def refused_nestings(ranks):
    mesh = DeviceMesh.from_group(ranks.group, "cpu")
    inner = distribute_tensor(numbered(2, 2), mesh, [Split(0)])
    meta = [ShardMetadata([2 * i, 0], [2, 2], f"rank:{i}/cpu") for i in range(2)]
    outer = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(inner, meta[ranks.rank])],
        ShardedTensorMetadata(meta, torch.Size([4, 2]), TensorProperties(dtype=torch.float32)),
        process_group=ranks.group,
    )
    try:
        dcp_optimizer._get_state_dict_2d_layout({"w": outer})
    except ValueError as error:
        return str(error)
    return "nothing was refused"


if __name__ == "__main__":
    unittest.main()
