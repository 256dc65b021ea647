"""The benchmark: its timer, its suites, and files, tables and plots made from a run on tiny problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench import __main__ as command
from leanconv.bench import default_path, geometric_mean, load_suite, parse_problem, run_suite, suite_names
from leanconv.bench.ceilings import Ceilings
from leanconv.bench.operands import Check, Operands, poison
from leanconv.bench.peers import PEERS, Candidate
from leanconv.bench.results import ROW_KEYS, Results, Row
from leanconv.bench.suites import Case, dense_filter, format_problem, with_batch
from leanconv.bench.tables import detail, markdown, performance_page, quantity, results_files, size, summary
from leanconv.problem import ConvProblem, FilterProblem
from leanconv.timing import summarise, time_cpu

COUNTS = {"im2win": 12, "opencnn": 16, "winograd1d": 90, "single-channel": 48, "general-direct": 36, "filters": 80}
REQUIRED = {"problem", "engine", "algorithm", "us", "tflops", "ceiling_share", "workspace_bytes", "error"}
CEILINGS = Ceilings(fp32_tflops=50.0, tf32_tflops=400.0, copy_tbytes=4.0, how="made up")

TINY = (
    Case("layer", ConvProblem(1, 4, 9, 10, 6, 3, 3, padding=(1, 1, 1, 1))),
    Case("picture", dense_filter(1, 40, 31, 5, 4, border="constant")),
)


# the timer


def test_summary_of_samples_is_median_and_quartiles() -> None:
    timing = summarise([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (timing.median_us, timing.low, timing.high, timing.runs) == (3.0, 2.0, 4.0, 5)
    assert summarise([7.0]).low == summarise([7.0]).high == 7.0
    with pytest.raises(ValueError, match="samples is empty"):
        summarise([])


class Clock:
    """Time that only passes when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_cpu_timer_warms_up_and_spends_its_budget() -> None:
    clock, durations = Clock(), iter([5.0, *[0.01] * 500])
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clock.now += next(durations)

    timing = time_cpu(call, budget_s=0.5, clock=clock)
    assert timing.median_us == pytest.approx(1e4)
    assert timing.high == pytest.approx(1e4), "the slow first call must not be among the samples"
    assert 50 <= timing.runs <= 51 and calls == timing.runs + 1
    assert time_cpu(call, budget_s=100, max_runs=7, clock=clock).runs == 7
    assert time_cpu(call, budget_s=0.0001, min_runs=4, max_runs=9, clock=Clock()).runs == 9, "a clock that stands still"


def test_cpu_timer_takes_one_sample_of_a_call_that_outlasts_the_budget() -> None:
    clock = Clock()

    def call() -> None:
        clock.now += 3.0

    timing = time_cpu(call, budget_s=0.5, clock=clock, warm_up=False)
    assert timing.runs == 1 and clock.now == 3.0 and timing.median_us == pytest.approx(3e6)


@pytest.mark.gpu
def test_gpu_timer_agrees_with_the_bytes_moved() -> None:
    torch = pytest.importorskip("torch")
    from leanconv.timing import time_gpu

    source = torch.randn(1 << 26, device="cuda")
    target = torch.empty_like(source)
    cold = time_gpu(lambda: target.copy_(source), cold=True)
    twice = time_gpu(lambda: (target.copy_(source), target.copy_(source)))
    assert 1.7 < twice.median_us / cold.median_us < 2.3
    assert cold.low <= cold.median_us <= cold.high and cold.runs >= 5
    small = torch.zeros(1, device="cuda")
    assert time_gpu(lambda: small.add_(1)).median_us < 5, "the host's part of a short call must not be counted"


# suites and problems in words


def test_suites_are_whole() -> None:
    assert {name: len(load_suite(name)) for name in suite_names()} == COUNTS
    for name in suite_names():
        names = [case.name for case in load_suite(name)]
        assert len(set(names)) == len(names)


def test_suite_problems_have_the_papers_shapes() -> None:
    conv1 = load_suite("im2win")[0].problem
    assert isinstance(conv1, ConvProblem)
    assert (conv1.x_shape, conv1.w_shape, conv1.y_shape) == ((128, 3, 227, 227), (96, 3, 11, 11), (128, 96, 55, 55))
    moved = load_suite("im2win", "NHWC")[0].problem
    assert isinstance(moved, ConvProblem) and moved == replace(conv1, layout="NHWC")
    padded = load_suite("opencnn")[0].problem
    assert isinstance(padded, ConvProblem)
    assert padded.padding == (1, 1, 1, 1) and padded.y_shape == (32, 64, 56, 56)
    for case in load_suite("winograd1d"):
        assert isinstance(case.problem, ConvProblem)
        assert case.problem.layout == "NHWC" and case.problem.p > 0
    first = load_suite("filters")[0].problem
    assert isinstance(first, FilterProblem)
    assert (first.h, first.kh, first.border, first.anchor, first.x_pitch) == (1024, 2, "constant", (1, 1), 1024)


