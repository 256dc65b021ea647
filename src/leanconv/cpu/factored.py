"""Image filters that are given as products of a column and a row: a pass along rows and one along columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from leanconv.cpu.filter2d import BlockFilter, PlaneFilter, Taps
from leanconv.cpu.lines import put
from leanconv.cpu.separable import correlate_separable
from leanconv.dtypes import is_integer
from leanconv.problem import FilterProblem


class Factored(BlockFilter):
    """Rows and columns apart, each product after the other."""

    name = "separable"
    paper = "the row and column passes of image libraries"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        return [] if problem.rank else ["the filter is not given as products of a column and a row"]

    def plane(
        self, x: np.ndarray, factors: np.ndarray, anchor: tuple[int, int], border: str, value: float, *, kh: int,
        delta: float, out: np.ndarray, sums: str,
    ) -> np.ndarray:  # fmt: skip
        *rest, last = [(each[:kh], each[kh:]) for each in factors]
        if not rest:
            return correlate_separable(x, last, (-2, -1), anchor, border, value, delta=delta, out=out, sums=sums)
        total = np.zeros(out.shape, sums)
        for taps in (*rest, last):
            made = np.empty(out.shape, sums)
            total += correlate_separable(x, taps, (-2, -1), anchor, border, value, out=made, sums=sums)
        total += total.dtype.type(delta)
        put(total, out)
        return out

    def expected(self, kh: int, kw: int, sums: str) -> float:
        # explored (EPYC, one thread, 6f01be02)
        return (4.5 + 0.033 * (kh + kw)) * (1 if sums == "float32" else 2)

    def cost(self, problem: FilterProblem) -> float:
        return problem.rank * super().cost(problem)

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        if is_integer(problem.sums):
            y[:, 0] = sum(_wrapped(problem, x, each[: problem.kh], each[problem.kh :], int(value)) for each in w)
            y += y.dtype.type(delta)
            return
        how = problem.anchor, problem.border, value
        self.plane(x, w, *how, kh=problem.kh, delta=delta, out=y[:, 0], sums=problem.sums)

    def run(
        self,
        problem: FilterProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        run = PlaneFilter.run if is_integer(problem.sums) else BlockFilter.run
        return run(self, problem, x, w, bias, value, delta)


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
