"""Convolutions of ``scipy.signal``, with its signatures and its meaning, on arrays of several libraries.

Arrays on the CPU are computed in float64; in float32 where the result is float32, and in some cases where it is float16
or complex64. Several threads (LEANCONV_THREADS) compute short filters by products with banded matrices, long ones by
transforms of segments that stay in the cache. So `fftconvolve`, `oaconvolve` and `convolve` are one computation, which
chooses by the sizes. Transforms have errors relative to the largest numbers of a segment.

Arrays on a GPU stay there: `leanconv.filter2d` computes short filters, the transforms of the array's library (CuPy,
PyTorch) long ones.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from leanconv.arrays import arrays_of
from leanconv.cpu.lines import FEW, correlate_line, line_indices, transform_length
from leanconv.cpu.planes import correlate_plane
from leanconv.images.borders import BorderName
from leanconv.ndimage import on_device
from leanconv.ndimage.arguments import at_home, axes_of
from leanconv.ndimage.windows import to_numpy

Mode = Literal["full", "same", "valid"]
Boundary = Literal["fill", "wrap", "symm"]

_MODES = ("full", "same", "valid")
#: SciPy's words, and ours
_BORDERS: dict[str, BorderName] = {
    "fill": "constant", "pad": "constant", "wrap": "wrap", "circular": "wrap",
    "symm": "reflect", "symmetric": "reflect",
}  # fmt: skip
#: The most taps on a GPU that `leanconv.filter2d` takes rather than transforms.
SHORT = 1024
#: One transform of all is quicker than several where so many times the taps are more than the array along each axis,
#: and the filter has some taps.
LONG, LEAST_TAPS = 8, 100
#: Integers whose sums may be larger than this are not computed in float64: a transform's error could reach a half.
EXACT = 2.0**44


@at_home
def fftconvolve(in1: Any, in2: Any, mode: Mode = "full", axes: int | Sequence[int] | None = None) -> Any:
    """Convolve two arrays, as ``scipy.signal.fftconvolve`` does.

    ``out[i] = Σ_u in2[u] · in1[i − u]`` along each of ``axes``; along the others the arrays are broadcast.

    Args:
        in1: array of any shape, real or complex, of any library.
        in2: array with as many dimensions.
        mode: ``"full"``, all of it; ``"same"``, the middle of it, as large as in1; ``"valid"``, what no padding
            reaches, where one of the two must be at least as large as the other along every axis.
        axes: the axes to convolve along; all of them by default.

    Returns:
        A new array: float32 or complex64 where both inputs are float16, float32 or complex64, else float64 or
        complex128.

    Raises:
        ValueError: an unknown mode, shapes that do not fit, axes outside or named twice.

    >>> fftconvolve([1.0, 2, 3], [0, 1, 0.5]).round(9).tolist()
    [0.0, 1.0, 2.5, 4.0, 1.5]
    """
    in2 = _second(in1, in2)
    return _convolve(in1, in2, mode, axes, np.result_type(*(_fraction(_dtype(each)) for each in (in1, in2))))


@at_home
def oaconvolve(in1: Any, in2: Any, mode: Mode = "full", axes: int | Sequence[int] | None = None) -> Any:
    """Convolve a long array with a shorter one, as ``scipy.signal.oaconvolve`` does: `fftconvolve` by another name.

    >>> oaconvolve([1.0, 2, 3, 4], [1, 1], mode="valid").tolist()
    [3.0, 5.0, 7.0]
    """
    return fftconvolve(in1, in2, mode, axes)


@at_home
def convolve(in1: Any, in2: Any, mode: Mode = "full", method: str = "auto") -> Any:
    """Convolve two arrays along all axes, as ``scipy.signal.convolve`` does; see `fftconvolve`.

    Integers stay integers, and are exact, or wrap around. ``method`` may be ``"auto"``, ``"direct"`` or ``"fft"``; it
    is checked, and sizes decide.

    >>> convolve([1, 2, 3], [0, 1, 5], mode="same").tolist()
    [1, 7, 13]
    """
    in2 = _second(in1, in2)
    if method not in ("auto", "direct", "fft"):
        raise ValueError(f"method={method!r}: acceptable method flags are 'auto', 'direct', or 'fft'")
    _check_mode(mode)
    if mode == "valid" and in1.ndim == in2.ndim:
        _swapped(tuple(in1.shape), tuple(in2.shape), range(in1.ndim))
    return _convolve(in1, in2, mode, None, np.result_type(_dtype(in1), _dtype(in2)))


@at_home
def correlate(in1: Any, in2: Any, mode: Mode = "full", method: str = "auto") -> Any:
    """Correlate two arrays along all axes, as ``scipy.signal.correlate`` does: `convolve` with in2 mirrored and
    conjugated.

    >>> correlate([1, 2, 3], [0, 1, 5]).tolist()
    [5, 11, 17, 3, 0]
    """
    in2 = _second(in1, in2)
    mirrored = _flip(in2)
    _check_mode(mode)
    if mode == "valid" and _swapped(tuple(in1.shape), tuple(in2.shape), range(in1.ndim)):
        # SciPy exchanges the two, and mirrors the result
        return _conj(_flip(convolve(in2, _conj(_flip(in1)), mode, method)))
    return convolve(in1, _conj(mirrored), mode, method)


@at_home
def convolve2d(in1: Any, in2: Any, mode: Mode = "full", boundary: Boundary = "fill", fillvalue: complex = 0) -> Any:
    """Convolve two matrices, as ``scipy.signal.convolve2d`` does.

    ``out[i, j] = Σ_uv in2[u, v] · in1[i − u, j − v]``

    Args:
        in1: matrix, real or complex, of any library.
        in2: matrix.
        mode: see `fftconvolve`.
        boundary: what lies outside in1: ``"fill"`` ``fillvalue``, ``"wrap"`` its other side, ``"symm"`` its mirror
            image.
        fillvalue: a number that the result's dtype can hold; a fraction is truncated for integers.

    Returns:
        A new matrix of the dtype that both inputs promote to. Integers are exact, and wrap around.

    Raises:
        ValueError: arrays that are no matrices, an unknown mode or boundary, shapes that do not fit ``"valid"``, an
            empty in1 whose elements a boundary should repeat, a fillvalue that is not one number or does not fit.

    >>> convolve2d([[1, 2], [3, 4]], [[1, 1]], boundary="symm", mode="same").tolist()
    [[2, 3], [6, 7]]
    """
    return _matrices("convolve2d", in1, _second(in1, in2), mode, boundary, fillvalue, flip=True)


@at_home
def correlate2d(in1: Any, in2: Any, mode: Mode = "full", boundary: Boundary = "fill", fillvalue: complex = 0) -> Any:
    """Correlate two matrices, as ``scipy.signal.correlate2d`` does.

    ``out[i, j] = Σ_uv conj(in2[u, v]) · in1[i + u, j + v]``. Arguments, result and errors are those of `convolve2d`.

    >>> correlate2d([[1, 2], [3, 4]], [[0, 1]], mode="valid").tolist()
    [[2], [4]]
    """
    return _matrices("correlate2d", in1, _second(in1, in2), mode, boundary, fillvalue, flip=False)


# Arguments


def _second(in1: Any, in2: Any) -> Any:
    """The second array, on the device of the first."""
    if isinstance(in1, np.ndarray):
        return to_numpy(in2, "in2")
    library = arrays_of(in1)
    assert library is not None
    if arrays_of(in2) is library:
        library.refuse_gradient(in2)
        return in2
    return library.from_numpy(to_numpy(in2, "in2"), library.device(in1))


def _dtype(array: Any) -> np.dtype:
    return np.dtype(str(array.dtype).rpartition(".")[2])


def _fraction(dtype: np.dtype) -> np.dtype:
    """What SciPy transforms an array in."""
    return (
        dtype
        if dtype.kind in "fc" and dtype != np.float16
        else np.dtype(np.float32 if dtype.kind == "f" else np.float64)
    )


def _flip(array: Any) -> Any:
    if hasattr(array, "flip") and not isinstance(array, np.ndarray):
        return array.flip(tuple(range(array.ndim)))
    return array[(slice(None, None, -1),) * array.ndim]


def _conj(array: Any) -> Any:
    return array.conj() if "complex" in str(array.dtype) else array


def _check_mode(mode: Any) -> None:
    if not isinstance(mode, str) or mode not in _MODES:  # an array is compared element by element
        raise ValueError(f"mode={mode!r}: acceptable mode flags are 'valid', 'same', or 'full'")


def _swapped(first: tuple[int, ...], second: tuple[int, ...], axes: Any) -> bool:
    """Whether mode "valid" exchanges the arrays. Raises ValueError where neither is at least as large."""
    if all(first[axis] >= second[axis] for axis in axes):
        return False
    if all(second[axis] >= first[axis] for axis in axes):
        return True
    raise ValueError(
        f"mode='valid': shapes {first} and {second}; one must be at least as large as the other in every dimension"
    )


# Zeros outside


def _convolve(x: Any, w: Any, mode: Any, axes: Any, dtype: np.dtype) -> Any:
    _check_mode(mode)
    if x.ndim != w.ndim:
        raise ValueError(f"in1 has {x.ndim} dimensions and in2 {w.ndim}; they should have the same dimensionality")
    if dtype.kind not in "iubfc":
        raise TypeError(f"in1 and in2 promote to {dtype}; give numbers that NumPy computes with")
    if x.ndim == 0:
        return x * w
    along = axes_of(axes, x.ndim)
    if not along:
        raise ValueError("when provided, axes cannot be empty")
    if 0 in tuple(x.shape) + tuple(w.shape):
        return np.array([]) if isinstance(x, np.ndarray) else x.reshape(-1)[:0]
    shapes = tuple(x.shape), tuple(w.shape)
    for axis in set(range(x.ndim)) - set(along):
        if 1 not in (shapes[0][axis], shapes[1][axis]) and shapes[0][axis] != shapes[1][axis]:
            raise ValueError(f"incompatible shapes for in1 and in2: {shapes[0]} and {shapes[1]}; see axis {axis}")
    # axes of one element are broadcast
    along = tuple(axis for axis in along if shapes[0][axis] != 1 and shapes[1][axis] != 1)
    if mode == "valid" and _swapped(*shapes, along):
        x, w, shapes = w, x, shapes[::-1]
    first, size = {}, {}
    for axis in along:
        n, k = shapes[0][axis], shapes[1][axis]
        first[axis] = {"full": 0, "same": (k - 1) // 2, "valid": k - 1}[mode]
        size[axis] = {"full": n + k - 1, "same": n, "valid": n - k + 1}[mode]
    compute = _on_cpu if isinstance(x, np.ndarray) else _on_device
    result = compute(x, w, along, first, size, dtype)
    if mode == "same" and tuple(result.shape) != shapes[0]:  # the middle of axes that were broadcast, too
        begin = [(now - n) // 2 for now, n in zip(result.shape, shapes[0], strict=True)]
        result = result[tuple(slice(at, at + n) for at, n in zip(begin, shapes[0], strict=True))]
    return result


def _on_cpu(
    x: np.ndarray, w: np.ndarray, axes: tuple[int, ...], first: dict[int, int], size: dict[int, int], dtype: np.dtype
) -> np.ndarray:
    if not axes:
        return np.asarray(x * w)
    if dtype.kind in "iub":
        most = float(np.abs(x.astype(np.float64)).max()) * float(np.abs(w.astype(np.float64)).sum())
        if most > EXACT:
            return _of_integers(x, w, axes, first, size, dtype)
        real = _on_cpu(x.astype(np.float64), w.astype(np.float64), axes, first, size, np.dtype(np.float64))
        return np.rint(real, out=real).astype(_wide(dtype)).astype(dtype)
    batched = any(w.shape[axis] != 1 for axis in range(w.ndim) if axis not in axes)
    shorter = all(w.shape[axis] <= x.shape[axis] for axis in axes)
    if not shorter and not batched and all(w.shape[axis] > x.shape[axis] for axis in axes):
        if all(x.shape[axis] == 1 for axis in range(x.ndim) if axis not in axes):
            full = {axis: x.shape[axis] + w.shape[axis] - 1 for axis in axes}
            whole = _on_cpu(w, x, axes, dict.fromkeys(axes, 0), full, dtype)
            return whole[tuple(_part(axis, first, size) for axis in range(x.ndim))]
    if dtype.kind == "c" and not batched and len(axes) <= 2 and shorter:
        return _by_parts(x, w, axes, first, size, dtype)
    large = all(LONG * w.shape[axis] > x.shape[axis] for axis in axes) and w.size > LEAST_TAPS
    if batched or len(axes) > 2 or not shorter or (large and bool(np.isfinite(x.sum()) and np.isfinite(w.sum()))):
        # NumPy's transforms have the precision of their input
        x, w = (each.astype(np.result_type(each, dtype.type(0).real), copy=False) for each in (x, w))
        return _transformed(np.fft, x, w, axes, first, size).astype(dtype, copy=False)
    if x.ndim == 1 and w.size <= FEW and dtype.kind == "f":
        # one line and few taps: NumPy's loop takes as long as the copies of blocks
        return np.convolve(x.astype(dtype, copy=False), w.astype(dtype, copy=False))[_part(0, first, size)]
    sums = "float32" if dtype == np.float32 else "float64"
    taps = np.flip(w.astype(np.float64)).reshape([w.shape[axis] for axis in sorted(axes)])
    anchor = [w.shape[axis] - 1 - first[axis] for axis in sorted(axes)]
    out = np.empty([size.get(axis, n) for axis, n in enumerate(x.shape)], dtype)
    if len(axes) == 1:
        correlate_line(x, taps, axes[0], anchor[0], "constant", out=out, sums=sums, transforms=sums)
    else:
        planes, results = (np.moveaxis(each, sorted(axes), (-2, -1)) for each in (x, out))
        correlate_plane(planes, taps, (anchor[0], anchor[1]), "constant", out=results, sums=sums, transforms=sums)
    return out


def _by_parts(
    x: np.ndarray, w: np.ndarray, axes: tuple[int, ...], first: dict[int, int], size: dict[int, int], dtype: np.dtype
) -> np.ndarray:
    def real(part: np.ndarray, taps: np.ndarray) -> Any:
        return _on_cpu(part, taps, axes, first, size, np.dtype(np.float64)) if taps.any() else 0.0

    result = np.zeros([size.get(axis, n) for axis, n in enumerate(x.shape)], dtype)
    result.real, result.imag = real(x.real, w.real), real(x.real, w.imag)
    if x.dtype.kind == "c":
        result.real -= real(x.imag, w.imag)
        result.imag += real(x.imag, w.real)
    return result


def _of_integers(
    x: np.ndarray, w: np.ndarray, axes: tuple[int, ...], first: dict[int, int], size: dict[int, int], dtype: np.dtype
) -> np.ndarray:
    """Tap by tap in the integers' own arithmetic, which wraps around."""
    if prod(w.shape[axis] for axis in axes) > prod(x.shape[axis] for axis in axes):
        x, w = w, x
    shape = [size.get(axis, max(n, w.shape[axis])) for axis, n in enumerate(x.shape)]
    sides = [(w.shape[axis] - 1,) * 2 if axis in axes else (0, 0) for axis in range(x.ndim)]
    extended, out = np.pad(x.astype(dtype), sides), np.zeros(shape, dtype)
    for at in np.ndindex(*(w.shape[axis] if axis in axes else 1 for axis in range(w.ndim))):
        seen, tap = [slice(None)] * x.ndim, [slice(None)] * x.ndim
        for axis in axes:
            begin = first[axis] + w.shape[axis] - 1 - at[axis]
            seen[axis], tap[axis] = slice(begin, begin + size[axis]), slice(at[axis], at[axis] + 1)
        out += extended[tuple(seen)] * w[tuple(tap)].astype(dtype)
    return out


