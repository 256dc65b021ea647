"""What is worth timing for a problem, and what its values are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from leanconv.call.choose import Candidate, by_model, predicted, room
from leanconv.dtypes import DTYPES, is_integer
from leanconv.kernels import ALGORITHMS
from leanconv.plan import Target
from leanconv.problem import Problem

#: Candidates of a problem, and how much longer than the quickest of all one may be predicted to take. Of 72 problems of
#: ResNet-50, opencnn and image filters on an H200 the winner was predicted to take 1.23 times as long at most, and was
#: at most the tenth.
MOST = 16
SLOWEST = 1.35
#: The best of each algorithm are timed up to this: models of two algorithms differ more than two times of one model.
OWN_BEST, SLOWEST_BEST = 2, 2.0


def candidates_of(problem: Problem, target: Target, limit: int | None, most: int = MOST) -> list[Candidate]:
    """The candidates of ``auto`` that are worth timing, the cost model's own choice first, then by predicted time.

    Raises NoAlgorithmError where nothing fits.
    """
    first = by_model(problem, target, "auto", limit)
    found: list[tuple[float, int, Candidate]] = []
    for algorithm in ALGORITHMS:
        if algorithm.by_name_only or algorithm.reasons(problem, target):
            continue
        space = room(algorithm, problem, "auto", limit)
        for place, (cost, config) in enumerate(predicted(algorithm, problem, target, space)):
            found.append((cost, place, Candidate(algorithm, (), config, cost)))
    quickest = min((cost for cost, _, _ in found), default=inf)
    found.sort(key=lambda each: each[0])
    chosen = [first]
    for cost, place, candidate in found:
        near = cost <= SLOWEST * quickest or (place < OWN_BEST and cost <= SLOWEST_BEST * quickest)
        if near and len(chosen) < most and _key(candidate) != _key(first):
            chosen.append(candidate)
    return chosen


def _key(candidate: Candidate) -> tuple[str, object]:
    return candidate.algorithm.stem, candidate.config


#: Those that share least with others, and run the most problems, come first.
_INDEPENDENT = ("direct", "direct_weight", "implicit_gemm", "implicit_gemm_weight", "im2win_fused", "depthwise_input")


def independent(problem: Problem, target: Target, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Algorithms in plain float32 whose results others are compared with; two where the first is among candidates, to
    compare it with the other.

    Image filters have one algorithm on the GPU; theirs are compared with the CPU engine.
    """
    found = []
    able = {a.stem: a for a in ALGORITHMS if a.precision == "ieee" and not a.reasons(problem, target)}
    for name in dict.fromkeys((*(name for name in _INDEPENDENT if name in able), *able)):
        best = next(iter(able[name].within(problem, target, workspace=0)), None)
        if best is not None:
            found.append(Candidate(able[name], (), best[1], best[0]))
        if found and (len(found) == 2 or all(each.algorithm is not found[0].algorithm for each in candidates)):
            break
    return found


def tolerance(problem: Problem, terms: int) -> float:
    """By how much two results may differ, relative to their norm, in the precision of ``problem``; of sums of ``terms``
    products."""
    if is_integer(problem.dtype):
        return 0.0
    allowed = {"ieee": 0.0, "fp32": 0.0, "relaxed": 2e-4, "tf32": 4e-3}[problem.precision]
    rounding = 0.0 if problem.dtype == "float32" else 4 * DTYPES[problem.dtype].roundoff
    return 1e-5 + 8 * DTYPES["float32"].roundoff * terms**0.5 + allowed + rounding
