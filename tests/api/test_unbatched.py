"""Images and signals without a batch axis, as torch.nn.functional takes them: the values of a batch of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from leanconv import conv1d, conv2d, conv2d_input, explain, prepare_weights
from tests.messages import says
from tests.stand_ins import HostDevice, Other

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class Layer:
    """A function, the shapes of its arrays without a batch, channels first, and the layouts of images or signals."""

    function: Callable[..., Any]
    x: tuple[int, ...]
    w: tuple[int, ...]
    layouts: tuple[str, ...]
    options: dict[str, Any]
    #: of conv2d_input
    input_shape: tuple[int, ...] | None = None

    def __call__(self, x: Any, w: Any, layout: str | None, *, alone: bool, **more: Any) -> Any:
        """Call it with x in the order of a layout."""
        options = {**self.options, **more}
        if self.input_shape is not None:
            shape = self.input_shape if alone else (1, *self.input_shape)
            if not isinstance(x, torch.Tensor):
                shape = tuple(shape[axis] for axis in axes(self.layouts[0], layout or self.layouts[0], len(shape)))
            options["input_shape"] = shape
        return self.function(x, w, layout=layout, **options)

    def __str__(self) -> str:
        return self.function.__name__


LAYERS = [
    Layer(conv2d, (4, 9, 8), (6, 2, 3, 2), ("NCHW", "NHWC", "CHWN"), {"padding": (1, 0), "groups": 2}),
    Layer(conv1d, (4, 13), (6, 4, 3), ("NCW", "NWC", "CWN"), {"stride": 2, "padding": (2, 0)}),
    Layer(conv2d_input, (6, 4, 4), (6, 4, 3, 2), ("NCHW", "NHWC", "CHWN"), {"stride": 2}, (4, 9, 8)),
]
EACH = [pytest.param(layer, layout, id=f"{layer}-{layout}") for layer in LAYERS for layout in layer.layouts]
each = pytest.mark.parametrize("layer, layout", EACH)


def axes(have: str, want: str, count: int) -> tuple[int, ...]:
    """Where the axes of one layout lie in another; without N where there is an axis less."""
    if count < len(have):
        have, want = have.replace("N", ""), want.replace("N", "")
    return tuple(have.index(axis) for axis in want)


def lying(layer: Layer, layout: str, array: np.ndarray) -> np.ndarray:
    """An array, channels first, as one that lies as a layout."""
    return np.ascontiguousarray(array.transpose(axes(layer.layouts[0], layout, array.ndim)))


def as_tensor(layer: Layer, layout: str, array: np.ndarray) -> Any:
    """An array, channels first, as a tensor of that shape which lies as a layout."""
    return torch.from_numpy(lying(layer, layout, array)).permute(axes(layout, layer.layouts[0], array.ndim))


@pytest.fixture
def drawn(layer: Layer, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and the result, channels first; the result is that of a batch of one."""
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (layer.x, layer.w))
    return x, w, layer(x[None], w, None, alone=False, precision="ieee")[0]


def near(y: Any, expected: np.ndarray) -> bool:
    found = np.asarray(y)
    assert found.shape == expected.shape
    return bool(np.allclose(found, expected, rtol=1e-4, atol=1e-5))


@each
@pytest.mark.parametrize("device", [None, "cuda"])
def test_numpy(layer: Layer, layout: str, device: Any, drawn: Any, host_device: HostDevice) -> None:
    x, w, y = (lying(layer, layout, array) for array in drawn)
    options = {"alone": True, "device": device}
    out, strided = np.full_like(y, np.nan), np.full((*y.shape, 2), np.nan, np.float32)[..., 0]
    for _ in range(2):
        assert near(layer(x, w, layout, **options), y)
        assert near(layer(x, prepare_weights(w), layout, **options), y)
        for into in (out, strided):
            assert layer(x, w, layout, out=into, **options) is into and near(into, y)
    with says(ValueError, "out has shape"):
        layer(x, w, layout, out=out[None], **options)
    assert len(set(host_device.problems.values())) == (device is not None)
    assert all(problem.n == 1 for problem in host_device.problems.values())


@each
def test_cupy_arrays_are_read_in_place(
    layer: Layer, layout: str, drawn: Any, host_device: HostDevice, fake_cupy: Any
) -> None:
    x, w, y = (lying(layer, layout, array) for array in drawn)
    given, filters, out = (fake_cupy.asarray(array.copy()) for array in (x, w, np.zeros_like(y)))
    for weights in (filters, prepare_weights(filters)):
        assert near(layer(given, weights, layout, alone=True).host, y)
        assert layer(given, weights, layout, alone=True, out=out) is out and near(out.host, y)
    assert fake_cupy.copies == 0 and host_device.launches[-1][1]["w"] == filters.data.ptr


