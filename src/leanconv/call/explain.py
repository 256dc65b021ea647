"""What would run, why, and why not the others."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import inf

from leanconv import options
from leanconv.arrays.operands import together
from leanconv.call.bind import is_loaded
from leanconv.call.choose import (
    BY_NAME_ONLY,
    Candidate,
    counted_as_kept,
    for_kept_filters,
    from_table,
    pick,
    pick_kept,
    settle,
    survey,
    tuned,
    workspace_limit,
)
from leanconv.call.gpu_call import check_out
from leanconv.call.host_call import check_torch_algorithm, left_to_the_library, torch_function
from leanconv.call.resolve import Resolved, check_problem
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.kernels import ALGORITHMS
from leanconv.options import Kept
from leanconv.perf import tables
from leanconv.plan import Target
from leanconv.problem import Problem
from leanconv.runtime import cache, launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.volumes.images import computed

#: The GPU that `explain` assumes where none can be opened: an H200.
NOMINAL = Target("sm_90a", 132, 227 * 1024, 228 * 1024, model="NVIDIA H200")

#: How the reason of what computes another operation begins (`kernels.common.layers.limits`): it is no choice.
_OTHER_OPERATION = re.compile(r"op='\w+' is (?:not|neither) ")


@dataclass(frozen=True)
class Explanation:
    """The choice for one problem; ``print`` it, with the algorithms that compute the same operation.

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
    #: bytes of packed weights of each call; of filters that `prepare_weights` made, those that are kept
    prepared_bytes: int = 0
    #: bytes of workspace that were allowed; None is no limit
    workspace_limit: int | None = None
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: the source that was used: "your table" of tuned problems, "the shipped table", or "the cost model"
    source: str = tables.MODEL
    #: measured microseconds: of each algorithm the best, then of other libraries, the quickest first; empty where no
    #: table has the problem
    times: dict[str, float] = field(default_factory=dict)
    #: those of kernels that have changed since
    stale: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [str(self.problem), f"  on   {self.where}", f"  runs {self.chosen or 'nothing'}: {self.why}"]
        if self.config:
            prepared = f", packed weights {self.prepared_bytes} bytes" if self.prepared_bytes else ""
            lines.append(f"  with {self.config}, workspace {self.workspace_bytes} bytes{prepared} ({self._limit()})")
        elif self.workspace_limit:
            lines.append(f"  with {self._limit()}")
        lines += [f"       {kernel}" for kernel in self.kernels]
        for about, times in (("measured on such a GPU", self.times), ("stale, of kernels before today's", self.stale)):
            if times:
                lines.append(f"  {about}: " + ", ".join(f"{name} {us:.4g} µs" for name, us in times.items()))
        for name, reasons in self.others.items():
            if self.chosen is None or not _OTHER_OPERATION.match(reasons[0]):
                lines.append(f"  not  {name}: {'; '.join(reasons)}")
        return "\n".join(lines)

    def _limit(self) -> str:
        return "no limit" if self.workspace_limit is None else f"workspace_limit {self.workspace_limit}"


@dataclass(frozen=True)
class AlgorithmInfo:
    """One line of `list_algorithms`."""

    name: str
    solves: str
    where: str
    precision: str
    paper: str
    #: the folder of its files; that of the CPU is ``cpu``
    family: str

    def __str__(self) -> str:
        return f"{self.name:20} {self.family:13} {self.solves:9} {self.where:4} {self.precision:8} {self.paper}"


def list_algorithms() -> list[AlgorithmInfo]:
    r"""Every algorithm in order of preference: name, what it solves, where it runs, precision level, paper, family.

    >>> print(*list_algorithms(), sep="\n")  # doctest: +SKIP
    """
    listed: dict[tuple[str, str], AlgorithmInfo] = {}
    for where, algorithms in (("GPU", ALGORITHMS), ("CPU", CPU_ALGORITHMS)):
        for a in algorithms:
            listed.setdefault((where, a.name), AlgorithmInfo(a.name, a.solves, where, a.precision, a.paper, a.family))
    return list(listed.values())


