"""Convolutions and filters in float64 by their definitions, which share no code with the package's engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from leanconv.cpu import oracle
from leanconv.problem import ConvProblem, FilterProblem

#: Of a batch of results in memory order, the axis of the filters.
FILTERS_AXIS = {"NCHW": 1, "NHWC": -1, "CHWN": 0}


def oracle_conv(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Float64 convolution by the definition, one filter tap at a time; shares no code with the package's engines.

    For dgrad each element of x, a gradient, goes back to where the forward layer has read from; for wgrad ``w`` is the
    gradient of the output.
    """
    if problem.is_volume:  # the package's oracle, which tests/api/test_volumes.py compares with PyTorch
        return oracle.conv2d(problem, x, w, bias)
    to_nchw = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "CHWN": (3, 0, 1, 2)}[problem.layout]
    from_nchw = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}[problem.layout]
    x, w = x.transpose(to_nchw), w.transpose(to_nchw)
    if problem.op == "wgrad":
        return _correlate(problem, x, w).transpose(from_nchw)
    y = _scatter(problem, x, w) if problem.op == "dgrad" else _gather(problem, x, w)
    if bias is not None:
        y += bias.astype(np.float64)[:, None, None]
    if problem.activation == "relu":
        y = np.where(np.isnan(y), y, np.maximum(y, 0))
    return y.transpose(from_nchw)


