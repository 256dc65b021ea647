"""Image filters that people use from Python: CuPy's ndimage and cuCIM's on the GPU, OpenCV and SciPy on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_module
from leanconv.images.borders import BORDERS
from leanconv.problem import FilterProblem, Problem

#: Multiply-adds of a call that still takes a second or so.
_SCIPY_LIMIT = 1e8
_OPENCV_LIMIT = 3e10


def _origin(problem: FilterProblem) -> tuple[int, int, int]:
    """SciPy counts an anchor from the filter's centre; the first axis goes over images."""
    return 0, problem.anchor[0] - problem.kh // 2, problem.anchor[1] - problem.kw // 2


class CupyPeer(Peer):
    """cupyx.scipy.ndimage.correlate."""

    name = "cupy"
    engines = ("cupy",)
    solves = ("filter2d",)
    needs_gpu = True
    module = "cupy"
    #: where the filters are, with SciPy's names and arguments
    ndimage: ClassVar[str] = "cupyx.scipy.ndimage"

    def absent(self) -> str | None:
        if reason := super().absent() or missing_module(self.ndimage):
            return reason
        import cupy

        try:
            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            return f"CuPy {cupy.__version__} sees no GPU ({error})"
        return None

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        import cupy

        assert problem.kind == "filter2d"
        if reason := _other_shape(problem):
            yield Unable(self.name, reason)
            return
        if "bfloat16" in (problem.dtype, problem.result):
            yield Unable(self.name, "its filters do not compile for bfloat16")
            return
        ndimage: Any = import_module(self.ndimage)
        y = operands.output()
        single = problem.batch == 1
        x, kernel, out = (cupy.from_dlpack(array) for array in (operands.image, operands.kernel, y))
        origin: tuple[int, ...] = _origin(problem)
        if single:
            x, out, origin = x[0], out[0], origin[1:]
        else:
            kernel = kernel[None]
        mode = BORDERS[problem.border].scipy[0]

        def call() -> Any:
            ndimage.correlate(x, kernel, output=out, mode=mode, origin=origin)
            return y

        if problem.reduction is not None:
            names = {"sum": "uniform", "min": "minimum", "max": "maximum", "median": "median"}
            name = f"{names[problem.reduction]}_filter"
            size = (problem.kh, problem.kw) if single else (1, problem.kh, problem.kw)

            def of_boxes() -> Any:
                getattr(ndimage, name)(x, size, output=out, mode=mode, origin=origin)
                return y

            yield Candidate(self.name, f"ndimage.{name}", of_boxes, workspace_bytes=None, out=y)
        elif problem.rank == 1 and problem.dtype == "float32":
            column, row = (cupy.from_dlpack(each) for each in operands.weights[0].split((problem.kh, problem.kw)))

            def both() -> Any:
                rows = ndimage.correlate1d(x, row, mode=mode, origin=origin[-1])
                ndimage.correlate1d(rows, column, axis=-2, output=out, mode=mode, origin=origin[-2])
                return y

            yield Candidate(self.name, "ndimage.correlate1d, twice", both, workspace_bytes=None, out=y)
        else:
            yield Candidate(self.name, "ndimage.correlate", call, workspace_bytes=None, out=y)


class CucimPeer(CupyPeer):
    """The same functions as cuCIM has them below its skimage, with kernels of its own for one axis."""

    name = "cucim"
    engines = ("cucim",)
    module = "cucim"
    ndimage = "cucim.skimage._vendored.ndimage"


