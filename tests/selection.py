"""Which of many similar tests ``make test`` runs: as few as cover everything that differs. ``make test-all`` runs all.

A test that is left out carries the marker ``exhaustive``. The number of those that run grows with what there is to
cover (layers, layouts, configurations), and not with the product of all of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from leanconv.dtypes import is_integer, is_narrow, item_bytes
from leanconv.kernels.contract import GpuAlgorithm
from leanconv.problem import ConvProblem
from tests.cases import TRANSFORM_CASES, Case

#: The families whose kernels run on tensor cores.
TENSOR_CORES = ("hopper_fp32", "hopper_native", "mma_sync")
Item = TypeVar("Item")


def cover(
    items: Sequence[Item], traits: Callable[[Item], Iterable[Hashable]], cost: Callable[[Item], float] = lambda item: 0
) -> list[Item]:
    """As few ``items`` as a greedy choice needs to have every trait that any of them has; of equals the cheapest."""
    has = [frozenset(traits(item)) for item in items]
    missing, costs = set[Hashable]().union(*has), [cost(item) for item in items]
    chosen: list[int] = []
    while missing:
        best = max(range(len(items)), key=lambda i: (len(has[i] & missing), -costs[i]))
        chosen.append(best)
        missing -= has[best]
    return [items[i] for i in sorted(chosen)]


def layer_name(case: Case) -> str:
    """The name without the layout."""
    layout = getattr(case.problem, "layout", None)
    return case.name if layout is None else case.name.removesuffix(f"-{layout.lower()}")


def in_turn(algorithm: GpuAlgorithm, case: Case) -> bool:
    """Whether it is the algorithm's turn: each layer goes to every twelfth one, thorough layers to every second."""
    text = f"{algorithm.stem} {layer_name(case)}"
    return zlib.crc32(text.encode()) % (2 if case.thorough else 12) == 0


def traits(algorithm: GpuAlgorithm, case: Case) -> Iterator[Hashable]:
    """The layer, which has its own purpose, by turns; of image filters each type, each number of channels, and what
    else tells their loaders apart; in each layout and direction what kernels and loaders depend on;
    of 16-bit elements what differs in loading and storing them.

    Algorithms that transform have layers of their own, and so have direct_tiled and tensor cores; the slowest ones need
    none. From the others they need no more than the latter.
    """
    problem = case.problem
    transforms = algorithm.stem.startswith("winograd")
    known_otherwise = ("direct_tiled", "direct", "direct_weight", "im2win_basic", "implicit_gemm_weight_split_k")
    plain = algorithm.precision == "ieee" and algorithm.stem not in known_otherwise
    if (plain or (transforms and case in TRANSFORM_CASES)) and in_turn(algorithm, case):
        yield layer_name(case)
    if not isinstance(problem, ConvProblem) and algorithm.name == "fourier":
        # its loads are of one pixel each, and a number of channels is a distance
        yield from (("image", is_integer(problem.dtype)), ("channels", problem.channels > 1), ("valid", problem.valid))
        yield from (("result", item_bytes(problem.result), is_integer(problem.result)), ("sums", problem.sums))
        return
    if not isinstance(problem, ConvProblem):
        yield from (("image", problem.dtype), ("result", problem.result), ("channels", problem.channels))
        yield "volume", problem.is_volume
        yield from (("valid", problem.valid), ("per image", problem.per_image), ("sums", problem.sums))
        return
    if problem.is_empty:
        yield "empty"  # and stands for nothing else: no block runs
        return
    yield problem.op, problem.dtype
    if problem.is_volume:
        yield "volume", problem.layout, problem.op
        yield "volume", problem.dtype
        of_volumes = {
            "bias": problem.bias,
            "stride": problem.stride_d > 1 and problem.t > 1,
            "dilation": problem.dilation_d > 1,
            "groups": problem.groups > 1,
            "slices alone": problem.t == 1,
        }
        yield from (("volume", problem.op, name) for name, present in of_volumes.items() if present)
        return
    if algorithm.family in TENSOR_CORES:
        if problem.layout == "CHWN":  # their own tests play the others
            yield problem.layout, problem.op
        return
    if algorithm.stem == "implicit_gemm_weight_split_k":
        yield problem.layout, problem.op
        return
    if algorithm.stem in ("direct_tiled", "winograd1d"):
        # the rest is what the layers of their own tests differ in, of which `make test` plays as many
        yield problem.layout, problem.op
        yield "accumulate", problem.accumulate
        yield "groups", problem.groups > 1, problem.groups == problem.c > 1
        return
    top, bottom, left, right = problem.padding
    stored = {
        "any": True,
        "bias": problem.bias,
        "accumulate": problem.accumulate,
        "vectors": problem.group_c % 4 == 0 and problem.group_k % 4 == 0,
    }
    has = stored | {
        "thorough": case.thorough,
        "groups": problem.groups > 1,
        "depthwise": problem.groups == problem.c > 1,
        "stride": problem.stride != (1, 1),
        "dilation": problem.dilation != (1, 1),
        "uneven padding": (top, left) != (bottom, right),
        "activation": problem.activation is not None,
    }
    narrow = "integers" if is_integer(problem.dtype) else is_narrow(problem.dtype)
    for name, present in (stored if narrow else has).items():
        if present:
            yield narrow or problem.op, name
    yield problem.layout, narrow or problem.op


def marked(items: Sequence[Item], chosen: Iterable[Item], param: Callable[[Item], Any]) -> list[Any]:
    """A pytest parameter for each item; those that are not chosen are exhaustive."""
    keep = list(chosen)
    made = []
    for item in items:
        values, name = param(item)
        made.append(pytest.param(*values, id=name, marks=() if item in keep else pytest.mark.exhaustive))
    return made


def each_layer(cases: Sequence[Case]) -> list[Any]:
    """A pytest parameter for each case's problem; ``make test`` runs each layer in one layout, and all layouts."""
    chosen = cover(cases, lambda case: (layer_name(case), getattr(case.problem, "layout", None)))
    return marked(cases, chosen, lambda case: ((case.problem,), case.name))


def every_third(broken: Sequence[Sequence[Any]]) -> list[Any]:
    """A pytest parameter for each kernel broken on purpose, its data first and the patch last.

    ``make test`` plays every third: they prove the checks, not the kernels.
    """
    return marked(broken, broken[::3], lambda each: (each, "-".join(map(str, each))))
