"""The interface of everything that the benchmark times."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

from leanconv.bench.operands import Operands
from leanconv.kernels.contract import Arithmetic
from leanconv.options import Layout
from leanconv.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """One way to compute a problem, ready to run.

    ``call`` returns the output, in ``layout`` (None for images). ``out`` is its output array, where that is always the
    same one. ``workspace_bytes`` counts memory besides inputs and output; None is unknown, ``"measure"`` lets the
    benchmark read it from PyTorch's allocator. ``frame`` pixels at an image's edges are known to be wrong and stay out
    of its error. ``scope`` wraps all calls: it sets and restores a library's switches. ``variant`` names the variant of
    the algorithm, in an ablation. ``prepared_bytes`` is the size of its packed weights. ``config`` is a key of what was
    configured where leanconv picked it.
    """

    engine: str
    algorithm: str
    call: Callable[[], Any]
    layout: Layout | None = None
    workspace_bytes: int | Literal["measure"] | None = 0
    arithmetic: Arithmetic = "fp32"
    out: Any = None
    on_gpu: bool = True
    registers: int | None = None
    spill_bytes: int | None = None
    frame: int = 0
    note: str = ""
    variant: str = ""
    prepared_bytes: int = 0
    config: str = ""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Unable:
    """Why an engine does not run a problem."""

    engine: str
    reason: str


class Peer(ABC):
    """A library that computes problems, and the engines that it brings."""

    name: ClassVar[str]
    #: the name its engines start with, for choosing engines; none of them is prepared when no name could match
    engines: ClassVar[tuple[str, ...]]
    solves: ClassVar[tuple[str, ...]]
    #: whether it takes layers of volumes too
    volumes: ClassVar[bool] = False
    needs_gpu: ClassVar[bool]
    #: takes so long to prepare that it runs only where a pattern of engines asks for it
    by_request: ClassVar[bool] = False
    #: the Python module whose presence and version count
    module: ClassVar[str] = ""

    def absent(self) -> str | None:
        """Why the library cannot be used on this machine; None when it can."""
        on_gpu = self.needs_gpu and self.module in ("", "torch")
        return missing_cuda_torch() if on_gpu else missing_module(self.module)

    def prepare(self, problems: Sequence[Problem], gpu: bool) -> None:  # noqa: B027
        """Do what can be done for all problems of a run together, before any of them is timed."""

    @abstractmethod
    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        """Every candidate for ``problem``. Its memory is released when the iterator advances."""

    def versions(self) -> dict[str, str]:
        """Versions worth recording, by name; asked of what is not absent."""
        if not self.module:
            return {}
        package = self.module.partition(".")[0]
        return {"opencv" if package == "cv2" else package: str(import_module(package).__version__)}


def missing_module(name: str) -> str | None:
    """A sentence when Python cannot import ``name``."""
    try:
        import_module(name)
    except ImportError as error:
        return f"Python module {name!r} cannot be imported ({error})"
    return None


def open_library(names: Sequence[str], wheel: str) -> ctypes.CDLL:
    """The first C library of ``names`` that is found, else that of NVIDIA's ``wheel``."""
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name)
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return ctypes.CDLL(load_nvidia_dynamic_lib(wheel).abs_path)


def missing_library(load: Callable[[], Any], what: str) -> str | None:
    """A sentence when PyTorch sees no GPU, or ``load`` fails to open the library that ``what`` describes."""
    if reason := missing_cuda_torch():
        return reason
    try:
        load()
    except Exception as error:
        return f"{what} cannot be loaded ({error})"
    return None


def missing_cuda_torch() -> str | None:
    """A sentence when PyTorch is missing or sees no GPU."""
    reason = missing_module("torch")
    if reason:
        return reason
    import torch

    return None if torch.cuda.is_available() else f"PyTorch {torch.__version__} sees no CUDA GPU"
