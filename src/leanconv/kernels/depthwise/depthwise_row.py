"""Depthwise convolution with short filters of one row: all loads of a thread are under way at the same time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from leanconv.dtypes import GPU_LAYERS
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div, conv_constants
from leanconv.kernels.depthwise.depthwise_window import PAPER, as_convolution, bytes_moved, one_channel_limits
from leanconv.kernels.simt.tiles import conv_arguments
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Loads of four pixels for four outputs, at most, and for all outputs of a thread: four registers each.
MOST_LOADS, MOST_AT_ONCE = 8, 16
#: Fours of outputs that a thread computes, and threads of a block.
FOURS, THREADS = (4, 2, 1), (64, 128, 256)
#: Cycles between the starts of two blocks on a multiprocessor (measured on an H200: 786432 blocks in 481 µs).
BLOCK_CYCLES = 160
#: The time of memory relative to what the target's bandwidth says (measured: 1.61 GB in 379 µs).
MEMORY = 0.87


@dataclass(frozen=True)
class RowConfig(Config):
    """A thread computes ``fours`` times four adjacent outputs, a block of ``threads`` a part of a row."""

    fours: int
    threads: int


def loads_of_four(problem: ConvProblem) -> int:
    """Loads of four pixels that four adjacent outputs need."""
    return (-problem.padding[2] % 4 + 3 + (problem.s - 1) * problem.dilation[1]) // 4 + 1


class DepthwiseRow(TimedAlgorithm):
    """Filters of one row and few taps, from registers; FP32 FMAs in direct order, no workspace. Forward and, for layers
    of unit stride, the gradient of the input."""

    name = "depthwise"
    strategy = "row"
    paper = PAPER
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = one_channel_limits(problem, GPU_LAYERS)
        if reasons:
            return reasons
        forward = as_convolution(problem)
        if problem.layout != "NCHW":
            reasons.append(f"layout={problem.layout!r} is not 'NCHW': the pixels of a row are not neighbours")
        if forward.r != 1 or forward.stride != (1, 1):
            reasons.append(
                f"a filter of {forward.r}x{forward.s} with stride={forward.stride}: it computes filters of one row at "
                "unit stride"
            )
        if forward.w % 4 or forward.q % 4:
            reasons.append(f"rows of {forward.w} pixels and {forward.q} outputs are not both multiples of four")
        if loads_of_four(forward) > MOST_LOADS:
            reasons.append(
                f"four outputs see {forward.s} taps with dilation={forward.dilation[1]}, which is "
                f"{loads_of_four(forward)} loads of four pixels, and a thread has registers for {MOST_LOADS}"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, RowConfig]]:
        forward = as_convolution(problem)
        loads = loads_of_four(forward)
        configs = [
            RowConfig(fours, threads)
            for threads in THREADS
            for fours in FOURS
            if fours == 1 or (fours * loads <= MOST_AT_ONCE and 2 * fours * threads * 4 < 3 * forward.q + 4 * threads)
        ]
        return by_time((_cycles(forward, config, target), config) for config in configs)

    def order_of_sums(self, problem: ConvProblem, config: RowConfig) -> Hashable:
        return ()  # one chain of multiply-adds, in direct order

    def plan(self, problem: ConvProblem, config: RowConfig, target: Target) -> Plan:
        forward = as_convolution(problem)
        launch = Launch(
            header="kernels/depthwise/depthwise_row.cuh",
            function="leanconv::depthwise_row",
            problem=(*conv_constants(forward), ("reversed", problem.op == "dgrad")),
            tuning=config.constants(),
            arguments=conv_arguments(problem),
            grid=_blocks(forward, config),
            block=config.threads,
        )
        return Plan((launch,))


def _blocks(problem: ConvProblem, config: RowConfig) -> int:
    return problem.n * problem.k * problem.p * ceil_div(problem.q, 4 * config.fours * config.threads)


def _cycles(problem: ConvProblem, config: RowConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, of instructions and loads from the L1, or of starting blocks.

    Beside 5 µs of a launch, which are not counted.
    """
    loads = loads_of_four(problem)
    blocks = _blocks(problem, config) / target.multiprocessors
    warps = blocks * config.threads / 32
    issue = warps * (config.fours * (4 * problem.s + 3 * loads + 12) + problem.s + 40) * 32 / target.fma_lanes
    waves = warps * (4 * config.fours * (loads + 1) + problem.s)
    busy = max(issue / 0.7, waves)
    memory = MEMORY * bytes_moved(problem) / target.bytes_per_cycle
    longest = max(busy, memory, BLOCK_CYCLES * blocks)
    return longest + 0.1 * min(busy, memory)
