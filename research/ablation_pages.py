"""The table and the figure of an ablation, from its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leanconv.bench.format import Table, quantity
from leanconv.bench.results import Results, Row, geometric_mean, right
from report.drawing import bars, finish, legend, panels, refuse_empty, tidy
from report.pages import captioned
from research.studies import BASELINE, FULL, study_of

#: What a cell of the table says.
CELL = "TFLOP/s"
_VARIANTS = ("#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#a6761d")
_BASELINES = ("#8c8c8c", "#222222")


def variant(results: Results, problem: str, algorithm: str, name: str) -> Row | None:
    """The row of a variant in the results of an ablation, if its answer was right."""
    rows = (row for row in results.of(problem) if (row.algorithm, row.variant) == (algorithm, name))
    return next((row for row in rows if right(row)), None)


def table(results: Results, algorithm: str) -> Table:
    """TFLOP/s of the baselines and of an algorithm's variants; the last lines compare with the whole algorithm.

    Where the transform has been timed, its share of the whole time stands beside the algorithm that needs it.
    """
    study = study_of(algorithm)
    measured = {(row.algorithm, row.variant) for row in results.rows}
    keys = [*((name, BASELINE) for name in study.baselines), *((algorithm, name) for name in study.variants)]
    keys = [key for key in keys if key in measured]
    explicit = algorithm == "im2win" and any("transform_us" in about for about in results.problems.values())
    columns = [
        "problem",
        *(name if kind == BASELINE else kind for name, kind in keys),
        *(["transform, µs", "of the time"] if explicit else []),
    ]
    lines = []
    shares: dict[tuple[str, str], list[float]] = {key: [] for key in keys}
    for problem, about in results.problems.items():
        rows = {key: variant(results, problem, *key) for key in keys}
        whole = rows[algorithm, FULL]
        line = [problem]
        for key, row in rows.items():
            line.append(quantity(row.tflops) if row else "–")
            if row and whole:
                shares[key].append(whole.us / row.us)
        if explicit:
            us = about.get("transform_us")
            line += [quantity(us), f"{100 * us / whole.us:.0f}%" if us and whole else "–"]
        lines.append(line)
    empty = ["", ""] if explicit else []
    means = (f"{geometric_mean(values):.2f}" if values else "–" for values in shares.values())
    lines.append(["of full, geometric mean", *means, *empty])
    registers = (_span([row.registers for row in results.rows if (row.algorithm, row.variant) == key]) for key in keys)
    lines.append(["registers", *registers, *empty])
    spills = (_span([row.spill_bytes for row in results.rows if (row.algorithm, row.variant) == key]) for key in keys)
    lines.append(["spilled bytes", *spills, *empty])
    return columns, lines


def _span(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    return str(known[0]) if min(known) == max(known) else f"{min(known)}–{max(known)}"


def section(results: Results, algorithm: Sequence[str]) -> str:
    """The table with what was measured."""
    return captioned(results, f"{algorithm[0]}, {CELL}.", lambda results: table(results, *algorithm))


def draw(results: Results, path: Path) -> None:
    """Draw TFLOP/s of the whole algorithms, without one thing each, and of the baselines.

    Raises ValueError where the results are of no ablation.
    """
    problems = list(results.problems)
    drawn: dict[str, dict[str, list[float | None]]] = {}
    colours: dict[str, str] = {}
    for algorithm in dict.fromkeys(row.algorithm for row in results.rows if row.variant == FULL):
        study = study_of(algorithm)
        measured = {row.variant for row in results.rows if row.algorithm == algorithm}
        keys = {name: (algorithm, name) for name in study.variants if name in measured}
        keys |= {name: (name, BASELINE) for name in study.baselines}
        colours |= dict(zip(study.variants, _VARIANTS, strict=False))
        colours |= dict(zip(study.baselines, _BASELINES, strict=False))
        rows = {label: [variant(results, problem, *key) for problem in problems] for label, key in keys.items()}
        if any(rows[FULL]):
            drawn[algorithm] = {label: [row.tflops if row else None for row in own] for label, own in rows.items()}
    refuse_empty(drawn)
    figure, axes = panels(len(drawn), 1, (10.5, 2.7 * len(drawn) + 0.9), sharey=True)
    for axis, (algorithm, heights) in zip(axes, drawn.items(), strict=True):
        bars(axis, problems, heights, colours)
        tidy(axis, algorithm, hidden=())
        axis.set_ylabel("TFLOP/s")
    legend(axes[0], colours, above=1.14)
    finish(figure, path, f"{results.title} on {results.place}: one thing taken away at a time, all else equal")
