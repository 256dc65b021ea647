"""The test of the tests: kernels broken on purpose must fail the same check that proves the whole ones.

Each break is a patch (see patching.py), applied in a copy of the kernels' folder, in whichever header of the algorithm
has its place. A patch that finds no place fails here: it would break nothing, and prove nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leanconv.kernels.contract import Config, GpuAlgorithm
from leanconv.problem import Problem
from leanconv.runtime.compile import INCLUDE
from tests import emulator, proof, selection
from tests.cases import CASES, TARGETS, TRANSFORM_CASES
from tests.cases_16bit import NATIVE_CASES
from tests.cases_separable import SEPARABLE_CASES
from tests.cases_tensor import PAIR_CASES, TENSOR_CASES, TF32_CASES, TF32_GROUP_CASES
from tests.cases_tensor_filter import TENSOR_FILTER_CASES
from tests.cases_volumes import TRANSFORM_VOLUMES, VOLUME_CASES
from tests.cases_weight import IMAGE_CASES, WEIGHT_CASES
from tests.kernels.breaks import BREAKS, scales
from tests.kernels.breaks.base import Break
from tests.kernels.patching import StalePatch, broken_kernels, kernel_headers, patched
from tests.variants import NAMED

MET = (
    *CASES,
    *SEPARABLE_CASES,
    *TENSOR_FILTER_CASES,
    *NATIVE_CASES,
    *VOLUME_CASES,
    *TRANSFORM_VOLUMES,
    *PAIR_CASES,
    *TENSOR_CASES,
    *TF32_CASES,
    *TF32_GROUP_CASES,
    *TRANSFORM_CASES,
    *WEIGHT_CASES,
    *IMAGE_CASES,
)
PROBLEMS = {case.name: case.problem for case in MET}


def headers_of(broken: Break) -> dict[Path, str]:
    """What the launches for the break's cases include."""
    algorithm = NAMED[broken.algorithm]
    problems = [PROBLEMS[name] for name in broken.cases]
    plans = [algorithm.plan(problem, tuned(broken, algorithm, problem), TARGETS[0]) for problem in problems]
    ahead = [INCLUDE / launch.header for plan in plans for launch in plan.every_launch]
    found: dict[Path, str] = {}
    while ahead:
        if (path := ahead.pop()) not in found:
            found[path] = kernel_headers()[path]
            names = re.findall(r"#include <(.+)>", found[path])
            ahead += [INCLUDE / name for name in names if (INCLUDE / name).exists()]
    return found


def tuned(broken: Break, algorithm: GpuAlgorithm, problem: Problem) -> Config:
    """The best guess among the configurations with the break's tuning; switches that none has are set by hand."""
    wishes = dict(broken.tuning)
    configs = list(algorithm.configs(problem, TARGETS[0]))

    def granted(config: Config) -> int:
        return sum(getattr(config, name) == value for name, value in wishes.items())

    best = max(configs, key=granted)
    return replace(best, **wishes)


def some() -> list[Any]:
    """All breaks; ``make test`` plays one of each algorithm: they prove the checks, not the kernels."""
    chosen = list({b.algorithm: b for b in reversed(BREAKS)}.values())
    return selection.marked(BREAKS, chosen, lambda b: ((b,), str(b)))


@pytest.mark.parametrize("broken", some())
def test_broken_kernel_is_caught(broken, tmp_path):
    algorithm = NAMED[broken.algorithm]
    kernels = broken_kernels(tmp_path, broken.patch, headers_of(broken))

    def check() -> None:
        for name in broken.cases:
            run = partial(emulator.run_plan, kernels=kernels)
            proof.check(algorithm, PROBLEMS[name], tuned(broken, algorithm, PROBLEMS[name]), run=run)

    with pytest.raises((emulator.EmulatorError, proof.WrongAnswer), match=broken.how):
        check()


def test_every_algorithm_is_broken_on_purpose():
    assert {b.algorithm for b in BREAKS} == set(NAMED)


def test_every_patch_finds_its_place():
    """Also those that ``make test`` does not play."""
    every = [(b.algorithm, b.patch, headers_of(b)) for b in BREAKS]
    every += [("scales", patch, kernel_headers()) for *_, patch in scales.ALL]
    stale = []
    for what, patch, headers in every:
        try:
            patched(patch, headers)
        except StalePatch as error:
            stale.append(f"{what}: {error}")
    assert not stale, "\n".join(stale)
