"""What the kernels that split float32 for tensor cores are proven on: layers of their own, and data of every range."""

from __future__ import annotations

from typing import Any

import numpy as np

from leanconv.problem import ConvProblem
from tests.cases import ALL, USUAL, Case, Layers


def _tensor_cases() -> list[Case]:
    """Layers that the loaders of the tensor-core kernels tell apart."""
    layers = Layers("tensor-", precision="fp32")
    pad = {"padding": (1, 1, 1, 1)}
    more = {"bias": True, "scale": True, "add": True}
    layers.add("same", 2, 40, 6, 8, 72, 3, 3, layouts=ALL, activation="silu", **more, **pad)
    layers.add("odd", 2, 36, 7, 7, 64, 3, 3, layouts=ALL, **pad)
    layers.add("stride", 2, 48, 9, 9, 70, 3, 3, layouts=USUAL, stride=(2, 1), padding=(1, 0, 1, 2), bias=True)
    layers.add("dilation", 1, 36, 11, 9, 40, 3, 2, layouts=USUAL, dilation=(2, 3), padding=(2, 2, 2, 1))
    layers.add("one-by-one", 3, 80, 5, 4, 48, 1, 1, layouts=ALL)
    layers.add("residuals", 1, 32, 5, 8, 236, 1, 1, layouts=USUAL, bias=True, add=True)
    layers.add("groups", 2, 64, 6, 8, 96, 3, 3, layouts=USUAL, groups=2, **pad)
    layers.add("small-groups", 1, 60, 6, 5, 60, 3, 3, layouts=USUAL, groups=3, **pad)
    layers.add("few-channels", 2, 3, 13, 12, 64, 7, 7, layouts=USUAL, stride=(2, 2), padding=(3, 3, 3, 3))
    layers.add("accumulate", 1, 32, 8, 8, 64, 3, 3, layouts=USUAL, accumulate=True, **pad)
    layers.add("gradient", 2, 40, 6, 8, 64, 3, 3, layouts=ALL, op="dgrad", **pad)
    layers.add("gradient-stride", 2, 40, 8, 7, 64, 4, 3, layouts=USUAL, op="dgrad", stride=(2, 2), padding=(1, 1, 1, 0))
    layers.add("gradient-zeros", 1, 32, 9, 9, 64, 1, 1, layouts=USUAL, op="dgrad", stride=(2, 2))
    layers.add("gradient-bias", 2, 40, 6, 8, 64, 3, 3, op="dgrad", stride=(2, 1), bias=True, **pad)
    lanes = {"layouts": ("NHWC",)}
    layers.add("lanes", 2, 38, 5, 6, 70, 3, 3, add=True, bias=True, **lanes, **pad)
    layers.add("lanes-odd", 1, 67, 7, 6, 33, 3, 2, stride=(2, 1), padding=(1, 0, 1, 1), **lanes)
    layers.add("lanes-gradient", 1, 38, 6, 7, 50, 3, 3, op="dgrad", stride=(2, 2), **lanes, **pad)
    first = {"layouts": ("NCHW",)}
    layers.add("resident", 3, 64, 7, 7, 72, 3, 3, activation="gelu", **more, **first, **pad)
    layers.add("resident-groups", 3, 64, 6, 6, 64, 3, 2, groups=2, dilation=(1, 2), padding=(1, 1, 0, 1), **first)
    layers.add("resident-stride", 3, 32, 9, 9, 64, 3, 3, stride=(2, 1), padding=(1, 0, 1, 2), **first)
    layers.add("resident-one-by-one", 4, 160, 7, 7, 64, 1, 1, **first)
    layers.add("resident-gradient", 3, 64, 7, 5, 64, 3, 3, op="dgrad", accumulate=True, **first, **pad)
    one = Layers("tensor-", precision="tf32")
    one.add("one-product-resident", 7, 96, 5, 5, 70, 3, 3, bias=True, **first, **pad)
    one.add("one-product-resident-one-by-one", 4, 160, 7, 7, 64, 1, 1, **first)
    one.add("one-product", 2, 40, 6, 8, 72, 3, 3, layouts=USUAL, **pad)
    last = {"layouts": ("NHWC",)}
    one.add("rows-of-taps", 2, 128, 6, 7, 72, 3, 3, bias=True, **last, **pad)
    one.add("rows-of-taps-wide", 1, 64, 9, 37, 64, 2, 5, padding=(1, 0, 3, 0), **last)
    one.add("rows-of-taps-groups", 1, 128, 9, 7, 128, 3, 3, groups=2, dilation=(2, 1), padding=(1, 2, 0, 1), **last)
    one.add("rows-of-taps-gradient", 1, 64, 7, 9, 64, 3, 3, op="dgrad", **last, **pad)
    return layers.cases + one.cases


TENSOR_CASES = _tensor_cases()


