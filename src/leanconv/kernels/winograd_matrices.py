"""The matrices of 1-D Winograd (Cook-Toom) correlation, in exact fractions, for any tile and filter width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from leanconv.problem import ConvProblem

#: Interpolation points in the order they are taken; infinity comes on top of them. A prefix gives the points of 4
#: states (0, ±1), of 8 (and ±2, ±1/2) and of 16: there these have the least error of those measured by
#: ``research/points.py``. They are binary fractions, and float32 holds all of ``at`` and ``bt`` exactly, where those
#: of the paper, with ±3 and ±1/3 for ±3/4 and ±5/4, err several times as much.
POINTS = tuple(
    Fraction(numerator, denominator)
    for numerator, denominator in (
        (0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2), (4, 1), (-4, 1), (1, 4), (-1, 4),
        (3, 4), (-3, 4), (5, 4), (-5, 4),
    )
)  # fmt: skip

Rows = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Matrices:
    """The three matrices of F(n, r): ``y = at @ ((g @ filter) * (bt @ data))``, exact, as rows of fractions.

    ``at`` is n × α, ``g`` is α × r and ``bt`` is α × α with α = n + r − 1 states.
    """

    n: int
    r: int
    at: Rows
    g: Rows
    bt: Rows

    @property
    def alpha(self) -> int:
        """Number of states, which is the number of multiplications for n outputs."""
        return self.n + self.r - 1

    @property
    def paired(self) -> bool:
        """Whether states 2k + 1 and 2k + 2 differ by the sign of their odd terms only, for every k.

        Then ``v[2k + 1] = e + o`` and ``v[2k + 2] = e − o``, where e sums the terms with even index of state 2k + 1
        and o those with odd index: half the multiplications. It holds for rows of ``bt`` and ``g`` and columns of
        ``at``, exactly, whenever the points are 0, p, −p, q, −q, … in this order.
        """
        columns = tuple(zip(*self.at, strict=True))
        return all(
            other == tuple(-v if i % 2 else v for i, v in enumerate(first))
            for rows in (columns, self.g, self.bt)
            for first, other in zip(rows[1:-1:2], rows[2:-1:2], strict=True)
        )

    def arrays(self, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``at``, ``g`` and ``bt`` as NumPy arrays, each number rounded once to ``dtype``."""
        at, g, bt = (np.array([[float(v) for v in row] for row in m], dtype) for m in (self.at, self.g, self.bt))
        return at, g, bt

    @cached_property
    def worst_growth(self) -> float:
        """How much roundings grow at most, whatever the data: ‖computed − y‖ ≤ roundings · u · growth · ‖|w| ∗ |x|‖.

        ``|y error| ≤ |at| (|g| |filter|) ⊙ (|bt| |data|)``: product (k, d) of a weight and a pixel of the tile counts
        ``m[i, k, d]`` towards output i. It is part of ``|w| ∗ |x|`` at place d − k, where windows beyond the row's ends
        are places too. So the errors are at most a block Toeplitz matrix times ``|w| ∗ |x|``, whose norm, as nothing in
        it is negative, is that of the sum of its blocks. In two directions the square of it.
        """
        m = np.einsum("ij,jk,jd->ikd", *(abs(matrix) for matrix in self.arrays()))
        blocks = np.zeros((self.n, self.n))
        for place in range(1 - self.r, self.alpha):
            of_place = [m[:, k, place + k] for k in range(self.r) if 0 <= place + k < self.alpha]
            blocks[:, place % self.n] += np.max(of_place, axis=0)
        return float(np.linalg.norm(blocks, 2))

    @cached_property
    def lone_growth(self) -> float:
        """How much roundings grow that are independent of each other, from the worst lone pixel and weight.

        The root of the sum, over all outputs of the tiles that hold the pixel, of ``sum over j of
        (at[i][j] · g[j][k] · bt[j][d])²``, for the worst weight k and place of the pixel; 1 for plain sums. In two
        directions the square of it.
        """
        squares = np.einsum("ij,jk,jd->kd", *(matrix**2 for matrix in self.arrays()))
        tiles = [squares[:, first :: self.n].sum(1) for first in range(min(self.n, self.alpha))]
        return float(np.sqrt(np.max(tiles)))


