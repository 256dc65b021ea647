"""gaussian_blur, sobel and the others against OpenCV, which they are named after; separable kernels against float64."""

from __future__ import annotations

import warnings

import cv2
import numpy as np
import pytest
import scipy.ndimage

import leanconv
from leanconv.call import lookup
from leanconv.call.choose import choose
from leanconv.call.explain import explain_problem
from leanconv.cpu import opencv, oracle
from leanconv.images import filters, separable
from leanconv.images.borders import BORDERS
from leanconv.kernels import ALGORITHMS
from leanconv.words import dense_filter
from tests.cases import TARGETS

IMAGES = {
    "float32": np.random.default_rng(0).standard_normal((61, 83)).astype(np.float32),
    "uint8": np.random.default_rng(1).integers(0, 256, (47, 52), np.uint8),
}
EACH = pytest.mark.parametrize("dtype", IMAGES)
CV2_BORDERS = {name: border.number for name, border in BORDERS.items() if name != "wrap"}


def agree(got, expected):
    """Equal but for rounding: one float32 of the largest value, or one step of an integer at a tie."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    off = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    if got.dtype.kind == "f":
        assert off.max() <= 4e-6 * max(1.0, float(np.abs(expected).max()))
    else:
        assert off.max() <= 1 and (off > 0).mean() < 0.02


def blurred(x, sizes, **options):
    """OpenCV's blur in float64, rounded once. Of uint8 its own has weights of 8 bits, and a fifth of it is one off."""
    exact = cv2.GaussianBlur(x.astype(np.float64), sizes, **options)
    if x.dtype.kind == "f":
        return exact.astype(x.dtype)
    assert np.abs(exact - cv2.GaussianBlur(x, sizes, **options)).max() < 1.5
    return np.rint(exact).astype(x.dtype)


@EACH
@pytest.mark.parametrize("border", CV2_BORDERS)
def test_gaussian_blur_is_opencvs(dtype, border):
    x, number = IMAGES[dtype], CV2_BORDERS[border]
    for size, sigma in ((3, None), (5, None), (9, None), (15, None), (11, 2.5), (31, 0.7)):
        expected = blurred(x, (size, size), sigmaX=sigma or 0, borderType=number)
        agree(leanconv.gaussian_blur(x, sigma, size=size, border=border), expected)
    for sigma in (0.6, 1.7, 4.0):
        size = round(sigma * (3 if dtype == "uint8" else 4) * 2 + 1) | 1
        expected = blurred(x, (size, size), sigmaX=sigma, borderType=number)
        agree(leanconv.gaussian_blur(x, sigma, border=border), expected)
        assert np.abs(expected - cv2.GaussianBlur(x, (0, 0), sigma, borderType=number).astype(float)).max() <= 1
    expected = blurred(x, (7, 11), sigmaX=1.5, sigmaY=3, borderType=number)
    agree(leanconv.gaussian_blur(x, (3, 1.5), size=(11, 7), border=border), expected)


@EACH
@pytest.mark.parametrize("border", CV2_BORDERS)
def test_box_blur_is_opencvs(dtype, border):
    x, number = IMAGES[dtype], CV2_BORDERS[border]
    for size in ((1, 1), (3, 3), (4, 7), (25, 19)):
        agree(leanconv.box_blur(x, size, border=border), cv2.blur(x, size[::-1], borderType=number))
    expected = cv2.boxFilter(x, cv2.CV_32F, (9, 20), normalize=False, anchor=(2, 19), borderType=number)
    got = leanconv.box_blur(x, (20, 9), normalize=False, anchor=(19, 2), border=border, dtype="float32")
    agree(got, expected)


@EACH
@pytest.mark.parametrize("border", CV2_BORDERS)
def test_erode_and_dilate_are_opencvs(dtype, border):
    x, number = IMAGES[dtype], CV2_BORDERS[border]
    for rows, columns, anchor in ((1, 1, None), (3, 3, None), (4, 7, None), (25, 19, (24, 0)), (1, 30, None)):
        for ours, theirs in ((leanconv.erode, cv2.erode), (leanconv.dilate, cv2.dilate)):
            at = (-1, -1) if anchor is None else anchor[::-1]
            expected = theirs(x, np.ones((rows, columns), np.uint8), anchor=at, borderType=number, borderValue=7)
            np.testing.assert_array_equal(ours(x, (rows, columns), anchor=anchor, border=border, value=7), expected)


