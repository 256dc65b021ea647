"""The figures of the pages on algorithms from results files: speed, memory (2 and 3 in the im2win paper), families.

Algorithms that need a workspace are hatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leanconv.bench.families import families as by_family
from leanconv.bench.families import title
from leanconv.bench.format import quantity, size
from leanconv.bench.results import PEER_LAYOUTS, TABLE_BYTES, Group, Results, Row, right
from report.comparisons import MEMORY_PEERS
from report.drawing import INK, bars, finish, legend, panels, refuse_empty, tidy

#: leanconv's algorithms, PyTorch and im2col, then cuDNN's algorithms: what they are called, and their colour. The
#: figures leave out others.
_OWN = {
    "tensor_gemm": "#b2182b", "tensor_winograd": "#67001f", "native_gemm_16bit": "#d6604d",
    "native_gemm_tf32": "#f4a582", "native_gemm_nchw": "#8c2d04", "im2win_fused": "#d55e00", "im2win": "#e69f00",
    "implicit_gemm": "#f0e442", "winograd1d": "#9e0142", "winograd2d": "#f6a5b5", "direct_tiled": "#5e4fa2",
    "direct": "#7a3b00",
}  # fmt: skip
_GROUPS = {"PyTorch": ("PyTorch", "#222222"), "im2col": ("im2col + cuBLAS", "#8c8c8c")}
_CUDNN = {
    "implicit_gemm": ("cuDNN implicit GEMM", "#c6dbef"),
    "implicit_precomp_gemm": ("cuDNN precomputed", "#6baed6"),
    "gemm": ("cuDNN GEMM", "#08519c"),
    "fft": ("cuDNN FFT", "#009e73"),
    "fft_tiling": ("cuDNN FFT tiling", "#74c9ad"),
    "winograd": ("cuDNN Winograd", "#8a4f7d"),
    "winograd_nonfused": ("cuDNN Winograd non-fused", "#cc79a7"),
}
_COLOURS = {**_OWN, **dict(_GROUPS.values()), **dict(_CUDNN.values())}
#: The lines of the families' figure.
_FAMILY_OWN = {
    "tensor_gemm": "#b2182b", "tensor_winograd": "#67001f", "winograd2d": "#cc79a7", "winograd1d": "#d55e00",
    "implicit_gemm": "#009e73",
}  # fmt: skip
_FAMILY_PEERS = {
    "lean": ("cuDNN without workspace", "#56b4e9"),
    "best": ("cuDNN's fastest", "#08519c"),
    "PyTorch": ("PyTorch", "#8c8c8c"),
}
#: The bars of the memory figure.
_MEMORY = {"im2win_fused": "#d55e00", "im2win": "#e69f00"}
_DASHED = {"color": INK, "linewidth": 0.8, "linestyle": (0, (4, 3))}


def _title(results: Results, words: str) -> str:
    return f"{results.title} on {results.place}: {words}"


def _spread(problems: Sequence[str], most: int) -> list[Sequence[str]]:
    """Problems spread evenly over the fewest rows of at most ``most``."""
    rows = -(-len(problems) // most)
    each = -(-len(problems) // rows)
    return [problems[i : i + each] for i in range(0, len(problems), each)]


def speed_rows(results: Results) -> dict[str, dict[str, Row]]:
    """The bars of the speed figure: label, then problem. Wrong answers are not among them."""
    rows: dict[str, dict[str, Row]] = {label: {} for label in _COLOURS}
    for problem in results.problems:
        peers = results.peers(problem)
        found = {name: results.own(problem, [name]) for name in _OWN}
        found |= {label: peers.get(name) for name, (label, _) in _GROUPS.items()}
        for name, (label, _) in _CUDNN.items():
            layout = "{layout}" if results.problems[problem].get("layout") in PEER_LAYOUTS else "*"
            found[label] = results.peer(problem, Group(name, "", f"cudnn:{name}-{layout}"))
        for label, row in found.items():
            if row is not None and right(row):
                rows[label][problem] = row
    return {label: of_label for label, of_label in rows.items() if of_label}


def best_own(series: dict[str, dict[str, Row]], problem: str) -> str | None:
    """The label of leanconv's fastest algorithm on a problem, among the bars of the speed figure."""
    own = [name for name in _OWN if problem in series.get(name, {})]
    return min(own, key=lambda label: series[label][problem].us, default=None)


