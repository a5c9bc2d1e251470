"""R12.5, R12.9, R12.11, R12.12 and the table of public names: all are there, and what is not ours is PyTorch's very object."""

import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys
import unittest

import torch
import torch.distributed.checkpoint as torch_dcp

import libdcp.torch as dcp
from support import RELEASE, TestCase

THEIRS = "torch.distributed.checkpoint"

# module -> names with the first and the last release that has them; * for those at package level as well. A name without releases
# is in all from 2.1 on.
TABLE = """
api: CheckpointException* _wrap_exception _is_wrapped_exception
filesystem: FileSystemWriter* FileSystemReader* DEFAULT_SUFFIX _StorageInfo _StoragePrefix _write_item _split_by_size_and_type
    _item_size _SerialCpuLoader _OverlappingCpuLoader FileSystem@2.3 FileSystemBase@2.3 _FileSystemWriter@2.4 _metadata_fn@2.4
    _StorageWriterTransforms@2.7 _StorageReaderTransforms@2.7 SerializationFormat@2.8 CURRENT_DCP_VERSION@2.9
storage: StorageReader* StorageWriter* WriteResult
metadata: BytesStorageMetadata* ChunkStorageMetadata* Metadata* TensorStorageMetadata* MetadataIndex STATE_DICT_TYPE STORAGE_TYPES
    TENSOR_TYPE@2.1-2.2 TensorProperties@2.3 StorageMeta@2.4
planner: LoadPlan* LoadPlanner* ReadItem* SavePlan* SavePlanner* WriteItem* WriteItemType LoadItemType TensorWriteData
    BytesIOWriteData@2.8
default_planner: DefaultLoadPlanner* DefaultSavePlanner* create_default_local_load_plan create_default_global_load_plan
    create_default_local_save_plan create_default_global_save_plan _create_default_local_metadata _validate_global_plan
    _check_box_overlap _check_box_bounds _EmptyStateDictLoadPlanner@2.4
planner_helpers: create_read_items_for_chunk_list _create_read_item_for_tensor _create_read_item_for_byteio _create_read_items
    _create_write_items _create_default_metadata_only_plan _create_chunk_list@2.3 _init_state_dict@2.3 _compare_save_plans@2.7
    _merge_delta_local_plans@2.7 _contains_usable_plan@2.8
optimizer: load_sharded_optimizer_state_dict*
state_dict_loader: load_state_dict* load*@2.2 _load_state_dict@2.2 _load_state_dict_from_keys@2.4
state_dict_saver: save_state_dict* save*@2.2 _save_state_dict@2.2 _stateful_to_state_dict@2.3 async_save*@2.3
    AsyncCheckpointerType@2.7 AsyncSaveResponse@2.9
_async_executor: _AsyncCheckpointExecutor@2.7
_async_thread_executor: _ThreadBasedAsyncCheckpointExecutor@2.7
_async_process_executor: _ProcessBasedAsyncCheckpointExecutor@2.7
_storage_utils: _storage_setup@2.3
_version: _derived_version@2.5
stateful: Stateful@2.2 StatefulT@2.2
state_dict: StateDictOptions@2.2 get_model_state_dict@2.2 get_optimizer_state_dict@2.2 get_state_dict@2.2
    set_model_state_dict@2.2 set_optimizer_state_dict@2.2 set_state_dict@2.2 FQNS_T@2.2 PrimitiveType@2.2 ValueType@2.2
    DictValueType@2.2 ListDictValueType@2.2 OptimizerStateType@2.2
staging: AsyncStager@2.4 BlockingAsyncStager@2.4 DefaultStager@2.9 StagingOptions@2.9 _ReplicationStager@2.9
_state_dict_stager: StateDictStager@2.8
_pg_transport: PGTransport@2.9
format_utils: BroadcastingTorchSaveReader@2.3 DynamicMetaLoadPlanner@2.3 dcp_to_torch_save@2.3 torch_save_to_dcp@2.3
_hf_storage: _HuggingFaceStorageReader*@2.7-2.7 _HuggingFaceStorageWriter*@2.7-2.7
hf_storage: HuggingFaceStorageReader*@2.8 HuggingFaceStorageWriter*@2.8
_hf_utils: _metadata_fn@2.8 _gen_file_name@2.8 _get_safetensors_file_metadata@2.8 _HFStorageInfo@2.8 CUSTOM_METADATA_KEY@2.8
    SAVED_OFFSETS_KEY@2.8 DCP_VERSION_KEY@2.8 FORMAT_KEY@2.8 FORMAT_VALUE@2.8 SUFFIX@2.8 DTYPE_MAP@2.8 SHARDED_DIR_NAME@2.9
quantized_hf_storage: QuantizedHuggingFaceStorageReader*@2.9
_consolidate_hf_safetensors: consolidate_safetensors_files@2.9 consolidate_safetensors_files_on_every_rank@2.9
fsspec: FsspecReader*@2.3-2.3 FsspecWriter*@2.3-2.3
_fsspec_filesystem: FsspecReader@2.4 FsspecWriter@2.4
fsspec_filesystem: FsspecReader*@2.15 FsspecWriter*@2.15
_extension: Extension@2.7 StreamTransformExtension@2.7 ZStandard@2.7 ExtensionRegistry@2.7
protocol: CheckpointableTensor*@2.14
utils: find_tensor_shard find_state_dict_object _DistWrapper _all_gather_keys@2.2 _api_bc_check@2.3 _assert_same_keys@2.7
_dedup_tensors: dedup_tensors
_dedup_save_plans: dedup_save_plans@2.3
_nested_dict: flatten_state_dict unflatten_state_dict
_traverse: traverse_state_dict set_element get_element print_tensor
_sharded_tensor_utils: _flatten_sharded_tensors
_checkpointer: _Checkpointer@2.4
logger: _dcp_method_logger@2.4
logging_handlers: DCP_LOGGER_NAME@2.4
_experimental.barriers: Barrier@2.9 TCPStoreBarrier@2.9 BarrierConfig@2.9 create_barrier_from_config@2.9
_experimental.checkpoint_reader: CheckpointReader@2.9
_experimental.checkpoint_writer: CheckpointWriter@2.9 CheckpointWriterConfig@2.9 WriterHook@2.9
_experimental.checkpointer: Checkpointer@2.9 SyncCheckpointer@2.9 AsyncCheckpointer@2.9
_experimental.config: CheckpointerConfig@2.9
_experimental.staging: CheckpointStager@2.9 CheckpointStagerConfig@2.9 DefaultStager@2.9
_experimental.types: RankInfo@2.9 STATE_DICT@2.9
_experimental.utils: wrap_future@2.9
_experimental.builder: make_sync_checkpointer@2.9 make_async_checkpointer@2.9
_state_dict_utils: _create_cpu_state_dict@2.3 _offload_state_dict_to_cpu@2.3 _gather_state_dict@2.3
    _check_state_dict_similarity@2.3 CompanionMismatch@2.3 _copy_state_dict@2.4 _broadcast_state_dict@2.4 _flatten_state_dict@2.4
    _unflatten_state_dict@2.4 _distribute_state_dict@2.5
"""

