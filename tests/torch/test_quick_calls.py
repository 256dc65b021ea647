"""Calls as the one before under `enable`: they ask nothing but one guard, and see what the guard does not."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest

from tests.calls import calls_of
from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.call import bind  # noqa: E402
from leanconv.torch import decided, patch, quick, registration  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from leanconv.torch.layers import tf32_allowed  # noqa: E402
from tests.torch.test_patched_functions import close, pytorch  # noqa: E402
from tests.torch.versions import before  # noqa: E402

nn, F = torch.nn, torch.nn.functional


class LongWayError(Exception):
    """A call has taken the long way."""


@pytest.fixture
def only_quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From when it is called on, what is no quick call raises."""

    def refuse(*given: Any) -> Any:
        raise LongWayError

    def begin() -> None:
        for name in ("compute", "record", "decide", "anew"):
            monkeypatch.setattr(decided.Layers, name, refuse)

    return begin


CASES = {
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 9, 8)),
    "without a bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 9, 8)),
    "signals": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 12)),
    "volumes": (lambda: nn.Conv3d(4, 6, 3), (2, 4, 5, 6, 4)),
    "volumes of one slice": (lambda: nn.Conv3d(4, 6, (1, 3, 3)), (2, 4, 1, 6, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 4)),
    "16 bits": (lambda: nn.Conv2d(8, 8, 3, bias=False).half(), (2, 8, 9, 8)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in CASES), *((name, True) for name in ("conv2d", "signals", "16 bits"))],
)
@pytest.mark.parametrize("way", ["taken", "left", "recorded"])
def test_the_third_call_is_quick(
    name: str, way: str, autocast: bool, device: HostDevice, only_quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is taken without a gradient, and of what is left with one and without."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if way == "taken" else 1e-6)
    made, shape = CASES[name]
    layer = made()
    x = torch.randn(shape).to(layer.weight.dtype)
    expected = layer(x)
    half = torch.autocast("cpu", torch.float16, autocast)
    with leanconv.torch.enable() as enabled, half, torch.set_grad_enabled(way == "recorded"):
        layer(x)
        layer(x)
        only_quick()
        for _ in range(2):
            y = layer(x)
            assert not autocast or y.dtype is torch.float16
            torch.testing.assert_close(y.to(expected.dtype), expected, rtol=1e-2, atol=1e-2)
            assert y.requires_grad is (way == "recorded") and y.stride() == expected.stride()
        assert {line.calls for line in enabled.report().lines} == {4}
        assert bool(device.launches) is (way == "taken")


@pytest.mark.parametrize(("way", "most"), [("left", 17), ("recorded", 21), ("taken", 17)])
def test_a_quick_call_asks_little(
    way: str, most: int, device: HostDevice, only_quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a network each function that the host calls is one that it has not at hand: calls of Python's and C's."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12 if way == "taken" else 1e-6)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable(), torch.set_grad_enabled(way == "recorded"):
        for _ in range(3):
            layer(x)
        calls = calls_of(partial(layer, x))
    for inside in "run", "allocate":  # what a launch and an allocation do inside is theirs
        if inside in calls:
            calls = calls[: calls.index(inside)]
    assert len(calls) <= most + before("2.10"), calls


def test_what_is_known_goes_with_its_patch_and_its_filters(device: HostDevice) -> None:
    """After `disable`, while others decide, and once the filters are freed; a function that somebody has kept too."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad():
        with leanconv.torch.enable() as first:
            convolve = F.conv2d
            for _ in range(4):
                convolve(x, layer.weight, layer.bias)
            count = len(device.launches)
            with registration.suspended():
                convolve(x, layer.weight, layer.bias)
            with leanconv.torch.enable(include=lambda problem: False) as second:
                for _ in range(3):
                    convolve(x, layer.weight, layer.bias)
            assert len(device.launches) == count and second.report().left[0].calls == 3
            convolve(x, layer.weight, layer.bias)
            line = first.report().taken[0]
            assert len(device.launches) == count + 1 == line.calls == line.calls == copy.deepcopy(line).calls
            assert len(first.layers.latest) == 1
            layer.weight = nn.Parameter(layer.weight.clone())
            gc.collect()
            assert not first.layers.latest
            convolve(x, layer.weight, layer.bias)
        count = len(device.launches)
        close(convolve(x, layer.weight, layer.bias), pytorch(x, layer.weight, layer.bias))
        assert len(device.launches) == count


@pytest.mark.parametrize("bias", [False, True])
def test_of_what_is_left_the_filters_are_not_asked(
    bias: bool, device: HostDevice, only_quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's convolution asks them itself: they may change in any way."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
    alike, asked = decided.alike, []
    monkeypatch.setattr(decided, "alike", lambda *given: asked.append(given) or alike(*given))
    layer, x = nn.Conv2d(4, 6, 3, bias=bias), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable():
        layer(x)
        assert [len(each) for each in asked] == [1] and asked[0][0] is x
        only_quick()
        for change in (
            lambda w: w[:, :, :2], lambda w: w.transpose(2, 3), lambda w: torch._neg_view(w), lambda w: w.double(),
        ):  # fmt: skip
            layer.weight.data = change(layer.weight.data)
            if layer.weight.dtype is not x.dtype:
                with pytest.raises(RuntimeError):
                    layer(x)
            else:
                close(layer(x), pytorch(x, layer.weight.clone(), layer.bias))


@pytest.mark.parametrize("kind", ["NCHW", "NHWC", "NDHWC", "signal", "packed", "autocast", "outside of graphs"])
def test_images_that_are_copied_first_are_taken_quickly(
    kind: str, device: HostDevice, only_quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the channels of larger images, which no kernel reads in place, as those of ShuffleNet and DenseNet."""
    short = Decision("", "it takes longer", 9.0 * CYCLES_PER_US, 8.0 * CYCLES_PER_US, "it")
    decision = short if kind == "outside of graphs" else Decision("it", "it is quicker", 1.0, 15 * CYCLES_PER_US)
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: decision)
    if kind == "packed":
        choose = bind.choose
        monkeypatch.setattr(
            bind, "choose", lambda problem, target, _, limit, kept: choose(problem, target, "winograd1d", limit, kept)
        )
    layers = {"NDHWC": nn.Conv3d(4, 6, 3), "signal": nn.Conv1d(4, 6, 3)}
    layer: Any = layers.get(kind, nn.Conv2d(4, 6, 3))
    axes, autocast = len(layer.kernel_size), kind == "autocast"
    form = {"NHWC": torch.channels_last, "NDHWC": torch.channels_last_3d}.get(kind, torch.contiguous_format)
    whole = [torch.randn(2, 8, *(5, 9, 8)[3 - axes :]).contiguous(memory_format=form) for _ in range(3)]
    whole = [each.half() for each in whole] if autocast else whole
    layer = layer.to(memory_format=form)
    with torch.no_grad(), leanconv.torch.enable(layer) as enabled, torch.autocast("cpu", torch.float16, autocast):
        with registration.suspended():
            expected = [layer(each[:, 4:]) for each in whole]
        for _ in range(4):
            layer(whole[0][:, 4:])
        only_quick()
        count = len(device.launches)
        for each, right in zip(whole, expected, strict=True):
            y = layer(each[:, 4:])
            torch.testing.assert_close(y, right, rtol=1e-2, atol=1e-2)
            assert y.stride() == right.stride()
        assert len(device.launches) == count + 3
        assert [line.calls for line in enabled.report().lines] == [7]


def test_images_that_are_copied_are_read_anew_where_they_lie_otherwise(device: HostDevice) -> None:
    """Negated ones, others of the same sizes, and those that begin at another place of a unit of 16 bytes."""
    layer, whole = nn.Conv2d(4, 6, 3), torch.randn(2, 9, 9, 8).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), leanconv.torch.enable(layer):
        for first in (4, 4, 4, 4, 1, 2, 5, 4, 5, 3):
            for x in (whole[:, first : first + 4], torch._neg_view(whole[:, first : first + 4])):
                close(layer(x), pytorch(x.clone(), layer.weight, layer.bias))
                close(layer(x), pytorch(x.clone(), layer.weight, layer.bias))
    assert len(device.launches) == 40


