"""One load, whoever made the planner and the reader.

The phases are DCP's: each rank reads the metadata and plans, the coordinator looks over the plans, each rank reads. They run through
the hooks of the planner and the reader here; where those are ours and nothing is overridden, in C (`_native.py`).
"""

import os

from . import _group, _native
from ._save import HAS_HOOKS, HAS_OPTIONS, refuse_options, takes_extra
from ._steps import Steps, channel_of
from ._streams import metadata_path
from .default_planner import DefaultLoadPlanner

# Beside what is said before a save: the metadata that is there, of all ranks and of this one alone.
SEES_WHOLE = 4
SEES_OWN = 8


def load(state_dict, reader, planner, *, process_group=None, coordinator=0, no_dist=False, options=None):
    """Loads into a state dict that holds no Stateful objects any more."""
    planner = planner if planner is not None else DefaultLoadPlanner()
    options = options or {}
    channel = _group.Single() if no_dist else channel_of(process_group)
    with channel.lock:
        facts = Steps(channel, coordinator).union("plan", _facts(reader, planner, channel.rank, options))
        if not facts & HAS_HOOKS:
            is_saved_alone = facts & SEES_OWN and not facts & SEES_WHOLE
            _native.load(state_dict, reader, planner, channel, coordinator, is_saved_alone, options)
            return
        refuse_options(facts, options, "reader")
        _join(reader, process_group, no_dist)
        _Hooks(state_dict, reader, planner, channel.rank, channel.rank == coordinator).load_together(Steps(channel, coordinator))


def _facts(reader, planner, rank, options):
    """What the ranks have to know of each other: where one of them goes through its hooks all do, and where none sees the metadata of
    all, since each was saved by itself, each loads its own, as in DCP."""
    facts = HAS_OPTIONS if options else 0
    if not _native.can_load(reader, planner):
        return facts | HAS_HOOKS
    if os.path.exists(metadata_path(reader)):
        facts |= SEES_WHOLE
    if os.path.exists(metadata_path(reader, rank)):
        facts |= SEES_OWN
    return facts


def _join(reader, process_group, no_dist):
    """Tells a reader of ours whose ranks work together which ones they are. PyTorch's interface has no place for it."""
    join = getattr(reader, "_join", None)
    if join is not None:
        join(process_group, no_dist)


class _Hooks:
    """The phases of one load through the methods of a planner and a reader."""

    def __init__(self, state_dict, reader, planner, rank, is_coordinator):
        self.state_dict = state_dict
        self.reader = reader
        self.planner = planner
        self.rank = rank
        self.is_coordinator = is_coordinator
        self.use_collectives = True

    def load_together(self, steps):
        plan = steps.reduce_scatter("plan", self.plan_local, self.plan_global)
        steps.all_gather("read", lambda: self.read(plan))

    def plan_local(self):
        metadata = self._read_metadata()
        self.planner.set_up_planner(self.state_dict, metadata, self.is_coordinator)
        self._set_up_reader(metadata)
        return self.reader.prepare_local_plan(self.planner.create_local_plan())

    def plan_global(self, plans):
        return self.reader.prepare_global_plan(self.planner.create_global_plan(plans))

    def read(self, plan):
        self.reader.read_data(self.planner.finish_plan(plan), self.planner).wait()

    def _read_metadata(self):
        """The checkpoint's, or, where ranks were saved each by itself, this rank's."""
        try:
            metadata = self.reader.read_metadata()
            if metadata is None:
                raise ValueError(f"{type(self.reader).__name__}.read_metadata() returned None")
            return metadata
        except Exception as error:
            if not takes_extra(self.reader.read_metadata):
                raise
            return self._read_own_metadata(error)

    def _read_own_metadata(self, global_error):
        try:
            metadata = self.reader.read_metadata(rank=self.rank)
        except Exception as error:  # the first cause counts; this one is only noted
            global_error.add_note(f"neither .metadata nor __{self.rank}.metadata could be read; of the latter: {error}")
            raise global_error from None
        self.use_collectives = False
        return metadata

    def _set_up_reader(self, metadata):
        extra = {"rank": self.rank, "use_collectives": self.use_collectives}
        set_up = self.reader.set_up_storage_reader
        set_up(metadata, self.is_coordinator, **(extra if takes_extra(set_up) else {}))