def test_unknown_suite_and_layout_are_named() -> None:
    with pytest.raises(ValueError, match="im2wim.*im2win"):
        load_suite("im2wim")
    with pytest.raises(ValueError, match="layout='CHWN'"):
        load_suite("im2win", "CHWN")
    with pytest.raises(ValueError, match="does not apply"):
        load_suite("filters", "NHWC")


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(128, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC"),
        ConvProblem(1, 8, 9, 30, 4, 1, 5, (2, 1), (0, 1, 2, 3), (1, 3), 4, bias=True, activation="relu"),
        ConvProblem(2, 8, 9, 30, 4, 1, 5, padding=(0, 0, 2, 2), precision="tf32"),
        dense_filter(1, 8192, 4096, 7, 5),
        dense_filter(3, 10, 11, 4, 5, "wrap", "int32", (0, 4)),
        *(case.problem for name in COUNTS for case in load_suite(name)[::13]),
    ],
    ids=str,
)
def test_problems_survive_their_words(problem: Any) -> None:
    assert parse_problem(format_problem(problem)) == problem


def test_words_of_the_documentation() -> None:
    read = parse_problem("conv:n128,c64,h56,w56,k64,r3,s3,stride1,pad1,NHWC")
    assert read == ConvProblem(128, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    assert parse_problem("filter:8192x8192,7x7") == dense_filter(1, 8192, 8192, 7, 7)
    short = parse_problem("conv:n1,c32,h112,k32,r3,stride2x1,pad0x1x0x1,dil2,groups32,bias,relu")
    assert short == ConvProblem(
        1, 32, 112, 112, 32, 3, 3, (2, 1), (0, 1, 0, 1), (2, 2), 32, bias=True, activation="relu"
    )
    assert parse_problem("filter:480x640,5x1,batch16,anchor0x0,replicate,int32") == dense_filter(
        16, 480, 640, 5, 1, "replicate", "int32", (0, 0)
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("conf:n1", "must start with 'conv:'"),
        ("conv:n1,c2,h5,k3", "r must be given"),
        ("conv:n1,c2,h5,k3,r3,x7", "'x7' is not understood"),
        ("conv:n1,c2,h5,k3,r3,pad1x2x3", "'pad1x2x3' must have 1 or 2 or 4 numbers"),
        ("conv:n1,c2,h5,k3,r7", "does not fit"),
        ("conv:n1,c3,h5,k4,r1,groups2", "c=3 and k=4 must be divisible by 2"),
        ("conv:n1,c3,h5,k4,r1,stride0", "at least 1"),
        ("filter:5x5", "in this order"),
        ("filter:5x5,3x3,mirror", "'mirror' is not understood"),
        ("filter:5x5,3x3,anchor3x0", "outside the 3x3 filter"),
    ],
)
def test_bad_words_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_problem(text)


# errors against float64


def test_check_finds_errors_and_holes() -> None:
    from leanconv.reference import oracle

    for case in TINY:
        operands = Operands(case.problem, gpu=False)
        layout = "NCHW" if isinstance(case.problem, ConvProblem) else ""
        y = operands.output(layout)
        assert np.isnan(Check(operands).error(y, layout)), "an output nobody wrote"
        if isinstance(case.problem, ConvProblem):
            y[...] = oracle.conv2d(case.problem, operands.x("NCHW"), operands.w("NCHW"))
        else:
            y[...] = oracle.filter2d(case.problem, operands.image, operands.kernel)
        assert Check(operands).error(y, layout) < 1e-7
        norm = float(np.linalg.norm(y))
        y.flat[-1] += 0.01 * norm
        assert Check(operands).error(y, layout) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_check_on_parts_of_the_output_agrees_with_the_whole(monkeypatch: Any, layout: str) -> None:
    from leanconv.bench import operands as module
    from leanconv.reference import oracle

    problem = ConvProblem(5, 3, 40, 9, 4, 5, 3, (2, 1), (2, 1, 1, 0), layout=layout, bias=True)  # type: ignore[arg-type]
    operands = Operands(problem, gpu=False)
    y = oracle.conv2d(problem, operands.x(layout), operands.w(layout), operands.bias)
    for part, words in ((0.6, "3 of 5 images"), (0.1, "1 of 5 images, 9 of 20 rows")):
        monkeypatch.setattr(module, "_CPU_LIMITS", (problem.flops * part, 1e9))
        check = Check(operands)
        assert check.checked == words
        assert check.error(y, layout) < 1e-12
        poison(y[0 if part > 0.5 else check._blocks[0].images[0]])
        assert np.isnan(check.error(y, layout)) or part > 0.5 and 0 not in check._blocks[0].images


