"""R12: what real releases wrote, and what they are to read; deprecations."""

import logging
import pathlib
import pickle
import unittest
import warnings

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp
from libdcp.torch.format_utils import BroadcastingTorchSaveReader
from support import GOLDEN, TestCase, golden_cases, numbered


class Golden(TestCase):
    def test_R12_1_metadata_of_every_release(self):
        """Ours says the same as PyTorch's own reader, wherever that can read the file."""
        n = 0
        for case, _ in golden_cases():
            if not (case / "ckpt" / ".metadata").exists():
                continue
            try:
                theirs = torch_dcp.FileSystemReader(case / "ckpt").read_metadata()
            except Exception:  # of a later release than the one that is installed
                continue
            with self.subTest(case=case.relative_to(GOLDEN)):
                ours = dcp.FileSystemReader(case / "ckpt").read_metadata()
                self.assertEqual(set(ours.state_dict_metadata), set(theirs.state_dict_metadata))
                for name, entry in theirs.state_dict_metadata.items():
                    found = ours.state_dict_metadata[name]
                    self.assertIs(type(found), type(entry))
                    if hasattr(entry, "size"):
                        self.assertEqual(found.size, entry.size)
                        self.assertEqual(found.properties.dtype, entry.properties.dtype)
                        self.assertEqual(found.chunks, entry.chunks)
                self.assertEqual(ours.storage_data, theirs.storage_data)
                paths = {name: tuple(path) for name, path in (theirs.planner_data or {}).items() if name in theirs.state_dict_metadata}
                self.assertEqual(ours.planner_data | paths, ours.planner_data)
                n += 1
        self.assertGreater(n, 20)

    def test_R12_2_nothing_that_old_releases_do_not_know(self):
        dcp.save({"a": numbered(3), "o": 1}, checkpoint_id=self.path, no_dist=True)
        pickled = (self.path / ".metadata").read_bytes()
        self.assertNotIn(b"StorageMeta\n", pickled)
        names = set()

        class Noting(pickle.Unpickler):
            def find_class(self, module, name):
                names.add(name)
                return super().find_class(module, name)

        with open(self.path / ".metadata", "rb") as file:
            Noting(file).load()
        self.assertNotIn("StorageMeta", names)

    def test_R12_3_tensor_properties_of_five_and_of_six_values(self):
        dcp.save({"a": numbered(3)}, checkpoint_id=self.path, no_dist=True)
        states = []

        class Noting(pickle.Unpickler):
            def find_class(self, module, name):
                if name != "TensorProperties":
                    return super().find_class(module, name)
                return type(name, (), {"__setstate__": lambda properties, state: states.append(state)})

        with open(self.path / ".metadata", "rb") as file:
            Noting(file).load()
        self.assertEqual([len(state) for state in states], [5])
        strided = dcp.FileSystemReader(GOLDEN / "2.15.0" / "sharded" / "ckpt").read_metadata()
        self.assertEqual(strided.state_dict_metadata["rows"].properties.dtype, torch.float32)

    def test_R12_4_checkpoint_ids(self):
        for path in (self.root / "as_path", str(self.root / "as_text")):
            dcp.save({"a": 1}, checkpoint_id=path, no_dist=True)
            meta = dcp.FileSystemReader(path).read_metadata().storage_meta
            self.assertEqual(str(meta.checkpoint_id), str(path))

    def test_R12_5_unknown_classes_are_named(self):
        metadata = torch_dcp.FileSystemReader(GOLDEN / "2.13.0" / "shapes" / "ckpt").read_metadata()
        self.path.mkdir()

        from libdcp.torch import CheckpointException

        metadata.planner_data = {"a": pathlib.PurePosixPath("x"), **metadata.planner_data}
        metadata.state_dict_metadata["odd"] = Odd()
        (self.path / ".metadata").write_bytes(pickle.dumps(metadata))
        with self.assertRaises(CheckpointException) as caught:
            dcp.load({"a": torch.zeros(2)}, checkpoint_id=self.path, no_dist=True)
        self.assertIn("Odd", str(caught.exception))


class Odd:
    pass


class Deprecations(TestCase):
    def test_R12_6_deprecated_functions_warn_once_for_each_place(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for number in range(2):
                dcp.save_state_dict({"a": numbered(2)}, dcp.FileSystemWriter(self.root / str(number)), no_dist=True)
            for _ in range(2):
                dcp.load_state_dict({"a": torch.zeros(2)}, dcp.FileSystemReader(self.root / "0"), no_dist=True)
        texts = [str(warning.message) for warning in caught if issubclass(warning.category, FutureWarning)]
        self.assertEqual(len(texts), 2)
        self.assertTrue(texts[0].startswith("`save_state_dict` is deprecated and will be removed in future versions."))
        self.assertTrue(texts[1].startswith("`load_state_dict` is deprecated and will be removed in future versions."))

    def test_R12_7_deprecated_load_resets_first(self):
        dcp.save({"a": numbered(2)}, checkpoint_id=self.path, no_dist=True)
        resets = []

        class Reader(dcp.FileSystemReader):
            def reset(self, checkpoint_id=None):
                resets.append(checkpoint_id)
                super().reset(checkpoint_id)

        state = {"a": torch.zeros(2)}
        dcp.load_state_dict(state, Reader(self.path), no_dist=True)
        self.assertEqual(resets, [None])
        self.assertEqual(state["a"].tolist(), [0, 1])
        file = self.root / "file.pt"
        torch.save({"a": numbered(2)}, file)
        with self.assertRaisesRegex(ValueError, "use load.. with checkpoint_id"):
            dcp.load_state_dict({"a": torch.zeros(2)}, BroadcastingTorchSaveReader(file), no_dist=True)

    def test_R12_8_dedup_replicated_tensors(self):
        with self.assertLogs(logging.getLogger("torch.distributed.checkpoint.default_planner"), "WARNING") as logs:
            dcp.DefaultSavePlanner(dedup_replicated_tensors=True)
        self.assertIn("dedup_replicated_tensors", logs.output[0])

    def test_R12_10_keywords_of_all_releases(self):
        dcp.save({"a": 1}, checkpoint_id=self.path, storage_writer=None, planner=None, process_group=None, no_dist=True,
                 use_collectives=True)  # fmt: skip
        dcp.load({"a": 1}, checkpoint_id=self.path, storage_reader=None, planner=None, process_group=None, no_dist=True)

    def test_U92_quiet_internals(self):
        state = {"a": numbered(2), "o": (1, 2), "n": {"x": torch.rand(3, dtype=torch.float64)}}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("default", message="torch.distributed is disabled")
            dcp.save(state, checkpoint_id=self.path, no_dist=True)
            dcp.load({"a": torch.zeros(2), "o": None, "n": {"x": torch.zeros(3)}}, checkpoint_id=self.path, no_dist=True)


if __name__ == "__main__":
    unittest.main()