def matrices(n: int, r: int, points: Sequence[Fraction | int] | None = None) -> Matrices:
    """The matrices of F(n, r): n neighbouring outputs of an r-tap correlation from n + r − 1 multiplications.

    ``y[i] = sum over k of filter[k] * data[i + k]``, i < n, equals ``at @ ((g @ filter) * (bt @ data))``. With the
    points p[j], j < α − 1 = n + r − 2, and the polynomial f(x) = product over j of (x − p[j])::

        at[i][j] = p[j]^i            g[j][k] = p[j]^k / f'(p[j])    bt[j][d] = coefficient of x^d in f(x) / (x − p[j])
        at[i][α−1] = [i = n − 1]     g[α−1][k] = [k = r − 1]        bt[α−1][d] = coefficient of x^d in f(x)

    Args:
        n: outputs of a tile, at least 1.
        r: taps of the filter, at least 1.
        points: n + r − 2 distinct finite interpolation points; infinity is always the last one.
            The default is the beginning of ``POINTS``.

    Raises:
        ValueError: for sizes below 1, and for points that are too few, too many or not distinct.

    After the Cook-Toom construction, as in Lavin and Gray (2016) and "Im2col-Winograd" (2024).

    >>> [[int(v) for v in row] for row in matrices(2, 3).at]
    [[1, 1, 1, 0], [0, 1, -1, 1]]
    """
    return _matrices(n, r, None if points is None else tuple(points))


#: Filter widths that Γα(α + 1 − width, width) serves, for each number of states α: the eleven kernels of the paper.
WIDTHS = {4: range(2, 4), 8: range(2, 8), 16: range(7, 10)}


#: Fewest products of an output that 8 states may serve at "fp32", as the transforms round as often for short sums.
#: Explored (756f0a2), in errors of a plain sequential float32 sum, n = 7 to 2: on zero-mean data,
#: where the level allows four times, 3.4 to 2.8 at 96 products and less beyond if sums begin anew every 32 steps, 4.1
#: to 3.1 at 64, 6 at 10; on pixels of which a ReLU leaves 10 %, where it allows eight, at most 7.0 from 128 on, for
#: n = 6 to 2 on 40,000 random layers (CPU engine 7.6, n = 7 too), and 8.1 at 96. 4 states stay within 1.5 times from
#: one channel on.
LEAST_PRODUCTS = 128

#: Number of states and width of the column blocks of filter rows of LEAST_IN_BLOCKS columns and more, and the fewest
#: pixels of a row that level "fp32" lets them serve. Explored (as above, 128 products): on rows of as many pixels and
#: more at most 3.4, 3.6 and 3.5 times the sequential sum's error on zero-mean data, 6.5, 6.3 and 7.0 after a ReLU;
#: blocks of 3 on rows of 8 pixels 4.4.
COLUMN_BLOCKS = {(8, 3): 16, (8, 4): 8, (8, 5): 8}
#: Narrower rows take fewer products whole: 5 by (4,5) 2 for an output, in two blocks of 3 by (6,3) 2.67.
LEAST_IN_BLOCKS = 6


def states(width: int, products: int, row: int, precision: str) -> tuple[int, ...]:
    """The numbers of states α, largest first, whose kernels Γα(α + 1 − width, width) keep the level ``precision``.

    ``products`` is the number of products that an output sums on average, ``row`` the number of pixels in a row of the
    input. 16 states are for "relaxed" and "tf32"; in "ieee" there are no transforms. Rows at most half as wide as the
    filter leave most of a tile to padding: the outputs are small and the roundings are not. Explored (5c107f1): 4 to 5
    times the sequential sum's for 8 states.

    >>> states(3, 576, 56, "fp32"), states(7, 3136, 56, "relaxed"), states(3, 27, 56, "fp32")
    ((8, 4), (16, 8), (4,))
    """
    if precision == "ieee":
        return ()
    strict = precision == "fp32"
    serves = {16: not strict, 8: not strict or (products >= LEAST_PRODUCTS and 2 * row > width), 4: True}
    return tuple(alpha for alpha, fits in serves.items() if fits and width in WIDTHS[alpha])


