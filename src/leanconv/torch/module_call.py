"""A call of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d`` while `enable` lasts: PyTorch's, with fewer steps.

PyTorch goes through four functions from the call of a module to its convolution, and looks the parameters up by name,
which Python finds only after it has failed to. What is saved so pays for what `functions` asks of each layer.
Whatever is not as PyTorch makes it, such as a class of its own, hooks, a padding mode, a parametrization or a replaced
``forward``, goes PyTorch's way; so do modules while they are traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module

from leanconv.torch import functions
from leanconv.torch.switches import autocast_type, compiling, dispatch_modes, function_modes, grad_enabled, tracing

F, KINDS, _Tensor, Module = torch.nn.functional, functions.KINDS, torch.Tensor, torch.nn.Module
#: what `torch.nn.Module` asks before it calls forward at once
_before, _after = module._global_forward_pre_hooks, module._global_forward_hooks
_before_backward, _after_backward = module._global_backward_pre_hooks, module._global_backward_hooks
#: what ``Module.__call__`` is, unless somebody has replaced it
_PYTORCHS = torch.nn.Module._wrapped_call_impl


def _call(kind: Any, function: functions.Function) -> Callable[..., Any]:
    """The call of a class of modules, which computes what that function does."""
    module_call, call_impl, forward, inner = _PYTORCHS, torch.nn.Module._call_impl, kind.forward, kind._conv_forward
    name, ours, otherwise, named = function.name, function.replacement, functions.otherwise, F.__dict__

    @wraps(module_call)
    def call(self: Any, *given: Any, **more: Any) -> Any:
        if type(self) is not kind:
            return super(kind, self).__call__(*given, **more)
        # torch.compile follows PyTorch's own, and torch.fx replaces it
        if (
            compiling()
            or Module.__call__ is not module_call
            or Module._call_impl is not call_impl
            or kind.forward is not forward
            or kind._conv_forward is not inner
        ):
            return Module.__call__(self, *given, **more)
        own = self.__dict__
        try:
            (input,) = given
            parameters, mode = own["_parameters"], own["padding_mode"]
            weight, bias = parameters["weight"], parameters["bias"]
            options = own["stride"], own["padding"], own["dilation"], own["groups"]
            hooked: Any = (
                own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"]
                or own["_backward_pre_hooks"] or _after or _before or _after_backward or _before_backward
            )  # fmt: skip
        except (KeyError, ValueError):
            return module_call(self, *given, **more)
        if (
            hooked
            or more
            or mode != "zeros"
            or named[name] is not ours  # but somebody else's
            or "forward" in own
            or "_conv_forward" in own
            or "weight" in own
            or "bias" in own
            or "_compiled_call_impl" in own
        ):
            return module_call(self, *given, **more)
        # NOTE: what follows is what `functions` does first, to the word. Explored (PyTorch 2.13, one core whose caches
        # are evicted between layers, 2026-11-26, cec6c92): to call it there takes 1 µs more
        known = False
        try:
            layer = functions.latest.get(id(weight))
            if (
                layer is not None
                and type(input) is _Tensor
                and not input.is_nested
                and not function_modes()
                and not dispatch_modes()
                and forward_ad._current_level < 0
            ):
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
        # a trace has the names of modules
        return module_call(self, input) if tracing() else otherwise(function, input, weight, bias, options)

    return call


_CALLS: list[tuple[Any, Any]] = [
    (kind, _call(kind, each))
    for kind, name in ((torch.nn.Conv1d, "conv1d"), (torch.nn.Conv2d, "conv2d"), (torch.nn.Conv3d, "conv3d"))
    for each in functions.FUNCTIONS
    if each.name == name
]


def install() -> None:
    """Put ours in place of PyTorch's, unless somebody has a call of their own."""
    for kind, ours in _CALLS:
        if kind.__call__ is _PYTORCHS and Module._call_impl.__module__ == module.__name__:
            kind.__call__ = ours


def remove() -> None:
    """Put PyTorch's back."""
    for kind, ours in _CALLS:
        if kind.__dict__.get("__call__") is ours:
            del kind.__call__
