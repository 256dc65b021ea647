"""Commands that measure the results files of earlier kernels anew, made from the files' own records.

``python -m report older`` lists the commands for the files of benchmarks/results/older.json, and needs no GPU. With
``--run`` it runs them within a time limit, those first that take the least time for a row of earlier kernels, and
writes to a folder of its own. Networks spend most of their time on compiling; ``--ahead`` compiles several side by side
before.
"""

from __future__ import annotations

import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from leanconv.bench import columns, machine, provenance
from leanconv.bench.peers import PEERS
from leanconv.bench.results import Results
from leanconv.bench.suites import suite_layout
from leanconv.runtime import launch
from report import layers, records, refit
from report.records import Record

_REPORT = ("python", "-m", "report")
#: Seconds of a row of networks besides `warm_up_s`, where it does not say them itself: the medians of 57 and 13 rows of
#: an H200 at revision a92be3b, by the dates of the rows that follow.
_NETWORK_S = {"forward": 5.5, "training": 33.0}


@dataclass(frozen=True)
class Again:
    """The command that measures a results file anew, or rows of it. Commands that take several ``names`` and have equal
    options can run as one."""

    file: str
    command: tuple[str, ...]
    #: rows, or layers of a suite; and those of earlier kernels or not measured yet
    rows: int
    stale: int
    #: about how long it takes, without the start; None where the record does not say
    seconds: float | None
    names: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    #: fields that tell its rows from the file's others, and their values
    of: Mapping[str, Any] = field(default_factory=dict)
    #: whether it takes ``--seconds``, and a later one goes on
    resumes: bool = False
    #: why `run` leaves it alone
    by_hand: str = ""

    @property
    def title(self) -> str:
        about = (value if isinstance(value, str) else f"{name}={value}" for name, value in self.of.items())
        return " ".join((Path(self.file).stem, *about))

    @property
    def words(self) -> tuple[str, ...]:
        return self.command + self.names + self.options


def plan(results: Path, out: Path) -> list[Again]:
    """The commands for all files of older.json, those first that take the least time for a row of earlier kernels;
    those whose time is unknown come last."""
    found = [each for file in provenance.older(results) for each in _of_file(results, file, out)]
    return sorted(found, key=lambda each: (each.seconds is None, (each.seconds or 0) / max(1, each.stale)))


def _of_file(results: Path, file: str, out: Path) -> Iterator[Again]:
    path, stem = results / file, Path(file).stem
    record = columns.read(path)
    if "suite" in record:
        yield _suite(Results.read(path), file, results, out)
    elif stem == "modes":
        yield from _networks(record, file, results, out)
    elif stem == "training":
        yield from _trained(record, file, out)
    elif path.name == refit.TIMED:
        count, why = len(record["problems"]), f"after `leanconv tune --import {path}`; --export has what came of it"
        yield Again(file, ("python", "-m", "leanconv", "tune", "--refresh"), count, count, None, by_hand=why)
    elif stem == "tuning":
        count, why = len(record["groups"]), f"without a GPU, of {refit.TIMED}"
        yield Again(file, (*_REPORT, "refit"), count, count, None, by_hand=why)
    else:
        many = stem in layers.NETWORKS
        command = (*_REPORT, *(("layers", stem) if many else (stem,)))
        rows = _rows(record)
        each = [row["seconds"] for row in rows if "seconds" in row]
        seconds = record.get("seconds", sum(each) if each and len(each) == len(rows) else None)
        yield Again(file, command, len(rows), len(rows), seconds, (), ("--results", str(out)), resumes=many)


def _rows(record: Record) -> list[Record]:
    """The rows of a record; of a suite its problems, of the page on errors its entries."""
    return next((record[name] for name in ("problems", "rows", "entries") if isinstance(record.get(name), list)), [])


def _suite(content: Results, file: str, results: Path, out: Path) -> Again:
    changed = set(provenance.changed_kernels(content.machine, results, content.op or "fprop"))
    ours = [row for row in content.rows if row.engine.startswith("leanconv")]
    stale = {row.problem for row in ours if row.algorithm.partition(" ")[0] in changed}
    options = {"layout": content.layout if content.layout != suite_layout(content.suite) else None}
    options |= {name: getattr(content, name) for name in ("precision", "dtype", "op")} | {"engines": _engines(content)}
    given = [word for name, value in options.items() if value for word in (f"--{name}", value)]
    given += ["--sustained"] * any(row.us_sustained is not None for row in content.rows)
    every = len(content.problems) + len(content.missing)
    times = [each.get("seconds", math.nan) for each in content.problems.values()]
    seconds = sum(times) * every / len(times) if times else math.nan
    command, known = ("python", "-m", "leanconv", "bench", content.suite), None if math.isnan(seconds) else seconds
    given += ["--out", str(out / file)]
    wanted = len(stale | set(content.missing)) if stale else every
    return Again(file, command, every, wanted, known, (), tuple(given), resumes=True)


