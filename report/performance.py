"""The summary of each suite on each machine, for docs/performance.md."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import get_args

from leanconv.bench.results import Results
from leanconv.bench.suites import LAYOUTS, suite_names
from leanconv.bench.tables import STANDINGS_CELL, heading, legend, standings, summary
from leanconv.dtypes import GPU_LAYERS
from leanconv.options import PRECISIONS, Op
from report import records

_VERSIONS = ("driver", "cuda", "nvrtc", "cudnn", "torch", "cupy", "numpy", "scipy", "opencv", "leanconv")


def section(path: Path) -> str:
    """The tables of a results file."""
    results = Results.read(path)
    machine = results.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in _VERSIONS if machine.get(name))
    parts = [
        f"## {heading(results)}",
        f"Measured {machine['date']}, {records.revision(machine)}; {versions}.",
        records.table(summary(results)),
    ]
    if results.own_algorithms():
        parts += [f"Each algorithm over all problems ({STANDINGS_CELL}):", records.table(standings(results))]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in legend(results))])


def files(results: Path, _: str = "") -> list[Path]:
    """The results files of whole suites: machine by machine in the order of the suites."""
    levels = ["", *(f"-{precision}" for precision in PRECISIONS)]
    elements = ["", *(f"-{dtype}" for dtype in GPU_LAYERS)]
    operations = ["", *(f"-{op}" for op in get_args(Op))]
    layouts = ["", *(f"-{layout.lower()}" for layout in LAYOUTS)]
    order = {
        "".join((suite, *parts)): number
        for number, suite in enumerate(suite_names())
        for parts in product(layouts, levels, elements, operations)
    }
    found = [path for path in results.glob("*/*.json") if path.stem in order]
    return sorted(found, key=lambda path: (path.parent.name, order[path.stem], path.name))
