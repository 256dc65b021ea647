"""What a headline counts, the algorithm that a call picks, is what it picks today; or its file is a listed one."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path

from leanconv.bench import columns, provenance
from leanconv.bench.results import AUTO_ENGINE, Results, key_of
from leanconv.bench.suites import load_suite, parse_problem
from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.options import Kept
from leanconv.problem import ConvProblem, Problem
from leanconv.volumes.images import as_images

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
#: Predictions that are so near to each other are one: the GPU that was measured is not quite the nominal one.
NEAR = 1.03


def cost_of(problem: Problem, ran: str, config: str) -> float:
    """What is predicted now for the configuration of an algorithm that ran; for its best one where a row does not say
    which; infinite where that is none of today's."""
    best = by_model(problem, NOMINAL, ran, None)
    timed = {key_of(each): cycles for cycles, each in best.algorithm.within(problem, NOMINAL)}
    known = timed.get(key_of(best.config), math.nan)
    return best.cost if config in ("", key_of(best.config)) else best.cost * timed.get(config, math.inf) / known


def test_another_tile_of_the_same_algorithm_is_another_choice() -> None:
    """As of AlexNet's first layer, which ran a tile for a while that takes half as long again."""
    problem = as_images(parse_problem("conv:n128,c3,h224,w224,k64,r11,s11,stride4,pad2,NHWC"))
    best = by_model(problem, NOMINAL, "tensor_gemm", None)
    other = next(its for cycles, its in best.algorithm.within(problem, NOMINAL) if cycles > 1.2 * best.cost)
    assert cost_of(problem, "tensor_gemm", key_of(best.config)) == cost_of(problem, "tensor_gemm", "") == best.cost
    assert NEAR * best.cost < cost_of(problem, "tensor_gemm", key_of(other)) < math.inf
    assert cost_of(problem, "tensor_gemm", "none") == math.inf


def test_rows_of_what_a_call_picks_are_of_what_it_picks_today() -> None:
    older, rows, others = provenance.older(RESULTS), 0, list[str]()
    for path in sorted((RESULTS / "nvidia-h200").glob("*.json")):
        if f"nvidia-h200/{path.name}" in older or "suite" not in columns.read(path):
            continue
        results = Results.read(path)
        for row in results.rows:
            if row.engine != "leanconv:auto":
                continue
            rows += 1
            problem, ran = parse_problem(results.problems[row.problem]["words"]), row.algorithm.partition(" ")[0]
            if problem.kind == "conv2d":
                problem = as_images(replace(problem, op=results.op or "fprop"))
            picked = by_model(problem, NOMINAL, "auto", None)
            if cost_of(problem, ran, row.config) > NEAR * picked.cost:
                others.append(f"{path.stem}, {row.problem}: {ran} ran, {picked.algorithm.stem} is picked")
    assert rows > 800
    assert not others, "\n".join(others)


def test_choices_where_filters_stay_packed_do_not_count_what_packs_them() -> None:
    """Of single images: what is chosen so is nearer to the quickest with packed filters than what calls pick."""
    results = Results.read(RESULTS / "nvidia-h200" / "batch-1.json")
    lost: dict[Kept, list[float]] = {"": [], "quickest": []}
    for name, about in results.problems.items():
        problem, us = as_images(parse_problem(about["words"])), dict[str, float]()
        for row in results.rows:
            if row.problem == name and row.engine in ("leanconv", AUTO_ENGINE, "leanconv:prepared"):
                stem = row.algorithm.partition(" ")[0]
                us[stem] = min(us.get(stem, math.inf), row.us)
        for kept, ratios in lost.items():
            picked = by_model(problem, NOMINAL, "auto", None, kept).algorithm.stem
            if picked in us:
                ratios.append(us[picked] / min(us.values()))
    assert min(map(len, lost.values())) > 65
    usual, kept = (statistics.geometric_mean(ratios) for ratios in lost.values())
    assert kept < 1.04 < 1.08 < usual


def test_gradients_of_filters_of_a_large_volume_without_a_workspace_take_as_much_longer_as_the_page_says() -> None:
    """16 bits; docs/volumes.md says 8 times channels last, and 16 times channels first."""
    first = next(case.problem for case in load_suite("conv3d") if case.name.startswith("nnunet-stage0"))
    assert isinstance(first, ConvProblem)
    for layout, stem, times in (("NHWC", "native_weight_sync", 8), ("NCHW", "implicit_gemm_weight", 16)):
        problem = as_images(replace(first, dtype="bfloat16", layout=layout, op="wgrad"))
        without, given = (by_model(problem, NOMINAL, "auto", limit) for limit in (None, 32 << 20))
        assert (without.algorithm.stem, round(without.cost / given.cost)) == (stem, times)


def test_many_small_images_have_a_kernel_of_their_own_where_a_workspace_is_allowed() -> None:
    """Gradients of 3x3 filters, channels last; docs/algorithms/filter-gradient.md names these sizes."""

    def picked(n: int, channels: int, side: int, limit: int | None) -> bool:
        words = f"conv:n{n},c{channels},h{side},w{side},k{channels},r3,s3,pad1,NHWC,wgrad"
        return by_model(parse_problem(words), NOMINAL, "auto", limit).algorithm.stem == "tensor_weight_images"

    for side in (3, 6, 8):
        for channels, least in ((512, 64), (256, 256)):
            assert picked(least, channels, side, 32 << 20) and picked(4 * least, channels, side, 1 << 30)
            assert not picked(least // 8, channels, side, 32 << 20) and not picked(4 * least, channels, side, None)
        assert not picked(1024, 64, side, 1 << 30)
    assert picked(128, 512, 28, 32 << 20) and not picked(128, 512, 28, 1 << 30)


def test_which_image_filters_run_on_tensor_cores_is_what_the_page_says() -> None:
    """Of square images of one channel; docs/algorithms/tensor-filter.md and docs/filtering.md name these sizes."""
    never = {
        "uint8": set[int](), "float16": set[int](), "bfloat16": {10, 11, 12, 13},
        "int16": {2, 3, 4, 5, 10, 11, 12}, "float32": {2, 3, 4, 5, 6, 10, 11, 12, 13},
    }  # fmt: skip

    def picked(side: int, taps: int, dtype: str) -> str:
        problem = parse_problem(f"filter:{side}x{side},{taps}x{taps},{dtype}")
        return by_model(problem, NOMINAL, "auto", None).algorithm.stem

    for dtype, small in never.items():
        for taps in range(2, 33):
            assert picked(1448, taps, dtype) == "register_cache", (dtype, taps)
            large = {picked(side, taps, dtype) for side in (4096, 5792)}
            assert ("tensor_filter" in large) == (taps not in small), (dtype, taps)
