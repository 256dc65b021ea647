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
    if result.size == 0:
        return result
    top, bottom, left, right = problem.padding
    nchw = problem.layout == "NCHW"
    rows, columns = (slice(top, top + problem.h), slice(left, left + problem.w))
    inside = (slice(None), slice(None), rows, columns) if nchw else (slice(None), rows, columns)
    extents = (problem.h + top + bottom, problem.w + left + right)
    shape = (problem.c, *extents) if nchw else (*extents, problem.c)
    pixel_bytes = problem.c * problem.r * problem.s * item_bytes(problem.dtype)
    passed_back = _passed_back_nchw if nchw else _passed_back_nhwc
    filters = w.reshape(problem.groups, problem.group_k, -1)
    padded = result
    with np.errstate(invalid="ignore", over="ignore"):
        for block in blocks(problem, pixel_bytes):
            images = slice(block.first, block.last)
            if block.top == 0 and any(problem.padding):
                padded = np.zeros((block.images, *shape), grad.dtype)
            target = padded if any(problem.padding) else result[images]
            back = passed_back(problem, block, grad[images], filters)
            for r in range(problem.r):
                for s in range(problem.s):
                    seen = _seen(problem, block, target, r, s)
                    seen += back[r, s]
            if block.bottom == problem.p and any(problem.padding):
                result[images] = padded[inside]
    return result


def _seen(problem: ConvProblem, block: Block, padded: np.ndarray, r: int, s: int) -> np.ndarray:
    """The pixels that tap (r, s) sees in the windows of ``block``."""
    (sh, sw), (dh, dw) = problem.stride, problem.dilation
    top, left = block.top * sh + r * dh, s * dw
    rows, columns = slice(top, top + (block.rows - 1) * sh + 1, sh), slice(left, left + (problem.q - 1) * sw + 1, sw)
    return padded[:, :, rows, columns] if problem.layout == "NCHW" else padded[:, rows, columns]


def _passed_back_nchw(problem: ConvProblem, block: Block, grad: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """What every tap passes back: (R, S, images, C, rows, Q)."""
    passed = grad[:, :, block.top : block.bottom].reshape(block.images, problem.groups, problem.group_k, -1)
    columns = matmul(filters.transpose(0, 2, 1), passed)
    taps = columns.reshape(block.images, problem.c, problem.r, problem.s, block.rows, problem.q)
    return taps.transpose(2, 3, 0, 1, 4, 5)


def _passed_back_nhwc(problem: ConvProblem, block: Block, grad: np.ndarray, filters: np.ndarray) -> np.ndarray:
    """What every tap passes back: (R, S, images, rows, Q, C)."""
    passed = grad[:, block.top : block.bottom].reshape(-1, problem.groups, problem.group_k)
    columns = matmul(passed.transpose(1, 0, 2), filters)
    outputs, taps = (block.images, block.rows, problem.q), (problem.r, problem.s)
    by_group = columns.reshape(problem.groups, *outputs, *taps, problem.group_c).transpose(4, 5, 1, 2, 3, 0, 6)
    return by_group.reshape(*taps, *outputs, problem.c)
