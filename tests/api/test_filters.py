"""Small kernels by name: OpenCV's Gaussians, and what is refused."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from leanconv.images import filters

#: rows of cv2.getGaussianKernel(size, 0) of OpenCV 5.0, in units of 1/256
OPENCV_ROWS = {
    1: [256],
    2: [128, 128],
    3: [64, 128, 64],
    5: [16, 64, 96, 64, 16],
    7: [8, 28, 56, 72, 56, 28, 8],
    9: [4, 13, 30, 51, 60, 51, 30, 13, 4],
    11: [2.2559307, 6.94875575, 16.66919849, 31.14216269, 45.31157935, 51.34474605,
         45.31157935, 31.14216269, 16.66919849, 6.94875575, 2.2559307],
}  # fmt: skip


@pytest.mark.parametrize("size", [*OPENCV_ROWS, 13, 31])
def test_gaussian_is_opencv_s(size: int) -> None:
    if size in OPENCV_ROWS:
        row = np.array(OPENCV_ROWS[size]) / 256
    else:
        row = pytest.importorskip("cv2").getGaussianKernel(size, 0).ravel()
    assert np.allclose(filters.gaussian(size), np.outer(row, row), rtol=1e-7, atol=1e-9)


def test_gaussian_of_even_size_is_the_bell() -> None:
    # OpenCV takes odd sizes
    row = np.exp(-(np.array([-1.5, -0.5, 0.5, 1.5]) ** 2) / (2 * 0.95**2))
    assert np.allclose(filters.gaussian(4), np.outer(row, row) / row.sum() ** 2, rtol=1e-6)


@pytest.mark.parametrize("sigma", [1e-200, 5e-324, 1e300, np.float64(2), 3, Fraction(1, 3)])
def test_gaussian_of_any_sigma(sigma: float) -> None:
    odd, even = filters.gaussian(5, sigma), filters.gaussian(4, sigma)
    assert abs(odd.sum() - 1) < 1e-6 and abs(even.sum() - 1) < 1e-6
    if sigma < 1e-100:
        assert odd[2, 2] == 1 and (even[1:3, 1:3] == 0.25).all()
    if sigma > 1e100:
        assert (odd == np.float32(1 / 25)).all() and (even == 1 / 16).all()


@pytest.mark.parametrize(
    "arguments, kind, text",
    [
        ((2.5,), TypeError, "size=2.5 is not an integer"),
        ((True,), TypeError, "size=True is not an integer"),
        ((0,), ValueError, "size=0 is below 1"),
        ((5, np.nan), ValueError, "sigma=nan must be a positive, finite number of pixels"),
        ((5, np.inf), ValueError, "sigma=inf must be"),
        ((5, -1.0), ValueError, "sigma=-1.0 must be"),
        ((5, 0), ValueError, "sigma=0 must be"),
        ((5, 10**400), ValueError, "sigma=1000"),
        ((5, "1.5"), TypeError, "sigma='1.5' is not a number"),
        ((5, (1, 2)), TypeError, "sigma=(1, 2) is not a number"),
    ],
)
def test_gaussian_refuses(arguments: tuple[Any, ...], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        filters.gaussian(*arguments)
    if len(arguments) == 1:
        with pytest.raises(kind, match=re.escape(text)):
            filters.box(*arguments)


def test_words_that_are_none() -> None:
    with pytest.raises(TypeError, match="kernel=3 must be a string"):
        filters.from_words(3)  # type: ignore[arg-type]
