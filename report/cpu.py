"""The CPU engine beside other libraries, and whether `auto` chooses well there.

``python -m report cpu`` measures what benchmarks/cpu.json lists, and writes to benchmarks/results/cpu: choice.json, a
row for each layer with the times of all algorithms that can run it and of PyTorch, and calls.json, one for each filter
and signal with those of leanconv, OpenCV, SciPy and PyTorch. It counts processor time, of one thread each. The engines
alternate, and the least of each one's times counts: what else a machine does can only lengthen them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from math import inf
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast

import numpy as np
from threadpoolctl import threadpool_limits

import leanconv
from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.bench.operands import Check, Operands, as_nchw
from leanconv.bench.results import PEER_LAYOUTS as LAYOUTS
from leanconv.bench.suites import format_problem, load_suite, parse_problem, with_batch
from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.problem import ConvProblem
from leanconv.runtime.progress import progress
from leanconv.runtime.timing import time_in_turn
from report import records

#: How often all layers are gone through, how often the engines alternate on one, and the seconds of a sample.
ROUNDS, SAMPLES, SAMPLE_S = 4, 4, 0.003
#: Rows whose rounds follow each other, and how many times as long as the quickest an engine takes that has one round.
TOGETHER, FAR = 20, 4.0
alternating = partial(time_in_turn, number=SAMPLES, sample_s=SAMPLE_S)
#: A row of a results file, and the calls that it has times of.
Row = tuple[dict[str, Any], dict[str, Callable[[], Any]]]
Maker = Callable[[], Row]
#: What is measured.
GIVEN = json.loads((Path(__file__).resolve().parents[1] / "benchmarks" / "cpu.json").read_text(encoding="utf-8"))
#: Of a suite's layers not all are measured: how a page says so.
_EVERY = {2: "second", 3: "third"}


def every() -> Iterator[tuple[str, ConvProblem]]:
    """The layers with their groups, one image each."""
    for layout, (group, given) in product(LAYOUTS, GIVEN["layers"].items()):
        if isinstance(given, str):
            suite, step = given.split("/")
            problems = [with_batch(case.problem, 1) for case in load_suite(suite, layout)[:: int(step)]]
        else:
            problems = [parse_problem(f"{words},{layout}") for words in given]
        yield from ((group, cast(ConvProblem, problem)) for problem in problems)


def calls() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Filters and signals: a group with its array, and a call of ours with those of others."""
    yield from ((about, given) for about in GIVEN["calls"] for given in about["calls"])


def call_row(about: dict[str, Any], given: dict[str, Any]) -> Row:
    """The times of a call and of its peers, named by their libraries. Raises RuntimeError where results differ."""
    rng, (dtype, *shape) = np.random.default_rng(0), about["x"]
    x: Any = (rng.random(shape) * 255).astype(dtype)
    known: dict[str, Any] = {name: import_module(module) for name, module in GIVEN["modules"].items()}
    known |= {"x": x, "k": cache(lambda *size: (rng.random(size) / np.prod(size)).astype(np.float32))}
    known["t"] = known["torch"].from_numpy(x.astype(np.float32))[None, None]
    texts = {"leanconv": given["call"], **given["others"]}
    made = {name: eval(f"lambda: {text}", known) for name, text in texts.items()}
    results = {name: np.asarray(call(), np.float64).reshape(-1) for name, call in made.items()}
    allowed = 2 if x.dtype.kind == "u" else 1e-4 * np.abs(results["leanconv"]).max()  # OpenCV blurs with 8 bits
    for name, result in results.items():
        if not (apart := np.abs(result - results["leanconv"]).max()) <= allowed:
            raise RuntimeError(f"{given['call']}: {name} is {apart:.3g} apart")
    return {"group": about["group"], "problem": given["call"], "us": alternating(made)}, made


