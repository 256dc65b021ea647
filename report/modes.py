"""docs/networks.md: whole networks in each arithmetic that people run, with leanconv's convolutions and without.

``python -m report modes`` needs a GPU, PyTorch and torchvision, and writes benchmarks/results/<machine>/modes.json: a
row for each network, mode and kind of pass. Tensors are channels last; networks of videos run in both layouts, and each
side is given its better one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

from leanconv.bench.format import size
from leanconv.bench.peers.torch_peer import arithmetic
from leanconv.bench.results import PEER_LAYOUTS
from leanconv.options import Layout, Precision
from report import records
from report.drawing import bars, finish, legend, panels, refuse_empty
from report.fields import ratio
from report.networks import NETWORKS, VIDEOS, better, captured, memory_format

#: Networks whose training step is measured too.
TRAINED = ("resnet50", "unet", "convnext_tiny", "efficientnet_b0", *VIDEOS)
#: Rounds in which both sides are timed one after the other, and microseconds of each side in a round.
_ROUNDS, _ROUND_US = 7, 15000.0


@dataclass(frozen=True)
class Mode:
    """What PyTorch may round factors to, and the least precise arithmetic that leanconv may use."""

    title: str
    tf32: bool
    precision: Precision = "fp32"
    half: bool = False


MODES = {
    "fp32": Mode("strict FP32", False),
    "tf32-fp32": Mode("PyTorch in TF32, leanconv as precise as float32", True),
    "tf32": Mode("TF32", True, "tf32"),
    "16-bit": Mode("16 bits", True, half=True),
}
PASSES = ("forward", "training")
#: Modes of the short table and of the picture: `enable()` as it comes, leanconv in float32's accuracy, or 16 bits.
_SHORT = {"fp32": "strict FP32", "tf32-fp32": "TF32 allowed", "16-bit": "16 bits"}
#: How a network is run, by the name of the times of a row: as a CUDA graph, also tuned, eagerly, under torch.compile.
WAYS = ("graph", "tuned", "eager", "compile")


def elapsed_us(call: Callable[[], Any], count: int) -> float:
    """Microseconds of one of ``count`` calls: the GPU's time, or the host's where the GPU waits for it."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3 / count


