"""Cost models fitted to the tables of tuned problems and to suites, and how well what they choose compares with what
was timed.

``python -m report refit`` needs no GPU. For each GPU whose timed candidates are committed it writes the fits that
`leanconv.kernels.cost` reads, and benchmarks/results/<gpu>/tuning.json for docs/tuning.md.
"""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.bench import candidates, columns, provenance
from leanconv.bench.results import AUTO_ENGINE, Results
from leanconv.call.explain import NOMINAL
from leanconv.kernels import ALGORITHMS, cost
from leanconv.kernels.contract import TimedAlgorithm
from leanconv.kernels.cost import Fit, launch_cycles
from leanconv.perf import tables
from leanconv.perf.tables import Table, Timed
from leanconv.plan import Target
from leanconv.problem import Problem
from leanconv.runtime.files import write_text
from leanconv.volumes.images import as_images
from leanconv.words import format_problem, parse_problem
from report import records

#: Clock cycles in a microsecond, the unit of predictions on an H200.
CYCLES = 1980.0
#: Groups with fewer measured times than this keep their prediction, such as those of gradients of filters: of one of
#: their algorithms 6 are timed, of the others 2 or 3, and a fit of that alone would decide between them.
_LEAST = 8
#: The same of TF32, of which there are rows of suites alone: 11 and 12 rows of `tensor_gemm` and `tensor_gemm_sync`
#: would choose them for layers that other algorithms were measured to compute sooner.
_LEAST_IN_TF32 = 16
#: A call is short up to so many microseconds, and memory takes little of it up to this share.
_SHORT_US, _LITTLE = 100.0, 0.2
#: Folds of the cross-validation.
_FOLDS = 6
#: Problems that must have times of younger kernels for those of others to be left out.
_ENOUGH = 6
#: Terms are no less than these: of the three launches that a call of tensor cores is counted with at least
#: (`launch_cycles`) two may not show, and of the third little more than half.
_LEAST_TERMS = Fit(0.1, -2.6 * launch_cycles(NOMINAL), 0.0)
#: How far a fit's terms may be from the usual ones for as much as times may differ by from what a fit expects, in
#: logarithms (small problems alone must not say what large ones take); the steps that find it.
_DRAWN, _SPREAD, _STEPS = Fit(0.1, 9000.0, 5.0), 0.3, 20
#: Targets whose predictions a table can be compared with, by the name of the GPU.
TARGETS = {NOMINAL.model: NOMINAL}


@dataclass(frozen=True)
class Point:
    """A candidate that was timed and is one of today's configurations; or an algorithm's row of a suite."""

    problem: str
    group: str
    algorithm: str
    #: clock cycles, predicted without any fit and measured
    predicted: float
    measured: float
    #: clock cycles that memory takes for the bytes of packed weights
    prepared: float = 0.0
    #: whether the prediction leaves out a launch (`cost.leaves_out_launch`)
    launch: bool = False
    #: timed with 0: kernels as they are today, 1: others, which the table names, 2: still earlier ones, without names
    age: int = 0


def points(table: Table, target: Target) -> list[Point]:
    """Every candidate of a table with its predicted time; of a group that has such of today's kernels for enough
    problems, those alone, and else of one that has such of named kernels, these.
    """
    plain = replace(target, model="")
    found = []
    for key in table:
        entry, problem = table.get(key), parse_problem(key)
        if entry is None or problem.kind == "filter2d":
            continue
        predicted = {name: _predicted(name, problem, plain) for name in {each.algorithm for each in entry.timed}}
        for each in entry.timed:
            known = predicted[each.algorithm].get(each.key)
            if each.us is None or known is None or not math.isfinite(known[1]):
                continue
            algorithm, cycles, kernels = known
            prepared = cost.preparing_cycles(algorithm, problem, plain)
            found.append(Point(
                key, cost.group(algorithm, problem), each.algorithm, cycles, each.us * CYCLES, prepared,
                cost.leaves_out_launch(algorithm, problem), _age(each, kernels),
            ))  # fmt: skip
    most = {group: _most_age(each) for group, each in _by("group", found).items()}
    return [point for point in found if point.age <= most[point.group]]


