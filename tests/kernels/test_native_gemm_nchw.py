"""16-bit elements of NCHW on tensor cores: every tile, how pixels are numbered, limits by name, tile after tile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_native.native_gemm_nchw import TILES, image_pixels, window_lines
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof
from tests.cases import TARGETS, draw_conv
from tests.cases_narrow import NARROW_CASES
from tests.variants import NAMED

WINDOW = NAMED["native_gemm_nchw"]
HOPPER = TARGETS[0]
LAYER = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), dtype="float16", bias=True, activation="relu")
GRADIENT = replace(LAYER, op="dgrad", bias=False, activation=None)


def named(name):
    return next(case.problem for case in NARROW_CASES if case.name == f"{name}-nchw")


def test_pixels_are_numbered_with_zeros_between_rows_and_images():
    assert (image_pixels(LAYER), window_lines(LAYER, 128)) == (57 * 57, 128 + 2 * 57 + 2 + 1)
    # windows that stay inside need no zeros; outputs are fewer than pixels then
    assert image_pixels(replace(LAYER, padding=(0, 0, 0, 0))) == 56 * 56
    # four planes, of which each has every other row and column
    assert image_pixels(replace(LAYER, stride=(2, 2))) == 29 * 29
    assert window_lines(replace(LAYER, stride=(2, 2)), 128) == 4 * (128 + 29 + 1) + 1
    # one tap sees one plane
    assert window_lines(replace(LAYER, stride=(2, 2), r=1, s=1, padding=(0, 0, 0, 0)), 128) == 129


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile_is_right(tile):
    problem = replace(named("float16-windows"), k=tile[2] + 8)
    config = next(c for c in WINDOW.configs(problem, HOPPER) if (c.warpgroups, c.blocks, c.filters) == tile)
    proof.check(WINDOW, problem, config, kinds=("positive",))


@pytest.mark.parametrize("w", [11, 14, 12], ids=["one-by-one", "pairs", "fours"])
@pytest.mark.parametrize("h", [7, 8], ids=["odd", "even"])
def test_blocks_compute_tile_after_tile(w, h):
    """Two blocks for many tiles: warps that load go round windows of all of them; images of any size are stored."""
    few = replace(HOPPER, multiprocessors=2)
    problem = ConvProblem(5, 40, h, w, 40, 3, 3, padding=(1, 1, 1, 1), dtype="bfloat16", bias=True)
    config = next(iter(WINDOW.configs(problem, few)))
    plan = WINDOW.plan(problem, config, few)
    assert plan.launches[0].grid == 2
    proof.check(WINDOW, problem, config, kinds=("zero-mean",), change=lambda _: plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"padding": (-1, -2, -1, 0)},
        {"padding": (4, 0, 0, 6)},
        {"r": 1, "s": 7, "padding": (0, 0, 3, 3)},
        {"stride": (2, 2), "dilation": (2, 4), "padding": (2, 1, 3, 2)},
        {"stride": (3, 1), "r": 2, "padding": (1, 0, 1, 1)},
        {"n": 1, "h": 3, "w": 3, "padding": (0, 0, 0, 0)},
        {"groups": 4, "stride": (1, 2)},
        {"op": "dgrad", "stride": (2, 3), "padding": (1, 0, 2, 1), "dilation": (1, 2)},
        {"op": "dgrad", "r": 1, "s": 1},
        {"op": "dgrad", "r": 1, "s": 1, "stride": (1, 3), "padding": (0, 0, -2, 0)},
        {"r": 4, "s": 4, "stride": (4, 4), "padding": (0, 0, 0, 0)},
    ],
    ids=str,
)
def test_windows_of_all_kinds_are_right(changes):
    problem = ConvProblem(2, 24, 9, 13, 20, 3, 3, padding=(1, 1, 1, 1), dtype="float16")
    proof.check(WINDOW, replace(problem, **changes), kinds=("zero-mean",))


@pytest.mark.parametrize(
    "changes",
    [{}, {"groups": 2, "c": 64, "k": 80}, {"op": "dgrad", "bias": False, "activation": None}, {"accumulate": True}],
    ids=str,
)
def test_windows_of_one_tap_may_be_copied(changes):
    """Images of 40 pixels, which a copy of 64 brings with zeros behind them."""
    problem = ConvProblem(3, 40, 5, 8, 72, 1, 1, dtype="bfloat16", bias=True, activation="relu")
    problem = replace(problem, **changes)
    copied = [config for config in WINDOW.configs(problem, HOPPER) if config.copied]
    for config in (copied[0], copied[-1]):
        proof.check(WINDOW, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize(
    "changes", [{"w": 7}, {"padding": (1, 0, 0, 0)}, {"stride": (2, 1)}, {"r": 3}, {"groups": 5}], ids=str
)
def test_other_windows_are_not_copied(changes):
    problem = replace(ConvProblem(3, 40, 5, 8, 70, 1, 1, dtype="float16"), **changes)
    assert not any(config.copied for config in WINDOW.configs(problem, HOPPER))


@pytest.mark.parametrize("name", ["float16-groups", "bfloat16-gradient-stride"])
def test_wide_offsets_are_right(name):
    problem = named(name)
    config = next(iter(WINDOW.configs(problem, HOPPER)))
    wide = proof.wide_offsets(WINDOW, problem, config, HOPPER)
    proof.check(WINDOW, problem, config, kinds=("zero-mean",), change=lambda plan: wide)


def test_an_infinity_reaches_the_outputs_that_see_it_and_no_other():
    """Zeros between rows are no pixels: no product of an output has a pixel beyond its window."""
    problem = replace(named("float16-windows"), bias=False, activation=None)
    given = draw_conv(problem, "positive")
    given["x"][1, 5, 4, 0], given["x"][2, 79, 8, 11] = np.inf, np.nan
    y = np.full(problem.y_shape, 7, "float16")
    config = next(iter(WINDOW.configs(problem, HOPPER)))
    proof.run_on_emulator(WINDOW.plan(problem, config, HOPPER), {**given, "y": y})
    seen = np.zeros(y.shape, bool)
    seen[1, :, 3:6, 0:2] = seen[2, :, 7:9, 10:12] = True
    np.testing.assert_array_equal(np.isfinite(y), ~seen)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "wgrad", "bias": False, "activation": None}, "op='wgrad'"),
        ({"layout": "NHWC"}, "layout='NHWC' is not NCHW"),
        ({"layout": "CHWN"}, "layout='CHWN' is not NCHW"),
        ({"n": 0}, "n=0"),
        ({"n": 700000}, "images have more than 2146435072 pixels"),
        ({"n": 1, "c": 1, "h": 30000, "w": 30000, "r": 1, "s": 1, "padding": (0, 0, 0, 0)}, "images have more than"),
        ({"n": 4300000, "c": 1024, "k": 1024, "groups": 1024, "h": 1, "w": 1}, "outputs are more than"),
        ({"stride": (1, 65)}, "stride=(1, 65) is more than 64"),
        ({"w": 4000}, "windows of 128 outputs see 8133 pixels"),
        ({"h": 200, "w": 200, "r": 65, "s": 65}, "filters have 4225 taps, more than 4096"),
    ],
)  # fmt: skip
def test_limits_are_named(changes, reason):
    assert not WINDOW.reasons(LAYER, HOPPER)
    reasons = WINDOW.reasons(replace(LAYER, **changes), HOPPER)
    assert any(reason in each for each in reasons), reasons


@pytest.mark.parametrize("target", TARGETS[1:], ids=lambda target: target.arch)
def test_other_gpus_are_refused(target):
    assert WINDOW.reasons(LAYER, target) == [
        f"{target.arch} has no products of warpgroups (wgmma), which only sm_90a has"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"accumulate": True, "w": 54, "c": 24, "k": 133}, marks=pytest.mark.exhaustive),
        pytest.param({"stride": (2, 2), "dtype": "bfloat16"}, marks=pytest.mark.exhaustive),
        pytest.param({"r": 1, "s": 1, "padding": (0, 0, 0, 0), "w": 55}, marks=pytest.mark.exhaustive),
        pytest.param({"r": 1, "s": 1, "padding": (0, 0, 0, 0)}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"op": "dgrad", "bias": False, "activation": None, "stride": (2, 1)}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=str,
)
def test_tiles_compile_without_spills(changes):
    """No product waits for another, and the registers of all threads fit."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(LAYER, **changes)
    for config in WINDOW.configs(problem, HOPPER):
        figure = compile_launch(WINDOW.plan(problem, config, HOPPER).launches[0], "sm_90a")
        assert (figure.spill_bytes, figure.stack_bytes, figure.advice) == (0, 0, ()), config


def test_auto_takes_it_in_nchw():
    assert choose(LAYER, HOPPER).algorithm is WINDOW
    assert choose(GRADIENT, HOPPER).algorithm is WINDOW
    assert choose(replace(LAYER, layout="NHWC"), HOPPER).algorithm is not WINDOW


def test_tiles_are_those_that_filters_fill():
    """Prepared filters are rounded up to whole tiles: at most twice as many, and 32 at least."""
    for k, most in ((16, 32), (64, 64), (65, 128), (256, 256), (1000, 256)):
        problem = replace(LAYER, k=k, bias=False)
        assert max(config.filters for config in WINDOW.configs(problem, HOPPER)) == most
        rounded = max(-(-k // config.filters) * config.filters for config in WINDOW.configs(problem, HOPPER))
        assert WINDOW.prepared_bytes(problem) == 2 * 9 * 256 * rounded
