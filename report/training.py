"""docs/training.md: networks trained with PyTorch's convolutions and with leanconv's, from the same seeds.

``examples/train_cnn.py --json`` writes the rows, each with its curve; on a GPU they go to
benchmarks/results/<machine>/training.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from leanconv.bench.format import Table
from report import records
from report.records import Record


def best(rows: Sequence[Record], engine: str) -> Record | None:
    """The fastest of an engine in the layouts that were measured."""
    names = {f"{engine}{layout}" for layout in ("", "-nchw", "-nhwc")}
    return min((row for row in rows if row["engine"] in names), key=lambda row: row["us"], default=None)


def table(rows: Sequence[Record]) -> Table:
    """A line for each network and optimiser: milliseconds a step, ratios, memory and final losses."""
    lines, single = [], [row for row in rows if row["gpus"] == 1 and row["seed"] == 0]
    for problem, optimiser in dict.fromkeys((row["problem"], row["optimiser"]) for row in single):
        of = [row for row in single if (row["problem"], row["optimiser"]) == (problem, optimiser)]
        engines = ("leanconv", "leanconv-tf32", "torch-fp32", "torch-tf32")
        ours, rounded, theirs, tf32 = (best(of, engine) for engine in engines)
        if ours is None or (theirs is None and tf32 is None):
            continue
        lines.append([
            problem, optimiser, *(f"{row['us'] / 1000:.1f}" if row else "–" for row in (ours, theirs, tf32, rounded)),
            times(theirs, ours), times(tf32, ours), times(tf32, rounded),
            *(" / ".join(f"{row[key] / 2**20:.0f}" if key in row else "–" for row in (ours, theirs or {}))
              for key in ("peak_bytes", "scratch_bytes")),
            " / ".join(f"{row['loss']:.2g}" if row else "–" for row in (ours, theirs)),
        ])  # fmt: skip
    head = ["network", "optimiser", "leanconv", "PyTorch, strict FP32", "its TF32", "leanconv, precision tf32"]
    return [*head, "×", "× TF32", "precision tf32 × TF32", "MiB", "in passing", "loss"], lines


def times(theirs: Record | None, ours: Record | None) -> str:
    return f"{theirs['us'] / ours['us']:.2f}" if theirs and ours else "–"


def section(record: Record) -> str:
    meaning = (
        f"Images: {record['images']}. Milliseconds of a step (forward, backward, optimiser), each in the better of "
        "the layouts that were measured; × is PyTorch's time over leanconv's, in strict FP32, of its TF32 over our "
        "float32-grade precision, and of its TF32 over our precision tf32; MiB is the peak besides the images, "
        "“in passing” what of it one convolution takes at most besides its result, and loss the mean of the last "
        "tenth of the steps, leanconv / PyTorch in strict FP32. A dash was not measured."
    )
    return f"{records.origin(record['machine'])}. {meaning}\n\n{records.table(table(record['rows']))}"
