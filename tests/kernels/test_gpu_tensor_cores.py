"""On a GPU: the kernels that prove the emulator's tensor cores give there what NumPy and the emulator's model say."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from leanconv.plan import Argument, Launch, Plan
from leanconv.runtime import compile as compiler
from leanconv.runtime.launch import open_device, run_on_host_arrays
from tests.emulator import test_emulator_mma as warps
from tests.emulator import test_emulator_wgmma as warpgroups
from tests.emulator import test_emulator_wgmma_copies as copies
from tests.emulator import test_emulator_wgmma_rules as pipelines

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' units run there instead of on the emulator."""

    def run_source(
        unit: str,
        symbol: str,
        arguments: Sequence[Argument],
        values: Mapping[str, Any],
        *,
        grid: int = 1,
        block: int = 32,
        shared_bytes: int = 0,
        orders: Sequence[str] = (),
    ) -> None:
        name = hashlib.sha256(unit.encode()).hexdigest()
        launch = Launch(name, symbol, (), (), tuple(arguments), grid, block, shared_bytes)
        monkeypatch.setattr(compiler, "source", lambda _: unit)
        run_on_host_arrays(open_device(0), Plan((launch,)), values)

    for module in (warps, warpgroups, copies):
        monkeypatch.setattr(module, "run_source", run_source)


@pytest.fixture
def wgmma() -> None:
    target = open_device(0).target
    if not target.warpgroup_products:
        pytest.skip(f"{target.arch} has no wgmma")


@pytest.mark.parametrize("from_shared", [False, True])
@pytest.mark.parametrize(("n", "swizzle", "kind"), warpgroups.SHAPES)
def test_wgmma(wgmma: None, n: int, swizzle: int, kind: str, from_shared: bool) -> None:
    warpgroups.test_products(n, swizzle, kind, from_shared)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("a_across", "b_across"), [(True, True), (True, False), (False, True)])
def test_wgmma_of_operands_that_lie_across(wgmma: None, a_across: bool, b_across: bool, swizzle: int) -> None:
    k = swizzle // 2 or 32
    for kind in ("f16", "bf16"):
        y, expected = warpgroups.multiply_across(a_across, b_across, swizzle, 128, k, kind)
        assert np.linalg.norm(y - expected) < 1e-6 * np.linalg.norm(expected)


def test_wgmma_of_an_operand_that_begins_inside_its_pattern(wgmma: None) -> None:
    warpgroups.test_an_operand_across_may_begin_at_any_row_of_its_pattern()


@pytest.mark.parametrize(("k", "draw", "error"), [(2304, "standard_normal", 2.8e-6), (9216, "random", 5.8e-5)])
def test_wgmma_rounds_as_the_model_does(wgmma: None, k: int, draw: str, error: float) -> None:
    warpgroups.test_long_sums_lose_what_the_machine_loses(k, draw, error)


def test_wgmma_with_infinities_and_subnormals(wgmma: None) -> None:
    warpgroups.test_infinities_and_subnormals()


def test_wgmma_in_pipelines(wgmma: None) -> None:
    pipelines.test_a_pipeline_of_copies_and_products()
    y, expected = pipelines.run_fragments(pipelines.FRAGMENTS)
    np.testing.assert_allclose(y, expected, rtol=0, atol=3e-5)
    copies.test_a_convolution()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma(kind: str, transposed: bool) -> None:
    body = warps.TRANSPOSED if transposed else warps.PRODUCT
    y, a, b = warps.product(body, kind, transposed)
    np.testing.assert_allclose(y, a @ b.T, rtol=0, atol=2e-5)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, trans: bool) -> None:
    warps.test_ldmatrix(count, trans)


def test_conversions_of_pairs() -> None:
    warps.test_pairs_are_converted_with_the_first_in_the_lower_half()
