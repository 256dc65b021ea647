"""Image filters of dask arrays: lazy, chunk by chunk, as those of the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from leanconv.arrays import NUMPY, arrays_of
from leanconv.arrays.numpy import learn_bfloat16
from leanconv.call.resolve import filter_problem
from leanconv.call.weights import given_kernel
from leanconv.dtypes import FILTERS, check_weights, filter_sum, one_of
from leanconv.images import api
from leanconv.options import Border, device_index, filter_numbers, filter_options
from leanconv.problem import FilterProblem

try:
    import dask.array as da
except ImportError as error:
    raise ImportError("leanconv.dask needs dask: pip install 'leanconv[dask]'") from error

__all__ = ["filter2d"]


def filter2d(
    image: Any,
    kernel: Any,
    *,
    border: Border = "reflect101",
    value: float = 0,
    anchor: Sequence[int] | None = None,
    delta: float = 0,
    dtype: Any = None,
    channels_last: bool | None = None,
    mode: Literal["same", "valid"] = "same",
    separable: bool | None = None,
    device: str | None = None,
) -> Any:
    """Correlate images in a dask array with a small kernel, as `leanconv.filter2d`; nothing is computed yet.

    Args:
        image: dask array (..., height, width), or (..., height, width, channels) with ``channels_last=True``, in any
            chunks, of NumPy arrays or CuPy's.
        kernel: (kh, kw), or (f, kh, kw), each of which takes a pass of its own. A list, or an array of NumPy or of the
            chunks' library; not lazy.
        device: ``"cuda"`` or ``"cuda:1"`` runs chunks of NumPy arrays on that GPU.
        All else as in `leanconv.filter2d`; the border is that of the whole image.

    Returns:
        Lazy dask array of the shape and type that `leanconv.filter2d` returns. Its chunks are those of the image, but
        neighbours are joined where one has not more rows or columns than the kernel reaches into it.

    Raises:
        ValueError, TypeError: an argument breaks a rule, which the message names. Whether a kernel is a sum of
            products, which ``separable=True`` demands, is asked when chunks are computed.

    Sums of whole numbers are bit for bit those of the whole image, unless transforms make them, or several products of
    a column and a row. Others are equal up to rounding: the size of a chunk decides which kernel runs, and on the CPU
    the order of sums.

    >>> import dask.array
    >>> image = dask.array.arange(8, chunks=3, dtype="float32")[None]
    >>> filter2d(image, [[1, 1, 1]], border="wrap").compute().tolist()
    [[8.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 13.0]]
    """
    if not isinstance(image, da.Array):
        raise TypeError(
            f"image is of type {type(image).__qualname__}; leanconv.dask takes arrays of dask, leanconv.filter2d others"
        )
    if isinstance(kernel, da.Array):
        raise TypeError("kernel is an array of dask; every chunk needs the whole of it: give kernel.compute()")
    requested = filter_options(border, anchor, None, dtype, channels_last, mode)
    if device is not None and str(device) != "cpu":
        device_index(device)
    if np.isnan(image.shape).any():
        raise ValueError(f"image has shape {image.shape}: give it known chunks, as image.compute_chunk_sizes() does")
    kernel = given_kernel(kernel)
    kernel = np.asarray(kernel) if arrays_of(kernel) is None else kernel
    weights = str(kernel.dtype)
    check_weights("kernel", weights)
    own = one_of("image", image.dtype.name, FILTERS)
    result = requested.dtype or own
    sizes = image.shape, tuple(kernel.shape), own
    problem, _ = filter_problem(requested._replace(valid=False), *sizes)
    _, shape = filter_problem(requested, *sizes)
    filter_numbers(value, delta, own, filter_sum(own, result, weights.startswith(("bool", "int", "uint"))), result)

    if result == "bfloat16" and arrays_of(image._meta) is NUMPY:
        learn_bfloat16()
    meta = image._meta.astype(result)
    rows = image.ndim - (3 if requested.channels_last else 2)
    image, depth, boundary = _halo(image, rows, problem)

    def same(weights: Any) -> Any:
        one = partial(
            api.filter2d, kernel=weights, border=requested.border, value=value, anchor=problem.anchor, delta=delta,
            dtype=result, channels_last=bool(requested.channels_last), separable=separable, device=device,
        )  # fmt: skip
        return da.map_overlap(
            one, image, depth=depth, boundary=boundary, meta=meta, dtype=meta.dtype, allow_rechunk=False
        )

    several = kernel.ndim == 3
    y = da.stack([same(weights) for weights in kernel], rows) if several else same(kernel)
    if not requested.valid:
        return y
    (top, left), (h, w) = problem.anchor, shape[rows + several :][:2]
    inside = *(slice(None),) * (rows + several), slice(top, top + h), slice(left, left + w)
    return y[inside]


def _halo(image: Any, rows: int, problem: FilterProblem) -> tuple[Any, dict[int, Any], dict[int, str]]:
    """The image in chunks that are large enough; for `map_overlap` by axis how far windows reach, and what is there."""
    depth: dict[int, Any] = {}
    boundary: dict[int, str] = {}
    for axis, taps, before in zip((rows, rows + 1), (problem.kh, problem.kw), problem.anchor, strict=True):
        after = taps - 1 - before
        # a border mirrors pixels of its own chunk
        image = image.rechunk({axis: joined(image.chunks[axis], max(before, after) + 1)})
        if image.numblocks[axis] == 1:
            continue
        # dask takes two depths only where it adds nothing at the ends; for the chunks there filter2d's border is right
        wraps = problem.border == "wrap"
        depth[axis] = max(before, after) if wraps else (before, after)
        boundary[axis] = "periodic" if wraps else "none"
    return image, depth, boundary


def joined(chunks: Sequence[int], least: int) -> tuple[int, ...]:
    """Lengths of chunks with neighbours joined, until each has at least so many pixels or it is the only one.

    >>> joined((5, 1, 4, 2), 3)
    (6, 6)
    """
    found: list[int] = []
    for length in chunks:
        if found and min(found[-1], length) < least:
            found[-1] += length
        else:
            found.append(length)
    return tuple(found)
