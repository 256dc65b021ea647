"""Gradient of the filters on tensor cores for float16 and bfloat16 in NCHW, from tensor copies of both operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from operator import itemgetter

from leanconv.kernels.common import layers, split_k
from leanconv.kernels.common.layers import conv_constants, gradient_arguments, limits, wgmma_limits
from leanconv.kernels.common.tensor_core_gemm import REGISTERS
from leanconv.kernels.contract import Arithmetic, Config, ceil_div
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

    def steps(self, problem: ConvProblem) -> int:
        """Steps of 16 pixels of a stage."""
        return self.rows * held_steps(problem, self.columns)

    def window(self, problem: ConvProblem) -> int:
        """Pixels of a row of dy: what all taps of a tile read, from a multiple of 16 bytes on, and an odd number of
        these, so that eight rows meet each bank of shared memory once."""
        step, read = problem.dilation[1], K16 * held_steps(problem, self.columns)
        firsts = (problem.padding[2] - first * step for first in range(0, problem.s, self.all_columns))
        begins = ((first, (first - (self.all_columns - 1) * step) // ALIGNED * ALIGNED) for first in firsts)
        units = max(ceil_div(first - begin + read, ALIGNED) for first, begin in begins)
        return ALIGNED * (units | 1)

    def x_rows(self, problem: ConvProblem) -> int:
        """Rows of x of a stage, as far apart as the taps of a filter column."""
        return (self.rows - 1) * row_steps(problem)[0] + self.tap_rows

    def copied_bytes(self, problem: ConvProblem) -> int:
        x = self.x_rows(problem) * self.channels * self.columns
        return ITEM * (x + self.rows * self.filters * self.window(problem))

    def barriers_at(self, problem: ConvProblem) -> int:
        """Bytes of the ring, or of the sums, where these take more."""
        sums = 4 * self.filters * (self.weights // self.filters | 1)
        return max(self.stages * ceil_div(self.copied_bytes(problem), 1024) * 1024, ceil_div(sums, 16) * 16)

    def layout(self, problem: ConvProblem) -> Constants:
        """What the kernel knows of a stage, and where its barriers begin."""
        step, spacing = row_steps(problem)
        return (
            ("window", self.window(problem)),
            ("row_step", step),
            ("row_spacing", spacing),
            ("x_rows", self.x_rows(problem)),
            ("barriers_at", self.barriers_at(problem)),
        )

    def stages_of(self, problem: ConvProblem) -> int:
        """Stages of all images."""
        _, spacing = row_steps(problem)
        rows = ceil_div(problem.p, self.rows * spacing) * spacing
        return problem.n * problem.z * rows * ceil_div(problem.w, self.columns)


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
    x = config.columns, config.channels, config.x_rows(problem)
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
        for pixels, what in ((problem.w, "x"), (problem.q, "the output")):
            if pixels % ALIGNED:
                return [
                    f"rows of {pixels} pixels of {what} are no multiple of 16 bytes, which tensor copies require: take "
                    f"{ceil_div(pixels, ALIGNED) * ALIGNED} pixels"
                ]
        if problem.pixels >= 2**31:
            return [f"the output has {problem.pixels} pixels, 2**31 or more"]
        if not whole_configs(problem, target):
            config = config_of(problem, TILES[-1], COLUMNS[-1], FEW_ROWS, MIN_STAGES)
            maps = maps_of(problem, config)
            reasons = [f"no tensor map describes {each.role}: {why}" for each in maps for why in each.why_not()]
            room = f"the {target.shared_per_block} bytes of shared memory that a block has"
            return reasons or [f"{MIN_STAGES} stages of {config.copied_bytes(problem)} bytes take more than {room}"]
        return []

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


@lru_cache(maxsize=64)
def whole_configs(problem: ConvProblem, target: Target) -> tuple[KMajorWeightConfig, ...]:
    """The quickest configurations of each tile, computed by one block: one of any rows, and one of few. Of those tiles
    of which half has not room for all filters or channels; of the smallest in any case."""
    found: list[KMajorWeightConfig] = []
    for tile in TILES:
        filter_groups, column_groups, columns = tile
        tap_rows = rows_of_product(problem)
        channels, rest = divmod(columns, tap_rows)
        if rest or channels % 8 or problem.s < column_groups:
            continue
        small = problem.group_c <= channels // 2 or (filter_groups > 1 and problem.group_k <= MMA_M)
        if small and found and tile != TILES[-1]:
            continue
        ways = sorted(_ways(problem, tile, target), key=itemgetter(0))
        few = [way for way in ways if way[1].rows <= FEW_ROWS]
        found += dict.fromkeys(config for _, config in ways[:1] + few[:1])
    return tuple(found)


def _ways(problem: ConvProblem, tile: Tile, target: Target) -> Iterator[tuple[float, KMajorWeightConfig]]:
    """Valid configurations of a tile, with the cycles of all their stages."""
    widths = set()
    for columns in COLUMNS:
        width = ceil_div(problem.w, columns) * K16 * held_steps(problem, columns)
        if width in widths or (columns > K16 and columns >= 2 * problem.w):
            continue  # a longer row has as many columns, or a shorter one has all
        widths.add(width)
        for rows in ROWS:
            if rows * held_steps(problem, columns) % 2:
                continue
            config = config_of(problem, tile, columns, rows, 1)
            each = ceil_div(config.copied_bytes(problem), 1024) * 1024 + 16
            stages = min(target.shared_per_block // each, MAX_STAGES)
            config = config_of(problem, tile, columns, rows, stages)
            room = config.barriers_at(problem) + 16 * stages <= target.shared_per_block
            if stages < MIN_STAGES or not room or any(each.why_not() for each in maps_of(problem, config)):
                continue
            yield max(stage_cycles(problem, config, target, 1)) * config.stages_of(problem), config


def config_of(problem: ConvProblem, tile: Tile, columns: int, rows: int, stages: int) -> KMajorWeightConfig:
    filter_groups, column_groups, width = tile
    consumers, tap_rows = filter_groups * column_groups, rows_of_product(problem)
    most = max(1, 2 * MOST_SUMS[consumers] // width)
    tap_columns = ceil_div(problem.s, ceil_div(problem.s, most * column_groups) * column_groups)
    registers = REGISTERS[consumers, False]
    return KMajorWeightConfig(
        filter_groups, column_groups, width // tap_rows, tap_rows, tap_columns, columns, rows, stages, *registers
    )


def stage_cycles(problem: ConvProblem, config: KMajorWeightConfig, target: Target, busy: float) -> tuple[float, float]:
    """Cycles of a stage's products and of its copies, where a share ``busy`` of the multiprocessors works."""
    speeds, products = KMajorSpeeds.of(target), config.steps(problem) * config.filter_groups * config.all_columns
    computed = computed_cycles(problem, config, target) + speeds.product * products
    x, dy = config.x_rows(problem) * config.channels, config.rows * config.filters
    copied = speeds.row * (x + dy) + config.copied_bytes(problem) / speeds.copied_per_cycle
    return computed / (1 - speeds.busy[0] * busy), copied * (1 + speeds.busy[1] * busy)


