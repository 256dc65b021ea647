"""Implicit GEMM of float16 and bfloat16 on tensor cores by mma.sync, channels last, from sm_80 on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import gcd

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, convolutions_of
from leanconv.kernels.common.layers import (
    FLOATS_16BIT,
    conv_arguments,
    has_wide_tensors,
    limits,
    mma_sync_limits,
    view_constants,
)
from leanconv.kernels.contract import Arithmetic, Config, TimedAlgorithm, by_time, ceil_div
from leanconv.kernels.cost import Speeds, launch_cycles, moved_bytes, overlapped, residual_cycles
from leanconv.plan import Launch, Plan, Target
from leanconv.problem import ConvProblem

#: Channels of a group, or filters, that are few.
FEW = 32
#: Reduction elements of a stage, and bytes of shared memory for each pixel of a tile.
DEPTH, WINDOW_BYTES = 64, 24


@dataclass(frozen=True)
class GemmSyncConfig(Config):
    """A tile has 16 x ``m_tiles`` pixels for each of ``warps_pixels`` rows of warps, and 16 x ``n16s`` filters for each
    of ``warps_k`` columns; ``stages`` of both operands are in shared memory at once."""

    warps_pixels: int
    warps_k: int
    m_tiles: int
    n16s: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_pixels * self.warps_k

    @property
    def pixels(self) -> int:
        return 16 * self.m_tiles * self.warps_pixels

    @property
    def filters(self) -> int:
        return 16 * self.n16s * self.warps_k

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: the stages, and the windows of a tile's pixels."""
        return self.stages * (self.pixels + self.filters) * 2 * DEPTH + WINDOW_BYTES * self.pixels

    @property
    def order(self) -> Hashable:
        return ()


#: A tile: rows and columns of warps, 16 pixels and 16 filters of a warp, and the CTAs on a multiprocessor for which
#: registers are shared out where copies go to shared memory by themselves and where they pass registers.
Tile = tuple[int, int, int, int, int, int]
TILES: tuple[Tile, ...] = (
    (4, 2, 2, 4, 2, 1),
    (2, 4, 4, 4, 1, 1),
    (4, 2, 2, 3, 2, 1),
    (4, 2, 2, 2, 2, 2),
    (2, 2, 2, 2, 3, 3),
    (4, 1, 2, 3, 3, 2),
    (4, 1, 2, 2, 3, 3),
)
#: Stages of both operands: cp.async brings those after the next, registers hold the one after the next.
COPIED_STAGES, HELD_STAGES = 3, 2


def _config(tile: Tile, held: bool) -> GemmSyncConfig:
    warps_pixels, warps_k, m_tiles, n16s, *blocks = tile
    return GemmSyncConfig(warps_pixels, warps_k, m_tiles, n16s, HELD_STAGES if held else COPIED_STAGES, blocks[held])


@dataclass(frozen=True)
class GemmSyncSpeeds(Speeds):
    """Cycles of a multiprocessor. Fitted to 184 times of 30 layers, seven tiles each. Explored (H200, 2026-11-28,
    revision 81bb595): predictions miss these by 13 % (standard deviation)."""

    #: the most flops of a product in a cycle, and the share of slower tensor cores that is assumed elsewhere
    max_flops: float
    share: float
    #: a warp's loads of 16, 8, 4 and 2 bytes
    loaded: tuple[float, float, float, float]
    #: a step of a tile beside all that
    step: float
    #: storing an output, where four filters are neighbours, two, and none
    stored: tuple[float, float, float]
    #: a call, and packing filters before it
    start: float
    packing: float
    #: the share of the lesser of computing and memory that the greater does not hide
    not_hidden: float
    #: how much longer a tile takes without other CTAs on its multiprocessor
    alone: float
    #: the share of the memory's speed at which residuals come
    residual: float
    #: predicted times of groups of few channels are multiplied by this: what is made for them was quicker on both
    #: layers measured. Explored (H200, 2026-11-28, revision 81bb595): by 21 and 33 %.
    few: float


def aligned_in(run: int) -> int:
    """How many neighbours, eight at most, lie aligned in runs of ``run`` elements: a load brings them at once."""
    return gcd(run, 8)


