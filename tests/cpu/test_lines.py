"""Filters along one axis, in two passes, and sums over boxes, against scipy.ndimage; threads over blocks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
from hypothesis import given, settings
from hypothesis import strategies as st

from leanconv.cpu import lines, planes
from leanconv.cpu.lines import correlate_line
from leanconv.cpu.planes import correlate_plane
from leanconv.cpu.separable import box, box_line, correlate_separable
from leanconv.images.borders import BORDERS, SCIPY_NAMES
from leanconv.runtime import env
from leanconv.runtime.threads import over_blocks

#: few and many lines, long and short, in memory and across
SHAPES = ((1,), (7,), (5000,), (3, 2000), (90, 70), (4, 33, 5), (40, 300), (2, 3, 4, 5), (600, 33, 2))


@pytest.fixture(autouse=True, scope="module")
def several_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANCONV_THREADS", "3")
        patch.setattr(lines, "LEAST_WORK", 1)
        patch.setattr(planes, "LEAST_WORK", 1)
        yield


@st.composite
def problems(draw: st.DrawFn, axes: int) -> dict[str, Any]:
    shape = draw(st.sampled_from([shape for shape in SHAPES if len(shape) >= axes]))
    along = draw(st.permutations(range(len(shape))).map(lambda order: tuple(order[:axes])))
    if axes == 2 and draw(st.booleans()):
        along = (-2, -1)
    sizes = [draw(st.sampled_from((1, 2, 3, 8, 12, 30, 200, 500))) for _ in along]
    return {
        "rng": np.random.default_rng(draw(st.integers(0, 99))), "shape": shape, "axes": along, "sizes": sizes,
        "anchor": [draw(st.integers(0, size - 1)) for size in sizes], "mode": draw(st.sampled_from(tuple(SCIPY_NAMES))),
        "dtype": draw(st.sampled_from(("float32", "float64", "uint8"))),
    }  # fmt: skip


def expected(x: np.ndarray, rows: list[np.ndarray], p: dict[str, Any], value: float) -> np.ndarray:
    y = x.astype(np.float64)
    for axis, row, anchor in zip(p["axes"], rows, p["anchor"], strict=True):
        origin = anchor - len(row) // 2
        y = scipy.ndimage.correlate1d(y, row, axis, mode=p["mode"], cval=value, origin=origin)
        value *= row.sum()
    return y


def check(got: np.ndarray, want: np.ndarray, x: np.ndarray, scale: float, sums: str) -> None:
    assert got.dtype == sums
    unit = 2.0**-20 if sums == "float32" else 2.0**-44
    np.testing.assert_allclose(got, want, rtol=0, atol=unit * scale * max(2.0, float(np.abs(x).max())))


def data(p: dict[str, Any]) -> np.ndarray:
    return (p["rng"].standard_normal(p["shape"]) * 20 % 200).astype(p["dtype"])


@settings(max_examples=120, deadline=None)
@given(problems(1), st.sampled_from(("float32", "float64")))
def test_lines_are_scipys(p: dict[str, Any], sums: str) -> None:
    x, (row,) = data(p), [p["rng"].standard_normal(size) for size in p["sizes"]]
    border = SCIPY_NAMES[p["mode"]]
    got = correlate_line(x, row, p["axes"][0], p["anchor"][0], border, 1.5, sums=sums)
    check(got, expected(x, [row], p, 1.5), x, float(np.abs(row).sum()), sums)
    got = box_line(x, p["sizes"][0], p["axes"][0], p["anchor"][0], border, 1.5, sums=sums, divisor=3)
    check(got, expected(x, [np.ones(len(row))], p, 1.5) / 3, x, len(row), sums)


@settings(max_examples=120, deadline=None)
@given(problems(2), st.sampled_from(("float32", "float64")))
def test_two_passes_are_scipys(p: dict[str, Any], sums: str) -> None:
    x, rows = data(p), [p["rng"].standard_normal(size) for size in p["sizes"]]
    border = SCIPY_NAMES[p["mode"]]
    got = correlate_separable(x, rows, p["axes"], p["anchor"], border, 1.5, sums=sums)
    check(got, expected(x, rows, p, 1.5), x, float(np.prod([np.abs(row).sum() for row in rows])), sums)
    got = box(x, p["sizes"], p["axes"], p["anchor"], border, 1.5, sums=sums, divisor=7)
    ones = [np.ones(size) for size in p["sizes"]]
    check(got, expected(x, ones, p, 1.5) / 7, x, float(np.prod(p["sizes"])), sums)


@pytest.mark.parametrize("size", [3, 40, 700])
@pytest.mark.parametrize("axis", [0, 1])
def test_inf_and_nan_reach_their_windows_only(axis: int, size: int) -> None:
    x = np.random.default_rng(1).random((900, 901)).astype(np.float32)
    x[500, 300], x[100, 650] = np.inf, np.nan
    for got in (correlate_line(x, np.full(size, 0.5), axis), box_line(x, size, axis)):
        reached = ~np.isfinite(scipy.ndimage.correlate1d(x, np.ones(size), axis, mode="mirror"))
        assert np.array_equal(~np.isfinite(got), reached) and 0 < reached.sum() <= 4 * size
    kernel = np.full((min(size, 40), 3), 0.5)
    got = correlate_plane(x, kernel)
    reached = ~np.isfinite(scipy.ndimage.correlate(x, kernel, mode="mirror"))
    assert np.array_equal(~np.isfinite(got), reached) and 0 < reached.sum() <= 2 * kernel.size
    x[...] = 1  # a transform has no error beside what is far larger
    assert np.array_equal(box_line(x, size, axis), np.full(x.shape, size, np.float32))


def test_outputs_may_be_the_input_strided_and_integers() -> None:
    rng = np.random.default_rng(2)
    x = rng.random((60, 80)).astype(np.float32)
    row = rng.random(9)
    want = correlate_line(x, row, 0)
    wide = np.zeros((80, 120), np.float32).T[::2]
    assert correlate_line(x, row, 0, out=wide) is wide and np.array_equal(wide, want)
    assert np.array_equal(correlate_separable(x, [row, [1.0]], out=x.copy()), correlate_separable(x, [row, [1.0]]))
    again = x.copy()
    assert correlate_line(again, row, 0, out=again) is again and np.array_equal(again, want)
    narrow = np.zeros(x.shape, np.uint8)
    correlate_line(np.array([[-300.0, 0.5, 1.5, 2.5, 255.5, 1e9, np.nan]], np.float32), [1.0], out=narrow[:1, :7])
    assert narrow[0, :7].tolist() == [0, 0, 2, 2, 255, 255, 0]
    whole = np.zeros(4, np.int32)
    correlate_line(np.array([3e9, -3e9, 2147483520, 7], np.float32), [1.0], out=whole)
    assert whole.tolist() == [2**31 - 1, -(2**31), 2147483520, 7]
    assert correlate_line(np.zeros((0, 4)), [1.0, 2.0]).shape == (0, 4)
    assert float(correlate_line(np.float32(3) * np.ones(()), [2.0])) == 6


def test_bits_do_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(3).random((300, 700)).astype(np.float32)
    calls = [
        lambda: correlate_line(x, np.arange(40.0), 0), lambda: correlate_line(x, np.arange(300.0), 1),
        lambda: correlate_separable(x, [np.arange(30.0)] * 2), lambda: box(x, (50, 60)),
    ]  # fmt: skip
    several = [call() for call in calls]
    monkeypatch.setenv("LEANCONV_THREADS", "1")
    for call, result in zip(calls, several, strict=True):
        assert np.array_equal(call(), result)


def test_blocks_are_done_once_by_several_threads() -> None:
    done: list[int] = []
    names = set()
    both = threading.Barrier(3, timeout=20)

    def work(item: int) -> None:
        if item < 3:
            both.wait()  # passes only where three threads are at work
        done.append(item)
        names.add(threading.current_thread().name)
        over_blocks(lambda inner: names.add(threading.current_thread().name), range(2), 3)

    over_blocks(work, range(50), 3)
    assert sorted(done) == list(range(50)) and len(names) == 3
    with pytest.raises(ZeroDivisionError):
        over_blocks(lambda item: 1 // (item - 7), range(50), 3)
    over_blocks(done.append, range(2), 3)
    assert len(done) == 52


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_new_process_has_threads_of_its_own() -> None:
    over_blocks(lambda item: None, range(4), 2)
    child = os.fork()
    if child == 0:
        over_blocks(lambda item: None, range(4), 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_the_variable_is_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANCONV_THREADS", "5")
    assert env.threads() == 5 and not env.mistakes()
    monkeypatch.setenv("LEANCONV_THREADS", "none")
    with pytest.warns(RuntimeWarning, match="LEANCONV_THREADS='none' is no number of threads"):
        assert env.threads() >= 1
    assert len(env.mistakes()) == 1
    monkeypatch.delenv("LEANCONV_THREADS")
    assert env.threads() >= 1


def extend(x: np.ndarray, axis: int, sides: tuple[int, int], mode: str) -> np.ndarray:
    """numpy.pad along an axis, by indices: NumPy 1's takes wrong pixels where "symmetric" goes on for long."""
    n, (before, after) = x.shape[axis], sides
    at = np.arange(-before, n + after)
    period = {"symmetric": 2 * n, "reflect": max(1, 2 * n - 2), "wrap": n}.get(mode, n)
    turned = {"symmetric": np.minimum(at % period, period - 1 - at % period), "wrap": at % period,
              "reflect": np.minimum(at % period, period - at % period)}.get(mode, at.clip(0, n - 1))  # fmt: skip
    taken = x.take(turned, axis)
    if mode == "constant":
        outside = ((at < 0) | (at >= n)).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        return np.where(outside, 1.5, taken)
    return taken


