"""The choice for ``batch_invariant``: one order of sums for all batches, and its quickest configuration for each.

The bits of a sum depend on the order in which it is taken: which products tensor cores add, whether several blocks
share a reduction. `GpuAlgorithm.order_of_sums` says what of a configuration determines it. The tile does not in most
kernels, so a batch may still have the tile that suits it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache
from math import inf, prod
from typing import Any

from leanconv.algorithms.base import Algorithm, Config, GpuAlgorithm, TimedAlgorithm
from leanconv.dtypes import is_integer
from leanconv.plan import Target
from leanconv.problem import ConvProblem

#: Batches that an order of sums must serve, so that none is slow: it is the one with the least geometric mean of the
#: times that are predicted for them. 1 is no multiple of four, the others are: kernels for CHWN differ by that.
BATCHES = (1, 8, 32, 128)
#: Clock cycles that count beside each predicted time, 14 µs: what a call in a loop takes on the host at least (H200,
#: PyTorch tensors). Without them a few µs of one image outweighed a share of 128.
CALL_CYCLES = 28_000


def reasons(
    algorithm: GpuAlgorithm, problem: ConvProblem, target: Target, limit: int | None, count_prepared: bool
) -> list[str]:
    """Why it cannot run ``problem`` in every batch: `Algorithm.reasons` of the first of `BATCHES` that it cannot."""
    for n in BATCHES:
        found = algorithm.reasons(replace(problem, n=n), target, limit, count_prepared=count_prepared)
        if found:
            return found if n == BATCHES[0] else [f"in a batch of {n} {reason}" for reason in found]
    return []


def mean_cycles(algorithm: GpuAlgorithm, problem: ConvProblem, target: Target) -> float | None:
    """The mean of the predicted times over `BATCHES`, in the order of sums that serves them best; None for no order."""
    found = _order(algorithm, replace(problem, n=1), target)
    return None if found is None else found[0]


def config(algorithm: GpuAlgorithm, problem: ConvProblem, target: Target) -> Config | None:
    """The quickest configuration for ``problem`` in the order of sums of `mean_cycles`; None where there is none."""
    found = _order(algorithm, replace(problem, n=1), target)
    fitting = (each for _, each in _timed(algorithm, problem, target))
    return next((each for each in fitting if found and order_of(algorithm, problem, each) == found[1]), None)


def least_cycles(algorithm: Algorithm, problem: Any, target: Target) -> float:
    """`Algorithm.least_cycles` for the mean of `mean_cycles`."""
    return _mean([CALL_CYCLES + algorithm.least_cycles(replace(problem, n=n), target) for n in BATCHES])


def order_of(algorithm: GpuAlgorithm, problem: ConvProblem, config: Config) -> Hashable:
    """`GpuAlgorithm.order_of_sums`; sums of integers are exact, in whatever order."""
    return () if is_integer(problem.dtype) else algorithm.order_of_sums(problem, config)


@lru_cache(maxsize=1024)
def _order(algorithm: GpuAlgorithm, problem: ConvProblem, target: Target) -> tuple[float, Hashable] | None:
    """The least mean of the times over `BATCHES`, and the order of sums that has it."""
    times: dict[Hashable, list[float]] = {}
    for n in BATCHES:
        quickest: dict[Hashable, float] = {}
        for time, config in _timed(algorithm, replace(problem, n=n), target):
            quickest.setdefault(order_of(algorithm, problem, config), CALL_CYCLES + time)
        for order, time in quickest.items():
            times.setdefault(order, []).append(time)
    served = ((_mean(each), order) for order, each in times.items() if order is not None and len(each) == len(BATCHES))
    return min(served, key=lambda pair: pair[0], default=None)


def _timed(algorithm: GpuAlgorithm, problem: ConvProblem, target: Target) -> list[tuple[float, Any]]:
    if isinstance(algorithm, TimedAlgorithm):
        return algorithm.timed(problem, target)
    return [(inf, config) for config in algorithm.configs(problem, target)]


def _mean(times: list[float]) -> float:
    """The geometric mean."""
    return prod(time ** (1 / len(times)) for time in times)
