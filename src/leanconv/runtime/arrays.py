"""Whose array is it: NumPy, CuPy, PyTorch, or anything with DLPack, seen as pointer, shape, strides, dtype and device.

One `Arrays` object stands for each library. Neither PyTorch nor CuPy is imported unless the caller's arrays are
theirs. An array of another library is carried by CuPy or PyTorch, whichever is there, without a copy (on the CPU by
NumPy), and the result goes back through the ``from_dlpack`` of the library's array-API namespace; a library without
one gets the carrier's array, which speaks DLPack too.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

Shape = tuple[int, ...]
#: The axes of an array as its library shows them, in the order in which they lie in memory, slowest first; None where
#: that is the order in which they are shown.
MemoryOrder = tuple[int, ...] | None


class Arrays(ABC):
    """What the rest of the package asks of an array library. ``device`` is a GPU's number, or None for the CPU.

    Shapes are what the library shows. ``order`` asks for another order in memory: (0, 2, 3, 1) for one that is shown as
    N, C, H, W and lies as N, H, W, C. Only PyTorch is asked: what the others show is how it lies.
    """

    name: ClassVar[str]

    @abstractmethod
    def signature(self, array: Any) -> Hashable:
        """Shape, strides, dtype, device, alignment, and whether a gradient is required: the key of a warm call."""

    @abstractmethod
    def device(self, array: Any) -> int | None:
        """Where it lies. Raises ValueError for a device that is neither the CPU nor a CUDA GPU."""

    @abstractmethod
    def dtype(self, array: Any) -> str:
        """NumPy's name of the dtype; ``float32``."""

    @abstractmethod
    def strides(self, array: Any) -> Shape:
        """Distances of neighbours, in bytes."""

    @abstractmethod
    def pointer(self, array: Any) -> int:
        """Address of the first element."""

    def requires_gradient(self, array: Any) -> bool:
        """Whether using the array's address could lose a gradient."""
        return False

    def refuse_gradient(self, array: Any) -> None:
        """Raise ValueError where using the array's address would lose a gradient now."""
        return None

    def maker(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Callable[[], Any]:
        """What `empty` does for these arguments, with nothing left to look up."""
        return partial(self.empty, shape, dtype, device, order)

    def fast_pointer(self) -> Callable[[Any], int]:
        """`pointer`, the cheapest way to call it."""
        return self.pointer

    def fast_stream(self, device: int) -> Callable[[], int]:
        """`stream` for a device, the cheapest way to call it."""
        return partial(self.stream, device)

    def misalignment(self, array: Any) -> int:
        """Bytes by which its first element lies past a multiple of 16."""
        return self.pointer(array) % 16

    def negated(self, array: Any) -> bool:
        """Whether the library shows the opposite of what lies in memory: PyTorch's lazy negation of a view."""
        return False

    @abstractmethod
    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Any:
        """A new array with undefined contents."""

    @abstractmethod
    def is_contiguous(self, array: Any, order: MemoryOrder = None) -> bool:
        """Whether the elements lie without gaps in the order asked for."""

    @abstractmethod
    def copy(self, array: Any, order: MemoryOrder = None) -> Any:
        """A new contiguous array with the same elements, on the current stream; aligned as new memory is."""

    @abstractmethod
    def assign(self, target: Any, source: Any) -> None:
        """Copy the elements of ``source`` into ``target``, on the current stream."""

    @abstractmethod
    def stream(self, device: int) -> int:
        """Raw handle of the caller's current stream on a GPU."""

    def in_use(self, array: Any, device: int) -> None:
        """Tell the allocator that the current stream works with an array that was made on another one."""
        return None

    @abstractmethod
    def from_numpy(self, array: np.ndarray, device: int | None) -> Any:
        """A copy of a NumPy array on a device; finished when it returns."""

    def writeable(self, array: Any) -> bool:
        """Whether the library allows writing."""
        return True

    def extent(self, array: Any, itemsize: int) -> tuple[int, int]:
        """Offsets in bytes, from the pointer, of the first byte that the array covers and of the one after its last."""
        low = high = 0
        for length, stride in zip(array.shape, self.strides(array), strict=True):
            if length == 0:
                return 0, 0
            low += min(0, (length - 1) * stride)
            high += max(0, (length - 1) * stride)
        return low, high + itemsize

    def where(self, array: Any) -> str:
        """The device in words: ``the CPU`` or ``cuda:1``."""
        index = self.device(array)
        return "the CPU" if index is None else f"cuda:{index}"


class NumpyArrays(Arrays):
    """NumPy."""

    name = "NumPy"

    def signature(self, array: np.ndarray) -> Hashable:
        """See Arrays."""
        return array.shape, array.strides, array.dtype

    def device(self, array: np.ndarray) -> None:
        """See Arrays."""

    def dtype(self, array: np.ndarray) -> str:
        """See Arrays."""
        return str(array.dtype.name)

    def strides(self, array: np.ndarray) -> Shape:
        """See Arrays."""
        return array.strides

    def pointer(self, array: np.ndarray) -> int:
        """See Arrays."""
        return int(array.ctypes.data)

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> np.ndarray:
        """See Arrays."""
        return np.empty(shape, dtype)

    def is_contiguous(self, array: np.ndarray, order: MemoryOrder = None) -> bool:
        """Also whether it is aligned and in the machine's byte order."""
        return array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative

    def copy(self, array: np.ndarray, order: MemoryOrder = None) -> np.ndarray:
        """See Arrays."""
        return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")

    def assign(self, target: np.ndarray, source: np.ndarray) -> None:
        """See Arrays."""
        np.copyto(target, source)

    def stream(self, device: int) -> int:
        """The default stream."""
        return 0

    def from_numpy(self, array: np.ndarray, device: int | None) -> np.ndarray:
        """See Arrays."""
        return array.copy()

    def writeable(self, array: np.ndarray) -> bool:
        """See Arrays."""
        return bool(array.flags.writeable)


class CupyArrays(Arrays):
    """CuPy."""

    name = "CuPy"

    def __init__(self) -> None:
        self._cupy = importlib.import_module("cupy")
        self._device = self._cupy.cuda.Device
        self._current_device = self._cupy.cuda.runtime.getDevice
        self._current_stream = self._cupy.cuda.get_current_stream

    def signature(self, array: Any) -> Hashable:
        """See Arrays."""
        data = array.data
        return array.shape, array.strides, array.dtype, data.device_id, data.ptr & 15

    def device(self, array: Any) -> int:
        """See Arrays."""
        return int(array.data.device_id)

    def dtype(self, array: Any) -> str:
        """See Arrays."""
        return str(array.dtype.name)

    def strides(self, array: Any) -> Shape:
        """See Arrays."""
        return tuple(array.strides)

    def pointer(self, array: Any) -> int:
        """See Arrays."""
        return int(array.data.ptr)

    def fast_pointer(self) -> Callable[[Any], int]:
        """See Arrays."""
        return attrgetter("data.ptr")

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Any:
        """See Arrays."""
        if self._current_device() == device:
            return self._cupy.empty(shape, dtype)
        with self._device(device):
            return self._cupy.empty(shape, dtype)

    def is_contiguous(self, array: Any, order: MemoryOrder = None) -> bool:
        """See Arrays."""
        return bool(array.flags.c_contiguous)

    def copy(self, array: Any, order: MemoryOrder = None) -> Any:
        """See Arrays."""
        with self._device(array.data.device_id):
            return array.copy(order="C")

    def assign(self, target: Any, source: Any) -> None:
        """See Arrays."""
        with self._device(target.data.device_id):
            target[...] = source

    def stream(self, device: int) -> int:
        """See Arrays. CuPy's current stream belongs to its current device; another device uses its default stream."""
        if self._current_device() == device:
            return int(self._current_stream().ptr)
        with self._device(device):
            return int(self._current_stream().ptr)

    def from_numpy(self, array: np.ndarray, device: int | None) -> Any:
        """See Arrays."""
        with self._device(device):
            copied = self._cupy.asarray(array)
            self._current_stream().synchronize()
        return copied


class TorchArrays(Arrays):
    """PyTorch."""

    name = "PyTorch"

    def __init__(self) -> None:
        self._torch = importlib.import_module("torch")
        torch = self._torch
        self._dtypes = {name: getattr(torch, name) for name in ("float32", "float64", "int32")}
        self._devices: dict[int | None, Any] = {None: torch.device("cpu")}
        # the raw handle costs 0.1 µs, the Stream object 2 µs; PyTorch's own compiler calls the same function
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def signature(self, array: Any) -> Hashable:
        """See Arrays."""
        place = array.is_cuda, array.get_device(), array.data_ptr() & 15
        return array.shape, array.stride(), array.dtype, place, array.requires_grad

    def device(self, array: Any) -> int | None:
        """See Arrays."""
        if array.layout is not self._torch.strided:
            raise ValueError(f"a PyTorch tensor of layout {array.layout} was given; it must be dense (strided)")
        if array.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a PyTorch tensor on {array.device} was given; only the CPU and CUDA GPUs are served")
        return None if array.device.type == "cpu" else int(array.device.index)

    def dtype(self, array: Any) -> str:
        """See Arrays."""
        return str(array.dtype).removeprefix("torch.")

    def strides(self, array: Any) -> Shape:
        """See Arrays."""
        size = array.element_size()
        return tuple(size * stride for stride in array.stride())

    def pointer(self, array: Any) -> int:
        """See Arrays."""
        return int(array.data_ptr())

    def fast_pointer(self) -> Callable[[Any], int]:
        """See Arrays."""
        pointer: Callable[[Any], int] = self._torch.Tensor.data_ptr
        return pointer

    def requires_gradient(self, array: Any) -> bool:
        """See Arrays."""
        return bool(array.requires_grad)

    def refuse_gradient(self, array: Any) -> None:
        """See Arrays."""
        if array.requires_grad and self._torch.is_grad_enabled():
            raise ValueError(
                "a tensor that requires a gradient was given, and this function computes none: "
                "call it under torch.no_grad(), or pass tensor.detach()"
            )

    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Any:
        """See Arrays."""
        return self.maker(shape, dtype, device, order)()

    def maker(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Callable[[], Any]:
        """See Arrays."""
        options: dict[str, Any] = {"dtype": self._dtypes[dtype], "device": self._device(device)}
        if order is None:
            return partial(self._torch.empty, shape, **options)
        strides, distance = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = distance
            distance *= max(1, shape[axis])
        return partial(self._torch.empty_strided, shape, tuple(strides), **options)

    def fast_stream(self, device: int) -> Callable[[], int]:
        """See Arrays."""
        return partial(self.stream if self._raw_stream is None else self._raw_stream, device)

    def _device(self, index: int | None) -> Any:
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = self._torch.device("cuda", index)
        return found

    def is_contiguous(self, array: Any, order: MemoryOrder = None) -> bool:
        """See Arrays."""
        if order is not None:
            array = array.permute(order)
        return bool(array.is_contiguous()) and not array.is_neg()

    def negated(self, array: Any) -> bool:
        """See Arrays."""
        return bool(array.is_neg())

    def copy(self, array: Any, order: MemoryOrder = None) -> Any:
        """See Arrays."""
        array = array.detach().resolve_neg()
        if order is None:
            return array.clone(memory_format=self._torch.contiguous_format)
        copied = array.permute(order).clone(memory_format=self._torch.contiguous_format)
        return copied.permute([order.index(axis) for axis in range(len(order))])

    def in_use(self, array: Any, device: int) -> None:
        """See Arrays."""
        array.record_stream(self._torch.cuda.current_stream(device))

    def assign(self, target: Any, source: Any) -> None:
        """See Arrays."""
        target.copy_(source)

    def stream(self, device: int) -> int:
        """See Arrays."""
        if self._raw_stream is not None:
            return int(self._raw_stream(device))
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def from_numpy(self, array: np.ndarray, device: int | None) -> Any:
        """See Arrays."""
        copied = self._torch.from_numpy(array.copy()).to(self._device(device))
        if device is not None:
            self._torch.cuda.current_stream(device).synchronize()
        return copied


NUMPY = NumpyArrays()
_libraries: dict[str, Arrays] = {}
#: library of each array type met so far; None marks a type that has to be carried
_by_type: dict[type, Arrays | None] = {np.ndarray: NUMPY}


def _library(module: str) -> Arrays:
    if module not in _libraries:
        _libraries[module] = {"torch": TorchArrays, "cupy": CupyArrays}[module]()
    return _libraries[module]


def _find(kind: type) -> Arrays | None:
    if issubclass(kind, np.ndarray):
        return NUMPY
    for base in kind.__mro__:
        module = base.__module__.partition(".")[0]
        if module == "torch" and issubclass(kind, sys.modules["torch"].Tensor):
            return _library("torch")
        if module == "cupy" and issubclass(kind, sys.modules["cupy"].ndarray):
            return _library("cupy")
    return None


def arrays_of(array: Any) -> Arrays | None:
    """The library that an array is of, or None where it has to be carried (see `carry`)."""
    kind = type(array)
    if kind not in _by_type:
        _by_type[kind] = _find(kind)
    return _by_type[kind]


#: DLPack's numbers of the kinds of device that are served: CPU, pinned memory; CUDA, CUDA managed memory
_DLPACK_CPU, _DLPACK_CUDA = (1, 3), (2, 13)


def carry(array: Any, argument: str) -> Any:
    """An array of another library as one of NumPy, CuPy or PyTorch that shares its memory.

    Raises TypeError for what is no array or where neither CuPy nor PyTorch is installed to carry a GPU array,
    ValueError for one on another kind of device.
    """
    if not hasattr(array, "__dlpack__") or not hasattr(array, "__dlpack_device__"):
        raise TypeError(
            f"{argument} is a {type(array).__module__}.{type(array).__qualname__}; it must be an array of NumPy, CuPy, "
            "PyTorch, or of a library with DLPack"
        )
    device = int(array.__dlpack_device__()[0])
    if device in _DLPACK_CPU:
        return np.from_dlpack(array)
    if device not in _DLPACK_CUDA:
        raise ValueError(f"{argument} lies on a device of DLPack kind {device}; only the CPU and CUDA GPUs are served")
    # a library that is loaded already costs nothing; importing one takes a second
    for module in sorted(("cupy", "torch"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(module).from_dlpack(array)
        except ImportError:
            continue
    raise TypeError(
        f"{argument} is a GPU array of {type(array).__module__}; CuPy or PyTorch must be installed to carry it "
        "(pip install cupy-cuda13x, or torch)"
    )


def give_back(result: Any, like: Any) -> Any:
    """A carried call's result as an array of ``like``'s library, sharing memory; else as it is."""
    if hasattr(like, "__array_namespace__"):
        make = getattr(like.__array_namespace__(), "from_dlpack", None)
        if make is not None:
            return make(result)
    return result
