"""``python -m leanconv.bench SUITE``: the benchmark without the rest of the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from leanconv.bench import default_path, run_suite, show, suite_names
from leanconv.bench.ablation import run_ablation
from leanconv.bench.figures import ablation as draw_ablation
from leanconv.bench.plots import plot
from leanconv.bench.results import Results
from leanconv.bench.suites import LAYOUTS
from leanconv.dtypes import LAYERS
from leanconv.problem import PRECISIONS
from leanconv.runtime.env import parse_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 when something of leanconv's own failed, 2 for a mistake in the command."""
    parser = argparse.ArgumentParser(prog="python -m leanconv.bench", description="Measure leanconv and its peers.")
    parser.add_argument("what", metavar="SUITE|PROBLEM", help=f"{', '.join(suite_names())}, or conv:… or filter:…")
    parser.add_argument("--layout", choices=LAYOUTS, help="memory layout, for suites of layers")
    parser.add_argument("--precision", choices=PRECISIONS, help="tier, for suites of layers; peers stay as they are")
    parser.add_argument("--dtype", choices=LAYERS, help="element type, for suites of layers")
    parser.add_argument("--engines", default="", help="patterns between commas, such as leanconv,torch-*,cudnn:*")
    parser.add_argument("--algorithms", default="", help="patterns of leanconv's own; default: those of the suite")
    parser.add_argument("--only", help="pattern of problem names")
    parser.add_argument("--batch", type=int, help="images, instead of the suite's number")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU where there is one")
    parser.add_argument("--quick", action="store_true", help="rougher figures in a quarter of the time")
    parser.add_argument("--full", action="store_true", default=None, help="print every engine's row")
    parser.add_argument("--out", type=Path, help="results file; default below benchmarks/results")
    parser.add_argument("--plot", type=Path, help="also draw bars into this .png, .svg or .pdf")
    parser.add_argument("--revision", help="git revision to record where there is no checkout")
    parser.add_argument("--workspace-limit", metavar="BYTES", help="leave out leanconv's algorithms that need more")
    parser.add_argument("--seconds", type=float, help="begin no further problem after this time")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results of a run whose missing problems to add")
    parser.add_argument("--ablation", action="store_true", help="im2win with one technique off at a time, no peers")
    options = parser.parse_args(arguments)
    engines, algorithms = (tuple(filter(None, text.split(","))) for text in (options.engines, options.algorithms))
    try:
        words = options.workspace_limit
        limit = None if words is None else parse_bytes("--workspace-limit", words)
        results = (run_ablation if options.ablation else run_suite)(
            options.what,
            layout=options.layout,
            precision=options.precision,
            dtype=options.dtype,
            engines=engines,
            only=options.only,
            batch=options.batch,
            quick=options.quick,
            device=options.device,
            revision=options.revision,
            workspace_limit=limit,
            algorithms=algorithms,
            seconds=options.seconds,
            resume=Results.read(options.resume) if options.resume else None,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    partial = bool(engines or algorithms or options.only or options.batch or options.quick or options.workspace_limit)
    path = options.out or default_path(results, partial, ablation=options.ablation)
    results.write(path)
    show(results, options.full)
    print(f"results: {path}")
    if options.plot:
        (draw_ablation if options.ablation else plot)(results, options.plot)
        print(f"plot: {options.plot}")
    return 1 if any(entry["engine"].startswith("leanconv") for entry in results.failed) else 0


if __name__ == "__main__":
    sys.exit(main())
