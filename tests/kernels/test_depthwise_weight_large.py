"""Gradient of large depthwise filters: layers that tiles, bands and copies tell apart, banks, and limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose
from leanconv.cpu import oracle
from leanconv.kernels.depthwise.depthwise_weight_large import WIDE, pitches, shared_bytes, tap_tiles, tiles_of
from leanconv.problem import ConvProblem
from tests import cases, emulator, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

LARGE, SPLIT_K = NAMED["depthwise_weight_large"], NAMED["depthwise_weight_large_split_k"]


def layer(c: int, h: int, w: int, r: int, s: int, n: int = 2, multiplier: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(n, c, h, w, c * multiplier, r, s, groups=c, **{"op": "wgrad", **rest})


#: Rows in aligned fours, whole planes in fours, neither; padding of every kind, several tiles of a row.
LAYERS = {
    "same": layer(3, 12, 14, 11, 13, padding=(5, 5, 6, 6)),
    "fours": layer(2, 9, 16, 9, 11, n=3, padding=(4, 4, 5, 5)),
    "odd": layer(2, 17, 19, 9, 10, n=3, multiplier=2, padding=(4, 3, 5, 2)),
    "wide": layer(5, 9, 16, 5, 21, n=3, padding=(2, 2, 10, 10), dtype="float16"),
    "high": layer(9, 20, 7, 21, 4, padding=(10, 10, 1, 2), dtype="bfloat16"),
    "cropped": layer(2, 13, 80, 9, 10, padding=(0, 2, -1, 3), accumulate=True),
    "cropped-right": layer(4, 12, 24, 9, 11, padding=(-2, 1, 3, -5)),
    "unpadded": layer(8, 15, 18, 10, 9),
    "larger-than-images": layer(4, 7, 7, 13, 13, n=5, padding=(6, 6, 6, 6)),
    "far-padding": layer(3, 6, 8, 9, 12, padding=(9, 9, 14, 13)),
    "signal": layer(3, 1, 150, 1, 90, padding=(0, 0, 89, 0)),
    "float16-fours": layer(3, 10, 12, 11, 11, padding=(5, 5, 5, 5), dtype="float16"),
    "no-images": layer(3, 9, 9, 9, 10, n=0, padding=(4, 4, 5, 5)),
    "spread": layer(2, 1, 90, 1, 75, padding=(0, 0, 37, 37)),
    "column": layer(4, 120, 2, 84, 1, padding=(40, 43, 0, 0)),
}
EVERY = [
    (f"{name}-{layout.lower()}", replace(p, layout=layout)) for name, p in LAYERS.items() for layout in ("NCHW", "NHWC")
]


def in_turn() -> list[Any]:
    """Every layer in both layouts, with extreme configurations; ``make test`` plays each layer once."""
    found = []
    for turn, (name, problem) in enumerate(EVERY):
        for algorithm in (LARGE, SPLIT_K):
            configs = list(proof.extreme_configs(algorithm, problem, TARGETS[0]))
            found += [(algorithm, problem, c, f"{algorithm.stem}-{name}-{i}", (turn, i)) for i, c in enumerate(configs)]
    chosen = [each for each in found if each[0] is LARGE and each[4][1] == 0 and each[4][0] % 4 in (0, 3)]
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("algorithm", "problem", "config"), in_turn())
def test_every_layer_is_right(algorithm: Any, problem: ConvProblem, config: Any) -> None:
    proof.check(algorithm, problem, config, kinds=cases.KINDS[:1])


def test_sums_do_not_depend_on_the_blocks_that_share_them() -> None:
    """As far as float32 goes: with whole numbers every order of summation gives the same bits."""
    problem = replace(LAYERS["same"], n=3, layout="NHWC")
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-8, 9, each.shape).astype(np.float32) for each in problem.operands[:2])
    found = []
    for algorithm, number, values in ((LARGE, "split", (1, 8)), (SPLIT_K, "split_k", (2, 5))):
        config = next(iter(algorithm.configs(problem, TARGETS[0])))
        for value in values:
            dw = np.full(problem.y_shape, np.nan, np.float32)
            plan = algorithm.plan(problem, replace(config, **{number: value}), TARGETS[0])
            proof.run_on_emulator(plan, {"x": x, "dy": dy, "dw": dw})
            found.append(dw)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_long_sums_are_promoted() -> None:
    """A thread adds some 20,000 products to a weight; in one chain errors were 2.4e-6 and 1.9e-6."""
    problem = layer(1, 28, 28, 7, 12, n=30, padding=(3, 3, 6, 5))
    wished = {"images": 1, "bands": 1, "workers": 1, "tile_p": 28, "threads": 32, "split": 1}
    config = replace(next(iter(LARGE.configs(problem, TARGETS[0]))), **wished, channels=1, tile_q=28, tile_h=28)
    for kind, most in (("zero-mean", 5e-7), ("positive", 4e-7)):
        given = cases.draw_conv(problem, kind)
        dw = np.full(problem.y_shape, np.nan, np.float32)
        emulator.run_plan(LARGE.plan(problem, config, TARGETS[0]), {**given, "dw": dw}, orders=("ascending",))
        assert oracle.relative_error(dw, oracle.conv2d(problem, given["x"], given["dy"])) < most


def test_shapes_of_threads() -> None:
    for _, problem in EVERY:
        _, rows, columns = tap_tiles(problem)
        for target in TARGETS:
            found = list(LARGE.configs(problem, target))
            assert found and len(set(found)) == len(found)
            for config in found:
                working = config.planes * config.bands * config.workers * rows * columns
                assert working <= config.threads < working + 32 and config.threads * config.min_blocks <= 2048
                assert shared_bytes(problem, config) <= target.shared_per_block
                assert 1 <= config.split <= (8 if target.clusters else 1) and config.split_k == 1
                assert config.split <= max(1, tiles_of(problem, config))
            for config in SPLIT_K.configs(problem, target):
                assert config.split == 1 < config.split_k <= max(2, tiles_of(problem, config))


def test_neighbouring_planes_lie_in_different_banks() -> None:
    """Eight lanes read 16 bytes each at once: eight planes of one row, or two planes and tiles of a row of taps."""
    for problem in (layer(128, 56, 56, 31, 31, n=32), layer(512, 14, 14, 13, 13, n=32, layout="NHWC")):
        for config in LARGE.configs(problem, TARGETS[0]):
            x_row, x_plane, dy_row, dy_plane = pitches(problem, config)
            for apart in (x_row, x_plane, dy_row, dy_plane):
                assert len({at * apart // 4 % 8 for at in range(8)}) == 8
            assert len({(p * x_plane + t * WIDE) // 4 % 8 for p in range(2) for t in range(4)}) == 8


def test_what_it_computes_and_what_not() -> None:
    def why(problem: ConvProblem, target: Any = TARGETS[0]) -> str:
        return "; ".join(LARGE.reasons(problem, target))

    for _, problem in EVERY:
        assert not any(why(problem, target) for target in TARGETS)
    same = LAYERS["same"]
    assert "is not the gradient of the filters" in why(replace(same, op="dgrad"))
    assert "groups=1 of 3 channels: a group has more than one channel" in why(replace(same, groups=1))
    assert "layout='CHWN' is neither" in why(replace(same, layout="CHWN"))
    assert "stride=(2, 1) and dilation=(1, 1): both are (1, 1) here" in why(replace(same, stride=(2, 1)))
    assert "stride=(1, 1) and dilation=(1, 2): both are (1, 1) here" in why(replace(same, w=30, dilation=(1, 2)))
    assert "a filter of 9x9 taps is whole in a thread of depthwise_weight" in why(replace(same, r=9, s=9))
    assert "a filter of 255x255 has 1024 tiles of taps, and a block has 512 threads at most" in why(
        layer(2, 255, 255, 255, 255, padding=(127, 127, 127, 127))
    )
    assert "a batch of 16777217 images is one of more than 16777216" in why(replace(same, n=2**24 + 1))
    tall = layer(2, 8192, 24, 175, 175, padding=(87, 87, 87, 87))
    assert "a filter of 175x175 and the pixels under it take more than the 101376 bytes of shared memory" in why(
        tall, TARGETS[3]
    )


def test_the_choice() -> None:
    """Large filters are its own, small ones are not; with split-K only where a workspace is allowed."""
    for layout in ("NCHW", "NHWC"):
        for size in (13, 31, 51):
            large = layer(96, 56, 56, size, size, n=32, padding=(size // 2,) * 4, layout=layout)
            assert choose(large, TARGETS[0]).algorithm.stem == "depthwise_weight_large"
        small = layer(96, 56, 56, 3, 3, n=32, padding=(1, 1, 1, 1), layout=layout)
        assert choose(small, TARGETS[0]).algorithm.stem == "depthwise_weight"
