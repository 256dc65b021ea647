"""Gradient of the filters on tensor cores where images are small and many: stages of 64 images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from leanconv.algorithms.base import (
    LAUNCH_CYCLES,
    Arithmetic,
    Config,
    TimedAlgorithm,
    by_time,
    ceil_div,
    conv_constants,
)
from leanconv.algorithms.tensor_filters import DEPTH, LEAST_CHANNELS, SplitGemm
from leanconv.algorithms.tensor_gemm import ROW, wgmma_limits
from leanconv.algorithms.tensor_weight import CHUNK, CODE_STAGES, SHARING_REGISTERS
from leanconv.algorithms.tiles import gradient_arguments, weight_limits
from leanconv.plan import Launch, Plan, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Images that a layer has at least: with fewer a stage of 64 is mostly zeros.
LEAST_IMAGES = 16
#: Consumers of a block, with 64 channels each.
WARPGROUPS = 2
#: Stages of x, of dy and of dy converted, where consumers share images, and where they have their own.
STAGES = {1: (3, 2, 5), 2: (3, 2, 8)}
#: Cycles of a stage of x, of each tap that it meets, of a block beside them; and of what a consumer with
#: images of its own costs more for each column of dy, which is converted for it alone.
X_CYCLES, TAP_CYCLES, BLOCK_CYCLES, DY_CYCLES = 1250, 1150, 9000, 250
#: Columns of dy that a column of x may meet, and blocks that the workspace is for.
MOST_COLUMNS, BLOCKS = 3, 132
#: Threads of the launch that adds, and tiles' slots from which on two, four or eight groups of them share those of a tile.
ADDING_THREADS = 256


@dataclass(frozen=True)
class TensorWeightImagesConfig(Config):
    """A tile has ``taps`` of a filter's row, 64 filters, and 128 channels; or 64 of them, with images of its own
    for each of two consumers (``halves`` is 2).

    ``products`` of float16 make one of float32: 3, or 1 in tier tf32. ``x_stages``, ``dy_stages`` and ``split_stages``
    are the lengths of the rings of x, of dy, and of dy converted. ``blocks`` share all tiles' rows of outputs evenly;
    ``groups`` of threads add their sums.
    """

    warpgroups: int
    halves: int
    taps: int
    products: int
    x_stages: int
    dy_stages: int
    split_stages: int
    consumer_registers: int
    converter_registers: int
    producer_registers: int
    blocks: int
    groups: int

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, a warpgroup that converts and one that copies."""
        return 128 * (self.warpgroups + 2)

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return 64 * self.warpgroups // self.halves

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block's sums of a tile."""
        return 4 * 64 * self.warpgroups * CHUNK * self.taps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block (WeightRings in kernels/lib/tensor_weight_tiles.cuh)."""
        split = 2 * DEPTH * CHUNK * (2 if self.products == 3 else 1) + 320
        rings = self.x_stages * 4 * self.channels * DEPTH + self.dy_stages * 4 * CHUNK * DEPTH + self.split_stages * split
        barriers = 16 * (self.x_stages + self.dy_stages + self.split_stages) + 8 * CODE_STAGES
        return rings + CODE_STAGES * (DEPTH + 8) + barriers


class TensorWeightImages(TimedAlgorithm):
    """As `tensor_weight_parts`, but a stage is one pixel of 64 images, so that neighbouring taps share x and dy, and
    what lies beside an image is left out. All blocks have equal shares of all tiles.

    ``x dy ≈ hi·hi + hi·lo + lo·hi`` in float16, summed in float32; in tier tf32 ``hi·hi`` alone.
    """

    name = "tensor_weight_images"
    paper = SplitGemm.paper
    tier = "fp32"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*weight_limits(problem), *wgmma_limits(target)]
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout} is not NHWC")
        if problem.c % 4 or problem.k % 4 or problem.group_c % 4 or problem.group_k % 4:
            reasons.append(f"{problem.group_c} channels and {problem.group_k} filters in a group are not in fours")
        if min(problem.group_c, problem.group_k) < LEAST_CHANNELS:
            least = min(problem.group_c, problem.group_k)
            reasons.append(f"{least} channels or filters in a group are fewer than {LEAST_CHANNELS}")
        if problem.s == 1:
            reasons.append("s=1 leaves no taps of a row that could share x")
        if problem.n < LEAST_IMAGES:
            reasons.append(f"n={problem.n} images are fewer than {LEAST_IMAGES}")
        if not reasons:
            reasons += [*x_map(problem).why_not(), *dy_map(problem).why_not()]
            if units_of(problem, 1, 1)[0] >= 2**31:
                reasons.append(f"the images have {problem.n * problem.p} rows, too many for 32 bits")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if problem.precision == "tf32" else "fp16x3"

    def workspace_bytes(self, problem: ConvProblem) -> int:
        return max((_slots(problem, config) * config.slot_bytes for config in _whole(problem, BLOCKS)), default=0)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorWeightImagesConfig]]:
        return by_time((predicted_cycles(problem, config, target), config) for config in _whole(problem, target.multiprocessors))

    def plan(self, problem: ConvProblem, config: TensorWeightImagesConfig, target: Target) -> Plan:
        *_, dw, batch = gradient_arguments(problem)
        first = Launch(
            header="tensor_weight_images.cuh",
            function="leanconv::tensor_weight_images",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=(x_map(problem), dy_map(problem), Pointer("workspace", written=True), batch),
            grid=config.blocks,
            block=config.threads,
            shared_bytes=config.shared_bytes,
        )
        second = Launch(
            header="tensor_weight_images.cuh",
            function="leanconv::sum_image_slots",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=(Pointer("workspace"), dw, batch),
            grid=tiles_of(problem, config) * (config.slot_bytes // config.halves * config.groups // 16 // ADDING_THREADS),
            block=ADDING_THREADS,
            shared_bytes=16 * ADDING_THREADS if config.groups > 1 else 0,
        )
        return Plan((first, second), workspace_bytes=_slots(problem, config) * config.slot_bytes)


def x_map(problem: ConvProblem) -> TensorMap:
    """How bulk copies walk over x: 32 channels of a pixel of 64 images."""
    return _images("x", problem.n, problem.h, problem.w, problem.c)


def dy_map(problem: ConvProblem) -> TensorMap:
    """And over dy."""
    return _images("dy", problem.n, problem.p, problem.q, problem.k)


def _images(role: str, n: int, h: int, w: int, c: int) -> TensorMap:
    return TensorMap(
        role=role,
        element="float32",
        shape=(c, w, h, n),
        strides=(4 * c, 4 * c * w, 4 * c * w * h),
        box=(ROW, 1, 1, DEPTH),
        swizzle=4 * ROW,
    )


def _whole(problem: ConvProblem, most_blocks: int) -> Iterator[TensorWeightImagesConfig]:
    products = 1 if problem.precision == "tf32" else 3
    taps = _taps(problem)
    chunks = ceil_div(problem.group_c, CHUNK)
    for halves in (1, 2) if chunks in (1, 3) else (1,):
        config = TensorWeightImagesConfig(
            WARPGROUPS, halves, taps, products, *STAGES[halves], *SHARING_REGISTERS, blocks=1, groups=1
        )
        units, tiles = units_of(problem, taps, halves)[0] * _tiles_of_row(problem, config), tiles_of(problem, config)
        blocks = max(1, min(units, most_blocks))
        sums = halves * blocks // tiles
        groups = next(many for many in (8, 4, 2, 1) if many == 1 or sums >= 2 * many)
        yield replace(config, blocks=blocks, groups=groups)


def _taps(problem: ConvProblem) -> int:
    """How many taps of a filter's row a tile has: as evenly many as a row has in tiles of up to three, as long as rings
    hold all columns of dy that a column of x meets."""
    for most in (3, 2):
        taps = ceil_div(problem.s, ceil_div(problem.s, most))
        if (taps - 1) * problem.dilation[1] // problem.stride[1] + 1 <= MOST_COLUMNS:
            return taps
    return 1


def _slots(problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
    """Slots of the workspace: a block begins a new tile, or one that the block before has left to it."""
    return tiles_of(problem, config) + config.blocks - 1


def _tiles_of_row(problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
    """Tiles of a row of taps."""
    channels = ceil_div(problem.group_c, config.channels)
    return ceil_div(problem.s, config.taps) * channels * ceil_div(problem.group_k, CHUNK) * problem.groups


def tiles_of(problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
    """Tiles of the gradient."""
    return problem.r * _tiles_of_row(problem, config)


def units_of(problem: ConvProblem, taps: int, halves: int) -> tuple[int, float, float]:
    """Units of a tile of each row of taps, in all; and what each has: columns of x, and pairs of such a column and
    a tap that it meets, on average over the tiles of a row."""
    images = ceil_div(problem.n, DEPTH * halves)
    top, _, left, _ = problem.padding
    rows = 0
    for r in range(problem.r):
        inside = (p * problem.stride[0] - top + r * problem.dilation[0] for p in range(problem.p))
        rows += sum(0 <= h < problem.h for h in inside)
    met = pairs = 0
    for first in range(0, problem.s, taps):
        for w in range(problem.w):
            places = (w + left - s * problem.dilation[1] for s in range(first, min(first + taps, problem.s)))
            seen = sum(at % problem.stride[1] == 0 and 0 <= at // problem.stride[1] < problem.q for at in places)
            met, pairs = met + (seen > 0), pairs + seen
    groups = ceil_div(problem.s, taps)
    return rows * images, met / groups, pairs / groups


def predicted_cycles(problem: ConvProblem, config: TensorWeightImagesConfig, target: Target) -> float:
    """Predicted time in clock cycles, of both launches."""
    units, met, pairs = units_of(problem, config.taps, config.halves)
    share = ceil_div(units * _tiles_of_row(problem, config), config.blocks)
    rate = 0.5 if config.products == 1 else 1
    unit = met * X_CYCLES + pairs * TAP_CYCLES * rate + problem.q * DY_CYCLES * (config.halves - 1)
    sums = 2 * _slots(problem, config) * config.slot_bytes / target.bytes_per_cycle
    return max(share * unit + BLOCK_CYCLES, problem.bytes / target.bytes_per_cycle) + sums + 2 * LAUNCH_CYCLES
