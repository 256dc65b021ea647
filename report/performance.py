"""docs/performance.md, which a reader finishes in two minutes: a row for each suite and mode."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

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
    every = len(results.problems) + len(results.missing)
    return [
        title, str(every), str(every - len(compared)), *cells,
        " / ".join("–" if error is None else f"{error:.1e}" for error in errors),
        " / ".join(size(space) for space in spaces),
    ]  # fmt: skip
