"""Direct convolution by its definition, one thread an output: the baseline for the other kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.algorithms.base import Config, GpuAlgorithm, ceil_div, conv_constants
from leanconv.algorithms.tiles import conv_arguments, forward_limits
from leanconv.dtypes import GPU_LAYERS
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class DirectConfig(Config):
    """Threads of a block."""

    threads: int = 256


class Direct(GpuAlgorithm):
    """One thread, one output, everything from global memory; every shape and element type, no workspace, slow."""

    name = "direct"
    paper = "the baseline of S. Lu et al., im2win (2023)"
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return forward_limits(problem, GPU_LAYERS)

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[DirectConfig]:
        yield DirectConfig()

    def plan(self, problem: ConvProblem, config: DirectConfig, target: Target) -> Plan:
        outputs = problem.n * problem.k * problem.p * problem.q
        launch = Launch(
            header="direct.cuh",
            function="leanconv::direct",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=ceil_div(outputs, config.threads),
            block=config.threads,
        )
        return Plan((launch,))
