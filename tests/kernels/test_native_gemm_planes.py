"""1x1 convolution of small images of NCHW in 16 bits, whose pixels are a product's rows: every tile, and clusters that
share reductions. More is in test_tensor_cores.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leanconv.call.choose import choose
from leanconv.kernels.hopper_native.native_gemm_planes import COLUMNS
from leanconv.problem import ConvProblem
from leanconv.runtime.compile import compile_launch
from tests import proof, selection
from tests.cases import TARGETS
from tests.kernels.tensor_cores import GRADIENT
from tests.variants import NAMED

PLANES = NAMED["native_gemm_planes"]
HOPPER = TARGETS[0]
#: Four tiles of images of which the last is not full, and channels and filters that fill none.
SMALL = ConvProblem(7, 200, 7, 7, 264, 1, 1, dtype="bfloat16", bias=True, activation="relu")
#: Pixels of an image, of which 64 rows take one, two, four; odd and even.
SIZES = (7, 7), (8, 8), (5, 5), (4, 4), (4, 9), (1, 17)


def configs(problem: ConvProblem, **wanted: int) -> list[Any]:
    every = PLANES.configs(problem, HOPPER)
    return [each for each in every if all(getattr(each, name) == value for name, value in wanted.items())]


CASES = [(size, columns, gradient) for size in SIZES for columns in COLUMNS for gradient in (False, True)]


@pytest.mark.parametrize(
    ("size", "columns", "gradient"),
    selection.marked(CASES, CASES[::5], lambda case: (case, "-".join(map(str, case)))),
)
def test_every_tile_is_right(size: tuple[int, int], columns: int, gradient: bool):
    problem = replace(SMALL, h=size[0], w=size[1], n=SMALL.n if size[0] * size[1] > 32 else 19)
    if gradient:
        problem = replace(problem, c=264, k=200, **GRADIENT)
    (config,) = configs(problem, columns=columns, split=1)
    proof.check(PLANES, problem, config, kinds=("positive",))


CLUSTERS = [(split, columns) for split in (2, 4) for columns in COLUMNS]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    ("split", "columns"),
    selection.marked(CLUSTERS, CLUSTERS[::2], lambda case: (case, "-".join(map(str, case)))),
)
def test_a_cluster_shares_a_reduction(split: int, columns: int, gradient: bool):
    problem = replace(SMALL, c=648)
    if gradient:
        problem = replace(problem, c=264, k=648, **GRADIENT)
    (config,) = configs(problem, split=split, columns=columns)
    proof.check(PLANES, problem, config, kinds=("zero-mean",))
    # one CTA has all where a result must not depend on the batch
    assert not [each for each in configs(replace(problem, batch_invariant=True)) if each.split > 1]


@pytest.mark.parametrize(
    "changes",
    [{"add": True, "scale": True}, {"accumulate": True, "activation": "gelu"}, {"groups": 2, "c": 144, "k": 176}],
    ids=["residual", "accumulate", "groups"],
)
def test_what_follows_the_sums(changes: dict[str, Any]):
    problem = replace(SMALL, **changes)
    for config in configs(problem, split=1)[:1] + configs(problem, split=2)[:1]:
        proof.check(PLANES, problem, config, kinds=("zero-mean",))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "NHWC"}, "'NHWC' is not NCHW"), ({"r": 3}, "3x1 taps are not 1x1"), ({"n": 0}, "n=0"),
        ({"stride": (2, 2)}, "stride=(2, 2)"), ({"padding": (1, 0, 0, 0)}, "padding=(1, 0, 0, 0)"),
        ({"h": 3, "w": 5}, "images of 15 pixels, not of 16 to 64"), ({"h": 5, "w": 13}, "images of 65 pixels"),
        ({"c": 36}, "36 channels of a group, no multiple of 8"), ({"k": 36}, "36 filters of a group"),
        ({"dtype": "float32"}, "float32"), ({"n": 2**33, "c": 8, "k": 8}, "tiles are more than an int counts"),
        ({"op": "wgrad", "bias": False, "activation": None}, "wgrad"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_compute_has_a_sentence(changes: dict[str, Any], reason: str):
    assert any(reason in each for each in PLANES.why_not(replace(SMALL, **changes), HOPPER))


def test_nothing_is_packed_and_no_memory_is_taken():
    for op in ({}, GRADIENT):
        problem = replace(SMALL, **op)
        plan = PLANES.plan(problem, configs(problem)[0], HOPPER)
        assert (len(plan.every_launch), plan.workspace_bytes, plan.prepared_bytes) == (1, 0, 0)


@pytest.mark.parametrize("changes", [{}, {"add": True, "scale": True}, GRADIENT], ids=["bias", "residual", "gradient"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_it_compiles_without_spills(columns: int, changes: dict[str, Any]):
    """No product waits for another."""
    pytest.importorskip("cuda.core", reason="NVRTC comes with the extra leanconv[cu13] or [cu12]")
    problem = replace(SMALL, n=32, c=512, k=2048, **changes)
    for config in configs(problem, columns=columns, split=1)[:2]:
        code = compile_launch(PLANES.plan(problem, config, HOPPER).launches[0], "sm_90a")
        assert (code.spill_bytes, code.advice) == (0, ()) and code.registers <= 168


def test_auto_takes_it_where_it_was_measured_to_be_quicker():
    """7 x 7 pixels, forward and for gradients; not one image, for which a cluster of 16 shares a reduction."""
    large = replace(SMALL, n=32, c=512, k=2048)
    for problem in (large, replace(large, c=2048, k=512), replace(large, c=2048, k=512, **GRADIENT)):
        assert choose(problem, HOPPER).algorithm is PLANES
    assert choose(replace(large, n=1), HOPPER).algorithm is not PLANES
