"""Results on a terminal."""

from __future__ import annotations

from typing import Any

from leanconv.bench.families import GOALS, family_table, goal_table
from leanconv.bench.format import Table
from leanconv.bench.results import Results
from leanconv.bench.tables import STANDINGS_CELL, detail, heading, legend, standings, summary


def console(width: int = 120) -> Any:
    """A rich console as wide as the terminal, or ``width`` characters wide where the output is not a terminal."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=width)


def put(out: Any, title: str, content: Table, left: int) -> None:
    """Print a table on the console ``out``. The first ``left`` columns and notes are aligned left, numbers right."""
    from rich.table import Table as RichTable

    table = RichTable(title=title, title_justify="left")
    for number, name in enumerate(content[0]):
        table.add_column(name, justify="left" if number < left or name == "note" else "right")
    for line in content[1]:
        table.add_row(*line)
    out.print(table)


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
