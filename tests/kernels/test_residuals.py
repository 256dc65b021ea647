"""Residuals of layers on tensor cores, of which many are loaded before the first output is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.call.choose import by_model
from leanconv.call.explain import NOMINAL
from leanconv.plan import Plan
from leanconv.problem import ConvProblem
from leanconv.words import parse_problem
from tests import emulator, proof
from tests.cases import TARGETS
from tests.cases_16bit import NATIVE_CASES
from tests.cases_tensor import PAIR_CASES, TENSOR_CASES, TF32_CASES
from tests.variants import NAMED

pytestmark = pytest.mark.usefixtures("one_block_validates")


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("tensor_gemm", "tensor-residuals-nhwc"),
        ("tensor_gemm", "tensor-residuals-nchw"),
        ("tensor_winograd", "pairs-same-nhwc"),
        ("tensor_winograd", "pairs-same-nchw"),
        ("native_gemm_tf32", "tf32-residuals-nhwc"),
        ("native_gemm_16bit", "float16-copies-long-nhwc"),
        ("native_gemm_nchw", "float16-blocks-nchw"),
        ("native_gemm_pointwise", "float16-images-fours-nchw"),
        ("native_gemm_planes", "float16-images-odd-nchw"),
        ("native_gemm_skinny", "float16-skinny-nhwc"),
    ],
)
def test_the_output_may_take_the_place_of_the_residual(stem: str, name: str) -> None:
    def in_place(plan: Plan, arrays: dict[str, Any]) -> None:
        y = arrays["y"]
        y[...] = arrays["add"]
        emulator.run_plan(plan, arrays | {"add": y})

    cases = (*NATIVE_CASES, *TF32_CASES, *TENSOR_CASES, *PAIR_CASES)
    problem = {case.name: case.problem for case in cases}[name]
    assert problem.add
    proof.check(NAMED[stem], problem, run=in_place)


@pytest.mark.parametrize(
    ("words", "us"),
    [
        ("conv:n64,c64,h56,k256,r1,NHWC", 160.1),
        ("conv:n64,c64,h56,k256,r1,NCHW", 188.0),
        ("conv:n64,c128,h28,k512,r1,NHWC", 90.2),
        ("conv:n64,c256,h14,k1024,r1,NHWC", 61.7),
        ("conv:n64,c512,h7,k2048,r1,NHWC", 60.5),
        ("conv:n64,c64,h56,k64,r3,pad1,NHWC", 108.7),
        ("conv:n64,c64,h56,k64,r3,pad1,NCHW", 121.8),
        ("conv:n64,c256,h14,k256,r3,pad1,NHWC", 67.2),
        ("conv:n64,c256,h14,k256,r3,pad1,NCHW", 83.6),
        ("conv:n64,c64,h56,k256,r1,NHWC,tf32", 150.2),
        ("conv:n64,c64,h56,k256,r1,NCHW,tf32", 190.1),
        ("conv:n64,c128,h28,k512,r1,NHWC,tf32", 85.2),
        ("conv:n64,c256,h14,k1024,r1,NHWC,tf32", 54.0),
        ("conv:n64,c512,h7,k2048,r1,NHWC,tf32", 45.5),
        ("conv:n64,c64,h56,k64,r3,pad1,NHWC,tf32", 83.7),
        ("conv:n64,c64,h56,k64,r3,pad1,NCHW,tf32", 103.5),
        ("conv:n64,c256,h14,k256,r3,pad1,NHWC,tf32", 49.5),
        ("conv:n64,c256,h14,k256,r3,pad1,NCHW,tf32", 57.2),
        ("conv:n64,c64,h56,k256,r1,NHWC,float16", 67.1),
        ("conv:n64,c64,h56,k256,r1,NCHW,float16", 68.7),
        ("conv:n64,c128,h28,k512,r1,NCHW,float16", 45.8),
        ("conv:n64,c256,h14,k1024,r1,NCHW,float16", 38.6),
        ("conv:n64,c512,h7,k2048,r1,NCHW,float16", 39.8),
        ("conv:n32,c256,h56,k512,r1,stride2,NCHW,float16", 46.1),
        ("conv:n64,c128,h28,k512,r1,NHWC,float16", 38.9),
        ("conv:n64,c256,h14,k1024,r1,NHWC,float16", 25.9),
        ("conv:n64,c512,h7,k2048,r1,NHWC,float16", 20.5),
        ("conv:n64,c64,h56,k64,r3,pad1,NHWC,float16", 44.6),
        ("conv:n64,c64,h56,k64,r3,pad1,NCHW,float16", 64.4),
        ("conv:n64,c256,h14,k256,r3,pad1,NHWC,float16", 22.7),
        ("conv:n64,c256,h14,k256,r3,pad1,NCHW,float16", 40.4),
    ],
)
def test_residuals_are_predicted_as_they_were_timed(words: str, us: float) -> None:
    """Explored (H200, 15b88ad0; native_gemm_pointwise and native_gemm_planes later): whole calls with a bias, a
    residual and ReLU, packing included."""
    problem = replace(parse_problem(words), bias=True, add=True, activation="relu")
    assert by_model(problem, NOMINAL).cost / 1980 == pytest.approx(us, rel=0.2)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("stem", ["native_gemm_16bit", "native_gemm_tf32", "native_gemm_nchw"])
def test_a_cta_of_a_cluster_whose_filters_do_not_exist_reads_nothing(stem: str, add: bool) -> None:
    """Its share of a tile lies behind the last filter, and with it the bias and the residuals."""
    problem = {
        "native_gemm_16bit": ConvProblem(1, 256, 5, 6, 64, 1, 1, layout="NHWC", dtype="float16", bias=True, add=add),
        "native_gemm_tf32": ConvProblem(1, 256, 5, 6, 64, 1, 1, layout="NHWC", precision="tf32", bias=True, add=add),
        "native_gemm_nchw": ConvProblem(
            1, 128, 4, 4, 160, 1, 1, dtype="float16", bias=True, add=add, d=3, t=3, padding_d=(1, 1)
        ),
    }[stem]
    config = next(
        each
        for each in NAMED[stem].configs(problem, TARGETS[0])
        if each.split > 1 and -problem.k % each.filters >= each.filters // each.split
        and problem.k % (each.filters // each.split) == 0
    )  # fmt: skip
    proof.check(NAMED[stem], problem, config, kinds=("zero-mean",))
