"""`explain` refuses what the call itself refuses, in the same words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, conv2d, explain, filter2d, filter3d
from tests.messages import says

X, W = np.ones((2, 4, 6, 6), np.float32), np.ones((8, 4, 3, 3), np.float32)
IMAGE, KERNEL = np.ones((6, 7), np.uint8), np.ones((3, 3))
VOLUME, CUBE = np.ones((5, 6, 7), np.float32), np.random.default_rng(1).random((3, 3, 3))
SHARED = np.ones(288, np.float32)
READ_ONLY = np.zeros((2, 8, 4, 4), np.float32)
READ_ONLY.flags.writeable = False
OVERLAPPING = {"x": SHARED.reshape(2, 4, 6, 6), "out": SHARED[:256].reshape(2, 8, 4, 4)}
FROZEN = np.zeros((6, 7), np.uint8)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    "function, given, kind, part",
    [
        (filter2d, {"value": 300}, ValueError, "value=300 is no uint8, the dtype of the image"),
        (filter2d, {"delta": "a"}, TypeError, "delta='a' is not a number"),
        (filter2d, {"delta": np.nan}, ValueError, "delta=nan is no number, and the result has dtype uint8"),
        (filter2d, {"out": IMAGE}, ValueError, "out overlaps image in memory"),
        (filter2d, {"out": FROZEN}, ValueError, "out is read-only"),
        (filter3d, {"value": None}, TypeError, "value=None is not a number"),
        (filter3d, {"out": VOLUME}, ValueError, "out overlaps volume in memory"),
        (conv2d, OVERLAPPING, ValueError, "out overlaps x in memory"),
        (conv2d, {"out": READ_ONLY}, ValueError, "out is read-only"),
        (conv2d, {"add": SHARED[4:260].reshape(2, 8, 4, 4), "out": OVERLAPPING["out"]}, ValueError, "out overlaps add"),
    ],
)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_numbers_and_results_are_checked(
    function: Any, given: dict[str, Any], kind: type[Exception], part: str, device: Any, host_device: Any
) -> None:
    first = {conv2d: {"x": X, "w": W}, filter2d: {"image": IMAGE, "kernel": KERNEL}}
    arguments = first.get(function, {"volume": VOLUME, "kernel": CUBE}) | given | {"device": device}
    with says(kind, part):
        function(**arguments)
    x, w, *rest = arguments.items()
    with says(kind, part):
        explain(function, x[1], w[1], **dict(rest))


def test_a_result_may_be_the_residual_itself() -> None:
    y = np.zeros((2, 8, 4, 4), np.float32)
    assert explain(conv2d, X, W, add=y, out=y).chosen


@pytest.mark.parametrize(
    "function, first, kernel, options, shape",
    [
        (filter2d, np.ones((40, 40), np.float32), np.ones((2, 15, 15)), {}, (2, 40, 40)),
        (filter3d, np.ones((30, 30, 30), np.float32), np.ones((9, 9, 9)), {"mode": "valid"}, (22, 22, 22)),
    ],
    ids=["filter2d", "filter3d"],
)
def test_the_result_of_several_passes(function: Any, first: Any, kernel: Any, options: Any, shape: Any) -> None:
    out = np.zeros(shape)
    assert function(first, kernel, out=out, **options) is out
    told = explain(function, first, kernel, out=out, **options)
    assert told.chosen and told.problem.result == "float64"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "given, kind, part",
    [
        ({"activation": "gelu"}, ValueError, "activation='gelu' makes fractions; layers of int8 take None, 'relu'"),
        ({"scale": True}, TypeError, "scale was given, and x has dtype int8: the sums of integers stay integers"),
        ({"d": 3, "t": 3}, TypeError, "x has dtype int8; layers of volumes are of float32, float16, bfloat16"),
    ],
)
@pytest.mark.parametrize("device", [None, "cuda"])
def test_layers_of_integers(given: dict[str, Any], kind: type[Exception], part: str, device: Any) -> None:
    with says(kind, part):
        explain(ConvProblem(1, 4, 8, 8, 4, 3, 3, dtype="int8", **given), device=device)
    assert explain(ConvProblem(1, 4, 8, 8, 4, 3, 3, dtype="int8", activation="relu6")).chosen
