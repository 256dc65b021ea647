"""Gradient of the filters on tensor cores for float16 and bfloat16 in NHWC, from tensor copies of both operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from leanconv.dtypes import item_bytes
from leanconv.kernels.common import layers, split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments, limits, wgmma_limits
from leanconv.kernels.common.tensor_core_gemm import MAX_REACH, REGISTERS, pixel_map, reach_of
from leanconv.kernels.contract import Arithmetic, Config, ceil_div
from leanconv.kernels.cost import Speeds, clusters_at_once, moved_bytes, overlapped
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeGemm16bit
from leanconv.plan import Plan, Target, TensorMap
from leanconv.problem import ConvProblem

#: Pixels of a stage, and filters of a wgmma.
PIXELS, MMA_M = 64, 64
#: Channels of a tap that a copy may bring, of rows as long as a swizzle spans.
BLOCKS = (64, 32)
#: Bytes of an element.
ITEM = 2
#: Stages of the ring, at least and at most.
MIN_STAGES, MAX_STAGES = 3, 8
#: Taps of a row that share x, at most: those of one wgmma of 256 columns.
MOST_SHARING = 4
#: Blocks of a cluster that share a tile's pixels.
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)


@dataclass(frozen=True)
class NativeWeightConfig(Config):
    """A tile has ``m_tiles`` x 64 filters for each of ``filter_groups`` consumers, and ``blocks`` column blocks for
    each of ``column_groups``.

    A column block has ``channel_block`` channels of ``taps`` taps of a filter row, which share pixels of x. A stage of
    the ring, which has ``stages``, holds 64 pixels. A cluster of ``split`` CTAs shares a tile's pixels, and so do
    ``split_k`` of them whose sums a second launch adds.
    """

    filter_groups: int
    column_groups: int
    m_tiles: int
    blocks: int
    taps: int
    channel_block: int
    stages: int
    consumer_registers: int
    producer_registers: int
    split: int = 1
    split_k: int = 1

    @property
    def consumers(self) -> int:
        return self.filter_groups * self.column_groups

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and one warpgroup of which one thread copies."""
        return 128 * (self.consumers + 1)

    @property
    def filters(self) -> int:
        return MMA_M * self.m_tiles * self.filter_groups

    @property
    def all_blocks(self) -> int:
        return self.blocks * self.column_groups

    @property
    def sums(self) -> int:
        """Sums of a consumer's thread."""
        return self.m_tiles * self.blocks * self.taps * self.channel_block // 2

    @property
    def sum_bytes(self) -> int:
        """Bytes of the tile's sums, where the ring was."""
        return 4 * self.filters * (self.all_blocks * self.taps * self.channel_block + 8)

    def stage_bytes(self, problem: ConvProblem) -> int:
        window = ITEM * self.channel_block * (PIXELS + (self.taps - 1) * problem.dilation[1])
        return ITEM * PIXELS * self.filters + self.all_blocks * ceil_div(window, 1024) * 1024

    def ring_bytes(self, problem: ConvProblem) -> int:
        return self.stages * self.stage_bytes(problem)


@dataclass(frozen=True)
class NativeWeightSpeeds(Speeds):
    """Clock cycles, fitted together to 400 pairs of a layer and a configuration (burst), most within a tenth."""

    #: share of the tensor cores' peak that products reach on few multiprocessors, and less of it where all are busy
    peak: tuple[float, float]
    #: bytes that a multiprocessor copies in a cycle, and those of a cluster
    copied_per_cycle: tuple[float, float]
    #: share of the shorter of both that is not hidden by the longer, and of what memory takes for all tensors
    not_hidden: tuple[float, float]
    #: of a block beside its stages, for each weight of its tile, and for each that a cluster adds up
    block: float
    weight: float
    exchanged: float
    #: of the launch that adds partial sums, and the bytes of these that it and the first one move in a cycle
    adding: float
    added_per_cycle: float
    #: of a call beside them, so that half of 33 layers of known networks are predicted within a tenth
    start: float


