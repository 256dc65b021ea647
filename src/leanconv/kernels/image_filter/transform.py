"""What the filters by Fourier transforms have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from leanconv.kernels.contract import GpuAlgorithm
from leanconv.kernels.cost import Speeds
from leanconv.plan import Argument, Constants, Launch, Number, Target
from leanconv.problem import FilterProblem

#: Lengths of transforms.
LENGTHS = (512, 1024, 2048, 4096, 8192)


class TransformConfig(Protocol):
    """A configuration of either: transforms of ``length``, of which a thread has ``elements``."""

    @property
    def length(self) -> int: ...
    @property
    def elements(self) -> int: ...
    @property
    def threads(self) -> int: ...


@dataclass(frozen=True)
class TransformSpeeds(Speeds):
    """Of a GPU."""

    #: clock cycles of a multiprocessor for a complex number of a line that is transformed there and back, for `LENGTHS`
    places: tuple[float, ...]
    #: clock cycles of a launch beside that, until its first blocks have their pixels, and after the last
    start: int

    def cycles(self, length: int, transforms: float, target: Target) -> float:
        """Of so many lines that are transformed once."""
        return transforms / 2 * length * self.places[LENGTHS.index(length)] / target.multiprocessors


@dataclass(frozen=True)
class LineSpeeds(TransformSpeeds):
    """Of transforms of lines, in which the memory's time adds to the work."""

    #: the time of memory relative to what the target's bandwidth says
    memory: float


def elements_of(problem: FilterProblem) -> int:
    """Elements that fit into the registers of a thread."""
    return 16 if problem.sums == "float32" else 8


def chunks(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Firsts and sizes of so many."""
    for first in range(0, count, most):
        yield first, min(most, count - first)


def table_places(config: TransformConfig) -> int:
    """Twiddle factors of all levels."""
    length, places = config.length, 0
    while length > config.elements:
        places += length
        length //= config.elements
    return places


def numbers(**values: int) -> Iterator[Number]:
    """Arguments of these names."""
    yield from (Number("int", name, value) for name, value in values.items())


def distances(**values: int) -> Iterator[Number]:
    """The same for what may be beyond 32 bits."""
    yield from (Number("long long", name, value) for name, value in values.items())


def transform_launch(
    algorithm: GpuAlgorithm, name: str, config: Any, problem: Constants, lines: int, sets: int, item: int,
    beside: int, arguments: tuple[Argument, ...], grid: int, target: Target,
) -> Launch:  # fmt: skip
    """The launch of function ``fourier_<name>``, whose threads have ``sets`` times the elements of a line, and so many
    registers ``beside`` these."""
    tuning = ("length", config.length), ("elements", config.elements), ("lines", lines)
    # a word behind the lines says whether results are finite
    shared = 2 * item * lines * (config.length + config.length // config.elements) + 16
    made = algorithm.launch(config, problem, arguments, grid, shared, tuning)
    registers = item // 2 * sets * config.elements + beside
    fitting = max(1, min(target.registers_per_multiprocessor // (registers * config.threads), 8))
    return replace(made, function=f"leanconv::fourier_{name}", min_blocks=fitting)
