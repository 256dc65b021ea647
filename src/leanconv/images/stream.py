"""Image filters of what does not fit in memory: band by band, from a file to a file, on the CPU or through a GPU.

A band of rows is read with the rows that its windows reach, filtered, and written. Several bands are on their way at a
time, each in a lane: a thread with memory of its own and, on a GPU, a stream. So one lane's copy to the GPU overlaps
with another one's kernel and a third one's copy back, and the copies between files and page-locked memory, which a
single core is too slow for, have all cores. On a GPU there are twice as many lanes as cores, up to 16: while one waits
for its stream, which takes no core, another one copies.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from leanconv.arrays import NUMPY, arrays_of
from leanconv.arrays.numpy import learn_bfloat16
from leanconv.call.resolve import filter_problem
from leanconv.call.weights import given_kernel
from leanconv.dtypes import FILTERS, check_weights, filter_sum, item_bytes, one_of
from leanconv.images import api
from leanconv.images.borders import runs
from leanconv.options import Border, device_index, filter_numbers, filter_options, integer
from leanconv.problem import FilterProblem
from leanconv.runtime import env, launch
from leanconv.runtime.driver import CudaUnavailableError
from leanconv.runtime.files import folder_of_new, open_regular, whole
from leanconv.runtime.progress import progress
from leanconv.runtime.threads import side_by_side

#: Bytes of a band with the rows that its windows reach: on the CPU it stays in the cache, on a GPU its copies take so
#: long that launches cost nothing. PyTorch rounds page-locked memory up to a power of two. Explored (H200, 16 cores,
#: 13330f9): from an array to another 17 GB/s in bands of 16 MiB, also of 32, and 10 in bands of 8.
HOST_BYTES, GPU_BYTES = 1 << 20, 16 << 20
#: A band has at least so many times the rows that its windows reach beyond it, which are read twice.
LEAST_BAND = 8
#: Lanes at most: each takes memory for a band and its result.
MOST_LANES = 16
#: With up to so many cores, lanes wait for each other to write to a file rather than write through a map: `FileRows`.
#: Explored (2 cores, Linux 6.18, 2eb3032): four threads write a new file 1.4 times as fast if all wait.
FEW = 4

#: ``filter2d`` with all arguments but the image and ``out``.
Filter = Callable[..., Any]


def filter_file(
    source: Any,
    target: Any,
    kernel: Any,
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    separable: bool | None = None,
    device: str | None = None,
    band_rows: int | None = None,
    progress_bar: bool = True,
) -> None:
    """Filter images that need not fit in memory, as `leanconv.filter2d` does, from a .npy file to a .npy file.

    Args:
        source: path of a .npy file, or what has a shape, a dtype and slices that NumPy reads, such as
            an array of h5py or zarr: (..., height, width), or (..., height, width, channels) with ``channels_last``.
        target: path of a .npy file, which appears whole or not at all, or an array of the result's shape and dtype
            whose slices can be assigned, by several threads; must not overlap the source, in memory or in a file.
        kernel: (kh, kw): a list or a NumPy array of any real dtype.
        device: ``"cuda"`` or ``"cuda:1"`` filters on that GPU, through PyTorch's streams; the CPU by default.
        band_rows: rows of a band; by default those of 1 MiB, on a GPU of 16, and no less than eight times the kernel's.
        progress_bar: whether a terminal shows one.
        All else as in `leanconv.filter2d`.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. OSError: a file cannot be read or
            written, becomes shorter while it is read, or the disk has no room for the result. ImportError: a GPU is
            asked for, and PyTorch is missing. CudaUnavailableError: as `leanconv.conv2d`. There is no new file then; a
            target that is an array may have been written in part.

    Up to 16 bands are in memory at a time, one for each core (``LEANCONV_THREADS``), on a GPU two for each.
    Results are those of the whole image, floating-point sums up to rounding: the size of a band decides which kernel
    runs, and on the CPU the order of sums.

    >>> import numpy as np
    >>> image, result = np.arange(5, dtype=np.uint8)[:, None], np.empty((5, 1), np.uint8)
    >>> filter_file(image, result, [[1], [1], [1]], border="replicate", band_rows=2)
    >>> result.ravel().tolist()
    [1, 3, 6, 9, 11]
    """
    x = _opened(source) if isinstance(source, (str, os.PathLike)) else _like_an_array("source", source)
    if not isinstance(target, (str, os.PathLike)):
        _like_an_array("target", target)
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise ValueError("target is read-only")
        if _overlap(x, target):
            raise ValueError("target overlaps source in memory or in a file; the result must go elsewhere")
    requested = filter_options(border, anchor, None, dtype, channels_last)
    kernel = np.asarray(given_kernel(kernel))
    check_weights("kernel", kernel.dtype.name)
    if kernel.ndim != 2:
        raise ValueError(f"kernel has shape {kernel.shape}; it must be one of two dimensions")
    shape, own = tuple(x.shape), one_of("image", np.dtype(x.dtype).name, FILTERS)
    problem, _ = filter_problem(requested, shape, kernel.shape, own)
    result = requested.dtype or own
    filter_numbers(value, delta, own, filter_sum(own, result, kernel.dtype.kind in "biu"), result)
    on_cpu = device is None or str(device) == "cpu"
    if "bfloat16" in (own, result):
        if not on_cpu:
            raise TypeError(f"{own} to {result}: device={device!r} takes no bfloat16; dtype='float32' holds every one")
        if result == "bfloat16" and isinstance(target, (str, os.PathLike)):
            raise TypeError("the result is bfloat16: a .npy file holds none; dtype='float32' holds every one")
        learn_bfloat16()
    index = None if on_cpu else _gpu(device)
    if band_rows is None:
        row = problem.w * problem.channels * max(item_bytes(own), item_bytes(result))
        most = HOST_BYTES if index is None else GPU_BYTES
        band_rows = max(most // max(1, row) - (problem.kh - 1), LEAST_BAND * (problem.kh - 1), 1)
    rows = min(integer("band_rows", band_rows, 1), max(problem.h, 1))
    call = partial(
        api.filter2d, kernel=kernel, border=requested.border, value=value, anchor=problem.anchor, delta=delta,
        dtype=result, channels_last=bool(requested.channels_last), separable=separable,
    )  # fmt: skip
    line = shape[len(shape) - (2 if requested.channels_last else 1) :]
    made = call, (rows + problem.kh - 1, *line), np.dtype(own), np.dtype(result)
    images = product(*map(range, shape[: len(shape) - len(line) - 1])) if all(line) else ()
    bands = [Band(each, top, min(rows, problem.h - top)) for each in images for top in range(0, problem.h, rows)]
    if not bands:
        call(np.empty(shape, own))  # which refuses what no band would
    threads = env.threads()
    count = min(len(bands), threads if index is None else 2 * threads, MOST_LANES)
    with _written(target, shape, np.dtype(result), threads <= FEW) as y, progress(len(bands), progress_bar) as begin:
        make: Callable[[], Lane] = partial(HostLane, *made) if index is None else partial(GpuLane, *made, index)
        lanes: SimpleQueue[Lane | None] = SimpleQueue()
        for _ in range(count):
            lanes.put(None)
        begin("filtering")
        work = [partial(_pass, lanes, make, problem, x, y, band, value) for band in bands]
        side_by_side(work, lambda: begin("filtering"), count)


class Band(NamedTuple):
    """Rows of one image that are filtered at a time."""

    #: which one, by the leading axes
    image: tuple[int, ...]
    top: int
    rows: int


class Lane(Protocol):
    """Memory for a band on its way."""

    #: rows of pixels to be filtered, and those that their windows reach
    pixels: np.ndarray

    def filtered(self, rows: int) -> np.ndarray:
        """So many rows of ``pixels``, filtered; the array is the lane's own."""


