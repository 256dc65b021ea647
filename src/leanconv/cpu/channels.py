"""Depthwise layers by machine code (`machine_code`): a table of rows for it, and copies where channels lie apart."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from leanconv.cpu.layers import alone, finish
from leanconv.cpu.machine_code import Depthwise, Kernel, Tabled, Vectors, address, kernel, widest
from leanconv.cpu.transpose_code import LINE, copy_transposed, to_channels_first, to_channels_last
from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem

#: Bytes of pixels that are transposed at a time.
BUFFER_BYTES = 1 << 20
#: The most taps of a row with which the code is quick: it fits the cache of instructions.
QUICK_TAPS = 100


def lanes_for(problem: ConvProblem) -> int:
    """Channels of a vector of the machine code for a layer; 0 where there is none for it."""
    item = item_bytes(problem.dtype)
    lanes = widest() // item if problem.group_k == problem.group_c == 1 and item in (4, 8) else 0
    # the narrower registers where the last wider one would be half empty
    half = lanes // 2
    return half if half * item >= 32 and problem.c % lanes and (problem.c % half == 0 or problem.c < half) else lanes


def compute(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> bool:
    """Write a depthwise layer, in NCHW or NHWC, to ``y``; False where there is no code for it."""
    lanes, taps = lanes_for(problem), w.reshape(problem.k, -1)
    if lanes == 0:
        return False
    if problem.layout == "NCHW":
        done = _in_vectors(problem, lanes, x, taps, y)
    elif problem.c < lanes or x.strides[3] != x.itemsize or not y.flags.c_contiguous:
        done = _in_vectors(problem, lanes, x.transpose(0, 3, 1, 2), taps, y.transpose(0, 3, 1, 2))
    else:
        weights = aligned(taps.shape[::-1], w.dtype)
        copy_transposed(taps[None], weights[None])
        done = _rows(problem, lanes, x.strides).run(x, weights, y)
    if done:
        finish(problem, y, bias)
    return done


def _in_vectors(problem: ConvProblem, lanes: int, x: np.ndarray, taps: np.ndarray, y: np.ndarray) -> bool:
    """A layer whose channels lie apart, ``x`` (N, C, H, W), ``taps`` (C, R·S) and ``y`` (N, C, P, Q): a vector of
    channels is an image of the layer that is computed, with filters of its own."""
    cuts = _cuts(problem, lanes)
    for axis, first, last in cuts.parts:
        part, seen = alone(replace(problem, layout="NCHW"), x, axis, first, last)
        if not _in_vectors(part, lanes, seen, taps, y[:, :, first:last] if axis == 0 else y[..., first:last]):
            return False
    for n, (channels, vectors, rows) in product(range(problem.n), cuts.vectors):
        pixels, made, weights = (
            aligned((vectors, *size, lanes), x.dtype)
            for size in ((problem.h, problem.w), (problem.p, problem.q), (1, taps.shape[1]))
        )
        _to_vectors(x[n, channels], pixels)
        _to_vectors(taps[channels, None], weights)
        if not rows.run(pixels, weights, made):
            return False
        _from_vectors(made, y[n, channels])
    return True


class _Cuts(NamedTuple):
    """How a layer whose channels lie apart is computed: in parts, output rows (axis 0) or columns (1); or some vectors
    of channels at a time."""

    parts: list[tuple[int, int, int]]
    vectors: list[tuple[slice, int, Rows]]


@lru_cache(maxsize=512)
def _cuts(problem: ConvProblem, lanes: int) -> _Cuts:
    problem = replace(problem, layout="NHWC", bias=False, activation=None)
    size = lanes * item_bytes(problem.dtype)
    for axis, (length, line) in enumerate(((problem.p, problem.w), (problem.q, 1))):
        reach = ((problem.r, problem.s)[axis] - 1) * problem.dilation[axis] + 1
        covered = (length - 1) * problem.stride[axis] + reach
        if length > 1 and covered > 4 * reach and covered * line * size > 2 * BUFFER_BYTES:
            return _Cuts([(axis, 0, length // 2), (axis, length // 2, length)], [])
    some, vectors = max(1, BUFFER_BYTES // (problem.h * problem.w * size)) * lanes, []
    for first in range(0, problem.c, some):
        channels = slice(first, min(first + some, problem.c))
        count = ceil_div(channels.stop - first, lanes)
        part = replace(problem, n=count, c=lanes, k=lanes, groups=lanes)
        strides = problem.h * problem.w * size, problem.w * size, size, size // lanes
        vectors.append((channels, count, _rows(part, lanes, strides, problem.r * problem.s * size)))
    return _Cuts([], vectors)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A new array at the begin of a line of the cache."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    first = -address(memory) % LINE
    return memory[first : first + size].view(dtype).reshape(shape)


def _to_vectors(channels: np.ndarray, vectors: np.ndarray) -> None:
    """Copy (C, H, W) to (vectors, H, W, lanes); lanes without a channel get no values that matter."""
    lanes = vectors.shape[3]
    whole = len(channels) // lanes
    if whole:
        split = channels[: whole * lanes].reshape(whole, lanes, *channels.shape[1:])
        to_channels_last(split, vectors[:whole])
    if rest := len(channels) % lanes:
        vectors[whole, ..., rest:] = 0
        np.copyto(vectors[whole, ..., :rest], channels[whole * lanes :].transpose(1, 2, 0))


def _from_vectors(vectors: np.ndarray, channels: np.ndarray) -> None:
    """The way back."""
    lanes = vectors.shape[3]
    whole = len(channels) // lanes
    if whole:
        # NOTE: a view of y: to split its first axis makes no copy
        split = channels[: whole * lanes].reshape(whole, lanes, *channels.shape[1:])
        to_channels_first(vectors[:whole], split)
    if rest := len(channels) % lanes:
        np.copyto(channels[whole * lanes :], vectors[whole, ..., :rest].transpose(2, 0, 1))


class Rows(NamedTuple):
    """The code of a layer in NHWC with its table of distances; None where there is no code."""

    made: Tabled | None
    #: whether there are rows that read nothing, which the table has not
    has_empty: bool

    def run(self, x: np.ndarray, taps: np.ndarray, y: np.ndarray) -> bool:
        """All rows, with the weights of taps (R·S, C); False where there is no code."""
        if self.made is None:
            return False
        if self.has_empty:
            y[...] = 0
        self.made.run(address(x), address(taps), address(y))
        return True


@lru_cache(maxsize=512)
def _rows(problem: ConvProblem, lanes: int, strides: tuple[int, ...], weights: int = 0) -> Rows:
    """For pixels with such strides, whose channels lie together, and contiguous results; ``weights`` is the number of
    bytes from those of one image to the next."""
    sw, (dh, dw), item = problem.stride[1], problem.dilation, item_bytes(problem.dtype)
    layer = Depthwise(
        Vectors(lanes, item), problem.c, problem.w, problem.q, problem.s, sw, dw, problem.padding[2], strides[2],
        dh * strides[1],
    )  # fmt: skip
    row = problem.q * problem.c * item
    return rows_of(problem, problem.n, strides, problem.s * problem.c * item, weights, row, kernel(layer))


def rows_of(
    problem: ConvProblem, images: int, strides: tuple[int, ...], taps: int, weights: int, row: int, code: Kernel | None
) -> Rows:  # fmt: skip
    """The rows of so many images; ``taps`` and ``weights`` are bytes of a row's weights, and from those of one image to
    the next, ``row`` the bytes of a row of results."""
    n, p = (each.ravel() for each in np.indices((images, problem.p)))
    (sh, _), (dh, _) = problem.stride, problem.dilation
    top = p * sh - problem.padding[0]
    # the first tap whose row is inside the image, and the first one that is below it
    first = np.maximum(0, -(top // dh))
    last = np.minimum(problem.r, -((top - problem.h) // dh))
    columns = [
        n * strides[0] + (top + first * dh) * strides[1], n * weights + first * taps, (n * problem.p + p) * row,
        last - first,
    ]  # fmt: skip
    read = last > first
    table = np.stack(columns, axis=1).astype(np.int64)[read]
    return Rows(None if code is None else Tabled.of(code, table), not bool(read.all()))
