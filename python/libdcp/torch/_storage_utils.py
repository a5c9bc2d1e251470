"""Which reader or writer an id is for: `torch.distributed.checkpoint._storage_utils`."""

import os

from ._mirror import attributes
from .filesystem import FileSystemReader, FileSystemWriter


def _storage_setup(storage, checkpoint_id, reader=False):
    """The storage given, reset to the id if there is one, or a new one that the id suits: local first, then fsspec."""
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if not checkpoint_id:
        raise RuntimeError("`checkpoint_id` must be specified if storage_reader/storage_writer is None.")
    for kind in _kinds(reader):
        if _suits(kind, checkpoint_id, reader):
            found = kind(checkpoint_id)
            found.reset(checkpoint_id)
            return found
    raise RuntimeError(
        "Cannot detect which StorageReader or StorageWriter to use. Please specify the storage_reader/storage_writer."
    )


def _kinds(reader):
    yield FileSystemReader if reader else FileSystemWriter
    try:
        from ._remote import FsspecReader, FsspecWriter
    except ImportError:  # fsspec is optional
        return
    yield FsspecReader if reader else FsspecWriter


def _suits(kind, checkpoint_id, reader):
    # Reading needs no permission to write; PyTorch's rule for local names asks for it.
    if reader and kind is FileSystemReader and os.path.isdir(checkpoint_id):
        return True
    return kind.validate_checkpoint_id(checkpoint_id)


__getattr__, __dir__ = attributes(__name__)
