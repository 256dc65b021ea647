"""leanconv.dask.filter2d: chunk by chunk what the whole image gives, with its borders at the outer edges only."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.images.borders import BORDERS

da = pytest.importorskip("dask.array")

import dask  # noqa: E402

import leanconv.dask  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def image_of(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 200, shape).astype(dtype)


CHUNKS = [(4, 5), (1, 2), (16, 9), ((2, 9, 1, 4), (3, 6)), (7, 1)]
KERNELS = [((3, 3), None), ((4, 2), (0, 1)), ((2, 5), (1, 0)), ((1, 1), None), ((9, 19), None), ((3, 3), (2, 2))]


@pytest.mark.parametrize("border", [*BORDERS])
@pytest.mark.parametrize("taps", KERNELS, ids=str)
def test_chunks_are_seamless(border: Any, taps: Any, rng: np.random.Generator) -> None:
    """Sums of whole numbers are exact in any order, so they are equal bit for bit."""
    size, anchor = taps
    image, kernel = image_of((16, 9), "float32", rng), rng.integers(-3, 4, size).astype(np.float32)
    options = {"border": border, "anchor": anchor, "value": 7, "delta": 2}
    expected = leanconv.filter2d(image, kernel, **options)
    for chunks in CHUNKS:
        y = leanconv.dask.filter2d(da.from_array(image, chunks), kernel, **options)
        assert isinstance(y, da.Array) and y.shape == image.shape and y.dtype == np.float32
        np.testing.assert_array_equal(y.compute(), expected)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "int32", "float16", "float64"])
def test_every_type(dtype: str, rng: np.random.Generator) -> None:
    image = image_of((2, 12, 11), dtype, rng)
    lazy = da.from_array(image, (1, 5, 4))
    for result in (None, "uint8", "float64"):
        mine = leanconv.dask.filter2d(lazy, [[1, 0, 2], [0, 3, 1]], dtype=result)
        expected = leanconv.filter2d(image, [[1, 0, 2], [0, 3, 1]], dtype=result)
        assert mine.dtype == expected.dtype == mine.compute().dtype
        np.testing.assert_array_equal(mine.compute(), expected)


@pytest.mark.parametrize(
    ("last", "several", "mode"), [*itertools.product([False, True], [False, True], ["same", "valid"])]
)
def test_every_form(last: bool, several: bool, mode: Any, rng: np.random.Generator) -> None:
    image = image_of((2, 9, 8, 3) if last else (2, 9, 8), "int16", rng)
    kernel = rng.integers(-2, 3, (2, 3, 4) if several else (3, 4))
    options = {"channels_last": last, "mode": mode}
    y = leanconv.dask.filter2d(da.from_array(image, (1, 4, 3, 2)[: image.ndim]), kernel, **options)
    expected = leanconv.filter2d(image, kernel, **options)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y.compute(), expected)


def test_fractions_agree_up_to_rounding(rng: np.random.Generator) -> None:
    image, kernel = rng.standard_normal((40, 50)), rng.standard_normal((5, 5))
    y = leanconv.dask.filter2d(da.from_array(image, 16), kernel, border="reflect")
    np.testing.assert_allclose(y.compute(), leanconv.filter2d(image, kernel, border="reflect"), rtol=1e-12, atol=1e-12)


def test_nothing_is_computed_before_it_is_asked_for() -> None:
    def refuse(block: Any) -> Any:
        raise AssertionError("it was computed")

    image = da.zeros((10_000, 10_000), chunks=1_000, dtype=np.uint8)
    y = leanconv.dask.filter2d(
        image.map_blocks(refuse, dtype=np.uint8, meta=np.empty((0, 0), np.uint8)), np.ones((3, 3))
    )
    assert y.shape == image.shape and y.chunks == image.chunks
    corner = leanconv.dask.filter2d(image + 1, np.ones((3, 3)), border="constant")[:2, :2]
    assert corner.compute().tolist() == [[4, 6], [6, 9]]


def test_names_of_equal_calls_are_equal() -> None:
    image = da.zeros((10, 10), chunks=5)
    first, second = (leanconv.dask.filter2d(image, np.ones((3, 3))) for _ in range(2))
    assert first.name == second.name != leanconv.dask.filter2d(image, np.zeros((3, 3))).name


def test_what_cannot_be() -> None:
    image = da.zeros((10, 10), chunks=5, dtype=np.uint8)
    call = leanconv.dask.filter2d
    with pytest.raises(TypeError, match="image is of type ndarray; leanconv.dask takes arrays of dask"):
        call(np.zeros((3, 3)), [[1]])
    with pytest.raises(TypeError, match="kernel is an array of dask"):
        call(image, image)
    with pytest.raises(ValueError, match="kernel is a list whose rows are not alike"):
        call(image, [[1], [1, 2]])
    with pytest.raises(ValueError, match="give it known chunks"):
        call(image[image[:, 0] > 0], [[1]])
    with pytest.raises(ValueError, match="value=256 is no uint8"):
        call(image, [[1]], value=256)
    with pytest.raises(TypeError, match="image has dtype complex64"):
        call(image.astype(np.complex64), [[1]])
    with pytest.raises(ValueError, match="device='gpu' is not known"):
        call(image, [[1]], device="gpu")
    with pytest.raises(ValueError, match="channels_last=True filters it as a picture of 3 channels"):
        call(da.zeros((10, 10, 3)), [[1]])
    with pytest.raises(ValueError, match="an 11x11 kernel|a 11x11 kernel"):
        call(image, np.ones((11, 11)), mode="valid")


def test_without_dask_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("leanconv.dask", "dask", "dask.array"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "dask", None)
    with pytest.raises(ImportError, match=r"pip install 'leanconv\[dask\]'"):
        import leanconv.dask as _  # noqa: F401


def test_bfloat16_in_a_new_process() -> None:
    """Where nothing has taught NumPy the type yet."""
    pytest.importorskip("ml_dtypes")
    words = (
        "import dask.array, leanconv.dask; image = dask.array.ones((5, 6), dtype='float32');"
        "y = leanconv.dask.filter2d(image, [[1, 2]], dtype='bfloat16').compute(); print(y.dtype, (y == 3).all())"
    )
    told = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert told.stdout.split() == ["bfloat16", "True"], told.stderr
