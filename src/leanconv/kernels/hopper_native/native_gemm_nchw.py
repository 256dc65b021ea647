"""Implicit GEMM on tensor cores for float16 and bfloat16 in NCHW: pixels are transposed once for all taps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.kernels.common import input_gradient, layers
from leanconv.kernels.common.input_gradient import PartialConvolution, distinct_phases, single_phases
from leanconv.kernels.common.layers import conv_arguments, has_wide_tensors, prepared_plan, view_constants
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div, variant
from leanconv.kernels.cost import Speeds, clusters_at_once, overlapped, residual_cycles
from leanconv.kernels.hopper_native.gradient_phases import image_taps, layer_taps, phases_together
from leanconv.plan import Constants, Launch, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Channels of one wgmma.
K16 = 16
#: Channels of a stage, at most, and the stages of the ring of filters, at least and at most.
MAX_BLOCK, MIN_STAGES, MAX_STAGES = 64, 3, 8
#: Registers of consumers and of producers, by the warpgroups of producers and the sums of a consumer's thread.
REGISTERS = {(1, 128): (192, 120), (2, 128): (184, 72), (2, 64): (136, 120)}
#: What the kernel counts in an int: linear pixel indices, and tiles.
MAX_INDEX = 2**31 - 2**20
#: Outputs of a filter that are adjacent in shared memory.
PITCH = 72
#: The launch that packs filters: threads; filters and vectors of channels of a CTA; bytes of shared memory that they
#: take, if fewer of them take less.
THREADS, PACKED, PACKED_BYTES = 256, ((8, 8), (8, 4), (8, 2), (8, 1), (4, 1), (2, 1), (1, 1)), 24 << 10
#: CTAs of a cluster that share a reduction; filters and sums of a thread that each adds up.
SPLITS, LEAST_FILTERS, MOST_SUMS = (2, 4, 8), 16, 32
#: Filters of all phases that one launch computes: their sums take 128 registers of a thread.
MOST_FILTERS = 256
#: Registers of a thread that loads, below which it loads less at once.
FEW_REGISTERS = 100
#: Taps whose offsets lie in shared memory, and the stride whose phases the compiler counts.
MAX_TAPS, MAX_STRIDE = 4096, 64


@dataclass(frozen=True)
class LinearOrder:
    """The linear pixel index of a convolution, in which every tap reads at a constant offset (linear_pixels.cuh).

    A row has ``row_pitch`` indices, an image ``image_rows`` rows. Taps read ``phases`` of the stride, and of each as
    many pixels as outputs and a ``halo`` of others. One more is resident, which no tap reads.
    """

    row_pitch: int
    image_rows: int
    phases: int = 1
    halo: int = 0

    @property
    def image(self) -> int:
        """Indices of an image."""
        return self.row_pitch * self.image_rows

    def resident(self, pixels: int) -> int:
        """Pixels in shared memory that a tile of as many outputs reads."""
        return self.phases * (pixels + self.halo) + 1

    def constants(self, pixels: int) -> Constants:
        """What the kernels know of it."""
        resident = ("phase_pixels", pixels + self.halo), ("pixel_pitch", self.resident(pixels))
        return ("row_pitch", self.row_pitch), ("image_rows", self.image_rows), *resident


def _axis(taps: int, stride: int, dilation: int, pad: int, extent: int, outputs: int) -> tuple[int, int, int]:
    """Of one axis: phases that taps read, the pitch that keeps what they read beyond the ends apart, and how far apart
    taps of a phase are at most."""
    shifts: dict[int, list[int]] = {}
    for tap in range(taps):
        shift, phase = divmod(tap * dilation - pad, stride)
        shifts.setdefault(phase, []).append(shift)
    pitch = outputs
    for phase, of_phase in shifts.items():
        pixels = max(0, ceil_div(extent - phase, stride))
        pitch = max(pitch, pixels + max(0, -min(of_phase), outputs + max(of_phase) - pixels))
    return len(shifts), pitch, max(max(of_phase) - min(of_phase) for of_phase in shifts.values())


@lru_cache(maxsize=1024)
def linear_order(problem: ConvProblem) -> LinearOrder:
    """The order of a forward convolution."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    phases_h, image_rows, reach_h = _axis(problem.r, sh, dh, top, problem.h, problem.p)
    phases_w, row_pitch, reach_w = _axis(problem.s, sw, dw, left, problem.w, problem.q)
    return LinearOrder(row_pitch, image_rows, phases_h * phases_w, reach_h * row_pitch + reach_w)