def explain_problem(
    problem: Problem, device: object = None, algorithm: str = "auto", limit: object = None, *, compile_now: bool = False
) -> Explanation:
    """What would run for a problem that a caller has written; on the CPU unless ``device`` names a GPU."""
    check_problem(problem)
    problem = computed(problem)
    limit = options.limit_of(limit)
    if device is None or str(device) == "cpu":
        return _on_cpu(problem, algorithm, limit)
    return _on_gpu(problem, options.device_index(device), algorithm, limit, compile_now)


def explain_call(resolved: Resolved, *, compile_now: bool = False) -> Explanation:
    """What would run for a call. Raises ValueError where its ``out`` cannot be written, or overlaps what it reads."""
    problem, name, limit = resolved.problem, resolved.algorithm, resolved.workspace_limit
    operands = resolved.operands
    if operands.out is not None:
        beside = together(operands.bias, operands.scale, operands.add)
        check_out(operands.arrays, operands.names, operands.x, operands.w, beside, operands.out)
    if resolved.device is not None:
        return _on_gpu(problem, resolved.device, name, limit, compile_now, resolved.kept)
    if left_to_the_library(resolved):
        assert problem.kind == "conv2d"
        check_torch_algorithm(name)
        why = "PyTorch's CPU tensors are computed by PyTorch itself"
        return Explanation(problem, "PyTorch on the CPU", torch_function(problem), why)
    return _on_cpu(problem, name, limit)


def _why(candidates: tuple[Candidate, ...], chosen: Candidate | None, name: str) -> str:
    if chosen is None:
        return "nothing can run it" if name == "auto" else f"algorithm={name!r} cannot run it"
    if chosen.us is not None:
        measured = "it was the quickest that was timed" if name == "auto" else "it was requested, and timed"
        return f"{measured}, with {chosen.us:.4g} µs, says {chosen.source}"
    if name != "auto":
        return "it was requested"
    costs = [candidate.cost for candidate in candidates if not candidate.reasons]
    if len(costs) == 1:
        return "it is the only one that can"
    if costs.count(chosen.cost) > 1:
        return "it is the first, in order of preference, that can"
    return "it is expected to be the quickest of those that can"


