"""torch.nn.functional while `enable` lasts: what a layer is not, that it was at the calls before."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.stand_ins import HostDevice

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import decided, functions, patch, registration  # noqa: E402
from tests.torch.test_patched_functions import close, pytorch  # noqa: E402

nn, F = torch.nn, torch.nn.functional


@pytest.fixture(params=[True, False], ids=["taken", "left"])
def taken(request: pytest.FixtureRequest, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if request.param else 1e-6)
    return bool(request.param)


@pytest.fixture
def layer(taken: bool) -> Any:
    return nn.Conv2d(4, 6, 3).requires_grad_(False)


@pytest.fixture
def x() -> Any:
    return torch.randn(2, 4, 9, 8)


@pytest.mark.parametrize("ignores", [False, True])
def test_modes_are_seen_whatever_they_say_of_compiled_functions(layer: Any, x: Any, ignores: bool) -> None:
    """Such are those of DebugMode and of selective checkpoints; guards of torch.compile overlook them."""
    seen: list[str] = []

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return ignores

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with leanconv.torch.enable():
        for _ in range(3):
            layer(x)
        with Dispatch():
            layer(x)
        close(layer(x), pytorch(x, layer.weight, layer.bias))
    assert seen == ["aten.convolution.default"]


def test_guards_are_asked_of_no_nested_tensor(layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They throw where nothing catches, and the process ends. PyTorch raises."""
    alike = decided.alike

    def asked(*tensors: Any) -> Any:
        check = alike(*tensors)
        assert check is not None

        def is_alike(*given: Any) -> bool:
            assert not given[0].is_nested
            return bool(check(*given))

        return is_alike

    monkeypatch.setattr(decided, "alike", asked)
    nested = torch.nested.nested_tensor([torch.randn(4, 9, 8), torch.randn(4, 7, 8)])
    with leanconv.torch.enable():
        for _ in range(3):
            layer(x)
        with pytest.raises((RuntimeError, NotImplementedError)):
            layer(nested)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("which", ["image", "filters", "bias"])
def test_parameters_may_become_lazily_negated(layer: Any, x: Any, which: str, grad: bool) -> None:
    """In the same memory."""
    layer.requires_grad_(grad)
    with leanconv.torch.enable():
        for _ in range(3):
            F.conv2d(x, layer.weight, layer.bias)
        if which == "image":
            x = torch._neg_view(x)
        elif which == "filters":
            layer.weight.data = torch._neg_view(layer.weight.data)
        bias = torch._neg_view(layer.bias) if which == "bias" else layer.bias
        expected = pytorch(x.clone(), layer.weight.clone(), bias.clone())
        for _ in range(3):
            y = F.conv2d(x, layer.weight, bias)
            close(y, expected)
            assert y.requires_grad is grad


def test_zeros_without_memory_are_a_bias(layer: Any, x: Any) -> None:
    with leanconv.torch.enable():
        for bias in torch._efficientzerotensor(6), layer.bias, torch._efficientzerotensor(6):
            for _ in range(2):
                close(F.conv2d(x, layer.weight, bias), pytorch(x, layer.weight, bias))


@pytest.mark.parametrize("first", [False, True], ids=["without first", "with first"])
def test_a_bias_comes_and_goes(layer: Any, x: Any, first: bool) -> None:
    """No call is one of the dispatcher."""
    with leanconv.torch.enable() as enabled:
        for number in range(24):
            bias = layer.bias if (number % 2 == 0) is first else None
            close(F.conv2d(x, layer.weight, bias), pytorch(x, layer.weight, bias))
        assert sum(line.calls for line in enabled.report().lines) == 24 and not registration._with_backward


@pytest.mark.parametrize("before", [0, 2], ids=["first", "later"])
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose2d"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_bias_that_pytorch_refuses(taken: bool, x: Any, name: str, grad: bool, before: int) -> None:
    """Of another size; or, before any other, of another type."""
    w = torch.randn((4, 8, 3, 3) if "transpose" in name else (8, 4, 3, 3))
    if name == "conv1d":
        x, w = x[..., 0].contiguous(), w[..., 0].contiguous()
    w.requires_grad_(grad)
    function = getattr(F, name)
    wrong = [torch.randn(size) for size in (4, 16, (2, 4))]
    if not before and name != "conv_transpose2d":
        wrong.append(torch.randn(8).double())
    with leanconv.torch.enable():
        for _ in range(before):
            function(x, w, torch.randn(8))
        for bias in wrong:
            for _ in range(2):
                with pytest.raises(RuntimeError):
                    function(x, w, bias)


def test_a_layer_that_changes_seldom_is_known_again(layer: Any, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any number of epochs and evaluations; and one that changes each time makes few guards."""
    alike, made = decided.alike, []
    monkeypatch.setattr(decided, "alike", lambda *given: made.append(given) or alike(*given))

    def call(inference: bool) -> None:
        with torch.inference_mode(inference):
            layer(x)

    with leanconv.torch.enable():
        for number in range(640):
            call(number % 2 == 0)
        assert len(made) < 20
        keys: list[bool] = []
        any_autocast = functions.any_autocast
        monkeypatch.setattr(functions, "any_autocast", lambda: keys.append(True) or any_autocast())
        for inference in True, False:
            for _ in range(70):
                call(inference)
            count = len(keys)
            call(inference)
            assert len(keys) == count, "no key was built"


def test_what_is_left_for_its_alignment_is_taken_later(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that begin at a multiple of 16 bytes, after others that are alike beside that; and the other way round."""
    decide = patch.Patch._choose_forward

    def choose(self: Any, x: Any, *given: Any) -> Any:
        if x.data_ptr() & 15:
            return self._leave(given[0], "forward", "", "it begins at no multiple of 16 bytes")
        return decide(self, x, *given)

    monkeypatch.setattr(patch.Patch, "_choose_forward", choose)
    layer, memory = nn.Conv2d(4, 6, 3).requires_grad_(False), torch.randn(2 * 4 * 9 * 8 + 1)
    aligned, other = memory[:-1].view(2, 4, 9, 8), memory[1:].view(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable():
        for number, x in enumerate([other] * 4 + [aligned] * 4 + [other, aligned] * 3):
            before = len(device.launches)
            close(layer(x), pytorch(x, layer.weight, layer.bias))
            assert len(device.launches) - before == (x is aligned), number


def test_a_function_is_pickled_as_pytorchs(device: HostDevice) -> None:
    with leanconv.torch.enable():
        pickled = pickle.dumps(F.conv2d)
        assert pickle.loads(pickled) is F.conv2d
    assert pickle.loads(pickled) is F.conv2d
