"""A drop-in for torch.distributed.checkpoint, with saves and loads made in C.

    import libdcp.torch as dcp

    dcp.save({"model": model, "optim": optim}, checkpoint_id="run/step-1000")
    dcp.load({"model": model, "optim": optim}, checkpoint_id="run/step-1000")

Every public name of torch.distributed.checkpoint is here, in modules of the same names. Planners, writers and readers are
subclasses of PyTorch's, and either side's may be used with the other. Checkpoints are PyTorch's, too, in both directions.

`install()` puts all this behind the name torch.distributed.checkpoint, for programs that cannot be changed.
"""

from . import _mirror

_mirror.register()

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from ._install import install, is_installed, uninstall  # noqa: E402
from ._objects import allow_pickle  # noqa: E402
from .default_planner import DefaultLoadPlanner, DefaultSavePlanner  # noqa: E402
from .filesystem import FileSystemReader, FileSystemWriter  # noqa: E402
from .state_dict_loader import load, load_state_dict  # noqa: E402
from .state_dict_saver import save, save_state_dict  # noqa: E402

__getattr__, __dir__ = _mirror.attributes(__name__)
