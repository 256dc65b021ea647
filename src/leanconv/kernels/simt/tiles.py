"""What the tiled convolutions share on the host: the shape of a CTA tile, its predicted time, its launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import TypeVar

from leanconv.dtypes import is_narrow
from leanconv.kernels.common.layers import conv_arguments, copy_layout, has_wide_tensors, leaves_image
from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div, variant
from leanconv.kernels.cost import GpuSpeeds, Speeds, clusters_at_once
from leanconv.options import Layout
from leanconv.plan import Argument, Constants, Launch, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class TileSpeeds(Speeds):
    """Of the tiled kernels on FP32 cores. Tiles go by their `TileConfig.name`."""

    #: the share of a multiprocessor's multiply-adds that the best tile reaches
    best_share: float
    #: of each of `TILES`, the share of the best tile's speed when it fills the machine (3x3 layers of 64 channels and
    #: more). The last tiles of CHWN, and those of 4 and 32 filters, are set by those of NCHW.
    tiles: Mapping[Layout, Mapping[str, float]]
    #: how much the speed of the tile of 4 filters differs where a group has fewer than four channels (15 depthwise
    #: layers); in NHWC such channels are copied one by one
    few_channels: Mapping[Layout, float]
    #: the same in NHWC where groups have four channels or more (2 layers of ResNeXt)
    small_groups: float
    #: what 16-bit elements, which pass through registers on their way to shared memory, need otherwise than floats, by
    #: layout, tile and whether windows leave the image: as many blocks as registers allow without spills, and the depth
    #: that is quickest then. Explored (H200, 8da0039, suite im2win): a third block is worth 4 to 30 %.
    tiles_16bit: Mapping[str, Mapping[str, int]]
    #: what starting and storing a tile costs, in reduction indices, without and with a split
    overheads: tuple[int, int]


@dataclass(frozen=True)
class TileConfig(Config):
    """A block computes tile_k filters x tile_pixels pixels, a thread thread_k x thread_pixels of them.

    The lanes of a warp form a grid of lanes_k x (32 / lanes_k). Shared memory holds ``stages`` reduction steps of
    ``tile_reduction`` indices. ``split`` blocks of a cluster share the reduction of one tile.
    """

    tile_k: int = 128
    tile_pixels: int = 128
    tile_reduction: int = 8
    thread_k: int = 8
    thread_pixels: int = 8
    lanes_k: int = 4
    stages: int = 4
    min_blocks: int = 2
    split: int = 1

    @cached_property
    def name(self) -> str:
        """Filters, pixels and depth of the tile: ``128x96x16``."""
        return f"{self.tile_k}x{self.tile_pixels}x{self.tile_reduction}"

    @cached_property
    def threads(self) -> int:
        warps_k = self.tile_k // (self.lanes_k * self.thread_k)
        warps_pixels = self.tile_pixels // (32 // self.lanes_k * self.thread_pixels)
        return 32 * warps_k * warps_pixels

    def shared_bytes(self, pixel_floats: int, table_bytes: int) -> int:
        """Shared memory of a block whose pixels take ``pixel_floats`` a stage: stages and table, or the whole tile."""
        columns = gcd(self.tile_reduction, 16)
        filter_floats = self.tile_reduction * (self.tile_k + (8 if columns == 4 else 4))
        stages = 4 * self.stages * (filter_floats + pixel_floats)
        return max(stages + table_bytes, 4 * self.tile_k * self.tile_pixels if self.split > 1 else 0)

    @property
    def order(self) -> Hashable:
        """The order of an output's sum: one chain of multiply-adds, or the shares of a cluster's blocks."""
        return (self.split, self.tile_reduction) if self.split > 1 else ()


C = TypeVar("C", bound="TileConfig")

#: The tiles of each layout; `TileSpeeds` has their speeds.
TILES: dict[Layout, tuple[TileConfig, ...]] = {
    "NCHW": (
        TileConfig(128, 96, 16, thread_pixels=12, stages=3, min_blocks=2),
        TileConfig(96, 128, 8, thread_k=12, min_blocks=3),
        TileConfig(128, 128, 16, stages=3, min_blocks=2),
        TileConfig(128, 64, 16, stages=3, min_blocks=3),
        TileConfig(64, 128, 16, stages=3, min_blocks=3),
        TileConfig(64, 128, 8, min_blocks=4),
        TileConfig(64, 64, 16, stages=3, min_blocks=5),
        TileConfig(32, 256, 8, min_blocks=3),
        TileConfig(32, 64, 8, thread_k=4, min_blocks=8),
        TileConfig(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=8),
        TileConfig(16, 256, 8, thread_k=4, min_blocks=4),
        TileConfig(4, 256, 8, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=5),
    ),
    "NHWC": (
        TileConfig(128, 96, 8, thread_pixels=12, min_blocks=3),
        TileConfig(96, 128, 8, thread_k=12, min_blocks=2),
        TileConfig(64, 128, 16, stages=3, min_blocks=3),
        TileConfig(128, 64, 8, min_blocks=4),
        TileConfig(64, 64, 16, stages=3, min_blocks=4),
        TileConfig(64, 128, 8, min_blocks=3),
        TileConfig(32, 256, 8, min_blocks=2),
        TileConfig(32, 64, 8, thread_k=4, min_blocks=6),
        TileConfig(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=6),
        TileConfig(16, 256, 8, thread_k=4, min_blocks=3),
        TileConfig(4, 256, 4, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=4),
    ),
    "CHWN": (
        TileConfig(128, 96, 16, thread_pixels=12, stages=3, min_blocks=3),
        TileConfig(96, 128, 16, thread_k=12, stages=3, min_blocks=3),
        TileConfig(128, 128, 16, stages=3, min_blocks=2),
        TileConfig(64, 128, 16, stages=3, min_blocks=4),
        TileConfig(128, 64, 16, stages=3, min_blocks=4),
        TileConfig(64, 64, 16, stages=3, min_blocks=5),
        TileConfig(64, 128, 8, min_blocks=4),
        TileConfig(32, 256, 8, min_blocks=3),
        TileConfig(32, 64, 8, thread_k=4, min_blocks=6),
        TileConfig(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=6),
        TileConfig(16, 256, 8, thread_k=4, min_blocks=3),
        TileConfig(4, 256, 8, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=4),
    ),
}


def decodes_taps(problem: ConvProblem) -> bool:
    """Whether a filter has too many taps along an axis for the bits of a word (pixel_loader.cuh, TapBits)."""
    return max(problem.t, problem.r, problem.s) > (10 if problem.is_volume else 16)


def tiles(
    problem: ConvProblem, target: Target, along: bool = False, wide: bool = False
) -> Iterator[tuple[TileConfig, float]]:
    """The tiles that ``problem`` can have without spilling registers, with their speeds.

    ``along``: pixels are read along the reduction in NCHW too; ``wide``: offsets take 64 bits whatever the tensors.
    """
    # 64-bit offsets, and taps that are decoded element by element, take more registers beside the accumulators.
    heavy = wide or has_wide_tensors(problem) or decodes_taps(problem)
    heavy |= (problem.layout == "NHWC" and problem.group_c % 8 != 0) or along
    layout: Layout = "NHWC" if along else copy_layout(problem)
    speeds = TileSpeeds.of(target)
    few = 1.0
    if problem.group_c < 4 and problem.group_k <= 4:
        few = speeds.few_channels[problem.layout]
    elif problem.groups > 1 and problem.layout == "NHWC":
        few = speeds.small_groups
    padded = " padded" if leaves_image(problem) else ""
    for config in TILES[layout]:
        speed = speeds.tiles[layout][config.name] * (few if config.tile_k == 4 else 1.0)
        if is_narrow(problem.dtype):
            # Only one step is in flight at a time, so two stages are enough.
            config = variant(config, stages=2, **speeds.tiles_16bit.get(f"{layout} {config.name}{padded}", {}))
        if not heavy:
            yield config, speed
        elif config.threads < 256:
            yield variant(config, min_blocks=max(1, config.min_blocks * 3 // 4)), speed


def cost(
    problem: ConvProblem,
    pixels: int,
    reduction: int,
    config: TileConfig,
    speed: float,
    target: Target,
    overheads: tuple[int, int] | None = None,
) -> float:
    """Predicted time, in clock cycles of the busiest multiprocessor, of ``pixels`` as the tiles count them and
    ``reduction`` indices.

    Tiles are computed whole, the busiest multiprocessor sets the time, few warps hide less latency, and starting and
    storing a tile costs as much as some reduction indices (``overheads``). Explored (H200, cbb1363): on suite
    ``im2win`` this orders the tiles as measured but for differences under 5 %. Clusters of four and eight are placed
    unevenly, so that one multiprocessor may have a block more than others. Explored (H200, 20f0073): 16 layers of suite
    ``batch-1`` took 1.3 to 1.6 times as long.
    """
    speeds = TileSpeeds.of(target)
    tiles = ceil_div(problem.group_k, config.tile_k) * problem.groups * ceil_div(pixels, config.tile_pixels)
    mean = tiles * config.split / target.multiprocessors
    on_one: float = max(1, ceil(mean))  # an empty batch has no tiles
    if config.split > 2:
        if mean > GpuSpeeds.of(target).even_clusters * config.min_blocks:
            on_one = mean + 1
        elif tiles > clusters_at_once(config.split, ceil(mean), target):
            on_one += 1
    steps = ceil_div(ceil_div(reduction, config.tile_reduction), config.split)
    few, full = (blocks * config.threads // 32 for blocks in (min(on_one, config.min_blocks), config.min_blocks))
    speed *= few / (few + 1.2) * (full + 1.2) / full
    overhead = (overheads or speeds.overheads)[config.split > 1]
    products = on_one * config.tile_k * config.tile_pixels * (steps * config.tile_reduction + overhead)
    return products / (target.fma_lanes * speeds.best_share * speed)


def with_splits(
    problem: ConvProblem, timed: Iterable[tuple[C, float]], reduction: int, target: Target
) -> Iterator[tuple[C, float]]:
    """The configurations, and each of them with the reduction split over a cluster where that is possible."""
    for config, speed in timed:
        yield config, speed
        shared = config.thread_pixels if problem.layout == "NHWC" else config.thread_k
        for split in (2, 4, 8):
            if target.clusters and shared % split == 0 and reduction >= 8 * split * config.tile_reduction:
                yield variant(config, split=split), speed


def tile_launch(
    algorithm: GpuAlgorithm,
    constants: Constants,
    config: TileConfig,
    problem: ConvProblem,
    pixels: int,
    shared_bytes: int,
    arguments: tuple[Argument, ...] = (),
    phases: int = 1,
) -> Launch:
    """The launch of a tiled kernel, which numbers ``pixels`` output pixels of each of its phases."""
    tiles = ceil_div(problem.group_k, config.tile_k) * problem.groups * ceil_div(pixels, config.tile_pixels)
    grid = tiles * phases * config.split
    return algorithm.launch(config, constants, arguments or conv_arguments(problem), grid, shared_bytes)
