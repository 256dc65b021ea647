"""openCNN: two-dimensional Winograd in one kernel, for 3 x 3 filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

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
from leanconv.winograd import matrices, outputs_2d, why_not_2d


@dataclass(frozen=True)
class Winograd2dConfig(WinogradConfig):
    """As WinogradConfig; a block's tiles are numbered along rows, then over rows and images."""

    states: int = 16
    thread_k: int = 8
    thread_tiles: int = 16
    lanes_k: int = 8
    lane_states: int = 2
    rows: int = 1
    run: int = 1
    channels: int = 8
    stages: int = 2
    min_blocks: int = 1
    staged: bool = False


#: Configurations, best guess first: 64 x 32 or 32 x 64 filters and tiles with 128 sums a thread, or with half as many.
CONFIGS = (
    Winograd2dConfig(),
    Winograd2dConfig(lanes_k=4),
    Winograd2dConfig(channels=4),
    Winograd2dConfig(channels=4, lanes_k=4),
    Winograd2dConfig(channels=4, stages=3, run=4),
    Winograd2dConfig(lane_states=1, thread_tiles=8),
    Winograd2dConfig(staged=True),
    Winograd2dConfig(lanes_k=4, thread_tiles=8, channels=4, min_blocks=2),
    # F(4 x 4, 3 x 3) in 9 warps, which share the four schedulers unevenly. 128 sums a thread would take more registers
    # than 9 warps have.
    Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8),
    Winograd2dConfig(36, lanes_k=4, lane_states=4, thread_tiles=8, channels=4),
)


def outputs_of(config: Winograd2dConfig) -> int:
    """Rows and columns of the outputs of a tile."""
    return isqrt(config.states) - 2


def _filter_constants(problem: ConvProblem, config: Winograd2dConfig) -> Constants:
    """The ``Problem`` struct of the launch that transforms filters: nothing that depends on the image."""
    forward, m = computed(problem), outputs_of(config)
    c, k = padded(forward)
    return (
        ("r", 3),
        ("s", 3),
        ("groups", forward.groups),
        ("group_c", forward.group_c),
        ("group_k", forward.group_k),
        ("nhwc", forward.layout == "NHWC"),
        ("rotated", problem.op == "dgrad"),
        ("states", config.states),
        ("taps", 1),
        ("tile_h", m + 2),
        ("tile_w", m + 2),
        ("out_h", m),
        ("out_w", m),
        ("padded_c", c),
        ("padded_k", k),
        ("prepared_offset", 0),
        ("g", ratios(matrices(m, 3).g)),
    )


def _constants(problem: ConvProblem, config: Winograd2dConfig) -> Constants:
    """The ``Problem`` struct of the main kernel."""
    forward, f = computed(problem), matrices(outputs_of(config), 3)
    known = {**dict(conv_constants(forward)), **dict(_filter_constants(problem, config))}
    del known["g"], known["rotated"]
    return (
        *known.items(),
        ("first_q", 0),
        ("last_q", forward.q),
        ("row_tiles", _row_tiles(forward, config)),
        ("at", ratios(f.at)),
        ("bt", ratios(f.bt)),
    )


def _row_tiles(forward: ConvProblem, config: Winograd2dConfig) -> int:
    return config.run * ceil_div(ceil_div(forward.q, outputs_of(config)), config.run)


def _shared_bytes(problem: ConvProblem, config: Winograd2dConfig) -> int:
    forward, m = computed(problem), outputs_of(config)
    return shared_bytes(config, 1, (m + 2, m + 2), m, forward.layout == "NHWC", has_wide_tensors(forward))


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
            reasons.insert(0, f"op={problem.op!r} is neither the forward pass nor the gradient of the input")
        return reasons + why_not_2d(problem)

    def cost(self, problem: ConvProblem) -> float:
        """See Algorithm: not chosen before it has been measured."""
        return float("inf")

    def configs(self, problem: ConvProblem, target: Target) -> Iterator[Winograd2dConfig]:
        """See GpuAlgorithm."""
        _, k = padded(computed(problem))
        for config in CONFIGS:
            allowed = outputs_of(config) in outputs_2d(problem.precision)
            if allowed and k % config.tile_k == 0 and _shared_bytes(problem, config) <= target.shared_per_block:
                yield config

    def prepared_bytes(self, problem: ConvProblem) -> int:
        """See Algorithm."""
        c, k = padded(computed(problem))
        return 4 * problem.groups * c * max((m + 2) ** 2 for m in outputs_2d(problem.precision)) * k

    def plan(self, problem: ConvProblem, config: Winograd2dConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        return Plan(
            (_launch(problem, config),),
            prepare=(_filter_launch(problem, config),),
            prepared_bytes=self.prepared_bytes(problem),
        )


def _filter_launch(problem: ConvProblem, config: Winograd2dConfig) -> Launch:
    c, k = padded(computed(problem))
    threads, filters, channels = 256, 32, 8
    return Launch(
        header="winograd2d.cuh",
        function="leanconv::winograd2d_filters",
        problem=_filter_constants(problem, config),
        tuning=(("threads", threads), ("filters", filters), ("channels", channels), ("rows", 1)),
        arguments=(Argument("const float*", "w"), Argument("float*", "prepared")),
        grid=problem.groups * (c // channels) * (k // filters),
        block=threads,
        shared_bytes=4 * filters * (channels * 9 | 1),
    )


def _launch(problem: ConvProblem, config: Winograd2dConfig) -> Launch:
    forward = computed(problem)
    tiles = forward.n * ceil_div(forward.p, outputs_of(config)) * _row_tiles(forward, config)
    return Launch(
        header="winograd2d.cuh",
        function="leanconv::winograd2d",
        problem=_constants(problem, config),
        tuning=config.constants(),
        arguments=(
            Argument("const float*", "x"),
            Argument("const float*", "prepared"),
            Argument("const float*", "bias"),
            Argument("float*", "y"),
            Argument("long long", "batch", forward.n),
        ),
        grid=ceil_div(tiles, config.tiles) * ceil_div(forward.group_k, config.tile_k) * forward.groups,
        block=config.threads,
        shared_bytes=_shared_bytes(problem, config),
        min_blocks=config.min_blocks,
    )
