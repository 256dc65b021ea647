"""Steps as the one before under `enable`: gradients that leanconv computes without asking what it has decided."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.calls import calls_of
from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import decided, deciding, patch, quick, recorded, registration, switches  # noqa: E402
from tests.torch.test_quick_calls import CASES, LongWayError  # noqa: E402

nn = torch.nn

#: the fewest calls after which a layer's steps are quick
_FIRST = 3


@pytest.fixture
def only_quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From when it is called on, a layer and gradients that are not computed the short way raise."""

    def refuse(*given: Any) -> Any:
        raise LongWayError

    def begin() -> None:
        monkeypatch.setattr(decided.Layers, "record", refuse)
        monkeypatch.setattr(recorded.RecordedCall, "gradients", refuse)

    return begin


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed the long way: layers, and their gradients."""
    found: list[str] = []

    def watch(kind: Any, name: str) -> None:
        original = getattr(kind, name)

        def call(*given: Any) -> Any:
            found.append(name)
            return original(*given)

        monkeypatch.setattr(kind, name, call)

    watch(decided.Layers, "record")
    watch(recorded.RecordedCall, "gradients")
    return found


def step(layer: Any, x: Any, grad: Any = None, wanted: Any = None) -> list[Any]:
    """The result of a layer, and gradients of the images and of all parameters."""
    x = x.detach().requires_grad_() if wanted is None else x
    wanted = [x, *layer.parameters()] if wanted is None else wanted
    y = layer(x)
    grad = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) % 7 - 3 if grad is None else grad
    return [y.detach(), *torch.autograd.grad(y, wanted, grad.to(y.dtype))]


def same(found: list[Any], expected: list[Any], tolerance: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.to(other.dtype), other, rtol=tolerance, atol=tolerance * float(other.abs().max())
        )


@contextmanager
def known(layer: Any, x: Any, grad: Any = None) -> Iterator[Any]:
    """`leanconv.torch.enable` lasts, and steps of a layer are as the ones before."""
    with leanconv.torch.enable() as enabled:
        for _ in range(_FIRST):
            step(layer, x, grad)
        yield enabled


def without(layer: Any, x: Any, **more: Any) -> list[Any]:
    with registration.suspended():
        return step(layer, x, **more)


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in CASES), *((name, True) for name in ("conv2d", "signals", "16 bits"))],
)
def test_the_fourth_step_is_quick(name: str, autocast: bool, device: HostDevice, only_quick: Any) -> None:
    made, shape = CASES[name]
    layer = made()
    x = torch.randn(shape).to(layer.weight.dtype)
    with torch.autocast("cpu", torch.float16, autocast):
        expected = without(layer, x)
        with known(layer, x) as enabled:
            only_quick()
            count = len(device.launches)
            for _ in range(2):
                same(step(layer, x.clone()), expected, 1e-2 if autocast or name == "16 bits" else 1e-4)
            assert len(device.launches) == count + 6
            assert [line.calls for line in enabled.report().lines] == [_FIRST + 2] * 3


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_what_pytorch_computes_beside_it(
    op: str, device: HostDevice, only_quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One operation alone is taken; PyTorch computes the others, and then the bias's gradient too."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if problem.op == op else 1e-6)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = without(layer, x)
    with known(layer, x) as enabled:
        only_quick()
        count = len(device.launches)
        same(step(layer, x), expected)
        assert len(device.launches) == count + 1
        assert [line.calls for line in enabled.report().lines] == [_FIRST + 1] * 3


def test_quick_gradients_ask_little(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of Python's and C's: in a network each function is one that the host has not at hand."""
    monkeypatch.setattr(device, "executable", lambda plan, roles: lambda *given: None)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    with known(layer, x):
        grad, wanted = torch.ones(2, 6, 7, 6), (True, True, True, False)
        with torch.no_grad():
            found = call_of(layer)
            quick, long = (
                calls_of(partial(way, grad, x, layer.weight, wanted)) for way in (found.quick, found.gradients)
            )
    assert quick[0] == "compute" and 2 * len(quick) < len(long) and len(quick) <= 31, quick


