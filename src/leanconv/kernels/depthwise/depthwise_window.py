"""Depthwise convolution: one filter, or several, for each channel; every row of the image is read once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.kernels.simt.tiles import conv_arguments, gradient_limits, images_outermost
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

PAPER = "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), for one channel"
#: Most taps of a filter, which a thread keeps in registers, and most registers that a thread may need.
MOST_TAPS = 81
MOST_REGISTERS = 200
#: Outputs of a row that a thread computes, and rows that it walks down or loads at once.
COLUMNS = {"NCHW": (4,), "NHWC": (4, 7, 8, 14)}
WALKED_ROWS = (7, 14, 28, 56)
WHOLE_ROWS = (1, 2, 3, 4, 7)
THREADS = 256
#: Rows of outputs that a walking thread sums a step, and rows of the image that are under way meanwhile.
TURNS, AHEAD = 2, 2


@dataclass(frozen=True)
class DepthwiseConfig(Config):
    """A thread computes strips of ``columns`` outputs, ``rows`` rows of them, a block of ``threads``.

    In NHWC a block has ``channels`` neighbouring filters. A thread walks down its rows, or with ``whole`` loads all
    that it sees at once.
    """

    columns: int
    rows: int
    whole: bool
    channels: int
    threads: int
    min_blocks: int


@dataclass(frozen=True)
class Speed:
    """Figures of the cost model.

    ``issue``: the share of the peak at which instructions are issued. ``beside``: instructions of a thread (walking:
    of each row) besides its arithmetic. ``latency``: cycles from the load of a row to its use. ``memory``, ``line``:
    the time of memory and of a line of the L1, relative to what they should take. ``lesser``: how much of the lesser
    of both adds to the greater; ``alone``: how much more where one block is alone on a multiprocessor. ``start``:
    cycles before the first row is there.
    """

    issue: float
    beside: float
    latency: float
    memory: float
    line: float
    lesser: float
    alone: float
    start: float


#: Fitted on an H200 to 34 layers in both layouts, 1048 configurations. The mean error is 9 % (beside 5 µs of a launch,
#: which are not counted); the first choice is 2.6 % behind the best in the mean, 20 % at worst.
WHOLE = Speed(0.524, 44, 148, 0.833, 0.661, 0.144, 0.605, 110)
WALKED = Speed(0.927, 27, 448, 0.981, 0.62, 0.256, 0.168, 2125)
#: Most taps of those layers: what it takes to load the filter is in the figures. Longer ones took 1.1 to 2.1 times as
#: long as these say in NCHW (five layers, H200), and 1.1 to 1.9 times with their loads counted.
FITTED_TAPS = 49


def live_rows(problem: ConvProblem) -> int:
    """Rows of outputs that one input row reaches, or lies between."""
    return (problem.r - 1) * problem.dilation[0] // problem.stride[0] + 1


def window(problem: ConvProblem, columns: int) -> int:
    """Pixels of an input row that a strip of outputs sees."""
    return (columns - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def seen_rows(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Rows of the image that a thread loads."""
    if config.whole:
        return (config.rows - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
    return (min(config.rows, problem.p) + live_rows(problem) - 1) * problem.stride[0]


def registers_needed(problem: ConvProblem, config: DepthwiseConfig) -> int:
    """Registers of a thread: windows and sums; a walking one has the whole filter, and both need some for addresses."""
    width = window(problem, config.columns)
    if config.whole:
        return seen_rows(problem, config) * width + config.rows * config.columns + problem.s + 40
    sums = (live_rows(problem) - 1 + TURNS) * config.columns
    return problem.r * problem.s + sums + (1 + AHEAD) * width + 25


def blocks_that_fit(registers: int, threads: int, target: Target) -> int:
    """Blocks that a multiprocessor holds: registers come in portions of 8 a thread, warps in fours."""
    warps = min(64, target.registers_per_multiprocessor // (ceil_div(registers, 8) * 8 * 32)) // 4 * 4
    return max(1, min(32, (32 * warps + 31) // threads))


def one_channel(problem: ConvProblem) -> list[str]:
    """Why kernels for one channel a group cannot run ``problem``."""
    several = problem.group_c != 1
    return [f"groups={problem.groups} of {problem.c} channels: a group has more than one channel"] if several else []


def one_channel_limits(problem: ConvProblem, taken: Sequence[str]) -> list[str]:
    """Why kernels for one channel a group cannot run ``problem`` as a forward convolution, of a gradient with reversed
    filters."""
    reasons = [*gradient_limits(problem, taken), *images_outermost(problem), *one_channel(problem)]
    if problem.group_c == 1 and problem.op == "dgrad" and (problem.stride != (1, 1) or problem.group_k != 1):
        reasons.append(
            f"op='dgrad' with stride={problem.stride} and {problem.group_k} filters a channel: it computes the "
            "gradient of layers of unit stride with one filter a channel"
        )
    return reasons


def as_convolution(problem: ConvProblem) -> ConvProblem:
    """The convolution that computes the problem; of a gradient with the filters reversed."""
    unit = problem.op == "dgrad" and problem.stride == (1, 1)
    return replace(problem.as_forward(), accumulate=problem.accumulate) if unit else problem


def channel_tile(count: int) -> int:
    """Channels of a block in NHWC: all, or as many as make whole tiles of whole warps where that is possible."""
    if count <= THREADS:
        return count
    for size in range(THREADS, 31, -32):
        if count % size == 0:
            return size
    return THREADS


class DepthwiseWindow(TimedAlgorithm):
    """Rows of the image pass through registers once; FP32 FMAs in direct order, no workspace. Forward and, for layers
    of unit stride, the gradient of the input."""

    name = "depthwise"
    strategy = "window"
    paper = PAPER
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = one_channel_limits(problem, GPU_LAYERS)
        if problem.r * problem.s > MOST_TAPS:
            reasons.append(f"the filter has {problem.r}x{problem.s} taps, and a thread keeps {MOST_TAPS} at most")
        elif not reasons and not any(_candidates(as_convolution(problem), target)):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} with dilation={problem.dilation} reaches {live_rows(problem)} "
                "rows, too many for the registers of a thread"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DepthwiseConfig]]:
        forward = as_convolution(problem)
        return by_time((_cycles(forward, config, target), config) for config in _candidates(forward, target))

    def order_of_sums(self, problem: ConvProblem, config: DepthwiseConfig) -> Hashable:
        return ()  # one chain of multiply-adds, in direct order

    def plan(self, problem: ConvProblem, config: DepthwiseConfig, target: Target) -> Plan:
        forward = as_convolution(problem)
        constants = (*conv_constants(forward), ("reversed", problem.op == "dgrad"))
        shared = 4 * config.channels * (problem.r * problem.s | 1) if problem.layout == "NHWC" else 0
        launch = Launch(
            header="kernels/depthwise/depthwise_window.cuh",
            function="leanconv::depthwise_window",
            problem=constants,
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=_blocks(forward, config),
            block=config.threads,
            shared_bytes=shared,
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))


