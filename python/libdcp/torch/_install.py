"""Puts libdcp behind torch.distributed.checkpoint, for programs that cannot be changed.

Names are exchanged in PyTorch's modules, so it must happen before a program imports them from there by name.
"""

import importlib
import threading
import warnings

from . import npu
from ._mirror import OURS, original_name

# Our module -> names in it that take the place of PyTorch's, there and wherever else PyTorch keeps them.
REPLACED = {
    "default_planner": ("DefaultSavePlanner", "DefaultLoadPlanner", "_EmptyStateDictLoadPlanner"),
    "filesystem": ("FileSystemWriter", "FileSystemReader"),
    "_storage_utils": ("_storage_setup",),
    "state_dict_saver": ("save", "save_state_dict", "_save_state_dict", "async_save"),
    "state_dict_loader": ("load", "load_state_dict", "_load_state_dict", "_load_state_dict_from_keys"),
    "format_utils": ("BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"),
    "optimizer": ("load_sharded_optimizer_state_dict",),
    "hf_storage": ("HuggingFaceStorageReader", "HuggingFaceStorageWriter"),
    "quantized_hf_storage": ("QuantizedHuggingFaceStorageReader",),
    "_consolidate_hf_safetensors": ("consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"),
    "_fsspec_filesystem": ("FsspecReader", "FsspecWriter"),
    "fsspec_filesystem": ("FsspecReader", "FsspecWriter"),
    "staging": ("BlockingAsyncStager", "DefaultStager"),
    "_state_dict_stager": ("StateDictStager",),
    "_async_thread_executor": ("_ThreadBasedAsyncCheckpointExecutor",),
    "_async_process_executor": ("_ProcessBasedAsyncCheckpointExecutor",),
    "_state_dict_utils": ("_create_cpu_state_dict", "_copy_state_dict", "_check_state_dict_similarity", "_gather_state_dict"),
}
# Modules of PyTorch that hold those names: where they are defined, and where they are imported from there.
HOLDERS = ("", *REPLACED, "_checkpointer")

_lock = threading.Lock()
_replaced = []  # (PyTorch's module, name, its own object)


def install():
    """From now on torch.distributed.checkpoint saves and loads with libdcp. Call it before other imports of that package."""
    with _lock:
        if _replaced:
            return
        # All are imported first: classes that PyTorch derives from the replaced ones stay derived from its own.
        holders = [module for module in map(_theirs, HOLDERS) if module is not None]
        ours = {}
        for inner, names in REPLACED.items():
            theirs = _theirs(inner)
            if theirs is None:
                continue
            ours.update((id(getattr(theirs, name)), getattr(_ours(inner), name)) for name in names if hasattr(theirs, name))
        for module in holders:
            for name, value in list(vars(module).items()):
                if id(value) in ours:
                    _replace(module, name, ours[id(value)])
        npu.patch_cudart()


def uninstall():
    """Takes install() back."""
    with _lock:
        while _replaced:
            module, name, original = _replaced.pop()
            setattr(module, name, original)
        npu.unpatch_cudart()


def is_installed():
    return bool(_replaced)


def _ours(inner):
    return importlib.import_module(f"{__package__}.{inner}")


def _theirs(inner):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of names that the program may never use
            return importlib.import_module(original_name(f"{OURS}.{inner}" if inner else OURS))
    except ImportError:  # of another release, or in need of a package that is not there
        return None


def _replace(module, name, ours):
    _replaced.append((module, name, getattr(module, name)))
    setattr(module, name, ours)
