"""Uploads in threads of this process: `torch.distributed.checkpoint._async_thread_executor`, with saves made by libdcp."""

from concurrent.futures import Future

from torch.distributed.checkpoint._async_executor import _AsyncCheckpointExecutor

from . import _group, _save, _uploads
from ._mirror import attributes
from ._steps import channel_of
from ._storage_utils import _storage_setup


class _ThreadBasedAsyncCheckpointExecutor(_AsyncCheckpointExecutor):
    """One save in a thread. The copying and writing is done in C, without the interpreter lock."""

    def execute_save(
        self,
        staging_future_or_state_dict,
        *,
        checkpoint_id=None,
        storage_writer=None,
        planner=None,
        process_group=None,
        no_dist=False,
        use_collectives=True,
        max_bytes_per_second=0,
        low_priority=False,
        finally_=None,
        left=None,
    ):
        """Collective when the group is new: its messages in the background get a connection of their own, made in the caller's
        thread, so that they never mix with those of the saves and loads that the caller makes meanwhile. A rank that has no helper, say,
        tells the others, and raises that at once."""
        failure = None
        try:
            background = _uploads.Background(self._helper(), max_bytes_per_second, low_priority, left)
        except Exception as error:
            if no_dist or not use_collectives:
                raise
            failure, finally_, background = error, None, _uploads.Background()
            staging_future_or_state_dict = failed(error)
        channel = channel_for(process_group, no_dist, use_collectives)

        def save(state):
            writer = _storage_setup(storage_writer, checkpoint_id, reader=False)
            return _save.save(
                state, writer, planner, channel=channel, use_collectives=use_collectives, background=background
            )

        shared = [thing for thing in (channel, storage_writer, planner) if thing is not None and is_weak(thing)]
        upload = _uploads.start(save, staging_future_or_state_dict, shared=shared, background=background, finally_=finally_)
        if failure is not None:
            raise failure
        return upload

    def _helper(self):
        """The process that writes; None: this one."""


def failed(error):
    """The future of a staging that has failed."""
    future = Future()
    future.set_exception(error)
    return future


def channel_for(process_group, no_dist, use_collectives):
    if no_dist:
        return _group.Single()
    return channel_of(process_group, kind="async") if use_collectives else _group.alone_in(process_group)


def is_weak(thing):
    """Whether an object can be a key of a table that does not keep it alive."""
    return getattr(type(thing), "__weakrefoffset__", 0) != 0 and type(thing).__hash__ is not None


__getattr__, __dir__ = attributes(__name__)
