"""What ran under `enable`, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count


class Calls:
    """How often something was called: each call is ``next(ticks)``, of which no thread loses one.

    To read the number is such a call too, which is not counted.
    """

    __slots__ = ("_read", "ticks")

    def __init__(self, number: int = 0) -> None:
        self.ticks, self._read = count(number), 0

    def __reduce__(self) -> tuple[type[Calls], tuple[int]]:
        return Calls, (self.number,)

    @property
    def number(self) -> int:
        number = next(self.ticks) - self._read
        self._read += 1
        return number


@dataclass(slots=True)
class Line:
    """One operation of one layer: what ran it, why, and how often."""

    #: the layer's name in the model that `enable` was given; empty for others
    layer: str
    #: "forward", "backward, input" or "backward, filters"
    when: str
    problem: str
    #: "leanconv: " and the algorithm, or "PyTorch"
    runs: str
    why: str
    #: its own; and those that count for other lines as well
    counted: list[Calls] = field(default_factory=lambda: [Calls()], repr=False, compare=False)

    @property
    def ticks(self) -> count[int]:
        """``next`` of it counts a call."""
        return self.counted[0].ticks

    @property
    def calls(self) -> int:
        return sum(each.number for each in self.counted)


@dataclass(frozen=True)
class Report:
    """All lines, in the order in which they first ran; ``str`` of it is a table."""

    lines: tuple[Line, ...]
    #: bytes of GPU memory of the packed filters that are kept
    packed_bytes: int = 0

    @property
    def taken(self) -> tuple[Line, ...]:
        """What leanconv ran."""
        return tuple(line for line in self.lines if line.runs != "PyTorch")

    @property
    def left(self) -> tuple[Line, ...]:
        """What was left to PyTorch."""
        return tuple(line for line in self.lines if line.runs == "PyTorch")

    def __str__(self) -> str:
        if not self.lines:
            return "no convolution has run on CUDA"
        heads = ("layer", "when", "calls", "runs", "why", "problem")
        rows = [
            (line.layer or "-", line.when, str(line.calls), line.runs, line.why, line.problem) for line in self.lines
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in (heads, *rows)]  # fmt: skip
        total = f"{len(self.taken)} of {len(self.lines)} operations run on leanconv"
        packed = f"{self.packed_bytes} bytes of packed filters are kept"
        return "\n".join((*table, total, *([packed] if self.packed_bytes else [])))
