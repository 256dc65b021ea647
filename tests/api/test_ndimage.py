"""leanconv.ndimage against scipy.ndimage."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leanconv import ndimage
from leanconv.images.borders import BORDERS, SCIPY_NAMES
from leanconv.ndimage import arguments, on_cpu, on_device

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


@pytest.mark.parametrize("axes", [(2, 0), (-1, 1), (1, 0, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("name", ["gaussian_filter", "gaussian_laplace"])
def test_sigmas_belong_to_axes_as_in_scipy(name: str, axes: tuple[int, ...]) -> None:
    """They follow the axes; but not in gaussian_laplace where all axes are named, in any order."""
    x, sigma = np.random.default_rng(5).random((5, 6, 7)), (1.5, 0.5, 1.0)[: len(axes)]
    scipys = getattr(scipy.ndimage, name)
    of = {axis % x.ndim: value for axis, value in zip(axes, sigma, strict=True)}
    ordered = [of[axis] for axis in sorted(of)]
    if len(axes) == x.ndim:
        expected = scipys(x, sigma if name == "gaussian_laplace" else ordered)
    else:
        (other,) = {*range(x.ndim)} - {*of}
        expected = np.stack([scipys(part, ordered) for part in np.moveaxis(x, other, 0)], other)
    same(getattr(ndimage, name)(x, sigma, axes=axes), expected)


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


@pytest.mark.parametrize("output", ["float64", "int64", "bool"])
@pytest.mark.parametrize("mode", ["reflect", "constant", "nearest", "mirror", "wrap"])
def test_weights_may_reach_far_beyond_the_input(mode: str, output: str) -> None:
    """SciPy's `correlate` reads outside the array's memory where it reflects 4 n or more past an axis of n elements."""
    rng, pad = np.random.default_rng(6), cast(Any, BORDERS[SCIPY_NAMES[mode]].numpy)
    shapes = [((n, 3), (taps, 1)) for n in range(1, 9) for taps in range(1, 80, 6)]
    for size, shape in (
        *shapes,
        ((2, 50), (17, 25)),
        ((50, 2), (3, 40)),
        ((2, 6000), (40, 3)),
        ((2, 3, 4), (9, 2, 17)),
    ):
        x, weights = rng.integers(0, 9, size), rng.integers(0, 5, shape)
        for part in (0, 0.5, 1):
            at = [min(int(part * taps), taps - 1) for taps in shape]
            extended = np.pad(x, [(a, taps - 1 - a) for a, taps in zip(at, shape, strict=True)], pad)
            windows = np.lib.stride_tricks.sliding_window_view(extended, shape)
            expected = np.tensordot(windows, weights, x.ndim)
            # SciPy stores a bool as a byte made from the sum
            expected = expected.astype(np.uint8) if output == "bool" else expected
            origin = [a - taps // 2 for a, taps in zip(at, shape, strict=True)]
            same(
                ndimage.correlate(x, weights, output=np.dtype(output), mode=mode, origin=origin),
                expected.astype(output),
            )


@pytest.mark.parametrize("length", [1000, 10_000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int16"])
def test_a_box_of_one_element_takes_any_origin(dtype: str, length: int) -> None:
    x = np.random.default_rng(6).integers(0, 99, (4, length // 4)).astype(dtype)
    for size, origin in ((1, 1), (1, (-3, 7)), ((1, 3), (5, 1))):
        same(ndimage.uniform_filter(x, size, origin=origin), scipy.ndimage.uniform_filter(x, size, origin=origin))
    with pytest.raises(ValueError, match="origin=2 lies outside"):
        ndimage.uniform_filter(x, (1, 3), origin=(5, 2))


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
        (
            ValueError,
            "length equal to input rank, here 2: origin=",
            (np.ones((4, 4)), np.ones((3, 3))),
            {"origin": [0, 0, 0]},
        ),
        (ValueError, r"weights.ndim \(1\) must match len\(axes\) \(2\)", (np.ones((4, 4)), np.ones(3)), {}),
        (ValueError, "must not be empty", (np.ones((4, 4)), np.ones((0, 3))), {}),
        (ValueError, r"shape \(4, 3\).*\(4, 4\)", (np.ones((4, 4)), np.ones((3, 3)), np.ones((4, 3))), {}),
        (ValueError, "out of range", (np.ones((4, 4)), np.ones(3)), {"axes": 2}),
        (ValueError, "unique", (np.ones((4, 4)), np.ones((3, 3))), {"axes": (1, -1)}),
        (TypeError, "float16", (np.ones((4, 4), np.float16), np.ones((3, 3))), {}),
        (RuntimeError, "longdouble|float128", (np.ones((4, 4)), np.ones((3, 3)), np.longdouble), {}),
        (RuntimeError, "not complex", (np.ones((4, 4), complex), np.ones((3, 3)), "float64"), {}),
        (TypeError, "cval=1j is not a number .* input is real", (np.ones((4, 4)), np.ones((3, 3)) * 1j), {"cval": 1j}),
        (RuntimeError, "one mode for all axes", (np.ones((4, 4)), np.ones((3, 3))), {"mode": ["wrap", "wrap"]}),
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


def test_pytorch_tensors_on_the_cpu_are_computed_as_numpys() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    for dtype in ("float64", "uint8", "int64", "complex64"):
        x = (rng.random((3, 9, 8)) * 100).astype(dtype)
        got = ndimage.gaussian_filter(torch.from_numpy(x), 1.5, axes=(1, 2))
        assert isinstance(got, torch.Tensor)
        same(got.numpy(), ndimage.gaussian_filter(x, 1.5, axes=(1, 2)))
        assert (
            ndimage.sobel(torch.from_numpy(x), output=torch.float64 if dtype != "complex64" else None).shape == x.shape
        )
    out = torch.zeros(6, 5).T
    assert ndimage.laplace(torch.ones(5, 6), out) is out
    with pytest.raises(ValueError, match="grad"):
        ndimage.laplace(torch.ones(5, 6, requires_grad=True))


@pytest.mark.parametrize("mode", SCIPY_NAMES)
def test_the_way_of_arrays_on_a_gpu(mode: str) -> None:
    """By filter2d over moved axes, on PyTorch's CPU tensors."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(9)
    x = rng.random((4, 7, 5)).astype(np.float32)
    border = SCIPY_NAMES[mode]
    for shape in ((3, 1, 1), (1, 2, 1), (1, 1, 3), (3, 1, 2), (2, 3, 4), (1, 3, 2)):
        taps, anchor = rng.standard_normal(shape), tuple(size // 2 for size in shape)
        out = torch.zeros(x.shape)
        on_device.correlate(torch.from_numpy(x), taps, anchor, border, 1.5, out)
        expected = scipy.ndimage.correlate(x, taps, mode=mode, cval=1.5)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
    for axis in range(3):
        on_device.passes(torch.from_numpy(x), [on_device.Pass(np.array([1.0, 2, 3]), axis, 1, border)], 1.5, out)
        expected = scipy.ndimage.correlate1d(x, [1, 2, 3], axis, mode=mode, cval=1.5)
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
    whole = rng.integers(0, 200, (6, 7)).astype(np.uint8)
    out = torch.zeros((6, 7), dtype=torch.uint8)
    on_device.correlate(torch.from_numpy(whole), np.full((3, 3), 0.11), (1, 1), border, 3, out)
    np.testing.assert_array_equal(out.numpy(), scipy.ndimage.correlate(whole, np.full((3, 3), 0.11), mode=mode, cval=3))
    with pytest.raises(TypeError, match="complex64"):
        on_device.correlate(torch.zeros(3, 3, dtype=torch.complex64), np.ones((3, 3)), (1, 1), border, 0, out)
    with pytest.raises(RuntimeError, match="output has shape"):
        arguments.output_for(torch.zeros(3, 3), torch.zeros(3, 4))


@pytest.mark.parametrize("mode", SCIPY_NAMES)
def test_two_passes_are_one_launch(torch_on_device: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(10)
    x, volume = rng.random((40, 50)).astype(np.float32), rng.random((6, 21, 20)).astype(np.float32)
    whole = rng.integers(-1000, 1000, (30, 20)).astype(np.int32)
    both = {"mode": mode, "cval": 2.5}
    # a constant border of derivatives, whose weights do not add up to 1, is seen by each pass
    apart = SCIPY_NAMES[mode] == "constant"
    for name, array, options, launches in (
        ("gaussian_filter", x, {"sigma": 3, **both}, 1),
        ("gaussian_filter", x, {"sigma": (1, 6), "order": (1, 0), **both}, 1 + apart),
        ("gaussian_filter", x, {"sigma": 2, "mode": (mode, "mirror")}, 1 + (mode != "mirror")),
        ("gaussian_filter", volume, {"sigma": 2, **both}, 2),
        ("uniform_filter", x, {"size": (9, 22), "origin": (1, -3), **both}, 1),
        ("uniform_filter", x, {"size": (3, 4), **both}, 1),
        ("sobel", x, {"axis": 0, **both}, 1 + apart),
        ("prewitt", volume, {"axis": 1, "mode": mode}, 2),
        ("sobel", whole, {"mode": mode}, 1),
        ("uniform_filter", whole, {"size": 5, "mode": mode, "cval": 3}, 2),
        ("gaussian_laplace", x, {"sigma": 2, "mode": mode}, 2),
    ):
        torch_on_device.launches.clear()
        got = getattr(ndimage, name)(torch.from_numpy(array), **options)
        assert len(torch_on_device.launches) == launches, (name, options)
        expected = getattr(scipy.ndimage, name)(array, **options)
        assert got.numpy().dtype == expected.dtype
        np.testing.assert_allclose(got.numpy(), expected, rtol=2e-5, atol=2e-6, err_msg=f"{name} {options}")


def test_cupy_arrays_go_to_the_gpu(fake_cupy: Any, host_device: Any) -> None:
    rng = np.random.default_rng(8)
    x, weights = rng.random((12, 40)).astype(np.float32), rng.standard_normal((3, 4))
    got = ndimage.convolve(fake_cupy.asarray(x), weights, mode="mirror", origin=(0, 1))
    assert isinstance(got, fake_cupy.ndarray) and len(host_device.launches) == 1
    expected = scipy.ndimage.convolve(x, weights, mode="mirror", origin=(0, 1))
    np.testing.assert_allclose(got.host, expected, rtol=1e-5, atol=1e-5)


def some_arrays(rng: np.random.Generator, dtype: str) -> np.ndarray:
    x = rng.standard_normal((7, 9, 4)) * 30
    x = x + 1j * rng.standard_normal(x.shape) if dtype.startswith("complex") else x
    return (np.abs(x) if dtype[0] in "ub" else x).astype(dtype)


CALLS: dict[str, tuple[dict[str, Any], ...]] = {
    "correlate1d": ({"weights": [1, 3]}, {"weights": [0.25, 1, 0.25], "axis": 0, "origin": -1}, {"weights": [1j, 2]}),
    "convolve1d": ({"weights": [1, 3]}, {"weights": [-1, 0.5, 1], "axis": 1, "origin": 1}, {"weights": [1j, 2, 4]}),
    "correlate": ({"weights": np.ones((2, 3, 2)) / 7}, {"weights": [[1, 2], [3, 1j]], "axes": (0, 2)}),
    "convolve": ({"weights": np.ones((2, 3, 2)) / 7}, {"weights": [[1, 2], [3, 1j]], "axes": (2, 0), "origin": -1}),
    "gaussian_filter1d": ({"sigma": 1.2}, {"sigma": 2, "order": 1, "axis": 0}, {"sigma": 1, "radius": 3, "order": 3}),
    "gaussian_filter": (
        {"sigma": 1.3}, {"sigma": (1, 0, 2), "order": (0, 1, 2)}, {"sigma": 2, "axes": (1, 2), "truncate": 2},
        {"sigma": (1, 2), "axes": (2, 0), "radius": (3, 1), "order": (1, 0)},
    ),
    "gaussian_laplace": ({"sigma": 1.1}, {"sigma": (1, 2), "axes": (0, 2), "truncate": 3}),
    "gaussian_gradient_magnitude": ({"sigma": 1.1}, {"sigma": 2, "axes": (0, 2), "truncate": 3}),
    "uniform_filter1d": ({"size": 3}, {"size": 4, "axis": 0, "origin": -2}, {"size": 12, "axis": 1}),
    "uniform_filter": ({}, {"size": (1, 4, 2)}, {"size": (3, 4), "axes": (0, 1), "origin": (1, -1)}),
    "sobel": ({}, {"axis": 0}), "prewitt": ({}, {"axis": 1}), "laplace": ({}, {"axes": (2, 0)}),
    "generic_laplace": ({"derivative2": scipy.ndimage.sobel}, {"derivative2": ndimage.prewitt, "axes": 1}),
    "generic_gradient_magnitude": ({"derivative": scipy.ndimage.sobel}, {"derivative": ndimage.prewitt, "axes": 1}),
}  # fmt: skip


@pytest.mark.parametrize("scipys", [True, False], ids=["with SciPy", "without"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "bool", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("name", CALLS)
def test_every_function_is_scipys(name: str, dtype: str, scipys: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not scipys:
        monkeypatch.setattr(on_cpu, "scipys_filters", lambda: None)
    rng = np.random.default_rng(11)
    ours, theirs = getattr(ndimage, name), getattr(scipy.ndimage, name)
    x = some_arrays(rng, dtype)
    for keywords in CALLS[name]:
        for mode in ("reflect", "constant", "wrap", "mirror", "nearest"):
            for more in ({}, {"output": "complex128" if dtype.startswith("complex") else "float64"}):
                arguments = {**keywords, "mode": mode, "cval": 3.0, **more}
                if dtype != "bool" and dtype[0] != "c" and np.iscomplexobj(np.asarray(keywords.get("weights", 0))):
                    arguments.pop("output", None)
                with np.errstate(invalid="ignore"):
                    try:
                        expected = theirs(x, **arguments)
                    except (RuntimeError, TypeError) as error:
                        with pytest.raises((RuntimeError, TypeError)):
                            ours(x, **arguments)
                        assert "complex" in str(error) or dtype == "bool"
                        continue
                    got = ours(x, **arguments)
                assert got.dtype == expected.dtype and got.shape == expected.shape
                if expected.dtype.kind in "biu":
                    np.testing.assert_array_equal(got, expected, f"{arguments}")
                else:
                    # SciPy has float32 between the parts of complex64
                    unit = 2e-6 if dtype == "complex64" or expected.dtype == np.float32 else 1e-13
                    scale = max(100.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
                    np.testing.assert_allclose(got, expected, rtol=unit, atol=unit * scale, err_msg=f"{arguments}")


def test_a_callers_function_may_add_to_a_new_output() -> None:
    def second(x: Any, axis: int, output: Any, mode: str, cval: float) -> Any:
        made = output if isinstance(output, np.ndarray) else np.zeros(x.shape, output)
        made += axis + x
        return made

    x = np.arange(6000.0).reshape(60, 100)
    for _ in range(3):  # in memory that others have used
        np.testing.assert_array_equal(ndimage.generic_laplace(x, second), scipy.ndimage.generic_laplace(x, second))


@pytest.mark.parametrize("side", [5, 150])
@pytest.mark.parametrize("output", [np.complex64, "complex128", "array"])
def test_a_real_result_is_not_stored_as_complex(side: int, output: Any) -> None:
    x = np.zeros((side, side))
    output = x.astype(complex) if output == "array" else output
    for module in (scipy.ndimage, ndimage):
        for function, argument in (
            (module.correlate1d, [1, 2, 1]), (module.correlate, np.ones((3, 3))), (module.gaussian_filter, 1.0),
            (module.uniform_filter, 3), (module.uniform_filter1d, 3), (module.sobel, 0),
        ):  # fmt: skip
            with pytest.raises(RuntimeError):
                function(x, argument, output=output)


@pytest.mark.parametrize("scipys", [True, False])
@pytest.mark.parametrize("dtype", ["int16", "float64"])
def test_means_as_truth_are_scipys(scipys: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SciPy keeps bytes other than 0 and 1 between its passes, so only its own loop makes the second one equal."""
    if not scipys:
        monkeypatch.setattr(on_cpu, "scipys_filters", lambda: None)
    x = np.random.default_rng(0).integers(-300, 300, (11, 23)).astype(dtype)
    for name in ("uniform_filter1d", *(("uniform_filter",) if scipys else ())):
        found, expected = (getattr(module, name)(x, 4, output=bool) for module in (ndimage, scipy.ndimage))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16"])
@pytest.mark.parametrize("mode", ["reflect", "constant", "wrap"])
def test_smooth_integers_are_truncated_as_scipys(dtype: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With areas of one value, whose mean lies next to an integer, and of zero, where both sides are zero."""
    taken: list[int] = []
    usual = on_cpu._truncated
    monkeypatch.setattr(on_cpu, "_truncated", lambda *given: taken.append(0) or usual(*given))
    rng, limits = np.random.default_rng(1), np.iinfo(dtype)
    x = rng.integers(limits.min, limits.max, (220, 310), dtype, endpoint=True)
    x[:70, :100], x[100:, 150:] = limits.max, 0
    for sigma in (2.0, (6.0, 1.5), 20.0):
        for output in (None, np.int32, np.int16):
            expected = scipy.ndimage.gaussian_filter(x, sigma, output=output, mode=mode, cval=7)
            found = ndimage.gaussian_filter(x, sigma, output=output, mode=mode, cval=7)
            np.testing.assert_array_equal(found, expected)
    assert taken


@pytest.mark.parametrize("name", ["sobel", "prewitt", "laplace", "gaussian_filter", "gaussian_laplace"])
@pytest.mark.parametrize("dtype", [np.int16, np.dtype("float32")], ids=str)
def test_a_real_dtype_of_a_complex_result_is_refused_by_filters_of_several_passes(name: str, dtype: Any) -> None:
    x = np.ones((3, 3), complex)
    given = [1.0] if name.startswith("gaussian") else []
    for module in (scipy.ndimage, ndimage):
        with pytest.raises(RuntimeError, match="complex"):
            getattr(module, name)(x, *given, output=dtype)
