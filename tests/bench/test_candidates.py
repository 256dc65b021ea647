"""What takes part in the benchmark, called in the layout of the problem: leanconv's own algorithms and PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leanconv.bench import run_suite
from leanconv.bench.operands import Check, Operands
from leanconv.bench.peers import Candidate, LeanconvPeer
from leanconv.bench.suites import LAYOUTS, Case
from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.kernels import ALGORITHMS
from leanconv.problem import ConvProblem
from tests.cases import filter_problem
from tests.cli.test_bench_runs import TINY
from tests.stand_ins import HostDevice


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_algorithms_run_in_the_layout_of_the_problem(layout: Any) -> None:

    case = Case("layer", ConvProblem(3, 4, 9, 10, 6, 3, 3, padding=(1, 0, 2, 1), layout=layout, activation="relu"))
    results = run_suite([case], engines=("leanconv",), device="cpu", quick=True, progress=False)
    assert {row.algorithm for row in results.rows} == {
        a.name for a in CPU_ALGORITHMS if not a.reasons(case.problem, None)
    }
    assert len(results.rows) >= 3 and not results.failed
    assert all(row.error is not None and row.error < 5e-6 for row in results.rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pytorch_on_the_cpu_runs_in_a_layout_that_it_has(layout: Any) -> None:
    pytest.importorskip("torch")
    case = Case("layer", ConvProblem(3, 4, 9, 10, 6, 3, 3, padding=(1, 0, 2, 1), layout=layout, activation="relu"))
    results = run_suite([case], engines=("torch-cpu",), device="cpu", quick=True, progress=False)
    (row,) = results.rows
    assert row.error is not None and row.error < 1e-6 and not results.failed
    assert row.note.endswith("threads, NCHW" if layout == "CHWN" else "threads")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_unrolled_image_is_that_of_the_layout(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from leanconv.bench.peers.torch_peer import Im2colPeer

    problem = ConvProblem(3, 4, 9, 10, 6, 3, 2, (2, 1), (1, 0, 2, 1), (1, 2), layout=layout)
    operands = Operands(problem, gpu=False)
    check = Check(operands)

    class Tensors(Operands):
        def x(self, layout: Any) -> Any:
            return torch.from_numpy(operands.x(layout))

        def w(self, layout: Any) -> Any:
            return torch.from_numpy(operands.w(layout))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))
    (candidate,) = Im2colPeer().candidates(problem, Tensors(problem, gpu=False), gpu=False)
    assert isinstance(candidate, Candidate) and candidate.layout == layout
    y = candidate.call()
    assert y.shape == problem.y_shape and check.error(y.numpy(), candidate.layout) < 1e-6


def test_tensors_of_our_own_calls_have_the_shape_of_nchw(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import leanconv
    from leanconv.bench.peers import own

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(leanconv, "conv2d", lambda x, w, *rest, **named: seen.append({"x": x, "w": w} | named))
    (algorithm, *_) = (a for a in LeanconvPeer()._algorithms(gpu=True) if a.stem == "implicit_gemm")
    for layout, order in (("NCHW", (0, 1, 2, 3)), ("NHWC", (0, 2, 3, 1)), ("CHWN", (1, 2, 3, 0))):
        problem = ConvProblem(3, 4, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1), layout=layout)  # type: ignore[arg-type]
        held = Operands(problem, gpu=False)
        there = SimpleNamespace(
            problem=problem,
            gpu=True,
            bias=None,
            scale=None,
            residual=lambda layout: None,
            x=lambda layout, held=held: torch.from_numpy(held.x(layout)),
            w=lambda layout, held=held: torch.from_numpy(held.w(layout)),
        )
        y = torch.empty(problem.y_shape)
        assert own._call(problem, there, algorithm, y)() is y  # type: ignore[arg-type]
        call = seen.pop()
        assert call["layout"] == layout
        for array, plain in ((call["x"], held.x("NCHW")), (call["w"], held.w("NCHW"))):
            assert array.permute(order).is_contiguous() and np.array_equal(array.numpy(), plain)
        assert call["out"].shape == (3, 6, 9, 10) and call["out"].permute(order).is_contiguous()


def test_kernels_are_compiled_ahead(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    from leanconv.bench.peers import own
    from leanconv.runtime import cache, launch
    from tests import cases

    class Described:
        target = cases.TARGETS[0]

    monkeypatch.setenv("LEANCONV_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LEANCONV_NO_CACHE", raising=False)
    monkeypatch.setattr(launch, "open_device", lambda index: Described)
    problems = [case.problem for case in TINY]
    own.LeanconvPeer(picked_alone=True).prepare(problems, gpu=True)
    picked = len(list((tmp_path / "kernels").iterdir()))
    assert picked == 2
    own.LeanconvPeer(("implicit_gemm", "register_cache")).prepare(problems, gpu=True)
    plans = list(own._plans([a for a in ALGORITHMS if a.name == "implicit_gemm"], problems))
    assert len(plans) == 1, "an algorithm is asked for what it solves"
    assert cache.load(cache.key(plans[0].launches[0], Described.target.arch)) is not None
    assert len(list((tmp_path / "kernels").iterdir())) == 3, "and what a call picks"
    broken = replace(plans[0], launches=(replace(plans[0].launches[0], function="no_such_function"),))
    own.compile_ahead([broken])

    def refuse(*arguments: Any) -> Any:
        raise AssertionError("no plan for this")

    monkeypatch.setattr(type(ALGORITHMS[0]), "plan", refuse)
    assert list(own._plans(ALGORITHMS[:1], problems)) == [], "what fails says so when it is timed"
    monkeypatch.setenv("LEANCONV_NO_CACHE", "1")
    monkeypatch.setattr(launch, "open_device", None)
    own.compile_ahead(plans)
    assert len(list((tmp_path / "kernels").iterdir())) == 3


def test_filters_prepared_before_are_a_candidate_of_their_own(monkeypatch: Any) -> None:
    from leanconv.bench.peers import own
    from leanconv.call import bind
    from leanconv.kernels.simt.winograd2d import Winograd2dConfig
    from tests import cases

    problem = TINY[0].problem
    (algorithm,) = (a for a in ALGORITHMS if a.stem == "implicit_gemm")
    plain = algorithm.plan(problem, next(iter(algorithm.configs(problem, cases.TARGETS[0]))), cases.TARGETS[0])
    preparing = replace(plain, prepare=plain.launches, prepared_bytes=640)
    code, config = SimpleNamespace(registers=40, spill_bytes=3), Winograd2dConfig(states=36)
    for plan, expected in ((plain, [("leanconv", False, 0)]), (preparing, [
        ("leanconv", False, 640), ("leanconv:prepared", True, 640),
    ])):  # fmt: skip
        device = SimpleNamespace(compiled=lambda plan: [code] * len(plan.every_launch))
        found = SimpleNamespace(
            problem=problem, plan=plan, device=device, choice=SimpleNamespace(algorithm=algorithm, config=config)
        )
        monkeypatch.setattr(bind, "load", lambda *arguments, found=found, **options: found)
        monkeypatch.setattr(own, "_call", lambda *arguments, prepared=False: prepared)
        candidates = list(own._on_gpu(algorithm, problem, Operands(problem, gpu=False)))
        assert [(c.engine, c.call, c.prepared_bytes) for c in candidates] == expected  # type: ignore[comparison-overlap]
        assert all(c.spill_bytes == 3 * len(plan.every_launch) and c.workspace_bytes == 0 for c in candidates)
        assert [c.note for c in candidates] == ["states=36", "states=36, filters prepared before"][: len(expected)]


def test_each_algorithm_of_a_filter_is_called(torch_on_device: HostDevice) -> None:
    """Also those that filter2d would not take."""
    torch = pytest.importorskip("torch")
    from leanconv.bench.peers import own

    problem = filter_problem(1, 40, 50, 15, 15, rank=1)
    held = Operands(problem, gpu=False)
    tensors: Any = SimpleNamespace(
        problem=problem, image=torch.from_numpy(held.image), weights=torch.from_numpy(held.weights), gpu=False,
        output=lambda layout: torch.zeros(problem.y_shape),
    )  # fmt: skip
    for name in ("separable", "fourier_lines"):
        (algorithm,) = (each for each in ALGORITHMS if each.stem == name)
        (candidate,) = own._on_gpu(algorithm, problem, tensors)
        torch_on_device.launches.clear()
        y = candidate.call()
        assert candidate.algorithm == name and bool(torch_on_device.launches[0][1]["prepared"]) == (name != "separable")
        np.testing.assert_allclose(y.numpy(), oracle.filter2d(problem, held.image, held.weights), atol=1e-4)


@pytest.mark.gpu
def test_prepared_filters_give_the_same_answer_on_the_gpu() -> None:
    pytest.importorskip("torch")
    for layout in LAYOUTS:
        case = Case("layer", ConvProblem(2, 40, 12, 12, 8, 3, 3, padding=(1, 1, 1, 1), layout=layout))  # type: ignore[arg-type]
        results = run_suite([case], engines=("leanconv*",), algorithms=("winograd1d",), quick=True, progress=False)
        assert [row.engine for row in results.rows] == [
            "leanconv:auto",
            "leanconv",
            "leanconv:prepared",
        ] and not results.failed
        assert all(row.error is not None and row.error < 3e-6 and row.prepared_bytes > 0 for row in results.rows[1:])
        own = results.own("layer")
        assert own is not None and own.engine == "leanconv", "its time holds the transform of the filters"
