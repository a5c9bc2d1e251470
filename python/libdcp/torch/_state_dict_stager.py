"""Snapshots of whole states in host memory that is kept from one to the next: `torch.distributed.checkpoint._state_dict_stager`."""

import os
import warnings

import torch
import torch.distributed.checkpoint._state_dict_stager as _original
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from . import _copy, _memory, _pin
from ._mirror import attributes

CPU = torch.device("cpu")
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)  # whose storage is all that they have


class StagerClosed(AssertionError, RuntimeError):
    """A stager was asked to stage after its `close`."""

    def __init__(self):
        super().__init__("the stager is closed, so it cannot stage any more")


class StateDictStager(_original.StateDictStager):
    """Copies a state, with all containers and objects in it, into host memory. Storage that tensors share is copied once and stays
    shared. The memory of each storage is kept for the next state that has it, and goes with it.

    pin_memory: the device can copy into it directly; without CUDA or an NPU the flag is dropped, with a warning. share_memory: other
    processes can be given it. pin_memory_min_bytes: smaller blocks are not pinned.

    cap_bytes: most memory that is kept; 0: what the state needs. What has no room stays where it is: then `is_partial` is True, and the
    state must not change until it has been used. Sparse and quantized tensors are copied all the same.
    """

    def __init__(self, pin_memory=False, share_memory=False, pin_memory_min_bytes=5, *, cap_bytes=0):
        if pin_memory and not _pin.is_available():
            warnings.warn(
                "Ignoring pin_memory flag for checkpoint staging, since there is neither CUDA nor an NPU to pin memory for.",
                stacklevel=2,
            )
            pin_memory = False
        super().__init__(share_memory=share_memory)
        self.pin_memory = pin_memory
        self.pin_memory_min_bytes = pin_memory_min_bytes
        self.cap_bytes = cap_bytes
        self.left = []  # (address, bytes) of what had no room of the last state
        self.staged_bytes = 0  # of the last state
        self._kept_bytes = 0  # in storages of ours, while a state is being staged
        self._copies = []  # (target, source) storages of the state that is being staged
        self._process = os.getpid()
        self._is_closed = False

    @torch.no_grad()
    def stage(self, state_dict, non_blocking=False):
        if self._is_closed:
            raise StagerClosed
        if self._process != os.getpid():  # a fork: shared memory is still the parent's, whose upload may be reading it
            self._cached_storage_mapping.clear()
            self._process = os.getpid()
        self.left = []
        self.staged_bytes = 0
        self._kept_bytes = sum(storage.nbytes() for storage in self._cached_storage_mapping.values())
        try:
            staged = self.deepcopy_with_tensor_offload(state_dict, None, [], non_blocking)
            _copy.copy_storages(self._copies)
        finally:
            self._copies = []
        return staged

    def close(self):
        self._is_closed = True
        super().close()

    def _stage_untyped_storage(self, storage, non_blocking=False):
        """The host memory for a storage. Memory on the host is copied at the end, all at once; what is on a device, at once."""
        target = self._target_of(storage)
        if target is None:
            self._leave(storage)
            return storage
        self.staged_bytes += storage.nbytes()
        if storage.device == CPU:
            self._copies.append((target, storage))
        else:
            target.copy_(storage, non_blocking=non_blocking)
        return target

    @property
    def is_partial(self):
        """Whether some of the last state had no room."""
        return bool(self.left)

    def _leave(self, storage):
        self.left.append((storage.data_ptr(), storage.nbytes()))

    def _target_of(self, storage):
        """Where a storage is copied to; None if there is no room for it."""
        target = self._cached_storage_mapping.pop(storage, None)
        if target is not None and target.nbytes() != storage.nbytes():
            self._kept_bytes -= target.nbytes()
            target = None
        if target is None and self.cap_bytes and self._kept_bytes + storage.nbytes() > self.cap_bytes:
            return None
        if target is None:
            target = self._new_storage(storage.nbytes())
            self._kept_bytes += storage.nbytes()
        self._cached_storage_mapping[storage] = target
        return target

    def _new_storage(self, nbytes):
        is_pinned = self.pin_memory and nbytes >= max(self.pin_memory_min_bytes, 1)
        if is_pinned and self.share_memory:
            return _memory.shared_and_pinned(nbytes, is_required=False)
        if is_pinned:
            return _memory.pinned(nbytes)
        return _memory.shared(nbytes) if self.share_memory else _memory.ordinary(nbytes)

    def _offload_tensor(self, x, memo, non_blocking=False):
        if isinstance(x, ShardedTensor):
            return self._offload_sharded(x, memo, non_blocking)
        if x.layout is not torch.strided or x.is_quantized:
            return x.detach().to(device=CPU, copy=True)
        if x.device != CPU and type(x) in PLAIN_TENSORS and self._target_of(x.untyped_storage()) is None:
            self._leave(x.untyped_storage())
            return x
        if x.is_conj() or x.is_neg():  # kept in the tensor, not in its storage
            x = x.detach().resolve_conj().resolve_neg()
        return super()._offload_tensor(x, memo, non_blocking=non_blocking)

    def _offload_sharded(self, x, memo, non_blocking):
        if not x.local_shards():
            return x
        host = x if x.local_shards()[0].tensor.device == CPU else x.to(device="cpu")
        shards = [
            Shard(self._offload_tensor(shard.tensor, memo, non_blocking), shard.metadata) for shard in host.local_shards()
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, host.metadata(), process_group=host._process_group, sharding_spec=host.sharding_spec()
        )


__getattr__, __dir__ = attributes(__name__)
