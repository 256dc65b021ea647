"""Gradient of the filters on tensor cores, in the accuracy of float32 or of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from leanconv.kernels.common import split_k
from leanconv.kernels.common.layers import conv_constants, few_channels, gradient_arguments, limits, wgmma_limits
from leanconv.kernels.common.split_gemm import DEPTH, LEAST_CHANNELS, SplitGemm
from leanconv.kernels.common.tensor_core_gemm import FLOPS_PER_CYCLE, MAX_REACH, ROW, pixel_map, reach_of
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, ceil_div, variant
from leanconv.kernels.cost import Speeds, clusters_at_once, launch_cycles
from leanconv.plan import Plan, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Filters of one wgmma.
MMA_N = 64
#: Stages whose pixels' factors are kept.
CODE_STAGES = 16
#: Taps of a row that share x at most, and pixels that a stage of dy may have beside 64 for them.
MOST_SHARING, WINDOW_BEHIND = 3, 8
#: Floats of a column of 64 pixels of x, and of dy, or of its window. Lanes read 8 bytes of a column of x, and 16 of dy,
#: or 4 of a window: so no access has bank conflicts.
X_PITCH, DY_PITCH = 72, (68, 74)


@dataclass(frozen=True)
class ConsumersConfig(Config):
    """A block has ``warpgroups`` consumers, a warpgroup that converts, and one that copies.

    ``products`` of float16 make one of float32: 3, or 1 for tf32. The rings have ``x_stages`` of x, ``dy_stages``
    of dy, and ``split_stages`` of dy converted.
    """

    warpgroups: int
    products: int
    x_stages: int
    dy_stages: int
    split_stages: int
    consumer_registers: int
    converter_registers: int
    producer_registers: int

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 2)

    @property
    def rows(self) -> int:
        """Weights of a filter that a tile has of one tap."""
        return 64 * self.warpgroups

    @property
    def geometry(self) -> dict[str, int]:
        """Constants of the kernel: pixels of a stage of dy, bytes of a stage of x and of dy, and stages of codes."""
        x, dy = 4 * self.rows * DEPTH, 4 * MMA_N * DEPTH
        return {"window": DEPTH, "x_stage_bytes": x, "dy_stage_bytes": dy, "code_stages": CODE_STAGES}

    @property
    def ring_bytes(self) -> int:
        """Bytes of the three rings, of the scales of what is converted, and of the codes of pixels' factors."""
        window, x, dy, codes, *_ = self.geometry.values()
        split = 2 * window * MMA_N * (2 if self.products == 3 else 1) + 320
        return self.x_stages * x + self.dy_stages * dy + self.split_stages * split + codes * (window + 8)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the rings, and two barriers a stage, of the codes one."""
        return self.ring_bytes + 16 * (self.x_stages + self.dy_stages + self.split_stages) + 8 * CODE_STAGES


@dataclass(frozen=True)
class TensorWeightConfig(ConsumersConfig):
    """A tile has 64 weights of a filter for each consumer, and 64 filters for each of ``n_tiles``.

    ``partials`` partial sums are under way at once. ``ping_pong``: ping-pong schedule, consumers multiply in turn.
    ``x_tma`` and ``dy_tma``: TMA loads x, or dy, in rows of channels; otherwise lanes copy columns of pixels.
    ``channel_block`` channels of one tap are neighbouring rows of the tile. A cluster of ``split`` blocks shares a
    tile's pixels, and so do ``split_k`` of them whose sums a second launch adds. ``taps`` is 1, or the number of taps
    in a row of the filter, which then share what is converted of x: the tile has sums for each of them.
    """

    n_tiles: int
    partials: int
    ping_pong: bool
    x_tma: bool
    dy_tma: bool
    channel_block: int
    taps: int = 1
    split: int = 1
    split_k: int = 1

    @property
    def filters(self) -> int:
        return MMA_N * self.n_tiles

    @property
    def weights(self) -> int:
        return self.rows * self.filters * self.taps

    @property
    def geometry(self) -> dict[str, int]:
        window, dy_pitch = (DEPTH + WINDOW_BEHIND, DY_PITCH[1]) if self.taps > 1 else (DEPTH, DY_PITCH[0])
        x = 4 * self.rows * (DEPTH if self.x_tma else X_PITCH)
        dy = 4 * MMA_N * window if self.dy_tma else 1024 * ceil_div(MMA_N * dy_pitch, 256)
        own = {"window": window, "x_stage_bytes": x, "dy_stage_bytes": dy, "x_pitch": X_PITCH, "dy_pitch": dy_pitch}
        return super().geometry | own


@dataclass(frozen=True)
class WeightSpeeds(Speeds):
    """Of the tiles of a gradient of the filters on tensor cores."""

    #: TFLOP/s that each of `TILES` reaches on large layers (burst): where TMA loads x and dy, and where lanes copy x or
    #: both
    tiles: tuple[tuple[float, float], ...]
    #: times the speed with one product instead of three
    one_product: float
    #: cycles of a block beside its stages, and of the sum over the blocks of a cluster
    block_cycles: int
    split_cycles: int
    #: cycles of the four copying warps for each row of 64 pixels in columns, and for each channel block
    copy_cycles: int
    channel_block_cycles: int


#: A tile: warpgroups, 64-filter MMA tiles, partial sums, whether the taps of a row share x.
Tile = tuple[int, int, int, bool]
#: Whether consumers multiply in turn with each tile (where taps share x, only if lanes copy x or dy).
TILES: dict[Tile, bool] = {
    (2, 1, 1, True): True,
    (2, 2, 2, False): True,
    (3, 1, 1, False): False,
    (2, 1, 1, False): True,
    (2, 3, 1, False): True,
    (1, 2, 2, False): False,
    (1, 1, 1, False): False,
}
#: Registers of a thread that multiplies, converts or copies, by the tile's warpgroups and MMA tiles and whether TMA
#: loads both x and dy. NOTE: threads that do not multiply give registers away, so they have fewer than at the launch,
#: which are 65536 over the block's threads.
REGISTERS = {
    (1, 1, True): (208, 160, 88), (1, 2, True): (208, 160, 88), (2, 1, True): (192, 88, 40),
    (2, 2, True): (200, 72, 40), (2, 3, True): (200, 72, 40), (3, 1, True): (120, 72, 48),
    (1, 1, False): (208, 160, 88), (1, 2, False): (208, 160, 88), (2, 1, False): (176, 104, 56),
    (2, 2, False): (184, 96, 48), (2, 3, False): (200, 64, 48), (3, 1, False): (120, 72, 48),
}  # fmt: skip
#: And of a tile whose taps share x.
SHARING_REGISTERS = (192, 80, 48)
#: Stages that the rings have at most, of x, and of dy converted.
MOST_STAGES, MOST_SPLIT_STAGES = 3, 8
SPLITS = (1, 2, 4, 8, 16)
#: Blocks that keep a large GPU busy, and weights of a tile whose taps share x.
BLOCKS, LARGEST_TILE = 132, 128 * 64 * 3


def grid_of(problem: ConvProblem, taps: int) -> tuple[int, int, int]:
    """The linear pixel index (`ReductionPixels` of the kernel): its row pitch, how many columns before the image x
    begins, and the number of the first column of dy."""
    if taps == 1:
        return problem.q, 0, 0
    left, dilation = problem.padding[2], problem.dilation[1]
    x_lead = min((ceil_div(problem.s, taps) - 1) * taps * dilation, left)
    dy_lead = (taps - 1) * dilation - left + x_lead
    return max(problem.w + left, dy_lead + problem.q), x_lead, dy_lead


def sharing_taps(problem: ConvProblem, most: int = MOST_SHARING) -> int:
    """Taps of a filter's row that share x, in as few tiles as hold up to ``most``."""
    return ceil_div(problem.s, ceil_div(problem.s, most))


