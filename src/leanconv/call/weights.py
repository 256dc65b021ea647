"""Packed weights: what algorithms compute from the filters alone, kept so that only the first call computes it."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from leanconv.arrays import Arrays, MemoryOrder, arrays_of, carried
from leanconv.arrays.numpy import NUMPY, plain
from leanconv.arrays.operands import check_dtypes
from leanconv.dtypes import FLOAT_LAYERS, WEIGHTS, check_weights, filter_sum, is_integer, item_bytes
from leanconv.options import Kept
from leanconv.plan import Plan
from leanconv.runtime import launch


class PreparedWeights:
    """Filters to pass in place of ``array`` to layers and gradients of the input; made by `prepare_weights`.

    All other attributes (``shape``, ``dtype``, ...) are those of ``array``. May be used on any stream and thread.
    """

    def __init__(self, array: Any, kept: Kept = "quickest") -> None:
        self.array, self.kept = array, kept
        self._lock = threading.RLock()
        self._prepared: dict[FilterPreparation, PreparedFilters] = {}
        self._copies: dict[MemoryOrder, Any] = {}
        self._version = _library(array).version(array)
        _library(array).follow(self)

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
        copy = item_bytes(_library(self.array).dtype(self.array)) * math.prod(self.array.shape)
        with self._lock:
            return len(self._copies) * copy + sum(each.plan.prepared_bytes for each in self._prepared)

    def reads(self) -> tuple[int, ...]:
        """Addresses where the memory begins of which something is kept."""
        return (_library(self.array).memory(self.array),) if self._prepared or self._copies else ()

    def refresh(self) -> None:
        """Drop what is kept, after the values of ``array`` have changed; the next calls prepare the new values.

        Changes that PyTorch counts (``tensor._version``), and steps of its optimisers, need no `refresh`. It counts
        none that are made through ``tensor.data``, by collectives of torch.distributed or by the replay of a CUDA
        graph. A CUDA graph that reads what was kept would then read freed memory: capture it again.
        """
        with self._lock:
            self._prepared, self._copies = {}, {}
            self._version = _library(self.array).version(self.array)

    def prepared_by(self, preparation: FilterPreparation, arrays: Arrays) -> PreparedFilters | None:
        """What ``preparation`` computes from the filters; None where a CUDA graph that is being captured would do it.

        The call waits for it before keeping it, so every stream may read it.
        """
        if arrays.version(self.array) != self._version:
            self.refresh()
        prepared = self._prepared.get(preparation)
        stream = arrays.stream(preparation.index)
        if prepared is None:
            if preparation.device.capturing(stream):
                return None
            with self._lock:
                prepared = self._prepared.get(preparation)
                if prepared is None:
                    prepared = self._prepared[preparation] = self._prepare(preparation, arrays, stream)
        if stream not in prepared.streams:
            # our own memory; the caller registers w, as in any call
            for array in (prepared.w if preparation.copy else None, prepared.array):
                if array is not None:
                    arrays.in_use(array, preparation.index)
            prepared.streams.add(stream)
        return prepared

    def kept_for(self, preparation: FilterPreparation, version: int, stream: int) -> PreparedFilters | None:
        """What is kept of filters that have changed ``version`` times, if a stream may read it at once.

        The caller holds it until its launch: freed earlier, its memory could be reused.
        """
        if version != self._version:  # NOTE: asked first, since `refresh` drops what is kept before it counts
            return None
        prepared = self._prepared.get(preparation)
        return prepared if prepared is not None and stream in prepared.streams else None

    def _prepare(self, preparation: FilterPreparation, arrays: Arrays, stream: int) -> PreparedFilters:
        w = self.array
        if preparation.copy:
            w = self._copies.get(preparation.order)
            if w is None:
                w = arrays.copy(self.array, preparation.order)
            else:
                arrays.in_use(w, preparation.index)  # another preparation may have made it on another stream
        array, address = None, 0
        if preparation.run is not None:
            array = arrays.empty((-(-preparation.plan.prepared_bytes // 4),), "float32", preparation.index)
            address = arrays.pointer(array)
            if not address:
                refuse_null(arrays)
            preparation.run(stream, (arrays.pointer(w), address))
        preparation.device.wait(stream)
        if preparation.copy:
            self._copies[preparation.order] = w
        return PreparedFilters(w, array, address, {stream})


def prepare_weights(w: Any) -> PreparedWeights:
    """Filters that are prepared once, for inference with weights that do not change.

    Some algorithms transform or rearrange the filters before they convolve, in each call: ``winograd1d``, for example.
    With the result of this function in place of ``w``, only the first call does so. So ``"auto"`` does not count it: it
    may take another algorithm than for ``w``, with other roundings.

    Args:
        w: filters as layers and gradients of the input take them, on a GPU. They are not copied. Changes in place
            that PyTorch counts are followed; after any other call `PreparedWeights.refresh`.

    Returns:
        PreparedWeights, which any number of calls take as their ``w``, of any layer, algorithm, layout and batch. The
        memory that they keep comes from the allocator of w's library; ``nbytes`` is its size. If calls would copy the
        filters to another memory order each time, that copy is kept as well.

    Raises:
        ValueError, TypeError: ``w`` cannot be the filters of any layer.

    The call that prepares waits for the GPU. During the capture of a CUDA graph nothing is kept: the graph prepares at
    each replay, unless an earlier call has prepared already. Then it reads what is kept, so keep the PreparedWeights as
    long as the graph. CuPy's pool does not track which streams read its memory: drop them when all streams have
    finished. NumPy arrays, and PyTorch's on the CPU, keep nothing.

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
    w = carried(w, "w")
    _library(w).refuse_without_memory(w, "w")
    dtype = check_dtypes({"w": _library(w).dtype(w)}, WEIGHTS)
    if len(w.shape) not in (3, 4, 5):
        raise ValueError(
            f"w has {len(w.shape)} dimensions, shape {tuple(w.shape)}; it must have 4, or 3 for conv1d, or 5 for conv3d"
        )
    if min(w.shape) < 1:
        raise ValueError(f"w has shape {tuple(w.shape)}; it must not be empty")
    if len(w.shape) == 5:
        refuse_integer_volumes("w", dtype)
    return PreparedWeights(w)


