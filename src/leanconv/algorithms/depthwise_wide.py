"""Depthwise convolution with large filters: planes of the image in shared memory, whole rows of taps at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from leanconv.algorithms.base import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.algorithms.depthwise import as_convolution, blocks_that_fit, one_channel_limits
from leanconv.algorithms.tiles import conv_arguments
from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Outputs of a row that a thread owns. In fours these are odd numbers, so that neighbouring strips lie in different
#: banks; a row of one or two strips may have them of any width.
COLUMNS = (28, 20, 12, 4)
MOST_COLUMNS = 32
#: Planes of a block; eight lanes read at once.
PLANES = (32, 16, 8, 4, 2, 1)
#: Registers that a thread may need, and threads of a block.
MOST_REGISTERS = 160
THREADS = (64, 512)
#: Rows of taps up to this length are code without a loop; longer ones are cut into segments, but where there is code
#: for each strip, of which there is then less than this many multiply-adds.
MOST_TAPS, SEGMENT, MOST_CODE = 36, 32, 2400


@dataclass(frozen=True)
class WideConfig(Config):
    """A thread computes ``rows`` rows of ``columns`` outputs; a block ``groups`` times so many rows of ``strips`` times
    so many columns, of ``images`` images and ``filters`` filters.

    ``fixed``: each strip of the row has code of its own. In shared memory a plane has ``tile_h`` rows of the image,
    ``row_pitch`` floats apart; planes are ``plane_pitch`` floats apart.
    """

    columns: int
    rows: int
    strips: int
    groups: int
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
    """The smallest number that is an odd multiple of four and not below ``floats``."""
    return 4 * (ceil_div(floats, 4) | 1)


def tile_rows(problem: ConvProblem, rows: int) -> int:
    """Rows of the image that a tile of ``rows`` rows of outputs sees at most."""
    (stride, _), (dilation, _), top = problem.stride, problem.dilation, problem.padding[0]

    def seen(first: int) -> int:
        last = (min(first + rows, problem.p) - 1) * stride - top + (problem.r - 1) * dilation
        return min(last, problem.h - 1) - max(first * stride - top, 0) + 1

    return max(1, *(seen(first) for first in range(0, problem.p, rows)), 1)


def row_width(problem: ConvProblem, columns: int, fixed: bool) -> int:
    """Columns of a tile for ``columns`` outputs of a row; it begins at a multiple of four."""
    if fixed:
        return problem.w
    lead = -problem.padding[2] % 4
    return lead + (columns - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def pitches(problem: ConvProblem, config: WideConfig) -> tuple[int, int]:
    """Distances of rows and planes, in floats, with which loads of four pixels by eight lanes meet no conflict.

    Lanes are numbered along planes, then along strips, then rows; with ``fixed`` along planes, then rows. In fours, and
    modulo eight: planes a share of 8 / planes apart, times an odd number, and what follows an odd number.
    """
    row = ceil_div(row_width(problem, config.strips * config.columns, config.fixed), 4)
    step = config.rows * problem.stride[0]
    if step % 2:
        wanted = 1 if config.fixed else config.strips * config.columns // 4 * problem.stride[1] * step
        row += (wanted - row) % (2 if config.fixed else 8)
    share = max(1, 8 // config.planes)
    plane = config.tile_h * row
    return 4 * row, 4 * (plane + (share - plane) % (2 * share))


def filter_floats(problem: ConvProblem) -> int:
    """Shared memory of a filter: its rows, and filters, are odd numbers of fours apart."""
    return odd_fours(problem.r * odd_fours(problem.s))


def shared_bytes(problem: ConvProblem, config: WideConfig) -> int:
    """Shared memory of a block: planes and filters, then results."""
    tile = config.planes * config.plane_pitch + config.filters * filter_floats(problem)
    row = 4 * ceil_div(config.strips * config.columns, 4)
    return 4 * max(tile, config.planes * odd_fours(config.groups * config.rows * row))


def registers_needed(problem: ConvProblem, columns: int, rows: int) -> int:
    """Registers that a thread needs: sums, the window of four taps and what is loaded ahead, taps, addresses."""
    window = (columns - 1) * problem.stride[1] + 4 * problem.dilation[1]
    return rows * columns + window + 8 + 4 * rows + 26


class DepthwiseWide(TimedAlgorithm):
    """Planes and filters in shared memory; FP32 FMAs in direct order, no workspace. Forward and, for layers of unit
    stride, the gradient of the input."""

    name = "depthwise_wide"
    paper = (
        "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), for one channel"
    )
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = one_channel_limits(problem, GPU_LAYERS)
        if reasons:
            return reasons
        forward = as_convolution(problem)
        if registers_needed(forward, COLUMNS[-1], 1) > MOST_REGISTERS:
            reasons.append(
                f"stride={problem.stride} and dilation={problem.dilation} spread the {problem.s} taps of a row over "
                "more pixels than a thread has registers for"
            )
        least = shared_bytes(forward, _config(forward, COLUMNS[-1], 1, 1, 1, 1, 1, False))
        if least > target.shared_per_block:
            reasons.append(
                f"a filter of {problem.r}x{problem.s} and the pixels under it take {least} bytes of shared memory, and "
                f"a block has {target.shared_per_block} at most"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WideConfig]]:
        forward = as_convolution(problem)
        found = {}
        for config in _candidates(forward, target):
            found.setdefault(config, _cycles(forward, config, target))
        return by_time((cycles, config) for config, cycles in found.items())

    def plan(self, problem: ConvProblem, config: WideConfig, target: Target) -> Plan:
        forward = as_convolution(problem)
        launch = Launch(
            header="depthwise_wide.cuh",
            function="leanconv::depthwise_wide",
            problem=(*conv_constants(forward), ("reversed", problem.op == "dgrad")),
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=_blocks(forward, config),
            block=config.threads,
            shared_bytes=shared_bytes(forward, config),
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))


@lru_cache(maxsize=4096)
def _config(
    problem: ConvProblem, columns: int, rows: int, strips: int, groups: int, images: int, filters: int, fixed: bool
) -> WideConfig:
    threads = ceil_div(images * filters * strips * groups, 32) * 32
    seen = tile_rows(problem, groups * rows)
    config = WideConfig(columns, rows, strips, groups, images, filters, fixed, seen, 0, 0, threads, 1)
    row, plane = pitches(problem, config)
    return WideConfig(columns, rows, strips, groups, images, filters, fixed, seen, row, plane, threads, 1)


def _resident(problem: ConvProblem, config: WideConfig, target: Target) -> int:
    """Blocks that a multiprocessor holds."""
    registers = registers_needed(problem, config.columns, config.rows)
    # a block takes a kilobyte besides its own
    by_shared = target.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(by_shared, blocks_that_fit(registers, config.threads, target)))


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
    first, second = (problem.k, problem.n) if problem.layout == "NHWC" else (problem.n, problem.k)
    most = 8 if problem.layout == "NHWC" else planes
    one = 1
    while one < min(most, planes, first):
        one *= 2
    other = planes // one if planes > one and second > 1 else 1
    return (other, one) if problem.layout == "NHWC" else (one, other)


def _candidates(problem: ConvProblem, target: Target) -> Iterator[WideConfig]:
    least, most = THREADS
    tall = problem.stride[0] == problem.dilation[0] == 1
    for fixed, columns, all_strips in _shapes(problem):
        for rows in (1, 2, 4) if tall and problem.p > 1 else (1,):
            if registers_needed(problem, columns, rows) > MOST_REGISTERS or (rows > 1 and problem.s > 16):
                continue
            all_groups = ceil_div(problem.p, rows)
            for planes in PLANES:
                images, filters = _split(problem, planes)
                if images * filters != planes and planes > 1:
                    continue
                whole = [planes * all_strips * ceil_div(all_groups, split) for split in (1, 2, 4, 8, 16, 32, 64)]
                strips, groups = all_strips, [ceil_div(n, planes * all_strips) for n in whole if least <= n <= most]
                if not groups and whole[0] < least:
                    groups = [all_groups]
                elif not groups:
                    # rows of more strips than a block has threads
                    groups = [1]
                    strips = min(all_strips, max(1, (256 if planes < 8 else most) // planes))
                for number in groups[:3]:
                    if fixed and strips < all_strips:
                        continue
                    config = _config(problem, columns, rows, strips, number, images, filters, fixed)
                    if shared_bytes(problem, config) <= target.shared_per_block:
                        yield _with_blocks(config, _resident(problem, config, target))
    yield _with_blocks(_config(problem, COLUMNS[-1], 1, 1, 1, 1, 1, False), 1)


def _with_blocks(config: WideConfig, blocks: int) -> WideConfig:
    return WideConfig(*(value for _, value in config.constants()[:-1]), blocks)  # type: ignore[arg-type]


def _blocks(problem: ConvProblem, config: WideConfig) -> int:
    tiles = ceil_div(problem.p, config.groups * config.rows) * ceil_div(problem.q, config.strips * config.columns)
    return tiles * ceil_div(problem.k, config.filters) * ceil_div(problem.n, config.images)


def _cycles(problem: ConvProblem, config: WideConfig, target: Target) -> float:
    """Predicted time in clock cycles."""
    stride, dilation = problem.stride[1], problem.dilation[1]
    taps, columns = problem.s, config.columns
    products = columns * taps
    if config.fixed:
        products = _products(problem.w, taps, stride, dilation, problem.padding[2], problem.q) // config.strips
    segments = 1 if config.fixed or taps <= MOST_TAPS else ceil_div(taps, SEGMENT)
    fours = segments * ((columns - 1) * stride + (taps // segments - 1) * dilation + 8) / 4
    if config.fixed:
        fours = min(fours, problem.w / 4 + 1)
    filters = config.rows * ceil_div(taps, 4)
    instructions = config.rows * products + fours + filters + 10 + 6 * segments
    conflicts = 1 if config.planes >= 8 or columns // 4 * stride % 2 or config.fixed else 2
    waves = 4 * fours * conflicts + filters * (1 if config.filters == 1 else 4)
    seen = _products(problem.h, problem.r, problem.stride[0], problem.dilation[0], problem.padding[0], problem.p)
    steps = seen / problem.p + config.rows - 1
    warps = config.threads // 32

    item = item_bytes(problem.dtype)
    outputs = problem.n * problem.k * problem.p * problem.q
    copied = config.planes * config.tile_h * config.row_pitch
    copies = copied / config.threads * (4 if problem.layout == "NCHW" and problem.w % 4 == 0 else 14)

    def cycles(blocks: int) -> float:
        step = max(ceil_div(blocks * warps, 4) * instructions * 128 / target.fma_lanes, blocks * warps * waves)
        return steps * max(step, instructions + 60) + 2000 + copies * blocks * warps / 4

    resident = config.min_blocks
    rounds, rest = divmod(ceil_div(max(1, _blocks(problem, config)), target.multiprocessors), resident)
    busy = rounds * cycles(resident) + (cycles(rest) if rest else 0)
    memory = item * (problem.n * problem.c * problem.h * problem.w + outputs) / target.bytes_per_cycle
    return 1.2 * (max(busy, memory) + 0.15 * min(busy, memory))


@lru_cache(maxsize=256)
def _products(extent: int, taps: int, stride: int, dilation: int, before: int, outputs: int) -> int:
    """Pairs of a tap and an output along an axis whose pixel is not padding."""
    total = 0
    for begin in range(-before, taps * dilation - before, dilation):
        first, last = max(0, ceil_div(-begin, stride)), min(outputs - 1, (extent - 1 - begin) // stride)
        total += max(0, last - first + 1)
    return total
