"""The blocks that studies fill: the committed ones, what they say where nothing was measured, and the commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from report import records
from research import pages
from research.__main__ import app, main
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]


def test_a_block_without_a_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for what in pages.MAKERS:
        with pytest.raises(ValueError, match=f"page.md: block '{what} a-file': .*there is no file a-file.json"):
            made_up.filled(tmp_path, f"{what} a-file", by=pages)


def test_blocks_of_results_are_left_alone(tmp_path: Path) -> None:
    text = made_up.blocks("standings im2win")
    assert pages.fill(text, tmp_path / "page.md", tmp_path, tmp_path) == text


def test_every_command_that_is_named_exists() -> None:
    texts = [ROOT / "Makefile", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "research").glob("*.py")]
    named = {word for path in texts for word in re.findall(r"-m research ([a-z-]+)", path.read_text(encoding="utf-8"))}
    assert named == {command.name or str(command.callback.__name__) for command in app.registered_commands}
    for word in named:
        with pytest.raises(SystemExit) as stopped:
            main([word, "--help"])
        assert not stopped.value.code


def test_committed_documents_hold_what_was_found() -> None:
    """``make docs`` has been run after the last results file came."""
    found = 0
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        made = pages.fill(text, page, ROOT / "research" / "results", ROOT / "docs" / "pictures", draw=False)
        assert made == text, f"{page.relative_to(ROOT)} is not what `make docs` makes"
        found += text.count("<!-- made by research: ")
    assert found >= 18


def test_a_file_that_cannot_be_traced_is_refused(tmp_path: Path) -> None:
    """Unless the list beside it has a reason, which the page then says."""
    rows = [{"layer": "a", "layout": "NCHW", "algorithm": "b", "equal": {"auto": True, "invariant": True},
             "us": {str(n): [1.0, 1.0] for n in (1, 8, 32, 128)}}]  # fmt: skip
    made_up_before = {name: each for name, each in made_up.ABOUT.items() if name != "schema"}
    records.write(tmp_path, "batch-invariance", made_up_before, rows)
    with pytest.raises(ValueError, match="batch-invariance.json is of schema None"):
        made_up.filled(tmp_path, "batches batch-invariance", by=pages)
    (tmp_path / "older.json").write_text('{"nvidia-x/batch-invariance.json": "Of long ago."}')
    text = made_up.filled(tmp_path, "batches batch-invariance", by=pages)
    assert "0 of the study's 30 layers" in text and "Not measured anew yet: Of long ago." in text
