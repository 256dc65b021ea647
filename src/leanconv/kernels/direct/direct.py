"""Direct convolution by its definition, one thread an output: the baseline for the other kernels."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from leanconv.dtypes import GPU_LAYERS, INTEGER_LAYERS
from leanconv.kernels.contract import Config, TimedAlgorithm, ceil_div, conv_constants
from leanconv.kernels.simt.tiles import conv_arguments, forward_limits
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class DirectConfig(Config):
    """Threads of a block."""

    threads: int = 256


#: Cycles of a multiprocessor for an output, for each of its taps, and for each pair of them, by layout (measured on an
#: H200 with 15 depthwise layers of 3x3 to 7x7: within 1.2 but for images of 7x7). In NHWC neighbouring threads read
#: their filters R * S elements apart, so that more taps need more lines of the L1.
CYCLES = {"NCHW": (0.45, 0.067, 0.0), "NHWC": (0.0, 0.103, 0.0037), "CHWN": (1.5, 0.141, 0.0)}
#: Layers with strides read more than they write: then the time is this much more than that of the memory.
SLOWER_THAN_MEMORY = 1.4
#: Groups with more channels or filters than this have not been measured: there tiles share what this kernel reads
#: again and again.
FEW_CHANNELS = 4


class Direct(TimedAlgorithm):
    """One thread, one output, everything from global memory: every shape and element type, no workspace.

    Slow, except where there is little to share: depthwise layers in NCHW and NHWC.
    """

    name = "direct"
    paper = "the baseline of S. Lu et al., im2win (2023)"
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return forward_limits(problem, (*GPU_LAYERS, *INTEGER_LAYERS))

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DirectConfig]]:
        if max(problem.group_c, problem.group_k) > FEW_CHANNELS:
            return [(inf, DirectConfig())]
        fixed, each, pair = CYCLES[problem.layout]
        taps = problem.group_c * problem.r * problem.s
        outputs = problem.n * problem.k * problem.p * problem.q
        cycles = outputs * (fixed + each * taps + pair * taps * taps) / target.multiprocessors * 128 / target.fma_lanes
        return [(max(cycles, SLOWER_THAN_MEMORY * problem.bytes / target.bytes_per_cycle), DirectConfig())]

    def plan(self, problem: ConvProblem, config: DirectConfig, target: Target) -> Plan:
        outputs = problem.n * problem.k * problem.p * problem.q
        launch = Launch(
            header="kernels/direct/direct.cuh",
            function="leanconv::direct",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=ceil_div(outputs, config.threads),
            block=config.threads,
        )
        return Plan((launch,))
