"""Median: the middle one of the pixels of a small window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.contract import Config, GpuAlgorithm, ceil_div
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.register_cache import EXTENT, sum_bytes
from leanconv.plan import Plan, Target
from leanconv.problem import FilterProblem

#: Rows and columns of windows.
SIZES = (3, 5, 7)
#: Columns of a strip.
STRIP = 128


@dataclass(frozen=True)
class MedianConfig(Config):
    """``warps`` strips, one below the other, each with ``rows`` rows of 128 outputs."""

    rows: int = 4
    warps: int = 4
    min_blocks: int = 4

    @property
    def threads(self) -> int:
        return 32 * self.warps


def shared_bytes(problem: FilterProblem, config: MedianConfig) -> int:
    """Shared memory of a block: its input rows, and a row of outputs a warp."""
    halo = 2 * ceil_div(problem.kw // 2, 4) * 4
    row = ceil_div(STRIP + halo, 32) * 32
    inputs = config.rows * config.warps + problem.kh - 1
    return sum_bytes(problem) * (inputs * row + config.warps * STRIP)


class Median(GpuAlgorithm):
    """Selection in registers, every type and border, no workspace."""

    name = "median"
    paper = "J. Smith, Implementing median filters in XC4000E FPGAs (1996); forgetful selection"
    precision = "ieee"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if problem.reduction != "median":
            return ["no median is asked for"]
        reasons = ["it filters images, not volumes"] if problem.is_volume else []
        sizes = problem.kh, problem.kw
        if sizes not in [(size, size) for size in SIZES]:
            reasons.append(f"the window is {problem.kh}x{problem.kw}, and 3x3, 5x5 and 7x7 are known")
        elif not problem.valid and problem.anchor != (problem.kh // 2, problem.kw // 2):
            reasons.append(f"anchor={problem.anchor} is not the middle of the window")
        if problem.sums == "int32":
            reasons.append("pixels of int32 are compared in float64")
        if max(problem.h, problem.w) > EXTENT:
            reasons.append(f"the image is {problem.h}x{problem.w}, and the limit is {EXTENT} rows and columns")
        strips = problem.batch * problem.channels * ceil_div(problem.out_w, STRIP)
        if not reasons and strips * ceil_div(problem.out_h, 4) >= 2**31:
            images = f"{problem.batch} images of {problem.h}x{problem.w}"
            reasons.append(f"{images} may need more than 2**31 - 1 blocks")
        return reasons

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[MedianConfig]:
        # windows, what is kept, and addresses
        words = sum_bytes(problem) // 4
        registers = min(255, words * (problem.kh * (problem.kw + 3) + problem.kh * problem.kw // 2 + 6) + 60)
        for rows, warps in ((4, 4), (8, 4), (2, 2), (8, 8)):
            fitting = target.registers_per_multiprocessor // (ceil_div(registers, 8) * 8 * 32 * warps)
            yield MedianConfig(rows, warps, max(1, min(fitting, 32 // warps)))

    def plan(self, problem: FilterProblem, config: MedianConfig, target: Target) -> Plan:
        strips = ceil_div(problem.out_w, STRIP)
        bands = ceil_div(problem.out_h, config.rows * config.warps)
        grid = strips * bands * problem.batch * problem.channels
        compiled, given = constants(problem, 1, problem.channels), arguments(problem, strips, bands, weights=False)
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config)),))
