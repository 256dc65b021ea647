"""What all figures have in common: ink and grid, bars in groups, legends, titles.

The figures' colours are safe for colour-blind readers (the palette of Okabe and Ito, which also differs in lightness).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanconv.bench.plots import blank, save

INK, GRID = "#222222", "#d9d9d9"
#: Colours of bars that are too dark for an edge of ink.
_DARK = ("#222222", "#08519c", "#7a3b00", "#9e0142")


def panels(rows: int, columns: int, inches: tuple[float, float], **how: Any) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row. Raises ImportError where matplotlib is missing."""
    figure = blank(inches)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **how).ravel())


def refuse_empty(series: Any) -> None:
    if not series:
        raise ValueError("there is nothing to draw: the results hold no row that belongs into this figure")


def tidy(axis: Any, title: str = "", grid: str = "y", hidden: Iterable[str] = ("top", "right"), size: int = 8) -> None:
    """A pale grid behind what is drawn, and no frame."""
    axis.tick_params(labelsize=size, colors=INK)
    axis.grid(axis=grid, color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    for side in hidden:
        axis.spines[side].set_visible(False)
    if title:
        axis.set_title(title, loc="left", fontsize=9, color=INK)


def finish(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9.5, x=0.01, ha="left", color=INK)
    save(figure, path, 160)


def bars(
    axis: Any, names: Sequence[str], heights: dict[str, list[float | None]], colours: dict[str, str],
    hatched: dict[str, list[bool]] | None = None, named: Sequence[str | None] = (),
) -> None:  # fmt: skip
    """Groups of bars; in a group only the series that have a value, side by side around its middle.

    ``named`` has a series for each group whose name stands over its bar.
    """
    most = max(sum(values[i] is not None for values in heights.values()) for i in range(len(names)))
    width = min(0.86 / max(most, 1), 0.22)
    for i in range(len(names)):
        present = [(label, values[i]) for label, values in heights.items() if values[i] is not None]
        for number, (label, height) in enumerate(present):
            hatch = "/////" if hatched and hatched[label][i] else None
            place = i + (number - (len(present) - 1) / 2) * width
            dark = colours[label] in _DARK
            axis.bar(
                place, height, width * 0.92, color=colours[label], edgecolor="#ffffff" if dark else INK,
                linewidth=0.0 if dark else 0.35, hatch=hatch, zorder=2,
            )  # fmt: skip
            if named and named[i] == label:
                axis.annotate(
                    label, (place, height), xytext=(0, 3), textcoords="offset points", rotation=90, ha="center",
                    va="bottom", fontsize=7, color=INK, zorder=4,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
    tidy(axis, hidden=("top", "right", "left"))
    axis.set_xticks(range(len(names)), names, fontsize=8.5, color=INK)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.55, len(names) - 0.45)


def dots(
    axis: Any, names: Sequence[str], places: Mapping[str, Sequence[float | None]], colours: dict[str, str], origin: str
) -> None:
    """A row for each name with a dot of each series that has a value, on one scale from 0; ``origin`` stands at 1."""
    rows = range(len(names))
    found = [[value for values in places.values() if (value := values[i]) is not None] for i in rows]
    ends = ([end(1, *values) for values in found] for end in (min, max))
    axis.hlines(rows, *ends, color=GRID, linewidth=1.2)
    axis.axvline(1, color=INK, linewidth=1.0)
    for label, values in places.items():
        there = [i for i in rows if values[i] is not None]
        axis.scatter(
            [values[i] for i in there], there, s=34, color=colours[label], edgecolor=INK, linewidth=0.4, zorder=3
        )
    tidy(axis, grid="x", hidden=("top", "right", "left"))
    axis.annotate(
        f"{origin} = 1", (1, len(names) - 0.2), xytext=(4, 0), textcoords="offset points", fontsize=8.5, color=INK,
        va="center",
    )  # fmt: skip
    axis.set_yticks(rows, names, fontsize=8.5, color=INK)
    axis.tick_params(axis="y", length=0)
    axis.set(xlim=(0, None), ylim=(len(names) + 0.3, -0.6))


def legend(axis: Any, colours: dict[str, str], hatch: str = "", above: float = 1.02) -> None:
    """What each colour stands for, over the axis; and what hatched bars do."""
    from matplotlib.patches import Patch

    edge: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.35}
    patches = [Patch(facecolor=colour, label=label, **edge) for label, colour in colours.items()]
    if hatch:
        patches.append(Patch(facecolor="#ffffff", hatch="/////", label=hatch, **edge))
    columns = min(len(patches), 6 if len(patches) <= 6 else 5)
    axis.legend(
        handles=patches, fontsize=8.5, ncols=columns, loc="lower left", bbox_to_anchor=(0, above), frameon=False,
        handlelength=1.2, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip
