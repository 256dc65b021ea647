"""Filters that are too large for a kernel, by Fourier transforms of the array's library: cuFFT, for arrays on a GPU.

An image is extended by its border, transformed, multiplied by the filter's spectrum, and transformed back. That takes
memory from the library's allocator: some five times that of the extended image, in the type of the transforms, and no
more than LEANCONV_WORKSPACE_LIMIT.
"""

from __future__ import annotations

import importlib
from typing import Any

from leanconv.arrays import Arrays
from leanconv.cpu.lines import line_indices
from leanconv.dtypes import DTYPES, is_integer, item_bytes
from leanconv.options import limit_of
from leanconv.problem import FilterProblem

#: Types that are transformed in float32: they are rounded by more than its error, or have no sign, so that an error
#: relative to the sum of the sizes is one relative to the result.
_IN_FLOAT32 = ("uint8", "uint16", "float16", "bfloat16")


def why_not(arrays: Arrays, problem: FilterProblem) -> str | None:
    """Why transforms cannot filter: a sentence, or None."""
    if arrays.name not in ("CuPy", "PyTorch", "NumPy"):
        return f"arrays of {arrays.name} have no transforms"
    if problem.reduction is not None or problem.is_volume or problem.per_image:
        return "transforms are for filters of images, and each for all images"
    if problem.sums == "int32":
        return "sums in int32 wrap around"
    limit, needed = limit_of(None), memory(problem)
    if limit is not None and needed > limit:
        return f"they take some {needed} bytes of memory, and LEANCONV_WORKSPACE_LIMIT is {limit}"
    return None


def memory(problem: FilterProblem) -> int:
    """Bytes that transforms take: of an extended image, its spectrum, a product and its sums; and of the filters."""
    rows, columns = _sizes(problem)
    return (4 + problem.filters) * rows * columns * item_bytes(_kind(problem))


def _kind(problem: FilterProblem) -> str:
    """The type of the transforms."""
    return "float32" if problem.dtype in _IN_FLOAT32 and problem.sums == "float32" else "float64"


def _sizes(problem: FilterProblem) -> tuple[int, int]:
    """Rows and columns of the transforms."""
    more = (0, 0) if problem.valid else (problem.kh - 1, problem.kw - 1)
    return _fast_length(problem.h + more[0]), _fast_length(problem.w + more[1])


def correlate(
    arrays: Arrays, problem: FilterProblem, x: Any, w: Any, value: float, delta: float, device: int | None
) -> Any:
    """The correlation of images x (batch, h, w) or (batch, h, w, channels) with the filters, or products, ``w``.

    The result is new, of shape ``problem.y_shape``. Errors are relative to the sum of the sizes of what is multiplied,
    in float64 unless the image is of 8 or 16 bits; an Inf or a NaN reaches the whole image.
    """
    fft = importlib.import_module({"CuPy": "cupy.fft", "PyTorch": "torch.fft", "NumPy": "numpy.fft"}[arrays.name])
    kind, sizes = _kind(problem), _sizes(problem)
    spectra = _spectra(arrays, fft, problem, w, sizes, kind, device)
    out_h, out_w = problem.out_h, problem.out_w
    y = arrays.empty(problem.y_shape, problem.result, device)
    x = x.reshape(problem.batch, problem.h, problem.w, problem.channels)
    results = y.reshape(problem.batch, problem.filters, out_h, out_w, problem.channels)
    for image in range(problem.batch):
        for channel in range(problem.channels):
            extended = _extended(arrays, problem, arrays.cast(x[image, ..., channel], kind), value, device)
            transformed = fft.rfft2(extended, s=sizes)
            for number, spectrum in enumerate(spectra):
                product = transformed * spectrum
                sums = fft.irfft2(product, s=sizes)[:out_h, :out_w] + delta
                arrays.assign(results[image, number, ..., channel], _rounded(arrays, sums, problem))
    return y


def _spectra(
    arrays: Arrays, fft: Any, problem: FilterProblem, w: Any, sizes: tuple[int, int], kind: str, device: int | None
) -> list[Any]:
    """The conjugate spectrum of each filter."""
    w = arrays.cast(w, kind)
    if not problem.rank:
        w = w.reshape(problem.filters, problem.kh, problem.kw)
        return [fft.rfft2(each, s=sizes).conj() for each in w]
    columns = fft.fft(w[:, : problem.kh], n=sizes[0]).conj()
    rows = fft.rfft(w[:, problem.kh :], n=sizes[1]).conj()
    return [sum(column[:, None] * row for column, row in zip(columns, rows, strict=True))]


def _extended(arrays: Arrays, problem: FilterProblem, x: Any, value: float, device: int | None) -> Any:
    """An image with the pixels that stand for those outside."""
    if problem.valid:
        return x
    (ay, ax), border = problem.anchor, problem.border
    lines = [
        line_indices(border, size, before, taps - 1 - before)
        for size, before, taps in ((problem.h, ay, problem.kh), (problem.w, ax, problem.kw))
    ]
    rows, columns = (arrays.from_numpy(line.clip(0), device) for line in lines)
    extended = x[rows][:, columns]
    if border == "constant":
        extended[:ay] = value
        extended[ay + problem.h :] = value
        extended[:, :ax] = value
        extended[:, ax + problem.w :] = value
    return extended


def _rounded(arrays: Arrays, sums: Any, problem: FilterProblem) -> Any:
    if is_integer(problem.result):
        kind = DTYPES[problem.result]
        sums = sums.round().clip(kind.low, kind.high)
    return arrays.cast(sums, problem.result)


def _fast_length(least: int) -> int:
    """The next even length that has no prime factor above 7: for these transforms are fast."""
    length = least + least % 2
    while True:
        rest = length
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 2
