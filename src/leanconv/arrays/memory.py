"""Which bytes arrays cover: whether two of them overlap, and whether a kernel can read the rows in place.

Strides are in bytes, as NumPy has them. No memory is touched.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from leanconv.arrays.base import Shape


def lay_out(layout: str, first: int, channels: int, *extent: int) -> tuple[int, ...]:
    """The shape, in memory order, of ``first`` images, or filters, of so many channels, and rows and columns; of
    volumes with the slices before these."""
    if layout == "NHWC":
        return first, *extent, channels
    if layout == "CHWN":
        return channels, *extent, first
    return first, channels, *extent


def overlaps(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two ranges of addresses [low, high) overlap."""
    return a[0] < b[1] and b[0] < a[1]


#: an address to reason about, of no array
_ANYWHERE = 1 << 20


class _Addresses:
    """An array for NumPy to reason about, of memory that it never touches."""

    def __init__(self, place: tuple[int, Shape, Shape], itemsize: int) -> None:
        pointer, shape, strides = place
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "data": (pointer, False), "shape": tuple(shape),
            "strides": tuple(strides),
        }  # fmt: skip


def share_memory(
    a: tuple[int, Shape, Shape], b: tuple[int, Shape, Shape], itemsize: int, other: int | None = None
) -> bool:
    """Whether any elements of two arrays, each a pointer, shape and strides in bytes, share a byte.

    Elements of ``a`` have ``itemsize`` bytes, those of ``b`` as many, or ``other``.

    Address ranges may overlap where arrays do not: two crops of one image, side by side. True where the answer is too
    costly to find.
    """
    shares: Any = np.shares_memory  # its type stub knows two of the numbers that max_work may be
    try:
        arrays = (np.asarray(_Addresses(*each)) for each in ((a, itemsize), (b, other or itemsize)))
        return bool(shares(*arrays, max_work=100_000))
    except RuntimeError:  # NumPy's TooHardError, whose place has moved between releases
        return True


def overlaps_itself(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Whether any two elements of an array share memory. True where the answer is too costly to find."""
    axes = sorted((abs(stride), length) for length, stride in zip(shape, strides, strict=True) if length > 1)
    if 0 in shape:
        return False
    covered = itemsize
    for stride, length in axes:
        if stride < covered:
            break
        covered += (length - 1) * stride
    else:
        return False  # each step leads out of all that the shorter ones reach
    # Two elements that differ first in an axis are as far apart as one at its start and one behind.
    while axes:
        stride, length = axes.pop()
        others = tuple(length for _, length in axes), tuple(stride for stride, _ in axes)
        start, behind = (_ANYWHERE, *others), (_ANYWHERE + stride, (length - 1, *others[0]), (stride, *others[1]))
        if share_memory(start, behind, itemsize):
            return True
    return False


def lies_channels_last(shape: Shape, strides: Shape, batch: bool = True) -> bool:
    """Whether an array of axes N, C, ... lies channels last, judged as PyTorch does: by its strides alone.

    Without ``batch`` the axes are C, ..., and the array is judged as one of a batch.

    So strides decide where axes of length 1 make an array contiguous in both orders, and a slice keeps the order of
    what it was cut from. An array whose strides tell nothing, (N, 1, 1, 1), lies channels first.
    """
    if not batch:
        whole = max(1, *(abs(stride) * length for stride, length in zip(strides, shape, strict=True)))
        shape, strides = (1, *shape), (whole, *strides)
    if 0 in shape or strides[1] == 0:
        return False
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1)):
        if strides[axis] < least:
            return False
        least = strides[axis] * shape[axis]
    return strides[0] >= least and least > strides[1]


def row_pitched(shape: Shape, strides: Shape, itemsize: int, channels_last: bool = False) -> tuple[int, int] | None:
    """Row pitch and image step, in elements, of images (…, H, W) that a filter can read in place; None where it cannot.

    That requires rows that are contiguous and do not overlap, and leading axes that can be merged into one. With
    ``channels_last`` the images are (…, H, W, C), and so are their pixels.
    """
    if channels_last:
        w, channels = shape[-2:]
        step, item = strides[-2:]
        if (w > 1 and step != channels * itemsize) or (channels > 1 and item != itemsize):
            return None
        shape, strides = (*shape[:-2], w * channels), (*strides[:-2], itemsize)
    *batch, h, w = shape
    *steps, pitch, item = strides
    if any(stride % itemsize or stride < 0 for stride in strides) or (w > 1 and item != itemsize):
        return None
    pitch = pitch // itemsize if h > 1 else w
    if pitch < w:
        return None
    step = h * pitch
    expected = 0
    for length, stride in zip(reversed(batch), reversed(steps), strict=True):
        if length == 1:
            continue
        stride //= itemsize
        if not expected:
            if stride < (h - 1) * pitch + w:
                return None
            step = expected = stride
        elif stride != expected:
            return None
        expected *= length
    return pitch, step
