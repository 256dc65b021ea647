"""Tables and figures of the suites that are made of families, and whether targets are met, from made-up figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import default_path, load_suite, show
from leanconv.bench.families import (
    GOALS,
    PREPARED,
    families,
    family_table,
    goal_table,
    title,
)
from leanconv.bench.results import Results, Row
from leanconv.bench.suites import format_problem
from leanconv.kernels.winograd_matrices import POINTS, WIDTHS
from leanconv.problem import ConvProblem
from report import pages
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]

#: TFLOP/s of a family's problems when nothing else is said: all targets are reached.
SPEED = {"g8": 90.0, "g16": 130.0}


def measured(suite: str = "winograd1d", **slow: float) -> Results:
    """A run in which the fastest peer without workspace makes 40 TFLOP/s; ``slow`` gives problems other speeds."""
    algorithm, _ = GOALS[suite]
    results = Results(dict(made_up.MACHINE), suite, "NHWC" if suite == "winograd1d" else "NCHW")
    for case in load_suite(suite):
        problem = case.problem
        assert isinstance(problem, ConvProblem)
        about = {"words": format_problem(problem), "layout": problem.layout, "flops": problem.flops}
        results.problems[case.name] = about | {"bytes": problem.bytes, "floor_us": 1.0}
        speed = slow.get(case.name, SPEED.get(case.name.partition("(")[0], 80.0))
        for engine, name, tflops, workspace in (
            ("leanconv", algorithm, speed, 0),
            (PREPARED, algorithm, speed * 1.25, 0),
            ("leanconv", "implicit_gemm", 45.0, 0),
            ("cudnn:implicit_gemm-nchw", "implicit_gemm", 40.0, 0),
            ("cudnn:implicit_precomp_gemm-nhwc", "implicit_precomp_gemm", 20.0, 1024),
            ("cudnn:fft-nchw", "fft", 100.0, 10**8),
            ("torch-fp32-nhwc", "conv2d", 30.0, 0),
            ("torch-tf32-nhwc", "conv2d", 200.0, 0),
        ):
            us = problem.flops / tflops * 1e-6
            row = Row(
                case.name, engine, name, us, us, us, 9, tflops, "fp32", 0.5, "warm", workspace, 1e-6, "all",
                prepared_bytes=4096 if name == algorithm else 0,
            )  # fmt: skip
            results.rows.append(row)
    return results


def test_families_and_their_titles() -> None:
    found = families(measured())
    assert [title(name) for name in found][:2] == ["Γ8(7,2)", "Γ8(6,3)"] and [*found][-3:] == ["g8", "g16", "all"]
    assert [len(problems) for problems in found.values()] == [10] * 9 + [60, 30, 90]
    plain = families(measured("opencnn"))
    assert {name: len(problems) for name, problems in plain.items()} == {
        "conv2": 4, "conv3": 4, "conv4": 4, "conv5": 4, "all": 16,
    }  # fmt: skip
    assert title("conv2") == "conv2" and title("gemm") == "gemm"


def test_prepared_filters_are_a_row_beside_and_never_the_algorithms_own_time() -> None:
    results = measured()
    name = "g8(6,3)-64x128x128x64"
    own = results.own(name)
    given = next(row for row in results.of(name) if row.engine == PREPARED and row.algorithm == "winograd1d")
    assert own is not None and given is not None and own.engine == "leanconv" and given.us < own.us
    assert results.ratios("lean")[0] == pytest.approx(90 / 40)


def test_family_table() -> None:
    found = made_up.rows_of(family_table(measured(**{"g8(6,3)-64x128x128x64": 45.0}), "winograd1d"))
    assert list(found)[-3:] == ["Γ8", "Γ16", "all"]
    assert found["Γ8(7,2)"] == {
        "problems": "Γ8(7,2)", "count": "10", "TFLOP/s": "90.0–90.0", "preparation": "20.0% (20.0%)",
        "× lean": "2.25 (2.25–2.25)", "× best": "0.90 (0.90–0.90)", "× PyTorch NHWC": "3.00 (3.00–3.00)",
        "× PyTorch NCHW": "–", "× TF32": "0.45 (0.45–0.45)", "× implicit_gemm": "2.00 (2.00–2.00)",
        "largest error": "1.0e-06",
    }  # fmt: skip
    assert found["Γ8(6,3)"]["× lean"] == "2.10 (1.12–2.25)"  # 2.25 · 0.5 ** 0.1
    assert found["all"]["count"] == "90" and found["all"]["TFLOP/s"] == "45.0–130"


def verdicts(results: Results) -> list[str]:
    return [line[-1] for line in goal_table(results)[1]]


def test_targets_are_met_or_not() -> None:
    assert verdicts(measured()) == ["yes"] * 6 and verdicts(measured("opencnn")) == ["yes"] * 3
    assert verdicts(measured(**{"g8(2,7)-64x8x8x512": 39.0})) == ["yes", "yes", "no", "yes", "yes", "yes"]
    table = made_up.rows_of(goal_table(measured(**{"g8(6,3)-64x128x128x64": 74.9})))
    assert table["Γ8(6,3), rows of 32 outputs and more: TFLOP/s of each"] == {
        "target": "Γ8(6,3), rows of 32 outputs and more: TFLOP/s of each", "asked": "≥ 75",
        "measured": "74.9 to 90.0; 4 of 5 reach it", "met": "no",
    }  # fmt: skip
    assert verdicts(measured(**{"g8(6,3)-128x24x24x256": 74.9})) == ["yes"] * 6, "its rows are short"
    assert verdicts(measured(**{"g16(9,8)-64x9x9x512": 119.0})) == ["yes"] * 5 + ["no"]
    every_g16 = {case.name: 99.0 for case in load_suite("winograd1d") if case.name.startswith("g16")}
    assert verdicts(measured(**every_g16)) == ["yes", "no", "yes", "yes", "yes", "no"]
    assert verdicts(measured("opencnn", **{"conv5-n32": 59.0})) == ["no", "yes", "yes"]
    assert verdicts(measured("opencnn", **{"conv3-n128": 64.0})) == ["yes", "yes", "no"]


def test_what_was_not_measured_is_not_met() -> None:
    results = measured()
    results.rows = [row for row in results.rows if row.problem != "g8(7,2)-32x128x128x128"]
    assert verdicts(results) == ["no", "yes", "no", "yes", "yes", "yes"]
    assert goal_table(results)[1][0][2] == "59 of 60 measured"
    part = replace(results, problems={n: about for n, about in results.problems.items() if n.startswith("g8(6,3)")})
    assert len(goal_table(part)[1]) == 3, "targets of other problems are no part of a part"
    with pytest.raises(KeyError):
        goal_table(replace(results, suite="im2win"))


def test_a_run_shows_families_and_targets(capsys: Any) -> None:
    show(measured(), full=False)
    shown = capsys.readouterr().out
    assert "0 + 4.10 kB" in shown and "which each call makes anew" in shown
    show(replace(measured(), machine=made_up.MACHINE | {"gpu": None, "cpu": "some", "cores": 2}), full=False)
    assert "targets" not in capsys.readouterr().out, "they are a GPU's"
    assert "Γ16(8,9)" in shown and "geometric mean of the ratio to cuDNN without workspace" in shown


def test_the_page_has_the_points_of_the_transforms() -> None:
    text = (ROOT / "docs" / "algorithms" / "im2col-winograd.md").read_text(encoding="utf-8")
    for alpha, widths in WIDTHS.items():
        pairs = " ".join(f"±{point}" for point in POINTS[1 : alpha - 1 : 2])
        kernels = " ".join(f"({alpha + 1 - width},{width})" for width in widths)
        assert f"| {alpha} | 0 {pairs} ∞ |" in text and f"| {alpha} | {kernels} |" in text


def test_blocks_of_families(tmp_path: Path) -> None:
    results, page = measured(), tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(made_up.blocks("families winograd1d algorithm=winograd1d", "targets winograd1d"))
    results.write(default_path(results, False, tmp_path))
    assert [*pages.fill_all(page.parent, tmp_path)] == [page]
    text = page.read_text()
    assert "| Γ8(6,3) | 10 | 90.0–90.0 | 20.0% (20.0%) |" in text and "| ≥ 2.5 | 3.25 | yes |" in text
