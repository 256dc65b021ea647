"""Errors of every algorithm against float64, as docs/numerics.md publishes them.

    python -m leanconv.bench.numerics

measures every algorithm that this machine can run, writes benchmarks/results/<machine>/numerics.json, and makes
docs/numerics.md anew from all such files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.algorithms.base import Algorithm, CpuAlgorithm, GpuAlgorithm
from leanconv.bench import machine
from leanconv.bench.results import write_whole
from leanconv.bench.suites import dense_filter
from leanconv.bench.tables import markdown
from leanconv.problem import ConvProblem, Problem
from leanconv.reference import oracle

#: Filter size and input channels of the layers; their product is the length of a reduction.
LAYERS = ((3, 3), (3, 64), (3, 256), (3, 1024), (5, 128), (7, 64), (9, 64))
FILTERS = (3, 7, 15, 32)
DATA = ("zero-mean", "positive")


@dataclass(frozen=True)
class Entry:
    """The relative error of one algorithm on one problem, and of a plain sequential float32 sum on the same data."""

    algorithm: str
    tier: str
    where: str
    problem: str
    reduction: int
    data: str
    error: float
    sequential: float


def layer(size: int, channels: int) -> ConvProblem:
    """A small layer with ``size``² filters, the output as large as the input; all of it is checked."""
    pad = size // 2
    return ConvProblem(n=2, c=channels, h=16, w=16, k=32, r=size, s=size, padding=(pad,) * 4)


def _random(shape: tuple[int, ...], data: str, random: np.random.Generator) -> np.ndarray:
    if data == "positive":
        return random.random(shape, np.float32)
    return random.standard_normal(shape, np.float32)


def _runners(problem: Problem, gpu: bool) -> Iterator[tuple[Algorithm, str, Callable[..., Any]]]:
    """Each algorithm that takes the problem in its own tier, and a function of (x, w) that runs it."""
    from leanconv import registry

    for algorithm in (*registry.CPU_ALGORITHMS, *(registry.ALGORITHMS if gpu else ())):
        if not isinstance(problem, algorithm.solves) or algorithm.reasons(_in_tier(problem, algorithm)):
            continue
        if isinstance(algorithm, CpuAlgorithm):
            yield algorithm, "CPU", _on_cpu(algorithm, problem)
        elif isinstance(algorithm, GpuAlgorithm):
            yield algorithm, "GPU", _on_gpu(algorithm, _in_tier(problem, algorithm))


def _in_tier(problem: Problem, algorithm: Algorithm) -> Problem:
    """The problem with the precision that the algorithm declares, so that the loose ones take part too."""
    if isinstance(problem, ConvProblem):
        return replace(problem, precision=algorithm.tier)
    return problem


def _on_cpu(algorithm: CpuAlgorithm, problem: Problem) -> Callable[..., Any]:
    if isinstance(problem, ConvProblem):
        return lambda x, w: algorithm.run(problem, x, w, None)
    return lambda x, w: algorithm.run(problem, x, w)


def _on_gpu(algorithm: GpuAlgorithm, problem: Problem) -> Callable[..., Any]:
    from leanconv.calls import choose_config
    from leanconv.runtime.launch import open_device, run_plan

    device = open_device(0)
    plan = algorithm.plan(problem, choose_config(algorithm, problem, device), device.target)

    def run(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        shape = problem.y_shape if isinstance(problem, ConvProblem) else x.shape
        y = np.full(shape, np.nan, np.float32)
        run_plan(device, plan, {"x": x, "w": w, "y": y}, value=0.0, delta=0.0)
        return y

    return run


def measure(
    layers: Sequence[tuple[int, int]] = LAYERS, filters: Sequence[int] = FILTERS, gpu: bool | None = None
) -> list[Entry]:
    """Errors of every algorithm on this machine; ``gpu`` None takes the GPU's along where there is one.

    Raises RuntimeError naming the algorithm when one returns NaN or infinity.
    """
    gpu = _gpu_here() if gpu is None else gpu
    random = np.random.default_rng(0)
    found = []
    problems: list[Problem] = [layer(*entry) for entry in layers]
    problems += [dense_filter(1, 96, 128, size, size) for size in filters]
    for problem in problems:
        for data in DATA:
            if isinstance(problem, ConvProblem):
                x, w = _random(problem.x_shape, data, random), _random(problem.w_shape, data, random)
                answer = oracle.conv2d(problem, x, w)
                sequential = oracle.sequential_error(problem, x, w)
                name, reduction = f"layer {problem.r}×{problem.s}×{problem.c}", problem.r * problem.s * problem.c
            else:
                x = _random((problem.batch, problem.h, problem.w), data, random)
                w = _random((problem.kh, problem.kw), data, random)
                answer = oracle.filter2d(problem, x, w)
                # A quarter of the bound, which is four times what a sequential sum does.
                sequential = oracle.filter_error_bound(problem, x, w) / 4
                name, reduction = f"filter {problem.kh}×{problem.kw}", problem.kh * problem.kw
            for algorithm, where, run in _runners(problem, gpu):
                error = oracle.relative_error(run(x, w), answer)
                if not np.isfinite(error):
                    raise RuntimeError(f"{algorithm.name} on {problem}, {data} data, returns NaN or infinity")
                found.append(
                    Entry(algorithm.name, algorithm.tier, where, name, reduction, data, error, float(sequential))
                )
    return found


def _gpu_here() -> bool:
    from leanconv.runtime.driver import CudaUnavailableError, driver

    try:
        driver()
    except CudaUnavailableError:
        return False
    return True


def table(entries: Sequence[Entry], data: str) -> str:
    """A Markdown table: a line for each algorithm, a column for each problem; the first line is the yardstick."""
    chosen = [entry for entry in entries if entry.data == data]
    problems = list(dict.fromkeys(entry.problem for entry in chosen))
    yardstick = {entry.problem: entry.sequential for entry in chosen}
    lines = [["sequential float32 sum", "", *(f"{yardstick[name]:.1e}" for name in problems)]]
    for algorithm, where, tier in dict.fromkeys((entry.algorithm, entry.where, entry.tier) for entry in chosen):
        own = {e.problem: e for e in chosen if (e.algorithm, e.where) == (algorithm, where)}
        cells = [
            f"{own[name].error:.1e} ({own[name].error / own[name].sequential:.2f}×)" if name in own else "–"
            for name in problems
        ]
        lines.append([f"`{algorithm}` {where}", tier, *cells])
    return markdown((["algorithm", "tier", *problems], lines))


def page(records: Sequence[dict[str, Any]]) -> str:
    """docs/numerics.md: what is written by hand, then the tables of each machine's record."""
    parts = [resources.files("leanconv.bench").joinpath("numerics_head.md").read_text(encoding="utf-8").strip()]
    for record in records:
        entries = [Entry(**entry) for entry in record["entries"]]
        parts.append(f"## Measured on {record['machine']}")
        dirty = " with changes" if record.get("git_dirty") else ""
        commit = record["git_revision"] or "unknown"
        parts.append(f"{record['date']}, revision {commit}{dirty}, NumPy {record['numpy']}.")
        for data in DATA:
            for kind in ("layer", "filter"):
                chosen = [entry for entry in entries if entry.problem.startswith(kind)]
                if chosen:
                    parts += [f"### {kind.capitalize()}s, {data} data", table(chosen, data)]
    return "\n\n".join(parts) + "\n"


