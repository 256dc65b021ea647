"""Gradient of the input of patches: where no pixel meets two taps, one matrix product on FP32 cores."""

from __future__ import annotations

from collections.abc import Iterator

from leanconv.dtypes import GPU_LAYERS
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, limits, view_constants
from leanconv.kernels.contract import TimedAlgorithm, by_time
from leanconv.kernels.simt.implicit_gemm import ImplicitGemm, shared_bytes
from leanconv.kernels.simt.tiles import TileConfig, cost, tile_launch, tiles
from leanconv.plan import Constants, Plan, Target
from leanconv.problem import ConvProblem


def as_product(problem: ConvProblem) -> ConvProblem:
    """The product as a layer of 1x1: its pixels are outputs of ``problem``, its filters taps of channels."""
    return ConvProblem(
        problem.n, problem.k, problem.z * problem.p, problem.q, problem.c * problem.taps, 1, 1, dtype=problem.dtype,
        layout=problem.layout, precision=problem.precision, bias=problem.bias, accumulate=problem.accumulate,
    )  # fmt: skip


def _axes(problem: ConvProblem) -> Iterator[tuple[str, int, int, int]]:
    """Of each axis its name, how far filters reach, the stride, and the pixels behind all that filters step over."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    front = problem.padding_d[0]
    axes = (
        ("slices", problem.t, problem.dilation_d, problem.stride_d, problem.d + front, problem.z),
        ("rows", problem.r, dh, sh, problem.h + top, problem.p),
        ("columns", problem.s, dw, sw, problem.w + left, problem.q),
    )
    for name, taps, dilation, stride, extent, outputs in axes:
        yield name, 1 + dilation * (taps - 1), stride, extent - outputs * stride


def _in_fours(problem: ConvProblem) -> bool:
    """Whether four neighbouring taps are four neighbours in memory, inside the input or outside, and aligned."""
    _, _, left, right = problem.padding
    apart = problem.c if problem.layout == "NHWC" else 1
    inside = max(left, right) <= 0 and problem.dilation[1] == 1
    return inside and all(number * apart % 4 == 0 for number in (problem.s, problem.stride[1], left, problem.w))


class ImplicitGemmPatches(TimedAlgorithm):
    """Of volumes whose filters do not overlap: dy and w are read once and in place; FP32 FMAs, no workspace."""

    name = "implicit_gemm"
    strategy = "patches"
    paper = ImplicitGemm.paper
    precision = "ieee"
    volumes = True
    writes_phases = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = limits(problem, "dgrad", dtypes=GPU_LAYERS)
        if not problem.is_volume:
            reasons.append("it computes layers of volumes; those of images are computed phase by phase")
        if problem.groups > 1:
            reasons.append(f"groups={problem.groups}: it computes layers of one group")
        for name, reach, stride, behind in _axes(problem):
            if reach > stride:
                reasons.append(f"filters reach over {reach} {name} with a stride of {stride}: they overlap")
            elif behind > 0:
                reasons.append(f"{behind} {name} lie behind the last filter and its stride")
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TileConfig]]:
        product, wide = as_product(problem), has_wide_tensors(problem)
        memory = problem.bytes / target.bytes_per_cycle
        return by_time(
            (max(memory, cost(product, product.pixels, product.c, config, speed, target)), config)
            for config, speed in tiles(product, target, wide=wide)
        )

    def plan(self, problem: ConvProblem, config: TileConfig, target: Target) -> Plan:
        product = as_product(problem)
        constants = view_constants(product, wide=has_wide_tensors(problem))
        arguments, shared = conv_arguments(problem), shared_bytes(product, config, constants)
        constants = (*constants, *_layer_constants(problem))
        launch = tile_launch(self, constants, config, product, product.pixels, shared, arguments)
        return Plan((launch, *input_gradient.zero_launches(problem)))


def _layer_constants(problem: ConvProblem) -> Constants:
    """The layer whose input's gradient the product is; ``fours``: four taps are stored at once."""
    names = ("c", "t", "r", "s", "d", "h", "w", "p", "stride_d", "dilation_d")
    (top, _, left, _), (sh, sw), (dh, dw) = problem.padding, problem.stride, problem.dilation
    return (
        *((f"layer_{name}", getattr(problem, name)) for name in names),
        ("layer_stride_h", sh),
        ("layer_stride_w", sw),
        ("layer_dilation_h", dh),
        ("layer_dilation_w", dw),
        ("layer_front", problem.padding_d[0]),
        ("layer_top", top),
        ("layer_left", left),
        ("fours", _in_fours(problem)),
    )
