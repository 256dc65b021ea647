"""docs/volumes.md: layers of volumes that are large for a card: whether they run, in what memory, and how exactly.

``python -m report large`` needs a GPU and PyTorch, and writes benchmarks/results/<machine>/large.json: a row for each
layer, layout and side. A layer that does not fit with both sides' arrays is given fewer rows, and its row says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table, size
from leanconv.bench.results import PEER_LAYOUTS
from leanconv.bench.suites import format_problem, parse_problem
from leanconv.problem import ConvProblem
from report import records

#: The first layer of a video model's encoder, a layer of whole medical volumes, one of a decoder at its full size.
LAYERS = {
    "video encoder, first layer": "conv:n1,c3,d24,h1008,w1792,k128,t3,r3,s3,pad1,NCDHW,bfloat16",
    "medical volume": "conv:n1,c32,d256,h256,w256,k32,t3,r3,s3,pad1,NCDHW,float16",
    "video decoder, last block": "conv:n1,c256,d5,h1090,w1922,k256,t3,r3,s3,pad1,NCDHW",
}
SIDES = "leanconv", "torch"
#: Outputs that are computed in float64 too: so many places, in all channels, the first and the last among them.
_PLACES = 256
#: Calls that are timed; one, if it takes longer than so many microseconds.
_CALLS, _LONG = 5, 1e6
#: What a layer's own arrays may take of the memory that is free.
_SHARE = 0.45


def sampled_error(problem: ConvProblem, x: Any, w: Any, y: Any, places: int = _PLACES) -> float:
    """The relative error of ``y`` against float64 at some places of all images, and at both ends of its memory."""
    import torch

    generator = torch.Generator().manual_seed(7)
    sides = problem.n, problem.z, problem.p, problem.q
    chosen = torch.stack([torch.randint(0, side, (places,), generator=generator) for side in sides])
    chosen[:, 0], chosen[:, -1] = 0, torch.tensor(sides) - 1
    chosen = chosen.to(x.device)
    front, _, top, _, left, _ = *problem.padding_d, *problem.padding
    axes = (
        (problem.d, problem.t, problem.stride_d, problem.dilation_d, front),
        (problem.h, problem.r, problem.stride[0], problem.dilation[0], top),
        (problem.w, problem.s, problem.stride[1], problem.dilation[1], left),
    )
    at, inside = [], []
    for axis, (extent, taps, step, apart, before) in enumerate(axes):
        seen = chosen[1 + axis, :, None] * step - before + torch.arange(taps, device=x.device) * apart
        inside.append((seen >= 0) & (seen < extent))
        at.append(seen.clamp(0, extent - 1))
    (d, h, wide), (in_d, in_h, in_w) = at, inside
    kept = in_d[:, :, None, None] & in_h[:, None, :, None] & in_w[:, None, None, :]
    # (places, slices, rows, columns, channels), since indices apart from one another come first
    windows = x[chosen[0][:, None, None, None], :, d[:, :, None, None], h[:, None, :, None], wide[:, None, None, :]]
    exact = torch.einsum("mtrsc,kctrs->mk", windows.double() * kept[..., None], w.double())
    found = y[chosen[0], :, chosen[1], chosen[2], chosen[3]].double()
    return float((found - exact).norm() / exact.norm())


def fitting(problem: ConvProblem, free: float) -> ConvProblem:
    """The layer, with half as many rows as often as its arrays take more than their share of ``free`` bytes."""
    while problem.bytes > _SHARE * free and problem.h > 2 * problem.r:
        problem = replace(problem, h=problem.h // 2)
    return problem


def _timed(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What a call returns; its time, the median of some; and the bytes that it took at most, its result among them."""
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    us = []
    for _ in range(_CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        y = call()
        end.record()
        end.synchronize()
        us.append(begin.elapsed_time(end) * 1e3)
        if us[0] > _LONG:
            break
    return y, {"us": round(statistics.median(us), 1), "peak_bytes": peak}


def _rows(name: str, problem: ConvProblem, device: str = "cuda") -> Iterator[dict[str, Any]]:
    import torch

    from leanconv.torch import conv3d
    from leanconv.torch.measured_time import call_of

    form = torch.channels_last_3d if problem.layout == "NHWC" else torch.contiguous_format
    plain = replace(problem, layout="NCHW")
    dtype: Any = getattr(torch, problem.dtype)
    torch.manual_seed(0)
    # an array's values are made slice by slice, so that they take no second array in float32
    x = torch.empty(plain.x_shape, dtype=dtype, device=device, memory_format=form)
    for part in x.unbind(2):
        part.normal_()
    w = torch.randn(plain.w_shape, device=device).to(dtype).contiguous(memory_format=form)
    sides = (problem.stride_d, *problem.stride), (*problem.padding_d, *problem.padding)
    calls: dict[str, Callable[[], Any]] = {
        "torch": call_of(problem, x, w),
        "leanconv": lambda: conv3d(x, w, None, *sides, (problem.dilation_d, *problem.dilation), problem.groups),
    }
    for side, call in calls.items():
        mine = {"layer": name, "side": side, "layout": problem.layout, "problem": format_problem(problem)}
        try:
            with torch.no_grad():
                y, found = _timed(call)
        except RuntimeError as error:  # out of memory, or what a library has no algorithm for
            yield mine | {"failed": str(error).split(". ")[0]}
        else:
            output = prod(y.shape) * y.element_size()
            found["workspace_bytes"] = max(0, found["peak_bytes"] - output)
            yield mine | found | {"output_bytes": output, "error": sampled_error(problem, x, w, y)}
            del y
        torch.cuda.empty_cache()


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure on this machine's GPU, PyTorch as it comes but in strict FP32; returns the results file."""
    import torch

    from leanconv.bench.peers.torch_peer import arithmetic

    about = machine.describe(True, None, {"torch": torch.__version__}, revision)
    rows: list[dict[str, Any]] = []
    begun = perf_counter()
    for (name, words), layout in product(LAYERS.items(), PEER_LAYOUTS):
        whole = replace(_layer(words), layout=layout)
        problem = fitting(whole, torch.cuda.mem_get_info()[0])
        with arithmetic(False):
            torch.backends.cudnn.benchmark = False
            for row in _rows(name, problem):
                rows.append(row | {"rows": problem.h, "of_rows": whole.h})
                print(rows[-1], flush=True)
                path = records.write(results, "large", about, rows, seconds=round(perf_counter() - begun, 1))
    return path


def _layer(words: str) -> ConvProblem:
    problem = parse_problem(words)
    assert problem.kind == "conv2d"
    return problem


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each layer and layout: milliseconds, memory beside the arrays, errors of both sides."""
    of = {(row["layer"], row["layout"], row["side"]): row for row in rows}
    lines = []
    for name, layout in dict.fromkeys(key[:2] for key in of):
        both = [of[name, layout, side] for side in SIDES]
        first = both[0]
        scaled = f", {first['rows']} of {first['of_rows']} rows" if first["rows"] < first["of_rows"] else ""
        said = "NDHWC" if layout == "NHWC" else "NCDHW"
        cells = [
            " / ".join(_failure(row) if "failed" in row else write(row[key]) for row in both)
            for key, write in (
                ("us", lambda us: f"{us / 1000:.2f}"), ("workspace_bytes", size), ("error", "{:.1e}".format),
            )
        ]  # fmt: skip
        lines.append([f"{name}{scaled}", f"`{first['problem']}`", said, *cells])
    return ["layer", "problem", "layout", *(f"{what}, ours / theirs" for what in ("ms", "workspace", "error"))], lines


def _failure(row: dict[str, Any]) -> str:
    return "out of memory" if "memory" in row["failed"] else "it fails"


def section(record: dict[str, Any]) -> str:
    return f"{records.origin(record['machine'])}.\n\n{records.table(table(record['rows']))}"
