"""What the tests go over: every strategy of every algorithm and, where it splits the reduction through a workspace, its
configurations that do and that do not as two."""

from __future__ import annotations

from math import inf
from typing import Any

from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.plan import Target


def _only(algorithm: GpuAlgorithm, split: bool) -> GpuAlgorithm:
    """The algorithm with the configurations alone that do, or do not, split through a workspace."""
    kind = type(algorithm)

    def within(self: Any, problem: Any, target: Target, workspace: float = inf) -> list[tuple[float, Any]]:
        return [each for each in kind.within(self, problem, target, workspace) if (each[1].split_k > 1) == split]

    strategy = "_".join(filter(None, (algorithm.strategy, "split_k" * split)))
    made: GpuAlgorithm = type(
        f"{kind.__name__}Only", (kind,), {"within": within, "strategy": strategy, "__module__": kind.__module__}
    )()
    return made


#: Those that have split-K as a number of their configurations.
SPLIT_K = (
    "implicit_gemm_weight",
    "tensor_weight",
    "native_weight_nhwc",
    "native_weight_nchw",
    "native_weight_kmajor",
    "native_weight_groups",
    "native_weight_rows",
    "native_weight_sync",
    "depthwise_weight",
    "depthwise_weight_large",
)
VARIANTS: tuple[GpuAlgorithm, ...] = tuple(
    each
    for algorithm in ALGORITHMS
    for each in ((_only(algorithm, False), _only(algorithm, True)) if algorithm.stem in SPLIT_K else (algorithm,))
)
NAMED = {algorithm.stem: algorithm for algorithm in VARIANTS}
