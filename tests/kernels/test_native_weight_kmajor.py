"""The filters' gradient of 16-bit elements of NCHW on tensor cores, both operands as they lie: every tile, rows of all
kinds, sharing of pixels. More is in test_tensor_cores.py."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import by_model, consider
from leanconv.call.explain import NOMINAL
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.common.split_k import MOST_PIXELS
from leanconv.kernels.contract import variant
from leanconv.kernels.hopper_native import native_weight_kmajor
from leanconv.kernels.hopper_native.native_weight_kmajor import ALIGNED, TILES, whole_configs
from leanconv.problem import ConvProblem
from leanconv.words import parse_problem
from tests import proof, selection
from tests.cases import TARGETS
from tests.kernels.tensor_cores import LAYERS
from tests.variants import NAMED

WEIGHT = NAMED["native_weight_kmajor"]
SPLIT_K = NAMED["native_weight_kmajor_split_k"]
HOPPER = TARGETS[0]
LAYER = LAYERS[WEIGHT.stem]
#: A small layer whose rows are whole 16 bytes.
ROW = ConvProblem(2, 40, 5, 24, 72, 3, 3, padding=(1, 1, 1, 1), dtype="float16", op="wgrad")

#: Tiles, with the filter rows of a product that they have in this test, and the width of rows.
EVERY_TILE = [
    (tile, rows, width) for tile in TILES for rows in (1, 3, 4) for width in (16, 40) if tile[2] // rows % 8 == 0
]
CHOSEN = [
    ((1, 3, 192), 3, 16), ((2, 1, 96), 3, 40), ((2, 1, 256), 4, 16), ((1, 3, 64), 4, 40), ((2, 1, 32), 1, 16),
    ((2, 1, 128), 1, 16),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "rows", "width"),
    selection.marked(EVERY_TILE, CHOSEN, lambda each: (each, f"{'x'.join(map(str, each[0]))}-{each[1]}-{each[2]}")),
)
def test_every_tile_is_right(tile: native_weight_kmajor.Tile, rows: int, width: int) -> None:
    channels, filters = tile[2] // rows + 8, 64 * tile[0] + 8
    problem = ConvProblem(
        1, channels, 5, width, filters, rows, 3, padding=(1, rows - 1, 1, 1), dtype="float16", op="wgrad"
    )
    columns = next(each for each in native_weight_kmajor.COLUMNS if each < 2 * width)
    config = native_weight_kmajor.config_of(problem, tile, columns, 2, 3)
    proof.check(WEIGHT, problem, config, kinds=("positive",))


#: Rows of all kinds: paddings, dilation, strides of rows, blocks of columns, several groups of taps, groups, volumes.
ROWS: list[dict[str, Any]] = [
    {"padding": (-1, -2, -3, 5)},
    {"padding": (4, 0, 0, 2)},
    {"w": 72, "h": 3, "dtype": "bfloat16"},
    {"w": 72, "h": 3, "c": 24, "padding": (1, 1, 5, 5)},
    {"h": 9, "stride": (2, 1), "w": 8},
    {"h": 11, "stride": (3, 1), "dilation": (2, 1)},
    {"dilation": (2, 3), "padding": (2, 2, 3, 3)},
    {"dilation": (1, 2), "padding": (0, 2, 1, 3), "w": 16},
    {"r": 5, "s": 5, "padding": (2, 2, 2, 2), "w": 16},
    {"r": 2, "s": 9, "padding": (0, 0, 0, 0)},
    {"s": 2, "padding": (1, 1, 0, 1), "w": 16},
    {"r": 1, "s": 1, "padding": (0, 0, 0, 0), "accumulate": True},
    {"c": 48, "k": 80, "groups": 2},
    {"n": 1, "h": 3, "w": 8, "padding": (0, 0, 0, 2)},
    {"d": 4, "t": 3, "padding_d": (1, 1), "h": 4},
    {"d": 5, "t": 2, "r": 2, "stride_d": 2, "dilation_d": 2, "padding_d": (1, 0), "h": 4, "w": 16},
]
CHOSEN_ROWS = [ROWS[i] for i in (0, 3, 5, 6, 7, 8, 9, 12, 13, 15)]


def _each_row() -> Any:
    return selection.marked(ROWS, CHOSEN_ROWS, lambda each: ((each,), str(each)))


@pytest.mark.parametrize("changes", _each_row())
def test_rows_of_all_kinds_are_right(changes: dict[str, Any]) -> None:
    problem = replace(ROW, **changes)
    for config in whole_configs(problem, HOPPER)[:2]:
        proof.check(WEIGHT, problem, config, kinds=("zero-mean",))


def test_what_taps_read_of_a_row_is_copied() -> None:
    """Every column of a tile, from where the copy of a row of dy begins: whole words, the second of a pair too."""
    for s, left, step, width in product((1, 2, 3, 5, 7), (-2, 0, 1, 3), (1, 2, 3), (16, 24, 72)):
        behind = (s - 1) * step - left
        problem = replace(ROW, s=s, w=width, padding=(1, 1, left, behind), dilation=(1, step))
        assert WEIGHT.reasons(problem, HOPPER) == []
        for config in whole_configs(problem, HOPPER):
            read = 16 * native_weight_kmajor.held_steps(problem, config.columns)
            for first in range(0, s, config.all_columns):
                begin = (left - (first + config.all_columns - 1) * step) // ALIGNED * ALIGNED
                for column in range(first, first + config.all_columns):
                    shift = left - column * step - begin
                    assert shift >= 0
                    assert shift // 2 * 2 + read + 2 * (shift % 2) <= config.window(problem)
            assert config.window(problem) % 16 == 8


@pytest.mark.parametrize(
    ("split", "split_k"), selection.marked([(1, 3), (2, 1), (5, 2), (16, 1)], [(2, 1), (5, 2)], lambda s: (s, str(s)))
)
def test_blocks_share_the_pixels_of_a_tile(split: int, split_k: int) -> None:
    """Also more blocks than there are stages: some have none; and blocks that do not share the filters evenly."""
    problem = replace(ROW, w=16)
    algorithm = WEIGHT if split_k == 1 else SPLIT_K
    config = variant(whole_configs(problem, HOPPER)[0], split=split, split_k=split_k)
    proof.check(algorithm, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize("stride", [80, 100, 150])
def test_what_has_no_room_is_said(stride: int) -> None:
    problem = replace(LAYER, w=8, h=500, stride=(stride, 1))
    (reason,) = WEIGHT.reasons(problem, HOPPER)
    said = re.fullmatch(r"(\d+) stages of (\d+) bytes take more than the (\d+) bytes of shared memory .*", reason)
    assert said
    stages, each, room = map(int, said.groups())
    assert stages * each > room == HOPPER.shared_per_block


@pytest.mark.parametrize("images", [1, 32, 4096])
def test_no_block_sums_more_pixels_than_the_tensor_core_may(images: int) -> None:
    problem = replace(LAYER, n=images, h=224, w=224)
    sums = 4 * int(np.prod(problem.y_shape))
    for algorithm in (WEIGHT, SPLIT_K):
        configs: list[Any] = list(algorithm.configs(problem, HOPPER))
        assert bool(configs) == (algorithm is SPLIT_K or images < 4096)
        for config in configs:
            pixels = config.stages_of(problem) * config.rows * config.columns
            assert pixels <= MOST_PIXELS * config.split * config.split_k
            assert algorithm.workspace_bytes(problem, config) == (sums * config.split_k if algorithm is SPLIT_K else 0)
    # beyond what a cluster sums, a workspace is needed, and said
    (plain,) = (each for each in ALGORITHMS if each.stem == "native_weight_kmajor")
    fits = consider(plain, problem, HOPPER, "auto", 0).reasons
    assert bool(fits) == (images == 4096)
    assert all("bytes of workspace, and workspace_limit is 0" in each for each in fits)


def test_configurations_are_told_apart() -> None:
    problem = replace(LAYER, c=64, k=64)
    found = SPLIT_K.within(problem, HOPPER, 7 * 4 * 64 * 64 * 9)
    assert max(config.split_k for _, config in found) == 7
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("c", "k", "r", "expected"),
    [
        (16, 16, 3, {(1, 3, 32)}),  # no narrower tile has three rows of taps
        (64, 64, 3, {(1, 3, 64), (1, 3, 32)}),
        (64, 64, 1, {(2, 1, 96), (2, 1, 64), (2, 1, 32)}),  # of few filters too, where there are not three columns
        (64, 64, 2, {(2, 1, 96), (2, 1, 64), (2, 1, 48), (2, 1, 32), (2, 1, 16)}),
        (8, 128, 5, {(1, 3, 64), (1, 3, 32), (2, 1, 64), (2, 1, 32)}),  # the wider ones have fewer filter columns
    ],
)
def test_tiles_are_those_that_the_layer_fills(c: int, k: int, r: int, expected: set[tuple[int, int, int]]) -> None:
    problem = replace(LAYER, c=c, k=k, r=r, s=r, padding=(r // 2, (r - 1) // 2) * 2)
    found = {(each.filter_groups, each.column_groups, each.channels) for each in whole_configs(problem, HOPPER)}
    assert found == expected


def test_other_tiles_serve_where_those_of_few_filters_have_no_room() -> None:
    problem = replace(LAYER, c=64, k=64, r=1, w=8, h=500, stride=(40, 1), padding=(0, 0, 1, 1))
    assert {each.filter_groups for each in whole_configs(problem, HOPPER)} == {2}


@pytest.mark.parametrize("limit", [1 << 25, 0])
@pytest.mark.parametrize("r", [1, 2, 3, 5, 7])
def test_tiles_left_out_are_not_quicker(monkeypatch: pytest.MonkeyPatch, r: int, limit: int) -> None:
    problems = [
        replace(LAYER, n=32, c=c, k=k, h=h, w=h, r=r, s=r, padding=(r // 2, (r - 1) // 2) * 2)
        for c, k, h in product((8, 32, 64, 128), (16, 64, 128), (56, 128))
    ]
    taken = [SPLIT_K.quickest(problem, NOMINAL, limit) for problem in problems]
    both = native_weight_kmajor.tiles_for
    monkeypatch.setattr(native_weight_kmajor, "tiles_for", lambda problem: (sum(both(problem), []),))
    whole_configs.cache_clear()
    try:
        every = [SPLIT_K.quickest(problem, NOMINAL, limit) for problem in problems]
    finally:
        whole_configs.cache_clear()
    for problem, left, best in zip(problems, taken, every, strict=True):
        assert left and best and left[0] <= 1.05 * best[0], problem


@pytest.mark.parametrize("r", [1, 3, 7, 11])
def test_choosing_computes_little(monkeypatch: pytest.MonkeyPatch, r: int) -> None:
    """A configuration for each tile, and the window of each width of rows and filter columns, beside those of what is
    found: for its tensor maps, and for its time."""
    asked: dict[str, list[tuple[Any, ...]]] = {}

    def counted(name: str) -> None:
        plain, calls = getattr(native_weight_kmajor, name), asked.setdefault(name, [])

        def called(*given: Any) -> Any:
            calls.append(given)
            return plain(*given)

        monkeypatch.setattr(native_weight_kmajor, name, called)

    for name in ("config_of", "window_of", "maps_of"):
        counted(name)
    problem = replace(LAYER, n=32, c=256, k=256, h=56, w=56, r=r, s=r, padding=(r // 2, (r - 1) // 2) * 2)
    whole_configs.cache_clear()
    assert SPLIT_K.quickest(problem, NOMINAL, 1 << 25)
    found, windows = len(whole_configs(problem, NOMINAL)), asked["window_of"]
    assert len(asked["config_of"]) == len(set(asked["config_of"])) <= len(TILES)
    assert len(windows) == len(set(windows)) + 2 * found
    assert len(asked["maps_of"]) == found


#: Layers whose rows are whole 16 bytes, and the microseconds of native_weight_kmajor and of native_weight_nchw in
#: float16, the quickest of the configurations tried: with a workspace of up to 32 MiB, and without. Explored (H200,
#: 9a529e60), burst.
COPIED = {
    "n32,c256,h56,k256,r3,pad1": ((192.2, 264.9), (283.3, 369.8)),
    "n32,c64,h56,k64,r3,pad1": ((30.6, 28.1), (58.5, 56.3)),
    "n64,c64,h56,k64,r3,pad1": ((44.2, 46.2), (108.3, 101.2)),
    "n32,c64,h224,k64,r3,pad1": ((210.1, 315.0), (762.6, 815.8)),
    "n64,c64,h112,k128,r3,pad1": ((194.1, 304.3), (491.5, 520.7)),
    "n32,c512,h16,k512,r3,pad1": ((83.5, 97.1), (83.5, 97.1)),
    "n32,c256,h32,k256,r3,pad1": ((67.3, 96.0), (90.0, 156.1)),
    "n32,c256,h56,k64,r1": ((40.8, 30.0), (102.7, 58.3)),
}
#: Others, and the microseconds of native_weight_nchw.
OTHERS = {
    "n64,c96,h24,k256,r5": (106.7, 122.9),
    "n64,c64,h112,k128,r3": (251.2, 493.0),
    "n64,c64,h56,k64,r3": (43.6, 86.8),
    "n32,c128,h28,k128,r3,pad1": (24.5, 45.9),
    "n64,c128,h28,k128,r3,pad1": (41.2, 81.0),
    "n32,c256,h14,k256,r3,pad1": (25.2, 28.9),
    "n64,c256,h14,k256,r3,pad1": (40.4, 58.5),
    "n64,c256,h12,k512,r3": (45.9, 45.9),
    "n64,c128,h28,k128,r3": (40.9, 66.1),
    "n64,c256,h14,k256,r3": (40.9, 57.1),
    "n32,c512,h28,k512,r3,pad1": (257.4, 257.4),
    "n64,c256,h14,k1024,r1": (36.4, 51.9),
}


@pytest.mark.parametrize("limit", [1 << 25, 0])
@pytest.mark.parametrize("layer", [*COPIED, *OTHERS])
def test_auto_takes_the_quicker_strategy(layer: str, limit: int) -> None:
    """Or one that takes 5 % longer at most, as measured; of what is chosen the prediction is right within 20 %."""
    choice = by_model(parse_problem(f"conv:{layer},NCHW,float16,wgrad"), NOMINAL, "auto", limit)
    which, stem = limit == 0, choice.algorithm.stem
    if layer in COPIED:
        us = COPIED[layer][which][("native_weight_kmajor", "native_weight_nchw").index(stem)]
        assert us <= 1.05 * min(COPIED[layer][which])
    else:
        us = OTHERS[layer][which]
        assert stem == "native_weight_nchw"
    assert choice.cost / 1980 == pytest.approx(us, rel=0.2)
