"""Implicit GEMM on tensor cores for float16 and bfloat16 in NHWC, whose taps all read one copy of the pixels."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd
from typing import ClassVar, cast

from leanconv.dtypes import item_bytes
from leanconv.kernels.common.input_gradient import PartialConvolution, distinct_phases, single_phases
from leanconv.kernels.common.layers import conv_arguments
from leanconv.kernels.common.tensor_core_gemm import FLOPS_PER_CYCLE, REGISTERS
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, moved_bytes, overlapped, residual_cycles
from leanconv.kernels.hopper_native.native_gemm_16bit import (
    NativeGemm16bit,
    Tile,
    channel_blocks,
    filter_map,
    mirrored_map,
    partly_outside,
)
from leanconv.options import Precision
from leanconv.plan import Launch, Plan, Target, TensorMap
from leanconv.problem import ConvProblem

#: A tile: warpgroups, blocks of 8 x 8 pixels of each, filters.
TILES: tuple[Tile, ...] = (
    (2, 2, 128), (2, 1, 128), (2, 2, 96), (2, 2, 64), (2, 1, 64), (2, 2, 32),
)  # fmt: skip
#: Pixels of a box along an axis, at most.
MAX_BOX = 256
#: Sums of a thread that adds a residual, at most: with more it would spill registers.
MAX_ADDED = 96
#: Taps of a filter, at least: the products of one window hide the copy of the next. Explored (H200, be2fb28d,
#: bfloat16): those of 3 taps do not, 94 us where native_gemm_16bit takes 84.
MIN_TAPS = 5
#: Windows of a channel block: one is copied while another is read.
WINDOWS = 2
#: Stages of filters, at least and at most; bytes of a filter that a stage has at least.
MIN_STAGES, MAX_STAGES, LEAST_ROW = 3, 8, 128


@dataclass(frozen=True)
class WindowConfig(Config):
    """A tile has ``m_tiles`` blocks of 8 x 8 pixels for each of ``warpgroups`` consumers, and ``filters``.

    Of ``box_w`` x ``box_h`` blocks one copy brings the window. ``windows`` are those of ``channel_block`` channels. A
    stage of the ring, which has ``stages``, holds the filters of ``stage_taps`` taps of these channels.
    """

    #: bytes of an element
    item: ClassVar[int] = 2
    #: whether warps round pixels, of which each window has a third barrier
    rounds: ClassVar[bool] = False

    warpgroups: int
    m_tiles: int
    filters: int
    channel_block: int
    box_w: int
    box_h: int
    windows: int
    stage_taps: int
    stages: int
    consumer_registers: int
    producer_registers: int
    #: whether the stages hold all filters, which are copied once
    resident: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and one warpgroup of producers."""
        return 128 * (self.warpgroups + 1)

    @property
    def blocks(self) -> int:
        return self.warpgroups * self.m_tiles

    @property
    def pixels(self) -> int:
        return 64 * self.blocks

    @property
    def row_bytes(self) -> int:
        return self.item * self.channel_block

    @property
    def boxes(self) -> int:
        return self.blocks // (self.box_w * self.box_h)

    @property
    def stage_bytes(self) -> int:
        return self.stage_taps * self.filters * self.row_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes in which the consumers' warps transpose outputs: 16 pixels x 128 bytes of filters each, or 64 or 32."""
        return 4 * self.warpgroups * 16 * gcd(self.filters * self.item, 128)

    def extents(self, problem: ConvProblem) -> tuple[int, int]:
        """Columns and rows of pixels that a box of outputs of ``problem`` reads."""
        (down, right) = problem.dilation
        return 8 * self.box_w + (problem.s - 1) * right, 8 * self.box_h + (problem.r - 1) * down

    def window_rows(self, problem: ConvProblem) -> int:
        """Pixels that the windows of a tile have."""
        columns, rows = self.extents(problem)
        return self.boxes * columns * rows

    def filters_at(self, problem: ConvProblem) -> int:
        """Bytes of shared memory before the filters."""
        columns, rows = self.extents(problem)
        windows = self.windows * self.boxes * ceil_div(columns * rows * self.row_bytes, 128) * 128
        return ceil_div(windows, 1024) * 1024

    def barriers_at(self, problem: ConvProblem) -> int:
        """And before the barriers, two for each stage and for each window."""
        return self.filters_at(problem) + self.stages * self.stage_bytes + self.output_bytes

    def shared_bytes(self, problem: ConvProblem) -> int:
        return self.barriers_at(problem) + 16 * (self.stages + self.windows) + 8 * self.windows * self.rounds

    def tiles(self, problem: ConvProblem) -> int:
        """Tiles of the output of ``problem``."""
        boxes = problem.n * ceil_div(problem.p, 8 * self.box_h) * ceil_div(problem.q, 8 * self.box_w)
        return ceil_div(boxes, self.boxes) * ceil_div(problem.group_k, self.filters) * problem.groups


