"""1x1 convolution on tensor cores for float16 and bfloat16 in NCHW, of small images: pixels are a product's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache

from leanconv.dtypes import DTYPES
from leanconv.kernels.common import layers
from leanconv.kernels.common.input_gradient import images_as_rows
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, view_constants
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, clusters_at_once, overlapped, residual_cycles
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeGemm16bit
from leanconv.plan import Plan, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Rows of a product, channels of a stage, and pixels of an image at least: of fewer, copies are many and small.
ROWS, BLOCK, LEAST_PIXELS = 64, 64, 16
#: Consumers; registers of a thread of theirs and of the producer; stages of the ring at least and at most.
WARPGROUPS, REGISTERS, MIN_STAGES, MAX_STAGES = 2, (232, 40), 3, 8
#: Filters of a tile; CTAs that share a reduction.
COLUMNS, SPLITS = (256, 128, 64), (1, 2, 4, 8)
#: Where swizzle patterns begin; elements of 16 bytes.
PATTERN, UNIT = 1024, 8
#: What the kernel counts in an int: CTAs.
MAX_INDEX = 2**31 - 2**20


@dataclass(frozen=True)
class PlanesConfig(Config):
    """A tile has ``columns`` filters and as many images as ``warpgroups`` x 64 rows take.

    The ring has ``stages`` of 64 channels. The ``split`` CTAs of a cluster share the reduction of a tile.
    """

    warpgroups: int
    columns: int
    stages: int
    consumer_registers: int
    producer_registers: int
    split: int = 1

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    @property
    def cluster(self) -> int:
        return self.split


@dataclass(frozen=True)
class PlanesSpeeds(Speeds):
    """Cycles of a multiprocessor, fitted to 168 times of 17 layers (H200)."""

    #: the share of the peak that products reach; a stage beside them
    products: float
    stage: float
    #: bytes that the copies of a multiprocessor bring from the L2 cache in a cycle, where all of them copy
    copied: float
    #: a tile until its first stage has landed; storing an output
    tile: float
    output: float
    #: a cluster, which begins and ends together; each sum of a tile that its CTAs add up
    cluster: float
    split: float
    #: the share of the lesser of computing and memory that the greater does not hide; a call
    not_hidden: float
    first: float
    #: the share of the memory's speed at which residuals come
    residual: float


def _pixels(problem: ConvProblem) -> int:
    return problem.p * problem.q


def _images(problem: ConvProblem) -> int:
    """Of a tile."""
    return WARPGROUPS * (ROWS // _pixels(problem))


def _stage_bytes(problem: ConvProblem, columns: int) -> int:
    """With what rows that are no pixel read past the last channel."""
    pixels = 2 * BLOCK * _pixels(problem) * _images(problem) + 2 * (ROWS - _pixels(problem))
    return 2 * BLOCK * columns + ceil_div(pixels, PATTERN) * PATTERN


def _barrier_bytes(stages: int) -> int:
    """Two of each stage, and one of each warpgroup for residuals."""
    return 8 * (2 * stages + WARPGROUPS)


class NativeGemmPlanes(TimedAlgorithm):
    """1x1 convolution of images of 16 to 64 pixels and its input's gradient on tensor cores, float16 or bfloat16 summed
    in float32; NCHW."""

    name = "native_gemm"
    strategy = "planes"
    paper = NativeGemm16bit.paper
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = layers.limits_of_one_tap(problem, target)
        if any(problem.padding) or problem.stride != (1, 1):
            both = f"padding={problem.padding} and stride={problem.stride}"
            reasons.append(f"{both}: outputs are not pixels of the input, all of them")
        if not LEAST_PIXELS <= _pixels(problem) <= ROWS:
            reasons.append(f"images of {_pixels(problem)} pixels, not of {LEAST_PIXELS} to {ROWS}")
        for count, what in (problem.group_c, "channels"), (problem.group_k, "filters"):
            if count % UNIT:
                reasons.append(f"{count} {what} of a group, no multiple of {UNIT}: copies begin at whole 16 bytes")
        if not reasons:
            phase = images_as_rows(problem).problem
            least = PlanesConfig(WARPGROUPS, COLUMNS[-1], MIN_STAGES, *REGISTERS)
            if _tiles(phase, least) * max(SPLITS) > MAX_INDEX:
                reasons.append(f"n={problem.n}: {_tiles(phase, least)} tiles are more than an int counts")
            broken = _filter_map(problem, least).why_not()
            reasons += [f"no tensor map describes w: {each}" for each in broken]
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, PlanesConfig]]:
        phase = images_as_rows(problem).problem
        return by_time((_cycles(problem, phase, each, target), each) for each in _configs(problem, phase, target))

    def order_of_sums(self, problem: ConvProblem, config: PlanesConfig) -> Hashable:
        return config.split if config.split > 1 else ()

    def plan(self, problem: ConvProblem, config: PlanesConfig, target: Target) -> Plan:
        rows = images_as_rows(problem)
        phase = rows.problem
        x = Pointer(problem.operands[0].role, DTYPES[problem.dtype].ctype)
        constants = view_constants(phase, rows.view, has_wide_tensors(problem))
        barriers_at = config.stages * _stage_bytes(phase, config.columns)
        tuning = (*config.constants(), ("mirrored", problem.op == "dgrad"), ("barriers_at", barriers_at))
        arguments = (x, _filter_map(problem, config), *conv_arguments(problem)[2:])
        grid = _tiles(phase, config) * config.split
        shared = barriers_at + _barrier_bytes(config.stages)
        launch = self.launch(config, constants, arguments, grid, shared, tuning)
        return Plan((launch,))


def _configs(problem: ConvProblem, phase: ConvProblem, target: Target) -> Iterator[PlanesConfig]:
    """Those whose ring fits, whose filters the layer fills by half, and whose clusters are busy."""
    stages = ceil_div(phase.group_c, BLOCK)
    for columns in COLUMNS:
        if columns > COLUMNS[-1] and 2 * phase.group_k <= columns:
            continue
        bytes_of_stage = _stage_bytes(phase, columns)
        fit = min((target.shared_per_block - _barrier_bytes(MAX_STAGES)) // bytes_of_stage, MAX_STAGES)
        if fit < MIN_STAGES:
            continue
        for split in SPLITS:
            tile_bytes = 4 * columns * ROWS * WARPGROUPS
            shared = split > 1 and (
                phase.batch_invariant
                or tile_bytes > fit * bytes_of_stage
                or columns % (UNIT * split)
                or ceil_div(stages, split) < 2
                or ceil_div(stages, split) * (split - 1) >= stages
            )
            if shared:
                continue
            config = PlanesConfig(WARPGROUPS, columns, fit, *REGISTERS, split)
            busy = split == 1 or _tiles(phase, config) * split <= target.multiprocessors
            if busy and split <= target.most_in_cluster:
                yield config


def _filter_map(problem: ConvProblem, config: PlanesConfig) -> TensorMap:
    """How copies walk over the layer's filters as they lie: rows of 64 channels of those filters that a CTA copies, or
    of a gradient rows of 64 channels, which are its filters."""
    filters = BLOCK if problem.op == "dgrad" else config.columns
    return layers.filters_as_they_lie(problem, (BLOCK, filters))


def _tiles(phase: ConvProblem, config: PlanesConfig) -> int:
    return ceil_div(phase.n, _images(phase)) * ceil_div(phase.group_k, config.columns) * phase.groups


def _shared_cycles(problem: ConvProblem, config: PlanesConfig) -> float:
    """Cycles that shared memory is busy in a stage: 128 bytes in each. What is copied; operand B, which each warpgroup
    reads; and loads of an element by 32 lanes."""
    loads = 4 * WARPGROUPS * BLOCK // 2 * _load_cycles(_pixels(problem))
    return loads + WARPGROUPS * config.columns + _stage_bytes(problem, config.columns) / 128


@cache
def _load_cycles(pixels: int) -> float:
    """Cycles of a load: how many of the different words that its lanes read lie in one bank, in the mean. A lane has a
    pixel, as in the kernel, and one of four channels, each two planes from the next."""
    cycles = 0
    for eight in range(ROWS // 8):
        for plane in range(2):
            words = set[int]()
            for lane in range(32):
                row = lane // 4 * 8 + eight if pixels % 2 else eight * 8 + lane // 4
                image, pixel = divmod(row, pixels) if row < ROWS // pixels * pixels else (0, row)
                words.add((image * BLOCK * pixels + (lane % 4 * 2 + plane) * pixels + pixel) // 2)
            cycles += max(Counter(word % 32 for word in words).values())
    return cycles / (ROWS // 8 * 2)


def _cycles(problem: ConvProblem, phase: ConvProblem, config: PlanesConfig, target: Target) -> float:
    speeds = PlanesSpeeds.of(target)
    stages, tiles = ceil_div(ceil_div(phase.group_c, BLOCK), config.split), _tiles(phase, config)
    products = WARPGROUPS * BLOCK / 16 * config.columns / 2 / speeds.products + speeds.stage
    pixels = 2 * BLOCK * _pixels(problem) * _images(problem)
    filters = 2 * BLOCK * config.columns
    busy = min(tiles * config.split / target.multiprocessors, 1.0)
    copied = (pixels + filters) * busy / speeds.copied
    outputs = config.columns * ROWS * WARPGROUPS
    of_tile = (
        speeds.tile
        + stages * max(products, copied, _shared_cycles(problem, config))
        + speeds.output * outputs / config.split
    )
    of_tile += speeds.cluster if config.cluster > 1 else 0
    time = ceil_div(tiles * config.split, target.multiprocessors) * of_tile
    at_once, clusters = clusters_at_once(config.cluster, 1, target), tiles * config.split // config.cluster
    if config.cluster > 2 and at_once < clusters <= target.multiprocessors // config.cluster:
        time *= 2  # clusters wait for others
    time += speeds.split * outputs if config.split > 1 else 0
    time = overlapped(time, problem.bytes / target.bytes_per_cycle, speeds.not_hidden)
    return time + residual_cycles(problem, speeds.residual, target) + speeds.first
