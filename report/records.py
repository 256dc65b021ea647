"""Records of what was measured: a file of JSON for each machine, and the words that every page has for one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leanconv.bench import columns, machine, provenance
from leanconv.bench.format import Table
from leanconv.bench.results import Results

Record = dict[str, Any]
#: The revision of rows whose times were in a table of tuned problems before.
EARLIER = "before, with today's kernels"


def write(results: Path, name: str, about: Record, rows: Iterable[Any], **more: Any) -> Path:
    """Write a record below ``results``; ``about`` is the machine. Returns the file."""
    path = results / machine.slug(about) / f"{name}.json"
    columns.write(path, {"machine": about, **more, "rows": list(rows)})
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
    """A record, or nothing where there is no file. Raises ValueError for a damaged one."""
    return columns.read(path) if path.is_file() else {}


def checked(path: Path) -> Record:
    """A record for a page, or nothing where there is no file. Raises ValueError for one that cannot be traced.

    So are rows of another revision than the file's, which keep their own, unless the file is listed as an older one.
    """
    if not path.is_file() or _unmarked(path):
        return read(path)
    older = provenance.older(path.parent.parent)
    record = provenance.committed_record(path, older)
    about = record["machine"] if isinstance(record["machine"], dict) else record
    named = (row.get("revision", EARLIER) for row in record.get("rows", ()) if isinstance(row, dict))
    others = set(named) - {about["git_revision"], EARLIER}
    if others and f"{path.parent.name}/{path.name}" not in older:
        raise ValueError(f"{path} has rows of other revisions: {', '.join(sorted(map(str, others)))}")
    return record


def checked_suite(path: Path) -> Results:
    """The results of a suite for a page. Raises ValueError for a file that cannot be traced."""
    return Results.read(path) if _unmarked(path) else provenance.committed(path, provenance.older(path.parent.parent))


def _unmarked(path: Path) -> bool:
    """Whether a file is of a time before schemas and in the list of older ones, whose reason its page shows."""
    record = read(path)
    about = record["machine"] if isinstance(record.get("machine"), dict) else record
    return "schema" not in about and bool(reason(path))


def reason(path: Path) -> str:
    """Why a file of earlier kernels may still be used, as the list of them says; empty where it is not in the list."""
    return provenance.older(path.parent.parent).get(f"{path.parent.name}/{path.name}", "")


def origin(about: Record) -> str:
    """On which GPU, when and with which revision it was measured."""
    return f"{about['gpu']}, {about['date'][:10]}, {revision(about, 12)}"


def origin_of_rows(record: Record) -> str:
    """On which GPU a record's rows were measured, when, and at which revisions."""
    own = record["machine"]["git_revision"]
    commits = {
        (row["date"][:10], (own if row["revision"] == EARLIER else row["revision"])[:12]) for row in dated(record)
    }
    # of some ways of running a network the times alone may be later ones
    for row in record["rows"]:
        ways = [name.removesuffix("_date") for name in row if name.endswith("_date")]
        commits |= {(row[f"{way}_date"][:10], row[f"{way}_revision"][:12]) for way in ways}
    words = "; ".join(f"{date}, revision {commit}" for date, commit in sorted(commits))
    return f"{record['machine']['gpu']}, {words}"


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
