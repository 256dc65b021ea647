"""What PyTorch is set to, which each call asks, and its convolution by the shortest way through the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._device import DeviceContext

#: whose autocast matters; tests, which have no GPU, patch the CPU's convolutions
_KIND = "cuda"

compiling = torch.compiler.is_dynamo_compiling
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_autocast: Callable[[str], bool] = torch.is_autocast_enabled
#: the type in which autocast computes convolutions on the GPU, where it is known to be on
autocast_type: Callable[[], Any] = partial(torch.get_autocast_dtype, _KIND)
tracing: Callable[[], Any] = torch._C._get_tracing_state
grad_enabled: Callable[[], bool] = torch.is_grad_enabled
_benchmark: Callable[[], bool] = torch._C._get_cudnn_benchmark
_deterministic: Callable[[], bool] = torch._C._get_cudnn_deterministic
_always_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
uses_cudnn: Callable[[], bool] = torch._C._get_cudnn_enabled
_convolution: Callable[..., Any] = torch._convolution
_cudnn_convolution: Callable[..., Any] = torch.cudnn_convolution
_backend: Callable[..., Any] = torch._C._select_conv_backend
#: what is called for each tensor that autograd saves; None where nothing is
saved_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_is_tracing: None
)
#: whether a tensor is one for us
on_gpu: Callable[[Any], bool] = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def capturing() -> bool:
    """Whether the current stream captures a CUDA graph. PyTorch raises where there is no driver: so ask it only where
    something runs on a GPU.
    """
    return torch.cuda.is_initialized() and torch._C._cuda_isCurrentStreamCapturing()


def without_axis(y: Any, axis: int) -> Any:
    """A result that nobody else has, without an axis of length 1.

    A view that is made where gradients are off could not be changed in place where they are on.
    """
    if grad_enabled() or compiling() or tracing() is not None or dispatch_modes() or transforms() is not None:
        return y.squeeze(axis)
    return y.squeeze_(axis)


def is_default_device_alone() -> bool:
    """Whether the one mode that sees functions is that of `torch.set_default_device`, which does nothing here.

    With a mode on, each attribute of a tensor costs a call in Python; so ask under ``torch._C.DisableTorchFunction``.
    """
    return function_modes() == 1 and type(_mode_at(0)) is DeviceContext


def left_to_pytorch(x: Any, w: Any, bias: Any, given: Any, tf32: bool) -> Any:
    """aten::convolution as PyTorch's own kernel computes it. It is found sooner by its name than by its key."""
    deterministic = _deterministic() or _always_deterministic()
    return _convolution(x, w, bias, *given, _benchmark(), deterministic, uses_cudnn(), tf32)


def left_to_cudnn(x: Any, w: Any, given: tuple[Any, ...], tf32: bool) -> Any:
    """The same where it is a call of cuDNN and nothing else, ``given`` by `of_cudnn`; ask `uses_cudnn` before."""
    return _cudnn_convolution(x, w, *given, _benchmark(), _deterministic() or _always_deterministic(), tf32)


def quick_left(known: tuple[Any, ...], ticks: Any, given: Any, tf32: bool, of_cudnn: bool, aligned: bool) -> Any:
    """One of these two for a layer, whose calls ``ticks`` counts: see `leanconv.torch.decided`.

    ``aligned``: whether it is left with images that begin at a multiple of 16 bytes.
    """
    run = _left_unaligned if not aligned else _left_without_bias if of_cudnn else _left
    return run, *known, ticks, tf32, *given


def _left(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Any) -> Any:
    _, _, _, _, _, _, _, _, _, ticks, tf32, stride, padding, dilation, transposed, more, groups = quick
    next(ticks)
    return _convolution(
        x, w, bias, stride, padding, dilation, transposed, more, groups,
        _benchmark(), _deterministic() or _always_deterministic(), uses_cudnn(), tf32,
    )  # fmt: skip


def _left_unaligned(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Any) -> Any:
    """Aligned images may be taken, which the guard does not tell from others."""
    return _left(quick, x, w, bias, layer) if x.data_ptr() & 15 else None


