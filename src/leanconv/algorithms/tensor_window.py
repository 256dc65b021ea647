"""Implicit GEMM on tensor cores for float16 and bfloat16 in NCHW, from windows in shared memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from leanconv.algorithms import input_gradient
from leanconv.algorithms.base import (
    LAUNCH_CYCLES,
    Arithmetic,
    Config,
    TimedAlgorithm,
    by_time,
    ceil_div,
    has_wide_tensors,
    variant,
)
from leanconv.algorithms.input_gradient import PartialConvolution, single_parts
from leanconv.algorithms.tensor_gemm import FLOPS_PER_CYCLE, wgmma_limits
from leanconv.algorithms.tiles import conv_arguments, gradient_limits, view_constants
from leanconv.dtypes import DTYPES, item_bytes
from leanconv.plan import Launch, Plan, Pointer, Target
from leanconv.problem import ConvProblem, Precision

#: Channels that a product takes.
DEPTH = 16
#: Channels of a window, at most, and the stages of the rings of windows and of filters, at least and at most.
MOST_CHUNK, LEAST_STAGES, MOST_STAGES = 64, 3, 8
#: Registers of consumers and of producers, of which there are one or two warpgroups, by the sums of a consumer's thread.
REGISTERS = {(1, 128): (192, 120), (2, 128): (184, 72), (2, 64): (144, 112)}
#: Pixels of all images, with the zeros between them, that the kernel counts.
MOST_PIXELS = 2**31 - 2**20
#: Outputs of a filter that lie side by side in shared memory.
PITCH = 72
#: Threads of the launch that rearranges filters.
THREADS = 256
#: Taps whose lines are kept in shared memory.
MOST_TAPS = 4096


@dataclass(frozen=True)
class WindowConfig(Config):
    """A tile has ``blocks`` x 64 pixels for each of ``warpgroups`` consumers, and ``filters``. ``producers`` warpgroups
    load them.

    The ring of ``windows`` holds ``chunk`` channels of the pixels that a tile sees, that of ``stages`` as many channels
    of one tap of its filters.
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

    def shared_bytes(self, part: PartialConvolution) -> int:
        """Shared memory of a block: both rings, where taps begin, what outputs are turned around in, barriers."""
        problem = part.problem
        windows = self.windows * 2 * self.chunk * window_lines(problem, self.pixels)
        table = 16 * ceil_div(4 * problem.r * problem.s, 16)
        outputs = self.warpgroups * 2 * PITCH * min(self.filters, 64) if part.whole else 0
        return windows + self.stages * self.filter_bytes + table + outputs + 16 * (self.windows + self.stages)


#: A tile: warpgroups, blocks of 64 pixels of each, filters.
Tile = tuple[int, int, int]
#: The TFLOP/s of each tile's stages.
TILES: dict[Tile, float] = {
    (2, 1, 256): 865,
    (2, 2, 128): 865,
    (2, 1, 128): 800,
    (2, 2, 64): 695,
    (2, 1, 64): 600,
    (2, 1, 32): 400,
}
#: Bytes that the producers of a block load in a cycle.
LOADED_PER_CYCLE = 12
#: Cycles of a tile beside its stages, and before the first of a launch.
TILE_CYCLES, FIRST_CYCLES = 4000, 10700


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
    moves: dict[int, list[int]] = {}
    for tap in range(taps):
        moved, plane = divmod(tap * dilation - pad, stride)
        moves.setdefault(plane, []).append(moved)
    pitch = outputs
    for plane, moved in moves.items():
        pixels = max(0, ceil_div(extent - plane, stride))
        pitch = max(pitch, pixels + max(0, -min(moved), outputs + max(moved) - pixels))
    return _Axis(len(moves), pitch, max(max(moved) - min(moved) for moved in moves.values()))


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
    problem = part.problem
    alone = (problem.r, problem.s, problem.stride, problem.padding) == (1, 1, (1, 1), (0, 0, 0, 0))
    if not (alone and part.whole):
        return part
    pixels = problem.h * problem.w
    return replace(
        part, problem=replace(problem, h=1, w=pixels), view=replace(part.view, out_h=1, out_w=pixels)
    )  # fmt: skip


def _rounded(channels: int) -> int:
    """Channels, rounded up to those of whole products."""
    return ceil_div(channels, DEPTH) * DEPTH


def _filter_bytes(problem: ConvProblem, filters: int) -> int:
    """Bytes of the prepared filters of a forward convolution, in tiles of so many (``WindowFilters`` of the kernels)."""
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


def _tiles(problem: ConvProblem, config: WindowConfig) -> int:
    """Tiles of a launch."""
    of_pixels = ceil_div(problem.n * image_pixels(problem), config.pixels)
    return of_pixels * ceil_div(problem.group_k, config.filters) * problem.groups


