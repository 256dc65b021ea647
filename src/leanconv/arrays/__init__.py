"""Whose array is it: NumPy, CuPy, PyTorch, or anything with DLPack, seen as pointer, shape, strides, dtype and device.

One `Arrays` object stands for each library. Neither PyTorch nor CuPy is imported unless the caller's arrays are
theirs. CuPy or PyTorch, whichever is installed, carries an array of another library without a copy (NumPy does on the
CPU). The result goes back through the ``from_dlpack`` of the library's array-API namespace; a library without one gets
the carrier's array, which supports DLPack too.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from leanconv.arrays.base import Arrays, MemoryOrder, Shape
from leanconv.arrays.cupy import CupyArrays
from leanconv.arrays.dlpack import carry, way_back
from leanconv.arrays.numpy import NUMPY, NumpyArrays
from leanconv.arrays.torch import TorchArrays

_libraries: dict[str, Arrays] = {}
#: library of each array type met so far; None marks a type that has to be carried
by_type: dict[type, Arrays | None] = {np.ndarray: NUMPY}


def _library(module: str) -> Arrays:
    if module not in _libraries:
        _libraries[module] = {"torch": TorchArrays, "cupy": CupyArrays}[module]()
    return _libraries[module]


def _find(kind: type) -> Arrays | None:
    if issubclass(kind, np.ndarray):
        return NUMPY
    for base in kind.__mro__:
        module = base.__module__.partition(".")[0]
        if module == "torch" and issubclass(kind, sys.modules["torch"].Tensor):
            return _library("torch")
        if module == "cupy" and issubclass(kind, sys.modules["cupy"].ndarray):
            return _library("cupy")
    return None


def arrays_of(array: Any) -> Arrays | None:
    """The library of an array, or None where another library has to carry it (see `carry`)."""
    kind = type(array)
    if kind not in by_type:
        by_type[kind] = _find(kind)
    return by_type[kind]


__all__ = [
    "NUMPY",
    "Arrays",
    "MemoryOrder",
    "NumpyArrays",
    "Shape",
    "TorchArrays",
    "arrays_of",
    "by_type",
    "carry",
    "way_back",
]
