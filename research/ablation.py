"""What each part of a kernel is worth: one taken away at a time, as in Figure 4 of the im2win paper.

``python -m research ablation SUITE`` measures it. Beside the variants stand the kernels that the idea starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from leanconv.bench import machine, tables
from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.peers.own import choice_of, compile_ahead, plan_of
from leanconv.bench.results import Results
from leanconv.bench.run import run_suite
from leanconv.bench.suites import Case, parse_problem, suite_layout, suite_names
from leanconv.bench.tables import heading
from leanconv.call.gpu_call import roles_of
from leanconv.kernels import ALGORITHMS
from leanconv.kernels.contract import Config, GpuAlgorithm
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import launch
from leanconv.runtime.compile import CompileError
from leanconv.runtime.timing import time_gpu
from research.ablation_pages import CELL, table
from research.studies import BASELINE, FULL, STUDIES, Study, compiled_from, study_of


@dataclass(frozen=True)
class Variant:
    """One way to run an algorithm; with a ``header`` of research/kernels, its last launch is compiled from that."""

    algorithm: GpuAlgorithm
    name: str
    config: Config
    header: str = ""

    def plan(self, problem: ConvProblem, target: Target) -> Plan:
        """What computes the problem."""
        whole = self.algorithm.plan(problem, self.config, target)
        if not self.header:
            return whole
        *before, last = whole.launches
        return replace(whole, launches=(*before, compiled_from(last, self.header)))


def variants(
    study: Study, problem: ConvProblem, target: Target, choose: Callable[[GpuAlgorithm], Config]
) -> Iterator[Variant]:
    """The baselines, then each ablated algorithm with the configuration that ``choose`` gives, whole and with switches.

    All but the switch stays as it is where such a configuration is legal, and always in a study that is ``alone``. A
    variant that the whole configuration is already, one that is for other layouts, and an algorithm that cannot run the
    problem, are left out.
    """
    for name in (*study.baselines, *study.algorithms):
        algorithm = _algorithm(name)
        if algorithm.reasons(problem, target):
            continue
        config = choose(algorithm)
        if name in study.baselines:
            yield Variant(algorithm, BASELINE, config)
            continue
        yield Variant(algorithm, FULL, config)
        for variant, values in study.switches.items():
            if problem.layout not in study.layouts.get(variant, (problem.layout,)):
                continue
            if isinstance(values, str):
                yield Variant(algorithm, variant, config, values)
                continue
            wanted = replace(config, **values)
            off = wanted if study.alone else _legal(algorithm, problem, target, wanted, values)
            if off != config:
                yield Variant(algorithm, variant, off)


def _legal(
    algorithm: GpuAlgorithm, problem: ConvProblem, target: Target, wanted: Config, values: dict[str, Any]
) -> Config:
    """``wanted`` if it is legal, else the algorithm's best guess with ``values`` that has as many states, if it counts
    them; if there is none, ``wanted`` all the same.
    """
    same = {key: value for key, value in wanted.constants() if key in values or key == "states"}
    legal = [c for c in algorithm.configs(problem, target) if all(getattr(c, key) == v for key, v in same.items())]
    return wanted if wanted in legal or not legal else legal[0]


def _algorithm(name: str) -> GpuAlgorithm:
    return next(algorithm for algorithm in ALGORITHMS if algorithm.name == name)


class AblationPeer(Peer):
    """The variants as the benchmark's runner takes them."""

    name = "leanconv"
    engines = ("leanconv",)
    solves = ("conv2d",)
    needs_gpu = True

    def __init__(self, study: Study) -> None:
        self._study = study

    def absent(self) -> str | None:
        return None

    def _variants(self, problem: ConvProblem, device: Any) -> Iterator[Variant]:
        def config(algorithm: GpuAlgorithm) -> Config:
            chosen = choice_of(algorithm, problem).config
            assert chosen is not None
            return chosen

        return variants(self._study, problem, device.target, config)

    def prepare(self, problems: Sequence[Problem], gpu: bool) -> None:
        """Compile all variants for all problems, on every core."""
        if gpu:
            device = launch.open_device(0)
            layers = [problem for problem in problems if problem.kind == "conv2d"]
            compile_ahead(v.plan(layer, device.target) for layer in layers for v in self._variants(layer, device))

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "conv2d"
        device = launch.open_device(0)
        for name in self._study.algorithms:
            if reasons := _algorithm(name).reasons(problem, device.target):
                yield Unable(f"leanconv {name}", "; ".join(reasons))
        for variant in self._variants(problem, device):
            engine = f"leanconv {variant.algorithm.name}, {variant.name}"
            plan = variant.plan(problem, device.target)
            needed = max(each.shared_bytes for each in plan.every_launch)
            if needed > device.target.shared_per_block:
                yield Unable(engine, f"its blocks need {needed} bytes of shared memory")
                continue
            try:
                yield _candidate(variant, plan, problem, operands, gpu, device)
            except CompileError as error:
                yield Unable(engine, str(error).partition("\n")[0])


