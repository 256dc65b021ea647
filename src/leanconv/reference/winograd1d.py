"""1-D Winograd along the row, as in Im2col-Winograd (2024): any filter height, widths 2 to 9, 4, 8 or 16 states."""

from __future__ import annotations

import numpy as np

from leanconv.algorithms.base import ceil_div, mean_products
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem
from leanconv.reference.blas import matmul
from leanconv.reference.blocks import Block, PaddedInput, blocks, finish, output_like, product_cost, shared_limits
from leanconv.reference.im2col import Im2col
from leanconv.reference.layers import LayerAlgorithm
from leanconv.winograd import Matrices, matrices, states, why_no_states


class Winograd1d(LayerAlgorithm):
    """Γα(n, S), n = α + 1 − S: a tile of n outputs of a row costs α multiplications for each filter row and channel.

    The sum over filter rows and channels is computed in the Winograd domain, then transformed back once:
    ``y = Aᵀ · sum over c, r of (G w[c, r]) ⊙ (Bᵀ x[c, row + r])``. The input is transformed once for all filter rows:
    the tiles of one state are stored row after row, so the matrix for filter row r begins r rows further on, without a
    copy.

    α is the cheapest that the precision allows. The last tile of a row may reach beyond its end, into columns that are
    thrown away: cutting rows into segments of different α, as the paper does, gained nothing here on layers of 7 to 56
    columns, since products get smaller and each segment is copied and transformed for itself.
    """

    name = "winograd1d"
    paper = "Z. Zhang et al., Im2col-Winograd (ICPP 2024)"
    tier = "fp32"

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        reasons = shared_limits(problem, transforms=True)
        reasons += why_no_states(problem.s, mean_products(problem), problem.w, problem.precision)
        if problem.stride != (1, 1):
            reasons.append(f"stride {problem.stride[0]},{problem.stride[1]} is not 1,1")
        if problem.dilation[1] != 1:
            reasons.append(f"dilation {problem.dilation[1]} along the row is not 1")
        return reasons

    def compute_cost(self, problem: ConvProblem) -> float:
        return min(_cost(problem, alpha) for alpha in _states(problem))

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        return convolve(problem, min(_states(problem), key=lambda alpha: _cost(problem, alpha)), x, w, bias)


def _states(problem: ConvProblem) -> tuple[int, ...]:
    return states(problem.s, mean_products(problem), problem.w, problem.precision)


def _cost(problem: ConvProblem, alpha: int) -> float:
    tiles = problem.n * problem.p * ceil_div(problem.q, alpha + 1 - problem.s)
    products = 2 * tiles * alpha * problem.k * problem.group_c * problem.r
    idle = product_cost(problem) / max(1, problem.flops) * max(1.0, 16 / max(1, problem.group_c))
    moved = tiles * alpha * (2.5 * problem.c + (problem.r + 1.5) * problem.k)
    filters = alpha * problem.k * problem.group_c * problem.r
    return products * idle + 80 * moved + 400 * filters


