"""Whose array is it: NumPy, CuPy, PyTorch, or anything with DLPack; as pointer, shape, strides, dtype and device.

One `Arrays` object stands for each library. Neither PyTorch nor CuPy is imported unless the caller's arrays are
theirs. CuPy or PyTorch, whichever is installed, carries an array of another library without a copy (NumPy does on the
CPU). The result goes back through the ``from_dlpack`` of the library's array-API namespace; a library without one gets
the carrier's array, which supports DLPack too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from leanconv.arrays.base import Arrays, MemoryOrder, Shape
from leanconv.arrays.cupy import CupyArrays
from leanconv.arrays.numpy import NUMPY, NumpyArrays
from leanconv.arrays.torch import TorchArrays

_libraries: dict[str, Arrays] = {}
#: library of each array type so far; None marks a type that has to be carried
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
    """The library of an array, or None where another library has to carry it (see `carried`)."""
    kind = type(array)
    if kind not in by_type:
        by_type[kind] = _find(kind)
    return by_type[kind]


#: DLPack's numbers of the supported kinds of device: CPU, pinned memory; CUDA, CUDA managed memory
_DLPACK_CPU, _DLPACK_CUDA = (1, 3), (2, 13)


def carried(array: Any, argument: str) -> Any:
    """An array of another library as one of NumPy, CuPy or PyTorch that shares its memory; those three as they are.

    Raises TypeError where it is not an array, or where neither CuPy nor PyTorch is installed to carry a GPU array,
    ValueError for one on another kind of device.
    """
    if arrays_of(array) is not None:
        return array
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        kind = type(array)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        picture = hasattr(array, "__array_interface__") and not isinstance(array, np.generic)  # Pillow's
        remedy = " (numpy.asarray makes one)" if picture or isinstance(array, (list, tuple)) else ""
        raise TypeError(
            f"{argument} is a {name}; it must be an array of NumPy, CuPy, PyTorch, or of a library with DLPack{remedy}"
        )
    device = int(array.__dlpack_device__()[0])
    if device in _DLPACK_CPU:
        return np.from_dlpack(array)
    if device not in _DLPACK_CUDA:
        raise ValueError(
            f"{argument} lies on a device of DLPack kind {device}; only the CPU and CUDA GPUs are supported"
        )
    # a library that is loaded already costs nothing; importing one takes a second
    for module in sorted(("cupy", "torch"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(module).from_dlpack(array)
        except ImportError:
            continue
    raise TypeError(
        f"{argument} is a GPU array of {type(array).__module__}; CuPy or PyTorch must be installed to carry it "
        "(pip install cupy-cuda13x, or torch)"
    )


def way_back(array: Any) -> Callable[[Any], Any]:
    """What makes a carried call's result an array of the library of ``array``, sharing memory, where it can be."""
    if hasattr(array, "__array_namespace__"):
        make: Callable[[Any], Any] | None = getattr(array.__array_namespace__(), "from_dlpack", None)
        if make is not None:
            return make
    return lambda result: result


__all__ = [
    "NUMPY",
    "Arrays",
    "MemoryOrder",
    "NumpyArrays",
    "Shape",
    "TorchArrays",
    "arrays_of",
    "by_type",
    "carried",
    "way_back",
]
