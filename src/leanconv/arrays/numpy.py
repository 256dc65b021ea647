"""NumPy."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from leanconv.arrays.base import Arrays, MemoryOrder, Shape


class NumpyArrays(Arrays):
    """NumPy."""

    name = "NumPy"

    def signature(self, array: np.ndarray) -> Hashable:
        """See Arrays."""
        return array.shape, array.strides, array.dtype

    def device(self, array: np.ndarray) -> None:
        """See Arrays."""

    def dtype(self, array: np.ndarray) -> str:
        """See Arrays."""
        return str(array.dtype.name)

    def strides(self, array: np.ndarray) -> Shape:
        """See Arrays."""
        return array.strides

    def pointer(self, array: np.ndarray) -> int:
        """See Arrays."""
        return int(array.ctypes.data)

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> np.ndarray:
        """See Arrays."""
        return np.empty(shape, dtype)

    def is_contiguous(self, array: np.ndarray, order: MemoryOrder = None) -> bool:
        """Also whether it is aligned and in the machine's byte order."""
        return array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative

    def copy(self, array: np.ndarray, order: MemoryOrder = None) -> np.ndarray:
        """See Arrays."""
        return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")

    def assign(self, target: np.ndarray, source: np.ndarray) -> None:
        """See Arrays."""
        np.copyto(target, source)

    def stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def from_numpy(self, array: np.ndarray, device: int | None) -> np.ndarray:
        """See Arrays."""
        return array.copy()

    def writeable(self, array: np.ndarray) -> bool:
        """See Arrays."""
        return bool(array.flags.writeable)


NUMPY = NumpyArrays()
