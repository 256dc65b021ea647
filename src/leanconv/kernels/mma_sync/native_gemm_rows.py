"""Layers of few channels on tensor cores, float16 or bfloat16: rows of windows as runs of neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import gcd

from leanconv.kernels.common.layers import (
    FLOATS_16BIT,
    conv_arguments,
    conv_constants,
    images_outermost,
    limits,
    mma_sync_limits,
)
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, launch_cycles, overlapped
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Filters of a tile at most: a thread has as many sums.
MOST_FILTERS = 96
#: Warps that keep a multiprocessor busy.
WARPS = 16
#: Elements of a sector of memory.
SECTOR = 16
#: Eights of a slice of a window at most: their products are unrolled.
MOST_EIGHTS = 64


@dataclass(frozen=True)
class RowsConfig(Config):
    """A tile has ``tile_rows`` x ``tile_columns`` outputs, 16 x ``m_tiles`` of them for each of ``warps``, and
    ``mma_n`` filters."""

    warps: int
    tile_rows: int
    tile_columns: int
    m_tiles: int
    mma_n: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def order(self) -> Hashable:
        return ()


#: A tile: warps, rows and columns of outputs, 16 outputs of a warp.
Tile = tuple[int, int, int, int]
TILES: tuple[Tile, ...] = ((8, 4, 64, 2), (8, 8, 32, 2), (8, 16, 16, 2), (4, 4, 32, 2), (4, 8, 16, 2), (8, 2, 128, 2))


@dataclass(frozen=True)
class RowsSpeeds(Speeds):
    """Cycles of a multiprocessor. Fitted to 13 layers in NHWC, and to 90 times of 21 layers in NCHW (H200)."""

    #: a product of 16 x 8 x 16, copying two elements of x, and two of the filters
    product: float
    copied: float
    filters: float
    #: storing an output, where four filters (NCHW: outputs of a row) are neighbours, two, and where none
    stored: tuple[float, float, float]
    #: bytes that memory moves more for each row of a tile and filter, where rows in NCHW begin inside of sectors
    partial: float
    #: a slice of a tile beside all that, a call, and the share of the lesser of computing and memory that the greater
    #: does not hide
    tile: float
    start: float
    not_hidden: float
    #: how much longer a tile takes without other warps, of `WARPS` in all
    alone: float


class Windows:
    """The numbers of ``WindowRows`` in the kernels that plans need, for rows x columns outputs at a time."""

    def __init__(self, problem: ConvProblem, rows: int, columns: int) -> None:
        pixel = problem.c + problem.stride[1] * problem.c % 2
        #: eights of a window's row
        self.eights = ceil_div(problem.s * pixel, 8)
        # elements that a lane copies at once
        unit = 2 if problem.layout == "NHWC" else pixel * (1 + pixel % 2)
        read_rows = (rows - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
        #: words of x in shared memory, and tiles of an output slice
        row = (columns - 1) * problem.stride[1] * pixel + 8 * self.eights
        self.pixel_words = read_rows * ceil_div(row, unit) * unit // 2
        self.tiles = ceil_div(problem.p, rows) * ceil_div(problem.q, columns)


def runs_why_not(problem: ConvProblem, target: Target, op: str) -> list[str]:
    """Why kernels that read rows of windows as runs cannot compute ``op`` of ``problem``."""
    reasons = limits(problem, op, dtypes=FLOATS_16BIT)
    reasons += mma_sync_limits(target)
    if problem.groups > 1:
        reasons.append(f"groups={problem.groups}: it computes layers of one group")
    if problem.dilation[1] > 1:
        reasons.append("dilated columns: a window's row is no run of neighbours")
    eights = problem.r * ceil_div(problem.s * (problem.c + problem.stride[1] * problem.c % 2), 8)
    if eights > MOST_EIGHTS:
        reasons.append(f"a window has {eights} runs of eight elements, more than {MOST_EIGHTS}")
    return reasons


class _Rows(Windows):
    def __init__(self, problem: ConvProblem, config: RowsConfig) -> None:
        super().__init__(problem, config.tile_rows, config.tile_columns)
        self.steps = ceil_div(problem.r * self.eights, 2)
        self.filter_words = problem.t * self.steps * config.mma_n * 8
        self.tiles_k = ceil_div(problem.k, config.mma_n)
        self.tiles *= problem.n * problem.z
        staged_words = 0 if problem.layout == "NHWC" else config.warps * 16 * config.m_tiles * 8
        self.shared_bytes = 4 * (self.filter_words + staged_words + self.pixel_words)

    def fit(self, config: RowsConfig, target: Target) -> int:
        """CTAs that a multiprocessor holds."""
        return max(1, min(config.min_blocks, target.shared_per_multiprocessor // (self.shared_bytes + 1024)))

    def blocks(self, config: RowsConfig, target: Target) -> int:
        """CTAs of the launch: as many as run at once."""
        at_once = target.multiprocessors * self.fit(config, target)
        return self.tiles_k * min(self.tiles, max(1, at_once // self.tiles_k))


class NativeGemmRows(TimedAlgorithm):
    """Direct convolution of few channels: filters and rows of x are in shared memory, windows read where they lie."""

    name = "native_gemm"
    strategy = "rows"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Chetlur et al., cuDNN (2014)"
    precision = "fp32"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = runs_why_not(problem, target, "fprop") + images_outermost(problem)
        if not reasons and not any(True for _ in _configs(problem, target)):
            return ["the filters and the rows of a tile do not fit into shared memory"]
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, RowsConfig]]:
        return by_time((_cycles(problem, config, target), config) for config in _configs(problem, target))

    def plan(self, problem: ConvProblem, config: RowsConfig, target: Target) -> Plan:
        rows = _Rows(problem, config)
        tuning = (*config.constants(), ("threads", config.threads))
        grid, constants = rows.blocks(config, target), conv_constants(problem)
        return Plan((self.launch(config, constants, conv_arguments(problem), grid, rows.shared_bytes, tuning),))


def _configs(problem: ConvProblem, target: Target) -> Iterator[RowsConfig]:
    mma_n = ceil_div(ceil_div(problem.k, ceil_div(problem.k, MOST_FILTERS)), 16) * 16
    for warps, rows, columns, m_tiles in TILES:
        blocks = (2 if mma_n <= 64 else 1) * 8 // warps
        config = RowsConfig(warps, rows, columns, m_tiles, mma_n, blocks)
        if _Rows(problem, config).shared_bytes <= target.shared_per_block:
            yield config


def _cycles(problem: ConvProblem, config: RowsConfig, target: Target) -> float:
    speeds, rows = RowsSpeeds.of(target, problem.layout), _Rows(problem, config)
    outputs = config.tile_rows * config.tile_columns
    products = outputs // 16 * (config.mma_n // 8) * rows.steps * problem.t
    tile = products * speeds.product + rows.pixel_words * problem.t * speeds.copied
    neighbours = problem.k if problem.layout == "NHWC" else problem.q
    tile += outputs * config.mma_n * speeds.stored[(4, 2, 1).index(gcd(neighbours, 4))] + speeds.tile * problem.t
    tile *= 1 + speeds.alone * max(0, WARPS - rows.fit(config, target) * config.warps) / WARPS
    blocks = max(1, rows.blocks(config, target))
    shared = max(1.0, blocks / target.multiprocessors)
    computed = shared * (ceil_div(rows.tiles * rows.tiles_k, blocks) * tile + rows.filter_words * speeds.filters)
    memory = float(problem.bytes)
    if problem.q % SECTOR:
        memory += (
            speeds.partial * problem.n * problem.z * problem.p * ceil_div(problem.q, config.tile_columns) * problem.k
        )
    memory /= target.bytes_per_cycle
    return overlapped(computed, memory, speeds.not_hidden) + speeds.start + launch_cycles(target)