@EACH
def test_median_blur_is_opencvs(dtype):
    x = IMAGES[dtype]
    for size in (3, 5) if dtype == "float32" else (3, 5, 7):
        np.testing.assert_array_equal(leanconv.median_blur(x, size), cv2.medianBlur(x, size))
        expected = scipy.ndimage.median_filter(x, size, mode="reflect")
        np.testing.assert_array_equal(leanconv.median_blur(x, size, border="reflect"), expected)


def test_erode_and_dilate_by_default_end_at_the_edge():
    x = np.random.default_rng(6).integers(-1000, 1000, (30, 40)).astype(np.int32)
    for size in (3, 9):
        whole = scipy.ndimage.minimum_filter(x, size, mode="constant", cval=2**31 - 1)
        np.testing.assert_array_equal(leanconv.erode(x, size), whole)
        whole = scipy.ndimage.maximum_filter(x, size, mode="constant", cval=-(2**31))
        np.testing.assert_array_equal(leanconv.dilate(x, size), whole)


def test_boxes_are_as_precise_as_their_sums():
    """A running sum would keep an error of the large pixel; NaN and Inf reach their boxes and nothing else."""
    x = np.random.default_rng(7).standard_normal((90, 80)).astype(np.float32)
    x[20, 30] = 1e9
    exact = cv2.boxFilter(x.astype(np.float64), -1, (21, 15))
    got = leanconv.box_blur(x, (15, 21))
    away = cv2.dilate((x > 1e8).astype(np.uint8), np.ones((15, 21), np.uint8)) == 0
    assert np.abs(got - exact)[away].max() < 1e-6
    for spoilt in (np.nan, np.inf):
        x[20, 30] = spoilt
        for call in (leanconv.box_blur, leanconv.dilate):
            np.testing.assert_array_equal(np.isfinite(call(x, (15, 21))), away)


@EACH
def test_derivatives_are_opencvs(dtype):
    x = IMAGES[dtype]
    result, depth = ("int16", cv2.CV_16S) if dtype == "uint8" else (None, -1)
    for size in (1, 3, 5, 7):
        for dx, dy in ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2)):
            got = leanconv.sobel(x, dx, dy, size=size, scale=0.5, delta=2, dtype=result)
            agree(got, cv2.Sobel(x, depth, dx, dy, ksize=size, scale=0.5, delta=2))
    for dx, dy in ((1, 0), (0, 1)):
        agree(leanconv.scharr(x, dx, dy, dtype=result), cv2.Scharr(x, depth, dx, dy))
        got = leanconv.prewitt(x.astype(np.float64), dx, dy, border="reflect")
        np.testing.assert_allclose(got, scipy.ndimage.prewitt(x.astype(np.float64), axis=dx), atol=1e-12)
    for size in (1, 3, 5, 7, 11):
        scale = 1.0 if size < 7 else 0.001
        got = leanconv.laplacian(x, size=size, scale=scale, delta=-1, dtype=result)
        agree(got, cv2.Laplacian(x, depth, ksize=size, scale=scale, delta=-1))
    # a derivative of uint8 saturates without a wider type
    agree(leanconv.sobel(IMAGES["uint8"], 1, 0), cv2.Sobel(IMAGES["uint8"], -1, 1, 0))


@EACH
def test_sep_filter2d_is_opencvs(dtype):
    x, rng = IMAGES[dtype], np.random.default_rng(2)
    for nx, ny, anchor in ((3, 5, (-1, -1)), (8, 3, (0, 7)), (17, 12, (11, 4)), (40, 33, (-1, -1))):
        kx, ky = (rng.uniform(-1, 1, n).astype(np.float32) / n for n in (nx, ny))
        expected = cv2.sepFilter2D(x, cv2.CV_32F, kx, ky, anchor=anchor[::-1], delta=3)
        for row, column in ((kx, ky), (kx.tolist(), ky.tolist()), (kx[:, None], ky[None])):
            agree(leanconv.sep_filter2d(x, row, column, anchor=anchor, delta=3, dtype="float32"), expected)


