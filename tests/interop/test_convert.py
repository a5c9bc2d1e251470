"""What dcptool convert makes is read by PyTorch and by the safetensors package, and equals what PyTorch's own conversions make."""

import json
import pathlib
import subprocess
import tempfile
import unittest

import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import format_utils
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from common import RELEASE, SAVE_STATE, TOOL, main, run, torch_load
from content import digest, digests, tensor_bytes
from test_library import fill, flat, state

# What safetensors files can hold, by PyTorch's names.
SAFETENSORS_DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool uint16 uint32 uint64 complex64 float8_e4m3fn float8_e5m2 "
    "float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
).split()


def convert(source, target, form, *options):
    return json.loads(run(TOOL, "convert", "--json", "--no-sync", "--to", form, *options, source, target) or "{}")


def load_pt(path):
    return torch.load(path, weights_only=True)


def fails(source, target, form, *options):
    command = [TOOL, "convert", "--quiet", "--no-sync", "--to", form, *options, source, target]
    done = subprocess.run([str(a) for a in command], capture_output=True, text=True)
    assert done.returncode == 1, (done.returncode, done.stderr)
    return done.stderr


def bits(dtype, shape=(3, 8)):
    """A tensor of that dtype with all kinds of bits; valid ones only for bool."""
    generator = torch.Generator().manual_seed(7)
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape[:-1], shape[-1] * size), generator=generator, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype))


def all_dtypes():
    return {f"d.{name}": bits(name) for name in SAFETENSORS_DTYPES if hasattr(torch, name)}


def nested(value):
    """The tree with tensors as digests, for comparing."""
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, dict):
        return {key: nested(v) for key, v in value.items()}
    return [nested(v) for v in value] if isinstance(value, list) else value


