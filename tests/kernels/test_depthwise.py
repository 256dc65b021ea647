"""Depthwise convolution: layers that its loaders and its ring of sums tell apart, and its limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.kernels.depthwise.depthwise_window import COLUMNS, DepthwiseConfig, loaded_rows, registers_needed
from leanconv.kernels.depthwise.strategy import channel_tile, live_rows, window
from leanconv.problem import ConvProblem
from tests import cases, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

DEPTHWISE = NAMED["depthwise_window"]
LAYOUTS = ("NCHW", "NHWC")


def layer(c: int, h: int, w: int, r: int, s: int, n: int = 2, multiplier: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(n, c, h, w, c * multiplier, r, s, groups=c, **rest)


#: Several bands and strips with a rest, rows in aligned fours and others, windows that begin inside the image.
LAYERS = {
    "same": layer(5, 19, 21, 3, 3, padding=(1, 1, 1, 1), bias=True, activation="relu"),
    "fours": layer(3, 18, 24, 5, 5, padding=(2, 2, 2, 2), bias=True),
    "fours-uneven": layer(3, 11, 16, 3, 5, padding=(0, 2, 3, 1)),
    "seven": layer(6, 20, 12, 7, 7, padding=(3, 3, 3, 3)),
    "nine": layer(2, 12, 13, 9, 9, padding=(4, 4, 4, 4), n=1),
    "stride": layer(4, 21, 23, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1), activation="relu"),
    "stride-five": layer(3, 22, 20, 5, 5, stride=(2, 2), padding=(2, 2, 2, 2)),
    "stride-uneven": layer(3, 17, 30, 4, 3, stride=(3, 2), padding=(0, 1, 1, 0)),
    "stride-over-filter": layer(3, 19, 23, 2, 3, stride=(4, 5)),
    "dilation": layer(3, 22, 25, 3, 3, dilation=(2, 3), padding=(2, 2, 3, 3)),
    "dilated-stride": layer(2, 25, 24, 3, 2, dilation=(3, 2), stride=(2, 2), padding=(3, 2, 1, 1)),
    "unpadded": layer(4, 12, 34, 3, 3),
    "row": layer(5, 1, 90, 1, 15, padding=(0, 0, 14, 0)),
    "column": layer(5, 70, 1, 15, 1, padding=(14, 0, 0, 0)),
    "one-by-one": layer(7, 5, 6, 1, 1),
    "multiplier": layer(5, 9, 13, 3, 3, multiplier=3, padding=(1, 1, 1, 1), bias=True),
    "many-channels": layer(264, 3, 9, 3, 3, padding=(1, 1, 1, 1), n=1),
    "tiles-of-channels": layer(320, 3, 5, 3, 3, padding=(1, 1, 1, 1), n=1, bias=True),
    "accumulate": layer(4, 9, 16, 3, 3, padding=(1, 1, 1, 1), accumulate=True),
    "float16": layer(5, 10, 16, 3, 3, padding=(1, 1, 1, 1), dtype="float16", bias=True, activation="relu"),
    "bfloat16": layer(3, 13, 15, 5, 5, stride=(2, 1), padding=(2, 2, 2, 2), dtype="bfloat16"),
    "gradient": layer(5, 13, 14, 3, 3, padding=(1, 1, 1, 1), op="dgrad"),
    "gradient-uneven": layer(4, 12, 16, 5, 3, padding=(3, 0, 0, 2), op="dgrad"),
    "gradient-padding-over-filter": layer(3, 7, 9, 2, 3, padding=(4, 2, 3, 5), op="dgrad"),
    "gradient-float16": layer(3, 9, 12, 3, 3, padding=(1, 1, 1, 1), op="dgrad", dtype="float16"),
    "float16-stride": layer(3, 22, 24, 5, 5, stride=(2, 2), padding=(2, 2, 2, 2), dtype="float16"),
    "float16-dilation": layer(3, 22, 24, 3, 3, dilation=(2, 3), padding=(2, 2, 3, 3), dtype="float16"),
    "volume": layer(5, 7, 9, 3, 3, d=7, t=3, padding=(1, 1, 1, 1), padding_d=(1, 1), bias=True),
    "volume-stride": layer(
        3, 9, 16, 3, 4, n=1, d=9, t=4, stride_d=2, stride=(2, 1), padding=(1, 1, 1, 2), padding_d=(2, 0)
    ),
    "volume-float16": layer(
        3, 8, 12, 2, 3, d=6, t=3, dilation_d=2, padding=(1, 0, 1, 1), padding_d=(2, 1), dtype="float16"
    ),
}
EVERY = [(f"{name}-{layout.lower()}", replace(p, layout=layout)) for name, p in LAYERS.items() for layout in LAYOUTS]


def first_of_each_width() -> list[Any]:
    """Every layer with every width of strips; ``make test`` plays each layer once in each layout."""
    found = []
    for turn, (name, problem) in enumerate(EVERY):
        of_width = {}
        for config in DEPTHWISE.configs(problem, TARGETS[0]):
            if config.rows > 1:
                of_width.setdefault((config.whole, config.columns, config.slices), config)
        for whole in (False, True):
            widths = sorted((columns, slices) for kind, columns, slices in of_width if kind == whole)
            for columns, slices in widths:
                # rows few enough that a small image has several bands
                config = of_width[whole, columns, slices]
                config = replace(config, rows=min(config.rows, 3 + turn % 4))
                what = f"{name}-{columns}" + f"-{slices}" * problem.is_volume + ("-whole" if whole else "")
                found.append(
                    (
                        problem,
                        config,
                        what,
                        whole == (turn // 2 % 2 == 0) and (columns, slices) == widths[turn // 2 % len(widths)],
                    )
                )
    chosen = [each for each in found if each[3]]
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "config"), first_of_each_width())
def test_every_layer_is_right(problem: ConvProblem, config: Any) -> None:
    proof.check(DEPTHWISE, problem, config, kinds=cases.KINDS[:1])


def test_what_it_computes_and_what_not() -> None:
    def why(problem: ConvProblem) -> str:
        return "; ".join(DEPTHWISE.reasons(problem, TARGETS[0]))

    for _, problem in EVERY:
        assert not why(problem), problem
    same = LAYERS["same"]
    assert "a group has more than one channel" in why(replace(same, groups=1))
    assert "layout='CHWN' is neither" in why(replace(same, layout="CHWN"))
    assert "the filter has 11x11 taps, and a thread keeps 81" in why(replace(same, r=11, s=11))
    assert "the filter has 5x5x5 taps" in why(replace(LAYERS["volume"], t=5, r=5, s=5))
    assert "reaches 41 rows" in why(layer(2, 60, 60, 5, 3, dilation=(10, 1)))
    for strided in (replace(LAYERS["gradient"], stride=(2, 2)), replace(LAYERS["multiplier"], op="dgrad", bias=False)):
        assert "gradient of layers of unit stride with one filter a channel" in why(strided)


def test_shapes_of_threads() -> None:
    assert live_rows(LAYERS["same"]) == 3 and live_rows(LAYERS["stride-five"]) == 3
    assert live_rows(LAYERS["dilation"]) == 5 and live_rows(LAYERS["dilated-stride"]) == 4
    assert window(LAYERS["same"], 8) == 10 and window(LAYERS["stride-five"], 4) == 11
    for name, whole, walked in (("same", 4, 4), ("stride-five", 7, 8), ("dilated-stride", 9, 10)):
        for is_whole, rows in ((True, whole), (False, walked)):
            config = DepthwiseConfig(4, 2, is_whole, 1, 256, 1)
            assert loaded_rows(LAYERS[name], config) == rows
    tiles = {k: channel_tile(k) for k in (5, 96, 144, 256, 264, 320, 384, 768, 1152, 1000)}
    assert tiles == {5: 5, 96: 96, 144: 144, 256: 256, 264: 256, 320: 160, 384: 192, 768: 256, 1152: 192, 1000: 256}
    for _, problem in EVERY:
        for target in TARGETS:
            found = list(DEPTHWISE.configs(problem, target))
            assert found
            for config in found:
                assert config.threads % 32 == 0 and config.channels <= config.threads <= 256
                assert config.columns in COLUMNS[problem.layout]
                assert registers_needed(problem, config) <= 200
