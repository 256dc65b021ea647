"""Gradient of the filters on tensor cores for float16 and bfloat16 in NCHW, from tensor copies of both operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from operator import itemgetter
from typing import NamedTuple

from leanconv.kernels.common import layers, split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments, limits, wgmma_limits
from leanconv.kernels.common.tensor_core_gemm import REGISTERS
from leanconv.kernels.contract import Arithmetic, Config, ceil_div, variant
from leanconv.kernels.cost import Speeds, clusters_at_once, moved_bytes, overlapped
from leanconv.kernels.hopper_native.native_gemm_nchw import NativeGemmNchw
from leanconv.kernels.hopper_native.native_weight_nhwc import shares
from leanconv.plan import Constants, Plan, Target, TensorMap
from leanconv.problem import ConvProblem

#: Filters of a wgmma, columns of a k16 step, and bytes of an element.
MMA_M, K16, ITEM = 64, 16, 2
#: Elements of 16 bytes: where copies begin, and what rows are multiples of.
ALIGNED = 8
#: Columns of x in a stage: rows as long as a swizzle spans.
COLUMNS = (64, 32, 16)
#: Output rows of a stage; stages of the ring, at least and at most.
ROWS, MIN_STAGES, MAX_STAGES = (14, 10, 8, 7, 6, 4, 2, 1), 3, 8
#: Rows of stages that many blocks share evenly.
FEW_ROWS = 2
#: Filter rows of one product, at most.
MOST_ROWS = 4
#: Columns of a product: groups of filters and of filter columns, channels times filter rows.
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = (
    (2, 1, 256), (1, 3, 192), (2, 1, 192), (2, 1, 128), (1, 3, 128), (2, 1, 96), (1, 3, 96), (2, 1, 64), (1, 3, 64),
    (2, 1, 32),
)  # fmt: skip
#: Groups of filters and of filter columns of the tiles that suit few filters.
ONE_FILTER_GROUP = (1, 3)
#: Sums of a thread, at most, by the number of consumers.
MOST_SUMS = {2: 160, 3: 96}
#: Bytes of shared memory that a multiprocessor moves in a clock cycle.
SHARED_BYTES = 128


@dataclass(frozen=True)
class KMajorSpeeds(Speeds):
    """Clock cycles, fitted to 63 pairs of a layer and a configuration.

    Explored (H200, 9a529e60), burst: within 8 % in the mean, and 30 % at most; the quickest of each layer,
    with a workspace of up to 32 MiB, within 13 %.
    """

    #: of a product of 64 filters and 16 pixels, beside those at the tensor cores' peak
    product: float
    #: share of the tensor cores' peak that is missing, and by what more copies take, where all multiprocessors are busy
    busy: tuple[float, float]
    #: of a row of a box that TMA copies, and the bytes of its rows that it copies in a cycle
    row: float
    copied_per_cycle: float
    #: share of the shorter that is not hidden, of all stages and of what memory takes for both tensors
    not_hidden: float
    #: of a block beside its stages
    block: float
    #: of the launch that adds partial sums, and the bytes of these that it and the first one move in a cycle
    adding: float
    added_per_cycle: float
    #: of a call beside them
    start: float


@dataclass(frozen=True)
class KMajorWeightConfig(Config):
    """A tile has 64 filters for each of ``filter_groups`` consumers, ``channels``, ``tap_rows`` rows of a filter, and
    ``tap_columns`` columns of it for each of ``column_groups``.

    A stage of the ring, which has ``stages``, holds ``rows`` output rows and what they read, ``columns`` wide. A
    cluster of ``split`` CTAs shares a tile's pixels, and so do ``split_k`` of them whose sums a second launch adds.
    """

    filter_groups: int
    column_groups: int
    channels: int
    tap_rows: int
    tap_columns: int
    columns: int
    rows: int
    stages: int
    consumer_registers: int
    producer_registers: int
    split: int = 1
    split_k: int = 1

    @property
    def consumers(self) -> int:
        return self.filter_groups * self.column_groups

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and one warpgroup of which one thread copies."""
        return 128 * (self.consumers + 1)

    @property
    def filters(self) -> int:
        return MMA_M * self.filter_groups

    @property
    def all_columns(self) -> int:
        """Filter columns of a tile."""
        return self.tap_columns * self.column_groups

    @property
    def weights(self) -> int:
        """Weights of a tile."""
        return self.filters * self.channels * self.tap_rows * self.all_columns

    @property
    def sum_bytes(self) -> int:
        """Bytes of the tile's sums, where the ring was: an odd number of words for each filter."""
        return 16 * ceil_div(4 * self.filters * (self.weights // self.filters | 1), 16)

    def window(self, problem: ConvProblem) -> int:
        return window_of(problem, self.columns, self.all_columns)

    def stage(self, problem: ConvProblem) -> Stage:
        return stage_of(problem, self.columns, self.rows)

    def copies(self, stage: Stage, window: int) -> tuple[int, int]:
        """Rows of the boxes of a stage, and their bytes."""
        x, dy = stage.x_rows * self.channels, stage.rows * self.filters
        return x + dy, ITEM * (x * stage.columns + dy * window)

    def barriers_at(self, problem: ConvProblem) -> int:
        """Bytes of the ring, or of the sums, where these take more."""
        _, copied = self.copies(self.stage(problem), self.window(problem))
        return max(self.stages * stage_bytes(copied), self.sum_bytes)

    def layout(self, problem: ConvProblem) -> Constants:
        """What the kernel knows of a stage, and where its barriers begin."""
        step, spacing = row_steps(problem)
        return (
            ("window", self.window(problem)),
            ("row_step", step),
            ("row_spacing", spacing),
            ("x_rows", self.stage(problem).x_rows),
            ("barriers_at", self.barriers_at(problem)),
        )

    def stages_of(self, problem: ConvProblem) -> int:
        """Stages of all images."""
        return self.stage(problem).of_images


class Stage(NamedTuple):
    """Output rows of a stage, ``columns`` of x wide, and its rows of x, as far apart as the taps of a filter column;
    steps of 16 pixels of all its rows; how many of these stages all images have."""

    columns: int
    rows: int
    x_rows: int
    steps: int
    of_images: int


def stage_of(problem: ConvProblem, columns: int, rows: int) -> Stage:
    """One of the layer, of which taps of one product share the rows."""
    step, spacing = row_steps(problem)
    of_images = problem.n * problem.z * ceil_div(problem.p, rows * spacing) * spacing * ceil_div(problem.w, columns)
    x_rows = (rows - 1) * step + rows_of_product(problem)
    return Stage(columns, rows, x_rows, rows * held_steps(problem, columns), of_images)


def stages_for(problem: ConvProblem) -> list[Stage]:
    """Stages of all kinds that suit rows as long as those of x."""
    widths, found = set(), []
    for columns in COLUMNS:
        held = held_steps(problem, columns)
        width = ceil_div(problem.w, columns) * K16 * held
        if width in widths or (columns > K16 and columns >= 2 * problem.w):
            continue  # a longer row has as many columns, or a shorter one has all
        widths.add(width)
        found += [stage_of(problem, columns, rows) for rows in ROWS if rows * held % 2 == 0]
    return found


def stage_bytes(copied: int) -> int:
    """Bytes of a stage of the ring, in which tiles of swizzled rows begin at multiples of 1024."""
    return ceil_div(copied, 1024) * 1024


def window_of(problem: ConvProblem, columns: int, all_columns: int) -> int:
    """Pixels of a row of dy: what all taps of a tile read, from a multiple of 16 bytes on, and an odd number of these,
    so that eight rows meet each bank of shared memory once."""
    step, read = problem.dilation[1], K16 * held_steps(problem, columns)
    firsts = (problem.padding[2] - first * step for first in range(0, problem.s, all_columns))
    begins = ((first, (first - (all_columns - 1) * step) // ALIGNED * ALIGNED) for first in firsts)
    units = max(ceil_div(first - begin + read, ALIGNED) for first, begin in begins)
    return ALIGNED * (units | 1)


def row_steps(problem: ConvProblem) -> tuple[int, int]:
    """Rows of x in a stage from one output row to the next, and how far apart these output rows are: as far as it takes
    for taps of both to read the same rows."""
    stride, dilation = problem.stride[0], problem.dilation[0]
    common = gcd(stride, dilation)
    return stride // common, dilation // common


def held_steps(problem: ConvProblem, columns: int) -> int:
    """Steps of 16 pixels of a row: none that has no pixel."""
    return min(columns // K16, ceil_div(problem.w, K16))


def tensor_map(problem: ConvProblem, role: str, box: tuple[int, int, int], step: int, swizzle: int) -> TensorMap:
    """How TMA walks over x or dy, a ``box`` of columns, channels and rows at a time, of which every ``step``-th."""
    c, d, h, w = (
        (problem.c, problem.d, problem.h, problem.w) if role == "x" else (problem.k, problem.z, problem.p, problem.q)
    )
    slices = (d,) * problem.is_volume
    row, plane, channel = ITEM * w, ITEM * w * h, ITEM * w * h * d
    columns, channels, rows = box
    return TensorMap(
        role,
        problem.dtype,
        shape=(w, c, h, *slices, problem.n),
        strides=(channel, row, *(plane for _ in slices), channel * c),
        box=(columns, channels, (rows - 1) * step + 1, *(1 for _ in slices), 1),
        traversal=(1, 1, step, *(1 for _ in slices), 1),
        swizzle=swizzle,
    )


def maps_of(problem: ConvProblem, config: KMajorWeightConfig) -> tuple[TensorMap, TensorMap]:
    """Those of x and of dy."""
    x = config.columns, config.channels, config.stage(problem).x_rows
    dy = config.window(problem), config.filters, config.rows
    return (
        tensor_map(problem, "x", x, problem.dilation[0], ITEM * config.columns),
        tensor_map(problem, "dy", dy, row_steps(problem)[1], 0),
    )


class NativeWeightKMajor(split_k.PredictedSplitK):
    """The filters' gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW, rows of whole 16 bytes."""

    name = "native_weight"
    strategy = "kmajor"
    paper = NativeGemmNchw.paper
    precision = "fp32"
    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "wgrad", dtypes=layers.FLOATS_16BIT), *wgmma_limits(target)]
        if problem.layout != "NCHW":
            reasons.append(f"layout={problem.layout!r} is not NCHW: tensor copies bring whole rows of pixels")
        if problem.n < 1:
            reasons.append(f"n={problem.n}: there are no images")
        if problem.stride[1] != 1:
            reasons.append(f"stride={problem.stride}: along a row neighbouring outputs must read neighbouring pixels")
        if reasons:
            return reasons
        odd = "are no multiple of 16 bytes, which tensor copies require"
        if problem.w % ALIGNED:
            return [f"rows of {problem.w} pixels of x {odd}: take {ceil_div(problem.w, ALIGNED) * ALIGNED} pixels"]
        if problem.q % ALIGNED:
            origin = f"which follow from {problem.w} pixels of x and padding={problem.padding}"
            return [f"rows of {problem.q} pixels of the output, {origin}, {odd}"]
        if problem.pixels >= 2**31:
            return [f"the output has {problem.pixels} pixels, 2**31 or more"]
        return [] if whole_configs(problem, target) else _no_room(problem, target)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def predicted(
        self, problem: ConvProblem, target: Target, workspace: float
    ) -> Iterator[tuple[float, KMajorWeightConfig, int, int]]:
        room = split_k.most_partial_sums(problem, workspace)
        for whole in whole_configs(problem, target):
            stages, tiles = whole.stages_of(problem), tiles_of(problem, whole)
            cycles, pixels = cycles_of(problem, whole, target), stages * whole.rows * whole.columns
            for split, slices in shares(pixels, stages, tiles, target, room):
                yield cycles(split, slices), whole, split, slices

    def plan(self, problem: ConvProblem, config: KMajorWeightConfig, target: Target) -> Plan:
        *_, batch = gradient_arguments(problem)
        tuning = (*config.constants(), *config.layout(problem))
        arguments = (*maps_of(problem, config), split_k.destination(problem, config.split_k), batch)
        grid = tiles_of(problem, config) * config.split * config.split_k
        shared = config.barriers_at(problem) + 16 * config.stages
        first = self.launch(config, conv_constants(problem), arguments, grid, shared, tuning)
        return split_k.with_sums(first, problem, config.split_k, early=True)


def tiles_of(problem: ConvProblem, config: KMajorWeightConfig) -> int:
    of_group = ceil_div(problem.group_k, config.filters) * ceil_div(problem.group_c, config.channels)
    of_taps = ceil_div(problem.r, config.tap_rows) * ceil_div(problem.s, config.all_columns)
    return of_group * of_taps * problem.t * problem.groups


def rows_of_product(problem: ConvProblem) -> int:
    """Filter rows that one product has: all, or as many as leave the fewest without a row."""
    rows = problem.r
    return rows if rows <= MOST_ROWS else min((MOST_ROWS, 3), key=lambda each: ceil_div(rows, each) * each)


def tap_columns_of(problem: ConvProblem, tile: Tile) -> int:
    """Filter columns of a column group: as few as make no more tiles than the most that sums have room for."""
    filter_groups, column_groups, width = tile
    most = max(1, 2 * MOST_SUMS[filter_groups * column_groups] // width)
    return ceil_div(problem.s, ceil_div(problem.s, most * column_groups) * column_groups)


def tiles_for(problem: ConvProblem) -> tuple[list[Tile], list[Tile]]:
    """The tiles of the layer, and those that others replace: of which half has room for all channels, where there is
    a narrower one of as many groups and filter columns; or for all filters, where there is one of half as many."""
    rows, few_filters = rows_of_product(problem), problem.group_k <= MMA_M and problem.s >= ONE_FILTER_GROUP[1]
    possible = [tile for tile in TILES if tile[2] % (8 * rows) == 0 and problem.s >= tile[1]]
    kinds = [(*tile[:2], tap_columns_of(problem, tile)) for tile in possible]
    narrowest = dict(zip(kinds, possible, strict=True))
    taken: tuple[list[Tile], list[Tile]] = [], []
    for tile, kind in zip(possible, kinds, strict=True):
        wide = problem.group_c <= tile[2] // rows // 2 and tile != narrowest[kind]
        taken[wide or (few_filters and tile[:2] != ONE_FILTER_GROUP)].append(tile)
    return taken


@lru_cache(maxsize=64)
def whole_configs(problem: ConvProblem, target: Target) -> tuple[KMajorWeightConfig, ...]:
    """The quickest configurations of each tile, computed by one block: one of any rows, and one of few. Of tiles that
    others replace only where none of the others fits."""
    stages, windows = stages_for(problem), dict[tuple[int, int], int]()
    for tiles in tiles_for(problem):
        found = [config for tile in tiles for config in _quickest(problem, tile, target, stages, windows)]
        if found:
            return tuple(found)
    return ()


def _quickest(
    problem: ConvProblem, tile: Tile, target: Target, stages: list[Stage], windows: dict[tuple[int, int], int]
) -> Iterator[KMajorWeightConfig]:
    """Those of a tile; ``windows`` keeps what `window_of` says of columns of x and of a filter."""
    whole = config_of(problem, tile, COLUMNS[0], FEW_ROWS, MIN_STAGES)
    speeds, step = KMajorSpeeds.of(target), step_cycles(problem, whole, target)
    columns, sums, ways = whole.all_columns, whole.sum_bytes, []
    for stage in stages:
        if (stage.columns, columns) not in windows:
            windows[stage.columns, columns] = window_of(problem, stage.columns, columns)
        copies = whole.copies(stage, windows[stage.columns, columns])
        each = stage_bytes(copies[1])
        number = min(target.shared_per_block // (each + 16), MAX_STAGES)
        if number >= MIN_STAGES and max(number * each, sums) + 16 * number <= target.shared_per_block:
            cycles = max(stage_cycles(speeds, step * stage.steps, copy_cycles(speeds, *copies), 1))
            ways.append((cycles * stage.of_images, stage, number))
    ways.sort(key=itemgetter(0))
    taken: Stage | None = None
    for rows in (ROWS[0], FEW_ROWS):
        for _, stage, number in ways:
            if stage.rows > rows:
                continue
            if stage is taken:
                break
            config = variant(whole, columns=stage.columns, rows=stage.rows, stages=number)
            if not any(each.why_not() for each in maps_of(problem, config)):
                taken = stage
                yield config
                break


def _no_room(problem: ConvProblem, target: Target) -> list[str]:
    """Why the layer has no configuration: what is wrong with the one whose stages take the fewest bytes."""
    tiles, stages = [each for some in tiles_for(problem) for each in some], stages_for(problem)
    configs = [config_of(problem, tile, stage.columns, stage.rows, MIN_STAGES) for tile in tiles for stage in stages]
    copied = [each.copies(each.stage(problem), each.window(problem))[1] for each in configs]
    least = min(copied)
    maps = maps_of(problem, configs[copied.index(least)])
    reasons = [f"no tensor map describes {each.role}: {why}" for each in maps for why in each.why_not()]
    room = f"the {target.shared_per_block} bytes of shared memory that a block has"
    return reasons or [f"{MIN_STAGES} stages of {stage_bytes(least)} bytes take more than {room}"]


def config_of(problem: ConvProblem, tile: Tile, columns: int, rows: int, stages: int) -> KMajorWeightConfig:
    filter_groups, column_groups, width = tile
    tap_rows, tap_columns = rows_of_product(problem), tap_columns_of(problem, tile)
    registers = REGISTERS[filter_groups * column_groups, False]
    return KMajorWeightConfig(
        filter_groups, column_groups, width // tap_rows, tap_rows, tap_columns, columns, rows, stages, *registers
    )


def stage_cycles(speeds: KMajorSpeeds, computed: float, copied: float, busy: float) -> tuple[float, float]:
    """Cycles of a stage's products and of its copies, where a share ``busy`` of the multiprocessors works."""
    return computed / (1 - speeds.busy[0] * busy), copied * (1 + speeds.busy[1] * busy)


def copy_cycles(speeds: KMajorSpeeds, rows: int, copied: int) -> float:
    """Cycles of a stage's copies of rows of boxes, and of their bytes."""
    return speeds.row * rows + copied / speeds.copied_per_cycle


def step_cycles(problem: ConvProblem, config: KMajorWeightConfig, target: Target) -> float:
    """Cycles of the products of a step of 16 pixels: of the tensor cores at their peak, or of shared memory, from which
    a product reads 32 bytes a column, and a lane a word of dy for each pair of pixels, or two."""
    step, left = problem.dilation[1], problem.padding[2]
    words = 0
    for group in range(config.column_groups):
        shifts = [left - (group * config.tap_columns + i) * step for i in range(config.tap_columns)]
        words += len({word for shift in shifts for word in (shift // 2, (shift + 1) // 2)})
    columns = config.all_columns * config.tap_rows * config.channels
    products = 2 * MMA_M * K16 * columns / target.tensor_flops
    reads = (ITEM * K16 * columns + ITEM * MMA_M * K16 * words) / SHARED_BYTES
    beside = KMajorSpeeds.of(target).product * config.all_columns
    return config.filter_groups * (max(products, reads) + beside)


def cycles_of(problem: ConvProblem, whole: KMajorWeightConfig, target: Target) -> Callable[[int, int], float]:
    """A function that predicts the clock cycles of ``whole`` with another ``split`` and ``split_k``."""
    speeds, stage, tiles = KMajorSpeeds.of(target), whole.stage(problem), tiles_of(problem, whole)
    products = step_cycles(problem, whole, target) * stage.steps
    copies = copy_cycles(speeds, *whole.copies(stage, whole.window(problem)))
    memory = moved_bytes(problem) / target.bytes_per_cycle
    sums = 8 * split_k.weights_of(problem) / speeds.added_per_cycle
    # pairs of blocks find a place on all multiprocessors
    places = {split: target.multiprocessors // split for split in (1, 2)}

    def predicted(split: int, slices: int) -> float:
        if split not in places:
            places[split] = clusters_at_once(split, 1, target)
        busy = min(1.0, tiles * slices * split / target.multiprocessors)
        computed, copied = stage_cycles(speeds, products, copies, busy)
        # the first stage's copies hide nothing
        each = ceil_div(stage.of_images, split * slices) * max(computed, copied) + copied + speeds.block
        time = overlapped(ceil_div(tiles * slices, places[split]) * each, memory, speeds.not_hidden)
        return time + speeds.start + (speeds.adding + slices * sums if slices > 1 else 0)

    return predicted
