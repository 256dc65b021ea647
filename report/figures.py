"""The figures of the im2win paper from results files: speed (its Figure 2), memory (3) and the ablation (4).

The colours are safe for colour-blind readers (the palette of Okabe and Ito, which also differs in lightness);
algorithms that need a workspace are hatched too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leanconv.bench.families import families as by_family
from leanconv.bench.families import title
from leanconv.bench.format import quantity, size
from leanconv.bench.plots import blank, save
from leanconv.bench.results import TABLE_BYTES, Group, Results, Row, right
from report.comparisons import MEMORY_PEERS, variant
from report.studies import BASELINE, FULL, STUDIES, study_of

_DPI = 160
_INK, _GRID = "#222222", "#d9d9d9"


@dataclass(frozen=True)
class _Style:
    """How a series looks and what it is called."""

    label: str
    colour: str


#: leanconv's algorithms, PyTorch and im2col, then cuDNN's algorithms; others are left out of the figures.
_OWN = {
    "tensor_gemm": _Style("tensor_gemm", "#b2182b"),
    "tensor_winograd": _Style("tensor_winograd", "#67001f"),
    "tensor_gemm_narrow": _Style("tensor_gemm_narrow", "#d6604d"),
    "tensor_gemm_tf32": _Style("tensor_gemm_tf32", "#f4a582"),
    "tensor_window": _Style("tensor_window", "#8c2d04"),
    "im2win_fused": _Style("im2win_fused", "#d55e00"),
    "im2win": _Style("im2win", "#e69f00"),
    "implicit_gemm": _Style("implicit_gemm", "#f0e442"),
    "winograd1d": _Style("winograd1d", "#9e0142"),
    "winograd2d": _Style("winograd2d", "#f6a5b5"),
    "direct_tiled": _Style("direct_tiled", "#5e4fa2"),
    "direct": _Style("direct", "#7a3b00"),
}
_GROUPS = {"PyTorch": _Style("PyTorch", "#222222"), "im2col": _Style("im2col + cuBLAS", "#8c8c8c")}
_CUDNN = {
    "implicit_gemm": _Style("cuDNN implicit GEMM", "#c6dbef"),
    "implicit_precomp_gemm": _Style("cuDNN precomputed", "#6baed6"),
    "gemm": _Style("cuDNN GEMM", "#08519c"),
    "fft": _Style("cuDNN FFT", "#009e73"),
    "fft_tiling": _Style("cuDNN FFT tiling", "#74c9ad"),
    "winograd": _Style("cuDNN Winograd", "#8a4f7d"),
    "winograd_nonfused": _Style("cuDNN Winograd non-fused", "#cc79a7"),
}
#: The lines of the families' figure.
_FAMILY_OWN = {
    "tensor_gemm": _Style("tensor_gemm", "#b2182b"),
    "tensor_winograd": _Style("tensor_winograd", "#67001f"),
    "winograd2d": _Style("winograd2d", "#cc79a7"),
    "winograd1d": _Style("winograd1d", "#d55e00"),
    "implicit_gemm": _Style("implicit_gemm", "#009e73"),
}
_FAMILY_PEERS = {
    "lean": _Style("cuDNN without workspace", "#56b4e9"),
    "best": _Style("cuDNN's fastest", "#08519c"),
    "PyTorch": _Style("PyTorch", "#8c8c8c"),
}
_VARIANTS = ("#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#f0e442", "#0072b2", "#a6761d")
_BASELINES = ("#8c8c8c", "#222222")
_TENSOR = STUDIES["im2win"].algorithms


def speed_rows(results: Results) -> dict[str, dict[str, Row]]:
    """The bars of the speed figure: label, then problem. Wrong answers are not among them."""
    rows: dict[str, dict[str, Row]] = {}

    def put(style: _Style, problem: str, row: Row | None) -> None:
        if row is not None and right(row):
            rows.setdefault(style.label, {})[problem] = row

    for problem in results.problems:
        peers = results.peers(problem)
        for name, style in _OWN.items():
            put(style, problem, results.own(problem, [name]))
        for name, style in _GROUPS.items():
            put(style, problem, peers.get(name))
        for name, style in _CUDNN.items():
            group = Group(name, "", f"cudnn:{name}-{{layout}}", instead=(f"cudnn:{name}-*", ""))
            put(style, problem, results.peer(problem, group))
    order = [style.label for style in (*_OWN.values(), *_GROUPS.values(), *_CUDNN.values())]
    return {label: rows[label] for label in order if label in rows}


def best_own(series: dict[str, dict[str, Row]], problem: str) -> str | None:
    """The label of leanconv's fastest algorithm on a problem, among the bars of the speed figure."""
    own = [style.label for style in _OWN.values() if problem in series.get(style.label, {})]
    return min(own, key=lambda label: series[label][problem].us, default=None)


