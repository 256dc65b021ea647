"""Implicit GEMM on tensor cores in TF32, whose taps all read one copy of the pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leanconv.kernels.common import input_gradient
from leanconv.kernels.common.layers import prepared_plan
from leanconv.kernels.hopper_native.native_gemm_tf32 import NativeGemmTf32
from leanconv.kernels.hopper_native.native_gemm_window import NativeGemmWindow, WindowConfig, WindowSpeeds
from leanconv.plan import Plan, Target
from leanconv.problem import ConvProblem

#: Channels and filters of a group, at most. Explored (H200, be2fb28d): groups of 32 took 33.6 us and in
#: native_gemm_tf32 38.1, of 64 61.6 and in tensor_winograd 53.5.
MOST_OF_GROUP = 32


@dataclass(frozen=True)
class WindowTf32Config(WindowConfig):
    """Elements of 4 bytes, which the producer's other warps round in the windows."""

    item: ClassVar[int] = 4
    rounds: ClassVar[bool] = True


@dataclass(frozen=True)
class WindowTf32Speeds(WindowSpeeds):
    """Fitted to 328 times of 52 layers and gradients (explored, H200, be2fb28d with this kernel); what rounding takes
    to two of one layer of 3 x 1 taps."""

    #: cycles of rounding a window, and of each 16 bytes of it
    rounding: tuple[float, float]


class NativeGemmWindowTf32(NativeGemmWindow):
    """`NativeGemmWindow` for float32 rounded to TF32. A launch rounds filters, and rearranges those of a gradient."""

    strategy = "window_tf32"
    precision = "tf32"
    other = NativeGemmTf32()
    kind = WindowTf32Config
    speeds = WindowTf32Speeds

    def why_not(self, problem: ConvProblem, target: Target) -> list[str]:
        reasons = super().why_not(problem, target)
        if not reasons and problem.groups > 1 and max(problem.group_c, problem.group_k) > MOST_OF_GROUP:
            reasons.append(f"groups={problem.groups}: more than {MOST_OF_GROUP} channels or filters of each")
        return reasons

    def prepared_bytes(self, problem: ConvProblem, config: object = None) -> int:
        return input_gradient.prepared_bytes(problem)

    def _rounding(self, config: WindowConfig, layer: ConvProblem, target: Target) -> float:
        of_window, of_vector = WindowTf32Speeds.of(target).rounding
        return of_window + of_vector * config.window_rows(layer) * config.row_bytes / 16

    def plan(self, problem: ConvProblem, config: WindowConfig, target: Target) -> Plan:
        plan = super().plan(problem, config, target)
        return prepared_plan(self.other.rounding(problem), plan.launches, self.prepared_bytes(problem))
