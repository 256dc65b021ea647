"""The rules of comparison (docs/comparisons.md), one by one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from leanconv.bench import Results, run_suite
from leanconv.bench import run as bench_run
from leanconv.bench.ceilings import Ceilings
from leanconv.bench.operands import Operands
from leanconv.bench.peers import Candidate, LeanconvPeer, Unable, own
from leanconv.bench.results import key_of
from leanconv.bench.suites import Case, dense_filter
from leanconv.bench.tables import legend, standings, summary
from leanconv.call import bind
from leanconv.call.choose import NoAlgorithmError
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.kernels import ALGORITHMS
from leanconv.problem import ConvProblem
from leanconv.runtime.timing import Timing
from tests import cases, made_up

LAYER = ConvProblem(1, 4, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1))
CEILINGS = Ceilings(fp32_tflops=50.0, tf32_tflops=400.0, copy_tbytes=4.0, how="made up", fp16_tflops=800.0)


def picked() -> Results:
    """Two layers on which a call picks what is not the fastest."""
    results = made_up.in_nhwc()
    results.rows += [
        made_up.timed("a", "leanconv:auto", 40.0, algorithm="slow", error=3e-7, workspace_bytes=2000),
        made_up.timed("b", "leanconv:auto", 20.0, algorithm="slow"),
    ]
    return results


# what a call picks


def test_what_a_call_picks_is_a_row_of_its_own_and_the_headline() -> None:
    results = picked()
    auto, fastest = results.own("a", ["auto"]), results.own("a")
    assert auto and (auto.algorithm, auto.us) == ("slow", 40.0) and fastest and fastest.us == 10.0
    assert results.own("a", ["slow"]).us == 20.0, "a row by name is none of auto's"  # type: ignore[union-attr]
    assert results.headline == ["auto"] and made_up.in_nhwc().headline is None
    assert results.ratios("PyTorch", ["auto"]) == [3 / 40, 4.0] and results.ratios("PyTorch") == [0.3, 8.0]
    lines = made_up.rows_of(summary(results))
    assert (lines["a"]["auto"], lines["a"]["fastest"]) == ("slow", "good, 10.0 µs")
    assert (lines["a"]["× PyTorch"], lines["geometric mean"]["× PyTorch"]) == ("0.07", "0.55")
    assert lines["geometric mean, fastest"]["× PyTorch"] == "1.55"
    assert standings(results)[1][0][0] == "auto" and "with what a call picks" in "\n".join(legend(results))


def test_auto_is_timed_as_a_call_without_an_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    (algorithm,) = (each for each in ALGORITHMS if each.stem == "depthwise_row")
    (other,) = (each for each in ALGORITHMS if each.stem == "implicit_gemm")
    config = next(iter(other.configs(LAYER, cases.TARGETS[0])))
    plan = replace(other.plan(LAYER, config, cases.TARGETS[0]), prepared_bytes=64)
    device = SimpleNamespace(compiled=lambda plan: [SimpleNamespace(registers=40, spill_bytes=0)])
    choice = SimpleNamespace(algorithm=algorithm, config=config)
    loaded = SimpleNamespace(problem=LAYER, plan=plan, device=device, choice=choice)
    asked: list[Any] = []
    monkeypatch.setattr(bind, "load", lambda *given: (asked.__iadd__([given]), loaded)[1])
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("leanconv.conv2d", lambda *given, **named: calls.append(named))
    (auto,) = own._auto(LAYER, Operands(LAYER, gpu=False))
    assert isinstance(auto, Candidate)
    auto.call()
    assert asked == [(LAYER, 0)] and (calls[0]["algorithm"], calls[0]["workspace_limit"]) == ("auto", None)
    assert (auto.engine, auto.algorithm, auto.prepared_bytes) == ("leanconv:auto", "depthwise_row", 64)
    assert auto.config == key_of(config) != "", "a row says which configuration a call picked"
    assert auto.note.startswith("strategy of depthwise") and "leanconv:auto" in LeanconvPeer.engines

    def nothing(*given: Any) -> Any:
        raise NoAlgorithmError("nothing fits")

    monkeypatch.setattr(bind, "load", nothing)
    assert list(own._auto(LAYER, Operands(LAYER, gpu=False))) == [Unable("leanconv:auto", "nothing fits")]


# one state of the L2


def run_of(**how: Any) -> Any:
    return bench_run._Run(True, True, (), CEILINGS, **how)


def test_the_state_of_the_l2_is_the_problems() -> None:
    dense = ConvProblem(32, 256, 14, 14, 256, 3, 3)
    for problem, cold in (
        (dense, False),
        (replace(dense, groups=256), True),
        (dense_filter(1, 40, 31, 31, 31), True),
        (replace(dense, dtype="float16"), False),
    ):
        assert bench_run._cold(problem, run_of()) == cold, problem
    pointwise = ConvProblem(32, 64, 56, 56, 128, 1, 1)
    assert CEILINGS.bound(replace(pointwise, dtype="float16"), "fp32") != "copy"
    assert bench_run._cold(replace(pointwise, dtype="float16"), run_of()), "16 bits are for tensor cores"


def timed_row(candidate: Candidate, problem: ConvProblem, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    monkeypatch.setattr(bench_run, "_time", lambda candidate, cold, run: Timing(10, 9, 11, 5))
    monkeypatch.setattr(bench_run, "_checked", lambda *given: 1e-7)
    monkeypatch.setattr(bench_run, "time_gpu_sustained", lambda call: 12.0)
    monkeypatch.setattr(bench_run, "_REST_S", 0.0)
    check: Any = SimpleNamespace(checked="all")
    operands: Any = None
    return bench_run._row("a", problem, candidate, check, operands, run_of(**how))


def test_all_rows_of_a_problem_have_the_l2_in_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 a copy would bind this layer, and on FP32 cores arithmetic does: all rows follow the latter."""
    problem = ConvProblem(32, 64, 56, 56, 128, 1, 1)
    assert CEILINGS.bound(problem, "fp32") == "fp32" and CEILINGS.bound(problem, "tf32") == "copy"
    for arithmetic in ("fp32", "tf32", "fp16x3"):
        candidate = Candidate("x", "x", lambda: None, arithmetic=arithmetic)
        assert timed_row(candidate, problem, monkeypatch).l2 == "warm"


