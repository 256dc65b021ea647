"""tensor-winograd.svg: the states of a pair of outputs, and which warpgroup has which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, FILTERS, INK, OUTPUT, PALE, PIXELS, TILES, arrow, box, save, text

#: State, the first and the second of the pixels that it takes, and how they are written.
STATES = ((0, 0, 2, "d0 − d2", "g0"), (1, 1, 2, "d1 + d2", "(g0+g1+g2)/2"), (2, 2, 1, "d2 − d1", "(g0−g1+g2)/2"),
          (3, 1, 3, "d1 − d3", "g2"))  # fmt: skip


def states(axis: Any) -> None:
    """A row of pixels, the four states of one pair, and its two outputs."""
    for i in range(8):
        inside = 2 <= i <= 5
        box(axis, i * 1.5, 0, 1.4, 1, PIXELS if inside else PALE)
        text(axis, i * 1.5 + 0.7, 0.5, f"d{i - 2}" if inside else "…", 8)
    text(axis, -0.3, 0.5, "a row of pixels", 7.5, ha="right")
    for state, first, second, words, weights in STATES:
        x = state * 3.1
        box(axis, x, 2.6, 2.9, 1, TILES)
        text(axis, x + 1.45, 3.1, words, 8)
        for pixel in (first, second):
            arrow(axis, ((pixel + 2) * 1.5 + 0.7, 1.05), (x + 1.45, 2.55))
        box(axis, x, 3.9, 2.9, 1, FILTERS)
        text(axis, x + 1.45, 4.4, weights, 7.5)
        text(axis, x + 1.45, 5.35, f"sum {state} over channels and rows", 6)
    text(axis, -0.3, 3.1, "states of pixels", 7.5, ha="right")
    text(axis, -0.3, 4.4, "× states of filters", 7.5, ha="right")
    box(axis, 1.5, 6.2, 4.2, 1, OUTPUT)
    text(axis, 3.6, 6.7, "y0 = sum 0 + sum 1 + sum 2", 7)
    box(axis, 6.7, 6.2, 4.2, 1, OUTPUT)
    text(axis, 8.8, 6.7, "y1 = sum 1 − sum 2 − sum 3", 7)
    text(axis, -0.3, 6.7, "two outputs", 7.5, ha="right")
    axis.set_xlim(-4, 12.8)
    axis.set_ylim(7.4, -0.3)
    axis.set_title("1  a pair of outputs takes four products instead of six", fontsize=10, loc="left")


def shares(axis: Any) -> None:
    """One stage of pixels, two warpgroups with two states each, and what they send each other."""
    box(axis, 0, 1.2, 3.4, 2.6, PIXELS)
    text(axis, 1.7, 2.5, "a stage:\nthe pixels of\n64 pairs", 7.5)
    for row, (name, own) in enumerate((("warpgroup 0", "states 0, 1"), ("warpgroup 1", "states 3, 2"))):
        y = row * 3
        arrow(axis, (3.5, 2.5), (4.9, y + 1))
        box(axis, 5, y, 3.6, 2, TILES)
        text(axis, 6.8, y + 1, f"{name}\n{own}", 7.5)
        box(axis, 9.6, y, 3.2, 2, FILTERS)
        text(axis, 11.2, y + 1, "128 filters\nof its own states", 7.5)
        arrow(axis, (8.7, y + 1), (9.5, y + 1))
        box(axis, 13.8, y, 2.6, 2, PALE)
        text(axis, 15.1, y + 1, "128 sums\na thread", 7.5)
        arrow(axis, (12.9, y + 1), (13.7, y + 1))
        box(axis, 18.2, y, 2.6, 2, OUTPUT)
        text(axis, 19.5, y + 1, "even\noutputs" if row == 0 else "odd\noutputs", 7.5)
        arrow(axis, (16.5, y + 1), (18.1, y + 1))
    axis.annotate("", (15.1, 2.95), (15.1, 2.05), arrowprops={"arrowstyle": "<|-|>", "color": ACCENT, "linewidth": 1.2})
    text(axis, 15.4, 2.5, "sums 1 and 2", 7, color=ACCENT, ha="left")
    axis.annotate("", (20.8, 5.6), (0, 5.6), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8})
    axis.set_xlim(-0.3, 21)
    axis.set_ylim(5.8, -0.3)
    axis.set_title("2  two warpgroups share the pixels", fontsize=10, loc="left")


def draw(path: Path) -> None:
    """Draw tensor-winograd.svg."""
    figure = blank((9.4, 6.6))
    axes = figure.subplot_mosaic([["states"], ["shares"]], height_ratios=(1.3, 1))
    states(axes["states"])
    shares(axes["shares"])
    save(figure, path)
