"""Depthwise convolution: one filter, or several, for each channel; every row of the image is read once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leanconv.algorithms.base import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.algorithms.tiles import conv_arguments, gradient_limits, images_outermost
from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Most taps of a filter, which a thread keeps in registers, and most registers that a thread may need.
MOST_TAPS = 81
MOST_REGISTERS = 200
#: Rows in the ring above which a turn of it is too much code: then sums move from row to row instead.
MOST_TURNS = 5
#: Outputs of a row that a thread computes, and rows that it walks down.
COLUMNS = {"NCHW": (4,), "NHWC": (4, 7, 8, 14)}
ROWS = (7, 14, 28, 56)
THREADS = 256
#: The share of the peak that instructions are issued at, cycles from the load of a row to its use, cycles before the
#: first row and after the last (fitted to 450 measurements on an H200).
BEST_SHARE, ROW_CYCLES, START_CYCLES = 0.7, 800, 500


@dataclass(frozen=True)
class DepthwiseConfig(Config):
    """A thread computes strips of ``columns`` outputs, ``rows`` rows of them, a block of ``threads``.

    In NHWC a block has ``channels`` neighbouring filters. With ``ring`` sums stay in their registers while the window
    moves down, in code that is unrolled once for each row of the ring.
    """

    columns: int
    rows: int
    ring: bool
    channels: int
    threads: int
    min_blocks: int


def live_rows(problem: ConvProblem) -> int:
    """Rows of outputs that one input row reaches, or lies between."""
    return (problem.r - 1) * problem.dilation[0] // problem.stride[0] + 1


def window(problem: ConvProblem, columns: int) -> int:
    """Pixels of an input row that a strip of outputs sees."""
    return (columns - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def registers_needed(problem: ConvProblem, columns: int) -> int:
    """Registers that a thread needs: the filter, sums, windows, and about 30 for addresses."""
    windows = (1 + problem.stride[0]) * window(problem, columns)
    return problem.r * problem.s + live_rows(problem) * columns + windows + 30


def blocks_that_fit(registers: int, threads: int, target: Target) -> int:
    """Blocks that a multiprocessor holds: registers come in portions of 8 a thread, warps in fours."""

    def fits(blocks: int) -> bool:
        warps = ceil_div(blocks * threads // 32, 4) * 4
        return warps <= 48 and ceil_div(registers, 8) * 8 * 32 * warps <= target.registers_per_multiprocessor

    return max((blocks for blocks in range(1, 49) if fits(blocks)), default=1)


def channel_tile(problem: ConvProblem) -> int:
    """Filters of a block in NHWC: all, or as many as make whole tiles of whole warps where that is possible."""
    if problem.k <= THREADS:
        return problem.k
    for size in range(THREADS, 31, -32):
        if problem.k % size == 0:
            return size
    return THREADS


class Depthwise(TimedAlgorithm):
    """Rows of the image pass through registers once; FP32 FMAs in direct order, no workspace. Forward and, for layers
    of unit stride, the gradient of the input."""

    name = "depthwise"
    paper = (
        "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), for one channel"
    )
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*gradient_limits(problem, GPU_LAYERS), *images_outermost(problem)]
        if problem.group_c != 1:
            reasons.append(f"groups={problem.groups} of {problem.c} channels: a group has more than one channel")
        elif problem.op == "dgrad" and (problem.stride != (1, 1) or problem.group_k != 1):
            reasons.append(
                f"op='dgrad' with stride={problem.stride} and {problem.group_k} filters a channel: it computes the "
                "gradient of layers of unit stride with one filter a channel"
            )
        if problem.r * problem.s > MOST_TAPS:
            reasons.append(f"the filter has {problem.r}x{problem.s} taps, and a thread keeps {MOST_TAPS} at most")
        elif not reasons and not self._usable(_forward(problem)):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} with dilation={problem.dilation} reaches {live_rows(problem)} "
                "rows, too many for the registers of a thread"
            )
        return reasons

    def _usable(self, problem: ConvProblem) -> list[int]:
        return [c for c in COLUMNS[problem.layout] if registers_needed(problem, c) <= MOST_REGISTERS]

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DepthwiseConfig]]:
        forward = _forward(problem)
        channels = channel_tile(forward) if problem.layout == "NHWC" else 1
        found = {}
        threads = ceil_div(channels * max(1, THREADS // channels), 32) * 32
        for columns in self._usable(forward):
            fitting = blocks_that_fit(registers_needed(forward, columns), threads, target)
            for rows in sorted({min(rows, forward.p) for rows in ROWS}):
                ring = live_rows(forward) <= MOST_TURNS
                config = DepthwiseConfig(columns, rows, ring, channels, threads, fitting)
                found[config] = _cycles(forward, config, target)
        return by_time((cycles, config) for config, cycles in found.items())

    def plan(self, problem: ConvProblem, config: DepthwiseConfig, target: Target) -> Plan:
        forward = _forward(problem)
        constants = (*conv_constants(forward), ("reversed", problem.op == "dgrad"))
        shared = 4 * config.channels * (problem.r * problem.s | 1) if problem.layout == "NHWC" else 0
        launch = Launch(
            header="depthwise.cuh",
            function="leanconv::depthwise",
            problem=constants,
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=_blocks(forward, config),
            block=config.threads,
            shared_bytes=shared,
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))


def _forward(problem: ConvProblem) -> ConvProblem:
    """The convolution that computes the problem; of a gradient with the filters reversed."""
    unit = problem.op == "dgrad" and problem.stride == (1, 1)
    return replace(problem.as_forward(), accumulate=problem.accumulate) if unit else problem


def _blocks(problem: ConvProblem, config: DepthwiseConfig) -> int:
    parts = problem.n * ceil_div(problem.q, config.columns) * ceil_div(problem.p, config.rows)
    if problem.layout == "NHWC":
        return ceil_div(problem.k, config.channels) * ceil_div(parts, config.threads // config.channels)
    return ceil_div(parts * problem.k, config.threads)


def _cycles(problem: ConvProblem, config: DepthwiseConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor.

    Its warps pass an input row in the time of their instructions, or of the lines that they move through the L1, but
    not before the next row has come. The choice is within 5 % of the best configuration in the mean of 13 layers in
    two layouts, 40 % in the worst case (H200).
    """
    outputs = problem.n * problem.k * problem.p * problem.q
    steps = min(config.rows, problem.p) + live_rows(problem) - 1
    moved = 0 if config.ring else (live_rows(problem) - 1) * config.columns
    loads = window(problem, config.columns) * problem.stride[0]
    instructions = problem.r * problem.s * config.columns + 1.5 * loads + moved + 3 * config.columns + 12
    rounds, rest = divmod(ceil_div(max(1, _blocks(problem, config)), target.multiprocessors), config.min_blocks)

    # In NCHW the lanes of a warp are a strip apart: an access touches four lines, or one for each row that it meets.
    accesses, lines = loads + config.columns, 1
    if problem.layout == "NCHW":
        lines = max(4, 32 // ceil_div(problem.q, config.columns))
        if problem.w % 4 == 0 and problem.stride[1] == 1:
            accesses = loads - config.columns + 2

    def cycles(blocks: int) -> float:
        issue = blocks * config.threads * instructions / (target.fma_lanes * BEST_SHARE)
        return steps * max(issue, blocks * config.threads / 32 * accesses * lines, ROW_CYCLES) + START_CYCLES

    busy = rounds * cycles(config.min_blocks) + (cycles(rest) if rest else 0)
    memory = (
        item_bytes(problem.dtype) * (problem.n * problem.c * problem.h * problem.w + outputs) / target.bytes_per_cycle
    )
    return 1.34 * (max(busy, memory) + 0.15 * min(busy, memory))
