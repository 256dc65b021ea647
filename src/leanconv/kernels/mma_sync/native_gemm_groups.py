"""Grouped convolution on tensor cores by mma.sync: 16 bits from sm_80 on, float32 in TF32 from sm_90 on."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, inf

from leanconv.dtypes import item_bytes
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.layers import (
    FLOAT32,
    FLOATS_16BIT,
    conv_arguments,
    conv_constants,
    images_outermost,
    limits,
    mma_sync_limits,
)
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, blocks_that_fit, overlapped
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Bytes of a unit of channels, which is a row of ldmatrix; and filters of an mma.
UNIT_BYTES, MMA_FILTERS = 16, 8
#: Registers of a thread that the fragments of filters may take, or the sums of their gradient; of a step's fragments;
#: and what a thread has beside these, by type and layout.
MOST_REGISTERS, OF_STEP = 150, 2
BESIDE = {"16 bits": {"NHWC": 52, "NCHW": 96}, "TF32": {"NHWC": 56, "NCHW": 64}}
#: Registers more in TF32, where a thread has several blocks of filters and a gradient has several phases.
OF_PHASES = 28
#: Registers of a thread that an ldmatrix fills: in TF32 an instruction rounds each.
OF_LDMATRIX = 4
#: Filters of a tile, about; warps of a CTA, at least.
FILTERS, WARPS = (16, 32, 64, 128), (4, 8, 16)
#: Tiles of pixels in shared memory.
STAGES = 2
#: Windows of a tile, about, and columns at most.
POSITIONS, WIDEST = {"16 bits": (64, 128, 256, 448), "TF32": (32, 64, 128, 256, 448)}, 64


@dataclass(frozen=True)
class Axis:
    """The windows along an axis: ``counts`` taps in each phase, ``step`` pixels from one to the next, which read
    ``reach`` pixels more than the first; as kernels/mma_sync/group_pixels.cuh, TapAxis."""

    counts: tuple[int, ...]
    step: int
    reach: int
    positions: int


@dataclass(frozen=True)
class Windows:
    """What is read and what is written: x and y of a layer, dy and dx of its input's gradient."""

    #: channels of a unit
    unit: int
    #: units of a step: the two of a product; in the filters' gradient those of 16 channels
    of_step: int
    n: int
    c: int
    k: int
    groups: int
    rows: Axis
    columns: Axis

    @cached_property
    def group_c(self) -> int:
        return self.c // self.groups

    @cached_property
    def group_k(self) -> int:
        return self.k // self.groups

    @cached_property
    def phases(self) -> int:
        return len(self.rows.counts) * len(self.columns.counts)

    @cached_property
    def units(self) -> int:
        """Units of channels that eight filters read: those of their groups."""
        c, k, unit = self.group_c, self.group_k, self.unit
        return max(ceil_div(((b * 8 + 7) // k + 1) * c, unit) - b * 8 // k * c // unit for b in range(k))

    @cached_property
    def steps(self) -> int:
        """Steps that eight filters take, in all phases."""
        return sum(ceil_div(r * s * self.units, self.of_step) for r in self.rows.counts for s in self.columns.counts)

    @property
    def kind(self) -> str:
        return "16 bits" if self.unit == UNIT_BYTES // 2 else "TF32"


def _axis(gradient: bool, extent: int, outputs: int, taps: int, stride: int, dilation: int, padding: int) -> Axis:
    if not gradient:
        return Axis((taps,), stride, (taps - 1) * dilation, outputs)
    apart = stride // gcd(stride, dilation)
    counts, offsets, positions = [], [], 0
    for phase in range(min(apart, taps)):
        moved, place = divmod(phase * dilation - padding, stride)
        counts.append(ceil_div(taps - phase, apart))
        offsets += [-moved - dilation * apart // stride * i for i in range(counts[-1])]
        positions = max(positions, ceil_div(extent - place, stride))
    return Axis(tuple(counts), 1, max(offsets) - min(offsets), max(0, positions))


@lru_cache(maxsize=64)
def windows_of(problem: ConvProblem) -> Windows:
    """Those of a layer, which its filters' gradient reads too, or of its input's gradient."""
    gradient = problem.op == "dgrad"
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    rows = _axis(gradient, problem.h, problem.p, problem.r, sh, dh, top)
    columns = _axis(gradient, problem.w, problem.q, problem.s, sw, dw, left)
    c, k = (problem.k, problem.c) if gradient else (problem.c, problem.k)
    unit = UNIT_BYTES // item_bytes(problem.dtype)
    return Windows(unit, 16 // unit if problem.op == "wgrad" else 2, problem.n, c, k, problem.groups, rows, columns)


@dataclass(frozen=True)
class GroupsConfig(Config):
    """A tile has ``rows`` x ``columns`` windows of an image and ``filters``: whole groups, or a part of one.

    Each of ``warps`` has ``blocks`` times eight of them. Two tiles of pixels are in shared memory at once.
    """

    filters: int
    blocks: int
    warps: int
    rows: int
    columns: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    def channels(self, windows: Windows) -> int:
        """Channels of the groups that a tile has filters of."""
        return max(1, self.filters // windows.group_k) * windows.group_c

    def pixels(self, windows: Windows) -> tuple[int, int]:
        """Rows and columns of the pixels that a tile reads."""
        rows, columns = windows.rows, windows.columns
        return (self.rows - 1) * rows.step + rows.reach + 1, (self.columns - 1) * columns.step + columns.reach + 1

    @property
    def across(self) -> int:
        """Columns of sixteen windows that are multiplied at once."""
        return min(16, self.columns & -self.columns)

    def row_pixels(self, windows: Windows) -> int:
        """Pixels from one row to the next in shared memory, as kernels/mma_sync/group_pixels.cuh lays them out."""
        step, across = windows.columns.step, self.across
        row = step * ceil_div(self.pixels(windows)[1], step)
        down = windows.rows.step if windows.kind == "TF32" and windows.rows.step % 4 else 1
        return row + (0 if across >= 8 else next((m for m in range(7) if (row + m) * down % 8 == across), 7))

    def shared_bytes(self, windows: Windows) -> int:
        """Shared memory of a CTA: the pixels of all stages."""
        pixels = self.pixels(windows)[0] * self.row_pixels(windows)
        return STAGES * pixels * UNIT_BYTES * self.pitch(self.channels(windows), windows)

    def pitch(self, channels: int, windows: Windows) -> int:
        """Units from one pixel to the next: an odd number, so that rows of ldmatrix lie in different banks."""
        return channels // windows.unit | 1

    def tiles(self, windows: Windows) -> tuple[int, int]:
        """Tiles of filters, and of windows."""
        positions = ceil_div(windows.rows.positions, self.rows) * ceil_div(windows.columns.positions, self.columns)
        return ceil_div(windows.k, self.filters), windows.n * positions

    def workers(self, windows: Windows, target: Target) -> int:
        """CTAs that share the tiles of windows."""
        of_filters, of_windows = self.tiles(windows)
        return min(of_windows, max(1, target.multiprocessors * self.min_blocks // of_filters))


@dataclass(frozen=True)
class GroupsSpeeds(Speeds):
    """Cycles of a multiprocessor, and shares of the memory's speed, of a layout in 16 bits and in TF32.

    Explored (H200, 3859a523): in 16 bits fitted to 207 times of 23 layers, forward and gradient, channels last, with a
    mean error of 10 %; the choice among the measured is 1.5 % behind the best in the mean. Explored (H200, 13330f93):
    in TF32 fitted to 44 times of one configuration each, 17 of them channels last, with a median error of 3 % there and
    8 % channels first. A warp waits less for an instruction, since roundings do not wait for each other.
    """

    #: flops of mma.sync in a cycle, at most, and the share of the tensor cores' that is assumed elsewhere
    max_flops: float
    share: float
    #: instructions of a warp for 16 windows beside its products, and for each eight filters of these
    beside: float
    block: float
    #: cycles that a warp alone takes for an instruction, and those of a product from which the next one follows
    latency: float
    product: float
    #: cycles of a tile beside memory and products; before the first, the launch's included; of a warp for each step of
    #: its filters, whose fragments it loads
    tile: float
    start: float
    step: float
    #: times the bytes of a problem that memory takes, and times the sectors that tiles read and write
    memory: float
    cached: float
    #: share of the lesser of memory and products that adds to the greater
    lesser: float
    #: forward times are multiplied by this where wgmma multiplies the groups, 32 channels or more: there `native_gemm`
    #: predicts more than small images take
    behind: float


@lru_cache(maxsize=64)
def filter_tiles(
    windows: Windows, registers: int, wanted: tuple[int, ...] = FILTERS
) -> tuple[tuple[int, int, int], ...]:
    """Filters of a tile, blocks of a warp, and warps that fit a problem's groups, where a step of a block takes so many
    ``registers``: of each number of blocks the tiles next to the ``wanted`` numbers of filters."""
    k, c, steps, unit = windows.group_k, windows.group_c, windows.steps, windows.unit
    few = windows.units * unit <= 8  # channels that eight filters read
    shares = [blocks for blocks in (4, 3, 2, 1) if registers * steps * blocks <= MOST_REGISTERS
              and (k % (8 * blocks) == 0 or blocks == 1 or (few and blocks != 3))]  # fmt: skip
    found: dict[tuple[int, int, int], None] = {}
    for blocks in shares if few else [*shares[:1], *shares[-1:]]:
        whole = [
            each for each in range(8 * blocks, max(wanted[-1], k) + 1, 8 * blocks)
            if (each % k == 0 and each // k * c % unit == 0) or (k % each == 0 and c % unit == 0)
        ]  # fmt: skip
        fit = [each for each in whole if each < windows.k + 8 * blocks and each // (8 * blocks) <= WARPS[-1]]
        for filters in {min(fit, key=lambda each: (abs(each - about), each)) for about in wanted if fit}:
            along, room = (
                filters // (8 * blocks),
                2**16 // (32 * min(255, blocks * (registers * steps + 6) + BESIDE[windows.kind]["NHWC"])),
            )
            if windows.kind == "TF32" and along > room:
                continue
            for least in WARPS:
                warps = along * ceil_div(least, along)
                if warps <= min(WARPS[-1], max(room, along)):
                    found[filters, blocks, warps] = None
    return tuple(found)


@lru_cache(maxsize=64)
def window_tiles(windows: Windows) -> tuple[tuple[int, int], ...]:
    """Rows and columns of a tile: whole m tiles of 16 windows, 1 x 16 to 8 x 2; of about as many windows as `POSITIONS`
    the one that reads and computes least."""
    height, width = windows.rows.positions, windows.columns.positions
    best: dict[int, tuple[float, int, int]] = {}
    for across, parts in product((2, 4, 8, 16), range(1, ceil_div(width, 14) + 1)):
        columns = ceil_div(ceil_div(width, parts), across) * across
        down = 16 // min(16, columns & -columns)
        for positions in POSITIONS[windows.kind] if columns <= WIDEST else ():
            bands = ceil_div(height, max(down, positions // columns // down * down))
            rows = ceil_div(ceil_div(height, bands), down) * down
            if windows.kind == "TF32" and rows * columns > 2 * positions:
                continue
            tiles = ceil_div(height, rows) * ceil_div(width, columns)
            read = (rows * windows.rows.step + windows.rows.reach) * (
                columns * windows.columns.step + windows.columns.reach
            )
            best[positions] = min(best.get(positions, (inf, 0, 0)), (tiles * (rows * columns + read), rows, columns))
    return tuple(dict.fromkeys((rows, columns) for _, rows, columns in best.values()))


def group_limits(
    problem: ConvProblem, target: Target, registers: int, *ops: str,
    kind: type[GroupsConfig] = GroupsConfig, wanted: tuple[int, ...] = FILTERS,
) -> list[str]:  # fmt: skip
    """Why kernels of groups on tensor cores that compute ``ops`` cannot run ``problem`` on ``target``, where a step of
    eight filters takes so many ``registers``, and tiles have about the ``wanted`` numbers of filters."""
    reasons = [*limits(problem, *ops, dtypes=(*FLOAT32, *FLOATS_16BIT)), *images_outermost(problem)]
    reasons += mma_sync_limits(target)
    unit = UNIT_BYTES // item_bytes(problem.dtype)
    if problem.dtype == "float32":
        if problem.precision != "tf32":
            reasons.append(f"it rounds float32 to TF32, and precision={problem.precision!r} was requested")
        elif not target.rounds_to_tf32:
            reasons.append(f"{target.arch} is older than sm_90, which rounds float32 to TF32 by one instruction")
    if problem.n < 1:
        reasons.append(f"n={problem.n}: there are no images")
    if problem.groups == 1:
        reasons.append("groups=1: it computes groups of few channels")
    for name, count, each in (("c", problem.c, problem.group_c), ("k", problem.k, problem.group_k)):
        if count % unit:
            reasons.append(f"{name}={count} is no multiple of {unit}: channels are read by units of {UNIT_BYTES} bytes")
        elif each % 4:
            reasons.append(f"groups={problem.groups} of {name}={count} leaves {each} in a group, no multiple of 4")
    if reasons:
        return reasons
    windows = windows_of(problem)
    if tiles := filter_tiles(windows, registers, wanted):
        if not windows.rows.positions * windows.columns.positions:
            return []
        shared = (kind(*each, *size, 1).shared_bytes(windows) for size in window_tiles(windows) for each in tiles)
        if any(each <= target.shared_per_block for each in shared):
            return []
        what = f"a tile of windows of {problem.window} with stride {problem.stride[0]},{problem.stride[1]}"
        return [f"{what} takes more than the {target.shared_per_block} bytes of shared memory that a CTA has"]
    if (taken := registers * windows.steps) > MOST_REGISTERS:
        what = f"filters of {windows.group_c} channels x {problem.window} take {taken} registers of a thread"
        return [f"{what}, and there are {MOST_REGISTERS}"]
    most, what = max(wanted[-1], windows.group_k), f"groups={problem.groups} of {windows.group_k} filters"
    return [f"{what} make no tile of up to {most} that a CTA has warps and registers for"]


def sectors(
    problem: ConvProblem, channels: int, rows: int, columns: int, step: int = 1, image: tuple[int, int] | None = None
) -> int:
    """Bytes of the sectors of 32 that so many channels of rows of pixels, ``step`` columns apart, lie in: of each
    pixel, or of each row.

    ``image``: its rows and columns, in TF32, whose speeds are fitted so: of more none are read, and whole rows are one.
    """
    of_sector = 32 // item_bytes(problem.dtype)
    if problem.layout == "NHWC":
        return 32 * ceil_div(channels, of_sector) * rows * columns
    if image is not None and problem.dtype == "float32":
        rows, columns = min(rows, image[0]), min(columns, image[1])
        rows, columns = (1, rows * columns) if columns == image[1] else (rows, columns)
    return 32 * (ceil_div(columns * step, of_sector) + 1) * rows * channels


def _written(problem: ConvProblem, config: GroupsConfig, windows: Windows) -> int:
    """Bytes of the sectors that a tile writes. Each phase of a strided gradient writes columns of its own: in NCHW it
    reads and writes sectors of all of them."""
    step = problem.stride[1] if problem.op == "dgrad" else 1
    if problem.dtype != "float32" or problem.layout == "NHWC":
        return windows.phases * sectors(problem, config.filters, config.rows, config.columns, step * step)
    # float32 is stored as it lies in registers: eight outputs of a filter at once, in rows of those multiplied at once
    run = min(8, config.across)
    outputs = min(config.rows, windows.rows.positions) * min(config.columns, windows.columns.positions)
    return windows.phases * config.filters * ceil_div(outputs, run) * 32 * ceil_div(run * step, 8)


def part_of_speeds(problem: ConvProblem) -> str:
    """Whose speeds are those of a problem: its layout's, in TF32 those of that."""
    return problem.layout + " TF32" * (problem.dtype == "float32")


def resident_blocks(config: GroupsConfig, shared: int, registers: int, target: Target) -> int:
    """CTAs of a multiprocessor; each takes a KiB more than it asks for."""
    of_registers = blocks_that_fit(min(255, registers), config.threads, target)
    return max(1, min(of_registers, target.shared_per_multiprocessor // (shared + 1024)))


class NativeGemmGroups(TimedAlgorithm):
    """Direct grouped convolution and its input's gradient on tensor cores, 16-bit elements or float32 rounded to TF32,
    summed in float32."""

    name = "native_gemm"
    strategy = "groups"
    writes_phases = True
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Chetlur et al., cuDNN (2014)"
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return group_limits(problem, target, OF_STEP, "fprop", "dgrad")

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "tf32" if problem.dtype == "float32" else "fp16"

    def counts_scattered(self, problem: ConvProblem) -> bool:
        # Explored (H200, 13330f93): of two layers in NCHW the sectors alone predict 0.85 and 1.08 of the time in TF32
        return problem.dtype == "float32"

    def least_cycles(self, problem: ConvProblem, target: Target) -> float:
        return problem.bytes / target.bytes_per_cycle

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, GroupsConfig]]:
        windows, speeds = windows_of(problem), GroupsSpeeds.of(target, part_of_speeds(problem))
        if not windows.rows.positions * windows.columns.positions:
            # A layer whose windows cover nothing but padding has a gradient of zeros, and nothing to tune.
            return [(0.0, GroupsConfig(8, 1, 4, 1, 16, 1))]
        found = self._candidates(windows, BESIDE[windows.kind][problem.layout], target)
        wide = problem.op == "fprop" and windows.group_c % 32 == 0 and target.warpgroup_products
        behind = speeds.behind if wide else 1.0
        return by_time((behind * cycles(problem, config, target, speeds), config) for config in found)

    def _candidates(self, windows: Windows, beside: int, target: Target) -> Iterator[GroupsConfig]:
        for filters, blocks, warps in filter_tiles(windows, OF_STEP):
            registers = blocks * (OF_STEP * windows.steps + 6) + beside
            if windows.kind == "TF32" and windows.phases > 1 and blocks > 1:
                registers += OF_PHASES
            for rows, columns in window_tiles(windows):
                whole = GroupsConfig(filters, blocks, warps, rows, columns, 1)
                shared = whole.shared_bytes(windows)
                if shared <= target.shared_per_block:
                    fit = resident_blocks(whole, shared, registers, target)
                    yield variant(whole, min_blocks=fit)

    def order_of_sums(self, problem: ConvProblem, config: GroupsConfig) -> Hashable:
        """Nothing: an output's reduction is one chain. Where eight filters span groups, zeros lie in it elsewhere."""
        windows = windows_of(problem)
        return config.filters if windows.group_c % windows.unit or windows.group_k % MMA_FILTERS else ()

    def plan(self, problem: ConvProblem, config: GroupsConfig, target: Target) -> Plan:
        windows, zeros = windows_of(problem), input_gradient.zero_launches(problem)
        if not windows.rows.positions * windows.columns.positions:
            return Plan(zeros)
        constants = (*conv_constants(problem), ("gradient", problem.op == "dgrad"))
        grid = config.tiles(windows)[0] * config.workers(windows, target)
        tuning = (*config.constants(), ("threads", config.threads))
        shared = config.shared_bytes(windows)
        return Plan((self.launch(config, constants, conv_arguments(problem), grid, shared, tuning), *zeros))


def cycles(problem: ConvProblem, config: GroupsConfig, target: Target, speeds: GroupsSpeeds) -> float:
    """Predicted clock cycles: of as many rounds as the busiest CTA has tiles, in each of which the CTAs of a
    multiprocessor share memory and products."""
    windows = windows_of(problem)
    flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
    of_filters, of_windows = config.tiles(windows)
    workers = config.workers(windows, target)
    rounds, together = ceil_div(of_windows, workers), ceil_div(of_filters * workers, target.multiprocessors)
    # a product of TF32 has half the flops, at half the rate
    m_tiles, along = ceil_div(config.rows * config.columns, 16), config.filters // MMA_FILTERS // config.blocks
    reads = windows.steps * (1 if windows.group_k % (8 * config.blocks) == 0 else config.blocks)
    products = windows.steps * config.blocks
    rounding = OF_LDMATRIX * reads if problem.dtype == "float32" else 0
    issued = (reads + products) * 1.2 + rounding + windows.phases * (speeds.beside + speeds.block * config.blocks)
    each = m_tiles * along * max(issued / 4, 4 * reads, products * 4096 / flops)
    latency = speeds.latency * issued + speeds.product * windows.steps
    computed = max(together * each, ceil_div(m_tiles * along, config.warps) * latency)
    height, width = config.pixels(windows)
    image = (problem.p, problem.q) if problem.op == "dgrad" else (problem.h, problem.w)
    moved = sectors(problem, config.channels(windows), height, width, image=image) + _written(problem, config, windows)
    memory = together * speeds.cached * moved * target.multiprocessors / target.bytes_per_cycle
    time = rounds * (overlapped(memory, computed, speeds.lesser) + speeds.tile) + speeds.start
    time += speeds.step * products * config.warps * together
    return max(time, speeds.memory * problem.bytes / target.bytes_per_cycle)
