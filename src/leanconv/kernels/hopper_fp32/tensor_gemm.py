"""Implicit GEMM on tensor cores, in the accuracy of float32 or of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Literal

from leanconv.dtypes import item_bytes
from leanconv.kernels.common.input_gradient import PartialConvolution, distinct_phases
from leanconv.kernels.common.layers import conv_arguments, wgmma_limits
from leanconv.kernels.common.split_gemm import DEPTH, RingConfig, SplitGemm, stages_of
from leanconv.kernels.common.tensor_core_gemm import (
    FLOPS_PER_CYCLE,
    MAX_REACH,
    REGISTERS,
    ROW,
    SPLITS,
    pixel_map,
    reach_of,
)
from leanconv.kernels.contract import by_time, ceil_div, variant
from leanconv.kernels.cost import GpuSpeeds, Speeds, overlapped, residual_cycles
from leanconv.plan import Argument, Constants, Launch, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class TensorConfig(RingConfig):
    """A CTA tile has 64 pixels for each of ``warpgroups`` consumers, and ``n_tiles`` MMA tiles of ``mma_n`` filters.

    ``products`` of float16 make one of float32: 3, or 1 for ``tf32``. ``partials`` partial sums are in flight at once;
    0: all sums stay in the tensor core.
    Pixels come in ``rows`` of channels, as ``linear`` pixels, as resident images (``spacing`` is not 0), or in columns
    (device/pipeline/pixels.cuh). ``channel_block`` channels of one tap are neighbours in the reduction. ``row_pixels``:
    pixels of a copy that serves all taps of a filter row; 0: each tap has a copy of its own. ``resident_pixels``: those
    of all images of a tile. ``ping_pong``: consumers multiply one after the other. ``pixel_stages`` and
    ``filter_stages`` are the lengths of the rings. A cluster of ``split`` CTAs splits a reduction.
    """

    warpgroups: int
    mma_n: int
    n_tiles: int
    products: int
    partials: int
    rows: bool
    channel_block: int
    ping_pong: bool
    pixel_stages: int
    filter_stages: int
    consumer_registers: int
    producer_registers: int
    linear: bool = False
    row_pixels: int = 0
    resident_pixels: int = 0
    spacing: int = 0
    split: int = 1

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups

    @property
    def stage_pixels(self) -> int:
        """Pixels of a stage: columns are four longer than the tile, columns of linear pixels than a box."""
        if self.linear:
            return self.pixels // self.box_width * (self.box_width + 4)
        return self.row_pixels or (self.pixels if self.rows else self.pixels + 4)


#: How pixels come into shared memory; ``lanes`` are rows that lanes copy.
Way = Literal["rows", "linear", "resident", "columns", "lanes"]
WAYS: tuple[Way, ...] = ("rows", "linear", "resident", "columns")
#: A tile: warpgroups, filters of an MMA tile, MMA tiles, partial sums.
Tile = tuple[int, int, int, int]
#: Whether consumers follow the ping-pong schedule with each tile.
TILES: dict[Tile, bool] = {
    (2, 64, 4, 2): True,
    (2, 128, 2, 1): True,
    (2, 64, 3, 2): True,
    (3, 64, 2, 1): False,
    (2, 64, 2, 2): True,
    (2, 128, 1, 1): False,
    (4, 64, 1, 1): False,
    (2, 64, 1, 1): True,
}
#: Tiles of one product: one MMA tile, and no ping-pong.
ONE_PRODUCT: dict[Tile, bool] = dict.fromkeys(
    [(2, 256, 1, 0), (2, 192, 1, 0), (3, 128, 1, 0), (2, 128, 1, 0), (3, 64, 1, 0), (2, 64, 1, 0)], False
)
#: What finding the tap of a channel block costs the lanes that copy columns, in copies of one channel.
TAP_COST = 1.875
#: Bytes of shared memory of a CTA on a Hopper GPU.
SHARED = 227 * 1024
#: Stages that the rings of pixels and of filters have at most.
MOST_STAGES = (3, 8)
#: Most taps of a filter over resident images: one bit each.
MOST_TAPS = 32
#: Most resident images of a tile: one thread issues a copy for each.
MOST_IMAGES = 16


@dataclass(frozen=True)
class GemmSpeeds(Speeds):
    """Of `TensorGemm`; those of a launch hold for `TensorWinograd` too."""

    #: TFLOP/s of large layers for each of `TILES`, by how pixels come (`WAYS`), on a rested card. Those of resident
    #: images with the last two tiles and with 192 filters are guesses.
    three_products: tuple[tuple[float, ...], ...]
    #: those of `ONE_PRODUCT`, on a busy card; linear pixels and columns were measured with an earlier form of the loop
    one_product: tuple[tuple[float, ...], ...]
    #: cycles of a call beside its work, and of those of `is_dense_product`
    whole_call: tuple[float, float]
    #: cycles of a tile besides its stages and stores, before the first tile of a launch, and of the sum over a cluster
    tile_cycles: float
    first_cycles: float
    split_cycles: float
    #: consumers do not multiply while they store: the share that counts of the time for a tile's outputs at a
    #: multiprocessor's part of the memory bandwidth
    store_share: float
    #: cycles of an output, channels last, where filters are no whole 16 bytes, so that each is stored by itself
    #: (explored, H200, e507758b: two layers of 230 filters)
    single: float
    #: the share of the memory's speed at which residuals come, channels last and first (explored on seven layers)
    residual: tuple[float, float]
    #: the share of a launch that its stages take, and how much of the shorter of the times for launches and for memory
    #: adds to the longer; with ``store_share`` fitted to 485 times
    stage_share: float
    lesser: float
    #: cycles of the four producer warps for each reduction element of 128 pixels in columns
    copy_cycles: float
    #: how many times as many for each line of memory that a warp's copy touches, where that is more: of pixels of fewer
    #: than 32 channels, and of 32 or more. With strides a line takes longer in the latter (24 layers in groups).
    copied_line: float
    copied_long_line: float
    strided_line: float
    #: and with the channels first, where strides pass over columns of many channels (explored, H200, e507758b: six
    #: layers of videos)
    strided_plane: float
    #: the same of rows that lanes copy: three layers in TF32. Explored (H200, e507758b): 58 to 70
    lane_cycles: float
    #: bytes of resident images that reach a multiprocessor in a cycle: they bound 1 x 1 filters, where each serves one
    #: tap
    resident_bytes: float
    #: how many times as fast copies for a row of taps are, and the power of the share of their pixels that a tile
    #: outputs. Short rows have many ends: more to copy, and bank conflicts.
    row_copies: tuple[float, float]

    def of_tile(self, config: TensorConfig) -> float:
        """Flops of a multiprocessor in a cycle of a launch's stages."""
        way: Way = "rows" if config.rows else "linear" if config.linear else "resident" if config.spacing else "columns"
        tile = config.warpgroups, config.mma_n, config.n_tiles, config.partials
        tiles, speeds = (ONE_PRODUCT, self.one_product) if config.products == 1 else (TILES, self.three_products)
        speed = speeds[list(tiles).index(tile)][WAYS.index(way)] * FLOPS_PER_CYCLE
        factor, power = self.row_copies
        return speed * (factor * (config.pixels / config.row_pixels) ** power) if config.row_pixels else speed


