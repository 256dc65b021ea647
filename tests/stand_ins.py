"""Stand-ins for a GPU, for CuPy and for PyTorch's tensors on a GPU, all in the host's memory."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from leanconv.cpu.epilogue import finish
from leanconv.dtypes import item_bytes
from leanconv.plan import ALIGNMENT, Plan, Target
from leanconv.problem import ConvProblem, Problem
from leanconv.runtime import launch
from leanconv.runtime.compile import Compiled
from leanconv.runtime.driver import CudaError
from tests.oracles import FILTERS_AXIS, as_result, oracle_conv, oracle_filter


def at_address(
    pointer: int, shape: Sequence[int], strides: Sequence[int], dtype: str, alignment: int = ALIGNMENT
) -> np.ndarray:
    """Host memory as an array; strides are in elements."""
    assert pointer % alignment == 0, f"a kernel was given {pointer:#x}, which is not aligned"
    item = item_bytes(dtype)
    count = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    flat = np.frombuffer((ctypes.c_byte * (count * item)).from_address(pointer), dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * item for stride in strides])


def dense(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]


class HostDevice:
    """Plays a GPU whose memory is the host's and whose kernels are the oracles above; all but the kernels is real.

    What a plan prepares is a copy of its filters, and the launches that find something prepared read no others.
    ``launches`` has the stream and the values of each run, by role; ``prepared`` counts those that prepared.
    ``at`` gives the other GPUs of the machine.
    """

    name = "stand-in"
    target = Target("sm_90a", 132)

    def __init__(self, problems: dict[Plan, Problem], index: int = 0) -> None:
        self.problems, self.index = problems, index
        if index:
            self.name = f"stand-in {index}"
        self._machine = {index: self}
        #: the current stream of its callers, as PyTorch and CuPy tell it, and the arrays they know to be used on one
        self.stream = 0x51 if index == 0 else 0x60 + index
        self.used: list[tuple[int, Any]] = []
        self.memory: dict[int, Any] = {}
        self.launches: list[tuple[int, dict[str, float]]] = []
        self.executables = self.prepared = self.allocations = 0
        self.waited: list[int] = []
        #: streams that capture a graph
        self.captures: set[int] = set()
        #: whether its context is not current, which only a launch that takes it to be meets
        self.without_context = False

    def at(self, index: int) -> HostDevice:
        """GPU number ``index`` of the same machine."""
        if index not in self._machine:
            self._machine[index] = HostDevice(self.problems, index)
            self._machine[index]._machine = self._machine
        return self._machine[index]

    def capturing(self, stream: int) -> bool:
        return stream in self.captures

    def wait(self, stream: int) -> None:
        assert stream not in self.captures, "a stream that captures cannot be waited for"
        self.waited.append(stream)

    def compiled(self, plan: Plan) -> list[Compiled]:
        return [Compiled(b"", each.symbol, self.target.arch, 96, 0, 0) for each in plan.every_launch]

    def executable(self, plan: Plan, roles: Sequence[str]) -> launch.Executable:
        # a plan may be run in two parts: what prepares, and the rest; the gradient of a bias comes behind a plan
        def belongs(made: Plan) -> bool:
            return plan.launches in (made.launches, made.prepare) or plan.launches[:-1] == made.launches

        made = plan if plan in self.problems else next(filter(belongs, self.problems))
        problem = self.problems[made]
        prepares = bool(made.prepare) and plan.every_launch != made.launches
        computes = plan.every_launch != made.prepare
        self.executables += 1

        def run(stream: int, values: Sequence[float], here: bool = False) -> None:
            if here and self.without_context:
                raise CudaError("no context is current")
            given = dict(zip(roles, values, strict=True))
            self.launches.append((stream, dict(given)))
            if isinstance(problem, ConvProblem):
                if prepares:
                    self.prepared += 1
                    nbytes = item_bytes(problem.dtype) * int(np.prod(problem.w_shape))
                    ctypes.memmove(int(given["prepared"]), int(given["w"]), nbytes)
                if not computes:
                    return
                if made.prepare:
                    given["w"] = given["prepared"]
                arrays = {
                    each.role: at_address(int(given[each.role]), each.shape, dense(each.shape), each.dtype)
                    for each in problem.operands
                }
                x, w, *_, y = arrays.values()
                bias = arrays.get("bias")
                if problem.fuses:
                    axis = FILTERS_AXIS[problem.layout]
                    sums, beside = oracle_conv(problem.plain, x, w, None), (arrays.get("scale"), arrays.get("add"))
                    y[...] = finish(sums, axis, bias, *beside, problem.activation)
                else:
                    y[...] = oracle_conv(problem, x, w, bias)
                if problem.op == "wgrad" and given["bias"]:
                    images = tuple(axis for axis in range(4) if axis != problem.layout.index("C"))
                    sums = at_address(int(given["bias"]), (problem.k,), (1,), problem.dtype)
                    sums[...] = w.sum(images, dtype=np.float64)
            else:
                wide = problem.w * problem.channels
                shape = (problem.batch * problem.d, problem.h, wide)
                item = item_bytes(problem.dtype)
                x = at_address(int(given["x"]), shape, (problem.x_step, problem.x_pitch, 1), problem.dtype, item)
                results = (
                    problem.batch * problem.filters * problem.out_d,
                    problem.out_h,
                    problem.out_w * problem.channels,
                )
                strides, item = (problem.y_step, problem.y_pitch, 1), item_bytes(problem.result)
                y = at_address(int(given["y"]), results, strides, problem.result, item)
                kernel = at_address(int(given["w"]), problem.w_shape, dense(problem.w_shape), problem.sums)
                sums = oracle_filter(problem, x.reshape(problem.x_shape), kernel, given["value"], given["delta"])
                y[...] = as_result(sums, problem.result).reshape(results)

        return run

    def allocate(self, nbytes: int) -> int:
        self.allocations += 1
        buffer = (ctypes.c_byte * (nbytes + 64))()
        pointer = -(-ctypes.addressof(buffer) // 64) * 64
        self.memory[pointer] = buffer
        return pointer

    def free(self, pointer: int) -> None:
        del self.memory[pointer]

    def upload(self, pointer: int, array: np.ndarray) -> None:
        ctypes.memmove(pointer, array.ctypes.data, array.nbytes)

    def download(self, array: np.ndarray, pointer: int) -> None:
        ctypes.memmove(array.ctypes.data, pointer, array.nbytes)


class Devices:
    current = 0


def make_cupy(host_device: HostDevice) -> types.ModuleType:
    """As much of CuPy as leanconv uses, on host memory; each device has a current stream, which tests may change."""
    module = types.ModuleType("cupy")

    class ndarray:  # noqa: N801 - CuPy's own name
        def __init__(self, host: np.ndarray, device: int) -> None:
            self.host = host
            self.data = types.SimpleNamespace(ptr=host.ctypes.data, device_id=device)

        shape = property(lambda self: self.host.shape)
        strides = property(lambda self: self.host.strides)
        dtype = property(lambda self: self.host.dtype)
        ndim = property(lambda self: self.host.ndim)
        itemsize = property(lambda self: self.host.itemsize)
        flags = property(lambda self: types.SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))

        def __getitem__(self, index: Any) -> ndarray:
            return ndarray(self.host[index], self.data.device_id)

        def __setitem__(self, index: Any, value: Any) -> None:
            self.host[index] = getattr(value, "host", value)

        def copy(self, order: str = "C") -> ndarray:
            module.copies += 1  # type: ignore[attr-defined]
            return asarray(self.host)

        def astype(self, dtype: Any, order: str = "C") -> ndarray:
            module.copies += 1  # type: ignore[attr-defined]
            return asarray(self.host.astype(dtype))

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, Devices.current = Devices.current, self.index

        def __exit__(self, *exception: object) -> None:
            Devices.current = self.before

    def empty(shape: Sequence[int], dtype: Any) -> ndarray:
        module.allocations += 1  # type: ignore[attr-defined]
        dtype = np.dtype(dtype)
        raw = np.full(int(np.prod(shape)) * dtype.itemsize + 64, 0xFF, np.uint8)
        start = -raw.ctypes.data % 64
        host = raw[start : start + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
        return ndarray(host, Devices.current)

    def asarray(host: np.ndarray) -> ndarray:
        made = empty(host.shape, host.dtype)
        made.host[...] = host
        return made

    streams: dict[int, Any] = {}

    def current_stream() -> Any:
        index = Devices.current
        wait = partial(module.waited.append, index)  # type: ignore[attr-defined]
        return streams.setdefault(index, types.SimpleNamespace(ptr=host_device.at(index).stream, synchronize=wait))

    ndarray.__module__ = "cupy"
    module.ndarray, module.empty, module.asarray = ndarray, empty, asarray  # type: ignore[attr-defined]
    module.allocations = module.copies = 0  # type: ignore[attr-defined]
    module.waited = []  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        runtime=types.SimpleNamespace(getDevice=lambda: Devices.current),
        get_current_stream=current_stream,
    )
    return module


#: by address of their memory, tensors that lie on a certain GPU, and its number; where there are none all lie on 0
HOMES: dict[int, tuple[int, Any]] = {}


def on_gpu(index: int, tensor: Any) -> Any:
    """The tensor, which from now on lies on a GPU of `torch_on_device`; then every tensor has to be laid on one."""
    HOMES[tensor.untyped_storage().data_ptr()] = index, tensor
    return tensor


class Other:
    """An array of a library that leanconv does not know, with DLPack."""

    def __init__(self, array: Any) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def set_capturing(patch: pytest.MonkeyPatch, is_capturing: bool) -> None:
    """Whether the current stream is said to capture a CUDA graph."""
    from leanconv.torch import decided, quick, switches

    for module in decided, quick, switches:
        patch.setattr(module, "capturing", lambda: is_capturing)


@contextmanager
def patched_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`leanconv.torch.enable` takes what runs on the CPU, whose tensors `torch_on_device` lays on its device, and
    expects PyTorch to be slow, and the GPU never to wait for the host. Afterwards nothing is left of it, even if
    another thread is alive.

    Autocast of the CPU casts aten::_convolution only without its last argument, TF32.
    """
    import torch

    import leanconv.torch
    from leanconv.torch import comparing, functions, module_call, patch, registration, switches

    convolution = switches._convolution
    monkeypatch.setattr(registration, "_KEY", "CPU")
    monkeypatch.setattr(registration, "_libraries", {})
    monkeypatch.setattr(functions, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(switches, "_KIND", "cpu")
    for module in switches, functions, module_call:
        monkeypatch.setattr(module, "autocast_type", partial(torch.get_autocast_dtype, "cpu"))
    monkeypatch.setattr(switches, "_convolution", lambda *given: convolution(*given[:-1]))
    monkeypatch.setattr(patch, "pytorch_cycles", lambda problem, target, tf32: 1e12)
    monkeypatch.setattr(comparing, "launched_sooner", lambda ours, pytorch: False)
    try:
        yield
    finally:
        leanconv.torch.disable()
        for library in registration._libraries.values():
            library._destroy()  # no thread that is left convolves
