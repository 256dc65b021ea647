"""leanconv.ndimage: a cval that is a number, and outputs that nothing is filtered into."""

from __future__ import annotations

import itertools
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import scipy.ndimage

from leanconv import ndimage
from tests.api.test_ndimage import CALLS, some_arrays


@pytest.mark.parametrize(
    "cval", [None, "1", b"1", [1], [[1], [2, 3]], np.ones(1), 1j, 10**400], ids=lambda c: str(c)[:9]
)
@pytest.mark.parametrize("name", CALLS)
def test_a_value_outside_is_a_number(name: str, cval: Any, fake_cupy: Any) -> None:
    """Whatever the size, the dtype, the mode and the library, by its name and by its place."""
    ours, (keywords, *_) = getattr(ndimage, name), CALLS[name]
    for size, dtype in itertools.product((3, 30), ("float64", "int16", "float32", "complex64")):
        x = np.zeros((size, size, size), dtype)
        if dtype == "complex64" and cval == 1j:
            continue
        for mode in ("constant", "reflect"):
            with pytest.raises(TypeError, match="cval=.* is not a number"):
                ours(x, mode=mode, cval=cval, **keywords)
    with pytest.raises(TypeError, match="cval=.* is not a number"):
        ours(fake_cupy.asarray(np.zeros((3, 3, 3), np.float32)), mode="constant", cval=cval, **keywords)
    with pytest.raises(TypeError, match="cval=.* is not a number"):
        ndimage.correlate1d([1.0, 2, 3], [1, 2, 3], 0, None, "constant", cval)


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex128"])
@pytest.mark.parametrize(
    "cval", [2, True, np.array(2), np.array(1.5), np.float16(1.5), Fraction(3, 2), Decimal(2)], ids=str
)
def test_a_value_outside_is_any_number_that_scipy_takes(cval: Any, dtype: str) -> None:
    x = some_arrays(np.random.default_rng(2), dtype)
    for name, (keywords, *_) in CALLS.items():
        for array in (x, np.tile(x, (5, 6, 3))):
            with np.errstate(invalid="ignore"):
                expected = getattr(scipy.ndimage, name)(array, mode="constant", cval=cval, **keywords)
                got = getattr(ndimage, name)(array, mode="constant", cval=cval, **keywords)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)
    torch = pytest.importorskip("torch")
    got = ndimage.correlate1d(torch.from_numpy(x), [1, 2, 3], mode="constant", cval=torch.tensor(1.5))
    np.testing.assert_allclose(got, scipy.ndimage.correlate1d(x, [1, 2, 3], mode="constant", cval=1.5), rtol=1e-5)


@pytest.mark.parametrize("output", [np.float16, "float16", "array"])
def test_what_is_not_filtered_goes_to_any_output(output: Any) -> None:
    x = np.arange(6.0).reshape(2, 3)
    for name, keywords in (
        ("gaussian_filter", {"sigma": 0}), ("gaussian_filter", {"sigma": 1, "axes": ()}),
        ("uniform_filter", {"size": 1}), ("uniform_filter", {"axes": ()}), ("laplace", {"axes": ()}),
    ):  # fmt: skip
        out = np.zeros((2, 3), np.float16) if output == "array" else output
        got = getattr(ndimage, name)(x, output=out, **keywords)
        assert got.dtype == np.float16 and np.array_equal(got, x)
    for name, keywords in (
        ("correlate1d", {"weights": [1, 2]}), ("correlate", {"weights": [[1, 2]]}), ("gaussian_filter", {"sigma": 1}),
        ("uniform_filter1d", {"size": 3}), ("uniform_filter", {}), ("sobel", {}), ("laplace", {}),
    ):  # fmt: skip
        for array in (x, x[:0], np.tile(x, (60, 90))):
            sized = np.zeros(array.shape, np.float16) if output == "array" else output
            with pytest.raises(TypeError, match="output has dtype float16"):
                getattr(ndimage, name)(array, output=sized, **keywords)


@pytest.mark.parametrize("output", [np.dtype("U9"), object], ids=str)
def test_text_and_objects_hold_no_complex_result(output: Any) -> None:
    for name in ("correlate1d", "uniform_filter1d"):
        with pytest.raises(TypeError, match="output has dtype"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(ndimage, name)(np.ones((3, 3), complex), [1, 2] if name[0] == "c" else 2, output=output)
