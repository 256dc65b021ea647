"""What the GPU's kernels compute, rounding for rounding, in NumPy: `tests/cpu/test_precision.py` compares every bit
of it with the kernels on the emulator. It is slow, and made to measure errors where there is no GPU.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from leanconv.kernels.contract import ceil_div
from leanconv.kernels.simt.winograd_tiles import Transform
from leanconv.problem import ConvProblem


def fma(a: np.ndarray | np.floating, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` rounded once to float32: a float64 holds the product exactly."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def direct(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """One sum of fused multiply-adds for each output, in the order c, r, s: `direct`, `im2win_basic`, and the tiled
    kernels where they do not split the reduction. Forward layers in NCHW without groups and bias.
    """
    (sh, sw), (dh, dw) = problem.stride, problem.dilation
    padded = _padded(problem, x, 0, 0)
    y = np.zeros((problem.n, problem.k, problem.p, problem.q), np.float32)
    for c in range(problem.c):
        for r in range(problem.r):
            for s in range(problem.s):
                seen = padded[:, c, r * dh :: sh, s * dw :: sw][:, None, : problem.p, : problem.q]
                y = fma(w[:, c, r, s].reshape(-1, 1, 1), seen, y)
    return y


def winograd(
    problem: ConvProblem, transform: Transform, channels: int, promoted: bool, x: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """A layer by `winograd1d` or `winograd2d` with the tiles of ``transform``, ``channels`` multiplied in a step.

    Forward layers in NCHW without groups, dilation and bias. Sums run over row blocks, the column blocks of a row,
    steps of channels, filter rows, channels; if ``promoted``, those of a step's channels and its filter rows are added
    to long ones.
    """
    matrices, (out_h, out_w), (tile_h, tile_w) = transform.matrices, transform.out, transform.tile
    at, g, bt = matrices.arrays(np.float32)
    down, across = ceil_div(problem.p, out_h), ceil_div(problem.q, out_w)
    filled = transform.column_blocks * matrices.r - problem.s  # columns of zeros of the last block
    padded = _padded(problem, x, down * out_h - problem.p, across * out_w - problem.q + filled)
    weights = np.moveaxis(np.pad(w, ((0, 0), (0, 0), (0, 0), (0, filled))), (2, 3), (0, 1))  # [r][s][k][c]
    rows = range(0, padded.shape[2] - tile_h + 1, out_h)
    made = []  # for each block [state][image][channel][row of tiles][tile], [state][filter row][k][c]
    for right in range(0, transform.column_blocks * matrices.r, matrices.r):
        seen, taps = padded[..., right:], weights[:, right : right + matrices.r]
        pixels = np.stack(
            [
                np.stack([seen[:, :, i : rows[-1] + i + 1 : out_h, j::out_w][..., :across] for j in range(tile_w)])
                for i in range(tile_h)
            ]
        )  # [row of the tile][column][image][channel][row of tiles][tile]
        if transform.square:
            states, filters = both_sides(bt, pixels), both_sides(g, taps)[:, :, None]
        else:
            states, filters = row_pairs(bt, pixels[0])[None], row_pairs(g, np.moveaxis(taps, 1, 0))[None]
        states = states.reshape(-1, *states.shape[2:])
        made.append((states, filters.reshape(len(states), -1, problem.k, problem.c)))
    total = np.zeros((tile_h * tile_w, problem.k, problem.n, down, across), np.float32)
    short = np.zeros_like(total)
    for first_r, (states, filters) in product(range(0, transform.taps * transform.row_blocks, transform.taps), made):
        for first_c in range(0, problem.c, channels):
            for r in range(first_r, min(filters.shape[1], first_r + transform.taps)):
                for c in range(first_c, min(problem.c, first_c + channels)):
                    tiles = states[:, None, :, c, r : r + down]
                    short = fma(filters[:, r, :, c, None, None, None], tiles, short)
            if promoted:
                longer = total + short
                short -= longer - total
                total = longer
    total += short
    total = total.reshape(tile_h, tile_w, *total.shape[1:])
    outputs = both_sides(at, total) if transform.square else column_pairs(at, total[0])[None]
    y = np.empty((problem.n, problem.k, down * out_h, across * out_w), np.float32)
    for i in range(out_h):
        for j in range(out_w):
            y[:, :, i::out_h, j::out_w] = outputs[i, j].swapaxes(0, 1)
    return y[:, :, : problem.p, : problem.q]


def row_pairs(matrix: np.ndarray, data: np.ndarray) -> np.ndarray:
    """``matrix @ data`` over the first axis, as ``multiply_row_pairs`` of kernels/simt/winograd_transform.cuh does it:
    both rows of a pair of points take the same two sums.
    """
    found = [_row(matrix[0], data, range(len(data)))]
    for i in range(1, len(matrix) - 1, 2):
        even, odd = (_row(matrix[i], data, range(first, len(data), 2)) for first in (0, 1))
        mirrored = (matrix[i + 1, ::2] == matrix[i, ::2]).all() and (matrix[i + 1, 1::2] == -matrix[i, 1::2]).all()
        found += [even + odd, even - odd if mirrored else odd - even]
    return np.stack([*found, _row(matrix[-1], data, range(len(data)))])


def _row(row: np.ndarray, data: np.ndarray, columns: range) -> np.ndarray:
    """The sum over some columns, which begins at a coefficient of one where there is any."""
    used = [j for j in columns if row[j]]
    if not used:
        return np.zeros_like(data[0])
    start = next((j for j in used if row[j] == 1), used[0])
    total: np.ndarray = row[start] * data[start]
    for j in used:
        if j != start:
            total = fma(row[j], data[j], total)
    return total


def column_pairs(matrix: np.ndarray, data: np.ndarray) -> np.ndarray:
    """``matrix @ data`` over the first axis, as ``multiply_column_pairs`` of the kernels does it: rows take the sums
    and the differences of the states of a pair of points in turns.
    """
    plus, minus = data[1:-1:2] + data[2:-1:2], data[1:-1:2] - data[2:-1:2]
    found = []
    for i, row in enumerate(matrix):
        halves = minus if i % 2 else plus
        total = row[1] * halves[0]
        for j in range(1, len(halves)):
            total = fma(row[1 + 2 * j], halves[j], total)
        for j in (0, -1):
            if row[j]:
                total = fma(row[j], data[j], total)
        found.append(total)
    return np.stack(found)


def both_sides(matrix: np.ndarray, data: np.ndarray) -> np.ndarray:
    """``matrix @ data @ matrixᵀ`` over the first two axes, columns first."""
    multiply = row_pairs if _in_row_pairs(matrix) else column_pairs
    half = multiply(matrix, data)
    return multiply(matrix, half.swapaxes(0, 1)).swapaxes(0, 1)


def _in_row_pairs(matrix: np.ndarray) -> bool:
    pairs = zip(matrix[1:-1:2], matrix[2:-1:2], strict=False)
    return len(matrix) % 2 == 0 and all((abs(one) == abs(other)).all() for one, other in pairs)


def _padded(problem: ConvProblem, x: np.ndarray, below: int, right: int) -> np.ndarray:
    top, bottom, left, beside = problem.padding
    return np.pad(x, ((0, 0), (0, 0), (top, bottom + below), (left, beside + right)))
