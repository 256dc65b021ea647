"""Errors on data of every kind: sparse, of any range, with outliers; for docs/numerics.md.

``python -m research precision`` computes them on any machine. `research.rounding` says rounding for rounding what a
GPU's kernels compute, so no GPU is needed, and none is measured; beside it stand the CPU engine's algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from leanconv.bench import columns
from leanconv.cpu import CPU_ALGORITHMS, oracle, winograd1d, winograd2d
from leanconv.kernels.contract import ceil_div
from leanconv.kernels.cost import mean_products
from leanconv.kernels.simt import winograd1d as gpu_winograd1d
from leanconv.kernels.simt import winograd2d as gpu_winograd2d
from leanconv.kernels.simt.winograd_tiles import Transform, WinogradTileConfig
from leanconv.kernels.winograd_matrices import COLUMN_BLOCKS, LEAST_PRODUCTS, WIDTHS, Matrices, matrices, outputs_2d
from leanconv.kernels.winograd_matrices import kernels as winograd_kernels
from leanconv.problem import ConvProblem
from report import numerics, records
from research import rounding
from research.bounds import absolute_bound, absolute_error
from research.data import KINDS, ONE_WAY, draw

#: Widths of filters that are cut into column blocks, and the width of a block.
WIDE = ((9, 3), (8, 4), (31, 4), (9, 5))
#: Draws of each kind; the largest error of them counts.
SEEDS = 3

#: Where, at which precision level, and a function of pixels and filters.
Way = tuple[str, str, Callable[[np.ndarray, np.ndarray], np.ndarray]]


@dataclass(frozen=True)
class Kernel:
    """A transform (None: plain sums) on one layer: how a GPU's kernel computes it, and algorithms of the CPU engine.

    ``tiles`` are what a GPU's kernel transforms.
    """

    name: str
    problem: ConvProblem
    tiles: Transform | None
    ways: tuple[Way, ...]

    @property
    def transform(self) -> Matrices | None:
        """The matrices, None without any."""
        return self.tiles.matrices if self.tiles else None

    def bound(self, worst: bool = False) -> float:
        """`absolute_bound` of it."""
        return absolute_bound(self.problem, self.transform, bool(self.tiles and self.tiles.square), worst)


def statement(
    problem: ConvProblem, tiles: Transform | None, config: WinogradTileConfig | None, x: np.ndarray, w: np.ndarray
) -> np.ndarray:
    """What a GPU's kernel returns; ``config`` says in which order it adds."""
    if tiles is None or config is None:
        return rounding.direct(problem, x, w)
    return rounding.winograd(problem, tiles, config.channels, config.promoted, x, w)


