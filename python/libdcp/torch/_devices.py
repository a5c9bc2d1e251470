"""Memory of CUDA devices and Ascend NPUs that the C library copies by itself, a bounded part at a time.

It opens the vendor's library for that. Tensors that it cannot be given, or all of them where that library is missing, go through
copies on the host that PyTorch makes.
"""

import functools
import logging

import torch

from .. import _core

logger = logging.getLogger(__name__)

HANDLES = {"cuda": "cuda_stream", "npu": "npu_stream"}  # what streams call the vendor's handle


def name_of(tensor):
    """The device of a tensor as descriptors have it; None: the host, or one that the library knows nothing of."""
    if tensor.is_cpu or tensor.device.type not in HANDLES:
        return None
    return f"{tensor.device.type}:{tensor.device.index}"


class Devices:
    """The devices whose memory one save or load hands to the library."""

    def __init__(self):
        self._taken = set()

    def take(self, tensor):
        """Whether the library can be given the tensor as it lies."""
        if name_of(tensor) is None or not _is_linear(tensor) or not _is_within_reach(tensor.device.type):
            return False
        self._taken.add(tensor.device)
        return True

    def stream(self):
        """The handle of the stream whose work the copies wait for: the caller's current one. None: the default stream.

        Asked when all tensors are known. The library waits for one stream; of several devices' those are waited for here.
        """
        streams = [getattr(torch, device.type).current_stream(device) for device in self._taken]
        if len(streams) == 1:
            [stream], [device] = streams, self._taken
            return getattr(stream, HANDLES[device.type])
        for stream in streams:
            stream.synchronize()
        return None


def _is_linear(tensor):
    """Whether a tensor's elements lie one behind the other in memory that its address names. Others the device gathers faster."""
    if tensor.layout is not torch.strided or hasattr(tensor, "__tensor_flatten__") or tensor.is_conj() or tensor.is_neg():
        return False
    try:
        return tensor.numel() > 0 and tensor.is_contiguous() and tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # of tensors that only stand for others
        return False


@functools.cache
def _is_within_reach(kind):
    if kind == "cuda" and torch.version.hip is not None:  # AMD's, by CUDA's name
        return False
    try:
        _core.open_device(kind)
        return True
    except _core.Error as error:
        logger.warning("tensors on %s devices are copied as a whole, before they are written and after they are read: %s", kind, error)
        return False
