"""openCNN: two-dimensional Winograd in one kernel, for 3 x 3 filters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from leanconv.kernels.common.layers import copy_layout, forward_of, limits
from leanconv.kernels.contract import TimedAlgorithm, by_time
from leanconv.kernels.cost import Speeds, fma_cycles
from leanconv.kernels.simt import winograd_tiles as tiles
from leanconv.kernels.simt.winograd_tiles import Transform, WinogradTileConfig
from leanconv.kernels.winograd_matrices import matrices, outputs_2d, why_not_2d
from leanconv.options import Layout
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class Winograd2dConfig(WinogradTileConfig):
    """As WinogradTileConfig; a block's tiles are numbered along rows, then over rows and images. In NCHW ``staged``
    outputs pass through shared memory, from where they are stored in the order of memory.
    """

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


#: The configurations; `SquareSpeeds` has their speeds.
CONFIGS = (
    Winograd2dConfig(),
    Winograd2dConfig(lane_states=1, thread_tiles=8),
    Winograd2dConfig(lane_states=1, thread_tiles=8, staged=True),
    Winograd2dConfig(lanes_k=4),
    Winograd2dConfig(channels=4, stages=3, run=4),
    Winograd2dConfig(channels=4),
    Winograd2dConfig(channels=4, lanes_k=4),
    Winograd2dConfig(lanes_k=4, thread_tiles=8, channels=4, min_blocks=2),
    # F(4 x 4, 3 x 3) in 9 warps, which share the four schedulers unevenly. 128 sums a thread would take more registers
    # than 9 warps have.
    Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8),
    Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8, channels=4),
)


@dataclass(frozen=True)
class SquareSpeeds(Speeds):
    """Of Winograd along both directions."""

    #: of each of `CONFIGS`, by layout, the share of the FMA peak in the main loop; None: it is not tried. Outputs are
    #: staged in NCHW alone, and in CHWN tiles share no pixels.
    shares: Mapping[Layout, tuple[float | None, ...]]
    #: of a block, for each of its outputs: stored from registers, and staged in shared memory (NCHW)
    store_cycles: tuple[float, float]


def transform_of(problem: ConvProblem, m: int) -> Transform:
    """F(m x m, 3 x 3) of the whole output."""
    return Transform(matrices(m, 3), True, 0, forward_of(problem).q, row_blocks=problem.t)


def outputs_of(config: Winograd2dConfig) -> int:
    """Rows and columns of the outputs of a tile."""
    return isqrt(config.states) - 2


class Winograd2d(TimedAlgorithm):
    """Winograd in both directions, no workspace but transformed filters; 3 x 3 filters, unit stride and dilation. Of
    volumes it sums over the slices of T x 3 x 3 filters."""

    name = "winograd2d"
    paper = "R. L. Castro et al., openCNN (2021)"
    precision = "fp32"
    volumes = True

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target, 2.25)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return limits(problem, "fprop", "dgrad") + tiles.strided_slices(problem) + why_not_2d(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, Winograd2dConfig]]:
        configs = []
        speeds = SquareSpeeds.of(target)
        for config, speed in zip(CONFIGS, speeds.shares[copy_layout(problem)], strict=True):
            m = outputs_of(config)
            if speed is None or m not in outputs_2d(problem.precision) or (config.staged and problem.layout != "NCHW"):
                continue
            transform = transform_of(problem, m)
            chosen = tiles.fitted(problem, transform, config, target)
            if chosen is not None:
                time = tiles.main_cycles(problem, transform, chosen, speed, speeds.store_cycles[chosen.staged], target)
                configs.append((time + tiles.prepare_cycles(problem, transform, target), chosen))
        return by_time(configs)

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return 4 * max(tiles.prepared_floats(problem, transform_of(problem, m)) for m in outputs_2d(problem.precision))

    def plan(self, problem: ConvProblem, config: Winograd2dConfig, target: Target) -> Plan:
        transform = transform_of(problem, outputs_of(config))
        return Plan(
            (tiles.main_launch(self.name, problem, transform, config),),
            prepare=(tiles.filter_launch(self.name, problem, transform),),
            prepared_bytes=self.prepared_bytes(problem),
        )
