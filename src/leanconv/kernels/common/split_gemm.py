"""What kernels share that split float32 into two float16 for tensor cores: packed weights, and the plan of a call.

The host half of filter_layout.cuh and split.cuh in device/pipeline, and of tensor_filters.cuh and
speculative_filters.cuh in kernels/hopper_fp32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import replace
from typing import ClassVar, Generic, TypeVar

from leanconv.dtypes import DTYPES
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, distinct_phases, single_phases
from leanconv.kernels.common.layers import (
    few_channels,
    filter_slices,
    has_wide_tensors,
    limits,
    prepared_plan,
    view_constants,
)
from leanconv.kernels.common.tensor_core_gemm import ROW
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, ceil_div, named
from leanconv.plan import Constants, Launch, Plan, Pointer, Target, in_chain
from leanconv.problem import ConvProblem

#: Reduction elements of a stage (``split_depth`` of the kernels).
DEPTH = 64
#: Threads of the launches that pack filters.
THREADS = 256
#: Elements of filters that a packing CTA keeps in shared memory.
COPIED_ELEMENTS = 9216
#: CTAs of the launch that validates a speculation, and falls back if it failed.
VALIDATING_BLOCKS = 128
#: CTAs of the speculative launch for each CTA of a main kernel, at most, where the main kernel validates.
BLOCKS_VALIDATED = 16
#: Weights of a channel that a speculative CTA has at least: few channels are small by chance then.
SPECULATIVE_WEIGHTS = 4
#: Elements of a gradient's filters that a CTA reads from the layer's filters, and its threads where it has many.
MIRRORED_ELEMENTS, MIRRORED_THREADS = 20480, 512
#: Filters that it has at most, by layout: in NHWC they are contiguous in the layer's.
MIRRORED_FILTERS = {"NHWC": 4, "NCHW": 1, "CHWN": 1}
#: Channels of a group whose factors a packing CTA can keep.
MOST_CHANNELS = 8192
#: Columns of a segment of a filter row (``segments_of`` of the kernels).
SEGMENT = 3
#: Channels of a group below which tensor cores would multiply zeros most of the time.
LEAST_CHANNELS = 16


class SplitConfig(Config):
    """Base of the configurations: CTA tiles of ``n_tiles`` MMA tiles of ``mma_n`` filters, ``products`` of float16 for
    one of float32, ``channel_block`` neighbouring channels of one tap, and whether pixels come in ``rows`` of channels.

    A number that a kernel has no field for has the value below, and is a constant of ``Tuning`` too.
    """

    mma_n: int
    n_tiles: int
    products: int
    filter_stages: int
    channel_block: int
    rows: bool
    #: Whether TMA brings linear pixels, in the order of memory.
    linear = False
    #: Linear pixels, or pairs of them, of the box of a tensor copy.
    box_width = 32
    #: Pixels of a copy that all taps of a filter row read, or 0: each tap has pixels of its own.
    row_pixels = 0
    #: Pixels of the resident images of a tile, and how far apart the channels of the four lanes of a row are; 0: no
    #: images are resident.
    resident_pixels = 0
    spacing = 0
    #: States that a segment of a filter row is transformed into; 1: each column as it is.
    states = 1
    #: Output rows of a tile, whose pairs share their states.
    output_rows = 1
    #: Whether the pixels of a tile belong to one output row, of all images.
    one_row = False
    #: Destinations of a multicast of filters, and CTAs of a cluster that split a reduction.
    multicast = 1
    split = 1

    def tuning(self) -> Constants:
        """The ``Tuning`` of a main kernel: the fields, and the values that it has no field for."""
        own, usual = self.constants(), (name for name, value in vars(SplitConfig).items() if isinstance(value, int))
        return tuple((dict((name, getattr(self, name)) for name in usual) | dict(own)).items())

    @property
    def cluster(self) -> int:
        return max(self.split, self.multicast)

    @property
    def filters(self) -> int:
        return self.mma_n * self.n_tiles

    @property
    def filter_stage_bytes(self) -> int:
        """Bytes of a stage of filters: one MMA tile, both halves if there are three products."""
        return self.mma_n * DEPTH * 2 * (2 if self.products == 3 else 1)


class RingConfig(SplitConfig):
    """Base of those with ``warpgroups`` of consumers and one of producers in a CTA, and rings of ``pixel_stages`` and
    ``filter_stages`` between them. ``exchange``: sums of a thread that consumers exchange at once."""

    warpgroups: int
    pixel_stages: int
    exchange = 0

    def tuning(self) -> Constants:
        return (*super().tuning(), ("pixel_stage_bytes", self.pixel_stage_bytes), ("validates", False))

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and one warpgroup of producers."""
        return 128 * (self.warpgroups + 1)

    @property
    @abstractmethod
    def stage_pixels(self) -> int:
        """Pixels of a stage, the gaps between columns included."""

    @property
    def pixel_stage_bytes(self) -> int:
        """Bytes of a stage of pixels; one of resident images has 32 channels."""
        if self.spacing:
            return 1024 * ceil_div(4 * ROW * self.resident_pixels, 1024)
        return DEPTH * 4 * self.stage_pixels

    @property
    def ring_bytes(self) -> int:
        return self.pixel_stages * self.pixel_stage_bytes + self.filter_stages * self.filter_stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: both rings, two barriers a stage (three of a multicast), and the exchange of sums."""
        barriers = 16 * self.pixel_stages + (16 if self.multicast == 1 else 24) * self.filter_stages
        return self.ring_bytes + barriers + 4 * 128 * self.warpgroups * self.exchange


def blocks_of_tap(problem: ConvProblem, channel_block: int) -> int:
    return ceil_div(problem.group_c, channel_block)


def stages_of(problem: ConvProblem, channel_block: int, states: int = 1) -> int:
    """Stages of the whole reduction; of one state where filter rows are transformed."""
    taps = problem.t * problem.r * (problem.s if states == 1 else ceil_div(problem.s, SEGMENT))
    return ceil_div(taps * blocks_of_tap(problem, channel_block), DEPTH // channel_block)


def leaves_column(problem: ConvProblem, channel_block: int) -> bool:
    """Whether whole segments of a filter row leave one column, whose channels are whole stages."""
    whole = blocks_of_tap(problem, channel_block) % (DEPTH // channel_block) == 0
    return problem.s > SEGMENT and problem.s % SEGMENT == 1 and whole


def rest_stages(problem: ConvProblem, config: SplitConfig) -> int:
    """Stages of the column that whole segments of filter rows leave, with two states; none with resident images."""
    if config.states == 1 or config.spacing or not leaves_column(problem, config.channel_block):
        return 0
    return problem.t * problem.r * blocks_of_tap(problem, config.channel_block) // (DEPTH // config.channel_block)


def _by_element(problem: ConvProblem) -> bool:
    """Whether each element of the filters has a factor, instead of each channel: only at unit stride a pixel is
    multiplied with all taps of its channel."""
    return max(problem.stride_d, *problem.stride) > 1 and problem.taps > 1


def _scaled_channels(problem: ConvProblem) -> int:
    """Channels of a filter, or elements, that have a factor."""
    return problem.group_c * (problem.taps if _by_element(problem) else 1)


def _row_block(problem: ConvProblem) -> int:
    """Filters of a row block, in which one warp finds the maximum of a channel: fewer for few channels and large
    filters, so that many warps are busy."""
    taps = problem.taps
    if _by_element(problem):
        return 256
    if problem.groups * problem.group_c >= 64 or taps <= 16:
        return 32
    return 512 // taps if taps <= 128 else 4


def prepared_floats(problem: ConvProblem, config: SplitConfig) -> tuple[int, int]:
    """Floats of packed filters: those before the fragments, and all (filter_layout.cuh, tensor_filters.cuh)."""
    tiles, stages = ceil_div(problem.group_k, config.filters), stages_of(problem, config.channel_block, config.states)
    scales, factors = problem.groups * tiles * config.filters, problem.groups * stages * DEPTH
    largest = _scaled_channels(problem) * problem.groups * ceil_div(problem.group_k, _row_block(problem))
    head = 4 + 4 * ceil_div(problem.groups, 4) + scales + factors
    states = stages * config.states - 2 * rest_stages(problem, config)
    fragments = problem.groups * tiles * states * config.n_tiles * config.filter_stage_bytes // 4
    speculative = scales + 4 if _speculative_block(problem) else 0
    return head, head + fragments + 4 * ceil_div(largest, 4) + speculative


def _speculative_block(problem: ConvProblem) -> int:
    """Filters of a CTA of the speculative launch, or 0 where there is none.

    A CTA keeps its filters in shared memory, and few of their channels are small by chance."""
    taps = problem.taps
    filters = ceil_div(SPECULATIVE_WEIGHTS, taps)
    if _by_element(problem) or problem.group_k % filters or filters * taps * problem.group_c > COPIED_ELEMENTS:
        return 0
    return filters


def _mirrored_block(problem: ConvProblem) -> int:
    """The same where the filters of ``problem``, a phase of a gradient, are read from the layer's; 0 where it is
    better to rearrange them first.

    Filters that are contiguous in the layer's share the sectors that are read."""
    least, elements = _speculative_block(problem), problem.r * problem.s * problem.group_c
    most = max(least, MIRRORED_FILTERS[problem.layout])
    fitting = (
        filters
        for filters in (4, 2, 1)
        if least <= filters <= most and problem.group_k % filters == 0 and filters * elements <= MIRRORED_ELEMENTS
    )
    first = next(fitting, 0) if least else 0
    return 0 if first == 1 and problem.layout == "NHWC" and problem.group_k > 8 else first


