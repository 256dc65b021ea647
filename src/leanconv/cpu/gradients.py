"""The gradients of a layer on the CPU, each as one matrix product.

That of the input is col2im, the adjoint of im2col: filters times the gradient of the output give, as columns, what each
window passes back to its pixels; where windows overlap, these are added. That of the filters is the gradient of the
output times the columns of im2col.
"""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.layers import Block, PaddedInput, block_alone, blocks, far_blocks, inside, windows
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem


def col2im(problem: ConvProblem, grad: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The gradient of the input of ``problem``'s layer. Columns are made for one cache-sized block at a time."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    result = np.zeros(problem.y_shape, grad.dtype)
    # one view with the rows and columns last serves both layouts
    pixels = result if problem.layout == "NCHW" else result.transpose(0, 3, 1, 2)
    filters = w.reshape(problem.groups, problem.group_k, -1)
    for block in blocks(problem, problem.c * problem.r * problem.s * item_bytes(problem.dtype)):
        back = _passed_back(problem, block, grad, filters)
        target = pixels[block.first : block.last]
        for r in range(problem.r):
            passed_rows, rows = inside(block.top * sh + r * dh - top, sh, block.rows, problem.h)
            for s in range(problem.s):
                passed_columns, columns = inside(s * dw - left, sw, problem.q, problem.w)
                covered = target[:, :, rows, columns]
                covered += back[r, s][:, :, passed_rows, passed_columns]
    return result


def _passed_back(problem: ConvProblem, block: Block, grad: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """What every tap passes back: (R, S, images, C, rows, Q)."""
    outputs, taps, grad = (block.images, block.rows, problem.q), (problem.r, problem.s), block.of(problem, grad)
    if problem.layout == "NCHW":
        passed = grad.reshape(block.images, problem.groups, problem.group_k, -1)
        columns = matmul(filters.transpose(0, 2, 1), passed).reshape(block.images, problem.c, *taps, *outputs[1:])
        return columns.transpose(2, 3, 0, 1, 4, 5)
    passed = grad.reshape(-1, problem.groups, problem.group_k).transpose(1, 0, 2)
    columns = matmul(passed, filters).reshape(problem.groups, *outputs, *taps, problem.group_c)
    return columns.transpose(4, 5, 1, 2, 3, 0, 6).reshape(*taps, *outputs, problem.c).transpose(0, 1, 2, 5, 3, 4)


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
    layout = problem.layout.replace("H", "DH") if problem.is_volume else problem.layout
    axes = tuple(axis for axis, name in enumerate(layout) if name != "C")
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(grad.astype(np.float64).sum(axis=axes)).astype(grad.dtype)
