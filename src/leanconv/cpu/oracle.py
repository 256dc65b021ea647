"""What is right: direct convolution and filtering in float64, and how large an error each precision level allows.

Written for clarity first: one loop over the filter taps, each tap a strided view. It shares no code with the algorithms
that are checked against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from leanconv.dtypes import DTYPES, is_integer, is_narrow
from leanconv.problem import ConvProblem, FilterProblem

#: Unit roundoff of float32: the largest relative error of one rounding.
FLOAT32_UNIT = DTYPES["float32"].roundoff
#: Errors that the two loose levels allow. TF32 keeps 10 bits of the operands.
RELAXED_BOUND = 1e-4
TF32_BOUND = 2e-3


def conv2d(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Direct convolution, or a gradient of it, in float64; of images, which are volumes of one slice, and of volumes.

    ``x`` and ``w`` are the two arrays that ``problem``'s operation reads, in its layout, and so is the float64 result.
    """
    return _summed(problem, x, w, bias, np.dtype(np.float64))


def sequential_float32(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """The plainest float32 convolution: products summed one after another in the order c, t, r, s, each rounded.

    It is the yardstick of ``"fp32"``, not a way to compute: C·T·R·S passes over the whole output. A gradient sums in
    the order k, t, r, s, that of the filters in the order n, z, p, q.
    """
    return _summed(problem, x, w, bias, np.dtype(np.float32))


def _summed(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
    """The result in ``dtype``; in float32 by one channel, or filter, after the other."""
    if problem.op == "wgrad":
        return _filter_gradient(problem, x, w, dtype)
    summed = problem.group_k if problem.op == "dgrad" else problem.group_c
    way = _input_gradient if problem.op == "dgrad" else _forward
    return way(problem, x, w, bias, dtype, 1 if dtype == np.float32 else summed)


def _forward(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, dtype: np.dtype, channels_at_once: int
) -> np.ndarray:
    x, w = _ncdhw(problem, x, dtype), _ncdhw(problem, w, dtype)
    y = np.zeros((problem.n, problem.groups, problem.group_k, problem.z, problem.p, problem.q), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for n in range(problem.n):
            image = _padded(problem, x[n])
            for c in range(0, problem.group_c, channels_at_once):
                some = slice(c, c + channels_at_once)
                for t, r, s in _taps(problem):
                    weights = w[:, some, t, r, s].reshape(problem.groups, problem.group_k, -1)
                    seen = _seen(problem, image, t, r, s).reshape(problem.groups, problem.group_c, -1)
                    y[n] += (weights @ seen[:, some]).reshape(y.shape[1:])
        return _finish(problem, y.reshape(problem.n, problem.k, problem.z, problem.p, problem.q), bias)


def _input_gradient(
    problem: ConvProblem,
    grad: np.ndarray,
    w: np.ndarray,
    bias: np.ndarray | None,
    dtype: np.dtype,
    filters_at_once: int,
) -> np.ndarray:
    """What each output passes back to the pixels that its window covered, added up in place, some filters at a time."""
    grad, w = _ncdhw(problem, grad, dtype), _ncdhw(problem, w, dtype)
    grouped = w.reshape(problem.groups, problem.group_k, *w.shape[1:])
    image = np.zeros((problem.c, problem.d, problem.h, problem.w), dtype)
    result = np.zeros((problem.n, *image.shape), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for n in range(problem.n):
            padded = _padded(problem, image)
            passed = grad[n].reshape(problem.groups, problem.group_k, -1)
            for k in range(0, problem.group_k, filters_at_once):
                some = slice(k, k + filters_at_once)
                for t, r, s in _taps(problem):
                    seen = _seen(problem, padded, t, r, s)
                    seen += (grouped[:, some, :, t, r, s].transpose(0, 2, 1) @ passed[:, some]).reshape(seen.shape)
            # Negative padding leaves out pixels, which no window covers: their gradient is zero.
            inside, kept = _inside(problem, image.shape, padded.shape)
            result[n][inside] = padded[kept]
    return _finish(problem, result, bias)


def _filter_gradient(problem: ConvProblem, x: np.ndarray, grad: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What all outputs pass back to each weight: for every tap a product of what it read and the outputs' gradients.

    In float32 each weight's sum is over images, slices, rows and columns in this order, one product after the other.
    """
    x, grad = _ncdhw(problem, x, dtype), _ncdhw(problem, grad, dtype)
    result = np.zeros((problem.groups, problem.group_k, problem.group_c, problem.t, problem.r, problem.s), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for n in range(problem.n):
            image = _padded(problem, x[n])
            passed = grad[n].reshape(problem.groups, problem.group_k, -1)
            for t, r, s in _taps(problem):
                seen = _seen(problem, image, t, r, s).reshape(problem.groups, problem.group_c, -1)
                if dtype == np.float64:
                    result[..., t, r, s] += passed @ seen.transpose(0, 2, 1)
                for k in range(problem.group_k) if dtype == np.float32 else ():
                    weights = result[:, k, :, t, r, s]
                    before = weights[..., None]
                    products = passed[:, k, None] * seen
                    weights[...] = np.cumsum(np.concatenate([before, products], -1), -1)[..., -1]
    return _in_layout(problem, result.reshape(problem.k, problem.group_c, problem.t, problem.r, problem.s))


def filter2d(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float = 0, delta: float = 0
) -> np.ndarray:
    """Correlation of images with the filters, in the shape of the result: float64 that is not rounded, kept within the
    range of an integer result; or int32 that wraps around where sums are int32.

    Every border is taken by exact index arithmetic, so a filter may be larger than the image.
    """
    if problem.sums == "int32":
        # A sum that wraps around in int64 is right modulo 2**64, hence modulo 2**32 too.
        return _filter2d(problem, x, kernel, value, delta, np.dtype(np.int64)).astype(np.int32)
    y = _filter2d(problem, x, kernel, value, delta, np.dtype(np.float64))
    return y.clip(DTYPES[problem.result].low, DTYPES[problem.result].high) if is_integer(problem.result) else y


def _filter2d(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float, delta: float, dtype: np.dtype
) -> np.ndarray:
    if problem.is_volume:
        return _volumes(problem, x, kernel, value, delta, dtype)
    if problem.reduction == "sum":
        kernel = np.full((problem.kh, problem.kw), kernel[0])
    elif problem.reduction is not None:
        kernel = np.ones((problem.kh, problem.kw))
    if problem.rank:  # given as products of columns and rows
        products = kernel.astype(np.int64 if dtype.kind == "i" else np.float64)
        kernel = np.einsum("ku,kv->uv", products[:, : problem.kh], products[:, problem.kh :])
    x = x.reshape(problem.batch, problem.h, problem.w, problem.channels).astype(dtype)
    taps = kernel.reshape(-1, problem.filters, problem.kh, problem.kw).astype(dtype)
    if not problem.per_image:
        taps = np.broadcast_to(taps, (problem.batch, *taps.shape[1:]))
    y = np.zeros((problem.batch, problem.filters, problem.out_h, problem.out_w, problem.channels), dtype)
    if y.size == 0:
        return y.reshape(problem.y_shape)
    ay, ax = problem.anchor
    rows, row_inside = border_indices(problem.border, np.arange(problem.out_h + problem.kh - 1) - ay, problem.h)
    columns, column_inside = border_indices(problem.border, np.arange(problem.out_w + problem.kw - 1) - ax, problem.w)
    extended = x[:, rows[:, None], columns]
    extended[:, ~(row_inside[:, None] & column_inside)] = value
    if problem.reduction == "median":
        windows = [(u, v) for u in range(problem.kh) for v in range(problem.kw)]
        seen = np.stack([extended[:, None, u : u + problem.out_h, v : v + problem.out_w] for u, v in windows])
        return (np.median(seen, axis=0) + dtype.type(delta)).reshape(problem.y_shape)
    take = {"min": np.minimum, "max": np.maximum}.get(str(problem.reduction))
    with np.errstate(invalid="ignore", over="ignore"):
        for u in range(problem.kh):
            for v in range(problem.kw):
                seen = extended[:, None, u : u + problem.out_h, v : v + problem.out_w]
                if take is None:
                    y += taps[:, :, u, v, None, None, None] * seen
                else:
                    y = take(y, seen) if u or v else np.array(seen)
        y += dtype.type(delta)
    return y.reshape(problem.y_shape)


def _volumes(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float, delta: float, dtype: np.dtype
) -> np.ndarray:
    """The sum over the slices of the filter, each applied to images that are slices of the volumes."""
    position = np.arange(problem.out_d + problem.kd - 1) - problem.anchor_z
    slices, inside = border_indices(problem.border, position, problem.d)
    extended = x.reshape(problem.batch, problem.d, problem.h, problem.w, problem.channels).astype(dtype)[:, slices]
    extended[:, ~inside] = value
    taps = kernel.reshape(-1, problem.filters, problem.kd, problem.kh, problem.kw)
    if problem.per_image:  # each slice of a volume has the volume's own
        taps = np.repeat(taps, problem.out_d, axis=0)
    flat = replace(problem, batch=problem.batch * problem.out_d, d=1, kd=1, anchor_z=0)
    y: np.ndarray = np.zeros(flat.y_shape, dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for t in range(problem.kd):
            y += _filter2d(flat, extended[:, t : t + problem.out_d], taps[:, :, t], value, 0, dtype)
        y += dtype.type(delta)
    y = y.reshape(problem.batch, problem.out_d, problem.filters, problem.out_h, problem.out_w, problem.channels)
    return y.swapaxes(1, 2).reshape(problem.y_shape)


def border_indices(border: str, position: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each position on a line of ``size`` pixels or outside: the pixel that stands for it, and whether to use it.

    Outside pixels of border ``constant`` get index 0 and False; all else is True.
    """
    everywhere = np.ones(position.shape, bool)
    if border == "constant":
        inside = (position >= 0) & (position < size)
        return np.where(inside, position, 0), inside
    if border == "replicate":
        return position.clip(0, size - 1), everywhere
    if border == "wrap":
        return position % size, everywhere
    if border == "reflect":
        folded = position % (2 * size)
        return np.minimum(folded, 2 * size - 1 - folded), everywhere
    if border == "reflect101":
        period = max(1, 2 * size - 2)
        folded = position % period
        return np.minimum(folded, period - folded), everywhere
    raise ValueError(f"border={border!r} is not known")


def relative_error(out: np.ndarray, reference: np.ndarray) -> float:
    """Relative Frobenius error ‖out − reference‖ / ‖reference‖, in float64; 0 for empty arrays.

    Where the reference is zero everywhere it is 0 for an exact result and infinite for any other. A NaN or an Inf in
    ``out`` makes it NaN or infinite, so that ``error <= bound`` is false.
    """
    out64, reference64 = np.asarray(out, np.float64), np.asarray(reference, np.float64)
    if out64.shape != reference64.shape:
        raise ValueError(f"shapes differ: {out64.shape} and {reference64.shape}")
    difference = float(np.linalg.norm((out64 - reference64).ravel()))
    norm = float(np.linalg.norm(reference64.ravel()))
    if norm == 0:
        return difference if np.isnan(difference) or difference == 0 else float("inf")
    return difference / norm


def sequential_error(
    problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, most_products: int = 100_000_000
) -> float:
    """Relative error of ``sequential_float32`` on this data.

    Where the layer has more than ``most_products`` multiplications it is estimated on its first images and on evenly
    spaced filters of every group; the gradient of the input on evenly spaced channels of its result, that of the
    filters on evenly spaced groups.
    """
    products = problem.flops // 2
    if problem.op == "wgrad":
        return _sequential_error_of_filters(problem, x, w, most_products)
    backward = problem.op == "dgrad"
    most, summed = (problem.group_c, problem.group_k) if backward else (problem.group_k, problem.group_c)
    images, channels = problem.n, most
    if products > most_products:
        outputs, taps = problem.z * problem.p * problem.q, problem.t * problem.r * problem.s
        per_channel = problem.groups * outputs * summed * taps
        images = max(1, min(images, most_products // max(1, per_channel * min(channels, 4))))
        channels = max(1, min(channels, most_products // max(1, per_channel * images)))
    if (images, channels) != (problem.n, most):
        picked = np.arange(channels) * most // channels
        first_axis, channel_axis, *_ = _axes(problem)
        x = np.take(x, np.arange(images), axis=first_axis)
        index = (np.arange(problem.groups)[:, None] * most + picked).ravel()
        bias = None if bias is None else bias[index]
        if backward:
            w = np.take(w, picked, axis=channel_axis)
            problem = replace(problem, n=images, c=len(index))
        else:
            w = np.take(w, index, axis=first_axis)
            problem = replace(problem, n=images, k=len(index))
    return relative_error(sequential_float32(problem, x, w, bias), conv2d(problem, x, w, bias))


def _sequential_error_of_filters(problem: ConvProblem, x: np.ndarray, grad: np.ndarray, most_products: int) -> float:
    """`sequential_error` of the gradient of the filters: of fewer images, whose sums are shorter, only at last."""
    each = problem.flops // 2 // problem.groups
    groups = max(1, min(problem.groups, most_products // max(1, each)))
    images = max(1, min(problem.n, most_products * problem.n // max(1, each * groups)))
    first_axis, channel_axis, *_ = _axes(problem)

    def part(array: np.ndarray, channels: int) -> np.ndarray:
        index = (np.arange(groups) * problem.groups // groups)[:, None] * channels + np.arange(channels)
        return np.take(np.take(array, np.arange(images), axis=first_axis), index.ravel(), axis=channel_axis)

    if (groups, images) != (problem.groups, problem.n) and problem.n:
        x, grad = part(x, problem.group_c), part(grad, problem.group_k)
        problem = replace(problem, n=images, c=groups * problem.group_c, k=groups * problem.group_k, groups=groups)
    return relative_error(sequential_float32(problem, x, grad), conv2d(problem, x, grad))


def error_bound(problem: ConvProblem, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> float:
    """The relative error that the precision level of ``problem`` allows on this data, if they are dense and random.

    ``"ieee"`` and ``"fp32"``: four times that of a plain sequential float32 sum, and never less than four roundings;
    ``"relaxed"`` and ``"tf32"``: `RELAXED_BOUND` and `TF32_BOUND`. The loose levels never bound tighter than ``"fp32"``
    does. For float64 problems it is the same, scaled to the float64 unit roundoff.

    Float16 and bfloat16 are summed in float32, and the sum is rounded once: each output is off by at most the type's
    unit roundoff u (2⁻¹¹, 2⁻⁸) of itself, so all of them by u of the norm of what is rounded. The bound is that of
    float32, b, and ``u * (1 + b)``. It holds while results are of the type's normal range: a float16 below 2⁻¹⁴ is off
    by up to 2⁻²⁵ whatever its size, and one from 65520 on is infinite. Integers are exact at every level: 0.

    Of sparse data the sequential sum may be nearly exact: what holds on data of every kind, research/bounds.py has.
    """
    if is_integer(problem.dtype):
        return 0.0
    strict = 4 * max(FLOAT32_UNIT, sequential_error(problem, x, w, bias))
    bound = max(strict, {"relaxed": RELAXED_BOUND, "tf32": TF32_BOUND}.get(problem.precision, 0.0))
    if is_narrow(problem.dtype):
        return bound + DTYPES[problem.dtype].roundoff * (1 + bound)
    return bound * 2.0**-29 if problem.dtype == "float64" else bound


def filter_error_bound(
    problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float = 0, delta: float = 0
) -> float:
    """The relative error allowed for a filter on this data: four times that of a sequential float32 sum of the taps.

    Never less than four roundings; 0 for sums in int32, which are exact. Of large images the first 512 × 512 pixels are
    taken. A result that is narrower than the sums is rounded once more, to the nearest: a floating-point number by the
    unit roundoff of its type, an integer by half.
    """
    if problem.sums == "int32":
        return 0.0
    if problem.is_volume:
        return _volume_error_bound(problem, x, kernel, value, delta)
    part = np.ascontiguousarray(x[:1, :512, :512])
    cut = replace(
        problem, batch=part.shape[0], h=part.shape[1], w=part.shape[2], dtype="float32", out_dtype=None, sum_dtype=None
    )  # fmt: skip
    taps = kernel[: len(part)] if problem.per_image else kernel
    return _bound_on(problem, cut, part, taps, value, delta)


def _volume_error_bound(problem: FilterProblem, x: np.ndarray, kernel: np.ndarray, value: float, delta: float) -> float:
    """`filter_error_bound` of volumes, by the first of them."""
    cut = replace(problem, batch=min(1, problem.batch), dtype="float32", out_dtype=None, sum_dtype=None)
    return _bound_on(problem, cut, x[:1], kernel[:1] if problem.per_image else kernel, value, delta)


def _bound_on(
    problem: FilterProblem, cut: FilterProblem, part: np.ndarray, taps: np.ndarray, value: float, delta: float
) -> float:
    """The bound by the float32 problem ``cut`` on a part of the data."""
    exact = filter2d(cut, part, taps, value, delta)
    plain = _filter2d(cut, part, taps, value, delta, np.dtype(np.float32))
    strict = 4 * max(FLOAT32_UNIT, relative_error(plain, exact))
    strict *= 2.0**-29 if problem.sums == "float64" else 1
    if is_integer(problem.result):
        kept = exact.clip(DTYPES[problem.result].low, DTYPES[problem.result].high)
        norms = [max(float(np.linalg.norm(each)), 1e-30) for each in (exact, kept)]
        return strict * norms[0] / norms[1] + 0.5 * float(kept.size) ** 0.5 / norms[1]
    narrow = problem.result in ("float16", "bfloat16") or (problem.result, problem.sums) == ("float32", "float64")
    return strict + DTYPES[problem.result].roundoff * (1 + strict) * narrow


def _axes(problem: ConvProblem) -> list[int]:
    """Where the axes N, C, D, H, W (of filters K, C, T, R, S) are among those of an array; images have no D."""
    order = problem.layout.replace("H", "DH") if problem.is_volume else problem.layout
    return [order.index(axis) for axis in "NCDHW" if axis in order]


def _ncdhw(problem: ConvProblem, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy, in NCDHW, of an array of ``problem``."""
    array = array.transpose(_axes(problem)).astype(dtype, order="C")
    return array if problem.is_volume else array[:, :, None]


def _in_layout(problem: ConvProblem, array: np.ndarray) -> np.ndarray:
    """An array in NCDHW, transposed to the layout of ``problem``."""
    array = array if problem.is_volume else array[:, :, 0]
    return np.ascontiguousarray(array.transpose(np.argsort(_axes(problem))))


def _sides(problem: ConvProblem) -> list[tuple[int, int]]:
    """Padding before and after the slices, the rows and the columns."""
    top, bottom, left, right = problem.padding
    return [problem.padding_d, (top, bottom), (left, right)]


def _inside(
    problem: ConvProblem, image: tuple[int, ...], padded: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of an image (channels, d, h, w) that its padded one holds, and where it lies there."""
    inside, kept = [slice(None)], [slice(None)]
    for (before, after), size, whole in zip(_sides(problem), image[1:], padded[1:], strict=True):
        first = max(0, -before)
        inside.append(slice(first, max(first, size - max(0, -after))))
        kept.append(slice(max(0, before), whole - max(0, after)))
    return tuple(inside), tuple(kept)


def _padded(problem: ConvProblem, image: np.ndarray) -> np.ndarray:
    """The image (channels, d, h, w) with zeros around it; where padding is negative, without its outermost pixels."""
    inside, _ = _inside(problem, image.shape, image.shape)
    return np.pad(image[inside], [(0, 0), *((max(0, before), max(0, after)) for before, after in _sides(problem))])


def _taps(problem: ConvProblem) -> Iterator[tuple[int, int, int]]:
    """The filter's taps (t, r, s)."""
    return product(range(problem.t), range(problem.r), range(problem.s))


def _seen(problem: ConvProblem, image: np.ndarray, t: int, r: int, s: int) -> np.ndarray:
    """What filter tap (t, r, s) reads: a strided view (channels, Z, P, Q) of the padded image."""
    stride, dilation = (problem.stride_d, *problem.stride), (problem.dilation_d, *problem.dilation)
    outputs = problem.z, problem.p, problem.q
    starts = [number * apart for number, apart in zip((t, r, s), dilation, strict=True)]
    slices, rows, columns = [
        slice(start, start + (count - 1) * step + 1, step)
        for start, count, step in zip(starts, outputs, stride, strict=True)
    ]
    return image[:, slices, rows, columns]


def _finish(problem: ConvProblem, y: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    if bias is not None:
        y = y + bias.astype(y.dtype)[:, None, None, None]
    if problem.activation == "relu":
        y = np.maximum(y, 0)
    return _in_layout(problem, y)
