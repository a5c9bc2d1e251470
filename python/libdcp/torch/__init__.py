"""A drop-in for torch.distributed.checkpoint, with saves and loads made in C.

    import libdcp.torch as dcp

    dcp.save({"model": model, "optim": optim}, checkpoint_id="run/step-1000")
    dcp.load({"model": model, "optim": optim}, checkpoint_id="run/step-1000")

Every public name of torch.distributed.checkpoint is here, in modules of the same names. Planners, writers and readers are
subclasses of PyTorch's, and either side's may be used with the other. Checkpoints are PyTorch's, too, in both directions.

`install()` puts all this behind the name torch.distributed.checkpoint, for programs that cannot be changed.
"""

import importlib

from . import _mirror

_mirror.register()

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from ._install import install, is_installed, uninstall  # noqa: E402
from ._objects import allow_pickle  # noqa: E402
from .default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402
from .filesystem import FileSystemReader, FileSystemWriter  # noqa: E402
from .optimizer import load_sharded_optimizer_state_dict  # noqa: E402
from .staging import AsyncStager, BlockingAsyncStager  # noqa: E402
from .state_dict_loader import load, load_state_dict  # noqa: E402
from .state_dict_saver import async_save, save, save_state_dict  # noqa: E402

# Ours, too, but in need of packages that not everybody has, or of a PyTorch that has them: imported when they are asked for.
_LATER = {
    "FsspecReader": "_remote",
    "FsspecWriter": "_remote",
    "HuggingFaceStorageReader": "hf_storage",
    "HuggingFaceStorageWriter": "hf_storage",
    "QuantizedHuggingFaceStorageReader": "quantized_hf_storage",
}
_get, __dir__ = _mirror.attributes(__name__)


def __getattr__(name):
    theirs = _get(name)
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name) if name in _LATER else theirs