def _engines(content: Results) -> str | None:
    """Patterns of the engines that took part, for ``--engines``; None where they are those that a run takes by itself.

    An engine of another library took part where it was skipped, too. What ``leanconv`` skipped are single algorithms.
    """
    skipped = {entry["engine"].partition(" ")[0] for entry in content.skipped}
    had = {row.engine for row in content.rows} | {name for name in skipped if name != "leanconv"}
    kinds = {about["words"].partition(":")[0] for about in content.problems.values()}
    solved = {"conv": "conv2d", "filter": "filter2d"}
    chosen, every = [], True
    for peer in PEERS:
        mine = had & set(peer.engines)
        if mine and (peer.by_request or (peer.name == "leanconv" and not {"leanconv", "leanconv:auto"} <= mine)):
            chosen += [engine for engine in peer.engines if engine in mine]
            every = False
        elif mine:
            first = peer.engines[0]
            chosen.append(first if len(peer.engines) == 1 else "".join(first.partition(":")[:2]) + "*")
        else:
            asked = {solved[kind] for kind in kinds} & set(peer.solves) and peer.name not in content.absent
            every &= not asked or peer.by_request or peer.name == "torch-cpu"
    return None if every else ",".join(chosen)


def _networks(record: Record, file: str, results: Path, out: Path) -> Iterator[Again]:
    """A command for each row of earlier kernels."""
    changed = provenance.changed_kernels(record["machine"], results)
    for row in records.dated(record):
        own = row["revision"] == record["machine"]["git_revision"]
        if not (changed if own else not provenance.same_headers(row["revision"])):
            continue
        flags = [f"--{flag}" for flag, way in (("compile", "compile"), ("tune", "tuned")) if f"torch_{way}_us" in row]
        options = ("--mode", row["mode"], "--pass", row["pass"], *flags, "--results", str(out))
        seconds = row.get("seconds", row.get("warm_up_s", 0) + _NETWORK_S[row["pass"]])
        of = {name: row[name] for name in ("network", "mode", "pass")}
        yield Again(file, (*_REPORT, "modes"), 1, 1, seconds, (row["network"],), options, of, resumes=True)


def _trained(record: Record, file: str, out: Path) -> Iterator[Again]:
    found: dict[tuple[Any, ...], list[Record]] = {}
    for row in record["rows"]:
        found.setdefault((row["problem"], row["optimiser"], row["steps"], row["seed"], row["gpus"]), []).append(row)
    for (problem, optimiser, steps, seed, gpus), rows in found.items():
        network, batch, size = problem.rsplit("-", 2)
        start = ("python",) if gpus == 1 else ("torchrun", "--nproc-per-node", str(gpus))
        numbers = ("--size", size, "--batch", batch[1:], "--steps", str(steps), "--seed", str(seed))
        engines = ("--optimiser", optimiser, "--engine", *(row["engine"] for row in rows))
        command, options = (*start, "examples/train_cnn.py"), (*numbers, *engines, "--json", str(out / file))
        of = {"problem": problem, "optimiser": optimiser, "steps": steps, "seed": seed, "gpus": gpus}
        count = len(rows)
        yield Again(file, command, count, count, None, (network,), options, of)


def listing(found: Sequence[Again]) -> str:
    """Two lines for each: its title, number of rows and estimated time, and the command."""
    lines = []
    for each in found:
        long = "its record does not say how long" if each.seconds is None else f"about {math.ceil(each.seconds)} s"
        stale = f" ({each.stale} of earlier kernels or missing)" if each.stale < each.rows else ""
        lines.append(f"{each.title}: {each.rows} rows{stale}, {each.by_hand or long}")
        lines.append(f"    {shlex.join(each.words)}")
    return "\n".join([*lines, f"{sum(each.seconds or 0 for each in found):.0f} s, without starts and what is unknown"])


