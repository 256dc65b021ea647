"""The choice of algorithm and configuration, by the model of the GPU at hand, for four of them."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from leanconv.bench.suites import load_suite
from leanconv.call.choose import BY_NAME_ONLY, NoAlgorithmError, choose, consider, pick, survey
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.cost import launch_cycles
from leanconv.kernels.simt.winograd1d import Winograd1d
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem
from leanconv.tuning.trials import candidates_of
from tests.calls import calls_of
from tests.cases import KIB, TARGETS

LAYERS = [
    case.problem
    for suite, layouts in (("im2win", ("NCHW", "NHWC", "CHWN")), ("opencnn", ("NCHW", "CHWN")), ("winograd1d", (None,)))
    for layout in layouts
    for case in load_suite(suite, layout)
]
FILTERS = [case.problem for case in load_suite("filters")]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_what_is_chosen_runs_there_and_is_expected_to_be_the_quickest(target: Target) -> None:
    for problem in LAYERS[::2] + FILTERS[::8]:
        chosen = choose(problem, target)
        candidates = survey(problem, target, "auto", None)
        able = [candidate for candidate in candidates if not candidate.reasons]
        assert chosen in able and chosen.cost == min(candidate.cost for candidate in able)
        for candidate in candidates:
            assert bool(candidate.reasons) == (candidate.config is None), candidate
        for launch in chosen.plan(problem, target).every_launch:
            assert launch.shared_bytes <= target.shared_per_block
            assert launch.cluster == 1 or target.clusters
            assert not dict(launch.tuning).get("producers") or target.register_pools


def _picks(problems: list[Any], target: Target) -> list[Any]:
    return [(choice.algorithm.name, choice.config) for choice in (choose(problem, target) for problem in problems)]


def test_each_gpu_has_its_own_choice() -> None:
    """Multiprocessors, shared memory and clusters decide: one model for all would pick otherwise on some layers."""
    problems = LAYERS[::3]
    nominal, *others = (_picks(problems, target) for target in TARGETS)
    for target, picks in zip(TARGETS[1:], others, strict=True):
        assert sum(a != b for a, b in zip(nominal, picks, strict=True)) >= 3, target.arch


def test_predicted_times_follow_the_gpu() -> None:
    layer: Any = ConvProblem(128, 128, 56, 56, 128, 3, 3, padding=(1, 1, 1, 1))
    half = replace(TARGETS[0], multiprocessors=66)
    slow_memory = replace(TARGETS[0], bytes_per_cycle=TARGETS[0].bytes_per_cycle // 4)
    for name in ("implicit_gemm", "winograd1d", "im2win"):
        whole, fewer, slower = (choose(layer, t, name).cost for t in (TARGETS[0], half, slow_memory))
        launch = launch_cycles(TARGETS[0])
        assert 1.8 < (fewer - launch) / (whole - launch) < 2.2, name
        assert (slower > whole) == (name != "implicit_gemm"), name
    assert replace(TARGETS[0], arch="sm_80").fma_lanes == 64


def test_a_gpu_with_too_little_shared_memory_is_told_so() -> None:
    small = Target("sm_90a", 132, shared_per_block=8 * KIB, shared_per_multiprocessor=9 * KIB)
    layer = ConvProblem(8, 64, 28, 28, 64, 3, 3, padding=(1, 1, 1, 1))
    with pytest.raises(NoAlgorithmError, match="none of its configurations fits the 8192 bytes of shared memory"):
        choose(layer, small, "winograd1d")
    # which needs the least, where it supports the layout
    assert choose(layer, small).algorithm.name == "direct_tiled"
    assert choose(replace(layer, layout="CHWN"), small).algorithm.name == "direct"


@pytest.mark.parametrize(
    "way, limit",
    [({}, None), ({"op": "dgrad"}, None), ({"op": "wgrad"}, None), ({"op": "wgrad", "dtype": "float16"}, 32 << 20)],
    ids=str,
)
def test_a_new_shape_is_chosen_for_quickly(way: dict[str, Any], limit: int | None) -> None:
    """4,200 to 8,400 calls in the median, some 250 ns each on an idle core. Time itself depends on what runs beside."""
    problems: list[Problem] = [replace(problem, n=problem.n + 4, **way) for problem in LAYERS[::5]]
    if "dtype" in way:
        problems = [problem for problem in problems if problem.layout != "CHWN"]  # type: ignore[union-attr]
    counts = [len(calls_of(partial(choose, problem, TARGETS[0], "auto", limit))) for problem in problems]
    assert 1000 < statistics.median(counts) < 10_000, counts


def test_what_is_not_asked_would_not_have_been_chosen() -> None:
    """Algorithms of the FP32 cores are skipped where tensor cores are quicker than all their multiply-adds."""
    asked: set[bool] = set()
    for problem in LAYERS[::3]:
        every = survey(problem, TARGETS[0], "auto", None)
        chosen = choose(problem, TARGETS[0])
        assert chosen.algorithm is pick(every, "auto").algorithm  # type: ignore[union-attr]
        asked.add(all(each.algorithm.least_cycles(problem, TARGETS[0]) <= chosen.cost for each in every))
    assert asked == {False, True}


def test_the_quickest_configuration_is_the_first_of_all() -> None:
    for layout in ("NCHW", "NHWC"):
        layer = ConvProblem(32, 96, 28, 28, 64, 3, 3, padding=(1, 1, 1, 1), layout=layout, op="wgrad", dtype="float16")
        for problem in (layer, replace(layer, dtype="float32"), replace(layer, op="fprop"), replace(layer, op="dgrad")):
            for algorithm in ALGORITHMS:
                for room in (0, 32 << 20):
                    if not algorithm.reasons(problem, TARGETS[0]):
                        found = algorithm.within(problem, TARGETS[0], room)
                        assert algorithm.quickest(problem, TARGETS[0], room) == (found[0] if found else None)


def test_each_algorithm_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    timed = Winograd1d.timed
    monkeypatch.setattr(Winograd1d, "timed", lambda self, *given: calls.append(given) or timed(self, *given))
    choose(LAYERS[0], TARGETS[0])
    layer = ConvProblem(16, 64, 28, 28, 64, 3, 3, padding=(1, 1, 1, 1))
    choose(layer, TARGETS[0])
    assert calls.count((layer, TARGETS[0])) == 1
    assert {algorithm.name for algorithm in ALGORITHMS} > {"winograd1d"}


def test_depthwise_layers_go_to_what_was_measured_to_be_quickest() -> None:
    """On an H200; images innermost want the tiles of `implicit_gemm`, which share filters."""

    def picks(c: int, size: int, r: int) -> tuple[str, ...]:
        layer = ConvProblem(32, c, size, size, c, r, r, padding=(r // 2,) * 4, groups=c)
        layouts: Any = ("NCHW", "NHWC", "CHWN")
        return tuple(choose(replace(layer, layout=layout), TARGETS[0]).algorithm.stem for layout in layouts)

    window = "depthwise_window"
    assert picks(64, 112, 3) == picks(240, 28, 5) == picks(96, 56, 7) == (window, window, "implicit_gemm")
    # 21.0 µs, and 24.1 by `depthwise_window`; 40 and 24.7 in NHWC
    assert picks(192, 28, 7) == ("depthwise_large", window, "implicit_gemm")
    assert picks(96, 56, 15) == picks(512, 14, 27) == ("depthwise_large", "depthwise_large", "implicit_gemm")
    # rows of 14 pixels, of which a warp of `depthwise_window` meets eight: 15.2 µs, and 17.3 by `direct`
    assert picks(480, 14, 3) == (window, window, "implicit_gemm")
    # where a group has channels to share, tiles stay quicker
    shared = ConvProblem(32, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1), groups=2)
    assert choose(shared, TARGETS[0]).algorithm.name != "direct"


def test_a_name_means_every_strategy_and_a_stem_one() -> None:
    layer = ConvProblem(32, 192, 28, 28, 192, 7, 7, padding=(3, 3, 3, 3), groups=192)
    row = ConvProblem(1, 768, 1, 2048, 768, 1, 4, padding=(0, 0, 3, 0), groups=768)
    for problem, quickest in ((layer, "depthwise_large"), (row, "depthwise_row")):
        able = [a for a in ALGORITHMS if a.name == "depthwise" and not a.reasons(problem, TARGETS[0])]
        assert len(able) > 1
        for strategy in able:
            by_name = choose(problem, TARGETS[0], strategy.stem).algorithm
            assert by_name.stem == (quickest if strategy.stem == strategy.name else strategy.stem)
    with pytest.raises(NoAlgorithmError, match="depthwise_row: .* filters of one row"):
        choose(layer, TARGETS[0], "depthwise_row")
    with pytest.raises(ValueError, match=r"did you mean 'depthwise_row'\?\); choose .*'depthwise_large'"):
        choose(layer, TARGETS[0], "depthwise_rows")


def test_what_others_beat_runs_by_name_only() -> None:
    layer = ConvProblem(2, 16, 9, 9, 8, 3, 3, padding=(1, 1, 1, 1))
    only = {a.name: a for a in ALGORITHMS if a.by_name_only}
    for name in ("im2win", "im2win_basic", "direct_weight"):
        algorithm = only[name]
        problem = replace(layer, op="wgrad" if name == "direct_weight" else "fprop")
        for each in (problem, replace(problem, batch_invariant=problem.op != "wgrad")):
            assert choose(each, TARGETS[0], name).algorithm is algorithm
            assert consider(algorithm, each, TARGETS[0], name).reasons == ()
            for limit in (None, 2**40):
                assert consider(algorithm, each, TARGETS[0], "auto", limit).reasons == (BY_NAME_ONLY,)
        assert algorithm not in {each.algorithm for each in candidates_of(problem, TARGETS[0], 2**40)}


def test_clusters_that_come_late_are_counted() -> None:
    """Split in four, this layer takes 408 µs on an H200, and split in two 304: 4 blocks for 3 places are two rounds."""
    layer = next(case.problem for case in load_suite("opencnn", "CHWN") if case.name == "conv5-n64")
    config: Any = choose(layer, TARGETS[0], "implicit_gemm").config
    assert config.split == 2
