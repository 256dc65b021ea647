"""The filters' gradient of layers of few channels on tensor cores, float16 or bfloat16 in NHWC: windows as runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments
from leanconv.kernels.contract import Arithmetic, Config, ceil_div, variant
from leanconv.kernels.cost import Speeds, launch_cycles, overlapped
from leanconv.kernels.mma_sync.native_gemm_rows import NativeGemmRows, Windows, runs_why_not
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Filters of a tile at most, in 16, and columns of a warp.
MOST_FILTERS, MOST_COLUMNS = 4, 3
#: Blocks of a multiprocessor.
MOST_BLOCKS = 3
#: Blocks of a cluster.
SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class WeightRowsConfig(Config):
    """A tile has 16 x ``m16s`` filters, and 16 x ``n16s`` columns for each of ``warps_n``; ``warps_p`` times as many
    warps share ``tile_rows`` x ``tile_columns`` outputs at a time. A cluster of ``split`` blocks shares all outputs,
    and so do ``split_k`` of them whose sums a second launch adds."""

    warps_n: int
    warps_p: int
    m16s: int
    n16s: int
    tile_rows: int
    tile_columns: int
    min_blocks: int
    split: int = 1
    split_k: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_p


#: Rows and columns of the outputs that are copied at once.
TILES: tuple[tuple[int, int], ...] = ((4, 32), (2, 64), (4, 64), (8, 16))


@dataclass(frozen=True)
class WeightRowsSpeeds(Speeds):
    """Cycles of a multiprocessor. Fitted to 13 layers (H200)."""

    #: a product of 16 x 8 x 16, and copying two elements of x
    product: float
    copied: float
    #: copying eight elements of dy at once, and one by one
    gradient: tuple[float, float]
    #: a tile beside all that, a block, and a sum of it
    tile: float
    block: float
    sum: float
    #: how much longer a tile takes without other blocks, and adding partial sums than memory takes for them
    alone: float
    adding: float
    #: the share of the lesser of computing and memory that the greater does not hide
    not_hidden: float


class _Rows:
    """The numbers of ``WeightRows`` in the kernel that a plan needs."""

    def __init__(self, problem: ConvProblem, config: WeightRowsConfig) -> None:
        self.windows = Windows(problem, config.tile_rows, config.tile_columns)
        self.tiles_k = ceil_div(problem.k, 16 * config.m16s)
        columns = 16 * config.n16s * config.warps_n
        self.tiles = self.tiles_k * problem.t * ceil_div(8 * problem.r * self.windows.eights, columns)
        self.sums = config.warps_p * 16 * config.m16s * columns
        outputs = config.tile_rows * config.tile_columns
        self.shared_bytes = max(128 * outputs + 4 * self.windows.pixel_words, 4 * self.sums)
        self.outputs = problem.n * problem.z * self.windows.tiles


class NativeWeightRows(split_k.SharedSplitK):
    """dy times rows of windows: both are read where they lie."""

    name = "native_weight"
    strategy = "rows"
    paper = NativeGemmRows.paper
    precision = "fp32"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = runs_why_not(problem, target, "wgrad")
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC: a window's row is no run of memory")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def sharing(self, problem: ConvProblem, target: Target, room: float) -> Iterator[WeightRowsConfig]:
        for whole in _configs(problem, target):
            yield from _shared_by(problem, whole, target, room)

    def cycles(self, problem: ConvProblem, config: WeightRowsConfig, target: Target) -> float:
        return _cycles(problem, config, target)

    def plan(self, problem: ConvProblem, config: WeightRowsConfig, target: Target) -> Plan:
        rows, (x, dy, _, batch) = _Rows(problem, config), gradient_arguments(problem)
        arguments = (x, dy, split_k.destination(problem, config.split_k), batch)
        grid = rows.tiles * config.split * config.split_k
        first = self.launch(config, conv_constants(problem), arguments, grid, rows.shared_bytes)
        return split_k.with_sums(first, problem, config.split_k, early=True)


def _configs(problem: ConvProblem, target: Target) -> Iterator[WeightRowsConfig]:
    """A configuration of each tile, computed by one block."""
    tiles_k = ceil_div(problem.k, 16 * MOST_FILTERS)
    m16s = ceil_div(ceil_div(problem.k, tiles_k), 16)
    for rows, columns in TILES:
        n16s = ceil_div(problem.r * Windows(problem, rows, columns).eights, 2)
        # as few tiles as there can be, then as many warps for the outputs
        groups = ceil_div(n16s, 4 * MOST_COLUMNS)
        each = ceil_div(n16s, groups)
        warps_n = next(warps for warps in (1, 2, 4) if ceil_div(each, warps) <= MOST_COLUMNS)
        config = WeightRowsConfig(warps_n, 4 // warps_n, m16s, ceil_div(each, warps_n), rows, columns, MOST_BLOCKS)
        if _Rows(problem, config).shared_bytes <= target.shared_per_block:
            yield config


def _fit(rows: _Rows, config: WeightRowsConfig, target: Target) -> int:
    """Blocks that a multiprocessor holds."""
    return max(1, min(config.min_blocks, target.shared_per_multiprocessor // (rows.shared_bytes + 1024)))


def _shared_by(
    problem: ConvProblem, whole: WeightRowsConfig, target: Target, room: float
) -> Iterator[WeightRowsConfig]:
    """By clusters, or by as many blocks as keep the GPU busy; no warp sums more than `split_k.most_pixels`."""
    rows = _Rows(problem, whole)
    least = ceil_div(
        rows.outputs * whole.tile_rows * whole.tile_columns, whole.warps_p * split_k.most_pixels(problem, target)
    )
    for split in SPLITS:
        if least <= split <= min(max(1, rows.outputs), target.most_in_cluster):
            yield variant(whole, split=split)
    if room >= max(2, least):
        busy = min(_fit(rows, whole, target) * target.multiprocessors // rows.tiles, rows.outputs)
        yield variant(whole, split_k=int(min(max(2, split_k.enough(busy, least)), room)))


def _cycles(problem: ConvProblem, config: WeightRowsConfig, target: Target) -> float:
    speeds, rows = WeightRowsSpeeds.of(target), _Rows(problem, config)
    outputs, shares = config.tile_rows * config.tile_columns, config.split * config.split_k
    products = outputs // 16 * config.m16s * 2 * config.n16s * config.warps_n
    tile = products * speeds.product + rows.windows.pixel_words * speeds.copied
    tile += outputs * 2 * config.m16s * speeds.gradient[problem.k % 8 > 0] + speeds.tile
    blocks, at_once = rows.tiles * shares, _fit(rows, config, target) * target.multiprocessors
    # blocks of a multiprocessor take turns with its tensor cores
    crowd = max(1.0, min(blocks, at_once) / target.multiprocessors)
    tile *= 1 + speeds.alone * max(0.0, 1 - crowd / MOST_BLOCKS)
    each = ceil_div(rows.outputs, shares) * tile * crowd + speeds.block + rows.sums * speeds.sum * crowd
    memory = problem.bytes / target.bytes_per_cycle
    time = overlapped(ceil_div(blocks, at_once) * each, memory, speeds.not_hidden) + launch_cycles(target)
    return time + speeds.adding * split_k.sum_cycles(problem, config.split_k, target)