@dataclass(frozen=True)
class WindowSpeeds(Speeds):
    """Fitted to times of 135 layers and gradients in several configurations each (explored, H200, 50452dcc with this
    kernel)."""

    #: TFLOP/s of each tile's products
    tiles: tuple[float, ...]
    #: cycles of a tile beside its products, and of each output
    tile: float
    output: float
    #: of an output where filters are no whole 16 bytes, as in native_gemm_16bit
    single: float
    #: that copying a row of channels takes at least, and more of filters where it is partly outside the array
    row: float
    partly: float
    #: of a launch beside its tiles
    first: float
    #: the share of the shorter of computing and memory that the longer does not hide
    not_hidden: float
    #: the share of the memory's speed at which residuals come
    residual: float


def _boxes(problem: ConvProblem, config: WindowConfig, target: Target) -> Iterator[WindowConfig]:
    """The configuration with boxes of each shape that fits, and as many stages as there is room for."""
    for box_w, box_h in product((1, 2, 4), repeat=2):
        boxes = variant(config, box_w=box_w, box_h=box_h)
        if config.blocks % (box_w * box_h) or max(boxes.extents(problem)) > MAX_BOX:
            continue
        stages = (target.shared_per_block - boxes.shared_bytes(problem)) // (boxes.stage_bytes + 16)
        every = ceil_div(problem.group_c, config.channel_block) * problem.taps // config.stage_taps
        alone = problem.groups == 1 and problem.k <= config.filters
        if alone and every <= stages and boxes.tiles(problem) > target.multiprocessors:
            yield variant(boxes, stages=every, resident=True)
        elif stages >= MIN_STAGES:
            yield variant(boxes, stages=min(stages, MAX_STAGES))


@lru_cache(maxsize=64)
def _configs(kind: type[WindowConfig], problem: ConvProblem, target: Target) -> tuple[WindowConfig, ...]:
    """Of each tile and channel block the shape of boxes with the fewest tiles for a multiprocessor, and of these the
    fewest pixels."""
    found = []
    for (warpgroups, m_tiles, filters), block in product(
        TILES, channel_blocks(problem.group_c, problem.groups, kind.item)
    ):
        row = item_bytes(problem.dtype) * block
        divisors = [number for number in range(1, problem.taps + 1) if problem.taps % number == 0]
        taps = next((number for number in divisors if number * row >= LEAST_ROW), problem.taps)
        registers = REGISTERS[warpgroups, not kind.rounds]
        one = kind(warpgroups, m_tiles, filters, block, 1, 1, WINDOWS, taps, 0, *registers)
        shapes = _boxes(problem, one, target)
        best = min(
            shapes,
            key=lambda each: (ceil_div(each.tiles(problem), target.multiprocessors), each.window_rows(problem)),
            default=None,
        )
        if best:
            found.append(best)
    return tuple(found)


def _window_map(phase: ConvProblem, config: WindowConfig, role: str) -> TensorMap:
    """How copies walk over the pixels: ``channel_block`` channels of a window."""
    row = item_bytes(phase.dtype) * phase.c
    return TensorMap(
        role=role,
        element=phase.dtype,
        shape=(phase.c, phase.w, phase.h, phase.n),
        strides=(row, row * phase.w, row * phase.w * phase.h),
        box=(config.channel_block, *config.extents(phase), 1),
        swizzle=config.row_bytes,
    )


