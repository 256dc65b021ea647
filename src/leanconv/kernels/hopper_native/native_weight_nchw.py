"""Gradient of the filters on tensor cores for float16 and bfloat16 in NCHW, from windows in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd

from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments
from leanconv.kernels.contract import Arithmetic, Config, ceil_div
from leanconv.kernels.cost import Speeds, clusters_at_once, overlapped
from leanconv.kernels.hopper_native import native_gemm_nchw
from leanconv.kernels.hopper_native.native_gemm_nchw import linear_order, unit_cycles
from leanconv.plan import Plan, Target
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
#: Output pixels of a stage. NOTE: multiples of 64, as linear_pixels.cuh counts tiles.
PIXELS = (256, 192, 128, 64)
SPLITS = (1, 2, 4, 8, 16)
#: Blocks that keep a large GPU busy.
BLOCKS = 132


@dataclass(frozen=True)
class WindowWeightSpeeds(Speeds):
    """Clock cycles, fitted to 60 pairs of a layer and a configuration, and to 33 layers of known networks.

    Explored (H200, 9a529e60), burst: the pairs within 6 % in the mean, and 16 % at most; the networks' layers, measured
    before, within 11 %, and 27 % at most, with what was chosen then.
    """

    #: of a product: at least, and for each column
    product: tuple[float, float]
    #: in which a warp loads and stores what it holds at once, and more for each register that holds it
    unit: tuple[float, float]
    #: share of the shorter of both that is not hidden by the longer
    not_hidden: float
    #: of a block beside its stages, more for each sum of a thread, and of the sums of a cluster
    block_cycles: int
    sum_cycles: int
    split_cycles: int
    #: of a call beside its blocks, and of the launch that adds partial sums beside what memory takes for these
    start: int
    adding: int


@dataclass(frozen=True)
class WindowWeightConfig(Config):
    """A tile has 64 filters for each of ``filter_groups`` consumers, ``channels`` for each of ``channel_groups``, and
    ``taps``, which ``tap_groups`` share. ``producers`` warpgroups load.

    The ring has ``stages`` of ``pixels`` outputs, and what they read. A cluster of ``split`` blocks shares a tile's
    pixels, and so do ``split_k`` of them whose sums a second launch adds.
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
    split_k: int = 1

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + self.producers)

    @property
    def consumers(self) -> int:
        return self.filter_groups * self.channel_groups * self.tap_groups

    @property
    def sums(self) -> int:
        """Sums of a consumer's thread."""
        return ceil_div(self.taps, self.tap_groups) * self.channels // 2

    @property
    def filters(self) -> int:
        return 64 * self.filter_groups

    @property
    def all_channels(self) -> int:
        return self.channels * self.channel_groups

    def lines(self, problem: ConvProblem) -> int:
        """Pixels of a window of x."""
        return linear_order(problem).resident(self.pixels)

    def shared_bytes(self, problem: ConvProblem) -> int:
        """Shared memory of a block: barriers, where taps begin, and the windows or the sums."""
        first = ceil_div(16 * self.stages + 4 * self.taps, 128) * 128
        stage = 2 * (self.all_channels * self.lines(problem) + self.filters * (self.pixels + 1))
        sums = 4 * self.filters * (self.all_channels * self.taps | 1)
        return first + max(self.stages * stage, sums)


