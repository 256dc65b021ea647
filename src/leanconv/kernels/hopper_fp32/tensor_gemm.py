"""Implicit GEMM on tensor cores, in the accuracy of float32 or of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Literal

from leanconv.dtypes import item_bytes
from leanconv.kernels.common.input_gradient import PartialConvolution, single_parts
from leanconv.kernels.contract import LAUNCH_CYCLES, Config, by_time, ceil_div, has_wide_tensors, variant
from leanconv.kernels.hopper_fp32.filters import DEPTH, SplitFilters, SplitGemm, stages_of
from leanconv.kernels.simt.tiles import EVEN_CLUSTERS, conv_arguments, view_constants
from leanconv.plan import Argument, Launch, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Channels that a bulk copy brings.
ROW = 32
#: Flat pixels that a copy brings; each image of NCHW is rounded up to so many.
GRANULE = 32


@dataclass(frozen=True)
class TensorConfig(Config, SplitFilters):
    """A tile has 64 pixels for each of ``warpgroups`` consumers, and ``chunks`` x ``chunk`` filters, of which a product
    takes ``chunk``.

    ``products`` of float16 make one of float32: 3, or 1 in tier tf32. ``partials`` partial sums are under way at once;
    0: all sums stay in the tensor core.
    ``rows``: bulk copies bring pixels in rows of channels, and where they are ``flat`` in columns of pixels; otherwise
    lanes copy columns. ``piece`` channels of one tap lie together in the reduction. ``turns``: consumers multiply in
    turn. ``pixel_stages`` and ``filter_stages`` are the lengths of the rings. ``row_lines`` pixels of a copy serve all
    taps of a filter row; 0: each tap has a copy of its own. Where ``spacing`` is not 0, copies bring 32 channels of
    whole images, ``seen_pixels`` pixels in all, and lanes take channels that many apart. A cluster of ``split`` blocks
    shares a reduction.
    """

    warpgroups: int
    chunk: int
    chunks: int
    products: int
    partials: int
    rows: bool
    flat: bool
    piece: int
    turns: bool
    pixel_stages: int
    filter_stages: int
    consumer_registers: int
    producer_registers: int
    row_lines: int = 0
    seen_pixels: int = 0
    spacing: int = 0
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and one warpgroup of producers."""
        return 128 * (self.warpgroups + 1)

    @property
    def pixels(self) -> int:
        """Output pixels of a tile."""
        return 64 * self.warpgroups

    @property
    def pixel_stage_bytes(self) -> int:
        """Bytes of a stage of pixels: columns are four floats longer than the tile, flat ones than 32 pixels. Of planes
        it has 32 channels."""
        if self.spacing:
            return 1024 * ceil_div(4 * ROW * self.seen_pixels, 1024)
        if self.flat:
            return DEPTH * 4 * self.pixels // GRANULE * (GRANULE + 4)
        return DEPTH * 4 * (self.row_lines or (self.pixels if self.rows else self.pixels + 4))

    @property
    def ring_bytes(self) -> int:
        """Bytes of both rings."""
        return self.pixel_stages * self.pixel_stage_bytes + self.filter_stages * self.filter_stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: both rings, and two barriers a stage."""
        return self.ring_bytes + 16 * (self.pixel_stages + self.filter_stages)


#: How pixels come into shared memory.
Way = Literal["rows", "flat", "planes", "columns"]
#: A tile: warpgroups, filters of a product, such chunks, partial sums.
Tile = tuple[int, int, int, int]
#: Whether consumers take turns with each tile, and the TFLOP/s that it reaches on large layers (burst, H200), by how
#: pixels come: in rows, flat, in planes, in columns. Planes of the last two and of 192 filters are guesses.
TILES: dict[Tile, tuple[bool, dict[Way, float]]] = {
    (2, 64, 4, 2): (True, {"rows": 237, "flat": 214, "planes": 220, "columns": 196}),
    (2, 128, 2, 1): (True, {"rows": 236, "flat": 216, "planes": 224, "columns": 154}),
    (2, 64, 3, 2): (True, {"rows": 205, "flat": 190, "planes": 195, "columns": 175}),
    (3, 64, 2, 1): (False, {"rows": 213, "flat": 182, "planes": 209, "columns": 118}),
    (2, 64, 2, 2): (True, {"rows": 193, "flat": 170, "planes": 186, "columns": 163}),
    (2, 128, 1, 1): (False, {"rows": 200, "flat": 175, "planes": 200, "columns": 160}),
    (4, 64, 1, 1): (False, {"rows": 168, "flat": 118, "planes": 160, "columns": 73}),
    (2, 64, 1, 1): (True, {"rows": 150, "flat": 120, "planes": 142, "columns": 118}),
}
#: The TFLOP/s of one product, whose tiles are multiplied whole and without turns, of a busy card (H200). Those flat and
#: in columns are of an earlier form of the loop.
ONE_PRODUCT: dict[Tile, dict[Way, float]] = {
    (2, 256, 1, 0): {"rows": 494, "flat": 375, "planes": 505, "columns": 385},
    (2, 192, 1, 0): {"rows": 480, "flat": 315, "planes": 475, "columns": 340},
    (3, 128, 1, 0): {"rows": 360, "flat": 255, "planes": 360, "columns": 180},
    (2, 128, 1, 0): {"rows": 345, "flat": 238, "planes": 335, "columns": 265},
    (3, 64, 1, 0): {"rows": 215, "flat": 130, "planes": 200, "columns": 90},
    (2, 64, 1, 0): {"rows": 185, "flat": 130, "planes": 172, "columns": 130},
}
#: Registers of a consumer's and a producer's thread, by the number of consumers and whether tensor maps bring pixels.
REGISTERS = {
    (2, True): (240, 24), (3, True): (160, 24), (4, True): (112, 24),
    (2, False): (232, 40), (3, False): (160, 32), (4, False): (112, 32),
}  # fmt: skip
#: Flops that a multiprocessor of an H200 computes in a cycle at 1 TFLOP/s of the whole GPU.
FLOPS_PER_CYCLE = 1e12 / 132 / 1.98e9
#: Cycles of a tile beside its stages and stores, before the first of a launch, and of the sum over the blocks of a
#: cluster.
TILE_CYCLES, FIRST_CYCLES, SPLIT_CYCLES = 1000, 6000, 6000
#: Consumers do not multiply while they store: the share of the time that a tile's outputs take at a multiprocessor's
#: part of the memory's speed, the share of a launch at the speed of TILES that its stages take, and how much of the
#: lesser of the time of launches and of memory adds to the greater (fitted to 485 times on an H200).
STORE_SHARE, STAGE_SHARE, LESSER = 0.8, 0.92, 0.2
#: Cycles of the four producing warps for each reduction element, and for each piece, of 128 pixels in columns.
COPY_CYCLES, PIECE_CYCLES = 32, 60
#: Bytes of shared memory of a block on a Hopper GPU.
SHARED = 227 * 1024
#: Stages that the rings of pixels and of filters have at most.
MOST_STAGES = (3, 8)
#: Taps of a filter that planes serve: one bit each.
MOST_TAPS = 32
#: Images of a tile that planes serve: each is a copy of its own, which one thread issues.
MOST_IMAGES = 16
#: Bytes of planes that reach a multiprocessor in a cycle; they bind 1 x 1 filters, where each serves one tap.
PLANE_BYTES = 28
#: Blocks of a cluster that share a reduction.
SPLITS = (2, 4, 8)


def pixel_map(problem: ConvProblem, pixels: int, channels: int = ROW) -> TensorMap:
    """How bulk copies walk over the pixels of a forward convolution in NHWC: ``channels`` of as many as a tile has."""
    top, bottom, left, right = problem.padding
    upper_h = bottom - (problem.r - 1) * problem.dilation[0]
    upper_w = right - (problem.s - 1) * problem.dilation[1]
    item = item_bytes(problem.dtype)
    row = item * problem.c
    return TensorMap(
        role=problem.operands[0].role,
        element=problem.dtype,
        shape=(problem.c, problem.w, problem.h, problem.n),
        strides=(row, row * problem.w, row * problem.w * problem.h),
        lower=(-left, -top),
        upper=(upper_w, upper_h),
        channels=channels,
        pixels=pixels,
        traversal=(1, problem.stride[1], problem.stride[0], 1),
        swizzle=item * channels,
    )


def row_map(problem: ConvProblem, lines: int) -> TensorMap:
    """The same of ``lines`` pixels that all taps of a filter row see: rows are longer by all taps but one."""
    top, left = -problem.padding[0], -problem.padding[2]
    upper_h = problem.padding[1] - (problem.r - 1) * problem.dilation[0]
    return replace(pixel_map(problem, lines), lower=(left, top), upper=(problem.padding[3], upper_h))


def lines_of_row(problem: ConvProblem, pixels: int) -> int:
    """Pixels that all taps of a filter row see of as many outputs side by side, a multiple of 8; 0 where each tap has a
    copy of its own."""
    if problem.s < 2 or problem.stride != (1, 1) or problem.dilation[1] != 1 or problem.group_c % DEPTH:
        return 0
    ends = (problem.q - gcd(pixels, problem.q) + pixels - 1) // problem.q
    lines = 8 * ceil_div(pixels + (problem.s - 1) * (1 + ends), 8)
    return lines if lines <= 256 and not row_map(problem, lines).why_not() else 0


def _in_rows(problem: ConvProblem) -> bool:
    """Whether bulk copies can bring the pixels of a forward convolution."""
    whole_rows = problem.c % 4 == 0 and (problem.groups == 1 or problem.group_c % ROW == 0)
    reach = max((problem.r - 1) * problem.dilation[0], (problem.s - 1) * problem.dilation[1])
    if problem.layout != "NHWC" or not whole_rows or reach > 255 or problem.group_c < ROW // 2 or problem.n < 1:
        return False
    return not pixel_map(problem, 64).why_not()


def is_flat(problem: ConvProblem) -> bool:
    """Whether an output pixel sees the input pixel of its own number, moved by a shift that the tap determines."""
    same = (problem.p, problem.q) == (problem.h, problem.w) and problem.stride == (1, 1)
    whole = problem.groups == 1 or problem.group_c % ROW == 0
    if problem.layout == "NHWC" or not same or not whole or problem.group_c < ROW // 2 or problem.n < 1:
        return False
    return not flat_map(problem).why_not()


def flat_map(problem: ConvProblem, column: int = GRANULE + 4) -> TensorMap:
    """How bulk copies walk over the pixels of a forward convolution in NCHW or CHWN: 32 channels, ``column`` pixels."""
    pixels, images = problem.h * problem.w, problem.n
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
class Planes:
    """How planes of whole images serve a tile: those of `TensorConfig`, and the fewest and most of their stages."""

    seen_pixels: int
    spacing: int
    stages: tuple[int, int]


def planes_of(problem: ConvProblem, pixels: int) -> Planes | None:
    """What planes a tile of ``pixels`` sees, with lanes' channels so far apart that their loads meet each bank once."""
    plane, image = problem.h * problem.w, problem.p * problem.q
    if problem.layout != "NCHW" or problem.group_c % ROW or problem.r * problem.s > MOST_TAPS or plane % 16 == 0:
        return None
    images = (image - gcd(pixels, image) + pixels - 1) // image + 1
    if images > MOST_IMAGES:
        return None
    # NOTE: with one tap, two stages of planes are one of filters, and two of these are under way. With many, copies of
    # a stage have as much time as products of half of the taps.
    taps = problem.r * problem.s
    return Planes(images * plane, 8 // gcd(plane, 8), (4, 6) if taps == 1 else (2, 3) if taps < 8 else (2, 2))


def wgmma_limits(target: Target) -> list[str]:
    """Why kernels that multiply by wgmma cannot run on ``target``."""
    if target.warpgroup_products:
        return []
    return [f"{target.arch} has no products of warpgroups (wgmma), which only sm_90a has"]


def _producer_cycles(config: TensorConfig) -> float:
    """Cycles that copying a stage of columns takes; they go on beside the products."""
    return (COPY_CYCLES * DEPTH + PIECE_CYCLES * DEPTH / config.piece) * config.pixels / 128


def _piece(problem: ConvProblem) -> int:
    """Channels of a tap that lie together in columns: few zeros, and few taps to find for the lanes that copy."""
    return min(
        (32, 16, 8, 4, 2, 1),
        key=lambda piece: stages_of(problem, piece) * (COPY_CYCLES + PIECE_CYCLES / piece),
    )


@lru_cache(maxsize=256)
def _config(
    tile: Tile, way: Way, piece: int, products: int, shared: int, row_lines: int = 0, planes: Planes | None = None
) -> TensorConfig | None:
    """The configuration of a tile, with rings as long as ``shared`` bytes allow; None where they are too short."""
    warpgroups, chunk, chunks, partials = tile
    rows, flat = way == "rows", way == "flat"
    registers = REGISTERS[warpgroups, way != "columns"]
    shape = (warpgroups, chunk, chunks, products, partials)
    turns = products == 3 and TILES[tile][0]
    config = TensorConfig(*shape, rows, flat, piece, turns, 1, 1, *registers, row_lines)
    least = max(chunks, partials) if products == 3 else 2  # products of two stages are under way
    fewest, most = 2, 2 if row_lines else MOST_STAGES[0]
    if planes:
        config = replace(config, seen_pixels=planes.seen_pixels, spacing=planes.spacing)
        fewest, most = planes.stages
    for stages in range(most, fewest - 1, -1):
        left = shared - stages * config.pixel_stage_bytes - 16 * (stages + MOST_STAGES[1])
        filters = min(MOST_STAGES[1], left // config.filter_stage_bytes)
        if filters >= max(least, min(4, 2 * chunks)) or (stages == fewest and filters >= least):
            return replace(config, pixel_stages=stages, filter_stages=filters)
    return None


def splits_of(tiles: int, stages: int, target: Target) -> Iterator[int]:
    """In how many shares the blocks of a cluster may do a reduction, where ``tiles`` leave multiprocessors idle: each
    block has stages, two at least but the last."""
    for split in SPLITS:
        each = ceil_div(stages, split)
        if tiles * split <= target.multiprocessors and each >= 2 and each * (split - 1) < stages:
            yield split


def _with_splits(config: TensorConfig, parts: list[PartialConvolution], target: Target) -> Iterator[TensorConfig]:
    """The configuration, and with the reduction split over a cluster where the rings take the sums of a tile."""
    yield config
    if config.filters * config.pixels * 4 > config.ring_bytes:
        return
    each = parts[0].problem.s if config.row_lines else 1  # stages that stay together
    work = [(_tiles(part, config), stages_of(part.problem, config.piece) // each) for part in parts]
    for split in shares_of(work, target, parts[0].problem.batch_invariant):
        if config.filters // 16 % split == 0:
            yield variant(config, split=split)


def shares_of(work: list[tuple[int, int]], target: Target, alike: bool) -> Iterator[int]:
    """In how many shares clusters may do the tiles that are left in each of the launches, or all if they are to be
    ``alike``. ``work``: tiles, and stages of each; each block has stages, two at least but the last."""
    for split in SPLITS:
        shared = alike or all(0 < rounds_of(tiles, split, target)[1] for tiles, _ in work)
        if shared and all(
            each >= 2 and each * (split - 1) < stages for _, stages in work for each in [ceil_div(stages, split)]
        ):
            yield split


def rounds_of(tiles: int, split: int, target: Target) -> tuple[int, int]:
    """Tiles that each block has, and those that are left for the clusters to share; 0 where these are too many.

    Clusters of four and eight are dealt unevenly: 32 clusters of four did not run at once on an H200's 132
    multiprocessors, and took 1.5 times the predicted time. These share all tiles or none.
    """
    blocks = max(1, target.multiprocessors // split) * split
    whole, left = divmod(tiles, blocks)
    return whole, left if left * split <= blocks and (split == 2 or not whole) else 0


def clusters_at_once(split: int, target: Target) -> int:
    """Clusters that run at once."""
    return max(1, int(target.multiprocessors * (1 if split == 2 else EVEN_CLUSTERS)) // split)


def grid_of(tiles: int, split: int, target: Target, alike: bool = False) -> int:
    """Blocks of a launch. ``alike``: a cluster for each tile, so that none depends on how many there are."""
    if split == 1:
        return min(tiles, target.multiprocessors)
    if alike:
        return tiles * split
    whole, left = rounds_of(tiles, split, target)
    return (tiles - left) // whole if whole else left * split


def walk_cycles(
    tiles: int, stages: int, of_stage: float, of_tile: float, split: int, target: Target, alike: bool
) -> float:
    """Cycles of a launch whose blocks walk over ``tiles`` of as many ``stages``: those of a stage, and of a tile beside
    its stages, are given."""
    if split == 1:
        return ceil_div(tiles, target.multiprocessors) * (stages * of_stage + of_tile) + FIRST_CYCLES
    each = ceil_div(stages, split) * of_stage + of_tile + SPLIT_CYCLES
    if alike:
        return ceil_div(tiles, clusters_at_once(split, target)) * (each + FIRST_CYCLES)
    whole, left = rounds_of(tiles, split, target)
    # clusters of four and eight that do not run at once wait for the end of others
    turns = 1 if split == 2 else max(1, ceil_div(left, clusters_at_once(split, target)))
    return whole * (stages * of_stage + of_tile) + turns * each + FIRST_CYCLES


def _store_cycles(problem: ConvProblem, config: TensorConfig, target: Target) -> float:
    """Cycles of storing the outputs of a tile, in the mean: the last filters of a group are fewer than a tile has."""
    filters = problem.group_k / ceil_div(problem.group_k, config.filters)
    stored = item_bytes(problem.dtype) * config.pixels * filters
    return STORE_SHARE * stored * target.multiprocessors / target.bytes_per_cycle


def _tiles(part: PartialConvolution, config: TensorConfig) -> int:
    """Tiles of a launch."""
    problem = part.problem
    pixels = part.pixels
    if config.flat and problem.layout == "NCHW":
        pixels = problem.n * ceil_div(problem.p * problem.q, GRANULE) * GRANULE
    return ceil_div(pixels, config.pixels) * ceil_div(problem.group_k, config.filters) * problem.groups


class TensorGemm(SplitGemm[TensorConfig]):
    """Direct convolution and its input's gradient on tensor cores, each float32 split into two float16.

    ``x w ≈ hi·hi + hi·lo + lo·hi`` in float16, summed in float32; in tier tf32 ``hi·hi`` alone.
    """

    name = "tensor_gemm"

    def target_limits(self, target: Target) -> list[str]:
        return wgmma_limits(target)

    def candidates(self, problem: ConvProblem, shared: int = SHARED) -> list[TensorConfig]:
        parts = single_parts(problem)
        if not parts:
            return []
        products = 1 if problem.precision == "tf32" else 3
        ways: list[tuple[Way, int]] = [("columns", _piece(parts[0].problem))]
        if all(_in_rows(part.problem) for part in parts):
            ways = [("rows", ROW)]
        elif len(parts) == 1 and parts[0].whole and is_flat(parts[0].problem):
            ways.insert(0, ("flat", ROW))
        tiles = TILES if products == 3 else ONE_PRODUCT
        found = [
            _config(tile, way, piece, products, shared, lines)
            for way, piece in ways
            for tile in tiles
            for lines in sorted({0, self._row_lines(parts, way, 64 * tile[0]) if products == 1 else 0})
        ]
        if len(parts) == 1 and parts[0].whole:
            planes = [(tile, planes_of(parts[0].problem, 64 * tile[0])) for tile in tiles]
            found += [_config(tile, "planes", ROW, products, shared, 0, plane) for tile, plane in planes if plane]
        return [config for config in found if config]

    def _row_lines(self, parts: list[PartialConvolution], way: Way, pixels: int) -> int:
        """Pixels of a copy that serves a row of taps, or 0."""
        return lines_of_row(parts[0].problem, pixels) if way == "rows" and len(parts) == 1 and parts[0].whole else 0

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorConfig]]:
        parts = single_parts(problem)
        if not parts:
            # A layer whose windows see nothing but padding has a gradient of zeros, and nothing to tune.
            config = _config(next(iter(TILES)), "columns", 1, 3, target.shared_per_block)
            return [(0.0, config)] if config else []
        return by_time(
            (self._cycles(problem, parts, config, target), config)
            for whole in self.candidates(problem, target.shared_per_block)
            for config in _with_splits(whole, parts, target)
        )

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: TensorConfig, target: Target
    ) -> float:
        way: Way = "rows" if config.rows else "flat" if config.flat else "planes" if config.spacing else "columns"
        tile = config.warpgroups, config.chunk, config.chunks, config.partials
        speed = (ONE_PRODUCT[tile] if config.products == 1 else TILES[tile][1])[way] * FLOPS_PER_CYCLE
        if config.row_lines:
            # Copies for rows of taps: 1.10, 1.06 and 0.93 times as fast where rows have 56, 28 and 7 pixels. Short ones
            # have many ends, where neighbours do not lie side by side: more to copy, and conflicts of banks.
            speed *= 1.14 * (config.pixels / config.row_lines) ** 0.75
        time = 0.0
        for part in parts:
            stages = stages_of(part.problem, config.piece)
            of_stage = STAGE_SHARE * 2 * config.pixels * config.filters * DEPTH / speed
            if way == "columns":
                of_stage = max(of_stage, _producer_cycles(config))
            if way == "planes":
                pieces = DEPTH / ROW / (part.problem.r * part.problem.s)
                of_stage = max(of_stage, pieces * config.pixel_stage_bytes / PLANE_BYTES)
            tiles = _tiles(part, config)
            of_tile = TILE_CYCLES + _store_cycles(part.problem, config, target)
            time += walk_cycles(tiles, stages, of_stage, of_tile, config.split, target, problem.batch_invariant)
        memory = problem.bytes / target.bytes_per_cycle
        return max(time, memory) + LESSER * min(time, memory) + 3 * LAUNCH_CYCLES

    def main_launch(
        self, problem: ConvProblem, part: PartialConvolution, config: TensorConfig, first: int, target: Target
    ) -> Launch:
        x, _, *rest = conv_arguments(problem)
        source: Argument = x
        if config.rows or config.flat:
            encoded = flat_map(part.problem) if config.flat else pixel_map(part.problem, config.pixels)
            if config.row_lines:
                encoded = row_map(part.problem, config.row_lines)
            source = replace(encoded, role=problem.operands[0].role)
        tiles = _tiles(part, config)
        return Launch(
            header="kernels/hopper_fp32/tensor_gemm.cuh",
            function="leanconv::tensor_gemm",
            problem=(*view_constants(part.problem, part.view, has_wide_tensors(problem)), ("first_prepared", first)),
            tuning=config.constants(),
            arguments=(source, Pointer("prepared"), *rest),
            grid=grid_of(tiles, config.split, target, problem.batch_invariant),
            block=config.threads,
            shared_bytes=config.shared_bytes,
            cluster=config.split,
        )
