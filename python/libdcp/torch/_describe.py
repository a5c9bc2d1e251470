"""Tensors as the C library takes them: dtype, shape, strides, and an address in host memory or in that of a device.

PyTorch decides what a rank holds of a sharded tensor: offsets and local parts come from its own chunk lists, for DTensor,
ShardedTensor, and whatever else implements its protocols.
"""

import collections.abc
import functools
import weakref

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _iterate_state_dict
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from . import _devices

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

try:  # local tensors that say where they lie in a global one, since 2.14
    from torch.distributed.checkpoint.protocol import CheckpointableTensor
except ImportError:
    CheckpointableTensor = None

# Types of which C reads the attributes itself: of the others, or where these say that memory is not as it looks, it asks here.
ATTRIBUTES_SUFFICE = (Tensor, Parameter) if CheckpointableTensor is None else ()

_dtype_names = {}


def dtype_name(dtype):
    """bfloat16 for torch.bfloat16."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def dtype_of(name):
    return getattr(torch, name)


class Sources:
    """Describes the state that is saved: tensors as they lie, or copies on the host of those that the library cannot read so."""

    def __init__(self):
        self.devices = _devices.Devices()

    def describe(self, obj):
        """The descriptor of a node of the state; None for what only pickling can store."""
        kind = type(obj)
        if (kind is Tensor or kind is Parameter) and not _is_placed(obj):
            return whole(obj, self.readable(obj)) if is_storable(obj) else None
        if isinstance(obj, Tensor):
            return _described(obj, self.readable)
        return container(obj)

    def readable(self, tensor):
        return tensor if self.devices.take(tensor) else on_host(tensor)


def container(obj):
    if isinstance(obj, collections.abc.Mapping):
        return ("m", obj)
    if isinstance(obj, list):
        return ("l", obj)
    return None


def _described(obj, memory):
    """Of a tensor that is not of the plain class; memory(tensor) is what the library reads or fills for it."""
    parts = held_parts(obj)
    if parts is None:
        return whole(obj, memory(obj)) if is_storable(obj) else None
    return sharded(global_shape(obj), parts, [memory(part) for _, part in parts], obj)


def located(memory):
    """Of a strided tensor: the address of its first element, how many bytes there are from there on, and the storage. While that is
    held the address is good, even if another thread gives the tensor other memory (`p.data = ...`)."""
    storage = memory.untyped_storage()
    offset = memory.storage_offset() * memory.itemsize
    nbytes = storage.nbytes()
    return storage.data_ptr() + offset if nbytes else 0, nbytes - offset, storage


def check_memory(fqn, tensor):
    """Raises ValueError for a strided tensor whose storage is too small for it, since somebody has shrunk that
    (`untyped_storage().resize_()`, as FSDP does it). PyTorch itself does not look."""
    needed, there = _bytes_needed(tensor), _bytes_there(tensor)
    if needed > there:
        raise ValueError(f"{fqn}: the tensor reaches over {needed} bytes of memory, its storage has {there} there")


def _bytes_needed(tensor):
    """From the first element to behind the last one."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))) * tensor.itemsize


def _bytes_there(tensor):
    return max(tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize, 0)


def whole(obj, memory):
    """The descriptor of an unsharded tensor whose elements are in `memory`, a strided tensor."""
    strides = None if memory.is_contiguous() else memory.stride()
    address, nbytes, storage = located(memory)
    return ("t", dtype_name(memory.dtype), memory.shape, strides, address, (obj, storage), _devices.name_of(memory), nbytes)


def sharded(shape, parts, memories, obj):
    """The descriptor of what this process holds of a sharded tensor: parts are (offsets, tensor)."""
    chunks, storages = [], []
    for (offsets, _), memory in zip(parts, memories):
        address, nbytes, storage = located(memory)
        strides = None if memory.is_contiguous() else memory.stride()
        chunks.append((offsets, tuple(memory.shape), strides, address, _devices.name_of(memory), nbytes))
        storages.append(storage)
    return ("s", dtype_name(memories[0].dtype if memories else _dtype_without_parts(obj)), tuple(shape), chunks, (obj, storages))


def _dtype_without_parts(obj):
    return obj.metadata().tensor_properties.dtype if isinstance(obj, ShardedTensor) else obj.dtype


def is_storable(tensor):
    """Whether a tensor's elements are what its memory holds. Sparse, quantized and wrapped ones are stored as objects."""
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return type(tensor) is Tensor or type(tensor) is Parameter or not _is_wrapper(tensor)


def _is_wrapper(tensor):
    """Whether it only stands for other tensors and has no memory of its own. One whose memory was freed says that it has none."""
    if hasattr(tensor, "__tensor_flatten__"):
        return True
    try:
        return tensor.is_cpu and tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() == 0
    except RuntimeError:
        return True


