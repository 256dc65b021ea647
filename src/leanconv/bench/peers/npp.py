"""NVIDIA's image library NPP, through its C interface."""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Callable, Iterator
from ctypes import c_int, c_size_t, c_uint, c_void_p
from functools import cache
from typing import Any

import numpy as np

from leanconv.bench.operands import Operands, with_border
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_library, open_library
from leanconv.kernels.contract import ceil_div
from leanconv.problem import FilterProblem, Problem

_BORDER_REPLICATE = 2
_MARGIN = 128
#: Filters for which nppiFilter runs other code that never reads outside its region (seen with NPP 13.0).
_BLIND = ((3, 3), (5, 5))


class _Size(ctypes.Structure):
    _fields_ = [("width", c_int), ("height", c_int)]


class _Point(ctypes.Structure):
    _fields_ = [("x", c_int), ("y", c_int)]


class _StreamContext(ctypes.Structure):
    """NppStreamContext."""

    _fields_ = [
        ("stream", c_void_p),
        ("device", c_int),
        ("multiprocessors", c_int),
        ("threads_per_multiprocessor", c_int),
        ("threads_per_block", c_int),
        ("shared_per_block", c_size_t),
        ("major", c_int),
        ("minor", c_int),
        ("flags", c_uint),
        ("reserved", c_int),
    ]


@cache
def _library() -> ctypes.CDLL:
    names = ["libnppif.so.13", "libnppif.so.12", "libnppif.so"]
    for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        names += sorted(glob.glob(f"{root}/lib64/libnppif.so*")) if root else []
    return open_library(names, "nppif")


def _context() -> _StreamContext:
    import torch

    device = torch.cuda.current_device()
    about = torch.cuda.get_device_properties(device)
    threads = getattr(about, "max_threads_per_multi_processor", 2048)
    counts = (about.multi_processor_count, threads, 1024, 48 * 1024, about.major, about.minor, 0, 0)
    return _StreamContext(None, device, *counts)


