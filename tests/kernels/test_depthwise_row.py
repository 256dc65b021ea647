"""Depthwise convolution with short filters of one row: paddings, tails, element types, and its limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import conv1d, explain
from leanconv.call.choose import choose
from leanconv.kernels.depthwise.depthwise_row import MOST_LOADS, vector_loads
from leanconv.problem import ConvProblem
from tests import cases, proof
from tests.cases import TARGETS
from tests.variants import NAMED

ROW = NAMED["depthwise_row"]


def layer(c: int, w: int, s: int, n: int = 2, h: int = 1, multiplier: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(n, c, h, w, c * multiplier, 1, s, groups=c, **rest)


LAYERS = {
    "causal": layer(3, 1100, 4, padding=(0, 0, 3, 0), bias=True, activation="relu"),
    "same": layer(3, 612, 9, padding=(0, 0, 4, 4)),
    "anticausal": layer(2, 540, 4, padding=(0, 0, 0, 3)),
    "two-taps": layer(2, 36, 2, padding=(0, 0, 1, 0)),
    "one-tap": layer(2, 36, 1),
    "unpadded": layer(2, 72, 5),
    "many-rows": layer(3, 40, 7, h=5, padding=(1, 2, 3, 3)),
    "multiplier": layer(3, 44, 3, multiplier=3, padding=(0, 0, 1, 1), bias=True),
    "most-taps": layer(2, 600, 28, padding=(0, 0, 27, 0)),
    "dilation": layer(2, 600, 5, dilation=(1, 3), padding=(0, 0, 12, 0)),
    "padding-over-row": layer(2, 8, 7, padding=(0, 0, 20, 18)),
    "accumulate": layer(3, 300, 4, padding=(0, 0, 3, 0), accumulate=True),
    "float16": layer(3, 1044, 4, padding=(0, 0, 3, 0), dtype="float16", bias=True),
    "bfloat16": layer(3, 44, 8, padding=(0, 0, 3, 4), dtype="bfloat16", activation="relu"),
    "gradient": layer(3, 300, 4, padding=(0, 0, 3, 0), op="dgrad"),
    "gradient-padding-over-filter": layer(3, 44, 5, padding=(0, 0, 6, 6), op="dgrad"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_right(name: str) -> None:
    problem = LAYERS[name]
    configs = list(ROW.configs(problem, TARGETS[0]))
    for config in dict.fromkeys((configs[0], max(configs, key=lambda c: (c.vectors, -c.threads)))):
        proof.check(ROW, problem, config, kinds=cases.KINDS[:1])


def test_what_it_computes_and_what_not() -> None:
    def why(problem: ConvProblem) -> str:
        return "; ".join(ROW.reasons(problem, TARGETS[0]))

    for problem in LAYERS.values():
        assert not why(problem), problem
    causal = LAYERS["causal"]
    assert "layout='NHWC' is not 'NCHW'" in why(replace(causal, layout="NHWC"))
    assert "layout='CHWN' is neither" in why(replace(causal, layout="CHWN"))
    assert "a group has more than one channel" in why(replace(causal, groups=1))
    assert "it computes filters of one row at unit stride" in why(replace(causal, stride=(1, 2)))
    assert "a filter of 3x4 with stride=(1, 1)" in why(replace(causal, r=3, h=3))
    assert "rows of 1100 pixels and 1103 outputs are not both multiples of four" in why(
        replace(causal, padding=(0, 0, 3, 3))
    )
    assert "four outputs read 60 taps with dilation=1" in why(replace(causal, s=60, padding=(0, 0, 59, 0)))


def test_loads_are_those_of_the_window() -> None:
    for pad in range(-3, 9):
        for taps in range(1, 30):
            problem = layer(1, 400, taps, padding=(0, 0, pad, taps - 1 - pad))
            first, last = -pad, -pad + 3 + taps - 1
            assert vector_loads(problem) == last // 4 - first // 4 + 1
    assert vector_loads(LAYERS["most-taps"]) == MOST_LOADS


def test_causal_and_same_convolutions_of_signals_come_here() -> None:
    x, w = np.zeros((1, 768, 2048), np.float32), np.zeros((768, 1, 4), np.float32)
    for padding in ((3, 0), "same"):
        told = explain(conv1d, x, w, padding=padding, groups=768, device="cuda")
        assert told.chosen == "depthwise", padding
        assert isinstance(told.problem, ConvProblem) and choose(told.problem, TARGETS[0]).algorithm is ROW
    small = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    y = conv1d(small, np.ones((2, 1, 2), np.float32), padding=(1, 0), groups=2)
    assert y.tolist() == [[[0, 1, 3], [3, 7, 9]]]


def test_the_best_guess_keeps_enough_bytes_in_flight() -> None:
    """Blocks of 64 threads with one load each were the slowest by a quarter (H200, 12288 x 16384 samples, 4 taps)."""
    config: Any = choose(layer(12288, 16384, 4, n=1, padding=(0, 0, 3, 0)), TARGETS[0], "depthwise_row").config
    assert config.vectors >= 2
