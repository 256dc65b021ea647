"""Layers in parts, one for each thread, and layers with long filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import leanconv
from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS, channels, dense_code, fourier, layers, oracle
from leanconv.cpu.fourier import Fourier
from leanconv.problem import ConvProblem
from leanconv.runtime import threads as pool
from tests.cpu_engine import arrays

LAYERS = [
    ConvProblem(4, 3, 9, 11, 8, 3, 3, padding=(1, 1, 1, 1), bias=True, activation="relu"),
    ConvProblem(1, 4, 17, 11, 6, 3, 2, padding=(1, 0, 2, 1), stride=(2, 1)),
    ConvProblem(1, 3, 1, 300, 2, 1, 9, padding=(0, 0, 4, 4), bias=True),
    ConvProblem(1, 12, 4, 4, 24, 1, 1),
    ConvProblem(1, 12, 7, 6, 12, 3, 3, padding=(1, 1, 1, 1), groups=12, bias=True),
    ConvProblem(1, 8, 3, 3, 16, 3, 3, padding=(1, 1, 1, 1), groups=4, dilation=(1, 2)),
    ConvProblem(3, 4, 6, 7, 8, 3, 3, padding=(1, 1, 1, 1), op="dgrad", bias=True),
    ConvProblem(2, 1, 40, 1, 4, 3, 1, stride=(9, 1), bias=True),
    ConvProblem(2, 5, 9, 8, 4, 3, 2, padding=(1, 1, 0, 1), stride=(1, 2), op="wgrad"),
    ConvProblem(2, 8, 7, 6, 12, 3, 3, padding=(1, 1, 1, 1), groups=4, op="wgrad"),
]


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Every layer is cut; yields the numbers of parts."""
    numbers: list[int] = []

    def recording(work: Any, blocks: Any, threads: int) -> None:
        numbers.append(len(blocks))
        pool.over_blocks(work, blocks, threads)

    monkeypatch.setenv("LEANCONV_THREADS", "3")
    monkeypatch.setattr(layers, "LEAST_COST", 0)
    monkeypatch.setattr(layers, "SMALL_WORK", 0)
    monkeypatch.setattr(layers, "over_blocks", recording)
    layers._parts_for.cache_clear()
    yield numbers
    layers._parts_for.cache_clear()


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "CHWN"])
@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_layers_in_parts(problem: ConvProblem, layout: Any, three_threads: list[int]) -> None:
    problem = replace(problem, layout=layout)
    x, w, bias = arrays(problem)
    if problem.op == "dgrad":
        bias = np.ones(problem.c, np.float32)
    expected = oracle.conv2d(problem, x, w, bias)
    for algorithm in CPU_ALGORITHMS:
        if not algorithm.reasons(problem, None):
            got = algorithm.run(problem, x, w, bias)
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5, err_msg=algorithm.name)
    assert three_threads and set(three_threads) <= {2, 3}


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("groups", [1, 3])
def test_gradients_of_filters_of_volumes_in_parts(groups: int, layout: Any, three_threads: list[int]) -> None:
    random = np.random.default_rng(5)
    x = random.standard_normal((2, 6, 4, 5, 6), np.float32)
    grad = random.standard_normal((2, 3, 3, 5, 5), np.float32)
    expected = leanconv.conv3d_weight(x.astype(float), grad.astype(float), (3, 6 // groups, 2, 3, 2), padding=(0, 1, 0),
                                      groups=groups)  # fmt: skip
    del three_threads[:]
    if layout == "NDHWC":
        x, grad, expected = (np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (x, grad, expected))
    got = leanconv.conv3d_weight(x, grad, expected.shape, padding=(0, 1, 0), groups=groups, layout=layout)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert set(three_threads) == {3}


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_an_algorithm_does_not_compute_is_no_part(
    layout: Any, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """winograd1d needs 128 products of pixels on average, or rows of some length: a part may have less."""
    monkeypatch.setenv("LEANCONV_THREADS", str(threads))
    monkeypatch.setattr(layers, "LEAST_COST", 0)
    monkeypatch.setattr(layers, "SMALL_WORK", 0)
    layers._parts_for.cache_clear()
    few = ConvProblem(1, 12, 16, 64, 48, 5, 7, padding=(1, 2, 2, 1), groups=3, layout=layout)
    short = ConvProblem(1, 64, 1, 40, 8, 1, 12, padding=(0, 0, 6, 5), layout=layout)
    for problem in few, short:
        x, w, _ = arrays(problem)
        result = leanconv.conv2d(
            x, w, padding=problem.padding, groups=problem.groups, layout=layout, algorithm="winograd1d"
        )
        np.testing.assert_allclose(result, oracle.conv2d(problem, x, w), atol=1e-3)
    layers._parts_for.cache_clear()


@pytest.mark.parametrize("axis", ["N", "K", "P", "Q"])
def test_parts_are_layers(axis: Any) -> None:
    """The cost of a part is asked of the problem that is computed."""
    problem = ConvProblem(4, 8, 12, 13, 16, 3, 3, padding=(1, 1, 1, 1), stride=(2, 1), groups=2)
    x, w, _ = arrays(problem)
    part = layers.Part(axis, 0, 2 if axis != "K" else 8)
    alone = part.layer(problem, x, w, None)[0]
    assert alone.y_shape == part.problem(problem).y_shape == part.of_output(problem, np.empty(problem.y_shape)).shape
    assert alone.flops == part.problem(problem).flops


def test_small_layers_and_one_thread_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Fourier()
    small, large = ConvProblem(4, 8, 9, 9, 8, 3, 3), ConvProblem(4, 64, 56, 56, 64, 3, 3)
    assert layers._parts_for(algorithm, small, 2) == () and len(layers._parts_for(algorithm, large, 2)) == 2


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_size_of_tiles(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fourier, "BUDGET", 1 << 14)
    for problem in (
        ConvProblem(2, 3, 30, 41, 4, 5, 4, padding=(2, 1, 0, 3), stride=(2, 3), layout=layout),
        ConvProblem(1, 4, 1, 900, 4, 1, 40, padding=(0, 0, 30, 9), layout=layout, groups=2),
        ConvProblem(2, 4, 50, 9, 4, 20, 1, layout=layout, groups=4),
    ):
        x, w, _ = arrays(problem)
        expected = oracle.conv2d(problem, x, w)
        for tiles in set(fourier._sizes(problem)):
            monkeypatch.setattr(fourier, "best", lambda problem, tiles=tiles: tiles)
            got = Fourier().run(problem, x, w)
            assert np.linalg.norm(got - expected) <= 1e-7 * np.linalg.norm(expected)


def test_what_transforms_cannot_do() -> None:
    wide = ConvProblem(1, 2, 9, 90, 2, 1, 3, dilation=(7, 1), stride=(1, 4))
    assert not Fourier().why_not(wide)
    assert "dilation 3 along" in Fourier().why_not(replace(wide, dilation=(1, 3)))[0]
    assert "stride 5" in Fourier().why_not(replace(wide, stride=(5, 1)))[0]


def test_a_nan_reaches_its_windows_only() -> None:
    x = np.ones((1, 1, 5000), np.float32)
    x[0, 0, 2000] = np.nan
    y = leanconv.conv1d(x, np.ones((1, 1, 301), np.float32), algorithm="fourier")
    assert np.isnan(y[0, 0]).nonzero()[0].tolist() == list(range(1700, 2001))


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (ConvProblem(1, 1, 1, 10**6, 1, 1, 4097, padding=(0, 0, 2048, 2048)), "fourier"),
        (ConvProblem(1, 16, 1, 20_000, 16, 1, 257, groups=16), "fourier"),
        (ConvProblem(1, 8, 256, 256, 8, 31, 31, groups=8), "fourier"),
        (ConvProblem(1, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1)), "winograd2d"),
        (ConvProblem(1, 16, 1, 8000, 16, 1, 3), "im2col"),
    ],
    ids=str,
)
def test_auto_takes_transforms_for_long_filters(
    problem: ConvProblem, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With machine code direct convolution is as quick up to some 1000 taps."""
    for module in (channels, dense_code):
        monkeypatch.setattr(module, "widest", lambda: 0)
    assert (choose(problem, None).algorithm.name == "fourier") == (name == "fourier")


def test_a_long_signal_is_quick_and_right() -> None:
    """1e6 samples and 4097 taps: 0.01 s, and 28 s by columns."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((1, 1, 10**6)), rng.standard_normal((1, 1, 4097))
    y = leanconv.conv1d(x, w, padding=2048)
    assert y.shape == x.shape
    at = np.array([0, 5, 2048, 123_456, 999_999])
    padded = np.pad(x[0, 0], 2048)
    np.testing.assert_allclose(y[0, 0, at], [padded[i : i + 4097] @ w[0, 0] for i in at], atol=1e-9)