class Convert(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.dir = pathlib.Path(directory.name)

    def save_dcp(self, content, **options):
        path = self.dir / "saved"
        dcp.save(content, storage_writer=dcp.FileSystemWriter(str(path), **options), no_dist=True)
        return path

    # ---- torch.save ----

    def test_to_torch_is_what_pytorch_makes(self):
        tied = torch.arange(12.0).reshape(3, 4)
        content = {
            "model": {"layers.0.weight": tied, "head.weight": tied, "bias": torch.ones(5, dtype=torch.bfloat16)},
            "optim": {"state": {0: {"exp_avg": torch.randn(3, 4), "step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
            "empty": torch.zeros(0, 3),
            "step": 1000,
        }
        saved = self.save_dcp(content)
        format_utils.dcp_to_torch_save(str(saved), str(self.dir / "theirs.pt"))
        convert(saved, self.dir / "ours.pt", "torch")
        ours = torch.load(self.dir / "ours.pt", weights_only=True)
        theirs = torch.load(self.dir / "theirs.pt", weights_only=False)
        self.assertEqual(nested(ours), nested(theirs))
        self.assertEqual(ours["model"]["layers.0.weight"].shape, (3, 4))

    def test_views_share_their_storage_as_before(self):
        w, x = torch.arange(24.0).reshape(4, 6), torch.arange(15)
        c = torch.complex(torch.arange(6.0), torch.ones(6))
        state = {"part": w[1:3], "t": w.t(), "w": w, "columns": w[:, 2:4], "flat": w.view(-1), "again": w[1:3], "rows": w[::2],
                 "wide": w[0].expand(5, 6), "one": w[3, 5], "none": w[:0], "row": w[3],
                 "left": x[:10], "right": x[5:], "c": c, "conj": c.conj()[2:4], "apart": w.clone()}  # fmt: skip
        torch.save(state, self.dir / "from.pt")
        report = convert(self.dir / "from.pt", self.dir / "to.pt", "torch")
        loaded = load_pt(self.dir / "to.pt")
        self.assertEqual(digests(loaded), digests(state))
        of_w = ("part", "t", "columns", "flat", "again", "rows", "wide", "one", "row")
        place = lambda tensor: (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())  # noqa: E731
        base = loaded["w"].untyped_storage()
        for name in of_w:
            self.assertEqual(place(loaded[name]), (base.data_ptr(), *place(state[name])[1:]), name)
        self.assertEqual(base.nbytes(), w.nbytes)
        self.assertEqual(report["shared"], len(of_w))
        others = {loaded[name].untyped_storage().data_ptr() for name in ("w", "left", "right", "c", "conj", "apart")}
        self.assertEqual(len(others), 6)  # none of the halves holds the other; a conjugate is written resolved
        loaded["row"].zero_()
        self.assertEqual(loaded["w"][3].sum(), 0)
        # without what it is a view of a tensor has its own elements alone; casts keep the sharing
        convert(self.dir / "from.pt", self.dir / "part.pt", "torch", "--include", "columns", "--include", "part")
        loaded = load_pt(self.dir / "part.pt")
        self.assertEqual([loaded[name].untyped_storage().nbytes() for name in ("columns", "part")], [32, 48])
        convert(self.dir / "from.pt", self.dir / "cast.pt", "torch", "--cast", "w=float64", "--cast", "columns=float64")
        loaded = load_pt(self.dir / "cast.pt")
        self.assertEqual(place(loaded["columns"])[0], place(loaded["w"])[0])
        self.assertTrue(torch.equal(loaded["columns"], w[:, 2:4].double()) and torch.equal(loaded["t"], w.t()))

    def test_empty_containers_come_back(self):
        """A DCP directory has the names that PyTorch's flattening gives, and libdcp's own notes of what that loses."""
        state = {"a": {}, "l": [], "t": (), "d": {"e": {}, "f": [], "g": [[], {}], "h": [{}], "i": torch.ones(2),
                 "j": [torch.ones(1), []], "k": ({},)}, "z": {"y": {"x": {}}}, "m": [[[]], [[{}]]]}  # fmt: skip
        torch.save(state, self.dir / "from.pt")
        convert(self.dir / "from.pt", self.dir / "dcp", "dcp")
        names = {item["fqn"] for item in json.loads(run(TOOL, "ls", "--json", self.dir / "dcp"))["items"]}
        self.assertEqual(names, set(flatten_state_dict(state)[0]))
        convert(self.dir / "dcp", self.dir / "back.pt", "torch")
        convert(self.dir / "from.pt", self.dir / "straight.pt", "torch")
        for name in ("back.pt", "straight.pt"):
            self.assertEqual(repr(load_pt(self.dir / name)), repr(state))

    def test_to_torch_keeps_ties_and_the_tree(self):
        tied = torch.arange(12.0)
        torch.save({"model": {"a": tied, "b": tied, "c": tied[:4]}, "ids": {0: 1, "x": {}}, "n": [1, tied]}, self.dir / "from.pt")
        convert(self.dir / "from.pt", self.dir / "c", "dcp")
        convert(self.dir / "c", self.dir / "to.pt", "torch")
        loaded = torch.load(self.dir / "to.pt", weights_only=True)
        self.assertEqual(loaded["model"]["a"].data_ptr(), loaded["model"]["b"].data_ptr())
        self.assertEqual(loaded["ids"], {0: 1, "x": {}})
        self.assertEqual(list(loaded), ["model", "ids", "n"])
        self.assertTrue(torch.equal(loaded["n"][1], tied) and torch.equal(loaded["model"]["c"], tied[:4]))

    def test_overlapping_tensors_are_named(self):
        whole = torch.arange(10.0)
        torch.save({"a": whole[:6], "b": whole[5:], "c": torch.ones(2)}, self.dir / "from.pt")
        message = fails(self.dir / "from.pt", self.dir / "m.safetensors", "safetensors", "--alias", "error")
        self.assertIn('"a" and "b" overlap', message)
        convert(self.dir / "from.pt", self.dir / "m.safetensors", "safetensors")
        self.assertEqual(digests(safetensors.torch.load_file(self.dir / "m.safetensors")), digests(flatten(self.dir / "from.pt")))

    def test_to_torch_of_everything(self):
        whole = self.dir / "whole.pt"
        torch.save(state(), whole)
        convert(whole, self.dir / "again.pt", "torch")
        loaded = torch.load(self.dir / "again.pt", weights_only=False)
        convert(whole, self.dir / "c", "dcp")
        self.assertEqual(digests(torch_load(self.dir / "c")), digests(flat()))
        self.assertEqual(set(loaded), set(state()))

    def test_torch_to_dcp_is_what_pytorch_makes(self):
        content = {"model": {"w": torch.randn(7, 3), "b": torch.ones(2, dtype=torch.int64)}, "opt": {"lr": 0.5, "betas": (1, 2)}, "n": 3}
        torch.save(content, self.dir / "from.pt")
        format_utils.torch_save_to_dcp(str(self.dir / "from.pt"), str(self.dir / "theirs"))
        convert(self.dir / "from.pt", self.dir / "ours", "dcp")
        self.assertEqual(digests(torch_load(self.dir / "ours")), digests(torch_load(self.dir / "theirs")))
        a = dcp.FileSystemReader(str(self.dir / "ours")).read_metadata()
        b = dcp.FileSystemReader(str(self.dir / "theirs")).read_metadata()
        self.assertEqual(a.planner_data, b.planner_data)

    def test_views_of_one_storage_are_checked_and_copied(self):
        base = torch.arange(3 << 20, dtype=torch.int32).view(-1, 1024)
        views = {"whole": base, "tail": base[1:], "turned": base.t(), "thin": base[::2, ::3], "few": base[5, 7:11]}
        source = self.dir / "views.pt"
        torch.save(views, source)
        convert(source, self.dir / "views", "dcp")
        found = {name: torch.zeros_like(t, memory_format=torch.contiguous_format) for name, t in views.items()}
        dcp.load(found, checkpoint_id=self.dir / "views", no_dist=True)
        for name, tensor in views.items():
            self.assertTrue(torch.equal(found[name], tensor), name)
        content = bytearray(source.read_bytes())
        content[content.index(base[-1].numpy().tobytes()) + 17] ^= 8
        source.write_bytes(content)
        for name in views:  # also where the broken byte is not one of the view's, since nothing tells that
            for ranks in ("1", "2"):
                text = fails(source, self.dir / "broken", "dcp", "--include", name, "--ranks", ranks)
                self.assertIn("crc-32", text)
                self.assertFalse((self.dir / "broken" / ".metadata").exists())

    def test_a_bare_state_gets_the_level_that_loaders_expect(self):
        torch.save({"w": torch.ones(2)}, self.dir / "bare.pt")
        convert(self.dir / "bare.pt", self.dir / "c", "dcp", "--prefix", "add:model.")
        target = {"model": {"w": torch.zeros(2)}}
        dcp.load(target, checkpoint_id=str(self.dir / "c"), no_dist=True)
        self.assertTrue(torch.equal(target["model"]["w"], torch.ones(2)))
        convert(self.dir / "c", self.dir / "back.pt", "torch", "--prefix", "strip:model.")
        self.assertEqual(list(torch.load(self.dir / "back.pt", weights_only=True)), ["w"])

    def test_as_several_ranks(self):
        torch.save({"w": torch.arange(70.0).reshape(10, 7), "s": torch.tensor(3)}, self.dir / "from.pt")
        convert(self.dir / "from.pt", self.dir / "c", "dcp", "--ranks", "4")
        self.assertTrue(torch.equal(torch_load(self.dir / "c")["w"], torch.arange(70.0).reshape(10, 7)))
        chunks = dcp.FileSystemReader(str(self.dir / "c")).read_metadata().state_dict_metadata["w"].chunks
        self.assertEqual([list(c.sizes) for c in chunks], [[3, 7], [3, 7], [3, 7], [1, 7]])

    # ---- safetensors ----

    def test_every_dtype_both_ways(self):
        content = all_dtypes()
        saved = self.save_dcp(content)
        convert(saved, self.dir / "m.safetensors", "safetensors")
        with safetensors.safe_open(self.dir / "m.safetensors", "pt") as f:
            self.assertEqual(set(f.keys()), set(content))
            self.assertEqual(f.metadata()["format"], "pt")
        loaded = safetensors.torch.load_file(self.dir / "m.safetensors")
        self.assertEqual(digests(loaded), digests(content))
        convert(self.dir / "m.safetensors", self.dir / "back", "dcp")
        self.assertEqual(digests(torch_load(self.dir / "back")), digests(content))
        convert(self.dir / "m.safetensors", self.dir / "back.pt", "torch")
        self.assertEqual(digests(flatten(self.dir / "back.pt")), digests(content))

    def test_what_the_package_wrote(self):
        safetensors.torch.save_file(all_dtypes(), self.dir / "m.safetensors", metadata={"format": "pt", "note": "x\"y"})
        convert(self.dir / "m.safetensors", self.dir / "again.safetensors", "safetensors")
        self.assertEqual(digests(safetensors.torch.load_file(self.dir / "again.safetensors")), digests(all_dtypes()))
        with safetensors.safe_open(self.dir / "again.safetensors", "pt") as f:
            self.assertEqual(f.metadata(), {"format": "pt", "note": "x\"y"})

    def test_hf_in_several_files(self):
        content = {f"layer.{i}.w": torch.randn(64, 32) for i in range(5)} | {"scale": torch.tensor(2.0)}
        saved = self.save_dcp(content)
        convert(saved, self.dir / "hf", "hf", "--max-file-size", "20KiB")
        index = json.loads((self.dir / "hf" / "model.safetensors.index.json").read_text())
        self.assertEqual(index["metadata"]["total_size"], sum(t.numel() * 4 for t in content.values()))
        self.assertEqual(set(index["weight_map"]), set(content))
        self.assertEqual(sorted(set(index["weight_map"].values())), [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)])
        loaded = {}
        for name in set(index["weight_map"].values()):
            part = safetensors.torch.load_file(self.dir / "hf" / name)
            self.assertTrue(all(index["weight_map"][key] == name for key in part))
            loaded |= part
        self.assertEqual(digests(loaded), digests(content))
        convert(self.dir / "hf", self.dir / "again", "hf", "--exclude", "scale")
        again = json.loads((self.dir / "again" / "model.safetensors.index.json").read_text())
        del index["weight_map"]["scale"]
        self.assertEqual(again["weight_map"], index["weight_map"])  # the source's files are kept

    @unittest.skipIf(RELEASE < (2, 9), "no HuggingFaceStorageReader")
    def test_pytorchs_hf_reader_reads_it(self):
        content = {"a": torch.randn(8, 4), "b": torch.arange(5)}
        convert(self.save_dcp(content), self.dir / "hf", "hf")
        target = {"a": torch.zeros(8, 4), "b": torch.zeros(5, dtype=torch.int64)}
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(self.dir / "hf")), no_dist=True)
        self.assertEqual(digests(target), digests(content))

    @unittest.skipIf(RELEASE < (2, 9), "no HuggingFaceStorageReader")
    def test_pytorchs_hf_reader_reads_our_shards(self):
        run(SAVE_STATE, self.dir / "shards", 0, "hf")
        names = sorted(path.name for path in (self.dir / "shards").iterdir())
        self.assertEqual(names, [f"shard-00001-model-{i:05}-of-00004.safetensors" for i in range(1, 5)])
        expected = {"sharded": fill(torch.int32, 63, 103).reshape(7, 9), "plain": fill(torch.uint8, 4, 105),
                    "scalar": fill(torch.float32, 1, 106).reshape(())}
        target = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(self.dir / "shards")), no_dist=True)
        self.assertEqual(digests(target), digests(expected))
        convert(self.dir / "shards", self.dir / "whole", "hf")
        self.assertEqual(digests(safetensors.torch.load_file(self.dir / "whole" / "model.safetensors")), digests(expected))

    @unittest.skipIf(RELEASE < (2, 9), "no HuggingFaceStorageReader")
    def test_whole_tensors_by_a_mapping_are_as_pytorchs(self):
        """The same files and the same index as PyTorch's writer makes of the same mapping."""
        expected = {"plain": fill(torch.uint8, 4, 105), "scalar": fill(torch.float32, 1, 106).reshape(())}
        writer = dcp.HuggingFaceStorageWriter(str(self.dir / "theirs"), fqn_to_index_mapping={"plain": 2, "scalar": 1})
        dcp.save(expected, storage_writer=writer, no_dist=True)
        run(SAVE_STATE, self.dir / "ours", 0, "hf-whole")
        self.assertEqual(*(sorted(path.name for path in (self.dir / side).iterdir()) for side in ("ours", "theirs")))
        self.assertEqual(*(json.loads((self.dir / side / "model.safetensors.index.json").read_text()) for side in ("ours", "theirs")))
        target = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(self.dir / "ours")), no_dist=True)
        self.assertEqual(digests(target), digests(expected))

    # ---- casts ----

    def test_casts_are_pytorchs(self):
        generator = torch.Generator().manual_seed(3)
        sources = {
            "float32": torch.randn(4000, generator=generator) * torch.exp2(torch.randint(-30, 14, (4000,), generator=generator)),
            "float64": torch.randn(4000, generator=generator, dtype=torch.float64) * 300,
            "float16": torch.randn(4000, generator=generator).to(torch.float16),
            "bfloat16": torch.randn(4000, generator=generator).to(torch.bfloat16),
            "int64": torch.randint(-120, 120, (4000,), generator=generator),
            "bool": torch.randint(0, 2, (4000,), generator=generator).bool(),
            "float8_e4m3fn": torch.randn(4000, generator=generator).to(torch.float8_e4m3fn),
            "float8_e5m2fnuz": torch.randn(4000, generator=generator).to(torch.float8_e5m2fnuz),
        }
        saved = self.save_dcp(sources)
        for name in "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz int32 bool".split():
            target = self.dir / f"{name}.pt"
            convert(saved, target, "torch", "--cast", f"*={name}", "--allow-overflow")
            loaded = torch.load(target, weights_only=True)
            for key, value in sources.items():
                dtype = getattr(torch, name)
                expected = value.to(dtype)
                largest = torch.finfo(dtype).max if dtype.is_floating_point else 2**31 - 1
                fits = torch.isfinite(expected.double()) & (value.double().abs() <= largest)  # releases differ beyond
                with self.subTest(key=key, to=name):
                    self.assertEqual(loaded[key].dtype, expected.dtype)
                    self.assertEqual(tensor_bytes(loaded[key][fits]), tensor_bytes(expected[fits]))

    def test_a_cast_that_overflows_is_refused_with_how_many(self):
        saved = self.save_dcp({"w": torch.tensor([1.0, 70000.0, -1e9])})
        self.assertIn("2 of the 3 numbers", fails(saved, self.dir / "x", "hf", "--cast", "w=float16"))
        self.assertFalse(list(self.dir.glob("x/*.safetensors*")))
        report = convert(saved, self.dir / "x", "hf", "--cast", "w=float16", "--allow-overflow")
        self.assertEqual((report["cast"], report["lost"]), (3, 2))

    # ---- quantised tensors ----

    def quantized(self):
        """A directory with an index, as DeepSeek's and gpt-oss's are: scales beside the weights, or in another file."""
        generator = torch.Generator().manual_seed(5)
        path = self.dir / "quantized"
        path.mkdir()
        first = {
            "a.weight": (torch.randn(300, 200, generator=generator) * 30).to(torch.float8_e4m3fn),
            "b.weight": torch.randn(128, 256, generator=generator).to(torch.float8_e4m3fn),
            "plain.weight": torch.randn(5, 6, generator=generator),
            "e_blocks": torch.randint(0, 256, (3, 4, 5, 16), generator=generator, dtype=torch.uint8),
        }
        second = {
            "a.weight_scale_inv": torch.rand(3, 2, generator=generator) + 0.01,
            "b.weight_scale_inv": torch.rand(1, 2, generator=generator),
            "e_scales": torch.randint(100, 140, (3, 4, 5), generator=generator, dtype=torch.uint8),
        }
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        for name, part in zip(names, (first, second)):
            safetensors.torch.save_file(part, path / name)
        index = {key: name for name, part in zip(names, (first, second)) for key in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return path

    @unittest.skipIf(RELEASE < (2, 10), "no QuantizedHuggingFaceStorageReader for both forms")
    def test_dequantized_as_pytorch_does(self):
        from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

        path = self.quantized()
        for name in ("float32", "bfloat16"):
            dtype = getattr(torch, name)
            shapes = {"a.weight": (300, 200), "b.weight": (128, 256), "plain.weight": (5, 6), "e_blocks": (3, 4, 160)}
            target = {key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()}
            target["plain.weight"] = torch.zeros(5, 6)
            dcp.load(target, storage_reader=QuantizedHuggingFaceStorageReader(str(path), target_dtype=dtype), no_dist=True)
            # PyTorch's plan of 4-bit tensors has chunks of the stored size, so that most of the target stays as it was.
            target["e_blocks"] = unpacked(*(safetensors.torch.load_file(path / f"model-0000{i}-of-00002.safetensors")[key]
                                            for i, key in ((1, "e_blocks"), (2, "e_scales")))).to(dtype)
            for form, out in (("torch", "q.pt"), ("dcp", "q"), ("safetensors", "q.safetensors")):
                report = convert(path, self.dir / out, form, f"--dequantize={name}", "--force")
                self.assertEqual((report["tensors"], report["dequantized"], report["lost"]), (4, 3, 0))
            loaded = flatten(self.dir / "q.pt")
            self.assertEqual(digests(loaded), digests(target))
            self.assertEqual(digests(torch_load(self.dir / "q")), digests(target))
            self.assertEqual(digests(safetensors.torch.load_file(self.dir / "q.safetensors")), digests(target))

    def test_left_alone_without_being_asked(self):
        path = self.quantized()
        convert(path, self.dir / "m.safetensors", "safetensors")
        loaded = safetensors.torch.load_file(self.dir / "m.safetensors")
        expected = {}
        for part in path.glob("*.safetensors"):
            expected |= safetensors.torch.load_file(part)
        self.assertEqual(digests(loaded), digests(expected))

    def test_scales_that_do_not_fit_are_named(self):
        part = {"w.weight": torch.zeros(300, 200).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(2, 2)}
        safetensors.torch.save_file(part, self.dir / "m.safetensors")
        message = fails(self.dir / "m.safetensors", self.dir / "q.pt", "torch", "--dequantize")
        self.assertIn('"w.weight"', message)
        self.assertIn("[2, 2]", message)

    # ---- consolidation ----

    @unittest.skipIf(RELEASE < (2, 9), "no consolidation")
    def test_consolidation_of_shards(self):
        for axis in (0, 1):
            whole = {"w": bits("bfloat16", (24, 40)), "i": torch.arange(960).reshape(24, 40), "b": bits("bool", (24, 40))}
            shards = self.dir / f"shards{axis}"
            shards.mkdir()
            for rank in range(4):
                parts, offsets = {}, {}
                for name, tensor in whole.items():
                    part = tensor.chunk(4, axis)[rank].contiguous()
                    parts[name] = part
                    offsets[name] = {"saved_offsets": [rank * part.shape[0], 0] if axis == 0 else [0, rank * part.shape[1]]}
                if rank == 0:
                    parts["scalar"], offsets["scalar"] = torch.tensor(5.5), {"saved_offsets": []}
                safetensors.torch.save_file(
                    parts, shards / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
                    metadata={"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
            convert(shards, self.dir / f"hf{axis}", "hf")
            loaded = safetensors.torch.load_file(self.dir / f"hf{axis}" / "model.safetensors")
            self.assertEqual(digests(loaded), digests(whole | {"scalar": torch.tensor(5.5)}))


def unpacked(blocks, scales):
    """What bytes of two float4 each, low nibble first, and exponents stand for."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = values[torch.stack((blocks & 15, blocks >> 4), -1).long()]
    return torch.ldexp(numbers, scales.int()[..., None, None] - 127).reshape(*blocks.shape[:-2], -1)


def flatten(path):
    """Leaves of a torch.save file by name."""
    out = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, v in value.items():
                walk(v, f"{name}.{key}" if name else str(key))
        else:
            out[name] = value

    walk(torch.load(path, weights_only=True), "")
    return out


if __name__ == "__main__":
    main()
