"""Gradient of the filters on tensor cores: sums of many blocks, through a workspace."""

from __future__ import annotations

from collections.abc import Iterator

from leanconv.algorithms.base import LAUNCH_CYCLES, by_time, ceil_div, conv_constants, variant
from leanconv.algorithms.tensor_weight import (
    TensorWeight,
    TensorWeightConfig,
    _launch,
    _whole,
    predicted_cycles,
    stages_of,
    tiles_of,
)
from leanconv.algorithms.tiles import gradient_arguments
from leanconv.plan import Launch, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Blocks that keep a large GPU busy.
BLOCKS = 132
#: Warps of a block of the second launch, at most.
SUM_WARPS = 8


class TensorWeightParts(TensorWeight):
    """As `tensor_weight`, but as many blocks as keep the GPU busy share a tile; a second launch adds their sums, in
    fixed order, out of a workspace."""

    name = "tensor_weight_parts"

    def workspace_bytes(self, problem: ConvProblem) -> int:
        return 4 * _most_parts(problem) * _weights(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorWeightConfig]]:
        return by_time(
            (predicted_cycles(problem, config, target) + _sum_cycles(problem, config, target), config)
            for whole in _whole(problem, target)
            for config in self.shared_by(problem, whole, target)
        )

    def shared_by(
        self, problem: ConvProblem, whole: TensorWeightConfig, target: Target
    ) -> Iterator[TensorWeightConfig]:
        tiles, most = tiles_of(problem, whole), _most_parts(problem)
        for rounds in (1, 2):
            parts = max(2, min(most, stages_of(problem), rounds * target.multiprocessors // tiles))
            yield variant(whole, parts=parts)

    def plan(self, problem: ConvProblem, config: TensorWeightConfig, target: Target) -> Plan:
        *_, dw, batch = gradient_arguments(problem)
        first = _launch(problem, config, self.name, Pointer("workspace", written=True), batch)
        warps = _sum_warps(config)
        added = Launch(
            header=f"{self.name}.cuh",
            function="leanconv::tensor_weight_sum",
            problem=conv_constants(problem),
            tuning=(("parts", config.parts), ("sum_warps", warps)),
            arguments=(Pointer("workspace"), dw),
            grid=ceil_div(_weights(problem), 32),
            block=32 * warps,
            shared_bytes=128 * warps,
        )
        return Plan((first, added), workspace_bytes=self.workspace_bytes(problem))


def _weights(problem: ConvProblem) -> int:
    return problem.k * problem.group_c * problem.r * problem.s


def _most_parts(problem: ConvProblem) -> int:
    """Most blocks that share a tile, by the smallest tile's size; the workspace is for so many."""
    return max(2, min(stages_of(problem), 2 * BLOCKS // ceil_div(_weights(problem), 128 * 192)))


def _sum_warps(config: TensorWeightConfig) -> int:
    """As many as parts, rounded down to a power of two."""
    return min(SUM_WARPS, 1 << (config.parts.bit_length() - 1))


def _sum_cycles(problem: ConvProblem, config: TensorWeightConfig, target: Target) -> float:
    """Of the second launch, which writes what the first wrote, and reads it again."""
    moved = 8 * config.parts * _weights(problem)
    return LAUNCH_CYCLES + moved / target.bytes_per_cycle
