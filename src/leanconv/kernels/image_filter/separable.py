"""Separable: a filter that is a column times a row, or few such products, in one launch without a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.contract import Config, ceil_div
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.marching import March, StripAlgorithm, speeds_of
from leanconv.kernels.image_filter.register_cache import EXTENT, MOST_REGISTERS, sum_bytes
from leanconv.plan import Constants, Number, Plan, Target
from leanconv.problem import FilterProblem

#: Most rows and columns of a filter, of which shared memory holds all that an output reaches, and most products.
LIMIT, RANKS = 511, 3
#: Columns of a strip, and by how many words its rows in shared memory are longer than whole rows of banks.
STRIP, SKEW = 128, 4


@dataclass(frozen=True)
class SeparableConfig(Config):
    """A block of ``warps``; each makes ``outputs`` rows of 128 columns in a step, a thread as many by four. A block
    marches down ``least_steps`` steps at least, where the image has them. So many blocks at least, ``min_blocks``, fit
    on a multiprocessor."""

    warps: int = 8
    outputs: int = 8
    least_steps: int = 1
    min_blocks: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def step_rows(self) -> int:
        """Rows of outputs that a block makes in a step."""
        return self.warps * self.outputs


#: (warps, outputs, least_steps) in the order in which they are tried.
SHAPES = ((4, 8, 1), (12, 8, 1), (8, 8, 1), (4, 16, 1), (8, 16, 1), (6, 16, 1), (16, 8, 1), (4, 8, 16))


#: Widest filter for which pixels of 2 to 4 channels are filtered as they lie: its code is unrolled.
INTERLEAVED = 63


def interleaved(problem: FilterProblem) -> int:
    """Channels that a block filters side by side, as they lie. With 1 its elements lie `planes` apart."""
    return problem.channels if problem.channels <= 4 and problem.kw <= INTERLEAVED else 1


def planes(problem: FilterProblem) -> int:
    """Channels that blocks filter one by one."""
    return problem.channels // interleaved(problem)


def lag(problem: FilterProblem, config: SeparableConfig) -> int:
    """Rows by which outputs lag behind the input."""
    return ceil_div(problem.kh - 1, config.outputs) * config.outputs


def shared_bytes(problem: FilterProblem, config: SeparableConfig) -> int:
    """Shared memory of a block: input rows, filtered rows, weights, and a row of outputs a warp."""
    channels = interleaved(problem)
    before, after = problem.anchor[1] * channels, (problem.kw - 1 - problem.anchor[1]) * channels
    left, right = (ceil_div(halo, 4) * 4 for halo in (before, after))
    row = ceil_div(left + STRIP + right, 32) * 32
    lead = left - before if channels == 1 else 0
    weights = ceil_div(lead + problem.kw, 4) * 4 + ceil_div(problem.kh, 4) * 4
    ring = (lag(problem, config) + config.step_rows) * (STRIP + SKEW)
    elements = config.step_rows * (row + SKEW) + problem.rank * (ring + weights) + config.warps * STRIP
    return sum_bytes(problem) * elements


def strips_of(problem: FilterProblem) -> int:
    """Strips of an image, or of one of its planes."""
    return ceil_div(problem.out_w * interleaved(problem), STRIP)


def march_of(problem: FilterProblem, config: SeparableConfig) -> March:
    strips = problem.batch * planes(problem) * strips_of(problem)
    overlap, steps = lag(problem, config), (config.step_rows, config.least_steps)
    return March(strips, problem.out_h, overlap, *steps, config.warps, config.min_blocks)


class Separable(StripAlgorithm):
    """Rows and columns apart, FMAs or wrapping int32, every type and border, no workspace."""

    name = "separable"
    paper = "the row and column passes of image libraries, in one launch"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if not problem.rank:
            return ["the filter is not given as products of a column and a row"]
        reasons = ["it filters images, not volumes"] if problem.is_volume else []
        if not (1 <= problem.kh <= LIMIT and 1 <= problem.kw <= LIMIT):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {LIMIT}x{LIMIT}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if problem.rank > RANKS:
            reasons.append(f"the filter has {problem.rank} products of a column and a row, and the limit is {RANKS}")
        if max(problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        if not reasons and problem.batch * planes(problem) * strips_of(problem) >= 2**28:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        least = min(shared_bytes(problem, SeparableConfig(*shape)) for shape in SHAPES)
        if not reasons and least > target.shared_per_block:
            has = f"{target.shared_per_block} on {target.arch}"
            reasons.append(f"a block needs {least} bytes of shared memory at least, and has {has}")
        return reasons

    def cycles(self, problem: FilterProblem, target: Target) -> float:
        taps = problem.rank * (problem.kh + problem.kw)
        return speeds_of(self.stem, problem, target).cycles(problem, taps, target)

    def shapes(self, problem: FilterProblem, target: Target) -> Iterator[SeparableConfig]:
        usable = []
        for warps, outputs, least_steps in SHAPES:
            shared = shared_bytes(problem, SeparableConfig(warps, outputs))
            # sums, weights, inputs, and addresses
            registers = ceil_div((4 * outputs + (outputs + 4) + 16) * (sum_bytes(problem) // 4) + 44, 8) * 8
            if shared > target.shared_per_block or registers > MOST_REGISTERS:
                continue
            fitting = min(
                target.shared_per_multiprocessor // (shared + 1024),
                target.registers_per_multiprocessor // (registers * 32 * warps),
                48 // warps,
            )
            usable.append(SeparableConfig(warps, outputs, least_steps, max(1, fitting)))
        yield from sorted(usable, key=lambda c: march_of(problem, c).rank(target))

    def plan(self, problem: FilterProblem, config: SeparableConfig, target: Target) -> Plan:
        strips, bands = strips_of(problem), march_of(problem, config).bands(target)
        compiled: Constants = (*constants(problem, interleaved(problem), planes(problem)), ("rank", problem.rank))
        band_rows = Number("int", "band_rows", ceil_div(problem.out_h, bands))
        grid = strips * bands * problem.batch * planes(problem)
        given = (*arguments(problem, strips, bands), band_rows)
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config)),))
