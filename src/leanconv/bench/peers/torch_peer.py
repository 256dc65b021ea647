"""PyTorch as a user gets it: strict FP32 and TF32, cudnn.benchmark on, both memory formats; and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from leanconv.bench.operands import Operands, as_nchw, in_order
from leanconv.bench.peers.base import Candidate, Peer, Unable
from leanconv.bench.results import PEER_LAYOUTS
from leanconv.dtypes import is_integer, is_narrow
from leanconv.images.borders import BORDERS
from leanconv.options import Layout
from leanconv.problem import ConvProblem, FilterProblem, Problem


@contextmanager
def arithmetic(tf32: bool) -> Iterator[None]:
    """PyTorch with or without TF32 and with cuDNN's search; afterwards its switches are as they were."""
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32
    cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32 = tf32, True, tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark, matmul.allow_tf32 = before


def _layer(problem: ConvProblem, operands: Operands, layout: Layout) -> Callable[[], Any]:
    """F.conv2d or F.conv3d, or a gradient, on tensors whose memory order is ``layout``, and so is the output's; what
    follows a layer's sums is by PyTorch's functions."""
    import torch

    def tensor(array: Any) -> Any:
        return array if array is None or operands.gpu else torch.from_numpy(array)

    x, w, add = (tensor(each) for each in (operands.x(layout), operands.w(layout), operands.residual(layout)))
    add = None if add is None else as_nchw(add, layout)
    bias, scale = tensor(operands.bias), tensor(operands.scale)
    from leanconv.torch.measured_time import call_of

    problem = replace(problem, layout=layout, bias=False)
    call = call_of(problem, as_nchw(x, layout), as_nchw(w, layout), bias, scale, add)
    return lambda: in_order(call(), layout)


def _filter(problem: FilterProblem, image: Any, kernel: Any, weights: Any) -> Callable[[], Any] | str:
    """F.conv2d with one channel, the border by F.pad where conv2d itself has none; a sentence where neither has it. Of
    a column times a row two of them."""
    from torch.nn.functional import conv2d, pad

    if problem.dtype not in ("float32", "float16") or problem.out_dtype or problem.valid or problem.channels > 1:
        return f"called for planes of float32 and float16, and results alike; the image is {problem.dtype}"
    if problem.reduction is not None:
        return "PyTorch's pooling has no borders but zeros"
    x, w = image[:, None], kernel.to(image.dtype)[None, None]
    (y0, x0), (kh, kw) = problem.anchor, (problem.kh, problem.kw)
    sides = (x0, kw - 1 - x0, y0, kh - 1 - y0)
    filters = [w]
    if problem.rank == 1:
        column, row = weights[0].to(image.dtype).split((problem.kh, problem.kw))
        filters = [row[None, None, None], column[None, None, :, None]]

    def filtered(x: Any, **padding: Any) -> Any:
        for each in filters:
            x = conv2d(x, each, **padding)
        return x[:, 0]

    if problem.border == "constant":
        if len(filters) == 1 and sides[0] == sides[1] and sides[2] == sides[3]:
            return lambda: filtered(x, padding=(y0, x0))
        return lambda: filtered(pad(x, sides))
    mode = BORDERS[problem.border].torch
    if mode is None:
        return f"PyTorch pads no border {problem.border!r}"
    return lambda: filtered(pad(x, sides, mode=mode))


class TorchPeer(Peer):
    """F.conv2d on the GPU."""

    name = "torch"
    engines = ("torch",) + tuple(
        f"torch-{kind}-{layout.lower()}" for kind in ("fp32", "tf32", "float16", "bfloat16") for layout in PEER_LAYOUTS
    )
    solves = ("conv2d", "filter2d")
    volumes = True
    needs_gpu = True
    module = "torch"

    def versions(self) -> dict[str, str]:
        import torch

        return {**super().versions(), "cudnn": str(torch.backends.cudnn.version())}

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        if problem.kind == "filter2d":
            call = _filter(problem, operands.image, operands.kernel, operands.weights)
            if isinstance(call, str):
                yield Unable("torch", call)
            else:
                strict = lambda: arithmetic(False)  # noqa: E731
                yield Candidate("torch", "conv2d", call, workspace_bytes="measure", scope=strict, note="strict FP32")
            return
        if is_integer(problem.dtype):
            yield Unable("torch", f"PyTorch's convolution does not take {problem.dtype}")
            return
        # 16-bit elements go to the tensor cores, with float32 sums, whatever is said of TF32
        kinds = ((problem.dtype, False),) if is_narrow(problem.dtype) else (("fp32", False), ("tf32", True))
        for precision, tf32 in kinds:
            for layout in PEER_LAYOUTS:
                yield Candidate(
                    f"torch-{precision}-{layout.lower()}",
                    ("conv3d" if problem.is_volume else "conv2d") if problem.op == "fprop" else "convolution_backward",
                    _layer(problem, operands, layout),
                    layout,
                    workspace_bytes="measure",
                    arithmetic="tf32" if tf32 else "fp32",
                    scope=lambda tf32=tf32: arithmetic(tf32),  # type: ignore[misc]
                )


