"""What an algorithm is: a name, a statement of its limits, its tuning numbers, and a plan of launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, partial
from math import inf
from typing import Any, ClassVar, Literal, TypeVar

from leanconv.options import PRECISIONS, Precision
from leanconv.plan import Argument, Constants, Launch, Plan, Target
from leanconv.problem import Problem

#: What a GPU multiplies with: FP32 cores, or tensor cores, in one product of a smaller type or in three (x3).
Arithmetic = Literal["fp32", "tf32", "tf32x3", "fp16x3", "fp16"]


@dataclass(frozen=True)
class Config:
    """Base of the tuning numbers. Every field becomes a constant of the kernel's ``Tuning`` struct."""

    def constants(self) -> Constants:
        """The fields as compile-time constants, in the order of their declaration."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))

    @property
    def order(self) -> Hashable:
        """What of it the bits of a result depend on, by default all (`GpuAlgorithm.order_of_sums`)."""
        return self

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return getattr(self, "split", 1)


C = TypeVar("C", bound=Config)


@lru_cache(maxsize=4096)
def variant(config: C, **changes: Any) -> C:
    """The configuration with some of its numbers changed, in a fifth of the time of `dataclasses.replace`; cached,
    since predicting times needs the same ones again."""
    made, known = object.__new__(type(config)), vars(config)
    vars(made).update({name: known[name] for name in config.__dataclass_fields__ if name in known}, **changes)
    return made


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
    precision: ClassVar[Precision]
    #: the kind of problem it solves: ``conv2d`` or ``filter2d``
    solves: ClassVar[str] = "conv2d"
    #: what a paper describes and others beat: runs by name, never by ``auto``
    by_name_only: ClassVar[bool] = False
    #: whether it computes layers of volumes, which have slices; all compute those of images
    volumes: ClassVar[bool] = False
    #: whether a strided gradient of the input takes the time of `cost.GpuSpeeds.zeros` and ``scattered`` besides what
    #: is predicted: its phases are stored one by one, and its zeros by a launch of their own or at the same cost
    writes_phases: ClassVar[bool] = False
    #: whether each output is one chain of multiply-adds, in direct order, whatever the configuration
    direct_order: ClassVar[bool] = False

    @cached_property
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

    def counts_scattered(self, problem: Any) -> bool:
        """Whether its predictions count what scattered stores of a strided gradient take."""
        return False

    def workspace_bytes(self, problem: Any, config: Any) -> int:
        """Bytes of scratch memory that a configuration takes on ``problem``."""
        return 0

    def prepared_bytes(self, problem: Any, config: Any = None) -> int:
        """Bytes of packed weights, which may be kept between calls; not counted as workspace. Without a configuration
        the least that any takes."""
        return 0

    def optional_bytes(self, problem: Any) -> int:
        """Bytes of packed weights that some configurations take beside those that all do; of layers."""
        return 0

    def reasons(self, problem: Problem, target: Target | None) -> list[str]:
        """``why_not`` and the limits that all algorithms share: the kind of problem, slices, and precision."""
        if problem.kind != self.solves:
            return [f"it solves {self.solves}, not {problem.kind}"]
        if problem.kind == "conv2d" and problem.is_volume and not self.volumes:
            slices = f"filters of {problem.t} slices on volumes of {problem.d}"
            return [f"it computes layers of images, and this one has {slices}"]
        reasons = self.why_not(problem, target)
        if PRECISIONS.index(self.precision) > PRECISIONS.index(problem.precision):
            reasons = [*reasons, f"it keeps precision {self.precision!r}, and {problem.precision!r} was requested"]
        return reasons


class GpuAlgorithm(Algorithm):
    """Host half of an algorithm that runs on the GPU. Its device half is ``<stem>.cuh`` beside it."""

    @abstractmethod
    def configs(self, problem: Any, target: Target) -> Iterator[Config]:
        """The valid configurations on ``target``, best guess first."""

    @abstractmethod
    def plan(self, problem: Any, config: Any, target: Target) -> Plan:
        """The launches that compute ``problem`` with ``config``."""

    def for_kept_filters(self, config: Any) -> Any:
        """The configuration to run in place of ``config`` where filters stay packed between calls."""
        return config

    def order_of_sums(self, problem: Any, config: Any) -> Hashable:
        """What of ``config`` the bits of an image's result depend on, for ``batch_invariant``.

        Configurations of equal order give an image equal bits, in any batch. None: the bits depend on the batch. By
        default it is the configuration's `order`, of an algorithm of `direct_order` nothing.
        """
        return () if self.direct_order else config.order

    def launch(
        self, config: Any, problem: Constants, arguments: tuple[Argument, ...], grid: int, shared_bytes: int = 0,
        tuning: Constants = (),
    ) -> Launch:  # fmt: skip
        """The launch of the kernel that has the name of this module. ``config`` has the threads of a block; ``tuning``
        are the constants of ``Tuning``, by default its fields."""
        _, family, stem = type(self).__module__.rsplit(".", 2)
        return Launch(
            f"kernels/{family}/{stem}.cuh", f"leanconv::{stem}", problem, tuning or config.constants(), arguments, grid,
            config.threads, shared_bytes, getattr(config, "min_blocks", 1), config.cluster,
        )  # fmt: skip

    def counted_bytes(self, problem: Any, config: Any) -> int:
        """What of a configuration a limit counts beside the `prepared_bytes` that all take: its scratch memory, and
        more packed weights than others have."""
        return self.workspace_bytes(problem, config)

    def within(self, problem: Any, target: Target, workspace: float = inf) -> list[tuple[float, Any]]:
        """The valid configurations that take no more than ``workspace`` bytes of scratch memory, with their predicted
        times in clock cycles, the quickest first.

        ``auto`` takes the least time of all algorithms, and among equals the earlier in the list. One that predicts no
        time has infinite ones: it is chosen only where nothing else fits, or by name.
        """
        return [(inf, c) for c in self.configs(problem, target) if self.counted_bytes(problem, c) <= workspace]

    def quickest(self, problem: Any, target: Target, workspace: float = inf) -> tuple[float, Any] | None:
        """The first of `within`; one that has hundreds of configurations finds it without making the others."""
        return next(iter(self.within(problem, target, workspace)), None)


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
        return [each for each in timed if workspace == inf or self.counted_bytes(problem, each[1]) <= workspace]


class CpuAlgorithm(Algorithm):
    """An algorithm of the reference engine: plain NumPy, readable as the paper states it."""

    def cost(self, problem: Any) -> float:
        """A guess at its time on ``problem``, in a unit that the algorithms of this engine share."""
        return 0.0

    def ready(self, problem: Any) -> Callable[..., Any]:
        """`run` for one problem, of which it may keep what does not depend on the arrays."""
        return partial(self.run, problem)

    @abstractmethod
    def run(self, problem: Any, x: Any, w: Any, bias: Any = None, value: float = 0, delta: float = 0) -> Any:
        """Compute ``problem`` and return a new array.

        A layer applies ``bias`` (or None) and activation; a filter, over x of shape (batch, h, w), takes ``value`` and
        ``delta``.
        """


def named(of: Any, names: str) -> Constants:
    """Attributes of a problem or a configuration as constants of the same names."""
    return tuple((name, getattr(of, name)) for name in names.split())


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)
