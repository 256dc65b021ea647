"""Boxes of images: sums, least and largest values by doubling, along columns and then along rows."""

from __future__ import annotations

from functools import partial

import numpy as np

from leanconv.cpu.filter2d import PlaneFilter
from leanconv.cpu.lines import Edge
from leanconv.cpu.separable import Pass1d, filter_passes
from leanconv.problem import FilterProblem

_OPERATIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}


class Boxes(PlaneFilter):
    """Windows of a power of two are made of those half as large; no difference of long sums is taken."""

    name = "box"
    paper = "windows by doubling"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        return [] if problem.reduction in _OPERATIONS else ["no sum, least or largest value of a box is asked for"]

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        assert problem.reduction is not None
        passes = []
        for size, anchor in zip((problem.kh, problem.kw), problem.anchor, strict=True):
            make = partial(_doubled, size=size, operation=_OPERATIONS[problem.reduction])
            edge = Edge(problem.border, anchor, size - 1 - anchor)
            gain = float(size) if problem.reduction == "sum" else 1.0
            passes.append(Pass1d(edge, partial(make, axis=1), partial(make, axis=0), gain))
        result = y[:, 0]
        result[...] = filter_passes(x, passes, (-2, -1), value, problem.sums, None)
        if problem.reduction == "sum":
            result *= w.reshape(-1)[0]
        if delta:
            result += y.dtype.type(delta)


def _doubled(extended: np.ndarray, result: np.ndarray, size: int, axis: int, operation: np.ufunc) -> None:
    """Fill ``result`` with what ``size`` neighbours along ``axis`` make."""
    n = result.shape[axis]

    def part(array: np.ndarray, first: int, last: int) -> np.ndarray:
        return array[:, first:last] if axis else array[first:last]

    # powers[i] is made by `width` neighbours from i on
    powers, width, begin = extended, 1, 0
    while begin < size:
        if size & width:
            some = part(powers, begin, begin + n)
            result[...] = some if begin == 0 else operation(result, some)
            begin += width
        if begin < size:
            length = powers.shape[axis] - width
            powers = operation(part(powers, 0, length), part(powers, width, length + width))
            width *= 2
