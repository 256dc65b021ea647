"""docs/training.md: networks trained with PyTorch's convolutions and with leanconv's, from the same seeds.

``examples/train_cnn.py --json`` writes the rows, each with its curve; on a GPU they go to
benchmarks/results/<machine>/training.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leanconv.bench.format import Table
from report import records
from report.records import Record

#: Columns of leanconv at precision tf32.
_ROUNDED = "leanconv, precision tf32", "precision tf32 × TF32"
#: So many steps, of equal data and weights, have equal losses to the last digit where PyTorch computes both; later ones
#: differ by the order in which cuDNN's atomics add.
_FIRST = 3


def best(rows: Sequence[Record], engine: str) -> Record | None:
    """The fastest of an engine in the layouts that were measured."""
    names = {f"{engine}{layout}" for layout in ("", "-nchw", "-nhwc")}
    return min((row for row in rows if row["engine"] in names), key=lambda row: row["us"], default=None)


def all_left(rows: Sequence[Record]) -> list[Record]:
    """The rows at precision tf32 whose first losses are PyTorch's: leanconv computed nothing there."""

    def first(row: Record) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("problem", "optimiser", "seed", "gpus")) + tuple(row["losses"][:_FIRST])

    theirs = {first(row) for row in rows if row["engine"].startswith("torch-tf32") and "losses" in row}
    return [row for row in rows if row["engine"].startswith("leanconv-tf32") and first(row) in theirs]


def table(rows: Sequence[Record]) -> Table:
    """A line for each network and optimiser: milliseconds a step, ratios, memory and final losses; what leanconv took
    at precision tf32, where it computed something."""
    lines, single = [], [row for row in rows if row["gpus"] == 1 and row["seed"] == 0]
    none, rounds = all_left(single), False
    for problem, optimiser in dict.fromkeys((row["problem"], row["optimiser"]) for row in single):
        of = [row for row in single if (row["problem"], row["optimiser"]) == (problem, optimiser) and row not in none]
        engines = ("leanconv", "leanconv-tf32", "torch-fp32", "torch-tf32")
        ours, rounded, theirs, tf32 = (best(of, engine) for engine in engines)
        if ours is None or (theirs is None and tf32 is None):
            continue
        rounds = rounds or rounded is not None
        lines.append([
            problem, optimiser, *(f"{row['us'] / 1000:.1f}" if row else "–" for row in (ours, theirs, tf32, rounded)),
            times(theirs, ours), times(tf32, ours), times(tf32, rounded), str(ours.get("left", "–")),
            *(" / ".join(f"{row[key] / 2**20:.0f}" if key in row else "–" for row in (ours, theirs or {}))
              for key in ("peak_bytes", "scratch_bytes")),
            " / ".join(f"{row['loss']:.2g}" if row else "–" for row in (ours, theirs)),
        ])  # fmt: skip
    head = ["network", "optimiser", "leanconv", "PyTorch, strict FP32", "its TF32", _ROUNDED[0]]
    head += ["×", "× TF32", _ROUNDED[1], "left", "MiB", "in passing", "loss"]
    kept = [i for i, name in enumerate(head) if rounds or name not in _ROUNDED]
    return [head[i] for i in kept], [[line[i] for i in kept] for line in lines]


def times(theirs: Record | None, ours: Record | None) -> str:
    return f"{theirs['us'] / ours['us']:.2f}" if theirs and ours else "–"


def section(record: Record) -> str:
    content = table(record["rows"])
    rounds = " and of its TF32 over our float32-grade precision"
    if _ROUNDED[0] in content[0]:
        rounds = f",{rounds.removeprefix(' and')}, and of its TF32 over our precision tf32"
    meaning = (
        f"Images: {record['images']}. Milliseconds of a step (forward, backward, optimiser), each in the better of "
        f"the layouts that were measured; × is PyTorch's time over leanconv's, in strict FP32{rounds}; left: how many "
        "of a step's convolutions, forward and backward, `enable()` left to PyTorch, in strict FP32; MiB is the peak "
        "besides the images, “in passing” what of it one convolution takes at most besides its result, and loss the "
        "mean of the last tenth of the steps, leanconv / PyTorch in strict FP32. A dash was not measured."
    )
    parts = [f"{records.origin(record['machine'])}. {meaning}", records.table(content)]
    if none := all_left(record["rows"]):
        where = ", ".join(dict.fromkeys(row["problem"] for row in none))
        parts.append(
            f"At precision tf32 `enable()` left every convolution of a step to PyTorch: {where}. First losses are "
            "PyTorch's to the last digit, so these steps have no times of ours."
        )
    return "\n\n".join(parts)
