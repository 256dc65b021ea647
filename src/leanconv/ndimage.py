"""``correlate`` and ``convolve`` with the signature and the meaning of ``scipy.ndimage``.

NumPy arrays, and everything that NumPy converts to an array, may have any number of dimensions and any real dtype that
SciPy takes. They are computed in float64 and cast to the output's dtype, as SciPy does. For integer and boolean outputs
the order of the sum is SciPy's too, each product and each sum rounded, so that truncation gives the same integers; for
float outputs the order is free, which moves results by a few units of float64 roundoff.

Arrays of other libraries (CuPy, PyTorch, DLPack) must be two-dimensional float32 or int32. `leanconv.filter2d` computes
them on their device, in their own dtype: float32 sums, int32 sums that wrap around.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, overload

import numpy as np
import numpy.typing as npt

from leanconv.arrays import NUMPY, arrays_of
from leanconv.cpu.filter2d import Banded, Taps
from leanconv.cpu.lines import line_indices
from leanconv.dtypes import GPU_FILTERS
from leanconv.images.borders import SCIPY_NAMES, BorderName, ScipyMode
from leanconv.problem import FilterProblem


class _Exchanged(Protocol):
    """An array of another library."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...


Foreign = TypeVar("Foreign", bound=_Exchanged)

#: SciPy leaves out taps that are not larger than this, so an Inf under such a tap does no harm.
_LEAST_WEIGHT = np.finfo(np.float64).eps


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
        input: array of any shape and real dtype; of another library than NumPy: (h, w), float32 or int32.
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
        TypeError: complex data, and dtypes that cannot be computed.

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


def _filter(x: Any, weights: Any, output: Any, mode: str, cval: float, origin: Any, axes: Any, *, flip: bool) -> Any:
    if not isinstance(mode, str) or mode not in SCIPY_NAMES:
        raise ValueError(f"mode={mode!r} is not known; choose one of {', '.join(map(repr, SCIPY_NAMES))}")
    border = SCIPY_NAMES[mode]
    library = arrays_of(x)
    foreign = hasattr(x, "__dlpack__") if library is None else library is not NUMPY
    if not foreign:
        x = np.asarray(x)
        _check_real("input", x.dtype)
    taps = _to_numpy(weights)
    _check_real("weights", taps.dtype)
    taps, anchor = _place(x.ndim, taps.astype(np.float64), origin, axes, flip)
    if foreign:
        return _on_device(x, taps, output, border, cval, anchor)
    out = _output(x, output)
    # The output may be the input, so it is filled from a finished result.
    out[...] = _compute(x, taps, anchor, border, cval, out.dtype)
    return out


def _place(ndim: int, taps: np.ndarray, origin: Any, axes: Any, flip: bool) -> tuple[np.ndarray, tuple[int, ...]]:
    """The weights with one axis for each axis of the input, and the element of them that lies on the output pixel."""
    along = _axes(axes, ndim)
    if taps.ndim != len(along):
        raise ValueError(f"weights have {taps.ndim} dimensions, and {len(along)} axes are filtered")
    if 0 in taps.shape:
        raise ValueError(f"weights have shape {taps.shape}; they must not be empty")
    if isinstance(origin, Iterable):
        origins = [operator.index(o) for o in origin]
        if len(origins) != len(along):
            raise ValueError(f"origin={origin!r} has {len(origins)} numbers, and {len(along)} axes are filtered")
    else:
        origins = [operator.index(origin)] * len(along)
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


def _axes(axes: Any, ndim: int) -> tuple[int, ...]:
    if axes is None:
        return tuple(range(ndim))
    along = tuple(operator.index(a) for a in (axes if isinstance(axes, Iterable) else (axes,)))
    for axis in along:
        if not -ndim <= axis < ndim:
            raise ValueError(f"axes={axes!r}: {axis} is out of range for {ndim} dimensions")
    along = tuple(axis % ndim for axis in along)
    if len(set(along)) != len(along):
        raise ValueError(f"axes={axes!r} must not name an axis twice")
    return along


def _check_real(name: str, dtype: np.dtype) -> None:
    if dtype.kind not in "biuf" or dtype in (np.dtype(np.float16), np.dtype(np.longdouble)):
        # NOTE: on some machines longdouble is float64, which is fine.
        if dtype != np.dtype(np.float64):
            raise TypeError(f"{name} has dtype {dtype}; it must be boolean, an integer, float32 or float64")


def _output(x: np.ndarray, output: Any) -> np.ndarray:
    if output is None:
        return np.empty(x.shape, x.dtype.newbyteorder("="))
    if isinstance(output, (type, np.dtype, str)):
        out = np.empty(x.shape, np.dtype(output))
    else:
        out = output
        if not isinstance(out, np.ndarray):
            raise TypeError(f"output is a {type(out).__name__}; it must be None, a dtype or a NumPy array")
        if out.shape != x.shape:
            raise ValueError(f"output has shape {out.shape}; the input has {x.shape}")
        if not out.flags.writeable:
            raise ValueError("output is read-only")
    _check_real("output", out.dtype)
    return out


