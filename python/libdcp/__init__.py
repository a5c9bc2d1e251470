"""Distributed checkpoints of PyTorch, read and written in C; without PyTorch."""
from ._core import (ArgumentError, CanceledError, ChecksumError, DeadlineError, DeviceError, Error, ExistsError, FormatError,
                    InternalError, LimitError, MismatchError, MissingKeyError, NoSpaceError, NotFoundError, OutOfMemoryError,
                    PeerError, StateError, StorageError, UnsupportedError, __version__)
