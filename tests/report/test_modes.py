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
    monkeypatch.setattr(modes, "network", lambda name, mode, training: (torch.nn.Identity(), torch.empty(4)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    seen: list[tuple[str, bool]] = []

    def forward(model: Any, x: Any, mode: modes.Mode, compiled: bool, tuned: bool) -> dict[str, float]:
        assert tuned and not compiled
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
