"""Filters of one axis, and those that pass along one axis after the other: Gaussians and means."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from leanconv.cpu.lines import Edge
from leanconv.images.borders import ScipyMode
from leanconv.ndimage import on_cpu, on_device
from leanconv.ndimage.arguments import (
    MistakeError,
    anchor_of,
    at_home,
    axes_of,
    axis_of,
    border_of,
    by_parts,
    check_real,
    is_complex,
    output_for,
    sequence,
)
from leanconv.ndimage.windows import to_numpy

Modes = ScipyMode | Sequence[ScipyMode]


@at_home
def correlate1d(
    input: Any,
    weights: Any,
    axis: int = -1,
    output: Any = None,
    mode: ScipyMode = "reflect",
    cval: float = 0.0,
    origin: int = 0,
) -> Any:
    """Correlate along one axis, as ``scipy.ndimage.correlate1d`` does.

    ``out[i] = Σ_u weights[u] · input[i + u − len(weights) // 2 − origin]``.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        weights: one-dimensional.
        axis: the axis to filter along.
        output: None (a new array of the input's dtype), a dtype, or the array to fill, which may be the input.
        mode: how the input continues outside; see `correlate`.
        cval: what lies outside with mode ``"constant"``.
        origin: shifts the weights.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: an axis or an origin outside, an unknown mode, weights that are not one-dimensional.
        TypeError: dtypes that cannot be computed.

    >>> correlate1d([2, 8, 0, 4, 1, 9, 9, 0], weights=[1, 3]).tolist()
    [8, 26, 8, 12, 7, 28, 36, 9]
    """
    taps = to_numpy(weights, "weights")
    if is_complex(input) or is_complex(taps):
        # NOTE: as in SciPy, complex weights are conjugated
        return _complex(correlate1d, input, np.conj(taps), output, cval, axis=axis, mode=mode, origin=origin)
    if isinstance(input, np.ndarray):
        check_real("input", input.dtype)
    check_real("weights", taps.dtype)
    out = output_for(input, output)
    if taps.ndim != 1 or taps.size == 0:
        raise MistakeError(f"weights have shape {taps.shape}; they must be one-dimensional and not empty")
    axis = axis_of(axis, input.ndim)
    at, border = anchor_of(len(taps), origin, taps.shape, origin), border_of(mode)
    taps = np.ascontiguousarray(taps, np.float64)
    if isinstance(input, np.ndarray):
        on_cpu.line(input, taps, axis, out, Edge.of(len(taps), at, border, cval))
    else:
        on_device.passes(input, [on_device.Pass(taps, axis, at, border)], cval, out)
    return out


def _complex(function: Any, x: Any, weights: Any, output: Any, cval: Any, **keywords: Any) -> Any:
    out = output_for(x, output, is_complex=True)
    wide = np.float64 if out.dtype == np.complex128 else np.float32

    def real(part: np.ndarray, weights: Any, into: Any, value: float) -> Any:
        return function(part, weights, output=wide, cval=value, **keywords)

    return by_parts(real, x, weights, out, cval)


@at_home
def convolve1d(
    input: Any,
    weights: Any,
    axis: int = -1,
    output: Any = None,
    mode: ScipyMode = "reflect",
    cval: float = 0.0,
    origin: int = 0,
) -> Any:
    """Convolve along one axis, as ``scipy.ndimage.convolve1d`` does: `correlate1d` with the weights flipped.

    Arguments, result and errors are those of `correlate1d`.

    >>> convolve1d([2, 8, 0, 4, 1, 9, 9, 0], weights=[1, 3]).tolist()
    [14, 24, 4, 13, 12, 36, 27, 0]
    """
    taps = to_numpy(weights, "weights")[::-1]
    origin = -origin - (1 - len(taps) % 2)
    return correlate1d(input, np.conj(taps) if is_complex(taps) else taps, axis, output, mode, cval, origin)


def gaussian_taps(sigma: float, order: int, radius: int) -> np.ndarray:
    """The Gaussian of standard deviation ``sigma``, or its derivative of an order, on −radius … radius."""
    if order < 0:
        raise ValueError(f"order={order} is negative")
    at = np.arange(-radius, radius + 1)
    bell = np.exp(-0.5 / (sigma * sigma) * at**2)
    bell /= bell.sum()
    # the derivative is q(x) bell(x), and each differentiation makes q' − q x / σ² of the polynomial q
    q = np.zeros(order + 1)
    q[0] = 1
    step = np.diag(np.arange(1, order + 1), 1) + np.diag(np.full(order, -1.0) / (sigma * sigma), -1)
    for _ in range(order):
        q = step.dot(q)
    return (at[:, None] ** np.arange(order + 1)).dot(q) * bell if order else bell


def _gaussian(sigma: Any, order: int, truncate: float, radius: Any) -> np.ndarray:
    """The taps of a Gaussian filter as a correlation: mirrored."""
    reach = int(truncate * float(sigma) + 0.5) if radius is None else radius
    if not isinstance(reach, numbers.Integral) or reach < 0:
        raise ValueError(f"radius={reach!r} is not a whole number, 0 or more")
    return gaussian_taps(float(sigma), order, int(reach))[::-1]


@at_home
def gaussian_filter1d(
    input: Any,
    sigma: float,
    axis: int = -1,
    order: int = 0,
    output: Any = None,
    mode: ScipyMode = "reflect",
    cval: float = 0.0,
    truncate: float = 4.0,
    *,
    radius: int | None = None,
) -> Any:
    """Filter along one axis with a Gaussian or one of its derivatives, as ``scipy.ndimage.gaussian_filter1d`` does.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        sigma: standard deviation, in elements.
        axis: the axis to filter along.
        order: 0 for the Gaussian, n for its n-th derivative.
        output: see `correlate1d`.
        mode: how the input continues outside; see `correlate`.
        cval: what lies outside with mode ``"constant"``.
        truncate: the filter ends after so many standard deviations.
        radius: elements on each side of the middle one; by default what ``truncate`` says.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: a negative order or radius, and what `correlate1d` raises.
        TypeError: dtypes that cannot be computed.

    >>> gaussian_filter1d([0.0, 0, 1, 0, 0], 1).round(3).tolist()
    [0.058, 0.242, 0.399, 0.242, 0.058]
    """
    return correlate1d(input, _gaussian(sigma, order, truncate, radius), axis, output, mode, cval, 0)


@at_home
def gaussian_filter(
    input: Any,
    sigma: float | Sequence[float],
    order: int | Sequence[int] = 0,
    output: Any = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    truncate: float = 4.0,
    *,
    radius: int | Sequence[int] | None = None,
    axes: int | Sequence[int] | None = None,
) -> Any:
    """Filter with a Gaussian or its derivatives along each of ``axes``, as ``scipy.ndimage.gaussian_filter`` does.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        sigma: standard deviation, in elements: one for all axes, or one for each.
        order: 0 for the Gaussian, n for its n-th derivative: one for all axes, or one for each.
        output: see `correlate1d`.
        mode: how the input continues outside, see `correlate`: one for all axes, or one for each.
        cval: what lies outside with mode ``"constant"``.
        truncate: the filter ends after so many standard deviations.
        radius: elements on each side of the middle one, one for all axes or one for each.
        axes: the axes to filter along; all of them by default.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: as `gaussian_filter1d`, and sequences of another length than ``axes``.
        TypeError: dtypes that cannot be computed.

    >>> gaussian_filter([[0.0, 0, 0], [0, 1, 0], [0, 0, 0]], 0.5, mode="constant").round(3).tolist()
    [[0.011, 0.084, 0.011], [0.084, 0.619, 0.084], [0.011, 0.084, 0.011]]
    """
    along = axes_of(axes, input.ndim)
    each = {name: sequence(name, value, len(along)) for name, value in
            {"order": order, "sigma": sigma, "mode": mode, "radius": radius}.items()}  # fmt: skip
    out = output_for(input, output, is_complex(input), promotes=not any(s > 1e-15 for s in each["sigma"]))
    rows, filtered, borders = [], [], []
    for axis, s, o, m, r in zip(along, *(each[n] for n in ("sigma", "order", "mode", "radius")), strict=True):
        if s > 1e-15:
            rows.append(_gaussian(s, o, truncate, r))
            filtered.append(axis)
            borders.append(m)
    return passes(input, rows, filtered, borders, cval, out)


def passes(x: Any, rows: list[np.ndarray], axes: list[int], modes: list[Any], cval: Any, out: Any) -> Any:
    """One symmetric or antisymmetric filter along each of ``axes``."""
    if not rows:
        out[...] = x
    elif isinstance(x, np.ndarray) and not is_complex(x):
        check_real("input", x.dtype)
        on_cpu.passes(x, rows, axes, [border_of(mode) for mode in modes], cval, out)
    elif not isinstance(x, np.ndarray):
        each = [
            on_device.Pass(np.asarray(row, np.float64), axis, len(row) // 2, border_of(mode))
            for row, axis, mode in zip(rows, axes, modes, strict=True)
        ]
        on_device.passes(x, each, cval, out)
    else:
        for row, axis, mode in zip(rows, axes, modes, strict=True):
            correlate1d(x, row, axis, out, mode, cval, 0)
            x = out
    return out


@at_home
def uniform_filter1d(
    input: Any,
    size: int,
    axis: int = -1,
    output: Any = None,
    mode: ScipyMode = "reflect",
    cval: float = 0.0,
    origin: int = 0,
) -> Any:
    """The mean of ``size`` neighbours along one axis, as ``scipy.ndimage.uniform_filter1d``.

    The time hardly depends on ``size``. Sums are not updated from one element to the next, as in SciPy: so a NaN or an
    Inf reaches only the means that hold it.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        size: elements of the mean.
        axis: the axis to filter along.
        output: see `correlate1d`.
        mode: how the input continues outside; see `correlate`.
        cval: what lies outside with mode ``"constant"``.
        origin: shifts the window.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: a size below 1, an axis or an origin outside, an unknown mode.
        TypeError: dtypes that cannot be computed.

    >>> uniform_filter1d([2, 8, 0, 4, 1, 9, 9, 0], size=3).tolist()
    [4, 3, 4, 1, 4, 6, 6, 3]
    """
    axis = axis_of(axis, input.ndim)
    if size < 1:
        raise MistakeError(f"size={size} is not positive")
    if isinstance(input, np.ndarray) and is_complex(input):
        return _complex(_uniform_part, input, np.float64(size), output, cval, axis=axis, mode=mode, origin=origin)
    if isinstance(input, np.ndarray):
        check_real("input", input.dtype)
    out = output_for(input, output)
    at, border = anchor_of(size, origin, (size,), origin), border_of(mode)
    if isinstance(input, np.ndarray):
        on_cpu.uniform_line(input, size, axis, out, Edge.of(size, at, border, cval))
    else:
        on_device.passes(input, [on_device.Pass(np.full(size, 1 / size), axis, at, border)], cval, out)
    return out


def _uniform_part(part: np.ndarray, size: Any, **keywords: Any) -> Any:
    return uniform_filter1d(part, int(size), **keywords)


@at_home
def uniform_filter(
    input: Any,
    size: int | Sequence[int] = 3,
    output: Any = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> Any:
    """The mean over boxes, as ``scipy.ndimage.uniform_filter``: `uniform_filter1d` along each of ``axes``.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        size: elements of the box: one number for all axes, or one for each.
        output: see `correlate1d`.
        mode: how the input continues outside, see `correlate`: one for all axes, or one for each.
        cval: what lies outside with mode ``"constant"``.
        origin: shifts the box: one number for all axes, or one for each.
        axes: the axes to filter along; all of them by default.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: as `uniform_filter1d`, but along axes of a size of 1 and less nothing is done; sequences of another
            length than ``axes``.
        TypeError: dtypes that cannot be computed.

    >>> uniform_filter([[9, 0, 0], [0, 0, 0], [0, 0, 9]]).tolist()
    [[4, 2, 0], [2, 2, 2], [0, 2, 4]]
    """
    out = output_for(input, output, is_complex(input))
    along = axes_of(axes, input.ndim)
    sizes, origins, modes = (
        sequence(name, value, len(along)) for name, value in (("size", size), ("origin", origin), ("mode", mode))
    )
    if not isinstance(input, np.ndarray):
        each = [
            on_device.Pass(np.full(n, 1 / n), axis, anchor_of(n, shift, (n,), shift), border_of(mode))
            for axis, n, shift, mode in zip(along, map(int, sizes), origins, modes, strict=True)
            if n > 1
        ]
        on_device.passes(input, each, cval, out)
        return out
    x = input
    if on_cpu.is_small_mean(x, along, out) and min(map(int, sizes), default=0) > 0:
        borders = [border_of(mode) for mode in modes]
        for extent, shift in zip(sizes, origins, strict=True):
            if extent > 1:  # along other axes nothing is filtered, whatever the origin
                anchor_of(extent, shift, (extent,), shift)
        inside = "constant" not in borders or cval == 0
        if inside and on_cpu.small_mean(x, list(map(int, sizes)), modes, origins, out):
            return out
    for axis, extent, shift, border in zip(along, sizes, origins, modes, strict=True):
        if extent > 1:
            uniform_filter1d(x, int(extent), axis, out, border, cval, shift)
            x = out
    if x is input:
        out[...] = input
    return out
