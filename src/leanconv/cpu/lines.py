"""Filters along one axis of an array: in blocks that stay in the cache, on several threads.

A block's lines are copied with the pixels that the border stands for, in the dtype of the sums. Then a filter is a
product with a banded matrix, whose zeros cost arithmetic that BLAS does faster than NumPy passes over the block once
for each tap, or, of many taps, a product of transforms (overlap-save).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import prod
from typing import NamedTuple

import numpy as np

from leanconv.cpu.blas import ONE_THREAD
from leanconv.cpu.layers import keep_freed_memory
from leanconv.kernels.contract import ceil_div
from leanconv.runtime import env
from leanconv.runtime.threads import over_blocks

#: Bytes of a block's lines: they and the result stay in a second-level cache of 1 MiB. How lines are cut into blocks
#: must not depend on the number of threads, since BLAS sums in an order that shapes determine.
BLOCK_BYTES = 512 << 10
#: Fewer lines than this are cut into segments, so that a product has rows for BLAS.
LEAST_LINES = 32
#: The longest reach of a filter for which long lines are cut into segments of some multiples of it.
SHORT = 191
#: The longest line whose `line_indices` are kept.
MOST_KEPT = 1 << 14
#: The most taps for which NumPy's loop over one line is quicker than a product, and the line's length for it.
FEW, FEW_LENGTH = 11, 8192
#: Fewer elements than this are computed by one thread.
LEAST_WORK = 1 << 16
#: Nanoseconds of an output: of one banded row's element, by the bytes of a number, and of a transform there and back.
#: Explored (EPYC, one thread, 6f01be02).
_BAND_NS, _FOURIER_NS = {4: 0.028, 8: 0.05}, 9.0
#: How many times as quick transforms of fractions must be.
FASTER = 1.25

#: Fills ``result`` (lines, n), or (n, columns) where ``down``, from lines that are taps - 1 longer.
Pass = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True)
class Places:
    """The pixel that stands for each place of a line of ``size`` pixels with places before and after it.

    −1 marks the places that border ``constant`` fills with its value. A slice of places makes their array.
    """

    border: str
    size: int
    before: int
    after: int

    def __getitem__(self, places: slice) -> np.ndarray:
        begin, end, _ = places.indices(self.before + self.size + self.after)
        at = np.arange(begin - self.before, end - self.before)
        if not at.size or (at[0] >= 0 and at[-1] < self.size):
            return at
        if self.border == "constant":
            at[(at < 0) | (at >= self.size)] = -1
        elif self.border == "replicate":
            at.clip(0, self.size - 1, out=at)
        else:
            period = {"wrap": self.size, "reflect": 2 * self.size, "reflect101": max(1, 2 * self.size - 2)}[self.border]
            at %= period
            np.minimum(at, period - (self.border == "reflect") - at, out=at, where=at >= self.size)
        return at


@lru_cache(maxsize=256)
def _kept(places: Places) -> np.ndarray:
    every = places[:]
    every.flags.writeable = False
    return every


def line_indices(border: str, size: int, before: int, after: int) -> np.ndarray:
    """All of `Places`, read-only."""
    places = Places(border, size, before, after)
    return _kept(places) if size + before + after <= MOST_KEPT else places[:]


class Edge(NamedTuple):
    """What lines are extended by: ``before`` and ``after`` pixels of a border, or of ``value`` for ``constant``."""

    border: str
    before: int
    after: int
    value: float = 0.0

    @classmethod
    def of(cls, taps: int, anchor: int | None, border: str, value: float = 0.0) -> Edge:
        anchor = taps // 2 if anchor is None else anchor
        return cls(border, anchor, taps - 1 - anchor, value)

    def places(self, size: int, outputs: int) -> Places:
        """The places of a line of ``size`` pixels from which so many outputs are computed."""
        return Places(self.border, size, self.before, outputs - size + self.after)


def correlate_line(
    x: np.ndarray,
    taps: np.ndarray,
    axis: int = -1,
    anchor: int | None = None,
    border: str = "reflect101",
    cval: float = 0.0,
    *,
    out: np.ndarray | None = None,
    sums: str | None = None,
    transforms: str = "float64",
) -> np.ndarray:
    """``out[i] = Σ_u taps[u] · x[i + u − anchor]`` along one axis, as long as ``x``.

    ``taps`` is one-dimensional; ``anchor`` is the tap on the output pixel, by default the middle one (of an even number
    the one after it). ``sums`` is ``"float32"`` or ``"float64"``, by default float64 for ``x`` of float64 and of
    integers with 32 bits or more. ``out`` may have any real dtype, and may be ``x``; by default it is new, of dtype
    ``sums``. Along ``axis`` it may be longer or shorter than ``x``: then so many outputs are computed. Integers are
    rounded half to even, and saturate. An Inf or a NaN reaches the outputs whose windows hold it, and no others.
    Transforms are taken in ``transforms``, where ``sums`` is no wider.
    """
    sums = sums_of(x) if sums is None else sums
    passes = line_passes(taps, sums, transforms)
    return filter_lines(x, axis, Edge.of(len(taps), anchor, border, cval), *passes, sums, out)


def line_passes(taps: np.ndarray, sums: str, transforms: str = "float64") -> tuple[Pass, Pass | None]:
    """Correlation with ``taps`` of lines that are rows of a block, and of lines that are its columns."""
    row = np.ascontiguousarray(taps, sums)
    along = partial(correlate_last, taps=row, transforms=transforms)
    return along, None if is_fourier(len(row), sums) else partial(correlate_down, taps=row)


def sums_of(x: np.ndarray) -> str:
    return "float64" if x.dtype.kind in "iuf" and x.dtype.itemsize >= (8 if x.dtype.kind == "f" else 4) else "float32"


def filter_lines(
    x: np.ndarray, axis: int, edge: Edge, along: Pass, down: Pass | None, sums: str, out: np.ndarray | None = None
) -> np.ndarray:
    """Extend every line of ``x`` by ``edge``, apply a filter, and store its results in ``out``.

    ``along`` filters lines that are the rows of a block, and ``down`` those that are its columns, which needs no
    transposed copy; without it all are made rows.
    """
    y = np.empty(x.shape, sums) if out is None else out
    if x.size == 0:
        return y
    keep_freed_memory()
    if np.may_share_memory(x, y):
        x = x.copy()
    axis %= max(1, x.ndim)
    lines, target = _as_lines(x, axis), _as_lines(y, axis)
    shared = np.may_share_memory(target, y)
    columns = down is not None and lines.shape[2] >= LEAST_LINES // 2
    work = _columns if columns else _rows
    with ONE_THREAD:
        work(lines, target, edge, down if columns and down is not None else along, np.dtype(sums))
    if not shared:
        y[...] = target.reshape(y.shape)
    return y


def _as_lines(array: np.ndarray, axis: int) -> np.ndarray:
    """An array as (outer, line, inner), a view where its strides allow one."""
    shape = array.shape or (1,)
    return array.reshape(prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]))


def threads_for(size: int) -> int:
    return env.threads() if size >= LEAST_WORK else 1


def _columns(x: np.ndarray, y: np.ndarray, edge: Edge, filter_block: Pass, sums: np.dtype) -> None:
    """Lines that lie across memory, in blocks of neighbouring lines and of a part of their length."""
    outer, n, inner = y.shape
    reach = edge.before + edge.after
    source, threads = edge.places(x.shape[1], n), threads_for(x.size)
    height = min(n, max(128, 3 * reach))
    width = max(64, BLOCK_BYTES // sums.itemsize // (height + reach))
    blocks = [(o, top, left) for o in range(outer) for top in range(0, n, height) for left in range(0, inner, width)]

    def one(block: tuple[int, int, int]) -> None:
        o, top, left = block
        part = y[o, top : top + height, left : left + width]
        rows = source[top : top + part.shape[0] + reach]
        extended = np.empty((len(rows), part.shape[1]), sums)
        fill_from(extended, x[o, :, left : left + width], rows, edge.value)
        store(filter_block, extended, part)

    over_blocks(one, blocks, threads)


def fill_from(extended: np.ndarray, x: np.ndarray, rows: np.ndarray, value: float) -> None:
    """Copy ``rows`` of x, where −1 stands for a row of ``value``."""
    first, last = int(rows[0]), int(rows[-1])
    if first >= 0 and last - first == len(rows) - 1:
        extended[...] = x[first : last + 1]
        return
    # the rows inside lie one after the other: those before and after them are copied by their numbers
    inside = np.flatnonzero(np.diff(rows) == 1)
    begin, end = (int(inside[0]), int(inside[-1]) + 2) if inside.size and _is_run(rows, inside) else (0, 0)
    if end > begin:
        extended[begin:end] = x[int(rows[begin]) : int(rows[begin]) + end - begin]
    for places in (slice(0, begin), slice(end, None)):
        extended[places] = x[rows[places]]
    extended[rows < 0] = value


def _is_run(rows: np.ndarray, inside: np.ndarray) -> bool:
    return int(inside[-1] - inside[0]) == inside.size - 1 and rows[inside[0]] >= 0


def _rows(x: np.ndarray, y: np.ndarray, edge: Edge, filter_block: Pass, sums: np.dtype) -> None:
    """Lines that lie along memory, or too few of them side by side: as rows of a block, long ones in segments."""
    outer, n, inner = y.shape
    reach = edge.before + edge.after
    source, threads = edge.places(x.shape[1], n), threads_for(x.size)
    width = segment(reach + 1)
    if outer * inner < LEAST_LINES and n > 2 * width:
        _segments(x, y, edge, filter_block, sums, source, threads)
        return
    width = min(n, width)
    lines = max(LEAST_LINES, BLOCK_BYTES // sums.itemsize // (width + reach))
    beside = min(inner, lines)
    many = max(1, lines // beside)
    blocks = [
        (first, left, low)
        for first in range(0, outer, many)
        for left in range(0, n, width)
        for low in range(0, inner, beside)
    ]

    def one(block: tuple[int, int, int]) -> None:
        first, left, low = block
        at = slice(first, first + many), slice(left, left + width), slice(low, low + beside)
        part, seen = y[at], x[at[0], :, at[2]]
        outers, count, inners = part.shape
        extended = np.empty((outers, inners, count + reach), sums)
        fill_from(extended.transpose(2, 0, 1), seen.transpose(1, 0, 2), source[left : left + count + reach], edge.value)
        extended = extended.reshape(outers * inners, -1)
        if inners == 1:
            store(filter_block, extended, part[:, :, 0])
        else:
            result = np.empty((len(extended), count), sums)
            with np.errstate(all="ignore"):
                filter_block(extended, result)
            put(result.reshape(outers, inners, count).transpose(0, 2, 1), part)

    over_blocks(one, blocks, threads)


def segment(taps: int) -> int:
    """Outputs of a line that are computed at once."""
    return max(512, transform_size(taps) - taps + 1)


def _segments(
    x: np.ndarray, y: np.ndarray, edge: Edge, filter_block: Pass, sums: np.dtype, source: Places, threads: int
) -> None:
    """Few long lines: each is cut into segments that are the rows of a block."""
    outer, n, inner = y.shape
    reach = edge.before + edge.after
    length = segment(reach + 1) if reach > SHORT else FEW_LENGTH if reach < FEW else max(128, 4 * reach)
    count = ceil_div(n, length)
    # as many as whole registers have numbers
    many = max(8, BLOCK_BYTES // 2 // sums.itemsize // (length + reach) // 16 * 16)
    lines = [(o, i, first) for o in range(outer) for i in range(inner) for first in range(0, count, many)]

    def one(block: tuple[int, int, int]) -> None:
        o, i, first = block
        rows = min(many, count - first)
        begin = first * length
        end = min(n, begin + rows * length)
        part, low, high = y[o, begin:end, i], begin - edge.before, begin + rows * length + edge.after
        if x.dtype == sums and x.strides[1] == sums.itemsize and 0 <= low and high <= x.shape[1]:
            line = x[o, low:high, i]
        else:
            line = np.empty(rows * length + reach, sums)
            places = source[begin : end + reach]
            line[len(places) :] = 0
            fill_from(line[: len(places), None], x[o, :, i, None], places, edge.value)
        step = line.strides[0]
        view = np.lib.stride_tricks.as_strided(line, (rows, length + reach), (length * step, step), writeable=False)
        if part.size == rows * length and part.flags.c_contiguous:
            store(filter_block, view, part.reshape(rows, length))
            return
        result = np.empty((rows, length), sums)
        with np.errstate(all="ignore"):
            filter_block(view, result)
        put(result.reshape(-1)[: end - begin], part)

    over_blocks(one, lines, threads)


def store(filter_block: Pass, extended: np.ndarray, part: np.ndarray) -> None:
    """The results of a block, straight to where they go if they can be written there."""
    if part.dtype == extended.dtype and part.strides[-1] == part.itemsize:
        with np.errstate(all="ignore"):
            filter_block(extended, part)
        return
    result = np.empty(part.shape, extended.dtype)
    with np.errstate(all="ignore"):
        filter_block(extended, result)
    put(result, part)


def put(result: np.ndarray, part: np.ndarray) -> None:
    """Copy results, which may be changed, to an output: integers are rounded half to even and saturate, as in OpenCV;
    NaN becomes 0."""
    with np.errstate(all="ignore"):
        if part.dtype.kind not in "iu" or result.dtype == part.dtype:
            np.copyto(part, result, casting="unsafe")
            return
        limits = np.iinfo(part.dtype)
        # the largest number of 32 or 64 bits may be no number of the sums', and the next one is larger
        high = result.dtype.type(limits.max)
        over = result >= high if int(high) > limits.max else None
        if over is not None:
            high = np.nextafter(high, high.dtype.type(0))
        whole = np.rint(result, out=result)
        if whole.size and not (whole.min() >= limits.min and whole.max() <= high):  # or a NaN
            np.nan_to_num(whole, copy=False, nan=0.0)
            np.clip(whole, limits.min, high, out=whole)
        np.copyto(part, whole, casting="unsafe")
        if over is not None:
            part[over] = limits.max


# Filters of a block


def is_fourier(taps: int, sums: str) -> bool:
    """Whether transforms are quicker, clearly so: their errors are relative to the largest number of a segment."""
    size = transform_size(taps)
    return _BAND_NS[np.dtype(sums).itemsize] * (taps + _band(taps)) > FASTER * _FOURIER_NS * size / (size - taps + 1)


def _band(taps: int) -> int:
    """Outputs of a product: more of them make it wider by as many zeros."""
    return 16 if taps <= 24 else 32 if taps <= 192 else 64


@lru_cache(maxsize=64)
def _matrix(taps: bytes, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The banded matrix (outputs, outputs + taps - 1), and the same transposed: of views BLAS takes half as long again
    (EPYC, 25 taps)."""
    row = np.frombuffer(taps, dtype)
    count = _band(len(row))
    matrix = np.zeros((count, count + len(row) - 1), dtype)
    for i in range(count):
        matrix[i, i : i + len(row)] = row
    return matrix, np.ascontiguousarray(matrix.T)


