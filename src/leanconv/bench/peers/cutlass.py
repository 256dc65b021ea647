"""CUTLASS' implicit GEMMs for layers, compiled once by nvcc: TF32, 3xTF32 and 16 bits, a row for each shape of tile."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_cuda_torch
from leanconv.kernels.contract import Arithmetic, ceil_div
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import env
from leanconv.runtime.files import open_regular, whole
from leanconv.runtime.threads import cores

SOURCE = Path(__file__).with_suffix(".cu")
_VERSION = "include/cutlass/version.h"
_OPTIONS = ("-O2", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "--expt-relaxed-constexpr", "-DNDEBUG")
#: Split-K is tried where a GPU has two multiprocessors and more for a tile: at most so many slices, of so many steps.
_MOST_SLICES, _LEAST_STEPS = 16, 4


@dataclass(frozen=True)
class _Math:
    """An arithmetic of CUTLASS': the element type of arrays, in C++ too, and the ceiling of such products."""

    dtype: str
    element: str
    arithmetic: Arithmetic
    operator: str = "OpMultiplyAdd"


_MATHS = {
    "tf32": _Math("float32", "float", "tf32"),
    "3xtf32": _Math("float32", "float", "tf32x3", "OpMultiplyAddFastF32"),
    "float16": _Math("float16", "cutlass::half_t", "fp16"),
    "bfloat16": _Math("bfloat16", "cutlass::bfloat16_t", "fp16"),
}


