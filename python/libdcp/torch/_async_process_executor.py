"""Uploads that a helper process writes: `torch.distributed.checkpoint._async_process_executor`, with saves made by libdcp.

PyTorch's has a whole save done in its process, in a process group made for it. Here the save is one of a thread, whatever the group,
and only the writing is done in the helper (`_helper.py`), so the group may be another for each save, or none.
"""

from torch.futures import Future

from ._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from ._helper import helper
from ._mirror import attributes


class _ProcessBasedAsyncCheckpointExecutor(_ThreadBasedAsyncCheckpointExecutor):
    def _wrapped(self, writer):
        return _WritesInHelper(writer)


class _WritesInHelper:
    """A writer whose `write_data` is called in the helper. All else is the writer's own."""

    def __init__(self, writer):
        self._writer = writer

    def __getattr__(self, name):
        return getattr(self._writer, name)

    def write_data(self, plan, planner):
        data = [planner.resolve_data(item) for item in plan.items]
        written = Future()
        written.set_result(helper.write(self._writer, plan, data))
        return written


__getattr__, __dir__ = attributes(__name__)
