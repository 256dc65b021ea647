"""Small images on the CPU, filtered as before: the same numbers, and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.call import lookup

pytest.importorskip("cv2", reason="the short way is OpenCV's routine")

KERNEL = np.array([[1, -2, 1], [0.5, 3, 0.25], [1, 2, 1]])
CALLS: dict[str, Callable[[Any], Any]] = {
    "filter2d": lambda x: leanconv.filter2d(x, KERNEL, border="reflect", delta=1.5),
    "line": lambda x: leanconv.sep_filter2d(x, np.array([1, 2, 1]), np.array([1, 0, -1]), dtype="float32"),
    "gaussian_blur": lambda x: leanconv.gaussian_blur(x, size=5),
    "box_blur": lambda x: leanconv.box_blur(x, 5, border="replicate"),
    "erode": lambda x: leanconv.erode(x, 3),
    "median_blur": lambda x: leanconv.median_blur(x, 3),
    "sobel": lambda x: leanconv.sobel(x, 1, 0, border="constant"),
}


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_as_before_gives_what_the_first_gives(name: str, dtype: str, rng: np.random.Generator) -> None:
    images = [(rng.random((40, 30)) * 250).astype(dtype) for _ in range(2)]
    wanted = []
    for image in images:
        lookup.forget()
        wanted.append(CALLS[name](image))
    CALLS[name](images[0])
    for image, result in zip(images, wanted, strict=True):
        got = CALLS[name](image)
        assert got.dtype == result.dtype and np.array_equal(got, result)
        assert not np.shares_memory(got, CALLS[name](image))
    # other strides, another shape, a NaN
    strange = [images[0][:, ::-1], images[0][:7], images[0].T]
    if dtype == "float32":
        strange.append(np.where(rng.random((40, 30)) < 0.01, np.float32(np.nan), images[0]))
    for image in strange:
        got = CALLS[name](image)
        lookup.forget()
        assert np.array_equal(got, CALLS[name](image), equal_nan=True)


def test_the_short_way_is_taken_and_forgotten(rng: np.random.Generator) -> None:
    lookup.forget()
    image = rng.integers(0, 256, (20, 30), np.uint8)
    leanconv.box_blur(image, 3)
    assert len(lookup.routines) == 1 and not lookup.watched
    leanconv.box_blur(image, 3)
    leanconv.filter2d(np.zeros((300, 300), np.uint8), KERNEL)  # large ones take other time
    leanconv.filter2d(image, KERNEL.tolist())
    assert len(lookup.routines) == 1
    lookup.forget()
    assert not lookup.routines


def test_what_is_equal_and_not_alike_is_told_apart(rng: np.random.Generator) -> None:
    image, kernel = rng.integers(0, 256, (20, 30), np.uint8), np.ones((3, 3))
    leanconv.box_blur(image, 1)
    with pytest.raises(TypeError):
        leanconv.box_blur(image, True)
    leanconv.sobel(image, 1, 0)
    with pytest.raises(TypeError):
        leanconv.sobel(image, 1.5, 0)  # type: ignore[arg-type]
    whole = leanconv.filter2d(image, kernel, dtype="int16")
    kernel[0, 0] = 0  # the caller's array is not kept
    assert not np.array_equal(leanconv.filter2d(image, kernel, dtype="int16"), whole)
    kernel[0, 0] = 1
    assert np.array_equal(leanconv.filter2d(image, kernel, dtype="int16"), whole)
    for border in ("wrap", "constant"):
        assert np.array_equal(
            leanconv.filter2d(image, kernel, border=border, dtype="int16"),
            leanconv.filter2d(image[None], kernel, border=border, dtype="int16")[0],
        )
