"""Register cache: a small filter over single-channel images, the pixels held in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.algorithms.base import Argument, Config, Constants, GpuAlgorithm, Launch, Plan, Target, ceil_div
from leanconv.problem import FilterProblem

#: Largest filter height and width.
LIMIT = 32
#: Largest image extent: twice it is an int in the border maps.
EXTENT = 2**30

BORDER_TYPES = {
    "constant": "leanconv::ConstantBorder",
    "replicate": "leanconv::ReplicateBorder",
    "reflect": "leanconv::ReflectBorder",
    "reflect101": "leanconv::Reflect101Border",
    "wrap": "leanconv::WrapBorder",
}
ELEMENT_TYPES = {"float32": "float", "int32": "int"}


@dataclass(frozen=True)
class TileConfig(Config):
    """A warp makes ``rows`` rows of 32 * ``columns`` outputs and keeps windows of ``depth`` input rows in registers.

    ``warps`` of them, one below the other, form a block. With ``shuffle`` a lane loads each pixel once and hands it
    to its neighbours by warp shuffle; without, it loads its whole window and L1 serves the overlap.
    """

    rows: int = 3
    columns: int = 4
    depth: int = 4
    warps: int = 4
    shuffle: bool = False
    min_blocks: int = 3


@dataclass(frozen=True)
class WalkConfig(Config):
    """A warp walks down a strip of 32 * ``columns`` outputs with all weights and ``depth`` input rows in registers.

    ``walk`` output rows are a warp's share; it is an argument of the kernel, so it costs no compilation.
    """

    columns: int = 4
    depth: int = 3
    warps: int = 4
    shuffle: bool = False
    min_blocks: int = 4
    walk: int = 32

    def constants(self) -> Constants:
        """All fields but ``walk``."""
        return tuple(c for c in super().constants() if c[0] != "walk")


@dataclass(frozen=True)
class PartialSumsConfig(Config):
    """The published scheme: a warp makes ``rows`` rows of 33 - S outputs, one column a lane."""

    rows: int = 8
    warps: int = 8
    min_blocks: int = 1


RegisterCacheConfig = TileConfig | WalkConfig | PartialSumsConfig


def staging_bytes(problem: FilterProblem, config: TileConfig | WalkConfig) -> int:
    """Shared memory of a block's row buffers, two for each warp."""
    lead = -problem.anchor[1] % 4
    span = 31 * config.columns + 4 * ceil_div(lead + config.columns + problem.kw - 1, 4)
    return 4 * config.warps * 2 * 32 * ceil_div(span, 32)


class RegisterCache(GpuAlgorithm):
    """Direct correlation, FP32 FMAs in direct order or wrapping int32, every border, no workspace."""

    name = "register_cache"
    paper = "P. Chen et al., Pushing the Limits for 2D Convolution Computation on CUDA-enabled GPUs (2018)"
    tier = "ieee"
    solves = FilterProblem

    def why_not(self, problem: FilterProblem) -> list[str]:
        """See GpuAlgorithm."""
        reasons = []
        if problem.dtype not in ELEMENT_TYPES:
            reasons.append(f"dtype={problem.dtype!r} is neither float32 nor int32")
        if not (1 <= problem.kh <= LIMIT and 1 <= problem.kw <= LIMIT):
            reasons.append(f"the filter is {problem.kh}x{problem.kw}, and the limit is {LIMIT}x{LIMIT}")
        elif not (0 <= problem.anchor[0] < problem.kh and 0 <= problem.anchor[1] < problem.kw):
            reasons.append(f"anchor={problem.anchor} lies outside the {problem.kh}x{problem.kw} filter")
        if max(problem.h, problem.w) > EXTENT:
            reasons.append(f"the image is {problem.h}x{problem.w}, and the limit is {EXTENT} rows and columns")
        if problem.border not in BORDER_TYPES:
            reasons.append(f"border={problem.border!r} is none of {', '.join(BORDER_TYPES)}")
        return reasons

    def configs(self, problem: FilterProblem, target: Target) -> Iterator[RegisterCacheConfig]:
        """See GpuAlgorithm."""
        yield TileConfig()

    def plan(self, problem: FilterProblem, config: RegisterCacheConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        element = ELEMENT_TYPES[problem.dtype]
        arguments = [
            Argument(f"const {element}*", "x"),
            Argument(f"const {element}*", "w"),
            Argument(f"{element}*", "y"),
            Argument(element, "value"),
            Argument(element, "delta"),
            Argument("int", "height", problem.h),
            Argument("int", "width", problem.w),
            Argument("long long", "x_pitch", problem.x_pitch),
            Argument("long long", "x_step", problem.x_step),
            Argument("long long", "y_pitch", problem.y_pitch),
            Argument("long long", "y_step", problem.y_step),
        ]
        if isinstance(config, WalkConfig):
            scheme = "walk"
            strips, bands = ceil_div(problem.w, 32 * config.columns), ceil_div(problem.h, config.walk)
            grid = ceil_div(strips * bands * problem.batch, config.warps)
            shared = staging_bytes(problem, config)
            arguments += [Argument("int", "images", problem.batch), Argument("int", "walk", config.walk)]
        else:
            bands = ceil_div(problem.h, config.rows * config.warps)
            if isinstance(config, TileConfig):
                scheme = "tile"
                strips = ceil_div(problem.w, 32 * config.columns)
                shared = 4 * problem.kh * ceil_div(problem.kw, 4) * 4 + staging_bytes(problem, config)
            else:
                scheme = "partial_sums"
                strips = ceil_div(problem.w, 33 - problem.kw)
                shared = 4 * problem.kw * ceil_div(problem.kh, 4) * 4
            grid = strips * bands * problem.batch
        arguments += [Argument("int", "strips", strips), Argument("int", "bands", bands)]
        launch = Launch(
            header="register_cache.cuh",
            function=f"leanconv::register_cache_{scheme}",
            problem=(
                ("element", element),
                ("border", BORDER_TYPES[problem.border]),
                ("r", problem.kh),
                ("s", problem.kw),
                ("anchor_y", problem.anchor[0]),
                ("anchor_x", problem.anchor[1]),
            ),
            tuning=config.constants(),
            arguments=tuple(arguments),
            grid=grid,
            block=32 * config.warps,
            shared_bytes=shared,
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))
