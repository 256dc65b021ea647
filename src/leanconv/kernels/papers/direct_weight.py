"""Gradient of the filters by its definition, one warp a weight: for every layer of images, to compare others with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.dtypes import GPU_LAYERS
from leanconv.kernels.common.layers import conv_constants, gradient_arguments, limits
from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class DirectWeightConfig(Config):
    """Threads of a block."""

    threads: int = 256


class DirectWeight(GpuAlgorithm):
    """One warp, one weight, everything from global memory: images of every shape, layout and element type. Slow."""

    name = "direct_weight"
    paper = "the definition of the gradient"
    precision = "ieee"
    by_name_only = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return limits(problem, "wgrad", dtypes=GPU_LAYERS)

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[DirectWeightConfig]:
        yield DirectWeightConfig()

    def plan(self, problem: ConvProblem, config: DirectWeightConfig, target: Target) -> Plan:
        weights = problem.k * problem.group_c * problem.r * problem.s
        grid = ceil_div(weights, config.threads // 32)
        return Plan((self.launch(config, conv_constants(problem), gradient_arguments(problem), grid),))
