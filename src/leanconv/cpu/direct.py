"""Direct convolution: every filter tap adds its share to the output in place, with no matrix of columns at all.

Where there is machine code for a layer (`channels`, `dense_code`), it runs. Otherwise depthwise layers take all taps
of a filter at once over runs of neighbouring pixels and channels. With channels innermost a row of outputs is one run
of Q·C numbers, and so are the pixels that a tap reads. With the filters repeated along that run, the whole layer is
sums of products of such runs: ``np.einsum`` keeps a run of the output in the first-level cache while all taps pass
over it. Explored (one core of an EPYC, e98bc9a): 0.2 to 0.3 ns for a tap of an output in float32, where a
multiplication and an addition for each tap took 0.4 to 1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import numpy as np

from leanconv.cpu import channels, dense_code
from leanconv.cpu.blas import matmul
from leanconv.cpu.layers import (
    LEAST_COST,
    LayerAlgorithm,
    PaddedInput,
    blocks,
    finish,
    is_in_one_part,
    is_transposed,
    parts,
    product_cost,
    shared_limits,
    windows,
)
from leanconv.dtypes import is_integer, item_bytes
from leanconv.kernels.contract import ceil_div
from leanconv.problem import ConvProblem


class Direct(LayerAlgorithm):
    """By machine code; or one small product per filter tap and block, summed in place: the leanest of the CPU engine.

    Where a filter reads one channel (depthwise) products are elementwise, and `depthwise` takes all taps at once.
    """

    name = "direct"
    paper = "the definition of convolution"
    precision = "ieee"
    call_cost = 0.15e6
    budget = 1 << 20

    def why_not(self, problem: ConvProblem, target: None = None) -> list[str]:
        return shared_limits(problem)

    def compute_cost(self, problem: ConvProblem) -> float:
        pixels, taps = problem.n * problem.p * problem.q, problem.r * problem.s
        if lanes := dense_code.lanes_for(problem):
            return dense_code.cost(problem, lanes)
        if problem.group_c == 1 and (lanes := channels.lanes_for(problem)):
            computed = pixels * ceil_div(problem.k, lanes) * lanes
            each = 2.5 if problem.s <= channels.QUICK_TAPS else 25.0
            return 2e6 + pixels * problem.k * (45.0 if problem.layout == "NCHW" else 10.0) + computed * each * taps
        if problem.group_c == 1:
            # to transpose images and results takes as long as some 15 taps, to split the columns by phases as 4
            around = (300 if problem.layout == "NCHW" else 60) + (60 if problem.stride[1] > 1 else 0)
            return 3e6 + pixels * problem.k * (around + 17.0 * taps)
        return 3e6 + product_cost(problem) + pixels * taps * (50 * problem.c + 75 * problem.k)

    def pixel_bytes(self, problem: ConvProblem) -> int:
        by_code = problem.group_c == 1 or dense_code.lanes_for(problem)
        return 0 if by_code else (problem.c + 2 * problem.k) * item_bytes(problem.dtype)

    def ready(self, problem: ConvProblem) -> Callable[..., np.ndarray]:
        """By machine code a small layer takes less time than what `run` finds out about it."""
        fractions = item_bytes(problem.dtype) in (4, 8) and not is_integer(problem.dtype)
        usual = fractions and problem.op == "fprop" and not (problem.is_empty or is_transposed(problem))
        if not usual or not is_in_one_part(problem) or self.cost(problem) >= LEAST_COST:
            return super().ready(problem)
        lanes = dense_code.lanes_for(problem)
        if lanes and problem.layout == "NHWC" and (made := dense_code.Small(problem, lanes)).is_ready:
            return made.compute
        compute = dense_code.compute if lanes else channels.compute
        shape, plain = problem.y_shape, partial(self.run, problem)

        def small(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, *numbers: float) -> np.ndarray:
            y = np.empty(shape, x.dtype)
            # NOTE: as a decorator it is one for all threads, and before NumPy 2 keeps what the last one had set
            with np.errstate(invalid="ignore", over="ignore"):
                done = compute(problem, x, w, bias, y)
            return y if done else plain(x, w, bias)

        return small

    def fill(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
        if dense_code.compute(problem, x, w, bias, y):
            return
        if problem.group_c == 1:
            if not channels.compute(problem, x, w, bias, y):
                depthwise(problem, x, w, bias, y)
            return
        groups, group_c, group_k = problem.groups, problem.group_c, problem.group_k
        first = problem.layout == "NCHW"
        # filters[r, s]: (groups, K/groups, C/groups) for NCHW, (groups, C/groups, K/groups) for NHWC
        filters = (w if first else w.transpose(0, 3, 1, 2)).reshape(groups, group_k, group_c, problem.r, problem.s)
        filters = np.ascontiguousarray(filters.transpose(3, 4, 0, 1, 2) if first else filters.transpose(3, 4, 0, 2, 1))
        for padded, part in parts(problem, x, y, bias, self.pixel_bytes(problem), self.budget):
            view = windows(problem, padded)
            outer = view.shape[3:] if first else view.shape[:3]
            total = np.zeros((groups, group_k, *outer) if first else (*outer, groups, group_k), x.dtype)
            product = np.empty_like(total)
            for r in range(problem.r):
                for s in range(problem.s):
                    if first:
                        seen = view[:, r, s].reshape(groups, group_c, -1)
                        matmul(filters[r, s], seen, out=product.reshape(groups, group_k, -1))
                    else:
                        seen = view[:, :, :, r, s].reshape(-1, groups, group_c).swapaxes(0, 1)
                        matmul(seen, filters[r, s], out=product.reshape(-1, groups, group_k).swapaxes(0, 1))
                    total += product
            part[...] = total.reshape(problem.k, *outer).swapaxes(0, 1) if first else total.reshape(*outer, problem.k)


#: Bytes that the repeated filters may take: of longer rows fewer columns are computed at once.
#: Explored (EPYC, e98bc9a): 256 KiB are up to 1.3 times as slow for 7x7 filters, 4 MiB no quicker.
FILTER_BYTES = 1 << 20
#: The least numbers of a run: shorter ones cost more than they save.
LEAST_RUN = 512


@dataclass(frozen=True)
class _Taps:
    """Columns of a filter that read pixels of one phase of the stride: ``first``, and every ``step`` further one.

    The first reads the phase's pixel ``at``, each further one ``apart`` pixels more.
    """

    phase: int
    first: int
    step: int
    count: int
    at: int
    apart: int


def _phases(problem: ConvProblem) -> Iterator[_Taps]:
    stride, dilation = problem.stride[1], problem.dilation[1]
    step = stride // gcd(stride, dilation)
    for first in range(min(step, problem.s)):
        at, phase = divmod(first * dilation, stride)
        count = (problem.s - first - 1) // step + 1
        yield _Taps(phase, first, step, count, at, step * dilation // stride)


def depthwise(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, y: np.ndarray) -> None:
    """A layer of one channel a group, in NCHW or NHWC.

    Images of NCHW are transposed to NHWC as they are padded, and the results when they are stored. Where a channel has
    several filters it is repeated.
    """
    nchw, many = problem.layout == "NCHW", problem.group_k
    # (R, S, K)
    filters = w.reshape(problem.k, problem.r, problem.s).transpose(1, 2, 0)
    inside = replace(problem, layout="NHWC")
    source = x.transpose(0, 2, 3, 1) if nchw else x
    padded = PaddedInput(inside, source)
    columns = max(1, min(problem.q, max(FILTER_BYTES // (filters.size * w.itemsize), LEAST_RUN // problem.k)))
    repeated = np.tile(filters, (1, 1, columns))
    pixel_bytes = 3 * problem.k * item_bytes(problem.dtype)
    for block in blocks(problem, pixel_bytes):
        pixels = padded.load(block)
        pixels = np.repeat(pixels, many, axis=3) if many > 1 else pixels
        shape = (block.images, block.rows, problem.q, problem.k)
        part = block.of(problem, y)
        sums = np.empty(shape, x.dtype) if nchw else part
        _accumulate(inside, pixels, repeated, sums)
        if nchw:
            part[...] = sums.transpose(0, 3, 1, 2)
        finish(problem, part, bias)


def _accumulate(problem: ConvProblem, pixels: np.ndarray, filters: np.ndarray, sums: np.ndarray) -> None:
    """``sums`` (images, rows, Q, K) of the padded ``pixels`` (images, rows, columns, K), and of ``filters`` (R, S, run)
    that are repeated along a run of columns."""
    k = problem.k
    for number, taps in enumerate(_phases(problem)):
        seen = pixels
        if problem.stride[1] > 1:
            seen = np.ascontiguousarray(pixels[:, :, taps.phase :: problem.stride[1]])
        w = filters[:, taps.first :: taps.step]
        at = seen.strides
        for first in range(0, problem.q, filters.shape[2] // k):
            last = min(problem.q, first + filters.shape[2] // k)
            run = (last - first) * k
            # what each tap reads: (R, taps of a row, images, rows, run)
            view = np.lib.stride_tricks.as_strided(
                seen[:, :, first + taps.at :],
                (problem.r, taps.count, *sums.shape[:2], run),
                (problem.dilation[0] * at[1], taps.apart * at[2], at[0], problem.stride[0] * at[1], at[3]),
                writeable=False,
            )
            into = sums[:, :, first:last].reshape(*sums.shape[:2], run)
            if number == 0:
                np.einsum("rtnij,rtj->nij", view, w[:, :, :run], out=into)
            else:
                into += np.einsum("rtnij,rtj->nij", view, w[:, :, :run])
