"""What the pictures of this package are drawn with: boxes, words, arrows, and files of the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.patches import Rectangle

from leanconv.bench import plots

INK, PALE, LINE, ACCENT = "#222222", "#f3f3f3", "#8a8a8a", "#d55e00"
#: One colour for each kind of data in all pictures.
FILTERS, PIXELS, TILES, OUTPUT = "#f2c57c", "#9ecae1", "#c9b8e8", "#b7ddb0"


def box(
    axis: Any, x: float, y: float, w: float, h: float, colour: str = PALE, edge: str = LINE, width: float = 0.8
) -> None:
    """A filled rectangle whose upper left corner is (x, y)."""
    axis.add_patch(Rectangle((x, y), w, h, facecolor=colour, edgecolor=edge, linewidth=width))


def text(axis: Any, x: float, y: float, words: str, size: float = 8, **rest: Any) -> None:
    """Words centred on (x, y) unless told otherwise."""
    options = {"ha": "center", "va": "center", "color": INK, "fontsize": size} | rest
    axis.text(x, y, words, **options)


def arrow(axis: Any, begin: tuple[float, float], end: tuple[float, float], colour: str = INK, bend: float = 0) -> None:
    """An arrow whose head is at ``end``."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "connectionstyle": f"arc3,rad={bend}"}
    axis.annotate("", end, begin, arrowprops=style | {"shrinkA": 0, "shrinkB": 0})


def save(figure: Any, path: Path) -> None:
    """Write a figure without its axes, in the same bytes on every run."""
    for axis in figure.axes:
        axis.set_axis_off()
    with matplotlib.rc_context({"svg.hashsalt": "leanconv"}):
        plots.save(figure, path, metadata={"Date": None})
