"""One channel, many filters (Chen et al. 2017, the special case): rows pass by once, and each meets all filters."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.layers import LayerAlgorithm, finish, product_cost, shared_limits
from leanconv.problem import ConvProblem


class SingleChannel(LayerAlgorithm):
    """A window of the rows that one row of outputs reads rolls down each channel; every pixel is read once.

    For each row of outputs all filters of the channel are applied to the window, as one product of the filters
    (K/groups, R·S) with the columns that the window shows (R·S, Q). The paper's threads each do this for their part of
    the row. Here a row is one product, too small for BLAS at its best: a statement of the idea, seldom the fastest.
    """

    name = "single_channel"
    paper = "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), special case"
    precision = "ieee"

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        reasons = shared_limits(problem)
        if problem.group_c != 1:
            reasons.append(f"groups={problem.groups} of {problem.c} channels: a group has more than one channel")
        return reasons

    def compute_cost(self, problem: ConvProblem) -> float:
        taps = problem.n * problem.c * problem.p * problem.r * problem.s
        return product_cost(problem) + taps * (80.0 * problem.q + 50_000)

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        filters = w.reshape(problem.groups, problem.group_k, problem.r * problem.s)
        # one view of either layout: (image, channel, row, column) and (image, filter, row, column)
        pixels, results = (x, y) if problem.layout == "NCHW" else (x.transpose(0, 3, 1, 2), y.transpose(0, 3, 1, 2))
        for n in range(problem.n):
            for c in range(problem.c):
                some = slice(c * problem.group_k, (c + 1) * problem.group_k)
                _roll(problem, pixels[n, c], filters[c], results[n, some])
        finish(problem, y, bias)


def _roll(problem: ConvProblem, image: np.ndarray, filters: np.ndarray, results: np.ndarray) -> None:
    """All ``results`` (filters, P, Q) of one ``image`` (H, W), whose rows are read from top to bottom."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    height, width = (problem.r - 1) * dh + 1, (problem.q - 1) * sw + (problem.s - 1) * dw + 1
    # Row i of the padded image has its place, i modulo height, until row i + height comes.
    window = np.zeros((height, width), image.dtype)
    seen = max(0, min(width - left, problem.w))
    columns = np.empty((problem.r * problem.s, problem.q), image.dtype)
    come = 0
    for p in range(problem.p):
        for i in range(max(come, p * sh), p * sh + height):
            row = window[i % height]
            row[...] = 0
            if top <= i < top + problem.h:
                row[left : left + seen] = image[i - top, :seen]
        come = p * sh + height
        for r in range(problem.r):
            row = window[(p * sh + r * dh) % height]
            for s in range(problem.s):
                columns[r * problem.s + s] = row[s * dw : s * dw + (problem.q - 1) * sw + 1 : sw]
        results[:, p] = matmul(filters, columns)
