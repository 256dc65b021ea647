"""The filters' gradient of 16-bit elements of NCHW on tensor cores: every tile, sharing of pixels. More is in
test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from leanconv.call.choose import consider
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.common.split_k import MOST_PIXELS
from leanconv.kernels.contract import variant
from leanconv.kernels.hopper_native.native_gemm_nchw import linear_order
from leanconv.kernels.hopper_native.native_weight_nchw import TILES
from leanconv.problem import ConvProblem
from tests import proof, selection
from tests.cases import TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.kernels.tensor_cores import LAYERS
from tests.variants import NAMED

WEIGHT = NAMED["native_weight_nchw"]
SPLIT_K = NAMED["native_weight_nchw_split_k"]
HOPPER = TARGETS[0]
LAYER = LAYERS[WEIGHT.stem]


def named(name):
    return next(case.problem for case in NATIVE_CASES if case.name == f"{name}-nchw")


def tile_of(config):
    return config.filter_groups, config.channel_groups, config.tap_groups, config.channels


def each_tile():
    """``make test`` plays as few as have every number."""
    chosen = selection.cover(TILES, enumerate, prod)
    return selection.marked(TILES, chosen, lambda tile: ((tile,), "x".join(map(str, tile))))


@pytest.mark.parametrize("tile", each_tile())
def test_every_tile_is_right(tile):
    problem = ConvProblem(
        1, 8 + tile[1] * tile[3], 6, 9, 8 + 64 * tile[0], 3, 3, padding=(1, 1, 1, 1), dtype="float16", op="wgrad"
    )
    config = next(c for c in SPLIT_K.configs(problem, HOPPER) if tile_of(c) == tile)
    proof.check(SPLIT_K, problem, config, kinds=("positive",))


@pytest.mark.parametrize(
    ("split", "split_k"), selection.marked([(1, 3), (2, 1), (4, 3), (16, 1)], [(2, 1), (4, 3)], lambda s: (s, str(s)))
)
def test_blocks_share_the_pixels_of_a_tile(split, split_k):
    """Also more blocks than there are stages: some have none."""
    problem = replace(named("float16-weight-windows"), n=2)
    algorithm = WEIGHT if split_k == 1 else SPLIT_K
    config = next(c for c in algorithm.configs(problem, HOPPER) if c.pixels == 64)
    proof.check(algorithm, problem, variant(config, split=split, split_k=split_k), kinds=("zero-mean",))


@pytest.mark.parametrize("images", [1, 32, 4096])
def test_no_block_sums_more_pixels_than_the_tensor_core_may(images):
    problem = replace(LAYER, n=images, h=224, w=224)
    pixels = images * linear_order(problem).image
    sums = 4 * int(np.prod(problem.y_shape))
    for algorithm in (WEIGHT, SPLIT_K):
        configs = list(algorithm.configs(problem, HOPPER))
        assert bool(configs) == (algorithm is SPLIT_K or pixels <= 16 * MOST_PIXELS)
        for config in configs:
            assert pixels <= MOST_PIXELS * config.split * config.split_k
            assert algorithm.workspace_bytes(problem, config) == (sums * config.split_k if algorithm is SPLIT_K else 0)
    # beyond what a cluster sums, a workspace is needed, and said
    (plain,) = (each for each in ALGORITHMS if each.stem == "native_weight_nchw")
    fewest = -(-pixels // (16 * MOST_PIXELS))  # clusters of sixteen, each with a partial sum
    least = sums * max(2, fewest)
    for limit, fits in ((0, pixels <= 16 * MOST_PIXELS), (least - 1, pixels <= 16 * MOST_PIXELS), (least, True)):
        said = f"it needs {least} bytes of workspace, and workspace_limit is {limit}"
        assert consider(plain, problem, HOPPER, "auto", limit).reasons == (() if fits else (said,))


def test_clusters_use_the_room_that_there_is_for_partial_sums():
    """Each has one partial sum, whatever its blocks: seven of them are for 28 blocks."""
    problem = replace(LAYER, c=64, k=64)
    found = SPLIT_K.within(problem, HOPPER, 7 * 4 * 64 * 64 * 9)
    assert max(config.split_k for _, config in found) == 7
    assert (found[0][1].split, found[0][1].split_k) == (4, 7)
    assert len(set(found)) == len(found)
