"""16-bit elements on tensor cores: the rows that copies bring, long sums. More is in test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.dtypes import DTYPES
from leanconv.problem import ConvProblem
from tests import proof
from tests.cases import TARGETS, draw_conv
from tests.cases_16bit import NATIVE_CASES
from tests.kernels.tensor_cores import LAYERS
from tests.variants import NAMED

NHWC = NAMED["native_gemm_16bit"]
LAYER = LAYERS[NHWC.stem]


def named(name):
    return next(case.problem for case in NATIVE_CASES if case.name == f"{name}-nhwc")


def test_small_outputs_share_the_reduction_over_a_cluster():
    problem = named("float16-copies-long")
    config = next(iter(NHWC.configs(replace(problem, c=1024), TARGETS[0])))
    assert config.split > 1
    for split in (2, 4, 8):
        longer = replace(problem, c=256)
        config = next(c for c in NHWC.configs(longer, TARGETS[0]) if c.split == split)
        proof.check(NHWC, longer, config, kinds=("zero-mean",))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_of_one_sign_are_cut_by_less_than_a_unit(dtype):
    """The tensor core rounds toward zero: 2304 positive products lose at most 2^-23 of the sum each sixteen."""
    problem = ConvProblem(1, 256, 4, 4, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", dtype=dtype)
    given = draw_conv(problem, "positive")
    y = np.full(problem.y_shape, np.nan, dtype)
    config = next(iter(NHWC.configs(problem, TARGETS[0])))
    proof.run_on_emulator(NHWC.plan(problem, config, TARGETS[0]), {**given, "y": y})
    exact = oracle.conv2d(problem, given["x"], given["w"])
    cut = 2304 / 16 * 2.0**-23
    assert float((abs(y.astype(np.float64) - exact) / exact).max()) <= DTYPES[dtype].roundoff + cut


def test_nothing_is_prepared_forward():
    config = next(iter(NHWC.configs(LAYER, TARGETS[0])))
    plan = NHWC.plan(LAYER, config, TARGETS[0])
    assert (len(plan.launches), plan.prepare, plan.prepared_bytes, plan.workspace_bytes) == (1, (), 0, 0)


@pytest.mark.parametrize(
    ("channels", "groups", "channel_block"),
    [(256, 1, 64), (64, 1, 64), (96, 1, 32), (24, 1, 32), (40, 1, 16), (8, 1, 16), (96, 4, 32), (144, 4, 16)],
)
def test_rows_leave_as_few_zeros_as_can_be(channels, groups, channel_block):
    problem = replace(LAYER, c=channels * groups, groups=groups)
    configs = list(NHWC.configs(problem, TARGETS[0]))
    assert {config.channel_block for config in configs} == {channel_block}
    taps = problem.r * problem.s * -(-channels // channel_block)
    assert all(taps % config.stage_blocks == 0 and config.stages >= 3 for config in configs)