def chosen(found: Sequence[Again], only: Sequence[str]) -> list[Again]:
    """Those that ``only`` names, in its order: files (``modes``), or patterns of titles (``modes resnet*``)."""
    picked: dict[str, Again] = {}
    for name in only:
        some = [each for each in found if each.title.split()[0] == name or fnmatchcase(each.title, name)]
        if not some:
            raise ValueError(f"--only {name!r} is none of {', '.join(each.title for each in found)}")
        picked |= {each.title: each for each in some if each.title not in picked}
    return list(picked.values()) if only else list(found)


def left(each: Again, out: Path, revision: str | None) -> int:
    """How many of its rows the file below ``out`` does not have of this revision."""
    path = out / each.file
    record = columns.read(path) if path.is_file() else {}
    about = record["machine"] if isinstance(record.get("machine"), dict) else record
    rows = [row for row in _rows(record) if each.of.items() <= row.items()]
    same = [row for row in rows if row.get("revision", about.get("git_revision")) == revision]
    return max(0, each.rows - len(same))


def run(
    found: Sequence[Again], results: Path, out: Path, seconds: float, revision: str | None = None, ahead: int = 0
) -> Iterator[str]:
    """Run the commands whose rows ``out`` does not have yet; yields a line for each that ran and each that is left.

    After ``seconds`` none is begun. A command that a later run cannot go on with is begun only where the rest of the
    time is enough for it, as far as its time is known. ``ahead``: so many networks at a time run before, in a quarter
    of the time, for what they compile; their times are thrown away.
    """
    begun, same = time.monotonic(), revision or provenance.revision()["git_revision"]
    gpu = machine.slug({"gpu": launch.open_device(0).name})
    here = [each for each in found if each.file.startswith(f"{gpu}/") and not each.by_hand and left(each, out, same)]
    if networks := [each for each in here if each.of.get("network")] if ahead else []:
        _compile_ahead(networks, seconds / 4, ahead)
        yield f"{len(networks)} networks compiled: {time.monotonic() - begun:.0f} s"
    for each in _joined(here):
        rest = seconds - (time.monotonic() - begun)
        if rest <= 0:
            break
        if not each.resumes and (each.seconds or 0) > rest:
            continue
        target, words = out / each.file, [sys.executable if word == "python" else word for word in each.words]
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.name == "modes.json" and not target.exists():  # which keeps its other rows
            shutil.copy(results / each.file, target)
        words += ["--seconds", f"{rest:.0f}"] * each.resumes + (["--revision", revision] if revision else [])
        words += ["--resume", str(target)] * ("bench" in words and _partly(target, same))
        start = time.monotonic()
        code = subprocess.run(words).returncode
        yield f"{each.title}: {time.monotonic() - start:.0f} s" + (f", exit code {code}" if code else "")
    for each in found:
        if missing := left(each, out, same):
            why = each.by_hand or ("" if each.file.startswith(f"{gpu}/") else f"this GPU is {gpu}")
            yield f"left: {each.title}, {missing} of {each.rows} rows" + (f"; {why}" if why else "")


def _compile_ahead(networks: Sequence[Again], seconds: float, together: int) -> None:
    """Fill the caches of kernels: leanconv's, and torch.compile's. What is not done after ``seconds`` is ended."""
    until = time.monotonic() + seconds

    def measure(each: Again, folder: str) -> None:
        words = [sys.executable, *each.words[1:], "--results", folder]  # of two the last one counts
        if (rest := until - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(words, stdout=subprocess.DEVNULL, timeout=rest)

    with TemporaryDirectory() as scratch, ThreadPoolExecutor(together) as pool:
        for number, each in enumerate(networks):
            pool.submit(measure, each, f"{scratch}/{number}")


def _partly(path: Path, revision: str | None) -> bool:
    """Whether a suite's file is of this revision and lacks some of its problems."""
    content = Results.read(path) if path.is_file() else None
    return content is not None and bool(content.missing) and content.machine["git_revision"] == revision


def _joined(found: Sequence[Again]) -> Iterator[Again]:
    """Commands that differ in their names alone as one, in the place of the first: they need one start of a process."""
    rest = list(found)
    while rest:
        first = rest[0]
        like = [each for each in rest if (each.command, each.options) == (first.command, first.options) and each.names]
        like = like or [first]
        rest = [each for each in rest if each not in like]
        seconds = [each.seconds for each in like if each.seconds is not None]
        names = tuple(name for each in like for name in each.names)
        yield replace(like[0], names=names, seconds=sum(seconds) if len(seconds) == len(like) else None)
