"""The CPU engine: the oracle against PyTorch and SciPy, every algorithm against the oracle, and its speed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS, channels, dense_code, layers, opencv, oracle
from leanconv.cpu.im2win import im2win, im2win_channels_last
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import CpuAlgorithm
from leanconv.options import Layout
from leanconv.problem import ConvProblem, FilterProblem
from tests.cpu_engine import arrays, by_name

LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "CHWN")
CONV = [a for a in CPU_ALGORITHMS if a.solves == "conv2d" and not a.volumes]
#: Those that take any kernel.
FILTERS = [
    a for a in CPU_ALGORITHMS if a.solves == "filter2d" and not a.why_not(FilterProblem(1, 8, 8, 3, 3, (1, 1)), None)
]
SCIPY_MODES = {
    "constant": "constant",
    "replicate": "nearest",
    "reflect": "reflect",
    "reflect101": "mirror",
    "wrap": "wrap",
}


def torch_conv2d(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """PyTorch's convolution of the same arrays, in float64."""
    torch = pytest.importorskip("torch")
    x64, w64 = (torch.from_numpy(a.astype(np.float64)) for a in (x, w))
    if problem.layout != "NCHW":
        to_nchw = (0, 3, 1, 2) if problem.layout == "NHWC" else (3, 0, 1, 2)
        x64, w64 = x64.permute(to_nchw), w64.permute(to_nchw)
    top, bottom, left, right = problem.padding
    x64 = torch.nn.functional.pad(x64, (left, right, top, bottom))
    bias64 = None if bias is None else torch.from_numpy(bias.astype(np.float64))
    y = torch.nn.functional.conv2d(x64, w64, bias64, problem.stride, 0, problem.dilation, problem.groups)
    y = y.relu() if problem.activation == "relu" else y
    from_nchw = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}
    result: np.ndarray = y.permute(from_nchw[problem.layout]).numpy()
    return result


@st.composite
def conv_problems(draw: st.DrawFn) -> ConvProblem:
    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    groups = draw(st.sampled_from((1, 1, 2, 3)))
    c, k, r, s = groups * size(1, 9), groups * size(1, 6), size(1, 5), size(1, 9)
    stride, dilation = (size(1, 3), size(1, 3)), (size(1, 3), size(1, 3))
    if draw(st.booleans()):  # as often as not what Winograd can do
        stride, dilation = (1, 1), (dilation[0], 1)
    top, bottom, left, right = (size(0, 3) for _ in range(4))
    # The smallest image that gives an output, and some more.
    h = max(1, dilation[0] * (r - 1) + 1 - top - bottom) + size(0, 12)
    w = max(1, dilation[1] * (s - 1) + 1 - left - right) + size(0, 20)
    return ConvProblem(
        n=size(0, 3), c=c, h=h, w=w, k=k, r=r, s=s, stride=stride, padding=(top, bottom, left, right),
        dilation=dilation, groups=groups, dtype=draw(st.sampled_from(("float32", "float32", "float64"))),
        layout=draw(st.sampled_from(LAYOUTS)), bias=draw(st.booleans()),
        activation=draw(st.sampled_from((None, "relu"))),
        precision="relaxed" if s > 6 and draw(st.booleans()) else "fp32",
    )  # fmt: skip


@st.composite
def filter_problems(draw: st.DrawFn) -> FilterProblem:
    kh, kw = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    anchor = (draw(st.integers(0, kh - 1)), draw(st.integers(0, kw - 1)))
    return FilterProblem(
        batch=draw(st.integers(0, 2)), h=draw(st.integers(1, 40)), w=draw(st.integers(1, 30)), kh=kh, kw=kw,
        anchor=anchor, border=draw(st.sampled_from(tuple(BORDERS))),
        dtype=draw(st.sampled_from(("float32", "float64", "int32"))),
    )  # fmt: skip


