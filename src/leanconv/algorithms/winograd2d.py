"""openCNN: two-dimensional Winograd in one kernel, for 3 x 3 filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from leanconv.algorithms.base import GpuAlgorithm, Plan, Target
from leanconv.algorithms.tiles import layer_limits
from leanconv.algorithms.winograd_tiles import (
    Transform,
    WinogradTileConfig,
    computed,
    filter_launch,
    main_launch,
    padded,
    prepared_floats,
    shared_bytes,
)
from leanconv.problem import ConvProblem
from leanconv.winograd import matrices, outputs_2d, why_not_2d


@dataclass(frozen=True)
class Winograd2dConfig(WinogradTileConfig):
    """As WinogradTileConfig; a block's tiles are numbered along rows, then over rows and images."""

    states: int = 16
    thread_k: int = 8
    thread_tiles: int = 16
    lanes_k: int = 8
    lane_states: int = 2
    rows: int = 1
    run: int = 1
    channels: int = 8
    stages: int = 2
    min_blocks: int = 1
    staged: bool = False


#: Configurations, best guess first: 64 x 32 or 32 x 64 filters and tiles with 128 sums a thread, or with half as many.
CONFIGS = (
    Winograd2dConfig(),
    Winograd2dConfig(lanes_k=4),
    Winograd2dConfig(channels=4),
    Winograd2dConfig(channels=4, lanes_k=4),
    Winograd2dConfig(channels=4, stages=3, run=4),
    Winograd2dConfig(lane_states=1, thread_tiles=8),
    Winograd2dConfig(staged=True),
    Winograd2dConfig(lanes_k=4, thread_tiles=8, channels=4, min_blocks=2),
    # F(4 x 4, 3 x 3) in 9 warps, which share the four schedulers unevenly. 128 sums a thread would take more registers
    # than 9 warps have.
    Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8),
    Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8, channels=4),
)


def transform_of(problem: ConvProblem, m: int) -> Transform:
    """F(m x m, 3 x 3) of the whole output."""
    return Transform(matrices(m, 3), True, 0, computed(problem).q)


def outputs_of(config: Winograd2dConfig) -> int:
    """Rows and columns of the outputs of a tile."""
    return isqrt(config.states) - 2


class Winograd2d(GpuAlgorithm):
    """Winograd in both directions, no workspace but transformed filters; 3 x 3 filters, unit stride and dilation."""

    name = "winograd2d"
    paper = "R. L. Castro et al., openCNN (2021)"
    tier = "fp32"
    solves = ConvProblem

    def why_not(self, problem: ConvProblem) -> list[str]:
        """See GpuAlgorithm."""
        reasons = layer_limits(problem)
        if problem.op not in ("fprop", "dgrad"):
            reasons.insert(0, f"op={problem.op!r} is neither the forward pass nor the gradient of the input")
        return reasons + why_not_2d(problem)

    def cost(self, problem: ConvProblem) -> float:
        """See Algorithm: not chosen before it has been measured."""
        return float("inf")

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[Winograd2dConfig]:
        """See GpuAlgorithm."""
        _, k = padded(computed(problem))
        for config in CONFIGS:
            m = outputs_of(config)
            if m in outputs_2d(problem.precision) and k % config.tile_k == 0:
                if shared_bytes(problem, transform_of(problem, m), config) <= target.shared_per_block:
                    yield config

    def prepared_bytes(self, problem: ConvProblem) -> int:
        """See Algorithm."""
        return 4 * max(prepared_floats(problem, transform_of(problem, m)) for m in outputs_2d(problem.precision))

    def plan(self, problem: ConvProblem, config: Winograd2dConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        transform = transform_of(problem, outputs_of(config))
        return Plan(
            (main_launch(self.name, problem, transform, config),),
            prepare=(filter_launch(self.name, problem, transform),),
            prepared_bytes=self.prepared_bytes(problem),
        )
