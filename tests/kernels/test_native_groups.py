"""Groups of few channels on tensor cores, forward and both gradients: what tiles share, and what groups must not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.mma_sync.native_gemm_groups import windows_of
from leanconv.problem import ConvProblem
from tests import emulator, proof
from tests.cases import TARGETS, draw_conv
from tests.cases_16bit import NATIVE_CASES
from tests.variants import NAMED

GEMM, WEIGHT, SPLIT_K = (
    NAMED[name] for name in ("native_gemm_groups", "native_weight_groups", "native_weight_groups_split_k")
)
GROUPS = [case for case in NATIVE_CASES if "groups-" in case.name and not GEMM.reasons(case.problem, TARGETS[0])]
WEIGHTS = [case for case in NATIVE_CASES if "groups-" in case.name and not WEIGHT.reasons(case.problem, TARGETS[0])]
LAYER = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), groups=32, layout="NHWC", dtype="float16")


def named(name):
    return next(case.problem for case in NATIVE_CASES if case.name == f"{name}-nhwc")


@pytest.mark.parametrize("case", GROUPS, ids=lambda case: case.name)
def test_right_with_the_configuration_that_differs_most(case):
    """The best guess, which other tests run, has the fewest filters; the last of the extremes has the most."""
    *_, last = proof.extreme_configs(GEMM, case.problem, TARGETS[0])
    proof.check(GEMM, case.problem, last, kinds=("zero-mean",))


@pytest.mark.parametrize("case", WEIGHTS, ids=lambda case: case.name)
def test_gradients_of_filters_are_right(case):
    for algorithm in (WEIGHT, SPLIT_K):
        *_, last = proof.extreme_configs(algorithm, case.problem, TARGETS[0])
        proof.check(algorithm, case.problem, last, kinds=("zero-mean",))
    shared = next(c for c in WEIGHT.configs(case.problem, TARGETS[0]) if c.split > 1)
    proof.check(WEIGHT, case.problem, shared, kinds=("zero-mean",))


def test_a_block_computes_several_tiles():
    problem = named("float16-groups-fours")
    config = next(c for c in GEMM.configs(problem, TARGETS[0]) if c.filters == 24)
    config, small = replace(config, rows=4, columns=4, min_blocks=1), replace(TARGETS[0], multiprocessors=2)
    assert config.tiles(windows_of(problem))[1] > 2 * config.workers(windows_of(problem), small)
    proof.check(GEMM, problem, config, kinds=("zero-mean",), target=small)


@pytest.mark.parametrize("name", ["float16-groups-fours", "float16-groups-twelves", "bfloat16-groups-eights"])
def test_what_is_not_finite_stays_in_its_group(name):
    """Eight filters of several groups are multiplied with zeros where channels are others', and half an mma is zero."""
    problem = replace(named(name), activation=None, bias=False)
    given = draw_conv(problem, "zero-mean")
    x, w = given["x"], given["w"]
    x[0, 3, 4, 5], x[1, 0, 0, 17], x[1, 5, 6, 11] = np.inf, np.nan, -np.inf
    y = np.full(problem.y_shape, np.nan, problem.dtype)
    config = next(iter(GEMM.configs(problem, TARGETS[0])))
    emulator.run_plan(GEMM.plan(problem, config, TARGETS[0]), {**given, "y": y})
    with np.errstate(invalid="ignore"):
        right = oracle.conv2d(problem, x, w)
    assert np.isnan(right).any() and np.isinf(right).any()
    assert np.array_equal(np.isnan(y), np.isnan(right)) and np.array_equal(np.isinf(y), np.isinf(right))
    assert np.array_equal(y[np.isinf(y)] > 0, right[np.isinf(y)] > 0)


def test_filters_are_read_where_they_lie():
    for op, launches in (("fprop", 1), ("dgrad", 1)):
        problem = replace(LAYER, op=op)
        plan = GEMM.plan(problem, next(iter(GEMM.configs(problem, TARGETS[0]))), TARGETS[0])
        assert (len(plan.launches), plan.prepare, plan.prepared_bytes, plan.workspace_bytes) == (launches, (), 0, 0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"groups": 1}, "groups=1: it computes groups of few channels"),
        ({"layout": "CHWN"}, "layout='CHWN' is neither 'NCHW' nor 'NHWC'"),
        ({"groups": 128}, "leaves 2 in a group, no multiple of 4"),
        ({"c": 252, "groups": 63, "k": 252}, "c=252 is no multiple of 8"),
        ({"groups": 2, "r": 5, "s": 5}, "filters of 128 channels x 5x5 take 400 registers of a thread"),
        ({"dtype": "float32"}, "float32"),
    ],
)
def test_limits(changed, why):
    assert why in "; ".join(GEMM.reasons(replace(LAYER, **changed), TARGETS[0]))


def test_older_gpus_run_both_and_have_no_clusters():
    old = TARGETS[1]
    assert not GEMM.reasons(LAYER, old)
    problem = replace(LAYER, op="wgrad")
    assert not WEIGHT.reasons(problem, old) and {c.split for c in WEIGHT.configs(problem, old)} == {1}
