"""How the CPU engine cuts layers: blocks, bands of columns, runs of a row; against the oracle, with cuts everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv.cpu import CPU_ALGORITHMS, blocks, depthwise, oracle
from leanconv.cpu.direct import Direct
from leanconv.cpu.layers import LayerAlgorithm
from leanconv.problem import ConvProblem
from tests.cases import draw_conv


def layers(count: int, one_channel: bool = False) -> list[ConvProblem]:
    """Small layers of every kind, among them windows that see nothing but padding."""
    rng, found = np.random.default_rng(3), []
    while len(found) < count:
        groups = int(rng.integers(1, 7)) if one_channel else int(rng.choice([1, 1, 2]))
        c, k = (groups, groups * int(rng.choice([1, 1, 2, 3]))) if one_channel else (3 * groups, 2 * groups)
        h, w, r, s = (int(rng.integers(1, most)) for most in (8, 40, 6, 6))
        unit = rng.random() < 0.5
        problem = ConvProblem(
            int(rng.integers(1, 3)), c, h, w, k, r, s,
            stride=(1, 1) if unit else tuple(map(int, rng.integers(1, 4, 2))),  # type: ignore[arg-type]
            dilation=(1, 1) if unit else tuple(map(int, rng.integers(1, 4, 2))),  # type: ignore[arg-type]
            padding=tuple(map(int, rng.integers(0, 14, 4))), groups=groups, bias=bool(rng.integers(2)),  # type: ignore[arg-type]
            layout=str(rng.choice(["NCHW", "NHWC", "CHWN"])), activation="relu" if rng.integers(2) else None,  # type: ignore[arg-type]
        )  # fmt: skip
        if problem.p > 0 and problem.q > 0:
            found.append(problem)
    return found


def check(algorithm: Any, problem: ConvProblem) -> None:
    inputs = draw_conv(problem, "zero-mean")
    given = inputs["x"], inputs["w"], inputs["bias"]
    error = oracle.relative_error(algorithm.run(problem, *given), oracle.conv2d(problem, *given))
    assert error < 1e-6, (algorithm.name, problem, error)


@pytest.mark.parametrize(
    "algorithm", [a for a in CPU_ALGORITHMS if isinstance(a, LayerAlgorithm)], ids=lambda a: a.name
)
def test_blocks_and_bands_of_columns(algorithm: LayerAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "most_pixels", lambda pixel_bytes, budget: 5)
    cut = 0
    for problem in layers(150):
        if not algorithm.reasons(problem, None):
            cut += problem.q > 7
            check(algorithm, problem)
    assert cut > 15 or algorithm.name in ("winograd2d", "single_channel")  # which take few of them


def test_a_band_that_sees_only_padding_has_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "most_pixels", lambda pixel_bytes, budget: 5)
    problem = ConvProblem(1, 2, 1, 3, 4, 1, 2, padding=(0, 0, 20, 20), bias=True)
    for algorithm in CPU_ALGORITHMS:
        if isinstance(algorithm, LayerAlgorithm) and not algorithm.reasons(problem, None):
            check(algorithm, problem)


@pytest.mark.parametrize("run", [1, 1 << 20], ids=["cut-rows", "whole-rows"])
def test_depthwise(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depthwise, "FILTER_BYTES", run)
    monkeypatch.setattr(depthwise, "LEAST_RUN", run)
    for problem in layers(200, one_channel=True):
        check(Direct(), problem)
