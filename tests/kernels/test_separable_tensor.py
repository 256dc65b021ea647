"""What tensor cores must not lose: rows of any size, infinities and NaN in their places, integers without an error."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.image_filter.separable_tensor import SeparableTensor, SeparableTensorConfig
from leanconv.problem import FilterProblem
from tests import emulator
from tests.cases import TARGETS, filter_problem

CONFIG = SeparableTensorConfig(warps=4, tiles=1)


def run(problem: FilterProblem, x: np.ndarray, w: np.ndarray, **scalars: float) -> np.ndarray:
    """What the kernel makes of dense images."""
    y = np.full(problem.y_shape, np.nan, np.float32)
    plan = SeparableTensor().plan(problem, CONFIG, TARGETS[0])
    emulator.run_plan(
        plan, {"x": x, "w": w, "y": y, "value": 0.0, "delta": 0.0, **scalars}, orders=emulator.ORDERS[-1:]
    )
    return y


def weights(problem: FilterProblem, seed: int = 0) -> np.ndarray:
    """A column and a row, of one sign, each of which adds up to 1."""
    w = np.random.default_rng(seed).random(problem.w_shape)
    w[:, : problem.kh] /= w[:, : problem.kh].sum()
    w[:, problem.kh :] /= w[:, problem.kh :].sum()
    return w.astype(np.float32)


def reaches(problem: FilterProblem, of: np.ndarray) -> np.ndarray:
    """Where an output's window has a pixel that counts."""
    marked = oracle.filter2d(problem, of.astype(np.float32), np.ones(problem.w_shape, np.float32))
    return np.asarray(marked > 0.5)


@pytest.mark.parametrize(("kh", "kw"), [(5, 9), (19, 34)])
def test_infinities_and_nan_reach_their_windows_alone(kh, kw):
    problem = filter_problem(1, 70, 150, kh, kw, rank=1)
    x = np.random.default_rng(1).standard_normal(problem.x_shape).astype(np.float32)
    x[0, 3, 140], x[0, 31, 64], x[0, 32, 5] = np.inf, np.nan, -np.inf
    w = weights(problem)
    with np.errstate(invalid="ignore"):
        reference = oracle.filter2d(problem, x, w)
    result = run(problem, x, w)
    assert (~np.isfinite(result) == reaches(problem, ~np.isfinite(x))).all()
    assert (np.isnan(result) == np.isnan(reference)).all()
    finite = np.isfinite(reference)
    assert np.abs(result[finite] - reference[finite]).max() < 1e-6


@pytest.mark.parametrize("exponents", [(0, 60, 0, -20), (120, 50, 127, 60), (-130, -140, -126, -149)])
def test_rows_of_any_size(exponents):
    """Each 48 rows are of another size; outputs whose windows lie in one of these have the error of float32."""
    problem = filter_problem(1, 48 * len(exponents), 80, 9, 9, rank=1)
    rng, w = np.random.default_rng(2), weights(problem)
    x = np.concatenate([np.ldexp(rng.random((1, 48, 80)) + 1, e) for e in exponents], axis=1).astype(np.float32)
    result, reference = run(problem, x, w), oracle.filter2d(problem, x, w)
    for k in range(len(exponents)):
        # a step has 16 rows, whose largest decides
        part = slice(48 * k + 16, 48 * k + 32)
        error = np.linalg.norm(result[:, part] - reference[:, part]) / np.linalg.norm(reference[:, part])
        smallest = 2.0**-150 / 2.0 ** exponents[k]
        assert error < 4e-7 + smallest, exponents[k]
    assert np.linalg.norm(result - reference) < 4e-7 * np.linalg.norm(reference)


def test_an_outlier_costs_its_neighbours_little():
    problem = filter_problem(1, 64, 200, 7, 7, rank=1)
    x = np.random.default_rng(3).random(problem.x_shape).astype(np.float32) + 1
    x[0, 33, 100] = 2.0**16
    w = weights(problem)
    result, reference = run(problem, x, w), oracle.filter2d(problem, x, w)
    assert (np.abs(result - reference) / np.abs(reference)).max() < 1e-6


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_integers_have_no_error(dtype):
    """Binomial weights, whole and over a power of two: sums of up to 22 bits."""
    problem = filter_problem(2, 37, 90, 7, 5, rank=1, dtype=dtype, out_dtype="float32", border="wrap")
    most = 255 if dtype == "uint8" else 4095
    x = np.random.default_rng(4).integers(0, most, problem.x_shape, endpoint=True).astype(dtype)
    w = np.array([[1, 6, 15, 20, 15, 6, 1, 1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16]], np.float32)
    assert (run(problem, x, w, delta=3.0) == oracle.filter2d(problem, x, w, delta=3.0)).all()


def test_weights_of_all_sizes():
    problem = filter_problem(1, 40, 70, 9, 11, rank=1, border="constant")
    rng = np.random.default_rng(5)
    x = rng.standard_normal(problem.x_shape).astype(np.float32)
    for column, row in ((100, -100), (-100, 100), (20, 60), (-60, -40)):
        w = weights(problem)
        w[:, : problem.kh] = np.ldexp(w[:, : problem.kh], column)
        w[:, problem.kh :] = np.ldexp(w[:, problem.kh :], row)
        value = 1e3
        result, reference = run(problem, x, w, value=value), oracle.filter2d(problem, x, w, value)
        assert np.linalg.norm(result - reference) < 4e-7 * np.linalg.norm(reference), (column, row)


def test_nothing_is_made_of_zeros():
    problem = filter_problem(1, 33, 70, 5, 5, rank=1)
    w = weights(problem)
    assert (run(problem, np.zeros(problem.x_shape, np.float32), w, delta=2.0) == 2.0).all()
    x = np.random.default_rng(6).standard_normal(problem.x_shape).astype(np.float32)
    assert (run(problem, x, np.zeros_like(w), delta=-1.0) == -1.0).all()
    w[0, 2] = np.inf
    assert not np.isfinite(run(problem, x, w)).any()
