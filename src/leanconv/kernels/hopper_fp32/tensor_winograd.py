"""Winograd's F(2, 3) along rows on tensor cores, in the accuracy of float32 or of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from leanconv.kernels.common import split_gemm
from leanconv.kernels.common.input_gradient import PartialConvolution, single_phases
from leanconv.kernels.common.layers import conv_arguments, wgmma_limits
from leanconv.kernels.common.split_gemm import DEPTH, SEGMENT, RingConfig, SplitGemm, blocks_of_tap, stages_of
from leanconv.kernels.common.tensor_core_gemm import FLOPS_PER_CYCLE, MAX_REACH, ROW, pixel_map
from leanconv.kernels.contract import by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, residual_cycles
from leanconv.kernels.hopper_fp32 import tensor_gemm
from leanconv.kernels.hopper_fp32.tensor_gemm import is_linear, linear_map, walk_cycles
from leanconv.plan import Constants, Launch, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Outputs of a pair, and states of its pixels and of a segment of a filter row.
OUTPUTS, STATES = 2, 4
#: Pairs of a tile.
PAIRS = 64
#: Linear pairs of a box. Images are rounded up to whole boxes, so small ones suit small images.
BOX_WIDTHS = (64, 32, 16)


@dataclass(frozen=True)
class PairConfig(RingConfig):
    """A CTA tile has 64 pairs of outputs and ``n_tiles`` MMA tiles of ``mma_n`` filters.

    A stage has ``copy_pixels`` pixels in rows; or, in NCHW, ``linear`` pixels in boxes of ``box_width`` pairs, or
    resident images (``spacing`` is not 0). A tile has pairs of ``output_rows`` output rows; with ``one_row`` those of
    one output row of all images, and leaves out the filter rows outside the image. ``multicast`` CTAs of a cluster
    have the same filters, and each copies a share of them to all. ``ping_pong``: one warpgroup multiplies after the
    other. ``exchange``: sums of a thread that the warpgroups exchange at once. The rest is as in `TensorConfig`.
    """

    mma_n: int
    n_tiles: int
    products: int
    copy_pixels: int
    pixel_stages: int
    filter_stages: int
    exchange: int = 16
    split: int = 1
    box_width: int = 16
    output_rows: int = 1
    multicast: int = 1
    ping_pong: bool = False
    one_row: bool = False
    resident_pixels: int = 0
    spacing: int = 0
    channel_block: int = ROW
    rows: bool = True
    linear: bool = False
    states: int = STATES
    warpgroups: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def column(self) -> int:
        """Pixels of a box: two a pair, what their windows read besides, and what aligns them."""
        return 2 * self.box_width + 8

    @property
    def stage_pixels(self) -> int:
        return PAIRS // self.box_width * self.column if self.linear else self.copy_pixels


#: A tile: filters of an MMA tile, MMA tiles.
TILES = ((64, 2), (64, 1))


@dataclass(frozen=True)
class WinogradSpeeds(Speeds):
    """Of `TensorWinograd`. Two numbers: with three products of float16, and with one."""

    #: TFLOP/s of the stages of each of `TILES` alone, on a rested card
    tiles: tuple[tuple[float, float], ...]
    #: the same of tiles of 64 filters and two output rows, in a stage that both read; with one product, and with one of
    #: linear pixels
    two_rows: tuple[float, float, float]
    #: the share of that time that a stage takes which one of the rows reads
    edge: float
    #: the share of the memory's speed at which residuals come (explored on five layers)
    residual: float
    #: the share of the speed that linear pixels reach, and how many times as long a stage takes with each of
    #: `BOX_WIDTHS`
    linear: float
    box_widths: tuple[float, ...]
    #: how many times as long a stage takes with resident images, and with multicast filters
    resident: tuple[float, float]
    multicast: tuple[float, float]
    #: a stage of the column that segments leave, as a share of a whole segment's time
    rest: float
    #: cycles of a call beside its work, and of those of `tensor_gemm.is_dense_product`
    whole_call: tuple[float, float]
    #: cycles of a tile besides its stages, and of one of two output rows
    tile_cycles: float
    two_rows_cycles: float


def pairs_of(problem: ConvProblem) -> int:
    return ceil_div(problem.q, OUTPUTS)


def copy_pixels_of(problem: ConvProblem) -> int:
    """Pixels that the pairs of a tile read, with two more wherever an output row ends: a multiple of 8."""
    pairs = pairs_of(problem)
    ends = (pairs - gcd(PAIRS, pairs) + PAIRS - 1) // pairs
    return 8 * ceil_div(2 * PAIRS + 2 + 2 * ends, 8)


def pair_map(
    problem: ConvProblem, output_rows: int = 1, one_row: bool = False, volume: bool | None = None
) -> TensorMap:
    """The tensor map of the pixels that pairs read in one segment of a filter row: rows are two pixels longer than
    those of the outputs, rounded up to even. Offsets choose the segment, and with ``one_row``, where copies walk over
    one row of each image, the row. ``volume`` as of `pixel_map`."""
    top, _, left, _ = problem.padding
    row, last = 4 * problem.c, -top if one_row else (ceil_div(problem.p, output_rows) - 1) * output_rows - top
    plain = pixel_map(problem, copy_pixels_of(problem), volume=volume)
    if len(plain.shape) > 4:
        right, below = 2 * pairs_of(problem) + 2 - problem.w - left, last - (problem.h - 1)
        return replace(plain, upper=(right, below, *plain.upper[2:]))
    return TensorMap(
        role=problem.operands[0].role,
        element="float32",
        shape=(problem.c, problem.w, problem.h, problem.n),
        strides=(row, row * problem.w, row * problem.w * problem.h),
        lower=(-left, -top),
        upper=(2 * pairs_of(problem) + 2 - problem.w - left, last - (problem.h - 1)),
        channels=ROW,
        pixels=copy_pixels_of(problem),
        traversal=(1, 1, output_rows, 1),
        swizzle=4 * ROW,
    )


def channel_pixels_of(problem: ConvProblem) -> int:
    """Pixels of each channel of a resident image: all that windows read, with zeros above and below, or that those of a
    tile read; a multiple of four for which lanes' channels lie in different banks."""
    top, _, left, _ = problem.padding
    begin = -4 * ceil_div(top * problem.w + left, 4)
    right = max(0, problem.s - SEGMENT) - left
    last = ((problem.r - 1) * problem.dilation[0] - top) * problem.w + right + SEGMENT
    image = problem.p * pairs_of(problem)
    read = 2 * PAIRS + 2 if PAIRS < image else 2 * image
    channel_pixels = 4 * ceil_div(read - 2 + last + 1 - begin, 4)
    return channel_pixels + 4 if channel_pixels % 16 == 0 else channel_pixels


