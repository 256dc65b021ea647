"""Register cache: a small filter over single-channel images, the pixels held in registers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leanconv.algorithms.base import Argument, Config, GpuAlgorithm, Launch, Plan, Target, ceil_div
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
class RegisterCacheConfig(Config):
    """A warp makes ``rows`` rows of 32 * ``columns`` outputs and keeps windows of ``depth`` input rows in registers.

    ``warps`` of them, one below the other, form a block. With ``shuffle`` a lane loads each pixel once and hands it
    to its neighbours by warp shuffle; without, it loads its whole window and L1 serves the overlap.
    """

    rows: int = 4
    columns: int = 4
    depth: int = 5
    warps: int = 4
    shuffle: bool = False
    min_blocks: int = 1


def shared_bytes(problem: FilterProblem, config: RegisterCacheConfig) -> int:
    """Shared memory of a block: the filter with rows of whole vectors, and two row buffers for each warp."""
    weights = problem.kh * ceil_div(problem.kw, 4) * 4
    lead = -problem.anchor[1] % 4
    span = 31 * config.columns + 4 * ceil_div(lead + config.columns + problem.kw - 1, 4)
    return 4 * (weights + config.warps * 2 * 32 * ceil_div(span, 32))


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
        yield RegisterCacheConfig()

    def plan(self, problem: FilterProblem, config: RegisterCacheConfig, target: Target) -> Plan:
        """See GpuAlgorithm."""
        strips = ceil_div(problem.w, 32 * config.columns)
        bands = ceil_div(problem.h, config.rows * config.warps)
        element = ELEMENT_TYPES[problem.dtype]
        launch = Launch(
            header="register_cache.cuh",
            function="leanconv::register_cache",
            problem=(
                ("element", element),
                ("border", BORDER_TYPES[problem.border]),
                ("r", problem.kh),
                ("s", problem.kw),
                ("anchor_y", problem.anchor[0]),
                ("anchor_x", problem.anchor[1]),
            ),
            tuning=config.constants(),
            arguments=(
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
                Argument("int", "strips", strips),
                Argument("int", "bands", bands),
            ),
            grid=strips * bands * problem.batch,
            block=32 * config.warps,
            shared_bytes=shared_bytes(problem, config),
            min_blocks=config.min_blocks,
        )
        return Plan((launch,))
