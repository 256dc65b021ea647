"""docs/networks.md: whole networks whose convolutions leanconv computes, beside PyTorch in strict FP32.

``python -m report networks`` needs a GPU, PyTorch and torchvision, and writes
benchmarks/results/<machine>/networks.json: a row for each network and engine.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.problem import ConvProblem, Layout
from leanconv.runtime.files import write_text
from report import markdown

#: torchvision's names, and images of 224 x 224 in a batch.
NETWORKS = {
    "mobilenet_v2": 64,
    "mobilenet_v3_large": 64,
    "efficientnet_b0": 32,
    "convnext_tiny": 32,
    "resnet50": 64,
    "vgg16": 64,
}
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC")
#: Who computes the convolutions, by the name of the engine without its layout.
ENGINES = {"torch-fp32": "PyTorch, strict FP32", "leanconv": "leanconv"}


def _convolutions(model: Any) -> list[Any]:
    import torch

    return [module for module in model.modules() if type(module) is torch.nn.Conv2d]


@contextmanager
def our_convolutions(model: Any) -> Iterator[None]:
    """While this lasts, leanconv computes the ``Conv2d`` modules of ``model``; all else stays PyTorch's."""
    import leanconv

    def forward(module: Any, x: Any) -> Any:
        about = (module.stride, module.padding, module.dilation, module.groups)
        return leanconv.conv2d(x, module.weight, module.bias, *about)

    modules = _convolutions(model)
    for module in modules:
        module.forward = partial(forward, module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def calls_of(model: Any, x: Any) -> list[tuple[Any, Any]]:
    """The convolutions of a forward pass of ``model``, each with what it is given."""
    found: list[tuple[Any, Any]] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, _: found.append((module, inputs[0])))
        for module in _convolutions(model)
    ]
    try:
        model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def layers(calls: Sequence[tuple[Any, Any]], layout: Layout) -> list[ConvProblem]:
    """The shapes of convolutions, each once."""
    found: dict[ConvProblem, None] = {}
    for module, x in calls:
        (n, c, h, w), (k, _, r, s) = x.shape, module.weight.shape
        (ph, pw), bias = module.padding, module.bias is not None
        problem = ConvProblem(
            n, c, h, w, k, r, s, module.stride, (ph, ph, pw, pw), module.dilation, module.groups,
            layout=layout, bias=bias,
        )  # fmt: skip
        found.setdefault(problem)
    return list(found)


def _captured(call: Callable[[], Any]) -> tuple[Any, Any]:
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
    graph, y = _captured(partial(model, x))
    timing = timed(graph.replay)
    error = float((y.double() - exact).norm() / exact.norm())
    del graph, y
    graph, _ = _captured(lambda: [module(given) for module, given in calls])
    return {
        "network": network, "engine": engine, "batch": len(x), "us": round(timing.median_us, 1),
        "us_low": round(timing.low, 1), "us_high": round(timing.high, 1), "runs": timing.runs,
        "eager_us": round(eager.median_us, 1), "convolutions_us": round(timed(graph.replay).median_us, 1),
        "error": error, "peak_bytes": peak,
    }  # fmt: skip


def measure_network(network: str, batch: int) -> Iterator[dict[str, Any]]:
    """Rows of one network with random weights: the time of a forward pass, its error against float64, its memory.

    The times of the pass and of its convolutions alone are those of replayed CUDA graphs; with ``eager_us`` Python
    launches each kernel.
    """
    import torch
    import torchvision

    import leanconv

    torch.manual_seed(0)
    model = torchvision.models.get_model(network, weights=None).eval().cuda()
    x = torch.randn(batch, 3, 224, 224, device="cuda")
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(x.double())
        for layout in LAYOUTS:
            order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
            model, x = model.to(memory_format=order), x.contiguous(memory_format=order)
            calls = calls_of(model, x)
            yield _row(network, f"torch-fp32-{layout.lower()}", model, x, exact, calls)
            leanconv.compile(layers(calls, layout), progress=False)
            with our_convolutions(model):
                yield _row(network, f"leanconv-{layout.lower()}", model, x, exact, calls)


def measure(results: Path, revision: str | None = None, networks: Sequence[str] = tuple(NETWORKS)) -> Path:
    """Measure on this machine's GPU; returns the results file."""
    import torch
    import torchvision

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    versions = {"torch": torch.__version__, "torchvision": torchvision.__version__}
    about = machine.describe(True, None, versions, revision)
    path = results / machine.slug(about) / "networks.json"
    rows = []
    for network in networks:
        for row in measure_network(network, NETWORKS[network]):
            rows.append(row)
            text = "{network} {engine}: {us:.0f} µs, convolutions {convolutions_us:.0f}, eager {eager_us:.0f}"
            print(text.format(**row), f"error {row['error']:.1e}", flush=True)
        write_text(path, json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return path


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Milliseconds by network and engine; of the better layouts the ratio, the convolutions alone, and the errors."""
    engines = [f"{engine}-{layout.lower()}" for engine in ENGINES for layout in LAYOUTS]
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        of = {row["engine"]: row for row in rows if row["network"] == network}
        cells = [f"{of[engine]['us'] / 1000:.2f}" if engine in of else "–" for engine in engines]
        best = []
        for engine in ENGINES:
            best.append(min((row for name, row in of.items() if name.startswith(engine)), key=lambda row: row["us"]))
        theirs, ours = best
        pairs = [f"{theirs[key] / 1000:.2f} / {ours[key] / 1000:.2f}" for key in ("convolutions_us", "eager_us")]
        errors = f"{theirs['error']:.1e} / {ours['error']:.1e}"
        lines.append([network, str(ours["batch"]), *cells, f"{theirs['us'] / ours['us']:.2f}", *pairs, errors])
    titles = [f"{name}, {layout}" for name in ENGINES.values() for layout in LAYOUTS]
    return ["network", "batch", *titles, "×", "convolutions alone", "without graphs", "error"], lines


def section(paths: Sequence[Path]) -> str:
    """The tables of all machines."""
    parts = []
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        about = record["machine"]
        origin = f"{about['gpu']}, {about['date'][:10]}, {markdown.revision(about, digits=12)}."
        meaning = (
            "Milliseconds of a forward pass. × is PyTorch's time over leanconv's, each in its better layout; the pairs "
            "to the right are PyTorch / leanconv in these layouts."
        )
        parts.append(f"{origin} {meaning}\n\n{markdown.table(table(record['rows']))}")
    return "\n\n".join(parts) if parts else "Not measured yet: `python -m report networks` makes these figures."
