"""What all kernels on tensor cores refuse in the same words: limits by name, other GPUs, precision levels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.kernels.common.split_gemm import prepared_floats
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.plan import Target
from leanconv.problem import ConvProblem
from tests import cases_tensor
from tests.cases import TARGETS
from tests.kernels.tensor_cores import (
    CASES,
    GRADIENT,
    HOPPER,
    KERNELS,
    LAYERS,
    ONE_BY_ONE,
    each_kernel,
    layer_of,
)
from tests.variants import NAMED, VARIANTS

SMALL = ConvProblem(1, 24, 8, 8, 24, 3, 3, groups=3)
TOO_SMALL = "groups=3 leaves 8 channels in a group, fewer than 16"
MANY = ConvProblem(1, 9000, 8, 8, 8, 1, 1)
TOO_MANY = "a filter has 9000 channels, more than 8192"


def _changes(problem: ConvProblem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in ("n", "c", "h", "w", "k", "r", "s", "padding", "groups", "layout")}


#: What a change to a kernel's layer is declined for: words of one of the reasons, or all reasons.
LIMITS: dict[str, list[tuple[dict[str, Any], str | list[str]]]] = {
    "tensor_gemm": [(_changes(SMALL), [TOO_SMALL]), (_changes(MANY), [TOO_MANY])],
    "tensor_gemm_sync": [(_changes(SMALL), [TOO_SMALL]), (_changes(MANY), [TOO_MANY])],
    "tensor_winograd": [
        ({"r": 1}, []),
        ({"r": 5, "padding": (4, 4, 1, 1), "dilation": (2, 1)}, []),
        ({"s": 2}, ["filters are 2 wide, less than 3"]),
        ({"s": 31, "padding": (1, 1, 15, 15)}, []),
        (
            {"r": 1, "s": 261, "w": 260, "padding": (0, 0, 100, 130)},
            ["filters are 261 wide, more than the 258 that bulk copies reach"],
        ),
        ({"layout": "CHWN"}, ["layout='CHWN' is neither NHWC nor NCHW"]),
        ({"layout": "NCHW"}, []),
        ({"layout": "NCHW", "w": 9}, "in NCHW"),
        ({"layout": "NCHW", "padding": (1, 1, 1, 2)}, "in NCHW"),
        ({"layout": "NCHW", "c": 96, "k": 96, "groups": 2}, "in NCHW"),
        ({"stride": (1, 2)}, ["stride=(1, 2) is not (1, 1)"]),
        ({"dilation": (1, 2)}, "dilation=(1, 2)"),
        ({"c": 62}, "62 channels"),
    ],
    "tensor_weight": [
        (_changes(SMALL), [TOO_SMALL]),
        ({"op": "fprop"}, ["op='fprop' is not the gradient of the filters"]),
    ],
    "tensor_weight_images": [
        ({"n": 15}, "n=15 images are fewer than 16"),
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC"),
        ({"s": 1}, "s=1 leaves no taps of a row that could share x"),
        ({"c": 34}, "multiples of four"),
        ({"h": 1, "r": 1, "padding": (1, 2, 1, 1), "stride": (3, 1)}, ["no tap reads the image"]),
    ],
    "native_gemm_16bit": [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "wgrad", "bias": False, "activation": None}, "op='wgrad'"),
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC"),
        ({"layout": "CHWN"}, "layout='CHWN' is not NHWC"),
        ({"n": 0}, "n=0"),
        ({"c": 252}, "252 channels of 16 bits are no multiple of 16 bytes"),
        ({"c": 24, "k": 24, "groups": 3}, "groups=3 leaves 8 channels in a group, no multiple of 16"),
        ({**GRADIENT, "k": 20}, "20 filters of 16 bits"),
        ({"stride": (9, 1)}, "traversal"),
        ({"h": 600, "dilation": (128, 1)}, "a filter reaches 256 pixels, and tensor copies 255"),
    ],
    "native_gemm_tf32": [
        ({"precision": "fp32"}, "precision"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC"),
        ({"c": 254}, "254 channels of 32 bits are no multiple of 16 bytes"),
        ({"c": 12, "k": 24, "groups": 3}, "groups=3 leaves 4 channels in a group, no multiple of 8"),
    ],
    "native_gemm_nchw": [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "wgrad", "bias": False, "activation": None}, "op='wgrad'"),
        ({"layout": "NHWC"}, "layout='NHWC' is not NCHW"),
        ({"layout": "CHWN"}, "layout='CHWN' is not NCHW"),
        ({"n": 0}, "n=0"),
        ({"n": 700000}, "images have more than 2146435072 pixels"),
        ({**ONE_BY_ONE, "n": 1, "c": 1, "h": 30000, "w": 30000}, "images have more than"),
        ({"n": 70000000, "c": 1024, "k": 1024, "groups": 1024, "h": 1, "w": 1}, "outputs are more than"),
        ({"stride": (1, 65)}, "stride=(1, 65) is more than 64"),
        ({"w": 4000}, "a tile of 128 outputs reads 8133 pixels"),
        ({"h": 200, "w": 200, "r": 65, "s": 65}, "filters have 4225 taps, more than 4096"),
    ],
    "native_weight_nhwc": [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "dgrad"}, "op='dgrad' is not the gradient of the filters"),
        ({"layout": "NCHW"}, "layout='NCHW' is not NHWC"),
        ({"n": 0}, "n=0"),
        ({"c": 252}, "252 channels of 16 bits are no multiple of 16 bytes"),
        ({"k": 20}, "20 filters of 16 bits"),
        ({"groups": 64}, "4 channels in a group of 16 bits"),
        ({"stride": (9, 1)}, "traversal"),
        ({"h": 600, "dilation": (128, 1)}, "a filter reaches 256 pixels, and tensor copies 255"),
        ({"n": 700000}, "pixels, 2**31 or more"),
    ],
    "native_weight_nchw": [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "dgrad"}, "op='dgrad' is not the gradient of the filters"),
        ({"layout": "NHWC"}, "layout='NHWC' is not NCHW"),
        ({"layout": "CHWN"}, "layout='CHWN' is not NCHW"),
        ({"n": 0}, "n=0"),
        ({"n": 700000}, "images have more than 2146435072 pixels"),
        ({"stride": (1, 65)}, "stride=(1, 65) is more than 64"),
        ({"w": 4000}, "windows of 64 outputs see 8069 pixels"),
    ],
    "native_weight_kmajor": [
        ({"dtype": "float32"}, "dtype='float32' is neither float16 nor bfloat16"),
        ({"op": "dgrad"}, "op='dgrad' is not the gradient of the filters"),
        ({"layout": "NHWC"}, "layout='NHWC' is not NCHW"),
        ({"n": 0}, "n=0"),
        ({"n": 700000}, "pixels, 2**31 or more"),
        ({"stride": (2, 2)}, "stride=(2, 2): along a row neighbouring outputs must read neighbouring pixels"),
        ({"w": 60}, "rows of 60 pixels of x are no multiple of 16 bytes, which tensor copies require: take 64 pixels"),
        ({"padding": (1, 1, 0, 0)}, "rows of 54 pixels of the output, which follow from 56 pixels of x and padding="),
        ({"dilation": (9, 1), "padding": (9, 9, 1, 1)}, "no tensor map describes x: traversal"),
        ({"w": 8, "h": 500, "stride": (200, 1)}, "take more than the 232448 bytes of shared memory"),
        ({"w": 8, "h": 500, "stride": (80, 1)}, "3 stages of 95232 bytes take more than the 232448 bytes"),
    ],
}


@pytest.mark.parametrize(
    ("stem", "changes", "reason"),
    [pytest.param(stem, *each, id=f"{stem}-{each[1]}-{i}") for stem in LIMITS for i, each in enumerate(LIMITS[stem])],
)
def test_limits_are_named(stem: str, changes: dict[str, Any], reason: str | list[str]) -> None:
    algorithm = NAMED[stem]
    reasons = algorithm.reasons(replace(LAYERS[stem], **changes), HOPPER)
    if isinstance(reason, list):
        assert reasons == reason
    else:
        assert any(reason in each for each in reasons), reasons


@each_kernel()
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
def test_gpus_are_those_that_have_the_products(algorithm: GpuAlgorithm, target: Target) -> None:
    missing = [f"{target.arch} has no products of warpgroups (wgmma), which only sm_90a has"]
    if algorithm.stem == "native_gemm_skinny":
        missing = [f"{target.arch} has no bulk copies, which are of sm_90 and newer"]
    assert algorithm.reasons(layer_of(algorithm), target) == ([] if _runs(algorithm, target) else missing)


def _runs(algorithm: GpuAlgorithm, target: Target) -> bool:
    """Whether a GPU has the products of a kernel, and its copies."""
    if algorithm.stem == "native_gemm_skinny":
        return target.clusters
    return target.warpgroup_products or algorithm.family == "mma_sync"


@each_kernel()
def test_strict_precision_is_refused(algorithm: GpuAlgorithm) -> None:
    exact = replace(layer_of(algorithm), precision="ieee")
    assert f"it keeps precision {algorithm.precision!r}, and 'ieee' was requested" in algorithm.reasons(exact, HOPPER)


@each_kernel()
def test_speeds_are_compared_with_what_multiplies(algorithm: GpuAlgorithm) -> None:
    """Shares of a ceiling are those of tensor cores, a third of it where three products are one."""
    layer = cases_tensor.LAYER
    if algorithm.stem in ("native_gemm_tf32", "native_gemm_window_tf32"):
        assert algorithm.arithmetic(replace(layer, precision="tf32")) == "tf32"
        return
    if algorithm.strategy.startswith("groups"):
        assert [algorithm.arithmetic(replace(layer, dtype=each)) for each in ("float16", "float32")] == ["fp16", "tf32"]
        return
    assert algorithm.arithmetic(layer) == ("fp16" if algorithm.stem.startswith("native_") else "fp16x3")
    assert algorithm.arithmetic(replace(layer, precision="tf32")) == "fp16"


def test_speeds_of_others_are_compared_with_float32_cores() -> None:
    for algorithm in VARIANTS:
        if algorithm not in KERNELS and algorithm.solves == "conv2d":
            assert algorithm.arithmetic(cases_tensor.LAYER) == "fp32"
            assert algorithm.arithmetic(replace(cases_tensor.LAYER, precision="tf32")) == "fp32"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch)
@each_kernel()
def test_every_configuration_fits_and_takes_what_is_said(algorithm: GpuAlgorithm, target: Target) -> None:
    """Shared memory, prepared filters and workspace; fragments begin and end where `prepared_floats` says."""
    taken = [case.problem for case in CASES if not algorithm.reasons(case.problem, target)]
    assert bool(taken) == _runs(algorithm, target)
    for problem in taken:
        for config in algorithm.configs(problem, target):
            plan = algorithm.plan(problem, config, target)
            assert all(launch.shared_bytes <= target.shared_per_block for launch in plan.every_launch)
            assert plan.prepared_bytes == algorithm.prepared_bytes(problem, config)
            assert plan.workspace_bytes == algorithm.workspace_bytes(problem, config)
            if algorithm.name in ("tensor_gemm", "tensor_winograd") and problem.op == "fprop":
                head, every = prepared_floats(problem, config)
                assert head % 4 == 0 and 4 * every <= plan.prepared_bytes
