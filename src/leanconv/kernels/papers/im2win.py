"""im2win with its tensor: the input is stored in window order, then multiplied with the filters."""

from __future__ import annotations

from leanconv.kernels.common.layers import conv_arguments, images_outermost, limits, view_constants
from leanconv.kernels.contract import Config, GpuAlgorithm, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import fma_cycles, launch_cycles
from leanconv.kernels.simt.im2win_fused import PAPER
from leanconv.kernels.simt.tiles import TileConfig, cost, tile_launch, tiles, with_splits
from leanconv.plan import Constants, Launch, Number, Plan, Pointer, Target
from leanconv.problem import ConvProblem


def columns(problem: ConvProblem) -> int:
    """Columns of the padded input that the windows of an output row reach."""
    return (problem.q - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def tensor_elements(problem: ConvProblem) -> int:
    """Elements of the im2win tensor: N * C * P * columns * R."""
    return problem.n * problem.c * problem.p * columns(problem) * problem.r


def window_constants(problem: ConvProblem) -> Constants:
    """The ``Problem`` struct of the kernels that work on the im2win tensor."""
    constants = dict(view_constants(problem))
    constants["wide"] = constants["wide"] or tensor_elements(problem) >= 2**30
    return (*constants.items(), ("columns", columns(problem)))


def transform(problem: ConvProblem) -> Launch:
    """The launch that writes the im2win tensor to the workspace."""
    threads, elements = 256, 8
    return Launch(
        header="kernels/papers/window_order.cuh",
        function="leanconv::im2win_transform",
        problem=window_constants(problem),
        tuning=(("threads", threads), ("elements", elements)),
        arguments=(Pointer("x"), Pointer("workspace", written=True), Number("long long", "batch", problem.n)),
        grid=ceil_div(tensor_elements(problem), elements * threads),
        block=threads,
    )


class WindowTensor(GpuAlgorithm):
    """Kernels behind the transform of the paper; every shape; the workspace is the im2win tensor."""

    paper = PAPER
    precision = "ieee"
    by_name_only = True

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        row = columns(problem) * problem.r * (problem.c if problem.layout == "NHWC" else 1)
        reasons = limits(problem, "fprop") + images_outermost(problem)
        if row >= 2**30:
            reasons.append(f"an output row takes {row} elements of the tensor, and 2**30 are too many")
        return reasons

    def workspace_bytes(self, problem: ConvProblem, config: Config) -> int:
        return 4 * tensor_elements(problem)


class Im2win(WindowTensor, TimedAlgorithm):
    """The paper's Algorithm 3."""

    name = "im2win"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TileConfig]]:
        reduction = problem.group_c * problem.r * problem.s
        wide = bool(dict(window_constants(problem))["wide"])
        pixels = problem.n * problem.p * problem.q
        # A launch of its own moves the input and the tensor.
        elements = tensor_elements(problem) + problem.n * problem.c * problem.h * problem.w
        before = launch_cycles(target) + 4 * elements / target.bytes_per_cycle
        return by_time(
            (before + cost(problem, pixels, reduction, config, speed, target), config)
            for config, speed in with_splits(problem, tiles(problem, target, along=True, wide=wide), reduction, target)
        )

    def plan(self, problem: ConvProblem, config: TileConfig, target: Target) -> Plan:
        shared = config.shared_bytes(config.tile_reduction * (config.tile_pixels + 4), 0)
        pixels = problem.n * problem.p * problem.q
        arguments = conv_arguments(problem, "workspace")
        product = tile_launch(self, window_constants(problem), config, problem, pixels, shared, arguments)
        return Plan((transform(problem), product), self.workspace_bytes(problem, config))
