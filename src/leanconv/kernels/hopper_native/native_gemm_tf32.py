"""Implicit GEMM on tensor cores in TF32: float32 whose factors are rounded to 10 digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import distinct_phases
from leanconv.kernels.common.layers import prepared_plan
from leanconv.kernels.contract import Arithmetic, ceil_div
from leanconv.kernels.hopper_native.native_gemm_16bit import NativeConfig, NativeGemm16bit, NativeSpeeds, Tile
from leanconv.plan import Launch, Plan, Pointer, Target
from leanconv.problem import ConvProblem

#: Threads of the launch that rounds filters, four elements each.
THREADS = 256
TILES: tuple[Tile, ...] = (
    (2, 1, 256), (2, 1, 192), (2, 2, 128), (3, 1, 128), (2, 1, 128), (2, 2, 96), (2, 2, 64), (2, 1, 64), (2, 1, 32),
)  # fmt: skip


@dataclass(frozen=True)
class Tf32Config(NativeConfig):
    """Elements of 4 bytes."""

    item: ClassVar[int] = 4
    #: threads keep the pixels of two stages in registers
    max_bytes: ClassVar[int] = 128

    @property
    def max_share(self) -> int:
        return 32 if self.m_tiles == 1 else 16


@dataclass(frozen=True)
class Tf32Speeds(NativeSpeeds):
    """Those of tiles are fitted to 17 layers (burst, H200), for each tile to those whose filters it divides; what all
    tiles share to 78 whole calls of committed results, most of which are predicted within a tenth."""


class NativeGemmTf32(NativeGemm16bit):
    """`NativeGemm16bit` for float32 rounded to TF32; filters are rounded, and rearranged before for a gradient."""

    name = "native_gemm"
    strategy = "tf32"
    precision = "tf32"
    dtypes = ("float32",)
    kind = Tf32Config
    tiles = TILES
    speeds = Tf32Speeds

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "tf32"

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return input_gradient.prepared_bytes(problem)

    def _packings(self, problem: ConvProblem) -> int:
        return 1 + super()._packings(problem)

    def plan(self, problem: ConvProblem, config: NativeConfig, target: Target) -> Plan:
        plan = super().plan(problem, config, target)
        if not distinct_phases(problem):
            return plan
        return prepared_plan((*plan.prepare, _rounding_launch(problem)), plan.launches, plan.prepared_bytes)


def _rounding_launch(problem: ConvProblem) -> Launch:
    """The launch that rounds the filters: those of a gradient in place."""
    elements, in_place = problem.k * problem.group_c * problem.t * problem.r * problem.s, problem.op == "dgrad"
    written = Pointer("prepared", "float", written=True)
    return Launch(
        header="kernels/hopper_native/native_gemm_tf32.cuh",
        function=f"leanconv::round_{'rearranged_' if in_place else ''}filters",
        problem=(("elements", elements),),
        tuning=(("threads", THREADS),),
        arguments=(written,) if in_place else (Pointer("w", "float"), written),
        grid=ceil_div(elements, 4 * THREADS),
        block=THREADS,
    )
