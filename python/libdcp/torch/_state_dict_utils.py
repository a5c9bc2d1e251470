"""States on the host and copies of states: `torch.distributed._state_dict_utils`, with some of it made anew.

PyTorch's functions are kept where they do what they say. Ours differ from them so:

- Shared and pinned memory is registered with the device that is there, CUDA or NPU, for as long as the storage lives.
- No copy starts before both states are known to fit.
- Comparing two states changes neither, and values of other kinds are a difference, not an error.
- Sharded tensors get host memory without their elements being copied on the way, and a scalar one is copied like others.
- ShardedTensors are gathered however they are cut, not in equal parts of rows alone.
"""

import copy
import io

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as _original
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._state_dict_utils import CompanionMismatch, _iterate_state_dict
from torch.distributed.tensor import DTensor

from . import _copy, _memory
from ._mirror import attributes

CPU = torch.device("cpu")
PLAIN = (int, float, str, bytes, io.BytesIO, type(None))  # values that states may hold beside tensors and containers


# ---- a state on the host ----


@torch.no_grad()
def _create_cpu_state_dict(state_dict, pin_memory=False, share_memory=False):
    """A state of the same structure whose tensors are new ones on the CPU, with contents that are not specified.

    share_memory: other processes can see them. pin_memory: the accelerator can copy from and to them directly. Both: shared memory
    that is registered with CUDA or the NPU; RuntimeError with the runtime's code if it refuses.
    """
    target = _Allocator(bool(pin_memory), bool(share_memory))
    return _iterate_state_dict(state_dict, target.for_sharded, target.for_dtensor, target.for_tensor, type_check=False)


class _Allocator:
    """Makes host tensors for the tensors of a state. Its methods have the signature that PyTorch's walk over a state asks for."""

    def __init__(self, is_pinned, is_shared):
        self._is_pinned = is_pinned
        self._is_shared = is_shared

    def for_tensor(self, tensor, *_):
        if tensor.dim() == 0:
            return torch.tensor(0, dtype=tensor.dtype)
        nbytes = tensor.numel() * tensor.element_size()
        return torch.empty(0, dtype=tensor.dtype).set_(self._storage(nbytes), 0, tensor.size())

    def for_dtensor(self, tensor, *_):
        host = tensor.detach() if tensor.device == CPU else tensor.to(device="cpu")
        host._local_tensor = self.for_tensor(tensor._local_tensor)
        return host

    def for_sharded(self, tensor, *_):
        if not tensor.local_shards():
            return tensor
        host = tensor if tensor.local_shards()[0].tensor.device == CPU else tensor.to(device="cpu")
        shards = [Shard(self.for_tensor(shard.tensor), shard.metadata) for shard in host.local_shards()]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, host.metadata(), process_group=host._process_group, sharding_spec=host.sharding_spec()
        )

    def _storage(self, nbytes):
        if self._is_shared and self._is_pinned:
            return _memory.shared_and_pinned(nbytes, is_required=True)
        if self._is_shared:
            return _memory.shared(nbytes)
        if self._is_pinned and nbytes:
            return _memory.pinned(nbytes)
        return _memory.ordinary(nbytes)


# ---- copies ----


@torch.no_grad()
def _copy_state_dict(state_dict, copy_state_dict, non_blocking=False, type_check=True):
    """Copies all tensors into those of a state of the same structure. Returns that structure with its own tensors and the other
    values of the source.

    Raises CompanionMismatch for other keys, lengths or kinds of values, ValueError for other sizes, before anything is copied.
    Elements are converted to the target's dtype.
    """
    check_copyable(state_dict, copy_state_dict, type_check)
    pairs = []
    copied = _paired(state_dict, copy_state_dict, pairs)
    _copy.copy_tensors(pairs, non_blocking)
    return copied


def _paired(source, target, pairs):
    """The copy's structure, before its tensors are filled; `pairs` gets (target, source) of each."""
    if isinstance(source, torch.Tensor):
        pairs.extend(zip(_parts(target), _parts(source)))
        return target
    if isinstance(source, dict):
        return {key: _paired(value, target[key], pairs) for key, value in source.items()}
    if isinstance(source, (list, tuple)):
        values = [_paired(value, place, pairs) for value, place in zip(source, target)]
        return tuple(values) if isinstance(source, tuple) else values
    return source if isinstance(source, PLAIN) else copy.deepcopy(source)


def check_copyable(source, target, type_check=True, same_dtype=False, path=""):
    """Whether every tensor of one state has its place in another."""
    if isinstance(source, torch.Tensor):
        _check_tensors(source, target, same_dtype, path)
    elif isinstance(source, dict):
        if not isinstance(target, dict) or source.keys() != target.keys():
            raise CompanionMismatch(f"{path or 'state'}: {_keys_of(source)} to be copied into {_keys_of(target)}")
        for key, value in source.items():
            check_copyable(value, target[key], type_check, same_dtype, f"{path}.{key}" if path else str(key))
    elif isinstance(source, (list, tuple)):
        if not isinstance(target, (list, tuple)) or len(source) != len(target):
            raise CompanionMismatch(f"{path}: {_length_of(source)} to be copied into {_length_of(target)}")
        for index, (value, place) in enumerate(zip(source, target)):
            check_copyable(value, place, type_check, same_dtype, f"{path}.{index}")
    elif isinstance(target, (torch.Tensor, dict, list, tuple)):
        raise CompanionMismatch(f"{path}: {type(source).__name__} to be copied into {type(target).__name__}")
    elif type_check and not isinstance(source, PLAIN):
        raise ValueError(f"Unexpected value type {type(source)} at {path}")


