"""What `leanconv.torch.fuse` takes a module for: a convolution, what folds into one, what it does not follow."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from leanconv.torch import patterns
from leanconv.torch.fused_layer import FusedConv
from leanconv.torch.modules import _Module as OurModule
from leanconv.torch.squeeze import SqueezeExcite

CONVS = nn.Conv1d, nn.Conv2d, nn.Conv3d
OURS = OurModule, FusedConv, SqueezeExcite
_WRAPPERS = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel, torch.jit.ScriptModule


def has_modes(module: nn.Module) -> bool:
    """Whether what a module computes depends on its mode."""
    return isinstance(module, (*CONVS, *patterns.NORMS, nn.modules.dropout._DropoutNd))


def why_not_followed(module: nn.Module) -> str:
    """Why a trace of a module, which is one of its class's forward, is not what a call of it computes; empty if it
    is."""
    if wraps(module):
        return f"it is a {type(module).__name__}; fuse the model that is in it"
    if patterns.has_hooks(module):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward is not that of its class"
    return "it has a __call__ of its own" if has_own_call(module) else ""


def wraps(module: nn.Module) -> bool:
    """Whether it calls a model in another way: copies of it, or code that was compiled from it."""
    return isinstance(module, _WRAPPERS) or type(module).__name__ == "OptimizedModule"


def has_own_call(module: nn.Module) -> bool:
    """Whether a call does something else than hooks and forward."""
    mine = next(each for each in type(module).__mro__ if "__call__" in vars(each))
    return not mine.__module__.startswith(("torch.nn.", "torch.fx."))


def is_conv(module: nn.Module) -> bool:
    """Whether it computes as PyTorch's convolution does: also one of a class that only makes it in another way, as
    those of torchvision's networks of videos."""
    kind = next((each for each in CONVS if isinstance(module, each)), None)
    if kind is None or "weight" not in module._parameters or not {"forward", "_conv_forward"}.isdisjoint(vars(module)):
        return False
    mine: Any = type(module)
    return (mine.forward, mine._conv_forward) == (kind.forward, kind._conv_forward)


def is_frozen(module: nn.Module) -> bool:
    """Whether it is a batch normalisation of detection models, whose statistics are constants."""
    return type(module).__name__ == "FrozenBatchNorm2d"


def can_fold(module: nn.Module) -> bool:
    """Whether a module scales and shifts channels by numbers that do not depend on its input."""
    if is_frozen(module):
        return all(hasattr(module, name) for name in ("weight", "bias", "running_mean", "running_var", "eps"))
    return type(module) in patterns.NORMS and getattr(module, "running_mean", None) is not None