def correlate_down(extended: np.ndarray, result: np.ndarray, taps: np.ndarray) -> None:
    """Lines that are columns, by a banded product for some rows at a time."""
    (matrix, _), n, reach = _matrix(taps.tobytes(), taps.dtype.str), len(result), len(taps) - 1
    for top in range(0, n, len(matrix)):
        part = result[top : top + len(matrix)]
        count = len(part)
        np.matmul(matrix[:count, : count + reach], extended[top : top + count + reach], out=part)
    if not np.isfinite(result.sum()):
        # a zero outside the band makes NaN of an Inf or a NaN that the filter does not reach
        result[...] = one_by_one(np.ascontiguousarray(extended.T), taps).T


def correlate_last(extended: np.ndarray, result: np.ndarray, taps: np.ndarray, transforms: str = "float64") -> None:
    """Lines that are rows, by a banded product for some columns at a time, or by transforms."""
    if len(taps) <= FEW and result.shape[1] >= FEW_LENGTH // 4:
        for line, into in zip(extended, result, strict=True):
            into[...] = np.correlate(line, taps, "valid")
        return
    extended = np.ascontiguousarray(extended)
    if is_fourier(len(taps), taps.dtype.name):
        _by_transforms(extended, result, taps, np.result_type(transforms, taps.dtype))
    else:
        (_, matrix), n, reach = _matrix(taps.tobytes(), taps.dtype.str), result.shape[1], len(taps) - 1
        for left in range(0, n, matrix.shape[1]):
            part = result[:, left : left + matrix.shape[1]]
            count = part.shape[1]
            np.matmul(extended[:, left : left + count + reach], matrix[: count + reach, :count], out=part)
    if not np.isfinite(result.sum()):
        result[...] = one_by_one(extended, taps)
    elif is_fourier(len(taps), taps.dtype.name) and taps.min() >= 0 and extended.min() >= 0:
        np.maximum(result, 0, out=result)  # a rounding of zero is no negative number


