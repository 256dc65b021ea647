"""Gradient of the filters as an implicit matrix product on the FP32 cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from leanconv.dtypes import GPU_LAYERS, is_narrow
from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments, limits
from leanconv.kernels.contract import Config, by_time, ceil_div
from leanconv.kernels.cost import Speeds, clusters_at_once, launch_cycles
from leanconv.kernels.simt.tiles import TileSpeeds
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class WeightTileConfig(Config):
    """A block computes ``tile_k`` filters x ``tile_pixels`` weights of each, a thread ``thread_k`` x ``thread_pixels``.

    The lanes of a warp form a grid of ``lanes_k`` x (32 / lanes_k); ``stages`` steps of ``tile_reduction`` output
    pixels are in shared memory at once. A cluster of ``split`` blocks shares the pixels of a tile, and so do
    ``split_k`` of them whose sums a second launch adds.
    """

    tile_k: int
    tile_pixels: int
    tile_reduction: int
    thread_k: int
    thread_pixels: int
    lanes_k: int
    stages: int
    min_blocks: int
    split: int = 1
    split_k: int = 1

    @property
    def threads(self) -> int:
        return self.tile_k * self.tile_pixels // (self.thread_k * self.thread_pixels)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: its stages, or with a split the sums of a tile."""
        stages = self.stages * self.tile_reduction * (self.tile_k + self.tile_pixels + 8)
        return 4 * max(stages, self.tile_k * self.tile_pixels if self.split > 1 else 0)


#: The tiles; `WeightSpeeds` has their speeds.
TILES = (
    WeightTileConfig(128, 128, 16, 8, 8, 4, 3, 2),
    WeightTileConfig(128, 64, 16, 8, 8, 4, 3, 4),
    WeightTileConfig(64, 128, 16, 8, 8, 4, 3, 4),
    WeightTileConfig(64, 64, 16, 8, 8, 4, 3, 6),
    WeightTileConfig(64, 64, 16, 4, 8, 4, 3, 4),
    WeightTileConfig(32, 128, 16, 4, 8, 4, 3, 4),
    WeightTileConfig(32, 64, 16, 4, 8, 4, 3, 8),
)
SPLITS = (1, 2, 4, 8, 16)
#: Blocks of the largest tile that keep a large GPU busy.
BLOCKS = 264


@dataclass(frozen=True)
class WeightSpeeds(Speeds):
    """Of tiles of a gradient of the filters on FP32 cores."""

    #: of each of `TILES`, the share of the best tile's speed (3x3, 256 channels and filters)
    tiles: tuple[float, ...]
    #: of this speed, where elements are copied one by one (NCHW, CHWN)
    single_copies: float
    #: of a block beside its steps, and of the sum over a cluster
    block_cycles: int
    split_cycles: int


class ImplicitGemmWeight(split_k.SplitK):
    """Filters x weights, summed over all output pixels by FP32 FMAs. Every shape, layout and element type."""

    name = "implicit_gemm_weight"
    paper = "S. Chetlur et al., cuDNN: Efficient Primitives for Deep Learning (2014)"
    precision = "ieee"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return limits(problem, "wgrad", dtypes=GPU_LAYERS)

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, WeightTileConfig]]:
        most = min(_most_blocks(problem), split_k.most_partial_sums(problem, workspace))
        return by_time(
            (predicted_cycles(problem, config, speed, target), config)
            for tile, speed in tiles(problem, target)
            for config in _shared_by(problem, tile, target, most)
        )

    def plan(self, problem: ConvProblem, config: WeightTileConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        arguments = (x, dy, split_k.destination(problem, config.split_k), batch)
        grid = tiles_of(problem, config) * config.split * config.split_k
        first = self.launch(config, conv_constants(problem), arguments, grid, config.shared_bytes)
        return split_k.with_sums(first, problem, config.split_k)


def _shared_by(
    problem: ConvProblem, tile: WeightTileConfig, target: Target, most: float
) -> Iterator[WeightTileConfig]:  # fmt: skip
    """The tile, computed by one block, by clusters, and by as many blocks as keep the GPU busy, up to ``most``."""
    steps = ceil_div(problem.pixels, tile.tile_reduction)
    pairs = tile.thread_k * tile.thread_pixels // 2
    for split in SPLITS:
        config = replace(tile, split=split)
        possible = split <= min(steps, target.most_in_cluster) and pairs % split == 0
        if (split == 1 or possible) and config.shared_bytes <= target.shared_per_block:
            yield config
    if most >= 2 and tile.shared_bytes <= target.shared_per_block:
        busy = target.multiprocessors * tile.min_blocks // tiles_of(problem, tile)
        yield replace(tile, split_k=max(2, min(int(most), busy)))


def _most_blocks(problem: ConvProblem) -> int:
    return max(2, min(ceil_div(problem.pixels, 16), BLOCKS // ceil_div(split_k.weights_of(problem), 128 * 128)))


def tiles(problem: ConvProblem, target: Target) -> Iterator[tuple[WeightTileConfig, float]]:
    """The tiles with their speeds. Threads that copy single elements, or hold some, need more registers beside sums."""
    single = problem.layout != "NHWC" or problem.group_c % 4 != 0 or problem.group_k % 4 != 0
    narrow = is_narrow(problem.dtype)
    for tile, speed in zip(TILES, WeightSpeeds.of(target).tiles, strict=True):
        if tile.threads == 256 and single and narrow:
            continue
        if tile.threads == 128 and tile.thread_k == 8 and (single or narrow):
            tile = replace(tile, min_blocks=3)
        yield tile, speed


def tiles_of(problem: ConvProblem, config: WeightTileConfig) -> int:
    weights = problem.group_c * problem.taps
    return ceil_div(problem.group_k, config.tile_k) * ceil_div(weights, config.tile_pixels) * problem.groups


def predicted_cycles(problem: ConvProblem, config: WeightTileConfig, speed: float, target: Target) -> float:
    """Predicted time in clock cycles: that of the busiest multiprocessor, and of the launch that adds partial sums."""
    speeds, shares = WeightSpeeds.of(target), config.split * config.split_k
    steps = ceil_div(problem.pixels, config.tile_reduction)
    pixels = ceil_div(steps, shares) * config.tile_reduction
    blocks = max(1, ceil_div(tiles_of(problem, config) * shares, target.multiprocessors))
    if config.split > 2:
        blocks = ceil_div(tiles_of(problem, config) * config.split_k, clusters_at_once(config.split, 1, target))
    few, full = (many * config.threads // 32 for many in (min(blocks, config.min_blocks), config.min_blocks))
    speed *= few / (few + 1.2) * (full + 1.2) / full
    if problem.layout != "NHWC":
        speed *= speeds.single_copies
    products = blocks * config.tile_k * config.tile_pixels * pixels
    time = products / (target.fma_lanes * TileSpeeds.of(target).best_share * speed)
    time += ceil_div(blocks, config.min_blocks) * speeds.block_cycles
    memory = problem.bytes / target.bytes_per_cycle
    time = max(time + (speeds.split_cycles if config.split > 1 else 0), memory) + launch_cycles(target)
    return time + split_k.sum_cycles(problem, config.split_k, target)
