"""Winograd on the CPU engine: every kernel keeps its precision, and is taken only where it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv import conv2d
from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS, dense_code, oracle, winograd1d, winograd2d
from leanconv.kernels.winograd_matrices import LEAST_PRODUCTS, WIDTHS, outputs_2d
from leanconv.problem import ConvProblem
from tests.cpu_engine import arrays, by_name

ELEVEN = [(alpha, s) for alpha, widths in WIDTHS.items() for s in widths]


@pytest.mark.parametrize("positive", [False, True], ids=["zero-mean", "positive"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("alpha", "s"), ELEVEN)
def test_each_winograd_kernel_keeps_its_precision(alpha: int, s: int, layout: Any, positive: bool) -> None:
    precision = "relaxed" if alpha == 16 else "fp32"
    problem = ConvProblem(
        2, 120, 9, 31, 14, 2, s, padding=(1, 0, s // 2, 0), dilation=(2, 1), groups=2, layout=layout, bias=True,
        precision=precision, activation="relu" if positive else None,
    )  # fmt: skip
    x, w, bias = arrays(problem, positive=positive)
    bound = oracle.error_bound(problem, x, w, bias)
    error = oracle.relative_error(winograd1d.convolve(problem, alpha, x, w, bias), oracle.conv2d(problem, x, w, bias))
    assert error <= min(bound, 3e-5)
    # The same in float64, whose roundings are 2^29 times smaller.
    wide = replace(problem, dtype="float64")
    x, w, bias = arrays(wide, positive=positive)
    error = oracle.relative_error(winograd1d.convolve(wide, alpha, x, w, bias), oracle.conv2d(wide, x, w, bias))
    assert error <= bound * 2.0**-29


@pytest.mark.parametrize("positive", [False, True], ids=["zero-mean", "positive"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("size", [(13, 15), (7, 7), (2, 40), (1, 1)], ids=str)
def test_each_tile_of_winograd2d_keeps_precision(m: int, layout: Any, positive: bool, size: tuple[int, int]) -> None:
    problem = ConvProblem(
        3, 10, *size, 14, 3, 3, padding=(1, 0, 2, 3) if size > (5, 5) else (1, 2, 1, 1), groups=2, layout=layout,
        bias=True, precision="fp32" if m == 2 else "relaxed", activation="relu" if positive else None,
    )  # fmt: skip
    x, w, bias = arrays(problem, positive=positive)
    assert m in outputs_2d(problem.precision)
    error = oracle.relative_error(winograd2d.convolve(problem, m, x, w, bias), oracle.conv2d(problem, x, w, bias))
    assert error <= min(oracle.error_bound(problem, x, w, bias), 3e-6)
    wide = replace(problem, dtype="float64")
    x, w, bias = arrays(wide, positive=positive)
    error = oracle.relative_error(winograd2d.convolve(wide, m, x, w, bias), oracle.conv2d(wide, x, w, bias))
    assert error <= oracle.error_bound(wide, x, w, bias)


def test_2d_winograd_takes_larger_tiles_only_where_they_are_asked_for() -> None:
    winograd = by_name("winograd2d")
    layer = ConvProblem(2, 32, 28, 28, 32, 3, 3, padding=(1, 1, 1, 1))
    x, w, _ = arrays(layer)
    errors = [
        oracle.relative_error(winograd.run(replace(layer, precision=precision), x, w, None), oracle.conv2d(layer, x, w))
        for precision in ("fp32", "relaxed")
    ]
    assert errors[0] < 4e-7 < 8e-7 < errors[1] < 1e-5
    for change, words in (
        ({"r": 2}, "2x3"), ({"stride": (1, 2)}, "stride 1,2"), ({"dilation": (2, 1)}, "dilation 2,1"),
        ({"precision": "ieee"}, "'ieee' was requested"),
    ):  # fmt: skip
        assert words in " ".join(winograd.reasons(replace(layer, **change), None))


@pytest.mark.parametrize("s", range(2, 8))
def test_winograd_keeps_the_precision_from_its_least_sum_on(s: int) -> None:
    winograd = by_name("winograd1d")
    problem = ConvProblem(2, -(-LEAST_PRODUCTS // s), 20, 50, 12, 1, s)
    assert winograd.reasons(problem, None) == []
    few = replace(problem, c=1)
    for seed in range(3):
        for case, alpha in [(problem, 8)] + [(few, 4)] * (s in WIDTHS[4]):
            x, w, _ = arrays(case, seed)
            error = oracle.relative_error(winograd1d.convolve(case, alpha, x, w, None), oracle.conv2d(case, x, w))
            # the BLAS of NumPy 1 adds otherwise, to 1.002 times the bound with two taps; NumPy 2's to 0.95
            assert error <= 1.01 * oracle.error_bound(case, x, w)
    if s in WIDTHS[4]:  # 4 states serve the shortest sums
        assert winograd.reasons(few, None) == []
    else:
        assert (
            f"{s} products" in winograd.reasons(few, None)[0] and str(LEAST_PRODUCTS) in winograd.reasons(few, None)[0]
        )


def test_winograd_takes_16_states_only_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_code, "widest", lambda: 0)  # whose code is quicker here
    winograd = by_name("winograd1d")
    problem = ConvProblem(1, 64, 12, 40, 32, 9, 9, padding=(4, 4, 4, 4))
    relaxed = replace(problem, precision="relaxed")
    assert winograd.reasons(problem, None) == winograd.reasons(relaxed, None) == []
    assert choose(relaxed, None).algorithm is winograd
    # 7 wide filters can have either: the cheaper one is taken, and the error tells which.
    errors = []
    for precision in ("fp32", "relaxed"):
        seven = replace(problem, r=7, s=7, padding=(3, 3, 3, 3), precision=precision)
        x, w, _ = arrays(seven)
        errors.append(oracle.relative_error(winograd.run(seven, x, w, None), oracle.conv2d(seven, x, w)))
    assert errors[0] < 2e-6 < 5e-6 < errors[1] < 3e-5
    # 9 wide ones too: in column blocks precision fp32 is kept.
    x, w, _ = arrays(problem)
    errors = [
        oracle.relative_error(winograd.run(nine, x, w, None), oracle.conv2d(nine, x, w)) for nine in (problem, relaxed)
    ]
    assert errors[0] < 3e-6 < 5e-6 < errors[1] < 3e-5
    assert "from 2 on" in winograd.reasons(replace(relaxed, s=1), None)[0]


@pytest.mark.parametrize("positive", [False, True], ids=["zero-mean", "positive"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("s", "block"), [(6, 3), (7, 4), (8, 4), (9, 3), (9, 5), (13, 5), (31, 4)])
def test_blocks_of_wide_rows_keep_the_precision(s: int, block: int, layout: Any, positive: bool) -> None:
    problem = ConvProblem(
        2, 30, 9, 33, 14, 2, s, padding=(1, 0, s // 2, s // 3), dilation=(2, 1), groups=2, layout=layout, bias=True,
        activation="relu" if positive else None,
    )  # fmt: skip
    for case, factor in ((problem, 1.0), (replace(problem, dtype="float64"), 2.0**-29)):
        x, w, bias = arrays(case, positive=positive)
        y = winograd1d.convolve(case, 8, x, w, bias, block)
        assert oracle.relative_error(y, oracle.conv2d(case, x, w, bias)) <= factor * oracle.error_bound(
            problem, *arrays(problem, positive=positive)
        )


def test_beside_a_bright_pixel_errors_are_bounded_in_norm_and_ieee_is_exact() -> None:
    """What the README and conv2d say of one pixel of 1e6 among zeros."""
    random = np.random.default_rng(0)
    x, w = np.zeros((1, 16, 1, 48), np.float32), random.standard_normal((8, 16, 1, 7)).astype(np.float32)
    x[0, 3, 0, 20] = 1e6
    expected = conv2d(x.astype(np.float64), w.astype(np.float64), padding="same")
    dark = expected == 0
    assert dark.sum() == 8 * (48 - 7)
    layer = ConvProblem(1, 16, 1, 48, 8, 1, 7, padding=(0, 0, 3, 3), precision="relaxed")
    taken = [algorithm.name for algorithm in CPU_ALGORITHMS if not algorithm.reasons(layer, None)]
    assert {"im2col", "winograd1d"} <= set(taken)
    for name in taken:
        transforms = by_name(name).precision != "ieee"
        if transforms and name != "winograd1d":
            continue
        precision: Any = "relaxed" if transforms else "ieee"
        y = conv2d(x, w, padding="same", algorithm=name, precision=precision)
        assert ((y[dark] == 0).all()) != transforms, name
        assert np.linalg.norm(y - expected) < (1e-4 if transforms else 1e-6) * np.linalg.norm(expected), name
