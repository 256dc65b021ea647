"""Ready calls: one class for each place where a call can run.

A ready call holds all that the shapes determine. To run it again is to take the pointers, allocate the output and
launch. api.py finds ready calls by the arrays' signatures and the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from leanconv.algorithms.base import CpuAlgorithm
from leanconv.arrays import Arrays, MemoryOrder, Shape
from leanconv.arrays.memory import overlaps, share_memory
from leanconv.arrays.numpy import NUMPY, plain
from leanconv.call.choose import Candidate
from leanconv.call.describe import Described
from leanconv.call.weights import preparation_of, refuse_null
from leanconv.dtypes import is_integer, item_bytes
from leanconv.plan import ALIGNMENT, Plan
from leanconv.problem import ConvProblem, Problem
from leanconv.reference.filter_gradient import bias_gradient
from leanconv.runtime import launch
from leanconv.runtime.launch import Device, Executable


class Call(Protocol):
    """A ready call. For filter2d, ``w`` is the kernel and there is no bias."""

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """Run; returns ``out`` or a new array."""


def roles_of(problem: Problem) -> tuple[str, ...]:
    """The order in which ready calls give values to a plan: the operands, the numbers of filters, scratch memory."""
    first, second, *_, written = problem.operands
    return first.role, second.role, "bias", written.role, "value", "delta", "workspace", "prepared"


def writes_bias(problem: Problem) -> bool:
    """Whether ``bias`` is no operand that is read, but where the gradient of the bias goes: contiguous, and new."""
    return problem.kind == "conv2d" and problem.op == "wgrad" and problem.bias


@dataclass(frozen=True)
class Loaded:
    """What was chosen for a problem on a GPU; its kernels are compiled and loaded on first use."""

    problem: Problem
    choice: Candidate
    plan: Plan
    device: Device
    _made: dict[str, Executable] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def run(self) -> Executable:
        """The whole plan; values in the order of `roles_of`."""
        return self._executable("run", self.plan)

    @property
    def run_prepared(self) -> Executable:
        """The plan without what prepares filters."""
        return self._executable("run_prepared", replace(self.plan, prepare=(), prepared_bytes=0))

    def _executable(self, name: str, plan: Plan) -> Executable:
        # NOTE: functools.cached_property holds one lock for all objects until Python 3.12: calls of different shapes
        # would compile one after the other
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self.device.executable(plan, roles_of(self.problem))
        return made

    def prepares(self, described: Described) -> bool:
        """Whether filters that keep their preparation save anything."""
        return not self.problem.is_empty and (bool(self.plan.prepare) or described.operands.copies[1])


def check_overlap(arrays: Arrays, out: Any, inputs: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError where ``out`` cannot be written, or shares memory with an input."""
    itemsize = item_bytes(arrays.dtype(out))
    if not arrays.writeable(out):
        raise ValueError("out is read-only")
    low, high = arrays.extent(out, itemsize)
    start = arrays.pointer(out)
    for name, array in inputs:
        if array is not None:
            item = item_bytes(arrays.dtype(array))
            a, b = arrays.extent(array, item)
            at = arrays.pointer(array)
            near = low < high and a < b and overlaps((start + low, start + high), (at + a, at + b))
            shapes = (start, out.shape, arrays.strides(out)), (at, array.shape, arrays.strides(array))
            if near and share_memory(*shapes, itemsize, item):
                raise ValueError(f"out overlaps {name} in memory; the result must go elsewhere")


