"""The filters' gradient of 16-bit elements of NCHW on tensor cores: every tile, sharing of pixels, limits by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.call.choose import choose, consider
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import variant
from leanconv.kernels.hopper_native.native_gemm_nchw import image_pixels
from leanconv.kernels.hopper_native.native_weight_nchw import MOST_PIXELS, TILES
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof
from tests.cases import TARGETS, draw_conv
from tests.cases_narrow import NARROW_CASES
from tests.variants import NAMED

WEIGHT = NAMED["native_weight_nchw"]
PARTS = NAMED["native_weight_nchw_split_k"]
HOPPER = TARGETS[0]
LAYER = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), dtype="float16", op="wgrad")


def named(name):
    return next(case.problem for case in NARROW_CASES if case.name == f"{name}-nchw")


def tile_of(config):
    return config.filter_groups, config.channel_groups, config.tap_groups, config.channels


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_every_tile_is_right(tile):
    problem = ConvProblem(
        1, 8 + tile[1] * tile[3], 6, 9, 8 + 64 * tile[0], 3, 3, padding=(1, 1, 1, 1), dtype="float16", op="wgrad"
    )
    config = next(c for c in PARTS.configs(problem, HOPPER) if tile_of(c) == tile)
    proof.check(PARTS, problem, config, kinds=("positive",))


@pytest.mark.parametrize(("split", "parts"), [(1, 3), (2, 1), (4, 3), (16, 1)])
def test_blocks_share_the_pixels_of_a_tile(split, parts):
    """Also more blocks than there are stages: some have none."""
    problem = replace(named("float16-weight-windows"), n=2)
    algorithm = WEIGHT if parts == 1 else PARTS
    config = next(c for c in algorithm.configs(problem, HOPPER) if c.pixels == 64)
    proof.check(algorithm, problem, variant(config, split=split, parts=parts), kinds=("zero-mean",))


@pytest.mark.parametrize(
    "changes",
    [
        {"padding": (-1, -2, -1, 0)},
        {"padding": (4, 0, 0, 6)},
        {"r": 1, "s": 7, "padding": (0, 0, 3, 3)},
        {"stride": (2, 2), "dilation": (2, 4), "padding": (2, 1, 3, 2)},
        {"stride": (3, 1), "r": 2, "padding": (1, 0, 1, 1)},
        {"n": 1, "h": 3, "w": 3, "padding": (0, 0, 0, 0)},
        {"groups": 4, "stride": (1, 2), "accumulate": True},
        {"c": 3, "r": 7, "s": 7, "stride": (2, 2), "padding": (3, 3, 3, 3)},
        {"r": 4, "s": 4, "stride": (4, 4), "padding": (0, 0, 0, 0)},
    ],
    ids=str,
)
def test_windows_of_all_kinds_are_right(changes):
    problem = ConvProblem(2, 24, 9, 13, 20, 3, 3, padding=(1, 1, 1, 1), dtype="bfloat16", op="wgrad")
    proof.check(WEIGHT, replace(problem, **changes), kinds=("zero-mean",))


@pytest.mark.parametrize("name", ["bfloat16-weight-groups", "bfloat16-weight-windows-stride"])
def test_wide_offsets_are_right(name):
    problem = named(name)
    config = next(iter(WEIGHT.configs(problem, HOPPER)))
    wide = proof.wide_offsets(WEIGHT, problem, config, HOPPER)
    proof.check(WEIGHT, problem, config, kinds=("zero-mean",), change=lambda plan: wide)


def test_an_infinity_reaches_the_weights_of_its_channel_and_no_other():
    problem = named("float16-weight-windows")
    given = draw_conv(problem, "positive")
    given["x"][1, 5, 4, 4], given["dy"][2, 7, 3, 3] = np.inf, np.nan
    dw = np.full(problem.y_shape, 7, "float16")
    config = next(iter(WEIGHT.configs(problem, HOPPER)))
    proof.run_on_emulator(WEIGHT.plan(problem, config, HOPPER), {**given, "dw": dw})
    seen = np.zeros(dw.shape, bool)
    seen[7], seen[:, 5] = True, True
    np.testing.assert_array_equal(np.isfinite(dw), ~seen)


@pytest.mark.parametrize("images", [1, 32, 4096])
def test_no_block_sums_more_pixels_than_the_tensor_core_may(images):
    problem = replace(LAYER, n=images, h=224, w=224)
    pixels = images * image_pixels(problem)
    sums = 4 * int(np.prod(problem.y_shape))
    for algorithm in (WEIGHT, PARTS):
        configs = list(algorithm.configs(problem, HOPPER))
        assert bool(configs) == (algorithm is PARTS or pixels <= 16 * MOST_PIXELS)
        for config in configs:
            assert pixels <= MOST_PIXELS * config.split * config.parts
            assert algorithm.workspace_bytes(problem, config) == (sums * config.parts if algorithm is PARTS else 0)
    # beyond what a cluster sums, a workspace is needed, and said
    (plain,) = (each for each in ALGORITHMS if each.stem == "native_weight_nchw")
    fewest = -(-pixels // (4 * MOST_PIXELS))  # clusters of four, each with a partial sum
    least = sums * max(2, fewest)
    for limit, fits in ((0, pixels <= 16 * MOST_PIXELS), (least - 1, pixels <= 16 * MOST_PIXELS), (least, True)):
        said = f"it needs {least} bytes of workspace, and workspace_limit is {limit}"
        assert consider(plain, problem, HOPPER, "auto", limit).reasons == (() if fits else (said,))


def test_clusters_use_the_room_that_there_is_for_partial_sums():
    """Each has one partial sum, whatever its blocks: seven of them are for 28 blocks."""
    problem = replace(LAYER, c=64, k=64)
    found = PARTS.within(problem, HOPPER, 7 * 4 * 64 * 64 * 9)
    assert max(config.parts for _, config in found) == 7
    assert (found[0][1].split, found[0][1].parts) == (4, 7)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "dgrad"}, "op='dgrad' is not the gradient of the filters"),
        ({"layout": "NHWC"}, "layout='NHWC' is not NCHW"),
        ({"layout": "CHWN"}, "layout='CHWN' is not NCHW"),
        ({"n": 0}, "n=0"),
        ({"n": 700000}, "images have more than 2146435072 pixels"),
        ({"stride": (1, 65)}, "stride=(1, 65) is more than 64"),
        ({"w": 4000}, "windows of 64 outputs see 8069 pixels"),
    ],
)
def test_limits_are_named(changes, reason):
    assert not WEIGHT.reasons(LAYER, HOPPER)
    reasons = WEIGHT.reasons(replace(LAYER, **changes), HOPPER)
    assert any(reason in each for each in reasons), reasons


@pytest.mark.parametrize("target", TARGETS[1:], ids=lambda target: target.arch)
def test_other_gpus_are_refused(target):
    assert WEIGHT.reasons(LAYER, target) == [
        f"{target.arch} has no products of warpgroups (wgmma), which only sm_90a has"
    ]


def test_layers_are_its_own():
    """Gradients of 16 bits in NCHW, unless they are depthwise."""
    for problem in (LAYER, replace(LAYER, r=1, s=1, padding=(0, 0, 0, 0)), replace(LAYER, stride=(2, 2))):
        assert choose(problem, HOPPER).algorithm.stem == "native_weight_nchw"
    assert choose(replace(LAYER, groups=256), HOPPER).algorithm.name.startswith("depthwise_weight")
    assert choose(replace(LAYER, layout="NHWC"), HOPPER).algorithm.name.startswith("implicit_gemm_weight")


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (PARTS, {}),
        (PARTS, {"r": 1, "s": 1, "padding": (0, 0, 0, 0)}),
        (WEIGHT, {"h": 7, "w": 7}),
        pytest.param(PARTS, {"c": 64, "k": 64}, marks=pytest.mark.exhaustive),
        pytest.param(WEIGHT, {"stride": (2, 2)}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda each: getattr(each, "stem", str(each)),
)
def test_registers_do_not_spill(algorithm, changes):
    problem = replace(LAYER, **changes)
    config = next(iter(algorithm.configs(problem, HOPPER)))
    built = compile_launch(algorithm.plan(problem, config, HOPPER).launches[0], "sm_90a")
    assert (built.spill_bytes, built.advice) == (0, ())