@dataclass(frozen=True)
class NchwConfig(Config):
    """A tile has ``m_tiles`` x 64 pixels for each of ``warpgroups`` consumers, and ``filters``. ``producers``
    warpgroups load.

    The ring of ``pixel_stages`` has ``channel_block`` channels of the pixels that a tile reads, that of
    ``filter_stages`` as many channels of one tap of its filters. A cluster of ``split`` CTAs shares a reduction.
    Consumers share a tile's pixels, or take ``turns`` (a ping-pong schedule): each has a tile of its own, and
    multiplies while the other one stores.
    """

    warpgroups: int
    m_tiles: int
    filters: int
    channel_block: int
    pixel_stages: int
    filter_stages: int
    producers: int
    consumer_registers: int
    producer_registers: int
    split: int = 1
    turns: bool = False

    @property
    def order(self) -> Hashable:
        return (self.channel_block, self.split) if self.split > 1 else self.channel_block

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + self.producers)

    @property
    def pixels(self) -> int:
        return 64 * self.m_tiles * (1 if self.turns else self.warpgroups)

    @property
    def filter_stage_bytes(self) -> int:
        return 2 * self.channel_block * self.filters

    def layout(self, phase: PartialConvolution) -> Constants:
        """Where in shared memory filters, the offsets of taps, outputs and barriers begin; pixels are first."""
        pixels = self.pixel_stages * 2 * self.channel_block * linear_order(phase.problem).resident(self.pixels)
        taps = pixels + self.filter_stages * self.filter_stage_bytes
        outputs = taps + 16 * ceil_div(4 * image_taps(phase), 16)
        barriers = outputs + (self.warpgroups * 2 * PITCH * min(self.filters, 64) if phase.whole else 0)
        return ("filters_at", pixels), ("taps_at", taps), ("outputs_at", outputs), ("barriers_at", barriers)

    def shared_bytes(self, phase: PartialConvolution) -> int:
        return int(self.layout(phase)[-1][1]) + 16 * (self.pixel_stages + self.filter_stages)


#: A tile: warpgroups, m64 tiles of each, filters.
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = ((2, 1, 256), (2, 2, 128), (2, 1, 128), (2, 2, 64), (2, 1, 64), (2, 1, 32))


@dataclass(frozen=True)
class NchwSpeeds(Speeds):
    """Cycles, fitted together to 203 pairs of a layer and a configuration (burst, H200): 92 of 100 within a fifth."""

    #: of a tap: a share of those that the tensor cores and shared memory take at full speed, and more
    tap: tuple[float, float]
    #: of a stage beside its taps
    stage: float
    #: in which a warp loads and stores what it holds at once, and more for each register that holds it
    unit: tuple[float, float]
    #: the share of the shorter of loading and computing a stage that the longer does not hide
    beside: float
    #: of an output: by all warpgroups together, by warpgroups in turns, and of phases together
    output: tuple[float, float, float]
    #: of the sum over the CTAs of a cluster, for each of them
    split: float
    #: before the first tile of a launch, and of packing filters
    first: float
    pack: float
    #: bytes of packed filters in a cycle
    packed_per_cycle: float
    #: the share of the shorter of computing and memory that the longer does not hide
    not_hidden: float
    #: the share of the memory's speed at which residuals come
    residual: float
    #: how much longer layers in groups are taken to be: the kernel before took as much longer for one of 32 groups, and
    #: this one has not been timed with any
    groups: float


