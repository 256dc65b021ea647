"""Fourier tiles: a large filter that is no product of a column and a row, by transforms of tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.image_filter.fourier_lines import LENGTHS, chunks, distances, numbers, table_places
from leanconv.kernels.image_filter.register_cache import EXTENT
from leanconv.plan import Argument, Constants, Launch, Number, Plan, Pointer, Target
from leanconv.problem import FilterProblem

#: Bytes of a workspace for which pairs of tiles are filtered one after the other.
WORKSPACES = (64 << 20, 1 << 62, 256 << 20, 0)


@dataclass(frozen=True)
class FourierTilesConfig(Config):
    """Tiles of ``length`` rows and columns, a thread having ``elements`` of one of these; ``lines`` columns a block;
    so many ``pairs`` of tiles at a time."""

    length: int = 1024
    elements: int = 16
    lines: int = 2
    pairs: int = 8

    @property
    def threads(self) -> int:
        return self.length // self.elements


def tiles_of(problem: FilterProblem, length: int) -> tuple[int, int]:
    """Tiles below each other and beside each other that make an image's results."""
    down = ceil_div(max(1, problem.out_h), length - problem.kh + 1)
    return down, ceil_div(max(1, problem.out_w), length - problem.kw + 1)


def pairs_of(problem: FilterProblem, length: int) -> int:
    return ceil_div(problem.batch * problem.channels * prod(tiles_of(problem, length)), 2)


class FourierTiles(TimedAlgorithm):
    """Filters that are no products, by overlap-save in two dimensions, in float32 or float64; every type and border."""

    name = "fourier"
    strategy = "tiles"
    paper = "the overlap-save method of fast convolution"
    precision = "fp32"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        reasons = ["the filter is given as products of a column and a row"] if problem.rank else []
        if problem.reduction is not None:
            reasons = ["a box has no weights"]
        if problem.is_volume:
            reasons.append("it filters images, not volumes")
        if problem.per_image:
            reasons.append("it has filters for all images, not for each")
        if problem.sums == "int32":
            reasons.append("sums in int32 wrap around, and transforms do not")
        most = self._lengths(problem)[-1] - 64
        if not (1 <= problem.kh <= most and 1 <= problem.kw <= most):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {most}x{most}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if max(problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        return reasons

    def _lengths(self, problem: FilterProblem) -> list[int]:
        return [length for length in LENGTHS if length // _elements(problem) <= 512]

    def workspace_bytes(self, problem: FilterProblem, config: FourierTilesConfig) -> int:
        return (1 + (problem.filters > 1)) * config.pairs * config.length**2 * 2 * item_bytes(problem.sums)

    def prepared_bytes(self, problem: FilterProblem) -> int:
        """Of the smallest tiles that it takes."""
        return min((self._prepared(problem, config) for config in self._choices(problem)), default=0)

    def _prepared(self, problem: FilterProblem, config: FourierTilesConfig) -> int:
        return 2 * item_bytes(problem.sums) * (table_places(config) + problem.filters * config.length**2)

    def _choices(self, problem: FilterProblem) -> list[FourierTilesConfig]:
        usable, elements = [], _elements(problem)
        for length in self._lengths(problem):
            if length - max(problem.kh, problem.kw) < 63:
                continue
            lines, all_pairs = 1 if length // elements > 256 else 2, max(1, pairs_of(problem, length))
            one = self.workspace_bytes(problem, FourierTilesConfig(length, elements, lines, 1))
            usable += [
                FourierTilesConfig(length, elements, lines, max(1, min(all_pairs, most // one))) for most in WORKSPACES
            ]
        return list(dict.fromkeys(usable))

    def timed(self, problem: FilterProblem, target: Target) -> list[tuple[float, FourierTilesConfig]]:
        return by_time((self._cycles(problem, config, target), config) for config in self._choices(problem))
