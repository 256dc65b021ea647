"""Edits of the host code that tests should see: which tests are asked, and what counts as an answer."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import mutation_map

OWN, FILE = ["tests/x.py::test_a"], ["tests/x.py"]


def test_the_map_is_as_old_as_the_code() -> None:
    """Each module has tests, which are there, and each module of the map is there."""
    known = mutation_map.read()
    without = [module for module in mutation_map.modules() if not known.get(module)]
    assert without == [], f"run python scripts/mutation_map.py for {without}"
    named = {*known, *mutation_map.WITHOUT_TESTS}
    assert [module for module in sorted(named) if not (mutation_map.SOURCE / module).exists()] == []
    assert not set(mutation_map.WITHOUT_TESTS) & set(known)


def test_new_modules_are_added_to_the_map_and_those_that_are_gone_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation_map, "modules", lambda: ["a.py", "b.py", "c.py", "d.py"])
    found = {"a.py": ["tests/y.py::test_b"], "b.py": ["tests/y.py::test_b"], "c.py": ["tests/y.py::test_c"]}
    made = mutation_map.with_new({"a.py": OWN, "b.py": [], "gone.py": OWN}, found)
    assert made == {"a.py": OWN, "b.py": ["tests/y.py::test_b"], "c.py": ["tests/y.py::test_c"]}


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with one module and one edit of it."""
    monkeypatch.syspath_prepend(mutation_map.ROOT / "scripts")
    script = importlib.import_module("mutate")
    path = script.SOURCE / "module.py"

    def copy(root: Path, folder: Path, **rest: Any) -> None:
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("as it was")

    monkeypatch.setattr(script.shutil, "copytree", copy)
    monkeypatch.setattr(script, "chosen", lambda count, seed: [(path, "an edit", "edited")])
    monkeypatch.setattr(script.mutation_map, "read", lambda: {"module.py": OWN})
    return script


def test_a_module_without_tests_is_no_survivor(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutate.mutation_map, "read", dict)
    with pytest.raises(SystemExit, match=r"module.py has no tests there. mutation_map.json is older than the code"):
        mutate.run(1)


def test_a_test_that_always_fails_sees_no_edit(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "1 failed", "")
    monkeypatch.setattr(mutate.Copy, "_run", lambda self, tests: failed)
    with pytest.raises(SystemExit, match=r"1 failed\ntests of .*module.py fail without an edit"):
        mutate.run(1)


@pytest.mark.parametrize(
    ("sees", "ran"), [(OWN, [OWN] * 2), (FILE, [OWN] * 2 + [FILE] * 2), (None, [OWN] * 2 + [FILE] * 2)]
)
def test_tests_of_the_module_and_then_of_their_files_are_asked(
    mutate: Any, sees: Any, ran: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time with the text as it was first."""
    asked: list[tuple[str, list[str]]] = []

    def run(self: Any, tests: list[str]) -> Any:
        text = (self.folder / mutate.SOURCE / "module.py").read_text()
        asked.append((text, tests))
        return subprocess.CompletedProcess([], int(text == "edited" and tests == sees), "", "")

    monkeypatch.setattr(mutate.Copy, "_run", run)
    assert mutate.run(1) == (["an edit"] if sees is None else [])
    assert asked == list(zip(("as it was", "edited") * 2, ran, strict=False))


@pytest.mark.parametrize("there", [True, False])
def test_parameters_that_are_gone_are_those_that_the_test_has_now(
    mutate: Any, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    asked: list[list[str]] = []

    def run(self: Any, tests: list[str]) -> Any:
        asked.append(tests)
        gone = [test for test in tests if "old" in test or not there]
        said = "".join(f"ERROR: not found: {self.folder}/{test}\n(no match)\n" for test in gone)
        return subprocess.CompletedProcess([], 4 if gone else 0, "", said)

    monkeypatch.setattr(
        mutate.mutation_map, "read", lambda: {"module.py": ["tests/x.py::test_a[old]", "tests/x.py::test_a[new]", *OWN]}
    )
    monkeypatch.setattr(mutate.Copy, "_run", run)
    if there:
        assert mutate.run(1) == ["an edit"] and asked[1] == OWN
    else:
        with pytest.raises(SystemExit, match=r"mutation_map.json is older than the code"):
            mutate.run(1)


def test_an_edit_with_which_no_test_is_found_is_seen(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks as it is imported."""

    def run(self: Any, tests: list[str]) -> Any:
        broken = (self.folder / mutate.SOURCE / "module.py").read_text() == "edited"
        said = "".join(f"ERROR: not found: {self.folder}/{test}\n" for test in tests)
        return subprocess.CompletedProcess([], 4 if broken else 0, "", said if broken else "")

    monkeypatch.setattr(mutate.Copy, "_run", run)
    assert mutate.run(1) == []
