"""Correlation of images with a two-dimensional filter: in blocks that stay in the cache, on several threads.

By the filter's size a block takes OpenCV's loop over the taps where OpenCV is installed, a product with a banded
matrix, or a product of transforms (overlap-save).
"""

from __future__ import annotations

import importlib
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from leanconv.cpu.blas import ONE_THREAD
from leanconv.cpu.layers import keep_freed_memory
from leanconv.cpu.lines import LEAST_WORK, Edge, Pass, fill_from, store, sums_of, threads_for
from leanconv.runtime.threads import over_blocks

#: Rows of a band. A product of 16 rows does (15 + kh) / kh times the needed arithmetic, at the full speed of BLAS,
#: and reads 16 rows of vector width at a time.
BAND_ROWS = 16
#: Rows and columns of a block: of OpenCV's loops and of banded products, and of a transform at least.
BLOCK = (128, 1024)
LEAST_TRANSFORM = 256
#: The most taps of OpenCV's loop over them: beyond, it transforms in the type of the image.
OPENCV_TAPS = {"float32": 121, "float64": 49}
#: Nanoseconds of an output: of a tap of a banded product, by the bytes of a number, and of a transform there and back.
#: Explored (EPYC, one thread, 0d4d7f7): filters of 3×3 take 1.4, of 15×15 11, in float64 2.9 and 23.
_BAND_NS, _FOURIER_NS = {4: 0.023, 8: 0.048}, 6.0


class Block(NamedTuple):
    """One plane's output rows and columns, from ``top`` and ``left`` on."""

    plane: int
    top: int
    left: int


