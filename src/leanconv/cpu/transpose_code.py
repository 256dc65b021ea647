"""Matrices transposed by machine code (`machine_code`), since NumPy takes long to copy them.

Layers of NCHW want it: their channels lie apart, and vectors of channels or filters together. A tile has as many rows
and columns as a register has numbers. Pieces of 16 bytes of its rows are loaded so that those of a column of pieces are
side by side, and are then transposed within 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import product

import numpy as np

from leanconv.cpu.machine_code import Code, Kernel, Tabled, Vectors, address, function, widest

#: Registers: the tile's rows and columns, how far each is from the next, and how far the next tile's are.
_TABLE, _ROWS, _X, _Y, _COUNT, _ROW, _COLUMN, _RIGHT, _DOWN, _FROM, _TO = 7, 6, 9, 10, 3, 8, 1, 11, 5, 0, 2
#: Bytes of a piece and of a line of the cache, and numbers of a row of the table.
PIECE, LINE, NUMBERS = 16, 64, 8


def to_channels_last(planes: np.ndarray, pixels: np.ndarray) -> None:
    """``pixels[v, p, q, c] = planes[v, c, p, q]``, of contiguous pixels."""
    for some, those in _pairs(planes, pixels):
        copy_transposed(some, those)


def to_channels_first(pixels: np.ndarray, planes: np.ndarray) -> None:
    """``planes[v, c, p, q] = pixels[v, p, q, c]``, of contiguous pixels."""
    for some, those in _pairs(planes, pixels):
        copy_transposed(those, some)


def _pairs(planes: np.ndarray, pixels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and columns as one axis, or, of rows that do not follow each other, row by row."""
    v, c, p, q = planes.shape
    if p == 1 or planes.strides[2] == q * planes.strides[3]:
        yield planes.reshape(v, c, p * q), pixels.reshape(v, p * q, c)
    else:
        yield from ((planes[:, :, row], pixels[:, row]) for row in range(p))


def copy_transposed(source: np.ndarray, into: np.ndarray) -> None:
    """``into[v, j, i] = source[v, i, j]``."""
    begin = address(into)
    types = source.dtype, into.dtype
    made = copy_of(source.shape, source.strides, into.strides, types, begin % LINE, widest())
    if made is None:
        np.copyto(into, source.swapaxes(1, 2))
    else:
        made.run(address(source), begin)


@lru_cache(maxsize=1024)
def copy_of(
    shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...], types: tuple[np.dtype, np.dtype],
    past: int, width: int,
) -> Tabled | None:  # fmt: skip
    """For arrays of such a shape, strides and types, the second of which begins ``past`` a line of the cache; on
    registers of ``width`` bytes. None where there is no code."""
    item, least = types[0].itemsize, min(shape[1:])
    lanes = width // item if least >= width // item else width // item // 2
    if len(set(types)) > 1 or item not in (4, 8) or not rows[2] == columns[2] == item:
        return None
    code = kernel(lanes, item) if least >= lanes and lanes * item >= 32 else None
    if code is None:
        return None
    size = lanes * item
    whole = past % item == 0 and columns[0] % size == columns[1] % size == 0
    return Tabled.of(code, _runs(shape, rows, columns, lanes, -past % size // item if whole else 0))


def _runs(
    shape: tuple[int, ...], rows: tuple[int, ...], columns: tuple[int, ...], lanes: int, skipped: int
) -> np.ndarray:
    """The table: runs of tiles along the longer side. Tiles may overlap at its end and, where all columns begin so many
    numbers before a multiple of a register's size, at its begin: a store takes half as long there."""
    count, m, n = shape
    (matrix, row, item), (other, column, _) = rows, columns
    # along a run, and from one to the next: numbers, bytes of the source, bytes of the result
    along, across = (m, row, item), (n, item, column)
    if m <= n:
        along, across, skipped = across, along, 0
    length, width = along[0], across[0]
    places = [(0, 1)] if skipped and length >= 2 * lanes else []
    first = skipped if places else 0
    places.append((first, (length - first) // lanes))
    if (length - first) % lanes:
        places.append((length - lanes, 1))
    steps = row, column, lanes * along[1], lanes * along[2], 0
    runs = [
        (v * matrix + at * along[1] + low * across[1], v * other + at * along[2] + low * across[2], tiles, *steps)
        for v in range(count)
        for low in [*range(0, width - lanes, lanes), width - lanes]
        for at, tiles in places
    ]
    return np.array(runs, np.int64).reshape(-1, NUMBERS)


@cache
def kernel(lanes: int, item: int) -> Kernel | None:
    """The function for registers of so many numbers; it takes the address of a table of runs, and their number."""
    return function(assemble(Vectors(lanes, item))) if lanes else None


def assemble(vectors: Vectors) -> bytes:
    code, item = Code(vectors), vectors.item
    each = PIECE // item
    pieces = vectors.lanes // each
    # registers of the pieces of row i: those of rows i, i + each, … lie in one, side by side
    held = [[i * pieces + j for j in range(pieces)] for i in range(each)]
    spare = list(range(each * pieces, vectors.registers))
    with code.repeated(_ROWS):
        code.read_row((_X, _Y), _TABLE)
        for number, register in enumerate((_COUNT, _ROW, _COLUMN, _RIGHT, _DOWN)):
            code.read(register, (_TABLE, 16 + 8 * number))
        with code.repeated(_COUNT):
            code.move(_FROM, _X)
            code.move(_TO, _Y)
            for row in range(vectors.lanes):
                place, i = divmod(row, each)
                for j in range(pieces):
                    code.load_piece(held[i][j], place, (_FROM, j * PIECE))
                code.add_of(_FROM, _ROW)
            for j in range(pieces):
                made = [held[i][j] for i in range(each)]
                pairs = [(made[0], made[1])]
                if each == 4:  # pairs of numbers first
                    for i, is_high in product(range(2), (False, True)):
                        code.unpack(spare[2 * i + is_high], made[2 * i], made[2 * i + 1], 4, high=is_high)
                    pairs = [(spare[0], spare[2]), (spare[1], spare[3])]
                for a, b in pairs:
                    for is_high in (False, True):
                        code.unpack(spare[4], a, b, 8, high=is_high)
                        code.store(spare[4], (_TO, 0))
                        code.add_of(_TO, _COLUMN)
            code.add_of(_X, _RIGHT)
            code.add_of(_Y, _DOWN)
        code.add(_TABLE, 8 * NUMBERS)
    return code.finish()
