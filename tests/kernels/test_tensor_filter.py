"""Image filters on tensor cores: ranges of pixels and weights, infinities, exact integers."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.bench.results import Results
from leanconv.call.choose import by_model, choose
from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.kernels.image_filter.tensor_filter import TensorFilterConfig
from leanconv.words import parse_problem
from tests import proof, selection
from tests.cases import TARGETS, filter_problem
from tests.cases_tensor_filter import TENSOR_FILTER_CASES
from tests.variants import NAMED

TENSOR = NAMED["tensor_filter"]
#: Rows of bands that lie inside the image and at its edges, and strips likewise.
CONFIG = TensorFilterConfig(rows=16, tiles=1, depth=4, unroll=2, warps=2, shared=False)


def filtered(problem: Any, x: np.ndarray, w: np.ndarray, delta: float = 0.0) -> np.ndarray:
    y = np.full(problem.y_shape, proof.POISON[problem.result], problem.result)
    values = {"x": x.ravel(), "w": w, "y": y.reshape(-1), "value": 0, "delta": delta}
    proof.run_on_emulator(TENSOR.plan(problem, CONFIG, TARGETS[0]), values)
    return y


def banded() -> list[Any]:
    """Each case in bands of 16 rows, those that are thorough in every configuration; in ``make test`` as few as have
    each type, each number of channels, and each way to hold weights."""
    found = []
    for case in TENSOR_FILTER_CASES:
        configs = list(TENSOR.configs(case.problem, TARGETS[0]))
        for config in dict.fromkeys(replace(each, rows=16) for each in configs[: None if case.thorough else 1]):
            found.append((case, config))

    def differs(each: Any) -> Any:
        problem, config = each[0].problem, each[1]
        yield from (("dtype", problem.dtype), ("channels", problem.channels), each[0].name.split("-")[0])
        yield "config", config.shared, config.tiles, config.unroll
        yield "edges", problem.x_pitch % 16 == 0, problem.y_pitch % 16 == 0, problem.w % 16 == 0

    def param(each: Any) -> Any:
        case, config = each
        return (case.problem, config), f"{case.name}-{config.tiles}-{config.depth}-{config.warps}-{config.shared}"

    return selection.marked(found, selection.cover(found, differs), param)


@pytest.mark.parametrize(("problem", "config"), banded())
def test_bands_of_several_rows_are_right(problem, config):
    proof.check(TENSOR, problem, config)


RANGES = {
    "rows": lambda rng, x: x * 10.0 ** rng.integers(-30, 30, (1, x.shape[1], 1)),
    "decades": lambda rng, x: x * 10.0 ** rng.uniform(-8, 8, x.shape),
    "outliers": lambda rng, x: np.where(rng.random(x.shape) < 0.002, x * 1e8, x),
    "tiny": lambda rng, x: x * 1e-35,
    "huge": lambda rng, x: x * 1e36,
    "positive": lambda rng, x: abs(x),
    "zeros": lambda rng, x: 0 * x,
}


@pytest.mark.parametrize("size", [3, 9, pytest.param(11, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", RANGES)
def test_the_error_of_float32_is_bounded_on_all_data(name, size):
    """By four units of float32's roundoff of the same filter's result on absolute values, in norm."""
    problem, rng = filter_problem(1, 43, 400, size, size), np.random.default_rng(size)
    w = rng.standard_normal((size, size)).astype(np.float32)
    x = RANGES[name](rng, rng.standard_normal(problem.x_shape)).astype(np.float32)
    error = filtered(problem, x, w) - oracle.filter2d(problem, x, w)
    sizes = oracle.filter2d(problem, abs(x), abs(w))
    largest = max(float(sizes.max()), 1e-300)
    assert np.linalg.norm(error / largest) <= 4 * 2.0**-24 * np.linalg.norm(sizes / largest)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_infinity_and_nan_reach_the_windows_that_hold_them(dtype):
    problem, rng = filter_problem(1, 43, 400, 5, 7, dtype=dtype), np.random.default_rng(0)
    w = rng.standard_normal((5, 7)).astype(np.float32)
    x = rng.standard_normal(problem.x_shape).astype(dtype)
    x[0, 5, 7], x[0, 30, 200], x[0, 33, 203], x[0, 20, 150:170] = np.nan, np.inf, -np.inf, np.inf
    y, right = filtered(problem, x, w), oracle.filter2d(problem, x, w)
    assert np.array_equal(np.isnan(y), np.isnan(right)) and np.array_equal(np.isinf(y), np.isinf(right))
    assert np.array_equal(y[np.isinf(y)] > 0, right[np.isinf(y)] > 0)
    finite = np.isfinite(right)
    assert 12000 < finite.sum() < right.size - 200
    np.testing.assert_allclose(y[finite], right[finite], rtol=2e-3, atol=2e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("largest", [1, 2000, 4000])
def test_integers_are_exact(dtype, largest):
    """As weights of one float16, and of two, as long as sums are exact in float32."""
    problem, rng = filter_problem(1, 35, 400, 5, 5, dtype=dtype, out_dtype="float32"), np.random.default_rng(largest)
    w = rng.integers(-largest, largest, (5, 5), endpoint=True).astype(np.float32)
    limits = np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, problem.x_shape, dtype, endpoint=True)
    right = oracle.filter2d(problem, x, w)
    assert abs(right).max() < 2**24 and np.array_equal(filtered(problem, x, w), right)
    rounded = filtered(replace(problem, out_dtype=None), x, w, -3.0)
    assert np.array_equal(rounded, (right - 3).clip(limits.min, limits.max))


@pytest.mark.parametrize("weight", [0.0, 1e-38, 1e-9, 3e7, 1e30, np.inf, np.nan])
def test_weights_of_any_size(weight):
    """What is too large for the scale of 8-bit pixels, or too small, is summed in direct order."""
    problem, rng = filter_problem(1, 20, 300, 3, 3, dtype="uint8", out_dtype="float32"), np.random.default_rng(0)
    w = np.full((3, 3), np.float32(weight))
    w[2, 1] *= -2
    x = rng.integers(1, 255, problem.x_shape, np.uint8)
    with np.errstate(all="ignore"):
        right = oracle.filter2d(problem, x, w)
        np.testing.assert_allclose(
            filtered(problem, x, w), right.astype(np.float32), rtol=1e-4, atol=1e-6 * weight * 255
        )


def test_results_are_rounded_as_in_direct_order():
    """Halves go to the even neighbour."""
    problem = filter_problem(1, 20, 300, 1, 2, dtype="uint8", anchor=(0, 0))
    x = np.random.default_rng(0).integers(0, 255, problem.x_shape, np.uint8)
    w = np.full((1, 2), 0.5, np.float32)
    assert np.array_equal(filtered(problem, x, w), np.rint(oracle.filter2d(problem, x, w)))


def measured() -> list[tuple[Any, dict[str, float]]]:
    """Filters on an H200: problems, and the microseconds of each algorithm."""
    found = []
    for suite in ("filters", "filter-types"):
        path = Path(__file__).resolve().parents[2] / f"benchmarks/results/nvidia-h200/{suite}.json"
        results = Results.read(path)
        for name, about in results.problems.items():
            times = {row.algorithm: row.us for row in results.of(name) if row.engine == "leanconv"}
            found.append((parse_problem(about["words"]), times))
    return found


@pytest.mark.parametrize("name", ["register_cache", "tensor_filter"])
def test_predictions_are_what_was_measured(name):
    problems = [(problem, times[name]) for problem, times in measured() if name in times]
    ratios = [by_model(problem, NOMINAL, name).cost / 1980 / us for problem, us in problems]
    assert len(ratios) >= 100
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.05
    assert all(0.8 < ratio < 1.2 for ratio in ratios)


@pytest.mark.parametrize("choice", [by_model, choose])
def test_what_is_chosen_is_about_as_fast_as_the_best(choice):
    lost = []
    for problem, times in measured():
        chosen = choice(problem, NOMINAL).algorithm.name
        lost.append(times[chosen] / min(times.values()))
    assert len(lost) >= 100
    assert sum(each <= 1.05 for each in lost) >= 0.95 * len(lost)
    assert max(lost) < 1.15
