"""One save, whoever made the planner and the writer.

The phases are DCP's: each rank plans, the coordinator makes one plan of all, each rank writes, the coordinator finishes. They run
through the hooks of the planner and the writer here; where those are ours and nothing is overridden, in C (`_native.py`).
"""

import inspect
import warnings

from . import _group, _native
from ._steps import Steps, channel_of
from .default_planner import DefaultSavePlanner
from .filesystem import FileSystemWriter

# What ranks tell each other before they start.
HAS_HOOKS = 1  # something of the planner, writer or reader is the program's own
HAS_OPTIONS = 2  # of ours


def save(
    state_dict,
    writer,
    planner,
    *,
    process_group=None,
    coordinator=0,
    no_dist=False,
    use_collectives=True,
    options=None,
    channel=None,
    background=None,
):
    """Saves a state dict that holds no Stateful objects any more. Returns the Metadata of what was saved.

    `state_dict` may be a function that gives it; what that raises is a failure of this rank's plan, or raised as it is where there is
    nobody to tell. `channel`: in place of the group's own. `background`: of a save in the background, an `_uploads.Background`.
    """
    planner = planner if planner is not None else DefaultSavePlanner()
    options = options or {}
    channel = channel if channel is not None else _channel(process_group, no_dist, use_collectives)
    with channel.lock:
        if callable(state_dict) and (channel.size == 1 or not use_collectives):
            state_dict = state_dict()
        facts = (0 if _native.can_save(writer, planner) else HAS_HOOKS) | (HAS_OPTIONS if options else 0)
        if use_collectives:  # where one rank goes through its hooks all do
            facts = Steps(channel, coordinator).union("plan", facts)
        if not facts & HAS_HOOKS:
            if background is not None:
                options = {
                    "helper": background.helper,
                    "progress": background.control,
                    "lent": background.left,
                    "returned": background.give_back,
                    **options,
                }
            return _native.save(state_dict, writer, planner, channel, coordinator, use_collectives, options)
        refuse_options(facts, options, "writer")
        hooks = _Hooks(state_dict, writer, planner, channel.rank, channel.rank == coordinator, use_collectives, background)
        _tell(writer, "_begin", background)
        try:
            return hooks.save_together(Steps(channel, coordinator)) if use_collectives else hooks.save_alone()
        except BaseException:
            _tell(writer, "_abandon")
            raise


def refuse_options(facts, options, storage):
    """On every rank, if any has them."""
    if facts & HAS_OPTIONS:
        names = ", ".join(sorted(options)) or "options of another rank"
        raise ValueError(f"{names}: only with libdcp's own planner and {storage}, nothing overridden, on all ranks")


def _channel(process_group, no_dist, use_collectives):
    if no_dist:
        return _group.Single()
    return channel_of(process_group) if use_collectives else _group.alone_in(process_group)


def _tell(writer, what, *arguments):
    """Our writers learn where a save begins, and that it has failed: then they give up their place and remove their files. Others
    have nothing like it."""
    method = getattr(writer, what, None)
    if method is not None:
        method(*arguments)


class _Hooks:
    """The phases of one save through the methods of a planner and a writer."""

    def __init__(self, state_dict, writer, planner, rank, is_coordinator, use_collectives, background=None):
        self.state_dict = state_dict
        self.writer = writer
        self.planner = planner
        self.rank = rank
        self.is_coordinator = is_coordinator
        self.use_collectives = use_collectives
        self.background = background
        self.metadata = None

    def save_together(self, steps):
        plan = steps.reduce_scatter("plan", self.plan_local, self.plan_global)
        return steps.all_reduce("write", lambda: self.write(plan), self.finish)

    def save_alone(self):
        """Without collectives there is nobody to tell: what goes wrong is raised as it is, and no rank waits for another."""
        [plan] = self.plan_global([self.plan_local()])
        return self.finish([self.write(plan)])

    def plan_local(self):
        if callable(self.state_dict):
            self.state_dict = self.state_dict()
        self._set_up_planner()
        self._set_up_writer()
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def plan_global(self, plans):
        plans, self.metadata = self.planner.create_global_plan(plans)
        return self.writer.prepare_global_plan(plans)

    def write(self, plan):
        self._warn_of_writing_here()
        writes = self.writer.write_data(self.planner.finish_plan(plan), self.planner)
        writes.wait()
        if self.background is not None:
            self.background.check()
        return writes.value()

    def finish(self, results):
        self.writer.finish(metadata=self.metadata, results=results)
        return self.metadata

    def _warn_of_writing_here(self):
        is_ours = isinstance(self.writer, FileSystemWriter) and self.writer._writes_in_c()
        if self.background is not None and self.background.helper is not None and not is_ours:
            warnings.warn(
                f"{type(self.writer).__name__} writes in a thread of this process although the save is of the kind PROCESS: the"
                " helper process writes for libdcp's FileSystemWriter on the local file system",
                stacklevel=2,
            )

    def _set_up_planner(self):
        storage_meta = self.writer.storage_meta()
        if "storage_meta" in inspect.signature(self.planner.set_up_planner).parameters:
            self.planner.set_up_planner(
                state_dict=self.state_dict, storage_meta=storage_meta, is_coordinator=self.is_coordinator
            )
            return
        warnings.warn(
            f"{type(self.planner).__name__}.set_up_planner does not take the argument storage_meta, which SavePlanner has since"
            " PyTorch 2.4; it is called without",
            stacklevel=2,
        )
        self.planner.set_up_planner(self.state_dict, self.is_coordinator)

    def _set_up_writer(self):
        extra = {"rank": self.rank, "use_collectives": self.use_collectives}
        set_up = self.writer.set_up_storage_writer
        set_up(self.is_coordinator, **(extra if takes_extra(set_up) else {}))


def takes_extra(method):
    """DCP passes newer arguments only to methods with a parameter named kwargs."""
    return "kwargs" in inspect.signature(method).parameters
