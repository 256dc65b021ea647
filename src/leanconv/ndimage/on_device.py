"""Filters of arrays on a GPU, by `leanconv.filter2d` over their last two axes, or over axes moved there.

Filters of one axis are passes. Two of them that may be taken at once are one launch: a column times a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from leanconv.arrays import arrays_of
from leanconv.cpu.lines import line_indices
from leanconv.images.borders import BorderName
from leanconv.ndimage.arguments import DtypeError, dtype_name

#: What is computed in float32; all else in float64, as in SciPy.
_NARROW = ("float32", "float16", "bfloat16")
#: How far a sum of weights may be from 1 to count as it.
_ROUNDING = 1e-7


class Pass(NamedTuple):
    """A filter along one axis: its weights, and which of them lies on the output pixel."""

    taps: np.ndarray
    axis: int
    anchor: int
    border: BorderName


def _computed(x: Any, out: Any, whole: bool) -> str:
    """The type to compute in; ``whole``: with integers as weights."""
    name, into = dtype_name(x), dtype_name(out)
    if "complex" in name:
        raise DtypeError(f"input has dtype {name}; complex arrays on a GPU are not filtered here")
    if name == into == "int32" and whole:
        return name
    return "float32" if name in _NARROW and into in _NARROW else "float64"


def correlate(x: Any, taps: np.ndarray, anchor: tuple[int, ...], border: BorderName, cval: float, out: Any) -> None:
    """Fill ``out``; ``taps`` has as many axes as ``x``."""
    if 0 in tuple(x.shape):
        return
    computed = _computed(x, out, np.array_equal(np.rint(taps), taps))
    _assign(out, _planes(_as(x, computed), taps.astype(computed), anchor, border, cval))


def passes(x: Any, each: Sequence[Pass], cval: float, out: Any) -> None:
    """Fill ``out``, which may be ``x``, by one pass after the other. Integers are truncated after each, as in SciPy."""
    if 0 in tuple(x.shape):
        return
    whole = all(np.array_equal(np.rint(one.taps), one.taps) for one in each)
    computed = _computed(x, out, whole)
    truncates = computed != "int32" and not dtype_name(out).startswith(("float", "bfloat"))
    groups = [[one] for one in each] if truncates else _groups(each, cval)
    for number, group in enumerate(groups):
        sums = truncates and _is_mean(group[0])
        if sums:  # of integers exact, and divided once
            group = [group[0]._replace(taps=np.ones(len(group[0].taps)))]
        source = _as(x, computed)
        last = number == len(groups) - 1 and dtype_name(out) == computed and _apart(source, out)
        y = _filtered(source, group, cval, out if last else None)
        y = y / len(group[0].taps) if sums else y
        x = _as(y, dtype_name(out)) if truncates else y
    if x is not out:
        _assign(out, x)


def _apart(x: Any, out: Any) -> bool:
    """Whether ``out`` lies in one piece, and shares no memory with ``x``."""
    library = arrays_of(x)
    assert library is not None
    (a, b), (c, d) = (library.extent(each, each.dtype.itemsize) for each in (x, out))
    first, second = library.pointer(x), library.pointer(out)
    return library.is_contiguous(out) and (first + b <= second + c or second + d <= first + a)


def _is_mean(one: Pass) -> bool:
    return bool(np.ptp(one.taps) == 0 and abs(one.taps.sum() - 1) < 1e-12)


def _groups(each: Sequence[Pass], cval: float) -> list[list[Pass]]:
    """The passes by ones and twos. Two of one border are one filter where it does not matter that the second would see
    what the first makes of a constant border: that is ``cval`` if the weights add up to 1."""
    # of passes in any order those of the last axes are pairs, whose images lie in memory as they are
    free = all(one.border != "constant" for one in each) or not cval
    rest, found = sorted(each, key=lambda one: -one.axis) if free else list(each), []
    while rest:
        first, *rest = rest
        same = rest and rest[0].border == first.border and rest[0].axis != first.axis
        if same and (first.border != "constant" or not cval or abs(first.taps.sum() - 1) < _ROUNDING):
            second, *rest = rest
            found.append(sorted([first, second], key=lambda one: one.axis))
        else:
            found.append([first])
    return found


def _filtered(x: Any, group: Sequence[Pass], cval: float, out: Any = None) -> Any:
    """One launch: of a pass, or of one down the columns and one along the rows of images. Into ``out`` where its axes
    need not be moved."""
    from leanconv.images.named import run_products
    from leanconv.images.windows import box_blur
    from leanconv.options import filter_options

    shape, order = tuple(x.shape), list(range(x.ndim))
    along = [one.axis for one in group]
    if len(group) == 2:
        order = [*(axis for axis in order if axis not in along), *along]
        moved = _transposed(x, order)
        images = moved if x.ndim == 2 else moved.reshape(-1, *(shape[axis] for axis in along))
        (column, row), at = (one.taps for one in group), tuple(one.anchor for one in group)
    else:
        (one,) = group
        moved, behind = x, prod(shape[one.axis + 1 :])
        column, row, at = one.taps, np.ones(1, one.taps.dtype), (one.anchor, 0)
        images = x.reshape(-1, shape[one.axis], behind)
        if behind == 1:
            column, row, at = row, column, (0, one.anchor)
            images = x.reshape(-1, shape[one.axis])
    natural = order == sorted(order)
    into = out.reshape(tuple(images.shape)) if out is not None and natural else None
    border = group[0].border
    # SciPy looks at cval only where it is used
    value = cval if border == "constant" else 0
    if all(map(_is_mean, group)):
        size = len(column), len(row)
        result = box_blur(images, size, border=border, value=value, anchor=at, channels_last=False, out=into)
    else:
        if dtype_name(x) == "int32":
            column, row = column.astype(np.int64), row.astype(np.int64)
        result = run_products(images, [(column, row)], filter_options(border, at, channels_last=False), value, 0, into)
    if into is not None:
        return out
    return _transposed(result.reshape(tuple(moved.shape)), [order.index(axis) for axis in range(x.ndim)])


def _assign(out: Any, result: Any) -> None:
    library = arrays_of(out)
    assert library is not None
    library.assign(out, _as(result, dtype_name(out)))


def _as(x: Any, name: str) -> Any:
    """In another dtype, truncated where that is an integer's; of the same it is the array."""
    if dtype_name(x) == name:
        return x
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
