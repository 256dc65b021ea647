"""docs/batch-invariance.md: what ``batch_invariant=True`` costs, and whether images have the same bits in all batches.

``python -m research batch-invariance`` measures on this machine's GPU and writes
research/results/<machine>/batch-invariance.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.call.batches import BATCHES
from leanconv.options import Layout
from leanconv.problem import ConvProblem
from report import records

#: Parts of a batch of the most images, as first image and number, whose bits are compared with theirs among all.
PARTS = ((0, 1), (0, 2), (0, 5), (0, 8), (0, 32), (0, 100), (127, 1), (40, 1), (77, 3), (90, 7))
#: Runs of a call in one CUDA graph, and replays of it.
RUNS, REPLAYS = 10, 7


def _layer(c: int, side: int, k: int, taps: int, stride: int = 1, **rest: Any) -> ConvProblem:
    return ConvProblem(
        1, c, side, side, k, taps, taps, stride=(stride, stride), padding=(taps // 2,) * 4, **rest
    )  # fmt: skip


def layers() -> Iterator[tuple[str, ConvProblem]]:
    """Name and problem of one image: layers of ResNets, and some of each other kind."""
    both: tuple[Layout, ...] = ("NCHW", "NHWC")
    for layout in both:
        for c, side in ((64, 56), (128, 28), (256, 14), (512, 7)):
            yield f"{c}, {side} × {side}, 3 × 3", _layer(c, side, c, 3, layout=layout)
        for c, side, k in ((64, 56, 256), (256, 56, 64), (1024, 14, 256), (2048, 7, 512)):
            yield f"{c} to {k}, {side} × {side}, 1 × 1", _layer(c, side, k, 1, layout=layout)
        yield "3 to 64, 224 × 224, 7 × 7, stride 2", _layer(3, 224, 64, 7, 2, layout=layout)
        yield "128, 56 × 56, 3 × 3, stride 2", _layer(128, 56, 128, 3, 2, layout=layout)
        yield "64 to 192, 28 × 28, 5 × 5", _layer(64, 28, 192, 5, layout=layout)
        yield "384 depthwise, 14 × 14, 3 × 3", _layer(384, 14, 384, 3, groups=384, layout=layout)
        yield "128, 28 × 28, 3 × 3, gradient of the input", _layer(128, 28, 128, 3, layout=layout, op="dgrad")
        yield "128, 28 × 28, 3 × 3, ieee", _layer(128, 28, 128, 3, layout=layout, precision="ieee")
    yield "256, 14 × 14, 3 × 3, float16", _layer(256, 14, 256, 3, layout="NHWC", dtype="float16")
    yield "512, 7 × 7, 3 × 3, float16", _layer(512, 7, 512, 3, layout="NHWC", dtype="float16")


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure on this machine's GPU, with PyTorch tensors and prepared filters; returns the results file."""
    import torch

    import leanconv

    found = list(layers())
    wanted = [replace(p, n=n, batch_invariant=each) for _, p in found for n in BATCHES for each in (False, True)]
    leanconv.precompile(wanted)
    torch.manual_seed(0)
    rows = []
    for name, problem in found:
        rows.append(_measured(name, problem))
        print("{layer}, {layout}: equal {equal}, {us}".format(**rows[-1]))
    about = machine.describe(True, None, {"torch": torch.__version__}, revision)
    return records.write(results, "batch-invariance", about, rows)


def _measured(name: str, problem: ConvProblem) -> dict[str, Any]:
    """Microseconds by batch, without and with ``batch_invariant``, and whether the bits are equal."""
    import torch

    import leanconv
    from leanconv.call.choose import choose
    from leanconv.runtime.launch import open_device

    dtype, most = getattr(torch, problem.dtype), max(BATCHES)
    form = torch.channels_last if problem.layout == "NHWC" else torch.contiguous_format
    channels, side = (problem.k, problem.p) if problem.op == "dgrad" else (problem.c, problem.h)
    # images of very different sizes lie side by side
    sizes = torch.logspace(-2, 2, most, device="cuda").view(-1, 1, 1, 1)
    images = (torch.randn(most, channels, side, side, device="cuda") * sizes).to(dtype)
    filters = torch.randn(problem.k, problem.group_c, problem.r, problem.s, device="cuda").to(dtype)
    w = leanconv.prepare_weights(filters.contiguous(memory_format=form))

    def call(first: int, count: int, invariant: bool) -> Callable[[], Any]:
        x = images[first : first + count].contiguous(memory_format=form)
        options: dict[str, Any] = {
            "stride": problem.stride, "padding": problem.padding, "groups": problem.groups, "layout": problem.layout,
            "precision": problem.precision, "batch_invariant": invariant,
        }  # fmt: skip
        if problem.op == "dgrad":
            return lambda: leanconv.conv2d_input(x, w, (count, problem.c, problem.h, problem.w), **options)
        return lambda: leanconv.conv2d(x, w, **options)

    def equal(invariant: bool) -> bool:
        whole = call(0, most, invariant)()
        return all(torch.equal(call(at, count, invariant)(), whole[at : at + count]) for at, count in PARTS)

    target = open_device(0).target
    chosen = choose(replace(problem, n=most, batch_invariant=True), target)
    return {
        "layer": name,
        "layout": problem.layout,
        "algorithm": chosen.algorithm.name,
        "equal": {"auto": equal(False), "invariant": equal(True)},
        "us": {str(n): [round(_microseconds(call(0, n, each)), 2) for each in (False, True)] for n in BATCHES},
    }


def _microseconds(call: Callable[[], Any]) -> float:
    """The median time of a call among many in a CUDA graph, where the host takes no part."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / RUNS * 1e3)
    return median(times)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """µs with ``batch_invariant``, and in brackets how many times those of the choice for the batch alone."""
    lines, ratios = [], {str(n): [row["us"][str(n)] for row in rows] for n in BATCHES}
    for row in rows:
        times = [f"{ours:.1f} ({ours / auto:.2f})" for auto, ours in row["us"].values()]
        same = ["yes" if row["equal"][way] else "no" for way in ("invariant", "auto")]
        lines.append([row["layer"], row["layout"], row["algorithm"], *times, *same])
    means = [prod(ours / auto for auto, ours in each) ** (1 / len(each)) for each in ratios.values() if each]
    lines.append(["geometric mean", "", "", *(f"({mean:.2f})" for mean in means), "", ""])
    return ["layer", "layout", "algorithm", *(f"batch {n}, µs" for n in BATCHES), "equal bits", "without"], lines


def section(record: dict[str, Any]) -> str:
    """The table of a machine."""
    listed = [(name, problem.layout) for name, problem in layers()]
    rows = {(row["layer"], row["layout"]) for row in record["rows"]}
    counted = f"{len(rows.intersection(listed))} of the study's {len(listed)} layers were measured"
    if others := len(rows.difference(listed)):
        counted += f", and {others} that it does not list any more"
    return f"{records.origin(record['machine'])}. {counted}.\n\n{records.table(table(record['rows']))}"
