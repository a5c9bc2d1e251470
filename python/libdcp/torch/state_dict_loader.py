"""Loading: `torch.distributed.checkpoint.state_dict_loader`, with loads made by libdcp."""

import warnings

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as _original

from . import _load
from ._mirror import attributes
from ._storage_utils import _storage_setup
from .default_planner import _EmptyStateDictLoadPlanner
from .state_dict_saver import _storage_by_position, check_dict, given, is_alone, is_stateful

__all__ = list(_original.__all__)


def load(
    state_dict,
    *storage,
    checkpoint_id=None,
    storage_reader=None,
    planner=None,
    process_group=None,
    no_dist=False,
    include=(),
    exclude=(),
    prefix="",
    rename=None,
    per_rank=(),
    exact=False,
    on_difference=None,
):
    """Loads a checkpoint into a state dict, each rank its own part. Collective over `process_group`, unless `no_dist`.

    Tensors are filled in place, other entries of the dict are replaced, Stateful objects are given what was loaded. What PyTorch's
    `load` says of its arguments holds. The others are ours, for the built-in planner and reader:

    include, exclude: glob patterns of names of the state to load, or to leave alone ("model.*").
    prefix: put before each name of the state to get the checkpoint's.
    rename: called with each name (after the prefix); returns the checkpoint's name, or None to leave the entry alone.
    per_rank: glob patterns of names that this rank takes from `rank.<r>.<name>`.
    exact: names of the checkpoint that the state lacks are an error, too.
    on_difference: called with (kind, name, text) for each difference between state and checkpoint; kind is "missing",
        "unexpected", "shape", "dtype" or "kind".

    Raises CheckpointException on every rank if any rank failed.
    """
    check_dict(state_dict)
    if storage:
        storage_reader = _storage_by_position("load", storage, storage_reader)
    no_dist = is_alone(no_dist, "load")
    reader = _storage_setup(storage_reader, checkpoint_id, reader=True)
    options = given(
        include=include,
        exclude=exclude,
        prefix=prefix,
        rename=rename,
        per_rank=per_rank,
        exact=exact,
        on_difference=on_difference,
    )
    keys = sorted(state_dict)  # in one order on all ranks: taking the state of an object may be collective
    target = {key: _state_of(state_dict[key]) for key in keys if key in state_dict}
    _load.load(target, reader, planner, process_group=process_group, no_dist=no_dist, options=options)
    for key in keys:
        if key in state_dict:
            _put_back(state_dict, key, target[key])


def _state_of(value):
    return value.state_dict() if is_stateful(value) else value


def _put_back(state_dict, key, loaded):
    if is_stateful(state_dict[key]):
        state_dict[key].load_state_dict(loaded)
    else:
        state_dict[key] = loaded


def load_state_dict(
    state_dict, storage_reader, process_group=None, coordinator_rank=0, no_dist=False, planner=None
):
    """Deprecated in favour of `load`. Resets the reader, then loads."""
    warnings.warn(
        "`load_state_dict` is deprecated and will be removed in future versions. Please use `load` instead.",
        FutureWarning,
        stacklevel=2,
    )
    storage_reader.reset()
    if getattr(storage_reader, "checkpoint_id", "") is None:
        raise ValueError(
            f"load_state_dict resets {type(storage_reader).__name__}, which forgets its file by that;"
            " use load() with checkpoint_id"
        )
    _load_state_dict(state_dict, storage_reader, process_group, coordinator_rank, no_dist, planner)


def _load_state_dict(
    state_dict, storage_reader, process_group=None, coordinator_rank=0, no_dist=False, planner=None
):
    """Loads with a given reader, as it stands."""
    _load.load(
        state_dict,
        storage_reader,
        planner,
        process_group=process_group,
        coordinator=coordinator_rank,
        no_dist=no_dist,
    )


def _load_state_dict_from_keys(keys=None, *, checkpoint_id=None, storage_reader=None, process_group=None):
    """What a checkpoint has under the selected keys (None: all), as a new nested dict of tensors on the host."""
    no_dist = not (dist.is_available() and dist.is_initialized())
    if no_dist:
        warnings.warn(
            "torch.distributed is unavailable or uninitialized, assuming the intent is to load in a single process.",
            stacklevel=2,
        )
    reader = _storage_setup(storage_reader, checkpoint_id, reader=True)
    planner = _EmptyStateDictLoadPlanner(keys={keys} if isinstance(keys, str) else keys)
    state_dict = {}
    _load_state_dict(state_dict, reader, process_group, no_dist=no_dist, planner=planner)
    return state_dict


__getattr__, __dir__ = attributes(__name__)
