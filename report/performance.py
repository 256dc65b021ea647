"""docs/performance.md, which a reader finishes in two minutes: a row for each suite and mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from leanconv.bench.format import size
from leanconv.bench.results import Results, Row, geometric_mean
from leanconv.bench.suites import load_suite, suite_names
from report import records
from report.fields import group_of, ratio, side

#: Peers of the two columns of ratios: PyTorch in strict FP32, then what else users take. The first that a file has.
_STRICT = {"": "pytorch", "one channel": "torch"}
_OTHERS = {"TF32": "tf32", "16 bits": "16-bit", "NPP": "npp"}
#: What a page calls them where a column does not.
_BELOW = {"": "PyTorch, strict FP32", "TF32": "PyTorch, TF32", "16 bits": "PyTorch, 16 bits"}


def suites(found: Sequence[Results]) -> str:
    """A line for each results file of a suite: what `auto` picks against PyTorch, layer by layer."""
    about = dict.fromkeys(records.origin(content.machine) for content in found)
    heads = ["suite", "layers", "missing", "× PyTorch, strict FP32", "× TF32, 16 bits or NPP"]
    heads += ["error, ours / theirs", "workspace and packed filters, ours / theirs"]
    parts = [f"{'; '.join(about)}.", records.table((heads, [_line(content) for content in found]))]
    if lines := [line for content in found for line in _left_out(content)]:
        parts.append("Left out of the ratios, since the peer's result is more wrong than its precision allows:")
        heads = ["suite", "layer", "error, ours / theirs", "×", "× of the suite", "with this layer"]
        parts.append(records.table((heads, lines)))
    return "\n\n".join(parts)


def below(found: Sequence[Results]) -> str:
    """For each peer the suites beside which leanconv is slower in the mean, the slowest first."""
    slower: dict[str, list[tuple[float, str]]] = {}
    for content in found:
        for name, _, rows in _columns(content):
            ours = _ours(content)
            ratios = [row.us / ours[problem].us for problem, row in rows.items() if problem in ours]
            if ratios and geometric_mean(ratios) < 1:
                said = f"{content.title} {_mean(ratios)}"
                slower.setdefault(_BELOW.get(name, name), []).append((geometric_mean(ratios), said))
    lines = [[name, "; ".join(said for _, said in sorted(each))] for name, each in slower.items()]
    return records.table((["beside", "suites below one, the mean and the least"], lines))


#: Peers by the pattern of their engines, where the list of files that have them is what a reader asks for.
_PEERS = {
    "torch-fp32-*": "PyTorch, strict FP32", "torch-tf32-*": "PyTorch, TF32", "torch-*float16-*": "PyTorch, 16 bits",
    "torch": "PyTorch, one channel", "compile-*": "torch.compile", "cudnn:*": "cuDNN, algorithms by name",
    "cudnn-graph:*": "cuDNN, graph API", "cutlass:*": "CUTLASS", "im2col+cublas": "im2col and cuBLAS",
    "cufft": "cuFFT", "causal_conv1d": "causal_conv1d", "tensorrt*": "TensorRT", "npp*": "NPP", "cvcuda": "CV-CUDA",
    "cupy": "CuPy", "cucim": "cuCIM", "opencv": "OpenCV, on the CPU", "scipy": "SciPy, on the CPU",
}  # fmt: skip
#: So many files are named, of more only the number is.
_NAMED = 6


def peers(found: Sequence[Results]) -> str:
    """A line for each peer: the results files of suites that have its times."""
    lines = []
    for pattern, name in _PEERS.items():
        beside = [each.title for each in found if any(fnmatchcase(row.engine, pattern) for row in each.rows)]
        lines.append([name, str(len(beside)) if beside else "**none**", ", ".join(beside[:_NAMED])])
        if len(beside) > _NAMED:
            lines[-1][-1] += " and others"
    return records.table((["peer", f"of {len(found)} files", "which"], lines))


def older(reasons: dict[str, str]) -> str:
    """The files of earlier kernels that pages still use, each with the reason, whose lines but the first are a list."""
    lines = [f"- `{name}`: {reason}".replace("\n", "\n  - ") for name, reason in reasons.items()]
    return "\n".join(["Not measured anew yet:", "", *lines]) if lines else "No file is of earlier kernels."


def _first(results: Results, sides: dict[str, str]) -> tuple[str, dict[str, Row]]:
    """The first side that has rows, by its name, and its row on each problem."""
    for name, peer in sides.items():
        if rows := {problem: row for problem in results.problems if (row := side(results, problem, peer))}:
            return name, rows
    return "", {}


def layers_of(results: Results) -> int:
    """How many layers the suite has, those that the run left out included."""
    run = len(results.problems) + len(results.missing)
    return max(run, len(load_suite(results.suite)) if results.suite in suite_names() else 0)


def _ours(results: Results) -> dict[str, Row]:
    return {problem: row for problem in results.problems if (row := side(results, problem, "auto"))}


def _columns(results: Results) -> Iterator[tuple[str, str, dict[str, Row]]]:
    """Of both columns the name, the peer and its rows; the strict one of a suite at level tf32 has none."""
    for sides in (_STRICT, _OTHERS):
        strict_beside_tf32 = sides is _STRICT and results.precision == "tf32"
        name, rows = ("", {}) if strict_beside_tf32 else _first(results, sides)
        yield name, sides.get(name, ""), rows


def _mean(ratios: Sequence[float]) -> str:
    return f"{ratio(geometric_mean(ratios))} ({ratio(min(ratios))})" if ratios else "–"


def _left_out(results: Results) -> Iterator[list[str]]:
    """A line for each layer that a ratio lacks because all that its peer computed is wrong."""
    ours = _ours(results)
    for _, peer, rows in _columns(results):
        ratios = [row.us / ours[problem].us for problem, row in rows.items() if problem in ours]
        for problem, mine in ours.items():
            theirs = [row for row in results.of(problem) if rows and _is_of(peer, row, results.problems[problem])]
            if problem in rows or not theirs:
                continue
            row = min(theirs, key=lambda each: each.us)
            errors = " / ".join(f"{each.error:.1e}" if each.error is not None else "NaN" for each in (mine, row))
            with_it = [*ratios, row.us / mine.us]
            yield [results.title, problem, errors, ratio(with_it[-1]), _mean(ratios), _mean(with_it)]


def _is_of(peer: str, row: Row, about: Mapping[str, Any]) -> bool:
    return group_of(peer).holds(row, about.get("layout"))


def _line(results: Results) -> list[str]:
    ours, every = _ours(results), layers_of(results)
    cells, missing, compared = list[str](), list[int](), dict[str, Row]()
    for name, _, rows in _columns(results):
        both = {problem: row for problem, row in rows.items() if problem in ours}
        cells.append(f"{name} {_mean([row.us / ours[problem].us for problem, row in both.items()])}".strip())
        missing += [every - len(both)] * bool(both)
        compared = compared or both
    sides = (ours.values(), compared.values())
    errors = [max((row.error or 0.0 for row in rows), default=None) for rows in sides]
    spaces = [
        max(((row.workspace_bytes or 0) + (row.prepared_bytes or 0) for row in rows), default=None) for rows in sides
    ]
    title = results.title if results.headline else f"{results.title} *"
    return [
        title, str(every), ", ".join(map(str, dict.fromkeys(missing or [every]))), *cells,
        " / ".join("–" if error is None else f"{error:.1e}" for error in errors),
        " / ".join(size(space) for space in spaces),
    ]  # fmt: skip