def speed(results: Results, path: Path) -> None:
    """Draw TFLOP/s of each algorithm, ours and the peers', layer by layer. Raises ValueError without rows.

    The name of our fastest stands over its bar.
    """
    series = speed_rows(results)
    refuse_empty(series)
    colours = {label: _COLOURS[label] for label in series}
    rows = _spread(list(results.problems), 6)
    figure, axes = panels(len(rows), 1, (10.5, 2.7 * len(rows) + 1.3), sharey=True)
    for axis, names in zip(axes, rows, strict=True):
        heights = {label: [of[p].tflops if p in of else None for p in names] for label, of in series.items()}
        needed = {label: [of[p].workspace_bytes or 0 if p in of else 0 for p in names] for label, of in series.items()}
        hatched = {label: [nbytes > TABLE_BYTES for nbytes in each] for label, each in needed.items()}
        bars(axis, names, heights, colours, hatched, named=[best_own(series, p) for p in names])
        ceiling = results.machine["ceilings"]["fp32_tflops"]
        axis.axhline(ceiling, zorder=1, **_DASHED)
        axis.set_ylabel("TFLOP/s")
        axis.annotate(
            f"cuBLAS\n{quantity(ceiling)}", (1, ceiling), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=INK, annotation_clip=False,
        )  # fmt: skip
    legend(axes[0], colours, hatch="needs a workspace")
    finish(figure, path, _title(results, "effective TFLOP/s, counted as direct convolution"))


def family_rows(results: Results, problems: Sequence[str]) -> dict[str, list[Row | None]]:
    """The lines of a panel of the families' figure: ours, then the peers; without those that have no row."""
    own = [name for name in results.own_algorithms() if name in _FAMILY_OWN]
    lines = {name: [results.own(problem, [name]) for problem in problems] for name in own}
    for name, (label, _) in _FAMILY_PEERS.items():
        lines[label] = [results.peers(problem).get(name) for problem in problems]
    return {label: rows for label, rows in lines.items() if any(rows)}


def families(results: Results, path: Path) -> None:
    """Draw TFLOP/s problem by problem, a panel for each family. Raises ValueError without rows."""
    found = by_family(results).items()
    problems = {name: each for name, each in found if all(problem.startswith(f"{name}-") for problem in each)}
    drawn = {name: lines for name, each in problems.items() if (lines := family_rows(results, each))}
    refuse_empty(drawn)
    colours = {**_FAMILY_OWN, **dict(_FAMILY_PEERS.values())}
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    figure, axes = panels(rows, columns, (3.9 * columns, 2.9 * rows + 0.8))
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    handles = {}
    for axis, (name, lines) in zip(axes, drawn.items(), strict=False):
        for label, of in lines.items():
            heights = [row.tflops if row else float("nan") for row in of]
            how = {"color": colours[label], "marker": "o", "markersize": 3, "linewidth": 1.4}
            (handles[label],) = axis.plot(heights, label=label, **how)
        axis.axhline(results.machine["ceilings"]["fp32_tflops"], **_DASHED)
        tidy(axis, title(name), size=7)
        shapes = [problem.partition("-")[2] for problem in problems[name]]
        axis.set_xticks(range(len(shapes)), shapes, fontsize=6, rotation=35, ha="right", color=INK)
        axis.set_ylim(bottom=0)
    figure.legend(handles.values(), handles, loc="outside lower left", ncols=5, fontsize=8.5, frameon=False)
    finish(figure, path, _title(results, "effective TFLOP/s, counted as direct convolution; dashed: cuBLAS"))


def memory_factors(results: Results) -> dict[str, dict[str, float]]:
    """The bars of the memory figure: label, then problem: workspace as a multiple of input, filters and output."""
    factors: dict[str, dict[str, float]] = {label: {} for label in (*_MEMORY, *MEMORY_PEERS.values())}
    for problem, about in results.problems.items():
        peers = results.peers(problem)
        rows = {name: results.own(problem, [name]) for name in _MEMORY}
        rows |= {label: peers.get(name) for name, label in MEMORY_PEERS.items()}
        for label, row in rows.items():
            if row is not None and row.workspace_bytes is not None:
                factors[label][problem] = row.workspace_bytes / about["bytes"]
    return {label: of_label for label, of_label in factors.items() if of_label}


def memory(results: Results, path: Path) -> None:
    """Draw the memory that each layer takes, its tensors as one. Raises ValueError without rows."""
    series = memory_factors(results)
    refuse_empty(series)
    known = {**_MEMORY, **dict(zip(MEMORY_PEERS.values(), ("#8c8c8c", "#009e73", "#222222"), strict=True))}
    colours = {label: known[label] for label in series}
    rows = _spread(list(results.problems), 12)
    figure, axes = panels(len(rows), 1, (10.5, 3.3 * len(rows) + 0.6), sharey=True)
    for axis, problems in zip(axes, rows, strict=True):
        heights = {label: [1 + of[p] if p in of else None for p in problems] for label, of in series.items()}
        names = [f"{p}\n{size(results.problems[p]['bytes'])}" for p in problems]
        bars(axis, names, heights, colours, pale_below=1.0)
        axis.set_ylabel("memory, × the tensors")
    legend(axes[0], colours, pale="pale: input, filters, output")
    words = "all memory that a layer takes, as a multiple of its tensors (their size below the name)"
    finish(figure, path, _title(results, words))
