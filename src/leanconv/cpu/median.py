"""Medians of images: by OpenCV where it is installed; else windows are partially sorted."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.filter2d import PlaneFilter, extended_strips
from leanconv.cpu.planes import opencv
from leanconv.problem import FilterProblem

#: Output rows of a strip that OpenCV filters at once.
BLURRED_ROWS = 256


class Median(PlaneFilter):
    """Strip by strip, by partial sorting."""

    name = "median"
    paper = "quickselect (Hoare 1961)"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        if problem.reduction != "median":
            return ["no median is asked for"]
        return [] if problem.kh * problem.kw % 2 else [f"a window of {problem.kh}x{problem.kw} has no middle pixel"]

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        taps, size = problem.kh * problem.kw, problem.kh
        if x.dtype == np.float32 and size == problem.kw and size in (3, 5) and opencv() is not None:
            for image, top, extended in extended_strips(problem, x, value, BLURRED_ROWS):
                rows = len(extended) - size + 1
                middle = opencv().medianBlur(extended, size)[size // 2 :, size // 2 :]
                y[image, 0, top : top + rows] = middle[:rows, : problem.w]
            if delta:
                y += y.dtype.type(delta)
            return
        rows = max(1, (4 << 20) // (taps * problem.w * x.itemsize))
        for image, top, extended in extended_strips(problem, x, value, rows):
            windows = np.lib.stride_tricks.sliding_window_view(extended, (problem.kh, problem.kw))
            pixels = windows.reshape(*windows.shape[:2], taps)
            y[image, 0, top : top + len(pixels)] = np.partition(pixels, taps // 2)[..., taps // 2]
        if delta:
            y += y.dtype.type(delta)
