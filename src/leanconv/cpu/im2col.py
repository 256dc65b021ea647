"""im2col (Chellapilla, Puri, Simard 2006): copy every window to a column, then one matrix product does the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np

from leanconv.arrays.memory import lay_out
from leanconv.cpu.blas import matmul, one_thread
from leanconv.cpu.gradients import col2im, filter_gradient
from leanconv.cpu.layers import (
    LEAST_COST,
    Block,
    LayerAlgorithm,
    PaddedInput,
    blocks,
    finish,
    product_cost,
    shared_limits,
    windows,
)
from leanconv.dtypes import is_integer, is_narrow, item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem


class Im2col(LayerAlgorithm):
    """Columns are built for one cache-sized block of the output at a time, never for the whole layer."""

    name = "im2col"
    paper = "K. Chellapilla et al., High Performance Convolutional Neural Networks for Document Processing (2006)"
    precision = "ieee"

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        return shared_limits(problem, ("fprop", "dgrad", "wgrad"))

    def compute_cost(self, problem: ConvProblem) -> float:
        copied = 0 if _is_plain(problem) else problem.n * problem.p * problem.q * problem.c * problem.r * problem.s
        if problem.group_c == 1 and problem.layout == "NCHW" and problem.op == "fprop":
            # the filters are vectors, and what counts is how the columns are copied: row by row
            return copied * (26 + 700 / problem.q + 2 * problem.group_k)
        each = 80.0
        if problem.group_c == problem.c and problem.layout == "NHWC" and problem.op == "fprop":
            # a window's row lies together in memory
            each = 18 + 400 / (problem.c * (problem.s if problem.dilation[1] == 1 else 1))
        products, pixels = product_cost(problem), problem.n * problem.p * problem.q
        # BLAS orders weights anew, which counts for few pixels; of rows of pixels whole vectors
        weights = (30.0 if problem.layout == "NCHW" else 50.0) * problem.k * problem.group_c * problem.r * problem.s
        if problem.op == "fprop" and problem.layout == "NCHW" and pixels:
            products *= ceil_div(pixels, 16) * 16 / pixels
        return products + each * copied + (weights if problem.op == "fprop" else 0.0)

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        if problem.op == "dgrad":
            dx = col2im(problem, x, w)
            return dx if bias is None else dx + bias.reshape(lay_out(problem.layout, 1, problem.c, 1, 1))
        if problem.op == "wgrad":
            return filter_gradient(problem, x, w)
        return super().compute(problem, x, w, bias)

    def pixel_bytes(self, problem: ConvProblem) -> int:
        return problem.c * problem.r * problem.s * item_bytes(problem.dtype)

    def ready(self, problem: ConvProblem) -> Callable[..., np.ndarray]:
        sums = not (problem.is_empty or is_integer(problem.dtype) or is_narrow(problem.dtype))
        usual = problem.op == "fprop" and problem.layout != "CHWN" and problem.groups == 1 and sums
        usual = usual and min(problem.y_shape) > 0 and min(problem.padding) >= 0
        if usual and _kept_bytes(problem) <= KEPT_BYTES and self.cost(problem) < LEAST_COST:
            small = Small(problem)
            return small.compute if isinstance(small.limit, nullcontext) else small.limited
        return super().ready(problem)

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        product = _product_nchw if problem.layout == "NCHW" else _product_nhwc
        filters = _filters(problem, w)
        padded = PaddedInput(problem, x)
        columns = np.empty(0, x.dtype)
        for block in blocks(problem, self.pixel_bytes(problem)):
            # the matrix of columns and, of a layer whose input is that matrix, nothing
            view = None
            if not _is_plain(problem):
                view = windows(problem, padded.load(block))
                if columns.size < view.size:
                    columns = np.empty(view.size, x.dtype)
            part = block.of(problem, y)
            product(problem, block, x, view, columns, filters, part, y)
            finish(problem, part, bias)


#: The multiply-adds of a layer in NHWC, at least and at most, for which the filters are transposed before the product.
#: Explored (Xeon with AVX-512, OpenBLAS of NumPy 2.4): products up to a million take half the time then.
TURNED = 100_000, 1_000_000
#: The most bytes of columns and padded pixels that are kept for the next call of a small layer.
KEPT_BYTES = 192 << 10


def _kept_bytes(problem: ConvProblem) -> int:
    """Bytes of the padded images and the matrix of columns."""
    if _is_plain(problem):
        return 0
    rows = problem.h + problem.padding[0] + problem.padding[1]
    width = problem.w + problem.padding[2] + problem.padding[3]
    taps = problem.p * problem.q * problem.r * problem.s
    return problem.n * problem.c * (rows * width + taps) * item_bytes(problem.dtype)


class _Kept(NamedTuple):
    """Memory that one call at a time uses: the padded images are zero but for what the call copies there."""

    #: the part of the padded images that x goes to, with the axes of x
    inside: np.ndarray
    #: the windows of the padded images, and the columns with the same axes
    seen: np.ndarray
    columns: np.ndarray
    #: the columns as BLAS takes them
    matrix: np.ndarray


class Small:
    """A small layer, ready for calls with any arrays: all views are made once. Of a call of some ten microseconds they
    were the larger part."""

    def __init__(self, problem: ConvProblem) -> None:
        self.problem, self.y_shape, self.nchw = problem, problem.y_shape, problem.layout == "NCHW"
        self.taps, self.pixels = problem.c * problem.r * problem.s, problem.n * problem.p * problem.q
        self.is_plain, self.finishes = _is_plain(problem), problem.activation is not None
        #: whether images lie inside filters in a product, and the other way round in the result
        self.swaps = self.nchw and problem.n > 1
        self.product = (problem.k, self.pixels) if self.nchw else (self.pixels, problem.k)
        low, high = TURNED
        self.turns = not self.nchw and low <= self.taps * self.pixels * problem.k <= high
        self.limit = one_thread(problem.flops, min(*self.product, self.taps) > 1)
        self.kept: list[_Kept] = []

    def limited(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, value: float = 0, delta: float = 0
    ) -> np.ndarray:
        """`compute` with one thread of BLAS."""
        with self.limit:
            return self.compute(x, w, bias)

    def compute(
        self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, value: float = 0, delta: float = 0
    ) -> np.ndarray:
        # NOTE: as a decorator it is one for all threads, and before NumPy 2 keeps what the last one had set
        with np.errstate(invalid="ignore", over="ignore"):
            return self._compute(x, w, bias)

    def _compute(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        problem, y = self.problem, np.empty(self.y_shape, x.dtype)
        filters = w.reshape(problem.k, self.taps)
        if not self.nchw:
            filters = np.ascontiguousarray(filters.T) if self.turns else filters.T
        if self.is_plain:
            if self.swaps:
                np.matmul(filters, x.reshape(problem.n, problem.c, -1), out=y.reshape(problem.n, problem.k, -1))
            elif self.nchw:
                np.dot(filters, x.reshape(self.taps, self.pixels), y.reshape(self.product))
            else:
                np.dot(x.reshape(self.pixels, self.taps), filters, y.reshape(self.product))
        else:
            try:
                kept = self.kept.pop()
            except IndexError:  # the first call, or one beside others: each has its own
                kept = self._keep(x.dtype)
            inside, seen, columns, matrix = kept
            np.copyto(inside, x)
            np.copyto(columns, seen)
            if self.swaps:
                product = np.dot(filters, matrix).reshape(problem.k, problem.n, problem.p, problem.q)
                np.copyto(y, product.swapaxes(0, 1))
            elif self.nchw:
                np.dot(filters, matrix, y.reshape(self.product))
            else:
                np.dot(matrix, filters, y.reshape(self.product))
            self.kept.append(kept)
        if self.finishes or bias is not None:
            finish(problem, y, bias)
        return y

    def _keep(self, dtype: np.dtype) -> _Kept:
        problem = self.problem
        (top, bottom, left, right), channels = problem.padding, (problem.c,)
        size = problem.n, problem.h + top + bottom, problem.w + left + right
        padded = np.zeros((*channels, *size) if self.nchw else (*size, *channels), dtype)
        rows, across = slice(top, top + problem.h), slice(left, left + problem.w)
        seen = windows(problem, padded)
        columns = np.empty(seen.shape, dtype)
        if self.nchw:
            inside = padded[:, :, rows, across].swapaxes(0, 1)
            return _Kept(inside, seen, columns, columns.reshape(self.taps, self.pixels))
        return _Kept(padded[:, rows, across], seen, columns, columns.reshape(self.pixels, self.taps))


def _is_plain(problem: ConvProblem) -> bool:
    """Whether the input itself is the matrix of columns: a 1×1 layer that skips and adds nothing."""
    return (problem.r, problem.s, problem.stride, problem.padding) == (1, 1, (1, 1), (0, 0, 0, 0))


def _filters(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """The filters as matrices: (groups, K/groups, C/groups·R·S) for NCHW, (groups, R·S·C/groups, K/groups) for NHWC."""
    rows = w.reshape(problem.groups, problem.group_k, problem.group_c * problem.r * problem.s)
    # BLAS reads a transposed matrix as well; transposing 512 x 512 x 3 x 3 took longer than their layer
    return rows if problem.layout == "NCHW" else rows.transpose(0, 2, 1)


def _product_nchw(
    problem: ConvProblem, block: Block, x: np.ndarray, view: np.ndarray | None, columns: np.ndarray,
    filters: np.ndarray, part: np.ndarray, y: np.ndarray,
) -> None:  # fmt: skip
    pixels, first = block.rows * problem.q, block.top * problem.q
    into = y.reshape(problem.n, problem.groups, problem.group_k, -1)[block.first : block.last]
    into = into[..., first : first + pixels]
    if view is None:
        seen = block.of(problem, x).reshape(block.images, problem.groups, problem.group_c, pixels)
        matmul(filters, seen, out=into)
        return
    matrix = columns[: view.size]
    np.copyto(matrix.reshape(view.shape), view)
    matrix = matrix.reshape(problem.groups, -1, block.images * pixels)
    if block.images == 1:
        matmul(filters, matrix, out=into[0])
    else:
        product = matmul(filters, matrix).reshape(problem.k, block.images, block.rows, problem.q)
        part[...] = product.transpose(1, 0, 2, 3)


def _product_nhwc(
    problem: ConvProblem, block: Block, x: np.ndarray, view: np.ndarray | None, columns: np.ndarray,
    filters: np.ndarray, part: np.ndarray, y: np.ndarray,
) -> None:  # fmt: skip
    # A block is one strip or some whole images, so its output is contiguous either way.
    into = part.reshape(-1, problem.groups, problem.group_k).transpose(1, 0, 2)
    if view is None:
        matrix = block.of(problem, x).reshape(-1, problem.groups, problem.group_c).transpose(1, 0, 2)
    else:
        # Group by group, so that each group's columns are one matrix.
        view = view.reshape(*view.shape[:5], problem.groups, problem.group_c).transpose(5, 0, 1, 2, 3, 4, 6)
        matrix = columns[: view.size]
        np.copyto(matrix.reshape(view.shape), view)
        matrix = matrix.reshape(problem.groups, into.shape[1], -1)
    matmul(matrix, filters, out=into)
