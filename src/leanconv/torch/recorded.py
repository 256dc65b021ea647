"""A convolution whose gradient is recorded in Python, for layers of which leanconv takes something.

Autograd's own node calls aten::convolution_backward. A kernel of ours there costs every layer, also those that it hands
on. So it is registered only where somebody calls aten::convolution by another way than torch.nn.functional (see
`registration`). Layers of which nothing is taken keep autograd's node. Explored (7d108f1, a stand-in for the GPU, one
busy core): 70 to 114 µs of the host's time forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
#: whether a tensor is the batch of gradients of ``is_grads_batched=True``
_is_batch: Callable[[Any], bool] = torch._C._functorch.is_legacy_batchedtensor
#: called before aten::convolution_backward is asked for a gradient that is differentiable itself
before_differentiable: list[Callable[[], None]] = []


class Recorded(torch.autograd.Function):
    """``call(x, w, bias)``, of which ``active[-1].backward`` computes the gradients.

    ``given`` are the other arguments of aten::convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, bias: Any, call: Callable[..., Any], given: Any, active: list[Any]) -> Any:
        ctx.save_for_backward(x, w)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.given, ctx.active = given, active
        return call(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        mask = [*ctx.needs_input_grad[:3]]
        active = ctx.active
        given = grad, x, w, ctx.bias_sizes, *ctx.given, mask
        special = torch.compiler.is_compiling() or torch.is_grad_enabled() or _transforms() is not None
        special = special or _is_batch(grad)
        if active and not special and type(grad) is torch.Tensor:
            gradients = active[-1].backward(*given)
        else:
            for each in before_differentiable:
                each()
            gradients = torch.ops.aten.convolution_backward(*given)
        return *gradients, None, None, None


#: `Recorded.apply` without what it does for transforms of torch.func, which never come here.
record: Callable[..., Any] = super(torch.autograd.Function, Recorded).apply
