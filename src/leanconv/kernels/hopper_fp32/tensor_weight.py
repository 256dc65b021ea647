"""Gradient of the filters on tensor cores, in the accuracy of float32 or of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from leanconv.kernels.common import split_k
from leanconv.kernels.contract import (
    LAUNCH_CYCLES,
    Arithmetic,
    Config,
    TimedAlgorithm,
    by_time,
    ceil_div,
    conv_constants,
    variant,
)
from leanconv.kernels.depthwise.depthwise_weight import clusters_at_once
from leanconv.kernels.hopper_fp32.filters import DEPTH, LEAST_CHANNELS, SplitGemm
from leanconv.kernels.hopper_fp32.tensor_gemm import FLOPS_PER_CYCLE, ROW, pixel_map, wgmma_limits
from leanconv.kernels.simt.tiles import gradient_arguments, weight_limits
from leanconv.plan import Launch, Plan, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Filters of a chunk.
CHUNK = 64
#: Stages whose pixels' factors are kept.
CODE_STAGES = 16


@dataclass(frozen=True)
class ConsumersConfig(Config):
    """A block has ``warpgroups`` consumers, a warpgroup that converts, and one that copies."""

    warpgroups: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.warpgroups + 2)


@dataclass(frozen=True)
class TensorWeightConfig(ConsumersConfig):
    """A tile has 64 weights of a filter for each of ``warpgroups`` consumers, and ``chunks`` x 64 filters.

    ``products`` of float16 make one of float32: 3, or 1 in tier tf32. ``partials`` partial sums are under way at once.
    ``turns``: consumers multiply in turn. ``x_rows`` and ``dy_rows``: bulk copies bring x, or dy, in rows of channels;
    otherwise lanes copy them in columns of pixels. ``piece`` channels of one tap are neighbouring rows of the tile.
    ``x_stages``, ``dy_stages`` and ``split_stages`` are the lengths of the rings
    of x, of dy, and of dy converted. A cluster of ``split`` blocks shares a tile's pixels, and so do ``parts`` of them
    whose sums a second launch adds. ``taps`` is 1, or the number of taps in a row of the filter, which then share what
    is converted of x: the tile has sums for each of them.
    """

    chunks: int
    products: int
    partials: int
    turns: bool
    x_rows: bool
    dy_rows: bool
    piece: int
    x_stages: int
    dy_stages: int
    split_stages: int
    consumer_registers: int
    converter_registers: int
    producer_registers: int
    split: int = 1
    parts: int = 1
    taps: int = 1

    @property
    def rows(self) -> int:
        """Weights of a filter that a tile has."""
        return 64 * self.warpgroups

    @property
    def filters(self) -> int:
        """Filters of a tile."""
        return CHUNK * self.chunks

    @property
    def weights(self) -> int:
        """Weights of a tile."""
        return self.rows * self.filters * self.taps

    @property
    def ring_bytes(self) -> int:
        """Bytes of the three rings, of the scales of what is converted, and of the codes of pixels' factors."""
        x = 4 * self.rows * (DEPTH if self.x_rows else DEPTH + 8)
        if self.taps == 1:
            window, dy = DEPTH, 4 * CHUNK * (DEPTH if self.dy_rows else DEPTH + 4)
        else:
            window = DEPTH + 8
            dy = 4 * CHUNK * window if self.dy_rows else 19456
        split = 2 * window * CHUNK * (2 if self.products == 3 else 1) + 320
        return self.x_stages * x + self.dy_stages * dy + self.split_stages * split + CODE_STAGES * (window + 8)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the rings, and two barriers a stage, of the codes one."""
        return self.ring_bytes + 16 * (self.x_stages + self.dy_stages + self.split_stages) + 8 * CODE_STAGES


#: A tile: warpgroups, chunks of filters, partial sums, whether the taps of a row share x.
Tile = tuple[int, int, int, bool]
#: Whether consumers take turns with each tile (where taps share x, only if lanes bring x or dy), and the TFLOP/s that
#: it reaches on large layers (burst, H200): where bulk copies bring x and dy, and where lanes bring x or both.
TILES: dict[Tile, tuple[bool, float, float]] = {
    (2, 1, 1, True): (True, 182, 126),
    (2, 2, 2, False): (True, 120, 95),
    (3, 1, 1, False): (False, 129, 70),
    (2, 1, 1, False): (True, 96, 75),
    (2, 3, 1, False): (True, 85, 72),
    (1, 2, 2, False): (False, 88, 66),
    (1, 1, 1, False): (False, 78, 55),
}
#: Registers of a thread that multiplies, converts or copies, by the tile's warpgroups and chunks and whether bulk
#: copies alone bring x and dy. NOTE: threads that do not multiply give registers away, so they have fewer than at the
#: launch, which are 65536 over the block's threads.
REGISTERS = {
    (1, 1, True): (208, 160, 88), (1, 2, True): (208, 160, 88), (2, 1, True): (192, 88, 40),
    (2, 2, True): (200, 72, 40), (2, 3, True): (200, 72, 40), (3, 1, True): (120, 72, 48),
    (1, 1, False): (208, 160, 88), (1, 2, False): (208, 160, 88), (2, 1, False): (176, 104, 56),
    (2, 2, False): (184, 96, 48), (2, 3, False): (200, 64, 48), (3, 1, False): (120, 72, 48),
}  # fmt: skip
#: And of a tile whose taps share x.
SHARING_REGISTERS = (192, 80, 48)
#: Stages that the rings have at most, of x, of dy and of dy converted.
MOST_STAGES = (3, 4, 8)
#: Taps of a row that share x at most, and pixels that dy's window may have beside 64.
MOST_SHARING, WINDOW_BEHIND = 3, 8
#: Cycles of a block beside its stages, and of the sum over the blocks of a cluster.
BLOCK_CYCLES, SPLIT_CYCLES = 7000, 4000
SPLITS = (1, 2, 4, 8, 16)
#: Blocks that keep a large GPU busy, and weights of a tile whose taps share x.
BLOCKS, LARGEST_TILE = 132, 128 * 64 * 3
#: Cycles of the four copying warps for each row of 64 pixels in columns, and for each piece of rows.
COPY_CYCLES, PIECE_CYCLES = 16, 30


def grid_of(problem: ConvProblem, taps: int) -> tuple[int, int, int]:
    """How wide the rows are whose pixels are numbered, and the first columns that x and dy have (WeightGrid in
    kernels/hopper_fp32/tensor_weight_tiles.cuh)."""
    if taps == 1:
        return problem.q, 0, 0
    left, dilation = problem.padding[2], problem.dilation[1]
    ahead = min((ceil_div(problem.s, taps) - 1) * taps * dilation, left)
    lead = (taps - 1) * dilation - left + ahead
    return max(problem.w + left, lead + problem.q), ahead, lead


def sharing_taps(problem: ConvProblem, most: int = MOST_SHARING) -> int:
    """Taps of a filter's row that share x, in as few tiles as hold up to ``most``."""
    return ceil_div(problem.s, ceil_div(problem.s, most))


