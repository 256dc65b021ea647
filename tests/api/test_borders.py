"""The table of borders is what kernels, NumPy, SciPy, PyTorch and OpenCV do."""

from __future__ import annotations

import re
from typing import Any, get_args

import numpy as np
import pytest

import leanconv
from leanconv import options
from leanconv.images.borders import (
    ALIASES,
    BORDERS,
    OPENCV_NUMBERS,
    SCIPY_NAMES,
    Border,
    BorderName,
    OpencvName,
    ScipyMode,
    runs,
)
from leanconv.runtime.compile import INCLUDE

LINE = np.array([1, 2, 3, 4], np.float32)
VALUE = 9
each_border = pytest.mark.parametrize("border", BORDERS.values(), ids=[*BORDERS])


def extended(border: Border) -> list[float]:
    """The line with two pixels more on either side, as ``reads`` says."""
    pixels = dict(zip("abcdv", (*LINE.tolist(), VALUE), strict=True))
    return [pixels[letter] for letter in border.reads.replace("|", "")]


def neighbours(y: Any, z: Any) -> list[float]:
    """The extended line from what lies two pixels to the left and two to the right of each."""
    return [*np.asarray(y).ravel().tolist()[:2], *LINE.tolist(), *np.asarray(z).ravel().tolist()[-2:]]


LEFT, RIGHT = np.array([[1, 0, 0, 0, 0]], np.float32), np.array([[0, 0, 0, 0, 1]], np.float32)


@each_border
def test_filter2d_reads_what_the_table_says(border: Border) -> None:
    for name in (border.name, *border.scipy, *border.opencv, *(f"cv2.{name}" for name in border.opencv)):
        y, z = (leanconv.filter2d(LINE[None], kernel, border=name, value=VALUE) for kernel in (LEFT, RIGHT))
        assert neighbours(y, z) == extended(border), name


@each_border
def test_numpy_pads_so(border: Border) -> None:
    options = {"constant_values": VALUE} if border.name == "constant" else {}
    assert np.pad(LINE, 2, mode=border.numpy, **options).tolist() == extended(border)  # type: ignore[call-overload]


@each_border
def test_pytorch_pads_so_where_it_can(border: Border) -> None:
    torch = pytest.importorskip("torch")
    if border.torch is None:
        pytest.skip("PyTorch has no such mode")
    value = VALUE if border.name == "constant" else None
    y = torch.nn.functional.pad(torch.from_numpy(LINE)[None, None], (2, 2), border.torch, value)
    assert y.flatten().tolist() == extended(border)


@each_border
def test_scipy_calls_them_so(border: Border) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    for mode in border.scipy:
        y, z = (ndimage.correlate(LINE[None], kernel, mode=mode, cval=VALUE) for kernel in (LEFT, RIGHT))
        assert neighbours(y, z) == extended(border), mode
        assert SCIPY_NAMES[mode] == border.name


@each_border
def test_opencv_calls_them_so(border: Border) -> None:
    cv2 = pytest.importorskip("cv2")
    for name in border.opencv:
        y = cv2.copyMakeBorder(LINE[None], 0, 0, 2, 2, getattr(cv2, name), value=VALUE)
        assert y.ravel().tolist() == extended(border), name


@each_border
def test_opencvs_numbers(border: Border) -> None:
    for number in (border.number, np.int32(border.number)):
        y, z = (leanconv.filter2d(LINE[None], kernel, border=number, value=VALUE) for kernel in (LEFT, RIGHT))
        assert neighbours(y, z) == extended(border)
    cv2 = pytest.importorskip("cv2")
    assert {getattr(cv2, name) for name in border.opencv} == {border.number}


@pytest.mark.parametrize("kh, kw", [(3, 3), (2, 4), (1, 5)])
def test_minus_one_is_the_middle_as_opencvs_anchor(kh: int, kw: int) -> None:
    image = np.arange(42, dtype=np.float32).reshape(6, 7)
    kernel = np.arange(1, 1 + kh * kw, dtype=np.float32).reshape(kh, kw)
    middle = leanconv.filter2d(image, kernel)
    assert np.array_equal(leanconv.filter2d(image, kernel, anchor=(-1, -1)), middle)
    below = leanconv.filter2d(image, kernel, anchor=(-1, 0))
    assert np.array_equal(below, leanconv.filter2d(image, kernel, anchor=(kh // 2, 0)))
    cv2 = pytest.importorskip("cv2")
    assert np.allclose(middle, cv2.filter2D(image, -1, kernel, anchor=(-1, -1)))
    assert np.allclose(below, cv2.filter2D(image, -1, kernel, anchor=(0, -1)))


def test_the_types_of_arguments_have_the_tables_words() -> None:
    assert get_args(BorderName) == tuple(BORDERS)
    assert {*get_args(ScipyMode)} == {*SCIPY_NAMES}
    assert {*get_args(OpencvName)} == {name for border in BORDERS.values() for name in border.opencv}
    assert sorted(OPENCV_NUMBERS) == [0, 1, 2, 3, 4]


def test_every_kernel_type_exists() -> None:
    types = re.findall(
        r"^struct (\w+Border)\b", (INCLUDE / "kernels/image_filter/border.cuh").read_text(encoding="utf-8"), re.M
    )
    assert {border.kernel for border in BORDERS.values()} == {f"leanconv::{name}" for name in types}


def test_names_are_told_apart() -> None:
    assert not set(ALIASES) & set(BORDERS)
    names = [name for border in BORDERS.values() for name in (*border.scipy, *border.opencv)]
    assert len(names) == len(set(names)), "two borders of one name"
    assert all(options.border_name(alias) == name for alias, name in ALIASES.items())


@each_border
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_runs_are_what_numpy_pads(border: Border, size: int) -> None:
    line = np.arange(1, size + 1)
    for before, after in ((0, 0), (1, 0), (0, 2), (2, 3), (7, 12)):
        shown: list[int] = []
        for run in runs(border.name, size, before, after):
            assert run.start == len(shown)
            part = np.zeros(run.length, int) if run.pixel is None else line[run.low : run.low + run.width]
            shown += (part[::-1] if run.step < 0 else np.broadcast_to(part, run.length)).tolist()
        assert shown == np.pad(line, (before, after), mode=border.numpy).tolist()  # type: ignore[call-overload]
