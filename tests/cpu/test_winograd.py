"""The mathematics of 1-D Winograd: exact identities of the matrices, the symmetry of states, the cut of a row."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv.kernels.winograd_matrices import (
    LEAST_PRODUCTS,
    POINTS,
    WIDTHS,
    Matrices,
    kernels,
    matrices,
    segments,
    states,
    transforms,
    why_no_kernels,
)

#: n and r of the eleven kernels Γα(n, r).
ELEVEN = [(alpha + 1 - r, r) for alpha, widths in WIDTHS.items() for r in widths]


def transformed(made: Matrices, taps: list[Fraction], data: list[Fraction]) -> list[Fraction]:
    """``at @ ((g @ taps) * (bt @ data))`` in exact arithmetic."""

    def apply(rows: tuple[tuple[Fraction, ...], ...], vector: list[Fraction]) -> list[Fraction]:
        return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in rows]

    products = [u * v for u, v in zip(apply(made.g, taps), apply(made.bt, data), strict=True)]
    return apply(made.at, products)


def correlated(taps: list[Fraction], data: list[Fraction]) -> list[Fraction]:
    """The sums that the transforms stand for."""
    r = len(taps)
    return [sum((taps[k] * data[i + k] for k in range(r)), Fraction(0)) for i in range(len(data) - r + 1)]


def rationals(count: int, seed: int) -> list[Fraction]:
    random = np.random.default_rng(seed)
    return [Fraction(int(a), int(b)) for a, b in zip(*random.integers(1, 99, (2, count)), strict=True)]


def test_the_eleven_kernels_of_the_paper() -> None:
    assert ELEVEN == [
        (3, 2), (2, 3),
        (7, 2), (6, 3), (5, 4), (4, 5), (3, 6), (2, 7),
        (10, 7), (9, 8), (8, 9),
    ]  # fmt: skip


@pytest.mark.parametrize(("n", "r"), ELEVEN)
def test_transforms_give_the_sums_exactly_and_states_come_in_pairs(n: int, r: int) -> None:
    made = matrices(n, r)
    assert (len(made.at), len(made.at[0])) == (n, made.alpha)
    assert (len(made.g), len(made.g[0])) == (made.alpha, r)
    assert (len(made.bt), len(made.bt[0])) == (made.alpha, made.alpha)
    for seed in range(5):
        numbers = rationals(made.alpha + r, seed)
        data, taps = numbers[: made.alpha], numbers[made.alpha :]
        assert transformed(made, taps, data) == correlated(taps, data)
    assert made.paired
    for k in range(made.alpha // 2 - 1):  # the statement of the symmetry, element by element
        one, two = 2 * k + 1, 2 * k + 2
        assert all(made.bt[two][j] == (-1) ** j * made.bt[one][j] for j in range(made.alpha))
        assert all(made.g[two][j] == (-1) ** j * made.g[one][j] for j in range(r))
        assert all(made.at[i][two] == (-1) ** i * made.at[i][one] for i in range(n))


@pytest.mark.parametrize(("n", "r"), [(n, r) for n in range(1, 11) for r in range(1, 10) if n + r - 2 <= len(POINTS)])
def test_winograd_matrices_are_exact(n: int, r: int) -> None:
    made = matrices(n, r)
    assert (len(made.at), len(made.g), len(made.bt)) == (n, made.alpha, made.alpha) and made.alpha == n + r - 1
    # The bilinear identity: output i, filter tap k and datum d meet exactly where d = i + k.
    for i in range(n):
        for k in range(r):
            for d in range(made.alpha):
                total = sum(made.at[i][j] * made.g[j][k] * made.bt[j][d] for j in range(made.alpha))
                assert total == Fraction(d == i + k)


def test_winograd_matrices_take_points_and_refuse_bad_ones() -> None:
    with pytest.raises(ValueError, match="needs 3 distinct points"):
        matrices(2, 3, [0, 1, 1])
    with pytest.raises(ValueError, match="needs 3 distinct points"):
        matrices(2, 3, [0, 1])
    with pytest.raises(ValueError, match="n=0"):
        matrices(0, 3)
    with pytest.raises(ValueError, match="give points="):
        matrices(20, 3)
    made = matrices(2, 3, [0, Fraction(1, 3), -5])
    rng = np.random.default_rng(0)
    data, taps = rng.random(4), rng.random(3)
    at, g, bt = made.arrays()
    np.testing.assert_allclose(at @ ((g @ taps) * (bt @ data)), np.correlate(data, taps, "valid"), rtol=1e-12)
    assert made.arrays(np.float32)[1].dtype == np.float32
    # 8 states: input and output transforms are exact in binary.
    at, _, bt = matrices(6, 3).arrays(np.float32)
    exact = matrices(6, 3)
    assert [[Fraction(float(v)) for v in row] for row in bt] == [list(row) for row in exact.bt]
    assert [[Fraction(float(v)) for v in row] for row in at] == [list(row) for row in exact.at]


NUMBERS = st.fractions(-5, 5, max_denominator=7)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_any_distinct_points_give_the_sums_exactly(n: int, r: int, draw: st.DataObject) -> None:
    count = n + r - 2
    points = draw.draw(st.lists(NUMBERS, min_size=count, max_size=count, unique=True))
    numbers = draw.draw(
        st.lists(st.fractions(-9, 9, max_denominator=9), min_size=n + 2 * r - 1, max_size=n + 2 * r - 1)
    )
    data, taps = numbers[: n + r - 1], numbers[n + r - 1 :]
    assert transformed(matrices(n, r, points), taps, data) == correlated(taps, data)


def test_points_that_are_no_pairs_give_no_paired_states() -> None:
    assert matrices(2, 3, [0, Fraction(1, 3), Fraction(-1, 3)]).paired
    assert not matrices(2, 3, [0, 1, 2]).paired
    assert not matrices(2, 3, [1, 0, -1]).paired
    assert not matrices(3, 4, [0, 1, 2, -1, -2]).paired


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 300), st.integers(1, 11), st.lists(st.sampled_from(sorted(WIDTHS)), max_size=3, unique=True))
def test_segments_cover_a_row_once(q: int, r: int, states: list[int]) -> None:
    cut = segments(q, r, states)
    column = 0
    for segment in cut:
        assert segment.first == column and segment.tiles > 0
        assert segment.alpha == 1 == segment.n or (r in WIDTHS[segment.alpha] and segment.alpha in states)
        assert segment.alpha == 1 or segment.n == segment.alpha + 1 - r
        column += segment.columns
    assert column == q
    order = [segment.alpha for segment in cut if segment.alpha > 1]
    assert order == [alpha for alpha in states if alpha in order]
    # What is left to plain sums is less than any tile allowed here.
    allowed = [alpha + 1 - r for alpha in states if r in WIDTHS[alpha]]
    assert not allowed or sum(s.columns for s in cut if s.alpha == 1) < min(allowed)


@pytest.mark.parametrize(
    ("q", "r", "states", "expected"),
    [
        (7, 3, (8, 4), [(8, 6, 0, 1), (1, 1, 6, 1)]),
        (16, 3, (8, 4), [(8, 6, 0, 2), (4, 2, 12, 2)]),
        (12, 2, (8, 4), [(8, 7, 0, 1), (4, 3, 7, 1), (1, 1, 10, 2)]),
        (14, 5, (8, 4), [(8, 4, 0, 3), (1, 1, 12, 2)]),
        (13, 7, (8, 4), [(8, 2, 0, 6), (1, 1, 12, 1)]),
        (35, 7, (16, 8), [(16, 10, 0, 3), (8, 2, 30, 2), (1, 1, 34, 1)]),
        (26, 9, (16, 8), [(16, 8, 0, 3), (1, 1, 24, 2)]),
        (5, 9, (8, 4), [(1, 1, 0, 5)]),
        (0, 3, (8, 4), []),
    ],
)
def test_segments_take_the_first_states_first(
    q: int, r: int, states: tuple[int, ...], expected: list[tuple[int, int, int, int]]
) -> None:
    assert [(s.alpha, s.n, s.first, s.tiles) for s in segments(q, r, states)] == expected


def test_segments_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="q=-1"):
        segments(-1, 3)
    with pytest.raises(ValueError, match="r=0"):
        segments(8, 0)
    with pytest.raises(ValueError, match="6 is not one of 4, 8, 16"):
        segments(8, 3, (8, 6))


def test_states_that_a_precision_allows() -> None:
    def of(width: int, products: int, precision: str, row: int = 56) -> tuple[int, ...]:
        return states(width, products, row, precision)

    assert of(3, LEAST_PRODUCTS, "fp32") == (8, 4) and of(3, LEAST_PRODUCTS - 1, "fp32") == (4,)
    assert of(5, LEAST_PRODUCTS, "fp32") == (8,) and of(5, LEAST_PRODUCTS - 1, "fp32") == ()
    assert of(5, 1000, "fp32", 3) == (8,) and of(5, 1000, "fp32", 2) == () and of(3, 1000, "fp32", 1) == (4,)
    assert of(7, 1000, "fp32") == (8,) and of(8, 1000, "fp32") == of(9, 1000, "fp32") == ()
    for precision in ("relaxed", "tf32"):
        assert [of(width, 1, precision, 1) for width in (1, 2, 6, 7, 8, 9, 10)] == [
            (), (8, 4), (8,), (16, 8), (16,), (16,), ()
        ]  # fmt: skip
    assert of(3, 1000, "ieee") == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1, 1000, 56, "relaxed"), "1 wide, and the transforms serve widths from 2 on"),
        ((5, 1000, 2, "fp32"), "rows of 2 pixels are at most half"),
        ((5, 50, 56, "fp32"), "an output sums 50 products"),
        (
            (9, 1000, 7, "fp32"),
            "9 wide and rows of 7 pixels; precision 'fp32' is kept by their column blocks from 8 on",
        ),
        ((31, 50, 56, "fp32"), "an output sums 50 products"),
    ],
)
def test_why_there_are_no_kernels(given: tuple[int, int, int, str], words: str) -> None:
    assert kernels(*given) == () and words in why_no_kernels(*given)[0]
    assert why_no_kernels(3, 1000, 56, "fp32") == why_no_kernels(9, 1000, 8, "fp32") == []


def test_kernels_that_a_precision_allows() -> None:
    """The whole row first, then column blocks, of rows that are not served better whole."""
    assert kernels(5, 1000, 56, "fp32") == ((8, 5),) and kernels(1, 1000, 56, "relaxed") == ()
    blocks = ((8, 3), (8, 4), (8, 5))
    assert kernels(6, 1000, 56, "fp32") == ((8, 6), *blocks) and kernels(7, 1000, 56, "fp32") == ((8, 7), *blocks)
    assert kernels(7, 1000, 4, "fp32") == ((8, 7),) and kernels(7, 1000, 3, "fp32") == ()
    for width in (8, 9, 31, 51, 1000):
        assert kernels(width, LEAST_PRODUCTS, 16, "fp32") == blocks
        assert kernels(width, LEAST_PRODUCTS, 8, "fp32") == kernels(width, LEAST_PRODUCTS, 15, "fp32") == blocks[1:]
        assert kernels(width, LEAST_PRODUCTS - 1, 56, "fp32") == kernels(width, 1000, 56, "ieee") == ()
    assert kernels(9, 1, 1, "relaxed") == ((16, 9), *blocks) and kernels(10, 1, 1, "tf32") == blocks
    assert [(t.n, t.r) for t, _ in transforms(31, 31, "fp32")] == [(6, 3), (5, 4), (4, 5)]
