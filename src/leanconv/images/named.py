"""The filters that people know by name: each is a kernel that is made here, and runs whole or as products of a column
and a row, whichever takes less time.

Semantics and kernels are OpenCV's. Its (x, y) order is kept where its names are (``kernel_x, kernel_y``, ``dx, dy``);
sizes, anchors and pairs are (rows, columns), as everywhere in this library.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Literal, TypeVar

import numpy as np

from leanconv.arrays import arrays_of
from leanconv.call.as_before import as_before
from leanconv.images.api import run, sums_of
from leanconv.images.filters import gaussian_line
from leanconv.images.separable import balanced, worth_it
from leanconv.options import Border, FilterOptions, filter_options, integer, number, pair
from leanconv.runtime.bounded_cache import BoundedCache

Array = TypeVar("Array")
Mode = Literal["same", "valid"]
#: Columns and rows whose products, added up, are the kernel.
Products = Sequence[tuple[np.ndarray, np.ndarray]]


@as_before
def sep_filter2d(
    image: Array,
    kernel_x: Any,
    kernel_y: Any,
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Correlate each row with ``kernel_x`` and each column with ``kernel_y``, as ``cv2.sepFilter2D`` does.

    ``y[i,j] = delta + sum over u,v of kernel_y[u] * kernel_x[v] * image[i + u - anchor_y, j + v - anchor_x]``: one pass
    over the image, with kh + kw multiplications a pixel, and no rounding in between.

    Args:
        image: as in `filter2d`.
        kernel_x, kernel_y: weights along a row and down a column: lists, or one-dimensional arrays of real numbers; of
            sums in int32 up to 289 each on an H200, whose shared memory holds the rows that they reach.
        border, value, anchor, delta, dtype, channels_last, mode, out, device: as in `filter2d`.

    Returns:
        Array as `filter2d` returns it.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    >>> image = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> sep_filter2d(image, [1, 0, -1], [1], border="replicate").tolist()
    [[-1.0, -2.0, -1.0], [-1.0, -2.0, -1.0]]
    """
    factors = [(_line("kernel_y", kernel_y), _line("kernel_x", kernel_x))]
    requested = filter_options(border, anchor, device, dtype, channels_last, mode)
    return run_products(image, factors, requested, value, delta, out)


