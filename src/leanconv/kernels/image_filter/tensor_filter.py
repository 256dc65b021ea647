"""Image filters on tensor cores: a row of outputs is a product of windows and a band of weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.dtypes import item_bytes
from leanconv.kernels.contract import Arithmetic, Config, GpuAlgorithm, ceil_div
from leanconv.kernels.image_filter.arguments import arguments, constants
from leanconv.kernels.image_filter.register_cache import EXTENT, LIMIT
from leanconv.plan import Number, Plan, Target
from leanconv.problem import FilterProblem

#: Types of images: those whose elements are exact in two pieces of float16, or scaled to be cut in two.
TYPES = ("uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float32")
#: Registers of a thread.
REGISTERS = 255


@dataclass(frozen=True)
class TensorFilterConfig(Config):
    """A warp has ``tiles`` x 128 columns and ``rows`` rows of outputs, and loads input rows ``depth`` rows ahead. Weights
    are in ``shared`` memory or in registers."""

    rows: int = 64
    tiles: int = 1
    depth: int = 4
    unroll: int = 1
    warps: int = 4
    shared: bool = False
    min_blocks: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps


def steps_of(problem: FilterProblem) -> int:
    """Products of k16 that the window of 8 outputs takes."""
    return ceil_div(-problem.anchor[1] % 4 + 8 + problem.kw - 1, 16)


def pieces_of(problem: FilterProblem) -> tuple[int, int]:
    """Pieces of an element and of a weight."""
    if problem.dtype == "bfloat16":
        return 1, 3
    return 1 if problem.dtype in ("uint8", "int8", "float16") else 2, 2


def shared_bytes(problem: FilterProblem, config: TensorFilterConfig) -> int:
    """Shared memory of a block: weights, and for each warp a ring of rows, and the columns of a strip at an edge."""
    channels, size = problem.channels, item_bytes(problem.dtype)
    pad, in_vector = ceil_div(problem.anchor[1], 4) * 4, 16 // size
    left = ceil_div(pad * channels, in_vector) * in_vector
    width = 128 * config.tiles
    row = ceil_div(left + (width - pad - 8 + 16 * steps_of(problem)) * channels, in_vector) * in_vector
    staging = width * channels * item_bytes(problem.result) if channels > 1 else 0
    weights = 8 * 32 * pieces_of(problem)[1] * problem.kh * steps_of(problem) if config.shared else 0
    return weights + config.warps * (row * (config.depth * size + 4) + staging)


#: Rows of outputs in whose time a warp makes its weights' fragments.
SETUP_ROWS = 6


def strips_of(problem: FilterProblem, tiles: int) -> int:
    """Strips of all images, one for each filter."""
    return ceil_div(problem.out_w, 128 * tiles) * problem.batch * problem.filters


def rows_of_band(problem: FilterProblem, tiles: int, warps: int, blocks: int, target: Target) -> int:
    """Rows of outputs of a warp, such that all that run at a time end at a time: of whole waves the cheapest, with the
    rows that bands read twice."""
    slots, strips = blocks * warps * target.multiprocessors, max(1, strips_of(problem, tiles))

    def of(waves: int) -> tuple[int, int]:
        rows = ceil_div(max(1, problem.out_h), max(1, waves * slots // strips))
        return max(waves, ceil_div(strips, slots)) * (rows + problem.kh - 1 + SETUP_ROWS), rows

    return min(of(waves) for waves in (1, 2, 3, 4))[1]


def registers_needed(problem: FilterProblem, config: TensorFilterConfig) -> int:
    """Registers of a thread: sums, weights, pixels on their way and in use, and addresses."""
    steps, (pixel, weight), words = steps_of(problem), pieces_of(problem), item_bytes(problem.dtype)
    tiles = config.tiles * problem.channels
    sums = 4 * problem.kh * tiles + (16 if pixel == 2 else 0)
    weights = 2 * weight * (4 if config.shared else problem.kh) * steps
    return sums + weights + tiles * steps * (2 * words + 4 * pixel) + 32


class TensorFilter(GpuAlgorithm):
    """Correlation by mma.sync, sums in float32; pieces of pixels and weights, no workspace."""

    name = "tensor_filter"
    paper = "the band matrix of a filter's row"
    precision = "fp32"
    solves = "filter2d"

    def arithmetic(self, problem: FilterProblem) -> Arithmetic:
        return "fp16"

    def why_not(self, problem: FilterProblem, target: Target) -> list[str]:
        reasons = ["the filter is given as products of a column and a row"] if problem.rank else []
        if problem.reduction is not None:
            reasons = ["a box has no weights"]
        if not target.warp_products:
            reasons.append(f"{target.arch} has no mma.sync of float16")
        if problem.dtype not in TYPES or problem.sums != "float32":
            reasons.append(f"from {problem.dtype} to {problem.result} sums are {problem.sums}; tensor cores sum in float32")
        if problem.is_volume:
            reasons.append("it filters images, not volumes")
        if problem.channels > 4:
            reasons.append(f"{problem.channels} channels lie side by side, and the limit is 4")
        if not (1 <= problem.kh <= LIMIT and 1 <= problem.kw <= LIMIT):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {LIMIT}x{LIMIT}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if max(problem.h, problem.w * problem.channels) > EXTENT:
            each = f" of {problem.channels} channels" if problem.channels > 1 else ""
            reasons.append(f"the image is {problem.h}x{problem.w}{each}, and the limit is {EXTENT} rows and elements")
        return reasons

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[TensorFilterConfig]:
        for shape in ((64, 1, 8, 4, 4, False), (64, 1, 4, 1, 4, True), (64, 2, 2, 1, 4, True), (64, 2, 4, 4, 4, False), (64, 1, 2, 2, 4, True)):
            config = TensorFilterConfig(*shape)
            if registers_needed(problem, config) <= REGISTERS:
                yield config

    def plan(self, problem: FilterProblem, config: TensorFilterConfig, target: Target) -> Plan:
        strips = ceil_div(problem.out_w, 128 * config.tiles)
        bands = ceil_div(problem.out_h, config.rows)
        tuning = tuple(each for each in config.constants() if each[0] != "rows")
        compiled = (
            *constants(problem, problem.channels, 1), ("all_filters", problem.filters), ("per_image", problem.per_image),
        )  # fmt: skip
        grid = ceil_div(strips * bands, config.warps) * problem.batch * problem.filters
        given = (*arguments(problem, strips, bands), Number("int", "band_rows", config.rows))
        return Plan((self.launch(config, compiled, given, grid, shared_bytes(problem, config), tuning),))
