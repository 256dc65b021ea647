"""Problems that a caller writes: what they take, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from leanconv import ConvProblem, FilterProblem, explain
from tests.messages import says


@pytest.mark.parametrize(
    "given, part",
    [
        ({"stride_d": 0}, "stride_d=0 is below 1"),
        ({"stride_d": -1}, "stride_d=-1 is below 1"),
        ({"dilation_d": 0}, "dilation_d=0 is below 1"),
        ({"padding_d": (1, 2, 3)}, "padding_d=(1, 2, 3) must be an integer or two: (front, back)"),
    ],
)
def test_numbers_of_slices(given: Any, part: str) -> None:
    with says(ValueError, part):
        ConvProblem(1, 4, 8, 8, 4, 3, 3, d=4, t=3, **given)


def test_sides_may_be_negative_and_no_call_has_them() -> None:
    problem = ConvProblem(1, 4, 8, 8, 4, 3, 3, padding=(0, -1, 0, 0))
    assert (problem.p, problem.q) == (5, 6)
    with says(ValueError, "padding=-1 is below 0"):
        explain(problem)


@pytest.mark.parametrize("anchor", [1, (1,), [1, 1]])
def test_an_anchor_is_two_integers_or_one_for_both(anchor: Any) -> None:
    assert FilterProblem(1, 8, 8, 3, 3, anchor).anchor == (1, 1)


@pytest.mark.parametrize(
    "anchor, kind, rule",
    [
        (None, TypeError, "is not an integer"),
        ((1.0, 1), TypeError, "is not an integer"),
        ((1, 1, 1), ValueError, "an integer or two: (row, column)"),
    ],
)
def test_what_is_no_anchor(anchor: Any, kind: type[Exception], rule: str) -> None:
    with says(kind, "anchor=", rule):
        FilterProblem(1, 8, 8, 3, 3, anchor)
