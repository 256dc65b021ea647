"""The filters' gradient of 16-bit elements of NHWC on tensor cores: every tile, the linear index that taps share,
sharing of pixels. More is in test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import consider
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.common.split_k import MOST_PIXELS
from leanconv.kernels.contract import variant
from leanconv.kernels.hopper_native import native_weight_nhwc
from leanconv.kernels.hopper_native.native_weight_nhwc import NARROW, SHARING_TILES, TILES, pixels_of, row_pitch
from leanconv.problem import ConvProblem
from tests import proof, selection
from tests.cases import TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.kernels.tensor_cores import LAYERS
from tests.variants import NAMED

WEIGHT = NAMED["native_weight_nhwc"]
SPLIT_K = NAMED["native_weight_nhwc_split_k"]
HOPPER = TARGETS[0]
LAYER = LAYERS[WEIGHT.stem]


def named(name):
    return next(case.problem for case in NATIVE_CASES if case.name == f"{name}-nhwc")


#: Tiles of taps that share x, and of others; ``make test`` plays a few.
EVERY_TILE = [*((1, tile) for tile in (*TILES, NARROW)), *((3, tile) for tile in (*SHARING_TILES, NARROW))]
CHOSEN = [(1, (2, 1, 2, 3)), (1, (1, 2, 1, 2)), (1, NARROW), (3, (2, 1, 1, 2)), (3, (2, 1, 2, 1)), (3, (1, 3, 1, 1)),
          (3, NARROW)]  # fmt: skip


@pytest.mark.parametrize(
    ("taps", "tile"),
    selection.marked(EVERY_TILE, CHOSEN, lambda each: (each, f"{each[0]}-{'x'.join(map(str, each[1]))}")),
)
def test_every_tile_is_right(taps, tile):
    block = 32 if tile == NARROW else 64
    filters, channels = 64 * tile[0] * tile[2], block * tile[1] * tile[3]
    problem = ConvProblem(
        1, channels + 8, 6, 7, filters + 8, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", dtype="float16", op="wgrad"
    )
    config = native_weight_nhwc._config(tile, tile[3], taps, block, taps - 1, HOPPER.shared_per_block)
    proof.check(WEIGHT, problem, config, kinds=("positive",))


@pytest.mark.parametrize(
    ("split", "split_k"), selection.marked([(1, 3), (2, 1), (5, 2), (16, 1)], [(2, 1), (5, 2)], lambda s: (s, str(s)))
)
def test_blocks_share_the_pixels_of_a_tile(split, split_k):
    """Also more blocks than there are stages: some have none; and blocks that do not share a thread's sums evenly."""
    problem = named("float16-weight-copies")
    algorithm = WEIGHT if split_k == 1 else SPLIT_K
    config = next(c for c in algorithm.configs(problem, HOPPER) if c.taps == 3)
    proof.check(algorithm, problem, variant(config, split=split, split_k=split_k), kinds=("zero-mean",))


#: Rows whose taps share x: paddings of all kinds, dilation, several groups of taps, strides of rows.
ROWS: list[dict[str, Any]] = [
    {"padding": (-1, -2, -1, 0)},
    {"padding": (4, 0, 0, 6)},
    {"padding": (0, 0, 5, 0), "stride": (2, 1)},
    {"s": 7, "padding": (1, 1, 3, 3)},
    {"s": 5, "padding": (1, 1, 2, 2), "dilation": (1, 2)},
    {"n": 1, "h": 3, "w": 3, "padding": (0, 0, 0, 0)},
    {"c": 64, "padding": (0, 1, 1, 0), "r": 2, "s": 2},
    {"h": 4, "w": 6, "d": 6, "t": 2, "stride_d": 2, "dilation_d": 3, "padding": (1, 0, 1, 1), "padding_d": (2, 1)},
]


@pytest.mark.parametrize("changes", selection.marked(ROWS, [*ROWS[1:5], ROWS[-1]], lambda each: ((each,), str(each))))
def test_rows_of_all_kinds_are_right(changes):
    problem = ConvProblem(2, 24, 9, 13, 24, 3, 3, layout="NHWC", dtype="bfloat16", op="wgrad")
    problem = replace(problem, **changes)
    config = next(c for c in WEIGHT.configs(problem, HOPPER) if c.taps > 1)
    proof.check(WEIGHT, problem, config, kinds=("zero-mean",))


