"""Object stores and other remote places, by fsspec. The module has had several names in PyTorch; they all lead here."""

import contextlib
import functools
import inspect
import os

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

try:
    import torch.distributed.checkpoint.fsspec_filesystem as _original
except ModuleNotFoundError:  # before 2.15
    import torch.distributed.checkpoint._fsspec_filesystem as _original

from .filesystem import FileSystemReader, FileSystemWriter

# It is called _FileSystem from 2.15 on.
_OriginalFileSystem = getattr(_original, "_FileSystem", None) or _original.FileSystem


class FileSystem(_OriginalFileSystem):
    """PyTorch's interface to storage on top of fsspec's. Keywords for the protocol count for every path."""

    def __init__(self, **options):
        super().__init__()
        self._options = options

    def init_path(self, path, **options):
        return super().init_path(path, **{**self._options, **options})

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        path = os.fspath(path)
        stream = self.fs.open(path, mode)
        try:
            yield stream
        except BaseException:
            # Closing comes first: in an object store it is what makes the file, or what is there of it.
            with contextlib.suppress(Exception):
                stream.close()
            if any(letter in mode for letter in "w+a"):
                with contextlib.suppress(Exception):
                    self.rm_file(path)
            raise
        stream.close()

    @property
    def renames_at_once(self):
        """fsspec's own way to rename is to copy and to remove; stores that have a better one override it."""
        return type(self.fs).mv is not AbstractFileSystem.mv

    def read_ranges(self, ranges):
        """The bytes of ranges (path, start, end), which asynchronous stores fetch all at once."""
        paths, starts, ends = zip(*ranges)
        names = [self.fs._strip_protocol(os.fspath(path)) for path in paths]
        return self.fs.cat_ranges(names, list(starts), list(ends), on_error="raise")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        if isinstance(checkpoint_id, os.PathLike):
            return False
        try:
            url_to_fs(checkpoint_id)
        except (ImportError, ValueError):  # no package for the protocol, or no such protocol
            return False
        return True


class FsspecWriter(FileSystemWriter, _original.FsspecWriter):
    """Writes checkpoints to any place that fsspec knows. Other keywords go to the protocol.

    A checkpoint that is there stays until the metadata of the new one takes its place, in one step.
    """

    @functools.wraps(_original.FsspecWriter.__init__)
    def __init__(self, path, *arguments, **options):
        super().__init__(path, *arguments, **options)
        own = inspect.signature(_original.FsspecWriter.__init__).parameters
        self.fs = FileSystem(**{name: value for name, value in options.items() if name not in own})
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return FileSystem.validate_checkpoint_id(checkpoint_id)


class FsspecReader(FileSystemReader, _original.FsspecReader):
    """Reads checkpoints from any place that fsspec knows. Keywords go to the protocol."""

    def __init__(self, path, **kwargs):
        super().__init__(path, **kwargs)
        self.fs = FileSystem(**kwargs)
        self.path = self.fs.init_path(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return FileSystem.validate_checkpoint_id(checkpoint_id)