def _left_without_bias(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Any) -> Any:
    if not uses_cudnn():
        return _left(quick, x, w, bias, layer)
    _, _, _, _, _, _, _, _, _, ticks, tf32, stride, padding, dilation, _, _, groups = quick
    next(ticks)
    deterministic = _deterministic() or _always_deterministic()
    return _cudnn_convolution(x, w, padding, stride, dilation, groups, _benchmark(), deterministic, tf32)


def quick_recorded(
    known: tuple[Any, ...],
    ticks: Any,
    packed: Any,
    refresh: Callable[[Any], None],
    trains: bool,
    tf32: bool,
    given: Any,
) -> tuple[Any, ...]:
    """One for a layer whose gradient is recorded, and which is left forward and backward outside of CUDA graphs.

    ``trains``: whether its filters require a gradient, which the guard, of images alone, does not see. Where filters
    are ``packed``, ``refresh`` drops those of the layer, for passes without a gradient.
    """
    return _left_recorded, *known, ticks, packed, refresh, trains, tf32, *given


def _left_recorded(quick: tuple[Any, ...], x: Any, w: Any, bias: Any, layer: Any) -> Any:
    if saved_hooks(True) is not None or capturing():
        return None
    (_, _, _, _, _, _, _, _, _, ticks, packed, refresh, trains, tf32,
     stride, padding, dilation, transposed, more, groups) = quick  # fmt: skip
    if w.requires_grad is not trains:
        return None
    if packed:
        refresh(w)
    next(ticks)
    return _convolution(
        x, w, bias, stride, padding, dilation, transposed, more, groups,
        _benchmark(), _deterministic() or _always_deterministic(), uses_cudnn(), tf32,
    )  # fmt: skip


def autocast_dtype() -> Any:
    """The type in which autocast computes convolutions on the GPU; None where it is off."""
    return autocast_type() if _autocast(_KIND) else None


def address(tensor: Any) -> int | None:
    """Where its memory is; None for what has none, such as a tensor that has outlived a transform of torch.func."""
    try:
        return int(tensor.data_ptr())
    except RuntimeError:
        return None


def is_lazy(tensor: Any) -> bool:
    """Whether a tensor, or None, has other values than its memory: negated, conjugated, or zeros without memory."""
    return tensor is not None and (tensor.is_neg() or tensor.is_conj() or not address(tensor))


def materialized(tensor: Any) -> Any:
    """A real tensor whose memory has its values; the same one, unless it `is_lazy`."""
    if tensor.is_neg():
        return tensor.resolve_neg()
    return tensor if address(tensor) else torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def alike(*tensors: Any) -> Callable[..., bool] | None:
    """A function that says whether tensors are as these are now: class, type, device, sizes, strides, and all that
    PyTorch's dispatcher goes by, which are also modes, autocast, transforms of torch.func and tracers.

    That is one call of torch.compile's guards; None where this PyTorch has none such. Those of PyTorch 2.13 overlook
    modes that ignore what torch.compile does, so ask `dispatch_modes` before; and they end the process where a tensor
    is nested, which has no sizes. To read sizes and strides in Python and to compare them took 7 to 9 of the 12 µs that
    a layer cost in eager networks.
    Explored: H200, 2026-11-24, revision 5635154.
    """
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        sizes, strides = [[*each.shape] for each in tensors], [[*each.stride()] for each in tensors]
        at = str((sizes, strides))
        if len(_guards) >= _MOST_GUARDS:
            _guards.clear()
        known = _guards.setdefault(at, [])
        for check in known:
            if check(*tensors) is True:
                return check
        made: Callable[..., bool] = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        if made(*tensors) is not True:
            return None
        known.append(made)
        return made
    except Exception:
        return None


#: by sizes and strides: layers that are called alike ask the same object, which the host then has at hand
_guards: dict[str, list[Callable[..., bool]]] = {}
_MOST_GUARDS = 1024


def of_cudnn(x: Any, w: Any, bias: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Padding, stride, dilation and groups, if all that PyTorch's convolution does is to call cuDNN's."""
    stride, padding, dilation, transposed, output_padding, groups = given
    if bias is not None or transposed or x.dim() not in (4, 5) or x.dtype is not w.dtype:
        return None
    backend = _backend(x, w, None, stride, padding, dilation, transposed, output_padding, groups, None)
    return (padding, stride, dilation, groups) if backend.name == "Cudnn" else None
