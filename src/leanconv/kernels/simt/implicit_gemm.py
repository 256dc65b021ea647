"""Implicit GEMM: convolution as a matrix product whose im2col matrix exists only in shared memory."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from leanconv.dtypes import GPU_LAYERS, is_narrow
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, convolutions_of
from leanconv.kernels.common.layers import OutputView, conv_arguments, has_wide_tensors, limits, view_constants
from leanconv.kernels.contract import TimedAlgorithm, by_time
from leanconv.kernels.cost import fma_cycles
from leanconv.kernels.simt.tiles import TileConfig, cost, decodes_taps, tile_launch, tiles, with_splits
from leanconv.plan import Constants, Launch, Plan, Target
from leanconv.problem import ConvProblem

#: How much longer a call takes in 16 bits, which pass registers. Explored (H200, e507758b): 1.15 to 1.53, four layers.
NARROW = 1.25


def table_bytes(problem: ConvProblem, config: TileConfig, constants: Constants) -> int:
    """Shared memory of the table of filter taps, which kernels have but in NHWC; ``constants`` are the kernel's."""
    if problem.layout == "NHWC" or decodes_taps(problem):
        return 0
    known = dict(constants)
    entry = (8 if known["wide"] else 4) + (4 if known["padded"] else 0)
    return entry * lcm(problem.taps, config.tile_reduction)


def shared_bytes(problem: ConvProblem, config: TileConfig, constants: Constants | None = None) -> int:
    """Shared memory of a block: the stages of both operands, and the table of filter taps.

    ``constants`` are the kernel's, where its outputs do not lie side by side.
    """
    table = table_bytes(problem, config, constants or view_constants(problem))
    return config.shared_bytes(config.tile_reduction * (config.tile_pixels + 4), table)


def _timed(convolutions: list[PartialConvolution], wide: bool, target: Target) -> list[tuple[float, TileConfig]]:
    """The configurations that all of them can have, with their predicted time in clock cycles, the quickest first."""
    reduction = min(each.reduction for each in convolutions)
    known = [(each, view_constants(each.problem, each.view, wide)) for each in convolutions]
    choices = []
    first = convolutions[0].problem
    for config, speed in with_splits(first, tiles(first, target, wide=wide), reduction, target):
        if all(shared_bytes(each.problem, config, c) <= target.shared_per_block for each, c in known):
            time = sum(
                cost(each.problem, each.pixels * each.phases, each.reduction, config, speed, target)
                for each in convolutions
            )
            choices.append((NARROW * time if is_narrow(first.dtype) else time, config))
    return by_time(choices)


def _launch(problem: ConvProblem, part: PartialConvolution, config: TileConfig, wide: bool, filters: str) -> Launch:
    constants = view_constants(part.problem, part.view, wide)
    shared = shared_bytes(part.problem, config, constants)
    arguments = conv_arguments(problem, filters=filters)
    gemm = ImplicitGemm()
    return tile_launch(gemm, constants, config, part.problem, part.pixels, shared, arguments, part.phases)


def _segment(problem: ConvProblem, first_q: int, count: int, first_weight: int = 0) -> PartialConvolution:
    """The convolution of some columns of the output of ``problem``, and their place in it."""
    whole = problem.as_forward() if problem.op == "dgrad" else problem
    top, bottom, left, _ = whole.padding
    left -= first_q * whole.stride[1]
    right = (count - 1) * whole.stride[1] + (whole.s - 1) * whole.dilation[1] + 1 - whole.w - left
    segment = replace(whole, padding=(top, bottom, left, right))
    return PartialConvolution(
        segment, OutputView(whole.p, whole.q, first_q=first_q, first_weight=first_weight, out_d=whole.z)
    )


def segment_cycles(problem: ConvProblem, first_q: int, count: int, target: Target) -> float:
    return _timed([_segment(problem, first_q, count)], has_wide_tensors(problem), target)[0][0]


def segment_launch(problem: ConvProblem, first_q: int, count: int, target: Target, first_weight: int = 0) -> Launch:
    """The launch that computes columns ``first_q`` to ``first_q + count`` of the output, and writes no others.

    ``problem`` is the whole layer. For a gradient, which must have unit stride, they are columns of the gradient of the
    input, and the filters are those that `input_gradient.filter_launch` writes, from element ``first_weight`` of the
    packed weights on.
    """
    part, wide = _segment(problem, first_q, count, first_weight), has_wide_tensors(problem)
    _, config = _timed([part], wide, target)[0]
    return _launch(problem, part, config, wide, "prepared" if problem.op == "dgrad" else "w")


class ImplicitGemm(TimedAlgorithm):
    """Direct convolution and its input's gradient, FP32 FMAs, no workspace; every shape and element type."""

    name = "implicit_gemm"
    paper = "S. Lu et al., im2win (2023), Algorithm 1; S. Chetlur et al., cuDNN (2014)"
    precision = "ieee"
    volumes = True
    writes_phases = True

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return limits(problem, "fprop", "dgrad", dtypes=GPU_LAYERS)

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return input_gradient.prepared_bytes(problem) if problem.op == "dgrad" else 0

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TileConfig]]:
        convolutions = convolutions_of(problem)
        # A layer whose windows see nothing but padding has a gradient of zeros, and nothing to tune.
        return _timed(convolutions, has_wide_tensors(problem), target) if convolutions else [(0.0, TileConfig())]

    def plan(self, problem: ConvProblem, config: TileConfig, target: Target) -> Plan:
        wide = has_wide_tensors(problem)
        if problem.op == "fprop":
            return Plan((_launch(problem, convolutions_of(problem)[0], config, wide, "w"),))
        launches = [_launch(problem, each, config, wide, "prepared") for each in convolutions_of(problem)]
        # pixels that no output reaches get zeros, or stay as they are where the result is added to them
        return Plan(
            (*launches, *input_gradient.zero_launches(problem)),
            prepare=(input_gradient.filter_launch(problem),) if launches else (),
            prepared_bytes=self.prepared_bytes(problem),
        )
