"""Image filters on NumPy: as banded matrix products on BLAS, and tap by tap for what those cannot do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from leanconv.cpu.blas import one_thread
from leanconv.cpu.lines import line_indices
from leanconv.dtypes import DTYPES, is_integer, item_bytes
from leanconv.kernels.contract import CpuAlgorithm, ceil_div
from leanconv.problem import FilterProblem

#: Rows of a band. A product of 16 rows does (15 + kh) / kh times the needed arithmetic, at the full speed of BLAS,
#: and reads 16 rows of vector width at a time; 32 rows were slower for filters up to 9×9, 8 for all.
BAND_ROWS = 16
#: Bytes of stacked columns of one band. Explored (0bd16dc): 512 KiB and less cost up to 40 %.
BAND_BYTES = 2 << 20
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

    precision = "ieee"
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


class Banded(PlaneFilter):
    """A filter as a product with a banded matrix.

    For a band of B output rows, ``y = Σ_v T_v · x[rows, columns + v]`` with ``T_v[i, i + u] = w[u, v]``: kw small
    banded (Toeplitz) matrices side by side, times the kw shifted copies of B + kh − 1 rows below one another. The zeros
    outside the band cost arithmetic, which BLAS does faster than NumPy can pass over the image kh·kw times. All filters
    take their product with the same stacked copies.
    """

    name = "banded"
    paper = "correlation as a Toeplitz matrix product"

    def why_not(self, problem: FilterProblem, target: None = None) -> list[str]:
        if not problem.is_whole:
            return [NOT_GIVEN_WHOLE]
        if is_integer(problem.sums):
            return [f"matrix products are made for sums in float32 and float64, not {problem.sums}"]
        return []

    def cost(self, problem: FilterProblem) -> float:
        pixels = prod(problem.x_shape)
        stacked = problem.kw * (BAND_ROWS + problem.kh - 1)
        return pixels * stacked * (2.0 * problem.filters + 50.0 / BAND_ROWS)

    def fill(
        self, problem: FilterProblem, x: np.ndarray, w: np.ndarray, value: float, delta: float, y: np.ndarray
    ) -> None:
        kh, kw = problem.kh, problem.kw
        rows = min(BAND_ROWS, problem.h)
        bands = np.zeros((problem.filters, rows, kw, rows + kh - 1), x.dtype)
        for i in range(rows):
            bands[:, i, :, i : i + kh] = w.transpose(0, 2, 1)
        widest = max(64, BAND_BYTES // (item_bytes(problem.dtype) * kw * (rows + kh - 1)))
        width = ceil_div(problem.w, ceil_div(problem.w, widest))
        buffer = np.empty(kw * (rows + kh - 1) * width, x.dtype)
        with one_thread(problem.flops):
            for image, top, extended in extended_strips(problem, x, value, rows):
                out = y[image, :, top : top + rows]
                count = out.shape[1]
                high = count + kh - 1
                matrices = bands[:, :count, :, :high].reshape(-1, count, kw * high)
                for left in range(0, problem.w, width):
                    part = out[:, :, left : left + width]
                    stacked = buffer[: kw * high * part.shape[2]].reshape(kw, high, part.shape[2])
                    for v in range(kw):
                        stacked[v] = extended[:, left + v : left + v + part.shape[2]]
                    for matrix, result in zip(matrices, part, strict=True):
                        np.matmul(matrix, stacked.reshape(kw * high, -1), out=result)
                # A zero outside the band makes NaN of an Inf or a NaN that the filter does not reach.
                if not np.isfinite(out.sum()):
                    return Taps().fill(problem, x, w, value, delta, y)
                if delta:
                    out += x.dtype.type(delta)
        return None


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