@each
def test_pytorch_on_the_cpu(layer: Layer, layout: str, drawn: Any) -> None:
    x, w, y = drawn
    given, filters = as_tensor(layer, layout, x), torch.from_numpy(w)
    order = axes(layer.layouts[0], layout, x.ndim)
    found = layer(given, filters, layout, alone=True)
    assert near(found, y) and found.permute(order).is_contiguous()
    by_default = layer(given, filters, None, alone=True)
    assert near(by_default, y) and by_default.permute(order).is_contiguous(), "the result lies as x does"
    out = torch.full(y.shape, torch.nan)
    assert layer(given, prepare_weights(filters), layout, alone=True, out=out) is out and near(out, y)


@each
def test_pytorch_on_a_gpu_is_read_as_it_lies(
    layer: Layer, layout: str, drawn: Any, torch_on_device: HostDevice
) -> None:
    x, w, y = drawn
    given, filters = as_tensor(layer, layout, x), as_tensor(layer, layout, w)
    order = axes(layer.layouts[0], layout, x.ndim)
    out = as_tensor(layer, layout, np.full_like(y, np.nan))
    assert out.permute(order).is_contiguous()
    for weights in (filters, prepare_weights(filters)):
        for into in (None, out):
            found = layer(given, weights, layout, alone=True, out=into)
            assert near(found, y) and found.permute(order).is_contiguous() and (into is None or found is into)
            x_at, w_at, _, y_at, *_ = torch_on_device.launches[-1][1].values()
            assert (x_at, w_at, y_at) == (given.data_ptr(), filters.data_ptr(), found.data_ptr()), "nothing is copied"
    # x, w or out in another order is copied
    for weights in (torch.from_numpy(w), prepare_weights(torch.from_numpy(w))):
        assert near(layer(torch.from_numpy(x), weights, layout, alone=True), y)
    strided = torch.full((*y.shape, 2), torch.nan)[..., 0]
    assert layer(given, filters, layout, alone=True, out=strided) is strided and near(strided, y)
    if layout == layer.layouts[1]:
        by_default = layer(given, filters, None, alone=True)
        assert near(by_default, y) and by_default.permute(order).is_contiguous(), "channels last, as x"


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_other_libraries(layer: Layer, drawn: Any) -> None:
    x, w, y = drawn
    assert near(layer(Other(x), Other(w), None, alone=True), y)


def test_as_pytorch_does_with_bias_and_activation(rng: np.random.Generator) -> None:
    x, w, bias = (torch.from_numpy(rng.standard_normal(s, np.float32)) for s in ((4, 7, 6), (5, 4, 3, 3), (5,)))
    expected = torch.nn.functional.conv2d(x, w, bias).relu()
    torch.testing.assert_close(conv2d(x, w, bias, activation="relu"), expected)
    assert near(conv2d(x.numpy(), w.numpy(), bias.numpy(), activation="relu"), expected.numpy())
    expected = torch.nn.functional.conv1d(x[0], w[:, :6, 0, :].repeat(1, 2, 1)[:, :7], bias)
    torch.testing.assert_close(conv1d(x[0], w[:, :6, 0, :].repeat(1, 2, 1)[:, :7], bias), expected)
    given = x.clone().requires_grad_()
    conv2d(given, w).sum().backward()
    assert given.grad is not None and given.grad.shape == x.shape


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_explain(layer: Layer, device: Any, drawn: Any, host_device: HostDevice) -> None:
    x, w, _ = drawn
    options = {**layer.options, "device": device, "algorithm": "im2col" if device is None else "implicit_gemm"}
    for batch in ((), (None,)):
        shape = {} if layer.input_shape is None else {"input_shape": (*(1 for _ in batch), *layer.input_shape)}
        told = explain(layer.function, x[batch], w, **options, **shape)
        assert told.problem.n == 1 and told.problem.k == 6 and told.chosen == options["algorithm"]
        assert told.problem.op == ("dgrad" if layer.input_shape else "fprop")
        assert (told.problem.h == 1) == (layer.function is conv1d)


def test_a_batch_and_an_image_of_its_shape_are_different_calls() -> None:
    """A row of images (n, c, h) for conv1d is an image (c, h, w) for conv2d."""
    x = np.ones((3, 3, 5), np.float32)
    assert conv1d(x, np.ones((2, 3, 3), np.float32)).shape == (3, 2, 3)
    assert conv2d(x, np.ones((2, 3, 3, 3), np.float32)).shape == (2, 1, 3)
