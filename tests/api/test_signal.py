"""leanconv.signal against scipy.signal."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import scipy.signal
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv import signal

DTYPES = ("float32", "float64", "int16", "uint8", "int64", "complex64", "complex128")
NAMES = ("fftconvolve", "oaconvolve", "convolve", "correlate", "convolve2d", "correlate2d")


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    x = rng.standard_normal(shape) * 20
    x = x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x
    return (np.abs(x) if dtype == "uint8" else x).astype(dtype)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, np.ndarray, np.ndarray, dict[str, Any]]:
    name = draw(st.sampled_from(NAMES))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    ndim = 2 if name.endswith("2d") else draw(st.integers(1, 3))
    most = (60, 14, 6)[ndim - 1]
    shape = draw(st.lists(st.integers(1, most), min_size=ndim, max_size=ndim))
    other = draw(st.lists(st.integers(1, most), min_size=ndim, max_size=ndim))
    keywords: dict[str, Any] = {"mode": draw(st.sampled_from(("full", "same", "valid")))}
    if name in ("fftconvolve", "oaconvolve") and draw(st.booleans()):
        axes = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
        other = [
            k if axis in axes else (n if k % 2 else 1) for axis, (n, k) in enumerate(zip(shape, other, strict=True))
        ]
        keywords["axes"] = axes
    if name.endswith("2d"):
        keywords["boundary"] = draw(st.sampled_from(("fill", "wrap", "symm")))
        keywords["fillvalue"] = draw(st.sampled_from((0, 2)))
    x, w = (draw_array(rng, tuple(each), draw(st.sampled_from(DTYPES))) for each in (shape, other))
    return name, x, w, keywords


def same(got: np.ndarray, expected: np.ndarray, *inputs: np.ndarray) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if not expected.size:
        return
    # what roundings are relative to, where terms cancel
    scale = max(1.0, float(np.abs(expected).max()), float(np.prod([np.linalg.norm(each) for each in inputs])))
    unit = 2e-6 if any(each.dtype in (np.float32, np.complex64) for each in inputs) else 1e-12
    np.testing.assert_allclose(got, expected, rtol=0, atol=0 if expected.dtype.kind in "iu" else unit * scale)


@settings(max_examples=300, deadline=None)
@given(calls())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_results_are_scipys(call: tuple[str, np.ndarray, np.ndarray, dict[str, Any]]) -> None:
    name, x, w, keywords = call
    try:
        expected = getattr(scipy.signal, name)(x, w, **keywords)
    except ValueError:
        with pytest.raises(ValueError, match="valid"):
            getattr(signal, name)(x, w, **keywords)
        return
    same(getattr(signal, name)(x, w, **keywords), expected, x, w)


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("taps", [5, 150, 4097])
def test_long_signals(mode: str, taps: int) -> None:
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal(50_000), rng.standard_normal(taps)
    same(signal.oaconvolve(x, w, mode), scipy.signal.oaconvolve(x, w, mode), x, w)
    same(signal.oaconvolve(w, x, mode), scipy.signal.oaconvolve(w, x, mode), x, w)


@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm"])
@pytest.mark.parametrize("mode", ["full", "same"])
def test_large_matrices(mode: str, boundary: str) -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((300, 400)), rng.standard_normal((21, 30))
    same(signal.convolve2d(x, w, mode, boundary), scipy.signal.convolve2d(x, w, mode, boundary), x, w)
    same(signal.correlate2d(x, w, mode, boundary), scipy.signal.correlate2d(x, w, mode, boundary), x, w)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("mode", ["full", "same"])
def test_an_empty_matrix_is_filled(mode: str, shape: tuple[int, int]) -> None:
    """And a sum of nothing is 0, not what lay in memory before."""
    torch = pytest.importorskip("torch")
    x, w = np.zeros(shape), np.arange(1.0, 7.0).reshape(2, 3)
    for function in "convolve2d", "correlate2d":
        ours, theirs = getattr(signal, function), getattr(scipy.signal, function)
        for first, second in ((x, w), (w, x)):
            for fillvalue in 2, 3:
                expected = theirs(first, second, mode, fillvalue=fillvalue)
                np.testing.assert_array_equal(ours(first, second, mode, fillvalue=fillvalue), expected)
                tensors = torch.from_numpy(first), torch.from_numpy(second)
                np.testing.assert_array_equal(ours(*tensors, mode, fillvalue=fillvalue).numpy(), expected)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_may_be_named(name: str) -> None:
    x, w = np.arange(12.0).reshape(3, 4), np.ones((2, 2))
    same(getattr(signal, name)(in2=w, in1=x), getattr(scipy.signal, name)(in2=w, in1=x), x, w)
    with pytest.raises(TypeError, match="'in1'"):
        getattr(signal, name)(in2=w)


def test_integers_are_exact_and_wrap_around() -> None:
    rng = np.random.default_rng(3)
    x, w = rng.integers(-(2**40), 2**40, 3000), rng.integers(-(2**20), 2**20, 40)
    np.testing.assert_array_equal(signal.convolve(x, w), np.convolve(x, w))
    np.testing.assert_array_equal(signal.convolve2d(x[None], w[None]), np.convolve(x, w)[None])
    small = rng.integers(0, 255, 4000).astype(np.uint8)
    same(signal.convolve(small, small), scipy.signal.convolve(small, small, method="direct"), small)


@pytest.mark.parametrize("kinds", [("complex64", "int32"), ("int64", "float16"), ("float64", "float32")], ids=str)
@pytest.mark.parametrize("name", ["convolve", "correlate2d"])
def test_sums_have_the_precision_of_the_result(name: str, kinds: tuple[str, str]) -> None:
    """By one transform: the filter is as large as the array, and narrower than the result."""
    rng = np.random.default_rng(1)
    x, w = (draw_array(rng, (16, 16), kind) for kind in kinds)
    function, expected = getattr(signal, name), getattr(scipy.signal, name)
    wide = [each.astype(np.result_type(each, np.float64)) for each in (x, w)]
    np.testing.assert_allclose(function(x, w), expected(*wide), rtol=0, atol=1e-11 * np.abs(expected(*wide)).max())


def test_a_nan_reaches_its_windows_only() -> None:
    x, w = np.ones(20_000), np.ones(3000)
    x[9000] = np.nan
    assert np.isnan(signal.oaconvolve(x, w)).nonzero()[0].tolist() == list(range(9000, 12_000))


@pytest.mark.parametrize("name", NAMES)
def test_a_second_array_that_requires_a_gradient_is_refused(name: str) -> None:
    torch = pytest.importorskip("torch")
    w = torch.ones(2, 3, requires_grad=True)
    for x in (torch.ones(4, 5), np.ones((4, 5))):
        with pytest.raises(ValueError, match="requires a gradient"):
            getattr(signal, name)(x, w)
    with pytest.raises(ValueError, match="requires a gradient"):
        signal._second(w.detach(), w)  # the way of arrays on a GPU
    with torch.no_grad():
        same(
            getattr(signal, name)(torch.ones(4, 5), w).numpy(), getattr(signal, name)(np.ones((4, 5), "f4"), w.numpy())
        )


@pytest.mark.parametrize("lazy", ["conj", "_neg_view"])
@pytest.mark.parametrize("name", NAMES)
def test_lazy_conjugates_and_signs_are_resolved(name: str, lazy: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    given = [getattr(torch, lazy)(torch.from_numpy(draw_array(rng, size, "complex128"))) for size in ((6, 7), (2, 3))]
    x, w = (each.resolve_conj().resolve_neg().numpy() for each in given)
    same(getattr(signal, name)(*given).numpy(), getattr(scipy.signal, name)(x, w), x, w)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_that_numpy_does_not_have_are_named(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, 3)
    for argument, pair in ("in1", (x.bfloat16(), x)), ("in2", (x, x.bfloat16())):
        with pytest.raises(TypeError, match=f"{argument} has dtype bfloat16.*convert"):
            getattr(signal, name)(*pair)


def test_pytorch_tensors_stay_tensors() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((20, 30)).astype(np.float32), rng.standard_normal((3, 5)).astype(np.float32)
    for name in NAMES:
        got = getattr(signal, name)(torch.from_numpy(x), torch.from_numpy(w))
        assert isinstance(got, torch.Tensor)
        same(got.numpy(), getattr(scipy.signal, name)(x, w), x, w)


@pytest.mark.parametrize("short", [0, 1024])
def test_the_way_of_arrays_on_a_gpu(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By filter2d, or by PyTorch's transforms, on CPU tensors."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(signal, "SHORT", short)
    rng = np.random.default_rng(5)
    for dtype in ("float32", "complex64", "float64", "int32"):
        x, w = draw_array(rng, (9, 12), dtype), draw_array(rng, (3, 4), dtype)
        given = torch.from_numpy(x), torch.from_numpy(w)
        for mode in ("full", "same", "valid"):
            got = signal._convolve(*given, mode, None, x.dtype)
            same(got.numpy(), scipy.signal.convolve(x, w, mode), x, w)
            for boundary in ("fill", "wrap", "symm"):
                for name, flip in (("convolve2d", True), ("correlate2d", False)):
                    got = signal._matrices(name, *given, mode, boundary, 2, flip=flip)
                    same(got.numpy(), getattr(scipy.signal, name)(x, w, mode, boundary, 2), np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("words", "name", "arguments", "keywords"),
    [
        ("mode='all'", "fftconvolve", (np.ones(3), np.ones(2)), {"mode": "all"}),
        ("mode=array", "convolve", (np.ones(3), np.ones(2)), {"mode": np.ones(2)}),
        ("same dimensionality", "oaconvolve", (np.ones(3), np.ones((2, 2))), {}),
        ("cannot be empty", "fftconvolve", (np.ones(3), np.ones(2)), {"axes": []}),
        ("out of range", "fftconvolve", (np.ones(3), np.ones(2)), {"axes": 1}),
        ("unique", "fftconvolve", (np.ones((3, 3)), np.ones((2, 2))), {"axes": (0, 0)}),
        ("incompatible shapes", "fftconvolve", (np.ones((3, 3)), np.ones((2, 2))), {"axes": 0}),
        ("at least as large", "convolve", (np.ones((3, 1)), np.ones((1, 3))), {"mode": "valid"}),
        ("method='slow'", "convolve", (np.ones(3), np.ones(2)), {"method": "slow"}),
        ("2-D arrays", "convolve2d", (np.ones(3), np.ones(2)), {}),
        ("boundary='open'", "correlate2d", (np.ones((3, 3)), np.ones((2, 2))), {"boundary": "open"}),
        ("no elements", "convolve2d", (np.ones((0, 3)), np.ones((2, 2))), {"boundary": "wrap"}),
        (
            "could not cast `fillvalue` directly to the output .*=1j",
            "correlate2d",
            (np.ones((3, 3)), np.ones((2, 2))),
            {"fillvalue": 1j},
        ),
    ],
)
def test_mistakes_are_named(words: str, name: str, arguments: Any, keywords: Any) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(signal, name)(*arguments, **keywords)
    assert signal.fftconvolve(np.zeros(0), np.ones(3)).shape == (0,)


@pytest.mark.parametrize("kind", [bool, np.int16])
@pytest.mark.parametrize("function", ["correlate2d", "convolve2d"])
def test_a_fill_value_has_the_results_type(function: str, kind: Any) -> None:
    """Not that of the first array: 2 is no bool, and 0.5 no integer."""
    random = np.random.default_rng(5)
    x, y = random.integers(0, 2, (3, 4)).astype(kind), random.standard_normal((2, 3))
    got = getattr(signal, function)(x, y, "same", fillvalue=2.5)
    np.testing.assert_allclose(got, getattr(scipy.signal, function)(x.astype(float), y, "same", fillvalue=2.5))


@pytest.mark.parametrize("function", ["correlate2d", "convolve2d"])
@pytest.mark.parametrize(
    ("fillvalue", "dtype", "words"),
    [
        (300, "uint8", "fillvalue=300.*uint8 holds 0 to 255"),
        (-1, "uint8", "fillvalue=-1.*uint8 holds 0 to 255"),
        (np.int64(-200), "int8", "fillvalue=.*-200.*int8 holds -128 to 127"),
        (2.0**63, "int64", "fillvalue=9.2.*int64 holds"),
        (np.nan, "int16", "fillvalue=nan.*int16 holds"),
        (None, "float32", "fillvalue=None; give one number"),
        ([1, 2], "uint8", r"fillvalue=\[1, 2\]; give one number"),
        ([], "float64", r"fillvalue=\[\]; give one number"),
        ("a", "float64", "fillvalue='a'; give one number"),
        pytest.param(10**400, "float32", "fillvalue=10{400} is beyond float32", id="beyond float32"),
        pytest.param(-(10**400), "float64", "fillvalue=-10{400} is beyond float64", id="beyond float64"),
        pytest.param(10**400, "complex128", "fillvalue=10{400} is beyond complex128", id="beyond complex128"),
    ],
)
def test_a_fill_value_is_a_number_of_the_results_type(function: str, fillvalue: Any, dtype: str, words: str) -> None:
    x = np.ones((3, 3), dtype)
    with pytest.raises(ValueError, match=words):
        getattr(signal, function)(x, x, fillvalue=fillvalue)


@pytest.mark.parametrize("fillvalue", [255, 255.5, -0.5, True, np.float32(7), [3]], ids=str)
def test_a_fill_value_may_be_a_fraction_and_of_another_type(fillvalue: Any) -> None:
    x = np.ones((3, 3), np.uint8)
    same(signal.convolve2d(x, x, fillvalue=fillvalue), scipy.signal.convolve2d(x, x, fillvalue=fillvalue), x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_sums_that_leave_the_type_wrap_around(dtype: str) -> None:
    """Sums of up to 2**44 are made in float64, which casts to no type that does not hold them."""
    random, info = np.random.default_rng(7), np.iinfo(dtype)
    low, high = (
        max(info.min, -(2**20)) if info.bits > 32 else info.min,
        min(info.max, 2**20 if info.bits > 32 else info.max),
    )
    for n in (2, 40):
        x, y = random.integers(low, high, n, dtype, True), random.integers(low // 9, high // 9, 3, dtype, True)
        for name in ("convolve", "correlate"):
            got, wanted = getattr(signal, name)(x, y), getattr(scipy.signal, name)(x, y, method="direct")
            assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
        wanted = scipy.signal.convolve2d(x[None], y[None])
        assert np.array_equal(signal.convolve2d(x[None], y[None]), wanted)


def test_a_short_first_array_takes_no_longer_than_a_short_second_one() -> None:
    """The shorter one is the one whose taps are walked: 100,000 took 9 seconds."""
    x, y = np.arange(100000) % 1000 << 30, np.array([2**40, 3, 5])
    begin = time.process_time()
    assert np.array_equal(signal.convolve(y, x), scipy.signal.convolve(y, x, method="direct"))
    assert time.process_time() - begin < 3


def test_numbers_without_axes_and_what_is_no_number() -> None:
    torch = pytest.importorskip("torch")
    assert signal.convolve(torch.tensor(3.0), torch.tensor(4.0)) == 12
    assert signal.convolve(np.array(3), np.array(4)) == 12
    with pytest.raises(TypeError, match="promote to object"):
        signal.convolve(np.array([2**70, 1]), [1, 3])


def test_a_second_array_that_numpy_cannot_read_is_named() -> None:
    torch = pytest.importorskip("torch")
    for second in (torch.ones(3, device="meta"), torch.ones(3).to_sparse()):
        for first in (np.ones(3), torch.ones(3)):
            with pytest.raises(TypeError, match="in2 has no elements that NumPy can read"):
                signal.convolve(first, second)


@pytest.mark.parametrize("name", ["convolve", "correlate", "fftconvolve", "oaconvolve"])
def test_a_number_with_a_number_is_a_number(name: str) -> None:
    for first, second in ((3, 4), (np.float32(3), np.array(4.0)), (2j, 1.0)):
        expected, found = (getattr(module, name)(first, second) for module in (scipy.signal, signal))
        assert type(found) is type(expected) and found == expected