OURS = {
    "filesystem": {"FileSystemWriter", "FileSystemReader", "_write_item"},
    "default_planner": {"DefaultSavePlanner", "DefaultLoadPlanner", "_EmptyStateDictLoadPlanner"},
    "state_dict_saver": {"save", "save_state_dict", "_save_state_dict", "_stateful_to_state_dict", "async_save"},
    "state_dict_loader": {"load", "load_state_dict", "_load_state_dict", "_load_state_dict_from_keys"},
    "_storage_utils": {"_storage_setup"},
    "format_utils": {"BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"},
    "optimizer": {"load_sharded_optimizer_state_dict"},
    "hf_storage": {"HuggingFaceStorageReader", "HuggingFaceStorageWriter"},
    "quantized_hf_storage": {"QuantizedHuggingFaceStorageReader"},
    "_consolidate_hf_safetensors": {"consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"},
    "_fsspec_filesystem": {"FsspecReader", "FsspecWriter"},
    "fsspec_filesystem": {"FsspecReader", "FsspecWriter"},
    "_async_thread_executor": {"_ThreadBasedAsyncCheckpointExecutor"},
    "_async_process_executor": {"_ProcessBasedAsyncCheckpointExecutor"},
    "staging": {"BlockingAsyncStager", "DefaultStager"},
    "_state_dict_stager": {"StateDictStager"},
    "_state_dict_utils": {"_create_cpu_state_dict", "_check_state_dict_similarity", "_copy_state_dict", "_gather_state_dict"},
}


