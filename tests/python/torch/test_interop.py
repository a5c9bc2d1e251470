"""The interop matrix: PyTorch writes and libdcp reads, libdcp writes and PyTorch reads, plain and sharded."""

import json
import random
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import libdcp.torch as dcp
import pool
from libdcp.torch import filesystem
from libdcp.torch.metadata import TensorStorageMetadata
from hooked import HookedLoad, HookedSave
from support import GOLDEN, RELEASE, TestCase, golden_cases, needs, numbered

from content import digest, digests, targets_for  # of the interop tests, which `support` has put on the path


def known(expected):
    return all(hasattr(torch, item["dtype"]) for item in expected["tensors"].values())


def nested(state, paths):
    """What a program would have given to save: entries at their paths."""
    from libdcp.torch._traverse import set_element

    tree = {}
    for name, value in state.items():
        set_element(tree, paths.get(name, (name,)), value)
    return tree


class Golden(TestCase):
    """Every golden case, whatever release wrote it."""

    def cases(self):
        for case, expected in golden_cases():
            if (case / "ckpt" / ".metadata").exists() and known(expected):
                yield case, expected

    def load_flat(self, path, load, reader):
        state = targets_for(dcp.FileSystemReader(path).read_metadata())
        if state:
            load(state, storage_reader=reader(path), no_dist=True)
        return state

    def test_pytorch_wrote_libdcp_reads(self):
        n = 0
        for case, expected in self.cases():
            with self.subTest(case=case.relative_to(GOLDEN)):
                found = digests(self.load_flat(case / "ckpt", dcp.load, dcp.FileSystemReader))
                self.assertEqual(found, {"tensors": expected["tensors"], "objects": expected["objects"]})
                n += 1
        self.assertGreater(n, 30)

    def test_pytorch_wrote_libdcp_reads_through_the_hooks(self):
        for case, expected in self.cases():
            with self.subTest(case=case.relative_to(GOLDEN)):

                class Reader(dcp.FileSystemReader):
                    def prepare_local_plan(self, plan):
                        return plan

                found = digests(self.load_flat(case / "ckpt", dcp.load, Reader))
                self.assertEqual(found, {"tensors": expected["tensors"], "objects": expected["objects"]})

    def test_pytorch_wrote_pytorch_reads_through_our_reader(self):
        for case, expected in self.cases():
            if case.name == "safetensors_records":
                continue
            with self.subTest(case=case.relative_to(GOLDEN)):
                with dcp.allow_pickle():
                    found = digests(self.load_flat(case / "ckpt", torch_dcp.load, dcp.FileSystemReader))
                self.assertEqual(found, {"tensors": expected["tensors"], "objects": expected["objects"]})

    def test_libdcp_writes_pytorch_reads(self):
        """The state of every case, saved again by libdcp: by name, and nested as it was."""

        class Hooked(dcp.FileSystemWriter):
            def finish(self, metadata, results):
                super().finish(metadata, results)

        for case, expected in self.cases():
            state = self.load_flat(case / "ckpt", dcp.load, dcp.FileSystemReader)
            paths = dcp.FileSystemReader(case / "ckpt").read_metadata().planner_data or {}
            for writer in (dcp.FileSystemWriter, Hooked):
                path = self.root / "-".join((writer.__name__, *case.parts[-2:]))
                with self.subTest(case=case.relative_to(GOLDEN), writer=writer.__name__):
                    dcp.save(nested(state, paths), storage_writer=writer(path), no_dist=True)
                    found = digests(self.load_flat(path, torch_dcp.load, torch_dcp.FileSystemReader))
                    self.assertEqual(found["tensors"], expected["tensors"])
                    # An object that was a leaf by an old rule may be several now.
                    if set(found["objects"]) == set(expected["objects"]):
                        self.assertEqual(found["objects"], expected["objects"])

    def test_options_of_the_writer(self):
        case = GOLDEN / "2.13.0" / "dtypes"
        expected = json.loads((case / "expect.json").read_text())
        state = self.load_flat(case / "ckpt", dcp.load, dcp.FileSystemReader)
        from libdcp.torch._extension import ZStandard

        for number, options in enumerate(
            (
                {"single_file_per_rank": False},
                {"thread_count": 3},
                {"sync_files": False},
                {"_extensions": [ZStandard()]},
                {"_extensions": []},
            )
        ):
            if options.get("_extensions") and not ZStandard.is_available():
                continue
            with self.subTest(options=options):
                path = self.root / str(number)
                dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
                found = digests(self.load_flat(path, torch_dcp.load, torch_dcp.FileSystemReader))
                self.assertEqual(found, {"tensors": expected["tensors"], "objects": expected["objects"]})

    @needs(filesystem, "SerializationFormat")
    def test_safetensors_records(self):
        """Which only libdcp reads."""
        state = {"a": numbered(3, 4), "b": numbered(5, dtype=torch.bfloat16), "o": "text"}
        writer = dcp.FileSystemWriter(self.path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
        dcp.save(state, storage_writer=writer, no_dist=True)
        found = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16), "o": None}
        dcp.load(found, checkpoint_id=self.path, no_dist=True)
        self.assertStateEqual(found, state)

    def test_rank_local(self):
        """Saved without collectives by 4 ranks: each loads its own again."""
        for case, expected in golden_cases(rank_local=True):
            for reader in ("ours", "hooked"):
                with self.subTest(case=case.relative_to(GOLDEN), reader=reader):
                    found = pool.run(load_own, str(case / "ckpt"), reader == "hooked")
                    for rank, values in expected["per_rank"].items():
                        self.assertEqual(found[int(rank)], values["mine"])


