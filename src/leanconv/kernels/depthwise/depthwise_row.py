"""Depthwise convolution with short filters of one row: all loads of a thread are in flight at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.contract import Config, ceil_div
from leanconv.kernels.cost import Speeds
from leanconv.kernels.depthwise.strategy import DepthwiseStrategy, bytes_moved
from leanconv.plan import Target
from leanconv.problem import ConvProblem

#: Loads of four pixels for four outputs, at most, and for all outputs of a thread: four registers each.
MOST_LOADS, MOST_AT_ONCE = 8, 16
#: Vectors of four outputs that a thread computes, and threads of a block.
VECTORS, THREADS = (4, 2, 1), (64, 128, 256)


@dataclass(frozen=True)
class RowConfig(Config):
    """A thread computes ``vectors`` times four adjacent outputs, a block of ``threads`` a segment of a row."""

    vectors: int
    threads: int


@dataclass(frozen=True)
class RowSpeeds(Speeds):
    """Of a block on a multiprocessor."""

    #: cycles between the starts of two blocks
    block_cycles: float
    #: the time of memory relative to what the target's bandwidth says
    memory: float
    #: the share of the peak at which instructions are issued, and of the lesser of memory and the rest that adds
    issue: float
    lesser: float


def vector_loads(problem: ConvProblem) -> int:
    """Loads of four pixels that four adjacent outputs need."""
    return (-problem.padding[2] % 4 + 3 + (problem.s - 1) * problem.dilation[1]) // 4 + 1


class DepthwiseRow(DepthwiseStrategy):
    """Filters of one row and few taps, from registers."""

    strategy = "row"

    def limits(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = []
        if problem.layout != "NCHW":
            reasons.append(f"layout={problem.layout!r} is not 'NCHW': the pixels of a row are not neighbours")
        if problem.r != 1 or problem.stride != (1, 1):
            reasons.append(
                f"a filter of {problem.r}x{problem.s} with stride={problem.stride}: it computes filters of one row at "
                "unit stride"
            )
        if problem.w % 4 or problem.q % 4:
            reasons.append(f"rows of {problem.w} pixels and {problem.q} outputs are not both multiples of four")
        if vector_loads(problem) > MOST_LOADS:
            reasons.append(
                f"four outputs read {problem.s} taps with dilation={problem.dilation[1]}, which is "
                f"{vector_loads(problem)} loads of four pixels, and a thread has registers for {MOST_LOADS}"
            )
        return reasons

    def candidates(self, problem: ConvProblem, target: Target) -> Iterator[RowConfig]:
        for threads in THREADS:
            for vectors in VECTORS:
                fits = vectors * vector_loads(problem) <= MOST_AT_ONCE
                if vectors == 1 or (fits and 2 * vectors * threads * 4 < 3 * problem.q + 4 * threads):
                    yield RowConfig(vectors, threads)

    def blocks(self, problem: ConvProblem, config: RowConfig) -> int:
        return problem.n * problem.k * problem.p * ceil_div(problem.q, 4 * config.vectors * config.threads)

    def cycles(self, problem: ConvProblem, config: RowConfig, target: Target) -> float:
        """That of the memory, of instructions and loads from the L1, or of starting blocks; beside a launch,
        which is not counted."""
        speeds, loads = RowSpeeds.of(target), vector_loads(problem)
        blocks = self.blocks(problem, config) / target.multiprocessors
        warps = blocks * config.threads / 32
        issue = warps * (config.vectors * (4 * problem.s + 3 * loads + 12) + problem.s + 40) * 32 / target.fma_lanes
        waves = warps * (4 * config.vectors * (loads + 1) + problem.s)
        busy = max(issue / speeds.issue, waves)
        memory = speeds.memory * bytes_moved(problem) / target.bytes_per_cycle
        return max(busy, memory, speeds.block_cycles * blocks) + speeds.lesser * min(busy, memory)
