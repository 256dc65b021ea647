"""The choice: which algorithm computes a problem on a GPU, or on the CPU, and with which configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from leanconv.algorithms import ALGORITHMS, batches
from leanconv.algorithms.base import Algorithm, Config, GpuAlgorithm, TimedAlgorithm
from leanconv.algorithms.bias_gradient import with_bias, without_bias
from leanconv.perf import fits, tables
from leanconv.perf.tables import MODEL, SHIPPED_TABLE, Timed
from leanconv.plan import Plan, Target
from leanconv.problem import Problem
from leanconv.reference import CPU_ALGORITHMS
from leanconv.runtime.errors import LeanconvError


class NoAlgorithmError(LeanconvError, ValueError):
    """Nothing fits the problem; the message gives each algorithm's reasons."""


@dataclass(frozen=True)
class Candidate:
    """One algorithm for one problem: the reasons why it cannot run it; or its best configuration and predicted time.

    ``cost`` is in clock cycles on a GPU, infinite where the algorithm predicts nothing; for a problem that is
    ``batch_invariant`` it is the mean over several batches. On the CPU there is no configuration.
    """

    algorithm: Algorithm
    reasons: tuple[str, ...]
    config: Config | None = None
    cost: float = inf
    #: what spoke for it: a table of tuned problems, or the cost model
    source: str = MODEL
    #: measured microseconds, where a table has them
    us: float | None = None

    def plan(self, problem: Problem, target: Target) -> Plan:
        """The launches of the best configuration."""
        assert isinstance(self.algorithm, GpuAlgorithm) and self.config is not None
        if problem.kind == "conv2d" and problem.op == "wgrad" and problem.bias:
            plan = self.algorithm.plan(without_bias(problem), self.config, target)
            return with_bias(plan, problem, target)
        return self.algorithm.plan(problem, self.config, target)


def algorithms_of(target: Target | None) -> Sequence[Algorithm]:
    """The algorithms of a GPU, or of the CPU where ``target`` is None, in order of preference."""
    return CPU_ALGORITHMS if target is None else ALGORITHMS


def workspace_limit(name: str, given: int | None) -> int | None:
    """The limit that applies to a choice: the given one, else 0 for ``auto`` and None, no limit, for a name."""
    return 0 if given is None and name == "auto" else given


def consider(
    algorithm: Algorithm, problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None
) -> Candidate:
    """What ``algorithm`` can do for the choice of ``name`` under a limit in bytes.

    A limit that the caller gives counts prepared filters too; the 0 of ``auto`` counts the workspace alone.
    """
    bound = workspace_limit(name, limit)
    if problem.batch_invariant and not problem.is_empty:
        return _in_every_batch(algorithm, problem, target, bound, limit is not None)
    reasons = algorithm.reasons(problem, target, bound, count_prepared=limit is not None)
    best = None if reasons else algorithm.best(problem, target)
    if best is not None:
        return Candidate(algorithm, (), config=best[1], cost=_fitted(algorithm, problem, target).cycles(best[0]))
    if not reasons and target is not None:
        room = f"{target.shared_per_block} bytes of shared memory that a block has on {target.arch}"
        reasons = [f"none of its configurations fits the {room}"]
    return Candidate(algorithm, tuple(reasons))


def _in_every_batch(
    algorithm: Algorithm, problem: Problem, target: Target | None, bound: int | None, count_prepared: bool
) -> Candidate:
    """`consider` for a problem that is ``batch_invariant``, whatever its batch; `settle` gives it a configuration."""
    assert problem.kind == "conv2d"
    if target is None:  # the CPU computes image by image
        return consider(algorithm, replace(problem, n=1, batch_invariant=False), None)
    assert isinstance(algorithm, GpuAlgorithm)
    reasons = batches.reasons(algorithm, problem, target, bound, count_prepared)
    cost = None if reasons else batches.mean_cycles(algorithm, problem, target)
    if cost is None:
        return Candidate(algorithm, tuple(reasons or ["no order of its sums serves all batches"]))
    return Candidate(algorithm, (), cost=_fitted(algorithm, problem, target).cycles(cost))


def settle(candidate: Candidate, problem: Problem, target: Target | None, name: str, limit: int | None) -> Candidate:
    """What was picked, with its configuration: one that ``batch_invariant`` allows is found for it alone.

    Raises NoAlgorithmError where this batch is too large for what was picked for all of them.
    """
    if target is None or candidate.config is not None:
        return candidate
    assert problem.kind == "conv2d" and isinstance(candidate.algorithm, GpuAlgorithm)
    bound = workspace_limit(name, limit)
    reasons = candidate.algorithm.reasons(problem, target, bound, count_prepared=limit is not None)
    config = None if reasons else batches.config(candidate.algorithm, problem, target)
    if config is None:
        why = "; ".join(reasons) or "none of its configurations takes the sums in the order of the other batches"
        raise NoAlgorithmError(
            f"batch_invariant=True: {candidate.algorithm.name} was chosen for every batch, and cannot run {problem}: "
            f"{why}. Give it fewer images at a time"
        )
    return replace(candidate, config=config)


def predicted(algorithm: Algorithm, problem: Problem, target: Target) -> Iterator[tuple[float, Config]]:
    """The valid configurations of an algorithm that can run ``problem``, with their predicted times in clock cycles."""
    assert isinstance(algorithm, GpuAlgorithm)
    if isinstance(algorithm, TimedAlgorithm):
        fitted = _fitted(algorithm, problem, target)
        yield from ((fitted.cycles(cost), config) for cost, config in algorithm.timed(problem, target))
    else:
        yield from ((inf, config) for config in algorithm.configs(problem, target))


