"""Further peers: their answers where a CPU can give them, and their calls by fakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leanconv.bench import run_suite
from leanconv.bench.operands import Check, Operands, _picked
from leanconv.bench.peers import PEERS, Candidate, Unable, cudnn_graph
from leanconv.bench.peers.cvcuda import CvcudaPeer
from leanconv.bench.peers.others import CausalPeer, CompilePeer, FourierPeer
from leanconv.bench.suites import Case
from leanconv.images.borders import BORDERS, BorderName
from leanconv.problem import ConvProblem, Problem
from tests.cases import filter_problem

torch = pytest.importorskip("torch")
LAYER = ConvProblem(2, 4, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1))


class Tensors:
    """Operands as tensors in host memory."""

    def __init__(self, problem: Problem) -> None:
        self._held = Operands(problem, gpu=False)
        self.check = Check(self._held)
        if isinstance(problem, ConvProblem):
            self.bias = None if self._held.bias is None else torch.from_numpy(self._held.bias)
            self.scale, self.residual = None, lambda layout: None
        else:
            self.image, self.kernel = torch.from_numpy(self._held.image), torch.from_numpy(self._held.kernel)

    def x(self, layout: Any) -> Any:
        return torch.from_numpy(self._held.x(layout))

    def w(self, layout: Any) -> Any:
        return torch.from_numpy(self._held.w(layout))

    def output(self, layout: Any) -> Any:
        return torch.from_numpy(self._held.output(layout))

    def error(self, candidate: Candidate) -> float:
        return self.check.error(np.asarray(candidate.call()), candidate.layout)


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(2, 3, 5, 40, 4, 1, 17, padding=(0, 0, 16, 0), bias=True, activation="relu"),
        ConvProblem(2, 3, 20, 21, 4, 16, 3, padding=(1, 2, 0, 1)),
        ConvProblem(2, 3, 5, 40, 6, 1, 32, padding=(0, 0, 3, 1), groups=3),
    ],
    ids=str,
)
def test_fourier_transforms_give_the_layer(problem: ConvProblem) -> None:
    tensors: Any = Tensors(problem)
    (candidate,) = FourierPeer().candidates(problem, tensors, gpu=False)
    assert isinstance(candidate, Candidate) and tensors.error(candidate) < 2e-6


@pytest.mark.parametrize("border", BORDERS)
def test_fourier_transforms_give_the_filter(border: BorderName) -> None:
    problem = filter_problem(2, 31, 45, 5, 8, border=border)
    tensors: Any = Tensors(problem)
    (candidate,) = FourierPeer().candidates(problem, tensors, gpu=False)
    if border == "reflect":  # no border of PyTorch's
        assert isinstance(candidate, Unable)
    else:
        assert isinstance(candidate, Candidate) and tensors.error(candidate) < 2e-6
    (unable,) = FourierPeer().candidates(replace(problem, valid=True), tensors, gpu=False)
    assert isinstance(unable, Unable) and "planes" in unable.reason


def test_fourier_transforms_are_for_long_filters() -> None:
    (unable,) = FourierPeer().candidates(LAYER, None, gpu=False)  # type: ignore[arg-type]
    assert isinstance(unable, Unable) and "16 taps" in unable.reason


def test_mambas_kernels_run_causal_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: Any, weight: Any, bias: Any) -> Any:
        padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[1])

    monkeypatch.setitem(sys.modules, "causal_conv1d", SimpleNamespace(causal_conv1d_fn=fn))
    problem = ConvProblem(2, 8, 1, 20, 8, 1, 4, padding=(0, 0, 3, 0), groups=8, bias=True)
    tensors: Any = Tensors(problem)
    found = list(CausalPeer().candidates(problem, tensors, gpu=False))
    assert [each.layout for each in found if isinstance(each, Candidate)] == ["NCHW", "NHWC"]
    assert all(tensors.error(each) < 1e-6 for each in found)
    for other in (LAYER, replace(problem, padding=(0, 0, 0, 3)), replace(problem, s=5, padding=(0, 0, 4, 0))):
        assert isinstance(next(CausalPeer().candidates(other, tensors, gpu=False)), Unable)


def test_compiled_layers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda run, mode, dynamic: (modes.__iadd__([mode]), run)[1])
    monkeypatch.setattr("torch._dynamo.reset", lambda: None)
    problem = replace(LAYER, bias=True, activation="relu")
    tensors: Any = Tensors(problem)
    found: list[Any] = list(CompilePeer().candidates(problem, tensors, gpu=False))
    assert [each.engine for each in found[::2]] == [
        f"compile-{a}-{b}" for a in ("fp32", "tf32") for b in ("nchw", "nhwc")
    ]
    assert modes == ["default", "max-autotune-no-cudagraphs"] * 4 and {each.algorithm for each in found} == set(modes)
    assert all(tensors.error(each) < 1e-6 for each in found)


def test_a_peer_that_takes_long_runs_by_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(CompilePeer):
        needs_gpu = False

        def absent(self) -> None:
            return None

        def candidates(self, problem: Any, operands: Any, gpu: bool) -> Any:
            yield Unable("compile-fp32-nchw", "it ran")

    def run(*engines: str) -> Any:
        return run_suite(
            [Case("layer", LAYER)], device="cpu", quick=True, progress=False, peers=(Slow(),), engines=engines
        )

    assert "--engines compile-fp32-nchw asks for it" in run().absent["torch.compile"] and not run().skipped
    assert run("*").skipped and run("compile-*").skipped and not run("*").absent


def test_who_is_missing_is_named() -> None:
    done = run_suite([Case("layer", LAYER)], device="cpu", quick=True, seconds=0, progress=False)
    assert {"cutlass", "tensorrt", "causal_conv1d", "cudnn-graph", "torch.compile"} <= set(done.absent)
    assert len({engine for peer in PEERS for engine in peer.engines}) == sum(len(peer.engines) for peer in PEERS)


class FakeGraph:
    """The graph of nvidia-cudnn-frontend as the benchmark calls it; plans have a time, a workspace, and notes."""

    #: microseconds, bytes, and whether a plan is on tensor cores
    plans = ((9.0, 0, False), (1.0, 0, True), (5.0, 10**6, False), (7.0, 10**20, False), (8.0, 100, False))

    def __init__(self, **types: Any) -> None:
        self.types, self.barred = types, set[int]()
        self.calls: list[int] = []
        self.made: dict[str, Any] = {}
        self.state: list[str] = []

    def tensor(self, name: str, dim: list[int], stride: list[int], data_type: str) -> Any:
        self.made[name] = (dim, stride, data_type)
        return name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("conv_"):
            return lambda **given: self._convolution(name, given)
        if name in ("validate", "build_operation_graph", "create_execution_plans", "check_support"):
            return lambda *given: self.state.append(name)
        raise AttributeError(name)

    def _convolution(self, name: str, given: dict[str, Any]) -> Any:
        self.name, self.given, self.result = name, given, FakeResult()
        return self.result

    def deselect_numeric_notes(self, notes: list[str]) -> None:
        assert self.state[-1] == "create_execution_plans", "notes of plans that are not made yet are lost"
        self.barred = {i for i, plan in enumerate(self.plans) if plan[2]} if "TENSOR_CORE" in notes else set()

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def build_plan_at_index(self, number: int) -> None:
        if number in self.barred:
            raise RuntimeError("deselected")

    def get_workspace_size_plan_at_index(self, number: int) -> int:
        return self.plans[number][1]

    def execute_plan_at_index(self, tensors: Any, workspace: Any, number: int, handle: Any) -> None:
        assert workspace.numel() >= self.plans[number][1] and handle == "handle"
        self.calls.append(number)


class FakeResult:
    def __getattr__(self, name: str) -> Any:
        def keep(value: Any) -> FakeResult:
            vars(self)[f"kept_{name}"] = value
            return self

        return keep


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGraph]]:
    made: list[FakeGraph] = []

    class Names:
        def __getattr__(self, name: str) -> str:
            return name

    names = {key: Names() for key in ("data_type", "heur_mode", "numerical_note")}
    graph = lambda **types: made.__iadd__([FakeGraph(**types)])[-1]  # noqa: E731
    fake = SimpleNamespace(pygraph=graph, create_handle=lambda: "handle", __version__="1", **names)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    cudnn_graph._handle.cache_clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))

    def time_gpu(call: Any, budget_s: float) -> Any:
        call()
        return SimpleNamespace(median_us=FakeGraph.plans[made[-1].calls[-1]][0])

    monkeypatch.setattr(cudnn_graph, "time_gpu", time_gpu)
    yield made
    cudnn_graph._handle.cache_clear()


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_the_fastest_plan_of_cudnns_graphs_is_taken_without_tf32(op: Any, graphs: list[FakeGraph]) -> None:
    problem = replace(LAYER, op=op, padding=(1, 0, 2, 1), stride=(2, 1))
    tensors: Any = Tensors(problem)
    found: list[Any] = list(cudnn_graph.CudnnGraphPeer().candidates(problem, tensors, gpu=True))
    assert [(each.engine, each.algorithm, each.workspace_bytes) for each in found] == [
        ("cudnn-graph:fp32-nchw", "plan 2", 10**6), ("cudnn-graph:fp32-lean-nchw", "plan 4", 100),
        ("cudnn-graph:fp32-nhwc", "plan 2", 10**6), ("cudnn-graph:fp32-lean-nhwc", "plan 4", 100),
    ]  # fmt: skip
    assert {each.engine for each in found} <= set(cudnn_graph.CudnnGraphPeer.engines)
    graph = graphs[1]
    assert graph.name == f"conv_{op}" and graph.types["compute_data_type"] == "FLOAT"
    assert graph.given["pre_padding"] == [1, 2] and graph.given["post_padding"] == [0, 1]
    plain = replace(problem, layout="NCHW")
    shapes = [list(operand.shape) for operand in plain.operands]
    assert [graph.made[name][0] for name in ("first", "second")] == shapes[:2] and graph.result.kept_set_dim == shapes[
        -1
    ]
    assert graph.made["first"][1][1] == 1, "channels are neighbours in NHWC"
    y = found[2].call()
    assert graph.calls[-1] == 2 and list(y.shape) == list(replace(problem, layout="NHWC").operands[-1].shape)
    assert y.data_ptr() == found[2].out.data_ptr() and y.is_contiguous()


def test_16_bit_graphs_may_use_tensor_cores_and_a_refusal_is_listed(
    graphs: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(LAYER, dtype="float16")
    found: list[Any] = list(cudnn_graph.CudnnGraphPeer().candidates(problem, Tensors(problem), gpu=True))  # type: ignore[arg-type]
    assert [(each.engine, each.algorithm) for each in found] == [
        ("cudnn-graph:float16-nchw", "plan 1"), ("cudnn-graph:float16-nhwc", "plan 1"),
    ]  # fmt: skip
    monkeypatch.setattr(FakeGraph, "get_execution_plan_count", lambda self: 1 // 0)
    found = list(cudnn_graph.CudnnGraphPeer().candidates(problem, Tensors(problem), gpu=True))  # type: ignore[arg-type]
    assert [type(each) for each in found] == [Unable, Unable] and "ZeroDivisionError" in found[0].reason


def test_images_of_uint16_are_picked_where_pytorch_cannot() -> None:
    """On a GPU PyTorch indexes no uint16: the values come as int32, and none becomes negative."""
    images = torch.tensor([[1, 65535], [40000, 7]], dtype=torch.uint16)
    assert _picked(images, np.array([1, 0])).tolist() == [[40000, 7], [1, 65535]]


class FakeCvcuda:
    """As much of CV-CUDA as the benchmark calls; its filters note what they are given, and write the answer's place."""

    class Border:
        CONSTANT, REPLICATE, REFLECT, REFLECT101, WRAP = "CONSTANT", "REPLICATE", "REFLECT", "REFLECT101", "WRAP"

    class MorphologyType:
        ERODE, DILATE = "ERODE", "DILATE"

    class ImageBatchVarShape(list[Any]):
        def __init__(self, capacity: int) -> None:
            self.capacity = capacity

        def pushback(self, image: Any) -> None:
            self.append(image)
            assert len(self) <= self.capacity

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def as_image(self, tensor: Any) -> Any:
        return tensor

    def as_tensor(self, tensor: Any, layout: str) -> Any:
        return tensor

    def as_stream(self, stream: Any) -> Any:
        return stream

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_into"):
            raise AttributeError(name)
        return lambda target, source, *given, **named: self.calls.append((name, target, source, *given, named))


