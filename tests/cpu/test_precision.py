"""Precision on data of every kind: sparse, of any range, with outliers; its bounds, and who keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.dtypes import is_narrow
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.kernels.winograd_matrices import WIDTHS, Matrices, matrices
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem
from research import bounds
from research.data import DECADES, KINDS, draw
from tests import cases, emulator, proof, selection
from tests.cases import TARGETS
from tests.variants import VARIANTS

ELEVEN = [(alpha, width) for alpha, widths in WIDTHS.items() for width in widths]
TRANSFORMS = [*(matrices(alpha + 1 - width, width) for alpha, width in ELEVEN), matrices(2, 3), matrices(4, 3)]


def check(
    algorithm: GpuAlgorithm, problem: ConvProblem, run: Callable[[Plan, dict[str, Any]], None], target: Target
) -> None:
    """What ``algorithm`` computes keeps the bound of its precision, on data of every kind."""
    problem = replace(problem, precision=algorithm.precision)
    plan = algorithm.plan(problem, next(iter(algorithm.configs(problem, target))), target)
    for kind in KINDS:
        x, w = draw(problem, kind)
        y = np.full(problem.y_shape, np.nan, np.float32)
        bias = cases.draw_conv(problem, "zero-mean")["bias"]
        run(plan, {problem.operands[0].role: x, "w": w, "bias": bias, problem.operands[-1].role: y})
        error = bounds.absolute_error(problem, y, x, w, bias)
        assert error <= bounds.precision_bound(problem), f"{algorithm.stem} on {problem}, {kind} data: {error}"


PLAIN_CASES = [
    replace(c, problem=replace(c.problem, scale=False, add=False, activation=None))
    for c in cases.CONV_CASES
    if c.name in ("plain-nchw", "tails-nhwc", "tails-chwn")
]
SERVED = [
    pytest.param(algorithm, case.problem, id=f"{algorithm.stem}-{case.name}")
    for case in PLAIN_CASES
    for algorithm in VARIANTS
    if not algorithm.reasons(replace(case.problem, precision=algorithm.precision), TARGETS[0])
]


@pytest.mark.parametrize(("algorithm", "problem"), [p for p in SERVED if "plain" in p.id])
def test_algorithms_keep_the_bound_on_the_emulator(algorithm: GpuAlgorithm, problem: ConvProblem) -> None:
    def run(plan: Plan, values: dict[str, Any]) -> None:
        emulator.run_plan(plan, values, orders=("ascending",))

    check(algorithm, problem, run, TARGETS[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("algorithm", "problem"), SERVED)
def test_algorithms_keep_the_bound_on_a_gpu(algorithm: GpuAlgorithm, problem: ConvProblem) -> None:
    from leanconv.runtime.launch import open_device

    check(algorithm, problem, proof.run_on_gpu, open_device(0).target)


LAYER = ConvProblem(2, 40, 6, 8, 72, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
FILTERS = ConvProblem(16, 32, 6, 8, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC", op="wgrad")
DEPTHWISE = ConvProblem(4, 6, 9, 12, 6, 3, 3, padding=(1, 1, 1, 1), groups=6)
ROW = ConvProblem(2, 3, 1, 24, 3, 1, 4, padding=(0, 0, 3, 0), groups=3)
#: Layers that each kernel without transforms takes one of, at least.
ANY_RANGE = (
    *(replace(each, precision=level) for each in (LAYER, FILTERS) for level in ("fp32", "tf32")),
    *(replace(each, layout="NCHW", dtype=dtype) for each in (LAYER, FILTERS) for dtype in ("float32", "float16")),
    *(replace(LAYER, dtype="bfloat16"), replace(LAYER, op="dgrad"), replace(LAYER, bias=True, layout="CHWN")),
    *(DEPTHWISE, replace(DEPTHWISE, op="wgrad"), replace(DEPTHWISE, op="dgrad"), replace(DEPTHWISE, k=12), ROW),
)


def each_without_transforms() -> list[Any]:
    """Every kernel on each of the layers that it takes; ``make test`` plays one of each family and arithmetic."""
    found = [
        (algorithm, problem)
        for problem in ANY_RANGE
        for algorithm in VARIANTS
        if "winograd" not in algorithm.stem and not algorithm.reasons(problem, TARGETS[0])
    ]
    few = selection.cover(found, lambda each: [(type(each[0]).__module__.split(".")[2], each[0].arithmetic(each[1]))])
    return selection.marked(found, few, lambda each: (each, f"{each[0].stem} {each[1]}"))


def check_each_output(
    algorithm: GpuAlgorithm, problem: ConvProblem, run: Callable[[Plan, dict[str, Any]], None], target: Target
) -> None:
    """No output is off by more than `bounds.output_bound`. What is lost below the largest number shows in fp32."""
    plan = algorithm.plan(problem, next(iter(algorithm.configs(problem, target))), target)
    arithmetic, unit = algorithm.arithmetic(problem), oracle.FLOAT32_UNIT
    for kind in ("zero-mean",) if is_narrow(problem.dtype) else DECADES:
        x, w = draw(problem, kind)
        bias = cases.draw_conv(problem, "zero-mean")["bias"]
        first, second, *_, written = problem.operands
        y = np.full(problem.y_shape, np.nan, problem.dtype)
        run(plan, {first.role: x, second.role: w, "bias": bias, written.role: y})
        error = abs(y.astype(np.float64) - oracle.conv2d(problem, x, w, bias))
        assert (error <= bounds.output_bound(problem, x, w, bias, arithmetic)).all(), kind
        if arithmetic == "fp16x3" and kind == DECADES[1]:
            own = oracle.conv2d(replace(problem, bias=False), abs(x), abs(w))
            assert (error > (problem.terms + 160) * unit * own).any(), "the term of the largest product is needed"


@pytest.mark.parametrize(("algorithm", "problem"), each_without_transforms())
def test_no_output_is_off_by_more_than_its_bound_on_the_emulator(algorithm: GpuAlgorithm, problem: ConvProblem) -> None:
    def run(plan: Plan, values: dict[str, Any]) -> None:
        emulator.run_plan(plan, values, orders=("ascending",))

    check_each_output(algorithm, problem, run, TARGETS[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("algorithm", "problem"), each_without_transforms())
def test_no_output_is_off_by_more_than_its_bound_on_a_gpu(algorithm: GpuAlgorithm, problem: ConvProblem) -> None:
    from leanconv.runtime.launch import open_device

    target = open_device(0).target
    if reasons := algorithm.reasons(problem, target):
        pytest.skip("; ".join(reasons))
    check_each_output(algorithm, problem, proof.run_on_gpu, target)


@pytest.mark.parametrize("algorithm", CPU_ALGORITHMS, ids=lambda algorithm: algorithm.stem)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_algorithms_of_the_cpu_engine_keep_the_bound(algorithm: Any, dtype: str) -> None:
    for rest in ({}, {"layout": "NHWC", "groups": 2, "bias": True, "activation": "relu"}, {"op": "dgrad"}):
        problem = ConvProblem(2, 32, 9, 14, 12, 3, 3, padding=(1, 0, 2, 1), dtype=dtype, precision=algorithm.precision)
        problem = replace(problem, **rest)
        if algorithm.reasons(problem, None):
            continue
        # of float16, what is of its range
        for kind in KINDS if dtype != "float16" else ("zero-mean", "positive", "ReLU 90 %"):
            x, w = draw(problem, kind)
            bias = cases.draw_conv(problem, "zero-mean")["bias"]
            y = algorithm.run(problem, x, w, bias)
            assert bounds.absolute_error(problem, y, x, w, bias) <= bounds.precision_bound(problem), (problem, kind)


def largest_magnitudes(transform: Matrices, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """``|at| (|g| w ⊙ |bt| x)`` of every tile of a row that is empty at both ends."""
    at, g, bt = (abs(matrix) for matrix in transform.arrays())
    tiles = range(0, len(x) - transform.alpha + 1, transform.n)
    return np.concatenate([at @ ((g @ w) * (bt @ x[i : i + transform.alpha])) for i in tiles])


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: f"{t.n},{t.r}")
def test_no_data_grow_roundings_by_more_than_the_worst(transform: Matrices) -> None:
    n, r, alpha = transform.n, transform.r, transform.alpha
    random, length = np.random.default_rng(0), 40 * n
    drawn = [(random.random(length) ** power, random.random(r) ** power) for power in (0, 1, 4, 20)]
    lone = [(np.arange(length) == place, np.eye(r)[k]) for place in range(n) for k in range(r)]
    ratios = []
    for x, w in drawn + lone:
        row = np.concatenate([np.zeros(alpha * n), x, np.zeros(alpha * n)])
        size = np.linalg.norm(np.convolve(row, w[::-1]))
        ratios.append(float(np.linalg.norm(largest_magnitudes(transform, row, w)) / size))
    assert 0.3 * transform.worst_growth < max(ratios) <= transform.worst_growth
    # the growth of independent roundings is that of the root of squares, so it is less
    assert 1 <= transform.lone_growth < max(ratios[len(drawn) :])


def test_growth_is_what_the_page_says() -> None:
    found = {(alpha, width): matrices(alpha + 1 - width, width) for alpha, width in ELEVEN}
    for (alpha, _), transform in found.items():
        lone, worst = {4: (1.8, 5.1), 8: (11, 57), 16: (620, 2900)}[alpha]
        assert 0.6 * lone < transform.lone_growth < lone and transform.worst_growth < worst
    assert matrices(1, 3, points=(0, 1)).lone_growth > 1 and matrices(3, 1, points=(0, 1)).worst_growth > 1
    assert matrices(1, 1, points=()).lone_growth == matrices(1, 1, points=()).worst_growth == 1


def test_windows_beyond_the_output_count() -> None:
    """A pixel in the corner that no output sees by a weight but zero: Winograd's error there has no other measure."""
    problem = ConvProblem(1, 1, 8, 14, 16, 3, 3)
    x, w = np.zeros(problem.x_shape, np.float32), np.zeros(problem.w_shape, np.float32)
    x[..., 0, 1] = 1
    w[..., 0, 2] = np.random.default_rng(0).standard_normal((problem.k, 1))
    assert not oracle.conv2d(problem, x, w).any()
    assert bounds.magnitude(problem, x, w) == pytest.approx(np.linalg.norm(w))
    y = winograd1d_of(problem, x, w)
    assert 0 < bounds.absolute_error(problem, y, x, w) <= bounds.absolute_bound(problem, matrices(6, 3))
    assert bounds.absolute_error(problem, np.zeros_like(y), x, w) == 0
    y[0, 0, 0, 0] = np.nan
    assert not bounds.absolute_error(problem, y, x, w) <= np.inf


