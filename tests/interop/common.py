"""What the interop tests share: running dcptool, loading and saving with PyTorch."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

import torch
import torch.distributed.checkpoint as dcp

from content import targets_for

TOOL = os.environ["DCPTOOL"]
SAVE_STATE = os.environ["SAVE_STATE"]
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def run(*arguments):
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, arguments))}: status {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def tool_copy(source, target, *options):
    run(TOOL, "copy", "--quiet", "--no-sync", *options, source, target)


def tool_hash(path):
    found = json.loads(run(TOOL, "hash", "--json", path))
    return {"tensors": found["tensors"], "objects": found["objects"]}


def load(state, path):
    """As one process. The functions have had these names since 2.2."""
    function = getattr(dcp, "load", None) or dcp.load_state_dict
    function(state, storage_reader=dcp.FileSystemReader(str(path)), no_dist=True)


def save(state, path, **options):
    function = getattr(dcp, "save", None) or dcp.save_state_dict
    function(state, storage_writer=dcp.FileSystemWriter(str(path), **options), no_dist=True)


def torch_load(path):
    """Everything in a checkpoint, by name: loaded by PyTorch into tensors of zeros."""
    state = targets_for(dcp.FileSystemReader(str(path)).read_metadata())
    if state:  # PyTorch has no plan for nothing
        load(state, path)
    return state


def knows_all(dtypes):
    return all(hasattr(torch, name) for name in dtypes)


def has_zstd():
    """Whether PyTorch's zstd extension works here."""
    if RELEASE < (2, 7):
        return False
    from torch.distributed.checkpoint._extension import ZStandard

    return ZStandard.is_available()


def main():
    """Runs the tests of the calling module; with nothing but skipped ones the status says so."""
    program = unittest.main(module="__main__", exit=False, verbosity=2)
    result = program.result
    if result.wasSuccessful() and result.testsRun and len(result.skipped) == result.testsRun:
        sys.exit(77)
    sys.exit(0 if result.wasSuccessful() else 1)
