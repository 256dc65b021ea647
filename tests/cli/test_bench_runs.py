"""Runs of the benchmark on tiny problems: what takes part, what is written, what happens when something fails."""

from __future__ import annotations

import gc
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench import columns, default_path, run_suite
from leanconv.bench import run as bench_run
from leanconv.bench.format import significant
from leanconv.bench.operands import Operands
from leanconv.bench.peers import PEERS, Candidate, LeanconvPeer
from leanconv.bench.results import Results, Row
from leanconv.bench.suites import Case, dense_filter, format_problem, parse_problem, with_batch
from leanconv.bench.tables import detail, legend
from leanconv.cli.main import main
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.problem import ConvProblem
from leanconv.runtime.timing import Timing

REQUIRED = {"problem", "engine", "algorithm", "us", "tflops", "ceiling_share", "workspace_bytes", "error"}

TINY = (
    Case("layer", ConvProblem(1, 4, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1))),
    Case("picture", dense_filter(1, 40, 31, 5, 4, border="constant")),
)


def bench(*words: str) -> int:
    """Run ``leanconv bench`` with these words; returns its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def tiny_run() -> Results:
    return run_suite(TINY, device="cpu", quick=True, progress=False)


def test_run_measures_own_algorithms_and_peers(tiny_run: Results) -> None:

    own = {row.algorithm for row in tiny_run.of("layer") if row.engine == "leanconv"}
    assert own == {a.name for a in CPU_ALGORITHMS if not a.reasons(TINY[0].problem, None)}
    assert len(own) >= 3
    assert not tiny_run.failed
    assert {row.engine for row in tiny_run.of("picture")} >= {"leanconv"}
    for row in tiny_run.rows:
        assert row.us > 0 and row.us_low <= row.us <= row.us_high and row.runs >= 1
        assert row.error is not None and row.error < 5e-6, row
        flops = next(case.problem.flops for case in TINY if case.name == row.problem)
        assert row.tflops == pytest.approx(flops / row.us * 1e-6, abs=1e-4)
    assert tiny_run.machine["gpu"] is None and tiny_run.machine["ceilings"]["fp32_tflops"] > 0


def test_results_file_is_complete_and_comes_back(tiny_run: Results, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiny.json"
    tiny_run.write(path)
    content = columns.read(path)
    assert {"machine", "rows"} <= set(content) and "failed" not in content, "what is empty is left out"
    assert all({entry.name for entry in fields(Row)} >= set(row) >= REQUIRED for row in content["rows"])
    assert not any("variant" in row for row in content["rows"]), "nor a default that all rows have"
    assert Results.read(path) == tiny_run
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.json"], "no temporary file stays"
    path.write_text('{"rows": [')
    with pytest.raises(ValueError, match=r"tiny\.json is not a results file"):
        Results.read(path)


def test_failed_write_leaves_the_old_file(tiny_run: Results, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text("old")
    broken = replace(tiny_run, machine={"nan": float("nan")})
    with pytest.raises(ValueError):
        broken.write(path)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_absent_peers_are_named(monkeypatch: Any) -> None:
    for peer in PEERS:
        if peer.name != "leanconv":
            monkeypatch.setattr(type(peer), "absent", lambda self: f"no {self.name} here")
    results = run_suite(TINY, device="cpu", quick=True, progress=False)
    assert {row.engine for row in results.rows} == {"leanconv"}
    assert results.absent == {peer.name: f"no {peer.name} here" for peer in PEERS if peer.name != "leanconv"}
    page = "\n".join(legend(results))
    assert all(f"no {peer.name} here" in page for peer in PEERS if peer.name != "leanconv")


def test_a_peer_that_other_work_disturbs_is_timed_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of one engine takes 92 times as long as its others; the quickest counts."""
    order: list[Any] = []

    def time_cpu(call: Any, **more: Any) -> Timing:
        order.append(call)
        us = 920.0 if len(order) == 2 else 10.0
        return Timing(us, us - 1, us + 1, 5)

    monkeypatch.setattr(bench_run, "time_cpu", time_cpu)
    own = LeanconvPeer(("direct", "im2col"))
    done = run_suite(TINY[:1], device="cpu", quick=True, progress=False, peers=[own])
    assert [row.us for row in done.rows] == [10, 10] and order == order[:2] * 3
    flops = TINY[0].problem.flops
    assert [row.tflops for row in done.rows] == [significant(flops / 10 * 1e-6)] * 2
    (warning,) = done.warnings
    assert warning.startswith(f"layer: leanconv {done.rows[1].algorithm} took 10 to 920 µs"), warning
    assert done.rows[0].ceiling_share == done.rows[1].ceiling_share and done.rows[1].us_high == 11


