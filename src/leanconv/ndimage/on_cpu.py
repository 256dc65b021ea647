"""Filters of NumPy arrays: float64 sums, in SciPy's order where a result is truncated to an integer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from leanconv.cpu.lines import Edge, Pass, fill_from, filter_lines, line_indices, line_passes, threads_for
from leanconv.cpu.planes import correlate_plane
from leanconv.cpu.separable import Pass1d, are_precise, box_line, filter_passes
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import ceil_div
from leanconv.ndimage.arguments import DtypeError, check_real
from leanconv.runtime.threads import over_blocks

#: SciPy leaves out taps of `correlate` that are not larger than this, so an Inf under such a tap does no harm.
LEAST_WEIGHT = float(np.finfo(np.float64).eps)
#: Elements that SciPy's loops filter sooner than blocks are made, and the fewest taps for which blocks are tried first
#: where SciPy's order of the sum counts. Explored (EPYC, one thread, 6f01be02).
SMALL, MANY = 1 << 13, 9


def _check_output(out: np.ndarray) -> None:
    if out.dtype.kind == "c":
        raise DtypeError(f"output has dtype {out.dtype}, and the result is real")
    check_real("output", out.dtype)


@cache
def scipys_filters() -> Any:
    """``scipy.ndimage``, where it is installed."""
    try:
        return importlib.import_module("scipy.ndimage")
    except ImportError:
        return None


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float64 to ``dtype`` as C does: towards zero for integers; values out of range are undefined, as in C."""
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype.kind == "b":
            # SciPy stores a bool as a byte made from the truncated number: 0.5 and 256 are false
            return np.not_equal(values.astype(np.int64).astype(np.uint8), 0)
        return values.astype(dtype)


def line(x: np.ndarray, taps: np.ndarray, axis: int, out: np.ndarray, edge: Edge) -> None:
    """Correlation along one axis; ``out`` may be ``x``."""
    _check_output(out)
    theirs, whole = scipys_filters(), out.dtype.kind != "f"
    if x.size == 0:
        return
    if not whole and (x.size > SMALL or theirs is None or len(taps) > x.size):
        filter_lines(x, axis, edge, *line_passes(taps, "float64"), "float64", out)
    elif theirs is None:
        out[...] = cast(filter_lines(x, axis, edge, _in_scipys_order(taps), None, "float64"), out.dtype)
    elif whole and _smooths(x, taps, out, edge.value):
        along, down = line_passes(taps, "float64")
        columns = None if down is None else _truncated(down, taps)
        filter_lines(x, axis, edge, _truncated(along, taps), columns, "float64", out)
    else:
        mode, origin = BORDERS[edge.border].scipy[0], edge.before - len(taps) // 2
        x = x.copy() if np.may_share_memory(x, out) else x
        _side_by_side(
            x, out, axis, lambda part, into: theirs.correlate1d(part, taps, axis, into, mode, edge.value, origin)
        )


def _smooths(x: np.ndarray, taps: np.ndarray, out: np.ndarray, cval: float) -> bool:
    """Whether a filter of integers with many taps gives numbers of their own range, so that any order of the sums may
    be tried (`_truncated`)."""
    if x.dtype.kind not in "iu" or x.dtype.itemsize > 2 or len(taps) < MANY or x.size <= SMALL:
        return False
    limits = np.iinfo(x.dtype)
    inside = limits.min <= cval <= limits.max and np.can_cast(x.dtype, out.dtype) and out.dtype.kind in "iu"
    return bool(inside and taps.min() >= 0 and taps.sum() <= 1 + 2.0**-40)


