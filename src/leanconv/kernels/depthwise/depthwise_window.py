"""Depthwise convolution: one filter, or several, for each channel; every row of the image is read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from leanconv.kernels.contract import Config, ceil_div, variant
from leanconv.kernels.cost import Speeds, blocks_that_fit, busy_cycles, overlapped
from leanconv.kernels.depthwise.strategy import (
    MOST_REGISTERS,
    DepthwiseStrategy,
    blocks_of,
    bytes_moved,
    channel_tile,
    deep,
    live_rows,
    slices_of,
    tap_limits,
    threads_of,
    window,
)
from leanconv.plan import Constants, Target
from leanconv.problem import ConvProblem

#: Outputs of a row that a thread computes, and rows that it walks down or loads at once.
COLUMNS = {"NCHW": (4,), "NHWC": (4, 7, 8, 14)}
WALKED_ROWS, WHOLE_ROWS = (7, 14, 28, 56), (1, 2, 3, 4, 7)
#: Rows of outputs that a walking thread sums in an iteration, and rows of the image that are in flight meanwhile: fewer
#: where a thread computes several slices. Explored (H200, 1dea0fb1): 3x3x3 filters on 54 x 13 x 40 x 40 took 35.5 µs
#: with two of each, 38.7 with three rows an iteration; with bands of 14 rows 40 and 47.
UNROLLED, AHEAD, AHEAD_OF_SLICES = 2, 2, 1
#: Most taps of the layers that the speeds were fitted to: what it takes to load the filter is in them. Explored
#: (H200, 1926f54): five layers of longer ones took 1.1 to 2.1 times as long as these say in NCHW.
FITTED_TAPS = 49


@dataclass(frozen=True)
class DepthwiseConfig(Config):
    """A thread computes strips of ``columns`` outputs, ``rows`` rows of them, a block of ``threads``.

    In NHWC a block has ``channels`` neighbouring filters. A thread walks down its rows, or with ``whole`` loads all
    that it reads at once. Of volumes it computes strips of ``slices`` slices.
    """

    columns: int
    rows: int
    whole: bool
    channels: int
    threads: int
    min_blocks: int
    slices: int = 1


@dataclass(frozen=True)
class WindowSpeeds(Speeds):
    """Of threads that load all at once (``whole``), or walk down (``walked``).

    Fitted to 34 layers in both layouts, 1048 configurations. Explored (H200, 51895f6): the mean error is 9 % beside a
    launch; the first choice is 2.6 % behind the best in the mean, 20 % at worst.
    """

    #: the share of the peak at which instructions are issued; instructions of a thread (walking: of each row) besides
    #: its arithmetic; cycles from the load of a row to its use
    issue: float
    beside: float
    latency: float
    #: the time of memory, of memory with several filters a channel, and of a line of the L1, relative to what they
    #: should take
    memory: float
    several: float
    line: float
    #: how much of the lesser of memory and arithmetic adds to the greater, and how much more where one block is alone
    #: on a multiprocessor; cycles before the first row is there
    lesser: float
    alone: float
    start: float


def loaded_rows(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Rows of the image that a thread loads."""
    if config.whole:
        return (config.rows - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
    return (min(config.rows, problem.p) + live_rows(problem) - 1) * problem.stride[0]


def registers_needed(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Registers of a thread: windows and sums; a walking one has the whole filter, and both need some for addresses."""
    width = window(problem, config.columns) * deep(problem, config.slices)
    if config.whole:
        return loaded_rows(problem, config) * width + config.rows * config.slices * config.columns + problem.s + 40
    sums = (live_rows(problem) - 1 + UNROLLED) * config.slices * config.columns
    return problem.taps + sums + (1 + _ahead(config)) * width + 25


def _ahead(config: DepthwiseConfig) -> int:
    return AHEAD if config.slices == 1 else AHEAD_OF_SLICES


class DepthwiseWindow(DepthwiseStrategy):
    """Rows of the image pass through registers once."""

    strategy = "window"
    volumes = True

    def limits(self, problem: ConvProblem, target: Target) -> list[str]:
        if tap_limits(problem) or any(self.candidates(problem, target)):
            return tap_limits(problem)
        return [
            f"a filter of {problem.window} with dilation={problem.dilation} reaches {live_rows(problem)} "
            "rows, too many for the registers of a thread"
        ]

    def candidates(self, problem: ConvProblem, target: Target) -> Iterator[DepthwiseConfig]:
        channels = channel_tile(problem.k) if problem.layout == "NHWC" else 1
        threads = threads_of(channels)
        for whole, rows_of in ((True, WHOLE_ROWS), (False, WALKED_ROWS)):
            for columns in COLUMNS[problem.layout]:
                sizes = product(sorted({min(rows, problem.p) for rows in rows_of}), slices_of(problem))
                for rows, slices in sizes:
                    config = DepthwiseConfig(columns, rows, whole, channels, threads, 1, slices)
                    registers = registers_needed(problem, config)
                    if registers <= MOST_REGISTERS:
                        yield variant(config, min_blocks=blocks_that_fit(registers, threads, target))

    def blocks(self, problem: ConvProblem, config: DepthwiseConfig) -> int:
        strips = problem.n * ceil_div(problem.q, config.columns) * ceil_div(problem.p, config.rows)
        strips *= ceil_div(problem.z, config.slices)
        return blocks_of(problem, strips, problem.k, config.channels, config.threads)

    def shared_bytes(self, problem: ConvProblem, config: DepthwiseConfig) -> int:
        return 4 * config.channels * _pitch(problem) if problem.layout == "NHWC" else 0

    def constants(self, problem: ConvProblem, config: DepthwiseConfig) -> Constants:
        return ("unrolled", UNROLLED), ("ahead", _ahead(config)), ("filter_pitch", _pitch(problem))

    def cycles(self, problem: ConvProblem, config: DepthwiseConfig, target: Target) -> float:
        """That of the memory, or of the busiest multiprocessor's instructions and lines."""
        speed, nchw = WindowSpeeds.of(target, "whole" if config.whole else "walked"), problem.layout == "NCHW"
        rows, filter_taps = min(config.rows, problem.p), problem.taps
        # rows of the input in one of the image, and of outputs
        read, slices = deep(problem, config.slices), config.slices
        height, width = loaded_rows(problem, config), window(problem, config.columns)
        loads, stores = width, config.columns
        if nchw and problem.w % 4 == 0 and config.columns * problem.stride[1] % 4 == 0:
            loads = ceil_div(width + -problem.padding[2] % 4, 4)
        if nchw and problem.q % 4 == 0:
            stores = ceil_div(config.columns, 4)
        loads, stores = loads * read, stores * slices
        moved = height * loads * _lines(problem, config, problem.w, *problem.stride)
        moved += rows * stores * _lines(problem, config, problem.q, 1, 1)
        taps = filter_taps * config.columns * slices
        if config.whole:
            steps, instructions = 1, float(taps * rows + 2 * rows * config.columns * slices)
        else:
            steps, instructions = height, taps * (height // problem.stride[0]) + 3 * rows * stores
        instructions += 2 * height * loads + speed.beside * steps
        if nchw and filter_taps > FITTED_TAPS:
            # a warp loads the filters of all output channels that its lanes have
            in_channel = ceil_div(problem.q, config.columns) * ceil_div(problem.p, config.rows)
            in_channel *= ceil_div(problem.z, slices)
            instructions += filter_taps
            moved += filter_taps * (1 + 31 / in_channel)
        warps = config.threads / 32
        each = warps * max(instructions * 32 / (target.fma_lanes * speed.issue), speed.line * moved)

        def resident(blocks: int) -> float:
            return max(blocks * each, steps * speed.latency) + speed.start

        busy = busy_cycles(self.blocks(problem, config), config.min_blocks, target, resident)
        slower = speed.memory if problem.group_k == 1 else speed.several
        memory = slower * bytes_moved(problem) / target.bytes_per_cycle
        return overlapped(busy, memory, speed.lesser + speed.alone / config.min_blocks)


def _pitch(problem: ConvProblem) -> int:
    """Floats from one filter to the next in shared memory: an odd number, so that lanes read different banks."""
    return problem.taps | 1


def _lines(problem: ConvProblem, config: DepthwiseConfig, width: int, down: int, right: int) -> float:
    """Lines of the L1 that an access of a warp touches in rows of ``width``, its outputs ``down`` and ``right`` apart.

    In NCHW its lanes are strips of the same row and of bands further down.
    """
    if problem.layout == "NHWC":
        return 1.0
    strips = ceil_div(problem.q, config.columns)
    bands, lane = max(1.0, 32 / strips), config.columns * right * 4 / 128
    return min(bands * (min(32, strips) * lane + 0.5), bands * config.rows * down * width * 4 / 128 + 0.5)