def may_share(problem: ConvProblem) -> bool:
    """Whether the taps of a filter's row read neighbouring pixels, those of a tile few of them."""
    taps = sharing_taps(problem)
    if taps == 1 or problem.stride[1] != 1 or problem.layout == "CHWN":
        return False
    row_pitch, _, dy_lead = grid_of(problem, taps)
    in_window = (taps - 1) * problem.dilation[1] <= WINDOW_BEHIND
    return dy_lead >= 0 and in_window and problem.n * problem.z * problem.p * row_pitch < 2**31


def x_map(problem: ConvProblem, taps: int) -> TensorMap:
    """How TMA walks over x in NHWC: boxes of 32 channels of 64 pixels."""
    plain = pixel_map(problem, DEPTH)
    if taps == 1:
        return plain
    row_pitch, x_lead, _ = grid_of(problem, taps)
    upper = (row_pitch - x_lead - problem.w, *plain.upper[1:])
    return replace(plain, lower=(-x_lead, *plain.lower[1:]), upper=upper)


def dy_map(problem: ConvProblem, taps: int) -> TensorMap:
    """How TMA walks over dy in NHWC: boxes of 32 filters of 64 pixels, or of a window."""
    row, swizzle = 4 * problem.k, 4 * ROW
    if taps == 1:
        return TensorMap("dy", "float32", (problem.k, problem.pixels), (row,), box=(ROW, DEPTH), swizzle=swizzle)
    row_pitch, _, dy_lead = grid_of(problem, taps)
    rows = problem.z * problem.p  # of all slices
    return TensorMap(
        "dy",
        "float32",
        shape=(problem.k, problem.q, rows, problem.n),
        strides=(row, row * problem.q, row * problem.q * rows),
        lower=(-dy_lead, 0),
        upper=(row_pitch - dy_lead - problem.q, 0),
        channels=ROW,
        pixels=DEPTH + WINDOW_BEHIND,
        traversal=(1, 1, 1, 1),
        swizzle=swizzle,
    )