def _truncated(filter_block: Pass, taps: np.ndarray) -> Pass:
    """Sums towards zero. Where one is too close to an integer to tell on which side SciPy's lies, whose order is
    another one, SciPy computes the block."""
    middle, close = len(taps) // 2, len(taps) * 2.0**-47 * 2.0**16 * float(taps.sum())

    def truncated(extended: np.ndarray, result: np.ndarray) -> None:
        filter_block(extended, result)
        nearest = np.rint(result)
        apart = np.subtract(result, nearest)
        np.abs(apart, out=apart)
        # next to zero both sides are zero
        if apart.min() <= close and (apart <= close)[nearest != 0].any():
            axis = 0 if len(extended) > len(result) else 1
            every = scipys_filters().correlate1d(extended, taps, axis, mode="constant")
            result[...] = np.moveaxis(np.moveaxis(every, axis, 0)[middle : middle + result.shape[axis]], 0, axis)
        np.trunc(result, out=result)

    return truncated


def _side_by_side(x: np.ndarray, out: np.ndarray, axis: int, work: Callable[[np.ndarray, np.ndarray], object]) -> None:
    """``work`` of slices of x and out along the longest axis but ``axis``, on several threads."""
    others = [other for other in range(x.ndim) if other != axis]
    threads = threads_for(x.size)
    if threads == 1 or not others:
        work(x, out)
        return
    longest = max(others, key=lambda other: x.shape[other])
    step = max(1, ceil_div(x.shape[longest], 4 * threads))

    def one(first: int) -> None:
        work(*(np.moveaxis(np.moveaxis(each, longest, 0)[first : first + step], 0, longest) for each in (x, out)))

    over_blocks(one, range(0, x.shape[longest], step), threads)


def _in_scipys_order(taps: np.ndarray) -> Callable[[np.ndarray, np.ndarray], None]:
    """SciPy's loop: of a symmetric filter the pixels of both sides are added before they are multiplied."""
    half, eps = len(taps) // 2, LEAST_WEIGHT
    odd = len(taps) % 2 == 1
    sign = 0
    if odd and np.all(np.abs(taps - taps[::-1])[:half] <= eps):
        sign = 1
    elif odd and np.all(np.abs(taps + taps[::-1])[:half] <= eps):
        sign = -1

    def along(extended: np.ndarray, result: np.ndarray) -> None:
        n = result.shape[1]

        def seen(tap: int) -> np.ndarray:
            return extended[:, tap : tap + n]

        if sign:
            np.multiply(seen(half), taps[half], out=result)
            for u in range(half):
                other = seen(len(taps) - 1 - u)
                result += (seen(u) + other if sign > 0 else seen(u) - other) * taps[u]
        else:
            np.multiply(seen(len(taps) - 1), taps[-1], out=result)
            for u in range(len(taps) - 1):
                result += seen(u) * taps[u]

    return along


def passes(
    x: np.ndarray, rows: Sequence[np.ndarray], axes: Sequence[int], borders: Sequence[str], cval: float, out: np.ndarray
) -> None:
    """One correlation after the other, each with its middle tap on the output pixel."""
    _check_output(out)
    if out.dtype.kind == "f" and 0 < x.size <= SMALL and scipys_filters() is not None:
        for taps, axis, border in zip(rows[:-1], axes, borders, strict=False):
            x = scipys_filters().correlate1d(x, taps, axis, np.float64, BORDERS[border].scipy[0], cval)
        line(x, rows[-1], axes[-1], out, Edge.of(len(rows[-1]), None, borders[-1], cval))
        return
    if out.dtype.kind == "f":
        each = []
        for taps, border in zip(rows, borders, strict=True):
            # None: outside, each pass reads cval
            each.append(Pass1d(Edge.of(len(taps), None, border), *line_passes(taps, "float64"), None))
        filter_passes(x, each, axes, cval, "float64", out)
        return
    for taps, axis, border in zip(rows, axes, borders, strict=True):
        line(x, taps, axis, out, Edge.of(len(taps), None, border, cval))
        x = out


