"""Implicit GEMM on tensor cores by mma.sync, in the accuracy of float32 or of TF32, from sm_80 on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from leanconv.kernels.common.input_gradient import PartialConvolution, distinct_phases
from leanconv.kernels.common.layers import conv_arguments, mma_sync_limits
from leanconv.kernels.common.split_gemm import DEPTH, SplitConfig, SplitGemm, stages_of
from leanconv.kernels.contract import by_time, ceil_div
from leanconv.kernels.cost import Speeds, launch_cycles, residual_cycles
from leanconv.plan import Constants, Launch, Pointer, Target
from leanconv.problem import ConvProblem


@dataclass(frozen=True)
class WarpConfig(SplitConfig):
    """A tile has 32 pixels for each of ``warps``, and ``n_tiles`` x ``mma_n`` filters; ``filter_stages`` n_tiles are in
    shared memory at once, and ``step`` filters are multiplied with at once.

    ``products`` of float16 make one of float32: 3, or 1 at precision tf32. ``rows``: lanes copy four channels of a
    pixel at once, otherwise one. ``channel_block`` channels of one tap are neighbours in the reduction.
    """

    warps: int
    mma_n: int
    n_tiles: int
    products: int
    rows: bool
    channel_block: int
    filter_stages: int
    step: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def pixels(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: a stage of pixels, and the ring of filters."""
        return self.pixels * DEPTH * 4 + self.filter_stages * self.filter_stage_bytes


#: A tile: warps, filters of an MMA tile, MMA tiles, those in shared memory, filters of a partial sum, and the CTAs on a
#: multiprocessor for which registers are shared out.
Tile = tuple[int, int, int, int, int, int]
TILES: tuple[Tile, ...] = (
    (8, 64, 2, 2, 16, 1),
    (4, 32, 4, 2, 16, 2),
    (4, 32, 3, 2, 16, 2),
    (4, 32, 2, 2, 32, 2),
    (4, 32, 1, 2, 16, 3),
)
#: Where registers are short at precision tf32: the tile of 96 filters spills four bytes.
NOT_IN_TF32 = TILES[2]
#: Channels or filters of a group at most whose times in TF32 are measured. Explored (H200, 13330f93): 29 times of suite
#: grouped in both layouts, of which half are within a sixth of the prediction; larger groups take up to 1.7 times as
#: long.
FEW_IN_TF32 = 32


@dataclass(frozen=True)
class SyncSpeeds(Speeds):
    """Fitted to six layers on an H200, at 1.98 GHz, where wgmma is faster."""

    #: cycles of a multiprocessor that copying and converting a pixel of 64 reduction elements takes, as float4 and
    #: element by element
    rows: float
    columns: float
    #: and adding the partial sum of one filter
    promoted: float
    #: the most float16 flops in a cycle that mma.sync reached there, and the share of slower tensor cores that is
    #: assumed elsewhere
    max_flops: float
    share: float
    #: cycles of an output beside the reduction: first copies and stores
    output: float
    #: speed that a CTA alone on a multiprocessor is assumed to have, of that of all that fit
    alone: float
    #: predicted times are multiplied by this where `TensorGemm` runs: it is faster on the large layers measured,
    #: and what is not measured shall not be chosen before it; but for small groups in TF32, which were
    behind: float
    #: the share of the memory's speed at which residuals come: a guess, below that of `TensorGemm`
    residual: float


def _channel_block(channels: int, rows: bool) -> int:
    """Channels of a tap that lie together: as many as leave few zeros; small blocks cost addresses."""
    blocks = (32, 16, 8, 4) if rows else (32, 16, 8, 4, 2, 1)
    return min(blocks, key=lambda block: ceil_div(channels, block) * (block + 1))


@lru_cache(maxsize=256)
def _config(tile: Tile, rows: bool, channel_block: int, products: int) -> WarpConfig:
    warps, mma_n, n_tiles, stages, step, blocks = tile
    return WarpConfig(warps, mma_n, n_tiles, products, rows, channel_block, stages, step, blocks)


class TensorGemmSync(SplitGemm[WarpConfig]):
    """Direct convolution and its input's gradient by ``mma.sync``, each float32 split into two float16."""

    name = "tensor_gemm_sync"
    # with registers for three CTAs or four, tiles of 96 filters spill on sm_100a and sm_120
    preparing_blocks = (1, 2)

    def target_limits(self, target: Target) -> list[str]:
        return mma_sync_limits(target)

    def candidates(self, problem: ConvProblem) -> list[WarpConfig]:
        phases = distinct_phases(problem)
        if not phases:
            return []
        products = 1 if problem.precision == "tf32" else 3
        channels = phases[0].problem.group_c
        rows = problem.layout == "NHWC" and channels % 4 == 0
        channel_block = _channel_block(channels, rows)
        return [_config(tile, rows, channel_block, products) for tile in TILES if products == 3 or tile != NOT_IN_TF32]

    def timed(self, problem: ConvProblem, target: Target) -> list[tuple[float, WarpConfig]]:
        phases = distinct_phases(problem)
        if not phases:
            # A layer whose windows cover nothing but padding has a gradient of zeros, and nothing to tune.
            return [(0.0, _config(TILES[0], False, 1, 3))]
        fitting = (config for config in self.candidates(problem) if config.shared_bytes <= target.shared_per_block)
        return by_time((self._cycles(problem, phases, config, target), config) for config in fitting)

    def _cycles(
        self, problem: ConvProblem, phases: list[PartialConvolution], config: WarpConfig, target: Target
    ) -> float:
        speeds = SyncSpeeds.of(target)
        flops = min(speeds.max_flops, speeds.share * target.tensor_flops)
        pixel = (speeds.rows if config.rows else speeds.columns) + speeds.promoted * config.filters
        pixel += config.products * config.filters * 2 * DEPTH / flops
        # each CTA takes a KiB more than it asks for
        fit = max(1, min(config.min_blocks, target.shared_per_multiprocessor // (config.shared_bytes + 1024)))
        time = 0.0
        for phase in phases:
            stages = stages_of(phase.problem, config.channel_block)
            of_tile = config.pixels * (stages * pixel + speeds.output * config.filters)
            full, rest = divmod(_tiles(phase, config), target.multiprocessors * fit)
            busiest = ceil_div(rest, target.multiprocessors)
            rounds = full * fit + (max(busiest, speeds.alone * fit) if rest else 0)
            time += phase.times * (rounds * of_tile + launch_cycles(target))
        time = max(time, problem.bytes / target.bytes_per_cycle) + 2 * launch_cycles(target)
        time += residual_cycles(problem, speeds.residual, target)
        few = problem.groups > 1 and max(problem.group_c, problem.group_k) <= FEW_IN_TF32
        known = problem.precision == "tf32" and few
        return time * speeds.behind if target.warpgroup_products and not known else time

    def main_launch(
        self, problem: ConvProblem, phase: PartialConvolution, config: WarpConfig, known: Constants, target: Target
    ) -> Launch:
        x, _, *rest = conv_arguments(problem)
        arguments = (x, Pointer("prepared"), *rest)
        return self.launch(config, known, arguments, _tiles(phase, config), config.shared_bytes, config.tuning())


def _tiles(phase: PartialConvolution, config: WarpConfig) -> int:
    filters = ceil_div(phase.problem.group_k, config.filters) * phase.problem.groups
    return ceil_div(phase.pixels, config.pixels) * filters
