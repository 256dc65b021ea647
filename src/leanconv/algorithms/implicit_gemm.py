"""Implicit GEMM: convolution as a matrix product whose im2col matrix exists only in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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


_Tile = ImplicitGemmConfig

#: The shapes a tile can take, and the share of the best tile's speed that each reaches when it fills the machine
#: (measured on an H200 with 3x3 layers of 64 channels and more; the best reaches 47 TFLOP/s).
TILES: dict[str, tuple[tuple[ImplicitGemmConfig, float], ...]] = {
    "NCHW": (
        (_Tile(128, 96, 16, thread_pixels=12, stages=3, min_blocks=2), 1.00),
        (_Tile(96, 128, 8, thread_k=12, min_blocks=3), 0.97),
        (_Tile(128, 128, 16, stages=3, min_blocks=2), 0.97),
        (_Tile(128, 64, 16, stages=3, min_blocks=3), 0.96),
        (_Tile(64, 128, 16, stages=3, min_blocks=3), 0.92),
        (_Tile(64, 128, 8, min_blocks=4), 0.89),
        (_Tile(64, 64, 16, stages=3, min_blocks=5), 0.89),
        (_Tile(32, 256, 8, min_blocks=3), 0.80),
        (_Tile(32, 64, 8, thread_k=4, min_blocks=8), 0.70),
        (_Tile(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=8), 0.60),
        (_Tile(16, 256, 8, thread_k=4, min_blocks=4), 0.60),
        (_Tile(4, 256, 8, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=5), 0.30),
    ),
    "NHWC": (
        (_Tile(128, 96, 8, thread_pixels=12, min_blocks=3), 1.00),
        (_Tile(96, 128, 8, thread_k=12, min_blocks=2), 0.99),
        (_Tile(64, 128, 16, stages=3, min_blocks=3), 0.97),
        (_Tile(128, 64, 8, min_blocks=4), 0.95),
        (_Tile(64, 64, 16, stages=3, min_blocks=4), 0.94),
        (_Tile(64, 128, 8, min_blocks=3), 0.90),
        (_Tile(32, 256, 8, min_blocks=2), 0.83),
        (_Tile(32, 64, 8, thread_k=4, min_blocks=6), 0.70),
        (_Tile(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=6), 0.60),
        (_Tile(16, 256, 8, thread_k=4, min_blocks=3), 0.60),
        (_Tile(4, 256, 4, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=4), 0.30),
    ),
}


def tiles(problem: ConvProblem) -> Iterator[tuple[ImplicitGemmConfig, float]]:
    """The tiles that ``problem`` can have without spilling registers, with their speeds."""
    # 64-bit offsets, and taps that are decoded element by element, take more registers beside the accumulators.
    heavy = bool(dict(conv_constants(problem))["wide"]) or max(problem.r, problem.s) > 16
    heavy |= problem.layout == "NHWC" and problem.group_c % 8 != 0
    for config, speed in TILES[problem.layout]:
        if not heavy:
            yield config, speed
        elif config.threads < 256:
            yield replace(config, min_blocks=max(1, config.min_blocks * 3 // 4)), speed


def cost(problem: ConvProblem, config: ImplicitGemmConfig, speed: float, target: Target) -> float:
    """Predicted time, in multiply-adds of the busiest multiprocessor at full speed.

    Tiles are computed whole, the busiest multiprocessor sets the time, few warps hide less latency, and starting and
    storing a tile costs as much as some twenty reduction indices. On suite ``im2win`` this orders the tiles as
    measured but for differences under 5 %.
    """
    tiles = ceil_div(problem.group_k, config.tile_k) * problem.groups
    tiles *= ceil_div(problem.n * problem.p * problem.q, config.tile_pixels)
    on_one = max(1, ceil_div(tiles, target.multiprocessors))  # an empty batch has no tiles
    reduction = ceil_div(problem.group_c * problem.r * problem.s, config.tile_reduction) * config.tile_reduction
    few, full = (blocks * config.threads // 32 for blocks in (min(on_one, config.min_blocks), config.min_blocks))
    speed *= few / (few + 1.2) * (full + 1.2) / full
    return on_one * config.tile_k * config.tile_pixels * (reduction + 20) / speed


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
        fitting = [
            (cost(problem, config, speed, target), config)
            for config, speed in tiles(problem)
            if shared_bytes(problem, config) <= target.shared_per_block
        ]
        yield from (config for _, config in sorted(fitting, key=lambda pair: pair[0]))

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
