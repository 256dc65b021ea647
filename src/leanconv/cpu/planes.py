"""Correlation of images with a two-dimensional filter: in blocks that stay in the cache, on several threads.

By the filter's size a block takes OpenCV's loop over the taps where OpenCV is installed, a product with a banded
matrix, or a product of transforms (overlap-save).
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from leanconv.cpu.blas import ONE_THREAD
from leanconv.cpu.layers import keep_freed_memory
from leanconv.cpu.lines import (
    FASTER,
    LEAST_WORK,
    Edge,
    Pass,
    fill_from,
    store,
    sums_of,
    threads_for,
    transform_length,
)
from leanconv.runtime.threads import over_blocks

#: Rows of a band. A product of 16 rows does (15 + kh) / kh times the needed arithmetic, at the full speed of BLAS,
#: and reads 16 rows of vector width at a time.
BAND_ROWS = 16
#: Rows and columns of a block: of OpenCV's loops and of banded products, and of a transform at least.
BLOCK = (128, 1024)
LEAST_TRANSFORM = 256
#: Pixels of a block that is quicker copied by the numbers of its rows and columns.
SMALL = 1 << 14
#: The most taps of OpenCV's loop over them: beyond, it transforms in the type of the image.
LOOP_TAPS = {"float32": 121, "float64": 49}
#: Nanoseconds of an output: of a tap of a banded product, by the bytes of a number, and of a transform there and back.
#: Explored (EPYC, one thread, 6f01be02): filters of 15×15 take 22 by products and 14 by transforms.
_BAND_NS, _FOURIER_NS = {4: 0.045, 8: 0.09}, 10.0
#: and of one tap of OpenCV's loop
_LOOP_NS = {"float32": 0.034, "float64": 0.09}


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
    fourier = is_fourier(len(kernel), kernel.shape[1], sums)
    function = partial(by_transforms, transforms=transforms) if fourier else directly
    return function(x, kernel, anchor, border, cval, out=out, sums=sums)


def directly(
    x: np.ndarray, kernel: np.ndarray, anchor: tuple[int, int] | None, border: str, cval: float, *,
    delta: float = 0.0, out: np.ndarray | None = None, sums: str, loops: bool = True,
) -> np.ndarray:  # fmt: skip
    """`correlate_plane` by OpenCV's loop over the taps or, also without ``loops``, banded products, plus ``delta``."""
    kernel, edges = _prepared(kernel, anchor, border, cval, sums)
    loop = loops and kernel.size <= LOOP_TAPS[sums] and x.size >= LEAST_WORK and opencv() is not None
    one = partial(_by_opencv if loop else _banded, kernel=kernel)
    return over_planes(x, edges, plus(one, delta), sums, out, BLOCK)


def by_transforms(
    x: np.ndarray, kernel: np.ndarray, anchor: tuple[int, int] | None, border: str, cval: float, *,
    delta: float = 0.0, out: np.ndarray | None = None, sums: str, transforms: str = "float64",
) -> np.ndarray:  # fmt: skip
    """`correlate_plane` by transforms, plus ``delta``."""
    kernel, edges = _prepared(kernel, anchor, border, cval, sums)
    height, width = (transform_size(size) - size + 1 for size in kernel.shape)
    one = partial(_by_transforms, kernel=kernel, wide=np.result_type(transforms, sums))
    return over_planes(x, edges, plus(one, delta), sums, out, (height, width), products=False)


