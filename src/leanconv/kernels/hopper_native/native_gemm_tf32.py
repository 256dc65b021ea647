"""Implicit GEMM on tensor cores in TF32: float32 whose factors are rounded to 10 digits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.input_gradient import PartialConvolution, single_parts
from leanconv.kernels.contract import Arithmetic, ceil_div
from leanconv.kernels.hopper_native.native_gemm_16bit import NarrowConfig, NativeGemm16bit, Tile
from leanconv.plan import Launch, Plan, Pointer, Target, in_chain
from leanconv.problem import ConvProblem

#: Threads of the launch that rounds filters, four elements each.
THREADS = 256
#: Cycles that rounding the filters takes beside its bytes.
ROUNDING_CYCLES = 3000
#: The TFLOP/s of each tile's stages, as those of `native_gemm_16bit`: fitted to 17 layers (burst, H200), for each tile
#: to those whose filters it divides; the cycles here and below to 30 other layers, whose times they meet within 27 %.
TILES: dict[Tile, float] = {
    (2, 1, 256): 443,
    (2, 1, 192): 425,
    (2, 2, 128): 398,
    (3, 1, 128): 413,
    (2, 1, 128): 381,
    (2, 2, 96): 354,
    (2, 2, 64): 324,
    (2, 1, 64): 308,
    (2, 1, 32): 217,
}


@dataclass(frozen=True)
class Tf32Config(NarrowConfig):
    """Elements of 4 bytes; outputs are stored from registers."""

    item: ClassVar[int] = 4
    #: threads keep the pixels of two stages in registers
    most_bytes: ClassVar[int] = 128

    @property
    def most_share(self) -> int:
        """Sums that a thread may gather from the blocks of a cluster without spilling registers."""
        return 32 if self.blocks == 1 else 16

    @property
    def fixed_bytes(self) -> int:
        """Shared memory of a block beside its stages: none."""
        return 0


class NativeGemmTf32(NativeGemm16bit):
    """Direct convolution and its input's gradient on tensor cores, float32 rounded to TF32, summed in float32; NHWC.

    Prepared are the filters, rounded; those of a gradient are rearranged before.
    """

    name = "native_gemm"
    strategy = "tf32"
    tier = "tf32"
    dtypes = ("float32",)
    kind = Tf32Config
    tiles = TILES
    fixed_cycles = (4500, 0, 3000)

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "tf32"

    def prepared_bytes(self, problem: ConvProblem) -> int:
        return input_gradient.prepared_bytes(problem)

    def _cycles(
        self, problem: ConvProblem, parts: list[PartialConvolution], config: NarrowConfig, target: Target
    ) -> float:
        rounding = 2 * self.prepared_bytes(problem) / target.bytes_per_cycle + ROUNDING_CYCLES
        return super()._cycles(problem, parts, config, target) + rounding

    def plan(self, problem: ConvProblem, config: NarrowConfig, target: Target) -> Plan:
        plan = super().plan(problem, config, target)
        if not single_parts(problem):
            return plan
        source = "prepared" if problem.op == "dgrad" else "w"
        prepare = (*plan.prepare, _rounding_launch(problem, source))
        chain = in_chain((*prepare, *plan.launches))
        return replace(plan, prepare=chain[: len(prepare)], launches=chain[len(prepare) :])


def _rounding_launch(problem: ConvProblem, source: str) -> Launch:
    """The launch that rounds the filters in ``source``."""
    elements = problem.k * problem.group_c * problem.r * problem.s
    written = Pointer("prepared", "float", written=True)
    return Launch(
        header="kernels/hopper_native/native_gemm_tf32.cuh",
        function="leanconv::round_filters" if source == "w" else "leanconv::round_rearranged_filters",
        problem=(("elements", elements),),
        tuning=(("threads", THREADS),),
        arguments=(Pointer("w", "float"), written) if source == "w" else (written,),
        grid=ceil_div(elements, 4 * THREADS),
        block=THREADS,
    )
