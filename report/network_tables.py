"""What docs/networks.md and other pages show of `report.modes`: tables of whole networks, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from leanconv.bench.format import size
from report import records
from report.drawing import dots, finish, legend, panels, refuse_empty
from report.fields import ratio
from report.modes import MODES, NETWORKS, PASSES, WAYS

#: Modes of the short table and of the picture: `enable()` as it comes, leanconv in float32's accuracy, or 16 bits.
_SHORT = {"fp32": "strict FP32", "tf32-fp32": "TF32 allowed", "16-bit": "16 bits"}
#: What a fused network is compared with, and the ways of `WAYS` in which PyTorch and leanconv ran it.
_FUSED = (
    ("`fuse`, × PyTorch", "fused", "fused"),
    ("`fuse`, × torch.compile", "compile", "fused"),
    ("backend, × torch.compile", "backend", "backend"),
)


def section(record: dict[str, Any]) -> str:
    """A line for each network: PyTorch's time over leanconv's by pass and mode, in each way of running it."""
    of, lines = _by_key(record), []
    columns = [(kind, mode) for kind in PASSES for mode in MODES if any(key[1:] == (kind, mode) for key in of)]
    ways = {
        column: [way for way in WAYS if any(key[1:] == column and f"torch_{way}_us" in row for key, row in of.items())]
        for column in columns
    }
    for network in dict.fromkeys(key[0] for key in of):
        lines.append([network, *(_ratios(of.get((network, *column)), *ways[column]) for column in columns)])
    heads = [f"{kind}: {MODES[mode].title} ({' / '.join(ways[kind, mode])})" for kind, mode in columns]
    table = records.table((["network", *heads], lines))
    return f"{records.origin_of_rows(record)}. PyTorch's time over leanconv's.\n\n{table}"


def short(record: dict[str, Any], networks: Sequence[str] = ()) -> str:
    """A line for each network: PyTorch's time over leanconv's, forward as a CUDA graph / eagerly, a step; memory."""
    of, lines = _by_key(record), []
    for network in networks or dict.fromkeys(key[0] for key in of):
        forward = [_ratios(of.get((network, "forward", mode)), "graph", "eager") for mode in _SHORT]
        steps = [_ratios(of.get((network, "training", mode)), "eager") for mode in _SHORT]
        lines.append([network, *forward, *steps, _sizes(of.get((network, "forward", "fp32")))])
    heads = ["network", *_SHORT.values(), *(f"step, {title}" for title in _SHORT.values()), "memory, ours / theirs"]
    return records.table((heads, lines))


def _sizes(row: dict[str, Any] | None) -> str:
    """Peaks of memory of a pass, ours and PyTorch's."""
    peaks = [(row or {}).get(f"{who}_peak_bytes") for who in ("leanconv", "torch")]
    return " / ".join(map(size, peaks)) if None not in peaks else "–"


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


def _ratios(row: dict[str, Any] | None, *ways: str) -> str:
    pairs = [((row or {}).get(f"torch_{way}_us"), (row or {}).get(f"leanconv_{way}_us")) for way in ways]
    cells = [ratio(theirs / ours) if theirs and ours else "–" for theirs, ours in pairs]
    return " / ".join(cells) if set(cells) - {"–"} else "–"


def fused(record: dict[str, Any]) -> str:
    """Networks that torch.compile ran too, as CUDA graphs: times as fast by `fuse` and by leanconv's backend."""
    of = _by_key(record)
    compiled = {key for key, row in of.items() if key[1] == "forward" and "torch_compile_us" in row}
    modes = [
        mode for mode in MODES if any(key[2] == mode and f"leanconv_{_FUSED[-1][2]}_us" in of[key] for key in compiled)
    ]
    found: dict[str, list[float]] = {}
    for network in [name for name in NETWORKS if any(key[0] == name for key in compiled)]:
        rows = [of.get((network, "forward", mode), {}) for mode in modes]
        found[network] = [
            row.get(f"torch_{theirs}_us", nan) / row.get(f"leanconv_{ours}_us", nan)
            for row in rows
            for _, theirs, ours in _FUSED
        ]
    means = [[each for each in column if not isnan(each)] for column in zip(*found.values(), strict=True)]
    found["geometric mean"] = [geometric_mean(each) if each else nan for each in means]
    heads = [f"{MODES[mode].title}: {head}" for mode in modes for head, *_ in _FUSED]
    lines = [[name, *("–" if isnan(each) else ratio(each) for each in found[name])] for name in found]
    return f"{records.origin_of_rows(record)}.\n\n{records.table((['network', *heads], lines))}"


def strict(record: dict[str, Any]) -> str:
    """Networks in strict FP32, PyTorch in its quicker layout: milliseconds, the ratio, errors, memory of a pass."""
    lines = []
    for row in record["rows"]:
        if (row["mode"], row["pass"]) == ("fp32", "forward"):
            way = "graph" if "leanconv_graph_us" in row else "eager"
            theirs, ours = row[f"torch_{way}_us"], row[f"leanconv_{way}_us"]
            errors = " / ".join(f"{row[f'{who}_error']:.1e}" for who in ("leanconv", "torch"))
            times = f"{theirs / 1000:.2f} ({row['quicker']})", f"{ours / 1000:.2f}", ratio(theirs / ours)
            taken = f"{row['taken']} of {row['taken'] + row['left']}"
            name = row["network"] + (", eagerly" if way == "eager" else "")
            lines.append([name, str(row["batch"]), *times, errors, _sizes(row), taken])
    heads = ["network", "batch", "PyTorch, ms", "leanconv, ms", "×", "error, ours / theirs", "memory, ours / theirs"]
    said = f"{records.origin_of_rows(record)}. A forward pass as a CUDA graph."
    return f"{said}\n\n{records.table(([*heads, 'taken'], lines))}"
