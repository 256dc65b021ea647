"""Results as tables: on a terminal, and as docs/performance.md from the committed results files.

python -m leanconv.bench.tables benchmarks/results -o docs/performance.md
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanconv.bench.results import GROUPS, PEER_LAYOUTS, Results, Row, geometric_mean, right, write_whole
from leanconv.bench.suites import LAYOUTS, suite_names
from leanconv.problem import PRECISIONS

Table = tuple[list[str], list[list[str]]]

#: What a cell of standings() says.
STANDINGS_CELL = "geometric mean of the peer's time over ours, and the least in brackets"


def quantity(value: float | None, digits: int = 3) -> str:
    """A figure with ``digits`` significant digits and no exponent; a dash for None."""
    if value is None:
        return "–"
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(9, max(0, digits - 1 - magnitude))}f}"


def size(count: int | None) -> str:
    """Bytes in the largest fitting unit; a dash where unknown."""
    if count is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{quantity(count / scale)} {unit}"
    return f"{count}"


def _error(row: Row) -> str:
    return "NaN or Inf" if row.error is None else f"{row.error:.1e}"


def _memory(row: Row) -> str:
    """Bytes of workspace, and of prepared filters where there are any."""
    filters = f" + {size(row.prepared_bytes)}" if row.prepared_bytes else ""
    return size(row.workspace_bytes) + filters


def _share(row: Row) -> str:
    return f"{100 * row.ceiling_share:.0f}% {row.ceiling}"


def summary(results: Results) -> Table:
    """A line for each problem: leanconv's fastest algorithm, and how many times faster it is than each group of peers.

    Without rows of leanconv, the peers' microseconds stand in place of ratios. The last line is geometric means.
    """
    groups = results.groups()
    own = any(results.own(problem) for problem in results.problems)
    if not own:
        columns = ["problem", *(f"{name}, µs" for name in groups)]
        lines = []
        for problem in results.problems:
            peers = results.peers(problem)
            lines.append([problem, *(quantity(peers[name].us) if name in peers else "–" for name in groups)])
        return columns, lines
    columns = ["problem", "algorithm", "µs", "TFLOP/s", "of ceiling", "workspace", "error", *(f"× {g}" for g in groups)]
    lines = []
    for problem in results.problems:
        row, peers = results.own(problem), results.peers(problem)
        if row is None:
            lines.append([problem, "–", *[""] * (len(columns) - 2)])
            continue
        figures = [quantity(row.us), quantity(row.tflops), _share(row), _memory(row), _error(row)]
        ratios = [f"{peers[name].us / row.us:.2f}" if name in peers else "–" for name in groups]
        lines.append([problem, row.algorithm, *figures, *ratios])
    means = [results.ratios(name) for name in groups]
    lines.append(["geometric mean", *[""] * 6, *(f"{geometric_mean(found):.2f}" if found else "–" for found in means)])
    return columns, lines


def standings(results: Results, together: Sequence[Sequence[str]] = ()) -> Table:
    """How many times faster than each group of peers every algorithm of leanconv is over all problems.

    A line for each algorithm, for the best of each of ``together`` on every problem, and for the best of all. A cell is
    the geometric mean over the problems that both ran, with the least of the ratios in brackets.
    """
    groups, own = results.groups(), results.own_algorithms()
    sets = [(name, [name]) for name in own]
    sets += [("best of " + ", ".join(names), list(names)) for names in together]
    sets += [("best of all", own)] if len(own) > 1 else []
    lines = []
    for name, algorithms in sets:
        count = sum(results.own(problem, algorithms) is not None for problem in results.problems)
        ratios = [results.ratios(group, algorithms) for group in groups]
        cells = [f"{geometric_mean(found):.2f} ({min(found):.2f})" if found else "–" for found in ratios]
        lines.append([name, str(count), *cells])
    return ["algorithm", "problems", *(f"× {group}" for group in groups)], lines


def detail(results: Results) -> Table:
    """A line for each engine's algorithm on each problem, the fastest first."""
    columns = ["problem", "engine", "algorithm", "µs", "quartiles", "TFLOP/s", "of ceiling", "workspace", "error"]
    columns.append("note")
    lines = []
    for problem in results.problems:
        for row in sorted(results.of(problem), key=lambda row: row.us):
            quartiles = f"{quantity(row.us_low)}–{quantity(row.us_high)}"
            figures = [quantity(row.us), quartiles, quantity(row.tflops), _share(row), _memory(row)]
            note = ", ".join(filter(None, [row.variant, row.note]))
            if row.registers is not None:
                note = ", ".join(filter(None, [f"{row.registers} registers, {row.spill_bytes} B spilled", note]))
            if not right(row):
                note = ", ".join(filter(None, ["WRONG, not compared with", note]))
            lines.append([problem, row.engine, row.algorithm, *figures, _error(row), note])
    return columns, lines


