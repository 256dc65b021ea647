"""docs/architecture.md and docs/add-an-algorithm.md: paths, names and numbers are those of the code; picture too."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from leanconv.kernels import ALGORITHMS
from leanconv.options import PRECISIONS
from tests import emulator
from tests.cases import CASES, TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.cases_separable import SEPARABLE_CASES
from tests.cases_tensor_filter import TENSOR_FILTER_CASES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "leanconv"
DOCS = ROOT / "docs"
PAGES = ("architecture.md", "add-an-algorithm.md")
PICTURE = DOCS / "pictures" / "architecture.svg"
#: What a reader of add-an-algorithm.md makes.
MADE = ("naive",)
PROBLEMS = [case.problem for case in (*CASES, *SEPARABLE_CASES, *TENSOR_FILTER_CASES, *NATIVE_CASES)]
ENDINGS = ("py", "cuh", "json", "md", "svg")


@cache
def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """The page without its blocks of code, on one line."""
    return " ".join(re.sub(r"^ *```.*?^ *```", "", text(page), flags=re.MULTILINE | re.DOTALL).split())


def quoted(page: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"`([^`]+)`", prose(page))))


def house() -> dict[str, str]:
    """Files and folders of the package as the page lists them, and what it says of each."""
    listed = re.findall(r"^```\n(.*?)^```", text("architecture.md"), re.MULTILINE | re.DOTALL)[0]
    return {line.split()[0]: line.split(None, 1)[1] for line in listed.splitlines()}


def table(head: str) -> list[list[str]]:
    rows = text("architecture.md").partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def paths(page: str) -> list[str]:
    """What looks like a file or a folder: with a slash, or with the ending of a file."""
    words = [word for each in quoted(page) for word in each.split()]
    looks = [word for word in words if re.fullmatch(rf"[\w.-]+(/[\w.-]*)+|[\w-]+\.({'|'.join(ENDINGS)})", word)]
    return [word for word in looks if not any(made in word for made in MADE)]


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    """Below the repository, or below the package; a name alone may be anywhere."""
    found = paths(page)
    assert len(found) > 10
    for path in found:
        exists = (ROOT / path).exists() or (PACKAGE / path).exists()
        assert exists or ("/" not in path and any(ROOT.glob(f"[!.]*/**/{path}"))), f"{page} names {path}"


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    """Each name in backquotes that can be one of code is in the code."""
    code = "".join(
        path.read_text(encoding="utf-8") for path in sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.cuh")))
    )
    code += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "report").glob("*.py"))
    known = set(re.findall(r"\w+", code)) | {"naive", "TABLE"}
    for each in quoted(page):
        if not re.search(r"/|\.(?:\w+$)| ", each):
            unknown = set(re.findall(r"[A-Za-z_]\w*", each)) - known
            assert not unknown, f"{page}: `{each}`: {unknown}"


def test_the_house_is_whole() -> None:
    there = {f"{path.name}/" if path.is_dir() else path.name for path in PACKAGE.iterdir()}
    assert set(house()) == there - {"__init__.py", "__main__.py", "__pycache__/", "py.typed"}
    for entry, words in house().items():
        for name in re.findall(r"\w+\.py", words):
            assert (PACKAGE / entry / name).exists(), f"{entry} {name}"
    for name in re.findall(r"resolve|choose|bind|weights|explain|precompile", house()["call/"]):
        assert (PACKAGE / "call" / f"{name}.py").exists(), name


def test_the_folder_of_pytorch_says_what_each_file_has() -> None:
    folder = ROOT / "src/leanconv/torch"
    said, _, _ = (folder / "__init__.py").read_text().partition("\nfrom ")
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files <= set(re.findall(r"`(\w+)`", said))


def test_families() -> None:
    rows = table("folder")
    folders = {path.parent.name for path in (PACKAGE / "kernels").glob("*/__init__.py")}
    assert {row[0] for row in rows} == {f"`kernels/{name}/`" for name in folders - {"common"}}
    for folder, kernels, _, where, precision, auto in rows:
        own = [a for a in ALGORITHMS if f"`kernels/{a.family}/`" == folder]
        assert set(re.findall(r"\w+", kernels)) == {a.stem for a in own}, folder
        assert re.findall(r"\w+", precision) == [p for p in PRECISIONS if p in {a.precision for a in own}], folder
        assert auto.startswith("never") == all(a.by_name_only for a in own), folder
        able = {t.arch for t in TARGETS if any(not a.reasons(problem, t) for a in own for problem in PROBLEMS)}
        assert {"sm_90a": {"sm_90a"}, "every GPU from sm_80 on": {t.arch for t in TARGETS}}[where] == able, folder


def test_numbers() -> None:
    page = prose("architecture.md")
    names = {a.name for a in ALGORITHMS}
    by_name_only = {a.name for a in ALGORITHMS if a.by_name_only}
    twins = ROOT / "tests" / "emulator" / "include" / "device" / "ptx"
    ptx = {path.name for path in (PACKAGE / "device" / "ptx").iterdir()}
    assert {path.name for path in twins.iterdir()} == ptx
    for words in (
        f"lists {len(ALGORITHMS)} kernels with a host half. They make up {len(names)} algorithms",
        f"chooses among {len(names - by_name_only)} of these; {len(by_name_only)} run by name only",
        f"one function for each PTX instruction, in {len(ptx)} files by kind",
        f"in {len(emulator.ORDERS)} orders of threads",
        f"for {len(TARGETS)} architectures ({', '.join(t.arch for t in sorted(TARGETS, key=lambda t: t.capability))})",
    ):
        assert words in page, words
    levels = page.partition("strictest first: ")[2].partition(".")[0]
    assert re.findall(r"`(\w+)`", levels) == list(PRECISIONS)


def test_the_page_is_short() -> None:
    assert len(text("architecture.md").splitlines()) <= 200


def test_measured_data_lie_where_the_page_says() -> None:
    files = {row[0].strip("`") for row in table("file")}
    for folder in (path for path in (PACKAGE / "perf").iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert {path.name for path in folder.iterdir()} == files, folder


def test_the_picture() -> None:
    """Every family is in it, every module it names exists, and its letters can be read at 900 pixels."""
    drawn = PICTURE.read_text(encoding="utf-8")
    root = ElementTree.fromstring(drawn)
    assert root.get("viewBox", "").startswith("0 0 900 ") and "prefers-color-scheme: dark" in drawn
    assert min(map(int, re.findall(r"font(?:-size)?:[^;]*?(\d+)px", drawn))) >= 12
    code = {each.text for each in root.iter("{http://www.w3.org/2000/svg}text") if each.get("class") == "code"}
    assert {a.family for a in ALGORITHMS} | {"common"} <= code
    for name in code - {"ready call", "kernels/<family>", "perf/<gpu>", "GPU"}:
        homes = ("", "kernels/", "device/")
        assert any((PACKAGE / f"{home}{name}{end}").exists() for home in homes for end in ("", ".py", ".cuh")), name
