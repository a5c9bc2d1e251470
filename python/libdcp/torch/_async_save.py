"""Saving in the background: a snapshot of the state is taken, and written while the program goes on."""

import concurrent.futures
from concurrent.futures import Future

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_saver as _original
from torch.distributed.checkpoint.stateful import Stateful

from . import staging
from ._async_process_executor import _ProcessBasedAsyncCheckpointExecutor
from ._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor, failed
from ._in_use import Reused

AsyncCheckpointerType = _original.AsyncCheckpointerType
AsyncSaveResponse = getattr(_original, "AsyncSaveResponse", None)  # since 2.9


def async_save(
    state_dict,
    *,
    checkpoint_id=None,
    storage_writer=None,
    planner=None,
    process_group=None,
    async_checkpointer_type=AsyncCheckpointerType.THREAD,
    async_stager=None,
    no_dist=False,
    use_collectives=True,
    max_bytes_per_second=0,
    low_priority=False,
):
    """Takes a snapshot of a state and saves it in the background. Collective over `process_group`, unless `no_dist`.

    What PyTorch's `async_save` says of its arguments holds. Once the snapshot is taken the program may change every tensor, those
    on the CPU too; where a stager's cap leaves no room for all of it, once what had none has been written. Saves of one group are
    written one after the other. The snapshot's memory is free again when the future is done.

    async_stager: takes the snapshot; stays the caller's to close, and waits with the next snapshot for the upload of this one if
    it uses its memory again. Without one it is the writer, if that is a stager, else a blocking one of the call's own.

    async_checkpointer_type: with PROCESS the bytes of large tensors are written by a process of its own, dcp-writer. Planners and
    writers of the program are called in a thread of this process in either case.

    Two arguments are ours. max_bytes_per_second: how many bytes of tensors this rank writes in a second at most; 0: no bound.
    low_priority: the save's threads run when nothing else does, with the lowest CPU priority and the idle I/O class.

    Returns the future of the Metadata, whose `progress()` tells how far the save is, and whose `cancel()` stops it (`_uploads.Upload`).
    With a stager that works in the background it is an AsyncSaveResponse: the snapshot is complete when `staging_completion` is done, the
    checkpoint when `upload_completion` is. If taking the snapshot fails, both tell.
    """
    _check_group(process_group)
    is_alone = no_dist or not dist.is_available() or not dist.is_initialized()
    executor = _executor(async_checkpointer_type)

    def upload(staged, finally_=None):
        return executor.execute_save(
            staged,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=is_alone,
            use_collectives=use_collectives,
            max_bytes_per_second=max_bytes_per_second,
            low_priority=low_priority,
            finally_=finally_,
            left=lambda: stager.left if _has_cap(stager) else None,
        )

    def stage():
        try:
            return stager.stage({key: _state_of(value) for key, value in state_dict.items()})
        except BaseException as error:
            if not is_alone and use_collectives:
                upload(failed(error))  # the other ranks must not wait for this one
            raise

    stager, close = _stager(async_stager, storage_writer)
    try:
        staged = stage()
        uploaded = upload(staged, close)
    except BaseException:
        close()
        raise
    if isinstance(stager, Reused):
        stager._upload_started(uploaded)
    completion = _completion(staged, stager, uploaded)
    if isinstance(staged, Future) and AsyncSaveResponse is not None:
        return AsyncSaveResponse(staging_completion=completion, upload_completion=uploaded)
    if not isinstance(staged, Future):
        concurrent.futures.wait([completion])
    if stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return uploaded


def _check_group(process_group):
    if dist.is_available() and dist.is_initialized():
        group = process_group or dist.distributed_c10d._get_default_group()
        if torch.device("cpu") not in group._device_types:
            raise AssertionError(
                "A CPU backend must be enabled for async save; try initializing process group with 'cpu:gloo,cuda:nccl'"
            )


def _stager(given, writer):
    """The stager, and what ends it when the upload is over."""
    if given is not None:
        return given, _nothing
    if writer is not None and isinstance(writer, staging.AsyncStager):
        return writer, _nothing
    if hasattr(staging, "DefaultStager"):
        own = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    else:
        own = staging.BlockingAsyncStager()
    return own, own.close


def _nothing():
    pass


def _has_cap(stager):
    """Whether it may have no room for a state. What a program's own stager has under these names says nothing of it."""
    return isinstance(stager, getattr(staging, "DefaultStager", ()))


def _state_of(value):
    return value.state_dict() if isinstance(value, Stateful) else value


def _executor(kind):
    if kind == AsyncCheckpointerType.PROCESS:
        return _ProcessBasedAsyncCheckpointExecutor()
    return _ThreadBasedAsyncCheckpointExecutor()


def _completion(staged, stager, uploaded):
    """A future that is done, without a result, when the state may be changed: whoever keeps it shall not keep the state.

    What had no room in a stager's memory is written from where it lies, so the state may be changed when that has been written.
    """
    completion = Future()

    def tell(staged):
        error = staged.exception()
        if error is not None:
            completion.set_exception(error)
            return
        # Here no later state has been staged yet.
        uploaded._staged_bytes = getattr(stager, "staged_bytes", None)
        if _has_cap(stager) and stager.is_partial:
            uploaded._returned.add_done_callback(lambda _: completion.set_result(None))
        else:
            completion.set_result(None)

    (staged if isinstance(staged, Future) else _done()).add_done_callback(tell)
    return completion


def _done():
    future = Future()
    future.set_result(None)
    return future
