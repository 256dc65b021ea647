"""A call: find the ready call that an equal one has left, or resolve this one, bind it, and keep it."""

from __future__ import annotations

from typing import Any

from leanconv import options
from leanconv.arrays import arrays_of, by_type, way_back
from leanconv.arrays.operands import gather
from leanconv.call import bind
from leanconv.call.ready import Call
from leanconv.call.resolve import resolve
from leanconv.call.weights import PreparedWeights
from leanconv.options import FUNCTIONS, Options
from leanconv.runtime.recent import Recent

#: Ready calls; a network has some 50. A ready call takes 6 kB, and its kernels some 100 kB of GPU memory.
_calls: Recent[Any, Call] = Recent(1024)


def run(asked: Options, x: Any, w: Any, bias: Any = None, out: Any = None, numbers: tuple[Any, ...] = ()) -> Any:
    """Run a call: if an equal one has run before, this is a look-up and a launch.

    ``numbers`` are value and delta of a filter, if they are not 0.
    """
    arrays = by_type.get(type(x)) or arrays_of(x)
    if arrays is None:
        return _run_carried(asked, x, w, bias, out, numbers)
    signature = arrays.signature
    kind = type(w)
    try:
        key: Any = (
            (asked, type(x), kind, signature(x), signature(w))
            if kind is not PreparedWeights
            else (asked, type(x), kind, signature(x), signature(w.array), type(w.array))
        )
        if bias is not None or out is not None:
            others = (None if each is None else (type(each), signature(each)) for each in (bias, out))
            key = key, *others
        call = _calls.get(key) or _calls.recall(key)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        call = key = None  # arrays of several libraries, or an option of a strange type; resolving sorts it out
    if call is None:
        resolved = resolve(asked, x, w, bias, out)
        call = bind.bind(resolved)
        x, w, bias, out = resolved.given
        if key is not None:
            _calls.keep(key, call)
    if numbers:
        dtype = arrays.dtype(x)
        numbers = tuple(map(options.scalar, ("value", "delta"), numbers, (dtype, dtype)))
    return call(x, w, bias, out, *numbers)


def _run_carried(asked: Options, x: Any, w: Any, bias: Any, out: Any, numbers: tuple[Any, ...]) -> Any:
    """`run` with arrays of a library that another one has to carry."""
    names = FUNCTIONS[asked.function].names if isinstance(asked, options.LayerOptions) else ("image", "kernel")
    back = way_back(x)
    carried, _, _ = gather(x, w.array if isinstance(w, PreparedWeights) else w, bias, out, names)
    w = w if isinstance(w, PreparedWeights) else carried[names[1]]
    return back(run(asked, carried[names[0]], w, carried.get("bias"), out, numbers))


def forget() -> None:
    """Drop every ready call, so that the next one chooses anew. For tests, and after tuning."""
    _calls.clear()
    bind.forget()
