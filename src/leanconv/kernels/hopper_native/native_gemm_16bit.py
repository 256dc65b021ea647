"""Implicit GEMM on tensor cores for float16 and bfloat16."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from leanconv.dtypes import item_bytes
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, single_parts
from leanconv.kernels.contract import (
    LAUNCH_CYCLES,
    Arithmetic,
    Config,
    TimedAlgorithm,
    by_time,
    ceil_div,
    has_wide_tensors,
    variant,
)
from leanconv.kernels.hopper_fp32.tensor_gemm import FLOPS_PER_CYCLE, REGISTERS, pixel_map, splits_of, wgmma_limits
from leanconv.kernels.simt.tiles import conv_arguments, gradient_limits, view_constants
from leanconv.options import Precision
from leanconv.plan import Launch, Plan, Target, TensorMap
from leanconv.problem import ConvProblem

#: Bytes of one tap's channels that a copy may bring: as many as a swizzle spans, and a product takes 32 of.
PIECE_BYTES = (128, 64, 32)
#: Stages of a ring, at least and at most.
LEAST_STAGES, MOST_STAGES = 3, 8
#: Sums of a thread that it may have where it adds to the output, without spilling registers.
MOST_ADDED = 128
#: Offsets of a filter tap that a copy takes.
MOST_REACH = 255


@dataclass(frozen=True)
class NarrowConfig(Config):
    """A tile has ``blocks`` x 64 pixels for each of ``warpgroups`` consumers, and ``filters``.

    A stage of the ring, which has ``stages``, holds ``pieces`` times ``piece`` channels of one filter tap. A cluster of
    ``split`` blocks shares a reduction.
    """

    #: bytes of an element
    item: ClassVar[int] = 2
    #: bytes of a row of a stage, at most
    most_bytes: ClassVar[int] = 192

    warpgroups: int
    blocks: int
    filters: int
    piece: int
    pieces: int
    stages: int
    consumer_registers: int
    producer_registers: int
    split: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and one warpgroup of producers."""
        return 128 * (self.warpgroups + 1)

    @property
    def pixels(self) -> int:
        """Output pixels of a tile."""
        return 64 * self.warpgroups * self.blocks

    @property
    def sums(self) -> int:
        """Sums of a consumer's thread."""
        return self.blocks * self.filters // 2

    @property
    def depth(self) -> int:
        """Reduction elements of a stage."""
        return self.piece * self.pieces

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        return self.item * self.depth * (self.pixels + self.filters)

    @property
    def most_share(self) -> int:
        """Sums that a thread may gather from the blocks of a cluster without spilling registers."""
        return 32

    @property
    def ring_bytes(self) -> int:
        """Bytes of all stages."""
        return self.stages * self.stage_bytes

    @property
    def fixed_bytes(self) -> int:
        """Shared memory of a block beside its stages: 16 pixels of a part of the filters for each warp of consumers."""
        return 4 * self.warpgroups * 16 * 2 * (64 if self.filters // self.split % 64 == 0 else 32)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, with two barriers a stage."""
        return self.ring_bytes + self.fixed_bytes + 16 * self.stages


#: A tile: warpgroups, blocks of 64 pixels of each, filters.
Tile = tuple[int, int, int]
#: The TFLOP/s of each tile's stages, fitted together with the cycles below to 14 layers (burst, H200), 950 at most. The
#: last was not measured and has the figure of the one before it.
TILES: dict[Tile, float] = {
    (2, 1, 256): 865,
    (2, 2, 192): 910,
    (2, 1, 192): 950,
    (2, 2, 128): 865,
    (3, 1, 128): 905,
    (2, 1, 128): 925,
    (2, 2, 96): 850,
    (2, 2, 64): 695,
    (2, 1, 64): 950,
    (2, 2, 32): 630,
    (2, 1, 32): 630,
}


def _piece(channels: int, groups: int, item: int) -> int:
    """Channels of a tap that a copy brings: as many as leave the fewest zeros; 0 where rows would mix groups."""
    pieces = [size // item for size in PIECE_BYTES]
    fitting = [piece for piece in pieces if groups == 1 or channels % piece == 0]
    return min(fitting, key=lambda piece: (ceil_div(channels, piece) * piece, -piece), default=0)


@lru_cache(maxsize=256)
def _config(
    kind: type[NarrowConfig], tile: Tile, piece: int, copies: tuple[int, ...], room: int
) -> NarrowConfig | None:
    """The configuration of a tile; None where its stages do not fit.

    ``copies`` are those of each part of a problem, of which a stage holds a divisor.
    """
    warpgroups, blocks, filters = tile
    for pieces in range(max(1, kind.most_bytes // (kind.item * piece)), 0, -1):
        config = kind(warpgroups, blocks, filters, piece, pieces, 1, *REGISTERS[warpgroups, True])
        stages = (room - config.fixed_bytes) // (config.stage_bytes + 16)
        if stages >= LEAST_STAGES and all(number % pieces == 0 for number in copies):
            return replace(config, stages=min(stages, MOST_STAGES))
    return None


def _with_splits(config: NarrowConfig, parts: list[PartialConvolution], target: Target) -> Iterator[NarrowConfig]:
    """The configuration, and with the reduction split over a cluster where the ring takes the sums of a tile."""
    yield config
    tiles = max(_tiles(part, config) for part in parts)
    stages = min(_stages(part.problem, config) for part in parts)
    if 4 * config.pixels * config.filters <= config.ring_bytes:
        for split in splits_of(0 if parts[0].problem.batch_invariant else tiles, stages, target):
            if config.filters % (32 * split) == 0 and config.sums // split <= config.most_share:
                yield variant(config, split=split)


def _stages(problem: ConvProblem, config: NarrowConfig) -> int:
    """Stages of the whole reduction."""
    return _copies(problem, config.piece) // config.pieces


def _copies(problem: ConvProblem, piece: int) -> int:
    """Copies of pixels that the reduction takes."""
    return problem.r * problem.s * ceil_div(problem.group_c, piece)


def filter_map(part: PartialConvolution, config: NarrowConfig, role: str) -> TensorMap:
    """How copies walk over the filters: ``piece`` channels of one tap of as many filters as a tile has.

    The filters of a part of a gradient lie behind those of the parts before: so many rows of channels further, which
    the coordinate of the tap counts too.
    """
    problem = part.problem
    taps, row = problem.r * problem.s, item_bytes(problem.dtype) * problem.group_c
    return TensorMap(
        role=role,
        element=problem.dtype,
        shape=(problem.group_c, part.view.first_weight // problem.group_c + taps, problem.k),
        strides=(row, row * taps),
        box=(config.piece, 1, config.filters),
        swizzle=config.item * config.piece,
    )


def _tiles(part: PartialConvolution, config: NarrowConfig) -> int:
    """Tiles of a launch."""
    problem = part.problem
    return ceil_div(part.pixels, config.pixels) * ceil_div(problem.group_k, config.filters) * problem.groups


class NativeGemm16bit(TimedAlgorithm):
    """Direct convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NHWC.

    Nothing is prepared but the rearranged filters of a gradient.
    """

    name = "native_gemm"
    strategy = "16bit"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Chetlur et al., cuDNN (2014)"
    tier: ClassVar[Precision] = "fp32"
    solves = "conv2d"
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    kind: ClassVar[type[NarrowConfig]] = NarrowConfig
    tiles: ClassVar[dict[Tile, float]] = TILES
    #: cycles of a tile beside its stages, before the first of a launch, and of the sum over the blocks of a cluster
    fixed_cycles: ClassVar[tuple[float, float, float]] = (3300, 10700, 6000)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*gradient_limits(problem, self.dtypes), *wgmma_limits(target)]
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
        if not (piece := _piece(read, problem.groups, item)):
            least = PIECE_BYTES[-1] // item
            return [f"groups={problem.groups} leaves {read} {name} in a group, no multiple of {least}"]
        for part in (each.problem for each in single_parts(problem)):
            reach = max((part.r - 1) * part.dilation[0], (part.s - 1) * part.dilation[1])
            if reach > MOST_REACH:
                return [f"a filter reaches {reach} pixels, and tensor copies {MOST_REACH}"]
            if broken := pixel_map(part, 64, piece).why_not():
                return [f"no tensor map describes the pixels: {broken[0]}"]
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def prepared_bytes(self, problem: ConvProblem) -> int:
        return input_gradient.prepared_bytes(problem) if problem.op == "dgrad" else 0

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, NarrowConfig]]:
        parts = single_parts(problem)
        if not parts:
            # A layer whose windows see nothing but padding has a gradient of zeros, and nothing to tune.
            config = self._known(next(iter(self.tiles)), PIECE_BYTES[0] // self.kind.item, (), target)
            return [(0.0, config)] if config else []
        piece = _piece(parts[0].problem.group_c, problem.groups, self.kind.item)
        copies = tuple(dict.fromkeys(_copies(part.problem, piece) for part in parts))
        known = (self._known(tile, piece, copies, target) for tile in self.tiles)
        return by_time(
            (self._cycles(problem, parts, config, target), config)
            for whole in known
            if whole and (not problem.accumulate or whole.sums <= MOST_ADDED)
            for config in _with_splits(whole, parts, target)
        )

    def _known(self, tile: Tile, piece: int, copies: tuple[int, ...], target: Target) -> NarrowConfig | None:
        return _config(self.kind, tile, piece, copies, target.shared_per_block)  # type: ignore[arg-type]

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: NarrowConfig, target: Target
    ) -> float:
        speed = self.tiles[config.warpgroups, config.blocks, config.filters] * FLOPS_PER_CYCLE
        of_tile, before, of_split = self.fixed_cycles
        time = 0.0
        for part in parts:
            stages = ceil_div(_stages(part.problem, config), config.split)
            rounds = ceil_div(_tiles(part, config) * config.split, target.multiprocessors)
            each = stages * 2 * config.pixels * config.filters * config.depth / speed
            time += rounds * (each + of_tile) + before + (of_split if config.split > 1 else 0)
        memory = problem.bytes / target.bytes_per_cycle
        # of the shorter one an eighth is not hidden behind the longer
        return max(time, memory) + min(time, memory) / 8 + LAUNCH_CYCLES

    def order_of_sums(self, problem: ConvProblem, config: NarrowConfig) -> Hashable:
        return (config.piece, config.split, config.pieces) if config.split > 1 else config.piece

    def plan(self, problem: ConvProblem, config: NarrowConfig, target: Target) -> Plan:
        gradient, wide, parts = problem.op == "dgrad", has_wide_tensors(problem), single_parts(problem)
        launches = [self._launch(problem, part, config, wide, target) for part in parts]
        zeros = input_gradient.zero_launch(problem) if gradient and not problem.accumulate else None
        return Plan(
            (*launches, *([zeros] if zeros else [])),
            prepare=(input_gradient.filter_launch(problem),) if gradient and parts else (),
            prepared_bytes=self.prepared_bytes(problem),
        )

    def _launch(
        self, problem: ConvProblem, part: PartialConvolution, config: NarrowConfig, wide: bool, target: Target
    ) -> Launch:
        """The launch that computes a part of ``problem``."""
        filters = "prepared" if self.prepared_bytes(problem) else "w"
        pixels = replace(pixel_map(part.problem, config.pixels, config.piece), role=problem.operands[0].role)
        tiles = _tiles(part, config)
        return Launch(
            header=f"kernels/hopper_native/{self.stem}.cuh",
            function=f"leanconv::{self.stem}",
            problem=view_constants(part.problem, part.view, wide),
            tuning=config.constants(),
            arguments=(pixels, filter_map(part, config, filters), *conv_arguments(problem)[2:]),
            grid=tiles * config.split if config.split > 1 else min(tiles, target.multiprocessors),
            block=config.threads,
            shared_bytes=config.shared_bytes,
            cluster=config.split,
        )