def call_of(layer: Any) -> Any:
    return deciding.current().layers.latest[id(layer.weight)].recorded_call  # type: ignore[union-attr]


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "as before": lambda grad: grad.clone(),
    "elsewhere in a unit of 16 bytes": lambda grad: torch.cat((grad.flatten()[:1], grad.flatten()))[1:].view(
        grad.shape
    ),
    "channels last": lambda grad: grad.contiguous(memory_format=torch.channels_last),
    "of one number": lambda grad: torch.ones(()).expand(grad.shape),
    "negated": lambda grad: torch._neg_view(grad),
    "zeros without memory": lambda grad: torch._efficientzerotensor(grad.shape),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_that_lie_otherwise(kind: str, device: HostDevice, long_ways: list[str]) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    grad = torch.randn(2, 6, 7, 6)
    other = GRADIENTS[kind](grad)
    with known(layer, x, grad):
        long_ways.clear()
        for given in (other, grad):
            same(step(layer, x, given), without(layer, x, grad=given))
    # what comes next is known by what was before, of which tensors that have other values than their memory are no part
    counts = {"as before": 0, "negated": 1, "zeros without memory": 1}
    assert long_ways.count("gradients") == counts.get(kind, 2)


@pytest.mark.parametrize("taken", [{"fprop", "dgrad", "wgrad"}, {"wgrad"}])
def test_negated_images(taken: set[str], device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie as others do, and are saved as they are where PyTorch computes the layer."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if problem.op in taken else 1e-6)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable():
        for given in (x, x, x, torch._neg_view(x), x, torch._neg_view(x)):
            same(step(layer, given), without(layer, given))


def test_odd_gradients_switch_nothing_on(device: HostDevice) -> None:
    """Such as negated ones, and those of zeros without memory: no kernel is registered that every gradient bears."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable() as enabled:
        for kind in ("as before", "negated", "zeros without memory", "as before"):
            step(layer, x, GRADIENTS[kind](torch.randn(2, 6, 7, 6)))
        assert not registration.asked_for_gradients()
        assert [line.calls for line in enabled.report().lines] == [4] * 3


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("steps", [1, 5])
def test_filters_that_move(steps: int, autocast: bool, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are decided anew where they are, and only there: steps after the first are quick again."""
    layer, x, decided_anew = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8), []
    decide = decided.Layers.decide
    monkeypatch.setattr(decided.Layers, "decide", lambda *given: decided_anew.append(1) or decide(*given))
    with leanconv.torch.enable():
        for _ in range(3):
            layer.weight.data = layer.weight.data * 1.1
            for _ in range(steps):
                with torch.autocast("cpu", torch.float16, autocast):  # which keeps casts
                    same(step(layer, x), without(layer, x), 1e-2 if autocast else 1e-4)
            assert steps == 1 or call_of(layer).quick is not None
    assert len(decided_anew) == 3 if steps > 1 else len(decided_anew) <= 3


@pytest.mark.parametrize("autocast", [False, True])
def test_images_and_biases_elsewhere(autocast: bool, device: HostDevice) -> None:
    """Kernels may read whole units of 16 bytes."""
    layer = nn.Conv2d(4, 6, 3)
    x = torch.randn(2, 4, 9, 8, dtype=torch.float16 if autocast else torch.float32)
    elsewhere = GRADIENTS["elsewhere in a unit of 16 bytes"]
    with leanconv.torch.enable():
        for moved in (False, True):
            if moved:
                layer.bias.data = elsewhere(layer.bias.data)
            for given in (*[x] * (_FIRST + 1), elsewhere(x), x):
                with torch.autocast("cpu", torch.float16, autocast):
                    same(step(layer, given), without(layer, given), 1e-2 if autocast else 1e-4)


