"""Boxes of medium size: sums of groups of 16 along rows and columns, in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div
from leanconv.kernels.cost import blocks_that_fit
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.box import OPERATIONS
from leanconv.kernels.image_filter.marching import March
from leanconv.kernels.image_filter.register_cache import EXTENT, sum_bytes
from leanconv.plan import Constants, Number, Plan, Target
from leanconv.problem import FilterProblem

#: Rows and columns of a group.
GROUP = 16
#: Fewest rows and columns of a box.
LEAST = GROUP + 1


@dataclass(frozen=True)
class BoxGroupsConfig(Config):
    """A block marches down a strip of 16 * ``groups`` columns, 16 * ``row_groups`` rows in a step, with a thread for
    each column and 16 rows. With two ``buffers`` the next step's rows are under way all the time. So many blocks at
    least, ``min_blocks``, fit on a multiprocessor."""

    groups: int = 8
    row_groups: int = 1
    buffers: int = 2
    min_blocks: int = 4

    @property
    def threads(self) -> int:
        return GROUP * self.groups * self.row_groups

    @property
    def width(self) -> int:
        """Columns of a strip."""
        return GROUP * self.groups


#: (groups, row_groups, buffers) in the order in which they are tried.
SHAPES = (
    (8, 1, 1),
    (8, 2, 2),
    (16, 1, 2),
    (8, 1, 2),
    (8, 2, 1),
    (16, 1, 1),
    (8, 4, 1),
    (16, 2, 1),
    (16, 2, 2),
    (8, 4, 2),
    (4, 4, 1),
)


def shared_bytes(problem: FilterProblem, config: BoxGroupsConfig) -> int:
    """Shared memory of a block: input rows, the sums of their groups, rows in reach of the column pass and the sums of
    their groups, and the places of a row's pixels."""
    step, (down, down_rest) = GROUP * config.row_groups, divmod(problem.kh - 1, GROUP)
    across, rest = divmod(problem.kw - 1, GROUP)
    enters = -problem.anchor[1] % 4 + rest
    sums = config.groups + across
    row = GROUP * (sums - 1 + ceil_div(enters // 4 * 4 + 20, GROUP))
    ring = GROUP * (down + config.row_groups + (down_rest > 0)) * config.width
    kept = 2 * (down + config.row_groups) * config.width
    return sum_bytes(problem) * (config.buffers * step * row + ring + 2 * step * sums + kept) + 4 * row


def strips_of(problem: FilterProblem, config: BoxGroupsConfig) -> int:
    """Strips of a plane."""
    return ceil_div(problem.out_w, config.width)


def march_of(problem: FilterProblem, config: BoxGroupsConfig) -> March:
    strips = problem.batch * problem.channels * strips_of(problem, config)
    return March(
        strips, problem.out_h, problem.kh - 1 + GROUP, GROUP * config.row_groups, 1, config.threads // 32,
        config.min_blocks,
    )  # fmt: skip


class BoxGroups(GpuAlgorithm):
    """Sums without differences, least and largest values of boxes, by groups of 16; no workspace."""

    name = "box"
    strategy = "groups"
    paper = "sums of groups along rows and columns, in one launch"
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
        if max(problem.h, problem.w) > EXTENT:
            reasons.append(f"the image is {problem.h}x{problem.w}, and the limit is {EXTENT} rows and columns")
        if problem.reduction != "sum" and problem.sums == "int32":
            reasons.append("the least and the largest of int32 are found in float64")
        if not reasons and problem.batch * problem.channels * ceil_div(problem.out_w, GROUP * 4) >= 2**28:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        least = min(shared_bytes(problem, BoxGroupsConfig(*shape)) for shape in SHAPES)
        if not reasons and least > target.shared_per_block:
            has = f"{target.shared_per_block} on {target.arch}"
            reasons.append(f"a block needs {least} bytes of shared memory at least, and has {has}")
        return reasons

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[BoxGroupsConfig]:
        usable = []
        for shape in SHAPES:
            config = BoxGroupsConfig(*shape)
            shared = shared_bytes(problem, config)
            if shared > target.shared_per_block:
                continue
            registers = 36 * (sum_bytes(problem) // 4) + 40
            fitting = min(
                target.shared_per_multiprocessor // (shared + 1024), blocks_that_fit(registers, config.threads, target)
            )
            usable.append(replace(config, min_blocks=max(1, fitting)))
        yield from sorted(usable, key=lambda c: march_of(problem, c).rank(target))

    def plan(self, problem: FilterProblem, config: BoxGroupsConfig, target: Target) -> Plan:
        assert problem.reduction is not None
        strips, bands = strips_of(problem, config), march_of(problem, config).bands(target)
        what = ("op", OPERATIONS[problem.reduction]), ("weighted", problem.reduction == "sum")
        compiled: Constants = (*constants(problem, 1, problem.channels), *what)
        band_rows = Number("int", "band_rows", ceil_div(problem.out_h, bands))
        grid = strips * bands * problem.batch * problem.channels
        given = (*arguments(problem, strips, bands), band_rows)
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config)),))
