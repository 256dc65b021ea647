"""Random data of a problem, and the float64 answers that every engine's output is compared with.

Large problems are checked on a part of the output: random images, and where one image is still too much, three bands of
whole output rows (the first, the last, and a random one), so that borders are always among what is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from leanconv.arrays.memory import lay_out
from leanconv.call.host_call import torch_epilogue
from leanconv.cpu import oracle
from leanconv.cpu.epilogue import finish
from leanconv.cpu.oracle import border_indices
from leanconv.dtypes import DTYPES, is_integer
from leanconv.options import Layout
from leanconv.problem import ConvProblem, FilterProblem, Operand, Problem

#: Float64 operations and elements that the reference of one problem may take.
_GPU_LIMITS = (3e11, 2e8)
_CPU_LIMITS = (4e8, 2e7)


def in_order(array: Any, layout: Layout) -> Any:
    """A view of an array of (images, channels, rows, columns), NumPy's or PyTorch's, with its axes as in ``layout``. Of
    volumes the slices come before the rows."""
    return _with_axes(array, lay_out(layout, *range(array.ndim)))


def as_nchw(array: Any, layout: Layout) -> Any:
    """The inverse: an array in ``layout``, viewed as (images, channels, rows, columns)."""
    order = lay_out(layout, *range(array.ndim))
    return _with_axes(array, tuple(order.index(axis) for axis in range(array.ndim)))


def _with_axes(array: Any, order: tuple[int, ...]) -> Any:
    return array.transpose(order) if isinstance(array, np.ndarray) else array.permute(order)


class Operands:
    """Zero-mean random inputs: NumPy arrays, or PyTorch tensors on the current GPU with ``gpu``.

    The two arrays that a layer reads are made once, and copied into a layout when it is first needed.
    """

    def __init__(self, problem: Problem, gpu: bool, seed: int = 0) -> None:
        self.problem = problem
        self.gpu = gpu
        self._seed = seed
        self._layouts: dict[str, tuple[Any, Any]] = {}
        if problem.kind == "conv2d":
            plain = replace(problem, layout="NCHW")
            first, second, *rest = plain.operands
            self._layouts["NCHW"] = (self._normal(first, 1.0), self._normal(second, max(1, plain.terms) ** -0.5))
            beside = {each.role: self._normal(each, 1.0) for each in rest[:-1]}
            self.bias, self.scale = beside.get("bias"), beside.get("scale")
            self._residuals: dict[str, Any] = {"NCHW": beside.get("add")}
        else:
            x, w, _ = problem.operands
            self.image = self._normal(x, 1.0)
            # what our call takes: the kernel, the products that it is a sum of, or the weight of a box
            self.weights = self._normal(w, (problem.kh * problem.kw) ** (-0.25 if problem.rank else -0.5))
            if problem.reduction is not None:
                self.weights[...] = 1 / (problem.kh * problem.kw)
            self.kernel = self.weights if problem.is_whole else _whole(problem, self.weights)

    def _normal(self, operand: Operand, scale: float) -> Any:
        """Normally distributed numbers; integers are all that there are, those of 32 bits of two digits."""
        self._seed += 1
        shape, dtype = operand.shape, operand.dtype
        low, high = (-99, 99) if dtype == "int32" else (DTYPES[dtype].low, DTYPES[dtype].high)
        if self.gpu:
            import torch

            generator, kind = torch.Generator("cuda").manual_seed(self._seed), getattr(torch, dtype)
            if is_integer(dtype):
                return torch.randint(low, high + 1, shape, generator=generator, device="cuda", dtype=kind)
            return torch.randn(shape, generator=generator, device="cuda").mul_(scale).to(kind)
        random = np.random.default_rng(self._seed)
        if is_integer(dtype):
            return random.integers(low, high, shape, dtype, endpoint=True)
        return (random.standard_normal(shape, np.float32) * np.float32(scale)).astype(dtype, copy=False)

    def _layout(self, layout: Layout) -> tuple[Any, Any]:
        if layout not in self._layouts:
            x, w = (in_order(array, layout) for array in self._layouts["NCHW"])
            moved = (x.contiguous(), w.contiguous()) if self.gpu else (np.ascontiguousarray(x), np.ascontiguousarray(w))
            self._layouts[layout] = moved
        return self._layouts[layout]

    def x(self, layout: Layout) -> Any:
        """What a layer reads first, contiguous in ``layout``: its input, or the gradient of its output (dgrad)."""
        return self._layout(layout)[0]

    def w(self, layout: Layout) -> Any:
        """What a layer reads besides, contiguous in ``layout``: its filters, or the gradient of its output (wgrad)."""
        return self._layout(layout)[1]

    def residual(self, layout: Layout) -> Any:
        """What is added to a layer's sums, contiguous in ``layout``; None where nothing is."""
        plain = self._residuals["NCHW"]
        if plain is not None and layout not in self._residuals:
            moved = in_order(plain, layout)
            self._residuals[layout] = moved.contiguous() if self.gpu else np.ascontiguousarray(moved)
        return self._residuals.get(layout)

    def output(self, layout: Layout | None = None) -> Any:
        """A new output array full of NaN (of a number no answer reaches, for integers)."""
        problem = self.problem
        if problem.kind == "conv2d":
            problem = replace(problem, layout=layout or problem.layout)
        shape, dtype = problem.operands[-1].shape, problem.operands[-1].dtype
        if self.gpu:
            import torch

            y: Any = torch.empty(shape, dtype=getattr(torch, dtype), device="cuda")
        else:
            y = np.empty(shape, dtype)
        poison(y)
        return y