def test_gradients_that_always_lie_otherwise_are_seldom_looked_at(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(patch.quick, "gradients", lambda *given: looks.append(given))
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable():
        for _ in range(20):
            step(layer, x)
        assert len(looks) == 8
        looks.clear()
        layer.weight.data = layer.weight.data.clone()
        step(layer, x)
    assert not looks, "the next step decides anew"


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.transpose(2, 3)),
    "negated": lambda layer: setattr(layer.weight, "data", torch._neg_view(layer.weight.data)),
    "fewer": lambda layer: [setattr(each, "data", each.data[:4]) for each in layer.parameters()],
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", VIEWS)
def test_filters_that_become_another_view_of_their_memory(kind: str, autocast: bool, device: HostDevice) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable(), torch.autocast("cpu", torch.float16, autocast):
        for _ in range(_FIRST + 1):
            step(layer, x)
        VIEWS[kind](layer)
        for _ in range(_FIRST + 1):
            same(step(layer, x), without(layer, x), 1e-2 if autocast else 1e-4)


def test_other_gradients_are_wanted(device: HostDevice, long_ways: list[str]) -> None:
    """Of images alone, of parameters alone, and of all again."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable():
        for trains in (True, True, True, False, True):
            layer.requires_grad_(trains)
            given = x.clone().requires_grad_()
            wanted = [given, *layer.parameters()] if trains else [given]
            long_ways.clear()
            same(step(layer, given, wanted=wanted), without(layer, given, wanted=wanted))
        assert not long_ways.count("gradients") or "record" in long_ways
        layer, given = nn.Conv2d(4, 6, 3), x.clone().requires_grad_()
        for trains in (False, False, False, True, False, True):
            layer.bias.requires_grad_(trains)
            wanted = [given, *[each for each in layer.parameters() if each.requires_grad]]
            same(step(layer, given, wanted=wanted), without(layer, given, wanted=wanted))


def test_between_both_passes(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides may change between a layer and its gradients."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    wanted, grad = [x, *layer.parameters()], torch.randn(2, 6, 7, 6)
    expected = without(layer, x, grad=grad, wanted=wanted)[1:]
    with known(layer, x) as enabled:
        count = len(device.launches)
        y, kept = layer(x), len(device.launches)
        assert kept == count + 1
        with registration.suspended():
            same([*torch.autograd.grad(y, wanted, grad)], expected)
        assert len(device.launches) == kept
        y = layer(x)
        with leanconv.torch.enable(include=lambda problem: False):
            count = len(device.launches)
            same([*torch.autograd.grad(y, wanted, grad)], expected)
        assert len(device.launches) == count
        y = layer(x)
        allowed = torch.backends.cudnn.allow_tf32
        with torch.backends.cudnn.flags(allow_tf32=not allowed):
            same([*torch.autograd.grad(y, wanted, grad)], expected)
        y = layer(x)
        enabled.disable()
        count = len(device.launches)
        same([*torch.autograd.grad(y, wanted, grad)], expected)
        assert len(device.launches) == count


def test_what_decides_may_go_while_it_is_asked(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, in the midst of a gradient."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = without(layer, x)
    with leanconv.torch.enable() as enabled:
        monkeypatch.setattr(recorded, "is_lazy", lambda tensor: enabled.disable() is not None)
        same(step(layer, x), expected)
    monkeypatch.setattr(deciding, "active", SwitchedOff())
    assert deciding.current() is None


class SwitchedOff(list[Any]):
    """A list that was not empty a moment ago."""

    def __len__(self) -> int:
        return 1


def test_gradients_of_gradients_are_pytorchs(device: HostDevice) -> None:
    layer, x = nn.Conv2d(4, 6, 3).double(), torch.randn(2, 4, 5, 5, dtype=torch.double, requires_grad=True)
    single = nn.Conv2d(4, 6, 3)
    with leanconv.torch.enable():
        for _ in range(_FIRST):
            step(single, x.detach().float())
        assert torch.autograd.gradgradcheck(layer, x)
        given = x.detach().float().requires_grad_()
        (dx,) = torch.autograd.grad(single(given).square().sum(), given, create_graph=True)
        (found,) = torch.autograd.grad(dx.square().sum(), given)
        with registration.suspended():
            (dx,) = torch.autograd.grad(single(given).square().sum(), given, create_graph=True)
            (expected,) = torch.autograd.grad(dx.square().sum(), given)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        grad = torch.randn(2, 6, 3, 3)  # which needs no gradient itself
        for created in (False, True):
            (dx,) = torch.autograd.grad(single(given), given, grad, create_graph=created)
            assert dx.requires_grad is created
        (found,) = torch.autograd.grad(dx.square().sum(), single.weight)
        with registration.suspended():
            (dx,) = torch.autograd.grad(single(given), given, grad, create_graph=True)
            (expected,) = torch.autograd.grad(dx.square().sum(), single.weight)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        y = single(given)
        many = torch.randn(3, *y.shape)
        (batched,) = torch.autograd.grad(y, given, many, is_grads_batched=True)
        with registration.suspended():
            (expected,) = torch.autograd.grad(single(given), given, many, is_grads_batched=True)
        torch.testing.assert_close(batched, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["a capture", "another GPU", "no context"])
def test_where_the_long_way_decides(
    what: str, device: HostDevice, long_ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = without(layer, x)
    with known(layer, x) as enabled:
        long_ways.clear()
        count = len(device.launches)
        with monkeypatch.context() as patched:
            if what == "a capture":
                set_capturing(patched, True)
                patched.setattr(switches, "capturing", lambda: True)
            elif what == "another GPU":
                patched.setattr(quick, "_current_device", lambda: 1)
            else:
                patched.setattr(device, "without_context", True)
            same(step(layer, x), expected)
        assert "gradients" in long_ways and len(device.launches) == count + 3
        if what != "a capture":  # what a graph trains is counted in lines of its own
            assert [line.calls for line in enabled.report().lines] == [_FIRST + 1] * 3


def test_a_step_drops_packed_filters(device: HostDevice, packing: None) -> None:
    """Optimisers may change them through ``.data``, which PyTorch does not count."""
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 5)
    with known(layer, x) as enabled:
        assert call_of(layer).quick is not None
        for _ in range(3):
            with torch.no_grad():
                for _ in range(3):
                    layer(x)
            assert enabled.report().packed_bytes
            step(layer, x)
            layer.weight.data.mul_(2)
            with torch.no_grad(), registration.suspended():
                expected = layer(x)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_a_precision_that_changes_between_both_passes_is_asked(device: HostDevice, long_ways: list[str]) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    with known(layer, x):
        y, allowed = layer(x), torch.backends.cudnn.allow_tf32
        long_ways.clear()
        with torch.backends.cudnn.flags(allow_tf32=not allowed):
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        assert long_ways == ["gradients"]


def test_frozen_filters_may_be_another_choice(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their gradient alone was taken, nothing is recorded any more."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if problem.op == "wgrad" else 1e-6)
    layer, x = nn.Conv2d(4, 6, 3, bias=False), torch.randn(2, 4, 9, 8, requires_grad=True)
    with leanconv.torch.enable():
        for trains in (True, True, True, False, False, True):
            layer.weight.requires_grad_(trains)
            y = layer(x)
            assert (type(y.grad_fn).__name__ == "RecordedBackward") is trains
            y.sum().backward()


def test_a_checkpoint_is_pytorchs(device: HostDevice) -> None:
    """Its recomputation ends where the last tensor is saved."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    expected = without(layer, x, wanted=[x, *layer.parameters()])
    with leanconv.torch.enable():
        for checkpoint in (False, False, False, True, False):
            call = partial(torch.utils.checkpoint.checkpoint, layer, use_reentrant=False) if checkpoint else layer
            y = call(x)
            assert (type(y.grad_fn).__name__ == "RecordedBackward") is not checkpoint
            grad = torch.arange(y.numel(), dtype=y.dtype).view(y.shape) % 7 - 3
            same([y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)], expected)


def test_nothing_is_kept(device: HostDevice) -> None:
    """No tensor of a step, once it is gone."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable() as enabled:
        for _ in range(_FIRST + 1):
            step(layer, x)
        kept, images, filters = call_of(layer), weakref.ref(x), weakref.ref(layer.weight)
        assert kept.quick is not None
        del x, layer
        gc.collect()
        assert images() is None and filters() is None and not enabled.layers.latest
