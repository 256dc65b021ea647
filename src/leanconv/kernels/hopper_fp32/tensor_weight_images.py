"""Gradient of the filters on tensor cores where images are small and many: stages of a pixel of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from leanconv.kernels.common.layers import conv_constants, gradient_arguments, limits, wgmma_limits
from leanconv.kernels.common.split_gemm import DEPTH, LEAST_CHANNELS
from leanconv.kernels.common.tensor_core_gemm import ROW
from leanconv.kernels.contract import by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, launch_cycles
from leanconv.kernels.hopper_fp32 import tensor_weight
from leanconv.kernels.hopper_fp32.tensor_weight import MMA_N, ConsumersConfig, WeightGradient
from leanconv.plan import Plan, Pointer, Target, TensorMap, in_chain
from leanconv.problem import ConvProblem

#: Images that a layer has at least: with fewer a stage is mostly zeros.
LEAST_IMAGES = 16
#: Consumers of a block, with 64 channels each.
WARPGROUPS = 2
#: Stages of x, of dy and of dy converted.
STAGES = 3, 3, 4
#: Columns of dy that a column of x may be multiplied with.
MOST_COLUMNS = 3
#: Rows of an image that a stage may have, and how far apart copies can bring them.
ROWS, MOST_STEP = (1, 2, 4), 8
#: Columns that a segment of a row has at least, where rows have several.
LEAST_COLUMNS = 7
#: Threads of the launch that adds.
ADDING_THREADS = 256


@dataclass(frozen=True)
class TensorWeightImagesConfig(ConsumersConfig):
    """A tile has ``taps`` of a filter's row, 64 filters, and 64 channels for each consumer.

    A stage has ``image_rows`` rows of 64 / ``image_rows`` images. ``blocks`` share all tiles' rows of outputs evenly,
    each of them in ``segments``; ``sum_groups`` groups of threads add their sums. ``direct``: tiles that one block has
    all of take no slot of the workspace.
    """

    image_rows: int
    taps: int
    segments: int = 1
    blocks: int = 1
    sum_groups: int = 1
    direct: bool = False

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block's sums of a tile."""
        return 4 * self.rows * MMA_N * self.taps


@dataclass(frozen=True)
class ImageSpeeds(Speeds):
    """Cycles of a gradient of the filters with stages of images."""

    #: of a stage of x, of each tap that it is multiplied for, and of a block beside them
    x: int
    tap: int
    block: int
    #: of the columns of dy that two segments of a row both convert
    seam: int
    #: share of ``tap`` with one product instead of three
    one_product: float


