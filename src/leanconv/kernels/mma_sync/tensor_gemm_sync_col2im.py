"""Gradient of the input of few channels on tensor cores: a product with the columns of all filters, and col2im."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from leanconv.dtypes import DTYPES, GPU_LAYERS, is_narrow
from leanconv.kernels.common.layers import (
    conv_arguments,
    conv_constants,
    images_outermost,
    limits,
    mma_sync_limits,
    prepared_plan,
)
from leanconv.kernels.common.split_gemm import DEPTH, MOST_CHANNELS, SplitConfig, filter_launches, prepared_floats
from leanconv.kernels.contract import Arithmetic, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, launch_cycles
from leanconv.kernels.mma_sync.tensor_gemm_sync import TensorGemmSync
from leanconv.plan import Constants, Launch, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Columns of a tile at most: a thread has as many sums.
MOST_COLUMNS = 96
#: Threads of a CTA that writes columns.
THREADS = 256
#: Columns up to which registers suffice for three CTAs of 128 threads on a multiprocessor, not two.
FEW_COLUMNS = 48
#: CTAs of a multiprocessor at most.
MOST_BLOCKS = 3


@dataclass(frozen=True)
class ColumnConfig(SplitConfig):
    """A tile has ``tile_rows`` coarse rows of ``tile_columns`` pixels of dy, 16 x ``m_tiles`` of them for each of
    ``warps``, and ``mma_n`` columns of ``phases`` phases."""

    warps: int
    tile_rows: int
    tile_columns: int
    m_tiles: int
    mma_n: int
    phases: int
    products: int
    min_blocks: int
    n_tiles: int = 1
    filter_stages: int = 2
    channel_block: int = DEPTH
    rows: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def order(self) -> Hashable:
        return self.products


#: A tile: warps, coarse rows, pixels of a row, 16 pixels of a warp.
Tile = tuple[int, int, int, int]
TILES: tuple[Tile, ...] = ((4, 4, 32, 2), (4, 8, 16, 2), (4, 2, 64, 2), (4, 1, 128, 2))


@dataclass(frozen=True)
class ColumnSpeeds(Speeds):
    """Cycles of a multiprocessor. Fitted to 13 layers (H200)."""

    #: a product of 16 x 8 x 16, and adding a partial sum of float32
    product: float
    promoted: float
    #: copying eight channels of a pixel, in NHWC and in NCHW: float32; 16 bits, and in NHWC one by one
    split: tuple[float, float]
    copied: tuple[float, float, float]
    #: a sum in the epilogue, a stage of filters, and a call
    gathered: float
    stage: float
    start: float
    #: how much longer a CTA takes without others, of `MOST_BLOCKS` in all
    alone: float


@dataclass(frozen=True)
class _Axis:
    """One axis of a layer: coarse pixels of dx, and taps that meet one."""

    count: int
    taps: int


def _axis(extent: int, taps: int, stride: int, padding: int) -> _Axis:
    return _Axis((extent - 1 + padding) // stride - padding // stride + 1, ceil_div(taps, stride))


class _Columns:
    """The numbers of ``Columns`` in the kernel that a plan needs."""

    def __init__(self, problem: ConvProblem, config: ColumnConfig) -> None:
        self.problem, self.config = problem, config
        top, _, left, _ = problem.padding
        self.d = _axis(problem.d, problem.t, problem.stride_d, problem.padding_d[0])
        self.h = _axis(problem.h, problem.r, problem.stride[0], top)
        self.w = _axis(problem.w, problem.s, problem.stride[1], left)
        self.tiles = ceil_div(problem.stride_d * problem.stride[0], config.phases)
        whole_columns = config.tile_columns - self.w.taps + 1
        self.blocks = problem.n * self.d.count * ceil_div(self.h.count, config.tile_rows) * self.tiles
        self.blocks *= ceil_div(self.w.count, whole_columns)
        self.pixels = (config.tile_rows + self.h.taps - 1) * config.tile_columns
        self.k_steps = min(DEPTH // 16, ceil_div(problem.k, 16))
        self.chunks = ceil_div(problem.k, DEPTH)
        self.line_units = 8 if self.k_steps == 3 else 2 * self.k_steps
        self.halves = 2 if config.products == 3 else 1
        last = ceil_div((problem.k - 1) % DEPTH + 1, 16)
        #: 16 channels at a time, of all filter rows of a phase; and the share of the phases that have such a row
        self.steps = self.d.taps * self.h.taps * (self.k_steps * (self.chunks - 1) + last)
        rows, slices = problem.stride[0] * self.h.taps, problem.stride_d * self.d.taps
        self.present = problem.r * problem.t / (rows * slices)

    @property
    def as_filters(self) -> ConvProblem:
        """The columns as filters of a layer of float32."""
        taps = self.d.taps * self.h.taps
        return ConvProblem(1, self.problem.k, taps, 1, self.tiles * self.config.mma_n, taps, 1, layout="NHWC")

    @property
    def rearranged(self) -> int:
        """Elements before the packed filters of float32."""
        filters = self.as_filters
        return ceil_div(filters.k * filters.taps * filters.c, 4) * 4

    @property
    def prepared_bytes(self) -> int:
        if not is_narrow(self.problem.dtype):
            return 4 * (self.rearranged + prepared_floats(self.as_filters, self.config)[1])
        return self.tiles * self.d.taps * self.h.taps * self.chunks * self.config.filter_stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Pixels, two stages of filters, and scales of the pixels; or the sums of a phase."""
        scales = 0 if is_narrow(self.problem.dtype) else 4 * self.pixels
        read = 16 * self.pixels * self.line_units * self.halves + 2 * self.config.filter_stage_bytes + scales
        pitch = ceil_div(_phase_columns(self.problem) - 8, 16) * 16 + 8
        return max(read, 4 * self.config.tile_rows * self.config.tile_columns * pitch)


