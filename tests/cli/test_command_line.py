"""What all commands share: mistakes on one line, and the page of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from leanconv.cli.command_line import MISTAKE
from leanconv.cli.main import Action
from tests.messages import line_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("sing", "No such command 'sing'.*; see leanconv --help"),
        ("--loud", "No such option: --loud.*; see leanconv --help"),
        ("tune --loud", "No such option: --loud.*; see leanconv tune --help"),
        ("bench", "Missing argument 'SUITE.*; see leanconv bench --help"),
        ("filter a.png b.png", "Missing option '--kernel' / '-k'.*; see leanconv filter --help"),
        ("filter a.png --kernel box:1", "Missing argument: give IN and OUT; see leanconv filter --help"),
        ("doctor more", "Got unexpected extra argument.*"),
        ("bench --batch x im2win", "Invalid value for '--batch'.*"),
        ("bench im2win --batch", "Option '--batch' requires an argument.*"),
        ("cache burn", "Invalid value for '[^ ]+: 'burn' is not one of .*"),
    ],
)
def test_mistakes_that_typer_finds_are_printed_on_one_line(run: Any, arguments: str, told: str) -> None:
    code, out, err = run(*arguments.split())
    assert code == MISTAKE and not out and re.fullmatch(f"error: {told}", line_of(err)), err


def test_the_command_alone_prints_its_help(run: Any) -> None:
    code, out, err = run()
    assert code in (0, MISTAKE) and "Usage: leanconv" in out + err and "error:" not in out + err


def test_the_page_has_every_action_of_the_cache() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for action in Action:
        assert f"`leanconv cache {action.value}" in text, action
