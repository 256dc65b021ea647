"""Several filters over images of one channel, or over each channel: every pixel is read once for all of its filters."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, log2

from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.kernels.depthwise.depthwise_window import blocks_that_fit, one_channel
from leanconv.kernels.simt.tiles import conv_arguments, forward_limits, images_outermost
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Most taps of a filter, which are unrolled code, and most registers that a thread may need.
MOST_TAPS, MOST_REGISTERS = 128, 200
#: Weights of a thread's filters up to which they stay in its registers.
MOST_HELD = 100
#: Bytes of filters in a block's shared memory, and filters side by side in a block of NHWC.
SHARED_BYTES, MOST_LANES = 32 * 1024, 32
#: Steps in which a thread walks down.
STEPS = (1, 2, 4, 8)
#: Bytes that memory writes as a whole, outputs that leave an L2 of 50 MB while the kernel runs, and columns from which
#: each warp may have a part of a row to itself.
SECTOR, CACHE_BYTES, LEAST_WHOLE = 32, 64 * 10**6, 256
THREADS = 128
#: The share of the peak that instructions are issued at, cycles from the load of rows to their use, cycles before the
#: first row and after the last.
BEST_SHARE, ROW_CYCLES, START_CYCLES = 0.88, 800, 1500


@dataclass(frozen=True)
class SingleChannelConfig(Config):
    """A thread computes ``unit`` columns, ``rows`` rows of them, ``at_once`` at a time.

    A block applies ``turns`` filters one after the other; in NHWC it has ``lanes`` threads side by side, and each of
    them ``filters`` adjacent filters, in each turn. ``held``: weights stay in registers. ``prefetch``: rows are loaded
    while those before them are in use. ``whole_sectors``: each warp has a part of a row to itself, and stores what
    begins and ends with a sector of memory; else warps have adjacent columns, and share sectors where rows end within
    one.
    """

    unit: int
    at_once: int
    rows: int
    filters: int
    lanes: int
    turns: int
    held: bool
    prefetch: bool
    whole_sectors: bool
    threads: int
    min_blocks: int


@dataclass(frozen=True)
class Window:
    """The pixels that a thread of ``unit`` x ``at_once`` outputs sees: ``width`` of ``height`` rows, of which a step
    brings ``fresh`` ones."""

    width: int
    height: int
    fresh: int


def window(problem: ConvProblem, unit: int, at_once: int) -> Window:
    """The window of a thread."""
    width = (unit - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1
    height = (at_once - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
    return Window(width, height, min(height, at_once * problem.stride[0]))


def registers_needed(problem: ConvProblem, config: SingleChannelConfig) -> int:
    """Registers that a thread needs: windows, of which a part is moved or loaded, sums, weights, and addresses."""
    seen = window(problem, config.unit, config.at_once)
    pixels = seen.width * (seen.height + (seen.fresh if config.prefetch else 0))
    weights = problem.r * problem.s * config.filters if config.held else 6 + 2 * config.filters
    return pixels + pixels // 6 + config.unit * config.at_once * config.filters + weights + 20


def as_planes(problem: ConvProblem) -> ConvProblem:
    """The same layer in NCHW where its tensors lie in memory alike: one channel, one filter."""
    alike = problem.layout == "NHWC" and problem.c == problem.k == 1
    return replace(problem, layout="NCHW") if alike else problem


class SingleChannel(TimedAlgorithm):
    """A rolling window of rows in registers, to which all filters of the channel are applied; FP32 FMAs in direct
    order, no workspace."""

    name = "single_channel"
    paper = "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), special case"
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*forward_limits(problem, GPU_LAYERS), *images_outermost(problem), *one_channel(problem)]
        if problem.group_c == 1 and problem.group_k == 1 and problem.groups > 1:
            reasons.append(f"{problem.c} channels with one filter each: it computes several filters a channel")
        if problem.r * problem.s > MOST_TAPS:
            reasons.append(f"the filter has {problem.r}x{problem.s} taps, and its code is unrolled for {MOST_TAPS}")
        elif not reasons and not _shapes(as_planes(problem)):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} with dilation={problem.dilation} sees a window that is too large "
                "for the registers of a thread"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, SingleChannelConfig]]:
        layer = as_planes(problem)
        timed = []
        for shape in _shapes(layer):
            fitting = blocks_that_fit(registers_needed(layer, shape), shape.threads, target)
            for steps in sorted({min(steps, ceil_div(layer.p, shape.at_once)) for steps in STEPS}):
                config = replace(shape, rows=steps * shape.at_once, min_blocks=fitting)
                timed.append((_cycles(layer, config, target), config))
        return by_time(timed)

    def order_of_sums(self, problem: ConvProblem, config: SingleChannelConfig) -> Hashable:
        return ()  # one chain of multiply-adds, in direct order

    def plan(self, problem: ConvProblem, config: SingleChannelConfig, target: Target) -> Plan:
        layer = as_planes(problem)
        launch = Launch(
            header="kernels/direct/single_channel.cuh",
            function="leanconv::single_channel",
            problem=conv_constants(layer),
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=_blocks(layer, config),
            block=config.threads,
            shared_bytes=_shared_bytes(layer, config),
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))


def _shapes(problem: ConvProblem) -> list[SingleChannelConfig]:
    """What a thread computes in a step, as far as its registers go; rows and blocks are filled in later."""
    nhwc = problem.layout == "NHWC"
    shapes = [*(_nhwc_shapes(problem) if nhwc else _nchw_shapes(problem))]
    return [shape for shape in shapes if registers_needed(problem, shape) <= MOST_REGISTERS]


def _nchw_shapes(problem: ConvProblem) -> Iterator[SingleChannelConfig]:
    unit, many = gcd(problem.q, 4), problem.group_k >= 4 and problem.q >= LEAST_WHOLE
    # with units of four, short bands serve as well (4096 x 4096 pixels, 32 filters of 5x5: 653 us and 644)
    whole = many and unit < 4 and _shares_sectors(problem) and _leaves_cache(problem)
    for at_once in _rows_at_once(problem, unit, 16):
        for turns, prefetch in product(_turns(problem), (False, True)):
            held = turns == 1 and problem.r * problem.s <= MOST_HELD
            yield SingleChannelConfig(unit, at_once, at_once, 1, 1, turns, held, prefetch, whole, THREADS, 1)


def _nhwc_shapes(problem: ConvProblem) -> Iterator[SingleChannelConfig]:
    filters = gcd(problem.group_k, 4)
    lanes = min(MOST_LANES, problem.k // filters)
    # All filters at the same time, or half of them as long as threads side by side store 64 bytes: with 32 a pixel,
    # 4096 x 4096 pixels with 32 filters took 1755 us instead of 590.
    least = ceil_div(2 * SECTOR, filters * item_bytes(problem.dtype)) if problem.groups == 1 else 2 * lanes
    ways = [(lanes, 1, False, False)]
    if lanes % 2 == 0 and lanes // 2 >= least:
        ways.append((lanes // 2, 2, False, False))
    if problem.r * problem.s * filters <= MOST_HELD:
        ways += [(lanes, 1, True, False), (lanes, 1, True, True)]
    # columns one by one suit the smallest filters alone
    units = {1, gcd(problem.q, 4)} if problem.r * problem.s <= 9 else {gcd(problem.q, 4)}
    for unit in sorted(units):
        for at_once in _rows_at_once(problem, unit, 8)[-2:]:
            for side, turns, held, prefetch in ways:
                yield SingleChannelConfig(
                    unit, at_once, at_once, filters, side, turns, held, prefetch, False, THREADS, 1
                )


def _shares_sectors(problem: ConvProblem) -> bool:
    """Whether rows of outputs, one after the other in memory, end within sectors."""
    return problem.q % (SECTOR // item_bytes(problem.dtype)) != 0


def _leaves_cache(problem: ConvProblem) -> bool:
    """Whether outputs go to memory while the kernel runs: before the L2 could join the parts of sectors."""
    return item_bytes(problem.dtype) * problem.n * problem.k * problem.p * problem.q > CACHE_BYTES


def _rows_at_once(problem: ConvProblem, outputs: int, most: int) -> list[int]:
    """Rows of outputs for a step, of which each gives ``outputs``: a few more than one, ``most`` outputs together."""
    found = [rows for rows in (1, 2, 4, 8) if rows * outputs <= most and rows <= max(1, problem.p)]
    return found[-3:]


def _turns(problem: ConvProblem) -> list[int]:
    """Filters of a block in NCHW: all of a channel, or parts of them, as far as shared memory goes."""
    most = max(1, SHARED_BYTES // (4 * _pitch(problem)))
    return sorted({min(ceil_div(problem.group_k, part), most) for part in (1, 2, 4)}, reverse=True)


def _pitch(problem: ConvProblem) -> int:
    """Floats of a filter and its bias in shared memory."""
    return ceil_div(problem.r * problem.s + problem.bias, 4) * 4


def _shared_bytes(problem: ConvProblem, config: SingleChannelConfig) -> int:
    if problem.layout == "NHWC":
        return 4 * config.lanes * config.filters * config.turns * (problem.r * problem.s + problem.bias)
    return 4 * config.turns * _pitch(problem)


def _units(problem: ConvProblem, config: SingleChannelConfig) -> int:
    """Threads of a row of outputs."""
    if not config.whole_sectors:
        return problem.q // config.unit
    seam = SECTOR // item_bytes(problem.dtype)
    return 32 * ceil_div(problem.q + seam, 32 * config.unit - seam)


def _blocks(problem: ConvProblem, config: SingleChannelConfig) -> int:
    positions = problem.n * _units(problem, config) * ceil_div(problem.p, config.rows)
    blocks = ceil_div(positions, config.threads // config.lanes)
    if problem.layout == "NHWC":
        return blocks * ceil_div(problem.k, config.lanes * config.filters * config.turns)
    return blocks * problem.c * ceil_div(problem.group_k, config.turns)


def _cycles(problem: ConvProblem, config: SingleChannelConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor.

    Its warps pass a step in the time of their instructions, or of their loads and stores, but not before the next rows
    have come. The memory is slower the further neighbouring warps drift apart, which write parts of the same lines.
    """
    item, taps, nhwc = item_bytes(problem.dtype), problem.r * problem.s, problem.layout == "NHWC"
    seen = window(problem, config.unit, config.at_once)
    vector = gcd(gcd(problem.w, config.unit * problem.stride[1]), 4) if problem.c == 1 or not nhwc else 1
    loads = seen.fresh * ceil_div(seen.width, vector)
    weights = 0 if config.held else taps if nhwc else ceil_div(taps, 4)
    outputs = config.unit * config.at_once * config.filters
    stores = config.at_once * (config.unit if nhwc else 1)
    turn = taps * outputs + weights + 4 * stores + (outputs if item < 4 else 0) + 8
    instructions = config.turns * turn + 2 * loads + seen.width * seen.height + 20
    accesses = config.turns * (4 * weights + outputs * item // 4) + loads * (1 if nhwc else vector)
    steps = ceil_div(min(config.rows, problem.p), config.at_once)

    def cycles(blocks: int) -> float:
        issue = blocks * config.threads * instructions / (target.fma_lanes * BEST_SHARE)
        moved = blocks * config.threads / 32 * accesses
        waiting = ROW_CYCLES if config.prefetch else ROW_CYCLES + instructions
        return steps * max(issue, moved, waiting) + START_CYCLES + 40 * seen.height

    rounds, rest = divmod(ceil_div(max(1, _blocks(problem, config)), target.multiprocessors), config.min_blocks)
    busy = rounds * cycles(config.min_blocks) + (cycles(rest) if rest else 0)
    pixels, written = problem.c * problem.h * problem.w, problem.k * problem.p * problem.q
    memory = item * problem.n * (pixels + written * (2 if problem.accumulate else 1)) / target.bytes_per_cycle
    if _leaves_cache(problem):
        memory *= 1.03 + _drift(problem, config) * log2(1 + config.rows * config.turns / 8)
    if nhwc and config.unit == 4:
        # four columns apart, the parts of a line that a store writes
        memory *= 1 + 5 / (config.lanes * config.filters * item)
    return max(busy, memory) + 0.15 * min(busy, memory)


def _drift(problem: ConvProblem, config: SingleChannelConfig) -> float:
    """By how much the memory slows down when neighbours are twice as long under way."""
    if problem.layout == "NHWC":
        return 0.03
    if not _shares_sectors(problem):
        return 0.01
    return 0.04 if config.whole_sectors else 0.24 / config.unit
