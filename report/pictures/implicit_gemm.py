"""implicit-gemm.svg: a block's tile and its fragments, from the numbers of the fastest tile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.algorithms.tiles import TILES
from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, FILTERS, INK, LINE, OUTPUT, PALE, PIXELS, box, save, text

CONFIG = TILES["NCHW"][0][0]


def product(axis: Any) -> None:
    """The three matrices, a block's tile, and the reduction step that lies in shared memory."""
    box(axis, 0, 0, 7, 8)
    box(axis, 0, 2.4, 7, 2, FILTERS)
    box(axis, 2.6, 2.4, 1.1, 2, ACCENT)
    box(axis, 8, 9, 14, 7)
    box(axis, 13, 9, 3, 7, PIXELS)
    box(axis, 13, 12.3, 3, 1.1, ACCENT)
    box(axis, 8, 0, 14, 8)
    box(axis, 13, 2.4, 3, 2, OUTPUT)
    text(axis, 3.5, -0.7, "filters:  K × C·R·S")
    text(axis, 15, 16.7, "im2col matrix, never written down:  C·R·S × N·P·Q")
    text(axis, 15, -0.7, "output:  K × N·P·Q")
    text(axis, 14.5, 3.4, f"a block's tile\n{CONFIG.tile_k} × {CONFIG.tile_pixels}", 7)
    step = f"one step: {CONFIG.tile_reduction} reduction indices,\nin shared memory"
    axis.annotate(
        step,
        (3.2, 4.5),
        (1.9, 12.2),
        fontsize=7.5,
        ha="center",
        color=INK,
        arrowprops={"arrowstyle": "-", "color": LINE},
    )
    axis.annotate("", (12.9, 12.8), (4.4, 12.6), arrowprops={"arrowstyle": "-", "color": LINE})
    axis.set_xlim(-0.5, 22.5)
    axis.set_ylim(17.3, -1.5)
    axis.set_title("1  the convolution as a product", fontsize=10, loc="left")


def tile(axis: Any) -> None:
    """Warps on a block's tile, lanes on a warp's part, and the outputs of one lane."""
    c = CONFIG
    lanes_pixels = 32 // c.lanes_k
    warp_k, warp_pixels = c.lanes_k * c.thread_k, lanes_pixels * c.thread_pixels
    for k in range(0, c.tile_k, warp_k):
        for pixel in range(0, c.tile_pixels, warp_pixels):
            box(axis, pixel, k, warp_pixels, warp_k, OUTPUT if (k, pixel) == (0, 0) else PALE, INK, 1.1)
            if (k, pixel) != (0, 0):
                warp = k // warp_k * (c.tile_pixels // warp_pixels) + pixel // warp_pixels
                text(axis, pixel + warp_pixels / 2, k + warp_k / 2, f"warp {warp}", 7.5)
    for lane_k in range(c.lanes_k):
        for lane_pixel in range(lanes_pixels):
            mine = (lane_k, lane_pixel) == (1, 2)
            for row in range(0, c.thread_k, 4):
                for column in range(0, c.thread_pixels, 4):
                    x = lane_pixel * 4 + column * lanes_pixels
                    y = lane_k * 4 + row * c.lanes_k
                    box(axis, x, y, 4, 4, ACCENT if mine else OUTPUT, "#ffffff" if mine else LINE, 0.4)
    text(axis, c.tile_pixels / 2, -4.5, f"{c.tile_pixels} pixels →", 7.5)
    text(axis, -5, c.tile_k / 2, f"{c.tile_k} filters →", 7.5, rotation=90)
    axis.set_xlim(-9, c.tile_pixels + 1)
    axis.set_ylim(c.tile_k + 1, -8)
    title = f"2  a block's tile: {c.threads // 32} warps; one lane's {c.thread_k} × {c.thread_pixels} outputs"
    axis.set_title(title, fontsize=10, loc="left")


def fragments(axis: Any) -> None:
    """Which lane stores which of neighbouring outputs, with adjacent and with interleaved fragments."""
    lanes = 32 // CONFIG.lanes_k
    shades = ["#fdd0a2", "#9ecae1", "#c7e9c0", "#dadaeb", "#fcbba1", "#ccebc5", "#fed9a6", "#b3cde3"]
    rows = (
        (0, "adjacent: each lane stores 4 neighbours at once, in 128 bits", lambda i: i // 4),
        (3.2, "interleaved: 4 stores of one element, neighbouring lanes side by side", lambda i: i % lanes),
    )
    for y, words, owner in rows:
        text(axis, 0, y - 0.55, words, 8, ha="left")
        for i in range(4 * lanes):
            box(axis, i, y, 1, 1.3, shades[owner(i) % len(shades)], LINE, 0.5)
            text(axis, i + 0.5, y + 0.65, str(owner(i)), 7)
    text(axis, 2 * lanes, 5.2, "neighbouring outputs in memory →  (numbers: a lane's place along this axis)", 7.5)
    axis.set_xlim(-0.5, 4 * lanes + 0.5)
    axis.set_ylim(5.7, -1.3)
    axis.set_title("3  how a fragment of four lies along the output's rows", fontsize=10, loc="left")


def draw(path: Path) -> None:
    """Draw all three."""
    figure = blank((10.5, 7.4))
    axes = figure.subplot_mosaic([["product", "tile"], ["fragments", "fragments"]], height_ratios=(5, 1.6))
    product(axes["product"])
    tile(axes["tile"])
    fragments(axes["fragments"])
    for name in ("product", "tile"):
        axes[name].set_aspect("equal")
    save(figure, path)
