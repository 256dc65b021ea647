"""docs/networks.md: whole networks whose convolutions leanconv computes, beside PyTorch in strict FP32.

``python -m report networks`` needs a GPU, PyTorch and torchvision, and writes
benchmarks/results/<machine>/networks.json: a row for each network and engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leanconv.bench.format import Table
from leanconv.bench.peers.torch_peer import arithmetic
from leanconv.bench.results import PEER_LAYOUTS as LAYOUTS
from report import records

#: Names for `models.build`, and the shape of the input: a batch, channels, of videos frames, height and width.
NETWORKS = {
    "vgg16": (64, 3, 224, 224), "resnet50": (64, 3, 224, 224), "unet": (8, 3, 256, 256), "vae_decoder": (4, 4, 32, 32),
    "edsr": (16, 3, 96, 96), "convnext_tiny": (32, 3, 224, 224), "mobilenet_v3_large": (64, 3, 224, 224),
    "efficientnet_b0": (32, 3, 224, 224), "densenet121": (32, 3, 224, 224), "resnet18": (64, 3, 224, 224),
    "resnext50_32x4d": (32, 3, 224, 224), "inception_v3": (32, 3, 299, 299), "regnet_y_1_6gf": (32, 3, 224, 224),
    "wide_resnet50_2": (32, 3, 224, 224), "efficientnet_v2_s": (32, 3, 224, 224),
    "shufflenet_v2_x1_0": (64, 3, 224, 224), "squeezenet1_1": (64, 3, 224, 224),
    "r3d_18": (8, 3, 16, 112, 112), "mc3_18": (8, 3, 16, 112, 112), "r2plus1d_18": (8, 3, 16, 112, 112),
    "s3d": (8, 3, 16, 224, 224), "mvit_v2_s": (8, 3, 16, 224, 224), "swin3d_t": (4, 3, 16, 224, 224),
}  # fmt: skip
#: Who computes the convolutions, by the name of the engine without its layout.
ENGINES = {"torch-fp32": "PyTorch, strict FP32", "leanconv": "leanconv"}
#: Those of videos.
VIDEOS = tuple(name for name, shape in NETWORKS.items() if len(shape) == 5)


def memory_format(x: Any, layout: str) -> Any:
    """What PyTorch calls a layout of images or of videos."""
    import torch

    last = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
    return last if layout == "NHWC" else torch.contiguous_format


def calls_of(model: Any, x: Any) -> list[tuple[Any, Any]]:
    """The convolutions of a forward pass of ``model``, each with what it is given."""
    import torch

    found: list[tuple[Any, Any]] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, _: found.append((module, inputs[0])))
        for module in model.modules()
        if isinstance(module, (torch.nn.Conv2d, torch.nn.ConvTranspose2d, torch.nn.Conv3d))
    ]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of ``call``, and what the graph computes when it is replayed. Its memory is the graph's own."""
    import torch

    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        call()
    here.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _row(network: str, engine: str, model: Any, x: Any, exact: Any, calls: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    import torch

    from leanconv.runtime.timing import time_gpu

    stream = torch.cuda.current_stream().cuda_stream
    timed = partial(time_gpu, stream=stream, budget_s=0.2)
    model(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x)
    peak = torch.cuda.max_memory_allocated() - before
    eager = timed(partial(model, x))
    graph, y = captured(partial(model, x))
    timing = timed(graph.replay)
    error = float((y.double() - exact).norm() / exact.norm())
    del graph, y
    graph, _ = captured(lambda: [module(given) for module, given in calls])
    return {
        "network": network, "engine": engine, "batch": len(x), "us": round(timing.median_us, 1),
        "us_low": round(timing.low, 1), "us_high": round(timing.high, 1), "runs": timing.runs,
        "eager_us": round(eager.median_us, 1), "convolutions_us": round(timed(graph.replay).median_us, 1),
        "error": error, "peak_bytes": peak,
    }  # fmt: skip


def measure_network(network: str, shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Rows of one network with random weights: the time of a forward pass, its error against float64, its memory.

    The times of the pass and of its convolutions alone are those of replayed CUDA graphs; with ``eager_us`` Python
    launches each kernel.
    """
    import torch

    import leanconv.torch
    from report import models

    torch.manual_seed(0)
    model: Any = models.build(network).eval().cuda()
    x = torch.randn(shape, device="cuda")
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        for layout in LAYOUTS:
            order = memory_format(x, layout)
            model, x = model.to(memory_format=order), x.contiguous(memory_format=order)
            calls = calls_of(model, x)
            yield _row(network, f"torch-fp32-{layout.lower()}", model, x, exact, calls)
            with leanconv.torch.enable(model) as taken:
                leanconv.torch.warm_up(model, x, progress=False)
                row = _row(network, f"leanconv-{layout.lower()}", model, x, exact, calls)
                report = taken.report()
            yield row | {"taken": len(report.taken), "left": len(report.left)}


def measure(results: Path, revision: str | None = None, networks: Sequence[str] = tuple(NETWORKS)) -> Path:
    """Measure on this machine's GPU; returns the results file, in which other networks keep their rows."""
    about = records.with_torch(revision)
    path, kept = records.begun(results, "networks", about)
    for network in networks:
        rows = []
        with arithmetic(tf32=False):
            for row in measure_network(network, NETWORKS[network]):
                rows.append(row | {"revision": about["git_revision"], "date": about["date"]})
                print(rows[-1], flush=True)
        kept = [row for row in kept if row["network"] != network] + rows
        kept.sort(key=lambda row: list(NETWORKS).index(row["network"]))
        records.write(results, "networks", about, kept)
    return path


def better(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the rows of one network PyTorch's and leanconv's, each in its quicker layout."""
    return [min((row for row in rows if row["engine"].startswith(name)), key=lambda row: row["us"]) for name in ENGINES]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds by network and engine; of the better layouts the ratio, the convolutions alone, and the errors."""
    engines = [f"{engine}-{layout.lower()}" for engine in ENGINES for layout in LAYOUTS]
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        of = {row["engine"]: row for row in rows if row["network"] == network}
        cells = [f"{of[engine]['us'] / 1000:.2f}" if engine in of else "–" for engine in engines]
        theirs, ours = better(list(of.values()))
        pairs = [f"{theirs[key] / 1000:.2f} / {ours[key] / 1000:.2f}" for key in ("convolutions_us", "eager_us")]
        errors = f"{theirs['error']:.1e} / {ours['error']:.1e}"
        taken = f"{ours['taken']} of {ours['taken'] + ours['left']}" if "taken" in ours else "–"
        lines.append([network, str(ours["batch"]), *cells, f"{theirs['us'] / ours['us']:.2f}", *pairs, errors, taken])
    titles = [f"{name}, {layout}" for name in ENGINES.values() for layout in LAYOUTS]
    return ["network", "batch", *titles, "×", "convolutions alone", "without graphs", "error", "taken"], lines


def section(record: dict[str, Any]) -> str:
    rows = records.dated(record)
    meaning = (
        "Milliseconds of a forward pass. × is PyTorch's time over leanconv's, each in its better layout; the pairs "
        "to the right are PyTorch / leanconv in these layouts; “taken” is how many layers ran on leanconv."
    )
    return f"{records.origin_of_rows(record)}. {meaning}\n\n{records.table(table(rows))}"
