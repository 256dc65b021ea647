"""Every forward algorithm of the installed cuDNN by its name, through its C interface, with float32 FMA arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_cuda_torch
from leanconv.problem import ConvProblem, Layout, Problem

#: cudnnConvolutionFwdAlgo_t, in its order.
ALGORITHMS = (
    "implicit_gemm",
    "implicit_precomp_gemm",
    "gemm",
    "direct",
    "fft",
    "fft_tiling",
    "winograd",
    "winograd_nonfused",
)
#: cudnnTensorFormat_t of the layouts that it has.
LAYOUTS: dict[Layout, int] = {"NCHW": 0, "NHWC": 1}
_FLOAT = 0
_CROSS_CORRELATION = 1
_FMA_MATH = 3


class CudnnError(RuntimeError):
    """cuDNN refused a call."""


@cache
def _library() -> ctypes.CDLL:
    # PyTorch brings its own cuDNN and has loaded it by the time this runs; the bare name finds that copy first.
    import torch

    torch.backends.cudnn.version()
    for name in ("libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"):
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(load_nvidia_dynamic_lib("cudnn").abs_path)
    library.cudnnGetErrorString.restype = ctypes.c_char_p
    library.cudnnGetVersion.restype = c_size_t
    return library


def _do(function: str, *arguments: Any) -> None:
    library = _library()
    status = getattr(library, function)(*arguments)
    if status:
        text = library.cudnnGetErrorString(c_int(status)).decode()
        raise CudnnError(f"{function} returned {text} ({status})")


class _Layer:
    """Handle and descriptors of one problem in one layout."""

    def __init__(self, problem: ConvProblem, layout: Layout) -> None:
        self.handle, self.x, self.w, self.y, self.convolution = (c_void_p() for _ in range(5))
        _do("cudnnCreate", byref(self.handle))
        for kind, name in (("Tensor", "x"), ("Filter", "w"), ("Tensor", "y"), ("Convolution", "convolution")):
            _do(f"cudnnCreate{kind}Descriptor", byref(getattr(self, name)))
        code = LAYOUTS[layout]
        n, c, h, w, k, p, q = problem.n, problem.c, problem.h, problem.w, problem.k, problem.p, problem.q
        _do("cudnnSetTensor4dDescriptor", self.x, code, _FLOAT, n, c, h, w)
        _do("cudnnSetFilter4dDescriptor", self.w, _FLOAT, code, k, problem.group_c, problem.r, problem.s)
        _do("cudnnSetTensor4dDescriptor", self.y, code, _FLOAT, n, k, p, q)
        top, _, left, _ = problem.padding
        numbers = (top, left, *problem.stride, *problem.dilation)
        _do("cudnnSetConvolution2dDescriptor", self.convolution, *numbers, _CROSS_CORRELATION, _FLOAT)
        _do("cudnnSetConvolutionGroupCount", self.convolution, problem.groups)
        _do("cudnnSetConvolutionMathType", self.convolution, _FMA_MATH)

    def workspace(self, algorithm: int) -> int:
        """Bytes of workspace that an algorithm needs. Raises CudnnError where it does not support this problem."""
        size = c_size_t()
        descriptors = (self.handle, self.x, self.w, self.convolution, self.y)
        _do("cudnnGetConvolutionForwardWorkspaceSize", *descriptors, algorithm, byref(size))
        return size.value

    def run(self, algorithm: int, x: Any, w: Any, y: Any, workspace: Any) -> None:
        """Queue one convolution on the default stream."""
        one, zero = c_float(1.0), c_float(0.0)
        size = c_size_t(workspace.numel())
        inputs = (self.x, c_void_p(x.data_ptr()), self.w, c_void_p(w.data_ptr()), self.convolution, algorithm)
        scratch = (c_void_p(workspace.data_ptr() if workspace.numel() else None), size)
        output = (self.y, c_void_p(y.data_ptr()))
        _do("cudnnConvolutionForward", self.handle, byref(one), *inputs, *scratch, byref(zero), *output)

    def close(self) -> None:
        """Give handle and descriptors back."""
        for kind, name in (("Tensor", "x"), ("Filter", "w"), ("Tensor", "y"), ("Convolution", "convolution")):
            _do(f"cudnnDestroy{kind}Descriptor", getattr(self, name))
        _do("cudnnDestroy", self.handle)


class CudnnPeer(Peer):
    """cudnnConvolutionForward with each algorithm that takes the problem, on the buffers the others use."""

    name = "cudnn"
    engines = tuple(f"cudnn:{name}-{layout}" for name in ALGORITHMS for layout in ("nchw", "nhwc"))
    solves = ("conv2d",)
    needs_gpu = True

    def absent(self) -> str | None:
        reason = missing_cuda_torch()
        if reason:
            return reason
        try:
            _library()
        except Exception as error:
            return f"the cuDNN library cannot be loaded ({error})"
        return None

    def versions(self) -> dict[str, str]:
        return {"cudnn": str(_library().cudnnGetVersion())}

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "conv2d"
        if problem.op != "fprop":
            yield Unable("cudnn", f"called for the forward pass only, not for op={problem.op!r}")
            return
        top, bottom, left, right = problem.padding
        if (top, left) != (bottom, right) or problem.bias or problem.activation or problem.dtype != "float32":
            yield Unable("cudnn", "called for plain float32 layers with even padding: no bias, no activation")
            return
        for layout in LAYOUTS:
            layer = _Layer(problem, layout)
            try:
                for number in range(len(ALGORITHMS)):
                    yield from self._candidate(layer, number, operands, layout)
            finally:
                layer.close()

    def _candidate(
        self, layer: _Layer, number: int, operands: Operands, layout: Layout
    ) -> Iterator[Candidate | Unable]:
        import torch

        engine = f"cudnn:{ALGORITHMS[number]}-{layout.lower()}"
        try:
            size = layer.workspace(number)
        except CudnnError as error:
            yield Unable(engine, str(error))
            return
        free = torch.cuda.mem_get_info()[0]
        if size > 0.7 * free:
            yield Unable(engine, f"its workspace needs {size} bytes and {free} are free")
            return
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        x, w, y = operands.x(layout), operands.w(layout), operands.output(layout)

        def call() -> Any:
            layer.run(number, x, w, y, workspace)
            return y

        yield Candidate(engine, ALGORITHMS[number], call, layout, size, out=y)
