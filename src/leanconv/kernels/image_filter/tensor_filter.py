"""Image filters on tensor cores: a row of outputs is a product of windows and a band of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, ceil_div
from leanconv.kernels.cost import Speeds, busy_cycles, launch_cycles, overlapped
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.register_cache import EXTENT, LIMIT
from leanconv.plan import Number, Plan, Target
from leanconv.problem import FilterProblem

#: Channels that lie side by side.
CHANNELS = 4
#: Elements that become float16 by one multiply-add.
BYTES_OF_PIXELS = "uint8", "int8"
#: Elements that are taken as they are, in pairs.
HALVES = "float16", "bfloat16"
#: Bytes of an image, and of a result: offsets are of 32 bits.
BYTES = 2**32
#: Registers that a thread may need by `registers_needed`: some more than there are, since not all are needed at a time.
REGISTERS = 272
#: Registers of addresses and counts.
ADDRESSES = 36
#: Rows of outputs in whose time a warp makes its weights' fragments.
SETUP_ROWS = 6


@dataclass(frozen=True)
class TensorFilterConfig(Config):
    """A warp has ``tiles`` x 128 columns and ``rows`` rows of outputs, or with 0 as many as make whole waves,
    ``unroll`` of them an iteration, and copies input rows ``depth`` rows ahead. Weights are in ``shared`` memory or in
    registers. So many blocks of ``warps`` at least, ``min_blocks``, fit on a multiprocessor. With ``two_rows`` two rows
    of outputs are made at a time."""

    rows: int
    tiles: int
    depth: int
    unroll: int
    warps: int
    shared: bool
    min_blocks: int = 1
    two_rows: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True)
class FilterSpeeds(Speeds):
    """Of a scheduler of a multiprocessor, which makes 128 outputs of one filter row by one product or more."""

    #: cycles of 128 outputs besides products, by the type of the image
    row: Any
    #: of a product
    product: float
    #: of the sums of a filter row that are added to the others by themselves
    addition: float
    #: of a piece of weights that a warp reads from shared memory
    read: float
    #: of a warp that makes a fragment of the weights, all pieces, before it begins
    fragment: float
    #: of a call, besides its launch: the first rows and weights, the last results
    start: float
    #: cycles that a row of a band takes a warp that is alone, which small images prefer short bands for
    latency: int
    #: the time of memory relative to what the target's bandwidth says, and the share of the lesser that adds
    memory: float
    lesser: float


#: Rows of a band, 0 for whole waves; tiles, depth, unroll, warps, shared, two_rows.
Shape = tuple[int, int, int, int, int, bool, bool]
#: The fastest on an H200 at 8192²: of two rows at a time, of bytes, of float16 and of several channels, with the rings
#: of `ring_of`; of elements of up to 16 bits and filters of 5 to 7 rows, of fewer, of float16 with 5 to 7; of other
#: filters of one step, of larger ones, and of several channels; and what else is worth timing.
PAIRS: Shape = (48, 2, 8, 1, 4, False, True)
HALF_PAIRS: Shape = (32, 1, 8, 1, 4, False, True)
CHANNELED_PAIRS: Shape = (72, 1, 8, 1, 4, False, True)
SMALL: Shape = (64, 2, 4, 4, 4, False, False)
LOW: Shape = (32, 2, 4, 4, 4, False, False)
HALF: Shape = (64, 2, 8, 4, 2, False, False)
MEDIUM: Shape = (80, 1, 4, 4, 4, True, False)
LARGE: Shape = (0, 1, 4, 1, 4, True, False)
CHANNELED: Shape = (64, 1, 4, 4, 4, False, False)
OTHERS: tuple[Shape, ...] = (
    (0, 1, 4, 1, 8, True, False), (0, 2, 4, 1, 4, True, False), (0, 2, 4, 1, 4, False, False),
    (0, 1, 4, 1, 2, True, False), (32, 1, 8, 4, 4, False, False), (64, 1, 4, 1, 4, False, False),
)  # fmt: skip


def layout_of(problem: FilterProblem) -> tuple[int, int]:
    """Channels that are filtered apart, and how far the taps of a row lie from each other: of several channels a row
    is a line of elements where a window of that fits into one product."""
    channels = problem.channels
    line = -problem.anchor[1] * channels % 4 + 8 + (problem.kw - 1) * channels <= 16
    return (1, channels) if line else (channels, 1)


def window_of(problem: FilterProblem) -> tuple[int, int]:
    """Elements before an output that its window begins with, and products of k16 that the window of 8 outputs takes."""
    channels, apart = layout_of(problem)
    before, even = problem.anchor[1] * apart, 2 if problem.dtype in HALVES and channels == 1 else 4
    pad = ceil_div(before, even) * even
    return pad, ceil_div(pad - before + 8 + (problem.kw - 1) * apart, 16)


def steps_of(problem: FilterProblem) -> int:
    """Products of k16 that the window of 8 outputs takes."""
    return window_of(problem)[1]


def pieces_of(problem: FilterProblem) -> tuple[int, int]:
    """Pieces of an element and of a weight."""
    if problem.dtype == "bfloat16":
        return 1, 3
    return 1 if problem.dtype in (*BYTES_OF_PIXELS, "float16") else 2, 2


def fragments_of(problem: FilterProblem, two_rows: bool) -> int:
    """Fragments of the weights: for each row of the filter and step of k16, or for each pair of rows of a window."""
    return problem.kh // 2 + 1 if two_rows else problem.kh * steps_of(problem)


def row_cycles(problem: FilterProblem, two_rows: bool, target: Target, speeds: FilterSpeeds) -> float:
    """Of a scheduler, for 128 outputs: products of all pieces but the two smallest, and what else a row takes."""
    products = fragments_of(problem, two_rows) * (sum(pieces_of(problem)) - 1)
    cycles = speeds.row[problem.dtype] + speeds.product * products * 4096 / target.tensor_flops
    return cycles + speeds.addition * problem.kh if keeps_digits(problem) else cycles


def keeps_digits(problem: FilterProblem) -> bool:
    """Whether products of one filter row are summed apart."""
    return pieces_of(problem)[0] == 2 or problem.result not in (*BYTES_OF_PIXELS, *HALVES)


def takes_two_rows(problem: FilterProblem) -> bool:
    """Whether two rows of outputs can be made at a time: pixels of one piece, windows of 8 columns, and results that
    are rounded to fewer digits than sums have."""
    channels, apart = layout_of(problem)
    one_piece = problem.dtype in BYTES_OF_PIXELS or (channels == 1 and problem.dtype in HALVES)
    return one_piece and not keeps_digits(problem) and 4 + (problem.kw - 1) * apart <= 8


def ring_of(problem: FilterProblem) -> tuple[int, int]:
    """Of two rows at a time: rows in the ring, such that few iterations go around it and around the window, and rows of
    outputs that these make."""
    pairs = problem.kh // 2 + 1
    depth = 12 if pairs == 3 else max(8, 2 * pairs)
    return depth, 2 * lcm(depth // 2, pairs)


def shared_bytes(problem: FilterProblem, config: TensorFilterConfig) -> int:
    """Shared memory of a block: weights, and for each warp a ring of rows, the columns of a strip at an edge, and of
    several channels a row of outputs."""
    (channels, _), (pad, steps), size = layout_of(problem), window_of(problem), item_bytes(problem.dtype)
    in_vector, width = 16 // size, 128 * config.tiles
    left = ceil_div(pad * channels, in_vector) * in_vector
    last = width + 8 if config.two_rows else width - pad - 8 + 16 * steps
    row = ceil_div(left + last * channels, in_vector) * in_vector
    if config.two_rows and size == 1:
        row = ceil_div(row - 64, 128) * 128 + 64  # as they lie in the kernel
    staging = (1 + config.two_rows) * width * channels * item_bytes(problem.result) if channels > 1 else 0
    fragments = fragments_of(problem, config.two_rows) * pieces_of(problem)[1]
    weights = 8 * 32 * fragments if config.shared else 0
    return weights + config.warps * (row * (config.depth * size + 4) + staging)


def registers_needed(problem: FilterProblem, tiles: int, shared: bool, two_rows: bool = False) -> int:
    """Registers of a thread: sums, those of a few rows apart, weights, and pixels of two rows; where two rows of
    outputs are made at a time the pixels of a whole window, and sums of these rows and of those before."""
    (pixel, weight), steps = pieces_of(problem), steps_of(problem)
    columns = tiles * layout_of(problem)[0]
    if two_rows:
        pairs, halves = problem.kh // 2 + 1, problem.dtype in HALVES
        raw = 8 if halves and problem.anchor[1] % 2 else 4
        return 2 * columns * (4 * pairs + 8 + raw) + 2 * weight * pairs + (28 if halves else 20)
    sums = 4 * problem.kh * columns + (16 if pixel == 2 else 0)
    weights = 16 if shared else 2 * weight * problem.kh * steps
    return sums + weights + columns * steps * (8 * pixel + 2 * item_bytes(problem.dtype)) + ADDRESSES


def most_registers(problem: FilterProblem) -> int:
    """What `registers_needed` may say: of several channels more are needed at a time."""
    return REGISTERS - 12 * (layout_of(problem)[0] - 1)


def strips_of(problem: FilterProblem, tiles: int) -> int:
    """Strips of all images, one for each filter."""
    return strips_of_image(problem, tiles) * problem.batch * problem.filters


def strips_of_image(problem: FilterProblem, tiles: int) -> int:
    return ceil_div(problem.out_w * layout_of(problem)[1], 128 * tiles)


def rows_of_band(problem: FilterProblem, tiles: int, slots: int) -> int:
    """Rows of outputs of a warp, such that ``slots`` of them, which run at a time, end at a time: of whole waves the
    cheapest, with the rows that bands read twice."""
    strips = max(1, strips_of(problem, tiles))

    def of(waves: int) -> tuple[int, int]:
        rows = ceil_div(max(1, problem.out_h), max(1, waves * slots // strips))
        return max(waves, ceil_div(strips, slots)) * (rows + problem.kh - 1 + SETUP_ROWS), rows

    return min(of(waves) for waves in (1, 2, 3, 4))[1]


def band_rows(problem: FilterProblem, config: TensorFilterConfig, target: Target) -> int:
    """Rows of a band."""
    if config.rows:
        return config.rows
    slots = blocks_at_once(problem, config, target) * config.warps * target.multiprocessors
    return rows_of_band(problem, config.tiles, slots)


def blocks_at_once(problem: FilterProblem, config: TensorFilterConfig, target: Target) -> int:
    """Blocks of a multiprocessor that run at a time."""
    room = target.shared_per_multiprocessor // (shared_bytes(problem, config) + 1024)
    return max(1, min(config.min_blocks, room))


def blocks_of(problem: FilterProblem, config: TensorFilterConfig, rows: int) -> int:
    """Blocks of a launch with bands of so many rows."""
    warps = strips_of_image(problem, config.tiles) * ceil_div(problem.out_h, rows)
    return ceil_div(warps, config.warps) * problem.batch * problem.filters


class TensorFilter(TimedAlgorithm):
    """Correlation by mma.sync, in pieces of pixels and weights, sums in float32, every border, no workspace."""

    name = "tensor_filter"
    paper = "the band matrix of each row of the filter"
    precision = "fp32"
    solves = "filter2d"

    def arithmetic(self, problem: FilterProblem) -> Arithmetic:
        return "fp16"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        reasons = ["the filter is given as products of a column and a row"] if problem.rank else []
        if problem.reduction is not None:
            reasons = ["a box has no weights"]
        if not target.warp_products:
            reasons.append(f"{target.arch} has no products of warps in float16")
        if problem.sums != "float32":
            types = f"from {problem.dtype} to {problem.result}"
            reasons.append(f"{types} sums are {problem.sums}, and tensor cores sum in float32")
        if problem.is_volume:
            reasons.append("it filters images, not volumes")
        if problem.channels > CHANNELS:
            reasons.append(f"pixels have {problem.channels} channels, and the limit is {CHANNELS}")
        if not (1 <= problem.kh <= LIMIT and 1 <= problem.kw <= LIMIT):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {LIMIT}x{LIMIT}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        elif not reasons and (needs := registers_needed(problem, 1, True)) > most_registers(problem):
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            rows = f"{problem.kh} rows of sums{each}"
            reasons.append(f"a thread needs {needs} registers for {rows}, and the limit is {most_registers(problem)}")
        if max(problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        sizes = (problem.x_pitch, problem.dtype), (problem.y_pitch, problem.result)
        if (most := max(problem.h * abs(pitch) * item_bytes(dtype) for pitch, dtype in sizes)) >= BYTES:
            reasons.append(f"an image has {most} bytes, and offsets are of 32 bits")
        if not reasons and strips_of(problem, 1) * problem.out_h >= 2**31:
            images = f"{problem.batch} images of {problem.h}x{problem.w} with {problem.filters} filters"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        return reasons

    def shapes(self, problem: FilterProblem) -> Iterator[Shape]:
        if takes_two_rows(problem):
            channeled = layout_of(problem)[0] > 1
            shape = CHANNELED_PAIRS if channeled else HALF_PAIRS if problem.dtype in HALVES else PAIRS
            depth, step = ring_of(problem)
            yield ceil_div(shape[0], step) * step, shape[1], depth, *shape[3:]
        if layout_of(problem)[0] > 1:
            yield CHANNELED
        elif steps_of(problem) == 1:
            narrow = problem.kh <= 7 or problem.dtype == "float32"
            small = LOW if problem.kh <= 4 else HALF if problem.dtype == "float16" else SMALL
            yield from (small, MEDIUM) if narrow else (MEDIUM, small)
        yield LARGE
        yield from OTHERS

    def configurations(self, problem: FilterProblem, target: Target) -> Iterator[TensorFilterConfig]:
        """The valid ones, the best guess first."""
        for rows, tiles, depth, unroll, warps, shared, two_rows in dict.fromkeys(self.shapes(problem)):
            needs = registers_needed(problem, tiles, shared, two_rows)
            # the shape that needs least is for all filters
            if needs > (most_registers(problem) if shared and tiles == 1 else 232):
                continue
            blocks = target.registers_per_multiprocessor // (32 * warps * ceil_div(min(needs, 255), 8) * 8)
            config = TensorFilterConfig(0, tiles, depth, unroll, warps, shared, max(1, blocks), two_rows)
            if shared_bytes(problem, config) > target.shared_per_block:
                continue
            # small images have short bands
            step = ring_of(problem)[1] if two_rows else 1
            least = ceil_div(max(4, band_rows(problem, config, target)), step) * step
            yield replace(config, rows=min(rows, least))

    def timed(self, problem: FilterProblem, target: Target) -> list[tuple[float, TensorFilterConfig]]:
        """One time for all, that of the first. The order is that of `configurations`, but those come last whose bands
        take a warp that is alone longer than the whole work and memory take."""
        speeds = FilterSpeeds.of(target)
        rows = ceil_div(problem.out_w, 128) * problem.channels * problem.batch * problem.filters * problem.out_h
        each = row_cycles(problem, takes_two_rows(problem), target, speeds)
        memory = speeds.memory * problem.bytes / target.bytes_per_cycle
        least = max(rows / (4 * target.multiprocessors) * each, memory)

        def alone(config: TensorFilterConfig) -> float:
            return (band_rows(problem, config, target) + problem.kh - 1 + SETUP_ROWS) * speeds.latency

        found = list(dict.fromkeys(self.configurations(problem, target)))
        found.sort(key=lambda config: max(least, alone(config)))
        cycles = self.cycles(problem, found[0], target) if found else 0.0
        return [(cycles, config) for config in found]

    def cycles(self, problem: FilterProblem, config: TensorFilterConfig, target: Target) -> float:
        """Of the multiprocessor with most blocks, round after round; its busiest scheduler has a warp more than others
        where they do not divide evenly. Rows that two bands read are multiplied twice."""
        speeds, rows = FilterSpeeds.of(target), band_rows(problem, config, target)
        fragments = fragments_of(problem, config.two_rows)
        row = config.tiles * layout_of(problem)[0] * row_cycles(problem, config.two_rows, target, speeds)
        if config.shared:
            row += speeds.read * pieces_of(problem)[1] * fragments
        inputs = rows if config.two_rows else rows + problem.kh - 1
        first = speeds.fragment * fragments / (config.warps if config.shared else 1)

        def together(blocks: int) -> float:
            return first + ceil_div(blocks * config.warps, 4) * inputs * row

        blocks = blocks_of(problem, config, rows)
        busy = busy_cycles(blocks, blocks_at_once(problem, config, target), target, together)
        memory = speeds.memory * problem.bytes / target.bytes_per_cycle
        return launch_cycles(target) + speeds.start + overlapped(busy, memory, speeds.lesser)

    def plan(self, problem: FilterProblem, config: TensorFilterConfig, target: Target) -> Plan:
        strips = strips_of_image(problem, config.tiles)
        rows = band_rows(problem, config, target)
        bands = ceil_div(problem.out_h, rows)
        counts = ("all_filters", problem.filters), ("per_image", problem.per_image)
        grid = blocks_of(problem, config, rows)
        given = (*arguments(problem, strips, bands), Number("int", "band_rows", rows))
        compiled = (*constants(problem, problem.channels, 1), *counts)
        # NOTE: the height of a band is an argument, so that images of all sizes share kernels
        tuning = tuple(each for each in config.constants() if each[0] != "rows")
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config), tuning),))
