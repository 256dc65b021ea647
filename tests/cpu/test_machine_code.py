"""Depthwise layers and layers without groups by machine code, on registers of both widths; and without it."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from leanconv.cpu import box_code, channels, dense_code, machine_code, oracle, transpose_code
from leanconv.cpu.direct import Direct
from leanconv.options import LAYOUTS
from leanconv.problem import ConvProblem
from tests.cpu.test_reference_blocks import some_layers
from tests.cpu_engine import arrays

#: Bytes of the registers that this machine has.
WIDTHS = [width for width in (32, 64) if width <= machine_code.widest()]


def layers_of_channels(count: int) -> Iterator[ConvProblem]:
    """Of any number of channels: fewer than a vector has, whole vectors, and some that are left."""
    rng = np.random.default_rng(7)
    for problem in some_layers(count, one_channel=True):
        c = int(rng.choice([1, 3, 8, 16, 17, 20, 24, 32, 40]))
        layout: Any = "NHWC" if rng.integers(2) else "NCHW"
        dtype: Any = "float32" if rng.integers(4) else "float64"
        yield replace(problem, c=c, k=c, groups=c, layout=layout, dtype=dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cut", [1 << 10, 1 << 20], ids=["cut", "whole"])
def test_depthwise_layers(width: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on all sides, strides, dilations, several images, bias and activation; each output is written."""
    monkeypatch.setattr(channels, "widest", lambda: width)
    monkeypatch.setattr(transpose_code, "widest", lambda: width)
    monkeypatch.setattr(channels, "BUFFER_BYTES", cut)
    channels._cuts.cache_clear()
    for problem in layers_of_channels(150):
        x, w, bias = arrays(problem)
        y = np.full(problem.y_shape, np.nan, problem.dtype)
        assert channels.compute(problem, x, w, bias, y), problem
        error = 3e-5 if problem.dtype == "float32" else 1e-12
        np.testing.assert_allclose(y, oracle.conv2d(problem, x, w, bias), rtol=0, atol=error, err_msg=str(problem))
    channels._cuts.cache_clear()


def layers_of_filters(count: int) -> Iterator[ConvProblem]:
    """Channels that are unrolled and some that are left; even and odd numbers of vectors of filters, whole and not."""
    rng = np.random.default_rng(8)
    for problem in some_layers(count):
        c, k = int(rng.choice([1, 3, 4, 5, 8, 17])), int(rng.choice([8, 9, 16, 17, 31, 32, 40, 48, 50]))
        layout: Any = "NHWC" if rng.integers(2) else "NCHW"
        dtype: Any = "float32" if rng.integers(4) else "float64"
        yield replace(problem, c=c, k=k, groups=1, layout=layout, dtype=dtype)
    # so many taps that channels are not unrolled beside padding; loops over taps, over channels inside and as one
    yield ConvProblem(1, 5, 2, 30, 18, 2, 11, padding=(1, 0, 4, 6), layout="NHWC")
    yield ConvProblem(2, 4, 3, 40, 33, 1, 15, padding=(0, 0, 7, 7), stride=(1, 2), bias=True)
    for layout in LAYOUTS[:2]:
        yield ConvProblem(1, 3, 2, 90, 48, 1, 31, padding=(0, 0, 15, 15), layout=layout)
        yield ConvProblem(1, 9, 1, 120, 16, 1, 21, padding=(0, 0, 20, 20), dilation=(1, 2), layout=layout)
        yield ConvProblem(1, 1, 1, 200, 8, 1, 65, padding=(0, 0, 32, 32), layout=layout)
        # one tap: the pixels of all images as one row
        yield ConvProblem(2, 20, 5, 7, 51, 1, 1, bias=True, layout=layout)
        yield ConvProblem(1, 70, 33, 40, 130, 1, 1, layout=layout)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("cut", [1 << 10, 1 << 20], ids=["cut", "whole"])