def may_share(problem: ConvProblem) -> bool:
    """Whether the taps of a filter's row see neighbouring pixels, those of a tile few of them."""
    taps = sharing_taps(problem)
    reach = (taps - 1) * problem.dilation[1]
    if taps == 1 or problem.stride[1] != 1 or problem.layout == "CHWN":
        return False
    width, _, lead = grid_of(problem, taps)
    return lead >= 0 and reach <= WINDOW_BEHIND and problem.n * problem.p * width < 2**31


def x_map(problem: ConvProblem, taps: int) -> TensorMap:
    """How bulk copies walk over x in NHWC: 32 channels of 64 pixels."""
    plain = pixel_map(problem, DEPTH)
    if taps == 1:
        return plain
    width, ahead, _ = grid_of(problem, taps)
    lower, upper = (-ahead, plain.lower[1]), (width - ahead - problem.w, plain.upper[1])
    return replace(plain, lower=lower, upper=upper)


def dy_map(problem: ConvProblem, taps: int) -> TensorMap:
    """How bulk copies walk over dy in NHWC: 32 filters of 64 pixels, or of a window."""
    if taps > 1:
        width, _, lead = grid_of(problem, taps)
        row = 4 * problem.k
        return TensorMap(
            role="dy",
            element="float32",
            shape=(problem.k, problem.q, problem.p, problem.n),
            strides=(row, row * problem.q, row * problem.q * problem.p),
            lower=(-lead, 0),
            upper=(width - lead - problem.q, 0),
            channels=ROW,
            pixels=DEPTH + WINDOW_BEHIND,
            traversal=(1, 1, 1, 1),
            swizzle=4 * ROW,
        )
    return TensorMap(
        role="dy",
        element="float32",
        shape=(problem.k, problem.n * problem.p * problem.q),
        strides=(4 * problem.k,),
        box=(ROW, DEPTH),
        swizzle=4 * ROW,
    )


