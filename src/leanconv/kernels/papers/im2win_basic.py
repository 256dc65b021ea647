"""The im2win paper's Algorithm 2: one thread an output over the im2win tensor; the "before" of its fast kernel."""

from __future__ import annotations

from collections.abc import Iterator

from leanconv.kernels.common.layers import conv_arguments
from leanconv.kernels.contract import ceil_div
from leanconv.kernels.direct.direct import DirectConfig
from leanconv.kernels.papers.im2win import WindowTensor, transform, window_constants
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


class Im2winBasic(WindowTensor):
    """One thread, one output over the im2win tensor; slow."""

    name = "im2win_basic"

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[DirectConfig]:
        yield DirectConfig()

    def plan(self, problem: ConvProblem, config: DirectConfig, target: Target) -> Plan:
        grid = ceil_div(problem.n * problem.k * problem.p * problem.q, config.threads)
        product = self.launch(config, window_constants(problem), conv_arguments(problem, "workspace"), grid)
        return Plan((transform(problem), product), self.workspace_bytes(problem, config))
