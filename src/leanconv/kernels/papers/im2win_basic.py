"""The im2win paper's Algorithm 2: one thread an output over the im2win tensor; the "before" of its fast kernel."""

from __future__ import annotations

from collections.abc import Iterator

from leanconv.kernels.common.layers import conv_arguments
from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div
from leanconv.kernels.cost import fma_cycles
from leanconv.kernels.direct.direct import DirectConfig
from leanconv.kernels.papers.im2win import tensor_elements, tensor_limits, transform, window_constants
from leanconv.kernels.simt.im2win_fused import PAPER
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


class Im2winBasic(GpuAlgorithm):
    """One thread, one output over the im2win tensor; every shape; the workspace is the tensor; slow."""

    name = "im2win_basic"
    paper = PAPER
    precision = "ieee"
    by_name_only = True

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return tensor_limits(problem)

    def workspace_bytes(self, problem: ConvProblem, config: Config) -> int:
        return 4 * tensor_elements(problem)

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[DirectConfig]:
        yield DirectConfig()

    def plan(self, problem: ConvProblem, config: DirectConfig, target: Target) -> Plan:
        grid = ceil_div(problem.n * problem.k * problem.p * problem.q, config.threads)
        product = self.launch(config, window_constants(problem), conv_arguments(problem, "workspace"), grid)
        return Plan((transform(problem), product), self.workspace_bytes(problem, config))