class TorchCpuPeer(Peer):
    """F.conv2d on the CPU, in the problem's own memory format, or in NCHW where PyTorch has none such."""

    name = "torch-cpu"
    engines = ("torch-cpu",)
    solves = ("conv2d", "filter2d")
    volumes = True
    needs_gpu = False
    module = "torch"

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        import torch

        note = f"{torch.get_num_threads()} threads"
        layout: Layout | None = None
        if problem.kind == "filter2d":
            arrays = (operands.image, operands.kernel, operands.weights)
            call = _filter(problem, *map(torch.from_numpy, arrays))
        elif is_integer(problem.dtype):
            call = f"PyTorch's convolution does not take {problem.dtype}"
        else:
            layout = problem.layout if problem.layout in PEER_LAYOUTS else "NCHW"
            note += "" if layout == problem.layout else f", {layout}"
            call = _layer(problem, operands, layout)
        if isinstance(call, str):
            yield Unable("torch-cpu", call)
            return
        run = call
        backward = problem.kind == "conv2d" and problem.op != "fprop"
        name = "conv3d" if problem.kind == "conv2d" and problem.is_volume else "conv2d"
        name = "convolution_backward" if backward else name
        yield Candidate("torch-cpu", name, lambda: run().numpy(), layout, None, on_gpu=False, note=note)


class Im2colPeer(Peer):
    """What a careful user writes in two lines: the image unrolled into a matrix, then cuBLAS in strict FP32."""

    name = "im2col+cublas"
    engines = ("im2col+cublas",)
    solves = ("conv2d",)
    needs_gpu = True

    def candidates(self, problem: Problem, operands: Operands, gpu: bool) -> Iterator[Candidate | Unable]:
        import torch

        assert problem.kind == "conv2d"
        if problem.op != "fprop" or problem.groups != 1 or problem.plain != problem:
            yield Unable(self.name, "written for the forward pass of one group, without bias and activation")
            return
        if problem.dtype != "float32":
            yield Unable(self.name, "written for float32 layers")
            return
        columns = 4 * problem.n * problem.c * problem.r * problem.s * problem.p * problem.q
        free = torch.cuda.mem_get_info()[0]
        if columns > 0.7 * free:
            yield Unable(self.name, f"the unrolled image needs {columns} bytes and {free} are free")
            return
        call = (_unfold if problem.layout == "NCHW" else _strided)(problem, operands)
        yield Candidate(
            self.name,
            "unfold, bmm" if problem.layout == "NCHW" else "strided copy, mm",
            call,
            problem.layout,
            workspace_bytes="measure",
            scope=lambda: arithmetic(False),
        )


def _unfold(problem: ConvProblem, operands: Operands) -> Callable[[], Any]:
    import torch
    from torch.nn.functional import pad, unfold

    x, w = operands.x("NCHW"), operands.w("NCHW").flatten(1).expand(problem.n, -1, -1)
    top, bottom, left, right = problem.padding

    def call() -> Any:
        image = pad(x, (left, right, top, bottom)) if any(problem.padding) else x
        columns = unfold(image, (problem.r, problem.s), problem.dilation, 0, problem.stride)
        return torch.bmm(w, columns).unflatten(2, (problem.p, problem.q))

    return call


def _strided(problem: ConvProblem, operands: Operands) -> Callable[[], Any]:
    """Windows are a strided view of the image, copied to a matrix: rows are windows, or in CHWN taps of a
    channel, each a row of whole runs of images."""
    import torch
    from torch.nn.functional import pad

    last = problem.layout == "NHWC"
    x, w = operands.x(problem.layout), operands.w(problem.layout)
    w = w.flatten(1).t() if last else w.flatten(0, 2).t()
    top, bottom, left, right = problem.padding
    taps, outputs = (problem.r, problem.s), (problem.p, problem.q)
    shape = (problem.n, *outputs, *taps, problem.c) if last else (problem.c, *taps, *outputs, problem.n)

    def call() -> Any:
        image = pad(x, (0, 0, left, right, top, bottom)) if any(problem.padding) else x
        outer, row, column, _ = image.stride()
        (step_h, step_w), (dil_h, dil_w) = problem.stride, problem.dilation
        steps, apart = (step_h * row, step_w * column), (dil_h * row, dil_w * column)
        inner = (*steps, *apart) if last else (*apart, *steps)
        columns = image.as_strided(shape, (outer, *inner, 1))
        columns = columns.reshape((-1, problem.r * problem.s * problem.c) if last else (w.shape[1], -1))
        y = torch.mm(columns, w) if last else torch.mm(w, columns)
        return y.unflatten(0, (problem.n, *outputs)) if last else y.unflatten(1, (*outputs, problem.n))

    return call
