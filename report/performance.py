"""docs/performance.md: the summary of every suite on every GPU, from the committed results files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

from leanconv.bench.results import Results
from leanconv.bench.suites import LAYOUTS, suite_names
from leanconv.bench.tables import STANDINGS_CELL, heading, legend, standings, summary
from leanconv.dtypes import GPU_LAYERS
from leanconv.options import PRECISIONS, Op
from report import markdown


def _section(results: Results) -> str:
    machine = results.machine
    fields = ("driver", "cuda", "nvrtc", "cudnn", "torch", "cupy", "numpy", "scipy", "opencv", "leanconv")
    versions = ", ".join(f"{name} {machine[name]}" for name in fields if machine.get(name))
    parts = [
        f"## {heading(results)}",
        f"Measured {machine['date']}, {markdown.revision(machine)}; {versions}.",
        markdown.table(summary(results)),
        *_standings_section(results),
        "\n".join(f"- {line}" for line in legend(results)),
    ]
    return "\n\n".join(parts)


def _standings_section(results: Results) -> list[str]:
    if not results.own_algorithms():
        return []
    return [f"Each algorithm over all problems ({STANDINGS_CELL}):", markdown.table(standings(results))]


_HEAD = """# Performance

This page is made by `python -m report performance` from the committed results files; do not edit it.
`leanconv bench SUITE` makes such a file on your machine.

Times are medians: of GPU time between CUDA events after a warm-up, the L2 cache emptied before each run of memory-bound
work; of wall time on a CPU. They include every launch that a call needs. TFLOP/s count the direct convolution's
operations, whatever an algorithm really computes. "of ceiling" is the least time that the machine's measured FP32 rate
and copy bandwidth allow, over the time taken, with the ceiling that binds. Errors are relative Frobenius errors against
float64 on zero-mean random data. Peers ran in the same run, cuDNN and PyTorch in NCHW and NHWC whatever the layout;
every row of every engine is in the files."""


def page(paths: Sequence[Path]) -> str:
    """docs/performance.md from results files, GPU by GPU in the order of the suites."""
    order = {name: number for number, name in enumerate(suite_names())}
    loaded: list[tuple[Any, Results]] = []
    for path in paths:
        results = Results.read(path)
        loaded.append(((path.parent.name, order.get(results.suite, len(order)), path.name), results))
    return "\n\n".join([_HEAD, *(_section(results) for _, results in sorted(loaded, key=lambda pair: pair[0]))]) + "\n"


def results_files(root: Path) -> list[Path]:
    """The whole-suite results files below a folder, or the file itself."""
    if root.is_file():
        return [root]
    layouts = ["", *(f"-{layout.lower()}" for layout in LAYOUTS)]
    tiers = ["", *(f"-{precision}" for precision in PRECISIONS)]
    elements = ["", *(f"-{dtype}" for dtype in GPU_LAYERS)]
    operations = ["", *(f"-{op}" for op in get_args(Op))]
    names = {"".join(parts) for parts in product(suite_names(), layouts, tiers, elements, operations)}
    return sorted(path for path in root.glob("*/*.json") if path.stem in names)
