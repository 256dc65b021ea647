"""What docs/networks.md and other pages show of `report.modes`: tables of whole networks, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from leanconv.bench.format import size
from report import records
from report.drawing import dots, finish, legend, panels, refuse_empty
from report.fields import ratio
from report.networks import MODES, NETWORKS, PASSES, WAYS

#: Modes of the short table and of the picture: `enable()` as it comes, where PyTorch computes float32 strictly, where
#: it may round to TF32, and in 16 bits.
_SHORT = {"fp32": "strict FP32", "tf32-fp32": "TF32 allowed", "16-bit": "16 bits"}
#: Below this part of PyTorch's speed leanconv is slower.
_SLOWER = 0.98
#: What a fused network is compared with: PyTorch's way and leanconv's, of `WAYS`.
_FUSED = {
    "`fuse`, × PyTorch": ("fused", "fused"),
    "`fuse`, × torch.compile": ("compile", "fused"),
    "backend, × torch.compile": ("backend", "backend"),
}


def section(record: dict[str, Any]) -> str:
    """For each pass and mode a table: a line for each network with PyTorch's time over leanconv's in each way of
    running it; below them the geometric means, and of how many networks they are."""
    of, parts = _by_key(record), [f"{records.origin_of_rows(record)}. PyTorch's time over leanconv's."]
    for kind, mode in product(PASSES, MODES):
        rows = {network: row for (network, *key), row in of.items() if key == [kind, mode]}
        ways = [way for way in WAYS if any(_times(row, way) for row in rows.values())]
        if not ways:
            continue
        lines = [[network, *(_ratios(row, way) for way in ways)] for network, row in rows.items()]
        found = [[theirs / ours for row in rows.values() for theirs, ours in _times(row, way)] for way in ways]
        lines.append(["geometric mean", *(f"{ratio(geometric_mean(each))} of {len(each)}" for each in found)])
        title = f"{PASSES[kind]}, {MODES[mode].title}"
        parts.append(f"**{title[0].upper()}{title[1:]}**\n\n{records.table((['network', *ways], lines))}")
    return "\n\n".join(parts)


def _times(row: Mapping[str, Any], way: str) -> list[tuple[float, float]]:
    """PyTorch's time and leanconv's; nothing where one of them was not measured."""
    names = f"torch_{way}_us", f"leanconv_{way}_us"
    return [(row[names[0]], row[names[1]])] if names[0] in row and names[1] in row else []


def slower(record: dict[str, Any]) -> str:
    """Whatever takes longer with leanconv than PyTorch alone, by more than 2 %: the slowest first."""
    found = [
        (theirs / ours, f"{row['network']}, {PASSES[row['pass']]}, {MODES[row['mode']].title}", way)
        for row in record["rows"]
        for way in WAYS
        for theirs, ours in _times(row, way)
        if theirs / ours < _SLOWER
    ]
    refuse_empty(found)
    lines = [[what, way, ratio(each)] for each, what, way in sorted(found)]
    every = sum(len(_times(row, way)) for row in record["rows"] for way in WAYS)
    return f"{len(lines)} of {every} times:\n\n{records.table((['what', 'way', '×'], lines))}"


def short(record: dict[str, Any], networks: Sequence[str] = ()) -> str:
    """A line for each network: PyTorch's time over leanconv's, forward and of a step, as a CUDA graph / eagerly, or
    eagerly alone; memory."""
    of, lines = _by_key(record), []
    for network in networks or dict.fromkeys(key[0] for key in of):
        forward = [_ratios(of.get((network, "forward", mode)), "graph", "eager") for mode in _SHORT]
        rows = [of.get((network, "training", mode), {}) for mode in _SHORT]
        steps = [_ratios(row, *(["graph"] if "leanconv_graph_us" in row else []), "eager") for row in rows]
        lines.append([network, *forward, *steps, _sizes(of.get((network, "forward", "fp32")))])
    heads = ["network", *_SHORT.values(), *(f"step, {title}" for title in _SHORT.values()), "memory, ours / theirs"]
    return records.table((heads, lines))


def _sizes(row: dict[str, Any] | None) -> str:
    """Peaks of memory of a pass, ours and PyTorch's; ours with the packed filters, which stay between passes."""
    if row is None or "leanconv_peak_bytes" not in row:
        return "–"
    return f"{size(row['leanconv_peak_bytes'] + row.get('packed_bytes', 0))} / {size(row['torch_peak_bytes'])}"


def picture(record: dict[str, Any], path: Path) -> None:
    """How many times as fast as PyTorch in the same mode a forward pass is: dots, of networks that all modes have."""
    of = _by_key(record)
    rows = {name: [of.get((name, "forward", mode), {}) for mode in _SHORT] for name in NETWORKS}
    found = {
        name: [each["torch_graph_us"] / each["leanconv_graph_us"] for each in modes]
        for name, modes in rows.items()
        if all("leanconv_graph_us" in each for each in modes)
    }
    refuse_empty(found)
    names = sorted(found, key=lambda name: -found[name][0])
    places = {title: [found[name][i] for name in names] for i, title in enumerate(_SHORT.values())}
    colours = dict(zip(places, ("#d55e00", "#0072b2", "#f0e442"), strict=True))
    figure, (axis,) = panels(1, 1, (8.2, 1.3 + 0.2 * len(names)))
    dots(axis, names, places, colours, "PyTorch")
    legend(axis, {f"leanconv, {title}": colour for title, colour in colours.items()}, above=1.0)
    gpu = record["machine"]["gpu"]
    finish(figure, path, f"Whole networks on one {gpu}, forward: times as fast as PyTorch in the same mode")


