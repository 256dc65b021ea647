"""`leanconv.filter2d` on the CPU against its definition, with pixels, weights and ``delta`` of any size."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

import leanconv
from leanconv.cpu import oracle
from leanconv.dtypes import FILTERS, filter_sum, is_integer
from leanconv.images.borders import BorderName
from leanconv.problem import FilterProblem

BORDERS = get_args(BorderName)
TYPES = [dtype for dtype in FILTERS if dtype != "bfloat16"]


class Case(NamedTuple):
    image: np.ndarray
    kernel: np.ndarray
    options: dict[str, Any]


def pixels(rng: np.random.Generator, shape: tuple[int, int], dtype: str, kind: str) -> np.ndarray:
    if is_integer(dtype):
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        drawn = rng.integers(least, most, shape, dtype, endpoint=True)
        return np.full(shape, most if kind == "largest" else least, dtype) if kind in ("largest", "least") else drawn
    most = float(np.finfo(dtype).max) ** 0.5
    scale = {"usual": 1.0, "largest": most, "least": 1 / most, "wide": most ** rng.uniform(-1, 1, shape)}[kind]
    return (rng.standard_normal(shape) * scale).astype(dtype)


def weights(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    drawn = rng.standard_normal(shape)
    if kind == "integers":
        return rng.integers(-5, 6, shape)
    if kind == "products":
        return np.outer(drawn[:, 0], drawn[0])
    return drawn * {"usual": 1.0, "large": 1e12, "small": 1e-9, "few": rng.random(shape) < 0.3}[kind]


def drawn(rng: np.random.Generator) -> Case:
    def some(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    dtype, low = some(*TYPES), some(1, 1, 90)
    shape, taps = (tuple(map(int, rng.integers(least, most, 2))) for least, most in ((low, low + 40), (1, 13)))
    image = pixels(rng, shape, dtype, some("usual", "largest", "least", "wide"))
    kernel = weights(rng, taps, some("usual", "integers", "products", "large", "small", "few"))
    result = some(*[dtype] * len(TYPES), *TYPES)
    if dtype == result == "int32":  # exact sums wrap around, which other tests are for
        result = "float64"
    anchor = some(None, tuple(int(rng.integers(count)) for count in taps))
    delta = some(0, 3, -100, 3_000_000_000.0, -1e15)
    return Case(image, kernel, {"dtype": result, "border": some(*BORDERS), "delta": delta, "anchor": anchor})


def defined(case: Case, image: np.ndarray, kernel: np.ndarray, delta: float) -> np.ndarray:
    """The sums of the definition, in float64."""
    anchor = case.options["anchor"] or tuple(taps // 2 for taps in kernel.shape)
    problem = FilterProblem(1, *image.shape, *kernel.shape, anchor, case.options["border"], "float64")
    return oracle.filter2d(problem, image, kernel, delta=delta).reshape(image.shape)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(1, 6))])
def test_any_filter_is_its_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(500):
        check(drawn(rng))


def check(case: Case) -> None:
    image, kernel, options = case
    dtype, result, delta = image.dtype.name, options["dtype"], options["delta"]
    sums = filter_sum(dtype, result, kernel.dtype.kind == "i")
    exact = defined(case, image, kernel, delta)
    size = defined(case, abs(image.astype(np.float64)), abs(kernel), abs(delta))
    # transforms have errors relative to the largest pixels around
    largest = abs(image.astype(np.float64)).max() * abs(kernel).sum() if kernel.size > 49 else 0
    error = 64 * np.finfo(sums).eps * (size + largest) + np.finfo(sums).tiny
    with np.errstate(all="ignore"):
        y = leanconv.filter2d(image, kernel, **options).astype(np.float64)
    if is_integer(result):
        limits = np.iinfo(result).min, np.iinfo(result).max
        least, most = (np.clip(np.rint(each), *limits) for each in (exact - error, exact + error))
    else:
        limits = np.finfo(result)
        error = error + abs(exact) * limits.eps + limits.smallest_subnormal
        least, most = exact - error, exact + error
        # what leaves the type is Inf
        least, most = np.where(least < -limits.max, -np.inf, least), np.where(most > limits.max, np.inf, most)
    fits = size < 0.1 * np.finfo(sums).max
    off = ~((least <= y) & (y <= most)) & fits
    assert not off.any(), (dtype, image.shape, kernel, options, y[off][:3], exact[off][:3])
