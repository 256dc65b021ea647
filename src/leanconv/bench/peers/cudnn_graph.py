"""cuDNN's graph API through NVIDIA's wheel nvidia-cudnn-frontend: every plan that its heuristics name, timed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from leanconv.bench.operands import Operands, as_nchw
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_cuda_torch, missing_module
from leanconv.bench.results import PEER_LAYOUTS, TABLE_BYTES
from leanconv.dtypes import is_integer, is_narrow
from leanconv.options import Layout
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime.timing import time_gpu

#: Plans that are timed, first those that the heuristics rank first; seconds of samples for each.
_MOST_PLANS, _BUDGET_S = 16, 0.005
_TYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
#: The notes of engines that are less than float32: on tensor cores, which have TF32 at most, or with smaller operands.
_LOOSE = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION")


@cache
def _handle() -> Any:
    import cudnn

    return cudnn.create_handle()


class CudnnGraphPeer(Peer):
    """A graph of one convolution: the fastest plan of heuristics A and B, and the fastest without a workspace.

    In float32 plans on tensor cores are left out, which round to TF32; sums are float32 in every type.
    """

    name = "cudnn-graph"
    engines = tuple(
        f"cudnn-graph:{dtype}{lean}-{layout.lower()}"
        for dtype in ("fp32", "float16", "bfloat16")
        for lean in ("", "-lean")
        for layout in PEER_LAYOUTS
    )
    solves = ("conv2d",)
    needs_gpu = True
    module = "cudnn"

    def absent(self) -> str | None:
        return missing_cuda_torch() or missing_module("cudnn")

    def versions(self) -> dict[str, str]:
        import cudnn

        return {"cudnn-frontend": str(cudnn.__version__)}

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "conv2d"
        if problem.bias or problem.plain != problem or is_integer(problem.dtype):
            yield Unable(self.name, "called for plain floating-point layers: no bias, no activation")
            return
        kind = problem.dtype if is_narrow(problem.dtype) else "fp32"
        for layout in PEER_LAYOUTS:
            engine = f"{self.name}:{kind}-{layout.lower()}"
            try:
                graph, tensors = _graph(problem, operands, layout)
                plans = _timed(graph, tensors)
            except Exception as error:  # one layout that cuDNN refuses must not cost the other
                yield Unable(engine, f"{type(error).__name__}: {error}"[:2000])
                continue
            if not plans:
                yield Unable(engine, "no plan runs it within the free memory")
                continue
            fastest = min(plans, key=lambda plan: plan[0])
            lean = min((plan for plan in plans if plan[1] <= TABLE_BYTES), key=lambda plan: plan[0], default=fastest)
            note = f"fastest of {len(plans)} plans"
            yield _candidate(engine, graph, tensors, layout, fastest, note)
            if lean != fastest:
                engine = f"{self.name}:{kind}-lean-{layout.lower()}"
                yield _candidate(engine, graph, tensors, layout, lean, f"{note}, without a workspace")
            del graph, tensors


def _graph(problem: ConvProblem, operands: Operands, layout: Layout) -> tuple[Any, dict[Any, Any]]:
    """A graph with its plans made, and its tensors with the arrays that they are; the output is the last."""
    import cudnn

    first, second, y = (as_nchw(a, layout) for a in (operands.x(layout), operands.w(layout), operands.output(layout)))
    io, single = getattr(cudnn.data_type, _TYPES[problem.dtype]), cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=io, intermediate_data_type=single, compute_data_type=single, handle=_handle()
    )  # fmt: skip
    inputs = [
        graph.tensor(name=name, dim=list(array.shape), stride=list(array.stride()), data_type=io)
        for name, array in (("first", first), ("second", second))
    ]
    top, bottom, left, right = problem.padding
    how = {
        "pre_padding": [top, left], "post_padding": [bottom, right], "stride": list(problem.stride),
        "dilation": list(problem.dilation), "compute_data_type": single,
    }  # fmt: skip
    names = {"fprop": ("image", "weight"), "dgrad": ("loss", "filter"), "wgrad": ("image", "loss")}[problem.op]
    result = getattr(graph, f"conv_{problem.op}")(**dict(zip(names, inputs, strict=True)), **how)
    result.set_output(True).set_data_type(io).set_dim(list(y.shape)).set_stride(list(y.stride()))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B])
    if problem.dtype == "float32":
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, name) for name in _LOOSE])
    graph.check_support()
    return graph, {inputs[0]: first, inputs[1]: second, result: y}


def _timed(graph: Any, tensors: dict[Any, Any]) -> list[tuple[float, int, int]]:
    """Microseconds, bytes of workspace and the number of each plan that runs."""
    import torch

    found: list[tuple[float, int, int]] = []
    for number in range(graph.get_execution_plan_count()):
        if len(found) == _MOST_PLANS:
            break
        try:
            graph.build_plan_at_index(number)
            size = int(graph.get_workspace_size_plan_at_index(number))
            if size > 0.7 * torch.cuda.mem_get_info()[0]:
                continue
            us = time_gpu(_call(graph, tensors, number, size), budget_s=_BUDGET_S).median_us
        except Exception:  # a plan that was deselected, or that this GPU lacks; the others count
            continue
        found.append((us, size, number))
    return found


def _call(graph: Any, tensors: dict[Any, Any], number: int, size: int) -> Any:
    import torch

    workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=next(iter(tensors.values())).device)
    handle, y = _handle(), [*tensors.values()][-1]

    def call() -> Any:
        graph.execute_plan_at_index(tensors, workspace, number, handle)
        return y

    return call


def _candidate(
    engine: str, graph: Any, tensors: dict[Any, Any], layout: Layout, plan: tuple[float, int, int], note: str
) -> Candidate:
    _, size, number = plan
    run, y = _call(graph, tensors, number, size), [*tensors.values()][-1]
    out = y if layout == "NCHW" else y.permute(0, 2, 3, 1)

    def call() -> Any:
        run()
        return out

    return Candidate(engine, f"plan {number}", call, layout, size, out=out, note=note)