def _by_key(record: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["network"], row["pass"], row["mode"]): row for row in record["rows"]}


def _ratios(row: Mapping[str, Any] | None, *ways: str) -> str:
    found = [_times(row or {}, way) for way in ways]
    cells = [ratio(each[0][0] / each[0][1]) if each else "–" for each in found]
    return " / ".join(cells) if any(found) else "–"


def fused(record: dict[str, Any]) -> str:
    """Networks that torch.compile ran too, as CUDA graphs: times as fast by `fuse` and by leanconv's backend.

    The geometric means are those of the networks that have all three numbers.
    """
    rows = [row for row in record["rows"] if row["pass"] == "forward" and "torch_compile_us" in row]
    modes = [mode for mode in MODES if any(row["mode"] == mode and "leanconv_backend_us" in row for row in rows)]
    shown = [row for row in rows if row["mode"] in modes]
    of = _by_key({"rows": shown})
    refuse_empty(of)
    found = {name: [_fused(of.get((name, "forward", mode), {})) for mode in modes] for name in NETWORKS}
    found = {name: each for name, each in found.items() if any(map(any, each))}
    lines = [[name, *(ratio(each) if each else "–" for three in found[name] for each in three)] for name in found]
    whole = [[three for three in column if all(three)] for column in zip(*found.values(), strict=True)]
    means = [geometric_mean(each) for column in whole for each in zip(*column, strict=True)]
    counts = ", ".join(str(len(column)) for column in whole)
    heads = [f"{MODES[mode].title}: {head}" for mode in modes for head in _FUSED]
    table = records.table((["network", *heads], [*lines, [f"geometric mean of {counts}", *map(ratio, means)]]))
    return f"{records.origin_of_rows(record | {'rows': shown})}.\n\n{table}"


def _fused(row: dict[str, Any]) -> list[float]:
    """The ratios of `_FUSED`; 0 where something was not measured, or not in the same run."""
    apart = {("compile", "fused")} if "fused_date" in row else set[tuple[str, str]]()
    return [
        0.0 if ways in apart else row.get(f"torch_{ways[0]}_us", 0.0) / row.get(f"leanconv_{ways[1]}_us", inf)
        for ways in _FUSED.values()
    ]


def energy(record: dict[str, Any]) -> str:
    """What replays that follow one another take and draw: PyTorch, leanconv's `enable` and `fuse`."""
    sides = {"torch": "PyTorch", "leanconv": "`enable`", "fused": "`fuse`"}
    rows = [row for row in record["rows"] if all(f"{who}_watts" in row for who in sides)]
    refuse_empty(rows)
    lines = []
    for row in rows:
        millijoules = {who: row[f"{who}_watts"] * row[f"{who}_sustained_us"] * 1e-3 / row["batch"] for who in sides}
        cells = [
            f"{row[f'{who}_sustained_us'] / row['batch']:.4g} / {row[f'{who}_watts']:.0f} / {each:.3g}"
            for who, each in millijoules.items()
        ]
        ratios = [ratio(millijoules["torch"] / millijoules[who]) for who in ("leanconv", "fused")]
        lines.append([row["network"], MODES[row["mode"]].title, *cells, *ratios])
    heads = [f"{side}: µs / W / mJ an image" for side in sides.values()]
    when = [{name: row[f"sustained_{name}"] for name in ("revision", "date")} for row in rows]
    said = records.origin_of_rows(record | {"rows": when})
    return f"{said}.\n\n{records.table((['network', 'mode', *heads, '`enable`, × energy', '`fuse`, × energy'], lines))}"


def strict(record: dict[str, Any]) -> str:
    """Networks in strict FP32, PyTorch in its quicker layout: milliseconds, the ratio, errors, memory of a pass."""
    lines, rows = [], [row for row in record["rows"] if (row["mode"], row["pass"]) == ("fp32", "forward")]
    for row in rows:
        way = "graph" if "leanconv_graph_us" in row else "eager"
        theirs, ours = row[f"torch_{way}_us"], row[f"leanconv_{way}_us"]
        errors = " / ".join(f"{row[f'{who}_error']:.1e}" for who in ("leanconv", "torch"))
        times = f"{theirs / 1000:.2f} ({row['quicker']})", f"{ours / 1000:.2f}", ratio(theirs / ours)
        taken = f"{row['taken']} of {row['taken'] + row['left']}"
        name = row["network"] + (", eagerly" if way == "eager" else "")
        lines.append([name, str(row["batch"]), *times, errors, _sizes(row), taken])
    heads = ["network", "batch", "PyTorch, ms", "leanconv, ms", "×", "error, ours / theirs", "memory, ours / theirs"]
    said = f"{records.origin_of_rows(record | {'rows': rows})}. A forward pass as a CUDA graph."
    return f"{said}\n\n{records.table(([*heads, 'taken'], lines))}"
