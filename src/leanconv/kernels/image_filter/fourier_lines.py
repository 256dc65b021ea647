"""Fourier lines: a large filter that is a column times a row, or few such products, by transforms of lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.images.borders import BORDERS
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import launch_cycles
from leanconv.kernels.image_filter.register_cache import EXTENT
from leanconv.kernels.image_filter.transform import (
    LENGTHS,
    LineSpeeds,
    chunks,
    distances,
    elements_of,
    numbers,
    table_places,
    transform_launch,
)
from leanconv.plan import Argument, Constants, Launch, Number, Plan, Pointer, Target
from leanconv.problem import FilterProblem

#: Most bytes of a workspace: images, and strips of an image's columns, are filtered one after the other. Explored
#: (H200, 2026-11-26, 2001x2001 on 8192x8192): 1505 µs with 65 MiB, 1394 with 256, 2059 with 32.
STRIPS = (96 << 20, 24 << 20, 6 << 20, 0)
#: Fewest columns of a strip.
FEWEST = 64


@dataclass(frozen=True)
class FourierLinesConfig(Config):
    """Transforms of ``length``, of which a thread has ``elements``; of columns ``lines`` pairs at a time. A launch
    takes ``images`` images, and ``columns`` columns of them."""

    length: int = 4096
    elements: int = 16
    lines: int = 2
    images: int = 1
    columns: int = 1024

    @property
    def threads(self) -> int:
        return self.length // self.elements


@lru_cache(maxsize=1024)
def parts_of(taps: int, length: int) -> int:
    """Pieces of a filter whose transforms are added up: so many that an output takes the least work."""
    most = ceil_div(4 * taps, length) + 1
    able = [parts for parts in range(1, most + 1) if length - ceil_div(taps, parts) >= 32]
    return min(able, key=lambda parts: (parts + 1) / outputs_of(taps, length, parts), default=0)


def outputs_of(taps: int, length: int, parts: int) -> int:
    """Outputs of a segment, in fours."""
    return (length - ceil_div(taps, parts) + 1) // 4 * 4


def pitch_of(problem: FilterProblem, columns: int) -> int:
    """Elements from row to row of a workspace of so many columns."""
    return ceil_div(columns * problem.channels, 4) * 4


class FourierLines(TimedAlgorithm):
    """Rows and columns apart, by overlap-save in float32 or float64, every type and border."""

    name = "fourier"
    strategy = "lines"
    paper = "the overlap-save method of fast convolution"
    precision = "fp32"
    solves = "filter2d"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        if not problem.rank:
            return ["the filter is not given as products of a column and a row"]
        reasons = ["it filters images, not volumes"] if problem.is_volume else []
        if problem.sums == "int32":
            reasons.append("sums in int32 wrap around, and transforms do not")
        if not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if max(problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        return reasons

    def workspace_bytes(self, problem: FilterProblem, config: FourierLinesConfig) -> int:
        rows = problem.rank * config.images * problem.h
        return rows * pitch_of(problem, config.columns) * item_bytes(problem.sums)

    def prepared_bytes(self, problem: FilterProblem, config: FourierLinesConfig | None = None) -> int:
        if config is None:
            return min((self.prepared_bytes(problem, each) for each in self._choices(problem)), default=0)
        parts = sum(parts_of(taps, config.length) for taps in (problem.kh, problem.kw))
        return 2 * item_bytes(problem.sums) * (table_places(config) + problem.rank * parts * config.length)

    def counted_bytes(self, problem: FilterProblem, config: FourierLinesConfig) -> int:
        more = self.prepared_bytes(problem, config) - self.prepared_bytes(problem)
        return self.workspace_bytes(problem, config) + more

    def _choices(self, problem: FilterProblem) -> list[FourierLinesConfig]:
        elements = elements_of(problem)
        usable = []
        for length in LENGTHS:
            if length // elements > 512 or not (parts_of(problem.kh, length) and parts_of(problem.kw, length)):
                continue
            step = outputs_of(problem.kw, length, parts_of(problem.kw, length))
            several = problem.rank > 1 or parts_of(problem.kh, length) > 1
            # sums of spectra take as many registers as a pair of lines
            lines = 1 if several or length // elements > 256 else 2
            whole = FourierLinesConfig(length, elements, lines, max(1, problem.batch), max(1, problem.out_w))
            image, strip = (
                max(1, self.workspace_bytes(problem, replace(whole, images=1, columns=columns)))
                for columns in (whole.columns, step)
            )
            for most in STRIPS:
                images = min(whole.images, most // image)
                columns = most // strip * step or max(FEWEST, step * most // strip // 4 * 4)
                columns = whole.columns if images else min(whole.columns, columns)
                usable.append(replace(whole, images=max(1, images), columns=columns))
        return list(dict.fromkeys(usable))

    def timed(self, problem: FilterProblem, target: Target) -> list[tuple[float, FourierLinesConfig]]:
        return by_time((self._cycles(problem, config, target), config) for config in self._choices(problem))

    def _cycles(self, problem: FilterProblem, config: FourierLinesConfig, target: Target) -> float:
        speeds, length = LineSpeeds.of(target, "lines"), config.length
        strips = ceil_div(max(1, problem.out_w), config.columns)
        launches = strips * ceil_div(max(1, problem.batch), config.images)
        lines = problem.batch * problem.channels
        sums = problem.rank * lines * problem.h * problem.out_w * item_bytes(problem.sums)
        total = float(launch_cycles(target) + speeds.start)
        for taps, count, extent, times, products, beside in (
            (problem.kw, lines * problem.h * problem.rank, config.columns, strips, 1, problem.operands[0]),
            (problem.kh, lines * problem.out_w, problem.out_h, 1, problem.rank, problem.operands[-1]),
        ):
            parts = parts_of(taps, length)
            segments = times * ceil_div(max(1, extent), outputs_of(taps, length, parts))
            work = speeds.cycles(length, ceil_div(count, 2) * segments * (products * parts + 1), target)
            memory = (sums + prod(beside.shape) * item_bytes(beside.dtype)) / target.bytes_per_cycle
            total += work + speeds.memory * memory + launches * speeds.start
        return total

    def plan(self, problem: FilterProblem, config: FourierLinesConfig, target: Target) -> Plan:
        sums, element, result = (DTYPES[each].ctype for each in (problem.sums, problem.dtype, problem.result))
        length, r, s, rank = config.length, problem.kh, problem.kw, problem.rank
        column_parts, row_parts = parts_of(r, length), parts_of(s, length)
        row_outputs, column_outputs = outputs_of(s, length, row_parts), outputs_of(r, length, column_parts)
        several = ("several_of_rows", row_parts > 1), ("several_of_columns", rank * column_parts > 1)
        compiled: Constants = (
            ("element", element), ("sum", sums), ("result", result), ("border", BORDERS[problem.border].kernel),
            ("channels", problem.channels), *several,
        )  # fmt: skip
        item, pitch = item_bytes(problem.sums), pitch_of(problem, config.columns)

        def launch(name: str, lines: int, arguments: tuple[Argument, ...], grid: int) -> Launch:
            sets = lines * (2 if dict(several).get(f"several_of_{name}") else 1)
            beside = 192 if name == "prepare" else 64
            return transform_launch(
                self, f"lines_{name}", config, compiled, lines, sets, item, beside, arguments, grid, target
            )

        w, spectra = Pointer("w", sums), Pointer("prepared", sums)
        value, delta = Number(sums, "value"), Number(sums, "delta")
        parts = numbers(rank=rank, r=r, s=s, row_parts=row_parts, column_parts=column_parts)
        blocks = rank * (row_parts + column_parts)
        prepare = launch("prepare", 1, (w, replace(spectra, written=True), *parts), blocks)
        launches = []
        for first_image, images in chunks(problem.batch, config.images):
            for first, columns in chunks(problem.out_w, config.columns):
                elements = columns * problem.channels
                segments, groups = ceil_div(columns, row_outputs), ceil_div(images * problem.h * problem.channels, 2)
                rows: tuple[Argument, ...] = (
                    Pointer("x", element), w, spectra, Pointer("workspace", sums, written=True), value,
                    *numbers(height=problem.h, width=problem.w),
                    *distances(x_pitch=problem.x_pitch, x_step=problem.x_step, pitch=pitch),
                    *numbers(first_image=first_image, images=images, first=first, columns=columns, r=r, s=s),
                    *numbers(anchor=problem.anchor[1], parts=row_parts, outputs=row_outputs),
                    *numbers(segments=segments, groups=groups),
                )  # fmt: skip
                launches.append(launch("rows", 1, rows, rank * groups * segments))
                segments, groups = ceil_div(problem.out_h, column_outputs), ceil_div(elements, 2 * config.lines)
                down: tuple[Argument, ...] = (
                    Pointer("workspace", sums), w, spectra, Pointer("y", result, written=True), value, delta,
                    *numbers(height=problem.h, out_height=problem.out_h),
                    *distances(pitch=pitch, y_pitch=problem.y_pitch, y_step=problem.y_step),
                    *numbers(first_image=first_image, images=images, first=first * problem.channels, columns=elements),
                    *numbers(r=r, s=s, anchor=problem.anchor[0], rank=rank, row_parts=row_parts, parts=column_parts),
                    *numbers(outputs=column_outputs, segments=segments, groups=groups),
                )  # fmt: skip
                launches.append(launch("columns", config.lines, down, images * groups * segments))
        memory = self.workspace_bytes(problem, config), self.prepared_bytes(problem, config)
        return Plan(tuple(launches), memory[0], (prepare,), memory[1])