def test_sustained_speeds_are_of_peers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ("leanconv", "torch-fp32-nhwc", "cudnn:fft-nchw"):
        candidate = Candidate(engine, "x", lambda: None)
        assert timed_row(candidate, LAYER, monkeypatch, sustained=True).us_sustained == 12.0
        assert timed_row(candidate, LAYER, monkeypatch).us_sustained is None
    on_cpu = Candidate("opencv", "x", lambda: None, on_gpu=False)
    assert timed_row(on_cpu, LAYER, monkeypatch, sustained=True).us_sustained is None


# groups


def test_pytorch_stands_in_its_better_layout_with_the_same_layout_beside_it() -> None:
    results = made_up.layers()
    for kind, group in (("fp32", "PyTorch"), ("tf32", "TF32"), ("bfloat16", "PyTorch, 16 bits")):
        results.rows = [
            made_up.timed("narrow", f"torch-{kind}-nchw", 30.0),
            made_up.timed("narrow", f"torch-{kind}-nhwc", 20.0),
            made_up.timed("wide", f"torch-{kind}-nchw", 30.0),
        ]
        peers = {name: {group: row.us for group, row in results.peers(name).items()} for name in results.problems}
        assert peers["narrow"] == {group: 20.0, f"{group}, same layout": 30.0}
        assert peers["wide"] == {group: 30.0, f"{group}, same layout": 30.0}


def test_the_fastest_of_cudnn_includes_its_graphs() -> None:
    results = made_up.suite()
    results.rows.append(made_up.timed("narrow", "cudnn-graph:fp32-nhwc", 1.0, workspace_bytes=10**6))
    results.rows.append(made_up.timed("narrow", "torch-tf32-nhwc", 0.5))
    peers = results.peers("narrow")
    assert peers["best"].us == 1.0 and peers["lean"].us == 100.0


# tables


def test_layers_without_a_figure_are_counted() -> None:
    words = picked().counted(["auto"])
    assert "× best: 1 of 2, 1 missing" in words and "× PyTorch: 2 of 2;" in words
    assert words in legend(picked())


def test_error_and_workspace_of_pytorch_stand_beside_ours() -> None:
    results = picked()
    place = next(i for i, row in enumerate(results.rows) if row.engine == "torch-fp32-nchw")
    results.rows[place] = replace(results.rows[place], error=2e-7, workspace_bytes=3_000_000)
    line = made_up.rows_of(summary(results))["a"]
    assert (line["workspace"], line["error"]) == ("2.00 kB", "3.0e-07")
    assert (line["workspace of PyTorch"], line["error of PyTorch"]) == ("3.00 MB", "2.0e-07")


def test_the_weakest_rows_stay() -> None:
    done = run_suite([Case("layer", LAYER)], device="cpu", quick=True, engines=("leanconv",), progress=False)
    assert done.own_algorithms() == [each.name for each in CPU_ALGORITHMS if not each.reasons(LAYER, None)]
