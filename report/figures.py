"""The figures of the pages on algorithms from results files: speed, memory (2 and 3 in the im2win paper), families.

Algorithms that need a workspace are hatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from leanconv.bench.format import quantity
from leanconv.bench.results import PEER_LAYOUTS, TABLE_BYTES, Group, Results, Row, right
from report.drawing import INK, bars, dots, finish, legend, panels, refuse_empty

#: leanconv's algorithms, PyTorch and im2col, then cuDNN's algorithms: what they are called, and their colour. The
#: figures leave out others.
_OWN = {
    "tensor_gemm": "#b2182b", "tensor_winograd": "#67001f", "native_gemm_16bit": "#d6604d",
    "native_gemm_tf32": "#f4a582", "native_gemm_nchw": "#8c2d04", "im2win_fused": "#d55e00", "im2win": "#e69f00",
    "implicit_gemm": "#f0e442", "winograd1d": "#9e0142", "winograd2d": "#f6a5b5", "direct_tiled": "#5e4fa2",
    "direct": "#7a3b00", "native_gemm_window": "#ef6548", "native_gemm_window_tf32": "#fc9272",
    "tensor_gemm_sync": "#b35806", "native_gemm_rows": "#fdb863", "native_gemm_sync": "#e08214",
    "native_gemm_skinny": "#fee0b6",
}  # fmt: skip
_GROUPS = {"PyTorch": ("PyTorch", "#222222"), "im2col": ("im2col + cuBLAS", "#8c8c8c")}
_CUDNN = {
    "implicit_gemm": ("cuDNN implicit GEMM", "#c6dbef"), "implicit_precomp_gemm": ("cuDNN precomputed", "#6baed6"),
    "gemm": ("cuDNN GEMM", "#08519c"), "fft": ("cuDNN FFT", "#009e73"), "fft_tiling": ("cuDNN FFT tiling", "#74c9ad"),
    "winograd": ("cuDNN Winograd", "#8a4f7d"), "winograd_nonfused": ("cuDNN Winograd non-fused", "#cc79a7"),
}  # fmt: skip
_COLOURS = {**_OWN, **dict(_GROUPS.values()), **dict(_CUDNN.values())}
_DOTS = ("#56b4e9", "#009e73", "#f0e442", "#cc79a7", "#0072b2", "#8c8c8c")
_DASHED = {"color": INK, "linewidth": 0.8, "linestyle": (0, (4, 3))}


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


def ratios(results: Results, path: Path) -> None:
    """Draw how many times as fast as PyTorch in strict FP32 each algorithm is, and what `auto` picks: a row for each
    layer, a dot for each of them. Raises ValueError without rows.
    """
    pytorch = {problem: row for problem in results.problems if (row := results.peers(problem).get("PyTorch"))}
    places: dict[str, list[float | None]] = {}
    for name in (*results.own_algorithms(), *(results.headline or ())):
        own = {problem: results.own(problem, [name]) for problem in pytorch}
        places[name] = [pytorch[problem].us / row.us if row else None for problem, row in own.items()]
    refuse_empty(pytorch and places)
    colours = dict(zip(places, [*_DOTS[: len(places) - 1], "#d55e00"], strict=True))
    figure, (axis,) = panels(1, 1, (8.2, 1.3 + 0.2 * len(pytorch)))
    dots(axis, list(pytorch), places, colours, "PyTorch")
    legend(axis, colours, above=1.0)
    finish(figure, path, f"{results.title} on {results.place}: times as fast as PyTorch in strict FP32")


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
    # the names of the fastest stand over their bars
    axes[0].set_ylim(0, 1.4 * max(row.tflops for of in series.values() for row in of.values()))
    legend(axes[0], colours, hatch="needs a workspace")
    finish(figure, path, f"{results.title} on {results.place}: effective TFLOP/s, counted as direct convolution")