def _pair_cases() -> list[Case]:
    """Layers that the pairs and states of `tensor_winograd` tell apart, as where rows of outputs end."""
    layers = Layers("pairs-", precision="fp32")
    pad = {"padding": (1, 1, 1, 1), "layouts": ("NHWC",)}
    more = {"bias": True, "scale": True, "add": True}
    layers.add("same", 2, 40, 6, 8, 72, 3, 3, activation="silu", **more, **pad)
    layers.add("odd", 2, 36, 7, 7, 70, 3, 3, **pad)
    layers.add("wide", 1, 32, 5, 150, 130, 3, 3, bias=True, **pad)
    layers.add("narrow", 3, 32, 20, 3, 64, 3, 3, layouts=("NHWC",), padding=(0, 0, 0, 0))
    layers.add("one-row", 2, 100, 4, 14, 64, 1, 3, layouts=("NHWC",), padding=(0, 0, 2, 0))
    layers.add("tall", 1, 32, 12, 9, 64, 5, 3, layouts=("NHWC",), padding=(2, 3, 0, 2), dilation=(2, 1))
    layers.add("groups", 2, 64, 6, 8, 96, 3, 3, groups=2, **pad)
    layers.add("accumulate", 1, 32, 8, 8, 64, 3, 3, accumulate=True, **pad)
    layers.add("gradient", 2, 40, 6, 7, 64, 3, 3, op="dgrad", **pad)
    layers.add("gradient-bias", 2, 40, 6, 8, 64, 3, 3, op="dgrad", bias=True, **pad)
    layers.add("two-segments", 2, 40, 6, 9, 72, 2, 5, layouts=("NHWC",), padding=(1, 0, 2, 1), bias=True)
    layers.add("segments", 1, 32, 4, 20, 64, 1, 31, layouts=("NHWC",), padding=(0, 0, 15, 15))
    layers.add("segments-gradient", 1, 32, 5, 11, 64, 2, 8, layouts=("NHWC",), op="dgrad", padding=(1, 1, 3, 2))
    layers.add("one-row-of-images", 40, 32, 2, 4, 64, 3, 3, layouts=("NHWC",), padding=(1, 1, 1, 1), bias=True)
    layers.add("two-rows", 3, 64, 5, 7, 70, 3, 3, bias=True, add=True, **pad)
    flat = {"layouts": ("NCHW",), "padding": (1, 1, 1, 1)}
    layers.add("same", 2, 40, 6, 8, 72, 3, 3, activation="silu", **more, **flat)
    layers.add("images", 3, 100, 14, 14, 64, 3, 3, add=True, activation="relu", **flat)
    layers.add("groups", 2, 64, 6, 8, 96, 3, 3, groups=2, **flat)
    layers.add("gradient", 1, 40, 6, 10, 64, 3, 3, op="dgrad", accumulate=True, **flat)
    layers.add("segments", 1, 96, 4, 20, 64, 1, 8, layouts=("NCHW",), padding=(0, 0, 3, 4))
    layers.add("resident", 3, 96, 6, 6, 72, 3, 3, bias=True, activation="relu", **flat)
    layers.add("resident-images", 3, 32, 14, 14, 64, 3, 3, **flat)
    layers.add(
        "resident-tall", 2, 64, 8, 6, 64, 5, 3, groups=2, layouts=("NCHW",), padding=(4, 4, 1, 1), dilation=(2, 1)
    )
    layers.add("resident-gradient", 3, 64, 6, 10, 64, 3, 3, op="dgrad", accumulate=True, **flat)
    layers.add("one-column", 1, 40, 5, 10, 72, 2, 7, layouts=("NHWC",), padding=(1, 0, 3, 2), bias=True)
    layers.add("one-column", 1, 128, 4, 20, 64, 1, 4, layouts=("NCHW",), padding=(0, 0, 1, 2))
    one = Layers("pairs-", precision="tf32")
    one.add("one-product-resident", 5, 160, 4, 6, 72, 3, 3, **flat)
    one.add("one-product", 2, 40, 6, 8, 72, 3, 3, **pad)
    return layers.cases + one.cases


PAIR_CASES = _pair_cases()


def _tf32_cases() -> list[Case]:
    """Layers that the copies and outputs of `native_gemm_tf32` tell apart."""
    layers = Layers("tf32-", precision="tf32")
    last = {"layouts": ("NHWC",)}
    same = {"padding": (1, 1, 1, 1), **last}
    more = {"bias": True, "scale": True, "add": True}
    layers.add("copies", 2, 12, 9, 11, 133, 3, 3, activation="silu", padding=(1, 0, 2, 1), **more, **last)
    layers.add("copies-long", 1, 96, 5, 6, 72, 3, 3, bias=True, add=True, **same)
    layers.add("one-by-one", 3, 40, 5, 4, 264, 1, 1, bias=True, **last)
    layers.add("residuals", 1, 32, 5, 6, 120, 1, 1, bias=True, add=True, **last)
    layers.add("groups", 2, 32, 6, 8, 48, 3, 3, groups=2, bias=True, **same)
    layers.add("stride", 2, 36, 9, 8, 33, 3, 2, stride=(2, 1), dilation=(1, 2), padding=(1, 1, 0, 2), **last)
    layers.add("accumulate", 1, 32, 6, 5, 30, 3, 3, accumulate=True, **same)
    layers.add("gradient", 2, 20, 6, 7, 36, 3, 3, op="dgrad", **same)
    layers.add("gradient-stride", 2, 40, 8, 7, 20, 4, 3, op="dgrad", stride=(2, 2), padding=(1, 1, 1, 0), **last)
    layers.add("gradient-zeros", 1, 16, 9, 9, 32, 1, 1, op="dgrad", stride=(2, 2), **last)
    layers.add("gradient-bias", 2, 20, 6, 7, 36, 3, 3, op="dgrad", stride=(1, 2), bias=True, **same)
    layers.add("gradient-phases", 2, 32, 9, 8, 64, 4, 4, op="dgrad", groups=2, stride=(2, 2), **same)
    return layers.cases


