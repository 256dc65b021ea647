"""Gradient of the filters on tensor cores for float16 and bfloat16 in NCHW, from windows in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import ClassVar

from leanconv.kernels.common import split_k
from leanconv.kernels.contract import (
    LAUNCH_CYCLES,
    Arithmetic,
    Config,
    TimedAlgorithm,
    by_time,
    ceil_div,
    conv_constants,
    variant,
)
from leanconv.kernels.depthwise.depthwise_weight import clusters_at_once
from leanconv.kernels.hopper_fp32.tensor_gemm import wgmma_limits
from leanconv.kernels.hopper_native.native_gemm_nchw import (
    NativeGemmNchw,
    count_limits,
    image_pixels,
    unit_cycles,
    window_limits,
    window_lines,
)
from leanconv.kernels.simt.tiles import gradient_arguments, weight_limits
from leanconv.options import Precision
from leanconv.plan import Launch, Plan, Target, in_chain
from leanconv.problem import ConvProblem

#: Stages of the ring, at most.
MOST_STAGES = 4
#: Warpgroups that load.
PRODUCERS = 2
#: Filters, channels and taps of a tile in warpgroups, and channels of a warpgroup.
Tile = tuple[int, int, int, int]
TILES: tuple[Tile, ...] = (
    (2, 1, 1, 128), (1, 2, 1, 128), (2, 1, 1, 64), (1, 2, 1, 64), (1, 1, 2, 64), (2, 1, 1, 32), (1, 2, 1, 32),
    (1, 1, 2, 32), (2, 1, 1, 16), (1, 1, 2, 16), (2, 1, 1, 8), (1, 1, 2, 8),
)  # fmt: skip
#: Sums of a thread, at most.
MOST_SUMS = 144
#: Registers of producers and consumers, by the sums of a consumer's thread up to so many.
REGISTERS = {80: (120, 136), 96: (96, 160), MOST_SUMS: (72, 184)}
#: Output pixels of a stage. NOTE: multiples of 64, as pixel_windows.cuh counts tiles.
PIXELS = (256, 192, 128, 64)
#: Pixels whose products a block sums in the tensor core, which rounds toward zero: at most 2^-11 of the sum is lost.
MOST_PIXELS = 2**17
SPLITS = (1, 2, 4, 8, 16)
#: Blocks that keep a large GPU busy.
BLOCKS = 132
#: The times below were fitted to 80 pairs of a layer and a tile (burst, H200), most within a quarter.
#: Cycles of a product: at least, and more for each column.
OF_PRODUCT = (22, 0.6)
#: Cycles in which a warp loads and stores what it holds at once, and more for each register that holds it.
OF_UNIT = (550, 52)
#: Share of the shorter of both that is not hidden by the longer.
NOT_HIDDEN = 0.5
#: Cycles of a block beside its stages, and more for each sum of a thread; of a cluster's sums.
OF_BLOCK, OF_SUM, SPLIT_CYCLES = 8000, 40, 4000


@dataclass(frozen=True)
class WindowWeightConfig(Config):
    """A tile has 64 filters for each of ``filter_groups`` consumers, ``channels`` for each of ``channel_groups``, and
    ``taps``, which ``tap_groups`` share. ``producers`` warpgroups load.

    The ring has ``stages`` of ``pixels`` outputs, and what they see. A cluster of ``split`` blocks shares a tile's
    pixels, and so do ``parts`` of them whose sums a second launch adds.
    """

    filter_groups: int
    channel_groups: int
    tap_groups: int
    channels: int
    taps: int
    pixels: int
    stages: int
    producers: int
    producer_registers: int
    consumer_registers: int
    split: int = 1
    parts: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + self.producers)

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.filter_groups * self.channel_groups * self.tap_groups

    @property
    def sums(self) -> int:
        """Sums of a consumer's thread."""
        return ceil_div(self.taps, self.tap_groups) * self.channels // 2

    @property
    def filters(self) -> int:
        """Filters of a tile."""
        return 64 * self.filter_groups

    @property
    def all_channels(self) -> int:
        """Channels of a tile."""
        return self.channels * self.channel_groups

    def lines(self, problem: ConvProblem) -> int:
        """Pixels of a window of x."""
        return window_lines(problem, self.pixels)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Shared memory of a block: barriers, where taps begin, and the windows or the sums."""
        first = ceil_div(16 * self.stages + 4 * self.taps, 128) * 128
        stage = 2 * (self.all_channels * self.lines(problem) + self.filters * (self.pixels + 1))
        sums = 4 * self.filters * (self.all_channels * self.taps | 1)
        return first + max(self.stages * stage, sums)


class NativeWeightNchw(TimedAlgorithm):
    """The filters' gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW. Windows of pixels, turned
    around on their way to shared memory, serve all taps; sums over the blocks of a cluster, or split-K through a
    workspace, in fixed order, no atomics."""

    name = "native_weight_nchw"
    paper = NativeGemmNchw.paper
    tier: ClassVar[Precision] = "fp32"
    solves = "conv2d"
    dtypes: ClassVar[tuple[str, ...]] = NativeGemmNchw.dtypes

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = window_limits(problem, [*weight_limits(problem, self.dtypes), *wgmma_limits(target)])
        if reasons:
            return reasons
        if many := count_limits(problem, image_pixels(problem), window_lines(problem, PIXELS[0])):
            return many
        if not any(_fitting(tile, problem, target) for tile in _tiles_for(problem)):
            return [
                f"windows of {PIXELS[-1]} outputs see {window_lines(problem, PIXELS[-1])} pixels: two times "
                f"{TILES[-1][3]} channels of them take more than the {target.shared_per_block} bytes of shared memory "
                "that a block has"
            ]
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def workspace_bytes(self, problem: ConvProblem, config: WindowWeightConfig) -> int:
        return split_k.workspace_bytes(problem, config.parts)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WindowWeightConfig]]:
        return self.within(problem, target)

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, WindowWeightConfig]]:
        most, room = _most_blocks(problem), split_k.most_parts(problem, workspace)
        return by_time(
            (predicted_cycles(problem, config, target), config)
            for tile in _tiles_for(problem)
            for whole in _fitting(tile, problem, target)
            for config in _shared_by(problem, whole, target, most, room)
        )

    def plan(self, problem: ConvProblem, config: WindowWeightConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        shared = config.shared_bytes(problem)
        first = Launch(
            header="kernels/hopper_native/native_weight_nchw.cuh",
            function="leanconv::native_weight_nchw",
            problem=conv_constants(problem),
            tuning=(*config.constants(), ("lines", config.lines(problem)), ("bytes", shared)),
            arguments=(x, dy, split_k.destination(problem, config.parts), batch),
            grid=tiles_of(problem, config) * config.split * config.parts,
            block=config.threads,
            shared_bytes=shared,
            cluster=config.split,
        )
        plan = split_k.with_sums(first, problem, config.parts)
        return replace(plan, launches=in_chain(plan.launches))


def _shared_by(
    problem: ConvProblem, whole: WindowWeightConfig, target: Target, most: int, room: float
) -> Iterator[WindowWeightConfig]:
    """The configuration, with tiles computed by one block each, by clusters, and by up to ``most`` blocks, alone or in
    clusters, with up to ``room`` partial sums. No block sums more than `MOST_PIXELS`."""
    pixels = problem.n * image_pixels(problem)
    for split in SPLITS:
        if pixels <= split * MOST_PIXELS and split <= target.most_in_cluster:
            yield variant(whole, split=split)
    if room < 2:
        return
    tiles, least = tiles_of(problem, whole), max(2, ceil_div(pixels, MOST_PIXELS))
    found: dict[tuple[int, int], None] = {}
    for busy in dict.fromkeys(min(most, rounds * target.multiprocessors // tiles) for rounds in (1, 2, 3)):
        for split in (1, 2, 4):
            blocks = max(least, int(min(busy, split * room)))
            parts = ceil_div(blocks, split)
            if 2 <= parts <= room and (split == 1 or blocks >= 2 * split) and split <= target.most_in_cluster:
                found[split, parts] = None
    yield from (variant(whole, split=split, parts=parts) for split, parts in found)


def _most_blocks(problem: ConvProblem) -> int:
    """Most blocks that share a tile: as many as keep a large GPU busy."""
    tiles = ceil_div(split_k.weights_of(problem), 128 * 32 * 9)
    pixels = problem.n * image_pixels(problem)
    busy = min(ceil_div(pixels, PIXELS[-1]), BLOCKS * (1 if tiles <= 16 else 2 if tiles <= 64 else 3) // tiles)
    return max(2, busy, ceil_div(pixels, MOST_PIXELS))


def _tiles_for(problem: ConvProblem) -> list[Tile]:
    """Those tiles of which half has not room for all filters, channels or taps; the smallest in any case."""
    return [
        tile
        for tile in TILES
        if (problem.group_k > 32 * tile[0] or tile[0] == 1)
        and (problem.group_c > tile[1] * tile[3] // 2 or tile[3] == 8)
        and (problem.r * problem.s >= tile[2])
    ]


def _fitting(tile: Tile, problem: ConvProblem, target: Target) -> list[WindowWeightConfig]:
    """The configurations of a tile: as many taps as have room, long stages, as many as fit."""
    filter_groups, channel_groups, tap_groups, channels = tile
    taps = problem.r * problem.s
    of_tile = ceil_div(taps, ceil_div(taps, 2 * MOST_SUMS // channels * tap_groups))
    sums = ceil_div(of_tile, tap_groups) * channels // 2
    registers = next(REGISTERS[most] for most in REGISTERS if sums <= most)
    found = []
    for pixels in PIXELS:
        for stages in range(MOST_STAGES, 1, -1):
            config = WindowWeightConfig(
                filter_groups, channel_groups, tap_groups, channels, of_tile, pixels, stages, PRODUCERS, *registers
            )
            if config.shared_bytes(problem) <= target.shared_per_block:
                found.append(config)
                break
    return found


def tiles_of(problem: ConvProblem, config: WindowWeightConfig) -> int:
    """Tiles of the gradient."""
    of_group = ceil_div(problem.group_k, config.filters) * ceil_div(problem.group_c, config.all_channels)
    return of_group * ceil_div(problem.r * problem.s, config.taps) * problem.groups


def predicted_cycles(problem: ConvProblem, config: WindowWeightConfig, target: Target) -> float:
    """Predicted time in clock cycles."""
    cycles = max(OF_PRODUCT[0], OF_PRODUCT[1] * config.channels)
    products = config.pixels // 16 * config.taps * config.filter_groups * config.channel_groups * cycles
    neighbours = gcd(problem.w, 4) if problem.stride[1] == 1 else 1
    registers = config.producer_registers
    loads = unit_cycles(config.lines(problem), config.all_channels // 8, neighbours, registers, OF_UNIT)
    loads += unit_cycles(config.pixels, config.filters // 8, gcd(problem.q, 4), registers, OF_UNIT)
    loads /= 4 * config.producers
    of_stage = max(products, loads) + NOT_HIDDEN * min(products, loads)
    stages = ceil_div(problem.n * image_pixels(problem), config.pixels)
    each = ceil_div(stages, config.split * config.parts) * of_stage + OF_BLOCK
    each += OF_SUM * config.sums + (SPLIT_CYCLES if config.split > 1 else 0)
    # pairs of blocks found a place on all multiprocessors: 128 blocks ran in one round on an H200
    places = clusters_at_once(config.split, 1, target) if config.split > 2 else target.multiprocessors // config.split
    rounds = ceil_div(tiles_of(problem, config) * config.parts, places)
    memory = problem.bytes / target.bytes_per_cycle
    return max(rounds * each, memory) + LAUNCH_CYCLES + split_k.sum_cycles(problem, config.parts, target)
