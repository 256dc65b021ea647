"""What each part of a kernel is worth: one switched off at a time, as in Figure 4 of the im2win paper.

Beside the variants stand the kernels that the idea starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Config, GpuAlgorithm
from leanconv.bench import machine
from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.peers.own import compile_ahead
from leanconv.bench.results import Results
from leanconv.bench.run import run_suite
from leanconv.bench.suites import Case, parse_problem, suite_layout, suite_names
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem, Layout, Problem
from leanconv.runtime.timing import time_gpu

BASELINE, FULL = "baseline", "full"


@dataclass(frozen=True)
class Study:
    """Which algorithms are taken apart, what is switched off in them, and what they are compared with.

    ``switches`` holds for each variant the fields of the configuration that it sets, and to what. With ``alone`` they
    are all that differs; otherwise other fields follow to the best configuration that the algorithm has with them.
    ``layouts`` are those that a variant differs in, for variants that do not in all.
    """

    algorithms: tuple[str, ...]
    baselines: tuple[str, ...]
    switches: dict[str, dict[str, Any]] = field(hash=False)
    alone: bool = False
    layouts: dict[str, tuple[Layout, ...]] = field(default_factory=dict, hash=False)

    @property
    def variants(self) -> tuple[str, ...]:
        """Every variant of an ablated algorithm, in the order of tables and figures."""
        return (FULL, *self.switches)


#: By the suite that they are run on; the first is for problems of any other suite.
STUDIES = {
    "im2win": Study(
        ("im2win_fused", "im2win"),
        ("direct", "im2win_basic"),
        {
            "no prefetch": {"prefetch": False},
            "no vector loads": {"vector_loads": False},
            "no micro-kernel": {"micro_kernel": False},
        },
    ),
    # One output row to a block: input rows are transformed once for each filter row, as in the paper. Runs of two
    # tiles are its variant ruse. A variant that is what a call has anyway is left out.
    "winograd1d": Study(
        ("winograd1d",),
        ("implicit_gemm",),
        {
            "one row": {"rows": 1},
            "runs of 2": {"run": 2},
            "plain sums": {"promoted": False},
            "no producers": {"producers": 0},
            "segments": {"segments": True},
            "whole rows": {"segments": False},
        },
        layouts={"runs of 2": ("NCHW", "NHWC")},
    ),
    # The layouts of the output stage, which its paper compares; in NCHW a call has one of the first two anyway, and in
    # the others outputs lie side by side as they are. Runs are of the raw pixels; neighbouring tiles of CHWN are of
    # different images and have none in common. A list of configurations that are good as they are would not hold these.
    "opencnn": Study(
        ("winograd2d",),
        ("implicit_gemm",),
        {
            "staged": {"staged": True},
            "direct stores": {"staged": False},
            "64-bit exchange": {"wide_exchange": False},
            "unpadded exchange": {"padded_exchange": False},
            "runs of 4": {"run": 4},
        },
        alone=True,
        layouts={"staged": ("NCHW",), "direct stores": ("NCHW",), "runs of 4": ("NCHW", "NHWC")},
    ),
}


def study_of(algorithm: str) -> Study:
    """The study that takes an algorithm apart. Raises ValueError where there is none."""
    for study in STUDIES.values():
        if algorithm in study.algorithms:
            return study
    names = ", ".join(name for study in STUDIES.values() for name in study.algorithms)
    raise ValueError(f"algorithm={algorithm!r} has no ablation; these have: {names}")


@dataclass(frozen=True)
class Variant:
    """One way to run an algorithm."""

    algorithm: GpuAlgorithm
    name: str
    config: Config


def variants(
    study: Study, problem: ConvProblem, target: Target, choose: Callable[[GpuAlgorithm], Config]
) -> Iterator[Variant]:
    """The baselines, then each ablated algorithm with the configuration that ``choose`` gives, whole and switched off.

    All but the switch stays as it is where such a configuration is legal, and always in a study that is ``alone``. A
    variant that the whole configuration is already, one that is for other layouts, and an algorithm that cannot run the
    problem, are left out.
    """
    for name in (*study.baselines, *study.algorithms):
        algorithm = _algorithm(name)
        if algorithm.reasons(problem):
            continue
        config = choose(algorithm)
        if name in study.baselines:
            yield Variant(algorithm, BASELINE, config)
            continue
        yield Variant(algorithm, FULL, config)
        for variant, values in study.switches.items():
            if problem.layout not in study.layouts.get(variant, (problem.layout,)):
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
    solves = (ConvProblem,)
    needs_gpu = True

    def __init__(self, study: Study) -> None:
        self._study = study

    def absent(self) -> str | None:
        return None

    def _variants(self, problem: ConvProblem, device: Any) -> Iterator[Variant]:
        from leanconv.call.run import choose_config

        return variants(
            self._study, problem, device.target, lambda algorithm: choose_config(algorithm, problem, device)
        )

    def prepare(self, problems: Sequence[Problem], gpu: bool) -> None:
        """Compile all variants for all problems, on every core."""
        from leanconv.runtime.launch import open_device

        if gpu:
            device = open_device(0)
            layers = [problem for problem in problems if isinstance(problem, ConvProblem)]
            compile_ahead(
                v.algorithm.plan(layer, v.config, device.target)
                for layer in layers
                for v in self._variants(layer, device)
            )

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        from leanconv.runtime.compile import CompileError
        from leanconv.runtime.launch import open_device

        assert isinstance(problem, ConvProblem)
        device = open_device(0)
        for name in self._study.algorithms:
            if reasons := _algorithm(name).reasons(problem):
                yield Unable(f"leanconv {name}", "; ".join(reasons))
        for variant in self._variants(problem, device):
            engine = f"leanconv {variant.algorithm.name}, {variant.name}"
            plan = variant.algorithm.plan(problem, variant.config, device.target)
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
    run = device.executable(plan)
    x, w, bias = operands.x(problem.layout), operands.w(problem.layout), operands.bias
    y = operands.output(problem.layout)
    workspace, prepared = (_scratch(count, operands.gpu) for count in (plan.workspace_bytes, plan.prepared_bytes))
    arrays = (x, w, bias, y, workspace, prepared)
    values = [*(0 if array is None else _pointer(array) for array in arrays), 0, 0]

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
    engines: Sequence[str] = (),
    only: str | None = None,
    batch: int | None = None,
    quick: bool = False,
    device: str | None = None,
    revision: str | None = None,
    progress: bool = True,
    workspace_limit: int | None = None,
    algorithms: Sequence[str] = (),
    seconds: float | None = None,
    resume: Results | None = None,
) -> Results:
    """Measure the variants on a suite of layers; arguments as of run_suite.

    The study is that of the suite in STUDIES, else the first; with ``algorithms``, patterns of names, the first that
    has such an algorithm, and none but those of its algorithms are taken apart.

    Every row's ``variant`` says which it is, its ``note`` the configuration; ``problems`` gains ``transform_us``, the
    time of im2win's transform alone, and ``transform_bytes``, what it reads and writes, where it is taken apart. Raises
    ValueError without a GPU, for a suite of filters, for ``algorithms`` that no study has, for ``engines`` or a
    ``workspace_limit`` (there is one engine, and its variants are given), and where run_suite does.
    """
    for name, given in (("engines", engines or None), ("workspace_limit", workspace_limit)):
        if given is not None:
            raise ValueError(
                f"{name}={given!r} does not apply: the ablation runs variants of leanconv's kernels and nothing else"
            )
    if device == "cpu":
        raise ValueError("device='cpu' does not apply: the ablation times kernels on a GPU")
    usable, why = machine.gpu_usable()
    if not usable:
        raise ValueError(f"the ablation times kernels on a GPU, and there is none: {why}")
    study = _study(what, algorithms)
    if isinstance(what, str) and (what.startswith("filter:") or what in suite_names() and not suite_layout(what)):
        raise ValueError(f"{what!r} has no layers: the ablation is of convolutions, not of image filters")
    results = run_suite(
        what, layout=layout, precision=precision, dtype=dtype, only=only, batch=batch, quick=quick, device="cuda",
        revision=revision, progress=progress, seconds=seconds, resume=resume, peers=(AblationPeer(study),),
    )  # fmt: skip
    for about in results.problems.values():
        problem = parse_problem(about["words"])
        wanted = "im2win" in study.algorithms and "transform_us" not in about
        if wanted and isinstance(problem, ConvProblem) and not _algorithm("im2win").reasons(problem):
            about |= _time_transform(problem, 0.03 if quick else 0.12)
    return results


def _study(what: str | Sequence[Case], patterns: Sequence[str]) -> Study:
    if not patterns:
        return STUDIES.get(what if isinstance(what, str) else "", next(iter(STUDIES.values())))
    for study in STUDIES.values():
        names = tuple(name for name in study.algorithms if any(fnmatchcase(name, pattern) for pattern in patterns))
        if names:
            return replace(study, algorithms=names)
    return study_of(",".join(patterns))


def _time_transform(problem: ConvProblem, budget_s: float) -> dict[str, Any]:
    """Time of im2win's first launch, and the fewest bytes it can move."""
    import torch

    from leanconv.call.run import choose_config
    from leanconv.runtime.launch import open_device

    device = open_device(0)
    algorithm = _algorithm("im2win")
    plan = algorithm.plan(problem, choose_config(algorithm, problem, device), device.target)
    run = device.executable(Plan(plan.launches[:1], plan.workspace_bytes))
    x = torch.randn(problem.x_shape, device="cuda")
    workspace = _scratch(plan.workspace_bytes, gpu=True)
    values = (x.data_ptr(), 0, 0, 0, workspace.data_ptr(), 0, 0, 0)
    us = time_gpu(lambda: run(0, values), budget_s=budget_s).median_us
    return {"transform_us": round(us, 3), "transform_bytes": 4 * x.numel() + plan.workspace_bytes}
