"""Filters of images as one pass along each axis, and sums over boxes of any size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from leanconv.cpu.lines import LEAST_WORK, Edge, Pass, filter_lines, line_passes, sums_of
from leanconv.cpu.planes import opencv, over_planes

#: Rows and columns of a block of two passes. Explored (EPYC, 0d4d7f7): of blocks of 2048 columns sums over boxes take
#: half as long again, and products of 64 rows a third.
BLOCK_ROWS, BLOCK_COLUMNS = 128, 4096
#: The longest reach of two passes that are made block by block: of longer ones blocks overlap too much.
FUSED_REACH = 64
#: The fewest taps for which products are quicker than OpenCV's loops.
OPENCV_TAPS = 12


def correlate_separable(
    x: np.ndarray,
    taps: Sequence[np.ndarray],
    axes: Sequence[int] = (-2, -1),
    anchor: Sequence[int] | None = None,
    border: str = "reflect101",
    cval: float = 0.0,
    *,
    out: np.ndarray | None = None,
    sums: str | None = None,
) -> np.ndarray:
    """Correlate with the outer product of ``taps``, one-dimensional filters, one for each of ``axes``.

    It is `correlate_line` along one axis after the other, which also says what the other arguments are; results between
    two passes are of dtype ``sums``. With border ``"constant"`` all that is outside is ``cval``, as for the filter in
    one piece: a later pass reads what the earlier ones make of it.
    """
    sums = sums_of(x) if sums is None else sums
    passes = []
    for i, row in enumerate(taps):
        edge = Edge.of(len(row), anchor[i] if anchor else None, border)
        passes.append(Pass1d(edge, *line_passes(row, sums), float(np.sum(row)), np.array(row, sums)))
    return filter_passes(x, passes, axes, cval, sums, out)


class Pass1d(NamedTuple):
    """A filter along one axis; of a plane of ones it makes ``gain``. With None what is outside stays as it is."""

    edge: Edge
    along: Pass
    down: Pass | None
    gain: float | None
    taps: np.ndarray | None = None


def filter_passes(
    x: np.ndarray, passes: Sequence[Pass1d], axes: Sequence[int], cval: float, sums: str, out: np.ndarray | None
) -> np.ndarray:
    """One pass after the other; two along the last two axes block by block, where blocks of both passes are small."""
    if len(passes) == 2 and [axis % x.ndim for axis in axes] == [x.ndim - 2, x.ndim - 1]:
        constant = any(p.edge.border == "constant" for p in passes) and cval != 0
        together = x.size >= LEAST_WORK and passes[0].down is not None and not (constant and passes[0].gain is None)
        if together and max(p.edge.before + p.edge.after for p in passes) <= FUSED_REACH:
            return _two_passes(x, passes[0], passes[1], cval, sums, out)
    y = x
    for each, axis in zip(passes, axes, strict=True):
        last = each is passes[-1]
        edge = each.edge._replace(value=cval)
        y = filter_lines(y, axis, edge, each.along, each.down, sums, out if last else None)
        cval *= 1.0 if each.gain is None else each.gain
    return y


def _two_passes(
    x: np.ndarray, vertical: Pass1d, horizontal: Pass1d, cval: float, sums: str, out: np.ndarray | None
) -> np.ndarray:
    """Down the columns of a block, then along its rows, while it is in the cache."""
    edges = vertical.edge._replace(value=cval), horizontal.edge._replace(value=cval)
    tall, wide = (edge.before + edge.after for edge in edges)
    loops = vertical.taps is not None and horizontal.taps is not None and max(tall, wide) < OPENCV_TAPS
    both = loops and x.size >= LEAST_WORK and opencv() is not None

    def one(extended: np.ndarray, result: np.ndarray) -> None:
        if both:
            done = opencv().sepFilter2D(
                extended, -1, horizontal.taps, vertical.taps, borderType=opencv().BORDER_CONSTANT
            )
            below, right = (tall + 1) // 2, (wide + 1) // 2
            result[...] = done[below : below + result.shape[0], right : right + result.shape[1]]
            return
        half = np.empty((len(result), extended.shape[1]), sums)
        assert vertical.down is not None
        vertical.down(extended, half)
        horizontal.along(half, result)

    return over_planes(x, edges, one, sums, out, (max(BLOCK_ROWS, 2 * tall), max(BLOCK_COLUMNS, 4 * wide)))


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
        along, down = _box_passes(size, divisor if i == last else 1.0)
        passes.append(Pass1d(Edge.of(size, anchor[i] if anchor else None, border), along, down, size))
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
    binary digits of ``size`` only, and so does the error: no difference of long sums is taken.
    """
    sums = sums_of(x) if sums is None else sums
    return filter_lines(x, axis, Edge.of(size, anchor, border, cval), *_box_passes(size, divisor), sums, out)


def _box_passes(size: int, divisor: float) -> tuple[Pass, Pass]:
    """Sums along lines that are rows of a block, and along lines that are its columns."""
    sums = partial(_doubled, size=size, divisor=divisor)
    return partial(sums, axis=1), partial(sums, axis=0)


def _doubled(extended: np.ndarray, result: np.ndarray, size: int, axis: int, divisor: float) -> None:
    n = result.shape[axis]

    def part(array: np.ndarray, first: int, last: int) -> np.ndarray:
        return array[:, first:last] if axis else array[first:last]

    # powers[i] is the sum of ``width`` neighbours from i on
    powers, width, begin = extended, 1, 0
    while True:
        if size & width:
            if begin == 0:
                result[...] = part(powers, 0, n)
            else:
                result += part(powers, begin, begin + n)
            begin += width
        if begin == size:
            break
        length = powers.shape[axis] - width
        powers = part(powers, 0, length) + part(powers, width, length + width)
        width *= 2
    if divisor != 1:
        result /= divisor
