"""The timed candidates of a GPU as the repository has them: a table that `leanconv tune` wrote, in columns.

Every configuration is there once, with the problems that it was timed on below it. What has no time, as its
registers spill, it failed or computed wrong values, is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leanconv.bench import columns
from leanconv.perf.tables import Entry, Table, Timed


def read(path: Path) -> Table:
    """The table of a file that `write` or `leanconv tune` made. Raises ValueError naming one that is damaged."""
    content = columns.read(path)
    if "format" in content:
        return Table.read(path)
    try:
        return Table(content["gpu"], dict(_entries(content)), name=str(path))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def write(path: Path, table: Table) -> None:
    """Write a table in columns. Raises ValueError for an entry that cannot be read."""
    problems: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for key in table:
        if (entry := table.get(key)) is None:
            raise ValueError(f"{table.name} has nothing that can be read for {key}")
        problems.append({"problem": key, "peers": dict(entry.peers), "versions": entry.versions})
        for each in (each for each in entry.timed if each.us is not None):
            wins = [limit for limit, won in entry.winners.items() if won.key == each.key]
            rows.append({"problem": key, **vars(each), "wins": wins})
    # a configuration's rows together, their problems in the order of the table
    rows.sort(key=lambda row: json.dumps((row["algorithm"], row["config"], row["kernels"])))
    columns.write(path, {"gpu": table.gpu, "problems": problems, "timed": rows})


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, Entry]]:
    timed: dict[str, list[Timed]] = {each["problem"]: [] for each in content["problems"]}
    winners: dict[str, dict[str, Timed]] = {problem: {} for problem in timed}
    for row in content["timed"]:
        problem, wins = row.pop("problem"), row.pop("wins")
        each = Timed(**row)
        timed[problem].append(each)
        winners[problem] |= dict.fromkeys(wins, each)
    for about in content["problems"]:
        quickest = sorted(timed[about["problem"]], key=lambda each: (each.us is None, each.us))
        yield about["problem"], Entry(tuple(quickest), winners[about["problem"]], about["peers"], about["versions"])
