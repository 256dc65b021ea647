"""Register cache: a small filter over images, the pixels held in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import Config, TimedAlgorithm, ceil_div
from leanconv.kernels.cost import Speeds, launch_cycles, overlapped
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.plan import Constants, Number, Plan, Target
from leanconv.problem import FilterProblem

#: Largest filter height and width.
LIMIT = 32
#: Bytes of filters in a block's shared memory; of more filters each block takes a tile.
FILTER_BYTES = 16 * 1024
#: Largest image extent: twice it is an int in the border maps.
EXTENT = 2**30


class WarpsConfig(Config):
    """A block of ``warps``, one below the other, each with ``rows`` rows of outputs; so many blocks at least,
    ``min_blocks``, must fit on a multiprocessor."""

    rows: int
    warps: int

    @property
    def block_rows(self) -> int:
        """Rows of outputs that a block computes."""
        return self.rows * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps


@dataclass(frozen=True)
class RegisterCacheConfig(WarpsConfig):
    """Rows of 32 * ``columns`` outputs, ``columns`` a lane."""

    rows: int = 4
    columns: int = 4
    warps: int = 4
    min_blocks: int = 4


@dataclass(frozen=True)
class PartialSumsConfig(WarpsConfig):
    """The published scheme: rows of 33 - S outputs, one column a lane."""

    rows: int = 8
    warps: int = 8
    min_blocks: int = 1


@dataclass(frozen=True)
class CacheSpeeds(Speeds):
    """Of a multiprocessor."""

    #: the time of multiply-adds relative to the peak of float32's, by the type of the sums
    multiply_add: Any
    #: cycles of a read of 16 bytes a lane from shared memory
    read: float
    #: of 128 elements of an input row on their way to shared memory, copied and converted
    copied: float
    converted: float
    #: the time of memory relative to what the target's bandwidth says, and the share of the lesser that adds
    memory: float
    lesser: float


#: (rows, columns, warps) that was fastest on an H200 at 4096² and 8192², up to which filter width. A fourth number is
#: how many blocks fit on a multiprocessor without spills when the filter is about square: more than `registers_needed`
#: tells, because its code is unrolled as a whole and keeps no window longer than it is used.
FASTEST: tuple[tuple[int, tuple[int, ...]], ...] = (
    (3, (4, 4, 4)),
    (5, (8, 4, 4)),
    (6, (8, 4, 2)),
    (7, (8, 4, 2, 10)),
    (8, (8, 4, 2)),
    (14, (4, 4, 4)),
    (15, (3, 4, 4)),
    (17, (4, 4, 4)),
    (20, (3, 4, 4)),
    (LIMIT, (2, 8, 4)),
)
#: The same for elements of 8 and 16 bits, which are converted on their way, and for float64. Explored (H200,
#: 2026-11-24, a working tree before dee0785c): 0.85 of the time for uint8 3x3, 0.91 for float16, 0.89 for uint8 5x5,
#: 0.84 for float64.
NARROW: tuple[tuple[int, tuple[int, ...]], ...] = ((3, (12, 4, 2)), (5, (8, 8, 2)), *FASTEST)
WIDE: tuple[tuple[int, tuple[int, ...]], ...] = ((3, (6, 4, 2)), *FASTEST)
#: What else is worth timing, and what keeps a machine busy with a small image: few rows a block.
OTHERS = (
    (2, 4, 2),
    (2, 4, 4),
    (3, 4, 4),
    (4, 4, 4),
    (4, 4, 8),
    (5, 4, 4),
    (6, 4, 4),
    (6, 4, 2),
    (8, 4, 2),
    (8, 4, 4),
    (12, 4, 2),
    (2, 8, 4),
    (3, 8, 4),
    (8, 8, 2),
)


#: Registers that a thread may need; with more a configuration is not tried.
MOST_REGISTERS = 200
#: The smallest tile of a lane for which pixels of several channels are read as they lie, (rows, columns).
LEAST_TILE = 2, 4


def interleaved(problem: FilterProblem) -> int:
    """Channels that a block filters side by side, as they lie: up to 4, where their windows fit into registers. With 1
    its elements lie `planes` apart."""
    few = problem.channels <= 4 and _registers(problem, *LEAST_TILE, problem.channels) <= MOST_REGISTERS
    return max(1, problem.channels) if few else 1


def planes(problem: FilterProblem) -> int:
    """Channels that blocks filter one by one."""
    return problem.channels // interleaved(problem)


def sum_bytes(problem: FilterProblem) -> int:
    """Bytes of an element in shared memory, where pixels and weights have the type of the sums."""
    return item_bytes(problem.sums)


def row_bytes(problem: FilterProblem, columns: int) -> int:
    """Shared memory of one input row of a block: its halo in whole vectors, the whole in multiples of 32 elements."""
    halos = problem.anchor[1], problem.kw - 1 - problem.anchor[1]
    left, right = (ceil_div(halo * interleaved(problem), 4) * 4 for halo in halos)
    return sum_bytes(problem) * 32 * ceil_div(left + 32 * columns + right, 32)


def weight_bytes(problem: FilterProblem) -> int:
    """Shared memory of a filter, its rows padded to whole vectors."""
    return sum_bytes(problem) * problem.kh * ceil_div(problem.kw, 4) * 4


def filters_in_block(problem: FilterProblem) -> int:
    """Filters that a block applies to its rows: all, or tiles of about the same size; one to volumes."""
    most = 1 if problem.is_volume else max(1, FILTER_BYTES // weight_bytes(problem))
    return ceil_div(problem.filters, ceil_div(problem.filters, most))


def shared_bytes(problem: FilterProblem, config: RegisterCacheConfig) -> int:
    """Shared memory of a block: its input rows, the filters, and with several of these a row of outputs a warp."""
    filters, row = filters_in_block(problem), row_bytes(problem, config.columns)
    rows, weights = config.block_rows + problem.kh - 1, filters * weight_bytes(problem)
    return rows * row + weights if filters == 1 else (rows + ceil_div(weights, row) + config.warps) * row


def registers_needed(problem: FilterProblem, rows: int, columns: int) -> int:
    """Registers that a thread needs: sums, windows, and some for weights and addresses."""
    return _registers(problem, rows, columns, interleaved(problem))


def _registers(problem: FilterProblem, rows: int, columns: int, channels: int) -> int:
    """The same with so many channels side by side."""
    window = columns + (problem.kw - 1) * channels
    # sums of volumes stay in registers while the next rows come
    addresses = 40 if problem.is_volume else 14
    return (rows * columns + (rows + 1) * window) * (sum_bytes(problem) // 4) + addresses


def tiles_of(problem: FilterProblem, config: RegisterCacheConfig) -> int:
    """Tiles of all results of a filter, of a block each."""
    strips = ceil_div(problem.out_w * interleaved(problem), 32 * config.columns)
    return problem.batch * problem.out_d * planes(problem) * strips * ceil_div(problem.out_h, config.block_rows)


def block_cycles(problem: FilterProblem, config: RegisterCacheConfig, target: Target, speeds: CacheSpeeds) -> float:
    """Of a multiprocessor, for a block: its input rows, and for each filter multiply-adds and the reads of windows and
    weights, 16 bytes a lane, of which a multiprocessor does 128 bytes a cycle at most."""
    window = config.columns + (problem.kw - 1) * interleaved(problem)
    windows, weights = problem.kh + config.rows - 1, problem.kh
    reads = windows * ceil_div(window, 4) + weights * ceil_div(problem.kw, 4)
    reading = speeds.read * reads * sum_bytes(problem) / 4 * config.warps
    outputs = config.block_rows * 32 * config.columns
    multiplying = speeds.multiply_add[problem.sums] * outputs * problem.kh * problem.kw / target.fma_lanes
    row = speeds.copied if problem.dtype == problem.sums else speeds.converted
    rows = config.block_rows + problem.kh - 1
    bringing = row * rows * row_bytes(problem, config.columns) / 512
    return problem.kd * (bringing + filters_in_block(problem) * (multiplying + reading))


def is_plain(problem: FilterProblem) -> bool:
    """Whether it is one that the published scheme computes: one filter for planes of float32 or int32."""
    one_type = problem.dtype == problem.result == problem.sums and sum_bytes(problem) == 4
    one = problem.filters == problem.channels == 1 and not problem.is_volume
    return one_type and one and not (problem.valid or problem.per_image)


class RegisterCache(TimedAlgorithm):
    """Direct correlation, FMAs in direct order or wrapping int32, every type and border, no workspace."""

    name = "register_cache"
    paper = "P. Chen et al., Pushing the Limits for 2D Convolution Computation on CUDA-enabled GPUs (2018)"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        reasons = ["the filter is given as products of a column and a row"] if problem.rank else []
        if problem.reduction is not None:
            reasons = ["a box has no weights"]
        if not (1 <= problem.kh <= LIMIT and 1 <= problem.kw <= LIMIT):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {LIMIT}x{LIMIT}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if problem.is_volume and not 0 <= problem.anchor_z < problem.kd:
            reasons.append(f"anchor_z={problem.anchor_z} lies outside the {problem.kd} slices of the filter")
        if max(problem.d, problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        if not reasons:
            strips = planes(problem) * ceil_div(problem.w * interleaved(problem), 128)
            blocks = problem.batch * problem.d * ceil_div(problem.h, 4) * strips
            if blocks * ceil_div(problem.filters, filters_in_block(problem)) >= 2**31:
                filters = f" with {problem.filters} filters" if problem.filters > 1 else ""
                images = f"{problem.batch} images of {problem.h}x{problem.w}{filters}"
                reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        return reasons

    def timed(
        self, problem: FilterProblem, target: Target
    ) -> list[tuple[float, RegisterCacheConfig | PartialSumsConfig]]:
        """In the order of `shapes`: that of the first for all of them, and none for the published scheme."""
        found = list(self.shapes(problem, target))
        first = next((config for config in found if isinstance(config, RegisterCacheConfig)), None)
        cycles = inf if first is None else self.cycles(problem, first, target)
        return [(inf if isinstance(config, PartialSumsConfig) else cycles, config) for config in found]

    def cycles(self, problem: FilterProblem, config: RegisterCacheConfig, target: Target) -> float:
        """Of the multiprocessor with most blocks. A round of blocks, as many as fit, reads its rows, and then makes its
        outputs; memory and cores are busy at once as soon as rounds overlap."""
        speeds = CacheSpeeds.of(target)
        blocks = tiles_of(problem, config) * ceil_div(problem.filters, filters_in_block(problem))
        blocks = max(1, ceil_div(blocks, target.multiprocessors))
        work = blocks * block_cycles(problem, config, target, speeds)
        memory = speeds.memory * problem.bytes / target.bytes_per_cycle
        apart = min(1, config.min_blocks / blocks)
        share = speeds.lesser + (1 - speeds.lesser) * apart
        return launch_cycles(target) + overlapped(work, memory, share)

    def shapes(self, problem: FilterProblem, target: Target) -> Iterator[RegisterCacheConfig | PartialSumsConfig]:
        """The valid configurations, the best guess first."""

        def config(rows: int, columns: int, warps: int, measured: int = 0) -> RegisterCacheConfig:
            # as many blocks as registers allow, which keeps the compiler from reading windows too far ahead
            need = registers_needed(problem, rows, columns)
            fitting = target.registers_per_multiprocessor // (ceil_div(need, 8) * 8 * 32 * warps)
            if problem.kw // 2 < problem.kh <= problem.kw and not problem.is_volume:
                fitting = max(fitting, measured)
            return RegisterCacheConfig(rows, columns, warps, max(1, min(fitting, 40 // warps)))

        itemsize = item_bytes(problem.dtype)
        table = NARROW if itemsize < 4 else FASTEST if itemsize == 4 else WIDE
        fastest = next(shape for width, shape in table if problem.kw <= width)
        # windows of several channels or of float64 are larger than those that were timed: as many rows as they allow
        shapes = dict.fromkeys((fastest, *((rows, 4, 4) for rows in (4, 3, 2)), *OTHERS, (1, 4, 4)))
        if registers_needed(problem, *fastest[:2]) <= MOST_REGISTERS:
            shapes = dict.fromkeys((fastest, *(other for other in OTHERS if other != fastest[:3])))
        usable = [config(*shape) for shape in shapes if registers_needed(problem, *shape[:2]) <= MOST_REGISTERS]
        usable = [c for c in usable if shared_bytes(problem, c) <= target.shared_per_block]
        # An image that gives fewer blocks than there are multiprocessors needs the smallest blocks.
        yield from sorted(usable, key=lambda c: -min(tiles_of(problem, c), target.multiprocessors))
        if is_plain(problem):
            yield PartialSumsConfig()

    def plan(self, problem: FilterProblem, config: RegisterCacheConfig | PartialSumsConfig, target: Target) -> Plan:
        if isinstance(config, PartialSumsConfig):
            columns, shared = 33 - problem.kw, 4 * problem.kw * ceil_div(problem.kh, 4) * 4
        else:
            columns, shared = 32 * config.columns, shared_bytes(problem, config)
        channels, apart = interleaved(problem), planes(problem)
        strips = ceil_div(problem.out_w * channels, columns)
        bands = ceil_div(problem.out_h, config.block_rows)
        filters = filters_in_block(problem)
        counts = ("filters", filters), ("all_filters", problem.filters), ("per_image", problem.per_image)
        volume = ("volumes", problem.is_volume), ("depth", problem.kd), ("anchor_z", problem.anchor_z)
        compiled: Constants = (*constants(problem, channels, apart), *counts, *volume)
        slices = (Number("int", "slices", problem.d),) if problem.is_volume else ()
        grid = strips * bands * problem.batch * problem.out_d * apart * ceil_div(problem.filters, filters)
        launch = self.launch(config, compiled, (*arguments(problem, strips, bands), *slices), grid, shared)
        if isinstance(config, PartialSumsConfig):
            launch = replace(launch, function=f"{launch.function}_partial_sums")
        return Plan((launch,))