def record(entries: Sequence[Entry], gpu: bool) -> dict[str, Any]:
    """What is kept of a measurement."""
    name = "the CPU"
    if gpu:
        from leanconv.runtime.launch import open_device

        name = open_device(0).name
    return {
        "machine": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numpy": np.__version__,
        **machine.revision(),
        "entries": [asdict(entry) for entry in entries],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, make the page."""
    parser = argparse.ArgumentParser(description="Measure errors against float64 and make docs/numerics.md.")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of the records")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/numerics.md"))
    parser.add_argument("--revision", help="git revision to record where there is no checkout")
    parser.add_argument("--only-page", action="store_true", help="measure nothing: make the page from the records")
    options = parser.parse_args(arguments)
    if not options.only_page:
        gpu = _gpu_here()
        found = record(measure(gpu=gpu), gpu)
        if options.revision:
            found["git_revision"] = options.revision
        path = options.results / machine.slug({"gpu": found["machine"] if gpu else None}) / "numerics.json"
        write_whole(path, json.dumps(found, indent=1) + "\n")
        print(f"{path}: {len(found['entries'])} errors")
    files = sorted(options.results.glob("*/numerics.json"))
    write_whole(options.out, page([json.loads(path.read_text(encoding="utf-8")) for path in files]))
    print(f"{options.out}: {len(files)} machines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
