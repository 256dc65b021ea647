"""im2win (Lu et al. 2023): store the input in window order, so that each window is one contiguous run."""

from __future__ import annotations

import numpy as np

from leanconv.cpu.blas import matmul
from leanconv.cpu.layers import LayerAlgorithm, parts, product_cost, shared_limits
from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem


def im2win(x: np.ndarray, r: int, p: int, stride: int = 1, dilation: int = 1) -> np.ndarray:
    """The paper's tensor Î of a padded image x of shape (N, C, H, W): shape (N, C, P, W·R).

    ``Î[n, c, i, j·R + u] = x[n, c, i·stride + u·dilation, j]``: for each of ``p`` output rows the ``r`` input rows it
    reads, column by column. Filters S wide find window j in the S·R elements from ``j·stride_w·R`` on. It takes about
    R/stride times the input, where im2col takes R·S/stride².
    """
    n, c, _, width = x.shape
    out = np.empty((n, c, p, width, r), x.dtype)
    for u in range(r):
        first = u * dilation
        out[..., u] = x[:, :, first : first + (p - 1) * stride + 1 : stride]
    return out.reshape(n, c, p, width * r)


def im2win_channels_last(x: np.ndarray, r: int, p: int, stride: int = 1, dilation: int = 1) -> np.ndarray:
    """The same for a padded image of shape (N, H, W, C): shape (N, P, W·R·C), with the channels innermost."""
    n, _, width, c = x.shape
    out = np.empty((n, p, width, r, c), x.dtype)
    for u in range(r):
        first = u * dilation
        out[:, :, :, u] = x[:, first : first + (p - 1) * stride + 1 : stride]
    return out.reshape(n, p, width * r * c)


class Im2win(LayerAlgorithm):
    """Matrix products on the im2win tensor of one cache-sized block at a time.

    In NHWC without groups the windows are never copied: S·R·C neighbours in memory are a row of the matrix. In NCHW a
    window is C runs of S·R elements, which are gathered for BLAS.
    """

    name = "im2win"
    paper = "S. Lu et al., Im2win: An Efficient Convolution Paradigm on GPU (2023)"
    precision = "ieee"
    call_cost = 2e6

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        reasons = shared_limits(problem)
        if problem.dilation[1] != 1 and problem.s > 1:
            reasons.append(f"dilation {problem.dilation[1]} along the row breaks a window into pieces")
        return reasons

    def compute_cost(self, problem: ConvProblem) -> float:
        pixels = problem.n * problem.p * problem.q
        if problem.layout == "NHWC" and problem.groups == 1:
            # Short runs of channels copy slowly. Windows that reach over the end of a row are multiplied, too.
            copied = pixels * problem.r * problem.stride[1] * (problem.c + 12)
            period = ceil_div(problem.s, problem.stride[1])
            computed = ceil_div(problem.q - 1 + period, period) * period / problem.q
            # BLAS copies the filters for each of the products that overlapping windows are dealt to.
            filters = min(period, problem.q) * problem.k * problem.c * problem.r * problem.s
            return product_cost(problem) * 1.45 * computed + 160 * copied + 40 * filters
        filters = 80 * problem.r * problem.k * problem.group_c * problem.r * problem.s
        return product_cost(problem) + 160 * pixels * problem.c * problem.r * (problem.stride[1] + problem.s) + filters

    def pixel_bytes(self, problem: ConvProblem) -> int:
        if problem.layout == "NCHW":
            return problem.c * problem.r * (problem.s + problem.stride[1]) * item_bytes(problem.dtype)
        return (problem.c * problem.r * problem.stride[1] + problem.k) * item_bytes(problem.dtype)

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        run = _run_nchw if problem.layout == "NCHW" else _run_nhwc
        run(problem, x, w, bias, y, self.pixel_bytes(problem))


def _run_nchw(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray, pixel_bytes: int
) -> None:
    r, s, step = problem.r, problem.s, problem.stride[1]
    # The window's order is column by column, so is the filter's.
    filters = w.reshape(problem.groups, problem.group_k, problem.group_c, r, s).swapaxes(-1, -2)
    filters = filters.reshape(problem.groups, problem.group_k, -1)
    for padded, part in parts(problem, x, y, bias, pixel_bytes):
        win = im2win(padded.swapaxes(0, 1), r, part.shape[2], problem.stride[0], problem.dilation[0])
        n, c, p, _ = win.shape
        # Element e of window j lies at j·step·R + e.
        at = win.strides
        runs = np.lib.stride_tricks.as_strided(
            win, (c, s * r, n, p, problem.q), (at[1], at[3], at[0], at[2], step * r * at[3]), writeable=False
        )
        product = matmul(filters, runs.reshape(problem.groups, problem.group_c * s * r, -1))
        part[...] = product.reshape(problem.k, n, p, problem.q).swapaxes(0, 1)


def _run_nhwc(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray, pixel_bytes: int
) -> None:
    r, s, c, q, step = problem.r, problem.s, problem.c, problem.q, problem.stride[1]
    groups, group_c, group_k = problem.groups, problem.group_c, problem.group_k
    # (groups, S·R·C/groups, K/groups): the window's order.
    filters = w.reshape(groups, group_k, r, s, group_c).transpose(0, 3, 2, 4, 1).reshape(groups, -1, group_k)
    # BLAS takes no rows that overlap: windows so many steps apart are disjoint, and go into one product together.
    apart = ceil_div(s, step)
    period = apart * step
    width = ceil_div((q - 1) * step + s, period) * period
    for padded, part in parts(problem, x, y, bias, pixel_bytes, width=width):
        images, rows = part.shape[:2]
        win = im2win_channels_last(padded, r, rows, problem.stride[0], problem.dilation[0]).ravel()
        lines = images * rows * (width // period)
        product = np.empty((lines, groups, group_k), x.dtype)
        for phase in range(min(apart, q)):
            # The rows of the image follow each other without a seam; windows that reach over a row's end are void.
            begin = phase * step * r * c
            count = (win.size - begin - s * r * c) // (period * r * c) + 1
            runs = np.lib.stride_tricks.as_strided(
                win[begin:],
                (groups, count, s * r, group_c),
                (group_c * win.itemsize, period * r * c * win.itemsize, c * win.itemsize, win.itemsize),
                writeable=False,
            )
            matrix = runs.reshape(groups, count, s * r * group_c)
            matmul(matrix, filters, out=product[:count].swapaxes(0, 1))
            into = part[:, :, phase::apart]
            into[...] = product.reshape(images, rows, -1, problem.k)[:, :, : into.shape[2]]
