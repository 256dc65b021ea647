"""Cutting a layer into blocks that stay in the cache, and the padded copy of the input that one block reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from leanconv.dtypes import LAYERS, is_integer
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem

#: Bytes of temporaries that a block may take, and the fewest output pixels that keep a matrix product efficient.
#: Measured on two cores with 1 MiB of second-level cache each: 1 to 4 MiB are within 5 %, 256 KiB costs 20 %.
BLOCK_BYTES = 2 << 20
LEAST_PIXELS = 384
#: Elements of a buffer that is quicker cleared whole than at its four sides.
SMALL = 8192


@dataclass(frozen=True)
class Block:
    """Images ``first`` to ``last`` and output rows ``top`` to ``bottom``, ends excluded."""

    first: int
    last: int
    top: int
    bottom: int

    @property
    def images(self) -> int:
        """Number of images."""
        return self.last - self.first

    @property
    def rows(self) -> int:
        """Number of output rows of each image."""
        return self.bottom - self.top

    def of(self, problem: ConvProblem, array: np.ndarray) -> np.ndarray:
        """The block's part of an array that lies as the output, a view."""
        images, rows = array[self.first : self.last], slice(self.top, self.bottom)
        return images[:, :, rows] if problem.layout == "NCHW" else images[:, rows]


#: Just below the 32 MiB that glibc's threshold grows to.
_KEPT_BYTES = 31 << 20


@cache
def keep_freed_memory() -> None:
    """Have the C library keep the memory of temporaries for the next call, instead of giving it back to the system.

    glibc gives each array above a threshold pages of its own, and every page that is touched for the first time costs a
    fault. The threshold grows to the largest such array that was freed; so one is made and freed here, untouched. Γ8 on
    64 channels of 56 x 56 pixels took 1900 faults a call, and 7.7 ms instead of 2.8 (NCHW, EPYC, one thread). With
    other C libraries nothing changes.
    """
    np.empty(_KEPT_BYTES, np.uint8)


