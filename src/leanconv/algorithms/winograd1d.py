"""Im2col-Winograd: one-dimensional Winograd along the rows in one kernel, for filters 2 to 9 wide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.algorithms.base import (
    Argument,
    Config,
    Constants,
    GpuAlgorithm,
    Launch,
    Plan,
    Target,
    ceil_div,
    conv_constants,
    has_wide_tensors,
)
from leanconv.problem import ConvProblem
from leanconv.winograd import WIDTHS, Rows, matrices


@dataclass(frozen=True)
class WinogradConfig(Config):
    """A warp computes ``lane_states`` states, each with a grid of lanes of thread_k filters x thread_tiles tiles.

    ``lanes_k`` lanes lie along the filters. The tiles are ``rows`` output rows of as many tiles each; ``run`` neighbouring tiles of a row share the pixels in
    which they overlap (the paper's ruse variant is 2). ``channels`` are multiplied in one step; ``stages`` steps are
    in shared memory at once. ``promoted``: the sums over one chunk of channels are added to long ones.
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

    @property
    def tile_k(self) -> int:
        """Filters of a block."""
        return self.lanes_k * self.thread_k

    @property
    def tiles(self) -> int:
        """Output tiles of a block."""
        return 32 // self.lane_states // self.lanes_k * self.thread_tiles

    @property
    def columns(self) -> int:
        """Tiles of one output row of a block."""
        return self.tiles // self.rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.states // self.lane_states


def ratios(rows: Rows) -> str:
    """A matrix as the kernels take it: a type whose parameters are numerators and denominators in turns."""
    numbers = ", ".join(f"{v.numerator}, {v.denominator}" for row in rows for v in row)
    return f"leanconv::Matrix<{len(rows)}, {len(rows[0])}, {numbers}>"


def shared_bytes(config: WinogradConfig, taps: int, tile: tuple[int, int], out_w: int, nhwc: bool, wide: bool) -> int:
    """Shared memory of a block; kernels/lib/winograd_tiles.cuh says what lies where."""
    states, channels = config.states, config.channels
    positions = (config.rows + taps - 1) * config.columns
    at_once = max(4, config.threads // channels)
    per_step = min(at_once * ceil_div(ceil_div(positions, taps), at_once), positions)
    run_pixels = tile[0] * ((config.run - 1) * out_w + tile[1])
    side_by_side = min(channels, 8)
    if nhwc:
        run_floats = run_pixels * channels
        run_floats += (32 + side_by_side * config.run - run_floats % 32) % 32
    else:
        run_floats = 4 * ceil_div(channels * (run_pixels | 1), 4)
    stage = channels * states * config.tile_k + per_step // config.run * run_floats
    plane = positions if config.lane_states == 1 else positions + (48 - positions % 32) % 32
    channel = states * plane
    channel += (32 + 32 // side_by_side - channel % 32) % 32
    pitch, lines = (4 * config.lanes_k, config.tiles) if nhwc else (config.tiles, 4 * config.lanes_k)
    exchange = states * (lines * (pitch + 4) + 8)
    table = config.columns * (32 if wide else 16)
    return table + 4 * max(config.stages * stage + 2 * channels * channel, exchange)


def states_of(problem: ConvProblem) -> tuple[int, ...]:
    """The numbers of states that serve the filters' width in the precision asked for, the widest tile first."""
    allowed = (16, 8, 4) if problem.precision in ("relaxed", "tf32") else (8, 4)
    return tuple(states for states in allowed if problem.s in WIDTHS[states])


@dataclass(frozen=True)
class Part:
    """A range of output columns that one kernel of the family computes, and where its filters lie, in floats."""

    states: int
    first: int
    count: int
    offset: int


def padded(problem: ConvProblem) -> tuple[int, int]:
    """Channels and filters of a group, as the transformed filters count them: whole tiles of any configuration."""
    k = problem.group_k
    return 16 * ceil_div(problem.group_c, 16), 32 if k <= 32 else 64 * ceil_div(k, 64)


def filter_floats(problem: ConvProblem, states: int) -> int:
    """Size of the transformed filters."""
    c, k = padded(problem)
    return problem.groups * problem.r * c * states * k


def computed(problem: ConvProblem) -> ConvProblem:
    """The forward convolution that is computed for ``problem``."""
    return problem.as_forward() if problem.op == "dgrad" else problem


def part_constants(problem: ConvProblem, part: Part, config: WinogradConfig) -> Constants:
    """The ``Problem`` struct of the kernels of one part."""
    forward = computed(problem)
    n = part.states + 1 - forward.s
    f = matrices(n, forward.s)
    tiles = ceil_div(part.count, n)
    c, k = padded(forward)
    return (
        *conv_constants(forward),
        ("states", part.states),
        ("taps", forward.r),
        ("tile_h", 1),
        ("tile_w", part.states),
        ("out_h", 1),
        ("out_w", n),
        ("first_q", part.first),
        ("last_q", part.first + part.count),
        ("row_tiles", config.run * ceil_div(tiles, config.run)),
        ("padded_c", c),
        ("padded_k", k),
        ("prepared_offset", part.offset),
        ("rotated", problem.op == "dgrad"),
        ("at", ratios(f.at)),
        ("g", ratios(f.g)),
        ("bt", ratios(f.bt)),
    )


class Winograd1d(GpuAlgorithm):
    """Winograd along the rows, no workspace but transformed filters; unit stride, widths 2 to 9, any height."""

    name = "winograd1d"
    paper = "Z. Zhang et al., Im2col-Winograd (ICPP 2024)"
    tier = "fp32"
    solves = ConvProblem

    def why_not(self, problem: ConvProblem) -> list[str]:
        """See GpuAlgorithm."""
        return []

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[WinogradConfig]:
        """See GpuAlgorithm."""
        yield WinogradConfig(states=states_of(problem)[0])

    def prepared_bytes(self, problem: ConvProblem) -> int:
        """See Algorithm."""
        return sum(4 * filter_floats(computed(problem), part.states) for part in self.parts(problem))

    def parts(self, problem: ConvProblem) -> tuple[Part, ...]:
        """How the rows are cut."""
        return (Part(states_of(problem)[0], 0, computed(problem).q, 0),)

    def plan(self, problem: ConvProblem, config: WinogradConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        prepare, launches = [], []
        for part in self.parts(problem):
            constants = part_constants(problem, part, config)
            prepare.append(self._filters(problem, constants))
            launches.append(self._product(problem, constants, config, target))
        return Plan(tuple(launches), prepare=tuple(prepare), prepared_bytes=self.prepared_bytes(problem))

    def _filters(self, problem: ConvProblem, constants: Constants) -> Launch:
        forward = computed(problem)
        c, k = padded(forward)
        threads, filters, channels = 256, 32, 8
        rows = min(forward.r, max(1, 40 * 1024 // (4 * filters * channels * forward.s)))
        weights = channels * rows * forward.s
        return Launch(
            header="winograd1d.cuh",
            function="leanconv::winograd1d_filters",
            problem=constants,
            tuning=(("threads", threads), ("filters", filters), ("channels", channels), ("rows", rows)),
            arguments=(Argument("const float*", "w"), Argument("float*", "prepared")),
            grid=problem.groups * ceil_div(forward.r, rows) * (c // channels) * (k // filters),
            block=threads,
            shared_bytes=4 * filters * (weights | 1),
        )

    def _product(self, problem: ConvProblem, constants: Constants, config: WinogradConfig, target: Target) -> Launch:
        forward, known = computed(problem), dict(constants)
        d = forward.dilation[0]
        row_groups = d * ceil_div(ceil_div(forward.p, d), config.rows)
        columns = forward.n * row_groups * int(known["row_tiles"])
        blocks = ceil_div(columns, config.columns) * ceil_div(forward.group_k, config.tile_k) * forward.groups
        n, nhwc = int(known["out_w"]), forward.layout == "NHWC"
        return Launch(
            header="winograd1d.cuh",
            function="leanconv::winograd1d",
            problem=constants,
            tuning=config.constants(),
            arguments=(
                Argument("const float*", "x"),
                Argument("const float*", "prepared"),
                Argument("const float*", "bias"),
                Argument("float*", "y"),
                Argument("long long", "batch", forward.n),
            ),
            grid=blocks,
            block=config.threads,
            shared_bytes=shared_bytes(config, forward.r, (1, config.states), n, nhwc, has_wide_tensors(forward)),
            min_blocks=config.min_blocks,
        )