def correlate_plane(
    x: np.ndarray,
    kernel: np.ndarray,
    anchor: tuple[int, int] | None = None,
    border: str = "reflect101",
    cval: float = 0.0,
    *,
    out: np.ndarray | None = None,
    sums: str | None = None,
    transforms: str = "float64",
) -> np.ndarray:
    """``out[…, i, j] = Σ_uv kernel[u, v] · x[…, i + u − anchor[0], j + v − anchor[1]]``, as large as ``x``.

    Arguments are those of `lines.correlate_line`, with ``kernel`` and ``anchor`` of two dimensions. An Inf or a NaN
    reaches the outputs whose windows hold it, and no others.
    """
    sums = sums_of(x) if sums is None else sums
    kernel = np.ascontiguousarray(kernel, sums)
    (kh, kw), (ay, ax) = kernel.shape, anchor or tuple(size // 2 for size in kernel.shape)
    edges = Edge(border, ay, kh - 1 - ay, cval), Edge(border, ax, kw - 1 - ax, cval)
    if is_fourier(kh, kw, sums):
        height, width = (transform_size(size) - size + 1 for size in kernel.shape)
        return over_planes(
            x,
            edges,
            partial(_by_transforms, kernel=kernel, wide=np.result_type(transforms, sums)),
            sums,
            out,
            (height, width),
        )
    if kernel.size <= OPENCV_TAPS[sums] and x.size >= LEAST_WORK and opencv() is not None:
        return over_planes(x, edges, partial(_by_opencv, kernel=kernel), sums, out, BLOCK)
    return over_planes(x, edges, partial(_banded, kernel=kernel), sums, out, BLOCK)


def is_fourier(kh: int, kw: int, sums: str) -> bool:
    """Whether transforms are quicker by twice: their errors are relative to the largest number of a block."""
    waste = np.prod([size / (size - taps + 1) for taps in (kh, kw) for size in (transform_size(taps),)])
    banded = kw * (kh + BAND_ROWS - 1) * _BAND_NS[np.dtype(sums).itemsize]
    return bool(banded > 2 * _FOURIER_NS * waste)


def over_planes(
    x: np.ndarray,
    edges: tuple[Edge, Edge],
    filter_block: Pass,
    sums: str,
    out: np.ndarray | None,
    block: tuple[int, int],
) -> np.ndarray:
    """Fill ``out`` block by block, from the rows and columns that a block reads, extended at the edges."""
    y = np.empty(x.shape, sums) if out is None else out
    if x.size == 0:
        return y
    keep_freed_memory()
    source = (x.copy() if np.may_share_memory(x, y) else x).reshape(-1, *x.shape[-2:])
    target = y.reshape(-1, *y.shape[-2:])
    (_, h, w), (rows, columns) = target.shape, edges
    lines, across = rows.places(source.shape[1], h), columns.places(source.shape[2], w)
    tall, wide = rows.before + rows.after, columns.before + columns.after
    height, width = min(h, block[0]), min(w, block[1])
    blocks = [
        Block(plane, top, left)
        for plane in range(len(target))
        for top in range(0, h, height)
        for left in range(0, w, width)
    ]

    def one(at: Block) -> None:
        part = target[at.plane, at.top : at.top + height, at.left : at.left + width]
        extended = np.empty((part.shape[0] + tall, part.shape[1] + wide), sums)
        seen = lines[at.top : at.top + len(extended)], across[at.left : at.left + extended.shape[1]]
        _fill(extended, source[at.plane], *seen, rows.value)
        store(filter_block, extended, part)

    with ONE_THREAD:
        over_blocks(one, blocks, threads_for(x.size))
    if not np.may_share_memory(target, y):
        y[...] = target.reshape(y.shape)
    return y


def _fill(extended: np.ndarray, plane: np.ndarray, rows: np.ndarray, columns: np.ndarray, value: float) -> None:
    """Copy the pixels of ``rows`` and ``columns`` of a plane, where −1 stands for a line of ``value``."""
    seen = columns[columns >= 0]
    if seen.size == 0:
        extended[...] = value
        return
    low, high = int(seen.min()), int(seen.max()) + 1
    if high - low == len(columns) and np.array_equal(columns, np.arange(low, high)):
        fill_from(extended, plane[:, low:high], rows, value)
        return
    lines = np.empty((len(rows), high - low), extended.dtype)
    fill_from(lines, plane[:, low:high], rows, value)
    fill_from(extended.T, lines.T, np.where(columns < 0, -1, columns - low), value)


@cache
def opencv() -> Any:
    """OpenCV where it is installed: its loop over few taps makes fewer operations than a banded product."""
    try:
        return importlib.import_module("cv2")
    except ImportError:
        return None


def _by_opencv(extended: np.ndarray, result: np.ndarray, kernel: np.ndarray) -> None:
    done = opencv().filter2D(extended, -1, kernel, borderType=opencv().BORDER_CONSTANT)
    (top, left), (height, width) = (size // 2 for size in kernel.shape), result.shape
    result[...] = done[top : top + height, left : left + width]


@lru_cache(maxsize=32)
def _bands(kernel: bytes, dtype: str, kh: int, kw: int) -> np.ndarray:
    """For each of `BAND_ROWS` outputs kw rows of the band side by side: (outputs, kw, outputs + kh - 1)."""
    taps = np.frombuffer(kernel, dtype).reshape(kh, kw)
    bands = np.zeros((BAND_ROWS, kw, BAND_ROWS + kh - 1), dtype)
    for i in range(BAND_ROWS):
        bands[i, :, i : i + kh] = taps.T
    return bands


def _banded(extended: np.ndarray, result: np.ndarray, kernel: np.ndarray) -> None:
    """For a band of B rows ``Σ_v T_v · x[rows, columns + v]`` with ``T_v[i, i + u] = kernel[u, v]``, as one product."""
    (kh, kw), (height, width) = kernel.shape, result.shape
    bands = _bands(kernel.tobytes(), kernel.dtype.name, kh, kw)
    stacked = np.empty((kw, min(BAND_ROWS, height) + kh - 1, width), extended.dtype)
    for top in range(0, height, BAND_ROWS):
        part = result[top : top + BAND_ROWS]
        count = len(part)
        high = count + kh - 1
        for v in range(kw):
            stacked[v, :high] = extended[top : top + high, v : v + width]
        matrix, seen = bands[:count, :, :high].reshape(count, -1), stacked[:, :high].reshape(kw * high, width)
        np.matmul(matrix, seen, out=part)
    if not np.isfinite(result.sum()):
        tap_by_tap(extended, result, kernel)


def tap_by_tap(extended: np.ndarray, result: np.ndarray, kernel: np.ndarray) -> None:
    """The definition: a zero outside a band makes NaN of an Inf or a NaN that the filter does not reach."""
    height, width = result.shape
    result[...] = 0
    for u, v in np.ndindex(kernel.shape):
        result += kernel[u, v] * extended[u : u + height, v : v + width]


@cache
def transform_size(taps: int) -> int:
    """The length of a transform along one axis for a filter of so many taps."""
    size = LEAST_TRANSFORM
    while size < 4 * taps:
        size *= 2
    return size


@lru_cache(maxsize=8)
def _spectrum(kernel: bytes, dtype: str, shape: tuple[int, int], size: tuple[int, int], wide: np.dtype) -> np.ndarray:
    return np.conj(np.fft.rfft2(np.frombuffer(kernel, dtype).reshape(shape).astype(wide), size))


def _by_transforms(extended: np.ndarray, result: np.ndarray, kernel: np.ndarray, wide: np.dtype) -> None:
    """Overlap-save: of the transform the outputs that do not wrap around."""
    height, width = (max(2, transform_length(n)) for n in extended.shape)
    transformed = np.fft.rfft2(extended.astype(wide, copy=False), (height, width))
    transformed *= _spectrum(kernel.tobytes(), kernel.dtype.name, kernel.shape, (height, width), wide)
    result[...] = np.fft.irfft2(transformed, (height, width))[: result.shape[0], : result.shape[1]]
    if not np.isfinite(result.sum()):
        tap_by_tap(extended, result, kernel)
    elif kernel.min() >= 0 and extended.min() >= 0:
        np.maximum(result, 0, out=result)  # a rounding of zero is no negative number


@cache
def transform_length(least: int) -> int:
    """The next product of powers of 2, 3 and 5."""
    lengths = (2**i * 3**j * 5**k for i in range(25) for j in range(6) for k in range(4))
    return min(length for length in lengths if length >= least)
