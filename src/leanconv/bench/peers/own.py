"""leanconv's own algorithms: on the GPU those of the registry, without one those that run on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from leanconv.algorithms.base import Algorithm, GpuAlgorithm
from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.problem import ConvProblem, FilterProblem, Problem


class LeanconvPeer(Peer):
    """Every algorithm that can run the problem, each with the configuration that a user's call gets."""

    name = "leanconv"
    engines = ("leanconv",)
    solves = (ConvProblem, FilterProblem)
    needs_gpu = False

    def absent(self) -> str | None:
        return None

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        from leanconv import registry

        algorithms: Sequence[Algorithm] = registry.ALGORITHMS if gpu else registry.CPU_ALGORITHMS
        for algorithm in algorithms:
            if not isinstance(problem, algorithm.solves):
                continue
            reasons = algorithm.reasons(problem)
            if reasons:
                yield Unable(f"leanconv {algorithm.name}", "; ".join(reasons))
                continue
            if isinstance(algorithm, GpuAlgorithm):
                yield _on_gpu(algorithm, problem, operands)
            else:
                layout = getattr(problem, "layout", "")
                y = operands.output(layout)
                call = _call(problem, operands, algorithm.name, y)
                yield Candidate("leanconv", algorithm.name, call, layout, None, out=y, on_gpu=False, note="CPU")
            if isinstance(problem, FilterProblem):
                return  # filter2d takes the first that can run, and has no name to choose another by


def _on_gpu(algorithm: GpuAlgorithm, problem: Problem, operands: Operands) -> Candidate:
    from leanconv.runtime.launch import open_device

    device = open_device(0)
    config = next(iter(algorithm.configs(problem, device.target)))
    plan = algorithm.plan(problem, config, device.target)
    compiled = device.compiled(plan)
    layout = getattr(problem, "layout", "")
    y = operands.output(layout)
    return Candidate(
        "leanconv",
        algorithm.name,
        _call(problem, operands, algorithm.name, y),
        layout,
        plan.workspace_bytes,
        out=y,
        registers=max(code.registers for code in compiled),
        spill_bytes=max(code.spill_bytes for code in compiled),
    )


def _call(problem: Problem, operands: Operands, algorithm: str, y: Any) -> Any:
    import leanconv

    if isinstance(problem, ConvProblem):
        x, w = operands.x(problem.layout), operands.w(problem.layout)
        return lambda: leanconv.conv2d(
            x,
            w,
            operands.bias,
            problem.stride,
            problem.padding,
            problem.dilation,
            problem.groups,
            layout=problem.layout,
            algorithm=algorithm,
            precision=problem.precision,
            activation=problem.activation,
            out=y,
        )
    image, kernel = operands.image, operands.kernel
    return lambda: leanconv.filter2d(image, kernel, border=problem.border, anchor=problem.anchor, out=y)
