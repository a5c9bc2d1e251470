"""What the tests of libdcp.torch share."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import sys
import tempfile
import unittest
import warnings

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "interop"))
from content import tensor_bytes  # noqa: E402

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def needs(place, name):
    """Skips a test of a name in a module or class that came with a later PyTorch than the one that is installed."""
    return unittest.skipUnless(hasattr(place, name), f"PyTorch {torch.__version__} has no {place.__name__}.{name}")


class _Absent:
    """In place of a class that the installed PyTorch lacks."""

    def __init__(self, module, name):
        self._reason = f"PyTorch {torch.__version__} has no {module.__name__}.{name}"

    def __call__(self, *arguments, **options):
        raise unittest.SkipTest(self._reason)

    def __getattr__(self, name):
        raise unittest.SkipTest(self._reason)


def class_in(module, name):
    """A class that came with a later PyTorch than some that are tested: a test that uses it is skipped where it is not there."""
    return getattr(module, name, None) or _Absent(module, name)


class TestCase(unittest.TestCase):
    """Each test has a directory of its own, and no warnings but those that it asks for."""

    maxDiff = None

    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="dcp-torch-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)
        self.path = self.root / "checkpoint"
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("ignore")

    def assertStateEqual(self, found, expected):
        """Equal structure, types and bits."""
        self.assertEqual(*map(frozen, (found, expected)))


def frozen(value):
    """A value that compares by its bits: tensors as (dtype, shape, bytes)."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), tensor_bytes(value))
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(frozen, value))
    return (type(value).__name__, repr(value))


def numbered(*shape, dtype=torch.float32, start=0):
    """0, 1, 2, ... in a shape."""
    count = 1
    for extent in shape:
        count *= extent
    return torch.arange(start, start + count).reshape(shape).to(dtype)


def zeros_like(state):
    """The same structure with zeros in tensors and None for other leaves."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state, memory_format=torch.contiguous_format) if state.layout is torch.strided else None
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(item, (torch.Tensor, dict, list)) for item in state):
        return [zeros_like(item) for item in state]
    return None


def torch_bytes(value):
    """As torch.save stores an object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def files_of(path):
    """Names in a directory, sorted."""
    return sorted(os.listdir(path)) if os.path.isdir(path) else []


@contextlib.contextmanager
def raises_together(test, step=None):
    """Expects a CheckpointException; what is yielded gets `.failures` and `.step`."""
    from libdcp.torch import CheckpointException

    caught = Caught()
    try:
        yield caught
    except CheckpointException as error:
        caught.error = error
        caught.failures = error.failures
        caught.step = error.args[0]
        if step is not None:
            test.assertEqual(caught.step, step)
        return
    test.fail("no CheckpointException was raised")


class Caught:
    error = failures = step = None


def failures_of(function):
    """What a save or load raised, in a form that goes through a pipe: (step, {rank: (class name, text)}); None if nothing."""
    from libdcp.torch import CheckpointException

    try:
        function()
    except CheckpointException as error:
        return error.args[0], {rank: (type(cause).__name__, str(cause)) for rank, (cause, _) in error.failures.items()}
    return None


def golden_cases(*, rank_local=False):
    """(directory of the case, what is expected) of all that real releases wrote."""
    for expect in sorted(GOLDEN.glob("*/*/expect.json")):
        expected = json.loads(expect.read_text())
        if bool(expected.get("rank_local")) == rank_local:
            yield expect.parent, expected
