"""Gradient of the filters of depthwise layers: both tensors read once, the sums of a filter in registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from leanconv.algorithms.base import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.algorithms.depthwise import MOST_TAPS, PAPER, blocks_that_fit, live_rows, one_channel, window
from leanconv.algorithms.tiles import gradient_arguments, images_outermost, weight_limits
from leanconv.dtypes import GPU_LAYERS
from leanconv.plan import Launch, Number, Plan, Target
from leanconv.problem import ConvProblem

#: Columns of dy that a thread walks down at once, rows of it after which it takes another strip.
COLUMNS = {"NCHW": (4, 8), "NHWC": (4, 7, 8, 14)}
ROWS = (14, 28, 56, 112)
#: Rows of dy that a thread takes in a turn of its loop (as in the kernel), and most registers that it may need.
TURNS, MOST_REGISTERS = 2, 200
#: Filters of a block in NHWC: 8 floats are a sector of memory, the least that is read at once.
CHANNELS = (8, 16, 32)
THREADS = (128, 256, 512)
#: Figures of the cost model, fitted to 500 configurations of 11 layers in two layouts (H200, when a turn took one row;
#: the first choice is 10 % behind the best in the mean, 50 % at worst): the share of the peak at which instructions are
#: issued, those of a row beside its arithmetic; cycles for a line of the L1, from the load of a row to its use, and
#: before the first row and after the last; what memory takes relative to what it should, how much of the lesser of both
#: adds to the greater, and how much more where one block is alone on a multiprocessor.
ISSUE, BESIDE, LINE, LATENCY, START, MEMORY, LESSER, ALONE = 0.55, 23, 0.56, 960, 4700, 1.48, 0.32, 0.22

#: How much longer blocks of 128 threads take in NHWC, where clusters are few, on images larger than 14 x 14, than the
#: model says (measured on an H200, seven layers: 1.3 to 1.8 times blocks of 256).
SMALL_BLOCKS, SMALL_IMAGE = 1.5, 200


@dataclass(frozen=True)
class DepthwiseWeightConfig(Config):
    """A thread walks down strips of ``columns`` columns and ``rows`` rows of dy; a block has ``threads``. The rows are
    an argument of the kernel, all else is compiled in.

    In NHWC a block has ``channels`` neighbouring filters. A cluster of ``split`` blocks shares the walks.
    """

    columns: int
    rows: int
    channels: int
    threads: int
    split: int
    min_blocks: int


def registers_needed(problem: ConvProblem, columns: int) -> int:
    """Registers that a thread needs: sums, rows of dy, two windows of x, and about 40 for addresses."""
    rows_of_dy = (live_rows(problem) - 1 + TURNS) * columns
    return problem.r * problem.s + rows_of_dy + 2 * window(problem, columns) + 40


class DepthwiseWeight(TimedAlgorithm):
    """Rows of x and dy pass through registers once; FP32 FMAs, sums over threads, warps and the blocks of a cluster in
    fixed order, no atomics, no workspace."""

    name = "depthwise_weight"
    paper = PAPER
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*weight_limits(problem, GPU_LAYERS), *images_outermost(problem), *one_channel(problem)]
        if problem.r * problem.s > MOST_TAPS:
            reasons.append(f"the filter has {problem.r}x{problem.s} taps, and a thread keeps {MOST_TAPS} at most")
        elif not reasons and not _usable(problem):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} with dilation={problem.dilation} and stride={problem.stride} "
                f"meets {live_rows(problem)} rows, too many for the registers of a thread"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DepthwiseWeightConfig]]:
        channels = CHANNELS if problem.layout == "NHWC" else (1,)
        found = shapes(problem, target, channels, range(1, 9) if target.clusters else (1,))
        slower = SMALL_BLOCKS if problem.layout == "NHWC" and problem.p * problem.q > SMALL_IMAGE else 1.0
        return by_time(
            (predicted_cycles(problem, config, target) * (slower if config.threads == THREADS[0] else 1.0), config)
            for config in found
        )

    def plan(self, problem: ConvProblem, config: DepthwiseWeightConfig, target: Target) -> Plan:
        launch = Launch(
            header="depthwise_weight.cuh",
            function="leanconv::depthwise_weight",
            problem=conv_constants(problem),
            tuning=tuple((name, value) for name, value in config.constants() if name != "rows"),
            arguments=(*gradient_arguments(problem), Number("int", "rows", config.rows)),
            grid=ceil_div(problem.k, config.channels) * config.split,
            block=config.threads,
            shared_bytes=4 * config.threads // 32 * config.channels * problem.r * problem.s,
            min_blocks=config.min_blocks,
            cluster=config.split,
        )
        return Plan((launch,))


def shapes(
    problem: ConvProblem, target: Target, channels: Iterable[int], splits: Iterable[int]
) -> Iterator[DepthwiseWeightConfig]:
    """The configurations for blocks of so many filters, of which so many share the walks."""
    for columns, threads in product(_usable(problem), THREADS):
        fitting = blocks_that_fit(registers_needed(problem, columns), threads, target)
        for rows, filters, split in product(sorted({min(rows, problem.p) for rows in ROWS}), channels, splits):
            yield DepthwiseWeightConfig(columns, rows, filters, threads, split, fitting)


def _usable(problem: ConvProblem) -> list[int]:
    return [c for c in COLUMNS[problem.layout] if registers_needed(problem, c) <= MOST_REGISTERS]


def predicted_cycles(
    problem: ConvProblem, config: DepthwiseWeightConfig, target: Target, *, cluster: bool = True
) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor's instructions and lines.

    ``cluster``: the blocks that share a filter are scheduled together.
    """
    nchw, columns = problem.layout == "NCHW", config.columns
    walks = problem.n * ceil_div(problem.q, columns) * ceil_div(problem.p, config.rows)
    each = ceil_div(walks, config.split * (config.threads // config.channels))
    steps = each * (min(config.rows, problem.p) + live_rows(problem) - 1)
    loads, strip = window(problem, columns), columns
    if nchw and problem.w % 4 == 0 and columns * problem.stride[1] % 4 == 0:
        loads = ceil_div(loads + -problem.padding[2] % 4, 4)
    if nchw and problem.q % 4 == 0:
        strip = ceil_div(columns, 4)
    accesses = loads * problem.stride[0] + strip
    moved = (live_rows(problem) - 1) * columns / TURNS
    instructions = problem.r * problem.s * columns + 2 * accesses + moved + BESIDE
    # Lines of the L1 that the lanes of an access meet: in NCHW those of several rows, in NHWC those of several pixels.
    if nchw:
        strips = ceil_div(problem.q, columns)
        lines = max(1, 32 / strips) * (0.5 + min(32, strips) * columns * 4 * problem.stride[1] / 128)
    else:
        lines = 32 / config.channels
    warps = config.threads / 32
    work = warps * max(instructions * 32 / (target.fma_lanes * ISSUE), LINE * accesses * min(32, lines))

    def resident(blocks: int) -> float:
        return steps * max(blocks * work, LATENCY) + START if blocks else 0.0

    tiles, fitting = ceil_div(problem.k, config.channels), config.min_blocks
    if cluster and config.split > 1:
        # a cluster lies within one of the processing clusters of the GPU, each of 16 multiprocessors or more
        at_once = max(1, target.multiprocessors // 16) * max(1, 16 * fitting // config.split)
        rounds, rest = divmod(tiles, at_once)
        rest = min(fitting, ceil_div(rest * config.split, target.multiprocessors))
    else:
        rounds, rest = divmod(ceil_div(tiles * config.split, target.multiprocessors), fitting)
    busy = rounds * resident(fitting) + resident(rest)
    memory = MEMORY * problem.bytes / target.bytes_per_cycle
    return max(busy, memory) + (LESSER + ALONE / fitting) * min(busy, memory)
