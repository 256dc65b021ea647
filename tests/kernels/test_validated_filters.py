"""Filters prepared for one call: main kernels find out whether they need factors, and if so prepare them again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.kernels.common import split_gemm as tensor_filters
from leanconv.plan import Plan
from leanconv.problem import ConvProblem
from tests import emulator
from tests.cases import TARGETS
from tests.cases_tensor import drawn
from tests.kernels.patching import Patch, broken_kernels
from tests.kernels.tensor_cores import in_sequential_sums
from tests.variants import NAMED

HOPPER = TARGETS[0]
#: Four tiles of 128 pixels, or of 64 pairs: clusters of two share the reduction, or the filters.
LAYER = ConvProblem(1, 64, 16, 32, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")


def plan_of(name: str, problem: ConvProblem = LAYER, split: int = 2) -> Plan:
    algorithm = NAMED[name]
    configs = [c for c in algorithm.configs(problem, HOPPER) if (c.filters, c.split) == (64, split)]
    return algorithm.plan(problem, configs[0], HOPPER)


def played(plan: Plan, x: np.ndarray, w: np.ndarray, problem: ConvProblem = LAYER, **how: Any) -> np.ndarray:
    role = "y" if problem.op == "fprop" else "dx"
    result = np.full(problem.operands[-1].shape, np.nan, np.float32)
    given = {"x": x, "dy": x, "w": w, "bias": None, role: result}
    emulator.run_plan(plan, given, **how)
    return result


def validated_launches(plan: Plan) -> list[str]:
    return [each.symbol for each in plan.every_launch if dict(each.tuning).get("validates")]


@pytest.mark.parametrize("name", ["tensor_gemm", "tensor_winograd"])
def test_blocks_that_doubt_prepare_together(name: str) -> None:
    """The two blocks of a cluster, which the emulator plays side by side, share the work in all orders of threads."""
    plan = plan_of(name)
    assert validated_launches(plan) == [name] and plan.unprepared[-1].cluster == 2
    x, w = drawn("channels-apart", LAYER)
    assert in_sequential_sums(played(plan, x, w), x, w, LAYER) <= 2


@pytest.mark.parametrize("counter", [1, 2])
def test_a_wait_for_other_blocks_is_missed(counter: int, tmp_path: Path) -> None:
    """Each of the two waits: a block would take what another has not written."""
    change = f"{{{{while (ld_acquire(_ + {counter}) < _) {{}} => ;}}}}"
    kernels = broken_kernels(tmp_path, Patch("blocks do not wait for each other", "fall_back", change))
    # three pieces of the first step: the block that has but one of them goes on to the second
    problem = replace(LAYER, c=96, k=32)
    x, w = drawn("channels-apart", problem)
    try:
        y = played(plan_of("tensor_gemm", problem), x, w, problem, kernels=kernels)
    except emulator.EmulatorError as error:
        assert "race" in str(error)
    else:
        assert not in_sequential_sums(y, x, w, problem) <= 2


def test_a_wait_for_the_launch_before_is_missed(tmp_path: Path) -> None:
    """Consumers would read what that may not have written yet."""
    patch = Patch("no wait for the launch before", "validate_in_place", "{{griddepcontrol_wait();}}")
    kernels = broken_kernels(tmp_path, patch)
    x, w = drawn("normal", LAYER)
    with pytest.raises(emulator.EmulatorError, match="use-after-poison"):
        played(plan_of("tensor_gemm"), x, w, kernels=kernels)


@pytest.mark.parametrize("op", ["fprop", "dgrad"])
@pytest.mark.parametrize("kind", ["normal", "channels-apart"])
def test_kept_filters_are_those_of_one_call(op: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same outputs, bit by bit, from launches that prepare and check and from those of a call that prepares itself;
    with two groups of filters, and of a gradient's parts each with its own."""
    monkeypatch.setattr(tensor_filters, "BLOCKS_VALIDATED", 64)
    problem = replace(LAYER, op=op, groups=2, h=8, w=8, stride=(1, 2) if op == "dgrad" else (1, 1))
    layer = replace(problem, op="fprop")
    x, w = drawn("normal", layer)
    w = w[..., : problem.group_c].copy()
    if kind != "normal":
        w[..., ::3] *= np.float32(1e-9)
    given = x if op == "fprop" else np.random.default_rng(3).standard_normal(problem.y_shape).astype(np.float32)
    plan = plan_of("tensor_gemm", problem, 1)
    assert validated_launches(plan) == ["tensor_gemm"] * (2 if op == "dgrad" else 1)
    kept = replace(plan, unprepared=())
    results = [played(each, given, w, problem, orders=("ascending",)) for each in (plan, kept)]
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(*results)


def test_few_blocks_leave_the_check_to_a_launch() -> None:
    """In doubt one block would prepare all filters again."""
    assert not validated_launches(plan_of("tensor_gemm", replace(LAYER, h=4), 1))
    plan = plan_of("tensor_gemm")
    assert [each.symbol for each in plan.prepare] == ["speculative_filters", "validate_filters"]
    assert [each.symbol for each in plan.unprepared] == ["speculative_filters", "tensor_gemm"]
    assert [(each.early, each.opens) for each in plan.unprepared] == [(False, True), (True, False)]
    assert replace(plan, prepare=(), prepared_bytes=0).every_launch == plan.launches
