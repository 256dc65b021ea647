"""1x1 convolution on tensor cores for float16 and bfloat16 in NCHW: a matrix product for each image, or at a stride."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.kernels.common import layers
from leanconv.kernels.common.input_gradient import PartialConvolution, images_as_rows, single_phases
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, view_constants
from leanconv.kernels.common.tensor_core_gemm import FLOPS_PER_CYCLE
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, clusters_at_once, overlapped, residual_cycles
from leanconv.kernels.hopper_native.native_gemm_16bit import TILES as SPEED_TILES
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeGemm16bit, NativeSpeeds
from leanconv.plan import Plan, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Pixels of a channel that a tensor copy brings, and that a tensor core reads as a row.
ROW = 64
#: Elements that TMA, and that a lane copies at once; 0 where lanes load pixels at a stride.
BY_TMA, BY_LANES, STRIDED = 8, (4, 2), 0
#: Channels of a stage, and stages of the ring, at least and at most.
BLOCKS, MIN_STAGES, MAX_STAGES = (64, 32, 16), 3, 8
#: Consumers; bytes in which a warp of them transposes outputs.
WARPGROUPS, OUTPUT_BYTES = 2, 16 * 2 * 72
#: Registers of a consumer's and a producer's thread; and where lanes load pixels at a stride. There, and where
#: residuals or what the output holds are added, a consumer has as many sums at most; and a stage as many pixels.
REGISTERS, STRIDED_REGISTERS, SUMS, MOST_LOADED = (232, 40), (208, 88), 128, 64 * 64
#: CTAs of a cluster that share a reduction, pixels that each of them stores at least, and sums that a thread gathers.
SPLITS, LEAST_STORED, MOST_SUMS = (2, 4, 8, 16), 16, 32
#: Columns of a consumer where even and odd channels have sums of their own, at most.
MOST_SORTED = 128
#: Shared memory of a CTA where lanes copy: the rest is L1, which their copies pass. Explored (H200, bbc837f4):
#: with rings that leave 28 KB instead of 60 KB layers of 14 x 14 pixels take up to 1.4 times as long.
LANES_ROOM = 195 * 1024
#: What the kernel counts in an int: tiles, and pixels of an image.
MAX_INDEX = 2**31 - 2**20
#: A tile: m64 tiles of a consumer, and columns.
Tile = tuple[int, int]
TILES: tuple[Tile, ...] = ((1, 256), (2, 192), (1, 192), (2, 128), (1, 128), (2, 64), (1, 64))


@dataclass(frozen=True)
class PointwiseConfig(Config):
    """A tile has ``m_tiles`` x 64 filters for each of ``warpgroups`` consumers, and ``columns``: pixels of all images.

    A stage of the ring, which has ``stages``, holds ``channel_block`` channels. Lanes copy ``copied`` pixels at once; 8
    stands for TMA, 0 for lanes that load pixels at a stride. A cluster of ``split`` CTAs shares a reduction.
    """

    warpgroups: int
    m_tiles: int
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
    def stage_bytes(self) -> int:
        return 2 * self.channel_block * (self.filters + self.columns)

    @property
    def barriers_at(self) -> int:
        return self.stages * self.stage_bytes + 4 * self.warpgroups * OUTPUT_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.barriers_at + 16 * self.stages

    @property
    def outputs(self) -> int:
        """Outputs of a tile, those past the ends of images too."""
        return self.filters * self.columns


@dataclass(frozen=True)
class PointwiseSpeeds(Speeds):
    """Cycles of a multiprocessor, fitted to 735 times of 42 layers and to 114 of 16 at a stride (H200)."""

    #: a stage beside its products, and how much longer products take whose channels are sorted
    stage: float
    sorted: float
    #: a row that TMA copies; a copy of 32 lanes of 8 bytes and of 4
    row: float
    copies: tuple[float, float]
    #: until copies land, of TMA and of lanes
    latency: tuple[float, float]
    #: storing an output: of images of whole 16 bytes, of others, and of an odd number of pixels
    outputs: tuple[float, float, float]
    #: each sum of a tile that the CTAs of a cluster add up
    split: float
    #: the share of the lesser of computing and memory that the greater does not hide; a call
    not_hidden: float
    first: float
    #: at a stride: a copy of four pixels by 32 lanes; storing an output; the share of the lesser that is not hidden
    strided: tuple[float, float, float]
    #: the share of the memory's speed at which residuals come: of images of whole 16 bytes, and of others. Explored
    #: (H200): five layers take within a tenth of what it gives
    residual: tuple[float, float]


def _pixels(problem: ConvProblem) -> int:
    return problem.p * problem.q


def _strided(problem: ConvProblem) -> bool:
    """Whether lanes load pixels at a stride: the gradient of such a layer reads all that it has."""
    return problem.op == "fprop" and problem.stride != (1, 1)


def _odd(problem: ConvProblem) -> bool:
    """Whether rows of odd channels begin at odd elements (odd_pixels.cuh)."""
    return _pixels(problem) % 2 == 1 and not _strided(problem)


def _copied(problem: ConvProblem) -> int:
    return STRIDED if _strided(problem) else max(gcd(_pixels(problem), BY_TMA), BY_LANES[-1])


@lru_cache(maxsize=256)
def _config(tile: Tile, block: int, copied: int, room: int) -> PointwiseConfig | None:
    """The configuration of a tile with the most stages; None where these do not fit."""
    if copied == STRIDED and block * tile[1] > MOST_LOADED:
        return None
    registers = STRIDED_REGISTERS if copied == STRIDED else REGISTERS
    config = PointwiseConfig(WARPGROUPS, *tile, block, 1, copied, *registers)
    room = room if copied == BY_TMA else min(room, LANES_ROOM)
    stages = (room - 4 * WARPGROUPS * OUTPUT_BYTES) // (config.stage_bytes + 16)
    return replace(config, stages=min(stages, MAX_STAGES)) if stages >= MIN_STAGES else None


def _tiles_for(problem: ConvProblem) -> Iterator[Tile]:
    """Those tiles whose filters and columns the layer fills by half."""
    filters = problem.group_c if problem.op == "dgrad" else problem.group_k
    for m_tiles, columns in TILES:
        adds = problem.add or problem.accumulate
        most = MOST_SORTED if _odd(problem) else 2 * SUMS if _strided(problem) or adds else m_tiles * columns
        if problem.add and _odd(problem) and m_tiles > 1:
            continue  # it would spill registers
        wide = columns == ROW or 2 * problem.n * _columns(problem) > columns
        if m_tiles * columns <= most and wide and (m_tiles == 1 or filters > 64 * WARPGROUPS):
            yield m_tiles, columns


def _columns(problem: ConvProblem) -> int:
    """Columns of an image: whole rows of tensor copies; at a stride rows of outputs in fours; one more than an odd
    number of pixels (odd_pixels.cuh)."""
    if _strided(problem):
        return problem.p * ceil_div(problem.q, 4) * 4
    pixels = _pixels(problem)
    return pixels + pixels % 2 if pixels % BY_TMA else ceil_div(pixels, ROW) * ROW


def _step(problem: ConvProblem, columns: int) -> int:
    """Columns that a tile computes: of an odd number of pixels the last is not complete."""
    return columns - 2 * _odd(problem)


def _phase(problem: ConvProblem) -> PartialConvolution:
    """The forward convolution that computes ``problem``: of images that are rows, but at a stride. Where the outputs of
    a strided layer's gradient lie, the kernel knows."""
    return single_phases(problem)[0] if _strided(problem) else images_as_rows(problem)


