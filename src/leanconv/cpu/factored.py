"""Image filters that are given as products of a column and a row: a pass along rows, then one along columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from leanconv.cpu.filter2d import Banded, PlaneFilter, Taps
from leanconv.dtypes import is_integer
from leanconv.problem import FilterProblem


class Factored(PlaneFilter):
    """Rows and columns apart, each product after the other."""

    name = "separable"
    paper = "the row and column passes of image libraries"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        return [] if problem.rank else ["the filter is given whole, not as products of a column and a row"]

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        one = Taps() if is_integer(problem.sums) else Banded()
        rows = replace(problem, kh=1, anchor=(0, problem.anchor[1]), rank=0)
        columns = replace(problem, kw=1, anchor=(problem.anchor[0], 0), rank=0)
        filtered, sums = np.empty_like(y), y if len(w) == 1 else np.empty_like(y)
        for k, factors in enumerate(w):
            column, row = factors[: problem.kh].reshape(1, -1, 1), factors[problem.kh :].reshape(1, 1, -1)
            one.fill(rows, x, row, value, 0, filtered)
            # outside the image the rows of a constant border are filtered too
            one.fill(columns, filtered[:, 0], column, value * row.sum(), 0, sums)
            if sums is not y:
                np.copyto(y, sums) if k == 0 else np.add(y, sums, out=y)
        if delta:
            y += y.dtype.type(delta)
