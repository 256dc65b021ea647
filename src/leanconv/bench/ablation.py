"""What each part of the im2win kernels is worth, as in Figure 4 of their paper: one switched off at a time.

Beside the variants stand what the paper starts from: the direct convolution, and its basic kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from leanconv.algorithms.base import Config, GpuAlgorithm
from leanconv.algorithms.tiles import TileConfig
from leanconv.bench import machine
from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.results import Results
from leanconv.bench.run import run_suite
from leanconv.bench.suites import Case, parse_problem, suite_layout, suite_names
from leanconv.problem import ConvProblem, Problem
from leanconv.timing import time_gpu

BASELINE, FULL = "baseline", "full"
#: Variant, and the field of the configuration that it switches off.
SWITCHES = {"no prefetch": "prefetch", "no vector loads": "vector_loads", "no micro-kernel": "micro_kernel"}
#: Every variant of an ablated algorithm, in the order of tables and figures.
VARIANTS = (FULL, *SWITCHES)
BASELINES = ("direct", "im2win_basic")
ABLATED = ("im2win_fused", "im2win")


@dataclass(frozen=True)
class Variant:
    """One way to run an algorithm."""

    algorithm: GpuAlgorithm
    name: str
    config: Config


def variants(problem: ConvProblem, choose: Callable[[GpuAlgorithm], Config]) -> Iterator[Variant]:
    """The baselines, then each ablated algorithm with the configuration that ``choose`` gives, whole and switched off.

    All but the switch stays as it is: tile, stages, blocks on a multiprocessor, split.
    """
    for name in (*BASELINES, *ABLATED):
        algorithm = _algorithm(name)
        config = choose(algorithm)
        if name in BASELINES:
            yield Variant(algorithm, BASELINE, config)
            continue
        assert isinstance(config, TileConfig), f"{name} has no switches"
        yield Variant(algorithm, FULL, config)
        for variant, switch in SWITCHES.items():
            yield Variant(algorithm, variant, replace(config, **{switch: False}))


def _algorithm(name: str) -> GpuAlgorithm:
    from leanconv import registry

    return next(algorithm for algorithm in registry.ALGORITHMS if algorithm.name == name)


class AblationPeer(Peer):
    """The variants as the benchmark's runner takes them."""

    name = "leanconv"
    engines = ("leanconv",)
    solves = (ConvProblem,)
    needs_gpu = True

    def absent(self) -> str | None:
        return None

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        from leanconv.calls import choose_config
        from leanconv.runtime.compile import CompileError
        from leanconv.runtime.launch import open_device

        assert isinstance(problem, ConvProblem)
        device = open_device(0)
        for variant in variants(problem, lambda algorithm: choose_config(algorithm, problem, device)):
            try:
                yield _candidate(variant, problem, operands, gpu, device)
            except CompileError as error:
                yield Unable(f"leanconv {variant.algorithm.name}, {variant.name}", str(error).partition("\n")[0])


def _pointer(array: Any) -> int:
    return int(array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data)


def _scratch(nbytes: int, gpu: bool) -> Any:
    if not gpu:
        return np.empty(nbytes, np.uint8)
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _candidate(variant: Variant, problem: ConvProblem, operands: Operands, gpu: bool, device: Any) -> Candidate:
    plan = variant.algorithm.plan(problem, variant.config, device.target)
    compiled = device.compiled(plan)
    run = device.executable(plan)
    x, w, bias = operands.x(problem.layout), operands.w(problem.layout), operands.bias
    y = operands.output(problem.layout)
    workspace = _scratch(plan.workspace_bytes, operands.gpu)
    arrays = (x, w, bias, y, workspace, None)
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
    )


def run_ablation(
    what: str | Sequence[Case],
    *,
    layout: str | None = None,
    engines: Sequence[str] = (),
    only: str | None = None,
    batch: int | None = None,
    quick: bool = False,
    device: str | None = None,
    revision: str | None = None,
    progress: bool = True,
    workspace_limit: int | None = None,
) -> Results:
    """Measure the variants on a suite of layers; arguments as of run_suite.

    Every row's ``variant`` says which it is, its ``note`` the configuration; ``problems`` gains ``transform_us``, the
    time of im2win's transform alone, and ``transform_bytes``, what it reads and writes. Raises ValueError without a
    GPU, for a suite of filters, for ``engines`` or a ``workspace_limit`` (there is one engine, and its variants are
    given), and where run_suite does.
    """
    for name, given in (("engines", engines or None), ("workspace_limit", workspace_limit)):
        if given is not None:
            raise ValueError(f"{name}={given!r} does not apply: the ablation runs the im2win kernels and nothing else")
    if device == "cpu":
        raise ValueError("device='cpu' does not apply: the ablation times kernels on a GPU")
    usable, why = machine.gpu_usable()
    if not usable:
        raise ValueError(f"the ablation times kernels on a GPU, and there is none: {why}")
    if isinstance(what, str) and (what.startswith("filter:") or what in suite_names() and not suite_layout(what)):
        raise ValueError(f"{what!r} has no layers: the ablation is of convolutions, not of image filters")
    results = run_suite(
        what, layout=layout, only=only, batch=batch, quick=quick, device="cuda", revision=revision, progress=progress,
        peers=(AblationPeer(),),
    )  # fmt: skip
    for about in results.problems.values():
        problem = parse_problem(about["words"])
        if isinstance(problem, ConvProblem):
            about |= _time_transform(problem, 0.03 if quick else 0.12)
    return results


def _time_transform(problem: ConvProblem, budget_s: float) -> dict[str, Any]:
    """Time of im2win's first launch, and the fewest bytes it can move."""
    import torch

    from leanconv.algorithms.base import Plan
    from leanconv.calls import choose_config
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