@as_before
def gaussian_blur(
    image: Array,
    sigma: float | Sequence[float] | None = None,
    *,
    size: int | Sequence[int] | None = None,
    border: Border = "reflect101",
    value: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Blur with a bell, as ``cv2.GaussianBlur`` does: weights ∝ ``exp(-(v-m)² / (2 sigma²))`` that sum to 1.

    Args:
        image: as in `filter2d`.
        sigma: of the bell, in pixels, or (vertical, horizontal). Without it it is that of ``size``, as in
            `leanconv.filters.gaussian`.
        size: weights of the bell, odd, or (rows, columns). Without it it reaches 4 sigma to either side, 3 for an image
            of uint8, as in OpenCV.
        border, value, dtype, channels_last, mode, out, device: as in `filter2d`.

    Returns:
        Array as `filter2d` returns it.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    >>> image = np.zeros((1, 5), np.float32)
    >>> image[0, 2] = 16
    >>> gaussian_blur(image, size=3, border="constant").tolist()
    [[0.0, 2.0, 4.0, 2.0, 0.0]]
    """
    lines = _bells(image, sigma, size)
    requested = filter_options(border, None, device, dtype, channels_last, mode)
    return run_products(image, [lines], requested, value, 0, out)


@as_before
def sobel(
    image: Array,
    dx: int,
    dy: int,
    *,
    size: int = 3,
    scale: float = 1,
    delta: float = 0,
    border: Border = "reflect101",
    value: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """A derivative of the image, smoothed across, as ``cv2.Sobel``: ``dx`` times along rows, ``dy`` times down columns.

    Args:
        image: as in `filter2d`.
        dx, dy: the order of the derivative along each axis, below the size of the kernel there; not both 0.
        size: of the kernel: 1, 3, 5, ... 31. With 1 it is 3 along the derivative, and nothing is smoothed.
        scale: a factor of the result.
        delta, border, value, dtype, channels_last, mode, out, device: as in `filter2d`. A derivative has a sign: of
            uint8 it saturates at 0, and ``dtype="int16"`` holds all of it.

    Returns:
        Array as `filter2d` returns it.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. CudaUnavailableError: see `conv2d`.

    >>> sobel(np.array([[0, 10, 30]], np.uint8), 1, 0, border="replicate", dtype="int16").tolist()
    [[40, 120, 80]]
    """
    factors = _derivative(integer("dx", dx, 0), integer("dy", dy, 0), _odd("size", size, 31))
    requested = filter_options(border, None, device, dtype, channels_last, mode)
    return run_products(image, _scaled(factors, scale), requested, value, delta, out)


@as_before
def scharr(
    image: Array,
    dx: int,
    dy: int,
    *,
    scale: float = 1,
    delta: float = 0,
    border: Border = "reflect101",
    value: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The slope along rows (``dx=1, dy=0``) or down columns (0, 1), smoothed by [3, 10, 3], as ``cv2.Scharr``.

    Arguments, result and errors as `sobel`.

    >>> scharr(np.array([[0, 10, 30]], np.float32), 1, 0, border="replicate").tolist()
    [[160.0, 480.0, 320.0]]
    """
    requested = filter_options(border, None, device, dtype, channels_last, mode)
    return run_products(image, _scaled(_slope(dx, dy, (3, 10, 3)), scale), requested, value, delta, out)


@as_before
def prewitt(
    image: Array,
    dx: int,
    dy: int,
    *,
    scale: float = 1,
    delta: float = 0,
    border: Border = "reflect101",
    value: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The slope along rows (``dx=1, dy=0``) or down columns (0, 1), added up over three lines, as SciPy's ``prewitt``.

    Arguments, result and errors as `sobel`.

    >>> prewitt(np.array([[0, 10, 30]], np.float32), 1, 0, border="replicate").tolist()
    [[30.0, 90.0, 60.0]]
    """
    requested = filter_options(border, None, device, dtype, channels_last, mode)
    return run_products(image, _scaled(_slope(dx, dy, (1, 1, 1)), scale), requested, value, delta, out)


@as_before
def laplacian(
    image: Array,
    *,
    size: int = 1,
    scale: float = 1,
    delta: float = 0,
    border: Border = "reflect101",
    value: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """The sum of the second derivatives along rows and columns, as ``cv2.Laplacian``.

    Args:
        size: 1: the four neighbours less four times the pixel. 3, 5, ... 31: Sobel's second derivatives of that size,
            of 3 without its smoothing along the edges: [[2, 0, 2], [0, -8, 0], [2, 0, 2]].
        image, scale, delta, border, value, dtype, channels_last, mode, out, device: as in `sobel`.

    Returns, raises: as `sobel`.

    >>> laplacian(np.array([[0, 0, 1, 0, 0]], np.float32), border="constant").tolist()
    [[0.0, 1.0, -4.0, 1.0, 0.0]]
    """
    requested = filter_options(border, None, device, dtype, channels_last, mode)
    factors = _second_derivatives(_odd("size", size, 31))
    return run_products(image, _scaled(factors, scale), requested, value, delta, out)


def unsharp_mask(
    image: Array,
    sigma: float | Sequence[float] | None = None,
    *,
    amount: float = 1,
    size: int | Sequence[int] | None = None,
    border: Border = "reflect101",
    value: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Mode = "same",
    out: Any = None,
    device: str | None = None,
) -> Array:
    """Sharpen: ``image + amount * (image - gaussian_blur(image))``, in one pass, rounded once.

    Args:
        amount: how much of the difference is added; 0 leaves a finite image as it is.
        image, sigma, size, border, value, dtype, channels_last, mode, out, device: as in `gaussian_blur`.

    Returns, raises: as `gaussian_blur`.

    >>> unsharp_mask(np.array([[0, 0, 4, 4]], np.float32), size=3, border="replicate").tolist()
    [[0.0, -1.0, 5.0, 4.0]]
    """
    column, row = _bells(image, sigma, size)
    times = number("amount", amount)
    if not np.isfinite(times):
        raise ValueError(f"amount={amount!r} must be a finite number")
    ones = [np.zeros(len(line)) for line in (column, row)]
    for line in ones:
        line[len(line) // 2] = 1
    factors = [(column * -times, row), (ones[0] * (1 + times), ones[1])]
    requested = filter_options(border, None, device, dtype, channels_last, mode)
    return run_products(image, factors, requested, value, 0, out)


def run_products(image: Any, factors: Products, requested: FilterOptions, value: Any, delta: Any, out: Any) -> Any:
    """Filter with a sum of products, given whole where that takes less time."""
    whole = all(line.dtype.kind in "iu" for product in factors for line in product)
    sums = sums_of(requested, image, out, whole)
    cpu = runs_on_cpu(image, requested.device)
    key = cpu, sums, *((line.dtype, line.tobytes()) for product in factors for line in product)
    kept = _kernels.get(key) or _kernels.recall(key)
    if kept is None:
        with np.errstate(over="ignore", invalid="ignore"):  # weights beyond the type of the sums are Inf
            kept = _kernel(factors, sums, cpu)
        _kernels.keep(key, kept)
    kernel, window = kept
    return run(requested if window is None else requested._replace(window=window), image, kernel, value, delta, out)


#: What `run_products` filters with, and the rows and columns of the window where that is not whole.
_kernels: BoundedCache[Hashable, tuple[np.ndarray, tuple[int, int] | None]] = BoundedCache(256)


def _kernel(factors: Products, sums: str, cpu: bool) -> tuple[np.ndarray, tuple[int, int] | None]:
    # products of integers wrap around, as their sums do, where these are integers too
    kind = np.int64 if sums == "int32" else np.float64
    factors = [(column.astype(kind), row.astype(kind)) for column, row in factors]
    (column, row), *_ = factors
    kh, kw = len(column), len(row)
    split = worth_it(len(factors), kh, kw) or (cpu and len(factors) * (kh + kw + 2) < kh * kw)
    if split:
        kernel = np.stack([np.concatenate(each) for each in factors])
        kernel = kernel if sums == "int32" else balanced(kernel, kh)
    else:
        kernel = sum(np.multiply.outer(*each) for each in factors)  # type: ignore[assignment]
    kernel = kernel.astype(sums)
    kernel.flags.writeable = False
    return kernel, (kh, kw) if split else None


def runs_on_cpu(image: Any, device: Any) -> bool:
    """Whether a filter of ``image`` is computed on the CPU."""
    arrays = arrays_of(image)
    on_cpu = device is None or (isinstance(device, str) and device == "cpu")
    return arrays is not None and on_cpu and arrays.device(image) is None


def _line(name: str, weights: Any) -> np.ndarray:
    """One-dimensional weights on the host, as integers or float64."""
    try:
        shape = np.shape(weights)
    except ValueError as error:
        raise ValueError(f"{name} is a list whose elements are not alike: {error}") from None
    if prod(shape) > MOST:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must have at most {MOST} weights")
    arrays = arrays_of(weights)
    if arrays is not None:
        arrays.refuse_without_memory(weights, name)
    line = np.asarray(weights) if arrays is None else arrays.to_numpy(weights)
    if line.ndim == 2 and 1 in line.shape:
        line = line.ravel()  # as cv2.getGaussianKernel returns them
    if line.ndim != 1 or not line.size:
        raise ValueError(f"{name} has shape {line.shape}; it must have one dimension, and not be empty")
    if line.dtype.kind not in "biuf" and line.dtype.name != "bfloat16":
        raise TypeError(f"{name} has dtype {line.dtype}; it must hold real numbers")
    wide = {"b": np.int64, "i": np.int64, "u": np.uint64}
    return line.astype(wide.get(line.dtype.kind, np.float64))


def _odd(name: str, value: object, most: int) -> int:
    size = integer(name, value, 1, most)
    if size % 2 == 0:
        raise ValueError(f"{name}={value!r} must be odd")
    return size


def _bells(image: Any, sigma: Any, size: Any) -> tuple[np.ndarray, np.ndarray]:
    """The column and the row of a Gaussian."""
    if sigma is None and size is None:
        raise ValueError("sigma=None and size=None: give one of them, or both")
    sigma = sigma.tolist() if isinstance(sigma, np.ndarray) else sigma
    both = list(sigma) if isinstance(sigma, (tuple, list)) else [sigma, sigma]
    if len(both) != 2:
        raise ValueError(f"sigma={sigma!r} must be a number or two: (vertical, horizontal)")
    if size is not None:
        sizes = [_odd("size", each, MOST) for each in pair("size", size, 1, "two: (rows, columns)")]
    else:
        for each in both:
            if not 0 < number("sigma", each) < np.inf:
                raise ValueError(f"sigma={sigma!r} must be a positive, finite number of pixels")
        arrays = arrays_of(image)
        reach = 3 if arrays is not None and arrays.dtype(image) == "uint8" else 4
        if max(both) > MOST / (2 * reach) - 1:
            raise ValueError(f"sigma={sigma!r} reaches over more than {MOST} pixels; give size= too, or a smaller one")
        sizes = [round(2 * reach * float(each) + 1) | 1 for each in both]
    column, row = (_bell(each, None if s is None else number("sigma", s)) for each, s in zip(sizes, both, strict=True))
    return column, row


#: Most rows and columns of a window: more are a slip of the finger, and gigabytes.
MOST = 2**20


@lru_cache(maxsize=64)
def _bell(size: int, sigma: float | None) -> np.ndarray:
    return gaussian_line(size, sigma)


def _binomial(size: int, order: int) -> np.ndarray:
    """``order`` differences of neighbours and ``size - 1 - order`` sums of them, one after the other."""
    line = np.ones(1, np.int64)
    for k in range(size - 1):
        line = np.convolve(line, (-1, 1) if k < order else (1, 1))
    return line


@lru_cache(maxsize=64)
def _derivative(dx: int, dy: int, size: int) -> Products:
    """OpenCV's kernels of a derivative."""
    if not dx and not dy:
        raise ValueError("dx=0 and dy=0: a derivative has an order of 1 at least along one axis")
    # along a derivative 1 means 3, as in OpenCV
    column, row = ((3 if size == 1 and order else size) for order in (dy, dx))
    for name, order, taps in (("dx", dx, row), ("dy", dy, column)):
        if order >= taps > 1 or (taps == 1 and order):
            means = f", which means {taps} along a derivative" if taps != size else ""
            raise ValueError(f"{name}={order} must be below size={size}{means}")
    return ((_binomial(column, dy), _binomial(row, dx)),)


def _slope(dx: Any, dy: Any, across: tuple[int, int, int]) -> Products:
    orders = integer("dx", dx, 0), integer("dy", dy, 0)
    if sum(orders) != 1:
        raise ValueError(f"dx={dx!r} and dy={dy!r} must be 1 and 0, or 0 and 1")
    along, smooth = np.array((-1, 0, 1)), np.array(across)
    return ((smooth, along),) if orders[0] else ((along, smooth),)


@lru_cache(maxsize=16)
def _second_derivatives(size: int) -> Products:
    """OpenCV's kernels of the Laplacian."""
    if size == 3:
        corners, middle = np.array((2, 0, 2)), np.array((0, 8, 0))
        return (corners, np.array((1, 0, 1))), (-middle, np.array((0, 1, 0)))
    bend = _binomial(max(size, 3), 2)
    smooth = np.array((0, 1, 0)) if size == 1 else _binomial(size, 0)
    return (smooth, bend), (bend, smooth)


def _scaled(factors: Products, scale: Any) -> Products:
    """The products times ``scale``; as integers where it is 1."""
    times = number("scale", scale)
    if not np.isfinite(times):
        raise ValueError(f"scale={scale!r} must be a finite number")
    with np.errstate(over="ignore"):
        return factors if times == 1 else tuple((column * times, row * 1.0) for column, row in factors)
