"""Large boxes in one launch: rows by two scans, columns from a ring of filtered rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.contract import Config, ceil_div
from leanconv.kernels.cost import blocks_that_fit
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.box import OPERATIONS, why_no_box
from leanconv.kernels.image_filter.box_passes import GROUP, LEAST
from leanconv.kernels.image_filter.marching import March, StripAlgorithm, speeds_of
from leanconv.kernels.image_filter.register_cache import sum_bytes
from leanconv.plan import Constants, Number, Plan, Target
from leanconv.problem import FilterProblem


@dataclass(frozen=True)
class BoxScansConfig(Config):
    """A block of ``warps`` marches down a strip of 32 * ``columns`` columns, and so many blocks at least, ``min_blocks``,
    fit on a multiprocessor."""

    columns: int = 1
    warps: int = 8
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps


#: Most columns of a lane, and warps of a block.
COLUMNS, WARPS = 8, 8


def behind(problem: FilterProblem) -> int:
    """Columns of a lane behind the strip."""
    least = ceil_div(problem.kw - 1, 32)
    return ceil_div(least, 2) * 2 if least > 1 else 1


def shared_bytes(problem: FilterProblem, config: BoxScansConfig) -> int:
    """Shared memory of a block: a ring of filtered rows, two sums of each group in reach, what warps exchange, and the
    columns of a strip at an edge."""
    more, width = behind(problem), 32 * config.columns
    rows = ceil_div(problem.kh - 1, GROUP) * GROUP + 2 * ((problem.kh - 1) // GROUP + 1)
    exchanged = config.warps * 32 * max(more, config.columns)
    return sum_bytes(problem) * (rows * width + exchanged) + 4 * (width + 32 * more)


def shift(problem: FilterProblem) -> int:
    """Columns that strips begin further to the left, where loads are aligned."""
    return -problem.anchor[1] % 4


def strips_of_plane(problem: FilterProblem, config: BoxScansConfig) -> int:
    return ceil_div(problem.out_w + shift(problem), 32 * config.columns)


def march_of(problem: FilterProblem, config: BoxScansConfig) -> March:
    strips = problem.batch * problem.channels * strips_of_plane(problem, config)
    return March(strips, problem.out_h, problem.kh - 1, GROUP, 1, config.warps, config.min_blocks)


class BoxScans(StripAlgorithm):
    """Large boxes in one launch, without differences, every type and border, no workspace."""

    name = "box"
    strategy = "scans"
    paper = "two scans of a row from a place that all windows have; sums of groups in place of running sums"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if reasons := why_no_box(problem):
            return reasons
        if min(problem.kh, problem.kw) < LEAST:
            reasons.append(f"the box is {problem.kh}x{problem.kw}, and {LEAST}x{LEAST} is the least")
        if problem.batch * problem.channels * ceil_div(problem.out_w, 32) >= 2**28:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        least = shared_bytes(problem, BoxScansConfig())
        if not reasons and least > target.shared_per_block:
            has = f"{target.shared_per_block} on {target.arch}"
            reasons.append(f"a block needs {least} bytes of shared memory at least, and has {has}")
        return reasons

    def cycles(self, problem: FilterProblem, target: Target) -> float:
        return speeds_of(self.stem, problem, target).cycles(problem, problem.kh + problem.kw, target)

    def shapes(self, problem: FilterProblem, target: Target) -> Iterator[BoxScansConfig]:
        """Wide strips first: they read fewer columns of their neighbours."""
        for columns in range(min(COLUMNS, (problem.kw - 1) // 32), 0, -1):
            shared = shared_bytes(problem, BoxScansConfig(columns))
            if shared > target.shared_per_block:
                continue
            registers = (2 * (columns + behind(problem)) + 32) * sum_bytes(problem) // 4 + 40
            fitting = min(
                target.shared_per_multiprocessor // (shared + 1024), blocks_that_fit(min(registers, 255), 32 * WARPS, target)
            )
            yield BoxScansConfig(columns, WARPS, max(1, fitting))

    def plan(self, problem: FilterProblem, config: BoxScansConfig, target: Target) -> Plan:
        assert problem.reduction is not None
        strips, bands = strips_of_plane(problem, config), march_of(problem, config).bands(target)
        what = ("op", OPERATIONS[problem.reduction]), ("weighted", problem.reduction == "sum")
        compiled: Constants = (*constants(problem, 1, problem.channels), *what)
        band_rows = Number("int", "band_rows", ceil_div(problem.out_h, bands))
        grid = strips * bands * problem.batch * problem.channels
        given = (*arguments(problem, strips, bands), band_rows)
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config)),))