def _in_groups(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """(N, C, H, W) as (N, groups, channels of a group, H, W) in float64."""
    return array.astype(np.float64).reshape(len(array), problem.groups, -1, *array.shape[2:])


def _padded(problem: ConvProblem, x: np.ndarray) -> np.ndarray:
    top, bottom, left, right = problem.padding
    return np.pad(x, ((0, 0), (0, 0), (0, 0), (top, bottom), (left, right)))


def _taps(problem: ConvProblem) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    """Row and column of each filter tap, and the index of the padded pixels that it reads for all outputs."""
    for r, s in np.ndindex(problem.r, problem.s):
        i, j = r * problem.dilation[0], s * problem.dilation[1]
        rows = slice(i, i + (problem.p - 1) * problem.stride[0] + 1, problem.stride[0])
        columns = slice(j, j + (problem.q - 1) * problem.stride[1] + 1, problem.stride[1])
        yield r, s, (..., rows, columns)


def _gather(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    padded, w = _padded(problem, _in_groups(problem, x)), w.astype(np.float64)
    w = w.reshape(problem.groups, problem.group_k, *w.shape[1:])
    y = np.zeros((problem.n, problem.groups, problem.group_k, problem.p, problem.q))
    for r, s, pixels in _taps(problem):
        y += np.einsum("gkc,ngcpq->ngkpq", w[..., r, s], padded[pixels])
    return y.reshape(problem.n, problem.k, problem.p, problem.q)


def _scatter(problem: ConvProblem, grad: np.ndarray, w: np.ndarray) -> np.ndarray:
    grad, w = _in_groups(problem, grad), w.astype(np.float64)
    w = w.reshape(problem.groups, problem.group_k, *w.shape[1:])
    padded = _padded(problem, np.zeros((problem.n, problem.groups, problem.group_c, problem.h, problem.w)))
    for r, s, pixels in _taps(problem):
        padded[pixels] += np.einsum("gkc,ngkpq->ngcpq", w[..., r, s], grad)
    top, _, left, _ = problem.padding
    dx = padded[..., top : top + problem.h, left : left + problem.w]
    return dx.reshape(problem.n, problem.c, problem.h, problem.w)


def _correlate(problem: ConvProblem, x: np.ndarray, grad: np.ndarray) -> np.ndarray:
    """For each weight the sum of the products of the pixels that it reads and the gradients of the outputs."""
    padded, grad = _padded(problem, _in_groups(problem, x)), _in_groups(problem, grad)
    dw = np.zeros((problem.groups, problem.group_k, problem.group_c, problem.r, problem.s))
    for r, s, pixels in _taps(problem):
        dw[..., r, s] = np.einsum("ngkpq,ngcpq->gkc", grad, padded[pixels])
    return dw.reshape(problem.k, problem.group_c, problem.r, problem.s)


_PAD_MODES = {"replicate": "edge", "reflect": "symmetric", "reflect101": "reflect", "wrap": "wrap"}


def oracle_filter(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float = 0, delta: float = 0
) -> np.ndarray:
    """Float64 correlation of images (batch, h, w) by the definition, borders made by numpy.pad; of several kernels
    (f, kh, kw) as (batch, f, h, w). Pixels of several channels are the last axis of both."""
    if problem.rank:
        kernel = np.einsum("ku,kv->uv", kernel[:, : problem.kh], kernel[:, problem.kh :], dtype=np.float64)
        problem = replace(problem, rank=0)
    if problem.reduction == "sum":
        kernel, problem = np.full((problem.kh, problem.kw), float(kernel[0])), replace(problem, reduction=None)
    if problem.per_image:
        one = replace(problem, batch=1, per_image=False)
        results = [oracle_filter(one, x[i : i + 1], kernel[i], value, delta) for i in range(problem.batch)]
        return np.concatenate(results)
    if problem.is_volume:
        return _oracle_volumes(problem, x, kernel, value, delta)
    if problem.channels > 1:
        one = replace(problem, channels=1)
        results = [oracle_filter(one, x[..., c], kernel, value, delta) for c in range(problem.channels)]
        return np.stack(results, axis=-1)
    if kernel.ndim == 3:
        return np.stack([oracle_filter(problem, x, each, value, delta) for each in kernel], axis=1)
    (ay, ax), kh, kw = problem.anchor, problem.kh, problem.kw
    widths = ((0, 0), (ay, kh - 1 - ay), (ax, kw - 1 - ax))
    image = x.astype(np.float64)
    if problem.border == "constant":
        padded = np.pad(image, widths, constant_values=value)
    else:
        padded = np.pad(image, widths, mode=_PAD_MODES[problem.border])  # type: ignore[call-overload]
    y = np.full(x.shape, float(delta))
    for u in range(kh):
        for v in range(kw):
            y += float(kernel[u, v]) * padded[:, u : u + x.shape[1], v : v + x.shape[2]]
    return y[:, : problem.out_h, : problem.out_w]


def _oracle_volumes(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float, delta: float
) -> np.ndarray:
    """The sum over the slices of a kernel (kd, kh, kw), or of several, each by `oracle_filter`."""
    if kernel.ndim == 4:
        return np.stack([_oracle_volumes(problem, x, each, value, delta) for each in kernel], axis=1)
    widths = [(0, 0)] * x.ndim
    widths[1] = (problem.anchor_z, problem.kd - 1 - problem.anchor_z)
    if problem.border == "constant":
        padded = np.pad(x.astype(np.float64), widths, constant_values=value)
    else:
        padded = np.pad(x.astype(np.float64), widths, mode=_PAD_MODES[problem.border])  # type: ignore[call-overload]
    one = replace(problem, batch=problem.out_d, d=1, kd=1, anchor_z=0, filters=1)
    y = np.full((problem.batch, *one.y_shape), float(delta))
    for n in range(problem.batch):
        for t in range(problem.kd):
            y[n] += oracle_filter(one, padded[n, t : t + problem.out_d], kernel[t], value)
    return y


def as_result(sums: np.ndarray, dtype: str) -> np.ndarray:
    """Float64 sums as elements of a result; integers are rounded and saturate."""
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        sums = np.rint(sums).clip(limits.min, limits.max)
    with np.errstate(over="ignore"):
        return sums.astype(dtype)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference over that of what was expected."""
    return float(np.linalg.norm(got.astype(np.float64) - expected) / max(np.linalg.norm(expected), 1e-30))
