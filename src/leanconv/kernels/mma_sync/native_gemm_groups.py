"""Grouped convolution on tensor cores by mma.sync, for float16 and bfloat16 in NHWC, from sm_80 on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import (
    PartialConvolution,
    distinct_phases,
    mirrored_taps,
    single_phases,
)
from leanconv.kernels.common.layers import (
    FLOATS_16BIT,
    conv_arguments,
    has_wide_tensors,
    images_outermost,
    limits,
    view_constants,
)
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, blocks_that_fit, busy_cycles, launch_cycles, overlapped
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Channels of a unit, whose 16 bytes are a row of ldmatrix, and filters of an mma.
UNIT = 8
#: Registers of a thread that the fragments of filters may take, or the sums of their gradient; of a step's fragments;
#: and what a thread has beside these.
MOST_REGISTERS, OF_STEP, BESIDE = 150, 2, 52
#: Filters of a tile at most, where groups are not wider.
MOST_TILE = 128
#: Outputs that a tile has about, and the widest rows of them.
OUTPUTS, WIDEST = (64, 128, 256, 448), (16, 32, 64)


@dataclass(frozen=True)
class GroupsConfig(Config):
    """A tile has ``rows`` x ``columns`` outputs of an image and ``filters``: whole groups, or a part of one.

    Each of ``warps`` has ``blocks`` times eight of them. ``stages`` tiles of pixels are in shared memory at once.
    """

    filters: int
    blocks: int
    warps: int
    rows: int
    columns: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def channels(self, problem: ConvProblem) -> int:
        """Channels of the groups that a tile has filters of."""
        return max(1, self.filters // problem.group_k) * problem.group_c

    def pixels(self, problem: ConvProblem) -> tuple[int, int]:
        """Rows and columns of the input that a tile reads."""
        (sh, sw), (dh, dw) = problem.stride, problem.dilation
        return (self.rows - 1) * sh + (problem.r - 1) * dh + 1, (self.columns - 1) * sw + (problem.s - 1) * dw + 1

    def shared_bytes(self, problem: ConvProblem) -> int:
        """As kernels/mma_sync/group_pixels.cuh lays pixels out."""
        rows, columns = self.pixels(problem)
        pitch = 16 * (self.channels(problem) // UNIT | 1)
        stride = problem.stride[1]
        return self.stages * rows * stride * ceil_div(columns, stride) * pitch

    def tiles(self, problem: ConvProblem) -> tuple[int, int]:
        """Tiles of filters, and of outputs."""
        outputs = problem.n * ceil_div(problem.p, self.rows) * ceil_div(problem.q, self.columns)
        return ceil_div(problem.k, self.filters), outputs


@dataclass(frozen=True)
class GroupsSpeeds(Speeds):
    """Cycles of a multiprocessor, and shares of the memory's speed."""

    #: flops of mma.sync in a cycle, at most, and the share of the tensor cores' that is assumed elsewhere
    max_flops: float
    share: float
    #: times as long as their bytes that copies of pixels and stores of outputs take in shared memory
    copies: float
    stores: float
    #: of a tile: the latency of its copies, and of the first filters
    tile: float
    start: float
    #: times the bytes of a problem that memory takes, and times the sectors that tiles read and write
    memory: float
    cached: float
    #: share of the lesser of memory and the multiprocessors' work that adds to the greater
    lesser: float