def resident_of(problem: ConvProblem) -> tuple[int, int]:
    """Pixels of the resident images of a tile, and how far apart lanes' channels are; 0 where no images are
    resident."""
    channel_pixels, image = channel_pixels_of(problem), problem.p * pairs_of(problem)
    if problem.layout != "NCHW" or problem.group_c % ROW or channel_pixels > 256 or image < 1:
        return 0, 0
    images = (image - gcd(PAIRS, image) + PAIRS - 1) // image + 1
    return (images * channel_pixels, 8 // gcd(channel_pixels, 8)) if images <= tensor_gemm.MOST_IMAGES else (0, 0)


def _row_blocks(problem: ConvProblem) -> int:
    """Channel blocks of one filter row."""
    return ceil_div(problem.s, SEGMENT) * blocks_of_tap(problem, ROW)


@lru_cache(maxsize=256)
def stages_of_rows(problem: ConvProblem) -> tuple[int, ...]:
    """For each output row the stages of the filter rows that overlap the image, in part or whole.

    In the order of the tiles: the most come first (``TensorTiles`` of the kernels)."""
    all_stages, of_row, of_stage = stages_of(problem, ROW, STATES), _row_blocks(problem), DEPTH // ROW
    down, stages = problem.dilation[0], []
    for i in range(problem.p):
        first = problem.padding[0] - ((problem.p - 1) // 2 + (-(i // 2) if i % 2 == 0 else (i + 1) // 2))
        outside = max(0, ceil_div(first, down))
        inside = max(0, min((problem.h - 1 + first) // down + 1, problem.r))
        begin = min(outside * of_row // of_stage, all_stages - 1)
        stages.append(max(min(ceil_div(inside * of_row, of_stage), all_stages), begin + 1) - begin)
    return tuple(stages)


def _least_stages(problem: ConvProblem, config: PairConfig) -> int:
    return min(stages_of_rows(problem)) if config.one_row else stages_of(problem, config.channel_block, STATES)


def _in_one_row(problem: ConvProblem) -> bool:
    """Whether tiles of one output row leave out filter rows, and copies can bring their pixels."""
    reach = problem.p - 1 + (problem.r - 1) * problem.dilation[0]
    if problem.p < 2 or reach > 255 or split_gemm.leaves_column(problem, ROW):
        return False
    if min(stages_of_rows(problem)) == stages_of(problem, ROW, STATES):
        return False
    return not pair_map(problem, one_row=True).why_not()


def _in_two_rows(problem: ConvProblem) -> bool:
    """Whether two output rows can share the states of the rows of pixels that both read."""
    rows = problem.p > 1 and 1 < problem.r < 256 and problem.dilation[0] == 1
    return rows and _row_blocks(problem) % (DEPTH // ROW) == 0 and not pair_map(problem, 2).why_not()


@lru_cache(maxsize=256)
def _config(
    tile: tuple[int, int],
    copy_pixels: int,
    products: int,
    shared: int,
    box_width: int = 0,
    resident: tuple[int, int] = (0, 0),
) -> PairConfig | None:
    """The configuration of a tile, with rings as long as ``shared`` bytes allow; None where they are too short.
    With a ``box_width`` its pixels are linear; ``resident``: pixels and spacing of resident images, if any."""
    linear = box_width > 0
    config = PairConfig(*tile, products, copy_pixels, 2, 2, box_width=box_width or 16, rows=not linear, linear=linear)
    if resident[0]:
        config = replace(config, resident_pixels=resident[0], spacing=resident[1])
    for stages in (3, 2):
        left = shared - variant(config, pixel_stages=stages, filter_stages=0).shared_bytes - 16 * 8
        # NOTE: with resident images, filters of three products at eight fixed places leave too few registers.
        most = 6 if config.spacing and products == 3 else 8
        filters = min(most, left // config.filter_stage_bytes // 2 * 2)
        if filters >= (8 if stages == 3 else 2):
            return replace(config, pixel_stages=stages, filter_stages=filters)
    return None


class TensorWinograd(SplitGemm[PairConfig]):
    """Filters 3 wide by four products for two outputs instead of six, each float32 split into two float16; wider ones
    as sums of segments of three columns, and of one that these leave by two products.

    ``y0 = s0 t0 + s1 t1 + s2 t2, y1 = s1 t1 - s2 t2 - s3 t3`` with states s of pixels and t of filters.
    """

    name = "tensor_winograd"
    volumes = True
    paper = "A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks (2016)"

    def target_limits(self, target: Target) -> list[str]:
        return wgmma_limits(target)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = super().why_not(problem, target)
        if problem.layout == "CHWN":
            reasons.append("layout='CHWN' is neither NHWC nor NCHW")
        if problem.s < SEGMENT:
            reasons.append(f"filters are {problem.s} wide, less than {SEGMENT}")
        if problem.stride != (1, 1):
            reasons.append(f"stride={problem.stride} is not (1, 1)")
        if problem.stride_d > 1:
            reasons.append(f"stride={problem.stride_d} along the depth is not 1")
        if problem.dilation[1] != 1:
            reasons.append(f"dilation={problem.dilation} moves the columns of a filter apart")
        read = problem.k if problem.op == "dgrad" else problem.c
        of_group = problem.group_k if problem.op == "dgrad" else problem.group_c
        if of_group < ROW // 2:
            reasons.append(f"{of_group} channels are fewer than {ROW // 2}")
        if problem.layout == "NCHW" and not reasons:
            return self._why_not_linear(problem)
        if read % 4 or (problem.groups > 1 and of_group % ROW):
            reasons.append(
                f"bulk copies of {ROW} channels do not fit {of_group} channels in each of {problem.groups} groups"
            )
        if not reasons:
            for phase in single_phases(problem):
                reasons += pair_map(phase.problem, volume=phase.volume).why_not()
            most = MAX_REACH[problem.is_volume]
            reach = max((problem.r - 1) * problem.dilation[0], (problem.t - 1) * problem.dilation_d)
            if reach > most:
                reasons.append(f"filter rows reach {reach} rows, more than the {most} of a bulk copy")
            if problem.s - SEGMENT > most:
                reasons.append(f"filters are {problem.s} wide, more than the {most + SEGMENT} that bulk copies reach")
        return reasons

    def _why_not_linear(self, problem: ConvProblem) -> list[str]:
        """The same for NCHW, where input and output must have as many linear pixels."""
        phases = single_phases(problem)
        if not all(phase.whole and phase.problem.q % 2 == 0 and is_linear(phase.problem) for phase in phases):
            return [
                "in NCHW images of input and output are not of one size, with rows of even length, pixels in fours "
                f"and, if there are several groups, multiples of {ROW} channels in each"
            ]
        return [reason for phase in phases for reason in linear_map(phase.problem, 2 * BOX_WIDTHS[0] + 8).why_not()]

    def candidates(self, problem: ConvProblem, shared: int = tensor_gemm.SHARED) -> list[PairConfig]:
        phases = single_phases(problem)
        products = 1 if problem.precision == "tf32" else 3
        copy_pixels = max((copy_pixels_of(phase.problem) for phase in phases), default=PAIRS)
        if problem.layout == "NCHW":
            found = [_config(tile, 0, products, shared, box_width) for tile in TILES for box_width in BOX_WIDTHS]
            alone = len(phases) == 1 and not problem.is_volume
            resident = resident_of(phases[0].problem) if alone else (0, 0)
            if resident[0]:
                found += [_config(tile, 0, products, shared, BOX_WIDTHS[-1], resident) for tile in TILES]
        else:
            found = [_config(tile, copy_pixels, products, shared) for tile in TILES]
            low = _config((64, 1), copy_pixels, products, shared)
            # NOTE: the filters of one row of pixels stay in the ring for the next one.
            in_ring = low is not None and low.filter_stages == 2 * STATES
            if problem.is_volume:
                return [config for config in found if config]
            if low and in_ring and phases and all(_in_two_rows(phase.problem) for phase in phases):
                found.append(variant(low, output_rows=2))
            if phases and all(_in_one_row(phase.problem) for phase in phases):
                found += [variant(config, one_row=True) for config in found if config and config.output_rows == 1]
        return [config for config in found if config]

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, PairConfig]]:
        phases = single_phases(problem)
        return by_time(
            (self._cycles(problem, phases, config, target), config)
            for whole in self.candidates(problem, target.shared_per_block)
            for config in self._with_splits(whole, phases, target)
        )

    def _tiles_of_row(self, problem: ConvProblem, config: PairConfig) -> int:
        """Tiles of pixels of one output row."""
        return ceil_div(problem.n * pairs_of(problem), PAIRS * config.multicast) * config.multicast

    def _tiles(self, phase: PartialConvolution, config: PairConfig) -> int:
        problem = phase.problem
        of_filters = ceil_div(problem.group_k, config.filters) * problem.groups
        if config.one_row:
            return self._tiles_of_row(problem, config) * problem.p * of_filters
        pairs = problem.n * problem.z * ceil_div(problem.p, config.output_rows) * pairs_of(problem)
        if config.linear and not config.spacing:
            image = problem.z * problem.p * pairs_of(problem)
            pairs = problem.n * ceil_div(image, config.box_width) * config.box_width
        return ceil_div(pairs, PAIRS * config.multicast) * config.multicast * of_filters

    def _with_splits(
        self, config: PairConfig, phases: list[PartialConvolution], target: Target
    ) -> Iterator[PairConfig]:
        """The configuration; with a multicast of filters where CTAs have whole tiles; and with split-K where the rings
        hold the outputs of a tile."""
        yield config
        pairs = variant(config, multicast=2, ping_pong=config.products == 3)
        # Explored (H200, 9eb4194): with six stages of filters, at changing places, 1.1 to 1.2 times as long.
        in_ring = config.filter_stages == 4 * config.n_tiles
        fits = config.n_tiles > 1 and in_ring and not config.linear and pairs.shared_bytes <= target.shared_per_block
        if fits and phases and all(self._tiles(phase, pairs) >= target.multiprocessors for phase in phases):
            yield pairs
        if not phases or config.output_rows > 1 or config.filters * PAIRS * OUTPUTS * 4 > config.ring_bytes:
            return
        work = [(self._tiles(phase, config), _least_stages(phase.problem, config)) for phase in phases]
        for split in tensor_gemm.shares_of(work, target, phases[0].problem.batch_invariant):
            if config.filters // (32 if config.linear else 16) % split == 0:
                yield variant(config, split=split)

    def _cycles(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: PairConfig, target: Target
    ) -> float:
        speeds, one = WinogradSpeeds.of(target), config.products == 1
        speed = speeds.tiles[TILES.index((config.mma_n, config.n_tiles))][one] * FLOPS_PER_CYCLE
        time = 0.0
        for phase in phases:
            tiles, stages = self._tiles(phase, config), stages_of(phase.problem, config.channel_block, STATES)
            of_stage = 2 * PAIRS * OUTPUTS * SEGMENT * config.filters * DEPTH / speed
            of_stage *= 1 - (1 - speeds.rest) * split_gemm.rest_stages(phase.problem, config) / stages
            of_tile = speeds.tile_cycles
            if config.output_rows > 1:
                # only one output row reads the first row of pixels, and the last
                stages = _row_blocks(phase.problem) // (DEPTH // ROW)
                of_stage *= 2 * speed / (speeds.two_rows[one + (one and config.linear)] * FLOPS_PER_CYCLE)
                of_stage *= phase.problem.r - 1 + 2 * speeds.edge
                of_tile = speeds.two_rows_cycles
            if config.linear:
                box = BOX_WIDTHS.index(config.box_width)
                of_stage *= (speeds.resident[one] if config.spacing else speeds.box_widths[box]) / speeds.linear
            if config.multicast > 1:
                of_stage *= speeds.multicast[one]
            launch = (of_stage, of_tile, target, problem.batch_invariant)
            time += self._launch_cycles(phase.problem, config, tiles, stages, *launch)
        time = max(time, problem.bytes / target.bytes_per_cycle) + residual_cycles(problem, speeds.residual, target)
        return time + speeds.whole_call[tensor_gemm.is_dense_product(problem, config.products)]

    def _launch_cycles(
        self,
        problem: ConvProblem,
        config: PairConfig,
        tiles: int,
        stages: int,
        of_stage: float,
        of_tile: float,
        target: Target,
        batch_invariant: bool,
    ) -> float:
        """Cycles of a launch. With ``one_row`` tiles have fewer stages the later they come: the first CTA has most to
        do."""
        rows = stages_of_rows(problem) if config.one_row else (stages,)
        if not config.one_row or (batch_invariant and config.split > 1):
            return walk_cycles(tiles, rows[0], of_stage, of_tile, config.split, target, batch_invariant)
        of_row = self._tiles_of_row(problem, config) * ceil_div(problem.group_k, config.filters)
        grid = self._grid(tiles, config, target, batch_invariant)
        rounds = ceil_div(tiles, grid) if config.split == 1 else tensor_gemm.rounds_of(tiles, config.split, target)[0]
        time = sum(rows[i * grid // of_row % len(rows)] * of_stage + of_tile for i in range(rounds))
        if config.split == 1:
            return time + tensor_gemm.GemmSpeeds.of(target).first_cycles
        left = rows[min(rounds * grid, tiles - 1) // of_row % len(rows)]
        return time + walk_cycles(tiles - rounds * grid, left, of_stage, of_tile, config.split, target, batch_invariant)

    def _grid(self, tiles: int, config: PairConfig, target: Target, batch_invariant: bool) -> int:
        if config.split > 1:
            return tensor_gemm.grid_of(tiles, config.split, target, batch_invariant)
        return min(tiles, target.multiprocessors // config.multicast * config.multicast)

    def main_launch(
        self, problem: ConvProblem, phase: PartialConvolution, config: PairConfig, known: Constants, target: Target
    ) -> Launch:
        _, _, *rest = conv_arguments(problem)
        if config.linear:
            encoded = linear_map(phase.problem, channel_pixels_of(phase.problem) if config.spacing else config.column)
        else:
            encoded = pair_map(phase.problem, config.output_rows, config.one_row, phase.volume)
        arguments = (replace(encoded, role=problem.operands[0].role), Pointer("prepared"), *rest)
        grid = self._grid(self._tiles(phase, config), config, target, problem.batch_invariant)
        return self.launch(config, known, arguments, grid, config.shared_bytes, config.tuning())
