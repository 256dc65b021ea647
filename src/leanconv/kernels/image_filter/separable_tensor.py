"""Separable on tensor cores: a column times a row as products with Toeplitz matrices, in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import Arithmetic, Config, ceil_div
from leanconv.kernels.cost import blocks_that_fit
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.marching import March, StripAlgorithm, speeds_of
from leanconv.kernels.image_filter.register_cache import EXTENT
from leanconv.kernels.image_filter.separable import interleaved, planes
from leanconv.plan import Constants, Number, Plan, Target
from leanconv.problem import FilterProblem

#: Rows that a block makes in a step, and the width of a block of the Toeplitz matrices.
STEP = 16
#: Most rows and columns that an output reaches, in such blocks: registers hold the sums of all these rows.
MOST_BLOCKS = 13


@dataclass(frozen=True)
class SeparableTensorConfig(Config):
    """A block of ``warps`` marches down a strip, of which each warp makes ``tiles`` times 16 columns. So many blocks at
    least, ``min_blocks``, fit on a multiprocessor."""

    warps: int = 4
    tiles: int = 2
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def width(self) -> int:
        """Columns of a strip."""
        return STEP * self.warps * self.tiles


#: (warps, tiles) in the order in which they are tried.
SHAPES = ((4, 2), (4, 1), (8, 2), (8, 1))
#: Most warps of a multiprocessor.
MOST_WARPS = 16
#: Most registers that `registers_needed` may say, and how many more than there are: the compiler reuses them.
MOST_REGISTERS, REUSED = 265, 1.2


def blocks(problem: FilterProblem) -> tuple[int, int]:
    """What the taps of an output reach, in blocks of 16 rows and of 16 elements of a row."""
    channels = interleaved(problem)
    lead = -problem.anchor[1] * channels % 4
    return ceil_div(problem.kh + 15, STEP), ceil_div(lead + (problem.kw - 1) * channels + 16, STEP)


def pieces(problem: FilterProblem) -> int:
    """Float16 numbers that a pixel is split into."""
    in_one = problem.dtype in ("uint8", "int8", "float16", "bfloat16") and problem.border != "constant"
    return 1 if in_one else 2


def input_width(problem: FilterProblem, config: SeparableTensorConfig) -> int:
    """Elements of a row that a block loads."""
    return config.width + STEP * (blocks(problem)[1] - 1)


def vectors_of(problem: FilterProblem, config: SeparableTensorConfig) -> int:
    """Vectors of four pixels that a lane loads in a step."""
    return ceil_div(STEP // config.warps * input_width(problem, config) // 4, 32)


def shared_bytes(problem: FilterProblem, config: SeparableTensorConfig) -> int:
    """Shared memory of a block: two steps of split rows, both matrices, exponents, the places of a row's elements, and
    a step of outputs."""
    width = input_width(problem, config)
    halves = 2 * pieces(problem) * STEP * (width + 8) * 2
    weights = sum(2 * 512 * each for each in blocks(problem))
    outputs = config.warps * STEP * (STEP * config.tiles + 4) * 4
    return halves + weights + 2 * STEP * 4 + width * 4 + outputs


def registers_needed(problem: FilterProblem, config: SeparableTensorConfig) -> int:
    """Registers of a thread, about: waiting sums, the next step's pixels, the step's sums, weights, and addresses."""
    down, across = blocks(problem)
    words = 4 if pieces(problem) == 2 else item_bytes(problem.dtype)
    pixels = vectors_of(problem, config) * words
    return 8 * config.tiles * (down + 1) + pixels + min(4 * max(down, across), 40) + 56


def strips_of(problem: FilterProblem, config: SeparableTensorConfig) -> int:
    """Strips of an image, or of one of its planes."""
    return ceil_div(problem.out_w * interleaved(problem), config.width)


def march_of(problem: FilterProblem, config: SeparableTensorConfig) -> March:
    strips = problem.batch * planes(problem) * strips_of(problem, config)
    overlap = STEP * (blocks(problem)[0] - 1)
    return March(strips, problem.out_h, overlap, STEP, 1, config.warps, config.min_blocks)


class SeparableTensor(StripAlgorithm):
    """Rows and columns apart on tensor cores, a float32 as two float16; every border, no workspace."""

    name = "separable"
    strategy = "tensor"
    paper = "the row and column passes of image libraries, as products with Toeplitz matrices"
    precision = "fp32"
    solves = "filter2d"

    def arithmetic(self, problem: FilterProblem) -> Arithmetic:
        return "fp16x3"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if not problem.rank:
            return ["the filter is not given as products of a column and a row"]
        reasons = ["it filters images, not volumes"] if problem.is_volume else []
        if not target.warp_products:
            reasons.append(f"{target.arch} has no mma.sync of float16")
        if problem.sums != "float32":
            reasons.append(f"sums in {problem.sums} are none of the tensor cores'")
        if problem.rank > 1:
            reasons.append(f"the filter has {problem.rank} products of a column and a row, and the limit is 1")
        if not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        elif max(blocks(problem)) > MOST_BLOCKS:
            limit = STEP * (MOST_BLOCKS - 1) + 1
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and registers are enough for about {limit} taps")
        if max(problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        if not reasons and problem.batch * planes(problem) * strips_of(problem, SeparableTensorConfig(4, 1)) >= 2**28:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        return reasons

    def cycles(self, problem: FilterProblem, target: Target) -> float:
        # of one tile a warp, where two have no registers
        stem = self.stem if self._fitting(problem, target, SeparableTensorConfig()) else f"{self.stem} 1"
        return speeds_of(stem, problem, target).cycles(problem, sum(blocks(problem)), target)

    @staticmethod
    def _fitting(problem: FilterProblem, target: Target, config: SeparableTensorConfig) -> int:
        """Blocks of a configuration that fit on a multiprocessor."""
        shared, registers = shared_bytes(problem, config), registers_needed(problem, config)
        if shared > target.shared_per_block or registers > MOST_REGISTERS:
            return 0
        reused = min(255, int(registers / REUSED))
        return min(
            target.shared_per_multiprocessor // (shared + 1024), blocks_that_fit(reused, config.threads, target),
            MOST_WARPS // config.warps,
        )  # fmt: skip

    def shapes(self, problem: FilterProblem, target: Target) -> Iterator[SeparableTensorConfig]:
        every = [SeparableTensorConfig(*shape) for shape in SHAPES]
        found = [replace(each, min_blocks=n) for each in every if (n := self._fitting(problem, target, each))]
        # those with the fewest columns outside the image
        yield from sorted(found, key=lambda each: strips_of(problem, each) * each.width)

    def plan(self, problem: FilterProblem, config: SeparableTensorConfig, target: Target) -> Plan:
        strips, bands = strips_of(problem, config), march_of(problem, config).bands(target)
        compiled: Constants = (*constants(problem, interleaved(problem), planes(problem)), ("rank", problem.rank))
        band_rows = Number("int", "band_rows", ceil_div(problem.out_h, bands))
        grid = strips * bands * problem.batch * planes(problem)
        given = (*arguments(problem, strips, bands), band_rows)
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config)),))