def units_of(problem: ConvProblem) -> int:
    """Units of channels that eight filters read: those of their groups."""
    c, k = problem.group_c, problem.group_k
    return max(ceil_div(((b * 8 + 7) // k + 1) * c, UNIT) - b * 8 // k * c // UNIT for b in range(k))


def steps_of(problem: ConvProblem) -> int:
    """Products of 16 reduction elements that eight filters take."""
    return ceil_div(problem.taps * units_of(problem), 2)


@lru_cache(maxsize=64)
def output_tiles(problem: ConvProblem) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a tile: all, or an even share of them."""
    found = set()
    for columns in {ceil_div(problem.q, ceil_div(problem.q, widest)) for widest in WIDEST}:
        rows = {ceil_div(problem.p, ceil_div(problem.p, max(1, outputs // columns))) for outputs in OUTPUTS}
        found |= {(each, columns) for each in rows}
    return tuple(sorted(found))


@lru_cache(maxsize=64)
def filter_tiles(problem: ConvProblem, registers: int) -> tuple[tuple[int, int, int], ...]:
    """Filters of a tile, blocks of a warp, and warps that fit a problem's groups, where a step of a block takes so many
    ``registers``."""
    k, c, steps = problem.group_k, problem.group_c, steps_of(problem)
    found = []
    for blocks in (1, 2, 3, 4):
        shares = k % (8 * blocks) == 0
        if registers * steps * blocks > MOST_REGISTERS or (blocks > 1 and not shares and units_of(problem) > 1):
            continue
        for along in range(1, MOST_TILE // (8 * blocks) + 1):
            filters = 8 * blocks * along
            whole = filters % k == 0 and filters // k * c % UNIT == 0
            part = k % filters == 0 and c % UNIT == 0
            if (whole or part) and filters < problem.k + 8 * blocks:
                found += [(filters, blocks, along * times) for times in (1, 2, 4) if 4 <= along * times <= 8]
    return tuple(found)


def group_limits(problem: ConvProblem, target: Target, *ops: str) -> list[str]:
    """Why kernels of groups on tensor cores that compute ``ops`` cannot run ``problem`` on ``target``."""
    reasons = [*limits(problem, *ops, dtypes=FLOATS_16BIT), *images_outermost(problem)]
    if not target.warp_products:
        reasons.append(f"{target.arch} is older than sm_80, whose tensor cores multiply 16 x 8 x 16 float16")
    if problem.n < 1:
        reasons.append(f"n={problem.n}: there are no images")
    if problem.groups == 1:
        reasons.append("groups=1: it computes groups of few channels")
    for name, count, each in (("c", problem.c, problem.group_c), ("k", problem.k, problem.group_k)):
        if count % UNIT:
            reasons.append(f"{name}={count} is no multiple of {UNIT}: channels are multiplied by eights")
        elif each % 4:
            reasons.append(f"groups={problem.groups} of {name}={count} leaves {each} in a group, no multiple of 4")
    return reasons


def tile_limits(problem: ConvProblem, registers: int) -> list[str]:
    """Why no tile has whole groups, or a part of one, where a step takes so many ``registers``."""
    if filter_tiles(problem, registers):
        return []
    if (taken := registers * steps_of(problem)) > MOST_REGISTERS:
        what = f"filters of {problem.group_c} channels x {problem.window} take {taken} registers of a thread"
        return [f"{what}, and there are {MOST_REGISTERS}"]
    return [f"groups={problem.groups} of {problem.group_k} filters make no tile of up to {MOST_TILE}"]


def sectors(channels: int) -> int:
    """Bytes of the sectors that so many neighbouring elements of 16 bits lie in."""
    return 32 * ceil_div(channels, 16)


class NativeGemmGroups(TimedAlgorithm):
    """Direct grouped convolution and its input's gradient on tensor cores, 16-bit elements summed in float32; NHWC."""

    name = "native_gemm"
    strategy = "groups"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Chetlur et al., cuDNN (2014)"
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = group_limits(problem, target, "fprop", "dgrad")
        for phase in distinct_phases(problem) if not reasons else ():
            reasons += tile_limits(phase.problem, OF_STEP)
        return list(dict.fromkeys(reasons))

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, GroupsConfig]]:
        phases = distinct_phases(problem)
        if not phases:
            # A layer whose windows cover nothing but padding has a gradient of zeros, and nothing to tune.
            return [(0.0, GroupsConfig(8, 1, 4, 1, 16, 1, 1))]
        # the phase with the most taps decides
        return by_time((self._cycles(problem, phases, config, target), config)
                       for config in self._candidates(phases, target))  # fmt: skip

    def _candidates(self, phases: list[PartialConvolution], target: Target) -> Iterator[GroupsConfig]:
        first = phases[0].problem
        for filters, blocks, warps in filter_tiles(first, OF_STEP):
            registers = blocks * (2 * steps_of(first) + 6) + BESIDE
            for rows, columns in output_tiles(first):
                for stages in (1, 2):
                    whole = GroupsConfig(filters, blocks, warps, rows, columns, stages, 1)
                    shared = max(whole.shared_bytes(phase.problem) for phase in phases)
                    if shared <= target.shared_per_block:
                        fit = min(
                            blocks_that_fit(registers, whole.threads, target),
                            target.shared_per_multiprocessor // (shared + 1024),
                        )
                        yield GroupsConfig(filters, blocks, warps, rows, columns, stages, max(1, fit))

    def _cycles(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: GroupsConfig, target: Target
    ) -> float:
        speeds = GroupsSpeeds.of(target)
        flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
        time = moved = 0.0
        for phase in phases:
            forward, steps = phase.problem, steps_of(phase.problem)
            of_filters, of_outputs = config.tiles(forward)
            height, width = config.pixels(forward)
            read = 2 * height * width * config.channels(forward)
            written = 2 * config.rows * config.columns * config.filters
            m_tiles = ceil_div(config.rows * config.columns, 16)
            products = m_tiles * config.filters // UNIT * steps
            reads = products / (config.blocks if forward.group_k % (8 * config.blocks) == 0 else 1)
            shared = 4 * reads + (speeds.copies * read + speeds.stores * written) / 128
            each = max(shared, products * 4096 / flops)

            def resident(count: int, each: float = each) -> float:
                return count * each + speeds.tile

            busy = busy_cycles(of_filters * of_outputs, config.min_blocks, target, resident)
            # caches move whole sectors of 32 bytes; memory is read once
            tiles = of_filters * of_outputs
            cached = tiles * (sectors(config.channels(forward)) * height * width
                              + sectors(config.filters) * config.rows * config.columns)  # fmt: skip
            moved += phase.times * speeds.cached * cached
            time += phase.times * (busy + speeds.start + launch_cycles(target))
        memory = max(speeds.memory * problem.bytes, moved) / target.bytes_per_cycle
        return overlapped(time, memory, speeds.lesser) + launch_cycles(target)

    def order_of_sums(self, problem: ConvProblem, config: GroupsConfig) -> Hashable:
        """Nothing: an output's reduction is one chain. Where eight filters span groups, zeros lie in it elsewhere."""
        return config.filters if problem.group_c % UNIT or problem.group_k % UNIT else ()

    def plan(self, problem: ConvProblem, config: GroupsConfig, target: Target) -> Plan:
        launches = [self._launch(problem, phase, config, target) for phase in single_phases(problem)]
        return Plan((*launches, *input_gradient.zero_launches(problem)))

    def _launch(self, problem: ConvProblem, phase: PartialConvolution, config: GroupsConfig, target: Target) -> Launch:
        constants = view_constants(phase.problem, phase.view, has_wide_tensors(problem))
        mirrored = problem.op == "dgrad"
        constants += (("mirrored", mirrored), *(mirrored_taps(problem, phase) if mirrored else ()))
        of_filters, of_outputs = config.tiles(phase.problem)
        workers = max(1, target.multiprocessors * config.min_blocks // of_filters)
        grid = of_filters * min(of_outputs, workers)
        tuning = (*config.constants(), ("threads", config.threads))
        shared = config.shared_bytes(phase.problem)
        return self.launch(config, constants, conv_arguments(problem), grid, shared, tuning)
