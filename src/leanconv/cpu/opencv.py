"""Image filters by OpenCV's own routines, where it is installed and its result is what this library promises.

Least, largest and middle pixels are the same numbers. So are sums over boxes of integers, which OpenCV takes in
integers. Sums of products are taken in float32 (float64), each rounded once to the result. Left out are OpenCV's
routines that compute less: `GaussianBlur` of uint8 and sums over boxes of fractions (running sums), and transforms in
the type of the image.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from leanconv.cpu.boxes import Boxes
from leanconv.cpu.factored import Factored
from leanconv.cpu.filter2d import OPERATIONS, Banded
from leanconv.cpu.finite import are_finite, has_large, is_finite, is_finite_of
from leanconv.cpu.lines import LEAST_WORK, put, threads_for
from leanconv.cpu.median import Median
from leanconv.cpu.planes import LOOP_TAPS, opencv
from leanconv.cpu.separable import are_precise
from leanconv.dtypes import DTYPES, is_integer, item_bytes
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import CpuAlgorithm, ceil_div
from leanconv.problem import FilterProblem
from leanconv.runtime.threads import over_blocks

#: What OpenCV's loops read, and what they write in one pass; anything else is converted strip by strip.
#: Explored (EPYC, 6f01be02): of uint16 its loops take ten times as long as of float32.
_PRODUCTS = {("uint8", "uint8"), ("uint8", "int16"), ("float32", "float32"), ("float64", "float64")}
_PASSES = _PRODUCTS | {("uint8", "float32"), ("int16", "int16")}
_WINDOWS = ("uint8", "uint16", "int16", "float32", "float64")
_MEDIANS = ("uint8", "uint16", "int16", "float32")
#: Bytes of a strip that is converted, and the fewest rows of any strip.
STRIP_BYTES, LEAST_ROWS = 512 << 10, 32
#: The most rows and columns together of a box of fractions that is a product of two lines of ones.
FEW_TAPS = 14
#: The most pixels of a mean that OpenCV rounds to the nearest integer, where they are an odd number: then none lies in
#: the middle of two. It multiplies sums by 1/n in float32.
MEANS = {"uint8": 2**14, "uint16": 49, "int16": 49}
#: The largest sum of the sizes of a column's and a row's weights with which sums of uint8 stay within int32.
MOST_WEIGHT = 5000
#: Of floats from 2**31 on OpenCV makes the least integer. Sums, and what is added to them, that stay below it together.
MOST_SUM = 2.0**30
#: Of a border's value: a quarter of the largest float32.
MOST_VALUE = 2.0**125


class OpenCv(CpuAlgorithm):
    """OpenCV's loops, on strips of rows by several threads."""

    name = "opencv"
    paper = "G. Bradski, The OpenCV library (2000)"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        if opencv() is None:
            return ["OpenCV is not installed"]
        reasons = []
        if problem.is_volume:
            reasons.append("it filters images, not volumes")
        if "bfloat16" in (problem.dtype, problem.result):
            reasons.append("it has no bfloat16")
        if problem.channels > 4:
            reasons.append(f"a pixel of {problem.channels} channels has more than 4")
        return reasons or _why_not_of(problem)

    def cost(self, problem: FilterProblem) -> float:
        return OPERATIONS * prod(problem.x_shape) * problem.filters * _expected(problem)

    def ready(self, problem: FilterProblem) -> Callable[..., np.ndarray]:
        return Ready(problem)

    def run(
        self,
        problem: FilterProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        return Ready(problem)(x, w, bias, value, delta)


def _why_not_of(problem: FilterProblem) -> list[str]:
    kind, taps = problem.reduction, problem.kh * problem.kw
    if kind is None and is_integer(problem.sums):
        return [f"its sums are in float32 and float64, not {problem.sums}"]
    if kind is None and problem.is_whole and taps > LOOP_TAPS[problem.sums]:
        return [f"filters of more than {LOOP_TAPS[problem.sums]} taps it transforms in {problem.sums}"]
    if kind in ("min", "max") and (problem.dtype not in _WINDOWS or problem.result != problem.dtype):
        return [f"it has no least and largest pixels of {problem.dtype} as {problem.result}"]
    if kind == "median":
        if problem.dtype not in _MEDIANS or problem.result != problem.dtype:
            return [f"it has no medians of {problem.dtype} as {problem.result}"]
        if problem.kh != problem.kw or problem.kh not in (3, 5, *((7,) if problem.dtype == "uint8" else ())):
            return [f"it has no medians of {problem.kh}x{problem.kw} pixels of {problem.dtype}"]
        if problem.kh > 5 and problem.channels == 2:
            return [f"its medians of {problem.kh}x{problem.kw} pixels have 1, 3 or 4 channels"]
        if not problem.valid and problem.anchor != (problem.kh // 2, problem.kw // 2):
            return [f"its medians have the anchor in the middle, not at {problem.anchor}"]
    if kind == "sum":
        if taps >= 2**31:
            return [f"it counts the pixels of a mean in int32, which {taps} leave"]
        if is_integer(problem.dtype):
            most = max(-DTYPES[problem.dtype].low, DTYPES[problem.dtype].high)
            if problem.dtype not in _WINDOWS or most * taps >= 2**31:
                return [f"it sums {problem.dtype} in int32, which {taps} pixels may leave"]
        elif (problem.dtype, problem.result) not in _PASSES or (problem.sums != "float32" and not _few(problem)):
            return ["of fractions it takes running sums in float64, whose errors are relative to the largest number"]
    return []


def _expected(problem: FilterProblem) -> float:
    """Nanoseconds of an output. Explored (EPYC, one thread, 6f01be02)."""
    bytes_, taps, both = item_bytes(problem.dtype), problem.kh * problem.kw, problem.kh + problem.kw
    width = 1.0 if problem.sums == "float32" else 3.0
    if problem.reduction in ("min", "max"):
        return 0.02 + 0.006 * bytes_ * both
    if problem.reduction == "median":
        return {3: 0.03, 5: 0.2}.get(problem.kh, 7.0) * bytes_
    if problem.reduction == "sum" and not _few(problem):
        return 0.3 + 0.005 * both + 0.6 * (not is_integer(problem.dtype))
    passes = problem.reduction == "sum" or problem.rank
    native = (problem.dtype, problem.result) in (_PASSES if passes else _PRODUCTS)
    converted = 0.0 if native else 0.5
    if passes:
        narrow = 0.65 if problem.dtype == "uint8" else 1.0
        return converted + narrow * width * max(1, problem.rank) * both * (0.03 + 0.11 * min(1, both / 80))
    return converted + width * 0.04 * taps + 0.1


class Imprecise(Exception):
    """OpenCV's result is not precise enough."""


class Ready:
    """A problem with what OpenCV makes of it, for calls with any arrays; of the last weights all is kept."""

    def __init__(self, problem: FilterProblem) -> None:
        self.problem, self.y_shape = problem, problem.y_shape
        channels = () if problem.channels == 1 else (problem.channels,)
        self.images = problem.batch, problem.h, problem.w, *channels
        self.results = problem.batch, problem.filters, problem.out_h, problem.out_w, *channels
        self.size = prod(self.images)
        self.is_empty = 0 in (self.size, prod(self.y_shape))
        self.kept: tuple[bytes, list[list[Operation]], CpuAlgorithm | None, int] | None = None
        self.places: dict[tuple[int, bool], Placed] = {}

    def __call__(
        self, x: np.ndarray, w: np.ndarray, bias: None = None, value: float = 0, delta: float = 0
    ) -> np.ndarray:
        problem, kept, content = self.problem, self.kept, w.tobytes()
        if self.is_empty:
            return np.empty(self.y_shape, problem.result)
        if kept is None or kept[0] != content:
            copy = np.frombuffer(content, w.dtype).reshape(w.shape)
            with np.errstate(over="ignore"):  # of sums of weights
                others = _instead(problem, copy), _telling_rows(problem, copy)
            kept = self.kept = content, _operations(problem, copy), *others
        _, operations, other, telling = kept
        images, threads = x.reshape(self.images), threads_for(self.size)
        plan = self.places.get((threads, value == 0))
        if plan is None:
            plan = self.places[threads, value == 0] = _place(problem, operations[0][0], threads, value == 0)
        sure = False
        if problem.reduction is not None:
            # the largest float64 stands for no border in OpenCV
            strange = other is not None and (np.isnan(x.min()) or not abs(value) < sys.float_info.max)
            if delta or strange:
                other = Median() if problem.reduction == "median" else Boxes()
                return other.run(problem, x, w, bias, value, delta)
        elif abs(delta) >= MOST_SUM and is_integer(problem.result):
            return (other or _otherwise(problem)).run(problem, x, w, bias, value, delta)
        elif other is not None and not (telling and plan.at_once):
            usual = not is_integer(problem.dtype) and np.isfinite(value)
            sure = usual and abs(value) < MOST_VALUE and is_finite(x, 4)
            if not (sure or (usual and is_finite(x))):
                return other.run(problem, x, w, bias, value, delta)
        try:
            if plan.at_once:
                return operations[0][0].checked(images[0], plan.border, value, delta, sure).reshape(self.y_shape)
            return self._in_strips(images, operations, plan, value, delta, sure)
        except Imprecise:
            other = _otherwise(problem) if problem.reduction is None else Boxes()
            return other.run(problem, x, w, bias, value, delta)

    def fixed(
        self, x: np.ndarray, w: np.ndarray, value: float, delta: float
    ) -> Callable[[np.ndarray], np.ndarray] | None:
        """After a call with these weights and numbers, what computes images like x; None where OpenCV's routine is not
        all of it."""
        problem, kept, plan = self.problem, self.kept, self.places.get((1, value == 0))
        if kept is None or kept[0] != w.tobytes() or plan is None or not plan.at_once or self.size >= LEAST_WORK:
            return None
        _, operations, other, _ = kept
        sums = problem.reduction == "sum" and not is_integer(problem.dtype)
        large = abs(delta) >= MOST_SUM
        if other is not None or sums or large or (problem.reduction and delta) or x.shape != self.images[1:]:
            return None
        operation, border, weights = operations[0][0], plan.border, w.copy()
        call, finite = operation.call, is_finite_of(self.size, problem.result)
        if not operation.step:
            return lambda image: call(image, border, value, delta)

        def routine(image: np.ndarray) -> np.ndarray:
            made = call(image, border, value, delta)
            if finite(made) or not operation.is_spoilt(image):
                return made
            return _otherwise(problem).run(problem, image, weights, None, value, delta).reshape(image.shape)

        return routine

    def _in_strips(
        self, images: np.ndarray, operations: list[list[Operation]], plan: Placed, value: float, delta: float,
        sure: bool,
    ) -> np.ndarray:  # fmt: skip
        problem, y = self.problem, np.empty(self.results, self.problem.result)

        def one(job: tuple[int, int, Strip]) -> None:
            image, number, strip = job
            operation = operations[image if problem.per_image else 0][number]
            seen = planes[image][strip.low : strip.high]
            seen = seen if operation.reads is None else seen.astype(operation.reads)
            made = operation.checked(seen, plan.border, value, delta, sure)
            made = made[strip.first - strip.low :, plan.left :][: strip.last - strip.first, : problem.out_w]
            put(made, y[image, number, strip.first - plan.top : strip.last - plan.top])

        planes = [_extended(problem, image, value) for image in images] if plan.extends else list(images)
        numbers = range(problem.batch), range(problem.filters)
        jobs = [(image, number, strip) for image in numbers[0] for number in numbers[1] for strip in plan.strips]
        over_blocks(one, jobs, plan.threads)
        return y.reshape(self.y_shape)


class Operation(NamedTuple):
    """One routine: what it reads (None: the image's type), what it makes, and its call. OpenCV finds arguments by their
    places sooner than by name.

    ``call(pixels, border, value, delta)`` gives a result for each pixel. Where a sum of two pixels may leave the type,
    every ``step``-th row or the last shows it; 0 where none may. Some weights may be zeros.
    """

    reads: str | None
    makes: str
    call: Callable[[np.ndarray, int, float, float], np.ndarray]
    step: int = 0
    has_zeros: bool = False

    def checked(self, pixels: np.ndarray, border: int, value: float, delta: float, sure: bool = False) -> np.ndarray:
        """`call`. Raises Imprecise where results are not finite, unless the caller is ``sure`` of them, or it is pixels
        that are not."""
        made = self.call(pixels, border, value, delta)
        if self.step and not (sure or are_finite(made, self.step)) and self.is_spoilt(pixels):
            raise Imprecise
        return made

    def is_spoilt(self, pixels: np.ndarray) -> bool:
        """Whether results that are not finite may be so because of how they are computed."""
        return self.has_zeros or has_large(pixels)


def _few(problem: FilterProblem) -> bool:
    """Whether a box of fractions is filtered as a product of a column and a row."""
    return not is_integer(problem.dtype) and problem.kh + problem.kw <= FEW_TAPS


@cache
def _number(dtype: str) -> int:
    """OpenCV's number of an element type."""
    names = {"uint8": "CV_8U", "uint16": "CV_16U", "int16": "CV_16S", "float32": "CV_32F", "float64": "CV_64F"}
    return int(getattr(opencv(), names[dtype]))


def _products(problem: FilterProblem, kernel: np.ndarray) -> Operation:
    native = (problem.dtype, problem.result) in _PRODUCTS
    reads, makes = (None, problem.result) if native else (problem.sums, problem.sums)
    depth, anchor, filter2d = _number(makes), _anchor(problem), opencv().filter2D

    def call(pixels: np.ndarray, border: int, value: float, delta: float) -> np.ndarray:
        return filter2d(pixels, depth, kernel, None, anchor, delta, border)

    return Operation(reads, makes, call)


def _passes(problem: FilterProblem, factors: np.ndarray) -> Operation:
    native = (problem.dtype, problem.result) in _PASSES and len(factors) == 1
    reads, makes = (None, problem.result) if native else (problem.sums, problem.sums)
    depth, anchor, kh = _number(makes), _anchor(problem), problem.kh
    sep_filter2d, add = opencv().sepFilter2D, opencv().add
    lines = [(each[kh:], each[:kh]) for each in factors]
    if problem.dtype == "uint8" and native:
        # the factors 2 and 1/2 keep OpenCV 4 from products in integers, of weights that are rounded to 8 bits
        lines = [(row * 2, column / 2) for row, column in lines]
    step = _step(problem, lines)
    if step and max(np.abs(column).max() for _, column in lines) < np.finfo(problem.sums).max / 4:
        lines = [(row / 4, column * 4) for row, column in lines]
    (first_row, first_column), *others = lines

    def call(pixels: np.ndarray, border: int, value: float, delta: float) -> np.ndarray:
        made = sep_filter2d(pixels, depth, first_row, first_column, None, anchor, delta, border)
        for row, column in others:
            add(made, sep_filter2d(pixels, depth, row, column, anchor=anchor, borderType=border), made)
        return made

    return Operation(reads, makes, call, step, not factors.all())


def _step(problem: FilterProblem, lines: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """The step of an `Operation` that adds pixels in pairs before it multiplies them, as OpenCV does where weights are
    alike: two of more than half the largest number make Inf.

    With a quarter of a row's weights, which add up to 1 at most, pairs of what rows make do not. So it is a sum along
    a row that does, and all rows of results that it reaches show it.
    """
    if problem.reduction is not None or is_integer(problem.dtype) or problem.dtype != problem.sums:
        return 0
    steps = [0]
    for row, column in lines:
        reached = np.flatnonzero(column)
        # pairs below a weight of 0 are added, too; of one product `_telling_rows` are looked at
        if row.size > 1 or (problem.rank == 1 and reached.size > 1):
            steps.append(reached.size if reached.size and np.ptp(reached) < reached.size else 1)
    return min(filter(None, steps), default=0)


def _window(problem: FilterProblem, weight: np.ndarray) -> Operation:
    """Least, largest and middle pixels, and sums of integers."""
    cv2, size, anchor = opencv(), (problem.kw, problem.kh), _anchor(problem)
    call: Callable[[np.ndarray, int, float, float], np.ndarray]
    if problem.reduction in ("min", "max"):
        function, box = cv2.erode if problem.reduction == "min" else cv2.dilate, np.ones(size[::-1], np.uint8)

        def call(pixels: np.ndarray, border: int, value: float, delta: float) -> np.ndarray:
            return function(pixels, box, None, anchor, 1, border, (value,) * 4)

    elif problem.reduction == "median":

        def call(pixels: np.ndarray, border: int, value: float, delta: float) -> np.ndarray:
            return cv2.medianBlur(pixels, problem.kh)

    else:
        number, depth = float(weight[0]), _number(problem.sums)
        taps, kept = problem.kh * problem.kw, problem.dtype == problem.result
        mean, fractions = number == np.float32(1 / taps), not is_integer(problem.dtype)
        if kept and taps % 2 and taps <= MEANS.get(problem.dtype, 0) and mean:

            def call(pixels: np.ndarray, border: int, value: float, delta: float) -> np.ndarray:
                return cv2.blur(pixels, size, None, anchor, border)

        else:
            positive = problem.result == "uint8" and problem.dtype in ("uint8", "uint16") and number > 0
            divided = fractions and mean
            # OpenCV divides sums in float64, and those that leave float32 are Inf
            gain, limit = (1, float(np.finfo(problem.sums).max) / taps) if divided else (taps, np.inf)

            def call(pixels: np.ndarray, border: int, value: float, delta: float) -> np.ndarray:
                sums = cv2.boxFilter(pixels, depth, size, anchor=anchor, normalize=divided, borderType=border)
                if fractions and not are_precise(pixels, sums, gain, sum(pixels.shape[:2]), limit):
                    raise Imprecise
                if divided:
                    return sums
                if positive:
                    return cv2.convertScaleAbs(sums, alpha=number)
                return np.multiply(sums, sums.dtype.type(number), out=sums) if number != 1 else sums

            return Operation(None, problem.result if positive else problem.sums, call)
    return Operation(None, problem.result, call)


def _operations(problem: FilterProblem, w: np.ndarray) -> list[list[Operation]]:
    """The operations of each image that has its own, and of each filter."""
    if problem.reduction == "sum" and _few(problem):
        return [[_passes(problem, np.repeat([w[0], w.dtype.type(1)], (problem.kh, problem.kw))[None])]]
    if not problem.is_whole:
        return [[_passes(problem, w) if problem.rank else _window(problem, w)]]
    kernels = w.reshape(-1, problem.filters, problem.kh, problem.kw)
    return [[_products(problem, kernel) for kernel in each] for each in kernels]


def _instead(problem: FilterProblem, w: np.ndarray) -> CpuAlgorithm | None:
    """What computes data that OpenCV's loops do not compute as they should; None where there are no such data.

    Loops leave out taps of zero, under which an Inf or a NaN may lie; a NaN is neither the least nor the largest pixel;
    and sums in int32 may wrap around.
    """
    if problem.reduction is not None:
        return Boxes() if problem.reduction in ("min", "max") and not is_integer(problem.dtype) else None
    wraps = (problem.dtype, problem.result) == ("uint8", "int16") and np.abs(w).sum() >= MOST_WEIGHT
    wraps |= is_integer(problem.dtype) and is_integer(problem.result) and _most(problem, w) >= MOST_SUM
    if wraps or not (is_integer(problem.dtype) or w.all()):
        return _otherwise(problem)
    return None


def _otherwise(problem: FilterProblem) -> CpuAlgorithm:
    """What computes sums of products otherwise."""
    return Factored() if problem.rank else Banded()


def _most(problem: FilterProblem, w: np.ndarray) -> float:
    """The largest sum that pixels of integers can make."""
    size = np.abs(w.astype(np.float64))
    if problem.rank:
        size = size[..., : problem.kh].sum(-1) * size[..., problem.kh :].sum(-1)
    limits = DTYPES[problem.dtype]
    return float(size.sum()) * max(-limits.low, limits.high)


def _telling_rows(problem: FilterProblem, w: np.ndarray) -> int:
    """Of a column times a row the number of consecutive rows of results in all of which an Inf or a NaN of a pixel
    shows, as far as they are in the image: so one of them tells. 0 where it may show in fewer than two."""
    if problem.rank != 1 or is_integer(problem.result) or is_integer(problem.dtype):
        return 0
    column, row = np.flatnonzero(w[0][: problem.kh]), np.flatnonzero(w[0][problem.kh :])
    (ay, ax), count = problem.anchor, column.size
    if count < 2 or row.size == 0 or column[-1] - column[0] >= count or not column[0] <= ay <= column[-1]:
        return 0
    # along a row it shows on one side or the other
    return int(count) if row[0] <= ax <= row[-1] and problem.w > row[-1] - row[0] else 0


def _anchor(problem: FilterProblem) -> tuple[int, int]:
    """As OpenCV writes it; of a ``valid`` image results are cut out of larger ones."""
    return (problem.kw // 2, problem.kh // 2) if problem.valid else (problem.anchor[1], problem.anchor[0])


class Strip(NamedTuple):
    """Result rows ``first`` to ``last``, and the rows ``low`` to ``high`` that they are computed from."""

    first: int
    last: int
    low: int
    high: int


class Placed(NamedTuple):
    """How a problem's pixels are cut, and which of an operation's results are kept."""

    at_once: bool
    threads: int
    border: int
    extends: bool
    top: int
    left: int
    strips: tuple[Strip, ...]


def _place(problem: FilterProblem, operation: Operation, threads: int, zeros: bool) -> Placed:
    """How a problem is cut, with a constant border of ``zeros`` or of another number.

    OpenCV's filters have no border ``wrap``, those of sums no constant one but 0, and medians the nearest alone.
    """
    reads = operation.reads or problem.dtype
    converts = reads != problem.dtype or operation.makes != problem.result
    h, kh, (ay, ax) = problem.h, problem.kh, problem.anchor
    constant = problem.border == "constant" and not zeros and problem.reduction not in ("min", "max")
    nearest = problem.reduction == "median" and problem.border != "replicate"
    extends = not problem.valid and (problem.border == "wrap" or constant or nearest)
    top, left = (ay, ax) if extends else (kh // 2, problem.kw // 2) if problem.valid else (0, 0)
    rows = h + kh - 1 if extends else h
    one = problem.batch == problem.filters == 1
    at_once = one and threads == 1 and not (converts or extends or problem.valid)
    step = problem.out_h
    if one and threads > 1:
        step = ceil_div(step, 2 * threads)
    if converts:
        step = min(step, STRIP_BYTES // (item_bytes(reads) * problem.w * problem.channels))
    step = max(step, LEAST_ROWS, kh)
    strips = []
    for begin in range(top, top + problem.out_h, step):
        end = min(begin + step, top + problem.out_h)
        low, high = max(0, min(begin - kh, rows - kh)), min(rows, max(end + kh, kh))
        strips.append(Strip(begin, end, low, high))
    border = BORDERS["replicate" if extends or problem.valid else problem.border].number
    return Placed(at_once, threads, border, extends, top, left, tuple(strips))


def _extended(problem: FilterProblem, image: np.ndarray, value: float) -> np.ndarray:
    """An image with the pixels that its border stands for."""
    (ay, ax), kind = problem.anchor, BORDERS[problem.border].number
    sides = ay, problem.kh - 1 - ay, ax, problem.kw - 1 - ax
    return opencv().copyMakeBorder(image, *sides, kind, value=(value,) * 4)