def _prepared(
    kernel: np.ndarray, anchor: tuple[int, int] | None, border: str, cval: float, sums: str
) -> tuple[np.ndarray, tuple[Edge, Edge]]:
    (kh, kw), (ay, ax) = kernel.shape, anchor or tuple(size // 2 for size in kernel.shape)
    edges = Edge(border, ay, kh - 1 - ay, cval), Edge(border, ax, kw - 1 - ax, cval)
    return np.ascontiguousarray(kernel, sums), edges


def plus(filter_block: Pass, delta: float) -> Pass:
    """A filter of blocks whose results get ``delta`` added."""

    def both(extended: np.ndarray, result: np.ndarray) -> None:
        filter_block(extended, result)
        result += result.dtype.type(delta)

    return both if delta else filter_block


def direct_ns(kh: int, kw: int, sums: str) -> float:
    """Expected nanoseconds of an output of `directly`."""
    if kh * kw <= LOOP_TAPS[sums] and opencv() is not None:
        return _LOOP_NS[sums] * kh * kw
    return banded_ns(kh, kw, sums)


def banded_ns(kh: int, kw: int, sums: str) -> float:
    """Expected nanoseconds of an output of a banded product."""
    return kw * (kh + BAND_ROWS - 1) * _BAND_NS[np.dtype(sums).itemsize]


def transform_ns(kh: int, kw: int) -> float:
    """Expected nanoseconds of an output of `by_transforms`, of an image that is larger than a transform."""
    return _FOURIER_NS * float(np.prod([transform_size(taps) / (transform_size(taps) - taps + 1) for taps in (kh, kw)]))


def is_fourier(kh: int, kw: int, sums: str) -> bool:
    """Whether transforms are quicker, clearly so: their errors are relative to the largest number of a block."""
    return direct_ns(kh, kw, sums) > FASTER * transform_ns(kh, kw)


def over_planes(
    x: np.ndarray,
    edges: tuple[Edge, Edge],
    filter_block: Pass,
    sums: str,
    out: np.ndarray | None,
    block: tuple[int, int],
    channels: int = 1,
    products: bool = True,
) -> np.ndarray:
    """Fill ``out`` block by block, from the rows and columns that a block reads, extended at the edges.

    The last axis holds the ``channels`` of each pixel, one pixel after the other. ``products``: BLAS makes some.
    """
    y = np.empty(x.shape, sums) if out is None else out
    if x.size == 0:
        return y
    keep_freed_memory()
    source = (x.copy() if np.may_share_memory(x, y) else x).reshape(-1, *x.shape[-2:])
    target = y.reshape(-1, *y.shape[-2:])
    (_, h, w), (rows, columns) = target.shape, edges
    lines = rows.places(source.shape[1], h)[:]
    across = _of_channels(columns.places(source.shape[2] // channels, w // channels)[:], channels)
    tall, wide = rows.before + rows.after, (columns.before + columns.after) * channels
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

    with ONE_THREAD if products else nullcontext():
        over_blocks(one, blocks, threads_for(x.size))
    if not np.may_share_memory(target, y):
        y[...] = target.reshape(y.shape)
    return y


def _of_channels(columns: np.ndarray, channels: int) -> np.ndarray:
    """Where the values of pixels lie of which these are the numbers; −1 stays −1."""
    if channels == 1:
        return columns
    every = columns[:, None] * channels + np.arange(channels)
    every[columns < 0] = -1
    return every.reshape(-1)


def _fill(extended: np.ndarray, plane: np.ndarray, rows: np.ndarray, columns: np.ndarray, value: float) -> None:
    """Copy the pixels of ``rows`` and ``columns`` of a plane, where −1 stands for a line of ``value``."""
    if extended.size <= SMALL:
        extended[...] = plane.take(rows, 0).take(columns, 1)
        if rows.min() < 0 or columns.min() < 0:
            extended[rows < 0] = value
            extended[:, columns < 0] = value
        return
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
    bands = _bands(kernel.tobytes(), kernel.dtype.str, kh, kw)
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


@cache
def _transforms() -> Any:
    """SciPy's where it is installed. Explored (Xeon, one thread, 36afd312): 0.34 ms for 256 x 256, NumPy's 0.65."""
    try:
        return importlib.import_module("scipy.fft")
    except ImportError:
        return np.fft


def _by_transforms(extended: np.ndarray, result: np.ndarray, kernel: np.ndarray, wide: np.dtype) -> None:
    """Overlap-save: of the transform the outputs that do not wrap around."""
    height, width = (max(2, transform_length(n)) for n in extended.shape)
    transformed = _transforms().rfft2(extended.astype(wide, copy=False), (height, width))
    transformed *= _spectrum(kernel.tobytes(), kernel.dtype.str, kernel.shape, (height, width), wide)
    result[...] = _transforms().irfft2(transformed, (height, width))[: result.shape[0], : result.shape[1]]
    if not np.isfinite(result.sum()):
        tap_by_tap(extended, result, kernel)
    elif kernel.min() >= 0 and extended.min() >= 0:
        np.maximum(result, 0, out=result)  # a rounding of zero is no negative number