def uniform_line(x: np.ndarray, size: int, axis: int, out: np.ndarray, edge: Edge) -> None:
    """Means along one axis."""
    _check_output(out)
    if out.dtype.kind == "f":
        if out.dtype != np.float32 or not _by_running_sums(x, size, axis, out, edge):
            box_line(x, size, axis, edge.before, edge.border, edge.value, divisor=size, out=out, sums="float64")
    elif scipys_filters() is None:
        means = box_line(x, size, axis, edge.before, edge.border, edge.value, divisor=size, sums="float64")
        out[...] = cast(means, out.dtype)
    else:
        mode, origin = BORDERS[edge.border].scipy[0], edge.before - size // 2
        x = x.copy() if np.may_share_memory(x, out) else x
        _side_by_side(
            x, out, axis,
            lambda part, into: scipys_filters().uniform_filter1d(part, size, axis, into, mode, edge.value, origin),
        )  # fmt: skip


def is_small_mean(x: np.ndarray, axes: tuple[int, ...], out: np.ndarray) -> bool:
    """Whether `small_mean` may compute means along ``axes``: in one call of SciPy, since several take longer."""
    usual = out.dtype == np.float32 and x.dtype.kind in "iuf" and axes == tuple(range(x.ndim))
    return usual and 0 < x.size <= SMALL and scipys_filters() is not None and not np.may_share_memory(x, out)


def small_mean(x: np.ndarray, sizes: list[int], modes: list[Any], origins: list[int], out: np.ndarray) -> bool:
    """Means over boxes by SciPy's loops, outside of zeros; False where they are not precise."""
    scipys_filters().uniform_filter(x, sizes, out, modes, 0.0, origins)
    return are_precise(x, out, 1, sum(x.shape))


def _by_running_sums(x: np.ndarray, size: int, axis: int, out: np.ndarray, edge: Edge) -> bool:
    """Means by SciPy's loop, which is quick along memory; False where there is none, or they are not precise."""
    if scipys_filters() is None or x.size == 0 or (x.size > SMALL and axis != x.ndim - 1) or x.dtype.kind == "c":
        return False
    mode, origin = BORDERS[edge.border].scipy[0], edge.before - size // 2
    kept = x.copy() if np.may_share_memory(x, out) else x
    _side_by_side(
        kept, out, axis,
        lambda part, into: scipys_filters().uniform_filter1d(part, size, axis, into, mode, edge.value, origin),
    )  # fmt: skip
    if are_precise(kept, out, 1, x.shape[axis]) and (edge.border != "constant" or edge.value == 0):
        return True
    if kept is not x:
        x[...] = kept
    return False


