"""What computes a call of a layer that is as the one before.

It is a tuple that begins with a function of itself, images, filters, bias and the layer, and goes on with what such a
call is like (`leanconv.torch.decided.Layer.known`). So a layer brings little memory of its own that the host must
fetch: a network has more than its caches. None of these keeps a layer, or the memory of a tensor. The function returns
None where the long way must decide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from leanconv.call.gpu_call import PreparedCall
from leanconv.runtime.driver import CudaError
from leanconv.torch.packed import version_of
from leanconv.torch.switches import capturing

Quick = tuple[Any, ...]
#: the place of the function that tells the stream
_STREAM_OF = 14
_data_ptr: Callable[[Any], int] = torch.Tensor.data_ptr
_contiguous: Callable[..., Any] = torch.Tensor.contiguous
#: what PyTorch calls the memory orders of images and volumes
_FORMATS: dict[Any, Any] = {
    None: torch.contiguous_format, (0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d
}  # fmt: skip
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)


def through_layers(layer: Any, run: Callable[..., Any], layers: Any) -> Quick:
    """A call by ``run``, which finds ``layers`` behind all the rest: `Layers`."""
    return run, *layer.known(), weakref.ref(layers)


def taken(layer: Any) -> Quick | None:
    """A layer that leanconv computes without a gradient; None where more is to be done, or not yet known what."""
    packed, _, call = layer.packed or (None, None, layer.ready)
    if layer.problem is not None or call is None or (packed is None and layer.dtype is not None):
        return None
    launch = call.quick()
    if launch is None:
        return None
    copies, order, *parts = launch
    signals, (aligned, *addresses) = layer.function.axes == 1, layer.memory
    run: Callable[..., Any] = _taken if layer.dtype is None else _taken_cast
    if layer.captured is not None and packed is None:  # those of packed filters ask themselves
        run = _taken_outside_graphs
    preparation = call.preparation if isinstance(call, PreparedCall) else None
    kept = packed if packed is None or layer.dtype is not None else packed.weights
    # a copy begins where PyTorch allocates
    quick = *layer.known(), layer.line.ticks, 0 if copies else aligned, *addresses, *parts, signals, kept, preparation
    if not copies:
        return run, *quick
    form = _FORMATS.get(order)
    return None if form is None or (signals and order) else (_copied, *quick, run, form)


def _copied(quick: Quick, x: Any, w: Any, bias: Any, layer: Any) -> Any:
    """A layer of images that no kernel reads in place: some of the channels of larger ones, for instance.

    In a CUDA graph the long way decides: what copies there copies in each replay.
    """
    if quick[_STREAM_OF]() and capturing():
        return None
    return quick[-2](quick[:-2], _contiguous(x, memory_format=quick[-1]), w, bias, layer)


def _taken(quick: Quick, x: Any, w: Any, bias: Any, layer: Any) -> Any:
    (_, _, _, _, _, _, _, _, _, ticks, aligned, w_at, bias_at,
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
    next(ticks)
    return y.squeeze(-2) if signals else y


def _taken_cast(quick: Quick, x: Any, w: Any, bias: Any, layer: Any) -> Any:
    """The same under autocast, with filters and a bias that are kept in its type."""
    (_, _, _, _, _, _, _, _, dtype, ticks, aligned, w_at, bias_at,
     device, stream_of, allocate, run, signals, packed, preparation) = quick  # fmt: skip
    if _data_ptr(w) != w_at or _current_device() != device or (bias_at is not None and _data_ptr(bias) != bias_at):
        return None
    stream = stream_of()
    cast = None if stream and capturing() else packed.kept_for(version_of(w, bias, dtype), bias, stream)
    if cast is None:
        return None
    prepared_at = 0
    if preparation is not None:
        kept = cast.weights.kept_for(preparation, cast.weights.array._version, stream)
        if kept is None:
            return None
        prepared_at = kept.address
    x = x if x.dtype is dtype else x.to(dtype)
    x_at, y = _data_ptr(x), allocate()
    y_at = _data_ptr(y)
    if x_at & 15 != aligned or not y_at:
        return None
    try:
        run(stream, (x_at, cast.w_at, cast.bias_at, y_at, 0, prepared_at), True)
    except CudaError:
        return None
    next(ticks)
    return y.squeeze(-2) if signals else y


def _taken_outside_graphs(quick: Quick, x: Any, w: Any, bias: Any, layer: Any) -> Any:
    """The same as `_taken` for a layer that is left to PyTorch in CUDA graphs."""
    # the default stream, 0, cannot be captured
    return None if quick[_STREAM_OF]() and capturing() else _taken(quick, x, w, bias, layer)
