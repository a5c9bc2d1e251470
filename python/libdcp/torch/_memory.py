"""Host memory for copies of tensors."""

import mmap
import resource
import threading
import weakref

import torch

from . import _pin

# From here on memory is mapped apart from the heap: what is freed goes back to the system at once, whichever thread frees it. No large
# pages are asked for: where the system has to make them first, touching them takes four times as long.
MAPPED_BYTES = 1 << 20


def ordinary(nbytes):
    """A storage in this process's own memory."""
    if nbytes < MAPPED_BYTES:
        return torch.UntypedStorage(nbytes)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def shared(nbytes):
    """A storage that other processes can be given."""
    if nbytes == 0:
        return torch.UntypedStorage._new_using_fd_cpu(0)  # which opens nothing
    by_name = torch.multiprocessing.get_sharing_strategy() == "file_system"
    if by_name or not _descriptors.take():
        return _lasting(torch.UntypedStorage._new_using_filename_cpu(nbytes))
    storage = _lasting(torch.UntypedStorage._new_using_fd_cpu(nbytes))
    storage.has_descriptor = True
    weakref.finalize(storage, _descriptors.give_back).atexit = False
    return storage


def _lasting(storage):
    """The same storage as the object that tensors keep. What PyTorch 2.7 makes of shared memory ends before it, and so would what is to
    happen at its end."""
    return torch.empty(0, dtype=torch.uint8).set_(storage).untyped_storage()


def descriptor_of(storage):
    """The file descriptor behind a storage that `shared` has made; None for others."""
    if not getattr(storage, "has_descriptor", False):
        return None
    descriptor, _ = storage._share_fd_cpu_()
    return descriptor


def pinned(nbytes):
    """A storage in page-locked memory of the accelerator's allocator."""
    return torch.empty(nbytes, dtype=torch.uint8).pin_memory().untyped_storage()


def shared_and_pinned(nbytes, is_required):
    """A shared storage that the device knows. is_required: failing to register is an error, else a warning."""
    storage = shared(nbytes)
    if nbytes:
        (_pin.register if is_required else _pin.register_if_possible)(storage)
    return storage


class _Descriptors:
    """PyTorch's usual shared memory holds a file descriptor for each storage. Of those that the process may have, a quarter goes
    to it; what needs more is shared by name, which holds none."""

    def __init__(self):
        self._lock = threading.RLock()  # a finaliser may come in while it is held
        self._taken = 0

    def take(self):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        with self._lock:
            if limit != resource.RLIM_INFINITY and self._taken >= limit // 4:
                return False
            self._taken += 1
            return True

    def give_back(self):
        with self._lock:
            self._taken -= 1


_descriptors = _Descriptors()
