"""The choice of interpolation points: their growth, the simulation that measures them, the default among all."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from leanconv.cpu.oracle import relative_error
from leanconv.kernels.winograd_matrices import POINTS, WIDTHS, Matrices, matrices
from research import points
from research.__main__ import main

#: n and r of the eleven kernels Γα(n, r).
ELEVEN = [(alpha + 1 - r, r) for alpha, widths in WIDTHS.items() for r in widths]


def default(alpha: int) -> tuple[Fraction, ...]:
    return POINTS[1 : alpha - 2 : 2]


def test_default_points_come_in_pairs_and_have_the_least_growth_of_those_float32_holds() -> None:
    for alpha in WIDTHS:
        pairs = default(alpha)
        assert points.spread(pairs) == POINTS[: alpha - 1]
        assert sum(points.inexact(matrices(n, r)) for n, r in points.shapes(alpha)) == 0
        for other in points.search(alpha, 30) if alpha < 16 else ():
            exact = not sum(points.inexact(matrices(n, r, points.spread(other))) for n, r in points.shapes(alpha))
            assert frozenset(other) == frozenset(pairs) or not exact or growth(other) >= growth(pairs)
    assert growth(default(16)) < growth(points.BINARY) < growth(points.PAPER) / 4


def growth(pairs: tuple[Fraction, ...]) -> float:
    return float(points.growth(np.array([pairs], np.float64), 2 * len(pairs) + 2)[0])


def test_growth_is_its_formula() -> None:
    logs = []
    for n, r in points.shapes(8):
        at, g, bt = matrices(n, r).arrays()
        sizes = np.linalg.norm(g, axis=1) * np.linalg.norm(bt, axis=1)
        logs.append(np.log(((at * sizes) ** 2).sum() / (n * r)) / 2)
    assert growth(default(8)) == pytest.approx(np.exp(np.mean(logs)), rel=1e-12)


@pytest.mark.parametrize(("n", "r"), ELEVEN)
def test_the_simulation_computes_the_transforms(n: int, r: int) -> None:
    case = points.layer(n, r, "zero-mean", channels=3)
    for made in (matrices(n, r), points.scaled(matrices(n, r, points.spread(points.PAPER)[: n + r - 2]))):
        for period in (None, 2):
            error = relative_error(points.simulate(made, case.x, case.w, period), case.exact)
            assert 0 < error < (2e-4 if n + r == 17 else 1e-6)


def test_16_states_err_less_with_the_default_points_than_with_those_of_the_paper() -> None:
    for data, times in (("zero-mean", 4), ("in [1, 2]", 15)):
        cases = [points.layer(n, r, data, channels=32) for n, r in points.shapes(16)]
        error = points.measure(default(16), cases)
        assert error * times < points.measure(points.PAPER, cases)
        # Carrying sums on keeps the goal of 3e-5 however long they are.
        assert points.measure(default(16), cases, points.PERIOD) < min(3e-5, 0.75 * error)


def test_scaling_rows_by_powers_of_two_changes_no_bit() -> None:
    made = matrices(8, 9)
    powers = [Fraction(2) ** ((i + 1) // 2 % 5 - 2) for i in range(16)]  # one for both states of a pair
    moved = Matrices(
        8,
        9,
        made.at,
        tuple(tuple(v * f for v in row) for row, f in zip(made.g, powers, strict=True)),
        tuple(tuple(v / f for v in row) for row, f in zip(made.bt, powers, strict=True)),
    )
    case = points.layer(8, 9, "zero-mean", channels=2)
    assert np.array_equal(points.simulate(made, case.x, case.w), points.simulate(moved, case.x, case.w))


def test_the_table_of_points(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["points", "--states", "4", "--best", "2"])
    printed = capsys.readouterr().out
    assert not stopped.value.code and printed.startswith("4 states, 64 channels, r × r filters\n")
    assert "| ±1 | default, paper | 1.29 | 0 |" in printed and printed.count("searched") >= 1
    assert "a sequential float32 sum" in printed and "rows scaled" in printed
    with pytest.raises(SystemExit) as stopped:
        main(["points", "--states", "5"])
    assert stopped.value.code == 2 and "states=5 is not known; choose one of 4, 8, 16" in capsys.readouterr().err