class GpuCall:
    """On arrays on a GPU: nothing is copied, except inputs that no kernel can read in place."""

    def __init__(self, described: Described, loaded: Loaded, *, prepares: bool = True) -> None:
        """Arrays of later calls have the same shapes, memory order and device as those of ``described``.

        Without ``prepares`` the caller passes prepared filters: they are read in place, and they belong to leanconv
        alone, so they cannot overlap out.
        """
        operands, problem, device = described.operands, described.problem, described.device
        arrays = operands.arrays
        assert device is not None
        copy_x, copy_w, copy_bias = described.operands.copies
        w = operands.w if prepares or not copy_w else None
        given = (operands.x, w, operands.bias, operands.out)
        self._arrays, self._names = arrays, operands.names
        self._order, self._w_order = operands.order, operands.w_order
        self._pointer, self._stream = arrays.fast_pointer(), arrays.fast_stream(device)
        self._allocate = arrays.allocator(described.shape, operands.result, device, operands.out_order)
        self._copies = copy_x, copy_w and prepares, copy_bias
        self._copy_any, self._out_direct = any(self._copies), described.operands.out_direct
        self._gradients = any(array is not None and arrays.requires_gradient(array) for array in given)
        self._items = tuple(0 if array is None else item_bytes(arrays.dtype(array)) for array in given)
        self._extents = tuple(
            None if array is None else arrays.extent(array, item)
            for array, item in zip(given, self._items, strict=True)
        )
        self._shapes = tuple(((), ()) if array is None else (array.shape, arrays.strides(array)) for array in given)
        workspace, prepared = loaded.plan.workspace_bytes, loaded.plan.prepared_bytes if prepares else 0
        # one allocation for both: workspace first, then the prepared filters
        self._prepared_offset = -(-workspace // ALIGNMENT) * ALIGNMENT if prepared else None
        scratch = (self._prepared_offset or workspace) + prepared
        self._allocate_scratch = arrays.allocator((-(-scratch // 4),), "float32", device) if scratch else None
        self._run = None if problem.is_empty else loaded.run if prepares else loaded.run_prepared
        self._bias_gradient = writes_bias(problem)

    def __call__(
        self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0, prepared_at: int = 0
    ) -> Any:
        """As `Call`. ``prepared_at`` is the address of filters that the plan does not prepare itself."""
        if self._gradients:
            for array in (x, w, bias, out):
                if array is not None:
                    self._arrays.refuse_gradient(array)
        pointer = self._pointer
        x_at = pointer(x)
        w_at = pointer(w)
        bias_at = 0 if bias is None else pointer(bias)
        y = out
        if out is not None:
            self._refuse_overlap(pointer(out), ((self._names[0], x_at), (self._names[1], w_at), ("bias", bias_at)))
        if out is None or not self._out_direct:
            y = self._allocate()
        if self._run is not None:
            # NOTE: copies and scratch must stay bound to names until the launch; freed earlier, their memory could
            # be reused. Freed later it is safe, since the allocators follow the stream: what takes the memory next
            # runs behind the launch. In a capture PyTorch takes it from the graph's own pool, which lives as long as
            # the graph; CuPy has no such pool
            if self._copy_any:
                x, w, bias = self._copy(x, w, bias)
                x_at, w_at, bias_at = pointer(x), pointer(w), 0 if bias is None else pointer(bias)
            workspace_at = 0
            if self._allocate_scratch is not None:
                scratch = self._allocate_scratch()
                workspace_at = pointer(scratch)
                if self._prepared_offset is not None:
                    prepared_at = workspace_at + self._prepared_offset
                if not workspace_at:
                    refuse_null(self._arrays)
            y_at = pointer(y)
            if not (x_at and w_at and y_at):
                refuse_null(self._arrays)
            self._run(self._stream(), (x_at, w_at, bias_at, y_at, value, delta, workspace_at, prepared_at))
        else:
            y[...] = 0  # it is empty, or the gradient of filters that have seen no image
            if self._bias_gradient:
                bias[...] = 0
        if out is None or y is out:
            return y
        self._arrays.assign(out, y)
        return out

    def _copy(self, x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
        copy_x, copy_w, copy_bias = self._copies
        return (
            self._arrays.copy(x, self._order) if copy_x else x,
            self._arrays.copy(w, self._w_order) if copy_w else w,
            self._arrays.copy(bias) if copy_bias else bias,
        )

    def _refuse_overlap(self, out_at: int, inputs: Sequence[tuple[str, int]]) -> None:
        low, high = self._extents[3] or (0, 0)
        low, high = low + out_at, high + out_at
        # the fourth of each are those of out
        for (name, at), extent, shape, item in zip(inputs, self._extents, self._shapes, self._items, strict=False):
            near = extent is not None and low < at + extent[1] and at + extent[0] < high and self._run is not None
            if near and share_memory((out_at, *self._shapes[3]), (at, *shape), self._items[3], item):
                raise ValueError(f"out overlaps {name} in memory; the result must go elsewhere")


class _HostCall:
    """What calls on arrays in host memory have in common. They keep no array of the first call."""

    def __init__(self, described: Described) -> None:
        self._arrays, self._names = described.operands.arrays, described.operands.names
        self._problem, self._shape, self._result = described.problem, described.shape, described.operands.result

    def _check_out(self, x: Any, w: Any, bias: Any, out: Any) -> None:
        inputs = ((self._names[0], x), (self._names[1], w), ("bias", bias))
        check_overlap(self._arrays, out, inputs)


class HostOnGpuCall(_HostCall):
    """NumPy arrays on a GPU: copied there, run on the default stream, and copied back. The call waits for it."""

    def __init__(self, described: Described, loaded: Loaded) -> None:
        super().__init__(described)
        self._loaded = loaded
        self._run = None if described.problem.is_empty else loaded.run

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> np.ndarray:
        if out is not None:
            self._check_out(x, w, bias, out)
        y = out if out is not None and NUMPY.is_contiguous(out) else np.empty(self._shape, self._result)
        if self._run is None:
            y[...] = 0  # as in `GpuCall`
            if writes_bias(self._problem):
                bias[...] = 0
        else:
            values = (plain(x), plain(w), None if bias is None else plain(bias), y, value, delta)
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

    def __init__(self, described: Described, choice: Candidate) -> None:
        super().__init__(described)
        assert isinstance(choice.algorithm, CpuAlgorithm)
        self._algorithm = choice.algorithm
        operands = described.operands
        self._order, self._w_order, self._out_order = operands.order, operands.w_order, operands.out_order
        self._read = tuple(operand.shape for operand in described.problem.operands[:2])

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        arrays, problem = self._arrays, self._problem
        if out is not None:
            self._check_out(x, w, bias, out)
        if problem.is_empty:
            result = np.zeros(self._shape, self._result)  # as in `GpuCall`
            if writes_bias(problem):
                bias[...] = 0
        else:
            to_numpy = arrays.to_numpy
            given = None if bias is None else to_numpy(bias)
            x, w = in_memory(to_numpy(x), self._order), in_memory(to_numpy(w), self._w_order)
            x, w = x.reshape(self._read[0]), w.reshape(self._read[1])
            if writes_bias(problem):
                assert isinstance(problem, ConvProblem) and given is not None
                given[...] = bias_gradient(problem, w)
                problem, given = replace(problem, bias=False), None
            if problem.batch_invariant and problem.images > 1:
                result = self._image_by_image(x, w, given)
            else:
                result = self._algorithm.run(problem, x, w, given, value, delta)
            result = as_shown(result, self._shape, self._out_order)
        if arrays is not NUMPY:
            result = arrays.from_numpy(result, None)
            result = result if self._out_order is None else arrays.copy(result, self._out_order)
        if out is None:
            return result
        arrays.assign(out, result)
        return out

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


class PreparedCall:
    """On arrays of a GPU with filters that keep their preparation: a plan's ``launches`` alone."""

    def __init__(self, described: Described, loaded: Loaded) -> None:
        assert described.device is not None
        self._arrays = described.operands.arrays
        self._gradient = self._arrays.requires_gradient(described.operands.w)
        self._preparation = preparation_of(
            loaded.device, described.device, loaded.plan, described.operands.copies[1], described.operands.w_order
        )
        self._whole, self._rest = GpuCall(described, loaded), GpuCall(described, loaded, prepares=False)

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        if self._gradient:
            self._arrays.refuse_gradient(w.array)
        prepared = w.prepared_by(self._preparation, self._arrays)
        if prepared is None:
            return self._whole(x, w.array, bias, out)
        return self._rest(x, prepared.w, bias, out, prepared_at=prepared.address)


class UnpreparedCall:
    """With `PreparedWeights` that keep nothing for this call: it runs on their array."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        return self._call(x, w.array, bias, out)


def left_to_the_library(described: Described) -> bool:
    """Whether a call on the CPU is the array library's own convolution: PyTorch has none of integers."""
    problem = described.problem
    return problem.kind == "conv2d" and described.operands.arrays.convolves and not is_integer(problem.dtype)


def torch_function(problem: ConvProblem) -> str:
    """PyTorch's own function for a layer."""
    gradients = {"dgrad": "torch.nn.grad.conv2d_input", "wgrad": "torch.nn.grad.conv2d_weight"}
    return gradients.get(problem.op, "torch.nn.functional.conv2d")


def check_torch_algorithm(name: str) -> None:
    """Raise ValueError unless ``name`` leaves a convolution of PyTorch's CPU tensors to PyTorch."""
    if name != "auto":
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


class TorchCpuConv(_HostCall):
    """PyTorch's CPU tensors: PyTorch's own convolution, gradients included.

    NOTE: it gets channels_last for large images only; otherwise NCHW, and the result is brought to its memory order.
    For some narrow images in channels_last PyTorch 2.13 (oneDNN) has wrong numbers or a segmentation fault: found with
    up to 5 columns for filters of up to 5, with 12 for a filter of 15, in none of 26,000 layers with 16 or more. It
    also takes the strides of axes of length 1 for a sign of channels_last. The gradient of the filters is always
    computed in NCHW.
    """

    _problem: ConvProblem

    def __init__(self, described: Described) -> None:
        super().__init__(described)
        self._order = described.operands.out_order
        problem = self._problem
        covered = problem.dilation[0] * (problem.r - 1) + 1, problem.dilation[1] * (problem.s - 1) + 1
        least = max(16, 4 * max(covered))
        large = min(problem.h, problem.w, problem.p, problem.q) >= least
        self._channels_last = large and problem.layout == "NHWC" and problem.op != "wgrad"

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        problem = self._problem
        if out is not None:
            self._check_out(x, w, bias, out)
        if problem.op == "wgrad":
            signal = len(self._shape) == 3
            dw = self._filter_gradient(x, w, signal)
            if bias is not None:
                channels = w.dim() - len(self._shape) + 1
                bias.copy_(w.sum([axis for axis in range(w.dim()) if axis != channels]))
            dw = in_order(dw.squeeze(2) if signal else dw, self._order)
            return dw if out is None else out.copy_(dw)
        signal, alone = w.dim() == 3, x.dim() == w.dim() - 1
        if signal:  # an image of one row
            x, w = x.unsqueeze(-2), w.unsqueeze(-2)
        if alone:  # a batch of one
            x = x.unsqueeze(0)
        x, w = (in_order(x, (0, 2, 3, 1)), w) if self._channels_last else (in_order(x), in_order(w))
        y = self._image_by_image(x, w, bias) if problem.batch_invariant else self._compute(x, w, bias)
        y = y.squeeze(2) if signal else y
        y = y.squeeze(0) if alone else y
        return in_order(y, self._order) if out is None else out.copy_(y)

    def _compute(self, x: Any, w: Any, bias: Any) -> Any:
        return self._input_gradient(x, w) if self._problem.op == "dgrad" else self._forward(x, w, bias)

    def _image_by_image(self, x: Any, w: Any, bias: Any) -> Any:
        """The result of a batch as that of so many batches of one: PyTorch chooses by the batch, too."""
        import torch

        images = x.split(1) if len(x) else (x,)
        # each in memory of its own, where every image lies alike
        return torch.cat([self._compute(image.clone(), w, bias) for image in images])

    def _forward(self, x: Any, w: Any, bias: Any) -> Any:
        from torch.nn import functional

        problem = self._problem
        top, bottom, left, right = problem.padding
        padding = (top, left)
        if (top, left) != (bottom, right):
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        y = functional.conv2d(x, w, bias, problem.stride, padding, problem.dilation, problem.groups)
        return functional.relu(y) if problem.activation == "relu" else y

    def _input_gradient(self, grad: Any, w: Any) -> Any:
        from torch.nn.grad import conv2d_input

        problem = self._problem
        top, bottom, left, right = problem.padding
        # of the padded input, whose middle is wanted: PyTorch pads both ends alike
        shape = (len(grad), problem.c, top + problem.h + bottom, left + problem.w + right)
        dx = conv2d_input(shape, w, grad, problem.stride, 0, problem.dilation, problem.groups)
        return dx[:, :, top : top + problem.h, left : left + problem.w]

    def _filter_gradient(self, x: Any, grad: Any, signal: bool) -> Any:
        from torch.nn.functional import pad
        from torch.nn.grad import conv2d_weight

        problem = self._problem
        top, bottom, left, right = problem.padding
        if signal:  # images of one row
            x, grad = x.unsqueeze(-2), grad.unsqueeze(-2)
        x, grad = (in_order(each if each.dim() == 4 else each.unsqueeze(0)) for each in (x, grad))
        padding = (top, left)
        if (top, left) != (bottom, right):
            x, padding = pad(x, (left, right, top, bottom)), (0, 0)
        shape = (problem.k, problem.group_c, problem.r, problem.s)
        return conv2d_weight(x, shape, grad, problem.stride, padding, problem.dilation, problem.groups)