def test_samples_far_apart_are_told_once_a_run() -> None:
    quiet = Row("a", "torch", "conv2d", 10, 9, 11, 9, 1, "fp32", 0.5, "warm", 0, 0, "all")
    busy = replace(quiet, problem="b", us_low=8, us_high=16)
    worse = replace(busy, algorithm="direct", us_high=20)
    assert bench_run._spread([]) == bench_run._spread([quiet]) == []
    (told,) = bench_run._spread([quiet, busy, worse])
    assert told.startswith("samples of 2 of 3 rows lie far apart, those of b: torch direct from 8 to 20 µs"), told


def test_an_interrupt_before_the_first_problem_exits_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever Ctrl-C comes, in `bench` and in any other command."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("leanconv.bench.run_suite", interrupted)
    monkeypatch.setattr("leanconv.bench.parse_problem", interrupted)
    assert bench("im2win") == 130 and capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "conv:c4,h12,k6,r3"])
    assert stopped.value.code == 130


@pytest.mark.parametrize("option", [("--batch", "0"), ("--seconds", "-1")])
def test_numbers_that_mean_nothing_are_refused(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("im2win", *option) == 2 and option[0] in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured_and_exits_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "_measure", measure)
    out = tmp_path / "r.json"
    assert bench("conv:c4,h12,k6,r3", "--quick", "--device", "cpu", "--engines", "leanconv", "--out", str(out)) == 130
    kept = Results.read(out)
    assert kept.missing and "interrupted" in kept.warnings[0] and "interrupted" not in json.loads(out.read_text())


def test_wrong_and_failing_engines_show(monkeypatch: Any) -> None:
    class Liar(type(PEERS[-1])):  # type: ignore[misc]
        name, engines, solves = "liar", ("liar",), ("filter2d",)

        def absent(self) -> None:
            return None

        def versions(self) -> dict[str, str]:
            return {"liar": "1"}

        def candidates(self, problem: Any, operands: Operands, gpu: bool) -> Any:
            y = operands.output()
            yield Candidate("liar", "nothing", lambda: y, out=y, on_gpu=False)
            yield Candidate("liar", "zero", lambda: np.zeros_like(y), on_gpu=False)
            yield Candidate("liar", "crash", lambda: 1 // 0, on_gpu=False)

    monkeypatch.setattr("leanconv.bench.run.PEERS", (Liar(),))
    results = run_suite(TINY[1:], device="cpu", quick=True, progress=False)
    errors = {row.algorithm: row.error for row in results.rows}
    assert errors == {"nothing": None, "zero": 1.0}
    assert results.failed == [
        {"problem": "picture", "engine": "liar", "reason": "ZeroDivisionError: integer division or modulo by zero"}
    ]
    notes = {line[2]: line[-1] for line in detail(results)[1]}
    assert "FAIL" in notes["nothing"] and "FAIL" in notes["zero"]
    assert any("FAILED: liar on picture" in line for line in legend(results))


def test_a_suite_in_another_layout_and_precision_says_so(tmp_path: Path, capsys: Any) -> None:
    words = ["opencnn", "--only", "conv5-n32", "--batch", "1", "--quick", "--device", "cpu", "--engines", "torch-cpu"]
    pytest.importorskip("torch")
    for options, layout, level, title in (
        (["--layout", "CHWN"], "CHWN", None, "opencnn CHWN on"),
        (["--precision", "relaxed"], "NCHW", "relaxed", "opencnn NCHW relaxed on"),
        (["--precision", "fp32"], "NCHW", None, "opencnn NCHW on"),
    ):
        path = tmp_path / "r.json"
        assert bench(*words, *options, "--out", str(path)) == 0
        found = Results.read(path)
        assert (found.layout, found.precision) == (layout, level) and title in capsys.readouterr().out
        (row,) = found.rows
        assert row.error is not None and row.error < 2e-6
        (about,) = found.problems.values()
        problem = parse_problem(about["words"])
        assert isinstance(problem, ConvProblem)
        assert (problem.layout, problem.precision) == (layout, level or "fp32")


def test_layout_and_precision_of_a_problem_are_its_own() -> None:
    for setting in ({"layout": "CHWN"}, {"precision": "relaxed"}):
        (given,) = setting.values()
        with pytest.raises(ValueError, match=f"is for suites; write it into the problem, as in conv:.*,{given}"):
            run_suite("conv:c4,h9,k6,r3", **setting)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="conv:.*,dgrad,bias: a gradient of the input is measured without a bias"):
        run_suite("conv:n1,c4,h6,k4,r3,dgrad,bias")
    with pytest.raises(ValueError, match="precision='relaxed' is for suites"):
        run_suite(TINY, precision="relaxed", device="cpu")


