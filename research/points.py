"""Which interpolation points round least: every set of them judged by a formula, the best and the known ones measured.

``python -m research points`` prints, for 4, 8 and 16 states, the errors of Γα(n, r) in a simulation of float32
arithmetic on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import numpy as np

from leanconv.cpu.oracle import relative_error
from leanconv.kernels.winograd_matrices import POINTS, WIDTHS, Matrices, matrices
from report import records
from research.rounding import fma

#: What p is drawn from; the points are 0, ±p for some of these, and infinity, so that states come in pairs.
CHOICE = tuple(
    sorted(
        Fraction(*pair)
        for pair in (
            (1, 8), (1, 6), (1, 5), (1, 4), (1, 3), (3, 8), (2, 5), (1, 2), (3, 5), (5, 8), (2, 3), (3, 4), (4, 5),
            (7, 8), (1, 1), (8, 7), (5, 4), (4, 3), (3, 2), (8, 5), (5, 3), (2, 1), (5, 2), (8, 3), (3, 1), (4, 1),
            (5, 1), (6, 1),
        )
    )
)  # fmt: skip
#: The points of the paper, as far as they are needed.
PAPER = tuple(Fraction(*pair) for pair in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4)))
#: Another set for 16 states whose matrices float32 holds exactly.
BINARY = tuple(Fraction(*pair) for pair in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (3, 2), (3, 4)))
DATA = ("zero-mean", "in [1, 2]")
#: Steps after which a sum begins anew in `simulate`, and channels of the layers simulated, whose filters are r high.
PERIOD, CHANNELS = 64, 64

Pairs = tuple[Fraction, ...]


def spread(pairs: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """0, p, −p, q, −q, … from p, q, …."""
    return (Fraction(0), *(sign * p for p in pairs for sign in (1, -1)))


def shapes(alpha: int) -> list[tuple[int, int]]:
    """n and r of the kernels with ``alpha`` states."""
    return [(alpha + 1 - r, r) for r in WIDTHS[alpha]]


def growth(sets: np.ndarray, alpha: int) -> np.ndarray:
    """How much roundings of the products grow towards the outputs, for sets of p of shape (sets, α/2 − 1).

    Root of the mean over outputs of ``sum over j of (at[i][j] · ‖g[j]‖ · ‖bt[j]‖)²`` over r, which is 1 for plain sums:
    the products of state j have the size ‖g[j]‖·‖bt[j]‖ for random data, and each is rounded relative to its size.
    Geometric mean over the shapes of ``alpha``.
    """
    zero = np.zeros((len(sets), 1))
    points = np.concatenate([zero, *(c for p in sets.T for c in (p[:, None], -p[:, None]))], axis=1)
    rows, scale = np.zeros((alpha, len(sets))), np.ones((alpha, len(sets)))
    for j in range(alpha):
        polynomial = np.zeros((len(sets), alpha))
        polynomial[:, 0] = 1
        for i in range(alpha - 1):
            if i != j:
                shifted = np.roll(polynomial, 1, axis=1)
                polynomial = shifted - points[:, i : i + 1] * polynomial
                scale[j] *= points[:, j] - points[:, i] if j < alpha - 1 else 1
        rows[j] = np.linalg.norm(polynomial, axis=1)
    total = np.zeros(len(sets))
    for n, r in shapes(alpha):
        powers = points.T[:, :, None] ** np.arange(max(n, r))
        taps = np.linalg.norm(powers[:, :, :r], axis=2) / np.abs(scale[:-1])
        outputs = np.linalg.norm(powers[:, :, :n], axis=2)
        squares = ((outputs * taps * rows[:-1]) ** 2).sum(0) + rows[-1] ** 2
        total += np.log(squares / (n * r)) / 2
    result: np.ndarray = np.exp(total / len(shapes(alpha)))
    return result


def search(alpha: int, count: int) -> list[Pairs]:
    """The ``count`` sets of p with the least growth."""
    sets = list(combinations(CHOICE, alpha // 2 - 1))
    values = np.array(sets, np.float64)
    growths = np.concatenate([growth(part, alpha) for part in np.array_split(values, -(-len(sets) // 8192))])
    return [sets[i] for i in np.argsort(growths, kind="stable")[:count]]


def scaled(transforms: Matrices) -> Matrices:
    """The same transform with odd denominators moved from rows of ``bt`` and columns of ``at`` into rows of ``g``.

    Scales that are powers of two are exact, so they would change no bit of an answer.
    """

    def odd(numbers: Sequence[Fraction]) -> int:
        common = math.lcm(*(number.denominator for number in numbers))
        return common // (common & -common)

    below = [odd(row) for row in transforms.bt]
    above = [odd(column) for column in zip(*transforms.at, strict=True)]
    at = tuple(tuple(v * a for v, a in zip(row, above, strict=True)) for row in transforms.at)
    g = tuple(tuple(v / (a * b) for v in row) for row, a, b in zip(transforms.g, above, below, strict=True))
    bt = tuple(tuple(v * b for v in row) for row, b in zip(transforms.bt, below, strict=True))
    return Matrices(transforms.n, transforms.r, at, g, bt)


def inexact(transforms: Matrices) -> int:
    """Numbers of ``at`` and ``bt`` that float32 does not hold."""
    return sum(
        Fraction(float(np.float32(float(v)))) != v for m in (transforms.at, transforms.bt) for row in m for v in row
    )


def _chain(coefficients: np.ndarray, data: np.ndarray) -> np.ndarray:
    total = np.zeros_like(data[0])
    for coefficient, values in zip(coefficients, data, strict=True):
        if coefficient:
            total = fma(coefficient, values, total)
    return total


def simulate(transforms: Matrices, x: np.ndarray, w: np.ndarray, period: int | None = None) -> np.ndarray:
    """Outputs (n, K, tiles) of data (α, C, tiles) and filters (r, C, K) in float32, as a kernel of FMAs computes them.

    Pairs of states share their even and odd terms. Filters are transformed in float64 and rounded once. With ``period``
    a sum over C is carried to a second one after so many steps: ``hi = T + M; M = M − (hi − T); T = hi``.
    """
    at, _g, bt = transforms.arrays(np.float32)
    u = np.tensordot(transforms.arrays()[1], w.astype(np.float64), 1).astype(np.float32)
    even, odd = (np.stack([_chain(row[i::2], x[i::2]) for row in bt]) for i in (0, 1))
    v = even + odd
    v[2:-1:2] = even[1:-1:2] - odd[1:-1:2]
    running = np.zeros((transforms.alpha, w.shape[2], x.shape[2]), np.float32)
    carried = np.zeros_like(running)
    for c in range(x.shape[1]):
        running = fma(u[:, c, :, None], v[:, c, None, :], running)
        if period and c % period == period - 1:
            high = carried + running
            running -= high - carried
            carried = high
    states = carried + running
    plus, minus = states[1:-1:2] + states[2:-1:2], states[1:-1:2] - states[2:-1:2]
    y = np.stack([_chain(row[1:-1:2], minus if i % 2 else plus) for i, row in enumerate(at)])
    y[0] += states[0]
    y[-1] += states[-1]
    return y


@dataclass(frozen=True)
class Layer:
    """Data (α, C, tiles) and filters (r, C, K) of one kernel, the exact outputs, and a sequential sum's error."""

    n: int
    r: int
    x: np.ndarray
    w: np.ndarray
    exact: np.ndarray
    sequential: float


