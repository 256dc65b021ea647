"""What ran under `enable`, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass


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
    calls: int = 0


@dataclass(slots=True)
class Count:
    """Calls of a layer that is left to PyTorch forward and backward: one number, which `add` brings into its lines."""

    lines: tuple[Line, ...]
    calls: int = 0

    def add(self) -> None:
        calls = self.calls
        self.calls -= calls
        for line in self.lines:
            line.calls += calls


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
