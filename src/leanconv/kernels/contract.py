"""What an algorithm is: a name, a statement of its limits, its tuning numbers, and a plan of launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd, inf
from typing import Any, ClassVar, Literal, TypeVar

from leanconv.dtypes import DTYPES, accumulator, item_bytes, result_of, weights_of
from leanconv.options import PRECISIONS, Layout, Precision
from leanconv.plan import Constants, Plan, Target
from leanconv.problem import ConvProblem, Problem

#: What a GPU multiplies with: FP32 cores, or tensor cores, in three products or one of float16 for one of float32.
Arithmetic = Literal["fp32", "tf32", "fp16x3", "fp16"]
#: Clock cycles from the end of one launch to the work of the next, and for filling the machine.
LAUNCH_CYCLES = 9000


@dataclass(frozen=True)
class Config:
    """Base of the tuning numbers. Every field becomes a constant of the kernel's ``Tuning`` struct."""

    def constants(self) -> Constants:
        """The fields as compile-time constants, in the order of their declaration."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))


C = TypeVar("C", bound=Config)


@lru_cache(maxsize=4096)
def variant(config: C, **changes: Any) -> C:
    """The configuration with some of its numbers changed; cached, since predicting times needs the same ones again."""
    return replace(config, **changes)


class Algorithm(ABC):
    """What every algorithm states about itself, wherever it runs.

    Several classes may share a name: they are the strategies of one algorithm, and the choice takes the quickest.
    """

    name: ClassVar[str]
    #: what tells a strategy from the others of its algorithm; empty where there is one
    strategy: ClassVar[str] = ""
    #: where the idea comes from, as a reader would cite it
    paper: ClassVar[str]
    #: the precision level it keeps
    tier: ClassVar[Precision]
    #: the kind of problem it solves: ``conv2d`` or ``filter2d``
    solves: ClassVar[str]
    #: what a paper describes and others beat: runs by name, never by ``auto``
    by_name_only: ClassVar[bool] = False

    @property
    def stem(self) -> str:
        """The name of its files, one for each strategy: ``depthwise_row``."""
        return f"{self.name}_{self.strategy}" if self.strategy else self.name

    @property
    def family(self) -> str:
        """The folder of its files in ``kernels``."""
        return type(self).__module__.rpartition(".")[0].rpartition(".")[2]

    def is_called(self, name: str) -> bool:
        """Whether a caller's word means it: ``auto``, the algorithm's name, or its own."""
        return name in ("auto", self.name, self.stem)

    @abstractmethod
    def why_not(self, problem: Any, target: Any) -> list[str]:
        """Sentences that say why it cannot run ``problem`` on ``target``; empty when it can.

        The limits are stated here only. ``target`` is the GPU, or None for the CPU.
        """

    def arithmetic(self, problem: Any) -> Arithmetic:
        """What it multiplies with: the ceiling that its speed is compared with."""
        return "fp32"

    def least_cycles(self, problem: Any, target: Target) -> float:
        """A time on ``target`` that it cannot stay below: it is not asked for more where another algorithm does."""
        return 0.0

    def workspace_bytes(self, problem: Any, config: Any) -> int:
        """Bytes of scratch memory that a configuration takes on ``problem``."""
        return 0

    def prepared_bytes(self, problem: Any) -> int:
        """Bytes of prepared filters, which may be kept between calls; not counted as workspace."""
        return 0

    def reasons(self, problem: Problem, target: Target | None) -> list[str]:
        """``why_not`` and the limits that all algorithms share: the kind of problem, and precision."""
        if problem.kind != self.solves:
            return [f"it solves {self.solves}, not {problem.kind}"]
        reasons = self.why_not(problem, target)
        if PRECISIONS.index(self.tier) > PRECISIONS.index(problem.precision):
            reasons = [*reasons, f"it keeps precision {self.tier!r}, and {problem.precision!r} was requested"]
        return reasons


class GpuAlgorithm(Algorithm):
    """Host half of an algorithm that runs on the GPU. Its device half is ``<stem>.cuh`` beside it."""

    @abstractmethod
    def configs(self, problem: Any, target: Target) -> Iterator[Config]:
        """The valid configurations on ``target``, best guess first."""

    @abstractmethod
    def plan(self, problem: Any, config: Any, target: Target) -> Plan:
        """The launches that compute ``problem`` with ``config``."""

    def order_of_sums(self, problem: Any, config: Any) -> Hashable:
        """What of ``config`` the bits of an image's result depend on, for ``batch_invariant``.

        Configurations of equal order give an image equal bits, in any batch. None: the bits depend on the batch. By
        default it is all of the configuration.
        """
        return config

    def within(self, problem: Any, target: Target, workspace: float = inf) -> list[tuple[float, Any]]:
        """The valid configurations that take no more than ``workspace`` bytes of scratch memory, with their predicted
        times in clock cycles, the quickest first.

        ``auto`` takes the least time of all algorithms, and among equals the earlier in the list. One that predicts no
        time has infinite ones: it is chosen only where nothing else fits, or by name.
        """
        return [(inf, c) for c in self.configs(problem, target) if self.workspace_bytes(problem, c) <= workspace]


def by_time(timed: Iterable[tuple[float, C]]) -> list[tuple[float, C]]:
    """Configurations with their times, the quickest first; the earlier one among equals."""
    return sorted(timed, key=lambda pair: pair[0])


class TimedAlgorithm(GpuAlgorithm):
    """A GPU algorithm that predicts the time of each configuration."""

    @abstractmethod
    def timed(self, problem: Any, target: Target) -> list[tuple[float, Any]]:
        """As `within` for any number of bytes."""

    def configs(self, problem: Any, target: Target) -> Iterator[Any]:
        """In the order of their predicted times."""
        yield from (config for _, config in self.within(problem, target))

    def within(self, problem: Any, target: Target, workspace: float = inf) -> list[tuple[float, Any]]:
        """Of the configurations of `timed` those that fit."""
        timed = self.timed(problem, target)
        return [(cycles, c) for cycles, c in timed if self.workspace_bytes(problem, c) <= workspace]


class CpuAlgorithm(Algorithm):
    """An algorithm of the reference engine: plain NumPy, readable as the paper states it."""

    def cost(self, problem: Any) -> float:
        """A guess at its time on ``problem``, in a unit that the algorithms of this engine share."""
        return 0.0

    @abstractmethod
    def run(self, problem: Any, x: Any, w: Any, bias: Any = None, value: float = 0, delta: float = 0) -> Any:
        """Compute ``problem`` and return a new array.

        A layer applies ``bias`` (or None) and activation; a filter, over x of shape (batch, h, w), takes ``value`` and
        ``delta``.
        """


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)


def _seen(extent: int, taps: int, stride: int, dilation: int, before: int, outputs: int) -> int:
    """Pixels, not padding, that all windows along an axis of ``extent`` pixels see together."""
    total = 0
    for begin in range(-before, taps * dilation - before, dilation):
        first, last = max(0, ceil_div(-begin, stride)), min(outputs - 1, (extent - 1 - begin) // stride)
        total += max(0, last - first + 1)
    return total


def mean_products(problem: ConvProblem) -> int:
    """Products that an output of a forward convolution sums on average: of pixels, not of padding."""
    (sh, sw), (dh, dw), (top, _, left, _) = problem.stride, problem.dilation, problem.padding
    rows = _seen(problem.h, problem.r, sh, dh, top, problem.p)
    columns = _seen(problem.w, problem.s, sw, dw, left, problem.q)
    return problem.group_c * rows * columns // max(1, problem.p * problem.q)


def fma_cycles(problem: ConvProblem, target: Target, fewer: float = 1) -> float:
    """Cycles of a layer's multiply-adds, ``fewer`` times fewer than by its definition, on all FP32 cores of a GPU."""
    return problem.flops / 2 / fewer / (target.multiprocessors * target.fma_lanes)


