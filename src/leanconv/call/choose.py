"""The algorithms, in order of preference, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from leanconv.algorithms.base import Algorithm
from leanconv.problem import Problem

A = TypeVar("A", bound=Algorithm)


class NoAlgorithmError(ValueError):
    """Nothing fits the problem; the message gives each algorithm's reasons."""


def workspace_limit(name: str, given: int | None) -> int | None:
    """Bytes of workspace that hold for a choice: those given, else 0 for ``auto`` and None, no limit, for a name."""
    return 0 if given is None and name == "auto" else given


def reasons(algorithm: Algorithm, problem: Problem, name: str, given: int | None) -> list[str]:
    """Why ``algorithm`` is no answer to the choice of ``name`` under a limit of ``given`` bytes.

    Bytes that a caller gives hold for prepared filters too; the 0 of ``auto`` is for the workspace alone.
    """
    return algorithm.reasons(problem, workspace_limit(name, given), count_prepared=given is not None)


def choose(problem: Problem, name: str, candidates: Sequence[A], limit: int | None = None) -> A:
    """The cheapest of ``candidates`` that can run ``problem``, the first among equals, or the one called ``name``.

    None of them takes more memory than `reasons` allows for ``limit`` bytes.

    Raises ValueError for an unknown name, NoAlgorithmError where nothing fits or the named one does not.
    """
    relevant = [a for a in candidates if isinstance(problem, a.solves)]
    if name != "auto":
        relevant = [a for a in relevant if a.name == name]
        if not relevant:
            names = ", ".join(repr(a.name) for a in candidates if isinstance(problem, a.solves))
            raise ValueError(f"algorithm={name!r} is not known here; choose 'auto' or one of {names}")
    able = [a for a in relevant if not reasons(a, problem, name, limit)]
    if able:
        return min(able, key=lambda a: a.cost(problem))
    lines = [f"no algorithm can run {problem}:"]
    lines += [f"  {a.name}: {'; '.join(reasons(a, problem, name, limit))}" for a in relevant]
    raise NoAlgorithmError("\n".join(lines))
