"""16-bit elements of NCHW on tensor cores: every tile, the linear pixel index, tile after tile. More is in
test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leanconv.kernels.hopper_native.native_gemm_nchw import TILES, linear_order
from leanconv.problem import ConvProblem
from tests import proof, selection
from tests.cases import TARGETS
from tests.cases_16bit import NATIVE_CASES
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


@pytest.mark.parametrize(
    "changes",
    [{}, {"groups": 2, "c": 64, "k": 80}, GRADIENT, {"accumulate": True}],
    ids=str,
)
def test_pixels_of_one_tap_may_come_by_tensor_copies(changes):
    """Images of 40 pixels, which a tensor copy of 64 brings with zeros behind them."""
    problem = ConvProblem(3, 40, 5, 8, 72, 1, 1, dtype="bfloat16", bias=True, activation="relu")
    problem = replace(problem, **changes)
    by_tma = [config for config in NCHW.configs(problem, HOPPER) if config.by_tma]
    for config in (by_tma[0], by_tma[-1]):
        proof.check(NCHW, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize(
    "changes", [{"w": 7}, {"padding": (1, 0, 0, 0)}, {"stride": (2, 1)}, {"r": 3}, {"groups": 5}], ids=str
)
def test_other_pixels_do_not(changes):
    problem = replace(ConvProblem(3, 40, 5, 8, 70, 1, 1, dtype="float16"), **changes)
    assert not any(config.by_tma for config in NCHW.configs(problem, HOPPER))


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
