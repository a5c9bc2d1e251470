"""Page-locked host memory that other processes see, too: PyTorch's storages, registered with the device.

A registration belongs to its storage: it ends when the last tensor and view on the storage are gone, once, before the memory is
unmapped. It is not ended when the interpreter exits, since the driver may be gone by then, and not in a forked child.
"""

import atexit
import ctypes
import functools
import logging
import os
import warnings
import weakref

import torch

from . import npu

CUDA_HOST_REGISTER_PORTABLE = 1
CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
ALREADY_REGISTERED = (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, npu.ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED)
# Drivers refuse single ranges of some hundred GiB.
MAX_REGISTER_BYTES = 64 << 30
logger = logging.getLogger(__name__)

_is_exiting = False
_warned = set()  # codes of failed registrations that staging has told of


class Failed(RuntimeError):
    """The device's runtime did not register memory. `code` is its own result."""

    def __init__(self, code, address, size):
        super().__init__(f"Registering memory failed with cudaError: {code} (address {address:#x}, {size} bytes)")
        self.code = code


def runtime():
    """What has cudaHostRegister here: CUDA's runtime if its driver works, else the stand-in if there is an NPU, else None."""
    if torch.cuda.is_available():
        try:
            found = torch.cuda.cudart()
        except (AssertionError, RuntimeError):
            found = None  # torch_npu can make CUDA look available
        if found is not None:
            return found
    return npu.AclCudart if npu.is_available() else None


def is_available():
    return runtime() is not None


def register(storage):
    """Registers a shared storage's whole pages, all or none. Returns whether the registration is ours: memory that somebody else has
    registered as a whole is usable, and stays theirs to unregister.

    Raises Failed with the runtime's code, RuntimeError where there is no device.
    """
    rt = runtime()
    if rt is None:
        raise RuntimeError("no host memory can be registered: there is neither CUDA nor an NPU")
    _watch_exit()
    done = []
    for address, size in _pieces(storage):
        code = int(rt.cudaHostRegister(address, size, CUDA_HOST_REGISTER_PORTABLE))
        if code != 0 and rt is not npu.AclCudart:
            _forget_cuda_error()
        if code in ALREADY_REGISTERED and not done and _is_whole_known(rt, storage):
            logger.info("%d bytes at %#x have been registered by somebody else, who is to unregister them", storage.nbytes(), address)
            return False
        if code != 0:
            _unregister(rt, done, os.getpid())
            raise Failed(code, address, size)
        done.append(address)
    # atexit: see above.
    weakref.finalize(storage, _unregister, rt, done, os.getpid()).atexit = False
    return True


def _forget_cuda_error():
    """CUDA's runtime keeps the last failure for the thread, and the next kernel that PyTorch launches would be blamed for it."""
    for path in npu.mapped_libraries(r"libcudart.*\.so[.\d]*"):
        ctypes.CDLL(path).cudaGetLastError()


def _is_whole_known(rt, storage):
    """Whether the device knows both ends of the memory: "already registered" is said of any overlap, also with what was unmapped
    without having been unregistered."""
    pieces = _pieces(storage)
    start, end = pieces[0][0], sum(pieces[-1])
    if rt is npu.AclCudart:
        return npu.is_host_registered(start, end - start)
    return all(_byte_at(address).is_pinned() for address in (start, end - 1))


def _byte_at(address):
    return torch.frombuffer((ctypes.c_char * 1).from_address(address), dtype=torch.uint8)


def register_if_possible(storage):
    """For memory that also serves unregistered. Returns whether it is registered; of each kind of failure it warns once."""
    try:
        register(storage)
        return True
    except Failed as error:
        if error.code not in _warned:
            _warned.add(error.code)
            warnings.warn(f"staging goes on with memory that is not pinned: {error}", stacklevel=2)
        return False


def _pieces(storage):
    """(address, size) of the ranges to register. Shared storages are mappings of their own, so the pages at both ends are theirs."""
    page = os.sysconf("SC_PAGESIZE")
    start = storage.data_ptr() // page * page
    end = -(-(storage.data_ptr() + storage.nbytes()) // page) * page
    return [(address, min(MAX_REGISTER_BYTES, end - address)) for address in range(start, end, MAX_REGISTER_BYTES)]


def _unregister(rt, addresses, process):
    """The finaliser of a storage; must not raise."""
    if _is_exiting or process != os.getpid():
        return
    for address in addresses:
        try:
            code = int(rt.cudaHostUnregister(address))
        except Exception as error:  # whatever a runtime that is broken raises
            code = error
        if code != 0:
            logger.error("Unpinning shared memory failed with error-code: %s (address %#x)", code, address)


@functools.cache
def _watch_exit():
    atexit.register(_stop)


def _stop():
    global _is_exiting
    _is_exiting = True
