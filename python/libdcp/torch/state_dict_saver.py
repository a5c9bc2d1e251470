"""Saving: `torch.distributed.checkpoint.state_dict_saver`, with saves made by libdcp.
"""

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as _original
from torch.distributed.checkpoint.stateful import Stateful

from . import _save
from ._async_save import async_save
from ._mirror import attributes
from ._storage_utils import _storage_setup

__all__ = list(_original.__all__)


def save(
    state_dict,
    *storage,
    checkpoint_id=None,
    storage_writer=None,
    planner=None,
    process_group=None,
    no_dist=False,
    use_collectives=True,
    per_rank=(),
    progress=None,
):
    """Saves a state dict, each rank its own part, as one checkpoint. Collective over `process_group`, unless `no_dist`.

    What PyTorch's `save` says of its arguments holds. Two are ours, for the built-in planner and writer:

    per_rank: glob patterns of names that each rank has for itself; rank r's value is stored as `rank.<r>.<name>`.
    progress: called now and then with (bytes written, bytes in all) of this rank; False cancels the save.

    Returns the Metadata of the checkpoint, built when it is first looked into.

    Raises CheckpointException on every rank if any rank failed; then nothing is published, and a checkpoint that was there before
    holds. With `use_collectives=False` what went wrong is raised as it is, on that rank alone.
    """
    check_dict(state_dict)
    if storage:
        storage_writer = _storage_by_position("save", storage, storage_writer)
    no_dist = is_alone(no_dist, "save")
    writer = _storage_setup(storage_writer, checkpoint_id, reader=False)
    return _save.save(
        _stateful_to_state_dict(state_dict),
        writer,
        planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
        options=given(per_rank=per_rank, progress=progress),
    )


def save_state_dict(
    state_dict, storage_writer, process_group=None, coordinator_rank=0, no_dist=False, planner=None
):
    """Deprecated in favour of `save`. Resets the writer, then saves."""
    warnings.warn(
        "`save_state_dict` is deprecated and will be removed in future versions. Please use `save` instead.",
        FutureWarning,
        stacklevel=2,
    )
    storage_writer.reset()
    return _save_state_dict(state_dict, storage_writer, process_group, coordinator_rank, no_dist, planner)


def _save_state_dict(
    state_dict,
    storage_writer,
    process_group=None,
    coordinator_rank=0,
    no_dist=False,
    planner=None,
    use_collectives=True,
):
    """Saves with a given writer, as it stands."""
    return _save.save(
        state_dict,
        storage_writer,
        planner,
        process_group=process_group,
        coordinator=coordinator_rank,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


def _stateful_to_state_dict(state_dict):
    """A shallow copy in which Stateful objects are replaced by their states."""
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state_dict.items()}


def is_stateful(value):
    """isinstance(value, Stateful), which takes longer for a tensor than saving it does."""
    return type(value) not in _NOT_STATEFUL and hasattr(value, "state_dict") and isinstance(value, Stateful)


_NOT_STATEFUL = frozenset((torch.Tensor, torch.nn.Parameter, dict, list, tuple, int, float, str))


def check_dict(state_dict):
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"the state must be a dict, not a {type(state_dict).__name__}")


def _storage_by_position(function, storage, keyword):
    """Until PyTorch 2.2 the storage was the second argument."""
    if len(storage) > 1:
        raise TypeError(f"{function}() takes at most 2 positional arguments, {1 + len(storage)} were given")
    if keyword is not None:
        raise TypeError(f"{function}() was given the storage twice")
    warnings.warn(
        f"The argument order of {function} has been changed. Please pass the storage by keyword.", stacklevel=3
    )
    return storage[0]


def is_alone(no_dist, what):
    """Whether this process works by itself; says so if it does."""
    if not (no_dist or not dist.is_available() or not dist.is_initialized()):
        return False
    warnings.warn(
        "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to"
        f" {what} in a single process.",
        stacklevel=3,
    )
    return True


def given(**options):
    """Those of the options that a caller has set."""
    return {name: value for name, value in options.items() if value is not None and value != () and value != "" and value is not False}


__getattr__, __dir__ = attributes(__name__)
