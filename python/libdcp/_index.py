"""Basic indexing: which box of a tensor to read for an index, and what to make of the box afterwards."""
from __future__ import annotations

import operator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def expand(index: Any, ndim: int) -> list[Any]:
    """The index as a list with one int or slice for each dimension, and None for each new axis. IndexError, TypeError as NumPy."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(part is Ellipsis for part in parts) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    used = sum(part is not None and part is not Ellipsis for part in parts)
    if used > ndim:
        raise IndexError(f"too many indices: the tensor has {ndim} dimensions, but {used} were indexed")
    rest = [slice(None)] * (ndim - used)
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    parts = parts + rest if at is None else parts[:at] + rest + parts[at + 1:]
    return [part if part is None or isinstance(part, slice) else _integer(part) for part in parts]


def _integer(part: Any) -> int:
    if isinstance(part, bool):
        raise IndexError("only integers, slices, ellipsis and None are indices here; read the array to use masks")
    try:
        return operator.index(part)
    except TypeError:
        raise IndexError(f"only integers, slices, ellipsis and None are indices here, not {type(part).__name__}; "
                         "read the array to use others") from None


class Box:
    """What an index asks for.

    starts, sizes: the dense box that is read where no dimension is stepped over. stepped: the first dimension with a step, of which
    single indexes are read, or None; indexes: these, in ascending order. after: the index into what was read that gives the result.
    """

    __slots__ = ("starts", "sizes", "stepped", "indexes", "after")

    def __init__(self, index: Any, shape: tuple[int, ...]) -> None:
        self.starts: list[int] = []
        self.sizes: list[int] = []
        self.stepped: int | None = None
        self.indexes: range = range(0)
        after: list[Any] = []
        for part in expand(index, len(shape)):
            if part is None:
                after.append(None)
            elif isinstance(part, slice):
                after.append(self._slice(part, shape[len(self.starts)]))
            else:
                after.append(self._position(part, shape[len(self.starts)]))
        self.after = _keep_scalars(index, after)

    def _position(self, i: int, extent: int) -> int:
        if not -extent <= i < extent:
            raise IndexError(f"index {i} is out of bounds for axis {len(self.starts)} with size {extent}")
        self.starts.append(i % extent)
        self.sizes.append(1)
        return 0

    def _slice(self, part: slice, extent: int) -> slice:
        wanted = range(*part.indices(extent))
        ascending = wanted if wanted.step > 0 else wanted[::-1]
        if ascending.step > 1 and len(ascending) > 1 and self.stepped is None:
            self.stepped = len(self.starts)
            self.indexes = ascending
            self.starts.append(ascending[0])
            self.sizes.append(len(ascending))
            step = 1
        else:
            self.starts.append(ascending[0] if ascending else 0)
            self.sizes.append(ascending[-1] - ascending[0] + 1 if ascending else 0)
            step = ascending.step
        return slice(None, None, step if wanted.step > 0 else -step)


def _keep_scalars(index: Any, after: list[Any]) -> tuple[Any, ...]:
    """An index of integers alone gives a scalar, as in NumPy; with an ellipsis, an array of no dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(after) + ((Ellipsis,) if any(part is Ellipsis for part in parts) else ())
