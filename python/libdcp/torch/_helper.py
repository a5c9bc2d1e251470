"""The process that writes for saves of the kind PROCESS: dcp-writer, one for each program, started by the first such save that has
something for it.

It moves bytes to files and does nothing else. Plans, messages between ranks, hooks of the program and the commit stay here.
"""

import os
import threading

from .. import _core

_lock = threading.Lock()  # guards _helper
_helper = None


def current():
    """The handle of the process. Raises UnsupportedError if its executable is not there."""
    global _helper
    with _lock:
        if _helper is None:
            _helper = _core.Helper()
        return _helper


def _forget():
    """The parent's process is not the child's."""
    global _lock, _helper
    _lock, _helper = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
