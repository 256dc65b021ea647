"""The progress bar: on a terminal and on standard error only, and gone at the end."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from leanconv.runtime.progress import progress


def steps(wanted: bool = True) -> None:
    with progress(2, wanted) as begin:
        begin("first step")
        begin("second step")


def test_nothing_is_printed_or_imported_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    steps()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    steps(wanted=False)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_the_step_that_has_begun(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress(2) as begin:
        begin("first step")
        begin("second step")
    out, err = capsys.readouterr()
    assert out == "" and "second step" in err and "1/2" in err
    assert err.endswith("\x1b[2K"), "the line is cleared at the end"
