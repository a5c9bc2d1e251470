"""Distributed checkpoints of PyTorch, read and written in C; this package needs neither PyTorch nor, until arrays are asked for, NumPy.

    import libdcp

    libdcp.save("run/step-1000", {"model": {"w": array}, "step": 1000})
    with libdcp.open("run/step-1000") as ckpt:          # a mapping of names to lazy arrays and objects
        rows = ckpt["model.w"][10:20, :]                # reads these rows, not the rest
    state = libdcp.load("run/step-1000")                # all of it, nested as it was saved
    libdcp.load("run/step-1000", into=state)            # or into arrays that are there

Every layout that PyTorch writes opens the same way: a distributed checkpoint (also rank-local), a torch.save file, a safetensors
file, a Hugging Face directory. Tensors are NumPy arrays, or anything with the buffer protocol or DLPack in host memory. Dtypes that
NumPy lacks are those of ml_dtypes where that is installed, else unsigned integers of the same size; see View.

Errors are subclasses of Error and of the class of Python that fits (ValueError, FileNotFoundError, OSError, ...); Error.code has the
name of the status.
"""
from ._api import hash, latest, load, open, save, verify
from ._arrays import Opaque, View
from ._checkpoint import Checkpoint, LazyArray
from ._convert import convert
from ._core import (ArgumentError, CanceledError, ChecksumError, DeadlineError, DeviceError, Error, ExistsError, FormatError, Group,
                    InternalError, LimitError, MismatchError, MissingKeyError, NoSpaceError, NotFoundError, OutOfMemoryError,
                    PeerError, PlanCache, StateError, StorageError, UnsupportedError, __version__)

__all__ = [
    "Checkpoint", "Group", "LazyArray", "Opaque", "PlanCache", "View", "convert", "hash", "latest", "load", "open", "save", "verify",
    "ArgumentError", "CanceledError", "ChecksumError", "DeadlineError", "DeviceError", "Error", "ExistsError", "FormatError",
    "InternalError", "LimitError", "MismatchError", "MissingKeyError", "NoSpaceError", "NotFoundError", "OutOfMemoryError",
    "PeerError", "StateError", "StorageError", "UnsupportedError",
]
