"""1x1 convolution of few channels and filters in 16 bits, channels last: each tile, forward and gradient, rows of every
length, tiles that no image fills, and what it leaves to others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.call.explain import NOMINAL
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from tests import emulator, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

SKINNY = NAMED["native_gemm_skinny"]
HOPPER = TARGETS[0]
SMALL = ConvProblem(3, 24, 14, 14, 72, 1, 1, dtype="float16", layout="NHWC")
#: Channels and filters of one step and of several, that are whole steps, halves and pairs; tiles that images end in.
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"c": 144, "k": 24, "dtype": "bfloat16", "bias": True, "activation": "relu"},
    "pairs": {"h": 4, "w": 6, "c": 58, "k": 58, "bias": True, "scale": True, "activation": "silu"},
    "blocks": {"c": 64, "k": 136, "n": 1, "add": True, "bias": True},
    "gradient": {"c": 40, "k": 120, "op": "dgrad"},
    "gradient-pairs": {"c": 58, "k": 28, "op": "dgrad", "dtype": "bfloat16", "accumulate": True},
}
TILES = [(warps, m_tiles, stages) for warps in (4, 8) for m_tiles in (1, 2) for stages in (2, 3)]
CASES = [(name, tile) for name in LAYERS for tile in TILES]


@pytest.mark.parametrize(
    ("name", "tile"),
    selection.marked(CASES, CASES[::3], lambda case: (case, f"{case[0]}-{'-'.join(map(str, case[1]))}")),
)
def test_every_tile_is_right(name: str, tile: tuple[int, int, int]) -> None:
    problem = replace(SMALL, **LAYERS[name])
    found = [each for each in SKINNY.configs(problem, HOPPER) if (each.warps, each.m_tiles, each.stages) == tile]
    for config in found:
        proof.check(SKINNY, problem, config, kinds=("zero-mean",))
    assert len(found) == 1 or (name == "bias" and tile == (8, 2, 3))


def test_a_cta_takes_several_tiles() -> None:
    """More than it has stages, so that pixels overwrite others, and outputs others that are stored."""
    few = replace(HOPPER, multiprocessors=1)
    for changes in ({}, {"op": "dgrad"}, {"add": True, "bias": True}):
        problem = replace(SMALL, n=13, h=8, w=9, k=32, **changes)
        config = next(
            each for each in SKINNY.configs(problem, few) if (each.warps, each.m_tiles, each.stages) == (4, 1, 2)
        )
        config = replace(config, min_blocks=2)
        assert SKINNY.plan(problem, config, few).launches[0].grid == 2
        proof.check(SKINNY, problem, config, kinds=("zero-mean",), target=few)


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_what_is_not_finite_reaches_its_own_pixel_alone(op: str) -> None:
    """Behind a pixel's channels lie the next pixel's, and zeros behind the filters'."""
    rng = np.random.default_rng(3)
    layer = replace(SMALL, h=6, w=8, c=58, k=26, op=op)
    read, filters, *_, written = layer.operands
    x, w = (rng.standard_normal(each.shape).astype("float16") for each in (read, filters))
    x[0, 3, 5, 1], x[1, 0, 0, 0] = np.inf, np.nan
    result = np.zeros(written.shape, "float16")
    config = next(iter(SKINNY.configs(layer, HOPPER)))
    emulator.run_plan(SKINNY.plan(layer, config, HOPPER), {read.role: x, "w": w, written.role: result, "bias": None})
    met = np.zeros(result.shape[:3], bool)
    met[0, 3, 5] = met[1, 0, 0] = True
    assert np.array_equal(~np.isfinite(result).all(3), met)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "NCHW"}, "'NCHW' is not NHWC"), ({"dtype": "float32"}, "dtype"),
        ({"stride": (2, 1)}, "stride=(2, 1)"), ({"padding": (0, 1, 0, 0)}, "padding=(0, 1, 0, 0)"),
        ({"r": 3, "h": 16}, "3x1 taps are not 1x1"), ({"c": 144, "k": 72, "groups": 3}, "groups=3"),
        ({"n": 0}, "n=0"), ({"c": 14}, "14 channels are not an even number from 16 to 256"),
        ({"k": 75}, "75 filters are not"), ({"k": 258}, "258 filters are not"),
        ({"h": 7, "w": 7, "c": 58}, "an image of 58 channels is no multiple of 16 bytes"),
        ({"h": 7, "w": 7, "k": 58}, "an image of 58 filters is no multiple of 16 bytes"),
        ({"c": 256, "k": 256}, "do not fit into shared memory"),
    ],
)  # fmt: skip
def test_what_it_cannot_compute_is_said(changes: dict[str, Any], reason: str) -> None:
    found = SKINNY.why_not(replace(SMALL, **changes), HOPPER)
    assert any(reason in each for each in found), found


def test_bulk_copies_are_of_sm_90_and_newer() -> None:
    assert not SKINNY.why_not(SMALL, Target("sm_120", 170))
    assert any("sm_89 has no bulk copies" in each for each in SKINNY.why_not(SMALL, Target("sm_89", 128)))


def test_banks_that_meet_often_cost_time() -> None:
    def us(c: int, k: int) -> float:
        return min(time for time, _ in SKINNY.timed(replace(SMALL, n=64, h=56, w=56, c=c, k=k), NOMINAL))

    assert us(72, 24) < us(64, 24) and us(128, 24) > 1.3 * us(120, 24)
