"""Depthwise convolution with large filters: layers that its tiles tell apart, banks of shared memory, limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from leanconv.bench import load_suite
from leanconv.kernels.depthwise.depthwise_large import LargeConfig, filter_pitches, tile_rows
from leanconv.problem import ConvProblem
from tests import cases, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

LARGE = NAMED["depthwise_large"]
LAYOUTS = ("NCHW", "NHWC")


def layer(c: int, h: int, w: int, r: int, s: int, n: int = 2, multiplier: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(n, c, h, w, c * multiplier, r, s, groups=c, **rest)


#: Rows of one strip, of two and of many; rows of taps with a rest of every size, and in segments; tiles with a rest.
LAYERS = {
    "nine": layer(5, 12, 13, 9, 9, padding=(4, 4, 4, 4), bias=True, activation="relu"),
    "two-strips": layer(3, 15, 36, 11, 11, padding=(5, 5, 5, 5), bias=True),
    "fours": layer(3, 10, 24, 5, 12, n=3, padding=(2, 2, 6, 5)),
    "filter-over-image": layer(6, 7, 7, 13, 13, n=3, padding=(6, 6, 6, 6)),
    "filter-far-over-image": layer(3, 4, 5, 11, 13, padding=(9, 9, 10, 10)),
    "unpadded": layer(4, 20, 70, 10, 9),
    "uneven": layer(3, 13, 37, 9, 10, padding=(3, 5, 6, 2)),
    "tall": layer(2, 40, 18, 21, 3, padding=(10, 10, 1, 1)),
    "segments": layer(2, 5, 90, 3, 70, padding=(1, 1, 35, 34)),
    "whole-segments": layer(2, 1, 130, 1, 64, padding=(0, 0, 63, 0), bias=True),
    "longer-than-the-row": layer(3, 1, 40, 1, 150, n=1, padding=(0, 0, 149, 0)),
    "stride": layer(3, 23, 26, 9, 9, stride=(2, 2), padding=(4, 4, 4, 4), activation="relu"),
    "stride-uneven": layer(2, 22, 41, 7, 10, stride=(3, 2), padding=(3, 2, 5, 5)),
    "dilation": layer(3, 24, 30, 5, 4, dilation=(2, 3), padding=(2, 3, 4, 1)),
    "dilated-segments": layer(2, 1, 120, 1, 40, dilation=(1, 2), padding=(0, 0, 78, 0)),
    "multiplier": layer(5, 9, 13, 9, 7, multiplier=3, padding=(4, 4, 3, 3), bias=True),
    "many-channels": layer(37, 6, 10, 9, 9, n=1, padding=(4, 4, 4, 4)),
    "accumulate": layer(4, 9, 16, 9, 9, padding=(4, 4, 4, 4), accumulate=True),
    "float16": layer(5, 10, 16, 9, 9, padding=(4, 4, 4, 4), dtype="float16", bias=True, activation="relu"),
    "bfloat16": layer(3, 9, 39, 9, 9, padding=(4, 4, 4, 4), dtype="bfloat16"),
    "gradient": layer(5, 13, 14, 11, 9, padding=(5, 5, 4, 4), op="dgrad"),
    "gradient-uneven": layer(3, 12, 40, 9, 10, padding=(7, 0, 0, 8), op="dgrad"),
    "gradient-padding-over-filter": layer(3, 7, 37, 2, 9, padding=(4, 2, 11, 9), op="dgrad"),
    "gradient-float16": layer(3, 9, 12, 9, 9, padding=(4, 4, 4, 4), op="dgrad", dtype="float16"),
}
EVERY = [(f"{name}-{layout.lower()}", replace(p, layout=layout)) for name, p in LAYERS.items() for layout in LAYOUTS]


def kind(problem: ConvProblem, config: LargeConfig) -> Any:
    """What the kernel's code and the places in shared memory depend on."""
    return config.fixed, min(config.output_planes, 8), config.filters > 1, config.rows == problem.p


def one_of_each_kind() -> list[Any]:
    """Every layer with a configuration of each kind; ``make test`` plays each layer with some of them."""
    found = []
    for name, problem in EVERY:
        of_kind: dict[Any, LargeConfig] = {}
        for config in LARGE.configs(problem, TARGETS[0]):
            of_kind.setdefault(kind(problem, config), config)
        label = "{}-{}-{}-{}-{}-{}".format
        for c in of_kind.values():
            numbers = (c.columns, c.rows, c.images, c.filters)
            found.append((problem, c, label(name, "fixed" if c.fixed else "free", *numbers)))

    def traits(each: Any) -> Iterator[Any]:
        problem, config, name = each
        yield name.partition(f"-{problem.layout.lower()}")[0], config.fixed
        yield problem.layout, kind(problem, config)

    return selection.marked(found, selection.cover(found, traits), lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "config"), one_of_each_kind())