@pytest.mark.parametrize("border", ["constant", "replicate", "reflect", "reflect101", "wrap"])
def test_check_of_filters_on_bands_agrees_with_the_oracle(monkeypatch: Any, border: str) -> None:
    from leanconv.bench import operands as module
    from leanconv.reference import oracle

    problem = dense_filter(2, 60, 17, 6, 3, border, anchor=(1, 2))
    operands = Operands(problem, gpu=False)
    y = oracle.filter2d(problem, operands.image, operands.kernel)
    monkeypatch.setattr(module, "_CPU_LIMITS", (problem.flops / 10, 1e9))
    check = Check(operands)
    assert check.checked == "1 of 2 images, 12 of 60 rows"
    assert check.error(y) < 1e-12
    y[check._blocks[0].images[0], 59, 0] += 1
    assert check.error(y) > 1e-3, "the last row is always among what is checked"
    assert check.error(y, frame=1) < 1e-12, "an edge that is left out"
    y[check._blocks[0].images[0], 58, 1] += 1
    assert check.error(y, frame=1) > 1e-3 > 1e-12 > check.error(y, frame=2)


# runs


@pytest.fixture(scope="module")
def tiny_run() -> Results:
    return run_suite(TINY, device="cpu", quick=True, progress=False)


def test_run_measures_own_algorithms_and_peers(tiny_run: Results) -> None:
    from leanconv import registry

    own = {row.algorithm for row in tiny_run.of("layer") if row.engine == "leanconv"}
    assert own == {a.name for a in registry.CPU_ALGORITHMS if not a.reasons(TINY[0].problem)}
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
    content = json.loads(path.read_text())
    assert {"machine", "rows"} <= set(content)
    assert all(set(row) == set(ROW_KEYS) and set(row) >= REQUIRED for row in content["rows"])
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
    page = "\n".join(_legend_of(results))
    assert all(f"no {peer.name} here" in page for peer in PEERS if peer.name != "leanconv")


def _legend_of(results: Results) -> list[str]:
    from leanconv.bench.tables import _legend

    return _legend(results)


def test_wrong_and_failing_engines_show(monkeypatch: Any) -> None:
    class Liar(type(PEERS[-1])):  # type: ignore[misc]
        name, engines, solves = "liar", ("liar",), (FilterProblem,)

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
    assert "WRONG" in notes["nothing"] and "WRONG" in notes["zero"]
    assert any("FAILED: liar on picture" in line for line in _legend_of(results))


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
    assert command.main([words, "--quick", "--device", "cpu", "--out", "r.json", "--plot", "p.png"]) == 0
    shown = capsys.readouterr().out
    assert "results: r.json" in shown and "register" not in shown
    assert Results.read(Path("r.json")).problems["64x48,3x3,replicate"]["words"] == words
    assert Path("p.png").read_bytes()[:4] == b"\x89PNG"
    assert command.main(["nonsense"]) == 2 and "is no suite" in capsys.readouterr().err


# what is made of figures


def made_up(problem: str, engine: str, us: float, **rest: Any) -> Row:
    values: dict[str, Any] = {
        "algorithm": "a",
        "us_low": us,
        "us_high": us,
        "runs": 5,
        "tflops": 1.0,
        "ceiling": "fp32",
        "ceiling_share": 0.5,
        "l2": "warm",
        "workspace_bytes": 0,
        "error": 1e-7,
        "checked": "all",
    }
    return Row(problem, engine, us=us, **(values | rest))


def made_up_results() -> Results:
    about = {"words": "conv:c1", "layout": "NHWC", "flops": 100, "bytes": 80, "floor_us": 1.0}
    machine = {
        "gpu": "NVIDIA H200",
        "date": "2026-01-01",
        "ceilings": {"fp32_tflops": 50.0, "tf32_tflops": 400.0, "copy_tbytes": 4.0, "how": "made up"},
    }
    results = Results(machine, "im2win", "NHWC", problems={"a": about, "b": about})
    results.rows = [
        made_up("a", "leanconv", 10.0, algorithm="good", registers=99, spill_bytes=0),
        made_up("a", "leanconv", 20.0, algorithm="slow"),
        made_up("a", "leanconv", 1.0, algorithm="wrong", error=None),
        made_up("a", "cudnn:fft-nhwc", 5.0, workspace_bytes=10**9),
        made_up("a", "cudnn:implicit_gemm-nhwc", 40.0),
        made_up("a", "cudnn:implicit_gemm-nchw", 30.0),
        made_up("a", "cudnn:winograd_nonfused-nhwc", 2.0, error=1e-3),
        made_up("a", "torch-fp32-nhwc", 20.0),
        made_up("a", "torch-fp32-nchw", 3.0),
        made_up("b", "leanconv", 10.0),
        made_up("b", "torch-fp32-nhwc", 80.0),
    ]
    return results


