"""Training steps that a CUDA graph captures, between those that Python launches."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.stand_ins import HostDevice, set_capturing

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.call import bind  # noqa: E402
from leanconv.torch import decided, patch, quick  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from tests.torch.test_patched_functions import close  # noqa: E402

checkpoint, nn = torch.utils.checkpoint.checkpoint, torch.nn
#: What leanconv takes nowhere, where Python is not asked, and everywhere.
LEFT = Decision("", "it takes longer", 20 * CYCLES_PER_US, 10 * CYCLES_PER_US)
LITTLE = Decision("it", "", 10 * CYCLES_PER_US, 20 * CYCLES_PER_US)
MUCH = Decision("it", "", 10 * CYCLES_PER_US, 2000 * CYCLES_PER_US)


@contextmanager
def capture(monkeypatch: pytest.MonkeyPatch, is_capturing: bool = True) -> Iterator[None]:
    with monkeypatch.context() as capturing:
        set_capturing(capturing, is_capturing)
        yield


def decide(monkeypatch: pytest.MonkeyPatch, fprop: Decision, dgrad: Decision, wgrad: Decision) -> None:
    found = {"fprop": fprop, "dgrad": dgrad, "wgrad": wgrad}
    monkeypatch.setattr(patch.Patch, "decide", lambda self, weight, problem, index: found[problem.op])


def test_a_captured_step_takes_what_python_makes_too_slow(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph has no Python: there a layer is taken whatever it saves, before, between and after eager steps."""
    decide(monkeypatch, LITTLE, LITTLE, LITTLE)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)

    def gradients() -> Any:
        return torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])

    expected = gradients()
    with leanconv.torch.enable(layer) as patched:
        for captured in (True, False, False, False, True, True, False):
            before = len(device.launches)
            with capture(monkeypatch, captured):
                for one, other in zip(gradients(), expected, strict=True):
                    close(one, other)
            assert len(device.launches) - before == 3 * captured, "forward, and both gradients"
        calls = Counter[str]()
        for line in patched.report().lines:
            calls[line.runs] += line.calls
    assert calls == {"leanconv: it": 9, "PyTorch": 12}


def test_a_captured_call_is_not_taken_for_an_eager_one(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer that is called in many ways, as of adversarial steps, few calls are looked at."""
    decide(monkeypatch, LEFT, MUCH, LEFT)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)
    trained = x.clone().requires_grad_()
    with leanconv.torch.enable(layer):
        for turn in range(7):
            layer(trained if turn % 2 else x).sum().backward()
        with capture(monkeypatch):
            layer(trained).sum().backward()
        count = len(device.launches)
        layer(x).sum().backward()
        for _ in range(3):
            layer(trained).sum().backward()
    assert len(device.launches) == count + 3, "the gradient of the images"


def test_filters_are_frozen_and_trained_again(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, LEFT, LEFT, LITTLE)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    with leanconv.torch.enable(layer) as patched:
        for is_trained in (False, True, False, True):
            layer.weight.requires_grad_(is_trained)
            for _ in range(3):
                layer(x).sum().backward()
            with monkeypatch.context() as quickly:
                quickly.setattr(decided.Layers, "record", lambda *given: pytest.fail("the long way"))
                layer(x).sum().backward()
            assert not device.launches
            with capture(monkeypatch):
                for _ in range(3):
                    layer(x).sum().backward()
            assert len(device.launches) == 3 * is_trained
            device.launches.clear()
        calls = Counter[Any]()
        for line in patched.report().lines:
            calls[line.when, line.runs] += line.calls
    assert calls == {
        ("forward", "PyTorch"): 28, ("backward, input", "PyTorch"): 28,
        ("backward, filters", "PyTorch"): 8, ("backward, filters", "leanconv: it"): 6,
    }  # fmt: skip


@pytest.mark.parametrize("decision", [LITTLE, MUCH])
def test_a_graph_casts_once(decision: Decision, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images, filters and bias under autocast; what is decided needs no values."""
    decide(monkeypatch, decision, decision, decision)
    lowered, cast = decided.lowered, list[Any]()
    monkeypatch.setattr(decided, "lowered", lambda tensor, dtype: cast.append(tensor.shape) or lowered(tensor, dtype))
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    with leanconv.torch.enable(layer), torch.autocast("cpu", torch.float16):
        for _ in range(3):
            layer(x).float().sum().backward()
        for _ in range(3):
            cast.clear()
            with capture(monkeypatch):
                layer(x).float().sum().backward()
            assert len(cast) == 3


@pytest.mark.parametrize("kind", ["outside of graphs", "packed"])
def test_a_graph_copies_images_once(kind: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quick call makes a copy that the long way makes again."""
    short = Decision("", "it takes longer", 9.0 * CYCLES_PER_US, 8.0 * CYCLES_PER_US, "it")
    decision = short if kind == "outside of graphs" else MUCH
    decide(monkeypatch, decision, decision, decision)
    if kind == "packed":
        choose = bind.choose
        monkeypatch.setattr(
            bind, "choose", lambda problem, target, _, limit, kept: choose(problem, target, "winograd1d", limit, kept)
        )
    contiguous, copies = quick._contiguous, list[Any]()
    monkeypatch.setattr(quick, "_contiguous", lambda x, **form: copies.append(x) or contiguous(x, **form))
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 8, 9, 8)[:, 4:]
    with torch.no_grad(), leanconv.torch.enable():
        for _ in range(5):
            layer(x)
        assert copies
        copies.clear()
        with capture(monkeypatch):
            layer(x)
        assert not copies


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("decision", [LEFT, LITTLE, MUCH])
@pytest.mark.parametrize("way", ["module", "dispatcher", "checkpoint"])
def test_an_evaluation_after_replays_has_todays_filters(
    way: str, decision: Decision, autocast: bool, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch does not count what a replay changes; so nothing is kept of filters that a captured step trains."""
    decide(monkeypatch, MUCH, decision, decision)
    choose = bind.choose

    def packs(problem: Any, target: Any, asked: str, *given: Any) -> Any:
        return choose(problem, target, "winograd1d" if (problem.op, autocast) == ("fprop", False) else asked, *given)

    monkeypatch.setattr(bind, "choose", packs)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8)

    def step() -> None:
        with torch.autocast("cpu", torch.float16, autocast):  # which keeps its casts itself as long as it is on
            if way == "checkpoint":
                y = checkpoint(layer, x, use_reentrant=False)
            else:
                y = layer(x) if way == "module" else torch.conv2d(x, layer.weight, layer.bias)
        y.float().sum().backward()

    def evaluate(image: Any) -> None:
        with torch.no_grad():
            for _ in range(3):
                with torch.autocast("cpu", torch.float16, autocast):
                    y = layer(image)
            expected = nn.functional.conv2d(image.double(), layer.weight.double(), layer.bias.double())
            torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=2e-2)

    with leanconv.torch.enable(layer) as patched:
        evaluate(x)
        assert patched.report().packed_bytes
        for _ in range(3):
            step()
        with capture(monkeypatch):
            step()
        evaluate(x)
        for turn in range(3):
            layer.weight.data.normal_()  # as a replay
            layer.bias.data.normal_()
            evaluate(x)
            evaluate(x[: 1 + turn % 2].clone())
        assert not patched.report().packed_bytes
    other = nn.Conv2d(4, 6, 3)
    with leanconv.torch.enable(other) as patched, torch.no_grad():
        for _ in range(3):
            with torch.autocast("cpu", torch.float16, autocast):
                other(x)
        assert patched.report().packed_bytes, "filters that no graph trains are kept"


