"""The page on first calls: what is measured, and the table made from it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import machine
from report import first_calls
from tests import made_up


def row(network: str, way: str, seconds: float) -> dict[str, Any]:
    return {"network": network, "way": way, "layers": 3, "kernels": 5, "compiled": 5, "seconds": seconds}


def test_a_network_is_a_line_and_a_way_a_column() -> None:
    rows = [row("a", "one by one", 9.876), row("b", "from disk", 0.1), row("a", "side by side", 1.0)]
    columns, lines = first_calls.table(rows)
    assert columns[3:] == ["one by one", "side by side", "from disk"]
    assert lines == [["a", "3", "5", "9.88 s", "1.00 s", "–"], ["b", "3", "5", "–", "–", "0.10 s"]]


def test_every_way_of_every_network_is_measured_with_an_empty_cache_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[str], env: dict[str, str], **rest: Any) -> Any:
        folder = Path(env["LEANCONV_CACHE_DIR"])
        asked.append((command[-2], command[-1], env["CUDA_CACHE_DISABLE"], list(folder.iterdir()) == []))
        (folder / "kernel").touch()
        out = json.dumps({"layers": 3, "kernels": 5, "compiled": 5, "seconds": 1.5})
        return subprocess.CompletedProcess(command, 0, f"a warning\n{out}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(machine, "describe", lambda gpu, ceilings, versions, revision: made_up.ABOUT)
    path = first_calls.measure(tmp_path)
    assert path == tmp_path / "nvidia-x" / "first-calls.json"
    # the last way finds what the second has compiled
    assert asked == [(n, w, "1", w != "from disk") for n in first_calls.NETWORKS for w in first_calls.WAYS]
    monkeypatch.undo()
    page = made_up.filled(tmp_path, "waits first-calls")
    assert "NVIDIA X, 2026-11-22, revision abc000000000, 16 cores." in page
    assert "| resnet-50 | 3 | 5 | 1.50 s | 1.50 s | 1.50 s |" in page


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no GPU")
    monkeypatch.setattr(subprocess, "run", lambda command, **rest: failed)
    with pytest.raises(RuntimeError, match="resnet-50, one by one: no GPU"):
        first_calls.measure(tmp_path)
