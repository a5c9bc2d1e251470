"""Tensors that lie on a device as far as libdcp.torch can tell: their memory is that of a look-alike of the vendor's library
(tests/devices), which faults if the host touches it. What PyTorch would do on a device goes through the look-alike's other mapping,
and is counted."""

import ctypes
import os
import types
from typing import NamedTuple
from unittest import mock

import torch


class Device(NamedTuple):
    """torch.device knows no "npu" without torch_npu."""

    type: str
    index: int


class Library:
    """A look-alike, loaded before libdcp looks for the vendor's library."""

    def __init__(self, kind):
        self.kind = kind
        self.calls = ctypes.CDLL(os.environ[{"cuda": "DCP_FAKE_CUDA", "npu": "DCP_FAKE_ACL"}[kind]])
        self.to_host, self.to_device = {
            "cuda": ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"),
            "npu": ("aclrtMemcpyAsync", "aclrtMemcpyAsync"),
        }[kind]
        self.calls.fake_alloc.restype = self.calls.fake_peek.restype = ctypes.c_void_p
        self.calls.fake_alloc.argtypes = [ctypes.c_int, ctypes.c_size_t]
        self.calls.fake_peek.argtypes = self.calls.fake_free.argtypes = self.calls.fake_await.argtypes = [ctypes.c_void_p]
        self.calls.fake_kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]

    def count(self, name):
        return self.calls.fake_count(name.encode())

    def fail(self, name, nth, code):
        self.calls.fake_fail(name.encode(), nth, code)

    def put(self, tensor, index=0):
        """A copy of a host tensor's storage on the device, and the same view of it."""
        source = tensor.detach().untyped_storage()
        if source.nbytes() == 0:
            memory = torch.empty(0, dtype=torch.uint8)
        else:
            address = self.calls.fake_alloc(index, source.nbytes())
            ctypes.memmove(self.calls.fake_peek(address), source.data_ptr(), source.nbytes())
            memory = torch.frombuffer((ctypes.c_char * source.nbytes()).from_address(address), dtype=torch.uint8)
        return self.view(memory.untyped_storage(), tensor, index)

    def view(self, storage, like, index=0):
        plain = torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.shape, like.stride())
        found = plain.as_subclass(OnDevice)
        found.kind, found.index = self.kind, index
        return found

    def new_stream(self, index=0):
        """A stream of CUDA's."""
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        for result in (
            self.calls.cuInit(0),
            self.calls.cuDevicePrimaryCtxRetain(ctypes.byref(context), index),
            self.calls.cuCtxPushCurrent_v2(context),
            self.calls.cuStreamCreate(ctypes.byref(stream), 0),
            self.calls.cuCtxPopCurrent_v2(ctypes.byref(context)),
        ):
            assert result == 0, result
        return stream.value

    def streams(self, handles=None):
        """torch.<kind>.current_stream() of each device, to be used as a context; what it gives notes who was waited for."""
        waited = []

        def current_stream(device):
            handle = (handles or {}).get(device.index, 0)
            names = {f"{self.kind}_stream": handle, "synchronize": lambda: waited.append(device.index)}
            return types.SimpleNamespace(**names)

        module = types.SimpleNamespace(current_stream=current_stream, is_available=lambda: False)  # asked by torch.accelerator
        return mock.patch.object(torch, self.kind, module, create=True), waited


LIBRARIES = {kind: Library(kind) for kind in ("cuda", "npu")}


class OnDevice(torch.Tensor):
    copied_bytes = filled_bytes = 0  # by PyTorch, to the host and from it

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), named=None):
        """Views lie on the same device."""
        found = super().__torch_function__(function, types, arguments, named or {})
        source = next((one for one in arguments if isinstance(one, OnDevice)), None)
        if isinstance(found, OnDevice) and source is not None:
            found.__dict__.update(source.__dict__)
        return found

    is_cpu = property(lambda self: False)
    device = property(lambda self: Device(self.kind, self.index))

    def seen(self):
        """The same view through the mapping that can be accessed."""
        storage = self.untyped_storage()
        if storage.nbytes() == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        address = LIBRARIES[self.kind].calls.fake_peek(storage.data_ptr())
        memory = torch.frombuffer((ctypes.c_char * storage.nbytes()).from_address(address), dtype=torch.uint8)
        return torch.empty(0, dtype=self.dtype).set_(memory.untyped_storage(), self.storage_offset(), self.shape, self.stride())

    def cpu(self):
        OnDevice.copied_bytes += self.numel() * self.itemsize
        return self.seen().clone()

    def copy_(self, source):
        OnDevice.filled_bytes += self.numel() * self.itemsize
        self.seen().copy_(source)
        return self