class HostLane:
    """On the CPU."""

    def __init__(self, call: Filter, shape: tuple[int, ...], dtype: np.dtype, result: np.dtype) -> None:
        self._call = call
        self.pixels, self._y = np.empty(shape, dtype), np.empty(shape, result)

    def filtered(self, rows: int) -> np.ndarray:
        y: np.ndarray = self._call(self.pixels[:rows], out=self._y[:rows])
        return y


class GpuLane:
    """Through a GPU, on a stream of its own."""

    def __init__(self, call: Filter, shape: tuple[int, ...], dtype: np.dtype, result: np.dtype, index: int) -> None:
        import torch

        self._call, self._cuda = call, torch.cuda
        # a thread that waits for an event sleeps; one that waits for a stream takes its core
        self._stream, self._done = torch.cuda.Stream(index), torch.cuda.Event(blocking=True)
        types = [getattr(torch, each.name) for each in (dtype, result)]
        with torch.cuda.stream(self._stream):
            self._x, self._y = (torch.empty(shape, dtype=each, device=f"cuda:{index}") for each in types)
            # page-locked: copies of other memory would wait
            self._from, self._to = (torch.empty(shape, dtype=each, pin_memory=True) for each in types)
        self.pixels, self._results = self._from.numpy(), self._to.numpy()

    def filtered(self, rows: int) -> np.ndarray:
        with self._cuda.stream(self._stream):
            x, y = self._x[:rows], self._y[:rows]
            x.copy_(self._from[:rows], non_blocking=True)
            self._call(x, out=y)
            self._to[:rows].copy_(y, non_blocking=True)
            self._done.record()
        self._done.synchronize()
        return self._results[:rows]


