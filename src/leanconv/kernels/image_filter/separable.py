"""Separable: a filter that is a column times a row, or few such products, in one launch without a workspace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.dtypes import DTYPES, none_of
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div
from leanconv.kernels.image_filter.register_cache import EXTENT
from leanconv.plan import Argument, Constants, Number, Plan, Pointer, Target
from leanconv.problem import FilterProblem

#: Most rows and columns of a filter, and most products: shared memory holds the rows that they reach.
LIMIT, RANKS = 127, 3
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
SHAPES = ((8, 8, 1), (4, 8, 1), (4, 16, 1), (8, 16, 1), (6, 16, 1), (16, 8, 1), (4, 8, 16))


def lag(problem: FilterProblem, config: SeparableConfig) -> int:
    """Rows by which outputs lag behind the input."""
    return ceil_div(problem.kh - 1, config.outputs) * config.outputs


def shared_bytes(problem: FilterProblem, config: SeparableConfig) -> int:
    """Shared memory of a block: input rows, filtered rows, weights, and a row of outputs a warp."""
    left, right = (ceil_div(halo, 4) * 4 for halo in (problem.anchor[1], problem.kw - 1 - problem.anchor[1]))
    row = ceil_div(left + STRIP + right, 32) * 32
    weights = ceil_div(left - problem.anchor[1] + problem.kw, 4) * 4 + ceil_div(problem.kh, 4) * 4
    ring = (lag(problem, config) + config.step_rows) * (STRIP + SKEW)
    elements = config.step_rows * (row + SKEW) + problem.rank * (ring + weights) + config.warps * STRIP
    return 4 * elements


def bands_of(problem: FilterProblem, config: SeparableConfig, target: Target) -> int:
    """Parts into which the rows of an image are divided, each a block's: as many as keep the machine busy, and few,
    since each filters some rows of its neighbour's again."""
    slots = config.min_blocks * target.multiprocessors
    blocks = max(1, problem.batch * ceil_div(problem.w, STRIP))
    most = min(ceil_div(problem.h, config.least_steps * config.step_rows), ceil_div(4 * slots, blocks))

    def steps(bands: int) -> int:
        rows = ceil_div(problem.h, bands) + lag(problem, config)
        return ceil_div(blocks * bands, slots) * ceil_div(rows, config.step_rows)

    return min(range(1, most + 1), key=steps, default=1)


class Separable(GpuAlgorithm):
    """Rows and columns apart, FP32 FMAs or wrapping int32, every border, no workspace."""

    name = "separable"
    paper = "the row and column passes of image libraries, fused; sliding windows of weights in registers"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if not problem.rank:
            return ["the filter is given whole, not as products of a column and a row"]
        reasons = none_of(problem.dtype, ("float32", "int32"))
        if not problem.dtype == problem.result == problem.sums:
            reasons.append(f"the image is {problem.dtype}, the result {problem.result} and sums are {problem.sums}")
        if problem.channels != 1 or problem.valid:
            reasons.append("it takes planes, and gives results as large as the image")
        if not (1 <= problem.kh <= LIMIT and 1 <= problem.kw <= LIMIT):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {LIMIT}x{LIMIT}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if problem.rank > RANKS:
            reasons.append(f"the filter has {problem.rank} products of a column and a row, and the limit is {RANKS}")
        if max(problem.h, problem.w) > EXTENT:
            reasons.append(f"the image is {problem.h}x{problem.w}, and the limit is {EXTENT} rows and columns")
        if not reasons and problem.batch * ceil_div(problem.w, STRIP) >= 2**28:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        return reasons

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[SeparableConfig]:
        for warps, outputs, least_steps in SHAPES:
            shared = shared_bytes(problem, SeparableConfig(warps, outputs))
            if shared > target.shared_per_block:
                continue
            # sums, weights, inputs, and addresses
            registers = ceil_div(4 * outputs + (outputs + 4) + 16 + 32, 8) * 8
            fitting = min(
                target.shared_per_multiprocessor // (shared + 1024),
                target.registers_per_multiprocessor // (registers * 32 * warps),
                48 // warps,
            )
            yield SeparableConfig(warps, outputs, least_steps, max(1, fitting))

    def plan(self, problem: FilterProblem, config: SeparableConfig, target: Target) -> Plan:
        strips, bands = ceil_div(problem.w, STRIP), bands_of(problem, config, target)
        element = DTYPES[problem.dtype].ctype
        sizes = zip(("r", "s", "anchor_y", "anchor_x"), (problem.kh, problem.kw, *problem.anchor), strict=True)
        types = ("element", element), ("border", BORDERS[problem.border].kernel)
        constants: Constants = (*types, *sizes, ("rank", problem.rank))
        pitches = ((name, getattr(problem, name)) for name in ("x_pitch", "x_step", "y_pitch", "y_step"))
        arguments: tuple[Argument, ...] = (
            Pointer("x", element),
            Pointer("w", element),
            Pointer("y", element, written=True),
            Number(element, "value"),
            Number(element, "delta"),
            Number("int", "height", problem.h),
            Number("int", "width", problem.w),
            *(Number("long long", name, value) for name, value in pitches),
            Number("int", "strips", strips),
            Number("int", "bands", bands),
            Number("int", "band_rows", ceil_div(problem.h, bands)),
        )
        grid = strips * bands * problem.batch
        return Plan((self.launch(config, constants, arguments, grid, shared_bytes(problem, config)),))
