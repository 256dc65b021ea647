"""16-bit elements on tensor cores: the rows that copies bring, every tile, limits by name, the error of long sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.cpu import oracle
from leanconv.dtypes import DTYPES
from leanconv.kernels.hopper_native.native_gemm_16bit import TILES
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof, selection
from tests.cases import TARGETS, draw_conv
from tests.cases_narrow import NARROW_CASES
from tests.variants import NAMED

NARROW = NAMED["native_gemm_16bit"]
COPIED = [case for case in NARROW_CASES if "-copies" in case.name and not NARROW.reasons(case.problem, TARGETS[0])]
LAYER = ConvProblem(
    32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", dtype="float16", bias=True, activation="relu"
)


def named(name):
    return next(case.problem for case in NARROW_CASES if case.name == f"{name}-nhwc")


def test_all_layers_of_copies_are_accepted():
    assert len(COPIED) == sum("-copies" in case.name for case in NARROW_CASES) == 11


@pytest.mark.parametrize("case", COPIED, ids=lambda case: case.name)
def test_right_on_emulator(case):
    proof.check(NARROW, case.problem, kinds=("zero-mean",))


def tiles():
    """Every tile on filters that it does not divide; in ``make test`` as few as have every number."""
    problem = named("float16-copies")
    found = list(NARROW.configs(problem, TARGETS[0]))
    assert {(c.warpgroups, c.blocks, c.filters) for c in found} == set(TILES)
    numbers = ("warpgroups", "blocks", "split")
    few = selection.cover(found, lambda config: [(c, v) for c, v in config.constants() if c in numbers])
    return selection.marked(found, few, lambda c: ((problem, c), f"{c.warpgroups}x{c.blocks}x{c.filters}-{c.split}"))


@pytest.mark.parametrize(("problem", "config"), tiles())
def test_every_tile_is_right(problem, config):
    proof.check(NARROW, problem, config, kinds=("positive",))


def test_small_outputs_share_the_reduction_over_a_cluster():
    problem = named("float16-copies-long")
    config = next(iter(NARROW.configs(replace(problem, c=1024), TARGETS[0])))
    assert config.split > 1
    for split in (2, 4, 8):
        longer = replace(problem, c=256)
        config = next(c for c in NARROW.configs(longer, TARGETS[0]) if c.split == split)
        proof.check(NARROW, longer, config, kinds=("zero-mean",))


@pytest.mark.parametrize("name", ["float16-copies-groups", "bfloat16-gradient-copies-stride"])
def test_wide_offsets_are_right(name):
    problem = named(name)
    config = next(iter(NARROW.configs(problem, TARGETS[0])))
    wide = proof.wide_offsets(NARROW, problem, config, TARGETS[0])
    proof.check(NARROW, problem, config, kinds=("zero-mean",), change=lambda plan: wide)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_of_one_sign_are_cut_by_less_than_a_unit(dtype):
    """The tensor core rounds toward zero: 2304 positive products lose at most 2^-23 of the sum each sixteen."""
    problem = ConvProblem(1, 256, 4, 4, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", dtype=dtype)
    given = draw_conv(problem, "positive")
    y = np.full(problem.y_shape, np.nan, dtype)
    config = next(iter(NARROW.configs(problem, TARGETS[0])))
    proof.run_on_emulator(NARROW.plan(problem, config, TARGETS[0]), {**given, "y": y})
    exact = oracle.conv2d(problem, given["x"], given["w"])
    cut = 2304 / 16 * 2.0**-23
    assert float((abs(y.astype(np.float64) - exact) / exact).max()) <= DTYPES[dtype].roundoff + cut


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "wgrad", "bias": False, "activation": None}, "op='wgrad'"),
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC"),
        ({"layout": "CHWN"}, "layout='CHWN' is not NHWC"),
        ({"n": 0}, "n=0"),
        ({"c": 252}, "252 channels of 16 bits are no multiple of 16 bytes"),
        ({"c": 24, "k": 24, "groups": 3}, "groups=3 leaves 8 channels in a group, no multiple of 16"),
        ({"op": "dgrad", "k": 20, "bias": False, "activation": None}, "20 filters of 16 bits"),
        ({"stride": (9, 1)}, "traversal"),
        ({"h": 600, "dilation": (128, 1)}, "a filter reaches 256 pixels, and tensor copies 255"),
    ],
)  # fmt: skip
def test_limits_are_named(changes, reason):
    assert not NARROW.reasons(LAYER, TARGETS[0])
    reasons = NARROW.reasons(replace(LAYER, **changes), TARGETS[0])
    assert any(reason in each for each in reasons), reasons


@pytest.mark.parametrize(
    "way", ["bias", *(pytest.param(way, marks=pytest.mark.exhaustive) for way in ("accumulate", "split"))]
)
def test_tiles_compile_without_spills(way):
    """Both operands in flight, no product waits for another, and the registers of all threads fit."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = {
        "bias": LAYER,
        "accumulate": replace(LAYER, accumulate=True, c=24, k=133, dtype="bfloat16"),
        "split": replace(LAYER, n=1, h=7, w=7),
    }[way]
    for config in NARROW.configs(problem, TARGETS[0]):
        if (config.split > 1) == (way == "split"):
            figure = compile_launch(NARROW.plan(problem, config, TARGETS[0]).launches[0], "sm_90a")
            assert (figure.spill_bytes, figure.stack_bytes, figure.advice) == (0, 0, ()), config


@pytest.mark.parametrize("target", TARGETS[1:], ids=lambda target: target.arch)
def test_other_gpus_are_refused(target):
    assert NARROW.reasons(LAYER, target) == [
        f"{target.arch} has no products of warpgroups (wgmma), which only sm_90a has"
    ]


def test_ieee_is_refused():
    assert any("precision" in each for each in NARROW.reasons(replace(LAYER, precision="ieee"), TARGETS[0]))


def test_auto_takes_tensor_cores_in_nhwc():
    assert choose(LAYER, TARGETS[0]).algorithm is NARROW
    assert choose(replace(LAYER, op="dgrad", bias=False, activation=None), TARGETS[0]).algorithm is NARROW
    assert choose(replace(LAYER, layout="NCHW"), TARGETS[0]).algorithm is not NARROW


def test_nothing_is_prepared_forward():
    config = next(iter(NARROW.configs(LAYER, TARGETS[0])))
    plan = NARROW.plan(LAYER, config, TARGETS[0])
    assert (len(plan.launches), plan.prepare, plan.prepared_bytes, plan.workspace_bytes) == (1, (), 0, 0)


@pytest.mark.parametrize(
    ("channels", "groups", "piece"),
    [(256, 1, 64), (64, 1, 64), (96, 1, 32), (24, 1, 32), (40, 1, 16), (8, 1, 16), (96, 4, 32), (144, 4, 16)],
)
def test_rows_leave_as_few_zeros_as_can_be(channels, groups, piece):
    problem = replace(LAYER, c=channels * groups, groups=groups)
    configs = list(NARROW.configs(problem, TARGETS[0]))
    assert {config.piece for config in configs} == {piece}
    taps = problem.r * problem.s * -(-channels // piece)
    assert all(taps % config.pieces == 0 and config.stages >= 3 for config in configs)
    assert all(config.shared_bytes <= TARGETS[0].shared_per_block for config in configs)
