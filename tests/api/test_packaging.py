"""What pip installs: the floors of the dependencies, the extras, and what an sdist holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> Any:
    if sys.version_info < (3, 11):
        pytest.skip("tomllib comes with Python 3.11")
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def floor(requirements: list[str], name: str) -> tuple[int, ...]:
    (found,) = (r for r in requirements if re.match(rf"{re.escape(name)}\b(?!-)", r))
    match = re.search(r">=([0-9.]+)", found)
    assert match, found
    return tuple(map(int, match[1].split(".")))


def test_typer_is_one_that_works_with_every_click_it_takes(project: Any) -> None:
    # tried: 0.12.3 with click 8.0 to 8.5 crashes every command; 0.12.4 to 0.15.3 crash --help and options with click
    # 8.2 and newer, which they do not exclude; 0.16.0 works with click 8.0.0 to 8.5.1
    assert floor(project["project"]["dependencies"], "typer") >= (0, 16)


def test_the_tests_can_ask_every_library_whose_names_are_taken(project: Any) -> None:
    extras = project["project"]["optional-dependencies"]
    for name in ("opencv-python-headless", "torch"):
        assert any(r.startswith(name) for r in extras["test"]), name
    assert any(r.startswith("scipy") for r in extras["bench"]) and "leanconv[bench]" in extras["test-host"]
    assert "leanconv[test-host]" in extras["test"]


def test_an_sdist_holds_what_its_tests_read(project: Any) -> None:
    included = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert {"src", "tests", "examples", "report", "research", "benchmarks", "docs", "scripts"} <= included
    assert {"Makefile", "README.md"} <= included
    assert all((ROOT / name).exists() for name in included)
