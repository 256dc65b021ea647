"""The page on first calls: what is measured, and the table made from it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import machine
from leanconv.bench.suites import Case
from leanconv.problem import ConvProblem
from report import first_calls
from tests import made_up
from tests.stand_ins import HostDevice


def row(network: str, way: str, seconds: float) -> dict[str, Any]:
    return {"network": network, "way": way, "layers": 3, "kernels": 5, "compiled": 5, "seconds": seconds}


def test_a_network_is_a_line_and_a_way_a_column() -> None:
    rows = [row("a", "one by one", 9.876), row("b", "from disk", 0.1), row("a", "side by side", 1.0)]
    columns, lines = first_calls.table(rows)
    assert columns[3:] == ["one by one", "side by side", "from disk"]
    assert lines == [["a", "3", "5", "9.88 s", "1.00 s", "–"], ["b", "3", "5", "–", "–", "0.10 s"]]
    # calls compile fewer kernels than what also compiles those of calls with packed weights
    rows.append(row("a", "first calls", 4.5) | {"kernels": 2})
    columns, lines = first_calls.table(rows)
    assert columns[2:5] == ["kernels", "first calls", "one by one"]
    assert lines[0][2:5] == ["5", "4.50 s, 2 kernels", "9.88 s"]


def test_first_calls_are_calls(torch_on_device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    layers = [ConvProblem(1, 4, 6, 6, 8, 3, 3, padding=(1, 1, 1, 1)), ConvProblem(1, 8, 6, 6, 4, 1, 1, stride=(2, 2))]
    cases = [Case(f"layer {i}", layer) for i, layer in enumerate(layers)]
    monkeypatch.setattr(first_calls, "load_suite", lambda network: cases)
    found = first_calls.reached("some", "first calls", "cpu")
    assert len(torch_on_device.launches) == found["layers"] == 2 and found["seconds"] > 0
    shapes = [set(values) for _, values in torch_on_device.launches]
    assert all({"x", "w"} <= roles for roles in shapes)


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
    assert "Not measured" not in page
    assert "NVIDIA X, 2026-11-22, revision abc000000000, 16 cores." in page
    assert "| resnet-50 | 3 | 5 | 1.50 s | 1.50 s | 1.50 s | 1.50 s |" in page


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no GPU")
    monkeypatch.setattr(subprocess, "run", lambda command, **rest: failed)
    with pytest.raises(RuntimeError, match="resnet-50, first calls: no GPU"):
        first_calls.measure(tmp_path)
