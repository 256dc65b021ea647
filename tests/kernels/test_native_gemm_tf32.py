"""TF32 on tensor cores: both factors rounded to the nearest. More is in test_tensor_cores.py."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.problem import ConvProblem
from leanconv.words import parse_problem
from tests import proof
from tests.cases import TARGETS, draw_conv
from tests.cases_tensor import TF32_CASES
from tests.variants import NAMED

TF32 = NAMED["native_gemm_tf32"]


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
    problem = next(case.problem for case in TF32_CASES if case.name == "tf32-copies-long-nhwc")
    problem = problem.plain
    random = np.random.default_rng(3)
    x = random.integers(-2047, 2048, problem.x_shape).astype("float32")
    w = random.integers(-1, 2, problem.w_shape).astype("float32")
    y = np.full(problem.y_shape, np.nan, "float32")
    config = next(iter(TF32.configs(problem, TARGETS[0])))
    proof.run_on_emulator(TF32.plan(problem, config, TARGETS[0]), {"x": x, "w": w, "bias": None, "y": y})
    assert (y == oracle.conv2d(problem, x, w)).all()


def test_filters_are_rounded_where_all_windows_read_padding():
    """Such a layer's gradient needs no filters; the layer itself multiplies them by zeros."""
    problem = ConvProblem(2, 32, 1, 6, 32, 1, 3, stride=(2, 1), padding=(1, 1, 1, 1), layout="NHWC", precision="tf32")
    proof.check(TF32, problem, kinds=("zero-mean",))


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
def test_filters_of_all_slices_are_rounded(op):
    """So many that the launch which rounds those of one slice alone would end before the last."""
    problem = ConvProblem(
        1, 8, 5, 6, 16, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="tf32", op=op, d=3, t=3, padding_d=(1, 1)
    )
    proof.check(TF32, problem, kinds=("zero-mean",))


@pytest.mark.parametrize(
    ("words", "split", "us"),
    [
        ("c256,h64,k256", 4, 37.7),  # 32 clusters
        ("c512,h64,k256", 4, 60.5),
        ("c512,h32,k512", 8, 43.6),  # 16 clusters
        ("c1024,h32,k512", 8, 72.7),
        ("c128,h28,k128", 8, 14.4),  # 7 clusters
        ("n32,c512,h7,k512", 4, 35.6),  # 26 clusters
    ],
)
def test_clusters_that_find_no_place_wait(words, split, us):
    """Explored (H200, 6f49aa5 and 15b88ad0): 3x3 layers in tiles of 128 pixels and 256 filters."""
    problem = parse_problem(f"conv:{'' if words[0] == 'n' else 'n1,'}{words},r3,pad1,NHWC,tf32")
    (cycles,) = (
        cycles
        for cycles, config in TF32.within(problem, NOMINAL, inf)
        if (config.warpgroups, config.m_tiles, config.filters, config.split) == (2, 1, 256, split)
    )
    assert cycles / 1980 == pytest.approx(us, rel=0.12)