def poison(y: Any) -> None:
    """Fill an array so that an element that is never written shows in the error."""
    dtype = str(y.dtype).rpartition(".")[2]
    y[...] = float("nan") if "float" in dtype else DTYPES[dtype].low or DTYPES[dtype].high


@dataclass(frozen=True)
class _Block:
    """A part of the output: all channels and columns of rows ``begin`` to ``end`` of some images.

    Of the gradient of filters: some filters, whole.
    """

    images: Any
    begin: int
    end: int


class Check:
    """The float64 answer to a problem on all of its output or on a part, and errors against it."""

    def __init__(self, operands: Operands, seed: int = 0) -> None:
        self._operands = operands
        self._blocks = tuple(_blocks(operands.problem, _GPU_LIMITS if operands.gpu else _CPU_LIMITS, seed))

    @property
    def checked(self) -> str:
        """What is compared, in words."""
        problem = self._operands.problem
        images, rows = _extents(problem)
        what = "filters" if problem.kind == "conv2d" and problem.op == "wgrad" else "images"
        some = f"{len(self._blocks[0].images)} of {images} {what}"
        taken = sum(block.end - block.begin for block in self._blocks)
        return some if taken == rows else f"{some}, {taken} of {rows} rows"

    @cached_property
    def _answers(self) -> list[Any]:
        reference = _layer_block if self._operands.problem.kind == "conv2d" else _filter_block
        return [reference(self._operands, block) for block in self._blocks]

    def error(self, y: Any, layout: Layout | None = None, frame: int = 0) -> float:
        """Relative Frobenius error of an output, ``‖y - reference‖ / ‖reference‖``; NaN where it holds a NaN.

        A layer's output is in ``layout``. ``frame`` pixels along the edges of a filtered image are left out.
        """
        difference = size = 0.0
        y = y if layout is None else as_nchw(y, layout)
        height, width = y.shape[-2:]
        problem = self._operands.problem
        layer = problem.kind == "conv2d"
        for block, answer in zip(self._blocks, self._answers, strict=True):
            part = _picked(y, block.images)
            part = part[..., block.begin : block.end, :] if layer else part[:, block.begin : block.end]
            if frame:
                rows = slice(max(frame - block.begin, 0), min(height - frame, block.end) - block.begin)
                part, answer = part[..., rows, frame : width - frame], answer[..., rows, frame : width - frame]
            part = part.double() if self._operands.gpu else part.astype(np.float64)
            off = abs(part - answer)
            if problem.kind == "filter2d" and is_integer(problem.result) and problem.sums != "int32":
                off = (off - 0.5).clip(0)  # its rounding to an integer is no error
            difference += float((off**2).sum())
            size += float((answer**2).sum())
        return float(np.sqrt(difference / size)) if size else float(np.sqrt(difference))


def _extents(problem: Problem) -> tuple[int, int]:
    """Images (of the gradient of filters: filters) of the output, and their rows."""
    if problem.kind == "filter2d":
        return problem.batch, problem.out_h
    return {"dgrad": (problem.n, problem.h), "wgrad": (problem.k, problem.r)}.get(problem.op, (problem.n, problem.p))


