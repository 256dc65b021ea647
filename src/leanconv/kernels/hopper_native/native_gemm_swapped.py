"""Implicit GEMM on tensor cores for float16 and bfloat16 in NHWC, with filters as the rows of a product (swap AB)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from leanconv.kernels.common.input_gradient import distinct_phases
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeConfig, NativeGemm16bit, Tile
from leanconv.plan import Target
from leanconv.problem import ConvProblem

#: Both warpgroups have all pixels and 64 filters each, or the same 64 filters and half of the pixels each.
TILES: tuple[Tile, ...] = ((2, 2, 128), (2, 3, 64), (2, 2, 64))


@dataclass(frozen=True)
class SwappedConfig(NativeConfig):
    """That of `NativeGemm16bit`; no CTAs share a reduction."""

    @property
    def max_share(self) -> int:
        return 0


class NativeGemmSwapped(NativeGemm16bit):
    """`NativeGemm16bit` for few filters: these are rows of the products, and pixels their columns.

    It has not run on a GPU: nobody knows how long it takes, so neither ``auto`` nor tuning takes it.
    """

    strategy = "swapped"
    kind: ClassVar[type[NativeConfig]] = SwappedConfig
    tiles: ClassVar[tuple[Tile, ...]] = TILES

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        if reasons := super().why_not(problem, target):
            return reasons
        if problem.add or problem.accumulate:
            reasons.append("a residual, or an output that is added to, is not supported")
        if self._is_rearranged(problem):
            reasons.append(f"{problem.group_c} channels are no whole 16 bytes: filters would be rearranged before")
        if sum(phase.times for phase in distinct_phases(problem)) > 1:
            reasons.append(f"stride={problem.stride}: the gradient has several phases")
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, NativeConfig]]:
        filters = problem.group_c if problem.op == "dgrad" else problem.group_k
        found = (config for _, config in super().timed(problem, target))
        # those that multiply the fewest zeros first
        return [(inf, config) for config in sorted(found, key=lambda each: -filters % each.filters)]

    def _cycles(self, *_: object) -> float:
        return inf
