"""The matrices of 1-D Winograd (Cook-Toom) correlation, made exactly with fractions for any tile and filter width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

#: Interpolation points in the order they are taken; infinity comes on top of them. A prefix of this list gives the
#: usual points of 4 states (0, ±1) and 8 states (and ±2, ±1/2). For 16 states these points, unlike those with 3 and
#: 1/3, keep the input and output transforms exact in binary, which lowers the error about tenfold.
POINTS = tuple(
    Fraction(numerator, denominator)
    for numerator, denominator in (
        (0, 1), (1, 1), (-1, 1), (2, 1), (-2, 1), (1, 2), (-1, 2), (4, 1), (-4, 1), (1, 4), (-1, 4),
        (3, 2), (-3, 2), (3, 4), (-3, 4),
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

    def arrays(self, dtype: Any = np.float64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``at``, ``g`` and ``bt`` as NumPy arrays, each number rounded once to ``dtype``."""
        at, g, bt = (np.array([[float(v) for v in row] for row in m], dtype) for m in (self.at, self.g, self.bt))
        return at, g, bt


def matrices(n: int, r: int, points: Sequence[Fraction | int] | None = None) -> Matrices:
    """The matrices of F(n, r): n neighbouring outputs of an r-tap correlation from n + r − 1 multiplications.

    ``y[i] = sum over k of filter[k] * data[i + k]``, i < n, equals ``at @ ((g @ filter) * (bt @ data))``.

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
    if n < 1 or r < 1:
        raise ValueError(f"n={n} and r={r} must be at least 1")
    needed = n + r - 2
    if points is None and needed > len(POINTS):
        raise ValueError(f"F({n},{r}) needs {needed} points and only {len(POINTS)} are known; give points=")
    chosen = tuple(Fraction(p) for p in (POINTS[:needed] if points is None else points))
    if len(chosen) != needed or len(set(chosen)) != needed:
        raise ValueError(f"F({n},{r}) needs {needed} distinct points, not {[str(p) for p in chosen]}")
    return _matrices(n, r, chosen)


@lru_cache(maxsize=64)
def _matrices(n: int, r: int, points: tuple[Fraction, ...]) -> Matrices:
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