def test_a_problem_in_words_is_resumed() -> None:
    nothing = run_suite("conv:c4,h9,k6,r3,CHWN", device="cpu", quick=True, seconds=0, progress=False)
    assert nothing.missing and nothing.layout == "CHWN"
    found = run_suite(
        "conv:c4,h9,k6,r3,CHWN", device="cpu", quick=True, engines=("torch-cpu",), resume=nothing, progress=False
    )
    assert [*found.problems] == nothing.missing and not found.missing


def test_engines_and_problems_can_be_chosen() -> None:
    results = run_suite(TINY, engines=("leanconv",), only="pict*", device="cpu", quick=True, progress=False)
    assert {row.problem for row in results.rows} == {"picture"} and {row.engine for row in results.rows} == {"leanconv"}
    assert not results.absent, "what was not asked for is not missed"
    with pytest.raises(ValueError, match="only='zzz' matches no problem"):
        run_suite(TINY, only="zzz", device="cpu")
    with pytest.raises(ValueError, match="'im2wim' is no suite"):
        run_suite("im2wim", device="cpu")
    with pytest.raises(ValueError, match="batch=0"):
        run_suite(TINY, batch=0, device="cpu")


def test_algorithms_can_be_chosen() -> None:
    results = run_suite(TINY[:1], algorithms=("im2*",), engines=("lean*",), device="cpu", quick=True, progress=False)
    assert {row.algorithm for row in results.rows} == {"im2col", "im2win"}
    with pytest.raises(ValueError, match="algorithms='im2wim,x' matches none of .*im2win.* that run on the CPU"):
        run_suite(TINY, algorithms=("im2wim", "x"), device="cpu")


def test_a_run_out_of_time_is_resumed(tmp_path: Path, capsys: Any) -> None:
    def run(**options: Any) -> Results:
        return run_suite(TINY, engines=("leanconv",), device="cpu", quick=True, progress=False, **options)

    nothing = run(seconds=0)
    assert nothing.missing == ["layer", "picture"] and not nothing.rows and not nothing.problems
    assert default_path(nothing, partial=False).stem == "cases-part"
    second = run(resume=replace(nothing, missing=["picture"]))
    assert [*second.problems] == ["picture"] and not second.missing
    both = run(resume=replace(second, missing=["layer"]))
    assert [*both.problems] == ["layer", "picture"] and {row.problem for row in both.rows} == {"layer", "picture"}
    assert [text.partition(",")[0] for text in both.warnings if "runs" in text] == ["measured in several runs"]
    again = both.joined(replace(both, machine=both.machine | {"date": "later"}), list(both.problems))
    assert sum("several runs" in text for text in again.warnings) == 1, "one warning, whatever number of runs"
    both.write(tmp_path / "r.json")
    again = Results.read(tmp_path / "r.json")  # what was skipped comes in another order
    assert replace(again, skipped=both.skipped) == both and default_path(both, partial=False).stem == "cases"
    assert sorted(map(str, again.skipped)) == sorted(map(str, both.skipped))
    assert "Missing: 2 problems, from layer on" in "\n".join(legend(nothing))
    with pytest.raises(ValueError, match="miss no problem"):
        run(resume=both)
    other = replace(second, machine=second.machine | {"numpy": "0.1"}, missing=["layer"])
    with pytest.raises(ValueError, match="do not go together: numpy is '0.1' in one"):
        run(resume=other)


