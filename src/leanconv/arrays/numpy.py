"""NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from functools import lru_cache

import numpy as np

from leanconv.arrays.base import Arrays, MemoryOrder, Shape


@lru_cache(maxsize=256)
def _dtype_name(dtype: np.dtype) -> str:
    # NumPy makes the name anew each time
    return str(dtype.name)


class NumpyArrays(Arrays):
    """NumPy."""

    name = "NumPy"
    moves_to_gpu = True

    def signature(self, array: np.ndarray) -> Hashable:
        return array.shape, array.strides, array.dtype

    def refuse_without_memory(self, array: np.ndarray, name: str) -> None:
        """Also a masked array, whose memory does not say what is masked, and a matrix, whose parts all have two axes.

        A call's key has the types of its arrays, so no ready call is one of these.
        """
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, and what its mask hides would count: give {name}.filled(value), with a "
                "value for the masked elements"
            )
        if isinstance(array, np.matrix):
            raise TypeError(f"{name} is a numpy.matrix; give numpy.asarray({name}), an array that shares its memory")

    def device(self, array: np.ndarray) -> None:
        return None

    def dtype(self, array: np.ndarray) -> str:
        return _dtype_name(array.dtype)

    def strides(self, array: np.ndarray) -> Shape:
        return array.strides

    def pointer(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> np.ndarray:
        return np.empty(shape, dtype)

    def is_contiguous(self, array: np.ndarray, order: MemoryOrder = None) -> bool:
        """Also whether it is aligned and in the machine's byte order."""
        return array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative

    def copy(self, array: np.ndarray, order: MemoryOrder = None) -> np.ndarray:
        return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")

    def cast(self, array: np.ndarray, dtype: str) -> np.ndarray:
        return array.astype(dtype, order="C")

    def assign(self, target: np.ndarray, source: np.ndarray) -> None:
        np.copyto(target, source)

    def stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def from_numpy(self, array: np.ndarray, device: int | None) -> np.ndarray:
        return array.copy()

    def writeable(self, array: np.ndarray) -> bool:
        return bool(array.flags.writeable)

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return plain(array)


NUMPY = NumpyArrays()


def learn_bfloat16() -> None:
    """Teach NumPy bfloat16. Raises TypeError where ml_dtypes, which has it, is not installed."""
    try:
        importlib.import_module("ml_dtypes")
    except ImportError as error:
        raise TypeError("dtype='bfloat16': NumPy has it by ml_dtypes alone; pip install ml_dtypes") from error


def plain(array: np.ndarray) -> np.ndarray:
    """The array itself if it is contiguous, aligned and in native byte order, else such a copy."""
    # one look at the flags says it of most arrays; those that are read only have more looks
    usual = array.flags.carray and array.dtype.isnative
    return array if usual or NUMPY.is_contiguous(array) else NUMPY.copy(array)
