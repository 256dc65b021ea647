"""Implicit GEMM: convolution as a matrix product whose im2col matrix exists only in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from leanconv.algorithms.base import Argument, Config, GpuAlgorithm, Launch, Plan, Target, ceil_div, conv_constants
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class ImplicitGemmConfig(Config):
    """A block computes tile_k filters x tile_pixels pixels, a thread thread_k x thread_pixels of them.

    The lanes of a warp form a grid of lanes_k x (32 / lanes_k); ``stages`` reduction steps of ``tile_reduction``
    are in shared memory at once.
    """

    tile_k: int = 128
    tile_pixels: int = 128
    tile_reduction: int = 8
    thread_k: int = 8
    thread_pixels: int = 8
    lanes_k: int = 4
    stages: int = 4
    min_blocks: int = 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        warps_k = self.tile_k // (self.lanes_k * self.thread_k)
        warps_pixels = self.tile_pixels // (32 // self.lanes_k * self.thread_pixels)
        return 32 * warps_k * warps_pixels


def shared_bytes(problem: ConvProblem, config: ImplicitGemmConfig) -> int:
    """Shared memory of a block: the stages of both operands, and in NCHW the table of filter taps."""
    row = config.tile_k + 4 + config.tile_pixels + 4
    stages = 4 * config.stages * config.tile_reduction * row
    taps = problem.r * problem.s
    if problem.layout == "NHWC" or problem.r > 16 or problem.s > 16:
        return stages
    constants = dict(conv_constants(problem))
    entry = (8 if constants["wide"] else 4) + (4 if constants["padded"] else 0)
    return stages + entry * lcm(taps, config.tile_reduction)


class ImplicitGemm(GpuAlgorithm):
    """Direct convolution, FP32 FMAs in direct order, no workspace; every shape."""

    name = "implicit_gemm"
    paper = "S. Lu et al., im2win (2023), Algorithm 1; S. Chetlur et al., cuDNN (2014)"
    tier = "ieee"
    solves = ConvProblem

    def why_not(self, problem: ConvProblem) -> list[str]:
        """See GpuAlgorithm."""
        reasons = []
        if problem.op != "fprop":
            reasons.append(f"op={problem.op!r} is not the forward pass")
        if problem.dtype != "float32":
            reasons.append(f"dtype={problem.dtype!r} is not float32")
        return reasons

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[ImplicitGemmConfig]:
        """See GpuAlgorithm."""
        yield ImplicitGemmConfig()

    def plan(self, problem: ConvProblem, config: ImplicitGemmConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        pixels = problem.n * problem.p * problem.q
        tiles_k = ceil_div(problem.group_k, config.tile_k)
        launch = Launch(
            header="implicit_gemm.cuh",
            function="leanconv::implicit_gemm",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=(
                Argument("const float*", "x"),
                Argument("const float*", "w"),
                Argument("const float*", "bias"),
                Argument("float*", "y"),
                Argument("long long", "batch", problem.n),
            ),
            grid=tiles_k * problem.groups * ceil_div(pixels, config.tile_pixels),
            block=config.threads,
            shared_bytes=shared_bytes(problem, config),
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))
