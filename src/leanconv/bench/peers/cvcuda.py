"""CV-CUDA, NVIDIA's library of image operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_cuda_torch
from leanconv.images.borders import BORDERS
from leanconv.problem import FilterProblem, Problem

_TYPES = "uint8", "uint16", "int16", "int32", "float32"


class CvcudaPeer(Peer):
    """conv2d, which takes batches of images of different sizes only; averageblur, morphology and median_blur."""

    name = "cvcuda"
    engines = ("cvcuda",)
    solves = ("filter2d",)
    needs_gpu = True
    module = "cvcuda"

    def absent(self) -> str | None:
        return super().absent() or missing_cuda_torch()

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "filter2d"
        if reason := _why_not(problem):
            yield Unable(self.name, reason)
            return
        y = operands.output()
        # images of one channel need their axis of channels, too
        shape = (problem.batch, problem.h, problem.w, problem.channels)
        x, out = operands.image.reshape(shape), y.view(shape)
        name, call = _conv2d(problem, operands, x, out) if problem.reduction is None else _of_boxes(problem, x, out)

        def whole() -> Any:
            call()
            return y

        yield Candidate(self.name, name, whole, workspace_bytes=None, out=y)


def _why_not(problem: FilterProblem) -> str | None:
    if problem.dtype not in _TYPES or problem.out_dtype or problem.channels not in (1, 3, 4):
        return f"its filters take {', '.join(_TYPES)}, images of 1, 3 or 4 channels, and results of the same type"
    if problem.valid or problem.per_image:
        return "called for results as large as the image, and one filter"
    if problem.reduction == "median" and problem.border != "replicate":
        return "its median_blur has border replicate"
    return None


def _border(problem: FilterProblem) -> Any:
    import cvcuda

    return getattr(cvcuda.Border, BORDERS[problem.border].opencv[0].removeprefix("BORDER_").replace("_", ""))


def _stream() -> Any:
    import cvcuda
    import torch

    return cvcuda.as_stream(torch.cuda.current_stream())


def _conv2d(problem: FilterProblem, operands: Operands, x: Any, out: Any) -> tuple[str, Any]:
    import cvcuda
    import torch

    def batch(images: Any) -> Any:
        result = cvcuda.ImageBatchVarShape(len(images))
        for image in images:
            result.pushback(cvcuda.as_image(image))
        return result

    n, (top, left) = problem.batch, problem.anchor
    kernel = torch.as_tensor(operands.kernel, dtype=torch.float32, device=x.device).reshape(problem.kh, problem.kw, 1)
    kernels = batch([kernel.contiguous()] * n)
    anchors = cvcuda.as_tensor(torch.tensor([[left, top]] * n, dtype=torch.int32, device=x.device), "NC")
    source, target, border, stream = batch(x), batch(out), _border(problem), _stream()

    def call() -> None:
        cvcuda.conv2d_into(target, source, kernels, anchors, border, stream=stream)

    return "conv2d", call


def _of_boxes(problem: FilterProblem, x: Any, out: Any) -> tuple[str, Any]:
    import cvcuda

    source, target = cvcuda.as_tensor(x, "NHWC"), cvcuda.as_tensor(out, "NHWC")
    size, anchor, stream = (problem.kw, problem.kh), (problem.anchor[1], problem.anchor[0]), _stream()

    def mean() -> None:
        cvcuda.averageblur_into(target, source, size, anchor, _border(problem), stream=stream)

    def median() -> None:
        cvcuda.median_blur_into(target, source, size, stream=stream)

    def morphology() -> None:
        kind = cvcuda.MorphologyType.ERODE if problem.reduction == "min" else cvcuda.MorphologyType.DILATE
        cvcuda.morphology_into(target, source, kind, size, anchor, border=_border(problem), stream=stream)

    assert problem.reduction is not None
    names = {"sum": ("averageblur", mean), "median": ("median_blur", median)}
    return names.get(problem.reduction, ("morphology", morphology))
