"""The filters of a gradient that are split from the layer's, mirrored, against those that a launch rearranges before."""

from __future__ import annotations

from dataclasses import replace

import emulator
import numpy as np
import pytest
from cases import TARGETS
from cases_tensor import broken_kernels

from leanconv.algorithms import ALGORITHMS, tensor_filters
from leanconv.algorithms.input_gradient import single_parts
from leanconv.algorithms.tensor_filters import prepared_floats, stages_of
from leanconv.plan import Plan
from leanconv.problem import ConvProblem

HOPPER = TARGETS[0]
PAD = (1, 1, 1, 1)
#: What the layouts, and phases of a gradient, tell apart; the second of each name needs factors.
LAYERS = {
    "nhwc": ConvProblem(1, 40, 6, 6, 72, 3, 3, padding=PAD, layout="NHWC", op="dgrad"),
    "nchw": ConvProblem(1, 40, 6, 6, 64, 3, 3, padding=PAD, layout="NCHW", op="dgrad"),
    "chwn": ConvProblem(1, 40, 6, 6, 36, 3, 3, padding=PAD, layout="CHWN", op="dgrad"),
    "pairs": ConvProblem(1, 18, 6, 6, 32, 2, 3, padding=PAD, layout="NHWC", op="dgrad"),
    "stride-nhwc": ConvProblem(1, 32, 9, 9, 40, 4, 3, (2, 2), PAD, groups=2, layout="NHWC", op="dgrad"),
    "stride-nchw": ConvProblem(1, 32, 9, 9, 40, 3, 5, (2, 3), PAD, (1, 2), groups=2, layout="NCHW", op="dgrad"),
    "stride-chwn": ConvProblem(1, 32, 9, 9, 40, 3, 3, (2, 1), PAD, groups=2, layout="CHWN", op="dgrad"),
    "one-by-one": ConvProblem(1, 48, 5, 5, 36, 1, 1, layout="NCHW", op="dgrad"),
    "large": ConvProblem(1, 16, 5, 5, 304, 3, 3, padding=PAD, layout="NHWC", op="dgrad"),
}


def split_filters(problem: ConvProblem, w: np.ndarray, name: str = "tensor_gemm", **how: object) -> list[np.ndarray]:
    """What main kernels read of the prepared filters, of each part of the gradient."""
    algorithm = next(a for a in ALGORITHMS if a.name == name)
    config = min(algorithm.configs(problem, HOPPER), key=lambda config: config.filters)
    plan = algorithm.plan(problem, config, HOPPER)
    prepared = np.full(plan.prepared_bytes // 4, np.nan, np.float32)
    for launch in plan.prepare:
        emulator.run_launch(launch, {"w": w, "prepared": prepared}, **how)
    read, first = [], tensor_filters._first(problem)
    for part in single_parts(problem):
        head, every = prepared_floats(part.problem, config)
        stages = stages_of(part.problem, config.piece) * config.chunks * config.filter_stage_bytes // 4
        tiles = part.problem.groups * -(-part.problem.group_k // config.filters)
        read.append(prepared[first : first + head + tiles * stages].view(np.uint32))
        first += every
    return read


def rearranged_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_filters, "_is_mirrored", lambda problem: False)


def drawn(problem: ConvProblem, apart: bool) -> np.ndarray:
    w = np.random.default_rng(4).standard_normal(problem.w_shape).astype(np.float32)
    if apart:  # layers' filters are the channels of the gradient's
        along = 3 if problem.layout == "CHWN" else 0
        w *= np.where(np.arange(w.shape[along]) % 5 == 0, np.float32(1e-9), 1).reshape(
            [-1 if axis == along else 1 for axis in range(4)]
        )
    return w


@pytest.mark.parametrize("apart", [False, True], ids=["plain", "factors"])
@pytest.mark.parametrize("layer", LAYERS)
def test_split_filters_are_the_same(layer: str, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = LAYERS[layer]
    w = drawn(problem, apart)
    found = split_filters(problem, w, orders=("ascending",))
    assert tensor_filters._is_mirrored(problem)
    rearranged_plan(monkeypatch)
    for one, other in zip(found, split_filters(problem, w, orders=("ascending",)), strict=True):
        np.testing.assert_array_equal(one, other)