def most_pixels(pixel_bytes: int, budget: int) -> int:
    """Output pixels of a block."""
    return max(LEAST_PIXELS, budget // max(1, pixel_bytes))


def blocks(problem: ConvProblem, pixel_bytes: int, budget: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cut the output into strips of rows of one image or, where images are small, into several whole images.

    ``pixel_bytes`` is what the temporaries of one output pixel take.
    """
    pixels = most_pixels(pixel_bytes, budget)
    rows = min(problem.p, max(1, pixels // problem.q))
    if rows == problem.p:
        images = max(1, pixels // (problem.p * problem.q))
        for first in range(0, problem.n, images):
            yield Block(first, min(problem.n, first + images), 0, problem.p)
        return
    rows = ceil_div(problem.p, ceil_div(problem.p, rows))
    for image in range(problem.n):
        for top in range(0, problem.p, rows):
            yield Block(image, image + 1, top, min(problem.p, top + rows))


def in_columns(
    problem: ConvProblem,
    x: np.ndarray,
    bias: np.ndarray | None,
    pixel_bytes: int,
    compute: Callable[[ConvProblem, np.ndarray], np.ndarray],
    budget: int = BLOCK_BYTES,
) -> np.ndarray:
    """The result of ``compute(problem, x)``, of long rows in bands of columns: a block has whole rows.

    A band is a layer of its own, which pads at the ends of the row only. ``pixel_bytes`` is what the temporaries of one
    output pixel take.
    """
    columns = most_pixels(pixel_bytes, budget)
    # the bands' results are copied once more: of rows not much longer than a block that costs more than it saves
    if problem.q <= 4 * columns or problem.n == 0:
        return compute(problem, x)
    y = np.empty(problem.y_shape, x.dtype)
    # one view with the columns last serves both layouts
    across, source = (y, x) if problem.layout == "NCHW" else (y.swapaxes(2, 3), x.swapaxes(2, 3))
    (_, stride), (_, dilation), (top, bottom, left, _) = problem.stride, problem.dilation, problem.padding
    columns = ceil_div(problem.q, ceil_div(problem.q, columns))
    for first in range(0, problem.q, columns):
        last = min(problem.q, first + columns)
        begin, end = first * stride - left, (last - 1) * stride - left + (problem.s - 1) * dilation + 1
        low, high = max(0, begin), min(problem.w, end)
        into = across[..., first:last]
        if low >= high:  # nothing but padding
            into[...] = 0
            finish(problem, into if problem.layout == "NCHW" else into.swapaxes(2, 3), bias)
            continue
        band = replace(problem, w=high - low, padding=(top, bottom, low - begin, end - high))
        seen = source[..., low:high]
        part = compute(band, seen if problem.layout == "NCHW" else seen.swapaxes(2, 3))
        into[...] = part if problem.layout == "NCHW" else part.swapaxes(2, 3)
    return y


class PaddedInput:
    """The input rows that a block reads, with zeros around them, in one buffer that all blocks use in turn."""

    def __init__(self, problem: ConvProblem, x: np.ndarray, width: int | None = None) -> None:
        """``width`` is the number of columns of the buffer, by default those that the outputs need."""
        self.problem = problem
        self.x = x
        self.width = width or (problem.q - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1
        self.buffer = np.empty(0, x.dtype)

    def load(self, block: Block) -> np.ndarray:
        """The rows of ``block``: shape (C, images, rows, width) for NCHW, (images, rows, width, C) for NHWC."""
        problem = self.problem
        rows = (block.rows - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
        size = block.images * rows * self.width * problem.c
        if self.buffer.size < size:
            self.buffer = np.empty(size, self.x.dtype)
        source = self.x[block.first : block.last]
        if problem.layout == "NCHW":
            padded = self.buffer[:size].reshape(problem.c, block.images, rows, self.width)
            # One view with the axes (images, rows, columns, channels) serves both layouts.
            target, source = padded.transpose(1, 2, 3, 0), source.transpose(0, 2, 3, 1)
        else:
            padded = target = self.buffer[:size].reshape(block.images, rows, self.width, problem.c)
        first_row = block.top * problem.stride[0] - problem.padding[0]
        # Where padding is negative the first columns of the image are left out.
        top, left, skipped = max(0, -first_row), max(0, problem.padding[2]), max(0, -problem.padding[2])
        bottom = min(rows, problem.h - first_row)
        right = min(self.width, left + problem.w - skipped)
        if size < SMALL or top >= bottom or left >= right:
            padded[...] = 0
        else:
            target[:, :top] = 0
            target[:, bottom:] = 0
            target[:, top:bottom, :left] = 0
            target[:, top:bottom, right:] = 0
        if top >= bottom or left >= right:
            return padded
        inside = source[:, first_row + top : first_row + bottom, skipped : skipped + right - left]
        if problem.layout == "NCHW":
            # NOTE: NumPy copies in the memory order of the target only if both sides are given in that order.
            padded[:, :, top:bottom, left:right] = inside.transpose(3, 0, 1, 2)
        else:
            padded[:, top:bottom, left:right] = inside
        return padded


def windows(problem: ConvProblem, padded: np.ndarray) -> np.ndarray:
    """Every window of ``padded`` as a view: (C, R, S, images, P, Q) for NCHW, (images, P, Q, R, S, C) for NHWC."""
    at = padded.strides
    (sh, sw), (dh, dw) = problem.stride, problem.dilation
    if problem.layout == "NCHW":
        channels, images, height, width = padded.shape
        strides = (at[0], dh * at[2], dw * at[3], at[1], sh * at[2], sw * at[3])
    else:
        images, height, width, channels = padded.shape
        strides = (at[0], sh * at[1], sw * at[2], dh * at[1], dw * at[2], at[3])
    rows = (height - (problem.r - 1) * dh - 1) // sh + 1
    columns = (width - (problem.s - 1) * dw - 1) // sw + 1
    taps, outputs = (problem.r, problem.s), (images, rows, columns)
    shape = (channels, *taps, *outputs) if problem.layout == "NCHW" else (*outputs, *taps, channels)
    # as_strided takes 10 µs
    return np.ndarray(shape, padded.dtype, padded, 0, strides)


def finish(problem: ConvProblem, y: np.ndarray, bias: np.ndarray | None) -> None:
    """Add ``bias`` and apply the activation in place, while the block is still in the cache."""
    if bias is not None:
        y += bias.reshape([problem.k if axis == "C" else 1 for axis in problem.layout])
    if problem.activation == "relu":
        np.maximum(y, 0, out=y)


def shared_limits(problem: ConvProblem, ops: tuple[str, ...] = ("fprop",), transforms: bool = False) -> list[str]:
    """What an algorithm of the CPU engine that computes ``ops`` cannot do. ``transforms``: it transforms tiles."""
    reasons = []
    if problem.op not in ops:
        reasons.append(f"on the CPU it computes op {' and '.join(map(repr, ops))}, not {problem.op!r}")
    if problem.dtype not in LAYERS:
        reasons.append(f"it computes {', '.join(LAYERS)}, not {problem.dtype}")
    if transforms and is_integer(problem.dtype):
        reasons.append(f"its transforms are made for fractions, and sums of {problem.dtype} are exact")
    if problem.accumulate:
        reasons.append("accumulate=True: on the CPU results are stored, not added to what the output holds")
    return reasons


def product_cost(problem: ConvProblem) -> float:
    """Cost of the matrix products of a layer, in operations at the full speed of BLAS: the unit of all ``cost``.

    Fewer than 16 filters in a group leave most of a vector register idle, and in NHWC most of a cache line as well.
    A pass over an array counts 80 for each element copied; these figures were fitted on two cores.
    """
    idle = max(1.0, 16 / max(1, problem.group_k))
    return problem.flops * (idle if problem.layout == "NCHW" else idle * idle)
