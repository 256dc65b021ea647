"""Direct convolution by its definition, one thread an output: the baseline for the other kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from leanconv.dtypes import GPU_LAYERS, INTEGER_LAYERS
from leanconv.kernels.common.layers import conv_arguments, conv_constants, limits
from leanconv.kernels.contract import Config, TimedAlgorithm, ceil_div
from leanconv.kernels.cost import Speeds
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class DirectConfig(Config):
    """Threads of a block."""

    threads: int = 256


#: Groups with more channels or filters than this have not been measured: there tiles share what this kernel reads
#: again and again.
FEW_CHANNELS = 4


@dataclass(frozen=True)
class DirectSpeeds(Speeds):
    """Fitted to 15 depthwise layers of 3x3 to 7x7 on an H200; farthest off for images of 7x7."""

    #: by layout, cycles of a multiprocessor for an output, for each of its taps, and for each pair of them: in NHWC
    #: neighbouring threads read their filters R * S elements apart, so that more taps need more lines of the L1
    cycles: Mapping[str, tuple[float, float, float]]
    #: layers with strides read more than they write: then the time is this much more than that of the memory
    slower_than_memory: float


class Direct(TimedAlgorithm):
    """One thread, one output. Slow, except where there is little to share: depthwise layers in NCHW and NHWC."""

    name = "direct"
    paper = "the baseline of S. Lu et al., im2win (2023)"
    precision = "ieee"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return limits(problem, "fprop", dtypes=(*GPU_LAYERS, *INTEGER_LAYERS))

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DirectConfig]]:
        if max(problem.group_c, problem.group_k) > FEW_CHANNELS:
            return [(inf, DirectConfig())]
        speeds = DirectSpeeds.of(target)
        fixed, each, pair = speeds.cycles[problem.layout]
        taps = problem.group_c * problem.r * problem.s
        outputs = problem.n * problem.k * problem.p * problem.q
        cycles = outputs * (fixed + each * taps + pair * taps * taps) / target.multiprocessors * 128 / target.fma_lanes
        return [(max(cycles, speeds.slower_than_memory * problem.bytes / target.bytes_per_cycle), DirectConfig())]

    def plan(self, problem: ConvProblem, config: DirectConfig, target: Target) -> Plan:
        outputs = problem.n * problem.k * problem.p * problem.q
        grid = ceil_div(outputs, config.threads)
        return Plan((self.launch(config, conv_constants(problem), conv_arguments(problem), grid),))
