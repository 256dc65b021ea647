"""What pip installs: the floors of the dependencies, the extras, and what an sdist holds."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts import other_pythons

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


def test_a_wheel_without_a_kernel_or_a_table_is_found(tmp_path: Path) -> None:
    """`make pythons` refuses such a wheel."""
    folder = tmp_path / "src" / "leanconv" / "kernels"
    names = ("leanconv/kernels/a.cuh", "leanconv/kernels/a.py", "leanconv/perf/gpu/winners.json")
    for name in names:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).touch()
    (folder / "a.pyc").touch()
    for held, lacking in ((names, set()), (names[1:2], {names[0], names[2]})):
        with zipfile.ZipFile(tmp_path / "made.whl", "w") as archive:
            for name in held:
                archive.writestr(name, "")
        assert other_pythons.lacking(tmp_path / "made.whl", tmp_path / "src") == lacking


def test_the_lowest_versions_are_those_that_are_stated(project: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    floors = dict(each.split("==") for each in other_pythons.floors(text))
    assert floors["typer"] == "0.16.*" and floors["cuda-bindings"] == "13.0.*" and floors["torch"] == "2.5.*"
    assert "pytest" not in floors and "hatchling" not in floors
    stated = {re.split(r"[\[<>=]", each)[0] for each in project["project"]["dependencies"]}
    assert stated <= floors.keys()


def test_the_matrix_has_every_python_that_is_stated(project: Any) -> None:
    stated = {each.rpartition(" ")[2] for each in project["project"]["classifiers"] if "Python :: 3." in each}
    assert {name.partition("+")[0] for name in other_pythons.MATRIX} >= stated
    settings = {setting for name in other_pythons.MATRIX for setting in name.split("+")[1:]}
    assert settings == {"lowest", "numpy1.26", "cu12", "cu13", "torch"}
    assert project["project"]["requires-python"] == f">={min(stated, key=lambda each: int(each[2:]))}"


def test_the_dockerfile_installs_what_there_is(project: Any) -> None:
    """It cannot be built here: there is no engine. What it names is there, and goes into its context."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    extras = project["project"]["optional-dependencies"]
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    (wheel,) = re.findall(r"pip install .*\"(/src\S+)\"", text)
    for extra, expected in (("cu13", "/src[cu13]"), ("", "/src")):
        said = subprocess.run(["sh", "-c", f'echo "{wheel}"'], env={"EXTRA": extra}, capture_output=True, text=True)
        assert said.stdout.strip() == expected
    named = [arguments["EXTRA"], *re.findall(r"EXTRA=(\w+)", text)]
    assert set(named) == {"cu12", "cu13"} <= extras.keys()
    for version, extra in re.findall(r"CUDA=(\d+)\S* --build-arg EXTRA=cu(\d+)", text):
        assert version == extra
    assert arguments["CUDA"].startswith(arguments["EXTRA"].removeprefix("cu") + ".")
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.*)$", text, re.MULTILINE)]
    needed = {name for names in copied for name in names}
    assert needed == {"pyproject.toml", "README.md", "LICENSE", "src"}, "what the wheel is built of"
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= needed
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == needed
    words = re.findall(r"^([A-Z]+) ", text, re.MULTILINE)
    assert words[:2] == ["ARG", "FROM"] and {*words} <= {
        "ARG",
        "FROM",
        "RUN",
        "ENV",
        "COPY",
        "USER",
        "ENTRYPOINT",
        "CMD",
    }
