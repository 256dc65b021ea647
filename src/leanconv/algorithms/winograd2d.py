"""openCNN: two-dimensional Winograd in one kernel, for 3 x 3 filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.algorithms.base import (
    Argument,
    Constants,
    GpuAlgorithm,
    Launch,
    Plan,
    Target,
    ceil_div,
    conv_constants,
    has_wide_tensors,
)
from leanconv.algorithms.tiles import layer_limits
from leanconv.algorithms.winograd1d import WinogradConfig, computed, padded, ratios, shared_bytes
from leanconv.problem import ConvProblem
from leanconv.winograd import matrices


@dataclass(frozen=True)
class Winograd2dConfig(WinogradConfig):
    """As WinogradConfig; a block's tiles are numbered along rows, then over rows and images."""

    states: int = 16
    thread_k: int = 8
    thread_tiles: int = 8
    lanes_k: int = 8
    lane_states: int = 1
    rows: int = 1
    run: int = 1
    channels: int = 8
    stages: int = 2
    min_blocks: int = 1


#: Configurations, best guess first.
CONFIGS = (
    Winograd2dConfig(),
    Winograd2dConfig(lanes_k=4),
    Winograd2dConfig(lane_states=2, thread_tiles=16),
    Winograd2dConfig(lane_states=2, lanes_k=4, channels=4, min_blocks=2),
    Winograd2dConfig(channels=4, stages=4, run=4),
)


def out_w(config: Winograd2dConfig) -> int:
    """Rows and columns of outputs of a tile."""
    return {16: 2, 36: 4}[config.states]


def constants(problem: ConvProblem, config: Winograd2dConfig) -> Constants:
    """The ``Problem`` struct of the kernels."""
    forward = computed(problem)
    m = out_w(config)
    f = matrices(m, 3)
    c, k = padded(forward)
    return (
        *conv_constants(forward),
        ("states", config.states),
        ("taps", 1),
        ("tile_h", f.alpha),
        ("tile_w", f.alpha),
        ("out_h", m),
        ("out_w", m),
        ("first_q", 0),
        ("last_q", forward.q),
        ("row_tiles", config.run * ceil_div(ceil_div(forward.q, m), config.run)),
        ("padded_c", c),
        ("padded_k", k),
        ("prepared_offset", 0),
        ("rotated", problem.op == "dgrad"),
        ("at", ratios(f.at)),
        ("g", ratios(f.g)),
        ("bt", ratios(f.bt)),
    )


class Winograd2d(GpuAlgorithm):
    """Winograd in both directions, no workspace but transformed filters; 3 x 3 filters, unit stride and dilation."""

    name = "winograd2d"
    paper = "R. L. Castro et al., openCNN (2021)"
    tier = "fp32"
    solves = ConvProblem

    def why_not(self, problem: ConvProblem) -> list[str]:
        """See GpuAlgorithm."""
        reasons = layer_limits(problem)
        if problem.op not in ("fprop", "dgrad"):
            reasons.append(f"op={problem.op!r} is neither the forward pass nor the gradient of the input")
        if (problem.r, problem.s) != (3, 3):
            reasons.append(f"filters are {problem.r}x{problem.s}, not 3x3")
        if problem.stride != (1, 1):
            reasons.append(f"stride {problem.stride[0]},{problem.stride[1]} is not 1,1")
        if problem.dilation != (1, 1):
            reasons.append(f"dilation {problem.dilation[0]},{problem.dilation[1]} is not 1,1")
        return reasons

    def cost(self, problem: ConvProblem) -> float:
        """See Algorithm: not chosen before it has been measured."""
        return float("inf")

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[Winograd2dConfig]:
        """See GpuAlgorithm."""
        for config in CONFIGS:
            if config.tile_k <= padded(computed(problem))[1]:
                yield config

    def prepared_bytes(self, problem: ConvProblem) -> int:
        """See Algorithm."""
        c, k = padded(computed(problem))
        return 4 * problem.groups * c * 16 * k

    def plan(self, problem: ConvProblem, config: Winograd2dConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        known = constants(problem, config)
        c, k = padded(computed(problem))
        return Plan(
            (self._product(problem, known, config),),
            prepare=(self._filters(problem, known),),
            prepared_bytes=4 * problem.groups * c * config.states * k,
        )

    def _filters(self, problem: ConvProblem, known: Constants) -> Launch:
        c, k = padded(computed(problem))
        threads, filters, channels = 256, 32, 8
        return Launch(
            header="winograd2d.cuh",
            function="leanconv::winograd2d_filters",
            problem=known,
            tuning=(("threads", threads), ("filters", filters), ("channels", channels), ("rows", 1)),
            arguments=(Argument("const float*", "w"), Argument("float*", "prepared")),
            grid=problem.groups * (c // channels) * (k // filters),
            block=threads,
            shared_bytes=4 * filters * (channels * 9 | 1),
        )

    def _product(self, problem: ConvProblem, known: Constants, config: Winograd2dConfig) -> Launch:
        forward, m = computed(problem), out_w(config)
        tiles = forward.n * ceil_div(forward.p, m) * int(dict(known)["row_tiles"])
        blocks = ceil_div(tiles, config.tiles) * ceil_div(forward.group_k, config.tile_k) * forward.groups
        nhwc, wide = forward.layout == "NHWC", has_wide_tensors(forward)
        return Launch(
            header="winograd2d.cuh",
            function="leanconv::winograd2d",
            problem=known,
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
            shared_bytes=shared_bytes(config, 1, (m + 2, m + 2), m, nhwc, wide),
            min_blocks=config.min_blocks,
        )
