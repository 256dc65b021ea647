"""The gradient of a layer's input as forward convolutions of unit stride, and the launches that go with them.

With ``m = stride / gcd(stride, dilation)`` a row of the input that filter row r reads is read by rows r + m, r + 2m,
...: so the rows fall into phases, and each phase is a convolution over the gradient of the output with those filter
rows alone, of unit stride and dilation ``dilation / gcd``; columns, and the slices of volumes, likewise. Every product
of the forward layer is computed once, in one of the phases. Phases have either ``ceil(r / m)`` or ``floor(r / m)``
rows, so that at most four launches compute all of them, eight those of volumes. A separate launch writes zeros, or a
transposed layer's bias, to what no filter row reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Any

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.kernels.common.layers import OutputView, conv_constants, filter_slices
from leanconv.kernels.contract import ceil_div, named
from leanconv.kernels.cost import axes_of, leaves_pixels, zeros_at_once
from leanconv.plan import Constants, Launch, Number, Pointer
from leanconv.problem import ConvProblem

#: Threads of a block in the launches that move data, and rows and columns of the filters that one block transposes.
THREADS = 256
SIDE = 32


@dataclass(frozen=True)
class PartialConvolution:
    """The phases of the gradient that one launch computes: the convolution of the first, and where the outputs of all
    lie."""

    problem: ConvProblem
    view: OutputView
    #: Row and column of the layer's filters that the last taps of the first phase are.
    first_taps: tuple[int, int] = (0, 0)
    #: And the slice.
    first_slice: int = 0
    #: How many of a call's convolutions are equal to this one, the first of them (`distinct_phases`).
    times: int = 1

    @property
    def phases(self) -> int:
        """How many phases the launch serves."""
        return self.view.count

    @property
    def volume(self) -> bool:
        """Whether the kernel has slices: a phase of a volume may read one, with filters of one."""
        return self.problem.is_volume or self.view.out_d > 1

    @property
    def whole(self) -> bool:
        """Whether its outputs are all of the image, in order."""
        return self.view.covers(self.problem)

    @property
    def pixels(self) -> int:
        """Output pixels of one phase, as the kernel numbers them."""
        return self.problem.pixels

    @property
    def reduction(self) -> int:
        return self.problem.group_c * self.problem.taps


@dataclass(frozen=True)
class _Phases:
    """``count`` phases of one axis with equally many ``taps``.

    ``begin`` is the first of them, and ``first`` its first pixel; ``outputs`` are those of the longest.
    """

    begin: int
    count: int
    taps: int
    taps_before: int
    first: int
    padding: int
    outputs: int

    def sides(self, extent: int, dilation: int) -> tuple[int, int]:
        """Padding before and after an axis of ``extent`` pixels, those of the gradient of the output."""
        return self.padding, self.outputs - extent - self.padding + (self.taps - 1) * dilation


def _along(extent: int, taps: int, stride: int, dilation: int, padding: int) -> Iterator[_Phases]:
    """The phases along an axis of ``extent`` input pixels, those with more taps first.

    Tap r reads pixel i of the input where ``i + padding - r * dilation`` is ``stride * p``. For phase ``r % m`` all
    such pixels are ``first + stride * j``, and their outputs ``p = j - floor((r * dilation - padding) / stride)``.
    """
    apart = stride // gcd(stride, dilation)
    more = taps % apart
    kinds = ((0, more, taps // apart + 1), (more, apart - more, taps // apart))
    for begin, count, of_each in kinds:
        places = [(tap * dilation - padding) % stride for tap in range(begin, begin + count)]
        outputs = max((ceil_div(extent - place, stride) for place in places), default=0)
        if of_each > 0 and outputs > 0:
            moved = (begin * dilation - padding) // stride
            reach = (of_each - 1) * (dilation // gcd(stride, dilation))
            before = 0 if begin == 0 else more * (taps // apart + 1)
            yield _Phases(begin, count, of_each, before, places[0], reach + moved, outputs)


def over_outputs(problem: ConvProblem, **changes: Any) -> ConvProblem:
    """The forward convolution of unit stride that reads the gradient of the output, channels and filters exchanged."""
    return replace(
        problem,
        op="fprop",
        c=problem.k,
        d=problem.z,
        h=problem.p,
        w=problem.q,
        k=problem.c,
        stride=(1, 1),
        stride_d=1,
        **changes,
    )


def phase_groups(problem: ConvProblem, first_weight: int = 0) -> list[PartialConvolution]:
    """The convolutions that compute the gradient, those with the most taps first.

    Their filters are what `filter_launch` writes, from element ``first_weight`` of the packed weights on, which is a
    multiple of four: in CHWN four filters are copied at once.
    """
    (sh, sw), (dh, dw), sd, dd = problem.stride, problem.dilation, problem.stride_d, problem.dilation_d
    convolutions = []
    axes = (
        _along(problem.d, problem.t, sd, dd, problem.padding_d[0]),
        _along(problem.h, problem.r, sh, dh, problem.padding[0]),
        _along(problem.w, problem.s, sw, dw, problem.padding[2]),
    )
    for slices, rows, columns in product(*axes):
        dilation = (dh // gcd(sh, dh), dw // gcd(sw, dw))
        convolution = over_outputs(
            problem,
            t=slices.taps,
            r=rows.taps,
            s=columns.taps,
            padding=(*rows.sides(problem.p, dilation[0]), *columns.sides(problem.q, dilation[1])),
            padding_d=slices.sides(problem.z, dd // gcd(sd, dd)),
            dilation=dilation,
            dilation_d=dd // gcd(sd, dd),
        )
        before = rows.taps_before * problem.s + rows.count * rows.taps * columns.taps_before
        before = slices.taps_before * problem.r * problem.s + slices.count * slices.taps * before
        view = OutputView(
            problem.h,
            problem.w,
            rows.first,
            columns.first,
            sh,
            sw,
            (rows.count, columns.count),
            problem.dilation,
            first_weight + before * problem.k * problem.group_c,
            problem.d,
            slices.first,
            sd,
            slices.count,
            dd,
        )
        convolutions.append(PartialConvolution(convolution, view, (rows.begin, columns.begin), slices.begin))
    return convolutions


def convolutions_of(problem: ConvProblem) -> list[PartialConvolution]:
    """The convolutions that one call computes: one, or those that make a gradient."""
    if problem.op == "dgrad":
        return phase_groups(problem)
    return [PartialConvolution(problem, OutputView(problem.p, problem.q, out_d=problem.z))]


def single_phases(problem: ConvProblem) -> list[PartialConvolution]:
    """The convolutions that one call computes, each with a launch of its own: one, or those that make a gradient."""
    return list(_all_phases(problem)) if problem.op == "dgrad" else convolutions_of(problem)


def distinct_phases(problem: ConvProblem) -> list[PartialConvolution]:
    """Of `single_phases` one for all whose convolutions are equal: what predicts times asks for each of them once."""
    return single_phases(problem) if problem.op != "dgrad" else list(_distinct(problem))


@lru_cache(maxsize=64)
def _all_phases(problem: ConvProblem) -> tuple[PartialConvolution, ...]:
    return tuple(_single(group, *phase) for group in phase_groups(problem) for phase in _phases(group))


@lru_cache(maxsize=64)
def _distinct(problem: ConvProblem) -> tuple[PartialConvolution, ...]:
    found = []
    for group in phase_groups(problem):
        phases = [*_phases(group)]
        times = Counter(padding for _, _, padding in phases)
        first = {padding: (number, place, padding) for number, place, padding in reversed(phases)}
        found += [replace(_single(group, *first[padding]), times=many) for padding, many in times.items()]
    return tuple(found)


#: Slices, rows and columns.
_Place = tuple[int, int, int]
#: Padding before and after each.
_Padding = tuple[int, int, int, int, int, int]


def _phases(group: PartialConvolution) -> Iterator[tuple[int, _Place, _Padding]]:
    """The phases of ``group`` one by one, each with its first pixel and its padding: a tensor map has only one."""
    view, whole = group.view, group.problem
    for number in range(group.phases):
        of_rows, column = divmod(number, view.phases[1])
        slice_number, row = divmod(of_rows, view.phases[0])
        (down, right), (first_p, first_q) = view.phase(row, column)
        deep, first_z = view.slice_phase(slice_number)
        z = ceil_div(view.out_d - first_z, view.step_z)
        p, q = ceil_div(view.out_h - first_p, view.step_p), ceil_div(view.out_w - first_q, view.step_q)
        if min(z, p, q) <= 0:
            continue
        front, top, left = whole.padding_d[0] + deep, whole.padding[0] + down, whole.padding[2] + right
        back = z - 1 + (whole.t - 1) * whole.dilation_d + 1 - whole.d - front
        bottom = p - 1 + (whole.r - 1) * whole.dilation[0] + 1 - whole.h - top
        rest = q - 1 + (whole.s - 1) * whole.dilation[1] + 1 - whole.w - left
        yield number, (first_z, first_p, first_q), (front, back, top, bottom, left, rest)


def _single(group: PartialConvolution, number: int, first: _Place, padding: _Padding) -> PartialConvolution:
    """A phase of ``group`` as a convolution of its own."""
    view, whole = group.view, group.problem
    weights = whole.k * whole.group_c * whole.taps
    first_weight = view.first_weight + number * weights
    first_z, first_p, first_q = first
    single = replace(
        view, first_p=first_p, first_q=first_q, phases=(1, 1), first_weight=first_weight, first_z=first_z, phases_d=1
    )
    of_rows, column = divmod(number, view.phases[1])
    taps = (group.first_taps[0] + of_rows % view.phases[0], group.first_taps[1] + column)
    front, back, *sides = padding
    top, bottom, left, right = sides
    convolution = replace(whole, padding=(top, bottom, left, right), padding_d=(front, back))
    return PartialConvolution(convolution, single, taps, group.first_slice + of_rows // view.phases[0])


def mirrored_taps(problem: ConvProblem, group: PartialConvolution) -> Constants:
    """Which taps of the filters of ``problem`` a phase of its gradient has (device/pipeline/filter_layout.cuh)."""
    apart = [stride // gcd(stride, dilation) for stride, dilation in zip(problem.stride, problem.dilation, strict=True)]
    return (
        ("layer_r", problem.r),
        ("layer_s", problem.s),
        ("last_row", group.first_taps[0] + (group.problem.r - 1) * apart[0]),
        ("last_column", group.first_taps[1] + (group.problem.s - 1) * apart[1]),
        ("apart_h", apart[0]),
        ("apart_w", apart[1]),
        *(_mirrored_slices(problem, group) if group.volume or problem.is_volume else ()),
    )


def _mirrored_slices(problem: ConvProblem, group: PartialConvolution) -> Constants:
    apart = problem.stride_d // gcd(problem.stride_d, problem.dilation_d)
    last = group.first_slice + (group.problem.t - 1) * apart
    return ("layer_t", problem.t), ("last_slice", last), ("apart_d", apart)


def prepared_bytes(problem: ConvProblem) -> int:
    """Bytes of filters that are rearranged, or rounded: as many as the filters have, none of a gradient of zeros, where
    all windows read only padding."""
    weights = problem.k * problem.group_c * problem.taps
    return item_bytes(problem.dtype) * weights if distinct_phases(problem) else 0


def filter_launch(problem: ConvProblem, first_weight: int = 0, rounded: bool = False) -> Launch:
    """The launch that rearranges filters for `phase_groups`, from element ``first_weight`` of the packed ones on.
    ``rounded``: and rounds them to TF32."""
    tiles = ceil_div(problem.group_k, SIDE) * ceil_div(problem.group_c * problem.taps, SIDE)
    element, slices = DTYPES[problem.dtype].ctype, filter_slices(problem)
    if slices:
        slices = (*slices, ("apart_d", problem.stride_d // gcd(problem.stride_d, problem.dilation_d)))
    return Launch(
        header="kernels/common/input_gradient.cuh",
        function="leanconv::gradient_filters",
        problem=(
            ("element", element),
            *named(problem, "groups group_c group_k r s"),
            ("apart_h", problem.stride[0] // gcd(problem.stride[0], problem.dilation[0])),
            ("apart_w", problem.stride[1] // gcd(problem.stride[1], problem.dilation[1])),
            ("nhwc", problem.layout == "NHWC"),
            ("chwn", problem.layout == "CHWN"),
            ("first_weight", first_weight),
            ("rounded", rounded),
            *slices,
        ),
        tuning=(("threads", THREADS), ("side", SIDE)),
        arguments=(Pointer("w", element), Pointer("prepared", element, written=True)),
        grid=problem.groups * tiles,
        block=THREADS,
        shared_bytes=item_bytes(problem.dtype) * SIDE * (SIDE + 1),
    )


def zero_launches(problem: ConvProblem) -> tuple[Launch, ...]:
    """The launch that writes zeros, or the bias, to the pixels that no phase has; none where there are none, or where
    ``problem`` is no gradient, or one that is added."""
    if not leaves_pixels(problem):
        return ()
    inverses = [
        (f"inverse_{axis}", pow(dilation // gcd(stride, dilation), -1, stride // gcd(stride, dilation)))
        for axis, (_, stride, dilation) in zip("dhw", axes_of(problem), strict=True)
    ][0 if problem.is_volume else 1 :]
    element = DTYPES[problem.dtype].ctype
    bias = [Pointer("bias", element)] if problem.bias else []
    vector = zeros_at_once(problem)
    launch = Launch(
        header="kernels/common/input_gradient.cuh",
        function="leanconv::gradient_zeros",
        problem=(*conv_constants(problem), *inverses),
        tuning=(("threads", THREADS), ("vector", vector)),
        arguments=(*bias, Pointer("dx", element, written=True), Number("long long", "batch", problem.n)),
        grid=ceil_div(problem.n * problem.c * problem.d * problem.h * problem.w, THREADS * vector),
        block=THREADS,
    )
    return (launch,)


def images_as_rows(problem: ConvProblem) -> PartialConvolution:
    """The forward convolution of one tap that computes ``problem``, of images that are rows."""
    pixels = problem.p * problem.q
    row = replace(single_phases(problem)[0].problem, h=1, w=pixels, padding=(0, 0, 0, 0))
    return PartialConvolution(row, OutputView(1, pixels))
