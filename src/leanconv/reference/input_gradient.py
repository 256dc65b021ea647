"""The gradient of a layer's input on NumPy: forward convolutions over its output's gradient, one for each phase."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np

from leanconv.algorithms.base import CpuAlgorithm, ceil_div
from leanconv.algorithms.input_gradient import parts
from leanconv.problem import ConvProblem


def rotated(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """The filters with input and output channels of a group exchanged and rows and columns reversed, as a view's copy.

    Shape (C, K/groups, R, S) in NCHW, (C, R, S, K/groups) in NHWC: the filters of ``problem.as_forward()``.
    """
    turned = (w if problem.layout == "NCHW" else w.transpose(0, 3, 1, 2))[:, :, ::-1, ::-1]
    taps = turned.shape[2:]
    grouped = turned.reshape(problem.groups, problem.group_k, problem.group_c, *taps).transpose(0, 2, 1, 3, 4)
    filters = grouped.reshape(problem.c, problem.group_k, *taps)
    return np.ascontiguousarray(filters if problem.layout == "NCHW" else filters.transpose(0, 2, 3, 1))


def input_gradient(problem: ConvProblem, grad: np.ndarray, w: np.ndarray, forward: CpuAlgorithm) -> np.ndarray:
    """The gradient of the layer's input, each phase computed by ``forward``; pixels that no phase has stay zero."""
    result = np.zeros(problem.y_shape, grad.dtype)
    if result.size == 0:
        return result
    apart = [stride // gcd(stride, dilation) for stride, dilation in zip(problem.stride, problem.dilation, strict=True)]
    rows, columns = (2, 3) if problem.layout == "NCHW" else (1, 2)
    for part in parts(problem):
        for i, j in np.ndindex(*part.view.phases):
            (down, right), (first_p, first_q) = part.view.phase(i, j)
            extents = ceil_div(problem.h - first_p, problem.stride[0]), ceil_div(problem.w - first_q, problem.stride[1])
            if min(extents) <= 0:
                continue
            top, bottom, left, rest = part.problem.padding
            bottom += extents[0] - part.problem.p - down
            rest += extents[1] - part.problem.q - right
            phase = replace(part.problem, padding=(top + down, bottom, left + right, rest))
            taps: list[slice] = [slice(None)] * 4
            taps[rows] = slice(part.first_tap[0] + i, None, apart[0])
            taps[columns] = slice(part.first_tap[1] + j, None, apart[1])
            pixels: list[slice] = [slice(None)] * 4
            pixels[rows] = slice(first_p, None, problem.stride[0])
            pixels[columns] = slice(first_q, None, problem.stride[1])
            result[tuple(pixels)] = forward.run(phase, grad, rotated(problem, w[tuple(taps)]), None)
    return result