def _pointer(array: Any) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)


def _scratch(nbytes: int, gpu: bool) -> Any:
    if not gpu:
        return np.empty(nbytes, np.uint8)
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _candidate(
    variant: Variant, plan: Plan, problem: ConvProblem, operands: Operands, gpu: bool, device: Any
) -> Candidate:
    compiled = device.compiled(plan)
    run = device.executable(plan, roles_of(problem))
    x, w, bias = operands.x(problem.layout), operands.w(problem.layout), operands.bias
    y = operands.output(problem.layout)
    workspace, prepared = (_scratch(count, operands.gpu) for count in (plan.workspace_bytes, plan.prepared_bytes))
    arrays = (x, w, bias, y, workspace, prepared)
    values = [0 if array is None else _pointer(array) for array in arrays]

    def call(held: tuple[Any, ...] = arrays) -> Any:
        run(0, values)
        return y

    return Candidate(
        "leanconv",
        variant.algorithm.name,
        call,
        problem.layout,
        plan.workspace_bytes,
        out=y,
        on_gpu=gpu,
        registers=max(code.registers for code in compiled),
        spill_bytes=sum(code.spill_bytes for code in compiled),
        note=", ".join(f"{name}={value}" for name, value in variant.config.constants()),
        variant=variant.name,
        prepared_bytes=plan.prepared_bytes,
    )


def run_ablation(
    what: str | Sequence[Case],
    *,
    layout: str | None = None,
    precision: str | None = None,
    dtype: str | None = None,
    only: str | None = None,
    batch: int | None = None,
    quick: bool = False,
    revision: str | None = None,
    progress: bool = True,
    algorithms: Sequence[str] = (),
    seconds: float | None = None,
    resume: Results | None = None,
) -> Results:
    """Measure the variants on a suite of layers, on a GPU; arguments as of run_suite.

    The study is that of the suite in STUDIES, else the first; with ``algorithms``, patterns of names, the first that
    has such an algorithm, and none but those of its algorithms are taken apart.

    Every row's ``variant`` says which it is, its ``note`` the configuration; ``problems`` gains ``transform_us``, the
    time of im2win's transform alone, and ``transform_bytes``, what it reads and writes, where it is taken apart. Raises
    ValueError without a GPU, for a suite of filters, for ``algorithms`` that no study has, and where run_suite does.
    """
    usable, why = machine.gpu_usable()
    if not usable:
        raise ValueError(f"the ablation times kernels on a GPU, and there is none: {why}")
    from leanconv.runtime.launch import open_device

    study = _study(what, algorithms)
    if isinstance(what, str) and (what.startswith("filter:") or (what in suite_names() and not suite_layout(what))):
        raise ValueError(f"{what!r} has no layers: the ablation is of convolutions, not of image filters")
    results = run_suite(
        what, layout=layout, precision=precision, dtype=dtype, only=only, batch=batch, quick=quick, device="cuda",
        revision=revision, progress=progress, seconds=seconds, resume=resume, peers=(AblationPeer(study),),
    )  # fmt: skip
    for about in results.problems.values():
        problem = parse_problem(about["words"])
        assert problem.kind == "conv2d"
        wanted = "im2win" in study.algorithms and "transform_us" not in about
        if wanted and not _algorithm("im2win").reasons(problem, open_device(0).target):
            about |= _time_transform(problem, 0.03 if quick else 0.12)
    return results


def show(results: Results) -> None:
    """Print a table for each algorithm that was taken apart."""
    out = tables.console(200)
    for algorithm in dict.fromkeys(row.algorithm for row in results.rows if row.variant == FULL):
        tables.put(out, f"{heading(results)}: {algorithm}, {CELL}", table(results, algorithm), 1)
    tables.put_legend(out, results)


def _study(what: str | Sequence[Case], patterns: Sequence[str]) -> Study:
    if not patterns:
        return STUDIES.get(what if isinstance(what, str) else "", next(iter(STUDIES.values())))
    return study_of(*patterns)


def _time_transform(problem: ConvProblem, budget_s: float) -> dict[str, Any]:
    """Time of im2win's first launch, and the fewest bytes it can move."""
    import torch

    device = launch.open_device(0)
    plan = plan_of(_algorithm("im2win"), problem)
    run = device.executable(Plan(plan.launches[:1], plan.workspace_bytes), ("x", "workspace"))
    x = torch.randn(problem.x_shape, device="cuda")
    workspace = _scratch(plan.workspace_bytes, gpu=True)
    values = (x.data_ptr(), workspace.data_ptr())
    us = time_gpu(lambda: run(0, values), budget_s=budget_s).median_us
    return {"transform_us": round(us, 3), "transform_bytes": 4 * x.numel() + plan.workspace_bytes}
