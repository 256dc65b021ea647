"""Depthwise convolution with large filters: images in shared memory, whole rows of taps at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import Config, ceil_div, variant
from leanconv.kernels.cost import Speeds, blocks_that_fit, busy_cycles, overlapped, pixels_read
from leanconv.kernels.depthwise.strategy import DepthwiseStrategy
from leanconv.plan import Constants, Target
from leanconv.problem import ConvProblem

#: Outputs of a row that a thread owns. In float4 these are odd numbers, so that neighbouring strips lie in different
#: banks; a row of one or two strips may have them of any width.
COLUMNS, MOST_COLUMNS = (28, 20, 12, 4), 32
#: Output planes of a block, each of an image and a filter; eight lanes read at once.
OUTPUT_PLANES = (1, 2, 4, 8, 16, 32)
#: Registers that a thread may have, threads of a block, and blocks of a multiprocessor, on every architecture.
MOST_REGISTERS, LEAST_THREADS, MOST_THREADS, MOST_BLOCKS = 160, 64, 512, 24
#: Rows of taps up to this length are code without a loop; longer ones are cut into segments, but where there is code
#: for each strip, of which there is then less than this many multiply-adds.
MOST_TAPS, SEGMENT, MOST_CODE = 36, 32, 2400
#: Rows of outputs above which padding is not counted when a time is predicted.
TALL = 256


@dataclass(frozen=True)
class LargeConfig(Config):
    """A thread computes ``columns`` outputs of a row; a block ``rows`` rows of ``strips`` times so many, of ``images``
    images and ``filters`` filters.

    ``fixed``: each strip of the row has code of its own. In shared memory lie ``tile_h`` rows of each image's channel,
    ``row_pitch`` floats apart, ``image_pitch`` floats from channel to channel.
    """

    columns: int
    strips: int
    rows: int
    images: int
    filters: int
    fixed: bool
    tile_h: int
    row_pitch: int
    image_pitch: int
    threads: int
    min_blocks: int

    @property
    def output_planes(self) -> int:
        return self.images * self.filters


@dataclass(frozen=True)
class LargeSpeeds(Speeds):
    """Fitted to 1075 measurements of 38 layers in two layouts. Explored (H200, feaddb9): the first choice is 6 % behind
    the best in the mean."""

    #: cycles of a multiprocessor to copy 32 floats in, or results out, as float4 along rows or otherwise (measured when
    #: others were copied one by one)
    copy: float
    scatter: float
    #: warps that hide half of the latency, by which few of them take longer; cycles that a warp alone waits in a row of
    #: taps; the share of the lesser of memory and arithmetic that adds to the greater
    few_warps: float
    alone: float
    lesser: float
    #: bytes of a pixel by which memory is slower where a block reads less than a sector of it
    less_than_a_sector: float


def odd_vectors(floats: int) -> int:
    """The smallest odd multiple of four that is not below ``floats``."""
    return 4 * (ceil_div(floats, 4) | 1)


def tile_rows(problem: ConvProblem, rows: int) -> int:
    """Rows of the image that a tile of ``rows`` rows of outputs reads at most."""
    (stride, _), (dilation, _), top = problem.stride, problem.dilation, problem.padding[0]

    def read(first: int) -> int:
        last = (min(first + rows, problem.p) - 1) * stride - top + (problem.r - 1) * dilation
        return min(last, problem.h - 1) - max(first * stride - top, 0) + 1

    # the first band, the last, and where bands begin to read the whole of their pixels and no longer do so
    ends = (top, problem.h - 1 + top - (problem.r - 1) * dilation - (rows - 1) * stride)
    near = {at // stride // rows * rows + more for at in ends for more in (-rows, 0, rows)}
    last = (problem.p - 1) // rows * rows
    return max(1, *(read(first) for first in {0, last, *near} if 0 <= first <= last))


def pitches(problem: ConvProblem, columns: int, tile_h: int, planes: int, fixed: bool) -> tuple[int, int]:
    """Distances of rows and of images' channels, in floats, for which float4 loads of eight lanes have no bank
    conflict, in a tile of ``columns`` outputs of a row.

    Lanes are numbered along output planes, then strips, then rows; with ``fixed`` along planes, then rows. In float4
    and modulo eight, planes lie a share of 8 / planes apart, times an odd number, and what follows an odd number.
    """
    lead = -problem.padding[2] % 4  # a row begins at a multiple of four
    reach = (columns - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1
    row = ceil_div(problem.w if fixed else lead + reach, 4)
    stride = problem.stride[0]
    if stride % 2:
        # the distance of a row's first strip from the last one's successor; odd numbers are their own inverses
        rest = 1 if fixed else columns // 4 * problem.stride[1] * stride
        row += (rest - row) % (2 if fixed else 8)
    share = max(1, 8 // planes)
    plane = tile_h * row
    return 4 * row, 4 * (plane + (share - plane) % (2 * share))


def filter_pitches(problem: ConvProblem) -> tuple[int, int, int]:
    """Taps of a segment of a filter's row, and the distances of rows and of filters in shared memory, in floats: odd
    numbers of float4."""
    row = odd_vectors(problem.s)
    return (problem.s if problem.s <= MOST_TAPS else SEGMENT), row, odd_vectors(problem.r * row)


def _result_pitches(config: LargeConfig) -> tuple[int, int]:
    """The distances of rows and of output planes of results in shared memory, in floats."""
    row = 4 * ceil_div(config.strips * config.columns, 4)
    return row, odd_vectors(config.rows * row)


def registers_needed(problem: ConvProblem, columns: int, fixed: bool) -> int:
    """Registers that a thread needs so that none are spilled: sums, the window of four taps, taps, addresses."""
    window = (columns - 1) * problem.stride[1] + 3 * problem.dilation[1] + 1
    if fixed:
        return max(56, columns + window + (13 if problem.s > 16 else 14))
    return max(56, columns + window + (22 if problem.s <= MOST_TAPS else 29))


class DepthwiseLarge(DepthwiseStrategy):
    """Images and filters in shared memory."""

    strategy = "large"

    def limits(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = []
        if registers_needed(problem, COLUMNS[-1], False) > MOST_REGISTERS:
            reasons.append(
                f"stride={problem.stride} and dilation={problem.dilation} spread the {problem.s} taps of a row over "
                "more pixels than a thread has registers for"
            )
        least = self.shared_bytes(problem, _config(problem, COLUMNS[-1], 1, 1, 1, 1, False))
        if least > target.shared_per_block:
            reasons.append(
                f"a filter of {problem.r}x{problem.s} and the pixels under it take {least} bytes of shared memory, and "
                f"a block has {target.shared_per_block} at most"
            )
        return reasons

    def shared_bytes(self, problem: ConvProblem, config: LargeConfig) -> int:
        """Images and filters, then results."""
        _, _, pitch = filter_pitches(problem)
        tile = config.output_planes * config.image_pitch + config.filters * pitch
        return 4 * max(tile, config.output_planes * _result_pitches(config)[1])

    def blocks(self, problem: ConvProblem, config: LargeConfig) -> int:
        tiles = ceil_div(problem.p, config.rows) * ceil_div(problem.q, config.strips * config.columns)
        return tiles * ceil_div(problem.k, config.filters) * ceil_div(problem.n, config.images)

    def candidates(self, problem: ConvProblem, target: Target) -> Iterator[LargeConfig]:
        # of a single row in NCHW the lanes are strips
        known = OUTPUT_PLANES[:3] if problem.layout == "NCHW" and problem.p == 1 else OUTPUT_PLANES
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
                    shared = self.shared_bytes(problem, config)
                    if shared <= target.shared_per_block:
                        yield variant(config, min_blocks=_resident(problem, config, shared, target))
        yield _config(problem, COLUMNS[-1], 1, 1, 1, 1, False)

    def constants(self, problem: ConvProblem, config: LargeConfig) -> Constants:
        segment, tap_pitch, filter_pitch = filter_pitches(problem)
        row, plane = _result_pitches(config)
        filters = ("segment", problem.s if config.fixed else segment), ("tap_pitch", tap_pitch)
        return *filters, ("filter_pitch", filter_pitch), ("result_pitch", row), ("result_plane", plane)

    def cycles(self, problem: ConvProblem, config: LargeConfig, target: Target) -> float:
        """That of the memory, or of the busiest multiprocessor.

        A row of taps takes the time of its instructions or of its loads from shared memory, but not less than a warp
        alone; few warps hide less latency. Copies of pixels and results add to that.
        """
        speeds, columns, planes, rows = LargeSpeeds.of(target), config.columns, config.output_planes, config.rows
        instructions, waves = _row_of_taps(problem, config)
        steps = _steps(problem, rows, max(1, 32 // (planes if config.fixed else planes * config.strips)))
        # the share of the tiles that is image
        tile_q = config.strips * columns
        used = problem.p * problem.q / (ceil_div(problem.p, rows) * rows * ceil_div(problem.q, tile_q) * tile_q)
        vectors = problem.layout == "NCHW" and problem.w % 4 == 0
        copied = planes * (config.tile_h * config.row_pitch + rows * tile_q) / 32 * used
        copies = copied * (speeds.copy if vectors else speeds.scatter)

        warps = passes = config.threads // 32
        if config.fixed and config.strips == 2:
            # a warp in which one strip ends and the next begins goes through the code of both
            lanes = planes * rows
            passes = ceil_div(lanes, 32) + ceil_div(2 * lanes, 32) - lanes // 32

        def resident(blocks: int) -> float:
            rounds = max(ceil_div(blocks * warps, 4), blocks * passes / 4) * 128 / target.fma_lanes
            issue = rounds * instructions * used * (1 + speeds.few_warps / (blocks * warps))
            return steps * max(issue, blocks * passes * waves, instructions + speeds.alone) + copies * blocks

        busy = busy_cycles(self.blocks(problem, config), config.min_blocks, target, resident)
        outputs = problem.n * problem.k * problem.p * problem.q
        pixels = problem.n * problem.c * problem.h * problem.w
        item = item_bytes(problem.dtype)
        memory = item * (pixels + outputs) / target.bytes_per_cycle
        if problem.layout == "NHWC" and config.filters * item < 32:
            # Less than a sector of each pixel. Explored (H200, feaddb9, 15 taps): 2.1 times the time with 4 filters,
            # 3.2 with 2, 5 with 1.
            memory *= speeds.less_than_a_sector / (config.filters * item)
        return overlapped(busy, memory, speeds.lesser)


def _config(
    problem: ConvProblem, columns: int, strips: int, rows: int, images: int, filters: int, fixed: bool
) -> LargeConfig:
    threads, tile_h = ceil_div(images * filters * strips * rows, 32) * 32, tile_rows(problem, rows)
    distances = pitches(problem, strips * columns, tile_h, images * filters, fixed)
    return LargeConfig(columns, strips, rows, images, filters, fixed, tile_h, *distances, threads, 1)


def _resident(problem: ConvProblem, config: LargeConfig, shared: int, target: Target) -> int:
    # the compiler needs a few more in NHWC, and for other architectures than the one that has been measured
    more = 8 * (target.capability != 90) + 16 * (problem.layout == "NHWC")
    registers = registers_needed(problem, config.columns, config.fixed) + more
    # a block takes a kilobyte besides its own
    by_shared = target.shared_per_multiprocessor // (shared + 1024)
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
    first = 1 << (max(1, min(most, extent)) - 1).bit_length()
    return (planes // first, first) if nhwc else (first, planes // first)


def _tiles(problem: ConvProblem, planes: int, strips: int) -> Iterator[tuple[int, int]]:
    """Strips and rows of a block's tile: all rows or as many as a block's threads are enough for, and half of
    them."""
    lanes = planes * strips
    if lanes > MOST_THREADS:
        for threads in (256, MOST_THREADS):
            yield max(1, threads // planes), 1
        return
    bands = ceil_div(problem.p, MOST_THREADS // lanes)
    yield strips, ceil_div(problem.p, bands)
    if lanes * ceil_div(problem.p, 2 * bands) >= LEAST_THREADS:
        yield strips, ceil_div(problem.p, 2 * bands)


def _row_of_taps(problem: ConvProblem, config: LargeConfig) -> tuple[float, float]:
    """Instructions of a warp for a row of taps, and cycles that its loads keep shared memory busy."""
    stride, dilation, taps, columns = problem.stride[1], problem.dilation[1], problem.s, config.columns
    products: float = columns * taps
    segments = 1 if config.fixed or taps <= MOST_TAPS else ceil_div(taps, SEGMENT)
    vectors = segments * ((columns - 1) * stride + (taps / segments - 1) * dilation + 8) / 4
    if config.fixed:
        products = pixels_read(problem.w, taps, stride, dilation, problem.padding[2], problem.q) / config.strips
        vectors = min(vectors, problem.w / 4 + 1)
    filters = ceil_div(taps, 4)
    conflicts = 1 if config.fixed or config.output_planes >= 8 or columns // 4 * stride % 2 else 2
    instructions = products + vectors + filters + 27 + 6 * (segments - 1)
    return instructions, 5 * vectors * conflicts + filters * (1 if config.filters == 1 else 4)


@lru_cache(maxsize=1024)
def _steps(problem: ConvProblem, rows: int, neighbours: int) -> float:
    """Rows of taps that a warp goes through on average: as many as any of its ``neighbours`` rows of outputs has.

    Of tall images all: few of their rows are near padding.
    """
    if problem.p > TALL:
        return problem.r
    taps = _taps_inside(problem)
    most = [
        max(taps[at : min(at + neighbours, first + rows)])
        for first in range(0, problem.p, rows)
        for at in range(first, min(first + rows, problem.p), neighbours)
    ]
    return sum(most) / len(most)


@lru_cache(maxsize=64)
def _taps_inside(problem: ConvProblem) -> tuple[int, ...]:
    """Rows of taps of each row of outputs that lie inside the image."""
    (stride, _), (dilation, _), top = problem.stride, problem.dilation, problem.padding[0]
    taps = (
        min(problem.r, ceil_div(problem.h - i, dilation)) - max(0, ceil_div(-i, dilation))
        for i in range(-top, problem.p * stride - top, stride)
    )
    return tuple(max(0, count) for count in taps)
