"""CuPy, imported when a caller's array is its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from operator import attrgetter
from typing import Any

import numpy as np

from leanconv.arrays.base import Arrays, MemoryOrder, Shape


class CupyArrays(Arrays):
    """CuPy."""

    name = "CuPy"

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._device = self._cupy.cuda.Device
        self._current_device = self._cupy.cuda.runtime.getDevice
        self._current_stream = self._cupy.cuda.get_current_stream

    def signature(self, array: Any) -> Hashable:
        data = array.data
        return array.shape, array.strides, array.dtype, data.device_id, data.ptr & 15

    def device(self, array: Any) -> int:
        return int(array.data.device_id)

    def dtype(self, array: Any) -> str:
        return str(array.dtype.name)

    def strides(self, array: Any) -> Shape:
        return tuple(array.strides)

    def pointer(self, array: Any) -> int:
        return int(array.data.ptr)

    def fast_pointer(self) -> Callable[[Any], int]:
        return attrgetter("data.ptr")

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Any:
        if self._current_device() == device:
            return self._cupy.empty(shape, dtype)
        with self._device(device):
            return self._cupy.empty(shape, dtype)

    def is_contiguous(self, array: Any, order: MemoryOrder = None) -> bool:
        return bool(array.flags.c_contiguous)

    def copy(self, array: Any, order: MemoryOrder = None) -> Any:
        with self._device(array.data.device_id):
            return array.copy(order="C")

    def cast(self, array: Any, dtype: str) -> Any:
        with self._device(array.data.device_id):
            return array.astype(dtype, order="C")

    def assign(self, target: Any, source: Any) -> None:
        with self._device(target.data.device_id):
            target[...] = source

    def stream(self, device: int) -> int:
        """See Arrays. CuPy's current stream belongs to its current device; another device uses its default stream."""
        if self._current_device() == device:
            return int(self._current_stream().ptr)
        with self._device(device):
            return int(self._current_stream().ptr)

    def from_numpy(self, array: np.ndarray, device: int | None) -> Any:
        with self._device(device):
            copied = self._cupy.asarray(array)
            self._current_stream().synchronize()
        return copied