def _blocks(problem: Problem, limits: tuple[float, float], seed: int) -> Iterator[_Block]:
    random = np.random.default_rng(seed)
    count, rows = _extents(problem)
    if problem.kind == "conv2d" and problem.op == "wgrad":
        # a filter's gradient takes its channels of all images
        elements = problem.n * problem.group_c * problem.d * problem.h * problem.w + problem.pixels
    elif problem.kind == "conv2d":
        elements = problem.c * problem.d * problem.h * problem.w + problem.k * problem.z * problem.p * problem.q
    else:
        elements = 2 * problem.h * problem.w * problem.channels
    flops = problem.flops / count
    if problem.kind == "filter2d":  # products are checked as the kernel that they make
        flops = replace(problem, rank=0, reduction=None).flops / count
    fit = min(limits[0] / flops, limits[1] / elements)
    images = np.sort(random.permutation(count)[: max(1, min(count, int(fit)))])
    band = int(rows * fit / 3)
    gradient = problem.kind == "conv2d" and problem.op != "fprop"
    if fit >= 1 or 3 * band >= rows or gradient:
        yield _Block(images, 0, rows)
        return
    band = max(1, band)
    middle = int(random.integers(band, max(band, rows - 2 * band) + 1))
    for begin in (0, middle, rows - band):
        yield _Block(images, begin, begin + band)


def _layer_block(operands: Operands, block: _Block) -> Any:
    """A layer's answer on a block, as that of a smaller layer."""
    problem, x, w = operands.problem, operands.x("NCHW"), operands.w("NCHW")
    assert problem.kind == "conv2d"
    part = replace(problem.plain, n=len(block.images), layout="NCHW", accumulate=False)
    if problem.op == "wgrad":
        own = block.images // problem.group_k * problem.group_c
        channels = (own[:, None] + np.arange(problem.group_c)).ravel()
        count = len(block.images)
        part = replace(part, n=problem.n, c=len(channels), k=count, groups=count)
        x, w = x[:, channels], w[:, block.images]
    elif problem.op == "dgrad":
        x = x[block.images]
    else:  # the rows of the input that it reads
        first = block.begin * problem.stride[0] - problem.padding[0]
        last = (block.end - 1) * problem.stride[0] - problem.padding[0] + (problem.r - 1) * problem.dilation[0] + 1
        begin, end = max(0, min(first, problem.h)), max(0, min(last, problem.h))
        part = replace(part, h=end - begin, padding=(begin - first, last - end, *problem.padding[2:]))
        x = x[block.images][..., begin:end, :]
    y: Any = _direct_torch(part, x.double(), w.double()) if operands.gpu else oracle.conv2d(part, x, w)
    if problem.op != "fprop":
        return y
    add = operands.residual("NCHW")
    add = None if add is None else add[block.images][..., block.begin : block.end, :]
    if operands.gpu:
        bias, scale, add = (None if each is None else each.double() for each in (operands.bias, operands.scale, add))
        return torch_epilogue(y, y.dim() - 2, bias, scale, add, problem.activation)
    return finish(y, 1, operands.bias, operands.scale, add, problem.activation)


def _picked(array: Any, images: np.ndarray) -> Any:
    """``array[images]``. PyTorch indexes no uint16 on a GPU: those come as int32."""
    if str(array.dtype) != "torch.uint16":
        return array[images]
    import torch

    return array.view(torch.int16)[images].to(torch.int32) & 0xFFFF


def _direct_torch(problem: ConvProblem, x: Any, w: Any) -> Any:
    """The direct convolution, or a gradient, in float64 on the GPU: one matrix product for each filter element."""
    if not problem.is_volume:  # images are volumes of one slice
        return _direct_torch_volume(problem, x.unsqueeze(2), w.unsqueeze(2)).squeeze(2)
    return _direct_torch_volume(problem, x, w)