class NativeGemmPointwise(TimedAlgorithm):
    """1x1 convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW."""

    name = "native_gemm"
    strategy = "pointwise"
    paper = NativeGemm16bit.paper
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = layers.limits_of_one_tap(problem, target)
        if any(problem.padding):
            reasons.append(f"padding={problem.padding}: outputs are not pixels of the input")
        elif problem.stride != (1, 1):
            reasons += _stride_limits(problem)
        if problem.group_c * item_bytes(problem.dtype) % 16:
            reasons.append(f"{problem.group_c} channels of a group are no whole 16 bytes, which tensor copies require")
        pixels = _pixels(problem)
        if _odd(problem) and problem.op == "dgrad" and problem.group_k % 2:
            reasons.append(f"{problem.group_k} filters of a group, for {pixels} pixels: one of both must be even")
        filters = problem.group_c if problem.op == "dgrad" else problem.group_k
        columns = problem.n * _columns(problem)
        tiles = ceil_div(columns, _step(problem, ROW)) * ceil_div(filters, 64 * WARPGROUPS) * problem.groups
        if max(tiles, columns) > MAX_INDEX:
            reasons.append(f"n={problem.n}: {columns} pixels, in {tiles} tiles, are more than {MAX_INDEX}")
        if not reasons:
            any_tile = PointwiseConfig(WARPGROUPS, *TILES[-1], BLOCKS[1], MIN_STAGES, BY_TMA, *REGISTERS)
            maps = [_filter_map(problem, any_tile)]
            if _copied(problem) == BY_TMA:
                maps.append(_pixel_map(problem, _phase(problem).problem, any_tile))
            reasons += [f"no tensor map describes {each.role}: {broken}" for each in maps for broken in each.why_not()]
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, PointwiseConfig]]:
        phase, all_blocks = _phase(problem).problem, BLOCKS[:-1] if _odd(problem) else BLOCKS
        blocks = [block for block in all_blocks if block == all_blocks[-1] or 2 * phase.group_c > block]
        known = (
            _config(tile, block, _copied(problem), target.shared_per_block)
            for tile in _tiles_for(problem)
            for block in blocks
        )
        return by_time(
            (_cycles(problem, phase, config, target), config)
            for whole in known
            if whole
            for config in _with_splits(phase, whole, target)
        )

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
        gradient = problem.op == "dgrad"
        spread = problem.w if gradient and problem.stride != (1, 1) else 0
        tuning = (*config.constants(), ("mirrored", gradient), ("spread", spread), ("barriers_at", config.barriers_at))
        tiles = _tiles(phase.problem, config)
        grid = tiles * config.split if config.split > 1 else min(tiles, target.multiprocessors)
        arguments = (x, _filter_map(problem, config), *conv_arguments(problem)[2:])
        return Plan((self.launch(config, constants, arguments, grid, config.shared_bytes, tuning),))


