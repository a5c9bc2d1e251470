"""What the tests of staging share, beside what they take from the tests of the drop-in."""

import importlib.util
import os
import pathlib
import threading

import torch

import libdcp.torch as dcp
from libdcp.torch.default_planner import DefaultSavePlanner
from libdcp.torch.filesystem import FileSystemWriter
from libdcp.torch import staging, state_dict_saver
from support import class_in

DefaultStager = class_in(staging, "DefaultStager")
StagingOptions = class_in(staging, "StagingOptions")
AsyncSaveResponse = class_in(state_dict_saver, "AsyncSaveResponse")
HAS_STATE_DICT_STAGER = importlib.util.find_spec("torch.distributed.checkpoint._state_dict_stager") is not None
_stagers = importlib.import_module("libdcp.torch._state_dict_stager") if HAS_STATE_DICT_STAGER else staging
StateDictStager = class_in(_stagers, "StateDictStager")

TIMEOUT_S = 60
# (pinned, shared, in the background, not blocking)
PLAIN, IN_BACKGROUND = ((False, False, in_background, False) for in_background in (False, True))


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


def new_stager(options=PLAIN, **keywords):
    return DefaultStager(StagingOptions(*options), **keywords)


def helpers():
    """The processes dcp-writer that this process has started and that run."""
    running = (int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in running if state_of(pid) == ("dcp-writer", os.getpid())]


def state_of(pid):
    """Name and parent of a process that runs; None if there is none."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, (state, parent) = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()[:2]
    return None if state in "ZX" else (name, int(parent))