class NppPeer(Peer):
    """nppiFilter_32f on an image whose border was written out beforehand, outside the timed region.

    That call has no border of its own, and for 3×3 and 5×5 ignores what lies there. For border replicate there is
    nppiFilterBorder_32f too, the only border that it has.
    """

    name = "npp"
    engines = ("npp", "npp:border")
    solves = ("filter2d",)
    needs_gpu = True

    def absent(self) -> str | None:
        if reason := missing_library(_library, "libnppif, NPP's filter library,"):
            return reason
        return None if hasattr(_library(), "nppiFilter_32f_C1R_Ctx") else "its libnppif lacks nppiFilter_32f_C1R_Ctx"

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "filter2d"
        if problem.dtype != "float32" or problem.out_dtype or problem.batch * problem.channels != 1 or problem.valid:
            yield Unable(self.name, "called for one float32 image, and results as large")
            return
        if problem.reduction is not None:
            yield self._box(problem, operands)
            return
        if problem.rank:
            yield self._rows_and_columns(problem, operands)
            return
        yield self._plain(problem, operands)
        if problem.border == "replicate":
            yield self._border(problem, operands)

    def _plain(self, problem: FilterProblem, operands: Operands) -> Candidate:
        # Rows and the first pixel lie on 512 bytes, as an allocation of NPP's own would.
        width = ceil_div(_MARGIN + problem.w + problem.kw, _MARGIN) * _MARGIN
        rows = np.arange(problem.h + problem.kh - 1) - problem.anchor[0]
        image = with_border(problem, operands.image, rows, np.arange(width) - _MARGIN)[0]
        pitch = image.shape[1] * 4
        note, frame = "border written out beforehand, not timed", 0
        if (problem.kh, problem.kw) in _BLIND:
            frame = problem.kh // 2
            note = f"it reads nothing outside the image: a frame of {frame} pixels is wrong, and not in the error"
        start = image.data_ptr() + problem.anchor[0] * pitch + 4 * _MARGIN
        call, y = _caller("nppiFilter_32f_C1R_Ctx", problem, operands, (start, pitch), keep=image)
        return Candidate("npp", "nppiFilter_32f_C1R", call, out=y, frame=frame, note=note)

    def _border(self, problem: FilterProblem, operands: Operands) -> Candidate:
        name, source = "nppiFilterBorder_32f_C1R", (operands.image.data_ptr(), 4 * problem.w)
        place = (_Size(problem.w, problem.h), _Point(0, 0))
        call, y = _caller(f"{name}_Ctx", problem, operands, source, place, (c_int(_BORDER_REPLICATE),))
        return Candidate("npp:border", name, call, out=y)

    def _box(self, problem: FilterProblem, operands: Operands) -> Candidate | Unable:
        if problem.reduction != "sum" or problem.border != "replicate":
            return Unable("npp:border", "called for means of boxes with border replicate")
        name, y = "nppiFilterBoxBorder_32f_C1R_Ctx", operands.output()
        size, pitch = _Size(problem.w, problem.h), c_int(4 * problem.w)
        at = c_void_p(operands.image.data_ptr()), pitch, size, _Point(0, 0), c_void_p(y.data_ptr()), pitch, size
        box = _Size(problem.kw, problem.kh), _Point(problem.anchor[1], problem.anchor[0]), c_int(_BORDER_REPLICATE)
        entry, context = getattr(_library(), name), _context()

        def call() -> Any:
            status = entry(*at, *box, context)
            if status:
                raise RuntimeError(f"{name} returned NppStatus {status}")
            return y

        return Candidate("npp:border", "nppiFilterBoxBorder_32f_C1R", call, out=y)

    def _rows_and_columns(self, problem: FilterProblem, operands: Operands) -> Candidate | Unable:
        if problem.rank != 1 or problem.border != "replicate":
            return Unable("npp:border", "filters rows and columns with one column and one row, and border replicate")
        import torch

        names = ("nppiFilterRowBorder_32f_C1R_Ctx", "nppiFilterColumnBorder_32f_C1R_Ctx")
        library, y, between = _library(), operands.output(), torch.empty_like(operands.image)
        # NPP convolves: taps are reversed, and their anchors with them
        column, row = (each.flip(0).contiguous() for each in operands.weights[0].split((problem.kh, problem.kw)))
        anchors = problem.kw - 1 - problem.anchor[1], problem.kh - 1 - problem.anchor[0]
        size, pitch, border = _Size(problem.w, problem.h), c_int(4 * problem.w), c_int(_BORDER_REPLICATE)
        calls = []
        for name, source, to, taps, anchor in zip(
            names, (operands.image, between), (between, y), (row, column), anchors, strict=True
        ):
            at = c_void_p(source.data_ptr()), pitch, size, _Point(0, 0), c_void_p(to.data_ptr()), pitch, size
            filtered = c_void_p(taps.data_ptr()), c_int(len(taps)), c_int(anchor), border, _context()
            calls.append((name, (*at, *filtered)))

        def call(keep: Any = (between, row, column)) -> Any:
            for name, arguments in calls:
                status = getattr(library, name)(*arguments)
                if status:
                    raise RuntimeError(f"{name} returned NppStatus {status}")
            return y

        return Candidate("npp:border", "nppiFilterRowBorder, nppiFilterColumnBorder", call, out=y)


def _caller(
    function: str, problem: FilterProblem, operands: Operands, source: tuple[int, int],
    place: tuple[Any, ...] = (), border: tuple[Any, ...] = (), keep: Any = None,
) -> tuple[Callable[[], Any], Any]:  # fmt: skip
    """A call of a function of NPP, and its output: ``source`` is where pixels lie and bytes of a row; ``place`` and
    ``border`` are what a function with borders takes besides, ``keep`` lives as long as the call."""
    entry, y = getattr(_library(), function), operands.output()
    # NPP convolves, this project correlates: the filter is rotated by 180 degrees, and its anchor with it
    kernel = operands.kernel.flip(0, 1).contiguous()
    anchor = _Point(problem.kw - 1 - problem.anchor[1], problem.kh - 1 - problem.anchor[0])
    result = (c_void_p(y.data_ptr()), c_int(4 * problem.w), _Size(problem.w, problem.h))
    taps = (c_void_p(kernel.data_ptr()), _Size(problem.kw, problem.kh), anchor)
    arguments = (c_void_p(source[0]), c_int(source[1]), *place, *result, *taps, *border, _context())

    def call(keep: Any = (keep, kernel)) -> Any:
        status = entry(*arguments)
        if status:
            raise RuntimeError(f"{function} returned NppStatus {status}")
        return y

    return call, y
