"""Layers that are left to PyTorch in CUDA graphs, and taken where the GPU waits for the host."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.call import bind  # noqa: E402
from leanconv.torch import decided, patch, registration, switches  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from tests.torch.test_patched_functions import close, launched, pytorch  # noqa: E402

nn = torch.nn
LEFT = Decision("", "it takes longer", 9.0 * CYCLES_PER_US, 8.0 * CYCLES_PER_US, "it")


@pytest.fixture(autouse=True)
def _takes_longer(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: LEFT)


@pytest.mark.parametrize("kind", ["image", "signal", "autocast", "packed"])
def test_short_layers_are_taken_outside_of_graphs_alone(
    kind: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the GPU waits for the host, which launches them sooner; a compiled graph asks the dispatcher."""
    autocast = kind == "autocast"
    layer, shape = (nn.Conv1d(4, 6, 3), (2, 4, 9)) if kind == "signal" else (nn.Conv2d(4, 6, 3), (2, 4, 9, 8))
    if packs := kind == "packed":  # once, in a launch of its own
        choose = bind.choose
        monkeypatch.setattr(
            bind, "choose", lambda problem, target, _, limit, kept: choose(problem, target, "winograd1d", limit, kept)
        )
    x = torch.randn(shape, dtype=torch.float16 if autocast else torch.float32)
    with leanconv.torch.enable(layer) as enabled, torch.autocast("cpu", torch.float16, autocast):
        with registration.suspended(), torch.no_grad():
            expected = layer(x)

        call = partial(launched, device, layer, x, expected)
        with torch.no_grad():
            assert call(4) == 4 + packs and bool(enabled.report().packed_bytes) is (kind in ("packed", "autocast"))
            with monkeypatch.context() as captured:
                set_capturing(captured, True)
                assert call(3) == 0
            assert call(2) == 2
            if not autocast:
                before = len(device.launches)
                torch.conv1d(x, layer.weight) if kind == "signal" else torch.conv2d(x, layer.weight)
                assert len(device.launches) == before
        assert call(2) == 0, "its gradient is recorded"
        layer(x).sum().backward()
        assert len(device.launches) == 6 + packs
        calls = Counter[str]()
        for line in enabled.report().lines:
            calls[line.runs] += line.calls * (line.when == "forward")
    assert calls == {"leanconv: it": 6, "PyTorch": 6 + (not autocast)}


@pytest.mark.parametrize("autocast", [False, True])
def test_pytorchs_first_call_is_before_a_capture(
    autocast: bool, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It searches among cuDNN's plans then, which it cannot in a capture."""
    convolution, searched = switches.left_to_pytorch, list[Any]()
    for module in decided, switches:
        monkeypatch.setattr(
            module, "left_to_pytorch", lambda x, *given: searched.append((x.shape, x.dtype)) or convolution(x, *given)
        )
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    once = [(x.shape, torch.float16 if autocast else torch.float32)]
    with torch.no_grad(), leanconv.torch.enable(), torch.autocast("cpu", torch.float16, autocast):
        for _ in range(3):
            layer(x)
            nn.functional.conv2d(x, layer.weight.clone(), layer.bias)  # as of weight_norm: others in each call
        assert searched == once, "once for all filters of a shape"
        with monkeypatch.context() as captured:
            set_capturing(captured, True)
            layer(x)
            layer(x[:1])
        assert len(searched) == 3


def test_a_first_call_in_a_graph_leaves_short_layers(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    other = torch.randn(2, 8, 9, 8)[:, ::2]
    with torch.no_grad(), leanconv.torch.enable(layer), monkeypatch.context() as captured:
        set_capturing(captured, True)
        for _ in range(3):
            close(layer(x), pytorch(x, layer.weight, layer.bias))
        close(layer(other), pytorch(other, layer.weight, layer.bias))
        assert not device.launches
    with torch.no_grad(), leanconv.torch.enable(layer):
        close(layer(other), pytorch(other, layer.weight, layer.bias))
        assert len(device.launches) == 1, "outside of one they are taken, also where images are copied first"


def test_calls_after_a_graph_are_quick(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that no graph was before."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable(layer):
        with monkeypatch.context() as captured:
            set_capturing(captured, True)
            for _ in range(4):
                layer(x)
        for count in (1, 2, 3):
            close(layer(x), pytorch(x, layer.weight, layer.bias))
            assert len(device.launches) == count
        for name in ("compute", "record", "decide", "anew"):
            monkeypatch.setattr(decided.Layers, name, lambda *given: pytest.fail("the long way"))
        close(layer(x), pytorch(x, layer.weight, layer.bias))


@pytest.mark.parametrize("way", ["a graph", "a gradient", "the dispatcher"])
def test_nothing_is_compiled_for_what_is_left(way: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that trains would wait for kernels that it never runs, which `warm_up` does not compile either."""
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with leanconv.torch.enable(layer), torch.set_grad_enabled(way == "a gradient"):
        for _ in range(3):
            with monkeypatch.context() as captured:
                set_capturing(captured, way == "a graph")
                y = torch.conv2d(x, layer.weight) if way == "the dispatcher" else layer(x)
            if way == "a gradient":
                y.sum().backward()
        assert not device.executables
        with torch.no_grad():
            close(layer(x), pytorch(x, layer.weight, layer.bias))
        assert device.executables == len(device.launches) == 1


def test_a_report_that_is_full_changes_nothing(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """All further calls are of one line, those that leanconv computes and those that are left."""
    monkeypatch.setattr(patch, "_MOST_LINES", 0)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    with torch.no_grad(), leanconv.torch.enable(layer) as enabled:
        layer(x)
        set_capturing(monkeypatch, True)
        for _ in range(4):
            close(layer(x), pytorch(x, layer.weight, layer.bias))
        assert len(device.launches) == 1
        (line,) = enabled.report().lines
        assert line.calls == 5
