"""Filters without weights: what the pixels of a window make, their mean, the least, the largest or the middle one.

Each is one launch, in a time that hardly depends on the size of the window where that may be large. Semantics are
OpenCV's; sizes and anchors are (rows, columns).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from leanconv.call.as_before import as_before
from leanconv.images.api import run, sums_of
from leanconv.images.named import MOST, Array, Mode, run_products, runs_on_cpu
from leanconv.options import Border, FilterOptions, Reduction, filter_options, integer, pair, yes_or_no

#: Rows and columns together of boxes that are filtered as products of a column and a row.
FEW_TAPS = 24
#: The same for pixels of several channels, which boxes filter one by one.
FEW_OF_CHANNELS = 126


def _window(size: Any) -> tuple[int, int]:
    """Rows and columns. Raises ValueError for less than 1 and more than `MOST`."""
    rows, columns = pair("size", size, 1, "two: (rows, columns)")
    if max(rows, columns) > MOST:
        raise ValueError(f"size={size!r} must be at most {MOST} pixels")
    return rows, columns


@as_before
def box_blur(
    image: Array,
    size: int | Sequence[int],
    *,
    normalize: bool = True,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The mean of the pixels in a box, as ``cv2.blur``; with ``normalize=False`` their sum, as ``cv2.boxFilter``.

    Args:
        image: as in `filter2d`.
        size: of the box, or (rows, columns). The time of a large one hardly depends on it. On the GPU its rows fit into
            shared memory: on an H200 408, of float64 193; of images of one channel whose results are float32 or
            float64 there may be thousands, where the box has 33 columns or more.
        border, value, anchor, dtype, channels_last, mode, out, device: as in `filter2d`.

    Returns:
        Array as `filter2d` returns it. No difference of sums is taken, so it is as precise as a sum of the rows and
        columns alone, and an Inf or a NaN reaches the pixels whose boxes hold it. A mean is a sum that is divided
        afterwards: one that leaves the type of the sums may be Inf, where OpenCV's and SciPy's are finite.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    >>> box_blur(np.array([[0, 0, 9, 0, 0]], np.float32), (1, 3)).tolist()
    [[0.0, 3.0, 3.0, 3.0, 0.0]]
    """
    rows, columns = _window(size)
    requested = filter_options(border, anchor, device, dtype, channels_last, mode)
    count = rows * columns if yes_or_no("normalize", normalize) else 0
    few = FEW_TAPS if not channels_last else FEW_OF_CHANNELS
    if rows + columns > few or runs_on_cpu(image, device):
        return _box(image, (rows, columns), "sum", count, requested, value, out)
    weight = np.array([1 / count]) if normalize else np.ones(1, np.int64)
    ones = np.ones(columns, weight.dtype)
    return run_products(image, [(np.repeat(weight, rows), ones)], requested, value, 0, out)


@as_before
def erode(
    image: Array,
    size: int | Sequence[int],
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The least pixel of a box, as ``cv2.erode`` with a rectangle: bright spots smaller than the box vanish.

    Args:
        image: as in `filter2d`.
        size: of the box, or (rows, columns). The time hardly depends on it.
        border: as in `filter2d`. By default boxes read the image mirrored, which with an odd size and the anchor in the
            middle is as if they ended at its edge: OpenCV's default.
        value, anchor, channels_last, mode, out, device: as in `filter2d`.

    Returns:
        Array as `filter2d` returns it, of the image's dtype or that of ``out``. A NaN reaches the pixels whose boxes
        hold it.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    >>> erode(np.array([[3, 5, 4, 9, 8]], np.uint8), (1, 3)).tolist()
    [[3, 3, 4, 4, 8]]
    """
    requested = filter_options(border, anchor, device, None, channels_last, mode)
    return _box(image, _window(size), "min", 0, requested, value, out)


@as_before
def dilate(
    image: Array,
    size: int | Sequence[int],
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The largest pixel of a box, as ``cv2.dilate`` with a rectangle: dark spots smaller than the box vanish.

    Arguments, result and errors as `erode`.

    >>> dilate(np.array([[3, 5, 4, 9, 8]], np.uint8), (1, 3)).tolist()
    [[5, 5, 9, 9, 9]]
    """
    requested = filter_options(border, anchor, device, None, channels_last, mode)
    return _box(image, _window(size), "max", 0, requested, value, out)


@as_before
def median_blur(
    image: Array,
    size: int,
    *,
    border: Border = "replicate",
    value: float = 0,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The middle one of the pixels of a square, as ``cv2.medianBlur``: specks vanish, and edges stay.

    Args:
        image: as in `filter2d`.
        size: of the square: 3, 5 or 7.
        border: as in `filter2d`; by default the pixel at the edge, as in OpenCV.
        value, channels_last, mode, out, device: as in `filter2d`.

    Returns:
        Array as `filter2d` returns it, of the image's dtype or that of ``out``. Where a square holds a NaN the result
        may be any of its pixels.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    >>> median_blur(np.array([[1, 1, 9, 1, 1]], np.uint8), 3).tolist()
    [[1, 1, 1, 1, 1]]
    """
    side = integer("size", size, 1)
    if side not in (3, 5, 7):
        raise ValueError(f"size={size!r} is not known; choose one of 3, 5, 7")
    requested = filter_options(border, None, device, None, channels_last, mode)
    return _box(image, (side, side), "median", 0, requested, value, out)


def _box(
    image: Any, size: tuple[int, int], reduction: Reduction, count: int, requested: FilterOptions, value: Any, out: Any,
) -> Any:  # fmt: skip
    """What the pixels of a box make. Its one weight has the type of the sums: of a mean of ``count`` pixels, or 1."""
    sums = sums_of(requested, image, out, reduction == "sum" and not count)
    return run(requested._replace(window=size, reduction=reduction), image, _weight(count, sums), value, 0, out)


@lru_cache(maxsize=256)
def _weight(count: int, sums: str) -> np.ndarray:
    weight = np.array([1 / count if count else 1], sums)
    weight.flags.writeable = False
    return weight