def _pass(
    lanes: SimpleQueue[Lane | None], make: Callable[[], Lane], problem: FilterProblem, x: Any, y: Any, band: Band,
    value: float,
) -> None:  # fmt: skip
    """One band, from the source to the target.

    ``lanes`` has None for each lane that is not made yet. The band that gets it makes the lane, while others are on
    their way: to lock its pages takes long.
    """
    lane = lanes.get()
    try:
        lane = lane or make()
        before = problem.anchor[0]
        _read(problem, x, band, value, lane.pixels)
        done = lane.filtered(band.rows + problem.kh - 1)
        rows = *band.image, slice(band.top, band.top + band.rows)
        y[rows] = done[before : before + band.rows]
    finally:
        lanes.put(lane)


def _read(problem: FilterProblem, x: Any, band: Band, value: float, pixels: np.ndarray) -> None:
    """The rows of a band and those that its windows reach, by the border where they lie outside."""
    before, end = problem.anchor[0], band.top + band.rows + problem.kh - 1
    for run in runs(problem.border, problem.h, before, problem.kh - 1 - before):
        first, last = max(run.start, band.top), min(run.start + run.length, end)
        if first >= last:
            continue
        into = pixels[first - band.top : last - band.top]
        if run.pixel is None:
            into[...] = value
            continue
        low, count = run.pixel + run.step * (first - run.start), last - first if run.step else 1
        if run.step < 0:
            low, into = low - count + 1, into[::-1]
        rows = *band.image, slice(low, low + count)
        if isinstance(x, FileRows):
            x.read(rows, into)
        else:
            into[...] = x[rows]


class FileRows:
    """Rows of an array in a .npy file, read with preadv, and written with pwrite or through a memory map.

    Through a map the system makes and clears each page of a new file when it is touched first, which takes a core
    longer than pwrite does. But the system lets only one pwrite to a file go on at a time. So a thread that finds
    another one in pwrite writes through the map, unless ``waits``: with few cores pwrite alone is faster.
    """

    def __init__(self, file: BinaryIO, mapped: np.memmap, waits: bool = False) -> None:
        self.shape, self.dtype = mapped.shape, mapped.dtype
        self._file, self._map, self._waits, self._writing = file, mapped, waits, threading.Lock()
        weakref.finalize(self, file.close)

    def read(self, rows: tuple[Any, ...], into: np.ndarray) -> None:
        """Read rows of one image into as many rows, or one row into all. Raises OSError where the file has become
        shorter."""
        shape = (rows[-1].stop - rows[-1].start, *into.shape[1:])
        # False for rows that a border repeats or reverses, and for another byte order
        straight = into.shape == shape and into.flags.c_contiguous and into.dtype == self.dtype
        part = into if straight else np.empty(shape, self.dtype)
        place, memory = self._place(rows), _bytes(part)
        while memory:
            count = os.preadv(self._file.fileno(), [memory], place)
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was read", str(self._map.filename))
            place, memory = place + count, memory[count:]
        if not straight:
            into[...] = part

    def __setitem__(self, rows: tuple[Any, ...], given: np.ndarray) -> None:
        if not self._writing.acquire(blocking=self._waits):
            self._populate(rows)
            self._map[rows] = given
            return
        try:
            place, memory = self._place(rows), _bytes(np.ascontiguousarray(given))
            while memory:
                count = os.pwrite(self._file.fileno(), memory, place)
                place, memory = place + count, memory[count:]
        finally:
            self._writing.release()

    def _place(self, rows: tuple[Any, ...]) -> int:
        """Where rows of an image begin in the file."""
        return self._map.offset + sum(
            at * step for at, step in zip((*rows[:-1], rows[-1].start), self._map.strides, strict=False)
        )

    def _populate(self, rows: tuple[Any, ...]) -> None:
        """Have the system make the pages together. Raises OSError on a full disk, where a store ends the process."""
        part = self._map[rows]
        before = part.ctypes.data % mmap.PAGESIZE
        # NOTE: mmap's own madvise keeps Python's lock, and all other lanes wait
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        start, size = ctypes.c_void_p(part.ctypes.data - before), ctypes.c_size_t(part.nbytes + before)
        if madvise(start, size, _POPULATE_WRITE) and ctypes.get_errno() == errno.EFAULT:  # EINVAL: before Linux 5.14
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


