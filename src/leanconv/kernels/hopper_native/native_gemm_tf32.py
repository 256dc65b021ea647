"""Implicit GEMM on tensor cores in TF32: float32 whose factors are rounded to 10 digits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.layers import prepared_plan
from leanconv.kernels.common.tensor_core_gemm import REGISTERS
from leanconv.kernels.contract import Arithmetic, ceil_div, variant
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
    """Elements of 4 bytes. With ``in_place`` the producer's other warps round the filters of each stage where they lie;
    else a launch has rounded all of them before."""

    item: ClassVar[int] = 4
    #: threads keep the pixels of two stages in registers
    max_bytes: ClassVar[int] = 128

    in_place: bool = False

    @property
    def max_share(self) -> int:
        return 16 if self.m_tiles > 1 or (self.in_place and self.filters == 256) else 32

    @property
    def shared_bytes(self) -> int:
        """With a third barrier a stage where filters are rounded in it."""
        return super().shared_bytes + 8 * self.stages * self.in_place


@dataclass(frozen=True)
class Tf32Speeds(NativeSpeeds):
    """Those of tiles are fitted to 17 layers (burst, H200), for each tile to those whose filters it divides. What all
    tiles share is fitted to 76 whole calls of committed results and to 307 times of 35 layers, most of one image, in up
    to nine configurations (explored, H200, d3aced4d)."""

    #: cycles that a stage takes longer where its filters are rounded in place: each one, and each 128 bytes of them
    rounded: tuple[float, float]


class NativeGemmTf32(NativeGemm16bit):
    """`NativeGemm16bit` for float32 rounded to TF32. A launch rounds filters, or each CTA those that it reads; for
    a gradient they are rearranged before."""

    name = "native_gemm"
    strategy = "tf32"
    precision = "tf32"
    dtypes = ("float32",)
    kind = Tf32Config
    tiles = TILES
    speeds = Tf32Speeds

    def arithmetic(self, problem: ConvProblem) -> Arithmetic:
        return "tf32"

    def _joins_phases(self, problem: ConvProblem) -> bool:
        return problem.op == "dgrad"

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        as_they_lie = problem.op == "fprop" and (config is None or _is_in_place(config))
        return 0 if as_they_lie else input_gradient.prepared_bytes(problem)

    def optional_bytes(self, problem: ConvProblem) -> int:
        return input_gradient.prepared_bytes(problem) - self.prepared_bytes(problem)

    def counted_bytes(self, problem: ConvProblem, config: NativeConfig) -> int:
        return self.prepared_bytes(problem, config) - self.prepared_bytes(problem)

    def _ways(self, problem: ConvProblem, config: NativeConfig, room: int) -> Iterable[NativeConfig]:
        # these would spill registers: two tiles of 128 filters of which many CTAs have a share; in a launch of several
        # phases the sums that a cluster adds up, so many or beside what three consumers add, and 32 filters added to dx
        if config.split >= 8 and config.m_tiles > 1 and config.filters == 128:
            return
        if self._in_one_launch(problem) and (
            (
                config.split > 1
                and (config.filters == 256 or (config.warpgroups == 3 and (problem.accumulate or problem.bias)))
            )
            or (problem.accumulate and config.filters == 32)
        ):
            return
        yield config
        # what rearranges the filters of a gradient rounds them too
        # three consumers would spill registers, and those of many sums that also add residuals
        if (
            problem.op == "fprop"
            and config.warpgroups == 2
            and not (problem.add and (config.m_tiles > 1 or config.sums > 96))
        ):
            consumer, producer = REGISTERS[2, False]
            here = variant(config, in_place=True, consumer_registers=consumer, producer_registers=producer)
            if here.shared_bytes <= room and (here.split == 1 or here.sums // here.split <= here.max_share):
                yield here

    def for_kept_filters(self, config: NativeConfig | None) -> NativeConfig | None:
        """Rounded once, filters need not be rounded in each stage."""
        if not isinstance(config, Tf32Config) or not config.in_place:
            return config
        consumer, producer = REGISTERS[config.warpgroups, True]
        return variant(config, in_place=False, consumer_registers=consumer, producer_registers=producer)

    def _stage_cycles(self, config: NativeConfig, speeds: NativeSpeeds, partly: float) -> float:
        cycles = super()._stage_cycles(config, speeds, partly)
        if not _is_in_place(config) or not isinstance(speeds, Tf32Speeds):
            return cycles
        of_stage, of_row = speeds.rounded
        return cycles + of_stage + of_row * config.item * config.depth * config.filters / 128

    def _packings(self, problem: ConvProblem, config: NativeConfig) -> int:
        return int(not _is_in_place(config))

    def _preparing(self, problem: ConvProblem, config: NativeConfig) -> tuple[Launch, ...]:
        return () if problem.op == "fprop" and _is_in_place(config) else self.rounding(problem)

    def rounding(self, problem: ConvProblem) -> tuple[Launch, ...]:
        """The launch that rounds filters, and rearranges those of a gradient."""
        gradient = problem.op == "dgrad"
        return (input_gradient.filter_launch(problem, rounded=True) if gradient else _rounding_launch(problem),)

    def plan(self, problem: ConvProblem, config: NativeConfig, target: Target) -> Plan:
        plan = super().plan(problem, config, target)
        return prepared_plan(plan.prepare, plan.launches, plan.prepared_bytes) if plan.prepare else plan


def _is_in_place(config: object) -> bool:
    return isinstance(config, Tf32Config) and config.in_place


def _rounding_launch(problem: ConvProblem) -> Launch:
    """The launch that rounds the filters of a forward pass."""
    elements = problem.k * problem.group_c * problem.taps
    return Launch(
        header="kernels/hopper_native/native_gemm_tf32.cuh",
        function="leanconv::round_filters",
        problem=(("elements", elements),),
        tuning=(("threads", THREADS),),
        arguments=(Pointer("w", "float"), Pointer("prepared", "float", written=True)),
        grid=ceil_div(elements, 4 * THREADS),
        block=THREADS,
    )