class NativeWeightNchw(split_k.PredictedSplitK):
    """The filters' gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW."""

    name = "native_weight"
    strategy = "nchw"
    paper = native_gemm_nchw.NativeGemmNchw.paper
    precision = "fp32"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        if reasons := native_gemm_nchw.linear_limits(problem, target, "wgrad"):
            return reasons
        order = linear_order(problem)
        if many := native_gemm_nchw.count_limits(problem, order.image, order.resident(PIXELS[0])):
            return many
        if not any(_fitting(tile, problem, target) for tile in _tiles_for(problem)):
            return [
                f"windows of {PIXELS[-1]} outputs see {order.resident(PIXELS[-1])} pixels: two times "
                f"{TILES[-1][3]} channels of them take more than the {target.shared_per_block} bytes of shared memory "
                "that a block has"
            ]
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def predicted(
        self, problem: ConvProblem, target: Target, workspace: float
    ) -> Iterator[tuple[float, WindowWeightConfig, int, int]]:
        most, room = _most_blocks(problem), split_k.most_partial_sums(problem, workspace)
        for tile in _tiles_for(problem):
            for whole in _fitting(tile, problem, target):
                cycles = cycles_of(problem, whole, target)
                for split, slices in _shared_by(problem, whole, target, most, room):
                    yield cycles(split, slices), whole, split, slices

    def plan(self, problem: ConvProblem, config: WindowWeightConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        shared = config.shared_bytes(problem)
        tuning = (*config.constants(), *linear_order(problem).constants(config.pixels), ("bytes", shared))
        arguments = (x, dy, split_k.destination(problem, config.split_k), batch)
        grid = tiles_of(problem, config) * config.split * config.split_k
        first = self.launch(config, conv_constants(problem), arguments, grid, shared, tuning)
        return split_k.with_sums(first, problem, config.split_k, early=True)


def _shared_by(
    problem: ConvProblem, whole: WindowWeightConfig, target: Target, most: int, room: float
) -> Iterator[tuple[int, int]]:
    """``split`` and ``split_k`` for tiles computed by one block each, by clusters, and by up to ``most`` blocks, alone
    or in clusters, with up to ``room`` partial sums. No block sums more than `split_k.MOST_PIXELS`."""
    pixels = problem.n * problem.z * linear_order(problem).image
    for split in SPLITS:
        if pixels <= split * split_k.MOST_PIXELS and split <= target.most_in_cluster:
            yield split, 1
    if room < 2:
        return
    tiles, least = tiles_of(problem, whole), max(2, ceil_div(pixels, split_k.MOST_PIXELS))
    found = split_k.fewest_sums(least, room, target)
    for busy in dict.fromkeys(min(most, rounds * target.multiprocessors // tiles) for rounds in (1, 2, 3)):
        for split in split_k.clusters_with_sums(SPLITS, least, room):
            blocks = max(least, int(min(split_k.enough(busy, least), split * room)))
            slices = ceil_div(blocks, split)
            if 2 <= slices <= room and (split == 1 or blocks >= 2 * split) and split <= target.most_in_cluster:
                found[split, slices] = None
    yield from found


def _most_blocks(problem: ConvProblem) -> int:
    """Most blocks that share a tile: as many as keep a large GPU busy."""
    tiles = ceil_div(split_k.weights_of(problem), 128 * 32 * 9)
    pixels = problem.n * problem.z * linear_order(problem).image
    busy = min(ceil_div(pixels, PIXELS[-1]), BLOCKS * (1 if tiles <= 16 else 2 if tiles <= 64 else 3) // tiles)
    return max(2, busy, ceil_div(pixels, split_k.MOST_PIXELS))


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
    of_group = ceil_div(problem.group_k, config.filters) * ceil_div(problem.group_c, config.all_channels)
    return of_group * ceil_div(problem.r * problem.s, config.taps) * problem.t * problem.groups


def cycles_of(problem: ConvProblem, whole: WindowWeightConfig, target: Target) -> Callable[[int, int], float]:
    """A function that predicts the clock cycles of ``whole`` with another ``split`` and ``split_k``."""
    speeds = WindowWeightSpeeds.of(target)
    cycles = max(speeds.product[0], speeds.product[1] * whole.channels)
    products = whole.pixels // 16 * whole.taps * whole.filter_groups * whole.channel_groups * cycles
    neighbours = gcd(problem.w, 4) if problem.stride[1] == 1 else 1
    registers = whole.producer_registers
    loads = unit_cycles(whole.lines(problem), whole.all_channels // 8, neighbours, registers, speeds.unit)
    loads += unit_cycles(whole.pixels, whole.filters // 8, gcd(problem.q, 4), registers, speeds.unit)
    loads /= 4 * whole.producers
    of_stage = overlapped(products, loads, speeds.not_hidden)
    stages, tiles = (
        ceil_div(problem.n * problem.z * linear_order(problem).image, whole.pixels),
        tiles_of(problem, whole),
    )
    of_block = speeds.sum_cycles * whole.sums
    memory = problem.bytes / target.bytes_per_cycle
    sums = 8 * split_k.weights_of(problem) / target.bytes_per_cycle
    # pairs of blocks found a place on all multiprocessors: 128 blocks ran in one round on an H200
    places = {split: target.multiprocessors // split for split in (1, 2)}

    def predicted(split: int, slices: int) -> float:
        each = ceil_div(stages, split * slices) * of_stage + speeds.block_cycles
        each += of_block + (speeds.split_cycles if split > 1 else 0)
        if split not in places:
            places[split] = clusters_at_once(split, 1, target)
        time = max(ceil_div(tiles * slices, places[split]) * each, memory) + speeds.start
        return time + (speeds.adding + slices * sums if slices > 1 else 0)

    return predicted