@pytest.mark.parametrize("mode", [border.numpy for border in BORDERS.values()])
@given(x=st.integers(1, 5), before=st.integers(0, 4), after=st.integers(0, 4))
def test_borders_are_extended_as_numpy_does(x: int, before: int, after: int, mode: str) -> None:
    data, more = np.arange(1.0, x + 1), {"constant_values": 1.5} if mode == "constant" else {}
    sides = min(before, max(1, x - 1)), min(after, max(1, x - 1))
    assert np.array_equal(extend(data, 0, sides, mode), np.pad(data, sides, mode=mode, **more))  # type: ignore[call-overload]


@settings(max_examples=100, deadline=None)
@given(problems(2), st.sampled_from(("float32", "float64")))
def test_planes_are_scipys(p: dict[str, Any], sums: str) -> None:
    sizes = [min(size, 40) for size in p["sizes"]]
    x, kernel = data(p), p["rng"].standard_normal(sizes)
    anchor = tuple(min(at, size - 1) for at, size in zip(p["anchor"], sizes, strict=True))
    got = correlate_plane(x, kernel, anchor, SCIPY_NAMES[p["mode"]], 1.5, sums=sums)
    border, planes_of_x = BORDERS[SCIPY_NAMES[p["mode"]]], x.astype(np.float64).reshape(-1, *x.shape[-2:])
    # NOTE: SciPy 1.17's correlate reads other pixels for "reflect" where the filter reaches beyond 4 times the image
    reach = [(at, size - 1 - at) for at, size in zip(anchor, sizes, strict=True)]
    extended = planes_of_x
    for axis, sides in enumerate(reach, 1):
        extended = extend(extended, axis, sides, border.numpy)
    windows = np.lib.stride_tricks.sliding_window_view(extended, sizes, axis=(1, 2))
    want = np.einsum("bijuv,uv->bij", windows, kernel).reshape(x.shape)
    check(got, want, x, float(np.abs(kernel).sum()), sums)
