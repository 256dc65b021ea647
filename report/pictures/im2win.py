"""im2win.svg: what im2col and im2win store of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, INK, LINE, PALE, box, save, text

#: One colour for each column of the input.
COLUMNS = ("#fdd0a2", "#c6dbef", "#b7ddb0", "#f7c6dd", "#fff2a8", "#d6cdea")
FIRST, SECOND = INK, ACCENT
SIZE, HEIGHT = 3, 5
OUTPUTS = len(COLUMNS) - SIZE + 1
INDENT = 8.0


def outline(axis: Any, x: float, y: float, w: float, h: float, colour: str) -> None:
    axis.add_patch(Rectangle((x, y), w, h, fill=False, edgecolor=colour, linewidth=2))


def cell(axis: Any, x: float, y: float, row: int, column: int) -> None:
    box(axis, x, y, 1, 1, COLUMNS[column], "#ffffff", 0.8)
    text(axis, x + 0.5, y + 0.5, f"{row}{column}", 7)


def image(axis: Any) -> None:
    """The input, the three rows that output row 0 reads, and its first two windows."""
    for row in range(HEIGHT):
        for column in range(len(COLUMNS)):
            if row < SIZE:
                cell(axis, column, 1 + row, row, column)
            else:
                box(axis, column, 1 + row, 1, 1, PALE, "#ffffff", 0.8)
    outline(axis, 0.05, 1.05, SIZE - 0.1, SIZE - 0.1, FIRST)
    outline(axis, 1.05, 1.13, SIZE - 0.1, SIZE - 0.26, SECOND)
    text(axis, 0, 0.4, "the input, one channel", 9, ha="left", weight="bold")
    words = f"An output row reads {SIZE} rows of it.\nIts windows, two of them\noutlined, overlap."
    text(axis, 0, 2 + HEIGHT, words, 8, ha="left", va="top")


def im2col(axis: Any, y: float) -> float:
    """Every window by itself."""
    count = OUTPUTS * SIZE * SIZE
    text(axis, INDENT, y - 0.6, f"im2col: every window by itself, {count} elements", 9, ha="left", weight="bold")
    for q in range(OUTPUTS):
        for i in range(SIZE * SIZE):
            cell(axis, INDENT + i, y + q * 1.15, i // SIZE, q + i % SIZE)
        text(axis, INDENT + SIZE * SIZE + 0.3, y + q * 1.15 + 0.5, f"window {q}", 7.5, ha="left")
    outline(axis, INDENT + 0.03, y + 0.03, 8.94, 0.94, FIRST)
    outline(axis, INDENT + 0.03, y + 1.18, 8.94, 0.94, SECOND)
    return y + OUTPUTS * 1.15


def im2win(axis: Any, y: float) -> float:
    """The rows column by column; windows are overlapping runs."""
    count = SIZE * len(COLUMNS)
    words = f"im2win: the rows column by column, {count} elements; windows are runs that overlap"
    text(axis, INDENT, y - 0.6, words, 9, ha="left", weight="bold")
    for i in range(count):
        cell(axis, INDENT + i, y, i % SIZE, i // SIZE)
    for q in range(OUTPUTS):
        colour = (FIRST, SECOND, LINE, LINE)[q]
        left, right, at = INDENT + q * SIZE + 0.06, INDENT + (q + SIZE) * SIZE - 0.06, y + 1.3 + q * 0.55
        axis.plot([left, left, right, right], [at - 0.18, at, at, at - 0.18], color=colour, linewidth=1.6)
        text(axis, right + 0.2, at, f"window {q}", 7.5, ha="left", color=colour if q < 2 else INK)
    return y + 1.3 + OUTPUTS * 0.55


def fused(axis: Any, y: float) -> None:
    """Lines as im2win_fused has them in shared memory."""
    words = f"im2win_fused: one run of {len(COLUMNS)} pixels a line, in shared memory, serves {OUTPUTS} outputs"
    text(axis, INDENT, y - 0.6, words, 9, ha="left", weight="bold")
    for row in range(SIZE):
        for column in range(len(COLUMNS)):
            cell(axis, INDENT + column, y + row * 1.15, row, column)
        text(axis, INDENT + len(COLUMNS) + 0.3, y + row * 1.15 + 0.5, f"line {row}", 7.5, ha="left")
    outline(axis, INDENT + 0.03, y + 0.03, OUTPUTS - 0.06, 0.94, FIRST)
    outline(axis, INDENT + 1.03, y + 0.1, OUTPUTS - 0.06, 0.8, SECOND)
    words = "A thread reads a line once into registers and\nslides along it: filter column 0 multiplies the\n"
    words += "pixels outlined black, column 1 those in orange."
    text(axis, INDENT + 9.4, y + 1.6, words, 8, ha="left")


def draw(path: Path) -> None:
    """Draw it."""
    figure = blank((10.5, 5.3))
    axis = figure.subplots()
    image(axis)
    below = im2col(axis, 1)
    below = im2win(axis, below + 1.6)
    fused(axis, below + 1.2)
    axis.set_xlim(-0.3, INDENT + SIZE * len(COLUMNS) + 3)
    axis.set_ylim(below + 1.2 + SIZE * 1.15 + 0.2, -0.2)
    axis.set_aspect("equal")
    save(figure, path)
