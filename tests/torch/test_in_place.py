"""Results may be changed in place, as PyTorch's own: in training, and later where none was recorded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv  # noqa: E402
import leanconv.torch  # noqa: E402
from leanconv.torch import patch  # noqa: E402

nn, F = torch.nn, torch.nn.functional

LAYERS = {
    "signals": (lambda kinds: kinds.Conv1d(3, 4, 3), (2, 3, 9)),
    "images": (lambda kinds: kinds.Conv2d(3, 4, 3), (2, 3, 9, 8)),
    "volumes": (lambda kinds: kinds.Conv3d(3, 4, 3), (2, 3, 5, 6, 4)),
    "transposed signals": (lambda kinds: kinds.ConvTranspose1d(3, 4, 3), (2, 3, 9)),
    "transposed images": (lambda kinds: kinds.ConvTranspose2d(3, 4, 3), (2, 3, 5, 4)),
    "transposed volumes": (lambda kinds: kinds.ConvTranspose3d(3, 4, 3), (2, 3, 3, 4, 4)),
    "channels last": (lambda kinds: kinds.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), (2, 3, 9, 8)),
}  # fmt: skip


def gradients(layer: Any, x: Any) -> list[Any]:
    """By a ReLU in place; and by a factor in place of a result that was made without gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    nn.Sequential(layer, nn.ReLU(inplace=True))(x).square().sum().backward()
    factor = torch.ones(1, requires_grad=True)
    with torch.no_grad():
        y = layer(x)
    y.mul_(factor).sum().backward()
    return [x.grad.mul_(torch.ones(1, requires_grad=True)), layer.weight.grad, factor.grad]


def close(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "the long way"])
def test_results_under_enable(name: str, is_quick: bool, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_quick:
        monkeypatch.setattr(patch.GpuCall, "quick", lambda self: None)
    made, shape = LAYERS[name]
    layer, x = made(nn), torch.randn(shape)
    expected = gradients(layer, x)
    with leanconv.torch.enable() as taken:
        for _ in range(4):
            close(gradients(layer, x), expected)
    assert taken.report().taken


def test_results_under_autocast_and_of_packed_filters(device: HostDevice, packing: None) -> None:
    layer, x, factor = nn.Conv1d(4, 4, 3), torch.randn(2, 4, 9), torch.ones(1, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        with leanconv.torch.enable(), torch.autocast("cpu", torch.bfloat16, dtype is torch.bfloat16):
            for _ in range(4):
                with torch.no_grad():
                    y = layer(x)
                assert y.dtype is dtype
                y.mul_(factor).sum().backward()


@pytest.mark.parametrize("name", [*LAYERS, "causal"])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("is_batch", [True, False])
def test_results_of_own_layers(name: str, on_device: bool, is_batch: bool, request: Any) -> None:
    if name == "causal":
        layer, shape = leanconv.torch.CausalConv3d(3, 4, 3), (2, 3, 5, 6, 4)
        theirs = layer
    else:
        made, shape = LAYERS[name]
        layer, theirs = made(leanconv.torch), made(nn)
        theirs.load_state_dict(layer.state_dict())
    x = torch.randn(shape if is_batch else shape[1:])
    expected = [] if name == "causal" else expected_of(theirs, x)
    if on_device:
        request.getfixturevalue("torch_on_device")
    close(gradients(layer, x)[: len(expected)], expected)


def expected_of(layer: Any, x: Any) -> list[Any]:
    """PyTorch's own, without anything in place."""
    x = x.clone().requires_grad_()
    y = layer(x)
    found = torch.autograd.grad(y.relu().square().sum(), [x, layer.weight])
    return [*found, y.detach().sum().reshape(1)]


@pytest.mark.parametrize("function", ["conv1d", "conv2d", "conv3d"])
@pytest.mark.parametrize("on_device", [False, True])
def test_results_with_an_activation_and_under_autocast(function: str, on_device: bool, request: Any) -> None:
    axes = int(function[-2])
    w, x, factor = torch.randn(3, 3, *(3,) * axes), torch.randn(3, *(5,) * axes), torch.ones(1, requires_grad=True)
    if on_device:
        request.getfixturevalue("torch_on_device")
    for given, autocast in (({"activation": "relu"}, False), ({}, True)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, autocast):
            y = getattr(leanconv.torch, function)(x, w, **given)
        y.mul_(factor).sum().backward()


def test_results_of_the_core_functions_on_the_cpu() -> None:
    x, w, factor = torch.randn(2, 3, 9), torch.randn(4, 3, 3), torch.ones(1, requires_grad=True)
    with torch.no_grad():
        y = leanconv.conv1d(x, w)
    y.mul_(factor).sum().backward()
    torch.testing.assert_close(factor.grad, F.conv1d(x, w).sum().reshape(1))


def test_tangents_stay_where_gradients_are_off() -> None:
    """A result on the CPU that is a view of PyTorch's."""
    x, w, by_x = torch.randn(2, 3, 9), torch.randn(4, 3, 3), torch.randn(2, 3, 9)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, by_x)
        tangent = torch.autograd.forward_ad.unpack_dual(leanconv.torch.conv1d(dual, w)).tangent
    torch.testing.assert_close(tangent, F.conv1d(by_x, w))
