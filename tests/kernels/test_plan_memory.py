"""What launches reach lies within what their plan allocates: every algorithm, on random problems. Nothing runs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from leanconv.problem import ConvProblem
from tests.cases import TARGETS
from tests.kernels.plan_memory import draw_problem, faults
from tests.variants import NAMED, VARIANTS

HOPPER = TARGETS[0]
#: Problems of a run, and its seed: `make test` takes the first.
RUNS = [(700, 0), *(pytest.param(4000, s, marks=pytest.mark.exhaustive) for s in range(1, 9))]


@pytest.mark.parametrize(("count", "seed"), RUNS)
def test_launches_reach_what_was_allocated(count: int, seed: int) -> None:
    """Workspace, packed weights and tensor maps, with the first and the last of each variant's configurations."""
    rng, planned, volumes = np.random.default_rng(seed), Counter[str](), 0
    for _ in range(count):
        problem, target = draw_problem(rng), TARGETS[rng.integers(len(TARGETS))] if rng.random() < 0.2 else HOPPER
        volumes += isinstance(problem, ConvProblem) and problem.is_volume
        for algorithm in VARIANTS:
            if algorithm.reasons(problem, target):
                continue
            found = algorithm.within(problem, target)
            planned[algorithm.stem] += bool(found)
            for config in dict.fromkeys(config for _, config in (*found[:1], *found[-1:])):
                plan = algorithm.plan(problem, config, target)
                assert plan.workspace_bytes == algorithm.workspace_bytes(problem, config)
                assert plan.prepared_bytes == algorithm.prepared_bytes(problem, config)
                assert not faults(problem, plan), f"{algorithm.stem} {config} on {problem}"
    assert 0.1 * count < volumes < 0.2 * count
    # they have no scratch memory, and take few of the filters, or of the layers, that are drawn
    seldom = "separable_tensor", "box_passes", "native_gemm_pointwise", "native_gemm_planes", "native_gemm_skinny"
    named = [name for name in NAMED if name not in seldom]
    assert not [name for name in named if planned[name] < count // 400], planned


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_windows_that_read_only_padding(op: str, layout: str, precision: str) -> None:
    """Of a forward layer filters are packed all the same: what multiplies them has zeros for pixels."""
    problem = ConvProblem(
        *(32, 256, 1, 64, 256, 1, 3), stride=(2, 1), padding=(1, 1, 1, 1), op=op, layout=layout, precision=precision
    )  # type: ignore[misc]
    able = [each for each in VARIANTS if not each.reasons(problem, HOPPER)]
    assert NAMED["implicit_gemm_weight" if op == "wgrad" else "implicit_gemm"] in able
    for algorithm in able:
        for _, config in algorithm.within(problem, HOPPER):
            assert not faults(problem, algorithm.plan(problem, config, HOPPER)), algorithm.stem