def in_turn(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each call, the median of rounds in which all are timed, so that all see the same clocks."""
    counts = {name: max(1, ceil(_ROUND_US / max(elapsed_us(call, 2), 1.0))) for name, call in calls.items()}
    rounds = [{name: elapsed_us(call, counts[name]) for name, call in calls.items()} for _ in range(_ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in calls}


def eager(call: Callable[[], Any], patch: Any) -> dict[str, float]:
    """Microseconds of a call without ``patch`` and with it, in rounds: hosts are faster and slower by the second."""
    from leanconv.torch import registration

    samples: dict[str, list[float]] = {"torch": [], "leanconv": []}
    for _ in range(3):
        call()
    count = max(2, ceil(_ROUND_US / elapsed_us(call, 2)))
    for _ in range(_ROUNDS):
        samples["leanconv"].append(elapsed_us(call, count))
        registration.remove(patch)
        while registration._libraries:  # kept for other threads, of which none computes
            registration._libraries.popitem()[1]._destroy()
        try:
            call()
            samples["torch"].append(elapsed_us(call, count))
        finally:
            registration.add(patch)
        call()
    return {f"{who}_eager_us": round(statistics.median(each), 1) for who, each in samples.items()}


def network(name: str, mode: Mode, training: bool, layout: str = "NHWC") -> tuple[Any, Any]:
    """A network of random weights whose activations are normalised, and an input."""
    import torch

    from report import models

    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = models.build(name)
        x = torch.randn(NETWORKS[name])
    form = memory_format(x, layout)
    model, x = model.to(memory_format=form), x.contiguous(memory_format=form)
    for module in model.modules():
        if isinstance(module, (torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(x[:4])
    if mode.half and not training:
        model, x = model.half(), x.half()
    return model.train(training), x


def step(model: Any, x: Any, mode: Mode) -> Callable[[], Any]:
    """A training step: forward, backward, and an SGD step with momentum; in 16 bits under autocast."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=mode.half):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def measure_forward(model: Any, x: Any, mode: Mode, compiled: bool, tuned: bool) -> dict[str, Any]:
    """Times of PyTorch's and of leanconv's forward pass, and how far apart the results are.

    What tuning finds is kept in LEANCONV_TUNING_DIR; so it comes last, after what is measured without tables.
    """
    import torch

    import leanconv.torch

    with torch.inference_mode():
        call = partial(model, x)
        call()
        graph, y = captured(call)
        graphs, others = {"torch": graph}, {"torch": _compiled_graph(model, x)} if compiled else {}
        with leanconv.torch.enable(model, precision=mode.precision) as taken:
            begin = time.perf_counter()
            leanconv.torch.warm_up(model, x, progress=False)
            waited = time.perf_counter() - begin
            us = eager(call, taken)
            graphs["leanconv"], ours_y = captured(call)
            if compiled:
                others["leanconv"] = _compiled_graph(model, x)
            report = taken.report()
        us |= _replays("graph", graphs) | _replays("compile", others)
        if tuned:
            with leanconv.torch.enable(model, precision=mode.precision, tune=x):
                us |= _replays("tuned", {"torch": graph, "leanconv": captured(call)[0]})
        graphs["torch"].replay()
        graphs["leanconv"].replay()
        apart = float((ours_y.double() - y.double()).norm() / y.double().norm())
    counts = {"taken": len(report.taken), "left": len(report.left), "packed_bytes": report.packed_bytes}
    return us | counts | {"apart": apart, "warm_up_s": round(waited, 1)}


def _replays(way: str, graphs: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each graph's replay, as fields of a row."""
    spent = in_turn({who: graph.replay for who, graph in graphs.items()})
    return {f"{who}_{way}_us": round(us, 1) for who, us in spent.items()}


def _compiled_graph(model: Any, x: Any) -> Any:
    import torch

    torch._dynamo.reset()
    call = partial(torch.compile(model), x)
    call()
    return captured(call)[0]


def measure_step(model: Any, x: Any, mode: Mode) -> dict[str, Any]:
    """Times of a training step, in turn without leanconv and with it."""
    import leanconv.torch

    run = step(model, x, mode)
    run()
    with leanconv.torch.enable(model, precision=mode.precision) as taken:
        us = eager(run, taken)
        report = taken.report()
    return us | {"taken": len(report.taken), "left": len(report.left)}


def measure(
    results: Path, revision: str | None, names: Sequence[str], modes: Sequence[str], passes: Sequence[str],
    seconds: float | None, compiled: bool, tuned: bool,
) -> Path:  # fmt: skip
    """Measure on this machine's GPU what the results file does not have of this revision; other rows stay."""
    import torch

    about = records.with_torch(revision)
    path, rows = records.begun(results, "modes", about)
    begin = time.monotonic()
    for kind, key, name in product(passes, modes, names):
        mine, mode = {"network": name, "mode": key, "pass": kind}, MODES[key]
        old = next((row for row in rows if mine.items() <= row.items()), None)
        known = old is not None and old["revision"] == about["git_revision"]
        if known or (kind != "forward" and name not in TRAINED):
            continue
        if seconds is not None and time.monotonic() - begin > seconds:
            break
        forward = partial(measure_forward, compiled=compiled, tuned=tuned)
        by_layout: dict[Layout, dict[str, Any]] = {}
        for layout in PEER_LAYOUTS if name in VIDEOS else ("NHWC",):
            with arithmetic(mode.tf32):
                model, x = network(name, mode, kind != "forward", layout)
                by_layout[layout] = (forward if kind == "forward" else measure_step)(model, x, mode)
            del model, x
            torch.cuda.empty_cache()
        found = better(by_layout)
        row = {**mine, "batch": NETWORKS[name][0], **found, "revision": about["git_revision"], "date": about["date"]}
        print(f"{time.monotonic() - begin:.0f} s: {row}", flush=True)
        rows = [row for row in rows if row is not old] + [row]
        rows.sort(key=_place)
        records.write(results, "modes", about, rows)
    return path


def better(by_layout: Mapping[Layout, dict[str, Any]]) -> dict[str, Any]:
    """One row of those in several layouts: each side's times are those of its better layout, which ``layouts`` names;
    all else is that of leanconv's. The better one is that of the first way that was timed."""
    if len(by_layout) == 1:
        return next(iter(by_layout.values()))
    way = next(key for row in by_layout.values() for key in row if key.startswith("torch_")).removeprefix("torch_")
    best = {who: min(by_layout, key=lambda of: by_layout[of][f"{who}_{way}"]) for who in ("torch", "leanconv")}
    theirs = {key: us for key, us in by_layout[best["torch"]].items() if key.startswith("torch_")}
    return by_layout[best["leanconv"]] | theirs | {"layouts": f"{best['torch']}, {best['leanconv']}"}


def _place(row: dict[str, Any]) -> tuple[bool, int, int]:
    return row["pass"] != "forward", list(NETWORKS).index(row["network"]), list(MODES).index(row["mode"])


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
        lines.append([network, *forward, *steps, " / ".join(map(size, record["memory"].get(network, ()))) or "–"])
    heads = ["network", *_SHORT.values(), *(f"step, {title}" for title in _SHORT.values()), "memory, ours / theirs"]
    return records.table((heads, lines))


def with_memory(path: Path) -> dict[str, Any]:
    """The record, and as ``memory`` the peaks of networks.json beside it: leanconv's and PyTorch's, by network."""
    rows = records.checked(path.with_name("networks.json")).get("rows", ())
    pairs = {name: better([row for row in rows if row["network"] == name]) for name in {row["network"] for row in rows}}
    memory = {name: [row["peak_bytes"] for row in reversed(pair)] for name, pair in pairs.items()}
    return records.checked(path) | {"memory": memory}


def picture(record: dict[str, Any], path: Path) -> None:
    """Bars of how many times as fast as PyTorch in the same mode a forward pass is, of networks that all modes have."""
    of = _by_key(record)
    names = [name for name in NETWORKS if all("leanconv_graph_us" in of.get((name, "forward", m), {}) for m in _SHORT)]
    refuse_empty(names)
    heights: dict[str, list[float | None]] = {"PyTorch": [1.0] * len(names)}
    for mode, title in _SHORT.items():
        rows = [of[name, "forward", mode] for name in names]
        heights[f"leanconv, {title}"] = [row["torch_graph_us"] / row["leanconv_graph_us"] for row in rows]
    colours = dict(zip(heights, ("#8c8c8c", "#d55e00", "#e69f00", "#f0e442"), strict=True))
    figure, (axis,) = panels(1, 1, (9.5, 3.4))
    bars(axis, names, heights, colours)
    legend(axis, colours)
    gpu = record["machine"]["gpu"]
    finish(figure, path, f"Whole networks on one {gpu}, forward: times as fast as PyTorch in the same mode")


def _by_key(record: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["network"], row["pass"], row["mode"]): row for row in record["rows"]}


def _ratios(row: dict[str, Any] | None, *ways: str) -> str:
    pairs = [((row or {}).get(f"torch_{way}_us"), (row or {}).get(f"leanconv_{way}_us")) for way in ways]
    cells = [ratio(theirs / ours) if theirs and ours else "–" for theirs, ours in pairs]
    return " / ".join(cells) if set(cells) - {"–"} else "–"
