"""Box: sums, least and largest values of boxes, in a time that hardly depends on their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.contract import Config, ceil_div
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.marching import March, StripAlgorithm, speeds_of
from leanconv.kernels.image_filter.register_cache import EXTENT, sum_bytes
from leanconv.plan import Constants, Number, Plan, Target
from leanconv.problem import FilterProblem

#: Columns of a strip: one of each thread of a block.
STRIP = 128
#: What a box makes, and the kernel's operation.
OPERATIONS = {"sum": "leanconv::SumOf", "min": "leanconv::LeastOf", "max": "leanconv::LargestOf"}


@dataclass(frozen=True)
class BoxConfig(Config):
    """A block of ``warps`` marches down a strip, ``rows`` rows in a step, ``least_steps`` steps at least, where the
    image has them. So many blocks at least, ``min_blocks``, fit on a multiprocessor."""

    warps: int = 4
    rows: int = 16
    least_steps: int = 1
    min_blocks: int = 4

    @property
    def threads(self) -> int:
        return 32 * self.warps


#: (warps, rows, least_steps) in the order in which they are tried.
SHAPES = ((4, 16, 1), (8, 16, 1), (4, 8, 1), (8, 32, 1), (16, 32, 1), (4, 8, 64))


def shared_bytes(problem: FilterProblem, config: BoxConfig) -> int:
    """Shared memory of a block: input rows, filtered rows, a row of outputs a warp, and a block of rows as high as the
    box."""
    left, right = (ceil_div(halo, 4) * 4 for halo in (problem.anchor[1], problem.kw - 1 - problem.anchor[1]))
    row = ceil_div(left + STRIP + right, 32) * 32
    return sum_bytes(problem) * (config.rows * (row + STRIP) + (config.warps + problem.kh) * STRIP)


def march_of(problem: FilterProblem, config: BoxConfig) -> March:
    strips = problem.batch * problem.channels * ceil_div(problem.out_w, STRIP)
    steps = config.rows, config.least_steps
    return March(strips, problem.out_h, problem.kh - 1, *steps, config.warps, config.min_blocks)


def why_no_box(problem: FilterProblem) -> list[str]:
    """What no kernel of boxes can do."""
    if problem.reduction is None:
        return ["the filter has weights, and is no box"]
    if problem.reduction not in OPERATIONS:
        return [f"a {problem.reduction} is not made of two others"]
    reasons = ["it filters images, not volumes"] if problem.is_volume else []
    if not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
        reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} box")
    if max(problem.h, problem.w) > EXTENT:
        reasons.append(f"the image is {problem.h}x{problem.w}, and the limit is {EXTENT} rows and columns")
    if problem.reduction != "sum" and problem.sums == "int32":
        reasons.append("the least and the largest of int32 are found in float64")
    return reasons


class Box(StripAlgorithm):
    """Sums without differences, least and largest values of boxes, every type and border, no workspace."""

    name = "box"
    paper = "M. van Herk, A fast algorithm for local minimum and maximum filters (1992); J. Gil and M. Werman (1993)"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if reasons := why_no_box(problem):
            return reasons
        if problem.batch * problem.channels * ceil_div(problem.out_w, STRIP) >= 2**28:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        least = min(shared_bytes(problem, BoxConfig(*shape)) for shape in SHAPES)
        if not reasons and least > target.shared_per_block:
            has = f"{target.shared_per_block} on {target.arch}"
            reasons.append(f"a block needs {least} bytes of shared memory at least, and has {has}")
        return reasons

    def cycles(self, problem: FilterProblem, target: Target) -> float:
        return speeds_of(self.stem, problem, target).cycles(problem, problem.kh + problem.kw, target)

    def shapes(self, problem: FilterProblem, target: Target) -> Iterator[BoxConfig]:
        fitting = []
        for warps, rows, least_steps in SHAPES:
            shared = shared_bytes(problem, BoxConfig(warps, rows))
            if shared <= target.shared_per_block:
                # 80 registers a thread
                blocks = min(target.shared_per_multiprocessor // (shared + 1024), 24 // warps)
                fitting.append(BoxConfig(warps, rows, least_steps, max(1, blocks)))
        yield from sorted(fitting, key=lambda c: march_of(problem, c).rank(target))

    def plan(self, problem: FilterProblem, config: BoxConfig, target: Target) -> Plan:
        assert problem.reduction is not None
        strips, bands = ceil_div(problem.out_w, STRIP), march_of(problem, config).bands(target)
        what = ("op", OPERATIONS[problem.reduction]), ("weighted", problem.reduction == "sum")
        compiled: Constants = (*constants(problem, 1, problem.channels), *what)
        band_rows = Number("int", "band_rows", ceil_div(problem.out_h, bands))
        grid = strips * bands * problem.batch * problem.channels
        given = (*arguments(problem, strips, bands), band_rows)
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config)),))
