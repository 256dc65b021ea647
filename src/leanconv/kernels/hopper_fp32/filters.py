"""What kernels share that split float32 into two float16 for tensor cores: prepared filters, and the plan of a call.

The host half of kernels/hopper_fp32/filter_layout.cuh, tensor_filters.cuh and tensor_split.cuh.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from leanconv.dtypes import DTYPES
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, single_parts
from leanconv.kernels.contract import Arithmetic, TimedAlgorithm, ceil_div
from leanconv.kernels.simt.tiles import gradient_limits
from leanconv.plan import Constants, Launch, Plan, Pointer, Target, in_chain
from leanconv.problem import ConvProblem

#: Reduction elements of a stage (``split_depth`` of the kernels).
DEPTH = 64
#: Threads of the launches that prepare filters.
THREADS = 256
#: Elements of filters that a preparing block keeps in shared memory (``copied_elements`` of the kernels).
COPIED_ELEMENTS = 9216
#: Blocks of the launch that looks whether filters are plain, and else prepares them with factors.
CHECKING_BLOCKS = 128
#: Blocks of plain filters for each block of a main kernel, at most, where that prepares again in doubt.
BLOCKS_SETTLED = 16
#: Weights of a channel that a block which prepares plain filters has at least: few channels are small by chance then.
PLAIN_WEIGHTS = 4
#: Elements of the filters of a gradient that a block reads from the layer's, and its threads where it has many.
MIRRORED_ELEMENTS, MIRRORED_THREADS = 20480, 512
#: Filters that it has at most, by the layout: in NHWC they are adjacent in the layer's.
MIRRORED_FILTERS = {"NHWC": 4, "NCHW": 1, "CHWN": 1}
#: Channels of a group whose factors a preparing block can keep.
MOST_CHANNELS = 8192
#: Columns of a segment of a filter row (``segments_of`` of the kernels).
SEGMENT = 3
#: Channels of a group below which tensor cores would multiply zeros most of the time.
LEAST_CHANNELS = 16


class SplitFilters:
    """What of a configuration the prepared filters depend on: tiles of ``chunks`` x ``chunk`` filters, ``products`` of
    float16 for one of float32, ``piece`` channels of one tap side by side, and whether pixels come in ``rows``."""

    chunk: int
    chunks: int
    products: int
    filter_stages: int
    piece: int
    rows: bool
    #: Pixels side by side that all taps of a filter row see, or 0: each tap has pixels of its own.
    row_lines = 0
    #: Channels of the four lanes of a row are so far apart where pixels come in planes, or 0: they do not.
    spacing = 0
    #: States of a segment of a filter row that prepared filters are transformed into; 1 is each column as it is.
    states = 1
    #: Neighbouring rows of outputs whose pairs share their states.
    heights = 1
    #: Whether the pixels of a tile are of one row of outputs.
    one_row = False

    @property
    def filters(self) -> int:
        """Filters of a tile."""
        return self.chunk * self.chunks

    @property
    def filter_stage_bytes(self) -> int:
        """Bytes of a stage of filters: ``chunk`` of them, both halves if there are three products."""
        return self.chunk * DEPTH * 2 * (2 if self.products == 3 else 1)


def pieces_of_tap(problem: ConvProblem, piece: int) -> int:
    """Pieces of channels that a tap has."""
    return ceil_div(problem.group_c, piece)


def stages_of(problem: ConvProblem, piece: int, states: int = 1) -> int:
    """Stages of the whole reduction, where segments of filter rows are transformed that of one state."""
    taps = problem.r * (problem.s if states == 1 else ceil_div(problem.s, SEGMENT))
    return ceil_div(taps * pieces_of_tap(problem, piece), DEPTH // piece)


def leaves_column(problem: ConvProblem, piece: int) -> bool:
    """Whether whole segments of a filter row leave one column, of which the channels are whole stages."""
    whole = pieces_of_tap(problem, piece) % (DEPTH // piece) == 0
    return problem.s > SEGMENT and problem.s % SEGMENT == 1 and whole


def rest_stages(problem: ConvProblem, config: SplitFilters) -> int:
    """Stages of the column that whole segments of filter rows leave, which have two states. None where all taps see
    planes."""
    if config.states == 1 or config.spacing or not leaves_column(problem, config.piece):
        return 0
    return problem.r * pieces_of_tap(problem, config.piece) // (DEPTH // config.piece)


def _by_element(problem: ConvProblem) -> bool:
    """Whether each element of the filters has a factor of its own, and not each channel: a pixel meets all taps of its
    channel, beyond the edges of the image too, at unit stride alone."""
    return max(problem.stride) > 1 and problem.r * problem.s > 1


def _parts(problem: ConvProblem) -> tuple[int, int]:
    """Channels of a filter, or elements, that have a factor; and the parts of a group's filters in which their largest
    is found (``FactorParts`` of tensor_filters.cuh)."""
    taps = problem.r * problem.s
    if _by_element(problem):
        return problem.group_c * taps, ceil_div(problem.group_k, 256)
    if problem.groups * problem.group_c >= 64 or taps <= 16:
        filters = 32
    else:
        filters = 512 // taps if taps <= 128 else 4
    return problem.group_c, ceil_div(problem.group_k, filters)


def prepared_floats(problem: ConvProblem, config: SplitFilters) -> tuple[int, int]:
    """Floats of prepared filters: those before the fragments, and all (``TensorFilters`` of
    filter_layout.cuh, ``FactorParts`` of tensor_filters.cuh)."""
    tiles, stages = ceil_div(problem.group_k, config.filters), stages_of(problem, config.piece, config.states)
    scales, factors = problem.groups * tiles * config.filters, problem.groups * stages * DEPTH
    channels, of_group = _parts(problem)
    head = 4 + 4 * ceil_div(problem.groups, 4) + scales + factors
    states = stages * config.states - 2 * rest_stages(problem, config)
    fragments = problem.groups * tiles * states * config.chunks * config.filter_stage_bytes // 4
    plain = scales + 4 if _plain_first(problem) else 0
    return head, head + fragments + 4 * ceil_div(of_group * problem.groups * channels, 4) + plain


def _plain_first(problem: ConvProblem) -> int:
    """Filters of a block of the launch that prepares plain ones (plain_filters.cuh), or 0 where there is none.

    A block holds its filters, and few of its channels are small by chance."""
    taps = problem.r * problem.s
    filters = ceil_div(PLAIN_WEIGHTS, taps)
    if _by_element(problem) or problem.group_k % filters or filters * taps * problem.group_c > COPIED_ELEMENTS:
        return 0
    return filters


def _mirrored_first(problem: ConvProblem) -> int:
    """The same where the filters of ``problem``, a part of a gradient, are read from the layer's; 0 where a launch had
    better rearrange them before.

    Filters that are adjacent in the layer's share the sectors that are read."""
    least, elements = _plain_first(problem), problem.r * problem.s * problem.group_c
    most = max(least, MIRRORED_FILTERS[problem.layout])
    fitting = (
        filters
        for filters in (4, 2, 1)
        if least <= filters <= most and problem.group_k % filters == 0 and filters * elements <= MIRRORED_ELEMENTS
    )
    first = next(fitting, 0) if least else 0
    return 0 if first == 1 and problem.layout == "NHWC" and problem.group_k > 8 else first


