"""leanconv.ndimage against scipy.ndimage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leanconv import ndimage
from leanconv.images.borders import SCIPY_NAMES

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "int32", "uint32", "int64", "uint64", "float32", "float64",
)  # fmt: skip
#: whether this SciPy filters along chosen axes (1.16 does)
HAS_AXES = "axes" in (scipy.ndimage.correlate.__kwdefaults__ or {})


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Integers and booleans are equal; floats differ by less than the roundoff of the wider of the two."""
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if expected.dtype.kind in "biu":
        np.testing.assert_array_equal(got, expected)
        return
    scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=1))
    unit = 2.0**-24 if expected.dtype == np.float32 else 2.0**-50
    np.testing.assert_allclose(got, expected, rtol=2 * unit, atol=2 * unit * scale)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, np.ndarray, np.ndarray, dict[str, Any]]:
    """Any call that SciPy accepts, with its origins often at the limits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ndim = draw(st.sampled_from((1, 2, 2, 2, 3)))
    shape = tuple(draw(st.lists(st.integers(1, 11), min_size=ndim, max_size=ndim)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    x = (rng.standard_normal(shape) * 10 if dtype.kind == "f" else rng.integers(0, 120, shape)).astype(dtype)
    axes = None
    if HAS_AXES and draw(st.booleans()):
        axes = tuple(draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True)))
    along = ndim if axes is None else len(axes)
    sizes = draw(st.lists(st.integers(1, 8), min_size=along, max_size=along))
    weights = rng.standard_normal(sizes) if draw(st.booleans()) else rng.integers(0, 5, sizes)
    if draw(st.booleans()):
        weights = weights * (rng.random(sizes) < 0.5)
    if dtype.kind in "bu":  # what an integer cannot hold has no defined value in C
        weights = np.abs(weights)
    origin: Any = draw(st.sampled_from((0, 0, -1, 1)))
    if origin:
        origin = [draw(st.integers(-(n // 2) - 1, (n - 1) // 2 + 1)) for n in sizes]
    keywords = {
        "mode": draw(st.sampled_from(tuple(SCIPY_NAMES))),
        "cval": draw(st.sampled_from((0, 1.5, 7))),
        "origin": origin,
        "output": draw(st.sampled_from((None, None, "float64", np.float32, np.dtype("int32")))),
    }
    if axes is not None:
        keywords["axes"] = axes
    return draw(st.sampled_from(("correlate", "convolve"))), x, weights, keywords


@settings(max_examples=400, deadline=None)
@given(calls())
def test_values_are_scipys(call: tuple[str, np.ndarray, np.ndarray, dict[str, Any]]) -> None:
    name, x, weights, keywords = call
    before = x.copy()
    try:
        expected = getattr(scipy.ndimage, name)(x, weights, **keywords)
    except ValueError:
        with pytest.raises(ValueError, match="origin"):
            getattr(ndimage, name)(x, weights, **keywords)
        return
    assume(expected.dtype.kind != "i" or np.abs(expected.astype(np.float64)).max() < 2**31)
    same(getattr(ndimage, name)(x, weights, **keywords), expected)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("axes", [(0, 2), (2, 0), (-1, 1), (1, 0), (0, 1, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("name", ["correlate", "convolve"])
def test_origins_belong_to_axes_as_in_scipy(name: str, axes: tuple[int, ...]) -> None:
    rng, origin = np.random.default_rng(5), (1, -1, 0)[: len(axes)]
    x, weights = rng.random((5, 6, 7)), rng.random((3, 4, 3)[: len(axes)])
    expected = getattr(scipy.ndimage, name)(x, weights, axes=axes, origin=origin)
    same(getattr(ndimage, name)(x, weights, axes=axes, origin=origin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", SCIPY_NAMES)
def test_images_larger_than_a_strip(mode: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.random((150, 403)) * (1 if dtype == "bool" else 100)).round().astype(dtype)
    for shape in ((3, 3), (4, 7), (9, 1)):
        # Weights of 1/9 and the like: a sum in another order would be truncated to another integer.
        weights = np.full(shape, 1 / (shape[0] * shape[1]))
        same(ndimage.correlate(x, weights, mode=mode), scipy.ndimage.correlate(x, weights, mode=mode))
        same(
            ndimage.convolve(x, weights, np.float64, mode, 2, -1 if shape[1] > 1 else (-1, 0)),
            scipy.ndimage.convolve(x, weights, np.float64, mode, 2, -1 if shape[1] > 1 else (-1, 0)),
        )


@pytest.mark.parametrize("name", ["correlate", "convolve"])
def test_output_arrays_are_filled_and_returned(name: str) -> None:
    ours, scipys = getattr(ndimage, name), getattr(scipy.ndimage, name)
    rng = np.random.default_rng(4)
    x, weights = rng.random((20, 30)).astype(np.float32), rng.standard_normal((4, 3))
    for dtype in ("float32", "float64", "int16"):
        out = np.zeros((20, 60), dtype)[:, ::2]
        assert ours(x * 50, weights, out) is out
        same(out, scipys(x * 50, weights, dtype))
    expected = scipys(x, weights)
    assert ours(x, weights, output=x) is x  # the output is the input
    same(x, expected)


def test_what_numpy_takes_is_taken() -> None:
    assert ndimage.correlate([[1, 2], [3, 4]], [[1, 1]]).tolist() == [[2, 3], [6, 7]]
    assert ndimage.correlate([1.0, 2.0, 4.0], [0, 1]).tolist() == [1.0, 2.0, 4.0]
    x = np.random.default_rng(0).random((9, 8)).astype(">f4")[::-1, ::2]
    same(ndimage.convolve(x, np.ones((3, 2))), scipy.ndimage.convolve(x.astype("=f4"), np.ones((3, 2))))
    assert ndimage.correlate(np.zeros((0, 5)), np.ones((3, 3))).shape == (0, 5)
    assert ndimage.correlate(np.float64(3), np.float64(2)) == 6


def test_special_values_spread_as_in_scipy() -> None:
    x = np.random.default_rng(0).random((40, 41))
    x[7, 8], x[30, 20] = np.inf, np.nan
    weights = np.array([[1, 0, 2], [0, -1, 0], [1e-17, 3, 0.0]])  # SciPy leaves out the tap of 1e-17
    same(ndimage.correlate(x, weights), scipy.ndimage.correlate(x, weights))
    x = np.ones((5, 5))
    with np.errstate(invalid="ignore"):
        expected = scipy.ndimage.correlate(x, weights, mode="constant", cval=np.inf)
    same(ndimage.correlate(x, weights, mode="constant", cval=np.inf), expected)


@pytest.mark.parametrize(
    ("error", "words", "arguments", "keywords"),
    [
        (ValueError, "mode='extend'", ([[1.0]], [[1.0]]), {"mode": "extend"}),
        (ValueError, "origin=2 lies outside", (np.ones((4, 4)), np.ones((3, 3))), {"origin": 2}),
        (ValueError, "origin=.* has 3 numbers", (np.ones((4, 4)), np.ones((3, 3))), {"origin": [0, 0, 0]}),
        (ValueError, "1 dimensions, and 2 axes", (np.ones((4, 4)), np.ones(3)), {}),
        (ValueError, "must not be empty", (np.ones((4, 4)), np.ones((0, 3))), {}),
        (ValueError, r"shape \(4, 3\).*\(4, 4\)", (np.ones((4, 4)), np.ones((3, 3)), np.ones((4, 3))), {}),
        (ValueError, "out of range", (np.ones((4, 4)), np.ones(3)), {"axes": 2}),
        (ValueError, "twice", (np.ones((4, 4)), np.ones((3, 3))), {"axes": (1, -1)}),
        (TypeError, "complex128", (np.ones((4, 4), complex), np.ones((3, 3))), {}),
        (TypeError, "float16", (np.ones((4, 4), np.float16), np.ones((3, 3))), {}),
        (TypeError, "complex64", (np.ones((4, 4)), np.ones((3, 3)), "complex64"), {}),
        (TypeError, "output is a list", (np.ones((4, 4)), np.ones((3, 3)), [[1]]), {}),
    ],
)
def test_mistakes_are_named(error: type[Exception], words: str, arguments: Any, keywords: Any) -> None:
    with pytest.raises(error, match=words):
        ndimage.correlate(*arguments, **keywords)


def test_read_only_outputs_are_refused() -> None:
    out = np.zeros((4, 4))
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        ndimage.correlate(np.ones((4, 4)), np.ones((3, 3)), out)


@pytest.mark.parametrize("mode", SCIPY_NAMES)
@pytest.mark.parametrize("name", ["correlate", "convolve"])
def test_pytorch_tensors_stay_tensors(name: str, mode: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    ours, scipys = getattr(ndimage, name), getattr(scipy.ndimage, name)
    x, weights = rng.random((13, 17)).astype(np.float32), rng.standard_normal((4, 3))
    for keywords in ({}, {"origin": (1, -1)}, {"cval": 2.0}):
        got = ours(torch.from_numpy(x), torch.from_numpy(weights), mode=mode, **keywords)
        assert isinstance(got, torch.Tensor) and got.dtype == torch.float32
        expected = scipys(x, weights, mode=mode, **keywords)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)
    whole = rng.integers(-5, 6, (13, 17)).astype(np.int32)
    taps = rng.integers(-3, 4, (3, 2))
    out = torch.zeros((13, 17), dtype=torch.int32)
    assert ours(torch.from_numpy(whole), taps, out, mode) is out
    # a cval that an int32 image cannot hold harms only where it is used
    same(ours(torch.from_numpy(whole), taps, "i4", mode, cval=0.0 if "constant" in mode else 0.5).numpy(), out.numpy())
    np.testing.assert_array_equal(out.numpy(), scipys(whole, taps, mode=mode))


def test_pytorch_tensors_that_cannot_be_filtered_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="float64"):
        ndimage.correlate(torch.zeros(4, 4, dtype=torch.float64), np.ones((3, 3)))
    with pytest.raises(TypeError, match="two-dimensional"):
        ndimage.correlate(torch.zeros(4), np.ones(3))
    with pytest.raises(TypeError, match="not whole int32"):
        ndimage.correlate(torch.zeros(4, 4, dtype=torch.int32), np.full((3, 3), 0.5))
    with pytest.raises(TypeError, match="must be the input's, float32"):
        ndimage.correlate(torch.zeros(4, 4), np.ones((3, 3)), torch.float16)


def test_cupy_arrays_go_to_the_gpu(fake_cupy: Any, host_device: Any) -> None:
    rng = np.random.default_rng(8)
    x, weights = rng.random((12, 40)).astype(np.float32), rng.standard_normal((3, 4))
    got = ndimage.convolve(fake_cupy.asarray(x), weights, mode="mirror", origin=(0, 1))
    assert isinstance(got, fake_cupy.ndarray) and len(host_device.launches) == 1
    expected = scipy.ndimage.convolve(x, weights, mode="mirror", origin=(0, 1))
    np.testing.assert_allclose(got.host, expected, rtol=1e-5, atol=1e-5)
