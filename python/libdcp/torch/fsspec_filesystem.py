"""Checkpoints in object stores, by fsspec: `torch.distributed.checkpoint.fsspec_filesystem`."""

import torch.distributed.checkpoint.fsspec_filesystem as _original

from ._mirror import attributes
from ._remote import FileSystem, FsspecReader, FsspecWriter

__all__ = list(_original.__all__)

__getattr__, __dir__ = attributes(__name__)
