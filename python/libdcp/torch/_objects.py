"""Objects that are no tensors: how they become bytes, and which of them may come back.

The C library reads records that hold nothing but built-in scalars and containers. Everything else goes to torch.load with
weights_only, so that nothing from a file is executed; classes of the program are admitted one by one with
torch.serialization.add_safe_globals. `allow_pickle()` lifts the restriction for checkpoints that are trusted like code.
"""

import contextlib
import io
import os
import pickle

import torch

SWITCH = "LIBDCP_ALLOW_PICKLE"
# Built-in classes that hold data and nothing else. The C library knows them; PyTorch does not.
HARMLESS = {f"builtins.{kind.__name__}": kind for kind in (bytearray, complex, frozenset, range, set, slice)}
_allowed = None  # None: the environment decides


class _Allowance(contextlib.AbstractContextManager):
    """What allow_pickle returns: as a context manager it puts things back as they were."""

    def __init__(self, before):
        self._before = before

    def __exit__(self, *exception):
        global _allowed
        _allowed = self._before


def allow_pickle(allowed=True):
    """Lets objects of any class be loaded, by unpickling, which runs code that the checkpoint names. For trusted checkpoints only.

    It holds for the process until it is called with False, or for a `with` block. The environment variable LIBDCP_ALLOW_PICKLE=1
    does the same for programs that cannot be changed.
    """
    global _allowed
    before, _allowed = _allowed, bool(allowed)
    return _Allowance(before)


def is_pickle_allowed():
    if _allowed is not None:
        return _allowed
    return os.environ.get(SWITCH, "0") not in ("", "0")


def dump(obj):
    """The torch.save bytes of one object."""
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getbuffer()


def load(fqn, data):
    """The object in a torch.save record. Raises pickle.UnpicklingError naming the class that is not allowed and the ways out."""
    stream = data if isinstance(data, io.BytesIO) else io.BytesIO(data)
    if is_pickle_allowed():
        return torch.load(stream, map_location="cpu", weights_only=False)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        names = _refused(stream)
        if names and HARMLESS.keys() >= set(names):
            torch.serialization.add_safe_globals([HARMLESS[name] for name in names])
            stream.seek(0)
            return torch.load(stream, map_location="cpu", weights_only=True)
        needed = ", ".join(names) or "a class that is not on PyTorch's safe list"
        raise pickle.UnpicklingError(
            f"object {fqn!r} is not loaded: it needs {needed}, and nothing from a checkpoint is executed. Admit classes with"
            " torch.serialization.add_safe_globals([...]), or, if the checkpoint is trusted like code, call"
            f" libdcp.torch.allow_pickle() or set {SWITCH}=1 in the environment"
        ) from error


def _refused(stream):
    """The names in a record that torch.load does not accept."""
    stream.seek(0)
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    except (AttributeError, RuntimeError, ValueError, pickle.UnpicklingError):
        return []  # PyTorch before 2.6, or a record in the old form without an archive
