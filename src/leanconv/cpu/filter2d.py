"""Image filters on NumPy: banded matrix products on BLAS, transforms, and tap by tap what those cannot do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, ClassVar

import numpy as np

from leanconv.cpu.lines import FASTER, line_indices
from leanconv.cpu.planes import banded_ns, by_transforms, directly, transform_ns
from leanconv.dtypes import DTYPES, is_integer, item_bytes
from leanconv.kernels.contract import CpuAlgorithm
from leanconv.options import Precision
from leanconv.problem import FilterProblem

#: Operations of BLAS in a nanosecond: the unit of costs.
OPERATIONS = 220.0
#: What a call of a filter in blocks costs besides. Explored (EPYC, one thread, 6f01be02).
CALL_NS = 70_000.0
#: Bytes of a strip, its extension and the product, for the tap loop: they stay in the second-level cache
TAP_BYTES = 256 << 10
#: Why what takes whole filters refuses some.
NOT_GIVEN_WHOLE = "the filter is given as products of a column and a row, or is a box"


def rounded(sums: np.ndarray, dtype: str) -> np.ndarray:
    """Sums as elements of the result. Integers are rounded, of two the even one, and saturate; NaN is 0."""
    if sums.dtype == np.dtype(dtype):
        return sums
    with np.errstate(invalid="ignore", over="ignore"):
        if is_integer(dtype):
            low, high = DTYPES[dtype].low, DTYPES[dtype].high
            sums = np.nan_to_num(np.rint(sums).clip(low, high), copy=False)
        return sums.astype(dtype)


class PlaneFilter(CpuAlgorithm):
    """What all ways have in common: they filter planes, each image and channel by itself, in the type of the sums."""

    precision: ClassVar[Precision] = "ieee"
    solves = "filter2d"

    @abstractmethod
    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        """Write the results to ``y`` (batch, filters, h, w), which is not empty.

        ``w`` is (filters, kh, kw), (rank, kh + kw), or the weight of a box.
        ``problem`` is one of planes: one channel, one set of filters, results as large as the images, and one type.
        """

    def run(
        self,
        problem: FilterProblem,
        x: np.ndarray,
        w: np.ndarray,
        bias: None = None,
        value: float = 0,
        delta: float = 0,
    ) -> np.ndarray:
        y = np.empty(problem.y_shape, problem.result)
        if not y.size:
            return y
        if problem.is_volume:
            return self._slices(problem, x, w, value, delta)
        batch, channels = problem.batch, problem.channels
        one = (problem.filters, problem.kh, problem.kw) if problem.is_whole else problem.w_shape
        w = w.reshape(-1, *one)
        planes = replace(
            problem, batch=1 if problem.per_image else batch, channels=1, valid=False, per_image=False,
            dtype=problem.sums, out_dtype=None, sum_dtype=None,
        )  # fmt: skip
        x = x.reshape(batch, problem.h, problem.w, channels)
        results = y.reshape(batch, problem.filters, problem.out_h, problem.out_w, channels)
        sums = np.empty((planes.batch, problem.filters, problem.h, problem.w), problem.sums)
        with np.errstate(invalid="ignore", over="ignore"):
            for image in range(0, batch, planes.batch):
                images = slice(image, image + planes.batch)
                for channel in range(channels):
                    plane = np.ascontiguousarray(x[images, ..., channel], problem.sums)
                    self.fill(planes, plane, w[image if problem.per_image else 0], value, delta, sums)
                    inside = sums[..., : problem.out_h, : problem.out_w]
                    results[images, ..., channel] = rounded(inside, problem.result)
        return y

    def _slices(self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float) -> np.ndarray:
        """Volumes: each slice of the filter on the slices of the volume that it lies on, added up."""
        channels = (problem.channels,) * (problem.channels != 1)
        x = x.reshape(problem.batch, problem.d, problem.h, problem.w, *channels)
        w = w.reshape(-1, problem.filters, problem.kd, problem.kh, problem.kw)
        slices = line_indices(problem.border, problem.d, problem.anchor_z, problem.kd - 1 - problem.anchor_z)
        one = replace(
            problem, batch=problem.out_d, d=1, kd=1, anchor_z=0, per_image=False, dtype=problem.sums, out_dtype=None,
            sum_dtype=None,
        )  # fmt: skip
        y = np.empty(
            (problem.batch, problem.filters, problem.out_d, *one.y_shape[-2 - len(channels) :]), problem.result
        )
        for volume in range(problem.batch):
            sums = np.zeros(one.y_shape, problem.sums)
            for t in range(problem.kd):
                sources = slices[t : t + problem.out_d]
                images = x[volume][sources].astype(problem.sums, copy=False)
                images[sources < 0] = value
                last = delta if t == problem.kd - 1 else 0
                with np.errstate(invalid="ignore", over="ignore"):
                    sums += self.run(one, images, w[volume if problem.per_image else 0][:, t], None, value, last)
            sums = sums.reshape(problem.out_d, problem.filters, *y.shape[3:])
            y[volume] = rounded(sums, problem.result).swapaxes(0, 1)
        return y.reshape(problem.y_shape)


class BlockFilter(PlaneFilter):
    """A filter whose blocks are read in the images' type, computed, rounded and stored by several threads."""

    @abstractmethod
    def plane(self, *arguments: Any, **options: Any) -> np.ndarray:
        """Fill ``out`` from images, one filter, anchor, border and value; with ``delta`` and ``sums``."""

    @abstractmethod
    def expected(self, kh: int, kw: int, sums: str) -> float:
        """Nanoseconds of an output."""

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        if not problem.is_whole:
            return [NOT_GIVEN_WHOLE]
        if is_integer(problem.sums):
            return [f"its sums are in float32 and float64, not {problem.sums}"]
        return []

    def cost(self, problem: FilterProblem) -> float:
        each = self.expected(problem.kh, problem.kw, problem.sums)
        return OPERATIONS * (prod(problem.x_shape) * problem.filters * each * problem.kd + CALL_NS)

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        for kernel, result in zip(w, y.swapaxes(0, 1), strict=True):
            self.plane(x, kernel, problem.anchor, problem.border, value, delta=delta, out=result, sums=problem.sums)

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
        w = w.reshape(-1, *((problem.filters, problem.kh, problem.kw) if problem.is_whole else problem.w_shape))
        x = x.reshape(problem.batch, problem.h, problem.w, problem.channels)
        results = y.reshape(problem.batch, problem.filters, problem.out_h, problem.out_w, problem.channels)
        for images in range(problem.batch) if problem.per_image else [slice(None)]:
            kernels = w[images if problem.per_image else 0]
            for channel in range(problem.channels):
                # one image has no axis of images
                result = np.moveaxis(results[images, ..., channel], -3, 0)
                self.fill(problem, x[images, ..., channel], kernels, value, delta, result.swapaxes(0, 1))
        return y


