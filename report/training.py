"""docs/training.md: networks trained with PyTorch's convolutions and with leanconv's, from the same seeds.

``examples/train_cnn.py --json`` writes the rows, each with its curve; on a GPU they go to
benchmarks/results/<machine>/training.json.
"""

from __future__ import annotations

import re
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
        if ours is None or theirs is None:
            continue
        lines.append([
            problem, optimiser, *(f"{row['us'] / 1000:.1f}" if row else "–" for row in (ours, theirs, tf32, rounded)),
            times(theirs, ours), times(tf32, ours), times(tf32, rounded),
            *(" / ".join(f"{row[key] / 2**20:.0f}" if key in row else "–" for row in (ours, theirs))
              for key in ("peak_bytes", "scratch_bytes")),
            f"{ours['loss']:.2g} / {theirs['loss']:.2g}",
        ])  # fmt: skip
    head = ["network", "optimiser", "leanconv", "PyTorch, strict FP32", "its TF32", "leanconv, precision tf32"]
    return [*head, "×", "× TF32", "precision tf32 × TF32", "MiB", "in passing", "loss"], lines


def times(theirs: Record | None, ours: Record | None) -> str:
    return f"{theirs['us'] / ours['us']:.2f}" if theirs and ours else "–"


def several(rows: Sequence[Record]) -> Table:
    """A line for each training on several GPUs: milliseconds a step, how many times the images a second of one GPU that
    has as many images in a step as each of them, and by how much losses differ from those of one with all images."""
    lines = []
    for row in (row for row in rows if row["gpus"] > 1):
        keys = ("engine", "optimiser", "seed")
        alone = [one for one in rows if one["gpus"] == 1 and all(one[key] == row[key] for key in keys)]
        # "vgg16-b1024-32" on two GPUs has the images of "vgg16-b512-32" on each
        part = re.sub(r"-b(\d+)-", lambda match: f"-b{int(match[1]) // row['gpus']}-", row["problem"])  # noqa: B023
        share = [one for one in alone if one["problem"] == part]
        whole = [one for one in alone if one["problem"] == row["problem"] and one["steps"] == row["steps"]]
        one = f"{share[0]['us'] / 1000:.1f}" if share else "–"
        times = f"{row['gpus'] * share[0]['us'] / row['us']:.2f}" if share else "–"
        apart = "–"
        if whole and not row.get("own_statistics"):
            pairs = zip(row["losses"], whole[0]["losses"], strict=True)
            curve = [abs(one - other) / other for one, other in pairs]
            apart = f"{100 * max(curve[:4]):.2g} % / {100 * max(curve):.2g} %"
        statistics = "each GPU's own" if row.get("own_statistics") else "of all"
        pieces = f"{row.get('bucket_mb', 25):g} MB"
        about = [row["problem"], row["engine"], row["optimiser"], str(row["gpus"]), statistics, pieces]
        lines.append([*about, f"{row['us'] / 1000:.1f}", one, times, apart])
    about = ["network", "engine", "optimiser", "GPUs", "statistics", "pieces"]
    return [*about, "ms", "one GPU, ms", "×", "losses apart"], lines


def section(record: Record) -> str:
    meaning = (
        f"Images: {record['images']}. Milliseconds of a step (forward, backward, optimiser), each in the better of "
        "the layouts that were measured; × is PyTorch's time over leanconv's, in strict FP32, of its TF32 over our "
        "float32-grade precision, and of its TF32 over our precision tf32; MiB is the peak besides the images, "
        "“in passing” what of it one convolution takes at most besides its result, and loss the mean of the last "
        "tenth of the steps, leanconv / PyTorch in strict FP32."
    )
    return f"{records.origin(record['machine'])}. {meaning}\n\n{records.table(table(record['rows']))}"


def processes(record: Record) -> str:
    meaning = (
        "Milliseconds of a step, gradients sent in pieces of so many MB; × is the images a second beside one GPU "
        "with as many images in a step as each of these has; “losses apart” is the largest relative difference of "
        "the losses from those of one GPU with all the images, in the first four steps / in all."
    )
    return f"{records.origin(record['machine'])}. {meaning}\n\n{records.table(several(record['rows']))}"