def on_host(tensor):
    """The tensor itself if its memory can be read as it is, or cannot be read at all, else a copy on the host."""
    if _is_plain_on_host(tensor):
        return tensor
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device has no data to save")
    if _bytes_needed(tensor) > _bytes_there(tensor):
        return tensor  # to be refused where its name is known
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def global_shape(obj):
    if isinstance(obj, ShardedTensor):  # whose size() warns that it is to go
        return tuple(obj.metadata().size)
    if CheckpointableTensor is not None and isinstance(obj, CheckpointableTensor):
        return tuple(obj.global_shape)
    return tuple(obj.size())


def held_parts(obj):
    """What this process holds of a sharded tensor, as a list of (offsets, tensor); None if obj is not sharded."""
    if isinstance(obj, DTensor):
        return _parts_of_dtensor(obj)
    if isinstance(obj, ShardedTensor):
        return _parts_of_sharded_tensor(obj)
    if hasattr(obj, "__create_chunk_list__") or _is_placed(obj):
        return _parts_by_protocol(obj)
    return None


def held_elems(obj):
    """How many elements of a tensor this process holds."""
    parts = held_parts(obj)
    return obj.numel() if parts is None else sum(part.numel() for _, part in parts)


def _is_placed(obj):
    return CheckpointableTensor is not None and hasattr(obj, "global_offsets") and isinstance(obj, CheckpointableTensor)


_layouts = weakref.WeakKeyDictionary()  # device mesh -> {(shape, placements): (offsets, sizes)}


def _parts_of_dtensor(obj):
    mesh = obj.device_mesh
    if mesh.get_coordinate() is None:
        return []  # this process is outside the mesh
    local = obj._local_tensor
    if hasattr(local, "__create_chunk_list__"):
        return _parts_by_protocol(obj)
    layouts = _layouts.setdefault(mesh, {})
    key = (obj.shape, obj.placements)
    found = layouts.get(key)
    if found is None:  # PyTorch takes longer for it than everything else takes together
        [chunk] = _create_chunk_list(obj)
        found = layouts[key] = (tuple(chunk.offsets), tuple(chunk.sizes))
    offsets, sizes = found
    _check_part(obj, offsets, sizes, local)
    return [(offsets, local)]


def _parts_of_sharded_tensor(obj):
    shards = obj.local_shards()
    if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
        return _parts_of_nested(shards[0])
    parts = []
    for shard in shards:
        if isinstance(shard.tensor, (ShardedTensor, DTensor)):
            raise ValueError(f"Cannot handle {type(shard.tensor).__name__} nested inside ShardedTensor with several shards")
        parts.append((tuple(shard.metadata.shard_offsets), shard.tensor))
    return parts


def _parts_of_nested(outer):
    """Two-dimensional parallelism: the inner tensor lies at the outer shard's place."""
    inner = outer.tensor.local_shards()
    if len(inner) != 1:
        raise ValueError("Cannot handle inner tensor with more than 1 shard")
    offsets = zip(outer.metadata.shard_offsets, inner[0].metadata.shard_offsets)
    return [(tuple(a + b for a, b in offsets), inner[0].tensor)]


def _parts_by_protocol(obj):
    parts = []
    for position, chunk in enumerate(_create_chunk_list(obj)):
        part = find_tensor_shard(obj, MetadataIndex("", chunk.offsets, position))
        _check_part(obj, chunk.offsets, chunk.sizes, part)
        parts.append((tuple(chunk.offsets), part))
    return parts


def _check_part(obj, offsets, sizes, part):
    if tuple(part.shape) != tuple(sizes):
        raise ValueError(
            f"{type(obj).__name__} of shape {tuple(obj.shape)}: the local part at {tuple(offsets)} has shape {tuple(part.shape)},"
            f" its placement says {tuple(sizes)}"
        )


def from_memory(dtype, shape, memory):
    """A tensor that owns a copy of what was read where the state had nothing yet."""
    tensor = torch.empty(tuple(shape), dtype=dtype_of(dtype))
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).numpy()[:] = memoryview(memory).cast("B")
    return tensor


def readable_into(target, dtype, devices):
    """The target if elements of that dtype can be read straight into its memory, else temporary memory on the host."""
    is_direct = target.dtype is dtype and is_storable(target) and (_is_plain_on_host(target) or devices.take(target))
    return target if is_direct else torch.empty(target.shape, dtype=dtype)


