"""Gradient of the input of depthwise layers of any stride, with any number of filters a channel: dy read once."""

from __future__ import annotations

from dataclasses import dataclass

from leanconv.kernels.common.layers import conv_constants, gradient_arguments
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, blocks_that_fit, busy_cycles, overlapped
from leanconv.kernels.depthwise.strategy import (
    MOST_REGISTERS,
    PAPER,
    SLICES,
    blocks_of,
    channel_tile,
    depthwise_limits,
    live_rows,
    tap_limits,
    threads_of,
)
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Groups of rows that a thread walks down.
ROWS = (7, 14, 28, 56)
#: Groups in the ring above which unrolling it is too much code: then sums move from group to group instead.
MOST_UNROLLED = 5
#: Most sums of a thread, those included that no tap reaches: code is unrolled for each.
MOST_SUMS = 160


@dataclass(frozen=True)
class DepthwiseInputConfig(Config):
    """A thread computes strips of ``columns`` columns of dx, ``rows`` groups of rows of them, a block of ``threads``.

    Of volumes the strips are of ``slices`` slices. In NHWC a block has ``channels`` neighbouring channels. With
    ``ring`` sums stay in their registers while the window
    moves down, in code that is unrolled once for each group of the ring.
    """

    columns: int
    rows: int
    ring: bool
    channels: int
    threads: int
    min_blocks: int
    slices: int = 1


@dataclass(frozen=True)
class InputSpeeds(Speeds):
    """Fitted to 102 configurations of 9 layers in two layouts. Explored (H200, 152a946): the first choice is 5 % behind
    the best in the mean, 40 % at worst."""

    #: the share of the peak at which instructions are issued; instructions of a row beside its arithmetic
    issue: float
    beside: float
    #: cycles for a line of the L1, from the load of a row to its use, and before the first row
    line: float
    latency: float
    start: float
    #: what memory takes relative to what it should, and how much of the lesser of both adds to the greater
    memory: float
    lesser: float


def window(problem: ConvProblem, columns: int) -> int:
    """Columns of dy that a strip of dx reads, at most."""
    return (columns - 1 + (problem.s - 1) * problem.dilation[1]) // problem.stride[1] + 1


def window_slices(problem: ConvProblem, slices: int) -> int:
    """Slices of dy that so many slices of dx meet, at most."""
    return (slices - 1 + (problem.t - 1) * problem.dilation_d) // problem.stride_d + 1


def row_groups(problem: ConvProblem) -> int:
    """Groups of as many rows of dx as the stride has."""
    top, stride = problem.padding[0], problem.stride[0]
    return (problem.h - 1 + top) // stride - top // stride + 1


def sums(problem: ConvProblem, columns: int, slices: int) -> int:
    """Sums of a thread: those of all groups of rows that a row of dy reaches."""
    return live_rows(problem) * problem.stride[0] * slices * columns


def registers_needed(problem: ConvProblem, columns: int, slices: int) -> int:
    """Registers that a thread needs: one filter, sums, two windows, and about 45 for addresses."""
    windows = 2 * window(problem, columns) * window_slices(problem, slices)
    return problem.taps + sums(problem, columns, slices) + windows + 45


