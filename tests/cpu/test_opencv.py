"""OpenCV's routines are taken where their results are what this library promises: here they are compared with exact
ones, for every border, type, size and anchor that `why_not` leaves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

import leanconv
from leanconv.cpu import boxes, lines, opencv
from leanconv.cpu.opencv import MEANS, OpenCv
from leanconv.dtypes import filter_sum, is_integer
from leanconv.images.borders import BORDERS
from leanconv.problem import FilterProblem

cv2 = pytest.importorskip("cv2")

#: images of few pixels and of several strips
SHAPES = ((1, 1), (1, 9), (4, 5), (150, 7))
WINDOWS = ((1, 1), (3, 3), (1, 4), (5, 2), (7, 7), (11, 11), (33, 3))
TYPES = ("uint8", "int8", "uint16", "int16", "int32", "float16", "float32", "float64")
RESULTS = {"uint8": ("uint8", "int16", "float32"), "int16": ("int16", "float64"), "float32": ("float32", "uint8")}


@pytest.fixture(autouse=True, scope="module")
def strips_by_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANCONV_THREADS", "3")
        patch.setattr(lines, "LEAST_WORK", 500)
        yield


def pixels(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        return rng.integers(max(limits.min, -(2**20)), min(limits.max, 2**20), shape, dtype, endpoint=True)
    return (rng.standard_normal(shape) * 9).astype(dtype)


def problems(**fixed: object) -> Iterator[FilterProblem]:
    """Every problem of one kind and border that OpenCV takes, with three anchors."""
    for dtype, (h, w), (kh, kw) in product(TYPES, SHAPES, WINDOWS):
        anchors = {(kh // 2, kw // 2), (0, kw - 1), (kh - 1, 0)}
        for result, anchor, valid in product(RESULTS.get(dtype, (dtype,)), sorted(anchors), (False, True)):
            if valid and (kh > h or kw > w):
                continue
            made = {"out_dtype": result, "sum_dtype": filter_sum(dtype, result, False), "valid": valid, **fixed}
            problem = FilterProblem(1, h, w, kh, kw, anchor, dtype=dtype, **made)  # type: ignore[arg-type]
            if not OpenCv().reasons(problem, None):
                yield problem


def windows(problem: FilterProblem, x: np.ndarray, value: float) -> np.ndarray:
    """The pixels of each window, (h, w, kh, kw[, channels]), in float64."""
    if not problem.valid:
        (ay, ax), numpy = problem.anchor, BORDERS[problem.border].numpy
        sides = (ay, problem.kh - 1 - ay), (ax, problem.kw - 1 - ax), *(((0, 0),) * (x.ndim - 2))
        x = np.pad(x, sides, numpy, **({"constant_values": value} if numpy == "constant" else {}))  # type: ignore[call-overload]
    seen = np.lib.stride_tricks.sliding_window_view(x, (problem.kh, problem.kw), (0, 1)).astype(np.float64)
    return np.moveaxis(seen, 2, -1) if x.ndim == 3 else seen


def check_sums(problem: FilterProblem, y: np.ndarray, exact: np.ndarray, sizes: np.ndarray) -> None:
    """Results are sums with the error of float32 (float64), rounded to the nearest."""
    allowed = (problem.kh * problem.kw + 4) * (2.0**-24 if problem.sums == "float32" else 2.0**-53) * sizes
    if is_integer(problem.result):
        limits = np.iinfo(problem.result)
        exact, allowed = exact.clip(limits.min, limits.max), allowed + 0.5
    elif problem.result == "float16":
        allowed = allowed + 2.0**-11 * np.abs(exact)
    assert (np.abs(y.astype(np.float64) - exact) <= allowed).all(), problem


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("reduction", ["min", "max", "median"])
def test_pixels_of_windows_are_the_same(reduction: str, border: str) -> None:
    rng, count = np.random.default_rng(1), 0
    take = {"min": np.min, "max": np.max, "median": np.median}[reduction]
    for problem in problems(reduction=reduction, border=border):
        x = pixels(rng, problem.x_shape[1:], problem.dtype)
        y = OpenCv().run(problem, x[None], np.ones(1, problem.sums), None, 7)[0]
        expected = take(windows(problem, x, 7), axis=(2, 3))
        assert y.dtype == problem.result and np.array_equal(y, expected), problem
        count += 1
    assert count >= 20


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("mean", [True, False])
def test_sums_of_boxes(border: str, mean: bool) -> None:
    rng, count = np.random.default_rng(2), 0
    for problem in problems(reduction="sum", border=border):
        taps = problem.kh * problem.kw
        x = pixels(rng, problem.x_shape[1:], problem.dtype)
        x = x if is_integer(problem.dtype) else abs(x)
        weight = np.array([1 / taps if mean else 1], problem.sums)
        y = OpenCv().run(problem, x[None], weight, None, 7)[0]
        seen = windows(problem, x, 7) / (taps if mean else 1)
        check_sums(problem, y, seen.sum((2, 3)), np.abs(seen).sum((2, 3)))
        count += 1
    assert count > 100


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sums_of_products(border: str, rank: int) -> None:
    rng, count = np.random.default_rng(3), 0
    for problem in problems(rank=rank, border=border):
        kh, whole = problem.kh, (count // 3) % 3 == 0
        x = pixels(rng, problem.x_shape[1:], problem.dtype)
        w = rng.integers(-9, 10, problem.w_shape) if whole else rng.standard_normal(problem.w_shape)
        if count % 3 == 0:
            w = (abs(w) + 1) / (abs(w) + 1).sum()  # as a blur
        w = w.astype(problem.sums)
        y = OpenCv().run(problem, x[None], w, None, 7, 1.5)[0]
        kernel = w.astype(np.float64)
        if rank:
            kernel = np.einsum("ku,kv->uv", kernel[:, :kh], kernel[:, kh:])
        sizes = np.abs(w.astype(np.float64)) if not rank else np.einsum("ku,kv->uv", abs(w[:, :kh]), abs(w[:, kh:]))
        seen = windows(problem, x, 7)
        check_sums(
            problem, y, np.einsum("hwuv,uv->hw", seen, kernel) + 1.5, np.einsum("hwuv,uv->hw", abs(seen), sizes) + 1.5
        )
        count += 1
    assert count > 150


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("border", ["reflect101", "constant"])
def test_batches_channels_and_several_filters(channels: int, border: str) -> None:
    rng = np.random.default_rng(4)
    x = rng.integers(0, 256, (2, 60, 9, channels), np.uint8)
    problem = FilterProblem(2, 60, 9, 3, 5, (1, 2), border, "uint8", channels=channels, filters=3, per_image=True)
    w = rng.standard_normal((2, 3, 3, 5)).astype(np.float32)
    y = OpenCv().run(problem, x.reshape(problem.x_shape), w, None, 9).reshape(2, 3, 60, 9, channels)
    box = FilterProblem(2, 60, 9, 3, 5, (1, 2), border, "uint8", channels=channels, reduction="max")
    largest = OpenCv().run(box, x.reshape(box.x_shape), np.ones(1, np.float32), None, 9).reshape(x.shape)
    for image, channel in np.ndindex(2, channels):
        seen = windows(problem, x[image, ..., channel], 9)
        assert np.array_equal(largest[image, ..., channel], seen.max((2, 3)))
        for number in range(3):
            exact = np.einsum("hwuv,uv->hw", seen, w[image, number].astype(np.float64))
            sizes = np.einsum("hwuv,uv->hw", seen, np.abs(w[image, number]).astype(np.float64))
            check_sums(problem, y[image, number, ..., channel], exact, sizes)


SIZES = (3, 3), (1, 5), (5, 7), (7, 7), (3, 1), (1, 49), (15, 17), (51, 51)


@pytest.mark.parametrize(
    ("dtype", "size"), [(dtype, size) for dtype, most in MEANS.items() for size in SIZES if size[0] * size[1] <= most]
)
def test_means_that_opencv_rounds_are_the_nearest(dtype: str, size: tuple[int, int]) -> None:
    """Sums next to the middle of two integers: (n ± 1) / 2 more than n times the lower one."""
    (kh, kw), limits = size, np.iinfo(dtype)
    n = kh * kw
    lower = np.unique(np.linspace(limits.min, limits.max - 1, 4000 if n < 50 else 256).astype(np.int64))
    lower = np.concatenate([lower, lower])
    more = np.repeat([(n - 1) // 2, (n + 1) // 2], len(lower) // 2)
    tiles = (lower[:, None] + (np.arange(n) < more[:, None])).reshape(-1, kw).astype(dtype)
    means = cv2.blur(tiles, (kw, kh))[kh // 2 :: kh, kw // 2]
    assert np.array_equal(means, lower + (more > n / 2))


def test_running_sums_are_taken_where_they_are_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    usual = opencv.are_precise
    monkeypatch.setattr(opencv, "are_precise", lambda *given: taken.append(usual(*given)) or taken[-1])
    rng, away = np.random.default_rng(5), np.s_[40:, 40:]
    x = rng.random((90, 80)).astype(np.float32) + np.float32(0.01)
    quiet = leanconv.box_blur(x, 21)
    assert taken and all(taken)
    for number in (1e9, np.inf, np.nan, -1.0):
        taken.clear()
        spoilt = x.copy()
        spoilt[3, 5] = number
        found = leanconv.box_blur(spoilt, 21)
        assert not all(taken)
        np.testing.assert_allclose(found[away], quiet[away], rtol=1e-6)


@pytest.mark.parametrize("size", [3, 41])
def test_no_tap_of_zero_hides_a_nan(size: int) -> None:
    x = np.ones((64, 64), np.float32)
    x[30, 30] = np.inf
    row = np.zeros(size)
    row[[0, -1]] = -1, 1
    y = leanconv.sep_filter2d(x, row, [1.0])
    reach = size // 2
    hit = np.zeros(x.shape, bool)
    hit[30, 30 - reach : 31 + reach] = True
    assert np.array_equal(~np.isfinite(y), hit)


@pytest.mark.parametrize("border", ["reflect101", "replicate", "constant"])
@pytest.mark.parametrize("anchor", [None, (0, 0), (2, 2)])
def test_some_rows_of_results_tell_of_every_pixel(
    border: str, anchor: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns without a zero among their taps, rows with some: an Inf or a NaN anywhere reaches all of its windows."""
    told: list[int] = []
    usual = opencv._telling_rows
    monkeypatch.setattr(opencv, "_telling_rows", lambda *given: told.append(usual(*given)) or told[-1])
    monkeypatch.setenv("LEANCONV_THREADS", "1")
    # of rows of three OpenCV leaves out a zero in the middle
    for column, row in (([1, 2, 1], [-1, 0, 1]), ([0, 1, 3, 2, 0], [-1, 0, 1]), ([1, 2, 2, 1], [1, 0, 0, 2])):
        at = anchor if anchor is None or anchor[1] < len(row) else (1, 1)
        given = {"border": border, "anchor": at}
        for i, j in product(range(9), range(6)):
            x = np.ones((9, 6), np.float32)
            x[i, j] = np.nan if (i + j) % 2 else np.inf
            y = leanconv.sep_filter2d(x, row, column, **given)
            ay, ax = at or (len(column) // 2, len(row) // 2)
            hit = np.zeros((9, 6), np.float32)
            hit[i, j] = 1
            sides = (ay, len(column) - 1 - ay), (ax, len(row) - 1 - ax)
            mode = {"reflect101": "reflect", "replicate": "edge", "constant": "constant"}[border]
            windows = np.lib.stride_tricks.sliding_window_view(np.pad(hit, sides, mode), (len(column), len(row)))
            np.testing.assert_array_equal(~np.isfinite(y), windows.any((2, 3)), err_msg=f"{column} {row} {i} {j}")
    assert max(told) > 1


def test_a_nan_is_the_least_and_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((40, 40), np.float32)
    assert not np.isnan(leanconv.erode(x, 3)).any()
    x[20, 20] = np.nan
    called: list[object] = []
    usual = boxes.Boxes.run
    monkeypatch.setattr(boxes.Boxes, "run", lambda *given: called.append(0) or usual(*given))
    for function in (leanconv.erode, leanconv.dilate):
        assert np.isnan(function(x, 3)).sum() == 9
    assert called


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16"])
@pytest.mark.parametrize("size", [1, 3, 9])
@pytest.mark.parametrize("large", [3e9, -3e9, 1e20])
def test_what_no_int32_holds_saturates(large: float, size: int, dtype: str) -> None:
    image, limits = np.ones((30, 20), dtype), np.iinfo(dtype)
    most = limits.max if large > 0 else limits.min
    line, mixed = np.full(size, abs(large) ** 0.5), np.arange(1.0, size * size + 1).reshape(size, size)
    for result in (
        leanconv.filter2d(image, np.full((size, size), large)),
        leanconv.filter2d(image, mixed * large),
        leanconv.filter2d(image, mixed, delta=large),
        leanconv.sep_filter2d(image, line, line * np.sign(large)),
        leanconv.filter2d(image, [[1, 2, 1]], delta=large),
    ):
        assert (result == most).all()


def test_integers_do_not_wrap_around() -> None:
    x = np.full((40, 40), 255, np.uint8)
    assert (leanconv.sep_filter2d(x, [1, 4000, 1], [1, 4000, 1], dtype="int16") == 2**15 - 1).all()


def test_weights_that_change_in_place_are_seen() -> None:
    x, w = np.ones((40, 40), np.float32), np.ones((3, 3), np.float32)
    assert leanconv.filter2d(x, w)[9, 9] == 9
    w[1, 1] = 3
    assert leanconv.filter2d(x, w)[9, 9] == 11


@pytest.mark.parametrize("size", [(46341, 46341), (65536, 65536), (65537, 65537), (2**20, 5000)])
@pytest.mark.parametrize("number", [12, -12])
def test_means_of_more_pixels_than_int32_counts(number: int, size: tuple[int, int]) -> None:
    x = np.full((5, 5), number, np.float32)
    np.testing.assert_allclose(leanconv.box_blur(x, size), x, rtol=1e-6)


#: A column and a row, of sums of pairs, differences, weights of zero, and one weight.
LINES = (
    ([0.25, 0.5, 0.25], [0.25, 0.5, 0.25]),
    ([1], [0.25, 0.5, 0.25]),
    ([0.25, 0.5, 0.25], [1]),
    ([-0.25, 0.5, -0.25], [0.25, 0, -0.25]),
    ([0.25, 0, 0, 0, 0.25], [0.125, 0.25, 0, 0.25, 0.125]),
    ([0.25, 0.5, 0.25], [0, 0, 0]),
    ([1], [0, 1, 0]),
)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(9, 7), (70, 60)], ids=["small", "strips"])
@pytest.mark.parametrize("lines_of", LINES, ids=str)
def test_sums_of_pairs_do_not_leave_the_type(
    lines_of: tuple[list[float], list[float]], shape: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCV adds pixels before it multiplies them. The second and third call go straight to its routine."""
    rng, (column, row) = np.random.default_rng(6), lines_of
    top = float(np.finfo(dtype).max)
    small = rng.standard_normal(shape).astype(dtype)
    rows = small.copy()
    rows[3:6:2] = 0.9 * top
    monkeypatch.setenv("LEANCONV_THREADS", "1" if shape == (9, 7) else "3")
    for x in (small, (np.sign(small) * 0.9 * top).astype(dtype), rows, small):
        y = leanconv.sep_filter2d(x, row, column, border="replicate")
        sides = tuple((len(line) // 2, len(line) // 2) for line in lines_of)
        wide = np.pad(x.astype(np.longdouble), sides, "edge")
        seen = np.lib.stride_tricks.sliding_window_view(wide, (len(column), len(row)))
        made = seen * np.multiply.outer(column, row)
        allowed = 16 * np.finfo(dtype).eps * abs(made).sum((2, 3))
        assert (abs(y - made.sum((2, 3))) <= allowed).all()


def test_several_products_do_not_leave_the_type() -> None:
    x = np.full((40, 30), 1.8e38, np.float32)
    for number in (1, -1):
        np.testing.assert_allclose(leanconv.unsharp_mask(number * x, 1.0, amount=0.5), number * x, rtol=1e-6)


def test_means_of_boxes_whose_sum_leaves_the_type() -> None:
    x = np.full((40, 30), 3e38, np.float32)
    assert (leanconv.box_blur(x, 9) == np.inf).all() and (leanconv.box_blur(-x, 9) == -np.inf).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_tap_of_zero_hides_the_border(value: float) -> None:
    x = np.ones((6, 6), np.float32)
    for y in (
        leanconv.filter2d(x, [[0, 1, 2]], border="constant", value=value),
        leanconv.sep_filter2d(x, [0, 1, 2], [1], border="constant", value=value),
    ):
        assert np.isnan(y[:, 0]).all() and (y[:, 1:5] == 3).all() and not np.isfinite(y[:, 5]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.finfo(np.float64).max])
def test_the_border_is_the_least_or_the_largest(value: float) -> None:
    x = np.arange(16.0).reshape(4, 4)
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(x, 1, constant_values=value), (3, 3))
    for function, take in ((leanconv.erode, np.min), (leanconv.dilate, np.max)):
        np.testing.assert_array_equal(function(x, 3, border="constant", value=value), take(seen, (2, 3)))
