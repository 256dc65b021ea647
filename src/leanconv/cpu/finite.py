"""Whether numbers are finite, as fast as memory is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import isfinite

import numpy as np

from leanconv.cpu.blas import ONE_THREAD, TINY_WORK


def is_finite(x: np.ndarray, times: int = 0) -> bool:
    """Whether no element is an Inf or a NaN. With 4 ``times`` True says that each is at most half the largest number,
    too, and False nothing: four times more than that, added to any number, is Inf."""
    # a product reads as fast as memory does; with zeros each Inf and each NaN makes a NaN
    if 2 * x.size <= TINY_WORK:
        return isfinite(np.vdot(x, _alike(x.size, x.dtype.char, times)))
    rows = x.reshape(-1, x.shape[-1])
    with ONE_THREAD, np.errstate(invalid="ignore", over="ignore"):
        return isfinite((rows @ _alike(rows.shape[1], x.dtype.char, times)).sum())


def are_finite(rows: np.ndarray, step: int) -> bool:
    """Whether every ``step``-th row and the last are finite; of a small array all are looked at."""
    if 2 * rows.size <= TINY_WORK:
        return is_finite(rows)
    return is_finite(rows[::step]) and is_finite(rows[-1])


def is_finite_of(size: int, dtype: str) -> Callable[[np.ndarray], bool]:
    """`is_finite` of contiguous arrays of so many elements."""
    if 2 * size > TINY_WORK:
        return is_finite
    zeros = np.zeros(size, dtype)
    return lambda x: bool(np.vdot(x, zeros) == 0)


def has_large(x: np.ndarray) -> bool:
    """Whether a finite element is larger than a quarter of the largest number."""
    sizes = np.abs(x)
    with np.errstate(invalid="ignore"):
        return bool(((sizes > np.finfo(x.dtype).max / 4) & (sizes < np.inf)).any())


@lru_cache(maxsize=64)
def _alike(size: int, dtype: str, number: int) -> np.ndarray:
    return np.full(size, number, dtype)
