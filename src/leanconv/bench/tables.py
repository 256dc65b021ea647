"""Results as tables of text: a summary, every row, how algorithms stand, the notes below them; and on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from leanconv.bench.families import GOALS, family_table, goal_table
from leanconv.bench.format import Table, quantity, size
from leanconv.bench.results import GROUPS, PEER_LAYOUTS, Results, Row, geometric_mean, right

#: What a cell of standings() says.
STANDINGS_CELL = "geometric mean of the peer's time over ours, and the least in brackets"


def _error(row: Row) -> str:
    return "NaN or Inf" if row.error is None else f"{row.error:.1e}"


def _memory(row: Row) -> str:
    """Bytes of workspace, and of packed weights where there are any."""
    filters = f" + {size(row.prepared_bytes)}" if row.prepared_bytes else ""
    return size(row.workspace_bytes) + filters


def _share(row: Row) -> str:
    return f"{100 * row.ceiling_share:.0f}% {row.ceiling}"


def summary(results: Results) -> Table:
    """A line for each problem: what a call picks, or leanconv's fastest algorithm where that was not measured, and how
    many times faster it is than each group of peers. Workspace and error of PyTorch stand beside ours.

    Without rows of leanconv, the peers' microseconds stand in place of ratios. The last lines are geometric means, with
    the fastest of ours in place of what a call picks, too.
    """
    groups, who = results.groups(), results.headline
    own = any(results.own(problem) or results.own(problem, who) for problem in results.problems)
    if not own:
        columns = ["problem", *(f"{name}, µs" for name in groups)]
        lines = []
        for problem in results.problems:
            peers = results.peers(problem)
            lines.append([problem, *(quantity(peers[name].us) if name in peers else "–" for name in groups)])
        return columns, lines
    columns = ["problem", "auto" if who else "algorithm", "µs", "TFLOP/s", "of ceiling", "workspace", "error"]
    torch = next((name for name in ("PyTorch", "PyTorch, 16 bits") if name in groups), None)
    columns += [f"workspace of {torch}", f"error of {torch}"] if torch else []
    columns += ["fastest"] if who else []
    before = len(columns)
    columns += [f"× {name}" for name in groups]
    lines = []
    for problem in results.problems:
        row, peers, fastest = results.own(problem, who), results.peers(problem), results.own(problem)
        own_cells = (
            [row.algorithm, quantity(row.us), quantity(row.tflops), _share(row), _memory(row), _error(row)]
            if (row)
            else ["–", *[""] * 5]
        )
        theirs = peers.get(torch or "")
        their_cells = [_memory(theirs), _error(theirs)] if theirs else ["–", "–"]
        best = [f"{fastest.algorithm}, {quantity(fastest.us)} µs" if fastest else "–"]
        ratios = [f"{peers[name].us / row.us:.2f}" if row and name in peers else "–" for name in groups]
        lines.append([problem, *own_cells, *(their_cells if torch else []), *(best if who else []), *ratios])
    for words, algorithms in [("geometric mean", who), *([("geometric mean, fastest", None)] if who else [])]:
        means = [results.ratios(name, algorithms) for name in groups]
        cells = [f"{geometric_mean(values):.2f}" if values else "–" for values in means]
        lines.append([words, *[""] * (before - 1), *cells])
    return columns, lines


def standings(results: Results, together: Sequence[Sequence[str]] = ()) -> Table:
    """How many times faster than each group of peers every algorithm of leanconv is over all problems.

    A line for what a call picks, for each algorithm, for the best of each of ``together`` on every problem, and for the
    best of all. A cell is the geometric mean over the problems that both ran, with the least of the ratios in brackets.
    """
    groups, own = results.groups(), results.own_algorithms()
    sets = [(name, [name]) for name in [*(results.headline or ()), *own]]
    sets += [("best of " + ", ".join(names), list(names)) for names in together]
    sets += [("best of all", own)] if len(own) > 1 else []
    lines = []
    for name, algorithms in sets:
        count = sum(results.own(problem, algorithms) is not None for problem in results.problems)
        ratios = [results.ratios(group, algorithms) for group in groups]
        cells = [f"{geometric_mean(values):.2f} ({min(values):.2f})" if values else "–" for values in ratios]
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
            notes = [] if right(row) else ["FAIL, not compared with"]
            if row.registers is not None:
                notes.append(f"{row.registers} registers, {row.spill_bytes} B spilled")
            notes += filter(None, [row.variant, row.note])
            if row.us_sustained is not None:
                rate = results.problems[problem]["flops"] / row.us_sustained * 1e-6
                notes.append(f"sustained {quantity(rate)} TFLOP/s")
            lines.append([problem, row.engine, row.algorithm, *figures, _error(row), ", ".join(notes)])
    return columns, lines


def heading(results: Results) -> str:
    """What was measured, and on which machine."""
    cores = "" if results.machine.get("gpu") else f", {results.machine.get('cores')} cores"
    return f"{results.title} on {results.place}{cores}"


def about_layouts(results: Results) -> str:
    """A sentence for results in a layout that the libraries do not have; else empty."""
    if results.layout in (None, *PEER_LAYOUTS):
        return ""
    theirs = " and ".join(PEER_LAYOUTS)
    return f"cuDNN and PyTorch have no layout {results.layout}: they take the same numbers in {theirs}."


def legend(results: Results) -> list[str]:
    """What the columns mean, and what is not in them."""
    ceilings = results.machine["ceilings"]
    rates = {kind: ceilings.get(f"{kind.lower()}_tflops") for kind in ("FP32", "TF32", "FP16")}
    said = ", ".join(f"{kind} {quantity(rate)} TFLOP/s" for kind, rate in rates.items() if rate)
    lines = [f"Ceilings in this run: {said}, copy {quantity(ceilings['copy_tbytes'])} TB/s ({ceilings['how']})."]
    present = results.groups()
    meanings = [f"{group.name}: {group.meaning}" for group in GROUPS if group.name in present]
    if meanings:
        picked = " with what a call picks (auto)" if results.headline else ""
        lines.append(f"× is the peer's time over leanconv's{picked}. " + "; ".join(meanings) + ".")
        lines.append(results.counted(results.headline))
    if note := about_layouts(results):
        lines.append(note)
    if any(row.prepared_bytes for row in results.rows):
        lines.append(
            "Workspace + is of packed weights, which each call makes anew, or once where they are prepared before."
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


def console(width: int = 120) -> Any:
    """A rich console as wide as the terminal, or ``width`` characters wide where the output is not a terminal."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


