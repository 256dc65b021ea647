"""Implicit GEMM on tensor cores for float16 and bfloat16 in NCHW, from windows in shared memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import ClassVar

from leanconv.dtypes import DTYPES, item_bytes
from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, single_parts
from leanconv.kernels.contract import (
    LAUNCH_CYCLES,
    Arithmetic,
    Config,
    TimedAlgorithm,
    by_time,
    ceil_div,
    has_wide_tensors,
    variant,
)
from leanconv.kernels.hopper_fp32.tensor_gemm import wgmma_limits
from leanconv.kernels.simt.tiles import conv_arguments, gradient_limits, view_constants
from leanconv.options import Precision
from leanconv.plan import Launch, Plan, Pointer, Target, TensorMap, in_chain
from leanconv.problem import ConvProblem

#: Channels that a product takes.
DEPTH = 16
#: Channels of a window, at most, and the stages of the rings of windows and of filters, at least and at most.
MOST_CHUNK, LEAST_STAGES, MOST_STAGES = 64, 3, 8
#: Registers of consumers and of producers, by the warpgroups of producers and the sums of a consumer's thread.
REGISTERS = {(1, 128): (192, 120), (2, 128): (184, 72), (2, 64): (136, 120)}
#: The same of consumers and one warpgroup of producers that copies windows; pixels of a channel that a copy brings, and
#: a number of them that lies aligned.
COPYING, COPIED, ALIGNED = (240, 24), 64, 8
#: What the kernel counts in an int: pixels, with the zeros between them, and tiles.
MOST = 2**31 - 2**20
#: Outputs of a filter that lie side by side in shared memory.
PITCH = 72
#: Threads of the launch that rearranges filters.
THREADS = 256
#: Taps whose lines are kept in shared memory, and the stride whose planes the compiler counts.
MOST_TAPS, MOST_STRIDE = 4096, 64


@dataclass(frozen=True)
class WindowConfig(Config):
    """A tile has ``blocks`` x 64 pixels for each of ``warpgroups`` consumers, and ``filters``. ``producers`` warpgroups
    load them.

    The ring of ``windows`` holds ``chunk`` channels of the pixels that a tile sees, that of ``stages`` as many channels
    of one tap of its filters. Windows may be ``copied`` as they lie in memory.
    """

    warpgroups: int
    blocks: int
    filters: int
    chunk: int
    windows: int
    stages: int
    producers: int
    consumer_registers: int
    producer_registers: int
    copied: bool = False

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and the producers."""
        return 128 * (self.warpgroups + self.producers)

    @property
    def pixels(self) -> int:
        """Pixels of a tile."""
        return 64 * self.warpgroups * self.blocks

    @property
    def filter_bytes(self) -> int:
        """Bytes of a stage of filters."""
        return 2 * self.chunk * self.filters

    def lines(self, problem: ConvProblem) -> int:
        """Pixels of a window."""
        return self.pixels if self.copied else window_lines(problem, self.pixels)

    def image_pixels(self, problem: ConvProblem) -> int:
        """Numbers of an image."""
        return ceil_div(problem.w, COPIED) * COPIED if self.copied else image_pixels(problem)

    def shared_bytes(self, part: PartialConvolution) -> int:
        """Shared memory of a block: both rings, where taps begin, what outputs are turned around in, barriers."""
        problem = part.problem
        windows = self.windows * 2 * self.chunk * self.lines(problem)
        table = 16 * ceil_div(4 * problem.r * problem.s, 16)
        outputs = self.warpgroups * 2 * PITCH * min(self.filters, 64) if part.whole else 0
        return windows + self.stages * self.filter_bytes + table + outputs + 16 * (self.windows + self.stages)


