"""docs/add-an-algorithm.md is followed to the letter: its kernel, its host half and its breaks, as they stand there."""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from leanconv.call import choose
from leanconv.kernels import ALGORITHMS
from tests import emulator, proof
from tests.cases import CONV_CASES, TARGETS
from tests.kernels.patching import copied_headers, patched

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add-an-algorithm.md").read_text(encoding="utf-8")
HEADER = "kernels/direct/naive.cuh"
CASES = ("odd-nchw", "groups-nchw", "everything-nchw", "stride-uneven-nchw", "all-padding-corner-nchw")


def block(language: str, number: int) -> str:
    return dedent(re.findall(rf"^ *```{language}\n(.*?)^ *```", PAGE, re.MULTILINE | re.DOTALL)[number])


@pytest.fixture(scope="module")
def algorithm() -> Any:
    module = ModuleType("naive_of_the_page")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(block("python", 0), "docs/add-an-algorithm.md", "exec"), module.__dict__)
    return module.Naive()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "kernels"
    copied_headers(folder)
    (folder / HEADER).write_text(block("cuda", 0))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_example_is_right(algorithm: Any, kernels: Path, name: str) -> None:
    problem = next(case.problem for case in CONV_CASES if case.name == name)
    assert not algorithm.reasons(problem, TARGETS[0])
    proof.check(algorithm, problem, run=partial(emulator.run_plan, kernels=kernels))


def test_the_breaks_are_caught(algorithm: Any, kernels: Path, tmp_path: Path) -> None:
    page: dict[str, Any] = {}
    exec(compile(block("python", 2), "docs/add-an-algorithm.md", "exec"), page)
    assert len(page["BREAKS"]) == 2
    for number, each in enumerate(page["BREAKS"]):
        copy = shutil.copytree(kernels, tmp_path / str(number))
        for path, text in patched(each.patch, {copy / HEADER: block("cuda", 0)}).items():
            path.write_text(text)
        problems = [case.problem for case in CONV_CASES if case.name in each.cases]
        with pytest.raises((emulator.EmulatorError, proof.WrongAnswer), match=each.how):
            for problem in problems:
                proof.check(algorithm, problem, run=partial(emulator.run_plan, kernels=copy))


def test_what_it_does_not_compute_it_refuses(algorithm: Any) -> None:
    for case in CONV_CASES:
        problem = case.problem
        able = (problem.op, problem.layout, problem.dtype) == ("fprop", "NCHW", "float32")
        assert bool(algorithm.reasons(problem, TARGETS[0])) != able, case.name


def test_the_example_in_the_registry(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = re.findall(r"^    (\w+)\(\),$", block("python", 1), re.MULTILINE)
    assert listed == [type(algorithm).__name__]
    others = (each for each in ALGORITHMS if each.stem != "naive")  # a reader's own
    monkeypatch.setattr(choose, "ALGORITHMS", (*others, algorithm))
    problem = CONV_CASES[0].problem
    assert problem.layout == "NCHW" and choose.choose(problem, TARGETS[0], "naive").algorithm is algorithm
    nhwc = next(case.problem for case in CONV_CASES if case.problem.layout == "NHWC")
    with pytest.raises(choose.NoAlgorithmError, match="naive: layout='NHWC' is not NCHW"):
        choose.choose(nhwc, TARGETS[0], "naive")
    assert [config.threads for config in algorithm.configs(problem, TARGETS[0])] == [256, 64]


def test_the_commands_name_tests_that_exist() -> None:
    named = re.findall(r"TESTS=\"?(\S+?)[ \"`]", PAGE)
    assert len(named) == 3
    for name in named:
        assert (ROOT / name).exists(), name
