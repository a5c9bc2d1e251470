"""Saves in the background, one thread for each.

Those that could get into each other's way run one after the other, in the order in which they were asked for: the saves of one
group, since its messages come in the order of the calls on every rank, and those with the same writer or planner object.
"""

import atexit
import concurrent.futures
import os
import threading
import time
import traceback
import weakref
from concurrent.futures import Future
from typing import NamedTuple

from .. import _core

# The program comes first: threads of a save, and those that they start, run when it leaves a processor idle, or one second in ten.
NICENESS = 10

# A canceled save ends at its next block, unless it waits for another rank.
STOP_SECONDS = 10

_lock = threading.Lock()  # guards the variables below
_last = weakref.WeakKeyDictionary()  # channel, writer or planner -> future of the last save that has it
_running = {}  # Upload -> its thread


def _forget():
    """The parent's saves go on in the parent alone."""
    global _lock, _last, _running
    _lock, _last, _running = threading.Lock(), weakref.WeakKeyDictionary(), {}


def _stop():
    """Python ends when all saves have. Where that wait is interrupted they are stopped: a thread that writes while the interpreter is
    taken down crashes the process."""
    with _lock:
        running = dict(_running)
    for upload in running:
        upload.cancel()
    deadline = time.monotonic() + STOP_SECONDS
    for thread in running.values():
        thread.join(max(deadline - time.monotonic(), 0))


os.register_at_fork(after_in_child=_forget)
atexit.register(_stop)


class Background:
    """What a save in the background has beside its arguments.

    helper: the process that writes, None: this one. max_bytes_per_second: of this rank's tensors, 0: as fast as it goes.
    low_priority: its threads run when nothing else does. left: a function that tells what of the state is not in the snapshot, as
    [(address, bytes), ...], or None if it does not know.
    """

    def __init__(self, helper=None, max_bytes_per_second=0, low_priority=False, left=None):
        self.helper = helper
        self.left = left
        self.returned = Future()  # done when that has been written, or the save has ended
        self.control = _core.Control(max_bytes_per_second=max_bytes_per_second)
        self.low_priority = low_priority

    def give_back(self):
        if not self.returned.done():
            self.returned.set_result(None)

    def check(self):
        """Raises if the save is to end."""
        if self.control.is_canceled:
            raise _core.CanceledError("stopped by the caller")


class Progress(NamedTuple):
    """How far this rank is with a save."""

    staged_bytes: int | None  # in the snapshot; None: it is not complete, or the stager does not tell
    written_bytes: int  # of tensors' elements
    total_bytes: int  # that this rank has to write; 0 until it is known
    seconds: float  # since writing began
    bytes_per_second: float  # written; 0.0 until it is known
    seconds_left: float | None  # until all is written, at this rate; None: not known


class Upload(Future):
    """The future of a save in the background."""

    def __init__(self, background):
        super().__init__()
        self._control = background.control
        self._returned = background.returned
        self._staged_bytes = None

    def progress(self):
        """How far the save is on this rank: a Progress. Never waits for it. Writers in Python do not tell what they have written."""
        written, total, seconds = self._control.state()
        rate = written / seconds if seconds > 0 else 0.0
        left = 0.0 if self.done() else (total - written) / rate if rate else None
        return Progress(self._staged_bytes, written, total, seconds, rate, left)

    def cancel(self):
        """Asks the save to stop, also once it runs; does not wait. Returns whether it was still under way.

        Unless it is publishing already it fails at its next block, on all ranks, with CanceledError as this rank's cause. The
        checkpoint that was there holds.
        """
        self._control.cancel()
        return not self.done()


def start(save, staged, *, shared, background, finally_=None):
    """Calls `save(state)` in a thread, where `state()` gives the staged state or raises what staging raised. Returns the Upload of
    its result.

    shared: objects that this save has in common with others. finally_: called when the save is over, before the future is done.
    By then nothing here holds the state any more, whoever keeps the future or the error in it.
    """
    task = _Task(save, staged, background, finally_)
    upload = Upload(background)
    upload.set_running_or_notify_cancel()
    with _lock:
        before = {_last[key] for key in shared if key in _last}
        thread = threading.Thread(target=task.run, args=(upload, before), name="libdcp-save")
        thread.start()
        _running[upload] = thread
        for key in shared:
            _last[key] = upload
    return upload


class _Task:
    def __init__(self, save, staged, background, finally_):
        self._save = save
        self._staged = staged
        self._background = background
        self._finally = finally_

    def run(self, upload, before):
        result = failure = None
        try:
            result = self._run(before)
        except BaseException as error:
            failure = without_frames(error)
        if failure is not None:
            upload.set_exception(failure)
        else:
            upload.set_result(result)
        self._background.give_back()
        with _lock:
            _running.pop(upload, None)

    def _run(self, before):
        try:
            step_back(self._background.low_priority)
            concurrent.futures.wait(before)
            return self._save(self._take_state)
        finally:
            self._save = self._staged = None
            if self._finally is not None:
                self._finally()

    def _take_state(self):
        staged, self._staged = self._staged, None
        state = staged.result() if isinstance(staged, Future) else staged
        self._background.check()
        return state


def step_back(far=False):
    """Lowers the priority of the calling thread. far: as far as it goes."""
    if far:
        _core.lower_priority()
        return
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
