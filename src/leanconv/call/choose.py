"""The choice: which algorithm computes a problem on a GPU, or on the CPU, and with which configuration.

One pass: who can run the problem, what a table of tuned problems knows, what the cost model predicts, the least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from leanconv.call import batches
from leanconv.cpu import CPU_ALGORITHMS
from leanconv.kernels import ALGORITHMS, cost
from leanconv.kernels.common.bias_gradient import with_bias, without_bias
from leanconv.kernels.contract import Algorithm, Config, CpuAlgorithm, GpuAlgorithm
from leanconv.options import Kept
from leanconv.perf import tables
from leanconv.perf.tables import MODEL, SHIPPED_TABLE, Timed
from leanconv.plan import Plan, Target
from leanconv.problem import Problem
from leanconv.runtime.errors import LeanconvError, warn_once

#: Why ``auto`` passes by an algorithm that could run.
BY_NAME_ONLY = "it runs by name only: others beat it"


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
    #: the source of the choice: a table of tuned problems, or the cost model
    source: str = MODEL
    #: measured microseconds, where a table has them
    us: float | None = None

    def plan(self, problem: Problem, target: Target) -> Plan:
        assert isinstance(self.algorithm, GpuAlgorithm) and self.config is not None
        if problem.kind == "conv2d" and problem.op == "wgrad" and problem.bias:
            plan = self.algorithm.plan(without_bias(problem), self.config, target)
            return with_bias(plan, problem, target)
        return self.algorithm.plan(problem, self.config, target)


def choose(
    problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None, kept: Kept = ""
) -> Candidate:
    """The algorithm that a table of tuned problems names for ``target``, or the one with the lowest predicted time, the
    first among equals; of the one called ``name`` the configuration.

    ``target`` is the GPU, or None for the CPU. The choice takes no more memory than ``limit`` bytes; see `room`.
    The user's table comes first, then a bundle's, the shipped one, and the cost model. Nothing is timed. Where filters
    stay packed (``kept``), what packs them does not count, unless a limit or ``batch_invariant`` is given.

    Raises ValueError for an unknown name, NoAlgorithmError where nothing fits or the named one does not.
    """
    kept = counted_as_kept(kept, problem, limit)
    chosen = tuned(problem, target, name, limit) or by_model(problem, target, name, limit, kept)
    return for_kept_filters(chosen, problem, target) if kept and target is not None else chosen


def counted_as_kept(kept: Kept, problem: Problem, limit: int | None) -> Kept:
    """How a choice counts that filters stay packed: not where a limit counts them, or with ``batch_invariant``."""
    return kept if limit is None and problem.kind == "conv2d" and not problem.batch_invariant else ""


def for_kept_filters(chosen: Candidate, problem: Problem, target: Target) -> Candidate:
    """What was chosen with the configuration for filters that stay packed."""
    assert isinstance(chosen.algorithm, GpuAlgorithm)
    config = chosen.algorithm.for_kept_filters(chosen.config)
    if config == chosen.config:
        return chosen
    times = predicted(chosen.algorithm, problem, target)
    cycles = next((time for time, each in times if each == config), chosen.cost)
    return replace(chosen, config=config, cost=cycles, source=MODEL, us=None)  # that one's time is of other kernels


# Who can


def algorithms_of(target: Target | None) -> Sequence[Algorithm]:
    """The algorithms of a GPU, or of the CPU where ``target`` is None, in order of preference."""
    return CPU_ALGORITHMS if target is None else ALGORITHMS


def workspace_limit(problem: Problem, name: str, given: int | None) -> int | None:
    """The limit that applies to a choice: the given one, else 0 for ``auto`` of a layer, and None, no limit, for a name
    and for an image filter."""
    return 0 if given is None and name == "auto" and problem.kind == "conv2d" else given


def room(algorithm: Algorithm, problem: Problem, name: str, limit: int | None) -> float:
    """Bytes that a configuration may take, as it counts them. A limit that a caller gives counts packed weights too."""
    if limit is None:
        return inf if workspace_limit(problem, name, limit) is None else algorithm.optional_bytes(problem)
    return limit - algorithm.prepared_bytes(problem)


def survey(problem: Problem, target: Target | None, name: str, limit: int | None) -> tuple[Candidate, ...]:
    """Every algorithm for this kind of problem, each with what it can do for the choice of ``name``.

    Raises ValueError for an unknown name.
    """
    return tuple(consider(algorithm, problem, target, name, limit) for algorithm in _relevant(problem, target, name))


def consider(
    algorithm: Algorithm, problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None
) -> Candidate:
    """What ``algorithm`` can do for the choice of ``name`` under a limit in bytes, or why it can do nothing."""
    able = _able(algorithm, problem, target, name, limit)
    return able or Candidate(algorithm, _why_not(algorithm, problem, target, name, limit))


def _relevant(problem: Problem, target: Target | None, name: str) -> list[Algorithm]:
    def called(algorithms: Sequence[Algorithm]) -> list[str]:
        known = ((a.name, a.stem) for a in algorithms if a.solves == problem.kind)
        return list(dict.fromkeys(word for words in known for word in words))

    relevant = [algorithm for algorithm in algorithms_of(target) if algorithm.solves == problem.kind]
    is_word = isinstance(name, str)  # an array is compared element by element
    if not is_word or (name != "auto" and not any(algorithm.is_called(name) for algorithm in relevant)):
        names = called(relevant)
        here, there = ("the CPU", "GPUs") if target is None else ("a GPU", "the CPU")
        if is_word and name in called(ALGORITHMS if target is None else CPU_ALGORITHMS):
            wrong = f"runs on {there}, and this call on {here}"
        else:
            from difflib import get_close_matches  # for a message alone

            close = get_close_matches(str(name), names, n=1)
            wrong = "is not known here" + (f" (did you mean {close[0]!r}?)" if close else "")
        raise ValueError(f"algorithm={name!r} {wrong}; choose 'auto' or one of {', '.join(map(repr, names))}")
    return relevant


def _problems_of(problem: Problem, target: Target | None) -> list[Problem]:
    """The problems that an algorithm must be able to run: with ``batch_invariant`` those of all batches."""
    if problem.kind != "conv2d" or not problem.batch_invariant or problem.is_empty:
        return [problem]
    if target is None:  # the CPU computes image by image
        return [replace(problem, n=1, batch_invariant=False)]
    return [replace(problem, n=n) for n in batches.BATCHES]


def _able(
    algorithm: Algorithm, problem: Problem, target: Target | None, name: str, limit: int | None
) -> Candidate | None:
    """The algorithm with its best configuration and the time that is predicted; None where it cannot run.

    For a problem that is ``batch_invariant`` the configuration is left to `settle`.
    """
    problems = _problems_of(problem, target)
    if (algorithm.by_name_only and name == "auto") or any(algorithm.reasons(each, target) for each in problems):
        return None
    if target is None:
        assert isinstance(algorithm, CpuAlgorithm)
        return Candidate(algorithm, (), cost=algorithm.cost(problems[0]))
    assert isinstance(algorithm, GpuAlgorithm)
    if len(problems) > 1:
        order = _order(algorithm, problem, target, name, limit)
        if order is None:
            return None
        return Candidate(algorithm, (), cost=cost.fitted(algorithm, problem, target).cycles(order[0]))
    quickest = algorithm.quickest(problem, target, room(algorithm, problem, name, limit))
    if quickest is None:
        return None
    time, config = quickest
    return Candidate(algorithm, (), config, cost.fitted(algorithm, problem, target).cycles(time) if time < inf else inf)


def _why_not(
    algorithm: Algorithm, problem: Problem, target: Target | None, name: str, limit: int | None
) -> tuple[str, ...]:
    """The reasons of an algorithm that is not `_able`."""
    problems = _problems_of(problem, target)
    for each in problems:
        reasons = algorithm.reasons(each, target)
        if not reasons and algorithm.by_name_only and name == "auto":
            reasons = [BY_NAME_ONLY]
        if not reasons and isinstance(algorithm, GpuAlgorithm) and target is not None:
            reasons = _why_none_fits(algorithm, each, target, name, limit)
        if reasons:
            return tuple(reasons if each is problems[0] else (f"in a batch of {each.images} {why}" for why in reasons))
    return ("no order of its sums serves all batches",)


def _why_none_fits(
    algorithm: GpuAlgorithm, problem: Problem, target: Target, name: str, limit: int | None
) -> list[str]:
    """Of an algorithm that can run a problem, why no configuration is left; empty where one is."""
    space = room(algorithm, problem, name, limit)
    if algorithm.within(problem, target, space):
        return []
    needed, space = None, inf
    # configurations may depend on what there is: with less room others may take less
    while needed != 0 and (found := algorithm.within(problem, target, space)):
        needed = min(algorithm.counted_bytes(problem, config) for _, config in found)
        space = needed - 1
    if needed is None:
        return [
            f"none of its configurations fits the {target.shared_per_block} bytes of shared memory that a block has on "
            f"{target.arch}"
        ]
    prepared = algorithm.prepared_bytes(problem) if limit is not None else 0
    filters = f" and {prepared} of packed weights" if prepared else ""
    return [
        f"it needs {needed} bytes of workspace{filters}, and workspace_limit is {workspace_limit(problem, name, limit)}"
    ]


# What a table knows


def tuned(problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None) -> Candidate | None:
    """What the tables of tuned problems have for this choice, as long as it runs the kernels that were timed."""
    if target is not None and target.model and isinstance(name, str):
        called = None if name == "auto" else {a.stem for a in ALGORITHMS if a.is_called(name)}
        for source, entry in tables.known(problem, target):
            timed = entry.winner(limit, called)
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
    for algorithm in ALGORITHMS:
        if algorithm.stem == timed.algorithm and not algorithm.reasons(problem, target):
            found = predicted(algorithm, problem, target, room(algorithm, problem, name, limit))
            for time, config in found:
                if dict(config.constants()) == timed.config:
                    return Candidate(algorithm, (), config, time)
            unknown = sorted(timed.config.keys() - vars(found[0][1]).keys()) if found else []
            if unknown:
                text = f"a table of tuned problems has {', '.join(unknown)} in a configuration of {timed.algorithm}"
                text += ", which this version does not know: such entries are misses until `leanconv tune --refresh`"
                warn_once(f"{unknown} of {timed.algorithm}", text)
    return None


# What the cost model says, and the least


def by_model(
    problem: Problem, target: Target | None, name: str = "auto", limit: int | None = None, kept: Kept = ""
) -> Candidate:
    """What `choose` chooses without any table."""
    packed_once = kept == "quickest"
    relevant = [a for a in _relevant(problem, target, name) if a.is_called(name)]
    able: list[Candidate] = []
    quickest = inf
    # Tensor cores first: where they serve a layer, most others cannot be as fast, and are skipped.
    for algorithm in sorted(relevant, key=lambda algorithm: algorithm.arithmetic(problem) == "fp32"):
        if target is not None and name == "auto" and able and not packed_once:
            fitted = cost.fitted(algorithm, problem, target, runs=False)
            if fitted.cycles(batches.least_cycles(algorithm, problem, target)) > quickest > 0:
                continue
        candidate = _able(algorithm, problem, target, name, limit)
        if candidate is not None:
            able.append(candidate)
            quickest = min(quickest, candidate.cost)
    able.sort(key=lambda candidate: relevant.index(candidate.algorithm))
    chosen = pick_kept(able, name, problem, target) if packed_once and target is not None else pick(able, name)
    if chosen is not None:
        return settle(chosen, problem, target, name, limit)
    lines = [f"  {each.stem}: {'; '.join(_why_not(each, problem, target, name, limit))}" for each in relevant]
    raise NoAlgorithmError("\n".join([f"no algorithm can run {problem}:", *lines]))


def predicted(
    algorithm: GpuAlgorithm, problem: Problem, target: Target, workspace: float = inf
) -> list[tuple[float, Config]]:
    """The configurations of an algorithm that can run ``problem`` in so much workspace, the quickest first, with the
    clock cycles that are expected on this GPU."""
    found = algorithm.within(problem, target, workspace)
    fitted = cost.fitted(algorithm, problem, target) if found else cost.Fitted()
    return [(time if time == inf else fitted.cycles(time), config) for time, config in found]


def pick(candidates: Sequence[Candidate], name: str) -> Candidate | None:
    """The one with the lowest predicted time that can, the first among equals, or the one called ``name``."""
    able = [c for c in candidates if not c.reasons and c.algorithm.is_called(name)]
    return min(able, key=lambda candidate: candidate.cost, default=None)


def pick_kept(candidates: Sequence[Candidate], name: str, problem: Problem, target: Target) -> Candidate | None:
    """The same where filters stay packed, each with its configuration for that, and without what packs them."""
    able = [for_kept_filters(c, problem, target) for c in candidates if not c.reasons and c.algorithm.is_called(name)]
    times = [each.cost - cost.kept_cycles(each.algorithm, problem, each.config, target) for each in able]
    return able[times.index(min(times))] if able else None


def settle(candidate: Candidate, problem: Problem, target: Target | None, name: str, limit: int | None) -> Candidate:
    """What was picked, with its configuration: one that ``batch_invariant`` allows is found for it alone.

    Raises NoAlgorithmError where this batch is too large for what was picked for all of them.
    """
    if target is None or candidate.config is not None:
        return candidate
    algorithm = candidate.algorithm
    assert problem.kind == "conv2d" and isinstance(algorithm, GpuAlgorithm)
    reasons = algorithm.reasons(problem, target)
    order = None if reasons else _order(algorithm, problem, target, name, limit)
    if order is not None:
        config = batches.config(algorithm, problem, target, order[1], room(algorithm, problem, name, limit))
        if config is not None:
            return replace(candidate, config=config)
        reasons = _why_none_fits(algorithm, problem, target, name, limit)
    why = "; ".join(reasons) or "none of its configurations takes the sums in the order of the other batches"
    raise NoAlgorithmError(
        f"batch_invariant=True: {algorithm.name} was chosen for every batch, and cannot run {problem}: {why}. Give it "
        "fewer images at a time"
    )


def _order(
    algorithm: GpuAlgorithm, problem: Problem, target: Target, name: str, limit: int | None
) -> tuple[float, batches.Order] | None:
    assert problem.kind == "conv2d"
    return batches.order(algorithm, problem, target, lambda other: room(algorithm, other, name, limit))
