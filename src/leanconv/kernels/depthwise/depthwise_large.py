"""Depthwise convolution with large filters: planes of the image in shared memory, whole rows of taps at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.kernels.depthwise.depthwise_window import PAPER, as_convolution, blocks_that_fit, one_channel_limits
from leanconv.kernels.simt.tiles import conv_arguments
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Outputs of a row that a thread owns. In fours these are odd numbers, so that neighbouring strips lie in different
#: banks; a row of one or two strips may have them of any width.
COLUMNS = (28, 20, 12, 4)
MOST_COLUMNS = 32
#: Planes of a block; eight lanes read at once.
PLANES = (1, 2, 4, 8, 16, 32)
#: Registers that a thread may have, and threads of a block.
MOST_REGISTERS = 160
LEAST_THREADS, MOST_THREADS = 64, 512
#: Blocks of a multiprocessor, on every architecture.
MOST_BLOCKS = 24
#: Rows of taps up to this length are code without a loop; longer ones are cut into segments, but where there is code
#: for each strip, of which there is then less than this many multiply-adds.
MOST_TAPS, SEGMENT, MOST_CODE = 36, 32, 2400
#: The cost model, fitted to 1075 measurements on an H200, of 38 layers in two layouts. Cycles of a multiprocessor to
#: copy 32 floats in, or results out, in fours along rows or otherwise (measured when others were copied one by one);
#: warps that hide half of the latency, by which few of them take longer; cycles that a warp alone waits in a row of
#: taps; the share of the lesser of memory and arithmetic that adds to the greater. The first choice is 6 % behind the
#: best in the mean.
COPY_CYCLES, SCATTER_CYCLES, FEW_WARPS, ALONE_CYCLES, LESSER = 6, 21, 4.6, 124, 0.42


#: Rows of outputs above which padding is not counted when a time is predicted.
TALL = 256


@dataclass(frozen=True)
class WideConfig(Config):
    """A thread computes ``columns`` outputs of a row; a block ``rows`` rows of ``strips`` times so many, of ``images``
    images and ``filters`` filters.

    ``fixed``: each strip of the row has code of its own. In shared memory a plane has ``tile_h`` rows of the image,
    ``row_pitch`` floats apart; planes are ``plane_pitch`` floats apart.
    """

    columns: int
    strips: int
    rows: int
    images: int
    filters: int
    fixed: bool
    tile_h: int
    row_pitch: int
    plane_pitch: int
    threads: int
    min_blocks: int

    @property
    def planes(self) -> int:
        """Planes of a block."""
        return self.images * self.filters


def odd_fours(floats: int) -> int:
    """The smallest odd multiple of four that is not below ``floats``."""
    return 4 * (ceil_div(floats, 4) | 1)


def tile_rows(problem: ConvProblem, rows: int) -> int:
    """Rows of the image that a tile of ``rows`` rows of outputs sees at most."""
    (stride, _), (dilation, _), top = problem.stride, problem.dilation, problem.padding[0]

    def seen(first: int) -> int:
        last = (min(first + rows, problem.p) - 1) * stride - top + (problem.r - 1) * dilation
        return min(last, problem.h - 1) - max(first * stride - top, 0) + 1

    # the first band, the last, and where bands begin to see the whole of their pixels and no longer do so
    ends = (top, problem.h - 1 + top - (problem.r - 1) * dilation - (rows - 1) * stride)
    near = {at // stride // rows * rows + more for at in ends for more in (-rows, 0, rows)}
    last = (problem.p - 1) // rows * rows
    return max(1, *(seen(first) for first in {0, last, *near} if 0 <= first <= last))


def row_width(problem: ConvProblem, columns: int, fixed: bool) -> int:
    """Columns of a tile for ``columns`` outputs of a row; it begins at a multiple of four."""
    if fixed:
        return problem.w
    lead = -problem.padding[2] % 4
    return lead + (columns - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def pitches(problem: ConvProblem, columns: int, tile_h: int, planes: int, fixed: bool) -> tuple[int, int]:
    """Distances of rows and planes, in floats, with which loads of four pixels by eight lanes meet no conflict; for a
    tile of ``columns`` outputs of a row.

    Lanes are numbered along planes, then along strips, then rows; with ``fixed`` along planes, then rows. In fours, and
    modulo eight: planes a share of 8 / planes apart, times an odd number, and what follows an odd number.
    """
    row = ceil_div(row_width(problem, columns, fixed), 4)
    stride = problem.stride[0]
    if stride % 2:
        # the distance of a row's first strip from the last one's successor; odd numbers are their own inverses
        wanted = 1 if fixed else columns // 4 * problem.stride[1] * stride
        row += (wanted - row) % (2 if fixed else 8)
    share = max(1, 8 // planes)
    plane = tile_h * row
    return 4 * row, 4 * (plane + (share - plane) % (2 * share))


def filter_floats(problem: ConvProblem) -> int:
    """Shared memory of a filter: its rows, and filters, are odd numbers of fours apart."""
    return odd_fours(problem.r * odd_fours(problem.s))


def shared_bytes(problem: ConvProblem, config: WideConfig) -> int:
    """Shared memory of a block: planes and filters, then results."""
    tile = config.planes * config.plane_pitch + config.filters * filter_floats(problem)
    row = 4 * ceil_div(config.strips * config.columns, 4)
    return 4 * max(tile, config.planes * odd_fours(config.rows * row))


def registers_needed(problem: ConvProblem, columns: int, fixed: bool) -> int:
    """Registers that a thread needs so that none are spilled: sums, the window of four taps, taps, addresses."""
    window = (columns - 1) * problem.stride[1] + 3 * problem.dilation[1] + 1
    if fixed:
        return max(56, columns + window + (13 if problem.s > 16 else 14))
    return max(56, columns + window + (22 if problem.s <= MOST_TAPS else 29))


class DepthwiseLarge(TimedAlgorithm):
    """Planes and filters in shared memory; FP32 FMAs in direct order, no workspace. Forward and, for layers of unit
    stride, the gradient of the input."""

    name = "depthwise"
    strategy = "large"
    paper = PAPER
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = one_channel_limits(problem, GPU_LAYERS)
        if reasons:
            return reasons
        forward = as_convolution(problem)
        if registers_needed(forward, COLUMNS[-1], False) > MOST_REGISTERS:
            reasons.append(
                f"stride={problem.stride} and dilation={problem.dilation} spread the {problem.s} taps of a row over "
                "more pixels than a thread has registers for"
            )
        least = shared_bytes(forward, _config(forward, COLUMNS[-1], 1, 1, 1, 1, False))
        if least > target.shared_per_block:
            reasons.append(
                f"a filter of {problem.r}x{problem.s} and the pixels under it take {least} bytes of shared memory, and "
                f"a block has {target.shared_per_block} at most"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WideConfig]]:
        forward = as_convolution(problem)
        found = dict.fromkeys(_candidates(forward, target))
        return by_time((_cycles(forward, config, target), config) for config in found)

    def order_of_sums(self, problem: ConvProblem, config: WideConfig) -> Hashable:
        return ()  # one chain of multiply-adds, in direct order

    def plan(self, problem: ConvProblem, config: WideConfig, target: Target) -> Plan:
        forward = as_convolution(problem)
        launch = Launch(
            header="kernels/depthwise/depthwise_large.cuh",
            function="leanconv::depthwise_large",
            problem=(*conv_constants(forward), ("reversed", problem.op == "dgrad")),
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=_blocks(forward, config),
            block=config.threads,
            shared_bytes=shared_bytes(forward, config),
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))


def _config(
    problem: ConvProblem, columns: int, strips: int, rows: int, images: int, filters: int, fixed: bool
) -> WideConfig:
    threads, tile_h = ceil_div(images * filters * strips * rows, 32) * 32, tile_rows(problem, rows)
    distances = pitches(problem, strips * columns, tile_h, images * filters, fixed)
    return WideConfig(columns, strips, rows, images, filters, fixed, tile_h, *distances, threads, 1)


def _resident(problem: ConvProblem, config: WideConfig, target: Target) -> int:
    """Blocks that a multiprocessor holds."""
    # the compiler needs a few more in NHWC, and for other architectures than the one that has been measured
    more = 8 * (target.capability != 90) + 16 * (problem.layout == "NHWC")
    registers = registers_needed(problem, config.columns, config.fixed) + more
    # a block takes a kilobyte besides its own
    by_shared = target.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(by_shared, blocks_that_fit(registers, config.threads, target), MOST_BLOCKS))


def _shapes(problem: ConvProblem) -> Iterator[tuple[bool, int, int]]:
    """Whether strips have code of their own, the columns of a strip, and the strips of a row."""
    width = problem.q if problem.q <= MOST_COLUMNS else 4 * ceil_div(problem.q, 8)
    strips = ceil_div(problem.q, width)
    if width <= MOST_COLUMNS and strips * width * problem.s <= MOST_CODE:
        yield True, width, strips
    for columns in COLUMNS:
        if columns < 2 * problem.q or columns == COLUMNS[-1]:
            yield False, columns, ceil_div(problem.q, columns)


def _split(problem: ConvProblem, planes: int) -> tuple[int, int]:
    """Images and filters of so many planes: in NHWC eight filters, which are neighbours, else images of one filter."""
    nhwc = problem.layout == "NHWC"
    extent, most = (problem.k, min(planes, 8)) if nhwc else (problem.n, planes)
    first = 1
    while first < min(most, extent):
        first *= 2
    return (planes // first, first) if nhwc else (first, planes // first)


def _tiles(problem: ConvProblem, planes: int, strips: int) -> Iterator[tuple[int, int]]:
    """Strips and rows of a block's tile: the whole plane or the largest part that a block's threads are enough for, and
    half of it."""
    lanes = planes * strips
    if lanes > MOST_THREADS:
        for threads in (256, MOST_THREADS):
            yield max(1, threads // planes), 1
        return
    parts = ceil_div(problem.p, MOST_THREADS // lanes)
    for cut in (parts, 2 * parts):
        rows = ceil_div(problem.p, cut)
        if lanes * rows >= LEAST_THREADS or cut == parts:
            yield strips, rows


def _candidates(problem: ConvProblem, target: Target) -> Iterator[WideConfig]:
    # of a single row in NCHW the lanes are strips
    known = PLANES[:3] if problem.layout == "NCHW" and problem.p == 1 else PLANES
    usable = [planes for planes in known if planes <= 2 * problem.n * problem.k]
    for fixed, columns, all_strips in _shapes(problem):
        if registers_needed(problem, columns, fixed) > MOST_REGISTERS:
            continue
        for planes in usable:
            images, filters = _split(problem, planes)
            for strips, rows in _tiles(problem, planes, all_strips):
                if fixed and strips < all_strips:
                    continue
                config = _config(problem, columns, strips, rows, images, filters, fixed)
                if shared_bytes(problem, config) <= target.shared_per_block:
                    yield replace(config, min_blocks=_resident(problem, config, target))
    yield _config(problem, COLUMNS[-1], 1, 1, 1, 1, False)


def _blocks(problem: ConvProblem, config: WideConfig) -> int:
    tiles = ceil_div(problem.p, config.rows) * ceil_div(problem.q, config.strips * config.columns)
    return tiles * ceil_div(problem.k, config.filters) * ceil_div(problem.n, config.images)


def _cycles(problem: ConvProblem, config: WideConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor.

    A row of taps takes the time of its instructions or of its loads from shared memory, but not less than a warp
    alone; few warps hide less latency. Copies of pixels and results add to that.
    """
    columns, planes, rows = config.columns, config.planes, config.rows
    instructions, waves = _row_of_taps(problem, config)
    steps = _steps(problem, rows, max(1, 32 // (planes if config.fixed else planes * config.strips)))
    # the part of the tiles that is image
    tile_q = config.strips * columns
    used = problem.p * problem.q / (ceil_div(problem.p, rows) * rows * ceil_div(problem.q, tile_q) * tile_q)
    vectors = problem.layout == "NCHW" and problem.w % 4 == 0
    copied = planes * (config.tile_h * config.row_pitch + rows * tile_q) / 32 * used
    copies = copied * (COPY_CYCLES if vectors else SCATTER_CYCLES)

    warps = passes = config.threads // 32
    if config.fixed and config.strips == 2:
        # a warp in which one strip ends and the next begins goes through the code of both
        lanes = planes * rows
        passes = ceil_div(lanes, 32) + ceil_div(2 * lanes, 32) - lanes // 32

    def cycles(blocks: int) -> float:
        turns = max(ceil_div(blocks * warps, 4), blocks * passes / 4) * 128 / target.fma_lanes
        issue = turns * instructions * used * (1 + FEW_WARPS / (blocks * warps))
        return steps * max(issue, blocks * passes * waves, instructions + ALONE_CYCLES) + copies * blocks

    rounds, rest = divmod(ceil_div(max(1, _blocks(problem, config)), target.multiprocessors), config.min_blocks)
    busy = rounds * cycles(config.min_blocks) + (cycles(rest) if rest else 0)
    outputs = problem.n * problem.k * problem.p * problem.q
    pixels = problem.n * problem.c * problem.h * problem.w
    item = item_bytes(problem.dtype)
    memory = item * (pixels + outputs) / target.bytes_per_cycle
    if problem.layout == "NHWC" and config.filters * item < 32:
        # less than a sector of each pixel: 2.1 times the time with 4 filters, 3.2 with 2, 5 with 1 (15 taps)
        memory *= 40 / (config.filters * item)
    return max(busy, memory) + LESSER * min(busy, memory)


def _row_of_taps(problem: ConvProblem, config: WideConfig) -> tuple[float, float]:
    """Instructions of a warp for a row of taps, and cycles that its loads keep shared memory busy."""
    stride, dilation, taps, columns = problem.stride[1], problem.dilation[1], problem.s, config.columns
    products: float = columns * taps
    segments = 1 if config.fixed or taps <= MOST_TAPS else ceil_div(taps, SEGMENT)
    fours = segments * ((columns - 1) * stride + (taps / segments - 1) * dilation + 8) / 4
    if config.fixed:
        products = _products(problem.w, taps, stride, dilation, problem.padding[2], problem.q) / config.strips
        fours = min(fours, problem.w / 4 + 1)
    filters = ceil_div(taps, 4)
    conflicts = 1 if config.fixed or config.planes >= 8 or columns // 4 * stride % 2 else 2
    instructions = products + fours + filters + 27 + 6 * (segments - 1)
    return instructions, 5 * fours * conflicts + filters * (1 if config.filters == 1 else 4)


@lru_cache(maxsize=1024)
def _steps(problem: ConvProblem, rows: int, neighbours: int) -> float:
    """Rows of taps that a warp goes through on average: as many as any of its ``neighbours`` rows of outputs has.

    Of tall images all: few of their rows are near padding.
    """
    if problem.p > TALL:
        return problem.r
    seen = _seen(problem)
    most = [
        max(seen[at : min(at + neighbours, first + rows)])
        for first in range(0, problem.p, rows)
        for at in range(first, min(first + rows, problem.p), neighbours)
    ]
    return sum(most) / len(most)


@lru_cache(maxsize=64)
def _seen(problem: ConvProblem) -> tuple[int, ...]:
    """Rows of taps of each row of outputs that meet the image."""
    (stride, _), (dilation, _), top = problem.stride, problem.dilation, problem.padding[0]
    seen = []
    for p in range(problem.p):
        i = p * stride - top
        first = 0 if i >= 0 else ceil_div(-i, dilation)
        seen.append(max(0, min(problem.r, ceil_div(problem.h - i, dilation)) - first))
    return tuple(seen)


@lru_cache(maxsize=256)
def _products(extent: int, taps: int, stride: int, dilation: int, before: int, outputs: int) -> int:
    """Pairs of a tap and an output along an axis whose pixel is not padding."""
    total = 0
    for begin in range(-before, taps * dilation - before, dilation):
        first, last = max(0, ceil_div(-begin, stride)), min(outputs - 1, (extent - 1 - begin) // stride)
        total += max(0, last - first + 1)
    return total
