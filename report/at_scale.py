"""docs/at-scale.md: many processes that start at once on one folder of compiled kernels, or on one bundle.

``python -m report at-scale`` needs no GPU: NVRTC compiles for an H200. It writes benchmarks/results/cpu/at-scale.json.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from leanconv.bench import machine
from leanconv.bench.suites import load_suite
from leanconv.call.choose import by_model, choose
from leanconv.call.explain import NOMINAL
from leanconv.call.precompile import precompile
from leanconv.perf import tables
from leanconv.perf.tables import Entry, Table, Timed
from leanconv.plan import Launch
from leanconv.problem import ConvProblem
from leanconv.runtime import cache, files
from leanconv.runtime.threads import side_by_side
from leanconv.words import format_problem
from report import records

#: Processes, and layers of a suite whose kernels each of them needs.
PROCESSES, SUITE, LAYERS = 256, "resnet-50", 3
#: Processes that write to the table of tuned problems at the same time.
TUNERS = 16
#: Ways to start, in the order of measuring, and what they are.
WAYS = {
    "empty folder": "all share a folder of compiled kernels, with nothing in it",
    "full folder": "the same folder again",
    "no locks": "an empty folder on a file system without locks, which is simulated",
    "bundle": "no folder at all, and a bundle that one process has made before",
}


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    try:
        os.environ.update(variables)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _refuses(*arguments: object) -> None:
    raise OSError(37, "No locks available")


def at_once(count: int, work: Callable[[int], Any]) -> list[tuple[float, Any]]:
    """Fork so many processes, let them all begin at once; seconds from then on and result of each.

    Raises RuntimeError where one fails. They are forked, so what importing takes is not in it.
    """
    context = multiprocessing.get_context("fork")
    begin, results = context.Event(), context.SimpleQueue()

    def child(number: int) -> None:
        begin.wait()
        begun = time.perf_counter()
        try:
            found: Any = work(number)
        except BaseException:
            found = traceback.format_exc()
            results.put((None, found))
            raise
        results.put((time.perf_counter() - begun, found))

    processes = [context.Process(target=child, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    begin.set()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    if failed := [told for seconds, told in found if seconds is None]:
        raise RuntimeError(f"{len(failed)} of {count} processes failed: {failed[0]}")
    return found


def _start(launches: Sequence[Launch], number: int) -> list[str]:
    """What a process does for the kernels of its first calls; those that it compiled itself."""
    files._files.clear()
    before = len(cache.made)  # by the process that forked this one
    side_by_side([partial(cache.compiled, each, NOMINAL.arch) for each in launches])
    return cache.made[before:]


def _tune(problems: Sequence[ConvProblem], path: Path, number: int) -> None:
    """Put what a process has tuned into the table that all share."""
    problem = problems[number]
    chosen = by_model(problem, NOMINAL)
    assert chosen.config is not None
    kernels = tables.kernels_of(chosen.plan(problem, NOMINAL))
    config: Any = dict(chosen.config.constants())
    timed = Timed(chosen.algorithm.stem, config, 1.0, kernels)
    entry = Entry((timed,), {tables.NO_LIMIT: timed})
    tables.update(path, Table(tables.gpu_record(NOMINAL), {format_problem(problem): entry}))


def _choose(problems: Sequence[ConvProblem], number: int) -> int:
    """How many problems a process finds in the table of the others."""
    return sum(choose(problem, NOMINAL).source == tables.USER for problem in problems)


def _row(way: str, kernels: int, found: Sequence[tuple[float, list[str]]]) -> dict[str, Any]:
    compilations = Counter(name for _, names in found for name in names)
    seconds = [each for each, _ in found]
    return {
        "way": way,
        "processes": len(found),
        "kernels": kernels,
        "compiled": compilations.total(),
        "most": max(compilations.values(), default=0),
        "seconds": round(max(seconds), 2),
        "median_seconds": round(statistics.median(seconds), 2),
    }


def simulate(count: int, layers: Sequence[Any], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each way, then those of tables of tuned problems."""
    plans = [choose(layer, NOMINAL).plan(layer, NOMINAL) for layer in layers]
    launches = list(dict.fromkeys(each for plan in plans for each in plan.all_launches))
    start, bundle = partial(_start, launches), folder / "kernels.zip"
    for way in WAYS:
        shared = folder / ("unlocked" if way == "no locks" else "shared")
        variables = {"LEANCONV_CACHE_DIR": str(shared), "LEANCONV_NO_CACHE": "0"}
        if way == "bundle":
            with _environment(**variables):
                precompile(layers, bundle=bundle, progress=False)
            variables = {"LEANCONV_NO_CACHE": "1", "LEANCONV_BUNDLE": str(bundle)}
        lockf = fcntl.lockf
        try:
            fcntl.lockf = _refuses if way == "no locks" else lockf
            with _environment(**variables):
                yield _row(way, len(launches), at_once(count, start))
        finally:
            fcntl.lockf = lockf
    problems = [ConvProblem(n, 4, 9, 9, 4, 3, 3) for n in range(1, TUNERS + 1)]
    with _environment(LEANCONV_TUNING_DIR=str(folder / "tables"), LEANCONV_TUNING="on"):
        path = tables.path_of(folder / "tables", NOMINAL.model)
        writers = min(count, TUNERS)
        written = at_once(writers, partial(_tune, problems, path))
        found = at_once(count, partial(_choose, problems[:writers]))
    yield {"way": "tune", "processes": writers, "kept": len(Table.read(path)), "seconds": round(max(written)[0], 2)}
    most, least = max(found)[0], min(number for _, number in found)
    yield {"way": "read", "processes": count, "kept": least, "seconds": round(most, 2)}


def measure(results: Path, revision: str | None = None) -> Path:
    """Simulate on this machine; returns the results file. Raises RuntimeError where a process fails."""
    layers = [case.problem for case in load_suite(SUITE)[:LAYERS]]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in simulate(PROCESSES, layers, Path(folder)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    return records.write(results, "at-scale", machine.describe(False, None, {}, revision), rows)


def section(record: dict[str, Any]) -> str:
    about = record["machine"]
    rows = [row for row in record["rows"] if row["way"] in WAYS]
    origin = f"{about['cpu']}, {about['cores']} cores, {about['date'][:10]}, {records.revision(about, 12)}"
    ways = "; ".join(f"{way}: {meaning}" for way, meaning in WAYS.items())
    columns = ["start", "processes", "kernels", "compilations", "most of one kernel", "last ready", "median"]
    lines = [
        [row["way"], *(str(row[key]) for key in ("processes", "kernels", "compiled", "most"))]
        + [f"{row[key]:.2f} s" for key in ("seconds", "median_seconds")]
        for row in rows
    ]
    return f"{origin}. {ways}.\n\n{records.table((columns, lines))}"
