"""The summary of each suite on each machine, for docs/performance.md."""

from __future__ import annotations

import re
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
    suites = suite_names()
    settings = [layout.lower() for layout in LAYOUTS], PRECISIONS, GPU_LAYERS, get_args(Op)
    named = re.compile(f"({'|'.join(suites)})" + "".join(f"(-({'|'.join(words)}))?" for words in settings))
    found = ((named.fullmatch(path.stem), path) for path in results.glob("*/*.json"))
    ordered = sorted((path.parent.name, suites.index(match[1]), path.name, path) for match, path in found if match)
    return [path for *_, path in ordered]