def _compute(
    x: np.ndarray, taps: np.ndarray, anchor: tuple[int, ...], border: BorderName, cval: float, dtype: np.dtype
) -> np.ndarray:
    if x.size == 0:
        return np.empty(x.shape, dtype)
    wide = tuple(axis for axis in range(x.ndim) if taps.shape[axis] > 1)
    # Axes before the first one and, if two neighbours are filtered, nothing after them: that is a batch of images.
    if x.ndim and len(wide) <= 2 and all(axis >= x.ndim - 2 for axis in wide):
        image = x.reshape(-1, *((1, *x.shape)[-2:]))
        kernel = taps.reshape((1, *taps.shape)[-2:])
        result = _compute_images(image, kernel, ((0, *anchor)[-2:]), border, cval, dtype)
        return result.reshape(x.shape)
    return _cast(_taps_nd(x.astype(np.float64), taps, anchor, border, cval), dtype)


def _compute_images(
    x: np.ndarray, kernel: np.ndarray, anchor: tuple[int, ...], border: BorderName, cval: float, dtype: np.dtype
) -> np.ndarray:
    batch, h, w = x.shape
    (kh, kw), (ay, ax) = kernel.shape, anchor
    problem = FilterProblem(batch=1, h=h, w=w, kh=kh, kw=kw, anchor=(ay, ax), border=border, dtype="float64")
    skipped = (np.abs(kernel) <= _LEAST_WEIGHT) & (kernel != 0)
    kernel = np.where(skipped, 0.0, kernel)
    result = np.empty(x.shape, dtype)
    sequential = dtype.kind in "biu"
    # Strips of whole images: a float64 copy of all of them would be several times the input.
    for image in range(batch):
        pixels = x[image : image + 1].astype(np.float64)
        if not sequential and np.isfinite(cval) and np.isfinite(pixels.sum()):
            result[image] = Banded().run(problem, pixels, kernel, value=cval)[0]
        elif (kernel != 0).all():
            result[image] = _cast(Taps().run(problem, pixels, kernel, value=cval)[0], dtype)
        else:
            result[image] = _cast(_taps_nd(pixels[0], kernel, anchor, border, cval), dtype)
    return result


def _taps_nd(x: np.ndarray, taps: np.ndarray, anchor: tuple[int, ...], border: BorderName, cval: float) -> np.ndarray:
    """Tap by tap in the order of the weights, leaving out those that are zero, for any number of dimensions."""
    extended = x
    for axis, (size, at) in enumerate(zip(taps.shape, anchor, strict=True)):
        if size > 1:
            source = line_indices(border, x.shape[axis], at, size - 1 - at)
            extended = np.take(extended, source, axis)
            extended[(slice(None),) * axis + (source < 0,)] = cval
    out = np.zeros(x.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        for index in np.argwhere(np.abs(taps) > _LEAST_WEIGHT):
            where = tuple(slice(i, i + n) for i, n in zip(index, x.shape, strict=True))
            out += taps[tuple(index)] * extended[where]
    return out


def _cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Float64 to ``dtype`` as C does: towards zero for integers; values out of range are undefined, as in C."""
    with np.errstate(invalid="ignore", over="ignore"):
        if dtype.kind == "b":
            # SciPy stores a bool as a byte made from the truncated number: 0.5 is false.
            return np.not_equal(values.astype(np.uint8), 0)
        return values.astype(dtype)


def _to_numpy(array: Any) -> np.ndarray:
    """Weights as a NumPy array, from any device. Those on a GPU are copied, after a wait."""
    if isinstance(array, np.ndarray):
        return array
    if hasattr(array, "detach"):
        return np.asarray(array.detach().cpu().numpy())
    if hasattr(array, "__cuda_array_interface__") and hasattr(array, "get"):
        return np.asarray(array.get())
    return np.asarray(array)


def _on_device(x: Any, taps: np.ndarray, output: Any, border: BorderName, cval: float, anchor: tuple[int, ...]) -> Any:
    """Filter an array of another library with `leanconv.filter2d`."""
    from leanconv.api import filter2d

    dtype = str(x.dtype).rsplit(".", 1)[-1]
    if x.ndim != 2 or dtype not in GPU_FILTERS:
        raise TypeError(
            f"input has shape {tuple(x.shape)} and dtype {dtype}; arrays of other libraries than NumPy must be "
            f"two-dimensional {' or '.join(GPU_FILTERS)}"
        )
    out = None
    if output is not None:
        if isinstance(output, (type, str, np.dtype)) or not hasattr(output, "shape"):
            ours = isinstance(output, (type, str, np.dtype))
            requested = np.dtype(output).name if ours else str(output).rsplit(".", 1)[-1]
            if requested != dtype:
                raise TypeError(f"output={output!r}: for arrays of other libraries it must be the input's, {dtype}")
        else:
            out = output
    kernel = taps.astype(dtype)
    if dtype == "int32" and not np.array_equal(kernel, taps):
        raise TypeError("weights are not whole int32 numbers, and the input is int32")
    # SciPy looks at cval only where it is used
    return filter2d(x, kernel, border=border, value=cval if border == "constant" else 0, anchor=anchor, out=out)