class DepthwiseInput(TimedAlgorithm):
    """Rows of dy pass through registers once; FP32 FMAs in direct order. Any stride, several filters a channel."""

    name = "depthwise_input"
    paper = PAPER
    precision = "ieee"
    direct_order = True
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*depthwise_limits(problem, "dgrad"), *tap_limits(problem)]
        least = _shared_bytes(problem, 1)
        if not reasons and not _usable(problem):
            reasons.append(
                f"a filter of {problem.window} with dilation={problem.dilation} and stride={problem.stride} needs "
                f"{sums(problem, problem.stride[1], problem.stride_d)} sums and more, too many for a thread's registers"
            )
        elif not reasons and least > target.shared_per_block:
            reasons.append(
                f"{problem.group_k} filters of {problem.window} a channel take {least} bytes of shared memory, "
                f"and a block has {target.shared_per_block}"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DepthwiseInputConfig]]:
        channels = channel_tile(problem.c) if problem.layout == "NHWC" else 1
        while _shared_bytes(problem, channels) > min(48 * 1024, target.shared_per_block) and channels > 1:
            channels = ceil_div(channels, 2)
        threads, ring = threads_of(channels), live_rows(problem) <= MOST_UNROLLED
        found = {}
        for columns, slices in _usable(problem):
            fitting = blocks_that_fit(registers_needed(problem, columns, slices), threads, target)
            for rows in sorted({min(rows, row_groups(problem)) for rows in ROWS}):
                config = DepthwiseInputConfig(columns, rows, ring, channels, threads, fitting, slices)
                found[config] = _cycles(problem, config, target)
        return by_time((cycles, config) for config, cycles in found.items())

    def plan(self, problem: ConvProblem, config: DepthwiseInputConfig, target: Target) -> Plan:
        sizes = ("row_groups", row_groups(problem)), ("filter_pitch", _shared_bytes(problem, 1) // 4)
        arguments, shared = gradient_arguments(problem), _shared_bytes(problem, config.channels)
        constants, blocks = (*conv_constants(problem), *sizes), _blocks(problem, config)
        return Plan((self.launch(config, constants, arguments, blocks, shared),))


def _shared_bytes(problem: ConvProblem, channels: int) -> int:
    """Of the filters of so many channels, in NHWC; an odd number of floats each, so that lanes read different banks."""
    return 4 * channels * (problem.group_k * problem.taps | 1) if problem.layout == "NHWC" else 0


def _usable(problem: ConvProblem) -> list[tuple[int, int]]:
    """Widths of strips, and slices of them, that the registers allow. Widths are multiples of the stride, few in NCHW,
    where they lie far apart in memory, and by preference of four, which are stored at once."""
    return [(columns, slices) for slices in _slices(problem) for columns in _widths(problem, slices)]


def _slices(problem: ConvProblem) -> list[int]:
    """Slices of dx of a thread: one step of the stride, and several where they are not too many; of images 1."""
    step = problem.stride_d
    times = [min(times, ceil_div(problem.d, step)) for times in SLICES if step * times <= SLICES[-1]]
    several = {step * each for each in times}
    return sorted({step, *several}) if problem.is_volume else [1]


def _widths(problem: ConvProblem, slices: int) -> list[int]:
    step, nchw = problem.stride[1], problem.layout == "NCHW"
    widths = [step * times for times in (1, 2, 3, 4, 6, 8) if step * times <= max(8, step)]
    able = [
        c
        for c in widths
        if registers_needed(problem, c, slices) <= MOST_REGISTERS and sums(problem, c, slices) <= MOST_SUMS
    ]
    wide = [c for c in able if c >= 4 and (not nchw or c % 4 == 0)]
    return (wide[:1] if nchw else wide) or able[-1:]


def _blocks(problem: ConvProblem, config: DepthwiseInputConfig) -> int:
    strips = problem.n * ceil_div(problem.w, config.columns) * ceil_div(row_groups(problem), config.rows)
    strips *= ceil_div(problem.d, config.slices)
    return blocks_of(problem, strips, problem.c, config.channels, config.threads)


def _cycles(problem: ConvProblem, config: DepthwiseInputConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor's instructions and lines."""
    speeds = InputSpeeds.of(target)
    steps = min(config.rows, row_groups(problem)) + live_rows(problem) - 1
    loads = window(problem, config.columns) * window_slices(problem, config.slices) * problem.group_k
    products = problem.group_k * problem.taps * config.columns / problem.stride[1] * config.slices / problem.stride_d
    moved = 0 if config.ring else sums(problem, config.columns, config.slices)
    stored = problem.stride[0] * config.columns * config.slices
    if problem.layout == "NCHW" and problem.w % 4 == 0 and config.columns % 4 == 0:
        stored //= 4
    instructions = products + moved + 2 * loads + 3 * stored + speeds.beside
    if problem.group_k > 1:
        instructions += problem.group_k * problem.taps
    # In NCHW the lanes of a warp are a strip apart, and some of them in other rows.
    lines = 1.0
    if problem.layout == "NCHW":
        lines = max(4 * config.columns / 32, 32 / ceil_div(problem.w, config.columns))
    issue = instructions * 32 / (target.fma_lanes * speeds.issue)
    each = config.threads / 32 * max(issue, speeds.line * (loads + stored) * lines)

    def resident(blocks: int) -> float:
        return steps * max(blocks * each, speeds.latency) + speeds.start

    busy = busy_cycles(_blocks(problem, config), config.min_blocks, target, resident)
    return overlapped(busy, speeds.memory * problem.bytes / target.bytes_per_cycle, speeds.lesser)