class Banded(BlockFilter):
    """A filter as a product with a banded matrix.

    For a band of B output rows, ``y = Σ_v T_v · x[rows, columns + v]`` with ``T_v[i, i + u] = w[u, v]``: kw small
    banded (Toeplitz) matrices side by side, times the kw shifted copies of B + kh − 1 rows below one another. The zeros
    outside the band cost arithmetic, which BLAS does faster than NumPy can pass over the image kh·kw times.
    """

    name = "banded"
    paper = "correlation as a Toeplitz matrix product"

    def plane(self, *arguments: Any, **options: Any) -> np.ndarray:
        return directly(*arguments, loops=False, **options)

    def expected(self, kh: int, kw: int, sums: str) -> float:
        return banded_ns(kh, kw, sums)


class Transforms(BlockFilter):
    """A filter as a product of Fourier transforms of blocks, in float64: for many taps."""

    name = "transforms"
    paper = "T. G. Stockham, High-speed convolution and correlation (1966)"
    #: errors are relative to the largest number of a block
    precision = "fp32"

    def plane(self, *arguments: Any, **options: Any) -> np.ndarray:
        return by_transforms(*arguments, **options)

    def expected(self, kh: int, kw: int, sums: str) -> float:
        return transform_ns(kh, kw)

    def cost(self, problem: FilterProblem) -> float:
        # sums of integers of 16 bits are so much larger than the errors that these do not count
        exact = is_integer(problem.dtype) and item_bytes(problem.dtype) <= 2
        return super().cost(problem) * (1 if exact else FASTER)


class Taps(PlaneFilter):
    """One multiply-add pass for each tap of each filter, in row order, over strips that stay in the cache.

    Every sum is in the order of the filter's taps and every step is rounded, so results repeat bit for bit.
    """

    name = "taps"
    paper = "the definition of correlation"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        return [] if problem.is_whole else [NOT_GIVEN_WHOLE]

    def cost(self, problem: FilterProblem) -> float:
        return 60.0 * prod(problem.x_shape) * problem.filters * problem.kh * problem.kw

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        y[...] = 0
        rows = max(4, TAP_BYTES // (3 * item_bytes(problem.dtype) * problem.w))
        product = np.empty((min(rows, problem.h), problem.w), x.dtype)
        for image, top, extended in extended_strips(problem, x, value, rows):
            part = product[: extended.shape[0] - problem.kh + 1]
            for out, taps in zip(y[image, :, top : top + rows], w, strict=True):
                for u in range(problem.kh):
                    for v in range(problem.kw):
                        seen = extended[u : u + out.shape[0], v : v + problem.w]
                        np.multiply(seen, taps[u, v], out=part)
                        out += part
                if delta:
                    out += x.dtype.type(delta)


def extended_strips(
    problem: FilterProblem, x: np.ndarray, value: float, rows: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """Strips of ``rows`` output rows: (image, first output row, the pixels that the strip reads, border and all).

    The pixels are (rows + kh − 1, w + kw − 1), in a buffer that the next strip overwrites.
    """
    (ay, ax), h, w = problem.anchor, problem.h, problem.w
    lines = line_indices(problem.border, h, ay, problem.kh - 1 - ay)
    columns = line_indices(problem.border, w, ax, problem.kw - 1 - ax)
    edges = np.r_[0:ax, ax + w : columns.size]
    sources = columns[edges]
    buffer = np.empty((min(rows, h) + problem.kh - 1, columns.size), x.dtype)
    for image in range(problem.batch):
        for top in range(0, h, rows):
            count = min(rows, h - top) + problem.kh - 1
            extended = buffer[:count]
            needed = lines[top : top + count]
            first = top - ay
            if first >= 0 and first + count <= h:
                extended[:, ax : ax + w] = x[image, first : first + count]
            else:
                extended[:, ax : ax + w] = x[image, needed]
            if edges.size:
                extended[:, edges] = np.where(sources < 0, x.dtype.type(value), extended[:, ax + sources])
            if problem.border == "constant":
                extended[needed < 0] = value
            yield image, top, extended
