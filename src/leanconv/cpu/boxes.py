"""Boxes of images: sums, least and largest values by doubling, along columns and then along rows."""

from __future__ import annotations

from math import prod

import numpy as np

from leanconv.cpu.filter2d import CALL_NS, OPERATIONS, PlaneFilter
from leanconv.cpu.lines import Edge
from leanconv.cpu.separable import filter_passes, fits_blocks, window_pass
from leanconv.dtypes import item_bytes
from leanconv.problem import FilterProblem

_OPERATIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Boxes(PlaneFilter):
    """Windows of a power of two are made of those half as large; no difference of long sums is taken.

    Least and largest pixels are found in the type of the image, which a register holds more of.
    """

    name = "box"
    paper = "windows by doubling"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        return [] if problem.reduction in _OPERATIONS else ["no sum, least or largest value of a box is asked for"]

    def cost(self, problem: FilterProblem) -> float:
        kind = _kind(problem)
        passes = sum(size.bit_length() + (problem.reduction == "sum") for size in (problem.kh, problem.kw))
        converted = 0.2 * (kind != problem.dtype) + 0.4 * (kind != problem.result)
        return OPERATIONS * (prod(problem.x_shape) * (0.04 * item_bytes(kind) * passes + converted) + CALL_NS)

    def run(
        self,
        problem: FilterProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        if problem.is_volume or 0 in problem.y_shape or "bfloat16" in (problem.dtype, problem.result):
            return super().run(problem, x, w, bias, value, delta)
        y = np.empty(problem.y_shape, problem.result)
        x = x.reshape(problem.batch, problem.h, problem.w, problem.channels)
        results = y.reshape(problem.batch, problem.out_h, problem.out_w, problem.channels)
        if fits_blocks(max(problem.kh, problem.kw) - 1):
            flat = problem.batch, problem.h, problem.w * problem.channels
            into = results.reshape(problem.batch, problem.out_h, problem.out_w * problem.channels)
            _filter(problem, x.reshape(flat), w, value, delta, into, problem.channels)
        else:
            for channel in range(problem.channels):
                _filter(problem, x[..., channel], w, value, delta, results[..., channel])
        return y

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        _filter(problem, x, w, value, delta, y[:, 0])


def _kind(problem: FilterProblem) -> str:
    """The type of the arithmetic."""
    kept = problem.reduction != "sum" and problem.dtype == problem.result
    return problem.dtype if kept and problem.dtype not in ("float16", "bfloat16") else problem.sums


def _filter(
    problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray, channels: int = 1
) -> None:
    assert problem.reduction is not None
    weight, operation = w.reshape(-1)[0], _OPERATIONS[problem.reduction]

    def finish(result: np.ndarray) -> None:
        if problem.reduction == "sum" and weight != 1:
            result *= weight
        if delta:
            result += result.dtype.type(delta)

    kind, passes = problem.sums if delta else _kind(problem), []
    for size, anchor, last in zip((problem.kh, problem.kw), problem.anchor, (False, True), strict=True):
        edge = Edge(problem.border, anchor, size - 1 - anchor)
        passes.append(window_pass(edge, operation, finish if last else None, channels))
    filter_passes(x, passes, (-2, -1), value, kind, y, channels)
