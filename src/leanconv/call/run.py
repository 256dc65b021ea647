"""Described calls made ready to run: one object for each place that a call can run at.

A ready call holds all that shapes decide, so running it again is: take pointers, allocate the output, launch.
Ready calls are found by what they were made for; see api.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from leanconv.algorithms import ALGORITHMS
from leanconv.algorithms.base import Config, CpuAlgorithm, GpuAlgorithm
from leanconv.arrays import NUMPY, Arrays, MemoryOrder, NumpyArrays, Shape
from leanconv.arrays.memory import overlaps, share_memory
from leanconv.call import choose as registry
from leanconv.dtypes import item_bytes
from leanconv.plan import Plan
from leanconv.problem import ConvProblem, FilterProblem, Problem
from leanconv.runtime import launch
from leanconv.runtime.launch import ALIGNMENT, Device, Executable


class Call(Protocol):
    """A ready call. For filter2d, ``w`` is the kernel and there is no bias."""

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """Run; returns ``out`` or a new array."""


@dataclass(frozen=True)
class Ready:
    """What was chosen for a problem on a GPU, loaded there."""

    algorithm: GpuAlgorithm
    config: Config
    plan: Plan
    device: Device
    run: Executable


_ready: dict[tuple[Problem, int, str, int | None], Ready] = {}
_lock = threading.Lock()


def choose_config(algorithm: GpuAlgorithm, problem: Problem, device: Device) -> Config:
    """The configuration that runs: the algorithm's best guess."""
    return next(iter(algorithm.configs(problem, device.target)))


def ready(problem: Problem, device_index: int, algorithm: str, limit: int | None = None) -> Ready:
    """Choose, plan, compile and load; the next time it is a look-up. ``limit`` is that of `registry.choose`."""
    key = (problem, device_index, algorithm, limit)
    found = _ready.get(key)
    if found is None:
        with _lock:
            found = _ready.get(key)
            if found is None:
                chosen = registry.choose(problem, algorithm, ALGORITHMS, limit)
                device = launch.open_device(device_index)
                config = choose_config(chosen, problem, device)
                plan = chosen.plan(problem, config, device.target)
                found = _ready[key] = Ready(chosen, config, plan, device, device.executable(plan))
    return found


def is_ready(problem: Problem, device_index: int, algorithm: str, limit: int | None = None) -> bool:
    """Whether the problem has been compiled and loaded in this process."""
    return (problem, device_index, algorithm, limit) in _ready


def forget() -> None:
    """Drop what has been made ready; for tests and after tuning. Graphs captured before stay valid."""
    _ready.clear()


def is_empty(problem: Problem) -> bool:
    """Whether the output has no elements."""
    if isinstance(problem, ConvProblem):
        return problem.n == 0
    return problem.batch * problem.h * problem.w == 0


def check_out(arrays: Arrays, out: Any, shape: Shape, dtype: str, device: int | None) -> None:
    """Raise ValueError unless ``out`` can take the result."""
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"out has shape {tuple(out.shape)}; the result has {tuple(shape)}")
    if arrays.dtype(out) != dtype:
        raise ValueError(f"out has dtype {arrays.dtype(out)}; the result has {dtype}")
    if arrays.device(out) != device:
        where = "the CPU" if device is None else f"cuda:{device}"
        raise ValueError(f"out lies on {arrays.where(out)}; the result is made on {where}")
    repeats = any(length > 1 and stride == 0 for length, stride in zip(shape, arrays.strides(out), strict=True))
    if repeats and 0 not in shape:
        raise ValueError(f"out has strides {arrays.strides(out)}: several of its elements are the same memory")


