"""leanconv's own algorithms: on the GPU those of the registry, without one those that run on NumPy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from leanconv.algorithms.base import Algorithm, CpuAlgorithm, GpuAlgorithm
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
                call = _call(problem, operands, algorithm, operands.output(layout))
                yield Candidate("leanconv", algorithm.name, call, layout, None, on_gpu=False, note="CPU")


def _on_gpu(algorithm: GpuAlgorithm, problem: Problem, operands: Operands) -> Candidate:
    from leanconv.calls import ready

    call = ready(problem, 0, algorithm.name)
    compiled = call.device.compiled(call.plan)
    layout = getattr(problem, "layout", "")
    y = operands.output(layout)
    return Candidate(
        "leanconv",
        algorithm.name,
        _call(problem, operands, algorithm, y),
        layout,
        call.plan.workspace_bytes,
        out=y,
        registers=max(code.registers for code in compiled),
        spill_bytes=sum(code.spill_bytes for code in compiled),
    )


def _call(problem: Problem, operands: Operands, algorithm: Algorithm, y: Any) -> Any:
    import leanconv
    from leanconv import registry

    if isinstance(problem, ConvProblem):
        x, w, out = operands.x(problem.layout), operands.w(problem.layout), y
        if operands.gpu and problem.layout == "NHWC":
            # PyTorch tensors have the shape of NCHW whatever their memory format
            x, w, out = (array.permute(0, 3, 1, 2) for array in (x, w, y))

        def call() -> Any:
            leanconv.conv2d(
                x,
                w,
                operands.bias,
                problem.stride,
                problem.padding,
                problem.dilation,
                problem.groups,
                layout=problem.layout,
                algorithm=algorithm.name,
                precision=problem.precision,
                activation=problem.activation,
                out=out,
            )
            return y

        return call
    image, kernel = operands.image, operands.kernel
    if isinstance(algorithm, CpuAlgorithm):
        # filter2d chooses by itself and takes no name
        return lambda: algorithm.run(problem, image, kernel)
    assert algorithm is registry.choose(problem, "auto", registry.ALGORITHMS), "filter2d runs another algorithm"
    return lambda: leanconv.filter2d(image, kernel, border=problem.border, anchor=problem.anchor, out=y)