def layer(n: int, r: int, data: str, channels: int = CHANNELS, seed: int = 0) -> Layer:
    """A random layer with r × r filters: 16 tiles and 8 filters."""
    random = np.random.default_rng(seed)
    draw = random.standard_normal if data == "zero-mean" else lambda shape: 1 + random.random(shape)
    x, w = draw((n + r - 1, channels * r, 16)).astype(np.float32), draw((r, channels * r, 8)).astype(np.float32)
    exact = np.zeros((n, 8, 16))
    sequential = np.zeros((n, 8, 16), np.float32)
    for c in range(channels * r):
        for k in range(r):
            exact += w[k, c].astype(np.float64)[:, None] * x[k : k + n, c, None, :]
            sequential += w[k, c][:, None] * x[k : k + n, c, None, :]
    return Layer(n, r, x, w, exact, relative_error(sequential, exact))


def measure(pairs: Pairs, layers: Sequence[Layer], period: int | None = None, scale: bool = False) -> float:
    """Relative Frobenius error of the points ±p, the geometric mean over ``layers``."""
    total = 0.0
    for case in layers:
        transforms = matrices(case.n, case.r, spread(pairs))
        transforms = scaled(transforms) if scale else transforms
        total += math.log(relative_error(simulate(transforms, case.x, case.w, period), case.exact))
    return math.exp(total / len(layers))


def table(alpha: int, best: int) -> str:
    """A Markdown table of the sets found for ``alpha`` states, the default, the paper's, and a sequential sum."""
    count = alpha // 2 - 1
    default = tuple(POINTS[1 : 2 * count : 2])
    sets = {default: "default", PAPER[:count]: "paper"}
    if alpha == 16:
        sets[BINARY] = "binary"
    if default == PAPER[:count]:
        sets[default] = "default, paper"
    known = {frozenset(pairs): name for pairs, name in sets.items()}
    listed = list(sets) + [pairs for pairs in search(alpha, best) if frozenset(pairs) not in known]
    cases = {data: [layer(n, r, data) for n, r in shapes(alpha)] for data in DATA}
    plain = [math.exp(sum(math.log(case.sequential) for case in cases[data]) / len(cases[data])) for data in DATA]
    lines = [["a sequential float32 sum", "", "1", "", f"{plain[0]:.2e}", "", f"{plain[1]:.2e}", ""]]
    for pairs in listed:
        transforms = [matrices(n, r, spread(pairs)) for n, r in shapes(alpha)]
        rounded = sum(map(inexact, transforms))
        for scale in (False, True) if rounded else (False,):
            left = sum(inexact(scaled(m)) for m in transforms) if scale else rounded
            errors = [measure(pairs, cases[data], period, scale) for data in DATA for period in (None, PERIOD)]
            lines.append(
                [
                    " ".join(f"±{p}" for p in sorted(pairs)),
                    known.get(frozenset(pairs), "searched") + (", rows scaled" if scale else ""),
                    f"{growth(np.array([pairs], np.float64), alpha)[0]:.3g}",
                    str(left),
                    *(f"{error:.2e}" for error in errors),
                ]
            )
    heads = [f"{data}, {how}" for data in DATA for how in ("one sum", f"sums of {PERIOD}")]
    return records.table((["points besides 0 and ∞", "", "growth", "rounded", *heads], lines))
