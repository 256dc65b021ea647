"""README.md and the user guide say what is so: examples run and print what they say, tables are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv import options
from leanconv.cli.main import main
from leanconv.images import filters
from leanconv.images.borders import ALIASES, BORDERS
from leanconv.kernels import ALGORITHMS
from leanconv.runtime import env
from tests.cases import CASES, TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.cases_separable import SEPARABLE_CASES
from tests.cases_tensor import TF32_CASES
from tests.cases_tensor_filter import TENSOR_FILTER_CASES
from tests.cases_weight import IMAGE_CASES, WEIGHT_CASES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALGORITHMS_PAGE, LAYERS, FILTERING, COMMANDS = (
    (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("algorithms/index.md", "layers.md", "filtering.md", "command-line.md")
)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IM2WIN = [a.stem for a in ALGORITHMS if a.stem.startswith("im2win")]
EVERY = (*CASES, *SEPARABLE_CASES, *TENSOR_FILTER_CASES, *NATIVE_CASES, *TF32_CASES, *WEIGHT_CASES, *IMAGE_CASES)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines(heading: str, text: str = README) -> list[str]:
    """The rows of the table below a heading or a line of text."""
    found = text.partition(heading)[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    assert found, heading
    return found


def table(heading: str, text: str) -> dict[str, list[str]]:
    """The same by their first cell, without its backquotes."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines(heading, text)]
    return {re.findall(r"`([^`]+)`", row[0])[0]: row[1:] for row in rows}


