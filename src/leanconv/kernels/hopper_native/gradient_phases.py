"""The phases of a strided gradient of the input that native_gemm_nchw computes in one launch (packed_filters.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from leanconv.kernels.common.input_gradient import PartialConvolution, over_outputs
from leanconv.kernels.common.layers import OutputView
from leanconv.kernels.contract import ceil_div
from leanconv.plan import Constants
from leanconv.problem import ConvProblem

#: Taps of a layer: the code has each of them.
MOST_TAPS = 36


@dataclass(frozen=True, kw_only=True)
class PhasesTogether(PartialConvolution):
    """All phases: a convolution of unit stride that reads what all of them read, and where their pixels lie. Its taps
    are places that the ``layer``'s taps read, of which several phases may read one."""

    layer: ConvProblem


@lru_cache(maxsize=256)
def phases_together(problem: ConvProblem) -> PhasesTogether | None:
    """All phases of ``problem`` in one: of a gradient of images with a stride of 2 in rows, columns or both, where each
    phase has taps, and all have at most `MOST_TAPS`; else None."""
    taps, strides = (problem.r, problem.s), problem.stride
    each_has_taps = all(stride <= 2 and many >= stride for many, stride in zip(taps, strides, strict=True))
    few = problem.r * problem.s <= MOST_TAPS
    strided = strides != (1, 1) and problem.dilation == (1, 1) and each_has_taps and few
    if problem.op != "dgrad" or problem.is_volume or not strided:
        return None
    # Tap r reads the pixel of the output's gradient that lies (r - pad) // stride before.
    shifts = [
        [(tap - pad) // stride for tap in (0, many - 1)]
        for many, stride, pad in zip(taps, strides, problem.padding[::2], strict=True)
    ]
    (top, height), (left, width) = ((last, last - first + 1) for first, last in shifts)
    p, q = ceil_div(problem.h, strides[0]), ceil_div(problem.w, strides[1])
    convolution = over_outputs(
        problem,
        r=height,
        s=width,
        padding=(top, p + height - 1 - problem.p - top, left, q + width - 1 - problem.q - left),
    )
    view = OutputView(problem.h, problem.w, step_p=strides[0], step_q=strides[1], phases=strides)
    return PhasesTogether(convolution, view, layer=problem)


def image_taps(phase: PartialConvolution) -> int:
    """Taps of a slice of the filters whose products a launch adds up, of all its phases."""
    of = phase.layer if isinstance(phase, PhasesTogether) else phase.problem
    return of.r * of.s


def layer_taps(phase: PartialConvolution) -> Constants:
    """What the kernels know of the layer's taps where a launch computes all phases."""
    if not isinstance(phase, PhasesTogether):
        return ()
    layer = phase.layer
    names = ("layer_r", "layer_s", "layer_top", "layer_left")
    return tuple(zip(names, (layer.r, layer.s, layer.padding[0], layer.padding[2]), strict=True))
