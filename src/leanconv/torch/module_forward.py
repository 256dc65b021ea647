"""``forward`` of ``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d`` while `enable` lasts: PyTorch's, with fewer look-ups.

A module keeps its parameters in a dictionary. PyTorch's forward reads ``self.weight`` and ``self.bias``, which Python
finds only after it has failed to. Explored (PyTorch 2.13, one core, 2026-11-24, 25db771): that is 0.5 of the 0.56 µs of
each look-up, and forward down to the function takes 0.5 µs in place of 1.5.
What is saved so pays for what `functions` asks of each layer. Whatever is not as PyTorch makes it, such as a class of
its own, a padding mode, a parametrization or a replaced ``_conv_forward``, goes to PyTorch's forward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import forward_ad

from leanconv.torch import functions
from leanconv.torch.layers import conv_precision
from leanconv.torch.switches import autocast_type, compiling, dispatch_modes, function_modes, grad_enabled

F, KINDS, _Tensor = torch.nn.functional, functions.KINDS, torch.Tensor


def _forward(kind: Any, function: functions.Function) -> Callable[..., Any]:
    """The forward of a class of modules, which computes what that function does."""
    original, inner = kind.forward, kind._conv_forward
    name, ours, otherwise, named = function.name, function.replacement, functions.otherwise, F.__dict__

    # NOTE: TorchScript reads the source of what is wrapped
    @wraps(original)
    def forward(self: Any, input: Any) -> Any:
        # torch.compile follows PyTorch's own
        if compiling() or type(self) is not kind or kind._conv_forward is not inner:
            return original(self, input)
        own = self.__dict__
        try:
            parameters, mode = own["_parameters"], own["padding_mode"]
            weight, bias = parameters["weight"], parameters["bias"]
            options = own["stride"], own["padding"], own["dilation"], own["groups"]
        except KeyError:
            return original(self, input)
        if mode != "zeros" or "_conv_forward" in own or "weight" in own or "bias" in own:
            return original(self, input)
        if named[name] is not ours:  # somebody else's
            return named[name](input, weight, bias, *options)
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
                    and (quick[6] is None or quick[6] == conv_precision())
                    and (quick[7] is None or quick[7] is autocast_type())
                )
        except (TypeError, RuntimeError, AttributeError, IndexError):
            known = False
        if known:
            y = quick[0](quick, input, weight, bias, layer)
            if y is not None:
                return y
        return otherwise(function, input, weight, bias, options)

    return forward


_FORWARDS: list[tuple[Any, Any, Any]] = [
    (kind, kind.forward, _forward(kind, each))
    for kind, name in ((torch.nn.Conv1d, "conv1d"), (torch.nn.Conv2d, "conv2d"), (torch.nn.Conv3d, "conv3d"))
    for each in functions.FUNCTIONS
    if each.name == name
]


def install() -> None:
    """Put ours in place of PyTorch's, unless somebody has replaced them already."""
    for kind, original, ours in _FORWARDS:
        if kind.forward is original:
            kind.forward = ours


def remove() -> None:
    """Put PyTorch's back."""
    for kind, original, ours in _FORWARDS:
        if kind.forward is ours:
            kind.forward = original