def winograd1d_of(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    from leanconv.cpu import winograd1d

    return winograd1d.convolve(problem, 8, x, w, None)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
def test_magnitudes_of_a_layer_and_its_gradient(layout: Any, stride: int) -> None:
    problem = ConvProblem(2, 6, 7, 8, 4, 3, 2, padding=(1, 0, 2, 1), groups=2, layout=layout, bias=True)
    problem = replace(problem, stride=(stride, stride))
    x, w = draw(problem, "zero-mean")
    outputs = np.linalg.norm(oracle.conv2d(replace(problem, bias=False), abs(x), abs(w)))
    assert bounds.magnitude(problem, x, w) >= outputs * (1 if stride == 2 else 1.01)
    bias = np.full(problem.k, 3, np.float32)
    added = bounds.magnitude(problem, x, w, bias) - bounds.magnitude(problem, x, w)
    assert added == pytest.approx(3 * np.sqrt(np.prod(problem.y_shape)))
    gradient = replace(problem, op="dgrad", bias=False)
    dy, w = draw(gradient, "zero-mean")
    whole = bounds.magnitude(gradient, dy, w)
    assert whole >= np.linalg.norm(oracle.conv2d(gradient, abs(dy), abs(w)))
    if stride == 1:
        forward = gradient.as_forward()
        turned = {"NCHW": (2, 3), "NHWC": (1, 2), "CHWN": (1, 2)}[layout]
        k, c = layout.index("N"), layout.index("C")
        parts = np.split(np.flip(w, turned), problem.groups, axis=k)
        w = np.concatenate([part.swapaxes(k, c) for part in parts], axis=k)
        assert bounds.magnitude(forward, dy, w) == pytest.approx(whole)


def test_one_huge_pixel_among_zeros() -> None:
    """README: in precision fp32 Winograd's errors are small in norm, and "ieee" is exact where the answer is 0."""
    problem = ConvProblem(1, 1, 9, 30, 64, 3, 3, padding=(1, 1, 1, 1))
    x = np.zeros(problem.x_shape, np.float32)
    x[0, 0, 4, 9] = 1e6
    w = np.random.default_rng(0).standard_normal(problem.w_shape).astype(np.float32)
    zero = oracle.conv2d(problem, x, w) == 0
    y = winograd1d_of(problem, x, w)
    assert 0.01 < abs(y[zero]).max() < 4
    assert bounds.absolute_error(problem, y, x, w) < 10
    assert not leanconv.conv2d(x, w, padding=1, precision="ieee")[zero].any()


@pytest.mark.parametrize("kind", KINDS)
def test_data_are_what_their_name_says(kind: str) -> None:
    problem = ConvProblem(2, 6, 20, 30, 4, 3, 3, layout="NHWC")
    x, w = draw(problem, kind)
    assert x.shape == problem.x_shape and w.shape == problem.w_shape and x.dtype == w.dtype == np.float32
    zeros = float((x == 0).mean())
    if kind.startswith("ReLU"):
        assert zeros == pytest.approx(float(kind.split()[1]) / 100, abs=1e-3)
    if kind in ("one-hot", "lone product"):
        assert (x != 0).sum() == 1
    if kind == "lone product":
        assert ((w != 0).sum(axis=(1, 2)) == 1).all()
    if kind == "channel-scaled":
        sizes = abs(x).max(axis=(0, 1, 2))
        assert sizes.max() > 100 * sizes.min()
    assert (x.max() == 1e6) == (kind == "outlier")
    assert zeros > 0.999 or (x.min() >= 0) == (kind in ("positive", "log-normal") or kind.startswith("ReLU"))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind='wild' is none of zero-mean, positive"):
        draw(ConvProblem(1, 1, 4, 4, 1, 3, 3), "wild")
