"""Host memory that an Ascend NPU knows: AscendCL's registration, and a stand-in for CUDA's where PyTorch asks for that.

PyTorch pins shared memory through `torch.cuda.cudart()`, which is None on a machine with an NPU. `patch_cudart()` makes it return an
object with `cudaHostRegister` and `cudaHostUnregister` there, which make AscendCL's calls and pass its result codes on. Where CUDA is,
nothing changes.

AscendCL is loaded at the first registration. It is shared with torch_npu: it is initialised only where nobody has done so, and never
finalised or reset from here.
"""

import atexit
import ctypes
import ctypes.util
import functools
import os
import re
import threading
from typing import NamedTuple

import torch

__all__ = [
    "aclrt_host_register",
    "aclrt_host_unregister",
    "is_available",
    "is_host_registered",
    "patch_cudart",
    "registrations",
    "unpatch_cudart",
]

ACL_HOST_REGISTER_MAPPED = 0
# Results of our own making are AscendCL's, too, so that callers need to know one list.
ACL_SUCCESS = 0
ACL_ERROR_INVALID_PARAM = 100000
ACL_ERROR_UNINITIALIZE = 100001
ACL_ERROR_REPEAT_INITIALIZE = 100002
ACL_ERROR_RT_HOST_MEMORY_ALREADY_REGISTERED = 507910
LOCATION_HOST = 0  # of memory that the device knows; other memory of the host has another


def is_available():
    """Whether torch_npu is loaded and has a device."""
    npu = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


# ---- the library ----


