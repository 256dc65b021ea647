"""im2win without its tensor: windows are formed in shared memory as overlapping runs of pixels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import gcd, lcm

from leanconv.kernels.common.layers import has_wide_tensors, images_outermost, limits, view_constants
from leanconv.kernels.contract import TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, fma_cycles
from leanconv.kernels.simt import implicit_gemm
from leanconv.kernels.simt.tiles import TileConfig, cost, tile_launch, tiles, with_splits
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

PAPER = "S. Lu et al., Im2win: An Efficient Convolution Paradigm on GPU (2023)"


@dataclass(frozen=True)
class RunSpeeds(Speeds):
    """Of tiles with runs."""

    #: of each of `RUN_TILES`, the share of the speed of the best tile without runs (3x3 and 5x5 layers of 64 channels
    #: and more)
    tiles: Mapping[str, float]
    #: of this speed, where runs do not pay (see `pays`)
    slow_runs: float


@dataclass(frozen=True)
class Im2winFusedConfig(TileConfig):
    """``runs``: four adjacent outputs share one run of pixels a line; otherwise pixels arrive one by one."""

    runs: bool = True

    @property
    def order(self) -> Hashable:
        return self.runs, super().order


#: Tiles with runs; their depth follows from the filters (`lines`).
RUN_TILES = (
    Im2winFusedConfig(64, 128, stages=3, min_blocks=4),
    Im2winFusedConfig(128, 96, thread_pixels=12, stages=3, min_blocks=3),
    Im2winFusedConfig(128, 64, stages=3, min_blocks=3),
    Im2winFusedConfig(64, 64, stages=3, min_blocks=5),
    Im2winFusedConfig(96, 128, thread_k=12, stages=3, min_blocks=3),
)

#: The longest run, in pixels: a thread holds one or two of them in registers for every four of its outputs.
LONGEST_RUN = 16

#: Copies of a thread in a step for each of its columns: the kernel has a bit of 32 for each.
MOST_COPIES = 32


def pays(problem: ConvProblem) -> bool:
    """Whether runs are worth a try: 128-bit copies, short runs, and lines enough to fill the pipeline.

    Explored (H200, 3a4ef04): with 32-bit copies runs lose 10 to 30 % against single pixels, with sixteen pixels 8 %.
    """
    return problem.w % 4 == 0 and run_length(problem) <= 12 and problem.group_c * problem.r >= 32


def run_length(problem: ConvProblem) -> int:
    """Pixels of a run: the windows of four adjacent outputs on one line, and what alignment adds in front."""
    shift = -problem.padding[2] % 4 if problem.w % 4 == 0 else 0
    return shift + 3 * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def lines(problem: ConvProblem) -> int:
    """Lines of a reduction step: a multiple of four that makes about sixteen indices, or two where filters are wide."""
    return max(4, 16 // problem.s // 4 * 4) if problem.s <= 12 else 2


def run_pixels(problem: ConvProblem) -> int:
    """Output pixels as runs count them: rows are rounded up to four."""
    return problem.n * problem.p * ceil_div(problem.q, 4) * 4


def shared_bytes(problem: ConvProblem, config: Im2winFusedConfig) -> int:
    if not config.runs:
        return implicit_gemm.shared_bytes(problem, config)
    step_lines = config.tile_reduction // problem.s
    pixel_floats = step_lines * ceil_div(run_length(problem), 4) * config.tile_pixels
    entry = 12 if has_wide_tensors(problem) else 8
    return config.shared_bytes(pixel_floats, entry * lcm(problem.r, step_lines))


def copies(problem: ConvProblem, config: Im2winFusedConfig) -> int:
    """Copies of a thread in a stage for each of its columns: ``mine`` in kernels/simt/im2win_fused.cuh."""
    unit = 4 if problem.w % 4 == 0 else 1
    pairs = config.tile_reduction // problem.s * ceil_div(run_length(problem), 4)
    return ceil_div(pairs, config.threads // gcd(config.tile_pixels // unit, config.threads))


@lru_cache(maxsize=256)
def _without_runs(config: TileConfig) -> Im2winFusedConfig:
    return Im2winFusedConfig(**asdict(config), runs=False)


def _blocks(problem: ConvProblem, config: Im2winFusedConfig, heavy: bool) -> int:
    """Blocks that fit on a multiprocessor when a thread gets registers for its runs beside the accumulators."""
    run = ceil_div(run_length(problem), 4) * config.thread_pixels
    buffers = 2 if run <= 24 else 1
    needed = config.thread_k * config.thread_pixels + 2 * config.thread_k + buffers * run
    # Of two buffers one is used up while the other fills.
    needed += (24 if heavy else 10) if buffers == 2 else 30
    return max(1, min(config.min_blocks, 65536 // (config.threads * min(needed, 255))))


class Im2winFused(TimedAlgorithm):
    """Windows in shared memory, no workspace; every shape."""

    name = "im2win_fused"
    paper = PAPER
    precision = "ieee"

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return limits(problem, "fprop") + images_outermost(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, Im2winFusedConfig]]:
        reduction = problem.group_c * problem.r * problem.s
        single = [(_without_runs(c), v) for c, v in tiles(problem, target)]
        choices = [
            (cost(problem, problem.n * problem.p * problem.q, reduction, config, speed, target), config)
            for config, speed in with_splits(problem, single, reduction, target)
        ]
        heavy = has_wide_tensors(problem)
        # Rows rounded up to four may have more pixels than the 32 bits that suffice for the tensors.
        countable = heavy or run_pixels(problem) < 2**30
        # One filter column makes a run as long as the pixels it stands for.
        if problem.layout == "NCHW" and problem.s > 1 and run_length(problem) <= LONGEST_RUN and countable:
            speeds, depth = RunSpeeds.of(target), lines(problem) * problem.s
            slower = 1.0 if pays(problem) else speeds.slow_runs
            for tile in RUN_TILES:
                config = variant(tile, tile_reduction=depth, min_blocks=_blocks(problem, tile, heavy))
                if copies(problem, config) <= MOST_COPIES:
                    speed = slower * speeds.tiles[tile.name]
                    choices += [
                        (cost(problem, run_pixels(problem), reduction, each, speed, target), each)
                        for each, _ in with_splits(problem, [(config, speed)], reduction, target)
                    ]
        return by_time(pair for pair in choices if shared_bytes(problem, pair[1]) <= target.shared_per_block)

    def plan(self, problem: ConvProblem, config: Im2winFusedConfig, target: Target) -> Plan:
        pixels = run_pixels(problem) if config.runs else problem.n * problem.p * problem.q
        shared = shared_bytes(problem, config)
        return Plan((tile_launch(self, view_constants(problem), config, problem, pixels, shared),))
