"""im2col (Chellapilla, Puri, Simard 2006): copy every window to a column, then one matrix product does the rest."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.gradients import col2im, filter_gradient
from leanconv.cpu.layers import Block, LayerAlgorithm, PaddedInput, blocks, finish, product_cost, shared_limits, windows
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem, lay_out


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
        return product_cost(problem) + each * copied

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        if problem.op == "dgrad":
            dx = col2im(problem, x, w)
            return dx if bias is None else dx + bias.reshape(lay_out(problem.layout, 1, problem.c, 1, 1))
        if problem.op == "wgrad":
            return filter_gradient(problem, x, w)
        return super().compute(problem, x, w, bias)

    def pixel_bytes(self, problem: ConvProblem) -> int:
        return problem.c * problem.r * problem.s * item_bytes(problem.dtype)

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
