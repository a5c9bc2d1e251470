"""What the tests of staging share, beside what they take from the tests of the drop-in."""

import threading
from unittest import mock

import torch

import libdcp.torch as dcp
import pool
from libdcp.torch.default_planner import DefaultSavePlanner
from libdcp.torch.filesystem import FileSystemWriter
from libdcp.torch.staging import DefaultStager, StagingOptions

TIMEOUT_S = 60
PLAIN = StagingOptions(False, False, False, False)
IN_BACKGROUND = StagingOptions(False, False, True, False)


class Gate:
    """A place that an upload does not pass before it is let."""

    def __init__(self):
        self._is_open = threading.Event()
        self.reached = threading.Event()

    def open(self):
        self._is_open.set()

    def pass_through(self):
        self.reached.set()
        if not self._is_open.wait(TIMEOUT_S):
            raise TimeoutError("the gate was never opened")


class GatedWriter(FileSystemWriter):
    """Writes when its gate is opened."""

    def __init__(self, path, gate, **options):
        super().__init__(path, **options)
        self.gate = gate

    def write_data(self, plan, planner):
        self.gate.pass_through()
        return super().write_data(plan, planner)


class GatedPlanner(DefaultSavePlanner):
    """Plans when its gate is opened; looks at the state only then."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.gate.pass_through()
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class FailingWriter(FileSystemWriter):
    """Writes nothing and says so, where it is to fail."""

    def __init__(self, path, fails=True):
        super().__init__(path)
        self.fails = fails

    def write_data(self, plan, planner):
        if self.fails:
            raise ValueError("write_data fails")
        return super().write_data(plan, planner)


def loaded(path, **state):
    """A state of this structure with what the checkpoint has."""
    target = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def upload_of(result):
    """The future of the upload, whatever kind of result async_save has given."""
    return getattr(result, "upload_completion", result)


def new_stager(options=PLAIN):
    return DefaultStager(options)


def start_helper(ranks, path):
    """Has this rank's helper process started, by a save of its own."""
    from libdcp.torch.state_dict_saver import AsyncCheckpointerType

    kind = AsyncCheckpointerType.PROCESS
    dcp.async_save({"w": torch.ones(1)}, checkpoint_id=f"{path}/{ranks.rank}", no_dist=True, async_checkpointer_type=kind).result()


def start_helpers(path, **ranks):
    """Before the saves of groups, whose deadline is too short for new interpreters on a busy machine."""
    with mock.patch.object(pool, "TIMEOUT_S", 200):
        pool.run(start_helper, str(path), **ranks)
