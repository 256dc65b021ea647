"""What SciPy makes of the arguments of its filters: sequences, axes, modes, origins, outputs, complex numbers.

Where SciPy's own tests read the text of an error, it begins as SciPy's does.
"""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from leanconv.arrays import NUMPY, arrays_of, carried, way_back
from leanconv.images.borders import SCIPY_NAMES, BorderName

F = TypeVar("F", bound=Callable[..., Any])
#: a ValueError and an IndexError; NumPy 1.24 has it elsewhere
_AxisError: Any = getattr(np, "exceptions", np).AxisError


class MistakeError(ValueError, RuntimeError):
    """A mistake for which SciPy raises RuntimeError, and the rest of leanconv ValueError."""


class DtypeError(TypeError, RuntimeError):
    """A dtype that cannot be computed: SciPy raises RuntimeError for it, and the rest of leanconv TypeError."""


def sequence(name: str, value: Any, count: int) -> list[Any]:
    """One value for each of ``count`` axes: the same for all, or one for each."""
    if isinstance(value, str) or not np.iterable(value):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise MistakeError(f"sequence argument must have length equal to input rank, here {count}: {name}={value!r}")
    return values


def axes_of(axes: Any, ndim: int) -> tuple[int, ...]:
    """The axes to filter along, in the caller's order; all by default."""
    if axes is None:
        return tuple(range(ndim))
    if not np.isscalar(axes) and not isinstance(axes, Iterable):
        raise ValueError(f"axes={axes!r} must be an integer, integers, or None")
    along = tuple(axis_of(each, ndim, "axes") for each in (axes if isinstance(axes, Iterable) else (axes,)))
    if len(set(along)) != len(along):
        raise ValueError(f"axes must be unique, not {axes!r}")
    return along


def axis_of(axis: Any, ndim: int, name: str = "axis") -> int:
    at = operator.index(axis)
    if not -ndim <= at < ndim:
        raise _AxisError(f"{name}: {axis} is out of range for {ndim} dimensions")
    return at % ndim


def border_of(mode: Any) -> BorderName:
    if not isinstance(mode, str) or mode not in SCIPY_NAMES:
        raise MistakeError(f"mode={mode!r} is not known; choose one of {', '.join(map(repr, SCIPY_NAMES))}")
    return SCIPY_NAMES[mode]


def anchor_of(size: int, origin: Any, shape: tuple[int, ...], given: Any) -> int:
    """The tap on the output pixel."""
    at = size // 2 + operator.index(origin)
    if not 0 <= at < size:
        raise ValueError(f"origin={given!r} lies outside the weights, of shape {shape}")
    return at


def is_complex(array: Any) -> bool:
    if isinstance(array, np.ndarray):
        return array.dtype.kind == "c"
    return "complex" in str(array.dtype)


_HALF, _LONG = np.dtype(np.float16), np.dtype(np.longdouble)
#: NumPy's own. ml_dtypes adds others; PyTorch converts to none of those.
_NUMPY_DTYPES = frozenset(np.dtype(code).name for code in np.typecodes["All"])


def check_real(name: str, dtype: np.dtype) -> None:
    """Raise DtypeError for what SciPy does not compute: float16, long doubles, objects, strings, dates."""
    # NOTE: on some machines longdouble is float64, which is fine
    narrow = dtype in (_HALF, _LONG) and dtype != np.dtype(np.float64)
    if dtype.kind not in "biuf" or narrow:
        raise DtypeError(f"{name} has dtype {dtype}; it must be boolean, an integer, float32, float64 or complex")


def check_numpy_has(name: str, array: Any) -> None:
    """Raise DtypeError for an array of another library whose dtype NumPy does not have, as bfloat16."""
    if dtype_name(array) not in _NUMPY_DTYPES:
        raise DtypeError(
            f"{name} has dtype {dtype_name(array)}, which NumPy does not have; convert it, for example to float32"
        )


def output_for(x: Any, output: Any, is_complex: bool = False, promotes: bool = True) -> Any:
    """The array to fill: ``output``, or a new one of the dtype that it names, by default the input's. A real dtype of a
    complex result ``promotes`` to a complex one, but in filters of several passes, as in SciPy."""
    if not isinstance(x, np.ndarray):
        return _output_on_device(x, output)
    if output is None:
        dtype = np.promote_types(x.dtype, np.complex64) if is_complex else x.dtype.newbyteorder("=")
        return np.empty(x.shape, dtype)
    if isinstance(output, (type, np.dtype, str)):
        dtype = np.dtype(output)
        if isinstance(output, str) and not issubclass(dtype.type, np.number):
            raise MistakeError(f"output={output!r} is not numeric")
        if is_complex and dtype.kind != "c":
            if isinstance(output, str) or not promotes:
                raise MistakeError(f"output={dtype} is not complex, and the result is")
            warnings.warn(f"promoting specified output dtype to complex: output={dtype}", stacklevel=4)
            dtype = np.promote_types(dtype, np.complex64)
            if dtype.kind != "c":  # text and objects
                check_real("output", dtype)
        out = np.empty(x.shape, dtype)
    else:
        out = output
        if not isinstance(out, np.ndarray):
            raise TypeError(f"output is a {type(out).__name__}; it must be None, a dtype or a NumPy array")
        if out.shape != x.shape:
            raise MistakeError(f"output has shape {out.shape}; the input has {x.shape}")
        if not out.flags.writeable:
            raise ValueError("output is read-only")
        if is_complex and out.dtype.kind != "c":
            raise MistakeError(f"output has dtype {out.dtype}, and the result is complex")
    return out