def is_dense_product(problem: ConvProblem, products: int) -> bool:
    """Whether a layer takes one product, and has its channels last, unit stride and one group: calls of such layers
    have been measured by themselves."""
    return products == 1 and problem.layout == "NHWC" and problem.stride == (1, 1) and problem.groups == 1


def row_map(problem: ConvProblem, copy_pixels: int) -> TensorMap:
    """The same of ``copy_pixels`` pixels that all taps of a filter row read: rows are longer by all taps but one."""
    top, left = -problem.padding[0], -problem.padding[2]
    upper_h = problem.padding[1] - (problem.r - 1) * problem.dilation[0]
    return replace(pixel_map(problem, copy_pixels), lower=(left, top), upper=(problem.padding[3], upper_h))


def row_pixels_of(problem: ConvProblem, pixels: int) -> int:
    """Pixels that all taps of a filter row read for ``pixels`` neighbouring outputs, a multiple of 8; 0 where each tap
    has a copy of its own."""
    if (
        problem.is_volume
        or problem.s < 2
        or problem.stride != (1, 1)
        or problem.dilation[1] != 1
        or problem.group_c % DEPTH
    ):
        return 0
    ends = (problem.q - gcd(pixels, problem.q) + pixels - 1) // problem.q
    copy_pixels = 8 * ceil_div(pixels + (problem.s - 1) * (1 + ends), 8)
    return copy_pixels if copy_pixels <= 256 and not row_map(problem, copy_pixels).why_not() else 0