@pytest.mark.parametrize("decision", [LEFT, LITTLE])
def test_gradients_are_counted_once(decision: Decision, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the kernel of aten::convolution_backward is there, which a double backward asks for, it counts them."""
    decide(monkeypatch, decision, decision, decision)
    layer, x = nn.Conv2d(4, 6, 3), torch.randn(2, 4, 9, 8, requires_grad=True)
    with leanconv.torch.enable(layer) as patched:
        counts = []
        for turn in range(8):
            layer(x).sum().backward()
            counts.append(sum(line.calls for line in patched.report().lines))
            if turn == 3:
                torch.conv2d(x, layer.weight, layer.bias)  # which goes to PyTorch's dispatcher
                assert sum(line.calls for line in patched.report().lines) == 13
    assert counts == [3, 6, 9, 12, 16, 19, 22, 25]


@pytest.mark.parametrize("seed", range(12))
def test_calls_in_any_order_run_what_is_decided(seed: int, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly and captured, trained and frozen, of two sizes: by what ran, and by what the report counts."""
    choose = random.Random(seed)
    kinds = {op: choose.choice((LEFT, LITTLE, MUCH)) for op in ("fprop", "dgrad", "wgrad")}
    decide(monkeypatch, **kinds)
    layer, expected = nn.Conv2d(4, 6, 3), Counter[str]()
    images = {n: torch.randn(n, 4, 9, 8) for n in (1, 2)}
    with leanconv.torch.enable(layer) as patched:
        for _ in range(40):
            is_captured, wanted_x, wanted_w = (choose.random() < 0.5 for _ in range(3))
            layer.weight.requires_grad_(wanted_w)
            x = images[choose.choice((1, 2))].clone().requires_grad_(wanted_x)
            ops = ["fprop", *["dgrad"] * wanted_x, *["wgrad"] * wanted_w]
            saved = sum(kinds[op].pytorch - kinds[op].ours for op in ops if kinds[op].name)
            is_worth = saved > 100 * CYCLES_PER_US or sum(kinds[op].pytorch for op in ops) > 400 * CYCLES_PER_US
            count = len(device.launches)
            with capture(monkeypatch, is_captured):
                layer(x).sum().backward()
            ours = [op for op in ops if kinds[op].name and (is_captured or is_worth)]
            assert len(device.launches) - count == len(ours), (is_captured, ops)
            expected.update({"leanconv: it": len(ours), "PyTorch": len(ops) - len(ours)})
        calls = Counter[str]()
        for line in patched.report().lines:
            calls[line.runs] += line.calls
    assert calls == +expected
