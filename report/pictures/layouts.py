"""layouts.svg: what one copy of a warp takes from memory in each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanconv.algorithms.winograd2d import Winograd2dConfig, outputs_of
from leanconv.bench.plots import blank
from report.pictures.drawing import INK, LINE, PALE, box, save, text

CONFIG = Winograd2dConfig()
#: Pixels along one side of a tile, and raw pixels of a step, in all channels.
ALPHA = outputs_of(CONFIG) + 2
RAW = CONFIG.tiles * ALPHA * ALPHA * CONFIG.channels
#: Eight neighbouring lanes have one colour.
SHADES = ("#9ecae1", "#f2c57c", "#b7ddb0", "#c9b8e8")
WARP = 32
#: Floats of a copy of 16 bytes.
FOUR = 4


@dataclass(frozen=True)
class Copy:
    """What lane ``lane`` copies: ``count`` floats, ``at`` floats into stretch ``stretch`` of memory."""

    lane: int
    stretch: int
    at: int
    count: int


def nchw(lane: int) -> Copy:
    """One pixel; half a warp has the pixels of a tile, the other half those of the tile after next, beside them."""
    tile, pixel = divmod(lane, ALPHA * ALPHA)
    return Copy(lane, pixel // ALPHA, tile * ALPHA + pixel % ALPHA, 1)


def nhwc(lane: int) -> Copy:
    """Four channels of one pixel of a tile; pixels lie apart by the channels of other steps."""
    pixel, quad = divmod(lane, CONFIG.channels // FOUR)
    return Copy(lane, pixel // ALPHA, pixel % ALPHA * (CONFIG.channels + 1) + quad * FOUR, FOUR)


def chwn(lane: int) -> Copy:
    """One pixel of four images."""
    pixel, images = divmod(lane, CONFIG.tiles // FOUR)
    return Copy(lane, pixel, images * FOUR, FOUR)


def panel(axis: Any, y: float, title: str, copies: Callable[[int], Copy], stretches: str, words: str) -> float:
    """Stretches of memory one below the other, in each the lanes that copy from it; returns where the next begins."""
    text(axis, 0, y, title, 9.5, ha="left", weight="bold")
    text(axis, 4.6, y, stretches, 8, ha="left")
    lanes = [copies(lane) for lane in range(WARP)]
    count = 1 + max(copy.stretch for copy in lanes)
    for stretch in range(count):
        here = [copy for copy in lanes if copy.stretch == stretch]
        top, end = y + 1.1 + 1.45 * stretch, max(copy.at + copy.count for copy in here)
        box(axis, -1.2, top + 0.3, end + 2.4, 0.6, PALE, "none")
        for copy in here:
            box(axis, copy.at, top, copy.count, 1.2, SHADES[copy.lane // 8], "#ffffff", 0.8)
            text(axis, copy.at + copy.count / 2, top + 0.6, str(copy.lane), 7 if copy.count > 1 else 6)
    text(axis, 39, y + 1.1 + 1.45 * count / 2, words, 8, ha="left", color=INK)
    return y + 1.45 * count + 3.0


def draw(path: Path) -> None:
    """Draw all three."""
    figure = blank((10.5, 5.6))
    axis = figure.subplots()
    thread = RAW // CONFIG.threads
    y = panel(
        axis, 0, "NCHW", nchw, f"{ALPHA} rows of pixels of one channel of one image, each {2 * ALPHA} pixels long",
        f"{WARP} × 4 bytes, and so for 4 channels.\nA thread makes {thread} copies in a step.\n\n"
        "Shared memory: [tile][channel][pixel]",
    )  # fmt: skip
    y = panel(
        axis, y, "NHWC", nhwc, f"{ALPHA} rows of {ALPHA} pixels of one image, {CONFIG.channels} channels of each pixel",
        f"{WARP} × 16 bytes, 4 channels in each.\nA thread makes {thread // FOUR} copies in a step.\n\n"
        "Shared memory: [tile][pixel][channel]",
    )  # fmt: skip
    y = panel(
        axis, y, "CHWN", chwn, f"{ALPHA} pixels of a row of one channel, each in {CONFIG.tiles} images",
        f"{WARP} × 16 bytes, and so for 4 channels.\nA thread makes {thread // FOUR} copies in a step.\n\n"
        "Shared memory: [channel][pixel][tile]",
    )  # fmt: skip
    words = "Lanes of a warp by their number, on memory drawn to scale: a narrow cell is 4 bytes, a wide one 16."
    text(axis, 0, y - 0.6, words, 8, ha="left", color=LINE)
    axis.set_xlim(-1.4, 53)
    axis.set_ylim(y, -1)
    save(figure, path)