def _in_rows(phase: PartialConvolution) -> bool:
    """Whether TMA copies in im2col mode can bring the pixels of a forward convolution."""
    problem = phase.problem
    whole_rows = problem.c % 4 == 0 and (problem.groups == 1 or problem.group_c % ROW == 0)
    near = reach_of(problem) <= MAX_REACH[phase.volume]
    if problem.layout != "NHWC" or not whole_rows or not near or problem.group_c < ROW // 2 or problem.n < 1:
        return False
    return not pixel_map(problem, 64, volume=phase.volume).why_not()


def by_lanes(problem: ConvProblem) -> bool:
    """Whether lanes copy rows of channels, as no tensor map describes them (`rows_by_lanes` of the kernels)."""
    return problem.layout == "NHWC" and problem.groups == 1 and problem.c % 4 != 0


def is_linear(problem: ConvProblem) -> bool:
    """Whether output pixel i reads input pixel i + shift, with a shift that the tap determines."""
    same = (problem.z, problem.p, problem.q) == (problem.d, problem.h, problem.w)
    same = same and (problem.stride_d, *problem.stride) == (1, 1, 1)
    whole = problem.groups == 1 or problem.group_c % ROW == 0
    if problem.layout == "NHWC" or not same or not whole or problem.group_c < ROW // 2 or problem.n < 1:
        return False
    return not linear_map(problem).why_not()


def linear_map(problem: ConvProblem, column: int = RingConfig.box_width + 4) -> TensorMap:
    """The tensor map of linear pixels in NCHW or CHWN: boxes of 32 channels x ``column`` pixels."""
    pixels, images = problem.d * problem.h * problem.w, problem.n
    if problem.layout == "CHWN":
        pixels, images = pixels * images, 1
    return TensorMap(
        role=problem.operands[0].role,
        element="float32",
        shape=(pixels, problem.c, images),
        strides=(4 * pixels, 4 * pixels * problem.c),
        box=(column, ROW, 1),
    )


@dataclass(frozen=True)
class Resident:
    """Resident images of a tile: fields of `TensorConfig`, and the fewest and most stages of pixels."""

    resident_pixels: int
    spacing: int
    stages: tuple[int, int]


