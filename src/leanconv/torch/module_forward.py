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
from operator import itemgetter
from typing import Any

import torch

from leanconv.torch import functions
from leanconv.torch.switches import compiling

F = torch.nn.functional
_OPTIONS = itemgetter("stride", "padding", "dilation", "groups")


def _forward(kind: Any, function: functions.Function) -> Callable[..., Any]:
    """The forward of a class of modules, which calls that function."""
    original, inner = kind.forward, kind._conv_forward
    name, ours, convolve, named = function.name, function.replacement, function.convolve, F.__dict__

    # NOTE: TorchScript reads the source of what is wrapped
    @wraps(original)
    def forward(self: Any, input: Any) -> Any:
        # torch.compile follows PyTorch's own
        if compiling() or type(self) is not kind or kind._conv_forward is not inner:
            return original(self, input)
        own = self.__dict__
        try:
            parameters, mode = own["_parameters"], own["padding_mode"]
            weight, bias, options = parameters["weight"], parameters["bias"], _OPTIONS(own)
        except KeyError:
            return original(self, input)
        if mode != "zeros" or "_conv_forward" in own or "weight" in own or "bias" in own:
            return original(self, input)
        if named[name] is not ours:  # somebody else's
            return named[name](input, weight, bias, *options)
        return convolve(input, weight, bias, options)

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