def test_layers_without_groups(width: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All filters at a time and some of them, whose weights are kept for further rows and images, or not."""
    monkeypatch.setattr(dense_code, "widest", lambda: width)
    monkeypatch.setattr(transpose_code, "widest", lambda: width)
    for name in ("STRIP_BYTES", "CACHED", "BLOCK_BYTES", "PIXEL_BYTES"):
        monkeypatch.setattr(dense_code, name, cut)
    dense_code._cuts.cache_clear()
    for problem in layers_of_filters(120):
        x, w, bias = arrays(problem)
        y = np.full(problem.y_shape, np.nan, problem.dtype)
        assert dense_code.compute(problem, x, w, bias, y), problem
        error = 1e-4 if problem.dtype == "float32" else 1e-12
        np.testing.assert_allclose(y, oracle.conv2d(problem, x, w, bias), rtol=0, atol=error, err_msg=str(problem))
    dense_code._cuts.cache_clear()


@pytest.mark.parametrize("width", WIDTHS)
def test_small_layers_are_ready(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls one after another leave nothing behind; arrays that lie apart, as views, are taken too."""
    monkeypatch.setattr(dense_code, "widest", lambda: width)
    ready = 0
    for problem in layers_of_filters(100):
        small = dense_code.Small(problem, dense_code.lanes_for(problem)) if problem.layout == "NHWC" else None
        if small is None or not small.is_ready:
            continue
        ready += 1
        for seed in range(3):
            x, w, bias = arrays(problem, seed)
            if seed == 2:
                x, w = (np.asfortranarray(each) for each in (x, w))
            expected, error = oracle.conv2d(problem, x, w, bias), 1e-4 if problem.dtype == "float32" else 1e-12
            got = small.compute(x, w, bias)
            np.testing.assert_allclose(got, expected, rtol=0, atol=error, err_msg=str(problem))
    assert ready > 5


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_matrices_are_transposed(width: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles and tiles that overlap, wherever rows begin; nothing is written beside them."""
    monkeypatch.setattr(transpose_code, "widest", lambda: width)
    rng = np.random.default_rng(3)
    shapes = [(1, 16, 16), (2, 17, 40), (3, 50, 33), (2, 16, 130), (1, 131, 16), (1, 8, 8), (2, 9, 7), (1, 64, 48)]
    for v, m, n in shapes:
        for at in range(0, 17, 3):
            source = rng.standard_normal((v, m, n + 5)).astype(dtype)[..., at % 5 : at % 5 + n]
            memory = np.full(at + v * (n + 1) * (m + 2), 7, dtype)
            into = memory[at:].reshape(v, n + 1, m + 2)
            transpose_code.copy_transposed(source, into[:, :n, :m])
            np.testing.assert_array_equal(into[:, :n, :m], source.swapaxes(1, 2))
            assert (into[:, n:] == 7).all() and (into[..., m:] == 7).all() and (memory[:at] == 7).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_neighbours(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end with the rows and that do not; a NaN and a huge number reach their windows alone."""
    monkeypatch.setattr(box_code, "widest", lambda: width)
    rng = np.random.default_rng(4)
    for n, columns, size in [(5, 8, 7), (14, 9, 7), (15, 40, 7), (1, 33, 6), (100, 100, 9), (8, 64, 4), (300, 71, 101)]:
        extended = rng.standard_normal((n + size - 1, columns))
        extended[n // 2, 2], extended[n // 3, 5] = np.nan, 1e30
        windows = np.lib.stride_tricks.sliding_window_view(extended, size, 0)
        bound = size * 2.0**-53 * np.abs(windows).sum(-1)
        for turned in (False, True):
            result = np.full((columns, n) if turned else (n, columns), 7.0)
            given = np.ascontiguousarray(extended.T) if turned else extended
            assert (box_code.sums_along if turned else box_code.sums_down)(given, result, size)
            error, expected = (result.T if turned else result) - windows.sum(-1), np.isnan(windows).any(-1)
            np.testing.assert_array_equal(np.isnan(error), expected)
            assert (np.abs(error)[~expected] <= 2 * bound[~expected]).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_longer_than_a_tile_and_sums_in_direct_order(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles with and without a border; the bits are those of a chain of multiply-adds, each rounded once."""
    monkeypatch.setattr(channels, "widest", lambda: width)
    problem = ConvProblem(1, 16, 3, 75, 16, 2, 3, padding=(0, 1, 1, 2), groups=16, layout="NHWC")
    x, w, _ = arrays(problem)
    y = np.empty(problem.y_shape, np.float32)
    assert channels.compute(problem, x, w, None, y)
    padded = np.pad(x, ((0, 0), (0, 1), (1, 2), (0, 0))).astype(np.longdouble)
    monkeypatch.setattr(dense_code, "widest", lambda: width)
    dense = replace(problem, groups=1)
    filters, every = np.zeros(dense.w_shape, np.float32), np.empty(problem.y_shape, np.float32)
    for k in range(16):
        filters[k, :, :, k] = w[k, :, :, 0]
    assert dense_code.compute(dense, x, filters, None, every)
    np.testing.assert_array_equal(every, y)
    expected = np.zeros(problem.y_shape, np.float32)
    for r in range(2):
        for s in range(3):
            seen = padded[:, r : r + problem.p, s : s + problem.q]
            expected = (expected + seen * w[:, r, s, 0]).astype(np.float32)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_what_is_not_finite_stays_in_its_channel_and_its_windows(layout: Any) -> None:
    problem = ConvProblem(1, 20, 7, 9, 20, 3, 3, padding=(1, 1, 1, 1), groups=20, layout=layout)
    x, w, _ = arrays(problem)
    order = (0, 1, 2, 3) if layout == "NCHW" else (0, 3, 1, 2)
    x.transpose(order)[0, 3, 4, 5] = np.nan
    seen = np.zeros((1, 20, 7, 9), bool)
    seen[0, 3, 3:6, 4:7] = True
    np.testing.assert_array_equal(np.isnan(Direct().run(problem, x, w)).transpose(order), seen)


def test_channels_of_a_part_lie_apart() -> None:
    """As threads see them: some channels, rows and columns of a larger array."""
    whole = np.random.default_rng(1).standard_normal((2, 9, 12, 64)).astype(np.float32)
    problem = ConvProblem(2, 40, 7, 8, 40, 3, 3, padding=(1, 0, 2, 1), groups=40, layout="NHWC")
    x, (_, w, _) = whole[:, 1:8, 2:10, 8:48], arrays(problem)
    y = np.empty(problem.y_shape, np.float32)
    if channels.compute(problem, x, w, None, y):
        np.testing.assert_allclose(y, oracle.conv2d(problem, np.ascontiguousarray(x), w), rtol=0, atol=3e-5)
    else:
        assert not WIDTHS


GUARDED = """
from dataclasses import replace
import numpy as np
from leanconv.cpu import channels, dense_code, oracle
from leanconv.options import LAYOUTS
from leanconv.problem import ConvProblem
from tests.cpu.test_machine_code import guarded
for c, q in ((16, 5), (40, 33), (17, 14), (31, 3)):
    problem = ConvProblem(1, c, 4, q, c, 3, 3, padding=(1, 2, 3, 2), groups=c, layout="NHWC")
    x, w, y = (guarded(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    x[...], w[...] = np.arange(x.size).reshape(x.shape) % 7, np.arange(w.size).reshape(w.shape) % 5
    assert channels.compute(problem, x, w, None, y)
    np.testing.assert_array_equal(y, oracle.conv2d(problem, x.copy(), w.copy()))
    for k in (16, 50, 31):
        problem = replace(problem, groups=1, k=k)
        w, y = (guarded(shape) for shape in (problem.w_shape, problem.y_shape))
        w[...] = np.arange(w.size).reshape(w.shape) % 5
        assert dense_code.compute(problem, x, w, None, y)
        np.testing.assert_array_equal(y, oracle.conv2d(problem, x.copy(), w.copy()))
print("nothing outside")
"""


def guarded(shape: tuple[int, ...]) -> np.ndarray:
    """An array between two pages that end a process that touches them; one of them is next to it."""
    count = int(np.prod(shape)) * 4
    pages = -(-count // mmap.PAGESIZE) + 2
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for page in (0, pages - 1):
        assert protect(first + page * mmap.PAGESIZE, mmap.PAGESIZE, 0) == 0
    return np.frombuffer(memory, np.float32, count // 4, (pages - 1) * mmap.PAGESIZE - count).reshape(shape)


@pytest.mark.skipif(not WIDTHS, reason="there is no machine code for this processor")
def test_nothing_is_touched_outside_of_the_arrays() -> None:
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "nothing outside\n"), done.stderr


def test_a_system_that_forbids_code_gets_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(code: bytes) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(machine_code, "_function", forbidden)
    made = machine_code.kernel, dense_code.kernel, transpose_code.kernel, box_code.kernel
    caches = (*made, channels._rows, channels._cuts, dense_code._rows, transpose_code.copy_of, box_code._runs)
    for cached in caches:
        cached.cache_clear()
    try:
        for layout in LAYOUTS[:2]:
            problem = ConvProblem(1, 24, 6, 7, 24, 3, 3, padding=(1, 1, 1, 1), groups=24, layout=layout)
            x, w, _ = arrays(problem)
            assert not channels.compute(problem, x, w, None, np.empty(problem.y_shape, np.float32))
            np.testing.assert_allclose(Direct().run(problem, x, w), oracle.conv2d(problem, x, w), rtol=0, atol=3e-5)
            problem = replace(problem, groups=1)
            x, w, _ = arrays(problem)
            assert not dense_code.compute(problem, x, w, None, np.empty(problem.y_shape, np.float32))
            assert not box_code.sums_down(np.ones((20, 20)), np.empty((11, 20)), 10)
            np.testing.assert_allclose(Direct().run(problem, x, w), oracle.conv2d(problem, x, w), rtol=0, atol=1e-4)
    finally:
        for cached in caches:
            cached.cache_clear()


def test_long_filters_take_no_code_without_end() -> None:
    """A row of many taps with much padding is left to NumPy."""
    problem = ConvProblem(1, 16, 1, 900, 16, 1, 801, padding=(0, 0, 400, 400), groups=16, layout="NHWC")
    x, w, _ = arrays(problem)
    assert not channels.compute(problem, x, w, None, np.empty(problem.y_shape, np.float32))


def test_numpy_may_be_told_to_do_without() -> None:
    """One switch for its own loops and for this code. Not every version knows all of these names."""
    say = "from leanconv.cpu.machine_code import widest; print(widest())"
    given = {**os.environ, "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX2 AVX512F"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", say], capture_output=True, text=True, env=given)
    assert done.stdout == "0\n", done.stderr
