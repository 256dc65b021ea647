"""The filters of a gradient that are split as they lie in the layer's, against those that a launch rearranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.kernels.common import split_gemm as tensor_filters
from leanconv.kernels.common.input_gradient import single_phases
from leanconv.kernels.common.split_gemm import prepared_floats, stages_of
from leanconv.kernels.contract import ceil_div
from leanconv.options import Layout
from leanconv.plan import Plan
from leanconv.problem import ConvProblem
from tests import emulator, selection
from tests.cases import TARGETS
from tests.kernels.patching import Patch, broken_kernels
from tests.variants import NAMED

TENSOR_GEMM = NAMED["tensor_gemm"]
PAD = (1, 1, 1, 1)


def layer(layout: Layout, c: int, k: int, r: int, s: int, *how: Any, groups: int = 1) -> ConvProblem:
    return ConvProblem(1, c, 9, 9, k, r, s, *how, groups=groups, layout=layout, op="dgrad")


#: What tells the ways apart in which a block reads its filters; "large" ones take more threads and shared memory.
LAYERS = {
    "nhwc": layer("NHWC", 32, 40, 3, 3, (1, 1), PAD),
    "nchw": layer("NCHW", 40, 64, 3, 3, (1, 1), PAD),
    "chwn": layer("CHWN", 40, 36, 3, 3, (1, 1), PAD),
    "pairs": layer("NHWC", 18, 32, 2, 3),
    "colours": layer("NHWC", 3, 64, 3, 3),
    "one-by-one": layer("NCHW", 48, 36, 1, 1),
    "large": layer("NHWC", 16, 304, 3, 3),
    "stride-nhwc": layer("NHWC", 32, 40, 4, 3, (2, 1), PAD, groups=2),
    "stride-nchw": layer("NCHW", 32, 40, 3, 5, (2, 1), PAD, (1, 2), groups=2),
    "strides-nchw": layer("NCHW", 32, 40, 3, 5, (2, 3), PAD, (1, 2), groups=2),
    "stride-chwn": layer("CHWN", 32, 40, 3, 3, (2, 1), PAD, groups=2),
}
#: Those of which `make test` has filters that need no factors, and that do.
LEFT = ("nhwc", "nchw", "chwn", "colours", "strides-nchw")
USUAL = {(name, name.startswith("stride")) for name in LAYERS if name not in LEFT}


def plan_of(problem: ConvProblem) -> tuple[Plan, Any]:
    config = min(TENSOR_GEMM.configs(problem, TARGETS[0]), key=lambda config: config.filters)
    return TENSOR_GEMM.plan(problem, config, TARGETS[0]), config


def split(problem: ConvProblem, w: np.ndarray, **how: Any) -> list[np.ndarray]:
    """What main kernels read of the prepared filters, for each part of the gradient."""
    plan, config = plan_of(problem)
    prepared = np.full(plan.prepared_bytes // 4, np.nan, np.float32)
    for launch in plan.prepare:
        emulator.run_launch(launch, {"w": w, "prepared": prepared}, **how)
    read, first = [], tensor_filters._first(problem)
    for phase in single_phases(problem):
        head, every = prepared_floats(phase.problem, config)
        tiles = phase.problem.groups * ceil_div(phase.problem.group_k, config.filters) * config.n_tiles
        fragments = tiles * stages_of(phase.problem, config.channel_block) * config.filter_stage_bytes // 4
        read.append(prepared[first : first + head + fragments].view(np.uint32))
        first += every
    return read


def drawn(problem: ConvProblem, factors: bool) -> np.ndarray:
    """The layer's filters are the channels of the gradient's: some are so small that they need factors."""
    w = np.random.default_rng(4).standard_normal(problem.w_shape).astype(np.float32)
    if factors:
        (w[..., ::5] if problem.layout == "CHWN" else w[::5])[:] *= np.float32(1e-9)
    return w


def launches(problem: ConvProblem) -> list[str]:
    return [launch.symbol for launch in plan_of(problem)[0].prepare]


def rearranging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_filters, "_is_mirrored", lambda problem: False)


@pytest.mark.parametrize(
    ("name", "factors"),
    selection.marked(
        [(name, factors) for name in LAYERS for factors in (False, True)],
        sorted(USUAL),
        lambda each: (each, f"{each[0]}-{'factors' if each[1] else 'plain'}"),
    ),
)
def test_split_filters_are_the_same(name: str, factors: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: filters, scales, factors and whether there are any."""
    problem = LAYERS[name]
    w = drawn(problem, factors)
    found = split(problem, w)
    assert launches(problem) == ["speculative_filters", "validate_filters"] * len(found)
    rearranging(monkeypatch)
    assert launches(problem)[0] == "gradient_filters"
    for mirrored, rearranged in zip(found, split(problem, w, orders=("ascending",)), strict=True):
        np.testing.assert_array_equal(mirrored, rearranged)
        assert bool(mirrored[4]) is factors


def test_filters_off_16_bytes() -> None:
    """As a part of a larger array may be: no lane loads four at once."""
    problem = LAYERS["large"]
    w = drawn(problem, False)
    np.testing.assert_array_equal(split(problem, w, offsets={"w": 4}), split(problem, w, orders=("ascending",)))


@pytest.mark.parametrize("change", ["/ Problem::s {{* Problem::apart_h}}", "{{* Problem::group_k}} + _) * _"])
def test_a_wrong_source_shows(change: str, tmp_path: Path) -> None:
    kernels = broken_kernels(tmp_path, Patch("a wrong source", "FiltersInMemory::source", change))
    problem = LAYERS["stride-nchw"]
    w = drawn(problem, False)
    found = split(problem, w, orders=("ascending",))
    try:
        broken = split(problem, w, orders=("ascending",), kernels=kernels)
    except emulator.EmulatorError as error:
        assert "touches" in str(error)
    else:
        assert any((a != b).any() for a, b in zip(found, broken, strict=True))


@pytest.mark.parametrize(
    ("problem", "mirrored"),
    [
        (layer("NHWC", 64, 512, 3, 3), True),
        (layer("NHWC", 64, 1024, 3, 3), True),
        (layer("NHWC", 15, 32, 3, 3), False),  # four are read for each
        (layer("NCHW", 15, 32, 3, 3), True),
        (layer("NHWC", 18, 32, 3, 3, (2, 2)), False),  # a phase has one tap, of four filters
        (layer("NCHW", 64, 512, 5, 5), False),  # larger than what is kept of any filter
    ],
)
def test_which_are_rearranged(problem: ConvProblem, mirrored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only these have room for it."""
    prepared = plan_of(problem)[0].prepared_bytes
    assert ("gradient_filters" in launches(problem)) is not mirrored
    rearranging(monkeypatch)
    assert plan_of(problem)[0].prepared_bytes == prepared + mirrored * 4 * np.prod(problem.w_shape)
