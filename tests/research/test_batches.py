"""The table of docs/batch-invariance.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from leanconv.call.batches import BATCHES
from leanconv.call.choose import choose
from report import records
from research import batches, pages
from tests import made_up
from tests.cases import TARGETS


def row(layer: str, ours: float) -> dict[str, Any]:
    us = {str(n): [10.0 * n, ours * 10 * n] for n in BATCHES}
    equal = {"auto": False, "invariant": True}
    return {"layer": layer, "layout": "NHWC", "algorithm": "tensor_gemm", "equal": equal, "us": us}


def test_times_are_beside_those_of_the_default(tmp_path: Path) -> None:
    _, lines = batches.table([row("a", 2.0), row("b", 0.5)])
    assert lines[0] == [
        "a", "NHWC", "tensor_gemm", "20.0 (2.00)", "160.0 (2.00)", "640.0 (2.00)", "2560.0 (2.00)", "yes", "no",
    ]  # fmt: skip
    assert lines[2][0] == "geometric mean" and lines[2][3:7] == ["(1.00)"] * 4
    records.write(tmp_path, "batch-invariance", made_up.ABOUT, [row("a", 2.0), row("64, 56 × 56, 3 × 3", 1.0)])
    text = made_up.filled(tmp_path, "batches batch-invariance", by=pages)
    assert "1 of the study's 30 layers were measured, and 1 that it does not list any more." in text
    assert "NVIDIA X, 2026-11-22, revision abc000000000." in text and "| a | NHWC | tensor_gemm | 20.0 (2.00) |" in text


def test_every_layer_has_an_algorithm_for_all_batches() -> None:
    names = [(name, problem.layout) for name, problem in batches.layers()]
    assert len(set(names)) == len(names)
    for _, problem in batches.layers():
        choose(replace(problem, n=128, batch_invariant=True), TARGETS[0])
