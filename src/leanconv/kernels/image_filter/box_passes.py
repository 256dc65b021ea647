"""Large boxes: along columns, whose sums wait in the result, then along rows, in place; of float32 in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div
from leanconv.kernels.cost import blocks_that_fit
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.box import OPERATIONS
from leanconv.kernels.image_filter.marching import March
from leanconv.kernels.image_filter.register_cache import EXTENT, sum_bytes
from leanconv.plan import Constants, Launch, Number, Plan, Target, in_chain
from leanconv.problem import FilterProblem

#: Rows and columns of a group, whose sums are kept.
GROUP = 16
#: Fewest rows and columns of a box.
LEAST = 2 * GROUP + 1


@dataclass(frozen=True)
class BoxPassesConfig(Config):
    """Along columns a block of ``warps`` marches down a strip of 32 * ``columns`` columns, 16 rows a warp in a step,
    ``least_steps`` steps at least, where the image has them; along rows it has a row. So many blocks at least,
    ``min_blocks``, fit on a multiprocessor."""

    columns: int = 2
    warps: int = 8
    least_steps: int = 1
    min_blocks: int = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def chunk(self) -> int:
        """Rows of a step, for which the row pass waits."""
        return GROUP * self.warps


#: (columns, warps, least_steps) in the order in which they are tried.
SHAPES = ((2, 8, 64), (2, 8, 1), (2, 4, 1), (2, 4, 128), (1, 8, 64), (4, 4, 1), (4, 4, 64), (1, 8, 1))


def column_bytes(problem: FilterProblem, config: BoxPassesConfig) -> int:
    """Shared memory of a block of the column pass: two sums of each group in reach, and of the next steps'; rows of
    each warp on their way."""
    groups = (problem.kh - 1) // GROUP + 2 * config.warps
    return sum_bytes(problem) * 32 * config.columns * (2 * groups + GROUP * config.warps)


def row_bytes(problem: FilterProblem, config: BoxPassesConfig) -> int:
    """Shared memory of a block of the row pass: the extended row, and three sums of each group."""
    pitch, whole = (20 if sum_bytes(problem) == 4 else 18), (problem.kw - 1) // GROUP
    groups = ceil_div(problem.w, GROUP) + whole
    return sum_bytes(problem) * ((groups + 3) * pitch + 3 * groups)


def shared_bytes(problem: FilterProblem, config: BoxPassesConfig) -> int:
    """Shared memory of a block, whichever pass it has."""
    return max(column_bytes(problem, config), row_bytes(problem, config))


def march_of(problem: FilterProblem, config: BoxPassesConfig) -> March:
    strips = problem.batch * ceil_div(problem.w, 32 * config.columns)
    return March(
        strips, problem.h, problem.kh - 1, config.chunk, config.least_steps, config.warps, config.min_blocks
    )  # fmt: skip


class BoxPasses(GpuAlgorithm):
    """Large boxes along columns, then along rows in place, without differences; results of the type of the sums, no
    workspace."""

    name = "box"
    strategy = "passes"
    paper = "columns, then rows in place; sums of groups in place of running sums"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if problem.reduction is None:
            return ["the filter has weights, and is no box"]
        if problem.reduction not in OPERATIONS:
            return [f"a {problem.reduction} is not made of two others"]
        reasons = ["it filters images, not volumes"] if problem.is_volume else []
        if not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} box")
        if min(problem.kh, problem.kw) < LEAST:
            reasons.append(f"the box is {problem.kh}x{problem.kw}, and {LEAST}x{LEAST} is the least")
        if problem.result != problem.sums:
            reasons.append(f"sums in {problem.sums} do not fit into a result of {problem.result}")
        if problem.channels > 1:
            reasons.append(f"pixels have {problem.channels} channels")
        if problem.valid:
            reasons.append("a row of the image does not fit into one of the results of whole windows")
        if problem.reduction != "sum" and problem.sums == "int32":
            reasons.append("the least and the largest of int32 are found in float64")
        if max(problem.h, problem.w) > EXTENT or problem.batch * problem.h >= 2**31:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(
                f"there are {images}, and the limits are {EXTENT} rows and columns and 2**31 - 1 rows in all"
            )
        least = min(shared_bytes(problem, BoxPassesConfig(*shape)) for shape in SHAPES)
        if not reasons and least > target.shared_per_block:
            has = f"{target.shared_per_block} on {target.arch}"
            reasons.append(f"a block needs {least} bytes of shared memory at least, and has {has}")
        return reasons

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[BoxPassesConfig]:
        usable = []
        for shape in SHAPES:
            config = BoxPassesConfig(*shape)
            shared = shared_bytes(problem, config)
            registers = (16 * config.columns + 8) * (sum_bytes(problem) // 4) + 24
            if shared > target.shared_per_block or registers > 255:
                continue
            fitting = min(
                target.shared_per_multiprocessor // (shared + 1024), blocks_that_fit(registers, config.threads, target)
            )
            usable.append(replace(config, min_blocks=max(1, fitting)))
        yield from sorted(usable, key=lambda c: march_of(problem, c).rank(target))

    def plan(self, problem: FilterProblem, config: BoxPassesConfig, target: Target) -> Plan:
        assert problem.reduction is not None
        strips, bands = ceil_div(problem.w, 32 * config.columns), march_of(problem, config).bands(target)
        band_rows = ceil_div(ceil_div(problem.h, bands), config.chunk) * config.chunk
        what = ("op", OPERATIONS[problem.reduction]), ("weighted", problem.reduction == "sum")
        # a mark is a NaN
        together = problem.sums == "float32"
        compiled: Constants = (*constants(problem, 1, 1), *what, ("followed", together))
        sizes = Number("int", "band_rows", band_rows), Number("int", "images", problem.batch)
        given = (*arguments(problem, strips, bands), *sizes)
        of_columns, of_rows = strips * bands * problem.batch, band_rows * bands * problem.batch

        def launch(grid: int, shared: int, marks: bool, columns: bool, rows: bool) -> Launch:
            each = (*compiled, ("marks", marks), ("along_columns", columns), ("along_rows", rows))
            return self.launch(config, each, given, grid, shared)

        if together:
            marks = of_columns * (band_rows // config.chunk)
            both = launch(of_columns + of_rows, shared_bytes(problem, config), False, True, True)
            first = launch(ceil_div(marks, config.threads), 0, True, False, False)
            return Plan(in_chain((first, replace(both, in_order=True))))
        columns = launch(of_columns, column_bytes(problem, config), False, True, False)
        return Plan(in_chain((columns, launch(of_rows, row_bytes(problem, config), False, False, True))))
