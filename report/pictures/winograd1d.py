"""winograd1d.svg: a tile, the tiles of a block, and a block's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.algorithms.winograd1d import WinogradConfig
from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, FILTERS, INK, LINE, OUTPUT, PALE, PIXELS, TILES, arrow, box, save, text

CONFIG = WinogradConfig()
#: The kernel that is drawn, Γ8(6,3).
STATES, N, WIDTH = 8, 6, 3


def cells(axis: Any, x: float, y: float, count: int, colour: str, words: str) -> None:
    for i in range(count):
        box(axis, x + i, y, 1, 1, colour, "#ffffff", 0.8)
    text(axis, x + count / 2, y - 0.5, words, 7.5)


def tile(axis: Any) -> None:
    """One tile of one channel and one filter row."""
    cells(axis, 0, 0, STATES, PIXELS, f"{STATES} pixels of a row")
    cells(axis, 12.5, 0, WIDTH, FILTERS, f"a filter row, {WIDTH}")
    cells(axis, 0, 4.2, STATES, TILES, "")
    cells(axis, 10, 4.2, STATES, FILTERS, "")
    arrow(axis, (4, 1.2), (4, 4.0))
    text(axis, 4.3, 2.6, "Bᵀ", 10, ha="left")
    arrow(axis, (14, 1.2), (14, 4.0))
    text(axis, 14.3, 2.6, "G, prepared", 10, ha="left")
    text(axis, 9, 4.7, "⊙", 13)
    arrow(axis, (9, 5.5), (9, 7.6))
    text(axis, 9.3, 6.5, f"{STATES} products", 8, ha="left")
    cells(axis, 5, 7.8, STATES, PALE, "")
    for i in range(STATES):
        box(axis, 5 + i, 7.8, 1, 1, PALE, LINE, 0.6)
    text(axis, 13.4, 8.3, "summed over all channels\nand filter rows", 7.5, ha="left")
    arrow(axis, (9, 9.0), (9, 11.4))
    text(axis, 9.3, 10.2, "Aᵀ, once", 10, ha="left")
    cells(axis, 6, 11.6, N, OUTPUT, "")
    text(axis, 9, 13.3, f"{N} neighbouring outputs: {STATES} multiplications for {N}·{WIDTH}", 8)
    axis.set_xlim(-0.5, 22)
    axis.set_ylim(14.2, -1.6)
    axis.set_title(f"1  a tile of Γ{STATES}({N},{WIDTH})", fontsize=10, loc="left")


def rows(axis: Any) -> None:
    """Rows of transformed tiles, and the output rows that they serve."""
    taps, wide, gap = WIDTH, 1.5, 9.4
    count = CONFIG.rows + taps - 1
    for row in range(count):
        for column in range(CONFIG.columns):
            box(axis, column * wide, row * 1.3, wide, 1.1, TILES, "#ffffff", 0.8)
        text(axis, -0.3, row * 1.3 + 0.55, f"input row {row}", 7, ha="right")
    left = CONFIG.columns * wide + gap
    for row in range(CONFIG.rows):
        y = row * 1.3 + 1.3 * (taps - 1) / 2
        for column in range(CONFIG.columns):
            box(axis, left + column * wide, y, wide, 1.1, OUTPUT, "#ffffff", 0.8)
        text(axis, left + CONFIG.columns * wide + 0.3, y + 0.55, f"output row {row}", 7, ha="left")
        if row < 2:
            colour = (INK, ACCENT)[row]
            for r in range(taps):
                start = (CONFIG.columns * wide + 0.2, (row + r) * 1.3 + 0.5 + 0.16 * row)
                arrow(axis, start, (left - 0.2, y + 0.55), colour)
    text(axis, CONFIG.columns * wide / 2, -0.8, f"{CONFIG.columns} transformed tiles of a row", 7.5)
    words = f"Each of the {count} input rows is transformed once for the {CONFIG.rows} output rows\n"
    words += f"of the block and all {taps} filter rows; row by row it would be {taps * CONFIG.rows}."
    text(axis, 7.5, count * 1.3 + 1.1, words, 8)
    axis.set_xlim(-4.6, left + CONFIG.columns * wide + 4.9)
    axis.set_ylim(count * 1.3 + 2.6, -1.8)
    axis.set_title("2  the tiles of a block, one channel", fontsize=10, loc="left")


def flow(axis: Any) -> None:
    """What lies where, and how it gets there."""

    def station(x: float, y: float, width: float, words: str, colour: str, height: float = 1.5) -> None:
        box(axis, x, y, width, height, colour, INK, 0.9)
        text(axis, x + width / 2, y + height / 2, words, 7.5)

    box(axis, 9.2, -0.9, 18.4, 7.2, "#fafafa", LINE, 0.8)
    text(axis, 18.4, -0.5, "shared memory of a block", 7.5, color=LINE)
    station(0, 0.2, 6.2, "input x", PIXELS)
    station(0, 4.2, 6.2, "transformed filters\n[r][c][state][k]", FILTERS)
    station(9.8, 0.2, 5, "raw pixels\nof a slice", PIXELS)
    station(19.4, 0.2, 7, "tiles of this and\nthe next channels", TILES)
    station(9.8, 4.2, 5, "filters of\none filter row", FILTERS)
    arrow(axis, (6.3, 0.95), (9.7, 0.95))
    text(axis, 7.7, 0.45, "cp.async", 6.5)
    arrow(axis, (6.3, 4.95), (9.7, 4.95))
    text(axis, 7.7, 4.45, "cp.async", 6.5)
    arrow(axis, (14.9, 0.95), (19.3, 0.95))
    text(axis, 17.1, 0.35, "Bᵀ, in registers", 7)
    station(29.7, 2.2, 7.2, f"{STATES} warps, a state each:\nouter products, sums\nin registers", PALE, 2.2)
    arrow(axis, (26.5, 1.1), (29.6, 2.8))
    arrow(axis, (14.9, 4.95), (29.6, 3.8))
    station(39.2, 2.3, 4.6, "sums of all\nstates meet", TILES, 2)
    arrow(axis, (37.0, 3.3), (39.1, 3.3))
    station(46, 2.3, 5, "Aᵀ, bias,\nactivation", PALE, 2)
    arrow(axis, (43.9, 3.3), (45.9, 3.3))
    station(53.2, 2.6, 3.8, "output y", OUTPUT)
    arrow(axis, (51.1, 3.3), (53.1, 3.3))
    text(axis, 41.5, 1.7, "shared memory, again", 7, color=LINE)
    words = f"A step is one filter row of {CONFIG.channels} channels. While its products are computed, the same warps "
    words += "transform a slice (one R-th) of\nthe next channels' tiles, and copies bring what the "
    words += f"{CONFIG.stages - 1} steps after it need."
    text(axis, 0, 7.6, words, 8, ha="left")
    axis.set_xlim(-0.5, 57.5)
    axis.set_ylim(8.6, -1.2)
    axis.set_title("3  the way through a block", fontsize=10, loc="left")


def draw(path: Path) -> None:
    """Draw all three."""
    figure = blank((10.5, 7.0))
    axes = figure.subplot_mosaic([["tile", "rows"], ["flow", "flow"]], height_ratios=(5, 2.6))
    tile(axes["tile"])
    rows(axes["rows"])
    flow(axes["flow"])
    save(figure, path)
