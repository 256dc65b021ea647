"""Ready calls: find the one that an equal call left, or describe the call, bind it, and keep it."""

from __future__ import annotations

from collections.abc import Callable
from marshal import dumps
from typing import Any

from leanconv.arrays import arrays_of, way_back
from leanconv.arrays.operands import gather
from leanconv.call import arguments, bind
from leanconv.call.describe import Described
from leanconv.call.run import Call
from leanconv.call.weights import PreparedWeights
from leanconv.runtime.env import raw_workspace_limit
from leanconv.runtime.recent import Recent

#: Ready calls; a network has some 50. A ready call takes 6 kB, and its kernels some 100 kB of GPU memory.
_calls: Recent[Any, Call] = Recent(1024)
#: The stores that `forget` empties.
_stores: list[Recent[Any, Any]] = [_calls]
#: the last version of the format in which equal values of equal types have equal bytes
MARSHAL_VERSION = 2


def run(
    describes: Callable[..., Described],
    x: Any,
    w: Any,
    bias: Any,
    out: Any,
    workspace_limit: Any,
    counts: tuple[Any, ...],
    words: tuple[Any, ...],
    names: tuple[str, str] = ("x", "w"),
    numbers: tuple[Any, ...] = (),
) -> Any:
    """Run a call that ``describes`` describes: if an equal call has run before, this is a look-up and a launch.

    ``counts``, then ``words``, are the options of the call: counts may be numbers, which the key tells apart by type.
    ``numbers`` are value and delta of a filter, if they are not 0; ``names`` are what the caller calls x and w.
    """
    arrays, back = arrays_of(x), None
    if arrays is None:
        back = way_back(x)
        filters = w.array if isinstance(w, PreparedWeights) else w
        carried, arrays, _ = gather(x, filters, bias, out, names)
        x, bias = carried[names[0]], carried.get("bias")
        w = w if isinstance(w, PreparedWeights) else carried[names[1]]
    signature = arrays.signature
    filters = w.array if isinstance(w, PreparedWeights) else w
    try:
        key = (
            describes, type(x), signature(x), type(w), type(filters), signature(filters),
            None if bias is None else (type(bias), signature(bias)),
            None if out is None else (type(out), signature(out)),
            raw_workspace_limit() if workspace_limit is None else (workspace_limit, type(workspace_limit)), words,
            # NOTE: 1, True and 1.0 are equal, and only one of them is a stride; as bytes they differ
            dumps(counts, MARSHAL_VERSION),
        )  # fmt: skip
        call = _calls.get(key)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        call = key = None  # arrays of several libraries, or an option of a strange type; describing sorts it out
    if call is None and key is not None:
        call = _calls.recall(key)
    if call is None:
        plain = arguments.plain(counts)
        if plain is not counts:  # NumPy's integers and the like: the ready call is kept for what they mean
            result = run(describes, x, w, bias, out, workspace_limit, plain, words, names, numbers)
            return result if back is None else back(result)
        described = describes(x, w, bias, out, workspace_limit, *counts, *words)
        call = bind.bind(described)
        x, w, bias, out = described.given
        if key is not None:
            _calls.keep(key, call)
    if numbers:
        dtype = arrays.dtype(x)
        value, delta = (arguments.scalar(n, v, dtype) for n, v in zip(("value", "delta"), numbers, strict=True))
        result = call(x, w, bias, out, value, delta)
    else:
        result = call(x, w, bias, out)
    return result if back is None else back(result)


def store() -> Recent[Any, Any]:
    """Somewhere to keep ready calls, which `forget` empties."""
    _stores.append(Recent(_calls.size))
    return _stores[-1]


def forget() -> None:
    """Drop every ready call, so that the next one chooses anew. For tests, and after tuning."""
    for each in _stores:
        each.clear()
    bind.forget()