def cval_of(value: Any, x: Any) -> float | complex:
    """``cval`` as a number of Python; complex ones are taken with complex input."""
    if type(value) is float:
        return value
    imaginary = is_complex(value) if hasattr(value, "dtype") else isinstance(value, complex)
    try:
        if np.ndim(value) or isinstance(value, (str, bytes, bytearray)) or (imaginary and not is_complex(x)):
            raise TypeError
        return complex(value) if imaginary else float(value)
    except (TypeError, ValueError, OverflowError):
        kind = "complex" if is_complex(x) else "real"
        raise TypeError(f"cval={value!r} is not a number that float64 holds; the input is {kind}") from None


def dtype_name(array: Any) -> str:
    """NumPy's name of an array's dtype."""
    return str(array.dtype).rpartition(".")[2]


def _output_on_device(x: Any, output: Any) -> Any:
    """The array to fill, of the input's library and device."""
    library = arrays_of(x)
    assert library is not None
    # a dtype has a shape too
    if hasattr(output, "shape") and not isinstance(output, (type, np.dtype)):
        if tuple(output.shape) != tuple(x.shape):
            raise MistakeError(f"output has shape {tuple(output.shape)}; the input has {tuple(x.shape)}")
        return output
    name = dtype_name(x)
    if output is not None:
        name = np.dtype(output).name if isinstance(output, (type, str, np.dtype)) else str(output).rpartition(".")[2]
    return library.empty(tuple(x.shape), name, library.device(x))


def by_parts(compute: Callable[..., Any], x: np.ndarray, weights: Any, out: np.ndarray, cval: Any) -> np.ndarray:
    """``compute(x, weights, out, cval)``, which takes real arrays, of complex ones."""
    real: Any = compute(x.real, weights.real, None, np.real(cval))
    imag: Any = None
    if is_complex(weights):
        imag = compute(x.real, weights.imag, None, np.real(cval))
    if is_complex(x):
        rest = compute(x.imag, weights.real, None, np.imag(cval))
        if is_complex(weights):
            real = real - compute(x.imag, weights.imag, None, np.imag(cval))
            imag = imag + rest
        else:
            imag = rest
    out.real, out.imag = real, imag
    return out


def at_home(function: F) -> F:
    """Let ``function``, which computes NumPy arrays and arrays on a GPU, take any array, in its first argument, and
    get ``cval`` as a number of Python.

    What other libraries keep on the CPU is seen as an array of NumPy that shares its memory, an ``output`` as well, and
    the result becomes an array of that library.
    """
    names = list(inspect.signature(function).parameters)
    places: dict[str, int] = {name: names.index(name) - 1 for name in ("output", "cval") if name in names}

    def changed(
        name: str, change: Callable[[Any], Any], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments after the first, with ``change`` of the one of this name where it is given."""
        at = places.get(name, len(args))
        if at < len(args):
            return (*args[:at], change(args[at]), *args[at + 1 :])
        if name in places and name in keywords:
            keywords[name] = change(keywords[name])
        return args

    @functools.wraps(function)
    def call(*given_args: Any, **keywords: Any) -> Any:
        if not given_args and names[0] not in keywords:
            return function(**keywords)  # which says what is missing
        input, args = (given_args[0], given_args[1:]) if given_args else (keywords.pop(names[0]), ())
        library = arrays_of(input)
        numpys = library is NUMPY or (library is None and not hasattr(input, "__dlpack__"))
        x = np.asarray(input) if numpys else carried(input, names[0])
        args = changed("cval", lambda value: cval_of(value, x), args, keywords)
        if numpys:
            return function(x, *args, **keywords)
        library = arrays_of(x)
        assert library is not None
        at = places.get("output", len(args))
        given = args[at] if at < len(args) else keywords.get("output")
        back = way_back(input) if x is not input else lambda result: result
        library.refuse_gradient(x)
        if library is NUMPY or library.device(x) is not None:
            result = function(x, *args, **keywords)
            return given if result is given else back(np.asarray(result) if isinstance(result, np.generic) else result)
        check_numpy_has(names[0], x)
        if arrays_of(given) is library:
            check_numpy_has("output", given)
        output = library.to_numpy(given) if arrays_of(given) is library else _dtype_of(given)
        args = changed("output", lambda _: output, args, keywords)
        result = function(library.to_numpy(x), *args, **keywords)
        if arrays_of(given) is library:
            if not np.may_share_memory(output, library.to_numpy(given)):
                library.assign(given, library.from_numpy(output, None))
            return given
        return given if result is given else library.from_numpy(np.asarray(result), None)

    return call  # type: ignore[return-value]


def _dtype_of(output: Any) -> Any:
    """A dtype of another library as one of NumPy: ``torch.float32`` is called as NumPy's is."""
    if output is None or isinstance(output, (type, np.dtype, str)):
        return output
    try:
        return np.dtype(str(output).rpartition(".")[2])
    except TypeError:
        return output
