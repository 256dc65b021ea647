"""16 bits by products of single warps, channels last, and the filters' gradient: tiles, both ways to shared memory,
where they are chosen."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.cpu import oracle
from leanconv.kernels.mma_sync.native_gemm_sync import COPIED_STAGES, HELD_STAGES
from leanconv.kernels.mma_sync.native_weight_sync import STEPS_AT_ONCE, NativeWeightSync
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from leanconv.words import parse_problem
from tests import emulator, proof, selection
from tests.cases import KINDS, TARGETS
from tests.variants import NAMED

SYNC, WEIGHT = NAMED["native_gemm_sync"], NAMED["native_weight_sync"]
AMPERE, WORKSTATION, HOPPER = (
    next(target for target in TARGETS if target.arch == arch) for arch in ("sm_80", "sm_120", "sm_90a")
)
SAME: dict[str, Any] = {"padding": (1, 1, 1, 1)}
#: Channels that are brought by eights, fours and pairs, and one by one: more than one step of 64 elements, groups,
#: slices, phases of a gradient.
LAYERS = {
    "eights": ConvProblem(2, 24, 9, 11, 40, 3, 3, stride=(2, 1), bias=True, activation="relu", **SAME),
    "fours": ConvProblem(1, 36, 8, 9, 70, 3, 2, add=True, scale=True, bias=True),
    "pairs": ConvProblem(2, 18, 7, 12, 21, 3, 3, dilation=(1, 2), **SAME),
    "singles": ConvProblem(1, 45, 7, 6, 18, 3, 3, **SAME),
    "one": ConvProblem(2, 1, 9, 8, 3, 1, 1),
    "groups": ConvProblem(2, 30, 6, 9, 24, 3, 3, groups=3, **SAME),
    "slices": ConvProblem(1, 10, 6, 9, 24, 3, 3, stride=(2, 2), d=4, t=3, stride_d=2, padding_d=(1, 1), **SAME),
    "gradient": ConvProblem(1, 13, 9, 11, 22, 3, 3, stride=(2, 2), op="dgrad", **SAME),
    "gradient-slices": ConvProblem(1, 6, 5, 7, 16, 3, 3, d=4, t=2, stride_d=2, op="dgrad", **SAME),
}


#: Of the gradient of the filters: both operands by eights, one of them, neither; several steps of 64 pixels.
WEIGHTS = {
    "eights": ConvProblem(2, 24, 9, 11, 40, 3, 3, stride=(2, 1), accumulate=True, **SAME),
    "filters-in-pairs": ConvProblem(2, 16, 12, 13, 18, 1, 3),
    "channels-in-fours": ConvProblem(1, 36, 9, 11, 24, 3, 2, groups=3, dilation=(1, 2), padding=(1, 0, 2, 1)),
    "singles": ConvProblem(2, 5, 9, 11, 7, 3, 3, **SAME),
    "one": ConvProblem(2, 1, 9, 11, 7, 3, 1),
    "slices": ConvProblem(1, 10, 6, 9, 24, 3, 3, stride=(2, 2), d=4, t=3, stride_d=2, padding_d=(1, 1), **SAME),
}


def _every() -> list[Any]:
    """Every tile of three GPUs; ``make test`` plays one of each layer, in turn."""
    found, chosen = [], []
    layers = [(SYNC, *each) for each in LAYERS.items()]
    layers += [(WEIGHT, name, replace(layer, op="wgrad")) for name, layer in WEIGHTS.items()]
    for turn, (algorithm, name, layer) in enumerate(layers):
        dtype = "bfloat16" if turn % 2 else "float16"
        problem = replace(layer, layout="NHWC", dtype=dtype)
        ways = [
            (algorithm, problem, target, config, f"{algorithm.stem}-{name}-{target.arch}-{i}")
            for target in (AMPERE, WORKSTATION, HOPPER)
            for i, config in enumerate(algorithm.configs(problem, target))
        ]
        found += ways
        chosen.append(ways[turn * 5 % len(ways)])
    return selection.marked(found, chosen, lambda each: (each[:4], each[4]))


@pytest.mark.parametrize(("algorithm", "problem", "target", "config"), _every())
def test_every_tile(algorithm: Any, problem: ConvProblem, target: Target, config: Any) -> None:
    proof.check(algorithm, problem, config, kinds=KINDS[:1], target=target)


def test_elements_of_16_bytes_are_copied_and_others_pass_registers() -> None:
    for name, layer in LAYERS.items():
        read = layer.group_k if layer.op == "dgrad" else layer.group_c
        stages = COPIED_STAGES if read % 8 == 0 else HELD_STAGES
        problem = replace(layer, layout="NHWC", dtype="float16")
        assert {config.stages for config in SYNC.configs(problem, AMPERE)} == {stages}, name


@pytest.mark.parametrize("name", ["eights", "pairs", "singles"])
def test_what_is_not_finite_reaches_the_pixels_of_its_windows_alone(name: str) -> None:
    """Neither padding, nor the zeros behind the last element of a filter, nor a neighbour's channels."""
    rng = np.random.default_rng(3)
    layer = replace(LAYERS[name], layout="NHWC", dtype="float16", bias=False, activation=None)
    read, filters, *_, written = layer.operands
    x, w = (rng.standard_normal(each.shape).astype("float16") for each in (read, filters))
    x[0, 3, 5, 1], x[0, -2, -1, -1] = np.inf, np.nan
    result = np.zeros(written.shape, "float16")
    config = next(iter(SYNC.configs(layer, HOPPER)))
    emulator.run_plan(SYNC.plan(layer, config, HOPPER), {read.role: x, "w": w, written.role: result, "bias": None})
    right = oracle.conv2d(layer, np.nan_to_num(x, nan=0, posinf=0), w, None)
    met = oracle.conv2d(layer, (~np.isfinite(x)).astype(np.float32), np.ones_like(w), None) > 0
    assert np.array_equal(~np.isfinite(result), met)
    assert np.allclose(result[~met], right[~met], rtol=1e-2, atol=1e-2)