def convolve(problem: ConvProblem, alpha: int, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """``problem`` by Γα(α + 1 − S, S); stride and dilation along the row are 1."""
    y = output_like(problem, x)
    if y.size == 0:
        return y
    transforms = matrices(alpha + 1 - problem.s, problem.s)
    at, _, bt = (m.astype(x.dtype) for m in transforms.arrays())
    padded = PaddedInput(problem, x, ceil_div(problem.q, transforms.n) * transforms.n + problem.s - 1)
    pixel_bytes = ceil_div(alpha, transforms.n) * (2 * problem.c + 3 * problem.k) * item_bytes(problem.dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        filters = transform_filters(problem, w, transforms)
        for block in blocks(problem, pixel_bytes, budget=8 << 20):
            if problem.layout == "NCHW":
                tiles = _tiles_nchw(problem, padded.load(block), filters, bt, at)
            else:
                tiles = _tiles_nhwc(problem, padded.load(block), filters, bt, at)
            # An Inf, a NaN or a huge number would spread from its pixel over the tile: then do without transforms.
            if not np.isfinite(tiles.sum()):
                return Im2col().compute(problem, x, w, bias)
            _store(problem, block, tiles, bias, y)
    return y


def transform_filters(problem: ConvProblem, w: np.ndarray, transforms: Matrices) -> np.ndarray:
    """``transforms.g`` applied to every filter row and rounded once.

    Shape (R, α, groups, K/groups, C/groups) for NCHW, (R, α, groups, C/groups, K/groups) for NHWC.
    """
    _, g, _ = transforms.arrays()
    shape = (problem.groups, problem.group_k)
    if problem.layout == "NCHW":
        rows = w.reshape(*shape, problem.group_c, problem.r, problem.s).transpose(4, 3, 0, 1, 2)
    else:
        rows = w.reshape(*shape, problem.r, problem.s, problem.group_c).transpose(3, 2, 0, 4, 1)
    transformed: np.ndarray = matmul(g, rows.reshape(problem.s, -1).astype(np.float64)).astype(w.dtype)
    return np.swapaxes(transformed.reshape(transforms.alpha, *rows.shape[1:]), 0, 1)


def _tiles_nchw(
    problem: ConvProblem, padded: np.ndarray, filters: np.ndarray, bt: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """Output tiles (n, K, images, rows of the padded image, tiles of a row); the last rows of an image are void."""
    (n, alpha), groups = at.shape, problem.groups
    c, images, height, width = padded.shape
    across = (width - problem.s + 1) // n
    data = np.empty((alpha, c, images * height * across), padded.dtype)
    for a in range(alpha):
        data[a].reshape(c, images, height, across)[...] = padded[..., a : a + (across - 1) * n + 1 : n]
    data = matmul(bt, data.reshape(alpha, -1)).reshape(alpha, groups, problem.group_c, -1)
    # All images of the block are one tall image: R − 1 void rows at each seam are cheaper than small products.
    reach = (problem.r - 1) * problem.dilation[0] * across
    count = data.shape[3] - reach
    total = np.empty((alpha, groups, problem.group_k, count), padded.dtype)
    product = np.empty_like(total) if problem.r > 1 else total
    for r in range(problem.r):
        first = r * problem.dilation[0] * across
        matmul(filters[r], data[..., first : first + count], out=product if r else total)
        if r:
            total += product
    tiles = np.empty((n, problem.k, images * height * across), padded.dtype)
    void = tiles[:, :, count:]
    void[...] = 0
    tiles[:, :, :count] = matmul(at, total.reshape(alpha, -1)).reshape(n, problem.k, count)
    return tiles.reshape(n, problem.k, images, height, across)


def _tiles_nhwc(
    problem: ConvProblem, padded: np.ndarray, filters: np.ndarray, bt: np.ndarray, at: np.ndarray
) -> np.ndarray:
    """Output tiles (n, images, rows of the padded image, tiles of a row, K); the last rows of an image are void."""
    (n, alpha), groups = at.shape, problem.groups
    images, height, width, c = padded.shape
    across = (width - problem.s + 1) // n
    data = np.empty((alpha, images, height, across, c), padded.dtype)
    for a in range(alpha):
        data[a] = padded[:, :, a : a + (across - 1) * n + 1 : n]
    data = matmul(bt, data.reshape(alpha, -1)).reshape(alpha, -1, groups, problem.group_c).swapaxes(1, 2)
    reach = (problem.r - 1) * problem.dilation[0] * across
    count = data.shape[2] - reach
    total = np.empty((alpha, count, groups, problem.group_k), padded.dtype)
    product = np.empty_like(total) if problem.r > 1 else total
    for r in range(problem.r):
        first = r * problem.dilation[0] * across
        into = product if r else total
        matmul(data[:, :, first : first + count], filters[r], out=into.swapaxes(1, 2))
        if r:
            total += product
    tiles = np.empty((n, images * height * across, problem.k), padded.dtype)
    tiles[:, count:] = 0
    tiles[:, :count] = matmul(at, total.reshape(alpha, -1)).reshape(n, count, problem.k)
    return tiles.reshape(n, images, height, across, problem.k)


def _store(problem: ConvProblem, block: Block, tiles: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
    """Interleave the n outputs of the tiles to rows, leaving out what lies beyond the image."""
    n = tiles.shape[0]
    if problem.layout == "NCHW":
        part = y[block.first : block.last, :, block.top : block.bottom]
        for j in range(min(n, problem.q)):
            into = part[..., j::n]
            into[...] = tiles[j, :, :, : block.rows, : into.shape[3]].swapaxes(0, 1)
        finish(problem, part, bias, 1)
    else:
        part = y[block.first : block.last, block.top : block.bottom]
        for j in range(min(n, problem.q)):
            into = part[:, :, j::n]
            into[...] = tiles[j, :, : block.rows, : into.shape[2]]
        finish(problem, part, bias, 3)
