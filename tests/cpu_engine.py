"""What the tests of the CPU engine share: its algorithms by name, and arrays for them."""

from __future__ import annotations

import numpy as np

from leanconv.cpu import CPU_ALGORITHMS
from leanconv.kernels.contract import CpuAlgorithm
from leanconv.problem import ConvProblem


def by_name(name: str) -> CpuAlgorithm:
    """The algorithm of that name."""
    return next(a for a in CPU_ALGORITHMS if a.name == name)


def arrays(
    problem: ConvProblem, seed: int = 0, positive: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Random x, w and bias of a problem, zero-mean or in [0, 1)."""
    rng = np.random.default_rng(seed)
    draw = rng.random if positive else rng.standard_normal
    x, w = (draw(each.shape).astype(problem.dtype) for each in problem.operands[:2])
    return x, w, draw(problem.k).astype(problem.dtype) if problem.bias else None
