"""Convolution on tensor cores by products of single warps: its GPUs, its loaders and tiles. More is in
test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.kernels.common.split_gemm import DEPTH
from leanconv.kernels.mma_sync.tensor_gemm_sync import WarpConfig
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from leanconv.words import parse_problem
from tests import proof, selection
from tests.cases import KINDS, TARGETS, Case
from tests.cases_tensor import LAYER, TENSOR_CASES
from tests.variants import NAMED

TENSOR_GEMM = NAMED["tensor_gemm"]
TENSOR_GEMM_SYNC = NAMED["tensor_gemm_sync"]
#: GPUs that have no wgmma, and the one that has: with 163, 227 and 99 KiB of shared memory.
AMPERE, BLACKWELL, WORKSTATION, HOPPER = (
    next(target for target in TARGETS if target.arch == arch) for arch in ("sm_80", "sm_100a", "sm_120", "sm_90a")
)


def _every() -> list[Any]:
    """All layers with all tiles of three GPUs; ``make test`` plays the layers that those of tensor_gemm leave, without
    those of resident images and of rows of taps, which it has no loaders for."""
    found, chosen = [], []
    for turn, case in enumerate(TENSOR_CASES):
        ways = [
            (case, target, config, f"{case.name}-{target.arch}-{config.filters}-{config.warps}-{config.filter_stages}")
            for target in (AMPERE, WORKSTATION, HOPPER)
            for config in TENSOR_GEMM_SYNC.configs(case.problem, target)
        ]
        found += ways
        of_others = "resident" in case.name or "rows-of-taps" in case.name
        chosen += [ways[turn * 5 % len(ways)]] if case.in_turn and turn % 2 and not of_others else []
    return selection.marked(found, chosen, lambda each: (each[:3], each[3]))


@pytest.mark.parametrize(("case", "target", "config"), _every())
def test_every_tile_on_every_gpu(case: Case, target: Target, config: WarpConfig) -> None:
    proof.check(TENSOR_GEMM_SYNC, case.problem, config, kinds=KINDS[:1], target=target)


def test_it_runs_on_every_gpu_with_such_products() -> None:
    older = Target("sm_75", 40, 64 * 1024, 64 * 1024)
    assert any("sm_75 is older than sm_80" in reason for reason in TENSOR_GEMM_SYNC.why_not(LAYER, older))
    for arch in ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100a", "sm_120"):
        assert not TENSOR_GEMM_SYNC.why_not(LAYER, replace(AMPERE, arch=arch))


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
                fit = min(config.min_blocks, target.shared_per_multiprocessor // (config.shared_bytes + 1024))
                assert fit * config.warps >= 8
                assert DEPTH % config.channel_block == 0 and config.mma_n % config.step == 0


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


def test_strided_groups_in_tf32_are_taken_on_hopper():
    """Explored (H200, 13330f93): 95 µs, where tensor_gemm takes 176 and native_gemm_groups 124."""
    problem = parse_problem("conv:n32,c1024,h28,k1024,r3,stride2,pad1,groups32,NCHW,tf32")
    assert by_model(problem, NOMINAL).algorithm is TENSOR_GEMM_SYNC
    # larger groups are left to wgmma
    large = parse_problem("conv:n32,c240,h56,k240,r3,stride2,pad1,groups2,NHWC,tf32")
    assert by_model(large, NOMINAL).algorithm.stem == "native_gemm_tf32"
