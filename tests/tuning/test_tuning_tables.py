"""Tables of tuned problems: who is asked first, what is a miss, what is never overwritten, how long reading takes."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

import leanconv
from leanconv.call.choose import Candidate, by_model, choose
from leanconv.call.explain import NOMINAL
from leanconv.cli import doctor
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, TableError, Timed
from leanconv.plan import Target
from leanconv.runtime import cache
from leanconv.runtime.files import MOST
from leanconv.tuning import verify
from leanconv.words import format_problem, parse_problem
from tests.calls import calls_of
from tests.messages import says
from tests.tuning_stage import LAYER, MODEL, Stage, stage

__all__ = ["stage"]
FILE = f"{tables.slug(MODEL)}.json"


def timed(candidate: Candidate, us: float, target: Target, problem: Any = LAYER) -> Timed:
    plan = candidate.plan(problem, target)
    config: Any = candidate.config
    return Timed(candidate.algorithm.name, dict(config.constants()), us, tables.kernels_of(plan))


def table(stage: Stage, place: int, problem: Any = LAYER) -> Table:
    """One where a candidate wins."""
    winner = timed(stage.candidates(problem)[place], 10.0, stage.target, problem)
    entry = Entry((winner,), {"auto": winner})
    return Table(tables.gpu_record(stage.target), {format_problem(problem): entry})


def chosen(stage: Stage) -> tuple[str, Any]:
    choice = choose(LAYER, stage.target)
    return choice.source, choice.config


def test_no_table_chooses_for_images_that_keep_their_bits(stage: Stage, tmp_path: Path) -> None:
    """What was timed for one batch has an order of sums that other batches need not have."""
    tables.update(tmp_path / FILE, table(stage, 1))
    tables.forget()
    assert choose(LAYER, stage.target).source == tables.USER
    assert choose(replace(LAYER, batch_invariant=True), stage.target).source == tables.MODEL


def configs(stage: Stage) -> list[Any]:
    return [candidate.config for candidate in stage.candidates()]


def test_the_users_table_then_the_shipped_one_then_the_model(stage: Stage, tmp_path: Path) -> None:
    model, mine, shipped, session = configs(stage)
    assert chosen(stage) == (tables.MODEL, model)
    tables.update(tables.path_of(tables.SHIPPED, MODEL), table(stage, 2))
    tables.forget()
    assert chosen(stage) == (tables.SHIPPED_TABLE, shipped)
    tables.update(tmp_path / FILE, table(stage, 1))
    assert chosen(stage) == (tables.SHIPPED_TABLE, shipped), "a table is read once"
    tables.forget()
    assert chosen(stage) == (tables.USER, mine)
    tables.update(tmp_path / "session" / FILE, table(stage, 3))
    tables.use(tmp_path / "session")
    assert chosen(stage) == (tables.USER, session)


def test_by_name_the_quickest_of_that_algorithm_is_taken(stage: Stage, tmp_path: Path) -> None:
    every = stage.candidates(most=20)
    name = next(c.algorithm.name for c in every if [d.algorithm.name for d in every].count(c.algorithm.name) > 1)
    slow, quick, *_ = (c for c in every if c.algorithm.name == name)
    known = Entry((timed(slow, 30.0, stage.target), timed(quick, 20.0, stage.target)))
    tables.update(tmp_path / FILE, Table(tables.gpu_record(stage.target), {format_problem(LAYER): known}))
    assert choose(LAYER, stage.target, name).config == quick.config
    assert choose(LAYER, stage.target).source == tables.MODEL, "nobody has said which wins"


#: What the candidate of an entry may be changed to: first what can be read, and is none of today's.
STALE: dict[str, Any] = {
    "other kernels": lambda each: each | {"kernels": dict.fromkeys(each["kernels"], "0" * 12)},
    "unknown algorithm": lambda each: each | {"algorithm": "fft"},
    "unknown configuration": lambda each: each | {"config": each["config"] | {"stages": 77}},
}
UNREADABLE: dict[str, Any] = {
    "no number": lambda each: each | {"us": "fast"},
    "kernels as before": lambda each: each | {"kernels": "0" * 12},
    "no candidate": lambda each: [],
    "workspace in words": lambda each: each | {"workspace": "a"},
    "negative workspace": lambda each: each | {"workspace": -1},
    "endless workspace": lambda each: each | {"workspace": 10**400},
    "no packed bytes": lambda each: each | {"prepared": None},
    "negative packed bytes": lambda each: each | {"prepared": -1},
    "more packed bytes than there are": lambda each: each | {"prepared": 1 << 63},
    "negative runs": lambda each: each | {"runs": -1},
    "a configuration of lists": lambda each: each | {"config": {key: [1] for key in each["config"]}},
    "a list of a configuration": lambda each: each | {"config": [*each["config"].items()]},
    "endless": lambda each: each | {"us": float("inf")},
    "no float": lambda each: each | {"us": 10**400},
    "true": lambda each: each | {"us": True},
    "no time": lambda each: each | {"us": None},
    "a reason that is no text": lambda each: each | {"why": {}},
}
NO_TIMES = {
    "no float": 10**400, "endless": float("inf"), "not a number": float("nan"), "negative": -1.0, "none": 0,
    "in words": "1", "true": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "beside"),
    [
        *(pytest.param(change, {}, id=name) for name, change in (STALE | UNREADABLE).items()),
        *(pytest.param(dict, {"peers": {"torch": us}}, id=f"a peer's time: {name}") for name, us in NO_TIMES.items()),
        pytest.param(dict, {"peers": [1.0]}, id="a list of peers"),
        pytest.param(dict, {"winners": {"auto": 0, "-1": 0}}, id="a negative limit"),
        pytest.param(dict, {"winners": {"auto": 0, "9" * 5000: 0}}, id="an endless limit"),
    ],
)
def test_what_does_not_hold_here_is_a_miss(stage: Stage, tmp_path: Path, change: Any, beside: Any) -> None:
    """What cannot be read is named, once."""
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    record = json.loads(path.read_text())
    entry = record["problems"][format_problem(LAYER)]
    entry["timed"][0] = change(entry["timed"][0])
    entry |= beside
    path.write_text(json.dumps(record))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            assert chosen(stage) == (tables.MODEL, configs(stage)[0])
        assert doctor._tables().state == "ok" and str(leanconv.explain(LAYER, device="cuda"))
        list(verify.verify(Table.read(path), stage.target, tables.USER))
    named = [each for each in found if "has nothing that can be read for" in str(each.message)]
    assert len(named) == (change not in STALE.values())


def test_an_unknown_number_of_a_configuration_is_a_miss_named_once(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    path.write_text(path.read_text().replace('"config":{', '"config":{"parts":1,'))
    with pytest.warns(RuntimeWarning, match="has parts in a configuration of .*, which this version does not know"):
        assert chosen(stage)[0] == tables.MODEL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(stage)[0] == tables.MODEL


def test_unknown_entries_are_ignored_and_kept(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    text = path.read_text().replace('"winners"', '"mood":"good","winners"')
    path.write_text(text.replace('"problems": {\n', '"problems": {\n"conv:new,words": {"x":1},\n'))
    assert chosen(stage) == (tables.USER, configs(stage)[2])
    tables.update(path, table(stage, 1, replace(LAYER, n=5)))
    assert '"conv:new,words": {"x":1}' in path.read_text() and '"mood":"good"' in path.read_text()
    # in any spelling of JSON
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    tables.forget()
    assert chosen(stage) == (tables.USER, configs(stage)[2])


def test_a_table_from_a_newer_version_is_neither_read_nor_written(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    before = path.read_bytes()
    assert chosen(stage)[0] == tables.MODEL
    with says(TableError, str(path), "newer version of leanconv: its format is 3"):
        leanconv.tune([LAYER])
    assert path.read_bytes() == before and not stage.started


def test_a_table_from_an_older_version_is_refused_by_name_and_kept_aside(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    path.write_text(path.read_text().replace('"format": 2', '"format": 1'))
    before = path.read_bytes()
    assert chosen(stage)[0] == tables.MODEL
    with says(TableError, str(path), "older version of leanconv: its format is 1, not 2"):
        Table.read(path)
    tables.forget()
    leanconv.tune([LAYER])
    assert path.with_suffix(".older").read_bytes() == before and chosen(stage)[0] == tables.USER


def test_a_table_of_another_gpu_is_not_overwritten(stage: Stage, tmp_path: Path) -> None:
    """A part of a GPU may have the name of the whole."""
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    before = path.read_bytes()
    stage.device.target = stage.target = replace(stage.target, multiprocessors=16)
    assert chosen(stage)[0] == tables.MODEL
    with says(TableError, "132 multiprocessors", "16 multiprocessors", "not overwritten"):
        leanconv.tune([LAYER])
    assert path.read_bytes() == before


def deep(levels: int = 100_000) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"format": 2, "gpu": {}, "problems": {\n"conv:', deep(), '{"format": 2, "gpu": ' + deep()]
)
def test_a_damaged_table_is_a_miss_and_is_kept_aside(stage: Stage, tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE
    path.write_text(text)
    assert chosen(stage)[0] == tables.MODEL
    try:
        tables.update(path, table(stage, 2))
    except TableError:
        assert '"gpu": {}' in text and path.read_text() == text, "it says that it is for another GPU"
        return
    assert path.with_suffix(".damaged").read_text() == text
    tables.forget()
    assert chosen(stage)[0] == tables.USER


FILES = {
    "a FIFO": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a loop": lambda path: path.symlink_to(path.name),
    "too large": lambda path: os.truncate(os.open(path, os.O_WRONLY | os.O_CREAT), MOST + 1),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_what_is_no_file_that_can_be_read_is_a_miss_named_once(
    stage: Stage, tmp_path: Path, make: Any, run: Any
) -> None:
    """A FIFO was waited for, and what has no end read until memory was full, by each choice and by the doctor."""
    path = tmp_path / FILE
    make(path)
    with pytest.warns(RuntimeWarning, match=f"is not used: .*{FILE}"):
        assert chosen(stage)[0] == tables.MODEL
    tables.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(stage)[0] == tables.MODEL
    finding = doctor._tables()
    assert finding.state == "broken" and FILE in finding.text
    for action in ("--show", "--verify"):
        code, out, err = run("tune", action)
        assert code == 0 and FILE in out, err
    if not path.is_symlink() or path.exists():
        tables.update(path, table(stage, 2))
        tables.forget()
        assert path.with_suffix(".damaged").lstat() and chosen(stage)[0] == tables.USER


@pytest.mark.parametrize("indent", [None, 1])
def test_an_entry_that_is_too_deep_is_a_miss_named_once(stage: Stage, tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    text = path.read_text() if indent is None else json.dumps(json.loads(path.read_text()), indent=indent)
    path.write_text(re.sub(r'"why":.*?\}|"us": ?10.0', f'"us": {deep()}', text))
    with pytest.warns(RuntimeWarning, match="too deep"):
        assert chosen(stage)[0] == tables.MODEL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(LAYER, stage.target).source == tables.MODEL


def test_a_damaged_line_is_a_miss(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / FILE
    tables.update(path, table(stage, 2))
    tables.update(path, table(stage, 1, replace(LAYER, k=16)))
    path.write_text(path.read_text().replace('"conv:n1,c4,h6,w6,k16,', "conv:n1,"))
    assert chosen(stage)[0] == tables.USER and choose(replace(LAYER, k=16), stage.target).source == tables.MODEL
    assert leanconv.tune([LAYER], mode="read-only", most=2).timed == 2
    tables.forget()
    tables.update(path, table(stage, 2))
    assert path.with_suffix(".damaged").exists() and len(Table.read(path)) == 1


def test_writers_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes so long between reading and writing that without the lock all read the same."""
    path, real, begun = tmp_path / "t.json", tables._read_for, threading.Barrier(3)

    def slow(*arguments: Any) -> Table:
        found = real(*arguments)
        time.sleep(0.1)
        return found

    def write(i: int) -> None:
        won = Timed("direct", {"threads": 128}, 1.0 + i)
        begun.wait()
        tables.update(path, Table({"name": "g"}, {f"conv:n{i}": Entry((won,), {"auto": won})}))

    tables.update(path, Table({"name": "g"}))
    monkeypatch.setattr(tables, "_read_for", slow)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    assert len(json.loads(path.read_text())["problems"]) == 3