class TensorGemmSyncCol2im(TimedAlgorithm):
    """dy times all columns of filter rows at once, by ``mma.sync``; sums that overlap are added. dy is read once."""

    name = "tensor_gemm_sync"
    strategy = "col2im"
    paper = TensorGemmSync.paper
    precision = "fp32"
    volumes = True
    writes_phases = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = limits(problem, "dgrad", dtypes=GPU_LAYERS) + images_outermost(problem)
        reasons += mma_sync_limits(target)
        if problem.groups > 1:
            reasons.append(f"groups={problem.groups}: it computes layers of one group")
        if _phase_columns(problem) > MOST_COLUMNS:
            reasons.append(f"{problem.s} taps of {problem.c} channels in a filter row are more than {MOST_COLUMNS}")
        if problem.k > MOST_CHANNELS:
            reasons.append(f"there are {problem.k} filters, more than {MOST_CHANNELS}")
        axes = (problem.t, problem.dilation_d), (problem.r, problem.dilation[0]), (problem.s, problem.dilation[1])
        if any(taps > 1 and dilation > 1 for taps, dilation in axes):
            reasons.append("dilated filters: it computes those of neighbouring taps")
        if min(*problem.padding, *problem.padding_d) < 0:
            reasons.append("padding below 0: it computes layers that read all of their input")
        if not reasons and not any(True for _ in _configs(problem, target)):
            reasons.append(f"a row of {problem.s} taps at a stride of {problem.stride[1]} does not fit its tiles")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if is_narrow(problem.dtype) or problem.precision == "tf32" else "fp16x3"

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return max((_Columns(problem, each).prepared_bytes for each in _every(problem)), default=0)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, ColumnConfig]]:
        return by_time((_cycles(problem, config, target), config) for config in _configs(problem, target))

    def plan(self, problem: ConvProblem, config: ColumnConfig, target: Target) -> Plan:
        of, element = _Columns(problem, config), DTYPES[problem.dtype].ctype
        narrow, filters = is_narrow(problem.dtype), of.as_filters
        constants = (*conv_constants(problem), ("first_prepared", 0 if narrow else of.rearranged))
        channels = DEPTH * of.chunks if narrow else problem.k
        columns = Launch(
            "kernels/mma_sync/filter_columns.cuh", "leanconv::column_filters", constants, _tuning(config, THREADS),
            (Pointer("w", element), Pointer("prepared", element, written=True)),
            ceil_div(filters.k * filters.taps * channels, THREADS), THREADS,
        )  # fmt: skip
        prepare: tuple[Launch, ...] = (columns,)
        if not narrow:
            prepare += filter_launches(filters, config, of.rearranged, 0, TensorGemmSync.preparing_blocks)
        arguments = conv_arguments(problem, filters="prepared")
        main = self.launch(config, constants, arguments, of.blocks, of.shared_bytes, _tuning(config, config.threads))
        return prepared_plan(prepare, (main,), self.prepared_bytes(problem))


