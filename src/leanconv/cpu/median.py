"""Medians of images: windows are partially sorted."""

from __future__ import annotations

from math import prod

import numpy as np

from leanconv.cpu.filter2d import OPERATIONS, PlaneFilter, extended_strips
from leanconv.problem import FilterProblem


class Median(PlaneFilter):
    """Strip by strip, by partial sorting."""

    name = "median"
    paper = "quickselect (Hoare 1961)"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        if problem.reduction != "median":
            return ["no median is asked for"]
        return [] if problem.kh * problem.kw % 2 else [f"a window of {problem.kh}x{problem.kw} has no middle pixel"]

    def cost(self, problem: FilterProblem) -> float:
        return OPERATIONS * prod(problem.x_shape) * 3.0 * problem.kh * problem.kw

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        taps = problem.kh * problem.kw
        rows = max(1, (4 << 20) // (taps * problem.w * x.itemsize))
        for image, top, extended in extended_strips(problem, x, value, rows):
            windows = np.lib.stride_tricks.sliding_window_view(extended, (problem.kh, problem.kw))
            pixels = windows.reshape(*windows.shape[:2], taps)
            y[image, 0, top : top + len(pixels)] = np.partition(pixels, taps // 2)[..., taps // 2]
        if delta:
            y += y.dtype.type(delta)