def computed_cycles(problem: ConvProblem, config: KMajorWeightConfig, target: Target) -> float:
    """Cycles of a stage's products: of the tensor cores at their peak, or of shared memory, from which a product reads
    32 bytes a column, and a lane a word of dy for each pair of pixels, or two."""
    step, left = problem.dilation[1], problem.padding[2]
    words = 0
    for group in range(config.column_groups):
        shifts = [left - (group * config.tap_columns + i) * step for i in range(config.tap_columns)]
        words += len({word for shift in shifts for word in (shift // 2, (shift + 1) // 2)})
    columns = config.all_columns * config.tap_rows * config.channels
    products = 2 * MMA_M * K16 * columns / target.tensor_flops
    reads = (ITEM * K16 * columns + ITEM * MMA_M * K16 * words) / SHARED_BYTES
    return config.steps(problem) * config.filter_groups * max(products, reads)


def cycles_of(problem: ConvProblem, whole: KMajorWeightConfig, target: Target) -> Callable[[int, int], float]:
    """A function that predicts the clock cycles of ``whole`` with another ``split`` and ``split_k``."""
    speeds, stages, tiles = KMajorSpeeds.of(target), whole.stages_of(problem), tiles_of(problem, whole)
    memory = moved_bytes(problem) / target.bytes_per_cycle
    sums = 8 * split_k.weights_of(problem) / speeds.added_per_cycle
    # pairs of blocks find a place on all multiprocessors
    places = {split: target.multiprocessors // split for split in (1, 2)}

    def predicted(split: int, slices: int) -> float:
        if split not in places:
            places[split] = clusters_at_once(split, 1, target)
        busy = min(1.0, tiles * slices * split / target.multiprocessors)
        computed, copied = stage_cycles(problem, whole, target, busy)
        # the first stage's copies hide nothing
        each = ceil_div(stages, split * slices) * max(computed, copied) + copied + speeds.block
        time = overlapped(ceil_div(tiles * slices, places[split]) * each, memory, speeds.not_hidden)
        return time + speeds.start + (speeds.adding + slices * sums if slices > 1 else 0)

    return predicted