class ScipyPeer(Peer):
    """scipy.ndimage.correlate, on small sizes: it uses one core and no vector instructions."""

    name = "scipy"
    engines = ("scipy",)
    solves = ("filter2d",)
    needs_gpu = False
    module = "scipy.ndimage"

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        from scipy.ndimage import correlate

        assert problem.kind == "filter2d"
        problem = replace(problem, rank=0)
        if reason := _other_shape(problem) or _no_weights(problem) or _too_many(problem, _SCIPY_LIMIT):
            yield Unable(self.name, reason)
            return
        x, kernel = _host(operands.image), _host(operands.kernel)[None]
        y = np.empty_like(x)
        mode, origin = BORDERS[problem.border].scipy[0], _origin(problem)

        def call() -> Any:
            correlate(x, kernel, output=y, mode=mode, origin=origin)
            return y

        yield Candidate(self.name, "ndimage.correlate", call, workspace_bytes=None, out=y, on_gpu=False, note="CPU")


class OpencvPeer(Peer):
    """cv2.filter2D on all the CPU's cores. From 11×11 on it turns to a Fourier transform by itself."""

    name = "opencv"
    engines = ("opencv",)
    solves = ("filter2d",)
    needs_gpu = False
    module = "cv2"

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        import cv2

        assert problem.kind == "filter2d"
        types = "uint8", "uint16", "int16", "float32", "float64"
        if problem.dtype not in types or problem.batch != 1 or problem.border == "wrap":
            yield Unable(self.name, f"called for one image of {', '.join(types)} and any border but wrap")
            return
        if problem.valid or problem.out_dtype or problem.channels > 4:
            yield Unable(self.name, "called for results of the image's size and type, and up to 4 channels")
            return
        if (reason := _too_many(problem, _OPENCV_LIMIT)) and problem.reduction is None:
            yield Unable(self.name, reason)
            return
        x, kernel = _host(operands.image)[0], _host(operands.kernel)
        y = np.empty_like(x)
        anchor, border = (problem.anchor[1], problem.anchor[0]), getattr(cv2, BORDERS[problem.border].opencv[0])

        def call() -> Any:
            cv2.filter2D(x, -1, kernel, dst=y, anchor=anchor, borderType=border)
            return y[None]

        column, row = np.split(_host(operands.weights)[0], [problem.kh]) if problem.rank == 1 else (kernel, kernel)

        def both() -> Any:
            cv2.sepFilter2D(x, -1, row, column, dst=y, anchor=anchor, borderType=border)
            return y[None]

        def of_boxes() -> Any:
            if problem.reduction == "sum":
                cv2.blur(x, (problem.kw, problem.kh), dst=y, anchor=anchor, borderType=border)
            elif problem.reduction == "median":
                cv2.medianBlur(x, problem.kw, dst=y)
            else:
                morph = cv2.erode if problem.reduction == "min" else cv2.dilate
                morph(x, np.ones((problem.kh, problem.kw), np.uint8), dst=y, anchor=anchor, borderType=border)
            return y[None]

        note = f"CPU, {cv2.getNumThreads()} threads"
        if problem.reduction is not None:
            name = {"sum": "blur", "min": "erode", "max": "dilate", "median": "medianBlur"}[problem.reduction]
            if problem.reduction == "median" and (
                problem.border != "replicate" or problem.kw > 5 > problem.itemsize > 1
            ):
                yield Unable(self.name, "its medianBlur has border replicate, and of wide types windows up to 5x5")
                return
            yield Candidate(self.name, name, of_boxes, workspace_bytes=None, out=y, on_gpu=False, note=note)
            return
        name, call = ("sepFilter2D", both) if problem.rank == 1 else ("filter2D", call)
        yield Candidate(self.name, name, call, workspace_bytes=None, out=y, on_gpu=False, note=note)


def _other_shape(problem: FilterProblem) -> str | None:
    plain = problem.channels == 1 and not problem.valid and not problem.per_image
    return None if plain else "called for planes, and results as large as the image"


def _no_weights(problem: FilterProblem) -> str | None:
    return None if problem.reduction is None else "called for filters with weights"


def _too_many(problem: FilterProblem, limit: float) -> str | None:
    if problem.flops / 2 <= limit:
        return None
    return f"{problem.flops // 2} multiply-adds take it seconds; the limit is {limit:.0e}"


def _host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()