def load_cycles(rows: int, run: int, loaded: Sequence[float]) -> float:
    """Clock cycles in which a step's elements of ``rows`` pixels or filters are loaded, which come in runs of ``run``;
    ``loaded``: a warp's loads of 16, 8, 4 and 2 bytes."""
    at_once = aligned_in(run)
    return rows * DEPTH / at_once / 32 * loaded[(8, 4, 2, 1).index(at_once)]


def sync_why_not(problem: ConvProblem, target: Target, *ops: str) -> list[str]:
    """Why kernels that load 16 bits in NHWC and multiply by mma.sync cannot compute ``ops``."""
    reasons = [*limits(problem, *ops, dtypes=FLOATS_16BIT), *mma_sync_limits(target)]
    if problem.layout != "NHWC":
        reasons.append(f"layout={problem.layout!r} is not NHWC: the channels of a pixel are no run of memory")
    return reasons


class NativeGemmSync(TimedAlgorithm):
    """Direct convolution and its input's gradient on tensor cores, float16 or bfloat16 summed in float32; NHWC."""

    name = "native_gemm"
    strategy = "sync"
    paper = "S. Markidis et al., NVIDIA tensor core programmability (2018); S. Chetlur et al., cuDNN (2014)"
    precision = "fp32"
    volumes = True
    writes_phases = True

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        return sync_why_not(problem, target, "fprop", "dgrad")

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "fp16"

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return input_gradient.prepared_bytes(problem) if problem.op == "dgrad" else 0

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, GemmSyncConfig]]:
        parts = convolutions_of(problem)
        configs = (_config(tile, bool(parts) and aligned_in(parts[0].problem.group_c) < 8) for tile in TILES)
        fitting = (config for config in configs if config.shared_bytes <= target.shared_per_block)
        return by_time((self._cycles(problem, parts, config, target), config) for config in fitting)

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: GemmSyncConfig, target: Target
    ) -> float:
        speeds = GemmSyncSpeeds.of(target)
        flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
        # each CTA takes a KiB more than it asks for
        fit = max(1, min(config.min_blocks, target.shared_per_multiprocessor // (config.shared_bytes + 1024)))
        outputs, time = config.pixels * config.filters, 0.0
        for part in parts:
            layer = part.problem
            loads = load_cycles(config.pixels + config.filters, layer.group_c, speeds.loaded)
            step = 2 * outputs * DEPTH / flops + loads + speeds.step
            apart = (layer.group_k % 4 > 0) + layer.group_k % 2
            tile = ceil_div(part.reduction, DEPTH) * step + outputs * speeds.stored[apart]
            full, rest = divmod(_tiles(part, config), target.multiprocessors * fit)
            last = ceil_div(rest, target.multiprocessors)
            rounds = full * fit + (last + speeds.alone * (fit - last) / fit if rest else 0)
            time += rounds * tile + (launch_cycles(target) if part is not parts[0] else 0)
        time = overlapped(time, moved_bytes(problem) / target.bytes_per_cycle, speeds.not_hidden) + speeds.start
        if problem.op == "dgrad":
            time += speeds.packing + 2 * self.prepared_bytes(problem) / target.bytes_per_cycle
        few = problem.groups > 1 and max(problem.group_c, problem.group_k) <= FEW
        return time * (speeds.few if few else 1) + residual_cycles(problem, speeds.residual, target)

    def plan(self, problem: ConvProblem, config: GemmSyncConfig, target: Target) -> Plan:
        launches = [self._launch(problem, part, config) for part in convolutions_of(problem)]
        if problem.op == "fprop":
            return Plan(tuple(launches))
        return Plan(
            (*launches, *input_gradient.zero_launches(problem)),
            prepare=(input_gradient.filter_launch(problem),) if launches else (),
            prepared_bytes=self.prepared_bytes(problem),
        )

    def _launch(self, problem: ConvProblem, part: PartialConvolution, config: GemmSyncConfig) -> Launch:
        constants = view_constants(part.problem, part.view, has_wide_tensors(problem))
        arguments = conv_arguments(problem, filters="prepared" if problem.op == "dgrad" else "w")
        return self.launch(config, constants, arguments, _tiles(part, config), config.shared_bytes)


def _tiles(part: PartialConvolution, config: GemmSyncConfig) -> int:
    layer = part.problem
    filters = ceil_div(layer.group_k, config.filters) * layer.groups * part.phases
    return ceil_div(part.pixels, config.pixels) * filters
