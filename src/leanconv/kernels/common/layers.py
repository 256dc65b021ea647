"""What kernels of layers have in common on the host: their limits, the ``Problem`` struct, their arguments."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod

from leanconv.dtypes import DTYPES, accumulator, is_integer, item_bytes, none_of, result_of, weights_of
from leanconv.kernels.contract import named
from leanconv.options import ACTIVATION_NUMBERS, INTEGER_ACTIVATIONS, Layout, activation_parts
from leanconv.plan import Argument, Constants, Launch, Number, Plan, Pointer, Target, TensorMap, in_chain
from leanconv.problem import ConvProblem

#: The element types of kernels that know no other.
FLOAT32, FLOATS_16BIT = ("float32",), ("float16", "bfloat16")
#: What a problem's operation computes.
_COMPUTES = {"fprop": "the forward pass", "dgrad": "the gradient of the input", "wgrad": "the gradient of the filters"}


def limits(problem: ConvProblem, *ops: str, dtypes: Sequence[str] = FLOAT32) -> list[str]:
    """Why kernels that compute the operations ``ops`` of layers with elements of ``dtypes`` cannot run ``problem``."""
    reasons = []
    if problem.op not in ops:
        named = " nor ".join(_COMPUTES[op] for op in ops)
        reasons.append(f"op={problem.op!r} is {'not' if len(ops) == 1 else 'neither'} {named}")
    reasons += none_of(problem.dtype, dtypes)
    if problem.op == "dgrad" and problem.bias and problem.accumulate:
        reasons.append("accumulate=True with a bias: pixels that no window covers would need a launch of their own")
    reasons += _epilogue_limits(problem)
    # Indices below one image of one channel are of 32 bits, whatever the tensors' sizes.
    sizes = ("input", problem.d, problem.h, problem.w), ("output", problem.z, problem.p, problem.q)
    for what, *extent in sizes:
        if prod(extent) >= 2**31:
            size = "x".join(map(str, extent if problem.is_volume else extent[1:]))
            reasons.append(f"an {what} of {size} pixels has 2**31 or more in one channel")
    return reasons


def _epilogue_limits(problem: ConvProblem) -> list[str]:
    """Why no kernel can do what follows the sums of ``problem``."""
    reasons = []
    if problem.op != "fprop" and (problem.scale or problem.add or problem.activation):
        reasons.append(
            f"op={problem.op!r} with scale, add or activation, which follow the sums of the forward pass alone"
        )
    if is_integer(problem.dtype):
        if problem.scale:
            reasons.append(
                f"scale of a layer of {problem.dtype}: its results are sums of integers, which a scale would round"
            )
        if problem.activation not in INTEGER_ACTIVATIONS:
            known = " and ".join(map(repr, INTEGER_ACTIVATIONS[1:]))
            reasons.append(
                f"activation={problem.activation!r} of a layer of {problem.dtype}, whose results take {known}"
            )
    if problem.add and problem.accumulate:
        reasons.append("accumulate=True with add: one of them is added to the sums")
    return reasons


def images_outermost(problem: ConvProblem) -> list[str]:
    """Why kernels that support only layouts with the images outermost cannot run ``problem``."""
    inner = problem.layout not in ("NCHW", "NHWC")
    return [f"layout={problem.layout!r} is neither 'NCHW' nor 'NHWC'"] if inner else []


def one_channel(problem: ConvProblem) -> list[str]:
    """Why kernels for one channel a group cannot run ``problem``."""
    several = problem.group_c != 1
    return [f"groups={problem.groups} of {problem.c} channels: a group has more than one channel"] if several else []


def few_channels(problem: ConvProblem, least: int) -> list[str]:
    """Why kernels that multiply ``least`` channels at once cannot run ``problem``."""
    few = min(problem.group_c, problem.group_k)
    if problem.groups == 1 or few >= least:
        return []
    return [f"groups={problem.groups} leaves {few} channels in a group, fewer than {least}"]


def mma_sync_limits(target: Target) -> list[str]:
    """Why kernels that multiply by mma.sync cannot run on ``target``."""
    if target.warp_products:
        return []
    return [f"{target.arch} is older than sm_80, whose tensor cores multiply 16 x 8 x 16 float16"]


def wgmma_limits(target: Target) -> list[str]:
    """Why kernels that multiply by wgmma cannot run on ``target``."""
    if target.warpgroup_products:
        return []
    return [f"{target.arch} has no products of warpgroups (wgmma), which only sm_90a has"]


def limits_of_one_tap(problem: ConvProblem, target: Target) -> list[str]:
    """Why kernels of 1x1 layers of 16 bits in NCHW, and of their input's gradients, cannot run ``problem``."""
    reasons = limits(problem, "fprop", "dgrad", dtypes=FLOATS_16BIT) + wgmma_limits(target)
    if problem.layout != "NCHW":
        reasons.append(f"layout={problem.layout!r} is not NCHW")
    if problem.n < 1:
        reasons.append(f"n={problem.n}: there are no images")
    if (problem.r, problem.s) != (1, 1):
        reasons.append(f"filters of {problem.r}x{problem.s} taps are not 1x1")
    return reasons