def _calls(problem: ConvProblem) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """What computes a layer, by algorithm, and PyTorch; and the microseconds of algorithms whose call takes far
    longer than the quickest's. Raises RuntimeError where a result of ours is not right."""
    import torch

    operands = Operands(problem, gpu=False)
    x, w = operands.x(problem.layout), operands.w(problem.layout)
    how = None, problem.stride, problem.padding[::2], problem.dilation, problem.groups
    named = [algorithm.name for algorithm in CPU_ALGORITHMS if not algorithm.reasons(problem, None)]
    calls: dict[str, Callable[[], Any]] = {
        name: partial(leanconv.conv2d, x, w, *how, layout=problem.layout, algorithm=name) for name in named
    }
    check, first = Check(operands), {}
    for name, call in calls.items():
        result = call()
        # the first call makes code, tables and memory
        begin = time.process_time()
        call()
        first[name] = (time.process_time() - begin) * 1e6
        if not (error := check.error(result, problem.layout)) <= 1e-5:
            raise RuntimeError(f"{format_problem(problem)} {name}: differs by {error:.3g} from float64")
    theirs = (as_nchw(torch.from_numpy(array), problem.layout) for array in (x, w))
    slow = {name: round(us, 1) for name, us in first.items() if us > 1e4 and us > 3 * FAR * min(first.values())}
    kept = {name: call for name, call in calls.items() if name not in slow}
    return {**kept, "PyTorch": partial(torch.nn.functional.conv2d, *theirs, *how)}, slow


def row(group: str, problem: ConvProblem) -> Row:
    about, (made, slow) = (
        {"group": group, "layout": problem.layout, "problem": format_problem(problem)},
        _calls(problem),
    )
    return {**about, "chosen": choose(problem, None).algorithm.name, "us": {**slow, **alternating(made)}}, made


def measure(results: Path, revision: str | None = None, seconds: float | None = None) -> Path:
    """Measure on this machine's CPU; returns the last results file. Other work comes and goes: so rounds lie apart.

    What the files have of this revision stays; after so many seconds no further rows are begun. Calls are left out,
    with a warning, where a library is missing that they are compared with.
    """
    import torch

    torch.set_num_threads(1)
    os.environ["LEANCONV_THREADS"] = "1"
    versions, begun = {"torch": str(torch.__version__)}, time.monotonic()
    missing = [module for module in GIVEN["modules"].values() if importlib.util.find_spec(module.split(".")[0]) is None]
    if missing:
        print(f"{' and '.join(missing)} missing: layers alone are measured", file=sys.stderr)
    else:
        import cv2
        import scipy

        cv2.setNumThreads(1)
        versions |= {"opencv": cv2.__version__, "scipy": scipy.__version__}
    about = machine.describe(False, None, versions, revision)
    files: dict[str, list[tuple[str, Maker]]] = {
        "choice": [(format_problem(problem), partial(row, group, problem)) for group, problem in every()],
        "calls": [] if missing else [(given["call"], partial(call_row, group, given)) for group, given in calls()],
    }
    longest = 0.0
    with threadpool_limits(1):
        for name, makers in files.items():
            path, rows = records.begun(results, name, about)
            # calls of one name differ by their arrays: rows follow the list
            rows = rows if all(each["revision"] == about["git_revision"] for each in rows) else []
            rows = [{key: kept for key, kept in each.items() if key not in ("revision", "date")} for each in rows]
            with progress(len(makers) - len(rows)) as begin:
                while len(rows) < len(makers):
                    start = time.monotonic()
                    if seconds is not None and start - begun + longest > seconds:
                        return path
                    rows += _measured([make for _, make in makers[len(rows) : len(rows) + TOGETHER]], begin)
                    longest = max(longest, time.monotonic() - start)
                    path = records.write(results, name, about, rows, turns=ROUNDS * SAMPLES)
    return path


