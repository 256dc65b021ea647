"""Winograd's F(2, 3) along rows on tensor cores, in the accuracy of float32 or of TF32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from leanconv.kernels.common.input_gradient import PartialConvolution, single_parts
from leanconv.kernels.contract import LAUNCH_CYCLES, Config, by_time, ceil_div, has_wide_tensors, variant
from leanconv.kernels.hopper_fp32.filters import (
    DEPTH,
    SEGMENT,
    SplitFilters,
    SplitGemm,
    leaves_column,
    pieces_of_tap,
    rest_stages,
    stages_of,
)
from leanconv.kernels.hopper_fp32.tensor_gemm import (
    FIRST_CYCLES,
    FLOPS_PER_CYCLE,
    MOST_IMAGES,
    ROW,
    SHARED,
    flat_map,
    grid_of,
    is_flat,
    rounds_of,
    shares_of,
    walk_cycles,
    wgmma_limits,
)
from leanconv.kernels.simt.tiles import conv_arguments, view_constants
from leanconv.plan import Launch, Pointer, Target, TensorMap
from leanconv.problem import ConvProblem

#: Outputs of a pair, and states of these and of a segment of a filter row.
OUTPUTS, STATES = 2, 4
#: Pairs of a tile.
PAIRS = 64
#: Flat pairs that a copy brings, and how many times as long a stage takes with so many (H200): few of them suit small
#: images, which are rounded up to that many.
GRANULES = {64: 1.0, 32: 1.02, 16: 1.05}


@dataclass(frozen=True)
class PairConfig(Config, SplitFilters):
    """A tile has 64 pairs of outputs and ``chunks`` x ``chunk`` filters, of which a product takes ``chunk``.

    ``lines`` pixels are a stage, or ``flat`` columns of them in NCHW, of which a copy brings ``granule`` pairs, or all
    that a tile sees of an image where ``spacing`` is not 0. Outputs are those of pairs in ``heights`` neighbouring
    rows. ``exchange`` sums of a thread change hands at once. ``receivers`` neighbouring blocks of a cluster have the
    same filters, and each copies a part of them to all. With ``turns`` one warpgroup multiplies after the other. With
    ``one_row`` the pairs of a tile are of one row of outputs of all images, whose tiles leave out rows of filters that
    lie beside the image. The rest is as in `TensorConfig`.
    """

    chunk: int
    chunks: int
    products: int
    lines: int
    pixel_stages: int
    filter_stages: int
    exchange: int = 16
    split: int = 1
    granule: int = 16
    heights: int = 1
    receivers: int = 1
    turns: bool = False
    one_row: bool = False
    seen_pixels: int = 0
    spacing: int = 0
    piece: int = ROW
    rows: bool = True
    flat: bool = False
    states: int = STATES
    warpgroups: int = 2
    consumer_registers: int = 240
    producer_registers: int = 24

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and one warpgroup of producers."""
        return 128 * (self.warpgroups + 1)

    @property
    def column(self) -> int:
        """Pixels of a copy of flat ones: two a pair, what the windows see besides, and what aligns them."""
        return 2 * self.granule + 8

    @property
    def pixel_stage_bytes(self) -> int:
        """Bytes of a stage of pixels; of planes it has 32 channels."""
        if self.spacing:
            return 1024 * ceil_div(4 * ROW * self.seen_pixels, 1024)
        return DEPTH * 4 * (PAIRS // self.granule * self.column if self.flat else self.lines)

    @property
    def ring_bytes(self) -> int:
        """Bytes of both rings."""
        return self.pixel_stages * self.pixel_stage_bytes + self.filter_stages * self.filter_stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: both rings, two barriers a stage, three of filters that several blocks receive,
        and the sums that change hands."""
        barriers = 16 * self.pixel_stages + (16 if self.receivers == 1 else 24) * self.filter_stages
        return self.ring_bytes + barriers + 4 * 128 * self.warpgroups * self.exchange


#: A tile, as filters of a product and such chunks, and the TFLOP/s of its stages alone (burst, H200), with three
#: products of float16 and with one.
TILES: dict[tuple[int, int], tuple[float, float]] = {(64, 2): (294, 535), (64, 1): (238, 395)}
#: The share of it that flat pixels reach.
FLAT = 0.94
#: How many times as long a stage takes with planes of them, by the number of products.
PLANES = {3: 1.08, 1: 1.03}
#: The same of tiles of 64 filters and two rows of outputs, in a stage that both see, and what a stage that one of them
#: sees takes of its time.
HEIGHTS, EDGE = (325, 520), 0.8
#: How many times as long a stage takes whose filters two blocks receive together (H200), by products.
RECEIVED = {3: 0.96, 1: 0.995}
#: What a stage of the column that whole segments leave takes of a whole segment's time (H200: 0.49 to 0.67).
REST = 0.56
#: Cycles of a tile beside its stages, and of one of two rows.
TILE_CYCLES, HIGH_TILE_CYCLES = 5000, 6000


def pairs_of(problem: ConvProblem) -> int:
    """Pairs in a row of outputs."""
    return ceil_div(problem.q, OUTPUTS)


def lines_of(problem: ConvProblem) -> int:
    """Pixels that the pairs of a tile see in a row, with two more wherever a row of outputs ends: a multiple of 8."""
    pairs = pairs_of(problem)
    ends = (pairs - gcd(PAIRS, pairs) + PAIRS - 1) // pairs
    return 8 * ceil_div(2 * PAIRS + 2 + 2 * ends, 8)


def pair_map(problem: ConvProblem, heights: int = 1, one_row: bool = False) -> TensorMap:
    """How bulk copies walk over the pixels that the pairs of outputs see in one segment of a filter row: two more a row
    than there are outputs, odd rows of which are rounded up. Offsets make these the pixels of another segment, and with
    ``one_row``, as copies walk over one row of each image, those of another row."""
    top, _, left, _ = problem.padding
    row, last = 4 * problem.c, -top if one_row else (ceil_div(problem.p, heights) - 1) * heights - top
    return TensorMap(
        role=problem.operands[0].role,
        element="float32",
        shape=(problem.c, problem.w, problem.h, problem.n),
        strides=(row, row * problem.w, row * problem.w * problem.h),
        lower=(-left, -top),
        upper=(2 * pairs_of(problem) + 2 - problem.w - left, last - (problem.h - 1)),
        channels=ROW,
        pixels=lines_of(problem),
        traversal=(1, 1, heights, 1),
        swizzle=4 * ROW,
    )


def flat_plane(problem: ConvProblem) -> int:
    """Pixels that a copy brings of each channel of an image: all that windows see, with zeros above and below, or that
    those of a tile see, as a multiple of four so that lanes' channels lie in different banks (``flat_plane`` of the
    kernels)."""
    top, _, left, _ = problem.padding
    begin = -4 * ceil_div(top * problem.w + left, 4)
    right = max(0, problem.s - SEGMENT) - left
    last = ((problem.r - 1) * problem.dilation[0] - top) * problem.w + right + SEGMENT
    image = problem.p * pairs_of(problem)
    seen = 2 * PAIRS + 2 if PAIRS < image else 2 * image
    plane = 4 * ceil_div(seen - 2 + last + 1 - begin, 4)
    return plane + 4 if plane % 16 == 0 else plane


def planes_of(problem: ConvProblem) -> tuple[int, int]:
    """Pixels of all images that a tile's pairs may be of, and how far apart lanes have channels; 0 where planes do not
    serve."""
    plane, image = flat_plane(problem), problem.p * pairs_of(problem)
    if problem.layout != "NCHW" or problem.group_c % ROW or plane > 256 or image < 1:
        return 0, 0
    images = (image - gcd(PAIRS, image) + PAIRS - 1) // image + 1
    return (images * plane, 8 // gcd(plane, 8)) if images <= MOST_IMAGES else (0, 0)


def _row_pieces(problem: ConvProblem) -> int:
    """Pieces of channels of one row of filters."""
    return ceil_div(problem.s, SEGMENT) * pieces_of_tap(problem, ROW)


@lru_cache(maxsize=256)
def stages_of_rows(problem: ConvProblem) -> tuple[int, ...]:
    """For each row of outputs the stages of those rows of filters that meet rows of the image, in part or whole.

    The most come first, as tiles of one row are in order (``TensorTiles`` of the kernels)."""
    all_stages, of_row, of_stage = stages_of(problem, ROW, STATES), _row_pieces(problem), DEPTH // ROW
    down, stages = problem.dilation[0], []
    for i in range(problem.p):
        first = problem.padding[0] - ((problem.p - 1) // 2 + (-(i // 2) if i % 2 == 0 else (i + 1) // 2))
        outside = max(0, ceil_div(first, down))
        seen = max(0, min((problem.h - 1 + first) // down + 1, problem.r))
        begin = min(outside * of_row // of_stage, all_stages - 1)
        stages.append(max(min(ceil_div(seen * of_row, of_stage), all_stages), begin + 1) - begin)
    return tuple(stages)


def _least_stages(problem: ConvProblem, config: PairConfig) -> int:
    """The fewest stages of a tile."""
    return min(stages_of_rows(problem)) if config.one_row else stages_of(problem, config.piece, STATES)


def _in_one_row(problem: ConvProblem) -> bool:
    """Whether tiles of one row of outputs leave out rows of filters, and copies can bring their pixels."""
    reach = problem.p - 1 + (problem.r - 1) * problem.dilation[0]
    if problem.p < 2 or reach > 255 or leaves_column(problem, ROW):
        return False
    if min(stages_of_rows(problem)) == stages_of(problem, ROW, STATES):
        return False
    return not pair_map(problem, one_row=True).why_not()


def _in_heights(problem: ConvProblem) -> bool:
    """Whether two rows of outputs may share the states of the rows of pixels that both see."""
    rows = problem.p > 1 and 1 < problem.r < 256 and problem.dilation[0] == 1
    return rows and _row_pieces(problem) % (DEPTH // ROW) == 0 and not pair_map(problem, 2).why_not()


@lru_cache(maxsize=256)
def _config(
    tile: tuple[int, int],
    lines: int,
    products: int,
    shared: int,
    granule: int = 0,
    planes: tuple[int, int] = (0, 0),
) -> PairConfig | None:
    """The configuration of a tile, with rings as long as ``shared`` bytes allow; None where they are too short.
    With a ``granule`` its pixels are flat, and in ``planes`` if these are not 0."""
    flat = granule > 0
    config = PairConfig(*tile, products, lines, 2, 2, granule=granule or 16, rows=not flat, flat=flat)
    if planes[0]:
        config = replace(config, seen_pixels=planes[0], spacing=planes[1])
    for stages in (3, 2):
        left = shared - variant(config, pixel_stages=stages, filter_stages=0).shared_bytes - 16 * 8
        # NOTE: with planes, filters of three products at eight fixed places leave too few registers.
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
        if problem.dilation[1] != 1:
            reasons.append(f"dilation={problem.dilation} moves the columns of a filter apart")
        read = problem.k if problem.op == "dgrad" else problem.c
        of_group = problem.group_k if problem.op == "dgrad" else problem.group_c
        if of_group < ROW // 2:
            reasons.append(f"{of_group} channels are fewer than {ROW // 2}")
        if problem.layout == "NCHW" and not reasons:
            return self._why_not_flat(problem)
        if read % 4 or (problem.groups > 1 and of_group % ROW):
            reasons.append(
                f"bulk copies of {ROW} channels do not fit {of_group} channels in each of {problem.groups} groups"
            )
        if not reasons:
            reasons += [reason for part in single_parts(problem) for reason in pair_map(part.problem).why_not()]
            reach = (problem.r - 1) * problem.dilation[0]
            if reach > 255:
                reasons.append(f"filter rows reach {reach} rows, more than the 255 of a bulk copy")
            if problem.s - SEGMENT > 255:
                reasons.append(f"filters are {problem.s} wide, more than the 258 that bulk copies reach")
        return reasons

    def _why_not_flat(self, problem: ConvProblem) -> list[str]:
        """The same of NCHW, where flat pixels of the input are as many as those of the output."""
        parts = single_parts(problem)
        if not all(part.whole and part.problem.q % 2 == 0 and is_flat(part.problem) for part in parts):
            return [
                "in NCHW images of input and output are not of one size, with rows of even length, pixels in fours "
                f"and, if there are several groups, multiples of {ROW} channels in each"
            ]
        return [reason for part in parts for reason in flat_map(part.problem, 2 * max(GRANULES) + 8).why_not()]

    def candidates(self, problem: ConvProblem, shared: int = SHARED) -> list[PairConfig]:
        parts = single_parts(problem)
        products = 1 if problem.precision == "tf32" else 3
        lines = max((lines_of(part.problem) for part in parts), default=PAIRS)
        if problem.layout == "NCHW":
            found = [_config(tile, 0, products, shared, granule) for tile in TILES for granule in GRANULES]
            planes = planes_of(parts[0].problem) if len(parts) == 1 else (0, 0)
            if planes[0]:
                found += [_config(tile, 0, products, shared, min(GRANULES), planes) for tile in TILES]
        else:
            found = [_config(tile, lines, products, shared) for tile in TILES]
            low = _config((64, 1), lines, products, shared)
            # NOTE: the filters of one row of pixels stay in the ring for the next one.
            in_ring = low is not None and low.filter_stages == 2 * STATES
            if low and in_ring and parts and all(_in_heights(part.problem) for part in parts):
                found.append(variant(low, heights=2))
            if parts and all(_in_one_row(part.problem) for part in parts):
                found += [variant(config, one_row=True) for config in found if config and config.heights == 1]
        return [config for config in found if config]

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, PairConfig]]:
        parts = single_parts(problem)
        return by_time(
            (self._cycles(problem, parts, config, target), config)
            for whole in self.candidates(problem, target.shared_per_block)
            for config in self._with_splits(whole, parts, target)
        )

    def _tiles_of_row(self, problem: ConvProblem, config: PairConfig) -> int:
        """Tiles of pixels of one row of outputs."""
        return ceil_div(problem.n * pairs_of(problem), PAIRS * config.receivers) * config.receivers

    def _tiles(self, part: PartialConvolution, config: PairConfig) -> int:
        """Tiles of a launch."""
        problem = part.problem
        of_filters = ceil_div(problem.group_k, config.filters) * problem.groups
        if config.one_row:
            return self._tiles_of_row(problem, config) * problem.p * of_filters
        pairs = problem.n * ceil_div(problem.p, config.heights) * pairs_of(problem)
        if config.flat and not config.spacing:
            pairs = problem.n * ceil_div(problem.p * pairs_of(problem), config.granule) * config.granule
        return ceil_div(pairs, PAIRS * config.receivers) * config.receivers * of_filters

    def _with_splits(self, config: PairConfig, parts: list[PartialConvolution], target: Target) -> Iterator[PairConfig]:
        """The configuration; where its blocks have whole tiles, with filters that pairs of them receive together; and
        with the reduction split over a cluster where the rings take the outputs of a tile."""
        yield config
        pairs = variant(config, receivers=2, turns=config.products == 3)
        # NOTE: with six stages of filters, each at a changing place, it took 1.1 to 1.2 times as long (H200).
        in_ring = config.filter_stages == 4 * config.chunks
        fits = config.chunks > 1 and in_ring and not config.flat and pairs.shared_bytes <= target.shared_per_block
        if fits and parts and all(self._tiles(part, pairs) >= target.multiprocessors for part in parts):
            yield pairs
        if not parts or config.heights > 1 or config.filters * PAIRS * OUTPUTS * 4 > config.ring_bytes:
            return
        work = [(self._tiles(part, config), _least_stages(part.problem, config)) for part in parts]
        for split in shares_of(work, target, parts[0].problem.batch_invariant):
            if config.filters // (32 if config.flat else 16) % split == 0:
                yield variant(config, split=split)

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: PairConfig, target: Target
    ) -> float:
        speed = TILES[config.chunk, config.chunks][config.products == 1] * FLOPS_PER_CYCLE
        time = 0.0
        for part in parts:
            tiles, stages = self._tiles(part, config), stages_of(part.problem, config.piece, STATES)
            of_stage = 2 * PAIRS * OUTPUTS * SEGMENT * config.filters * DEPTH / speed
            of_stage *= 1 - (1 - REST) * rest_stages(part.problem, config) / stages
            of_tile = TILE_CYCLES
            if config.heights > 1:
                # The first and the last row of pixels are seen by one row of outputs alone.
                stages = _row_pieces(part.problem) // (DEPTH // ROW)
                of_stage *= 2 * speed / (HEIGHTS[config.products == 1] * FLOPS_PER_CYCLE)
                of_stage *= part.problem.r - 1 + 2 * EDGE
                of_tile = HIGH_TILE_CYCLES
            if config.flat:
                of_stage *= (PLANES[config.products] if config.spacing else GRANULES[config.granule]) / FLAT
            if config.receivers > 1:
                of_stage *= RECEIVED[config.products]
            alike = problem.batch_invariant
            if config.one_row:
                time += self._one_row_cycles(part.problem, config, of_stage, of_tile, target, alike)
            else:
                time += walk_cycles(tiles, stages, of_stage, of_tile, config.split, target, alike)
        return max(time, problem.bytes / target.bytes_per_cycle) + 3 * LAUNCH_CYCLES

    def _one_row_cycles(
        self, problem: ConvProblem, config: PairConfig, of_stage: float, of_tile: float, target: Target, alike: bool
    ) -> float:
        """Cycles of a launch whose tiles have fewer stages the later they come: the first block has most to do."""
        rows = stages_of_rows(problem)
        of_row = self._tiles_of_row(problem, config) * ceil_div(problem.group_k, config.filters)
        tiles = of_row * len(rows) * problem.groups
        if alike and config.split > 1:
            return walk_cycles(tiles, rows[0], of_stage, of_tile, config.split, target, alike)
        grid = self._grid(tiles, config, target, alike)
        rounds = ceil_div(tiles, grid) if config.split == 1 else rounds_of(tiles, config.split, target)[0]
        time = sum(rows[i * grid // of_row % len(rows)] * of_stage + of_tile for i in range(rounds))
        if config.split == 1:
            return time + FIRST_CYCLES
        left = rows[min(rounds * grid, tiles - 1) // of_row % len(rows)]
        return time + walk_cycles(tiles - rounds * grid, left, of_stage, of_tile, config.split, target, alike)

    def _grid(self, tiles: int, config: PairConfig, target: Target, alike: bool) -> int:
        """Blocks of a launch."""
        if config.split > 1:
            return grid_of(tiles, config.split, target, alike)
        return min(tiles, target.multiprocessors // config.receivers * config.receivers)

    def main_launch(
        self, problem: ConvProblem, part: PartialConvolution, config: PairConfig, first: int, target: Target
    ) -> Launch:
        _, _, *rest = conv_arguments(problem)
        tiles = self._tiles(part, config)
        if config.flat:
            encoded = flat_map(part.problem, flat_plane(part.problem) if config.spacing else config.column)
        else:
            encoded = pair_map(part.problem, config.heights, config.one_row)
        return Launch(
            header="kernels/hopper_fp32/tensor_winograd.cuh",
            function="leanconv::tensor_winograd",
            problem=(*view_constants(part.problem, part.view, has_wide_tensors(problem)), ("first_prepared", first)),
            tuning=config.constants(),
            arguments=(replace(encoded, role=problem.operands[0].role), Pointer("prepared"), *rest),
            grid=self._grid(tiles, config, target, problem.batch_invariant),
            block=config.threads,
            shared_bytes=config.shared_bytes,
            cluster=max(config.split, config.receivers),
        )
