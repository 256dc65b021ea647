"""Records of what was measured: a file of JSON for each machine, and the words that every page has for one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.runtime.files import write_text

Record = dict[str, Any]


def write(results: Path, name: str, about: Record, rows: Iterable[Any], **more: Any) -> Path:
    """Write a record below ``results``, a line for each row; ``about`` is the machine. Returns the file."""
    path = results / machine.slug(about) / f"{name}.json"
    head = json.dumps({"machine": about, **more}, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    write_text(path, f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')
    return path


def begun(results: Path, name: str, about: Record) -> tuple[Path, list[Record]]:
    """The file of a record below ``results`` and the rows that it has, each with its revision and date."""
    path = results / machine.slug(about) / f"{name}.json"
    return path, dated(read(path))


def dated(record: Record) -> list[Record]:
    about = record.get("machine", {})
    return [{"revision": about["git_revision"], "date": about["date"], **row} for row in record.get("rows", ())]


def with_torch(revision: str | None) -> Record:
    """This machine with a GPU, and the versions of PyTorch and torchvision."""
    import torch
    import torchvision

    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    return machine.describe(True, None, versions, revision)


def read(path: Path) -> Record:
    """A record, or nothing where there is no file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def origin(about: Record) -> str:
    """On which GPU, when and with which revision it was measured."""
    return f"{about['gpu']}, {about['date'][:10]}, {revision(about, 12)}"


def revision(record: Record, digits: int = 40) -> str:
    """The git revision that a record was measured with, and whether files differed from it."""
    commit = (record.get("git_revision") or "unknown")[:digits]
    return f"revision {commit}{' with changes' if record.get('git_dirty') else ''}"


def table(content: Table) -> str:
    r"""A table in Markdown.

    >>> table((["x", "y"], [["1", "2"]]))
    '| x | y |\n|---|---|\n| 1 | 2 |'
    """
    columns, lines = content
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    return "\n".join(head + ["| " + " | ".join(line) + " |" for line in lines])