#: A tile: groups of filters and of columns, m64 tiles, and columns of a warpgroup, in 64 channels of one tap.
Tile = tuple[int, int, int, int]
TILES: tuple[Tile, ...] = (
    (2, 1, 2, 3), (2, 1, 1, 4), (2, 1, 2, 2), (2, 1, 1, 3), (2, 1, 1, 2), (1, 2, 1, 2), (1, 2, 1, 1), (2, 1, 1, 1),
)  # fmt: skip
#: One that serves every layer.
SMALLEST: Tile = (1, 2, 1, 1)
#: Tiles whose taps share x: the last number counts column blocks, of three taps or as many as there are.
SHARING_TILES: tuple[Tile, ...] = ((2, 1, 1, 2), (2, 1, 2, 1), (1, 2, 1, 2), (2, 1, 1, 1), (1, 3, 1, 1), (1, 2, 1, 1))
#: One consumer with half as many channels: of few filters and channels clusters alone make few blocks.
NARROW: Tile = (1, 1, 1, 1)
#: Sums of a thread, at most, by the number of consumers.
MOST_SUMS = {1: 192, 2: 192, 3: 96}


def row_pitch(problem: ConvProblem, taps: int) -> int:
    """Of the linear pixel index: pixels from one row of outputs to the next, so that a tap that runs over the end of a
    row reads zeros of x or multiplies them with zeros of dy."""
    if taps == 1:
        return problem.q
    behind = problem.q + (taps - 1) * problem.dilation[1]
    left, right = problem.padding[2:]
    if taps < problem.s or left < 0:
        return behind
    # what lies behind a row is the padding before the next one
    return min(behind, max(problem.q, problem.w + max(left, right)))


def sharing_taps(problem: ConvProblem) -> int:
    """Taps of a filter's row that share x, in as few groups as there can be."""
    return ceil_div(problem.s, ceil_div(problem.s, MOST_SHARING))


def x_map(problem: ConvProblem, taps: int, channels: int) -> TensorMap:
    """How TMA walks over x: boxes of ``channels`` of 64 pixels, and of those that taps read behind them."""
    plain = pixel_map(problem, PIXELS + (taps - 1) * problem.dilation[1], channels)
    if taps == 1:
        return plain
    left = problem.padding[2]
    return replace(plain, upper=(row_pitch(problem, taps) - left - problem.w, *plain.upper[1:]))


def dy_map(problem: ConvProblem, taps: int) -> TensorMap:
    """How TMA walks over dy: boxes of 64 filters of 64 pixels. Slices are rows behind one another."""
    row, rows = ITEM * problem.k, problem.z * problem.p
    return TensorMap(
        "dy",
        problem.dtype,
        shape=(problem.k, problem.q, rows, problem.n),
        strides=(row, row * problem.q, row * problem.q * rows),
        lower=(0, 0),
        upper=(row_pitch(problem, taps) - problem.q, 0),
        channels=MMA_M,
        pixels=PIXELS,
        traversal=(1, 1, 1, 1),
        swizzle=ITEM * MMA_M,
    )


def _maps_why_not(problem: ConvProblem, taps: int) -> list[str]:
    block = channel_block(problem.group_c)
    maps = x_map(problem, taps, block), dy_map(problem, taps)
    return [f"no tensor map describes {each.role}: {why}" for each in maps for why in each.why_not()]


def may_share(problem: ConvProblem) -> bool:
    """Whether taps of a filter's row read neighbouring pixels."""
    taps = sharing_taps(problem)
    return taps > 1 and problem.stride[1] == 1 and not _maps_why_not(problem, taps)


def channel_block(channels: int) -> int:
    """Channels of a tap that a copy brings: as many as leave the fewest zeros."""
    return min(BLOCKS, key=lambda block: (ceil_div(channels, block) * block, -block))


