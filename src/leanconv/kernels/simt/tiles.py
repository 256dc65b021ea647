"""What the tiled convolutions share on the host: the shape of a block's tile, its cost, its launch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, gcd
from pathlib import PurePosixPath
from typing import Any, TypeVar

from leanconv.dtypes import DTYPES, is_narrow, none_of
from leanconv.kernels.contract import (
    Config,
    ceil_div,
    conv_constants,
    copy_layout,
    has_wide_tensors,
    leaves_image,
    variant,
)
from leanconv.plan import Argument, Constants, Launch, Number, Pointer, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class TileConfig(Config):
    """A block computes tile_k filters x tile_pixels pixels, a thread thread_k x thread_pixels of them.

    The lanes of a warp form a grid of lanes_k x (32 / lanes_k); ``stages`` reduction steps of ``tile_reduction``
    are in shared memory at once. ``split`` blocks of a cluster share the reduction of one tile.
    """

    tile_k: int = 128
    tile_pixels: int = 128
    tile_reduction: int = 8
    thread_k: int = 8
    thread_pixels: int = 8
    lanes_k: int = 4
    stages: int = 4
    min_blocks: int = 2
    split: int = 1

    @cached_property
    def threads(self) -> int:
        """Threads of a block."""
        warps_k = self.tile_k // (self.lanes_k * self.thread_k)
        warps_pixels = self.tile_pixels // (32 // self.lanes_k * self.thread_pixels)
        return 32 * warps_k * warps_pixels

    def shared_bytes(self, pixel_floats: int, table_bytes: int) -> int:
        """Shared memory of a block whose pixels take ``pixel_floats`` a stage: stages and table, or the whole tile."""
        columns = gcd(self.tile_reduction, 16)
        filter_floats = self.tile_reduction * (self.tile_k + (8 if columns == 4 else 4))
        stages = 4 * self.stages * (filter_floats + pixel_floats)
        return max(stages + table_bytes, 4 * self.tile_k * self.tile_pixels if self.split > 1 else 0)

    @property
    def order(self) -> Hashable:
        """The order of an output's sum: one chain of multiply-adds, or the shares of a cluster's blocks."""
        return (self.split, self.tile_reduction) if self.split > 1 else ()


C = TypeVar("C", bound="TileConfig")

#: The share of a multiprocessor's 128 multiply-adds a cycle that the best tile reaches.
BEST_SHARE = 0.70

#: Clusters of 4 and 8 blocks are dealt out unevenly: where they fill more than this share of the places for blocks, the
#: busiest multiprocessor gets one block more than the mean (measured on an H200 in CHWN, 28 layers: for a mean of 4.0,
#: 5.9, 6.1, 8.0, 11.9 and 24.2 blocks the time of 5.5, 7.0, 7.0, 8.8, 12.9 and 25.0). Clusters of 2 are dealt evenly.
EVEN_CLUSTERS = 0.9

#: The shapes a tile can take, and the share of the best tile's speed that each reaches when it fills the machine
#: (measured on an H200 with 3x3 layers of 64 channels and more; the best of NCHW and NHWC reaches 47 TFLOP/s). The last
#: shapes of CHWN, and those of 4 and 32 filters, are set by those of NCHW.
TILES: dict[str, tuple[tuple[TileConfig, float], ...]] = {
    "NCHW": (
        (TileConfig(128, 96, 16, thread_pixels=12, stages=3, min_blocks=2), 1.00),
        (TileConfig(96, 128, 8, thread_k=12, min_blocks=3), 0.97),
        (TileConfig(128, 128, 16, stages=3, min_blocks=2), 0.98),
        (TileConfig(128, 64, 16, stages=3, min_blocks=3), 0.98),
        (TileConfig(64, 128, 16, stages=3, min_blocks=3), 0.97),
        (TileConfig(64, 128, 8, min_blocks=4), 0.90),
        (TileConfig(64, 64, 16, stages=3, min_blocks=5), 0.94),
        (TileConfig(32, 256, 8, min_blocks=3), 0.82),
        (TileConfig(32, 64, 8, thread_k=4, min_blocks=8), 0.70),
        (TileConfig(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=8), 0.60),
        (TileConfig(16, 256, 8, thread_k=4, min_blocks=4), 0.60),
        (TileConfig(4, 256, 8, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=5), 0.30),
    ),
    "NHWC": (
        (TileConfig(128, 96, 8, thread_pixels=12, min_blocks=3), 1.00),
        (TileConfig(96, 128, 8, thread_k=12, min_blocks=2), 0.99),
        (TileConfig(64, 128, 16, stages=3, min_blocks=3), 0.99),
        (TileConfig(128, 64, 8, min_blocks=4), 0.97),
        (TileConfig(64, 64, 16, stages=3, min_blocks=4), 0.97),
        (TileConfig(64, 128, 8, min_blocks=3), 0.92),
        (TileConfig(32, 256, 8, min_blocks=2), 0.83),
        (TileConfig(32, 64, 8, thread_k=4, min_blocks=6), 0.70),
        (TileConfig(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=6), 0.60),
        (TileConfig(16, 256, 8, thread_k=4, min_blocks=3), 0.60),
        (TileConfig(4, 256, 4, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=4), 0.30),
    ),
    "CHWN": (
        (TileConfig(128, 96, 16, thread_pixels=12, stages=3, min_blocks=3), 1.07),
        (TileConfig(96, 128, 16, thread_k=12, stages=3, min_blocks=3), 1.05),
        (TileConfig(128, 128, 16, stages=3, min_blocks=2), 1.05),
        (TileConfig(64, 128, 16, stages=3, min_blocks=4), 1.06),
        (TileConfig(128, 64, 16, stages=3, min_blocks=4), 1.05),
        (TileConfig(64, 64, 16, stages=3, min_blocks=5), 1.00),
        (TileConfig(64, 128, 8, min_blocks=4), 0.99),
        (TileConfig(32, 256, 8, min_blocks=3), 0.96),
        (TileConfig(32, 64, 8, thread_k=4, min_blocks=6), 0.74),
        (TileConfig(32, 32, 8, thread_k=4, thread_pixels=4, min_blocks=6), 0.63),
        (TileConfig(16, 256, 8, thread_k=4, min_blocks=3), 0.63),
        (TileConfig(4, 256, 8, thread_k=4, thread_pixels=4, lanes_k=1, min_blocks=4), 0.30),
    ),
}


#: How much the speed of the tile of 4 filters differs where a group has fewer than four channels (measured on an H200
#: with 15 depthwise layers). In NHWC such channels are copied one by one.
FEW_CHANNELS_SPEED = {"NCHW": 1.5, "NHWC": 0.3, "CHWN": 2.3}

#: What 16-bit elements, which pass registers on their way to shared memory, want otherwise than floats do in tiles of
#: the same shape, by whether windows leave the image: as many blocks as registers allow without spills, and the depth
#: that is quickest then (measured on an H200, suite im2win: a third block is worth 4 to 30 %).
NARROW: dict[tuple[str, int, int, bool], dict[str, Any]] = {
    ("NCHW", 128, 96, False): {"min_blocks": 3},
    ("NCHW", 96, 128, True): {"tile_reduction": 16, "min_blocks": 2},
    ("NCHW", 128, 64, False): {"min_blocks": 4},
    ("NCHW", 64, 128, False): {"min_blocks": 4},
    ("NCHW", 128, 128, False): {"tile_reduction": 8},
    ("NCHW", 128, 128, True): {"tile_reduction": 8},
    ("NHWC", 128, 96, False): {"tile_reduction": 16},
    ("CHWN", 128, 64, False): {"min_blocks": 3},
    ("CHWN", 128, 64, True): {"min_blocks": 3},
}


def _narrow(config: TileConfig, layout: str, padded: bool) -> TileConfig:
    """The variant of a tile for 16-bit elements. Only one step is in flight at a time, so two stages are enough."""
    changes = NARROW.get((layout, config.tile_k, config.tile_pixels, padded), {})
    if config.tile_reduction == 8 and config.tile_k == 64:
        changes = {}  # the shallow one of two tiles of this shape has its blocks already
    return variant(config, stages=2, **changes)


def tiles(problem: ConvProblem, along: bool = False, wide: bool = False) -> Iterator[tuple[TileConfig, float]]:
    """The tiles that ``problem`` can have without spilling registers, with their speeds.

    ``along``: pixels are read along the reduction in NCHW too; ``wide``: offsets take 64 bits whatever the tensors.
    """
    # 64-bit offsets, and taps that are decoded element by element, take more registers beside the accumulators.
    heavy = wide or has_wide_tensors(problem) or max(problem.r, problem.s) > 16
    heavy |= problem.layout == "NHWC" and problem.group_c % 8 != 0 or along
    few = FEW_CHANNELS_SPEED[problem.layout] if problem.group_c < 4 and problem.group_k <= 4 else 1.0
    for config, speed in TILES["NHWC" if along else copy_layout(problem)]:
        if config.tile_k == 4:
            speed *= few
        if is_narrow(problem.dtype):
            config = _narrow(config, copy_layout(problem), leaves_image(problem))
        if not heavy:
            yield config, speed
        elif config.threads < 256:
            yield variant(config, min_blocks=max(1, config.min_blocks * 3 // 4)), speed


def cost(
    problem: ConvProblem,
    pixels: int,
    reduction: int,
    config: TileConfig,
    speed: float,
    target: Target,
    overheads: tuple[int, int] = (20, 40),
) -> float:
    """Predicted time, in clock cycles of the busiest multiprocessor, of ``pixels`` as the tiles count them and
    ``reduction`` indices.

    Tiles are computed whole, the busiest multiprocessor sets the time, few warps hide less latency, and starting and
    storing a tile costs as much as some twenty reduction indices (``overheads``, without and with a split). On suite
    ``im2win`` this orders the tiles as measured but for differences under 5 %.
    """
    tiles = ceil_div(problem.group_k, config.tile_k) * problem.groups * ceil_div(pixels, config.tile_pixels)
    mean = tiles * config.split / target.multiprocessors
    on_one: float = max(1, ceil(mean))  # an empty batch has no tiles
    if config.split > 2 and mean > EVEN_CLUSTERS * config.min_blocks:
        on_one = mean + 1
    steps = ceil_div(ceil_div(reduction, config.tile_reduction), config.split)
    few, full = (blocks * config.threads // 32 for blocks in (min(on_one, config.min_blocks), config.min_blocks))
    speed *= few / (few + 1.2) * (full + 1.2) / full
    overhead = overheads[config.split > 1]
    products = on_one * config.tile_k * config.tile_pixels * (steps * config.tile_reduction + overhead)
    return products / (target.fma_lanes * BEST_SHARE * speed)


#: The element types of kernels that know no other.
FLOAT32 = ("float32",)


def forward_limits(problem: ConvProblem, taken: Sequence[str] = FLOAT32) -> list[str]:
    """Why the kernels of this family cannot run ``problem``; they compute the forward pass of the types ``taken``."""
    reasons = [] if problem.op == "fprop" else [f"op={problem.op!r} is not the forward pass"]
    return reasons + layer_limits(problem, taken)


def gradient_limits(problem: ConvProblem, taken: Sequence[str] = FLOAT32) -> list[str]:
    """Why kernels that compute the forward pass and the input's gradient cannot run ``problem``."""
    known = problem.op in ("fprop", "dgrad")
    reasons = [] if known else [f"op={problem.op!r} is neither the forward pass nor the gradient of the input"]
    return reasons + layer_limits(problem, taken)