def _check_tensors(source, target, same_dtype, path):
    if not isinstance(target, torch.Tensor) or isinstance(source, DTensor) != isinstance(target, DTensor):
        raise CompanionMismatch(f"{path}: {type(source).__name__} to be copied into {type(target).__name__}")
    for part, place in zip(_parts(source), _parts(target), strict=True):
        if part.size() != place.size():
            raise ValueError(f"{path}: size {tuple(part.size())} to be copied into {tuple(place.size())}")
        if same_dtype and part.dtype != place.dtype:
            raise ValueError(f"{path}: {part.dtype} to be copied into {place.dtype}")


def _parts(tensor):
    """The tensors of this process that a tensor consists of."""
    if isinstance(tensor, ShardedTensor):
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor._local_tensor if isinstance(tensor, DTensor) else tensor]


def _keys_of(value):
    return f"a dict with the keys {list(value)}" if isinstance(value, dict) else type(value).__name__


def _length_of(value):
    return f"{len(value)} values" if isinstance(value, (list, tuple)) else type(value).__name__


def bytes_of(state):
    """Bytes of the elements of all tensors of a state that are in this process."""
    if isinstance(state, torch.Tensor):
        return sum(part.nbytes for part in _parts(state) if part.layout is torch.strided)
    if isinstance(state, dict):
        return sum(map(bytes_of, state.values()))
    return sum(map(bytes_of, state)) if isinstance(state, (list, tuple)) else 0


# ---- whole tensors ----


def _gather_state_dict(state_dict, *, pg=None, device=None, cpu_offload=False, ranks_only=(), type_check=True):
    """The state with whole tensors in place of ShardedTensors and DTensors; an empty one on ranks that are not in `ranks_only`, unless
    that is empty. Collective over `pg`, whose ranks hold the shards of all ShardedTensors, and over the meshes of the DTensors.

    device: through which ShardedTensors are exchanged; None: the group's own.
    """
    whole = _iterate_state_dict(state_dict, _gather_sharded, _as_it_is, _as_it_is, pg=pg, device=device, type_check=type_check)
    return _original._gather_state_dict(
        whole, pg=pg, device=device, cpu_offload=cpu_offload, ranks_only=ranks_only, type_check=type_check
    )


def _as_it_is(value, *_):
    return value


def _gather_sharded(tensor, pg, device, _):
    """A ShardedTensor's elements, on the device of its local shards. What each rank has is known everywhere; the bytes are exchanged in
    parts as long as the longest."""
    group = pg if pg is not None else dist.distributed_c10d._get_default_group()
    through = device if device is not None else dist.distributed_c10d._get_pg_default_device(group)
    shards = [_in_order(tensor.metadata().shards_metadata, rank) for rank in dist.get_process_group_ranks(group)]
    local = sorted(tensor.local_shards(), key=lambda shard: shard.metadata.shard_offsets)
    length = max(sum(torch.Size(shard.shard_sizes).numel() for shard in of_rank) for of_rank in shards)
    mine = torch.zeros(length, dtype=tensor.dtype, device=through)
    parts = torch.empty(length * group.size(), dtype=tensor.dtype, device=through)
    if length:
        _put_together(mine, local)
        dist.all_gather_into_tensor(parts.view(torch.uint8), mine.view(torch.uint8), group=group)
    whole = torch.empty(tensor.size(), dtype=tensor.dtype, device=local[0].tensor.device if local else CPU)
    for part, of_rank in zip(parts.view(group.size(), -1), shards):
        _take_apart(part, of_rank, whole)
    return whole


def _in_order(shards, rank):
    """Those of one rank; shards name ranks of the whole world."""
    return sorted((shard for shard in shards if shard.placement.rank() == rank), key=lambda shard: shard.shard_offsets)


def _put_together(part, local):
    at = 0
    for shard in local:
        part[at : at + shard.tensor.numel()].copy_(shard.tensor.detach().flatten())
        at += shard.tensor.numel()


def _take_apart(part, shards, whole):
    at = 0
    for shard in shards:
        box = tuple(slice(start, start + size) for start, size in zip(shard.shard_offsets, shard.shard_sizes))
        size = torch.Size(shard.shard_sizes).numel()
        whole[box].copy_(part[at : at + size].view(shard.shard_sizes))
        at += size


# ---- comparison ----


def _check_state_dict_similarity(state_dict, compared_state_dict):
    """Whether two states have the same structure, and tensors of the same sizes and dtypes in the same places."""
    try:
        check_copyable(state_dict, compared_state_dict, type_check=False, same_dtype=True)
    except (CompanionMismatch, ValueError):
        return False
    return True


__getattr__, __dir__ = attributes(__name__)
