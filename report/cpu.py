"""The CPU engine beside other libraries, and whether `auto` chooses well there.

``python -m report cpu`` measures what benchmarks/cpu.json lists. It writes benchmarks/results/cpu/choice.json, a row for
each layer with the time of each algorithm that can run it and of PyTorch, and calls.json, a row for each filter and each
signal with the time of leanconv, OpenCV, SciPy and PyTorch. It counts processor time, of one thread each. The engines
alternate, and the least of each one's times counts: what else a machine does can only lengthen them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast

import numpy as np

import leanconv
from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.bench.operands import Check, Operands, as_nchw
from leanconv.bench.results import PEER_LAYOUTS as LAYOUTS
from leanconv.bench.suites import format_problem, load_suite, parse_problem, with_batch
from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.options import Layout
from leanconv.problem import ConvProblem
from leanconv.runtime.progress import progress
from report import records

#: How often all layers are gone through, how often the engines alternate on one, and the seconds of a sample.
ROUNDS, SAMPLES, SAMPLE_S = 4, 4, 0.003
#: What is measured, and the libraries by how calls begin.
CASES = Path(__file__).resolve().parents[1] / "benchmarks" / "cpu.json"
LIBRARIES = dict.fromkeys(("leanconv", "ndimage", "signal"), "leanconv") | {
    "cv2": "OpenCV", "ndi": "SciPy", "sps": "SciPy", "torch": "PyTorch",
}  # fmt: skip
#: Largest relative error against float64: the engine's precision level is fp32.
MOST_ERROR = 1e-5


def layers(layout: Layout) -> dict[str, list[ConvProblem]]:
    """The layers by group, one image each."""
    made = {}
    for group, given in _given()["layers"].items():
        if isinstance(given, str):
            suite, step = given.split("/")
            problems = [with_batch(case.problem, 1) for case in load_suite(suite, layout)[:: int(step)]]
        else:
            problems = [parse_problem(f"{words},{layout}") for words in given]
        made[group] = cast(list[ConvProblem], problems)
    return made


def _given() -> Any:
    return json.loads(CASES.read_text(encoding="utf-8"))


def calls() -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Filters and signals: a group with its array, and a call of ours before those of others."""
    about: dict[str, Any] = {}
    for each in _given()["calls"]:
        if isinstance(each, dict):
            about = each
        else:
            yield about, each