def load_own(ranks, path, hooked):
    entry = dcp.FileSystemReader(path).read_metadata(rank=ranks.rank).state_dict_metadata["mine"]
    state = {"mine": torch.zeros(entry.size, dtype=entry.properties.dtype)}
    planner = HookedLoad() if hooked else None
    dcp.load(state, checkpoint_id=path, process_group=ranks.group, planner=planner)
    return digest(state["mine"])


def full():
    """Tensors of several dtypes, with extents that do not divide by the numbers of ranks."""
    return {
        "rows": numbered(10, 7),
        "cols": numbered(5, 9, dtype=torch.bfloat16),
        "grid": numbered(7, 11, dtype=torch.int64),
        "few": numbered(3, 2, dtype=torch.int32),
        "copied": numbered(8, dtype=torch.float16),
        "plain": numbered(3, 4, dtype=torch.int16),
        "strided": numbered(13, 3, dtype=torch.float64),
        "old": numbered(11, 4),
    }


OBJECTS = {"step": 7, "note": {"x": (1, "two")}}


def place(tensors, ranks, turned):
    """The tensors over the ranks: rows here are columns where `turned`."""
    if ranks.size == 1:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    mesh = ranks.line()
    by_name = {"rows": Shard(1 if turned else 0), "cols": Shard(0 if turned else 1), "few": Shard(0), "copied": Replicate(),
               "grid": Shard(1 if turned else 0), "strided": Shard(0)}  # fmt: skip
    placed = {name: distribute_tensor(tensors[name], mesh, [spec]) for name, spec in by_name.items()}
    if ranks.size == 4:
        square = DeviceMesh("cpu", torch.tensor(ranks.members).reshape(2, 2))
        placed["grid"] = distribute_tensor(tensors["grid"], square, [Shard(0), Shard(1)])
        placed["strided"] = distribute_tensor(tensors["strided"], square, [Shard(0), Shard(0)])
    placed["plain"] = tensors["plain"].clone()
    placed["old"] = sharded_tensor(tensors["old"], ranks)
    return placed