def _x_in_rows(problem: ConvProblem, taps: int) -> bool:
    """Whether bulk copies can bring x."""
    reach = max((problem.r - 1) * problem.dilation[0], (problem.s - 1) * problem.dilation[1])
    if problem.layout != "NHWC" or problem.c % 4 or problem.group_c % 4 or problem.group_c < LEAST_CHANNELS:
        return False
    return problem.n > 0 and reach <= 255 and not x_map(problem, taps).why_not()


def _dy_in_rows(problem: ConvProblem, taps: int) -> bool:
    """And dy."""
    if problem.layout != "NHWC" or problem.k % 4 or problem.group_k % 4:
        return False
    return problem.n > 0 and not dy_map(problem, taps).why_not()


def _piece(problem: ConvProblem) -> int:
    """Channels of a tap that lie together in columns: few rows of zeros, and few taps to find for those who copy."""
    return min(
        (32, 16, 8, 4, 2, 1), key=lambda piece: ceil_div(problem.group_c, piece) * (COPY_CYCLES * piece + PIECE_CYCLES)
    )


@lru_cache(maxsize=256)
def _config(
    tile: Tile, taps: int, products: int, way: tuple[bool, bool, int], shared: int
) -> TensorWeightConfig | None:
    """The configuration of a tile, with rings as long as ``shared`` bytes allow; None where they are too short."""
    warpgroups, chunks, partials, _ = tile
    bulks = way[0] and way[1]
    registers = SHARING_REGISTERS if taps > 1 else REGISTERS[warpgroups, chunks, bulks]
    turns = TILES[tile][0] and not (taps > 1 and bulks)
    for stages in range(MOST_STAGES[0], 1, -1):
        for dy_stages in (3, 2) if chunks == 1 else (2 * chunks, chunks + 1):
            for split_stages in range(min(MOST_STAGES[2], 3 * chunks + 1), max(chunks, 2) - 1, -1):
                config = TensorWeightConfig(
                    warpgroups, chunks, products, partials, turns, *way, stages, dy_stages, split_stages, *registers,
                    taps=taps,
                )  # fmt: skip
                if config.shared_bytes <= shared and split_stages >= min(2 * chunks, 4):
                    return config
    return None


class TensorWeight(TimedAlgorithm):
    """The filters' gradient as a matrix product on tensor cores, each float32 split into two float16 on its way; sums
    over the blocks of a cluster, or split-K through a workspace, in fixed order, no atomics.

    ``x dy ≈ hi·hi + hi·lo + lo·hi`` in float16, summed in float32; in tier tf32 ``hi·hi`` alone.
    """

    name = "tensor_weight"
    paper = SplitGemm.paper
    tier = "fp32"
    solves = "conv2d"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*weight_limits(problem), *wgmma_limits(target)]
        least = min(problem.group_c, problem.group_k)
        if problem.groups > 1 and least < LEAST_CHANNELS:
            reasons.append(f"groups={problem.groups} leaves {least} channels in a group, fewer than {LEAST_CHANNELS}")
        if problem.n * problem.p * problem.q >= 2**31:
            reasons.append(f"the output has {problem.n * problem.p * problem.q} pixels, 2**31 or more")
        return reasons

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if problem.precision == "tf32" else "fp16x3"

    def workspace_bytes(self, problem: ConvProblem, config: TensorWeightConfig) -> int:
        return split_k.workspace_bytes(problem, config.parts)

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, TensorWeightConfig]]:
        return self.within(problem, target)

    def within(
        self, problem: ConvProblem, target: Target, workspace: float = inf
    ) -> list[tuple[float, TensorWeightConfig]]:
        most = min(_most_parts(problem), split_k.most_parts(problem, workspace))
        return by_time(
            (predicted_cycles(problem, config, target), config)
            for whole in _whole(problem, target)
            for config in _shared_by(problem, whole, target, most)
        )

    def plan(self, problem: ConvProblem, config: TensorWeightConfig, target: Target) -> Plan:
        *_, batch = gradient_arguments(problem)
        first = Launch(
            header="kernels/hopper_fp32/tensor_weight.cuh",
            function="leanconv::tensor_weight",
            problem=conv_constants(problem),
            tuning=config.constants(),
            arguments=(
                x_map(problem, config.taps) if config.x_rows else Pointer("x"),
                dy_map(problem, config.taps) if config.dy_rows else Pointer("dy"),
                split_k.destination(problem, config.parts),
                batch,
            ),
            grid=tiles_of(problem, config) * config.split * config.parts,
            block=config.threads,
            shared_bytes=config.shared_bytes,
            cluster=config.split,
        )
        return split_k.with_sums(first, problem, config.parts)


