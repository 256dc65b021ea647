"""``correlate`` and ``convolve``: weights of any number of dimensions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from leanconv.arrays import arrays_of
from leanconv.images.borders import ScipyMode
from leanconv.ndimage import on_cpu, on_device
from leanconv.ndimage.arguments import (
    MistakeError,
    at_home,
    axes_of,
    border_of,
    by_parts,
    check_numpy_has,
    check_real,
    is_complex,
    output_for,
    sequence,
)


class _Exchanged(Protocol):
    """An array of another library."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...


Foreign = TypeVar("Foreign", bound=_Exchanged)


@overload
def correlate(
    input: np.ndarray, weights: Any, output: Any = ..., mode: ScipyMode = ..., cval: float = ...,
    origin: int | Sequence[int] = ..., *, axes: int | Sequence[int] | None = ...,
) -> np.ndarray: ...  # fmt: skip
@overload
def correlate(
    input: Foreign, weights: Any, output: Any = ..., mode: ScipyMode = ..., cval: float = ...,
    origin: int | Sequence[int] = ..., *, axes: int | Sequence[int] | None = ...,
) -> Foreign: ...  # fmt: skip
@overload
def correlate(
    input: npt.ArrayLike, weights: Any, output: Any = ..., mode: ScipyMode = ..., cval: float = ...,
    origin: int | Sequence[int] = ..., *, axes: int | Sequence[int] | None = ...,
) -> np.ndarray: ...  # fmt: skip
@at_home
def correlate(
    input: Any,
    weights: Any,
    output: Any = None,
    mode: ScipyMode = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> Any:
    """Correlate an array with weights, as ``scipy.ndimage.correlate`` does.

    ``out[i] = Σ_u weights[u] · input[i + u − weights.shape // 2 − origin]``, along each of ``axes``.

    Args:
        input: array of any shape and dtype that SciPy takes, of any library.
        weights: array with as many dimensions as ``axes``.
        output: None (a new array of the input's dtype), a dtype, or the array to fill.
        mode: how the input continues outside, for ``a b c d``: ``"reflect"`` (``grid-mirror``) ``ba|abcd|dc``,
            ``"constant"`` (``grid-constant``) ``cval``, ``"nearest"`` ``aa|abcd|dd``, ``"mirror"`` ``cb|abcd|cb``,
            ``"wrap"`` (``grid-wrap``) ``cd|abcd|ab``.
        cval: what lies outside with mode ``"constant"``.
        origin: shifts the weights: an integer for all axes, or one for each.
        axes: the axes to filter along; all of them by default.

    Returns:
        The result, or ``output`` itself where it is an array.

    Raises:
        ValueError: an unknown mode, an origin outside the weights, axes or shapes that do not fit.
        TypeError: dtypes that cannot be computed; see `leanconv.ndimage` for the classes.

    >>> correlate([0, 0, 1, 0, 0], [1, 2, 3]).tolist()
    [0, 3, 2, 1, 0]
    """
    return _filter(input, weights, output, mode, cval, origin, axes, flip=False)


@overload
def convolve(
    input: np.ndarray, weights: Any, output: Any = ..., mode: ScipyMode = ..., cval: float = ...,
    origin: int | Sequence[int] = ..., *, axes: int | Sequence[int] | None = ...,
) -> np.ndarray: ...  # fmt: skip
@overload
def convolve(
    input: Foreign, weights: Any, output: Any = ..., mode: ScipyMode = ..., cval: float = ...,
    origin: int | Sequence[int] = ..., *, axes: int | Sequence[int] | None = ...,
) -> Foreign: ...  # fmt: skip
@overload
def convolve(
    input: npt.ArrayLike, weights: Any, output: Any = ..., mode: ScipyMode = ..., cval: float = ...,
    origin: int | Sequence[int] = ..., *, axes: int | Sequence[int] | None = ...,
) -> np.ndarray: ...  # fmt: skip
@at_home
def convolve(
    input: Any,
    weights: Any,
    output: Any = None,
    mode: ScipyMode = "reflect",
    cval: float = 0.0,
    origin: int | Sequence[int] = 0,
    *,
    axes: int | Sequence[int] | None = None,
) -> Any:
    """Convolve an array with weights, as ``scipy.ndimage.convolve`` does: `correlate` with the weights flipped.

    ``out[i] = Σ_u weights[u] · input[i − u + weights.shape // 2 + origin]``. Arguments, result and errors are those of
    `correlate`.

    >>> convolve([0, 0, 1, 0, 0], [1, 2, 3]).tolist()
    [0, 1, 2, 3, 0]
    """
    return _filter(input, weights, output, mode, cval, origin, axes, flip=True)


def _filter(x: Any, weights: Any, output: Any, mode: Any, cval: Any, origin: Any, axes: Any, *, flip: bool) -> Any:
    taps = to_numpy(weights, "weights")
    if is_complex(x) or is_complex(taps):
        taps = taps.conj() if is_complex(taps) and not flip else taps
        out = output_for(x, output, is_complex=True)
        wide = np.float64 if out.dtype == np.complex128 else np.float32

        def real(part: np.ndarray, weights: np.ndarray, into: Any, value: float) -> np.ndarray:
            return _filter(part, weights, wide, mode, value, origin, axes, flip=flip)

        return by_parts(real, x, taps, out, cval)
    if isinstance(x, np.ndarray):
        check_real("input", x.dtype)
    check_real("weights", taps.dtype)
    taps, anchor = _place(x.ndim, taps.astype(np.float64), origin, axes, flip)
    if not isinstance(mode, str) and isinstance(mode, Iterable):
        raise MistakeError(f"mode={mode!r}: weights of several dimensions take one mode for all axes")
    border = border_of(mode)
    out = output_for(x, output)
    (on_cpu.window if isinstance(x, np.ndarray) else on_device.correlate)(x, taps, anchor, border, cval, out)
    return out


def _place(ndim: int, taps: np.ndarray, origin: Any, axes: Any, flip: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """The weights with one axis for each axis of the input, and the element of them that lies on the output pixel."""
    along = axes_of(axes, ndim)
    if taps.ndim != len(along):
        raise MistakeError(f"weights.ndim ({taps.ndim}) must match len(axes) ({len(along)})")
    if 0 in taps.shape:
        raise MistakeError(f"weights have shape {taps.shape}; they must not be empty")
    origins = [operator.index(each) for each in sequence("origin", origin, len(along))]
    # NOTE: as in SciPy, the weights' dimensions stand for the axes in rising order, whatever the order of ``axes``;
    # the origins follow the order of ``axes`` unless that names all of them.
    shifts = origins if len(along) == ndim else [o for _, o in sorted(zip(along, origins, strict=True))]
    anchor = [0] * ndim
    shape = [1] * ndim
    for axis, size, shift in zip(sorted(along), taps.shape, shifts, strict=True):
        at = size // 2 + (-shift - (1 - size % 2) if flip else shift)
        if not 0 <= at < size:
            raise ValueError(f"origin={origin!r} lies outside the weights, of shape {taps.shape}")
        anchor[axis], shape[axis] = at, size
    return np.ascontiguousarray(np.flip(taps) if flip else taps).reshape(shape), tuple(anchor)


def to_numpy(array: Any, name: str) -> np.ndarray:
    """The caller's argument ``name`` as a NumPy array, from any device. One on a GPU is copied, after a wait.

    Raises ValueError where that would lose a gradient, DtypeError for a dtype that NumPy does not have.
    """
    if isinstance(array, np.ndarray):
        return array
    library = arrays_of(array)
    if library is not None and hasattr(array, "cpu"):
        check_numpy_has(name, array)
        try:
            return library.to_numpy(array.cpu())
        except (NotImplementedError, TypeError) as error:  # of tensors without memory of their own, or sparse ones
            raise TypeError(f"{name} has no elements that NumPy can read: {error}") from error
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):
        return np.asarray(array.get())
    return np.asarray(array)
