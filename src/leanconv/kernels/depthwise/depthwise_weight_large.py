"""Gradient of large depthwise filters: tiles of both tensors in shared memory, tiles of taps in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from leanconv.dtypes import item_bytes
from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments
from leanconv.kernels.contract import Config, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, blocks_that_fit, busy_cycles, clusters_at_once, launch_cycles, overlapped
from leanconv.kernels.depthwise.depthwise_large import odd_vectors, tile_rows
from leanconv.kernels.depthwise.depthwise_weight import BLOCKS, MOST_IN_CLUSTER, SUM_WARPS
from leanconv.kernels.depthwise.strategy import PAPER, depthwise_limits
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Taps of a thread, rows at most and columns; columns of dy of a strip, and rows of it in an iteration of the loop.
MOST_ROWS, WIDE, COLUMNS, UNROLLED = 8, 8, 4, 2
#: Planes of a block, each an image of a filter; and its threads, at most.
PLANES = (1, 2, 4, 8, 16, 32)
THREADS = (128, 256, 384, 512)
#: Registers of a thread.
REGISTERS = 128
#: Filters of a block in NHWC, at most: 8 floats are a sector of memory, the least that is read at once.
MOST_CHANNELS = 8
#: A tile of dy has all rows, or a half, a fourth or an eighth; so do its columns, where that is more than so many.
PARTS, LEAST_COLUMNS = (1, 2, 4, 8), 64
#: Images whose tiles 32 bits count.
MOST_IMAGES = 1 << 24
#: Rows of a band, at least.
LEAST_ROWS = 7


@dataclass(frozen=True)
class LargeWeightConfig(Config):
    """A block keeps in shared memory ``tile_p`` x ``tile_q`` pixels of dy, of ``images`` images and ``channels``
    filters, and ``tile_h`` rows of x. ``bands`` times ``workers`` threads have the same taps of the same plane: they
    share its rows and its strips.

    A cluster of ``split`` blocks shares the images, or with split-K ``split_k`` blocks, whose partial sums a second
    launch adds.
    """

    images: int
    channels: int
    tile_p: int
    tile_q: int
    tile_h: int
    bands: int
    workers: int
    threads: int
    min_blocks: int
    split: int = 1
    split_k: int = 1

    @property
    def planes(self) -> int:
        return self.images * self.channels


@dataclass(frozen=True)
class LargeWeightSpeeds(Speeds):
    """By layout."""

    #: the share of the peak at which instructions are issued; those of a row besides its multiply-adds
    issue: float
    beside: float
    #: and those of a strip
    strip: float
    #: warps that hide half of the latency
    few_warps: float
    #: cycles of a multiprocessor to copy 32 elements in, as vectors or one by one
    copy: float
    scatter: float
    #: cycles before the first tile and after the last
    start: float


def tap_tiles(problem: ConvProblem) -> tuple[int, int, int]:
    """Rows of taps of a thread, and the tiles of taps of a column and of a row of the filter."""
    rows = ceil_div(problem.r, ceil_div(problem.r, MOST_ROWS))
    return rows, ceil_div(problem.r, rows), ceil_div(problem.s + -problem.padding[2] % COLUMNS, WIDE)


def x_width(problem: ConvProblem, config: LargeWeightConfig) -> int:
    """Columns of a tile of x."""
    return config.tile_q + WIDE * tap_tiles(problem)[2]


def pitches(problem: ConvProblem, config: LargeWeightConfig) -> tuple[int, int, int, int]:
    """The distances of rows and of planes in shared memory, of x and of dy, in floats: odd numbers of float4, so that
    neighbouring planes lie in different banks."""
    x, dy = odd_vectors(x_width(problem, config)), odd_vectors(config.tile_q)
    return x, odd_vectors(config.tile_h * x), dy, odd_vectors(config.tile_p * dy)


def totals_at(problem: ConvProblem, config: LargeWeightConfig) -> int:
    """Where the totals lie in shared memory, in floats: behind the tiles and four zeros, and behind the results."""
    _, x, _, dy = pitches(problem, config)
    return max(config.planes * (x + dy) + 4, 4 * ceil_div(config.channels * problem.r * problem.s, 4))


def shared_bytes(problem: ConvProblem, config: LargeWeightConfig) -> int:
    return 4 * (totals_at(problem, config) + tap_tiles(problem)[0] * WIDE * config.threads)


class DepthwiseWeightLarge(split_k.SplitK):
    """Large filters: tiles of x and dy in shared memory; FP32 FMAs."""

    name = "depthwise_weight"
    strategy = "large"
    paper = PAPER
    precision = "ieee"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = depthwise_limits(problem, "wgrad")
        if problem.stride != (1, 1) or problem.dilation != (1, 1):
            reasons.append(f"stride={problem.stride} and dilation={problem.dilation}: both are (1, 1) here")
        if problem.n > MOST_IMAGES:
            reasons.append(f"a batch of {problem.n} images is one of more than {MOST_IMAGES}")
        if reasons:
            return reasons
        _, rows, columns = tap_tiles(problem)
        if rows * columns > THREADS[-1]:
            reasons.append(
                f"a filter of {problem.r}x{problem.s} has {rows * columns} tiles of taps, and a block has "
                f"{THREADS[-1]} threads at most"
            )
        elif not list(shapes(problem, target)):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} and the pixels under it take more than the "
                f"{target.shared_per_block} bytes of shared memory of a block"
            )
        return reasons

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, LargeWeightConfig]]:
        found = []
        most_sums = split_k.most_partial_sums(problem, workspace)
        for shape in shapes(problem, target):
            tiles = ceil_div(problem.k, shape.channels)
            for most in (1, 2, 4, MOST_IN_CLUSTER) if target.clusters else (1,):
                shared = shared_by(problem, shape, most)
                found.append((predicted_cycles(problem, shared, target), shared))
            busy = min(most_sums, BLOCKS // tiles, target.multiprocessors * shape.min_blocks // tiles)
            slices = shared_by(problem, shape, int(busy)).split if busy >= 2 else 1
            if slices > shared.split:
                config = variant(shape, split_k=slices)
                found.append((predicted_cycles(problem, config, target) + launch_cycles(target), config))
        return by_time((time, config) for config, time in {config: time for time, config in found}.items())

    def plan(self, problem: ConvProblem, config: LargeWeightConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        arguments = (x, dy, split_k.destination(problem, config.split_k), batch)
        names = ("x_pitch", "x_plane", "dy_pitch", "dy_plane")
        constants = (
            *conv_constants(problem), ("tap_rows", tap_tiles(problem)[0]), ("unrolled", UNROLLED),
            ("totals", totals_at(problem, config)),
            *zip(names, pitches(problem, config), strict=True),
        )  # fmt: skip
        grid = ceil_div(problem.k, config.channels) * config.split * config.split_k
        first = self.launch(config, constants, arguments, grid, shared_bytes(problem, config))
        return split_k.with_sums(first, problem, config.split_k, SUM_WARPS)


def shapes(problem: ConvProblem, target: Target) -> Iterator[LargeWeightConfig]:
    """The configurations whose blocks have filters of their own."""
    _, rows, columns = tap_tiles(problem)
    of_plane, whole = rows * columns, COLUMNS * ceil_div(problem.q, COLUMNS)
    widths = {COLUMNS * ceil_div(whole // COLUMNS, part) for part in PARTS if part == 1 or whole > LEAST_COLUMNS}
    for planes in PLANES:
        if planes > max(1, 2 * problem.n * problem.k) or planes * of_plane > THREADS[-1]:
            continue
        images, channels = _split(problem, planes)
        for tile_q in sorted(widths, reverse=True):
            for tile_p in sorted({ceil_div(problem.p, part) for part in PARTS}, reverse=True):
                tile_h = tile_rows(problem, tile_p)
                for bands, workers in _shares(tile_p, tile_q // COLUMNS, planes * of_plane):
                    threads = ceil_div(planes * of_plane * bands * workers, 32) * 32
                    config = LargeWeightConfig(images, channels, tile_p, tile_q, tile_h, bands, workers, threads, 1)
                    shared = shared_bytes(problem, config)
                    if shared > target.shared_per_block:
                        continue
                    # a block takes a kilobyte besides its own
                    by_shared = target.shared_per_multiprocessor // (shared + 1024)
                    fitting = min(by_shared, blocks_that_fit(REGISTERS, threads, target))
                    yield variant(config, min_blocks=max(1, fitting))


def _shares(rows: int, strips: int, taken: int) -> Iterator[tuple[int, int]]:
    """Bands and workers by which a block of ``taken`` threads becomes one of any of `THREADS`: as many bands as leave
    each some rows, then workers."""
    found = set()
    for threads in THREADS:
        for bands in {1, min(threads // taken, max(1, rows // LEAST_ROWS))}:
            workers = min(strips, threads // (taken * max(1, bands)))
            if bands and workers:
                found.add((bands, ceil_div(strips, ceil_div(strips, workers))))
    yield from sorted(found)


def _split(problem: ConvProblem, planes: int) -> tuple[int, int]:
    """Images and filters of so many planes: in NHWC filters first, which are neighbours, else images of one filter."""
    nhwc = problem.layout == "NHWC"
    extent, most = (problem.k, min(planes, MOST_CHANNELS)) if nhwc else (problem.n, planes)
    first = 1 << (max(1, min(most, extent)) - 1).bit_length()
    return (planes // first, first) if nhwc else (first, planes // first)


def tiles_of(problem: ConvProblem, config: LargeWeightConfig) -> int:
    """Tiles of pixels that a filter is summed over."""
    of_image = ceil_div(problem.p, config.tile_p) * ceil_div(problem.q, config.tile_q)
    return ceil_div(problem.n, config.images) * of_image


def shared_by(problem: ConvProblem, shape: LargeWeightConfig, most: int) -> LargeWeightConfig:
    """``shape`` with the tiles dealt out to at most so many blocks: to no more than make the longest share shorter."""
    tiles = max(1, tiles_of(problem, shape))
    return variant(shape, split=ceil_div(tiles, ceil_div(tiles, most)))


@lru_cache(maxsize=256)
def _rows_of_x(problem: ConvProblem, tile_p: int, neighbours: int) -> float:
    """Rows of x that a thread goes through in a tile in the mean, the most of ``neighbours`` tiles of taps."""
    rows, tiles, _ = tap_tiles(problem)
    top, found = problem.padding[0], []
    for first_p in range(0, problem.p, tile_p):
        last_p = min(problem.p, first_p + tile_p) - 1
        passed = [
            max(0, min(problem.h, last_p - top + min(r + rows, problem.r)) - max(0, first_p - top + r))
            for r in range(0, tiles * rows, rows)
        ]
        found += [max(passed[at : at + neighbours]) for at in range(0, tiles, neighbours)]
    return sum(found) / len(found)


def predicted_cycles(problem: ConvProblem, config: LargeWeightConfig, target: Target) -> float:
    """Predicted time in clock cycles, of the first launch: that of the busiest multiprocessor, and of the memory."""
    speed = LargeWeightSpeeds.of(target, problem.layout)
    rows, tiles_r, tiles_s = tap_tiles(problem)
    warps, share = config.threads // 32, config.split * config.split_k
    each = ceil_div(max(1, tiles_of(problem, config)), share)
    neighbours = max(1, min(tiles_r, 32 // (config.planes * config.bands * config.workers * tiles_s)))
    step = rows * WIDE * COLUMNS + speed.beside + (rows - 1) * COLUMNS / UNROLLED
    strips = ceil_div(config.tile_q // COLUMNS, config.workers)
    of_band = ceil_div(int(_rows_of_x(problem, config.tile_p, neighbours) + 0.5), config.bands)
    instructions = strips * (of_band * step + speed.strip) + 3 * rows * WIDE
    x_pixels = config.tile_h * (problem.w if config.tile_q >= problem.q else x_width(problem, config))
    pixels = config.planes * (x_pixels + config.tile_p * min(config.tile_q, problem.q)) / 32
    copies = pixels * (speed.copy if problem.layout == "NCHW" else speed.scatter)

    def resident(blocks: int) -> float:
        rounds = ceil_div(blocks * warps, 4) * 128 / target.fma_lanes
        issue = rounds * instructions / speed.issue * (1 + speed.few_warps / (blocks * warps))
        return each * (issue + copies * blocks) + speed.start

    blocks, fitting = ceil_div(problem.k, config.channels) * share, config.min_blocks
    if config.split > 1:
        places = clusters_at_once(config.split, fitting, target) * config.split
        rounds, rest = divmod(blocks, places)
        last = ceil_div(rest, target.multiprocessors)
        busy = rounds * resident(fitting) + (resident(min(fitting, last)) if rest else 0)
    else:
        busy = busy_cycles(blocks, fitting, target, resident)
    sector = max(1.0, 32 / (config.channels * item_bytes(problem.dtype))) if problem.layout == "NHWC" else 1.0
    return overlapped(busy, sector * problem.bytes / target.bytes_per_cycle, 0.4)
