"""winograd2d.svg: a tile, a block's states, and a block's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.algorithms.winograd2d import Winograd2dConfig, outputs_of
from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, FILTERS, INK, LINE, OUTPUT, PALE, PIXELS, TILES, arrow, box, save, text

CONFIG = Winograd2dConfig()
#: The kernel that is drawn, F(2 x 2, 3 x 3): outputs, pixels and filter weights along one side of a tile.
M, WIDTH = outputs_of(CONFIG), 3
ALPHA = M + WIDTH - 1
#: Pixels of several tiles.
SHARED = "#6baed6"
WARPS = CONFIG.threads // 32
#: Filters of a round of the exchange: four of each lane.
ROUND = 4 * CONFIG.lanes_k


def square(axis: Any, x: float, y: float, count: int, colour: str, edge: str = "#ffffff") -> None:
    for i in range(count):
        for j in range(count):
            box(axis, x + j, y + i, 1, 1, colour, edge, 0.8)


def tile(axis: Any) -> None:
    """Four tiles in an image of one channel, and what becomes of one of them."""
    side = 2 * M + WIDTH - 1
    square(axis, 0, 0, side, PIXELS)
    box(axis, M, 0, WIDTH - 1, side, SHARED, "none")
    box(axis, 0, M, side, WIDTH - 1, SHARED, "none")
    square(axis, 0, 0, side, "none")
    box(axis, M, 0, ALPHA, ALPHA, "none", INK, 1.6)
    box(axis, 0, 0, ALPHA, ALPHA, "none", ACCENT, 2.2)
    words = f"tiles of {ALPHA} × {ALPHA} pixels d,\n{M} apart: neighbours share\n{WIDTH - 1} rows or columns (dark)"
    text(axis, side / 2, side + 1.4, words, 7.5)
    square(axis, 9.5, 0, ALPHA, TILES)
    arrow(axis, (side + 0.2, 2), (9.3, 2))
    text(axis, 7.75, 1.3, "Bᵀ d B", 8.5)
    text(axis, 11.5, ALPHA + 0.6, f"V, {ALPHA * ALPHA} states", 7.5)
    square(axis, 1.5, 9.9, WIDTH, FILTERS)
    text(axis, 3, 13.5, "a filter g", 7.5)
    square(axis, 9.5, 9.4, ALPHA, FILTERS)
    arrow(axis, (4.7, 11.4), (9.3, 11.4))
    text(axis, 7.0, 10.4, "G g Gᵀ,\nprepared", 8.5)
    text(axis, 11.5, 9.4 + ALPHA + 0.6, "U", 8)
    text(axis, 11.5, 6.9, "⊙", 13)
    square(axis, 17, 4.9, ALPHA, PALE, LINE)
    arrow(axis, (13.6, 6.9), (16.8, 6.9))
    text(axis, 15.2, 6.0, "Σ over c", 8)
    text(axis, 19, 4.9 + ALPHA + 0.6, "M", 8)
    square(axis, 25.2, 5.9, M, OUTPUT)
    arrow(axis, (21.2, 6.9), (25.0, 6.9))
    text(axis, 23.1, 6.2, "Aᵀ M A", 8.5)
    text(axis, 26.2, 8.5, f"Y, {M} × {M} outputs", 7.5)
    text(axis, 22.6, 13.5, f"{ALPHA**2} multiplications for {M * M} · {WIDTH**2} = {(M * WIDTH) ** 2}", 8)
    axis.set_xlim(-0.5, 28.8)
    axis.set_ylim(14.9, -0.9)
    axis.set_aspect("equal", anchor="NW")
    axis.set_title(f"1  a tile of F({M}×{M}, {WIDTH}×{WIDTH})", fontsize=10, loc="left")


def states(axis: Any) -> None:
    """The products of a block, a plane for each state, and who computes them."""
    wide, high, step = 6.4, 7.6, 0.42
    for state in reversed(range(CONFIG.states)):
        mine = state < CONFIG.lane_states
        x, y = state * step, (CONFIG.states - 1 - state) * step
        box(axis, x, y, wide, high, OUTPUT if mine else PALE, INK if mine else LINE, 0.8)
    x, y = 0.0, (CONFIG.states - 1) * step
    half = 32 // CONFIG.lane_states
    lanes_tiles = half // CONFIG.lanes_k
    for i in range(1, CONFIG.lanes_k):
        axis.plot([x, x + wide], [y + high * i / CONFIG.lanes_k] * 2, color="#ffffff", linewidth=0.9)
    for i in range(1, lanes_tiles):
        axis.plot([x + wide * i / lanes_tiles] * 2, [y, y + high], color="#ffffff", linewidth=0.9)
    box(axis, x, y, wide / lanes_tiles, high / CONFIG.lanes_k, ACCENT, "#ffffff", 0.8)
    text(axis, x - 0.3, y + high / 2, f"{CONFIG.tile_k} filters", 8, ha="right", rotation=90)
    text(axis, x + wide / 2, y + high + 0.6, f"{CONFIG.tiles} tiles", 8)
    text(axis, wide + CONFIG.states * step + 0.2, 1.0, f"{CONFIG.states} states:\na product each", 8, ha="left")
    words = f"A warp has {CONFIG.lane_states} states (green), {half} lanes for each:\n"
    words += f"{CONFIG.lanes_k} along the filters × {lanes_tiles} along the tiles.\n\n"
    words += f"A lane (red) has {CONFIG.thread_k} × {CONFIG.thread_tiles} sums in registers.\n"
    words += f"They lie in groups of 4, {4 * CONFIG.lanes_k} filters or\n"
    words += f"{4 * lanes_tiles} tiles apart; drawn as one.\n\n"
    words += f"{WARPS} warps, {CONFIG.threads} threads.\n"
    words += f"A step is {CONFIG.channels} channels."
    text(axis, wide + CONFIG.states * step + 0.2, 8.6, words, 8, ha="left")
    axis.set_xlim(-1.3, 25.5)
    axis.set_ylim(y + high + 1.6, -0.9)
    axis.set_title("2  the products of a block", fontsize=10, loc="left")


def flow(axis: Any) -> None:
    """What lies where, and the two ways out."""

    def station(x: float, y: float, width: float, words: str, colour: str, height: float = 1.7) -> None:
        box(axis, x, y, width, height, colour, INK, 0.9)
        text(axis, x + width / 2, y + height / 2, words, 7.5)

    station(0, 0.2, 5.4, "input x", PIXELS)
    station(0, 4.2, 5.4, "U, filters\ninnermost", FILTERS)
    box(axis, 7.9, -0.9, 13.9, 7.3, "#fafafa", LINE, 0.8)
    text(axis, 14.9, -0.45, "shared memory", 7, color=LINE)
    station(8.4, 0.2, 4.6, "raw tiles", PIXELS)
    station(16.6, 0.2, 4.7, "V of this and\nthe next step", TILES)
    station(8.4, 4.2, 4.6, "U of a step", FILTERS)
    for y in (1.05, 5.05):
        arrow(axis, (5.5, y), (8.3, y))
        text(axis, 6.7, y - 0.5, "cp.async", 6.5)
    arrow(axis, (13.1, 1.05), (16.5, 1.05))
    text(axis, 14.8, 0.55, "Bᵀ d B", 7)
    station(23.4, 2.1, 6.4, f"{WARPS} warps:\nouter products,\nM in registers", PALE, 2.2)
    arrow(axis, (21.4, 1.1), (23.3, 2.7))
    arrow(axis, (13.1, 5.05), (23.3, 3.7))
    words = f"{ROUND} filters × {CONFIG.tiles} tiles,\n{CONFIG.states} states, rows\nand states padded"
    station(33.0, 2.1, 6.3, words, TILES, 2.2)
    arrow(axis, (29.9, 3.2), (32.9, 3.2))
    text(axis, 31.4, 2.4, f"{128 if CONFIG.wide_exchange else 64} bits\na store", 6.5)
    text(axis, 36.1, 1.6, "exchange, shared memory", 7, color=LINE)
    rounds = CONFIG.thread_k // 4
    text(axis, 36.1, 4.9, f"{rounds} rounds of {ROUND} filters", 7, color=LINE)
    station(42.2, 2.1, 6.2, "two neighbouring\ntiles a thread:\nAᵀ M A, bias, ReLU", PALE, 2.2)
    arrow(axis, (39.4, 3.2), (42.1, 3.2))
    station(53.4, 0.6, 4.2, "output y", OUTPUT, 6)
    arrow(axis, (48.5, 3.2), (53.3, 3.2))
    text(axis, 50.9, 2.3, f"direct: {M} rows\nof {2 * M} outputs", 6.5)
    axis.plot([45.3, 45.3], [4.4, 5.6], color=ACCENT, linewidth=1.1)
    arrow(axis, (45.3, 5.6), (53.3, 5.6), ACCENT)
    words = "staged: once more through the exchange,\nto be stored in the order of memory"
    text(axis, 38.2, 6.0, words, 7, color=ACCENT)
    axis.set_xlim(-0.5, 58.2)
    axis.set_ylim(7.0, -1.2)
    axis.set_title("3  the way through a block (the last station as in NCHW)", fontsize=10, loc="left")


def draw(path: Path) -> None:
    """Draw all three."""
    figure = blank((11.0, 6.6))
    axes = figure.subplot_mosaic([["tile", "states"], ["flow", "flow"]], height_ratios=(5, 2.6))
    tile(axes["tile"])
    states(axes["states"])
    flow(axes["flow"])
    save(figure, path)