#: A tile: warpgroups, blocks of 64 pixels of each, filters.
Tile = tuple[int, int, int]
TILES: tuple[Tile, ...] = ((2, 1, 256), (2, 2, 128), (2, 1, 128), (2, 2, 64), (2, 1, 64), (2, 1, 32))
#: The times below were fitted together to 60 pairs of a layer and a tile (burst, H200), all but two within a fifth.
#: Cycles of a stage: a share of those that the tensor cores take at full speed, and more.
OF_STAGE = (0.94, 220)
#: Cycles in which a warp loads and stores what it holds at once, and more for each register that holds it.
OF_UNIT = (350, 43)
#: Bytes of copied windows in a cycle.
COPIED_PER_CYCLE = 32
#: Cycles of a tile beside its stages, and more for each filter of 64 pixels.
OF_TILE = (1180, 9)
#: Cycles before the first tile of a launch; of preparing filters, and bytes of them in a cycle.
FIRST_CYCLES, PREPARE_CYCLES, PREPARED_PER_CYCLE = 8000, 4500, 540


@dataclass(frozen=True)
class _Axis:
    """How pixels of an axis are numbered (``WindowAxis`` of the kernels): those of one plane for each phase of the
    stride that a tap meets, ``pitch`` of each, of which taps of a plane are ``reach`` apart at most."""

    planes: int
    pitch: int
    reach: int


@lru_cache(maxsize=1024)
def _axis(taps: int, stride: int, dilation: int, pad: int, extent: int, outputs: int) -> _Axis:
    """The numbers of an axis."""
    planes: dict[int, list[int]] = {}
    for tap in range(taps):
        moved, plane = divmod(tap * dilation - pad, stride)
        planes.setdefault(plane, []).append(moved)
    pitch = outputs
    for plane, moves in planes.items():
        pixels = max(0, ceil_div(extent - plane, stride))
        pitch = max(pitch, pixels + max(0, -min(moves), outputs + max(moves) - pixels))
    return _Axis(len(planes), pitch, max(max(moves) - min(moves) for moves in planes.values()))


