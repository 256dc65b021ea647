"""Pieces that every page has: tables, and where figures come from."""

from __future__ import annotations

from typing import Any

from leanconv.bench.format import Table


def table(content: Table) -> str:
    """A table in Markdown.

    >>> table((["x", "y"], [["1", "2"]]))
    '| x | y |\\n|---|---|\\n| 1 | 2 |'
    """
    columns, lines = content
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(head + ["| " + " | ".join(line) + " |" for line in lines])


def revision(record: dict[str, Any], digits: int = 40) -> str:
    """The git revision that a record was measured with, and whether files differed from it."""
    commit = (record.get("git_revision") or "unknown")[:digits]
    return f"revision {commit}{' with changes' if record.get('git_dirty') else ''}"