def _transformed(fft: Any, x: Any, w: Any, axes: tuple[int, ...], first: dict[int, int], size: dict[int, int]) -> Any:
    """By one transform of all: ``fft`` is the module of the arrays' library."""
    lengths = [transform_length(x.shape[axis] + w.shape[axis] - 1) for axis in axes]
    imaginary = any("complex" in str(each.dtype) for each in (x, w))
    forward, backward = (fft.fftn, fft.ifftn) if imaginary else (fft.rfftn, fft.irfftn)
    names = ("s", "dim") if fft.__name__.startswith("torch") else ("s", "axes")
    how = dict(zip(names, (lengths, axes), strict=True))
    product = forward(x, **how) * forward(w, **how)
    whole = backward(product, **how)
    return whole[tuple(_part(axis, first, size) for axis in range(x.ndim))]


def _part(axis: int, first: dict[int, int], size: dict[int, int]) -> slice:
    return slice(first[axis], first[axis] + size[axis]) if axis in size else slice(None)


def _on_device(
    x: Any, w: Any, axes: tuple[int, ...], first: dict[int, int], size: dict[int, int], dtype: np.dtype
) -> Any:
    """On a GPU: by `leanconv.filter2d` or by the transforms of the array's library."""
    if not axes:
        return x * w
    library = arrays_of(x)
    assert library is not None
    batched = any(w.shape[axis] != 1 for axis in range(w.ndim) if axis not in axes)
    if dtype == np.float32 and not batched and prod(w.shape) <= SHORT and _fits(x, w, axes):
        shape = tuple(max(n, size.get(axis, n)) for axis, n in enumerate(x.shape))
        out = library.empty(shape, "float32", library.device(x))
        extended = library.empty(shape, "float32", library.device(x))
        extended[...] = 0
        extended[tuple(slice(0, n) for n in x.shape)] = x
        anchor = tuple(w.shape[axis] - 1 - first[axis] if axis in axes else 0 for axis in range(x.ndim))
        on_device.correlate(extended, np.flip(to_numpy(w, "in2")), anchor, "constant", 0.0, out)
        return out[tuple(slice(0, size.get(axis, n)) for axis, n in enumerate(shape))]
    if library.name == "PyTorch":
        import torch

        result = _transformed(torch.fft, x, w, axes, first, size)
        if dtype.kind in "iub":
            result = result.round().to(getattr(torch, _wide(dtype).name))
        return result.to(getattr(torch, dtype.name))
    import cupy

    result = _transformed(cupy.fft, x, w, axes, first, size)
    return (cupy.rint(result).astype(_wide(dtype)) if dtype.kind in "iub" else result).astype(dtype)


