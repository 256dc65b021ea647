"""Gradient of the filters of depthwise layers: both tensors read once, the sums of a filter in registers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import inf

from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments
from leanconv.kernels.contract import Config, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, blocks_that_fit, clusters_at_once, launch_cycles
from leanconv.kernels.depthwise.strategy import (
    MOST_REGISTERS,
    PAPER,
    depthwise_limits,
    live_rows,
    tap_limits,
    window,
)
from leanconv.plan import Number, Plan, Target
from leanconv.problem import ConvProblem

#: Columns of dy that a thread walks down at once, rows of it after which it takes another strip.
COLUMNS = {"NCHW": (4, 8), "NHWC": (4, 7, 8, 14)}
ROWS = (14, 28, 56, 112)
#: Rows of dy that a thread takes in an iteration of its loop.
UNROLLED = 2
#: Filters of a block in NHWC: 8 floats are a sector of memory, the least that is read at once.
CHANNELS = (8, 16, 32)
THREADS = (128, 256, 384, 512)
#: Blocks of a cluster on any GPU that has them.
MOST_IN_CLUSTER = 8
#: Blocks that keep a large GPU busy, four on each multiprocessor: at most so many share filters through a workspace.
BLOCKS = 528
#: Warps of a block that adds partial sums. NOTE: with one thread a weight, 512 of them are as many loads in a row.
SUM_WARPS = 16


@dataclass(frozen=True)
class DepthwiseWeightConfig(Config):
    """A thread walks down strips of ``columns`` columns and ``rows`` rows of dy; a block has ``threads``. The rows are
    an argument of the kernel, all else is compiled in.

    In NHWC a block has ``channels`` neighbouring filters. A cluster of ``split`` blocks shares the walks, or with
    split-K ``split_k`` blocks, whose partial sums a second launch adds.
    """

    columns: int
    rows: int
    channels: int
    threads: int
    split: int
    min_blocks: int
    split_k: int = 1


@dataclass(frozen=True)
class WeightSpeeds(Speeds):
    """By layout. Fitted in NHWC to 474 configurations of 12 layers, in NCHW to 89 of 34 layers, with 333 of a kernel
    whose iterations took one row. Explored (H200, d48ce82): of 34 layers the first choice is 2.4 (NHWC) and 1.6 %
    (NCHW) behind the best in the mean, 22 and 13 % at worst."""

    #: the share of the peak at which instructions are issued; those of a row besides its arithmetic
    issue: float
    beside: float
    #: cycles from the load of a row to its use, and before the first row and after the last
    latency: float
    start: float
    #: how much longer memory takes for each tile that shares a line of 32 floats with the first; cycles for a line of
    #: the L1
    shared_line: float
    line: float


def registers_needed(problem: ConvProblem, columns: int) -> int:
    """Registers that a thread needs: sums, rows of dy, two windows of x, and about 40 for addresses."""
    rows_of_dy = (live_rows(problem) - 1 + UNROLLED) * columns
    return problem.taps + rows_of_dy + 2 * problem.t * window(problem, columns) + 40


class DepthwiseWeight(split_k.SplitK):
    """Rows of x and dy pass through registers once; FP32 FMAs."""

    name = "depthwise_weight"
    paper = PAPER
    precision = "ieee"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*depthwise_limits(problem, "wgrad"), *tap_limits(problem)]
        if not reasons and not usable(problem):
            reasons.append(
                f"a filter of {problem.window} with dilation={problem.dilation} and stride={problem.stride} "
                f"overlaps {live_rows(problem)} rows, too many for the registers of a thread"
            )
        return reasons

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, DepthwiseWeightConfig]]:
        found = []
        for shape in shapes(problem, target, CHANNELS if problem.layout == "NHWC" else (1,)):
            most = most_that_share(ceil_div(problem.k, shape.channels), shape.min_blocks, target)
            config = shared_by(problem, shape, most)
            found.append((predicted_cycles(problem, config, target), config))
        return by_time([*found, *_with_split_k(problem, target, split_k.most_partial_sums(problem, workspace))])

    def plan(self, problem: ConvProblem, config: DepthwiseWeightConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        rows = Number("int", "rows", config.rows)
        arguments = (x, dy, split_k.destination(problem, config.split_k), batch, rows)
        grid = ceil_div(problem.k, config.channels) * config.split * config.split_k
        constants = (*conv_constants(problem), ("unrolled", UNROLLED))
        tuning = tuple(each for each in config.constants() if each[0] != "rows")
        first = self.launch(config, constants, arguments, grid, _shared_bytes(problem, config.threads), tuning)
        return split_k.with_sums(first, problem, config.split_k, SUM_WARPS)


def _shared_bytes(problem: ConvProblem, threads: int) -> int:
    """Shared memory of a block: the totals of its threads."""
    return 4 * threads * problem.taps


def _with_split_k(
    problem: ConvProblem, target: Target, most: float
) -> Iterator[tuple[float, DepthwiseWeightConfig]]:  # fmt: skip
    """Configurations in which more blocks share a filter than a cluster can have, up to ``most``, with their times."""
    channels = _channels(problem)
    tiles = ceil_div(problem.k, channels)
    if most < 2:
        return
    found = set()
    for shape in shapes(problem, target, (channels,)):
        busy = min(most, BLOCKS // tiles, target.multiprocessors * shape.min_blocks // tiles)
        shared = shared_by(problem, shape, max(2, int(busy)))
        config = variant(shared, split=1, split_k=max(2, shared.split))
        if config not in found:
            found.add(config)
            yield predicted_cycles(problem, config, target) + launch_cycles(target), config


def _channels(problem: ConvProblem) -> int:
    """Filters of a block of which several share a filter: as many as make whole lines of memory, of which at most an
    eighth is left over."""
    if problem.layout != "NHWC":
        return 1
    return next((c for c in reversed(CHANNELS) if 8 * (-problem.k % c) <= problem.k), CHANNELS[0])


def shapes(problem: ConvProblem, target: Target, channels: Iterable[int]) -> Iterator[DepthwiseWeightConfig]:
    """The configurations for blocks of so many filters, each block with its own."""
    fitting_threads = [threads for threads in THREADS if _shared_bytes(problem, threads) <= target.shared_per_block]
    for columns, threads in product(usable(problem), fitting_threads):
        registers = registers_needed(problem, columns)
        if problem.is_volume and registers * threads > target.registers_per_multiprocessor:
            continue  # windows of several slices would spill
        fitting = blocks_that_fit(registers_needed(problem, columns), threads, target)
        for rows, filters in product(sorted({min(rows, problem.p) for rows in ROWS}), channels):
            yield DepthwiseWeightConfig(columns, rows, filters, threads, 1, fitting)


def shared_by(problem: ConvProblem, shape: DepthwiseWeightConfig, most: int) -> DepthwiseWeightConfig:
    """``shape`` with the walks dealt out to at most so many blocks: to no more than make the longest share shorter."""
    walks, workers = max(1, _walks(problem, shape)), shape.threads // shape.channels
    return variant(shape, split=ceil_div(walks, ceil_div(walks, most * workers) * workers))


def _walks(problem: ConvProblem, config: DepthwiseWeightConfig) -> int:
    return problem.n * problem.z * ceil_div(problem.q, config.columns) * ceil_div(problem.p, config.rows)


def usable(problem: ConvProblem) -> list[int]:
    """Columns that a thread may walk down: those that leave registers for the filter and the rows of dy."""
    return [c for c in COLUMNS[problem.layout] if registers_needed(problem, c) <= MOST_REGISTERS]


def most_that_share(tiles: int, fitting: int, target: Target) -> int:
    """Most blocks of a cluster for which those of all ``tiles`` run at the same time: by the model always best."""
    most = MOST_IN_CLUSTER if target.clusters else 1
    return next((split for split in range(most, 1, -1) if tiles <= clusters_at_once(split, fitting, target)), 1)


def predicted_cycles(problem: ConvProblem, config: DepthwiseWeightConfig, target: Target) -> float:
    """Predicted time in clock cycles, of the first launch: that of the busiest multiprocessor, and of the memory."""
    speed, nchw, columns = WeightSpeeds.of(target, problem.layout), problem.layout == "NCHW", config.columns
    share = config.split * config.split_k
    each = ceil_div(_walks(problem, config), share * (config.threads // config.channels))
    steps = each * (min(config.rows, problem.p) + live_rows(problem) - 1)
    loads, strip = window(problem, columns), columns
    if nchw and problem.w % 4 == 0 and columns * problem.stride[1] % 4 == 0:
        loads = ceil_div(loads + -problem.padding[2] % 4, 4)
    if nchw and problem.q % 4 == 0:
        strip = ceil_div(columns, 4)
    accesses = loads * problem.stride[0] * problem.t + strip
    moved = (live_rows(problem) - 1) * columns / UNROLLED
    instructions = problem.taps * columns + 2 * accesses + moved + speed.beside
    # Lines that the lanes of an access touch in NCHW, where they are strips of several rows.
    strips = ceil_div(problem.q, columns)
    lines = min(32.0, max(1, 32 / strips) * (0.5 + min(32, strips) * columns * 4 * problem.stride[1] / 128))
    lanes = max(instructions / (target.fma_lanes * speed.issue), speed.line * accesses * lines / 32)
    work = config.threads * lanes

    def resident(blocks: int) -> float:
        return steps * max(blocks * work, speed.latency) + speed.start if blocks else 0.0

    tiles, fitting = ceil_div(problem.k, config.channels), config.min_blocks
    if config.split > 1:
        rounds, rest = divmod(tiles, clusters_at_once(config.split, fitting, target))
        rest = min(fitting, ceil_div(rest * config.split, target.multiprocessors))
    else:
        rounds, rest = divmod(ceil_div(tiles * share, target.multiprocessors), fitting)
    slower = 1 + speed.shared_line * (CHANNELS[-1] / config.channels - 1)
    memory = slower * problem.bytes / target.bytes_per_cycle
    return rounds * resident(fitting) + resident(rest) + memory