def test_peers_are_grouped_and_wrong_answers_are_not_compared_with() -> None:
    results = made_up_results()
    own = results.own("a")
    assert own is not None and own.algorithm == "good"
    peers = {name: row.us for name, row in results.peers("a").items()}
    assert peers == {"lean": 30.0, "lean, own layout": 40.0, "best": 5.0, "PyTorch": 20.0}
    assert results.ratios("PyTorch") == [2.0, 8.0]
    assert results.ratios("best") == [0.5]


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([5.0]) == pytest.approx(5.0)
    for bad in ([], [1.0, 0.0], [-1.0]):
        with pytest.raises(ValueError, match="positive values"):
            geometric_mean(bad)


def test_tables_and_page(tmp_path: Path) -> None:
    results = made_up_results()
    columns, lines = summary(results)
    by_name = {line[0]: dict(zip(columns, line, strict=True)) for line in lines}
    assert by_name["a"]["× lean"] == "3.00" and by_name["b"]["× lean"] == "–"
    assert by_name["geometric mean"]["× PyTorch"] == "4.00"
    assert by_name["a"]["algorithm"] == "good" and by_name["a"]["of ceiling"] == "50% fp32"
    assert [line[3] for line in detail(results)[1][:3]] == ["1.00", "2.00", "3.00"]
    assert "99 registers, 0 B spilled" in str(detail(results))
    assert markdown((["x", "y"], [["1", "2"]])) == "| x | y |\n|---|---|\n| 1 | 2 |"

    path = default_path(results, partial=False, root=tmp_path)
    assert path == tmp_path / "nvidia-h200" / "im2win-nhwc.json"
    results.write(path)
    results.write(default_path(results, partial=True, root=tmp_path))
    assert results_files(tmp_path) == [path], "a part of a suite is no result to publish"
    page = performance_page([path])
    assert "## im2win NHWC on NVIDIA H200" in page and "| geometric mean |" in page and "do not edit" in page


def test_results_without_own_rows_show_the_peers() -> None:
    results = made_up_results()
    results.rows = [row for row in results.rows if row.engine != "leanconv"]
    columns, lines = summary(results)
    assert "PyTorch, µs" in columns and lines[1][columns.index("PyTorch, µs")] == "80.0"


def test_plot_draws_each_series(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from leanconv.bench.plots import plot, speeds, unit

    results = made_up_results()
    assert list(speeds(results)) == ["leanconv", "lean", "lean, own layout", "best", "PyTorch"]
    assert unit(results) == "TFLOP/s" and speeds(results)["PyTorch"] == {"a": 1.0, "b": 1.0}
    plot(results, tmp_path / "bars.svg")
    assert "geometric" not in (tmp_path / "bars.svg").read_text() and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="nothing to plot"):
        plot(replace(results, rows=[]), tmp_path / "none.png")


def test_figures_are_written_for_people() -> None:
    assert [quantity(v) for v in (0.0418, 1.234, 12.34, 123.4, 12345.6, 0.0, None)] == [
        "0.0418", "1.23", "12.3", "123", "12346", "0.00", "–",
    ]  # fmt: skip
    assert [size(v) for v in (0, 1024, 153_000_000, 2_035_040_768, None)] == ["0", "1.02 kB", "153 MB", "2.04 GB", "–"]


def test_ceiling_is_the_one_that_binds() -> None:
    layer = ConvProblem(128, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1))
    assert CEILINGS.bound(layer) == "fp32" and CEILINGS.bound(layer, "tf32") == "tf32"
    assert CEILINGS.floor_us(layer, "fp32") == pytest.approx(layer.flops / 50e6)
    picture = dense_filter(1, 8192, 8192, 3, 3)
    assert CEILINGS.bound(picture) == "copy"
    assert CEILINGS.floor_us(picture, "fp32") == pytest.approx(2 * 4 * 8192**2 / 4e6)


def test_numerics_page_has_every_algorithm_and_its_bound_holds(tmp_path: Path) -> None:
    from leanconv import registry
    from leanconv.bench import numerics

    entries = numerics.measure(layers=((3, 20),), filters=(5,), gpu=False)
    for entry in entries:
        assert entry.error <= 4 * max(entry.sequential, 2**-24), entry
    for algorithm in registry.CPU_ALGORITHMS:
        assert {e.data for e in entries if e.algorithm == algorithm.name} == {"zero-mean", "positive"}, algorithm.name
    page = numerics.page([numerics.record(entries, gpu=False)])
    assert "python -m leanconv.bench.numerics" in page and "layer 3×3×20" in page and "filter 5×5" in page
    assert all(f"`{algorithm.name}` CPU" in page for algorithm in registry.CPU_ALGORITHMS)
