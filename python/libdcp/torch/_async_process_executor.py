"""Uploads that a helper process writes: `torch.distributed.checkpoint._async_process_executor`, with saves made by libdcp.

PyTorch's has a whole save done in its process, in a process group made for it. Here the save is one of a thread, whatever the group,
and dcp-writer moves the bytes to the files (`_helper.py`), so the group may be another for each save, or none.
"""

from . import _helper
from ._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from ._mirror import attributes


class _ProcessBasedAsyncCheckpointExecutor(_ThreadBasedAsyncCheckpointExecutor):
    def _helper(self):
        return _helper.current()


__getattr__, __dir__ = attributes(__name__)
