"""Gradient of the filters on tensor cores: sums of many blocks, through a workspace."""

from __future__ import annotations

from collections.abc import Iterator

from leanconv.algorithms.base import by_time, ceil_div, variant
from leanconv.algorithms.part_sums import sum_cycles, sum_launch, weights_of
from leanconv.algorithms.tensor_filters import DEPTH
from leanconv.algorithms.tensor_weight import (
    TensorWeight,
    TensorWeightConfig,
    _launch,
    _whole,
    may_share,
    predicted_cycles,
    stages_of,
    tiles_of,
)
from leanconv.algorithms.tiles import gradient_arguments
from leanconv.plan import Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Blocks that keep a large GPU busy.
BLOCKS = 132
#: Weights of a tile whose taps share x.
LARGEST_TILE = 128 * 64 * 3


class TensorWeightParts(TensorWeight):
    """As `tensor_weight`, but as many blocks as keep the GPU busy share a tile; a second launch adds their sums, in
    fixed order, out of a workspace."""

    name = "tensor_weight_parts"

    def workspace_bytes(self, problem: ConvProblem) -> int:
        return 4 * _most_parts(problem) * weights_of(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorWeightConfig]]:
        return by_time(
            (predicted_cycles(problem, config, target) + sum_cycles(problem, config.parts, target), config)
            for whole in _whole(problem, target)
            for config in self.shared_by(problem, whole, target)
        )

    def shared_by(
        self, problem: ConvProblem, whole: TensorWeightConfig, target: Target
    ) -> Iterator[TensorWeightConfig]:
        tiles, most = tiles_of(problem, whole), _most_parts(problem)
        busy = (rounds * target.multiprocessors // tiles for rounds in (1, 2, 3))
        for parts in dict.fromkeys(max(2, min(most, stages_of(problem, whole), many)) for many in busy):
            yield variant(whole, parts=parts)

    def plan(self, problem: ConvProblem, config: TensorWeightConfig, target: Target) -> Plan:
        *_, batch = gradient_arguments(problem)
        first = _launch(problem, config, self.name, Pointer("workspace", written=True), batch)
        return Plan((first, sum_launch(problem, config.parts)), workspace_bytes=self.workspace_bytes(problem))


def _most_parts(problem: ConvProblem) -> int:
    """Most blocks that share a tile: they make one round of a large GPU's multiprocessors, of many tiles two or three,
    so that few of these idle in the last one. The workspace is for so many."""
    tiles = ceil_div(weights_of(problem), LARGEST_TILE if may_share(problem) else 128 * 128)
    stages = ceil_div(problem.n * problem.p * problem.q, DEPTH)
    return max(2, min(stages, BLOCKS * (1 if tiles <= 16 else 2 if tiles <= 64 else 3) // tiles))
