"""Gradient of the filters of grouped layers on tensor cores by mma.sync, for float16, bfloat16 and TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from leanconv.dtypes import DTYPES
from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants
from leanconv.kernels.contract import Arithmetic, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, clusters_at_once, overlapped
from leanconv.kernels.mma_sync.native_gemm_groups import (
    MMA_FILTERS,
    STAGES,
    UNIT_BYTES,
    GroupsConfig,
    NativeGemmGroups,
    Windows,
    filter_tiles,
    group_limits,
    part_of_speeds,
    resident_blocks,
    sectors,
    window_tiles,
    windows_of,
)
from leanconv.plan import Number, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Registers of a step's sums, and what a thread has beside these and their fragments, by type and layout.
OF_STEP = 4
BESIDE = {"16 bits": {"NHWC": 64, "NCHW": 108}, "TF32": {"NHWC": 64, "NCHW": 72}}
#: Filters of a tile, about.
FILTERS = (16, 64)
#: CTAs of a cluster that share a tile's outputs.
SPLITS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class GroupsWeightConfig(GroupsConfig):
    """A cluster of ``split`` CTAs shares the outputs of a tile of filters, and so do ``split_k`` of them whose sums a
    second launch adds."""

    split: int = 1
    split_k: int = 1

    def pitch(self, channels: int, windows: Windows) -> int:
        """Units from one pixel to the next. Lanes load float32 by themselves: of two units more than a multiple of four
        their loads lie in different banks."""
        units = channels // windows.unit
        return units + (2 - units) % 4 if windows.kind == "TF32" else units | 1

    def shared_bytes(self, windows: Windows) -> int:
        """Shared memory of a CTA: the stages, or in their place the sums of all warps."""
        outputs = self.rows * self.columns * UNIT_BYTES * self.pitch(self.filters, windows)
        sums = self.warps * self.blocks * windows.steps * OF_STEP * 32 * 4
        return max(super().shared_bytes(windows) + STAGES * outputs, sums)


@dataclass(frozen=True)
class GroupsWeightSpeeds(Speeds):
    """Cycles of a multiprocessor, and shares of the memory's speed, of a layout in 16 bits and in TF32.

    Explored (H200, 3859a523): in 16 bits fitted to 208 times of 21 layers, channels last, with a mean error of 11 %;
    the choice among the measured is 6 % behind the best in the mean. Explored (H200, 13330f93): in TF32 fitted to 73
    times of one configuration each, 33 of them channels last, with a median error of 7 % there and 9 % channels first.
    """

    #: flops of mma.sync in a cycle, at most, and the share of the tensor cores' that is assumed elsewhere
    max_flops: float
    share: float
    #: instructions of a warp for 16 outputs beside its products
    beside: float
    #: cycles that a warp alone takes for an instruction, and of a product beside
    latency: float
    product: float
    #: cycles of a tile beside memory and products; before the first, the launch's included; for each sum of a thread
    tile: float
    start: float
    sums: float
    #: share of this that the sums of each other CTA of a cluster take
    cluster: float
    #: times the bytes of a problem that memory takes, and times the sectors that tiles read
    memory: float
    cached: float
    #: of the launch that adds partial sums, and the bytes of these that it and the first one move in a cycle
    adding: float
    added_per_cycle: float
    #: share of the lesser of memory and products that adds to the greater
    lesser: float


class NativeWeightGroups(split_k.SplitK):
    """The filters' gradient of groups on tensor cores: 16 bits or float32 rounded to TF32, summed in float32."""

    name = "native_weight"
    strategy = "groups"
    paper = NativeGemmGroups.paper
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return group_limits(problem, target, OF_STEP, "wgrad", kind=GroupsWeightConfig, wanted=FILTERS)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "tf32" if problem.dtype == "float32" else "fp16"

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return problem.bytes / target.bytes_per_cycle

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, GroupsWeightConfig]]:
        room = split_k.most_partial_sums(problem, workspace)
        configs = self._candidates(problem, target, room)
        speeds = GroupsWeightSpeeds.of(target, part_of_speeds(problem))
        return by_time((cycles(problem, config, target, speeds), config) for config in configs)

    def _candidates(self, problem: ConvProblem, target: Target, room: float) -> Iterator[GroupsWeightConfig]:
        windows = windows_of(problem)
        most_summed = split_k.most_pixels(problem, target)
        for filters, blocks, warps in filter_tiles(windows, OF_STEP, FILTERS):
            registers = blocks * (OF_STEP * windows.steps + 4) + BESIDE[windows.kind][problem.layout]
            for rows, columns in window_tiles(windows):
                whole = GroupsWeightConfig(filters, blocks, warps, rows, columns, 1)
                shared = whole.shared_bytes(windows)
                if shared > target.shared_per_block:
                    continue
                fit = resident_blocks(whole, shared, registers, target)
                of_filters, of_windows = whole.tiles(windows)
                sharing = warps * MMA_FILTERS * blocks // filters
                of_warp = 16 * ceil_div(ceil_div(rows * columns, 16), sharing)
                wanted = max(1, fit * target.multiprocessors // of_filters)
                most = min(target.most_in_cluster, of_windows, wanted)
                ways = [(split, 1) for split in SPLITS if most // 4 < split <= most]
                least = ceil_div(of_windows, max(1, most_summed // of_warp))
                slices = {int(min(room, of_windows, split_k.enough(each, least))) for each in (wanted, wanted // 2)}
                ways += [(1, each) for each in slices if each > 1]
                for split, each in ways:
                    if ceil_div(of_windows, split * each) * of_warp <= most_summed:
                        yield variant(whole, min_blocks=fit, split=split, split_k=each)

    def plan(self, problem: ConvProblem, config: GroupsWeightConfig, target: Target) -> Plan:
        element, windows = DTYPES[problem.dtype].ctype, windows_of(problem)
        arguments = (
            Pointer("x", element), Pointer("dy", element), split_k.destination(problem, config.split_k),
            Number("long long", "batch", problem.n),
        )  # fmt: skip
        tuning = (*config.constants(), ("threads", config.threads))
        grid = config.tiles(windows)[0] * config.split * config.split_k
        shared, constants = config.shared_bytes(windows), (*conv_constants(problem), ("gradient", False))
        first = self.launch(config, constants, arguments, grid, shared, tuning)
        return split_k.with_sums(first, problem, config.split_k, early=True)


def cycles(problem: ConvProblem, config: GroupsWeightConfig, target: Target, speeds: GroupsWeightSpeeds) -> float:
    """Predicted clock cycles: as those of `native_gemm_groups`, and of the sums."""
    windows = windows_of(problem)
    flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
    of_filters, of_windows = config.tiles(windows)
    workers, steps = config.split * config.split_k, windows.steps
    rounds, ctas = ceil_div(of_windows, workers), ceil_div(of_filters * workers, target.multiprocessors)
    # clusters are dealt out unevenly: some multiprocessors have as many CTAs as fit
    together = config.min_blocks if config.split > 1 else min(ctas, config.min_blocks)
    m_tiles, along = ceil_div(config.rows * config.columns, 16), config.filters // MMA_FILTERS // config.blocks
    reads = steps * (1 if windows.group_k % (8 * config.blocks) == 0 else config.blocks)
    products = steps * config.blocks
    issued = (reads + products) * 1.2 + speeds.beside
    if problem.dtype == "float32":
        # twice as many products, of half the flops at half the rate; in place of an ldmatrix two loads and four
        # roundings for each
        reads, products = 2 * reads, 2 * products
        issued = 6 * reads + products * 1.2 + 2 * speeds.beside
    each = m_tiles * along * max(issued / 4, 4 * reads, products * 4096 / flops)
    latency = speeds.latency * issued + speeds.product * products
    computed = max(together * each, ceil_div(m_tiles * along, config.warps) * latency)
    height, width = config.pixels(windows)
    moved = sectors(problem, config.channels(windows), height, width, image=(problem.h, problem.w))
    moved += sectors(problem, config.filters, config.rows, config.columns, image=(problem.p, problem.q))
    memory = together * speeds.cached * moved * target.multiprocessors / target.bytes_per_cycle
    time = rounds * (overlapped(memory, computed, speeds.lesser) + speeds.tile)
    time += speeds.start + speeds.sums * config.blocks * steps * config.warps * (
        1 + speeds.cluster * (config.split - 1)
    )
    waves = ceil_div(ctas, together)
    if config.split > 1:
        at_once = clusters_at_once(config.split, config.min_blocks, target)
        if problem.dtype == "float32" and config.split == SPLITS[-1] and config.min_blocks > 1:
            # Explored (H200, 13330f93): of 15, expected to run at once, one waited in each of three layers
            at_once = max(1, at_once - 1)
        waves = max(waves, ceil_div(of_filters * config.split_k, at_once))
    time = max(waves * time, speeds.memory * problem.bytes / target.bytes_per_cycle)
    added = 8 * config.split_k * split_k.weights_of(problem) / speeds.added_per_cycle
    return time + (speeds.adding + added if config.split_k > 1 else 0)
