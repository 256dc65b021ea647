"""Several filters a channel: layers that its windows and its stores tell apart, its limits, and what it predicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from leanconv.kernels.direct.single_channel import (
    SHARED_BYTES,
    SingleChannelConfig,
    _nchw_shapes,
    as_nchw,
    registers_needed,
    window,
)
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import cases, proof, selection
from tests.cases import TARGETS
from tests.variants import NAMED

SINGLE = NAMED["single_channel"]
LAYOUTS = ("NCHW", "NHWC")


def layer(h: int, w: int, k: int, r: int, s: int, n: int = 2, c: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(n, c, h, w, c * k, r, s, groups=c, **rest)


SAME: dict[str, Any] = {"padding": (1, 1, 1, 1)}
#: Rows of outputs in fours, in twos and odd ones; bands and steps with a rest; all kinds of windows.
LAYERS = {
    "fours": layer(19, 16, 6, 3, 3, bias=True, activation="relu", **SAME),
    "twos": layer(14, 20, 5, 3, 3, bias=True),
    "odd": layer(13, 19, 7, 5, 5, padding=(2, 2, 2, 2), bias=True),
    "one-filter": layer(18, 24, 1, 5, 5, padding=(2, 2, 2, 2)),
    "one-by-one": layer(9, 12, 8, 1, 1, bias=True),
    "seven": layer(15, 16, 4, 7, 7, padding=(3, 3, 3, 3), n=1),
    "many-filters": layer(5, 8, 150, 3, 3, n=1, bias=True, **SAME),
    "uneven": layer(11, 17, 4, 4, 2, padding=(3, 0, 1, 2)),
    "lead-of-vectors": layer(8, 16, 2, 3, 4, padding=(0, 0, 3, 0)),
    "stride": layer(21, 24, 8, 3, 3, stride=(2, 2), activation="relu", **SAME),
    "stride-over-filter": layer(19, 24, 3, 2, 3, stride=(4, 5)),
    "stride-rows": layer(23, 14, 6, 5, 3, stride=(3, 1), padding=(2, 2, 1, 1)),
    "dilation": layer(22, 27, 4, 3, 3, dilation=(2, 3), padding=(2, 2, 3, 3)),
    "dilated-stride": layer(25, 24, 4, 3, 2, dilation=(3, 2), stride=(2, 2), padding=(3, 2, 1, 1)),
    "wide-odd": layer(5, 151, 3, 3, 3, bias=True),
    "wide-twos": layer(4, 168, 2, 2, 3, n=3),
    "wide-fours": layer(6, 206, 3, 3, 3, n=1, activation="relu"),
    "wide-float16": layer(4, 150, 3, 3, 3, dtype="float16", **SAME),
    "small-images": layer(7, 9, 4, 3, 3, n=9, **SAME),
    "row": layer(1, 90, 5, 1, 15, padding=(0, 0, 14, 0)),
    "column": layer(70, 1, 4, 15, 1, padding=(14, 0, 0, 0)),
    "multiplier": layer(9, 12, 3, 3, 3, c=5, bias=True, **SAME),
    "multiplier-fours": layer(10, 8, 4, 3, 5, c=3, padding=(1, 1, 2, 2), bias=True, activation="relu"),
    "tiles-of-filters": layer(4, 5, 8, 3, 3, n=1, c=20, bias=True, **SAME),
    "accumulate": layer(9, 16, 4, 3, 3, accumulate=True, **SAME),
    "float16": layer(10, 16, 6, 3, 3, dtype="float16", bias=True, activation="relu", **SAME),
    "float16-odd": layer(9, 13, 4, 3, 3, dtype="float16", **SAME),
    "bfloat16": layer(13, 18, 3, 5, 5, stride=(2, 1), padding=(2, 2, 2, 2), dtype="bfloat16", bias=True),
}
EVERY = [(f"{name}-{layout.lower()}", replace(p, layout=layout)) for name, p in LAYERS.items() for layout in LAYOUTS]


def several(configs: list[SingleChannelConfig]) -> list[SingleChannelConfig]:
    """As few configurations as have each way to hold filters, to fetch rows and to share the work."""

    def differs(config: SingleChannelConfig) -> Any:
        yield config.at_once, config.prefetch
        yield config.held, config.filters, config.unit, config.whole_sectors
        yield config.rounds
        # bands of one step, and bands of several
        yield config.rows == config.at_once

    return selection.cover(configs, differs)


def ways() -> list[Any]:
    """Every layer in several configurations; ``make test`` plays one of every other, by turns others."""
    found = []
    for turn, (name, problem) in enumerate(EVERY):
        few = several(list(SINGLE.configs(problem, TARGETS[0])))
        for i, config in enumerate(few):
            found.append((problem, config, f"{name}-{i}", (i - turn) % len(few) == 0 and turn % 2 == 0))
    chosen = [each for each in found if each[3]]
    return selection.marked(found, chosen, lambda each: (each[:2], each[2]))


@pytest.mark.parametrize(("problem", "config"), ways())
def test_every_layer_is_right(problem: ConvProblem, config: SingleChannelConfig) -> None:
    proof.check(SINGLE, problem, config, kinds=cases.KINDS[:1])


@pytest.mark.parametrize("name", ["fours-nchw", "odd-nhwc", "multiplier-nchw"])
def test_bands_and_blocks_of_any_size(name: str) -> None:
    problem = dict(EVERY)[name]
    config = next(iter(SINGLE.configs(problem, TARGETS[0])))
    for threads, steps in ((32, 3), (256, 2), (64, 50)):
        other = replace(config, threads=threads, rows=config.at_once * steps, min_blocks=1)
        proof.check(SINGLE, problem, other, kinds=cases.KINDS[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [pytest.param(problem, id=name) for name, problem in EVERY])
def test_every_layer_is_right_on_gpu(problem: ConvProblem) -> None:
    from leanconv.runtime.launch import open_device

    target = open_device(0).target
    for config in several(list(SINGLE.configs(problem, target))):
        proof.check(SINGLE, problem, config, run=proof.run_on_gpu, kinds=cases.KINDS[:1], target=target)


def test_what_it_computes_and_what_not() -> None:
    def why(problem: ConvProblem) -> str:
        return "; ".join(SINGLE.reasons(problem, TARGETS[0]))

    for _, problem in EVERY:
        assert not why(problem), problem
    fours, multiplier = LAYERS["fours"], LAYERS["multiplier"]
    assert "groups=1 of 5 channels: a group has more than one channel" in why(replace(multiplier, groups=1))
    assert "5 channels with one filter each" in why(replace(multiplier, k=5))
    assert "op='dgrad' is not the forward pass" in why(replace(fours, op="dgrad", bias=False, activation=None))
    assert "layout='CHWN' is neither" in why(replace(fours, layout="CHWN"))
    assert "dtype='float64' is none of" in why(replace(fours, dtype="float64"))
    assert "the filter has 12x11 taps, and its code is unrolled for 128" in why(layer(30, 30, 2, 12, 11))
    assert "dilation=(20, 5) reads a window too large" in why(layer(90, 90, 2, 5, 5, dilation=(20, 5)))


def test_shapes_of_threads() -> None:
    seen = {name: window(LAYERS[name], 2, 4) for name in ("fours", "stride", "stride-over-filter", "dilation")}
    assert {name: (w.width, w.height, w.fresh) for name, w in seen.items()} == {
        "fours": (4, 6, 4),
        "stride": (5, 9, 8),
        "stride-over-filter": (8, 14, 14),
        "dilation": (8, 8, 4),
    }
    for name, problem in EVERY:
        for target in TARGETS:
            found = list(SINGLE.configs(problem, target))
            assert found and len(set(found)) == len(found), name
            for config in found:
                assert as_nchw(problem).q % config.unit == 0 and config.rows % config.at_once == 0
                assert config.threads % 32 == 0 and config.lanes <= config.threads
                assert registers_needed(as_nchw(problem), config) <= 200
                assert SINGLE.plan(problem, config, target).launches[0].shared_bytes <= SHARED_BYTES


def test_one_channel_and_one_filter_are_the_same_in_both_layouts() -> None:
    planes = layer(30, 32, 1, 3, 3, **SAME)
    plans = [
        SINGLE.plan(p, next(iter(SINGLE.configs(p, TARGETS[0]))), TARGETS[0])
        for p in (planes, replace(planes, layout="NHWC"))
    ]
    assert plans[0] == plans[1]
    assert dict(plans[0].launches[0].tuning)["unit"] == 4


def test_rows_of_outputs_are_stored_in_vectors_as_wide_as_they_stay_aligned() -> None:
    units = {w: {c.unit for c in SINGLE.configs(layer(9, w + 2, 3, 3, 3), TARGETS[0])} for w in (16, 18, 17)}
    assert units == {16: {4}, 18: {2}, 17: {1}}


def test_what_is_chosen_for_large_and_small_images() -> None:
    """Whole sectors where rows of outputs end within one and leave the L2; filters in parts where blocks are few."""

    def chosen(size: int, filters: int, taps: int) -> SingleChannelConfig:
        config: SingleChannelConfig = SINGLE.within(layer(size, size, filters, taps, taps, n=1), TARGETS[0])[0][1]
        return config

    assert chosen(4096, 32, 3).whole_sectors and chosen(4095, 32, 3).whole_sectors
    # rows of 4096 and of 4092 outputs; one filter; an image in the L2
    for config in (chosen(4096, 32, 1), chosen(4096, 32, 5), chosen(4096, 1, 3), chosen(512, 16, 3)):
        assert not config.whole_sectors
    assert chosen(512, 32, 5).rounds == 32 and chosen(64, 64, 3).rounds == 16


@pytest.mark.parametrize(("r", "s", "held"), [(9, 11, True), (10, 10, True), (1, 101, False)])
def test_a_hundred_weights_stay_in_registers(r: int, s: int, held: bool) -> None:
    """In NCHW those of one filter; where there are several, they come from shared memory."""
    shapes = list(_nchw_shapes(layer(40, 128, 2, r, s)))
    assert {(each.rounds, each.held) for each in shapes} == {(1, held), (2, False)}


#: First layers and multipliers as people use them, and images larger than the L2.
LARGE = {
    "five": layer(4096, 4096, 32, 5, 5, n=1),
    "seven": layer(128, 1024, 32, 7, 7, n=16, padding=(3, 3, 3, 3)),
    "nine": layer(1024, 1024, 16, 9, 9, n=1, padding=(4, 4, 4, 4)),
    "one-filter": layer(4096, 4096, 1, 5, 5, n=1),
    "odd": layer(4095, 4095, 16, 3, 3, n=1),
    "strided": layer(128, 1024, 32, 7, 7, n=16, padding=(3, 3, 3, 3), stride=(2, 2)),
    "multiplier": layer(56, 56, 2, 3, 3, n=32, c=96, **SAME),
    "bfloat16": layer(4096, 4096, 16, 3, 3, n=1, dtype="bfloat16"),
}


def large_layers() -> list[Any]:
    """Every layer in every layout for every GPU; in ``make test`` every layer, and every layout for every GPU, once."""
    found = [
        (name, replace(LARGE[name], layout=layout), target, f"{name}-{layout}-{target.arch}")
        for name, layout, target in product(LARGE, LAYOUTS, TARGETS)
    ]
    chosen = selection.cover(found, lambda each: (each[0], (each[1].layout, each[2].arch)))
    return selection.marked(found, chosen, lambda each: (each[1:3], each[3]))


@pytest.mark.parametrize(("problem", "target"), large_layers())
def test_compiles_without_spills(problem: ConvProblem, target: Target, nvrtc: None) -> None:
    config = next(iter(SINGLE.configs(problem, target)))
    figure = compile_launch(SINGLE.plan(problem, config, target).launches[0], target.arch)
    assert figure.spill_bytes == figure.stack_bytes == 0, config
