"""Direct convolution in tiles: layers that its loaders and runs of pixels tell apart, in blocks of many shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.kernels.contract import ceil_div
from leanconv.kernels.direct.direct_tiled import (
    DirectTiledConfig,
    best_pitch,
    block,
    channels,
    cycles,
    lanes,
    layout,
    pixel_cycles,
    registers_needed,
    segments,
    unrolled_rows,
)
from leanconv.problem import ConvProblem
from tests import cases, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

TILED = NAMED["direct_tiled"]
LAYOUTS = ("NCHW", "NHWC")
Layer = ConvProblem

#: Several tiles in every direction with a rest, rows in aligned fours and others, channels that no step divides.
#:             n  c  h   w   k   r  s
LAYERS = {
    "same": Layer(2, 9, 19, 21, 20, 3, 3, padding=(1, 1, 1, 1), bias=True, activation="relu"),
    "fours": Layer(2, 6, 18, 24, 33, 3, 3),
    "fours-padded": Layer(1, 5, 11, 20, 12, 5, 5, padding=(2, 2, 2, 2)),
    "fours-uneven": Layer(1, 4, 10, 16, 18, 3, 7, padding=(0, 2, 3, 1), bias=True),
    "fours-inside": Layer(2, 5, 9, 12, 7, 2, 3, padding=(4, 2, 3, 5), op="dgrad"),
    "first": Layer(2, 3, 30, 33, 24, 7, 7, stride=(2, 2), padding=(3, 3, 3, 3)),
    "patches": Layer(1, 3, 24, 32, 35, 4, 4, stride=(4, 4), bias=True),
    "eleven": Layer(1, 3, 37, 41, 18, 11, 11, stride=(4, 4), padding=(2, 2, 2, 2)),
    "one-channel": Layer(3, 1, 21, 26, 40, 3, 3),
    "stride-uneven": Layer(2, 5, 17, 30, 8, 4, 3, stride=(3, 2), padding=(0, 1, 1, 0)),
    "stride-over-filter": Layer(2, 4, 19, 23, 5, 2, 3, stride=(5, 4)),
    "dilation": Layer(1, 6, 22, 28, 9, 3, 3, dilation=(2, 3), padding=(2, 2, 3, 3)),
    "far-apart": Layer(1, 3, 12, 60, 6, 2, 4, dilation=(3, 13)),
    "dilated-stride": Layer(1, 5, 25, 24, 6, 3, 4, dilation=(3, 2), stride=(2, 3), padding=(3, 2, 1, 1)),
    "wide-filter": Layer(1, 3, 6, 60, 9, 1, 31, padding=(0, 0, 15, 15)),
    "tall-filter": Layer(1, 3, 60, 6, 9, 31, 1, padding=(15, 15, 0, 0)),
    "one-by-one": Layer(2, 21, 9, 13, 17, 1, 1, activation="relu"),
    "groups": Layer(2, 12, 9, 14, 20, 3, 3, groups=2, padding=(1, 1, 1, 1), bias=True),
    "accumulate": Layer(2, 4, 9, 16, 12, 3, 3, padding=(1, 1, 1, 1), accumulate=True, activation="relu"),
    "float16": Layer(2, 5, 10, 16, 12, 3, 3, padding=(1, 1, 1, 1), dtype="float16", bias=True, activation="relu"),
    "bfloat16": Layer(1, 9, 13, 15, 8, 5, 5, stride=(2, 1), padding=(2, 2, 2, 2), dtype="bfloat16"),
    "gradient": Layer(2, 20, 13, 14, 9, 3, 3, padding=(1, 1, 1, 1), op="dgrad"),
    "gradient-uneven": Layer(1, 18, 12, 16, 7, 5, 3, padding=(3, 0, 0, 2), op="dgrad"),
    "gradient-groups": Layer(1, 12, 9, 11, 10, 3, 2, padding=(1, 1, 1, 0), groups=2, op="dgrad"),
    "gradient-dilation": Layer(1, 6, 15, 14, 5, 3, 3, dilation=(2, 3), padding=(2, 1, 2, 0), op="dgrad"),
    "gradient-float16": Layer(1, 17, 9, 12, 6, 3, 3, padding=(1, 1, 1, 1), op="dgrad", dtype="float16"),
}
EVERY = [(f"{name}-{each.lower()}", replace(p, layout=each)) for name, p in LAYERS.items() for each in LAYOUTS]

#: Blocks and threads, channels of a step, and what else is set: small ones, for the emulator plays every thread.
BLOCKS: tuple[tuple[tuple[int, int, int], tuple[int, int], int, dict[str, Any]], ...] = (
    ((16, 8, 4), (4, 4), 3, {"walk": 2}),
    ((16, 16, 8), (4, 8), 2, {"stages": 3}),
    ((32, 8, 8), (8, 4), 4, {"vector": False}),
    ((32, 16, 4), (8, 8), 1, {"unrolled_rows": 2}),
    ((16, 32, 4), (4, 16), 2, {"walk": 3}),
    ((32, 8, 8), (16, 4), 8, {"stages": 3, "walk": 2}),
    ((16, 8, 8), (4, 8), 64, {"walk": 4}),
    ((32, 16, 4), (8, 4), 2, {"unrolled_rows": 1}),
)


def runs() -> list[Any]:
    """Every layer in every block that can have it; ``make test`` plays half of the layers, in one of the layouts."""
    found = []
    for turn, (name, problem) in enumerate(EVERY):
        number, played = 0, (turn // len(LAYOUTS) + turn) % 4 == 0
        for at in range(len(BLOCKS)):
            tile, thread, tile_c, rest = BLOCKS[(turn + at) % len(BLOCKS)]
            config = block(
                problem, TARGETS[0], tile, thread, tile_c, **{k: v for k, v in rest.items() if k != "unrolled_rows"}
            )
            if config is not None:
                rows = min(rest.get("unrolled_rows", config.unrolled_rows), config.tile_c * problem.r)
                config = replace(config, unrolled_rows=rows)
                found.append((problem, config, f"{name}-{(turn + at) % len(BLOCKS)}", number == 0 and played))
                number += 1
    return selection.marked(found, [each for each in found if each[3]], lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "config"), runs())
def test_every_layer_is_right(problem: ConvProblem, config: DirectTiledConfig) -> None:
    proof.check(TILED, problem, config, kinds=cases.KINDS[:1])


@pytest.mark.parametrize("name", ["same-nhwc", "fours-padded-nchw", "gradient-nhwc"])
def test_offsets_of_large_tensors(name: str) -> None:
    problem = dict(EVERY)[name]
    config = block(problem, TARGETS[0], (16, 8, 4), (4, 4), 2, 2)
    assert config is not None
    plan = proof.wide_offsets(TILED, problem, config, TARGETS[0])
    proof.check(TILED, problem, config, kinds=cases.KINDS[:1], change=lambda _: plan)


def test_what_it_computes_and_what_not() -> None:
    def why(problem: ConvProblem) -> str:
        return "; ".join(TILED.reasons(problem, TARGETS[0]))

    for _, problem in EVERY:
        assert not why(problem), problem
    same = LAYERS["same"]
    assert "layout='CHWN' is neither" in why(replace(same, layout="CHWN"))
    assert "dtype='float64' is none of" in why(replace(same, dtype="float64"))
    assert "stride=(2, 1): it computes gradients of layers of unit stride" in why(
        replace(LAYERS["gradient"], stride=(2, 1))
    )
    large = Layer(1, 3, 400, 400, 8, 40, 60)
    assert "filters of 40x60 with stride=(1, 1) and dilation=(1, 1): the smallest tile takes 4" in why(large)
    assert "bytes of shared memory, and a block has 232448" in why(large)


@pytest.mark.parametrize("name", [name for name, _ in EVERY])
def test_configurations_fit_the_machine(name: str) -> None:
    problem = dict(EVERY)[name]
    for target in TARGETS:
        timed = TILED.timed(problem, target)
        assert timed and [time for time, _ in timed] == sorted(time for time, _ in timed)
        for _, config in timed:
            assert config.threads % 32 == 0 and 32 <= config.threads <= 512
            assert config.tile_c * ceil_div(problem.c, config.tile_c) >= problem.group_c or problem.op == "dgrad"
            shared = 4 * layout(problem, config).floats
            assert shared <= target.shared_per_block
            assert config.min_blocks == 1 or config.min_blocks * (shared + 1024) <= target.shared_per_multiprocessor


def test_banks() -> None:
    """Eight lanes with eight pixels each: as four in a row they meet in pairs, unless rows differ by four."""
    assert pixel_cycles(8, 8, 1, 72) == 4
    assert pixel_cycles(8, 4, 2, 32) == 4 and pixel_cycles(8, 4, 2, 36) == 2
    assert pixel_cycles(16, 2, 4, 36) == 2 and pixel_cycles(4, 8, 1, 40) == 2
    # two lanes in a row and four rows: no pitch keeps them apart
    assert min(pixel_cycles(8, 2, 4, pitch) for pitch in range(20, 84, 4)) == 4
    assert best_pitch(8, 4, 2, 34 + 2) == 36 and best_pitch(8, 4, 2, 40) == 44
    # warps divide the tile, and loads take two cycles
    assert lanes((64, 32, 8), (8, 8), 1, 36) in ((8, 4), (4, 4))
    assert lanes((16, 8, 4), (8, 8), 1, 12) is None
    # with every second pixel two lanes of a row, and four rows, are apart
    assert lanes((32, 16, 8), (8, 8), 2, 36) == (4, 2) and pixel_cycles(16, 2, 4, 36) == 2


def test_runs_of_pixels() -> None:
    """One run for each phase of the stride, rounded to fours; in several where the taps are far apart."""
    three, seven = Layer(1, 4, 32, 32, 8, 3, 3), Layer(1, 3, 32, 32, 8, 7, 7, stride=(2, 2))
    assert segments(three, 8, True) == (12,)
    assert segments(replace(three, padding=(1, 1, 1, 1)), 8, True) == (16,)
    assert segments(replace(three, padding=(1, 1, 1, 1)), 8, False) == (12,)
    assert segments(seven, 8, False) == (12, 12)
    assert segments(replace(three, dilation=(1, 13)), 8, False) == (8, 12, 12)
    assert segments(replace(three, stride=(1, 5)), 8, False) == (8, 8, 8)
    # in copies of four the columns of all phases stay together
    assert segments(seven, 8, True) == (24,) and segments(seven, 4, True) == (16,)
    assert registers_needed(three, 8, 8, True) < registers_needed(three, 8, 16, True) <= 255


def test_the_papers_configurations_are_tried() -> None:
    """F_TB, W x H, F_T x W_T, C_SH of its Table I, for filters of 3x3, 5x5 and 7x7."""
    layer = Layer(16, 64, 128, 128, 128, 3, 3)
    for r, paper in ((3, (64, 32, 4, 2, 4, 16)), (5, (32, 32, 8, 1, 8, 8)), (7, (32, 64, 4, 1, 8, 8))):
        timed = TILED.timed(replace(layer, r=r, s=r), TARGETS[0])
        assert paper in {(c.tile_k, c.tile_w, c.tile_h, c.tile_c, c.thread_k, c.thread_pixels) for _, c in timed}


def test_channels_of_a_step() -> None:
    """Twenty products or so; all channels where they are few; of NHWC whole sectors."""
    layer = Layer(1, 64, 32, 32, 64, 3, 3)
    assert channels(layer) == (2,) and channels(replace(layer, r=5, s=5)) == (1,)
    assert channels(replace(layer, c=3)) == (3,)
    assert min(channels(replace(layer, layout="NHWC"))) >= 4


def test_predicted_times_follow_the_work_and_the_machine() -> None:
    layer = Layer(32, 64, 128, 128, 64, 3, 3, padding=(1, 1, 1, 1))
    config = block(layer, TARGETS[0], (32, 32, 8), (8, 8), 2)
    assert config is not None
    time = cycles(layer, config, TARGETS[0])
    assert cycles(replace(layer, n=64), config, TARGETS[0]) == pytest.approx(2 * time, rel=0.05)
    assert cycles(layer, config, replace(TARGETS[0], multiprocessors=66)) == pytest.approx(2 * time, rel=0.05)
    # an output row of 33 pixels takes two tiles of 32
    narrow, wide = (replace(layer, h=32, w=w) for w in (32, 33))
    assert cycles(wide, config, TARGETS[0]) > 1.8 * cycles(narrow, config, TARGETS[0])
    # of large layers of 64 channels multiply-adds take most of the time
    least = layer.flops / 2 / (TARGETS[0].multiprocessors * TARGETS[0].fma_lanes)
    assert least / 0.86 < time < least / 0.6


def test_rows_in_straight_code() -> None:
    """All rows of a step, or an even number, which reads ahead for the next iteration."""
    assert unrolled_rows(6, 192) == 6 and unrolled_rows(5, 320) == 5
    assert unrolled_rows(7, 448) == 2 and unrolled_rows(12, 192) == 4
    assert unrolled_rows(32, 64) == 8 and unrolled_rows(1, 4000) == 1
    assert unrolled_rows(11, 704) == 2
