"""Filters of images as one pass along each axis, and sums over boxes of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from leanconv.cpu.box_code import sums_along, sums_down
from leanconv.cpu.lines import Edge, Pass, filter_lines, line_passes, sums_of
from leanconv.cpu.planes import over_planes, plus

#: Rows and columns of a block of two passes. Explored (EPYC, 0d4d7f7): of blocks of 2048 columns sums over boxes take
#: half as long again, and products of 64 rows a third.
BLOCK_ROWS, BLOCK_BYTES = 128, 2 << 20
#: The longest reach of two passes that are made block by block: of longer ones blocks overlap too much.
FUSED_REACH = 64
#: Changes the results of a block in place.
Finish = Callable[[np.ndarray], None]


def correlate_separable(
    x: np.ndarray,
    taps: Sequence[np.ndarray],
    axes: Sequence[int] = (-2, -1),
    anchor: Sequence[int] | None = None,
    border: str = "reflect101",
    cval: float = 0.0,
    *,
    delta: float = 0.0,
    out: np.ndarray | None = None,
    sums: str | None = None,
) -> np.ndarray:
    """Correlate with the outer product of ``taps``, one-dimensional filters, one for each of ``axes``, plus ``delta``.

    It is `correlate_line` along one axis after the other, which also says what the other arguments are; results between
    two passes are of dtype ``sums``. With border ``"constant"`` all that is outside is ``cval``, as for the filter in
    one piece: a later pass reads what the earlier ones make of it.
    """
    sums = sums_of(x) if sums is None else sums
    passes = []
    for i, row in enumerate(taps):
        edge = Edge.of(len(row), anchor[i] if anchor else None, border)
        along, down = line_passes(row, sums)
        if delta and i == len(taps) - 1:
            along, down = plus(along, delta), None if down is None else plus(down, delta)
        passes.append(Pass1d(edge, along, down, float(np.sum(row))))
    return filter_passes(x, passes, axes, cval, sums, out)


class Pass1d(NamedTuple):
    """A filter along one axis; of a plane of ones it makes ``gain``. With None what is outside stays as it is."""

    edge: Edge
    along: Pass
    down: Pass | None
    gain: float | None


def filter_passes(
    x: np.ndarray, passes: Sequence[Pass1d], axes: Sequence[int], cval: float, sums: str, out: np.ndarray | None,
    channels: int = 1,
) -> np.ndarray:  # fmt: skip
    """One pass after the other; two along the last two axes block by block, where blocks of both passes are small.

    ``channels`` values of a pixel may lie side by side along the last axis, where `fits_blocks`.
    """
    if len(passes) == 2 and [axis % x.ndim for axis in axes] == [x.ndim - 2, x.ndim - 1]:
        constant = any(p.edge.border == "constant" for p in passes) and cval != 0
        together = passes[0].down is not None and not (constant and passes[0].gain is None)
        if together and fits_blocks(max(p.edge.before + p.edge.after for p in passes)):
            return _two_passes(x, passes[0], passes[1], cval, sums, out, channels)
    y = x
    for each, axis in zip(passes, axes, strict=True):
        edge, into = each.edge._replace(value=cval), out
        if each is not passes[-1]:
            shape = list(y.shape)
            shape[axis] = shape[axis] if out is None else out.shape[axis]
            into = np.empty(shape, sums)
        y = filter_lines(y, axis, edge, each.along, each.down, sums, into)
        cval *= 1.0 if each.gain is None else each.gain
    return y


def fits_blocks(reach: int) -> bool:
    """Whether two passes that reach so far are made block by block."""
    return reach <= FUSED_REACH


def _two_passes(
    x: np.ndarray, vertical: Pass1d, horizontal: Pass1d, cval: float, sums: str, out: np.ndarray | None, channels: int
) -> np.ndarray:
    """Down the columns of a block, then along its rows, while it is in the cache."""
    edges = vertical.edge._replace(value=cval), horizontal.edge._replace(value=cval)
    tall, wide = (edge.before + edge.after for edge in edges)

    def one(extended: np.ndarray, result: np.ndarray) -> None:
        half = np.empty((len(result), extended.shape[1]), sums)
        assert vertical.down is not None
        vertical.down(extended, half)
        horizontal.along(half, result)

    block = max(BLOCK_ROWS, 2 * tall), max(BLOCK_BYTES // np.dtype(sums).itemsize // BLOCK_ROWS, 4 * wide * channels)
    return over_planes(x, edges, one, sums, out, block, channels)


def box(
    x: np.ndarray,
    sizes: Sequence[int],
    axes: Sequence[int] = (-2, -1),
    anchor: Sequence[int] | None = None,
    border: str = "reflect101",
    cval: float = 0.0,
    *,
    divisor: float = 1.0,
    out: np.ndarray | None = None,
    sums: str | None = None,
) -> np.ndarray:
    """The sums over boxes of any ``sizes``, divided by ``divisor``: `box_line` along one axis after the other."""
    sums = sums_of(x) if sums is None else sums
    last = len(sizes) - 1
    passes = []
    for i, size in enumerate(sizes):
        edge = Edge.of(size, anchor[i] if anchor else None, border)
        passes.append(window_pass(edge, finish=_divided(divisor if i == last else 1.0)))
    return filter_passes(x, passes, axes, cval, sums, out)


def box_line(
    x: np.ndarray,
    size: int,
    axis: int = -1,
    anchor: int | None = None,
    border: str = "reflect101",
    cval: float = 0.0,
    *,
    divisor: float = 1.0,
    out: np.ndarray | None = None,
    sums: str | None = None,
) -> np.ndarray:
    """The sums of ``size`` neighbours along one axis, divided by ``divisor``; other arguments as in `correlate_line`.

    Sums of a power of two of neighbours are made from those of half as many, so the time grows with the number of
    binary digits of ``size`` only, and so does the error: no difference of long sums is taken. Sums of float64 take
    three additions each (`box_code`), with the error of plain sums.
    """
    sums = sums_of(x) if sums is None else sums
    edge = Edge.of(size, anchor, border, cval)
    each = window_pass(edge, finish=_divided(divisor))
    return filter_lines(x, axis, edge, each.along, each.down, sums, out)


def _divided(divisor: float) -> Finish | None:
    def finish(result: np.ndarray) -> None:
        result /= divisor

    return None if divisor == 1 else finish


def window_pass(edge: Edge, operation: np.ufunc = np.add, finish: Finish | None = None, channels: int = 1) -> Pass1d:
    """What the neighbours along one axis make, by an operation in any order; results then go through ``finish``."""
    size = edge.before + edge.after + 1
    make = partial(_doubled, size=size, operation=operation, finish=finish)
    gain = float(size) if operation is np.add else 1.0
    return Pass1d(edge, partial(make, axis=1, step=channels), partial(make, axis=0), gain)


def _doubled(
    extended: np.ndarray, result: np.ndarray, size: int, axis: int, operation: np.ufunc, finish: Finish | None,
    step: int = 1,
) -> None:  # fmt: skip
    """Fill ``result`` with what ``size`` neighbours along ``axis`` make, of windows half as large; these lie ``step``
    elements apart. Windows of a sum lie one after the other, those of least and largest pixels may overlap."""
    n = result.shape[axis]
    if operation is np.add and step == 1 and (sums_along if axis else sums_down)(extended, result, size):
        return finish(result) if finish is not None else None

    def part(array: np.ndarray, first: int, count: int = n) -> np.ndarray:
        return array[:, step * first : step * first + count] if axis else array[first : first + count]

    # powers[i] is made by `width` neighbours from i on, and result by the first `begin`
    powers, width, begin = extended, 1, 0
    while begin < size:
        if operation is not np.add and width < size <= 2 * width:
            operation(part(powers, 0), part(powers, size - width), out=result)
            break
        if (size & width and operation is np.add) or width == size:
            if begin:
                operation(result, part(powers, begin), out=result)
            else:
                result[...] = part(powers, 0)
            begin += width
        if begin < size:
            length = powers.shape[axis] - (step if axis else 1) * width
            powers = operation(part(powers, 0, length), part(powers, width, length))
            width *= 2
    if finish is not None:
        finish(result)


def are_precise(x: np.ndarray, sums: np.ndarray, gain: float, updates: int, limit: float = np.inf) -> bool:
    """Whether running sums in float64 of ``updates`` steps are as precise as float32 sums of each window by itself.

    A step moves a sum of n numbers of at most m by at most 2⁻⁵² n m. Sums of numbers that are not negative are those of
    their sizes; so 2⁻²⁴ of the least one must be more than all steps. ``gain`` is what a window of ones sums to. False
    where a number is negative or none, or reaches ``limit``.
    """
    most = float(x.max())
    return bool(x.min() >= 0 and most < limit and most * updates * 2.0**-28 * gain <= float(sums.min()))