def _phase_columns(problem: ConvProblem) -> int:
    """Columns of a phase: pairs, and eights where phases have different taps."""
    alike = problem.r % problem.stride[0] == 0 and problem.t % problem.stride_d == 0
    least = 2 if alike else 8
    return ceil_div(problem.s * problem.c, least) * least


def _tuning(config: ColumnConfig, threads: int) -> Constants:
    return (*config.tuning(), ("threads", threads))


def _every(problem: ConvProblem) -> Iterator[ColumnConfig]:
    """All tiles with the columns of as many phases as fit, and of fewer."""
    products = 1 if is_narrow(problem.dtype) or problem.precision == "tf32" else 3
    of_phase, phases = _phase_columns(problem), problem.stride_d * problem.stride[0]
    most = max(1, min(phases, MOST_COLUMNS // of_phase))
    counts = {ceil_div(phases, tiles) for tiles in range(ceil_div(phases, most), ceil_div(phases, most) + 2)}
    for count in sorted(counts, reverse=True):
        mma_n = ceil_div(count * of_phase, 16) * 16
        for warps, rows, columns, m_tiles in TILES:
            if columns >= ceil_div(problem.s, problem.stride[1]):
                blocks = MOST_BLOCKS if mma_n <= FEW_COLUMNS else MOST_BLOCKS - 1
                yield ColumnConfig(warps, rows, columns, m_tiles, mma_n, count, products, blocks)


def _configs(problem: ConvProblem, target: Target) -> Iterator[ColumnConfig]:
    for config in _every(problem):
        if _Columns(problem, config).shared_bytes <= target.shared_per_block:
            yield config


def _cycles(problem: ConvProblem, config: ColumnConfig, target: Target) -> float:
    speeds, of = ColumnSpeeds.of(target), _Columns(problem, config)
    m_tiles, stages = config.warps * config.m_tiles, of.d.taps * of.h.taps * of.chunks
    products = m_tiles * config.mma_n // 8 * of.steps * of.present * config.products
    unit = (speeds.copied if is_narrow(problem.dtype) else speeds.split)[problem.layout == "NCHW"]
    if is_narrow(problem.dtype) and problem.layout == "NHWC" and problem.k % 8:
        unit = speeds.copied[2]
    copied = of.pixels * of.line_units * of.d.taps * of.chunks * unit
    gathered = config.tile_rows * config.tile_columns * config.mma_n * speeds.gathered
    block = products * speeds.product + copied + gathered + stages * speeds.stage
    if not is_narrow(problem.dtype):
        block += m_tiles * 16 * config.mma_n * stages * speeds.promoted
    fit = max(1, min(config.min_blocks, target.shared_per_multiprocessor // (of.shared_bytes + 1024)))
    block *= 1 + speeds.alone * max(0, MOST_BLOCKS - fit) / MOST_BLOCKS
    # few CTAs come in whole rounds
    few = of.blocks <= 4 * fit * target.multiprocessors
    rounds = ceil_div(of.blocks, target.multiprocessors) if few else of.blocks / target.multiprocessors
    memory = problem.bytes / target.bytes_per_cycle
    return max(rounds * block, memory) + speeds.start + launch_cycles(target)