def refuse_integer_volumes(name: str, dtype: str) -> None:
    """Raise TypeError for integers, of which there are no layers of volumes."""
    if is_integer(dtype):
        raise TypeError(f"{name} has dtype {dtype}; layers of volumes are of {', '.join(FLOAT_LAYERS)}")


def refuse_null(arrays: Arrays) -> NoReturn:
    """Raise TypeError for memory at address 0. What arrays' signatures admit has memory; what a call allocates or
    copies obeys the mode that the caller has entered."""
    raise TypeError(
        f"{arrays.name} has allocated a tensor without memory: a mode is active in which it only traces, such as "
        "FakeTensorMode; call this function outside it"
    )


def _library(array: Any) -> Arrays:
    arrays = arrays_of(array)
    assert arrays is not None  # an array of another library has been carried
    return arrays


@dataclass(frozen=True, eq=False)
class FilterPreparation:
    """What must be computed from filters before a plan's ``launches`` can run. The same one is the same object."""

    device: launch.Device
    index: int
    #: the launches that prepare, alone
    plan: Plan
    run: launch.Executable | None
    #: whether the filters must be copied because no kernel can read them in place, and the memory order of the copy
    copy: bool
    order: MemoryOrder


@dataclass(frozen=True)
class PreparedFilters:
    """What a preparation has computed."""

    #: the filters, as kernels can read them
    w: Any
    #: the packed weights and their address; None and 0 where a copy is all that was needed
    array: Any
    address: int
    #: streams that are registered with the allocator as readers
    streams: set[int] = field(compare=False)


#: NOTE: they live as long as a ready call or filters that were prepared refer to them
_preparations: weakref.WeakValueDictionary[Hashable, FilterPreparation] = weakref.WeakValueDictionary()
_preparations_lock = threading.Lock()


def preparation_of(device: launch.Device, index: int, plan: Plan, copy: bool, order: MemoryOrder) -> FilterPreparation:
    """What ``plan`` needs of its filters before its ``launches``."""
    key = (device, plan.prepare, plan.prepared_bytes, copy, order)
    preparation = _preparations.get(key)
    if preparation is None:
        alone = Plan(plan.prepare, prepared_bytes=plan.prepared_bytes if plan.prepare else 0)
        # outside the lock: it may compile
        run = device.executable(alone, ("w", "prepared")) if plan.prepare else None
        made = FilterPreparation(device, index, alone, run, copy, order)
        with _preparations_lock:
            preparation = _preparations.setdefault(key, made)
    return preparation


_kernels: dict[Hashable, Any] = {}
#: NOTE: a kernel that is kept is never dropped, since a captured graph may read it; so their number is bounded
_MAX_KERNELS = 256


#: Most bytes of a filter's weights.
_MOST_BYTES = 2**31


def given_kernel(kernel: Any) -> Any:
    """The kernel of a filter, a list as an array of NumPy.

    Raises ValueError for a list that is no array, and for an array of NumPy that is too large: a view may repeat a
    number, and what copies it would ask for all of it.
    """
    if kernel is None or isinstance(kernel, (int, float, complex, str, np.generic)):
        raise TypeError(f"kernel={kernel!r} is no array; give its rows: a list of lists of numbers, or an array")
    if type(kernel) in (list, tuple):
        try:
            kernel = np.asarray(kernel)
        except ValueError as error:
            raise ValueError(f"kernel is a list whose rows are not alike: {error}") from None
    elif type(kernel) is not np.ndarray and isinstance(kernel, np.ndarray):
        kernel = np.asarray(kernel) if isinstance(kernel, np.matrix) else kernel
        NUMPY.refuse_without_memory(kernel, "kernel")
    if type(kernel) is np.ndarray and 8 * kernel.size > _MOST_BYTES:
        raise ValueError(
            f"kernel has shape {kernel.shape}, {8 * kernel.size} bytes of float64; the limit is {_MOST_BYTES}"
        )
    return kernel


def as_weights(w: np.ndarray, dtype: str) -> np.ndarray:
    """Weights in the type of the sums; beyond it they are Inf, without a warning."""
    with np.errstate(over="ignore"):
        return w.astype(dtype, copy=False)


def kernel_beside(image: Any, kernel: Any, result: str | None = None) -> Any:
    """A list or a NumPy array of a `filter2d` kernel on the image's device, in the type of the sums: one copy is kept
    for each content. Any other kernel as it is. ``result`` is the result's type, where the caller says so."""
    if type(kernel) in (list, tuple):
        kernel = np.asarray(kernel)
    arrays = arrays_of(image)
    if arrays is None or arrays is NUMPY or type(kernel) is not np.ndarray:
        return kernel
    check_weights("kernel", kernel.dtype.name)
    device, dtype = arrays.device(image), arrays.dtype(image)
    sums = filter_sum(dtype, result or dtype, kernel.dtype.kind in "biu")
    key = (arrays.name, device, kernel.shape, kernel.dtype, sums, kernel.tobytes())
    copied = _kernels.get(key)
    if copied is None:
        arrays.refuse_without_memory(image, "image")
        copied = arrays.from_numpy(as_weights(plain(kernel), sums), device)
        if len(_kernels) < _MAX_KERNELS:
            _kernels[key] = copied
    return copied