TF32_CASES = _tf32_cases()


def _tf32_group_cases() -> list[Case]:
    """Groups of few channels: eight filters of one group or of several, units of four channels of one tap or of two."""
    layers = Layers("tf32-", precision="tf32")
    last: dict[str, Any] = {"layouts": ("NHWC",)}
    same: dict[str, Any] = {"padding": (1, 1, 1, 1)}
    more: dict[str, Any] = {"bias": True, "scale": True, "add": True}
    gradient, weight = {"op": "dgrad", **same}, {"op": "wgrad", **same}
    layers.add("groups-fours", 2, 24, 9, 11, 24, 3, 3, groups=6, activation="silu", **more, **same)
    layers.add("groups-eights", 2, 40, 9, 11, 40, 3, 3, groups=5, stride=(2, 2), bias=True, **last, **same)
    layers.add("groups-twelves", 2, 36, 6, 7, 36, 3, 2, groups=3, dilation=(2, 1), **last, **same)
    layers.add("groups-24", 1, 72, 7, 8, 72, 3, 3, groups=3, accumulate=True, activation="relu", **same)
    layers.add("groups-more-filters", 2, 16, 7, 6, 32, 3, 3, groups=4, bias=True, **last)
    layers.add("groups-gradient-fours", 2, 24, 9, 11, 24, 3, 3, groups=6, stride=(2, 2), **gradient)
    layers.add("groups-gradient-bias", 1, 32, 7, 6, 64, 1, 1, groups=4, stride=(2, 1), bias=True, op="dgrad", **last)
    layers.add("groups-weight-fours", 3, 24, 9, 11, 24, 3, 3, groups=6, **last, **weight)
    layers.add("groups-weight-eights", 3, 40, 9, 8, 40, 3, 3, groups=5, stride=(2, 1), **weight)
    layers.add("groups-weight-twelves", 2, 24, 6, 7, 48, 3, 2, groups=2, accumulate=True, **last, **weight)
    return layers.cases


#: Met by the kernels for groups of few channels.
TF32_GROUP_CASES = _tf32_group_cases()

#: 64 x 3 x 3 products an output.
LAYER = ConvProblem(1, 64, 6, 8, 64, 3, 3, padding=(1, 1, 1, 1), layout="NHWC")
#: The same with rows of two segments, of which the second begins with a column of the first.
WIDE = ConvProblem(1, 64, 6, 8, 64, 3, 5, padding=(1, 1, 2, 2), layout="NHWC")
RANGES = (
    "normal", "positive", "log-normal", "outlier", "channels-apart", "filters-apart", "tiny", "huge", "denormal",
    "zeros", "unseen",
)  # fmt: skip


def drawn(kind: str, problem: ConvProblem = LAYER) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and filters in NHWC; in channels-apart those of a channel are scaled by opposite powers of ten, in
    pixels-apart each pixel has a scale of its own. In unseen a channel without weights has the largest pixels."""
    random = np.random.default_rng(5)
    x, w = random.standard_normal(problem.x_shape), random.standard_normal(problem.w_shape)
    if kind == "positive":
        x, w = abs(x), abs(w)
    elif kind == "log-normal":
        x = np.exp(4 * x)
    elif kind == "outlier":
        x[0, 3, 4, 5] = 1e8
    elif kind == "channels-apart":
        scales = np.power(10.0, random.uniform(-30, 30, problem.c))
        x, w = x * scales, w / scales
    elif kind == "pixels-apart":
        x *= np.power(10.0, np.random.default_rng(0).uniform(-9, 9, (problem.h, problem.w, 1)))
    elif kind == "unseen":
        x[..., 5], w[..., 5] = x[..., 5] * 1e12, 0
    elif kind == "filters-apart":
        w *= np.power(10.0, random.uniform(-9, 9, problem.k)).reshape(-1, 1, 1, 1)
    elif kind == "tiny":
        x = x * 1e-38
    elif kind == "huge":
        x, w = x * 1e34, w * 1e2
    elif kind == "denormal":
        x = np.round(x * 1000) * 2.0**-149
    elif kind == "zeros":
        x[0, 2:5] = 0
        w[7] = 0
        w[:, 1, 1] = 0
    return x.astype(np.float32), w.astype(np.float32)
