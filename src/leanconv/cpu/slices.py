"""Layers of volumes on the CPU: each slice of the output is an image, made of as many input slices as a filter has.

The slices that an output slice reads become channels, so the layer is one of images with T times the channels, and
every algorithm of this engine computes it, the gradients too. Only some slices are gathered at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from leanconv.cpu.layers import inside, shared_limits
from leanconv.dtypes import accumulator, is_integer, is_narrow, item_bytes
from leanconv.kernels.contract import CpuAlgorithm
from leanconv.problem import ConvProblem

#: Bytes that the gathered slices may take at a time.
BLOCK_BYTES = 64 << 20


class Slices(CpuAlgorithm):
    """Output slices as images whose channels are the input slices that they read; then the engine's own algorithms."""

    name = "slices"
    paper = "im2col along the depth; the algorithms of images do the rest"
    precision = "ieee"
    solves = "conv2d"
    volumes = True

    def __init__(self, images: tuple[CpuAlgorithm, ...]) -> None:
        #: what computes the layers of images
        self.images = images

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        reasons = shared_limits(problem, ("fprop", "dgrad", "wgrad"))
        if not problem.is_volume:
            reasons.append("it computes layers of volumes only, and this is one of images")
        if is_integer(problem.dtype):
            reasons.append(f"dtype={problem.dtype!r}: layers of volumes are of floating-point numbers")
        return reasons

    def cost(self, problem: ConvProblem) -> float:
        return float(problem.flops)

    def run(
        self,
        problem: ConvProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: np.ndarray | None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        if is_narrow(problem.dtype):
            wide = accumulator(problem.dtype).name
            given = None if bias is None else bias.astype(wide)
            y = self.run(replace(problem, dtype=wide), x.astype(wide), w.astype(wide), given)
            with np.errstate(over="ignore"):  # to infinity, as on a GPU
                return y.astype(x.dtype)
        y = np.zeros(problem.y_shape, x.dtype)
        if problem.op == "wgrad":
            self._filter_gradient(problem, x, w, y)
        elif problem.op == "dgrad":
            self._input_gradient(problem, x, _gathered_filters(problem, w), y)
            if bias is not None:
                y += bias.reshape([-1 if axis == "C" else 1 for axis in problem.layout.replace("H", "DH")])
        else:
            filters = _gathered_filters(problem, w)
            for n, first, images in _blocks(problem):
                pixels = _gather(problem, x[n], first, images.n)
                _slices(problem, y[n])[first : first + images.n] = self._compute(images, pixels, filters, bias)
        return y

    def _compute(self, images: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
        able = [each for each in self.images if not each.reasons(images, None)]
        chosen = min(able, key=lambda algorithm: algorithm.cost(images))
        result: np.ndarray = chosen.run(images, x.reshape(images.operands[0].shape), w, bias)
        return result

    def _input_gradient(self, problem: ConvProblem, grad: np.ndarray, filters: np.ndarray, dx: np.ndarray) -> None:
        for n, first, images in _blocks(problem):
            passed = np.ascontiguousarray(_slices(problem, grad[n])[first : first + images.n])
            back = _by_tap(problem, self._compute(images, passed, filters))
            target = _by_group(problem, _slices(problem, dx[n]))
            for t, (outputs, slices) in enumerate(_reads(problem, first, images.n)):
                target[slices] += back[t][outputs]

    def _filter_gradient(self, problem: ConvProblem, x: np.ndarray, grad: np.ndarray, dw: np.ndarray) -> None:
        for n, first, images in _blocks(problem):
            passed = np.ascontiguousarray(_slices(problem, grad[n])[first : first + images.n])
            part = self._compute(images, _gather(problem, x[n], first, images.n), passed)
            if problem.layout == "NHWC":
                part = part.reshape(problem.k, problem.r, problem.s, problem.t, problem.group_c).transpose(
                    0, 3, 1, 2, 4
                )
            dw += part.reshape(dw.shape)


def _blocks(problem: ConvProblem) -> Iterator[tuple[int, int, ConvProblem]]:
    """Image by image some output slices: the first one, and the layer of images that computes them."""
    each = problem.c * problem.t * problem.h * problem.w * item_bytes(problem.dtype)
    most = max(1, BLOCK_BYTES // each)
    whole = replace(
        problem, c=problem.c * problem.t, d=1, t=1, stride_d=1, padding_d=(0, 0), dilation_d=1,
        bias=problem.bias and problem.op == "fprop",
    )  # fmt: skip
    for n in range(problem.n):
        for first in range(0, problem.z, most):
            yield n, first, replace(whole, n=min(most, problem.z - first))


def _slices(problem: ConvProblem, volume: np.ndarray) -> np.ndarray:
    """A view of a volume with its slices first."""
    return volume.swapaxes(0, 1) if problem.layout == "NCHW" else volume


def _reads(problem: ConvProblem, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """For each slice of a filter: which of ``count`` output slices from ``first`` on read one with it, and these."""
    for t in range(problem.t):
        at = first * problem.stride_d - problem.padding_d[0] + t * problem.dilation_d
        yield inside(at, problem.stride_d, count, problem.d)


def _by_group(problem: ConvProblem, slices: np.ndarray) -> np.ndarray:
    """A view of slices, (slices, c, h, w) or (slices, h, w, c), with an axis of groups."""
    if problem.layout == "NCHW":
        return slices
    return slices.reshape(*slices.shape[:3], problem.groups, problem.group_c)


def _by_tap(problem: ConvProblem, images: np.ndarray) -> np.ndarray:
    """Views of images whose channels are (c, t), or in NHWC (group, t, c of the group): one for each t, first of all
    axes; the others are those of `_by_group`."""
    if problem.layout == "NCHW":
        return images.reshape(len(images), problem.c, problem.t, problem.h, problem.w).transpose(2, 0, 1, 3, 4)
    shape = len(images), problem.h, problem.w, problem.groups, problem.t, problem.group_c
    return images.reshape(shape).transpose(4, 0, 1, 2, 3, 5)


def _gather(problem: ConvProblem, volume: np.ndarray, first: int, count: int) -> np.ndarray:
    """The images of ``count`` output slices: what each reads, by the slices of a filter; zeros outside the volume."""
    shape = (count, problem.c * problem.t, problem.h, problem.w)
    images = np.zeros(shape if problem.layout == "NCHW" else (count, *shape[2:], shape[1]), volume.dtype)
    slices, by_tap = _by_group(problem, _slices(problem, volume)), _by_tap(problem, images)
    for t, (outputs, read) in enumerate(_reads(problem, first, count)):
        by_tap[t][outputs] = slices[read]
    return images


def _gathered_filters(problem: ConvProblem, w: np.ndarray) -> np.ndarray:
    """The filters with channels as `_gather` has them."""
    if problem.layout == "NHWC":
        w = np.ascontiguousarray(w.transpose(0, 2, 3, 1, 4))
        return w.reshape(problem.k, problem.r, problem.s, -1)
    return w.reshape(problem.k, -1, problem.r, problem.s)
