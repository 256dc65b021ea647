"""The page on whole networks: which layers a network has, who computes them, and the table made of the times."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from report import networks, records
from tests import made_up

torch = pytest.importorskip("torch")

from report import models  # noqa: E402


def small() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=(1, 0), groups=8, bias=False),
        torch.nn.Conv2d(8, 8, 3, padding=(1, 0), groups=8, bias=False),
        torch.nn.Conv2d(8, 4, 1),
    ).eval()


def test_each_call_is_found_with_what_it_is_given() -> None:
    model, x = small(), torch.randn(2, 3, 17, 9)
    with torch.inference_mode():
        calls = networks.calls_of(model, x)
        assert [module for module, _ in calls] == [model[0], model[2], model[3], model[4]]
        assert torch.equal(calls[1][1], model[:2](x))
        assert torch.equal(calls[3][0](calls[3][1]), model(x))


@pytest.mark.parametrize("name", ["unet", "vae_decoder", "edsr"])
def test_the_networks_of_our_own(name: str) -> None:
    """Their layers, and what comes out, without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    with FakeTensorMode():
        model = models.build(name).eval()
        y = model(torch.empty(networks.NETWORKS[name]))
        expected = {"unet": (8, 21, 256, 256), "vae_decoder": (4, 3, 256, 256), "edsr": (16, 3, 192, 192)}
        assert y.shape == expected[name]
        layers = sum(isinstance(each, kinds) for each in model.modules())
    assert layers == {"unet": 23, "vae_decoder": 31, "edsr": 35}[name]


def row(engine: str, us: float, error: float) -> dict[str, Any]:
    times = {"us": us, "eager_us": 2 * us, "convolutions_us": us / 2}
    return {"network": "net", "engine": engine, "batch": 4, **times, "error": error}


def test_a_network_is_a_line_and_the_better_layouts_are_compared(tmp_path: Path) -> None:
    rows = [row("torch-fp32-nchw", 3000, 2e-7), row("torch-fp32-nhwc", 4000, 3e-7), row("leanconv-nhwc", 1500, 1e-7)]
    rows[-1] |= {"taken": 3, "left": 1}
    records.write(tmp_path, "networks", made_up.ABOUT, rows)
    page = made_up.filled(tmp_path, "networks networks")
    assert "NVIDIA X, 2026-11-22, revision abc000000000. Milliseconds" in page
    assert "| net | 4 | 3.00 | 4.00 | – | 1.50 | 2.00 | 1.50 / 0.75 | 6.00 / 3.00 | 2.0e-07 / 1.0e-07 | 3 of" in page


def test_networks_that_are_not_measured_again_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [row("torch-fp32-nchw", 3000, 2e-7), row("leanconv-nchw", 1000, 2e-7)]
    before = [{**each, "network": name} for name in ("vgg16", "unet") for each in pair]
    path = records.write(tmp_path, "networks", made_up.ABOUT | {"git_revision": "old"}, before)
    monkeypatch.setattr(records.machine, "describe", lambda *given: made_up.ABOUT | {"git_revision": "new"})
    monkeypatch.setitem(sys.modules, "torchvision", types.SimpleNamespace(__version__="0"))
    again = [{**each, "network": "vgg16", "us": each["us"] / 2} for each in pair]
    monkeypatch.setattr(networks, "measure_network", lambda *given: iter(again))
    assert networks.measure(tmp_path, networks=["vgg16"]) == path
    rows = records.read(path)["rows"]
    assert [(each["network"], each["revision"], each["us"]) for each in rows] == [
        ("vgg16", "new", 1500), ("vgg16", "new", 500), ("unet", "old", 3000), ("unet", "old", 1000),
    ]  # fmt: skip
    said = networks.section(records.read(path))
    assert "2026-11-22, revision new; 2026-11-22, revision old." in said and "| unet | 4 | 3.00 |" in said