def sharded_tensor(whole, ranks):
    """A ShardedTensor with more rows the higher the rank."""
    n = whole.shape[0]
    bounds = [0] + [min(1 + r * (n // ranks.size), n) for r in range(1, ranks.size)] + [n]
    start, end = bounds[ranks.rank], bounds[ranks.rank + 1]
    shard = LocalShard.from_tensor_and_offsets(whole[start:end].clone(), [start, 0], dist.get_rank())
    return init_from_local_shards([shard], list(whole.shape), process_group=ranks.group)


def local_parts(value):
    if hasattr(value, "local_shards"):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if hasattr(value, "to_local") else value]


def zeroed(placed):
    for value in placed.values():
        for part in local_parts(value):
            part.zero_()
    return placed


def save_sharded(ranks, path, ours, hooked):
    module = dcp if ours else torch_dcp
    state = {**place(full(), ranks, False), **OBJECTS}
    planner = HookedSave() if hooked else None
    module.save(state, checkpoint_id=path, process_group=ranks.group, planner=planner, no_dist=ranks.size == 1)


def load_sharded(ranks, path, ours, hooked):
    """Loads in another sharding and compares all local parts. Returns what differs."""
    module = dcp if ours else torch_dcp
    expected = place(full(), ranks, True)
    state = {**zeroed(place(full(), ranks, True)), "step": 0, "note": {"x": None}}
    planner = HookedLoad() if hooked else None
    module.load(state, checkpoint_id=path, process_group=ranks.group, planner=planner, no_dist=ranks.size == 1)
    wrong = [name for name in expected if not all(map(torch.equal, local_parts(state[name]), local_parts(expected[name])))]
    return wrong + [name for name in OBJECTS if state[name] != OBJECTS[name]]


class Sharded(TestCase):
    def test_every_writer_with_every_reader_and_other_numbers_of_ranks(self):
        """4 and 2 ranks save, with PyTorch, in C and through the hooks; 4, 3 and 1 load, likewise."""
        ways = {"torch": (False, False), "c": (True, False), "hooks": (True, True)}
        for world in (4, 2):
            for writer, how in ways.items():
                path = str(self.root / f"{writer}-{world}")
                pool.run(save_sharded, path, *how, world=world)
                for readers in (4, 3, 1):
                    for reader, how_to_read in ways.items():
                        if writer == "torch" and reader == "torch":
                            continue
                        for wrong in pool.run(load_sharded, path, *how_to_read, world=readers):
                            self.assertEqual(wrong, [], f"saved by {writer} on {world}, loaded by {reader} on {readers}")

    def test_four_to_three_to_one(self):
        first, second = str(self.root / "4"), str(self.root / "3")
        pool.run(save_sharded, first, True, False, world=4)
        pool.run(load_and_save, first, second, world=3)
        self.assertEqual(pool.run(load_sharded, second, True, False, world=1), [[]])
        self.assertEqual(pool.run(load_sharded, second, False, False, world=1), [[]])

    def test_the_same_values_whoever_saved(self):
        for ours, hooked in ((False, False), (True, False), (True, True)):
            path = self.root / f"{ours}{hooked}"
            pool.run(save_sharded, str(path), ours, hooked, world=4)
            state = targets_for(dcp.FileSystemReader(path).read_metadata())
            dcp.load(state, checkpoint_id=path, no_dist=True)
            for name, tensor in full().items():
                self.assertTrue(torch.equal(state[name], tensor), name)


def load_and_save(ranks, first, second):
    state = {**zeroed(place(full(), ranks, True)), "step": 0, "note": {"x": None}}
    dcp.load(state, checkpoint_id=first, process_group=ranks.group)
    dcp.save(state, checkpoint_id=second, process_group=ranks.group)


# ---- plans ----


def random_state(seed, ranks):
    """The same on every rank for a seed, but for what each rank has of it."""
    rng = random.Random(seed)
    mesh = ranks.line()
    square = DeviceMesh("cpu", torch.tensor(ranks.members).reshape(2, -1)) if ranks.size == 4 else None
    state = {}
    for number in range(rng.randrange(1, 9)):
        shape = [rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(rng.randrange(0, 4))]
        tensor = numbered(*shape, dtype=rng.choice((torch.float32, torch.int8, torch.bfloat16)))
        kind = rng.choice(("plain", "line", "square", "object", "nested"))
        if kind in ("line", "square") and (not shape or (0 in shape and RELEASE < (2, 13))):
            kind = "plain"  # older releases cannot distribute what has no elements
        if kind == "square" and square is None:
            kind = "line"
        specs = [Shard(d) for d in range(len(shape))] + [Replicate()]
        if kind == "line":
            tensor = distribute_tensor(tensor, mesh, [rng.choice(specs)])
        elif kind == "square":
            tensor = distribute_tensor(tensor, square, [rng.choice(specs), rng.choice(specs)])
        elif kind == "object":
            tensor = rng.choice(([1, 2], "text", (1, 2), 3.5, None))
        elif kind == "nested":
            tensor = {"x": {"y": tensor}, "l": [tensor, {"z": number}], "empty": {}}
        state[f"item{number}"] = tensor
    state["own"] = {str(ranks.rank): rng.random()}
    return state


def chunks_of(path):
    """What a checkpoint holds: names of objects, and (name, offsets, sizes) of all chunks that are not empty."""
    metadata = torch_dcp.FileSystemReader(path).read_metadata()
    chunks = set()
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            chunks.add(name)
            continue
        form = (name, tuple(entry.size), str(entry.properties.dtype))
        chunks.add(form)
        chunks.update((*form, tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if 0 not in c.sizes)
    return chunks


def save_random_both_ways(ranks, root, seeds):
    differing = []
    for seed in seeds:
        state = random_state(seed, ranks)
        for module, name in ((dcp, "ours"), (torch_dcp, "theirs")):
            module.save(state, checkpoint_id=f"{root}/{seed}-{name}", process_group=ranks.group)
        ranks.barrier()
        if ranks.rank == 0:
            ours, theirs = chunks_of(f"{root}/{seed}-ours"), chunks_of(f"{root}/{seed}-theirs")
            if ours != theirs:
                differing.append((seed, sorted(map(str, ours ^ theirs))))
    return differing


class Plans(TestCase):
    def test_C_plans_what_pytorch_plans(self):
        start = random.randrange(1 << 30)
        print(f"seeds from {start}")
        for world in (2, 4):
            found = pool.run(save_random_both_ways, str(self.root / str(world)), range(start, start + 12), world=world)
            self.assertEqual(found[0], [])


if __name__ == "__main__":
    unittest.main()
