"""Several filters over images of one channel, or over each channel: every pixel is read once for all of its filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, log2
from typing import NamedTuple

from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.kernels.common.layers import conv_arguments, conv_constants, images_outermost, limits, one_channel
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, blocks_that_fit, busy_cycles, overlapped
from leanconv.plan import Plan, Target
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
#: each warp may have a segment of a row to itself.
SECTOR, CACHE_BYTES, LEAST_WHOLE = 32, 64 * 10**6, 256
THREADS = 128


@dataclass(frozen=True)
class SingleChannelConfig(Config):
    """A thread computes ``unit`` columns, ``rows`` rows of them, ``at_once`` at a time.

    A block applies filters in ``rounds``, one in each; in NHWC it has ``lanes`` threads side by side, and each of them
    ``filters`` adjacent filters, in each round. ``held``: weights stay in registers. ``prefetch``: rows are loaded
    while those before them are in use. ``whole_sectors``: each warp has a segment of a row to itself, and stores what
    begins and ends with a sector of memory; else warps have adjacent columns, and share sectors where rows end in one.
    """

    unit: int
    at_once: int
    rows: int
    filters: int
    lanes: int
    rounds: int
    held: bool
    prefetch: bool
    whole_sectors: bool
    threads: int
    min_blocks: int


@dataclass(frozen=True)
class SingleSpeeds(Speeds):
    """Of one multiprocessor of an H200, and of its memory."""

    #: the share of the peak that instructions are issued at; cycles from the load of rows to their use, and before the
    #: first row and after the last
    issue: float
    row: float
    start: float
    #: how much of the lesser of memory and arithmetic adds to the greater; the time of memory relative to what it
    #: should be where outputs leave the L2
    lesser: float
    memory: float


class Window(NamedTuple):
    """The pixels that a thread reads: ``width`` of ``height`` rows, of which a step brings ``fresh`` ones."""

    width: int
    height: int
    fresh: int


def window(problem: ConvProblem, unit: int, at_once: int) -> Window:
    """The window of a thread of ``unit`` x ``at_once`` outputs."""
    width = (unit - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1
    height = (at_once - 1) * problem.stride[0] + (problem.r - 1) * problem.dilation[0] + 1
    return Window(width, height, min(height, at_once * problem.stride[0]))


def registers_needed(problem: ConvProblem, config: SingleChannelConfig) -> int:
    """Registers that a thread needs: windows, of which some rows are moved or loaded, sums, weights, and addresses."""
    width, height, fresh = window(problem, config.unit, config.at_once)
    pixels = width * (height + (fresh if config.prefetch else 0))
    weights = problem.r * problem.s * config.filters if config.held else 6 + 2 * config.filters
    return pixels + pixels // 6 + config.unit * config.at_once * config.filters + weights + 20


def as_nchw(problem: ConvProblem) -> ConvProblem:
    """The same layer in NCHW where its tensors have the same order in memory: one channel, one filter."""
    same = problem.layout == "NHWC" and problem.c == problem.k == 1
    return replace(problem, layout="NCHW") if same else problem


class SingleChannel(TimedAlgorithm):
    """A rolling window of rows in registers, to which all filters of the channel are applied; FP32 FMAs in order."""

    name = "single_channel"
    paper = "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), special case"
    precision = "ieee"
    direct_order = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "fprop", dtypes=GPU_LAYERS), *images_outermost(problem), *one_channel(problem)]
        if problem.group_c == 1 and problem.group_k == 1 and problem.groups > 1:
            reasons.append(f"{problem.c} channels with one filter each: it computes several filters a channel")
        if problem.r * problem.s > MOST_TAPS:
            reasons.append(f"the filter has {problem.r}x{problem.s} taps, and its code is unrolled for {MOST_TAPS}")
        elif not reasons and not _shapes(as_nchw(problem)):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} with dilation={problem.dilation} reads a window too large for "
                "the registers of a thread"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, SingleChannelConfig]]:
        layer = as_nchw(problem)
        timed = []
        for shape in _shapes(layer):
            fitting = blocks_that_fit(registers_needed(layer, shape), shape.threads, target)
            for steps in sorted({min(steps, ceil_div(layer.p, shape.at_once)) for steps in STEPS}):
                config = replace(shape, rows=steps * shape.at_once, min_blocks=fitting)
                timed.append((_cycles(layer, config, target), config))
        return by_time(timed)

    def plan(self, problem: ConvProblem, config: SingleChannelConfig, target: Target) -> Plan:
        layer = as_nchw(problem)
        constants = (*conv_constants(layer), ("filter_pitch", _pitch(layer, config)), ("units", _units(layer, config)))
        grid, shared = _blocks(layer, config), _shared_bytes(layer, config)
        return Plan((self.launch(config, constants, conv_arguments(problem), grid, shared),))


def _shapes(problem: ConvProblem) -> list[SingleChannelConfig]:
    """What a thread computes in a step, as far as its registers go; rows and blocks are filled in later."""
    shapes = _nhwc_shapes(problem) if problem.layout == "NHWC" else _nchw_shapes(problem)
    return [shape for shape in shapes if registers_needed(problem, shape) <= MOST_REGISTERS]


def _nchw_shapes(problem: ConvProblem) -> Iterator[SingleChannelConfig]:
    unit, many = gcd(problem.q, 4), problem.group_k >= 4 and problem.q >= LEAST_WHOLE
    # with units of four, short bands serve as well
    whole = many and unit < 4 and _shares_sectors(problem) and _leaves_cache(problem)
    for at_once in _rows_at_once(problem, unit, 16):
        for rounds, prefetch in product(_rounds(problem), (False, True)):
            held = rounds == 1 and problem.r * problem.s <= MOST_HELD
            yield SingleChannelConfig(unit, at_once, at_once, 1, 1, rounds, held, prefetch, whole, THREADS, 1)


def _nhwc_shapes(problem: ConvProblem) -> Iterator[SingleChannelConfig]:
    filters = gcd(problem.group_k, 4)
    lanes = min(MOST_LANES, problem.k // filters)
    # All filters at the same time, or half of them as long as threads side by side store 64 bytes.
    # Explored (H200, 57a40dc): with 32 bytes a pixel, 4096 x 4096 pixels with 32 filters took 1755 us instead of 590.
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
            for way in ways:
                yield SingleChannelConfig(unit, at_once, at_once, filters, *way, False, THREADS, 1)


def _shares_sectors(problem: ConvProblem) -> bool:
    """Whether rows of outputs, one after the other in memory, end within sectors."""
    return problem.q % (SECTOR // item_bytes(problem.dtype)) != 0


def _leaves_cache(problem: ConvProblem) -> bool:
    """Whether outputs go to memory while the kernel runs: before the L2 could join what warps store of a sector."""
    return item_bytes(problem.dtype) * problem.n * problem.k * problem.p * problem.q > CACHE_BYTES


def _rows_at_once(problem: ConvProblem, outputs: int, most: int) -> list[int]:
    """Rows of outputs for a step, of which each gives ``outputs``: a few more than one, ``most`` outputs together."""
    found = [rows for rows in (1, 2, 4, 8) if rows * outputs <= most and rows <= max(1, problem.p)]
    return found[-3:]


def _rounds(problem: ConvProblem) -> list[int]:
    """Filters of a block in NCHW: all of a channel, or a half or a quarter of them, as far as shared memory goes."""
    most = max(1, SHARED_BYTES // (4 * _weights(problem)))
    return sorted({min(ceil_div(problem.group_k, cut), most) for cut in (1, 2, 4)}, reverse=True)


def _weights(problem: ConvProblem) -> int:
    """Floats of a filter, its bias and its scale in shared memory; in NCHW whole vectors."""
    floats = problem.r * problem.s + problem.bias + problem.scale
    return floats if problem.layout == "NHWC" else ceil_div(floats, 4) * 4


def _pitch(problem: ConvProblem, config: SingleChannelConfig) -> int:
    """Floats in shared memory from filter to filter in NCHW, from tap to tap in NHWC."""
    filters = config.lanes * config.filters * config.rounds
    return filters if problem.layout == "NHWC" else _weights(problem)


def _shared_bytes(problem: ConvProblem, config: SingleChannelConfig) -> int:
    return 4 * config.lanes * config.filters * config.rounds * _weights(problem)


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
        return blocks * ceil_div(problem.k, config.lanes * config.filters * config.rounds)
    return blocks * problem.c * ceil_div(problem.group_k, config.rounds)


def _cycles(problem: ConvProblem, config: SingleChannelConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor.

    Its warps pass a step in the time of their instructions, or of their loads and stores, but not before the next rows
    have come. The memory is slower the further neighbouring warps drift apart, which write to the same lines.
    """
    item, taps, nhwc = item_bytes(problem.dtype), problem.r * problem.s, problem.layout == "NHWC"
    speeds, (width, height, fresh) = SingleSpeeds.of(target), window(problem, config.unit, config.at_once)
    vector = gcd(gcd(problem.w, config.unit * problem.stride[1]), 4) if problem.c == 1 or not nhwc else 1
    loads = fresh * ceil_div(width, vector)
    weights = 0 if config.held else taps if nhwc else ceil_div(taps, 4)
    outputs = config.unit * config.at_once * config.filters
    stores = config.at_once * (config.unit if nhwc else 1)
    each = taps * outputs + weights + 4 * stores + (outputs if item < 4 else 0) + 8
    instructions = config.rounds * each + 2 * loads + width * height + 20
    accesses = config.rounds * (4 * weights + outputs * item // 4) + loads * (1 if nhwc else vector)
    steps = ceil_div(min(config.rows, problem.p), config.at_once)

    def resident(blocks: int) -> float:
        issue = blocks * config.threads * instructions / (target.fma_lanes * speeds.issue)
        moved = blocks * config.threads / 32 * accesses
        waiting = speeds.row if config.prefetch else speeds.row + instructions
        return steps * max(issue, moved, waiting) + speeds.start + 40 * height

    busy = busy_cycles(_blocks(problem, config), config.min_blocks, target, resident)
    pixels, written = problem.c * problem.h * problem.w, problem.k * problem.p * problem.q
    memory = item * problem.n * (pixels + written * (2 if problem.accumulate else 1)) / target.bytes_per_cycle
    if _leaves_cache(problem):
        memory *= speeds.memory + _drift(problem, config) * log2(1 + config.rows * config.rounds / 8)
    if nhwc and config.unit == 4:
        # what a store writes of a line lies four columns apart
        memory *= 1 + 5 / (config.lanes * config.filters * item)
    return overlapped(busy, memory, speeds.lesser)


def _drift(problem: ConvProblem, config: SingleChannelConfig) -> float:
    """By how much the memory slows down when neighbours run twice as long."""
    if problem.layout == "NHWC":
        return 0.03
    if not _shares_sectors(problem):
        return 0.01
    return 0.04 if config.whole_sectors else 0.24 / config.unit