def kernels(width: int, products: int, row: int, precision: str) -> tuple[tuple[int, int], ...]:
    """Pairs of a number of states and a width of column blocks that serve filters ``width`` wide, as `states` has it.

    The whole row comes first where `states` serves it. A row of any width is a sum of blocks of ``block`` columns, each
    one more filter row whose pixels begin further right, so ``y[q] = sum over j, s of w[j·block + s] x[q + j·block +
    s]``; the last one is filled up with zeros. All blocks are summed before the transform back, so errors are those
    of Γα(α + 1 − block, block).

    >>> kernels(3, 576, 56, "fp32"), kernels(9, 5184, 56, "fp32")
    (((8, 3), (4, 3)), ((8, 3), (8, 4), (8, 5)))
    """
    whole = tuple((alpha, width) for alpha in states(width, products, row, precision))
    if width < LEAST_IN_BLOCKS or precision == "ieee":
        return whole
    strict = precision == "fp32"
    return whole + tuple(
        pair for pair, least in COLUMN_BLOCKS.items() if not strict or (products >= LEAST_PRODUCTS and row >= least)
    )


def why_no_kernels(width: int, products: int, row: int, precision: str) -> list[str]:
    """Sentences that say why `kernels` finds none; empty where it finds some."""
    if precision == "ieee" or kernels(width, products, row, precision):
        return []
    narrowest = min(min(widths) for widths in WIDTHS.values())
    if width < narrowest:
        return [f"filters are {width} wide, and the transforms serve widths from {narrowest} on"]
    if products < LEAST_PRODUCTS:
        return [f"an output sums {products} products on average; precision 'fp32' is kept from {LEAST_PRODUCTS} on"]
    if width >= LEAST_IN_BLOCKS:
        least = min(COLUMN_BLOCKS.values())
        kept = f"precision 'fp32' is kept by their column blocks from {least} on"
        return [f"filters are {width} wide and rows of {row} pixels; {kept}"]
    return [f"rows of {row} pixels are at most half as wide as the filters; wider rows keep precision 'fp32'"]


def transforms(width: int, height: int, precision: str) -> list[tuple[Matrices, bool]]:
    """Every transform that may serve filters of ``height`` × ``width`` at ``precision``, and whether along both
    directions.

    >>> [(t.n, t.r, square) for t, square in transforms(3, 3, "fp32")]
    [(6, 3, False), (2, 3, False), (2, 3, True)]
    """
    along_rows = [
        (matrices(alpha + 1 - block, block), False)
        for alpha, block in kernels(width, LEAST_PRODUCTS, max(width, *COLUMN_BLOCKS.values()), precision)
    ]
    square = outputs_2d(precision) if (height, width) == (3, 3) else ()
    return along_rows + [(matrices(m, 3), True) for m in square]


def outputs_2d(precision: str) -> tuple[int, ...]:
    """The m, largest first, whose F(m × m, 3 × 3) keeps the level ``precision``.

    >>> outputs_2d("fp32"), outputs_2d("relaxed")
    ((2,), (4, 2))
    """
    return {"ieee": (), "fp32": (2,)}.get(precision, (4, 2))


def why_not_2d(problem: ConvProblem) -> list[str]:
    """Sentences that say why F(m × m, 3 × 3) cannot compute ``problem``; empty where it can."""
    reasons = []
    if (problem.r, problem.s) != (3, 3):
        reasons.append(f"filters are {problem.r}x{problem.s}, not 3x3")
    if problem.stride != (1, 1):
        reasons.append(f"stride {problem.stride[0]},{problem.stride[1]} is not 1,1")
    if problem.dilation != (1, 1):
        reasons.append(f"dilation {problem.dilation[0]},{problem.dilation[1]} is not 1,1")
    return reasons


