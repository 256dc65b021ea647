"""Derivatives: Sobel's and Prewitt's filters, Laplacians, magnitudes of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from leanconv.ndimage.arguments import at_home, axes_of, axis_of, is_complex, output_for, sequence
from leanconv.ndimage.smoothing import Modes, correlate1d, gaussian_filter, passes


@at_home
def sobel(input: Any, axis: int = -1, output: Any = None, mode: Modes = "reflect", cval: float = 0.0) -> Any:
    """Sobel's filter, as ``scipy.ndimage.sobel``: −1 0 1 along one axis, 1 2 1 along the others.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        axis: the axis of the derivative.
        output: see `correlate1d`.
        mode: how the input continues outside, see `correlate`: one for all axes, or one for each.
        cval: what lies outside with mode ``"constant"``.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: an axis outside, an unknown mode.
        TypeError: dtypes that cannot be computed.

    >>> sobel([[0, 0, 1], [0, 0, 1], [0, 0, 1]]).tolist()
    [[0, 4, 4], [0, 4, 4], [0, 4, 4]]
    """
    return _difference(input, axis, output, mode, cval, [1, 2, 1])


@at_home
def prewitt(input: Any, axis: int = -1, output: Any = None, mode: Modes = "reflect", cval: float = 0.0) -> Any:
    """Prewitt's filter, as ``scipy.ndimage.prewitt``: −1 0 1 along one axis, 1 1 1 along the others.

    Arguments, result and errors are those of `sobel`.

    >>> prewitt([[0, 0, 1], [0, 0, 1], [0, 0, 1]]).tolist()
    [[0, 3, 3], [0, 3, 3], [0, 3, 3]]
    """
    return _difference(input, axis, output, mode, cval, [1, 1, 1])


def _difference(x: Any, axis: int, output: Any, mode: Any, cval: float, smooth: list[int]) -> Any:
    axis = axis_of(axis, x.ndim)
    out, modes = output_for(x, output, is_complex(x), promotes=False), sequence("mode", mode, x.ndim)
    axes = [axis, *(other for other in range(x.ndim) if other != axis)]
    rows = [np.array([-1.0, 0, 1]), *[np.array(smooth, float)] * (x.ndim - 1)]
    return passes(x, rows, axes, [modes[each] for each in axes], cval, out)


@at_home
def generic_laplace(
    input: Any,
    derivative2: Callable[..., Any],
    output: Any = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    extra_arguments: tuple[Any, ...] = (),
    extra_keywords: dict[str, Any] | None = None,
    *,
    axes: int | Sequence[int] | None = None,
) -> Any:
    """The sum of second derivatives along each of ``axes``, as ``scipy.ndimage.generic_laplace``.

    Args:
        input: array of any shape, dtype and library that `leanconv.ndimage` takes.
        derivative2: ``derivative2(input, axis, output, mode, cval, *extra_arguments, **extra_keywords)``.
        output: see `correlate1d`.
        mode: how the input continues outside, see `correlate`: one for all axes, or one for each.
        cval: what lies outside with mode ``"constant"``.
        extra_arguments: passed on to ``derivative2``.
        extra_keywords: passed on to ``derivative2``.
        axes: the axes to filter along; all of them by default.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: axes that do not fit, and what ``derivative2`` raises.

    >>> def second(input, axis, output, mode, cval):
    ...     return correlate1d(input, [1, -2, 1], axis, output, mode, cval)
    >>> generic_laplace([0, 0, 1, 0, 0], second).tolist()
    [0, 1, -2, 1, 0]
    """
    return _sum_over_axes(input, derivative2, output, mode, cval, extra_arguments, extra_keywords, axes, _same, _same)


def _same(values: Any) -> Any:
    return values


def _square(values: Any) -> Any:
    values *= values
    return values


def _root(values: Any) -> Any:
    # SciPy takes the root in float64 where the output is an integer
    if isinstance(values, np.ndarray):
        np.sqrt(values, out=values, casting="unsafe")
    else:
        values[...] = values**0.5
    return values


def _sum_over_axes(
    x: Any, derivative: Callable[..., Any], output: Any, mode: Any, cval: float, arguments: tuple[Any, ...],
    keywords: dict[str, Any] | None, axes: Any, each: Callable[[Any], Any], at_last: Callable[[Any], Any],
) -> Any:  # fmt: skip
    along = axes_of(axes, x.ndim)
    out = output_for(x, output, is_complex(x), promotes=not along)
    if not along:
        out[...] = x
        return out
    modes = sequence("mode", mode, len(along))
    more = keywords or {}
    # every derivative is of the input, which the output may be
    x = x.copy() if len(along) > 1 and isinstance(x, np.ndarray) and np.may_share_memory(x, out) else x
    if isinstance(out, np.ndarray) and out is not output:
        out[...] = 0  # as SciPy's, to which a caller's function may add
    derivative(x, along[0], out, modes[0], cval, *arguments, **more)
    each(out)
    for axis, border in zip(along[1:], modes[1:], strict=True):
        other = derivative(x, axis, out.dtype, border, cval, *arguments, **more)
        out += each(other)
    return at_last(out)


@at_home
def laplace(
    input: Any, output: Any = None, mode: Modes = "reflect", cval: float = 0.0, *,
    axes: int | Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """The sum of the second differences 1 −2 1 along each of ``axes``, as ``scipy.ndimage.laplace``.

    Arguments, result and errors are those of `generic_laplace`.

    >>> laplace([[0, 0, 0], [0, 1, 0], [0, 0, 0]]).tolist()
    [[0, 1, 0], [1, -4, 1], [0, 1, 0]]
    """

    def derivative2(input: Any, axis: int, output: Any, mode: Any, cval: float) -> Any:
        return correlate1d(input, [1, -2, 1], axis, output, mode, cval, 0)

    return generic_laplace(input, derivative2, output, mode, cval, axes=axes)


@at_home
def gaussian_laplace(
    input: Any, sigma: float | Sequence[float], output: Any = None, mode: Modes = "reflect", cval: float = 0.0, *,
    axes: int | Sequence[int] | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """The sum of second derivatives of a Gaussian filter along each of ``axes``, as ``scipy.ndimage.gaussian_laplace``.

    Arguments, result and errors are those of `generic_laplace`; ``sigma`` and further keywords go to `gaussian_filter`.

    >>> gaussian_laplace([0.0, 0, 1, 0, 0], 1).round(3).tolist()
    [0.197, 0.002, -0.399, 0.002, 0.197]
    """

    def derivative2(input: Any, axis: int, output: Any, mode: Any, cval: float, sigma: Any, **kwargs: Any) -> Any:
        order = [0] * input.ndim
        order[axis] = 2
        return gaussian_filter(input, sigma, order, output, mode, cval, **kwargs)

    along = axes_of(axes, input.ndim)
    given, sigmas = sequence("sigma", sigma, len(along)), [0.0] * input.ndim
    # NOTE: as in SciPy, they follow the order of ``axes`` unless that names all of them
    for axis, value in zip(along if len(along) < input.ndim else range(input.ndim), given, strict=True):
        sigmas[axis] = value
    return generic_laplace(
        input, derivative2, output, mode, cval, extra_arguments=(sigmas,), extra_keywords=kwargs, axes=axes
    )


@at_home
def generic_gradient_magnitude(
    input: Any,
    derivative: Callable[..., Any],
    output: Any = None,
    mode: Modes = "reflect",
    cval: float = 0.0,
    extra_arguments: tuple[Any, ...] = (),
    extra_keywords: dict[str, Any] | None = None,
    *,
    axes: int | Sequence[int] | None = None,
) -> Any:
    """The root of the sum of squares of derivatives, as ``scipy.ndimage.generic_gradient_magnitude``.

    Arguments, result and errors are those of `generic_laplace`.

    >>> generic_gradient_magnitude([[0.0, 3.0], [4.0, 7.0]], sobel, mode="nearest").tolist()
    [[20.0, 20.0], [20.0, 20.0]]
    """
    return _sum_over_axes(input, derivative, output, mode, cval, extra_arguments, extra_keywords, axes, _square, _root)


@at_home
def gaussian_gradient_magnitude(
    input: Any, sigma: float | Sequence[float], output: Any = None, mode: Modes = "reflect", cval: float = 0.0, *,
    axes: int | Sequence[int] | None = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """The magnitude of a Gaussian filter's gradient, as ``scipy.ndimage.gaussian_gradient_magnitude``.

    Arguments, result and errors are those of `generic_laplace`; ``sigma`` and further keywords go to `gaussian_filter`.

    >>> gaussian_gradient_magnitude([0.0, 0, 0, 1, 1, 1], 1).round(3).tolist()
    [0.013, 0.122, 0.364, 0.364, 0.122, 0.013]
    """

    def derivative(input: Any, axis: int, output: Any, mode: Any, cval: float, sigma: Any, **kwargs: Any) -> Any:
        order = [0] * input.ndim
        order[axis] = 1
        return gaussian_filter(input, sigma, order, output, mode, cval, **kwargs)

    return generic_gradient_magnitude(
        input, derivative, output, mode, cval, extra_arguments=(sigma,), extra_keywords=kwargs, axes=axes
    )