def call_row(about: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """The times of a call and of its peers, named by their libraries. Raises RuntimeError where results differ."""
    import cv2
    import scipy.ndimage
    import scipy.signal
    import torch

    rng, (dtype, *shape) = np.random.default_rng(0), about["x"]
    x = (rng.random(shape) * 255).astype(dtype)
    kernels: dict[tuple[int, ...], np.ndarray] = {}

    def kernel(*size: int) -> np.ndarray:
        if size not in kernels:
            kernels[size] = (rng.random(size) / np.prod(size)).astype(np.float32)
        return kernels[size]

    tensor = torch.from_numpy(x.astype(np.float32))[None, None]
    known = {
        "leanconv": leanconv, "ndimage": leanconv.ndimage, "signal": leanconv.signal, "cv2": cv2, "x": x, "t": tensor,
        "ndi": scipy.ndimage, "sps": scipy.signal, "torch": torch, "k": kernel, "np": np,
        "ones": cache(lambda *size: np.ones(size, np.uint8)),
        # PyTorch correlates, and convolve does not
        "tk": cache(lambda *size: torch.from_numpy(np.flip(kernel(*size)).copy() if len(size) == 1 else kernel(*size))[None, None]),
    }  # fmt: skip
    own, *others = (eval(f"lambda: {text}", known) for text in texts)
    ours = np.asarray(own(), np.float64)
    for text, other in zip(texts[1:], others, strict=True):
        apart = np.abs(np.asarray(other(), np.float64).reshape(ours.shape) - ours).max()
        # OpenCV blurs uint8 with weights of 8 bits
        if not apart <= (2 if x.dtype.kind == "u" else 1e-4 * np.abs(ours).max()):
            raise RuntimeError(f"{texts[0]} and {text} are {apart:.3g} apart")
    names = [LIBRARIES[text.partition(".")[0]] + f" {i}" * (i > 1) for i, text in enumerate(texts)]
    us = {name: round(each, 1) for name, each in alternating(dict(zip(names, (own, *others), strict=True))).items()}
    return {"group": about["group"], "problem": texts[0], "us": us}


def _sample(call: Callable[[], Any], count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count * 1e6


def alternating(
    calls: dict[str, Callable[[], Any]], number: int = SAMPLES, sample_s: float = SAMPLE_S
) -> dict[str, float]:
    """Microseconds of processor time of a call, by name: the least of ``number`` samples; engines alternate."""
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, int(sample_s * 1e6 / max(_sample(call, 1), 1.0)))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(number):
        for name in list(calls)[:: 1 if i % 2 else -1]:
            samples[name].append(_sample(calls[name], counts[name]))
    return {name: min(each) for name, each in samples.items()}


def _calls(problem: ConvProblem) -> dict[str, Callable[[], Any]]:
    """What computes a layer, by algorithm, and PyTorch. Raises RuntimeError where a result of ours is not right."""
    import torch

    operands = Operands(problem, gpu=False)
    x, w = operands.x(problem.layout), operands.w(problem.layout)
    how = None, problem.stride, problem.padding[::2], problem.dilation, problem.groups
    named = [algorithm.name for algorithm in CPU_ALGORITHMS if not algorithm.reasons(problem, None)]
    calls: dict[str, Callable[[], Any]] = {
        name: partial(leanconv.conv2d, x, w, *how, layout=problem.layout, algorithm=name) for name in named
    }
    check = Check(operands)
    for name, call in calls.items():
        if not (error := check.error(call(), problem.layout)) <= MOST_ERROR:
            raise RuntimeError(f"{format_problem(problem)} {name}: differs by {error:.3g} from float64")
    theirs = (as_nchw(torch.from_numpy(array), problem.layout) for array in (x, w))
    return {**calls, "PyTorch": partial(torch.nn.functional.conv2d, *theirs, *how)}


def every() -> Iterator[tuple[str, ConvProblem]]:
    for layout in LAYOUTS:
        for group, problems in layers(layout).items():
            yield from ((group, problem) for problem in problems)


def row(group: str, problem: ConvProblem) -> dict[str, Any]:
    us = {name: round(each, 1) for name, each in alternating(_calls(problem)).items()}
    about = {"group": group, "layout": problem.layout, "problem": format_problem(problem)}
    return {**about, "chosen": choose(problem, None).algorithm.name, "us": us}


def measure(results: Path, revision: str | None = None) -> Path:
    """Measure on this machine's CPU; returns the last results file. Other work comes and goes: so rounds lie apart."""
    import cv2
    import scipy
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    os.environ["LEANCONV_THREADS"] = "1"
    versions = {"torch": torch.__version__, "opencv": cv2.__version__, "scipy": scipy.__version__}
    about = machine.describe(False, None, versions, revision)
    files = {
        "choice": [partial(row, *each) for each in every()],
        "calls": [partial(call_row, *each) for each in calls()],
    }
    with threadpool_limits(1), progress(ROUNDS * sum(map(len, files.values()))) as begin:
        for name, makers in files.items():
            made: dict[int, dict[str, Any]] = {}
            for i, make in enumerate(makers * ROUNDS):
                begin(name)
                best = made.setdefault(i % len(makers), again := make())
                best["us"] = {engine: min(us, again["us"][engine]) for engine, us in best["us"].items()}
            path = records.write(results, name, about, made.values(), turns=ROUNDS * SAMPLES)
    return path


def excess(row: dict[str, Any]) -> float:
    """How many times as long as the quickest algorithm the chosen one takes."""
    us = row["us"]
    return float(us[row["chosen"]] / min(value for name, value in us.items() if name != "PyTorch"))


def table(record: dict[str, Any]) -> Table:
    """By group: times in multiples of PyTorch's, of the chosen algorithm and of the quickest; the choice's excess."""
    lines = []
    for group in dict.fromkeys(row["group"] for row in record["rows"]):
        cells = []
        for layout in LAYOUTS:
            of_group = [row for row in record["rows"] if (row["group"], row["layout"]) == (group, layout)]
            ratios = [row["us"][row["chosen"]] / row["us"]["PyTorch"] for row in of_group]
            worst = max(of_group, key=excess)
            good = sum(excess(row) <= 1.1 for row in of_group)
            cells += [f"{geometric_mean(ratios):.2f} ({max(ratios):.2f})", f"{good} of {len(of_group)}"]
            cells.append(f"{excess(worst):.2f}")
        lines.append([group, *cells])
    heads = [f"{layout}: {what}" for layout in LAYOUTS for what in ("× PyTorch's time", "choice within 1.1×", "worst")]
    return ["layers", *heads], lines


def _origin(record: dict[str, Any], *libraries: str) -> str:
    about = record["machine"]
    versions = ", ".join(f"{name} {about[name.lower().replace('pytorch', 'torch')]}" for name in libraries)
    return (
        f"{about['cpu']}, one thread, {about['date'][:10]}, {records.revision(about, digits=12)}, {versions}. Processor "
        f"time, the least of {record['turns']} samples, engines alternating; means are geometric, the largest in brackets."
    )


def section(record: dict[str, Any]) -> str:
    found = [excess(each) for each in record["rows"]]
    said = (
        f"{_origin(record, 'NumPy', 'PyTorch')} Of {len(found)} choices {sum(each <= 1.1 for each in found)} are within "
        f"1.1× of the quickest algorithm, {sum(each <= 1.2 for each in found)} within 1.2×."
    )
    return f"{said}\n\n{records.table(table(record))}"


def beside(row: dict[str, Any]) -> float:
    """Our time over that of the quickest other library."""
    return float(row["us"]["leanconv"] / min(us for name, us in row["us"].items() if name != "leanconv"))


def calls_section(record: dict[str, Any]) -> str:
    """Filters and signals by group: our time over that of the quickest of the others, and the call where it is most."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for each in record["rows"]:
        groups.setdefault(each["group"], []).append(each)
    lines = []
    for group, rows in groups.items():
        ratios, most = list(map(beside, rows)), max(rows, key=beside)
        near = f"{sum(ratio <= 1.5 for ratio in ratios)} of {len(rows)}"
        lines.append([group, f"{geometric_mean(ratios):.2f} ({max(ratios):.2f})", near, f"`{most['problem']}`"])
    heads = ["calls", "× the quickest other library's time", "within 1.5×", "the largest"]
    said = _origin(record, "NumPy", "OpenCV", "SciPy", "PyTorch")
    every = geometric_mean([beside(each) for each in record["rows"]])
    return f"{said} Of all {len(record['rows'])} calls the mean is {every:.2f}.\n\n{records.table((heads, lines))}"
