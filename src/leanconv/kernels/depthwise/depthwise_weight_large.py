"""Gradient of large depthwise filters: tiles of both tensors in shared memory, tiles of taps in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from leanconv.dtypes import item_bytes
from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments
from leanconv.kernels.contract import Config, ceil_div, variant
from leanconv.kernels.cost import Speeds, blocks_that_fit, clusters_at_once, launch_cycles, overlapped
from leanconv.kernels.depthwise.depthwise_large import odd_vectors, tile_rows
from leanconv.kernels.depthwise.depthwise_weight import BLOCKS, MOST_IN_CLUSTER, SUM_WARPS, usable
from leanconv.kernels.depthwise.strategy import MOST_TAPS, PAPER, depthwise_limits
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Taps of a thread, rows at most and columns; columns of dy of a strip, and rows of it in an iteration of the loop.
MOST_ROWS, WIDE, COLUMNS, UNROLLED = 8, 8, 4, 2
#: Planes of a block, each an image of a filter; and its threads, at most.
PLANES = (1, 2, 4, 8, 16, 32)
THREADS = {"NCHW": (128, 256, 512), "NHWC": (256,)}
MOST_THREADS = 512
#: Planes of a block in NHWC, at least, where threads are enough: fewer filters waste sectors.
LEAST_PLANES = 2
#: Registers of a thread.
REGISTERS = 128
#: Filters of a block in NHWC, at most: 8 floats are a sector of memory, the least that is read at once.
MOST_CHANNELS = 8
#: Columns of dy above which a tile that is wider than high has half of them.
MOST_COLUMNS = 64
#: Instructions of a step beside its multiply-adds; loads that a thread has in flight.
BESIDE, IN_FLIGHT = 14, 8
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
    """By layout. Explored (H200, 070bca0c, four loads in flight): fitted to 85 configurations in each layout, of 17
    layers, of which the first choice is 2 (NCHW) and 6 % (NHWC) behind the best in the mean, 10 and 42 % at worst."""

    #: the share of the peak at which instructions are issued; warps that hide half of the latency; by how much longer
    #: a block of one plane takes, whose lanes meet in the same banks
    issue: float
    few_warps: float
    one_plane: float
    #: cycles of a multiprocessor for 32 loads into a tile, and from loads to their use
    copy: float
    latency: float
    #: cycles before the first tile and after the last; the share of the lesser of memory and arithmetic that adds to
    #: the greater
    start: float
    lesser: float


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


class DepthwiseWeightLarge(split_k.PredictedSplitK):
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
        if not reasons and problem.r * problem.s <= MOST_TAPS and usable(problem):
            reasons.append(f"a filter of {problem.r}x{problem.s} taps is whole in a thread of depthwise_weight")
        if reasons:
            return reasons
        _, rows, columns = tap_tiles(problem)
        if rows * columns > MOST_THREADS:
            reasons.append(
                f"a filter of {problem.r}x{problem.s} has {rows * columns} tiles of taps, and a block has "
                f"{MOST_THREADS} threads at most"
            )
        elif not shapes(problem, target):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} and the pixels under it take more than the "
                f"{target.shared_per_block} bytes of shared memory of a block"
            )
        return reasons

    def predicted(
        self, problem: ConvProblem, target: Target, workspace: float
    ) -> Iterator[tuple[float, LargeWeightConfig, int, int]]:
        most_sums = split_k.most_partial_sums(problem, workspace)
        for shape in shapes(problem, target):
            time = _time(problem, shape, target)
            tiles = max(1, tiles_of(problem, shape))
            known = set()
            for most in (1, 2, 4, MOST_IN_CLUSTER) if target.clusters else (1,):
                known.add(split := _shares(tiles, most))
            for split in sorted(known):
                yield time(split, 1), shape, split, 1
            if most_sums < 2:
                continue
            blocks = ceil_div(problem.k, shape.channels)
            busy = int(min(most_sums, BLOCKS // blocks, target.multiprocessors * shape.min_blocks // blocks))
            slices = max(2, _shares(tiles, max(2, busy)))
            yield time(1, slices) + launch_cycles(target), shape, 1, slices

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


@lru_cache(maxsize=64)
def shapes(problem: ConvProblem, target: Target) -> tuple[LargeWeightConfig, ...]:
    """The configurations whose blocks have filters of their own."""
    _, rows, columns = tap_tiles(problem)
    found: dict[LargeWeightConfig, None] = {}
    for planes in PLANES:
        taken = planes * rows * columns
        if taken > MOST_THREADS or planes > max(1, 2 * problem.n * problem.k):
            continue
        few = problem.layout == "NHWC" and planes < min(LEAST_PLANES, problem.n * problem.k)
        if few and 4 * LEAST_PLANES * rows * columns <= THREADS["NHWC"][-1]:
            continue
        images, channels = _split(problem, planes)
        least = ceil_div(taken, 32) * 32
        fitting: list[LargeWeightConfig] = []
        for tile_p, tile_q in _tiles(problem):
            tile = LargeWeightConfig(images, channels, tile_p, tile_q, tile_rows(problem, tile_p), 1, 1, least, 1)
            needed = shared_bytes(problem, tile)
            if needed <= target.shared_per_block // (2 if fitting else 1):
                fitting.append(tile)
            if needed <= target.shared_per_block // 2:
                break
        for tile in fitting:
            for bands, workers in _sharing(tile, taken, THREADS[problem.layout]):
                threads = ceil_div(taken * bands * workers, 32) * 32
                config = variant(tile, bands=bands, workers=workers, threads=threads)
                shared = shared_bytes(problem, config)
                if shared <= target.shared_per_block:
                    # a block takes a kilobyte besides its own
                    by_shared = target.shared_per_multiprocessor // (shared + 1024)
                    resident = max(1, min(by_shared, blocks_that_fit(REGISTERS, threads, target)))
                    found[variant(config, min_blocks=resident)] = None
    return tuple(found)


def _tiles(problem: ConvProblem) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles of dy: the whole image, then ever smaller parts of it."""
    rows, columns = problem.p, COLUMNS * ceil_div(problem.q, COLUMNS)
    while True:
        yield rows, columns
        if columns > max(rows, MOST_COLUMNS):
            columns = COLUMNS * ceil_div(columns, 2 * COLUMNS)
        elif rows > 1:
            rows = ceil_div(rows, 2)
        else:
            return