def check_overlap(arrays: Arrays, itemsize: int, out: Any, inputs: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError where ``out`` cannot be written, or shares memory with an input."""
    if not arrays.writeable(out):
        raise ValueError("out is read-only")
    low, high = arrays.extent(out, itemsize)
    start = arrays.pointer(out)
    for name, array in inputs:
        if array is not None:
            a, b = arrays.extent(array, itemsize)
            at = arrays.pointer(array)
            near = low < high and a < b and overlaps((start + low, start + high), (at + a, at + b))
            shapes = (start, out.shape, arrays.strides(out)), (at, array.shape, arrays.strides(array))
            if near and share_memory(*shapes, itemsize):
                raise ValueError(f"out overlaps {name} in memory; the result must go elsewhere")


def check_torch_algorithm(name: str) -> None:
    """Raise ValueError unless ``name`` leaves a convolution of PyTorch's CPU tensors to PyTorch."""
    if name != "auto":
        raise ValueError(
            f"algorithm={name!r}: PyTorch's CPU tensors are computed by PyTorch itself, "
            "which takes algorithm='auto' only"
        )


class GpuCall:
    """On arrays that lie on a GPU: nothing is copied, but for inputs that no kernel could read as they lie."""

    def __init__(
        self,
        arrays: Arrays,
        device: int,
        problem: Problem,
        ready: Ready | None,
        shape: Shape,
        *,
        given: tuple[Any, Any, Any, Any],
        names: tuple[str, str],
        order: MemoryOrder,
        copies: tuple[bool, bool, bool],
        out_direct: bool,
    ) -> None:
        """``ready`` is None for an empty result; ``copies`` says which of x, w and bias do not lie as needed.

        ``order`` is that of x, w and the result in memory.
        ``given`` are x, w, bias and out of a call, or None; those of every later call lie alike.
        """
        self._arrays, self._names, self._order = arrays, names, order
        self._pointer, self._stream = arrays.fast_pointer(), arrays.fast_stream(device)
        self._make = arrays.maker(tuple(shape), problem.dtype, device, order)
        self._itemsize = item_bytes(problem.dtype)
        self._copies, self._copy_any, self._out_direct = copies, any(copies), out_direct
        self._gradients = any(array is not None and arrays.requires_gradient(array) for array in given)
        self._extents = tuple(None if array is None else arrays.extent(array, self._itemsize) for array in given)
        self._shapes = tuple(((), ()) if array is None else (array.shape, arrays.strides(array)) for array in given)
        self._run = None if ready is None else ready.run
        workspace = 0 if ready is None else ready.plan.workspace_bytes
        prepared = 0 if ready is None else ready.plan.prepared_bytes
        # one allocation for both: workspace first, then what is prepared
        self._prepared_offset = -(-workspace // ALIGNMENT) * ALIGNMENT if prepared else None
        scratch = (self._prepared_offset or workspace) + prepared
        self._make_scratch = arrays.maker((-(-scratch // 4),), "float32", device) if scratch else None

    def __call__(
        self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0, prepared_at: int = 0
    ) -> Any:
        """See Call. ``prepared_at`` is where a plan finds prepared what it does not prepare itself."""
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
            y = self._make()
        if self._run is not None:
            # NOTE: copies and scratch must stay bound to names until the launch; freed earlier, their memory could
            # be reused. Freed later it is safe, since the allocators follow the stream: what takes the memory next
            # runs behind the launch. In a capture PyTorch takes it from the graph's own pool, which lives as long as
            # the graph; CuPy has no such pool
            if self._copy_any:
                x, w, bias = self._copy(x, w, bias)
                x_at, w_at, bias_at = pointer(x), pointer(w), 0 if bias is None else pointer(bias)
            workspace_at = 0
            if self._make_scratch is not None:
                scratch = self._make_scratch()
                workspace_at = pointer(scratch)
                if self._prepared_offset is not None:
                    prepared_at = workspace_at + self._prepared_offset
            self._run(self._stream(), (x_at, w_at, bias_at, pointer(y), workspace_at, prepared_at, value, delta))
        if out is None or y is out:
            return y
        self._arrays.assign(out, y)
        return out

    def _copy(self, x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
        copy_x, copy_w, copy_bias = self._copies
        return (
            self._arrays.copy(x, self._order) if copy_x else x,
            self._arrays.copy(w, self._order) if copy_w else w,
            self._arrays.copy(bias) if copy_bias else bias,
        )

    def _refuse_overlap(self, out_at: int, inputs: Sequence[tuple[str, int]]) -> None:
        low, high = self._extents[3] or (0, 0)
        low, high = low + out_at, high + out_at
        # the fourth extent and shape are those of out
        for (name, at), extent, shape in zip(inputs, self._extents, self._shapes, strict=False):
            near = extent is not None and low < at + extent[1] and at + extent[0] < high and self._run is not None
            if near and share_memory((out_at, *self._shapes[3]), (at, *shape), self._itemsize):
                raise ValueError(f"out overlaps {name} in memory; the result must go elsewhere")


class HostOnGpuCall:
    """NumPy arrays on a GPU: copied there, run on the default stream, and copied back; it waits for all of it."""

    def __init__(self, problem: Problem, ready: Ready | None, shape: Shape, names: tuple[str, str]) -> None:
        self._problem, self._ready, self._shape, self._names = problem, ready, shape, names

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> np.ndarray:
        """See Call."""
        if out is not None:
            inputs = ((self._names[0], x), (self._names[1], w), ("bias", bias))
            check_overlap(NUMPY, item_bytes(self._problem.dtype), out, inputs)
        y = out if out is not None and NUMPY.is_contiguous(out) else np.empty(self._shape, self._problem.dtype)
        if self._ready is not None:
            operands = {"x": plain(x), "w": plain(w)} | ({} if bias is None else {"bias": plain(bias)})
            launch.run_on_host_arrays(
                self._ready.device, self._ready.run, operands, y, self._ready.plan.workspace_bytes,
                {"value": value, "delta": delta}, self._ready.plan.prepared_bytes,
            )  # fmt: skip
        if out is None or y is out:
            return y
        np.copyto(out, y)
        return out


class CpuCall:
    """NumPy arrays, and filters on PyTorch's CPU tensors, on the reference engine."""

    def __init__(
        self, arrays: Arrays, problem: Problem, algorithm: CpuAlgorithm | None, shape: Shape, names: tuple[str, str]
    ) -> None:
        """``algorithm`` is None for an empty result."""
        self._arrays, self._problem, self._algorithm, self._shape = arrays, problem, algorithm, shape
        self._names = names

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """See Call."""
        arrays, problem = self._arrays, self._problem
        if out is not None:
            inputs = ((self._names[0], x), (self._names[1], w), ("bias", bias))
            check_overlap(arrays, item_bytes(problem.dtype), out, inputs)
        if self._algorithm is None:
            result = np.empty(self._shape, problem.dtype)
        elif isinstance(problem, ConvProblem):
            operands = plain(x).reshape(problem.x_shape), plain(w).reshape(problem.w_shape)
            result = self._algorithm.run(problem, *operands, None if bias is None else plain(bias))
            result = result.reshape(self._shape)
        else:
            image = self._to_numpy(x).reshape(problem.batch, problem.h, problem.w)
            result = self._algorithm.run(problem, image, self._to_numpy(w), value=value, delta=delta)
            result = result.reshape(self._shape)
        if out is None:
            return result if isinstance(arrays, NumpyArrays) else arrays.from_numpy(result, None)
        arrays.assign(out, result if isinstance(arrays, NumpyArrays) else arrays.from_numpy(result, None))
        return out

    def _to_numpy(self, array: Any) -> np.ndarray:
        if isinstance(self._arrays, NumpyArrays):
            return plain(array)
        self._arrays.refuse_gradient(array)
        return plain(array.detach().resolve_neg().numpy())


def torch_function(problem: ConvProblem) -> str:
    """PyTorch's own function for a layer."""
    return "torch.nn.grad.conv2d_input" if problem.op == "dgrad" else "torch.nn.functional.conv2d"


class TorchCpuConv:
    """PyTorch's CPU tensors: PyTorch's own convolution, gradients included."""

    def __init__(self, arrays: Arrays, problem: ConvProblem, shape: Shape, names: tuple[str, str]) -> None:
        self._arrays, self._problem, self._shape, self._names = arrays, problem, shape, names

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """See Call."""
        import torch

        problem = self._problem
        if out is not None:
            inputs = ((self._names[0], x), (self._names[1], w), ("bias", bias))
            check_overlap(self._arrays, item_bytes(problem.dtype), out, inputs)
        if len(self._shape) == 3:  # a signal is an image of one row
            x, w = x.unsqueeze(2), w.unsqueeze(2)
        memory_format = torch.channels_last if problem.layout == "NHWC" else torch.contiguous_format
        x = x.contiguous(memory_format=memory_format)
        y = self._input_gradient(x, w) if problem.op == "dgrad" else self._forward(x, w, bias)
        if problem.layout == "CHWN":  # PyTorch has no word for it
            y = y.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
        else:
            y = y.contiguous(memory_format=memory_format)
        y = y.squeeze(2) if len(self._shape) == 3 else y
        return y if out is None else out.copy_(y)

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
        shape = (problem.n, problem.c, top + problem.h + bottom, left + problem.w + right)
        dx = conv2d_input(shape, w, grad, problem.stride, 0, problem.dilation, problem.groups)
        return dx[:, :, top : top + problem.h, left : left + problem.w]


def plain(array: np.ndarray) -> np.ndarray:
    """The array itself if it is contiguous, aligned and in native byte order, else such a copy."""
    return array if NUMPY.is_contiguous(array) else NUMPY.copy(array)


def filter_shape(problem: FilterProblem) -> Shape:
    """The image of a filter problem as one batch axis, rows and columns."""
    return problem.batch, problem.h, problem.w
