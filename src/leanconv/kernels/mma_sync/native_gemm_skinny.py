"""1x1 convolution of few channels and filters on tensor cores, float16 and bfloat16 in NHWC: tall and skinny matrices
that bulk copies bring and store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache

from leanconv.kernels.common.input_gradient import PartialConvolution, single_phases
from leanconv.kernels.common.layers import (
    FLOATS_16BIT,
    conv_arguments,
    has_wide_tensors,
    limits,
    mma_sync_limits,
    view_constants,
)
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, moved_bytes, overlapped, residual_cycles
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Channels and filters, at least and at most.
LEAST, MOST = 16, 256
#: A tile: warps, 16 pixels of each, and the CTAs of a multiprocessor for which registers are shared out.
TILES = ((4, 2, 4), (4, 1, 4), (8, 2, 2), (8, 1, 2))
#: Tiles of pixels in shared memory: one is multiplied while others come.
STAGES = (2, 3)
#: Elements of 16 bytes.
UNIT = 8


@dataclass(frozen=True)
class SkinnyConfig(Config):
    """A tile has 16 x ``m_tiles`` pixels for each of ``warps``, and all filters. ``stages`` of pixels are in shared
    memory at once."""

    warps: int
    m_tiles: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def pixels(self) -> int:
        return 16 * self.m_tiles * self.warps

    @property
    def order(self) -> Hashable:
        return ()

    def barriers_at(self, layer: ConvProblem) -> int:
        """Bytes of shared memory before the barriers: pixels, outputs or filters, and filters as lanes read them."""
        fragments = ceil_div(layer.c, 16) * ceil_div(layer.k, 16) * 512
        return 2 * (self.stages * self.pixels * layer.c + max(self.pixels, layer.c) * layer.k) + fragments

    def shared_bytes(self, layer: ConvProblem) -> int:
        return self.barriers_at(layer) + 8 * (self.stages + 1)


@dataclass(frozen=True)
class SkinnySpeeds(Speeds):
    """Cycles of a multiprocessor. Fitted to 137 times of 23 layers (explored, H200, e507758b with this kernel)."""

    #: a product of 16 x 8 x 16; a warp's reads and writes of shared memory that meet each bank once
    product: float
    read: float
    written: float
    #: a tile beside all that, where its CTA is alone; 16 x 16 weights that a CTA puts in order before its tiles
    tile: float
    weights: float
    #: a call
    start: float
    #: the share of the lesser of computing and memory that the greater does not hide
    not_hidden: float
    #: the share of the memory's speed at which residuals come
    residual: float


class NativeGemmSkinny(TimedAlgorithm):
    """1x1 convolution of few channels and filters, and its input's gradient, float16 or bfloat16 summed in float32."""

    name = "native_gemm"
    strategy = "skinny"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018)"
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "fprop", "dgrad", dtypes=FLOATS_16BIT), *mma_sync_limits(target)]
        if not target.clusters:
            reasons.append(f"{target.arch} has no bulk copies, which are of sm_90 and newer")
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC: neighbouring pixels are no run of memory")
        if (problem.r, problem.s) != (1, 1):
            reasons.append(f"filters of {problem.r}x{problem.s} taps are not 1x1")
        if problem.stride != (1, 1) or any(problem.padding):
            reasons.append(
                f"stride={problem.stride}, padding={problem.padding}: outputs are not the pixels' neighbours"
            )
        if problem.groups > 1:
            reasons.append(f"groups={problem.groups}: it computes layers of one group")
        if problem.n < 1:
            reasons.append(f"n={problem.n}: there are no images")
        for name, count in (("channels", problem.c), ("filters", problem.k)):
            if not LEAST <= count <= MOST or count % 2:
                reasons.append(f"{count} {name} are not an even number from {LEAST} to {MOST}")
            elif problem.h * problem.w * count % UNIT:
                reasons.append(f"an image of {count} {name} is no multiple of 16 bytes, which bulk copies bring")
        if not reasons and next(_configs(_layer(problem).problem, target), None) is None:
            reasons.append("pixels, outputs and filters of a tile do not fit into shared memory")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, SkinnyConfig]]:
        layer = _layer(problem).problem
        return by_time((_cycles(problem, layer, config, target), config) for config in _configs(layer, target))

    def plan(self, problem: ConvProblem, config: SkinnyConfig, target: Target) -> Plan:
        part = _layer(problem)
        layer, constants = part.problem, view_constants(part.problem, part.view, has_wide_tensors(problem))
        tuning = (
            *config.constants(),
            ("mirrored", problem.op == "dgrad"),
            ("barriers_at", config.barriers_at(layer)),
        )
        grid = min(_tiles(layer, config), config.min_blocks * target.multiprocessors)
        shared = config.shared_bytes(layer)
        return Plan((self.launch(config, constants, conv_arguments(problem, filters="w"), grid, shared, tuning),))


def _layer(problem: ConvProblem) -> PartialConvolution:
    """The convolution that is computed: of a gradient the one that has its filters as channels."""
    (part,) = single_phases(problem)
    return part


def _configs(layer: ConvProblem, target: Target) -> Iterator[SkinnyConfig]:
    for warps, m_tiles, blocks in TILES:
        for stages in STAGES:
            shared = SkinnyConfig(warps, m_tiles, stages, 1).shared_bytes(layer)
            # each CTA takes a KiB more than it asks for
            fit = min(blocks, target.shared_per_multiprocessor // (shared + 1024))
            if fit and shared <= target.shared_per_block:
                yield SkinnyConfig(warps, m_tiles, stages, fit)


def _tiles(layer: ConvProblem, config: SkinnyConfig) -> int:
    return ceil_div(layer.n * layer.p * layer.q, config.pixels)


@cache
def _conflicts(row: int) -> int:
    """How many of the words that a warp reads or writes lie in one bank: four neighbours of eight rows of so many
    elements."""
    words = {(eight * row + 2 * pair) // 2 for eight in range(UNIT) for pair in range(4)}
    return max(Counter(word % 32 for word in words).values())


def _cycles(problem: ConvProblem, layer: ConvProblem, config: SkinnyConfig, target: Target) -> float:
    speeds = SkinnySpeeds.of(target)
    steps, eights, sixteens = ceil_div(layer.c, 16), ceil_div(layer.k, UNIT), config.pixels // 16
    reads = sixteens * steps * 4 * ceil_div(eights, 8) * _conflicts(layer.c)
    reads += config.warps * steps * ceil_div(eights, 2) * 4
    writes = sixteens * eights * 2 * _conflicts(layer.k) * (2 if problem.add or problem.accumulate else 1)
    products = sixteens * eights * steps * speeds.product
    of_tile = max(products, speeds.read * reads + speeds.written * writes) + speeds.tile / config.min_blocks
    tiles = _tiles(layer, config)
    at_once = min(config.min_blocks, ceil_div(tiles, target.multiprocessors))
    computed = ceil_div(tiles, at_once * target.multiprocessors) * at_once * of_tile
    computed += steps * ceil_div(eights, 2) * speeds.weights
    time = overlapped(computed, moved_bytes(problem) / target.bytes_per_cycle, speeds.not_hidden)
    return time + residual_cycles(problem, speeds.residual, target) + speeds.start
