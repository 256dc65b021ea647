"""The gradient of a layer's filters as one matrix product: gradients of the outputs times the columns of im2col."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.blocks import PaddedInput, block_alone, blocks, far_blocks, windows
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem


def filter_gradient(problem: ConvProblem, x: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """The gradient of the filters of ``problem``'s layer. Columns are made for one cache-sized block at a time."""
    if far := far_blocks(problem):
        whole = np.zeros(problem.y_shape, x.dtype)
        for block in far:
            whole += filter_gradient(*block_alone(problem, x, block), block.of(problem, grad))
        return whole
    nchw, taps = problem.layout == "NCHW", (problem.r, problem.s)
    result = np.zeros((problem.groups, problem.group_k, problem.group_c * problem.r * problem.s), x.dtype)
    padded = PaddedInput(problem, x)
    for block in blocks(problem, problem.c * problem.r * problem.s * item_bytes(problem.dtype)):
        view = windows(problem, padded.load(block))
        passed, pixels = block.of(problem, grad), block.images * block.rows * problem.q
        if nchw:
            columns = view.reshape(problem.groups, -1, pixels)
            passed = passed.transpose(1, 0, 2, 3).reshape(problem.groups, problem.group_k, pixels)
            result += matmul(passed, columns.transpose(0, 2, 1))
        else:
            grouped = view.reshape(pixels, *taps, problem.groups, problem.group_c).transpose(3, 0, 1, 2, 4)
            columns = grouped.reshape(problem.groups, pixels, -1)
            passed = passed.reshape(pixels, problem.groups, problem.group_k).transpose(1, 2, 0)
            result += matmul(passed, columns)
    return result.reshape(problem.y_shape)


def bias_gradient(problem: ConvProblem, grad: np.ndarray) -> np.ndarray:
    """The gradient of the bias of ``problem``'s layer: sums of ``grad``, which has images where x has; in float64."""
    channels = problem.layout.index("C")
    axes = tuple(axis for axis in range(4) if axis != channels)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(grad.astype(np.float64).sum(axis=axes)).astype(grad.dtype)
