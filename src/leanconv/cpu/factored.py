"""Image filters that are given as products of a column and a row: a pass along rows and one along columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from leanconv.cpu.filter2d import PlaneFilter, Taps
from leanconv.cpu.separable import correlate_separable
from leanconv.dtypes import is_integer
from leanconv.problem import FilterProblem


class Factored(PlaneFilter):
    """Rows and columns apart, each product after the other."""

    name = "separable"
    paper = "the row and column passes of image libraries"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        return [] if problem.rank else ["the filter is not given as products of a column and a row"]

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        result = y[:, 0]
        for k, factors in enumerate(w):
            column, row = factors[: problem.kh], factors[problem.kh :]
            if is_integer(problem.sums):
                made = _wrapped(problem, x, column, row, int(value))
            else:
                taps = column, row
                made = correlate_separable(x, taps, (-2, -1), problem.anchor, problem.border, value, sums=problem.sums)
            if k == 0:
                result[...] = made
            else:
                result += made
        if delta:
            result += y.dtype.type(delta)


def _wrapped(problem: FilterProblem, x: np.ndarray, column: np.ndarray, row: np.ndarray, value: int) -> np.ndarray:
    """One product, in integers that wrap around."""
    rows = replace(problem, kh=1, anchor=(0, problem.anchor[1]), rank=0)
    columns = replace(problem, kw=1, anchor=(problem.anchor[0], 0), rank=0)
    filtered, made = (np.empty((len(x), 1, *x.shape[1:]), x.dtype) for _ in range(2))
    Taps().fill(rows, x, row.reshape(1, 1, -1), value, 0, filtered)
    # outside the image the rows of a constant border are filtered too
    outside = int(np.multiply(row.sum(dtype=x.dtype), x.dtype.type(value), dtype=x.dtype))
    Taps().fill(columns, filtered[:, 0], column.reshape(1, -1, 1), outside, 0, made)
    return made[:, 0]