def one_by_one(extended: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """The definition, line by line."""
    return np.stack([np.correlate(line, taps, "valid") for line in extended])


# Transforms


@cache
def transform_size(taps: int) -> int:
    """The length of transforms that is quickest for a filter of so many taps: 2, 3 or 5 times a power of two.

    Explored (EPYC, one thread, 5730d52e): of 1001 taps 8192, of 4097 taps 16384; longer ones leave the cache.
    """
    sizes = [factor << power for power in range(6, 24) for factor in (2, 3, 5)]
    fit = [size for size in sizes if size >= 2 * taps]
    return min(fit, key=lambda size: size * (12 + np.log2(size) + min(size, 65536) / 2048) / (size - taps + 1))


@cache
def transform_length(least: int) -> int:
    """The next product of powers of 2, 3 and 5."""
    lengths = (2**i * 3**j * 5**k for i in range(25) for j in range(6) for k in range(4))
    return min(length for length in lengths if length >= least)


@lru_cache(maxsize=16)
def _spectrum(taps: bytes, dtype: str, size: int, wide: np.dtype) -> np.ndarray:
    return np.conj(np.fft.rfft(np.frombuffer(taps, dtype).astype(wide), size))


@cache
def _real_transform(wide: np.dtype) -> Callable[..., np.ndarray]:
    """NumPy's, and of float32 SciPy's where it is installed, which is quicker."""
    try:
        return importlib.import_module("scipy.fft" if wide == np.float32 else "numpy.fft").rfft
    except ImportError:
        return np.fft.rfft


def _by_transforms(extended: np.ndarray, result: np.ndarray, taps: np.ndarray, wide: np.dtype) -> None:
    """Overlap-save: of each transform the outputs that do not wrap around. NumPy 1 transforms in float64 only."""
    size = min(transform_size(len(taps)), max(2, transform_length(extended.shape[1])))
    spectrum, step = _spectrum(taps.tobytes(), taps.dtype.name, size, wide), size - len(taps) + 1
    for left in range(0, result.shape[1], step):
        part = result[:, left : left + step]
        transformed = _real_transform(wide)(extended[:, left : left + size].astype(wide, copy=False), size)
        transformed *= spectrum
        part[...] = np.fft.irfft(transformed, size)[:, : part.shape[1]]
