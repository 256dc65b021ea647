"""Gradient of the filters of grouped layers on tensor cores by mma.sync, for float16 and bfloat16 in NHWC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from leanconv.dtypes import DTYPES
from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants
from leanconv.kernels.contract import Arithmetic, by_time, ceil_div
from leanconv.kernels.cost import Speeds, blocks_that_fit, launch_cycles, overlapped
from leanconv.kernels.mma_sync.native_gemm_groups import (
    BESIDE,
    UNIT,
    GroupsConfig,
    NativeGemmGroups,
    filter_tiles,
    group_limits,
    output_tiles,
    sectors,
    steps_of,
    tile_limits,
)
from leanconv.plan import Number, Plan, Pointer, Target, in_chain
from leanconv.problem import ConvProblem

#: Registers of a step's sums.
OF_STEP = 4
#: Outputs whose products a warp sums in the tensor core, which rounds toward zero: at most 2^-11 of the sum is lost.
MOST_PIXELS = 2**17
#: CTAs of a cluster that share a tile's outputs.
SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class GroupsWeightConfig(GroupsConfig):
    """A cluster of ``split`` CTAs shares the outputs of a tile of filters, and so do ``split_k`` of them whose sums a
    second launch adds."""

    split: int = 1
    split_k: int = 1

    def shared_bytes(self, problem: ConvProblem) -> int:
        """The stages, or the sums of all warps where they were."""
        outputs = ceil_div(self.rows * self.columns, 16) * 16 * 16 * (self.filters // UNIT | 1)
        sums = self.warps * self.blocks * steps_of(problem) * OF_STEP * 32 * 4
        return max(super().shared_bytes(problem) + self.stages * outputs, sums)


@dataclass(frozen=True)
class GroupsWeightSpeeds(Speeds):
    """Cycles of a multiprocessor, and shares of the memory's speed."""

    #: flops of mma.sync in a cycle, at most, and the share of the tensor cores' that is assumed elsewhere
    max_flops: float
    share: float
    #: times as long as their bytes that copies take in shared memory
    copies: float
    #: of a tile: the latency of its copies; of a CTA; and for each weight that it stores
    tile: float
    start: float
    weight: float
    #: times the bytes of a problem that memory takes, and times the sectors that tiles read
    memory: float
    cached: float
    #: of the launch that adds partial sums, and the bytes of these that it and the first one move in a cycle
    adding: float
    added_per_cycle: float
    #: share of the lesser of memory and the multiprocessors' work that adds to the greater
    lesser: float


class NativeWeightGroups(split_k.SplitK):
    """The filters' gradient of groups on tensor cores, float16 or bfloat16 summed in float32; NHWC."""

    name = "native_weight"
    strategy = "groups"
    paper = NativeGemmGroups.paper
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return group_limits(problem, target, "wgrad") or tile_limits(problem, OF_STEP)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, GroupsWeightConfig]]:
        room = split_k.most_partial_sums(problem, workspace)
        configs = self._candidates(problem, target, room)
        return by_time((self._cycles(problem, config, target), config) for config in configs)

    def _candidates(self, problem: ConvProblem, target: Target, room: float) -> Iterator[GroupsWeightConfig]:
        least = ceil_div(problem.pixels, MOST_PIXELS)
        for filters, blocks, warps in filter_tiles(problem, OF_STEP):
            registers = blocks * (OF_STEP * steps_of(problem) + 4) + BESIDE
            for rows, columns in output_tiles(problem):
                for stages in (1, 2):
                    whole = GroupsWeightConfig(filters, blocks, warps, rows, columns, stages, 1)
                    shared = whole.shared_bytes(problem)
                    if shared > target.shared_per_block:
                        continue
                    fit = min(
                        blocks_that_fit(registers, whole.threads, target),
                        target.shared_per_multiprocessor // (shared + 1024),
                    )
                    of_filters, of_outputs = whole.tiles(problem)
                    most = min(room, of_outputs)
                    slices = {int(min(most, fit * target.multiprocessors * i / 4 // of_filters)) for i in (1, 2, 4)}
                    ways = [(split, 1) for split in SPLITS if split <= min(target.most_in_cluster, of_outputs)]
                    ways += [(1, each) for each in sorted(slices) if each > 1]
                    for split, each in ways:
                        if split * each >= least:
                            yield GroupsWeightConfig(
                                filters, blocks, warps, rows, columns, stages, max(1, fit), split, each
                            )

    def _cycles(self, problem: ConvProblem, config: GroupsWeightConfig, target: Target) -> float:
        speeds, steps = GroupsWeightSpeeds.of(target), steps_of(problem)
        flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
        of_filters, of_outputs = config.tiles(problem)
        height, width = config.pixels(problem)
        outputs = config.rows * config.columns
        copied = 2 * height * width * config.channels(problem) + 2 * outputs * config.filters
        products = ceil_div(outputs, 16) * config.filters // UNIT * steps
        reads = products / (config.blocks if problem.group_k % (8 * config.blocks) == 0 else 1)
        each = max(4 * reads + speeds.copies * copied / 128, products * 4096 / flops)
        workers = config.split * config.split_k
        ctas, tiles = of_filters * workers, ceil_div(of_outputs, workers)
        # CTAs of a multiprocessor hide each other's latencies, and those of two stages their own
        rounds = ceil_div(ctas, target.multiprocessors)
        together = min(rounds, config.min_blocks)
        hidden = max(speeds.tile / config.stages - (together - 1) * each, 0)
        weights = config.warps * config.blocks * steps * OF_STEP * 32
        busy = rounds * (tiles * each + speeds.weight * weights) + ceil_div(rounds, together) * (
            tiles * hidden + speeds.start
        )
        cached = (
            of_filters
            * of_outputs
            * (sectors(config.channels(problem)) * height * width + sectors(config.filters) * outputs)
        )
        memory = max(speeds.memory * problem.bytes, speeds.cached * cached) / target.bytes_per_cycle
        sums = 8 * config.split_k * split_k.weights_of(problem) / speeds.added_per_cycle
        time = overlapped(busy, memory, speeds.lesser) + launch_cycles(target)
        return time + (speeds.adding + sums if config.split_k > 1 else 0)

    def plan(self, problem: ConvProblem, config: GroupsWeightConfig, target: Target) -> Plan:
        element = DTYPES[problem.dtype].ctype
        arguments = (
            Pointer("x", element), Pointer("dy", element), split_k.destination(problem, config.split_k),
            Number("long long", "batch", problem.n),
        )  # fmt: skip
        tuning = (*config.constants(), ("threads", config.threads))
        grid = config.tiles(problem)[0] * config.split * config.split_k
        shared = config.shared_bytes(problem)
        first = self.launch(config, conv_constants(problem), arguments, grid, shared, tuning)
        plan = split_k.with_sums(first, problem, config.split_k)
        return Plan(in_chain(plan.launches), workspace_bytes=plan.workspace_bytes)
