"""A layer with images of one shape: what was decided, and what computes a call that is as the one before.

Such a call is known by one guard (`switches.alike`), which checks most of what a call depends on. A function that is
made once checks the rest (addresses, stream, device) and computes; it returns None where the long way must decide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from leanconv.runtime.driver import CudaError
from leanconv.torch.deciding import Choice
from leanconv.torch.layers import conv_precision
from leanconv.torch.packed import PackedFilters, signature
from leanconv.torch.report import Line
from leanconv.torch.switches import (
    address,
    alike,
    capturing,
    of_cudnn,
    quick_left,
)

#: How often each layer looks at how it is called before it does so seldom: once in so many calls that are not as the
#: one before, such as the first of an epoch and of an evaluation.
_MOST_LOOKS, _SELDOM = 8, 64

#: What computes a call of images, filters and bias that are alike: see below. Its result is None where it cannot.
Quick = tuple[Any, ...]
_data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


class Layer:
    """A layer with images of one shape: what was decided."""

    __slots__ = (
        "alike", "backward", "bias", "call", "cudnn", "dtype", "eager", "function", "given", "input", "is_float32",
        "key", "line", "looks", "memory", "options", "packed", "problem", "quick", "ready", "recorded", "tf32",
        "version", "weight", "weight_ref",
    )  # fmt: skip

    def __init__(
        self, key: tuple[Any, ...], choice: Choice, input: Any, weight: Any, bias: Any, options: tuple[Any, ...],
        gone: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self.key = key
        self.call, self.ready, self.line, self.options = choice.call, choice.ready, choice.line, options
        #: as `Choice.eager`
        self.eager = choice.eager
        #: ``gone`` is called where the filters are freed
        self.weight_ref = weakref.ref(weight, gone)
        self.weight, self.bias = signature(weight), None if bias is None else signature(bias)
        self.input = input.data_ptr() & 15, input.get_device(), input.is_neg()
        #: of a layer that PyTorch gives to cuDNN as it is: cuDNN's arguments
        taken = self.call is not None and self.eager is None
        self.cudnn = None if taken or key[-1] is not None else of_cudnn(input, weight, bias, options)
        #: kept filters, what computes with them, and its ready call
        self.packed: tuple[PackedFilters, Callable[..., Any], Any] | None = None
        #: what the call computes, where filters may be kept for it; and how often they had changed at the call before
        self.problem, self.version = choice.problem, -1
        #: by the gradients that are wanted, of images and of filters: the lines of all that is left to PyTorch, forward
        #: and backward, if all is; else None
        self.backward: dict[tuple[bool, bool], tuple[Line, ...] | None] = {}
        #: whether tensors, and the modes and transforms that the dispatcher goes by, are as at the call before: of
        #: images, of filters where the layer is taken, and of a bias; None where it cannot be said
        self.alike: Callable[..., bool] | None = None
        #: what computes a call whose tensors are alike, without a gradient and with one; None: the long way
        self.quick: Quick | None = None
        self.recorded: Quick | None = None
        #: how often it was called otherwise
        self.looks = 0
        _, self.function, *_, self.given, self.tf32, self.dtype = key
        self.is_float32 = input.dtype is torch.float32
        self.memory = memory_of(input, weight, bias)

    def knows(self, input: Any, weight: Any, bias: Any) -> bool:
        """Whether tensors are alike those of `look`."""
        if self.alike is None or (bias is None) is not (self.bias is None):
            return False
        given = (input,) if self.call is None else (input, weight)
        return self.alike(*given) if bias is None else self.alike(*given, bias)

    def look(self, input: Any, weight: Any, bias: Any) -> None:
        """Let the next call with tensors alike skip the key. One that is called otherwise each time seldom looks."""
        self.looks += 1
        if (bias is None) is not (self.bias is None) or (self.looks > _MOST_LOOKS and self.looks % _SELDOM):
            return
        ready = self.call is not None and self.dtype is None
        if ready and not (self.fits(input, bias) and signature(weight) == self.weight):
            return
        self.recorded = self.quick = None
        # PyTorch's convolution asks itself what filters are like
        given = (input,) if self.call is None else (input, weight)
        self.alike = alike(*given) if bias is None else alike(*given, bias)
        if self.alike is None or (self.call is not None and self.eager is None):
            return
        cudnn = self.cudnn is not None and bias is None
        stream = None if self.call is None else self.ready.stream
        self.quick = quick_left(self.known(), self.eager or self.line, self.options, self.tf32, stream, cudnn)

    def known(self) -> tuple[Any, ...]:
        """What a call must be like that is as the one before: see `Quick`."""
        word = conv_precision() if self.dtype is None and self.is_float32 else None
        return self.function, self.bias is not None, self.given, self.alike, self.call is None, word, self.dtype

    def fits(self, input: Any, bias: Any) -> bool:
        """Whether the ready call is one for these tensors too; shape and memory order of the images are the same."""
        at = address(input)
        return (
            at is not None
            and at != 0
            and (at & 15, input.get_device(), input.is_neg()) == self.input
            and (None if bias is None else signature(bias)) == self.bias
        )


def memory_of(x: Any, w: Any, bias: Any) -> tuple[Any, ...]:
    """What a ready call depends on besides sizes and strides: alignment of the images, addresses of the parameters."""
    return x.data_ptr() & 15, w.data_ptr(), None if bias is None else bias.data_ptr()


# What computes a call as the one before: a tuple that begins with a function of itself, images, filters, bias and the
# layer, and goes on with what such a call is like (`Layer.known`). So a layer brings little memory of its own that the
# host must fetch: a network has more than its caches. None of these keeps a layer, or the memory of a tensor.


def through_layers(layer: Layer, run: Callable[..., Any], layers: Any) -> Quick:
    """A call by ``run``, which finds ``layers`` behind all the rest: `leanconv.torch.functions.Layers`."""
    return run, *layer.known(), weakref.ref(layers)


def taken(layer: Layer) -> Quick | None:
    """A layer that leanconv computes without a gradient and without autocast; None where more is to be done."""
    call: Any = layer.ready if layer.packed is None else layer.packed[2]
    if layer.dtype is not None or layer.problem is not None or call is None:
        return None
    parts = call.quick()
    if parts is None:
        return None
    weights, preparation = (None, None) if layer.packed is None else (layer.packed[0].weights, call.preparation)
    signals = layer.function.axes == 1
    return _taken, *layer.known(), layer.line, *layer.memory, *parts, signals, weights, preparation


def _taken(quick: Quick, x: Any, w: Any, bias: Any, layer: Layer) -> Any:
    (_, _, _, _, _, _, _, _, line, aligned, w_at, bias_at,
     device, stream_of, allocate, run, signals, weights, preparation) = quick  # fmt: skip
    x_at = _data_ptr(x)
    # of tensors that are alike only their memory is asked
    if x_at & 15 != aligned or _data_ptr(w) != w_at or _current_device() != device:
        return None
    if bias_at is None:
        bias_at = 0
    elif _data_ptr(bias) != bias_at:
        return None
    stream, prepared_at = stream_of(), 0
    if weights is not None:
        # a CUDA graph packs what the filters are when it is replayed
        kept = None if stream and capturing() else weights.kept_for(preparation, w._version, stream)
        if kept is None:
            return None
        prepared_at = kept.address
    y = allocate()
    y_at = _data_ptr(y)
    if not y_at:
        return None
    try:
        run(stream, (x_at, w_at, bias_at, y_at, 0, prepared_at), True)
    except CudaError:  # the long way raises it again, unless it is that this thread has no context yet
        return None
    line.calls += 1
    return y.squeeze(-2) if signals else y