def _measured(makers: list[Maker], begin: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows, gone through several times; engines that take far longer than the quickest only once."""
    made = []
    for make in makers:
        begin("measuring")
        made.append(make())
    for _ in range(ROUNDS - 1):
        for row, calls in made:
            most = FAR * min(row["us"].values())
            again = alternating({name: call for name, call in calls.items() if row["us"][name] <= most})
            row["us"] |= {name: min(us, row["us"][name]) for name, us in again.items()}
    return [row for row, _ in made]


def excess(row: dict[str, Any]) -> float:
    """How many times as long as the quickest algorithm the chosen one takes."""
    return float(row["us"][row["chosen"]] / min(us for name, us in row["us"].items() if name != "PyTorch"))


def _in_any_layout(row: dict[str, Any]) -> ConvProblem:
    return replace(cast(ConvProblem, parse_problem(row["problem"])), layout="NCHW")


def table(record: dict[str, Any]) -> Table:
    """By group: times in multiples of PyTorch's in its better layout and in the same one, and the choice's excess."""
    theirs: dict[ConvProblem, float] = {}
    for row in record["rows"]:
        layer = _in_any_layout(row)
        theirs[layer] = min(row["us"]["PyTorch"], theirs.get(layer, inf))
    lines = []
    for group in dict.fromkeys(row["group"] for row in record["rows"]):
        cells = []
        for layout in LAYOUTS:
            of_group = [row for row in record["rows"] if (row["group"], row["layout"]) == (group, layout)]
            better = [row["us"][row["chosen"]] / theirs[_in_any_layout(row)] for row in of_group]
            same = [row["us"][row["chosen"]] / row["us"]["PyTorch"] for row in of_group]
            cells += [f"{geometric_mean(ratios):.2f} ({max(ratios):.2f})" for ratios in (better, same)]
            good = sum(excess(row) <= 1.1 for row in of_group)
            cells += [f"{good} of {len(of_group)}", f"{excess(max(of_group, key=excess)):.2f}"]
        lines.append([group, *cells])
    columns = ("× PyTorch's time", "× its time in this layout", "choice within 1.1×", "worst")
    return ["layers", *(f"{layout}: {what}" for layout in LAYOUTS for what in columns)], lines


def _origin(record: dict[str, Any], *libraries: str) -> str:
    about = record["machine"]
    versions = ", ".join(f"{name} {about[name.lower().removeprefix('py')]}" for name in libraries)
    return (
        f"{about['cpu']}, one thread, {about['date'][:10]}, {records.revision(about, 12)}, {versions}. Processor time, "
        f"the least of {record['turns']} samples, engines alternating; means are geometric, the largest in brackets."
    )


def section(record: dict[str, Any]) -> str:
    found = [excess(each) for each in record["rows"]]
    good, near = (sum(each <= most for each in found) for most in (1.1, 1.2))
    said = "PyTorch is in the quicker of both layouts but where the head says otherwise. "
    said += f"Of {len(found)} choices {good} are within 1.1× of the quickest algorithm, {near} within 1.2×."
    measured = {row["group"] for row in record["rows"]}
    steps = {
        group: given.split("/")
        for group, given in GIVEN["layers"].items()
        if isinstance(given, str) and group in measured
    }
    if steps:
        of = ", ".join(f"every {_EVERY[int(n)]} of the {group} (suite `{name}`)" for group, (name, n) in steps.items())
        said += f" Measured: {of}."
    return f"{_origin(record, 'NumPy', 'PyTorch')} {said}\n\n{records.table(table(record))}"


def beside(row: dict[str, Any]) -> float:
    """Our time over that of the quickest other library."""
    return float(row["us"]["leanconv"] / min(us for name, us in row["us"].items() if name != "leanconv"))


def calls_section(record: dict[str, Any]) -> str:
    """Filters and signals by group: our time over that of the quickest of the others, and the call where it is most."""
    lines = []
    for group in [*dict.fromkeys(row["group"] for row in record["rows"]), "all"]:
        rows = [row for row in record["rows"] if group in (row["group"], "all")]
        ratios, most = list(map(beside, rows)), max(rows, key=beside)
        near = f"{sum(ratio <= 1.5 for ratio in ratios)} of {len(rows)}"
        lines.append([group, f"{geometric_mean(ratios):.2f} ({max(ratios):.2f})", near, f"`{most['problem']}`"])
    heads = ["calls", "× the quickest other library's time", "within 1.5×", "the largest"]
    return f"{_origin(record, 'NumPy', 'OpenCV', 'SciPy', 'PyTorch')}\n\n{records.table((heads, lines))}"
