"""winograd1d-wide.svg: a wide filter row in pieces, and the pixels that each of them sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.algorithms.base import ceil_div
from leanconv.bench.plots import blank
from report.pictures.drawing import FILTERS, INK, OUTPUT, PALE, PIXELS, TILES, arrow, box, save, text

#: The kernel that is drawn, Γ8(4,5), and the width of the filters.
STATES, N, PIECE, WIDTH = 8, 4, 5, 9
COUNT = ceil_div(WIDTH, PIECE)


def piece(axis: Any, number: int) -> None:
    """A piece, its pixels below it, their products."""
    left, first = 20.0 * number, number * PIECE
    for i in range(PIECE):
        there = first + i < WIDTH
        box(axis, left + 11.5 + i, 4, 1, 1, FILTERS if there else PALE, INK if there else "#ffffff", 0.6)
        text(axis, left + 12 + i, 4.5, str(first + i) if there else "0", 7)
    for i in range(STATES):
        box(axis, left + i, 4, 1, 1, PIXELS, INK, 0.6)
        text(axis, left + i + 0.5, 4.5, str(first + i), 7)
        box(axis, left + 4.5 + i, 8, 1, 1, TILES, INK, 0.6)
    text(axis, left + 8.5, 3.3, f"piece {number}: pixels from {first} on", 8)
    arrow(axis, (left + 4, 5.2), (left + 6.5, 7.8))
    text(axis, left + 4.4, 6.5, "Bᵀ", 9, ha="right")
    arrow(axis, (left + 14, 5.2), (left + 10.5, 7.8))
    text(axis, left + 13, 6.5, "G, prepared", 9, ha="left")
    text(axis, left + 8.5, 6.5, "⊙", 11)
    arrow(axis, (left + 8.5, 9.2), (16.5 + 4 * number, 11.3))


def draw(path: Path) -> None:
    """The row, its pieces, and their sum."""
    figure = blank((8.6, 4.6))
    axis = figure.subplots()
    for i in range(WIDTH):
        box(axis, 13.5 + i, 0.6, 1, 1, FILTERS, INK, 0.6)
        text(axis, 14 + i, 1.1, str(i), 7)
    text(axis, 18, 0, f"a filter row, {WIDTH} columns", 8)
    for number in range(COUNT):
        arrow(axis, (13.5 + PIECE * number + 2.4, 1.8), (20 * number + 12, 2.9))
        piece(axis, number)
    for i in range(STATES):
        box(axis, 14.5 + i, 11.5, 1, 1, TILES, INK, 0.6)
    text(axis, 23, 12, "summed over pieces, filter rows and channels", 8, ha="left")
    arrow(axis, (18.5, 12.7), (18.5, 14.3))
    text(axis, 18.9, 13.5, "Aᵀ, once", 9, ha="left")
    for i in range(N):
        box(axis, 16.5 + i, 14.5, 1, 1, OUTPUT, INK, 0.6)
        text(axis, 17 + i, 15, str(i), 7)
    words = f"{N} neighbouring outputs: {COUNT}·{STATES} multiplications for {N}·{WIDTH}"
    text(axis, 18.5, 16.3, words, 8)
    axis.set_xlim(-0.5, 38)
    axis.set_ylim(17, -0.8)
    save(figure, path)
