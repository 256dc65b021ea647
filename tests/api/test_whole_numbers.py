"""Sums of integers in float64: with a kernel of integers they are exact, taken whole or as a product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv import explain, filter2d, filter3d
from leanconv.images import separable
from tests.messages import says
from tests.stand_ins import Other

IMAGE = np.arange(900, dtype=np.int32).reshape(30, 30) % 97
LINE = np.arange(15)
BINOMIAL = np.array([1, 12, 66, 220, 495, 792, 924, 792, 495, 220, 66, 12, 1])
KERNELS = {
    1: np.multiply.outer(BINOMIAL, BINOMIAL),
    2: np.add.outer(LINE, LINE),
    3: np.add.outer(LINE**2, LINE**2) + np.multiply.outer(LINE, LINE),
}


def sums(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Of all windows inside the image, in int64."""
    windows = np.lib.stride_tricks.sliding_window_view(image.astype(np.int64), kernel.shape)
    return np.tensordot(windows, kernel.astype(np.int64), kernel.ndim)


@pytest.mark.parametrize("rank", KERNELS)
@pytest.mark.parametrize(("dtype", "result"), [("int32", "float64"), ("uint8", "float64"), ("int16", "int32")])
def test_sums_of_integers_are_exact(dtype: Any, result: Any, rank: int) -> None:
    image, kernel = IMAGE.astype(dtype), KERNELS[rank]
    for given in (kernel, kernel.tolist()):
        np.testing.assert_array_equal(filter2d(image, given, dtype=result, mode="valid"), sums(image, kernel))
    assert ("rank 1" in str(explain(filter2d, image, kernel, dtype=result).problem)) == (rank == 1)


@pytest.mark.parametrize("rank", KERNELS)
def test_ties_of_integers_are_exact(rank: int) -> None:
    image = IMAGE % 2
    kernel = KERNELS[rank] if rank > 1 else KERNELS[1] // 924 + 1
    expected = np.rint(sums(image, kernel) + 0.5).clip(-(2**15), 2**15 - 1).astype(np.int16)
    np.testing.assert_array_equal(filter2d(image, kernel, dtype="int16", delta=0.5, mode="valid"), expected)


@pytest.mark.parametrize("rank", KERNELS)
def test_sums_of_volumes_are_exact(rank: int) -> None:
    kernel = np.multiply.outer(np.arange(1, 8), KERNELS[rank])
    volume = np.random.default_rng(rank).integers(-100, 100, (8, 20, 20)).astype(np.int32)
    y = filter3d(volume, kernel, dtype="float64", mode="valid")
    np.testing.assert_array_equal(y, sums(volume, kernel))
    assert ("rank 1" in str(explain(filter3d, volume, kernel, dtype="float64").problem)) == (rank == 1)


def test_products_of_integers_are_exact_or_refused() -> None:
    (found,) = separable.products(KERNELS[1], "float64", exact=True)
    np.testing.assert_array_equal(np.multiply.outer(found[:13], found[13:]), KERNELS[1])
    np.testing.assert_array_equal(separable.products(KERNELS[1], "int32"), [[*BINOMIAL, *BINOMIAL]])
    assert separable.products(KERNELS[2], "float64", exact=True) is None
    with says(ValueError, "separable=True: the 15x15 kernel is not exactly the sum of at most 3 products"):
        filter2d(IMAGE, KERNELS[2], dtype="float64", separable=True)
    # fractions, of the image or of the kernel, may be rounded
    for image, kernel in ((IMAGE.astype(float), KERNELS[2]), (IMAGE, KERNELS[2].astype(float))):
        y = filter2d(image, kernel, dtype="float64", separable=True, mode="valid")
        np.testing.assert_allclose(y, sums(IMAGE, KERNELS[2]), rtol=1e-14)


@pytest.mark.parametrize("shape", [(15, 15), (15, 1)])
def test_what_dlpack_reads_has_the_sums_of_its_type(shape: tuple[int, int]) -> None:
    """Those of int32 wrap around."""
    image, kernel = np.full((30, 30), 2**30, np.int32), np.ones(shape, int)
    expected = sums(image, kernel).astype(np.int32)
    assert expected.min() < 2**31 - 1
    np.testing.assert_array_equal(filter2d(image, kernel, mode="valid"), expected)
    np.testing.assert_array_equal(np.asarray(filter2d(Other(image), kernel, mode="valid")), expected)
    volume = np.stack([image] * 9)
    whole = filter3d(volume, np.ones((9, *shape), int), mode="valid")
    carried = filter3d(Other(volume), np.ones((9, *shape), int), mode="valid")
    np.testing.assert_array_equal(np.asarray(carried), whole)