class TensorWeightImages(WeightGradient):
    """For small and many images: a stage is a pixel of 64 images, or of rows of fewer; padding is left out; split-K."""

    strategy = "images"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "wgrad"), *wgmma_limits(target)]
        if problem.layout != "NHWC":
            reasons.append(f"layout={problem.layout!r} is not NHWC: a stage copies whole rows of channels")
        if problem.c % 4 or problem.k % 4 or problem.group_c % 4 or problem.group_k % 4:
            reasons.append(
                f"{problem.group_c} channels and {problem.group_k} filters in a group are not multiples of four"
            )
        if (least := min(problem.group_c, problem.group_k)) < LEAST_CHANNELS:
            reasons.append(f"{least} channels or filters in a group are fewer than {LEAST_CHANNELS}")
        if problem.s == 1:
            reasons.append("s=1 leaves no taps of a row that could share x")
        if problem.n < LEAST_IMAGES:
            reasons.append(f"n={problem.n} images are fewer than {LEAST_IMAGES}")
        if not reasons and units_of(problem, 1) == 0:
            reasons.append("no tap reads the image")
        if not reasons:
            reasons += [*x_map(problem, 1).why_not(), *dy_map(problem, 1).why_not()]
            if problem.n * problem.p * problem.k * problem.group_c * problem.r // 4096 >= 2**31:
                reasons.append(f"{problem.n * problem.p} rows of dy for each tile are too many for 32 bits")
        return reasons

    def workspace_bytes(self, problem: ConvProblem, config: TensorWeightImagesConfig) -> int:
        return _slots(problem, config) * config.slot_bytes

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorWeightImagesConfig]]:
        configs = _whole(problem, target.multiprocessors)
        return by_time((predicted_cycles(problem, config, target), config) for config in configs)

    def plan(self, problem: ConvProblem, config: TensorWeightImagesConfig, target: Target) -> Plan:
        *_, dw, batch = gradient_arguments(problem)
        tuning = (*config.constants(), *config.geometry.items())
        maps = x_map(problem, config.image_rows), dy_map(problem, config.image_rows)
        arguments = (*maps, Pointer("workspace", written=True), dw, batch)
        constants = conv_constants(problem)
        first = self.launch(config, constants, arguments, config.blocks, config.shared_bytes, tuning)
        second = replace(
            first,
            function="leanconv::sum_image_slots",
            arguments=(Pointer("workspace"), dw, batch),
            grid=tiles_of(problem, config) * (config.slot_bytes // 16 * config.sum_groups // ADDING_THREADS),
            block=ADDING_THREADS,
            shared_bytes=16 * ADDING_THREADS if config.sum_groups > 1 else 0,
        )
        return Plan(in_chain((first, second)), workspace_bytes=self.workspace_bytes(problem, config))


def x_map(problem: ConvProblem, rows: int) -> TensorMap:
    """How TMA walks over x: boxes of 32 channels of a column of ``rows`` rows of images."""
    return _images("x", (problem.c, problem.w, problem.h, problem.n), rows, problem.stride[0])


def dy_map(problem: ConvProblem, rows: int) -> TensorMap:
    """And over dy."""
    return _images("dy", (problem.k, problem.q, problem.p, problem.n), rows, 1)


def _images(role: str, shape: tuple[int, int, int, int], rows: int, step: int) -> TensorMap:
    c, w, h, _ = shape
    strides, box = (4 * c, 4 * c * w, 4 * c * w * h), (ROW, 1, (rows - 1) * step + 1, DEPTH // rows)
    traversal = (1, 1, step if rows > 1 else 1, 1)
    return TensorMap(role, "float32", shape, strides, box, traversal=traversal, swizzle=4 * ROW)


def _whole(problem: ConvProblem, most_blocks: int) -> Iterator[TensorWeightImagesConfig]:
    products, taps = 1 if problem.precision == "tf32" else 3, _taps(problem)
    rows = min((rows for rows in ROWS if _may_have(problem, rows)), key=lambda rows: units_of(problem, rows))
    first = TensorWeightImagesConfig(WARPGROUPS, products, *STAGES, *tensor_weight.SHARING_REGISTERS, rows, taps)
    tiles = tiles_of(problem, first)
    units = units_of(problem, rows) * tiles // problem.r
    for segments in (1, 2, 3, 4, 6, 8):
        if segments > 1 and problem.w < LEAST_COLUMNS * segments:
            break
        blocks = max(1, min(units * segments, most_blocks))
        groups = next(many for many in (8, 4, 2, 1) if many == 1 or blocks // tiles >= 2 * many)
        yield variant(first, segments=segments, blocks=blocks, sum_groups=groups, direct=tiles > blocks)


def _taps(problem: ConvProblem) -> int:
    """How many taps of a filter's row a tile has: as evenly many as a row has in tiles of up to three, as long as rings
    hold all columns of dy that a column of x is multiplied with."""
    for most in (tensor_weight.MOST_SHARING, 2):
        taps = tensor_weight.sharing_taps(problem, most)
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
    channels, filters = ceil_div(problem.group_c, config.rows), ceil_div(problem.group_k, MMA_N)
    return problem.r * ceil_div(problem.s, config.taps) * channels * filters * problem.groups


def _rows_inside(problem: ConvProblem, r: int) -> tuple[int, int]:
    """First row of outputs whose taps of row r read the image, and how many do."""
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


@lru_cache(maxsize=64)
def columns_of(problem: ConvProblem, taps: int) -> tuple[float, float]:
    """Columns of x in a row that some tap reads, and pairs of such a column and a tap, on average over the tiles."""
    step, read = problem.stride[1], []
    for s in range(problem.s):
        first = s * problem.dilation[1] - problem.padding[2]
        low, high = max(0, ceil_div(-first, step)), min(problem.q - 1, (problem.w - 1 - first) // step)
        read.append(range(first + step * low, first + step * high + 1, step))
    columns = sum(len(set().union(*read[s : s + taps])) for s in range(0, problem.s, taps))
    groups = ceil_div(problem.s, taps)
    return columns / groups, sum(map(len, read)) / groups


def predicted_cycles(problem: ConvProblem, config: TensorWeightImagesConfig, target: Target) -> float:
    """Predicted time in clock cycles, of both launches."""
    speeds = ImageSpeeds.of(target)
    columns, pairs = columns_of(problem, config.taps)
    units = units_of(problem, config.image_rows) * config.segments
    share = ceil_div(units * tiles_of(problem, config) // problem.r, config.blocks) / config.segments
    rate = speeds.one_product if config.products == 1 else 1
    unit = columns * speeds.x + pairs * speeds.tap * rate + (config.segments - 1) * speeds.seam
    sums = 2 * _slots(problem, config) * config.slot_bytes / target.bytes_per_cycle
    memory = problem.bytes / target.bytes_per_cycle
    return max(share * unit + speeds.block, memory) + sums + 2 * launch_cycles(target)
