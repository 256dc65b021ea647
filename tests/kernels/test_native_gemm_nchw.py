"""16-bit elements of NCHW on tensor cores: every tile, the linear pixel index, tile after tile. More is in
test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from leanconv.kernels.hopper_native.native_gemm_nchw import TILES, linear_order
from leanconv.problem import ConvProblem
from tests import emulator, proof, selection
from tests.cases import TARGETS, draw_conv
from tests.cases_16bit import NATIVE_CASES
from tests.kernels.patching import Patch, broken_kernels
from tests.kernels.tensor_cores import GRADIENT, LAYERS
from tests.variants import NAMED

NCHW = NAMED["native_gemm_nchw"]
HOPPER = TARGETS[0]
LAYER = LAYERS[NCHW.stem]


def named(name):
    return next(case.problem for case in NATIVE_CASES if case.name == f"{name}-nchw")


def test_linear_order_has_zeros_between_rows_and_images():
    assert (linear_order(LAYER).image, linear_order(LAYER).resident(128)) == (57 * 57, 128 + 2 * 57 + 2 + 1)
    # filters that stay inside need no zeros; outputs are fewer than pixels then
    assert linear_order(replace(LAYER, padding=(0, 0, 0, 0))).image == 56 * 56
    # four stride phases, of which each has every other row and column
    assert linear_order(replace(LAYER, stride=(2, 2))).image == 29 * 29
    assert linear_order(replace(LAYER, stride=(2, 2))).resident(128) == 4 * (128 + 29 + 1) + 1
    # one tap reads one phase
    assert linear_order(replace(LAYER, stride=(2, 2), r=1, s=1, padding=(0, 0, 0, 0))).resident(128) == 129


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile_is_right(tile):
    problem = replace(named("float16-blocks"), k=tile[2] + 8)
    config = next(c for c in NCHW.configs(problem, HOPPER) if (c.warpgroups, c.m_tiles, c.filters) == tile)
    proof.check(NCHW, problem, config, kinds=("positive",))


#: Few pixels and many channels, of which each CTA has its stages; outputs of every number of adjacent ones.
FEW = ConvProblem(1, 256, 3, 3, 40, 3, 3, padding=(1, 1, 1, 1), d=2, t=3, padding_d=(1, 1), dtype="float16")
SPLIT = [(4, 64, FEW), (4, 128, replace(FEW, k=256, c=128, op="dgrad", bias=True)), (2, 64, replace(FEW, h=4, c=64))]
SPLIT += [(8, 128, replace(FEW, c=512, k=72, bias=True, accumulate=True, dtype="bfloat16"))]


@pytest.mark.parametrize(("split", "filters", "problem"), selection.marked(SPLIT, SPLIT[1:3], lambda s: (s, str(s[0]))))
def test_a_cluster_shares_the_stages_of_a_volume(split, filters, problem):
    config = next(c for c in NCHW.configs(problem, HOPPER) if (c.split, c.filters) == (split, filters))
    proof.check(NCHW, problem, config, kinds=("zero-mean",))
    # one CTA has all where a result must not depend on the batch
    assert all(c.split == 1 for c in NCHW.configs(replace(problem, batch_invariant=True), HOPPER))


@pytest.mark.parametrize("w", [11, 14, 12], ids=["one-by-one", "pairs", "fours"])
@pytest.mark.parametrize("h", [7, 8], ids=["odd", "even"])
def test_blocks_compute_tile_after_tile(w, h):
    """Two CTAs for many tiles: loading warps go round the stages of all of them; images of any size are stored."""
    few = replace(HOPPER, multiprocessors=2)
    problem = ConvProblem(5, 40, h, w, 40, 3, 3, padding=(1, 1, 1, 1), dtype="bfloat16", bias=True)
    config = next(iter(NCHW.configs(problem, few)))
    plan = NCHW.plan(problem, config, few)
    assert plan.launches[0].grid == 2
    proof.check(NCHW, problem, config, kinds=("zero-mean",), change=lambda _: plan)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    "changes", [{}, {"c": 80, "h": 5, "w": 6}, GRADIENT, {"op": "dgrad", "stride": (2, 1), "r": 1}]
)
def test_warpgroups_ping_pong(changes, blocks):
    """Each goes past the stages of the other one's tiles: of rings that these fill once, twice and in part."""
    problem = replace(ConvProblem(3, 48, 14, 15, 72, 3, 3, padding=(1, 1, 1, 1), dtype="float16"), **changes)
    few = replace(HOPPER, multiprocessors=blocks)
    configs = [config for config in NCHW.configs(problem, few) if config.turns]
    assert bool(configs) == (problem.stride == (1, 1))
    for config in configs:
        for each in (config, replace(config, channel_block=16, pixel_stages=3, filter_stages=4)):
            proof.check(NCHW, problem, each, kinds=("zero-mean",), target=few)