@pytest.mark.parametrize("block", blocks("python"))
def test_examples(
    block: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "import torch" in block:
        pytest.importorskip("torch")
    if "import cupy" in block:
        stand_in = request.getfixturevalue("fake_cupy")
        stand_in.asnumpy = lambda array: array.host
    said = re.search(r"((?:^# .*\n)+)\Z", block, re.MULTILINE)
    wanted = re.sub(r"^# ", "", said[1], flags=re.MULTILINE) if said else ""
    assert wanted or len(block.splitlines()) == 2, "an example shows what it prints"
    monkeypatch.chdir(ROOT)
    try:
        exec(compile(block, "README.md", "exec"), {})
    finally:
        if "enable()" in block:
            leanconv.torch.disable()
    assert capsys.readouterr().out.split() == wanted.split()


def test_it_is_short() -> None:
    """The README is the overview on one page: what it tells, it tells once, and all else is in docs/."""
    assert len(README.splitlines()) <= 200


def test_there_is_an_example_for_each_thing() -> None:
    examples = "\n".join([*blocks("python"), *blocks("python", LAYERS)])
    for name in ("conv2d", "conv1d", "conv2d_input", "prepare_weights", "unsharp_mask", "ndimage", "explain"):
        assert name in examples
    for library in ("torch", "cupy", "numpy"):
        assert f"import {library}" in examples
    assert all(len(block.splitlines()) <= 15 for block in blocks("python"))


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command line is understood; those that are quick run."""
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    image.fromarray(random.integers(0, 255, (40, 50, 3), np.uint8)).save("photo.jpg")
    Path("photos").mkdir()
    image.open("photo.jpg").save("photos/photo.png")
    lines = [
        line
        for block in [*blocks("console"), *blocks("console", COMMANDS)]
        for line in block.splitlines()
        if line.startswith("leanconv ")
    ]
    assert len(lines) > 8
    seen = set()
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        seen.add(words[0])
        slow = words[0] in ("bench", "precompile", "demo", "doctor", "tune") or words[0][:2] == "--"
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--help"] if slow else words)
        assert not stopped.value.code, (line, capsys.readouterr().err)
    assert {each for each in seen if each[:2] != "--"} == {
        "doctor",
        "bench",
        "filter",
        "explain",
        "precompile",
        "tune",
        "cache",
        "demo",
    }
    assert Path("edges.png").exists() and Path("soft.png").exists() and Path("soft/photo.png").exists()


def test_make_knows_its_goals() -> None:
    goals = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)
    assert {"demo", "test"} <= set(found)
    for goal in found:
        assert re.search(rf"^{goal}:", goals, re.MULTILINE), goal


def test_extras() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    named = set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    assert named == {"cu12", "cu13", "torch", "dask", "pictures", "bench", "test"}
    for extra in named:
        assert f"[{extra}]" in README or f"`{extra}`" in README


def test_environment_variables() -> None:
    """The table has those that the only reader reads."""
    read = set(re.findall(r"\"(LEANCONV_\w+)\"", Path(env.__file__).read_text(encoding="utf-8")))
    assert set(table("## Environment variables", COMMANDS)) == read


def test_algorithms() -> None:
    rows = [tuple(cell.strip(" `") for cell in line.split("|")[1:-1]) for line in lines("## Table", ALGORITHMS_PAGE)]
    assert [row[:4] for row in rows] == [(a.name, a.solves, a.family, a.precision) for a in leanconv.list_algorithms()]
    workspace: dict[str, set[bool]] = {}
    for algorithm in ALGORITHMS:
        able = [c.problem for c in EVERY if not algorithm.reasons(c.problem, TARGETS[0])][:3]
        found = [algorithm.workspace_bytes(p, config) for p in able for config in algorithm.configs(p, TARGETS[0])]
        workspace.setdefault(algorithm.name, set()).update(map(bool, found))
    for (name, _, family, _, needed, idea, paper), told in zip(rows, leanconv.list_algorithms(), strict=True):
        if family != "cpu":
            assert (needed == "none") == (workspace[name] == {False}), name
            assert needed.startswith("none") == (False in workspace[name]), name
            strategies = {a.stem for a in ALGORITHMS if a.name == name} - {name}
            assert strategies == set(re.findall(r"`(\w+)`", idea)) & {a.stem for a in ALGORITHMS}, name
        for word in re.findall(r"[A-Z]\w+ (?=et al)|\d{4}", paper):
            assert word in told.paper, (name, word)


def test_limits_of_layouts() -> None:
    text = " ".join(LAYERS.partition("- Layouts NCHW and NHWC everywhere")[2].partition("\n- ")[0].split())
    nhwc, nchw, innermost = re.split(r" and only NCHW | CHWN, ", text)
    innermost = innermost.replace("the three im2win kernels", " ".join(f"`{name}`" for name in IM2WIN))
    for algorithm in ALGORITHMS:
        problems = [case.problem for case in EVERY if case.problem.kind == "conv2d"]
        takes = {p.layout for p in problems if not algorithm.reasons(p, TARGETS[0])}
        if takes and algorithm.solves == "conv2d":
            assert (takes == {"NHWC"}) == (f"`{algorithm.stem}`" in nhwc), algorithm.stem
            assert (takes == {"NCHW"}) == (f"`{algorithm.stem}`" in nchw), algorithm.stem
            told = f"`{algorithm.stem}`" in innermost or f"`{algorithm.family}` family" in innermost
            assert (takes == {"NCHW", "NHWC"}) == (told and len(takes) > 1), algorithm.stem


def test_borders() -> None:
    rows = table("What lies outside an image", FILTERING)
    assert set(rows) == set(BORDERS)
    named = {
        alias: border for border, row in rows.items() for cell in row[1:] for alias in re.findall(r"`([^`]+)`", cell)
    }
    for alias, border in named.items():
        assert options.border_name(alias) == border, alias
    assert set(ALIASES) <= set(named)


def test_the_borders_read_as_the_table_says() -> None:
    """A kernel that fetches the pixel two to the left, then two to the right, of each."""
    image = np.array([[1, 2, 3, 4]], np.float32)
    for border, (reads, *_) in table("What lies outside an image", FILTERING).items():
        left, _, right = (part.split() for part in re.findall(r"`([^`]+)`", reads)[:3])
        value = dict(zip("abcdv", (1, 2, 3, 4, 9), strict=True))
        for far, wanted in (([1, 0, 0, 0, 0], left), ([0, 0, 0, 0, 1], right)):
            got = leanconv.filter2d(image, np.array([far], np.float32), border=border, value=9)[0]
            seen = got[:2] if wanted is left else got[2:]
            assert seen.tolist() == [value[letter] for letter in wanted], border


def test_kernels_of_the_command_line() -> None:
    for word in filters.WORDS:
        assert f"`{word}`" in COMMANDS, word


def anchors(text: str) -> set[str]:
    """What a link to a heading may name: the heading in small letters, with hyphens for blanks and no other signs."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> list[Any]:
    found = []
    for page in PAGES:
        for target in dict.fromkeys(re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))):
            if "://" not in target:
                found.append(pytest.param(page, target, id=f"{page.relative_to(ROOT)}-{target}"))
    return found


@pytest.mark.parametrize("page, target", links())
def test_links(page: Path, target: str) -> None:
    name, _, anchor = target.partition("#")
    aim = page.parent / name if name else page
    assert aim.exists()
    if anchor:
        assert anchor in anchors(aim.read_text(encoding="utf-8")), f"{name} has no heading {anchor}"
