"""Direct convolution: every filter tap adds its share to the output in place, with no matrix of columns at all."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.blocks import PaddedInput, blocks, finish, product_cost, shared_limits, windows
from leanconv.cpu.depthwise import depthwise
from leanconv.cpu.layers import LayerAlgorithm
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem


class Direct(LayerAlgorithm):
    """One small product per filter tap and block, summed in place: the leanest of the CPU engine.

    Where a filter reads one channel (depthwise) products are elementwise, and `depthwise` takes all taps at once.
    """

    name = "direct"
    paper = "the definition of convolution"
    precision = "ieee"
    call_cost = 3e6
    budget = 1 << 20

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        return shared_limits(problem)

    def compute_cost(self, problem: ConvProblem) -> float:
        pixels, taps = problem.n * problem.p * problem.q, problem.r * problem.s
        if problem.group_c == 1:
            # to transpose images and results takes as long as some 15 taps, to split the columns by phases as 4
            around = (300 if problem.layout == "NCHW" else 60) + (60 if problem.stride[1] > 1 else 0)
            return pixels * problem.k * (around + 17.0 * taps)
        return product_cost(problem) + pixels * taps * (50 * problem.c + 75 * problem.k)

    def pixel_bytes(self, problem: ConvProblem) -> int:
        return 0 if problem.group_c == 1 else (problem.c + 2 * problem.k) * item_bytes(problem.dtype)

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        if problem.group_c == 1:
            depthwise(problem, x, w, bias, y)
            return
        groups, group_c, group_k = problem.groups, problem.group_c, problem.group_k
        first = problem.layout == "NCHW"
        # filters[r, s]: (groups, K/groups, C/groups) for NCHW, (groups, C/groups, K/groups) for NHWC
        filters = (w if first else w.transpose(0, 3, 1, 2)).reshape(groups, group_k, group_c, problem.r, problem.s)
        filters = np.ascontiguousarray(filters.transpose(3, 4, 0, 1, 2) if first else filters.transpose(3, 4, 0, 2, 1))
        padded = PaddedInput(problem, x)
        for block in blocks(problem, self.pixel_bytes(problem), self.budget):
            view = windows(problem, padded.load(block))
            outer = (block.images, block.rows, problem.q)
            total = np.zeros((groups, group_k, *outer) if first else (*outer, groups, group_k), x.dtype)
            product = np.empty_like(total)
            for r in range(problem.r):
                for s in range(problem.s):
                    if first:
                        seen = view[:, r, s].reshape(groups, group_c, -1)
                        matmul(filters[r, s], seen, out=product.reshape(groups, group_k, -1))
                    else:
                        seen = view[:, :, :, r, s].reshape(-1, groups, group_c).swapaxes(0, 1)
                        matmul(seen, filters[r, s], out=product.reshape(-1, groups, group_k).swapaxes(0, 1))
                    total += product
            part = block.of(problem, y)
            part[...] = total.reshape(problem.k, *outer).swapaxes(0, 1) if first else total.reshape(*outer, problem.k)
            finish(problem, part, bias)
