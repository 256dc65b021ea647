"""Direct convolution in tiles: the pixels of a row are read once for all taps of a filter row."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd
from operator import itemgetter
from typing import NamedTuple

from leanconv.dtypes import GPU_LAYERS, item_bytes
from leanconv.kernels.common import layers
from leanconv.kernels.common.layers import conv_arguments, conv_constants, forward_of, has_wide_tensors
from leanconv.kernels.contract import Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, busy_cycles, fma_cycles, overlapped
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class DirectTiledConfig(Config):
    """A block computes ``tile_k`` filters x ``tile_w`` x ``tile_h`` pixels of an image, ``tile_c`` channels a step.

    A thread has ``thread_k`` filters x ``thread_pixels`` adjacent pixels of a row. In the paper's words these are F_TB,
    W, H, C_SH, F_T and W_T. The lanes of a warp form a grid of ``lanes_k`` x ``lanes_w`` x ``lanes_h``, along filters,
    a row and a column. ``unrolled_rows`` rows of a filter are in straight code, ``stages`` steps in shared memory at
    once. A block walks down ``walk`` tiles. ``vector``: pixels arrive in copies of four.
    """

    tile_k: int
    tile_w: int
    tile_h: int
    tile_c: int
    thread_k: int
    thread_pixels: int
    lanes_k: int
    lanes_w: int
    unrolled_rows: int
    walk: int
    stages: int
    min_blocks: int
    vector: bool

    @property
    def lanes_h(self) -> int:
        """Lanes of a warp along a column."""
        return 32 // (self.lanes_k * self.lanes_w)

    @property
    def threads(self) -> int:
        return self.tile_k * self.tile_w * self.tile_h // (self.thread_k * self.thread_pixels)


@dataclass(frozen=True)
class TiledSpeeds(Speeds):
    """Fitted to measurements on an H200."""

    #: the share of the peak that instructions are issued at; cycles that a step takes at least, and before the first
    issue: float
    step: float
    start: float
    #: instructions to copy a float to shared memory: of the filters, of the image in NCHW, and in NHWC
    filter_copy: float
    row_copy: float
    pixel_copy: float
    #: instructions to store an output: at least; more where the elements of a row are stored one by one; more where a
    #: warp's rows are 16 pixels long instead of 32
    store: float
    store_single: float
    store_short: float
    #: how many times the bytes of the output memory takes in addition where the lanes of a warp store less than
    #: sectors, in NHWC
    half_sectors: float
    #: how many times as long threads in NCHW compute that store their own four pixels after a single step in straight
    #: code: the compiler mixes the addresses with the products, and 12 of 16 such kernels spilled registers
    spilling: float
    #: how many times as fast as memory the L2 cache brings what blocks read
    cache: float
    #: how much of the lesser of the time of memory and of the multiprocessors adds to the greater, by layout
    lesser: Mapping[str, float]


class Layout(NamedTuple):
    """How a step lies in shared memory, in floats: the pitch from row to row, channel to channel and tap to tap; where
    the outputs are transposed; and all of it."""

    pitch: int
    channel_pitch: int
    filter_pitch: int
    exchange: int
    floats: int


def shift(problem: ConvProblem, vector: bool) -> int:
    """Pixels that copies of four begin early."""
    return -problem.padding[2] % 4 if vector else 0


@lru_cache(maxsize=4096)
def pixel_cycles(apart: int, lanes_w: int, lanes_h: int, pitch: int) -> int:
    """Cycles of a warp's 128-bit load of pixels: two for eight different places in different banks.

    Lanes of a row are ``apart`` floats apart, rows ``pitch``, of which the remainder by the 32 banks counts. A bank has
    four bytes, and a load of eight lanes takes a cycle if their vectors lie in different groups of four.
    """
    lanes = [(lane // lanes_w * pitch + lane % lanes_w * apart) // 4 for lane in range(lanes_w * lanes_h)]
    worst = 0
    for first in range(0, len(lanes), 8):
        banks = [place % 8 for place in lanes[first : first + 8]]
        worst = max(worst, *(banks.count(bank) for bank in banks))
    return worst * (4 if len(lanes) == 32 else 2)


@lru_cache(maxsize=4096)
def best_pitch(apart: int, lanes_w: int, lanes_h: int, least: int) -> int:
    """The pitch of a row, ``least`` or little more, with which a warp's loads of pixels are quickest."""
    pitches = range(least, least + 32, 4)
    return min(pitches, key=lambda pitch: (pixel_cycles(apart, lanes_w, lanes_h, pitch % 32), pitch))


