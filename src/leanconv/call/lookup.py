"""A call: find the ready call that an equal one has left, or resolve this one, bind it, and keep it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import get_ident
from typing import Any

from leanconv import options
from leanconv.arrays import arrays_of, by_type, carried, way_back
from leanconv.arrays.operands import Epilogue, as_epilogue, together
from leanconv.call import bind
from leanconv.call.gpu_call import Call
from leanconv.call.resolve import resolve
from leanconv.call.weights import PreparedWeights
from leanconv.options import FUNCTIONS, Options
from leanconv.runtime.bounded_cache import BoundedCache

#: Ready calls; a network has some 50. A ready call takes 6 kB, and its kernels some 100 kB of GPU memory.
_calls: BoundedCache[Hashable, Call] = BoundedCache(1024)
#: What computes a small image on the CPU, under the arguments of its filter (`as_before`).
routines: BoundedCache[Hashable, Callable[[Any], Any]] = BoundedCache(256)
#: By thread, where `as_before` wants to know it: x, the ready call, w, numbers and the result of the last call.
watched: dict[int, tuple[Any, ...] | None] = {}


def run(requested: Options, x: Any, w: Any, bias: Any = None, out: Any = None, numbers: tuple[float, ...] = ()) -> Any:
    """Run a call: if an equal one has run before, this is a look-up and a launch.

    ``bias`` is an `Epilogue` where a layer has more beside x and w. ``numbers`` are value and delta of a filter, if
    they are not 0.
    """
    arrays = by_type.get(type(x)) or arrays_of(x)
    if arrays is None:
        return _run_carried(requested, x, w, bias, out, numbers)
    signature = arrays.signature
    kind = type(w)
    try:
        key: Hashable = (
            (requested, type(x), kind, signature(x), signature(w))
            if kind is not PreparedWeights
            else (requested, type(x), kind, signature(x), signature(w.array), type(w.array), w.kept)
        )
        if bias is not None or out is not None:
            beside: Hashable = None
            if type(bias) is Epilogue:
                beside = tuple([None if each is None else (type(each), signature(each)) for each in bias])
            elif bias is not None:
                beside = type(bias), signature(bias)
            key = key, beside, None if out is None else (type(out), signature(out))
        call = _calls.get(key) or _calls.recall(key)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        call = key = None  # arrays of several libraries, or an option of a strange type; resolving sorts it out
    if call is None:
        resolved = resolve(requested, x, w, bias, out)
        call = bind.bind(resolved)
        x, w, bias, out = resolved.given
        if key is not None:
            _calls.keep(key, call)
    if numbers:
        value, delta = numbers
        numbers = options.filter_numbers(value, delta, *call.types)
    y = call(x, w, bias, out, *numbers)
    if watched and bias is None and out is None and (me := get_ident()) in watched:
        watched[me] = x, call, w, numbers, y
    return y


def _run_carried(requested: Options, x: Any, w: Any, bias: Any, out: Any, numbers: tuple[float, ...]) -> Any:
    """`run` with arrays of a library that another one has to carry."""
    first, second = "image", "kernel"
    if isinstance(requested, options.LayerOptions):
        first, second = FUNCTIONS[requested.function].names
        if requested.grad_bias:
            raise TypeError("grad_bias is taken for arrays of NumPy, CuPy and PyTorch only")
    elif requested.slice_anchor is not None:
        first = "volume"
    back = way_back(x)
    x = carried(x, first)
    w = w if isinstance(w, PreparedWeights) else carried(w, second)
    beside = as_epilogue(bias)._asdict()
    bias = together(*[None if each is None else carried(each, name) for name, each in beside.items()])
    if out is not None:
        raise TypeError("out is taken for arrays of NumPy, CuPy and PyTorch only")
    return back(run(requested, x, w, bias, out, numbers))


def forget() -> None:
    """Drop every ready call, so that the next one chooses anew. For tests, and after tuning."""
    _calls.clear()
    routines.clear()
    bind.forget()
