"""The interface to an array library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ClassVar

import numpy as np

Shape = tuple[int, ...]
#: The axes of an array as its library shows them, in the order in which they lie in memory, slowest first; None where
#: that is the order in which they are shown.
MemoryOrder = tuple[int, ...] | None


class Arrays(ABC):
    """All that the package needs of an array library. ``device`` is a GPU's number, or None for the CPU.

    Shapes are those that the library shows. ``order`` is a permutation, for another order in memory: (0, 2, 3, 1) for
    an array with shape N, C, H, W and memory order N, H, W, C. Only PyTorch needs it: in the other libraries the shape
    is in memory order.
    """

    name: ClassVar[str]
    #: whether layers of arrays on the CPU are left to the library's own convolution
    convolves: ClassVar[bool] = False
    #: whether shapes stay logical (N, C, H, W) whatever the order in memory
    keeps_shape: ClassVar[bool] = False
    #: whether ``device=`` may name a GPU for arrays on the CPU
    moves_to_gpu: ClassVar[bool] = False

    @abstractmethod
    def signature(self, array: Any) -> Hashable:
        """Shape, strides, dtype, device, alignment, and what else decides how values are read: the key of a warm call.

        That of an array which `refuse_without_memory` refuses differs from that of any other, or raises.
        """

    @abstractmethod
    def device(self, array: Any) -> int | None:
        """The array's device. Raises ValueError for one that is neither the CPU nor a CUDA GPU."""

    @abstractmethod
    def dtype(self, array: Any) -> str:
        """NumPy's name of the dtype; ``float32``."""

    @abstractmethod
    def strides(self, array: Any) -> Shape:
        """Distances of neighbours, in bytes."""

    @abstractmethod
    def pointer(self, array: Any) -> int:
        """Address of the first element."""

    def refuse_without_memory(self, array: Any, name: str) -> None:
        """Raise TypeError where the caller's argument ``name`` only stands for values: it has no memory to read, or its
        memory is not all that it holds."""
        return None

    def requires_gradient(self, array: Any) -> bool:
        """Whether using the array's address could lose a gradient."""
        return False

    def refuse_gradient(self, array: Any) -> None:
        """Raise ValueError where using the array's address would lose a gradient now."""
        return None

    def allocator(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Callable[[], Any]:
        """A function that allocates what `empty` does for these arguments, with nothing left to look up."""
        return partial(self.empty, shape, dtype, device, order)

    def allocator_here(
        self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None
    ) -> Callable[[], Any]:
        """As `allocator`, for who knows that the device is the current one."""
        return self.allocator(shape, dtype, device, order)

    def fast_pointer(self) -> Callable[[Any], int]:
        """`pointer`, the cheapest way to call it."""
        return self.pointer

    def fast_stream(self, device: int) -> Callable[[], int]:
        """`stream` for a device, the cheapest way to call it."""
        return partial(self.stream, device)

    def misalignment(self, array: Any) -> int:
        """The address of the first element modulo 16."""
        return self.pointer(array) % 16

    def negated(self, array: Any) -> bool:
        """Whether the values in memory have the opposite sign: PyTorch's lazy negation of a view."""
        return False

    def version(self, array: Any) -> int:
        """A number that changes when the library changes the elements in place, where it counts; else always the same.

        PyTorch counts, but for changes that go by ``tensor.data``, and those of a CUDA graph that is replayed.
        """
        return 0

    def follow(self, kept: Any) -> None:  # noqa: B027 - libraries that need none have none
        """From now on call ``kept.refresh()`` after steps of an optimiser on memory at one of ``kept.reads()``.

        Fused optimisers of PyTorch change parameters without counting it (PyTorch 2.13).
        """

    def memory(self, array: Any) -> int:
        """The address where the memory begins that an array shares with its views."""
        return self.pointer(array)

    @abstractmethod
    def empty(self, shape: Shape, dtype: str, device: int | None, order: MemoryOrder = None) -> Any:
        """A new array with undefined contents."""

    @abstractmethod
    def is_contiguous(self, array: Any, order: MemoryOrder = None) -> bool:
        """Whether the elements are contiguous in the requested order."""

    @abstractmethod
    def copy(self, array: Any, order: MemoryOrder = None) -> Any:
        """A new contiguous array with the same elements, on the current stream; aligned as new memory is."""

    @abstractmethod
    def cast(self, array: Any, dtype: str) -> Any:
        """`copy` with elements of another type, rounded as the library does."""

    @abstractmethod
    def assign(self, target: Any, source: Any) -> None:
        """Copy the elements of ``source`` into ``target``, on the current stream."""

    @abstractmethod
    def stream(self, device: int) -> int:
        """Raw handle of the caller's current stream on a GPU."""

    def in_use(self, array: Any, device: int) -> None:
        """Register the current stream with the allocator, as a user of an array from another stream."""
        return None

    @abstractmethod
    def from_numpy(self, array: np.ndarray, device: int | None) -> Any:
        """A copy of a NumPy array on a device; finished when it returns."""

    def to_numpy(self, array: Any) -> np.ndarray:
        """An array on the CPU as one of NumPy, contiguous; without a copy where it can be."""
        raise TypeError(f"arrays of {self.name} do not lie on the CPU")

    def writeable(self, array: Any) -> bool:
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