def _fitted(algorithm: Algorithm, problem: Problem, target: Target | None, *, runs: bool = True) -> fits.Fitted:
    """What makes of an algorithm's prediction what has been measured on this GPU."""
    return fits.Fitted() if target is None else fits.fitted(algorithm, problem, target, runs=runs)


def tuned(problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None) -> Candidate | None:
    """What the tables of tuned problems have for this choice, as long as it runs the kernels that were timed."""
    if target is not None and target.model:
        for source, entry in tables.known(problem, target):
            timed = entry.winner(name, limit)
            chosen = None if timed is None else from_table(timed, problem, target, name, limit, source)
            if chosen is not None:
                return chosen
    return None


def from_table(
    timed: Timed, problem: Problem, target: Target, name: str, limit: int | None, source: str
) -> Candidate | None:
    """A timed candidate as one of today's; None where it is none any more: other kernels, limits or configurations.

    The shipped table is checked by machine code before a release (`leanconv tune --verify`), and not here.
    """
    candidate = untimed(timed, problem, target, name, limit)
    if candidate is None or (source != SHIPPED_TABLE and tables.changed(timed, candidate.plan(problem, target))):
        return None
    return replace(candidate, source=source, us=timed.us)


def untimed(timed: Timed, problem: Problem, target: Target, name: str, limit: int | None) -> Candidate | None:
    """What a timed candidate is today, whether or not its kernels are those that were timed."""
    algorithm = next((a for a in ALGORITHMS if a.name == timed.algorithm and a.solves == problem.kind), None)
    if algorithm is None or algorithm.reasons(
        problem, target, workspace_limit(name, limit), count_prepared=limit is not None
    ):
        return None
    for cost, config in predicted(algorithm, problem, target):
        if dict(config.constants()) == timed.config:
            return Candidate(algorithm, (), config, cost)
    return None


def survey(problem: Problem, target: Target | None, name: str, limit: int | None) -> tuple[Candidate, ...]:
    """Every algorithm for this kind of problem, each with what it can do for the choice of ``name``.

    Raises ValueError for an unknown name.
    """
    return tuple(consider(algorithm, problem, target, name, limit) for algorithm in _relevant(problem, target, name))


def pick(candidates: Sequence[Candidate], name: str) -> Candidate | None:
    """The one with the lowest predicted time that can, the first among equals, or the one called ``name``."""
    able = [c for c in candidates if not c.reasons and name in ("auto", c.algorithm.name)]
    return min(able, key=lambda candidate: candidate.cost, default=None)


def choose(problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None) -> Candidate:
    """The algorithm that a table of tuned problems names for ``target``, or the one with the lowest predicted time, the
    first among equals; of the one called ``name`` the configuration.

    ``target`` is the GPU, or None for the CPU. The choice takes no more memory than ``limit`` bytes; see `consider`.
    The user's table is asked first, then the shipped one, then the cost model. Nothing is timed.

    Raises ValueError for an unknown name, NoAlgorithmError where nothing fits or the named one does not.
    """
    return tuned(problem, target, name, limit) or by_model(problem, target, name, limit)


def by_model(problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None) -> Candidate:
    """What `choose` chooses without any table."""
    relevant = [a for a in _relevant(problem, target, name) if name in ("auto", a.name)]
    candidates = []
    quickest = inf
    # Tensor cores first: where they serve a layer, most others cannot be as fast, and need not be asked.
    for algorithm in sorted(relevant, key=lambda algorithm: algorithm.arithmetic(problem) == "fp32"):
        if target is not None and name == "auto":
            least = batches.least_cycles if problem.batch_invariant else type(algorithm).least_cycles
            fitted = _fitted(algorithm, problem, target, runs=False)
            if fitted.cycles(least(algorithm, problem, target)) > quickest > 0:
                continue
        candidates.append(consider(algorithm, problem, target, name, limit))
        quickest = min(quickest, candidates[-1].cost)
    candidates.sort(key=lambda candidate: relevant.index(candidate.algorithm))
    chosen = pick(candidates, name)
    if chosen is not None:
        return settle(chosen, problem, target, name, limit)
    lines = [f"  {candidate.algorithm.name}: {'; '.join(candidate.reasons)}" for candidate in candidates]
    raise NoAlgorithmError("\n".join([f"no algorithm can run {problem}:", *lines]))


def _relevant(problem: Problem, target: Target | None, name: str) -> list[Algorithm]:
    relevant = [algorithm for algorithm in algorithms_of(target) if algorithm.solves == problem.kind]
    if name != "auto" and name not in (algorithm.name for algorithm in relevant):
        names = [algorithm.name for algorithm in relevant]
        other: Sequence[Algorithm] = ALGORITHMS if target is None else CPU_ALGORITHMS
        here, there = ("the CPU", "GPUs") if target is None else ("a GPU", "the CPU")
        if name in (algorithm.name for algorithm in other if algorithm.solves == problem.kind):
            wrong = f"runs on {there}, and this call on {here}"
        else:
            from difflib import get_close_matches  # for a message alone

            close = get_close_matches(str(name), names, n=1)
            wrong = "is not known here" + (f" (did you mean {close[0]!r}?)" if close else "")
        raise ValueError(f"algorithm={name!r} {wrong}; choose 'auto' or one of {', '.join(map(repr, names))}")
    return relevant