def resident_of(problem: ConvProblem, pixels: int) -> Resident | None:
    """The resident images of a tile of ``pixels``; lanes' channels are so far apart that loads have no bank
    conflicts."""
    channel_pixels, image = problem.h * problem.w, problem.p * problem.q
    if problem.layout != "NCHW" or problem.group_c % ROW or channel_pixels % 16 == 0 or problem.is_volume:
        return None
    images = (image - gcd(pixels, image) + pixels - 1) // image + 1
    if images > MOST_IMAGES or problem.r * problem.s > MOST_TAPS:
        return None
    # NOTE: with one tap, two stages of images are one of filters, and two of these are in flight. With many, copies of
    # a stage have as much time as products of half of the taps.
    taps = problem.r * problem.s
    stages = (4, 6) if taps == 1 else (2, 3) if taps < 8 else (2, 2)
    return Resident(images * channel_pixels, 8 // gcd(channel_pixels, 8), stages)


def _channel_block(problem: ConvProblem) -> int:
    """The channel block of columns: few zeros, and few taps to find for the lanes that copy."""
    return min((32, 16, 8, 4, 2, 1), key=lambda block: stages_of(problem, block) * (1 + TAP_COST / block))


@lru_cache(maxsize=256)
def _config(
    tile: Tile,
    way: Way,
    channel_block: int,
    products: int,
    shared: int,
    row_pixels: int = 0,
    resident: Resident | None = None,
) -> TensorConfig | None:
    """The configuration of a tile, with rings as long as ``shared`` bytes allow; None where they are too short."""
    warpgroups, mma_n, n_tiles, partials = tile
    rows, linear = way in ("rows", "lanes"), way == "linear"
    registers = REGISTERS[warpgroups, way not in ("columns", "lanes")]
    shape = (warpgroups, mma_n, n_tiles, products, partials)
    ping_pong = products == 3 and TILES[tile]
    config = TensorConfig(*shape, rows, channel_block, ping_pong, 1, 1, *registers, linear, row_pixels)
    least = max(n_tiles, partials) if products == 3 else 2  # products of two stages are in flight
    fewest, most = 2, 2 if row_pixels else MOST_STAGES[0]
    if resident:
        config = replace(config, resident_pixels=resident.resident_pixels, spacing=resident.spacing)
        fewest, most = resident.stages
    for stages in range(most, fewest - 1, -1):
        left = shared - stages * config.pixel_stage_bytes - 16 * (stages + MOST_STAGES[1])
        filters = min(MOST_STAGES[1], left // config.filter_stage_bytes)
        if filters >= max(least, min(4, 2 * n_tiles)) or (stages == fewest and filters >= least):
            return replace(config, pixel_stages=stages, filter_stages=filters)
    return None


def _with_splits(config: TensorConfig, phases: list[PartialConvolution], target: Target) -> Iterator[TensorConfig]:
    """The configuration, and those with split-K where the rings hold the sums of a tile."""
    yield config
    if config.filters * config.pixels * 4 > config.ring_bytes:
        return
    each = phases[0].problem.s if config.row_pixels else 1  # stages that stay together
    work = [(_tiles(phase, config), stages_of(phase.problem, config.channel_block) // each) for phase in phases]
    for split in shares_of(work, target, phases[0].problem.batch_invariant):
        if config.filters // 16 % split == 0:
            yield variant(config, split=split)


def shares_of(work: list[tuple[int, int]], target: Target, batch_invariant: bool) -> Iterator[int]:
    """Sizes of clusters that may split the tiles that are left in each of the launches, or all tiles if the result is
    to be ``batch_invariant``. ``work``: tiles, and stages of each. Each CTA has stages, all but the last at least
    two."""
    for split in SPLITS:
        shared = batch_invariant or all(0 < rounds_of(tiles, split, target)[1] for tiles, _ in work)
        if shared and all(
            each >= 2 and each * (split - 1) < stages for _, stages in work for each in [ceil_div(stages, split)]
        ):
            yield split


def rounds_of(tiles: int, split: int, target: Target) -> tuple[int, int]:
    """Tiles that each CTA has, and those that are left for clusters to split; 0 where these are too many.

    Clusters of four and eight are placed unevenly: 32 clusters of four did not run at once on an H200's 132
    multiprocessors. They split all tiles or none.
    """
    blocks = max(1, target.multiprocessors // split) * split
    whole, left = divmod(tiles, blocks)
    return whole, left if left * split <= blocks and (split == 2 or not whole) else 0


def clusters_at_once(split: int, target: Target) -> int:
    return max(1, int(target.multiprocessors * (1 if split == 2 else GpuSpeeds.of(target).even_clusters)) // split)


def grid_of(tiles: int, split: int, target: Target, batch_invariant: bool = False) -> int:
    """CTAs of a launch. ``batch_invariant``: a cluster for each tile, so that none depends on how many there are."""
    if split == 1:
        return min(tiles, target.multiprocessors)
    if batch_invariant:
        return tiles * split
    whole, left = rounds_of(tiles, split, target)
    return (tiles - left) // whole if whole else left * split


def walk_cycles(
    tiles: int, stages: int, of_stage: float, of_tile: float, split: int, target: Target, batch_invariant: bool
) -> float:
    """Cycles of a launch whose CTAs walk over ``tiles`` of so many ``stages``. ``of_stage``: of a stage, ``of_tile``:
    of a tile besides its stages."""
    speeds = GemmSpeeds.of(target)
    if split == 1:
        return ceil_div(tiles, target.multiprocessors) * (stages * of_stage + of_tile) + speeds.first_cycles
    each = ceil_div(stages, split) * of_stage + of_tile + speeds.split_cycles
    if batch_invariant:
        return ceil_div(tiles, clusters_at_once(split, target)) * (each + speeds.first_cycles)
    whole, left = rounds_of(tiles, split, target)
    # clusters of four and eight that do not run at once wait for the end of others
    rounds = 1 if split == 2 else max(1, ceil_div(left, clusters_at_once(split, target)))
    return whole * (stages * of_stage + of_tile) + rounds * each + speeds.first_cycles


def _store_cycles(problem: ConvProblem, config: TensorConfig, target: Target) -> float:
    """Cycles for storing the outputs of a tile, on average: the last tile of a group has fewer filters."""
    filters = problem.group_k / ceil_div(problem.group_k, config.filters)
    stored, speeds = item_bytes(problem.dtype) * config.pixels * filters, GemmSpeeds.of(target)
    single = problem.layout == "NHWC" and problem.group_k * item_bytes(problem.dtype) % 16 > 0
    of_memory = speeds.store_share * stored * target.multiprocessors / target.bytes_per_cycle
    return of_memory + single * speeds.single * config.pixels * filters


def _for_lines(problem: ConvProblem, speeds: GemmSpeeds) -> float:
    """How many times as long the lines of memory make a warp's copy of one channel of 32 neighbouring pixels."""
    if problem.layout != "NHWC":
        return speeds.strided_plane if problem.stride[1] > 1 and problem.group_c >= ROW // 2 else 1.0
    strided = speeds.strided_line if problem.stride[1] > 1 else 1.0
    of_line = speeds.copied_line if problem.c < 32 else speeds.copied_long_line * strided
    return of_line * min(32, problem.c * problem.stride[1])


def _tiles(phase: PartialConvolution, config: TensorConfig) -> int:
    problem, pixels = phase.problem, phase.pixels
    if config.linear and problem.layout == "NCHW":
        pixels = problem.n * ceil_div(problem.z * problem.p * problem.q, config.box_width) * config.box_width
    return ceil_div(pixels, config.pixels) * ceil_div(problem.group_k, config.filters) * problem.groups


class TensorGemm(SplitGemm[TensorConfig]):
    """Direct convolution and its input's gradient on tensor cores, each float32 split into two float16."""

    name = "tensor_gemm"
    volumes = True

    def target_limits(self, target: Target) -> list[str]:
        return wgmma_limits(target)

    def candidates(self, problem: ConvProblem, shared: int = SHARED) -> list[TensorConfig]:
        phases = distinct_phases(problem)
        if not phases:
            return []
        products, whole = 1 if problem.precision == "tf32" else 3, len(phases) == 1 and phases[0].whole
        # Explored (H200, fbef80e): in two layers of 3 channels one product takes 1.4 and 1.6 times as long as three.
        few = phases[0].problem.group_c < ROW // 2
        ways: list[tuple[Way, int]] = [("columns", _channel_block(phases[0].problem))]
        if all(_in_rows(phase) for phase in phases):
            ways = [("rows", ROW)]
        elif not few and all(by_lanes(phase.problem) for phase in phases):
            ways.append(("lanes", ROW))
        elif whole and is_linear(phases[0].problem):
            ways.insert(0, ("linear", ROW))
        tiles = TILES if products == 3 else ONE_PRODUCT
        by_row = whole and products == 1 and ways[0][0] == "rows"
        found = [
            _config(tile, way, channel_block, each, shared, row_pixels)
            for way, channel_block in ways
            for each in [3 if way == "columns" and few else products]
            for tile in (TILES if each == 3 else ONE_PRODUCT)
            if way != "lanes" or tile[0] == 2  # the lanes of more warpgroups have too few registers
            for row_pixels in sorted({0, row_pixels_of(phases[0].problem, 64 * tile[0]) if by_row else 0})
        ]
        if whole:
            images = [(tile, resident_of(phases[0].problem, 64 * tile[0])) for tile in tiles]
            found += [_config(tile, "resident", ROW, products, shared, 0, each) for tile, each in images if each]
        return [config for config in found if config]

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorConfig]]:
        phases = distinct_phases(problem)
        if not phases:
            # A layer whose windows see nothing but padding has a gradient of zeros, and nothing to tune.
            config = _config(next(iter(TILES)), "columns", 1, 3, target.shared_per_block)
            return [(0.0, config)] if config else []
        return by_time(
            (self._cycles(problem, phases, config, target), config)
            for whole in self.candidates(problem, target.shared_per_block)
            for config in _with_splits(whole, phases, target)
        )

    def _cycles(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: TensorConfig, target: Target
    ) -> float:
        speeds = GemmSpeeds.of(target)
        time = 0.0
        for phase in phases:
            stages = stages_of(phase.problem, config.channel_block)
            of_stage = speeds.stage_share * 2 * config.pixels * config.filters * DEPTH / speeds.of_tile(config)
            if config.spacing:
                blocks = DEPTH / ROW / (phase.problem.r * phase.problem.s)
                of_stage = max(of_stage, blocks * config.pixel_stage_bytes / speeds.resident_bytes)
            elif not (config.rows or config.linear):
                # copying a stage of columns overlaps the products
                copied = speeds.copy_cycles * (1 + TAP_COST / config.channel_block) * DEPTH * config.pixels / 128
                of_stage = max(of_stage, copied * max(1.0, _for_lines(phase.problem, speeds)))
            elif config.rows and by_lanes(phase.problem):
                of_stage = max(of_stage, speeds.lane_cycles * DEPTH * config.pixels / 128)
            tiles = _tiles(phase, config)
            of_tile = speeds.tile_cycles + _store_cycles(phase.problem, config, target)
            walk = walk_cycles(tiles, stages, of_stage, of_tile, config.split, target, problem.batch_invariant)
            time += phase.times * walk
        memory = problem.bytes / target.bytes_per_cycle
        share = speeds.residual[problem.layout != "NHWC"]
        time = overlapped(time, memory, speeds.lesser) + residual_cycles(problem, share, target)
        return time + speeds.whole_call[is_dense_product(problem, config.products)]

    def main_launch(
        self, problem: ConvProblem, phase: PartialConvolution, config: TensorConfig, known: Constants, target: Target
    ) -> Launch:
        x, _, *rest = conv_arguments(problem)
        source: Argument = x
        if config.linear or (config.rows and not by_lanes(phase.problem)):
            encoded = linear_map(phase.problem) if config.linear else None
            encoded = encoded or pixel_map(phase.problem, config.pixels, volume=phase.volume)
            if config.row_pixels:
                encoded = row_map(phase.problem, config.row_pixels)
            source = replace(encoded, role=problem.operands[0].role)
        arguments = (source, Pointer("prepared"), *rest)
        grid = grid_of(_tiles(phase, config), config.split, target, problem.batch_invariant)
        return self.launch(config, known, arguments, grid, config.shared_bytes, config.tuning())
