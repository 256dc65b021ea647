"""Large layers of volumes: what is sampled of them, how they are made to fit, and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from report import large, records
from tests import made_up

torch = pytest.importorskip("torch")

LAYER = "conv:n2,c3,d5,h9,w8,k4,t3,r2,s3,stride1x2x1,pad2x0x1x1x0x2,dil1x1x2,NCDHW"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_samples_are_the_layer(layout: Any) -> None:
    problem = replace(large._layer(LAYER), layout=layout)
    form = torch.channels_last_3d if layout == "NHWC" else torch.contiguous_format
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((2, 3, 5, 9, 8), generator=generator).contiguous(memory_format=form)
    w = torch.randn((4, 3, 3, 2, 3), generator=generator)
    padded = torch.nn.functional.pad(x, (0, 2, 1, 1, 2, 0))
    y = torch.nn.functional.conv3d(padded, w, None, (1, 2, 1), 0, (1, 1, 2))
    assert large.sampled_error(problem, x, w, y) < 3e-7
    assert large.sampled_error(problem, x, w, y, places=2) < 3e-7
    y[-1, :, -1, -1, -1] += 1
    assert large.sampled_error(problem, x, w, y, places=2) > 1e-2, "the last output is among them"


def test_both_sides_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "_timed", lambda call: (call(), {"us": 5.0, "peak_bytes": 10_000}))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    problem = replace(large._layer("conv:n1,c4,d5,h9,w8,k4,t3,r3,s3,pad2x0x1x1x1x1,NCDHW,bfloat16"), layout="NHWC")
    theirs, ours = large._rows("a layer", problem, "cpu")
    assert theirs["side"] == "torch" and ours["problem"].endswith("NDHWC,bfloat16")
    output = 4 * 5 * 9 * 8 * 2
    for row in theirs, ours:
        assert (row["output_bytes"], row["workspace_bytes"]) == (output, 10_000 - output) and 0 < row["error"] < 4e-3

    def fail(call: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 5 GiB.")

    monkeypatch.setattr(large, "_timed", fail)
    assert [row["failed"] for row in large._rows("a layer", problem, "cpu")] == ["CUDA out of memory"] * 2


def test_what_does_not_fit_has_fewer_rows() -> None:
    layers = [large._layer(words) for words in large.LAYERS.values()]
    assert [each.dtype for each in layers] == ["bfloat16", "float16", "float32"]
    assert layers[2].c * layers[2].d * layers[2].h * layers[2].w > 2**31, "offsets beyond 32 bits"
    for layer in layers:
        assert large.fitting(layer, 80e9) == layer
        small = large.fitting(layer, 2e9)
        assert small.bytes <= 0.9e9 and small == replace(layer, h=small.h) and small.h < layer.h


def test_the_table(tmp_path: Path) -> None:
    words = "conv:n1,c3"
    row = {"layer": "first", "layout": "NHWC", "problem": words, "rows": 8, "of_rows": 16}
    rows = [
        row | {"side": "torch", "failed": "CUDA out of memory"},
        row | {"side": "leanconv", "us": 2500.0, "workspace_bytes": 0, "error": 2e-7},
    ]
    text = large.section({"machine": made_up.ABOUT, "rows": rows})
    assert "NVIDIA X, 2026-11-22, revision abc000000000." in text
    line = "| first, 8 of 16 rows | `conv:n1,c3` | NDHWC | 2.50 / out of memory | 0 / out of memory |"
    assert line + " 2.0e-07 / out of memory |" in text
    assert records.write(tmp_path, "large", made_up.ABOUT, rows).name == "large.json"
