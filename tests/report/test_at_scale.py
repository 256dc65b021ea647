"""The page on many processes: each kernel is compiled once, with locks and without, and none with a bundle."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import machine
from leanconv.problem import ConvProblem
from leanconv.runtime import cache, compile
from report import at_scale
from tests import made_up
from tests.runtime.fake_driver import code_of

LAYERS = [ConvProblem(2, 3, 9, 11, k, 3, 3, padding=(1, 1, 1, 1)) for k in (4, 5)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_no_kernel_is_compiled_twice(some_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiles(each: Any, arch: str) -> Any:
        time.sleep(0.2)
        return code_of(each, arch)

    monkeypatch.setattr(compile, "compile_launch", compiles)
    monkeypatch.setattr("leanconv.call.precompile.cuda_version", lambda: 13050)
    monkeypatch.setattr(cache, "made", [])
    environment = dict(os.environ)
    rows = {row["way"]: row for row in at_scale.simulate(5, LAYERS, tmp_path)}
    assert os.environ == environment
    kernels = rows["bundle"]["kernels"]
    assert kernels == 2 and {row["processes"] for row in rows.values()} == {5}
    assert {way: (rows[way]["compiled"], rows[way]["most"]) for way in at_scale.WAYS} == {
        "empty folder": (kernels, 1), "full folder": (0, 0), "no locks": (kernels, 1), "bundle": (0, 0),
    }  # fmt: skip
    assert rows["tune"]["kept"] == 5 and rows["read"]["kept"] == 5
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_fails_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def fails(number: int) -> None:
        if number == 1:
            raise ValueError("this one")

    with pytest.raises(RuntimeError, match="1 of 2 processes failed: (?s:.*)this one"):
        at_scale.at_once(2, fails)


def test_the_table_has_a_line_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"processes": 4, "kernels": 3, "compiled": 3, "most": 1, "seconds": 2.0, "median_seconds": 1.0}
    rows = [{"way": "empty folder", **row}, {"way": "tune", "processes": 4, "kept": 4, "seconds": 1.0}]
    monkeypatch.setattr(at_scale, "simulate", lambda count, layers, folder: rows)
    monkeypatch.setattr(
        machine, "describe", lambda gpu, ceilings, versions, revision: made_up.ABOUT | {"gpu": None, "cpu": "a CPU"}
    )
    path = at_scale.measure(tmp_path)
    assert path.name == "at-scale.json"
    page = made_up.filled(tmp_path, "starts at-scale")
    assert "| empty folder | 4 | 3 | 3 | 1 | 2.00 s | 1.00 s |" in page and "| tune |" not in page
