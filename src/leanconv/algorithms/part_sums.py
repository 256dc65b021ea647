"""What gradients of the filters share whose blocks' sums go through a workspace: the launch that adds them."""

from __future__ import annotations

from leanconv.algorithms.base import LAUNCH_CYCLES, ceil_div, conv_constants
from leanconv.dtypes import DTYPES
from leanconv.plan import Launch, Pointer, Target
from leanconv.problem import ConvProblem

#: Warps of a block of the launch that adds, at most.
SUM_WARPS = 8
#: Weights from which on a lane of it has four, not one: fewer blocks, and more loads under way.
MANY_WEIGHTS = 32768


def weights_of(problem: ConvProblem) -> int:
    """Elements of the gradient."""
    return problem.k * problem.group_c * problem.r * problem.s


def sum_launch(problem: ConvProblem, parts: int, most_warps: int = SUM_WARPS) -> Launch:
    """The launch that adds ``parts`` of the workspace, in their order; up to ``most_warps`` of a block share a
    weight's."""
    warps = min(most_warps, 1 << (parts.bit_length() - 1))
    width = 4 if weights_of(problem) >= MANY_WEIGHTS else 1
    return Launch(
        header="lib/part_sums.cuh",
        function="leanconv::sum_parts",
        problem=conv_constants(problem),
        tuning=(("parts", parts), ("sum_warps", warps), ("width", width)),
        arguments=(Pointer("workspace"), Pointer("dw", DTYPES[problem.dtype].ctype, written=True)),
        grid=ceil_div(weights_of(problem), 32 * width),
        block=32 * warps,
        shared_bytes=128 * warps * width,
    )


def sum_cycles(problem: ConvProblem, parts: int, target: Target) -> float:
    """Predicted clock cycles of what the parts cost: written, read, and one launch more."""
    return LAUNCH_CYCLES + 8 * parts * weights_of(problem) / target.bytes_per_cycle