def filters_as_they_lie(problem: ConvProblem, box: tuple[int, int]) -> TensorMap:
    """How copies walk over a layer's filters of one tap: a box of channels and of filters, of a group."""
    row = item_bytes(problem.dtype) * problem.group_c
    return TensorMap(
        role="w",
        element=problem.dtype,
        shape=(problem.group_c, problem.group_k, problem.groups),
        strides=(row, row * problem.group_k),
        box=(*box, 1),
        swizzle=item_bytes(problem.dtype) * box[0],
    )


def has_wide_tensors(problem: ConvProblem) -> bool:
    """Whether the largest of the tensors takes more bytes than 32 bits count, or nearly 2**31 elements and more."""
    weights = problem.k * problem.group_c * problem.taps
    x, y = problem.n * problem.c * problem.d * problem.h * problem.w, problem.pixels * problem.k
    # an int counts pixels and elements, those of the last tile included
    return max(x, y, weights) >= min(2**32 // item_bytes(problem.dtype), 2**31 - 2**16)


@lru_cache(maxsize=64)
def forward_of(problem: ConvProblem) -> ConvProblem:
    """The forward convolution that computes ``problem``: of a gradient with the filters reversed.

    It is kept, because predicting times needs it a hundred times.
    """
    return problem.as_forward() if problem.op == "dgrad" else problem


def copy_layout(problem: ConvProblem) -> Layout:
    """The layout whose measured speeds hold: images in no multiple of four are copied as the pixels of NCHW are."""
    return "NCHW" if problem.layout == "CHWN" and problem.n % 4 else problem.layout


def leaves_image(problem: ConvProblem) -> bool:
    """Whether some window reads padding."""
    top, _, left, _ = problem.padding
    last_row = (problem.p - 1) * problem.stride[0] - top + (problem.r - 1) * problem.dilation[0]
    last_column = (problem.q - 1) * problem.stride[1] - left + (problem.s - 1) * problem.dilation[1]
    front = problem.padding_d[0]
    last_slice = (problem.z - 1) * problem.stride_d - front + (problem.t - 1) * problem.dilation_d
    before, behind = max(top, left, front) > 0, last_row >= problem.h or last_column >= problem.w
    return before or behind or last_slice >= problem.d


@lru_cache(maxsize=64)
def conv_constants(problem: ConvProblem) -> Constants:
    """The ``Problem`` struct of a convolution kernel: everything but the batch, which stays an argument.

    ``element`` is the C++ type of x, ``filter`` that of w, ``result`` that of bias and y, ``sum`` the one that products
    are summed in.
    ``padded``: some window leaves the image; with negative padding the first one begins inside it. ``wide``: offsets in
    bytes need more than 32 bits. ``vector_store``: four outputs adjacent in memory, counted from the start of an image
    (NCHW), a pixel's filter group (NHWC) or a pixel's images (CHWN), never straddle its end. In CHWN this is the only
    constant that depends on the batch, and it applies to the input too. Layers of images have no constants of slices
    (device/index.cuh, Depth).
    """
    p, q = problem.p, problem.q
    top, _, left, _ = problem.padding
    innermost = {"NCHW": problem.z * p * q, "NHWC": gcd(problem.k, problem.group_k), "CHWN": problem.n}
    return (
        ("element", DTYPES[problem.dtype].ctype),
        ("filter", DTYPES[weights_of(problem.dtype)].ctype),
        ("result", DTYPES[result_of(problem.dtype)].ctype),
        ("sum", accumulator(problem.dtype).ctype),
        *named(problem, "c h w k r s p q groups group_c group_k"),
        ("stride_h", problem.stride[0]),
        ("stride_w", problem.stride[1]),
        ("pad_top", top),
        ("pad_left", left),
        ("dilation_h", problem.dilation[0]),
        ("dilation_w", problem.dilation[1]),
        ("padded", leaves_image(problem)),
        ("nhwc", problem.layout == "NHWC"),
        ("chwn", problem.layout == "CHWN"),
        *named(problem, "bias accumulate scale add"),
        ("activation", activation_type(problem.activation)),
        ("wide", has_wide_tensors(problem)),
        ("vector_store", innermost[problem.layout] % 4 == 0),
        *slice_constants(problem),
    )


def activation_type(activation: str | None) -> str:
    """The C++ type that applies an activation (device/epilogue.cuh); one with a number has its bits."""
    if activation is None:
        return "leanconv::Identity"
    name, value = activation_parts(activation)
    ctype = "leanconv::" + "".join(map(str.capitalize, name.split("_")))
    return f"{ctype}<{struct.unpack('<I', struct.pack('<f', value))[0]:#x}>" if name in ACTIVATION_NUMBERS else ctype


def slice_constants(problem: ConvProblem, volume: bool = False) -> Constants:
    """The constants of a layer of volumes, none of one of images; ``volume`` makes it one."""
    if not (volume or problem.is_volume):
        return ()
    return (*named(problem, "d t z stride_d dilation_d"), ("pad_front", problem.padding_d[0]))


def filter_slices(problem: ConvProblem) -> Constants:
    """What of `slice_constants` the filters determine."""
    return (("t", problem.t),) if problem.is_volume else ()


@dataclass(frozen=True)
class OutputView:
    """The places of a launch's outputs: rows ``first_p + step_p * i`` and columns ``first_q + step_q * j`` of images of
    ``out_h`` x ``out_w``, and from which element on the launch finds its filters. Of volumes slices likewise.

    With more than one of ``phases`` the launch serves so many in each direction, their filters one after the
    other. Phase i begins ``phase_step * i`` rows (columns) behind the first, of which whole steps move the windows;
    outputs that would lie outside the image are not stored.
    """

    out_h: int
    out_w: int
    first_p: int = 0
    first_q: int = 0
    step_p: int = 1
    step_q: int = 1
    phases: tuple[int, int] = (1, 1)
    phase_step: tuple[int, int] = (1, 1)
    first_weight: int = 0
    out_d: int = 1
    first_z: int = 0
    step_z: int = 1
    phases_d: int = 1
    phase_step_d: int = 1

    @property
    def count(self) -> int:
        """How many phases the launch serves."""
        return self.phases_d * self.phases[0] * self.phases[1]

    def covers(self, problem: ConvProblem) -> bool:
        """Whether the outputs of ``problem`` are all of the image, in order."""
        return self.count == 1 and (self.out_d, self.out_h, self.out_w) == (problem.z, problem.p, problem.q)

    def slice_phase(self, number: int) -> tuple[int, int]:
        """The same of a phase of slices: whole steps, and the slice where it begins."""
        if self.phases_d == 1:
            return 0, self.first_z
        return divmod(self.first_z + number * self.phase_step_d, self.step_z)

    def phase(self, row: int, column: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Whole steps by which phase (row, column) moves its windows, and the row and column where it begins."""
        if self.phases == (1, 1):
            return (0, 0), (self.first_p, self.first_q)
        down, first_p = divmod(self.first_p + row * self.phase_step[0], self.step_p)
        right, first_q = divmod(self.first_q + column * self.phase_step[1], self.step_q)
        return (down, right), (first_p, first_q)


@lru_cache(maxsize=64)
def view_constants(problem: ConvProblem, view: OutputView | None = None, wide: bool = False) -> Constants:
    """The ``Problem`` struct of a tiled kernel: `conv_constants` and ``view`` (None: contiguous outputs).

    ``problem`` is the convolution of one phase, the first. ``wide``: offsets take 64 bits whatever its tensors.
    """
    constants = dict(conv_constants(problem))
    view = view or OutputView(problem.p, problem.q, out_d=problem.z)
    constants["wide"] = constants["wide"] or wide
    if problem.layout == "NCHW" and not view.covers(problem):
        columns = (problem.q, view.first_q, view.out_w)
        constants["vector_store"] = view.step_q == 1 and all(number % 4 == 0 for number in columns)
    # Of all phases the last has its windows moved furthest.
    (down, right), _ = view.phase(view.phases[0] - 1, view.phases[1] - 1)
    top, bottom, left, rest = problem.padding
    moved, _ = view.slice_phase(view.phases_d - 1)
    front, back = problem.padding_d
    last = replace(
        problem, padding=(top + down, bottom - down, left + right, rest - right),
        padding_d=(front + moved, back - moved),
    )  # fmt: skip
    constants["padded"] = constants["padded"] or dict(conv_constants(last))["padded"]
    # a phase may be a layer of images, and its outputs slices of a volume
    volume = problem.is_volume or view.out_d > 1
    constants |= slice_constants(problem, volume)
    return (
        *constants.items(),
        *named(view, "out_h out_w first_p first_q step_p step_q first_weight"),
        ("phases_h", view.phases[0]),
        ("phases_w", view.phases[1]),
        ("phase_step_h", view.phase_step[0]),
        ("phase_step_w", view.phase_step[1]),
        *(named(view, "out_d first_z step_z phases_d phase_step_d") if volume else ()),
    )


def prepared_plan(prepare: Sequence[Launch], launches: Sequence[Launch], prepared_bytes: int) -> Plan:
    """A plan whose launches, those of ``prepare`` first, are started early."""
    chain, first = in_chain((*prepare, *launches)), len(prepare)
    return Plan(chain[first:], prepare=chain[:first], prepared_bytes=prepared_bytes)


def conv_arguments(problem: ConvProblem, source: str | None = None, filters: str = "w") -> tuple[Argument, ...]:
    """The arguments of a kernel that computes ``problem``, its pixels in ``source``, its filters in ``filters``.

    By default the pixels are those of the operand that ``problem`` reads.
    """
    read, w, *_, written = problem.operands
    element, weight, result = (DTYPES[operand.dtype].ctype for operand in (read, w, written))
    return (
        Pointer(source or read.role, element),
        Pointer(filters, weight),
        Pointer("bias", result),
        Pointer(written.role, result, written=True),
        Number("long long", "batch", problem.n),
        *((Pointer("scale", "float", beside="bias"),) if problem.scale else ()),
        *((Pointer("add", result, beside="bias"),) if problem.add else ()),
    )


def gradient_arguments(problem: ConvProblem) -> tuple[Argument, ...]:
    """The arguments of a kernel that computes a gradient: the operands, a bias where there is one, and the batch."""
    element = DTYPES[problem.dtype].ctype
    operands = (Pointer(each.role, element, each.written) for each in problem.operands)
    return (*operands, Number("long long", "batch", problem.n))
