"""Convolution on tensor cores by products of single warps: its GPUs, its loaders and tiles, data of every range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.cpu import oracle
from leanconv.kernels.hopper_fp32.filters import DEPTH, prepared_floats
from leanconv.kernels.mma_sync.tensor_gemm_sync import WarpConfig
from leanconv.options import Layout
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from tests import emulator, proof, selection
from tests.cases import TARGETS, Case
from tests.cases_tensor import LAYER, RANGES, TENSOR_CASES, drawn, in_sequential_sums, with_no_numbers
from tests.variants import NAMED

TENSOR_GEMM = NAMED["tensor_gemm"]
TENSOR_GEMM_SYNC = NAMED["tensor_gemm_sync"]
#: GPUs that have no wgmma, and the one that has: with 163, 227 and 99 KiB of shared memory.
AMPERE, BLACKWELL, WORKSTATION, HOPPER = (
    next(target for target in TARGETS if target.arch == arch) for arch in ("sm_80", "sm_100a", "sm_120", "sm_90a")
)


def _every() -> list[Any]:
    """All layers with all tiles of three GPUs; ``make test`` plays the layers that those of tensor_gemm leave."""
    found, chosen = [], []
    for turn, case in enumerate(TENSOR_CASES):
        ways = [
            (case, target, config, f"{case.name}-{target.arch}-{config.filters}-{config.warps}-{config.filter_stages}")
            for target in (AMPERE, WORKSTATION, HOPPER)
            for config in TENSOR_GEMM_SYNC.configs(case.problem, target)
        ]
        found += ways
        chosen += [ways[turn * 5 % len(ways)]] if case.in_turn and turn % 2 else []
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("case", "target", "config"), _every())
def test_every_tile_on_every_gpu(case: Case, target: Target, config: WarpConfig) -> None:
    proof.check(TENSOR_GEMM_SYNC, case.problem, config, target=target)


def played(x: np.ndarray, w: np.ndarray, problem: ConvProblem = LAYER) -> np.ndarray:
    """What the kernel computes."""
    y = np.full(problem.y_shape, np.nan, np.float32)
    plan = TENSOR_GEMM_SYNC.plan(problem, next(iter(TENSOR_GEMM_SYNC.configs(problem, AMPERE))), AMPERE)
    emulator.run_plan(plan, {"x": x, "w": w, "bias": None, "y": y}, orders=("ascending",))
    return y


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("kind", RANGES)
def test_errors_on_data_of_every_range(kind: str, layout: Layout) -> None:
    """Of each filter at most twice what a sequential float32 sum loses; on normal data less than it loses."""
    x, w = drawn(kind)
    if layout == "NHWC":
        y = played(x, w)
    else:
        turned = (np.ascontiguousarray(each.transpose(0, 3, 1, 2)) for each in (x, w))
        y = played(*turned, replace(LAYER, layout=layout)).transpose(0, 2, 3, 1)
    assert in_sequential_sums(y, x, w) <= (1 if kind == "normal" else 2)


def test_what_is_no_number_reaches_just_the_outputs_that_see_it() -> None:
    x, w, unseen = with_no_numbers()
    np.testing.assert_array_equal(np.isfinite(played(x, w)), unseen)


def test_one_product_keeps_eleven_bits() -> None:
    problem = replace(LAYER, precision="tf32")
    x, w = drawn("normal", problem)
    assert 1e-4 < oracle.relative_error(played(x, w, problem), oracle.conv2d(problem, x, w)) < 5e-4


def test_limits_name_the_rule() -> None:
    older = Target("sm_75", 40, 64 * 1024, 64 * 1024)
    assert any("sm_75 is older than sm_80" in reason for reason in TENSOR_GEMM_SYNC.why_not(LAYER, older))
    for arch in ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_120"):
        assert not TENSOR_GEMM_SYNC.why_not(LAYER, replace(AMPERE, arch=arch))
    small = ConvProblem(1, 24, 8, 8, 24, 3, 3, groups=3)
    assert "groups=3 leaves 8 channels in a group, fewer than 16" in TENSOR_GEMM_SYNC.why_not(small, AMPERE)
    many = ConvProblem(1, 9000, 8, 8, 8, 1, 1)
    assert "a filter has 9000 channels, more than 8192" in TENSOR_GEMM_SYNC.why_not(many, AMPERE)
    exact = replace(LAYER, precision="ieee")
    assert any("'fp32'" in reason for reason in TENSOR_GEMM_SYNC.reasons(exact, AMPERE))


def test_wgmma_is_preferred_where_it_runs() -> None:
    """For a large layer and a small one, in each direction and layout."""
    for n, c, h, k in ((32, 256, 56, 256), (1, 64, 14, 64), (64, 128, 28, 512)):
        for layout in ("NCHW", "NHWC", "CHWN"):
            for op in ("fprop", "dgrad"):
                problem = ConvProblem(n, c, h, h, k, 3, 3, padding=(1, 1, 1, 1), layout=layout, op=op)  # type: ignore[arg-type]
                best, other = (each.within(problem, HOPPER)[0][0] for each in (TENSOR_GEMM, TENSOR_GEMM_SYNC))
                assert best < other


def test_tiles_fit_every_gpu() -> None:
    """Two warps for each of the four schedulers, so that one converts while the other multiplies."""
    for case in TENSOR_CASES:
        for target in TARGETS:
            for config in TENSOR_GEMM_SYNC.configs(case.problem, target):
                assert config.shared_bytes <= target.shared_per_block
                fit = min(config.min_blocks, target.shared_per_multiprocessor // (config.shared_bytes + 1024))
                assert fit * config.warps >= 8
                assert DEPTH % config.piece == 0 and config.chunk % config.step == 0


def test_the_speed_of_tensor_cores_decides() -> None:
    """Against the float32 cores: consumer cards sum at half speed, which three products do not make up for."""
    layer = ConvProblem(32, 256, 56, 56, 256, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    plain = NAMED["implicit_gemm"]

    def faster(problem: ConvProblem, target: Target) -> bool:
        return TENSOR_GEMM_SYNC.within(problem, target)[0][0] < plain.within(problem, target)[0][0]

    one = replace(layer, precision="tf32")
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120"):
        assert faster(layer, Target(arch, 84)) and faster(one, Target(arch, 84))
    for arch in ("sm_86", "sm_89", "sm_120"):
        assert not faster(layer, Target(arch, 84, consumer=True))
        assert faster(one, Target(arch, 84, consumer=True))


def test_prepared_filters_have_room_for_all_that_is_written() -> None:
    for case in TENSOR_CASES:
        for config in TENSOR_GEMM_SYNC.configs(case.problem, AMPERE):
            plan = TENSOR_GEMM_SYNC.plan(case.problem, config, AMPERE)
            assert plan.prepared_bytes == TENSOR_GEMM_SYNC.prepared_bytes(case.problem)
            if case.problem.op == "fprop":
                head, every = prepared_floats(case.problem, config)
                assert head % 4 == 0 and 4 * every <= plan.prepared_bytes
