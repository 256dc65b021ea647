"""Suites whose problems come in families (Γ8(6,3), conv3, …): how each one stands, and the speed goals that were set.

The family of a problem is its name up to the first dash: ``g8(6,3)-64x128x128x64`` is one of ``g8(6,3)``, and of
``g8``, all problems with 8 states.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from leanconv.bench.format import Table, quantity
from leanconv.bench.results import GROUPS, Group, Results, geometric_mean
from leanconv.bench.suites import parse_problem

#: What a ratio in these tables says.
RATIO_CELL = "the geometric mean of the peer's time over ours, the least and the largest in brackets"
#: Peers of the table of families: those of the goals, PyTorch in either layout, and our own matrix product.
_SHARED = {group.name: group for group in GROUPS}
PEERS = (
    _SHARED["lean"],
    _SHARED["best"],
    Group("PyTorch NHWC", "PyTorch, strict FP32, channels last", "torch-fp32-nhwc"),
    Group("PyTorch NCHW", "PyTorch, strict FP32, channels first", "torch-fp32-nchw"),
    _SHARED["TF32"],
)
#: The engine of calls that were given packed weights.
PREPARED = "leanconv:prepared"


@dataclass(frozen=True)
class Goal:
    """What an algorithm should reach on the problems whose names match ``only``, with at least ``q`` outputs in a row.

    ``what``: a ratio to the fastest cuDNN algorithm without workspace, as geometric mean or on every problem, or the
    direct convolution's TFLOP/s on every problem.
    """

    only: tuple[str, ...]
    what: Literal["mean ratio", "ratio", "TFLOP/s"]
    least: float
    q: int = 0

    @property
    def words(self) -> str:
        names = ", ".join(title(pattern.rstrip("*-")) or "all" for pattern in self.only)
        rows = f", rows of {self.q} outputs and more" if self.q else ""
        kind = {
            "mean ratio": "geometric mean of the ratio to cuDNN without workspace",
            "ratio": "each ratio to cuDNN without workspace",
            "TFLOP/s": "TFLOP/s of each",
        }[self.what]
        return f"{names}{rows}: {kind}"


#: By suite: the algorithm, and its goals.
GOALS = {
    "winograd1d": (
        "winograd1d",
        (
            Goal(("g8*",), "mean ratio", 1.8),
            Goal(("g16*",), "mean ratio", 2.5),
            Goal(("*",), "ratio", 1.0),
            Goal(("g8(6,3)-*",), "TFLOP/s", 75, q=32),
            Goal(("g8(4,5)-*", "g8(5,4)-*"), "TFLOP/s", 85),
            Goal(("g16(8,9)-*", "g16(9,8)-*"), "TFLOP/s", 120),
        ),
    ),
    "opencnn": (
        "winograd2d",
        (
            Goal(("*",), "ratio", 1.5),
            Goal(("*",), "mean ratio", 1.8),
            Goal(("conv3-n128", "conv4-n128"), "TFLOP/s", 65),
        ),
    ),
}


def title(family: str) -> str:
    """A family as people write it: ``Γ8(6,3)`` for ``g8(6,3)``."""
    return f"Γ{family[1:]}" if family[:1] == "g" and family[1:2].isdigit() else family


def families(results: Results) -> dict[str, list[str]]:
    """Problems by family, in the order of the suite; then by number of states where names say it; then all."""
    named: dict[str, list[str]] = {}
    for problem in results.problems:
        named.setdefault(problem.partition("-")[0], []).append(problem)
    for problem in results.problems:
        states, bracket, _ = problem.partition("(")
        if bracket:
            named.setdefault(states, []).append(problem)
    return named | {"all": list(results.problems)}


def ratios(results: Results, problems: Sequence[str], algorithm: str, group: Group) -> list[float]:
    """How many times faster an algorithm is than a group of peers, on each of the problems that both ran."""
    pairs = ((results.own(problem, [algorithm]), results.peer(problem, group)) for problem in problems)
    return [peer.us / own.us for own, peer in pairs if own and peer]


def spread(values: Sequence[float], of: int) -> str:
    """Geometric mean, least and largest, and how many there are where that is less than ``of``."""
    if not values:
        return "–"
    some = f", {len(values)} of {of}" if len(values) < of else ""
    return f"{geometric_mean(values):.2f} ({min(values):.2f}–{max(values):.2f}){some}"


def family_table(results: Results, algorithm: str) -> Table:
    """A line for each family, for all of as many states, and for all: speed, ratios to PEERS, the largest error.

    "preparation" is the part of the time that the transform of the filters takes, on average, and at most in brackets.
    """
    ours = [name for name in results.own_algorithms() if name != algorithm]
    columns = ["problems", "count", "TFLOP/s", "preparation", *(f"× {group.name}" for group in PEERS)]
    columns += [*(f"× {name}" for name in ours), "largest error"]
    lines = []
    for family, problems in families(results).items():
        rows = {problem: row for problem in problems if (row := results.own(problem, [algorithm]))}
        if not rows:
            continue
        speeds = [row.tflops for row in rows.values()]
        given = [row for problem in rows for row in results.of(problem) if row.engine == PREPARED]
        shares = [100 * (1 - row.us / rows[row.problem].us) for row in given if row.algorithm == algorithm]
        cells = [spread(ratios(results, problems, algorithm, group), len(problems)) for group in PEERS]
        for name in ours:
            others = {problem: results.own(problem, [name]) for problem in rows}
            faster = [other.us / rows[problem].us for problem, other in others.items() if other]
            cells.append(spread(faster, len(problems)))
        preparation = f"{sum(shares) / len(shares):.1f}% ({max(shares):.1f}%)" if shares else "–"
        speed = f"{quantity(min(speeds))}–{quantity(max(speeds))}"
        error = max(row.error or 0.0 for row in rows.values())
        lines.append([title(family), str(len(rows)), speed, preparation, *cells, f"{error:.1e}"])
    return columns, lines


def goal_table(results: Results) -> Table:
    """The goals of the suite, what was measured, and whether that reaches them. KeyError for a suite without goals.

    Goals for problems that are not in the results are left out.
    """
    algorithm, goals = GOALS[results.suite]
    lines = []
    for goal in goals:
        chosen = [name for name in results.problems if _wanted(goal, results, name)]
        if not chosen:
            continue
        if goal.what == "TFLOP/s":
            rows = [results.own(name, [algorithm]) for name in chosen]
            values = [row.tflops for row in rows if row]
        else:
            values = ratios(results, chosen, algorithm, _SHARED["lean"])
        lines.append([goal.words, f"≥ {goal.least:g}", *_verdict(goal, values, chosen)])
    return ["target", "asked", "measured", "met"], lines


def _wanted(goal: Goal, results: Results, name: str) -> bool:
    problem = parse_problem(results.problems[name]["words"])
    wide = problem.kind == "conv2d" and problem.q >= goal.q
    return wide and any(fnmatchcase(name, pattern) for pattern in goal.only)


def _verdict(goal: Goal, values: Sequence[float], chosen: Collection[str]) -> tuple[str, str]:
    """What was measured, and whether it is enough; not where a problem is missing."""
    if len(values) < len(chosen) or not values:
        return f"{len(values)} of {len(chosen)} measured", "no"
    if goal.what == "mean ratio":
        mean = geometric_mean(values)
        return f"{mean:.2f}", "yes" if mean >= goal.least else "no"
    reached = sum(value >= goal.least for value in values)
    words = f"{quantity(min(values))} to {quantity(max(values))}; {reached} of {len(values)} reach it"
    return words, "yes" if reached == len(values) else "no"
