"""Which bytes arrays cover, and whether two elements share any."""

from __future__ import annotations

import numpy as np
import pytest

from leanconv.arrays import NUMPY, memory
from leanconv.arrays.memory import overlaps, overlaps_itself, share_memory


def test_extent_and_overlap() -> None:
    array = np.zeros((4, 6), np.float32)
    assert NUMPY.extent(array, 4) == (0, 96)
    assert NUMPY.extent(array[::-1], 4) == (-72, 24)
    assert NUMPY.extent(array[:, 1:3], 4) == (0, 80)
    assert NUMPY.extent(array[:0], 4) == (0, 0)
    assert overlaps((0, 4), (3, 5)) and not overlaps((0, 4), (4, 8)) and not overlaps((4, 8), (0, 4))


def test_memory_is_shared_where_an_element_is() -> None:
    at = 2**46 + 64  # an address of a GPU: nothing is read
    left = (at, (6, 8), (64, 4))
    assert not share_memory(left, (at + 32, (6, 8), (64, 4)), 4)
    assert share_memory(left, (at + 28, (6, 8), (64, 4)), 4)
    assert share_memory(left, (at + 5 * 64 + 28, (1,), (4,)), 4)
    assert not share_memory(left, (at + 5 * 64 + 32, (1,), (4,)), 4)
    assert share_memory(left, (at + 5 * 64, (6, 8), (-64, 4)), 4)


def test_memory_is_shared_where_nobody_can_tell() -> None:
    """Strides between which NumPy gives up its search: what is written might be what is read."""
    strides = np.random.default_rng(0).integers(5 * 10**8, 10**9, (2, 8)).tolist()
    here, there = (
        (2**40 + offset, (3,) * 8, tuple(each)) for offset, each in zip((0, 12_345_678), strides, strict=True)
    )
    arrays = [np.asarray(memory._Addresses(each, 1)) for each in (here, there)]
    with pytest.raises(RuntimeError, match="work"):
        np.shares_memory(*arrays, max_work=100_000)
    assert share_memory(here, there, 1)


def test_an_array_that_overlaps_itself() -> None:
    for shape, strides, expected in [
        ((2, 3), (4, 4), True), ((2, 3), (12, 4), False), ((2, 3), (0, 4), True), ((1, 3), (0, -4), False),
        ((3, 2), (8, 12), False), ((4, 2), (8, 24), True), ((0, 3), (0, 0), False), ((2, 3), (-8, 4), True),
        ((4,), (2,), True), ((), (), False), ((64, 64, 56, 56), (200704, 3136, 56, 1), True),
    ]:  # fmt: skip
        assert overlaps_itself(shape, strides, 4) == expected, (shape, strides)
    numbers = np.random.default_rng(1)
    found = set()
    for _ in range(2000):
        axes, itemsize = numbers.integers(1, 5), int(numbers.choice([2, 4]))
        shape = tuple(map(int, numbers.integers(1, 5, axes)))
        strides = tuple(map(int, numbers.integers(-10, 11, axes) * numbers.choice([1, 2, 4, 8, 24])))
        places = sum(index * stride for index, stride in zip(np.indices(shape), strides, strict=True)).ravel()
        expected = bool((np.diff(np.sort(places)) < itemsize).any())
        assert overlaps_itself(shape, strides, itemsize) == expected, (shape, strides, itemsize)
        found.add(expected)
    assert found == {True, False}