@pytest.mark.parametrize(
    ("given", "name", "call"),
    [
        ({}, "conv2d", "conv2d_into"),
        ({"reduction": "sum"}, "averageblur", "averageblur_into"),
        ({"reduction": "min"}, "morphology", "morphology_into"),
        ({"reduction": "max"}, "morphology", "morphology_into"),
        ({"reduction": "median", "border": "replicate"}, "median_blur", "median_blur_into"),
    ],
    ids=lambda each: each if isinstance(each, str) else str(each.get("reduction", "weights")),
)
def test_cv_cuda_is_given_images_as_it_takes_them(
    given: dict[str, Any], name: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCvcuda()
    monkeypatch.setitem(sys.modules, "cvcuda", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    kh = 5 if name == "median_blur" else 3
    problem = filter_problem(2, 8, 9, kh, 5, **{"border": "reflect101", **given})
    tensors: Any = Tensors(problem)
    tensors.output = lambda: torch.zeros(problem.batch, problem.h, problem.w)
    (found,) = CvcudaPeer().candidates(problem, tensors, gpu=True)
    assert isinstance(found, Candidate) and (found.engine, found.algorithm) == ("cvcuda", name)
    assert found.call() is found.out
    ((called, target, source, *rest, named),) = fake.calls
    assert called == call and named["stream"] == "the stream"
    assert [each.data_ptr() for each in (target[0], source[0])] == [found.out.data_ptr(), tensors.image.data_ptr()]
    assert [tuple(each.shape) for each in (*target, *source)] == [(8, 9, 1)] * 4
    if name == "conv2d":
        kernels, anchors, border = rest
        assert [tuple(each.shape) for each in kernels] == [(3, 5, 1)] * 2
        assert torch.equal(kernels[1][..., 0], tensors.kernel)
        assert anchors.tolist() == [[2, 1]] * 2 and border == "REFLECT101"
    elif name == "median_blur":
        assert rest == [(5, 5)]
    elif name == "averageblur":
        assert rest == [(5, 3), (2, 1), "REFLECT101"]
    else:
        kind = {"min": "ERODE", "max": "DILATE"}[given["reduction"]]
        assert rest == [kind, (5, 3), (2, 1)] and named["border"] == "REFLECT101"


def test_what_cv_cuda_does_not_take_is_said() -> None:
    for other in ({"channels": 2}, {"dtype": "float64"}, {"reduction": "median", "border": "constant"}):
        problem = filter_problem(1, 8, 9, 3, 3, **other)
        (unable,) = CvcudaPeer().candidates(problem, Tensors(problem), gpu=True)  # type: ignore[arg-type]
        assert isinstance(unable, Unable), other
