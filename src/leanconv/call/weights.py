"""Filters that keep what algorithms make of them, so that only the first call makes it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from leanconv.arrays import Arrays, MemoryOrder, arrays_of, carry
from leanconv.call import arguments
from leanconv.call.run import Call, GpuCall
from leanconv.dtypes import item_bytes
from leanconv.plan import Plan
from leanconv.runtime import launch


class PreparedWeights:
    """Filters that stand for ``array`` in `conv2d`, `conv2d_input` and `conv1d`; made by `prepare_weights`.

    What else is asked of them (``shape``, ``dtype``, ...) is asked of ``array``. May be used on any stream and thread.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        self._lock = threading.RLock()
        self._kept: dict[Work, Kept] = {}
        self._copies: dict[MemoryOrder, Any] = {}

    # what each warm call asks for its key; each takes 0.3 µs less than by __getattr__
    shape, dtype = property(attrgetter("array.shape")), property(attrgetter("array.dtype"))
    strides, data = property(attrgetter("array.strides")), property(attrgetter("array.data"))
    stride, data_ptr = property(attrgetter("array.stride")), property(attrgetter("array.data_ptr"))
    is_cuda, get_device = property(attrgetter("array.is_cuda")), property(attrgetter("array.get_device"))
    requires_grad = property(attrgetter("array.requires_grad"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "array":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.array, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, or one that comes out of a pickle, keeps nothing yet."""
        return prepare_weights, (self.array,)

    def __repr__(self) -> str:
        arrays = _library(self.array)
        return (
            f"<PreparedWeights: {arrays.name} {tuple(self.array.shape)} {arrays.dtype(self.array)} on "
            f"{arrays.where(self.array)}, {self.nbytes} bytes kept>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that are kept beside ``array``."""
        copy = item_bytes(_library(self.array).dtype(self.array))
        for length in self.array.shape:
            copy *= length
        with self._lock:
            return len(self._copies) * copy + sum(work.plan.prepared_bytes for work in self._kept)

    def refresh(self) -> None:
        """Drop what is kept, after the numbers of ``array`` have changed; the next calls prepare them as they are.

        A CUDA graph that was captured with what was kept would read memory that is free again: capture it anew.
        """
        with self._lock:
            self._kept, self._copies = {}, {}

    def kept(self, work: Work, arrays: Arrays) -> Kept | None:
        """What ``work`` makes of the filters; None where it would have to be made while a CUDA graph is captured.

        What is made is waited for before it is kept, so every stream may read it.
        """
        found = self._kept.get(work)
        stream = arrays.stream(work.index)
        if found is None:
            if work.device.capturing(stream):
                return None
            with self._lock:
                found = self._kept.get(work)
                if found is None:
                    found = self._kept[work] = self._make(work, arrays, stream)
        if stream not in found.streams:
            # what is ours; the caller sees to w, as in any call
            for array in (found.w if work.copy else None, found.prepared):
                if array is not None:
                    arrays.in_use(array, work.index)
            found.streams.add(stream)
        return found

    def _make(self, work: Work, arrays: Arrays, stream: int) -> Kept:
        w = self.array
        if work.copy:
            w = self._copies.get(work.order)
            if w is None:
                w = arrays.copy(self.array, work.order)
            else:
                arrays.in_use(w, work.index)  # it may have been made on another stream, for other work
        prepared, prepared_at = None, 0
        if work.run is not None:
            prepared = arrays.empty((-(-work.plan.prepared_bytes // 4),), "float32", work.index)
            prepared_at = arrays.pointer(prepared)
            given = {"w": arrays.pointer(w), "prepared": prepared_at}
            work.run(stream, [given.get(name, 0) for name in launch.BOUND_NAMES])
        work.device.wait(stream)
        if work.copy:
            self._copies[work.order] = w
        return Kept(w, prepared, prepared_at, {stream})


class _NumpyWeights(PreparedWeights):
    """NumPy's keep nothing. NOTE: a type of their own, for it is part of a warm call's key, and what NumPy asks of an
    array for the rest of the key a CuPy array would answer alike."""


def prepare_weights(w: Any) -> PreparedWeights:
    """Filters whose preparation is done once, for inference with weights that stay as they are.

    Some algorithms make something of the filters before they convolve: `winograd1d` transforms them. A call does that
    each time. Given the result of this function in place of ``w``, the first call does it and later ones do not.

    Args:
        w: filters as `conv2d`, `conv2d_input` and `conv1d` take them, on a GPU. They are not copied, and must not
            change without `PreparedWeights.refresh`.

    Returns:
        PreparedWeights, which any number of calls take as their ``w``, of any layer, algorithm, layout and batch. What
        they keep comes from the allocator of w's library; ``nbytes`` tells how much. A copy that calls would need each
        time, of filters in another memory order, is kept as well.

    Raises:
        ValueError, TypeError: ``w`` cannot be the filters of any layer.

    The call that prepares waits for the GPU. While a CUDA graph is captured nothing is kept: the graph prepares at
    each replay, unless a call before has prepared already; then it reads what is kept, so keep the PreparedWeights as
    long as the graph. CuPy's pool does not know who reads its memory: drop them when all streams have finished. NumPy
    arrays, and PyTorch's on the CPU, keep nothing.

    >>> import numpy as np
    >>> from leanconv import conv2d, prepare_weights
    >>> w = prepare_weights(np.ones((1, 1, 3, 3), np.float32))
    >>> conv2d(np.ones((1, 1, 4, 4), np.float32), w, padding=1)[0, 0, 0].tolist()
    [4.0, 6.0, 6.0, 4.0]
    >>> w
    <PreparedWeights: NumPy (1, 1, 3, 3) float32 on the CPU, 0 bytes kept>
    """
    if isinstance(w, PreparedWeights):
        return w
    w = w if arrays_of(w) is not None else carry(w, "w")
    arguments.check_dtypes({"w": _library(w).dtype(w)})
    if len(w.shape) not in (3, 4):
        raise ValueError(f"w has {len(w.shape)} dimensions, shape {tuple(w.shape)}; it must have 4, or 3 for conv1d")
    return _NumpyWeights(w) if isinstance(w, np.ndarray) else PreparedWeights(w)


def _library(array: Any) -> Arrays:
    arrays = arrays_of(array)
    assert arrays is not None  # an array of another library has been carried
    return arrays


@dataclass(frozen=True, eq=False)
class Work:
    """What must be made of filters before a plan's ``launches`` can run. The same work is the same object."""

    device: launch.Device
    index: int
    #: the launches that prepare, alone
    plan: Plan
    run: launch.Executable | None
    #: whether the filters cannot be read as they lie, and if so, in which memory order they are copied
    copy: bool
    order: MemoryOrder


@dataclass(frozen=True)
class Kept:
    """What was made of filters."""

    #: the filters, as kernels can read them
    w: Any
    prepared: Any
    prepared_at: int
    #: the allocator knows that they read it
    streams: set[int] = field(compare=False)


_works: dict[Any, Work] = {}
_works_lock = threading.Lock()


def work_of(device: launch.Device, index: int, plan: Plan, copy: bool, order: MemoryOrder) -> Work | None:
    """What ``plan`` needs of its filters before its ``launches``, if anything."""
    if not plan.prepare and not copy:
        return None
    key = (device, plan.prepare, plan.prepared_bytes, copy, order)
    with _works_lock:
        found = _works.get(key)
        if found is None:
            alone = Plan(plan.prepare, prepared_bytes=plan.prepared_bytes if plan.prepare else 0)
            run = device.executable(alone) if plan.prepare else None
            found = _works[key] = Work(device, index, alone, run, copy, order)
    return found


class PreparedCall:
    """On arrays of a GPU with filters that keep their preparation: a plan's ``launches`` alone."""

    def __init__(self, arrays: Arrays, work: Work, whole: GpuCall, rest: GpuCall, gradient: bool) -> None:
        """``whole`` prepares too; ``rest`` does not. ``gradient`` says whether the filters require one."""
        self._arrays, self._work, self._whole, self._rest, self._gradient = arrays, work, whole, rest, gradient

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """See Call."""
        if self._gradient:
            self._arrays.refuse_gradient(w.array)
        kept = w.kept(self._work, self._arrays)
        if kept is None:
            return self._whole(x, w.array, bias, out)
        return self._rest(x, kept.w, bias, out, prepared_at=kept.prepared_at)


class UnpreparedCall:
    """With filters that keep nothing for this call: on their array."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, x: Any, w: Any, bias: Any, out: Any, value: float = 0, delta: float = 0) -> Any:
        """See Call."""
        return self._call(x, w.array, bias, out)
