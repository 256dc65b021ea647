"""Gradient of the filters of depthwise layers with few channels: sums of many blocks, through a workspace."""

from __future__ import annotations

from dataclasses import replace

from leanconv.algorithms.base import LAUNCH_CYCLES, by_time, ceil_div, conv_constants
from leanconv.algorithms.depthwise_weight import (
    CHANNELS,
    DepthwiseWeight,
    DepthwiseWeightConfig,
    predicted_cycles,
    shapes,
    shared_by,
)
from leanconv.algorithms.part_sums import sum_launch
from leanconv.algorithms.tiles import gradient_arguments
from leanconv.plan import Launch, Number, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Blocks that keep a large GPU busy, four on each multiprocessor: at most so many are launched.
BLOCKS = 528
#: Warps of a block of the second launch. NOTE: with one thread a weight, 512 parts are as many loads in a row.
SUM_WARPS = 16


class DepthwiseWeightParts(DepthwiseWeight):
    """As `depthwise_weight`, but as many blocks as keep the GPU busy share a filter; a second launch adds their sums,
    in fixed order, out of a workspace."""

    name = "depthwise_weight_parts"

    def workspace_bytes(self, problem: ConvProblem) -> int:
        return 4 * _parts(problem) * problem.k * problem.r * problem.s

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DepthwiseWeightConfig]]:
        found = {}
        tiles, most = ceil_div(problem.k, _channels(problem)), _parts(problem)
        for shape in shapes(problem, target, (_channels(problem),)):
            busy = max(2, min(most, target.multiprocessors * shape.min_blocks // tiles))
            config = shared_by(problem, shape, busy)
            config = replace(config, split=max(2, config.split))
            found[config] = predicted_cycles(problem, config, target, cluster=False) + LAUNCH_CYCLES
        return by_time((cycles, config) for config, cycles in found.items())

    def plan(self, problem: ConvProblem, config: DepthwiseWeightConfig, target: Target) -> Plan:
        (first,) = super().plan(problem, config, target).launches
        *read, _, batch = gradient_arguments(problem)
        sums = Launch(
            header=f"{self.name}.cuh",
            function="leanconv::depthwise_weight_parts",
            problem=conv_constants(problem),
            tuning=first.tuning,
            arguments=(*read, Pointer("workspace", written=True), batch, Number("int", "rows", config.rows)),
            grid=first.grid,
            block=config.threads,
            shared_bytes=first.shared_bytes,
            min_blocks=config.min_blocks,
        )
        added = sum_launch(problem, config.split, SUM_WARPS)
        return Plan((sums, added), workspace_bytes=self.workspace_bytes(problem))


def _channels(problem: ConvProblem) -> int:
    """Filters of a block: as many as make whole lines of memory, of which at most an eighth is left over."""
    if problem.layout != "NHWC":
        return 1
    return next((c for c in reversed(CHANNELS) if 8 * (-problem.k % c) <= problem.k), CHANNELS[0])


def _parts(problem: ConvProblem) -> int:
    """Most blocks that share a filter; the workspace is for so many."""
    return max(2, BLOCKS // ceil_div(problem.k, _channels(problem)))