class _PointerAttributes(ctypes.Structure):
    """aclrtPtrAttributes: 4 reserved numbers in the releases that are known; room for those to come."""

    _fields_ = [("id", ctypes.c_uint32), ("type", ctypes.c_int), ("page_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 64)]


class _Library:
    """AscendCL's functions. The two that register must be there, the others say on which device."""

    def __init__(self, handle):
        self.host_register = _function(handle, "aclrtHostRegister", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p)
        self.host_unregister = _function(handle, "aclrtHostUnregister", ctypes.c_void_p)
        self._init = _optional(handle, "aclInit", ctypes.c_char_p)
        self._get_device = _optional(handle, "aclrtGetDevice", ctypes.c_void_p)
        self._set_device = _optional(handle, "aclrtSetDevice", ctypes.c_int32)
        self._pointer_attributes = _optional(handle, "aclrtPointerGetAttributes", ctypes.c_void_p, ctypes.c_void_p)

    def current_device(self):
        """The calling thread's device; None if it has none."""
        device = ctypes.c_int32()
        if self._get_device is None or self._get_device(ctypes.byref(device)) != ACL_SUCCESS:
            return None
        return device.value

    def set_device(self, device):
        if self._set_device is not None and device is not None:
            self._set_device(device)

    def knows(self, ptr):
        """Whether the calling thread's device knows this byte of the host. Not where the release cannot tell."""
        attributes = _PointerAttributes(type=-1)
        if self._pointer_attributes is None or self._pointer_attributes(ptr, ctypes.byref(attributes)) != ACL_SUCCESS:
            return False
        return attributes.type == LOCATION_HOST

    def enter(self):
        """Gives the calling thread a device if it has none, since registrations belong to devices. Returns it."""
        device = self.current_device()
        if device is None and self._set_device is not None:
            wanted = torch.npu.current_device() if is_available() else 0
            if self.current_device() is None:
                self._initialise()
                self.set_device(wanted)
            device = self.current_device()
        return device

    def _initialise(self):
        """Does nothing to a runtime that torch_npu, or somebody else, has set up: that is what "repeat" says."""
        if self._init is not None:
            self._init(None)


def _function(handle, name, *argtypes):
    try:
        function = getattr(handle, name)
    except AttributeError:
        raise RuntimeError(f"AscendCL library {handle._name} has no function {name}, which host registration needs") from None
    function.argtypes = argtypes
    function.restype = ctypes.c_int
    return function


def _optional(handle, name, *argtypes):
    return _function(handle, name, *argtypes) if hasattr(handle, name) else None


_library = None
_lock = threading.RLock()  # guards _library; finalisers may come in between, in the same thread


def _loaded():
    """The library, loaded when it is first needed."""
    global _library
    with _lock:
        if _library is None:
            _library = _Library(_open())
            # After torch_npu's own handler was registered, so it runs before that one.
            atexit.register(_stop)
        return _library


def _open():
    message = "no such library on this system"
    for name in _candidates():
        try:
            handle = ctypes.CDLL(name)
        except OSError as error:
            message = str(error)
            continue
        if not hasattr(handle, "acl_get_file"):  # libacl is also the name of the library for access control lists
            return handle
    raise RuntimeError(f"Failed to load AscendCL library for host register: {message}")


def _candidates():
    """A copy that the process has, then what the system finds, then the toolkit's."""
    yield from mapped_libraries(r"lib(ascendcl|acl)\.so")
    for name in ("ascendcl", "acl"):
        found = ctypes.util.find_library(name)
        if found:
            yield found
    yield "libascendcl.so"
    yield "libacl.so"
    home = os.environ.get("ASCEND_HOME_PATH")
    if home:
        yield os.path.join(home, "lib64", "libascendcl.so")
        yield os.path.join(home, "lib64", "libacl.so")


def mapped_libraries(name):
    """Paths of the libraries of this process whose file name is what a regular expression says."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(path for path in paths if re.fullmatch(name, os.path.basename(path)))


# ---- registration ----


class Registration(NamedTuple):
    size: int
    device: int | None
    process: int


_registered = {}  # address -> Registration; one step at a time, which needs no lock
_is_exiting = False


def aclrt_host_register(ptr, size, register_type=ACL_HOST_REGISTER_MAPPED):
    """Registers host memory with the calling thread's NPU: aclrtHostRegister. Returns the runtime's result, 0 for success.

    Without an address or bytes the runtime is not asked; the result is that of an invalid parameter.

    Raises RuntimeError if AscendCL cannot be loaded or lacks a function.
    """
    if not ptr or size <= 0:
        return ACL_ERROR_INVALID_PARAM
    library = _loaded()
    device = library.enter()
    mapped = ctypes.c_void_p()  # the device's address of it; copies use the host's
    code = library.host_register(ptr, size, register_type, ctypes.byref(mapped))
    if code == ACL_SUCCESS:
        _registered[ptr] = Registration(size, device, os.getpid())
    return code


def aclrt_host_unregister(ptr):
    """Ends a registration, on the device that it was made for: aclrtHostUnregister. Returns the runtime's result, 0 for success.

    A process that was forked has no part in its parent's registrations, and one that ends leaves its own to the driver: by then
    the runtime may be gone. In both cases nothing is called, and the registration is forgotten.
    """
    if not ptr:
        return ACL_ERROR_INVALID_PARAM
    known = _registered.get(ptr)
    if known is not None and (_is_exiting or known.process != os.getpid()):
        del _registered[ptr]
        return ACL_SUCCESS
    if _is_exiting:
        return ACL_ERROR_UNINITIALIZE
    library = _loaded()
    code = _unregister_on(library, known.device if known else None, ptr)
    if code == ACL_SUCCESS:
        _registered.pop(ptr, None)
    return code


def _unregister_on(library, device, ptr):
    before = library.current_device()
    if device is None or device == before:
        return library.host_unregister(ptr)
    library.set_device(device)
    try:
        return library.host_unregister(ptr)
    finally:
        library.set_device(before)


def is_host_registered(ptr, size=1):
    """Whether the calling thread's NPU knows both ends of a range of host memory, whoever has registered it. False where AscendCL cannot
    tell.

    Raises RuntimeError if AscendCL cannot be loaded or lacks a function.
    """
    if not ptr or size <= 0:
        return False
    library = _loaded()
    library.enter()
    return library.knows(ptr) and library.knows(ptr + size - 1)


def registrations():
    """What is registered through this module now: {address: Registration}."""
    return dict(_registered)


def _stop():
    global _is_exiting
    _is_exiting = True


# ---- CUDA's names for it ----


class AclCudart:
    """The two functions of CUDA's runtime that have a counterpart in AscendCL. Results are AscendCL's codes."""

    @staticmethod
    def cudaHostRegister(ptr, size, flags=0):
        """No flag of CUDA's has a counterpart: the memory is mapped, whatever they say. Parts of pages cannot be."""
        page = os.sysconf("SC_PAGESIZE")
        return aclrt_host_register(ptr, -(-size // page) * page)

    @staticmethod
    def cudaHostUnregister(ptr):
        return aclrt_host_unregister(ptr)


_MARK = "_libdcp_original"


def patch_cudart():
    """Makes `torch.cuda.cudart()` return a stand-in where CUDA has nothing to return and an NPU is available at the time.

    Called again, it does nothing. `unpatch_cudart()` takes it back.
    """
    original = getattr(torch.cuda, "cudart", None)
    if not callable(original) or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def cudart(*args, **kwargs):
        try:
            runtime = original(*args, **kwargs)
        except (AssertionError, RuntimeError):  # PyTorch without CUDA, or CUDA without a driver
            if not is_available():
                raise
            runtime = None
        return AclCudart if runtime is None and is_available() else runtime

    setattr(cudart, _MARK, original)
    torch.cuda.cudart = cudart


def unpatch_cudart():
    original = getattr(getattr(torch.cuda, "cudart", None), _MARK, None)
    if original is not None:
        torch.cuda.cudart = original
