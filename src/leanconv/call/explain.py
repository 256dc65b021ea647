"""What would run, why, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Algorithm
from leanconv.arrays import TorchArrays
from leanconv.call import choose as registry
from leanconv.call import describe
from leanconv.call import run as calls
from leanconv.call.arguments import check_problem, workspace_limit
from leanconv.problem import ConvProblem, FilterProblem, Problem
from leanconv.reference import CPU_ALGORITHMS
from leanconv.runtime import launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.launch import device_index


@dataclass(frozen=True)
class Explanation:
    """The choice for one problem; ``print`` it.

    ``chosen`` is an algorithm's name, or None where nothing runs; ``others`` maps every other algorithm to the
    sentences that say why it does not run.
    """

    problem: Problem
    #: ``NumPy engine on the CPU``, ``PyTorch on the CPU``, or the GPU's name and architecture
    where: str
    chosen: str | None
    why: str
    config: str = ""
    #: a line for each kernel, where it has been compiled: registers, spilled bytes, grid
    kernels: tuple[str, ...] = ()
    workspace_bytes: int = 0
    #: bytes of what is made of the filters alone; `prepare_weights` keeps it
    prepared_bytes: int = 0
    #: bytes of workspace that were allowed; None is no limit
    workspace_limit: int | None = None
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [str(self.problem), f"  on   {self.where}", f"  runs {self.chosen or 'nothing'}: {self.why}"]
        if self.config:
            prepared = f", prepared filters {self.prepared_bytes} bytes" if self.prepared_bytes else ""
            lines.append(f"  with {self.config}, workspace {self.workspace_bytes} bytes{prepared} ({self._limit()})")
        elif self.workspace_limit:
            lines.append(f"  with {self._limit()}")
        lines += [f"       {kernel}" for kernel in self.kernels]
        lines += [f"  not  {name}: {'; '.join(reasons)}" for name, reasons in self.others.items()]
        return "\n".join(lines)

    def _limit(self) -> str:
        return "no limit" if self.workspace_limit is None else f"workspace_limit {self.workspace_limit}"


@dataclass(frozen=True)
class AlgorithmInfo:
    """One line of `algorithms`."""

    name: str
    solves: str
    where: str
    tier: str
    paper: str

    def __str__(self) -> str:
        return f"{self.name:16} {self.solves:9} {self.where:4} {self.tier:8} {self.paper}"


def algorithms() -> list[AlgorithmInfo]:
    """Every algorithm in order of preference: its name, what it solves, where it runs, its precision tier, its paper.

    >>> print(*algorithms(), sep="\\n")  # doctest: +SKIP
    """
    places: tuple[tuple[str, Sequence[Algorithm]], ...] = (
        ("GPU", ALGORITHMS),
        ("CPU", CPU_ALGORITHMS),
    )
    return [
        AlgorithmInfo(a.name, "conv2d" if a.solves is ConvProblem else "filter2d", where, a.tier, a.paper)
        for where, candidates in places
        for a in candidates
    ]


def explain(first: Any, second: Any = None, /, *arguments: Any, **options: Any) -> Explanation:
    """Say what a call would run for these arguments, and why not the others. Runs nothing.

    Give the arguments of the call: a second array of 2 axes means `filter2d`, two arrays of 3 `conv1d`, the keyword
    ``input_shape=`` `conv2d_input`, and anything else `conv2d`. Or give a ConvProblem or FilterProblem with, if wanted,
    ``device="cuda"`` (the CPU is the default), ``algorithm=`` and ``workspace_limit=``. Registers and spills
    are told for what this process has compiled already, or with ``compile=True``.

    Raises ValueError and TypeError as the call itself would; that nothing fits is told, not raised.

    >>> print(explain(ConvProblem(1, 3, 8, 8, 4, 3, 3)))  # doctest: +SKIP
    """
    compile_now = bool(options.pop("compile", False))
    if isinstance(first, (ConvProblem, FilterProblem)):
        device, name = options.pop("device", None), options.pop("algorithm", "auto")
        limit = workspace_limit(options.pop("workspace_limit", None))
        if options or arguments or second is not None:
            raise TypeError("explain(problem) takes only device=, algorithm=, workspace_limit= and compile= besides it")
        check_problem(first)
        index = None if device is None or str(device) == "cpu" else device_index(device)
        return _on_gpu(first, index, name, limit, compile_now) if index is not None else _on_cpu(first, name, limit)
    axes = getattr(first, "ndim", None), getattr(second, "ndim", None)
    if axes[1] == 2:
        options.pop("value", None)
        options.pop("delta", None)
        described = describe.filter2d(first, second, *arguments, **options)
    elif "input_shape" in options:
        described = describe.conv2d_input(first, second, options.pop("input_shape"), *arguments, **options)
    else:
        described = (describe.conv1d if axes == (3, 3) else describe.conv2d)(first, second, *arguments, **options)
    if described.device is not None:
        return _on_gpu(
            described.problem, described.device, described.algorithm, described.workspace_limit, compile_now
        )  # fmt: skip
    if isinstance(described.arrays, TorchArrays) and isinstance(described.problem, ConvProblem):
        calls.check_torch_algorithm(described.algorithm)
        return Explanation(
            described.problem, "PyTorch on the CPU", calls.torch_function(described.problem),
            "PyTorch's CPU tensors are computed by PyTorch itself",
        )  # fmt: skip
    return _on_cpu(described.problem, described.algorithm, described.workspace_limit)


A = TypeVar("A", bound=Algorithm)


def _choose(problem: Problem, name: str, candidates: Sequence[A], limit: int | None) -> tuple[A | None, str]:
    try:
        chosen = registry.choose(problem, name, candidates, limit)
    except registry.NoAlgorithmError:
        return None, "nothing can run it" if name == "auto" else f"algorithm={name!r} cannot run it"
    if name != "auto":
        return chosen, "it was asked for"
    able = [a for a in candidates if isinstance(problem, a.solves) and not registry.reasons(a, problem, name, limit)]
    if len(able) == 1:
        return chosen, "it is the only one that can"
    if sum(a.cost(problem) == chosen.cost(problem) for a in able) > 1:
        return chosen, "it is the first, in order of preference, that can"
    return chosen, "it is expected to be the quickest of those that can"


def _others(
    problem: Problem, name: str, chosen: Algorithm | None, candidates: Sequence[Algorithm], limit: int | None
) -> dict[str, tuple[str, ...]]:
    found = {}
    for a in candidates:
        if a is chosen or not isinstance(problem, a.solves):
            continue
        reasons = tuple(registry.reasons(a, problem, name, limit))
        if not reasons:
            cost, best = a.cost(problem), chosen.cost(problem) if chosen else 0
            slower = f", and is expected to take {cost / best:.1f} times as long" if best and best < cost < inf else ""
            # filter2d takes no algorithm=
            how = f"; algorithm={a.name!r} chooses it" if isinstance(problem, ConvProblem) else ""
            reasons = (f"it could{slower}{how}",)
        found[a.name] = reasons
    return found


def _on_cpu(problem: Problem, name: str, limit: int | None) -> Explanation:
    chosen, why = _choose(problem, name, CPU_ALGORITHMS, limit)
    return Explanation(
        problem, "NumPy engine on the CPU", chosen.name if chosen else None, why,
        workspace_limit=registry.workspace_limit(name, limit),
        others=_others(problem, name, chosen, CPU_ALGORITHMS, limit),
    )  # fmt: skip


def _on_gpu(problem: Problem, index: int, name: str, limit: int | None, compile_now: bool) -> Explanation:
    chosen, why = _choose(problem, name, ALGORITHMS, limit)
    told: dict[str, Any] = {
        "workspace_limit": registry.workspace_limit(name, limit),
        "workspace_bytes": chosen.workspace_bytes(problem) if chosen else 0,
        "prepared_bytes": chosen.prepared_bytes(problem) if chosen else 0,
        "others": _others(problem, name, chosen, ALGORITHMS, limit),
    }
    try:
        device = launch.open_device(index)
    except CudaUnavailableError as error:
        where = f"cuda:{index}, which cannot be used: {error}"
        return Explanation(problem, where, chosen.name if chosen else None, why, **told)
    where = f"cuda:{index} ({device.name}, {device.target.arch})"
    if chosen is None:
        return Explanation(problem, where, None, why, **told)
    config = calls.choose_config(chosen, problem, device)
    plan = chosen.plan(problem, config, device.target)
    kernels: tuple[str, ...] = ()
    if compile_now or calls.is_ready(problem, index, name, limit):
        kernels = tuple(
            f"{each.symbol}: {code.registers} registers, {code.spill_bytes} bytes spilled, {each.grid} blocks of "
            f"{each.block} threads, {each.shared_bytes} bytes of shared memory"
            for each, code in zip(plan.every_launch, device.compiled(plan), strict=True)
        )
    return Explanation(problem, where, chosen.name, why, str(config), kernels, **told)
