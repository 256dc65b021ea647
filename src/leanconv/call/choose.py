"""The choice: which algorithm computes a problem on a GPU, or on the CPU, and with which configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Algorithm, Config, GpuAlgorithm, TimedAlgorithm
from leanconv.algorithms.bias_gradient import with_bias, without_bias
from leanconv.plan import Plan, Target
from leanconv.problem import Problem
from leanconv.reference import CPU_ALGORITHMS
from leanconv.tuning import fits, tables
from leanconv.tuning.tables import MODEL, Timed


class NoAlgorithmError(ValueError):
    """Nothing fits the problem; the message gives each algorithm's reasons."""


@dataclass(frozen=True)
class Candidate:
    """One algorithm for one problem: the reasons why it cannot run it; or its best configuration and predicted time.

    ``cost`` is in clock cycles on a GPU, infinite where the algorithm predicts nothing. On the CPU there is no
    configuration.
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
    reasons = algorithm.reasons(problem, target, bound, count_prepared=limit is not None)
    best = None if reasons else algorithm.best(problem, target)
    if best is not None:
        return Candidate(algorithm, (), config=best[1], cost=best[0] * _factor(algorithm, problem, target))
    if not reasons and target is not None:
        room = f"{target.shared_per_block} bytes of shared memory that a block has on {target.arch}"
        reasons = [f"none of its configurations fits the {room}"]
    return Candidate(algorithm, tuple(reasons))


def predicted(algorithm: Algorithm, problem: Problem, target: Target) -> Iterator[tuple[float, Config]]:
    """The valid configurations of an algorithm that can run ``problem``, with their predicted times in clock cycles."""
    assert isinstance(algorithm, GpuAlgorithm)
    if isinstance(algorithm, TimedAlgorithm):
        factor = _factor(algorithm, problem, target)
        yield from ((cost * factor, config) for cost, config in algorithm.timed(problem, target))
    else:
        yield from ((inf, config) for config in algorithm.configs(problem, target))


def _factor(algorithm: Algorithm, problem: Problem, target: Target | None) -> float:
    return 1.0 if target is None else fits.factor(algorithm.name, problem, target)


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
    """A timed candidate as one of today's; None where it is none any more: other kernels, limits or configurations."""
    algorithm = next((a for a in ALGORITHMS if a.name == timed.algorithm and a.solves == problem.kind), None)
    if algorithm is None or algorithm.reasons(
        problem, target, workspace_limit(name, limit), count_prepared=limit is not None
    ):
        return None
    for cost, config in predicted(algorithm, problem, target):
        if dict(config.constants()) == timed.config:
            candidate = Candidate(algorithm, (), config, cost, source, timed.us)
            same = tables.kernels_of(candidate.plan(problem, target)) == timed.kernels
            return candidate if same else None
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
            least = algorithm.least_cycles(problem, target) * _factor(algorithm, problem, target)
            if least > quickest > 0:
                continue
        candidates.append(consider(algorithm, problem, target, name, limit))
        quickest = min(quickest, candidates[-1].cost)
    candidates.sort(key=lambda candidate: relevant.index(candidate.algorithm))
    chosen = pick(candidates, name)
    if chosen is not None:
        return chosen
    lines = [f"  {candidate.algorithm.name}: {'; '.join(candidate.reasons)}" for candidate in candidates]
    raise NoAlgorithmError("\n".join([f"no algorithm can run {problem}:", *lines]))


def _relevant(problem: Problem, target: Target | None, name: str) -> list[Algorithm]:
    relevant = [algorithm for algorithm in algorithms_of(target) if algorithm.solves == problem.kind]
    if name != "auto" and name not in (algorithm.name for algorithm in relevant):
        names = ", ".join(repr(algorithm.name) for algorithm in relevant)
        raise ValueError(f"algorithm={name!r} is not known here; choose 'auto' or one of {names}")
    return relevant
