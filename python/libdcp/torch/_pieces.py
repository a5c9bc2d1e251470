"""Tensors in pieces of bounded size."""

import math
from typing import NamedTuple

import torch

ALIGNMENT = 16  # of parts in a message: enough for every dtype


class Part(NamedTuple):
    """A box of a tensor, and where its elements start in the message that carries them."""

    name: str
    dtype: torch.dtype
    offsets: tuple
    sizes: tuple
    start: int

    def view(self, message):
        """The part's elements in a message, a tensor of bytes."""
        length = math.prod(self.sizes) * self.dtype.itemsize
        return message[self.start : self.start + length].view(self.dtype).view(self.sizes)


def boxes(shape, max_elems):
    """Cuts a shape into boxes (offsets, sizes), in order. In a row-major tensor each of them is one range of memory."""
    if 0 in shape:
        return
    if math.prod(shape) <= max_elems:
        yield (0,) * len(shape), tuple(shape)
        return
    rows, inner = shape[0], tuple(shape[1:])
    step = max_elems // math.prod(inner)
    if step == 0:
        for row in range(rows):
            for offsets, sizes in boxes(inner, max_elems):
                yield (row, *offsets), (1, *sizes)
        return
    for row in range(0, rows, step):
        yield (row, *(0,) * len(inner)), (min(step, rows - row), *inner)


def messages(tensors, max_bytes):
    """Packs (name, dtype, shape) of tensors into messages of at most max_bytes: yields ([Part, ...], length of the message)."""
    parts, length = [], 0
    for name, dtype, shape in tensors:
        for offsets, sizes in boxes(tuple(shape), max(max_bytes // dtype.itemsize, 1)):
            start = -(-length // ALIGNMENT) * ALIGNMENT
            size = math.prod(sizes) * dtype.itemsize
            if parts and start + size > max_bytes:
                yield parts, length
                parts, start = [], 0
            parts.append(Part(name, dtype, offsets, sizes, start))
            length = start + size
    if parts:
        yield parts, length


def overlap(offsets, sizes, other_offsets, other_sizes):
    """What two boxes share, as a box (offsets, sizes); None if there is nothing."""
    starts = tuple(map(max, offsets, other_offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, other_offsets, other_sizes))
    shared = tuple(end - start for start, end in zip(starts, ends))
    return None if any(extent <= 0 for extent in shared) else (starts, shared)


def narrowed(tensor, origin, offsets, sizes):
    """The box of a tensor whose first element is at `origin`."""
    for dim, (first, start, size) in enumerate(zip(origin, offsets, sizes)):
        tensor = tensor.narrow(dim, start - first, size)
    return tensor


def copy(target, source):
    """target.copy_(source), also for dtypes that PyTorch has no arithmetic for."""
    if target.dtype is source.dtype and target.dtype.itemsize == 1:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)
