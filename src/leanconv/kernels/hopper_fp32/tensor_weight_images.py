"""Gradient of the filters on tensor cores where images are small and many: stages of 64 images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.kernels.contract import (
    LAUNCH_CYCLES,
    Arithmetic,
    TimedAlgorithm,
    by_time,
    ceil_div,
    conv_constants,
    variant,
)
from leanconv.kernels.hopper_fp32.filters import DEPTH, LEAST_CHANNELS, SplitGemm
from leanconv.kernels.hopper_fp32.tensor_gemm import ROW, wgmma_limits
from leanconv.kernels.hopper_fp32.tensor_weight import (
    CHUNK,
    CODE_STAGES,
    MOST_SHARING,
    SHARING_REGISTERS,
    ConsumersConfig,
    sharing_taps,
)
from leanconv.kernels.simt.tiles import gradient_arguments, weight_limits
from leanconv.plan import Launch, Plan, Pointer, Target, TensorMap, in_chain
from leanconv.problem import ConvProblem

#: Images that a layer has at least: with fewer a stage of 64 is mostly zeros.
LEAST_IMAGES = 16
#: Consumers of a block, with 64 channels each.
WARPGROUPS = 2
#: Stages of x, of dy and of dy converted.
STAGES = 3, 3, 4
#: Cycles of a stage of x, of each tap that it meets, and of a block beside them.
X_CYCLES, TAP_CYCLES, BLOCK_CYCLES = 1800, 1220, 2000
#: And of the columns of dy that two segments of a row both convert.
SEAM_CYCLES = 2000
#: Columns of dy that a column of x may meet.
MOST_COLUMNS = 3
#: Rows of an image that a stage may have, and how far apart copies can bring them.
ROWS, MOST_STEP = (1, 2, 4), 8
#: Columns that a segment of a row has at least, where rows have several.
LEAST_COLUMNS = 7
#: Threads of the launch that adds.
ADDING_THREADS = 256


@dataclass(frozen=True)
class TensorWeightImagesConfig(ConsumersConfig):
    """A tile has ``taps`` of a filter's row, 64 filters, and 64 channels for each of ``warpgroups`` consumers.

    A stage has ``rows`` rows of 64 / ``rows`` images. ``products`` of float16 make one of float32: 3, or 1 in tier
    tf32. ``x_stages``, ``dy_stages`` and ``split_stages`` are the lengths of the rings of x, of dy, and of dy
    converted. ``blocks`` share all tiles' rows of outputs evenly, each of them in ``segments``; ``groups`` of threads
    add their sums. ``direct``: tiles that one block has all of take no slot of the workspace.
    ``turns``: consumers multiply in turn, a tap at a time.
    """

    rows: int
    segments: int
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
    direct: bool = False
    turns: bool = True

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return 64 * self.warpgroups

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block's sums of a tile."""
        return 4 * 64 * self.warpgroups * CHUNK * self.taps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block (WeightRings in kernels/hopper_fp32/tensor_weight_tiles.cuh)."""
        split = 2 * DEPTH * CHUNK * (2 if self.products == 3 else 1) + 320
        x, dy = 4 * self.channels * DEPTH, 4 * CHUNK * DEPTH
        rings = self.x_stages * x + self.dy_stages * dy + self.split_stages * split
        barriers = 16 * (self.x_stages + self.dy_stages + self.split_stages) + 8 * CODE_STAGES
        return rings + CODE_STAGES * (DEPTH + 8) + barriers


class TensorWeightImages(TimedAlgorithm):
    """For small and many images: a stage is one pixel of 64 images, so neighbouring taps share x and dy, and what lies
    outside the images is left out. All blocks have equal shares of all tiles; split-K through a workspace.

    ``x dy ≈ hi·hi + hi·lo + lo·hi`` in float16, summed in float32; in tier tf32 ``hi·hi`` alone.
    """

    name = "tensor_weight"
    strategy = "images"
    paper = SplitGemm.paper
    tier = "fp32"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*weight_limits(problem), *wgmma_limits(target)]
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC: a stage copies whole rows of channels")
        if problem.c % 4 or problem.k % 4 or problem.group_c % 4 or problem.group_k % 4:
            reasons.append(f"{problem.group_c} channels and {problem.group_k} filters in a group are not in fours")
        if min(problem.group_c, problem.group_k) < LEAST_CHANNELS:
            least = min(problem.group_c, problem.group_k)
            reasons.append(f"{least} channels or filters in a group are fewer than {LEAST_CHANNELS}")
        if problem.s == 1:
            reasons.append("s=1 leaves no taps of a row that could share x")
        if problem.n < LEAST_IMAGES:
            reasons.append(f"n={problem.n} images are fewer than {LEAST_IMAGES}")
        if not reasons and units_of(problem, 1) == 0:
            reasons.append("no tap sees the image")
        if not reasons:
            reasons += [*x_map(problem, 1).why_not(), *dy_map(problem, 1).why_not()]
            if problem.n * problem.p * problem.k * problem.group_c * problem.r // 4096 >= 2**31:
                reasons.append(f"{problem.n * problem.p} rows of dy for each tile are too many for 32 bits")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if problem.precision == "tf32" else "fp16x3"

    def workspace_bytes(self, problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
        return _slots(problem, config) * config.slot_bytes

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorWeightImagesConfig]]:
        configs = _whole(problem, target.multiprocessors)
        return by_time((predicted_cycles(problem, config, target), config) for config in configs)

    def plan(self, problem: ConvProblem, config: TensorWeightImagesConfig, target: Target) -> Plan:
        *_, dw, batch = gradient_arguments(problem)
        x, dy = x_map(problem, config.rows), dy_map(problem, config.rows)
        adding = config.slot_bytes // 16 * config.groups // ADDING_THREADS
        first = Launch(
            header="kernels/hopper_fp32/tensor_weight_images.cuh",
            function="leanconv::tensor_weight_images",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=(x, dy, Pointer("workspace", written=True), dw, batch),
            grid=config.blocks,
            block=config.threads,
            shared_bytes=config.shared_bytes,
        )
        second = Launch(
            header="kernels/hopper_fp32/tensor_weight_images.cuh",
            function="leanconv::sum_image_slots",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=(Pointer("workspace"), dw, batch),
            grid=tiles_of(problem, config) * adding,
            block=ADDING_THREADS,
            shared_bytes=16 * ADDING_THREADS if config.groups > 1 else 0,
        )
        return Plan(in_chain((first, second)), workspace_bytes=self.workspace_bytes(problem, config))


def x_map(problem: ConvProblem, rows: int) -> TensorMap:
    """How bulk copies walk over x: 32 channels of a column of ``rows`` rows of images."""
    return _images("x", (problem.c, problem.w, problem.h, problem.n), rows, problem.stride[0])


def dy_map(problem: ConvProblem, rows: int) -> TensorMap:
    """And over dy."""
    return _images("dy", (problem.k, problem.q, problem.p, problem.n), rows, 1)


def _images(role: str, shape: tuple[int, int, int, int], rows: int, step: int) -> TensorMap:
    c, w, h, _ = shape
    return TensorMap(
        role=role,
        element="float32",
        shape=shape,
        strides=(4 * c, 4 * c * w, 4 * c * w * h),
        box=(ROW, 1, (rows - 1) * step + 1, DEPTH // rows),
        traversal=(1, 1, step if rows > 1 else 1, 1),
        swizzle=4 * ROW,
    )


def _whole(problem: ConvProblem, most_blocks: int) -> Iterator[TensorWeightImagesConfig]:
    products = 1 if problem.precision == "tf32" else 3
    taps = _taps(problem)
    rows = min((rows for rows in ROWS if _may_have(problem, rows)), key=lambda rows: units_of(problem, rows))
    first = TensorWeightImagesConfig(
        WARPGROUPS, rows, 1, taps, products, *STAGES, *SHARING_REGISTERS, blocks=1, groups=1
    )
    tiles = tiles_of(problem, first)
    units = units_of(problem, rows) * tiles // problem.r
    for segments in (1, 2, 3, 4, 6, 8):
        if segments > 1 and problem.w < LEAST_COLUMNS * segments:
            break
        blocks = max(1, min(units * segments, most_blocks))
        groups = next(many for many in (8, 4, 2, 1) if many == 1 or blocks // tiles >= 2 * many)
        yield variant(first, segments=segments, blocks=blocks, groups=groups, direct=tiles > blocks)


def _taps(problem: ConvProblem) -> int:
    """How many taps of a filter's row a tile has: as evenly many as a row has in tiles of up to three, as long as rings
    hold all columns of dy that a column of x meets."""
    for most in (MOST_SHARING, 2):
        taps = sharing_taps(problem, most)
        if (taps - 1) * problem.dilation[1] // problem.stride[1] + 1 <= MOST_COLUMNS:
            return taps
    return 1


def _slots(problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
    """Slots of the workspace: a block begins a new tile, or one that the block before has left to it. With ``direct``
    only its first tile and its last need one."""
    if config.direct:
        return 2 * config.blocks
    return tiles_of(problem, config) + config.blocks - 1


def tiles_of(problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
    """Tiles of the gradient."""
    channels, filters = ceil_div(problem.group_c, config.channels), ceil_div(problem.group_k, CHUNK)
    return problem.r * ceil_div(problem.s, config.taps) * channels * filters * problem.groups


def _rows_inside(problem: ConvProblem, r: int) -> tuple[int, int]:
    """First row of outputs whose taps of row r see the image, and how many do."""
    first, size = -problem.padding[0] + r * problem.dilation[0], problem.stride[0]
    inside = [p for p in range(problem.p) if 0 <= first + p * size < problem.h]
    return (inside[0] if inside else 0), len(inside)


def _may_have(problem: ConvProblem, rows: int) -> bool:
    """Whether stages of so many rows have no row that dy does not have while x does."""
    if rows > 1 and problem.stride[0] > MOST_STEP:
        return False
    for r in range(problem.r):
        first, count = _rows_inside(problem, r)
        more = -count % rows
        if first < more and first + count + more > problem.p:
            h = problem.p * problem.stride[0] - problem.padding[0] + r * problem.dilation[0]
            if h < problem.h:
                return False
    return True


def units_of(problem: ConvProblem, rows: int) -> int:
    """Units of a tile of each row of taps, in all: stages of rows of blocks of images."""
    stages = sum(ceil_div(_rows_inside(problem, r)[1], rows) for r in range(problem.r))
    return stages * ceil_div(problem.n, DEPTH // rows)


def columns_of(problem: ConvProblem, taps: int) -> tuple[float, float]:
    """Columns of x in a row that some tap sees, and pairs of such a column and a tap, on average over a row's tiles."""
    left, step, dilation = problem.padding[2], problem.stride[1], problem.dilation[1]
    met = pairs = 0
    for first in range(0, problem.s, taps):
        for w in range(problem.w):
            places = (w + left - s * dilation for s in range(first, min(first + taps, problem.s)))
            seen = sum(at % step == 0 and 0 <= at // step < problem.q for at in places)
            met, pairs = met + (seen > 0), pairs + seen
    groups = ceil_div(problem.s, taps)
    return met / groups, pairs / groups


def predicted_cycles(problem: ConvProblem, config: TensorWeightImagesConfig, target: Target) -> float:
    """Predicted time in clock cycles, of both launches."""
    met, pairs = columns_of(problem, config.taps)
    units = units_of(problem, config.rows) * config.segments
    share = ceil_div(units * tiles_of(problem, config) // problem.r, config.blocks) / config.segments
    rate = 0.5 if config.products == 1 else 1
    unit = met * X_CYCLES + pairs * TAP_CYCLES * rate + (config.segments - 1) * SEAM_CYCLES
    sums = 2 * _slots(problem, config) * config.slot_bytes / target.bytes_per_cycle
    return max(share * unit + BLOCK_CYCLES, problem.bytes / target.bytes_per_cycle) + sums + 2 * LAUNCH_CYCLES
