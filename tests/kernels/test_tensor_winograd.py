"""Winograd's F(2, 3) on tensor cores: where rows end, what is kept on data of every range, limits and choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.hopper_fp32.filters import prepared_floats
from leanconv.kernels.hopper_fp32.tensor_winograd import PairConfig, lines_of, pair_map
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE
from tests import emulator, proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_tensor import (
    LAYER,
    PAIR_CASES,
    RANGES,
    WIDE,
    drawn,
    in_sequential_sums,
    with_no_numbers,
)
from tests.kernels.breaks import scales
from tests.kernels.patching import Patch, broken_kernels
from tests.variants import NAMED

TENSOR_WINOGRAD = NAMED["tensor_winograd"]
TENSOR_GEMM = NAMED["tensor_gemm"]
HOPPER = TARGETS[0]


pytestmark = pytest.mark.usefixtures("one_block_settles")


def _ways(case: Case) -> list[PairConfig]:
    """A configuration of each tile, whole and with the reduction split, of two rows, in NCHW with copies of each
    length."""
    kinds: dict[Any, PairConfig] = {}
    for config in TENSOR_WINOGRAD.configs(case.problem, HOPPER):
        kind = config.chunk, config.chunks, config.split > 1, config.granule, config.spacing > 0, config.heights
        kinds.setdefault((*kind, config.one_row), config)
    return list(kinds.values())


def _every() -> list[Any]:
    """All layers with all tiles; ``make test`` plays half of the layers, tiles by turns, and planes in their layers."""
    found, chosen = [], []
    for turn, case in enumerate(PAIR_CASES):
        ways = sorted(_ways(case), key=lambda config: config.spacing > 0)
        in_planes = [config for config in ways if config.spacing] if "planes" in case.name else []
        for i, config in enumerate(ways):
            name = f"{case.name}-{config.chunks}x{config.chunk}-split{config.split}"
            of_flat = "planes" if config.spacing else config.granule
            name += f"-{of_flat}" if config.flat else "-two-rows" if config.heights > 1 else ""
            name += "-one-row" if config.one_row else ""
            found.append((case, config, name))
            if config in in_planes:
                chosen += [found[-1]] if config is in_planes[turn % len(in_planes)] else []
            elif not in_planes and turn % 2 == 0 and i == turn // 2 % len(ways):
                chosen.append(found[-1])
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("case", "config"), _every())
def test_every_tile(case: Case, config: PairConfig) -> None:
    proof.check(TENSOR_WINOGRAD, case.problem, config, kinds=KINDS[:1])


def played(x: np.ndarray, w: np.ndarray, problem: ConvProblem = LAYER, kernels: Path = INCLUDE) -> np.ndarray:
    """What the kernel computes."""
    config = next(c for c in TENSOR_WINOGRAD.configs(problem, HOPPER) if (c.filters, c.split) == (64, 1))
    y = np.full(problem.y_shape, np.nan, np.float32)
    plan = TENSOR_WINOGRAD.plan(problem, config, HOPPER)
    emulator.run_plan(plan, {"x": x, "w": w, "bias": None, "y": y}, kernels=kernels, orders=("ascending",))
    return y


def channels_first(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(array, 3, 1))


def lost(kind: str, kernels: Path = INCLUDE, problem: ConvProblem = LAYER) -> tuple[float, float]:
    """The kernel's error on data of this kind in units of that of a sequential float32 sum: of all outputs, and of the
    filter where it is largest."""
    last = replace(problem, layout="NHWC")
    x, w = drawn(kind, last)
    if problem.layout == "NCHW":
        y = np.moveaxis(played(channels_first(x), channels_first(w), problem, kernels), 1, 3)
    else:
        y = played(x, w, problem, kernels)
    reference = oracle.conv2d(last, x, w)
    of_all = oracle.relative_error(y, reference)
    yardstick = oracle.relative_error(oracle.sequential_float32(last, x, w), reference)
    return of_all / yardstick, in_sequential_sums(y, x, w, last)


def _layers_and_ranges() -> list[Any]:
    """3 columns with all data, more of them and NCHW; ``make test`` tries these with few."""
    layers = (LAYER, WIDE, replace(LAYER, layout="NCHW"))
    every = [(problem, kind, f"{problem.s}-{problem.layout}-{kind}") for problem in layers for kind in RANGES]
    chosen = [each for each in every if each[0] is LAYER or each[1] in ("outlier", "channels-apart")]
    return selection.marked(every, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "kind"), _layers_and_ranges())
def test_errors_on_data_of_every_range(problem: ConvProblem, kind: str) -> None:
    """All outputs together lose no more than a sequential float32 sum; single filters, with few products that matter,
    up to 2.5 times as much: two outputs are sums and differences of three rounded sums each."""
    of_all, of_worst = lost(kind, problem=problem)
    assert of_all <= 1 and of_worst <= 2.5


@pytest.mark.parametrize(("layout", "kind", "patch"), scales.TENSOR_WINOGRAD, ids=str)
def test_errors_of_broken_scales_show(layout: Any, kind: str, patch: Patch, tmp_path: Path) -> None:
    assert not lost(kind, broken_kernels(tmp_path, patch), replace(LAYER, layout=layout))[1] <= 2.5


def test_an_outlier_leaves_its_neighbours_alone() -> None:
    """Also the other output of a pair, whose window does not hold it: each state has a scale of its own."""
    x, w = drawn("outlier")
    y, reference = played(x, w), oracle.conv2d(LAYER, x, w)
    plain = oracle.sequential_float32(LAYER, x, w)
    unseen = np.ones(y.shape, bool)
    unseen[0, 2:5, 3:6] = False
    assert np.linalg.norm((y - reference)[unseen]) < np.linalg.norm((plain - reference)[unseen])


#: Rows of two segments and a column.
SEVEN = replace(LAYER, s=7, padding=(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("problem", "layout"),
    [(LAYER, "NHWC"), (WIDE, "NHWC"), (SEVEN, "NHWC"), (LAYER, "NCHW"), (SEVEN, "NCHW")],
)
def test_what_is_no_number_reaches_just_the_outputs_that_see_it(problem: ConvProblem, layout: Any) -> None:
    """Segments see no pixel that their row does not see: the last one does not end beyond it, nor a column. Flat
    pixels are in no product with those of neighbouring rows."""
    x, w, unseen = with_no_numbers(problem)
    if layout == "NCHW":
        x, w, unseen = channels_first(x), channels_first(w), channels_first(unseen)
    np.testing.assert_array_equal(np.isfinite(played(x, w, replace(problem, layout=layout))), unseen)


def test_one_product_keeps_eleven_bits() -> None:
    problem = replace(LAYER, precision="tf32")
    x, w = drawn("normal", problem)
    assert 1e-4 < oracle.relative_error(played(x, w, problem), oracle.conv2d(problem, x, w)) < 7e-4


def test_limits_name_the_rule() -> None:
    def refused(**changes: Any) -> list[str]:
        return TENSOR_WINOGRAD.why_not(replace(LAYER, **changes), HOPPER)

    assert refused() == [] and refused(r=1) == [] and refused(r=5, padding=(4, 4, 1, 1), dilation=(2, 1)) == []
    assert refused(s=2) == ["filters are 2 wide, less than 3"]
    assert refused(s=31, padding=(1, 1, 15, 15)) == []
    far = refused(r=1, s=261, w=260, padding=(0, 0, 100, 130))
    assert far == ["filters are 261 wide, more than the 258 that bulk copies reach"]
    assert refused(layout="CHWN") == ["layout='CHWN' is neither NHWC nor NCHW"]
    assert refused(layout="NCHW") == []
    for changes in ({"w": 9}, {"padding": (1, 1, 1, 2)}, {"c": 96, "k": 96, "groups": 2}):
        assert any("in NCHW" in reason for reason in refused(layout="NCHW", **changes))
    assert refused(stride=(1, 2)) == ["stride=(1, 2) is not (1, 1)"]
    assert any("dilation=(1, 2)" in reason for reason in refused(dilation=(1, 2)))
    assert any("62 channels" in reason for reason in refused(c=62))
    for target in TARGETS[1:]:
        assert any(target.arch in reason for reason in TENSOR_WINOGRAD.why_not(LAYER, target))
    exact = replace(LAYER, precision="ieee")
    assert any("'fp32'" in reason for reason in TENSOR_WINOGRAD.reasons(exact, HOPPER))


def test_a_stage_has_the_pixels_of_all_pairs() -> None:
    """Wherever a tile begins, counted by hand; a bulk copy walks rows of two pixels more than pairs have outputs."""
    for q in (1, 2, 3, 7, 8, 14, 28, 56, 57, 111, 112, 130, 300):
        problem = ConvProblem(2, 32, 9, q, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
        pairs, seen = -(-q // 2), 0
        for first in range(0, 64 * pairs, 64):
            before, last = first // pairs, (first + 63) // pairs
            seen = max(seen, 2 * 63 + 2 * (last - before) + 4)
        assert lines_of(problem) == -(-seen // 8) * 8
        walk = pair_map(problem)
        assert not walk.why_not() and problem.w + walk.upper[0] - walk.lower[0] == 2 * pairs + 2


def test_rings_and_prepared_filters_have_room() -> None:
    for case in PAIR_CASES:
        for config in TENSOR_WINOGRAD.configs(case.problem, HOPPER):
            assert config.shared_bytes <= HOPPER.shared_per_block
            plan = TENSOR_WINOGRAD.plan(case.problem, config, HOPPER)
            assert plan.prepared_bytes == TENSOR_WINOGRAD.prepared_bytes(case.problem)
            if case.problem.op == "fprop":
                head, every = prepared_floats(case.problem, config)
                assert head % 4 == 0 and 4 * every <= plan.prepared_bytes


def test_rows_of_outputs_decide_the_order_of_sums() -> None:
    """Two rows of outputs share states where rows are the inner loop: other bits, so other batches must have it too.

    A tile of one row leaves out rows of filters, and counts as another order as well."""
    layer = ConvProblem(1, 128, 4, 9, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32")
    whole = [c for c in TENSOR_WINOGRAD.configs(layer, HOPPER) if c.filters == 64 and c.split == 1]
    kinds = {(c.heights, c.one_row) for c in whole}
    assert kinds == {(1, False), (1, True), (2, False)}
    assert len({TENSOR_WINOGRAD.order_of_sums(layer, c) for c in whole}) == len(kinds)


def test_auto_takes_it_where_it_is_faster() -> None:
    """But not where rows have one output, and half of each pair is nothing."""

    def faster(problem: ConvProblem) -> bool:
        ours, others = TENSOR_WINOGRAD.within(problem, HOPPER), TENSOR_GEMM.within(problem, HOPPER)
        return ours[0][0] < others[0][0]

    for channels in (64, 128, 256):
        layer = ConvProblem(32, channels, 56, 56, channels, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
        assert faster(layer) and faster(replace(layer, op="dgrad"))
    assert not faster(ConvProblem(32, 256, 560, 1, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC"))


def test_a_tile_that_is_left_is_shared() -> None:
    """Of five tiles each of four blocks has one, and two of them share the last one."""
    few = replace(HOPPER, multiprocessors=4)
    problem = ConvProblem(2, 64, 9, 32, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32", bias=True)
    config = next(c for c in TENSOR_WINOGRAD.configs(problem, few) if (c.split, c.filters) == (2, 64))
    (launch,) = TENSOR_WINOGRAD.plan(problem, config, few).launches
    assert launch.grid == 4
    proof.check(TENSOR_WINOGRAD, problem, config, kinds=KINDS[:1], target=few)


def _pairs_of_blocks() -> list[Any]:
    """Layers of 128 filters and more on four blocks, hence two pairs."""
    layer = ConvProblem(5, 40, 9, 13, 136, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32", bias=True)
    every = [
        (layer, "the last pair has one tile"),
        (replace(layer, precision="tf32", n=7), "one product, without turns"),
        (replace(layer, op="dgrad", c=136, k=72, bias=False), "gradient of the input"),
        (replace(layer, c=128, k=264, groups=2, r=1, padding=(0, 0, 1, 1)), "groups"),
    ]
    return selection.marked(every, every[:2], lambda each: (each[:1], each[1]))


@pytest.mark.parametrize("problem", _pairs_of_blocks())
def test_pairs_of_blocks_receive_filters_together(problem: ConvProblem) -> None:
    few = replace(HOPPER, multiprocessors=4)
    config = next(c for c in TENSOR_WINOGRAD.configs(problem, few) if c.receivers == 2)
    assert config.filters == 128 and config.turns == (problem.precision == "fp32")
    launch = TENSOR_WINOGRAD.plan(problem, config, few).launches[-1]
    assert launch.grid == 4 and launch.cluster == 2
    proof.check(TENSOR_WINOGRAD, problem, config, kinds=KINDS[:1], target=few)


def test_pairs_of_blocks_are_for_many_tiles() -> None:
    """An odd tile of pixels has an empty one beside it; an odd multiprocessor has no block."""
    layer = ConvProblem(7, 64, 8, 16, 128, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32")
    grids = {}
    for blocks in (2, 5, 8, 9):
        few = replace(HOPPER, multiprocessors=blocks)
        for config in TENSOR_WINOGRAD.configs(layer, few):
            if config.receivers == 2 and not config.one_row:
                grids[blocks] = TENSOR_WINOGRAD.plan(layer, config, few).launches[-1].grid
    assert grids == {2: 2, 5: 4, 8: 8}
    best = next(iter(TENSOR_WINOGRAD.configs(replace(layer, n=32, c=256, h=56, w=56, k=256), HOPPER)))
    assert best.receivers == 2 and best.turns