def _x_by_tma(problem: ConvProblem, taps: int) -> bool:
    """Whether TMA can load x."""
    near = reach_of(problem) <= MAX_REACH[problem.is_volume]
    if problem.layout != "NHWC" or problem.c % 4 or problem.group_c % 4 or problem.group_c < LEAST_CHANNELS:
        return False
    return problem.n > 0 and near and not x_map(problem, taps).why_not()


def _dy_by_tma(problem: ConvProblem, taps: int) -> bool:
    """And dy."""
    if problem.layout != "NHWC" or problem.k % 4 or problem.group_k % 4:
        return False
    return problem.n > 0 and not dy_map(problem, taps).why_not()


def _channel_block(problem: ConvProblem, target: Target) -> int:
    """Channels of a tap that lie together in columns: few rows of zeros, and few taps to find for those who copy."""
    speeds = WeightSpeeds.of(target)
    cycles = {many: speeds.copy_cycles * many + speeds.channel_block_cycles for many in (32, 16, 8, 4, 2, 1)}
    return min(cycles, key=lambda many: ceil_div(problem.group_c, many) * cycles[many])


@lru_cache(maxsize=256)
def _config(
    tile: Tile, taps: int, products: int, way: tuple[bool, bool, int], shared: int
) -> TensorWeightConfig | None:
    """The configuration of a tile, with rings as long as ``shared`` bytes allow; None where they are too short."""
    warpgroups, n_tiles, partials, _ = tile
    by_tma = way[0] and way[1]
    registers = SHARING_REGISTERS if taps > 1 else REGISTERS[warpgroups, n_tiles, by_tma]
    ping_pong = TILES[tile] and not (taps > 1 and by_tma)
    for x_stages in range(MOST_STAGES, 1, -1):
        for dy_stages in (3, 2) if n_tiles == 1 else (2 * n_tiles, n_tiles + 1):
            for split_stages in range(min(MOST_SPLIT_STAGES, 3 * n_tiles + 1), min(2 * n_tiles, 4) - 1, -1):
                config = TensorWeightConfig(
                    warpgroups, products, x_stages, dy_stages, split_stages, *registers,
                    n_tiles, partials, ping_pong, *way, taps,
                )  # fmt: skip
                if config.shared_bytes <= shared:
                    return config
    return None


class WeightGradient(TimedAlgorithm):
    """The filters' gradient as a matrix product on tensor cores, with products as those of `SplitGemm`."""

    name = "tensor_weight"
    paper = SplitGemm.paper
    precision = "fp32"

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16" if problem.precision == "tf32" else "fp16x3"


class TensorWeight(WeightGradient, split_k.SharedSplitK):
    """Stages of 64 neighbouring pixels."""

    volumes = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*limits(problem, "wgrad"), *wgmma_limits(target), *few_channels(problem, LEAST_CHANNELS)]
        if problem.pixels >= 2**31:
            reasons.append(f"the output has {problem.pixels} pixels, 2**31 or more")
        return reasons

    def sharing(self, problem: ConvProblem, target: Target, room: float) -> Iterator[TensorWeightConfig]:
        for whole in _whole(problem, target):
            yield from _shared_by(problem, whole, target, min(_most_blocks(problem), room))

    def cycles(self, problem: ConvProblem, config: TensorWeightConfig, target: Target) -> float:
        return predicted_cycles(problem, config, target)

    def plan(self, problem: ConvProblem, config: TensorWeightConfig, target: Target) -> Plan:
        *_, batch = gradient_arguments(problem)
        pixels = zip(("row_pitch", "x_lead", "dy_lead"), grid_of(problem, config.taps), strict=True)
        tuning = (*config.constants(), *config.geometry.items(), *pixels)
        arguments = (
            x_map(problem, config.taps) if config.x_tma else Pointer("x"),
            dy_map(problem, config.taps) if config.dy_tma else Pointer("dy"),
            split_k.destination(problem, config.split_k),
            batch,
        )
        grid = tiles_of(problem, config) * config.split * config.split_k
        first = self.launch(config, conv_constants(problem), arguments, grid, config.shared_bytes, tuning)
        return split_k.with_sums(first, problem, config.split_k)


