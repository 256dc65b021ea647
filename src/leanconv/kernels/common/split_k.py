"""Split-K of the gradients of the filters: partial sums in a workspace, and the launch that adds them.

A configuration's number ``split_k`` says how many blocks, or clusters, share a tile's output pixels. With one, a block
stores the gradient itself, and there is no workspace. Which numbers there are each algorithm says itself, from limits
that are here (`enough`, `most_pixels`, `most_partial_sums`): in `SharedSplitK.sharing`, or, where the time of a tile is
predicted once for all of them, in `PredictedSplitK.predicted`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import inf
from operator import itemgetter
from typing import Any

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.kernels.common.layers import conv_constants
from leanconv.kernels.contract import TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import launch_cycles
from leanconv.plan import Launch, Plan, Pointer, Target, in_chain
from leanconv.problem import ConvProblem

#: Output pixels, of products of 16 bits, that a tensor core of Hopper adds up by itself, at most. It rounds toward
#: zero: so many lose less than 2^-10 of a sum of equal positive terms, a unit of float16. Explored (H200, dbedb747,
#: float16, wgmma and mma.sync): 7.8e-4 in the mean; 2^13, 2^15 and 2^19 lose 6e-5, 2.1e-4 and 3.1e-3.
MOST_PIXELS = 2**17
#: Blocks of a cluster that has a partial sum, unless there is room for few sums.
SPLITS_OF_SLICES = (1, 2, 4)
#: Warps of a block of the launch that adds, at most.
SUM_WARPS = 8
#: Weights from which on a lane of it has four, not one: fewer blocks, and more loads in flight.
MANY_WEIGHTS = 32768


def most_pixels(problem: ConvProblem, target: Target) -> int:
    """Output pixels that a warp sums by mma.sync, at most. Where it rounds twice for 16 products, as on sm_80, half as
    many; and in TF32, of which it adds half as many products at once."""
    most = MOST_PIXELS if target.warpgroup_products else MOST_PIXELS // 2
    return most * 2 // item_bytes(problem.dtype)


def enough(busy: int, least: int) -> int:
    """How many blocks share a tile of which ``busy`` keep the GPU busy for some rounds: ``least`` of them, in whole
    rounds."""
    return busy * max(1, ceil_div(least, busy)) if busy else least


def clusters_with_sums(splits: Sequence[int], least: int, room: float) -> Sequence[int]:
    """Blocks of the clusters that each have a partial sum, of the ``splits`` that a kernel has: few, but where there is
    not room for the sums of the ``least`` blocks that must share a tile."""
    return splits if least > SPLITS_OF_SLICES[-1] * room else SPLITS_OF_SLICES


def fewest_sums(least: int, room: float, target: Target) -> dict[tuple[int, int], None]:
    """``split`` and ``split_k`` that take the least workspace, where no cluster alone may sum a tile; else nothing."""
    most = target.most_in_cluster
    return {(most, max(2, ceil_div(least, most))): None} if most < least <= most * room else {}


def weights_of(problem: ConvProblem) -> int:
    return problem.k * problem.group_c * problem.taps


def workspace_bytes(problem: ConvProblem, split_k: int) -> int:
    return 4 * split_k * weights_of(problem) if split_k > 1 else 0


def most_partial_sums(problem: ConvProblem, workspace: float) -> float:
    return workspace // (4 * weights_of(problem)) if workspace < inf else inf


def destination(problem: ConvProblem, split_k: int) -> Pointer:
    """Where the first launch stores: to the gradient, or its partial sums to the workspace."""
    if split_k > 1:
        return Pointer("workspace", written=True)
    return Pointer("dw", DTYPES[problem.dtype].ctype, written=True)


def with_sums(
    first: Launch, problem: ConvProblem, split_k: int, most_warps: int = SUM_WARPS, early: bool = False
) -> Plan:
    """The plan of a first launch, and of the one that adds its partial sums where there are several, and starts
    ``early``."""
    launches = (first, sum_launch(problem, split_k, most_warps)) if split_k > 1 else (first,)
    return Plan(in_chain(launches) if early else launches, workspace_bytes=workspace_bytes(problem, split_k))


def sum_launch(problem: ConvProblem, split_k: int, most_warps: int = SUM_WARPS) -> Launch:
    """The launch that adds ``split_k`` partial sums in their order; a block has up to ``most_warps`` for a weight."""
    warps = min(most_warps, 1 << (split_k.bit_length() - 1))
    width = 4 if weights_of(problem) >= MANY_WEIGHTS else 1
    return Launch(
        header="kernels/common/split_k.cuh",
        function="leanconv::sum_split_k",
        problem=conv_constants(problem),
        tuning=(("split_k", split_k), ("sum_warps", warps), ("width", width)),
        arguments=(Pointer("workspace"), Pointer("dw", DTYPES[problem.dtype].ctype, written=True)),
        grid=ceil_div(weights_of(problem), 32 * width),
        block=32 * warps,
        shared_bytes=128 * warps * width,
    )


def sum_cycles(problem: ConvProblem, split_k: int, target: Target) -> float:
    """Predicted clock cycles of what partial sums cost: written, read, and one launch more."""
    return launch_cycles(target) + 8 * split_k * weights_of(problem) / target.bytes_per_cycle if split_k > 1 else 0.0


class SplitK(TimedAlgorithm):
    """A gradient of the filters whose configurations have ``split_k``, of which `within` offers as many as fit. Sums
    over the blocks of a cluster, or split-K through a workspace, in fixed order, no atomics."""

    def workspace_bytes(self, problem: ConvProblem, config: Any) -> int:
        return workspace_bytes(problem, config.split_k)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, Any]]:
        return self.within(problem, target)


class SharedSplitK(SplitK):
    """One whose configurations say by themselves who shares a tile."""

    @abstractmethod
    def sharing(self, problem: ConvProblem, target: Target, room: float) -> Iterator[Any]:
        """The configurations, with up to ``room`` partial sums."""

    @abstractmethod
    def cycles(self, problem: ConvProblem, config: Any, target: Target) -> float:
        """Predicted clock cycles."""

    def within(self, problem: ConvProblem, target: Target, workspace: float = inf) -> list[tuple[float, Any]]:
        configs = self.sharing(problem, target, most_partial_sums(problem, workspace))
        return by_time((self.cycles(problem, config, target), config) for config in configs)


class PredictedSplitK(SplitK):
    """One that predicts what sharing a tile takes from the tile's configuration alone."""

    @abstractmethod
    def predicted(
        self, problem: ConvProblem, target: Target, workspace: float
    ) -> Iterator[tuple[float, Any, int, int]]:
        """Predicted clock cycles of every configuration: one whose tiles a block computes alone, and ``split`` and
        ``split_k`` of the one that is meant."""

    def within(self, problem: ConvProblem, target: Target, workspace: float = inf) -> list[tuple[float, Any]]:
        found = self.predicted(problem, target, workspace)
        return by_time((time, variant(whole, split=split, split_k=slices)) for time, whole, split, slices in found)

    def quickest(self, problem: ConvProblem, target: Target, workspace: float = inf) -> tuple[float, Any] | None:
        best = min(self.predicted(problem, target, workspace), key=itemgetter(0), default=None)
        return best and (best[0], variant(best[1], split=best[2], split_k=best[3]))
