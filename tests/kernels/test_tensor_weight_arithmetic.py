"""The arithmetic of the filters' gradient on tensor cores, stated in NumPy and tried on random data of every kind: the
promise of precision ``fp32`` holds on all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from leanconv.cpu.oracle import FLOAT32_UNIT
from leanconv.problem import ConvProblem
from tests.cases_weight import opposed
from tests.kernels.tensor_cores import WEIGHT

DEPTH = 64
#: Weights and filters of a tile, and its pixels.
ROWS, FILTERS, PIXELS = 48, 64, 192
LEAST_APART = 4
#: Smaller products may be lost, as inverse scales leave float32's range.
LEAST_PRODUCT = 2.0**-121


def root_code(largest: np.ndarray) -> np.ndarray:
    """`root_code` of kernels/hopper_fp32/tensor_weight_tiles.cuh."""
    exponent = np.frexp(np.maximum(largest, 1e-300))[1] - 1
    return np.where(largest > 0, (exponent + 254) // 2, 0)


def with_same_scale(largest: np.ndarray, code: int) -> np.ndarray:
    """`FilterScales` of tensor_weight_operands.cuh: sixteen filters that all reach 2⁻⁸ of the largest dy
    have one scale."""
    if code <= 63:
        return largest
    of_all = np.ldexp(1.0, 2 * code - 126 - 127)
    near = (largest == 0) | ((largest >= of_all / 256) & (largest < 2 * of_all))
    same = near.reshape(-1, 16).all(axis=1).repeat(16)
    return np.where(same, np.float32(of_all), largest)


def split(values: np.ndarray, code: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """High and low halves of scaled values, and what their products are multiplied by: a scale for each column."""
    largest = with_same_scale(abs(values).max(axis=0), code).astype(np.float32)
    biased = largest.view(np.uint32).astype(np.int64) >> 23 & 255
    scale = np.minimum(268 - biased[None], 253) - 127
    up, down = (np.ldexp(np.float32(1), sign * scale).astype(np.float32) for sign in (1, -1))
    high = (values * up).astype(np.float16)
    low = (values * up - high.astype(np.float32)).astype(np.float16)
    return high.astype(np.float64), low.astype(np.float64), down


def modelled(x: np.ndarray, dy: np.ndarray, factors: bool = True) -> np.ndarray:
    """What a tile's block computes of x, (pixels, rows), and dy, (pixels, filters); sums of a stage are exact."""
    total = np.zeros((x.shape[1], dy.shape[1]), np.float32)
    for first in range(0, len(x), DEPTH):
        own_x, own_dy = x[first : first + DEPTH], dy[first : first + DEPTH]
        codes = root_code(abs(own_dy).max(axis=1).astype(np.float64))
        if factors and codes.min() + LEAST_APART < codes.max():
            root = np.where(codes > 0, np.ldexp(1.0, codes - 127), 0.0).astype(np.float32)[:, None]
            inverse = np.ldexp(1.0, 127 - codes).astype(np.float32)[:, None]
            own_x, own_dy = own_x * root * root, own_dy * inverse * inverse
        high, low, down = split(own_x)
        dy_high, dy_low, dy_down = split(own_dy, int(codes.max()))
        partial = low.T @ dy_high + high.T @ dy_low + high.T @ dy_high
        total = (partial * (down.T * dy_down).astype(np.float64) + total).astype(np.float32)
    return total


def units(x: np.ndarray, dy: np.ndarray, dw: np.ndarray) -> float:
    """The error in units of 2⁻²⁴ of ‖|x| |dy|‖ (`research.bounds.absolute_error`)."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    return float(np.linalg.norm(dw - x.T @ dy) / (np.linalg.norm(abs(x).T @ abs(dy)) * FLOAT32_UNIT))


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Products whose factors vary with pixels, channels and filters, each by up to 10^60, together or the other way
    round, or one is so much larger that it alone counts; parts are zero."""
    random = np.random.default_rng(seed)

    def exponents(count: int) -> np.ndarray:
        reach = random.choice([0, 1, 3, 5, 10, 30])
        kind = random.choice(["each", "ramp", "steps", "one"])
        if kind == "each":
            return random.uniform(-reach, reach, count)
        if kind == "ramp":
            return reach * np.linspace(-1, 1, count) * random.choice([-1, 1])
        if kind == "steps":
            return reach * random.choice([-1.0, 1.0], count)
        return np.where(np.arange(count) == random.integers(count), reach, 0)

    x, dy = random.standard_normal((PIXELS, ROWS)), random.standard_normal((PIXELS, FILTERS))
    pixels = exponents(PIXELS)
    of_x, of_dy = pixels, pixels * random.choice([-1, -1, -0.9, 0, 1])
    if random.random() < 0.3:
        of_dy = exponents(PIXELS)
    x, dy = x * 10 ** of_x[:, None], dy * 10 ** of_dy[:, None]
    if random.random() < 0.5:
        x, dy = x * 10 ** (exponents(ROWS) / 3), dy * 10 ** (exponents(FILTERS) / 3)
    for each in (x, dy):
        if random.random() < 0.4:
            each *= random.random(each.shape if random.random() < 0.5 else (PIXELS, 1)) < random.uniform(0.02, 1)
    # The largest product, and how far either may be scaled for it.
    most = max((abs(x).max(1) * abs(dy).max(1)).max(), 1e-300)
    room = [37 - np.log10(max(abs(each).max(), 1e-300)) for each in (x, dy)]
    apart = min(random.uniform(-34, 37) - np.log10(most), sum(room))
    of_x = np.clip(random.uniform(-20, 20), apart - room[1], room[0])
    return (x * 10.0**of_x).astype(np.float32), (dy * 10.0 ** (apart - of_x)).astype(np.float32)


def test_the_model_computes_what_the_kernel_does() -> None:
    problem = ConvProblem(1, 32, 8, 24, 64, 1, 1, layout="NHWC", op="wgrad")
    random = np.random.default_rng(2)
    ramps = opposed(problem, 9)[..., None]
    x = (random.standard_normal(problem.x_shape) * ramps).astype(np.float32)
    dy = (random.standard_normal(problem.operands[1].shape) / ramps).astype(np.float32)
    dw = replace(WEIGHT, problem=problem).played(x, dy).reshape(64, 32).T
    flat = x.reshape(-1, 32), dy.reshape(-1, 64)
    assert units(*flat, dw) < 1 and units(*flat, modelled(*flat)) < 1
    # Halves and scales are the same: only sums of a stage are rounded in another way.
    magnitude = abs(flat[0]).T.astype(np.float64) @ abs(flat[1]).astype(np.float64)
    assert abs(dw - modelled(*flat)).max() < 4 * FLOAT32_UNIT * magnitude.max()
    assert units(*flat, modelled(*flat, factors=False)) > 1e4


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(0, 8000, 1000))
def test_data_of_every_kind(first: int) -> None:
    for seed in range(first, first + 1000):
        x, dy = drawn(seed)
        exact, magnitude = x.T.astype(np.float64) @ dy, abs(x).T.astype(np.float64) @ abs(dy)
        error = np.linalg.norm(modelled(x, dy) - exact)
        lost = PIXELS * LEAST_PRODUCT * np.sqrt(exact.size)
        assert error <= np.sqrt(PIXELS) / 2 * FLOAT32_UNIT * np.linalg.norm(magnitude) + lost, seed