def test_a_table_that_another_keeps_locked_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, table = tmp_path / "t.json", Table({"name": "g"}, {"conv:a": {"timed": [], "winners": {}}})
    monkeypatch.setattr(tables, "PATIENCE", 0.1)
    with FileLock(f"{path}.lock"), pytest.raises(OSError, match=r"t.json.lock"):
        tables.update(path, table)
    assert len(tables.update(path, table)) == 1


def test_a_write_that_fails_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "t.json", Path.write_text
    tables.update(path, Table({"name": "g"}, {"conv:a": {"timed": [], "winners": {}}}))
    before = path.read_text()

    def half(self: Path, text: str, **more: Any) -> None:
        real(self, text[: len(text) // 2], **more)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        tables.update(path, Table({"name": "g"}, {"conv:b": {"timed": [], "winners": {}}}))
    assert path.read_text() == before


def test_an_entry_comes_back_whole_and_merges_field_by_field(tmp_path: Path) -> None:
    won = Timed("direct", {"threads": 128}, 10.0, {"direct": "abc"}, workspace=4, prepared=8, runs=9, why="w", code="c")
    old = Entry((won,), {"auto": won}, {"torch-fp32": 2.0}, "torch 9")
    tables.update(tmp_path / "t.json", Table({"name": "g"}, {"conv:a": old}))
    assert Table.read(tmp_path / "t.json").get("conv:a") == old
    other = replace(won, config={"threads": 64}, us=20.0)
    assert old.merged(Entry((other,))) == replace(old, timed=(won, other)), (
        "what is newer and says nothing takes nothing"
    )
    newer = old.merged(Entry(peers={"torch-tf32": 1.0}, versions="torch 10"))
    assert newer.versions == "torch 10" and newer.peers == {"torch-fp32": 2.0, "torch-tf32": 1.0}
    again = replace(won, us=5.0)
    assert old.merged(Entry((again,))).winners == {"auto": again}
    assert won.fits(12, auto=True) and not won.fits(11, auto=True), "packed weights count"
    assert won.fits(None, auto=False) and not won.fits(None, auto=True)


def test_comments_do_not_make_a_new_version(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    plan = stage.plan(stage.candidates()[0])
    before = tables.kernels_of(plan)
    real = cache.headers

    def kernels(change: Any) -> dict[str, str]:
        monkeypatch.setattr(cache, "headers", lambda name: {key: change(text) for key, text in real(name).items()})
        tables.source_version.cache_clear()
        return tables.kernels_of(plan)

    assert kernels(lambda text: b"// a word /*\n" + text.replace(b"\n", b"\n\n")) == before
    assert kernels(lambda text: text + b"int more;") != before
    monkeypatch.undo()
    tables.source_version.cache_clear()


@pytest.mark.parametrize(
    "words",
    [
        "conv:n8,c64,h56,w50,k64,r3,s1,stride2x1,pad1x0x2x3,dil2,groups32,NHWC,tf32,bias,relu",
        "conv:n8,c64,h56,w56,k64,r3,s3,CHWN,ieee,float16,dgrad,accumulate",
        "filter:480x640,5x1,batch16,filters3,anchor0x0,replicate,int32",
    ],
)
def test_a_key_says_all_of_a_problem(words: str) -> None:
    problem = parse_problem(words)
    assert parse_problem(format_problem(problem)) == problem
    assert set(words.split(",")) == set(format_problem(problem).split(","))


def test_a_choice_from_a_table_of_a_thousand_layers_is_quick(stage: Stage, tmp_path: Path) -> None:
    """Reading the table costs 5 ms once; then a choice costs less than the cost model's."""
    layers = [replace(LAYER, n=8 + i, c=64, k=64, h=28, w=28) for i in range(1000)]
    won = timed(stage.candidates(layers[0])[0], 10.0, stage.target, layers[0])
    others = tuple(replace(won, algorithm=f"other{i}", us=11.0) for i in range(12))
    entry = Entry((won, *others), {"auto": won})
    record = Table(tables.gpu_record(stage.target), {format_problem(layer): entry for layer in layers})
    tables.update(tmp_path / FILE, record)
    assert choose(layers[0], stage.target).us == 10
    found, new = layers[1], replace(layers[1], n=7)
    counts = [len(calls_of(partial(choose, layer, stage.target))) for layer in (found, new)]
    assert (choose(found, stage.target).source, choose(new, stage.target).source) == (tables.USER, tables.MODEL)
    assert counts[0] < counts[1] / 2, counts


SHIPPED = tables.path_of(tables.SHIPPED, NOMINAL.model)


def test_shipped_winners_are_chosen() -> None:
    """All of them, whatever headers say by now, and small."""
    table = Table.read(SHIPPED)
    assert table.gpu == tables.gpu_record(NOMINAL) and SHIPPED.stat().st_size < 200_000
    live = []
    for key, limit, winner in verify.winners(table):
        problem = parse_problem(key)
        assert format_problem(problem) == key and winner.us and winner.code
        choice = choose(problem, NOMINAL, "auto", limit)
        live.append((choice.source, choice.us) == (tables.SHIPPED_TABLE, winner.us))
    assert len(live) >= 250 and sum(live) >= 0.95 * len(live)


def check_code(every: int) -> None:
    verdicts = list(verify.verify_code(Table.read(SHIPPED), NOMINAL, every))
    dead = [f"{each.problem}: {each.why}" for each in verdicts if each.why]
    assert verdicts and len(dead) <= 0.05 * len(verdicts), "\n".join(dead)


@pytest.mark.usefixtures("nvrtc")
def test_shipped_winners_have_the_code_that_was_timed() -> None:
    """A sample of them; after a change that shall alter code, tune and `python scripts/ship_table.py`."""
    check_code(every=48)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("nvrtc")
def test_all_shipped_winners_have_the_code_that_was_timed() -> None:
    check_code(every=1)


def test_another_compiler_says_nothing_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compiler_version", lambda: "nvrtc 99")
    with says(ValueError, Table.read(SHIPPED).compiler, "this is nvrtc 99"):
        check_code(every=1)


def test_the_model_alone_is_what_it_was(stage: Stage) -> None:
    assert choose(LAYER, stage.target) == by_model(LAYER, stage.target)
