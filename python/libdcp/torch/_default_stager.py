"""The stager with all options, which PyTorch has since 2.9."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
import torch.distributed.checkpoint.staging as _original

from ._in_use import Reused
from ._state_dict_stager import StagerClosed, StateDictStager


class DefaultStager(Reused, _original.DefaultStager):
    """Stages into memory of its own that is reused from state to state: pinned, shared, in the background, with copies that do not
    block, each as the options say. CUDA and NPUs count alike.

    A state is not staged before the upload of the one before it has read that one's memory.

    cap_bytes: most host memory for snapshots; 0: what the state needs. A larger state is saved all the same: what has no room is
    written from where it lies, before the rest, and staging counts as complete when that has been written; under a planner, writer or
    stream transform of the program, when the upload has ended.
    """

    def __init__(self, config=_original.StagingOptions(), *, cap_bytes=0):
        if cap_bytes < 0:
            raise ValueError(f"cap_bytes must be 0 (no cap) or more, not {cap_bytes}")
        has_accelerator = torch.accelerator.is_available()
        if config.use_non_blocking_copy and not has_accelerator:
            raise AssertionError("Non-blocking copy requires that the current accelerator is available.")
        self._config = config
        self._state_dict_stager = StateDictStager(
            pin_memory=config.use_pinned_memory, share_memory=config.use_shared_memory, cap_bytes=cap_bytes
        )
        self._staging_executor = None
        self._staging_stream = None
        self._staging_future = None
        self._is_closed = False
        if config.use_async_staging:
            self._staging_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="libdcp-staging")
            if has_accelerator:
                self._staging_stream = torch.Stream()

    def stage(self, state_dict, **kwargs):
        if self._is_closed:
            raise StagerClosed
        upload = self._take_upload()
        work = self._event_of_caller()
        if self._staging_executor is None:
            return self._stage(state_dict, upload, work)
        self._staging_future = self._staging_executor.submit(self._stage, state_dict, upload, work)
        return self._staging_future

    def reserve(self, state_dict):
        """Makes the memory for snapshots of this state, so that the first save need not wait for the system to give and clear it.
        Takes as long as a first snapshot, and waits for it. The memory goes with the state's own."""
        staged = self.stage(state_dict)
        if isinstance(staged, Future):
            staged.result()
            self._staging_future = None  # with the state in it

    @property
    def is_partial(self):
        """Whether some of the last state had no room: it must not change until that has been written."""
        return self._state_dict_stager.is_partial

    @property
    def left(self):
        """(address, bytes) of the memory that had no room."""
        return self._state_dict_stager.left

    @property
    def staged_bytes(self):
        """Bytes of the last snapshot. What several tensors share counts once."""
        return self._state_dict_stager.staged_bytes

    def close(self):
        self._is_closed = True
        if self._staging_executor is not None:
            self._staging_executor.shutdown(wait=True)
        self._staging_future = None  # with the state in it
        self._state_dict_stager.close()

    def _event_of_caller(self):
        """What the caller has put into its stream so far; the copies, in a stream of their own, wait for it."""
        if self._staging_stream is None:
            return None
        return torch.accelerator.current_stream().record_event()

    def _stage(self, state_dict, upload=None, work=None):
        if upload is not None:
            upload.wait()
        stream = self._staging_stream
        if work is not None:
            stream.wait_event(work)
        is_non_blocking = self._config.use_non_blocking_copy
        with stream if stream is not None else nullcontext():
            staged = self._state_dict_stager.stage(state_dict, non_blocking=is_non_blocking)
        if stream is not None:
            stream.synchronize()
        elif is_non_blocking:
            torch.accelerator.synchronize()
        elif self.is_partial and torch.accelerator.is_available():
            # What stays on the device is read by another thread, which knows nothing of the caller's stream.
            torch.accelerator.current_stream().synchronize()
        return staged
