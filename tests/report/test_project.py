"""Changelog, citation and contributing guide say what is so: versions, papers, commands."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

import leanconv
from leanconv.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_newest_release_is_this_version() -> None:
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", text("CHANGELOG.md"), re.MULTILINE)
    headings = re.findall(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]" and len(headings) == 1 + len(releases)
    version, date = releases[0]
    assert version == leanconv.__version__
    assert releases == sorted(releases, key=lambda release: [*map(int, release[0].split("."))], reverse=True)
    citation = text("CITATION.cff")
    assert f"\nversion: {version}\n" in citation and f"\ndate-released: {date}\n" in citation


def test_a_tag_is_the_version_of_its_commit() -> None:
    git = ["git", "-C", str(ROOT)]
    listed = subprocess.run([*git, "tag", "--list", "v*"], capture_output=True, text=True, check=False)
    for tag in listed.stdout.split():
        found = subprocess.check_output([*git, "show", f"{tag}:src/leanconv/__init__.py"], text=True)
        assert f'__version__ = "{tag[1:]}"' in found, tag
        assert f"\n## [{tag[1:]}] - " in text("CHANGELOG.md"), tag


def test_the_changelog_names_what_there_is() -> None:
    """Every public function came with some release."""
    functions = {name for name in leanconv.__all__ if name.islower()}
    assert not {name for name in functions if name not in text("CHANGELOG.md")}


def test_the_papers_are_those_of_the_algorithms() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0" and citation["authors"]
    references = citation["references"]
    assert len(references) == 5
    told = {algorithm.paper for algorithm in leanconv.list_algorithms()}
    for paper in references:
        first, year = paper["authors"][0]["family-names"], str(paper["year"])
        assert any(f"{first} et al." in each and year in each for each in told), paper["title"]
        assert paper["title"] and ("doi" in paper or "url" in paper or "institution" in paper)


def test_the_commands_of_the_guide() -> None:
    guide = text("CONTRIBUTING.md")
    goals = re.findall(r"(?:^|`)make ([a-z-]+)", guide, re.MULTILINE)
    assert {"demo", "test", "test-all", "pythons", "lint", "format", "types", "docs", "site"} == set(goals)
    for goal in goals:
        assert re.search(rf"^{goal}:", text("Makefile"), re.MULTILINE), goal
    for name in re.findall(r"TESTS=\"?([\w/.]+)", guide) + re.findall(r"python (scripts/\w+\.py)", guide):
        assert (ROOT / name).exists(), name


def test_the_commands_of_the_pages() -> None:
    """Those of the guide and of the page on the command line are understood."""
    pages = text("CONTRIBUTING.md") + text("docs/command-line.md")
    named = set(re.findall(r"^\| `leanconv (\w+)", pages, re.MULTILINE))
    assert named == {"doctor", "filter", "explain", "precompile", "tune", "cache", "bench", "demo"}
    commands = re.findall(r"^leanconv (.*)$", pages, re.MULTILINE)
    assert len(commands) > 20
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([*shlex.split(command, comments=True), "--help"])
        assert not stopped.value.code, command


def test_the_messages_of_the_guide() -> None:
    """What a user may look up under *Troubleshooting by message* is what the code says."""
    table = text("docs/guide.md").partition("## Troubleshooting by message")[2]
    said = re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in table.splitlines() if line[:1] == "|"))
    assert len(said) >= 8
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "leanconv").rglob("*.py"))
    for message in said:
        for words in re.split(r"…|\(.*|leanconv\.[A-Z]+", message):
            assert words.strip() in code, message
