"""What gradients of the filters share whose blocks' sums go through a workspace: the launch that adds them."""

from __future__ import annotations

from leanconv.algorithms.base import LAUNCH_CYCLES, ceil_div, conv_constants
from leanconv.dtypes import DTYPES
from leanconv.plan import Launch, Pointer, Target
from leanconv.problem import ConvProblem

#: Warps of a block of the launch that adds, at most.
SUM_WARPS = 8


def weights_of(problem: ConvProblem) -> int:
    """Elements of the gradient."""
    return problem.k * problem.group_c * problem.r * problem.s


def sum_launch(problem: ConvProblem, parts: int, most_warps: int = SUM_WARPS) -> Launch:
    """The launch that adds ``parts`` of the workspace, in their order; up to ``most_warps`` of a block share a
    weight's."""
    warps = min(most_warps, 1 << (parts.bit_length() - 1))
    return Launch(
        header="lib/part_sums.cuh",
        function="leanconv::sum_parts",
        problem=conv_constants(problem),
        tuning=(("parts", parts), ("sum_warps", warps)),
        arguments=(Pointer("workspace"), Pointer("dw", DTYPES[problem.dtype].ctype, written=True)),
        grid=ceil_div(weights_of(problem), 32),
        block=32 * warps,
        shared_bytes=128 * warps,
    )


def sum_cycles(problem: ConvProblem, parts: int, target: Target) -> float:
    """Predicted clock cycles of what the parts cost: written, read, and one launch more."""
    return LAUNCH_CYCLES + 8 * parts * weights_of(problem) / target.bytes_per_cycle
