"""The filters' gradient of float16 and bfloat16 on tensor cores by mma.sync, channels last, from sm_80 on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import gradient_arguments, view_constants
from leanconv.kernels.contract import Arithmetic, Config, ceil_div, variant
from leanconv.kernels.cost import Speeds, launch_cycles, overlapped
from leanconv.kernels.mma_sync.native_gemm_sync import (
    COPIED_STAGES,
    DEPTH,
    HELD_STAGES,
    WINDOW_BYTES,
    NativeGemmSync,
    aligned_in,
    load_cycles,
    sync_why_not,
)
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Steps whose windows are in shared memory; a step has `DEPTH` output pixels.
TABLES = 3
#: Steps of a block whose products are summed in the tensor core, which rounds toward zero: of 2^15 pixels at most 2^-11
#: of a sum is lost, where it cuts as often as the emulator, twice for 16 products. More are added in shared memory.
STEPS_AT_ONCE = 512
#: Blocks of a cluster.
SPLITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class WeightSyncConfig(Config):
    """A tile has 16 x ``m_tiles`` filters for each of ``warps_k``, and 16 x ``n16s`` columns, elements of a filter, for
    each of ``warps_n``; ``stages`` of both operands are in shared memory at once. A cluster of ``split`` blocks shares
    all output pixels, and so do ``split_k`` of them whose sums a second launch adds. ``totals``: a block adds the sums
    of each ``steps_at_once`` steps."""

    warps_k: int
    warps_n: int
    m_tiles: int
    n16s: int
    stages: int
    min_blocks: int
    split: int = 1
    split_k: int = 1
    totals: bool = False
    steps_at_once: int = STEPS_AT_ONCE

    @property
    def threads(self) -> int:
        return 32 * self.warps_k * self.warps_n

    @property
    def filters(self) -> int:
        return 16 * self.m_tiles * self.warps_k

    @property
    def columns(self) -> int:
        return 16 * self.n16s * self.warps_n

    @property
    def shared_bytes(self) -> int:
        totals = 4 * self.filters * self.columns if self.totals else 0
        return self.stages * (self.filters + self.columns) * 2 * DEPTH + TABLES * WINDOW_BYTES * DEPTH + totals


#: A tile: warps along filters and columns, 16 filters and 16 columns of a warp, blocks of a multiprocessor.
Tile = tuple[int, int, int, int, int]
TILES: tuple[Tile, ...] = ((2, 4, 4, 2, 1), (2, 4, 2, 2, 2), (4, 2, 2, 2, 2), (2, 2, 2, 2, 3))


@dataclass(frozen=True)
class WeightSyncSpeeds(Speeds):
    """Cycles of a multiprocessor. Fitted to 96 times of 12 layers. Explored (H200, 2026-11-28, revision 81bb595):
    predictions miss these by 17 % (standard deviation)."""

    #: the most flops of a product in a cycle, and the share of slower tensor cores that is assumed elsewhere
    max_flops: float
    share: float
    #: a warp's loads of 16, 8, 4 and 2 bytes
    loaded: tuple[float, float, float, float]
    #: a step of a tile beside all that, a block, and a sum of it
    step: float
    block: float
    sum: float
    #: how much longer a tile takes without other blocks, and adding partial sums than memory takes for them
    alone: float
    adding: float
    #: the share of the lesser of computing and memory that the greater does not hide
    not_hidden: float
    #: predicted times are multiplied by this where wgmma computes the same: it was quicker on all layers measured
    behind: float


class NativeWeightSync(split_k.SharedSplitK):
    """dy times windows of x, both read where they lie; float16 or bfloat16 summed in float32; NHWC."""

    name = "native_weight"
    strategy = "sync"
    paper = NativeGemmSync.paper
    precision = "fp32"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return sync_why_not(problem, target, "wgrad")

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def sharing(self, problem: ConvProblem, target: Target, room: float) -> Iterator[WeightSyncConfig]:
        for whole in _configs(problem, target):
            yield from _shared_by(problem, whole, target, room)

    def cycles(self, problem: ConvProblem, config: WeightSyncConfig, target: Target) -> float:
        return _cycles(problem, config, target)

    def plan(self, problem: ConvProblem, config: WeightSyncConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        arguments = (x, dy, split_k.destination(problem, config.split_k), batch)
        grid = _tiles(problem, config) * config.split * config.split_k
        first = self.launch(config, view_constants(problem), arguments, grid, config.shared_bytes)
        return split_k.with_sums(first, problem, config.split_k, early=True)


def _configs(problem: ConvProblem, target: Target) -> Iterator[WeightSyncConfig]:
    """A configuration of each tile, computed by one block."""
    held = min(aligned_in(problem.group_c), aligned_in(problem.group_k)) < 8
    for warps_k, warps_n, m_tiles, n16s, blocks in TILES:
        yield WeightSyncConfig(warps_k, warps_n, m_tiles, n16s, HELD_STAGES if held else COPIED_STAGES, blocks)


def _tiles(problem: ConvProblem, config: WeightSyncConfig) -> int:
    columns = ceil_div(problem.group_c * problem.taps, config.columns)
    return problem.groups * ceil_div(problem.group_k, config.filters) * columns


def _steps(problem: ConvProblem) -> int:
    return ceil_div(problem.pixels, DEPTH)


def _fit(config: WeightSyncConfig, target: Target) -> int:
    """Blocks that a multiprocessor holds."""
    return max(1, min(config.min_blocks, target.shared_per_multiprocessor // (config.shared_bytes + 1024)))


def _shared_by(
    problem: ConvProblem, whole: WeightSyncConfig, target: Target, room: float
) -> Iterator[WeightSyncConfig]:
    """As many blocks as keep a GPU busy, or clusters, and no more partial sums than there is ``room`` for."""
    steps, tiles = _steps(problem), _tiles(problem, whole)
    shares = [(split, 1) for split in SPLITS if split <= min(max(1, steps), target.most_in_cluster)]
    if room >= 2:
        busy = min(_fit(whole, target) * target.multiprocessors // tiles, steps)
        shares.append((1, int(min(max(2, busy), room))))
    for split, slices in shares:
        totals = ceil_div(steps, split * slices) > STEPS_AT_ONCE
        config = variant(whole, split=split, split_k=slices, totals=totals)
        if config.shared_bytes <= target.shared_per_block:
            yield config


def _cycles(problem: ConvProblem, config: WeightSyncConfig, target: Target) -> float:
    speeds, sums, shares = WeightSyncSpeeds.of(target), config.filters * config.columns, config.split * config.split_k
    flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
    step = 2 * sums * DEPTH / flops + speeds.step
    step += load_cycles(config.filters, problem.group_k, speeds.loaded)
    step += load_cycles(config.columns, problem.group_c, speeds.loaded)
    blocks, at_once = _tiles(problem, config) * shares, _fit(config, target) * target.multiprocessors
    # blocks of a multiprocessor take turns with its tensor cores
    crowd = max(1.0, min(blocks, at_once) / target.multiprocessors)
    step *= 1 + speeds.alone * max(0.0, 1 - crowd * config.threads / 512)
    each = ceil_div(_steps(problem), shares) * step * crowd + speeds.block + sums * speeds.sum * crowd
    memory = problem.bytes / target.bytes_per_cycle
    time = overlapped(ceil_div(blocks, at_once) * each, memory, speeds.not_hidden) + launch_cycles(target)
    time += speeds.adding * split_k.sum_cycles(problem, config.split_k, target)
    aligned = problem.group_c % 8 == problem.group_k % 8 == 0
    return time * speeds.behind if target.warpgroup_products and aligned else time