def test_packed_filters_are_read_by_the_fourth(device: HostDevice, packing: None, only_quick: Any) -> None:
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 5)
    with torch.no_grad(), leanconv.torch.enable() as enabled:
        expected = pytorch(x, layer.weight, layer.bias)
        for _ in range(3):
            layer(x)
        count = device.prepared
        only_quick()
        close(layer(x), expected)
        close(layer(x.clone()), expected)
        assert device.prepared == count and enabled.report().lines[0].calls == 5


CHANGES = {
    "in place": lambda layer: layer.weight.add_(1),
    "other memory": lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
    "bias in other memory": lambda layer: setattr(layer.bias, "data", layer.bias.data * 2),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
    "another stride": lambda layer: setattr(layer, "stride", (2, 1)),
    "padding": lambda layer: setattr(layer, "padding", (1, 1)),
    "padding mode": lambda layer: (setattr(layer, "padding_mode", "circular"), setattr(layer, "padding", (1, 1)),
                                   setattr(layer, "_reversed_padding_repeated_twice", [1, 1, 1, 1])),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "a parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer),
    "a hook": lambda layer: layer.register_forward_hook(lambda module, given, y: 2 * y),
}  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change: str, packed: bool, device: HostDevice, request: pytest.FixtureRequest) -> None:
    if packed:
        request.getfixturevalue("packing")
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 5)
    with torch.no_grad(), leanconv.torch.enable():
        for _ in range(4):
            layer(x)
        CHANGES[change](layer)
        with registration.suspended():
            expected = layer(x)
        for _ in range(4):
            close(layer(x), expected)