class TensorWindow(TimedAlgorithm):
    """Direct convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NCHW.

    Each pixel that a tile's windows see is loaded once for all taps, and turned around on its way to shared memory.
    """

    name = "tensor_window"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); the windows of im2win, in shared memory"
    tier: ClassVar[Precision] = "fp32"
    solves = "conv2d"
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = [*gradient_limits(problem, self.dtypes), *wgmma_limits(target)]
        if problem.layout != "NCHW":
            reasons.append(f"layout={problem.layout!r} is not NCHW")
        if problem.n < 1:
            reasons.append(f"n={problem.n}: there are no images")
        if reasons:
            return reasons
        for each in _parts(problem):
            part = each.problem
            if problem.n * image_pixels(part) > MOST_PIXELS:
                return [f"n={problem.n}: with the zeros between them, images have more than {MOST_PIXELS} pixels"]
            if part.r * part.s > MOST_TAPS:
                return [f"filters have {part.r * part.s} taps, more than {MOST_TAPS}"]
            if not any(self._fitting(tile, [each], target) for tile in TILES):
                lines = window_lines(part, 128)
                return [f"windows of 128 outputs see {lines} pixels: two times {DEPTH} channels of them and filters "
                        f"take more than {target.shared_per_block} bytes of shared memory"]  # fmt: skip
        return []

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def prepared_bytes(self, problem: ConvProblem) -> int:
        parts = _parts(problem)
        return max(sum(_filter_bytes(part.problem, filters) for part in parts) for _, _, filters in TILES)

    def _fitting(self, tile: Tile, parts: list[PartialConvolution], target: Target) -> WindowConfig | None:
        """The configuration of a tile: the longest chunks that fit, then the longest rings."""
        channels = _rounded(parts[0].problem.group_c)
        one_tap = all(part.problem.r * part.problem.s == 1 for part in parts)
        for chunk in range(min(MOST_CHUNK, channels), 0, -DEPTH):
            if channels % chunk:
                continue
            for windows in (4, 3, 2) if one_tap else (2,):
                bare = WindowConfig(*tile, chunk, windows, 0, *_producers(tile))
                left = target.shared_per_block - max(bare.shared_bytes(part) for part in parts)
                stages = min(MOST_STAGES, left // (bare.filter_bytes + 16))
                if stages >= LEAST_STAGES:
                    return variant(bare, stages=stages)
        return None

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WindowConfig]]:
        parts = _parts(problem)
        if not parts:
            # A layer whose windows see nothing but padding has a gradient of zeros, and nothing to tune.
            tile = next(iter(TILES))
            return [(0.0, WindowConfig(*tile, DEPTH, 2, LEAST_STAGES, *_producers(tile)))]
        configs = (self._fitting(tile, parts, target) for tile in TILES)
        return by_time((self._cycles(problem, parts, config, target), config) for config in configs if config)

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: WindowConfig, target: Target
    ) -> float:
        speed = TILES[config.warpgroups, config.blocks, config.filters] * FLOPS_PER_CYCLE
        time = 0.0
        for part in (each.problem for each in parts):
            flops = 2 * config.pixels * config.filters * part.r * part.s * config.chunk
            loaded = 2 * config.chunk * window_lines(part, config.pixels)
            chunks = _rounded(part.group_c) // config.chunk
            of_tile = chunks * max(flops / speed, loaded / LOADED_PER_CYCLE) + TILE_CYCLES
            time += ceil_div(_tiles(part, config), target.multiprocessors) * of_tile + FIRST_CYCLES
        memory = problem.bytes / target.bytes_per_cycle
        return max(time, memory) + min(time, memory) / 8 + 2 * LAUNCH_CYCLES

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
        return Plan(
            (*launches, *([zeros] if zeros else [])),
            prepare=tuple(prepare),
            prepared_bytes=self.prepared_bytes(problem),
        )

    def _launch(
        self, problem: ConvProblem, part: PartialConvolution, config: WindowConfig, first: int, target: Target
    ) -> Launch:
        """The launch that computes a part of ``problem`` with prepared filters from element ``first`` on."""
        x, _, *rest = conv_arguments(problem)
        constants = view_constants(part.problem, part.view, has_wide_tensors(problem))
        return Launch(
            header="tensor_window.cuh",
            function="leanconv::tensor_window",
            problem=(*constants, ("first_prepared", first)),
            tuning=(*config.constants(), ("lines", window_lines(part.problem, config.pixels))),
            arguments=(x, Pointer("prepared", DTYPES[problem.dtype].ctype), *rest),
            grid=min(_tiles(part.problem, config), target.multiprocessors),
            block=config.threads,
            shared_bytes=config.shared_bytes(part),
        )


def _filter_launch(problem: ConvProblem, part: PartialConvolution, config: WindowConfig, first: int) -> Launch:
    """The launch that rearranges the filters of a part, to element ``first`` of the prepared ones."""
    element, forward = DTYPES[problem.dtype].ctype, part.problem
    gradient = problem.op == "dgrad"
    taps = dict(input_gradient.mirrored_taps(problem, part)) if gradient else {}
    taps = taps or {"layer_r": forward.r, "layer_s": forward.s}
    names = ("r", "s", "groups", "group_c", "group_k")
    return Launch(
        header="lib/window_filters.cuh",
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
