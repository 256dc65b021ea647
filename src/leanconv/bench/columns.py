"""The form of results files: JSON whose lists of rows are columns, a line for each row.

A list of dicts stands in the file as one of objects and lists::

    "rows": [
     {"fields":["engine","algorithm","us","note","left?"],"dtype":"float32","note":""},
     {"problem":"layer1"},
     ["leanconv","direct",12.5],
     ["leanconv","winograd2d",8.25,"packed before",3]
    ]

An object has values that hold for the rows below it. One with ``fields`` begins anew and names the values of each list,
in their order. A list may end early: the rest is what the object says. A row whose value of a field with a ``?`` is
null, or not there, does not have the field. `read` gives dicts back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from leanconv.runtime.files import read_bytes, read_json, write_text

#: Counts up when what a results file says has another meaning or form.
SCHEMA = 2

Row = Mapping[str, Any]


def read(path: Path) -> dict[str, Any]:
    """What a file says, each list of rows as dicts. Raises ValueError naming a file that is damaged."""
    try:
        content = read_json(read_bytes(path))
        if not isinstance(content, dict):
            raise ValueError("it is no object")
        return {name: unpacked(value) if _in_columns(value) else value for name, value in content.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file, each list of dicts in it as columns; it appears whole or not at all. NaN is refused."""
    parts = []
    for name, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            lines = packed(value) if isinstance(value[0], dict) else value
            text = "[\n  " + ",\n  ".join(map(_text, lines)) + "\n ]"
        else:
            text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).replace("\n", "\n ")
        parts.append(f" {_text(name)}: {text}")
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _in_columns(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "fields" in value[0]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def unpacked(lines: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows of a list in columns. Raises ValueError for a row of more values than there are fields.

    >>> unpacked([{"fields": ["us", "note", "left?"], "note": ""}, [1.5], [2.5, "cold", 3]])
    [{'note': '', 'us': 1.5}, {'note': 'cold', 'us': 2.5, 'left': 3}]
    """
    fields: list[str] = []
    held: dict[str, Any] = {}
    rows = []
    for line in lines:
        if isinstance(line, dict):
            rest = {name: value for name, value in line.items() if name != "fields"}
            fields, held = (line["fields"], rest) if "fields" in line else (fields, held | rest)
        elif len(line) > len(fields):
            raise ValueError(f"a row has {len(line)} values for {len(fields)} fields: {line}")
        else:
            there = [
                (name, value) for name, value in zip(fields, line, strict=False) if value is not None or name[-1] != "?"
            ]
            rows.append({**held, **{name.removesuffix("?"): value for name, value in there}})
    return rows


def packed(rows: Sequence[Row]) -> list[Any]:
    """Rows in columns, which `unpacked` gives back. Raises ValueError for names that columns need themselves."""
    present = Counter(name for row in rows for name in row)
    if wrong := [name for name in present if name == "fields" or name[-1:] in ("", "?")]:
        raise ValueError(f"no field of a row can be called {wrong[0]!r}")
    some = sorted((name for name, count in present.items() if count < len(rows)), key=lambda name: -present[name])
    if any(row.get(name, "") is None for row in rows for name in some):
        return [line for _, block in groupby(rows, key=set) for line in _block(list(block), [])]
    return list(_block(rows, some))


def _block(rows: Sequence[Row], some: Sequence[str]) -> Iterator[Any]:
    """The lines of rows that all have the same fields but for ``some``, which come last and are nowhere null."""
    texts = {name: [_text(row[name]) for row in rows] for name in rows[0] if name not in some}
    held = [name for name, column in texts.items() if _held_is_shorter(name, column)]
    # a value that most rows have is said once, in the first object, and left out at the end of a row
    usual = {}
    for name, column in texts.items():
        text, count = Counter(column).most_common(1)[0]
        if name not in held and 2 * count > len(rows) > 1:
            usual[name] = text
    last = sorted(usual, key=lambda name: texts[name].count(usual[name]))
    fields = [*(name for name in texts if name not in {*held, *usual}), *last, *some]
    said = usual | {name: texts[name][0] for name in held}
    names = [f"{name}?" if name in some else name for name in fields]
    yield {"fields": names} | {name: json.loads(text) for name, text in said.items()}
    for i, row in enumerate(rows):
        if changed := {name: row[name] for name in held if texts[name][i] != said[name]}:
            said |= {name: texts[name][i] for name in changed}
            yield changed
        here = list(fields)
        while here and (here[-1] not in row or (here[-1] in usual and texts[here[-1]][i] == usual[here[-1]])):
            here.pop()
        yield [row.get(name) for name in here]


def _held_is_shorter(name: str, column: Sequence[str]) -> bool:
    """Whether a field takes half the space where its first value and each change of it are said in an object."""
    said = [text for i, text in enumerate(column) if not i or text != column[i - 1]]
    return 2 * sum(len(name) + len(text) + 6 for text in said) <= sum(len(text) + 1 for text in column)
