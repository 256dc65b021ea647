"""Direct convolution: every filter tap adds its share to the output in place, with no matrix of columns at all."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.blocks import (
    PaddedInput,
    blocks,
    finish,
    in_columns,
    output_like,
    product_cost,
    shared_limits,
    windows,
)
from leanconv.cpu.depthwise import depthwise
from leanconv.cpu.layers import LayerAlgorithm
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem


class Direct(LayerAlgorithm):
    """One small product per filter tap and block, summed in place: the leanest of the CPU engine.

    Where a filter sees one channel (depthwise layers) products are elementwise, and `depthwise` takes all taps at once.
    """

    name = "direct"
    paper = "the definition of convolution"
    tier = "ieee"
    call_cost = 3e6

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        return shared_limits(problem)

    def compute_cost(self, problem: ConvProblem) -> float:
        pixels, taps = problem.n * problem.p * problem.q, problem.r * problem.s
        if problem.group_c == 1:
            # to turn images around and back takes as long as some 15 taps, to part the columns of a stride as 4
            around = (300 if problem.layout == "NCHW" else 60) + (60 if problem.stride[1] > 1 else 0)
            return pixels * problem.k * (around + 17.0 * taps)
        return product_cost(problem) + pixels * taps * (50 * problem.c + 75 * problem.k)

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        if problem.group_c == 1:
            return depthwise(problem, x, w, bias)
        pixel_bytes = (problem.c + 2 * problem.k) * item_bytes(problem.dtype)
        return in_columns(problem, x, bias, pixel_bytes, lambda band, seen: self._taps(band, seen, w, bias), 1 << 20)

    def _taps(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        y = output_like(problem, x)
        if y.size == 0:
            return y
        groups, group_c, group_k = problem.groups, problem.group_c, problem.group_k
        first = problem.layout == "NCHW"
        # filters[r, s]: (groups, K/groups, C/groups) for NCHW, (groups, C/groups, K/groups) for NHWC
        filters = (w if first else w.transpose(0, 3, 1, 2)).reshape(groups, group_k, group_c, problem.r, problem.s)
        filters = np.ascontiguousarray(filters.transpose(3, 4, 0, 1, 2) if first else filters.transpose(3, 4, 0, 2, 1))
        padded = PaddedInput(problem, x)
        pixel_bytes = (problem.c + 2 * problem.k) * item_bytes(problem.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            for block in blocks(problem, pixel_bytes, budget=1 << 20):
                view = windows(problem, padded.load(block))
                outer = (block.images, block.rows, problem.q)
                total = np.zeros((groups, group_k, *outer) if first else (*outer, groups, group_k), x.dtype)
                product = np.empty_like(total)
                for r in range(problem.r):
                    for s in range(problem.s):
                        if first:
                            _multiply_nchw(filters[r, s], view[:, r, s], product, group_c)
                        else:
                            _multiply_nhwc(view[:, :, :, r, s], filters[r, s], product, group_c)
                        total += product
                if first:
                    part = y[block.first : block.last, :, block.top : block.bottom]
                    part[...] = total.reshape(problem.k, *outer).swapaxes(0, 1)
                else:
                    part = y[block.first : block.last, block.top : block.bottom]
                    part[...] = total.reshape(*outer, problem.k)
                finish(problem, part, bias, 1 if first else 3)
        return y


def _multiply_nchw(tap: np.ndarray, seen: np.ndarray, product: np.ndarray, group_c: int) -> None:
    """``product`` (groups, K/g, images, P, Q) from a tap (groups, K/g, C/g) and what it sees (C, images, P, Q)."""
    groups, group_k = product.shape[:2]
    matmul(tap, seen.reshape(groups, group_c, -1), out=product.reshape(groups, group_k, -1))


def _multiply_nhwc(seen: np.ndarray, tap: np.ndarray, product: np.ndarray, group_c: int) -> None:
    """``product`` (images, P, Q, groups, K/g) from the pixels (images, P, Q, C) and a tap (groups, C/g, K/g)."""
    groups, group_k = product.shape[3:]
    pixels = seen.reshape(-1, groups, group_c).swapaxes(0, 1)
    matmul(pixels, tap, out=product.reshape(-1, groups, group_k).swapaxes(0, 1))
