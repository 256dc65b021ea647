"""docs/training.md: networks trained with PyTorch's convolutions and with leanconv's, from the same seeds.

``examples/train_cnn.py --json`` writes the rows, each with its curve; on a GPU they go to
benchmarks/results/<machine>/training.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanconv.bench.format import Table
from leanconv.bench.plots import blank, save
from report import markdown

Row = dict[str, Any]
#: how an engine is called, and its colour
ENGINES = {
    "leanconv": ("leanconv, channels last", "#0060a0"),
    "leanconv-nchw": ("leanconv, NCHW", "#60a0d0"),
    "torch-fp32-nchw": ("PyTorch, strict FP32, NCHW", "#d07020"),
    "torch-fp32-nhwc": ("PyTorch, strict FP32, channels last", "#a03020"),
    "torch-tf32-nhwc": ("PyTorch, TF32, channels last", "#808080"),
}


def single(rows: Sequence[Row]) -> list[Row]:
    """Those of one GPU and the first seed."""
    return [row for row in rows if row["gpus"] == 1 and row["seed"] == 0]


def best(rows: Sequence[Row], start: str) -> Row | None:
    """The fastest of the engines whose name begins so."""
    return min((row for row in rows if row["engine"].startswith(start)), key=lambda row: row["us"], default=None)


def table(rows: Sequence[Row]) -> Table:
    """A line for each network and optimiser: milliseconds a step, ratios, memory and final losses."""
    lines = []
    for problem, optimiser in dict.fromkeys((row["problem"], row["optimiser"]) for row in single(rows)):
        of = [row for row in single(rows) if (row["problem"], row["optimiser"]) == (problem, optimiser)]
        ours, theirs, tf32 = (best(of, start) for start in ("leanconv", "torch-fp32", "torch-tf32"))
        if ours is None or theirs is None:
            continue
        lines.append([
            problem, optimiser, *(f"{row['us'] / 1000:.1f}" if row else "–" for row in (ours, theirs, tf32)),
            f"{theirs['us'] / ours['us']:.2f}", f"{tf32['us'] / ours['us']:.2f}" if tf32 else "–",
            f"{ours['peak_bytes'] / 2**20:.0f} / {theirs['peak_bytes'] / 2**20:.0f}",
            f"{ours['loss']:.2g} / {theirs['loss']:.2g}",
        ])  # fmt: skip
    head = ["network", "optimiser", "leanconv", "PyTorch, strict FP32", "TF32", "×", "× TF32", "MiB", "loss"]
    return head, lines


def several(rows: Sequence[Row]) -> str:
    """A sentence for each training on several GPUs, beside the same on one."""
    sentences = []
    for row in rows:
        keys = ("problem", "engine", "optimiser", "seed", "steps")
        alone = [one for one in rows if one["gpus"] == 1 and all(one[key] == row[key] for key in keys)]
        if row["gpus"] > 1 and alone:
            apart = max(abs(a - b) for a, b in zip(row["losses"], alone[0]["losses"], strict=True))
            sentences.append(
                f"{row['problem']}, {row['engine']}, on {row['gpus']} GPUs: {row['us'] / 1000:.1f} ms a step, "
                f"{alone[0]['us'] / row['us']:.2f} times as fast as on one; losses differ by at most {apart:.1g}."
            )
    return " ".join(sentences)


def draw(record: dict[str, Any], path: Path) -> None:
    """The loss curves of each network over each other, all engines and seeds."""
    rows = [row for row in record["rows"] if row["gpus"] == 1 and row["steps"] >= 20]
    engines: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        engines.setdefault((row["problem"], row["optimiser"]), set()).add(row["engine"])
    panels = [panel for panel, of in engines.items() if len(of) > 1]
    columns = min(3, len(panels)) or 1
    height = -(-len(panels) // columns) or 1
    figure = blank((4.2 * columns, 2.6 * height + 0.4))
    axes = figure.subplots(height, columns, squeeze=False).ravel()
    for axis, (problem, optimiser) in zip(axes, panels, strict=False):
        named: set[str] = set()
        for row in rows:
            if (row["problem"], row["optimiser"]) == (problem, optimiser):
                name, colour = ENGINES[row["engine"]]
                axis.plot(row["losses"], color=colour, linewidth=0.8, label=None if name in named else name)
                named.add(name)
        axis.set_title(f"{problem}, {optimiser}", fontsize=9)
        axis.set_xlabel("step", fontsize=8)
        axis.set_ylabel("loss", fontsize=8)
        axis.set_yscale("log")
        axis.legend(fontsize=6, frameon=False)
    for axis in axes[len(panels) :]:
        axis.axis("off")
    save(figure, path)


def section(paths: Sequence[Path]) -> str:
    """The tables of all machines."""
    parts = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        about = record["machine"]
        origin = f"{about['gpu']}, {about['date'][:10]}, {markdown.revision(about, digits=12)}."
        meaning = (
            f"Images: {record['images']}. Milliseconds of a step (forward, backward, optimiser), each in the better of "
            "the layouts that were measured; × is PyTorch's time over leanconv's; MiB is the peak besides the images, "
            "and loss the mean of the last tenth of the steps, leanconv / PyTorch in strict FP32."
        )
        parts.append("\n\n".join(filter(None, (
            f"{origin} {meaning}", markdown.table(table(record["rows"])), several(record["rows"]))
        )))  # fmt: skip
    return "\n\n".join(parts) if parts else "Not measured yet: `examples/train_cnn.py --json` makes these figures."