def test_objects_are_frozen_only_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "gc", gc)
    gc.unfreeze()
    counts = []

    class Counter(type(PEERS[-1])):  # type: ignore[misc]
        name, engines, solves, needs_gpu = "counter", ("counter",), ("filter2d",), False

        def absent(self) -> None:
            return None

        def versions(self) -> dict[str, str]:
            return {}

        def candidates(self, problem: Any, operands: Operands, gpu: bool) -> Any:
            counts.append(gc.get_freeze_count())
            return iter(())

    run_suite(TINY[1:], device="cpu", quick=True, progress=False, peers=(Counter(),))
    assert counts[0] > 1000 and gc.get_freeze_count() == 0
    gc.freeze()


@pytest.mark.parametrize(
    ("engines", "alone"),
    [((), False), (("leanconv:auto",), True), (("leanconv*",), False), (("leanconv:auto", "*:prepared"), False)],
)
def test_what_a_call_picks_may_run_alone(engines: tuple[str, ...], alone: bool, monkeypatch: Any) -> None:
    said: list[Any] = []

    class Noting(LeanconvPeer):
        def __init__(self, *given: Any) -> None:
            said.append(given[1])
            super().__init__(*given)

    monkeypatch.setattr(bench_run, "LeanconvPeer", Noting)
    monkeypatch.setattr(bench_run, "PEERS", [peer for peer in PEERS if isinstance(peer, LeanconvPeer)])
    run_suite(TINY[1:], engines=engines, device="cpu", quick=True, progress=False, seconds=0)
    assert said == [alone]


def test_large_layers_are_scaled_on_a_cpu_and_say_so(monkeypatch: Any) -> None:
    problem = ConvProblem(64, 8, 12, 12, 8, 3, 3)
    monkeypatch.setattr("leanconv.bench.run._CPU_FLOPS", {True: problem.flops / 32, False: 0.0})
    results = run_suite([Case("big", problem)], engines=("leanconv",), device="cpu", quick=True, progress=False)
    assert results.problems["big"]["flops"] == problem.flops // 32
    assert any(text.startswith("big: 2 of 64 images") for text in results.warnings)
    monkeypatch.setattr("leanconv.bench.run._CPU_FLOPS", {True: 1.0, False: 0.0})
    results = run_suite([Case("big", problem)], engines=("leanconv",), device="cpu", quick=True, progress=False)
    assert not results.rows and "too many for a CPU" in results.skipped[0]["reason"]
    asked = run_suite([Case("big", problem)], engines=("leanconv",), batch=1, device="cpu", quick=True, progress=False)
    assert asked.problems["big"]["words"] == format_problem(with_batch(problem, 1))


def test_command_writes_file_and_plot(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    words = "filter:64x48,3x3,replicate"
    assert bench(words, "--quick", "--device", "cpu", "--out", "r.json", "--plot", "p.png") == 0
    shown = capsys.readouterr().out
    assert "results: r.json" in shown and "register" not in shown
    assert Results.read(Path("r.json")).problems["64x48,3x3,replicate"]["words"] == words
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    assert bench("nonsense") == 2 and "is no suite" in capsys.readouterr().err


def test_bench_begins_nothing_after_its_seconds(tmp_path: Any) -> None:
    out = tmp_path / "r.json"
    bench(
        "conv:c4,h12,k6,r3", "--quick", "--device", "cpu", "--engines", "leanconv", "--seconds", "0", "--out", str(out)
    )
    assert Results.read(out).missing