def rows_kernel(alpha: int, width: int, height: int, channels: int | None = None, block: int = 0) -> Kernel:
    """Γalpha(alpha + 1 − width, width), or of column blocks of the filter rows, on a small layer of whole tiles, as
    large as its input; by default with as few channels as precision fp32 lets 8 states serve.
    """
    n = alpha + 1 - (block or width)
    padding = ((height - 1) // 2, height // 2, (width - 1) // 2, width // 2)
    row = n * ceil_div(max(COLUMN_BLOCKS.values()) if block else 14, n)
    problem = ConvProblem(1, 1, 12, row, 8, height, width, padding=padding)
    enough = (c for c in count(1) if mean_products(replace(problem, c=c)) >= LEAST_PRODUCTS)
    problem = replace(problem, c=channels or next(enough))
    pair = alpha, block or width
    tiles = gpu_winograd1d.transform_of(problem, gpu_winograd1d.ColumnRange(*pair, 0, problem.q))
    config = gpu_winograd1d.CONFIGS[alpha][0]
    in_precision = {
        "GPU": gpu_winograd1d.kernels_of(problem),
        "CPU": winograd_kernels(width, mean_products(problem), problem.w, "fp32"),
    }
    levels = {where: "fp32" if pair in found else "relaxed" for where, found in in_precision.items()}
    ways: tuple[Way, ...] = (
        (
            "GPU",
            levels["GPU"],
            partial(statement, problem, tiles, config),
        ),
        ("CPU", levels["CPU"], lambda x, w: winograd1d.convolve(problem, alpha, x, w, None, block)),
    )
    name = f"Γ{alpha}({n},{pair[1]})" + (f" in {ceil_div(width, block)} pieces" if block else "")
    return Kernel(name, problem, tiles, ways)


def square_kernel(m: int, channels: int) -> Kernel:
    """F(m × m, 3 × 3) on a small layer."""
    level = "fp32" if m in outputs_2d("fp32") else "relaxed"
    problem = ConvProblem(1, channels, 12, 12, 8, 3, 3, padding=(1, 1, 1, 1))
    tiles = gpu_winograd2d.transform_of(problem, m)
    config = next(config for config in gpu_winograd2d.CONFIGS if gpu_winograd2d.outputs_of(config) == m)
    ways: tuple[Way, ...] = (
        ("GPU", level, partial(statement, problem, tiles, config)),
        ("CPU", level, lambda x, w: winograd2d.convolve(problem, m, x, w, None)),
    )
    return Kernel(f"F({m}×{m}, 3×3)", problem, tiles, ways)


def plain_kernels(size: int, channels: int) -> list[Kernel]:
    """One sum of multiply-adds on a small layer, and the CPU engine's algorithms without transforms."""
    problem = ConvProblem(1, channels, 12, 12, 8, size, size, padding=(size // 2,) * 4)
    ways: dict[str, Way] = {"one sum": ("GPU", "ieee", partial(statement, problem, None, None))}
    for algorithm in CPU_ALGORITHMS:
        if algorithm.precision == "ieee" and not algorithm.reasons(problem, None):
            ways[algorithm.name] = ("CPU", "ieee", partial(algorithm.run, problem))
    return [Kernel(name, problem, None, (way,)) for name, way in ways.items()]


def every_kernel() -> Iterator[Kernel]:
    """Each kernel on the shortest sums that precision fp32 lets it serve, of one filter row and of square filters, and
    on 64 channels.
    """
    for size, channels in ((3, 11), (3, 64), (7, 64)):
        yield from plain_kernels(size, channels)
    for m in (2, 4):
        for channels in (1, 11, 64):
            yield square_kernel(m, channels)
    for alpha, widths in WIDTHS.items():
        for width in widths:
            if alpha == 4:
                yield rows_kernel(alpha, width, 1, 1)
            yield rows_kernel(alpha, width, 1)
            yield rows_kernel(alpha, width, width)
            yield rows_kernel(alpha, width, 3, 64)
            yield rows_kernel(alpha, width, width, 64)
    for width, block in WIDE:
        yield rows_kernel(8, width, 1, block=block)
        yield rows_kernel(8, width, 9, block=block)
        yield rows_kernel(8, width, 3, 64, block=block)


@dataclass(frozen=True)
class Entry:
    """The largest errors of a kernel on a layer and a kind of data, by the sequential sum's and in `absolute_error`.

    All numbers have four digits.
    """

    kernel: str
    where: str
    precision: str
    layer: str
    data: str
    factor: float
    absolute: float
    bound: float
    worst: float


def measure(
    measured: Sequence[Kernel] | None = None, kinds: Sequence[str] = (*KINDS, ONE_WAY), seeds: int = SEEDS
) -> list[Entry]:
    """The errors of ``measured``, by default of `every_kernel`."""
    entries = []
    for kernel in every_kernel() if measured is None else measured:
        problem = kernel.problem
        layer = f"{problem.r}×{problem.s}×{problem.c}"
        for kind in kinds:
            largest: dict[str, tuple[float, float]] = {where: (0.0, 0.0) for where, *_ in kernel.ways}
            for seed in range(seeds):
                x, w = draw(problem, kind, seed)
                sequential = max(oracle.FLOAT32_UNIT, oracle.sequential_error(problem, x, w))
                reference = oracle.conv2d(problem, x, w)
                for where, _, run in kernel.ways:
                    y = run(x, w)
                    # a factor means nothing where all outputs are zero, as of a pixel that they see by weights of zero
                    relative = oracle.relative_error(y, reference) if reference.any() else 0.0
                    found = relative / sequential, absolute_error(problem, y, x, w)
                    factor, absolute = (max(pair) for pair in zip(found, largest[where], strict=True))
                    largest[where] = factor, absolute
            bounds = kernel.bound(), kernel.bound(worst=True)
            for where, level, _ in kernel.ways:
                numbers = (float(f"{number:.4g}") for number in (*largest[where], *bounds))
                entries.append(Entry(kernel.name, where, level, layer, kind, *numbers))
    return entries


def growth_table() -> str:
    """A Markdown table: what the matrices of each transform do to roundings, by which bounds are made."""
    lines = [["plain sums", "ieee", "1", "1"]]
    ways: list[tuple[str, str, Matrices, int]] = []
    for alpha, widths in WIDTHS.items():
        for s in widths:
            level = "relaxed" if alpha == 16 else "fp32"
            if (alpha, s) == (8, 2):
                level = "fp32 on the CPU, relaxed on the GPU"
            ways.append((f"Γ{alpha}({alpha + 1 - s},{s})", level, matrices(alpha + 1 - s, s), 1))
    ways += [(f"F({m}×{m}, 3×3)", "fp32" if m in outputs_2d("fp32") else "relaxed", matrices(m, 3), 2) for m in (2, 4)]
    for name, level, transform, power in ways:
        lines.append([name, level, f"{transform.lone_growth**power:.3g}", f"{transform.worst_growth**power:.3g}"])
    return records.table((["kernel", "precision", "γ", "ρ"], lines))


def table(entries: Sequence[Entry], cell: Callable[[Entry], float]) -> str:
    """A Markdown table: a line for each kernel and place, a column for each kind of data, the largest of all layers."""
    kinds = list(dict.fromkeys(entry.data for entry in entries))
    lines = []
    for kernel, where, level in dict.fromkeys((entry.kernel, entry.where, entry.precision) for entry in entries):
        own = [entry for entry in entries if (entry.kernel, entry.where) == (kernel, where)]
        largest = [max(cell(entry) for entry in own if entry.data == kind) for kind in kinds]
        lines.append(
            [f"{kernel} {where}", level, *(f"{value:.2g}" if value < 10 else f"{value:.0f}" for value in largest)]
        )
    return records.table((["kernel", "precision", *kinds], lines))


def section(record: dict[str, Any]) -> str:
    """What docs/numerics.md says of a record."""
    entries = [Entry(**entry) for entry in record["entries"]]
    return "\n\n".join(
        (
            "## Data of every kind",
            f"Computed with NumPy on a CPU, {record['date']}, {records.revision(record)}, NumPy {record['numpy']}: no "
            "GPU was measured. Lines with GPU come from a NumPy statement of the kernels (`research/rounding.py`), "
            "which rounds as they do: the tests compare it, bit by bit, with the kernels on the emulator. Lines with "
            "CPU are of the CPU engine. Each number is the largest of several layers and draws.",
            "### What transforms do to roundings",
            growth_table(),
            "### ‖error‖ / ‖|w| ∗ |x|‖ in units of 2⁻²⁴",
            table(entries, lambda entry: entry.absolute),
            "### The same in parts of the bound γ·√K",
            table(entries, lambda entry: entry.absolute / entry.bound),
            "### Error over the sequential float32 sum's",
            table(entries, lambda entry: entry.factor),
        )
    )


def measure_machine(results: Path, revision: str | None = None) -> Path:
    """Compute every error and write the record below ``results``; returns the file."""
    path = results / "cpu" / "precision.json"
    columns.write(path, numerics.record("NumPy on a CPU", measure(), revision))
    return path
