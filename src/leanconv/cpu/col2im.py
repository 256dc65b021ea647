"""col2im, the adjoint of im2col: the gradient of a layer's input as one matrix product and additions.

Filters times the gradient of the output give, as columns, what each window passes back to its pixels; where windows
overlap, these are added.
"""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.blocks import Block, blocks
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem


def col2im(problem: ConvProblem, grad: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The gradient of the input of ``problem``'s layer. Columns are made for one cache-sized block at a time."""
    result = np.zeros(problem.y_shape, grad.dtype)
    top, bottom, left, right = problem.padding
    nchw = problem.layout == "NCHW"
    rows, columns = (slice(top, top + problem.h), slice(left, left + problem.w))
    inside = (slice(None), slice(None), rows, columns) if nchw else (slice(None), rows, columns)
    extents = (problem.h + top + bottom, problem.w + left + right)
    shape = (problem.c, *extents) if nchw else (*extents, problem.c)
    pixel_bytes = problem.c * problem.r * problem.s * item_bytes(problem.dtype)
    filters = w.reshape(problem.groups, problem.group_k, -1)
    padded = result
    for block in blocks(problem, pixel_bytes):
        images = slice(block.first, block.last)
        if block.top == 0 and any(problem.padding):
            padded = np.zeros((block.images, *shape), grad.dtype)
        target = padded if any(problem.padding) else result[images]
        back = _passed_back(problem, block, grad, filters)
        for r in range(problem.r):
            for s in range(problem.s):
                seen = _covered(problem, block, target, r, s)
                seen += back[r, s]
        if block.bottom == problem.p and any(problem.padding):
            result[images] = padded[inside]
    return result


def _covered(problem: ConvProblem, block: Block, padded: np.ndarray, r: int, s: int) -> np.ndarray:
    """The pixels that tap (r, s) reads in the windows of ``block``."""
    (sh, sw), (dh, dw) = problem.stride, problem.dilation
    top, left = block.top * sh + r * dh, s * dw
    rows, columns = slice(top, top + (block.rows - 1) * sh + 1, sh), slice(left, left + (problem.q - 1) * sw + 1, sw)
    return padded[:, :, rows, columns] if problem.layout == "NCHW" else padded[:, rows, columns]


def _passed_back(problem: ConvProblem, block: Block, grad: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """What every tap passes back: (R, S, images, C, rows, Q) for NCHW, (R, S, images, rows, Q, C) for NHWC."""
    outputs, taps, grad = (block.images, block.rows, problem.q), (problem.r, problem.s), block.of(problem, grad)
    if problem.layout == "NCHW":
        passed = grad.reshape(block.images, problem.groups, problem.group_k, -1)
        columns = matmul(filters.transpose(0, 2, 1), passed).reshape(block.images, problem.c, *taps, *outputs[1:])
        return columns.transpose(2, 3, 0, 1, 4, 5)
    passed = grad.reshape(-1, problem.groups, problem.group_k).transpose(1, 0, 2)
    columns = matmul(passed, filters).reshape(problem.groups, *outputs, *taps, problem.group_c)
    return columns.transpose(4, 5, 1, 2, 3, 0, 6).reshape(*taps, *outputs, problem.c)