def _age(timed: Timed, kernels: Mapping[str, str]) -> int:
    if timed.kernels == kernels:
        return 0
    return 1 if timed.kernels else 2


def _most_age(some: Sequence[Point]) -> int:
    problems = {age: {point.problem for point in some if point.age <= age} for age in (0, 1)}
    return next((age for age in problems if len(problems[age]) >= _ENOUGH), 2)


def suite_points(folder: Path, target: Target, groups: Collection[str] = ()) -> list[Point]:
    """Rows of the suites' results in ``folder``, each with the predicted time of the algorithm's fastest configuration:
    most rows do not say which configuration ran.

    These are layers in float32 whose predictions leave out a launch, and forward passes of ``groups`` and in TF32. Most
    are smaller than those of a table, so they say what a call takes apart from its work, and those of ``groups`` are of
    younger kernels than a table may be. Left out are rows of kernels that have changed since; and those whose
    operands were in the L2 cache, since predictions count them as read from memory, but of short calls in which that
    would take little of the time. Of what a call picks there may be no other row: an algorithm that is predicted too
    quick is picked, and so is corrected, one that is predicted too slow is not.
    """
    plain, found = replace(target, model=""), []
    for path in sorted(each for each in folder.glob("*.json") if "suite" in columns.read(each)):
        results = Results.read(path)
        changed = provenance.changed_kernels(results.machine, folder.parent, results.op or "fprop")
        times = {
            (row.problem, row.algorithm): row.us
            for row in results.rows
            if row.engine in ("leanconv", AUTO_ENGINE) and row.algorithm not in changed
            if row.l2 == "cold" or _is_short(row.us, results.problems[row.problem]["bytes"], target)
        }
        for (name, stem), us in times.items():
            problem = parse_problem(results.problems[name]["words"])
            if problem.kind == "filter2d" or problem.dtype != "float32":
                continue
            problem = as_images(replace(problem, op=results.op or "fprop"))  # type: ignore[arg-type]
            for algorithm in (each for each in ALGORITHMS if each.stem == stem and isinstance(each, TimedAlgorithm)):
                launch, group = cost.leaves_out_launch(algorithm, problem), cost.group(algorithm, problem)
                known = launch or (problem.op == "fprop" and group.removesuffix(" tf32") in groups)
                if not known or algorithm.why_not(problem, target):
                    continue
                cycles = min((each for each, _ in algorithm.timed(problem, plain)), default=math.inf)
                measured = us * CYCLES - cost.fitted(algorithm, problem, plain).beside
                prepared = cost.preparing_cycles(algorithm, problem, plain)
                found.append(Point(format_problem(problem), group, stem, cycles, measured, prepared, launch))
    return [point for point in found if math.isfinite(point.predicted)]


def _is_short(us: float, bytes_: float, target: Target) -> bool:
    """Whether a call is so short, and memory so little of it, that it takes about as long from the L2 cache."""
    return us <= _SHORT_US and bytes_ / (target.bytes_per_cycle * CYCLES) <= _LITTLE * us


def _predicted(name: str, problem: Problem, target: Target) -> dict[Any, tuple[TimedAlgorithm, float, dict[str, str]]]:
    """By configuration: the strategy that has it, predicted cycles, and the versions of its kernels."""
    return {
        (name, *sorted(dict(config.constants()).items())):
            (algorithm, cycles, tables.kernels_of(algorithm.plan(problem, config, target)))
        for algorithm in ALGORITHMS
        if algorithm.stem == name and isinstance(algorithm, TimedAlgorithm) and not algorithm.why_not(problem, target)
        for cycles, config in algorithm.timed(problem, target)
    }  # fmt: skip


