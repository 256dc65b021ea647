"""The CPU engine: each paper's algorithm as plain array code on NumPy, and the float64 oracle they are checked with."""

from __future__ import annotations

from leanconv.algorithms.base import CpuAlgorithm
from leanconv.reference.direct import Direct
from leanconv.reference.filter2d import Banded, Taps
from leanconv.reference.im2col import Im2col
from leanconv.reference.im2win import Im2win
from leanconv.reference.single_channel import SingleChannel
from leanconv.reference.winograd1d import Winograd1d
from leanconv.reference.winograd2d import Winograd2d

#: What runs on NumPy arrays; where several can, the one with the lowest ``cost`` is chosen, the first among equals.
CPU_ALGORITHMS: tuple[CpuAlgorithm, ...] = (
    Im2col(),
    Winograd1d(),
    Winograd2d(),
    Im2win(),
    Direct(),
    SingleChannel(),
    Banded(),
    Taps(),
)

__all__ = ["CPU_ALGORITHMS"]