@dataclass(frozen=True)
class Segment:
    """Columns ``first`` to ``first + n·tiles`` (excluded) of an output row, computed by Γalpha(n, alpha + 1 − n).

    ``alpha`` = ``n`` = 1 marks columns without a transform: each is a plain sum, which a matrix product computes.
    """

    alpha: int
    n: int
    first: int
    tiles: int

    @property
    def columns(self) -> int:
        """Number of output columns."""
        return self.n * self.tiles


def segments(q: int, r: int, states: Sequence[int] = (8, 4)) -> list[Segment]:
    """Cut a row of ``q`` outputs of an ``r`` wide filter for kernels Γα(α + 1 − r, r), α in the order of ``states``.

    Each covers as many whole tiles as fit in what the ones before it left; the rest is a segment with alpha = 1. The
    segments follow each other without gap or overlap, so nothing is computed twice; there is none for q = 0.

    Raises:
        ValueError: for a negative q, r below 1, and states other than 4, 8 and 16.

    Section 5.5 of "Im2col-Winograd" (2024).

    >>> [(s.alpha, s.n, s.first, s.tiles) for s in segments(21, 3)]
    [(8, 6, 0, 3), (4, 2, 18, 1), (1, 1, 20, 1)]
    """
    if q < 0 or r < 1:
        raise ValueError(f"a row of q={q} outputs of a filter r={r} wide: q must be at least 0 and r at least 1")
    if unknown := [alpha for alpha in states if alpha not in WIDTHS]:
        raise ValueError(f"states={tuple(states)}: {unknown[0]} is not one of {', '.join(map(str, WIDTHS))}")
    cut, first = [], 0
    for alpha, n in [(alpha, alpha + 1 - r) for alpha in states if r in WIDTHS[alpha]] + [(1, 1)]:
        if tiles := (q - first) // n:
            cut.append(Segment(alpha, n, first, tiles))
            first += n * tiles
    return cut


@lru_cache(maxsize=64)
def _matrices(n: int, r: int, given: tuple[Fraction | int, ...] | None) -> Matrices:
    if n < 1 or r < 1:
        raise ValueError(f"n={n} and r={r} must be at least 1")
    needed = n + r - 2
    if given is None and needed > len(POINTS):
        raise ValueError(f"F({n},{r}) needs {needed} points and only {len(POINTS)} are known; give points=")
    points = tuple(Fraction(p) for p in (POINTS[:needed] if given is None else given))
    if len(points) != needed or len(set(points)) != needed:
        raise ValueError(f"F({n},{r}) needs {needed} distinct points, not {[str(p) for p in points]}")
    zero, one = Fraction(0), Fraction(1)
    # Evaluate the filter (g) and the transposed output (at) at every point; infinity picks the leading coefficient.
    powers = [[p**i for i in range(max(n, r))] for p in points]
    at = [tuple(row[i] for row in powers) + ((one if i == n - 1 else zero),) for i in range(n)]
    g = []
    for j, p in enumerate(points):
        scale = one
        for other in points[:j] + points[j + 1 :]:
            scale *= p - other
        g.append(tuple(powers[j][k] / scale for k in range(r)))
    g.append(tuple(one if k == r - 1 else zero for k in range(r)))
    # Interpolation, transposed: row j holds the numerator of the j-th Lagrange polynomial.
    alpha = n + r - 1
    bt = [_coefficients(points[:j] + points[j + 1 :], alpha) for j in range(len(points))]
    bt.append(_coefficients(points, alpha))
    return Matrices(n, r, tuple(at), tuple(g), tuple(bt))


def _coefficients(roots: Sequence[Fraction], length: int) -> tuple[Fraction, ...]:
    """Coefficients, lowest first, of the product of (x − root), filled up with zeros to ``length``."""
    product = [Fraction(1)]
    for root in roots:
        product = [a - root * b for a, b in zip([Fraction(0), *product], [*product, Fraction(0)], strict=True)]
    return tuple(product + [Fraction(0)] * (length - len(product)))
