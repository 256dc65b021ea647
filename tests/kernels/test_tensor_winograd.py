"""Winograd's F(2, 3) on tensor cores: where rows end, pairs of blocks, choice. More is in test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.kernels.hopper_fp32.tensor_winograd import PairConfig, copy_pixels_of, pair_map
from leanconv.problem import ConvProblem
from tests import proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_tensor import PAIR_CASES
from tests.variants import NAMED

TENSOR_WINOGRAD = NAMED["tensor_winograd"]
TENSOR_GEMM = NAMED["tensor_gemm"]
HOPPER = TARGETS[0]


pytestmark = pytest.mark.usefixtures("one_block_validates")


def _ways(case: Case) -> list[PairConfig]:
    """A configuration of each tile, whole and with the reduction split, of two rows, in NCHW with copies of each
    length."""
    kinds: dict[Any, PairConfig] = {}
    for config in TENSOR_WINOGRAD.configs(case.problem, HOPPER):
        kind = config.mma_n, config.n_tiles, config.split > 1, config.box_width, config.spacing > 0, config.output_rows
        kinds.setdefault((*kind, config.one_row), config)
    return list(kinds.values())


def _every() -> list[Any]:
    """All layers with all tiles; ``make test`` plays a quarter of the layers, tiles in rotation, and all
    of resident images."""
    found, chosen = [], []
    for turn, case in enumerate(PAIR_CASES):
        ways = sorted(_ways(case), key=lambda config: config.spacing > 0)
        in_resident = [config for config in ways if config.spacing] if "resident" in case.name else []
        for i, config in enumerate(ways):
            name = f"{case.name}-{config.n_tiles}x{config.mma_n}-split{config.split}"
            of_linear = "resident" if config.spacing else config.box_width
            name += f"-{of_linear}" if config.linear else "-two-rows" if config.output_rows > 1 else ""
            name += "-one-row" if config.one_row else ""
            found.append((case, config, name))
            if config in in_resident:
                chosen += [found[-1]] if config is in_resident[turn % len(in_resident)] else []
            elif not in_resident and turn % 4 == 0 and i == turn // 4 % len(ways):
                chosen.append(found[-1])
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("case", "config"), _every())
def test_every_tile(case: Case, config: PairConfig) -> None:
    proof.check(TENSOR_WINOGRAD, case.problem, config, kinds=KINDS[:1])


def test_a_stage_has_the_pixels_of_all_pairs() -> None:
    """Wherever a tile begins, counted by hand; a bulk copy walks rows of two pixels more than pairs have outputs."""
    for q in (1, 2, 3, 7, 8, 14, 28, 56, 57, 111, 112, 130, 300):
        problem = ConvProblem(2, 32, 9, q, 32, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
        pairs, seen = -(-q // 2), 0
        for first in range(0, 64 * pairs, 64):
            before, last = first // pairs, (first + 63) // pairs
            seen = max(seen, 2 * 63 + 2 * (last - before) + 4)
        assert copy_pixels_of(problem) == -(-seen // 8) * 8
        walk = pair_map(problem)
        assert not walk.why_not() and problem.w + walk.upper[0] - walk.lower[0] == 2 * pairs + 2


def test_rows_of_outputs_decide_the_order_of_sums() -> None:
    """Two rows of outputs share states where rows are the inner loop: other bits, so other batches must have it too.

    A tile of one row leaves out rows of filters, and counts as another order as well."""
    layer = ConvProblem(1, 128, 4, 9, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", precision="fp32")
    whole = [c for c in TENSOR_WINOGRAD.configs(layer, HOPPER) if c.filters == 64 and c.split == 1]
    kinds = {(c.output_rows, c.one_row) for c in whole}
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
    config = next(c for c in TENSOR_WINOGRAD.configs(problem, few) if c.multicast == 2)
    assert config.filters == 128 and config.ping_pong == (problem.precision == "fp32")
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
            if config.multicast == 2 and not config.one_row:
                grids[blocks] = TENSOR_WINOGRAD.plan(layer, config, few).launches[-1].grid
    assert grids == {2: 2, 5: 4, 8: 8}
    best = next(iter(TENSOR_WINOGRAD.configs(replace(layer, n=32, c=256, h=56, w=56, k=256), HOPPER)))
    assert best.multicast == 2 and best.ping_pong