class NativeGemmWindow(TimedAlgorithm):
    """`NativeGemm16bit` for layers of unit stride and five taps or more: one copy of the pixels serves all taps."""

    name = "native_gemm"
    strategy = "window"
    paper = NativeGemm16bit.paper
    precision: ClassVar[Precision] = NativeGemm16bit.precision
    #: what copies and multiplies pixels for each tap
    other: ClassVar[NativeGemm16bit] = NativeGemm16bit()
    kind: ClassVar[type[WindowConfig]] = WindowConfig
    speeds: ClassVar[type[WindowSpeeds]] = WindowSpeeds

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        if reasons := self.other.why_not(problem, target):
            return reasons
        if problem.stride != (1, 1):
            reasons.append(f"stride={problem.stride} is not (1, 1): taps would read different pixels")
        if problem.taps < MIN_TAPS:
            reasons.append(f"filters have {problem.taps} taps: with fewer than {MIN_TAPS} no copy is hidden")
        if self.kind.item == 2 and problem.op == "dgrad" and not self.other.is_mirrored(problem):
            reasons.append(f"{problem.group_c} channels are no whole 16 bytes: filters would be rearranged before")
        if not reasons and next(self._found(problem, target), None) is None:
            taps = f"{problem.r} x {problem.s} taps with dilation={problem.dilation}"
            reasons.append(f"the windows of {taps} do not fit in shared memory")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return self.other.arithmetic(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WindowConfig]]:
        found = self._found(problem, target)
        return by_time((self._time(problem, phase, config, target), config) for phase, config in found)

    def _found(self, problem: ConvProblem, target: Target) -> Iterator[tuple[PartialConvolution, WindowConfig]]:
        """The convolution that is computed, with each configuration that fits."""
        for phase in distinct_phases(problem):
            for config in _configs(cast(Hashable, self.kind), phase.problem, target):
                if not problem.add or config.m_tiles * config.filters // 2 <= MAX_ADDED:
                    yield phase, config

    def _time(self, problem: ConvProblem, phase: PartialConvolution, config: WindowConfig, target: Target) -> float:
        speeds, layer = self.speeds.of(target), phase.problem
        blocks, filters = ceil_div(layer.group_c, config.channel_block), min(config.filters, layer.group_k)
        speed = speeds.tiles[TILES.index((config.warpgroups, config.m_tiles, config.filters))] * FLOPS_PER_CYCLE
        flops = 2 * config.pixels * config.filters * blocks * config.channel_block * layer.taps
        rows, partly = config.window_rows(layer), 0.0
        if not config.resident:
            rows += layer.taps * filters
            mirrored = self.other.is_mirrored(problem)
            partly = partly_outside(layer, config.channel_block, config.filters, mirrored)
        copied = blocks * (speeds.row * rows + speeds.partly * layer.taps * partly)
        single = config.pixels * filters if layer.group_k * config.item % 16 else 0
        of_tile = speeds.tile + speeds.output * config.pixels * config.filters + speeds.single * single
        rounds = ceil_div(config.tiles(layer), target.multiprocessors)
        computed = rounds * (max(flops / speed, copied, blocks * self._rounding(config, layer, target)) + of_tile)
        time = overlapped(computed, moved_bytes(problem) / target.bytes_per_cycle, speeds.not_hidden)
        return time + residual_cycles(problem, speeds.residual, target) + speeds.first

    def _rounding(self, config: WindowConfig, layer: ConvProblem, target: Target) -> float:
        """Cycles in which the pixels of a channel block are rounded."""
        return 0.0

    def order_of_sums(self, problem: ConvProblem, config: WindowConfig) -> Hashable:
        return config.channel_block

    def plan(self, problem: ConvProblem, config: WindowConfig, target: Target) -> Plan:
        return Plan(tuple(self._window_launch(problem, phase, config, target) for phase in single_phases(problem)))

    def _window_launch(
        self, problem: ConvProblem, phase: PartialConvolution, config: WindowConfig, target: Target
    ) -> Launch:
        layer, mirrored = phase.problem, self.other.is_mirrored(problem)
        pixels = _window_map(layer, config, problem.operands[0].role)
        block, copied = config.channel_block, min(config.filters, layer.group_k)
        if mirrored:
            filters = mirrored_map(problem, block, config.filters)
        else:
            read = "prepared" if self.prepared_bytes(problem, config) else "w"
            filters = filter_map(phase, block, copied, read, "map")
        tuning = (
            *config.constants(),
            ("mirrored", mirrored),
            ("split", 1),
            ("copied_filters", copied),
            ("barriers_at", config.barriers_at(layer)),
        )
        grid = min(config.tiles(layer), target.multiprocessors)
        arguments = (pixels, filters, *conv_arguments(problem)[2:])
        return self.launch(
            config, self.other.constants(problem, phase), arguments, grid, config.shared_bytes(layer), tuning
        )
