"""The errors of every algorithm, as docs/numerics.md publishes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanconv.cpu import CPU_ALGORITHMS
from report import numerics
from report.__main__ import main
from tests import made_up


def test_the_command_writes_the_record_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = numerics.measured(layers=((3, 4),), filters=(), gpu=False)
    monkeypatch.setattr(numerics, "why_no_gpu", lambda: "none")
    monkeypatch.setattr(numerics, "measured", lambda gpu: entries)
    with pytest.raises(SystemExit) as stopped:
        main(["numerics", "--results", str(tmp_path), "--revision", "abc" + 37 * "0"])
    assert not stopped.value.code and "numerics.json" in capsys.readouterr().out
    path = tmp_path / "cpu" / "numerics.json"
    path.write_text(path.read_text().replace('"git_dirty": true', '"git_dirty": false'))
    text = made_up.filled(tmp_path, "numerics numerics")
    assert "## Measured on the CPU" in text and "revision abc" in text and "layer 3×3×4" in text


def test_numerics_page_has_every_algorithm_and_its_bound_holds() -> None:
    entries = numerics.measured(layers=((3, 20), (3, 1)), filters=(5,), gpu=False)
    for entry in entries:
        assert entry.error <= 4 * max(entry.sequential, 2**-24), entry
    for algorithm in CPU_ALGORITHMS:
        assert {e.data for e in entries if e.algorithm == algorithm.name} == {"zero-mean", "positive"}, algorithm.name
    page = numerics.section(numerics.record("the CPU", entries))
    assert "layer 3×3×20" in page and "filter 5×5" in page
    assert all(f"`{algorithm.name}` CPU" in page for algorithm in CPU_ALGORITHMS)
