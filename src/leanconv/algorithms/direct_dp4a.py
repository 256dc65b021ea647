"""Convolution of 8-bit integers with channels last, four channels in a word: the bank-width model with n = 4."""

from __future__ import annotations

from dataclasses import replace

from leanconv.algorithms.base import TimedAlgorithm, by_time, has_wide_tensors
from leanconv.algorithms.tiles import (
    TileConfig,
    conv_arguments,
    cost,
    forward_limits,
    tile_launch,
    tiles,
    view_constants,
    with_splits,
)
from leanconv.dtypes import INTEGER_LAYERS
from leanconv.plan import Constants, Launch, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Integers in a word, which is as wide as a bank of shared memory.
WORD = 4
#: The C++ types of words.
WORDS = {"int8": "leanconv::int8x4", "uint8": "leanconv::uint8x4"}
#: How many times as long as an FMA a dp4a keeps its unit.
DP4A_CYCLES = 2.0


def in_words(problem: ConvProblem) -> ConvProblem:
    """The convolution that the kernel computes: a fourth of the channels, each element a word."""
    return replace(problem, c=problem.c // WORD)


def word_constants(problem: ConvProblem) -> Constants:
    """The kernel's ``Problem``: that of words, whose types are those of four integers."""
    constants = dict(view_constants(in_words(problem), wide=has_wide_tensors(problem)))
    return tuple((constants | {"element": WORDS[problem.dtype], "filter": WORDS["int8"]}).items())


def shared_bytes(config: TileConfig) -> int:
    """Shared memory of a block: the stages of both operands."""
    return config.shared_bytes(config.tile_reduction * (config.tile_pixels + 4), 0)


class DirectDp4a(TimedAlgorithm):
    """Implicit GEMM on words of four 8-bit integers, multiplied by dp4a; NHWC, exact, no workspace."""

    name = "direct_dp4a"
    paper = "X. Chen et al., memory-efficient direct convolution (2017), the bank-width model"
    tier = "ieee"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = forward_limits(problem, INTEGER_LAYERS)
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC, where neighbouring channels are one word")
        if problem.group_c % WORD:
            reasons.append(f"a filter has {problem.group_c} channels, and words are made of {WORD}")
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TileConfig]]:
        words, wide = in_words(problem), has_wide_tensors(problem)
        pixels, reduction = problem.n * problem.p * problem.q, words.group_c * problem.r * problem.s
        return by_time(
            (DP4A_CYCLES * cost(words, pixels, reduction, config, speed, target), config)
            for config, speed in with_splits(words, tiles(words, wide=wide), reduction, target)
            if shared_bytes(config) <= target.shared_per_block
        )

    def plan(self, problem: ConvProblem, config: TileConfig, target: Target) -> Plan:
        return Plan((self._launch(problem, config),))

    def _launch(self, problem: ConvProblem, config: TileConfig) -> Launch:
        x, w, *rest = conv_arguments(problem)
        assert isinstance(x, Pointer) and isinstance(w, Pointer)
        words = replace(x, element=WORDS[problem.dtype]), replace(w, element=WORDS["int8"])
        return tile_launch(
            self.name, word_constants(problem), config, in_words(problem), problem.n * problem.p * problem.q,
            shared_bytes(config), (*words, *rest),
        )  # fmt: skip
