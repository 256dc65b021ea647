"""The pictures of the demo, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from leanconv.bench.format import duration
from leanconv.bench.plots import blank, save
from leanconv.cli.demo_measure import Measured

#: A colour for each algorithm, in the order in which they appear; safe for colour-blind readers (Okabe and Ito).
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999", "#000000")
_INK, _PALE = "#222222", "#d9d9d9"


def draw_filters(photo: np.ndarray, shown: Sequence[tuple[str, np.ndarray]], path: Path) -> None:
    """The photograph (3, height, width) beside what the filters made of it, pixels in [0, 255]."""
    columns = 3
    rows = -(-(len(shown) + 1) // columns)
    height, width = photo.shape[1:]
    figure = blank((columns * 3.4, rows * (3.4 * height / width + 0.25)))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes:
        axis.set_axis_off()
    for axis, (title, planes) in zip(axes, [("the photograph", photo), *shown], strict=False):
        axis.imshow(np.clip(np.rint(planes), 0, 255).astype(np.uint8).transpose(1, 2, 0))
        axis.set_title(title, fontsize=11, color=_INK, pad=5)
    save(figure, path)


def draw_layers(lines: Sequence[Measured], gpu: str | None, path: Path) -> None:
    """Bars of time, and points of error against what is allowed, for each layer and algorithm."""
    layers = list(dict.fromkeys(line.what for line in lines))
    series = list(dict.fromkeys((line.algorithm, line.where) for line in lines))
    colour = {key: _COLOURS[i % len(_COLOURS)] for i, key in enumerate(series)}
    figure = blank((12.5, 0.2 * len(lines) + 0.24 * len(layers) + 1.3))
    times, errors = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    at, middle = 0.0, []
    for layer in layers:
        own = [line for line in lines if line.what == layer]
        middle.append(at + (len(own) - 1) / 2)
        for i, line in enumerate(own):
            paint = colour[line.algorithm, line.where]
            times.barh(at + i, line.us / 1e3, 0.82, color=paint)
            text = f" {duration(line.us)}" + ("  ← chosen" if line.chosen else "")
            times.text(line.us / 1e3, at + i, text, va="center", fontsize=7.5, color=_INK)
            errors.plot([line.error, line.bound], [at + i] * 2, color=_PALE, linewidth=1, zorder=1)
            errors.plot(line.error, at + i, "o", color=paint, markersize=5.5)
            errors.plot(line.bound, at + i, "|", color=_INK, markersize=9, markeredgewidth=1.4)
        at += len(own) + 1.2
    times.set_yticks(middle, layers, fontsize=9)
    times.set_ylim(at - 1.2, -1)
    times.set_xscale("log")
    times.set_xlim(min(line.us for line in lines) / 2e3, 5 * max(line.us for line in lines) / 1e3)
    times.set_xlabel(f"time of a call in ms, on {'the CPU and ' + gpu if gpu else 'the CPU'}", fontsize=9)
    errors.set_xscale("log")
    errors.set_xlabel("relative error against float64; the stroke is what is allowed", fontsize=9)
    for axis in (times, errors):
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="x", color=_PALE, linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    from matplotlib.patches import Patch

    names = [Patch(color=colour[key], label=f"{key[0]}, {key[1]}") for key in series]
    figure.legend(handles=names, loc="outside upper center", ncols=min(5, len(names)), frameon=False, fontsize=9)
    save(figure, path)
