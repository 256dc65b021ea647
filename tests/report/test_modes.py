"""Whole networks in several arithmetics: what is measured, which rows stay, and the table made of the times."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from report import models, modes, records  # noqa: E402
from tests import made_up  # noqa: E402


def test_rows_of_this_revision_stay_and_others_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = made_up.ABOUT | {"git_revision": "old"}
    monkeypatch.setattr(records.machine, "describe", lambda *_: about)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0"))
    monkeypatch.setattr(modes, "network", lambda name, mode, training, layout: (torch.nn.Identity(), layout))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    seen: list[tuple[str, bool]] = []

    def forward(model: Any, x: Any, mode: modes.Mode, compiled: bool, tuned: bool) -> dict[str, float]:
        assert tuned and not compiled and x == "NHWC"
        seen.append((mode.title, torch.backends.cudnn.allow_tf32))
        return {"torch_graph_us": 3000.0, "leanconv_graph_us": 2000.0 if mode.tf32 else 1000.0}

    monkeypatch.setattr(modes, "measure_forward", forward)
    monkeypatch.setattr(modes, "measure_step", lambda *_: {"torch_eager_us": 9000.0, "leanconv_eager_us": 10000.0})
    allowed = torch.backends.cudnn.allow_tf32
    names, passes = ("resnet18", "resnet50"), tuple(modes.PASSES)
    path = modes.measure(tmp_path, None, names, ("fp32", "tf32"), passes, None, False, True)
    assert torch.backends.cudnn.allow_tf32 == allowed
    assert seen == [("strict FP32", False)] * 2 + [("TF32", True)] * 2
    rows = records.read(path)["rows"]
    assert [(row["network"], row["mode"], row["pass"]) for row in rows] == [
        ("resnet50", "fp32", "forward"), ("resnet50", "tf32", "forward"), ("resnet18", "fp32", "forward"),
        ("resnet18", "tf32", "forward"), ("resnet50", "fp32", "training"), ("resnet50", "tf32", "training"),
    ]  # fmt: skip
    modes.measure(tmp_path, None, names, ("fp32", "tf32"), passes, None, False, True)
    assert len(seen) == 4, "nothing is measured twice"
    about["git_revision"] = "new"
    modes.measure(tmp_path, None, ("resnet18",), ("fp32",), ("forward",), None, False, True)
    assert len(seen) == 5 and len(records.read(path)["rows"]) == 6
    page = modes.section(records.read(path))
    assert "| resnet50 | 3.00 | 1.50 | 0.90 | 0.90 |\n| resnet18 | 3.00 | 1.50 | – | – |" in page
    assert modes.measure(tmp_path, None, ("unet",), ("fp32",), ("forward",), 0.0, False, True) == path
    assert len(seen) == 5, "there was no time left"


def test_networks_of_videos_have_the_better_layout_of_each_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records.machine, "describe", lambda *_: made_up.ABOUT)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(__version__="0"))
    monkeypatch.setattr(modes, "network", lambda name, mode, training, layout: (torch.nn.Identity(), layout))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    times = {"NCHW": (3000.0, 3100.0, 2000.0), "NHWC": (4000.0, 4100.0, 1000.0)}

    def forward(model: Any, x: Any, mode: modes.Mode, **how: Any) -> dict[str, Any]:
        eager, graph, ours = times[x]
        return {"torch_eager_us": eager, "leanconv_eager_us": ours, "torch_graph_us": graph, "leanconv_graph_us": ours,
                "taken": len(x), "apart": ours}  # fmt: skip

    monkeypatch.setattr(modes, "measure_forward", forward)
    path = modes.measure(tmp_path, None, ("r3d_18",), ("fp32",), ("forward",), None, False, False)
    (row,) = records.read(path)["rows"]
    assert (row["torch_graph_us"], row["leanconv_graph_us"], row["apart"]) == (3100.0, 1000.0, 1000.0)
    assert row["layouts"] == "NCHW, NHWC" and row["batch"] == 8
    assert "| r3d_18 | 3.10 / 3.00 |" in modes.section(records.read(path))


def test_both_sides_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    took = {"torch": 30000.0, "leanconv": 5000.0}

    def elapsed(call: Any, count: int) -> float:
        order.append(f"{call()} {count}")
        return took[call()]

    monkeypatch.setattr(modes, "elapsed_us", elapsed)
    calls = {name: lambda name=name: name for name in took}
    assert modes.in_turn(calls) == took
    assert order[2:6] == ["torch 1", "leanconv 3", "torch 1", "leanconv 3"] and len(order) == 2 + 2 * modes._ROUNDS


def test_a_step_trains() -> None:
    torch.manual_seed(0)
    model = models.UNet((4, 8), classes=2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    modes.step(model, torch.randn(2, 3, 16, 16), modes.MODES["fp32"])()
    assert not all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
