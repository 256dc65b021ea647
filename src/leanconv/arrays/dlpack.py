"""Arrays of other libraries, exchanged through DLPack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

#: DLPack's numbers of the supported kinds of device: CPU, pinned memory; CUDA, CUDA managed memory
_DLPACK_CPU, _DLPACK_CUDA = (1, 3), (2, 13)


def carry(array: Any, argument: str) -> Any:
    """An array of another library as one of NumPy, CuPy or PyTorch that shares its memory.

    Raises TypeError where it is not an array, or where neither CuPy nor PyTorch is installed to carry a GPU array,
    ValueError for one on another kind of device.
    """
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        kind = type(array)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        remedy = " (numpy.asarray makes one)" if isinstance(array, (list, tuple)) else ""
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
