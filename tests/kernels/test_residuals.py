"""Residuals of layers on tensor cores, of which many are loaded before the first output is stored."""

from __future__ import annotations

from typing import Any

import pytest

from leanconv.plan import Plan
from tests import emulator, proof
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