def show(results: Results, full: bool | None = None) -> None:
    """Print the tables: every row for up to three problems (or with ``full``), and the summary."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)

    def put(title: str, content: Table, left: int) -> None:
        table = RichTable(title=title, title_justify="left")
        for number, name in enumerate(content[0]):
            table.add_column(name, justify="left" if number < left or name == "note" else "right")
        for line in content[1]:
            table.add_row(*line)
        console.print(table)

    if results.rows and all(row.variant for row in results.rows):
        from leanconv.bench.ablation import FULL
        from leanconv.bench.comparisons import ABLATION_CELL, ablation

        for algorithm in dict.fromkeys(row.algorithm for row in results.rows if row.variant == FULL):
            put(f"{_title(results)}: {algorithm}, {ABLATION_CELL}", ablation(results, algorithm), 1)
        for line in _legend(results):
            console.print(line, highlight=False, markup=False)
        return
    if full if full is not None else len(results.problems) <= 3:
        put("every engine", detail(results), 3)
    put(_title(results), summary(results), 2)
    from leanconv.bench.families import TARGETS, family_table, target_table

    on_gpu = bool(results.machine.get("gpu"))
    if on_gpu and results.suite in TARGETS and TARGETS[results.suite][0] in results.own_algorithms():
        put("families", family_table(results, TARGETS[results.suite][0]), 1)
        put("targets", target_table(results), 1)
    if results.own_algorithms() and len(results.problems) > 1:
        put(f"over all problems: {STANDINGS_CELL}", standings(results), 1)
    for line in _legend(results):
        console.print(line, highlight=False, markup=False)


def _title(results: Results) -> str:
    machine = results.machine
    where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    return f"{results.title} on {where}"


def about_layouts(results: Results) -> str:
    """A sentence where libraries do not have the layout of the results; empty where they do."""
    if results.layout in (None, *PEER_LAYOUTS):
        return ""
    theirs = " and ".join(PEER_LAYOUTS)
    return f"cuDNN and PyTorch have no layout {results.layout}: they take the same numbers in {theirs}."


def _legend(results: Results) -> list[str]:
    """What the columns mean, and what is not in them."""
    ceilings = results.machine["ceilings"]
    tf32 = f", TF32 {quantity(ceilings['tf32_tflops'])} TFLOP/s" if ceilings["tf32_tflops"] else ""
    lines = [
        f"Ceilings in this run: FP32 {quantity(ceilings['fp32_tflops'])} TFLOP/s{tf32}, "
        f"copy {quantity(ceilings['copy_tbytes'])} TB/s ({ceilings['how']})."
    ]
    present = results.groups()
    meanings = [f"{group.name}: {group.says(results.layout)}" for group in GROUPS if group.name in present]
    if meanings:
        lines.append("× is the peer's time over leanconv's. " + "; ".join(meanings) + ".")
    if told := about_layouts(results):
        lines.append(told)
    if any(row.prepared_bytes for row in results.rows):
        lines.append(
            "Workspace + is of filters that each call transforms anew, or once where they are prepared before."
        )
    lines += [f"Absent: {name} – {reason}." for name, reason in results.absent.items()]
    lines += [f"Warning: {text}." for text in results.warnings]
    if results.missing:
        lines.append(f"Missing: {len(results.missing)} problems, from {results.missing[0]} on; --resume measures them.")
    lines += [f"FAILED: {entry['engine']} on {entry['problem']}: {entry['reason']}" for entry in results.failed]
    if results.skipped:
        engines = sorted({entry["engine"] for entry in results.skipped})
        lines.append(f"Not able to run some problem (reasons in the file): {', '.join(engines)}.")
    return lines


def markdown(content: Table) -> str:
    """A table in Markdown."""
    columns, lines = content
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(head + ["| " + " | ".join(line) + " |" for line in lines])


def _section(results: Results) -> str:
    machine = results.machine
    fields = ("driver", "cuda", "nvrtc", "cudnn", "torch", "cupy", "numpy", "scipy", "opencv", "leanconv")
    versions = ", ".join(f"{name} {machine[name]}" for name in fields if machine.get(name))
    commit = machine.get("git_revision") or "unknown"
    dirty = " with changes" if machine.get("git_dirty") else ""
    parts = [
        f"## {_title(results)}",
        f"Measured {machine['date']}, revision {commit}{dirty}; {versions}.",
        markdown(summary(results)),
        *_standings_section(results),
        "\n".join(f"- {line}" for line in _legend(results)),
    ]
    return "\n\n".join(parts)


def _standings_section(results: Results) -> list[str]:
    if not results.own_algorithms():
        return []
    return [f"Each algorithm over all problems ({STANDINGS_CELL}):", markdown(standings(results))]


_HEAD = """# Performance

This page is made by `python -m leanconv.bench.tables benchmarks/results -o docs/performance.md` from the committed
results files; do not edit it. `leanconv bench SUITE` makes such a file on your machine.

Times are medians: of GPU time between CUDA events after a warm-up, the L2 cache emptied before each run of memory-bound
work; of wall time on a CPU. They include every launch that a call needs. TFLOP/s count the direct convolution's
operations, whatever an algorithm really computes. "of ceiling" is the least time that the machine's measured FP32 rate
and copy bandwidth allow, over the time taken, with the ceiling that binds. Errors are relative Frobenius errors against
float64 on zero-mean random data. Peers ran in the same run, cuDNN and PyTorch in NCHW and NHWC whatever the layout;
every row of every engine is in the files."""


def performance_page(paths: Sequence[Path]) -> str:
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
    names = {name + layout + tier for name in suite_names() for layout in layouts for tier in tiers}
    return sorted(path for path in root.glob("*/*.json") if path.stem in names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description="Make docs/performance.md from results files.")
    parser.add_argument("results", type=Path, nargs="?", default=Path("benchmarks/results"), help="folder or file")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/performance.md"))
    options = parser.parse_args(arguments)
    files = results_files(options.results)
    write_whole(options.out, performance_page(files))
    print(f"{options.out}: {len(files)} results files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
