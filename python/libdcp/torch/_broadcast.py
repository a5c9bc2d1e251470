"""Loading by one rank for all: the coordinator reads a file, the others receive each tensor and take their part of it.

What goes wrong on one rank ends the load on all of them, and none is left waiting: before anything is sent the ranks tell the
coordinator what they want and learn whether it is there, and every message says whether it could be filled. The rank that failed
raises; the others return, and hear of it in the step that all of them end with.
"""

import contextlib
import pickle

import torch
import torch.distributed as dist

from .. import _core
from . import _describe, _group, _pieces
from ._steps import attempt, failures_in

MESSAGE_BYTES = 32 << 20


class Ranks:
    """Those who load together over a process group (None: the default one), or one process by itself."""

    def __init__(self, process_group, source, is_alone):
        self.is_alone = is_alone
        self.source = source
        self.is_source = is_alone or dist.get_rank(process_group) == source
        if not is_alone:
            self.group = process_group
            self.channel = _group.of(process_group)
            self.device = _describe.device_of_group(process_group)
            self.global_source = source if process_group is None else dist.get_global_rank(process_group, source)

    def gather(self, value):
        """The values of all ranks on the source, None elsewhere."""
        if self.is_alone:
            return [value]
        blobs = _group.gather(self.channel, self.source, pickle.dumps(value))
        return blobs and [pickle.loads(blob) for blob in blobs]

    def tell(self, value):
        """The source's value, on every rank."""
        if self.is_alone:
            return value
        blobs = [pickle.dumps(value)] * self.channel.size if self.is_source else None
        return pickle.loads(_group.scatter(self.channel, self.source, blobs))

    def broadcast(self, message):
        """The source's message on every rank, in the memory of the group's device: host memory where the group knows it."""
        if self.is_alone:
            return message
        message = message.to(self.device)
        dist.broadcast(message, src=self.global_source, group=self.group)
        return message


def load(items, planner, check, open_file, ranks, is_partial):
    """Fills what the read items want, unless check(items) raises. open_file() is called on the coordinator alone.
    is_partial: targets that the file lacks stay as they are."""
    wants = attempt(lambda: wanted(items, planner, check))
    with contextlib.ExitStack() as files:
        file, tensors = _agree(wants, lambda all_wants: _look_up(files.enter_context(open_file()), all_wants, is_partial), ranks)
        if tensors is not None:
            _send(file, tensors, items, planner, ranks)


def wanted(items, planner, check):
    """{name: shape of the whole tensor, None if unknown} of read items."""
    check(items)
    entries = getattr(getattr(planner, "metadata", None), "state_dict_metadata", {})
    return {item.storage_index.fqn: _size_of(entries.get(item.storage_index.fqn)) for item in items}


def _size_of(entry):
    size = getattr(entry, "size", None)
    return None if size is None else tuple(size)


def _agree(wants, look_up, ranks):
    """(file, tensors) on the coordinator, (None, tensors) elsewhere; tensors is None where another rank has failed."""
    has_failed = bool(failures_in([wants]))
    all_wants = ranks.gather(None if has_failed else wants)
    found = (None, None)
    if ranks.is_source and not any(one is None for one in all_wants):
        found = attempt(lambda: look_up(all_wants))
    failed = failures_in([wants, found])
    tensors = ranks.tell(None if failed else found[1])
    if failed:
        raise failed[min(failed)][0]
    return found[0], tensors


def _look_up(file, all_wants, is_partial):
    """The file and (name, dtype, shape) of what the ranks want from it."""
    found = {}
    names = set(file.names())
    for rank, wants in enumerate(all_wants):
        for name, size in wants.items():
            if name not in names:
                if is_partial:
                    continue
                raise _core.MissingKeyError(f"Missing key in checkpoint state_dict: {name}. The file does not have it.")
            if name not in found:
                found[name] = _tensor_in(file, name)
            if size is not None and size != found[name][1]:
                raise AssertionError(f"req {name} mismatch sizes {size} on rank {rank} vs {found[name][1]} in the file")
    return file, [(name, *found[name]) for name in sorted(found)]


def _tensor_in(file, name):
    kind, dtype, shape, *_ = file.item(name)
    if kind != "tensor":
        raise RuntimeError(f"Non-tensor value identified at {name} in the file; only tensors can be read from there")
    return _describe.dtype_of(dtype), tuple(shape)


def _send(file, tensors, items, planner, ranks):
    targets = _Targets(items, planner)
    targets.open_empty({name for name, _, shape in tensors if 0 in shape})
    for parts, length in _pieces.messages(tensors, MESSAGE_BYTES):
        message = torch.empty(length + 1, dtype=torch.uint8)
        failure = attempt(lambda m=message: _fill(m, parts, file)) if ranks.is_source else None
        message[-1] = failure is not None
        message = ranks.broadcast(message)
        if message[-1]:
            if failure is not None:
                raise failure[0]
            return
        targets.take(parts, message)
    targets.raise_failure()


def _fill(message, parts, file):
    reads = []
    for part in parts:
        memory = part.view(message)
        reads.append((part.name, part.offsets, part.sizes, _describe.whole(memory, memory)))
    file.read_many(reads)


class _Targets:
    """What this rank wants, filled part by part. An error is kept to the end, since the others rely on this rank till then."""

    def __init__(self, items, planner):
        self._planner = planner
        self._by_name = {}  # name -> [_Target, ...]
        self._failure = None
        for item in items:
            self._by_name.setdefault(item.storage_index.fqn, []).append(_Target(item))

    def open_empty(self, names):
        """Tensors without elements come in no message."""
        for name in names:
            for target in self._by_name.get(name, ()):
                self._attempt(lambda t=target: t.fill(self._planner, None, None))

    def take(self, parts, message):
        for part in parts:
            for target in self._by_name.get(part.name, ()):
                self._attempt(lambda t=target, p=part: t.fill(self._planner, p, message))

    def raise_failure(self):
        if self._failure is not None:
            raise self._failure[0]

    def _attempt(self, function):
        if self._failure is None:
            self._failure = attempt(function)


class _Target:
    """One read item. The planner is asked for its memory when the first elements come, and told when the last are there."""

    def __init__(self, item):
        starts = item.storage_index.offset
        self.item = item
        self.sizes = tuple(item.lengths)
        self.offsets = tuple(item.storage_offsets)
        if starts is not None:
            self.offsets = tuple(start + inner for start, inner in zip(starts, self.offsets))
        self.memory = None
        self.missing = None  # elements that have not come yet

    def fill(self, planner, part, message):
        shared = part and _pieces.overlap(self.offsets, self.sizes, part.offsets, part.sizes)
        if shared is None and part is not None:
            return
        if self.memory is None:
            self._open(planner)
        if shared is not None:
            source = _pieces.narrowed(part.view(message), part.offsets, *shared)
            _pieces.copy(_pieces.narrowed(self.memory, self.offsets, *shared), source)
            self.missing -= source.numel()
        if self.missing == 0:
            planner.commit_tensor(self.item, self.memory)

    def _open(self, planner):
        self.memory = planner.resolve_tensor(self.item).detach()
        if tuple(self.memory.shape) != self.sizes:
            raise AssertionError(f"req {self.item.storage_index} mismatch sizes {self.memory.shape} vs {self.sizes}")
        self.missing = self.memory.numel()
