"""The functions of torch.nn.functional while `enable` lasts: layers are decided before PyTorch's dispatcher is asked.

A kernel in Python below the dispatcher costs several µs, whatever it does. So `conv1d`, `conv2d`, `conv3d` and their
transposed look a layer up first, by its filters, its options and the shape of its images:

- What is left to PyTorch goes to aten::_convolution, which is what PyTorch's own kernel of aten::convolution calls. The
  gradient is recorded as before, where it is left to PyTorch too.
- What leanconv takes, and needs no gradient, is a ready call. Filters that have not changed are packed once; under
  autocast, cast once.
- What leanconv takes, forward or backward, and needs a gradient, is a `Recorded`, if it saves enough to be worth it, or
  if a CUDA graph captures it.
- Everything else goes to PyTorch's function, so to the kernels that `registration` has registered: modes, tracers,
  transforms of torch.func, classes of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.jit import _builtins

from leanconv.torch.decided import Layer
from leanconv.torch.deciding import active
from leanconv.torch.layers import tf32_allowed
from leanconv.torch.switches import (
    address,
    any_autocast,
    autocast_dtype,
    autocast_type,
    compiling,
    dispatch_modes,
    function_modes,
    grad_enabled,
    is_default_device_alone,
    is_lazy,
    on_gpu,
    tracing,
    transforms,
)

F = torch.nn.functional
_Tensor = torch.Tensor
#: classes of parameters whose functions nobody replaces
KINDS = _Tensor, torch.nn.Parameter
#: see `_shared`
_numbers: dict[Any, Any] = {}
_MOST_NUMBERS = 1024
#: the layers that were called last, of the last one of `active`, by the identity of their filters
latest: dict[int, Layer] = {}


def switched() -> None:
    """Tell calls that `active` has changed."""
    global latest
    latest = active[-1].layers.latest if active else {}


class Function:
    """One of the functions: what it takes, and PyTorch's own."""

    def __init__(self, name: str, axes: int, transposed: bool) -> None:
        self.name, self.axes, self.transposed = name, axes, transposed
        self.original = getattr(F, name)
        self.convolve = _convolve(self)
        self.replacement = _replacement(self)

    def ready(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of tensors, packed filters and a bias, of a ready call with images."""
        if self.axes == 1:
            return lambda x, w, bias: call(x.unsqueeze(-2), w, bias, None).squeeze_(-2)
        return lambda x, w, bias: call(x, w, bias, None)

    def given(
        self, input: Any, weight: Any, bias: Any, stride: Any = 1, padding: Any = 0, *more: Any
    ) -> tuple[Any, ...] | None:
        """The arguments of aten::convolution besides tensors; None for what it does not take as it is."""
        names = ("output_padding", "groups", "dilation") if self.transposed else ("dilation", "groups")
        if type(weight) not in KINDS or (bias is not None and type(bias) not in KINDS):
            return None
        if len(more) > len(names) or input.dim() != self.axes + 2 or weight.dim() != self.axes + 2:
            return None
        if input.is_complex() or weight.is_complex() or None in (address(input), address(weight)):
            return None
        if input.is_neg() or input.is_conj() or is_lazy(weight) or is_lazy(bias):
            return None
        rest = {"output_padding": 0, "groups": 1, "dilation": 1} | dict(zip(names, more, strict=False))
        numbers = [_each(each, self.axes) for each in (stride, padding, rest["dilation"], rest["output_padding"])]
        if None in numbers or type(rest["groups"]) is not int:
            return None
        return *map(_shared, numbers[:3]), self.transposed, _shared(numbers[3]), rest["groups"]


def _each(value: Any, axes: int) -> tuple[int, ...] | None:
    """An option as one number for each axis; None for words and anything strange."""
    if type(value) is int:
        return (value,) * axes
    if type(value) is tuple and len(value) in (1, axes) and all([type(each) is int for each in value]):
        return value * axes if len(value) == 1 else value
    return None


def _shared(numbers: Any) -> Any:
    """The same numbers, in all layers the same object: so the host has it at hand."""
    if len(_numbers) >= _MOST_NUMBERS:
        _numbers.clear()
    return _numbers.setdefault(numbers, numbers)


def _convolve(function: Function) -> Callable[..., Any]:
    """What a function computes while something is active; the modules of `module_call` call it too."""

    def convolve(input: Any, weight: Any, bias: Any, options: tuple[Any, ...], ignored: bool = False) -> Any:
        # NOTE: what a call reads here for the first time since the layer before costs more than what it computes: in a
        # network nothing of it is in the processor's nearest caches
        known = False
        try:
            layer = latest.get(id(weight))
            if (
                layer is not None
                and type(input) is _Tensor
                and not input.is_nested  # of whose sizes TensorGuards would end the process
                and (ignored or not function_modes())
                and not dispatch_modes()  # some of which they overlook
                and forward_ad._current_level < 0
            ):
                # whether gradients are enabled no guard sees
                recorded = grad_enabled() and (
                    input.requires_grad or weight.requires_grad or (type(bias) in KINDS and bias.requires_grad)
                )
                quick: Any = layer.recorded if recorded else layer.quick
                known = (
                    quick is not None
                    and quick[1] is function
                    and quick[2] is (bias is not None)
                    and options == quick[3]
                    and (
                        (quick[4](input) and (bias is None or type(bias) in KINDS))
                        if quick[5]
                        else (quick[4](input, weight) if bias is None else quick[4](input, weight, bias))
                    )
                    and (quick[6] is None or quick[6]() == quick[7])
                    and (quick[8] is None or quick[8] is autocast_type())
                )
        except (TypeError, RuntimeError, AttributeError, IndexError):
            known = False
        if known:
            y = quick[0](quick, input, weight, bias, layer)
            if y is not None:
                return y
        return otherwise(function, input, weight, bias, options, ignored)

    return convolve


def otherwise(
    function: Function, input: Any, weight: Any, bias: Any, options: tuple[Any, ...], ignored: bool = False
) -> Any:
    """A call that is not as the one before."""
    original = function.original
    if not active or (function_modes() and not ignored) or forward_ad._current_level >= 0:
        plain = type(input) is torch.Tensor and type(weight) in KINDS and (bias is None or type(bias) in KINDS)
        if plain and not ignored and active and is_default_device_alone():
            with torch._C.DisableTorchFunction():
                return function.convolve(input, weight, bias, options, True)
        return original(input, weight, bias, *options)
    try:
        layers = active[-1].layers
        if (
            type(input) is not torch.Tensor
            or (bias is not None and (type(bias) not in KINDS or bias.layout is not torch.strided))
            or not on_gpu(input)
            or dispatch_modes()
            or transforms() is not None
            or tracing() is not None
        ):
            return original(input, weight, bias, *options)
        dtype = autocast_dtype() if any_autocast() else None
        lies = input.shape, input.stride(), input.data_ptr() & 15
        key = id(weight), function, *lies, input.dtype, options, tf32_allowed(), dtype
        layer = layers.latest.get(id(weight))
        if layer is None or layer.key != key or layer.weight_ref() is not weight:
            layer = layers.seen(key, weight)
    except (TypeError, RuntimeError, AttributeError, IndexError):
        return original(input, weight, bias, *options)
    if layer is None:
        layer = layers.decide(key, function, input, weight, bias)
        if layer is None:
            return original(input, weight, bias, *options)
    known = layer.knows(input, weight, bias)
    if not known and (dtype is not None or not any_autocast()):
        layer.look(input, weight, bias)
    if not grad_enabled() or not (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return layers.compute(layer, input, weight, bias, known)
    return layers.record(layer, input, weight, bias)


def _replacement(function: Function) -> Callable[..., Any]:
    original, convolve = function.original, function.convolve

    def convolution(input: Any, weight: Any, bias: Any = None, *options: Any, **named: Any) -> Any:
        if compiling() or named:
            return original(input, weight, bias, *options, **named)
        return convolve(input, weight, bias, options)

    # it is found, and so pickled, as PyTorch's
    convolution.__name__ = convolution.__qualname__ = function.name
    convolution.__module__ = F.__name__
    convolution.__doc__ = original.__doc__
    return convolution


FUNCTIONS = [
    Function(name, axes, transposed)
    for name, axes, transposed in (
        ("conv1d", 1, False),
        ("conv2d", 2, False),
        ("conv3d", 3, False),
        ("conv_transpose1d", 1, True),
        ("conv_transpose2d", 2, True),
        ("conv_transpose3d", 3, True),
    )
]


def install() -> None:
    """Put ours in place of PyTorch's functions, unless somebody has replaced them already."""
    for each in FUNCTIONS:
        if getattr(F, each.name) is each.original:
            # TorchScript compiles calls of either as the operator
            _builtins._register_builtin(each.replacement, f"aten::{each.name}")
            setattr(F, each.name, each.replacement)


def remove() -> None:
    """Put PyTorch's functions back."""
    for each in FUNCTIONS:
        if getattr(F, each.name) is each.replacement:
            setattr(F, each.name, each.original)
