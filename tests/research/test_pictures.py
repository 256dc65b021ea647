"""Pictures of the families: drawn from the configurations that are chosen, as the committed ones are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from research import pictures

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_committed_pictures_show_todays_configurations(tmp_path: Path) -> None:
    page = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    for drawn in pictures.draw(tmp_path):
        labels = re.findall(r"<!-- (.*?) -->", drawn.read_text(encoding="utf-8"), re.DOTALL)
        committed = (DOCS / "pictures" / drawn.name).read_text(encoding="utf-8")
        assert labels == re.findall(r"<!-- (.*?) -->", committed, re.DOTALL), f"python -m research pictures: {drawn}"
        assert f"(pictures/{drawn.name})" in page
    of = pictures.config("implicit_gemm", pictures._LAYER)
    assert f"{of.tile_k} × {of.tile_pixels} pixels" in (tmp_path / "family-product.svg").read_text(encoding="utf-8")
