"""Gradients of depthwise layers: layers that their walks, rings and sums tell apart, and their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import choose, consider
from leanconv.cpu import oracle
from leanconv.kernels.depthwise.depthwise_input import row_groups
from leanconv.kernels.depthwise.depthwise_weight import BLOCKS, CHANNELS
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import source
from tests import cases, emulator, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

WEIGHT, SPLIT_K, INPUT = (NAMED[name] for name in ("depthwise_weight", "depthwise_weight_split_k", "depthwise_input"))
LAYOUTS = ("NCHW", "NHWC")


def layer(c: int, h: int, w: int, r: int, s: int, n: int = 2, multiplier: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(n, c, h, w, c * multiplier, r, s, groups=c, **rest)


#: Several strips with a rest, rows in aligned fours and others, windows that begin inside the image.
LAYERS = {
    "same": layer(5, 19, 21, 3, 3, padding=(1, 1, 1, 1)),
    "fours": layer(3, 18, 24, 5, 5, padding=(2, 2, 2, 2)),
    "fours-uneven": layer(3, 11, 16, 3, 5, padding=(0, 2, 3, 1)),
    "seven": layer(6, 20, 12, 7, 7, padding=(3, 3, 3, 3)),
    "nine": layer(2, 12, 13, 9, 9, padding=(4, 4, 4, 4), n=1),
    "stride": layer(4, 21, 23, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1)),
    "stride-fours": layer(3, 22, 24, 5, 5, stride=(2, 2), padding=(2, 2, 2, 2)),
    "stride-uneven": layer(3, 17, 30, 4, 3, stride=(3, 2), padding=(0, 1, 1, 0)),
    "stride-over-filter": layer(3, 19, 23, 2, 3, stride=(4, 5)),
    "patches": layer(5, 16, 20, 4, 4, stride=(4, 4)),
    "dilation": layer(3, 22, 25, 3, 3, dilation=(2, 3), padding=(2, 2, 3, 3)),
    "dilated-stride": layer(2, 25, 24, 3, 2, dilation=(3, 2), stride=(2, 2), padding=(3, 2, 1, 1)),
    "stride-is-dilation": layer(2, 15, 18, 3, 3, dilation=(2, 3), stride=(2, 3), padding=(2, 1, 3, 0)),
    "unpadded": layer(4, 12, 34, 3, 3),
    "padding-over-filter": layer(3, 7, 9, 2, 3, padding=(4, 2, 3, 5)),
    "row": layer(5, 1, 90, 1, 15, padding=(0, 0, 14, 0)),
    "column": layer(5, 70, 1, 15, 1, padding=(14, 0, 0, 0)),
    "one-by-one": layer(7, 5, 6, 1, 1),
    "multiplier": layer(5, 9, 13, 3, 3, multiplier=3, padding=(1, 1, 1, 1)),
    "multiplier-stride": layer(4, 11, 16, 5, 3, multiplier=2, stride=(2, 2), padding=(2, 2, 1, 1)),
    "many-channels": layer(264, 3, 9, 3, 3, padding=(1, 1, 1, 1), n=1),
    "accumulate": layer(4, 9, 16, 3, 3, stride=(1, 2), padding=(1, 1, 1, 1), accumulate=True),
    "float16": layer(5, 10, 16, 3, 3, padding=(1, 1, 1, 1), dtype="float16"),
    "bfloat16": layer(3, 13, 15, 5, 5, stride=(2, 1), padding=(2, 2, 2, 2), dtype="bfloat16"),
    "no-images": layer(3, 8, 9, 3, 3, n=0),
    "float16-stride": layer(3, 22, 24, 5, 5, stride=(2, 2), padding=(2, 2, 2, 2), dtype="float16"),
    "float16-dilation": layer(3, 22, 24, 3, 3, dilation=(2, 3), padding=(2, 2, 3, 3), dtype="float16"),
    "volume": layer(5, 7, 9, 3, 3, d=7, t=3, padding=(1, 1, 1, 1), padding_d=(1, 1)),
    "volume-stride": layer(
        3, 9, 16, 3, 4, n=1, d=9, t=4, stride_d=2, stride=(2, 1), padding=(1, 1, 1, 2), padding_d=(2, 0)
    ),
    "volume-float16": layer(
        3, 8, 12, 2, 3, d=6, t=3, dilation_d=2, padding=(1, 0, 1, 1), padding_d=(2, 1), dtype="float16"
    ),
}
EVERY = [(f"{name}-{layout.lower()}", replace(p, layout=layout)) for name, p in LAYERS.items() for layout in LAYOUTS]


def in_turn() -> list[Any]:
    """Every gradient of every layer in both layouts, with a configuration each; ``make test`` plays each layer once."""
    found = []
    for turn, (name, problem) in enumerate(EVERY):
        for op, algorithm in (("wgrad", WEIGHT), ("wgrad", SPLIT_K), ("dgrad", INPUT)):
            gradient = replace(problem, op=op)
            configs = list(algorithm.configs(gradient, TARGETS[0]))
            config = configs[turn % len(configs)]
            # rows few enough that a small image has several bands; clusters of every size
            change = {"split": 1 + (turn + 3) % 8} if algorithm is WEIGHT else {}
            config = replace(config, rows=min(config.rows, 3 + turn % 4), **change)
            found.append((algorithm, gradient, config, f"{algorithm.stem}-{name}"))
    chosen = [each for turn, each in enumerate(found) if turn % 6 == turn // 6 % 6]
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("algorithm", "problem", "config"), in_turn())
def test_every_layer_is_right(algorithm: Any, problem: ConvProblem, config: Any) -> None:
    proof.check(algorithm, problem, config, kinds=cases.KINDS[:1])


@pytest.mark.parametrize("name", ["same-nchw", "stride-fours-nhwc", "dilation-nhwc"])
def test_sums_that_move_give_what_the_ring_gives(name: str) -> None:
    problem = replace(dict(EVERY)[name], op="dgrad")
    config = next(iter(INPUT.configs(problem, TARGETS[0])))
    for ring in (False, True):
        proof.check(INPUT, problem, replace(config, ring=ring, rows=5), kinds=cases.KINDS[:1])


def test_sums_do_not_depend_on_the_blocks_that_share_them() -> None:
    """As far as float32 goes: with whole numbers every order of summation gives the same bits."""
    problem = replace(LAYERS["same"], op="wgrad", layout="NHWC")
    rng = np.random.default_rng(0)
    x, dy = (rng.integers(-8, 9, each.shape).astype(np.float32) for each in problem.operands[:2])
    found = []
    for algorithm, number, values in ((WEIGHT, "split", (1, 3, 8)), (SPLIT_K, "split_k", (2, 5))):
        config = next(iter(algorithm.configs(problem, TARGETS[0])))
        for value in values:
            dw = np.full(problem.y_shape, np.nan, np.float32)
            plan = algorithm.plan(problem, replace(config, **{number: value}), TARGETS[0])
            proof.run_on_emulator(plan, {"x": x, "dy": dy, "dw": dw})
            found.append(dw)
    assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("layout", "channels", "images"), [("NCHW", 1, 48), ("NHWC", 8, 6)])
def test_long_sums_are_promoted(layout: Any, channels: int, images: int) -> None:
    """A thread adds some 5,000 products to a weight; in one chain errors were 2.3e-6 (NCHW) and 1.6e-6 (NHWC)."""
    problem = layer(channels, 112, 112, 1, 2, n=images, layout=layout, op="wgrad")
    configs = (c for c in WEIGHT.configs(problem, TARGETS[0]) if c.channels == channels)
    config = replace(min(configs, key=lambda c: (-c.rows, c.columns)), threads=128, split=1)
    for kind, most in (("zero-mean", 5e-7), ("positive", 2e-7)):
        given = cases.draw_conv(problem, kind)
        dw = np.full(problem.y_shape, np.nan, np.float32)
        emulator.run_plan(WEIGHT.plan(problem, config, TARGETS[0]), {**given, "dw": dw}, orders=("ascending",))
        assert oracle.relative_error(dw, oracle.conv2d(problem, given["x"], given["dy"])) < most


def test_what_they_compute_and_what_not() -> None:
    def why(algorithm: Any, problem: ConvProblem, target: Any = TARGETS[0]) -> str:
        return "; ".join(algorithm.reasons(problem, target))

    for _, problem in EVERY:
        weight, passed = replace(problem, op="wgrad"), replace(problem, op="dgrad")
        for target in TARGETS:
            assert not any(why(*each, target) for each in ((WEIGHT, weight), (SPLIT_K, weight), (INPUT, passed)))
        assert "is not the gradient of the filters" in why(WEIGHT, passed)
        assert "is not the gradient of the input" in why(INPUT, weight)
    for algorithm, op in ((WEIGHT, "wgrad"), (SPLIT_K, "wgrad"), (INPUT, "dgrad")):
        same = replace(LAYERS["same"], op=op)
        assert "groups=1 of 5 channels: a group has more than one channel" in why(algorithm, replace(same, groups=1))
        assert "layout='CHWN' is neither" in why(algorithm, replace(same, layout="CHWN"))
        assert "the filter has 11x11 taps, and a thread keeps 81" in why(algorithm, replace(same, r=11, s=11))
        assert "float64" in why(algorithm, replace(same, dtype="float64"))
    deep = layer(2, 60, 60, 5, 3, dilation=(10, 1))
    assert "overlaps 41 rows, too many for the registers" in why(WEIGHT, replace(deep, op="wgrad"))
    assert "needs 41 sums and more" in why(INPUT, layer(2, 60, 60, 9, 9, dilation=(5, 5), op="dgrad"))
    assert "needs 1024 sums and more" in why(INPUT, layer(2, 64, 64, 3, 3, stride=(32, 32), op="dgrad"))
    crowd = layer(2, 9, 9, 9, 9, multiplier=800, padding=(4, 4, 4, 4), layout="NHWC", op="dgrad")
    assert "800 filters of 9x9 a channel take 259204 bytes of shared memory, and a block has 232448" in why(
        INPUT, crowd
    )
    assert not why(INPUT, replace(crowd, layout="NCHW"))
    weight = replace(LAYERS["same"], op="wgrad")
    # the least that any configuration needs, two blocks' sums
    needed = 2 * 4 * int(np.prod(weight.y_shape))
    for limit in (0, needed - 1):
        said = f"it needs {needed} bytes of workspace, and workspace_limit is {limit}"
        assert consider(SPLIT_K, weight, TARGETS[0], SPLIT_K.stem, limit).reasons == (said,)
        assert not consider(WEIGHT, weight, TARGETS[0], WEIGHT.stem, limit).reasons
    assert not consider(SPLIT_K, weight, TARGETS[0], SPLIT_K.stem, needed).reasons


def test_shapes_of_threads() -> None:
    for _, problem in EVERY:
        for target in TARGETS:
            for algorithm, op in ((WEIGHT, "wgrad"), (SPLIT_K, "wgrad"), (INPUT, "dgrad")):
                gradient = replace(problem, op=op)
                found = list(algorithm.configs(gradient, target))
                assert found and len(set(found)) == len(found)
                for config in found:
                    assert config.threads % 32 == 0 and config.threads * config.min_blocks <= 2048
                    if op == "wgrad":
                        assert config.channels in (CHANNELS if problem.layout == "NHWC" else (1,))
                    if algorithm is WEIGHT:
                        assert 1 <= config.split <= (8 if target.clusters else 1)
                    if algorithm is SPLIT_K:
                        assert config.split == 1 and config.split_k <= max(2, BLOCKS)
                    if algorithm is INPUT:
                        assert config.columns % problem.stride[1] == 0
    assert row_groups(LAYERS["same"]) == 19 and row_groups(LAYERS["stride"]) == 11
    assert row_groups(LAYERS["stride-uneven"]) == 6 and row_groups(LAYERS["padding-over-filter"]) == 7


def test_the_choice() -> None:
    """Nothing is taken from a workspace that was not allowed; a limit brings the blocks beyond clusters in."""
    few = layer(16, 112, 112, 3, 3, n=32, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
    for limit in (None, 1 << 20):
        chosen = choose(few, TARGETS[0], limit=limit)
        config: Any = chosen.config
        assert chosen.algorithm.stem == "depthwise_weight" and (config.split_k > 1) == (limit is not None)
    strided = layer(96, 56, 56, 3, 3, n=32, stride=(2, 2), padding=(1, 1, 1, 1), op="dgrad")
    for problem in (strided, replace(strided, layout="NHWC"), replace(strided, k=192, stride=(1, 1))):
        assert choose(problem, TARGETS[0]).algorithm is INPUT


def test_the_rows_of_a_walk_are_no_constant() -> None:
    problem = replace(LAYERS["seven"], op="wgrad")
    config = next(iter(WEIGHT.configs(problem, TARGETS[0])))
    few, many = (WEIGHT.plan(problem, replace(config, rows=rows), TARGETS[0]) for rows in (5, 20))
    assert few != many and source(few.launches[0]) == source(many.launches[0])