def _direct_torch_volume(problem: ConvProblem, x: Any, w: Any) -> Any:
    import torch

    front, back, top, bottom, left, right = (*problem.padding_d, *problem.padding)
    channels, filters = (problem.groups, problem.group_c), (problem.groups, problem.group_k)
    if problem.op == "dgrad":
        grad, w = x.unflatten(1, filters), w.unflatten(0, filters)
        extent = problem.d + front + back, problem.h + top + bottom, problem.w + left + right
        image = x.new_zeros((problem.n, *channels, *extent))
        for tap, seen in _taps(problem):
            image[seen] += torch.einsum("ngkzpq,gkc->ngczpq", grad, w[tap])
        kept = image.flatten(1, 2)[:, :, front : front + problem.d, top : top + problem.h]
        return kept[..., left : left + problem.w]
    image = torch.nn.functional.pad(x, (left, right, top, bottom, front, back)).unflatten(1, channels)
    if problem.op == "wgrad":
        grad = w.unflatten(1, filters)
        result = x.new_zeros((*filters, problem.group_c, problem.t, problem.r, problem.s))
        for tap, seen in _taps(problem):
            result[tap] = torch.einsum("ngkzpq,ngczpq->gkc", grad, image[seen])
        return result.flatten(0, 1)
    w = w.unflatten(0, filters)
    y: Any = 0.0
    for tap, seen in _taps(problem):
        y = y + torch.einsum("ngczpq,gkc->ngkzpq", image[seen], w[tap])
    return y.flatten(1, 2)


def _taps(problem: ConvProblem) -> Iterator[tuple[Any, Any]]:
    """Indices of each tap, and of what its windows cover of padded volumes: (n, groups, channels, slices, rows,
    columns)."""
    axes = (
        (problem.t, problem.dilation_d, problem.z, problem.stride_d),
        (problem.r, problem.dilation[0], problem.p, problem.stride[0]),
        (problem.s, problem.dilation[1], problem.q, problem.stride[1]),
    )
    for tap in product(*(range(taps) for taps, *_ in axes)):
        seen = [
            slice(number * apart, number * apart + (outputs - 1) * step + 1, step)
            for number, (_, apart, outputs, step) in zip(tap, axes, strict=True)
        ]
        yield (..., *tap), (..., *seen)


def with_border(problem: FilterProblem, image: Any, rows: np.ndarray, columns: np.ndarray) -> Any:
    """A copy of images (batch, h, w), of any array kind, at these row and column numbers, the border written out."""
    row, row_inside = border_indices(problem.border, rows, problem.h)
    column, column_inside = border_indices(problem.border, columns, problem.w)
    extended = image[:, row][:, :, column]
    extended[:, ~row_inside] = 0
    extended[:, :, ~column_inside] = 0
    return extended


def _filter_block(operands: Operands, block: _Block) -> Any:
    """A filter's answer on a block: the border written out as an index for each row and column, then shifted sums."""
    problem = operands.problem
    assert problem.kind == "filter2d"
    (anchor_y, anchor_x), height = problem.anchor, block.end - block.begin
    rows = np.arange(block.begin, block.end + problem.kh - 1) - anchor_y
    columns = np.arange(problem.out_w + problem.kw - 1) - anchor_x
    window = with_border(problem, _picked(operands.image, block.images), rows, columns)
    window = window.double() if operands.gpu else window.astype(np.float64)
    kernel = operands.kernel.tolist()
    if problem.reduction == "median":
        places = [(u, v) for u in range(problem.kh) for v in range(problem.kw)]
        seen = [window[:, u : u + height, v : v + problem.out_w] for u, v in places]
        return _median(seen)
    y: Any = None
    for u in range(problem.kh):
        for v in range(problem.kw):
            seen = window[:, u : u + height, v : v + problem.out_w]
            if problem.reduction in ("min", "max"):
                y = seen if y is None else _take(problem.reduction, y, seen)
            else:
                y = kernel[u][v] * seen + (0.0 if y is None else y)
    return y.clip(DTYPES[problem.result].low, DTYPES[problem.result].high) if is_integer(problem.result) else y


def _median(arrays: list[Any]) -> Any:
    if isinstance(arrays[0], np.ndarray):
        return np.median(np.stack(arrays), axis=0)
    import torch

    return torch.stack(arrays).median(0).values


def _take(reduction: str, a: Any, b: Any) -> Any:
    """The lesser, or the larger, of arrays of NumPy or PyTorch."""
    name = f"{reduction}imum"
    return getattr(np, name)(a, b) if isinstance(a, np.ndarray) else getattr(a, name)(b)


def _whole(problem: FilterProblem, weights: Any) -> Any:
    """The kernel that is the sum of products of a column and a row, or all of one weight."""
    if problem.rank:
        return (weights[:, : problem.kh, None] * weights[:, None, problem.kh :]).sum(0)
    return weights.repeat(problem.kh * problem.kw).reshape(problem.kh, problem.kw)