def window(x: np.ndarray, taps: np.ndarray, anchor: tuple[int, ...], border: str, cval: float, out: np.ndarray) -> None:
    """Correlation along all axes; ``taps`` has as many as ``x``."""
    _check_output(out)
    if x.size == 0:
        return
    x = x.copy() if np.may_share_memory(x, out) else x
    misread = _is_misread(x.shape, anchor, border)
    if out.dtype.kind == "f":
        wide = [axis for axis in range(x.ndim) if taps.shape[axis] > 1]
        kept = np.where(np.abs(taps) > LEAST_WEIGHT, taps, 0.0)
        if x.size <= SMALL and scipys_filters() is not None and not misread:
            origin = [at - size // 2 for at, size in zip(anchor, taps.shape, strict=True)]
            scipys_filters().correlate(x, taps, out, BORDERS[border].scipy[0], cval, origin)
            return
        with np.errstate(invalid="ignore", over="ignore"):
            # where all is finite, a tap of zero adds nothing
            if not np.isfinite(cval) or not np.isfinite(x.sum(dtype=np.float64)):
                out[...] = _tap_by_tap(x, taps, anchor, border, cval)
            elif len(wide) <= 1:
                axis = wide[0] if wide else max(0, x.ndim - 1)
                edge = Edge.of(kept.size, anchor[axis] if anchor else 0, border, cval)
                line(x, kept.reshape(-1), axis, out, edge)
            else:
                _sum_of_planes(x, kept, anchor, border, cval, out)
        return
    theirs = scipys_filters()
    if theirs is None or misread:
        out[...] = cast(_tap_by_tap(x, taps, anchor, border, cval), out.dtype)
        return
    _slabs(x, taps, anchor, border, cval, out, theirs)


def _is_misread(shape: tuple[int, ...], anchor: tuple[int, ...], border: str) -> bool:
    """Whether SciPy's ``correlate`` would read memory outside the array."""
    # NOTE: in SciPy 1.17, mode "reflect" makes the index -1 of the places -4 n, -6 n, ... of an axis of n elements.
    # Its other modes are right, and so are its filters of one axis.
    return border == "reflect" and any(at >= 4 * n for n, at in zip(shape, anchor, strict=True))


def _sum_of_planes(
    x: np.ndarray, taps: np.ndarray, anchor: tuple[int, ...], border: str, cval: float, out: np.ndarray
) -> None:
    """The last two of the axes along which there are several taps are those of planes; others are summed over."""
    wide = [axis for axis in range(x.ndim) if taps.shape[axis] > 1]
    others, plane = wide[:-2], wide[-2:]
    last = x.ndim - 2, x.ndim - 1
    at = anchor[plane[0]], anchor[plane[1]]
    planes, results = np.moveaxis(x, plane, last), np.moveaxis(out, plane, last)
    if not others:
        kernel = np.moveaxis(taps, plane, last).reshape([taps.shape[axis] for axis in plane])
        correlate_plane(planes, kernel, at, border, cval, out=results, sums="float64")
        return
    axis = others[0]
    places = line_indices(border, x.shape[axis], anchor[axis], taps.shape[axis] - 1 - anchor[axis])
    total, one = np.zeros(x.shape), np.empty(x.shape)
    for tap in range(taps.shape[axis]):
        kernel = taps.take([tap], axis)
        if not kernel.any():
            continue
        moved = np.take(x, places[tap : tap + x.shape[axis]], axis)
        if (places < 0).any():
            moved = moved.astype(np.float64, copy=False)
            np.moveaxis(moved, axis, 0)[places[tap : tap + x.shape[axis]] < 0] = cval
        window(moved, kernel, (*anchor[:axis], 0, *anchor[axis + 1 :]), border, cval, one)
        total += one
    out[...] = total


def _slabs(
    x: np.ndarray, taps: np.ndarray, anchor: tuple[int, ...], border: str, cval: float, out: np.ndarray, theirs: Any
) -> None:
    """SciPy's own routine, on slabs along the first axis that are extended by what their outputs read."""
    mode = BORDERS[border].scipy[0]
    origin = [at - size // 2 for at, size in zip(anchor, taps.shape, strict=True)]
    threads = threads_for(x.size * taps.size // 8)
    if threads == 1 or x.ndim == 0 or len(x) < 2 * threads:
        theirs.correlate(x, taps, out, mode, cval, origin)
        return
    before, after = anchor[0], taps.shape[0] - 1 - anchor[0]
    places = line_indices(border, len(x), before, after)
    step = ceil_div(len(x), 4 * threads)

    def one(first: int) -> None:
        count = min(step, len(x) - first)
        rows = places[first : first + count + before + after]
        extended = np.empty((len(rows), *x.shape[1:]))
        fill_from(extended, x, rows, cval)
        result = np.empty(extended.shape, out.dtype)
        theirs.correlate(extended, taps, result, mode, cval, origin)
        out[first : first + count] = result[before : before + count]

    over_blocks(one, range(0, len(x), step), threads)


def _tap_by_tap(x: np.ndarray, taps: np.ndarray, anchor: tuple[int, ...], border: str, cval: float) -> np.ndarray:
    """Tap by tap in the order of the weights, leaving out those that are zero."""
    extended = x.astype(np.float64)
    for axis, (size, at) in enumerate(zip(taps.shape, anchor, strict=True)):
        if size > 1:
            source = line_indices(border, x.shape[axis], at, size - 1 - at)
            extended = np.take(extended, source, axis)
            extended[(slice(None),) * axis + (source < 0,)] = cval
    out = np.zeros(x.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for index in np.argwhere(np.abs(taps) > LEAST_WEIGHT):
            where = tuple(slice(i, i + n) for i, n in zip(index, x.shape, strict=True))
            out += taps[tuple(index)] * extended[where]
    return out
