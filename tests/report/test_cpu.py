"""The CPU engine beside PyTorch: what is measured, the committed record, its page; memory that is kept."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
    row = cpu.row("some", problem)
    able = {algorithm.name for algorithm in CPU_ALGORITHMS if not algorithm.reasons(problem, None)}
    assert set(row["us"]) == {*able, "PyTorch"} and row["chosen"] in able
    assert cpu.excess(row) >= 1


def test_the_committed_record_is_whole_and_the_choice_is_good() -> None:
    rows = records.read(RECORD)["rows"]
    words = [cpu.format_problem(problem) for _, problem in cpu.every()]
    assert [row["problem"] for row in rows] == words
    within = sum(cpu.excess(row) <= 1.1 for row in rows)
    assert within >= 0.97 * len(rows)
    text = cpu.section(records.read(RECORD))
    assert f"Of {len(rows)} choices {within} are within 1.1×" in text
    assert all(f"| {group} |" in text for group in cpu.layers("NCHW"))


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