@EACH
def test_unsharp_mask_adds_the_difference(dtype):
    x = IMAGES[dtype]
    blurred = cv2.GaussianBlur(x.astype(np.float64), (0, 0), 2.0) if dtype == "float32" else None
    if blurred is not None:
        agree(leanconv.unsharp_mask(x, 2.0, amount=1.5), (x + 1.5 * (x - blurred)).astype(np.float32))
    blurred = cv2.GaussianBlur(x.astype(np.float64), (3, 3), 0)
    exact = x + 0.5 * (x - blurred)
    expected = exact.astype(np.float32) if dtype == "float32" else np.rint(exact).clip(0, 255).astype(np.uint8)
    agree(leanconv.unsharp_mask(x, size=3, amount=0.5), expected)
    np.testing.assert_array_equal(leanconv.unsharp_mask(x, 3.0, amount=0), x)


def test_pictures_with_channels_last_and_batches():
    picture = np.random.default_rng(3).integers(0, 256, (33, 41, 3), np.uint8)
    agree(leanconv.gaussian_blur(picture, 2.0, channels_last=True), blurred(picture, (13, 13), sigmaX=2.0))
    agree(leanconv.sobel(picture, 0, 1, channels_last=True), cv2.Sobel(picture, -1, 0, 1))
    planes = np.moveaxis(picture, 2, 0)
    got = leanconv.gaussian_blur(planes, 2.0)
    np.testing.assert_array_equal(got, np.moveaxis(leanconv.gaussian_blur(picture, 2.0, channels_last=True), 2, 0))
    with pytest.raises(ValueError, match="channels_last=True"):
        leanconv.gaussian_blur(picture, 2.0)
    out = np.empty_like(picture)
    assert leanconv.box_blur(picture, 5, channels_last=True, out=out) is out
    agree(out, cv2.blur(picture, (5, 5)))


def test_on_a_gpu(host_device):
    """The stand-in computes by the definition; what reaches it is what the kernel would read."""
    x = IMAGES["float32"]
    agree(leanconv.gaussian_blur(x, 2.0, device="cuda"), blurred(x, (17, 17), sigmaX=2.0))
    (problem,) = host_device.problems.values()
    assert (problem.rank, problem.kh, problem.kw, problem.w_shape) == (1, 17, 17, (1, 34))
    agree(leanconv.filter2d(x, filters.gaussian(11), device="cuda"), blurred(x, (11, 11), sigmaX=0))
    agree(leanconv.sobel(x, 1, 0, device="cuda"), cv2.Sobel(x, -1, 1, 0))


