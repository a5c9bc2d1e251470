"""Copies of many tensors and storages: those within host memory all at once, by two threads, without the interpreter lock."""

import os

import torch

from .. import _core

# Two threads reach what the memory gives; more would take them away from the program.
THREADS = min(2, os.cpu_count() or 1)


def copy_memory(copies):
    """`copies` are (target address, source address, bytes)."""
    _core.copy_many([copy for copy in copies if copy[2]], THREADS)


def copy_storages(pairs):
    """Copies each source storage into its target of the same size; `pairs` are (target, source), on the host."""
    copy_memory((target.data_ptr(), source.data_ptr(), source.nbytes()) for target, source in pairs)


def copy_tensors(pairs, non_blocking=False):
    """Copies each source tensor into its target of the same size, converting elements; `pairs` are (target, source)."""
    at_once = []
    for target, source in pairs:
        if _is_plain(target, source):
            at_once.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        else:
            target.copy_(source, non_blocking=non_blocking)
    copy_memory(at_once)


def _is_plain(target, source):
    """Whether a copy of tensors is one of bytes."""
    return (
        target.layout is torch.strided
        and source.layout is torch.strided
        and target.is_cpu
        and source.is_cpu
        and target.dtype is source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and target.is_conj() == source.is_conj()
        and target.is_neg() == source.is_neg()
        and source.numel() > 0
    )
