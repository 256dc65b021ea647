"""The choice for ``batch_invariant``: one order of sums for all batches, and its quickest configuration for each.

The bits of a sum depend on the order in which it is taken: which products tensor cores add, whether several blocks
share a reduction. `GpuAlgorithm.order_of_sums` says what of a configuration determines it. The tile does not in most
kernels, so a batch may still have the tile that suits it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from math import prod

from leanconv.dtypes import is_integer
from leanconv.kernels.contract import Algorithm, Config, GpuAlgorithm
from leanconv.plan import Target
from leanconv.problem import ConvProblem, Problem

#: Batches that an order of sums must serve, so that none is slow: it is the one with the least geometric mean of the
#: times that are predicted for them. 1 is no multiple of four, the others are: kernels for CHWN differ by that.
BATCHES = (1, 8, 32, 128)
Room = Callable[[ConvProblem], float]
#: What of a configuration determines the order of its sums.
Order = Hashable
#: Clock cycles that count beside each predicted time: what a call in a loop takes on the host at least. Without them a
#: few microseconds of one image outweighed a share of 128. Explored (H200, 68babcd): 14 µs with PyTorch's tensors.
CALL_CYCLES = 28_000


def order(algorithm: GpuAlgorithm, problem: ConvProblem, target: Target, room: Room) -> tuple[float, Order] | None:
    """The order of sums that serves all `BATCHES` best, and the mean of its predicted times; None for no order.

    ``room`` says how many bytes of workspace a problem may take.
    """
    return _order(algorithm, replace(problem, n=1), target, tuple(room(replace(problem, n=n)) for n in BATCHES))


def config(
    algorithm: GpuAlgorithm, problem: ConvProblem, target: Target, sums: Order, workspace: float
) -> Config | None:
    """The quickest configuration for ``problem`` in an order of sums; None where there is none."""
    fitting = (each for _, each in algorithm.within(problem, target, workspace))
    return next((each for each in fitting if order_of(algorithm, problem, each) == sums), None)


def least_cycles(algorithm: Algorithm, problem: Problem, target: Target) -> float:
    """`Algorithm.least_cycles`; with ``batch_invariant`` for the mean of `order`."""
    if problem.kind == "filter2d" or not problem.batch_invariant:
        return algorithm.least_cycles(problem, target)
    return _mean([CALL_CYCLES + algorithm.least_cycles(replace(problem, n=n), target) for n in BATCHES])


def order_of(algorithm: GpuAlgorithm, problem: ConvProblem, config: Config) -> Order:
    """`GpuAlgorithm.order_of_sums`; sums of integers are exact, in whatever order."""
    return () if is_integer(problem.dtype) else algorithm.order_of_sums(problem, config)


@lru_cache(maxsize=1024)
def _order(
    algorithm: GpuAlgorithm, problem: ConvProblem, target: Target, rooms: tuple[float, ...]
) -> tuple[float, Order] | None:
    times: dict[Order, list[float]] = {}
    for n, room in zip(BATCHES, rooms, strict=True):
        quickest: dict[Order, float] = {}
        for time, config in algorithm.within(replace(problem, n=n), target, room):
            quickest.setdefault(order_of(algorithm, problem, config), CALL_CYCLES + time)
        for sums, time in quickest.items():
            times.setdefault(sums, []).append(time)
    served = ((_mean(each), sums) for sums, each in times.items() if sums is not None and len(each) == len(BATCHES))
    return min(served, key=lambda pair: pair[0], default=None)


def _mean(times: list[float]) -> float:
    return prod(time ** (1 / len(times)) for time in times)
