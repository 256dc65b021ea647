"""Convolution of 8-bit integers with channels last, four channels in a word: the bank-width model with n = 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from leanconv.dtypes import INTEGER_LAYERS, weights_of
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, limits, view_constants
from leanconv.kernels.contract import TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds
from leanconv.kernels.simt.tiles import TileConfig, TileSpeeds, cost, tile_launch, tiles, with_splits
from leanconv.plan import Constants, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Integers in a word, which is as wide as a bank of shared memory.
WORD = 4
#: The deepest step of loose words, whose bytes are in registers while a step is multiplied. Their speeds have not been
#: measured: the model takes them for those of whole words.
LOOSE_DEPTH = 8


@dataclass(frozen=True)
class Dp4aSpeeds(Speeds):
    """Of tiles of words. Fitted to 15 layers with 11 configurations each; farthest off for layers of few channels and
    for single images."""

    #: dp4a that a multiprocessor starts in a cycle (reached from registers: 63)
    lanes: int
    #: the share of them that the best tile reaches in the model
    best_share: float
    #: of each tile, the share of the best tile's speed when it fills the machine
    tiles: Mapping[str, float]
    #: of the speed, where a deep step holds words of several taps, each of which is decoded by itself
    many_taps: float
    #: what starting and storing a tile costs, in words of the reduction, without and with a split
    overheads: tuple[int, int]


def in_words(problem: ConvProblem) -> ConvProblem:
    """The convolution that the kernel computes: a fourth of each group's channels, rounded up; each element a word."""
    return replace(problem, c=problem.groups * ceil_div(problem.group_c, WORD))


def word_type(problem: ConvProblem, dtype: str) -> str:
    """The C++ type of words of a type; loose ones begin anywhere, and end a tap with zeros."""
    return f"leanconv::{'loose_' if problem.group_c % WORD else ''}{dtype}x4"


def word_constants(problem: ConvProblem) -> Constants:
    """The kernel's ``Problem``: that of words, whose types are those of four integers, and the bytes of a pixel."""
    constants = dict(view_constants(in_words(problem), wide=has_wide_tensors(problem)))
    constants |= {"element": word_type(problem, problem.dtype), "filter": word_type(problem, weights_of(problem.dtype))}
    return (*constants.items(), ("channel_bytes", problem.c), ("group_bytes", problem.group_c))


def even_warps(words: ConvProblem, pixels: int, config: TileConfig, target: Target) -> float:
    """How evenly the warps of a multiprocessor's blocks fill its four schedulers: six warps keep only two of them busy
    to the end.
    """
    blocks = ceil_div(words.group_k, config.tile_k) * words.groups * ceil_div(pixels, config.tile_pixels)
    on_one = max(1, ceil_div(blocks * config.split, target.multiprocessors))
    warps = min(on_one, config.min_blocks) * config.threads // 32
    return warps / (4 * ceil_div(warps, 4))


def cycles(words: ConvProblem, config: TileConfig, target: Target) -> float:
    """Predicted time of a convolution of words, in clock cycles."""
    pixels, reduction = words.n * words.p * words.q, words.group_c * words.r * words.s
    speeds = Dp4aSpeeds.of(target)
    speed = speeds.tiles[config.name] * even_warps(words, pixels, config, target)
    if config.tile_reduction > 8 and words.group_c % config.tile_reduction:
        speed *= speeds.many_taps
    in_fmas = cost(words, pixels, reduction, config, speed, target, speeds.overheads)
    return in_fmas * TileSpeeds.of(target).best_share / speeds.best_share * target.fma_lanes / speeds.lanes


def shared_bytes(config: TileConfig) -> int:
    return config.shared_bytes(config.tile_reduction * (config.tile_pixels + 4), 0)


class ImplicitGemmDp4a(TimedAlgorithm):
    """Implicit GEMM on words of four 8-bit integers, multiplied by dp4a; NHWC, exact, no workspace."""

    name = "implicit_gemm"
    strategy = "dp4a"
    paper = "X. Chen et al., memory-efficient direct convolution (2017), the bank-width model"
    precision = "ieee"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = limits(problem, "fprop", dtypes=INTEGER_LAYERS)
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC, where neighbouring channels are one word")
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TileConfig]]:
        words, loose = in_words(problem), problem.group_c % WORD > 0
        known = list(tiles(words, target, wide=loose or has_wide_tensors(problem)))
        if loose:
            # what passes registers is under way for one step only
            known = [(variant(c, stages=2), speed) for c, speed in known if c.tile_reduction <= LOOSE_DEPTH]
        return by_time(
            (cycles(words, config, target), config)
            for config, _ in with_splits(words, known, words.group_c * words.r * words.s, target)
            if shared_bytes(config) <= target.shared_per_block
        )

    def plan(self, problem: ConvProblem, config: TileConfig, target: Target) -> Plan:
        constants, (_, _, *rest) = word_constants(problem), conv_arguments(problem)
        types = ("x", problem.dtype), ("w", weights_of(problem.dtype))
        words = (Pointer(role, word_type(problem, dtype)) for role, dtype in types)
        pixels, shared = problem.n * problem.p * problem.q, shared_bytes(config)
        return Plan((tile_launch(self, constants, config, in_words(problem), pixels, shared, (*words, *rest)),))
