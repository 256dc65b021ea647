"""Ready calls on arrays in host memory: the CPU engine, PyTorch's own convolution, a GPU and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from leanconv.arrays import MemoryOrder, Shape
from leanconv.arrays.numpy import NUMPY, plain
from leanconv.arrays.operands import Epilogue, as_epilogue
from leanconv.call.choose import Candidate
from leanconv.call.gpu_call import Loaded, check_out, roles_of, types_of, writes_bias
from leanconv.call.resolve import Resolved
from leanconv.call.weights import as_weights
from leanconv.cpu.epilogue import finish
from leanconv.cpu.gradients import bias_gradient
from leanconv.dtypes import DtypeName, is_integer, is_narrow
from leanconv.kernels.contract import CpuAlgorithm
from leanconv.options import ACTIVATION_NUMBERS, activation_parts
from leanconv.problem import ConvProblem
from leanconv.runtime import launch


class _HostCall:
    """What calls on arrays in host memory have in common. They keep no array of the first call."""

    def __init__(self, resolved: Resolved) -> None:
        self._arrays, self._names = resolved.operands.arrays, resolved.operands.names
        self._problem, self._shape, self._result = resolved.problem, resolved.shape, resolved.operands.result
        self._w_dtype, self.types = resolved.operands.w_dtype, types_of(resolved.problem)

    def _check_out(self, x: Any, w: Any, bias: Any, out: Any) -> None:
        check_out(self._arrays, self._names, x, w, bias, out)


class HostOnGpuCall(_HostCall):
    """NumPy arrays on a GPU: copied there, run on the default stream, and copied back. The call waits for it."""

    def __init__(self, resolved: Resolved, loaded: Loaded) -> None:
        super().__init__(resolved)
        self._loaded = loaded
        self._run = None if resolved.problem.is_empty else loaded.run

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> np.ndarray:
        if out is not None:
            self._check_out(x, w, bias, out)
        y = out if out is not None and NUMPY.is_contiguous(out) else np.empty(self._shape, self._result)
        if self._run is None:
            y[...] = 0  # as in `GpuCall`
            if writes_bias(self._problem):
                bias[...] = 0
        else:
            w = as_weights(plain(w), self._w_dtype)
            numbers: tuple[Any, ...] = (value, delta) if self._problem.scalars else ()
            if type(bias) is Epilogue:
                bias, *beside = bias
                numbers = tuple(None if each is None else plain(each) for each in beside)
            values = (plain(x), w, None if bias is None else plain(bias), y, *numbers)
            launch.run_on_host_arrays(
                self._loaded.device, self._loaded.plan, dict(zip(roles_of(self._problem), values, strict=False)),
                run=self._run, upload_outputs=False,
            )  # fmt: skip
        if out is None or y is out:
            return y
        np.copyto(out, y)
        return out


def in_memory(array: np.ndarray, order: MemoryOrder) -> np.ndarray:
    """An array with its axes in a memory order."""
    return array if order is None else np.ascontiguousarray(array.transpose(order))


def as_shown(array: np.ndarray, shape: Shape, order: MemoryOrder) -> np.ndarray:
    """An array whose axes are in a memory order, as one of ``shape``."""
    if order is None:
        return array.reshape(shape)
    return array.reshape([shape[axis] for axis in order]).transpose([order.index(i) for i in range(len(order))])


class CpuCall(_HostCall):
    """NumPy arrays, and filters and layers of integers on PyTorch's CPU tensors, on the reference engine."""

    def __init__(self, resolved: Resolved, choice: Candidate) -> None:
        super().__init__(resolved)
        assert isinstance(choice.algorithm, CpuAlgorithm)
        self._algorithm = choice.algorithm
        operands = resolved.operands
        self._order, self._w_order, self._out_order = operands.order, operands.w_order, operands.out_order
        self._read = tuple(operand.shape for operand in resolved.problem.operands[:2])
        if operands.arrays is not NUMPY and self._problem.kind == "filter2d":
            # NumPy has no bfloat16 of its own: float32 holds every one, and is rounded by the library
            types: list[DtypeName] = [self._problem.dtype, self._problem.result]
            types = ["float32" if each == "bfloat16" else each for each in types]
            self._problem = replace(self._problem, dtype=types[0], out_dtype=types[1])
        self._ready = choice.algorithm.ready(self._problem)
        usual = not (self._problem.batch_invariant or self._problem.is_empty or writes_bias(self._problem))
        #: NumPy's arrays are computed as they are
        self._is_direct = operands.arrays is NUMPY and usual and self._order is self._w_order is self._out_order is None

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        arrays, problem = self._arrays, self._problem
        if self._is_direct and out is None:
            if w.dtype != self._w_dtype:
                w = as_weights(w, self._w_dtype)
            x, w, (read, weights) = plain(x), plain(w), self._read
            # a view that is as its array takes longer than to see that it is
            x, w = x if x.shape == read else x.reshape(read), w if w.shape == weights else w.reshape(weights)
            y = self._ready(x, w, None if bias is None else plain(bias), value, delta)
            return y if y.shape == self._shape else y.reshape(self._shape)
        if out is not None:
            self._check_out(x, w, bias, out)
        if problem.is_empty:
            result = np.zeros(self._shape, self._result)  # as in `GpuCall`
            if writes_bias(problem):
                bias[...] = 0
        else:
            to_numpy = arrays.to_numpy
            given = None if bias is None else to_numpy(bias)
            if self.types[0] != problem.dtype:
                arrays.refuse_gradient(x)
                x = arrays.cast(x, problem.dtype)
            if arrays is not NUMPY and arrays.dtype(w) == "bfloat16":
                arrays.refuse_gradient(w)
                w = arrays.cast(w, self._w_dtype)
            x, w = in_memory(to_numpy(x), self._order), in_memory(to_numpy(w), self._w_order)
            x, w = x.reshape(self._read[0]), as_weights(w.reshape(self._read[1]), self._w_dtype)
            if writes_bias(problem):
                assert isinstance(problem, ConvProblem) and given is not None
                given[...] = bias_gradient(problem, w)
                problem, given = replace(problem, bias=False), None
            if problem.batch_invariant and problem.images > 1:
                result = self._image_by_image(x, w, given)
            else:
                run = self._ready if problem is self._problem else partial(self._algorithm.run, problem)
                result = run(x, w, given, value, delta)
            result = as_shown(result, self._shape, self._out_order)
        if arrays is not NUMPY:
            result = arrays.from_numpy(result, None)
            result = result if arrays.dtype(result) == self._result else arrays.cast(result, self._result)
            result = result if self._out_order is None else arrays.copy(result, self._out_order)
        if out is None:
            return result
        arrays.assign(out, result)
        return out

    def routine(self, x: np.ndarray, w: np.ndarray, value: float = 0, delta: float = 0) -> Callable[[Any], Any] | None:
        """After a call with these arrays, what computes others like x with the same weights; None where there is no
        short way."""
        fixed = getattr(self._ready, "fixed", None)
        if fixed is None or not self._is_direct or plain(x) is not x:
            return None
        w = np.ascontiguousarray(as_weights(w, self._w_dtype)).reshape(self._read[1])
        found: Callable[[Any], Any] | None = fixed(x, w, value, delta)
        return found

    def _image_by_image(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        """The result of a batch as that of so many batches of one: BLAS sums in an order that shapes determine."""
        assert isinstance(self._problem, ConvProblem)
        one, axis = replace(self._problem, n=1), self._problem.layout.index("N")
        y = np.empty(self._problem.y_shape, self._result)
        images, results = np.moveaxis(x, axis, 0), np.moveaxis(y, axis, 0)
        for image, result in zip(images, results, strict=True):
            done = self._algorithm.run(one, np.expand_dims(image, axis), w, bias)
            result[...] = done.reshape(result.shape)
        return y


class FusedCpuCall(_HostCall):
    """A layer on the reference engine with more after its sums than a bias and a ReLU. The sums are kept in float32 at
    least, so the result is rounded once."""

    def __init__(self, resolved: Resolved, choice: Candidate) -> None:
        super().__init__(resolved)
        problem, operands = resolved.problem, resolved.operands
        assert isinstance(problem, ConvProblem)
        self._activation, self._wide = problem.activation, "float32" if is_narrow(problem.dtype) else None
        sums, beside = problem.plain, replace(operands, bias=None, scale=None, add=None, out=None)
        if self._wide:
            sums = replace(sums, dtype="float32")
            beside = replace(beside, dtype="float32", result="float32", w_dtype="float32")
        self._sums = CpuCall(replace(resolved, problem=sums, operands=beside), choice)
        layout = "NCHW" if operands.arrays.keeps_shape else problem.layout
        #: of the result as the library shows it, that of the filters
        self._axis = {"NCHW": 1 - len(operands.w.shape), "NHWC": -1, "CHWN": 0}[layout]

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        arrays = self._arrays
        if out is not None:
            self._check_out(x, w, bias, out)
        if self._wide:
            x, w = x.astype(self._wide), w.astype(self._wide)
        sums = arrays.to_numpy(self._sums(x, w, None, None))
        bias, scale, add = (None if each is None else arrays.to_numpy(each) for each in as_epilogue(bias))
        result: Any = finish(sums, self._axis, bias, scale, add, self._activation)
        result = result.astype(self._result, copy=False) if arrays is NUMPY else arrays.from_numpy(result, None)
        if out is None:
            return result
        arrays.assign(out, result)
        return out


def left_to_the_library(resolved: Resolved) -> bool:
    """Whether a call on the CPU is the array library's own convolution: PyTorch has none of integers."""
    problem = resolved.problem
    return problem.kind == "conv2d" and resolved.operands.arrays.convolves and not is_integer(problem.dtype)


def torch_function(problem: ConvProblem) -> str:
    """PyTorch's own function for a layer."""
    name = "conv3d" if problem.is_volume else "conv2d"
    gradients = {"dgrad": f"torch.nn.grad.{name}_input", "wgrad": f"torch.nn.grad.{name}_weight"}
    return gradients.get(problem.op, f"torch.nn.functional.{name}")


def check_torch_algorithm(name: str) -> None:
    """Raise ValueError unless ``name`` leaves a convolution of PyTorch's CPU tensors to PyTorch."""
    if not isinstance(name, str) or name != "auto":
        raise ValueError(
            f"algorithm={name!r}: PyTorch's CPU tensors are computed by PyTorch itself, "
            "which takes algorithm='auto' only"
        )


def in_order(tensor: Any, order: MemoryOrder = None) -> Any:
    """A tensor of PyTorch contiguous in a memory order, axes of length 1 included; gradients pass."""
    if order is None:
        if tensor.is_contiguous() and 1 not in tensor.shape:
            return tensor
        order = tuple(range(tensor.ndim))
    moved = tensor.permute(order)
    # the strides of `contiguous` would be any for an axis of length 1
    return moved.reshape(-1).view(moved.shape).permute([order.index(axis) for axis in range(len(order))])


def torch_epilogue(y: Any, axes: int, bias: Any, scale: Any, add: Any, activation: str | None) -> Any:
    """What follows the sums of a layer, by PyTorch's own functions; ``y`` has so many ``axes`` behind its channels."""
    from torch.nn import functional

    each = (-1, *(1,) * axes)
    if scale is not None:
        # the product in float32, and one rounding
        y = (y * scale.view(each) if bias is None else y * scale.view(each) + bias.view(each)).to(y.dtype)
    elif bias is not None:
        y = y + bias.view(each)
    y = y if add is None else y + add
    if activation is None:
        return y
    name, value = activation_parts(activation)
    if name == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    return getattr(functional, name)(y, *((value,) if name in ACTIVATION_NUMBERS else ()))


def _no_view(tensor: Any) -> Any:
    """A new tensor as no view of another, where gradients are off: PyTorch changes such a view in place only where they
    are off, too."""
    import torch
    from torch.autograd import forward_ad

    if torch.is_grad_enabled() or not tensor._is_view():
        return tensor
    return tensor.data if forward_ad._current_level < 0 else tensor.clone()


class TorchCpuConv(_HostCall):
    """PyTorch's CPU tensors: PyTorch's own convolution, gradients included.

    NOTE: it gets channels_last for large images only; otherwise NCHW, and the result is brought to its memory order.
    For some images of few columns in channels_last PyTorch 2.13 (oneDNN) has wrong numbers or a segmentation fault:
    with up to 5 columns for filters of up to 5, with 12 for a filter of 15, in none of 26,000 layers with 16 or more.
    It also takes the strides of axes of length 1 for a sign of channels_last. The gradient of the filters is always
    computed in NCHW.
    """

    _problem: ConvProblem

    def __init__(self, resolved: Resolved) -> None:
        super().__init__(resolved)
        self._order = resolved.operands.out_order
        problem = self._problem
        #: 3 of volumes; signals are images of one row
        self._axes = axes = 3 if self._has_slices(resolved) else 2
        self._stride = (problem.stride_d, *problem.stride)[-axes:]
        self._dilation = (problem.dilation_d, *problem.dilation)[-axes:]
        self._taps = (problem.t, problem.r, problem.s)[-axes:]
        self._inputs, self._outputs = (
            (problem.d, problem.h, problem.w)[-axes:],
            (problem.z, problem.p, problem.q)[-axes:],
        )
        sides = (*problem.padding_d, *problem.padding)[-2 * axes :]
        self._before, self._after = sides[::2], sides[1::2]
        covered = [apart * (taps - 1) + 1 for apart, taps in zip(self._dilation, self._taps, strict=True)]
        least = max(16, 4 * max(covered))
        large = axes == 2 and min(*self._inputs, *self._outputs) >= least
        self._channels_last = large and problem.layout == "NHWC" and problem.op != "wgrad"

    @staticmethod
    def _has_slices(resolved: Resolved) -> bool:
        """Whether the arrays have an axis of slices, be it of one."""
        of_filters = resolved.problem.kind == "conv2d" and resolved.problem.op == "wgrad"
        filters = resolved.shape if of_filters else resolved.operands.w.shape
        return len(filters) == 5

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        problem = self._problem
        if out is not None:
            self._check_out(x, w, bias, out)
        filters = problem.op == "wgrad"
        axes = len(self._shape) if filters else w.dim()
        signal, alone = axes == 3, x.dim() == axes - 1
        if signal:  # an image of one row
            x, w = x.unsqueeze(-2), w.unsqueeze(-2)
        if alone:  # a batch of one
            x, w = x.unsqueeze(0), w.unsqueeze(0) if filters else w
        if filters and bias is not None:
            bias.copy_(w.sum((0, *range(2, w.dim()))))
        x, w = (in_order(x, (0, 2, 3, 1)), w) if self._channels_last else (in_order(x), in_order(w))
        bias, scale, add = as_epilogue(bias)
        given, bias = (bias, None) if scale is None else (None, bias)
        y = self._image_by_image(x, w, given) if problem.batch_invariant else self._compute(x, w, given)
        y = y.squeeze(2) if signal else y
        y = y.squeeze(0) if alone and not filters else y
        if not filters:
            y = torch_epilogue(y, axes - 2, bias, scale, add, problem.activation)
        return _no_view(in_order(y, self._order)) if out is None else out.copy_(y)

    def _compute(self, x: Any, w: Any, bias: Any) -> Any:
        if self._problem.op == "wgrad":
            return self._filter_gradient(x, w)
        return self._input_gradient(x, w, bias) if self._problem.op == "dgrad" else self._forward(x, w, bias)

    def _image_by_image(self, x: Any, w: Any, bias: Any) -> Any:
        """The result of a batch as that of so many batches of one: PyTorch chooses by the batch, too."""
        import torch

        images = x.split(1) if len(x) else (x,)
        # each in memory of its own: equal alignment for every image
        return torch.cat([self._compute(image.clone(), w, bias) for image in images])

    def _forward(self, x: Any, w: Any, bias: Any) -> Any:
        from torch.nn import functional

        x, padding = self._padded(x)
        convolve = getattr(functional, f"conv{self._axes}d")
        return convolve(x, w, bias, self._stride, padding, self._dilation, self._problem.groups)

    def _padded(self, x: Any) -> tuple[Any, tuple[int, ...]]:
        """The images and the padding that PyTorch adds: the same at both ends, so another one is put around them."""
        from torch.nn.functional import pad

        if self._before == self._after:
            return x, self._before
        # the last axis first
        sides = [side for both in zip(self._before[::-1], self._after[::-1], strict=True) for side in both]
        return pad(x, sides), (0,) * self._axes

    def _input_gradient(self, grad: Any, w: Any, bias: Any) -> Any:
        from torch.nn import functional
        from torch.nn import grad as gradients

        problem, stride, dilation = self._problem, self._stride, self._dilation
        # of the padded input, of which the middle is returned: PyTorch pads both ends equally
        padded = [sum(each) for each in zip(self._before, self._inputs, self._after, strict=True)]
        if bias is None:
            gradient = getattr(gradients, f"conv{self._axes}d_input")
            dx = gradient((len(grad), problem.c, *padded), w, grad, stride, 0, dilation, problem.groups)
        else:
            windows = zip(self._outputs, stride, dilation, self._taps, strict=True)
            covered = [(outputs - 1) * step + apart * (taps - 1) + 1 for outputs, step, apart, taps in windows]
            rest = [side - inside for side, inside in zip(padded, covered, strict=True)]
            transposed = getattr(functional, f"conv_transpose{self._axes}d")
            dx = transposed(grad, w, bias, stride, 0, rest, problem.groups, dilation)
        for axis, (before, size) in enumerate(zip(self._before, self._inputs, strict=True), 2):
            dx = dx.narrow(axis, before, size)
        return dx

    def _filter_gradient(self, x: Any, grad: Any) -> Any:
        from torch.nn import grad as gradients

        x, padding = self._padded(x)
        shape = (self._problem.k, self._problem.group_c, *self._taps)
        gradient = getattr(gradients, f"conv{self._axes}d_weight")
        return gradient(x, shape, grad, self._stride, padding, self._dilation, self._problem.groups)
