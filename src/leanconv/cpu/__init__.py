"""The CPU engine: each paper's algorithm as plain array code on NumPy, and the float64 oracle they are checked with."""

from __future__ import annotations

from leanconv.cpu.boxes import Boxes
from leanconv.cpu.direct import Direct
from leanconv.cpu.factored import Factored
from leanconv.cpu.filter2d import Banded, Taps, Transforms
from leanconv.cpu.fourier import Fourier
from leanconv.cpu.im2col import Im2col
from leanconv.cpu.im2win import Im2win
from leanconv.cpu.median import Median
from leanconv.cpu.opencv import OpenCv
from leanconv.cpu.single_channel import SingleChannel
from leanconv.cpu.slices import Slices
from leanconv.cpu.winograd1d import Winograd1d
from leanconv.cpu.winograd2d import Winograd2d
from leanconv.kernels.contract import CpuAlgorithm

_LAYERS_OF_IMAGES: tuple[CpuAlgorithm, ...] = (
    Im2col(),
    Winograd1d(),
    Winograd2d(),
    Im2win(),
    Direct(),
    SingleChannel(),
    Fourier(),
)

#: What runs on NumPy arrays; where several can, the one with the lowest ``cost`` is chosen, the first among equals.
CPU_ALGORITHMS: tuple[CpuAlgorithm, ...] = (
    *_LAYERS_OF_IMAGES,
    Slices(_LAYERS_OF_IMAGES),
    Banded(),
    Taps(),
    Transforms(),
    Factored(),
    Boxes(),
    Median(),
    OpenCv(),
)

__all__ = ["CPU_ALGORITHMS"]