#: Of Linux; Python has no name for it.
_POPULATE_WRITE = 23


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _opened(path: Any) -> FileRows | np.ndarray:
    """An array in a .npy file; a map of it in Fortran's order, or where the system has no preadv."""
    file = open_regular(path)
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except BaseException as error:
        file.close()
        if isinstance(error, ValueError):
            raise ValueError(f"{path} is no .npy file of numbers: {error}") from None
        raise
    if mapped.flags.c_contiguous and hasattr(os, "preadv"):
        return FileRows(file, mapped)
    file.close()
    return mapped


def _like_an_array(name: str, given: Any) -> Any:
    """What the caller calls ``name``. Raises TypeError unless NumPy reads its slices, and they hold all that counts."""
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        raise TypeError(f"{name} is of type {type(given).__qualname__}; give a path, or an array")
    arrays = arrays_of(given)
    if arrays is NUMPY:
        arrays.refuse_without_memory(given, name)
    elif arrays is not None:
        raise TypeError(
            f"{name} is an array of {arrays.name}; give one of NumPy, which may share its memory, or a path"
        )
    else:
        try:
            np.dtype(given.dtype)
        except TypeError:
            raise TypeError(f"{name} has dtype {given.dtype}, which is none of NumPy; give an array of NumPy") from None
    return given


def _overlap(x: Any, target: Any) -> bool:
    """Whether what is written to ``target`` may change ``x``."""
    if x is target:
        return True
    if isinstance(x, np.ndarray) and isinstance(target, np.ndarray) and np.may_share_memory(x, target):
        return True
    read, written = _in_file(x), _in_file(target)
    if read is None or written is None or read.end <= written.begin or written.end <= read.begin:
        return False
    try:
        return os.path.samefile(read.path, written.path)
    except OSError:  # one has been removed
        return read.path == written.path


class InFile(NamedTuple):
    """Bytes of a file."""

    path: str
    begin: int
    end: int


def _in_file(array: Any) -> InFile | None:
    """The bytes of a file that an array is a map of, or a part of one."""
    array = array._map if isinstance(array, FileRows) else array
    if not isinstance(array, np.ndarray) or not array.size:
        return None
    mapped: np.memmap | None = None
    base: Any = array
    while isinstance(base, np.ndarray):
        # the offset of the whole map alone is that of its first element
        mapped, base = base if isinstance(base, np.memmap) else mapped, base.base
    if mapped is None or mapped.filename is None:
        return None
    first = mapped.offset + array.ctypes.data - mapped.ctypes.data
    reach = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    end = first + sum(max(each, 0) for each in reach) + array.itemsize
    return InFile(str(mapped.filename), first + sum(min(each, 0) for each in reach), end)


@contextmanager
def _written(target: Any, shape: tuple[int, ...], dtype: np.dtype, waits: bool) -> Iterator[Any]:
    """The array to write to; a file takes its place once it is whole."""
    if not isinstance(target, (str, os.PathLike)):
        if tuple(target.shape) != shape or target.dtype != dtype:
            raise ValueError(f"target has shape {target.shape} and {target.dtype}; the result has {shape} and {dtype}")
        yield target
        return
    room, needed = shutil.disk_usage(folder_of_new(Path(target))).free, dtype.itemsize * math.prod(shape)
    if room < needed:
        raise OSError(errno.ENOSPC, f"the result has {needed} bytes, and the disk has room for {room}", str(target))
    with whole(Path(target)) as file:
        mapped = np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
        with open(file, "r+b", buffering=0) as opened:
            yield FileRows(opened, mapped, waits) if sys.platform == "linux" else mapped
            mapped.flush()


def _gpu(device: object) -> int:
    """The number of a GPU that PyTorch can use. Raises CudaUnavailableError where there is none."""
    index = device_index(device)
    launch.open_device(index)
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"device={device!r} takes PyTorch's streams: pip install 'leanconv[torch]'") from error
    if not torch.cuda.is_available():
        raise CudaUnavailableError(f"device={device!r}: this PyTorch ({torch.__version__}) finds no GPU")
    return index
