"""docs/numerics.md: errors of every algorithm against float64.

``python -m report numerics`` measures every algorithm that this machine can run, and writes
benchmarks/results/<machine>/numerics.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from leanconv.bench import columns, machine
from leanconv.bench.peers.own import compile_ahead, plan_of
from leanconv.bench.provenance import kernels, provenance
from leanconv.bench.suites import dense_filter
from leanconv.cpu import CPU_ALGORITHMS, oracle
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import Algorithm
from leanconv.plan import Plan
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import launch
from leanconv.runtime.launch import why_no_gpu
from report import records

#: Filter size and input channels of the layers; their product is the length of a reduction.
LAYERS = ((3, 1), (7, 1), (3, 3), (3, 64), (3, 256), (3, 1024), (5, 128), (7, 64), (9, 64))
FILTERS = (3, 7, 15, 32)
DATA = ("zero-mean", "positive")
#: Algorithm, precision level, place and result.
Output = tuple[str, str, str, np.ndarray]


@dataclass(frozen=True)
class Entry:
    """The relative error of one algorithm on one problem, and of a plain sequential float32 sum on the same data."""

    algorithm: str
    precision: str
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


def sample(shape: Sequence[int], kind: str, random: np.random.Generator) -> np.ndarray:
    """Dense float32 data: ``"zero-mean"`` (normal) or ``"positive"`` (uniform in [0, 1))."""
    return random.standard_normal(shape, np.float32) if kind == "zero-mean" else random.random(shape, np.float32)


def _problems(layers: Sequence[tuple[int, int]], filters: Sequence[int]) -> list[Problem]:
    kinds: tuple[dict[str, Any], ...] = {"reduction": "median"}, {"reduction": "sum"}, {"rank": 1}, {}
    filtered = (dense_filter(1, 96, 128, size, size, **kind) for kind in kinds for size in filters)
    # a layer of volumes for what computes no other
    volume = replace(layer(3, 20), h=8, w=8, d=6, t=3, padding_d=(1, 1))
    return [*(layer(*each) for each in layers), volume, *filtered]


def _runners(problem: Problem, gpu: bool) -> Iterator[tuple[Algorithm, str, Callable[..., Any]]]:
    """Each algorithm that takes the problem at its own precision level, and a function of (x, w) that runs it."""
    for engine in CPU_ALGORITHMS:
        if not engine.reasons(_at_own_level(problem, engine), None):
            yield engine, "CPU", partial(engine.run, problem)
    for algorithm in ALGORITHMS if gpu else ():
        own = _at_own_level(problem, algorithm)
        if not algorithm.reasons(own, launch.open_device(0).target):
            yield algorithm, "GPU", _on_gpu(plan_of(algorithm, own), problem)


def _at_own_level(problem: Problem, algorithm: Algorithm) -> Problem:
    """The problem with the precision that the algorithm declares, so that the loose ones take part too."""
    return replace(problem, precision=algorithm.precision) if problem.kind == "conv2d" else problem


def _on_gpu(plan: Plan, problem: Problem) -> Callable[..., Any]:
    def run(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = np.full(problem.y_shape, np.nan, np.float32)
        values = {"x": x, "w": w, "bias": None, "y": y, **dict.fromkeys(problem.scalars, 0)}
        launch.run_on_host_arrays(launch.open_device(0), plan, values)
        return y

    return run


def measured(
    layers: Sequence[tuple[int, int]] = LAYERS, filters: Sequence[int] = FILTERS, gpu: bool | None = None
) -> list[Entry]:
    """Errors of every algorithm on this machine; ``gpu`` None takes the GPU's along where there is one.

    Raises RuntimeError naming the algorithm when one returns NaN or infinity.
    """
    gpu = why_no_gpu() is None if gpu is None else gpu
    random = np.random.default_rng(0)
    entries: list[Entry] = []
    for problem in _problems(layers, filters):
        if problem.kind == "conv2d":
            taps = (problem.t,) * problem.is_volume + (problem.r, problem.s, problem.c)
            name, reduction = f"layer {'×'.join(map(str, taps))}", prod(taps)
        else:
            name, reduction = f"filter {problem.kh}×{problem.kw}", problem.kh * problem.kw
        for data in DATA:
            entries += _entries(problem, name, reduction, data, random, partial(_outputs, problem, gpu))
    return entries


def _outputs(problem: Problem, gpu: bool, x: np.ndarray, w: np.ndarray) -> Iterator[Output]:
    return ((own.stem, own.precision, where, run(x, w)) for own, where, run in _runners(problem, gpu))


def _entries(
    problem: Problem, name: str, reduction: int, data: str, random: np.random.Generator,
    outputs: Callable[[np.ndarray, np.ndarray], Iterable[Output]], most_products: int = 100_000_000,
) -> Iterator[Entry]:  # fmt: skip
    """An entry for each output of a problem on random data."""
    x, w = sample(problem.x_shape, data, random), sample(problem.w_shape, data, random)
    if problem.kind == "conv2d":
        answer, sequential = oracle.conv2d(problem, x, w), oracle.sequential_error(problem, x, w, None, most_products)
    else:
        # A quarter of the bound, which is four times what a sequential sum does.
        answer, sequential = oracle.filter2d(problem, x, w), oracle.filter_error_bound(problem, x, w) / 4
    for algorithm, level, where, y in outputs(x, w):
        error = oracle.relative_error(y, answer)
        if not np.isfinite(error):
            raise RuntimeError(f"{algorithm} on {problem}, {data} data, returns NaN or infinity")
        yield Entry(algorithm, level, where, name, reduction, data, error, float(sequential))


def compile_kernels() -> None:
    """Compile on every core what `measured` runs on the GPU."""
    plans: list[Plan] = []
    for problem, algorithm in product(_problems(LAYERS, FILTERS), ALGORITHMS):
        own = _at_own_level(problem, algorithm)
        plans += [plan_of(algorithm, own)] if not algorithm.reasons(own, launch.open_device(0).target) else []
    compile_ahead(plans)


def _cell(entry: Entry | None) -> str:
    return f"{entry.error:.1e} ({entry.error / entry.sequential:.2f}×)" if entry else "–"


def table(entries: Sequence[Entry]) -> str:
    """A Markdown table: a line for each algorithm, a column for each problem; the first line is the baseline."""
    baseline = {entry.problem: entry.sequential for entry in entries}
    problems = list(baseline)
    lines = [["sequential float32 sum", "", *(f"{baseline[name]:.1e}" for name in problems)]]
    for algorithm, where, level in dict.fromkeys((entry.algorithm, entry.where, entry.precision) for entry in entries):
        own = {e.problem: e for e in entries if (e.algorithm, e.where) == (algorithm, where)}
        lines.append([f"`{algorithm}` {where}", level, *(_cell(own.get(name)) for name in problems)])
    return records.table((["algorithm", "precision", *problems], lines))


def section(record: dict[str, Any]) -> str:
    entries = [Entry(**entry) for entry in record["entries"]]
    when = f"{record['date']}, {records.revision(record)}, NumPy {record['numpy']}."
    parts = [f"## Measured on {record['machine']}", when]
    for data in DATA:
        for kind in ("layer", "filter"):
            if chosen := [entry for entry in entries if entry.problem.startswith(kind) and entry.data == data]:
                parts += [f"### {kind.capitalize()}s, {data} data", table(chosen)]
    return "\n\n".join(parts)


def record(name: str, entries: Sequence[Any], revision: str | None = None, gpu: bool = False) -> dict[str, Any]:
    """What the file of a measurement holds; ``revision`` is what to record where there is no git checkout."""
    return {
        "machine": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numpy": np.__version__,
        **provenance(revision, gpu),
        "kernels": kernels() if gpu else {},
        "entries": [asdict(entry) for entry in entries],
    }


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure everything that this machine can run and write its record below ``results``; returns the file."""
    gpu, begun = why_no_gpu() is None, perf_counter()
    if gpu:
        compile_kernels()
    name = launch.open_device(0).name if gpu else "the CPU"
    made = record(name, measured(gpu=gpu), revision, gpu)
    path = results / machine.slug({"gpu": name if gpu else None}) / "numerics.json"
    columns.write(path, {**made, "seconds": round(perf_counter() - begun, 1)})
    return path
