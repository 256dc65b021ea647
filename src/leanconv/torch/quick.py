"""What computes a call of a layer that is as the one before, and gradients that are wanted as before.

A call is a tuple that begins with a function of itself, images, filters, bias and the layer, and goes on with what such
a call is like (`leanconv.torch.decided.Layer.known`). So a layer brings little memory of its own that the host must
fetch: a network has more than its caches. None of these keeps a layer, or the memory of a tensor. The function returns
None where the long way must decide.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from leanconv.call.gpu_call import GpuCall, PreparedCall
from leanconv.runtime.driver import CudaError
from leanconv.torch.deciding import Choice, Deciding, current, left_of
from leanconv.torch.layers import precision_asked
from leanconv.torch.packed import lowered, version_of
from leanconv.torch.recorded import Gradients, RecordedCall, record
from leanconv.torch.switches import alike, capturing, dispatch_modes, grad_enabled, saved_hooks

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
    if launch is None or launch.scratch is not None:
        return None
    copies, order, parts = launch.copies, launch.order, (launch.device, launch.stream, launch.allocate, launch.run)
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
    return y.squeeze_(-2) if signals else y


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
    return y.squeeze_(-2) if signals else y


def _taken_outside_graphs(quick: Quick, x: Any, w: Any, bias: Any, layer: Any) -> Any:
    """The same as `_taken` for a layer that is left to PyTorch in CUDA graphs."""
    # the default stream, 0, cannot be captured
    return None if quick[_STREAM_OF]() and capturing() else _taken(quick, x, w, bias, layer)


def launcher(call: Any, signals: bool) -> Callable[[int, int, int], Any] | None:
    """A function of three addresses, the last one that of a bias or 0, that launches a ready call of a layer on the GPU
    that is current, and returns the result; or None where the long way must compute it. None where a call is more."""
    launch = call.quick() if isinstance(call, GpuCall) else None
    if launch is None or launch.copies:
        return None
    _, _, device, stream_of, allocate, run, scratch, prepared_offset = launch

    def compute(first: int, second: int, bias: int) -> Any:
        if _current_device() != device:
            return None
        y, memory, at, prepared_at = allocate(), None, 0, 0
        if scratch is not None:
            memory = scratch()  # bound to a name until the launch: freed earlier, it could be reused
            at = _data_ptr(memory)
            if not at:
                return None
            if prepared_offset is not None:
                prepared_at = at + prepared_offset
        y_at = _data_ptr(y)
        if not (first and second and y_at):
            return None
        try:
            run(stream_of(), (first, second, bias, y_at, at, prepared_at), True)
        except CudaError:
            return None
        return y.squeeze_(-2) if signals else y

    return compute


def recorded_taken(layer: Any, call: RecordedCall, trains: bool) -> Quick:
    """A layer whose gradient is recorded in Python. ``trains``: whether its filters require one, which a guard of
    images alone does not see."""
    memory = layer.memory if layer.call is not None and layer.captured is None else (None, None, None)
    return _recorded_taken, *layer.known(), (layer.captured or layer.line).ticks, *memory, call, trains


def _recorded_taken(quick: Quick, x: Any, w: Any, bias: Any, layer: Any) -> Any:
    if saved_hooks(True) is not None or capturing():
        return None
    _, _, _, _, _, _, _, _, dtype, ticks, aligned, w_at, bias_at, call, trains = quick
    # where PyTorch computes the layer itself, memory does not matter
    if w.requires_grad is not trains or (w_at is not None and _data_ptr(w) != w_at):
        return None
    if bias_at is not None and _data_ptr(bias) != bias_at:
        return None
    if dtype is not None:
        x, w, bias = lowered(x, dtype), lowered(w, dtype), lowered(bias, dtype)
    if aligned is not None and _data_ptr(x) & 15 != aligned:
        return None
    next(ticks)
    return record(x, w, bias, call)


def gradients(
    patch: Deciding, choices: Sequence[Choice], tensors: tuple[Any, Any, Any], given: Any, mask: tuple[bool, ...],
    otherwise: Callable[..., Any],
) -> Gradients | None:  # fmt: skip
    """What computes gradients where ``tensors``, those of the result, images and filters, are alike these.

    ``given`` are the other arguments of aten::convolution, ``mask`` says which gradients are wanted, and ``otherwise``
    is aten::convolution_backward, for what ``choices`` leave to PyTorch. None where nothing is launched so.
    """
    is_alike, axes, transposed, left = alike(*tensors), tensors[0].dim() - 2, given[3], left_of(choices, mask)
    ours = [wanted and each.call is not None for wanted, each in zip(mask, choices, strict=False)]
    launchers = [launcher(each.ready, axes == 1) if mine else None for each, mine in zip(choices, ours, strict=True)]
    if is_alike is None or any([mine and each is None for each, mine in zip(launchers, ours, strict=True)]):
        return None
    (launch_x, launch_w), is_left = launchers, any(left)
    asked, word = precision_asked() if tensors[0].dtype is torch.float32 else (None, None)
    grad_aligned, x_aligned, w_aligned = (_data_ptr(each) & 15 for each in tensors)
    counts = [each.line.ticks for wanted, each in zip(mask, choices, strict=False) if wanted]
    wanted, summed, patch_ref = (*mask, False), (0, *range(2, axes + 2)), weakref.ref(patch)

    def compute(grad: Any, x: Any, w: Any, now: tuple[bool, ...]) -> tuple[Any, ...] | None:
        decides = current()
        if now != wanted or decides is None or decides is not patch_ref() or grad_enabled() or dispatch_modes():
            return None
        try:
            if not is_alike(grad, x, w) or (asked is not None and asked() != word):
                return None
        except RuntimeError:  # which one of the two that tell it raises
            return None
        grad_at, x_at, w_at = _data_ptr(grad), _data_ptr(x), _data_ptr(w)
        aligned = grad_at & 15 == grad_aligned and x_at & 15 == x_aligned and w_at & 15 == w_aligned
        if not aligned or capturing():
            return None
        dx = dw = db = None
        if is_left:
            sizes = [grad.shape[1]] if left[2] else None
            dx, dw, db = otherwise(grad, x, w, sizes, *given, left)
        elif mask[2]:
            db = grad.sum(summed)
        if launch_x is not None:
            dx = launch_x(grad_at, w_at, 0)
            if dx is None:
                return None
        if launch_w is not None:
            dw = launch_w(grad_at, x_at, 0) if transposed else launch_w(x_at, grad_at, 0)
            if dw is None:
                return None
        decides.layers.trained(w)
        for each in counts:
            next(each)
        return dx, dw, db, None

    return compute
