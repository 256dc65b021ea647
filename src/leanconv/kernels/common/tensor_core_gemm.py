"""Implicit GEMM on Hopper's tensor cores: what its host halves share, whatever the elements are.

Registers of producers and consumers, the im2col tensor map of the pixels, the sizes of clusters that split K.
"""

from __future__ import annotations

from leanconv.dtypes import item_bytes
from leanconv.plan import TensorMap
from leanconv.problem import ConvProblem

#: Channels that a tensor copy brings, of float32: 128 bytes.
ROW = 32
#: Registers of a consumer's and a producer's thread, by the number of consumers and whether tensor maps bring pixels.
REGISTERS = {
    (2, True): (240, 24), (3, True): (160, 24), (4, True): (112, 24),
    (1, False): (232, 40), (2, False): (232, 40), (3, False): (160, 32), (4, False): (112, 32),
}  # fmt: skip
#: Flops that a multiprocessor of an H200 computes in a cycle for each teraflop a second of the whole GPU.
FLOPS_PER_CYCLE = 1e12 / 132 / 1.98e9
#: CTAs of a cluster that share a reduction.
SPLITS = (2, 4, 8)

#: Offsets of a filter tap that a copy takes, of images and of volumes.
MAX_REACH = (255, 31)


def reach_of(problem: ConvProblem) -> int:
    """Pixels between the first and the last tap of a filter, along the axis where they are most."""
    (dh, dw), dd = problem.dilation, problem.dilation_d
    return max((problem.t - 1) * dd, (problem.r - 1) * dh, (problem.s - 1) * dw)


def pixel_map(problem: ConvProblem, pixels: int, channels: int = ROW, volume: bool | None = None) -> TensorMap:
    """How bulk copies walk over the pixels of a forward convolution in NHWC: ``channels`` of as many as a tile has.

    By default slices are an axis of layers of volumes; a phase of a gradient says whether it has them.
    """
    top, bottom, left, right = problem.padding
    upper_h = bottom - (problem.r - 1) * problem.dilation[0]
    upper_w = right - (problem.s - 1) * problem.dilation[1]
    item = item_bytes(problem.dtype)
    row = item * problem.c
    front, back = problem.padding_d
    if problem.is_volume if volume is None else volume:
        rows = row * problem.w * problem.h
        return TensorMap(
            role=problem.operands[0].role,
            element=problem.dtype,
            shape=(problem.c, problem.w, problem.h, problem.d, problem.n),
            strides=(row, row * problem.w, rows, rows * problem.d),
            lower=(-left, -top, -front),
            upper=(upper_w, upper_h, back - (problem.t - 1) * problem.dilation_d),
            channels=channels,
            pixels=pixels,
            traversal=(1, problem.stride[1], problem.stride[0], problem.stride_d, 1),
            swizzle=item * channels,
        )
    return TensorMap(
        role=problem.operands[0].role,
        element=problem.dtype,
        shape=(problem.c, problem.w, problem.h, problem.n),
        strides=(row, row * problem.w, row * problem.w * problem.h),
        lower=(-left, -top),
        upper=(upper_w, upper_h),
        channels=channels,
        pixels=pixels,
        traversal=(1, problem.stride[1], problem.stride[0], 1),
        swizzle=item * channels,
    )