def table():
    """(module, name, whether it is at package level, first release, last release or None)"""
    module = None
    for word in TABLE.split():
        if word.endswith(":"):
            module = word[:-1]
            continue
        name, star, first, last = re.fullmatch(r"(\w+)(\*?)(?:@([\d.]+)(?:-([\d.]+))?)?", word).groups()
        yield module, name, bool(star), release(first or "2.1"), last and release(last)


def release(text):
    return tuple(map(int, text.split(".")))


def theirs(module):
    prefix = "torch.distributed" if module == "_state_dict_utils" else THEIRS
    return importlib.import_module(f"{prefix}.{module}")


def base_of(module, name):
    """What ours is to be a subclass of: PyTorch's class, but for the ways to run a save in the background, which share an interface."""
    if name.endswith("AsyncCheckpointExecutor"):
        module, name = "_async_executor", "_AsyncCheckpointExecutor"
    return getattr(theirs(module), name)


class Names(TestCase):
    def test_R12_5_every_name_is_there(self):
        checked = 0
        for module, name, is_public, first, last in table():
            with self.subTest(module=module, name=name):
                if first <= RELEASE and (last is None or RELEASE <= last):
                    ours = getattr(importlib.import_module(f"libdcp.torch.{module}"), name)
                    if name not in OURS.get(module, ()):
                        self.assertIs(ours, getattr(theirs(module), name))
                    elif isinstance(ours, type):
                        self.assertTrue(issubclass(ours, base_of(module, name)))
                    if is_public:
                        self.assertIs(getattr(dcp, name), ours)
                    checked += 1
        self.assertGreater(checked, 60)

    def test_R12_5_names_that_the_release_lacks_are_absent(self):
        for module, name, _, first, last in table():
            if first > RELEASE or (last is not None and RELEASE > last):
                with self.subTest(module=module, name=name), self.assertRaises((ImportError, AttributeError)):
                    getattr(importlib.import_module(f"libdcp.torch.{module}"), name)

    def test_R12_5_later_issues_are_pytorchs(self):
        self.assertIs(dcp._extension.ZStandard, torch_dcp._extension.ZStandard)

    def test_R12_5_stars_and_listing(self):
        space = {}
        exec("from libdcp.torch.state_dict_saver import *", space)
        self.assertIs(space["save"], dcp.save)
        exec("from libdcp.torch.metadata import *", space)
        self.assertIs(space["Metadata"], torch_dcp.Metadata)
        self.assertIn("save", dir(dcp))
        self.assertIn("LoadPlan", dir(dcp))
        with self.assertRaises(ImportError):
            importlib.import_module("libdcp.torch.no_such_module")
        with self.assertRaisesRegex(AttributeError, "nothing_like_it"):
            dcp.nothing_like_it

    def test_R12_9_call_forms_of_the_release(self):
        for module, name in (("state_dict_saver", "save"), ("state_dict_saver", "save_state_dict"),
                             ("state_dict_saver", "_save_state_dict"), ("state_dict_loader", "load"),
                             ("state_dict_loader", "load_state_dict"), ("state_dict_loader", "_load_state_dict"),
                             ("state_dict_loader", "_load_state_dict_from_keys"), ("filesystem", "FileSystemWriter"),
                             ("filesystem", "FileSystemReader"), ("default_planner", "DefaultSavePlanner"),
                             ("default_planner", "DefaultLoadPlanner")):  # fmt: skip
            with self.subTest(name=name):
                ours = inspect.signature(getattr(importlib.import_module(f"libdcp.torch.{module}"), name)).parameters
                for parameter in inspect.signature(inspect.unwrap(getattr(theirs(module), name))).parameters.values():
                    self.assertIn(parameter.name, ours)
                    self.assertEqual(ours[parameter.name].default, parameter.default)
                    self.assertEqual(ours[parameter.name].kind, parameter.kind)

    def test_R12_11_names_of_parameters(self):
        for method, names in (
            (dcp.FileSystemWriter.prepare_global_plan, ["plans"]),
            (dcp.FileSystemReader.prepare_global_plan, ["plans"]),
            (dcp.DefaultSavePlanner.finish_plan, ["new_plan"]),
            (dcp.DefaultSavePlanner.create_global_plan, ["all_plans"]),
            (dcp.DefaultSavePlanner.resolve_data, ["write_item"]),
            (dcp.DefaultLoadPlanner.finish_plan, ["new_plan"]),
            (dcp.DefaultLoadPlanner.load_bytes, ["read_item", "value"]),
            (dcp.DefaultLoadPlanner.resolve_tensor, ["read_item"]),
            (dcp.LoadPlanner.finish_plan, ["central_plan"]),
        ):
            self.assertEqual(list(inspect.signature(method).parameters)[1:], names, method)

    def test_R12_12_subclasses_of_pytorchs(self):
        self.assertTrue(issubclass(dcp.FileSystemWriter, torch_dcp.FileSystemWriter))
        self.assertTrue(issubclass(dcp.FileSystemReader, torch_dcp.FileSystemReader))
        self.assertIs(dcp.CheckpointException, torch_dcp.CheckpointException)


