"""What decides who computes a layer, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from leanconv.problem import ConvProblem
from leanconv.torch.layers import Operation, Options
from leanconv.torch.report import Line, Report


@dataclass(frozen=True)
class Choice:
    """What was decided for one operation of one layer: the ready call, None where PyTorch computes it."""

    call: Callable[..., Any] | None
    line: Line
    #: what the call computes
    problem: ConvProblem | None = None
    #: counts what PyTorch computes all the same, in CUDA graphs and where PyTorch's dispatcher is asked; None where it
    #: does not
    captured: Line | None = None
    #: of what is left: whether it may be taken outside of CUDA graphs, which is another choice; so nothing is compiled
    #: for it elsewhere
    outside: bool = False
    #: the call on images, that of signals with one row; None where it is no `leanconv.call.gpu_call.GpuCall`
    ready: Any = None


def left_of(choices: Sequence[Choice], mask: Sequence[bool]) -> list[bool]:
    """Which gradients that ``mask`` wants of images, filters and bias PyTorch computes: what is not taken, and with any
    of these that of the bias."""
    by_x, by_w = (wanted and each.call is None for wanted, each in zip(mask, choices, strict=False))
    return [by_x, by_w, (by_x or by_w) and mask[2]]


class Decision(NamedTuple):
    """Who computes an operation."""

    #: the algorithm that takes it; empty where it is left to PyTorch
    name: str
    why: str
    #: clock cycles that leanconv takes, and PyTorch, as far as that has been asked
    ours: float = 0.0
    pytorch: float = 0.0
    #: of what is left: the algorithm that takes it all the same outside of CUDA graphs, without a gradient, where
    #: filters stay packed and the host launches it sooner
    eager: str = ""


class Deciding(Protocol):
    """What `enable` switches on: see `leanconv.torch.patch.Patch`."""

    #: what it has decided before PyTorch's dispatcher: `leanconv.torch.decided.Layers`
    layers: Any

    def choice(self, x: Any, w: Any, bias: Any, given: Any, weight: Any = None, outside: bool = False) -> Choice: ...
    def left_recorded(
        self, x: Any, w: Any, bias: Any, given: Any, mask: Any, weight: Any, captured: bool = False
    ) -> tuple[Line, ...] | None: ...
    def convolution(self, x: Any, w: Any, bias: Any, *given: Any) -> Any: ...
    def backward(self, grad: Any, x: Any, w: Any, bias_sizes: Any, *given: Any) -> Any: ...
    def quick_gradients(self, grad: Any, x: Any, w: Any, given: Any, mask: Any) -> Any: ...
    def problem(self, op: Operation, options: Options, dtype: Any) -> ConvProblem: ...
    def decide(self, weight: Any, problem: ConvProblem, index: int | None) -> Decision: ...
    def choose_anew(self) -> None: ...
    def decide_recorded_anew(self) -> None: ...
    def disable(self) -> None: ...
    def report(self) -> Report: ...


#: what is switched on; the last one decides
active: list[Deciding] = []


def current() -> Deciding | None:
    """What decides now, which another thread may switch off at any time."""
    try:
        return active[-1]
    except IndexError:
        return None
