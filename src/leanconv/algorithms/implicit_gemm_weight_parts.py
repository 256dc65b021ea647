"""Gradient of the filters on the FP32 cores: sums of many blocks, through a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from leanconv.algorithms.base import by_time, ceil_div
from leanconv.algorithms.implicit_gemm_weight import (
    ImplicitGemmWeight,
    WeightTileConfig,
    predicted_cycles,
    tiles,
    tiles_of,
    weight_launch,
)
from leanconv.algorithms.part_sums import sum_cycles, sum_launch, weights_of
from leanconv.algorithms.tiles import gradient_arguments
from leanconv.plan import Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Blocks of the largest tile that keep a large GPU busy.
BLOCKS = 264


class ImplicitGemmWeightParts(ImplicitGemmWeight):
    """As `implicit_gemm_weight`, but as many blocks as keep the GPU busy share a tile; a second launch adds their sums,
    in fixed order, out of a workspace."""

    name = "implicit_gemm_weight_parts"

    def workspace_bytes(self, problem: ConvProblem) -> int:
        return 4 * _most_parts(problem) * weights_of(problem)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WeightTileConfig]]:
        return by_time(
            (predicted_cycles(problem, config, speed, target) + sum_cycles(problem, config.parts, target), config)
            for tile, speed in tiles(problem)
            for config in self.shared_by(problem, tile, target)
        )

    def shared_by(self, problem: ConvProblem, tile: WeightTileConfig, target: Target) -> Iterator[WeightTileConfig]:
        if tile.shared_bytes <= target.shared_per_block:
            busy = target.multiprocessors * tile.min_blocks // tiles_of(problem, tile)
            yield replace(tile, parts=max(2, min(_most_parts(problem), busy)))

    def plan(self, problem: ConvProblem, config: WeightTileConfig, target: Target) -> Plan:
        x, dy, _, batch = gradient_arguments(problem)
        to = Pointer("workspace", written=True)
        first = weight_launch(problem, config, self.name, (x, dy, to, batch))
        return Plan((first, sum_launch(problem, config.parts)), workspace_bytes=self.workspace_bytes(problem))


def _most_parts(problem: ConvProblem) -> int:
    """Most blocks that share a tile; the workspace is for so many."""
    pixels = problem.n * problem.p * problem.q
    return max(2, min(ceil_div(pixels, 16), BLOCKS // ceil_div(weights_of(problem), 128 * 128)))