def input_limits(problem: ConvProblem, taken: Sequence[str] = FLOAT32) -> list[str]:
    """Why kernels that compute the gradient of the input alone cannot run ``problem``."""
    reasons = [] if problem.op == "dgrad" else [f"op={problem.op!r} is not the gradient of the input"]
    return reasons + layer_limits(problem, taken)


def weight_limits(problem: ConvProblem, taken: Sequence[str] = FLOAT32) -> list[str]:
    """Why kernels that compute the gradient of the filters cannot run ``problem``."""
    reasons = [] if problem.op == "wgrad" else [f"op={problem.op!r} is not the gradient of the filters"]
    return reasons + layer_limits(problem, taken)


def images_outermost(problem: ConvProblem) -> list[str]:
    """Why kernels that support only layouts with the images outermost cannot run ``problem``."""
    inner = problem.layout not in ("NCHW", "NHWC")
    return [f"layout={problem.layout!r} is neither 'NCHW' nor 'NHWC'"] if inner else []


def overwrites(problem: ConvProblem) -> list[str]:
    """Why kernels that only store their results cannot run ``problem``."""
    return ["accumulate=True: its results are stored, not added to what the output holds"] if problem.accumulate else []


def layer_limits(problem: ConvProblem, taken: Sequence[str] = FLOAT32) -> list[str]:
    """Why the kernels of this family cannot work on the layer of ``problem``, in whichever direction."""
    reasons = none_of(problem.dtype, taken)
    # Indices below one image of one channel are of 32 bits, whatever the tensors' sizes.
    for what, h, w in (("input", problem.h, problem.w), ("output", problem.p, problem.q)):
        if h * w >= 2**31:
            reasons.append(f"an {what} of {h}x{w} pixels has 2**31 or more in one channel")
    return reasons


