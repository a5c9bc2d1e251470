"""Tensors of other packages, in and out. NumPy is imported when it is first needed."""
from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np

# PyTorch's names of what NumPy has itself, and NumPy's.
_NUMPY = {
    "float64": "f8", "float32": "f4", "float16": "f2", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint64": "u8",
    "uint32": "u4", "uint16": "u2", "uint8": "u1", "bool": "?", "complex64": "c8", "complex128": "c16",
}
# What only ml_dtypes has, under the same names, and the size of an element.
_ML_DTYPES = {
    "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}
# What no package for NumPy has: half-precision complex numbers, and two 4-bit numbers a byte.
_RAW = {"complex32": 4, "bcomplex32": 4, "float4_e2m1fn_x2": 1}
UNKNOWN = "?"


def itemsize(name: str) -> int:
    """Bytes of one element of a dtype by PyTorch's name."""
    import numpy as np
    if name == UNKNOWN:
        raise NotImplementedError("its dtype is not one that is read here: it is quantised, or of a later PyTorch")
    return _ML_DTYPES.get(name) or _RAW.get(name) or np.dtype(_NUMPY[name]).itemsize


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype for PyTorch's name: its own, that of ml_dtypes if it is installed, else an unsigned integer of that size."""
    import numpy as np
    if name in _NUMPY:
        return np.dtype("<" + _NUMPY[name])
    if name in _ML_DTYPES:
        try:
            import ml_dtypes
            found: np.dtype = np.dtype(getattr(ml_dtypes, name))
            return found
        except (ImportError, AttributeError):
            pass
    return np.dtype(f"<u{itemsize(name)}")


class View:
    """Memory of an array, taken as another dtype of the same size: for dtypes that NumPy does not have.

        libdcp.save(path, {"w": libdcp.View(bits, "bfloat16")})   # bits: uint16 array
        libdcp.load(path, into={"w": libdcp.View(bits, "bfloat16")})

    array: a NumPy array, borrowed. dtype: PyTorch's name, "bfloat16". ValueError if the sizes of their elements differ.
    """

    __slots__ = ("array", "dtype")

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        if dtype not in _NUMPY and dtype not in _ML_DTYPES and dtype not in _RAW:
            raise ValueError(f"no dtype {dtype!r}")
        if array.dtype.itemsize != itemsize(dtype):
            raise ValueError(f"elements of {array.dtype} and {dtype} differ in size")
        self.array = array
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"libdcp.View({self.dtype} {list(self.array.shape)})"


class Opaque:
    """Something in a checkpoint that Python without PyTorch has no object for. It was read, and nothing of it was executed.

    kind: "torch.dtype", "torch.device" or "object"; text: "float32", "cpu", or the name of the object's class.
    """

    __slots__ = ("kind", "text")

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        self.text = text

    def __repr__(self) -> str:
        return f"<{self.text}>" if self.kind == "object" else f"<{self.kind} {self.text}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and (self.kind, self.text) == (other.kind, other.text)

    def __hash__(self) -> int:
        return hash((self.kind, self.text))


def make_array(dtype: str, shape: tuple[int, ...], memory: Any) -> np.ndarray:
    """An array over memory that was read; None, or no bytes, for tensors without elements or data."""
    import numpy as np
    if memory is None or len(memory) == 0:
        return np.empty(shape, numpy_dtype(dtype))
    return np.frombuffer(memory, numpy_dtype(dtype)).reshape(shape)


def descriptor_of(array: np.ndarray, dtype: str) -> tuple[Any, ...] | None:
    """Describes an array as it lies in memory, None if that is not possible: strides that are negative or no multiple."""
    strides = array.strides
    size = array.dtype.itemsize
    if any(s < 0 or s % size for s in strides) and array.size:
        return None
    elements = tuple(s // size for s in strides) if array.size else None
    return ("t", dtype, array.shape, elements, array.__array_interface__["data"][0], array)


def name_of(dtype: np.dtype) -> str | None:
    """PyTorch's name of a NumPy dtype of either byte order, None if it has none."""
    name = dtype.name
    return name if name in _NUMPY or name in _ML_DTYPES else None


def tensor_types() -> tuple[Any, ...]:
    """Exact types that the extension takes by the buffer protocol without asking."""
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray,) if numpy else ()


def capsule_of(obj: Any) -> Any:
    """The DLPack capsule of an object in host memory. ValueError if it is on a device."""
    device = obj.__dlpack_device__()[0]
    if device not in (1, 3, 11):  # host memory, and pinned host memory of CUDA and ROCm
        raise ValueError(f"{type(obj).__qualname__}: its memory is on a device (DLPack device type {int(device)}); copy it to the host")
    is_negated = getattr(obj, "is_neg", None)  # PyTorch gives the memory away all the same
    if is_negated is not None and is_negated():
        raise BufferError(f"{type(obj).__qualname__}: a negation of its elements is still to be done; resolve_neg() it")
    try:
        return obj.__dlpack__(max_version=(1, 1))
    except TypeError:  # an older producer
        return obj.__dlpack__()


def has_buffer(obj: Any) -> bool:
    """Whether memory can be taken from an object by the buffer protocol."""
    try:
        memoryview(obj).release()
    except TypeError:
        return False
    return True


class Describer:
    """Tells the extension what the objects of a state are. One for each call: it keeps temporary memory alive."""

    def __init__(self, is_target: bool) -> None:
        self.is_target = is_target
        self.copies: dict[int, tuple[Any, Any]] = {}  # of targets that cannot be filled as they lie: id -> (target, contiguous copy)

    def __call__(self, obj: Any) -> tuple[Any, ...] | None:
        numpy = sys.modules.get("numpy")
        if numpy and isinstance(obj, numpy.ma.MaskedArray):
            raise TypeError("masked arrays cannot be stored in a checkpoint: save data and mask, each by itself")
        if numpy and isinstance(obj, numpy.ndarray):
            return self._array(obj, obj, name_of(obj.dtype))
        if numpy and isinstance(obj, numpy.generic):
            return self._scalar(obj)
        if isinstance(obj, View):
            return self._array(obj, obj.array, obj.dtype)
        if isinstance(obj, Mapping):
            return ("m", obj)
        if isinstance(obj, list):
            return ("l", obj)
        if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
            return ("d", capsule_of(obj))
        if has_buffer(obj):
            return ("b", obj)
        return None

    def check_fillable(self, fqn: str, obj: Any) -> None:
        """Called for a target that will be filled: what is left alone may be as it likes."""
        array = obj.array if isinstance(obj, View) else obj
        flags = getattr(array, "flags", None)
        if flags is not None and not flags.writeable:
            raise ValueError(f"{fqn}: the array to be filled is read-only")
        if id(obj) in self.copies and array.size and any(
                stride == 0 and extent > 1 for stride, extent in zip(array.strides, array.shape)):
            raise RuntimeError(f"{fqn}: elements of the array to be filled lie at one place in memory; copy() it before")

    def _array(self, obj: Any, array: np.ndarray, dtype: str | None) -> tuple[Any, ...] | None:
        if dtype is None:
            raise TypeError(f"arrays of dtype {array.dtype} cannot be stored in a checkpoint")
        description = descriptor_of(array, dtype) if array.dtype.isnative else None
        if description is None:
            description = self._by_copy(obj, array, dtype)
        return description

    def _by_copy(self, obj: Any, array: np.ndarray, dtype: str) -> tuple[Any, ...] | None:
        import numpy as np
        native = array.dtype.newbyteorder("=")
        copy = np.empty(array.shape, native) if self.is_target else np.ascontiguousarray(array, native).reshape(array.shape)
        if self.is_target:
            self.copies[id(obj)] = (array, copy)
        return descriptor_of(copy, dtype)

    def _scalar(self, scalar: Any) -> tuple[Any, ...] | None:
        import numpy as np
        if self.is_target:
            raise ValueError("a NumPy scalar cannot be filled: use an array of no dimensions, or None")
        return self._array(scalar, np.asarray(scalar), name_of(scalar.dtype))

    def finish(self, filled: Iterable[Any]) -> None:
        """After a load: brings what was read into the targets that could not be filled as they lie."""
        for obj in filled:
            if id(obj) in self.copies:
                target, copy = self.copies[id(obj)]
                target[...] = copy


def count(shape: tuple[int, ...]) -> int:
    """Number of elements."""
    return math.prod(shape)
