"""The house: who may use whom, and how large anything may grow."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import leanconv
from leanconv.kernels import ALGORITHMS

SOURCE = Path(leanconv.__file__).resolve().parent
KERNELS = SOURCE / "kernels"
FAMILIES = sorted(path.name for path in KERNELS.iterdir() if (path / "__init__.py").exists() and path.name != "common")
HEADERS = sorted((*KERNELS.rglob("*.cuh"), *(SOURCE / "device").rglob("*.cuh")))
#: What every family may use besides its own files.
SHARED = ("common", "contract", "cost", "winograd_matrices")
#: The family of kernels that run by name only: it may use any other.
PAPERS = "papers"


@cache
def included(header: Path) -> tuple[Path, ...]:
    """The files that a header includes."""
    names = re.findall(r"^#include <([^>]+)>", header.read_text("utf-8"), re.MULTILINE)
    return tuple(SOURCE / name for name in names if (SOURCE / name).exists())


def opened(header: Path) -> set[Path]:
    """The files that a compiler opens for a header, itself included."""
    found, todo = set(), [header]
    while todo:
        if (path := todo.pop()) not in found:
            found.add(path)
            todo += included(path)
    return found


def imported(module: Path) -> set[str]:
    """The modules of `leanconv.kernels` that a module imports, without that prefix."""
    names = []
    for node in ast.walk(ast.parse(module.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{each.name}" for each in node.names]
    prefix = "leanconv.kernels."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def used(path: Path) -> set[str]:
    """The first folder, or module, below ``kernels`` of all that a file uses."""
    if path.suffix == ".py":
        return {name.split(".")[0] for name in imported(path)}
    return {other.relative_to(KERNELS).parts[0] for other in included(path) if KERNELS in other.parents}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != PAPERS])
def test_a_family_uses_its_own_files_and_shared_ones(family: str) -> None:
    files = [path for path in sorted((KERNELS / family).iterdir()) if path.suffix in (".py", ".cuh")]
    others = {path.name: used(path) - {family, *SHARED} for path in files}
    assert not {name: sorted(found) for name, found in others.items() if found}


def test_shared_files_use_no_family() -> None:
    files = (*sorted((KERNELS / "common").iterdir()), KERNELS / "contract.py", KERNELS / "cost.py")
    others = {path.name: used(path) & set(FAMILIES) for path in files if path.suffix in (".py", ".cuh")}
    assert not {name: sorted(found) for name, found in others.items() if found}
    for header in (SOURCE / "device").rglob("*.cuh"):
        assert not used(header), header


def test_no_kernel_opens_more_than_eighteen_files() -> None:
    """Whatever header a launch names: a header that others include opens fewer files than they do."""
    counts = {str(header.relative_to(SOURCE)): len(opened(header)) for header in HEADERS}
    assert not {name: count for name, count in counts.items() if count > 18}


def test_no_file_passes_five_hundred_lines() -> None:
    files = (path for path in sorted(SOURCE.rglob("*")) if path.suffix in (".py", ".cuh"))
    counts = {str(path.relative_to(SOURCE)): len(path.read_text("utf-8").splitlines()) for path in files}
    assert not {name: count for name, count in counts.items() if count > 500}


def test_auto_picks_among_at_most_twenty_four_algorithms() -> None:
    names = {algorithm.name for algorithm in ALGORITHMS if not algorithm.by_name_only}
    told = "a new kernel is a strategy of one of these, or sets by_name_only: docs/add-an-algorithm.md"
    assert len(names) <= 24, f"{told}; {sorted(names)}"


def test_few_modules_lie_in_the_root() -> None:
    modules = sorted(path.name for path in SOURCE.glob("*.py"))
    assert len(modules) <= 8, modules


def test_no_lambda_is_generic() -> None:
    """NVRTC 13.0 takes a lambda with an ``auto`` parameter for a host function; 13.5 does not."""
    for header in SOURCE.rglob("*.cuh"):
        assert not re.search(r"\[[&=]?\]\s*\([^)]*\bauto\b", header.read_text("utf-8")), header
