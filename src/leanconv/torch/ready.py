"""The quick way through a layer: its ready calls, forward and backward, behind one look-up each.

`leanconv.conv2d` and its like serve every library and option; a layer that PyTorch differentiates comes by three times
in a step with tensors of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from marshal import dumps
from typing import Any

import torch

from leanconv.arrays import arrays_of
from leanconv.call import bind, describe, ready
from leanconv.runtime.env import raw_workspace_limit
from leanconv.runtime.recent import Recent

#: of one precision, and with integers left out: what is differentiated is of floating point
FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float64
#: the gradients' calls of a layer; more than one pair where gradients come in several memory orders
_MOST_GRADIENTS = 8

Signature = Callable[[Any], Hashable]


def refuse(x: Any) -> None:
    """Raise TypeError for integers."""
    if x.dtype not in FLOATS:
        raise TypeError(
            f"the input has dtype {x.dtype}; leanconv.torch takes floating-point numbers (leanconv.conv2d takes int8 "
            "and uint8 too, without gradients)"
        )


class Layer:
    """A layer of tensors of one shape, memory order, dtype and device, and of one set of options."""

    __slots__ = "_gradients", "_options", "_shapes", "_signature", "forward"

    def __init__(self, x: Any, w: Any, bias: Any, options: tuple[Any, ...], signature: Signature) -> None:
        refuse(x)
        self._options = options
        self._signature = signature
        self._shapes = tuple(x.shape), tuple(w.shape)
        self._gradients: Recent[Any, tuple[Any, Any]] = Recent(_MOST_GRADIENTS)
        # without a word on gradients: these are ours to compute
        given = x.detach(), w.detach(), None if bias is None else bias.detach()
        *about, precision, alike = options
        describes: Any = describe.conv2d
        #: the ready call
        self.forward = bind.bind(describes(*given, None, None, *about, alike, None, "auto", precision, None, None))

    def backward(self, grad: Any, x: Any, w: Any) -> tuple[Any, Any]:
        """Gradients of x and w; None where w, or x, which they need, is None."""
        signature = self._signature
        key = signature(grad), None if x is None else signature(x), None if w is None else signature(w)
        calls = self._gradients.get(key) or self._gradients.recall(key)
        if calls is None:
            calls = self._bound(grad.detach(), x, w)
            self._gradients.keep(key, calls)
        by_input, by_weight = calls
        dx = None if by_input is None else by_input(grad, w, None, None)
        return dx, None if by_weight is None else by_weight(x, grad, None, None)

    def _bound(self, grad: Any, x: Any, w: Any) -> tuple[Any, Any]:
        x_shape, w_shape = self._shapes
        by_input, by_weight = describe.conv2d_input, describe.conv2d_weight
        return (
            None if w is None else self._bind(by_input, grad, w.detach(), x_shape, self._options[-1]),
            # a sum over the images, which no image has to itself
            None if x is None else self._bind(by_weight, x.detach(), grad, w_shape, False),
        )

    def _bind(self, describes: Callable[..., Any], first: Any, second: Any, shape: tuple[int, ...], alike: bool) -> Any:
        *about, precision, _ = self._options
        return bind.bind(
            describes(first, second, None, None, None, shape, *about, alike, None, "auto", precision, None)
        )


_layers: Recent[Any, Layer] = ready.store()


def layer(x: Any, w: Any, bias: Any, options: tuple[Any, ...]) -> Layer | None:
    """The layer of a call; None for what only `leanconv.conv2d` sorts out: tensors without memory, strange numbers.

    Raises what `leanconv.conv2d` raises.
    """
    arrays = arrays_of(x)
    if arrays is None:
        return None
    signature = arrays.signature
    try:
        key = (
            signature(x), signature(w), None if bias is None else signature(bias), raw_workspace_limit(),
            # NOTE: 1, True and 1.0 are equal, and only one of them is a stride; as bytes they differ
            dumps(options, ready.MARSHAL_VERSION),
        )  # fmt: skip
        found = _layers.get(key) or _layers.recall(key)
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return None
    if found is None:
        found = Layer(x, w, bias, options, signature)
        _layers.keep(key, found)
    return found
