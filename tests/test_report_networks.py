"""The page on whole networks: which layers a network has, who computes them, and the table made of the times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leanconv.problem import ConvProblem
from report import networks
from report.pages import fill

torch = pytest.importorskip("torch")


def small() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 8, 3, padding=(1, 0), groups=8, bias=False),
        torch.nn.Conv2d(8, 8, 3, padding=(1, 0), groups=8, bias=False),
        torch.nn.Conv2d(8, 4, 1),
    ).eval()


def test_the_layers_of_a_network_are_found_each_shape_once() -> None:
    model, x = small(), torch.randn(2, 3, 17, 9)
    assert networks.layers(networks.calls_of(model, x), "NHWC") == [
        ConvProblem(2, 3, 17, 9, 8, 3, 3, (2, 2), (1, 1, 1, 1), layout="NHWC", bias=True),
        ConvProblem(2, 8, 9, 5, 8, 3, 3, padding=(1, 1, 0, 0), groups=8, layout="NHWC"),
        ConvProblem(2, 8, 9, 3, 8, 3, 3, padding=(1, 1, 0, 0), groups=8, layout="NHWC"),
        ConvProblem(2, 8, 9, 1, 4, 1, 1, layout="NHWC", bias=True),
    ]
    assert not any(module._forward_hooks for module in model)


def test_each_call_is_found_with_what_it_is_given() -> None:
    model, x = small(), torch.randn(2, 3, 17, 9)
    with torch.inference_mode():
        calls = networks.calls_of(model, x)
        assert [module for module, _ in calls] == [model[0], model[2], model[3], model[4]]
        assert torch.equal(calls[1][1], model[:2](x))
        assert torch.equal(calls[3][0](calls[3][1]), model(x))


def test_our_convolutions_take_over_and_go_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import leanconv

    calls = []

    def conv2d(x: Any, *rest: Any) -> Any:
        calls.append(tuple(x.shape))
        return torch.nn.functional.conv2d(x, *rest)

    monkeypatch.setattr(leanconv, "conv2d", conv2d)
    model, x = small(), torch.randn(1, 3, 17, 9)
    with torch.inference_mode():
        expected = model(x)
        with networks.our_convolutions(model):
            assert torch.equal(model(x), expected)
        assert calls == [(1, 3, 17, 9), (1, 8, 9, 5), (1, 8, 9, 3), (1, 8, 9, 1)]
        model(x)
    assert len(calls) == 4


def row(engine: str, us: float, error: float) -> dict[str, Any]:
    times = {"us": us, "eager_us": 2 * us, "convolutions_us": us / 2}
    return {"network": "net", "engine": engine, "batch": 4, **times, "error": error}


def test_a_network_is_a_line_and_the_better_layouts_are_compared(tmp_path: Path) -> None:
    rows = [row("torch-fp32-nchw", 3000, 2e-7), row("torch-fp32-nhwc", 4000, 3e-7), row("leanconv-nhwc", 1500, 1e-7)]
    about = {"gpu": "NVIDIA X", "date": "2026-11-22T00:00:00", "git_revision": "abc"}
    (tmp_path / "nvidia-x").mkdir()
    (tmp_path / "nvidia-x" / "networks.json").write_text(json.dumps({"machine": about, "rows": rows}))
    page = fill("<!-- made: networks networks -->\n<!-- /made -->", tmp_path / "page.md", tmp_path, tmp_path)
    assert "NVIDIA X, 2026-11-22, revision abc. Milliseconds" in page
    assert "| net | 4 | 3.00 | 4.00 | – | 1.50 | 2.00 | 1.50 / 0.75 | 6.00 / 3.00 | 2.0e-07 / 1.0e-07 |" in page
    assert "python -m report networks" in networks.section([])