def speed(results: Results, path: Path) -> None:
    """Draw TFLOP/s of each algorithm, ours and the peers', layer by layer. Raises ValueError without rows.

    The name of our fastest stands over its bar.
    """
    series = speed_rows(results)
    _refuse_empty(series)
    colours = {style.label: style.colour for style in (*_OWN.values(), *_GROUPS.values(), *_CUDNN.values())}
    panels = _panels(list(results.problems), 6)
    figure = blank((10.5, 2.7 * len(panels) + 1.3))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        heights = {label: [rows[p].tflops if p in rows else None for p in panel] for label, rows in series.items()}
        hatched = {label: [_needs_workspace(rows.get(p)) for p in panel] for label, rows in series.items()}
        _bars(axis, panel, heights, colours, hatched, named=[best_own(series, p) for p in panel])
        ceiling = results.machine["ceilings"]["fp32_tflops"]
        axis.axhline(ceiling, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axis.set_ylabel("TFLOP/s")
        axis.annotate(
            f"cuBLAS\n{quantity(ceiling)}", (1, ceiling), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8, color=_INK, annotation_clip=False,
        )  # fmt: skip
    _legend(figure, axes[0], list(series), colours, hatch="needs a workspace")
    _title(figure, results, "operations of the direct convolution per second, whatever is computed")
    save(figure, path, _DPI)


def family_rows(results: Results, problems: Sequence[str]) -> dict[str, list[Row | None]]:
    """The lines of a panel of the families' figure: ours, then the peers; without those that have no row."""
    own = [name for name in results.own_algorithms() if name in _FAMILY_OWN]
    lines: dict[str, list[Row | None]] = {}
    for name in own:
        lines[name] = [results.own(problem, [name]) for problem in problems]
    for name, style in _FAMILY_PEERS.items():
        lines[style.label] = [results.peers(problem).get(name) for problem in problems]
    return {label: rows for label, rows in lines.items() if any(rows)}


def families(results: Results, path: Path) -> None:
    """Draw TFLOP/s problem by problem, a panel for each family. Raises ValueError without rows."""
    panels = {
        name: problems
        for name, problems in by_family(results).items()
        if all(problem.startswith(f"{name}-") for problem in problems)
    }
    drawn = {name: family_rows(results, problems) for name, problems in panels.items()}
    drawn = {name: lines for name, lines in drawn.items() if lines}
    _refuse_empty(drawn)
    styles = {**_FAMILY_OWN, **{style.label: style for style in _FAMILY_PEERS.values()}}
    columns = min(3, len(drawn))
    figure = blank((3.9 * columns, 2.9 * -(-len(drawn) // columns) + 0.8))
    axes = figure.subplots(-(-len(drawn) // columns), columns, squeeze=False).ravel()
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    for axis, (name, lines) in zip(axes, drawn.items(), strict=False):
        for label, rows in lines.items():
            heights = [row.tflops if row else float("nan") for row in rows]
            axis.plot(heights, color=styles[label].colour, marker="o", markersize=3, linewidth=1.4, label=label)
        axis.axhline(results.machine["ceilings"]["fp32_tflops"], color=_INK, linewidth=0.8, linestyle=(0, (4, 3)))
        shapes = [problem.partition("-")[2] for problem in panels[name]]
        axis.set_xticks(range(len(shapes)), shapes, fontsize=6, rotation=35, ha="right", color=_INK)
        axis.set_ylim(bottom=0)
        axis.tick_params(axis="y", labelsize=7, colors=_INK)
        axis.grid(axis="y", color=_GRID, linewidth=0.6)
        axis.set_title(title(name), loc="left", fontsize=9, color=_INK)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    labels = dict.fromkeys(label for lines in drawn.values() for label in lines)
    handles = [line for axis in axes for line in axis.get_lines() if line.get_label() in labels]
    unique = {line.get_label(): line for line in handles}
    figure.legend(
        [unique[label] for label in labels], [*labels], loc="outside lower left", ncols=5, fontsize=8.5, frameon=False
    )
    _title(figure, results, "TFLOP/s of the direct convolution's operations; dashed: cuBLAS")
    save(figure, path, _DPI)


def memory_factors(results: Results) -> dict[str, dict[str, float]]:
    """The bars of the memory figure: label, then problem: workspace as a multiple of input, filters and output."""
    factors: dict[str, dict[str, float]] = {}
    for problem, about in results.problems.items():
        peers = results.peers(problem)
        rows = {name: results.own(problem, [name]) for name in _TENSOR}
        rows |= {MEMORY_PEERS[name]: peers.get(name) for name in MEMORY_PEERS}
        for label, row in rows.items():
            if row is not None and row.workspace_bytes is not None:
                factors.setdefault(label, {})[problem] = row.workspace_bytes / about["bytes"]
    return {label: factors[label] for label in (*_TENSOR, *MEMORY_PEERS.values()) if label in factors}


def memory(results: Results, path: Path) -> None:
    """Draw the memory that each layer takes, its tensors as one. Raises ValueError without rows."""
    series = memory_factors(results)
    _refuse_empty(series)
    colours = {"im2win_fused": "#d55e00", "im2win": "#e69f00", MEMORY_PEERS["im2col"]: "#8c8c8c"}
    colours |= {MEMORY_PEERS["best"]: "#009e73", MEMORY_PEERS["PyTorch"]: "#222222"}
    panels = _panels(list(results.problems), 12)
    figure = blank((10.5, 3.3 * len(panels) + 0.6))
    axes = figure.subplots(len(panels), 1, squeeze=False, sharey=True)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        heights = {label: [1 + rows[p] if p in rows else None for p in panel] for label, rows in series.items()}
        names = [f"{p}\n{size(results.problems[p]['bytes'])}" for p in panel]
        _bars(axis, names, heights, colours, pale_below=1.0)
        axis.set_ylabel("memory, × the tensors")
    _legend(figure, axes[0], list(series), colours, pale="pale: input, filters, output")
    _title(figure, results, "all memory that a layer takes, as a multiple of its tensors (their size below the name)")
    save(figure, path, _DPI)


def ablation(results: Results, path: Path) -> None:
    """Draw TFLOP/s of the whole algorithms, with one thing switched off, and of the baselines.

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
        colours |= dict(zip(study.variants, _VARIANTS, strict=False)) | dict(
            zip(study.baselines, _BASELINES, strict=False)
        )
        rows = {label: [variant(results, problem, *key) for problem in problems] for label, key in keys.items()}
        if any(rows[FULL]):
            drawn[algorithm] = {label: [row.tflops if row else None for row in own] for label, own in rows.items()}
    _refuse_empty(drawn)
    figure = blank((10.5, 2.7 * len(drawn) + 0.9))
    axes = figure.subplots(len(drawn), 1, squeeze=False, sharey=True)[:, 0]
    for axis, (algorithm, heights) in zip(axes, drawn.items(), strict=True):
        _bars(axis, problems, heights, colours)
        axis.set_ylabel("TFLOP/s")
        axis.set_title(algorithm, loc="left", fontsize=9, color=_INK)
    _legend(figure, axes[0], list(colours), colours, above=1.14)
    _title(figure, results, "one thing switched off at a time, all else equal")
    save(figure, path, _DPI)


def _refuse_empty(series: dict[str, Any]) -> None:
    if not series:
        raise ValueError("there is nothing to draw: the results hold no row that belongs into this figure")


def _needs_workspace(row: Row | None) -> bool:
    return row is not None and (row.workspace_bytes or 0) > TABLE_BYTES


def _panels(problems: Sequence[str], most: int) -> list[Sequence[str]]:
    """Problems spread evenly over the fewest rows of at most ``most``."""
    rows = -(-len(problems) // most)
    each = -(-len(problems) // rows)
    return [problems[i : i + each] for i in range(0, len(problems), each)]


def _bars(
    axis: Any,
    names: Sequence[str],
    heights: dict[str, list[float | None]],
    colours: dict[str, str],
    hatched: dict[str, list[bool]] | None = None,
    pale_below: float = 0.0,
    named: Sequence[str | None] = (),
) -> None:
    """Groups of bars; in a group only the series that have a value, side by side around its middle.

    ``named`` has a series for each group whose name stands over its bar.
    """
    most = max(sum(values[i] is not None for values in heights.values()) for i in range(len(names)))
    width = min(0.86 / max(most, 1), 0.22)
    for i in range(len(names)):
        present = [(label, values[i]) for label, values in heights.items() if values[i] is not None]
        for number, (label, height) in enumerate(present):
            hatch = "/////" if hatched and hatched[label][i] else None
            place = i + (number - (len(present) - 1) / 2) * width
            dark = colours[label] in ("#222222", "#08519c", "#7a3b00", "#9e0142")
            edge = "#ffffff" if dark else _INK
            axis.bar(
                place, height, width * 0.92, color=colours[label], edgecolor=edge, linewidth=0.0 if dark else 0.35,
                hatch=hatch, zorder=2,
            )  # fmt: skip
            if named and named[i] == label:
                axis.annotate(
                    label, (place, height), xytext=(0, 3), textcoords="offset points", rotation=90, ha="center",
                    va="bottom", fontsize=7, color=_INK, zorder=4,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                )  # fmt: skip
            if pale_below:
                axis.bar(place, pale_below, width * 0.92, color="#ffffff", alpha=0.72, linewidth=0, zorder=3)
    axis.set_xticks(range(len(names)), names, fontsize=8.5, color=_INK)
    axis.tick_params(axis="x", length=0)
    axis.tick_params(axis="y", labelsize=8, colors=_INK)
    axis.set_xlim(-0.55, len(names) - 0.45)
    axis.grid(axis="y", color=_GRID, linewidth=0.6, zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _legend(
    figure: Any,
    axis: Any,
    labels: Sequence[str],
    colours: dict[str, str],
    hatch: str = "",
    pale: str = "",
    above: float = 1.02,
) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colours[label], edgecolor=_INK, linewidth=0.35, label=label) for label in labels]
    if hatch:
        patches.append(Patch(facecolor="#ffffff", edgecolor=_INK, linewidth=0.35, hatch="/////", label=hatch))
    if pale:
        patches.append(Patch(facecolor="#e9e9e9", edgecolor=_INK, linewidth=0.35, label=pale))
    columns = min(len(patches), 6 if len(patches) <= 6 else 5)
    axis.legend(
        handles=patches, fontsize=8.5, ncols=columns, loc="lower left", bbox_to_anchor=(0, above), frameon=False,
        handlelength=1.2, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _title(figure: Any, results: Results, words: str) -> None:
    figure.suptitle(f"{results.title} on {results.place}: {words}", fontsize=9.5, x=0.01, ha="left", color=_INK)
