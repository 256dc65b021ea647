"""Training steps: in what ways they are timed, with what patch, and that they train."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import leanconv.torch  # noqa: E402
from leanconv.torch import patch  # noqa: E402
from leanconv.torch.deciding import Decision  # noqa: E402
from leanconv.torch.expected_time import CYCLES_PER_US  # noqa: E402
from report import models, networks, training_steps  # noqa: E402
from report.networks import MODES  # noqa: E402
from report.training_steps import measure_step, measure_way, step  # noqa: E402
from tests.stand_ins import HostDevice, patched_cpu, set_capturing  # noqa: E402


@pytest.fixture
def launches(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> dict[bool, int]:
    """Kernels of leanconv outside of CUDA graphs and in them, of steps whose times are made up.

    What was captured must be there when graphs run, since they read and write what its optimiser holds.
    """
    found: dict[bool, int] = {False: 0, True: 0}
    kept: list[weakref.ref[Any]] = []

    def launched(call: Any, capturing: bool) -> tuple[Any, Any]:
        before = len(torch_on_device.launches)
        with monkeypatch.context() as capture:
            set_capturing(capture, capturing)
            result = call()
        found[capturing] += len(torch_on_device.launches) - before
        return SimpleNamespace(replay=lambda: None), result

    def captured(call: Any) -> tuple[Any, Any]:
        kept.append(weakref.ref(call.args[0] if isinstance(call, partial) else call))
        launched(call, False)
        return launched(call, True)

    def timed(calls: dict[str, Any], *given: Any) -> dict[str, float]:
        assert all(each() is not None for each in kept)
        kept.clear()
        return {who: 2.0 + i for i, who in enumerate(calls)}

    for each in (networks, training_steps):
        monkeypatch.setattr(each, "captured", captured)
        monkeypatch.setattr(each, "in_turn", timed)
    monkeypatch.setattr(networks, "peak_bytes", lambda call: launched(call, False) and 1)
    monkeypatch.setattr(
        training_steps, "eager", lambda calls, patches, us: {who: 5.0 + i + us / 1e7 for i, who in enumerate(calls)}
    )
    return found


def layers() -> Any:
    return torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Conv2d(6, 4, 3))


def images() -> Any:
    return torch.randn(2, 4, 9, 8)


def test_a_step_is_timed_as_a_graph_too_and_pytorchs_once_more(
    launches: dict[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes longer to record these gradients than leanconv saves: only the graph takes them."""
    decision = Decision("it", "", 9.0 * CYCLES_PER_US, 29.0 * CYCLES_PER_US)
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: decision)
    monkeypatch.setattr(leanconv.torch, "warm_up", lambda *given, **options: None)
    with patched_cpu(monkeypatch):
        row = measure_step(layers(), images(), MODES["fp32"])
        assert launches == {False: 0, True: 10}, "in each layout both layers, their filters' gradients, and one input's"
        times = {"torch_graph_us": 2.0, "leanconv_graph_us": 4.0, "torch_eager_us": 8.0, "again_eager_us": 12.0}
        assert row | times | {"taken": 5, "left": 0} == row
        alone = measure_way(layers(), images(), MODES["fp32"], "graph", ("torch_nhwc", "torch_nhwc"))
        assert launches == {False: 0, True: 20} and {"taken", "leanconv_graph_us"} <= {*alone}
        assert (
            alone.items()
            == {name: each for name, each in row.items() if "again" not in name and "eager" not in name}.items()
        )
        bare = measure_step(layers(), images(), MODES["fp32"], ("eager",))
        assert (bare["taken"], bare["left"]) == (0, 5) and "leanconv_graph_us" not in bare
        alone = measure_way(layers(), images(), MODES["fp32"], "eager", ("torch_nhwc", "torch_nhwc"))
        assert alone == {name: each for name, each in bare.items() if "eager" in name or name == "again"}
    assert launches == {False: 0, True: 20}


@pytest.mark.parametrize("way", ["tuned", "compile"])
def test_tuned_and_compiled_steps_are_graphs(
    way: str, launches: dict[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's is captured before anything is enabled; under torch.compile both run channels last."""
    order: list[Any] = []
    monkeypatch.setattr(
        leanconv.torch, "warm_up",
        lambda net, given, tune, progress: order.append((tune, net[0].weight.is_contiguous(), launches[True])),
    )  # fmt: skip
    monkeypatch.setattr(torch, "compile", lambda net: order.append("compile") or net)
    monkeypatch.setattr(patch.Patch, "decide", lambda *given: Decision("it", "", 9.0, 99.0))
    model, x = (each.to(memory_format=torch.channels_last) for each in (layers(), images()))
    with patched_cpu(monkeypatch):
        row = measure_way(model, x, MODES["fp32"], way, ("torch_nhwc", "torch_nchw"))
    assert row == {f"torch_{way}_us": 2.0, f"leanconv_{way}_us": 3.0} and launches[True] == 5
    assert order == ([(True, True, 0)] if way == "tuned" else ["compile", (False, False, 0), "compile"])


def test_a_step_trains() -> None:
    torch.manual_seed(0)
    model = models.UNet((4, 8), classes=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, torch.randn(2, 3, 16, 16), MODES["fp32"])()
    assert not all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