class NativeWeightNhwc(split_k.PredictedSplitK):
    """The filters' gradient on tensor cores, float16 or bfloat16 summed in float32; NHWC."""

    name = "native_weight"
    strategy = "nhwc"
    paper = NativeGemm16bit.paper
    precision = "fp32"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "wgrad", dtypes=layers.FLOATS_16BIT), *wgmma_limits(target)]
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC: tensor copies bring whole rows of channels")
        if problem.n < 1:
            reasons.append(f"n={problem.n}: there are no images")
        if reasons:
            return reasons
        for number, name in ((problem.group_c, "channels"), (problem.group_k, "filters")):
            if number * item_bytes(problem.dtype) % 16:
                where = "" if problem.groups == 1 else " in a group"
                return [f"{number} {name}{where} of 16 bits are no multiple of 16 bytes, which tensor copies require"]
        reach, most = reach_of(problem), MAX_REACH[problem.is_volume]
        if reach > most:
            return [f"a filter reaches {reach} pixels, and tensor copies {most}"]
        if problem.pixels >= 2**31:
            return [f"the output has {problem.pixels} pixels, 2**31 or more"]
        return _maps_why_not(problem, 1)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def predicted(
        self, problem: ConvProblem, target: Target, workspace: float
    ) -> Iterator[tuple[float, NativeWeightConfig, int, int]]:
        room = split_k.most_partial_sums(problem, workspace)
        for whole in _whole(problem, target):
            cycles = cycles_of(problem, whole, target)
            for split, slices in _shared_by(problem, whole, target, room):
                yield cycles(split, slices), whole, split, slices

    def plan(self, problem: ConvProblem, config: NativeWeightConfig, target: Target) -> Plan:
        *_, batch = gradient_arguments(problem)
        ring = config.ring_bytes(problem)
        tuning = (*config.constants(), ("row_pitch", row_pitch(problem, config.taps)), ("barriers_at", ring))
        arguments = (
            x_map(problem, config.taps, config.channel_block),
            dy_map(problem, config.taps),
            split_k.destination(problem, config.split_k),
            batch,
        )
        grid = tiles_of(problem, config) * config.split * config.split_k
        first = self.launch(config, conv_constants(problem), arguments, grid, ring + 16 * config.stages, tuning)
        return split_k.with_sums(first, problem, config.split_k, early=True)


