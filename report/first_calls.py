"""docs/first-calls.md: how long the first run of a network waits for its kernels.

``python -m report first-calls`` starts a process for each way and network, each with a disk cache of its own, and
writes benchmarks/results/<machine>/first-calls.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanconv.bench import machine
from leanconv.bench.format import Table
from report import records

#: Suites of the layers of whole networks. Each takes a minute or more, most of it one by one.
NETWORKS = ("resnet-50",)
#: Ways to come to a network's kernels, in the order of measuring, and what they are.
WAYS = {
    "one by one": "each layer's first call compiles its own, with an empty disk cache",
    "side by side": "`leanconv.precompile`, with an empty disk cache",
    "from disk": "`leanconv.precompile`, with the disk cache that the way before has filled",
}
_MEASURE = """
import json, sys, time
import leanconv
from leanconv.bench.suites import load_suite
from leanconv.runtime.launch import open_device
layers = [case.problem for case in load_suite(sys.argv[1])]
open_device(0)
begun = time.perf_counter()
groups = [[layer] for layer in layers] if sys.argv[2] == "one by one" else [layers]
each = [leanconv.precompile(group, progress=False) for group in groups]
kernels, compiled = sum(one.kernels for one in each), sum(one.compiled for one in each)
seconds = time.perf_counter() - begun
print(json.dumps({"layers": len(layers), "kernels": kernels, "compiled": compiled, "seconds": round(seconds, 3)}))
"""


def _measured(network: str, way: str, folder: str) -> dict[str, Any]:
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
        with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as shared:
            for way in WAYS:
                rows.append(_measured(network, way, alone if way == "one by one" else shared))
                print("{network}, {way}: {seconds:.2f} s for {kernels} kernels".format(**rows[-1]))
    return records.write(results, "first-calls", machine.describe(True, None, {}, revision), rows)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    lines = []
    for network in dict.fromkeys(row["network"] for row in rows):
        ways = {row["way"]: row for row in rows if row["network"] == network}
        counts = (str(next(iter(ways.values()))[key]) for key in ("layers", "kernels"))
        seconds = [f"{ways[way]['seconds']:.2f} s" if way in ways else "–" for way in WAYS]
        lines.append([network, *counts, *seconds])
    return ["network", "different layers", "kernels", *WAYS], lines


def section(record: dict[str, Any]) -> str:
    ways = "; ".join(f"{way}: {meaning}" for way, meaning in WAYS.items())
    origin = f"{records.origin(record['machine'])}, {record['machine']['cores']} cores."
    return f"{origin} {ways}.\n\n{records.table(table(record['rows']))}"