def put(out: Any, title: str, content: Table, left: int) -> None:
    """Print a table on the console ``out``. The first ``left`` columns and notes are aligned left, numbers right.

    Columns that the console has no room for follow in tables of their own, each with the first ``left`` again.
    """
    from rich.table import Table as RichTable

    out.print(title, style="italic", highlight=False)
    for columns, lines in in_parts(content, left, out.width):
        table = RichTable()
        for number, name in enumerate(columns):
            side: Any = "left" if number < left or name == "note" else "right"
            needed = widest([name, *(line[number] for line in lines)])
            table.add_column(name, justify=side, overflow="fold", min_width=needed if number >= left else None)
        for line in lines:
            table.add_row(*line)
        out.print(table)


def widest(texts: Iterable[str]) -> int:
    """The length of the longest word, which a column needs: lines are broken at blanks."""
    return max((len(word) for text in texts for word in text.split()), default=0)


def in_parts(content: Table, left: int, width: int) -> list[Table]:
    """A table's columns in as many tables as none of their words is cut, each with the first ``left`` columns, which
    leave room for any other and may be folded for that.

    >>> in_parts((["layer", "auto", "us"], [["conv1", "tensor_gemm", "12.5"]]), 1, 25)
    [(['layer', 'auto'], [['conv1', 'tensor_gemm']]), (['layer', 'us'], [['conv1', '12.5']])]
    """
    names, lines = content
    # a column has a border and two blanks
    needed = [3 + widest([name, *(line[i] for line in lines)]) for i, name in enumerate(names)]
    rest = max(needed[left:], default=0)
    names_take = min(sum(needed[:left]), max(width - 1 - rest, 8 * left))
    parts: list[list[int]] = []
    room = 0
    for number in range(left, len(names)):
        if not parts or needed[number] > room:
            parts.append([*range(left)])
            room = width - 1 - names_take
        parts[-1].append(number)
        room -= needed[number]
    return [([names[i] for i in part], [[line[i] for i in part] for line in lines]) for part in parts]


def put_legend(out: Any, results: Results) -> None:
    """Print on the console ``out`` what the columns mean, and what is not in them."""
    for line in legend(results):
        out.print(line, highlight=False, markup=False)


def show(results: Results, full: bool | None = None) -> None:
    """Print the tables: every row for up to three problems (or with ``full``), and the summary."""
    out = console(200)
    if full if full is not None else len(results.problems) <= 3:
        put(out, "every engine", detail(results), 3)
    put(out, heading(results), summary(results), 2)
    on_gpu = bool(results.machine.get("gpu"))
    if on_gpu and results.suite in GOALS and GOALS[results.suite][0] in results.own_algorithms():
        put(out, "families", family_table(results, GOALS[results.suite][0]), 1)
        put(out, "targets", goal_table(results), 1)
    if results.own_algorithms() and len(results.problems) > 1:
        put(out, f"over all problems: {STANDINGS_CELL}", standings(results), 1)
    put_legend(out, results)
