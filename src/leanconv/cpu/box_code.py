"""Sums of neighbours down columns by machine code (`machine_code`): three additions each, however many they are.

Rows are cut into blocks as long as the window, so a window is the end of one block and the begin of the next one (van
Herk; Gil and Werman). Both are sums of pixels of the window: errors are those of a plain sum, and NaN stays where it
is. A first pass goes up a block and stores the sums of its ends, a second one goes down and adds the begins of the next
block, which it sums on its way.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from leanconv.cpu.channels import aligned
from leanconv.cpu.machine_code import Code, Kernel, Tabled, Vectors, address, function, widest
from leanconv.cpu.transpose_code import copy_transposed

#: Registers: last rows of a block and of its results, rows that are not stored, rows that are, those after the first,
#: and bytes from one row to the next.
_TABLE, _ROWS, _X, _Y, _SKIPPED, _STORED, _NEXT, _DOWN, _BELOW, _FROM, _TO = 7, 6, 9, 10, 3, 8, 5, 11, 1, 0, 2
#: Vectors of columns at a time, and numbers of a row of the table.
TOGETHER, NUMBERS = 4, 8
#: The shortest windows that are summed so: shorter ones take fewer additions by doubling.
LEAST = 4


def sums_down(extended: np.ndarray, result: np.ndarray, size: int) -> bool:
    """Sums of ``size`` neighbours down the columns; False where there is no code for it."""
    if size < LEAST or not extended.dtype == result.dtype == np.float64:
        return False
    if not extended.strides[1] == result.strides[1] == result.itemsize:
        return False
    runs = _runs(result.shape, size, extended.strides[0], result.strides[0], widest())
    if runs is None:
        return False
    runs.run(address(extended), address(result))
    return True


def sums_along(extended: np.ndarray, result: np.ndarray, size: int) -> bool:
    """Sums of ``size`` neighbours along the rows, which are transposed."""
    if size < LEAST or len(result) * 8 < widest() or not extended.dtype == result.dtype == np.float64:
        return False
    columns, sums = aligned(extended.shape[::-1], extended.dtype), aligned(result.shape[::-1], result.dtype)
    copy_transposed(extended[None], columns[None])
    if not sums_down(columns, sums, size):
        return False
    copy_transposed(sums[None], result[None])
    return True


@lru_cache(maxsize=256)
def _runs(shape: tuple[int, int], size: int, row: int, below: int, width: int) -> Tabled | None:
    """For results of such a shape; ``row`` and ``below`` are bytes from one row to the next."""
    (n, columns), item = shape, 8
    lanes = width // item
    together = TOGETHER if columns >= TOGETHER * lanes else 1
    wide = together * lanes
    if lanes == 0 or columns < wide or (code := kernel(lanes, item, together)) is None:
        return None
    table = []
    for first in range(0, n, size):
        stored = min(size, n - first)
        # the last columns may be summed for the second time
        for left in [*range(0, columns - wide, wide), columns - wide]:
            at = (first + size - 1) * row + left * item, (first + stored - 1) * below + left * item
            table.append((*at, size - stored, stored, stored - 1, row, below, 0))
    return Tabled.of(code, np.array(table, np.int64).reshape(-1, NUMBERS))


@lru_cache(maxsize=16)
def kernel(lanes: int, item: int, together: int) -> Kernel | None:
    return function(assemble(Vectors(lanes, item), together))


def assemble(vectors: Vectors, together: int) -> bytes:
    code, each = Code(vectors), range(together)

    def add_pixels() -> None:
        for i in each:
            code.sum_with(i, i, (_FROM, i * vectors.size))

    with code.repeated(_ROWS):
        code.read_row((_X, _Y), _TABLE)
        for number, register in enumerate((_SKIPPED, _STORED, _NEXT, _DOWN, _BELOW)):
            code.read(register, (_TABLE, 16 + 8 * number))
        code.move(_FROM, _X)
        code.move(_TO, _Y)
        for i in each:
            code.clear(i)
        with code.unless_zero(_SKIPPED), code.repeated(_SKIPPED):
            add_pixels()
            code.subtract(_FROM, _DOWN)
        with code.repeated(_STORED):
            add_pixels()
            for i in each:
                code.store(i, (_TO, i * vectors.size))
            code.subtract(_FROM, _DOWN)
            code.subtract(_TO, _BELOW)
        with code.unless_zero(_NEXT):
            code.sum_of(_FROM, _X, _DOWN)
            code.add_of(_TO, _BELOW)
            code.add_of(_TO, _BELOW)
            for i in each:
                code.clear(i)
            with code.repeated(_NEXT):
                add_pixels()
                for i in each:
                    code.sum_with(together + i, i, (_TO, i * vectors.size))
                    code.store(together + i, (_TO, i * vectors.size))
                code.add_of(_FROM, _DOWN)
                code.add_of(_TO, _BELOW)
        code.add(_TABLE, 8 * NUMBERS)
    return code.finish()
