"""The test of the tests: kernels broken on purpose must fail the same check that proves the whole ones.

Each break is a textual patch, applied in a copy of the kernels' folder, in whichever header of the algorithm has the
text. A patch whose text is no longer there fails here: it would break nothing, and prove nothing.
"""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Config, GpuAlgorithm
from leanconv.problem import Problem
from leanconv.runtime.compile import KERNELS
from tests import emulator, proof, selection
from tests.cases import CASES, TARGETS, TRANSFORM_CASES
from tests.cases_narrow import NARROW_CASES
from tests.cases_tensor import PAIR_CASES, TENSOR_CASES, TF32_CASES
from tests.cases_weight import IMAGE_CASES, WEIGHT_CASES
from tests.kernels.breaks import BREAKS as MOST
from tests.kernels.breaks import RACE, Break, gemm
from tests.kernels.breaks_depthwise import DEPTHWISE
from tests.kernels.breaks_gradients import GRADIENTS
from tests.kernels.breaks_single_channel import SEVERAL_FILTERS
from tests.kernels.breaks_tensor import TENSOR
from tests.kernels.breaks_tensor_narrow import TENSOR_NARROW
from tests.kernels.breaks_tensor_sync import TENSOR_SYNC
from tests.kernels.breaks_tensor_window import TENSOR_WINDOW
from tests.kernels.breaks_tensor_window_weight import TENSOR_WINDOW_WEIGHT
from tests.kernels.breaks_tensor_winograd import TENSOR_WINOGRAD
from tests.kernels.breaks_weight import WEIGHT

BREAKS = (
    *(*MOST, *DEPTHWISE, *GRADIENTS, *SEVERAL_FILTERS),
    *(*TENSOR, *TENSOR_NARROW, *TENSOR_SYNC, *TENSOR_WINDOW, *TENSOR_WINDOW_WEIGHT, *TENSOR_WINOGRAD, *WEIGHT),
)
MET = (*CASES, *NARROW_CASES, *PAIR_CASES, *TENSOR_CASES, *TF32_CASES, *TRANSFORM_CASES, *WEIGHT_CASES, *IMAGE_CASES)
PROBLEMS = {case.name: case.problem for case in MET}


def headers_of(broken: Break, kernels: Path) -> list[Path]:
    """What the launches for the break's cases include."""
    algorithm = next(a for a in ALGORITHMS if a.name == broken.algorithm)
    problems = [PROBLEMS[name] for name in broken.cases]
    plans = [algorithm.plan(problem, tuned(broken, algorithm, problem), TARGETS[0]) for problem in problems]
    ahead = [kernels / launch.header for plan in plans for launch in plan.every_launch]
    found: list[Path] = []
    while ahead:
        if (path := ahead.pop()) not in found:
            found.append(path)
            names = re.findall(r"#include <(.+)>", path.read_text())
            ahead += [kernels / name for name in names if (kernels / name).exists()]
    return found


def broken_kernels(broken: Break, folder: Path) -> Path:
    """A copy of the kernels with the patch applied."""
    copy = folder / "kernels"
    shutil.copytree(KERNELS, copy)
    headers = {header: header.read_text() for header in headers_of(broken, copy)}
    found = sum(text.count(broken.text) for text in headers.values())
    assert found == broken.times, (
        f"{broken.text!r} is in the headers of {broken.algorithm} {found} times, not {broken.times}: adapt the patch"
    )
    for header, text in headers.items():
        header.write_text(text.replace(broken.text, broken.by))
    return copy


def tuned(broken: Break, algorithm: GpuAlgorithm, problem: Problem) -> Config:
    """The best guess among the configurations with the break's tuning; switches that none has are set by hand."""
    wishes = dict(broken.tuning)
    configs = list(algorithm.configs(problem, TARGETS[0]))

    def granted(config: Config) -> int:
        return sum(getattr(config, name) == value for name, value in wishes.items())

    best = max(configs, key=granted)
    return replace(best, **wishes)


def some() -> list[Any]:
    """All breaks; ``make test`` plays every eighteenth of each algorithm: they prove the checks, not the kernels."""
    turn = {name: itertools.count() for name in {b.algorithm for b in BREAKS}}
    chosen = [b for b in BREAKS if next(turn[b.algorithm]) % 18 == 0]
    return selection.marked(BREAKS, chosen, lambda b: ((b,), f"{b.algorithm}: {b.name}"))


@pytest.mark.parametrize("broken", some())
def test_broken_kernel_is_caught(broken, tmp_path):
    algorithm = next(a for a in ALGORITHMS if a.name == broken.algorithm)
    kernels = broken_kernels(broken, tmp_path)

    def check() -> None:
        for name in broken.cases:
            run = partial(emulator.run_plan, kernels=kernels)
            proof.check(algorithm, PROBLEMS[name], tuned(broken, algorithm, PROBLEMS[name]), run=run)

    with pytest.raises((emulator.EmulatorError, proof.WrongAnswer), match=broken.how):
        check()


def test_every_algorithm_is_broken_on_purpose():
    assert {b.algorithm for b in BREAKS} == {a.name for a in ALGORITHMS}


def test_a_patch_that_finds_nothing_fails(tmp_path):
    stale = gemm("stale", "text that is not there", "", RACE, "plain-nchw")
    with pytest.raises(AssertionError, match="adapt the patch"):
        broken_kernels(stale, tmp_path)
