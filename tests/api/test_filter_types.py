"""filter2d on every element type, on pixels of several channels, on whole windows alone, with kernels of each image:
against OpenCV and SciPy, on the CPU and by way of the GPU's calls."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import ml_dtypes  # noqa: F401 - so that NumPy knows bfloat16
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

import leanconv
from leanconv import FilterProblem, filter2d, filter3d
from leanconv.bench.suites import format_problem, parse_problem
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.dtypes import FILTERS, filter_sum, is_integer
from leanconv.images.borders import BORDERS
from tests.cases import filter_problem
from tests.oracles import oracle_filter
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")
cv2 = pytest.importorskip("cv2")

INTEGERS = [name for name in FILTERS if is_integer(name)]
#: What OpenCV filters, and to which types.
OPENCV = {
    "uint8": ("uint8", "int16", "float32", "float64"),
    "uint16": ("uint16", "float32", "float64"),
    "int16": ("int16", "float32", "float64"),
    "float32": ("float32",),
    "float64": ("float64",),
}
KERNELS = [(1, 1), (3, 3), (2, 4), (5, 2), (1, 7), (9, 6)]


def picture(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """All values of small integers, many of int32, or normally distributed numbers."""
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return rng.standard_normal(shape).astype(dtype)


def weights(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Weights whose sums leave the range of integers now and then."""
    return rng.uniform(-1, 2, shape) * 1.3 / max(1, np.prod(shape[-2:]) ** 0.5)


