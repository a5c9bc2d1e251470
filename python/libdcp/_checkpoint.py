"""Open checkpoints as mappings."""
from __future__ import annotations

from collections.abc import Iterator, Mapping

from . import _core
from ._arrays import Opaque, count, descriptor_of, itemsize, make_array, numpy_dtype
from ._index import Box

TYPE_CHECKING = False
if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Any

    import numpy as np


class LazyArray:
    """A tensor of an open checkpoint. Nothing is read until elements are asked for.

    Index it as a NumPy array, with integers, slices with any steps, `...` and None: what is asked for is read, and little more.
    numpy.asarray(), iteration and DLPack read as well.
    """

    __slots__ = ("_checkpoint", "fqn", "shape", "dtype_name")

    def __init__(self, checkpoint: Checkpoint, fqn: str, shape: tuple[int, ...], dtype_name: str) -> None:
        self._checkpoint = checkpoint
        self.fqn = fqn  #: its name in the checkpoint
        self.shape = shape  #: global shape, in elements
        self.dtype_name = dtype_name  #: PyTorch's name of the dtype, "bfloat16"

    @property
    def dtype(self) -> np.dtype:
        """NumPy's dtype of what is read: ml_dtypes' for "bfloat16" and "float8_...", or unsigned integers where that is missing."""
        return numpy_dtype(self.dtype_name)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return count(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * itemsize(self.dtype_name)

    def numpy(self) -> np.ndarray:
        """Reads all of it into a new array."""
        array: np.ndarray = self[...]
        return array

    def __getitem__(self, index: Any) -> Any:
        import numpy as np
        box = Box(index, self.shape)
        out = np.empty(box.sizes, self.dtype)
        if out.size:
            self._checkpoint._core.read_many(self._requests(box, out))
        return out[box.after]

    def _requests(self, box: Box, out: np.ndarray) -> list[Any]:
        """One for the whole box, or one for each index of the dimension that is stepped over."""
        if box.stepped is None:
            return [(self.fqn, box.starts, box.sizes, descriptor_of(out, self.dtype_name))]
        d, requests = box.stepped, []
        for i, at in enumerate(box.indexes):
            part = out[(slice(None),) * d + (slice(i, i + 1),)]
            starts = box.starts[:d] + [at] + box.starts[d + 1:]
            requests.append((self.fqn, starts, part.shape, descriptor_of(part, self.dtype_name)))
        return requests

    def read(self, out: np.ndarray, offsets: tuple[int, ...] | None = None) -> np.ndarray:
        """Reads the box at offsets (elements; the start if None) that has out's shape into out, and returns it.

        out: a writable array of this dtype with strides that are not negative. ValueError (MismatchError, ArgumentError) for
        another dtype, and for a box that is not within the tensor.
        """
        starts = (0,) * self.ndim if offsets is None else tuple(offsets)
        if out.dtype != self.dtype:
            raise ValueError(f"out is {out.dtype}, the tensor {self.dtype}")
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        descriptor = descriptor_of(out, self.dtype_name)
        if descriptor is None:
            raise ValueError("out has negative strides")
        self._checkpoint._core.read(self.fqn, starts, out.shape, descriptor)
        return out

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a tensor of a checkpoint cannot be an array without being read")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a tensor without dimensions")
        return (self[i] for i in range(self.shape[0]))

    def __repr__(self) -> str:
        return f"<libdcp.LazyArray {self.fqn!r} {self.dtype_name} {list(self.shape)}>"


class Checkpoint(Mapping):  # type: ignore[type-arg]  # of str and Any
    """An open checkpoint: a mapping of names (FQNs, "model.w") to LazyArray for tensors, and to values for objects.

    Names are in the order of the metadata; the own values of single ranks are called "rank.<r>.<name>". Objects are decoded when
    they are asked for; nothing in a file is ever executed, and what Python has no object for is Opaque. Use it as a context manager,
    or close() it. It may be used by several threads at once.
    """

    def __init__(self, path: str | os.PathLike[str], *, rank: int | None = None, check_crc: bool = False,
                 allow_outside: bool = False) -> None:
        self._core = _core.open(path, rank=-1 if rank is None else rank, check_crc=check_crc, allow_outside=allow_outside)
        self._names: dict[str, None] | None = None
        self.path = path  #: as it was given

    def _all(self) -> dict[str, None]:
        if self._names is None:
            self._names = dict.fromkeys(self._core.names())
        return self._names

    def __getitem__(self, fqn: str) -> Any:
        """The LazyArray or the object of that name. KeyError if there is none."""
        kind, dtype, shape, _, _, _ = self._core.item(fqn)
        if kind == "tensor":
            return LazyArray(self, fqn, shape or (), dtype or "")
        return self._core.object(fqn, make_tensor=make_array, make_opaque=Opaque)

    def __contains__(self, fqn: object) -> bool:
        try:
            return isinstance(fqn, str) and bool(self._core.item(fqn))
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def info(self) -> dict[str, Any]:
        """Facts about the whole: layout ("dcp", ...), world (ranks that wrote it), writer, version, save_id, checkpoint_id, n_items,
        n_tensors, n_objects, n_chunks, n_files, tensor_bytes, metadata_bytes."""
        return self._core.info()

    def tree(self) -> dict[Any, Any]:
        """Reads everything, nested as it was saved: tensors as NumPy arrays, objects as values."""
        return self._core.tree(make_tensor=make_array, make_opaque=Opaque)

    def read_many(self, reads: Mapping[str, np.ndarray], *, progress: Callable[[int, int], Any] | None = None) -> None:
        """Reads whole tensors into arrays of their shape and dtype as one plan: sorted, merged, in parallel.

        progress(done_bytes, total_bytes): called now and then; a False result cancels (CanceledError).
        """
        requests = []
        for fqn, out in reads.items():
            descriptor = descriptor_of(out, self._core.item(fqn)[1] or "") if out.dtype == self[fqn].dtype else None
            if descriptor is None or not out.flags.writeable:
                raise ValueError(f"{fqn}: an array of {self[fqn].dtype} is wanted, writable and without negative strides")
            requests.append((fqn, None, None, descriptor))
        self._core.read_many(requests, progress=progress)

    def verify(self, *, quick: bool = False, defect: Callable[[dict[str, Any]], Any] | None = None,
               progress: Callable[[int, int], Any] | None = None) -> dict[str, Any]:
        """Checks everything that can be checked: see libdcp.verify."""
        return self._core.verify(quick, defect, progress)

    def hash(self, fqn: str) -> str:
        """SHA-256 of the row-major little-endian bytes of a tensor, in hexadecimal, in bounded memory."""
        return self._core.hash(fqn)

    def close(self) -> None:
        """Closes its files. Lazy arrays of it cannot be read any more (StateError)."""
        self._core.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<libdcp.Checkpoint {str(self.path)!r}>"
