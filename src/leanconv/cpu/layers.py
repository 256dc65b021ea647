"""What the CPU engine's algorithms of layers share: two layouts that they compute in, a third that is transposed."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import numpy as np

from leanconv.cpu.blas import one_thread
from leanconv.cpu.blocks import BLOCK_BYTES, finish, in_parts, keep_freed_memory
from leanconv.dtypes import DtypeName, accumulator, is_integer, is_narrow, largest_product
from leanconv.kernels.contract import CpuAlgorithm
from leanconv.problem import ConvProblem


def _is_transposed(problem: ConvProblem) -> bool:
    """Whether a layer is computed in NCHW, which it is not in."""
    small = problem.groups > 1 and problem.group_c > 1 and max(problem.group_c, problem.group_k) < 16
    return problem.layout == "CHWN" or (problem.layout == "NHWC" and problem.op == "fprop" and small)


class LayerAlgorithm(CpuAlgorithm):
    """An algorithm for layers. It computes in NCHW and NHWC; a layer in CHWN is transposed to NCHW, and back.
    Float16 and bfloat16 are computed in float32, and the result is rounded once. Integers of 8 bits are computed in
    float32 where no sum can pass 2**24, else in float64: both are exact there, and have BLAS. Bias and activation
    follow in int32, where a sum with its bias wraps around as on a GPU.

    With the batch innermost neither the rows nor the channels of an image are contiguous, and the matrix products that
    do the arithmetic here need one of the two. Small groups in NHWC are transposed as well: their channels are short
    runs (32 groups of 4 on 28 x 28 pixels took three times as long as in NCHW).
    """

    solves = "conv2d"

    #: what a call costs beside `compute_cost`, in its unit, more than one of `Im2col`: 1e6 are about 10 µs
    call_cost = 0.0
    #: bytes of temporaries of a block
    budget = BLOCK_BYTES

    def pixel_bytes(self, problem: ConvProblem) -> int:
        """Bytes of temporaries of one output pixel; 0 where rows of any length may be computed at once."""
        return 0

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """The result, a new contiguous array, of a problem in NCHW or NHWC."""

        def one(part: ConvProblem, seen: np.ndarray) -> np.ndarray:
            y = np.empty(part.y_shape, x.dtype)
            self.fill(part, seen, w, bias, y)
            return y

        return in_parts(problem, x, self.pixel_bytes(problem), one, self.budget)

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        """Write the result of a forward pass, which is not empty, to ``y``; for what has no `compute` of its own."""
        raise NotImplementedError

    @abstractmethod
    def compute_cost(self, problem: ConvProblem) -> float:
        """A guess at the time that `compute` takes, in the unit of `blocks.product_cost`."""

    def cost(self, problem: ConvProblem) -> float:
        """That of `compute`: transposing takes every algorithm the same time."""
        problem = replace(problem, layout="NCHW") if _is_transposed(problem) else problem
        return self.call_cost + self.compute_cost(problem)

    def run(
        self,
        problem: ConvProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: np.ndarray | None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        if is_integer(problem.dtype):
            return self._of_integers(problem, x, w, bias)
        if is_narrow(problem.dtype):
            wide = accumulator(problem.dtype).name
            y = self.run(
                replace(problem, dtype=wide),
                x.astype(wide),
                w.astype(wide),
                None if bias is None else bias.astype(wide),
            )
            with np.errstate(over="ignore"):  # to infinity, as on a GPU
                return y.astype(x.dtype)
        if 0 in problem.y_shape:
            return np.empty(problem.y_shape, x.dtype)
        keep_freed_memory()
        if not _is_transposed(problem):
            with one_thread(problem.flops), np.errstate(invalid="ignore", over="ignore"):
                return self.compute(problem, x, w, bias)
        there, back = ((3, 0, 1, 2), (1, 2, 3, 0)) if problem.layout == "CHWN" else ((0, 3, 1, 2), (0, 2, 3, 1))
        x, w = (np.ascontiguousarray(array.transpose(there)) for array in (x, w))
        with one_thread(problem.flops), np.errstate(invalid="ignore", over="ignore"):
            y = self.compute(replace(problem, layout="NCHW"), x, w, bias)
        return np.ascontiguousarray(y.transpose(back))

    def _of_integers(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        products = problem.group_c * problem.r * problem.s
        wide: DtypeName = "float32" if products * largest_product(problem.dtype) <= 2**24 else "float64"
        sums = replace(problem, dtype=wide, bias=False, activation=None)
        y = self.run(sums, x.astype(wide), w.astype(wide)).astype(np.int32)
        finish(problem, y, bias)
        return y