def _parts(
    problem: ConvProblem, apart: Callable[[ConvProblem], list[PartialConvolution]] = distinct_phases
) -> list[PartialConvolution]:
    """What a launch each computes: all phases of a gradient together, where that can be, or those of ``apart``."""
    together = phases_together(problem)
    return [together] if together else [as_row(phase) for phase in apart(problem)]


def as_row(phase: PartialConvolution) -> PartialConvolution:
    """Where each output reads the pixel of its own place alone, an image is one row."""
    problem = phase.problem
    pointwise = (problem.r, problem.s, problem.stride, problem.padding) == (1, 1, (1, 1), (0, 0, 0, 0))
    if phase.volume or not (pointwise and phase.whole):
        return phase
    pixels = problem.h * problem.w
    return replace(phase, problem=replace(problem, h=1, w=pixels), view=replace(phase.view, out_h=1, out_w=pixels))


def _tiles_for(problem: ConvProblem) -> list[Tile]:
    """The tiles whose filters the layer fills by half. Phases together have sums each.

    NOTE: two m64 tiles of a warpgroup that add to the output would spill registers.
    """
    filters = (problem.group_c if problem.op == "dgrad" else problem.group_k) - 1
    fitting = [tile for tile in TILES if filters >= tile[2] // 2 or tile == TILES[-1]]
    if together := phases_together(problem):
        return [tile for tile in fitting if tile[1] == 1 and together.phases * tile[2] <= MOST_FILTERS]
    return [tile for tile in fitting if tile[1] == 1 or not problem.accumulate]


def _rounded(channels: int) -> int:
    """Channels, rounded up to whole k16 steps."""
    return ceil_div(channels, K16) * K16


def _filter_bytes(phase: PartialConvolution, filters: int) -> int:
    """Bytes of the packed filters of a forward convolution, in tiles of ``filters`` (packed_filters.cuh)."""
    problem = phase.problem
    rounded = ceil_div(problem.group_k, filters) * filters
    return 2 * problem.groups * problem.t * image_taps(phase) * _rounded(problem.group_c) * rounded


def _producers(tile: Tile, phases: int) -> tuple[int, int, int]:
    """Warpgroups of producers, and registers of consumers and producers.

    Two, unless a wgmma has 256 filters: ptxas lets it have the 128 registers that a thread of 512 begins with, and it
    needs 154.
    """
    _, m_tiles, filters = tile
    producers = 1 if filters > 128 else 2
    return producers, *REGISTERS[producers, 128 if phases * m_tiles * filters > 128 else 64]


def _neighbours(problem: ConvProblem, registers: int) -> int:
    """Pixels of a row that a lane with so many ``registers`` loads at once: at a stride of two, where taps read both
    phases of columns (a ``wide`` source of transposed_loads.cuh)."""
    both = problem.stride[1] == 2 and problem.s > 1 and problem.dilation[1] % 2 == 1 and problem.w % 2 == 0
    if problem.stride[1] == 1 or (both and registers >= FEW_REGISTERS):
        return gcd(problem.w, 4)
    return 1


def unit_cycles(pixels: int, vectors: int, neighbours: int, registers: int, of_unit: tuple[float, float]) -> float:
    """Cycles of a warp to load ``pixels`` of so many ``vectors`` of channels, ``neighbours`` at once (``PixelUnit`` of
    transposed_loads.cuh). ``of_unit`` are those of what a lane loads together, and of each register that holds it."""
    together = 1 if registers < FEW_REGISTERS else gcd(vectors, 2 if neighbours == 4 else 4)
    units = pixels / neighbours * vectors / together / 32
    return units * (of_unit[0] + of_unit[1] * together * 8 * max(1, neighbours // 2))


def _load_cycles(problem: ConvProblem, config: NchwConfig, speeds: NchwSpeeds) -> float:
    """Cycles in which the warps that load fill a stage of pixels."""
    registers, warps = config.producer_registers, 4 * config.producers - 1
    pixels, neighbours = linear_order(problem).resident(config.pixels), _neighbours(problem, registers)
    return unit_cycles(pixels, config.channel_block // 8, neighbours, registers, speeds.unit) / warps


def _tiles(problem: ConvProblem, config: NchwConfig) -> int:
    of_pixels = ceil_div(problem.n * problem.z * linear_order(problem).image, config.pixels)
    return of_pixels * ceil_div(problem.group_k, config.filters) * problem.groups


def _blocks(problem: ConvProblem, config: NchwConfig) -> int:
    """Stages of pixels of the whole reduction."""
    return problem.t * _rounded(problem.group_c) // config.channel_block


def _turns(tile: Tile, phases: list[PartialConvolution]) -> tuple[bool, ...]:
    """Whether warpgroups may take turns: not where a tile has 64 pixels, whose filters would be copied too often, nor
    where residuals beside the sums would spill registers."""
    spills = phases[0].problem.add and tile[1] * tile[2] > 128
    return (False, True) if tile[1] > 1 and all(phase.whole for phase in phases) and not spills else (False,)


def _with_splits(
    problem: ConvProblem, config: NchwConfig, phases: list[PartialConvolution], target: Target
) -> Iterator[NchwConfig]:
    """The configuration, and with the reduction split over a cluster where tiles leave multiprocessors idle. The rings
    take the sums of a tile."""
    yield config
    rings = min(int(dict(config.layout(phase))["taps_at"]) for phase in phases)
    if phases[0].phases > 1 or config.turns or problem.batch_invariant or 4 * config.pixels * config.filters > rings:
        return
    tiles = max(_tiles(phase.problem, config) for phase in phases)
    blocks = min(_blocks(phase.problem, config) for phase in phases)
    for split in SPLITS:
        filters, shared = config.filters // split, ceil_div(blocks, split) * (split - 1) < blocks
        few = filters >= LEAST_FILTERS and config.m_tiles * filters // 2 <= MOST_SUMS
        if shared and few and tiles * split <= target.multiprocessors:
            yield variant(config, split=split)


def linear_limits(problem: ConvProblem, target: Target, *ops: str) -> list[str]:
    """Why kernels of 16-bit elements that compute ``ops`` over a linear pixel index cannot run ``problem``."""
    reasons = [*layers.limits(problem, *ops, dtypes=layers.FLOATS_16BIT), *layers.wgmma_limits(target)]
    layout = [f"layout={problem.layout!r} is not NCHW"] if problem.layout != "NCHW" else []
    images = [f"n={problem.n}: there are no images"] if problem.n < 1 else []
    stride = [f"stride={problem.stride} is more than {MAX_STRIDE}"] if max(problem.stride) > MAX_STRIDE else []
    return [*reasons, *layout, *images] or stride


def count_limits(problem: ConvProblem, image: int, resident: int) -> list[str]:
    """Why an int cannot count the pixels of ``problem``, ``image`` of each image, of which tiles read ``resident``."""
    # with those of three images, which what the first and the last tile read may be counted in
    many = (problem.n * problem.z + 3) * image + resident > MAX_INDEX
    return [f"n={problem.n}: with the zeros between them, images have more than {MAX_INDEX} pixels"] if many else []


class NativeGemmNchw(TimedAlgorithm):
    """Direct convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW."""

    name = "native_gemm_nchw"
    volumes = True
    writes_phases = True
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Lu et al., im2win (2023)"
    precision = "fp32"

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        if reasons := linear_limits(problem, target, "fprop", "dgrad"):
            return reasons
        phases = _parts(problem)
        for each in phases:
            phase = each.problem
            order = linear_order(phase)
            if many := count_limits(phase, order.image, order.resident(256)):
                return many
            of_pixels = ceil_div(problem.n * phase.z * order.image, 128)
            if of_pixels * ceil_div(phase.group_k, TILES[-1][2]) * phase.groups > MAX_INDEX:
                return [f"n={problem.n}: outputs are more than {MAX_INDEX} tiles"]
            if image_taps(each) > MAX_TAPS:
                return [f"filters have {image_taps(each)} taps, more than {MAX_TAPS}"]
        if phases and not any(self._fitting(tile, phases, target) for tile in _tiles_for(problem)):
            pixels = max(linear_order(phase.problem).resident(128) for phase in phases)
            return [
                f"a tile of 128 outputs reads {pixels} pixels: two times {K16} channels of them and the filters take "
                f"more than the {target.shared_per_block} bytes of shared memory that a block has"
            ]
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def counts_scattered(self, problem: ConvProblem) -> bool:
        return phases_together(problem) is not None

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        phases = _parts(problem)
        return max(sum(phase.times * _filter_bytes(phase, tile[2]) for phase in phases) for tile in _tiles_for(problem))

    def _fitting(
        self, tile: Tile, phases: list[PartialConvolution], target: Target, turns: bool = False
    ) -> NchwConfig | None:
        """The configuration of a tile: the longest channel blocks that fit, then the longest rings."""
        channels = _rounded(phases[0].problem.group_c)
        one_tap = all(image_taps(phase) == 1 for phase in phases)
        for block in range(min(MAX_BLOCK, channels), 0, -K16):
            if channels % block:
                continue
            for pixel_stages in (4, 3, 2) if one_tap or turns or phases[0].phases > 1 else (2,):
                bare = NchwConfig(*tile, block, pixel_stages, 0, *_producers(tile, phases[0].phases), turns=turns)
                left = target.shared_per_block - max(bare.shared_bytes(phase) for phase in phases)
                stages = min(MAX_STAGES, left // (bare.filter_stage_bytes + 16))
                if stages >= MIN_STAGES:
                    return variant(bare, filter_stages=stages)
        return None

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, NchwConfig]]:
        phases = _parts(problem)
        if not phases:
            # A layer whose windows cover nothing but padding has a gradient of zeros, and nothing to tune.
            tile = TILES[-1]
            return [(0.0, NchwConfig(*tile, K16, 2, MIN_STAGES, *_producers(tile, 1)))]
        ways = [(tile, turns) for tile in _tiles_for(problem) for turns in _turns(tile, phases)]
        configs = (self._fitting(tile, phases, target, turns) for tile, turns in ways)
        return by_time(
            (self._cycles(problem, phases, config, target), config)
            for whole in configs
            if whole
            for config in _with_splits(problem, whole, phases, target)
        )

    def _cycles(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: NchwConfig, target: Target
    ) -> float:
        time, speeds = 0.0, NchwSpeeds.of(target)
        # A wgmma of 64 pixels reads them and its filters, 32 bytes each, from shared memory: 128 bytes a cycle.
        of_wgmma = max(config.filters / 2, 16 + config.filters / 4)
        of_tap = config.channel_block // K16 * config.pixels // 64 * of_wgmma
        for each in phases:
            phase = each.problem
            computed = image_taps(each) * (speeds.tap[0] * of_tap + speeds.tap[1]) + speeds.stage
            of_stage = overlapped(computed, _load_cycles(phase, config, speeds), speeds.beside)
            of_tile = ceil_div(_blocks(phase, config), config.split) * of_stage
            output = speeds.output[1 if config.turns else 2 if each.phases > 1 else 0]
            of_tile += output * config.pixels // 64 * config.filters * each.phases / config.split
            tiles = _tiles(phase, config)
            launch = ceil_div(tiles * config.split, target.multiprocessors) * of_tile + speeds.first
            if config.split > 1:
                launch += speeds.split * config.split
            if config.split > 2 and tiles > clusters_at_once(config.split, 1, target):
                launch *= 2  # clusters wait for others
            packing = speeds.pack + _filter_bytes(each, config.filters) / speeds.packed_per_cycle
            time += each.times * (launch + packing)
        time *= speeds.groups if problem.groups > 1 else 1
        memory = problem.bytes / target.bytes_per_cycle
        return overlapped(time, memory, speeds.not_hidden) + residual_cycles(problem, speeds.residual, target)

    def plan(self, problem: ConvProblem, config: NchwConfig, target: Target) -> Plan:
        first, prepare, launches = 0, [], []
        for phase in _parts(problem, single_phases):
            prepare.append(_pack_launch(problem, phase, config, first))
            launches.append(self._launch(problem, phase, config, first, target))
            first += _filter_bytes(phase, config.filters) // item_bytes(problem.dtype)
        launches += input_gradient.zero_launches(problem)
        return prepared_plan(prepare, launches, self.prepared_bytes(problem))

    def _launch(
        self, problem: ConvProblem, phase: PartialConvolution, config: NchwConfig, first: int, target: Target
    ) -> Launch:
        """The launch that computes a phase of ``problem`` with packed filters from element ``first`` on."""
        x, _, *rest = conv_arguments(problem)
        constants = view_constants(phase.problem, phase.view, has_wide_tensors(problem))
        order = linear_order(phase.problem).constants(config.pixels)
        tuning = (*config.constants(), *order, *config.layout(phase))
        arguments = (x, Pointer("prepared", DTYPES[problem.dtype].ctype), *rest)
        tiles = _tiles(phase.problem, config)
        grid = tiles * config.split if config.split > 1 else min(tiles, target.multiprocessors)
        constants = (*constants, ("first_prepared", first), *layer_taps(phase))
        launch = self.launch(config, constants, arguments, grid, config.shared_bytes(phase), tuning)
        return replace(launch, waits=True)


def _pack_launch(problem: ConvProblem, phase: PartialConvolution, config: NchwConfig, first: int) -> Launch:
    """The launch that packs the filters of a phase, to element ``first`` of the packed ones."""
    element, forward, gradient = DTYPES[problem.dtype].ctype, phase.problem, problem.op == "dgrad"
    known = {name: getattr(forward, name) for name in ("r", "s", "groups", "group_c", "group_k")}
    taps = ("layer_r", "layer_s", "last_row", "last_column", "apart_h", "apart_w")
    as_they_lie = zip(taps, (problem.r, problem.s, 0, 0, 0, 0), strict=True)
    one_phase = gradient and phase.phases == 1
    known |= dict(input_gradient.mirrored_taps(problem, phase) if one_phase else as_they_lie)
    if phase.phases > 1:
        known |= dict((*layer_taps(phase), *zip(("phases_h", "phases_w"), phase.view.phases, strict=True)))
    if phase.volume and not gradient:
        known |= {"layer_t": forward.t, "last_slice": 0, "apart_d": 0}
    if phase.volume or problem.is_volume:
        known["t"] = forward.t
    of_channel = problem.taps
    together = next((each for each in PACKED if _packed_bytes(of_channel, gradient, *each) <= PACKED_BYTES), PACKED[-1])
    tuning = ("filters", config.filters), ("channel_block", config.channel_block)
    filters = ceil_div(forward.group_k, config.filters) * config.filters
    return Launch(
        header="kernels/hopper_native/packed_filters.cuh",
        function="leanconv::pack_filters",
        problem=(("element", element), *known.items(), ("gradient", gradient), ("first_prepared", first)),
        tuning=(("threads", THREADS), *zip(("together", "vectors"), together, strict=True), *tuning),
        arguments=(Pointer("w", element), Pointer("prepared", element, written=True)),
        grid=forward.groups * filters // together[0] * ceil_div(_rounded(forward.group_c) // 8, together[1]),
        block=THREADS,
        shared_bytes=_packed_bytes(of_channel, gradient, *together),
    )


def _packed_bytes(taps: int, gradient: bool, filters: int, vectors: int) -> int:
    """Shared memory in which a CTA packs ``filters`` with ``vectors`` of channels (``PackedTogether``)."""
    rows, in_row = (8 * vectors, filters) if gradient else (filters, 8 * vectors)
    return 2 * rows * (ceil_div(in_row * taps, 8) * 8 + 8)
