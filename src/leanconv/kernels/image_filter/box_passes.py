"""Large boxes: a launch along columns, whose sums wait in the result, and one along rows, in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanconv.kernels.contract import Config, ceil_div
from leanconv.kernels.cost import blocks_that_fit, launch_cycles
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.box import OPERATIONS, why_no_box
from leanconv.kernels.image_filter.marching import March, StripAlgorithm, speeds_of
from leanconv.kernels.image_filter.register_cache import sum_bytes
from leanconv.plan import Constants, Number, Plan, Target, in_chain
from leanconv.problem import FilterProblem

#: Rows and columns of a group, whose sums are kept.
GROUP = 16
#: Fewest rows and columns of a box.
LEAST = 2 * GROUP + 1


@dataclass(frozen=True)
class BoxPassesConfig(Config):
    """Along columns a block of ``warps`` marches down a strip of 32 * ``columns`` columns, and so many blocks at least,
    ``min_blocks``, fit on a multiprocessor; along rows a block of as many warps has a row."""

    columns: int = 2
    warps: int = 8
    min_blocks: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps


#: (columns, warps) in the order in which they are tried.
SHAPES = ((2, 8), (4, 8), (2, 4))


def column_bytes(problem: FilterProblem, config: BoxPassesConfig) -> int:
    """Shared memory of a block of the column pass: two sums of each group in reach, and of the next steps'."""
    groups = (problem.kh - 1) // GROUP + 2 * config.warps
    return sum_bytes(problem) * 2 * groups * 32 * config.columns


def row_bytes(problem: FilterProblem, config: BoxPassesConfig) -> int:
    """Shared memory of a block of the row pass: the extended row, three sums of each group, outputs of each warp."""
    pitch, whole = (20 if sum_bytes(problem) == 4 else 18), (problem.kw - 1) // GROUP
    groups = ceil_div(problem.w, GROUP) + whole
    staged = config.warps * 32 * pitch
    return sum_bytes(problem) * (ceil_div((groups + 3) * pitch + 3 * groups, 4) * 4 + staged)


def march_of(problem: FilterProblem, config: BoxPassesConfig) -> March:
    strips = problem.batch * ceil_div(problem.w, 32 * config.columns)
    steps = config.warps * GROUP, 1
    return March(strips, problem.h, problem.kh - 1, *steps, config.warps, config.min_blocks)


class BoxPasses(StripAlgorithm):
    """Large boxes in two launches, without differences; results of the type of the sums, no workspace."""

    name = "box"
    strategy = "passes"
    paper = "columns, then rows in place; sums of groups in place of running sums"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if reasons := why_no_box(problem):
            return reasons
        if min(problem.kh, problem.kw) < LEAST:
            reasons.append(f"the box is {problem.kh}x{problem.kw}, and {LEAST}x{LEAST} is the least")
        if problem.result != problem.sums:
            reasons.append(f"sums in {problem.sums} do not fit into a result of {problem.result}")
        if problem.channels > 1:
            reasons.append(f"pixels have {problem.channels} channels")
        if problem.valid:
            reasons.append("a row of the image does not fit into one of the results of whole windows")
        if problem.batch * problem.h >= 2**31:
            images = f"{problem.batch} images of {problem.h} rows"
            reasons.append(f"there are {images}, and the limit is {2**31 - 1} rows in all")
        least = [max(column_bytes(problem, c), row_bytes(problem, c)) for c in (BoxPassesConfig(*s) for s in SHAPES)]
        if not reasons and min(least) > target.shared_per_block:
            has = f"{target.shared_per_block} on {target.arch}"
            reasons.append(f"a block needs {min(least)} bytes of shared memory at least, and has {has}")
        return reasons

    def cycles(self, problem: FilterProblem, target: Target) -> float:
        both = speeds_of(self.stem, problem, target).cycles(problem, problem.kh + problem.kw, target)
        return both + launch_cycles(target)

    def shapes(self, problem: FilterProblem, target: Target) -> Iterator[BoxPassesConfig]:
        for shape in SHAPES:
            config = BoxPassesConfig(*shape)
            shared = column_bytes(problem, config)
            registers = 32 * config.columns * (sum_bytes(problem) // 4) + 60
            if max(shared, row_bytes(problem, config)) > target.shared_per_block or registers > 255:
                continue
            fitting = min(
                target.shared_per_multiprocessor // (shared + 1024), blocks_that_fit(registers, config.threads, target)
            )
            yield replace(config, min_blocks=max(1, fitting))

    def plan(self, problem: FilterProblem, config: BoxPassesConfig, target: Target) -> Plan:
        assert problem.reduction is not None
        strips, bands = ceil_div(problem.w, 32 * config.columns), march_of(problem, config).bands(target)
        rows_of_band = ceil_div(ceil_div(problem.h, bands), GROUP) * GROUP
        what = ("op", OPERATIONS[problem.reduction]), ("weighted", problem.reduction == "sum")
        compiled: Constants = (*constants(problem, 1, 1), *what)
        given = (*arguments(problem, strips, bands), Number("int", "band_rows", rows_of_band))
        columns = self.launch(
            config, (*compiled, ("along_rows", False)), given, strips * bands * problem.batch,
            column_bytes(problem, config),
        )  # fmt: skip
        rows = replace(
            columns, problem=(*compiled, ("along_rows", True)), tuning=(("warps", config.warps),),
            grid=problem.batch * problem.h, shared_bytes=row_bytes(problem, config), min_blocks=1,
        )  # fmt: skip
        return Plan(in_chain((columns, rows)))
