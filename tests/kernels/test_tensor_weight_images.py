"""The filters' gradient in stages of many images: its shares of blocks, its columns and its choice. More is
in test_tensor_cores.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_fp32.tensor_weight_images import TensorWeightImagesConfig, columns_of, tiles_of, units_of
from leanconv.problem import ConvProblem
from tests import cases_weight, proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_weight import IMAGE_CASES
from tests.variants import NAMED

IMAGES = NAMED["tensor_weight_images"]
HOPPER = TARGETS[0]


def _ways(case: Case) -> Iterator[tuple[str, TensorWeightImagesConfig]]:
    """Stages of one row and of several; few blocks, whose shares begin and end within tiles."""
    config = next(iter(IMAGES.configs(case.problem, HOPPER)))
    for rows in {config.image_rows, 1}:
        usual = (1, config.blocks, config.sum_groups, config.direct)
        for segments, blocks, groups, direct in (usual, (2, 3, 4, False), (1, 5, 1, True)):
            way = replace(config, image_rows=rows, segments=segments, blocks=blocks, sum_groups=groups, direct=direct)
            yield f"{case.name}-rows{rows}-segments{segments}-blocks{blocks}", way


def _every() -> list[Any]:
    """All layers in all ways; ``make test`` plays every third layer once, ways by turns."""
    found, chosen = [], []
    for turn, case in enumerate(IMAGE_CASES):
        ways = list(_ways(case))
        for i, (name, config) in enumerate(ways):
            found.append((case, config, name))
            chosen += [found[-1]] if turn % 3 == 0 and i == (2 * (turn // 3) + 1) % len(ways) else []
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("case", "config"), _every())
def test_every_way(case: Case, config: TensorWeightImagesConfig) -> None:
    proof.check(IMAGES, case.problem, config, kinds=KINDS[:1])


def test_what_lies_beside_the_image_is_left_out() -> None:
    """Of 3 x 3 filters over 2 x 2 pixels 16 products of 36, over 4 x 4 pixels 100 of 144."""
    for size, most in ((2, 16), (4, 100)):
        layer = ConvProblem(64, 128, size, size, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
        _, pairs = columns_of(layer, 3)
        assert units_of(layer, 1) * pairs == most


def test_blocks_have_equal_shares_and_slots_for_all_that_they_begin() -> None:
    for case in IMAGE_CASES:
        for config in IMAGES.configs(case.problem, HOPPER):
            slots = min(tiles_of(case.problem, config) + config.blocks - 1, 2 * config.blocks)
            assert IMAGES.workspace_bytes(case.problem, config) == slots * config.slot_bytes


def test_rows_of_a_stage_see_x_or_zeros() -> None:
    """Rows behind the last one of dy must not see x, which may be infinite there."""
    padded = replace(cases_weight.IMAGES, n=16, h=4)
    unpadded = replace(padded, h=5, padding=(0, 0, 1, 1))
    assert {config.image_rows for config in IMAGES.configs(unpadded, HOPPER)} == {1}
    assert {config.image_rows for config in IMAGES.configs(padded, HOPPER)} == {4}


def test_auto_takes_it_for_small_images_where_it_may() -> None:
    layer = ConvProblem(512, 512, 4, 4, 512, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
    assert choose(layer, HOPPER, limit=32 << 20).algorithm is IMAGES
    assert choose(layer, HOPPER).algorithm.name == "tensor_weight"
