"""docs/numerics.md: errors of every algorithm against float64.

``python -m report numerics`` measures every algorithm that this machine can run, and writes
benchmarks/results/<machine>/numerics.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.bench import machine
from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate
from leanconv.bench.peers.cudnn import CudnnError, CudnnPeer
from leanconv.bench.peers.own import compile_ahead, plan_of
from leanconv.bench.provenance import provenance
from leanconv.bench.suites import dense_filter
from leanconv.cpu import CPU_ALGORITHMS, oracle, winograd1d
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import Algorithm, GpuAlgorithm, ceil_div
from leanconv.kernels.winograd_matrices import WIDTHS
from leanconv.options import Precision
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import launch
from leanconv.runtime.files import write_text
from leanconv.runtime.launch import why_no_gpu
from report import records

#: Filter size and input channels of the layers; their product is the length of a reduction.
LAYERS = ((3, 1), (7, 1), (3, 3), (3, 64), (3, 256), (3, 1024), (5, 128), (7, 64), (9, 64))
FILTERS = (3, 7, 15, 32)
DATA = ("zero-mean", "positive")
#: The kernels Γα(α + 1 − r, r) of Im2col-Winograd as (α, r); the least and the most channels of its Table 3, and its
#: data beside zero-mean ones.
KERNELS = tuple((alpha, width) for alpha, widths in WIDTHS.items() for width in widths)
CHANNELS = (64, 512)
KERNEL_DATA = ("zero-mean", "in [1, 2]")


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


def kernel_layer(alpha: int, width: int, channels: int) -> ConvProblem:
    """A layer with ``width``² filters whose output rows are whole tiles of Γα(α + 1 − width, width)."""
    n = alpha + 1 - width
    # Tiles of 8 states must not fit into rows that are for 4.
    q = n * (2 if alpha == 4 else ceil_div(16, n))
    precision: Precision = "relaxed" if alpha == 16 else "fp32"
    return ConvProblem(1, channels, 15 + width, q + width - 1, 32, width, width, layout="NHWC", precision=precision)


def sample(shape: Sequence[int], kind: str, random: np.random.Generator) -> np.ndarray:
    """Dense float32 data: ``"zero-mean"`` (normal), ``"positive"`` (uniform in [0, 1)) or ``"in [1, 2]"``."""
    if kind == "zero-mean":
        return random.standard_normal(shape, np.float32)
    uniform = random.random(shape, np.float32)
    return 1 + uniform if kind == "in [1, 2]" else uniform


def _problems(layers: Sequence[tuple[int, int]], filters: Sequence[int]) -> list[Problem]:
    return [*(layer(*each) for each in layers), *(dense_filter(1, 96, 128, size, size) for size in filters)]


def _runners(problem: Problem, gpu: bool) -> Iterator[tuple[Algorithm, str, Callable[..., Any]]]:
    """Each algorithm that takes the problem at its own precision level, and a function of (x, w) that runs it."""
    for engine in CPU_ALGORITHMS:
        if not engine.reasons(_at_own_level(problem, engine), None):
            yield engine, "CPU", partial(engine.run, problem)
    for algorithm in ALGORITHMS if gpu else ():
        own = _at_own_level(problem, algorithm)
        if not algorithm.reasons(own, _target()):
            yield algorithm, "GPU", _on_gpu(plan_of(algorithm, own), problem)


def _at_own_level(problem: Problem, algorithm: Algorithm) -> Problem:
    """The problem with the precision that the algorithm declares, so that the loose ones take part too."""
    return replace(problem, precision=algorithm.precision) if problem.kind == "conv2d" else problem


def _target() -> Target:
    return launch.open_device(0).target


def _kernel_plan(algorithm: GpuAlgorithm, problem: ConvProblem, alpha: int) -> Plan | None:
    """What computes the problem on this machine's GPU with ``alpha`` states, if it is a matter of states at all.

    None where the algorithm has no such kernel at the precision level of the problem.
    """
    for config in algorithm.configs(problem, _target()):
        tuning = dict(config.constants())
        if tuning.get("states", alpha) == alpha and not (tuning.get("segments") or tuning.get("column_block")):
            return algorithm.plan(problem, config, _target())
    return None


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
            name, reduction = f"layer {problem.r}×{problem.s}×{problem.c}", problem.r * problem.s * problem.c
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


def measure_kernels(
    kernels: Sequence[tuple[int, int]] = KERNELS, channels: Sequence[int] = CHANNELS, gpu: bool | None = None
) -> list[Entry]:
    """Errors of the kernels of Im2col-Winograd, and on a GPU of implicit_gemm and cuDNN on the same data.

    Raises RuntimeError naming the algorithm when one returns NaN or infinity.
    """
    gpu = why_no_gpu() is None if gpu is None else gpu
    random = np.random.default_rng(0)
    entries: list[Entry] = []
    for (alpha, width), c in product(kernels, channels):
        problem, name = kernel_layer(alpha, width, c), f"Γ{alpha}({alpha + 1 - width},{width}), {c} channels"
        outputs = partial(_kernel_outputs, problem, alpha, gpu)
        for data in KERNEL_DATA:
            entries += _entries(problem, name, width * width * c, data, random, outputs, 30_000_000)
    return entries


def _kernel_outputs(problem: ConvProblem, alpha: int, gpu: bool, x: np.ndarray, w: np.ndarray) -> Iterator[Output]:
    """Those of everything that computes the problem of a kernel."""
    level = problem.precision
    yield "winograd1d", level, "CPU", winograd1d.convolve(problem, alpha, x, w, None)
    if gpu:
        for algorithm in _kernel_algorithms(problem):
            plan = _kernel_plan(algorithm, problem, alpha)
            if plan is not None:
                own = level if algorithm.name == "winograd1d" else algorithm.precision
                yield algorithm.name, own, "GPU", _on_gpu(plan, problem)(x, w)
        for engine, y in _cudnn_outputs(problem, x, w):
            yield engine, "", "GPU", y


def _kernel_algorithms(problem: ConvProblem) -> list[GpuAlgorithm]:
    named = [a for a in ALGORITHMS if a.name in ("winograd1d", "implicit_gemm")]
    return [algorithm for algorithm in named if not algorithm.reasons(problem, _target())]


def _cudnn_outputs(problem: ConvProblem, x: np.ndarray, w: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Every algorithm of cuDNN that computes the problem, by its name, and its output in NHWC."""
    peer = CudnnPeer()
    if peer.absent():
        return
    given = Operands(problem, gpu=True)
    for own, array in ((given.x("NCHW"), x), (given.w("NCHW"), w)):
        own.copy_(own.new_tensor(array.transpose(0, 3, 1, 2)))
    for candidate in peer.candidates(problem, given, gpu=True):
        if isinstance(candidate, Candidate):
            try:
                y = candidate.call().cpu().numpy()
            except CudnnError:  # it says only now that it does not take the problem
                continue
            yield candidate.engine, y if candidate.layout == "NHWC" else y.transpose(0, 2, 3, 1)


