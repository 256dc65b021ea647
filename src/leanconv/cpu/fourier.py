"""Convolution by Fourier transforms of tiles (overlap-save), for layers with long filters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import log2
from typing import NamedTuple

import numpy as np

from leanconv.cpu.im2col import Im2col
from leanconv.cpu.layers import FAR, LayerAlgorithm, finish, inside, shared_limits
from leanconv.cpu.lines import transform_length
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem

#: Bytes of the transforms that are multiplied at once.
BUDGET = 8 << 20
#: Costs in operations of BLAS, fitted (EPYC, one thread, 0d4d7f7): of an element's transform in one direction, along
#: rows alone and along both axes; of a filter's element; of a complex product, one by one, in a matrix product, and of
#: reading the filters for it; of the call of one; of an output; of a tile.
_TRANSFORM, _FILTER = (400.0, 690.0), (980.0, 430.0)
_ELEMENT, _PRODUCT, _READ, _CALL = 50.0, 36.0, 560.0, 4000.0
_OUTPUT, _TILE = 126.0, 545_000.0
#: Points of a transform from which on each doubling costs more, since it leaves the cache, and how much more.
_LARGE, _DOUBLED = 16384, 83.0


class Tiles(NamedTuple):
    """Transforms of ``height`` × ``width`` pixels, and the outputs that each of them gives."""

    height: int
    width: int
    rows: int
    columns: int

    def count(self, problem: ConvProblem) -> int:
        p, q = _dense(problem)
        return ceil_div(p, self.rows) * ceil_div(q, self.columns)


class Fourier(LayerAlgorithm):
    """A tile of the image and the filter are transformed; in between, channels are summed for each frequency.

    ``y = F⁻¹ · sum over c of conj(F w[c]) ⊙ (F x[c])``, in float64 whatever the layer's dtype is: errors of a
    transform are relative to the largest numbers of a tile. Of each tile the outputs are kept that do not wrap around.
    Tiles are as large as makes the least work.
    """

    name = "fourier"
    paper = "T. G. Stockham, High-speed convolution and correlation (1966)"
    precision = "fp32"
    call_cost = 7e6

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        reasons = shared_limits(problem, transforms=True)
        for extent, dilation, what in zip((problem.r, problem.s), problem.dilation, ("down", "along"), strict=True):
            if extent > 1 and dilation > 1:
                reasons.append(f"dilation {dilation} {what} the rows spreads the filters: their transforms grow by it")
        if max(problem.stride) > FAR:
            reasons.append(f"stride {max(problem.stride)} is more than {FAR}: most of what transforms give is left out")
        return reasons

    def compute_cost(self, problem: ConvProblem) -> float:
        return min(_cost(problem, tiles) for tiles in _sizes(problem))

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        tiles = best(problem)
        y = np.empty(problem.y_shape, x.dtype)
        # one view with the rows and columns last serves both layouts
        nchw = problem.layout == "NCHW"
        source, result = (x, y) if nchw else (x.transpose(0, 3, 1, 2), y.transpose(0, 3, 1, 2))
        filters = transform_filters(problem, w if nchw else w.transpose(0, 3, 1, 2), tiles)
        for places in _groups(problem, tiles):
            _fill(problem, tiles, places, source, filters, result)
        if not np.isfinite(y.sum()):
            # an Inf, a NaN or a huge number spreads from its pixel over the tile
            return Im2col().compute(problem, x, w, bias)
        finish(problem, y, bias)
        return y


def _dense(problem: ConvProblem) -> tuple[int, int]:
    """Outputs of the layer with unit stride, of which its stride takes some."""
    return (problem.p - 1) * problem.stride[0] + 1, (problem.q - 1) * problem.stride[1] + 1


def _sizes(problem: ConvProblem) -> Iterator[Tiles]:
    """Tiles of the whole image, and of some multiples of the filter's extents."""
    (p, q), (r, s) = _dense(problem), (problem.r, problem.s)
    whole = transform_length(p + r - 1) if r > 1 else 1, transform_length(q + s - 1) if s > 1 else 1
    for factor in (1.5, 2, 3, 4, 6, 8, 16):
        height, width = (
            min(most, transform_length(max(int(factor * extent), 16))) if extent > 1 else 1
            for extent, most in zip((r, s), whole, strict=True)
        )
        yield Tiles(height, width, height - r + 1, width - s + 1)
    yield Tiles(*whole, whole[0] - r + 1, whole[1] - s + 1)


