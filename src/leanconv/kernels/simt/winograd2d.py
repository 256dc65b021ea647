"""openCNN: two-dimensional Winograd in one kernel, for 3 x 3 filters."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import isqrt

from leanconv.kernels.contract import TimedAlgorithm, by_time, copy_layout, fma_cycles
from leanconv.kernels.simt.tiles import gradient_limits, overwrites
from leanconv.kernels.simt.winograd_tiles import (
    Transform,
    WinogradTileConfig,
    filter_launch,
    fitted,
    forward_of,
    main_cycles,
    main_launch,
    prepare_cycles,
    prepared_floats,
)
from leanconv.kernels.winograd_matrices import matrices, outputs_2d, why_not_2d
from leanconv.options import Layout
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


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


#: Configurations and the share of the FMA peak that each reaches in its main loop, by layout, measured on an H200.
#: Outputs are staged in NCHW alone, and in CHWN tiles share no pixels.
SPEEDS: tuple[tuple[Winograd2dConfig, dict[Layout, float]], ...] = (
    (Winograd2dConfig(), {"NHWC": 0.59, "NCHW": 0.55, "CHWN": 0.62}),
    (Winograd2dConfig(lane_states=1, thread_tiles=8), {"NHWC": 0.595, "NCHW": 0.54, "CHWN": 0.61}),
    (Winograd2dConfig(lane_states=1, thread_tiles=8, staged=True), {"NCHW": 0.56}),
    (Winograd2dConfig(lanes_k=4), {"NHWC": 0.51, "NCHW": 0.45, "CHWN": 0.565}),
    (Winograd2dConfig(channels=4, stages=3, run=4), {"NHWC": 0.49, "NCHW": 0.46}),
    (Winograd2dConfig(channels=4), {"NHWC": 0.50, "NCHW": 0.445, "CHWN": 0.49}),
    (Winograd2dConfig(channels=4, lanes_k=4), {"NHWC": 0.395, "NCHW": 0.43, "CHWN": 0.495}),
    (
        Winograd2dConfig(lanes_k=4, thread_tiles=8, channels=4, min_blocks=2),
        {"NHWC": 0.455, "NCHW": 0.425, "CHWN": 0.505},
    ),
    # F(4 x 4, 3 x 3) in 9 warps, which share the four schedulers unevenly. 128 sums a thread would take more registers
    # than 9 warps have.
    (
        Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8),
        {"NHWC": 0.43, "NCHW": 0.39, "CHWN": 0.435},
    ),
    (
        Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8, channels=4),
        {"NHWC": 0.37, "NCHW": 0.335, "CHWN": 0.35},
    ),
)
#: Clock cycles of a block for each of its outputs: stored from registers, or staged in shared memory (NCHW).
STORE = {False: 0.29, True: 1.15}


def transform_of(problem: ConvProblem, m: int) -> Transform:
    """F(m x m, 3 x 3) of the whole output."""
    return Transform(matrices(m, 3), True, 0, forward_of(problem).q)


def outputs_of(config: Winograd2dConfig) -> int:
    """Rows and columns of the outputs of a tile."""
    return isqrt(config.states) - 2


class Winograd2d(TimedAlgorithm):
    """Winograd in both directions, no workspace but transformed filters; 3 x 3 filters, unit stride and dilation."""

    name = "winograd2d"
    paper = "R. L. Castro et al., openCNN (2021)"
    tier = "fp32"
    solves = "conv2d"

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target, 2.25)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return gradient_limits(problem) + overwrites(problem) + why_not_2d(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, Winograd2dConfig]]:
        configs = []
        for config, speeds in SPEEDS:
            m, speed = outputs_of(config), speeds.get(copy_layout(problem))
            if speed is None or m not in outputs_2d(problem.precision) or config.staged and problem.layout != "NCHW":
                continue
            transform = transform_of(problem, m)
            chosen = fitted(problem, transform, config, target)
            if chosen is not None:
                store = STORE[chosen.staged]
                time = main_cycles(problem, transform, chosen, speed, store, target)
                configs.append((time + prepare_cycles(problem, transform, target), chosen))
        return by_time(configs)

    def order_of_sums(self, problem: ConvProblem, config: Winograd2dConfig) -> Hashable:
        return config.order

    def prepared_bytes(self, problem: ConvProblem) -> int:
        return 4 * max(prepared_floats(problem, transform_of(problem, m)) for m in outputs_2d(problem.precision))

    def plan(self, problem: ConvProblem, config: Winograd2dConfig, target: Target) -> Plan:
        transform = transform_of(problem, outputs_of(config))
        return Plan(
            (main_launch(self.name, problem, transform, config),),
            prepare=(filter_launch(self.name, problem, transform),),
            prepared_bytes=self.prepared_bytes(problem),
        )