def near(got: np.ndarray, sums: np.ndarray, what: Any = "") -> None:
    """Each result is the nearest number of its type to a float64 sum, but for what float32 sums are off."""
    dtype, got = got.dtype.name, got.astype(np.float64)
    scale = max(1.0, float(np.abs(sums).max(initial=0)))
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        off = np.abs(got - sums.clip(limits.min, limits.max)).max(initial=0)
        assert off <= 0.5 + 1e-5 * scale, (what, off)
        return
    with np.errstate(over="ignore"):  # what is too large is infinite
        sums = sums.astype(dtype).astype(np.float64)
    roundoff = {"float64": 1e-14, "float32": 4e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(got, sums, rtol=roundoff, atol=4e-6 * scale, err_msg=str(what))


@pytest.mark.parametrize("dtype", OPENCV)
def test_what_opencv_computes(dtype: str, rng: np.random.Generator) -> None:
    """Every border that it has, odd and even kernels, every anchor, one channel and several, every type."""
    borders = [border for border in BORDERS if border != "wrap"]  # cv2.filter2D has none
    for turn, ((kh, kw), border, result) in enumerate(product(KERNELS, borders, OPENCV[dtype])):
        channels = (1, 3, 4, 2, 5)[turn % 5]
        anchor = [(0, 0), (kh - 1, 0), (kh // 2, kw - 1), None][turn % 4]
        image = picture(rng, dtype, 13, 17, channels)
        kernel = weights(rng, kh, kw)
        delta = 0 if is_integer(dtype) and turn % 2 else 3.25
        theirs = cv2.filter2D(
            image, cv2.CV_8U if result == dtype == "uint8" else getattr(cv2, DEPTHS[result]), kernel,
            anchor=(-1, -1) if anchor is None else anchor[::-1], delta=delta, borderType=BORDERS[border].number,
        ).reshape(image.shape)  # fmt: skip
        ours = filter2d(image, kernel, border=border, anchor=anchor, delta=delta, dtype=result, channels_last=True)
        what = (kh, kw, border, result, channels, anchor)
        assert ours.dtype == theirs.dtype == np.dtype(result), what
        if is_integer(result):  # float32 sums of another order: of a tie the other neighbour
            difference = np.abs(ours.astype(np.int64) - theirs)
            assert difference.max() <= 1 and (difference != 0).mean() < 0.01, what
        else:
            scale = max(1.0, float(np.abs(theirs).max()))
            tight = dtype == result == "float64"
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-5, atol=(1e-13 if tight else 3e-6) * scale, err_msg=str(what)
            )


DEPTHS = {"uint8": "CV_8U", "int16": "CV_16S", "uint16": "CV_16U", "float32": "CV_32F", "float64": "CV_64F"}


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16"])
def test_whole_numbers_and_ties_are_opencvs_to_the_last_bit(dtype: str, rng: np.random.Generator) -> None:
    """Sums that float32 holds exactly: halves go to the even number, and what is too large stays at the end."""
    image = picture(rng, dtype, 40, 50)
    if dtype != "uint8":
        image //= 8
    for kernel in (
        [[1, 0], [0, 1]],
        [[0.5, 0, -0.5]],
        [[0.25, 0.5, 0.25]],
        [[-1, -2, -1], [0, 0, 0], [1, 2, 1]],
        [[9]],
    ):
        theirs = cv2.filter2D(image, -1, np.array(kernel, np.float32))
        assert np.array_equal(filter2d(image, kernel), theirs), kernel


@pytest.mark.parametrize("dtype", FILTERS)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_what_scipy_computes(dtype: str, device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    """Every border and type of a result, by float64 sums."""
    for turn, (border, result) in enumerate(product(BORDERS, FILTERS)):
        kh, kw = KERNELS[turn % len(KERNELS)]
        anchor = ((turn * 7) % kh, (turn * 5) % kw)
        image, kernel = picture(rng, dtype, 11, 14), weights(rng, kh, kw)
        origin = anchor[0] - kh // 2, anchor[1] - kw // 2
        sums = ndimage.correlate(
            image.astype(np.float64), kernel, mode=BORDERS[border].scipy[0], cval=3.0, origin=origin
        )  # fmt: skip
        y = filter2d(image, kernel, border=border, value=3, anchor=anchor, dtype=result, delta=-2, device=device)
        assert y.dtype == np.dtype(result)
        near(y, sums - 2, (border, result, kh, kw))


@pytest.mark.parametrize("where", ["cpu", "cuda", "torch", "cupy"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16", "bfloat16", "float64"])
def test_arrays_of_every_kind(where: str, dtype: str, rng: np.random.Generator, fake_cupy: Any) -> None:
    """Pictures, batches of them, several kernels, whole windows; kernels of NumPy and of the image's library."""
    image, kernels = picture(rng, dtype, 2, 9, 12, 3), weights(rng, 2, 3, 4)
    problem = FilterProblem(2, 9, 12, 3, 4, (0, 0), dtype=dtype, filters=2, channels=3, valid=True)  # type: ignore[arg-type]
    taps: list[Any] = [kernels, kernels.tolist()]
    if where == "torch":
        given: Any = torch.from_numpy(image.astype(np.float32)).to(getattr(torch, dtype))
        taps += [torch.from_numpy(kernels), torch.from_numpy(kernels).to(torch.bfloat16)]
    elif where == "cupy":
        given = fake_cupy.asarray(image)
        taps += [fake_cupy.asarray(kernels), fake_cupy.asarray(kernels.astype(np.float16))]
    else:
        given = image
        taps += [kernels.astype(np.float16), kernels[:, ::-1, ::-1][:, ::-1, ::-1]]
    for kernel in taps:
        y = filter2d(given, kernel, channels_last=True, mode="valid", device="cuda" if where == "cuda" else None)
        host = getattr(y, "host", y)
        host = host.float().numpy().astype(dtype) if where == "torch" and dtype == "bfloat16" else np.asarray(host)
        assert host.dtype == np.dtype(dtype) and host.shape == problem.y_shape == (2, 2, 7, 9, 3)
        width = getattr(kernel, "dtype", np.float64)
        exact = np.asarray(kernels).astype(np.float16).astype(np.float64) if "float16" in str(width) else kernels
        if "bfloat16" in str(width):
            exact = np.asarray(kernel.double())
        for f in range(2):
            for c in range(3):
                whole = np.stack([_valid(image[n, ..., c].astype(np.float64), exact[f]) for n in range(2)])
                near(host[:, f, ..., c], whole, (where, dtype, f, c))


def _valid(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(image, kernel.shape)
    return np.einsum("ijuv,uv->ij", windows, kernel)


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    """Any call of filter2d: crops of a batch of images, kernels larger than they are, whole windows alone."""
    size = st.integers(1, 12)
    batch, h, w, kh, kw = (draw(size) for _ in range(5))
    channels = draw(st.sampled_from([0, 1, 2, 3, 4, 6]))
    valid = draw(st.booleans()) and kh <= h and kw <= w
    return {
        "shape": (min(batch, 3), h + draw(size), w + draw(size), *((channels,) * bool(channels))),
        "crop": (slice(None), slice(draw(st.integers(0, 1)), None), slice(draw(st.integers(0, 1)), None)),
        "kernel": (*draw(st.sampled_from([(), (1,), (3,)])), kh, kw),
        "channels_last": channels > 0,
        "mode": "valid" if valid else "same",
        "anchor": (draw(st.integers(-1, kh - 1)), draw(st.integers(-1, kw - 1))),
        "border": draw(st.sampled_from(tuple(BORDERS))),
        "types": draw(st.tuples(st.sampled_from(FILTERS), st.sampled_from([None, *FILTERS]))),
        "per_image": draw(st.booleans()),
    }


@given(call=calls())
@settings(
    max_examples=150, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@pytest.mark.parametrize("device", [None, "cuda"])
def test_drawn_calls(device: Any, host_device: HostDevice, call: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(repr(call)))
    (dtype, result), kernel_shape = call.pop("types"), call.pop("kernel")
    image = picture(rng, dtype, *call.pop("shape"))[call.pop("crop")]
    last = call["channels_last"]
    if call["mode"] == "valid" and (image.shape[1] < kernel_shape[-2] or image.shape[2] < kernel_shape[-1]):
        call["mode"] = "same"
    kernel = weights(rng, *(image.shape[:1] if call["per_image"] else ()), *kernel_shape)
    y = filter2d(image, kernel, value=1, delta=2, dtype=result, device=device, **call)
    kh, kw = kernel_shape[-2:]
    anchor = tuple(size // 2 if at == -1 else at for at, size in zip(call["anchor"], (kh, kw), strict=True))
    problem = FilterProblem(
        *image.shape[:3], kh, kw, anchor, call["border"], per_image=call["per_image"], valid=call["mode"] == "valid",
        channels=image.shape[3] if last else 1,
    )  # fmt: skip
    # one channel is no axis of the definition's images
    x = image[..., 0] if last and problem.channels == 1 else image
    sums = oracle_filter(problem, x, kernel, value=1, delta=2)
    near(y, sums.reshape(y.shape), call)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_kernel_for_each_image(device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    image, kernels = picture(rng, "uint8", 2, 3, 8, 9), weights(rng, 2, 3, 3, 2)
    y = filter2d(image, kernels, per_image=True, device=device)
    for i, j in product(range(2), range(3)):
        assert np.array_equal(y[i, j], filter2d(image[i, j], kernels[i, j]))
    several = weights(rng, 2, 3, 4, 3, 2)
    y = filter2d(image, several, per_image=True, device=device)
    assert y.shape == (2, 3, 4, 8, 9)
    assert np.array_equal(y[1, 2], filter2d(image[1, 2], several[1, 2]))
    # an image alone has no leading axes, so its kernel has none either
    assert np.array_equal(
        filter2d(image[0, 0], kernels[0, 0], per_image=True, device=device), filter2d(image[0, 0], kernels[0, 0])
    )


def test_a_result_of_another_type_goes_where_out_says(rng: np.random.Generator, host_device: HostDevice) -> None:
    image, kernel = picture(rng, "uint8", 7, 8), np.full((3, 3), 0.4)
    for device in (None, "cuda"):
        out = np.empty((7, 8), np.float64)
        assert filter2d(image, kernel, out=out, device=device) is out
        np.testing.assert_allclose(out, filter2d(image.astype(np.float64), kernel))
        narrow = np.empty((7, 16), np.uint16)[:, ::2]
        filter2d(image, kernel, out=narrow, dtype=np.uint16, device=device)
        assert np.array_equal(narrow, np.rint(out).astype(np.uint16))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_int32_is_exact_with_integers_and_rounds_with_fractions(device: Any, host_device: HostDevice) -> None:
    image = np.array([[2**31 - 1, -(2**31), 5, 6]], np.int32)
    assert filter2d(image, [[1, 1]], border="constant", device=device).tolist() == [[2**31 - 1, -1, -(2**31) + 5, 11]]
    assert filter2d(image, [[1.0, 1.0]], border="constant", device=device).tolist() == [
        [2**31 - 1, -1, -(2**31) + 5, 11]
    ]
    if device is None:  # the stand-in does not wrap around
        assert filter2d(image, [[2]], device=device).tolist() == [[-2, 0, 10, 12]]
    assert filter2d(image, [[2.0]], device=device).tolist() == [[2**31 - 1, -(2**31), 10, 12]]
    assert filter2d(image, [[0.5]], device=device).tolist() == [[2**30, -(2**30), 2, 3]]
    assert filter2d(image, [[1]], delta=0.5, dtype="float64", device=device)[0, 0] == 2**31 - 0.5


def test_crops_of_pictures_are_filtered_in_place(
    rng: np.random.Generator, fake_cupy: Any, host_device: HostDevice
) -> None:
    whole, kernel = picture(rng, "uint8", 2, 20, 30, 3), weights(rng, 3, 3)
    given, room = fake_cupy.asarray(whole), fake_cupy.empty((2, 11, 16, 3), np.uint8)
    expected = filter2d(whole[:, 3:13, 5:20], kernel, channels_last=True)
    crop, out = given[:, 3:13, 5:20], room[:, 1:, 1:]
    before = fake_cupy.copies
    assert filter2d(crop, kernel, channels_last=True, out=out) is out
    assert fake_cupy.copies == before and np.array_equal(out.host, expected)
    problem = next(p for p in host_device.problems.values() if isinstance(p, FilterProblem))
    assert (problem.x_pitch, problem.x_step, problem.y_pitch, problem.y_step) == (90, 1800, 48, 528)
    # two channels of three are not side by side: a copy
    y = filter2d(given[..., :2], kernel, channels_last=True)
    assert fake_cupy.copies == before + 1
    assert np.array_equal(y.host, filter2d(whole[..., :2].copy(), kernel, channels_last=True))


@pytest.mark.parametrize("device", [None, "cuda"])
def test_empty_images_and_single_rows(device: Any, rng: np.random.Generator, host_device: HostDevice) -> None:
    kernel = weights(rng, 3, 3)
    for shape in ((0, 4, 5, 3), (2, 0, 5, 3), (2, 4, 0, 3), (2, 4, 5, 0)):
        y = filter2d(np.ones(shape, np.uint8), kernel, channels_last=True, device=device)
        assert y.shape == shape and y.dtype == np.uint8
    for shape in ((1, 40), (40, 1), (1, 1)):
        image = picture(rng, "uint16", *shape)
        sums = ndimage.correlate(image.astype(np.float64), kernel, mode="mirror")
        near(filter2d(image, kernel, device=device), sums)


@pytest.mark.parametrize("algorithm", [a for a in CPU_ALGORITHMS if a.solves == "filter2d"], ids=lambda a: a.name)
def test_every_cpu_algorithm_on_every_type(algorithm: Any, rng: np.random.Generator) -> None:
    for dtype, result in product(FILTERS, FILTERS):
        problem = filter_problem(
            2, 21, 15, 3, 4, dtype=dtype, out_dtype=result, channels=2, filters=2, per_image=True, border="reflect"
        )
        if algorithm.why_not(problem, None):
            continue
        x, w = picture(rng, dtype, *problem.x_shape), weights(rng, *problem.w_shape).astype(problem.sums)
        y = algorithm.run(problem, x, w, delta=1)
        assert y.shape == problem.y_shape and y.dtype == np.dtype(result)
        if problem.sums != "int32":
            near(y, oracle_filter(problem, x, w, delta=1), (dtype, result))


def test_tensors_that_require_a_gradient_are_refused_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        image, kernel = torch.ones(4, 5, dtype=dtype), torch.ones(3, 3, dtype=dtype)
        for pair in ((image.requires_grad_(), kernel), (image.detach(), kernel.requires_grad_())):
            with pytest.raises(ValueError, match="requires a gradient"):
                filter2d(*pair)


def test_not_a_number_becomes_0_in_an_integer() -> None:
    image = np.array([[np.nan, 1, np.inf, -np.inf]], np.float32)
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        assert filter2d(image, [[1]], dtype=dtype).tolist() == [[0, 1, limits.max, limits.min]], dtype


def test_types_of_sums_and_words_of_problems() -> None:
    assert filter_sum("uint8", "uint8") == filter_sum("float16", "int16") == "float32"
    assert filter_sum("int32", "int32") == "int32" and filter_sum("int32", "int32", False) == "float64"
    assert {filter_sum(a, "float64") for a in FILTERS} == {filter_sum("int32", "uint8")} == {"float64"}
    plain = filter_problem(1, 20, 30, 3, 3, dtype="uint8", out_dtype="uint8", sum_dtype="float32")
    assert plain == filter_problem(1, 20, 30, 3, 3, dtype="uint8") and plain.out_dtype is plain.sum_dtype is None
    with pytest.raises(ValueError, match="sum_dtype='float64': from uint8 to uint8 sums are float32"):
        filter_problem(1, 20, 30, 3, 3, dtype="uint8", sum_dtype="float64")
    valid = filter_problem(2, 20, 30, 3, 5, valid=True, border="wrap", channels=3, filters=2, anchor=(2, 1))
    assert (valid.anchor, valid.border, valid.y_shape) == ((0, 0), "constant", (2, 2, 18, 26, 3))
    assert valid.flops == 2 * 15 * 2 * 2 * 18 * 26 * 3 and valid.bytes == 4 * (2 * 20 * 30 * 3 + 2 * 2 * 18 * 26 * 3)
    for text in (
        "filter:1080x1920,3x3,channels3,uint8",
        "filter:1080x1920,3x3,channels3,uint8,int16",
        "filter:50x60,5x4,batch2,filters3,valid,per-image,float64",
        "filter:50x60,5x4,wrap,int32,int32,float64",
        "filter:8x50x60,3x5x4,anchor2x0x1,uint8",
        "filter:8x50x60,1x5x4,valid",
    ):
        assert format_problem(parse_problem(text)) == text
    assert "uint8 to int16 1x1080x1920x3" in str(parse_problem("filter:1080x1920,3x3,channels3,uint8,int16"))
    told = leanconv.explain(valid, device="cuda")
    assert told.chosen == "register_cache" and "3x5 valid" in str(told)
    told = leanconv.explain(filter3d, np.ones((4, 5, 6), np.uint8), np.ones((2, 3, 3)), device="cuda")
    assert told.chosen == "register_cache" and "uint8 1x4x5x6 filter 2x3x3 anchor 1,1,1" in str(told)


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("border", BORDERS)
def test_volumes_as_scipy_filters_them(
    border: str, device: Any, rng: np.random.Generator, host_device: HostDevice
) -> None:
    """Odd and even kernels, deeper than the volume too; several kernels, a batch, whole windows alone, types."""
    for turn, shape in enumerate([(3, 3, 3), (1, 2, 3), (4, 1, 2), (9, 3, 2)]):
        dtype, result = (("float32", None), ("uint8", None), ("int16", "float64"), ("int32", "uint8"))[turn]
        volume, kernel = picture(rng, dtype, 2, 5, 7, 8), weights(rng, *shape)
        anchor = tuple(int(rng.integers(0, size)) for size in shape)
        origin = [at - size // 2 for at, size in zip(anchor, shape, strict=True)]
        sums = np.stack(
            [
                ndimage.correlate(each.astype(np.float64), kernel, mode=BORDERS[border].scipy[0], cval=3, origin=origin)
                for each in volume
            ]
        )
        options: Any = {"border": border, "value": 3, "dtype": result, "device": device}
        y = filter3d(volume, kernel, anchor=anchor, delta=-2, **options)
        assert y.shape == volume.shape and y.dtype == np.dtype(result or dtype)
        near(y, sums - 2, (border, shape, dtype, result))
        both = filter3d(volume, np.stack([kernel, -kernel]), anchor=anchor, **options)
        assert both.shape == (2, 2, 5, 7, 8)
        near(both[:, 1], -sums, (border, shape))
        if shape[0] <= 5:
            whole = filter3d(volume[0], kernel.tolist(), mode="valid", **options)
            assert whole.shape == tuple(n - k + 1 for n, k in zip(volume.shape[1:], shape, strict=True))
            middle = ndimage.correlate(volume[0].astype(np.float64), kernel, mode="wrap")
            inside = tuple(slice(k // 2, k // 2 + n) for k, n in zip(shape, whole.shape, strict=True))
            near(whole, middle[inside], (border, shape))


def test_volumes_of_channels_and_with_kernels_of_their_own(rng: np.random.Generator, host_device: HostDevice) -> None:
    volume, kernels = picture(rng, "float32", 2, 5, 7, 8, 3), weights(rng, 2, 2, 3, 2, 3)
    for device in (None, "cuda"):
        y = filter3d(volume, kernels[0, 0], channels_last=True, device=device)
        assert y.shape == volume.shape
        each = [filter3d(volume[..., c], kernels[0, 0]) for c in range(3)]
        np.testing.assert_allclose(y, np.stack(each, -1), rtol=1e-5, atol=1e-5)
        y = filter3d(volume, kernels, channels_last=True, per_image=True, device=device, border="wrap")
        assert y.shape == (2, 2, 5, 7, 8, 3)
        for n in range(2):
            each = [filter3d(volume[n, ..., c], kernels[n], border="wrap") for c in range(3)]
            np.testing.assert_allclose(y[n], np.stack(each, -1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"with per_image=True it must begin with the volumes' \(2,\)"):
        filter3d(volume, kernels[:1], channels_last=True, per_image=True)
    with pytest.raises(ValueError, match=r"must have 4 dimensions or more \(..., d, h, w, channels\)"):
        filter3d(volume[0, 0], kernels[0, 0], channels_last=True)


@pytest.mark.parametrize("border", BORDERS)
def test_separable_volumes_take_two_passes(border: str, rng: np.random.Generator, torch_on_device: HostDevice) -> None:
    torch = pytest.importorskip("torch")
    line, column, row = (weights(rng, size) for size in (5, 6, 7))
    kernel = np.einsum("t,u,v->tuv", line, column, row)
    for dtype, channels in (("float32", ()), ("uint8", (2,)), ("int32", ())):
        volume = picture(rng, dtype, 2, 9, 12, 11, *channels)
        given = kernel
        if dtype == "int32":  # the stand-in's sums do not wrap around
            volume = volume >> 20
            given = np.einsum("t,u,v->tuv", *(np.arange(-1, size - 1) for size in (5, 6, 7)))
        options: Any = {"border": border, "value": 3, "delta": -2, "anchor": (1, 4, 2), "channels_last": bool(channels)}
        whole = filter3d(volume, given, **options, separable=False)
        torch_on_device.launches.clear()
        y = filter3d(torch.from_numpy(volume), torch.from_numpy(given), **options, separable=True).numpy()
        assert len(torch_on_device.launches) == 2 and y.dtype == whole.dtype
        np.testing.assert_allclose(y.astype(float), whole, rtol=2e-5, atol=1 if dtype == "uint8" else 2e-4)
        out = np.zeros_like(volume)
        assert filter3d(volume, given, **options, out=out) is out
        np.testing.assert_allclose(out.astype(float), whole, rtol=2e-5, atol=1 if dtype == "uint8" else 2e-4)
        valid = {**options, "mode": "valid", "anchor": None, "border": "constant"}
        y = filter3d(torch.from_numpy(volume), torch.from_numpy(given), **valid, separable=True).numpy()
        expected = filter3d(volume, given, **valid, separable=False)
        assert y.shape == expected.shape
        np.testing.assert_allclose(y.astype(float), expected, rtol=2e-5, atol=1 if dtype == "uint8" else 2e-4)
    with pytest.raises(ValueError, match="2x2x2 kernel is no product of a line and a plane"):
        filter3d(volume, [[[1, 0], [0, 0]], [[0, 0], [0, 1]]], separable=True)


@pytest.mark.parametrize("weight", [2**20 + 1, 2**29 + 1, -(2**31), 2**40 + 3, 2**62 + 1])
def test_separable_filters_of_int32_wrap_around(weight: int, rng: np.random.Generator) -> None:
    """The outside of a constant border too, and weights beyond int32 that they are given in."""
    volume, kernel = picture(rng, "int32", 12, 13, 14), np.full((9, 9, 9), weight)
    for value in (2**31 - 1, -(2**31), 12345):
        options: Any = {"border": "constant", "value": value, "delta": 7}
        sums = np.pad(volume.astype(np.int64), 4, constant_values=value)
        for axis in range(3):
            sums = np.lib.stride_tricks.sliding_window_view(sums, 9, axis).sum(-1)
        expected = (sums * weight + 7).astype(np.int32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for separable in (None, True, False):
                assert np.array_equal(filter3d(volume, kernel, separable=separable, **options), expected)
                y = filter2d(volume[0], kernel[0], separable=separable, **options)
                assert np.array_equal(y, filter3d(volume[:1], kernel[:1], separable=False, **options)[0])


def test_volumes_are_refused_as_images_are(fake_cupy: Any) -> None:
    volume, kernel = np.ones((4, 5, 6), np.float32), np.ones((3, 3, 3))
    for arguments, kind, words in (
        ({"volume": volume[0]}, ValueError, "volume has shape .5, 6.; it must have 3 dimensions"),
        ({"volume": volume + 0j}, TypeError, "volume has dtype complex"),
        ({"kernel": kernel[0]}, ValueError, "kernel has 2 dimensions"),
        ({"kernel": kernel[:0]}, ValueError, "must not be empty"),
        ({"volume": [[[1]]], "separable": True}, TypeError, "volume is a list; it must be an array"),
        ({"channels_last": 1}, TypeError, "channels_last=1 is not True or False"),
        ({"anchor": (0, 0)}, ValueError, r"anchor=\(0, 0\) must be None or \(slice, row, column\)"),
        ({"anchor": (3, 0, 0)}, ValueError, "anchor=.3, 0, 0. lies outside the 3x3x3 kernel"),
        ({"anchor": (0, 3, 0)}, ValueError, "lies outside the 3x3 kernel"),
        ({"kernel": np.ones((5, 3, 3)), "mode": "valid"}, ValueError, "5x3x3 kernel does not fit"),
        ({"out": [1]}, TypeError, "out is a list; it must be an array of the inputs' library"),
        ({"out": [1], "separable": True}, TypeError, "out is a list; it must be an array of the inputs' library"),
        (
            {"out": torch.ones(4, 5, 6), "separable": True},
            ValueError,
            "volume is an array of NumPy on the CPU, out one",
        ),
    ):
        with pytest.raises(kind, match=words):
            filter3d(**{"volume": volume, "kernel": kernel, **arguments})
    whole = np.arange(2 * 6 * 8 * 9, dtype=np.float32).reshape(2, 6, 8, 9)
    given, before = fake_cupy.asarray(whole)[:, :, 1:7, 2:8], fake_cupy.copies
    y = filter3d(given, kernel)
    assert fake_cupy.copies == before, "slices lie evenly apart"
    np.testing.assert_allclose(y.host, filter3d(whole[:, :, 1:7, 2:8], kernel), rtol=1e-5)
    assert filter3d(np.ones((2, 0, 5, 6), np.uint8), kernel).shape == (2, 0, 5, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FILTERS)
def test_types_on_a_gpu(dtype: str, rng: np.random.Generator) -> None:
    """As on the CPU but for ties, which sums of another order may turn."""
    for result, channels, size in product(FILTERS, (1, 3, 4, 5), ((3, 3), (4, 7), (31, 32))):
        image, kernel = picture(rng, dtype, 2, 70, 301, channels), weights(rng, *size)
        y = filter2d(image, kernel, channels_last=True, dtype=result, device="cuda", border="reflect")
        sums = filter2d(image.astype(np.float64), kernel, channels_last=True, border="reflect")
        near(y, sums, (result, channels, size))


@pytest.mark.gpu
def test_more_than_65535_tile_rows_and_offsets_beyond_32_bits_on_a_gpu() -> None:
    tall = torch.arange(2**21 + 5, device="cuda").remainder(251).to(torch.uint8)[:, None]
    y = filter2d(tall, [[0.5], [0], [0.5]])
    middle = (tall[:-2].float() + tall[2:].float()) / 2
    assert torch.equal(y[1:-1], middle.round().to(torch.uint8))
    large = torch.zeros((2**16, 2**16), dtype=torch.uint8, device="cuda")
    large[-3:, -300:] = 9
    y = filter2d(large, [[1.0, 1.0, 1.0]], border="constant")
    assert y[-1, -1] == 18 and y[-1, -2] == 27 and int(y[-1, -301]) == 9 and int(y[-4].max()) == 0


def test_a_batch_that_is_empty_may_have_a_kernel_that_is_a_product() -> None:
    empty = leanconv.filter3d(np.zeros((0, 7, 10, 30), np.float32), np.ones((5, 5, 5), np.float32))
    assert (empty.shape, empty.dtype) == ((0, 7, 10, 30), np.float32)