def _wide(dtype: np.dtype) -> np.dtype:
    """Integers that hold sums of such: what is cast from them wraps around, what is cast from floats need not."""
    return dtype if dtype.itemsize == 8 else np.dtype(np.int64)


def _fits(x: Any, w: Any, axes: tuple[int, ...]) -> bool:
    return len(axes) <= 2 and all(w.shape[axis] <= x.shape[axis] for axis in axes)


# Borders


def _matrices(name: str, x: Any, w: Any, mode: Any, boundary: Any, fillvalue: Any, *, flip: bool) -> Any:
    if not x.ndim == w.ndim == 2:
        raise ValueError(f"{name} inputs must both be 2-D arrays; they have {x.ndim} and {w.ndim} dimensions")
    _check_mode(mode)
    if boundary not in _BORDERS:
        raise ValueError(f"boundary={boundary!r}: acceptable boundary flags are {', '.join(map(repr, _BORDERS))}")
    shapes = tuple(x.shape), tuple(w.shape)
    swapped = mode == "valid" and _swapped(*shapes, (0, 1))
    if swapped:
        x, w = w, x
    # as a convolution
    taps = w if flip else _flip(_conj(w))
    kh, kw = w.shape
    if mode == "full":
        anchor, sizes = (kh - 1, kw - 1), (x.shape[0] + kh - 1, x.shape[1] + kw - 1)
    elif mode == "same":
        anchor = (kh // 2, kw // 2) if flip else ((kh - 1) // 2, (kw - 1) // 2)
        sizes = tuple(x.shape)
    else:
        anchor, sizes = (0, 0), (x.shape[0] - kh + 1, x.shape[1] - kw + 1)
    dtype = np.result_type(_dtype(x), _dtype(w))
    border = _BORDERS[boundary]
    result = _bordered(x, taps, anchor, sizes, border, fillvalue, dtype)
    # NOTE: as SciPy, which does not conjugate the exchanged result
    return _flip(result) if swapped and not flip else result


def _bordered(
    x: Any, w: Any, anchor: tuple[int, int], sizes: tuple[int, int], border: BorderName, value: Any, dtype: np.dtype
) -> Any:
    """``out[i] = Σ_u w[k − 1 − u] · x[i + u − anchor]``, of ``sizes``, with ``k`` the shape of w."""
    if 0 in w.shape:
        return _second(x, np.zeros([max(size, 0) for size in sizes], dtype))
    if 0 in x.shape and border != "constant":
        raise ValueError(f"in1 of shape {tuple(x.shape)} has no elements that a boundary could repeat")
    places = []
    for n, k, at, size in zip(x.shape, w.shape, anchor, sizes, strict=True):
        places.append(line_indices(border, n, at, size + k - 1 - at - n))
    if 0 in x.shape:
        x = _second(x, np.zeros([max(n, 1) for n in x.shape], _dtype(x)))  # none of which is read
    extended = x[places[0].tolist()][:, places[1].tolist()]
    if border == "constant":
        value = _number(value, dtype)
        if isinstance(extended, np.ndarray):  # of the result's type, which the value has too
            extended = extended.astype(dtype, copy=False)
        for axis, each in enumerate(places):
            extended[tuple([slice(None)] * axis + [np.flatnonzero(each < 0).tolist()])] = value
    compute = _on_cpu if isinstance(x, np.ndarray) else _on_device
    first = {axis: k - 1 for axis, k in enumerate(w.shape)}
    return compute(extended, w, (0, 1), first, dict(enumerate(sizes)), dtype)


def _number(value: Any, dtype: np.dtype) -> Any:
    """``fillvalue`` as a number of Python, for a result of ``dtype``."""
    # NOTE: the messages begin as SciPy's, whose tests read them
    given = to_numpy(value, "fillvalue")
    number: Any = given.item() if given.size == 1 else None
    is_number = isinstance(number, numbers.Number)
    if not is_number:
        rule = "`fillvalue` must be scalar or an array with one element"
        raise ValueError(f"{rule}, and a number: fillvalue={value!r}; give one number, for example 0")
    cast = "could not cast `fillvalue` directly to the output array: "
    if np.iscomplexobj(number) and dtype.kind != "c":
        raise ValueError(f"{cast}fillvalue={value!r} is complex, and the result is {dtype}; give a real number")
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        # fractions are truncated towards zero; a NaN compares as false
        if not least - 1 < number < most + 1:
            rule = f"a result of {dtype} holds {least} to {most}; give a number of these, or arrays of a wider dtype"
            raise ValueError(f"{cast}fillvalue={value!r}, and {rule}")
    elif dtype.kind in "fc":
        try:
            complex(number)
        except OverflowError:
            raise ValueError(f"{cast}fillvalue={value!r} is beyond {dtype}; give a number that it holds") from None
    return number
