"""Errors of the library as PyTorch's users know them: one CheckpointException with the causes of all ranks.

The library's exceptions are subclasses of the built-in ones that DCP raises. Where PyTorch's message has words that programs look
for, they stand before the library's own.
"""

import pickle
import re
import traceback

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from .. import _core
from . import _group
from ._steps import attempt, packed

# A rank that failed for a reason of its own tells the others; they need not wait longer than this for it.
TELL_TIMEOUT_S = 10.0

# What the library says of faulty plans -> what DCP says.
PLAN_WORDS = (
    (r"is not within|exceed extent", "has out of bounds chunk"),
    (r"overlap in", "has overlapping chunks"),
    (r"elements are in no chunk", "invalid fill tensor-volume"),
)


def raise_together(step, error, channel, differences=None, place=None):
    """Raises what a save or load in C ended with, as the CheckpointException that every rank raises. With causes that the ranks
    exchange, so that each of them is the object, or a copy of the object, that the rank failed with. `step` is the one where the
    error does not tell."""
    step = _step_of(error) or step
    own = _own_cause(error)
    if own is None and differences is not None:
        own = differences.worded(error, channel.rank)
    failures = {entry[0]: (_exception_of(entry, place), traceback.StackSummary()) for entry in getattr(error, "failures", ())}
    if not failures:
        failures = {channel.rank: _wrap_exception(own or _worded(error))}
    elif own is not None:
        failures[channel.rank] = _wrap_exception(own)
    if channel.size > 1 and getattr(error, "code", None) == "PEER":
        failures.update(_causes_of_all(own, channel))
    raise CheckpointException(step, dict(sorted(failures.items()))) from (own or error)


def raise_alone(step, error, rank):
    """The same for a failure after the ranks have agreed that all went well."""
    raise CheckpointException(step, {rank: _wrap_exception(error)}) from error


def _step_of(error):
    """The library's name of the phase in which a rank failed, in DCP's words."""
    found = re.search(r"(?:^|: )(plan|write|commit|read)(?: failed on \d+ of \d+ ranks)?: ", str(error))
    return {"commit": "write"}.get(found.group(1), found.group(1)) if found else None


def _own_cause(error):
    """What a callback of this process raised, if that is why the library failed."""
    if not isinstance(error, _core.Error):
        return error
    return _worded(error.cause) if isinstance(error.cause, _core.Error) else error.cause


def _causes_of_all(own, channel):
    """{rank: (exception, traceback)} of the ranks whose own Python code failed. Nothing if they cannot be reached any more."""
    mine = None if own is None else _wrap_exception(own)
    try:
        blobs = _group.all_gather(channel, packed(mine), TELL_TIMEOUT_S)
    except (OSError, RuntimeError):
        return {} if mine is None else {channel.rank: mine}
    causes = {rank: attempt(lambda b=blob: pickle.loads(b)) for rank, blob in enumerate(blobs)}
    causes[channel.rank] = mine
    return {rank: cause for rank, cause in causes.items() if cause is not None}


def _exception_of(entry, place):
    """The exception for one entry of Error.failures; `place`: the checkpoint's, for messages that do not name it."""
    rank, code, errno, native_code, offset, message = entry
    cls = CLASSES.get(code, RuntimeError)
    if place is not None and place not in message:
        message = f"{place}: {message}"
    exception = cls(_with_words(code, message, rank))
    for name, value in (("code", code), ("errno", errno), ("native_code", native_code), ("rank", rank), ("offset", offset)):
        setattr(exception, name, value)
    return exception


def _worded(error):
    """The error itself, with PyTorch's words in front where there are some."""
    text = str(error)
    worded = _with_words(error.code, text, max(error.rank, 0))
    if worded != text:
        error.args = (worded,)
    return error


def _with_words(code, message, rank):
    if code == "NOT_FOUND" and "no checkpoint" in message:
        return f"{message}; neither .metadata nor __{rank}.metadata could be read"
    if code == "EXISTS" and "a checkpoint is there already" in message:
        return f"Checkpoint already exists: {message}"
    found = re.search(r"have one name: (.*)$", message)
    if found:
        return f"duplicated flatten key {found.group(1)}: {message}"
    words = [word for pattern, word in PLAN_WORDS if re.search(pattern, message)]
    if code == "ARG" and words:
        return f"Failed to validate global plan: {', '.join(words)}: {message}"
    return message


CLASSES = {
    "ARG": _core.ArgumentError,
    "STATE": _core.StateError,
    "NOMEM": _core.OutOfMemoryError,
    "UNSUPPORTED": _core.UnsupportedError,
    "INTERNAL": _core.InternalError,
    "NOT_FOUND": _core.NotFoundError,
    "EXISTS": _core.ExistsError,
    "IO": _core.StorageError,
    "NOSPACE": _core.NoSpaceError,
    "DEVICE": _core.DeviceError,
    "TIMEOUT": _core.DeadlineError,
    "CANCELED": _core.CanceledError,
    "FORMAT": _core.FormatError,
    "CHECKSUM": _core.ChecksumError,
    "LIMIT": _core.LimitError,
    "MISMATCH": _core.MismatchError,
}


class Differences:
    """Collects what a load found to differ, and words the error as PyTorch does. The first fatal difference counts."""

    def __init__(self, tell=None, partial=False, exact=False):
        self._tell = tell
        self._harmless = {kind for kind, is_harmless in (("missing", partial), ("unexpected", not exact)) if is_harmless}
        self._first = None

    def __call__(self, kind, fqn, text):
        if self._first is None and kind not in self._harmless:
            self._first = (kind, fqn, text)
        if self._tell is not None:
            self._tell(kind, fqn, text)

    def worded(self, error, rank):
        """The exception of this rank, if differences are why it failed."""
        codes = {entry[0]: (entry[1], entry[5]) for entry in error.failures}
        code, message = codes.get(rank, (error.code, str(error)))
        if self._first is None or code not in ("NOT_FOUND", "MISMATCH"):
            return None
        kind, fqn, text = self._first
        if kind == "missing":
            return _core.MissingKeyError(f"Missing key in checkpoint state_dict: {fqn}. {message}")
        if kind == "shape":
            saved, current = re.match(r"shape (.*) in the checkpoint, (.*) in the state", text).groups()
            text = f"Size mismatch between saved torch.Size({saved}) and current: torch.Size({current}) for {fqn}. {message}"
            return _core.MismatchError(text)
        if kind == "kind":
            text = f"Invalid checkpoint metadata for {fqn}, expected BytesStorageMetadata: {text}. {message}"
            return _core.MismatchError(text)
        return _core.MismatchError(f"{fqn}: {text}. {message}")