@dataclass(frozen=True)
class _Kernel:
    """A tile of pixels, filters and reduction elements, that of a warp, and stages; without stages one for wgmma."""

    math: str
    tile: tuple[int, int, int]
    stages: int = 0
    warp: tuple[int, int] = (0, 0)

    @property
    def engine(self) -> str:
        pixels, filters, _ = self.tile
        kind, stages = ("", f"x{self.stages}") if self.stages else ("wgmma-", "")
        return f"cutlass:{self.math}-{kind}{pixels}x{filters}{stages}-nhwc"

    @property
    def macros(self) -> tuple[str, ...]:
        """What makes the source this kernel."""
        math = _MATHS[self.math]
        given: dict[str, Any] = {"ELEMENT": math.element}
        given |= dict(zip(("TILE_M", "TILE_N", "TILE_K"), self.tile, strict=True))
        if self.stages:
            given |= {"STAGES": self.stages, "WARP_M": self.warp[0], "WARP_N": self.warp[1], "OPERATOR": math.operator}
        else:
            given |= {"HOPPER": 1, "CLUSTER_M": 2}
        return tuple(f"-D{name}={value}" for name, value in given.items())

    def slices(self, problem: ConvProblem, multiprocessors: int) -> int:
        """Slices of the reduction (serial split-K) with which the tiles fill the GPU; 1 where they do without."""
        if not self.stages or problem.dtype != "float32":
            return 1  # of 16 bits the sums of slices would be rounded to 16 bits
        pixels, filters, depth = self.tile
        tiles = ceil_div(problem.n * problem.p * problem.q, pixels) * ceil_div(problem.k, filters)
        steps = problem.r * problem.s * ceil_div(problem.c, depth)
        return max(1, min(_MOST_SLICES, multiprocessors // tiles, steps // _LEAST_STEPS))


def _kernels() -> Iterator[_Kernel]:
    """Shapes of tiles that CUTLASS' own generator has for this arithmetic, large ones first.

    NOTE: for wgmma it has 64×64, 128×192, and tiles with more accumulators than a warpgroup has registers. 64×128 and
    128×128 are added.
    """
    big, small = (64, 64), (32, 32)
    wide, tall = (32, 64), (64, 32)
    yield _Kernel("tf32", (256, 128, 32), 3, big)
    yield _Kernel("tf32", (128, 256, 32), 3, big)
    yield _Kernel("tf32", (128, 128, 32), 4, big)
    yield _Kernel("tf32", (128, 128, 32), 3, big)
    yield _Kernel("tf32", (256, 64, 32), 4, big)
    yield _Kernel("tf32", (128, 64, 32), 3, tall)
    yield _Kernel("tf32", (64, 128, 32), 3, wide)
    yield _Kernel("tf32", (64, 64, 32), 5, small)
    yield _Kernel("3xtf32", (128, 128, 16), 4, wide)
    yield _Kernel("3xtf32", (128, 128, 32), 3, wide)
    yield _Kernel("3xtf32", (256, 64, 16), 3, (64, 32))
    yield _Kernel("3xtf32", (128, 64, 16), 4, tall)
    yield _Kernel("3xtf32", (128, 64, 32), 3, tall)
    yield _Kernel("3xtf32", (64, 128, 32), 3, wide)
    yield _Kernel("3xtf32", (64, 64, 32), 3, small)
    for math in ("float16", "bfloat16"):
        yield _Kernel(math, (256, 128, 64), 3, big)
        yield _Kernel(math, (128, 128, 64), 4, big)
        yield _Kernel(math, (128, 128, 64), 3, big)
        yield _Kernel(math, (128, 64, 64), 3, tall)
        yield _Kernel(math, (64, 64, 64), 5, small)
    for math, depth in (("tf32", 32), ("float16", 64), ("bfloat16", 64)):
        for pixels, filters in ((64, 64), (64, 128), (128, 128), (128, 192)):
            yield _Kernel(math, (pixels, filters, depth))


KERNELS = tuple(_kernels())


def _root() -> Path:
    """The folder of CUTLASS: that of CUTLASS_PATH, else of the wheel. Raises FileNotFoundError that says what to do."""
    if given := os.environ.get("CUTLASS_PATH"):
        root = Path(given)
    elif (wheel := find_spec("cutlass_library")) and wheel.origin:
        root = Path(wheel.origin).parent / "source"
    else:
        raise FileNotFoundError(
            "its headers are not installed: pip install nvidia-cutlass, or set CUTLASS_PATH to a checkout of CUTLASS"
        )
    if not (root / _VERSION).is_file():
        raise FileNotFoundError(f"there is no {_VERSION} in {root}, where CUTLASS should be")
    return root


def _nvcc() -> str:
    """The path of nvcc. Raises FileNotFoundError."""
    roots = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    for name in ("nvcc", *(f"{root}/bin/nvcc" for root in roots if root)):
        if found := shutil.which(name):
            return found
    raise FileNotFoundError("its kernels are compiled by nvcc, which is neither on PATH nor below CUDA_HOME")


def _version() -> str:
    text = (_root() / _VERSION).read_text(encoding="utf-8", errors="replace")
    return ".".join(re.findall(r"^#define CUTLASS_(?:MAJOR|MINOR|PATCH) +(\d+)", text, re.MULTILINE))


@cache
def _nvcc_version(nvcc: str) -> str:
    told = subprocess.run((nvcc, "--version"), capture_output=True, text=True, check=True).stdout
    match = re.search(r"\bV(\d[\d.]*)", told)
    return match[1] if match else told


def _target() -> tuple[str, int]:
    """What nvcc calls the current GPU, and its multiprocessors."""
    import torch

    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"sm_{about.major}{about.minor}" + ("a" if about.major >= 9 else ""), about.multi_processor_count


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when this process ends."""
    return tempfile.TemporaryDirectory()


def _folder() -> Path:
    """Where libraries are kept: in leanconv's cache, or while this process lives where that is off or cannot be had."""
    base = None if env.cache_disabled() else env.cache_dir()
    if base is not None:
        with suppress(OSError):
            (base / "cutlass").mkdir(parents=True, exist_ok=True)
            return base / "cutlass"
    return Path(_temporary().name)


@cache
def _built(kernel: _Kernel, arch: str) -> Path | str:
    """The library of a kernel, compiled if it is not there yet; where that fails, a sentence."""
    root, nvcc = _root(), _nvcc()
    options = (*_OPTIONS, f"-arch={arch}", *kernel.macros)
    parts = (SOURCE.read_text(encoding="utf-8"), _version(), _nvcc_version(nvcc), *options)
    path = _folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.so"
    if path.is_file():
        return path
    folders = (f"-I{root / 'include'}", f"-I{root / 'tools/util/include'}")
    try:
        with whole(path, follow=False) as file:
            command = (nvcc, *options, *folders, "-o", str(file), str(SOURCE))
            subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        return f"nvcc failed with {error.returncode}: {(error.stderr or error.stdout).strip()[-1000:]}"
    except OSError as error:
        return f"its library cannot be made: {error}"
    return path


def _build(kernels: Sequence[_Kernel], arch: str) -> None:
    """Compile what is missing, as many at a time as there are cores, first those for wgmma, which take longest."""
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(lambda kernel: _built(kernel, arch), sorted(kernels, key=lambda kernel: kernel.stages > 0)))


@cache
def _library(path: Path) -> ctypes.CDLL:
    # NOTE: its code runs with this user's rights, so it has to be this user's
    open_regular(path, trusted=True).close()
    library = ctypes.CDLL(str(path))
    library.leanconv_cutlass_text.restype = c_char_p
    library.leanconv_cutlass_open.restype = c_void_p
    library.leanconv_cutlass_run.argtypes = (c_void_p, c_void_p)
    library.leanconv_cutlass_close.argtypes = (c_void_p,)
    library.leanconv_cutlass_close.restype = None
    return library


def _numbers(problem: ConvProblem, slices: int) -> Any:
    """The struct Layer of the source."""
    top, bottom, left, right = problem.padding
    sizes = (problem.n, problem.h, problem.w, problem.c, problem.k, problem.r, problem.s, problem.p, problem.q)
    numbers = (*sizes, top, bottom, left, right, *problem.stride, *problem.dilation, slices)
    return (c_int * len(numbers))(*numbers)


def _why_not(problem: ConvProblem) -> str | None:
    if problem.op != "fprop" or problem.groups != 1 or problem.plain != problem:
        return "written for the forward pass of one group, without bias and activation"
    if not any(math.dtype == problem.dtype for math in _MATHS.values()):
        return "written for float32, float16 and bfloat16 layers"
    multiple = 16 // problem.itemsize
    if problem.c % multiple or problem.k % multiple:
        return f"written for channels and filters that are multiples of {multiple}, which are 16 bytes"
    return None


def _of(dtypes: Iterable[str], arch: str) -> list[_Kernel]:
    """The kernels for arrays of these types on a GPU; those for wgmma need its own."""
    named = set(dtypes)
    return [k for k in KERNELS if _MATHS[k.math].dtype in named and (k.stages or arch == "sm_90a")]


class CutlassPeer(Peer):
    """CUTLASS' forward convolution in NHWC: each shape of tile is an engine, so that the fastest counts.

    With stages in its name it is a kernel of CUTLASS 2 (mma.sync, optimized iterators), plain and, where a layer has
    too few tiles for the GPU, with serial split-K; with wgmma one of CUTLASS 3 for Hopper (TMA im2col), which has no
    3xTF32. The first run of an element type compiles its kernels on all cores.
    """

    name = "cutlass"
    engines = tuple(kernel.engine for kernel in KERNELS)
    solves = ("conv2d",)
    needs_gpu = True

    def absent(self) -> str | None:
        if reason := missing_cuda_torch():
            return reason
        try:
            _root()
            _nvcc_version(_nvcc())
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        return None

    def versions(self) -> dict[str, str]:
        return {"cutlass": _version(), "nvcc": _nvcc_version(_nvcc())}

    def prepare(self, problems: Sequence[Problem], gpu: bool) -> None:
        able = {problem.dtype for problem in problems if problem.kind == "conv2d" and not _why_not(problem)}
        arch, _ = _target()
        _build(_of(able, arch), arch)

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "conv2d"
        if reason := _why_not(problem):
            yield Unable(self.name, reason)
            return
        arch, multiprocessors = _target()
        for kernel in _of((problem.dtype,), arch):
            path = _built(kernel, arch)
            if isinstance(path, str):
                yield Unable(kernel.engine, path)
                continue
            for slices in sorted({1, kernel.slices(problem, multiprocessors)}):
                yield from _candidate(kernel, _library(path), problem, operands, slices)


def _candidate(
    kernel: _Kernel, library: Any, problem: ConvProblem, operands: Operands, slices: int
) -> Iterator[Candidate | Unable]:
    import torch

    def words(status: int) -> str:
        return f"CUTLASS says {library.leanconv_cutlass_text(status).decode()!r} ({status})"

    x, w, y = operands.x("NHWC"), operands.w("NHWC"), operands.output("NHWC")
    numbers, arrays = _numbers(problem, slices), [c_void_p(array.data_ptr()) for array in (x, w, y)]
    size, status = c_size_t(), c_int()
    if refused := library.leanconv_cutlass_size(numbers, *arrays, byref(size)):
        yield Unable(kernel.engine, words(refused))
        return
    workspace = torch.empty(size.value, dtype=torch.uint8, device=y.device)
    scratch = c_void_p(workspace.data_ptr() if size.value else None)
    opened = library.leanconv_cutlass_open(numbers, *arrays, scratch, byref(status))
    if not opened:
        yield Unable(kernel.engine, words(status.value))
        return

    # the kernel holds pointers alone, so the call keeps what they point to
    def call(keep: Any = (x, w, workspace)) -> Any:
        if failed := library.leanconv_cutlass_run(opened, None):
            raise RuntimeError(words(failed))
        return y

    try:
        algorithm = "fprop" if slices == 1 else f"fprop, split-K {slices}"
        note = f"tile {'×'.join(map(str, kernel.tile))}"
        math = _MATHS[kernel.math]
        yield Candidate(
            kernel.engine, algorithm, call, "NHWC", size.value, arithmetic=math.arithmetic, out=y, note=note
        )  # fmt: skip
    finally:
        library.leanconv_cutlass_close(opened)