def test_every_layer_is_right(problem: ConvProblem, config: LargeConfig) -> None:
    proof.check(LARGE, problem, config, kinds=cases.KINDS[:1])


def test_what_it_computes_and_what_not() -> None:
    def why(problem: ConvProblem, target: Any = TARGETS[0]) -> str:
        return "; ".join(LARGE.reasons(problem, target))

    for _, problem in EVERY:
        for target in TARGETS:
            assert not why(problem, target), problem
    nine = LAYERS["nine"]
    assert "a group has more than one channel" in why(replace(nine, groups=1))
    assert "layout='CHWN' is neither" in why(replace(nine, layout="CHWN"))
    assert "stride=(1, 70) and dilation=(1, 1) spread the 9 taps" in why(replace(nine, stride=(1, 70)))
    assert "dilation=(1, 60) spread the 9 taps" in why(replace(nine, dilation=(1, 60), w=700))
    huge = layer(2, 300, 300, 200, 200)
    assert "a filter of 200x200 and the pixels under it take" in why(huge) and "232448 at most" in why(huge)
    for strided in (replace(LAYERS["gradient"], stride=(2, 2)), replace(LAYERS["multiplier"], op="dgrad", bias=False)):
        assert "gradient of layers of unit stride with one filter a channel" in why(strided)


def vectors_read(problem: ConvProblem, config: LargeConfig) -> Iterator[list[int]]:
    """For every eight lanes that read at once: where their first window begins in shared memory, in float4."""
    lanes = config.output_planes * config.rows * config.strips
    for first in range(0, lanes, 8):
        found = []
        for thread in range(first, min(first + 8, lanes)):
            plane, rest = thread % config.output_planes, thread // config.output_planes
            row, strip = (rest // config.strips, rest % config.strips)
            if config.fixed:
                strip, row = divmod(rest, config.rows)
            if config.fixed and strip != (first // config.output_planes) // config.rows:
                continue  # another strip's code reads at another time
            column = 0 if config.fixed else strip * config.columns * problem.stride[1]
            found.append((plane * config.image_pitch + row * problem.stride[0] * config.row_pitch + column) // 4)
        yield found


def usual() -> list[ConvProblem]:
    return [replace(case.problem, layout=layout) for case in load_suite("depthwise-wide") for layout in LAYOUTS]


def test_loads_of_four_pixels_have_no_bank_conflict() -> None:
    for problem in [*usual(), *(p for _, p in EVERY if p.op == "fprop" and p.stride == (1, 1))]:
        for config in LARGE.configs(problem, TARGETS[0]):
            for vectors in vectors_read(problem, config):
                assert len({at % 8 for at in vectors}) == len(set(vectors)), (str(problem), config)


def test_filters_of_neighbouring_rows_and_channels_lie_in_different_banks() -> None:
    for problem in usual():
        _, row, pitch = filter_pitches(problem)
        assert row // 4 % 2 == pitch // 4 % 2 == 1 and row >= problem.s and pitch >= problem.r * row


def test_tiles_hold_the_rows_that_they_need() -> None:
    for problem in (*(p for _, p in EVERY if p.op == "fprop"), *usual()[::4]):
        for rows in {1, 2, 5, problem.p}:
            most = 0
            for first in range(0, problem.p, rows):
                needed = {
                    p * problem.stride[0] - problem.padding[0] + r * problem.dilation[0]
                    for p in range(first, min(first + rows, problem.p))
                    for r in range(problem.r)
                }
                inside = [i for i in needed if 0 <= i < problem.h]
                begin = max(0, first * problem.stride[0] - problem.padding[0])
                most = max(most, *(i - begin + 1 for i in inside), 0)
            assert most <= tile_rows(problem, rows) <= max(1, most + problem.dilation[0] - 1), (str(problem), rows)


def test_configurations_fit_the_machine() -> None:
    for _, problem in EVERY:
        forward = problem if problem.op == "fprop" else problem.as_forward()
        for target in TARGETS:
            found = list(LARGE.configs(problem, target))
            assert found and len(set(found)) == len(found)
            for config in found:
                lanes = config.output_planes * config.rows * config.strips
                assert config.threads % 32 == 0 and lanes <= config.threads <= 512
                assert LARGE.shared_bytes(forward, config) <= target.shared_per_block
                assert config.row_pitch % 4 == config.image_pitch % 4 == 0