def _sharing(tile: LargeWeightConfig, taken: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Bands and workers by which a block of ``taken`` threads becomes one of up to any of ``sizes``, or of all."""
    strips = tile.tile_q // COLUMNS
    for threads in sizes if taken <= max(sizes) else (MOST_THREADS,):
        most = threads // taken
        for bands in {1, min(most, max(1, tile.tile_p // LEAST_ROWS))}:
            if bands and most // bands:
                yield bands, ceil_div(strips, ceil_div(strips, min(strips, most // bands)))


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


def _shares(tiles: int, most: int) -> int:
    """Blocks among which ``tiles`` are dealt out, at most so many: no more than make the longest share shorter."""
    return ceil_div(tiles, ceil_div(tiles, most))


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


def _copies(problem: ConvProblem, config: LargeWeightConfig) -> tuple[float, int]:
    """Loads into a tile, and how often a thread waits for as many as it has in flight."""
    width = problem.w if config.tile_q >= problem.q else x_width(problem, config)
    pixels = config.tile_h * width, config.tile_p * min(config.tile_q, problem.q)
    nchw, whole = problem.layout == "NCHW", config.tile_p >= problem.p and problem.h * problem.w % 4 == 0
    vectors = problem.w % 4 == 0 or whole if nchw else config.channels % 4 == 0 and problem.k % 4 == 0
    loads = [config.planes * count / (4 if vectors else 1) for count in pixels]
    if nchw and problem.w % 4 == 0 and problem.dtype == "float32":
        return sum(loads), 1
    return sum(loads), sum(ceil_div(int(count), config.threads * IN_FLIGHT) for count in loads)


def _time(problem: ConvProblem, config: LargeWeightConfig, target: Target) -> Callable[[int, int], float]:
    """Predicted time in clock cycles of the first launch, by ``split`` and ``split_k``: that of the busiest
    multiprocessor, and of the memory."""
    speed = LargeWeightSpeeds.of(target, problem.layout)
    rows, tiles_r, tiles_s = tap_tiles(problem)
    warps, tiles, fitting = config.threads // 32, tiles_of(problem, config), config.min_blocks
    neighbours = max(1, min(tiles_r, 32 // (config.planes * config.bands * config.workers * tiles_s)))
    step = rows * WIDE * COLUMNS + BESIDE + (rows - 1) * COLUMNS / UNROLLED
    strips = ceil_div(config.tile_q // COLUMNS, config.workers)
    of_band = ceil_div(int(_rows_of_x(problem, config.tile_p, neighbours) + 0.5), config.bands)
    instructions = (strips * of_band * step + 3 * rows * WIDE) * (1 + speed.one_plane / config.planes)
    loads, waits = _copies(problem, config)
    sector = max(1.0, 32 / (config.channels * item_bytes(problem.dtype))) if problem.layout == "NHWC" else 1.0
    memory = sector * problem.bytes / target.bytes_per_cycle
    filters = ceil_div(problem.k, config.channels)

    def of_tile(blocks: int) -> float:
        rounds = ceil_div(blocks * warps, 4) * 128 / target.fma_lanes
        issue = rounds * instructions / speed.issue * (1 + speed.few_warps / (blocks * warps))
        return issue + speed.copy * loads / 32 * blocks + speed.latency * waits

    def time(split: int, slices: int) -> float:
        blocks = filters * split * slices
        places = clusters_at_once(split, fitting, target) * split if split > 1 else fitting * target.multiprocessors
        rounds, rest = divmod(max(1, blocks), places)
        each = ceil_div(max(1, tiles), split * slices)
        last = min(fitting, ceil_div(rest, target.multiprocessors))
        busy = rounds * (each * of_tile(fitting) + speed.start) + (each * of_tile(last) + speed.start if rest else 0)
        return overlapped(busy, memory, speed.lesser)

    return time
