"""docs/performance.md, which a reader finishes in two minutes: a row for each suite and mode."""

from __future__ import annotations

from collections.abc import Sequence

from leanconv.bench.format import size
from leanconv.bench.results import Results, Row, geometric_mean
from report import records
from report.fields import ratio, side

#: Peers of the two columns of ratios: PyTorch in strict FP32, then what else users take. The first that a file has.
_STRICT = {"": "pytorch", "one channel": "torch"}
_OTHERS = {"TF32": "tf32", "16 bits": "16-bit", "NPP": "npp"}


def suites(found: Sequence[Results]) -> str:
    """A line for each results file of a suite: what `auto` picks against PyTorch, layer by layer."""
    about = dict.fromkeys(records.origin(content.machine) for content in found)
    heads = ["suite", "layers", "missing", "× PyTorch, strict FP32", "× TF32, 16 bits or NPP"]
    heads += ["error, ours / theirs", "workspace, ours / theirs"]
    return f"{'; '.join(about)}.\n\n{records.table((heads, [_line(content) for content in found]))}"


def older(reasons: dict[str, str]) -> str:
    """The files of earlier kernels that pages still use, each with the reason."""
    lines = [f"- `{name}`: {reason}" for name, reason in reasons.items()]
    return "\n".join(["Not measured anew yet:", "", *lines]) if lines else "No file is of earlier kernels."


def _first(results: Results, sides: dict[str, str]) -> tuple[str, dict[str, Row]]:
    """The first side that has rows, by its name, and its row on each problem."""
    for name, peer in sides.items():
        if rows := {problem: row for problem in results.problems if (row := side(results, problem, peer))}:
            return name, rows
    return "", {}


def _line(results: Results) -> list[str]:
    ours = {problem: row for problem in results.problems if (row := side(results, problem, "auto"))}
    cells, compared = [], dict[str, Row]()
    for sides in (_STRICT, _OTHERS):
        strict_beside_tf32 = sides is _STRICT and results.precision == "tf32"
        name, rows = ("", {}) if strict_beside_tf32 else _first(results, sides)
        ratios = [row.us / ours[problem].us for problem, row in rows.items() if problem in ours]
        mean = f"{ratio(geometric_mean(ratios))} ({ratio(min(ratios))})" if ratios else "–"
        cells.append(f"{name} {mean}".strip())
        compared = compared or {problem: row for problem, row in rows.items() if problem in ours}
    both = (ours.values(), compared.values())
    errors = [max((row.error or 0.0 for row in rows), default=None) for rows in both]
    spaces = [max((row.workspace_bytes or 0 for row in rows), default=None) for rows in both]
    title = results.title if results.headline else f"{results.title} *"
    return [
        title, str(len(results.problems)), str(len(results.problems) - len(compared) + len(results.missing)), *cells,
        " / ".join("–" if error is None else f"{error:.1e}" for error in errors),
        " / ".join(size(space) for space in spaces),
    ]  # fmt: skip