def has_wide_tensors(problem: ConvProblem) -> bool:
    """Whether the largest of the tensors takes more bytes than 32 bits count, or nearly 2**31 elements and more."""
    weights = problem.k * problem.group_c * problem.r * problem.s
    x, y = problem.n * problem.c * problem.h * problem.w, problem.n * problem.k * problem.p * problem.q
    # an int counts pixels and elements, those of the last tile included
    return max(x, y, weights) >= min(2**32 // item_bytes(problem.dtype), 2**31 - 2**16)


def copy_layout(problem: ConvProblem) -> Layout:
    """The layout whose measured speeds hold: images that do not come in fours are copied as the pixels of NCHW are."""
    return "NCHW" if problem.layout == "CHWN" and problem.n % 4 else problem.layout


def leaves_image(problem: ConvProblem) -> bool:
    """Whether some window sees padding."""
    top, _, left, _ = problem.padding
    last_row = (problem.p - 1) * problem.stride[0] - top + (problem.r - 1) * problem.dilation[0]
    last_column = (problem.q - 1) * problem.stride[1] - left + (problem.s - 1) * problem.dilation[1]
    return top > 0 or left > 0 or last_row >= problem.h or last_column >= problem.w


@lru_cache(maxsize=64)
def conv_constants(problem: ConvProblem) -> Constants:
    """The ``Problem`` struct of a convolution kernel: everything but the batch, which stays an argument.

    ``element`` is the C++ type of x, ``filter`` that of w, ``result`` that of bias and y, ``sum`` the one that products
    are summed in.
    ``padded``: some window leaves the image; with negative padding the first one begins inside it. ``wide``: offsets in
    bytes need more than 32 bits. ``vector_store``: four outputs adjacent in memory, counted from the start of an image
    (NCHW), a pixel's filter group (NHWC) or a pixel's images (CHWN), never straddle its end. In CHWN this is the only
    constant that depends on the batch, and it applies to the input too.
    """
    p, q = problem.p, problem.q
    top, _, left, _ = problem.padding
    innermost = {"NCHW": p * q, "NHWC": gcd(problem.k, problem.group_k), "CHWN": problem.n}
    return (
        ("element", DTYPES[problem.dtype].ctype),
        ("filter", DTYPES[weights_of(problem.dtype)].ctype),
        ("result", DTYPES[result_of(problem.dtype)].ctype),
        ("sum", accumulator(problem.dtype).ctype),
        *((name, getattr(problem, name)) for name in ("c", "h", "w", "k", "r", "s", "p", "q", "groups")),
        ("group_c", problem.group_c),
        ("group_k", problem.group_k),
        ("stride_h", problem.stride[0]),
        ("stride_w", problem.stride[1]),
        ("pad_top", top),
        ("pad_left", left),
        ("dilation_h", problem.dilation[0]),
        ("dilation_w", problem.dilation[1]),
        ("padded", leaves_image(problem)),
        ("nhwc", problem.layout == "NHWC"),
        ("chwn", problem.layout == "CHWN"),
        ("bias", problem.bias),
        ("relu", problem.activation == "relu"),
        ("accumulate", problem.accumulate),
        ("wide", has_wide_tensors(problem)),
        ("vector_store", innermost[problem.layout] % 4 == 0),
    )
