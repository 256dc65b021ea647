"""Every algorithm of the installed cuDNN by its name, for layers and both of their gradients, through its C interface,
with float32 FMA arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from leanconv.bench.operands import Operands
from leanconv.bench.peers.base import Candidate, Peer, Unable, missing_library, open_library
from leanconv.options import Layout, Op
from leanconv.problem import ConvProblem, Problem


@dataclass(frozen=True)
class _Operation:
    """What cuDNN computes: its function, the descriptors of the two operands that are read and of the result, and the
    names of its algorithms, in the order of their numbers."""

    function: str
    reads: tuple[str, str]
    writes: str
    algorithms: tuple[str, ...]


#: By the operation of a problem. cudnnConvolutionFwdAlgo_t, ...BwdDataAlgo_t and ...BwdFilterAlgo_t name them; of those
#: without a name algorithm 0 adds with atomics.
OPERATIONS: dict[Op, _Operation] = {
    "fprop": _Operation(
        "Forward", ("x", "w"), "y",
        ("implicit_gemm", "implicit_precomp_gemm", "gemm", "direct", "fft", "fft_tiling", "winograd",
         "winograd_nonfused"),
    ),
    "dgrad": _Operation(
        "BackwardData", ("w", "y"), "x", ("algo_0", "algo_1", "fft", "fft_tiling", "winograd", "winograd_nonfused"),
    ),
    "wgrad": _Operation(
        "BackwardFilter", ("x", "y"), "w",
        ("algo_0", "algo_1", "fft", "algo_3", "winograd", "winograd_nonfused", "fft_tiling"),
    ),
}  # fmt: skip
#: cudnnTensorFormat_t of the layouts that it has.
LAYOUTS: dict[Layout, int] = {"NCHW": 0, "NHWC": 1}
_DESCRIPTORS = (("Tensor", "x"), ("Filter", "w"), ("Tensor", "y"), ("Convolution", "convolution"))
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
    library = open_library(("libcudnn.so.9", "libcudnn.so.8", "libcudnn.so"), "cudnn")
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
        self.operation = OPERATIONS[problem.op]
        self.handle, self.x, self.w, self.y, self.convolution = (c_void_p() for _ in range(5))
        _do("cudnnCreate", byref(self.handle))
        for kind, name in _DESCRIPTORS:
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
        size, named = c_size_t(), self.operation
        first, second = (getattr(self, name) for name in named.reads)
        descriptors = (first, second, self.convolution, getattr(self, named.writes))
        _do(f"cudnnGetConvolution{named.function}WorkspaceSize", self.handle, *descriptors, algorithm, byref(size))
        return size.value

    def run(self, algorithm: int, first: Any, second: Any, result: Any, workspace: Any) -> None:
        """Queue one convolution on the default stream; operands in cuDNN's order."""
        one, zero, named = c_float(1.0), c_float(0.0), self.operation
        size = c_size_t(workspace.numel())
        read = zip(named.reads, (first, second), strict=True)
        inputs = [each for name, data in read for each in (getattr(self, name), c_void_p(data.data_ptr()))]
        scratch = (c_void_p(workspace.data_ptr() if workspace.numel() else None), size)
        output = (getattr(self, named.writes), c_void_p(result.data_ptr()))
        arguments = (*inputs, self.convolution, algorithm, *scratch, byref(zero), *output)
        _do(f"cudnnConvolution{named.function}", self.handle, byref(one), *arguments)

    def close(self) -> None:
        for kind, name in _DESCRIPTORS:
            _do(f"cudnnDestroy{kind}Descriptor", getattr(self, name))
        _do("cudnnDestroy", self.handle)


class CudnnPeer(Peer):
    """cudnnConvolutionForward, ...BackwardData or ...BackwardFilter with each algorithm that takes the problem, on the
    buffers the others use."""

    name = "cudnn"
    engines = tuple(
        f"cudnn:{name}-{layout}"
        for name in dict.fromkeys(each for operation in OPERATIONS.values() for each in operation.algorithms)
        for layout in ("nchw", "nhwc")
    )
    solves = ("conv2d",)
    needs_gpu = True

    def absent(self) -> str | None:
        return missing_library(_library, "the cuDNN library")

    def versions(self) -> dict[str, str]:
        return {"cudnn": str(_library().cudnnGetVersion())}

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        assert problem.kind == "conv2d"
        top, bottom, left, right = problem.padding
        if (top, left) != (bottom, right) or problem.bias or problem.plain != problem or problem.dtype != "float32":
            yield Unable("cudnn", "called for plain float32 layers with even padding: no bias, no activation")
            return
        for layout in LAYOUTS:
            layer = _Layer(problem, layout)
            try:
                for number in range(len(layer.operation.algorithms)):
                    yield from self._candidate(layer, number, operands, layout)
            finally:
                layer.close()

    def _candidate(
        self, layer: _Layer, number: int, operands: Operands, layout: Layout
    ) -> Iterator[Candidate | Unable]:
        import torch

        name = layer.operation.algorithms[number]
        engine = f"cudnn:{name}-{layout.lower()}"
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
        if layer.operation.function == "BackwardData":
            x, w = w, x  # cuDNN reads the filters first

        def call() -> Any:
            layer.run(number, x, w, y, workspace)
            return y

        yield Candidate(engine, name, call, layout, size, out=y)