def _is_mirrored(problem: ConvProblem) -> bool:
    """Whether filters are those of a gradient that are read from the layer's."""
    return problem.op == "dgrad" and all(_mirrored_first(part.problem) for part in single_parts(problem))


def _copied_floats(problem: ConvProblem, elements: int) -> int:
    """Floats of shared memory that so many elements of a filter take (``copied_floats`` of the kernels)."""
    return ceil_div(elements + 4 * ceil_div(elements, 32) if problem.layout == "NHWC" else elements, 4) * 4


def _filter_constants(
    problem: ConvProblem, plain_first: int, first_prepared: int, first_weight: int, mirrored: Constants
) -> Constants:
    """What the filters alone determine."""
    return (
        ("filter", DTYPES[problem.dtype].ctype),
        *((name, getattr(problem, name)) for name in ("k", "r", "s", "groups", "group_c", "group_k")),
        ("nhwc", problem.layout == "NHWC"),
        ("chwn", problem.layout == "CHWN"),
        ("by_element", _by_element(problem)),
        ("plain_first", plain_first),
        ("first_prepared", first_prepared),
        ("first_weight", first_weight),
        *mirrored,
    )


def filter_launches(
    problem: ConvProblem,
    config: SplitFilters,
    first_prepared: int,
    first_weight: int | None,
    blocks: tuple[int, int],
    mirrored: Constants = (),
) -> tuple[Launch, ...]:
    """The launches that split the filters of a forward convolution: ``w``, or what lies at ``first_weight`` of the
    prepared ones. ``blocks`` of each must fit on a multiprocessor. ``mirrored``: which taps of ``w`` a gradient has
    (`input_gradient.mirrored_taps`)."""
    written = Pointer("prepared", written=True)
    arguments = (written,) if first_weight is not None else (Pointer("w", DTYPES[problem.dtype].ctype), written)
    names = ("plain_filters", "check_filters", "largest_channels", "tensor_filters")
    if first_weight is not None:
        names = (
            "plain_rearranged_filters",
            "check_rearranged_filters",
            "largest_rearranged_channels",
            "rearranged_tensor_filters",
        )
    filters = _mirrored_first(problem) if mirrored else _plain_first(problem)
    constants = _filter_constants(problem, filters, first_prepared, first_weight or 0, mirrored)
    known = ("chunk", "chunks", "products", "rows", "piece", *(["states"] if config.states > 1 else []))
    if config.row_lines:
        known = (*known, "row_lines")
    if config.spacing:
        known = (*known, "spacing")
    tuning = tuple((name, getattr(config, name)) for name in known)
    tiles = ceil_div(problem.group_k, config.filters)
    side_by_side = problem.layout == ("CHWN" if mirrored else "NHWC") or (
        _by_element(problem) and problem.layout != "CHWN"
    )
    channels, parts = _parts(problem)
    largest = problem.groups * parts * ceil_div(channels, 32 if side_by_side else THREADS // 32)
    elements = problem.r * problem.s * problem.group_c
    most = MIRRORED_ELEMENTS if mirrored else COPIED_ELEMENTS
    copied = _copied_floats(problem, elements) if elements <= most else 0
    kept = ceil_div(channels, 4) * 4 if channels <= COPIED_ELEMENTS else 0
    split, rows = 4 * (64 + kept + copied), problem.groups * tiles * config.filters
    shared = 4 * THREADS if side_by_side else 4 * 32

    def launch(header: str, name: str, grid: int, shared_bytes: int, at_once: int, threads: int = THREADS) -> Launch:
        function, known = f"leanconv::{name}", (("threads", threads), *tuning)
        return Launch(
            f"kernels/hopper_fp32/{header}", function, constants, known, arguments, grid, threads, shared_bytes, at_once
        )

    if filters:
        grid, plain = rows // filters, 4 * (96 + filters * copied)
        at_once, threads = blocks[1] if grid > 256 else 2, THREADS
        if filters * elements > COPIED_ELEMENTS:
            at_once, threads = 1, MIRRORED_THREADS
        return (
            launch("plain_filters.cuh", names[0], grid, plain, at_once, threads),
            launch("plain_filters.cuh", names[1], min(rows, CHECKING_BLOCKS), max(shared, split), 2),
        )
    return (
        launch("tensor_filters.cuh", names[2], largest, shared, blocks[0]),
        launch("tensor_filters.cuh", names[3], rows, split, blocks[1]),
    )


def settling(main: Launch, plain: Launch) -> Launch:
    """The main launch behind ``plain`` and no check: its blocks find out what ``check_filters`` would."""
    known = dict(main.problem)
    # NOTE: where rearranged filters lie differs with strides; filters that are read in place are `w`.
    assert all(known.get(name, value) == value for name, value in plain.problem if name != "first_weight")
    missing = tuple((name, value) for name, value in plain.problem if name not in known)
    arguments = tuple(replace(each, written=True) if each == Pointer("prepared") else each for each in main.arguments)
    return replace(
        main,
        problem=(*main.problem, *missing),
        tuning=(*main.tuning, ("settles", True)),
        arguments=(*arguments, *(each for each in plain.arguments if each.name != "prepared")),
        waits=True,
    )


def _can_settle(config: SplitFilters, preparing: tuple[Launch, ...], main: Launch) -> bool:
    """Whether the blocks of ``main`` could prepare plain filters again: enough of them, with enough shared memory."""
    first, second = preparing
    enough = first.grid <= BLOCKS_SETTLED * main.grid
    memory = config.filter_stages * config.filter_stage_bytes
    return first.header == "kernels/hopper_fp32/plain_filters.cuh" and enough and second.shared_bytes <= memory


C = TypeVar("C", bound=SplitFilters)


class SplitGemm(TimedAlgorithm, Generic[C]):
    """Direct convolution and its input's gradient with split filters: each part of a gradient has its own."""

    paper = "S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018)"
    tier = "fp32"
    solves = "conv2d"
    #: Blocks on a multiprocessor for which registers of the two preparing launches are shared out. Few filters are one
    #: wave of the second, whose blocks wait for memory most of the time.
    preparing_blocks: ClassVar[tuple[int, int]] = (1, 4)

    #: Whether main kernels can find out whether filters are plain.
    settles = True

    @abstractmethod
    def target_limits(self, target: Target) -> list[str]:
        """Why its kernel cannot run on ``target``."""

    @abstractmethod
    def candidates(self, problem: ConvProblem) -> list[C]:
        """Configurations, one for each tile."""

    @abstractmethod
    def main_launch(
        self, problem: ConvProblem, part: PartialConvolution, config: C, first: int, target: Target
    ) -> Launch:
        """The launch that computes a part of ``problem`` with prepared filters from float ``first`` on."""

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*gradient_limits(problem), *self.target_limits(target)]
        least = min(problem.group_c, problem.group_k)
        if problem.groups > 1 and least < LEAST_CHANNELS:
            reasons.append(f"groups={problem.groups} leaves {least} channels in a group, fewer than {LEAST_CHANNELS}")
        read = problem.group_k if problem.op == "dgrad" else problem.group_c
        if read > MOST_CHANNELS:
            reasons.append(f"a filter has {read} channels, more than {MOST_CHANNELS}")
        return reasons

    def order_of_sums(self, problem: ConvProblem, config: C) -> Hashable:
        split = getattr(config, "split", 1)
        # by default a cluster shares those tiles that are left over, which are other images' in another batch
        shared = split > 1 and not problem.batch_invariant
        kind = (
            config.products,
            config.piece,
            config.rows,
            config.row_lines > 0,
            getattr(config, "flat", False),
            config.spacing,
            config.heights,
            config.one_row,
        )
        return None if shared else (*kind, split)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if problem.precision == "tf32" else "fp16x3"

    def prepared_bytes(self, problem: ConvProblem) -> int:
        first, parts = _first(problem), single_parts(problem)
        each = (
            first + sum(prepared_floats(part.problem, config)[1] for part in parts)
            for config in self.candidates(problem)
        )
        return 4 * max(each, default=0)

    def plan(self, problem: ConvProblem, config: C, target: Target) -> Plan:
        prepare, launches, unprepared, settled = [], [], [], []
        gradient, parts, first = problem.op == "dgrad", single_parts(problem), _first(problem)
        mirrored = _is_mirrored(problem)
        rearranged = gradient and not mirrored
        if rearranged and parts:
            prepare.append(input_gradient.filter_launch(problem))
            unprepared.append(prepare[0])
        for part in parts:
            source = part.view.first_weight if rearranged else None
            taps = input_gradient.mirrored_taps(problem, part) if mirrored else ()
            own = filter_launches(part.problem, config, first, source, self.preparing_blocks, taps)
            prepare += own
            main = self.main_launch(problem, part, config, first, target)
            launches.append(main)
            unsure = self.settles and _can_settle(config, own, main)
            unprepared += own[:1] if unsure else own
            settled.append(settling(main, own[0]) if unsure else main)
            first += prepared_floats(part.problem, config)[1]
        zeros = input_gradient.zero_launch(problem) if gradient and not problem.accumulate else None
        last = [zeros] if zeros else []
        chain = in_chain((*prepare, *launches, *last))
        return Plan(
            chain[len(prepare) :],
            prepare=chain[: len(prepare)],
            prepared_bytes=self.prepared_bytes(problem),
            unprepared=in_chain((*unprepared, *settled, *last)) if settled != launches else (),
        )


def _first(problem: ConvProblem) -> int:
    """Floats of prepared filters before those that are split: rearranged ones, for some gradients."""
    rearranged = problem.op == "dgrad" and not _is_mirrored(problem)
    return ceil_div(input_gradient.prepared_bytes(problem), 16) * 4 if rearranged else 0
