"""Im2col-Winograd: one-dimensional Winograd along the rows in one kernel, for filters from 2 columns on."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.layers import copy_layout, forward_of, limits
from leanconv.kernels.contract import TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, fma_cycles, launch_cycles, mean_products
from leanconv.kernels.simt import implicit_gemm
from leanconv.kernels.simt import winograd_tiles as tiles
from leanconv.kernels.simt.winograd_tiles import Transform, WinogradTileConfig
from leanconv.kernels.winograd_matrices import kernels, matrices, segments, why_no_kernels
from leanconv.options import Layout
from leanconv.plan import Constants, Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class WinogradConfig(WinogradTileConfig):
    """As WinogradTileConfig. ``segments``: the rows are cut into whole tiles of this kernel, then of narrower ones,
    then a rest for implicit GEMM; otherwise the last tile of a row is partly used. ``column_block``: filter rows are
    cut into blocks of as many columns (0: they are not).
    """

    segments: bool = False
    column_block: int = 0

    def constants(self) -> Constants:
        """In NCHW outputs pass through shared memory, from where they are stored in the order of memory."""
        return (*super().constants(), ("staged", True))


#: Groups of fewer channels are not served in column blocks: filters are padded to 16 channels and 32 filters a group.
LEAST_CHANNELS = 8
#: Filter rows that are computed together, at most; higher filters are cut into row blocks of at least LEAST_TAPS rows.
LEAST_TAPS, MOST_TAPS = 5, 12

#: The configurations of each number of states; `RowSpeeds` has their speeds. A tile of 64 x 64 outputs with 128 sums a
#: thread is quickest; two blocks of half its size overlap their prologues and stores. Producers gain where copies take
#: many instructions, and most with 128 filters a tile.
CONFIGS: dict[int, tuple[WinogradConfig, ...]] = {
    4: (
        WinogradConfig(4, thread_tiles=16, channels=16, stages=2, min_blocks=2),
        WinogradConfig(4, channels=16, stages=2, min_blocks=4),
        WinogradConfig(4, lanes_k=4, thread_tiles=16, channels=8, stages=2, min_blocks=2),
        WinogradConfig(4, thread_k=4, lanes_k=4, channels=4, stages=2, min_blocks=4),
    ),
    8: (
        WinogradConfig(8, thread_k=16, channels=16, stages=2, min_blocks=1, producers=4),
        WinogradConfig(8, thread_tiles=16, channels=16, stages=2, min_blocks=1, producers=4),
        WinogradConfig(8, thread_tiles=16, channels=16, stages=2, min_blocks=1),
        WinogradConfig(8, thread_tiles=16, stages=4, min_blocks=1),
        WinogradConfig(8, thread_k=16, channels=16, stages=2, min_blocks=1),
        WinogradConfig(8, stages=2),
        WinogradConfig(8, lanes_k=4, thread_tiles=16, stages=2, min_blocks=1),
        WinogradConfig(8, thread_k=4, lanes_k=4, channels=4, stages=2, min_blocks=2),
    ),
    16: (
        WinogradConfig(16, 4, 16, 8, 2, stages=2, min_blocks=1, promoted=True),
        WinogradConfig(16, 8, 8, 4, 2, stages=2, min_blocks=1, promoted=True),
        WinogradConfig(16, 8, 8, 8, 2, stages=2, min_blocks=1, promoted=True),
        WinogradConfig(16, 8, 8, 4, 2, channels=4, stages=2, min_blocks=1, promoted=True),
    ),
}


@dataclass(frozen=True)
class RowSpeeds(Speeds):
    """Of Winograd along the rows. Factors are of the speed, unless they are of the time."""

    #: of each of `CONFIGS`, by states and layout, the share of the FMA peak in the main loop; None: it is not tried
    shares: Mapping[str, Mapping[Layout, tuple[float | None, ...]]]
    #: of a block, for each of its outputs
    store_cycles: Mapping[Layout, float]
    #: of the time, where a block has few rows, by their number: they share fewer transforms than the model counts
    rows: Mapping[str, float]
    #: of the time, where many rows of few tiles gain less than the model counts
    many_rows: float
    #: of the time, with 8 states and four tiles a row
    narrow_block: float
    #: with producers, 64 filters a tile and more than six filter rows (7 to 11: few columns cost producers nothing)
    high_filters: float
    #: with producers in NHWC, less for each filter row below five: a step transforms more tiles, and copies take little
    #: of it
    producers_nhwc: float
    #: where neighbouring tiles share pixels
    shared_pixels: float
    #: of the time, where shared memory has room for one block of the two: it hides less latency
    one_block: float
    #: of the time of a cut row: its short launches lose more than the busiest multiprocessor shows
    cut: float
    #: of the time of columns that implicit GEMM computes: few columns of long sums take longer than whole layers
    rest: float


def kernels_of(problem: ConvProblem) -> tuple[tuple[int, int], ...]:
    """Numbers of states and widths of column blocks that serve the filters in their precision, whole rows first.

    Γ8(7, 2) is left out of "fp32". Explored (4f3fbd0): with one long sum its error is 3.8 to 4.4 times that of a
    sequential one.
    """
    forward = forward_of(problem)
    serving = kernels(forward.s, mean_products(forward), forward.w, forward.precision)
    if problem.precision == "fp32":
        serving = tuple(pair for pair in serving if pair != (8, 2))
    if has_small_groups(forward):
        serving = tuple((alpha, block) for alpha, block in serving if block == forward.s)
    return serving


def has_small_groups(forward: ConvProblem) -> bool:
    """Whether there are several groups, of too few channels for column blocks."""
    return forward.groups > 1 and forward.group_c < LEAST_CHANNELS


def kernel_of(problem: ConvProblem, config: WinogradConfig) -> tuple[int, int]:
    """The pair of a configuration, as in `kernels_of`."""
    return config.states, config.column_block or problem.s


@dataclass(frozen=True)
class ColumnRange:
    """Output columns that one launch computes, by implicit GEMM if ``states`` is 1; its filters begin at ``offset``.

    Rows of filters are cut into blocks of ``block`` columns: one, or several.
    """

    states: int
    block: int
    first: int
    count: int
    offset: int = 0


def taps_of(problem: ConvProblem) -> tuple[int, int]:
    """Rows of a row block, and how many a filter has: as few rows of zeros in the last block as can be, then as few
    blocks. In volumes each slice of a filter is one row block.
    """
    if problem.r <= MOST_TAPS:
        return problem.r, problem.t
    taps = min(range(MOST_TAPS, LEAST_TAPS - 1, -1), key=lambda taps: taps * ceil_div(problem.r, taps))
    return taps, ceil_div(problem.r, taps)


def filter_floats(problem: ConvProblem, alpha: int, block: int) -> int:
    """Size of the filters of ``problem`` in ``alpha`` states; 1 for those that implicit GEMM reads."""
    if alpha == 1:
        return input_gradient.prepared_bytes(problem) // 4 if problem.op == "dgrad" else 0
    return tiles.prepared_floats(problem, transform_of(problem, ColumnRange(alpha, block, 0, 0)))


def ranges_of(problem: ConvProblem, alpha: int, block: int, cut: bool) -> list[ColumnRange]:
    """How the rows are cut for a kernel of ``alpha`` states: not at all, or as the paper does (section 5.5).

    A kernel of several column blocks takes whole rows.
    """
    q = forward_of(problem).q
    if not cut:
        return [ColumnRange(alpha, block, 0, q)]
    allowed = tuple(a for a, width in kernels_of(problem) if a <= alpha and width == problem.s)
    ranges, offset = [], 0
    for segment in segments(q, problem.s, allowed):
        ranges.append(ColumnRange(segment.alpha, problem.s, segment.first, segment.columns, offset))
        offset += filter_floats(problem, segment.alpha, problem.s)
    return ranges


def cuts_of(problem: ConvProblem, block: int) -> tuple[bool, ...]:
    """Whether the rows of outputs may be cut for a kernel, and be whole."""
    return (False, True) if block == problem.s else (False,)


def transform_of(problem: ConvProblem, part: ColumnRange) -> Transform:
    of_tile = matrices(part.states + 1 - part.block, part.block)
    taps, row_blocks = taps_of(problem)
    column_blocks = ceil_div(problem.s, part.block)
    return Transform(of_tile, False, part.first, part.count, taps, row_blocks, part.offset, column_blocks)


def _cycles(problem: ConvProblem, transform: Transform, config: WinogradConfig, speed: float, target: Target) -> float:
    """Predicted clock cycles of the launch that computes a range of columns."""
    speeds = RowSpeeds.of(target)
    if config.rows in (1, 2):
        speed /= speeds.rows[str(config.rows)]
    elif (config.rows == 4 and config.states == 16) or (config.rows == 8 and transform.taps < 5):
        speed /= speeds.many_rows
    if config.producers and transform.taps > 6:
        speed *= speeds.high_filters if config.tile_k == 64 else 1.0
    elif config.states == 8 and config.columns == 4:
        speed /= speeds.narrow_block
    if config.producers and problem.layout == "NHWC":
        speed *= 1 - speeds.producers_nhwc * max(0, 5 - transform.taps)
    return tiles.main_cycles(problem, transform, config, speed, speeds.store_cycles[problem.layout], target)


@lru_cache(maxsize=64)
def _fitting(problem: ConvProblem, alpha: int, block: int, target: Target) -> tuple[tuple[WinogradConfig, float], ...]:
    """The configurations of a kernel of ``alpha`` states that fit the target, and their speeds.

    The paper's rule for ruse is that neighbouring tiles share 0.4375 of their pixels. Here sharing gains little
    and comes behind. Explored (H200, b9574b7, ablation of suite winograd1d): 5 % gained at most, 6 % lost on average,
    most where rows are rounded up to pairs.
    """
    shared, speeds = (block - 1) / alpha >= 0.4375, RowSpeeds.of(target)
    transform = transform_of(problem, ColumnRange(alpha, block, 0, 0))
    fitting = []
    for config, share in zip(CONFIGS[alpha], speeds.shares[str(alpha)][copy_layout(problem)], strict=True):
        if share is None:
            continue
        if (alpha, block) == (8, 2):
            # Seven outputs of four tiles, their states, and sums that wait, are more than two blocks have room for.
            config = variant(config, min_blocks=1)
        if block < problem.s:
            config = variant(config, column_block=block)
        for rows, run in itertools.product((1, 2, 4, 8), (1, 2) if shared else (1,)):
            if config.tiles % (4 * rows) == 0:
                chosen = tiles.fitted(problem, transform, variant(config, rows=rows, run=run), target)
                if chosen is not None:
                    alone = alpha == 8 and chosen.min_blocks == 1 < config.min_blocks
                    speed = share * (speeds.shared_pixels if run == 2 else 1.0)
                    fitting.append((chosen, speed / (speeds.one_block if alone else 1.0)))
    return tuple(fitting)


def _prepare_cycles(problem: ConvProblem, part: ColumnRange, target: Target) -> float:
    """Predicted clock cycles of what prepares the filters of a range of columns."""
    if part.states > 1:
        return tiles.prepare_cycles(problem, transform_of(problem, part), target)
    return launch_cycles(target) if problem.op == "dgrad" else 0.0


class Winograd1d(TimedAlgorithm):
    """Γα(n, S), n = α + 1 − S: Winograd along the rows, with no workspace but the transformed filters.

    ``y = Aᵀ · sum over c, r of (G w[c, r]) ⊙ (Bᵀ x[c, row + r])`` for each tile of n outputs of a row. Wide filters are
    cut into column blocks: each block of a filter row is one more row to sum over, whose pixels begin further right. In
    volumes the sum is over the rows of all slices.
    """

    name = "winograd1d"
    paper = "Z. Zhang et al., Im2col-Winograd (ICPP 2024)"
    precision = "fp32"
    volumes = True

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target, 2.5 if problem.precision in ("ieee", "fp32") else 4.5)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = limits(problem, "fprop", "dgrad") + tiles.strided_slices(problem)
        if problem.stride != (1, 1):
            reasons.append(f"stride {problem.stride[0]},{problem.stride[1]} is not 1,1")
        if problem.dilation[1] != 1:
            reasons.append(f"dilation {problem.dilation[1]} along the row is not 1")
        if problem.is_volume and problem.r > MOST_TAPS:
            reasons.append(f"filters of volumes are {problem.r} rows high, more than {MOST_TAPS}")
        if reasons:
            return reasons
        forward = forward_of(problem)
        reasons = why_no_kernels(forward.s, mean_products(forward), forward.w, forward.precision)
        if not reasons and not kernels_of(problem) and has_small_groups(forward):
            channels = f"{LEAST_CHANNELS} channels and more, and groups have {forward.group_c}"
            reasons = [f"filters are {forward.s} wide: their column blocks are for groups of {channels}"]
        return reasons

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        cuts = [ranges_of(problem, *pair, cut) for pair in kernels_of(problem) for cut in cuts_of(problem, pair[1])]
        return 4 * max(sum(filter_floats(problem, part.states, part.block) for part in cut) for cut in cuts)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WinogradConfig]]:
        timed = []
        for alpha, block in kernels_of(problem):
            for cut in cuts_of(problem, block):
                first, *others = ranges_of(problem, alpha, block, cut)
                if first.states != alpha or (cut and not others and first.count == forward_of(problem).q):
                    continue  # the same as another one
                rest = sum(self._part_cycles(problem, part, target) for part in others)
                rest += sum(_prepare_cycles(problem, part, target) for part in (first, *others))
                rest += launch_cycles(target) * len(others)
                loss = RowSpeeds.of(target).cut if cut else 1.0
                for time, config in self._kernels(problem, first, target):
                    timed.append((loss * (time + rest), variant(config, segments=True) if cut else config))
        return by_time(pair for pair in timed if pair[0] < float("inf"))

    def _kernels(
        self, problem: ConvProblem, part: ColumnRange, target: Target
    ) -> Iterator[tuple[float, WinogradConfig]]:
        """The configurations of the kernel for a range of columns, with their predicted times."""
        transform = transform_of(problem, part)
        for config, speed in _fitting(problem, part.states, part.block, target):
            yield _cycles(problem, transform, config, speed, target), config

    def _best(self, problem: ConvProblem, part: ColumnRange, target: Target) -> tuple[float, WinogradConfig]:
        """The configuration of a range that is not the first."""
        none = (float("inf"), WinogradConfig())
        return min(self._kernels(problem, part, target), key=itemgetter(0), default=none)

    def _part_cycles(self, problem: ConvProblem, part: ColumnRange, target: Target) -> float:
        if part.states > 1:
            return self._best(problem, part, target)[0]
        return RowSpeeds.of(target).rest * implicit_gemm.segment_cycles(problem, part.first, part.count, target)

    def order_of_sums(self, problem: ConvProblem, config: WinogradConfig) -> Hashable:
        # what computes the last columns of a cut row is chosen in `plan`, by the batch
        return None if config.segments else (config.column_block, config.order)

    def plan(self, problem: ConvProblem, config: WinogradConfig, target: Target) -> Plan:
        prepare, launches = [], []
        for part in ranges_of(problem, *kernel_of(problem, config), config.segments):
            if part.states == 1:
                # The forward pass reads the filters as they are.
                first_weight = part.offset if problem.op == "dgrad" else 0
                if problem.op == "dgrad":
                    prepare.append(input_gradient.filter_launch(problem, first_weight))
                launches.append(implicit_gemm.segment_launch(problem, part.first, part.count, target, first_weight))
                continue
            chosen = config if part.states == config.states else self._best(problem, part, target)[1]
            transform = transform_of(problem, part)
            prepare.append(tiles.filter_launch(self.name, problem, transform))
            launches.append(tiles.main_launch(self.name, problem, transform, chosen))
        return Plan(tuple(launches), prepare=tuple(prepare), prepared_bytes=self.prepared_bytes(problem))
