"""Optimizer state for a sharded model, without a template of it: `torch.distributed.checkpoint.optimizer`."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.optimizer as _original
from torch._utils import _get_device_module
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from . import _describe
from ._mirror import attributes
from .default_planner import DefaultLoadPlanner
from .state_dict_loader import _load_state_dict

__all__ = list(_original.__all__)

OBJECT = "<bytes_io>"  # takes the place of an object until it is loaded


class _ReaderWithOffset(DefaultLoadPlanner, _original._ReaderWithOffset):
    """Loads parts of a tensor that are themselves sharded: what lies at the part's place in the whole tensor."""

    create_local_plan = _original._ReaderWithOffset.create_local_plan
    lookup_tensor = _original._ReaderWithOffset.lookup_tensor


def load_sharded_optimizer_state_dict(model_state_dict, optimizer_key, storage_reader, planner=None):
    """Loads the optimizer state that was saved under `optimizer_key`, each rank its part. Collective over the default group.

    The layout comes from the checkpoint and from the model's state: one element stays whole, other tensors are cut into rows over
    all ranks; where the model has shards within shards (two-dimensional parallelism), over the inner group, at the place of the
    model's outer shard, and with a planner of our own. Returns the state, nested under its key; an empty dict if there is none.
    """
    metadata = storage_reader.read_metadata()
    layout, inner_group = _original._get_state_dict_2d_layout(model_state_dict)
    targets = _Targets(layout, inner_group)
    paths = metadata.planner_data or {}
    for name, entry in metadata.state_dict_metadata.items():
        path = paths.get(name, (name,))
        if path[0] == optimizer_key:
            targets.add(name, path, entry)
    if targets.state:
        _load_state_dict(targets.state, storage_reader, planner=targets.planner(planner))
    return unflatten_state_dict(targets.state, {name: paths.get(name, (name,)) for name in targets.state})


class _Targets:
    """The state to load into, flat. layout: name in the model -> (offsets of its outer shard or None, size that is to be cut)."""

    def __init__(self, layout, inner_group):
        self.state = {}
        self._layout = layout
        self._inner_group = inner_group
        self._offsets = {}  # name -> offsets of the model's outer shard
        self._device = _describe.device_of_group(inner_group)

    def planner(self, given):
        return given if self._inner_group is None else _ReaderWithOffset(self._offsets)

    def add(self, name, path, entry):
        if isinstance(entry, BytesStorageMetadata):
            self.state[name] = OBJECT
        elif entry.size.numel() == 1:
            self.state[name] = _empty(entry, entry.size, self._device)
        else:
            offsets, size = self._place_of(path, entry)
            if offsets is not None:
                self._offsets[name] = offsets
            self.state[name] = _row_shards(entry, size, self._inner_group, self._device)

    def _place_of(self, path, entry):
        """Offsets and size of what the ranks of the group have together of a tensor with this path: (key, "state", name, ...)."""
        if self._inner_group is None or len(path) < 3:
            return None, entry.size
        return self._layout.get(path[2], (None, entry.size))


def _row_shards(entry, size, group, device):
    """A ShardedTensor over a group (None: the default one), cut into equal numbers of rows, the last ones fewer or none. Only this
    rank's rows take memory."""
    group = group or dist.group.WORLD
    size = torch.Size(size)
    if not size or 0 in size:
        return _empty(entry, size, device)  # nothing to cut
    step = -(-size[0] // group.size())
    shards = [
        ShardMetadata([start, *[0] * (len(size) - 1)], [min(step, size[0] - start), *size[1:]], _placement(group, rank, device.type))
        for rank, start in enumerate(range(0, size[0], step))
    ]
    own = shards[group.rank() : group.rank() + 1]
    local = [Shard(tensor=_empty(entry, shard.shard_sizes, device), metadata=shard) for shard in own]
    properties = ShardProperties(dtype=entry.properties.dtype, layout=entry.properties.layout)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, ShardedTensorMetadata(shards, size, properties), process_group=group
    )


def _empty(entry, size, device):
    return torch.empty(tuple(size), dtype=entry.properties.dtype, device=device)


def _placement(group, rank, device_type):
    """Where a rank of a group keeps its shard: `rank:<global rank>/<device>`."""
    global_rank = dist.get_global_rank(group, rank)
    return f"rank:{global_rank}/{_gen_rank_device(global_rank, device_type)}"


def _gen_rank_device(global_rank, device_type="cuda"):
    """The device of a rank: its number modulo the devices of a machine. The host has no numbers, nor has a missing device."""
    if device_type == "cpu":
        return "cpu"
    devices = _get_device_module(device_type)
    return f"{device_type}:{global_rank % devices.device_count()}" if devices.is_available() else "cpu"


__getattr__, __dir__ = attributes(__name__)