def test_images_anywhere_in_memory(device: HostDevice) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    shifted = torch.randn(x.numel() + 1)[1:].view(x.shape)
    with torch.no_grad(), leanconv.torch.enable():
        for given in (x, x, x, shifted, x, shifted, shifted, x.clone()):
            close(layer(given), pytorch(given, layer.weight, layer.bias))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_default_device_is_no_mode_to_a_convolution(
    left: bool, grad: bool, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of `torch.set_default_device`, and ``with torch.device``; other modes see PyTorch's function."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6 if left else 1e12)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    expected = layer(x)
    seen: list[str] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    with leanconv.torch.enable() as enabled, torch.set_grad_enabled(grad):
        with monkeypatch.context() as patched:
            patched.setattr(registration, "_convolution", lambda *given: pytest.fail("the dispatcher was asked"))
            for _ in range(3):
                with torch.device("cpu"):
                    y = layer(x)
                close(y, expected)
                assert y.requires_grad is grad
        assert enabled.report().lines and len(device.launches) == (0 if left else 3)
        with torch.device("cpu"), Mode():
            layer(x)
    assert "conv2d" in seen


def test_a_gradient_is_recorded_after_calls_without(device: HostDevice) -> None:
    """No guard of PyTorch's sees whether gradients are enabled."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable():
        for grad in (False, False, False, True, False, True, True, False):
            with torch.set_grad_enabled(grad):
                y = layer(x)
                assert y.requires_grad is grad
        layer.requires_grad_(False)
        assert not layer(x).requires_grad and layer(x.clone().requires_grad_()).requires_grad


def test_tf32_and_autocast_are_asked(device: HostDevice) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable() as enabled:
        for _ in range(3):
            layer(x)
        with torch.autocast("cpu", torch.float16):
            for _ in range(3):
                assert layer(x).dtype is torch.float16
        tf32 = tf32_allowed()
        with torch.backends.cudnn.flags(allow_tf32=not tf32):
            layer(x)
            assert enabled.layers.latest[id(layer.weight)].tf32 is not tf32


def test_tf32_of_recurrent_layers_is_another_switch(device: HostDevice, only_quick: Any) -> None:
    """Where the two differ PyTorch's switch of before raises."""
    rnn = getattr(torch.backends.cudnn, "rnn", None)
    if rnn is None:
        pytest.skip("this PyTorch has one switch for both")
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    before = rnn.fp32_precision
    with torch.no_grad(), leanconv.torch.enable() as enabled:
        for _ in range(3):
            expected = layer(x)
        known = enabled.layers.latest[id(layer.weight)]
        assert type(known.word[1]) is bool
        try:
            rnn.fp32_precision = "ieee" if tf32_allowed() else "tf32"
            layer(x)
            layer(x)
            only_quick()
            close(layer(x), expected)
            assert enabled.layers.latest[id(layer.weight)] is known and type(known.word[1]) is str
        finally:
            rnn.fp32_precision = before


def test_packed_filters_are_freed(device: HostDevice, packing: None) -> None:
    """By `refresh`, and with the parameter: a quick call keeps neither."""
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 5)
    with torch.no_grad(), leanconv.torch.enable() as enabled:
        for turn in range(2):
            for _ in range(4):
                layer(x)
            ((_, packed),) = enabled.layers._packed.values()
            ((_, kept),) = packed._weights._prepared.items()
            of_layer, memory = weakref.ref(kept), weakref.ref(layer.weight)
            del packed, kept
            if turn:
                layer.weight = nn.Parameter(layer.weight.clone())
                gc.collect()
                assert memory() is None
            else:
                enabled.refresh()
            assert of_layer() is None and not enabled.report().packed_bytes
            close(layer(x), pytorch(x, layer.weight, layer.bias))


