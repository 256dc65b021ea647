"""Im2col-Winograd: one-dimensional Winograd along the rows in one kernel, for filters from 2 columns on."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from leanconv.kernels.common import input_gradient
from leanconv.kernels.contract import (
    LAUNCH_CYCLES,
    TimedAlgorithm,
    by_time,
    ceil_div,
    copy_layout,
    fma_cycles,
    mean_products,
    variant,
)
from leanconv.kernels.simt import implicit_gemm
from leanconv.kernels.simt.tiles import gradient_limits, overwrites
from leanconv.kernels.simt.winograd_tiles import (
    Transform,
    WinogradTileConfig,
    filter_launch,
    fitted,
    forward_of,
    main_cycles,
    main_launch,
    prepare_cycles,
    prepared_floats,
)
from leanconv.kernels.winograd_matrices import kernels, matrices, segments, why_no_kernels
from leanconv.options import Layout
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class WinogradConfig(WinogradTileConfig):
    """As WinogradTileConfig. ``segments``: the rows are cut into whole tiles of this kernel, then of narrower ones,
    then a rest for implicit GEMM; otherwise the last tile of a row is partly used. ``piece``: filter rows are cut into
    pieces of as many columns (0: they are not).
    """

    segments: bool = False
    piece: int = 0


#: Groups of fewer channels are not served in pieces: filters are padded to 16 channels and 32 filters of each group.
LEAST_CHANNELS = 8
#: Filter rows that are computed together; higher filters are worked on in parts, of at least LEAST_TAPS rows.
LEAST_TAPS, MOST_TAPS = 5, 12

#: Configurations and the share of the FMA peak that each reaches in its main loop, by layout, measured on an H200. A
#: tile of 64 x 64 outputs with 128 sums a thread is quickest; two blocks of half its size overlap their prologues and
#: stores. Producers gain where copies take many instructions, and most with 128 filters a tile.
SPEEDS: dict[int, tuple[tuple[WinogradConfig, dict[Layout, float]], ...]] = {
    4: (
        (
            WinogradConfig(4, thread_tiles=16, channels=16, stages=2, min_blocks=2),
            {"NHWC": 0.64, "NCHW": 0.555, "CHWN": 0.635},
        ),
        (
            WinogradConfig(4, channels=16, stages=2, min_blocks=4),
            {"NHWC": 0.62, "NCHW": 0.545, "CHWN": 0.63},
        ),
        (
            WinogradConfig(4, lanes_k=4, thread_tiles=16, channels=8, stages=2, min_blocks=2),
            {"NHWC": 0.605, "NCHW": 0.515, "CHWN": 0.635},
        ),
        (
            WinogradConfig(4, thread_k=4, lanes_k=4, channels=4, stages=2, min_blocks=4),
            {"NHWC": 0.47, "NCHW": 0.395, "CHWN": 0.45},
        ),
    ),
    8: (
        (
            WinogradConfig(8, thread_k=16, channels=16, stages=2, min_blocks=1, producers=4),
            {"NHWC": 0.675, "NCHW": 0.70, "CHWN": 0.70},
        ),
        (
            WinogradConfig(8, thread_tiles=16, channels=16, stages=2, min_blocks=1, producers=4),
            {"NCHW": 0.63, "CHWN": 0.68},
        ),
        (
            WinogradConfig(8, thread_tiles=16, channels=16, stages=2, min_blocks=1),
            {"NHWC": 0.66, "NCHW": 0.625, "CHWN": 0.645},
        ),
        (
            WinogradConfig(8, thread_tiles=16, stages=4, min_blocks=1),
            {"NHWC": 0.655, "NCHW": 0.63, "CHWN": 0.65},
        ),
        (
            WinogradConfig(8, thread_k=16, channels=16, stages=2, min_blocks=1),
            {"NHWC": 0.655, "NCHW": 0.625, "CHWN": 0.635},
        ),
        (
            WinogradConfig(8, stages=2),
            {"NHWC": 0.62, "NCHW": 0.605, "CHWN": 0.605},
        ),
        (
            WinogradConfig(8, lanes_k=4, thread_tiles=16, stages=2, min_blocks=1),
            {"NHWC": 0.625, "NCHW": 0.585, "CHWN": 0.645},
        ),
        (
            WinogradConfig(8, thread_k=4, lanes_k=4, channels=4, stages=2, min_blocks=2),
            {"NHWC": 0.48, "NCHW": 0.42, "CHWN": 0.40},
        ),
    ),
    16: (
        (
            WinogradConfig(16, 4, 16, 8, 2, stages=2, min_blocks=1, promoted=True),
            {"NHWC": 0.487, "NCHW": 0.455, "CHWN": 0.48},
        ),
        (
            WinogradConfig(16, 8, 8, 4, 2, stages=2, min_blocks=1, promoted=True),
            {"NHWC": 0.483, "NCHW": 0.467, "CHWN": 0.48},
        ),
        (
            WinogradConfig(16, 8, 8, 8, 2, stages=2, min_blocks=1, promoted=True),
            {"NHWC": 0.457, "NCHW": 0.44, "CHWN": 0.44},
        ),
        (
            WinogradConfig(16, 8, 8, 4, 2, channels=4, stages=2, min_blocks=1, promoted=True),
            {"NHWC": 0.355, "NCHW": 0.33, "CHWN": 0.31},
        ),
    ),
}
#: Clock cycles of a block for each of its outputs.
STORE = {"NHWC": 0.29, "NCHW": 0.75, "CHWN": 0.29}


def kernels_of(problem: ConvProblem) -> tuple[tuple[int, int], ...]:
    """Numbers of states and widths of pieces that serve the filters in the requested precision, whole rows first.

    Γ8(7, 2) is left out of tier fp32: with one long sum its error is 3.8 to 4.4 times that of a sequential one.
    """
    forward = forward_of(problem)
    serving = kernels(forward.s, mean_products(forward), forward.w, forward.precision)
    if problem.precision == "fp32":
        serving = tuple(pair for pair in serving if pair != (8, 2))
    if has_small_groups(forward):
        serving = tuple((alpha, piece) for alpha, piece in serving if piece == forward.s)
    return serving


def has_small_groups(forward: ConvProblem) -> bool:
    """Whether there are several groups, of too few channels for pieces."""
    return forward.groups > 1 and forward.group_c < LEAST_CHANNELS


def kernel_of(problem: ConvProblem, config: WinogradConfig) -> tuple[int, int]:
    """The pair of a configuration, as in `kernels_of`."""
    return config.states, config.piece or problem.s


@dataclass(frozen=True)
class ColumnRange:
    """Output columns that one launch computes, by implicit GEMM if ``states`` is 1; its filters begin at ``offset``.

    Rows of filters are cut into pieces of ``piece`` columns, which may be one.
    """

    states: int
    piece: int
    first: int
    count: int
    offset: int = 0


def taps_of(problem: ConvProblem) -> tuple[int, int]:
    """Filter rows that are computed together, and how many such parts a filter has: as few rows of zeros in the last
    part as can be, then as few parts.
    """
    if problem.r <= MOST_TAPS:
        return problem.r, 1
    taps = min(range(MOST_TAPS, LEAST_TAPS - 1, -1), key=lambda taps: taps * ceil_div(problem.r, taps))
    return taps, ceil_div(problem.r, taps)


def filter_floats(problem: ConvProblem, alpha: int, piece: int) -> int:
    """Size of the filters of ``problem`` in ``alpha`` states; 1 for those that implicit GEMM reads."""
    if alpha == 1:
        return input_gradient.prepared_bytes(problem) // 4 if problem.op == "dgrad" else 0
    return prepared_floats(problem, transform_of(problem, ColumnRange(alpha, piece, 0, 0)))


def parts_of(problem: ConvProblem, alpha: int, piece: int, cut: bool) -> list[ColumnRange]:
    """How the rows are cut for a kernel of ``alpha`` states: not at all, or as the paper does (section 5.5).

    A kernel of pieces takes whole rows.
    """
    q = forward_of(problem).q
    if not cut:
        return [ColumnRange(alpha, piece, 0, q)]
    allowed = tuple(a for a, width in kernels_of(problem) if a <= alpha and width == problem.s)
    ranges, offset = [], 0
    for segment in segments(q, problem.s, allowed):
        ranges.append(ColumnRange(segment.alpha, problem.s, segment.first, segment.columns, offset))
        offset += filter_floats(problem, segment.alpha, problem.s)
    return ranges


def cuts_of(problem: ConvProblem, piece: int) -> tuple[bool, ...]:
    """Whether the rows of outputs may be cut for a kernel, and be whole."""
    return (False, True) if piece == problem.s else (False,)


def transform_of(problem: ConvProblem, part: ColumnRange) -> Transform:
    """What the kernel of a part of the row transforms."""
    of_tile = matrices(part.states + 1 - part.piece, part.piece)
    taps, parts = taps_of(problem)
    pieces = ceil_div(problem.s, part.piece)
    return Transform(of_tile, False, part.first, part.count, taps, parts, part.offset, pieces)


def _cycles(problem: ConvProblem, transform: Transform, config: WinogradConfig, speed: float, target: Target) -> float:
    """Predicted clock cycles of the launch that computes a range of columns."""
    # Few rows share fewer transforms than were counted; many rows of few tiles gain less than was counted.
    if config.rows in (1, 2):
        speed /= {1: 1.2, 2: 1.1}[config.rows]
    elif (config.rows == 4 and config.states == 16) or (config.rows == 8 and transform.taps < 5):
        speed /= 1.04
    if config.producers and transform.taps > 6:
        # Measured for 7 to 11 filter rows: few columns cost producers nothing, and 64 filters do not either.
        speed *= 1.06 if config.tile_k == 64 else 1.0
    elif config.states == 8 and config.columns == 4:
        speed /= 1.1
    if config.producers and problem.layout == "NHWC":
        # The fewer filter rows, the more tiles there are to transform in a step, and copies take little of it here.
        speed *= 1 - 0.045 * max(0, 5 - transform.taps)
    return main_cycles(problem, transform, config, speed, STORE[problem.layout], target)


@lru_cache(maxsize=64)
def _fitting(problem: ConvProblem, alpha: int, piece: int, target: Target) -> tuple[tuple[WinogradConfig, float], ...]:
    """The configurations of a kernel of ``alpha`` states that fit the target, and their speeds.

    The paper's rule for ruse is that neighbouring tiles share 0.4375 of their pixels. Here sharing gains little
    (ablation of suite winograd1d: 5 % at most, 6 % lost on average, most where rows are rounded up to pairs), so it
    comes behind.
    """
    shared = (piece - 1) / alpha >= 0.4375
    transform = transform_of(problem, ColumnRange(alpha, piece, 0, 0))
    fitting = []
    for config, speeds in SPEEDS[alpha]:
        speed = speeds.get(copy_layout(problem))
        if speed is None:
            continue
        if (alpha, piece) == (8, 2):
            # Seven outputs of four tiles, their states, and sums that wait, are more than two blocks have room for.
            config = variant(config, min_blocks=1)
        if piece < problem.s:
            config = variant(config, piece=piece)
        for rows, run in itertools.product((1, 2, 4, 8), (1, 2) if shared else (1,)):
            if config.tiles % (4 * rows) == 0:
                chosen = fitted(problem, transform, variant(config, rows=rows, run=run), target)
                if chosen is not None:
                    # Measured: where memory leaves room for one block of the two, it hides less latency.
                    alone = alpha == 8 and chosen.min_blocks == 1 < config.min_blocks
                    fitting.append((chosen, speed * (0.97 if run == 2 else 1.0) / (1.06 if alone else 1.0)))
    return tuple(fitting)


def _prepare_cycles(problem: ConvProblem, part: ColumnRange, target: Target) -> float:
    """Predicted clock cycles of what prepares the filters of a part."""
    if part.states > 1:
        return prepare_cycles(problem, transform_of(problem, part), target)
    return LAUNCH_CYCLES if problem.op == "dgrad" else 0.0


class Winograd1d(TimedAlgorithm):
    """Γα(n, S), n = α + 1 − S: Winograd along the rows, with no workspace but the transformed filters.

    ``y = Aᵀ · sum over c, r of (G w[c, r]) ⊙ (Bᵀ x[c, row + r])`` for each tile of n outputs of a row. Wide filters are
    cut into pieces: each piece of a filter row is one more row to sum over, whose pixels begin further right.
    """

    name = "winograd1d"
    paper = "Z. Zhang et al., Im2col-Winograd (ICPP 2024)"
    tier = "fp32"
    solves = "conv2d"

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target, 2.5 if problem.precision in ("ieee", "fp32") else 4.5)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = gradient_limits(problem) + overwrites(problem)
        if problem.stride != (1, 1):
            reasons.append(f"stride {problem.stride[0]},{problem.stride[1]} is not 1,1")
        if problem.dilation[1] != 1:
            reasons.append(f"dilation {problem.dilation[1]} along the row is not 1")
        if reasons:
            return reasons
        forward = forward_of(problem)
        reasons = why_no_kernels(forward.s, mean_products(forward), forward.w, forward.precision)
        if not reasons and not kernels_of(problem) and has_small_groups(forward):
            channels = f"{LEAST_CHANNELS} channels and more, and groups have {forward.group_c}"
            reasons = [f"filters are {forward.s} wide: their pieces are for groups of {channels}"]
        return reasons

    def prepared_bytes(self, problem: ConvProblem) -> int:
        cuts = [parts_of(problem, *pair, cut) for pair in kernels_of(problem) for cut in cuts_of(problem, pair[1])]
        return 4 * max(sum(filter_floats(problem, part.states, part.piece) for part in cut) for cut in cuts)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WinogradConfig]]:
        timed = []
        for alpha, piece in kernels_of(problem):
            for cut in cuts_of(problem, piece):
                first, *others = parts_of(problem, alpha, piece, cut)
                if first.states != alpha or (cut and not others and first.count == forward_of(problem).q):
                    continue  # the same as another one
                rest = sum(self._part_cycles(problem, part, target) for part in others)
                rest += sum(_prepare_cycles(problem, part, target) for part in (first, *others))
                rest += LAUNCH_CYCLES * len(others)
                # Measured: a cut row loses more to its short launches than the busiest multiprocessor shows.
                loss = 1.03 if cut else 1.0
                for time, config in self._kernels(problem, first, target):
                    timed.append((loss * (time + rest), variant(config, segments=True) if cut else config))
        return by_time(pair for pair in timed if pair[0] < float("inf"))

    def _kernels(
        self, problem: ConvProblem, part: ColumnRange, target: Target
    ) -> Iterator[tuple[float, WinogradConfig]]:
        """The configurations of the kernel for a range of columns, with their predicted times."""
        transform = transform_of(problem, part)
        for config, speed in _fitting(problem, part.states, part.piece, target):
            yield _cycles(problem, transform, config, speed, target), config

    def _best(self, problem: ConvProblem, part: ColumnRange, target: Target) -> tuple[float, WinogradConfig]:
        """The configuration of a part that is not the first."""
        return min(
            self._kernels(problem, part, target), key=lambda pair: pair[0], default=(float("inf"), WinogradConfig())
        )

    def _part_cycles(self, problem: ConvProblem, part: ColumnRange, target: Target) -> float:
        if part.states > 1:
            return self._best(problem, part, target)[0]
        # Measured: few columns of long sums take a fifth longer than whole layers do.
        return 1.2 * implicit_gemm.segment_cycles(problem, part.first, part.count, target)

    def order_of_sums(self, problem: ConvProblem, config: WinogradConfig) -> Hashable:
        # what computes the last columns of a cut row is chosen in `plan`, by the batch
        return None if config.segments else (config.piece, config.order)

    def plan(self, problem: ConvProblem, config: WinogradConfig, target: Target) -> Plan:
        prepare, launches = [], []
        for part in parts_of(problem, *kernel_of(problem, config), config.segments):
            if part.states == 1:
                # The forward pass reads the filters as they are.
                first_weight = part.offset if problem.op == "dgrad" else 0
                if problem.op == "dgrad":
                    prepare.append(input_gradient.filter_launch(problem, first_weight))
                launches.append(implicit_gemm.segment_launch(problem, part.first, part.count, target, first_weight))
                continue
            chosen = config if part.states == config.states else self._best(problem, part, target)[1]
            transform = transform_of(problem, part)
            prepare.append(filter_launch(self.name, problem, transform))
            launches.append(main_launch(self.name, problem, transform, chosen))
        return Plan(tuple(launches), prepare=tuple(prepare), prepared_bytes=self.prepared_bytes(problem))
