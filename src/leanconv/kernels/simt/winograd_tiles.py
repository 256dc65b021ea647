"""What the fused Winograd kernels share on the host, as winograd_*.cuh on the device.

`winograd1d` and `winograd2d` are one kernel with two sets of transforms: from a tile's pixels to its states, from a
filter's weights to their states, from sums to outputs. In 1-D these are products with a matrix, in 2-D products from
both sides; the matrices come from `leanconv.kernels.winograd_matrices`. All else depends on the number of states alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from leanconv.kernels.common.layers import (
    conv_arguments,
    conv_constants,
    filter_slices,
    forward_of,
    has_wide_tensors,
)
from leanconv.kernels.contract import Config, ceil_div, named, variant
from leanconv.kernels.cost import Speeds, launch_cycles
from leanconv.kernels.winograd_matrices import Matrices, Rows
from leanconv.plan import Constants, Launch, Pointer, Target
from leanconv.problem import ConvProblem

#: Instructions of one input transform, by whether it is of a square and by its states.
INSTRUCTIONS = {(False, 4): 30, (False, 8): 55, (False, 16): 170, (True, 16): 75, (True, 36): 250}


@dataclass(frozen=True)
class WinogradSpeeds(Speeds):
    """Of the fused Winograd kernels."""

    #: of a block before its first product
    prologue_cycles: int


@dataclass(frozen=True)
class WinogradTileConfig(Config):
    """A warp computes ``lane_states`` states, each with a grid of lanes of thread_k filters x thread_tiles tiles.

    ``lanes_k`` lanes lie along the filters. A block has ``rows`` output rows of as many tiles each. ``run``
    neighbouring tiles of a row share the pixels in which they overlap (2: the ruse variant of "Im2col-Winograd"). A
    step multiplies ``channels``; shared memory holds ``stages`` steps. ``promoted``: partial sums over one step's
    channels are added to long ones. ``producers``: warps that copy and transform while the others multiply.
    """

    states: int = 8
    thread_k: int = 8
    thread_tiles: int = 8
    lanes_k: int = 8
    lane_states: int = 1
    rows: int = 4
    run: int = 1
    channels: int = 8
    stages: int = 3
    min_blocks: int = 2
    promoted: bool = False
    producers: int = 0

    @property
    def order(self) -> Hashable:
        """The order of a state's sum: for a step of channels one filter row after the other, then the next step."""
        return self.states, self.channels, self.promoted

    @cached_property
    def tile_k(self) -> int:
        return self.lanes_k * self.thread_k

    @cached_property
    def tiles(self) -> int:
        """Output tiles of a block."""
        return 32 // self.lane_states // self.lanes_k * self.thread_tiles

    @cached_property
    def columns(self) -> int:
        """Tiles of one output row of a block; in 2-D all of them."""
        return self.tiles // self.rows

    @cached_property
    def threads(self) -> int:
        return 32 * (self.states // self.lane_states + self.producers)


@dataclass(frozen=True)
class Transform:
    """What one kernel transforms: F(n, width) along the rows, or with ``square`` along rows and columns.

    ``taps`` transforms of a filter are computed together: in 2-D the filter's one, in 1-D those of a block of its rows,
    of which a filter has ``row_blocks``: of volumes one for each slice, in 2-D too. Wide rows are cut into
    ``column_blocks``, each with transforms of its own. The kernel computes columns ``first`` to ``first + count`` of
    the output. Its filters begin at ``offset``, in floats.
    """

    matrices: Matrices
    square: bool
    first: int
    count: int
    taps: int = 1
    row_blocks: int = 1
    offset: int = 0
    column_blocks: int = 1

    @cached_property
    def states(self) -> int:
        return self.tile[0] * self.tile[1]

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of pixels of a tile."""
        return (self.matrices.alpha if self.square else 1, self.matrices.alpha)

    @cached_property
    def out(self) -> tuple[int, int]:
        """Rows and columns of outputs of a tile."""
        return (self.matrices.n if self.square else 1, self.matrices.n)

    @cached_property
    def of_filter(self) -> int:
        """Transforms of one filter and channel, those of the rows of zeros that fill the last block among them."""
        return self.taps * self.row_blocks * self.column_blocks

    @cached_property
    def weights(self) -> int:
        """Weights that one transform reads."""
        return self.matrices.r * (self.matrices.r if self.square else 1)

    def row_tiles(self, config: WinogradTileConfig) -> int:
        """Tiles of a row of outputs: whole runs."""
        return config.run * ceil_div(ceil_div(self.count, self.matrices.n), config.run)


def strided_slices(problem: ConvProblem) -> list[str]:
    """Why the kernels cannot compute a gradient of a layer with a stride along the depth; forward they take any."""
    if problem.op != "dgrad" or problem.stride_d == 1:
        return []
    return [f"stride {problem.stride_d} along the depth is not 1, which gradients require"]


def padded_sizes(problem: ConvProblem) -> tuple[int, int]:
    """Channels and filters of a group, as the transformed filters count them: whole tiles of any configuration."""
    k = problem.group_k
    return 16 * ceil_div(problem.group_c, 16), 32 if k <= 32 else 64 * ceil_div(k, 64)


def prepared_floats(problem: ConvProblem, transform: Transform) -> int:
    """Size of the transformed filters."""
    c, k = padded_sizes(forward_of(problem))
    return problem.groups * transform.of_filter * c * transform.states * k


def _ratios(rows: Rows) -> str:
    """A matrix as the kernels take it: a type whose parameters are alternate numerators and denominators."""
    numbers = ", ".join(f"{v.numerator}, {v.denominator}" for row in rows for v in row)
    return f"leanconv::Matrix<{len(rows)}, {len(rows[0])}, {numbers}>"


def _filter_constants(problem: ConvProblem, transform: Transform) -> Constants:
    """The ``Problem`` struct of the launch that transforms filters: nothing that depends on the image."""
    forward = forward_of(problem)
    c, k = padded_sizes(forward)
    return (
        *named(forward, "r s groups group_c group_k"),
        ("nhwc", forward.layout == "NHWC"),
        ("chwn", forward.layout == "CHWN"),
        ("rotated", problem.op == "dgrad"),
        ("states", transform.states),
        ("taps", transform.taps),
        ("tile_h", transform.tile[0]),
        ("tile_w", transform.tile[1]),
        ("out_h", transform.out[0]),
        ("out_w", transform.out[1]),
        ("padded_c", c),
        ("padded_k", k),
        ("prepared_offset", transform.offset),
        ("g", _ratios(transform.matrices.g)),
        *filter_slices(forward),
    )


def _constants(problem: ConvProblem, transform: Transform, config: WinogradTileConfig) -> Constants:
    known = {**dict(conv_constants(forward_of(problem))), **dict(_filter_constants(problem, transform))}
    del known["g"], known["rotated"]
    return (
        *known.items(),
        ("first_q", transform.first),
        ("last_q", transform.first + transform.count),
        ("row_tiles", transform.row_tiles(config)),
        ("at", _ratios(transform.matrices.at)),
        ("bt", _ratios(transform.matrices.bt)),
    )


def _padded(size: int, bank: int) -> int:
    """The least size, from ``size`` on, after which the next row begins ``bank`` banks further on."""
    return size + (bank - size) % 32


def geometry(problem: ConvProblem, transform: Transform, config: WinogradTileConfig) -> dict[str, int]:
    """Sizes of a block's tile and, in floats, of what it keeps in shared memory: see winograd_tiles.cuh."""
    chwn, channels, states = problem.layout == "CHWN", config.channels, transform.states
    positions = (config.rows + transform.taps - 1) * config.columns
    of_step = 4 * ceil_div(ceil_div(positions, transform.taps), 4)
    run_width = (config.run - 1) * transform.matrices.n + transform.matrices.alpha
    run_pixels, runs, side_by_side = transform.tile[0] * run_width, of_step // config.run, min(channels, 8)
    neighbours = 32 // side_by_side
    pixel_pitch, channel_pitch, run_pitch = {
        "NHWC": (channels, 1, _padded(run_pixels * channels, side_by_side * config.run)),
        "NCHW": (1, run_pixels | 1, 4 * ceil_div(channels * (run_pixels | 1), 4)),
        "CHWN": (of_step, _padded(run_pixels * of_step, neighbours), 1),
    }[problem.layout]
    plane = positions if config.lane_states == 1 else _padded(positions, 32 // config.lane_states)
    lines, line = config.tiles, 4 * config.lanes_k
    if problem.layout != "NHWC":
        lines, line = line, lines
    return {
        "tile_k": config.tile_k,
        "tiles": config.tiles,
        "columns": config.columns,
        "positions": positions,
        "slice": of_step,
        "run_width": run_width,
        "run_pixels": run_pixels,
        "step_sources": runs // (4 if chwn and problem.n % 4 == 0 else 1) * run_pixels,
        "side_by_side": side_by_side,
        "pixel_pitch": pixel_pitch,
        "channel_pitch": channel_pitch,
        "run_pitch": run_pitch,
        "stage_floats": channels * states * config.tile_k + (channels * channel_pitch if chwn else runs * run_pitch),
        "plane": plane,
        "channel_floats": _padded(states * plane, neighbours),
        "exchange_pitch": line + 4,
        "exchange_plane": lines * (line + 4) + 8,
    }


def shared_bytes(problem: ConvProblem, transform: Transform, config: WinogradTileConfig) -> int:
    """Shared memory of a block: its tables, and stages with two steps of transformed tiles, or exchanged sums."""
    sizes, wide = geometry(problem, transform, config), has_wide_tensors(forward_of(problem))
    source = 16 if wide or transform.column_blocks > 1 else 8
    column = 16 * (1 + wide + problem.is_volume)
    tables = config.columns * column + 2 * ceil_div(transform.taps * sizes["step_sources"], 2) * source
    stages = config.stages * sizes["stage_floats"] + 2 * config.channels * sizes["channel_floats"]
    return tables + 4 * max(stages, transform.states * sizes["exchange_plane"])


def blocks(problem: ConvProblem, transform: Transform, config: WinogradTileConfig) -> int:
    forward = forward_of(problem)
    d = forward.dilation[0]
    row_groups = d * ceil_div(ceil_div(forward.p, d), config.rows * transform.out[0])
    columns = forward.n * forward.z * row_groups * transform.row_tiles(config)
    return ceil_div(columns, config.columns) * ceil_div(forward.group_k, config.tile_k) * forward.groups


W = TypeVar("W", bound=WinogradTileConfig)


def fitted(problem: ConvProblem, transform: Transform, config: W, target: Target) -> W | None:
    """The configuration with as many blocks at once as shared memory has room for; None where it cannot run."""
    if config.producers and not target.register_pools:
        return None
    # Neighbouring tiles of CHWN are of neighbouring images, and share no pixels.
    if config.run > 1 and problem.layout == "CHWN":
        return None
    needed = shared_bytes(problem, transform, config)
    if needed > target.shared_per_block or padded_sizes(forward_of(problem))[1] % config.tile_k:
        return None
    # The system takes a KiB of each block.
    at_once = target.shared_per_multiprocessor // (needed + 1024)
    together = max(1, min(config.min_blocks, at_once))
    return config if together == config.min_blocks else variant(config, min_blocks=together)


def main_cycles(
    problem: ConvProblem, transform: Transform, config: WinogradTileConfig, speed: float, store: float, target: Target
) -> float:
    """Predicted clock cycles of `main_launch`.

    The busiest multiprocessor sets the time. A block of it takes multiply-adds and transforms at ``speed``, a share of
    the FMA peak, and a fixed time for its beginning and its outputs, ``store`` cycles each. Explored (H200,
    cbb1363): on suites ``winograd1d`` and ``opencnn`` this orders the configurations as measured but for differences
    under 5 %.
    """
    forward, out = forward_of(problem), transform.out[0] * transform.out[1]
    channels = ceil_div(forward.group_c, config.channels) * config.channels
    positions = (config.rows + transform.taps - 1) * config.columns
    transforms = positions / transform.taps * INSTRUCTIONS[transform.square, transform.states]
    work = config.tile_k * config.tiles * config.states + transforms
    products = channels * transform.of_filter * work / target.fma_lanes / speed
    fixed = WinogradSpeeds.of(target).prologue_cycles + store * config.tile_k * config.tiles * out
    one = products + fixed / config.min_blocks
    on_one = max(1, ceil_div(blocks(problem, transform, config), target.multiprocessors))
    # The last blocks may be fewer than fit at once: few warps hide less latency.
    last, warps = on_one % config.min_blocks, config.threads / 128
    few, full = last * warps, config.min_blocks * warps
    return one * (on_one - last) + (last * one * full / (full + 4) * (few + 4) / few if last else 0.0)


def prepare_cycles(problem: ConvProblem, transform: Transform, target: Target) -> float:
    """Predicted clock cycles of `filter_launch`, and until the next launch."""
    weights = problem.k * problem.group_c * problem.taps
    return launch_cycles(target) + 4 * (prepared_floats(problem, transform) + weights) / target.bytes_per_cycle


def filter_launch(name: str, problem: ConvProblem, transform: Transform) -> Launch:
    """The launch that transforms the filters for algorithm ``name``."""
    c, k = padded_sizes(forward_of(problem))
    threads, filters, channels = 256, 32, 8
    most = max(1, 40 * 1024 // (4 * filters * channels * transform.weights))
    rows = min(transform.taps * transform.column_blocks, most)
    return Launch(
        header=f"kernels/simt/{name}.cuh",
        function=f"leanconv::{name}_filters",
        problem=_filter_constants(problem, transform),
        tuning=(("threads", threads), ("filters", filters), ("channels", channels), ("rows", rows)),
        arguments=(Pointer("w"), Pointer("prepared", written=True)),
        grid=problem.groups * ceil_div(transform.of_filter, rows) * (c // channels) * (k // filters),
        block=threads,
        shared_bytes=4 * filters * (channels * rows * transform.weights | 1),
    )


def main_launch(name: str, problem: ConvProblem, transform: Transform, config: WinogradTileConfig) -> Launch:
    """The launch that convolves, with filters transformed by `filter_launch`."""
    return Launch(
        header=f"kernels/simt/{name}.cuh",
        function=f"leanconv::{name}",
        problem=_constants(problem, transform, config),
        tuning=(*config.constants(), *geometry(problem, transform, config).items()),
        arguments=conv_arguments(problem, filters="prepared"),
        grid=blocks(problem, transform, config),
        block=config.threads,
        shared_bytes=shared_bytes(problem, transform, config),
        min_blocks=config.min_blocks,
    )
