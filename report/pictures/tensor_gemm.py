"""tensor-gemm.svg: the way of pixels and filters through a block, and how two warpgroups take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.bench.plots import blank
from report.pictures.drawing import ACCENT, FILTERS, INK, OUTPUT, PALE, PIXELS, TILES, arrow, box, save, text


def flow(axis: Any) -> None:
    """From memory to the sums of a consumer."""
    box(axis, 0, 0, 3.2, 2.4, PIXELS)
    text(axis, 1.6, 1.2, "pixels\nfloat32", 7.5)
    box(axis, 0, 4.2, 3.2, 2.4, FILTERS)
    text(axis, 1.6, 5.4, "prepared filters\nhi, lo: float16", 7.5)
    text(axis, 1.6, -0.5, "memory", 8, weight="bold")
    for i in range(3):
        box(axis, 5 + i * 1.15, 0.2, 1.05, 2, PIXELS)
    for i in range(8):
        box(axis, 5 + i * 0.43, 4.4, 0.38, 2, FILTERS)
    text(axis, 6.7, -0.5, "shared memory: two rings", 8, weight="bold")
    text(axis, 6.7, 2.75, "3 stages of 64 channels of a tap", 7)
    text(axis, 6.7, 6.95, "8 stages of 64 filters", 7)
    arrow(axis, (3.3, 1.2), (4.9, 1.2))
    arrow(axis, (3.3, 5.4), (4.9, 5.4))
    text(axis, 4.1, 0.8, "copies", 7)
    text(axis, 4.1, 5.0, "copies", 7)
    box(axis, 10.2, 0.2, 3.6, 2, PALE)
    text(axis, 12, 1.2, "largest of each row,\nscale, x·s = hi + lo", 7.5)
    text(axis, 12, -0.5, "a consumer's registers", 8, weight="bold")
    arrow(axis, (8.5, 1.2), (10.1, 1.2))
    box(axis, 10.2, 4.0, 3.6, 2.8, TILES)
    text(axis, 12, 5.4, "tensor core\nlo·hi + hi·lo + hi·hi\nof 64 elements", 7.5)
    arrow(axis, (12, 2.3), (12, 3.9))
    text(axis, 12.9, 3.1, "fragments", 7)
    arrow(axis, (8.6, 5.4), (10.1, 5.4))
    box(axis, 15.6, 4.4, 3.4, 2, OUTPUT)
    text(axis, 17.3, 5.4, "sums, float32", 7.5)
    arrow(axis, (13.9, 5.4), (15.5, 5.4), ACCENT)
    text(axis, 14.7, 4.95, "× 1/s, add", 7, color=ACCENT)
    arrow(axis, (17.3, 4.3), (17.3, 2.3))
    box(axis, 15.6, 0.2, 3.4, 2, PALE)
    text(axis, 17.3, 1.2, "filter's scale,\nbias, activation,\nstore", 7.5)
    axis.set_xlim(-0.3, 19.5)
    axis.set_ylim(7.5, -1.1)
    axis.set_title("1  the way through a block", fontsize=10, loc="left")


def turns(axis: Any) -> None:
    """Two consumers: while one has the tensor cores, the other converts."""
    for row, (name, begin) in enumerate((("warpgroup 0", 0.0), ("warpgroup 1", 4.0))):
        y = row * 1.5
        text(axis, -0.2, y + 0.5, name, 7.5, ha="right")
        for i in range(3 if row == 0 else 2):
            at = begin + 8 * i
            for chunk in range(4):
                box(axis, at + chunk, y, 0.96, 1, TILES)
                text(axis, at + chunk + 0.48, y + 0.5, f"{chunk}", 7)
            if row == 1 or i < 2:
                box(axis, at + 4.1, y, 2.3, 1, PIXELS)
                text(axis, at + 5.25, y + 0.5, "convert", 7)
    text(axis, 10, 3.0, "4 × 12 products a stage; sums of a chunk are added while the next chunk is multiplied", 7.5)
    axis.annotate("", (20, 2.75), (0, 2.75), arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 0.8})
    axis.set_xlim(-3, 20.5)
    axis.set_ylim(3.4, -0.4)
    axis.set_title("2  two consumers take turns with the tensor cores", fontsize=10, loc="left")


def draw(path: Path) -> None:
    """Draw tensor-gemm.svg."""
    figure = blank((9.4, 6.2))
    axes = figure.subplot_mosaic([["flow"], ["turns"]], height_ratios=(2.3, 1))
    flow(axes["flow"])
    turns(axes["turns"])
    save(figure, path)
