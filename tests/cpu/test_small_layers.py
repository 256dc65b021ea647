"""Small layers, whose views and memory are made once and kept for later calls."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest

import leanconv
from leanconv.cpu import im2col, oracle
from leanconv.cpu.im2col import Im2col, Small
from leanconv.problem import ConvProblem
from tests.cpu.test_reference_blocks import some_layers
from tests.cpu_engine import arrays


def kept(problem: ConvProblem) -> Small | None:
    """What keeps memory for calls of a layer."""
    small = getattr(Im2col().ready(problem), "__self__", None)
    return small if isinstance(small, Small) else None


def small_layers() -> list[ConvProblem]:
    """Of every kind that is kept: batches, strides, dilations, padding beyond the image, one and several taps."""
    drawn = [replace(each, groups=1, layout="NCHW") for each in some_layers(24)]
    drawn += [ConvProblem(n, 12, 5, 7, 40, 1, 1, bias=n > 1) for n in (1, 3)]
    each_layout = [replace(each, layout=layout) for each in drawn for layout in ("NCHW", "NHWC")]
    return [each for each in each_layout if kept(each)]


def test_calls_one_after_another_leave_nothing_behind() -> None:
    """The second call finds the memory of the first, with its pixels; results are their callers' own."""
    problems = small_layers()
    assert len(problems) > 20
    for problem in problems:
        ready = Im2col().ready(problem)
        made = []
        for seed in range(3):
            x, w, bias = arrays(problem, seed)
            made.append((ready(x, w, bias), oracle.conv2d(problem, x, w, bias)))
        for got, expected in made:
            np.testing.assert_allclose(got, expected, rtol=0, atol=3e-5, err_msg=str(problem))


@pytest.mark.parametrize("least", [0, 1 << 40])
def test_filters_of_channels_last_are_turned_or_not(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(im2col, "TURNED", (least, 1 << 40))
    problem = ConvProblem(2, 16, 9, 8, 24, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
    x, w, _ = arrays(problem)
    small = kept(problem)
    assert small is not None and small.turns == (least == 0)
    np.testing.assert_allclose(small.compute(x, w), oracle.conv2d(problem, x, w), rtol=0, atol=3e-5)


def test_calls_at_the_same_time_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = ConvProblem(1, 8, 12, 12, 8, 3, 3, padding=(1, 1, 1, 1))
    ready, copy, inside = Im2col().ready(problem), np.copyto, threading.Barrier(2, timeout=20)

    def both(into: np.ndarray, source: np.ndarray) -> None:
        copy(into, source)
        inside.wait()  # each has copied what the other one is about to read

    monkeypatch.setattr(np, "copyto", both)
    given, got = [arrays(problem, seed)[:2] for seed in (1, 2)], {}
    pair = [threading.Thread(target=lambda i=i: got.update({i: ready(*given[i])})) for i in (0, 1)]
    for thread in pair:
        thread.start()
    for thread in pair:
        thread.join()
    monkeypatch.undo()
    for i in (0, 1):
        np.testing.assert_allclose(got[i], oracle.conv2d(problem, *given[i]), rtol=0, atol=3e-5)


def test_what_is_not_finite_gives_no_warning_and_is_gone_in_the_next_call() -> None:
    x, w = np.ones((1, 2, 6, 6), np.float32), np.ones((2, 2, 3, 3), np.float32)
    bad = x.copy()
    bad[0, 0, 0, 0], bad[0, 1, 5, 5] = np.inf, np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = leanconv.conv2d(bad, -w, padding=1, algorithm="im2col")
        again = leanconv.conv2d(x, w, padding=1, algorithm="im2col")
    assert np.isnan(got[0, 0, 4:, 4:]).all() and (got[0, 0, :2, :2] == -np.inf).all()
    assert np.isfinite(got[0, 0, 2:4]).all()
    assert again[0, 0, 0, 0] == 8 and again[0, 0, 2, 2] == 18


def test_large_layers_keep_nothing() -> None:
    """Neither much memory, nor what several threads share."""
    assert not any(map(kept, (ConvProblem(1, 64, 56, 56, 64, 3, 3), ConvProblem(1, 512, 28, 28, 512, 1, 1))))
