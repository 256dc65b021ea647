"""Layers of volumes that are layers of images, or of volumes with more channels and fewer taps, and patches of images
that are channels: the same arrays in memory, seen with other axes. Nothing is copied."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from leanconv.dtypes import is_narrow, item_bytes
from leanconv.problem import ConvProblem, Problem

#: The numbers of slices of an image.
_ONE_SLICE: dict[str, Any] = {"d": 1, "t": 1, "stride_d": 1, "padding_d": (0, 0), "dilation_d": 1}


def computed(problem: Problem) -> Problem:
    """What a call computes: of some layers another one, on the same memory."""
    return as_images(problem) if problem.kind == "conv2d" else problem


@lru_cache(maxsize=256)
def as_images(problem: ConvProblem) -> ConvProblem:
    """The problem that computes ``problem`` on the same memory: of volumes one of images where there is one, of patches
    one of more channels; ``problem`` itself where there is none.

    - Tx1x1 (and 1x1x1): slices are the rows of an image, and the pixels of a slice its columns. Channels first in 16
      bits such layers stay volumes but for gradients of filters: native_gemm_nchw copies of a slice what a tile reads,
      and of an image all columns of the rows between.
    - 1x1xS: the rows of all slices are those of one image.
    - 1xRxS, channels last: each slice is an image of the batch. With the channels first the slices of one channel lie
      side by side, so there slices are no images.
    - a filter as deep as the volume, channels first: each slice of a channel is a channel.
    - patches side by side, channels last: the pixels of a patch's row are channels of one pixel. All taps of a row are
      computed together then, of a gradient too, of which each would be a phase. Of images those of 16 bits whose rows
      are units of 16 bytes then, as pixels are not: tensor copies bring them. Where rows of patches do not overlap
      either, each is an image of the batch, of unit stride, but for the gradient of the input: its taps would be
      multiplied with zeros.
    """
    if not problem.is_volume:
        return _patches_of_images(problem) if is_narrow(problem.dtype) and _is_patches(problem) else problem
    if _is_patches(problem):
        problem = _row_as_channels(problem)
    alone = problem.t == 1 and problem.stride_d == 1 and problem.padding_d == (0, 0)
    rows_alone = problem.r == 1 and problem.stride[0] == 1 and problem.padding[:2] == (0, 0)
    columns_alone = problem.s == 1 and problem.stride[1] == 1 and problem.padding[2:] == (0, 0)
    images = dict(_ONE_SLICE)
    stays = problem.layout == "NCHW" and is_narrow(problem.dtype) and problem.t > 1 and problem.op != "wgrad"
    if rows_alone and columns_alone and not stays:
        images |= {"h": problem.d, "w": problem.h * problem.w, "r": problem.t, "stride": (problem.stride_d, 1)}
        images |= {"padding": (*problem.padding_d, 0, 0), "dilation": (problem.dilation_d, 1)}
    elif alone and rows_alone:
        images |= {"h": problem.d * problem.h}
    elif alone and problem.layout == "NHWC":
        images |= {"n": problem.n * problem.d}
    elif _is_as_deep(problem):
        images |= {"c": problem.c * problem.d}
    else:
        return problem
    return replace(problem, **images)


def _row_as_channels(problem: ConvProblem) -> ConvProblem:
    row = problem.s
    return replace(problem, c=problem.c * row, w=problem.w // row, s=1, stride=(problem.stride[0], 1))


def _patches_of_images(problem: ConvProblem) -> ConvProblem:
    pixel, row = (item_bytes(problem.dtype) * problem.c * pixels for pixels in (1, problem.s))
    if pixel % 16 == 0 or row % 16:
        return problem
    channels = _row_as_channels(problem)
    stacked = problem.r == problem.stride[0] and problem.h == problem.r * problem.p and problem.dilation[0] == 1
    if problem.op == "dgrad" or not stacked or problem.padding[:2] != (0, 0):
        return channels
    return replace(channels, n=problem.n * problem.p, h=problem.r, stride=(1, 1))


def _is_patches(problem: ConvProblem) -> bool:
    """Whether each pixel of a row belongs to one tap of one window, and pixels lie in memory as the taps do."""
    side_by_side = problem.s == problem.stride[1] == problem.w // max(1, problem.q) > 1 and problem.w % problem.s == 0
    alone = problem.padding[2:] == (0, 0) and problem.dilation[1] == 1 and problem.groups == 1
    # the bias of a transposed layer is a number for each channel, and not for each pixel of it
    return side_by_side and alone and problem.layout == "NHWC" and not (problem.op == "dgrad" and problem.bias)


def _is_as_deep(problem: ConvProblem) -> bool:
    """Whether filters have a weight for each slice of a volume, in the order of the volume's own memory."""
    whole = problem.t == problem.d and problem.padding_d == (0, 0) and problem.dilation_d == 1
    # the bias of a transposed layer is a number for each channel, and not for each slice of it
    return whole and problem.layout == "NCHW" and not (problem.op == "dgrad" and problem.bias)
