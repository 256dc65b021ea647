"""What kernels of depthwise layers share: their limits, how a forward layer stands for a gradient, and the base of the
strategies of ``depthwise``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.kernels.common.layers import conv_arguments, conv_constants, images_outermost, limits, one_channel
from leanconv.kernels.contract import TimedAlgorithm, by_time, ceil_div
from leanconv.plan import Constants, Plan, Target
from leanconv.problem import ConvProblem

PAPER = "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017), for one channel"
#: Most taps of a filter that a thread keeps in registers, and most registers of such a thread.
MOST_TAPS, MOST_REGISTERS = 81, 200
THREADS = 256
#: Slices of outputs that a thread computes of volumes.
SLICES = (1, 2, 4)


def live_rows(problem: ConvProblem) -> int:
    """Rows of outputs that one input row reaches, or lies between."""
    return (problem.r - 1) * problem.dilation[0] // problem.stride[0] + 1


def window(problem: ConvProblem, columns: int) -> int:
    """Pixels of an input row that a strip of outputs reads."""
    return (columns - 1) * problem.stride[1] + (problem.s - 1) * problem.dilation[1] + 1


def channel_tile(count: int) -> int:
    """Channels of a block in NHWC: all, or as many as make whole tiles of whole warps where that is possible."""
    if count <= THREADS:
        return count
    return next((size for size in range(THREADS, 31, -32) if count % size == 0), THREADS)


def threads_of(channels: int) -> int:
    """Threads of a block of so many channels: whole warps, as near to `THREADS` as whole pixels come."""
    return ceil_div(channels * max(1, THREADS // channels), 32) * 32


def blocks_of(problem: ConvProblem, strips: int, channels: int, channel_tile: int, threads: int) -> int:
    """Blocks in which a thread has one of ``strips`` of one of ``channels``; of NHWC ``channel_tile`` of these."""
    if problem.layout == "NHWC":
        return ceil_div(channels, channel_tile) * ceil_div(strips, threads // channel_tile)
    return ceil_div(strips * channels, threads)


def depthwise_limits(problem: ConvProblem, *ops: str) -> list[str]:
    """Why kernels for one channel a group that compute ``ops`` cannot run ``problem``."""
    return [*limits(problem, *ops, dtypes=GPU_LAYERS), *images_outermost(problem), *one_channel(problem)]


def tap_limits(problem: ConvProblem) -> list[str]:
    """Why a thread cannot keep a filter."""
    return [f"the filter has {problem.window} taps, and a thread keeps {MOST_TAPS} at most"] * (
        problem.taps > MOST_TAPS
    )


def deep(problem: ConvProblem, slices: int) -> int:
    """Slices of the input that so many slices of outputs read, or lie between those."""
    return (slices - 1) * problem.stride_d + (problem.t - 1) * problem.dilation_d + 1


def slices_of(problem: ConvProblem) -> list[int]:
    """Slices of outputs that a thread may compute, those of images one."""
    return sorted({min(slices, problem.z) for slices in SLICES}) if problem.is_volume else [1]


def as_convolution(problem: ConvProblem) -> ConvProblem:
    """The convolution that computes the problem; of a gradient with the filters reversed."""
    unit = problem.op == "dgrad" and (problem.stride_d, *problem.stride) == (1, 1, 1)
    return replace(problem.as_forward(), accumulate=problem.accumulate) if unit else problem


def bytes_moved(problem: ConvProblem) -> int:
    """Bytes that one filter after the other reads and writes: in NCHW each reads its channel anew.

    Explored (H200, 13218f8): 8 and 32 filters of 1x1 on 4096 x 4096 pixels took 1.05 times the time of these bytes, in
    NHWC 1.25 times.
    """
    reads = problem.group_k if problem.layout == "NCHW" else 1
    pixels, outputs = (
        reads * problem.c * problem.d * problem.h * problem.w,
        problem.k * problem.z * problem.p * problem.q,
    )
    return item_bytes(problem.dtype) * problem.n * (pixels + outputs)


class DepthwiseStrategy(TimedAlgorithm):
    """A strategy of ``depthwise``: FP32 FMAs in direct order, no workspace; the forward layer and, for layers of unit
    stride with one filter a channel, the gradient of the input as a forward layer with reversed filters."""

    name = "depthwise"
    paper = PAPER
    precision = "ieee"
    direct_order = True

    @abstractmethod
    def limits(self, problem: ConvProblem, target: Target) -> list[str]:
        """Why the strategy cannot run the forward layer ``problem`` of one channel a group."""

    @abstractmethod
    def candidates(self, problem: ConvProblem, target: Target) -> Iterable[Any]:
        """The valid configurations for a forward layer."""

    @abstractmethod
    def cycles(self, problem: ConvProblem, config: Any, target: Target) -> float:
        """Predicted time of a forward layer in clock cycles."""

    @abstractmethod
    def blocks(self, problem: ConvProblem, config: Any) -> int:
        """Blocks of a launch."""

    def shared_bytes(self, problem: ConvProblem, config: Any) -> int:
        return 0

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = depthwise_limits(problem, "fprop", "dgrad")
        strides = (problem.stride_d, *problem.stride)[0 if problem.is_volume else 1 :]
        if problem.group_c == 1 and problem.op == "dgrad" and (max(strides) > 1 or problem.group_k != 1):
            reasons.append(
                f"op='dgrad' with stride={strides} and {problem.group_k} filters a channel: it computes the "
                "gradient of layers of unit stride with one filter a channel"
            )
        return reasons or self.limits(as_convolution(problem), target)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, Any]]:
        forward = as_convolution(problem)
        found = dict.fromkeys(self.candidates(forward, target))
        return by_time((self.cycles(forward, config, target), config) for config in found)

    def plan(self, problem: ConvProblem, config: Any, target: Target) -> Plan:
        forward = as_convolution(problem)
        constants = (*conv_constants(forward), ("reversed", problem.op == "dgrad"), *self.constants(forward, config))
        grid, shared = self.blocks(forward, config), self.shared_bytes(forward, config)
        return Plan((self.launch(config, constants, conv_arguments(problem), grid, shared),))

    def constants(self, problem: ConvProblem, config: Any) -> Constants:
        """Constants of the kernel beside those of the layer and the configuration."""
        return ()