def row_floats(problem: ConvProblem, tile_w: int, vector: bool) -> int:
    """Floats of a row of the image in shared memory."""
    stride, reach = problem.stride[1], (problem.s - 1) * problem.dilation[1]
    if vector:
        return ceil_div(shift(problem, vector) + (tile_w - 1) * stride + reach + 1, 4) * 4
    return stride * (tile_w + ceil_div(reach // stride, 4) * 4)


@lru_cache(maxsize=4096)
def layout(problem: ConvProblem, config: DirectTiledConfig) -> Layout:
    """Shared memory of a block; see kernels/direct/direct_tile.cuh."""
    forward = forward_of(problem)
    (sh, sw), taps, nhwc = forward.stride, forward.r * forward.s, forward.layout == "NHWC"
    apart = config.thread_pixels * (sw if config.vector else 1)
    pitch = best_pitch(apart, config.lanes_w, config.lanes_h, row_floats(forward, config.tile_w, config.vector))
    rows = (config.tile_h - 1) * sh + (forward.r - 1) * forward.dilation[0] + 1
    channel = sh * ceil_div(rows, sh) * pitch
    if nhwc and config.tile_c > 1:
        # the lanes of a copy are tile_c adjacent channels of 32 / tile_c pixels
        channel += (max(4, 32 // config.tile_c // 4 * 4) - channel) % 32
    filter_pitch = config.tile_k + (8 if nhwc and problem.op == "fprop" and config.tile_c == 4 else 4)
    image, filters = config.tile_c * channel, config.tile_c * taps * filter_pitch
    steps = ceil_div(forward.group_c, config.tile_c)
    stages = min(config.stages, steps * config.walk)
    exchange = stages * image + (filters if steps == 1 else stages * filters)
    transposed = 0 if nhwc else 2 * config.threads * config.thread_pixels
    return Layout(pitch, channel, filter_pitch, exchange, exchange + transposed)


@lru_cache(maxsize=4096)
def segments(problem: ConvProblem, thread_pixels: int, vector: bool) -> tuple[int, ...]:
    """Lengths, in pixels, of the runs that a thread reads of a row for the taps of a filter row."""
    phases, dilation = 1 if vector else problem.stride[1], problem.dilation[1]
    reach = (thread_pixels - 1) * (problem.stride[1] if vector else 1) + 1
    most = ceil_div(reach, 4) * 4 + 12
    lengths: list[int] = []
    for phase in range(phases):
        begin = None
        for s in range(problem.s):
            if s * dilation % phases != phase:
                continue
            column = shift(problem, vector) + s * dilation // phases
            end = ceil_div(column + reach, 4) * 4
            if begin is None or end - begin > most:
                begin = column // 4 * 4
                lengths.append(0)
            lengths[-1] = end - begin
    return tuple(lengths)


def registers_needed(problem: ConvProblem, thread_k: int, thread_pixels: int, vector: bool) -> int:
    """Registers that a thread needs: sums, one run of pixels or two, the filters of two taps, some for addresses."""
    window = max(segments(problem, thread_pixels, vector))
    addresses = 26 if has_wide_tensors(problem) else 10
    return thread_k * thread_pixels + (2 if window <= 20 else 1) * window + 2 * thread_k + addresses


@lru_cache(maxsize=1024)
def lanes(tile: tuple[int, int, int], thread: tuple[int, int], step: int, columns: int) -> tuple[int, int] | None:
    """Lanes of a warp along filters and along a row: those with the quickest loads; None where warps do not divide the
    tile. Pixels of neighbouring windows are ``step`` apart, ``columns`` is the least pitch of a row."""
    (tile_k, tile_w, tile_h), (thread_k, thread_pixels) = tile, thread
    best = None
    for lanes_k, lanes_w in product((4, 8, 2, 16, 1), (4, 2, 8, 1, 16)):
        lanes_h = 32 // (lanes_k * lanes_w)
        if lanes_h == 0 or tile_k % (lanes_k * thread_k) or tile_w % (lanes_w * thread_pixels) or tile_h % lanes_h:
            continue
        apart = thread_pixels * step
        pitch = best_pitch(apart, lanes_w, lanes_h, columns)
        cycles = pixel_cycles(apart, lanes_w, lanes_h, pitch % 32)
        filters = 4 if lanes_k > 8 else 2 if lanes_k > 1 else 1
        # A run of pixels serves several taps. Of equals the one whose rows make the widest stores.
        key = (cycles + 2 * filters * thread_k / thread_pixels, -min(32, lanes_w * thread_pixels), pitch)
        if best is None or key < best[0]:
            best = key, (lanes_k, lanes_w)
    return best and best[1]


#: Most FMAs in straight code: of a whole step, and of an iteration over a share of it. Explored
#: (H200, 37ab552, 7x7 filters): four blocks that run 50 kB of code at different places lose a quarter of the speed.
WHOLE_FMAS, LOOPED_FMAS = 1800, 900
#: Most blocks and threads on a multiprocessor of any GPU.
MOST_BLOCKS, MOST_THREADS = 24, 1536


@lru_cache(maxsize=1024)
def unrolled_rows(rows: int, products: int) -> int:
    """Rows of a filter in straight code, of ``products`` FMAs each: those of a step, or an even number, best one that
    divides them."""
    if rows * products <= WHOLE_FMAS or rows == 1:
        return rows
    most = max(1, LOOPED_FMAS // products // 2) * 2
    return max((n for n in range(2, most + 1, 2) if rows % n == 0 and 2 * n >= most), default=min(most, rows))


def block(
    problem: ConvProblem,
    target: Target,
    tile: tuple[int, int, int],
    thread: tuple[int, int],
    tile_c: int,
    walk: int = 1,
    stages: int = 2,
    vector: bool = True,
    blocks: int | None = None,
) -> DirectTiledConfig | None:
    """The configuration of a block with these sizes; None where a multiprocessor cannot hold it."""
    forward = forward_of(problem)
    (tile_k, tile_w, tile_h), (thread_k, thread_pixels) = tile, thread
    vector = vector and forward.layout == "NCHW" and forward.w % 4 == 0
    tile_c = min(tile_c, forward.group_c)
    # the pitch counts by the remainder alone, so a few entries serve all problems
    found = lanes(tile, thread, forward.stride[1] if vector else 1, row_floats(forward, tile_w, vector) % 32)
    threads = tile_k * tile_w * tile_h // (thread_k * thread_pixels)
    registers = registers_needed(forward, thread_k, thread_pixels, vector)
    if found is None or threads > 512 or registers > 255:
        return None
    if forward.layout == "NHWC" and tile_c > threads:  # a thread copies one channel of a pixel
        return None
    unrolled = unrolled_rows(tile_c * forward.r, forward.s * thread_k * thread_pixels)
    config = DirectTiledConfig(*tile, tile_c, *thread, *found, unrolled, walk, stages, 1, vector)
    shared = 4 * layout(problem, config).floats
    if shared > target.shared_per_block:
        return None
    fitting = min(
        target.registers_per_multiprocessor // (ceil_div(registers, 8) * 8 * threads),
        target.shared_per_multiprocessor // (shared + 1024),
        MOST_BLOCKS,
        MOST_THREADS // threads,
    )
    return variant(config, min_blocks=max(1, min(fitting, blocks or fitting)))


#: Blocks that are worth a try (filters x columns x rows), and their threads (filters x pixels). The first is the
#: smallest.
CANDIDATES = (
    ((16, 8, 4), (4, 4)),
    ((16, 16, 8), (4, 8)),
    ((16, 32, 8), (8, 4)),
    ((32, 8, 8), (4, 8)),
    ((32, 16, 4), (8, 4)),
    ((32, 16, 8), (8, 4)),
    ((32, 16, 8), (8, 8)),
    ((32, 28, 8), (8, 4)),
    ((32, 32, 8), (8, 4)),
    ((32, 32, 8), (8, 8)),
    ((32, 16, 16), (8, 8)),
    ((32, 64, 4), (8, 8)),
    ((64, 8, 8), (8, 8)),
    ((64, 16, 8), (8, 8)),
    ((64, 32, 4), (8, 4)),
    ((64, 32, 4), (16, 4)),
    ((64, 32, 8), (8, 8)),
    ((64, 16, 16), (8, 8)),
    ((96, 8, 8), (8, 4)),
    ((96, 16, 8), (8, 8)),
)
#: The paper's best blocks and threads, with channels of a step, for filters of 3x3, 5x5 and 7x7: always worth a try.
PAPERS_BEST = (((64, 32, 4), (4, 16), 2), ((32, 32, 8), (8, 8), 1), ((32, 64, 4), (8, 8), 1))
#: The best block of 60 for 7x7 filters (`python -m research design-space` on an H200; those for 3x3 and 5x5 are above):
#: worth a try where as many taps share a run of pixels.
BEST_OF_LARGE, LARGE = ((32, 16, 16), (4, 16), 2), 7
#: Candidates whose cost is predicted, those that compute least in vain first, and how many times as much as
#: the first they may compute.
MOST_CANDIDATES, MOST_WASTE = 10, 2
#: Filters of a channel below which other kernels are far ahead, and one block is tried.
FEW_FILTERS = 4


#: The configuration that takes least shared memory.
SMALLEST = DirectTiledConfig(
    *CANDIDATES[0][0], 1, *CANDIDATES[0][1], 4, 2, unrolled_rows=1, walk=1, stages=2, min_blocks=1, vector=False
)


def channels(problem: ConvProblem) -> tuple[int, ...]:
    """Channels of a step: all where they are few, else as many as make twenty products or so; of NHWC whole sectors."""
    forward = forward_of(problem)
    taps = forward.r * forward.s
    most = max(1, 160 // taps)
    if forward.group_c <= min(4, most):
        return (forward.group_c,)
    least = 1 << (ceil_div(16, taps) - 1).bit_length()
    if forward.layout == "NHWC":
        return tuple(dict.fromkeys(min(c, 2 * most) for c in (max(4, least), max(8, least))))
    return (least,)


def _candidates(problem: ConvProblem, target: Target) -> Iterator[DirectTiledConfig]:
    """The blocks of CANDIDATES that fit, with few products in vain."""
    forward = forward_of(problem)

    def waste(candidate: tuple[tuple[int, int, int], tuple[int, int]]) -> float:
        (tile_k, tile_w, tile_h), _ = candidate
        computed = ceil_div(forward.group_k, tile_k) * tile_k * ceil_div(forward.q, tile_w) * tile_w
        return computed * ceil_div(forward.p, tile_h) * tile_h / (forward.group_k * forward.q * forward.p)

    known = channels(problem)
    wasted = sorted(((waste(candidate), candidate) for candidate in CANDIDATES[1:]), key=itemgetter(0))
    depthwise = forward.group_c == 1 and forward.group_k < FEW_FILTERS
    least, most = wasted[0][0], 1 if depthwise else MOST_CANDIDATES
    kept = [candidate for share, candidate in wasted[:most] if share <= MOST_WASTE * least]
    for tile, thread in (*kept, CANDIDATES[0]):
        for tile_c in known:
            resident = tile_c == forward.group_c
            rows = ceil_div(forward.p, tile[2])
            for walk in (1, *(n for n in (2, 4) if resident and rows >= n)):
                # of strides, short runs alone leave registers for pixels that stay together
                vector = forward.stride[1] == 1 or thread[1] == 4
                config = block(problem, target, tile, thread, tile_c, walk, vector=vector)
                if config is not None:
                    yield config
    large = (BEST_OF_LARGE,) if forward.s >= LARGE else ()
    for tile, thread, tile_c in (*PAPERS_BEST, *large, (*CANDIDATES[0], 1)):
        config = block(problem, target, tile, thread, tile_c)
        if config is not None:
            yield config


#: Bytes that memory writes as a whole.
SECTOR = 32


def cycles(problem: ConvProblem, config: DirectTiledConfig, target: Target) -> float:
    """Predicted time in clock cycles: that of the memory, or of the busiest multiprocessor.

    A step takes the time of its instructions, or of the loads from shared memory, but not less than copies need; few
    warps hide less latency.
    """
    forward, speeds, item = forward_of(problem), TiledSpeeds.of(target), item_bytes(problem.dtype)
    (stride_h, stride_w), nchw = forward.stride, forward.layout == "NCHW"
    threads, tile_c, filter_rows = config.threads, config.tile_c, config.tile_c * forward.r
    apart = config.thread_pixels * (stride_w if config.vector else 1)
    pixel_loads = filter_rows * sum(segments(forward, config.thread_pixels, config.vector)) / 4
    filter_loads = filter_rows * forward.s * config.thread_k / 4
    loads = pixel_loads * pixel_cycles(apart, config.lanes_w, config.lanes_h, layout(problem, config).pitch % 32)
    loads += filter_loads * (4 if config.lanes_k > 8 else 2)

    columns = (config.tile_w - 1) * stride_w + (forward.s - 1) * forward.dilation[1] + 1
    rows = (config.tile_h - 1) * stride_h + (forward.r - 1) * forward.dilation[0] + 1
    of_pixel = speeds.row_copy / (4 if config.vector else 1) if nchw else speeds.pixel_copy
    copies = tile_c * (rows * columns * of_pixel + forward.r * forward.s * config.tile_k * speeds.filter_copy)
    products = filter_rows * forward.s * config.thread_k * config.thread_pixels
    instructions = products + pixel_loads + filter_loads + copies / threads

    outputs = speeds.store
    if nchw:
        row = min(32, config.lanes_w * config.thread_pixels)
        outputs += speeds.store_single / gcd(forward.q, 4) + speeds.store_short * (32 / row - 1)
    outputs *= config.thread_k * config.thread_pixels
    steps = ceil_div(forward.group_c, tile_c)

    def resident(blocks: int) -> float:
        warps = blocks * threads / 32
        step = max(warps * instructions * 32 / (target.fma_lanes * speeds.issue), warps * loads, speeds.step)
        return speeds.start + config.walk * (steps * step * (1 + 1 / warps) + warps * outputs / 4)

    blocks = blocks_of(forward, config)
    busy = busy_cycles(blocks, config.min_blocks, target, resident)
    if nchw and steps == 1 and config.thread_pixels == 4 and config.unrolled_rows == filter_rows:
        busy *= speeds.spilling
    filters = tile_c * forward.r * forward.s * config.tile_k / (config.walk if steps == 1 else 1)
    read = blocks * config.walk * steps * (tile_c * rows * columns + filters)
    busy = max(busy, item * read / target.bytes_per_cycle / speeds.cache)
    moved: float = problem.bytes
    if not nchw and 4 * item * config.lanes_k < SECTOR:
        moved += speeds.half_sectors * item * forward.n * forward.k * forward.p * forward.q
    return overlapped(busy, moved / target.bytes_per_cycle, speeds.lesser[forward.layout])


def blocks_of(forward: ConvProblem, config: DirectTiledConfig) -> int:
    tiles = forward.n * forward.groups * ceil_div(forward.group_k, config.tile_k) * ceil_div(forward.q, config.tile_w)
    return tiles * ceil_div(ceil_div(forward.p, config.tile_h), config.walk)


class DirectTiled(TimedAlgorithm):
    """Pixels of a row in registers for all taps of a filter row; FP32 FMAs in direct order, no workspace. Forward and,
    for layers of unit stride, the gradient of the input."""

    name = "direct_tiled"
    paper = "X. Chen et al., Optimizing Memory Efficiency for Convolution Kernels on Kepler GPUs (2017)"
    precision = "ieee"

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return fma_cycles(problem, target)

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = layers.limits(problem, "fprop", "dgrad", dtypes=GPU_LAYERS) + layers.images_outermost(problem)
        if problem.op == "dgrad" and problem.stride != (1, 1):
            reasons.append(f"op='dgrad' with stride={problem.stride}: it computes gradients of layers of unit stride")
        if not reasons and (needed := 4 * layout(problem, SMALLEST).floats) > target.shared_per_block:
            reasons.append(
                f"filters of {problem.r}x{problem.s} with stride={problem.stride} and dilation={problem.dilation}: the "
                f"smallest tile takes {needed} bytes of shared memory, and a block has {target.shared_per_block}"
            )
        return reasons

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, DirectTiledConfig]]:
        found = dict.fromkeys(_candidates(problem, target))
        return by_time((cycles(problem, config, target), config) for config in found)

    def order_of_sums(self, problem: ConvProblem, config: DirectTiledConfig) -> Hashable:
        # one chain of multiply-adds; with strides, pixels that are copied one by one have another order of columns
        return config.vector

    def plan(self, problem: ConvProblem, config: DirectTiledConfig, target: Target) -> Plan:
        forward, (pitch, channel_pitch, filter_pitch, exchange, floats) = forward_of(problem), layout(problem, config)
        more = ("reversed", problem.op == "dgrad"), ("shift", shift(forward, config.vector)), ("exchange", exchange)
        pitches = ("pitch", pitch), ("channel_pitch", channel_pitch), ("filter_pitch", filter_pitch)
        constants, blocks = (*conv_constants(forward), *more, *pitches), blocks_of(forward, config)
        return Plan((self.launch(config, constants, conv_arguments(problem), blocks, 4 * floats),))
