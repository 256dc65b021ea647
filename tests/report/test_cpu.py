"""The CPU engine beside PyTorch: what is measured, the committed record, its page; memory that is kept."""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench.suites import format_problem
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.cpu.layers import keep_freed_memory
from leanconv.cpu.winograd1d import Winograd1d
from leanconv.problem import ConvProblem
from report import cpu, records

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "cpu" / "choice.json"


def test_the_least_sample_counts() -> None:
    def work(seconds: float) -> Any:
        def call() -> None:
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass

        return call

    us = cpu.alternating({"slow": work(0.002), "quick": work(0.001)}, number=3, sample_s=0.001)
    assert 1000 <= us["quick"] < us["slow"] and us["slow"] >= 2000


def test_a_row_has_every_engine() -> None:
    pytest.importorskip("torch")
    problem = ConvProblem(1, 4, 6, 9, 8, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    row, calls = cpu.row("some", problem)
    able = {algorithm.name for algorithm in CPU_ALGORITHMS if not algorithm.reasons(problem, None)}
    assert set(row["us"]) == {*able, "PyTorch"} and row["chosen"] in able
    assert cpu.excess(row) >= 1 and set(calls) == set(row["us"])


def test_a_measurement_is_cut_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By time; a second run adds what is missing, and what is slow has one round."""
    pytest.importorskip("torch")
    times = {"quick": 10.0, "slow": 100.0}
    asked: list[set[str]] = []

    def alternating(calls: dict[str, Any]) -> dict[str, float]:
        asked.append(set(calls))
        times["quick"] -= 0.5
        return {name: times[name] for name in calls}

    def row(group: str, problem: ConvProblem) -> Any:
        engines = {"quick": int, "slow": int}
        return {"group": group, "problem": format_problem(problem), "us": alternating(engines)}, engines

    problems = [("some", ConvProblem(1, c, 3, 3, 1, 1, 1)) for c in (1, 2, 3)]
    for name, value in {"alternating": alternating, "row": row, "every": lambda: problems, "TOGETHER": 2}.items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setitem(cpu.GIVEN, "modules", {"nothing": "no_such_module"})
    path = cpu.measure(tmp_path, "0" * 40, seconds=0)
    assert not asked and not path.exists()
    clock = iter([0.0, 0.0, 7.0, 8.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    cpu.measure(tmp_path, "0" * 40, seconds=10)
    first = records.read(path)["rows"]
    assert [each["problem"] for each in first] == [format_problem(problem) for _, problem in problems[:2]]
    assert asked[:2] == [{"quick", "slow"}] * 2 and asked[2:] == [{"quick"}] * 2 * (cpu.ROUNDS - 1)
    assert [each["us"]["slow"] for each in first] == [100.0, 100.0]
    assert [each["us"]["quick"] for each in first] == [10 - 0.5 * (len(asked) - 1), 10 - 0.5 * len(asked)]
    monkeypatch.undo()
    for name, value in {"alternating": alternating, "row": row, "every": lambda: problems}.items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setitem(cpu.GIVEN, "modules", {"nothing": "no_such_module"})
    cpu.measure(tmp_path, "0" * 40)
    assert records.read(path)["rows"][:2] == first and len(records.read(path)["rows"]) == 3


def test_the_committed_record_is_whole_and_the_choice_is_good() -> None:
    rows = records.read(RECORD)["rows"]
    words = [format_problem(problem) for _, problem in cpu.every()]
    assert [row["problem"] for row in rows] == words
    within = sum(cpu.excess(row) <= 1.1 for row in rows)
    assert within >= 0.97 * len(rows)
    text = cpu.section(records.read(RECORD))
    assert f"Of {len(rows)} choices {within} are within 1.1×" in text
    assert all(f"| {group} |" in text for group in cpu.GIVEN["layers"])
    assert (
        "every second of the layers of ResNet-50 (suite `resnet-50`), " in text and "every third of the depth" in text
    )


def test_the_table_has_pytorch_in_its_better_layout_and_in_the_same() -> None:
    def row(layout: str, ours: float, theirs: float) -> dict[str, Any]:
        problem = format_problem(ConvProblem(1, 8, 9, 9, 4, 3, 3, layout=layout))  # type: ignore[arg-type]
        us = {"im2win": ours, "PyTorch": theirs}
        return {"group": "some", "layout": layout, "problem": problem, "chosen": "im2win", "us": us}

    heads, lines = cpu.table({"rows": [row("NCHW", 8, 10), row("NHWC", 4, 5)]})
    line = dict(zip(heads, lines[0], strict=True))
    assert line["NCHW: × PyTorch's time"] == "1.60 (1.60)" and line["NCHW: × its time in this layout"] == "0.80 (0.80)"
    assert line["NHWC: × PyTorch's time"] == line["NHWC: × its time in this layout"] == "0.80 (0.80)"


def test_the_committed_calls_are_those_that_are_listed() -> None:
    rows = records.read(RECORD.with_name("calls.json"))["rows"]
    listed = list(cpu.calls())
    assert [row["problem"] for row in rows] == [given["call"] for _, given in listed]
    assert sum(about["group"].startswith("signals") for about, _ in listed) == 20 and len(listed) == 60
    text = cpu.calls_section(records.read(RECORD.with_name("calls.json")))
    assert all(f"| {about['group']} |" in text for about, _ in listed)
    mean = statistics.geometric_mean(map(cpu.beside, rows))
    assert f"| all | {mean:.2f} ({max(map(cpu.beside, rows)):.2f}) |" in text and mean <= 1.1


@pytest.mark.parametrize("at", [0, 29])
def test_a_call_is_measured_beside_others_that_compute_the_same(at: int) -> None:
    for module in cpu.GIVEN["modules"].values():
        pytest.importorskip(module)
    about, given = list(cpu.calls())[at]
    row, _ = cpu.call_row(about, given)
    assert row["group"] == about["group"] and set(row["us"]) == {"leanconv", *given["others"]} and cpu.beside(row) > 0
    with pytest.raises(RuntimeError, match="Wrong is .* apart"):
        cpu.call_row(about, {**given, "others": {"Wrong": f"{given['call']} + 3"}})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its thresholds are glibc's")
def test_temporaries_stay_in_memory() -> None:
    resource = pytest.importorskip("resource")
    problem = ConvProblem(1, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1))
    x, w = np.ones(problem.x_shape, np.float32), np.ones(problem.w_shape, np.float32)
    keep_freed_memory()
    for _ in range(3):
        Winograd1d().run(problem, x, w)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    Winograd1d().run(problem, x, w)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 300
