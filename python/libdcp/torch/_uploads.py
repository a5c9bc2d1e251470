"""Saves in the background, one thread for each.

Those that could get into each other's way run one after the other, in the order in which they were asked for: the saves of one
group, since its messages come in the order of the calls on every rank, and those with the same writer or planner object.
"""

import concurrent.futures
import os
import threading
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

# The program comes first: threads of a save, and those that they start, run when it leaves a processor idle, or one second in ten.
NICENESS = 10

_lock = threading.Lock()  # guards _last
_last = weakref.WeakKeyDictionary()  # channel, writer or planner -> future of the last save that has it


def start(save, staged, *, shared, finally_=None):
    """Calls `save(state)` in a thread, where `state()` gives the staged state or raises what staging raised. Returns the future of
    its result.

    shared: objects that this save has in common with others. finally_: called when the save is over, before the future is done.
    By then nothing here holds the state any more, whoever keeps the future or the error in it.
    """
    task = _Task(save, staged, finally_)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="libdcp-save")
    with _lock:
        before = {_last[key] for key in shared if key in _last}
        future = executor.submit(task.run, before)
        for key in shared:
            _last[key] = future
    executor.shutdown(wait=False)
    return future


class _Task:
    def __init__(self, save, staged, finally_):
        self._save = save
        self._staged = staged
        self._finally = finally_

    def run(self, before):
        try:
            step_back()
            concurrent.futures.wait(before)
            return self._save(self._take_state)
        except BaseException as error:
            raise without_frames(error)
        finally:
            self._save = self._staged = None
            if self._finally is not None:
                self._finally()

    def _take_state(self):
        staged, self._staged = self._staged, None
        return staged.result() if isinstance(staged, Future) else staged


def step_back():
    """Lowers the priority of the calling thread."""
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + NICENESS, 19))
    except OSError:
        pass  # a system that does not let it


def without_frames(error):
    """The exception without the frames that it came through, in whose variables the state lives on as long as somebody keeps the
    exception. What a traceback would show of them is added as text."""
    error.add_note("In the thread of the save:\n" + "".join(traceback.format_tb(error.__traceback__)))
    _drop_tracebacks(error, set())
    return error


def _drop_tracebacks(error, seen):
    """Also of its causes, and of the failures that a CheckpointException has collected."""
    if not isinstance(error, BaseException) or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = None
    _drop_tracebacks(error.__cause__, seen)
    _drop_tracebacks(error.__context__, seen)
    failures = getattr(error, "failures", None)
    for failure in failures.values() if isinstance(failures, dict) else ():
        _drop_tracebacks(failure[0], seen)
