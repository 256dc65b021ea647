"""Depthwise layers on the CPU: all taps of a filter at once over runs of neighbouring pixels and channels.

With channels innermost a row of outputs is one run of Q·C numbers, and so are the pixels that a tap reads. With the
filters repeated along that run, the whole layer is sums of products of such runs: ``np.einsum`` keeps a run of the
output in the first-level cache while all taps pass over it, at 0.2 to 0.3 ns for a tap of an output (float32, one core
of an EPYC), where a multiplication and an addition for each tap took 0.4 to 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from leanconv.cpu.blocks import PaddedInput, blocks, finish
from leanconv.dtypes import item_bytes
from leanconv.problem import ConvProblem

#: Bytes that the repeated filters may take: of longer rows fewer columns are computed at once. (256 KiB are up to 1.3
#: times as slow for 7x7 filters, 4 MiB no quicker.)
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
