"""1x1 convolution on tensor cores for float16 and bfloat16 in NCHW: a matrix product for each image."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, inf

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.kernels.common import layers
from leanconv.kernels.common.input_gradient import PartialConvolution, single_phases
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, view_constants
from leanconv.kernels.common.tensor_core_gemm import FLOPS_PER_CYCLE
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import clusters_at_once, moved_bytes, overlapped, residual_cycles
from leanconv.kernels.hopper_native.native_gemm_16bit import TILES as SPEED_TILES
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeGemm16bit, NativeSpeeds
from leanconv.kernels.hopper_native.native_gemm_nchw import as_row
from leanconv.plan import Plan, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Pixels of a channel that a tensor copy brings, and that a tensor core reads as a row.
ROW = 64
#: Elements that TMA, and that a lane copies at once.
BY_TMA, BY_LANES = 8, (4, 2)
#: Channels of a stage, and stages of the ring, at least and at most. Lanes announce a stage when two more have been
#: begun, for which one more must be free.
BLOCKS, MIN_STAGES, MAX_STAGES = (64, 32, 16), 4, 8
#: Consumers; bytes in which a warp of them transposes outputs.
WARPGROUPS, OUTPUT_BYTES = 2, 16 * 2 * 72
#: Registers of a consumer's and a producer's thread, by whether TMA copies pixels.
REGISTERS = {True: (232, 40), False: (216, 72)}
#: CTAs of a cluster that share a reduction, pixels that each of them stores at least, and sums that a thread gathers.
SPLITS, LEAST_STORED, MOST_SUMS = (2, 4, 8, 16), 16, 32
#: Columns of a consumer where even and odd channels have sums of their own, at most.
MOST_SORTED = 128
#: Instructions of a lane for a copy of so many elements, counted in machine code.
COPY_INSTRUCTIONS = {4: 5, 2: 10}
#: What the kernel counts in an int: tiles, and pixels of an image.
MAX_INDEX = 2**31 - 2**20
#: A tile: m64 tiles of a consumer, segments, and columns of a segment, which need not be whole rows.
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = (
    (1, 1, 256), (1, 1, 200), (1, 1, 192), (2, 1, 128), (1, 1, 128), (2, 1, 64), (1, 1, 64), (1, 2, 64), (1, 4, 64),
    (2, 2, 64),
)  # fmt: skip


@dataclass(frozen=True)
class PointwiseConfig(Config):
    """A tile has ``m_tiles`` x 64 filters for each of ``warpgroups`` consumers, and ``segments`` of ``columns`` pixels.

    A stage of the ring, which has ``stages``, holds ``channel_block`` channels. Lanes copy ``copied`` pixels at once; 8
    stands for TMA. A cluster of ``split`` CTAs shares a reduction.
    """

    warpgroups: int
    m_tiles: int
    segments: int
    columns: int
    channel_block: int
    stages: int
    copied: int
    consumer_registers: int
    producer_registers: int
    split: int = 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def filters(self) -> int:
        return 64 * self.warpgroups * self.m_tiles

    @property
    def rows(self) -> int:
        """Rows of pixels of a channel."""
        return self.segments * ceil_div(self.columns, ROW)

    @property
    def stage_bytes(self) -> int:
        return 2 * self.channel_block * (self.filters + ROW * self.rows)

    @property
    def barriers_at(self) -> int:
        return self.stages * self.stage_bytes + 4 * self.warpgroups * OUTPUT_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def outputs(self) -> int:
        """Outputs of a tile, those past the ends of images too."""
        return self.filters * self.segments * self.columns


def _pixels(problem: ConvProblem) -> int:
    return problem.h * problem.w


@lru_cache(maxsize=256)
def _config(tile: Tile, block: int, copied: int, room: int) -> PointwiseConfig | None:
    """The configuration of a tile with the most stages; None where these do not fit."""
    config = PointwiseConfig(WARPGROUPS, *tile, block, 1, copied, *REGISTERS[copied == BY_TMA])
    stages = (room - 4 * WARPGROUPS * OUTPUT_BYTES) // (config.stage_bytes + 16)
    return replace(config, stages=min(stages, MAX_STAGES)) if stages >= MIN_STAGES else None


def _tiles_for(problem: ConvProblem) -> Iterator[Tile]:
    """Those tiles whose columns the images fill by half, several segments where an image has a single one."""
    pixels, filters = _pixels(problem), problem.group_c if problem.op == "dgrad" else problem.group_k
    for tile in TILES:
        m_tiles, segments, columns = tile
        half = ceil_div(columns, ROW) * ROW // 2
        wide = columns == ROW or pixels > half
        single = segments == 1 or pixels <= _step(pixels, columns)
        few = pixels % 2 == 0 or (columns % ROW == 0 and m_tiles * segments * columns <= MOST_SORTED)
        if wide and single and few and (m_tiles == 1 or filters > 64 * WARPGROUPS):
            yield tile


def _step(pixels: int, columns: int) -> int:
    """Pixels of a segment: of an odd number some columns are not complete (odd_pixels.cuh)."""
    return columns - 8 if pixels % 2 else columns


def _phase(problem: ConvProblem) -> PartialConvolution:
    """The forward convolution that computes ``problem``, whose images are rows."""
    return as_row(single_phases(problem)[0])


class NativeGemmPointwise(TimedAlgorithm):
    """1x1 convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW."""

    name = "native_gemm"
    strategy = "pointwise"
    paper = NativeGemm16bit.paper
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = layers.limits(problem, "fprop", "dgrad", dtypes=layers.FLOATS_16BIT) + layers.wgmma_limits(target)
        if problem.layout != "NCHW":
            reasons.append(f"layout={problem.layout!r} is not NCHW")
        if problem.n < 1:
            reasons.append(f"n={problem.n}: there are no images")
        if (problem.r, problem.s) != (1, 1):
            reasons.append(f"filters of {problem.r}x{problem.s} taps are not 1x1")
        if problem.stride != (1, 1) or any(problem.padding):
            reasons.append(
                f"stride={problem.stride}, padding={problem.padding}: outputs are not the pixels of the input"
            )
        if problem.group_c * item_bytes(problem.dtype) % 16:
            reasons.append(f"{problem.group_c} channels of a group are no whole 16 bytes, which tensor copies require")
        pixels = _pixels(problem)
        if pixels % 2 and problem.op == "dgrad" and problem.group_k % 2:
            reasons.append(f"{problem.group_k} filters of a group, for {pixels} pixels: one of both must be even")
        filters = problem.group_c if problem.op == "dgrad" else problem.group_k
        tiles = problem.n * ceil_div(pixels, _step(pixels, ROW)) * ceil_div(filters, 64 * WARPGROUPS) * problem.groups
        if max(tiles, pixels) > MAX_INDEX:
            reasons.append(f"n={problem.n}: {pixels} pixels, in {tiles} tiles, are more than {MAX_INDEX}")
        if not reasons:
            any_tile = PointwiseConfig(WARPGROUPS, *TILES[-1], BLOCKS[1], MIN_STAGES, BY_TMA, *REGISTERS[True])
            maps = [_filter_map(problem, any_tile)]
            if pixels % BY_TMA == 0:
                maps.append(_pixel_map(problem, _phase(problem).problem, any_tile))
            reasons += [f"no tensor map describes {each.role}: {broken}" for each in maps for broken in each.why_not()]
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, PointwiseConfig]]:
        phase, copied = _phase(problem).problem, gcd(_pixels(problem), BY_TMA)
        all_blocks = BLOCKS[:-1] if copied == 1 else BLOCKS
        blocks = [block for block in all_blocks if block == all_blocks[-1] or 2 * phase.group_c > block]
        known = (
            _config(tile, block, max(copied, BY_LANES[-1]), target.shared_per_block)
            for tile in _tiles_for(problem)
            for block in blocks
        )
        found = by_time(
            (_cycles(problem, phase, config, target), config)
            for whole in known
            if whole
            for config in _with_splits(phase, whole, target)
        )
        # NOTE: it has not been measured: it predicts no time, and `auto` takes kernels that do
        return [(inf, config) for _, config in found]

    def order_of_sums(self, problem: ConvProblem, config: PointwiseConfig) -> Hashable:
        return (config.channel_block, config.split) if config.split > 1 else ()

    def plan(self, problem: ConvProblem, config: PointwiseConfig, target: Target) -> Plan:
        phase = _phase(problem)
        x: Pointer | TensorMap
        if config.copied == BY_TMA:
            x = _pixel_map(problem, phase.problem, config)
        else:
            x = Pointer(problem.operands[0].role, DTYPES[problem.dtype].ctype)
        constants = view_constants(phase.problem, phase.view, has_wide_tensors(problem))
        tuning = (*config.constants(), ("mirrored", problem.op == "dgrad"), ("barriers_at", config.barriers_at))
        tiles = _tiles(phase.problem, config)
        grid = tiles * config.split if config.split > 1 else min(tiles, target.multiprocessors)
        arguments = (x, _filter_map(problem, config), *conv_arguments(problem)[2:])
        return Plan((self.launch(config, constants, arguments, grid, config.shared_bytes, tuning),))


def _pixel_map(problem: ConvProblem, forward: ConvProblem, config: PointwiseConfig) -> TensorMap:
    """How copies walk over images that are rows: 64 pixels of ``channel_block`` channels of a group."""
    row = item_bytes(forward.dtype) * forward.w
    return TensorMap(
        role=problem.operands[0].role,
        element=forward.dtype,
        shape=(forward.w, forward.group_c, forward.groups, forward.n),
        strides=(row, row * forward.group_c, row * forward.c),
        box=(ROW, config.channel_block, 1, 1),
        swizzle=item_bytes(forward.dtype) * ROW,
    )


def _filter_map(problem: ConvProblem, config: PointwiseConfig) -> TensorMap:
    """How copies walk over the layer's filters as they lie: rows of ``channel_block`` channels of a tile's filters, or
    of a gradient rows of 64 channels, which are its filters."""
    item = item_bytes(problem.dtype)
    row = item * problem.group_c
    gradient = problem.op == "dgrad"
    if gradient and _pixels(problem) % 2:
        # a stage has the layer's even filters first, then the odd ones (odd_pixels.cuh)
        return TensorMap(
            role="w",
            element=problem.dtype,
            shape=(problem.group_c, problem.group_k // 2, 2, problem.groups),
            strides=(2 * row, row, row * problem.group_k),
            box=(64, config.channel_block // 2, 2, 1),
            swizzle=128,
        )
    return TensorMap(
        role="w",
        element=problem.dtype,
        shape=(problem.group_c, problem.group_k, problem.groups),
        strides=(row, row * problem.group_k),
        box=(64, config.channel_block, 1) if gradient else (config.channel_block, config.filters, 1),
        swizzle=item * (64 if gradient else config.channel_block),
    )


def _segments(forward: ConvProblem, config: PointwiseConfig) -> int:
    return forward.n * ceil_div(forward.w, _step(forward.w, config.columns))


def _tiles(forward: ConvProblem, config: PointwiseConfig) -> int:
    of_pixels = ceil_div(_segments(forward, config), config.segments)
    return of_pixels * ceil_div(forward.group_k, config.filters) * forward.groups


def _with_splits(forward: ConvProblem, config: PointwiseConfig, target: Target) -> Iterator[PointwiseConfig]:
    """The configuration, and with the reduction split over a cluster where tiles leave multiprocessors idle. The ring
    takes the sums of a tile; each CTA has two stages at least, but the last."""
    yield config
    columns, stages = config.segments * config.columns, ceil_div(forward.group_c, config.channel_block)
    fits = config.columns % ROW == 0 and 4 * config.outputs <= config.stages * config.stage_bytes
    for split in SPLITS if fits and not forward.batch_invariant else ():
        if (
            _tiles(forward, config) * split <= target.multiprocessors
            and split <= target.most_in_cluster
            and columns % (LEAST_STORED * split) == 0
            and (config.columns % (columns // split) == 0 or columns // split % config.columns == 0)
            and config.m_tiles * columns // 2 // split <= MOST_SUMS
            and ceil_div(stages, split) >= 2
            and ceil_div(stages, split) * (split - 1) < stages
        ):
            yield variant(config, split=split)


def _stage_cycles(config: PointwiseConfig, gradient: bool, speeds: NativeSpeeds) -> float:
    """Cycles of one stage of a tile: of computing, or of copying its rows. Predicted with the speeds of
    native_gemm_16bit, whose pixels are rows of the product where filters are here."""
    whole = config.segments * (config.columns // ROW * ROW)
    known = WARPGROUPS, config.m_tiles, config.columns // ROW * ROW
    speed = speeds.tiles[SPEED_TILES.index(known)] * FLOPS_PER_CYCLE
    # products of few columns take what reading the filters does
    columns = whole + 2 * ROW // 4 * (config.columns % ROW > 0)
    products = 2 * config.filters * columns * config.channel_block / speed
    rows = config.channel_block * (config.rows + (config.filters // 64 if gradient else 0))
    rows += 0 if gradient else config.filters
    if config.copied == BY_TMA:
        return max(products, speeds.row * rows)
    lanes = config.channel_block * config.segments * config.columns / config.copied
    # four warps issue an instruction each in a cycle
    return max(
        products,
        COPY_INSTRUCTIONS[config.copied] * lanes / 128,
        speeds.row * (rows - config.channel_block * config.rows),
    )


def _cycles(problem: ConvProblem, forward: ConvProblem, config: PointwiseConfig, target: Target) -> float:
    speeds = NativeSpeeds.of(target)
    stages, tiles = ceil_div(forward.group_c, config.channel_block), _tiles(forward, config)
    of_stage = _stage_cycles(config, problem.op == "dgrad", speeds)
    of_tile = speeds.tile + speeds.output * config.outputs / config.split
    time = ceil_div(tiles * config.split, target.multiprocessors) * (
        ceil_div(stages, config.split) * of_stage + of_tile
    )
    if config.split > 2 and tiles > clusters_at_once(config.split, 1, target):
        time *= 2  # clusters wait for others
    time += speeds.split * config.outputs if config.split > 1 else 0
    time = overlapped(time, moved_bytes(problem) / target.bytes_per_cycle, speeds.not_hidden)
    return time + residual_cycles(problem, speeds.residual, target) + speeds.first
