"""Filters of images as one pass along each axis, and sums over boxes of any size."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from leanconv.cpu.blas import ONE_THREAD
from leanconv.cpu.lines import (
    LEAST_WORK,
    Edge,
    Pass,
    fill_from,
    filter_lines,
    line_indices,
    line_passes,
    planes,
    put,
    store,
    sums_of,
    threads_for,
)
from leanconv.runtime.threads import over_blocks

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
        passes.append(_Pass(edge, *line_passes(row, sums), float(np.sum(row)), np.array(row, sums)))
    return _passes(x, passes, axes, cval, sums, out)


class _Pass(NamedTuple):
    """A filter along one axis; of a plane of ones it makes ``gain``."""

    edge: Edge
    along: Pass
    down: Pass | None
    gain: float
    taps: np.ndarray | None = None


@cache
def _opencv() -> Any:
    """OpenCV where it is installed: its loops for a few taps make fewer operations than a banded product."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None


def _passes(
    x: np.ndarray, passes: Sequence[_Pass], axes: Sequence[int], cval: float, sums: str, out: np.ndarray | None
) -> np.ndarray:
    """One pass after the other; two along the last two axes block by block, where blocks of both passes are small."""
    if len(passes) == 2 and [axis % x.ndim for axis in axes] == [x.ndim - 2, x.ndim - 1]:
        if passes[0].down is not None and max(p.edge.before + p.edge.after for p in passes) <= FUSED_REACH:
            return _two_passes(x, passes[0], passes[1], cval, np.dtype(sums), out)
    y = x
    for each, axis in zip(passes, axes, strict=True):
        last = each is passes[-1]
        edge = each.edge._replace(value=cval)
        y = filter_lines(y, axis, edge, each.along, each.down, sums, out if last else None)
        cval *= each.gain
    return y


def _two_passes(
    x: np.ndarray, vertical: _Pass, horizontal: _Pass, cval: float, sums: np.dtype, out: np.ndarray | None
) -> np.ndarray:
    """Down the columns of a block, then along its rows, while it is in the cache."""
    y = np.empty(x.shape, sums) if out is None else out
    if x.size == 0:
        return y
    source, target, shared = planes(x, y)
    (_, h, w), (rows, columns) = target.shape, (each.edge for each in (vertical, horizontal))
    lines = line_indices(rows.border, h, rows.before, rows.after)
    across = line_indices(columns.border, w, columns.before, columns.after)
    tall, wide = rows.before + rows.after, columns.before + columns.after
    few = vertical.taps is not None and horizontal.taps is not None and max(tall, wide) < OPENCV_TAPS
    opencv = _opencv() if few and x.size >= LEAST_WORK else None
    height, width = min(h, max(BLOCK_ROWS, 2 * tall)), min(w, max(BLOCK_COLUMNS, 4 * wide))
    blocks = [
        (plane, top, left) for plane in range(len(target)) for top in range(0, h, height) for left in range(0, w, width)
    ]

    def one(block: tuple[int, int, int]) -> None:
        plane, top, left = block
        part = target[plane, top : top + height, left : left + width]
        extended = np.empty((part.shape[0] + tall, part.shape[1] + wide), sums)
        fill(extended, source[plane], lines[top : top + len(extended)], across[left : left + extended.shape[1]], cval)
        if opencv is not None:
            done = opencv.sepFilter2D(extended, -1, horizontal.taps, vertical.taps, borderType=opencv.BORDER_CONSTANT)
            below, right = tall + 1 >> 1, wide + 1 >> 1
            put(done[below : below + part.shape[0], right : right + part.shape[1]], part)
            return
        half = np.empty((len(part), extended.shape[1]), sums)
        assert vertical.down is not None
        with np.errstate(all="ignore"):
            vertical.down(extended, half)
        store(horizontal.along, half, part)

    with ONE_THREAD:
        over_blocks(one, blocks, threads_for(x.size))
    if not shared:
        y[...] = target.reshape(y.shape)
    return y


def fill(extended: np.ndarray, plane: np.ndarray, rows: np.ndarray, columns: np.ndarray, value: float) -> None:
    """Copy the pixels of ``rows`` and ``columns`` of a plane, where −1 stands for a line of ``value``."""
    inside = np.flatnonzero(columns >= 0)
    low, high = int(columns.min(initial=len(plane[0]), where=columns >= 0)), int(columns.max()) + 1
    if high - low == len(columns):
        fill_from(extended, plane[:, low:high], rows, value)
        return
    if inside.size == 0:
        extended[...] = value
        return
    seen = np.empty((len(rows), high - low), extended.dtype)
    fill_from(seen, plane[:, low:high], rows, value)
    fill_from(extended.T, seen.T, np.where(columns < 0, -1, columns - low), value)


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
        passes.append(_Pass(Edge.of(size, anchor[i] if anchor else None, border), along, down, size))
    return _passes(x, passes, axes, cval, sums, out)


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