def _others(
    candidates: tuple[Candidate, ...], chosen: Candidate | None, problem: Problem, measured: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    by_name: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_name.setdefault(candidate.algorithm.name, []).append(candidate)
    if chosen is not None:
        del by_name[chosen.algorithm.name]
    return {name: _why_not(strategies, chosen, problem, measured) for name, strategies in by_name.items()}


def _why_not(
    strategies: list[Candidate], chosen: Candidate | None, problem: Problem, measured: Collection[str]
) -> tuple[str, ...]:
    """Why not one algorithm; of the strategies that are ``measured`` a table has a time."""
    name = strategies[0].algorithm.name
    # filter2d takes no algorithm=
    how = f"; algorithm={name!r} chooses it" if problem.kind == "conv2d" else ""
    able = [candidate.cost for candidate in strategies if not candidate.reasons]
    if not able:
        by_reason: dict[str, list[str]] = {}
        for candidate in strategies:
            for reason in candidate.reasons:
                by_reason.setdefault(reason, []).append(candidate.algorithm.stem)
        # what holds for some strategies alone names them
        reasons = tuple(
            reason if len(stems) == len(strategies) else f"{reason} ({', '.join(stems)})"
            for reason, stems in by_reason.items()
        )
        return (reasons[0] + how,) if reasons == (BY_NAME_ONLY,) else reasons
    best = 0.0 if chosen is None else chosen.cost
    stems = [candidate.algorithm.stem for candidate in strategies if not candidate.reasons]
    known = chosen is not None and (best < inf or chosen.us is not None)
    if known and min(able) == inf and not any(stem in measured for stem in stems):
        why = f"the time of {' and '.join(stems)} is neither predicted nor measured, so 'auto' does not take it"
        return (f"it could, but {why}{how}",)
    longer = best and best < min(able) < inf and (chosen is None or chosen.us is None)
    times = min(able) / best if longer else 1.0
    about = "about as long" if times < 1.05 else f"{times:.1f} times as long"
    slower = f", and is expected to take {about}" if longer else ""
    return (f"it could{slower}{how}",)


def _on_cpu(problem: Problem, name: str, limit: int | None) -> Explanation:
    candidates = survey(problem, None, name, limit)
    chosen = pick(candidates, name)
    return Explanation(
        problem, "NumPy engine on the CPU", chosen.algorithm.name if chosen else None, _why(candidates, chosen, name),
        workspace_limit=workspace_limit(problem, name, limit), others=_others(candidates, chosen, problem),
    )  # fmt: skip


def _on_gpu(
    problem: Problem, index: int, name: str, limit: int | None, compile_now: bool, kept: Kept = ""
) -> Explanation:
    try:
        device = launch.open_device(index)
        target, where = device.target, f"cuda:{index} ({device.name}, {device.target.arch})"
    except CudaUnavailableError as error:
        device, target = None, NOMINAL
        where = f"an H200 (assumed, since cuda:{index} cannot be used here: {error})"
    candidates = survey(problem, target, name, limit)
    kept = counted_as_kept(kept, problem, limit)
    picked = pick_kept(candidates, name, problem, target) if kept == "quickest" else pick(candidates, name)
    chosen = tuned(problem, target, name, limit) or picked
    if kept and chosen is not None:
        chosen = for_kept_filters(chosen, problem, target)
    settled = None if chosen is None else settle(chosen, problem, target, name, limit)
    why = _why(candidates, chosen, name) + ", over all batches" * (problem.batch_invariant and name == "auto")
    times, stale = _times(problem, target)
    others = _others(candidates, chosen, problem, times.keys() | stale.keys())
    explanation = Explanation(
        problem, where, chosen.algorithm.name if chosen else None, why, str(settled.config) if settled else "",
        workspace_bytes=settled.algorithm.workspace_bytes(problem, settled.config) if settled else 0,
        prepared_bytes=settled.algorithm.prepared_bytes(problem, settled.config) if settled else 0,
        workspace_limit=workspace_limit(problem, name, limit), others=others,
        source=chosen.source if chosen else tables.MODEL, times=times, stale=stale,
    )  # fmt: skip
    if settled is None or (device is None and not compile_now):
        return explanation
    kernels: tuple[str, ...] = ()
    if compile_now or is_loaded(problem, index, name, limit):
        plan = settled.plan(problem, target)
        # without a GPU for the assumed one
        codes = device.compiled(plan) if device else [cache.compiled(each, target.arch) for each in plan.every_launch]
        kernels = tuple(
            f"{each.symbol}: {code.registers} registers, {code.spill_bytes} bytes spilled, {each.grid} blocks of "
            f"{each.block} threads, {each.shared_bytes} bytes of shared memory"
            for each, code in zip(plan.every_launch, codes, strict=True)
        )
    return replace(explanation, kernels=kernels)


def _times(problem: Problem, target: Target) -> tuple[dict[str, float], dict[str, float]]:
    """What tables know: of each algorithm the least time, those of other libraries too; then, of algorithms without
    such a time, that of kernels that have changed since. The user's table wins."""
    found: dict[str, float] = {}
    stale: dict[str, float] = {}
    for source, entry in tables.known(problem, target):
        times: dict[str, float] = dict(entry.peers)
        for each in entry.timed:
            if each.us is not None:
                live = from_table(each, problem, target, each.algorithm, None, source) is not None
                here = times if live else stale
                here[each.algorithm] = min(each.us, here.get(each.algorithm, inf))
        found = times | found
    found, stale = (dict(sorted(each.items(), key=lambda pair: pair[1])) for each in (found, stale))
    return found, {name: us for name, us in stale.items() if name not in found}
