"""scale=, add= and activation= of layers: beside PyTorch's own functions, on the CPU and on a stand-in for a GPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import leanconv
from leanconv import conv1d, conv2d, conv3d, prepare_weights
from leanconv.cpu import epilogue
from leanconv.options import ACTIVATIONS
from tests.messages import says
from tests.stand_ins import HostDevice

EVERY: list[Any] = [*ACTIVATIONS, ("leaky_relu", 0.2), ("elu", 0.5)]
ORDERS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}


def activated(activation: Any, y: torch.Tensor) -> torch.Tensor:
    name, *number = activation if isinstance(activation, tuple) else (activation,)
    if name == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    return y if name is None else getattr(functional, name)(y, *number)


def drawn(rng: np.random.Generator, dtype: str = "float32", layout: str = "NCHW") -> dict[str, np.ndarray]:
    shapes = {"x": (2, 4, 5, 7), "w": (6, 4, 3, 3), "bias": (6,), "scale": (6,), "add": (2, 6, 5, 7)}
    given = {name: 2 * rng.standard_normal(shape) for name, shape in shapes.items()}
    given = {name: array.transpose(ORDERS[layout]) if array.ndim == 4 else array for name, array in given.items()}
    sums = "float64" if dtype == "float64" else "float32"
    return {name: array.astype(sums if name == "scale" else dtype, "C") for name, array in given.items()}


def expected(given: dict[str, Any], activation: Any, layout: str = "NCHW") -> np.ndarray:
    """In float64, by PyTorch."""
    back = np.argsort(ORDERS[layout])
    wide = {name: torch.from_numpy(np.asarray(each, "float64")) for name, each in given.items()}
    wide = {name: each.permute(*back) if each.ndim == 4 else each for name, each in wide.items()}
    y = functional.conv2d(wide["x"], wide["w"], padding=1)
    for name in ("scale", "bias"):
        if name in wide:
            number = wide[name].view(-1, 1, 1)
            y = y * number if name == "scale" else y + number
    y = y + wide["add"] if "add" in wide else y
    return activated(activation, y).numpy().transpose(ORDERS[layout])


@pytest.mark.parametrize("activation", EVERY, ids=str)
def test_numpy_computes_what_pytorch_does(activation: Any, rng: np.random.Generator) -> None:
    for dtype, most in (("float32", 2e-5), ("float64", 1e-13), ("float16", 3e-2)):
        given = drawn(rng, dtype)
        y = conv2d(**given, padding=1, activation=activation)
        assert y.dtype == dtype
        np.testing.assert_allclose(y.astype("float64"), expected(given, activation), rtol=most, atol=most)


def test_gelu_without_scipy(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    epilogue._erf.cache_clear()
    given = drawn(rng, "float64")
    y = conv2d(**given, padding=1, activation="gelu")
    epilogue._erf.cache_clear()
    np.testing.assert_allclose(y, expected(given, "gelu"), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", ["NHWC", "CHWN"])
@pytest.mark.parametrize("left_out", [(), ("scale",), ("add",), ("bias",), ("bias", "add")], ids=str)
def test_each_alone_in_every_layout(left_out: tuple[str, ...], layout: Any, rng: np.random.Generator) -> None:
    given: Any = {name: each for name, each in drawn(rng, layout=layout).items() if name not in left_out}
    y = conv2d(**given, padding=1, activation="silu", layout=layout)
    np.testing.assert_allclose(y, expected(given, "silu", layout), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("last", [False, True])
def test_tensors_on_the_cpu_and_their_gradients(last: bool, rng: np.random.Generator) -> None:
    given: Any = {name: torch.from_numpy(each).requires_grad_() for name, each in drawn(rng, "float64").items()}
    if last:
        given["x"] = given["x"].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    y = conv2d(**given, padding=1, activation=("leaky_relu", 0.3))
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    plain = {name: each.detach().numpy() for name, each in given.items()}
    np.testing.assert_allclose(y.detach(), expected(plain, ("leaky_relu", 0.3)), rtol=1e-12, atol=1e-12)
    y.sum().backward()
    assert all(each.grad is not None and each.grad.any() for each in given.values())


def test_signals_volumes_and_single_images(rng: np.random.Generator) -> None:
    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    x, w, add = draw(4, 9), draw(6, 4, 3), draw(6, 7)
    want = functional.relu6(functional.conv1d(*map(torch.from_numpy, (x, w))) + torch.from_numpy(add))
    np.testing.assert_allclose(conv1d(x, w, add=add, activation="relu6"), want, atol=1e-5)
    x, w, add, scale = draw(2, 3, 4, 5, 6), draw(6, 3, 2, 3, 3), draw(2, 6, 3, 3, 4), draw(6)
    y = functional.conv3d(*map(torch.from_numpy, (x, w))) * torch.from_numpy(scale).view(-1, 1, 1, 1)
    want = torch.tanh(y + torch.from_numpy(add))
    np.testing.assert_allclose(conv3d(x, w, scale=scale, add=add, activation="tanh"), want, atol=1e-5)


def test_integers_take_a_residual_and_relu6() -> None:
    x, w = np.ones((1, 2, 4, 4), np.int8), np.ones((3, 2, 3, 3), np.int8)
    add = np.arange(-21, -9, dtype=np.int32).reshape(1, 3, 2, 2)
    for given in ((x, w, add), map(torch.from_numpy, (x, w, add))):
        images, filters, residual = given
        y = conv2d(images, filters, add=residual, activation="relu6")
        np.testing.assert_array_equal(y, np.clip(18 + add, 0, 6))
    with says(TypeError, "scale was given, and x has dtype int8"):
        conv2d(x, w, scale=np.ones(3, np.float32))
    with says(ValueError, "activation='gelu' makes fractions; layers of int8 take None, 'relu', 'relu6'"):
        conv2d(x, w, activation="gelu")


def test_the_result_may_take_the_place_of_the_residual_and_of_nothing_else(rng: np.random.Generator) -> None:
    given: Any = drawn(rng)
    want = expected(given, "relu6")
    out = given["add"]
    assert conv2d(**given, padding=1, activation="relu6", out=out) is out
    np.testing.assert_allclose(out, want, atol=2e-5)
    room = np.zeros((2, 6, 5, 8), np.float32)
    with says(ValueError, "out overlaps add in memory"):
        conv2d(**{**given, "add": room[..., :7]}, padding=1, out=room[..., 1:])
    with says(ValueError, "out overlaps scale in memory"):
        conv2d(given["x"], given["w"], padding=1, scale=room.ravel()[:6], out=room[..., 1:])


@pytest.mark.parametrize("prepared", [False, True])
def test_on_a_gpu(prepared: bool, fake_cupy: Any, host_device: HostDevice, rng: np.random.Generator) -> None:
    """The pointers that kernels get, the copy of a residual in another order, and the residual as the result."""
    for name, activation in (("NHWC", "gelu"), ("NCHW", ("elu", 2.0))):
        layout: Any = name
        plain = drawn(rng, layout=layout)
        given: Any = {key: fake_cupy.asarray(each) for key, each in plain.items()}
        given["w"] = prepare_weights(given["w"]) if prepared else given["w"]
        want = expected(plain, activation, layout)
        for _ in range(2):
            y = conv2d(**given, padding=1, activation=activation, layout=layout)
            np.testing.assert_allclose(y.host, want, rtol=2e-5, atol=2e-5)
        _, values = host_device.launches[-1]
        assert values["add"] and values["scale"] and values["bias"]
        room = fake_cupy.asarray(np.pad(plain["add"], [(0, 0)] * 3 + [(0, 1)]))
        odd = room[..., :-1]
        y = conv2d(**{**given, "add": odd}, padding=1, activation=activation, layout=layout)
        np.testing.assert_allclose(y.host, want, rtol=2e-5, atol=2e-5)
        y = conv2d(**given, padding=1, activation=activation, layout=layout, out=given["add"])
        assert y is given["add"]
        np.testing.assert_allclose(y.host, want, rtol=2e-5, atol=2e-5)


def test_what_a_table_knows_of_the_layer_alone_serves_it_fused() -> None:
    from leanconv.perf.tables import as_timed

    plain = leanconv.ConvProblem(2, 4, 5, 7, 6, 3, 3)
    fused = leanconv.ConvProblem(2, 4, 5, 7, 6, 3, 3, bias=True, scale=True, add=True, activation="silu")
    assert as_timed(fused) == plain and as_timed(plain) is plain
    relu = leanconv.ConvProblem(2, 4, 5, 7, 6, 3, 3, bias=True, activation="relu")
    assert as_timed(relu) is relu
