"""Phases of strided gradients of the input that one launch computes: native_gemm_16bit and native_gemm_tf32."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.kernels.common.input_gradient import prepared_bytes, single_phases
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import INCLUDE
from tests import emulator, proof, selection
from tests.cases import TARGETS, draw_conv
from tests.kernels.patching import Patch, broken_kernels
from tests.variants import NAMED

HOPPER = TARGETS[0]
STEMS = ("native_gemm_16bit", "native_gemm_tf32")
#: What tells phases apart: strides, their order, rows and columns, padding, dilation; 3 x 3 taps of 19 x 18 pixels.
LAYERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "rows": {"stride": (2, 1)},
    "columns": {"stride": (1, 2)},
    "three": {"stride": (3, 1), "groups": 2},
    "even": {"r": 2, "s": 2, "bias": True},
    "padding": {"padding": (0, 2, 2, 1)},
    "large": {"r": 5, "s": 4, "padding": (2, 2, 1, 2)},
    "dilation": {"dilation": (3, 1), "padding": (3, 3, 1, 1)},
    "taps-apart": {"r": 1, "stride": (1, 2), "padding": (0, 0, 1, 1), "accumulate": True},
}


def of(stem: str) -> Any:
    """A kernel, whose configurations have fields of their own."""
    return NAMED[stem]


def layer(stem: str, n: int, c: int, h: int, w: int, k: int, r: int = 3, s: int = 3, **more: Any) -> ConvProblem:
    """A gradient of the input with stride 2, one pixel of padding and 3 x 3 taps, as far as it is not said."""
    how = {"stride": (2, 2), "padding": (1, 1, 1, 1), **more}
    kind = {"dtype": "float16"} if stem == "native_gemm_16bit" else {"precision": "tf32"}
    return ConvProblem(n, c, h, w, k, r, s, layout="NHWC", op="dgrad", **kind, **how)  # type: ignore[arg-type]


def error_of(stem: str, problem: ConvProblem, blocks: int, kernels: Path = INCLUDE) -> float:
    """On a GPU of so many multiprocessors, whose blocks take turns over the tiles of all phases."""
    algorithm, target = of(stem), replace(HOPPER, multiprocessors=blocks)
    config = next(each for each in algorithm.configs(problem, target) if each.split == 1 and each.filters == 64)
    plan = algorithm.plan(problem, config, target)
    assert 2 <= len(single_phases(problem)) <= 4
    assert [launch.grid for launch in plan.launches] == [min(blocks, plan.launches[0].grid)]
    given = draw_conv(problem, "zero-mean")
    dx = np.full(problem.y_shape, 1 if problem.accumulate else np.nan, problem.dtype)
    emulator.run_plan(plan, {**given, "dx": dx}, kernels=kernels)
    exact = oracle.conv2d(problem, *(given[each.role] for each in problem.operands[:-1])) + problem.accumulate
    return float(oracle.relative_error(dx.astype(np.float64), exact))


PLAYED = list(product(STEMS, LAYERS, (1, 3, 132)))
USUAL = [each for each in PLAYED if each[2] == 3 or each[1] == next(iter(LAYERS))]


@pytest.mark.parametrize(
    ("stem", "name", "blocks"), selection.marked(PLAYED, USUAL, lambda each: (each, "-".join(map(str, each))))
)
def test_one_launch_computes_all_phases(stem: str, name: str, blocks: int) -> None:
    changes = LAYERS[name]
    problem = layer(stem, 3, 64, 19, 18, 64, **changes)
    assert error_of(stem, problem, blocks) < 1e-3


@pytest.mark.parametrize("stem", STEMS)
def test_blocks_go_on_in_the_ring_with_the_next_phase(stem: str, tmp_path: Path) -> None:
    anew = Patch("anew", "run_phases", "before + tiles.count(), {{place => RingPlace<Tuning::stages>()}}")
    with pytest.raises(emulator.EmulatorError):
        error_of(stem, layer(stem, 3, 64, 19, 18, 64), 1, broken_kernels(tmp_path, anew))


@pytest.mark.parametrize("split", [2, 4])
def test_clusters_share_the_reduction_of_each_phase(split: int) -> None:
    algorithm, problem = of("native_gemm_tf32"), layer("native_gemm_tf32", 1, 128, 9, 8, 128, 5, 4)
    config = next(each for each in algorithm.configs(problem, HOPPER) if each.split == split)
    assert len(algorithm.plan(problem, config, HOPPER).launches) == 1
    proof.check(algorithm, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize(
    ("changes", "launches"),
    [
        ({"stride": (1, 1)}, 1), ({}, 1), ({"stride": (2, 1)}, 1), ({"stride": (3, 2)}, 6),
        # a tap of every second pixel, and zeros
        ({"r": 1, "s": 1, "padding": (0, 0, 0, 0)}, 2),
        # the same pixels for all taps
        ({"dilation": (2, 2), "padding": (2, 2, 2, 2)}, 2),
        ({"d": 6, "t": 3, "stride_d": 2, "padding_d": (1, 1)}, 8),
        # two phases with a column of taps, and zeros in three of four
        ({"stride": (2, 4), "s": 1}, 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stem", STEMS)
def test_few_phases_are_one_launch(stem: str, changes: dict[str, Any], launches: int) -> None:
    """Whose filters one launch rearranges in TF32, and none in 16 bits."""
    algorithm, problem = of(stem), layer(stem, 2, 64, 16, 16, 64, **changes)
    prepare = int(stem == "native_gemm_tf32")
    for config in algorithm.configs(problem, HOPPER):
        plan = algorithm.plan(problem, config, HOPPER)
        assert (len(plan.launches), len(plan.prepare), plan.workspace_bytes) == (launches, prepare, 0)
        assert plan.prepared_bytes == prepare * prepared_bytes(problem)


@pytest.mark.parametrize("changes", [{"r": 1, "s": 1, "padding": (0, 0, 0, 0)}, {"stride": (2, 4), "s": 1}])
@pytest.mark.parametrize("bias", [False, True])
def test_pixels_without_taps_are_zeros(changes: dict[str, Any], bias: bool) -> None:
    algorithm, problem = of("native_gemm_tf32"), layer("native_gemm_tf32", 2, 32, 7, 9, 36, **changes, bias=bias)
    zeros = algorithm.plan(problem, next(iter(algorithm.configs(problem, HOPPER))), HOPPER).launches[-1]
    assert zeros.symbol == "gradient_zeros" and dict(zeros.tuning)["vector"] == 4
    proof.check(algorithm, problem, kinds=("zero-mean",))


@pytest.mark.parametrize("stem", STEMS)
def test_phases_in_one_launch_are_predicted_as_one(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round of the tiles of all phases, and one launch, in place of four."""
    algorithm, problem = of(stem), layer(stem, 4, 128, 16, 16, 128)
    speeds = type(algorithm).speeds.of(HOPPER)
    together = {config: time for time, config in algorithm.timed(problem, HOPPER)}
    for config in together:
        grid = algorithm.plan(problem, config, HOPPER).launches[0].grid
        assert config.split == 1 or grid <= HOPPER.multiprocessors, "no cluster computes two tiles"
    monkeypatch.setattr(type(algorithm), "_in_one_launch", lambda self, problem: False)
    apart = {config: time for time, config in algorithm.timed(problem, HOPPER)}
    whole = [config for config in together if config.split == 1 and config.pixels * config.filters >= 128 * 64]
    assert whole
    for config in whole:
        three = 3 * (speeds.first + speeds.tile + speeds.output * config.pixels * config.filters)
        assert together[config] + three < apart[config]