def test_a_thread_without_a_context(device: HostDevice) -> None:
    """A quick call takes the GPU's context to be current; the long way makes it so."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable() as enabled:
        for device.without_context in (False, False, False, True, True, False):
            close(layer(x), pytorch(x, layer.weight, layer.bias))
        assert enabled.report().lines[0].calls == len(device.launches) == 6


def test_another_gpu_is_current(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable():
        for current in (0, 0, 0, 1, 0):
            monkeypatch.setattr(quick, "_current_device", lambda current=current: current)
            device.without_context = current == 1
            close(layer(x), pytorch(x, layer.weight, layer.bias))


def test_packed_filters_on_another_stream(device: HostDevice, packing: None) -> None:
    """PyTorch's allocator is told of each stream that reads them."""
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 5)
    with torch.no_grad(), leanconv.torch.enable():
        for stream in (0x51, 0x51, 0x51, 0x51, 0x77, 0x77, 0x51):
            device.stream = stream
            close(layer(x), pytorch(x, layer.weight, layer.bias))
            assert device.launches[-1][0] == stream
        assert [stream for stream, _ in device.used].count(0x77) == 1


def test_a_capture_packs_what_it_finds(device: HostDevice, packing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 5)
    with torch.no_grad(), leanconv.torch.enable():
        for _ in range(4):
            layer(x)
        count = device.prepared
        with monkeypatch.context() as captured:
            set_capturing(captured, True)
            layer(x)
            assert device.prepared == count + 1
        close(layer(x), pytorch(x, layer.weight, layer.bias))
        assert device.prepared == count + 1


def test_a_checkpoint_is_pytorchs(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recomputation ends where the last tensor is saved."""
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e-6)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    with leanconv.torch.enable():
        for checkpoint in (False, False, False, True, False):
            if checkpoint:
                y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                y = layer(x)
            for one, other in zip(
                torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), expected, strict=True
            ):
                close(one, other)


def test_threads_call_one_layer(device: HostDevice, packing: None) -> None:
    """While another thread changes the filters, each result is one of the filters before or after."""
    layer, x = nn.Conv2d(32, 64, 3), torch.randn(1, 32, 6, 6)
    wrong: list[Any] = []
    first, second = layer.weight.detach().clone(), layer.weight.detach() * 2
    possible = [pytorch(x, each, layer.bias.detach()) for each in (first, second)]

    def call() -> None:
        with torch.no_grad():
            for _ in range(12):
                y = layer(x)
                if not any(torch.allclose(y, each, rtol=1e-4, atol=1e-4) for each in possible):
                    wrong.append(y)

    with torch.no_grad(), leanconv.torch.enable() as enabled:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        # as a whole, so that its memory is never half of both; and it stays, as on a GPU until the stream has read it
        kept = [layer.weight.data]
        for turn in range(6):
            kept.append((second, first)[turn % 2].clone())
            layer.weight.data = kept[-1]
            enabled.refresh()
        for thread in threads:
            thread.join()
        expected = pytorch(x, layer.weight, layer.bias)
        for _ in range(4):
            close(layer(x), expected)
    assert not wrong


@pytest.mark.parametrize("bias", [True, False])
def test_images_in_autocasts_type_anywhere_in_memory(device: Any, monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12)
    layer, x = torch.nn.Conv2d(4, 6, 3, bias=bias), torch.randn(2, 4, 9, 8).half()
    shifted = torch.empty(x.numel() + 1, dtype=torch.float16)[1:].view(x.shape)
    shifted.copy_(x)
    with torch.no_grad():
        expected = torch.nn.functional.conv2d(x, layer.weight.half(), layer.bias.half() if bias else None)
        with leanconv.torch.enable(), torch.autocast("cpu", torch.float16):
            for given in (x, x, x, x, shifted, x, shifted, shifted, x.clone()):
                torch.testing.assert_close(layer(given), expected, rtol=1e-2, atol=1e-2)
                assert device.launches[-1][1]["x"] % 16 == 0
