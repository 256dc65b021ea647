"""`activation=`, `scale=` and `add=` of leanconv.torch: values, derivatives, and what traces and transforms them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.messages import says
from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv  # noqa: E402
import leanconv.torch as ours  # noqa: E402
from leanconv.call import bind  # noqa: E402
from leanconv.torch import epilogue, recording  # noqa: E402
from leanconv.torch.epilogue import OPERATORS  # noqa: E402

nn, F, func = torch.nn, torch.nn.functional, torch.func
CONVS = {1: (ours.conv1d, F.conv1d), 2: (ours.conv2d, F.conv2d), 3: (ours.conv3d, F.conv3d)}
MODULES = {1: ours.Conv1d, 2: ours.Conv2d, 3: ours.Conv3d}


def tensors(axes: int, dtype: Any = torch.float64) -> tuple[Any, ...]:
    """Images, filters in two groups, bias, scale, residual."""
    generator = torch.Generator().manual_seed(axes)
    shapes = (2, 4, *(3,) * axes), (6, 2, *(2,) * axes), (6,), (6,), (2, 6, *(2,) * axes)
    made = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    made[3] = made[3].double() if dtype is torch.float64 else made[3].float()
    return tuple(made)


def plain(axes: int, x: Any, w: Any, bias: Any, scale: Any, add: Any) -> Any:
    ones = (1,) * axes
    return F.silu(CONVS[axes][1](x, w, groups=2) * scale.view(-1, *ones) + bias.view(-1, *ones) + add)


@pytest.mark.parametrize("axes", CONVS)
def test_values_with_and_without_a_gradient(axes: int) -> None:
    given = tensors(axes)
    expected, conv = plain(axes, *given), CONVS[axes][0]
    for wanted in (False, True):
        x, w, bias, scale, add = (each.requires_grad_(wanted) for each in given)
        y = conv(x, w, bias, groups=2, activation="silu", scale=scale, add=add)
        assert y.requires_grad is wanted
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(
            conv(x[1], w, bias, groups=2, activation="silu", scale=scale, add=add[1]), expected[1]
        )
    layer = MODULES[axes](4, 6, 2, groups=2, activation=("leaky_relu", 0.2)).double()
    assert layer.state_dict().keys() == {"weight", "bias"} and "activation='leaky_relu:0.2'" in repr(layer)
    want = F.leaky_relu(CONVS[axes][1](x, layer.weight, layer.bias, groups=2) + add, 0.2)
    torch.testing.assert_close(layer(x, add=add), want)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, add=add), want)


def test_derivatives_of_any_order_and_mode() -> None:
    shapes = (1, 2, 2, 1), (2, 1, 2, 1), (2,), (2,), (1, 2, 1, 1)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes]

    def conv(x: Any, w: Any, bias: Any, scale: Any, add: Any) -> Any:
        return ours.conv2d(x, w, bias, groups=2, activation="silu", scale=scale, add=add)

    modes = {"check_forward_ad": True, "check_batched_grad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(conv, given, **modes)
    assert torch.autograd.gradgradcheck(
        lambda x, scale: conv(x, *given[1:3], scale, given[4]), [given[0], given[3]], fast_mode=True
    )
    options = "silu", (1, 1), (0, 0), (1, 1), 2, "fp32", False
    operator = lambda *g: OPERATORS[2](*g, *options)  # noqa: E731
    assert torch.autograd.gradcheck(operator, given, **modes)
    one, other = (
        func.grad(lambda x, f=f: f(x, *given[1:]).square().sum())(given[0]) for f in (conv, lambda *g: plain(2, *g))
    )
    torch.testing.assert_close(one, other)


def test_what_traces_sees_one_operator() -> None:
    x, w, bias, scale, add = tensors(2, torch.float32)
    options = "relu", (1, 1), (0, 0), (1, 1), 2, "fp32", False
    operator = OPERATORS[2]

    def conv(x: Any, add: Any) -> Any:
        return ours.conv2d(x, w, bias, groups=2, activation="relu", scale=scale, add=add)

    expected = conv(x, add)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator, (x, w, bias, scale, add, *options), test_utils=tests)
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    for traced in (make_fx(conv)(x, add), make_fx(func.functionalize(conv))(x, add), torch.fx.symbolic_trace(conv)):
        (called,) = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
        assert called == "leanconv.fused_conv2d.default" or "<function conv2d" in called
        torch.testing.assert_close(traced(x, add), expected)
    meta = operator(*(each.to("meta") for each in (x, w, bias, scale, add)), *options)
    assert meta.is_meta and meta.shape == expected.shape
    with FlopCounterMode(display=False) as counter:
        conv(x, add)
    assert counter.get_total_flops() == 2 * expected.numel() * 2 * 4
    many = torch.stack([x, -x]), torch.stack([add, add + 1])
    torch.testing.assert_close(torch.vmap(conv)(*many), torch.stack([conv(*each) for each in zip(*many, strict=True)]))
    for mapped in (0, 1, 2, 3, 4):  # of the operator: images, or groups of channels where filters or numbers are mapped
        given = [x, w, bias, scale, add]
        doubled = [torch.stack([each, each / 2]) if at == mapped else each for at, each in enumerate(given)]
        axes = tuple(0 if at == mapped else None for at in range(5))
        y = torch.vmap(lambda *g: operator(*g, *options), axes)(*doubled)
        halved = [each / 2 if at == mapped else each for at, each in enumerate(given)]
        torch.testing.assert_close(y, torch.stack([expected, operator(*halved, *options)]))
        none = torch.vmap(lambda *g: operator(*g, *options), axes)(
            *(each[:0] if at == mapped else each for at, each in enumerate(doubled))
        )
        assert none.shape == (0, *expected.shape)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x, add).dtype is torch.bfloat16
        torch.testing.assert_close(conv(x, add).float(), expected, rtol=3e-2, atol=3e-2)


def test_an_exported_layer_has_the_operator() -> None:
    layer, x = ours.Conv2d(2, 3, 3, activation="gelu"), torch.randn(1, 2, 5, 5)
    with torch.no_grad():
        program = torch.export.export(layer, (x, torch.ones(1, 3, 3, 3)))
        (problem,) = recording.problems_of(layer, (x, torch.ones(1, 3, 3, 3)))[None]
    assert (problem.bias, problem.scale, problem.add, problem.activation) == (True, False, True, "gelu")
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == [
        "leanconv.fused_conv2d.default"
    ]
    torch.testing.assert_close(
        program.module()(x, torch.ones(1, 3, 3, 3)), F.gelu(F.conv2d(x, layer.weight, layer.bias) + 1)
    )


@pytest.mark.parametrize("grad", [False, True])
def test_bad_input(grad: bool) -> None:
    x, w, _, scale, add = tensors(2, torch.float32)
    x.requires_grad_(grad)

    def conv(**named: Any) -> Any:
        return ours.conv2d(x, w, groups=2, **named)

    with says(ValueError, "activation='swish' is not known", "'silu'"):
        conv(activation="swish")
    with says(ValueError, "activation='swish' is not known"):
        ours.Conv2d(1, 1, 1, activation="swish")
    with says(ValueError, "add has shape (2, 6, 1, 2)", "(2, 6, 2, 2)"):
        conv(add=add[:, :, :1])
    with says(ValueError, "add has shape (6, 5)", "(6, 2)"):
        ours.conv1d(x[0, :, 0], w[:, :, 0], groups=2, add=torch.zeros(6, 5))
    with says(TypeError, "add has dtype", "float16", "float32"):
        conv(add=add.half())
    with says(ValueError, "add lies on meta"):
        conv(add=add.to("meta"))
    with says(TypeError, "add is of type float"):
        conv(add=1.0)
    with says(ValueError, "scale has shape (5,)", "(6,)"):
        conv(scale=scale[:5])
    with says(TypeError, "scale has dtype", "float64", "float32"):
        conv(scale=scale.double())


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("beside", [False, True])
def test_one_launch_on_a_gpu(activation: str | None, beside: bool, device: HostDevice) -> None:
    x, w, bias, scale, add = (each.float() for each in tensors(2))
    named = {"scale": scale, "add": add} if beside else {}
    function = getattr(F, activation) if activation else lambda y: y
    ones = (1, 6, 1, 1)
    expected = F.conv2d(x, w, groups=2) * (scale if beside else torch.ones(6)).view(ones) + bias.view(ones)
    expected = function(expected + add * beside)
    options = activation, (1, 1), (0, 0), (1, 1), 2, "fp32", False
    for weights in (w, leanconv.prepare_weights(w)):
        y = ours.conv2d(x, weights, bias, groups=2, activation=activation, **named)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y = OPERATORS[2](x, w, bias, named.get("scale"), named.get("add"), *options)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert len(device.launches) == 3


def test_the_operator_keeps_filters_packed(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on between two of their changes, but not in a CUDA graph, and no longer than they live."""
    choose, operator = bind.choose, OPERATORS[2]
    monkeypatch.setattr(bind, "choose", lambda problem, target, *rest: choose(problem, target, "winograd1d", rest[1]))
    x, w = torch.randn(1, 32, 10, 9), torch.randn(64, 32, 3, 3)
    options = None, None, None, "relu", (1, 1), (0, 0), (1, 1), 1, "fp32", False
    counts, at = [], id(w)
    for step in range(7):
        if step == 3:
            w.mul_(2)
        monkeypatch.setattr(epilogue, "capturing", lambda step=step: step == 6)
        torch.testing.assert_close(operator(x, w, *options), F.conv2d(x, w).relu(), rtol=1e-3, atol=1e-3)
        counts.append(device.prepared)
    assert counts == [1, 2, 3, 4, 5, 5, 6] and at in epilogue._kept
    del w
    assert at not in epilogue._kept
