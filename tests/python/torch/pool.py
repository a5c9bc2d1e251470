"""Processes that act as ranks for the tests: started once, at the first test that wants them, and used by all.

    def save_my_part(ranks, path): ...           # in a test module, so that the processes can import it

    pool.run(save_my_part, path, world=2)        # the results of ranks 0 and 1

A function runs with `ranks`: the process group of those that take part (the default group if all do), its rank and size.
"""

import atexit
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta

WORLD = 4
SUBGROUPS = ((0, 1), (0, 1, 2), (1, 3))
TIMEOUT_S = 30

_context = multiprocessing.get_context("forkserver")
_pool = None


class Ranks:
    """The group that a function runs in."""

    def __init__(self, group, members, rank):
        self.group = group
        self.members = members
        self.rank = rank
        self.size = len(members)

    def line(self):
        """The ranks as a device mesh. A new mesh of some ranks would be collective among all."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group if self.group is not None else dist.group.WORLD, "cpu")

    def barrier(self):
        import torch.distributed as dist

        dist.barrier(self.group)


def run(function, *arguments, world=WORLD, members=None):
    """function(ranks, *arguments) on ranks 0 to world - 1, or on the given members. Returns their results."""
    members = tuple(members or range(world))
    if len(members) == 1:
        return [function(Ranks(None, members, 0), *arguments)]
    global _pool
    if _pool is None:
        _pool = _Pool()
    try:
        return _pool.run(function, arguments, members)
    except BaseException:
        stop()  # ranks that disagree are of no use to the next test
        raise


def stop():
    global _pool
    if _pool is not None:
        _pool.stop()
        _pool = None


atexit.register(stop)


class _Pool:
    def __init__(self):
        import torch.distributed as dist

        # One import for all ranks: they are forked from a process that has done it.
        _context.set_forkserver_preload(["libdcp.torch", "torch.distributed.device_mesh"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self.store.port, theirs, list(sys.path)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, arguments, members):
        for rank in members:
            self.pipes[rank].send((function.__module__, function.__qualname__, arguments, members))
        deadline = time.monotonic() + TIMEOUT_S + 15
        answers = [self._answer(rank, deadline) for rank in members]
        failed = [f"rank {rank}:\n{text}" for rank, (is_good, text) in zip(members, answers) if not is_good]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def _answer(self, rank, deadline):
        if not self.pipes[rank].poll(max(deadline - time.monotonic(), 0)):
            return False, "no answer before the deadline"
        try:
            return self.pipes[rank].recv()
        except EOFError:
            return False, "the process has died"

    def stop(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(rank, port, pipe, path):
    """What a process does: functions that come through the pipe, until it is closed."""
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=TIMEOUT_S))
    groups = {members: dist.new_group(list(members)) for members in SUBGROUPS}
    groups[tuple(range(WORLD))] = None
    while True:
        try:
            module, name, arguments, members = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(_call(module, name, arguments, Ranks(groups[members], members, members.index(rank))))


def _call(module, name, arguments, ranks):
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        return True, function(ranks, *arguments)
    except BaseException:
        return False, traceback.format_exc()