def _is_mirrored(problem: ConvProblem) -> bool:
    """Whether the filters of a gradient are read from the layer's; those of volumes are rearranged first."""
    return (
        problem.op == "dgrad"
        and not problem.is_volume
        and all(_mirrored_block(phase.problem) for phase in distinct_phases(problem))
    )


def filter_launches(
    problem: ConvProblem,
    config: SplitConfig,
    first_prepared: int,
    first_weight: int | None,
    blocks: tuple[int, int],
    mirrored: Constants = (),
) -> tuple[Launch, ...]:
    """The launches that pack the filters of a forward convolution: ``w``, or what lies at ``first_weight`` of the
    packed ones. ``blocks``: CTAs of each that must fit on a multiprocessor. ``mirrored``: the taps of ``w`` that a
    gradient has (`input_gradient.mirrored_taps`)."""
    channels, elements = _scaled_channels(problem), problem.taps * problem.group_c
    first = _mirrored_block(problem) if mirrored else _speculative_block(problem)
    most = MIRRORED_ELEMENTS if mirrored else COPIED_ELEMENTS
    # in NHWC four floats are skipped behind each 32 (`FilterElements` of the kernels)
    copied = 4 * ceil_div(elements + 4 * ceil_div(elements, 32) if problem.layout == "NHWC" else elements, 4)
    constants: Constants = (
        ("filter", DTYPES[problem.dtype].ctype),
        *named(problem, "k r s groups group_c group_k"),
        *filter_slices(problem),
        ("nhwc", problem.layout == "NHWC"),
        ("chwn", problem.layout == "CHWN"),
        ("by_element", _by_element(problem)),
        ("row_block", _row_block(problem)),
        ("copied_elements", most),
        ("copied_floats", copied),
        ("speculative_block", first),
        ("first_prepared", first_prepared),
        ("first_weight", first_weight or 0),
        ("mirrored", bool(mirrored)),
        *mirrored,
    )
    known = named(config, "mma_n n_tiles products rows channel_block states row_pixels spacing")
    tuning: Constants = (*known, ("output_rows", 1), ("small", False))
    written = Pointer("prepared", written=True)
    arguments = (written,) if first_weight is not None else (Pointer("w", DTYPES[problem.dtype].ctype), written)
    side_by_side = problem.layout == ("CHWN" if mirrored else "NHWC") or (
        _by_element(problem) and problem.layout != "CHWN"
    )
    row_blocks = problem.groups * ceil_div(problem.group_k, _row_block(problem))
    kept = ceil_div(channels, 4) * 4 if channels <= COPIED_ELEMENTS else 0
    split = 4 * (64 + kept + (copied if elements <= most else 0))
    rows = problem.groups * ceil_div(problem.group_k, config.filters) * config.filters
    shared = 4 * THREADS if side_by_side else 4 * 32

    def launch(header: str, name: str, grid: int, shared_bytes: int, at_once: int, threads: int = THREADS) -> Launch:
        header, known = f"kernels/hopper_fp32/{header}", (("threads", threads), ("shared_at", 0), *tuning)
        return Launch(header, f"leanconv::{name}", constants, known, arguments, grid, threads, shared_bytes, at_once)

    if first:
        at_once, threads = blocks[1] if rows // first > 256 else 2, THREADS
        if first * elements > COPIED_ELEMENTS:
            at_once, threads = 1, MIRRORED_THREADS
        speculative = 4 * (96 + first * copied)
        return (
            launch("speculative_filters.cuh", "speculative_filters", rows // first, speculative, at_once, threads),
            launch("speculative_filters.cuh", "validate_filters", min(rows, VALIDATING_BLOCKS), max(shared, split), 2),
        )
    grid = row_blocks * ceil_div(channels, 32 if side_by_side else THREADS // 32)
    return (
        launch("tensor_filters.cuh", "largest_channels", grid, shared, blocks[0]),
        launch("tensor_filters.cuh", "tensor_filters", rows, split, blocks[1]),
    )


def validating(main: Launch, speculative: Launch) -> Launch:
    """The main launch directly behind ``speculative``: its CTAs do what ``validate_filters`` would."""
    known = dict(main.problem)
    # NOTE: where rearranged filters lie differs with strides; filters that are read in place are `w`.
    assert all(known.get(name, value) == value for name, value in speculative.problem if name != "first_weight")
    missing = tuple((name, value) for name, value in speculative.problem if name not in known)
    arguments = tuple(replace(each, written=True) if each == Pointer("prepared") else each for each in main.arguments)
    return replace(
        main,
        problem=(*main.problem, *missing),
        tuning=tuple((dict(main.tuning) | {"validates": True}).items()),
        arguments=(*arguments, *(each for each in speculative.arguments if each.name != "prepared")),
        waits=True,
    )


def _can_validate(config: SplitConfig, preparing: tuple[Launch, ...], main: Launch) -> bool:
    """Whether ``main`` can validate its filters: it has CTAs, and shared memory, enough for the fallback."""
    (first, second), known = preparing, isinstance(config, RingConfig)
    enough = first.grid <= BLOCKS_VALIDATED * main.grid
    memory = config.filter_stages * config.filter_stage_bytes
    return known and first.header.endswith("speculative_filters.cuh") and enough and second.shared_bytes <= memory


C = TypeVar("C", bound=SplitConfig)


class SplitGemm(TimedAlgorithm, Generic[C]):
    """Direct convolution and its input's gradient with packed filters: each phase of a gradient has its own.

    ``x w ≈ hi·hi + hi·lo + lo·hi`` in float16, summed in float32; at precision tf32 ``hi·hi`` alone.
    """

    paper = "S. Markidis et al., NVIDIA Tensor Core Programmability, Performance & Precision (2018)"
    precision = "fp32"
    writes_phases = True
    #: CTAs on a multiprocessor, of each packing launch, that registers must suffice for. Few filters are one wave of
    #: the second launch, whose CTAs wait for memory most of the time.
    preparing_blocks: ClassVar[tuple[int, int]] = (1, 4)

    @abstractmethod
    def target_limits(self, target: Target) -> list[str]:
        """Why its kernel cannot run on ``target``."""

    @abstractmethod
    def candidates(self, problem: ConvProblem) -> list[C]:
        """Configurations, one for each tile."""

    @abstractmethod
    def main_launch(
        self, problem: ConvProblem, phase: PartialConvolution, config: C, known: Constants, target: Target
    ) -> Launch:
        """The launch that computes a phase of ``problem``; ``known`` is its ``Problem``."""

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "fprop", "dgrad"), *self.target_limits(target)]
        reasons += few_channels(problem, LEAST_CHANNELS)
        read = problem.group_k if problem.op == "dgrad" else problem.group_c
        if read > MOST_CHANNELS:
            reasons.append(f"a filter has {read} channels, more than {MOST_CHANNELS}")
        return reasons

    def order_of_sums(self, problem: ConvProblem, config: C) -> Hashable:
        # by default clusters split the tiles that are left over: in another batch they belong to other images
        shared = config.split > 1 and not problem.batch_invariant
        pixels = (config.rows, config.row_pixels > 0, config.linear, config.spacing, config.output_rows, config.one_row)
        return None if shared else (config.products, config.channel_block, *pixels, config.split)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if problem.precision == "tf32" else "fp16x3"

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        first, phases = _first(problem), distinct_phases(problem)
        each = (
            first + sum(phase.times * prepared_floats(phase.problem, config)[1] for phase in phases)
            for config in self.candidates(problem)
        )
        return 4 * max(each, default=0)

    def plan(self, problem: ConvProblem, config: C, target: Target) -> Plan:
        prepare, launches, unprepared, validated = [], [], [], []
        phases, first, wide = single_phases(problem), _first(problem), has_wide_tensors(problem)
        mirrored = _is_mirrored(problem)
        rearranged = problem.op == "dgrad" and not mirrored
        if rearranged and phases:
            prepare.append(input_gradient.filter_launch(problem))
            unprepared.append(prepare[0])
        for phase in phases:
            source = phase.view.first_weight if rearranged else None
            taps = input_gradient.mirrored_taps(problem, phase) if mirrored else ()
            own = filter_launches(phase.problem, config, first, source, self.preparing_blocks, taps)
            prepare += own
            constants = (*view_constants(phase.problem, phase.view, wide), ("first_prepared", first))
            main = self.main_launch(problem, phase, config, constants, target)
            launches.append(main)
            validates = _can_validate(config, own, main)
            unprepared += own[:1] if validates else own
            validated.append(validating(main, own[0]) if validates else main)
            first += prepared_floats(phase.problem, config)[1]
        last = input_gradient.zero_launches(problem)
        plan = prepared_plan(prepare, (*launches, *last), self.prepared_bytes(problem))
        both = in_chain((*unprepared, *validated, *last)) if validated != launches else ()
        return replace(plan, unprepared=both)


def _first(problem: ConvProblem) -> int:
    """Floats before the packed filters: rearranged filters, for some gradients."""
    rearranged = problem.op == "dgrad" and not _is_mirrored(problem)
    return ceil_div(input_gradient.prepared_bytes(problem), 16) * 4 if rearranged else 0
