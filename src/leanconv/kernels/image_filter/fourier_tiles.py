"""Fourier tiles: a large filter that is no product of a column and a row, by transforms of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import Config, GpuAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import launch_cycles
from leanconv.kernels.image_filter.register_cache import EXTENT
from leanconv.kernels.image_filter.transform import (
    LENGTHS,
    TransformSpeeds,
    chunks,
    distances,
    elements_of,
    numbers,
    table_places,
    transform_launch,
)
from leanconv.plan import Argument, Constants, Launch, Number, Plan, Pointer, Target
from leanconv.problem import FilterProblem

#: Most bytes of a workspace, which holds as many pairs of tiles at a time as fit, one at least.
WORKSPACES = (96 << 20, 24 << 20, 0)


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


class FourierTiles(GpuAlgorithm):
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
        return [length for length in LENGTHS if length // elements_of(problem) <= 512]

    def workspace_bytes(self, problem: FilterProblem, config: FourierTilesConfig) -> int:
        return (1 + (problem.filters > 1)) * config.pairs * config.length**2 * 2 * item_bytes(problem.sums)

    def prepared_bytes(self, problem: FilterProblem, config: FourierTilesConfig | None = None) -> int:
        if config is None:
            return min((self.prepared_bytes(problem, each) for each in self._choices(problem)), default=0)
        return 2 * item_bytes(problem.sums) * (table_places(config) + problem.filters * config.length**2)

    def counted_bytes(self, problem: FilterProblem, config: FourierTilesConfig) -> int:
        more = self.prepared_bytes(problem, config) - self.prepared_bytes(problem)
        return self.workspace_bytes(problem, config) + more

    def _choices(self, problem: FilterProblem) -> list[FourierTilesConfig]:
        usable, elements = [], elements_of(problem)
        for length in self._lengths(problem):
            if length - max(problem.kh, problem.kw) < 63:
                continue
            lines, all_pairs = 1 if length // elements > 256 else 2, max(1, pairs_of(problem, length))
            one = self.workspace_bytes(problem, FourierTilesConfig(length, elements, lines, 1))
            usable += [
                FourierTilesConfig(length, elements, lines, max(1, min(all_pairs, most // one))) for most in WORKSPACES
            ]
        return list(dict.fromkeys(usable))

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[FourierTilesConfig]:
        """In the order of their expected times, which are not told: ``auto`` takes kernels without transforms first."""
        timed = ((self._cycles(problem, config, target), config) for config in self._choices(problem))
        yield from (config for _, config in by_time(timed))

    def _cycles(self, problem: FilterProblem, config: FourierTilesConfig, target: Target) -> float:
        speeds, n = TransformSpeeds.of(target, "tiles"), config.length
        pairs = pairs_of(problem, n)
        rounds = ceil_div(max(1, pairs), config.pairs)
        lines = n * (pairs * (1 + 3 * problem.filters) + 2 * problem.filters)
        bytes_of_sums = 2 * item_bytes(problem.sums) * n * n * (pairs * (2 + 3 * problem.filters) + 2 * problem.filters)
        work = speeds.cycles(n, lines, target)
        memory = (bytes_of_sums + problem.bytes) / target.bytes_per_cycle
        return launch_cycles(target) + max(work, memory) + (2 + rounds * (1 + 2 * problem.filters)) * speeds.start

    def plan(self, problem: FilterProblem, config: FourierTilesConfig, target: Target) -> Plan:
        sums, element, result = (DTYPES[each].ctype for each in (problem.sums, problem.dtype, problem.result))
        n, r, s, item = config.length, problem.kh, problem.kw, item_bytes(problem.sums)
        compiled: Constants = (
            ("element", element), ("sum", sums), ("result", result), ("border", BORDERS[problem.border].kernel),
            ("channels", problem.channels),
        )  # fmt: skip

        def launch(name: str, lines: int, arguments: tuple[Argument, ...], grid: int) -> Launch:
            beside = {"prepare_rows": 192, "rows": 48, "results": 48}.get(name, 64)
            return transform_launch(
                self, f"tiles_{name}", config, compiled, lines, lines, item, beside, arguments, grid, target
            )

        w, spectra = Pointer("w", sums), Pointer("prepared", sums)
        scratch = Pointer("workspace", sums)
        writes, keeps = replace(scratch, written=True), replace(spectra, written=True)
        groups = n // config.lines
        prepare = (
            launch("prepare_rows", 1, (w, keeps, *numbers(r=r, s=s)), problem.filters * r),
            launch("prepare_columns", config.lines, (keeps, *numbers(r=r, groups=groups)), problem.filters * groups),
        )
        down, across = tiles_of(problem, n)
        tiles = problem.batch * problem.channels * down * across
        shape = {"across": across, "down": down, "out_rows": n - r + 1, "out_columns": n - s + 1}
        # results of one of several filters lie beside the tiles' spectra
        beside = (problem.filters > 1) * config.pairs * n * n
        launches = []
        for first, pairs in chunks(pairs_of(problem, n), config.pairs):
            rows: tuple[Argument, ...] = (
                Pointer("x", element), spectra, writes, Number(sums, "value"),
                *numbers(height=problem.h, width=problem.w),
                *distances(x_pitch=problem.x_pitch, x_step=problem.x_step, tiles=tiles),
                *numbers(first_pair=first, **shape, out_height=problem.out_h, out_width=problem.out_w),
                *numbers(anchor_y=problem.anchor[0], anchor_x=problem.anchor[1]),
            )  # fmt: skip
            launches.append(launch("rows", 1, rows, pairs * n))
            for filter_ in range(problem.filters):
                columns: tuple[Argument, ...] = (
                    spectra,
                    writes,
                    *distances(beside=beside),
                    *numbers(filter=filter_, groups=groups),
                )
                launches.append(launch("columns", config.lines, columns, pairs * groups))
                results: tuple[Argument, ...] = (
                    spectra, scratch, Pointer("y", result, written=True), Number(sums, "delta"),
                    *numbers(out_height=problem.out_h, out_width=problem.out_w),
                    *distances(y_pitch=problem.y_pitch, y_step=problem.y_step, beside=beside, tiles=tiles),
                    *numbers(first_pair=first, filters=problem.filters, filter=filter_, **shape),
                )  # fmt: skip
                launches.append(launch("results", 1, results, pairs * shape["out_rows"]))
        prepared = self.prepared_bytes(problem, config)
        return Plan(tuple(launches), self.workspace_bytes(problem, config), prepare, prepared)
