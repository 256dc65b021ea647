"""Bars for each problem, from a results file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanconv.bench.results import Results
from leanconv.runtime.files import whole
from leanconv.words import parse_problem

_PANEL = 16


def plot(results: Results, path: Path) -> None:
    """Draw TFLOP/s (gigapixels a second for filters) of leanconv and each group of peers, one group of bars a problem.

    ``path`` ends in a format that matplotlib writes (.png, .svg, .pdf). Raises ValueError when nothing was measured,
    ImportError with the command that installs matplotlib when it is missing.
    """
    series = speeds(results)
    if not series:
        raise ValueError("there is nothing to plot: no row was measured")
    problems = list(results.problems)
    panels = [problems[i : i + _PANEL] for i in range(0, len(problems), _PANEL)]
    inches = (max(6.0, 0.75 * min(len(problems), _PANEL) + 2), 3.2 * len(panels) + 0.6)
    figure = blank(inches)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    width = 0.85 / len(series)
    for axis, panel in zip(axes, panels, strict=True):
        for number, (name, values) in enumerate(series.items()):
            places = [i + (number - (len(series) - 1) / 2) * width for i in range(len(panel))]
            axis.bar(places, [values.get(problem, 0.0) for problem in panel], width, label=name)
        axis.set_xticks(range(len(panel)), panel, rotation=30, ha="right", fontsize=8)
        axis.set_ylabel(unit(results))
        axis.margins(x=0.01)
    axes[0].legend(fontsize=8, ncols=len(series), loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    figure.suptitle(f"{results.title} on {results.place}", fontsize=10)
    save(figure, path)


def curves(results: Results, path: Path) -> None:
    """Draw the speeds of `plot` over the size of square filters, a panel for each size of image, and the ceiling: that
    of a copy, or of the multiply-adds on FP32 cores.

    Raises as `plot`.
    """
    series = speeds(results)
    if not series:
        raise ValueError("there is nothing to plot: no row was measured")
    every = {name: parse_problem(about["words"]) for name, about in results.problems.items()}
    problems = {name: each for name, each in every.items() if each.kind == "filter2d" and each.kh == each.kw}
    sizes = sorted({(problem.h, problem.w) for problem in problems.values()})
    figure = blank((3.4 * len(sizes), 3.6))
    axes = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axis, size in zip(axes, sizes, strict=True):
        names = sorted((name for name, each in problems.items() if (each.h, each.w) == size), key=list(problems).index)
        ceiling = {name: results.problems[name]["bytes"] / 8e3 / results.problems[name]["floor_us"] for name in names}
        for label, values in {**series, "the ceiling": ceiling}.items():
            points = [(problems[name].kw, values[name]) for name in names if name in values]
            dashed = {"color": "#222222", "linestyle": (0, (4, 3))}
            how: dict[str, Any] = dashed if values is ceiling else {"marker": ".", "markersize": 4}
            if points:
                axis.plot(*zip(*points, strict=True), label=label, linewidth=1.2, **how)
        axis.set(title=f"{size[0]}×{size[1]}", xlabel="columns of the filter", yscale="log")
        axis.grid(color="#d9d9d9", linewidth=0.6)
    axes[0].set_ylabel(unit(results))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=len(labels), loc="outside lower center", frameon=False)
    figure.suptitle(f"{results.title} on {results.place}", fontsize=10)
    save(figure, path)


def blank(inches: tuple[float, float]) -> Any:
    """An empty figure of this width and height.

    Raises ImportError with the command that installs matplotlib when it is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'leanconv[bench]'") from error
    figure = Figure(figsize=inches, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def refuse_format(path: Path) -> None:
    """Raise ValueError where matplotlib cannot write the format that the suffix of ``path`` names.

    To be asked before hours of measuring. Raises ImportError as `blank` does.
    """
    known = blank((1, 1)).canvas.get_supported_filetypes()
    if _format(path) not in known:
        names = ", ".join(f".{name}" for name in known)
        raise ValueError(f"{path}: the suffix {path.suffix!r} names no format that can be drawn; choose one of {names}")


def _format(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def save(figure: Any, path: Path, dpi: int = 120, **options: Any) -> None:
    """Write a figure in the format that the suffix of ``path`` names (PNG without one), and the folders it lies in."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        figure.savefig(file, dpi=dpi, format=_format(path), **options)


def unit(results: Results) -> str:
    return "gigapixels / s" if _filters(results) else "TFLOP/s"


def _filters(results: Results) -> bool:
    return all(about["words"].startswith("filter:") for about in results.problems.values())


def speeds(results: Results) -> dict[str, dict[str, float]]:
    """Height of each bar: series, then problem."""
    series: dict[str, dict[str, float]] = {}
    for problem, about in results.problems.items():
        own = results.own(problem, results.headline)
        rows = {"leanconv": own} if own else {}
        # TF32 computes something else, many times faster: its bars would flatten all others.
        rows |= {name: row for name, row in results.peers(problem).items() if "TF32" not in name}
        for name, row in rows.items():
            # An image's pixels are read once and written once, four bytes each time.
            speed = about["bytes"] / 8 / row.us * 1e-3 if _filters(results) else row.tflops
            series.setdefault(name, {})[problem] = speed
    order = ["leanconv", *results.groups()]
    return {name: series[name] for name in order if name in series}