def test_no_tap_multiplies_a_pixel_of_another_row():
    """In the linear index: what a tap reads behind its row is zero in x, or multiplied by a zero of dy."""
    for w, s, left, right, dilation in product((1, 5, 8), (2, 3, 5, 7), (-1, 0, 1, 4), (-1, 0, 2, 5), (1, 2)):
        if w + left + right <= (s - 1) * dilation:
            continue
        problem = ConvProblem(
            1, 8, 1, w, 8, 1, s, padding=(0, 0, left, right), dilation=(1, dilation), layout="NHWC", dtype="float16",
            op="wgrad",
        )  # fmt: skip
        taps = native_weight_nhwc.sharing_taps(problem)
        pitch = row_pitch(problem, taps)
        assert pitch >= problem.q
        for q, first in product(range(problem.q), range(0, s, taps)):
            for tap in range(first, min(first + taps, s)):
                column = q + (tap - first) * dilation  # from the first of a row of the index
                meant = q - left + tap * dilation
                read = column % pitch - left + first * dilation
                if column < pitch:
                    assert read == meant
                else:
                    assert not 0 <= meant < w and not 0 <= read < w


@pytest.mark.parametrize("images", [1, 32, 4096])
def test_no_block_sums_more_pixels_than_the_tensor_core_may(images):
    problem = replace(LAYER, n=images, h=224, w=224)
    pixels, sums = pixels_of(problem, 1), 4 * int(np.prod(problem.y_shape))
    for algorithm in (WEIGHT, SPLIT_K):
        configs = list(algorithm.configs(problem, HOPPER))
        assert bool(configs) == (algorithm is SPLIT_K or pixels <= 16 * MOST_PIXELS)
        for config in configs:
            assert pixels_of(problem, config.taps) <= MOST_PIXELS * config.split * config.split_k
            assert algorithm.workspace_bytes(problem, config) == (sums * config.split_k if algorithm is SPLIT_K else 0)
    # beyond what a cluster sums, a workspace is needed, and said
    (plain,) = (each for each in ALGORITHMS if each.stem == "native_weight_nhwc")
    least = sums * max(2, -(-pixels // (16 * MOST_PIXELS)))
    for limit, fits in ((0, pixels <= 16 * MOST_PIXELS), (least - 1, pixels <= 16 * MOST_PIXELS), (least, True)):
        said = f"it needs {least} bytes of workspace, and workspace_limit is {limit}"
        assert consider(plain, problem, HOPPER, "auto", limit).reasons == (() if fits else (said,))


@pytest.mark.parametrize(("kernel", "taps"), [(1, 1), (3, 3)])
def test_few_filters_and_channels_make_more_blocks(kernel, taps):
    """Of 64 channels half at a time, where clusters alone share the pixels: else a third of the GPU computes."""
    problem = ConvProblem(128, 64, 56, 56, 64, kernel, kernel, layout="NHWC", dtype="float16", op="wgrad")
    first, *_ = WEIGHT.configs(problem, HOPPER)
    assert (first.consumers, first.channel_block, first.taps, first.split) == (1, 32, taps, 16)
    blocks = native_weight_nhwc.tiles_of(problem, first) * first.split
    others = [config for config in WEIGHT.configs(problem, HOPPER) if config.channel_block == 64]
    assert others and all(native_weight_nhwc.tiles_of(problem, each) * each.split < blocks for each in others)
    wide = replace(problem, c=256, k=256)
    assert next(iter(WEIGHT.configs(wide, HOPPER))).channel_block == 64


def test_partial_sums_fill_the_room_that_there_is():
    problem = replace(LAYER, c=64, k=64)
    found = SPLIT_K.within(problem, HOPPER, 7 * 4 * 64 * 64 * 9)
    assert max(config.split_k for _, config in found) == 7
    assert len(set(found)) == len(found)