def with_splits(
    problem: ConvProblem, speeds: Iterable[tuple[C, float]], reduction: int, target: Target
) -> Iterator[tuple[C, float]]:
    """The configurations, and each of them with the reduction split over a cluster where that is possible."""
    for config, speed in speeds:
        yield config, speed
        shared = config.thread_pixels if problem.layout == "NHWC" else config.thread_k
        for split in (2, 4, 8):
            if target.clusters and shared % split == 0 and reduction >= 8 * split * config.tile_reduction:
                yield variant(config, split=split), speed


@dataclass(frozen=True)
class OutputView:
    """The places of a launch's outputs: rows ``first_p + step_p * i`` and columns ``first_q + step_q * j`` of images of
    ``out_h`` x ``out_w``, and from which element on the launch finds its filters.

    With more than one of ``phases`` the launch serves so many such parts in each direction, their filters one after the
    other. Phase i begins ``phase_step * i`` rows (columns) behind the first, of which whole steps move the windows;
    outputs that would lie outside the image are not stored.
    """

    out_h: int
    out_w: int
    first_p: int = 0
    first_q: int = 0
    step_p: int = 1
    step_q: int = 1
    phases: tuple[int, int] = (1, 1)
    phase_step: tuple[int, int] = (1, 1)
    first_weight: int = 0

    def phase(self, row: int, column: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Whole steps by which phase (row, column) moves its windows, and the row and column where it begins."""
        if self.phases == (1, 1):
            return (0, 0), (self.first_p, self.first_q)
        down, first_p = divmod(self.first_p + row * self.phase_step[0], self.step_p)
        right, first_q = divmod(self.first_q + column * self.phase_step[1], self.step_q)
        return (down, right), (first_p, first_q)


@lru_cache(maxsize=64)
def view_constants(problem: ConvProblem, view: OutputView | None = None, wide: bool = False) -> Constants:
    """The ``Problem`` struct of a tiled kernel: `conv_constants` and ``view`` (None: contiguous outputs).

    ``problem`` is the convolution of one phase, the first. ``wide``: offsets take 64 bits whatever its tensors.
    """
    constants = dict(conv_constants(problem))
    view = view or OutputView(problem.p, problem.q)
    constants["wide"] = constants["wide"] or wide
    whole = view.phases == (1, 1) and (view.out_h, view.out_w) == (problem.p, problem.q)
    if problem.layout == "NCHW" and not whole:
        columns = (problem.q, view.first_q, view.out_w)
        constants["vector_store"] = view.step_q == 1 and all(number % 4 == 0 for number in columns)
    # Of all phases the last has its windows moved furthest.
    (down, right), _ = view.phase(view.phases[0] - 1, view.phases[1] - 1)
    top, bottom, left, rest = problem.padding
    last = replace(problem, padding=(top + down, bottom - down, left + right, rest - right))
    constants["padded"] = constants["padded"] or dict(conv_constants(last))["padded"]
    return (
        *constants.items(),
        ("out_h", view.out_h),
        ("out_w", view.out_w),
        ("first_p", view.first_p),
        ("first_q", view.first_q),
        ("step_p", view.step_p),
        ("step_q", view.step_q),
        ("phases_h", view.phases[0]),
        ("phases_w", view.phases[1]),
        ("phase_step_h", view.phase_step[0]),
        ("phase_step_w", view.phase_step[1]),
        ("first_weight", view.first_weight),
    )


def conv_arguments(problem: ConvProblem, source: str | None = None, filters: str = "w") -> tuple[Argument, ...]:
    """The arguments of a kernel that computes ``problem``, its pixels in ``source``, its filters in ``filters``.

    By default the pixels are those of the operand that ``problem`` reads.
    """
    read, w, *_, written = problem.operands
    element, weight, result = (DTYPES[operand.dtype].ctype for operand in (read, w, written))
    return (
        Pointer(source or read.role, element),
        Pointer(filters, weight),
        Pointer("bias", result),
        Pointer(written.role, result, written=True),
        Number("long long", "batch", problem.n),
    )


def gradient_arguments(problem: ConvProblem) -> tuple[Argument, ...]:
    """The arguments of a kernel that computes a gradient, and takes no bias: the operands and the batch."""
    element = DTYPES[problem.dtype].ctype
    operands = (Pointer(each.role, element, each.written) for each in problem.operands)
    return (*operands, Number("long long", "batch", problem.n))


def tile_launch(
    header: str,
    problem: Constants,
    config: TileConfig,
    convolution: ConvProblem,
    pixels: int,
    shared_bytes: int,
    arguments: tuple[Argument, ...],
    phases: int = 1,
) -> Launch:
    """The launch of the tiled kernel in ``header``, which numbers ``pixels`` output pixels of each of its phases."""
    tiles = ceil_div(convolution.group_k, config.tile_k) * convolution.groups * ceil_div(pixels, config.tile_pixels)
    tiles *= phases
    return Launch(
        header=header,
        function=f"leanconv::{PurePosixPath(header).stem}",
        problem=problem,
        tuning=config.constants(),
        arguments=arguments,
        grid=tiles * config.split,
        block=config.threads,
        shared_bytes=shared_bytes,
        min_blocks=config.min_blocks,
        cluster=config.split,
    )
