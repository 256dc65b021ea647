"""PyTorch, imported when a caller's array is its own."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any

import numpy as np

from leanconv.arrays.base import Arrays, MemoryOrder, Shape
from leanconv.arrays.numpy import plain
from leanconv.dtypes import DTYPES


class TorchArrays(Arrays):
    """PyTorch."""

    name = "PyTorch"
    convolves = True
    keeps_shape = True

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        torch = self._torch
        self._dtypes: dict[str, Any] = {name: getattr(torch, name) for name in DTYPES}
        self._devices: dict[int | None, Any] = {None: torch.device("cpu")}
        # the raw handle costs much less than the Stream object; PyTorch's own compiler calls the same function
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        # allocates on the current GPU, quicker than torch.empty; PyTorch's own compiler calls it too
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._quick_devices: dict[int, bool] = {}
        self._current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
        self._quick_empty: Any = getattr(guards, "_empty_strided_cuda", None) if self._current_device else None

    def signature(self, array: Any) -> Hashable:
        """See Arrays. Of tensors that only stand for values `data_ptr` raises, or is 0: then the alignment is None.

        So such tensors, and lazily negated ones, never have the signature of a tensor with memory.
        """
        pointer = array.data_ptr()
        return (
            array.shape, array.stride(), array.dtype, array.device, pointer & 15 if pointer else None,
            array.requires_grad, array.is_neg(),
        )  # fmt: skip

    def refuse_without_memory(self, array: Any, name: str) -> None:
        torch, kind = self._torch, type(array)
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            what = f"a {kind.__name__}, whose class replaces PyTorch's operations (__torch_dispatch__)"
            advice = "pass the plain tensor that it holds"
            if kind.__name__ in ("FakeTensor", "FunctionalTensor"):
                what = f"a {kind.__name__}: torch.compile and torch.export trace with it, and it holds no values"
                advice = "keep the call out of what they trace (torch.compiler.disable)"
        elif array.layout is not torch.strided:
            raise ValueError(f"{name} has PyTorch's layout {array.layout}; it must be dense, as {name}.to_dense() is")
        elif _has_memory(array):
            return
        elif array.device.type == "meta":
            what, advice = "a meta tensor, which has a shape and no values", "make it on the CPU or on a GPU"
        elif torch._C._functorch.is_functorch_wrapped_tensor(array):
            what, advice = "a tensor inside a transform of torch.func", "call this function outside the transform"
            if torch._C._functorch.is_batchedtensor(array):
                what = "a tensor inside torch.func.vmap"
            elif torch._C._functorch.is_gradtrackingtensor(array):
                what = "a tensor inside torch.func.grad, vjp or jvp"
        else:
            what = f"a tensor without memory of its own ({torch._C._dispatch_keys(array)})"
            advice = "pass an ordinary tensor"
        raise TypeError(f"{name} is {what}; leanconv reads a tensor's memory: {advice}")

    def device(self, array: Any) -> int | None:
        if array.layout is not self._torch.strided:
            raise ValueError(f"a PyTorch tensor of layout {array.layout} was given; it must be dense (strided)")
        if array.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a PyTorch tensor on {array.device} was given; only the CPU and CUDA GPUs are supported")
        return None if array.device.type == "cpu" else int(array.device.index)

    def dtype(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def strides(self, array: Any) -> Shape:
        size = array.element_size()
        return tuple(size * stride for stride in array.stride())

    def pointer(self, array: Any) -> int:
        return int(array.data_ptr())

    def fast_pointer(self) -> Callable[[Any], int]:
        pointer: Callable[[Any], int] = self._torch.Tensor.data_ptr
        return pointer

    def requires_gradient(self, array: Any) -> bool:
        return bool(array.requires_grad)

    def refuse_gradient(self, array: Any) -> None:
        if array.requires_grad and self._torch.is_grad_enabled():
            raise ValueError(
                "a tensor that requires a gradient was given, and this function computes none: leanconv.torch has "
                "functions that do (conv2d, filter2d); or call it under torch.no_grad(), or pass tensor.detach()"
            )

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Any:
        return self.allocator(shape, dtype, device, order)()

    def allocator(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Callable[[], Any]:
        plain_way, quick = self._ways(shape, dtype, device, order)
        if quick is None:
            return plain_way
        current_device: Callable[[], int] = self._current_device
        return lambda: quick() if current_device() == device else plain_way()

    def allocator_here(
        self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None
    ) -> Callable[[], Any]:
        return self._ways(shape, dtype, device, order)[1] or self.allocator(shape, dtype, device, order)

    def _ways(
        self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder
    ) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
        """What allocates anywhere, and what does on the current GPU, where there is such a way."""
        options: dict[str, Any] = {"dtype": self._dtypes[dtype], "device": self._device(device)}
        strides, distance = [0] * len(shape), 1
        for axis in reversed(order or range(len(shape))):
            strides[axis] = distance
            distance *= max(1, shape[axis])
        plain_way: Callable[[], Any] = partial(self._torch.empty, shape, **options)
        if order is not None:
            plain_way = partial(self._torch.empty_strided, shape, tuple(strides), **options)
        if device is None or not self._allocates_quickly(device):
            return plain_way, None
        # NOTE: a plain tuple: a torch.Size, as autograd hands on shapes, is refused by PyTorch 2.11.
        return plain_way, partial(self._quick_empty, tuple(shape), tuple(strides), options["dtype"])

    def _allocates_quickly(self, device: int) -> bool:
        """Whether `_quick_empty`, which is no public interface of PyTorch, does what it is taken for; tried once."""
        if device not in self._quick_devices:
            wanted = ((3, 2), (1, 3), self._torch.float16, self._device(device))
            try:
                with self._torch.cuda.device(device):
                    trial = self._quick_empty(*wanted[:3])
                works = (trial.shape, trial.stride(), trial.dtype, trial.device) == wanted
            except Exception:
                works = False
            self._quick_devices[device] = works
        return self._quick_devices[device]

    def fast_stream(self, device: int) -> Callable[[], int]:
        return partial(self.stream if self._raw_stream is None else self._raw_stream, device)

    def _device(self, index: int | None) -> Any:
        device = self._devices.get(index)
        if device is None:
            device = self._devices[index] = self._torch.device("cuda", index)
        return device

    def is_contiguous(self, array: Any, order: MemoryOrder = None) -> bool:
        if order is not None:
            array = array.permute(order)
        return bool(array.is_contiguous()) and not array.is_neg()

    def version(self, array: Any) -> int:
        return 0 if array.is_inference() else int(array._version)

    def follow(self, kept: Any) -> None:
        _watch_optimisers()
        with _lock:
            _followers.add(kept)

    def memory(self, array: Any) -> int:
        return int(array.untyped_storage().data_ptr())

    def negated(self, array: Any) -> bool:
        return bool(array.is_neg())

    def copy(self, array: Any, order: MemoryOrder = None) -> Any:
        array = array.detach().resolve_neg()
        if order is None:
            return array.clone(memory_format=self._torch.contiguous_format)
        copied = array.permute(order).clone(memory_format=self._torch.contiguous_format)
        return copied.permute([order.index(axis) for axis in range(len(order))])

    def cast(self, array: Any, dtype: str) -> Any:
        array = array.detach().resolve_neg()
        return array.to(self._dtypes[dtype], memory_format=self._torch.contiguous_format, copy=True)

    def in_use(self, array: Any, device: int) -> None:
        array.record_stream(self._torch.cuda.current_stream(device))

    def assign(self, target: Any, source: Any) -> None:
        target.copy_(source)

    def stream(self, device: int) -> int:
        if self._raw_stream is not None:
            return int(self._raw_stream(device))
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def from_numpy(self, array: np.ndarray, device: int | None) -> Any:
        copied = self._torch.from_numpy(array.copy()).to(self._device(device))
        if device is not None:
            self._torch.cuda.current_stream(device).synchronize()
        return copied

    def to_numpy(self, array: Any) -> np.ndarray:
        self.refuse_gradient(array)
        return plain(array.detach().resolve_conj().resolve_neg().numpy())


def _has_memory(array: Any) -> bool:
    try:
        return bool(array.data_ptr()) or not array.numel()
    except RuntimeError:
        return False


#: what is refreshed after an optimiser's step
_followers: weakref.WeakSet[Any] = weakref.WeakSet()
#: the same thread may come again, where what is kept is freed meanwhile
_lock = threading.RLock()


@cache
def _watch_optimisers() -> None:
    importlib.import_module("torch.optim.optimizer").register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Any, args: Any, options: Any) -> None:
    if importlib.import_module("torch").compiler.is_dynamo_compiling():  # of what is compiled PyTorch counts changes
        return
    with _lock:
        reading = [(each, {*each.reads()}) for each in _followers]
    reading = [(each, addresses) for each, addresses in reading if addresses]
    if not reading:
        return
    changed = [_memory(each) for group in optimizer.param_groups for each in group["params"]]
    for each, addresses in reading:
        if None in changed or not addresses.isdisjoint(changed):
            each.refresh()


def _memory(parameter: Any) -> int | None:
    """Where a parameter's memory begins; None for one that has another's, as a shard has."""
    try:
        return int(parameter.untyped_storage().data_ptr()) or None
    except (RuntimeError, NotImplementedError):
        return None