def _cost(problem: ConvProblem, tiles: Tiles) -> float:
    count, points = problem.n * tiles.count(problem), tiles.height * tiles.width
    if not count:
        return 0.0
    frequencies = tiles.height * (tiles.width // 2 + 1)
    both = int(tiles.height > 1)
    transform = _TRANSFORM[both] + _DOUBLED * log2(max(1.0, points / _LARGE))
    cost = transform * count * points * (problem.c + problem.k) + _TILE * count
    cost += _FILTER[both] * points * problem.k * problem.group_c
    cost += _OUTPUT * problem.n * problem.p * problem.q * problem.k
    terms = frequencies * problem.k * problem.group_c
    if problem.group_c == 1 or problem.group_k == 1:
        return cost + _ELEMENT * terms * count
    # a product of one tile uses each number of the filters once
    many = min(count, _tiles_at_once(problem, tiles))
    calls = ceil_div(count, many)
    return cost + (_PRODUCT * count + _READ * calls) * terms + _CALL * frequencies * problem.groups * calls


@lru_cache(maxsize=256)
def best(problem: ConvProblem) -> Tiles:
    """The tiles of least cost."""
    return min(_sizes(problem), key=lambda tiles: _cost(problem, tiles))


def _tiles_at_once(problem: ConvProblem, tiles: Tiles) -> int:
    return max(1, BUDGET // (16 * tiles.height * (tiles.width // 2 + 1) * (problem.c + problem.k)))


def _groups(problem: ConvProblem, tiles: Tiles) -> Iterator[list[tuple[int, int, int]]]:
    """(image, first row, first column) of the tiles that are computed at once."""
    p, q = _dense(problem)
    places = [
        (image, top, left)
        for image in range(problem.n)
        for top in range(0, p, tiles.rows)
        for left in range(0, q, tiles.columns)
    ]
    many = _tiles_at_once(problem, tiles)
    for first in range(0, len(places), many):
        yield places[first : first + many]


def transform_filters(problem: ConvProblem, w: np.ndarray, tiles: Tiles) -> np.ndarray:
    """The conjugate transforms of filters (K, C/groups, R, S): (height, frequencies, groups, C/groups, K/groups)."""
    transformed = np.conj(np.fft.rfft2(w.astype(np.float64), (tiles.height, tiles.width)))
    grouped = transformed.reshape(problem.groups, problem.group_k, problem.group_c, *transformed.shape[2:])
    if problem.group_c == 1 or problem.group_k == 1:
        return grouped
    return np.ascontiguousarray(grouped.transpose(3, 4, 0, 2, 1))


def _fill(
    problem: ConvProblem, tiles: Tiles, places: list[tuple[int, int, int]], x: np.ndarray, filters: np.ndarray,
    y: np.ndarray,
) -> None:  # fmt: skip
    seen = np.zeros((len(places), problem.c, tiles.height, tiles.width))
    (top, _, left, _), (p, q) = problem.padding, _dense(problem)
    for tile, (image, row, column) in zip(seen, places, strict=True):
        into_rows, rows = inside(row - top, 1, tiles.height, problem.h)
        into_columns, columns = inside(column - left, 1, tiles.width, problem.w)
        tile[:, into_rows, into_columns] = x[image][:, rows, columns]
    transformed = np.fft.rfft(seen) if tiles.height == 1 else np.fft.rfft2(seen)
    grouped = transformed.reshape(len(places), problem.groups, problem.group_c, *transformed.shape[2:])
    if problem.group_c == 1:
        sums = grouped * filters[:, :, 0]
    elif problem.group_k == 1:
        sums = np.einsum("tgchw,gchw->tghw", grouped, filters[:, 0])
    else:
        # for each frequency and group a product of (tiles, C/groups) and (C/groups, K/groups)
        product = np.matmul(np.ascontiguousarray(grouped.transpose(3, 4, 1, 0, 2)), filters)
        sums = product.transpose(3, 2, 4, 0, 1)
    sums = sums.reshape(len(places), problem.k, *transformed.shape[2:])
    whole = tiles.height, tiles.width
    results = np.fft.irfft(sums, whole[1]) if tiles.height == 1 else np.fft.irfft2(sums, whole)
    (sh, sw) = problem.stride
    for result, (image, row, column) in zip(results, places, strict=True):
        # the first row and column of the tile that the stride takes, and how many there are
        first, second = -row % sh, -column % sw
        high, wide = min(tiles.rows, p - row), min(tiles.columns, q - column)
        taken = result[:, first:high:sh, second:wide:sw]
        at = (row + first) // sh, (column + second) // sw
        y[image, :, at[0] : at[0] + taken.shape[1], at[1] : at[1] + taken.shape[2]] = taken
