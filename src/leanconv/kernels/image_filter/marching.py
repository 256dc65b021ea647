"""Blocks that march down strips of an image: into how many bands the rows are divided, what that costs, and what a
whole filter is predicted to take."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Any

from leanconv.kernels.contract import TimedAlgorithm, ceil_div
from leanconv.kernels.cost import Speeds, launch_cycles
from leanconv.plan import Target
from leanconv.problem import FilterProblem

#: Warps that keep a multiprocessor's cores busy. Fewer lose little, but blocks beside each other gain, since one
#: computes while another waits at its barrier. Explored (H200, 2026-11-24, a working tree before dee0785c; ten
#: filters, 6 to 15 configurations each): with the powers of `March._time` the first configuration takes at most 5 %
#: longer than the fastest.
BUSY_WARPS = 12
#: Costs that differ by less than this share count as equal.
ALIKE = 0.1


@dataclass(frozen=True)
class March:
    """``strips`` of ``rows`` rows of outputs, each cut into bands. A block of ``warps`` has a band: it makes
    ``step_rows`` rows in a step, ``least_steps`` steps at least, and filters ``overlap`` rows of its neighbour's again;
    ``blocks`` run on a multiprocessor at a time."""

    strips: int
    rows: int
    overlap: int
    step_rows: int
    least_steps: int
    warps: int
    blocks: int

    def bands(self, target: Target) -> int:
        """As many as keep the machine busy, and few."""
        slots = self.blocks * target.multiprocessors
        most = min(ceil_div(self.rows, self.least_steps * self.step_rows), ceil_div(4 * slots, max(1, self.strips)))
        return min(range(1, most + 1), key=lambda bands: self._time(bands, target), default=1)

    def _time(self, bands: int, target: Target) -> float:
        """Of a multiprocessor, in rows: of all waves of blocks, each with its overlap."""
        blocks = max(1, self.strips * bands)
        beside = min(self.blocks, ceil_div(blocks, target.multiprocessors))
        steps = ceil_div(ceil_div(self.rows, bands) + self.overlap, self.step_rows)
        busy = min(1.0, beside * self.warps / BUSY_WARPS) ** 0.2 * beside / (beside + 0.5)
        return ceil_div(blocks, self.blocks * target.multiprocessors) * steps * self.step_rows * beside / busy

    def rank(self, target: Target) -> int:
        """A number that is smaller for a march that takes less time, and equal for two that take about the same."""
        return round(log(self._time(self.bands(target), target) + 1) / ALIKE)


@dataclass(frozen=True)
class MarchSpeeds(Speeds):
    """Of a kernel, and the type of its pixels: clock cycles of a multiprocessor for an output."""

    #: at least, whatever the filter
    least: float
    #: apart from the filter's taps, and for each of a column and a row together
    output: float
    tap: float

    def cycles(self, problem: FilterProblem, taps: int, target: Target) -> float:
        """Of a filter of so many ``taps``."""
        outputs = problem.batch * problem.out_h * problem.out_w * problem.channels
        return outputs / target.multiprocessors * max(self.least, self.output + self.tap * taps) + launch_cycles(target)


def speeds_of(stem: str, problem: FilterProblem, target: Target) -> MarchSpeeds:
    """Those of a kernel for the type of a problem's pixels: float32, or one that is converted."""
    return MarchSpeeds.of(target, f"{stem} {'float32' if problem.dtype == 'float32' else 'others'}")


class StripAlgorithm(TimedAlgorithm):
    """An algorithm of strips: one time is predicted for all configurations, the first of which is the best guess."""

    @abstractmethod
    def cycles(self, problem: Any, target: Target) -> float:
        """The predicted time."""

    @abstractmethod
    def shapes(self, problem: Any, target: Target) -> Iterator[Any]:
        """The valid configurations, the best guess first."""

    def timed(self, problem: Any, target: Target) -> list[tuple[float, Any]]:
        """In the order of `shapes`."""
        cycles = self.cycles(problem, target)
        return [(cycles, config) for config in self.shapes(problem, target)]
