"""docs/first-calls.md: how long the first run of a network waits for its kernels, beside `leanconv.precompile`.

``python -m report first-calls`` starts a process for each way and network, each with a disk cache of its own, and
writes benchmarks/results/<machine>/first-calls.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import leanconv
from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.bench.suites import load_suite
from leanconv.problem import ConvProblem
from leanconv.runtime import cache, launch
from report import records

#: Suites of the layers of whole networks. Each takes a minute or more, most of it one by one.
NETWORKS = ("resnet-50",)
#: Ways to come to a network's kernels, in the order of measuring, and what they are.
WAYS = {
    "first calls": "a call of each layer, one after the other, with an empty disk cache",
    "one by one": "`leanconv.precompile` of one layer after the other, its kernels at the same time, with an empty "
    "disk cache",
    "side by side": "`leanconv.precompile` of all, with an empty disk cache",
    "from disk": "the same, with the disk cache that the way before has filled",
}
#: Those that have a disk cache of their own.
_ALONE = ("first calls", "one by one")
_MEASURE = """
import json, sys
from report.first_calls import reached
print(json.dumps(reached(*sys.argv[1:])))
"""


def reached(network: str, way: str, device: str = "cuda") -> dict[str, Any]:
    """How many layers and kernels there are, how many kernels this process compiled for them, and in how many seconds.

    Of calls it is known what they compile, which is all that they run where the disk cache is empty.
    """
    layers = [case.problem for case in load_suite(network)]
    launch.open_device(0)
    if way == "first calls":
        wait = _calls(layers, device)
        begun, before = time.perf_counter(), len(cache.made)
        wait()
        kernels = compiled = len(cache.made) - before
    else:
        groups = [[layer] for layer in layers] if way == "one by one" else [layers]
        begun = time.perf_counter()
        each = [leanconv.precompile(group, progress=False) for group in groups]
        kernels, compiled = sum(one.kernels for one in each), sum(one.compiled for one in each)
    seconds = round(time.perf_counter() - begun, 3)
    return {"layers": len(layers), "kernels": kernels, "compiled": compiled, "seconds": seconds}


def _calls(layers: Sequence[Any], device: str) -> Callable[[], None]:
    """What calls each layer, whose arrays are there before, and waits for the GPU."""
    import torch

    def arrays(layer: ConvProblem) -> list[Any]:
        form = torch.channels_last if layer.layout == "NHWC" else torch.contiguous_format
        shapes = (layer.n, layer.c, layer.h, layer.w), (layer.k, layer.group_c, layer.r, layer.s)
        return [torch.randn(shape, device=device).contiguous(memory_format=form) for shape in shapes]

    given = [(layer, arrays(layer)) for layer in layers]

    def call() -> None:
        for layer, pair in given:
            options: dict[str, Any] = {
                "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups,
                "layout": layer.layout,
            }  # fmt: skip
            leanconv.conv2d(*pair, **options)
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def _measured(network: str, way: str, folder: str) -> dict[str, Any]:
    Path(folder).mkdir(exist_ok=True)
    # NVRTC's own cache is switched off: what it finds there it does not compile
    environment = {**os.environ, "CUDA_CACHE_DISABLE": "1", "LEANCONV_CACHE_DIR": folder}
    command = [sys.executable, "-c", _MEASURE, network, way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{network}, {way}: {done.stderr.strip()}")
    return {"network": network, "way": way, **json.loads(done.stdout.splitlines()[-1])}


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure on this machine's GPU; returns the results file. Raises RuntimeError where a process fails."""
    rows = []
    for network in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            for way in WAYS:
                rows.append(_measured(network, way, str(Path(folder, way if way in _ALONE else "shared"))))
                print("{network}, {way}: {seconds:.2f} s for {kernels} kernels".format(**rows[-1]))
    return records.write(results, "first-calls", machine.describe(True, None, {}, revision), rows)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """A line for each network; a way that has other kernels than `precompile` of all says how many."""
    lines, found = [], [way for way in WAYS if any(row["way"] == way for row in rows)]
    for network in dict.fromkeys(row["network"] for row in rows):
        ways = {row["way"]: row for row in rows if row["network"] == network}
        kernels = max(row["kernels"] for row in ways.values())
        cells = [f"{ways[way]['seconds']:.2f} s" if way in ways else "–" for way in found]
        fewer = {way: f", {row['kernels']} kernels" for way, row in ways.items() if row["kernels"] != kernels}
        cells = [cell + fewer.get(way, "") for way, cell in zip(found, cells, strict=True)]
        lines.append([network, str(next(iter(ways.values()))["layers"]), str(kernels), *cells])
    return ["network", "different layers", "kernels", *found], lines


def section(record: dict[str, Any]) -> str:
    found = {row["way"] for row in record["rows"]}
    ways = "; ".join(f"{way}: {meaning}" for way, meaning in WAYS.items() if way in found)
    said = f"{records.origin(record['machine'])}, {record['machine']['cores']} cores. {ways}."
    if missing := [way for way in WAYS if way not in found]:
        said += f" Not measured: {', '.join(missing)}."
    return f"{said}\n\n{records.table(table(record['rows']))}"