def _candidates(problem: ConvProblem, target: Target) -> Iterator[DepthwiseConfig]:
    channels = channel_tile(problem.k) if problem.layout == "NHWC" else 1
    threads = ceil_div(channels * max(1, THREADS // channels), 32) * 32
    for whole, rows_of in ((True, WHOLE_ROWS), (False, WALKED_ROWS)):
        for columns in COLUMNS[problem.layout]:
            for rows in sorted({min(rows, problem.p) for rows in rows_of}):
                config = DepthwiseConfig(columns, rows, whole, channels, threads, 1)
                registers = registers_needed(problem, config)
                if registers <= MOST_REGISTERS:
                    yield replace(config, min_blocks=blocks_that_fit(registers, threads, target))


def bytes_moved(problem: ConvProblem) -> int:
    """Bytes that one filter after the other reads and writes: in NCHW each reads its channel anew.

    8 and 32 filters of 1x1 on 4096 x 4096 pixels took 1.05 times the time of these bytes, in NHWC 1.25 times (H200).
    """
    reads = problem.group_k if problem.layout == "NCHW" else 1
    pixels, outputs = reads * problem.c * problem.h * problem.w, problem.k * problem.p * problem.q
    return item_bytes(problem.dtype) * problem.n * (pixels + outputs)


def _blocks(problem: ConvProblem, config: DepthwiseConfig) -> int:
    parts = problem.n * ceil_div(problem.q, config.columns) * ceil_div(problem.p, config.rows)
    if problem.layout == "NHWC":
        return ceil_div(problem.k, config.channels) * ceil_div(parts, config.threads // config.channels)
    return ceil_div(parts * problem.k, config.threads)


def _lines(problem: ConvProblem, config: DepthwiseConfig, width: int, down: int, right: int) -> float:
    """Lines of the L1 that an access of a warp touches in rows of ``width``, its outputs ``down`` and ``right`` apart.

    In NCHW its lanes are strips of the same row and of bands further down.
    """
    if problem.layout == "NHWC":
        return 1.0
    strips = ceil_div(problem.q, config.columns)
    bands, lane = max(1.0, 32 / strips), config.columns * right * 4 / 128
    return min(bands * (min(32, strips) * lane + 0.5), bands * config.rows * down * width * 4 / 128 + 0.5)


def _cycles(problem: ConvProblem, config: DepthwiseConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor's instructions and lines."""
    speed = WHOLE if config.whole else WALKED
    rows = min(config.rows, problem.p)
    height, width = seen_rows(problem, config), window(problem, config.columns)
    loads, stores = width, config.columns
    if problem.layout == "NCHW" and problem.w % 4 == 0 and config.columns * problem.stride[1] % 4 == 0:
        loads = ceil_div(width + -problem.padding[2] % 4, 4)
    if problem.layout == "NCHW" and problem.q % 4 == 0:
        stores = ceil_div(config.columns, 4)
    moved = height * loads * _lines(problem, config, problem.w, *problem.stride)
    moved += rows * stores * _lines(problem, config, problem.q, 1, 1)
    taps = problem.r * problem.s * config.columns
    if config.whole:
        steps, instructions = 1, float(taps * rows + 2 * rows * config.columns)
    else:
        steps, instructions = height, taps * (height // problem.stride[0]) + 3 * rows * stores
    instructions += 2 * height * loads + speed.beside * steps
    if problem.layout == "NCHW" and problem.r * problem.s > FITTED_TAPS:
        # a warp loads the filters of all planes that its lanes see
        in_plane = ceil_div(problem.q, config.columns) * ceil_div(problem.p, config.rows)
        instructions += problem.r * problem.s
        moved += problem.r * problem.s * (1 + 31 / in_plane)
    warps = config.threads / 32
    each = warps * max(instructions * 32 / (target.fma_lanes * speed.issue), speed.line * moved)

    def resident(blocks: int) -> float:
        return max(blocks * each, steps * speed.latency) + speed.start

    rounds, rest = divmod(ceil_div(max(1, _blocks(problem, config)), target.multiprocessors), config.min_blocks)
    busy = rounds * resident(config.min_blocks) + (resident(rest) if rest else 0)
    # several filters a channel are not in the fit
    slower = speed.memory if problem.group_k == 1 else 1.1
    memory = slower * bytes_moved(problem) / target.bytes_per_cycle
    lesser = speed.lesser + speed.alone / config.min_blocks
    return max(busy, memory) + lesser * min(busy, memory)
