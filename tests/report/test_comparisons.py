"""Tables and figures of the pages on algorithms, from made-up results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import default_path
from leanconv.bench.results import Results
from leanconv.bench.tables import standings
from leanconv.cli.main import main
from report import comparisons, figures
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]


def test_standings_are_geometric_means_and_the_least() -> None:
    suite = made_up.suite()
    found = made_up.rows_of(standings(suite, [("im2win", "im2win_fused")]))
    assert list(found) == ["im2win_fused", "im2win", "implicit_gemm", "best of im2win, im2win_fused", "best of all"]
    assert found["im2win_fused"]["× lean"] == "2.31 (1.33)"  # 40/10 and 20/15
    assert found["im2win"]["× lean"] == "2.00 (2.00)"
    assert found["best of im2win, im2win_fused"]["× lean"] == "2.83 (2.00)"
    assert found["best of all"]["× lean"] == "3.16 (2.00)"
    assert found["best of im2win, im2win_fused"]["× im2col"] == "6.93 (6.00)"
    assert found["implicit_gemm"]["× best"] == "0.65 (0.62)"  # 50/80 and 10/15: a wrong answer is no peer
    assert found["im2win"]["problems"] == "2"
    suite.rows = [row for row in suite.rows if (row.problem, row.algorithm) != ("wide", "im2win")]
    assert made_up.rows_of(standings(suite))["im2win"]["problems"] == "1"
    suite.rows = [row for row in suite.rows if row.engine != "leanconv"]
    assert standings(suite)[1] == [], "no line without an own algorithm"


def test_memory_is_compared_with_im2col_on_3x3_layers() -> None:
    suite = made_up.suite()
    found = made_up.rows_of(comparisons.memory(suite, ["im2win", "im2win_fused"]))
    assert found["narrow"] == {
        "problem": "narrow", "tensors": "1.00 kB", "im2win_fused": "0", "im2win": "500", "of im2col's": "50%",
        "im2col + cuBLAS": "1.00 kB", "cuDNN's fastest": "1.00 MB",
    }  # fmt: skip
    assert found["wide"]["of im2col's"] == "20%"
    assert found["layers with 3×3 filters"]["of im2col's"] == "50% (50%)", "5×5 layers are no part of it"


def test_speeds_name_the_largest_error() -> None:
    suite = made_up.suite()
    suite.rows[1] = replace(suite.rows[1], error=3e-7)
    found = made_up.rows_of(comparisons.speeds(suite, ["im2win_fused", "im2win", "absent"]))
    assert found["narrow"] == {
        "problem": "narrow", "im2win_fused": "40.0", "im2win": "20.0", "cuDNN without workspace": "10.0",
        "cuDNN's fastest": "80.0", "im2col + cuBLAS": "5.00", "our largest error": "3.0e-07",
    }  # fmt: skip


def test_picks_are_rows_of_what_a_call_picks_however_quick_others_are() -> None:
    suite = made_up.suite()
    suite.rows += [
        made_up.row("narrow", "leanconv:auto", "im2win", 25),
        made_up.row("wide", "leanconv:auto", "im2win", 5),
    ]
    suite.rows += [made_up.row("narrow", "torch-fp32-nhwc", "", 10), made_up.row("narrow", "torch-tf32-nchw", "", 50)]
    heads, lines = comparisons.picks(suite, ["narr*", "absent"])
    assert heads == ["problem", "a call picks", "µs", "× PyTorch, strict FP32", "× its TF32"]
    assert lines == [["narrow", "`im2win`", "40.0", "2.50", "0.50"]]
    assert comparisons.picks(suite, ["*"])[1][1] == ["wide", "`im2win`", "200", "–", "–"]


def test_a_results_file_is_printed_with_its_standings(tmp_path: Path, capsys: Any) -> None:
    suite = made_up.suite()
    path = default_path(suite, False, tmp_path)
    suite.write(path)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", str(path)])
    assert not stopped.value.code
    assert "best of all" in capsys.readouterr().out


def test_figures_show_what_was_measured(tmp_path: Path) -> None:
    suite = made_up.suite()
    pytest.importorskip("matplotlib")
    rows = figures.speed_rows(suite)
    assert list(rows) == [
        "im2win_fused", "im2win", "implicit_gemm", "im2col + cuBLAS", "cuDNN implicit GEMM", "cuDNN FFT tiling",
    ], "in the order of the legend, without the wrong answer"  # fmt: skip
    assert rows["im2win"]["wide"].tflops == 30 and set(rows["cuDNN FFT tiling"]) == {"narrow"}
    assert [figures.best_own(rows, problem) for problem in suite.problems] == ["implicit_gemm", "im2win"]
    there = replace(suite, problems={name: about | {"layout": "CHWN"} for name, about in suite.problems.items()})
    there.rows = [*suite.rows, made_up.row("narrow", "cudnn:fft_tiling-nhwc", "fft_tiling", 90, 10**6)]
    assert figures.speed_rows(there)["cuDNN FFT tiling"]["narrow"].tflops == 90, (
        "the fastest, where none is of the layout"
    )

    path = tmp_path / "speed.png"
    figures.speed(suite, path)
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.speed(replace(suite, rows=[]), path)
    assert [*tmp_path.iterdir()] == [path]


def test_ratios_to_pytorch_are_dots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suite = made_up.in_nhwc()
    figures.ratios(suite, tmp_path / "a.svg")
    shown = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in shown for name in (*suite.problems, *suite.own_algorithms(), "PyTorch = 1"))
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.ratios(replace(suite, rows=[]), tmp_path / "b.svg")


def test_the_speed_figure_leaves_out_no_algorithm_that_wins(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for path in (ROOT / "benchmarks" / "results").glob("*/im2win*.json"):
        results = Results.read(path)
        drawn = results.machine.get("gpu") and results.op is None
        rows = figures.speed_rows(results) if drawn else {}
        for problem in results.problems if rows else ():
            fastest = results.own(problem)
            assert fastest and figures.best_own(rows, problem) == fastest.algorithm, (path.name, problem)
    suite = made_up.suite()
    suite.rows.append(made_up.row("wide", "leanconv", "winograd2d", 99))
    figures.speed(suite, tmp_path / "a.svg")
    shown = (tmp_path / "a.svg").read_text()
    # once in the legend and once over its bar; im2win, which no longer wins, only in the legend
    assert [shown.count(f"<!-- {name} -->") for name in ("winograd2d", "implicit_gemm", "im2win")] == [2, 2, 1]