def test_valid_is_the_inside():
    x = IMAGES["float32"]
    for size in (3, 21):
        whole = leanconv.gaussian_blur(x, size=size)
        got = leanconv.gaussian_blur(x, size=size, mode="valid")
        np.testing.assert_allclose(got, whole[size // 2 : -(size // 2), size // 2 : -(size // 2)], atol=1e-6)


def test_integers_are_exact():
    x = np.random.default_rng(4).integers(-(2**31), 2**31, (40, 50), np.int32)
    problem = dense_filter(1, 40, 50, 21, 21, "reflect101", "int32")
    column, row = np.arange(1, 22), np.arange(5, 26)
    expected = oracle.filter2d(problem, x, np.multiply.outer(column, row))[0]
    np.testing.assert_array_equal(leanconv.sep_filter2d(x, row, column), expected)
    np.testing.assert_array_equal(leanconv.filter2d(x, np.multiply.outer(column, row)), expected)


KERNELS = {
    "gaussian": filters.gaussian(21),
    "box": filters.box(17),
    "binomial": np.multiply.outer(*[np.convolve([1, 4, 6, 4, 1], np.ones(9))] * 2),
    "difference": filters.gaussian(25, 2.0) - filters.gaussian(25, 4.0),
    "slope": np.multiply.outer(filters.gaussian(19, 2.0)[9], np.arange(-9, 10)),
    "large": filters.gaussian(45, 7.0),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", ["zero-mean", "positive", "wide"])
def test_products_keep_the_error_of_the_whole_kernel(name, kind):
    """The promise of filter2d: four times the error of a plain float32 sum, on data that cancels and that does not."""
    kernel, rng = KERNELS[name].astype(np.float32), np.random.default_rng(5)
    x = rng.uniform(1, 2, (70, 90)) if kind == "positive" else rng.standard_normal((70, 90))
    if kind == "wide":
        x *= np.exp(rng.uniform(-12, 12, x.shape))
    x = x.astype(np.float32)
    problem = dense_filter(1, *x.shape, *kernel.shape)
    assert separable.split(kernel, "float32", None) is not None
    expected = oracle.filter2d(problem, x[None], kernel)[0]
    bound = oracle.filter_error_bound(problem, x[None], kernel)
    assert oracle.relative_error(leanconv.filter2d(x, kernel), expected) <= bound
    assert oracle.relative_error(leanconv.filter2d(x, kernel, separable=True), expected) <= bound


@pytest.mark.parametrize("size", [13, 31, 101])
@pytest.mark.parametrize("rank", [1, 3])
def test_products_of_float64(size, rank):
    """The products' own rounding, and that of the decomposition, are no further products."""
    rng, width = np.random.default_rng(size), size + 2
    lines = [(rng.standard_normal(size), rng.standard_normal(width)) for _ in range(rank)]
    if rank == 1:
        lines = [(filters.gaussian_line(size, size / 6), filters.gaussian_line(width, size / 6))]
    kernel = sum(np.multiply.outer(*each) for each in lines)
    assert len(separable.products(kernel, "float64")) == rank
    x = rng.standard_normal((110, 120))
    found = leanconv.filter2d(x, kernel, separable=True, mode="valid")
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape)[::7, ::9].astype(np.longdouble)
    expected = np.einsum("ijuv,uv->ij", windows, kernel.astype(np.longdouble))
    error = np.linalg.norm((found[::7, ::9] - expected).astype(float)) / np.linalg.norm(expected.astype(float))
    assert error <= 2.0**-53 * kernel.size**0.5
    almost = kernel + 1e-12 * np.abs(kernel).max() * rng.standard_normal(kernel.shape)
    assert separable.products(almost, "float64") is None and separable.products(almost) is not None


def test_products_by_rank():
    assert separable.products(filters.sobel_x()).tolist() == [[2, 4, 2, -0.5, 0, 0.5]]
    for rank, kernel in (
        (1, KERNELS["box"]),
        (2, KERNELS["difference"]),
        (2, filters.sharpen()),
        (3, filters.emboss()),
    ):
        found = separable.products(kernel)
        assert found.dtype == np.float32 and len(found) == rank
        rows = len(kernel)
        made = np.einsum("ku,kv->uv", found[:, :rows].astype(np.float64), found[:, rows:])
        assert np.linalg.norm(made - kernel) <= 2.0**-23 * np.linalg.norm(kernel)
    assert separable.products(np.eye(5)) is None
    assert separable.products(np.full((3, 3), np.nan)) is None
    assert separable.products(np.zeros((3, 4))).tolist() == [[0.0] * 7]
    huge = np.multiply.outer([2.0**100, 3.0 * 2**100], [1.0, 2.0**-60])
    assert len(separable.products(huge, "float64")) == 1
    # of int32 there are exact products or none
    assert separable.products(np.multiply.outer([2, 4, 6], [3, 6, 9]), "int32").tolist() == [[6, 12, 18, 1, 2, 3]]
    assert separable.products(np.array([[1, 0], [0, 1]]), "int32") is None


def test_a_large_kernel_of_many_products_needs_no_decomposition(monkeypatch):
    rng = np.random.default_rng(3)
    few = sum(np.multiply.outer(rng.standard_normal(300), rng.standard_normal(200)) for _ in range(3))
    noisy = few + 1e-9 * rng.standard_normal(few.shape)
    for kernel in (few, few.T, noisy, few * 1e30, few * 1e-30):
        assert len(separable.products(kernel)) == 3
    assert separable.products(few + 1e-5 * rng.standard_normal(few.shape)) is None
    monkeypatch.setattr(np.linalg, "svd", None)  # of 8000x8000 numbers it takes minutes
    for kernel in (rng.standard_normal((300, 200)), np.eye(100), 1e200 * np.eye(90), rng.random((65, 4000))):
        assert separable.products(kernel) is None


def test_large_filters_run_by_transforms(torch_on_device, monkeypatch):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(8).standard_normal((70, 90)).astype(np.float32)
    got = leanconv.gaussian_blur(torch.from_numpy(x), 50.0, border="replicate")
    agree(got.numpy(), blurred(x, (401, 401), sigmaX=50.0, borderType=cv2.BORDER_REPLICATE))
    (launch,) = torch_on_device.launches
    assert launch[1]["workspace"] and launch[1]["prepared"]
    kernel, out = np.random.default_rng(9).standard_normal((35, 40)).astype(np.float32), torch.empty(70, 90)
    assert leanconv.filter2d(torch.from_numpy(x), kernel, delta=1.5, out=out) is out
    expected = cv2.filter2D(x.astype(np.float64), -1, kernel.astype(np.float64), delta=1.5)
    agree(out.numpy(), expected.astype(np.float32))
    np.testing.assert_array_equal(leanconv.filter2d(x, kernel, delta=1.5, device="cuda"), out.numpy())
    assert leanconv.explain(leanconv.filter2d, x, kernel, device="cuda").chosen == "fourier"
    monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", "64KiB")
    with pytest.raises(
        leanconv.NoAlgorithmError, match=r"fourier_tiles: it needs \d+ bytes of .*workspace_limit is 65536"
    ):
        leanconv.filter2d(torch.from_numpy(x), kernel)


def test_what_filters_products_predicts_its_time():
    """One that told no time would never be chosen beside those that do."""
    problem = dense_filter(1, 512, 512, 15, 15, rank=1)
    able = [each for each in ALGORITHMS if not each.reasons(problem, TARGETS[0])]
    times = {each.stem: each.quickest(problem, TARGETS[0])[0] for each in able}
    assert {"separable", "fourier_lines"} <= set(times) and all(np.isfinite(list(times.values()))), times
    for taps, name in ((15, "separable"), (63, "separable_tensor"), (255, "fourier_lines"), (2001, "fourier_lines")):
        large = dense_filter(1, 8192, 8192, taps, taps, rank=1)
        assert choose(large, TARGETS[0]).algorithm.stem == name


@pytest.mark.parametrize("limit", [None, "0", "1MiB"])
def test_transforms_obey_the_limit(monkeypatch, limit):
    """What nothing else filters takes a workspace that nobody has limited; what separable filters is its own."""
    if limit is not None:
        monkeypatch.setenv("LEANCONV_WORKSPACE_LIMIT", limit)
    for taps, able in ((15, True), (2001, limit != "0")):
        problem = dense_filter(1, 512, 512, taps, taps, rank=1)
        found = explain_problem(problem, "cuda:9", "auto", None)
        assert (found.chosen is not None) == able, found
        assert found.workspace_bytes + found.prepared_bytes <= (2**20 if limit == "1MiB" else 2**40)
        assert found.chosen == "separable" or taps > 15


def test_products_overflow_only_where_the_result_does():
    x = np.full((40, 50), 1.6e38, np.float32)
    for kernel in (filters.gaussian(15), filters.box(16), np.multiply.outer(np.full(11, 1e-30), np.full(11, 8e27))):
        got = leanconv.filter2d(x, kernel.astype(np.float32), separable=True)
        np.testing.assert_allclose(got, np.float32(1.6e38 * kernel.sum()), rtol=1e-5)
    assert np.isfinite(leanconv.sep_filter2d(x, [2.0] * 9, [2.0**-9 / 9] * 9)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize(
    ("column", "row"), [([2**40], [2**40, 1]), ([2**31, 1], [2**32]), (np.array([2**64 - 1], "u8"), [1, 2])]
)
def test_products_of_large_integers_are_those_of_the_whole_kernel(column, row, dtype):
    """They wrap around in integers alone."""
    x = np.arange(1, 13).reshape(3, 4).astype(dtype)
    whole = [[int(a) * int(b) for b in row] for a in column]
    if dtype == "int32":
        whole = (np.array(whole, object) & 2**32 - 1).astype(np.int64)
    expected = leanconv.filter2d(x, np.array(whole, np.int64 if dtype == "int32" else np.float64))
    np.testing.assert_allclose(leanconv.sep_filter2d(x, row, column), expected, rtol=1e-6)


def test_separable_switches():
    x = IMAGES["float32"]
    disk = (np.hypot(*np.mgrid[-9:10, -9:10]) < 9).astype(np.float32)
    assert separable.split(disk, "float32", None) is None
    with pytest.raises(ValueError, match="19x19 kernel is not the sum of at most 3 products"):
        leanconv.filter2d(x, disk, separable=True)
    with pytest.raises(TypeError, match="separable='yes'"):
        leanconv.filter2d(x, disk, separable="yes")
    with pytest.raises(ValueError, match=r"kernel has shape \(3,\); it must have \(kh, kw\)"):
        leanconv.filter2d(x, np.ones(3), separable=True)
    names = {
        word: leanconv.explain(leanconv.filter2d, x, filters.gaussian(43), separable=word).chosen
        for word in (None, True, False)
    }
    assert names[None] == names[True] == "opencv" != names[False]
    assert "not given as products" in str(explain_problem(dense_filter(1, 9, 9, 3, 3), None, "auto", None))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: leanconv.gaussian_blur(x), ValueError, "sigma=None and size=None"),
        (lambda x: leanconv.gaussian_blur(x, -1.0), ValueError, "sigma=-1.0 must be a positive"),
        (lambda x: leanconv.gaussian_blur(x, float("nan"), size=3), ValueError, "sigma=nan"),
        (lambda x: leanconv.gaussian_blur(x, (1, 2, 3)), ValueError, "must be a number or two"),
        (lambda x: leanconv.gaussian_blur(x, size=4), ValueError, "size=4 must be odd"),
        (lambda x: leanconv.gaussian_blur(x, np.ones((2, 2))), TypeError, "is not a number"),
        (lambda x: leanconv.gaussian_blur(x, np.ones(3)), ValueError, "must be a number or two"),
        (lambda x: leanconv.gaussian_blur(x, "2"), TypeError, "sigma='2' is not a number"),
        (lambda x: leanconv.box_blur(x, 0), ValueError, "size=0 is below 1"),
        (lambda x: leanconv.box_blur(x, 2.5), TypeError, "size=2.5"),
        (lambda x: leanconv.box_blur(x, (1, 2, 3)), ValueError, "size=.* must be an integer or two: .rows, columns."),
        (lambda x: leanconv.median_blur(x, 4), ValueError, "size=4 is not known; choose one of 3, 5, 7"),
        (lambda x: leanconv.erode(x, (3, -1)), ValueError, "size=-1 is below 1"),
        (lambda x: leanconv.sobel(x, 0, 0), ValueError, "dx=0 and dy=0"),
        (lambda x: leanconv.sobel(x, 3, 0), ValueError, "dx=3 must be below size=3"),
        (lambda x: leanconv.sobel(x, 1, 0, size=2), ValueError, "size=2 must be odd"),
        (lambda x: leanconv.sobel(x, 1, 0, scale=float("inf")), ValueError, "scale=inf"),
        (lambda x: leanconv.scharr(x, 1, 1), ValueError, "dx=1 and dy=1 must be 1 and 0"),
        (lambda x: leanconv.laplacian(x, size=33), ValueError, "size=33 is above 31"),
        (lambda x: leanconv.unsharp_mask(x, 1.0, amount=float("nan")), ValueError, "amount=nan"),
        (lambda x: leanconv.sep_filter2d(x, [], [1]), ValueError, "kernel_x has shape"),
        (lambda x: leanconv.sep_filter2d(x, [1], [[1, 2], [3, 4]]), ValueError, "kernel_y has shape"),
        (lambda x: leanconv.sep_filter2d(x, np.broadcast_to(1.0, 2**40), [1]), ValueError, "kernel_x has .* at most"),
        (
            lambda x: leanconv.sep_filter2d(x, [1, [2]], [1]),
            ValueError,
            "kernel_x is a list whose elements are not alike",
        ),
        (lambda x: leanconv.sep_filter2d(x, [1j], [1]), TypeError, "kernel_x has dtype complex128"),
        (lambda x: leanconv.sep_filter2d(x, [1, 2], [1], anchor=(0, 2)), ValueError, "anchor=.* lies outside"),
    ],
)
def test_mistakes_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call(IMAGES["float32"])


