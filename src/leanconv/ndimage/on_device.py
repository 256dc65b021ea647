"""Filters of arrays on a GPU, by `leanconv.filter2d` over their last two axes, or over axes moved there."""

from __future__ import annotations

from typing import Any

import numpy as np

from leanconv.arrays import arrays_of
from leanconv.cpu.lines import line_indices
from leanconv.images.borders import BorderName
from leanconv.ndimage.arguments import DtypeError, dtype_name

#: What is filtered as it is; other types are converted.
_TYPES = ("float32", "int32")


def correlate(x: Any, taps: np.ndarray, anchor: tuple[int, ...], border: BorderName, cval: float, out: Any) -> None:
    """Fill ``out``; ``taps`` has as many axes as ``x``. Integers that are no int32 are computed in float64."""
    library = arrays_of(x)
    assert library is not None
    if 0 in tuple(x.shape):
        return
    name = dtype_name(x)
    exact = name == "int32" and dtype_name(out) == "int32" and np.array_equal(np.rint(taps), taps)
    computed = name if name in _TYPES and (exact or name.startswith(("float", "bfloat"))) else "float64"
    if computed not in _TYPES:
        computed = "float32"
    if "complex" in name:
        raise DtypeError(f"input has dtype {name}; complex arrays on a GPU are not filtered here")
    source = x if computed == name else _as(x, computed)
    result = _planes(source, taps.astype(computed), anchor, border, cval)
    if dtype_name(out) != computed:
        result = _as(result, dtype_name(out))
    library.assign(out, result)


def _as(x: Any, name: str) -> Any:
    """A copy in another dtype; truncated where that is an integer's."""
    if hasattr(x, "astype"):
        return x.astype(name)
    import torch

    return x.to(getattr(torch, name))


def _planes(x: Any, taps: np.ndarray, anchor: tuple[int, ...], border: BorderName, cval: float) -> Any:
    """The correlation as a new array. Axes before the last two with several taps are summed over, tap by tap."""
    from leanconv.images.api import filter2d

    wide = [axis for axis in range(x.ndim) if taps.shape[axis] > 1]
    others, plane = wide[:-2], wide[-2:]
    if others:
        axis = others[0]
        places = line_indices(border, x.shape[axis], anchor[axis], taps.shape[axis] - 1 - anchor[axis])
        total: Any = None
        for tap in range(taps.shape[axis]):
            kernel, some = taps.take([tap], axis), places[tap : tap + x.shape[axis]]
            if kernel.any():
                before = [slice(None)] * axis
                moved = x[tuple([*before, some.tolist()])]
                moved[tuple([*before, np.flatnonzero(some < 0).tolist()])] = cval
                one = _planes(moved, kernel, (*anchor[:axis], 0, *anchor[axis + 1 :]), border, cval)
                total = one if total is None else total + one
        return x * 0 if total is None else total
    # the axes with several taps come last; where there are fewer than two, others fill up
    order = [*(axis for axis in range(x.ndim) if axis not in plane), *plane]
    moved, kernel = _transposed(x, order), taps.transpose(order)
    shape, at = tuple(moved.shape), (0, 0, *(anchor[axis] for axis in order))[-2:]
    images = moved if x.ndim == 2 else moved.reshape(-1, *(1, 1, *shape)[-2:])
    # SciPy looks at cval only where it is used
    value = cval if border == "constant" else 0
    taps = kernel.reshape((1, 1, *kernel.shape)[-2:])
    result = filter2d(images, taps, border=border, value=value, anchor=at, channels_last=False)
    result = result if x.ndim == 2 else result.reshape(shape)
    return _transposed(result, [order.index(axis) for axis in range(x.ndim)])


def _transposed(x: Any, order: list[int]) -> Any:
    if order == list(range(len(order))):
        return x
    return x.permute(order) if hasattr(x, "permute") else x.transpose(order)


def line(x: Any, taps: np.ndarray, axis: int, anchor: int, border: BorderName, cval: float, out: Any) -> None:
    """Correlation along one axis."""
    shape, at = [1] * x.ndim, [0] * x.ndim
    shape[axis], at[axis] = len(taps), anchor
    correlate(x, taps.reshape(shape), tuple(at), border, cval, out)
