"""What all kernels on images are compiled for and called with."""

from __future__ import annotations

from leanconv.dtypes import DTYPES
from leanconv.images.borders import BORDERS
from leanconv.plan import Argument, Constants, Number, Pointer
from leanconv.problem import FilterProblem


def _ctypes(problem: FilterProblem) -> tuple[str, str, str]:
    """C++ types of the image, the sums and the result."""
    element, sums, result = (DTYPES[each].ctype for each in (problem.dtype, problem.sums, problem.result))
    return element, sums, result


def constants(problem: FilterProblem, channels: int, planes: int) -> Constants:
    """Types, sizes and how pixels lie: ``channels`` side by side, ``planes`` that blocks take one by one."""
    element, sums, result = _ctypes(problem)
    return (
        ("element", element), ("sum", sums), ("result", result), ("border", BORDERS[problem.border].kernel),
        ("r", problem.kh), ("s", problem.kw), ("anchor_y", problem.anchor[0]), ("anchor_x", problem.anchor[1]),
        ("channels", channels), ("planes", planes), ("valid", problem.valid),
    )  # fmt: skip


def arguments(problem: FilterProblem, strips: int, bands: int, *, weights: bool = True) -> tuple[Argument, ...]:
    """Arrays (with ``weights``, unless there are none), numbers and sizes of a launch."""
    element, sums, result = _ctypes(problem)
    return (
        Pointer("x", element),
        *((Pointer("w", sums),) if weights else ()),
        Pointer("y", result, written=True),
        Number(sums, "value"),
        Number(sums, "delta"),
        Number("int", "height", problem.h),
        Number("int", "width", problem.w),
        *(Number("long long", name, getattr(problem, name)) for name in ("x_pitch", "x_step", "y_pitch", "y_step")),
        Number("int", "strips", strips),
        Number("int", "bands", bands),
    )