@pytest.mark.parametrize("call", [
    lambda x: leanconv.erode(x, 10**8), lambda x: leanconv.box_blur(x, 2**31 - 1),
    lambda x: leanconv.box_blur(x, (3, 10**8)),
    lambda x: leanconv.gaussian_blur(x, 1e7), lambda x: leanconv.gaussian_blur(x, 1e300),
    lambda x: leanconv.gaussian_blur(x, size=2**31 - 1), lambda x: leanconv.median_blur(x, 10**8),
])  # fmt: skip
def test_windows_of_millions_of_pixels_are_refused_by_name(call):
    with pytest.raises(ValueError, match=r"^(size|sigma)="):
        call(np.ones((8, 8), np.float32))


@pytest.mark.parametrize("call", [
    lambda x: leanconv.filter2d(x, np.full((9, 9), 1e300)), lambda x: leanconv.filter2d(x, [[1e300]]),
    lambda x: leanconv.filter2d(x, [[[1e300]], [[-1e300]]]), lambda x: leanconv.sep_filter2d(x, [1e300], [1]),
    lambda x: leanconv.sep_filter2d(x, [1e200] * 7, [1e200] * 7), lambda x: leanconv.sobel(x, 1, 0, scale=1e300),
    lambda x: leanconv.scharr(x, 1, 0, scale=-1e308), lambda x: leanconv.laplacian(x, scale=1e308),
    lambda x: leanconv.unsharp_mask(x, 1, amount=1.7e308),
    lambda x: leanconv.filter2d(x, [[1e300]], out=np.empty_like(x)),
    lambda x: leanconv.filter2d(x, np.random.default_rng(0).random((9, 9)) * 1e300),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_weights_beyond_float32_give_no_warning(call, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            result = call(np.ones((20, 20), dtype))
        if dtype == "float32":
            assert not np.isfinite(result).any()


@pytest.mark.parametrize("border", ["constant", "replicate", "reflect", "reflect101", "wrap"])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("channels", [2, 3])
def test_medians_are_the_same_without_opencv(border, size, dtype, channels, monkeypatch):
    x = (np.random.default_rng(size).random((300, 23, channels)) * 250).astype(dtype)
    found = leanconv.median_blur(x, size, border=border, value=9, channels_last=True)
    monkeypatch.setattr(opencv, "opencv", lambda: None)
    lookup.forget()
    np.testing.assert_array_equal(found, leanconv.median_blur(x, size, border=border, value=9, channels_last=True))


def test_sigma_may_be_an_array():
    x = IMAGES["float32"]
    for array, same in ((np.array([1.0, 2.0]), (1.0, 2.0)), (np.array(1.5), 1.5), (np.float32(1.5), 1.5)):
        np.testing.assert_array_equal(leanconv.gaussian_blur(x, array), leanconv.gaussian_blur(x, same))


@pytest.mark.gpu
def test_large_filters_are_captured_in_a_graph():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(12)
    kernel = rng.standard_normal((51, 35)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((2, 300, 500)).astype(np.float32)).cuda()
    for call in (lambda x: leanconv.gaussian_blur(x, 60.0), lambda x: leanconv.filter2d(x, kernel, border="wrap")):
        call(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(x)
        x.copy_(torch.from_numpy(rng.standard_normal(x.shape).astype(np.float32)))
        graph.replay()
        assert torch.equal(y, call(x))
        agree(y[0].cpu().numpy(), call(x[0].cpu().numpy()))


def test_an_order_of_sobels_derivative_is_below_its_size_there() -> None:
    image = np.ones((5, 5), np.float32)
    with pytest.raises(ValueError, match="dx=3 must be below size=1, which means 3 along a derivative"):
        leanconv.sobel(image, 3, 0, size=1)
    with pytest.raises(ValueError, match="dy=3 must be below size=3$"):
        leanconv.sobel(image, 0, 3)
    with pytest.raises(TypeError, match="normalize=2 is not True or False"):
        leanconv.box_blur(image, 3, normalize=2)  # type: ignore[arg-type]
