"""Implicit GEMM on tensor cores for float16 and bfloat16 in NHWC."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import ClassVar, cast

from leanconv.dtypes import item_bytes
from leanconv.kernels.common import input_gradient, layers
from leanconv.kernels.common.input_gradient import PartialConvolution, distinct_phases, single_phases
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, limits, view_constants, wgmma_limits
from leanconv.kernels.common.tensor_core_gemm import (
    FLOPS_PER_CYCLE,
    MAX_REACH,
    REGISTERS,
    pixel_map,
    reach_of,
)
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, clusters_at_once, moved_bytes, overlapped, residual_cycles
from leanconv.options import Precision
from leanconv.plan import Constants, Launch, Plan, Target, TensorMap
from leanconv.problem import ConvProblem

#: CTAs of a cluster that share a reduction, and bytes of a pixel's filters that each of them stores at least.
SPLITS, LEAST_STORED = (2, 4, 8, 16), 32
#: Bytes of one tap's channels that a copy may bring: as many as a swizzle spans, and a wgmma takes 32 of.
BLOCK_BYTES = (128, 64, 32)
#: Channels with the zeros of the last block, over the fewest that there can be: blocks with more are not tried.
MAX_ZEROS = 1.34
#: Stages of a ring, at least and at most.
MIN_STAGES, MAX_STAGES = 3, 8
#: What a row of a gradient's filters that is partly outside the array costs of what one of other filters does.
LESS_OUTSIDE = 0.4
#: Phases of a gradient that one launch may compute, and the numbers in which they differ.
MAX_PHASES = 4
OF_PHASES = (
    "r", "s", "p", "q", "pad_top", "pad_left", "first_p", "first_q", "last_row", "last_column", "first_weight",
)  # fmt: skip
#: Sums of a thread that it may have, without spilling registers, where it adds to the output, or a bias in a launch of
#: several phases.
MAX_ADDED = 128


@dataclass(frozen=True)
class NativeConfig(Config):
    """A tile has ``m_tiles`` x 64 pixels for each of ``warpgroups`` consumers, and ``filters``.

    A stage of the ring, which has ``stages``, holds ``stage_blocks`` times ``channel_block`` channels of one filter
    tap. A cluster of ``split`` CTAs shares a reduction.
    """

    #: bytes of an element
    item: ClassVar[int] = 2
    #: bytes of a row of a stage, at most
    max_bytes: ClassVar[int] = 192

    warpgroups: int
    m_tiles: int
    filters: int
    channel_block: int
    stage_blocks: int
    stages: int
    consumer_registers: int
    producer_registers: int
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA: the consumers, and one warpgroup of producers."""
        return 128 * (self.warpgroups + 1)

    @property
    def pixels(self) -> int:
        return 64 * self.warpgroups * self.m_tiles

    @property
    def sums(self) -> int:
        return self.m_tiles * self.filters // 2

    @property
    def depth(self) -> int:
        return self.channel_block * self.stage_blocks

    @property
    def stage_bytes(self) -> int:
        return self.item * self.depth * (self.pixels + self.filters)

    @property
    def max_share(self) -> int:
        """Sums that a thread may gather from the CTAs of a cluster without spilling registers."""
        return 32

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes in which the consumers' warps transpose outputs: 16 pixels x 128 bytes of filters each, or 64 or 32."""
        return 4 * self.warpgroups * 16 * gcd(self.filters // self.split * self.item, 128)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, with two barriers a stage."""
        return self.ring_bytes + self.output_bytes + 16 * self.stages


#: A tile: warpgroups, m64 tiles of each, filters.
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = (
    (2, 1, 256), (2, 2, 192), (2, 1, 192), (2, 2, 128), (3, 1, 128), (2, 1, 128), (2, 2, 96), (2, 2, 64), (2, 1, 64),
    (2, 2, 32), (2, 1, 32),
)  # fmt: skip


@dataclass(frozen=True)
class NativeSpeeds(Speeds):
    """Speeds of tiles are fitted together to 14 layers (burst, H200), so that tiles can be compared. What all tiles
    share is fitted to 157 whole calls of committed results, most of which are predicted within a tenth, and to 132
    times of 22 layers of one image, in six configurations each (explored, H200, d3aced4d)."""

    #: TFLOP/s of each tile's stages, 950 at most; the last was not measured and has the figure of the one before it
    tiles: tuple[float, ...]
    #: cycles of a tile beside its stages, and of each output that a CTA stores
    tile: float
    output: float
    #: of each sum of a tile that the CTAs of a cluster add up
    split: float
    #: of a launch beside its tiles, and of one that prepares filters beside their bytes
    first: float
    packing: float
    #: of an output where filters are no whole 16 bytes, so that each is stored by itself. Explored (H200, 7470b3a5): of
    #: 230 and 255 filters 1.07 and more, of 21 0.5; with this what is chosen is within 3 % of the quicker strategy
    single: float
    #: that copying a row of a stage takes at least; a row is a channel block of a pixel or of a filter
    row: float
    #: and more for one of filters that is partly outside the array
    partly: float
    #: bytes that all multiprocessors together copy in a cycle: asked of volumes, whose reductions are long
    copied_per_cycle: float
    #: how much longer stages take where channels are in groups, which lie apart in memory
    groups: float
    #: the share of the shorter of computing and memory that the longer does not hide
    not_hidden: float
    #: the share of the memory's speed at which residuals come
    residual: float


def channel_blocks(channels: int, groups: int, item: int) -> list[int]:
    """Channels of a tap that a copy may bring: few copies with zeros at the end, or more with fewer of them. None where
    rows would mix groups."""
    blocks = [size // item for size in BLOCK_BYTES]
    if groups > 1:
        return [block for block in blocks if channels % block == 0][:1]
    multiplied = {block: ceil_div(channels, block) * block for block in reversed(blocks)}
    largest = {count: block for block, count in multiplied.items() if count <= MAX_ZEROS * min(multiplied.values())}
    return list(largest.values())


@lru_cache(maxsize=256)
def _config(
    kind: type[NativeConfig], tile: Tile, block: int, copies: tuple[int, ...], room: int
) -> NativeConfig | None:
    """The configuration of a tile; None where its stages do not fit.

    ``copies`` are those of each phase of a problem, of which a stage holds a divisor.
    """
    for stage_blocks in range(max(1, kind.max_bytes // (kind.item * block)), 0, -1):
        config = kind(*tile, block, stage_blocks, 1, *REGISTERS[tile[0], True])
        stages = (room - config.output_bytes) // (config.stage_bytes + 16)
        if stages >= MIN_STAGES and all(number % stage_blocks == 0 for number in copies):
            return replace(config, stages=min(stages, MAX_STAGES))
    return None


def _with_splits(
    config: NativeConfig, phases: list[PartialConvolution], target: Target, together: bool
) -> Iterator[NativeConfig]:
    """The configuration, and with the reduction split over a cluster where tiles leave multiprocessors idle.

    The ring takes the sums of a tile; each CTA has stages, two at least but the last. ``together``: one launch has the
    tiles of all phases.
    """
    yield config
    each_phase = [_tiles(phase, config) * (phase.times if together else 1) for phase in phases]
    tiles = 0 if phases[0].problem.batch_invariant else sum(each_phase) if together else max(each_phase)
    stages = [_stages(phase.problem, config) for phase in phases]
    for split in SPLITS if 4 * config.pixels * config.filters <= config.ring_bytes else ():
        if (
            tiles * split <= target.multiprocessors
            and split <= target.most_in_cluster
            and config.filters * config.item % (LEAST_STORED * split) == 0
            and config.sums // split <= config.max_share
            and ceil_div(min(stages), split) >= 2
            and all(ceil_div(each, split) * (split - 1) < each for each in stages)
        ):
            yield variant(config, split=split)


def _copies(problem: ConvProblem, block: int) -> int:
    """Copies of pixels that the reduction takes."""
    return problem.taps * ceil_div(problem.group_c, block)


def _stages(problem: ConvProblem, config: NativeConfig) -> int:
    """Stages of the whole reduction."""
    return _copies(problem, config.channel_block) // config.stage_blocks


def _tiles(phase: PartialConvolution, config: NativeConfig) -> int:
    problem = phase.problem
    return ceil_div(phase.pixels, config.pixels) * ceil_div(problem.group_k, config.filters) * problem.groups


def partly_outside(layer: ConvProblem, block: int, filters: int, mirrored: bool) -> float:
    """Rows of a tile's filters, of a channel block of one tap, that are partly outside the array: in the mean of all
    blocks, and as many as cost as much."""
    if mirrored:
        # as they lie in the layer: rows of 64 or 32 of them
        return LESS_OUTSIDE * block if layer.group_k % min(filters, 64) else 0.0
    return filters / ceil_div(layer.group_c, block) if layer.group_c % block else 0.0


def filter_map(phase: PartialConvolution, block: int, filters: int, role: str, suffix: str) -> TensorMap:
    """How copies walk over the filters: ``block`` channels of one tap of so many filters.

    The filters of a gradient's phase lie behind those of the phases before: so many rows of channels further, which
    the coordinate of the tap counts too.
    """
    problem = phase.problem
    taps, item = problem.taps, item_bytes(problem.dtype)
    row = item * problem.group_c
    return TensorMap(
        role=role,
        element=problem.dtype,
        shape=(problem.group_c, phase.view.first_weight // problem.group_c + taps, problem.k),
        strides=(row, row * taps),
        box=(block, 1, filters),
        swizzle=item * block,
        suffix=suffix,
    )


def mirrored_map(problem: ConvProblem, block: int, filters: int) -> TensorMap:
    """The same over the filters of the layer whose gradient ``problem`` is: its channels, of which as many as a row of
    a box has, are filters here, and its filters channels."""
    item = item_bytes(problem.dtype)
    row, columns = item * problem.group_c, 64 if filters % 64 == 0 else 32
    return TensorMap(
        role="w",
        element=problem.dtype,
        shape=(problem.group_c, problem.taps, problem.k),
        strides=(row, row * problem.taps),
        box=(columns, 1, block),
        swizzle=item * columns,
    )


class NativeGemm16bit(TimedAlgorithm):
    """Direct convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NHWC."""

    name = "native_gemm"
    strategy = "16bit"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Chetlur et al., cuDNN (2014)"
    precision: ClassVar[Precision] = "fp32"
    volumes = True
    writes_phases = True
    dtypes: ClassVar[tuple[str, ...]] = layers.FLOATS_16BIT
    kind: ClassVar[type[NativeConfig]] = NativeConfig
    tiles: ClassVar[tuple[Tile, ...]] = TILES
    speeds: ClassVar[type[NativeSpeeds]] = NativeSpeeds

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "fprop", "dgrad", dtypes=self.dtypes), *wgmma_limits(target)]
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC: tensor copies bring whole rows of channels")
        if problem.n < 1:
            reasons.append(f"n={problem.n}: there are no images")
        if reasons:
            return reasons
        read, name = (problem.group_k, "filters") if problem.op == "dgrad" else (problem.group_c, "channels")
        item = self.kind.item
        if read * item % 16:
            return [f"{read} {name} of {8 * item} bits are no multiple of 16 bytes, which tensor copies require"]
        if not (blocks := channel_blocks(read, problem.groups, item)):
            least = BLOCK_BYTES[-1] // item
            return [f"groups={problem.groups} leaves {read} {name} in a group, no multiple of {least}"]
        for each in distinct_phases(problem):
            phase, most = each.problem, MAX_REACH[each.volume]
            if (reach := reach_of(phase)) > most:
                return [f"a filter reaches {reach} pixels, and tensor copies {most}"]
            if broken := pixel_map(phase, 64, blocks[0], each.volume).why_not():
                return [f"no tensor map describes the pixels: {broken[0]}"]
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def is_mirrored(self, problem: ConvProblem) -> bool:
        """Whether a gradient reads the layer's filters as they lie: the tensor core takes 16 bits MN-major too, and
        copies bring rows of whole 16 bytes."""
        return problem.op == "dgrad" and self.kind.item == 2 and problem.group_c * self.kind.item % 16 == 0

    def _is_rearranged(self, problem: ConvProblem) -> bool:
        return problem.op == "dgrad" and not self.is_mirrored(problem)

    def _joins_phases(self, problem: ConvProblem) -> bool:
        """Whether the kernel can compute several phases of a gradient in a launch: those that read the layer's filters
        as they lie."""
        return self.is_mirrored(problem)

    def _in_one_launch(self, problem: ConvProblem) -> bool:
        """Whether one launch computes all phases of a gradient."""
        count = len(single_phases(problem)) if self._joins_phases(problem) and not problem.is_volume else 1
        return 1 < count <= MAX_PHASES

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return input_gradient.prepared_bytes(problem) if self._is_rearranged(problem) else 0

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, NativeConfig]]:
        phases, kind, room = distinct_phases(problem), cast(Hashable, self.kind), target.shared_per_block
        if not phases:
            # A layer whose windows cover nothing but padding has a gradient of zeros, and nothing to tune.
            config = _config(kind, self.tiles[0], BLOCK_BYTES[0] // self.kind.item, (), room)
            return [(0.0, config)] if config else []
        blocks = channel_blocks(phases[0].problem.group_c, problem.groups, self.kind.item)
        copies = {block: tuple(dict.fromkeys(_copies(phase.problem, block) for phase in phases)) for block in blocks}
        known = (_config(kind, tile, block, copies[block], room) for tile in self.tiles for block in blocks)
        together = self._in_one_launch(problem)
        held = problem.accumulate or problem.add or (problem.bias and together)
        return by_time(
            (self._cycles(problem, phases, config, target), config)
            for whole in known
            if whole and (not held or whole.sums <= MAX_ADDED)
            for split in _with_splits(whole, phases, target, together)
            for config in self._ways(problem, split, room)
        )

    def _ways(self, problem: ConvProblem, config: NativeConfig, room: int) -> Iterable[NativeConfig]:
        """A configuration in each way in which filters may come to the tensor core, in ``room`` bytes."""
        return (config,)

    def _stage_cycles(self, config: NativeConfig, speeds: NativeSpeeds, partly: float) -> float:
        """Cycles of one stage of a tile: of computing, or of copying its rows. So many of a channel block's rows are
        partly outside the array."""
        tile = config.warpgroups, config.m_tiles, config.filters
        speed = speeds.tiles[self.tiles.index(tile)] * FLOPS_PER_CYCLE
        rows = speeds.row * (config.pixels + config.filters) + speeds.partly * partly
        return max(2 * config.pixels * config.filters * config.depth / speed, config.stage_blocks * rows)

    def _cycles(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: NativeConfig, target: Target
    ) -> float:
        speeds = self.speeds.of(target)
        outside = partly_outside(phases[0].problem, config.channel_block, config.filters, self.is_mirrored(problem))
        of_stage = self._stage_cycles(config, speeds, outside) * (speeds.groups if problem.groups > 1 else 1)
        filters, outputs = phases[0].problem.group_k, config.pixels * config.filters
        single = config.pixels * min(config.filters, filters) if filters * config.item % 16 else 0
        of_tile = speeds.tile + speeds.output * outputs / config.split + speeds.single * single
        together = self._in_one_launch(problem)
        time, before, launches = 0.0, 0, 1 if together else sum(phase.times for phase in phases)
        every = sum(phase.times * _tiles(phase, config) for phase in phases)
        for phase in phases:
            stages, tiles = _stages(phase.problem, config), _tiles(phase, config)
            rounds = ceil_div(tiles * config.split, target.multiprocessors)
            if together:
                # those that begin with a tile of this phase; CTAs take turns over the tiles of all
                until = before + phase.times * tiles * config.split
                rounds = ceil_div(until, target.multiprocessors) - ceil_div(before, target.multiprocessors)
                before = until
            computed = rounds * (ceil_div(stages, config.split) * of_stage + of_tile)
            if phase.volume:
                computed = max(computed, tiles * stages * config.stage_bytes / speeds.copied_per_cycle)
            clusters = every if together else tiles
            if config.split > (1 if phase.volume else 2) and clusters > clusters_at_once(config.split, 1, target):
                # clusters wait for others. Explored (H200, 6f49aa5): 32 of 4 CTAs and 16 of 8 do, 66 of 2 do not
                computed *= 2
            added = speeds.split * outputs if config.split > 1 and rounds else 0
            time += (1 if together else phase.times) * (computed + added)
        packing = speeds.packing + 2 * self.prepared_bytes(problem, config) / target.bytes_per_cycle
        time = overlapped(time, moved_bytes(problem) / target.bytes_per_cycle, speeds.not_hidden)
        time += residual_cycles(problem, speeds.residual, target)
        return time + launches * speeds.first + self._packings(problem, config) * packing

    def _packings(self, problem: ConvProblem, config: NativeConfig) -> int:
        """Launches that prepare filters."""
        return int(self._is_rearranged(problem))

    def order_of_sums(self, problem: ConvProblem, config: NativeConfig) -> Hashable:
        block = config.channel_block
        return (block, config.split, config.stage_blocks) if config.split > 1 else block

    def plan(self, problem: ConvProblem, config: NativeConfig, target: Target) -> Plan:
        phases = single_phases(problem)
        if self._in_one_launch(problem):
            launches = [self._launch(problem, phases, config, target)]
        else:
            launches = [self._launch(problem, [phase], config, target) for phase in phases]
        return Plan(
            (*launches, *input_gradient.zero_launches(problem)),
            prepare=self._preparing(problem, config) if phases else (),
            prepared_bytes=self.prepared_bytes(problem, config),
        )

    def _preparing(self, problem: ConvProblem, config: NativeConfig) -> tuple[Launch, ...]:
        """The launches that prepare filters of a problem with phases."""
        return (input_gradient.filter_launch(problem),) if self._is_rearranged(problem) else ()

    def _launch(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: NativeConfig, target: Target
    ) -> Launch:
        """A launch that computes one phase, or several."""
        phase, mirrored, role = phases[0], self.is_mirrored(problem), problem.operands[0].role
        maps = [
            replace(
                pixel_map(each.problem, config.pixels, config.channel_block, each.volume),
                role=role, suffix=str(number or ""),
            )
            for number, each in enumerate(phases)
        ]  # fmt: skip
        read = "prepared" if self.prepared_bytes(problem, config) else "w"
        block, width = config.channel_block, config.filters
        filters = [
            mirrored_map(problem, block, width)
            if mirrored
            else filter_map(each, block, width, read, f"map{number or ''}")
            for number, each in enumerate(phases[:1] if mirrored else phases)
        ]
        constants = self.constants(problem, phase)
        if len(phases) > 1:
            every = [
                dict((*self.constants(problem, each), *input_gradient.mirrored_taps(problem, each))) for each in phases
            ]
            constants += tuple(
                (f"phase_{name}", f"leanconv::OfPhases<{', '.join(str(each[name]) for each in every)}>")
                for name in OF_PHASES
            )
        at = config.ring_bytes + config.output_bytes
        tuning = (*config.constants(), ("mirrored", mirrored), ("copied_filters", width), ("barriers_at", at))
        tiles = sum(_tiles(each, config) for each in phases)
        grid = tiles * config.split if config.split > 1 else min(tiles, target.multiprocessors)
        arguments = (*maps, *filters, *conv_arguments(problem)[2:])
        return self.launch(config, constants, arguments, grid, config.shared_bytes, tuning)

    def constants(self, problem: ConvProblem, phase: PartialConvolution) -> Constants:
        """The constants of ``Problem`` for a phase."""
        constants = view_constants(phase.problem, phase.view, has_wide_tensors(problem))
        if not self.is_mirrored(problem):
            return constants
        slices: Constants = (("last_slice", 0), ("apart_d", 0))
        taps = dict((*slices, *input_gradient.mirrored_taps(problem, phase)))
        return (*constants, *taps.items())
