"""Implicit GEMM: convolution as a matrix product whose im2col matrix exists only in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from leanconv.algorithms.base import GpuAlgorithm, Plan, Target, conv_constants
from leanconv.algorithms.tiles import (
    TileConfig,
    conv_arguments,
    forward_limits,
    order,
    tile_launch,
    tiles,
    view_constants,
    with_splits,
)
from leanconv.problem import ConvProblem


def shared_bytes(problem: ConvProblem, config: TileConfig) -> int:
    """Shared memory of a block: the stages of both operands, and in NCHW the table of filter taps."""
    table = 0
    if problem.layout == "NCHW" and max(problem.r, problem.s) <= 16:
        constants = dict(conv_constants(problem))
        entry = (8 if constants["wide"] else 4) + (4 if constants["padded"] else 0)
        table = entry * lcm(problem.r * problem.s, config.tile_reduction)
    return config.shared_bytes(config.tile_reduction * (config.tile_pixels + 4), table)


class ImplicitGemm(GpuAlgorithm):
    """Direct convolution, FP32 FMAs, no workspace; every shape."""

    name = "implicit_gemm"
    paper = "S. Lu et al., im2win (2023), Algorithm 1; S. Chetlur et al., cuDNN (2014)"
    tier = "ieee"
    solves = ConvProblem

    def why_not(self, problem: ConvProblem) -> list[str]:
        """See GpuAlgorithm."""
        return forward_limits(problem)

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[TileConfig]:
        """See GpuAlgorithm."""
        reduction = problem.group_c * problem.r * problem.s
        speeds = with_splits(problem, tiles(problem), reduction, target)
        fitting = [(c, v) for c, v in speeds if shared_bytes(problem, c) <= target.shared_per_block]
        yield from order(problem, problem.n * problem.p * problem.q, reduction, fitting, target)

    def plan(self, problem: ConvProblem, config: TileConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        pixels, shared = problem.n * problem.p * problem.q, shared_bytes(problem, config)
        constants, arguments = view_constants(problem), conv_arguments(problem)
        return Plan((tile_launch(self.name, constants, config, problem, pixels, shared, arguments),))