def scipy_filter(problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float, delta: float) -> np.ndarray:
    origin = (problem.anchor[0] - problem.kh // 2, problem.anchor[1] - problem.kw // 2)
    mode = SCIPY_MODES[problem.border]
    images = [
        scipy.ndimage.correlate(i.astype(np.float64), kernel, mode=mode, cval=value, origin=origin) + delta for i in x
    ]
    return np.stack(images) if images else np.empty(x.shape)


# --- the oracle -----------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(conv_problems(), st.integers(0, 2**16))
def test_the_oracle_agrees_with_pytorch(problem: ConvProblem, seed: int) -> None:
    x, w, bias = arrays(problem, seed)
    got = oracle.conv2d(problem, x, w, bias)
    assert got.shape == problem.y_shape and got.dtype == np.float64
    assert oracle.relative_error(got, torch_conv2d(problem, x, w, bias)) < 1e-14


@settings(max_examples=120, deadline=None)
@given(filter_problems(), st.integers(0, 2**16))
def test_the_filter_oracle_agrees_with_scipy(problem: FilterProblem, seed: int) -> None:
    problem = replace(problem, dtype="float64")
    # SciPy 1.17 reads pixel -1 where a window begins 4, 6, ... lengths of the image before it
    reaches = zip(problem.anchor, (problem.h, problem.w), strict=True)
    assume(problem.border != "reflect" or all(before < 4 * length for before, length in reaches))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((problem.batch, problem.h, problem.w))
    kernel = rng.standard_normal((problem.kh, problem.kw))
    got = oracle.filter2d(problem, x, kernel, value=0.75, delta=-2)
    np.testing.assert_allclose(got, scipy_filter(problem, x, kernel, 0.75, -2), rtol=1e-12, atol=1e-12)


def test_the_filter_oracle_wraps_int32_around() -> None:
    problem = FilterProblem(1, 1, 3, 1, 2, (0, 0), "constant", "int32")
    x = np.array([[[2**31 - 1, 2**30, -(2**31)]]], np.int32)
    kernel = np.array([[3, 2**31 - 1]], np.int32)
    pixels = [2**31 - 1, 2**30, -(2**31), 5]
    sums = [3 * a + (2**31 - 1) * b - 7 for a, b in itertools.pairwise(pixels)]
    expected = [(v + 2**31) % 2**32 - 2**31 for v in sums]
    got = oracle.filter2d(problem, x, kernel, value=5, delta=-7)
    assert got.dtype == np.int32 and got.ravel().tolist() == expected


def test_border_indices_spell_the_borders_far_outside() -> None:
    expected = {
        "replicate": "aaaaaaaabcdddddddd",
        "reflect": "bcddcbaabcddcbaabc",
        "reflect101": "babcdcbabcdcbabcdc",
        "wrap": "bcdabcdabcdabcdabc",
    }
    position = np.arange(-7, 11)
    for border, text in expected.items():
        index, inside = oracle.border_indices(border, position, 4)
        assert "".join("abcd"[i] for i in index) == text, border
        assert inside.all()
    index, inside = oracle.border_indices("constant", position, 4)
    assert index[7:11].tolist() == [0, 1, 2, 3] and np.flatnonzero(inside).tolist() == [7, 8, 9, 10]
    assert oracle.border_indices("reflect101", position, 1)[0].tolist() == [0] * len(position)


def test_sequential_sum_is_made_in_order_and_rounded_at_each_step() -> None:
    problem = ConvProblem(n=1, c=2, h=2, w=2, k=1, r=2, s=2)
    x = np.array([1e8, 3, 4, -1e8, 5, 7, 1e8, -1e8], np.float32).reshape(1, 2, 2, 2)
    total = np.float32(0)
    for value in x.ravel():
        total = np.float32(total + value)
    got = oracle.sequential_float32(problem, x, np.ones((1, 2, 2, 2), np.float32))
    assert got.item() == total != x.astype(np.float64).sum()
    nhwc = replace(problem, layout="NHWC")
    again = oracle.sequential_float32(nhwc, np.ascontiguousarray(x.transpose(0, 2, 3, 1)), np.ones((1, 2, 2, 2)))
    assert again.item() == total


@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("layout", ["NHWC", "CHWN"])
def test_the_oracle_computes_the_same_numbers_in_every_layout(layout: Any, op: Any) -> None:
    order = {"NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}[layout]
    problem = ConvProblem(3, 4, 7, 6, 6, 3, 2, (2, 1), (1, 0, 2, 1), (1, 2), groups=2, bias=op == "fprop", op=op)
    x, w, bias = arrays(problem)
    other = replace(problem, layout=layout)
    moved = [np.ascontiguousarray(array.transpose(order)) for array in (x, w)]
    for function in (oracle.conv2d, oracle.sequential_float32):
        expected = function(problem, x, w, bias)
        got = function(other, *moved, bias)
        assert got.shape == other.y_shape and got.flags.c_contiguous and got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected.transpose(order))
    # on every image and channel, on some channels of one image, on one channel of it
    for most in (10**9, problem.flops // 9, 1):
        estimate = oracle.sequential_error(problem, x, w, bias, most)
        assert oracle.sequential_error(other, *moved, bias, most) == pytest.approx(estimate, rel=1e-12)


def test_relative_error() -> None:
    reference = np.array([3.0, 4.0])
    assert oracle.relative_error(np.array([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert oracle.relative_error(np.zeros(3), np.zeros(3)) == 0
    assert oracle.relative_error(np.ones(3), np.zeros(3)) == np.inf
    assert oracle.relative_error(np.empty((0, 2)), np.empty((0, 2))) == 0
    assert not oracle.relative_error(np.array([np.nan, 4.0]), reference) <= 1
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        oracle.relative_error(reference, np.zeros(3))


def test_the_bound_follows_the_precision_and_may_be_estimated_on_a_part() -> None:
    problem = ConvProblem(n=2, c=24, h=14, w=14, k=32, r=3, s=3, padding=(1, 1, 1, 1), groups=2)
    x, w, _ = arrays(problem)
    whole = oracle.sequential_error(problem, x, w)
    part = oracle.sequential_error(problem, x, w, most_products=problem.flops // 16)
    assert 5e-8 < whole < 1e-6 and part == pytest.approx(whole, rel=0.1) and part != whole
    assert oracle.error_bound(problem, x, w) == 4 * whole
    assert oracle.error_bound(replace(problem, precision="relaxed"), x, w) == oracle.RELAXED_BOUND
    assert oracle.error_bound(replace(problem, precision="tf32"), x, w) == oracle.TF32_BOUND
    assert oracle.error_bound(replace(problem, dtype="float64"), x, w) < 1e-14
    loose = oracle.error_bound(replace(problem, dtype="float64", precision="relaxed"), x, w)
    assert loose == oracle.RELAXED_BOUND * 2.0**-29
    ones = np.ones_like(x), np.ones_like(w)
    assert oracle.error_bound(problem, *ones) == 4 * oracle.FLOAT32_UNIT, "exact sums leave room for rounding"


# --- the algorithms -------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(conv_problems(), st.integers(0, 2**16), st.booleans())
def test_every_algorithm_keeps_its_precision(problem: ConvProblem, seed: int, positive: bool) -> None:
    x, w, bias = arrays(problem, seed, positive)
    inputs = [a.copy() for a in (x, w)]
    expected = oracle.conv2d(problem, x, w, bias)
    # A few outputs are a small sample of an error: be twice as patient with it.
    bound = oracle.error_bound(problem, x, w, bias) * (1 if expected.size > 500 else 2)
    for algorithm in CONV:
        if algorithm.reasons(problem, None):
            continue
        got = algorithm.run(problem, x, w, bias)
        assert got.shape == problem.y_shape and got.dtype == x.dtype and got.flags.c_contiguous, algorithm.name
        error = oracle.relative_error(got, expected)
        if not error <= bound:  # relu or a sum near zero may leave nothing to be relative to
            plain = replace(problem, bias=False, activation=None)
            scale = np.abs(oracle.conv2d(plain, np.abs(x), np.abs(w))).max()
            unit = oracle.FLOAT32_UNIT if problem.dtype == "float32" else 2.0**-53
            assert np.abs(got - expected).max() <= 8 * unit * scale, (algorithm.name, error, bound)
    assert np.array_equal(x, inputs[0]) and np.array_equal(w, inputs[1])


@cache
def expected_conv(problem: ConvProblem, positive: bool) -> tuple[np.ndarray, float]:
    """The answer and the error that it may have, for all algorithms: most of the time of the test."""
    inputs = arrays(problem, positive=positive)
    return oracle.conv2d(problem, *inputs), oracle.error_bound(problem, *inputs)


@pytest.mark.parametrize("positive", [False, True], ids=["zero-mean", "positive"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", CONV, ids=lambda a: a.name)
def test_layers_larger_than_a_block(algorithm: CpuAlgorithm, layout: Any, positive: bool) -> None:
    for problem in (
        ConvProblem(3, 40, 37, 41, 24, 3, 3, padding=(1, 1, 1, 1), layout=layout, bias=True, activation="relu"),
        ConvProblem(2, 64, 30, 71, 20, 5, 5, padding=(2, 1, 0, 3), layout=layout, groups=2),
        ConvProblem(19, 48, 7, 7, 40, 3, 3, padding=(1, 1, 1, 1), layout=layout, bias=True),
        ConvProblem(2, 32, 61, 83, 64, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1), layout=layout),
        ConvProblem(2, 64, 45, 45, 96, 1, 1, layout=layout, bias=True),
        ConvProblem(2, 96, 56, 56, 96, 3, 3, padding=(1, 1, 1, 1), groups=96, layout=layout),
        ConvProblem(1, 100, 40, 60, 70, 2, 7, padding=(0, 1, 3, 3), dilation=(3, 1), layout=layout),
    ):
        if algorithm.reasons(problem, None):
            continue
        x, w, bias = arrays(problem, positive=positive)
        expected, bound = expected_conv(problem, positive)
        assert oracle.relative_error(algorithm.run(problem, x, w, bias), expected) <= bound, problem


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("algorithm", CONV, ids=lambda a: a.name)
def test_special_values_spread_no_further_than_in_direct_order(algorithm: CpuAlgorithm, bad: float) -> None:
    problem = ConvProblem(1, 16, 11, 23, 3, 3, 3, padding=(1, 1, 1, 1))
    if algorithm.reasons(problem, None):  # one channel a group
        problem = replace(problem, k=48, groups=16)
    x, w, _ = arrays(problem)
    x[0, 5, 4, 9] = bad
    with np.errstate(all="raise"):
        got = algorithm.run(problem, x, w, None)
    with np.errstate(over="ignore"):
        expected = torch_conv2d(problem, x, w, None).astype(np.float32)
    touched = np.zeros(problem.y_shape, bool)
    touched[:, :, 3:6, 8:11] = True
    assert np.isfinite(got[~touched]).all()
    np.testing.assert_allclose(got[~touched], expected[~touched], rtol=1e-4, atol=1e-5)
    assert np.array_equal(np.isnan(got), np.isnan(expected)) and np.array_equal(np.isinf(got), np.isinf(expected))


@settings(max_examples=150, deadline=None)
@given(filter_problems(), st.integers(0, 2**16))
def test_every_filter_algorithm_agrees_with_the_oracle(problem: FilterProblem, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (problem.batch, problem.h, problem.w)
    if problem.dtype == "int32":
        x, kernel = (rng.integers(-(2**31), 2**31, s).astype(np.int32) for s in (shape, (problem.kh, problem.kw)))
    else:
        x, kernel = (rng.random(s).astype(problem.dtype) for s in (shape, (problem.kh, problem.kw)))
    expected = oracle.filter2d(problem, x, kernel, value=3, delta=-2)
    bound = oracle.filter_error_bound(problem, x, kernel, value=3, delta=-2)
    for algorithm in FILTERS:
        if algorithm.reasons(problem, None):
            continue
        got = algorithm.run(problem, x, kernel, value=3, delta=-2)
        assert got.shape == x.shape and got.dtype == x.dtype
        assert oracle.relative_error(got, expected) <= 2 * bound, algorithm.name


@cache
def strips(border: str) -> list[tuple[FilterProblem, np.ndarray, np.ndarray, np.ndarray, float]]:
    """Problems, images and filters, the answers and the errors that they may have."""
    rng = np.random.default_rng(5)
    big = rng.standard_normal((2, 300, 1111)).astype(np.float32)
    made = []
    for kh, kw in ((3, 3), (1, 31), (32, 5), (17, 20)):
        x = big[:, :, 3:1003]  # rows that lie apart
        kernel = rng.standard_normal((kh, kw)).astype(np.float32)
        problem = FilterProblem(2, 300, 1000, kh, kw, (kh // 2, kw - 1), border)
        expected = oracle.filter2d(problem, x, kernel, value=0.5, delta=1.5)
        made.append((problem, x, kernel, expected, oracle.filter_error_bound(problem, x, kernel, value=0.5, delta=1.5)))
    return made


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("algorithm", FILTERS, ids=lambda a: a.name)
def test_filters_on_images_larger_than_a_strip(algorithm: CpuAlgorithm, border: str) -> None:
    for problem, x, kernel, expected, bound in strips(border):
        got = algorithm.run(problem, x, kernel, value=0.5, delta=1.5)
        assert oracle.relative_error(got, expected) <= bound


def test_a_nan_pixel_touches_only_the_outputs_that_see_it() -> None:
    problem = FilterProblem(1, 40, 50, 3, 5, (1, 2), "replicate")
    x = np.random.default_rng(0).random((1, 40, 50)).astype(np.float32)
    x[0, 20, 30] = np.nan
    for algorithm in FILTERS:
        got = algorithm.run(problem, x, np.ones((3, 5), np.float32))
        rows, columns = np.nonzero(np.isnan(got[0]))
        assert (rows.min(), rows.max(), columns.min(), columns.max(), rows.size) == (19, 21, 28, 32, 15)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_blocks_cover_every_output_once(layout: Any) -> None:
    for n, h, bytes_each in ((3, 50, 10_000), (17, 6, 2000), (1, 1, 1), (5, 30, 100_000), (0, 9, 10)):
        problem = ConvProblem(n, 4, h, 33, 4, 1, 1, layout=layout)
        covered = np.zeros((n, problem.p), int)
        for block in layers.blocks(problem, bytes_each):
            covered[block.first : block.last, block.top : block.bottom] += 1
            assert block.images == 1 or block.rows == problem.p
        assert (covered == 1).all()


# --- what runs ------------------------------------------------------------------------------------------------------


def test_auto_obeys_the_precision_and_picks_the_cheap_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without machine code, which is quick for all of these."""
    for module in (channels, dense_code):
        monkeypatch.setattr(module, "widest", lambda: 0)
    layer = ConvProblem(8, 128, 28, 28, 128, 3, 3, padding=(1, 1, 1, 1))
    assert choose(layer, None).algorithm.name == "winograd1d"
    assert choose(replace(layer, precision="ieee"), None).algorithm.name == "im2col"
    assert "'ieee' was requested" in by_name("winograd1d").reasons(replace(layer, precision="ieee"), None)[0]
    assert choose(replace(layer, r=1, s=1), None).algorithm.name == "im2col"
    assert choose(replace(layer, stride=(2, 2)), None).algorithm.precision == "ieee"
    assert choose(replace(layer, groups=128, layout="NHWC"), None).algorithm.name == "direct"
    for problem in (layer, replace(layer, stride=(2, 2)), replace(layer, groups=128), replace(layer, op="dgrad")):
        # computed in NCHW, and chosen so
        images_last = replace(problem, layout="CHWN")
        assert [a.reasons(images_last, None) for a in CONV] == [a.reasons(problem, None) for a in CONV]
        assert choose(images_last, None).algorithm is choose(problem, None).algorithm
        able = [a for a in CONV if not a.reasons(problem, None)]
        assert [a.cost(images_last) for a in able] == [a.cost(problem) for a in able]
    image = FilterProblem(1, 512, 512, 5, 5, (2, 2))
    assert choose(image, None).algorithm.name == ("opencv" if opencv.opencv() else "banded")
    assert choose(replace(image, channels=5), None).algorithm.name == "banded"
    assert choose(replace(image, kh=31, kw=31), None).algorithm.name == "transforms"
    assert choose(replace(image, dtype="int32"), None).algorithm.name == "taps"


@pytest.mark.parametrize("algorithm", CPU_ALGORITHMS, ids=lambda a: a.name)
def test_reasons_name_what_cannot_be_done(algorithm: CpuAlgorithm) -> None:
    if algorithm.solves == "conv2d":
        problem = ConvProblem(1, 8, 9, 9, 8, 3, 3)
        refused = "wgrad" in " ".join(algorithm.reasons(replace(problem, op="wgrad"), None))
        assert refused != (algorithm.name in ("im2col", "slices"))
    else:
        reasons = algorithm.reasons(FilterProblem(1, 9, 9, 3, 3, (1, 1), dtype="int32"), None)
        if algorithm.name == "opencv" and not opencv.opencv():
            assert "OpenCV" in reasons[0]
            return
        refuses = algorithm.name in ("banded", "opencv", "transforms")
        assert [refuses] == ["int32" in reason for reason in reasons or [""]]


# --- the papers' statements -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("r", "stride", "dilation"), [(3, 1, 1), (2, 2, 1), (3, 2, 3), (1, 1, 1), (5, 3, 1)])
def test_im2win_element_by_element(r: int, stride: int, dilation: int) -> None:
    n, c, p, width = 2, 3, 4, 5
    height = (p - 1) * stride + (r - 1) * dilation + 1
    x = np.random.default_rng(1).random((n, c, height, width))
    got = im2win(x, r, p, stride, dilation)
    last = im2win_channels_last(np.ascontiguousarray(x.transpose(0, 2, 3, 1)), r, p, stride, dilation)
    assert got.shape == (n, c, p, width * r) and last.shape == (n, p, width * r * c)
    for i, j, row, column, u in np.ndindex(n, c, p, width, r):
        assert got[i, j, row, column * r + u] == x[i, j, row * stride + u * dilation, column]
        assert last[i, row, (column * r + u) * c + j] == x[i, j, row * stride + u * dilation, column]


# --- speed ----------------------------------------------------------------------------------------------------------


def ratio_to(peer: Callable[[], Any], ours: Callable[[], Any], goal: float) -> float:
    """Least processor time of ours over that of the peer, taken in turns for as long as the goal is missed.

    Other programs take time of the clock, and next to none of this process's: so nothing is skipped where they run.
    BLAS has one thread, as several would spin while they wait for one that has no core.
    """
    best_peer = best_ours = float("inf")
    start, turn = time.perf_counter(), 0
    with threadpool_limits(1):
        while turn < 3 or (best_ours > goal * best_peer and time.perf_counter() - start < 8):
            turn += 1
            begin = time.process_time()
            peer()
            best_peer = min(best_peer, time.process_time() - begin)
            begin = time.process_time()
            ours()
            best_ours = min(best_ours, time.process_time() - begin)
    return best_ours / best_peer


LARGE_LAYERS = {
    "3x3-64-56": ConvProblem(8, 64, 56, 56, 64, 3, 3, padding=(1, 1, 1, 1)),
    "3x3-128-28": ConvProblem(16, 128, 28, 28, 128, 3, 3, padding=(1, 1, 1, 1)),
    "3x3-256-28": ConvProblem(8, 256, 28, 28, 256, 3, 3, padding=(1, 1, 1, 1)),
    "1x1-64-56": ConvProblem(8, 64, 56, 56, 256, 1, 1),
    "3x3-128-56-stride2": ConvProblem(8, 128, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1, 1, 1)),
    "5x5-64-56": ConvProblem(8, 64, 56, 56, 64, 5, 5, padding=(2, 2, 2, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("layer", LARGE_LAYERS)
def test_large_layers_stay_near_pytorch(layer: str, layout: Any) -> None:
    torch = pytest.importorskip("torch")
    problem = replace(LARGE_LAYERS[layer], layout=layout)
    x, w, _ = arrays(problem)
    tx, tw = torch.from_numpy(x), torch.from_numpy(w)
    if layout == "NHWC":
        tx, tw = tx.permute(0, 3, 1, 2), tw.permute(0, 3, 1, 2)
    algorithm = choose(problem, None).algorithm
    top, _, left, _ = problem.padding

    def peer() -> None:
        with torch.no_grad():
            torch.nn.functional.conv2d(tx, tw, None, problem.stride, (top, left))

    ratio = ratio_to(peer, lambda: algorithm.run(problem, x, w, None), goal=4)
    assert ratio <= 4, f"{algorithm.name} takes {ratio:.2f} times PyTorch's time"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 5, 9, 15])
def test_filters_stay_near_scipy(size: int) -> None:
    rng = np.random.default_rng(0)
    x, kernel = rng.random((1, 1024, 2048)).astype(np.float32), rng.random((size, size)).astype(np.float32)
    problem = FilterProblem(1, 1024, 2048, size, size, (size // 2, size // 2), "reflect")
    algorithm = choose(problem, None).algorithm
    ratio = ratio_to(lambda: scipy.ndimage.correlate(x[0], kernel), lambda: algorithm.run(problem, x, kernel), goal=1)
    assert ratio <= 1.5, f"{algorithm.name} takes {ratio:.2f} times SciPy's time"