def _stride_limits(problem: ConvProblem) -> list[str]:
    """Why a layer of one tap with a stride, or its gradient, cannot be computed."""
    if problem.op == "fprop":
        if problem.stride[1] == 2:
            return []
        return [f"stride={problem.stride}: its columns are neither all pixels of a row nor every second one"]
    reasons = []
    if problem.stride != (2, 2) or problem.h % 2 or problem.w % 2:
        reasons.append(
            f"a gradient with stride={problem.stride} of {problem.h}x{problem.w} pixels, not (2, 2) of even numbers"
        )
    if problem.bias or problem.accumulate:
        reasons.append("a gradient at a stride with a bias or accumulate=True: pixels that no window covers are zeros")
    return reasons


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
    gradient = problem.op == "dgrad"
    if gradient and _odd(problem):
        # a stage has the layer's even filters first, then the odd ones (odd_pixels.cuh)
        row = item_bytes(problem.dtype) * problem.group_c
        return TensorMap(
            role="w",
            element=problem.dtype,
            shape=(problem.group_c, problem.group_k // 2, 2, problem.groups),
            strides=(2 * row, row, row * problem.group_k),
            box=(64, config.channel_block // 2, 2, 1),
            swizzle=128,
        )
    return layers.filters_as_they_lie(
        problem, (64, config.channel_block) if gradient else (config.channel_block, config.filters)
    )


def _tiles(forward: ConvProblem, config: PointwiseConfig) -> int:
    of_pixels = ceil_div(forward.n * _columns(forward), _step(forward, config.columns))
    return of_pixels * ceil_div(forward.group_k, config.filters) * forward.groups


def _with_splits(forward: ConvProblem, config: PointwiseConfig, target: Target) -> Iterator[PointwiseConfig]:
    """The configuration, and with the reduction split over a cluster where tiles leave multiprocessors idle. The ring
    takes the sums of a tile; each CTA has two stages at least, but the last."""
    yield config
    columns, stages = config.columns, ceil_div(forward.group_c, config.channel_block)
    fits = 4 * config.outputs <= config.stages * config.stage_bytes
    for split in SPLITS if fits and not forward.batch_invariant else ():
        if (
            _tiles(forward, config) * split <= target.multiprocessors
            and split <= target.most_in_cluster
            and columns % (LEAST_STORED * split) == 0
            and (columns // split < ROW or columns // split % ROW == 0)
            and config.m_tiles * columns // 2 // split <= MOST_SUMS
            and ceil_div(stages, split) >= 2
            and ceil_div(stages, split) * (split - 1) < stages
        ):
            yield variant(config, split=split)


def _stage_cycles(problem: ConvProblem, config: PointwiseConfig, target: Target) -> float:
    """Cycles of one stage of a tile: of computing, of copying its rows, or until the copies of a ring have landed.
    Products are as fast as those of native_gemm_16bit, whose pixels are rows of the product where filters are here."""
    speeds = PointwiseSpeeds.of(target)
    tile = SPEED_TILES.index((WARPGROUPS, config.m_tiles, config.columns))
    products = 2 * config.outputs * config.channel_block / (NativeSpeeds.of(target).tiles[tile] * FLOPS_PER_CYCLE)
    products *= speeds.sorted if _odd(problem) else 1
    rows = config.channel_block * config.filters // 64 if problem.op == "dgrad" else config.filters
    if config.copied == BY_TMA:
        rows += config.channel_block * config.columns // ROW
        return max(products + speeds.stage, speeds.row * rows, speeds.latency[0] / (config.stages - 1))
    if config.copied == STRIDED:
        copied = speeds.strided[0] * config.channel_block * config.columns / 4 / 32
    else:
        copied = (
            speeds.copies[BY_LANES.index(config.copied)] * config.channel_block * config.columns / config.copied / 32
        )
        copied = max(copied, speeds.latency[1] / (config.stages - 1))
    return max(products + speeds.stage, speeds.row * rows, copied)


def _bytes(problem: ConvProblem) -> float:
    """Bytes that memory moves: of a layer at a stride whole rows of pixels, of its gradient all zeros."""
    if problem.op == "dgrad":
        return problem.bytes
    return problem.bytes - problem.n * problem.c * (problem.h - problem.p) * problem.w * item_bytes(problem.dtype)


def _cycles(problem: ConvProblem, forward: ConvProblem, config: PointwiseConfig, target: Target) -> float:
    speeds, pixels = PointwiseSpeeds.of(target), _pixels(problem)
    stages, tiles = ceil_div(forward.group_c, config.channel_block), _tiles(forward, config)
    output = speeds.outputs[0 if pixels % BY_TMA == 0 else 1 if pixels % 2 == 0 else 2]
    not_hidden = speeds.not_hidden
    if problem.stride != (1, 1):
        output, not_hidden = speeds.strided[1:]
    of_tile = ceil_div(stages, config.split) * _stage_cycles(problem, config, target)
    of_tile += output * config.outputs / config.split
    time = ceil_div(tiles * config.split, target.multiprocessors) * of_tile
    if config.split > 2 and tiles > clusters_at_once(config.split, 1, target):
        time *= 2  # clusters wait for others
    time += speeds.split * config.outputs if config.split > 1 else 0
    time = overlapped(time, _bytes(problem) / target.bytes_per_cycle, not_hidden)
    return time + residual_cycles(problem, speeds.residual[pixels % BY_TMA > 0], target) + speeds.first
