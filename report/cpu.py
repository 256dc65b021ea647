"""The CPU engine beside PyTorch's, and whether `auto` chooses well there.

``python -m report cpu`` needs NumPy and PyTorch, and writes benchmarks/results/cpu/choice.json: a row for each layer,
with the time of each algorithm that can run it and of PyTorch. It counts processor time, of one thread each. The
engines alternate, and the least of each one's times counts: what else a machine does can only lengthen them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast

import leanconv
from leanconv.bench import machine
from leanconv.bench.format import Table
from leanconv.bench.operands import Check, Operands, as_nchw
from leanconv.bench.results import PEER_LAYOUTS as LAYOUTS
from leanconv.bench.suites import format_problem, load_suite, with_batch
from leanconv.call.choose import choose
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.options import Layout
from leanconv.problem import ConvProblem
from leanconv.runtime.progress import progress
from report import records

#: How often all layers are gone through, how often the engines alternate on one, and the seconds of a sample.
ROUNDS, SAMPLES, SAMPLE_S = 4, 4, 0.003
#: Largest relative error against float64: the engine's precision level is fp32.
MOST_ERROR = 1e-5


def layers(layout: Layout) -> dict[str, list[ConvProblem]]:
    """The layers by group, one image each."""

    def one(n: int, c: int, h: int, w: int, k: int, r: int, s: int, **more: Any) -> ConvProblem:
        return ConvProblem(n, c, h, w, k, r, s, padding=(r // 2, r // 2, s // 2, s // 2), layout=layout, **more)

    def of(suite: str, step: int) -> list[ConvProblem]:
        return [cast(ConvProblem, with_batch(case.problem, 1)) for case in load_suite(suite, layout)[::step]]

    return {
        "layers of ResNet-50": of("resnet-50", 2),
        "layers of Inception-v3": of("inception-v3", 2),
        "depthwise layers": of("depthwise", 3),
        "small layers": [
            one(1, 8, 8, 8, 8, 3, 3), one(1, 16, 14, 14, 16, 3, 3), one(1, 32, 7, 7, 32, 3, 3),
            one(1, 3, 16, 16, 8, 3, 3), one(1, 64, 7, 7, 64, 1, 1), one(1, 16, 14, 14, 32, 1, 1),
            one(4, 8, 6, 6, 16, 3, 3), one(1, 16, 1, 64, 16, 1, 5),
        ],
        "signals, 3 to 129 taps": [
            one(1, c, 1, w, k, 1, taps)
            for c, w, k, taps in (
                (16, 8000, 16, 3), (16, 8000, 16, 9), (1, 16000, 16, 31), (16, 4000, 16, 31), (8, 8000, 8, 65),
                (1, 16000, 8, 129), (16, 2000, 16, 129), (64, 1000, 64, 7),
            )
        ],
        "filters of 5×5 to 15×15": [
            one(1, c, size, size, c, extent, extent)
            for c, size, extent in (
                (32, 28, 5), (64, 28, 5), (16, 56, 7), (64, 14, 7), (32, 28, 9), (16, 56, 9), (32, 28, 11),
                (16, 28, 15),
            )
        ],
    }  # fmt: skip


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
    """Measure on this machine's CPU; returns the results file. Other work comes and goes: so rounds lie apart."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    os.environ["LEANCONV_THREADS"] = "1"
    all_layers = list(every())
    made: dict[tuple[str, ConvProblem], dict[str, Any]] = {}
    with threadpool_limits(1), progress(ROUNDS * len(all_layers)) as begin:
        for group, problem in all_layers * ROUNDS:
            begin(format_problem(problem))
            again = row(group, problem)
            best = made.setdefault((group, problem), again)
            best["us"] = {name: min(us, again["us"][name]) for name, us in best["us"].items()}
    about = machine.describe(False, None, {"torch": torch.__version__}, revision)
    return records.write(results, "choice", about, made.values(), turns=ROUNDS * SAMPLES)


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


def section(record: dict[str, Any]) -> str:
    about = record["machine"]
    found = [excess(each) for each in record["rows"]]
    good = sum(each <= 1.1 for each in found)
    said = (
        f"{about['cpu']}, one thread, {about['date'][:10]}, {records.revision(about, digits=12)}, NumPy "
        f"{about['numpy']}, PyTorch {about['torch']}. Processor time, the least of {record['turns']} samples, engines "
        f"alternating; means are geometric, the largest in brackets. Of {len(found)} choices {good} are within 1.1× of "
        f"the quickest algorithm, {sum(each <= 1.2 for each in found)} within 1.2×."
    )
    return f"{said}\n\n{records.table(table(record))}"