class Install(TestCase):
    def test_install_and_uninstall(self):
        originals = {name: getattr(torch_dcp, name) for name in ("save", "load", "FileSystemWriter", "DefaultLoadPlanner")}
        self.addCleanup(dcp.uninstall)
        dcp.install()
        dcp.install()
        self.assertTrue(dcp.is_installed())
        for name in originals:
            self.assertIs(getattr(torch_dcp, name), getattr(dcp, name))
        self.assertIs(importlib.import_module(f"{THEIRS}.state_dict_saver").save, dcp.save)
        self.assertIs(importlib.import_module(f"{THEIRS}.format_utils").FileSystemReader, dcp.FileSystemReader)
        torch_dcp.save({"a": torch.ones(2)}, checkpoint_id=self.path, no_dist=True)
        state = {"a": torch.zeros(2)}
        torch_dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(state["a"].tolist(), [1, 1])
        self.check_ours(self.path)
        dcp.uninstall()
        dcp.uninstall()
        self.assertFalse(dcp.is_installed())
        for name, original in originals.items():
            self.assertIs(getattr(torch_dcp, name), original)

    def check_ours(self, path):
        """Our metadata has facts of its own, which PyTorch's does not."""
        self.assertIn(b"libdcp", (pathlib.Path(path) / ".metadata").read_bytes())

    def test_async_save_behind_install(self):
        self.addCleanup(dcp.uninstall)
        dcp.install()
        tensor = torch.ones(4)
        future = torch_dcp.async_save({"a": tensor}, checkpoint_id=self.path)
        tensor.fill_(9)
        future.result(timeout=60)
        state = {"a": torch.zeros(4)}
        dcp.load(state, checkpoint_id=self.path, no_dist=True)
        self.assertEqual(state["a"].tolist(), [1, 1, 1, 1])
        self.check_ours(self.path)

    def run_program(self, *arguments):
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
        return subprocess.run([sys.executable, "-m", "libdcp.torch", *arguments], capture_output=True, text=True, env=environment)

    def test_modules_as_attributes_are_ours(self):
        """PyTorch imports some of its modules itself; ours of the same name must not be hidden by them."""
        names = [name for name in ("hf_storage", "quantized_hf_storage", "filesystem") if importlib.util.find_spec(f"{THEIRS}.{name}")]
        program = f"import libdcp.torch as dcp\nprint(*(getattr(dcp, name).__name__ for name in {[*names, 'metadata']}))"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split(), [*(f"libdcp.torch.{name}" for name in names), f"{THEIRS}.metadata"])

    def test_unchanged_programs(self):
        program = self.root / "train.py"
        program.write_text(
            "import sys, torch\n"
            "from torch.distributed.checkpoint import save\n"
            "if __name__ == '__main__':\n"
            "    save({'a': torch.ones(2)}, checkpoint_id=sys.argv[1], no_dist=True)\n"
            "    print(sys.argv[2:], sys.path[0])\n"
        )
        done = self.run_program(str(program), str(self.path), "--steps", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.strip(), f"['--steps', '3'] {self.root}")
        self.check_ours(self.path)
        self.assertEqual(self.run_program().returncode, 2)

    def test_programs_see_what_python_shows_them(self):
        """By a relative path through a link, whose target's directory is the one that imports come from."""
        (self.root / "real").mkdir()
        program = self.root / "real" / "train.py"
        program.write_text("import sys\nif __name__ == '__main__':\n    print(__file__, sys.path[0])\n")
        (self.root / "train.py").symlink_to(program)
        name = os.path.relpath(self.root / "train.py")
        plain = subprocess.run([sys.executable, name], capture_output=True, text=True)
        self.assertEqual(self.run_program(name).stdout, plain.stdout)


if __name__ == "__main__":
    unittest.main()
