"""1-D Winograd along the row, as in Im2col-Winograd (2024): filters of any height and from 2 columns on."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.im2col import Im2col
from leanconv.cpu.layers import LayerAlgorithm, in_parts, parts, product_cost, shared_limits
from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.kernels.cost import mean_products
from leanconv.kernels.winograd_matrices import Matrices, kernels, matrices, why_no_kernels
from leanconv.problem import ConvProblem

#: Bytes of temporaries of a block.
BUDGET = 8 << 20


class Winograd1d(LayerAlgorithm):
    """Γα(n, S), n = α + 1 − S: a tile of n outputs of a row costs α multiplications for each filter row and channel.

    The sum over filter rows and channels is computed in the Winograd domain, then transformed back once:
    ``y = Aᵀ · sum over c, r of (G w[c, r]) ⊙ (Bᵀ x[c, row + r])``. The input is transformed once for all filter rows:
    the tiles of one state are stored row after row, so the matrix for filter row r begins r rows further on, without a
    copy.

    A row of filters may be cut into blocks of a few columns: a column block is one more filter row to sum over, whose
    pixels begin further right, and which are transformed anew.

    α, and the blocks' width, are the cheapest that the precision allows. The last tile of a row may reach beyond its
    end, into columns that are thrown away: cutting rows into segments of different α, as the paper does, gained nothing
    here on layers of 7 to 56 columns, since products get smaller and each segment is copied and transformed for itself.
    """

    name = "winograd1d"
    paper = "Z. Zhang et al., Im2col-Winograd (ICPP 2024)"
    precision = "fp32"
    call_cost = 1e7

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        reasons = shared_limits(problem, transforms=True)
        reasons += why_no_kernels(problem.s, mean_products(problem), problem.w, problem.precision)
        if problem.stride != (1, 1):
            reasons.append(f"stride {problem.stride[0]},{problem.stride[1]} is not 1,1")
        if problem.dilation[1] != 1:
            reasons.append(f"dilation {problem.dilation[1]} along the row is not 1")
        return reasons

    def compute_cost(self, problem: ConvProblem) -> float:
        return min(_cost(problem, *pair) for pair in _kernels(problem))

    def compute(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        alpha, column_block = min(_kernels(problem), key=lambda pair: _cost(problem, *pair))
        each = ceil_div(alpha, alpha + 1 - column_block) * (2 * problem.c + 3 * problem.k) * item_bytes(problem.dtype)
        return in_parts(problem, x, each, lambda band, seen: convolve(band, alpha, seen, w, bias, column_block), BUDGET)


def _kernels(problem: ConvProblem) -> tuple[tuple[int, int], ...]:
    return kernels(problem.s, mean_products(problem), problem.w, problem.precision)


def _cost(problem: ConvProblem, alpha: int, column_block: int) -> float:
    tiles = problem.n * problem.p * ceil_div(problem.q, alpha + 1 - column_block)
    column_blocks = ceil_div(problem.s, column_block)
    products = 2 * tiles * alpha * problem.k * problem.group_c * problem.r * column_blocks
    idle = product_cost(problem) / max(1, problem.flops) * max(1.0, 16 / max(1, problem.group_c))
    moved = tiles * alpha * (2.5 * problem.c * column_blocks + (problem.r * column_blocks + 1.5) * problem.k)
    filters = alpha * problem.k * problem.group_c * problem.r * column_blocks
    each = 80.0 if problem.layout == "NCHW" else 20 + 480 / problem.c  # short runs of channels copy slowly
    return 1.1 * (products * idle + each * moved) + 400 * filters


def convolve(
    problem: ConvProblem, alpha: int, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, column_block: int = 0
) -> np.ndarray:
    """``problem`` by Γα(α + 1 − S, S), or by Γα(α + 1 − column_block, column_block) of column blocks of the
    filter rows; stride and dilation along the row are 1.
    """
    width = column_block or problem.s
    count = ceil_div(problem.s, width)
    y = np.empty(problem.y_shape, x.dtype)
    transforms = matrices(alpha + 1 - width, width)
    at, _, bt = (m.astype(x.dtype) for m in transforms.arrays())
    columns = ceil_div(problem.q, transforms.n) * transforms.n + count * width - 1
    pixel_bytes = ceil_div(alpha, transforms.n) * (2 * problem.c + 3 * problem.k) * item_bytes(problem.dtype)
    filters = transform_filters(problem, w, transforms)
    for padded, part in parts(problem, x, y, bias, pixel_bytes, BUDGET, columns):
        tiles = _tiles(problem, padded, filters, bt, at)
        # An Inf, a NaN or a huge number would spread from its pixel over the tile: then do without transforms.
        if not np.isfinite(tiles.sum()):
            return Im2col().compute(problem, x, w, bias)
        _store(problem, tiles, part)
    return y


def transform_filters(problem: ConvProblem, w: np.ndarray, transforms: Matrices) -> np.ndarray:
    """``transforms.g`` applied to every column block of every filter row, the last one filled up with zeros, and
    rounded once.

    Shape (blocks, R, α, groups, K/groups, C/groups) for NCHW, (blocks, R, α, groups, C/groups, K/groups) for NHWC.
    """
    _, g, _ = transforms.arrays()
    shape, width = (problem.groups, problem.group_k), transforms.r
    if problem.layout == "NCHW":
        rows = w.reshape(*shape, problem.group_c, problem.r, problem.s).transpose(4, 3, 0, 1, 2)
    else:
        rows = w.reshape(*shape, problem.r, problem.s, problem.group_c).transpose(3, 2, 0, 4, 1)
    count = ceil_div(problem.s, width)
    column_blocks = np.zeros((count * width, *rows.shape[1:]))
    column_blocks[: problem.s] = rows
    transformed: np.ndarray = matmul(g, column_blocks.reshape(count, width, -1)).astype(w.dtype)
    return transformed.reshape(count, transforms.alpha, *rows.shape[1:]).swapaxes(1, 2)


def _tiles(problem: ConvProblem, padded: np.ndarray, filters: np.ndarray, bt: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Output tiles (n, K, images, rows of the padded image, tiles of a row) for NCHW, with K last for NHWC; the last
    rows of an image are void."""
    nchw, (n, alpha), column_blocks = problem.layout == "NCHW", at.shape, len(filters)
    images, height, width = padded.shape[1:] if nchw else padded.shape[:3]
    column_block = alpha + 1 - n
    across = (width + 1 - column_blocks * column_block) // n
    # All images of the block are one tall image: R − 1 void rows at each seam are cheaper than small products.
    dilated, extents = problem.dilation[0] * across, (images, height, across)
    every = images * height * across
    count = every - (problem.r - 1) * dilated
    groups, group_c, group_k = problem.groups, problem.group_c, problem.group_k
    data = np.empty((alpha, problem.c, *extents) if nchw else (alpha, *extents, problem.c), padded.dtype)
    total = np.empty((alpha, groups, group_k, count) if nchw else (alpha, count, groups, group_k), padded.dtype)
    product = np.empty_like(total) if problem.r * column_blocks > 1 else total
    for j in range(column_blocks):
        for a in range(alpha):
            first = j * column_block + a
            columns = slice(first, first + (across - 1) * n + 1, n)
            data[a] = padded[..., columns] if nchw else padded[:, :, columns]
        states = matmul(bt, data.reshape(alpha, -1))
        shape = (alpha, groups, group_c, -1) if nchw else (alpha, -1, groups, group_c)
        states = states.reshape(shape) if nchw else states.reshape(shape).swapaxes(1, 2)
        for r in range(problem.r):
            into, rows = product if j or r else total, slice(r * dilated, r * dilated + count)
            if nchw:
                matmul(filters[j, r], states[..., rows], out=into)
            else:
                matmul(states[:, :, rows], filters[j, r], out=into.swapaxes(1, 2))
            if j or r:
                total += product
    tiles = np.empty((n, problem.k, every) if nchw else (n, every, problem.k), padded.dtype)
    made, void = (tiles[:, :, :count], tiles[:, :, count:]) if nchw else (tiles[:, :count], tiles[:, count:])
    void[...] = 0
    made[...] = matmul(at, total.reshape(alpha, -1)).reshape(made.shape)
    return tiles.reshape((n, problem.k, *extents) if nchw else (n, *extents, problem.k))


def _store(problem: ConvProblem, tiles: np.ndarray, part: np.ndarray) -> None:
    """Interleave the n outputs of the tiles to rows, leaving out what lies beyond the image."""
    n = tiles.shape[0]
    for j in range(min(n, problem.q)):
        if problem.layout == "NCHW":
            into = part[..., j::n]
            into[...] = tiles[j, :, :, : into.shape[2], : into.shape[3]].swapaxes(0, 1)
        else:
            into = part[:, :, j::n]
            into[...] = tiles[j, :, : into.shape[1], : into.shape[2]]
