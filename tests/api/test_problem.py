"""Problems that a caller writes: what they take, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from leanconv import ConvProblem, FilterProblem, explain
from leanconv.words import format_problem, parse_problem
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


@pytest.mark.parametrize("given", [np.dtype("float32"), np.float32])
def test_the_type_of_a_result_is_a_string(given: Any) -> None:
    with says(TypeError, "result (out_dtype) has dtype", "supported are float32", "give its name, which is a string"):
        FilterProblem(1, 8, 8, 3, 3, (1, 1), out_dtype=given)


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("filter:5x5,3x3,box,separable", "'box' and 'separable' cannot both be given"),
        ("filter:5x5,3x3,rank2,median", "'rank2' and 'median' cannot both be given"),
        ("filter:5x5,3x3,rank9", "the rank of a 3x3 filter is from 1 to 3, not 9"),
        ("filter:5x5,9x2,rank3", "the rank of a 9x2 filter is from 1 to 2, not 3"),
        ("filter:5x5,3x3,rank0", "the rank of a 3x3 filter is from 1 to 3, not 0"),
        ("conv:n٣,c2,h5,k3,r3", "'n٣' is not understood"),
        ("conv:n1,c2,h5,k3,r3,stride٢", "'stride٢' is not understood"),
        ("filter:5x٥,3x3", "'5x٥' is not understood"),
    ],
)
def test_words_that_are_no_problem(text: str, complaint: str) -> None:
    with says(ValueError, complaint):
        parse_problem(text)


def test_ranks_in_words() -> None:
    for text in ("filter:5x5,3x3,rank3", "filter:5x5,1x3,separable", "filter:5x5,3x3,box"):
        assert format_problem(parse_problem(text)) == text