@pytest.mark.parametrize("stem", STEMS)
def test_clusters_of_phases_in_one_launch_add_up_once(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, problem = of(stem), layer(stem, 1, 256, 16, 16, 1024)
    speeds = type(algorithm).speeds.of(HOPPER)
    together = {config: time for time, config in algorithm.timed(problem, HOPPER)}
    monkeypatch.setattr(type(algorithm), "_in_one_launch", lambda self, problem: False)
    apart = {config: time for time, config in algorithm.timed(problem, HOPPER)}
    shared = [config for config in together if config in apart and config.split > 1]
    assert shared
    for config in shared:
        assert together[config] + 3 * speeds.first < apart[config]


@pytest.mark.parametrize("stem", STEMS)
def test_each_block_of_a_cluster_has_stages_of_every_phase(stem: str) -> None:
    """Of 16 and 20 stages in eight parts the last has none of the 20."""
    found, problem = 0, layer(stem, 1, 256, 8, 8, 256, 9, 3, padding=(4, 4, 1, 1))
    for config in (each for each in of(stem).configs(problem, HOPPER) if each.split > 1):
        for phase in single_phases(problem):
            stages = phase.problem.taps * -(-256 // config.channel_block) // config.stage_blocks
            assert -(-stages // config.split) * (config.split - 1) < stages, config
            found += 1
    assert found


@pytest.mark.parametrize("stem", STEMS)
def test_clusters_that_wait_are_those_of_all_phases(stem: str) -> None:
    """32 clusters of 4 wait on an H200, which 8 of each phase are."""
    problem = layer(stem, 8, 128, 22, 22, 2048, 5, 5, padding=(2, 2, 2, 2))
    config = next(iter(of(stem).configs(problem, NOMINAL)))
    assert (of(stem).plan(problem, config, NOMINAL).launches[0].grid, config.split) != (128, 4)