def _is_plain_on_host(tensor):
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def check_fillable(fqn, target, dtype):
    """Raises what `copy_` from that dtype would raise, or should, before anything is read, while the other ranks can still be told."""
    check_memory(fqn, target)
    if target.numel() and any(stride == 0 and extent > 1 for stride, extent in zip(target.stride(), target.shape)):
        raise RuntimeError(f"{fqn}: elements of the tensor to be filled lie at one place in memory; clone() it before")
    if target.dtype is not dtype:
        _check_conversion(target.device, target.dtype, dtype)


@functools.lru_cache(maxsize=256)
def _check_conversion(device, target, saved):
    torch.empty(1, dtype=target, device=device).copy_(torch.empty(1, dtype=saved))


def materialise(state_dict):
    """Gives tensors on the meta device memory: where the default group works, or on the host without one."""
    if not any(map(_is_meta, tensors_in(state_dict))):
        return
    device = device_of_group()
    _iterate_state_dict(
        state_dict, lambda value: _real_dtensor(value, device), _refuse_meta, lambda value: _real_tensor(value, device)
    )


def device_of_group(process_group=None):
    """Where a group's collectives work: the host if they do there, else this process's device."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    types = [device.type for device in getattr(process_group or dist.group.WORLD, "_device_types", ())]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], getattr(torch, types[0]).current_device())


def _real_tensor(value, device):
    return torch.empty_like(value, device=device) if value.is_meta else value


def _real_dtensor(value, device):
    if not value.is_meta:
        return value
    local = torch.empty_like(value.to_local(), device=device)
    # Shape and strides are given, since parts may be uneven.
    return DTensor.from_local(
        local, device_mesh=value.device_mesh, placements=value.placements, shape=value.size(), stride=value.stride()
    )


def _refuse_meta(value):
    if _is_meta(value):
        raise RuntimeError(f"Found unsupported type {type(value)} for meta device loading.")
    return value


def _is_meta(tensor):
    if isinstance(tensor, ShardedTensor):  # which has no is_meta where it has no shards
        return any(_is_meta(shard.tensor) for shard in tensor.local_shards())
    return tensor.is_meta


def tensors_in(tree):
    """All tensors in a tree of dicts, lists and tuples, where a load may put something."""
    found, seen, nodes = [], set(), [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Tensor):
            found.append(node)
        elif isinstance(node, (dict, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            nodes.extend(node.values() if isinstance(node, dict) else node)
    return found


class Targets:
    """Describes the state that a load fills. Elements go straight into the targets' memory; where that cannot be (another dtype, a
    device that the library does not reach), into temporary memory that `finish` copies from."""

    def __init__(self):
        self.devices = _devices.Devices()
        self._temporaries = {}  # id of a node -> [(target, temporary), ...]

    def describe(self, obj):
        kind = type(obj)
        if (kind is Tensor or kind is Parameter) and not _is_placed(obj):
            if not is_storable(obj):
                return None
            return whole(obj, self._memory(obj, obj))
        if isinstance(obj, Tensor):
            return _described(obj, lambda part: self._memory(obj, part))
        return container(obj)

    def convert(self, fqn, obj, saved_dtype):
        """Temporary memory of the dtype that is stored, for a target of another dtype."""
        dtype = dtype_of(saved_dtype)
        self._temporaries.pop(id(obj), None)  # what `describe` made, of its own dtype
        parts = held_parts(obj)
        if parts is None:
            description = whole(obj, self._temporary(obj, obj, dtype))
        else:
            description = sharded(global_shape(obj), parts, [self._temporary(obj, part, dtype) for _, part in parts], obj)
        self.check_fillable(fqn, obj)
        return description

    def check_fillable(self, fqn, obj):
        """Called for a tensor that will be filled by way of a temporary: what is left alone may be as it likes."""
        for target, temporary in self._temporaries.get(id(obj), ()):
            check_fillable(fqn, target, temporary.dtype)

    def finish(self, filled):
        """After a load that has filled these nodes of the state."""
        directly = []
        with torch.no_grad():
            for node in filled:
                staged = self._temporaries.get(id(node), ())
                for target, temporary in staged:
                    target.detach().copy_(temporary)
                if not staged:
                    directly.extend(_memories_of(node))
        # Written to behind autograd's back.
        torch.autograd.graph.increment_version([tensor for tensor in directly if not tensor.is_inference()])

    def _memory(self, node, tensor):
        if _is_plain_on_host(tensor) or self.devices.take(tensor):
            return tensor
        return self._temporary(node, tensor, tensor.dtype)

    def _temporary(self, node, tensor, dtype):
        memory = torch.empty(tensor.shape, dtype=dtype)
        self._temporaries.setdefault(id(node), []).append((tensor, memory))
        return memory


def _memories_of(node):
    """The tensors that hold what this process has of a tensor."""
    if type(node) in ATTRIBUTES_SUFFICE:
        return (node,)
    parts = held_parts(node)
    return (node,) if parts is None else [part for _, part in parts]
