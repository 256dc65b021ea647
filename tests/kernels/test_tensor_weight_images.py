"""The filters' gradient in stages of many images: its shares of blocks, its columns, its limits, and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_fp32.tensor_weight_images import TensorWeightImagesConfig, columns_of, tiles_of, units_of
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE
from tests import emulator, proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_weight import IMAGE_CASES, drawn, in_sequential_sums
from tests.kernels.patching import Patch, broken_kernels
from tests.variants import NAMED

IMAGES = NAMED["tensor_weight_images"]
HOPPER = TARGETS[0]
#: 1152 products a weight and more, for data of every range.
LAYER = ConvProblem(128, 32, 3, 4, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")


def _ways(case: Case) -> Iterator[tuple[str, TensorWeightImagesConfig]]:
    """Stages of one row and of several; few blocks, whose shares begin and end within tiles."""
    config = next(iter(IMAGES.configs(case.problem, HOPPER)))
    for rows in {config.rows, 1}:
        usual = (1, config.blocks, config.groups, config.direct)
        for segments, blocks, groups, direct in (usual, (2, 3, 4, False), (1, 5, 1, True)):
            way = replace(config, rows=rows, segments=segments, blocks=blocks, groups=groups, direct=direct)
            yield f"{case.name}-rows{rows}-segments{segments}-blocks{blocks}", way


def _every() -> list[Any]:
    """All layers in all ways; ``make test`` plays every second layer once, ways by turns."""
    found, chosen = [], []
    for turn, case in enumerate(IMAGE_CASES):
        ways = list(_ways(case))
        for i, (name, config) in enumerate(ways):
            found.append((case, config, name))
            chosen += [found[-1]] if turn % 2 == 0 and i == (5 * turn + 1) % len(ways) else []
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("case", "config"), _every())
def test_every_way(case: Case, config: TensorWeightImagesConfig) -> None:
    proof.check(IMAGES, case.problem, config, kinds=KINDS[:1])


def played(x: np.ndarray, dy: np.ndarray, kernels: Path = INCLUDE, problem: ConvProblem = LAYER) -> np.ndarray:
    """What the kernel computes."""
    config = next(iter(IMAGES.configs(problem, HOPPER)))
    dw = np.full(problem.y_shape, np.nan, np.float32)
    plan = IMAGES.plan(problem, config, HOPPER)
    emulator.run_plan(plan, {"x": x, "dy": dy, "dw": dw}, kernels=kernels, orders=("ascending",))
    return dw


def _of_images(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """As `drawn`; in opposed images have scales that x and dy do not share."""
    if kind != "opposed":
        return drawn(kind, LAYER)
    x, dy = drawn("normal", LAYER)
    ramp = np.power(10.0, 8 - abs(np.arange(LAYER.n) % 64 - 32) / 2).reshape(-1, 1, 1, 1)
    return (x * ramp).astype(np.float32), (dy / ramp).astype(np.float32)


KINDS_OF_DATA = ("normal", "filters-apart", "opposed", "images-apart", "channels-apart", "sparse", "tiny", "zeros")


LOOKED_AT_NEVER = Patch(
    "factors of images are ignored", "sum_images", "{{static_cast<unsigned>(factors_of(_).apart) => 0u}}"
)
ROWS_OUTSIDE_DY = Patch("rows too many are outside dy", "ImageUnits::first_p", "_ {{< _ ? _ : _ - _}}")


@pytest.mark.parametrize("kind", selection.marked(KINDS_OF_DATA, ("opposed",), lambda kind: ((kind,), kind)))
def test_errors_on_data_of_every_range(kind: str, tmp_path: Path) -> None:
    """At most twice what a sequential float32 sum loses, three times where a hundredth of the products are left."""
    x, dy = _of_images(kind)
    assert in_sequential_sums(played(x, dy), x, dy, LAYER) <= {"normal": 1, "sparse": 3}.get(kind, 2)
    if kind == "opposed":
        broken = broken_kernels(tmp_path, LOOKED_AT_NEVER)
        assert not in_sequential_sums(played(x, dy, broken), x, dy, LAYER) <= 2


def test_what_is_no_number_reaches_just_the_weights_that_see_it(tmp_path: Path) -> None:
    problem = replace(LAYER, n=20, h=4, w=3)
    random = np.random.default_rng(2)
    x, dy = (random.standard_normal(each.shape).astype(np.float32) for each in problem.operands[:2])
    x[3, 1, 0, 5], x[4, 0, 2, 6], x[9, 3, 1, 7], dy[7, 1, 1, 9] = np.inf, np.nan, np.inf, -np.inf
    expected = np.ones(problem.y_shape, bool)
    # In the first column no output has the last tap of a row, in the last one and the first row none has the first.
    expected[:, :, :2, 5], expected[:, :2, 1:, 6], expected[:, 1:, :, 7], expected[9] = False, False, False, False
    # Rows too many of a stage are such as see x beside the image.
    broken = broken_kernels(tmp_path, ROWS_OUTSIDE_DY)
    for rows, kernels in ((1, INCLUDE), (2, INCLUDE), (2, broken)):
        config = replace(next(iter(IMAGES.configs(problem, HOPPER))), rows=rows)
        dw = np.full(problem.y_shape, np.nan, np.float32)
        plan = IMAGES.plan(problem, config, HOPPER)
        emulator.run_plan(plan, {"x": x, "dy": dy, "dw": dw}, kernels=kernels, orders=("ascending",))
        assert np.array_equal(np.isfinite(dw), expected) == (kernels is INCLUDE)


def test_what_lies_beside_the_image_is_left_out() -> None:
    """Of 3 x 3 filters over 2 x 2 pixels 16 products of 36, over 4 x 4 pixels 100 of 144."""
    for size, most in ((2, 16), (4, 100)):
        layer = ConvProblem(64, 128, size, size, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
        _, pairs = columns_of(layer, 3)
        assert units_of(layer, 1) * pairs == most


def test_blocks_have_equal_shares_and_slots_for_all_that_they_begin() -> None:
    for case in IMAGE_CASES:
        for config in IMAGES.configs(case.problem, HOPPER):
            assert config.shared_bytes <= HOPPER.shared_per_block
            slots = min(tiles_of(case.problem, config) + config.blocks - 1, 2 * config.blocks)
            assert IMAGES.plan(case.problem, config, HOPPER).workspace_bytes == slots * config.slot_bytes
            assert IMAGES.workspace_bytes(case.problem, config) == slots * config.slot_bytes


def test_limits_name_the_rule() -> None:
    assert "n=15 images are fewer than 16" in IMAGES.why_not(replace(LAYER, n=15), HOPPER)
    assert IMAGES.why_not(replace(LAYER, layout="NCHW"), HOPPER)[0].startswith("layout='NCHW' is not NHWC")
    assert "s=1 leaves no taps of a row that could share x" in IMAGES.why_not(replace(LAYER, s=1), HOPPER)
    assert any("in fours" in reason for reason in IMAGES.why_not(replace(LAYER, c=34), HOPPER))
    unseen = replace(LAYER, h=1, r=1, padding=(1, 2, 1, 1), stride=(3, 1))
    assert IMAGES.why_not(unseen, HOPPER) == ["no tap sees the image"]
    # Rows behind the last one of dy must not see x, which may be infinite there.
    unpadded = replace(LAYER, n=16, h=5, padding=(0, 0, 1, 1))
    assert {config.rows for config in IMAGES.configs(unpadded, HOPPER)} == {1}
    assert {config.rows for config in IMAGES.configs(replace(LAYER, n=16, h=4), HOPPER)} == {4}


def test_auto_takes_it_for_small_images_where_it_may() -> None:
    layer = ConvProblem(512, 512, 4, 4, 512, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
    assert choose(layer, HOPPER, limit=32 << 20).algorithm is IMAGES
    assert choose(layer, HOPPER).algorithm.name == "tensor_weight"