def _shared_by(
    problem: ConvProblem, whole: TensorWeightConfig, target: Target, most: float
) -> Iterator[TensorWeightConfig]:
    """The configuration, with tiles computed by one block each, by clusters, and by up to ``most`` blocks."""
    for split in SPLITS:
        sums = 4 * whole.weights
        possible = split <= min(stages_of(problem, whole), target.most_in_cluster) and sums <= whole.ring_bytes
        if split == 1 or (possible and 32 * whole.chunks * whole.taps % (2 * split) == 0):
            yield variant(whole, split=split)
    if most >= 2:
        tiles = tiles_of(problem, whole)
        busy = (rounds * target.multiprocessors // tiles for rounds in (1, 2, 3))
        for parts in dict.fromkeys(max(2, min(int(most), stages_of(problem, whole), many)) for many in busy):
            yield variant(whole, parts=parts)


def _most_parts(problem: ConvProblem) -> int:
    """Most blocks that share a tile: they make one round of a large GPU's multiprocessors, of many tiles two or three,
    so that few of these idle in the last one."""
    tiles = ceil_div(split_k.weights_of(problem), LARGEST_TILE if may_share(problem) else 128 * 128)
    stages = ceil_div(problem.n * problem.p * problem.q, DEPTH)
    return max(2, min(stages, BLOCKS * (1 if tiles <= 16 else 2 if tiles <= 64 else 3) // tiles))


def _whole(problem: ConvProblem, target: Target) -> Iterator[TensorWeightConfig]:
    products = 1 if problem.precision == "tf32" else 3
    shares = may_share(problem)
    ways = {}
    sharing = sharing_taps(problem)
    for taps in (1, sharing) if shares else (1,):
        x_rows = _x_in_rows(problem, taps)
        ways[taps] = x_rows, _dy_in_rows(problem, taps), ROW if x_rows else _piece(problem)
    for tile in TILES:
        if tile[-1] and not shares:
            continue
        taps = sharing if tile[-1] else 1
        config = _config(tile, taps, products, ways[taps], target.shared_per_block)
        if config:
            yield config


def stages_of(problem: ConvProblem, config: TensorWeightConfig) -> int:
    """Stages of all pixels."""
    return ceil_div(problem.n * problem.p * grid_of(problem, config.taps)[0], DEPTH)


def tiles_of(problem: ConvProblem, config: TensorWeightConfig) -> int:
    """Tiles of the gradient."""
    parts = problem.r * ceil_div(problem.s, config.taps)
    rows = parts * ceil_div(problem.group_c, config.piece) * config.piece
    return ceil_div(rows, config.rows) * ceil_div(problem.group_k, config.filters) * problem.groups


def predicted_cycles(problem: ConvProblem, config: TensorWeightConfig, target: Target) -> float:
    """Predicted time in clock cycles."""
    tile = config.warpgroups, config.chunks, config.partials, config.taps > 1
    speed = TILES[tile][1 if config.x_rows and config.dy_rows else 2]
    speed *= FLOPS_PER_CYCLE * (1.5 if config.products == 1 else 1)
    stages = ceil_div(stages_of(problem, config), config.split * config.parts)
    each = stages * 2 * config.weights * DEPTH / speed + BLOCK_CYCLES
    blocks = tiles_of(problem, config) * config.parts
    rounds = ceil_div(blocks, clusters_at_once(config.split, 1, target) if config.split > 1 else target.multiprocessors)
    memory = problem.bytes / target.bytes_per_cycle
    time = max(rounds * each + (SPLIT_CYCLES if config.split > 1 else 0), memory) + LAUNCH_CYCLES
    return time + split_k.sum_cycles(problem, config.parts, target)