def _shared_by(
    problem: ConvProblem, whole: TensorWeightConfig, target: Target, most: float
) -> Iterator[TensorWeightConfig]:
    """The configuration, with tiles computed by one block each, by clusters, and by up to ``most`` blocks."""
    stages = stages_of(problem, whole)
    for split in SPLITS:
        possible = split <= min(stages, target.most_in_cluster) and 4 * whole.weights <= whole.ring_bytes
        if split == 1 or (possible and 32 * whole.n_tiles * whole.taps % (2 * split) == 0):
            yield variant(whole, split=split)
    if most >= 2:
        tiles = tiles_of(problem, whole)
        busy = (rounds * target.multiprocessors // tiles for rounds in (1, 2, 3))
        for slices in dict.fromkeys(max(2, min(int(most), stages, many)) for many in busy):
            yield variant(whole, split_k=slices)


def _most_blocks(problem: ConvProblem) -> int:
    """Most blocks that share a tile: they make one round of a large GPU's multiprocessors, of many tiles two or three,
    so that few of these idle in the last one."""
    tiles = ceil_div(split_k.weights_of(problem), LARGEST_TILE if may_share(problem) else 128 * 128)
    stages = ceil_div(problem.pixels, DEPTH)
    return max(2, min(stages, BLOCKS * (1 if tiles <= 16 else 2 if tiles <= 64 else 3) // tiles))


def _whole(problem: ConvProblem, target: Target) -> Iterator[TensorWeightConfig]:
    """A configuration of each tile, computed by one block."""
    products = 1 if problem.precision == "tf32" else 3
    ways = {}
    for taps in (1, sharing_taps(problem)) if may_share(problem) else (1,):
        x_tma = _x_by_tma(problem, taps)
        ways[taps > 1] = taps, (x_tma, _dy_by_tma(problem, taps), ROW if x_tma else _channel_block(problem, target))
    for tile in TILES:
        if tile[-1] in ways:
            taps, way = ways[tile[-1]]
            if config := _config(tile, taps, products, way, target.shared_per_block):
                yield config


def stages_of(problem: ConvProblem, config: TensorWeightConfig) -> int:
    return ceil_div(problem.n * problem.z * problem.p * grid_of(problem, config.taps)[0], DEPTH)


def tiles_of(problem: ConvProblem, config: TensorWeightConfig) -> int:
    taps = problem.t * problem.r * ceil_div(problem.s, config.taps)
    rows = taps * ceil_div(problem.group_c, config.channel_block) * config.channel_block
    return ceil_div(rows, config.rows) * ceil_div(problem.group_k, config.filters) * problem.groups


def predicted_cycles(problem: ConvProblem, config: TensorWeightConfig, target: Target) -> float:
    speeds = WeightSpeeds.of(target)
    tile = config.warpgroups, config.n_tiles, config.partials, config.taps > 1
    speed = speeds.tiles[list(TILES).index(tile)][0 if config.x_tma and config.dy_tma else 1]
    speed *= FLOPS_PER_CYCLE * (speeds.one_product if config.products == 1 else 1)
    stages = ceil_div(stages_of(problem, config), config.split * config.split_k)
    each = stages * 2 * config.weights * DEPTH / speed + speeds.block_cycles
    blocks = tiles_of(problem, config) * config.split_k
    rounds = ceil_div(blocks, clusters_at_once(config.split, 1, target) if config.split > 1 else target.multiprocessors)
    memory = problem.bytes / target.bytes_per_cycle
    time = max(rounds * each + (speeds.split_cycles if config.split > 1 else 0), memory) + launch_cycles(target)
    return time + split_k.sum_cycles(problem, config.split_k, target)