def fitted(some: Sequence[Point]) -> dict[str, Fit]:
    """A fit for each group that has enough times, and one for others: all whose predictions leave out a launch are
    drawn to the median of what such a launch takes. Depthwise layers count among all layers of an algorithm too."""
    some = [
        *some,
        *(replace(each, group=cost.whole(each.group)) for each in some if each.group != cost.whole(each.group)),
    ]
    groups = {
        group: each
        for group, each in _by("group", some).items()
        if len(each) >= (_LEAST_IN_TF32 if group.endswith(" tf32") else _LEAST)
    }
    found = {group: _fit(each, Fit()) for group, each in groups.items()}
    launches = [found[group].start for group, each in groups.items() if each[0].launch and group == cost.whole(group)]
    if not launches:
        return found
    others = Fit(start=statistics.median(launches))
    drawn = {group: _fit(each, others) for group, each in groups.items() if each[0].launch}
    return found | drawn | {cost.OTHERS: others}


def _fit(some: Sequence[Point], usual: Fit) -> Fit:
    """The terms with the least squares of log(measured / expected), in units of `_SPREAD`, and of their own distances
    from the ``usual`` ones, in units of `_DRAWN`; none is less than `_LEAST_TERMS`. By Newton's method."""
    terms = np.array([(point.predicted, 1.0, point.prepared) for point in some])
    measured = np.array([point.measured for point in some])
    none, drawn = np.array(usual), np.array(_DRAWN)
    kept = np.array([True, True, bool(terms[:, 2].any())])
    fit = none.copy()
    for _ in range(_STEPS):
        times = terms @ fit
        slopes = (terms / times[:, None])[:, kept] / _SPREAD
        rows = np.vstack([slopes, np.diag(1 / drawn)[kept][:, kept]])
        far = np.concatenate([np.log(measured / times) / _SPREAD, ((none - fit) / drawn)[kept]])
        fit[kept] += np.linalg.lstsq(rows, far, rcond=None)[0]
        fit = np.maximum(fit, _LEAST_TERMS)
    return Fit(*(float(each) for each in fit))


def losses(some: Sequence[Point], fitted_to: Mapping[str, Fit]) -> dict[str, float]:
    """For each problem the time of the candidate with the least predicted time, over the least time."""
    time = partial(expected, fitted_to=fitted_to)
    of_each = _by("problem", some).items()
    return {problem: min(each, key=time).measured / min(p.measured for p in each) for problem, each in of_each}