def test_what_is_not_finite_in_x_reaches_its_taps_of_the_gradient_alone() -> None:
    """Neither columns of another tap nor the pixels behind the last: those are zeros of both operands."""
    rng = np.random.default_rng(3)
    layer = replace(WEIGHTS["singles"], layout="NHWC", dtype="float16", op="wgrad")
    x, dy = (rng.standard_normal(each.shape).astype("float16") for each in layer.operands[:2])
    x[-1, -1, -1, 2] = np.inf
    result = np.zeros(layer.operands[-1].shape, "float16")
    config = next(iter(WEIGHT.configs(layer, AMPERE)))
    emulator.run_plan(WEIGHT.plan(layer, config, AMPERE), {"x": x, "dy": dy, "dw": result})
    # outputs before the last pixel reach it by later taps than the one in the middle
    expected = np.zeros(result.shape, bool)
    expected[:, 1:, 1:, 2] = True
    assert np.array_equal(~np.isfinite(result), expected)


def test_a_block_adds_sums_of_many_pixels_outside_of_the_tensor_core() -> None:
    """With room for partial sums or without; of few pixels it needs no shared memory for them."""
    for words, arch, limit in (
        ("n64,c64,h224,k64,r3,pad1", "sm_80", 1 << 25),
        ("n64,c36,h224,k36,r3,pad1", "sm_90a", 0),
        ("n64,c64,h224,k64,r3,pad1", "sm_120", 0),
        ("n4,c36,h56,k36,r3,pad1", "sm_80", 0),
    ):
        problem = replace(parse_problem(f"conv:{words},NHWC,float16"), op="wgrad")
        target = next(target for target in TARGETS if target.arch == arch)
        found = NativeWeightSync().within(problem, target, limit)
        assert found, words
        for _, config in found:
            steps = -(-problem.pixels // (64 * config.split * config.split_k))
            assert config.totals == (steps > STEPS_AT_ONCE), words
            assert config.shared_bytes <= target.shared_per_block


@pytest.mark.parametrize("name", ["eights", "singles"])
def test_totals_are_right(name: str) -> None:
    """Sums of one step at a time, of two, and of more than there are."""
    problem = replace(WEIGHTS[name], layout="NHWC", dtype="float16", op="wgrad")
    for config in itertools.islice(WEIGHT.configs(problem, HOPPER), 6):
        for steps in (1, 2, 9):
            proof.check(
                WEIGHT, problem, replace(config, totals=True, steps_at_once=steps), kinds=KINDS[:1], target=HOPPER
            )


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_16_bits_run_on_tensor_cores_of_every_gpu(op: Any) -> None:
    """As networks have them, channels last, where nothing else does: FP32 cores computed these layers."""
    for arch in ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120"):
        for words in ("n32,c64,h56,k64,r3,pad1", "n32,c256,h14,k1024,r1", "n8,c512,h32,k512,r3,pad1"):
            problem = replace(parse_problem(f"conv:{words},NHWC,bfloat16"), op=op)
            chosen = by_model(problem, Target(arch, 84), "auto", 1 << 25).algorithm.stem
            assert chosen == ("native_weight_sync" if op == "wgrad" else "native_gemm_sync"), (arch, words)


def test_on_hopper_it_has_the_layers_that_tensor_copies_cannot_bring() -> None:
    """Channels that are no multiple of eight. Explored (H200, 81bb595): 31 µs where FP32 cores take 105."""
    odd = parse_problem("conv:n8,c230,h28,k128,r3,pad1,NHWC,float16")
    assert by_model(odd, NOMINAL).algorithm is SYNC
    for words in ("n32,c64,h56,k64,r3,pad1", "n8,c512,h32,k512,r3,pad1", "n64,c256,h56,k64,r1"):
        problem = parse_problem(f"conv:{words},NHWC,float16")
        assert by_model(problem, NOMINAL).algorithm.stem in ("native_gemm_16bit", "native_gemm_window"), words
        gradient = by_model(replace(problem, op="wgrad"), NOMINAL, "auto", 1 << 25).algorithm
        assert gradient.stem == "native_weight_nhwc", words
    assert by_model(replace(odd, op="wgrad"), NOMINAL, "auto", 1 << 25).algorithm.stem == "native_weight_sync"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC: the channels of a pixel are no run of memory"),
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "wgrad"}, "op='wgrad' is neither the forward pass nor the gradient of the input"),
    ],
)
def test_what_it_declines(change: dict[str, Any], reason: str) -> None:
    problem = ConvProblem(1, 18, 9, 9, 12, 3, 3, layout="NHWC", dtype="float16")
    assert any(reason in each for each in SYNC.why_not(replace(problem, **change), AMPERE))
    older = Target("sm_75", 40, 64 * 1024, 64 * 1024)
    assert any("sm_75 is older than sm_80" in each for each in SYNC.why_not(problem, older))
