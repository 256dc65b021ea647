"""Arrays out of the ordinary: the right answer, or a clear error."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import ConvProblem, conv2d, explain, filter2d
from leanconv.plan import Launch, Number
from leanconv.runtime import launch
from tests.messages import says
from tests.oracles import oracle_conv, relative_error
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, W = ones(2, 4, 6, 6), ones(8, 4, 3, 3)
IMAGE, KERNEL = ones(6, 7), ones(3, 3)


@pytest.mark.parametrize("device", [None, "cuda"])
def test_out_is_checked(device: Any, host_device: HostDevice) -> None:
    def run(out: Any, **more: Any) -> None:
        conv2d(X, W, padding=1, out=out, device=device, **more)

    with says(ValueError, "out has shape (2, 8, 6, 5)", "(2, 8, 6, 6)"):
        run(ones(2, 8, 6, 5))
    with says(ValueError, "out has dtype float64", "float32"):
        run(ones(2, 8, 6, 6, dtype=np.float64))
    with says(ValueError, "out one of PyTorch"):
        run(torch.ones(2, 8, 6, 6))
    read_only = ones(2, 8, 6, 6)
    read_only.flags.writeable = False
    with says(ValueError, "out is read-only"):
        run(read_only)
    for strides in (0, 144, 24, 4), (1152, 144, 20, 4), (1152, 144, 4, 4):
        with says(ValueError, "out has shape (2, 8, 6, 6)", f"strides {strides} in bytes", "share memory"):
            run(np.lib.stride_tricks.as_strided(ones(2, 8, 6, 6), (2, 8, 6, 6), strides))
    square = ones(8, 8, 3, 3)
    for out, x, w, name in (
        (X, X, ones(4, 4, 3, 3), "x"), (square, ones(8, 8, 3, 3), square, "w"), (X[::-1], X, ones(4, 4, 3, 3), "x")
    ):  # fmt: skip
        before = out.copy()
        with says(ValueError, f"out overlaps {name} in memory"):
            conv2d(x, w, padding=1, out=out, device=device)
        assert (out == before).all()
    with says(ValueError, "out overlaps image"):
        filter2d(IMAGE, KERNEL, out=IMAGE, device=device)
    halves = ones(12, 7)
    filter2d(halves[:6], KERNEL, out=halves[6:], border="wrap", device=device)
    assert (halves[:6] == 1).all() and (halves[6:] == 9).all()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_out_of_pytorch_that_overlaps_itself(where: str, request: pytest.FixtureRequest) -> None:
    if where == "cuda":
        request.getfixturevalue("torch_on_device")
    x, w = torch.ones(2, 4, 6, 6), torch.ones(8, 4, 3, 3)
    for out in (torch.empty(2, 4 * 8 * 4).as_strided((2, 8, 4, 4), (128, 16, 3, 1)), torch.empty(4).expand(2, 8, 4, 4)):
        with says(ValueError, f"strides {tuple(4 * each for each in out.stride())} in bytes", "share memory"):
            conv2d(x, w, out=out)
    with says(ValueError, "out has shape (2, 3)", "(4, 4)"):
        filter2d(torch.ones(2, 3), torch.ones(1, 1), out=torch.empty(6).as_strided((2, 3), (1, 1)))


def test_out_that_overlaps_only_at_a_later_call(fake_cupy: Any) -> None:
    memory = fake_cupy.empty((4, 4, 8, 8), np.float32)
    memory.host[...] = 1
    w = fake_cupy.asarray(ones(4, 4, 3, 3))
    conv2d(memory[:2], w, padding=1, out=memory[2:])
    with says(ValueError, "out overlaps x"):
        conv2d(memory[1:3], w, padding=1, out=memory[2:])


@pytest.mark.parametrize("where", ["cpu", "cuda", "cupy"])
def test_crops_of_one_image_may_be_image_and_out(where: str, fake_cupy: Any) -> None:
    whole = np.arange(6 * 32, dtype=np.float32).reshape(6, 32)
    expected = filter2d(whole[:, :16].copy(), KERNEL)
    for start in (15, 16):
        image, out = whole[:, :16], whole[:, start:][:, :16]
        kernel, device = KERNEL, where
        if where == "cupy":
            image, out, device = fake_cupy.ndarray(image, 0), fake_cupy.ndarray(out, 0), None
            kernel = fake_cupy.asarray(KERNEL)
        if start < 16:
            with says(ValueError, "out overlaps image"):
                filter2d(image, kernel, out=out, device=device)
        else:
            assert filter2d(image, kernel, out=out, device=device) is out
            np.testing.assert_allclose(whole[:, 16:], expected, rtol=1e-6)


def test_arrays_on_different_devices(fake_cupy: Any) -> None:
    x = fake_cupy.asarray(X)
    w = fake_cupy.ndarray(W.copy(), 1)
    with says(ValueError, "x is an array of CuPy on cuda:0", "w one of CuPy on cuda:1"):
        conv2d(x, w)
    with says(ValueError, "x is an array of CuPy on cuda:0", "w one of NumPy on the CPU"):
        conv2d(x, W)
    with says(ValueError, "device='cuda:1'", "cuda:0"):
        conv2d(x, fake_cupy.asarray(W), device="cuda:1")
    there = fake_cupy.ndarray(X.copy(), 1), w
    assert conv2d(*there, device="cuda").data.device_id == conv2d(*there, device="cuda:1").data.device_id == 1
    with says(ValueError, "device='cuda:0'", "cuda:1"):
        conv2d(*there, device="cuda:0")
    with says(ValueError, "device='cpu'", "lie on cuda:0"):
        conv2d(x, fake_cupy.asarray(W), device="cpu")
    with says(ValueError, "device='cuda'", "the CPU"):
        conv2d(torch.ones(2, 4, 6, 6), torch.ones(8, 4, 3, 3), device="cuda")


def test_gradients_and_odd_tensors_of_pytorch() -> None:
    with says(ValueError, "requires a gradient", "torch.no_grad()"):
        filter2d(torch.ones(6, 7, requires_grad=True), torch.ones(3, 3))
    with torch.no_grad():
        assert filter2d(torch.ones(6, 7, requires_grad=True), torch.ones(3, 3)).max() == 9
    with says(ValueError, "x has PyTorch's layout torch.sparse_coo; it must be dense, as x.to_dense() is"):
        conv2d(torch.ones(2, 4, 6, 6).to_sparse(), torch.ones(8, 4, 3, 3))
    for call in (conv2d, partial(explain, conv2d)):
        with says(ValueError, "algorithm='im2col'", "PyTorch itself"):
            call(torch.ones(2, 4, 6, 6), torch.ones(8, 4, 3, 3), algorithm="im2col")


@pytest.mark.parametrize("device", [None, "cuda"])
def test_empty_batches(device: Any, host_device: HostDevice, fake_cupy: Any) -> None:
    assert conv2d(ones(0, 4, 6, 6), W, device=device).shape == (0, 8, 4, 4)
    assert filter2d(ones(3, 0, 6, 7), KERNEL, device=device).shape == (3, 0, 6, 7)
    assert filter2d(ones(3, 0), KERNEL, device=device).shape == (3, 0)
    assert conv2d(torch.ones(0, 4, 6, 6), torch.ones(8, 4, 3, 3)).shape == (0, 8, 4, 4)
    assert conv2d(fake_cupy.asarray(ones(0, 4, 6, 6)), fake_cupy.asarray(W)).shape == (0, 8, 4, 4)
    out = ones(0, 8, 4, 4)
    assert conv2d(ones(0, 4, 6, 6), W, out=out, device=device) is out
    assert conv2d(ones(4, 6, 6, 0), ones(4, 3, 3, 8), layout="CHWN", device=device).shape == (8, 4, 4, 0)
    y = conv2d(torch.ones(0, 4, 6, 6), torch.ones(8, 4, 3, 3), layout="CHWN")
    assert y.shape == (0, 8, 4, 4)
    assert host_device.launches == []
    with says(ValueError, "in_channels=5"):
        conv2d(ones(0, 5, 6, 6), W, device=device)
    with says(ValueError, "algorithm='cudnn'"):
        conv2d(ones(0, 4, 6, 6), W, device=device, algorithm="cudnn")


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_nan_and_inf_propagate_as_in_pytorch(device: Any, activation: Any, host_device: HostDevice) -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, 8, 8)).astype(np.float32)
    w = np.random.default_rng(2).standard_normal((3, 2, 3, 3)).astype(np.float32)
    x[0, 0, 2, 3], x[0, 1, 6, 6] = np.nan, np.inf
    expected = torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), padding=1)
    expected = (expected.relu() if activation else expected).numpy()
    y = conv2d(x, w, padding=1, activation=activation, device=device, precision="ieee")
    assert (np.isnan(y) == np.isnan(expected)).all() and np.isnan(y).sum() >= 27
    assert (np.isinf(y) == np.isinf(expected)).all()
    finite = np.isfinite(expected)
    np.testing.assert_allclose(y[finite], expected[finite], rtol=1e-5, atol=1e-5)


def strange(array: np.ndarray, how: str) -> np.ndarray:
    """The same values, lying otherwise."""
    if how == "transposed":
        return np.ascontiguousarray(array.T).T
    if how == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if how == "every other":
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if how == "other byte order":
        return array.astype(array.dtype.newbyteorder())
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]  # "unaligned"
    raw[:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw.view(array.dtype).reshape(array.shape)


@pytest.mark.parametrize("how", ["transposed", "reversed", "every other", "other byte order", "unaligned"])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_arrays_that_lie_strangely(how: str, device: Any, host_device: HostDevice, fake_cupy: Any) -> None:
    problem = ConvProblem(n=2, c=4, h=6, w=6, k=8, r=3, s=3, bias=True)
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in (problem.x_shape, problem.w_shape, (8,))]
    expected = oracle_conv(problem, *arrays)
    given = [strange(array, how) for array in arrays]
    assert relative_error(conv2d(*given, device=device), expected) < 2e-6
    image = filter2d(arrays[0][0, 0].copy(), arrays[1][0, 0].copy(), device=device)
    assert (filter2d(given[0][0, 0], given[1][0, 0], device=device) == image).all()
    if how not in ("other byte order", "reversed"):
        on_gpu = [fake_cupy.ndarray(array, 0) for array in given]
        assert relative_error(conv2d(*on_gpu).host, expected) < 2e-6
        tensors = [torch.from_numpy(array) for array in given] if how != "unaligned" else []
        if tensors:
            assert relative_error(conv2d(*tensors).numpy(), expected) < 2e-6


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, False, np.float32(0)])
def test_every_zero_is_a_number_of_the_images_dtype(zero: Any, host_device: HostDevice) -> None:
    for image, kernel in ((IMAGE, KERNEL), (IMAGE.astype(np.int32), KERNEL.astype(np.int32))):
        filter2d(image, kernel, border="constant", value=zero, delta=zero, device="cuda")
        _, values = host_device.launches[-1]
        roles = ("x", "w", "bias", "y", "value", "delta", "workspace", "prepared")
        argument = Number("int" if image.dtype == np.int32 else "float", "value")
        made = Launch("f.cuh", "f", (), (), (argument, replace(argument, name="delta")), grid=1, block=32)
        # packs the numbers as a launch on a GPU does
        launch.make_launcher(lambda *call: 0, pytest.fail, [(1, made)], roles)(0, tuple(values.values()))


def test_a_picture_of_pillow_is_refused_with_what_makes_an_array_of_it() -> None:
    image = pytest.importorskip("PIL.Image").new("L", (8, 8))
    with pytest.raises(TypeError, match=r"image is a PIL.Image.Image; .*\(numpy.asarray makes one\)"):
        filter2d(image, [[1]])


@pytest.mark.parametrize("device", [None, "cuda"])
def test_masked_arrays_are_refused(device: Any, host_device: HostDevice) -> None:
    """Also after equal calls with plain arrays, which leave ready calls."""
    image, kernel = np.ones((6, 7), np.float32), np.ones((3, 3), np.float32)
    masked = np.ma.masked_array(image, image > 0)
    filter2d(image, kernel, device=device)
    conv2d(X, W, device=device)
    with says(TypeError, "image is a masked array", "give image.filled(value)"):
        filter2d(masked, kernel, device=device)
    with says(TypeError, "image is a masked array"):
        leanconv.median_blur(masked, 3, device=device)
    for separable in (None, True):
        with says(TypeError, "kernel is a masked array", "give kernel.filled(value)"):
            filter2d(image, np.ma.masked_array(kernel), device=device, separable=separable)
    with says(TypeError, "kernel_y is a masked array"):
        leanconv.sep_filter2d(image, [1, 2, 1], np.ma.masked_array([1, 2, 1]), device=device)
    with says(TypeError, "x is a masked array"):
        conv2d(np.ma.masked_array(X), W, device=device)
    with says(TypeError, "w is a masked array"):
        conv2d(X, np.ma.masked_array(W), device=device)
    with says(TypeError, "w is a masked array"):
        leanconv.prepare_weights(np.ma.masked_array(W))
    with says(TypeError, "image is a masked array"):
        leanconv.explain(filter2d, masked, kernel, device=device)
    np.testing.assert_array_equal(filter2d(masked.filled(2), kernel, device=device), np.full((6, 7), 18))


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_matrix_is_a_kernel_and_no_image(device: Any, host_device: HostDevice, rng: np.random.Generator) -> None:
    image, kernel = rng.standard_normal((6, 7), np.float32), rng.standard_normal((3, 3), np.float32)
    expected = filter2d(image, kernel, device=device)
    for _ in range(2):
        y = filter2d(image, np.asmatrix(kernel), device=device)
        assert type(y) is np.ndarray and (y == expected).all()
    assert leanconv.explain(filter2d, image, np.asmatrix(kernel), device=device).chosen
    with says(TypeError, "image is a numpy.matrix; give numpy.asarray(image)"):
        filter2d(np.asmatrix(image), kernel, device=device)
    with says(TypeError, "image is a numpy.matrix"):
        leanconv.gaussian_blur(np.asmatrix(image), 1.5, device=device)
    with says(TypeError, "out is a numpy.matrix"):
        filter2d(image, kernel, out=np.asmatrix(np.empty_like(image)), device=device)
