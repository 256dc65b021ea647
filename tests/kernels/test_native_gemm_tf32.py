"""TF32 on tensor cores: both factors rounded to the nearest, every tile, limits by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.hopper_native.native_gemm_tf32 import TILES
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof, selection
from tests.cases import TARGETS, draw_conv
from tests.cases_tensor import TF32_CASES
from tests.variants import NAMED

TF32 = NAMED["native_gemm_tf32"]
LAYER = ConvProblem(
    32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="tf32", bias=True, activation="relu"
)


CASES = {case.name: case.problem for case in TF32_CASES}


@pytest.mark.parametrize("name", CASES)
def test_right_on_emulator(name):
    proof.check(TF32, CASES[name], kinds=("zero-mean",))


def tiles():
    """Every tile on filters that it does not divide; in ``make test`` as few as have every number."""
    problem = CASES["tf32-copies-nhwc"]
    found = list(TF32.configs(problem, TARGETS[0]))
    assert {(c.warpgroups, c.blocks, c.filters) for c in found} == set(TILES)
    numbers = ("warpgroups", "blocks", "split")
    few = selection.cover(found, lambda config: [(c, v) for c, v in config.constants() if c in numbers])
    return selection.marked(found, few, lambda c: ((problem, c), f"{c.warpgroups}x{c.blocks}x{c.filters}-{c.split}"))


@pytest.mark.parametrize(("problem", "config"), tiles())
def test_every_tile_is_right(problem, config):
    proof.check(TF32, problem, config, kinds=("positive",))


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_both_factors_are_rounded_to_the_nearest(op):
    """Positive factors, cut off, would make results smaller by 7e-4; rounded, their errors have both signs."""
    problem = ConvProblem(1, 32, 6, 6, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="tf32", op=op)
    given = draw_conv(problem, "positive")
    out = problem.operands[-1]
    given[out.role] = np.full(out.shape, np.nan, "float32")
    config = next(iter(TF32.configs(problem, TARGETS[0])))
    proof.run_on_emulator(TF32.plan(problem, config, TARGETS[0]), given)
    read = problem.operands[0].role
    exact = oracle.conv2d(problem, given[read], given["w"])
    assert abs(float((given[out.role] / exact - 1).mean())) < 3e-5


def test_integers_of_eleven_bits_are_exact():
    problem = replace(CASES["tf32-copies-long-nhwc"], bias=False)
    random = np.random.default_rng(3)
    x = random.integers(-2047, 2048, problem.x_shape).astype("float32")
    w = random.integers(-1, 2, problem.w_shape).astype("float32")
    y = np.full(problem.y_shape, np.nan, "float32")
    config = next(iter(TF32.configs(problem, TARGETS[0])))
    proof.run_on_emulator(TF32.plan(problem, config, TARGETS[0]), {"x": x, "w": w, "bias": None, "y": y})
    assert (y == oracle.conv2d(problem, x, w)).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "fp32"}, "precision"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC"),
        ({"c": 254}, "254 channels of 32 bits are no multiple of 16 bytes"),
        ({"c": 12, "k": 24, "groups": 3}, "groups=3 leaves 4 channels in a group, no multiple of 8"),
    ],
)
def test_limits_are_named(changes, reason):
    assert not TF32.reasons(LAYER, TARGETS[0])
    reasons = TF32.reasons(replace(LAYER, **changes), TARGETS[0])
    assert any(reason in each for each in reasons), reasons


@pytest.mark.parametrize("way", ["bias", pytest.param("split", marks=pytest.mark.exhaustive)])
def test_tiles_compile_without_spills(way):
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = LAYER if way == "bias" else replace(LAYER, n=1, h=7, w=7)
    for config in TF32.configs(problem, TARGETS[0]):
        if (config.split > 1) == (way == "split"):
            figure = compile_launch(TF32.plan(problem, config, TARGETS[0]).launches[0], "sm_90a")
            assert (figure.spill_bytes, figure.stack_bytes, figure.advice) == (0, 0, ()), config
