"""tensor-window.svg: pixels numbered so that each tap sees those of a tile side by side, and the path of a pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, FILTERS, INK, OUTPUT, PALE, PIXELS, TILES, arrow, box, save, text

#: Rows and columns of the image that is drawn, the outputs of its tile, and the first of them.
HEIGHT, WIDTH, TILE, FIRST = 3, 4, 6, 5


def numbers(axis: Any) -> None:
    """An image with a column and a row of zeros, the line that its pixels are, and what two taps see of it."""
    row = WIDTH + 1
    for number in range(row * (HEIGHT + 1)):
        y, x = divmod(number, row)
        zero = x == WIDTH or y == HEIGHT
        box(axis, x, y, 0.92, 0.92, PALE if zero else PIXELS)
        text(axis, x + 0.46, y + 0.46, "" if zero else str(number), 7)
    text(axis, 2.5, HEIGHT + 1.55, "3 × 4 pixels and zeros (pale),\nnumbered row by row", 7)
    for number in range(18):
        y, x = divmod(number, row)
        zero = x == WIDTH or y == HEIGHT
        box(axis, 7 + number * 0.9, 0.5, 0.84, 0.84, PALE if zero else PIXELS)
        text(axis, 7 + number * 0.9 + 0.42, 0.92, "" if zero else str(number), 7)
    text(axis, 6.9, 0.05, "the window in shared memory: a line of eight channels of each pixel", 7, ha="left")
    for i, (shift, name) in enumerate(((-row - 1, "tap (0, 0)"), (0, "tap (1, 1)"), (row + 1, "tap (2, 2)"))):
        top, left = 1.75 + i * 0.75, 7 + (FIRST + shift + 1) * 0.9
        box(axis, left, top, TILE * 0.9 - 0.06, 0.55, FILTERS)
        text(axis, left + TILE * 0.45, top + 0.27, f"{name}: from {FIRST + shift + 1} on", 6.5)
    left = 7 + (FIRST + 1) * 0.9
    box(axis, left, 4.2, TILE * 0.9 - 0.06, 0.75, OUTPUT)
    text(axis, left + TILE * 0.45, 4.57, "outputs 6 to 11 (9 is none)", 6.5)
    axis.set_xlim(-0.3, 23.4)
    axis.set_ylim(5.4, -0.4)
    axis.set_title("1  each tap sees the tile's pixels side by side, from another one on", fontsize=10, loc="left")


def path_of_a_pixel(axis: Any) -> None:
    """From NCHW to a line of eight channels, the products of all taps, and back."""
    steps = (
        ("x, NCHW\n4 neighbours of\n8 channels", PIXELS),
        ("registers:\nturned around", TILES),
        ("a window:\n16 bytes are\n8 channels", TILES),
        ("products of\nall taps", FILTERS),
        ("sums of\n64 pixels", PALE),
        ("shared memory:\nturned around,\nzeros left out", TILES),
        ("y, NCHW\n8 neighbours\na store", OUTPUT),
    )
    for i, (words, colour) in enumerate(steps):
        box(axis, i * 3.3, 0, 2.8, 2, colour)
        text(axis, i * 3.3 + 1.4, 1, words, 7)
        if i:
            arrow(axis, (i * 3.3 - 0.45, 1), (i * 3.3 - 0.05, 1))
    text(axis, 3.3 + 3.05, 2.45, "warps that load", 7, color=ACCENT)
    text(axis, 4 * 3.3 + 1.4, 2.45, "warpgroups that multiply", 7, color=INK)
    axis.set_xlim(-0.3, 23.4)
    axis.set_ylim(2.9, -0.4)
    axis.set_title("2  a pixel is loaded and turned around once for all taps", fontsize=10, loc="left")


def gradient(axis: Any) -> None:
    """Sixteen pixels of dy in registers, and for each tap sixteen lines of the window, from another one on."""
    box(axis, 0, 0.6, 4.4, 2.6, OUTPUT)
    text(axis, 2.2, 1.9, "dy: 64 filters of\n16 numbers, in registers,\nonce for all taps", 7)
    for i, shift in enumerate((0, 1, 2)):
        top = 0.35 + i * 1.05
        box(axis, 6.4, top, 9.6, 0.8, PALE)
        box(axis, 7.6 + shift * 1.1, top, 5.2, 0.8, PIXELS)
        text(axis, 10.2 + shift * 1.1, top + 0.4, f"16 lines from number {shift} on", 7)
        arrow(axis, (4.5, 1.9), (6.3, top + 0.4))
        box(axis, 18.2, top, 4.6, 0.8, FILTERS)
        text(axis, 20.5, top + 0.4, f"sums of tap (0, {i})", 7)
        arrow(axis, (16.1, top + 0.4), (18.1, top + 0.4))
    text(axis, 11.2, 3.75, "the window of x: lines of 8 channels, all channels of the tile", 7)
    axis.set_xlim(-0.3, 23.4)
    axis.set_ylim(4.1, 0)
    axis.set_title("3  the filters' gradient: numbers of no output have zeros of dy", fontsize=10, loc="left")


def draw(path: Path) -> None:
    """Draw tensor-window.svg."""
    figure = blank((9.4, 6.2))
    axes = figure.subplot_mosaic([["numbers"], ["path"], ["gradient"]], height_ratios=(1.7, 1, 1.15))
    numbers(axes["numbers"])
    path_of_a_pixel(axes["path"])
    gradient(axes["gradient"])
    save(figure, path)