def compile_kernels() -> None:
    """Compile on every core what `measured` and `measure_kernels` run on the GPU."""
    plans: list[Plan | None] = []
    for problem, algorithm in product(_problems(LAYERS, FILTERS), ALGORITHMS):
        own = _at_own_level(problem, algorithm)
        plans += [plan_of(algorithm, own)] if not algorithm.reasons(own, _target()) else []
    for (alpha, width), c in product(KERNELS, CHANNELS):
        case = kernel_layer(alpha, width, c)
        plans += [_kernel_plan(algorithm, case, alpha) for algorithm in _kernel_algorithms(case)]
    compile_ahead(filter(None, plans))


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


def kernel_table(entries: Sequence[Entry]) -> str:
    """A Markdown table: a line for each kernel of Im2col-Winograd, a column for each way to compute its layer."""
    columns = list(dict.fromkeys((entry.algorithm, entry.where) for entry in entries))
    lines = []
    for problem in dict.fromkeys(entry.problem for entry in entries):
        own = {(e.algorithm, e.where): e for e in entries if e.problem == problem}
        sequential = next(iter(own.values())).sequential
        lines.append([problem, f"{sequential:.1e}", *(_cell(own.get(column)) for column in columns)])
    heads = [f"`{name}` {where}" for name, where in columns]
    return records.table((["layer", "sequential float32 sum", *heads], lines))


def section(record: dict[str, Any]) -> str:
    entries = [Entry(**entry) for entry in record["entries"]]
    when = f"{record['date']}, {records.revision(record)}, NumPy {record['numpy']}."
    parts = [f"## Measured on {record['machine']}", when]
    for data in DATA:
        for kind in ("layer", "filter"):
            if chosen := [entry for entry in entries if entry.problem.startswith(kind) and entry.data == data]:
                parts += [f"### {kind.capitalize()}s, {data} data", table(chosen)]
    for data in KERNEL_DATA:
        if chosen := [entry for entry in entries if entry.problem.startswith("Γ") and entry.data == data]:
            words = f"{data} data" if data in DATA else f"data {data}"
            parts += [f"### Kernels of Im2col-Winograd, {words}", kernel_table(chosen)]
    return "\n\n".join(parts)


def record(name: str, entries: Sequence[Any], revision: str | None = None, gpu: bool = False) -> dict[str, Any]:
    """What the file of a measurement holds; ``revision`` is what to record where there is no git checkout."""
    return {
        "machine": name,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numpy": np.__version__,
        **provenance(revision, gpu),
        "entries": [asdict(entry) for entry in entries],
    }


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure everything that this machine can run and write its record below ``results``; returns the file."""
    gpu = why_no_gpu() is None
    if gpu:
        compile_kernels()
    name = launch.open_device(0).name if gpu else "the CPU"
    made = record(name, [*measured(gpu=gpu), *measure_kernels(gpu=gpu)], revision, gpu)
    path = results / machine.slug({"gpu": name if gpu else None}) / "numerics.json"
    write_text(path, json.dumps(made, indent=1) + "\n")
    return path
