"""Convolution of 16 bits, channels last, whose filters are the rows of a product: each tile, forward and gradient, and
what it leaves to others."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_native.native_gemm_swapped import TILES
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

SWAPPED, OTHER = NAMED["native_gemm_swapped"], NAMED["native_gemm_16bit"]
HOPPER = TARGETS[0]
SMALL = ConvProblem(2, 64, 15, 21, 64, 3, 3, padding=(1, 1, 1, 1), dtype="float16", layout="NHWC")
#: Channels of one block and of several, filters that fill no tile, odd pixels, windows over one edge more than others.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"c": 40, "k": 72, "padding": (1, 0, 2, 1), "dtype": "bfloat16", "bias": True, "activation": "relu"},
    "one-tap": {
        "n": 1,
        "k": 136,
        "r": 1,
        "s": 1,
        "padding": (0, 0, 0, 0),
        "bias": True,
        "scale": True,
        "activation": "silu",
    },
    "strided": {"stride": (2, 2), "dilation": (1, 2), "groups": 2, "k": 84},
    "gradient": {"c": 72, "op": "dgrad"},
    "gradient-blocks": {"c": 136, "k": 72, "r": 2, "op": "dgrad", "dtype": "bfloat16"},
    "volume": {"d": 4, "t": 3, "h": 6, "w": 9, "padding_d": (1, 1)},
}
CASES = [(name, tile) for name in LAYERS for tile in TILES]


@pytest.mark.parametrize(
    ("name", "tile"), selection.marked(CASES, CASES[::2], lambda case: (case, f"{case[0]}-{case[1][1]}-{case[1][2]}"))
)
def test_every_tile_is_right(name: str, tile: tuple[int, int, int]) -> None:
    problem = replace(SMALL, **LAYERS[name])
    found = [each for each in SWAPPED.configs(problem, HOPPER) if (each.warpgroups, each.m_tiles, each.filters) == tile]
    assert found
    for config in found:
        proof.check(SWAPPED, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "NCHW"}, "'NCHW' is not NHWC"), ({"add": True}, "a residual"), ({"accumulate": True}, "a residual"),
        ({"op": "dgrad", "c": 36}, "36 channels are no whole 16 bytes"),
        ({"op": "dgrad", "stride": (2, 2)}, "the gradient has several phases"), ({"c": 36}, "36 channels of 16 bits"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_compute_has_a_sentence(changes: dict[str, Any], reason: str) -> None:
    assert any(reason in each for each in SWAPPED.why_not(replace(SMALL, **changes), HOPPER))


@pytest.mark.parametrize("changes", [{}, {"bias": True, "scale": True, "activation": "silu"}, {"op": "dgrad"}], ids=str)
@pytest.mark.parametrize("k", [64, 128])
def test_it_compiles_without_spills(k: int, changes: dict[str, Any]) -> None:
    """No product waits for another."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(SMALL, n=8, c=128, h=128, w=128, k=k, **changes)
    for config in SWAPPED.configs(problem, HOPPER):
        code = compile_launch(SWAPPED.plan(problem, config, HOPPER).launches[0], "sm_90a")
        assert (code.spill_bytes, code.advice) == (0, ()) and code.registers <= 168


def test_nobody_knows_how_long_it_takes() -> None:
    """Its tiles are in the order of the zeros that they multiply."""
    problem = replace(SMALL, n=8, c=128, h=256, w=256)
    assert choose(problem, HOPPER).algorithm is OTHER
    found = SWAPPED.timed(problem, HOPPER)
    assert all(cycles == inf for cycles, _ in found)
    assert [(each.m_tiles, each.filters) for _, each in found] == [(3, 64), (2, 64), (2, 128)]
    assert SWAPPED.timed(replace(problem, k=256), HOPPER)[0][1].filters == 128