def _whole(problem: ConvProblem, target: Target) -> Iterator[NativeWeightConfig]:
    """A configuration of each tile, computed by one block: those of which half has not room for all filters or
    columns; the smallest in any case."""
    most, all_taps = channel_block(problem.group_c), [1, *([sharing_taps(problem)] if may_share(problem) else [])]
    ways = [(taps, most, TILES if taps == 1 else SHARING_TILES) for taps in all_taps]
    if most > BLOCKS[-1]:
        ways += [(taps, BLOCKS[-1], (NARROW,)) for taps in all_taps]
    for taps, block, tiles in ways:
        columns = columns_of(problem, taps, block)
        for tile in tiles:
            filter_groups, column_groups, m_tiles, width = tile
            blocks = width * (64 // block if taps == 1 and tile != NARROW else 1)
            made = filter_groups * m_tiles * MMA_M, column_groups * blocks
            if (problem.group_k <= made[0] // 2 or columns <= made[1] // 2) and tile != SMALLEST:
                continue
            config = _config(tile, blocks, taps, block, problem.dilation[1] * (taps - 1), target.shared_per_block)
            if config is not None:
                yield config


@lru_cache(maxsize=256)
def _config(tile: Tile, blocks: int, taps: int, block: int, behind: int, room: int) -> NativeWeightConfig | None:
    """The configuration of a tile, with as many stages as fit, ``behind`` pixels of x behind the 64; None where they
    are too few, or sums too many."""
    filter_groups, column_groups, m_tiles, _ = tile
    registers = REGISTERS[filter_groups * column_groups, False]
    config = NativeWeightConfig(filter_groups, column_groups, m_tiles, blocks, taps, block, 1, *registers)
    if config.sums > MOST_SUMS[config.consumers]:
        return None
    window = ceil_div(ITEM * block * (PIXELS + behind), 1024) * 1024
    each = ITEM * PIXELS * config.filters + config.all_blocks * window
    stages = min(room // (each + 16), MAX_STAGES)
    return replace(config, stages=stages) if stages >= MIN_STAGES and stages * each >= config.sum_bytes else None


def columns_of(problem: ConvProblem, taps: int, block: int) -> int:
    """Column blocks of the gradient."""
    return problem.t * problem.r * ceil_div(problem.s, taps) * ceil_div(problem.group_c, block)


def tiles_of(problem: ConvProblem, config: NativeWeightConfig) -> int:
    columns = ceil_div(columns_of(problem, config.taps, config.channel_block), config.all_blocks)
    return ceil_div(problem.group_k, config.filters) * columns * problem.groups


def pixels_of(problem: ConvProblem, taps: int) -> int:
    """Linear pixel indices."""
    return problem.n * problem.z * problem.p * row_pitch(problem, taps)


def _shared_by(
    problem: ConvProblem, whole: NativeWeightConfig, target: Target, room: float
) -> Iterator[tuple[int, int]]:
    pixels = pixels_of(problem, whole.taps)
    return shares(pixels, ceil_div(pixels, PIXELS), tiles_of(problem, whole), target, room)


def shares(pixels: int, stages: int, tiles: int, target: Target, room: float) -> Iterator[tuple[int, int]]:
    """``split`` and ``split_k`` for tiles computed by one block each, by clusters, and by as many blocks or clusters as
    keep the GPU busy for one to three rounds, with up to ``room`` partial sums. No block sums more than
    `split_k.MOST_PIXELS`."""
    least, most = ceil_div(pixels, split_k.MOST_PIXELS), target.most_in_cluster
    yield from ((split, 1) for split in SPLITS if least <= split <= min(max(1, stages), most))
    if room < 2:
        return
    found = split_k.fewest_sums(least, room, target)
    for rounds in (1, 2, 3):
        for split in split_k.clusters_with_sums(SPLITS, least, room):
            busy = min(rounds * target.multiprocessors // tiles, stages) // split
            slices = int(min(max(2, split_k.enough(busy, ceil_div(least, split))), room))
            if split <= most and slices * split >= least:
                found[split, slices] = None
    yield from found


def cycles_of(problem: ConvProblem, whole: NativeWeightConfig, target: Target) -> Callable[[int, int], float]:
    """A function that predicts the clock cycles of ``whole`` with another ``split`` and ``split_k``."""
    speeds, all_places = NativeWeightSpeeds.of(target), target.multiprocessors
    weights = whole.filters * whole.all_blocks * whole.taps * whole.channel_block
    computed = 2 * weights * PIXELS / target.tensor_flops
    stage_bytes, tiles = whole.stage_bytes(problem), tiles_of(problem, whole)
    stages = ceil_div(pixels_of(problem, whole.taps), PIXELS)
    memory = moved_bytes(problem) / target.bytes_per_cycle
    sums = 8 * split_k.weights_of(problem) / speeds.added_per_cycle
    # pairs of blocks find a place on all multiprocessors
    places = {split: all_places // split for split in (1, 2)}

    def predicted(split: int, slices: int) -> float:
        if split not in places:
            places[split] = clusters_at_once(split, 1, target)
        busy = min(1.0, tiles * slices * split / all_places)
        copied = stage_bytes / speeds.copied_per_cycle[split > 1]
        of_stage = overlapped(computed / (speeds.peak[0] - speeds.peak[1] * busy), copied, speeds.not_hidden[0])
        of_weight = speeds.weight + (speeds.exchanged if split > 1 else 0)
        each = ceil_div(stages, split * slices) * of_stage + speeds.block + of_weight * weights
        time = overlapped(ceil_div(tiles * slices, places[split]) * each, memory, speeds.not_hidden[1])
        return time + speeds.start + (speeds.adding + slices * sums if slices > 1 else 0)

    return predicted
