"""The form of results files: rows as columns, for suites, records and tables of timed candidates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leanconv.bench import Results, candidates, columns
from leanconv.bench.format import significant
from leanconv.perf.tables import Entry, Table, Timed, update
from tests import made_up

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": 1}],
        [{}, {"a": 1}, {}],
        [{"a": None}, {"a": 0}, {"a": False}, {"a": 0.0}, {"a": ""}, {}],
        [{"a": i // 10, "us": i / 7, "note": "x" * (i == 5), "more": {"b": [i]}} for i in range(30)],
        # some have more fields, in an order that only the end of a row can say, and in none
        [{"a": i} | ({"b": 1} if i > 2 else {}) | ({"c": 2} if i > 4 else {}) for i in range(9)],
        [{"a": i} | ({"b": 1} if i % 2 else {"c": 2}) for i in range(5)],
        [{"a": "Größe\n", "b": i, "c": 0 if i else 1} for i in range(3)],
    ],
)
def test_rows_come_back(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    columns.write(tmp_path / "a.json", {"machine": {"gpu": None}, "none": [], "names": ["a"], "rows": rows})
    found = columns.read(tmp_path / "a.json")
    assert json.dumps(found["rows"], sort_keys=True) == json.dumps(rows, sort_keys=True), "types too"
    assert {**found, "rows": 0} == {"machine": {"gpu": None}, "none": [], "names": ["a"], "rows": 0}


def test_a_row_is_a_line(tmp_path: Path) -> None:
    """Names are there once, what rows have in common stands above them, and what most have is left out at their end."""
    rows: list[dict[str, Any]] = [
        {"problem": f"the layer {i // 4}", "us": i + 0.5, "dtype": "float32", "note": "slow" if i in (2, 4, 6) else ""}
        for i in range(8)
    ]
    rows[5]["left"] = 3
    columns.write(tmp_path / "a.json", {"rows": rows})
    assert (tmp_path / "a.json").read_text().splitlines() == [
        "{",
        ' "rows": [',
        '  {"fields":["us","note","left?"],"note":"","problem":"the layer 0","dtype":"float32"},',
        "  [0.5],",
        "  [1.5],",
        '  [2.5,"slow"],',
        "  [3.5],",
        '  {"problem":"the layer 1"},',
        '  [4.5,"slow"],',
        '  [5.5,"",3],',
        '  [6.5,"slow"],',
        "  [7.5]",
        " ]",
        "}",
    ]


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "3", '{"rows": [{"fields": ["a"]}, [1, 2]]}', '{"rows": [{"fields": 1}, [1]]}']
)
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is damaged"):
        columns.read(tmp_path / "a.json")


def test_a_row_of_too_many_values_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a row has 2 values for 1 fields: \[1, 2\]"):
        columns.unpacked([{"fields": ["a"]}, [1, 2]])


@pytest.mark.parametrize("name", ["fields", "left?", ""])
def test_a_name_that_columns_need_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"can be called '{re.escape(name)}'"):
        columns.packed([{name: 1}])


def test_rows_that_are_lists_stay(tmp_path: Path) -> None:
    columns.write(tmp_path / "a.json", {"rows": [[1, 2], [3, 4]]})
    assert columns.read(tmp_path / "a.json") == {"rows": [[1, 2], [3, 4]]}
    assert "\n  [1,2],\n  [3,4]\n" in (tmp_path / "a.json").read_text()


def test_what_is_no_number_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        columns.write(tmp_path / "a.json", {"rows": [{"us": float("nan")}]})
    assert not list(tmp_path.iterdir())


def test_reasons_of_a_suite_are_said_once(tmp_path: Path) -> None:
    """Without problems where they hold for all; they come back problem by problem."""
    suite = made_up.suite()
    every, path = list(suite.problems), tmp_path / "a.json"
    suite.skipped = [
        *({"problem": name, "engine": "cudnn:fft", "reason": "not supported"} for name in every),
        {"problem": every[1], "engine": "leanconv direct", "reason": "c=3 is not 1"},
        {"problem": "never measured", "engine": "all", "reason": "too many operations"},
    ]
    suite.write(path)
    assert path.read_text().count("not supported") == 1
    written = columns.read(path)["skipped"]
    assert "problems" not in written[0]
    assert [each["problems"] for each in written[1:]] == [[1], ["never measured"]]
    assert Results.read(path) == suite


def test_a_suite_of_another_schema_is_refused(tmp_path: Path) -> None:
    suite = made_up.suite()
    replace(suite, machine=suite.machine | {"schema": 1}).write(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json .*: it is of schema 1, and this version reads schema 2"):
        Results.read(tmp_path / "a.json")


def test_figures_have_significant_digits() -> None:
    assert [significant(x) for x in (1234567.8, 41.77449, 0.0, 1.23456789e-7)] == [1234600.0, 41.774, 0.0, 1.2346e-07]


# tables of timed candidates


def table() -> Table:
    fast = Timed("direct", {"tile": 4, "wide": True}, 10.0, {"direct": "abc"}, runs=9)
    slow = Timed("direct", {"tile": 8, "wide": True}, 20.5, {"direct": "abc"}, workspace=64, runs=3)
    spills = Timed("winograd2d", {"states": 16}, None, why="12 bytes of registers spill", prepared=100)
    return Table(
        {"name": "NVIDIA X", "arch": "sm_90a", "multiprocessors": 2},
        {
            "conv:n1,c2,h9,w9,k3,r3,s3": Entry(
                (fast, slow, spills), {"auto": fast, "0": fast, "128": slow}, {"torch-fp32": 30.0}, "torch 9"
            ),
            "conv:n1,c2,h9,w9,k4,r3,s3": Entry((fast,), {}),
        },
    )


def test_candidates_come_back(tmp_path: Path) -> None:
    before, path = table(), tmp_path / "timed.json"
    candidates.write(path, before)
    after = candidates.read(path)
    assert after.gpu == before.gpu and list(after) == list(before)
    for key in before:
        entry = before.get(key)
        assert entry is not None and any(each.us is None for each in entry.timed) == (key == next(iter(before)))
        assert after.get(key) == replace(entry, timed=tuple(each for each in entry.timed if each.us is not None))
    update(tmp_path / "user.json", before)
    assert all(candidates.read(tmp_path / "user.json").get(key) == before.get(key) for key in before)


def test_a_damaged_table_of_candidates_is_named(tmp_path: Path) -> None:
    candidates.write(tmp_path / "timed.json", table())
    text = (tmp_path / "timed.json").read_text()
    for broken in (text[:200], text.replace('"algorithm"', '"algo"'), text.replace('"problems"', '"layers"')):
        assert broken != text
        (tmp_path / "timed.json").write_text(broken)
        with pytest.raises(ValueError, match=r"timed\.json is damaged"):
            candidates.read(tmp_path / "timed.json")


# what is committed


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*/results/*/*.json")), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_committed_files_are_as_they_are_written(path: Path, tmp_path: Path) -> None:
    content, again = columns.read(path), tmp_path / path.name
    if "suite" in content:
        Results.read(path).write(again)
    elif "timed" in content:
        candidates.write(again, candidates.read(path))
    else:
        columns.write(again, content)
    assert again.read_text(encoding="utf-8") == path.read_text(encoding="utf-8")


def test_results_are_small() -> None:
    assert sum(path.stat().st_size for path in (ROOT / "benchmarks" / "results").rglob("*.*")) <= 3e6
