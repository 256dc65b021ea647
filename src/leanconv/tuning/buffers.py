"""A problem's arrays on a GPU, several times over, so that what is timed does not find them in its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import ceil, prod
from typing import Any

import numpy as np

from leanconv.call.gpu_call import roles_of
from leanconv.dtypes import DTYPES, is_integer
from leanconv.plan import Plan
from leanconv.problem import Operand, Problem
from leanconv.runtime.driver import OutOfMemoryError
from leanconv.runtime.launch import Device, Executable

#: Elements of the random numbers that an array repeats: no multiple of any row.
_BLOCK = 2**21 - 9
#: Sets of arrays, and bytes that they take together, at most.
_MOST_SETS, _MOST_BYTES = 32, 8 << 30
#: Results larger than this are compared on so many pieces of this many bytes, the first and the last among them.
_WHOLE, _PIECES, _PIECE = 1 << 20, 16, 64 << 10


def terms_of(problem: Problem) -> int:
    """Products that an element of the result sums."""
    return problem.kd * problem.kh * problem.kw if problem.kind == "filter2d" else problem.terms


def bytes_of(operand: Operand) -> int:
    return prod(operand.shape) * DTYPES[operand.dtype].bytes


class Buffers:
    """Sets of a problem's operands on a device, filled with random numbers, and scratch memory that they share."""

    def __init__(self, device: Device, problem: Problem, plans: Sequence[Plan], cache_bytes: int) -> None:
        """Scratch memory is for the largest of ``plans``; the sets take more than twice ``cache_bytes`` together.

        Raises OutOfMemoryError where there is no room for one set.
        """
        self._device, self._problem = device, problem
        self._memory: list[int] = []
        each = sum(bytes_of(operand) for operand in problem.operands)
        count = min(ceil(2 * cache_bytes / max(each, 1)) + 1, _MOST_SETS, max(1, _MOST_BYTES // max(each, 1)))
        self.sets: list[dict[str, int]] = []
        try:
            scratch = {
                "workspace": self._allocate(max((plan.workspace_bytes for plan in plans), default=0)),
                "prepared": self._allocate(max((plan.prepared_bytes for plan in plans), default=0)),
            }
            for _ in range(count):
                self.sets.append(self._set() | scratch)
        except OutOfMemoryError:
            # with fewer sets it is timed all the same
            if not self.sets:
                self.free()
                raise
        self._pieces = [
            (operand, at, size) for operand in problem.operands if operand.written for at, size in _pieces(operand)
        ]

    def _allocate(self, nbytes: int) -> int:
        if not nbytes:
            return 0
        self._memory.append(self._device.allocate(nbytes))
        return self._memory[-1]

    def _set(self) -> dict[str, int]:
        pointers = {}
        for place, operand in enumerate(self._problem.operands):
            pointers[operand.role] = self._allocate(bytes_of(operand))
            if not operand.written or getattr(self._problem, "accumulate", False):
                scale = 1.0 if place == 0 else max(1, terms_of(self._problem)) ** -0.5
                raw, nbytes = random_block(operand.dtype, scale, place).view(np.uint8), bytes_of(operand)
                for at in range(0, nbytes, len(raw)):
                    self._device.upload(pointers[operand.role] + at, raw[: nbytes - at])
        return pointers

    def calls(self, run: Executable, count: int) -> list[Callable[[], None]]:
        """So many calls, each on the next set."""
        roles = roles_of(self._problem)
        values = [tuple(pointers.get(role, 0) for role in roles) for pointers in self.sets]
        return [partial(run, 0, values[i % len(values)]) for i in range(count)]

    def result(self, run: Executable) -> np.ndarray:
        """What a call writes into the first set, or pieces of it, as float64. The output was poisoned before."""
        parts: list[np.ndarray] = []
        for operand, at, size in self._pieces:
            before = np.full(size, 0xFF, np.uint8)
            if getattr(self._problem, "accumulate", False):
                before = np.resize(random_block(operand.dtype, 1.0, 9).view(np.uint8), size)
            self._device.upload(self.sets[0][operand.role] + at, before)
        self.calls(run, 1)[0]()
        for operand, at, size in self._pieces:
            raw = np.empty(size, np.uint8)
            self._device.download(raw, self.sets[0][operand.role] + at)
            parts.append(as_float(raw, operand.dtype))
        return np.concatenate(parts)

    def free(self) -> None:
        while self._memory:
            self._device.free(self._memory.pop())


def _pieces(operand: Operand) -> Iterator[tuple[int, int]]:
    total = bytes_of(operand)
    if total <= _WHOLE:
        yield 0, total
        return
    for i in range(_PIECES):
        # multiples of 16 bytes, the last one at the end
        yield (total - _PIECE) * i // (_PIECES - 1) // 16 * 16, _PIECE
    yield total - 16, 16


@lru_cache(maxsize=16)
def random_block(dtype: str, scale: float, seed: int) -> Any:
    """Random numbers of a type, normally distributed; integers of 8 bits are all that there are."""
    random = np.random.default_rng(seed)
    if is_integer(dtype):
        low, high = (0, 255) if dtype.startswith("uint") else (-128, 127) if dtype == "int8" else (-99, 99)
        return random.integers(low, high, _BLOCK, DTYPES[dtype].numpy, endpoint=True)
    numbers = random.standard_normal(_BLOCK, np.float32) * np.float32(scale)
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(DTYPES[dtype].numpy)


def as_float(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of elements of a type as float64."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.dtype(DTYPES[dtype].numpy)).astype(np.float64)


@contextmanager
def buffers(device: Device, problem: Problem, plans: Sequence[Plan], cache_bytes: int) -> Iterator[Buffers]:
    """`Buffers`, freed at the end."""
    made = Buffers(device, problem, plans, cache_bytes)
    try:
        yield made
    finally:
        made.free()


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference over that of ``wanted``; NaN and infinity count as infinite."""
    error = float(np.linalg.norm(got - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)
    return error if np.isfinite(error) else float("inf")