def _axes(problem: ConvProblem) -> tuple[_Axis, _Axis]:
    """Rows and columns of a forward convolution."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    rows = _axis(problem.r, sh, dh, top, problem.h, problem.p)
    return rows, _axis(problem.s, sw, dw, left, problem.w, problem.q)


def window_lines(problem: ConvProblem, pixels: int) -> int:
    """Pixels of all planes that the taps of a tile see, and one more (``PixelWindows`` of the kernels)."""
    rows, columns = _axes(problem)
    return rows.planes * columns.planes * (pixels + rows.reach * columns.pitch + columns.reach) + 1


def image_pixels(problem: ConvProblem) -> int:
    """Numbers of an image: its outputs, and the zeros that windows see beside it."""
    rows, columns = _axes(problem)
    return rows.pitch * columns.pitch


def _parts(problem: ConvProblem) -> list[PartialConvolution]:
    """The convolutions of a call. Where each output sees the pixel of its own place, an image is one row of pixels."""
    return [_flat(part) for part in single_parts(problem)]


def _flat(part: PartialConvolution) -> PartialConvolution:
    """The part with its images as rows, if it can be."""
    problem = part.problem
    alone = (problem.r, problem.s, problem.stride, problem.padding) == (1, 1, (1, 1), (0, 0, 0, 0))
    if not (alone and part.whole):
        return part
    pixels = problem.h * problem.w
    return replace(part, problem=replace(problem, h=1, w=pixels), view=replace(part.view, out_h=1, out_w=pixels))


def _can_copy(part: PartialConvolution) -> bool:
    """Whether tensor copies can bring windows as they lie: of one tap, aligned images, channels of one group."""
    problem = part.problem
    one_row = part.whole and (problem.h, problem.r, problem.s, problem.stride) == (1, 1, 1, (1, 1))
    aligned = problem.padding == (0, 0, 0, 0) and problem.w % ALIGNED == 0
    return one_row and aligned and (problem.groups == 1 or problem.group_c % DEPTH == 0)


def _tiles_for(problem: ConvProblem) -> list[Tile]:
    """Those tiles of which half has not room for all filters.

    NOTE: blocks of two sixty-fours that add to the output would spill registers.
    """
    filters = (problem.group_c if problem.op == "dgrad" else problem.group_k) - 1
    fitting = [tile for tile in TILES if filters >= tile[2] // 2 or tile == TILES[-1]]
    return [tile for tile in fitting if tile[1] == 1 or not problem.accumulate]


def _rounded(channels: int) -> int:
    """Channels, rounded up to those of whole products."""
    return ceil_div(channels, DEPTH) * DEPTH


def _filter_bytes(problem: ConvProblem, filters: int) -> int:
    """Bytes of the prepared filters of a forward convolution, in tiles of ``filters`` (``WindowFilters``)."""
    rounded = ceil_div(problem.group_k, filters) * filters
    return 2 * problem.groups * problem.r * problem.s * _rounded(problem.group_c) * rounded


def _producers(tile: Tile) -> tuple[int, int, int]:
    """Warpgroups of producers, and registers of consumers and producers.

    Two, unless a product of 64 pixels has 256 filters: ptxas lets it have the 128 registers that a thread of 512 begins
    with, and it needs 154.
    """
    _, blocks, filters = tile
    producers = 1 if filters > 128 else 2
    return producers, *REGISTERS[producers, 128 if blocks * filters > 128 else 64]


def unit_cycles(lines: int, eights: int, neighbours: int, registers: int, of_unit: tuple[float, float]) -> float:
    """Cycles of a warp to load ``lines`` pixels of so many ``eights`` of channels, ``neighbours`` at once, as
    ``WindowUnit`` of the kernels does. ``of_unit`` are those of a unit, and of each register that holds it."""
    at_once = 1 if registers < 100 else gcd(eights, 2 if neighbours == 4 else 4)
    units = lines / neighbours * eights / at_once / 32
    return units * (of_unit[0] + of_unit[1] * at_once * 8 * max(1, neighbours // 2))


def _load_cycles(problem: ConvProblem, config: WindowConfig) -> float:
    """Cycles in which a window is copied, or the warps that load fill it (``WindowUnit`` of the kernels)."""
    if config.copied:
        return 2 * config.chunk * config.pixels / COPIED_PER_CYCLE
    neighbours = gcd(problem.w, 4) if problem.stride[1] == 1 else 1
    lines, warps = config.lines(problem), 4 * config.producers - 1
    return unit_cycles(lines, config.chunk // 8, neighbours, config.producer_registers, OF_UNIT) / warps


def _tiles(problem: ConvProblem, config: WindowConfig) -> int:
    """Tiles of a launch."""
    of_pixels = ceil_div(problem.n * config.image_pixels(problem), config.pixels)
    return of_pixels * ceil_div(problem.group_k, config.filters) * problem.groups


def window_limits(problem: ConvProblem, reasons: list[str]) -> list[str]:
    """Why the pixels of ``problem`` cannot be numbered, beside other ``reasons``."""
    layout = [f"layout={problem.layout!r} is not NCHW"] if problem.layout != "NCHW" else []
    images = [f"n={problem.n}: there are no images"] if problem.n < 1 else []
    stride = [f"stride={problem.stride} is more than {MOST_STRIDE}"] if max(problem.stride) > MOST_STRIDE else []
    return [*reasons, *layout, *images] or stride


def count_limits(problem: ConvProblem, image: int, lines: int) -> list[str]:
    """Why an int cannot count the pixels of ``problem``, ``image`` of each image, of which windows see ``lines``."""
    # with those of three images, which windows of the first and the last tile may be counted in
    many = (problem.n + 3) * image + lines > MOST
    return [f"n={problem.n}: with the zeros between them, images have more than {MOST} pixels"] if many else []


class NativeGemmNchw(TimedAlgorithm):
    """Direct convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW.

    Each pixel that a tile's windows see is loaded once for all taps, and turned around on its way to shared memory.
    """

    name = "native_gemm_nchw"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Lu et al., im2win (2023)"
    tier: ClassVar[Precision] = "fp32"
    solves = "conv2d"
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = window_limits(problem, [*gradient_limits(problem, self.dtypes), *wgmma_limits(target)])
        if reasons:
            return reasons
        parts = _parts(problem)
        for part in (each.problem for each in parts):
            image = ceil_div(image_pixels(part), COPIED) * COPIED
            if many := count_limits(problem, image, window_lines(part, 256)):
                return many
            if ceil_div(problem.n * image, 128) * ceil_div(part.group_k, TILES[-1][2]) * part.groups > MOST:
                return [f"n={problem.n}: outputs are more than {MOST} tiles"]
            if part.r * part.s > MOST_TAPS:
                return [f"filters have {part.r * part.s} taps, more than {MOST_TAPS}"]
        if parts and not any(self._fitting(tile, parts, target) for tile in _tiles_for(problem)):
            lines = max(window_lines(part.problem, 128) for part in parts)
            return [
                f"windows of 128 outputs see {lines} pixels: two times {DEPTH} channels of them and the filters take "
                f"more than the {target.shared_per_block} bytes of shared memory that a block has"
            ]
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def prepared_bytes(self, problem: ConvProblem) -> int:
        parts = _parts(problem)
        tiles = _tiles_for(problem)
        return max(sum(_filter_bytes(part.problem, filters) for part in parts) for _, _, filters in tiles)

    def _fitting(
        self, tile: Tile, parts: list[PartialConvolution], target: Target, copied: bool = False
    ) -> WindowConfig | None:
        """The configuration of a tile: the longest chunks that fit, then the longest rings."""
        channels = _rounded(parts[0].problem.group_c)
        one_tap = all(part.problem.r * part.problem.s == 1 for part in parts)
        producers = (1, *COPYING) if copied else _producers(tile)
        for chunk in range(min(MOST_CHUNK, channels), 0, -DEPTH):
            if channels % chunk:
                continue
            for windows in (8, 6, 5, 4, 3) if copied else (4, 3, 2) if one_tap else (2,):
                bare = WindowConfig(*tile, chunk, windows, 0, *producers, copied)
                left = target.shared_per_block - max(bare.shared_bytes(part) for part in parts)
                stages = min(MOST_STAGES, left // (bare.filter_bytes + 16))
                if stages >= (windows if copied else LEAST_STAGES):
                    return variant(bare, stages=stages)
        return None

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WindowConfig]]:
        parts = _parts(problem)
        if not parts:
            # A layer whose windows see nothing but padding has a gradient of zeros, and nothing to tune.
            tile = TILES[-1]
            return [(0.0, WindowConfig(*tile, DEPTH, 2, LEAST_STAGES, *_producers(tile)))]
        ways = [False, True] if all(_can_copy(part) for part in parts) else [False]
        configs = (self._fitting(tile, parts, target, way) for tile in _tiles_for(problem) for way in ways)
        return by_time((self._cycles(problem, parts, config, target), config) for config in configs if config)

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: WindowConfig, target: Target
    ) -> float:
        time = 0.0
        for part in (each.problem for each in parts):
            full = config.chunk // DEPTH * config.warpgroups * config.blocks * config.filters // 2
            multiplied = part.r * part.s * (OF_STAGE[0] * full + OF_STAGE[1])
            chunks = _rounded(part.group_c) // config.chunk
            of_tile = chunks * max(multiplied, _load_cycles(part, config)) + OF_TILE[0]
            of_tile += OF_TILE[1] * config.blocks * config.filters
            time += ceil_div(_tiles(part, config), target.multiprocessors) * of_tile + FIRST_CYCLES
            time += PREPARE_CYCLES + _filter_bytes(part, config.filters) / PREPARED_PER_CYCLE
        memory = problem.bytes / target.bytes_per_cycle
        return max(time, memory) + min(time, memory) / 8 + LAUNCH_CYCLES

    def order_of_sums(self, problem: ConvProblem, config: WindowConfig) -> Hashable:
        return config.chunk

    def plan(self, problem: ConvProblem, config: WindowConfig, target: Target) -> Plan:
        first, prepare, launches = 0, [], []
        for part in _parts(problem):
            prepare.append(_filter_launch(problem, part, config, first))
            launches.append(self._launch(problem, part, config, first, target))
            first += _filter_bytes(part.problem, config.filters) // item_bytes(problem.dtype)
        gradient = problem.op == "dgrad" and not problem.accumulate
        zeros = input_gradient.zero_launch(problem) if gradient else None
        chain = in_chain((*prepare, *launches, *([zeros] if zeros else [])))
        return Plan(
            chain[len(prepare) :], prepare=chain[: len(prepare)], prepared_bytes=self.prepared_bytes(problem)
        )  # fmt: skip

    def _launch(
        self, problem: ConvProblem, part: PartialConvolution, config: WindowConfig, first: int, target: Target
    ) -> Launch:
        """The launch that computes a part of ``problem`` with prepared filters from element ``first`` on."""
        x, _, *rest = conv_arguments(problem)
        source = _window_map(problem, part.problem, config) if config.copied else x
        constants = view_constants(part.problem, part.view, has_wide_tensors(problem))
        return Launch(
            header="kernels/hopper_native/native_gemm_nchw.cuh",
            function="leanconv::native_gemm_nchw",
            problem=(*constants, ("first_prepared", first)),
            tuning=(*config.constants(), ("lines", config.lines(part.problem)), ("bytes", config.shared_bytes(part))),
            arguments=(source, Pointer("prepared", DTYPES[problem.dtype].ctype), *rest),
            grid=min(_tiles(part.problem, config), target.multiprocessors),
            block=config.threads,
            shared_bytes=config.shared_bytes(part),
        )


def _window_map(problem: ConvProblem, forward: ConvProblem, config: WindowConfig) -> TensorMap:
    """How copies walk over images that are rows: 64 pixels of ``chunk`` channels."""
    row = item_bytes(forward.dtype) * forward.w
    return TensorMap(
        role=problem.operands[0].role,
        element=forward.dtype,
        shape=(forward.w, forward.c, forward.n),
        strides=(row, row * forward.c),
        box=(COPIED, config.chunk, 1),
        swizzle=item_bytes(forward.dtype) * COPIED,
    )


def _filter_launch(problem: ConvProblem, part: PartialConvolution, config: WindowConfig, first: int) -> Launch:
    """The launch that rearranges the filters of a part, to element ``first`` of the prepared ones."""
    element, forward = DTYPES[problem.dtype].ctype, part.problem
    gradient = problem.op == "dgrad"
    taps = dict(input_gradient.mirrored_taps(problem, part)) if gradient else {}
    taps = taps or {"layer_r": forward.r, "layer_s": forward.s}
    names = ("r", "s", "groups", "group_c", "group_k")
    return Launch(
        header="kernels/hopper_native/window_filters.cuh",
        function="leanconv::window_filters",
        problem=(
            ("element", element),
            *((name, getattr(forward, name)) for name in names),
            ("gradient", gradient),
            *(
                (name, taps.get(name, 0))
                for name in ("layer_r", "layer_s", "last_row", "last_column", "apart_h", "apart_w")
            ),
            ("first_prepared", first),
        ),  # fmt: skip
        tuning=(("threads", THREADS), ("filters", config.filters), ("chunk", config.chunk)),
        arguments=(Pointer("w", element), Pointer("prepared", element, written=True)),
        grid=ceil_div(_filter_bytes(forward, config.filters) // 16, THREADS),
        block=THREADS,
    )
