"""2-D Winograd F(m × m, 3 × 3), as in openCNN (2021): m = 2, or m = 4 where the precision is relaxed."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.im2col import Im2col
from leanconv.cpu.layers import LayerAlgorithm, parts, product_cost, shared_limits
from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.kernels.winograd_matrices import Matrices, matrices, outputs_2d, why_not_2d
from leanconv.problem import ConvProblem


class Winograd2d(LayerAlgorithm):
    """F(m × m, 3 × 3): a tile of m × m outputs costs (m + 2)² multiplications for each channel and filter.

    ``y = Aᵀ · (sum over c of (G w[c] Gᵀ) ⊙ (Bᵀ x[c] B)) · A``: as many matrix products as a tile has states, each of
    filters with channels by channels with tiles. Tiles of the last rows and columns may reach beyond the image.
    """

    name = "winograd2d"
    paper = "R. L. Castro et al., openCNN (2021)"
    precision = "fp32"
    call_cost = 1e7

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        return shared_limits(problem, transforms=True) + why_not_2d(problem)

    def compute_cost(self, problem: ConvProblem) -> float:
        return min(_cost(problem, m) for m in outputs_2d(problem.precision))

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return convolve(problem, min(outputs_2d(problem.precision), key=lambda m: _cost(problem, m)), x, w, bias)


def _cost(problem: ConvProblem, m: int) -> float:
    tiles = problem.n * ceil_div(problem.p, m) * ceil_div(problem.q, m)
    states = (m + 2) ** 2
    products = 2 * tiles * states * problem.k * problem.group_c
    idle = product_cost(problem) / max(1, problem.flops) * max(1.0, 16 / max(1, problem.group_c))
    moved = tiles * states * 4 * (problem.c + problem.k)
    filters = states * problem.k * problem.group_c
    return products * idle + 80 * moved + 400 * filters


def convolve(problem: ConvProblem, m: int, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """``problem`` by F(m × m, 3 × 3); stride and dilation are 1."""
    y = np.empty(problem.y_shape, x.dtype)
    transforms = matrices(m, 3)
    at, _, bt = (matrix.astype(x.dtype) for matrix in transforms.arrays())
    across = ceil_div(problem.q, m)
    pixel_bytes = ceil_div(transforms.alpha**2, m * m) * 3 * (problem.c + problem.k) * item_bytes(problem.dtype)
    filters = transform_filters(problem, w, transforms)
    for padded, part in parts(problem, x, y, bias, pixel_bytes, 8 << 20, across * m + 2, tile_rows=m):
        down = (padded.shape[2 if problem.layout == "NCHW" else 1] - 2) // m
        sums = _multiply(problem, filters, both_sides(bt, _tiles(problem, padded, transforms, down, across)))
        tiles = both_sides(at, sums)
        # An Inf, a NaN or a huge number would spread from its pixel over the tile: then do without transforms.
        if not np.isfinite(tiles.sum()):
            return Im2col().compute(problem, x, w, bias)
        _store(problem, tiles, part)
    return y


def both_sides(matrix: np.ndarray, data: np.ndarray) -> np.ndarray:
    """``matrix @ data @ matrixᵀ`` over the first two axes of ``data``, for each element of the others."""
    rows, columns = matrix.shape
    half = matmul(matrix, data.reshape(columns, columns, -1))
    return matmul(matrix, half.reshape(columns, -1)).reshape(rows, rows, *data.shape[2:])


def transform_filters(problem: ConvProblem, w: np.ndarray, transforms: Matrices) -> np.ndarray:
    """``transforms.g`` applied to both sides of every filter and rounded once.

    Shape (α, α, groups, K/groups, C/groups) for NCHW, (α, α, groups, C/groups, K/groups) for NHWC.
    """
    _, g, _ = transforms.arrays()
    if problem.layout == "NCHW":
        taps = w.reshape(problem.groups, problem.group_k, problem.group_c, 3, 3).transpose(3, 4, 0, 1, 2)
    else:
        taps = w.reshape(problem.groups, problem.group_k, 3, 3, problem.group_c).transpose(2, 3, 0, 4, 1)
    return both_sides(g, np.ascontiguousarray(taps, np.float64)).astype(w.dtype)


def _tiles(problem: ConvProblem, padded: np.ndarray, transforms: Matrices, down: int, across: int) -> np.ndarray:
    """Input tiles (α, α, C, tiles) for NCHW, (α, α, tiles, C) for NHWC."""
    m, alpha = transforms.n, transforms.alpha
    nchw = problem.layout == "NCHW"
    images = padded.shape[1 if nchw else 0]
    shape = (problem.c, images, down, across) if nchw else (images, down, across, problem.c)
    data = np.empty((alpha, alpha, *shape), padded.dtype)
    for i in range(alpha):
        rows = slice(i, i + (down - 1) * m + 1, m)
        for j in range(alpha):
            columns = slice(j, j + (across - 1) * m + 1, m)
            data[i, j] = padded[:, :, rows, columns] if nchw else padded[:, rows, columns]
    return data.reshape(alpha, alpha, problem.c, -1) if nchw else data.reshape(alpha, alpha, -1, problem.c)


def _multiply(problem: ConvProblem, filters: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Sums over the channels (α, α, K, tiles) for NCHW, (α, α, tiles, K) for NHWC."""
    alpha, groups = data.shape[0], problem.groups
    if problem.layout == "NCHW":
        grouped = data.reshape(alpha, alpha, groups, problem.group_c, -1)
        return matmul(filters, grouped).reshape(alpha, alpha, problem.k, -1)
    grouped = data.reshape(alpha, alpha, -1, groups, problem.group_c).swapaxes(2, 3)
    sums = np.empty((*data.shape[:3], groups, problem.group_k), data.dtype)
    matmul(grouped, filters, out=sums.swapaxes(2, 3))
    return sums.reshape(*data.shape[:3], problem.k)


def _store(problem: ConvProblem, tiles: np.ndarray, part: np.ndarray) -> None:
    """Interleave the m × m outputs of the tiles, leaving out what lies beyond the image."""
    nchw, m, images = problem.layout == "NCHW", tiles.shape[0], part.shape[0]
    height = part.shape[2 if nchw else 1]
    down, across = ceil_div(height, m), ceil_div(problem.q, m)
    if nchw:
        tiles = tiles.reshape(m, m, problem.k, images, down, across).swapaxes(2, 3)
    else:
        tiles = tiles.reshape(m, m, images, down, across, problem.k)
    for i in range(min(m, height)):
        for j in range(min(m, problem.q)):
            into = part[:, :, i::m, j::m] if nchw else part[:, i::m, j::m]
            rows, columns = into.shape[2:] if nchw else into.shape[1:3]
            into[...] = tiles[i, j, :, :, :rows, :columns] if nchw else tiles[i, j, :, :rows, :columns]