def test_a_warpgroup_waits_for_its_turn(tmp_path):
    """Else it takes a stage of the phase before, whose parity is that of the one that it waits for."""
    early = Patch("early", "NchwGemm::consume", "{{if (turns && _ > first_tile()) barrier_sync(...);}}")
    kernels = broken_kernels(tmp_path, early)
    problem = ConvProblem(2, 48, 14, 15, 72, 3, 3, padding=(1, 1, 1, 1), dtype="float16")
    one = replace(HOPPER, multiprocessors=1)
    config = next(config for config in NCHW.configs(problem, one) if config.turns)
    values = {**draw_conv(problem, "zero-mean"), "y": np.zeros(problem.y_shape, "float16")}
    with pytest.raises(emulator.EmulatorError):
        emulator.run_plan(NCHW.plan(problem, config, one), values, kernels=kernels)


def test_phases_of_a_gradient_share_a_launch():
    """Where each has taps, at strides of 2; others have a launch each, and what no phase has one of zeros."""
    strided = {"op": "dgrad", "stride": (2, 2), "c": 64}
    for changes, launches in (
        ({}, 1),
        ({"stride": (1, 2)}, 1),
        ({"stride": (2, 3)}, 6),
        ({"dilation": (3, 1)}, 4),
        ({"r": 6, "s": 6}, 1),
        ({"r": 6, "s": 7}, 4),
        ({"r": 1, "padding": (0, 0, 1, 1)}, 3),
        ({"d": 3, "t": 3, "padding_d": (1, 1)}, 4),
    ):
        problem = replace(LAYER, bias=False, **{**strided, **changes})
        configs = list(NCHW.configs(problem, HOPPER))
        assert {len(NCHW.plan(problem, config, HOPPER).launches) for config in configs} == {launches}, changes
        assert launches > 1 or all(config.filters * prod(problem.stride) <= 256 for config in configs)


@pytest.mark.parametrize("taps", [(2, 2), (3, 2), (5, 4), (2, 7)], ids=str)
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (1, 1, 1, 1), (3, 2, 4, 1)], ids=str)
def test_phases_read_what_their_taps_do(taps, padding):
    """Every way in which taps fall into phases, with images that have fewer pixels of the last phase."""
    problem = ConvProblem(2, 24, 9, 10, 40, *taps, stride=(2, 2), padding=padding, dtype="bfloat16", op="dgrad")
    proof.check(NCHW, problem, kinds=("zero-mean",))


def test_few_tiles_share_reductions():
    problem = replace(LAYER, n=8, c=512, k=512, h=7, w=7, bias=False)
    config = next(iter(NCHW.configs(problem, HOPPER)))
    assert config.split > 1
    small = replace(problem, n=1, c=128, k=128)
    split = next(config for config in NCHW.configs(small, HOPPER) if config.split == 2)
    proof.check(NCHW, small, split, kinds=("zero-mean",))


def test_tiles_are_those_that_filters_fill():
    """Prepared filters are rounded up to whole tiles: at most twice as many, and 32 at least."""
    for k, most in ((16, 32), (64, 64), (65, 128), (256, 256), (1000, 256)):
        problem = replace(LAYER, k=k, bias=False)
        assert max(config.filters for config in NCHW.configs(problem, HOPPER)) == most
        rounded = max(-(-k // config.filters) * config.filters for config in NCHW.configs(problem, HOPPER))
        assert NCHW.prepared_bytes(problem) == 2 * 9 * 256 * rounded


@pytest.mark.parametrize("padding", [(1, 0), (0, 1)])
def test_a_gradient_of_one_slice_takes_its_slice_of_the_filters(padding):
    """Its only phase has filters of one slice, and is a phase of images but for where they lie in the layer's."""
    problem = ConvProblem(1, 16, 4, 5, 16, 3, 3, padding=(1, 1, 1, 1), dtype="bfloat16", op="dgrad", d=1, t=2,
                          stride_d=2, padding_d=padding)  # fmt: skip
    assert not NCHW.reasons(problem, HOPPER)
    proof.check(NCHW, problem, kinds=("zero-mean",))