def _by(field: str, some: Sequence[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in some:
        found.setdefault(getattr(point, field), []).append(point)
    return found


def expected(point: Point, fitted_to: Mapping[str, Fit]) -> float:
    """Its time in clock cycles by the fit of its group."""
    known = fitted_to.get(point.group) or fitted_to.get(cost.whole(point.group))
    fit = known or (fitted_to.get(cost.OTHERS) if point.launch else None) or Fit()
    return fit.factor * point.predicted + fit.start + fit.preparing * point.prepared


def validated(some: Sequence[Point], more: Sequence[Point] = ()) -> dict[str, float]:
    """The same, for each problem with fits to these points and ``more`` that were made without it and its fold."""
    fold: Callable[[Point], int] = lambda p: zlib.crc32(p.problem.encode()) % _FOLDS  # noqa: E731
    found: dict[str, float] = {}
    for i in range(_FOLDS):
        found |= losses([p for p in some if fold(p) == i], fitted([p for p in (*some, *more) if fold(p) != i]))
    return found


def validated_suites(more: Sequence[Point], some: Sequence[Point]) -> dict[str, float]:
    """The same of layers of suites of which several algorithms have rows, with fits to both."""
    rows = Counter(point.problem for point in more)
    return {problem: ratio for problem, ratio in validated(more, some).items() if rows[problem] > 1}


def summary(ratios: Mapping[str, float]) -> dict[str, float]:
    """Geometric mean, what 95 of 100 problems stay below, and the worst."""
    values = sorted(ratios.values())
    at = min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)
    return {"mean": statistics.geometric_mean(values), "most": values[at], "worst": values[-1]}


#: What a record calls the same of layers of suites.
_SUITES = "layers of suites, fitted to others"
#: Every candidate that was timed, of which a release ships the winners: below the folder of a GPU's results.
TIMED = "timed-candidates.json"


def measure(results: Path) -> list[Path]:
    """Fit the timed candidates of every GPU, and rows of its suites; returns the files that were written.

    Raises ValueError where all rows of suites are of kernels that have changed since.
    """
    written = []
    for path in sorted(results.glob(f"*/{TIMED}")):
        table = candidates.read(path)
        candidates.write(path, table)
        target = TARGETS.get(str(table.gpu.get("name")))
        if target is None or not (some := points(table, target)):
            continue
        more = suite_points(path.parent, target, {point.group for point in some})
        if not more and any("suite" in columns.read(each) for each in path.parent.glob("*.json")):
            raise ValueError(
                f"no row of the suites below {path.parent} is of today's kernels: measure them anew, or, where their "
                "machine code has not changed, run scripts/compare_code.py with --record"
            )
        found = fitted([*some, *more])
        rounded = {
            group: {field: round(value, 4 if field == "factor" else 1) for field, value in each._asdict().items()}
            for group, each in sorted(found.items())
        }
        groups: list[dict[str, Any]] = []
        rows_of = Counter(point.group for point in more)
        for group, each in sorted(_by("group", [*some, *more]).items()):
            logs = [math.log(p.measured / expected(p, found)) for p in each]
            usual = rounded.get(cost.OTHERS if each[0].launch else group, Fit()._asdict())
            row = {"group": group, "times": len(logs), "of suites": rows_of[group], **rounded.get(group, usual)}
            groups.append(row | {"spread": round(math.exp(statistics.pstdev(logs)) - 1, 4)})
        record = {
            "machine": {"gpu": target.model},
            "problems": len({point.problem for point in some}),
            "times": len(some),
            "of today's kernels": sum(point.age == 0 for point in some),
            "rows of suites": len(more),
            "without a fit": summary(losses(some, {})),
            "fitted to these problems": summary(losses(some, found)),
            "fitted to others": summary(validated(some, more)),
            **({_SUITES: summary(lost)} if (lost := validated_suites(more, some)) else {}),
            "groups": groups,
        }
        fit = {"gpu": target.model, "fits": rounded}
        file = cost.file_of(target.model)
        write_text(file, json.dumps(fit, indent=1) + "\n")
        columns.write(path.parent / "tuning.json", record)
        written += [file, path.parent / "tuning.json"]
    cost.known.cache_clear()
    return written


def section(record: dict[str, Any]) -> str:
    """What is lost by choosing without a table, and the factor of each algorithm."""
    names = ("without a fit", "fitted to these problems", "fitted to others", _SUITES)
    percent: Callable[[str, str], str] = lambda name, key: f"{100 * (record[name][key] - 1):.1f} %"  # noqa: E731
    lost = [[name, *(percent(name, key) for key in ("mean", "most", "worst"))] for name in names if name in record]
    each_group = "{group}|{times}|{of suites}|{factor:.3f}|{us:.1f}|{preparing:.1f}|{percent:.0f} %"
    groups = [
        each_group.format(**row, us=row["start"] / CYCLES, percent=100 * row["spread"]).split("|")
        for row in record["groups"]
    ]
    words = f"{record['machine']['gpu']}: {record['problems']} problems, {record['times']} candidates timed."
    if earlier := record["times"] - record.get("of today's kernels", 0):
        words += f" {earlier} times are with kernels of an earlier revision (`leanconv tune --verify` names these)."
    if rows := record.get("rows of suites"):
        words += f" The fits are also to {rows} rows of suites."
    parts = {
        f"{words} How much longer the cost model's choice takes than the quickest that was timed:": (
            ["cost model", "geometric mean", "95 of 100 problems below", "worst"],
            lost,
        ),
        "What is measured, fitted to what is predicted: so many times the prediction, so many µs of a call apart "
        "from its work, and so many times as long as memory takes for the bytes of packed weights; and by how "
        "much single times differ from that (one standard deviation):": (
            ["algorithm, layout, operation", "times", "of suites", "× prediction", "+ µs", "+ × packed", "spread"],
            groups,
        ),
    }
    return "\n\n".join(f"{said}\n\n{records.table(each)}" for said, each in parts.items())
